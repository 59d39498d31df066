"""ResNets whose convolutions are PatchNorm convolutions, and CIFAR ResNets with their BatchNorm twins.

The classes are timm's. Where timm's net has a convolution and a BatchNorm, the PatchNorm net has one PatchNorm
convolution with a bias and an ``nn.Identity`` in the norm's place, so that convolution weights keep timm's names.
"""

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import DropPath, create_classifier, get_act_layer, get_norm_layer
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from timm.models._manipulate import checkpoint_seq
from timm.models.resnet import BasicBlock, Bottleneck, ResNet

from affdiv_zoo.layers import PatchNormConv2d
from affdiv_zoo.models._blocks import fuse_activations
from affdiv_zoo.models._corrected import InitCorrected
from affdiv_zoo.models._released import released_cfgs, warn_of_other_map
from affdiv_zoo.types import Correction, Scale

__all__ = ["CifarResNet", "PatchNormCifarResNet", "PatchNormResNet"]  # register_model adds the entry points

CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR10_STD = (0.2470, 0.2435, 0.2616)


def _use_patchnorm(model: nn.Module, correction: Correction, center: bool, scale: Scale) -> None:
    """Makes every convolution of a net that was built without norms a PatchNorm convolution, freshly initialised."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            PatchNormConv2d.from_conv(module, correction=correction, center=center, scale=scale).reset_parameters()
    fuse_activations(model)


class PatchNormResNet(InitCorrected, ResNet):
    """timm's ResNet with PatchNorm convolutions in place of every convolution and BatchNorm.

    Args:
        *args: As in ``timm.models.resnet.ResNet``.
        correction: ``"affine"`` (PatchNorm), ``"norm"``, ``"gradient"`` or ``"none"``.
        center: Each patch less its mean (ours; the paper's form is ``center=False, scale="l2"``).
        scale: ``"rms"`` or ``"l2"``; see :mod:`affdiv_zoo.functional`.
        **kwargs: As in ``timm.models.resnet.ResNet``, without ``norm_layer``.
    """

    def __init__(
        self, *args: Any, correction: Correction = "affine", center: bool = True, scale: Scale = "rms", **kwargs: Any
    ) -> None:
        super().__init__(*args, norm_layer=nn.Identity, **kwargs)
        _use_patchnorm(self, correction, center, scale)


class PadShortcut(nn.Module):
    """The parameter-free shortcut of He et al.'s CIFAR nets (option A): every other pixel, new channels zero."""

    def __init__(self, stride: int, new_channels: int) -> None:
        super().__init__()
        self.stride = stride
        self.new_channels = new_channels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, self.new_channels // 2, self.new_channels - self.new_channels // 2))


class CifarResNet(ResNet):
    """The 6n + 2 layer ResNets for 32 px images of He et al. (arXiv 1512.03385, section 4.2), with timm's interface.

    A 3x3 stem without pooling, three stages of n basic blocks with 16, 32 and 64 channels, option A shortcuts.

    Args:
        depth: 6n + 2.
        num_classes: Outputs of the classifier.
        in_chans: Channels of the image.
        global_pool: As in timm's ResNet.
        channels: Of the three stages.
        act_layer: As in timm's ResNet.
        norm_layer: As in timm's ResNet.
        drop_rate: Dropout before the classifier.
        drop_path_rate: Stochastic depth, growing linearly to this rate.
        zero_init_last: Start each block as the identity where its last norm has a weight.
        device: Of the parameters.
        dtype: Of the parameters.

    Raises:
        ValueError: ``depth`` is not 6n + 2.
    """

    def __init__(
        self,
        depth: int = 20,
        num_classes: int = 10,
        in_chans: int = 3,
        global_pool: str = "avg",
        channels: tuple[int, int, int] = (16, 32, 64),
        act_layer: Any = nn.ReLU,
        norm_layer: Any = nn.BatchNorm2d,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        zero_init_last: bool = True,
        device=None,
        dtype=None,
    ) -> None:
        nn.Module.__init__(self)  # the parent's would build the ImageNet net
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"depth={depth} is not 6n + 2, such as 20, 32, 44, 56 or 110")
        dd = {"device": device, "dtype": dtype}
        act_layer, norm_layer = get_act_layer(act_layer), get_norm_layer(norm_layer)
        self.num_classes, self.in_chans, self.drop_rate = num_classes, in_chans, drop_rate
        self.grad_checkpointing = False

        width = channels[0]
        self.conv1 = nn.Conv2d(in_chans, width, 3, padding=1, bias=False, **dd)
        self.bn1 = norm_layer(width, **dd)
        self.act1 = act_layer(inplace=True)

        blocks_per_stage = (depth - 2) // 6
        rates = [drop_path_rate * i / (3 * blocks_per_stage - 1) for i in range(3 * blocks_per_stage)]
        self.feature_info = []
        for stage, planes in enumerate(channels):
            blocks = []
            for i in range(blocks_per_stage):
                stride = 2 if stage > 0 and i == 0 else 1
                downsample = PadShortcut(stride, planes - width) if stride > 1 or planes != width else None
                rate = rates[stage * blocks_per_stage + i]
                drop_path = DropPath(rate) if rate > 0.0 else None
                blocks.append(
                    BasicBlock(
                        width,
                        planes,
                        stride,
                        downsample,
                        act_layer=act_layer,
                        norm_layer=norm_layer,
                        drop_path=drop_path,
                        **dd,
                    )
                )
                width = planes
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
            self.feature_info.append(dict(num_chs=planes, reduction=2**stage, module=f"layer{stage + 1}"))

        self.num_features = width
        self.global_pool, self.fc = create_classifier(width, num_classes, pool_type=global_pool, **dd)
        self.head_hidden_size = width * self.global_pool.feat_mult()
        self.init_weights(zero_init_last=zero_init_last)

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act1(self.bn1(self.conv1(x)))
        if self.grad_checkpointing and not torch.jit.is_scripting():
            return checkpoint_seq([self.layer1, self.layer2, self.layer3], x, flatten=True)
        return self.layer3(self.layer2(self.layer1(x)))

    def forward_intermediates(
        self,
        x: torch.Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[torch.Tensor] | tuple[torch.Tensor, list[torch.Tensor]]:
        """The outputs of the chosen stages, and of the last; arguments as in timm's ResNet."""
        assert output_fmt == "NCHW", "Output shape must be NCHW."
        take, last = feature_take_indices(3, indices)
        x = self.act1(self.bn1(self.conv1(x)))
        intermediates = []
        for i, layer in enumerate((self.layer1, self.layer2, self.layer3)[: last + 1 if stop_early else 3]):
            x = checkpoint_seq(layer, x) if self.grad_checkpointing and not torch.jit.is_scripting() else layer(x)
            if i in take:
                intermediates.append(x)
        return intermediates if intermediates_only else (x, intermediates)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drops the stages behind the last chosen one; arguments as in timm's ResNet."""
        take, last = feature_take_indices(3, indices)
        for i in range(last + 1, 3):
            setattr(self, f"layer{i + 1}", nn.Sequential())  # empty, so that checkpoint_seq can flatten it
        self.num_features = self.feature_info[last]["num_chs"]
        if prune_head or last < 2:  # the head is made for the last stage's channels
            self.reset_classifier(0, "")
        return take


class PatchNormCifarResNet(InitCorrected, CifarResNet):
    """:class:`CifarResNet` with PatchNorm convolutions; the correction's keywords as in :class:`PatchNormResNet`."""

    def __init__(
        self, *args: Any, correction: Correction = "affine", center: bool = True, scale: Scale = "rms", **kwargs: Any
    ) -> None:
        super().__init__(*args, norm_layer=nn.Identity, **kwargs)
        _use_patchnorm(self, correction, center, scale)


def _cfg(**kwargs: Any) -> dict[str, Any]:
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": (7, 7),
        "crop_pct": 0.875,
        "interpolation": "bilinear",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "conv1",
        "classifier": "fc",
        **kwargs,
    }


def _cifar_cfg(**kwargs: Any) -> dict[str, Any]:
    sizes = {"num_classes": 10, "input_size": (3, 32, 32), "pool_size": (8, 8), "crop_pct": 1.0}
    return _cfg(**{**sizes, "mean": CIFAR10_MEAN, "std": CIFAR10_STD, **kwargs})


default_cfgs = generate_default_cfgs(
    {
        **{f"resnet{depth}_patchnorm.untrained": _cfg() for depth in (18, 34, 50, 101)},
        **released_cfgs(
            _cifar_cfg, *(f"resnet{depth}_cifar{end}" for depth in (20, 32, 56) for end in ("", "_patchnorm"))
        ),
    }
)


def _patchnorm_resnet(variant: str, pretrained: bool, **kwargs: Any) -> PatchNormResNet:
    return build_model_with_cfg(PatchNormResNet, variant, pretrained, **kwargs)


@register_model
def resnet18_patchnorm(pretrained: bool = False, **kwargs: Any) -> PatchNormResNet:
    """ResNet-18 with PatchNorm."""
    model_args = dict(block=BasicBlock, layers=(2, 2, 2, 2))
    return _patchnorm_resnet("resnet18_patchnorm", pretrained, **dict(model_args, **kwargs))


@register_model
def resnet34_patchnorm(pretrained: bool = False, **kwargs: Any) -> PatchNormResNet:
    """ResNet-34 with PatchNorm."""
    model_args = dict(block=BasicBlock, layers=(3, 4, 6, 3))
    return _patchnorm_resnet("resnet34_patchnorm", pretrained, **dict(model_args, **kwargs))


@register_model
def resnet50_patchnorm(pretrained: bool = False, **kwargs: Any) -> PatchNormResNet:
    """ResNet-50 with PatchNorm."""
    model_args = dict(block=Bottleneck, layers=(3, 4, 6, 3))
    return _patchnorm_resnet("resnet50_patchnorm", pretrained, **dict(model_args, **kwargs))


@register_model
def resnet101_patchnorm(pretrained: bool = False, **kwargs: Any) -> PatchNormResNet:
    """ResNet-101 with PatchNorm."""
    model_args = dict(block=Bottleneck, layers=(3, 4, 23, 3))
    return _patchnorm_resnet("resnet101_patchnorm", pretrained, **dict(model_args, **kwargs))


def _cifar_resnet(cls: type[CifarResNet], variant: str, pretrained: bool, **kwargs: Any) -> CifarResNet:
    warn_of_other_map(cls, variant, pretrained, kwargs)
    return build_model_with_cfg(cls, variant, pretrained, feature_cfg=dict(out_indices=(0, 1, 2)), **kwargs)


@register_model
def resnet20_cifar(pretrained: bool = False, **kwargs: Any) -> CifarResNet:
    """He et al.'s ResNet-20 for 32 px images, with BatchNorm."""
    return _cifar_resnet(CifarResNet, "resnet20_cifar", pretrained, **dict(dict(depth=20), **kwargs))


@register_model
def resnet20_cifar_patchnorm(pretrained: bool = False, **kwargs: Any) -> PatchNormCifarResNet:
    """ResNet-20 for 32 px images, with PatchNorm."""
    return _cifar_resnet(PatchNormCifarResNet, "resnet20_cifar_patchnorm", pretrained, **dict(dict(depth=20), **kwargs))


@register_model
def resnet32_cifar(pretrained: bool = False, **kwargs: Any) -> CifarResNet:
    """He et al.'s ResNet-32 for 32 px images, with BatchNorm."""
    return _cifar_resnet(CifarResNet, "resnet32_cifar", pretrained, **dict(dict(depth=32), **kwargs))


@register_model
def resnet32_cifar_patchnorm(pretrained: bool = False, **kwargs: Any) -> PatchNormCifarResNet:
    """ResNet-32 for 32 px images, with PatchNorm."""
    return _cifar_resnet(PatchNormCifarResNet, "resnet32_cifar_patchnorm", pretrained, **dict(dict(depth=32), **kwargs))


@register_model
def resnet56_cifar(pretrained: bool = False, **kwargs: Any) -> CifarResNet:
    """He et al.'s ResNet-56 for 32 px images, with BatchNorm."""
    return _cifar_resnet(CifarResNet, "resnet56_cifar", pretrained, **dict(dict(depth=56), **kwargs))


@register_model
def resnet56_cifar_patchnorm(pretrained: bool = False, **kwargs: Any) -> PatchNormCifarResNet:
    """ResNet-56 for 32 px images, with PatchNorm."""
    return _cifar_resnet(PatchNormCifarResNet, "resnet56_cifar_patchnorm", pretrained, **dict(dict(depth=56), **kwargs))
