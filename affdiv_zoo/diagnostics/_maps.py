"""Linear layers and convolutions as kernels: what one position's gradient does to another position's activation.

See the theory in :mod:`affdiv_zoo.diagnostics`. A *row* is one application of the affine map: a token of a linear
layer, or a patch of one group of a convolution. All rows of some samples are one tensor ``(samples, groups, length,
positions)``.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from timm.layers import Conv2dSame, pad_same
from torch import Tensor, nn

from affdiv_zoo import _plain, functional
from affdiv_zoo.layers import CorrectedLinear, PatchNormConv1d, PatchNormConv2d, PatchNormConv3d
from affdiv_zoo.layers.attention import _QKV

PATCH_NORMS = (PatchNormConv1d, PatchNormConv2d, PatchNormConv3d)


@dataclass(frozen=True)
class Part:
    """Output rows of a weight that share one correction: all of them, but for ``CorrectedAttention``'s q, k and v.

    Attributes:
        rows: Which outputs.
        correction: As in :mod:`affdiv_zoo.functional`.
        label: Appended to the layer's name.
    """

    rows: slice
    correction: str
    label: str = ""


@dataclass(frozen=True)
class Features:
    """The two vectors of a row whose product is the kernel: K(p, q) = phi(p) . psi(q).

    phi = (forward * x, forward_one) is what the row's output is linear in, W phi_x + b phi_1; psi = (backward * x,
    backward_one) is what the row's gradient is multiplied with in dW and db. All four ``(samples, groups, positions)``,
    or one number for all rows; the entry of a parameter that does not train is 0 in psi.
    """

    forward: Tensor | float
    forward_one: Tensor | float
    backward: Tensor | float
    backward_one: Tensor | float

    def same(self, squares: Tensor) -> Tensor:
        """K(p, p): the divergence of each row, from the rows' ||x||^2."""
        return squares * (self.forward * self.backward) + self.forward_one * self.backward_one


class LayerMap:
    """A linear layer or a convolution, its weights apart.

    Args:
        module: One that :func:`refusal` has nothing against.

    Attributes:
        parts: Its outputs, by correction.
        groups: Of a convolution; else 1.
        length: n, the length of x.
        center: Whether x is centred.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.conv = isinstance(module, nn.modules.conv._ConvNd)
        self.transposed = is_transposed_linear(module)
        weight = module.weight.detach()
        self.groups = module.groups if self.conv else 1
        self.length = weight.shape[0] if self.transposed else weight[0].numel()
        self.outputs = weight.shape[1] if self.transposed else weight.shape[0]
        self.correction = getattr(module, "correction", "none") if is_corrected(module) else "none"
        self.scale = module.scale if is_corrected(module) else "l2"
        self.center = module.center if is_corrected(module) else False
        self.eps = module.eps if is_corrected(module) else 0.0
        plain = self.outputs // 3 * 2
        if isinstance(module, _QKV):
            self.parts = [
                Part(slice(0, plain), "none", "[q, k]"),
                Part(slice(plain, None), self.correction, "[v]"),
            ]
        else:
            self.parts = [Part(slice(None), self.correction)]

    def rows(self, x: Tensor) -> Tensor:
        """An input's tokens or patches, centred where the map centres: ``(inputs, groups, n, positions)``."""
        rows = self._patches(x) if self.conv else x.reshape(x.shape[0], -1, self.length).mT.unsqueeze(1)
        return rows - rows.mean(2, keepdim=True) if self.center else rows

    def _patches(self, x: Tensor) -> Tensor:
        m = self.module
        if isinstance(m, Conv2dSame):
            x, pad = pad_same(x, m.kernel_size, m.stride, m.dilation), [0, 0]
        else:
            pad = m._reversed_padding_repeated_twice
            x, pad = _plain.pad_input(x, list(pad), m.padding_mode)
        if max(pad) == 0 and set(m.kernel_size) == {1} and set(m.stride) == {1}:
            return x.unflatten(1, (self.groups, -1)).flatten(3)
        if len(m.kernel_size) == 2:  # the same numbers as below, by a faster kernel
            patches = F.unfold(x, m.kernel_size, m.dilation, pad, m.stride)
            return patches.unflatten(1, (self.groups, -1))
        patches = functional._patches(x, m.kernel_size, m.stride, pad, m.dilation, self.groups, "zeros")
        return patches.flatten(2, -2).mT

    def output_rows(self, z: Tensor) -> Tensor:
        """An output, or a gradient of one, by rows: ``(inputs, groups, outputs / groups, positions)``."""
        if not self.conv:
            return z.reshape(z.shape[0], -1, self.outputs).mT.unsqueeze(1)
        return z.unflatten(1, (self.groups, -1)).flatten(3)

    def features(self, part: Part, squares: Tensor, has_bias: bool, trains: tuple[bool, bool]) -> Features:
        """phi and psi of rows with these ||x||^2; ``trains``: whether the weight and the bias are updated."""
        one = 1.0 if has_bias else 0.0
        w, b = float(trains[0]), float(trains[1])
        if part.correction == "none":
            return Features(1.0, one, w, one * b)
        r = torch.rsqrt(squares + _plain.floor(part.correction, has_bias, self.eps))
        if part.correction == "gradient":
            return Features(1.0, one, w * r.square(), one * b * r.square())
        sr = r * _plain.length_scale(part.correction, has_bias, self.scale, self.length)
        if part.correction == "affine":
            return Features(sr, one * sr, w * sr, one * b * sr)
        return Features(sr, one, w * sr, one * b)  # norm-like

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """W phi_x + b phi_1 for any weights: the layer's output for its own, before an activation of its own."""
        m = self.module
        if self.transposed:
            return F.linear(x, weight.mT, bias)
        if isinstance(m, _QKV):
            return _plain.attention_projections(
                x, weight, bias, "separable", _forward(self.correction), self.center, self.scale, self.eps
            )
        if not self.conv:
            return _plain.corrected_linear(
                x, weight, bias, _forward(self.correction), self.center, self.scale, self.eps
            )
        if isinstance(m, Conv2dSame):
            x, pad = pad_same(x, m.kernel_size, m.stride, m.dilation), [0] * 4
        else:
            pad = list(m._reversed_padding_repeated_twice)
        return _plain.patch_norm_conv(
            x,
            weight,
            bias,
            list(m.stride),
            pad,
            list(m.dilation),
            m.groups,
            m.padding_mode,
            _forward(self.correction),
            self.center,
            self.scale,
            self.eps,
            "none",
            None,
        )

    def weight_of_rows(self, product: Tensor) -> Tensor:
        """Sums over rows of outputs times x, ``(groups, outputs / groups, n)``, in the weight's shape."""
        flat = product.flatten(0, 1)
        return flat.mT if self.transposed else flat.reshape(self.module.weight.shape)


def _forward(correction: str) -> str:
    """The correction of the forward pass."""
    return "none" if correction == "gradient" else correction


def is_corrected(module: nn.Module) -> bool:
    """One of this package's layers."""
    return isinstance(module, (CorrectedLinear, *PATCH_NORMS))


def is_transposed_linear(module: nn.Module) -> bool:
    """transformers' ``Conv1D``: a linear layer with its weight the other way round."""
    return type(module).__name__ == "Conv1D" and getattr(getattr(module, "weight", None), "ndim", 0) == 2


def is_affine(module: nn.Module) -> bool:
    """Whether a module says of itself that it is a linear layer or a convolution; :func:`refusal` looks closer."""
    conv = isinstance(module, nn.modules.conv._ConvNd) and not isinstance(module, nn.modules.conv._ConvTransposeNd)
    return isinstance(module, nn.Linear) or conv or is_transposed_linear(module)


def refusal(module: nn.Module) -> str:
    """Why an affine layer's update is not the theory's; empty if it is."""
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is computed from other parameters"
    if not weight.is_floating_point():
        return f"its weight is {weight.dtype}"
    bias = getattr(module, "bias", None)
    if not weight.requires_grad and (bias is None or not bias.requires_grad):
        return "frozen: no update"
    return ""


def agrees(map: LayerMap, x: Tensor, z: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a layer's output for one input is what its rows and features say: W phi_x + b phi_1.

    Args:
        map: The layer's map.
        x: The layer's input, the first dimension kept.
        z: Its output.
        weight: Its weight.
        bias: Its bias.
    """
    rows, z_rows = map.rows(x), map.output_rows(z)
    squares = rows.square().sum(2)
    w = (weight.mT if map.transposed else weight.flatten(1)).unflatten(0, (map.groups, -1)).to(rows.dtype)
    for part in map.parts:
        f = map.features(part, squares, bias is not None, (True, True))
        want = w[:, part.rows] @ rows * _broadcast(f.forward)
        if bias is not None:
            b = bias.to(rows.dtype).unflatten(0, (map.groups, -1))[:, part.rows]
            want = want + b.unsqueeze(-1) * _broadcast(f.forward_one)
        got = z_rows[:, :, part.rows].to(rows.dtype)
        # Loose: half types round, and what this is for, another map, is off by much more.
        if want.shape != got.shape or not (want - got).norm() <= 0.05 * got.norm() + 1e-6:
            return False
    return True


def _broadcast(factor: Tensor | float) -> Tensor | float:
    """A number per row, ready to multiply ``(samples, groups, length, positions)``."""
    return factor.unsqueeze(2) if isinstance(factor, Tensor) else factor


def chunk_size(per_sample: int, limit: int) -> int:
    """How many samples at a time keep a temporary below ``limit`` numbers; at least one."""
    return max(1, math.floor(limit / max(per_sample, 1)))
