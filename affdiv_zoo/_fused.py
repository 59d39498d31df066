"""The corrected maps as single autograd nodes, which save only what their backward passes cannot do without.

With q = ||x||^2 + 1 (or + eps), r = q^(-1/2) and z = s r u, where u = W x + b (affine-like) or W x (norm-like):

    dL/du = s r g,      dL/dx = W^T dL/du - r^2 <g, z> x,

where <g, z> runs over the outputs that share the divisor. So the node needs z or u, and r, one number per patch, but
not both, nor the squares. Centred, x stands for x - mean(x). For convolutions the sum over the patches that a pixel
belongs to is the transposed box sum.

A second derivative is taken through the plain operations (``_plain``).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from affdiv_zoo import _plain
from affdiv_zoo._plain import SHRINK


def usable() -> bool:
    """Whether a node can run here: what traces or transforms functions wants plain operations."""
    return not (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )


def backward_is_traced(*grads: Tensor) -> bool:
    """Whether a backward pass is itself differentiated, or batched: it then wants plain operations."""
    return (
        torch.is_grad_enabled()
        or torch._C._are_functorch_transforms_active()
        or any(torch._C._functorch.is_legacy_batchedtensor(g) for g in grads)  # is_grads_batched=True
    )


def grad_of_plain(plain: Callable[..., Tensor], tensors: list[Tensor | None], g: Tensor) -> list[Tensor | None]:
    """The gradients of ``plain(*tensors)``, with a graph of their own."""
    with torch.enable_grad():
        # Of views: the tensors may depend on each other, and their partial derivatives are wanted.
        tensors = [t.view_as(t) if t is not None and t.requires_grad else t for t in tensors]
        inputs = [t for t in tensors if t is not None and t.requires_grad]
        grads = iter(torch.autograd.grad(plain(*tensors), inputs, g, create_graph=True))
    return [next(grads) if t is not None and t.requires_grad else None for t in tensors]


class CorrectedLinear(torch.autograd.Function):
    """``_plain.corrected_linear`` for "affine", "norm" and "gradient"; saves input, weight, bias and r."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        correction: str,
        center: bool,
        scale: str,
        eps: float,
    ) -> Tensor:
        x = _plain.widen(input)
        x = x - x.mean(-1, keepdim=True) if center else x
        plus = _plain.floor(correction, bias is not None, eps)
        r = _plain.inverse_norm(_plain.sum_of_squares(x, -1), plus)
        s = _plain.length_scale(correction, bias is not None, scale, weight.shape[1])
        if correction == "gradient":
            z = F.linear(x.to(input.dtype), weight, bias)
        else:
            unit = (x * (s * r)).to(input.dtype)
            if bias is None or correction == "norm":
                z = F.linear(unit, weight, bias)
            else:  # the product adds to s r b, as a plain linear's does to b
                z = (s * r).to(input.dtype) * bias
                rows = z.view(-1, z.shape[-1])
                torch.addmm(rows, unit.reshape(-1, unit.shape[-1]), weight.t(), out=rows)  # addmm_ has no FLOP count
        ctx.save_for_backward(input, weight, bias, r)
        ctx.options = correction, center, scale, eps
        ctx.s = s
        return z

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, r = ctx.saved_tensors
        correction, center, scale, eps = ctx.options
        if backward_is_traced(g):
            plain = lambda x, w, b: _plain.corrected_linear(x, w, b, *ctx.options)  # noqa: E731
            return (*grad_of_plain(plain, [input, weight, bias], g), None, None, None, None)

        x = _plain.widen(input)
        x = x - x.mean(-1, keepdim=True) if center else x
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        gx = gw = gb = None
        rows = g.reshape(-1, g.shape[-1])
        if correction == "gradient":
            r = r.reshape(-1, 1)
            scaled = rows * r.to(g.dtype)
            if need_w:
                gw = scaled.t() @ (x.reshape(-1, x.shape[-1]) * r).to(g.dtype)
            if need_b:
                gb = (scaled * r.to(g.dtype)).sum(0)
            if need_x:
                gx = _plain.widen(g @ weight)
        else:
            unit = x * (ctx.s * r)  # s x / ||x||
            augmented = bias is not None and correction == "affine"
            if need_w:
                gw = rows.t() @ unit.to(g.dtype).reshape(-1, x.shape[-1])
            if need_b:
                gb = (ctx.s * r).to(g.dtype).reshape(-1) @ rows if augmented else rows.sum(0)
            if need_x:
                gx = _plain.widen(g @ weight)
                dot = torch.linalg.vecdot(gx, unit).unsqueeze(-1)  # <g, z>, over the part that is divided
                if augmented:
                    dot = dot + ctx.s * r * _plain.widen(g @ bias).unsqueeze(-1)
                gx = gx.mul_(ctx.s * r).addcmul_(unit, dot.mul_(r), value=-1 / ctx.s)
        if need_x:
            gx = (gx - gx.mean(-1, keepdim=True) if center else gx).to(input.dtype)
        return gx, gw, gb, None, None, None, None


class PatchNormConv(torch.autograd.Function):
    """``_plain.patch_norm_conv`` of a padded input, for "affine", "norm" and "gradient".

    Saves input, weight, bias and r, and the patches' means if centred. With the ReLU inside, also the output, which the
    next layer keeps anyway, and the residual. Without, W x + b in its place: what follows may change z where it lies.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        groups: int,
        correction: str,
        center: bool,
        scale: str,
        eps: float,
        act: str,
    ) -> Tensor:
        x, w = _plain.as_computed(input), _computed_weight(weight, center)
        b = None if bias is None else _plain.as_computed(bias)
        geometry = (stride, padding, dilation)
        kernel = list(w.shape[2:])
        shrunk, mean = _patch_sqnorm(x, kernel, *geometry, groups, center)
        r = _plain.inverse_norm(shrunk, _plain.floor(correction, b is not None, eps))
        s = _plain.length_scale(correction, b is not None, scale, w[0].numel())
        outside = b is not None and correction == "norm"
        z = _plain.conv(x, w, None if outside else b, *geometry, groups)
        rest = _plain.sum_of_rows(w) if center and w.dtype == torch.bfloat16 else None
        sr = None if correction == "gradient" else _plain.per_channel(s * r, w.shape[0])
        kept = None
        if act != "relu" and sr is not None:
            kept = z if rest is None else _plain.without_mean(z, w, mean)
            z, sr, rest = (kept * sr).to(z.dtype), None, None

        def finish(z: Tensor, mean: Tensor, sr: Tensor, residual: Tensor) -> None:
            if rest is not None:
                z.addcmul_(rest, _plain.per_channel(mean, w.shape[0]), value=-1)
            if sr is not None:
                z.mul_(sr)
            if outside:
                z.add_(b.view(-1, *[1] * len(kernel)))
            if residual is not None:
                z.add_(residual)
            if act == "relu":
                z.relu_()

        z = _in_float32(finish, z, mean, sr, residual).to(input.dtype)
        if act == "relu":
            kept = z
        residual = residual if act == "relu" and correction != "gradient" else None
        ctx.save_for_backward(input, weight, bias, residual, kept, r, mean)
        ctx.geometry = (stride, padding, dilation, groups)
        ctx.options = (correction, center, scale, eps, act)
        ctx.s = s
        return z

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, residual, kept, r, mean = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.geometry
        correction, center, scale, eps, act = ctx.options
        nones = (None,) * 9
        need_x, need_w, need_b, need_residual = ctx.needs_input_grad[:4]
        if act == "relu":
            g = torch.ops.aten.threshold_backward(g, kept.detach(), 0)
        g_residual = g if need_residual else None
        if backward_is_traced(g):
            grads = grad_of_plain(lambda *t: _plain_conv(ctx, *t), [input, weight, bias], g)
            return (*grads, g_residual, *nones)
        x, w, out = _plain.as_computed(input), _computed_weight(weight, center), weight.shape[0]
        kernel = list(w.shape[2:])
        g = _plain.as_computed(g)
        geometry = ([out], stride, padding, dilation, False, [0] * len(kernel), groups)
        backward = torch.ops.aten.convolution_backward
        if correction == "gradient":
            gx = backward(g, x, w, *geometry, [need_x, False, False])[0]
            # r^2 may underflow, r^2 / SHRINK does not.
            g = (g * _plain.per_channel((r / SHRINK**0.5).square(), out)).to(g.dtype)
            _, gw, gb = (
                t if t is None else t.mul_(SHRINK) for t in backward(g, x, w, *geometry, [False, need_w, need_b])
            )
        else:
            if need_x:
                # <g, z> of the z that was divided: what was added to it since is taken off again.
                if act == "relu" and bias is not None and correction == "norm":
                    kept = kept - bias.view(-1, *[1] * len(kernel))
                dot = _dot(g, kept, residual, groups)
                dot = dot if act == "relu" else dot.mul_(ctx.s * r)
                dot.mul_((r / SHRINK**0.5).square_())  # r^2 may underflow, r^2 / SHRINK does not
            gb = g.sum([0, *range(2, g.dim())]) if need_b and correction == "norm" else None
            sr = _plain.per_channel(ctx.s * r, out)
            if act != "relu" or need_residual:
                g = g * sr if g.dtype == sr.dtype else _in_float32(Tensor.mul_, g.clone(), sr)
            else:
                g = _in_float32(Tensor.mul_, g, sr)
            need_conv_b = need_b and correction != "norm"
            gx, gw, gb_conv = backward(g, x, w, *geometry, [need_x, need_w, need_conv_b])
            gb = gb_conv if need_conv_b else gb
            if need_x:
                box = (list(x.shape[2:]), kernel, stride, padding, dilation)
                maps = _box_sum_transposed(torch.cat([dot, dot * mean], 1) if center else dot, *box)

                def finish(gx: Tensor, x: Tensor, maps: Tensor) -> None:
                    gx, x, maps = gx.unflatten(1, (groups, -1)), x.unflatten(1, (groups, -1)), maps.unsqueeze(2)
                    gx.addcmul_(x, maps[:, :groups], value=-SHRINK)
                    if center:
                        gx.add_(maps[:, groups:], alpha=SHRINK)

                _in_float32(finish, gx, x, maps)
        if need_w and center:
            gw.sub_(gw.mean(list(range(1, gw.dim())), keepdim=True))
        return (
            gx if gx is None else gx.to(input.dtype),
            gw if gw is None else gw.to(weight.dtype),
            gb if gb is None else gb.to(weight.dtype),
            g_residual,
            *nones,
        )


def _plain_conv(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """The node's map in plain operations, without the residual and the ReLU."""
    stride, padding, dilation, groups = ctx.geometry
    pad, options = _plain.both_sides(padding), ctx.options[:-1]
    return _plain.patch_norm_conv(x, w, b, stride, pad, dilation, groups, "zeros", *options, "none", None)


def _computed_weight(weight: Tensor, center: bool) -> Tensor:
    """The weight as the convolution takes it; made anew for the backward pass, since a copy would be kept till then."""
    weight = _plain.as_computed(weight)
    return _plain.center_rows(weight) if center else weight


def _patch_sqnorm(
    x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], groups: int, center: bool
) -> tuple[Tensor, Tensor | None]:
    """``_plain.patch_sqnorm`` and the patches' means, with one small temporary."""
    channels = x.shape[1] // groups
    x = x.unflatten(1, (groups, channels))
    wide = _plain.widen(x[:0])
    squares = wide.new_empty(x.shape[:2] + x.shape[3:])
    means = torch.empty_like(squares) if center else squares
    zero, step, scratch = wide.new_zeros(()), _step(x), None
    for start in range(0, len(x), step):
        part = x[start : start + step]
        scratch = _scratch(scratch, part, wide.dtype)
        part = part if part.dtype == wide.dtype else scratch.copy_(part)
        if center:
            total = torch.sum(part, 2, out=means[start : start + step])
            part = torch.sub(part, total.unsqueeze(2), alpha=1 / channels, out=scratch)
        torch.addcmul(zero, part, part, value=SHRINK, out=scratch)
        torch.sum(scratch, 2, out=squares[start : start + step])
    if not center:
        return _plain.box_sum(squares, kernel, stride, padding, dilation), None
    return _plain.centered_box(squares, means.div_(channels), channels, kernel, stride, padding, dilation)


def _dot(g: Tensor, z: Tensor, residual: Tensor | None, groups: int) -> Tensor:
    """<g, z - residual> over each group's channels, in float32 at least: ``(batch, groups, *output)``."""
    wide = _plain.widen(g[:0])
    dots = wide.new_empty((len(g), groups, *g.shape[2:]))
    step, scratch = _step(g), None
    for start in range(0, len(g), step):
        part, y = g[start : start + step], z[start : start + step]
        scratch = _scratch(scratch, part, wide.dtype)
        if residual is not None:
            torch.sub(y, residual[start : start + step], out=scratch).mul_(part)
        elif part.dtype == wide.dtype:
            torch.mul(part, y, out=scratch)
        else:
            scratch.copy_(part).mul_(y)
        torch.sum(scratch.unflatten(1, (groups, -1)), 2, out=dots[start : start + step])
    return dots


def _in_float32(change: Callable[..., Any], out: Tensor, *others: Tensor | None) -> Tensor:
    """``change(out, *others)``, which works in place; for half types a few samples at a time in float32.

    That rounds once, and on a CPU one conversion each way is much faster than operations on two types.
    """
    if out.dtype == _plain.widen(out[:0]).dtype:
        change(out, *others)
        return out
    step, scratch = _step(out), None
    for start in range(0, len(out), step):
        part = out[start : start + step]
        scratch = _scratch(scratch, part, torch.float32)
        change(scratch.copy_(part), *(None if t is None else t[start : start + step] for t in others))
        part.copy_(scratch)
    return out


def _scratch(scratch: Tensor | None, part: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory in the form of ``part``: what there is of it, or new."""
    return torch.empty_like(part, dtype=dtype) if scratch is None else scratch[: len(part)]


def _step(x: Tensor) -> int:
    """How many samples to take at a time: on a CPU, fresh memory for large temporaries costs more than the sums."""
    if x.device.type != "cpu" or x.numel() == 0:
        return max(1, len(x))
    return max(1, 2**18 * len(x) // x.numel())


def _box_sum_transposed(
    x: Tensor, size: list[int], kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    """The transpose of ``_plain.box_sum``: every position's number added to all pixels of its window."""
    for d in reversed(range(len(kernel))):
        dim = d + 2
        shape = list(x.shape)
        shape[dim] = size[d] + 2 * padding[d]
        total = x.new_zeros(shape)
        end = (x.shape[dim] - 1) * stride[d] + 1
        for j in range(kernel[d]):
            torch.ops.aten.slice(total, dim, j * dilation[d], j * dilation[d] + end, stride[d]).add_(x)
        x = total.narrow(dim, padding[d], size[d])
    return x
