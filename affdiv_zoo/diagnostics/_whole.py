"""A real step of all parameters at once: how the outputs move when the layers before them move too."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from affdiv_zoo.convert._trace import tensors
from affdiv_zoo.diagnostics._maps import is_affine
from affdiv_zoo.diagnostics._record import Layer, Record, wide

STEP = 1e-3
"""The step's length over the parameters': far above float32's rounding, and small."""


def outputs_after(
    model: nn.Module, inputs: Any, record: Record, steps: dict[int, Tensor], h: float
) -> dict[int, list[Tensor]]:
    """Every covered layer's outputs in a pass with all parameters moved by -h times their steps, by ``id(layer)``."""
    args, kwargs = (), {}
    if hasattr(inputs, "keys"):
        kwargs = dict(inputs)
    else:
        args = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    by_id = {id(p): (p.detach() - h * steps[id(p)]).to(p.dtype) for p in model.parameters() if id(p) in steps}
    # One name for each place where a parameter stands: told the second name of a module, functional_call would put its
    # own tensor "back" there in place of the parameter.
    moved = {
        f"{prefix}.{name}" if prefix else name: by_id[id(p)]
        for prefix, module in model.named_modules()
        for name, p in module._parameters.items()
        if id(p) in by_id
    }
    with torch.no_grad(), _listening(model, record) as outputs:
        functional_call(model, moved, args, kwargs, tie_weights=False)
    return outputs


@contextmanager
def _listening(model: nn.Module, record: Record) -> Iterator[dict[int, list[Tensor]]]:
    layers: dict[tuple[int, int], Layer] = {(id(x.weight), id(x.bias)): x for x in record.layers if not x.why_not}
    outputs: dict[int, list[Tensor]] = {id(layer): [] for layer in layers.values()}
    handles = []
    try:
        for module in model.modules():
            key = (id(module._parameters.get("weight")), id(getattr(module, "bias", None)))
            if key in layers and is_affine(module):  # an embedding may have a layer's weight
                into = outputs[id(layers[key])]
                hook = lambda m, args, out, into=into: into.append(next(tensors(out)).detach().clone())  # noqa: E731
                handles.append(module.register_forward_hook(hook))
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def step_size(model: nn.Module, steps: dict[int, Tensor]) -> float:
    """:data:`STEP` of the parameters' length."""
    used = [p for p in model.parameters() if steps.get(id(p)) is not None]
    length = sum(float(torch.linalg.vector_norm(p.detach())) ** 2 for p in used) ** 0.5
    moved = sum(float(torch.linalg.vector_norm(steps[id(p)])) ** 2 for p in used) ** 0.5
    return STEP * length / moved if moved > 0 else 0.0


def whole_step(
    model: nn.Module, inputs: Any, record: Record, steps: dict[int, Tensor]
) -> dict[int, tuple[float, float]]:
    """Cosine and norm ratio of every layer's measured update to the ideal one, by ``id(layer)``.

    Args:
        model: As in the recorded pass, with the same random state and buffers.
        inputs: Those of the recorded pass.
        record: Of a pass that kept the outputs.
        steps: The change of every parameter over -eta (the gradients) or -lr, by ``id(parameter)``.
    """
    h = step_size(model, steps)
    if h == 0:
        return {}
    outputs = outputs_after(model, inputs, record, steps, h)
    found = {}
    for layer in record.layers:
        product = ideal = effective = 0.0
        for call in layer.calls:
            after = outputs[id(layer)][call.number].reshape(call.value.shape)
            g, u = wide(call.grad), (wide(call.value) - wide(after)) / h
            if call.active is not None:
                g, u = g * call.active, u * call.active
            product += float(torch.dot(g.flatten(), u.flatten()))
            ideal += float(torch.linalg.vector_norm(g)) ** 2
            effective += float(torch.linalg.vector_norm(u)) ** 2
        if ideal > 0:
            cosine = product / (ideal * effective) ** 0.5 if effective > 0 else 0.0
            found[id(layer)] = (cosine, (effective / ideal) ** 0.5)
    return found
