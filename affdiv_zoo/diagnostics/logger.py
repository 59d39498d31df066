"""The diagnosis over training: every so many updates, on the batch at hand."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from affdiv_zoo._files import write_whole
from affdiv_zoo.diagnostics._diagnose import diagnose
from affdiv_zoo.diagnostics._record import LossNotFiniteError
from affdiv_zoo.diagnostics.report import DivergenceReport

__all__ = ["DivergenceLogger"]


class DivergenceLogger:
    """Diagnoses a model every so many updates of its training; the training itself is not changed by that.

    Example::

        logger = DivergenceLogger(every=100)
        for step, (images, labels) in enumerate(loader):
            logger.on_step(model, images, labels, step)  # before the update
            ...
        logger.save("divergence.json")
        logger.plot("divergence.png")

    Args:
        every: Updates from one diagnosis to the next; the first is before update 0. Each costs about two training steps
            on as many samples.
        samples: At most so many of a batch's samples are used. Interference grows with their number: it is that of a
            batch of this size.
        loss_fn: As in :func:`affdiv_zoo.diagnose`; give it what the training uses, label smoothing and all.
        layers: As in :func:`affdiv_zoo.diagnose`.

    Attributes:
        steps: The updates made before each diagnosis.
        reports: The reports.

    Raises:
        ValueError: ``every`` or ``samples`` is not positive.
    """

    def __init__(
        self,
        every: int = 100,
        samples: int = 32,
        loss_fn: Callable[[Any, Any], Tensor] | None = F.cross_entropy,
        layers: str | list[str] | None = None,
    ) -> None:
        for name, value in (("every", every), ("samples", samples)):
            if value < 1:
                raise ValueError(f"{name}={value!r} must be at least 1")
        self.every = every
        self.samples = samples
        self.loss_fn = loss_fn
        self.layers = layers
        self.steps: list[int] = []
        self.reports: list[DivergenceReport] = []

    def on_step(self, model: nn.Module, images: Any, labels: Any, step: int) -> DivergenceReport | None:
        """Diagnoses if this step is one of those; a loss that is not finite is passed over.

        Args:
            model: In its present mode.
            images: The batch: a tensor, a tuple or a mapping, as :func:`affdiv_zoo.diagnose` takes it.
            labels: The targets, or None where the model computes its loss itself.
            step: The updates made so far.

        Returns:
            The report, or None.
        """
        if step % self.every:
            return None
        try:
            report = diagnose(
                model, first(images, self.samples), first(labels, self.samples), self.loss_fn, layers=self.layers
            )
        except LossNotFiniteError:
            return None
        self.steps.append(step)
        self.reports.append(report)
        return report

    def plot(self, path: str | Path, title: str = "") -> None:
        """Draws how divergence, spread, cosine and interference changed.

        Args:
            path: An image file; its ending decides the format.
            title: Above the figure.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: There are no reports yet, or the format is unknown.
        """
        from affdiv_zoo.diagnostics.draw import draw_evolution, save

        save(draw_evolution(self.steps, self.reports, title), path)

    def state_dict(self) -> dict[str, Any]:
        """Steps and reports as plain types, for a checkpoint or JSON."""
        return {"steps": list(self.steps), "reports": [r.to_dict() for r in self.reports]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from :meth:`state_dict`."""
        self.steps = list(state["steps"])
        self.reports = [DivergenceReport.from_dict(d) for d in state["reports"]]

    def save(self, path: str | Path) -> None:
        """Writes steps, summaries and reports as JSON, whole or not at all."""
        text = json.dumps(self.state_dict(), indent=1) + "\n"
        write_whole(path, lambda temporary: temporary.write_text(text))


def first(batch: Any, count: int) -> Any:
    """The first samples of all tensors of a batch."""
    if isinstance(batch, Tensor):
        return batch[:count] if batch.ndim else batch
    if isinstance(batch, dict) or hasattr(batch, "items"):
        return {key: first(value, count) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(first(value, count) for value in batch)
    return batch
