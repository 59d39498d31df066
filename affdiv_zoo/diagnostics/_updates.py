"""The three parts of every effective update, from one backward pass: the fast path and the plain reference."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from affdiv_zoo.diagnostics._maps import Features, Part, _broadcast, chunk_size
from affdiv_zoo.diagnostics._record import Layer, wide

CHUNK = 2**23
"""Numbers in the largest temporary tensor, as long as one sample's rows fit: 32 MiB of float32."""


@dataclass
class CallUpdates:
    """The updates of one call's output, all in units of -eta, by rows: ``(samples, groups, outputs, positions)``.

    Attributes:
        ideal: dL/dz.
        divergence: For each part of the outputs K(p, p), ``(samples, groups, positions)``.
        sample: What the gradients of a row's own sample do: the sum of K(p, q) dL/dz(q) over the sample's rows q.
        total: What all gradients do.
        step: What the optimizer's step does, in units of -lr; ``total`` without an optimizer.
    """

    ideal: Tensor
    divergence: list[Tensor]
    sample: Tensor
    total: Tensor
    step: Tensor

    def same(self, i: int, part: Part) -> Tensor:
        """What each row's own gradient does to it: K(p, p) dL/dz(p)."""
        return self.ideal[:, :, part.rows] * self.divergence[i].unsqueeze(2)


@dataclass
class LayerUpdates:
    """The updates of all calls of a layer.

    Attributes:
        calls: One entry for each.
        samples: How many samples the first dimension of its inputs holds; 1 if they cannot be told apart.
        weight_grad: The sum of the rows' shares of dL/dW.
        bias_grad: The sum of the rows' shares of dL/db.
        unexplained: ||autograd's gradient - these|| / ||autograd's gradient||.
    """

    calls: list[CallUpdates] = field(default_factory=list)
    samples: int = 1
    weight_grad: Tensor | None = None
    bias_grad: Tensor | None = None
    unexplained: float = 0.0


def rows_by_sample(rows: Tensor, samples: int) -> Tensor:
    """``(inputs, groups, n, positions)`` with several inputs per sample (windows, frames) to one entry per sample."""
    if rows.shape[0] == samples:
        return rows
    return rows.unflatten(0, (samples, -1)).permute(0, 2, 3, 1, 4).flatten(3)


def samples_of(layer: Layer, batch: int) -> int:
    """The batch size where every input has a multiple of it along its first dimension, else 1."""
    return batch if all(call.input.shape[0] % batch == 0 for call in layer.calls) else 1


def gradients(layer: Layer) -> list[Tensor]:
    """dL/dz of each call, in front of a built-in activation."""
    return [wide(c.grad) if c.active is None else wide(c.grad * c.active) for c in layer.calls]


def layer_updates(layer: Layer, batch: int, step: tuple[Tensor | None, Tensor | None] | None = None) -> LayerUpdates:
    """All updates of a layer, in chunks of samples.

    Args:
        layer: A covered layer after the backward pass.
        batch: The number of samples.
        step: The optimizer's change of the weight and the bias over -lr; None for the gradient itself.

    Returns:
        The updates, each as large as the layer's output.
    """
    map, samples = layer.map, samples_of(layer, batch)
    has_bias, trains = layer.bias is not None, layer.trains
    inputs, grads = [wide(c.input) for c in layer.calls], gradients(layer)
    per_sample = [x.shape[0] // samples for x in inputs]
    ideals = [rows_by_sample(map.output_rows(g), samples) for g in grads]
    positions = [g.shape[-1] for g in ideals]
    n, outputs, P = map.length, map.outputs // map.groups, sum(positions)
    width = map.groups * max((n + outputs) * P, 0 if _by_positions(P, n, outputs) else n * outputs)
    size = chunk_size(width, CHUNK)

    own = [torch.empty_like(g) for g in ideals]
    divergences: list[list[list[Tensor]]] = [[[] for _ in map.parts] for _ in ideals]
    dw = inputs[0].new_zeros(map.groups, outputs, n)
    db = inputs[0].new_zeros(map.groups, outputs)
    for low in range(0, samples, size):
        chunk = slice(low, low + size)
        count = len(range(samples)[chunk])
        x = _join(
            [
                rows_by_sample(map.rows(x[low * k : (low + size) * k]), count)
                for x, k in zip(inputs, per_sample, strict=True)
            ]
        )
        squares = (x * x).sum(2)
        g = _join([g[chunk] for g in ideals])
        for i, part in enumerate(map.parts):
            f = map.features(part, squares, has_bias, trains)
            update = _own_sample(x, g[:, :, part.rows], f, dw[:, part.rows], db[:, part.rows])
            divergence = f.same(squares).expand_as(squares)
            at = 0
            for c, p in enumerate(positions):
                own[c][chunk, :, part.rows] = update[..., at : at + p]
                divergences[c][i].append(divergence[..., at : at + p])
                at += p

    weight = map.weight_of_rows(dw)
    bias = db.flatten() if has_bias else None
    result = LayerUpdates([], samples, weight, bias, _unexplained(layer, weight, bias))
    for c, x in enumerate(inputs):
        by_row = lambda z: rows_by_sample(map.output_rows(z), samples)  # noqa: E731
        total = by_row(map(x, weight, bias))
        moved = total
        if step is not None:
            moved = by_row(map(x, *(_or_zeros(s, p) for s, p in zip(step, (weight, bias), strict=True))))
        divergence = [torch.cat(d) for d in divergences[c]]
        result.calls.append(CallUpdates(ideals[c], divergence, own[c], total, moved))
    return result


def _join(rows: list[Tensor]) -> Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(rows, -1)


def _or_zeros(step: Tensor | None, like: Tensor | None) -> Tensor | None:
    if like is None:
        return None
    return torch.zeros_like(like) if step is None else step.to(like.dtype)


def _by_positions(positions: int, n: int, outputs: int) -> bool:
    """Whether g (X^T X) is cheaper than (g X^T) X: then it is also small, below 2 min(n, outputs) numbers per row."""
    return positions * (n + outputs) <= 2 * n * outputs


def _own_sample(x: Tensor, g: Tensor, f: Features, dw: Tensor, db: Tensor) -> Tensor:
    """The sum of K(p, q) g(q) over each sample's rows; adds to dw and db."""
    n, outputs, positions = x.shape[2], g.shape[2], x.shape[3]
    update = torch.zeros_like(g)
    if isinstance(f.backward, Tensor) or f.backward:
        gw = g * _broadcast(f.backward) if isinstance(f.backward, Tensor) else g
        if _by_positions(positions, n, outputs):
            update = gw @ (x.mT @ x)
            if x.shape[1] == 1:
                dw[0] = torch.addbmm(dw[0], gw.squeeze(1), x.squeeze(1).mT)
            else:
                dw += (gw @ x.mT).sum(0)
        else:
            products = gw @ x.mT
            update = products @ x
            dw += products.sum(0)
        if isinstance(f.forward, Tensor):
            update *= _broadcast(f.forward)
    if isinstance(f.backward_one, Tensor) or f.backward_one:
        sums = (g * _broadcast(f.backward_one)).sum(-1, keepdim=True)
        update += sums * _broadcast(f.forward_one)
        db += sums.squeeze(-1).sum(0)
    return update


def _unexplained(layer: Layer, weight: Tensor, bias: Tensor | None) -> float:
    """How much of autograd's gradient does not come from the recorded calls."""
    pairs = [(layer.weight_grad, weight), (layer.bias_grad, bias)]
    pairs = [(wide(real), ours) for real, ours in pairs if real is not None]
    difference = sum((real - ours).square().sum() for real, ours in pairs)
    whole = sum(real.square().sum() for real, _ in pairs)
    return float((difference / whole).sqrt()) if float(whole) > 0 else 0.0


def layer_updates_reference(layer: Layer, batch: int) -> LayerUpdates:
    """:func:`layer_updates` as the theory writes it, with the kernel of all pairs of rows; for small layers."""
    map, samples = layer.map, samples_of(layer, batch)
    x = _join([rows_by_sample(map.rows(wide(c.input)), samples) for c in layer.calls])
    g = _join([rows_by_sample(map.output_rows(grad), samples) for grad in gradients(layer)])
    S, G, n, P = x.shape
    flat = lambda t: t.movedim(0, 2).reshape(G, t.shape[2], S * P)  # noqa: E731  (groups, length, all rows)
    one_sample = torch.eye(S, dtype=torch.bool).repeat_interleave(P, 0).repeat_interleave(P, 1)
    total, own = torch.empty_like(g), torch.empty_like(g)
    divergences = []
    for part in map.parts:
        f = map.features(part, x.square().sum(2), layer.bias is not None, layer.trains)
        ones = torch.ones_like(x[:, :, :1])
        phi = flat(torch.cat([x * _broadcast(f.forward), ones * _broadcast(f.forward_one)], 2))
        psi = flat(torch.cat([x * _broadcast(f.backward), ones * _broadcast(f.backward_one)], 2))
        kernel = phi.mT @ psi  # K(p, q), (groups, all rows, all rows)
        gradient = flat(g[:, :, part.rows])
        back = lambda t: t.unflatten(2, (S, P)).movedim(2, 0)  # noqa: E731
        total[:, :, part.rows] = back(gradient @ kernel.mT)
        own[:, :, part.rows] = back(gradient @ (kernel * one_sample).mT)
        divergences.append(back(kernel.diagonal(dim1=1, dim2=2).unsqueeze(1)).squeeze(2))
    result = LayerUpdates([], samples)
    at = 0
    for call in layer.calls:
        p = rows_by_sample(map.output_rows(call.output), samples).shape[-1]
        cut = lambda t, at=at, p=p: t[..., at : at + p]  # noqa: E731
        result.calls.append(CallUpdates(cut(g), [cut(d) for d in divergences], cut(own), cut(total), cut(total)))
        at += p
    return result
