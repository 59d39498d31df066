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
from timm.layers import create_classifier, get_act_layer
from timm.layers.trace_utils import _assert
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from timm.models._manipulate import adapt_input_conv, checkpoint_seq

from affdiv_zoo._checks import check_choice
from affdiv_zoo.layers import RadialActivation
from affdiv_zoo.models._corrected import InitCorrected, correct_linear
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


class MlpNet(nn.Module):
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
        for name, value in (("width", width), ("depth", depth)):
            if value < 1:
                raise ValueError(f"{name}={value!r} must be 1 or more")
        try:
            act_layer = get_act_layer(act)
        except KeyError:
            raise ValueError(
                f"act={act!r} is not an activation of timm's, such as 'tanh', 'leaky_relu' or 'gelu'"
            ) from None
        dd = {"device": device, "dtype": dtype}
        self.img_size = (img_size, img_size) if isinstance(img_size, int) else tuple(img_size)
        self.in_chans, self.num_classes, self.num_features = in_chans, num_classes, width
        self.grad_checkpointing = False

        sizes = [in_chans * self.img_size[0] * self.img_size[1]] + [width] * depth
        self.layers = nn.Sequential(*[MlpLayer(n, width, norm, act_layer, proj_drop_rate, **dd) for n in sizes[:-1]])
        reduction = max(self.img_size)
        self.feature_info = [dict(num_chs=width, reduction=reduction, module=f"layers.{i}") for i in range(depth)]
        self.norm = _norm(norm, width, **dd)
        self.head_drop = nn.Dropout(drop_rate)
        self.global_pool, self.head = create_classifier(width, num_classes, pool_type=global_pool, **dd)
        self.head_hidden_size = width * self.global_pool.feat_mult()
        self.init_weights()

    @torch.jit.ignore
    def init_weights(self) -> None:
        """W ~ N(0, 1 / fan_in), b = 0, as in the corrected layers."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                nn.init.zeros_(module.bias)

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Parameters by depth, for layer-wise learning rates."""
        return dict(stem=r"^layers\.0\.", blocks=[(r"^layers\.(\d+)", None), (r"^norm", (99999,))])

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
        like = self.layers[0].fc.weight
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
        x = self._flatten(x)
        intermediates = []
        for i, layer in enumerate(self.layers[: last + 1] if stop_early else self.layers):
            x = checkpoint_seq([layer], x) if self.grad_checkpointing and not torch.jit.is_scripting() else layer(x)
            if i in take:
                intermediates.append((self.norm(x) if norm else x)[:, :, None, None])
        return intermediates if intermediates_only else (self.norm(x)[:, :, None, None], intermediates)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drops the layers behind the last chosen one; arguments as in timm's models."""
        take, last = feature_take_indices(len(self.layers), indices)
        self.layers = self.layers[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return take

    def _flatten(self, x: torch.Tensor) -> torch.Tensor:
        _assert(
            x.shape[2] == self.img_size[0], f"Input height ({x.shape[2]}) doesn't match model ({self.img_size[0]})."
        )
        _assert(x.shape[3] == self.img_size[1], f"Input width ({x.shape[3]}) doesn't match model ({self.img_size[1]}).")
        return x.flatten(1)

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        """``(batch, width, 1, 1)``."""
        x = self._flatten(x)
        if self.grad_checkpointing and not torch.jit.is_scripting():
            x = checkpoint_seq(self.layers, x)
        else:
            x = self.layers(x)
        return self.norm(x)[:, :, None, None]

    def forward_head(self, x: torch.Tensor, pre_logits: bool = False) -> torch.Tensor:
        """Pooling and classifier."""
        x = self.head_drop(self.global_pool(x))
        return x if pre_logits else self.head(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward_head(self.forward_features(x))


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
