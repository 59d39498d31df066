"""The projections of corrected attention as a single autograd node; see ``_fused`` for the algebra.

With u = W x + b in one matrix product, every head's q, k and v is u times one number per token: t c_q, c_k and s r, where
c are the separable scales (constants) and t the temperature, or s r for all three under "projection". The node scales u
where it lies, and writes the gradients of q, k and v, scaled, straight into the gradient of u. That saves what stacking
them costs otherwise, which is more than the correction costs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from affdiv_zoo import _plain
from affdiv_zoo._fused import _grad_of_plain


class AttentionQKV(torch.autograd.Function):
    """``_plain.attention_qkv`` for ``correction="affine"`` and a temperature; saves u scaled, and one factor per vector."""

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
        x = _plain.widen(input)
        x = x - x.mean(-1, keepdim=True) if center else x
        r = _plain.inverse_norm(_plain.sum_of_squares(x, -1), _plain.floor("affine", bias is not None, eps))
        s = _plain.length_scale("affine", bias is not None, scale, weight.shape[1])
        z = F.linear(x.to(input.dtype), weight, bias).unflatten(-1, (3, heads, -1))  # batch, tokens, 3, heads, head_dim
        factor = (s * r)[..., None, None].repeat(1, 1, 3, heads, 1)
        if attention == "separable":
            factor[:, :, :2] = _plain.separable_scale(z[:, :, :2], r[..., None, None], eps)
        factor[:, :, 0] *= temperature[:, None]
        z.mul_(factor)
        ctx.save_for_backward(input, weight, bias, temperature, r, factor, z)
        ctx.options = heads, attention, "affine", center, scale, eps
        q, k, v = z.transpose(1, 3).unbind(2)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, temperature, r, factor, z = ctx.saved_tensors
        heads, attention, _, center, _, _ = ctx.options
        nones = (None,) * 5
        if torch.is_grad_enabled():
            plain = lambda *t: _plain.attention_qkv(*t, *ctx.options)  # noqa: E731
            return (*_grad_of_plain(plain, [input, weight, bias, temperature], grads), *nones)

        need_x, need_w, need_b, need_t = ctx.needs_input_grad[:4]
        gx = gw = gb = gt = None
        gu = torch.empty_like(z)
        dots = []  # <g, z> of every vector: batch, tokens, heads
        for i, g in enumerate(grads):
            g = g.transpose(1, 2)
            torch.mul(g, factor[:, :, i], out=gu[:, :, i])
            through_r = need_x and (i == 2 or attention == "projection")
            dots.append(torch.linalg.vecdot(_plain.widen(g), _plain.widen(z[:, :, i])) if through_r or i == 0 else None)
        rows = gu.view(-1, weight.shape[0])
        if need_t:
            gt = dots[0].sum((0, 1)).to(temperature.dtype) / temperature
        if need_b:
            gb = rows.sum(0)
        if need_w or need_x:
            x = _plain.widen(input)
            x = x - x.mean(-1, keepdim=True) if center else x
        if need_w:
            gw = rows.t() @ x.to(gu.dtype).reshape(-1, x.shape[-1])
        if need_x:
            dot = sum(dots) if attention == "projection" else dots[2]
            gx = _plain.widen((rows @ weight).view_as(input))
            gx = gx.addcmul_(x, dot.sum(-1, keepdim=True) * r.square(), value=-1)
            gx = (gx - gx.mean(-1, keepdim=True) if center else gx).to(input.dtype)
        return gx, gw, gb, gt, *nones
