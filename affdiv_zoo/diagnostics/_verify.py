"""The predictions against real steps of one layer's weights, its input held: finite differences in float64."""

import copy
from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.func import functional_call

from affdiv_zoo.diagnostics._attention import logits
from affdiv_zoo.diagnostics._record import Attention, Layer
from affdiv_zoo.diagnostics._updates import LayerUpdates, gradients, rows_by_sample

STEP = 1e-4
"""The step's length over the weights': small, and far above float64's rounding."""

Params = tuple[Tensor | None, Tensor | None]
"""A weight and a bias, or changes of them."""


def double(module: nn.Module) -> nn.Module:
    """A copy in float64, without hooks and without a built-in activation."""
    module = copy.deepcopy(module).double()
    module._forward_hooks, module._forward_pre_hooks = OrderedDict(), OrderedDict()
    if hasattr(module, "act"):
        module.act = "none"
    return module


def forward(module: nn.Module, x: Tensor, delta: Params, h: float) -> Tensor:
    """The module's own forward with its parameters moved by -h delta."""
    params = {
        name: p.detach() - h * d.double()
        for name, d in zip(("weight", "bias"), delta, strict=True)
        if d is not None and (p := getattr(module, name)) is not None
    }
    with torch.no_grad():
        return functional_call(module, params, (x,))


def step_size(module: nn.Module, delta: Params) -> float:
    """:data:`STEP` of the weights' length."""
    moved = sum(float(d.double().square().sum()) for d in delta if d is not None) ** 0.5
    length = sum(float(p.detach().square().sum()) for p in module.parameters(recurse=False)) ** 0.5
    return STEP * (length or 1.0) / moved if moved > 0 else 0.0


def measure(module: nn.Module, inputs: list[Tensor], delta: Params) -> list[Tensor]:
    """(z(W) - z(W - h delta)) / h for each input: the measured update in units of -eta."""
    h = step_size(module, delta)
    if h == 0:
        return [torch.zeros_like(forward(module, x, delta, 0.0)) for x in inputs]
    return [(forward(module, x, delta, 0.0) - forward(module, x, delta, h)) / h for x in inputs]


def difference(predicted: list[Tensor], measured: list[Tensor]) -> float:
    """||predicted - measured|| / ||measured||, over all of them."""
    off = sum(float((p.double() - m).square().sum()) for p, m in zip(predicted, measured, strict=True))
    whole = sum(float(m.square().sum()) for m in measured)
    return (off / whole) ** 0.5 if whole > 0 else off**0.5


def verify_layer(layer: Layer, updates: LayerUpdates, delta: Params) -> float:
    """The largest relative difference between prediction and measurement, of three steps of this layer alone.

    1. A step with the whole batch's gradient (by autograd, or the optimizer's step): the change of every output.
    2. A step with the gradient of one sample: the change of that sample's outputs.
    3. A step with the gradient of one position of that sample: the change of the output there.

    The sample and the position are those with the largest gradient.
    """
    map, samples = layer.map, updates.samples
    module = double(layer.module)
    by_row = lambda z, samples: rows_by_sample(map.output_rows(z), samples)  # noqa: E731
    inputs = [c.input.double() for c in layer.calls]
    measured = [by_row(z, samples) for z in measure(module, inputs, delta)]
    worst = difference([c.step for c in updates.calls], measured)

    grads = [g.double() for g in gradients(layer)]
    s = int(grads[0].reshape(samples, -1).square().sum(1).argmax())
    pick = lambda t: t[s * (t.shape[0] // samples) : (s + 1) * (t.shape[0] // samples)]  # noqa: E731
    inputs, grads = [pick(x) for x in inputs], [pick(g) for g in grads]
    measured = [by_row(z, 1) for z in measure(module, inputs, _gradient(module, inputs, grads, layer))]
    worst = max(worst, difference([c.sample[s : s + 1] for c in updates.calls], measured))

    g = grads[0].movedim(1, -1) if map.conv else grads[0]  # outputs last
    energy = g.square().sum(-1)
    one = torch.zeros_like(energy).flatten()
    position = int(energy.argmax())
    one[position] = 1.0
    only = g * one.view(energy.shape).unsqueeze(-1)
    only = only.movedim(-1, 1) if map.conv else only
    (moved,) = measure(module, inputs[:1], _gradient(module, inputs[:1], [only], layer))
    moved = by_row(moved, 1)[..., position]
    same = torch.cat([updates.calls[0].same(i, part)[s : s + 1] for i, part in enumerate(map.parts)], 2)[..., position]
    return max(worst, difference([same], [moved]))


def _gradient(module: nn.Module, inputs: list[Tensor], grads: list[Tensor], layer: Layer) -> Params:
    """The gradient of the parameters that train from those of the outputs, by autograd through the forward pass."""
    params = [module.weight, module.bias]
    leaves = [
        None if p is None or not trains else p.detach().requires_grad_()
        for p, trains in zip(params, layer.trains, strict=True)
    ]
    given = {name: p for name, p in zip(("weight", "bias"), leaves, strict=True) if p is not None}
    with torch.enable_grad():
        z = [functional_call(module, given, (x,)) for x in inputs]
        found = iter(torch.autograd.grad(z, list(given.values()), grads, allow_unused=True))
    return tuple(None if p is None else next(found) for p in leaves)


def verify_logits(attention: Attention, predicted: Tensor, valid: Tensor, deltas: dict[int, Params]) -> float:
    """The relative difference between the predicted and the measured update of all logits, by a step of W_q and W_k.

    Args:
        attention: Whose logits.
        predicted: The updates in units of -eta.
        valid: Which pairs are not masked.
        deltas: The gradients or steps of its projections, by ``id(layer)``.
    """
    views = (attention.query, attention.key)
    modules = {id(v.layer): double(v.layer.module) for v in views}
    h = min(step_size(modules[i], deltas[i]) for i in modules) or 1.0
    x = attention.query.call.input.double()

    def at(h: float) -> Tensor:
        outputs = {
            id(v.call): forward(modules[id(v.layer)], v.call.input.double(), deltas[id(v.layer)], h) for v in views
        }
        q, k = (v.of(outputs[id(v.call)]) for v in views)
        return logits(attention, x, q, k)

    # Central: the logits, unlike the layers, are not linear in the weights.
    return difference([predicted], [(at(-h) - at(h)) / (2 * h) * valid])
