"""What an optimizer would do with given gradients, on a copy of it."""

import copy
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer


def optimizer_step(optimizer: Any, grads: dict[int, Tensor]) -> dict[int, Tensor]:
    """The change of every parameter in one step, over -lr; the optimizer, its state and the parameters stay.

    Args:
        optimizer: A ``torch.optim.Optimizer``, or accelerate's wrapper of one. Its state (momentum, moments, step
            count) is that of the copy: the step is the one that it would take next.
        grads: dL/dparameter by ``id(parameter)``; parameters without one have none in the step.

    Returns:
        By ``id(parameter)``, for all parameters of the optimizer, in float64: rounding in float32 would be of the
        size of a small step.

    Raises:
        TypeError: It is no optimizer, one that needs a closure, or one whose copy cannot take a step.
        ValueError: It has none of these parameters, or a learning rate of 0.
    """
    if not isinstance(optimizer, Optimizer) and isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    if type(optimizer).__module__.startswith("accelerate") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}, expected a torch.optim.Optimizer of the model")
    if isinstance(optimizer, LBFGS):
        raise TypeError("optimizer is an LBFGS, which evaluates the loss several times a step: pass another, or None")
    groups = optimizer.param_groups
    if not any(id(p) in grads for group in groups for p in group["params"]):
        raise ValueError("optimizer holds none of the model's parameters that have a gradient")
    lrs = [float(group["lr"]) for group in groups]
    if 0 in lrs:
        raise ValueError(
            "optimizer has a learning rate of 0, as at the start of a warm-up: there is no step to diagnose"
        )

    twin = copy.deepcopy(optimizer)
    with torch.no_grad():
        for group in twin.param_groups:
            for p in group["params"]:
                p.grad = None
                p.data = _double(p.data)
                for key, value in twin.state.get(p, {}).items():
                    if isinstance(value, Tensor) and value.numel() > 1:
                        twin.state[p][key] = _double(value)
        for group, copied in zip(groups, twin.param_groups, strict=True):
            for p, q in zip(group["params"], copied["params"], strict=True):
                if id(p) in grads:
                    q.grad = _double(grads[id(p)])
    try:
        twin.step()
    except (AttributeError, TypeError, RuntimeError) as error:  # it has more than its state and its groups
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}, which cannot take a step on a copy ({error}): pass the one "
            "that it wraps, if it wraps one, another, or None"
        ) from error
    return {
        id(p): (_double(p.detach()) - q.detach()) / lr
        for group, copied, lr in zip(groups, twin.param_groups, lrs, strict=True)
        for p, q in zip(group["params"], copied["params"], strict=True)
    }


def _double(t: Tensor) -> Tensor:
    """A float64 copy; MPS, which has none, keeps float32."""
    return t.clone() if t.device.type == "mps" else t.to(torch.float64, copy=True)
