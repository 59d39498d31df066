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

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from affdiv_zoo import _fused, _fused_attention, _plain
from affdiv_zoo._checks import (
    autocast_enabled,
    check_bias,
    check_choice,
    check_conv,
    check_floating,
    check_length,
    check_linear,
    check_options,
    check_residual,
    to_list,
)
from affdiv_zoo.types import Activation, AttentionCorrection, RadialKind

__all__ = [
    "affine_like_linear",
    "affine_like_linear_reference",
    "corrected_attention_logits",
    "corrected_attention_logits_reference",
    "corrected_linear",
    "corrected_qkv",
    "gradient_corrected_linear",
    "gradient_corrected_linear_reference",
    "logit_divergence",
    "norm_like_linear",
    "norm_like_linear_reference",
    "parameterised_scale",
    "patch_norm_conv",
    "patch_norm_conv_reference",
    "patch_sqnorm",
    "patch_sqnorm_reference",
    "radial_map",
    "radial_map_reference",
    "separable_attention_scales",
]

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
    check_linear(input, weight, bias, correction, center, scale, eps)
    input, weight, bias = _autocast(input, weight, bias)
    map = _fused.CorrectedLinear.apply if correction != "none" and _fused.usable() else _plain.corrected_linear
    with _no_autocast(input):
        return map(input, weight, bias, correction, center, scale, eps)


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
    x, padding = _plain.pad_input(x, pad, padding_mode)
    sqnorm = _plain.patch_sqnorm(x, kernel, stride, padding, dilation, groups, center) / _plain.shrink()
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
    act: str = "none",
    residual: Tensor | None = None,
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
        act: ``"relu"``: the result is relu(z), or relu(z + residual); saves a ReLU's own memory and time.
        residual: Added to z, before the activation; of the output's shape and dtype.

    Returns:
        ``(batch, out_channels, *output)`` in the input's dtype. float16 is computed in float32: W x could overflow.

    Raises:
        TypeError: The input is not floating point.
        ValueError: A shape or an option does not fit; the message names it.
    """
    dims = weight.ndim - 2
    kernel, stride, dilation, pad = _geometry(dims, list(weight.shape[2:]), stride, padding, dilation)
    check_conv(input, weight, bias, kernel, pad, dilation, groups, padding_mode, correction, center, scale, eps)
    check_choice("act", act, get_args(Activation))
    if residual is not None:
        size = [input.shape[d - dims] + pad[-2 * d - 2] + pad[-2 * d - 1] for d in range(dims)]
        spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
        output = [(n - span) // step + 1 for n, span, step in zip(size, spans, stride, strict=True)]
        check_residual(residual, input, [*input.shape[: -dims - 1], weight.shape[0], *output])
    if input.ndim == dims + 1:
        residual = None if residual is None else residual.unsqueeze(0)
        options = dict(correction=correction, center=center, scale=scale, eps=eps, act=act, residual=residual)
        args = (input.unsqueeze(0), weight, bias, stride, padding, dilation, groups)
        return patch_norm_conv(*args, padding_mode=padding_mode, **options).squeeze(0)
    input, weight, bias = _autocast(input, weight, bias)
    with _no_autocast(input):
        if correction == "none" or not _fused.usable():
            return _plain.patch_norm_conv(
                input,
                weight,
                bias,
                stride,
                pad,
                dilation,
                groups,
                padding_mode,
                correction,
                center,
                scale,
                eps,
                act,
                residual,
            )
        input, padding = _plain.pad_input(input, pad, padding_mode)
        return _fused.PatchNormConv.apply(
            input, weight, bias, residual, stride, padding, dilation, groups, correction, center, scale, eps, act
        )


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
    act: str = "none",
    residual: Tensor | None = None,
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
    z = torch.cat(z, -1).movedim(-1, 1)
    z = z if residual is None else z + residual
    return F.relu(z) if act == "relu" else z


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
# Arguments in normal form
# ---------------------------------------------------------------------------------------------------------------------


def _autocast(input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The map's tensors in autocast's dtype where autocast is on, as for torch's own linear and convolution."""
    if not autocast_enabled(input) or input.dtype == torch.float64:
        return input, weight, bias
    dtype = torch.get_autocast_dtype(input.device.type)
    return input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _no_autocast(input: Tensor) -> AbstractContextManager:
    """Turns autocast off where it is on: the divisor wants float32."""
    return torch.autocast(input.device.type, enabled=False) if autocast_enabled(input) else nullcontext()


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


# ---------------------------------------------------------------------------------------------------------------------
# Radial maps: what normalisers are made of
# ---------------------------------------------------------------------------------------------------------------------


def radial_map(
    input: Tensor, kind: str = "l2", *, dim: int = -1, center: bool = False, scale: str = "l2", eps: float = 1e-6
) -> Tensor:
    r"""The part of a normaliser that has no parameters: x shortened to (nearly) unit length, its direction kept.

    ``"l2"``: s x / sqrt(||x||^2 + eps). ``"soft"``: s x / sqrt(||x||^2 + 1), the soft bound, which leaves short vectors
    nearly as they are: W applied to it is the affine-like map's W x part. The usual normalisers are
    :func:`parameterised_scale` of it (the paper), with x = one token, or one channel of the whole batch:

    ====================  =========================================================================
    RMSNorm               ``"l2"``, ``scale="rms"``, eps = n times RMSNorm's
    LayerNorm             the same with ``center=True``
    BatchNorm, training   the same as LayerNorm, on each channel's vector over batch and positions
    BatchNorm, eval       nothing but a parameterised scale: the statistics are constants
    ====================  =========================================================================

    Args:
        input: Any shape, any floating dtype. Squares are summed in float32 or wider.
        kind: ``"l2"`` or ``"soft"``.
        dim: The dimension that x runs over, -1 for tokens, 1 for the channels of NCHW; n is its size.
        center: Use x - mean(x) for x.
        scale: ``"l2"``: s = 1. ``"rms"``: s = sqrt(n), or sqrt(n + 1) for ``"soft"`` (the augmented vector's length).
        eps: Added to ||x||^2 by ``"l2"``.

    Returns:
        The input's shape and dtype.

    Raises:
        TypeError: The input is not floating point.
        ValueError: An option does not fit; the message names it.
        IndexError: The input has no such dimension.
    """
    check_choice("kind", kind, get_args(RadialKind))
    check_options("none", scale, eps)
    check_floating(input)
    check_length(input.shape[dim], center, f"input.shape[{dim}]")
    return _plain.radial_map(input, kind, dim, center, scale, eps)


def radial_map_reference(
    input: Tensor, kind: str = "l2", *, dim: int = -1, center: bool = False, scale: str = "l2", eps: float = 1e-6
) -> Tensor:
    """:func:`radial_map` as its formula is written."""
    x = input - input.mean(dim, keepdim=True) if center else input
    plus, length = {"l2": (eps, x.shape[dim]), "soft": (1.0, x.shape[dim] + 1)}[kind]
    s = length**0.5 if scale == "rms" else 1.0
    return s * x / torch.sqrt(x.square().sum(dim, keepdim=True) + plus)


def parameterised_scale(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, dim: int = -1) -> Tensor:
    """The other part of a normaliser: weight * x + bias, one number each per entry of ``dim``.

    Args:
        input: Any shape, any floating dtype.
        weight: ``(input.shape[dim],)``.
        bias: As the weight, or None.
        dim: -1 for tokens, 1 for the channels of NCHW.

    Returns:
        The input's shape and dtype.

    Raises:
        TypeError: The input is not floating point.
        ValueError: The weight or the bias does not have one number per entry.
        IndexError: The input has no such dimension.
    """
    check_floating(input)
    if tuple(weight.shape) != (input.shape[dim],):
        raise ValueError(f"weight has shape {tuple(weight.shape)}, expected ({input.shape[dim]},), input.shape[{dim}]")
    check_bias(weight, bias)
    return _plain.parameterised_scale(input, weight, bias, dim)


# ---------------------------------------------------------------------------------------------------------------------
# Attention
# ---------------------------------------------------------------------------------------------------------------------
#
# q = W_q x + b_q, k = W_k x + b_k, s_i^2 = ||x_i||^2 + 1. One step for a_ij = q_i . k_j moves it by -eta g D_ij,
#
#     D_ij = ||k_j||^2 s_i^2 + ||q_i||^2 s_j^2 = s_i^2 s_j^2 (||q^_i||^2 + ||k^_j||^2),    q^ = q / s, k^ = k / s,
#
# to first order. In terms of the affine-like q^ and k^, which a step moves like free variables, the corrections are:
#
#     projection    q^_i . k^_j                                               each projection by itself
#     separable     q^_i . k^_j / sqrt(2 ||q^_i|| ||k^_j||)                   the bound D >= 2 s_i s_j ||q_i|| ||k_j||
#     logit         q^_i . k^_j / sqrt(||q^_i||^2 + ||k^_j||^2)               = a_ij / sqrt(D_ij)
#     exact         (||q^_i + k^_j|| - ||q^_i - k^_j||) / 2                   ours
#
# Separable and logit hold their divisors constant in the backward pass, and err by what the step changes in them. The
# exact one has no such error. An update of exactly -eta g asks for a function f of (q^, k^) with ||grad f|| = 1, and an
# f with the zeros of q^ . k^ is the signed distance to them. In the orthogonal coordinates (q^ +- k^) / sqrt 2 they are
# the cone where both have the same length, and the distance to it is the difference of the lengths / sqrt 2. It equals
# 2 q^ . k^ / (||q^ + k^|| + ||q^ - k^||): the logit correction, where q^ . k^ is small.


def logit_divergence(
    input: Tensor, query: Tensor, key: Tensor, *, bias: bool = True, center: bool = False, eps: float = 1e-6
) -> Tensor:
    r"""D_ij = ||k_j||^2 (||x_i||^2 + 1) + ||q_i||^2 (||x_j||^2 + 1): a step for q_i . k_j moves it by -eta g D_ij.

    To first order, for the projections q = W_q x + b_q and k = W_k x + b_k of the same tokens (ours: the paper's
    argument for a product of two affine maps).

    Args:
        input: The tokens x, ``(..., tokens, dim)``, any floating dtype.
        query: ``(..., heads, tokens, head_dim)``; norms are per head.
        key: As the query.
        bias: Whether the projections have biases. If not, the 1 becomes ``eps``.
        center: They are projections of x - mean(x) (ours).
        eps: Added to ||x||^2 where no 1 is.

    Returns:
        ``(..., heads, tokens, tokens)``, float64 for float64, else float32. Norms beyond 1e9 overflow float32 here; the
        corrected logits are computed without forming D.

    Raises:
        TypeError: A tensor is not floating point.
        ValueError: The shapes do not fit together; the message names them.
    """
    _check_attention("logit", input, query, key, center, eps)
    s2 = _plain.inverse_token_norm(input, bias, center, eps).pow(-2)
    q2, k2 = (_plain.widen(t).square().sum(-1, keepdim=True) for t in (query, key))
    return s2 * k2.mT + q2 * s2.mT


def separable_attention_scales(
    input: Tensor, query: Tensor, key: Tensor, *, bias: bool = True, center: bool = False, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    r"""Factors of q and k that nearly cancel the logit's divergence: 1 / sqrt(sqrt 2 ||q_i|| s_i), the same for k.

    With s = sqrt(||x||^2 + 1), from D_ij >= 2 s_i s_j ||q_i|| ||k_j|| (ours: arithmetic and geometric mean). Since only
    q and k are rescaled, any attention kernel can follow; call it with ``scale=1.0``.

    Args:
        input: The tokens x, ``(..., tokens, dim)``, any floating dtype.
        query: Plain affine maps of x, ``(..., heads, tokens, head_dim)``; norms are per head.
        key: As the query.
        bias: Whether the projections have biases. If not, the 1 becomes ``eps``.
        center: They are projections of x - mean(x) (ours).
        eps: Added to ||x||^2 where no 1 is, and to ||q||^2 / s^2, so that a zero query has a finite gradient.

    Returns:
        Factors of the query and of the key, ``(..., heads, tokens, 1)``, float64 for float64, else float32. They are
        constants: no gradient flows through them.

    Raises:
        TypeError: A tensor is not floating point.
        ValueError: The shapes do not fit together; the message names them.
    """
    _check_attention("separable", input, query, key, center, eps)
    return _plain.separable_attention_scales(input, query, key, bias, center, eps)


def corrected_attention_logits(
    input: Tensor,
    query: Tensor,
    key: Tensor,
    attention: str = "separable",
    *,
    bias: bool = True,
    center: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    r"""The attention logits q_i . k_j, corrected for their divergence D_ij (:func:`logit_divergence`).

    With s = sqrt(||x||^2 + 1), and how far one real step for one logit moves that logit, over -eta g, among 16 random
    tokens of sizes 0 to 3 (8-dimensional heads; the ideal is a mean of 1 and a spread of 0):

    ==============  =============================================================  ========  ==================
    attention       logit                                                          mean      spread (std/mean)
    ==============  =============================================================  ========  ==================
    "none"          q_i . k_j                                                      8304      1.12
    "projection"    (q_i / s_i) . (k_j / s_j), the affine-like projections         0.51      0.28
    "separable"     q_i . k_j / sqrt(2 ||q_i|| s_i ||k_j|| s_j)                    0.997     0.114
    "logit"         q_i . k_j / sqrt(D_ij)                                         0.942     0.073
    "exact" (ours)  (||q_i / s_i + k_j / s_j|| - ||q_i / s_i - k_j / s_j||) / 2    1.0000    0.0000
    ==============  =============================================================  ========  ==================

    The divisors of "separable" and "logit" are constants in the backward pass. "exact" is the signed distance, in the
    space of the two affine-like projections, to where q_i . k_j = 0; a distance has a gradient of length 1, which is
    what an exact update needs. It is at most the shorter of the two in size.

    Args:
        input: The tokens x, ``(..., tokens, dim)``, any floating dtype.
        query: Plain affine maps of x, ``(..., heads, tokens, head_dim)``; norms are per head.
        key: As the query.
        attention: The table above.
        bias: Whether the projections have biases. If not, the 1 in s becomes ``eps``.
        center: They are projections of x - mean(x) (ours).
        eps: Added to ||x||^2 where no 1 is, and to the squared norms of q / s and k / s that are divided by.

    Returns:
        ``(..., heads, tokens, tokens)`` in the query's dtype.

    Raises:
        TypeError: A tensor is not floating point.
        ValueError: A shape or an option does not fit; the message names it.
    """
    _check_attention(attention, input, query, key, center, eps)
    return _plain.corrected_attention_logits(input, query, key, attention, bias, center, eps)


def corrected_attention_logits_reference(
    input: Tensor,
    query: Tensor,
    key: Tensor,
    attention: str = "separable",
    *,
    bias: bool = True,
    center: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """:func:`corrected_attention_logits` as its table is written (no ``eps`` for zero queries and keys)."""
    x = input - input.mean(-1, keepdim=True) if center else input
    s = torch.sqrt(x.square().sum(-1, keepdim=True) + (1.0 if bias else eps)).unsqueeze(-3)
    q2, k2 = query.square().sum(-1, keepdim=True), key.square().sum(-1, keepdim=True)
    logits = query @ key.mT
    if attention == "projection":
        return logits / (s * s.mT)
    if attention == "separable":
        return logits / torch.sqrt(2 * q2.sqrt() * s * (k2.sqrt() * s).mT).detach()
    if attention == "logit":
        return logits / torch.sqrt(k2.mT * s**2 + q2 * s.mT**2).detach()
    if attention == "exact":
        q, k = (query / s).unsqueeze(-2), (key / s).unsqueeze(-3)
        return ((q + k).norm(dim=-1) - (q - k).norm(dim=-1)) / 2
    return logits


def corrected_qkv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: Tensor,
    attention: str = "separable",
    *,
    correction: str = "affine",
    center: bool = False,
    scale: str = "l2",
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Every head's q, k and v for an attention kernel: q . k is the corrected logit, times the head's temperature.

    See :func:`corrected_attention_logits`; v takes the linear correction. Call the kernel with ``scale=1.0``.

    Args:
        input: The tokens x, ``(batch, tokens, dim)``, any floating dtype.
        weight: Of q, k and v, one below the other: ``(3 * heads * head_dim, dim)``.
        bias: One number per row of the weight, or None.
        temperature: One number per head, ``(heads,)``.
        attention: ``"projection"`` or ``"separable"``; the other corrections are not products of a q and a k.
        correction: As in :func:`corrected_linear`, of v, and of q and k under ``"projection"``.
        center: Use x - mean(x) for x (ours).
        scale: As in :func:`corrected_linear`.
        eps: Added to ||x||^2 where no 1 is, and to the squared norms of q / s and k / s that are divided by.

    Returns:
        Three of ``(batch, heads, tokens, head_dim)`` in the input's dtype.

    Raises:
        TypeError: The input is not floating point, or the weight's dtype is another.
        ValueError: A shape or an option does not fit; the message names it.
    """
    check_linear(input, weight, bias, correction, center, scale, eps)
    check_choice("attention", attention, ("projection", "separable"))
    if input.ndim != 3:
        raise ValueError(f"input has shape {tuple(input.shape)}, expected (batch, tokens, dim)")
    if temperature.ndim != 1 or weight.shape[0] % (3 * temperature.shape[0]):
        raise ValueError(
            f"temperature has shape {tuple(temperature.shape)}, expected (heads,), with 3 * heads a divisor of the "
            f"weight's {weight.shape[0]} rows"
        )
    input, weight, bias = _autocast(input, weight, bias)
    args = (input, weight, bias, temperature, temperature.shape[0], attention)
    with _no_autocast(input):
        if correction == "affine" and _fused.usable():
            return _fused_attention.CorrectedQKV.apply(*args, center, scale, eps)
        return _plain.corrected_qkv(*args, correction, center, scale, eps)


def _check_attention(attention: str, input: Tensor, query: Tensor, key: Tensor, center: bool, eps: float) -> None:
    """Everything that can be wrong with an attention correction's arguments."""
    check_choice("attention", attention, get_args(AttentionCorrection))
    check_options("none", "l2", eps)
    for t in (input, query, key):
        check_floating(t)
    if input.ndim < 2:
        raise ValueError(f"input has shape {tuple(input.shape)}, expected (..., tokens, dim)")
    check_length(input.shape[-1], center, "dim")
    if query.shape != key.shape or query.ndim < 3 or query.shape[-2] != input.shape[-2]:
        raise ValueError(
            f"query has shape {tuple(query.shape)}, key {tuple(key.shape)}, expected both to be "
            f"(..., heads, {input.shape[-2]}, head_dim) with input {tuple(input.shape)}"
        )
