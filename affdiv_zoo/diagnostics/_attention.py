"""The effective update of attention logits; see the theory in :mod:`affdiv_zoo.diagnostics`."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from affdiv_zoo import _plain
from affdiv_zoo.diagnostics._maps import chunk_size
from affdiv_zoo.diagnostics._record import Attention, Layer, View, wide
from affdiv_zoo.diagnostics._updates import CHUNK, LayerUpdates


@dataclass
class LogitUpdates:
    """The updates of some samples' logits in units of -eta, each ``(samples, heads, queries, keys)``.

    Attributes as in :class:`affdiv_zoo.diagnostics._updates.CallUpdates`; ``same`` is D_ij dL/da_ij, and ``valid``
    tells the pairs that are not masked.
    """

    ideal: Tensor
    divergence: Tensor
    sample: Tensor
    total: Tensor
    step: Tensor
    valid: Tensor

    @property
    def same(self) -> Tensor:
        return self.divergence * self.ideal


def logits(attention: Attention, x: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """What enters the softmax, without a mask: the logits times their scale or temperature."""
    c = plain_scale(attention)
    if c is not None:
        return q @ k.mT * c
    m = attention.module
    bias = m.qkv.bias is not None
    plain = _plain.corrected_attention_logits(x, q, k, m.attention, bias, m.center, m.eps)
    return plain * m.logit_scale.detach().exp().to(q.dtype).view(-1, 1, 1)


def plain_scale(attention: Attention) -> Tensor | float | None:
    """c of logits that are c q . k, one number or one per head; None for the others."""
    if attention.scale is not None or attention.module.attention != "projection":
        return attention.scale
    return attention.module.logit_scale.detach().exp().view(-1, 1, 1)


def pair_divergence(attention: Attention, x: Tensor, q: Tensor, k: Tensor, kq: Tensor, kk: Tensor) -> Tensor:
    r"""D_ij: what a step for the logit a_ij alone moves it by, over -eta.

    Args:
        attention: Tells the logits' correction.
        x: The tokens, ``(batch, tokens, dim)``; used by the corrected logits only.
        q: The queries as their layer returns them, ``(batch, heads, tokens, head_dim)``.
        k: The keys.
        kq: The divergence K(i, i) of the queries' layer, ``(batch, heads, tokens)``.
        kk: The same of the keys'.

    Returns:
        K_q(i, i) (a' . a*')(q_i) + K_k(j, j) (a' . a*')(k_j), with a' the derivative of the logit and a*' the one of
        the backward pass, which holds some divisors constant; the table in :mod:`affdiv_zoo.diagnostics`.
    """
    q2, k2 = q.square().sum(-1, keepdim=True), k.square().sum(-1, keepdim=True).mT  # columns and rows
    kq, kk = kq.unsqueeze(-1), kk.unsqueeze(-2)
    c = plain_scale(attention)
    if c is not None:
        return c**2 * (kq * k2 + kk * q2)
    m = attention.module
    kind = m.attention
    t2 = (2 * m.logit_scale.detach()).exp().to(q.dtype).view(-1, 1, 1)
    r = _plain.inverse_token_norm(x, m.qkv.bias is not None, m.center, m.eps).to(q.dtype)
    r2q, r2k = r.square(), r.square().mT
    w = q @ k.mT
    if kind == "separable":
        # a = t w A(q) B(k) with A = 2^(-1/4) r (r^2 ||q||^2 + eps)^(-1/4), which the backward pass holds constant
        nq, nk = r2q * q2 + m.eps, r2k * k2 + m.eps
        factor = t2 * r2q * r2k / (2 * torch.sqrt(nq * nk))
        return factor * (kq * (k2 - w.square() * r2q / (2 * nq)) + kk * (q2 - w.square() * r2k / (2 * nk)))
    hat_q2, hat_k2, hat_w = r2q * q2, r2k * k2, w * r * r.mT
    s = hat_q2 + hat_k2 + m.eps
    if kind == "logit":
        cut = hat_w.square() / s.square()
        return t2 * (kq * r2q * (hat_k2 / s - cut) + kk * r2k * (hat_q2 / s - cut))
    plus, minus = ((s + sign * 2 * hat_w).clamp(min=m.eps) for sign in (1, -1))
    units = (hat_q2 + hat_k2 + 2 * hat_w) / plus + (hat_q2 + hat_k2 - 2 * hat_w) / minus
    across = 2 * (hat_q2 - hat_k2) / torch.sqrt(plus * minus)
    return t2 / 4 * (kq * r2q * (units - across) + kk * r2k * (units + across))


def logit_change(attention: Attention, x: Tensor, q: Tensor, k: Tensor, dq: Tensor, dk: Tensor) -> Tensor:
    """The derivative of the logits where q and k move along dq and dk, the divisors moving too."""
    c = plain_scale(attention)
    if c is not None:
        return (dq @ k.mT + q @ dk.mT) * c
    # A central difference in float64, its error below 1e-7 of the derivative: simpler than four formulas.
    x, q, k, dq, dk = (t.double() for t in (x, q, k, dq, dk))
    length = torch.linalg.vector_norm(dq) + torch.linalg.vector_norm(dk)
    if length == 0:
        return torch.zeros_like(q @ k.mT)
    h = 1e-5 * (torch.linalg.vector_norm(q) + torch.linalg.vector_norm(k)) / length
    up, down = (logits(attention, x, q + s * h * dq, k + s * h * dk) for s in (1, -1))
    return (up - down) / (2 * h)


def logit_updates(attention: Attention, updates: dict[int, LayerUpdates]) -> Iterator[LogitUpdates]:
    """The updates of an attention's logits from those of its projections, in chunks of samples.

    Args:
        attention: After the backward pass.
        updates: Of the layers of queries and keys, by ``id(layer)``.
    """
    q_call, k_call = attention.query.call, attention.key.call
    q, k = (wide(view.of(view.call.output)) for view in (attention.query, attention.key))
    v, grad = wide(attention.value), wide(attention.grad)
    names = ["divergence", "sample", "total", "step"]
    views = (attention.query, attention.key)
    if all(call.step is call.total for view in views for call in updates[id(view.layer)].calls):
        names.remove("step")
    moved = {name: [_seen(view, updates, name) for view in views] for name in names}
    x = wide(q_call.input) if q_call is k_call else q
    batch, heads, queries = q.shape[:3]
    size = chunk_size(heads * queries * k.shape[2], CHUNK)
    for low in range(0, batch, size):
        c = slice(low, low + size)
        args = (attention, x[c], q[c], k[c])
        plain = logits(*args)
        masked, valid = _masked(plain, attention, c)
        p = masked.softmax(-1)
        dp = grad[c] @ v[c].mT
        ideal = p * (dp - (p * dp).sum(-1, keepdim=True))
        divergence = pair_divergence(*args, *(d[c][..., 0] for d in moved["divergence"]))
        own, total, *step = (
            logit_change(*args, *(d[c] for d in moved[name])).to(q.dtype) * valid for name in names[1:]
        )
        yield LogitUpdates(ideal, divergence, own, total, step[0] if step else total, valid)


def _seen(view: View, updates: dict[int, LayerUpdates], name: str) -> Tensor:
    """A layer's updates, or its divergence, where the view shows them."""
    layer: Layer = view.layer
    found = updates[id(layer)].calls[[c is view.call for c in layer.calls].index(True)]
    shape = view.call.output.shape
    if name == "divergence":
        outputs = found.ideal.shape[2]
        rows = torch.cat(
            [
                d.unsqueeze(2).expand(-1, -1, len(range(outputs)[part.rows]), -1)
                for d, part in zip(found.divergence, layer.map.parts, strict=True)
            ],
            2,
        )
    else:
        rows = getattr(found, name)
    return view.of(rows.squeeze(1).mT.reshape(shape))


def _masked(plain: Tensor, attention: Attention, chunk: slice) -> tuple[Tensor, Tensor]:
    """The logits with the mask, and which of them take part."""
    mask, valid = attention.mask, torch.ones_like(plain, dtype=torch.bool)
    if mask is not None:
        mask = mask.detach()
        if mask.ndim == plain.ndim and mask.shape[0] > 1:
            mask = mask[chunk]
        if mask.dtype == torch.bool:
            valid = valid & mask
        else:
            plain = plain + mask
            valid = plain > -1e30
    if attention.is_causal:
        valid = valid & torch.ones(plain.shape[-2:], dtype=torch.bool, device=plain.device).tril()
    return plain.masked_fill(~valid, -torch.inf), valid
