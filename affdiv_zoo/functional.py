"""The maps of the Affine Divergence paper (George Bird, arXiv 2512.22247), one short formula each.

One gradient step of size eta on z = W x + b, for one sample x with g = dL/dz, gives dW = -eta g x^T and db = -eta g, so
the activation moves by -eta g (||x||^2 + 1) instead of the ideal -eta g. The factor ||x||^2 + 1 is the *affine
divergence*. Each correction below makes it a constant:

============  ==============================  =========================================
correction    map                             effective update / (-eta g)
============  ==============================  =========================================
none          W x + b                         ||x||^2 + 1
affine        (W x + b) / sqrt(||x||^2 + 1)   1
norm          W x / ||x|| + b                 2 with a bias, 1 without
gradient      W x + b, backward corrected     1
============  ==============================  =========================================

Two ideas hold everywhere:

* **The augmented vector.** W x + b is [W b] [x; 1], and ||[x; 1]||^2 = ||x||^2 + 1. Without a bias the augmented vector
  is x itself, so the divergence is ||x||^2, and affine-like and norm-like coincide. Nothing then keeps the divisor from
  zero but ``eps``, which is added to ||x||^2.
* **Patches.** A convolution applies one affine map to every patch of its input, so the same formulas hold with x = the
  patch of the output position's group, padding included: PatchNorm.

``center=True`` (ours) lets the map see only x - mean(x): it is to affine-like what LayerNorm is to L2 norm.
``scale="rms"`` (ours) multiplies a normalised map by the square root of the augmented vector's length, sqrt(n + 1) or
sqrt(n): a reparametrisation of W after which usual initialisations and learning rates apply. ``"l2"`` is the paper's.

Functions called ``*_reference`` are the formulas as written above. The others compute the same numbers, safely at the
ends of every floating-point format; the tests hold them together.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from affdiv_zoo._checks import check_conv, check_linear, to_list

__all__ = [
    "affine_like_linear",
    "affine_like_linear_reference",
    "corrected_linear",
    "gradient_corrected_linear",
    "gradient_corrected_linear_reference",
    "norm_like_linear",
    "norm_like_linear_reference",
    "patch_norm_conv",
    "patch_norm_conv_reference",
    "patch_sqnorm",
    "patch_sqnorm_reference",
]

# Squares are summed times _SHRINK, so that float32 holds ||x|| up to 3e26 and not only up to 2e19. What this pushes
# below the smallest float32, x < 2e-12, cannot be seen beside the 1 (or the eps) that the sum is added to.
_SHRINK = 2.0**-48
_SQRT_SHRINK = 2.0**-24


# ---------------------------------------------------------------------------------------------------------------------
# Linear maps
# ---------------------------------------------------------------------------------------------------------------------


def affine_like_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    center: bool = False,
    scale: str = "l2",
    eps: float = 1e-6,
) -> Tensor:
    r"""Affine-like map: s (W x + b) / sqrt(||x||^2 + 1), the paper's structural correction of a linear layer.

    Its effective update is exactly -eta g s^2, that is -eta g in the paper's form. Without a bias it is
    s W x / sqrt(||x||^2 + eps), the norm-like map (the augmented vector is x itself).

    Args:
        input: ``(..., in_features)``, any floating dtype. Squares are summed in float32 or wider.
        weight: ``(out_features, in_features)``.
        bias: ``(out_features,)`` or None.
        center: Use x - mean(x) for x (ours).
        scale: ``"l2"``: s = 1 (the paper). ``"rms"``: s = sqrt(in_features + 1), sqrt(in_features) without a bias.
        eps: Added to ||x||^2 where no 1 is, that is without a bias.

    Returns:
        ``(..., out_features)`` in the input's dtype.

    Raises:
        TypeError: The input is not floating point.
        ValueError: A shape or an option does not fit; the message names it.
    """
    return corrected_linear(input, weight, bias, correction="affine", center=center, scale=scale, eps=eps)


def norm_like_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    center: bool = False,
    scale: str = "l2",
    eps: float = 1e-6,
) -> Tensor:
    r"""Norm-like map: s W x / sqrt(||x||^2 + eps) + b, L2 norm (centred: LayerNorm) fused into the linear layer.

    Its effective update is the constant -eta g (s^2 + 1), or -eta g s^2 without a bias.

    Args:
        input: ``(..., in_features)``, any floating dtype. Squares are summed in float32 or wider.
        weight: ``(out_features, in_features)``.
        bias: ``(out_features,)`` or None.
        center: Use x - mean(x) for x (ours; LayerNorm's centring).
        scale: ``"l2"``: s = 1 (the paper). ``"rms"``: s = sqrt(in_features), as in RMSNorm.
        eps: Added to ||x||^2. (LayerNorm and RMSNorm add theirs to the mean square: in_features times as much here.)

    Returns:
        ``(..., out_features)`` in the input's dtype.

    Raises:
        TypeError: The input is not floating point.
        ValueError: A shape or an option does not fit; the message names it.
    """
    return corrected_linear(input, weight, bias, correction="norm", center=center, scale=scale, eps=eps)


def gradient_corrected_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    center: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    r"""Gradient-only correction: W x + b forward; each sample's share of dW and db is divided by ||x||^2 + 1.

    Its effective update is exactly -eta g (the paper's alternative to a structural correction). The gradient with
    respect to x is untouched. Without a bias the divisor is ||x||^2 + eps.

    Args:
        input: ``(..., in_features)``, any floating dtype.
        weight: ``(out_features, in_features)``.
        bias: ``(out_features,)`` or None.
        center: Use x - mean(x) for x (ours).
        eps: Added to ||x||^2 where no 1 is, that is without a bias.

    Returns:
        ``(..., out_features)`` in the input's dtype.

    Raises:
        TypeError: The input is not floating point.
        ValueError: A shape or an option does not fit; the message names it.
    """
    return corrected_linear(input, weight, bias, correction="gradient", center=center, eps=eps)


def corrected_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    correction: str = "affine",
    center: bool = False,
    scale: str = "l2",
    eps: float = 1e-6,
) -> Tensor:
    r"""The linear map with the correction chosen by name: ``"none"``, ``"affine"``, ``"norm"`` or ``"gradient"``.

    See :func:`affine_like_linear`, :func:`norm_like_linear` and :func:`gradient_corrected_linear`; ``"none"`` is
    :func:`torch.nn.functional.linear`, of x - mean(x) if ``center``.

    Args:
        input: ``(..., in_features)``, any floating dtype.
        weight: ``(out_features, in_features)``.
        bias: ``(out_features,)`` or None.
        correction: The table at the top of this module.
        center: Use x - mean(x) for x (ours).
        scale: ``"l2"`` or ``"rms"``; no effect on ``"none"`` and ``"gradient"``, which do not normalise.
        eps: Added to ||x||^2 where no 1 is.

    Returns:
        ``(..., out_features)`` in the input's dtype.

    Raises:
        TypeError: The input is not floating point.
        ValueError: A shape or an option does not fit; the message names it.
    """
    if not torch.jit.is_scripting():
        check_linear(input, weight, bias, correction, center, scale, eps)
    return _corrected_linear(input, weight, bias, correction, center, scale, eps)


def _corrected_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, correction: str, center: bool, scale: str, eps: float
) -> Tensor:
    x = _widen(input)
    if center:
        x = x - x.mean(-1, keepdim=True)
    if correction == "none":
        return F.linear(x.to(input.dtype), weight, bias)
    shrunk = _sum_of_squares(x, -1)
    n = weight.shape[1]
    if correction == "gradient":
        x = x.to(input.dtype)
        return _scale_param_grads(
            F.linear(x, weight.detach(), None if bias is None else bias.detach()),
            F.linear(x.detach(), weight, bias),
            (_SHRINK / (shrunk + _SHRINK * _floor(correction, bias is not None, eps))).detach(),
        )
    r = _inverse_norm(shrunk, correction, bias is not None, scale, n, eps)
    # Dividing x and not W x + b: half types cannot overflow in the product, and it is the smaller of the two.
    z = F.linear((x * r).to(input.dtype), weight, bias if correction == "norm" else None)
    if bias is not None and correction == "affine":
        z = z + (r * bias).to(z.dtype)
    return z


def affine_like_linear_reference(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    center: bool = False,
    scale: str = "l2",
    eps: float = 1e-6,
) -> Tensor:
    """:func:`affine_like_linear` as the paper writes it."""
    x = input - input.mean(-1, keepdim=True) if center else input
    n = x.shape[-1]
    one, length = (1.0, n + 1) if bias is not None else (eps, n)
    s = length**0.5 if scale == "rms" else 1.0
    return s * F.linear(x, weight, bias) / torch.sqrt(x.square().sum(-1, keepdim=True) + one)


def norm_like_linear_reference(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    center: bool = False,
    scale: str = "l2",
    eps: float = 1e-6,
) -> Tensor:
    """:func:`norm_like_linear` as the paper writes it."""
    x = input - input.mean(-1, keepdim=True) if center else input
    s = x.shape[-1] ** 0.5 if scale == "rms" else 1.0
    return F.linear(s * x / torch.sqrt(x.square().sum(-1, keepdim=True) + eps), weight, bias)


def gradient_corrected_linear_reference(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, center: bool = False, eps: float = 1e-6
) -> Tensor:
    """:func:`gradient_corrected_linear`, its backward pass written as a hook on the product's gradient."""
    x = input - input.mean(-1, keepdim=True) if center else input
    divergence = (x.square().sum(-1, keepdim=True) + (1.0 if bias is not None else eps)).detach()
    for_params = F.linear(x.detach(), weight, bias)
    if for_params.requires_grad:
        for_params.register_hook(lambda g: g / divergence)
    for_input = F.linear(x, weight.detach(), None if bias is None else bias.detach())
    return for_input + (for_params - for_params.detach())


# ---------------------------------------------------------------------------------------------------------------------
# Convolutions: the same maps on patches
# ---------------------------------------------------------------------------------------------------------------------


def patch_sqnorm(
    input: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    padding_mode: str = "zeros",
    center: bool = False,
) -> Tensor:
    r"""The squared length of every patch that a convolution sees: ||x||^2, or ||x - mean(x)||^2 if ``center``.

    Computed without forming the patches: the sum over a patch is the box sum, over the kernel window, of the sums over
    the channels. Centred, the part within a pixel is summed about the pixel's own mean, and the part between pixels in
    float64 on the one-channel map, so that a large common mean does not cancel the digits away.

    Args:
        input: ``(batch, channels, *spatial)`` or ``(channels, *spatial)``, with 1, 2 or 3 spatial dimensions.
        kernel_size: As in ``torch.nn.Conv*d``; an int stands for all spatial dimensions.
        stride: As in ``torch.nn.Conv*d``.
        padding: As in ``torch.nn.Conv*d``, ``"same"`` and ``"valid"`` included. Padded entries belong to the patch.
        dilation: As in ``torch.nn.Conv*d``.
        groups: Each group of channels has patches of its own.
        padding_mode: ``"zeros"``, ``"reflect"``, ``"replicate"`` or ``"circular"``.
        center: About the patch's mean, taken over all of its entries (ours).

    Returns:
        ``(batch, groups, *output)`` (without batch if the input has none), float64 for a float64 input, else float32.

    Raises:
        TypeError: The input is not floating point.
        ValueError: A shape or an option does not fit; the message names it.
    """
    dims = input.ndim - 2 if isinstance(kernel_size, int) else len(kernel_size)
    kernel, stride, dilation, pad = _geometry(dims, kernel_size, stride, padding, dilation)
    check_conv(input, None, None, kernel, pad, dilation, groups, padding_mode)
    x = input if input.ndim == dims + 2 else input.unsqueeze(0)
    x, padding = _pad(x, pad, padding_mode)
    sqnorm = _patch_sqnorm(x, kernel, stride, padding, dilation, groups, center) / _SHRINK
    return sqnorm if input.ndim == dims + 2 else sqnorm.squeeze(0)


def patch_norm_conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    padding_mode: str = "zeros",
    correction: str = "affine",
    center: bool = False,
    scale: str = "l2",
    eps: float = 1e-6,
) -> Tensor:
    r"""PatchNorm: a convolution in 1, 2 or 3 dimensions whose map on every patch x is corrected.

    ``"affine"``: s (W x + b) / sqrt(||x||^2 + 1) (the paper's PatchNorm); ``"norm"``: s W x / sqrt(||x||^2 + eps) + b;
    ``"gradient"``: W x + b, with each patch's share of dW and db divided by ||x||^2 + 1; ``"none"``: W x + b. A patch
    has n = channels / groups * prod(kernel_size) entries.

    Args:
        input: ``(batch, channels, *spatial)`` or ``(channels, *spatial)``, any floating dtype.
        weight: ``(out_channels, channels / groups, *kernel_size)``; its rank tells the spatial dimensions.
        bias: ``(out_channels,)`` or None.
        stride: As in :func:`torch.nn.functional.conv2d`.
        padding: As in :func:`torch.nn.functional.conv2d`, ``"same"`` and ``"valid"`` included.
        dilation: As in :func:`torch.nn.functional.conv2d`.
        groups: As in :func:`torch.nn.functional.conv2d`; each group's outputs are divided by that group's patch norm.
        padding_mode: ``"zeros"``, ``"reflect"``, ``"replicate"`` or ``"circular"``.
        correction: The table at the top of this module.
        center: Use x - mean(x) for the patch x (ours); padded entries belong to the patch.
        scale: ``"l2"``: s = 1 (the paper). ``"rms"``: s = sqrt(n + 1) if affine with a bias, else sqrt(n) (ours).
        eps: Added to ||x||^2 where no 1 is.

    Returns:
        ``(batch, out_channels, *output)`` in the input's dtype. float16 is computed in float32: W x could overflow.

    Raises:
        TypeError: The input is not floating point.
        ValueError: A shape or an option does not fit; the message names it.
    """
    dims = weight.ndim - 2
    kernel, stride, dilation, pad = _geometry(dims, list(weight.shape[2:]), stride, padding, dilation)
    check_conv(input, weight, bias, kernel, pad, dilation, groups, padding_mode, correction, center, scale, eps)
    return _patch_norm_conv(
        input, weight, bias, stride, pad, dilation, groups, padding_mode, correction, center, scale, eps
    )


def _patch_norm_conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    pad: list[int],
    dilation: list[int],
    groups: int,
    padding_mode: str,
    correction: str,
    center: bool,
    scale: str,
    eps: float,
) -> Tensor:
    """:func:`patch_norm_conv` with its arguments in normal form (``pad`` as for ``F.pad``), scriptable."""
    batched = input.dim() == weight.dim()
    x = input if batched else input.unsqueeze(0)
    if x.dtype == torch.float16:
        x, weight = x.float(), weight.float()
        bias = None if bias is None else bias.float()
    x, padding = _pad(x, pad, padding_mode)
    n = weight[0].numel()
    if center:
        # W applied to x - mean(x) is W with its rows' means taken out, applied to x.
        weight = weight - weight.flatten(1).mean(1).view([-1] + [1] * (weight.dim() - 1))
    if correction == "none":
        z = _conv(x, weight, bias, stride, padding, dilation, groups)
    else:
        shrunk = _patch_sqnorm(x, list(weight.shape[2:]), stride, padding, dilation, groups, center)
        if correction == "gradient":
            divergence = shrunk + _SHRINK * _floor(correction, bias is not None, eps)
            z = _scale_param_grads(
                _conv(x, weight.detach(), None if bias is None else bias.detach(), stride, padding, dilation, groups),
                _conv(x.detach(), weight, bias, stride, padding, dilation, groups),
                _per_group(_SHRINK / divergence, weight.shape[0]).detach(),
            )
        else:
            r = _per_group(_inverse_norm(shrunk, correction, bias is not None, scale, n, eps), weight.shape[0])
            if correction == "norm" and bias is not None:
                z = _conv(x, weight, None, stride, padding, dilation, groups) * r
                z = z + bias.view([-1] + [1] * (weight.dim() - 2))
            else:
                z = _conv(x, weight, bias, stride, padding, dilation, groups) * r
    z = z.to(input.dtype)
    return z if batched else z.squeeze(0)


def patch_sqnorm_reference(
    input: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    padding_mode: str = "zeros",
    center: bool = False,
) -> Tensor:
    """:func:`patch_sqnorm` with every patch formed; needs the batch dimension."""
    x = _patches(input, kernel_size, stride, padding, dilation, groups, padding_mode)
    if center:
        x = x - x.mean(-1, keepdim=True)
    return x.square().sum(-1)


def patch_norm_conv_reference(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    padding_mode: str = "zeros",
    correction: str = "affine",
    center: bool = False,
    scale: str = "l2",
    eps: float = 1e-6,
) -> Tensor:
    """:func:`patch_norm_conv` as a corrected linear map of every patch; needs the batch dimension."""
    x = _patches(input, weight.shape[2:], stride, padding, dilation, groups, padding_mode)
    maps = {
        "none": F.linear if not center else lambda x, w, b: F.linear(x - x.mean(-1, keepdim=True), w, b),
        "affine": partial(affine_like_linear_reference, center=center, scale=scale, eps=eps),
        "norm": partial(norm_like_linear_reference, center=center, scale=scale, eps=eps),
        "gradient": partial(gradient_corrected_linear_reference, center=center, eps=eps),
    }
    weights = weight.flatten(1).chunk(groups)
    biases = [None] * groups if bias is None else bias.chunk(groups)
    z = [maps[correction](x[:, g], weights[g], biases[g]) for g in range(groups)]
    return torch.cat(z, -1).movedim(-1, 1)


def _patches(
    input: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int],
    padding: int | Sequence[int] | str,
    dilation: int | Sequence[int],
    groups: int,
    padding_mode: str,
) -> Tensor:
    """Every patch of every group: ``(batch, groups, *output, channels / groups * prod(kernel_size))``."""
    dims = input.ndim - 2
    kernel, stride, dilation, pad = _geometry(dims, kernel_size, stride, padding, dilation)
    x = F.pad(input, pad, "constant" if padding_mode == "zeros" else padding_mode)
    x = x.unflatten(1, (groups, -1))
    for d in range(dims):
        x = x.unfold(3 + d, dilation[d] * (kernel[d] - 1) + 1, stride[d])[..., :: dilation[d]]
    return x.movedim(2, 2 + dims).flatten(2 + dims)


# ---------------------------------------------------------------------------------------------------------------------
# The parts they share
# ---------------------------------------------------------------------------------------------------------------------


def _widen(x: Tensor) -> Tensor:
    """Half types to float32; float32 and float64 as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _sum_of_squares(x: Tensor, dim: int) -> Tensor:
    """_SHRINK times the sum of squares over ``dim``, which is kept."""
    return torch.addcmul(x.new_zeros([]), x, x, value=_SHRINK).sum(dim, keepdim=True)


def _floor(correction: str, bias: bool, eps: float) -> float:
    """What is added to ||x||^2: the augmented vector's 1 where there is a bias to augment with, else eps."""
    return 1.0 if bias and correction != "norm" else eps


def _inverse_norm(shrunk: Tensor, correction: str, bias: bool, scale: str, n: int, eps: float) -> Tensor:
    """s / sqrt(||x||^2 + floor), from _SHRINK ||x||^2."""
    s = 1.0
    if scale == "rms":
        s = math.sqrt(n + 1 if bias and correction == "affine" else n)
    return torch.rsqrt(shrunk + _SHRINK * _floor(correction, bias, eps)) * (s * _SQRT_SHRINK)


def _scale_param_grads(for_input: Tensor, for_params: Tensor, factor: Tensor) -> Tensor:
    """The value of ``for_input``; gradients flow to it as they are, and to ``for_params`` times ``factor``."""
    return for_input + (for_params - for_params.detach()) * factor.to(for_params.dtype)


def _patch_sqnorm(
    x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], groups: int, center: bool
) -> Tensor:
    """_SHRINK times the squared norm of every patch, ``(batch, groups, *output)``; see :func:`patch_sqnorm`."""
    x = _widen(x).unflatten(1, [groups, x.shape[1] // groups])
    if not center:
        return _box_sum(_sum_of_squares(x, 2).squeeze(2), kernel, stride, padding, dilation)
    channels, length = x.shape[2], x.shape[2]
    for k in kernel:
        length *= k
    mean = x.mean(2, keepdim=True)
    wide = torch.float32 if x.device.type == "mps" else torch.float64  # MPS has no float64
    within = _sum_of_squares(x - mean, 2).squeeze(2).to(wide)
    mean = mean.squeeze(2).to(wide) * _SQRT_SHRINK
    total = _box_sum(within + channels * mean.square(), kernel, stride, padding, dilation)
    total = total - _box_sum(channels * mean, kernel, stride, padding, dilation).square() / length
    return total.clamp(min=0.0).to(x.dtype)


def _box_sum(x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]) -> Tensor:
    """Sum over the kernel window around every output position, each channel by itself."""
    window = torch.ones([1, 1] + kernel, dtype=x.dtype, device=x.device)
    out = _conv(x.flatten(0, 1).unsqueeze(1), window, None, stride, padding, dilation, 1)
    return out.view([x.shape[0], x.shape[1]] + list(out.shape[2:]))


def _conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    """``F.conv1d``, ``2d`` or ``3d`` by the weight's rank."""
    return torch.convolution(x, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)


def _per_group(x: Tensor, out_channels: int) -> Tensor:
    """``(batch, groups, *output)`` repeated to ``(batch, out_channels, *output)``; a single group broadcasts."""
    return x if x.shape[1] == 1 else x.repeat_interleave(out_channels // x.shape[1], dim=1)


def _pad(x: Tensor, pad: list[int], padding_mode: str) -> tuple[Tensor, list[int]]:
    """Pads what a convolution cannot pad by itself; returns its padding argument for the rest."""
    left, right = pad[-2::-2], pad[-1::-2]
    if padding_mode == "zeros" and left == right:
        return x, left
    if max(pad) > 0:
        x = F.pad(x, pad, "constant" if padding_mode == "zeros" else padding_mode)
    return x, [0] * len(left)


def _geometry(
    dims: int,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int],
    padding: int | Sequence[int] | str,
    dilation: int | Sequence[int],
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Kernel, stride and dilation as lists, and the padding in ``F.pad``'s order: last dimension first, left, right."""
    kernel = to_list("kernel_size", kernel_size, dims)
    stride = to_list("stride", stride, dims)
    dilation = to_list("dilation", dilation, dims)
    if padding == "same":
        if max(stride) > 1:
            raise ValueError(f"padding='same' needs stride 1, got stride={stride}: pass the padding as numbers")
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        pairs = [(t // 2, t - t // 2) for t in total]
    else:
        pairs = [(p, p) for p in to_list("padding", 0 if padding == "valid" else padding, dims)]
    return kernel, stride, dilation, [p for pair in reversed(pairs) for p in pair]
