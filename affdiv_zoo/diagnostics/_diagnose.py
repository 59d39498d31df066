"""The diagnosis: one backward pass, then layer by layer the three parts of its effective update."""

import fnmatch
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from affdiv_zoo.diagnostics._attention import logit_updates
from affdiv_zoo.diagnostics._optimizer import optimizer_step
from affdiv_zoo.diagnostics._record import Attention, Layer, Record, logits_name, not_covered, run, untouched
from affdiv_zoo.diagnostics._updates import LayerUpdates, layer_updates
from affdiv_zoo.diagnostics._verify import Params, verify_layer, verify_logits
from affdiv_zoo.diagnostics._whole import whole_step as measure_whole_step
from affdiv_zoo.diagnostics.report import DivergenceReport, LayerDivergence, NotCovered

UNEXPLAINED = 0.02
"""The share of a gradient from outside of the recorded calls above which a remark says so; half types stay below."""


@torch.inference_mode(False)  # there is no backward pass in it
def diagnose(
    model: nn.Module,
    inputs: Any,
    targets: Any = None,
    loss_fn: Callable[[Any, Any], Tensor] | None = F.cross_entropy,
    optimizer: Any = None,
    layers: str | Sequence[str] | None = None,
    *,
    verify: bool = False,
    whole_step: bool = False,
    name: str | None = None,
) -> DivergenceReport:
    r"""The divergence of every linear layer, convolution and attention logit of a model, on one batch.

    One forward and backward pass is made, as for a training step; from what it shows, the effective update of every
    layer's output by one step on that layer's own parameters follows, split by whose gradients cause it. The quantities
    and their theory are in :mod:`affdiv_zoo.diagnostics`. Parameters, buffers, gradients, random state, mode and
    hooks of the model are as before.

    Args:
        model: Any module, in the mode it is in: call ``model.train()`` before, for the updates of training. Wrapped
            (``DistributedDataParallel``) and compiled models are unwrapped.
        inputs: What the model is called with: a tensor, a tuple of arguments or a mapping of keyword arguments. The
            samples are along the first dimension.
        targets: Given to ``loss_fn``. None for a model that computes its loss itself, such as transformers' models with
            ``labels`` among the inputs: the loss is then its output's ``loss``.
        loss_fn: ``loss_fn(output, targets)``, a scalar. An output with ``logits`` is passed as its logits, a tensor or
            anything else as it is. None stands for cross entropy.
        optimizer: Whose step ``cosine`` and ``norm_ratio`` describe (weight decay, momentum and all), in units of its
            learning rate; it is left as it is. None for plain SGD. The three parts are the gradient's in either case.
        layers: Only layers with one of these names, or whose names match one of these wildcards.
        verify: Check every prediction against real steps of that layer's parameters, its input held, by finite
            differences in float64; see ``LayerDivergence.verify_error``. Takes several times as long.
        whole_step: Measure, too, how every output moves in one step of all parameters at once, the drift of the layers'
            inputs included: ``whole_cosine`` and ``whole_norm_ratio``, by one more forward pass with the parameters
            moved by a thousandth of their length (an error of about a percent).
        name: The model's name in the report; by default its class's.

    Returns:
        The report.

    Raises:
        TypeError: ``model`` is no module, or ``optimizer`` no optimizer.
        ValueError: No layer matches or can be covered, there are no samples or no loss, or the loss is not finite.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, expected a torch.nn.Module")
    model = _unwrapped(model)
    inputs, targets = _outside_inference_mode((inputs, targets))
    patterns = None if layers is None else [layers] if isinstance(layers, str) else list(layers)
    if any(isinstance(p, nn.parameter.UninitializedTensorMixin) for p in model.parameters()):
        raise ValueError("model has lazy layers without parameters yet: call it once before")

    def loss_of(output: Any) -> Tensor:
        if targets is None and getattr(output, "loss", None) is not None:
            return output.loss
        if targets is None and loss_fn in (None, F.cross_entropy):
            raise ValueError("targets is None, and the model's output has no loss: pass targets, or labels in inputs")
        return (loss_fn or F.cross_entropy)(_logits(output), targets)

    def selected(name: str) -> bool:
        return patterns is None or any(name == p or fnmatch.fnmatchcase(name, p) for p in patterns)

    with untouched(model):
        record = run(model, inputs, loss_of, keep=whole_step)
    with untouched(model):  # some optimizers draw random numbers
        steps = None if optimizer is None else optimizer_step(optimizer, record.grads)
    whole = {}
    if whole_step:
        with untouched(model):
            whole = measure_whole_step(model, inputs, record, record.grads if steps is None else steps)
    report = DivergenceReport(
        name or type(model).__name__,
        record.batch,
        record.loss,
        None if optimizer is None else type(getattr(optimizer, "optimizer", optimizer)).__name__,
        model.training,
        not_covered=[NotCovered(*e) for e in not_covered(model, record) if selected(e[0])],
    )
    device = next(model.parameters()).device.type
    with torch.no_grad(), torch.autocast(device, enabled=False):
        found = list(_entries(record, steps, verify, whole, selected))
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    place = lambda name: order[name if name in order else name.rpartition("[")[0]]  # noqa: E731  (qkv[v] is of qkv)
    behind = {  # logits stand after their projections
        logits_name(a.name): max(place(a.query.layer.name), place(a.key.layer.name)) for a in record.attentions
    }
    report.layers = sorted(found, key=lambda e: behind[e.name] if e.name in behind else place(e.name))
    if patterns is not None and not report.layers:
        names = [layer.name for layer in record.layers if not layer.why_not] + [
            logits_name(a.name) for a in record.attentions
        ]
        raise ValueError(f"layers={layers!r} matches none of the covered layers: {', '.join(names)}")
    if not report.layers:
        raise ValueError(
            f"no layer of the {type(model).__name__} can be covered:\n" + "\n".join(report.not_covered_lines())
        )
    return report


def _entries(
    record: Record,
    steps: dict[int, Tensor] | None,
    verify: bool,
    whole: dict[int, tuple[float, float]],
    selected: Callable[[str], bool],
) -> Iterator[LayerDivergence]:
    """The report's entries, layer by layer, so that few updates are held at a time."""
    updates: dict[int, LayerUpdates] = {}
    deltas: dict[int, Params] = {}
    waiting = [a for a in record.attentions if a.grad is not None and selected(logits_name(a.name))]
    sums = {a.name: _Sums(len([b for b in waiting if b.name == a.name])) for a in waiting}
    for layer in record.layers:
        wanted = [selected(layer.name + part.label) for part in layer.map.parts] if layer.map else []
        needed = any(v.layer is layer for a in waiting for v in (a.query, a.key))
        if layer.why_not or not (any(wanted) or needed):
            layer.calls = [] if not needed else layer.calls
            continue
        delta = (layer.weight_grad, layer.bias_grad)
        if steps is not None:
            delta = tuple(None if p is None else steps.get(id(p)) for p in (layer.weight, layer.bias))
            delta = tuple(None if not t else d for t, d in zip(layer.trains, delta, strict=True))
        found = layer_updates(layer, record.batch, None if steps is None else delta)
        updates[id(layer)], deltas[id(layer)] = found, delta
        error = verify_layer(layer, found, delta) if verify else None
        for i in range(len(layer.map.parts)):
            if wanted[i]:
                entry = _layer_entry(layer, i, found, error)
                if len(wanted) == 1:
                    entry.whole_cosine, entry.whole_norm_ratio = whole.get(id(layer), (None, None))
                yield entry
        done = [a for a in waiting if all(id(v.layer) in updates for v in (a.query, a.key))]
        for attention in done:
            _add_logits(sums[attention.name], attention, updates, deltas, verify)
            waiting.remove(attention)
            if not any(a.name == attention.name for a in waiting):
                yield _logits_entry(attention, sums[attention.name])
        if not any(v.layer is layer for a in waiting for v in (a.query, a.key)):
            del updates[id(layer)]
            layer.calls = []  # and with them their inputs, outputs and gradients


class _Sums:
    """The moments of the divergence and the squared lengths of the parts, summed call by call."""

    def __init__(self, calls: int) -> None:
        self.calls = calls
        self.rows = 0
        self.first = self.second = 0.0
        self.squares = dict.fromkeys(("ideal", "same", "patch", "sample", "step"), 0.0)
        self.product = 0.0
        self.error: float | None = None

    def add(self, divergence: Tensor, ideal: Tensor, same: Tensor, own: Tensor, total: Tensor, step: Tensor) -> None:
        """Adds one call, or some samples of one."""
        d = divergence.double()
        self.rows += d.numel()
        self.first += float(d.sum())
        self.second += float(d.square().sum())
        parts = {"ideal": ideal, "same": same, "patch": own - same, "sample": total - own, "step": step}
        for name, part in parts.items():
            self.squares[name] += float(torch.linalg.vector_norm(part)) ** 2
        self.product += float(torch.dot(ideal.flatten(), step.to(ideal.dtype).flatten()))

    def entry(self, name: str, kind: str, correction: str, note: str = "") -> LayerDivergence:
        """The report's entry."""
        mean = self.first / max(self.rows, 1)
        std = math.sqrt(max(self.second / max(self.rows, 1) - mean**2, 0.0))
        length = {name: math.sqrt(value) for name, value in self.squares.items()}
        over = lambda value, by: value / by if by > 0 else 0.0  # noqa: E731
        return LayerDivergence(
            name,
            kind,
            correction,
            self.rows,
            self.calls,
            mean,
            std,
            over(self.product, length["ideal"] * length["step"]),
            *(over(length[part], length["ideal"]) for part in ("step", "same", "patch", "sample")),
            self.error,
            note=note,
        )


def _layer_entry(layer: Layer, i: int, updates: LayerUpdates, error: float | None) -> LayerDivergence:
    part, sums = layer.map.parts[i], _Sums(len(layer.calls))
    for call in updates.calls:
        cut = lambda t: t[:, :, part.rows]  # noqa: E731
        same = call.same(i, part)
        sums.add(call.divergence[i], cut(call.ideal), same, cut(call.sample), cut(call.total), cut(call.step))
    sums.error = error
    notes = [layer.note]
    if updates.unexplained > UNEXPLAINED:
        notes.append(
            f"{updates.unexplained:.0%} of its gradient does not come from its calls, its parameters being used "
            "elsewhere too: that part is not in these numbers"
        )
    if updates.samples == 1 and layer.calls[0].input.shape[0] > 1:
        notes.append("its first dimension is not that of the samples: all rows count as one sample's")
    if not sums.squares["ideal"]:
        notes.append("its output's gradient is zero on this batch")
    kind = "CorrectedLinear" if part.label else type(layer.module).__name__  # not the name of a private class
    return sums.entry(layer.name + part.label, kind, part.correction, "; ".join(n for n in notes if n))


def _add_logits(
    sums: _Sums, attention: Attention, updates: dict[int, LayerUpdates], deltas: dict[int, Params], verify: bool
) -> None:
    steps, valid = [], []
    for u in logit_updates(attention, updates):
        sums.add(u.divergence[u.valid], u.ideal, u.same, u.sample, u.total, u.step)
        if verify:
            steps.append(u.step)
            valid.append(u.valid)
    if verify:
        error = verify_logits(attention, torch.cat(steps), torch.cat(valid), deltas)
        sums.error = max(error, sums.error or 0.0)


def _logits_entry(attention: Attention, sums: _Sums) -> LayerDivergence:
    correction = "none" if attention.scale is not None else attention.module.attention
    return sums.entry(logits_name(attention.name), "logits", correction)


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of ``DistributedDataParallel``, ``DataParallel`` and ``torch.compile``."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        else:
            return model


def _outside_inference_mode(value: Any) -> Any:
    """Copies tensors that were made in inference mode, which autograd refuses, in nests of tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return value.clone() if value.is_inference() else value
    if type(value) in (tuple, list):
        return type(value)(map(_outside_inference_mode, value))
    return {key: _outside_inference_mode(v) for key, v in value.items()} if type(value) is dict else value


def _logits(output: Any) -> Any:
    """The output's logits, if it has such; else the output."""
    if isinstance(output, Mapping) and "logits" in output:
        return output["logits"]
    return getattr(output, "logits", output)
