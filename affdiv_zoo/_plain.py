"""The corrected maps in differentiable torch operations, and the parts they are made of.

Autograd, torch.compile, torch.export, TorchScript and ``torch.func`` all understand these. ``_fused`` computes the same
with less memory; ``functional`` chooses. The arguments are checked and in normal form here: lists, ``F.pad``'s padding.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

SHRINK = 2.0**-48


def corrected_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, correction: str, center: bool, scale: str, eps: float
) -> Tensor:
    """:func:`affdiv_zoo.functional.corrected_linear`."""
    x = widen(input)
    if center:
        x = x - x.mean(-1, keepdim=True)
    if correction == "none":
        return F.linear(x.to(input.dtype), weight, bias)
    shrunk = sum_of_squares(x, -1)
    plus = floor(correction, bias is not None, eps)
    if correction == "gradient":
        # The parameters' gradients want 1 / ||x||^2, which half types cannot hold: half of it comes with x.
        r = inverse_norm(shrunk, plus).detach()
        for_params = F.linear((x.detach() * r).to(input.dtype), weight)
        if bias is not None:
            for_params = for_params + r.to(input.dtype) * bias
        z = F.linear(x.to(input.dtype), weight.detach(), None if bias is None else bias.detach())
        return scale_param_grads(z, for_params, r)
    sr = inverse_norm(shrunk, plus) * length_scale(correction, bias is not None, scale, weight.shape[1])
    # Dividing x and not W x + b: half types cannot overflow in the product, and x is usually the smaller of the two.
    if correction == "norm" or bias is None:
        return F.linear((x * sr).to(input.dtype), weight, bias)
    return F.linear((x * sr).to(input.dtype), weight) + (sr * bias).to(input.dtype)


def patch_norm_conv(
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
    act: str,
    residual: Tensor | None,
) -> Tensor:
    """:func:`affdiv_zoo.functional.patch_norm_conv` of a batch."""
    x, weight, bias = as_computed(input), as_computed(weight), None if bias is None else as_computed(bias)
    x, padding = pad_input(x, pad, padding_mode)
    if center:
        weight = center_rows(weight)
    if correction == "none":
        z = conv(x, weight, bias, stride, padding, dilation, groups)
    else:
        out = weight.shape[0]
        shrunk, mean = patch_moments(x, weight.shape[2:], stride, padding, dilation, groups, center)
        plus = floor(correction, bias is not None, eps)
        if correction == "gradient":
            # r^2 may underflow, r^2 / SHRINK does not: the rest of the factor comes with the parameters.
            r2 = (inverse_norm(shrunk, plus) / math.sqrt(shrink())).square()
            b = None if bias is None else bias * shrink()
            z = scale_param_grads(
                conv(x, weight.detach(), None if bias is None else bias.detach(), stride, padding, dilation, groups),
                conv(x.detach(), weight * shrink(), b, stride, padding, dilation, groups),
                per_channel(r2, out),
            )
        else:
            n = weight.shape[1] * weight[0, 0].numel()
            sr = inverse_norm(shrunk, plus) * length_scale(correction, bias is not None, scale, n)
            inside = bias if correction == "affine" else None
            z = conv(x, weight, inside, stride, padding, dilation, groups)
            if mean is not None and weight.dtype == torch.bfloat16:
                z = without_mean(z, weight, mean)
            z = z * per_channel(sr, out)
            if bias is not None and inside is None:
                z = z + bias.view([-1] + [1] * (weight.dim() - 2))
    if residual is not None:
        z = z + residual
    if act == "relu":
        z = F.relu(z)
    return z.to(input.dtype)


def widen(x: Tensor) -> Tensor:
    """Half types to float32; float32 and float64 as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def as_computed(x: Tensor) -> Tensor:
    """float16 to float32, since W x overflows float16 before it can be divided; the others as they are."""
    return x.float() if x.dtype == torch.float16 else x


def shrink() -> float:
    """The factor that squares are summed with, so that float32 holds ||x|| up to 3e26 and not only up to 2e19.

    What it pushes below the smallest float32, x < 2e-12, cannot be seen beside the 1 (or the eps) added to the sum.
    Exported graphs do without it: ONNX optimisers drop the addition of a number so small as 1 becomes.
    """
    if torch.jit.is_scripting():
        return 2.0**-48
    else:
        exporting = getattr(torch.compiler, "is_exporting", None)  # torch >= 2.7
        return 1.0 if exporting is not None and exporting() else SHRINK


def sum_of_squares(x: Tensor, dim: int) -> Tensor:
    """The sum of squares over ``dim``, which is kept, times :func:`shrink`."""
    return torch.addcmul(x.new_zeros([]), x, x, value=shrink()).sum(dim, keepdim=True)


def floor(correction: str, bias: bool, eps: float) -> float:
    """What is added to ||x||^2: the augmented vector's 1 where there is a bias to augment with, else eps."""
    return 1.0 if bias and correction != "norm" else eps


def inverse_norm(shrunk: Tensor, plus: float) -> Tensor:
    """1 / sqrt(||x||^2 + plus), from ||x||^2 times :func:`shrink`.

    Not by rsqrt, whose derivative takes the cube of the shrunk norm's inverse, beyond float32 where x is zero.
    """
    return math.sqrt(shrink()) / torch.sqrt(shrunk + shrink() * plus)


def length_scale(correction: str, bias: bool, scale: str, n: int) -> float:
    """s of ``scale="rms"``: the square root of the augmented vector's length, for x of length n."""
    if scale != "rms":
        return 1.0
    return math.sqrt(n + 1 if bias and correction == "affine" else n)


def scale_param_grads(for_input: Tensor, for_params: Tensor, factor: Tensor) -> Tensor:
    """The value of ``for_input``; gradients flow to it as they are, and to ``for_params`` times ``factor``."""
    return for_input + (for_params - for_params.detach()) * factor.detach().to(for_params.dtype)


def center_rows(weight: Tensor) -> Tensor:
    """The rows of W less their means: W (x - mean(x)) is this applied to x."""
    return weight - weight.mean(list(range(1, weight.dim())), keepdim=True)


def sum_of_rows(weight: Tensor) -> Tensor:
    """What rounding has left of the mean of rows that were centred, in the form of a bias."""
    return widen(weight).flatten(1).sum(1).view([-1] + [1] * (weight.dim() - 2))


def without_mean(z: Tensor, weight: Tensor, mean: Tensor) -> Tensor:
    """W (x - mean(x)) from W x, for rows that sum to zero but for their rounding to bfloat16."""
    return (z - sum_of_rows(weight) * per_channel(mean, weight.shape[0])).to(z.dtype)


def patch_sqnorm(
    x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], groups: int, center: bool
) -> Tensor:
    """The squared norm of every patch, ``(batch, groups, *output)``, times :func:`shrink`."""
    return patch_moments(x, kernel, stride, padding, dilation, groups, center)[0]


def patch_moments(
    x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], groups: int, center: bool
) -> tuple[Tensor, Tensor | None]:
    """:func:`patch_sqnorm`, and the patches' means if centred."""
    x = widen(x).unflatten(1, [groups, x.shape[1] // groups])
    if not center:
        return box_sum(sum_of_squares(x, 2).squeeze(2), kernel, stride, padding, dilation), None
    mean = x.sum(2, keepdim=True) / x.shape[2]
    within = sum_of_squares(x - mean, 2).squeeze(2)
    return centered_box(within, mean.squeeze(2), x.shape[2], kernel, stride, padding, dilation)


def centered_box(
    squares: Tensor,
    mean: Tensor,
    count: int,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> tuple[Tensor, Tensor]:
    """||patch - its mean||^2 and the patch's mean, from each pixel's mean and sum of squares about it, over ``count``.

    Both sums are times :func:`shrink`. Groups of equal size merge, one dimension after the other: the mean becomes the
    mean of the means, and the sum of squares gains count * sum (mean - new mean)^2 (Chan, Golub and LeVeque, 1983). A
    large common mean costs no digits this way, unlike in sum x^2 - (sum x)^2 / n.
    """
    if max(padding) > 0:
        mean, squares = F.pad(mean, both_sides(padding)), F.pad(squares, both_sides(padding))
    for d in range(len(kernel)):
        means = windows(mean, d + 2, kernel[d], stride[d], dilation[d])
        squares = add_up(windows(squares, d + 2, kernel[d], stride[d], dilation[d]))
        if kernel[d] == 1:
            mean = means[0]
        else:
            mean = add_up(means) / kernel[d]
            for m in means:
                m = m - mean
                squares = torch.addcmul(squares, m, m, value=count * shrink())
        count *= kernel[d]
    return squares, mean


def box_sum(x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]) -> Tensor:
    """Sum over the kernel window around every output position, one dimension after the other."""
    if max(padding) > 0:
        x = F.pad(x, both_sides(padding))
    for d in range(len(kernel)):
        x = add_up(windows(x, d + 2, kernel[d], stride[d], dilation[d]))
    return x


def windows(x: Tensor, dim: int, kernel: int, stride: int, dilation: int) -> list[Tensor]:
    """For each place in the kernel along ``dim``, what it sees from all output positions: views of ``x``."""
    end = x.shape[dim] - dilation * (kernel - 1)
    return [torch.ops.aten.slice(x, dim, j * dilation, j * dilation + end, stride) for j in range(kernel)]


def add_up(parts: list[Tensor]) -> Tensor:
    """The sum of the parts; a single part as it is."""
    if len(parts) == 1:
        return parts[0]
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total = total.add_(part)
    return total


def both_sides(padding: list[int]) -> list[int]:
    """A convolution's padding in ``F.pad``'s order."""
    pad: list[int] = []
    for p in padding:
        pad = [p, p] + pad  # TorchScript has no unpacking
    return pad


def conv(
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


def per_channel(x: Tensor, out_channels: int) -> Tensor:
    """``(batch, groups, *output)`` repeated to ``(batch, out_channels, *output)``; a single group broadcasts."""
    return x if x.shape[1] == 1 else x.repeat_interleave(out_channels // x.shape[1], dim=1)


def pad_input(x: Tensor, pad: list[int], padding_mode: str) -> tuple[Tensor, list[int]]:
    """Pads what a convolution cannot pad by itself; returns its padding argument for the rest."""
    left, right = pad[::2][::-1], pad[1::2][::-1]
    if padding_mode == "zeros" and left == right:
        return x, left
    if max(pad) > 0:
        x = F.pad(x, pad, "constant" if padding_mode == "zeros" else padding_mode)
    return x, [0] * len(left)


def radial_map(x: Tensor, kind: str, dim: int, center: bool, scale: str, eps: float) -> Tensor:
    """:func:`affdiv_zoo.functional.radial_map`."""
    wide = widen(x)
    if center:
        wide = wide - wide.mean(dim, keepdim=True)
    soft = kind == "soft"
    r = inverse_norm(sum_of_squares(wide, dim), 1.0 if soft else eps)
    return (wide * (r * length_scale("affine" if soft else "norm", soft, scale, x.shape[dim]))).to(x.dtype)


def parameterised_scale(x: Tensor, weight: Tensor, bias: Tensor | None, dim: int) -> Tensor:
    """:func:`affdiv_zoo.functional.parameterised_scale`."""
    shape = [1] * x.dim()
    shape[dim] = weight.shape[0]
    if bias is None:
        return (x * weight.view(shape)).to(x.dtype)
    return torch.addcmul(bias.view(shape), x, weight.view(shape)).to(x.dtype)


def inverse_token_norm(x: Tensor, bias: bool, center: bool, eps: float) -> Tensor:
    """1 / s of every token, ``(..., 1, tokens, 1)``: for all heads alike."""
    x = widen(x)
    if center:
        x = x - x.mean(-1, keepdim=True)
    return inverse_norm(sum_of_squares(x, -1), 1.0 if bias else eps).unsqueeze(-3)


def separable_attention_scales(
    x: Tensor, query: Tensor, key: Tensor, bias: bool, center: bool, eps: float
) -> tuple[Tensor, Tensor]:
    """:func:`affdiv_zoo.functional.separable_attention_scales`."""
    r = inverse_token_norm(x.detach(), bias, center, eps)
    return separable_scale(query.detach(), r, eps), separable_scale(key.detach(), r, eps)


def separable_scale(q: Tensor, r: Tensor, eps: float) -> Tensor:
    """1 / sqrt(sqrt 2 ||q|| s) = r / sqrt(sqrt 2 ||r q||), with r = 1 / s. Not differentiable, hence in place."""
    norm = sum_of_squares(widen(q), -1).sqrt_().mul_(r / math.sqrt(shrink()))
    return norm.square_().add_(eps).rsqrt_().sqrt_().mul_(r * 0.5**0.25)


def rescale_qk(
    x: Tensor, q: Tensor, k: Tensor, temperature: Tensor, attention: str, bias: bool, center: bool, eps: float
) -> tuple[Tensor, Tensor]:
    """q and k such that q . k is the "projection" or "separable" logit, times its head's temperature."""
    t = temperature.view(-1, 1, 1)
    if attention == "projection":
        return (q * t).to(q.dtype), k
    a, b = separable_attention_scales(x, q, k, bias, center, eps)
    return (q * (a * t)).to(q.dtype), (k * b).to(k.dtype)


def corrected_qkv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: Tensor,
    heads: int,
    attention: str,
    correction: str,
    center: bool,
    scale: str,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`affdiv_zoo.functional.corrected_qkv`."""
    t = temperature.view(-1, 1, 1)
    if attention == "projection":
        q, k, v = split_heads(corrected_linear(x, weight, bias, correction, center, scale, eps), 3, heads)
        return (q * t).to(q.dtype), k, v
    plain = weight.shape[0] // 3 * 2
    qk_bias, v_bias = (None, None) if bias is None else (bias[:plain], bias[plain:])
    q, k = split_heads(constantly_divided_linear(x, weight[:plain], qk_bias, center, eps), 2, heads)
    (v,) = split_heads(corrected_linear(x, weight[plain:], v_bias, correction, center, scale, eps), 1, heads)
    a, b = inverse_root_length(q.detach(), eps), inverse_root_length(k.detach(), eps)
    return (q * (a * t)).to(q.dtype), (k * b).to(k.dtype), v


def split_heads(x: Tensor, parts: int, heads: int) -> tuple[Tensor, ...]:
    """``(batch, tokens, parts * heads * head_dim)`` to ``parts`` of ``(batch, heads, tokens, head_dim)``."""
    return x.unflatten(-1, [parts, heads, -1]).transpose(1, 3).unbind(2)


def constantly_divided_linear(x: Tensor, weight: Tensor, bias: Tensor | None, center: bool, eps: float) -> Tensor:
    """(W x + b) / s, whose s is a constant in the backward pass; x is divided, which half types can hold."""
    wide = widen(x)
    if center:
        wide = wide - wide.mean(-1, keepdim=True)
    r = inverse_norm(sum_of_squares(wide.detach(), -1), 1.0 if bias is not None else eps)
    z = F.linear((wide * r).to(x.dtype), weight)
    return z if bias is None else z + r.to(x.dtype) * bias


def inverse_root_length(q: Tensor, eps: float) -> Tensor:
    """1 / sqrt(sqrt 2 ||q||) of every head's q / s. Not differentiable, hence in place."""
    return (widen(q).square().sum(-1, keepdim=True)).add_(eps).rsqrt_().sqrt_().mul_(0.5**0.25)


def attention_projections(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    attention: str,
    correction: str,
    center: bool,
    scale: str,
    eps: float,
) -> Tensor:
    """q, k and v side by side: v corrected, q and k corrected under "projection" and plain otherwise."""
    if attention == "projection":
        return corrected_linear(x, weight, bias, correction, center, scale, eps)
    rows = weight.shape[0] // 3 * 2
    qk_bias, v_bias = (None, None) if bias is None else (bias[:rows], bias[rows:])
    qk = corrected_linear(x, weight[:rows], qk_bias, "none", center, scale, eps)
    return torch.cat([qk, corrected_linear(x, weight[rows:], v_bias, correction, center, scale, eps)], -1)


def corrected_attention_logits(
    x: Tensor, query: Tensor, key: Tensor, attention: str, bias: bool, center: bool, eps: float
) -> Tensor:
    """:func:`affdiv_zoo.functional.corrected_attention_logits`."""
    if attention == "none":
        return query @ key.transpose(-2, -1)
    if attention == "separable":
        a, b = separable_attention_scales(x, query, key, bias, center, eps)
        return (query * a).to(query.dtype) @ (key * b).to(key.dtype).transpose(-2, -1)
    r = inverse_token_norm(x, bias, center, eps)
    if attention == "logit":
        r = r.detach()
    q, k = (query * r).to(query.dtype), (key * r).to(key.dtype)
    logits = q @ k.transpose(-2, -1)
    if attention == "projection":
        return logits
    q, k = widen(q), widen(k)
    squares = (q * q).sum(-1, keepdim=True) + ((k * k).sum(-1, keepdim=True) + eps).transpose(-2, -1)
    if attention == "logit":
        return (logits * torch.rsqrt(squares.detach())).to(query.dtype)
    twice = 2 * widen(logits)  # ||q +- k||^2 = squares +- twice
    lengths = [torch.sqrt(torch.clamp(t, min=eps)) for t in (squares + twice, squares - twice)]
    return (0.5 * (lengths[0] - lengths[1])).to(query.dtype)
