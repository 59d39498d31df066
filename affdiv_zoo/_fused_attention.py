"""The projections of corrected attention as a single autograd node; see ``_fused`` for the algebra.

With r = 1 / sqrt(||x||^2 + 1) and u = W (r x) + r b in one matrix product, v is s u, and every head's q and k are u
times one number per token. That number is a constant in the backward pass, and so is the r in u (but not under
"projection"). The node scales u where it lies, and writes the gradients of q, k and v straight into the gradient of u.
That saves stacking them, which would cost about as much as the correction does.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from affdiv_zoo import _plain
from affdiv_zoo._fused import backward_is_traced, grad_of_plain


class CorrectedQKV(torch.autograd.Function):
    """``_plain.corrected_qkv`` for "affine"; saves its arguments, q, k and v, and one number per token and q or k."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperature: Tensor,
        heads: int,
        attention: str,
        center: bool,
        scale: str,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = _centered(input, center)
        r = _plain.inverse_norm(_plain.sum_of_squares(x, -1), _plain.floor("affine", bias is not None, eps))
        s = _plain.length_scale("affine", bias is not None, scale, weight.shape[1])
        unit = (x * r).to(input.dtype)
        if bias is None:
            u = F.linear(unit, weight)
        else:
            u = r.to(input.dtype) * bias
            torch.addmm(u.flatten(0, 1), unit.flatten(0, 1), weight.t(), out=u.flatten(0, 1))
        u = u.unflatten(-1, (3, heads, -1))  # batch, tokens, 3, heads, head_dim
        factor = r.new_full((*u.shape[:-1], 1), s)
        if attention == "separable":  # as _plain.inverse_root_length, with less memory
            norm = torch.linalg.vector_norm(u[:, :, :2], dim=-1, keepdim=True, dtype=r.dtype)
            factor[:, :, :2] = norm.square_().add_(eps).rsqrt_().sqrt_().mul_(0.5**0.25)
        factor[:, :, 0] *= temperature[:, None]
        u.mul_(factor)
        ctx.save_for_backward(input, weight, bias, temperature, r, factor, u)
        ctx.options = heads, attention, "affine", center, scale, eps
        q, k, v = u.transpose(1, 3).unbind(2)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, temperature, r, factor, qkv = ctx.saved_tensors
        heads, attention, _, center, _, _ = ctx.options
        nones = (None,) * 5
        if backward_is_traced(*(g for g in grads if g is not None)):
            plain = lambda *t: _plain.corrected_qkv(*t, *ctx.options)  # noqa: E731
            return (*grad_of_plain(plain, [input, weight, bias, temperature], grads), *nones)

        need_x, need_w, need_b, need_t = ctx.needs_input_grad[:4]
        gx = gw = gb = gt = None
        grads = [g.transpose(1, 2) for g in grads]
        gu = torch.empty_like(qkv)
        for i, g in enumerate(grads):
            torch.mul(g, factor[:, :, i], out=gu[:, :, i])
        gu = gu.flatten(2)
        unit = _centered(input, center) * r
        if need_w or need_t:
            gw = gu.flatten(0, 1).t() @ unit.to(gu.dtype).flatten(0, 1)
        if bias is not None and (need_b or need_t):
            gb = r.to(gu.dtype).flatten() @ gu.flatten(0, 1)
        if need_t:  # <dL/dq, q> of a head is <dL/dW_q, W_q> + <dL/db_q, b_q>, since q is linear in them
            rows = weight.shape[0] // 3
            dot = (_plain.widen(gw[:rows]) * weight[:rows]).sum(1)
            if bias is not None:
                dot = dot + _plain.widen(gb[:rows]) * bias[:rows]
            gt = (dot.view(heads, -1).sum(1) / temperature).to(temperature.dtype)
        if need_x:
            dot = torch.zeros_like(r)
            for i in range(0 if attention == "projection" else 2, 3):  # those that are divided by 1 / r, no constant
                dot = dot + (_plain.widen(grads[i]) * qkv[:, :, i]).sum((2, 3)).unsqueeze(-1)
            gx = _plain.widen(gu @ weight).addcmul_(unit, dot, value=-1).mul_(r)
            gx = (gx - gx.mean(-1, keepdim=True) if center else gx).to(input.dtype)
        return gx, gw if need_w else None, gb if need_b else None, gt, *nones


def _centered(input: Tensor, center: bool) -> Tensor:
    x = _plain.widen(input)
    return x - x.mean(-1, keepdim=True) if center else x
