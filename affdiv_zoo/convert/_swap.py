"""Folding norms into corrected layers: the algebra, and the calibration of what is not exact.

With n features, LayerNorm and RMSNorm are y = a * v sqrt(n) / sqrt(||v||^2 + n eps) + c, v = x - mean(x) or x. So

    W y + b = (W diag(a)) v sqrt(n) / sqrt(||v||^2 + n eps) + (b + W c),

which is the norm-like map of x with weights W diag(a) sqrt(n) / s, bias b + W c and eps' = n eps: exact. What is
approximate, and how it is calibrated, is ours.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from affdiv_zoo.convert._norms import Formula
from affdiv_zoo.convert._report import LayerChange
from affdiv_zoo.layers import CorrectedLinear, PatchNormConv1d, PatchNormConv2d, PatchNormConv3d

_CONVS = {nn.Conv1d: PatchNormConv1d, nn.Conv2d: PatchNormConv2d, nn.Conv3d: PatchNormConv3d}

Calibrate = Callable[[Tensor], None]


def is_plain(layer: nn.Module) -> bool:
    """Whether :func:`correct` can take it: subclasses may compute something else."""
    return type(layer) in _CONVS or type(layer) is nn.Linear or _is_timm_linear(layer)


def _is_timm_linear(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) and type(layer).__module__ == "timm.layers.linear"


def correct(layer: nn.Module, *, bias: bool, correction: str, center: bool, scale: str, eps: float) -> None:
    """Turns a plain linear layer or convolution into the corrected one, in place."""
    options = dict(bias=bias, correction=correction, center=center, scale=scale, eps=eps)
    if type(layer) in _CONVS:
        _CONVS[type(layer)].from_conv(layer, **options)
    else:
        CorrectedLinear.from_linear(layer, **options)


def remove_norm(norm: nn.Module) -> None:
    """Turns a norm into ``nn.Identity`` in place, or into the activation (and dropout) that it ends in.

    In place, so that every reference to it and its hooks stay good.
    """
    rest = {name: child for name, child in norm.named_children() if type(child) is not nn.Identity}
    own = vars(nn.Module()).keys()
    for key in [key for key in vars(norm) if key not in own]:
        delattr(norm, key)
    for held in (norm._parameters, norm._buffers, norm._non_persistent_buffers_set, norm._modules):
        held.clear()
    norm.__class__ = nn.Sequential if rest else nn.Identity
    norm._modules.update({name: rest[name] for name in ("drop", "act") if name in rest})


def fold_norm(
    layer: nn.Module, norm: Formula, correction: str, center: bool | None, scale: str
) -> tuple[LayerChange, Calibrate | None]:
    """Corrects a layer that a LayerNorm or RMSNorm feeds, with the norm folded in.

    Exact if the correction is ``"norm"``, or there is no bias (then affine-like is norm-like), and ``center`` is the
    norm's. Otherwise the returned function is to be called with the layer's input: it sets one factor on the weights
    and one on the bias so that, in the least squares sense, the radial factors of both parts are the norm's.
    """
    center = norm.centred if center is None else center
    n = layer.weight[0].numel()
    shape = layer.weight.shape
    weight = layer.weight.to(torch.float64, copy=True).flatten(1)
    bias = None if layer.bias is None else layer.bias.to(torch.float64, copy=True)
    if norm.shift is not None:
        bias = weight @ norm.shift + (0.0 if bias is None else bias)
    if norm.scale is not None:
        weight = weight * norm.scale
    exact = center == norm.centred and (correction == "norm" or bias is None)
    s = 1.0
    if scale == "rms":
        s = math.sqrt(n + 1 if correction == "affine" and bias is not None else n)
    # Where the layer does not centre but the norm did, the weights can do it for the numerator.
    seen = weight - weight.mean(1, keepdim=True) if norm.centred and not center else weight
    seen = seen * (math.sqrt(n) / s)
    change = LayerChange("", center, n * norm.eps)
    correct(layer, bias=bias is not None, correction=correction, center=center, scale=scale, eps=change.eps)
    layer.weight.copy_(seen.view(shape))
    if bias is not None:
        layer.bias.copy_(bias)
    if exact:
        return change, None
    plain = Formula(norm.centred, None, None, norm.eps, -1)

    def calibrate(x: Tensor) -> None:
        rows = x if isinstance(layer, nn.Linear) else x.movedim(1, -1)
        rows = rows.reshape(-1, n).double()
        target = F.linear(plain(rows), weight)
        v = rows - rows.mean(-1, keepdim=True) if center else rows
        floor = 1.0 if correction == "affine" and bias is not None else change.eps
        radial = s * torch.rsqrt(v.square().sum(-1, keepdim=True) + floor)
        reached = F.linear(v * radial, seen)
        layer.weight.mul_(least_squares(reached, target).to(layer.weight.dtype))
        if bias is not None:
            target = target + bias
            if correction == "affine":
                layer.bias.mul_(least_squares(radial, torch.ones_like(radial)).to(layer.bias.dtype))
        got = layer.forward(x)
        got = got if isinstance(layer, nn.Linear) else got.movedim(1, -1)
        change.difference = relative_rms(got.reshape(target.shape).double() - target, target)

    return change, calibrate


def least_squares(x: Tensor, y: Tensor) -> Tensor:
    """The a for which a x is closest to y; 1 if x is zero."""
    square = x.square().sum()
    return torch.where(square > 0, (x * y).sum() / square, torch.ones_like(square))


def relative_rms(error: Tensor, of: Tensor) -> float:
    """The RMS of ``error`` over that of ``of``."""
    size = of.square().mean().sqrt()
    return float(error.square().mean().sqrt() / size) if size > 0 else float(error.abs().max() > 0)


@dataclass
class BatchNormStats:
    """An evaluated BatchNorm as ``y = x * scale + shift``, and the mean and deviation of y on the example.

    All are float64 vectors over the channels.
    """

    scale: Tensor
    shift: Tensor
    mean: Tensor
    std: Tensor


def batch_norm_stats(norm: nn.Module, x: Tensor) -> BatchNormStats:
    """From a BatchNorm's running statistics and an input of it, ``(batch, channels, ...)``."""
    scale = torch.rsqrt(norm.running_var.double() + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight.double()
    shift = -norm.running_mean.double() * scale
    if norm.bias is not None:
        shift = shift + norm.bias.double()
    mean, std = _channel_stats(x, 1)
    return BatchNormStats(scale, shift, mean * scale + shift, std * scale.abs())


def _channel_stats(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    rows = x.movedim(dim, -1).flatten(0, -2).double()
    return rows.mean(0), rows.std(0, correction=0)


def fold_batch_norm(
    layer: nn.Module, norm: BatchNormStats, correction: str, center: bool | None, scale: str
) -> tuple[LayerChange, Calibrate]:
    """Corrects a convolution (or linear layer) in front of a BatchNorm, starting from the folded convolution.

    The returned function is to be called with the layer's input. It gives each output channel a gain (put into the
    weights) and a bias, such that the channel's mean and standard deviation are those after the BatchNorm in the
    original model. With z the corrected map without bias and r what a bias is multiplied by (1 for norm-like),

        mean(g z + b r) = m,  var(g z + b r) = s^2,

    a quadratic equation in g. Channels without variation, and those where r alone varies more than s, keep g = 1 or
    take std(z) g = s.
    """
    n = layer.weight[0].numel()
    center = n > 1 if center is None else center and n > 1
    change = LayerChange("", center, 1e-6)
    correct(layer, bias=True, correction=correction, center=center, scale=scale, eps=change.eps)
    per_channel = [-1] + [1] * (layer.weight.ndim - 1)
    weight = layer.weight.double() * norm.scale.view(per_channel)
    bias = layer.bias.double() * norm.scale + norm.shift
    layer.weight.copy_(weight)
    layer.bias.copy_(bias)

    def plain(x: Tensor) -> Tensor:
        w, b = weight.to(x.dtype), bias.to(x.dtype)
        return F.linear(x, w, b) if isinstance(layer, nn.Linear) else layer._conv_forward(x, w, b)

    def calibrate(x: Tensor) -> None:
        dim = -1 if isinstance(layer, nn.Linear) else 1
        layer.bias.zero_()
        z = layer.forward(x).movedim(dim, -1).flatten(0, -2).double()
        r = torch.ones_like(z)
        if correction == "affine":
            folded = layer.weight.clone()
            layer.weight.zero_()
            layer.bias.fill_(1.0)
            r = layer.forward(x).movedim(dim, -1).flatten(0, -2).double()
            layer.weight.copy_(folded)
        gain, shift = _match(z, r, norm.mean, norm.std)
        layer.weight.mul_(gain.view(per_channel).to(layer.weight.dtype))
        layer.bias.copy_(shift)
        got, wanted = layer.forward(x), plain(x)
        change.difference = relative_rms((got - wanted).double(), wanted.double())
        alive = norm.std > 0
        ratio = (_channel_stats(got, dim)[1] / norm.std)[alive]
        change.std_ratio = float(ratio.mean()) if len(ratio) else None

    return change, calibrate


def _match(z: Tensor, r: Tensor, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """Per column the g and b for which g z + b r has this mean and standard deviation."""
    ez, er = z.mean(0), r.mean(0)
    # b = p - q g keeps the mean; what is left is the variance of g (z - q r) + p r.
    p, q = mean / er, ez / er
    u = z - q * r
    uu, rr = u.var(0, correction=0), r.var(0, correction=0)
    ur = ((u - u.mean(0)) * (r - er)).mean(0)
    half = p * ur
    root = (half.square() - uu * (p.square() * rr - std.square())).clamp(min=0.0).sqrt()
    gain = (root - half) / uu
    gain = torch.where(gain > 0, gain, std / z.std(0, correction=0))
    gain = torch.where((uu > 1e-20) & gain.isfinite() & (gain > 0), gain, torch.ones_like(gain))
    return gain, p - q * gain
