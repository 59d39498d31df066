"""The bundled weights as timm's pretrained configurations."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch.nn as nn

from affdiv_zoo.weights import path_of, published, released

# What changes the map but not the weights' shapes: timm would load them without a word.
_MAP_KEYWORDS = ("correction", "center", "scale", "attention", "embed_correction", "norm", "act", "act_layer")


def released_cfgs(cfg: Callable[..., dict[str, Any]], *architectures: str) -> dict[str, dict[str, Any]]:
    """timm configurations of the bundled weights of some architectures, and one without weights for each.

    The file in the package is the source. The Hub is named only for weights that were published, with the commit, so
    that nothing is ever fetched from a name that somebody else might take.

    Args:
        cfg: Makes a configuration from keywords.
        *architectures: Names of models.

    Returns:
        Configurations by ``architecture.tag``, for ``timm.models.generate_default_cfgs``.
    """
    cfgs = {}
    for name, record in sorted(released().items()):
        if record["architecture"] in architectures:
            own = {k: tuple(v) if isinstance(v, list) else v for k, v in record["pretrained_cfg"].items()}
            own.update(file=str(path_of(name)), license=record["license"])
            if name in published():
                own["hf_hub_id"] = "{repo_id}@{revision}".format(**published()[name])
            cfgs[name] = cfg(**own)
    return cfgs | {f"{architecture}.untrained": cfg() for architecture in architectures}


def warn_of_other_map(cls: type[nn.Module], variant: str, pretrained: bool, kwargs: dict[str, Any]) -> None:
    """Warns where bundled weights would be loaded into another map than the one they were trained with.

    Args:
        cls: The model's class, whose defaults are what the weights were trained with.
        variant: The model's name.
        pretrained: As in ``timm.create_model``.
        kwargs: The entry point's keywords.
    """
    cfg = kwargs.get("pretrained_cfg")
    own = kwargs.get("pretrained_cfg_overlay") or {}
    if not pretrained or (cfg and not isinstance(cfg, str)) or "file" in own or "state_dict" in own:
        return  # somebody else's weights
    for base in cls.__mro__:
        for name, parameter in inspect.signature(base.__init__).parameters.items():
            if name in _MAP_KEYWORDS and name in kwargs and parameter.default is not inspect.Parameter.empty:
                if kwargs[name] != parameter.default:
                    warnings.warn(
                        f"{name}={kwargs[name]!r}: the pretrained weights of {variant} were trained with "
                        f"{name}={parameter.default!r}; they are loaded, but the net computes something else",
                        stacklevel=5,
                    )
                kwargs = {k: v for k, v in kwargs.items() if k != name}  # the first class that has it decides
