"""The training loop: one class that goes from update to update, and can begin at any of them.

Everything random in an update (dropout, stochastic depth, Mixup) is drawn after seeding with (seed, epoch, batch,
process), the images' order and augmentation follow from (seed, epoch, index), and the rate from the number of updates.
So a position, the weights and the optimizer's state are all that a resumed run needs to repeat what would have been.
"""

import argparse
import contextlib
import dataclasses
import math
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.data_loader import skip_first_batches
from accelerate.utils import DistributedType, gather_object
from building import build_criterion, build_mixup, build_optimizer, build_scheduler, save_model
from checkpoints import RunFolder, load_checkpoint, save_checkpoint, told_failure
from data import Data, RecipeError, check_skipped, cpu_workers, sample_bits
from evaluation import evaluate, find_nonfinite, in_memory_format
from options import plain
from records import write_divergence, write_log
from signals import Stopped, StopSignal, leave_signals_to_parent
from streaming import train_loader as stream_loader
from timm.utils import ModelEmaV3, distribute_bn
from timm.utils.agc import adaptive_clip_grad
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from tqdm import tqdm

from affdiv_zoo.diagnostics import DivergenceLogger

# images, logits, labels (class numbers, or shares of the classes under Mixup) -> the mean loss
Objective = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class DivergedError(RecipeError):
    """A loss that is no longer finite.

    Attributes:
        epoch: The epoch in which that was seen, from 1.
        rows: The log of the epochs before it.
    """

    def __init__(self, lr: float, epoch: int, rows: list[dict[str, Any]], where: str = ""):
        super().__init__(
            f"--lr {lr}: the loss is no longer finite in epoch {epoch}{where}; lower --lr or set --clip-grad 1"
        )
        self.epoch = epoch
        self.rows = rows


# --------------------------------------------------------------------------------------------------------------------
# Data
# --------------------------------------------------------------------------------------------------------------------


def loader_workers(args: argparse.Namespace, data: Data) -> int:
    """Returns the number of loader workers per process."""
    return args.workers if args.workers is not None else 0 if data.in_memory else cpu_workers()


def build_loaders(
    args: argparse.Namespace, data: Data, processes: int
) -> tuple[DataLoader, DataLoader | None, DataLoader | None]:
    """Makes the loaders for training, for evaluation after each epoch and for the test set, where they are needed."""
    workers = loader_workers(args, data)
    common = dict(num_workers=workers, collate_fn=data.collate_fn, worker_init_fn=leave_signals_to_parent)
    if isinstance(data.train, IterableDataset):
        train = stream_loader(data.train, args.batch_size, workers, leave_signals_to_parent)
    else:
        train = DataLoader(
            data.train,
            batch_size=args.batch_size,
            shuffle=True,
            # A small last batch makes a noisy update, and BatchNorm fails on a batch of one.
            drop_last=len(data.train) >= args.batch_size * processes,
            **common,
        )
    test = DataLoader(data.test, batch_size=args.eval_batch_size, **common) if args.test != "never" else None
    if data.val is not None:
        return train, DataLoader(data.val, batch_size=args.eval_batch_size, **common), test
    return train, test if args.test == "auto" else None, test


def seed_batch(seed: int, epoch: int, batch: int, process: int, processes: int) -> None:
    """Seeds what the model and Mixup draw from, as a pure function of the batch's place."""
    bits = int(sample_bits(seed, epoch, [batch * processes + process])[0])
    random.seed(bits)
    np.random.seed(bits % 2**32)
    torch.manual_seed(bits % 2**63)


# --------------------------------------------------------------------------------------------------------------------
# Training
# --------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Position:
    """How far a run is: what its checkpoint holds besides tensors.

    Attributes:
        epoch: The epoch, from 0; its evaluation belongs to it.
        batch: The batches of it that are done.
        updates: The updates so far.
        sums: Loss, right answers and images of the epoch so far, over all processes.
        rows: The log of the epochs before it.
        best: The best value of `--eval-metric`, negated if it is a loss.
        waited: The evaluations since then.
        lr: The rate of the last update.
        seconds: What the run took so far.
        epoch_seconds: What the epoch took so far.
        divergence: What `--diagnose-every` found so far.
    """

    epoch: int = 0
    batch: int = 0
    updates: int = 0
    sums: list[float] = dataclasses.field(default_factory=lambda: [0.0, 0.0, 0.0])
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    best: float | None = None
    waited: int = 0
    lr: float = 0.0
    seconds: float = 0.0
    epoch_seconds: float = 0.0
    divergence: dict[str, Any] = dataclasses.field(default_factory=dict)


class Trainer:
    """Trains a model.

    Args:
        args: The recipe's arguments.
        accelerator: What runs it.
        model: The model, on the CPU. It is trained in place.
        data: The data sets.
        run: Where to write; None to write nothing.
        stop: The handler of signals to stop.
        make_objective: Makes the objective of the accelerator and of the loss that the arguments ask for; without it,
            the objective is that loss.

    Raises:
        RecipeError: An argument that does not fit.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        accelerator: Accelerator,
        model: nn.Module,
        data: Data,
        run: RunFolder | None = None,
        stop: StopSignal | None = None,
        make_objective: Callable[[Accelerator, nn.Module], Objective] | None = None,
    ):
        self.args, self.accelerator, self.data, self.run = args, accelerator, data, run
        self.stop = stop or StopSignal()
        self.position = Position()
        self.mixup = build_mixup(args, len(data.label_names))
        if self.mixup is not None and len(data.train) < args.batch_size * accelerator.num_processes:
            raise RecipeError(f"--batch-size {args.batch_size}: --mixup needs one whole batch of training images")
        criterion = build_criterion(args)
        self.objective = (
            make_objective(accelerator, criterion)
            if make_objective is not None
            else lambda images, logits, labels: criterion(logits, labels)
        )
        if args.channels_last:
            model = model.to(memory_format=torch.channels_last)
        self.ema = self._build_ema(model)
        optimizer = build_optimizer(args, model)
        loaders = build_loaders(args, data, accelerator.num_processes)
        self.test_is_eval = loaders[1] is loaders[2]
        self.model, self.optimizer, self.train_loader = accelerator.prepare(model, optimizer, loaders[0])
        # Not by their truth, which asks for their length: a stream may not know it.
        self.eval_loader = None if loaders[1] is None else accelerator.prepare(loaders[1])
        if self.test_is_eval or loaders[2] is None:
            self.test_loader = self.eval_loader if self.test_is_eval else None
        else:
            self.test_loader = accelerator.prepare(loaders[2])
        self.eval_name = "test" if self.test_is_eval else "val"

        self.updates_per_epoch = math.ceil(len(self.train_loader) / args.grad_accum_steps)
        self.total = self.updates_per_epoch * args.epochs
        if args.max_steps is not None:
            self.total = min(self.total, args.max_steps)
        self.epochs = math.ceil(self.total / self.updates_per_epoch)
        self.scheduler = build_scheduler(args, self.optimizer, self.total, self.updates_per_epoch)
        eval_columns = () if self.eval_loader is None else (f"{self.eval_name}_loss", f"{self.eval_name}_top1")
        self.columns = ("epoch", "train_loss", "train_top1", *eval_columns, "lr", "seconds")
        self.started = self.epoch_started = 0.0
        self.eval_result: tuple[float, float, int] | None = None
        self.stopping = False
        self.divergence = self._build_divergence(criterion)

    def _build_ema(self, model: nn.Module) -> ModelEmaV3 | None:
        args, accelerator = self.args, self.accelerator
        if not args.model_ema:
            return None
        if accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED):
            raise RecipeError(f"--model-ema does not work with {accelerator.distributed_type.value}; leave it off")
        # Before `prepare`, which would have it copy the wrappers.
        model.to(accelerator.device)
        return ModelEmaV3(model, decay=args.model_ema_decay, use_warmup=args.model_ema_warmup)

    def _build_divergence(self, criterion: nn.Module) -> DivergenceLogger | None:
        args, accelerator = self.args, self.accelerator
        if args.diagnose_every is None:
            return None
        if accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED):
            raise RecipeError(
                f"--diagnose-every does not work with {accelerator.distributed_type.value}, which splits the weights"
            )
        return DivergenceLogger(args.diagnose_every, loss_fn=criterion)

    # What a checkpoint is made of -----------------------------------------------------------------------------------

    def save(self, identity: dict[str, Any] | None = None) -> None:
        """Saves a checkpoint of the moment between two updates that the run is in."""
        if self.run is None:
            return
        now = time.perf_counter()
        position = dataclasses.replace(
            self.position,
            sums=self.total_sums(),
            seconds=self.position.seconds + now - self.started,
            epoch_seconds=self.position.epoch_seconds + now - self.epoch_started,
        )
        state = dict(dataclasses.asdict(position), identity=identity or self.identity())
        ema = self.ema and self.ema.module
        save_checkpoint(self.accelerator, self.run, state, ema, self.args.checkpoint_hist)

    def identity(self) -> dict[str, Any]:
        """Returns what has to be the same when the run is resumed."""
        return run_identity(self.args, self.data, self.accelerator.num_processes)

    def resume(self, folder: Path, state: dict[str, Any]) -> None:
        """Goes to a checkpoint's position.

        Args:
            folder: The checkpoint's folder, which `find_checkpoint` has checked.
            state: What that has read.
        """
        load_checkpoint(self.accelerator, folder, self.ema and self.ema.module)
        self.accelerator.step = 0  # of gradient accumulation: checkpoints lie between updates
        names = {field.name for field in dataclasses.fields(Position)}
        self.position = Position(**{name: value for name, value in state.items() if name in names})
        if not self.accelerator.is_main_process:
            self.position.sums = [0.0, 0.0, 0.0]
        self.scheduler.step_update(self.position.updates)

    def total_sums(self) -> list[float]:
        """Returns loss, right answers and images of the epoch so far, over all processes."""
        return self.accelerator.reduce(self.sums, "sum").tolist()

    # The loop ---------------------------------------------------------------------------------------------------------

    def train(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Trains from the position to the end, evaluates, and writes the log and the weights.

        Returns:
            The metrics, and the log: one row per epoch.

        Raises:
            DivergedError: A loss is no longer finite.
            Stopped: A signal came. The run is saved.
            RecipeError: A checkpoint or the run cannot be written.
        """
        args, position = self.args, self.position
        self.started = self.epoch_started = time.perf_counter()
        # Summed on the device, where the images are.
        kind = torch.float64 if self.accelerator.device.type == "cpu" else torch.float32
        self.sums = torch.tensor(position.sums, dtype=kind, device=self.accelerator.device)
        if self.divergence is not None and position.divergence:
            self.divergence.load_state_dict(position.divergence)
        self.progress = tqdm(
            total=self.total,
            initial=position.updates,
            desc=args.model,
            unit="step",
            disable=args.no_progress or not self.accelerator.is_main_process,
        )
        wait = self.stop.waiting() if self.run is not None else contextlib.nullcontext()
        with self.progress, wait:
            while position.epoch < self.epochs and not self.out_of_patience():
                self.train_epoch()
                self.end_epoch()
                last = position.epoch == self.epochs or self.out_of_patience()
                if last or position.epoch % args.checkpoint_interval == 0 or self.stopping:
                    self.save()
                self.raise_if_stopping()
            metrics = self.metrics()
            self.export(None)
            if self.divergence is not None and self.run is not None and self.accelerator.is_main_process:
                with told_failure(self.run):
                    write_divergence(args, self.run.work, self.divergence)
        return metrics, position.rows

    def out_of_patience(self) -> bool:
        """Returns whether the best evaluation is too long ago."""
        return self.args.patience is not None and self.position.waited >= self.args.patience

    def train_epoch(self) -> None:
        """Does the updates of an epoch that are left."""
        args, accelerator, position = self.args, self.accelerator, self.position
        batches = len(self.train_loader)
        if position.batch == batches or position.updates == self.total:
            return  # it was saved before its evaluation
        self.model.train()
        # The order of the images and their augmentation. The loader tells the data set only in some of its forms.
        self.train_loader.set_epoch(position.epoch)
        if hasattr(self.data.train, "set_epoch"):
            self.data.train.set_epoch(position.epoch)
        loader = skip_first_batches(self.train_loader, position.batch) if position.batch else self.train_loader
        if self.mixup is not None:
            self.mixup.mixup_enabled = not args.mixup_off_epoch or position.epoch < args.mixup_off_epoch
        for batch, (images, labels) in enumerate(loader, position.batch):
            first = batch - batch % args.grad_accum_steps
            self.train_batch(batch, images, labels, min(args.grad_accum_steps, batches - first))
            if not accelerator.sync_gradients:
                continue
            position.batch = batch + 1
            if args.checkpoint_steps is not None and position.updates % args.checkpoint_steps == 0:
                self.save()
            if self.stopping:
                self.save()
            self.raise_if_stopping()
            if position.updates == self.total:
                break

    def train_batch(self, batch: int, images: torch.Tensor, labels: torch.Tensor, group: int) -> None:
        """Goes forward and backward once, and makes an update if the batch is the last of its group.

        Args:
            batch: The batch's number in the epoch.
            images: The images.
            labels: Their classes.
            group: How many batches make the update.
        """
        args, accelerator, position = self.args, self.accelerator, self.position
        place = args.seed, position.epoch, batch, accelerator.process_index, accelerator.num_processes
        seed_batch(*place)
        if self.mixup is not None:
            images, labels = self.mixup(images, labels)
        images = in_memory_format(images, args.channels_last)
        if self.divergence is not None and batch % args.grad_accum_steps == 0:
            self.diagnose(images, labels)
        with accelerator.accumulate(self.model):
            logits = self.model(images)
            loss = self.objective(images, logits, labels)
            if (batch + 1) % args.check_interval == 0 or batch + 1 == len(self.train_loader):
                self.check(loss, images, batch)
            # accelerate divides by the usual number, which the last group of an epoch may not reach.
            short = args.grad_accum_steps / group
            accelerator.backward(loss if short == 1 else loss * short)
            if accelerator.sync_gradients and args.clip_grad is not None:
                self.clip_gradients()
            self.optimizer.step()
            self.optimizer.zero_grad()
        with torch.no_grad():
            classes = labels if labels.ndim == 1 else labels.argmax(1)  # under Mixup, the larger share's
            hits = (logits.argmax(1) == classes).sum()
            self.sums += torch.stack([loss.detach() * len(labels), hits, torch.full_like(hits, len(labels))])
        if accelerator.sync_gradients:
            position.updates += 1
            position.lr = max(group["lr"] for group in self.optimizer.param_groups)
            self.scheduler.step_update(position.updates)
            if self.ema is not None:
                self.ema.update(accelerator.unwrap_model(self.model, keep_torch_compile=False), position.updates)
            if args.tracker and position.updates % args.log_interval == 0:
                accelerator.log({"train/loss": loss.item(), "lr": position.lr}, step=position.updates)
            self.progress.update()

    def diagnose(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """Diagnoses the coming update if it is one of those of `--diagnose-every`; nothing of the training changes.

        All processes do, since layers such as synchronised BatchNorms may wait for each other; the main one's counts.
        """
        position = self.position
        report = self.divergence.on_step(self.model, images, labels, position.updates)
        if report is None:
            return
        position.divergence = self.divergence.state_dict()
        if self.args.tracker:
            numbers = {f"divergence/{key}": value for key, value in report.summary().items()}
            self.accelerator.log(numbers, step=position.updates)

    def clip_gradients(self) -> None:
        """Bounds the gradient as `--clip-mode` says."""
        args, accelerator = self.args, self.accelerator
        if args.clip_mode == "norm":
            accelerator.clip_grad_norm_(self.model.parameters(), args.clip_grad)
        elif args.clip_mode == "value":
            accelerator.clip_grad_value_(self.model.parameters(), args.clip_grad)
        else:
            accelerator.unscale_gradients()
            # The head is left out, as in the paper of the method (Brock et al. 2021) and in timm.
            head = set(
                map(id, accelerator.unwrap_model(self.model, keep_torch_compile=False).get_classifier().parameters())
            )
            parameters = [p for p in self.model.parameters() if id(p) not in head and p.grad is not None]
            adaptive_clip_grad(parameters, args.clip_grad)

    def check(self, loss: torch.Tensor | None, images: torch.Tensor | None = None, batch: int = 0) -> None:
        """Learns of any process's signal to stop, and raises a DivergedError if any loss is not finite."""
        accelerator, position = self.accelerator, self.position
        flags = [float(loss is not None and not math.isfinite(loss.item())), float(self.stop.number is not None)]
        if accelerator.num_processes > 1:
            flags = accelerator.reduce(torch.tensor(flags, device=accelerator.device), "sum").tolist()
        self.stopping = self.stopping or flags[1] > 0
        if not flags[0]:
            return
        place = self.args.seed, position.epoch, batch, accelerator.process_index, accelerator.num_processes
        seed_batch(*place)
        with accelerator.autocast():
            own = find_nonfinite(accelerator.unwrap_model(self.model, keep_torch_compile=False), images)
        where = [words for bad, words in gather_object([(not math.isfinite(loss.item()), own)]) if bad][0]
        rate = max(group["lr"] for group in self.optimizer.param_groups)
        raise DivergedError(
            self.args.lr,
            position.epoch + 1,
            position.rows,
            f", in update {position.updates + 1} of {self.total} at a rate of {rate:.3g}: {where}",
        )

    def raise_if_stopping(self) -> None:
        """Raises Stopped if any process got a signal that `check` has seen."""
        if self.stopping:
            if self.run is None:
                raise KeyboardInterrupt(self.stop.number or signal.SIGTERM)
            raise Stopped(self.stop.number or signal.SIGTERM, self.position.updates)

    def evaluate(self, loader: DataLoader) -> tuple[float, float, int]:
        """Evaluates what is to be saved: the averaged weights if there are some. A signal to stop saves the run."""

        def after_batch(number: int) -> None:
            if (number + 1) % self.args.check_interval == 0:
                self.check(None)
                if self.stopping:
                    self.save()
                    self.raise_if_stopping()

        model = self.model if self.ema is None else self.ema.module
        if self.run is None:
            result = evaluate(self.accelerator, model, loader, self.args.channels_last)
        else:
            result = evaluate(self.accelerator, model, loader, self.args.channels_last, after_batch)
        check_skipped(self.accelerator, loader.dataset, "evaluation")
        if not math.isfinite(result[0]):  # of the last update, which no training loss shows
            raise DivergedError(self.args.lr, min(self.position.epoch + 1, self.epochs), self.position.rows)
        return result

    def end_epoch(self) -> None:
        """Evaluates, keeps the best weights, and goes to the beginning of the next epoch."""
        args, accelerator, position = self.args, self.accelerator, self.position
        check_skipped(accelerator, self.data.train, "training")
        loss_sum, hit_sum, image_sum = self.total_sums()
        if not math.isfinite(loss_sum):
            raise DivergedError(args.lr, position.epoch + 1, position.rows)
        row = dict.fromkeys(self.columns)
        row.update(epoch=position.epoch + 1, train_loss=loss_sum / image_sum, train_top1=hit_sum / image_sum)
        row["lr"] = position.lr
        shown = {"loss": f"{row['train_loss']:.3f}"}
        if accelerator.num_processes > 1:
            # BatchNorm's running statistics differ between processes. DDP goes on with the main process's.
            for module in (accelerator.unwrap_model(self.model), *((self.ema.module,) if self.ema else ())):
                distribute_bn(module, accelerator.num_processes, reduce=False)
        last = position.epoch + 1 == self.epochs
        improved = False
        if self.eval_loader is not None and (last or (position.epoch + 1) % args.val_interval == 0):
            loss, top1, images = self.evaluate(self.eval_loader)
            row.update({f"{self.eval_name}_loss": loss, f"{self.eval_name}_top1": top1})
            self.eval_result = loss, top1, images
            shown[self.eval_name] = f"{top1:.2%}"
            value = top1 if args.eval_metric == "top1" else -loss
            improved = position.best is None or value > position.best
            position.best = value if improved else position.best
            position.waited = 0 if improved else position.waited + 1
        now = time.perf_counter()
        row["seconds"] = position.epoch_seconds + now - self.epoch_started
        position.rows.append(row)
        position.epoch, position.batch, position.sums, position.epoch_seconds = position.epoch + 1, 0, [0.0] * 3, 0.0
        self.sums, self.epoch_started = torch.zeros_like(self.sums), now
        self.progress.set_postfix(shown)
        if self.run is not None and accelerator.is_main_process:
            with told_failure(self.run):
                write_log(self.run.work / "log.csv", self.columns, position.rows)
        if improved:
            self.export("best")
        if args.tracker:
            values = {name.replace("_", "/", 1): value for name, value in row.items() if value is not None}
            accelerator.log({name: value for name, value in values.items() if name != "lr"}, step=position.updates)

    # The end ----------------------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, Any]:
        """Evaluates on the test set if that is still to be done, and returns the run's metrics."""
        data, rows, position = self.data, self.position.rows, self.position
        metrics: dict[str, Any] = {}
        if data.val is not None:
            metrics.update(val_top1=rows[-1]["val_top1"], val_loss=rows[-1]["val_loss"])
        if self.test_loader is not None:
            if self.test_is_eval and self.eval_result is not None:
                loss, top1, images = self.eval_result
            else:
                loss, top1, images = self.evaluate(self.test_loader)
            metrics.update(test_top1=top1, test_loss=loss, test_images=images)
        if self.eval_loader is not None:
            name, sign = f"{self.eval_name}_{self.args.eval_metric}", 1 if self.args.eval_metric == "top1" else -1
            best = max((row for row in rows if row[name] is not None), key=lambda row: sign * row[name])
            metrics[f"best_{self.eval_name}_top1"] = best[f"{self.eval_name}_top1"]
            metrics[f"best_{self.eval_name}_epoch"] = best["epoch"]
        metrics.update(
            train_top1=rows[-1]["train_top1"],
            train_loss=rows[-1]["train_loss"],
            train_images=len(data.train),
            val_images=0 if data.val is None else len(data.val),
            epochs=position.epoch,
            updates=position.updates,
            seconds=position.seconds + time.perf_counter() - self.started,
        )
        return metrics

    def export(self, name: str | None) -> None:
        """Writes weights and config.json into the run folder, or into a folder in it. All processes call it."""
        if self.run is None:
            return
        accelerator = self.accelerator
        state = accelerator.get_state_dict(self.model) if self.ema is None else self.ema.module.state_dict()
        state = {key.replace("_orig_mod.", ""): value for key, value in state.items()}  # of torch.compile
        if not accelerator.is_main_process:
            return
        model = accelerator.unwrap_model(self.model, keep_torch_compile=False)
        with told_failure(self.run):
            if name is None:
                save_model(self.run.work, model, self.args, self.data, state)
                return
            part, final = self.run.work / f".{name}.part", self.run.work / name
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            save_model(part, model, self.args, self.data, state)
            shutil.rmtree(final, ignore_errors=True)
            part.rename(final)


def run_identity(args: argparse.Namespace, data: Data, processes: int) -> dict[str, Any]:
    """Returns what has to be the same when a run is resumed: its arguments, processes and data."""
    same = dict(
        plain(vars(args)), num_processes=processes, train_images=len(data.train), classes=list(data.label_names)
    )
    if args.streaming:
        same["stream_workers"] = loader_workers(args, data)  # they share the shards, which decides the order
    return same
