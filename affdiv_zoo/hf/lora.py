"""LoRA (``peft``) on corrected layers: the low-rank term inside the corrected map.

peft's own layers return base(x) + s B A x. On a corrected layer that is not what merging gives, W + s B A in the place
of W: affine-like, (W x + s B A x + b) / sqrt(||x||^2 + 1), where the term is divided as all else is. The layers here
compute the latter, for every correction, so that merging changes nothing.

After ``import affdiv_zoo``, peft uses them by itself, also for adapters that it loads from a folder. Methods of peft
other than LoRA do not know the correction; on a corrected layer they are an error.
"""

import functools
from types import ModuleType
from typing import Any

import torch.nn as nn
from peft import LoraConfig
from peft.tuners import lora, tuners_utils
from torch import Tensor
from torch.func import functional_call

from affdiv_zoo.layers import CorrectedLinear, PatchNormConv1d, PatchNormConv2d, PatchNormConv3d

__all__ = ["install", "register_lora"]


class _InsideTheMap:
    """Stands before one of peft's LoRA layers among the bases: the adapters are part of the weight."""

    _unmerged: Tensor | None = None

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        """Adds an adapter.

        Raises:
            ValueError: The config asks for what has no place inside the map.
        """
        wrong = {
            "lora_dropout": config.lora_dropout,
            "use_dora": config.use_dora,
            "lora_bias": config.lora_bias,
            "fan_in_fan_out": config.fan_in_fan_out,
        }
        for name, value in wrong.items():
            if value:
                raise ValueError(
                    f"{name}={value!r} on a {type(self.get_base_layer()).__name__}: its adapters are part of the "
                    "weight inside a corrected map, where only plain low-rank terms have a place; leave it out, or "
                    "exclude the layer from target_modules"
                )
        if self.resolve_lora_variant(config=config) is not None:
            raise ValueError(f"a LoRA variant on a {type(self.get_base_layer()).__name__}: only plain LoRA works there")
        groups = getattr(self.get_base_layer(), "groups", 1)
        if groups > 1:
            raise ValueError(
                f"groups={groups}: peft cannot merge LoRA into a convolution with groups; exclude the layer"
            )
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """As in peft; the weights before are kept, so that they come back exactly."""
        if not self.merged:
            self._unmerged = self.get_base_layer().weight.detach().clone()
        super().merge(safe_merge=safe_merge, adapter_names=adapter_names)
        if not self.merged:
            self._unmerged = None

    def unmerge(self) -> None:
        """As in peft, without a subtraction's rounding."""
        if self._unmerged is None:
            return super().unmerge()
        weight = self.get_base_layer().weight
        weight.data = self._unmerged.to(weight)
        self._unmerged = None
        self.merged_adapters.clear()

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The base layer's map, of the weight plus the active adapters' terms."""
        self._check_forward_args(x, *args, **kwargs)
        if kwargs.pop("adapter_names", None) is not None:
            raise ValueError("adapter_names: corrected layers cannot use several adapters in one batch")
        base = self.base_layer
        if self.disable_adapters and self.merged:
            self.unmerge()
        active = [] if self.disable_adapters or self.merged else [a for a in self.active_adapters if a in self.lora_A]
        if not active:
            return base(x, *args, **kwargs)
        weight = base.weight
        for adapter in active:
            weight = (weight + self.get_delta_weight(adapter)).to(weight.dtype)  # as merging rounds
        return functional_call(base, {"weight": weight}, (x, *args), kwargs)


class LoraCorrectedLinear(_InsideTheMap, lora.Linear):
    """LoRA on a :class:`affdiv_zoo.layers.CorrectedLinear`."""


class LoraPatchNormConv1d(_InsideTheMap, lora.layer.Conv1d):
    """LoRA on a :class:`affdiv_zoo.layers.PatchNormConv1d`."""


class LoraPatchNormConv2d(_InsideTheMap, lora.Conv2d):
    """LoRA on a :class:`affdiv_zoo.layers.PatchNormConv2d`."""


class LoraPatchNormConv3d(_InsideTheMap, lora.Conv3d):
    """LoRA on a :class:`affdiv_zoo.layers.PatchNormConv3d`."""


_LAYERS: dict[type[nn.Module], type[nn.Module]] = {
    CorrectedLinear: LoraCorrectedLinear,
    PatchNormConv1d: LoraPatchNormConv1d,
    PatchNormConv2d: LoraPatchNormConv2d,
    PatchNormConv3d: LoraPatchNormConv3d,
}


def register_lora(config: LoraConfig) -> LoraConfig:
    """Tells a LoRA configuration about corrected layers: needed only for one made before ``import affdiv_zoo``.

    Args:
        config: Changed in place.

    Returns:
        ``config``.
    """
    config._register_custom_module(_LAYERS)  # peft's documented way for layers of other packages
    return config


def install(module: ModuleType) -> None:
    """Lets every new ``LoraConfig`` know corrected layers, and refuses what would be wrong on them.

    Args:
        module: ``peft.tuners.lora.model``, imported.
    """
    post_init, inject = LoraConfig.__post_init__, tuners_utils.BaseTuner.inject_adapter

    @functools.wraps(post_init)
    def registered(self: LoraConfig) -> None:
        post_init(self)
        register_lora(self)

    @functools.wraps(inject)
    def checked(self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        inject(self, model, *args, **kwargs)
        _check(model)

    LoraConfig.__post_init__ = registered
    tuners_utils.BaseTuner.inject_adapter = checked


def _check(model: nn.Module) -> None:
    """Raises TypeError where an adapter stands outside of a corrected map."""
    inside = (_InsideTheMap, lora.layer.ParamWrapper)  # the latter adapts the weight itself
    for name, layer in model.named_modules():
        if not isinstance(layer, tuners_utils.BaseTunerLayer) or isinstance(layer, inside):
            continue
        base = layer.get_base_layer()
        if isinstance(base, tuple(_LAYERS)) and base.correction != "none":
            kind = f"{type(layer).__module__}.{type(layer).__name__}".removeprefix("peft.tuners.")
            raise TypeError(
                f"{name}: {kind} adds to the output of a {type(base).__name__}, outside of its corrected map. Use a "
                "LoraConfig (one made before `import affdiv_zoo` goes through affdiv_zoo.hf.register_lora first), or "
                "exclude the layer from target_modules"
            )
