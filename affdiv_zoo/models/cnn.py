"""Small convolutional nets for 32 px images: with a choice of norms, and with PatchNorm convolutions.

A layer is convolution, norm, activation, without residual paths; a PatchNorm convolution stands for the first two. Both
nets start from the same distribution of weights, and both have a plain classifier behind the average pooling.
"""

from typing import Any

import torch
import torch.nn as nn
from timm.layers import GroupNorm, GroupNorm1, RmsNorm2d, create_classifier, get_act_layer
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from timm.models._manipulate import checkpoint_seq

from affdiv_zoo._checks import check_choice
from affdiv_zoo.layers import PatchNormConv2d
from affdiv_zoo.models._corrected import InitCorrected
from affdiv_zoo.models.resnet import CIFAR10_MEAN, CIFAR10_STD
from affdiv_zoo.types import Correction, Scale

__all__ = ["CnnNet", "PatchNormCnnNet"]  # register_model adds the entry points

NORMS = ("none", "batch", "layer", "rms", "group")
GROUP_SIZE = 8


def _norm(name: str, width: int, **dd: Any) -> nn.Module:
    if name == "batch":
        return nn.BatchNorm2d(width, **dd)
    if name == "layer":
        return GroupNorm1(width, **dd)
    if name == "rms":
        return RmsNorm2d(width, **dd)
    return GroupNorm(width, width // GROUP_SIZE, **dd) if name == "group" else nn.Identity()


class CnnLayer(nn.Module):
    """A 3x3 convolution, norm, activation."""

    def __init__(self, in_chs: int, out_chs: int, stride: int, norm: str, act_layer: Any, **dd: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_chs, out_chs, 3, stride, 1, **dd)
        self.norm = _norm(norm, out_chs, **dd)
        self.act = act_layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.norm(self.conv(x)))


class CnnNet(nn.Module):
    """A plain convolutional net, with timm's interface.

    3x3 convolutions of equal width; the first, the third and every other one after them has stride 2, up to a
    reduction of 8.

    Args:
        num_classes: Outputs of the classifier; 0 for none.
        in_chans: Channels of the image.
        global_pool: As in timm's ResNet.
        width: Channels of every convolution.
        depth: Number of convolutions.
        norm: Behind every convolution: ``"none"``, ``"batch"``, ``"layer"`` (over all pixels and channels of an image),
            ``"rms"`` (over the channels of a pixel) or ``"group"`` (over all pixels of eight channels).
        act: An activation by timm's name, such as ``"relu"``, ``"tanh"`` or ``"leaky_relu"``.
        drop_rate: Dropout before the classifier.
        device: Of the parameters.
        dtype: Of the parameters.

    Shapes: ``(batch, in_chans, height, width)`` to ``(batch, num_classes)``.

    Raises:
        ValueError: ``norm`` or ``act`` is unknown, ``width`` or ``depth`` is not positive, or ``width`` is no multiple
            of eight under ``norm="group"``.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_chans: int = 3,
        global_pool: str = "avg",
        width: int = 32,
        depth: int = 4,
        norm: str = "none",
        act: str = "relu",
        drop_rate: float = 0.0,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        check_choice("norm", norm, NORMS)
        for name, value in (("width", width), ("depth", depth)):
            if value < 1:
                raise ValueError(f"{name}={value!r} must be 1 or more")
        if norm == "group" and width % GROUP_SIZE:
            raise ValueError(f"width={width!r} must be a multiple of {GROUP_SIZE} under norm='group'")
        try:
            act_layer = get_act_layer(act)
        except KeyError:
            raise ValueError(
                f"act={act!r} is not an activation of timm's, such as 'relu', 'tanh' or 'leaky_relu'"
            ) from None
        dd = {"device": device, "dtype": dtype}
        self.num_classes, self.in_chans, self.num_features = num_classes, in_chans, width
        self.grad_checkpointing = False

        layers, self.feature_info, reduction = [], [], 1
        for i in range(depth):
            stride = 2 if i % 2 == 0 and reduction < 8 else 1
            reduction *= stride
            layers.append(CnnLayer(width if i else in_chans, width, stride, norm, act_layer, **dd))
            self.feature_info.append(dict(num_chs=width, reduction=reduction, module=f"layers.{i}"))
        self.layers = nn.Sequential(*layers)
        self.head_drop = nn.Dropout(drop_rate)
        self.global_pool, self.head = create_classifier(width, num_classes, pool_type=global_pool, **dd)
        self.head_hidden_size = width * self.global_pool.feat_mult()
        self.init_weights()

    @torch.jit.ignore
    def init_weights(self) -> None:
        """W ~ N(0, 1 / fan_in), b = 0, as in the corrected layers."""
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
                nn.init.zeros_(module.bias)

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Parameters by depth, for layer-wise learning rates."""
        return dict(stem=r"^layers\.0\.", blocks=r"^layers\.(\d+)")

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute every layer in the backward pass."""
        self.grad_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        """The last layer."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A fresh classifier; the pooling stays as it is if ``global_pool`` is None."""
        self.num_classes = num_classes
        pool = self.global_pool.pool_type if global_pool is None else global_pool
        like = self.layers[0].conv.weight
        self.global_pool, self.head = create_classifier(
            self.num_features, num_classes, pool_type=pool, device=like.device, dtype=like.dtype
        )
        self.global_pool.train(self.training)
        self.head.train(self.training)

    def forward_intermediates(
        self,
        x: torch.Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[torch.Tensor] | tuple[torch.Tensor, list[torch.Tensor]]:
        """The outputs of the chosen layers, and of the last; arguments as in timm's models."""
        assert output_fmt == "NCHW", "Output shape must be NCHW."
        take, last = feature_take_indices(len(self.layers), indices)
        intermediates = []
        for i, layer in enumerate(self.layers[: last + 1] if stop_early else self.layers):
            x = checkpoint_seq([layer], x) if self.grad_checkpointing and not torch.jit.is_scripting() else layer(x)
            if i in take:
                intermediates.append(x)
        return intermediates if intermediates_only else (x, intermediates)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drops the layers behind the last chosen one; arguments as in timm's models."""
        take, last = feature_take_indices(len(self.layers), indices)
        self.layers = self.layers[: last + 1]
        if prune_head:
            self.reset_classifier(0, "")
        return take

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        """The last layer's output."""
        if self.grad_checkpointing and not torch.jit.is_scripting():
            return checkpoint_seq(self.layers, x)
        return self.layers(x)

    def forward_head(self, x: torch.Tensor, pre_logits: bool = False) -> torch.Tensor:
        """Pooling and classifier."""
        x = self.head_drop(self.global_pool(x))
        return x if pre_logits else self.head(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward_head(self.forward_features(x))


class PatchNormCnnNet(InitCorrected, CnnNet):
    """:class:`CnnNet` whose convolutions are PatchNorm convolutions, without norms behind them.

    Args:
        correction: ``"affine"``, ``"norm"``, ``"gradient"`` or ``"none"``; see :mod:`affdiv_zoo.functional`.
        center: Each patch less its mean (ours; the paper's form is ``center=False, scale="l2"``).
        scale: ``"rms"`` (ours) or ``"l2"`` (the paper's).
        **kwargs: As in :class:`CnnNet`, without ``norm``.
    """

    def __init__(
        self, *, correction: Correction = "affine", center: bool = True, scale: Scale = "rms", **kwargs: Any
    ) -> None:
        super().__init__(norm="none", **kwargs)
        for layer in self.layers:
            PatchNormConv2d.from_conv(layer.conv, correction=correction, center=center, scale=scale).reset_parameters()


def _cfg(**kwargs: Any) -> dict[str, Any]:
    return {
        "url": "",
        "num_classes": 10,
        "input_size": (3, 32, 32),
        "pool_size": (8, 8),
        "crop_pct": 1.0,
        "interpolation": "bilinear",
        "mean": CIFAR10_MEAN,
        "std": CIFAR10_STD,
        "first_conv": "layers.0.conv",
        "classifier": "head",
        **kwargs,
    }


default_cfgs = generate_default_cfgs({"cnn_cifar.untrained": _cfg(), "cnn_cifar_patchnorm.untrained": _cfg()})


def _create(cls: type[CnnNet], variant: str, pretrained: bool, **kwargs: Any) -> CnnNet:
    feature_cfg = dict(out_indices=min(3, kwargs.get("depth", 4)), feature_cls="getter")
    return build_model_with_cfg(cls, variant, pretrained, feature_cfg=feature_cfg, **kwargs)


@register_model
def cnn_cifar(pretrained: bool = False, **kwargs: Any) -> CnnNet:
    """A small convolutional net for 32 px images; its norm, width, depth and act are keywords."""
    return _create(CnnNet, "cnn_cifar", pretrained, **kwargs)


@register_model
def cnn_cifar_patchnorm(pretrained: bool = False, **kwargs: Any) -> PatchNormCnnNet:
    """A small convolutional net for 32 px images, all convolutions PatchNorm."""
    return _create(PatchNormCnnNet, "cnn_cifar_patchnorm", pretrained, **kwargs)
