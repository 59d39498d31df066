"""The projections of corrected attention as a single autograd node; see ``_fused`` for the algebra.

With u = s r (W x + b), r = 1 / sqrt(||x||^2 + 1), in one matrix product: v is u, and every head's q and k are u times one
number per token, which is a constant in the backward pass. The node scales q and k where they lie, and writes the three
gradients straight into the gradient of u. That saves stacking them, which costs about as much as the correction does.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from affdiv_zoo import _plain
from affdiv_zoo._fused import _grad_of_plain


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
        x, s = _centered(input, center), _plain.length_scale("affine", bias is not None, scale, weight.shape[1])
        sr = s * _plain.inverse_norm(_plain.sum_of_squares(x, -1), _plain.floor("affine", bias is not None, eps))
        unit = (x * sr).to(input.dtype)
        if bias is None:
            u = F.linear(unit, weight)
        else:
            u = (sr * bias).to(input.dtype)
            u.flatten(0, 1).addmm_(unit.flatten(0, 1), weight.t())
        u = u.unflatten(-1, (3, heads, -1))  # batch, tokens, 3, heads, head_dim
        factor = sr.new_ones(1, 1, 2, heads, 1)
        if attention == "separable":
            # u is s times q / ||(x, 1)||, so these are the separable scales over s r.
            norm = torch.linalg.vector_norm(u[:, :, :2], dim=-1, keepdim=True, dtype=sr.dtype)
            factor = norm.square_().add_(eps * s * s).rsqrt_().sqrt_().mul_((0.5 / (s * s)) ** 0.25)
        factor[:, :, 0] *= temperature[:, None]
        u[:, :, :2].mul_(factor)
        ctx.save_for_backward(input, weight, bias, temperature, sr, factor, u)
        ctx.options = heads, attention, "affine", center, scale, eps
        ctx.s = s
        q, k, v = u.transpose(1, 3).unbind(2)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, temperature, sr, factor, qkv = ctx.saved_tensors
        heads, attention, _, center, _, _ = ctx.options
        nones = (None,) * 5
        if torch.is_grad_enabled():
            plain = lambda *t: _plain.corrected_qkv(*t, *ctx.options)  # noqa: E731
            return (*_grad_of_plain(plain, [input, weight, bias, temperature], grads), *nones)

        need_x, need_w, need_b, need_t = ctx.needs_input_grad[:4]
        gx = gw = gb = gt = None
        gq, gk, gv = (g.transpose(1, 2) for g in grads)
        gu = torch.empty_like(qkv)
        torch.mul(gq, factor[:, :, 0], out=gu[:, :, 0])
        torch.mul(gk, factor[:, :, 1], out=gu[:, :, 1])
        gu[:, :, 2] = gv
        gu = gu.flatten(2).flatten(0, 1)
        x = _centered(input, center)
        unit = x * sr
        if need_w or need_t:
            gw = gu.t() @ unit.to(gu.dtype).flatten(0, 1)
        if bias is not None and (need_b or need_t):
            gb = sr.to(gu.dtype).flatten() @ gu
        if need_t:  # <dL/dq, q> of a head is <dL/dW_q, W_q> + <dL/db_q, b_q>, since q is linear in them
            rows = weight.shape[0] // 3
            dot = (_plain.widen(gw[:rows]) * weight[:rows]).sum(1)
            if bias is not None:
                dot = dot + _plain.widen(gb[:rows]) * bias[:rows]
            gt = (dot.view(heads, -1).sum(1) / temperature).to(temperature.dtype)
        if need_x:
            divided = range(3) if attention == "projection" else (2,)  # by s / r, which is no constant for these
            dot = sum(
                torch.linalg.vecdot(_plain.widen(grads[i].transpose(1, 2)), _plain.widen(qkv[:, :, i])) for i in divided
            )
            dot = dot.sum(-1, keepdim=True) * sr * (-1 / (ctx.s * ctx.s))
            gx = _plain.widen((gu @ weight).view_as(input)).mul_(sr).addcmul_(unit, dot)
            gx = (gx - gx.mean(-1, keepdim=True) if center else gx).to(input.dtype)
        return gx, gw if need_w else None, gb if need_b else None, gt, *nones


def _centered(input: Tensor, center: bool) -> Tensor:
    x = _plain.widen(input)
    return x - x.mean(-1, keepdim=True) if center else x
