"""transformers models around timm's: a thin layer over transformers' own TimmWrapper.

What TimmWrapper lacks and is added here: initialisation is timm's (and so this package's) instead of N(0, 0.02);
whatever a checkpoint does not have, non-persistent buffers included, is filled from a fresh timm model; attention maps;
``interpolate_pos_encoding``; backbones; a saved folder that timm loads as well.
"""

import contextlib
import itertools
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn as nn
from timm.layers import Format
from timm.models._hub import save_config_for_hf
from torch import Tensor
from transformers.backbone_utils import BackboneMixin
from transformers.conversion_mapping import get_model_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import PrefixChange
from transformers.modeling_outputs import BackboneOutput, ImageClassifierOutput, ModelOutput
from transformers.models.timm_wrapper.modeling_timm_wrapper import (
    TimmWrapperForImageClassification,
    TimmWrapperModel,
    TimmWrapperModelOutput,
    TimmWrapperPreTrainedModel,
)

from affdiv_zoo._files import write_text
from affdiv_zoo.hf.configuration import AffDivConfig
from affdiv_zoo.hf.folder import REMOTE_CODE_FILE, ChangedModelError, remote_code, timm_labels

# Weights on disk have timm's names; the models have them behind "timm_model.", as TimmWrapper's.
register_checkpoint_conversion_mapping(
    AffDivConfig.model_type, [PrefixChange(prefix_to_add="timm_model")], overwrite=True
)

__all__ = ["AffDivBackbone", "AffDivForImageClassification", "AffDivModel", "AffDivPreTrainedModel"]


class AffDivPreTrainedModel(TimmWrapperPreTrainedModel):
    """What the three classes share; the timm model is ``timm_model``.

    Args:
        config: The configuration.
    """

    config: AffDivConfig

    # Of `timm_model`, the initial values that loading still lacks: filled and emptied by `_init_weights`.
    _fresh: dict[str, Tensor] | None = None

    def post_init(self) -> None:
        """transformers' last step of a construction; timm has initialised everything already."""
        for tensor in itertools.chain(self.parameters(), self.buffers()):
            if not tensor.is_meta:
                tensor._is_hf_initialized = True
        self.supports_gradient_checkpointing = self._timm_model_supports_gradient_checkpointing()
        # A timm model stays on one device: its blocks add what different modules computed.
        self._no_split_modules = [type(self.timm_model).__name__]
        self.config.num_features = self.timm_model.num_features
        if self.config._attn_implementation == "eager":
            for attention in _attentions(self.timm_model):
                attention.fused_attn = False
        super(TimmWrapperPreTrainedModel, self).post_init()
        # For save_pretrained, which takes the prefix off again only where from_pretrained has put it on.
        self._weight_conversions = get_model_conversion_mapping(self, add_legacy=False)

    def _init_weights(self, module: nn.Module) -> None:
        """Fills what no checkpoint gave, such as a new head or a non-persistent buffer, from a fresh timm model."""
        tensors = itertools.chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
        missing = {name: t for name, t in tensors if not getattr(t, "_is_hf_initialized", False)}
        if not missing:
            return
        if self._fresh is None:
            wanted = {n for n, t in _tensors(self.timm_model) if not getattr(t, "_is_hf_initialized", False)}
            with torch.device("cpu"):
                fresh = self._create_model()
            self._fresh = {name: t.detach() for name, t in _tensors(fresh) if name in wanted}
        prefix = next(name for name, m in self.timm_model.named_modules() if m is module)
        with torch.no_grad():
            for name, tensor in missing.items():
                tensor.copy_(self._fresh.pop(f"{prefix}.{name}" if prefix else name))
                tensor._is_hf_initialized = True
        if not self._fresh:
            self._fresh = None

    @property
    def device(self) -> torch.device:
        """Where inputs go: of weights that accelerate keeps elsewhere, the device that computes."""
        device = next(self.parameters()).device
        if device.type == "meta":
            hooks = (getattr(module, "_hf_hook", None) for module in self.modules())
            devices = (getattr(hook, "execution_device", None) for hook in hooks)
            return torch.device(next((d for d in devices if d is not None), device))
        return device

    def _create_model(self) -> nn.Module:
        """A fresh timm model, of the same shape as ``timm_model``."""
        return self.config.create_model(0)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Self:
        """As in transformers; pickled weights only where ``use_safetensors=False`` asks for them."""
        kwargs.setdefault("use_safetensors", True)
        return super().from_pretrained(*args, **kwargs)

    @classmethod
    def from_timm(
        cls, model: nn.Module, label_names: Sequence[str] | None = None, model_args: dict[str, Any] | None = None
    ) -> Self:
        """A transformers model with the architecture and a copy of the weights of a timm model.

        Args:
            model: What ``timm.create_model`` made.
            label_names: Of the classes, in order.
            model_args: The keywords that ``timm.create_model`` was given; timm versions before 1.0.30 do not remember
                them.

        Raises:
            ChangedModelError: As :func:`affdiv_zoo.hf.save_pretrained`.
            ValueError: Likewise; or the class needs a classifier, and the model has none.
        """
        labels = timm_labels(model, label_names)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            save_config_for_hf(model, path, labels, model_args)
            config = AffDivConfig.from_dict(json.loads(path.read_text(encoding="utf-8")))
        weight = next(model.parameters())
        wrapped = cls(config).to(weight.device, weight.dtype)
        missing, unknown = wrapped.timm_model.load_state_dict(model.state_dict(), strict=False)
        if missing or (unknown and wrapped.timm_model.num_classes):  # a model without classifier leaves one behind
            raise ChangedModelError(
                f"model lacks {missing} and has {unknown}, beside what timm.create_model makes: it was changed since"
            )
        return wrapped.train(model.training)

    def save_pretrained(
        self, save_directory: str | os.PathLike, is_main_process: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        """As in transformers. timm loads the folder, too; see :mod:`affdiv_zoo.hf.folder`."""
        adapters_only = getattr(self, "_hf_peft_config_loaded", False)
        if is_main_process and not adapters_only and not os.path.isfile(save_directory):
            os.makedirs(save_directory, exist_ok=True)
            write_text(Path(save_directory) / REMOTE_CODE_FILE, remote_code())
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Nothing to do: what is saved leads to this package, so the code is not copied beside it."""

    def _ignore_classifier(self) -> None:
        """For models without a classifier: weights with one are no mistake."""
        names = self.config.pretrained_cfg.get("classifier") or ()
        names = (names,) if isinstance(names, str) else names
        self._keys_to_ignore_on_load_unexpected = [rf"^(timm_model\.)?{re.escape(name)}\." for name in names]

    def _call(
        self, forward: Callable[..., ModelOutput], pixel_values: Tensor, kwargs: dict[str, Any]
    ) -> ModelOutput | tuple[Tensor, ...]:
        """TimmWrapper's forward, with the arguments that it does not know."""
        maps, return_dict = kwargs.pop("output_attentions"), kwargs.pop("return_dict")
        maps = self.config.output_attentions if maps is None else maps
        return_dict = self.config.return_dict if return_dict is None else return_dict
        other_sizes = kwargs.pop("interpolate_pos_encoding")
        with (
            _interpolated_positions(self) if other_sizes else contextlib.nullcontext(),
            _recorded_attentions(self) if maps else contextlib.nullcontext() as attentions,
        ):
            output = forward(pixel_values, output_attentions=False, return_dict=True, **kwargs)
        if maps:
            output["attentions"] = tuple(attentions)
        return output if return_dict else output.to_tuple()


class AffDivModel(AffDivPreTrainedModel, TimmWrapperModel):
    """A timm model without its classifier.

    Args:
        config: The configuration.
    """

    def post_init(self) -> None:
        """As in the base class."""
        self._ignore_classifier()
        super().post_init()

    def forward(
        self,
        pixel_values: Tensor,
        output_attentions: bool | None = None,
        output_hidden_states: bool | list[int] | None = None,
        return_dict: bool | None = None,
        do_pooling: bool | None = None,
        interpolate_pos_encoding: bool = False,
        **kwargs: Any,
    ) -> TimmWrapperModelOutput | tuple[Tensor, ...]:
        """The features: ``last_hidden_state``, timm's ``forward_features``, and ``pooler_output``.

        Args:
            pixel_values: ``(batch, channels, height, width)``, preprocessed; converted to the model's device and dtype.
            output_attentions: Return the attention maps, ``(batch, heads, tokens, tokens)`` for each block.
            output_hidden_states: Return the features of every stage, or of those numbered in a list.
            return_dict: False for a tuple.
            do_pooling: Whether there is a ``pooler_output``; the config's by default.
            interpolate_pos_encoding: Take images of another size than the ViT's, as timm's ``dynamic_img_size`` does.
            **kwargs: Passed on to the timm model.

        Raises:
            ValueError: The architecture has no attention maps, or takes one size only.
        """
        kwargs |= dict(
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=return_dict,
            do_pooling=do_pooling,
            interpolate_pos_encoding=interpolate_pos_encoding,
        )
        return self._call(super().forward, pixel_values, kwargs)


class AffDivForImageClassification(AffDivPreTrainedModel, TimmWrapperForImageClassification):
    """A timm model with its classifier.

    Args:
        config: The configuration.

    Raises:
        ValueError: The configuration has no classes.
    """

    def __init__(self, config: AffDivConfig) -> None:
        if not config.num_labels:
            raise ValueError(
                f"num_labels={config.num_labels!r}: these weights have no classifier. Give the number of classes, such "
                "as from_pretrained(..., num_labels=10), or use AffDivModel"
            )
        super().__init__(config)

    def _create_model(self) -> nn.Module:
        return self.config.create_model(self.config.num_labels)

    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | list[int] | None = None,
        return_dict: bool | None = None,
        interpolate_pos_encoding: bool = False,
        **kwargs: Any,
    ) -> ImageClassifierOutput | tuple[Tensor, ...]:
        """The ``logits``, ``(batch, num_labels)``, and the ``loss`` where there are labels.

        Args:
            pixel_values: As in :meth:`AffDivModel.forward`.
            labels: ``(batch,)`` numbers of classes, or what the config's ``problem_type`` asks for.
            output_attentions: As in :meth:`AffDivModel.forward`.
            output_hidden_states: As in :meth:`AffDivModel.forward`.
            return_dict: False for a tuple.
            interpolate_pos_encoding: As in :meth:`AffDivModel.forward`.
            **kwargs: Passed on to the timm model.

        Raises:
            ValueError: As in :meth:`AffDivModel.forward`.
        """
        kwargs |= dict(
            labels=labels,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=return_dict,
            interpolate_pos_encoding=interpolate_pos_encoding,
        )
        return self._call(super().forward, pixel_values, kwargs)


class AffDivBackbone(BackboneMixin, AffDivPreTrainedModel):
    """A timm model as a backbone: the feature maps of the config's ``out_indices`` (or ``out_features``).

    They are those of ``timm.create_model(..., features_only=True)``, in NCHW layout for transformers, too. The weights
    are those of the two other classes.

    Args:
        config: The configuration.

    Raises:
        ValueError: timm has no stages of this architecture, or not those asked for.
    """

    def __init__(self, config: AffDivConfig) -> None:
        config.set_output_features_output_indices(config._out_features, config._out_indices)  # the defaults, checked
        super().__init__(config)
        self.timm_model = self._create_model()
        self.num_features = [info["num_chs"] for info in config.feature_info]
        self.has_attentions = bool(_attentions(self.timm_model))
        self._ignore_classifier()
        self.post_init()

    def forward(
        self,
        pixel_values: Tensor,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        interpolate_pos_encoding: bool = False,
        **kwargs: Any,
    ) -> BackboneOutput | tuple[Tensor, ...]:
        """The ``feature_maps``, ``(batch, channels, height, width)`` each.

        Args:
            pixel_values: As in :meth:`AffDivModel.forward`.
            output_hidden_states: Return the features of every stage, too.
            output_attentions: As in :meth:`AffDivModel.forward`.
            return_dict: False for a tuple.
            interpolate_pos_encoding: As in :meth:`AffDivModel.forward`.
            **kwargs: Passed on to timm's ``forward_intermediates``.

        Raises:
            ValueError: As in :meth:`AffDivModel.forward`.
        """
        kwargs |= dict(
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            return_dict=return_dict,
            interpolate_pos_encoding=interpolate_pos_encoding,
        )
        return self._call(self._stages, pixel_values, kwargs)

    def _stages(
        self,
        pixel_values: Tensor,
        output_hidden_states: bool | None,
        output_attentions: bool,
        return_dict: bool,
        **kwargs,
    ) -> BackboneOutput:
        every = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        indices = range(len(self.stage_names)) if every else self.out_indices
        maps = self.timm_model.forward_intermediates(
            pixel_values.to(self.device, self.dtype), indices=list(indices), intermediates_only=True, **kwargs
        )
        maps = dict(zip(indices, maps, strict=True))
        return BackboneOutput(
            feature_maps=tuple(maps[i] for i in self.out_indices),
            hidden_states=tuple(maps.values()) if every else None,
        )


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, each under all of its names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _attentions(model: nn.Module) -> list[nn.Module]:
    """timm's attention layers, ours included, which pass their maps through ``attn_drop``."""
    return [
        m for m in model.modules() if hasattr(m, "fused_attn") and isinstance(getattr(m, "attn_drop", None), nn.Module)
    ]


@contextlib.contextmanager
def _recorded_attentions(model: AffDivPreTrainedModel) -> Iterator[list[Tensor]]:
    """The attention maps of what is computed meanwhile, in order. Fused kernels have none, so they are off."""
    attentions = _attentions(model.timm_model)
    if not attentions:
        raise ValueError(f"output_attentions=True: {model.config.architecture} has no attention maps")
    maps: list[Tensor] = []
    fused = [(m.fused_attn, getattr(m, "flex", False)) for m in attentions]
    handles = [m.attn_drop.register_forward_hook(lambda _, __, output: maps.append(output)) for m in attentions]
    try:
        for attention in attentions:
            attention.fused_attn = attention.flex = False
        yield maps
    finally:
        for attention, before in zip(attentions, fused, strict=True):
            attention.fused_attn, attention.flex = before
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _interpolated_positions(model: AffDivPreTrainedModel) -> Iterator[None]:
    """timm's ``dynamic_img_size`` for what is computed meanwhile."""
    timm_model = model.timm_model
    embed = getattr(timm_model, "patch_embed", None)
    if getattr(timm_model, "dynamic_img_size", None) or not model.config.pretrained_cfg.get("fixed_input_size"):
        yield  # it takes any size as it is
        return
    if not hasattr(timm_model, "dynamic_img_size") or embed is None:
        raise ValueError(
            f"interpolate_pos_encoding=True: {model.config.architecture} takes images of one size, "
            f"{model.config.pretrained_cfg['input_size']}"
        )
    before = embed.strict_img_size, embed.flatten, embed.output_fmt
    timm_model.dynamic_img_size = True
    embed.strict_img_size, embed.flatten, embed.output_fmt = False, False, Format.NHWC
    try:
        yield
    finally:
        timm_model.dynamic_img_size = False
        embed.strict_img_size, embed.flatten, embed.output_fmt = before
