"""One folder for timm and transformers: ``config.json`` with both libraries' keys, ``model.safetensors`` with timm's.

``config.json`` is what timm writes (``architecture``, ``num_classes``, ``model_args``, ``pretrained_cfg``, perhaps
``label_names``) and, beside it, what transformers needs to choose the class (``model_type``, ``architectures``,
``auto_map``). Preprocessing is in ``pretrained_cfg``, as in all of timm's repositories. ``modeling_affdiv.py`` is for
people without this package: ``trust_remote_code=True`` then tells them to install it.

Nothing here imports transformers.
"""

import copy
import importlib.resources
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn as nn
from timm.models._hub import save_for_hf

from affdiv_zoo._files import write_text

__all__ = [
    "REMOTE_CODE_FILE",
    "ChangedModelError",
    "complete_config",
    "complete_folder",
    "remote_code",
    "save_pretrained",
]

REMOTE_CODE_FILE = "modeling_affdiv.py"

MODEL_TYPE = "affdiv"

# The Auto classes, and what each of them loads.
AUTO_MAP = {
    "AutoConfig": "AffDivConfig",
    "AutoModel": "AffDivModel",
    "AutoModelForImageClassification": "AffDivForImageClassification",
    "AutoBackbone": "AffDivBackbone",
}


class ChangedModelError(ValueError):
    """A model is no longer what its architecture and keywords make."""


def complete_config(config: dict[str, Any]) -> dict[str, Any]:
    """The ``config.json`` of timm with transformers' keys beside its own.

    Args:
        config: What timm, or this function, wrote: a mapping with an ``architecture``.

    Returns:
        A copy with ``model_type``, ``architectures``, ``auto_map`` and ``image_processor_type``. ``num_classes`` stays
        at the top only: transformers' TimmWrapper passes it on, and would do it twice.

    Raises:
        ValueError: There is no ``architecture``, so timm did not write it.
    """
    if not isinstance(config.get("architecture"), str):
        raise ValueError(
            f"config has no 'architecture' among its keys {sorted(config)}: it is not a timm model's config.json"
        )
    config = copy.deepcopy(config)
    model_args = config.get("model_args") or {}
    num_classes = model_args.pop("num_classes", None)
    if num_classes is not None:
        config.setdefault("num_classes", num_classes)
    if not model_args:
        config.pop("model_args", None)
    config["model_type"] = MODEL_TYPE
    head = config.get("num_classes") != 0
    if not config.get("architectures"):
        config["architectures"] = [AUTO_MAP["AutoModelForImageClassification" if head else "AutoModel"]]
    module = REMOTE_CODE_FILE.removesuffix(".py")
    config["auto_map"] = {auto: f"{module}.{name}" for auto, name in AUTO_MAP.items()}
    config["image_processor_type"] = "TimmWrapperImageProcessor"
    return config


def remote_code() -> str:
    """The text of ``modeling_affdiv.py``, which stands beside the weights."""
    return (importlib.resources.files(__package__) / "remote_code" / REMOTE_CODE_FILE).read_text(encoding="utf-8")


def complete_folder(directory: str | Path) -> None:
    """Makes a folder that timm wrote one for both libraries: completes ``config.json``, adds ``modeling_affdiv.py``.

    Args:
        directory: With timm's ``config.json``.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It is not timm's.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"directory={str(directory)!r} has no config.json")
    config = complete_config(json.loads(path.read_text(encoding="utf-8")))
    write_text(path.with_name(REMOTE_CODE_FILE), remote_code())
    write_text(path, json.dumps(config, indent=2) + "\n")


def save_pretrained(
    model: nn.Module,
    directory: str | Path,
    *,
    label_names: Sequence[str] | None = None,
    model_args: dict[str, Any] | None = None,
) -> None:
    """Writes a timm model as a folder for both libraries; its other files, if it exists, stay.

    Args:
        model: What ``timm.create_model`` made. (A converted one goes through
            :func:`affdiv_zoo.convert.save_converted` and :func:`complete_folder`.)
        directory: Made if it does not exist.
        label_names: Of the classes, in order.
        model_args: The keywords that ``timm.create_model`` was given; timm versions before 1.0.30 do not remember them.

    Raises:
        ChangedModelError: The model was changed after timm made it; a ValueError.
        ValueError: timm did not make the model, or there is not one name per class.
    """
    labels = timm_labels(model, label_names)
    directory = Path(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        save_for_hf(model, temporary, model_config=labels, model_args=model_args, safe_serialization=True)
        complete_folder(temporary)
        _check_rebuilt(model, json.loads((temporary / "config.json").read_text(encoding="utf-8")))
        directory.mkdir(exist_ok=True)
        for file in sorted(temporary.iterdir(), key=lambda f: f.name == "config.json"):  # last: what loaders look for
            os.replace(file, directory / file.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def timm_labels(model: nn.Module, label_names: Sequence[str] | None) -> dict[str, Any]:
    """timm's ``model_config`` with the labels, after the checks that :func:`save_pretrained` tells of."""
    if not getattr(model, "pretrained_cfg", None):
        raise ValueError(f"model is a {type(model).__name__} that timm.create_model did not make")
    if label_names is None:
        return {}
    if len(label_names) != model.num_classes:
        raise ValueError(f"label_names has {len(label_names)} names, the model {model.num_classes} classes")
    return {"label_names": list(label_names)}


def _check_rebuilt(model: nn.Module, config: dict[str, Any]) -> None:
    """Raises ChangedModelError unless the configuration makes a model with the same weights' names and shapes."""
    with torch.device("meta"):
        again = timm.create_model(
            config["architecture"], num_classes=config["num_classes"], **config.get("model_args", {})
        )
    ours, theirs = ({k: tuple(v.shape) for k, v in m.state_dict().items()} for m in (model, again))
    wrong = sorted(k for k in ours.keys() | theirs.keys() if ours.get(k) != theirs.get(k))
    if wrong:
        raise ChangedModelError(
            f"model has {wrong[0]} of shape {ours.get(wrong[0])}, which timm.create_model({config['architecture']!r}) "
            f"makes with shape {theirs.get(wrong[0])}: give the keywords as model_args, and save a converted model "
            "with affdiv_zoo.convert.save_converted"
        )
