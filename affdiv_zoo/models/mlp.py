"""Fully connected nets on flattened images: the paper's, with a choice of norms, and with corrected layers.

A layer is norm, affine map, activation. The norm stands before the map, where the corrections stand: ``norm="l2"`` is
the net of the norm-like correction in the paper's form, ``norm="rms"`` (gains aside) the one of ``scale="rms"``, and
``norm="layer"`` the centred one. Both nets start from the same distribution of weights.

Features are ``(batch, width, 1, 1)``: a map of one pixel, as wide as the image. So timm treats them as a convolutional
net's.
"""

from typing import Any

import torch
import torch.nn as nn
from timm.layers.trace_utils import _assert
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._manipulate import adapt_input_conv

from affdiv_zoo._checks import check_choice
from affdiv_zoo.layers import RadialActivation
from affdiv_zoo.models._corrected import InitCorrected, correct_linear
from affdiv_zoo.models._layered import LayeredNet, act_layer, check_size
from affdiv_zoo.models._released import released_cfgs, warn_of_other_map
from affdiv_zoo.models.resnet import CIFAR10_MEAN, CIFAR10_STD
from affdiv_zoo.types import Correction, Scale

__all__ = ["AffineMlpNet", "MlpNet"]  # register_model adds the entry points

EPS = 1e-6


def _norm(name: str, width: int, **dd: Any) -> nn.Module:
    if name == "batch":
        return nn.BatchNorm1d(width, **dd)
    if name == "layer":
        return nn.LayerNorm(width, eps=EPS, **dd)
    if name == "rms":
        return nn.RMSNorm(width, eps=EPS, **dd)
    return RadialActivation("l2", eps=EPS) if name == "l2" else nn.Identity()


class MlpLayer(nn.Module):
    """Norm, linear, activation, dropout."""

    def __init__(self, in_features: int, width: int, norm: str, act_layer: Any, drop: float, **dd: Any) -> None:
        super().__init__()
        self.norm = _norm(norm, in_features, **dd)
        self.fc = nn.Linear(in_features, width, **dd)
        self.act = act_layer()
        self.drop = nn.Dropout(drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.act(self.fc(self.norm(x))))


class MlpNet(LayeredNet):
    """A fully connected net on the flattened image, with timm's interface.

    Args:
        img_size: Height and width of the images; other sizes are an error.
        in_chans: Channels of the image.
        num_classes: Outputs of the classifier; 0 for none.
        global_pool: ``"avg"``, or ``""`` to keep the two spatial dimensions (of size 1) before the classifier.
        width: Of every hidden layer.
        depth: Number of hidden layers.
        norm: Before every linear layer, the first and the classifier included: ``"none"``, ``"batch"``, ``"layer"``,
            ``"rms"`` or ``"l2"``.
        act: An activation by timm's name, such as ``"tanh"``, ``"leaky_relu"`` or ``"gelu"``.
        drop_rate: Dropout before the classifier.
        proj_drop_rate: Dropout after every hidden layer.
        device: Of the parameters.
        dtype: Of the parameters.

    Shapes: ``(batch, in_chans, *img_size)`` to ``(batch, num_classes)``.

    Raises:
        ValueError: ``norm`` or ``act`` is unknown, or ``width`` or ``depth`` is not positive.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 32,
        in_chans: int = 3,
        num_classes: int = 10,
        global_pool: str = "avg",
        width: int = 256,
        depth: int = 6,
        norm: str = "none",
        act: str = "tanh",
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        check_choice("norm", norm, ("none", "batch", "layer", "rms", "l2"))
        check_size(width, depth)
        make_act = act_layer(act)
        dd = {"device": device, "dtype": dtype}
        self.img_size = (img_size, img_size) if isinstance(img_size, int) else tuple(img_size)
        sizes = [in_chans * self.img_size[0] * self.img_size[1]] + [width] * depth
        layers = [MlpLayer(n, width, norm, make_act, proj_drop_rate, **dd) for n in sizes[:-1]]
        reduction = max(self.img_size)
        features = [dict(num_chs=width, reduction=reduction, module=f"layers.{i}") for i in range(depth)]
        self._build(layers, _norm(norm, width, **dd), features, num_classes, in_chans, global_pool, drop_rate, **dd)

    def _prepare(self, x: torch.Tensor) -> torch.Tensor:
        _assert(
            x.shape[2] == self.img_size[0], f"Input height ({x.shape[2]}) doesn't match model ({self.img_size[0]})."
        )
        _assert(x.shape[3] == self.img_size[1], f"Input width ({x.shape[3]}) doesn't match model ({self.img_size[1]}).")
        return x.flatten(1)

    def _as_map(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :, None, None]


class AffineMlpNet(InitCorrected, MlpNet):
    """:class:`MlpNet` whose linear layers, the first and the classifier included, are corrected instead of normed.

    Args:
        correction: ``"affine"``, ``"norm"``, ``"gradient"`` or ``"none"``; see :mod:`affdiv_zoo.functional`.
        center: Each layer's input less its mean (ours).
        scale: ``"rms"`` (ours) or ``"l2"`` (the paper's).
        **kwargs: As in :class:`MlpNet`, without ``norm``.
    """

    def __init__(
        self, *, correction: Correction = "affine", center: bool = False, scale: Scale = "rms", **kwargs: Any
    ) -> None:
        if "norm" in kwargs:
            raise TypeError(
                f"norm={kwargs['norm']!r}: a corrected net has no norms; mlp_cifar is the net with a choice"
            )
        super().__init__(norm="none", **kwargs)
        self.correction, self.center, self.scale = correction, center, scale
        for layer in self.layers:
            layer.fc = correct_linear(layer.fc, correction, center, scale)
        self.head = correct_linear(self.head, correction, center, scale)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A fresh, corrected classifier; arguments as in :class:`MlpNet`."""
        super().reset_classifier(num_classes, global_pool)
        self.head = correct_linear(self.head, self.correction, self.center, self.scale)


def checkpoint_filter_fn(state_dict: dict[str, torch.Tensor], model: MlpNet) -> dict[str, torch.Tensor]:
    """Fits the first layer to another number of channels, as timm does for first convolutions."""
    key, (height, width) = "layers.0.fc.weight", model.img_size
    weight = state_dict.get(key)
    if weight is not None and weight.shape[1] != model.in_chans * height * width:
        state_dict[key] = adapt_input_conv(model.in_chans, weight.unflatten(1, (-1, height, width))).flatten(1)
    return state_dict


def _cfg(**kwargs: Any) -> dict[str, Any]:
    return {
        "url": "",
        "num_classes": 10,
        "input_size": (3, 32, 32),
        "fixed_input_size": True,
        "pool_size": (1, 1),
        "crop_pct": 1.0,
        "interpolation": "bilinear",
        "mean": CIFAR10_MEAN,
        "std": CIFAR10_STD,
        "first_conv": (),  # timm adapts convolutions only; checkpoint_filter_fn does it here
        "classifier": "head",
        **kwargs,
    }


default_cfgs = generate_default_cfgs(released_cfgs(_cfg, "mlp_cifar", "mlp_cifar_affine"))


def _create(cls: type[MlpNet], variant: str, pretrained: bool, **kwargs: Any) -> MlpNet:
    warn_of_other_map(cls, variant, pretrained, kwargs)
    return build_model_with_cfg(
        cls,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=min(3, kwargs.get("depth", 6)), feature_cls="getter"),
        **kwargs,
    )


@register_model
def mlp_cifar(pretrained: bool = False, **kwargs: Any) -> MlpNet:
    """A fully connected net on 32 px images; its norm, width, depth and act are keywords."""
    return _create(MlpNet, "mlp_cifar", pretrained, **kwargs)


@register_model
def mlp_cifar_affine(pretrained: bool = False, **kwargs: Any) -> AffineMlpNet:
    """A fully connected net on 32 px images, all linear layers corrected."""
    return _create(AffineMlpNet, "mlp_cifar_affine", pretrained, **kwargs)
