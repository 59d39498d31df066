"""The two halves of a normaliser as layers of their own, over :mod:`affdiv_zoo.functional`."""

import importlib
from functools import partial
from typing import get_args

import torch
from timm.layers import register_notrace_module
from torch import Tensor, nn

from affdiv_zoo import _plain
from affdiv_zoo._checks import check_choice, check_options
from affdiv_zoo.functional import parameterised_scale, radial_map
from affdiv_zoo.types import RadialKind, Scale

__all__ = ["ParameterisedScale", "RadialActivation"]


@register_notrace_module  # torch.fx takes it whole: the argument checks depend on what a symbolic trace does not know
class RadialActivation(nn.Module):
    r"""s x / sqrt(||x||^2 + eps), or + 1: a normaliser's parameter-free half, :func:`affdiv_zoo.functional.radial_map`.

    Args:
        kind: ``"l2"``: x / ||x||. ``"soft"``: x / sqrt(||x||^2 + 1), nearly x where x is short.
        dim: The dimension that x runs over: -1 for tokens, 1 for the channels of NCHW.
        center: Use x - mean(x) for x.
        scale: ``"l2"``: s = 1. ``"rms"``: s = sqrt(n), or sqrt(n + 1) for ``"soft"``, for x of length n.
        eps: Added to ||x||^2 by ``"l2"``.
        device: Taken for uniformity; there are no parameters.
        dtype: Likewise.

    Shapes: any, dtype kept. timm knows it as the activations ``"radial_l2"`` and ``"radial_soft"``.

    Raises:
        ValueError: An option is unknown.
    """

    def __init__(
        self,
        kind: RadialKind = "l2",
        *,
        dim: int = -1,
        center: bool = False,
        scale: Scale = "l2",
        eps: float = 1e-6,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        check_choice("kind", kind, get_args(RadialKind))
        check_options("none", scale, eps, center)
        self.kind = kind
        self.dim = dim
        self.center = center
        self.scale = scale
        self.eps = eps

    def forward(self, input: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return _plain.radial_map(input, self.kind, self.dim, self.center, self.scale, self.eps)
        return radial_map(input, self.kind, dim=self.dim, center=self.center, scale=self.scale, eps=self.eps)

    def extra_repr(self) -> str:
        return f"{self.kind}, dim={self.dim}, center={self.center}, scale={self.scale}"


@register_notrace_module
class ParameterisedScale(nn.Module):
    """weight * x + bias per channel: a normaliser's other half, :func:`affdiv_zoo.functional.parameterised_scale`.

    Starts as the identity.

    Args:
        num_features: Size of ``dim``.
        bias: Whether there is a bias.
        device: Of the parameters.
        dtype: Of the parameters.
        dim: -1 for tokens, 1 for the channels of NCHW.

    Shapes: any with ``num_features`` in ``dim``, dtype kept. timm knows it as the norm ``"parameterised_scale"``, and
    as ``"parameterised_scale2d"`` for NCHW.
    """

    def __init__(self, num_features: int, bias: bool = True, device=None, dtype=None, *, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim
        self.weight = nn.Parameter(torch.empty(num_features, device=device, dtype=dtype))
        self.register_parameter("bias", nn.Parameter(torch.empty_like(self.weight)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weight one, bias zero."""
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return _plain.parameterised_scale(input, self.weight, self.bias, self.dim)
        return parameterised_scale(input, self.weight, self.bias, dim=self.dim)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, bias={self.bias is not None}, dim={self.dim}"


def _register_names() -> None:
    """Lets timm's factories find the layers by name, so that a name in a model's config is enough.

    timm has no public way; its factories take the classes in any case. So with a timm that keeps its tables elsewhere
    only the names are lost. No name of timm's own is touched.
    """
    tables = {
        "create_act": (
            "_ACT_LAYER_DEFAULT",
            {f"radial_{kind}": partial(RadialActivation, kind) for kind in get_args(RadialKind)},
        ),
        "create_norm": (
            "_NORM_MAP",  # timm drops underscores before it looks a norm up
            {"parameterisedscale": ParameterisedScale, "parameterisedscale2d": partial(ParameterisedScale, dim=1)},
        ),
    }
    for module, (table, layers) in tables.items():
        try:
            names = getattr(importlib.import_module(f"timm.layers.{module}"), table, None)
        except ImportError:
            continue
        if isinstance(names, dict):
            for name, layer in layers.items():
                names.setdefault(name, layer)


_register_names()
