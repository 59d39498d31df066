"""Small convolutional nets for 32 px images: with a choice of norms, and with PatchNorm convolutions.

A layer is convolution, norm, activation, without residual paths; a PatchNorm convolution stands for the first two. Both
nets start from the same distribution of weights, and both have a plain classifier behind the average pooling.
"""

from typing import Any

import torch
import torch.nn as nn
from timm.layers import GroupNorm, GroupNorm1, RmsNorm2d
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model

from affdiv_zoo._checks import check_choice
from affdiv_zoo.layers import PatchNormConv2d
from affdiv_zoo.models._corrected import InitCorrected
from affdiv_zoo.models._layered import LayeredNet, act_layer, check_size
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


class CnnNet(LayeredNet):
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
        check_size(width, depth)
        if norm == "group" and width % GROUP_SIZE:
            raise ValueError(f"width={width!r} must be a multiple of {GROUP_SIZE} under norm='group'")
        make_act = act_layer(act)
        dd = {"device": device, "dtype": dtype}
        layers, features, reduction = [], [], 1
        for i in range(depth):
            stride = 2 if i % 2 == 0 and reduction < 8 else 1
            reduction *= stride
            layers.append(CnnLayer(width if i else in_chans, width, stride, norm, make_act, **dd))
            features.append(dict(num_chs=width, reduction=reduction, module=f"layers.{i}"))
        self._build(layers, nn.Identity(), features, num_classes, in_chans, global_pool, drop_rate, **dd)


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
