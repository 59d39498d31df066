"""Trains an image classifier from scratch: any of timm's models or of this plugin's, on one or several processes.

    accelerate launch recipes/train.py
    accelerate launch recipes/train.py --model resnet20_cifar --dataset uoft-cs/cifar10 --epochs 30

The first line trains a PatchNorm ResNet on scikit-learn's digits within a minute on a laptop's CPU and downloads
nothing. A run writes one folder, which timm loads as `local-dir:<folder>`:

    model.safetensors   the weights after the last update
    config.json         architecture, classes and preprocessing, as timm writes them
    results.json        metrics, arguments, versions and times
    log.csv             one row per epoch
"""

import argparse
import contextlib
import csv
import json
import math
import os
import platform
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import accelerate
import timm
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DataLoaderConfiguration, set_seed
from data import (
    AUGMENTATIONS,
    Data,
    ImageDecodeError,
    RecipeError,
    cpu_workers,
    did_you_mean,
    load_data,
    one_line,
)
from timm.models import get_pretrained_cfg, save_for_hf
from timm.optim import create_optimizer_v2, list_optimizers
from timm.scheduler import create_scheduler_v2
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

import affdiv_zoo

PROGRAM = "train.py"
DATA_SEED_STRIDE = 100_003  # accelerate shuffles with seed + epoch: keeps neighbouring seeds' orders apart

# What create_model takes besides a model's own keywords. The first three follow from the data; the others would load
# weights or change what the model returns.
RESERVED_KWARGS = (
    "num_classes",
    "in_chans",
    "img_size",
    "pretrained",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "checkpoint_path",
    "cache_dir",
    "features_only",
)

# What a model's pretrained configuration may say of weights and images that are not this run's.
FOREIGN_CFG_KEYS = (
    "tag",
    "license",
    "description",
    "origin_url",
    "paper_name",
    "paper_ids",
    "notes",
    "label_offset",
    "label_descriptions",
    "test_input_size",
    "test_pool_size",
    "test_crop_pct",
    "min_input_size",
)


class DivergedError(RecipeError):
    """A loss that is no longer finite.

    Attributes:
        epoch: The epoch in which that was seen, from 1.
        rows: The log of the epochs before it.
    """

    def __init__(self, lr: float, epoch: int, rows: list[dict[str, Any]]):
        super().__init__(f"--lr {lr}: the loss is no longer finite in epoch {epoch}; lower --lr or set --clip-grad 1")
        self.epoch = epoch
        self.rows = rows


# --------------------------------------------------------------------------------------------------------------------
# Arguments
# --------------------------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        report(message)
        sys.exit(2)


def report(message: str) -> None:
    """Writes one line to stderr; of several processes only the main one does."""
    if os.environ.get("RANK", "0") == "0":
        print(f"{PROGRAM}: error: {message}", file=sys.stderr)


def number(
    kind: type, low: float, high: float = math.inf, *, low_open: bool = False, high_open: bool = False
) -> Callable[[str], Any]:
    """Makes an argparse type for numbers in a range."""
    noun = "a whole number" if kind is int else "a number"
    bound = f"{noun} {'above' if low_open else 'of at least'} {low:g}"
    if math.isfinite(high):
        bound += f" and {'below' if high_open else 'at most'} {high:g}"

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        in_range = low <= value <= high and not (low_open and value == low) and not (high_open and value == high)
        if not in_range or value == math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} is not {bound}")
        return value

    return parse


def model_kwarg(text: str) -> tuple[str, str | int | float | bool]:
    """Parses `key=value`, the value being a bool, a number or else a string."""
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form key=value")
    if value.lower() in ("true", "false"):
        return key, value.lower() == "true"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return key, kind(value)
    return key, value


def build_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = Parser(
        prog=PROGRAM,
        description="Train an image classifier from scratch with timm and accelerate.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    count = number(int, 1)
    not_negative = number(int, 0)
    fraction = number(float, 0, 1, low_open=True, high_open=True)
    positive = number(float, 0, low_open=True)

    group = parser.add_argument_group("model")
    group.add_argument("--model", default="resnet20_cifar_patchnorm", help="a model name of timm or of affdiv_zoo")
    group.add_argument(
        "--model-kwargs",
        type=model_kwarg,
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="the model's keywords: strings, numbers, true or false",
    )
    group.add_argument(
        "--img-size",
        type=count,
        help="side of the model's square input; without it, small images of one size keep theirs and others get the "
        "model's usual one",
    )
    group.add_argument("--channels-last", action="store_true", help="keep tensors in channels-last memory order")

    group = parser.add_argument_group("data")
    group.add_argument(
        "--dataset",
        default="digits",
        help="'digits', a folder of train/ and test/ (or val/) folders of class folders, a folder of class folders, a "
        "folder in the Hub's layout, or a data set on the Hub",
    )
    group.add_argument("--dataset-config", help="configuration of a Hub data set that has several")
    group.add_argument("--train-split", help="name of the training split; found by the usual names without it")
    group.add_argument("--test-split", help="name of the test split; found by the usual names without it")
    group.add_argument("--image-key", help="image column; found without it if there is just one")
    group.add_argument("--label-key", help="label column; found without it if there is just one class label")
    group.add_argument("--train-limit", type=count, help="train on this many images, chosen at random")
    group.add_argument(
        "--val-fraction",
        type=number(float, 0, 1, high_open=True),
        default=0.0,
        help="share of the training set to evaluate on after each epoch; the test set is then read only at the end. "
        "With 0, each epoch is evaluated on the test set",
    )
    group.add_argument(
        "--test",
        choices=("auto", "end", "never"),
        default="auto",
        help="when to read the test set; auto: at the end with --val-fraction, else after each epoch",
    )
    group.add_argument(
        "--test-fraction", type=fraction, default=0.2, help="share held out for testing where there is no test split"
    )
    group.add_argument(
        "--split-seed", type=not_negative, default=0, help="decides which images are held out or left out"
    )
    group.add_argument(
        "--augment",
        choices=AUGMENTATIONS,
        default="auto",
        help="augmentation of training images; auto: none for digits and crop-flip for all others",
    )
    group.add_argument(
        "--workers", type=not_negative, help="loader workers per process; without it, 0 for images held in memory"
    )

    group = parser.add_argument_group("training")
    group.add_argument("--epochs", type=count, default=20, help="times to go through the training set")
    group.add_argument("--max-steps", type=count, help="stop after this many updates, the schedule ending there too")
    group.add_argument("--batch-size", type=count, default=64, help="training images per process and update")
    group.add_argument("--eval-batch-size", type=count, default=256, help="images per process and evaluation batch")
    group.add_argument("--opt", default="adamw", help="a timm optimizer")
    group.add_argument("--lr", type=positive, default=1e-2, help="highest learning rate")
    group.add_argument("--weight-decay", type=number(float, 0), default=0.05, help="weight decay")
    group.add_argument(
        "--momentum", type=number(float, 0, 1, high_open=True), default=0.9, help="momentum, for optimizers with one"
    )
    group.add_argument(
        "--warmup-fraction",
        type=number(float, 0, 1, high_open=True),
        default=0.1,
        help="share of the updates with a rising rate; it then falls to 0 along a cosine",
    )
    group.add_argument("--clip-grad", type=positive, help="largest norm of the gradient")
    group.add_argument(
        "--label-smoothing", type=number(float, 0, 1, high_open=True), default=0.0, help="label smoothing"
    )
    group.add_argument("--seed", type=not_negative, default=0, help="decides weights, order and augmentation")
    group.add_argument(
        "--mixed-precision", choices=("no", "bf16", "fp16"), help="autocast; accelerate's setting without it"
    )

    group = parser.add_argument_group("output")
    group.add_argument("--output", type=Path, help="run folder; runs/<model>-<dataset>-seed<seed> without it")
    group.add_argument("--overwrite", action="store_true", help="replace the run folder of an earlier run")
    group.add_argument("--no-progress", action="store_true", help="show no progress bar")
    return parser


def parse_args(argv: list[str] | None = None, parser: argparse.ArgumentParser | None = None) -> argparse.Namespace:
    """Parses the command line and completes what depends on other options."""
    parser = parser or build_parser()
    args = parser.parse_args(argv)
    args.model_kwargs = dict(args.model_kwargs)
    if args.test == "never" and not args.val_fraction:
        parser.error("--test never: leaves nothing to evaluate on; set --val-fraction too, such as 0.1")
    if args.output is None:
        dataset = "digits" if args.dataset == "digits" else Path(args.dataset).resolve().name
        args.output = Path("runs", re.sub(r"[^\w.-]+", "_", f"{args.model}-{dataset}-seed{args.seed}"))
    return args


# --------------------------------------------------------------------------------------------------------------------
# The run folder
# --------------------------------------------------------------------------------------------------------------------


def check_output(output: Path, overwrite: bool) -> None:
    """Raises a RecipeError unless a run folder can be put at a path."""
    if output.exists() and not output.is_dir():
        raise RecipeError(f"--output {str(output)!r} is a file; name a folder")
    if output.is_dir() and any(output.iterdir()):
        if not overwrite:
            raise RecipeError(f"--output {str(output)!r} is not empty; name another folder or add --overwrite")
        if not (output / "results.json").is_file():
            # Nobody's other files are ever deleted.
            raise RecipeError(f"--output {str(output)!r} is not empty and no run's folder; name another")


@contextlib.contextmanager
def staged_folder(output: Path) -> Iterator[Path]:
    """Gives a temporary folder beside `output` that takes its place when the block ends, or goes when it raises."""
    staging = output.parent / f".{output.name}.part-{os.getpid()}"
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
    except OSError as error:
        raise RecipeError(f"--output {str(output)!r} cannot be made ({error.strerror}); name another folder") from error
    try:
        yield staging
        if output.exists():
            old = output.parent / f".{output.name}.old-{os.getpid()}"
            output.rename(old)
            staging.rename(output)
            shutil.rmtree(old)
        else:
            staging.rename(output)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def save_model(folder: Path, model: nn.Module, args: argparse.Namespace, data: Data) -> None:
    """Writes weights and configuration in the form that both timm and transformers load."""
    usual = model.pretrained_cfg
    model.pretrained_cfg = {key: value for key, value in usual.items() if key not in FOREIGN_CFG_KEYS}
    label_names = tuple(data.label_names)
    pretrained_cfg = dict(data.config, num_classes=len(label_names), label_names=label_names)
    if tuple(usual["input_size"][1:]) != tuple(data.config["input_size"][1:]):
        pretrained_cfg["pool_size"] = None  # the size of the last feature map follows from the input's
    save_for_hf(
        model,
        str(folder),
        model_config=dict(label_names=label_names, pretrained_cfg=pretrained_cfg),
        model_args=args.model_kwargs,
        safe_serialization=True,
    )
    path = folder / "config.json"
    config = json.loads(path.read_text())
    # timm reads the number of classes elsewhere, and transformers refuses to get it twice.
    config.get("model_args", {}).pop("num_classes", None)
    path.write_text(json.dumps(config, indent=2) + "\n")


# --------------------------------------------------------------------------------------------------------------------
# Model and optimizer
# --------------------------------------------------------------------------------------------------------------------


def check_names(args: argparse.Namespace) -> None:
    """Raises a RecipeError for an unknown model, optimizer or reserved model keyword."""
    if not timm.is_model(args.model):
        raise RecipeError(f"--model {args.model!r} is unknown to timm{did_you_mean(args.model, timm.list_models())}")
    try:
        get_pretrained_cfg(args.model)
    except RuntimeError as error:
        raise RecipeError(f"--model {args.model!r}: {one_line(error)} Leave the tag off") from error
    if args.opt.lower() not in list_optimizers():
        raise RecipeError(f"--opt {args.opt!r} is unknown to timm{did_you_mean(args.opt.lower(), list_optimizers())}")
    for key in args.model_kwargs:
        if key in RESERVED_KWARGS:
            raise RecipeError(f"--model-kwargs {key}=...: the recipe sets that itself; leave it out")


def build_model(args: argparse.Namespace, data: Data) -> nn.Module:
    """Creates the model for the data's channels, size and classes, and tries it on one empty image."""
    channels, height, width = data.config["input_size"]
    own = dict(num_classes=len(data.label_names), in_chans=channels)
    if get_pretrained_cfg(args.model).fixed_input_size:
        own["img_size"] = height
    try:
        model = timm.create_model(args.model, **args.model_kwargs, **own)
    except (TypeError, ValueError, KeyError, AssertionError) as error:
        if args.model_kwargs:
            timm.create_model(args.model, **own)  # raises if the keywords are not to blame
            given = " ".join(f"{key}={value}" for key, value in args.model_kwargs.items())
            raise RecipeError(f"--model-kwargs {given}: {args.model} does not take that ({one_line(error)})") from error
        if "img_size" in own:
            raise RecipeError(
                f"--model {args.model!r} cannot be made for {height}x{width} images ({one_line(error)}); "
                "name another --img-size or model"
            ) from error
        raise
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, channels, height, width))
    except (RuntimeError, ValueError, AssertionError) as error:
        raise RecipeError(
            f"--model {args.model!r} does not take {channels}x{height}x{width} images ({one_line(error)}); "
            "name another --img-size or model"
        ) from error
    return model.train()


def build_optimizer(args: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    """Creates the optimizer."""
    try:
        return create_optimizer_v2(
            model, opt=args.opt, lr=args.lr, weight_decay=args.weight_decay, momentum=args.momentum
        )
    except (ImportError, AssertionError) as error:
        # timm lists optimizers of packages that need not be there (apex, bitsandbytes).
        raise RecipeError(f"--opt {args.opt!r} is not available here ({one_line(error)}); name another") from error
    except ValueError as error:
        settings = f"--lr {args.lr} --weight-decay {args.weight_decay} --momentum {args.momentum}"
        raise RecipeError(f"--opt {args.opt!r} does not take {settings} ({one_line(error)}); change those") from error


# --------------------------------------------------------------------------------------------------------------------
# Training
# --------------------------------------------------------------------------------------------------------------------


def build_loaders(
    args: argparse.Namespace, data: Data, processes: int
) -> tuple[DataLoader, DataLoader | None, DataLoader | None]:
    """Makes the loaders for training, for evaluation after each epoch and for the test set, where they are needed."""
    workers = args.workers if args.workers is not None else 0 if data.in_memory else cpu_workers()
    common = dict(num_workers=workers, collate_fn=data.collate_fn)
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


@torch.no_grad()
def evaluate(
    accelerator: Accelerator, model: nn.Module, loader: DataLoader, channels_last: bool
) -> tuple[float, float, int]:
    """Returns the mean cross-entropy, the share of right answers and the number of images, every image once."""
    model.eval()
    losses, hits = [], []
    for images, labels in loader:
        logits = model(in_memory_format(images, channels_last)).float()
        loss = nn.functional.cross_entropy(logits, labels, reduction="none")
        loss, hit = accelerator.gather_for_metrics((loss, logits.argmax(1) == labels))
        losses.append(loss)
        hits.append(hit)
    loss, hit = torch.cat(losses).double(), torch.cat(hits)
    return loss.mean().item(), hit.double().mean().item(), len(hit)


def in_memory_format(images: torch.Tensor, channels_last: bool) -> torch.Tensor:
    """Returns images in the memory order the model has."""
    return images.to(memory_format=torch.channels_last) if channels_last else images


def train(
    args: argparse.Namespace, accelerator: Accelerator, model: nn.Module, data: Data, folder: Path | None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Trains, evaluates, and writes the log and the weights.

    Args:
        args: The recipe's arguments.
        accelerator: What runs it.
        model: The model; it is left as the trained one.
        data: The data sets.
        folder: Where to write; None to write nothing, and except in the main process.

    Returns:
        The metrics, and the log: one row per epoch.

    Raises:
        DivergedError: A loss is no longer finite.
    """
    if args.channels_last:
        model = model.to(memory_format=torch.channels_last)
    optimizer = build_optimizer(args, model)
    loaders = build_loaders(args, data, accelerator.num_processes)
    same = loaders[1] is loaders[2]
    model, optimizer, train_loader = accelerator.prepare(model, optimizer, loaders[0])
    eval_loader = loaders[1] and accelerator.prepare(loaders[1])
    test_loader = eval_loader if same else loaders[2] and accelerator.prepare(loaders[2])
    eval_name = "test" if same else "val"

    total = len(train_loader) * args.epochs
    if args.max_steps is not None:
        total = min(total, args.max_steps)
    epochs = math.ceil(total / len(train_loader))
    # Counted in updates alone, so that the schedule also ends where --max-steps does.
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched="cosine",
        num_epochs=total,
        warmup_epochs=round(total * args.warmup_fraction),
        warmup_lr=args.lr / 100,
        step_on_epochs=False,
        updates_per_epoch=1,
    )
    criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    eval_columns = () if eval_loader is None else (f"{eval_name}_loss", f"{eval_name}_top1")
    columns = ("epoch", "train_loss", "train_top1", *eval_columns, "lr", "seconds")
    rows: list[dict] = []
    updates = 0
    start = time.perf_counter()
    progress = tqdm(
        total=total,
        desc=args.model,
        unit="step",
        disable=args.no_progress or not accelerator.is_main_process,
    )
    with progress:
        for epoch in range(epochs):
            epoch_start = time.perf_counter()
            model.train()
            train_loader.set_epoch(epoch)  # of the order of the images and of their augmentation
            # Summed on the device: reading a number off after each update would make an accelerator wait.
            sums = torch.zeros(3, dtype=torch.float64 if accelerator.device.type == "cpu" else torch.float32)
            sums = sums.to(accelerator.device)
            for images, labels in train_loader:
                logits = model(in_memory_format(images, args.channels_last))
                loss = criterion(logits, labels)
                accelerator.backward(loss)
                if args.clip_grad is not None:
                    accelerator.clip_grad_norm_(model.parameters(), args.clip_grad)
                optimizer.step()
                optimizer.zero_grad()
                lr = optimizer.param_groups[0]["lr"]
                updates += 1
                scheduler.step_update(updates)
                with torch.no_grad():
                    hits = (logits.argmax(1) == labels).sum()
                    sums += torch.stack([loss.detach() * len(labels), hits, torch.full_like(hits, len(labels))])
                progress.update()
                if updates == total:
                    break
            loss_sum, hit_sum, image_sum = accelerator.reduce(sums, "sum").tolist()
            if not math.isfinite(loss_sum):
                raise DivergedError(args.lr, epoch + 1, rows)
            row = [epoch + 1, loss_sum / image_sum, hit_sum / image_sum]
            shown = {"loss": f"{row[1]:.3f}"}
            if eval_loader is not None:
                eval_loss, eval_top1, eval_images = evaluate(accelerator, model, eval_loader, args.channels_last)
                if not math.isfinite(eval_loss):  # of the last update, which no training loss shows
                    raise DivergedError(args.lr, epoch + 1, rows)
                row += [eval_loss, eval_top1]
                shown[eval_name] = f"{eval_top1:.2%}"
            rows.append(dict(zip(columns, (*row, lr, time.perf_counter() - epoch_start), strict=True)))
            progress.set_postfix(shown)

    metrics: dict[str, Any] = {}
    if data.val is not None:
        metrics.update(val_top1=eval_top1, val_loss=eval_loss)
    if test_loader is not None:
        if not same:
            eval_loss, eval_top1, eval_images = evaluate(accelerator, model, test_loader, args.channels_last)
            if not math.isfinite(eval_loss):
                raise DivergedError(args.lr, epochs, rows)
        metrics.update(test_top1=eval_top1, test_loss=eval_loss, test_images=eval_images)
    seconds = time.perf_counter() - start
    if eval_loader is not None:
        best = max(rows, key=lambda row: row[f"{eval_name}_top1"])
        metrics[f"best_{eval_name}_top1"] = best[f"{eval_name}_top1"]
        metrics[f"best_{eval_name}_epoch"] = best["epoch"]
    metrics.update(
        train_top1=rows[-1]["train_top1"],
        train_loss=rows[-1]["train_loss"],
        train_images=len(data.train),
        val_images=0 if data.val is None else len(data.val),
        epochs=epochs,
        updates=updates,
        seconds=seconds,
    )

    # Into a fresh model: on the CPU, in the usual memory order and without wrappers, whatever the run used.
    state = accelerator.get_state_dict(model)
    if folder is not None:
        export = build_model(args, data)
        export.load_state_dict(state)
        save_model(folder, export, args, data)
        with open(folder / "log.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)
    return metrics, rows


def fit(args: argparse.Namespace, data: Data, output: Path | None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Seeds everything, trains on data that is there already, and writes the run folder.

    Args:
        args: The recipe's arguments.
        data: What `load_data` makes of them.
        output: The run folder; None to write none.

    Returns:
        What results.json holds, and the log: one row per epoch.
    """
    set_seed(args.seed)
    model = build_model(args, data)
    build_optimizer(args, model)  # the real one comes later, but its errors should not
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed * DATA_SEED_STRIDE),
    )
    if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        raise RecipeError("--mixed-precision 'fp16' does nothing on a CPU; choose bf16 or no")
    set_seed(args.seed, device_specific=True)  # dropout differs between processes; the models are already equal

    writes = output is not None and accelerator.is_main_process
    with staged_folder(output) if writes else contextlib.nullcontext() as folder:
        metrics, rows = train(args, accelerator, model, data, folder)
        results = dict(
            metrics,
            model=args.model,
            dataset=args.dataset,
            seed=args.seed,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            input=data.config,
            augment=data.augment,
            device=str(accelerator.device),
            processes=accelerator.num_processes,
            mixed_precision=str(accelerator.mixed_precision),
            arguments=vars(args),
            versions=versions(),
        )
        if folder is not None:
            text = json.dumps(results, indent=2, default=str, allow_nan=False)
            (folder / "results.json").write_text(text + "\n")
    accelerator.end_training()
    return results, rows


def run(args: argparse.Namespace) -> None:
    """Checks everything that can be checked, then trains and writes the run folder."""
    check_output(args.output, args.overwrite)
    check_names(args)
    data = load_data(args, get_pretrained_cfg(args.model).to_dict())
    results, _ = fit(args, data, args.output)
    name, part = ("validation", "val") if args.test == "never" else ("test", "test")
    top1, images = results[f"{part}_top1"], results[f"{part}_images"]
    PartialState().print(
        f"{args.model} on {args.dataset}: {name} accuracy {top1:.2%} ({round(top1 * images)}/{images}), "
        f"{name} loss {results[f'{part}_loss']:.4f}, {results['updates']} updates in {results['seconds']:.1f} s, "
        f"written to {args.output}"
    )


def versions() -> dict[str, str]:
    """Returns the versions that a run depends on."""
    return dict(
        python=platform.python_version(),
        torch=torch.__version__,
        timm=timm.__version__,
        accelerate=accelerate.__version__,
        affdiv_zoo=affdiv_zoo.__version__,
    )


def interrupt(number: int, _: Any) -> NoReturn:
    """Handles a signal as Ctrl-C is handled, so that the clean-up runs."""
    raise KeyboardInterrupt(number)


def main(argv: list[str] | None = None) -> int:
    """Runs the recipe and turns expected errors into one line and a status."""
    args = parse_args(argv)
    # Launchers end their processes with SIGTERM, which would leave a half-written folder.
    signal.signal(signal.SIGTERM, interrupt)
    try:
        run(args)
    except ImageDecodeError as error:
        # A loader worker's error arrives with its traceback as the message, and from any process.
        print(f"{PROGRAM}: error: {str(error).rsplit('ImageDecodeError: ', 1)[-1].strip()}", file=sys.stderr)
        return 2
    except RecipeError as error:
        report(str(error))
        return 2
    except KeyboardInterrupt as stop:
        report("interrupted; nothing was written")
        return 128 + (stop.args[0] if stop.args else signal.SIGINT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
