"""The transformers configuration of a timm model."""

import difflib
import functools
import json
from typing import Any, Self

import timm
import torch
import torch.nn as nn
from huggingface_hub.dataclasses import strict
from transformers.backbone_utils import BackboneConfigMixin
from transformers.models.timm_wrapper.configuration_timm_wrapper import TimmWrapperConfig

from affdiv_zoo.hf.folder import MODEL_TYPE, complete_config

__all__ = ["AffDivConfig"]

_HEADLESS = {"AffDivModel", "AffDivBackbone"}


@strict
class AffDivConfig(BackboneConfigMixin, TimmWrapperConfig):
    """Which timm model, how it is built, its classes and its preprocessing.

    ``config.json`` has timm's keys and transformers' (see :mod:`affdiv_zoo.hf.folder`), so that both libraries load it.

    Args:
        architecture: A timm name; ``affdiv_zoo.list_models()`` has this package's. Any other of timm's works as well.
        model_args: Keywords of ``timm.create_model``, such as ``{"correction": "norm"}``: strings, numbers, bools.
        pretrained_cfg: timm's preprocessing (``input_size``, ``mean``, ``std``, ``crop_pct``, ``interpolation``); by
            default the architecture's.
        do_pooling: Whether :class:`AffDivModel` returns a ``pooler_output``.
        num_labels: Number of classes; by default the architecture's. Also ``id2label`` and ``label2id``.
        out_features: Stages that :class:`AffDivBackbone` returns, by timm's module names (``stage_names``).
        out_indices: The same by number; the last stage by default.
        **kwargs: As in ``transformers.PreTrainedConfig``.

    Raises:
        ValueError: timm has no such architecture, or the architecture no such tag.
    """

    model_type = MODEL_TYPE

    architecture: str = "resnet20_cifar_patchnorm"
    pretrained_cfg: dict[str, Any] | None = None
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        name = self.architecture.split(".")[0]
        if not timm.is_model(name):
            close = difflib.get_close_matches(name, timm.list_models(), 3)
            hint = f"did you mean {' or '.join(close)}?" if close else "a newer affdiv-zoo or timm may have it"
            raise ValueError(f"architecture={self.architecture!r} is no timm model: {hint}")
        try:
            cfg = timm.get_pretrained_cfg(self.architecture)
        except RuntimeError as error:  # timm's for an unknown tag
            tags = [full.split(".", 1)[1] for full in timm.list_pretrained(name) if full.split(".")[0] == name]
            hint = f"its tags are {', '.join(tags)}" if tags else f"there are none; write {name!r}"
            raise ValueError(f"architecture={self.architecture!r} has an unknown tag: {hint}") from error
        self.model_args = dict(self.model_args or {})
        num_classes = self.model_args.pop("num_classes", None)  # timm's own copy: the labels tell
        if self.pretrained_cfg is None:
            self.pretrained_cfg = _default_preprocessing(self.architecture, self.model_args)
        num_classes = kwargs.pop("num_classes", num_classes)
        label_names = kwargs.pop("label_names", None)
        if kwargs.get("num_labels") is None:
            if num_classes is None:
                num_classes = cfg.num_classes if cfg else None
            kwargs["num_labels"] = num_classes
        if self.id2label is not None:
            kwargs.pop("num_labels")
        elif label_names and len(label_names) == kwargs["num_labels"]:
            self.id2label = dict(enumerate(label_names))
            self.label2id = {label: i for i, label in self.id2label.items()}
        out_features = kwargs.pop("out_features", None)
        out_indices = kwargs.pop("out_indices", None)
        super().__post_init__(**kwargs)
        if out_features is not None or out_indices is not None:
            self.set_output_features_output_indices(out_features, out_indices)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Self:
        """From what timm or transformers saved; ``id2label`` alone also sets the number of classes."""
        labels = kwargs.get("id2label")
        if labels is not None:
            kwargs.setdefault("num_labels", len(labels))
            kwargs.setdefault("label2id", {label: int(i) for i, label in labels.items()})
        return super().from_dict(config_dict, **kwargs)

    @property
    def stage_names(self) -> list[str]:
        """timm's names of the modules whose outputs are features, ``feature_info``."""
        return [info["module"] for info in self.feature_info]

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """timm's: ``module``, ``num_chs`` and ``reduction`` of every stage."""
        return _feature_info(self.architecture, json.dumps(self.model_args, sort_keys=True))

    @property
    def out_features(self) -> list[str]:
        """The stages of the backbone."""
        if self._out_features is None:
            self.set_output_features_output_indices(None, self._out_indices)
        return self._out_features

    @out_features.setter
    def out_features(self, value: list[str] | None) -> None:
        self.set_output_features_output_indices(value, None)

    @property
    def out_indices(self) -> list[int]:
        """The stages of the backbone, by number."""
        if self._out_indices is None:
            self.set_output_features_output_indices(self._out_features, None)
        return self._out_indices

    @out_indices.setter
    def out_indices(self, value: list[int] | tuple[int, ...] | None) -> None:
        self.set_output_features_output_indices(None, None if value is None else list(value))

    def to_dict(self) -> dict[str, Any]:
        """With timm's keys: ``num_classes`` and ``label_names`` for ``id2label``."""
        output = super().to_dict()
        names = [self.id2label[i] for i in sorted(self.id2label)]
        if set(self.architectures or []) & _HEADLESS:
            names = []  # the weights beside it have no classifier
        output["num_classes"], output["label_names"] = len(names), names
        if set(output.get("label_descriptions") or ()) - set(names):
            del output["label_descriptions"]
        output.pop("initializer_range", None)  # timm's initialisation stands
        for key in ("out_features", "out_indices"):
            if output.get(key) is None:
                output.pop(key, None)
        return complete_config(output)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing to do: what is saved leads to this package, so the code is not copied beside it."""

    def create_model(self, num_classes: int) -> nn.Module:
        """The timm model, freshly initialised."""
        return timm.create_model(self.architecture, pretrained=False, num_classes=num_classes, **self.model_args)


def _default_preprocessing(architecture: str, model_args: dict[str, Any]) -> dict[str, Any]:
    """The architecture's ``pretrained_cfg`` as timm would save it, at the image size and channels asked for."""
    cfg = timm.get_pretrained_cfg(architecture)
    if cfg is None:
        return {}
    cfg = {
        key: value
        for key, value in cfg.to_dict(remove_source=True, remove_null=True).items()
        if key not in ("num_classes", "architecture")
    }
    channels, *size = cfg["input_size"]
    img_size = model_args.get("img_size")
    if img_size is not None:
        size = [img_size, img_size] if isinstance(img_size, int) else list(img_size)
    cfg["input_size"] = [model_args.get("in_chans") or channels, *size]
    return json.loads(json.dumps(cfg))  # lists for tuples, as a file would have


@functools.lru_cache(maxsize=32)
def _feature_info(architecture: str, model_args: str) -> list[dict[str, Any]]:
    with torch.device("meta"):
        model = timm.create_model(architecture, pretrained=False, **json.loads(model_args))
    info = getattr(model, "feature_info", None)
    if not info or not hasattr(model, "forward_intermediates"):
        raise ValueError(f"architecture={architecture!r} has no stages: timm gives it no feature_info")
    return [{key: stage[key] for key in ("module", "num_chs", "reduction")} for stage in getattr(info, "info", info)]
