"""The diagnosis over training for transformers' ``Trainer``; importing this module imports transformers."""

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from affdiv_zoo.diagnostics._record import untouched
from affdiv_zoo.diagnostics.logger import DivergenceLogger, first

__all__ = ["DivergenceCallback"]

logger = logging.getLogger(__name__)


class DivergenceCallback(TrainerCallback):
    """Diagnoses the model before training and every so many updates, always on the same samples.

    The medians over the layers go into the trainer's log as ``divergence/spread`` and so on; at the end
    ``divergence.json`` (all reports) and ``divergence.png`` (their evolution, with matplotlib) are written into the
    trainer's ``output_dir``. Only the main process works; models that are sharded over processes are not supported.

    Example::

        trainer = Trainer(model, args, train_dataset=data)
        trainer.add_callback(DivergenceCallback(every=100, trainer=trainer))

    Args:
        every: Updates from one diagnosis to the next.
        inputs: The samples, as the model takes them, ``labels`` among them. By default the first ones of the training
            set, collated as in training.
        samples: How many of them.
        trainer: With it the numbers go to its trackers (TensorBoard, ...) too, and not only into ``state.log_history``.
        layers: As in :func:`affdiv_zoo.diagnose`.

    Raises:
        ValueError: ``every`` or ``samples`` is not positive.
    """

    def __init__(
        self,
        every: int = 100,
        inputs: dict[str, Any] | None = None,
        samples: int = 16,
        trainer: Trainer | None = None,
        layers: str | list[str] | None = None,
    ) -> None:
        self.log = DivergenceLogger(every, samples, layers=layers)
        self.inputs = inputs
        self.trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Takes the samples and diagnoses the untrained model."""
        if getattr(args, "deepspeed", None) or getattr(args, "fsdp", None):
            raise ValueError("DivergenceCallback needs whole weights: it does not work with FSDP or DeepSpeed")
        if not state.is_world_process_zero:
            return
        model = kwargs["model"]
        if self.inputs is None:
            loader = kwargs["train_dataloader"]
            with untouched(model):  # a random augmentation must not move the training's random state
                picked = [loader.dataset[i] for i in range(min(self.log.samples, len(loader.dataset)))]
                self.inputs = dict(loader.collate_fn(picked))
        self._diagnose(args, state, model)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Diagnoses after every so many updates."""
        if state.is_world_process_zero:
            self._diagnose(args, state, kwargs["model"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Writes the reports and their plot."""
        if not state.is_world_process_zero or not self.log.reports:
            return
        folder = Path(args.output_dir)
        self.log.save(folder / "divergence.json")
        try:
            self.log.plot(folder / "divergence.png")
        except ImportError as error:
            logger.warning("divergence.png is not drawn: %s", error)

    def _diagnose(self, args: TrainingArguments, state: TrainerState, model: torch.nn.Module) -> None:
        step = state.global_step
        if step % self.log.every or (self.log.steps and self.log.steps[-1] == step):
            return
        device = next(model.parameters()).device
        inputs = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in self.inputs.items()}
        report = self.log.on_step(model, first(inputs, self.log.samples), None, step)
        if report is None:
            return
        numbers = {f"divergence/{key}": value for key, value in report.summary().items()}
        if self.trainer is not None:
            self.trainer.log(numbers)
        else:
            state.log_history.append({**numbers, "epoch": state.epoch, "step": step})
