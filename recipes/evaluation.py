"""Evaluates a model, and finds the layer at which one went wrong."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from data import UNREADABLE
from torch import nn
from torch.utils.data import DataLoader


def in_memory_format(images: torch.Tensor, channels_last: bool) -> torch.Tensor:
    """Returns images in the memory order the model has."""
    return images.to(memory_format=torch.channels_last) if channels_last else images


@torch.no_grad()
def evaluate(
    accelerator: Accelerator,
    model: nn.Module,
    loader: DataLoader,
    channels_last: bool,
    after_batch: Callable[[int], None] | None = None,
) -> tuple[float, float, int]:
    """Returns the mean cross-entropy, the share of right answers and the number of images, every image once.

    Args:
        accelerator: What has prepared the loader.
        model: The model, prepared or not; it is left in eval mode.
        loader: The images.
        channels_last: Whether the model has that memory order.
        after_batch: Called with the number of each batch, from 0.
    """
    model.eval()
    losses, hits = [], []
    for number, (images, labels) in enumerate(loader):
        with accelerator.autocast():
            logits = model(in_memory_format(images, channels_last))
        logits = logits.float()
        loss = nn.functional.cross_entropy(logits, labels, reduction="none", ignore_index=UNREADABLE)
        loss, hit, labels = accelerator.gather_for_metrics((loss, logits.argmax(1) == labels, labels))
        losses.append(loss[labels != UNREADABLE])
        hits.append(hit[labels != UNREADABLE])
        if after_batch is not None:
            after_batch(number)
    loss, hit = torch.cat(losses).double(), torch.cat(hits)
    return loss.mean().item(), hit.double().mean().item(), len(hit)


def find_nonfinite(model: nn.Module, images: torch.Tensor) -> str:
    """Runs a model once more and tells which layer's output is the first that is not finite.

    Args:
        model: The model without wrappers, in the mode and with the seeds of the run that failed.
        images: The batch.

    Returns:
        Words for a message.
    """
    if not is_finite(images):
        return "the images themselves are not finite"
    names = {module: name for name, module in model.named_modules()}
    found: list[nn.Module] = []

    def look(module: nn.Module, _: Any, output: Any) -> None:
        # A layer's hook runs before that of what contains it: the first is the innermost.
        if not found and not is_finite(output):
            found.append(module)

    handles = [module.register_forward_hook(look) for module in names]
    try:
        with torch.no_grad():
            model(images)
    finally:
        for handle in handles:
            handle.remove()
    if not found:
        return "the output of every layer is finite, and only the loss is not"
    kind, name = type(found[0]).__name__, names[found[0]]
    which = f"of layer {name!r} ({kind})" if name else f"of the model itself ({kind})"
    broken = "" if all(map(is_finite, found[0].parameters())) else ", whose weights are not finite"
    return f"the first output that is not finite is that {which}{broken}"


def is_finite(value: Any) -> bool:
    """Returns whether all numbers in a tensor, or in a nest of tensors, are finite."""
    if isinstance(value, torch.Tensor):
        return not value.is_floating_point() or bool(torch.isfinite(value).all())
    if isinstance(value, dict):
        value = list(value.values())
    return not isinstance(value, list | tuple) or all(map(is_finite, value))
