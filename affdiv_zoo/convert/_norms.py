"""What a norm computes, found by trying it: class names differ, the formula does not."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor


@dataclass
class Formula:
    """y = scale * v / sqrt(mean(v^2) + eps) + shift; v is x - mean(x) if ``centred`` (LayerNorm), else x (RMSNorm).

    ``scale`` and ``shift`` are float64 vectors over the features, or None; ``dim`` is negative.
    """

    centred: bool
    scale: Tensor | None
    shift: Tensor | None
    eps: float
    dim: int

    def __call__(self, x: Tensor) -> Tensor:
        """The formula in float64."""
        x = x.double()
        v = x - x.mean(self.dim, keepdim=True) if self.centred else x
        y = v * torch.rsqrt(v.square().mean(self.dim, keepdim=True) + self.eps)
        over_features = [-1] + [1] * (-1 - self.dim)
        y = y if self.scale is None else y * self.scale.view(over_features)
        return y if self.shift is None else y + self.shift.view(over_features)


def recognise(norm: nn.Module, x: Tensor, y: Tensor) -> Formula | None:
    """The formula of a LayerNorm or RMSNorm of any make, or None.

    Tried are the norm's vectors, and one plus them (Gemma's), as scale and shift. A candidate must give the module's
    output on what it was given, and on random vectors as small as sqrt(eps), where eps shows.

    Args:
        norm: The module.
        x: An input that it was given, of any shape.
        y: What came out, hooks included.
    """
    if not x.is_floating_point() or x.numel() == 0 or y.shape != x.shape or y.dtype != x.dtype:
        return None
    x, y = x[:1], y[:1]
    wide = torch.finfo(x.dtype).bits > 16
    # Many norms compute in float32 whatever the input's type is.
    tolerance = 2e-5 if wide else 16 * torch.finfo(x.dtype).eps
    generator = torch.Generator().manual_seed(0)
    unit = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) + 0.5
    vectors = [p.detach() for p in norm.parameters(recurse=False) if p.ndim == 1]
    for dim in (-1,) if x.ndim < 3 else (-1, 1 - x.ndim):
        if any(len(p) != x.shape[dim] for p in vectors) or x.shape[dim] < 2:
            continue
        for eps in _eps(norm, x.dtype):
            probes = [(x, y), (unit, norm.forward(unit))]
            if wide:
                small = unit * max(eps, 1e-12) ** 0.5
                probes.append((small, norm.forward(small)))
            for formula in _candidates(vectors, eps, dim):
                if all(_close(formula(given), got, tolerance) for given, got in probes):
                    return formula
    return None


def _eps(norm: nn.Module, dtype: torch.dtype) -> Iterator[float]:
    if getattr(norm, "eps", 0.0) is None:  # torch.nn.RMSNorm
        yield torch.finfo(dtype).eps
    values = {v for v in vars(norm).values() if isinstance(v, float) and 0.0 <= v <= 1.0}
    yield from sorted(values, reverse=True)
    if not values:
        yield 0.0


def _candidates(vectors: list[Tensor], eps: float, dim: int) -> Iterator[Formula]:
    vectors = [v.double() for v in vectors]
    for centred in (True, False):
        if len(vectors) == 0:
            yield Formula(centred, None, None, eps, dim)
        elif len(vectors) == 1:
            yield Formula(centred, vectors[0], None, eps, dim)
            yield Formula(centred, 1.0 + vectors[0], None, eps, dim)
            yield Formula(centred, None, vectors[0], eps, dim)
        elif len(vectors) == 2:
            for scale, shift in (vectors, vectors[::-1]):
                yield Formula(centred, scale, shift, eps, dim)
                yield Formula(centred, 1.0 + scale, shift, eps, dim)


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    error, size = (a - b.double()).abs().max(), b.double().abs().max()
    return bool(error <= tolerance * size)
