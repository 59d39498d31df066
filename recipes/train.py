"""Trains an image classifier from scratch: any of timm's models or of this plugin's, on one or several processes.

    accelerate launch recipes/train.py
    accelerate launch recipes/train.py --model resnet20_cifar --dataset uoft-cs/cifar10 --epochs 30
    accelerate launch recipes/train.py --config recipes/configs/vit_nano_cifar10.yaml --resume auto

The first line trains a PatchNorm ResNet on scikit-learn's digits within a minute on a laptop's CPU and downloads
nothing. A run writes one folder, which timm loads as `local-dir:<folder>`:

    model.safetensors   the weights after the last update, or their moving average with --model-ema
    config.json         architecture, classes and preprocessing, as timm writes them
    best/               the same two of the best evaluation
    results.json        metrics, arguments, versions and times
    log.csv             one row per epoch
    plot.png            loss, accuracy and learning rate
    divergence.json     with --diagnose-every: the divergence of every layer over the training; divergence.png shows it
    args.yaml           the arguments, for --config

Until it is complete it is called `<folder>.part` and holds checkpoints, from which `--resume auto` goes on. The weights
are then the same, bit by bit, as those of a run that was never stopped.

`options.py` has the arguments, `data.py` the images, `building.py` what is made of timm's parts, `engine.py` the loop,
`evaluation.py` what measures it, `checkpoints.py` what is saved on the way and `records.py` what is told of a run.
"""

import argparse
import gc
import json
import os
import platform
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import accelerate
import timm
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DataLoaderConfiguration, DynamoBackend, parse_flag_from_env, set_seed
from building import build_model, build_optimizer, check_names, enable_grad_checkpointing
from checkpoints import RunFolder, check_same_run, find_checkpoint, remove_folder, told_failure, write_text
from data import Data, ImageDecodeError, RecipeError, listed, load_data, one_line
from engine import DivergedError, Objective, Trainer
from options import (
    Parser,
    add_augmentation_options,
    add_config_option,
    add_data_options,
    add_evaluation_options,
    add_model_options,
    add_output_options,
    add_training_options,
    config_text,
    default_output,
    number,
    parse,
    plain,
    report,
)
from records import check_trackers, draw_plot, start_trackers
from signals import Stopped, StopSignal
from timm.models import get_pretrained_cfg
from torch import nn

import affdiv_zoo

__all__ = [
    "DivergedError",
    "Parser",
    "build_model",
    "build_optimizer",
    "build_parser",
    "check_arguments",
    "check_names",
    "fit",
    "interrupt",
    "main",
    "number",
    "parse_args",
    "run",
    "run_program",
    "versions",
]

PROGRAM = "train.py"
DATA_SEED_STRIDE = 100_003  # accelerate shuffles with seed + epoch: keeps neighbouring seeds' orders apart


# --------------------------------------------------------------------------------------------------------------------
# Arguments
# --------------------------------------------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = Parser(
        prog=PROGRAM,
        usage="accelerate launch recipes/train.py [--config FILE] [options]",
        description="Train an image classifier from scratch with timm and accelerate.",
        epilog="A switch such as --model-ema in a config file is taken back by --no-model-ema.",
    )
    add_config_option(parser)
    add_model_options(parser)
    add_data_options(parser)
    add_augmentation_options(parser)
    add_training_options(parser)
    add_evaluation_options(parser)
    add_output_options(parser, "runs/<model>-<dataset>-seed<seed>")
    return parser


def parse_args(argv: list[str] | None = None, parser: argparse.ArgumentParser | None = None) -> argparse.Namespace:
    """Parses the command line and completes what depends on other options."""
    parser = parser or build_parser()
    args = parse(argv, parser)
    check_arguments(args, parser)
    if args.output is None:
        dataset = "digits" if args.dataset == "digits" else Path(args.dataset).resolve().name
        args.output = default_output(args, (args.model, dataset, f"seed{args.seed}"))
    return args


def check_arguments(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Reports combinations of options that cannot be."""
    if args.test == "never" and not args.val_fraction:
        parser.error("--test never: leaves nothing to evaluate on; set --val-fraction too, such as 0.1")
    if args.patience is not None and args.test == "end" and not args.val_fraction:
        parser.error("--patience: nothing is evaluated before the end; set --val-fraction too, such as 0.1")
    if args.bce_target_thresh is not None and not args.bce_loss:
        parser.error("--bce-target-thresh: is for --bce-loss; set that too")


# --------------------------------------------------------------------------------------------------------------------
# Training
# --------------------------------------------------------------------------------------------------------------------


def fit(
    args: argparse.Namespace,
    data: Data,
    output: Path | None,
    *,
    build: Callable[[argparse.Namespace, Data], nn.Module] = build_model,
    make_objective: Callable[[Accelerator, nn.Module], Objective] | None = None,
    stop: StopSignal | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Seeds everything, trains on data that is there already, and writes the run folder.

    Args:
        args: The recipe's arguments.
        data: What `load_data` makes of them.
        output: The run folder; None to write none.
        build: Makes the model, on the CPU and in training mode.
        make_objective: Makes a function of (images, logits, labels) that returns the loss to minimise, from the
            accelerator and the loss that the arguments ask for. Without it, that loss is minimised.
        stop: The handler of signals to stop.

    Returns:
        What results.json holds, and the log: one row per epoch.

    Raises:
        RecipeError: An argument does not fit, or something cannot be written.
        DivergedError: A loss is no longer finite.
        Stopped: A signal came, and the run is saved.
    """
    set_seed(args.seed)
    model = build(args, data)
    enable_grad_checkpointing(args, model)
    build_optimizer(args, model)  # the real one comes later, but its errors should not
    check_trackers(args)
    backends = [backend.value.lower() for backend in DynamoBackend]
    if args.torchcompile is not None and args.torchcompile.lower() not in backends:
        raise RecipeError(f"--torchcompile {args.torchcompile!r} is none of accelerate's backends: {listed(backends)}")
    run = None if output is None else RunFolder(output)
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.grad_accum_steps,
        dynamo_backend=args.torchcompile,
        log_with=args.tracker if run is not None else None,
        project_dir=None if run is None else run.work,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed * DATA_SEED_STRIDE),
    )
    if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        raise RecipeError("--mixed-precision 'fp16' does nothing on a CPU; choose bf16 or no")
    set_seed(args.seed, device_specific=True)  # what the batches' own seeds leave out; the models are already equal

    parameters = sum(parameter.numel() for parameter in model.parameters())
    trainer = Trainer(args, accelerator, model, data, run, stop, make_objective)
    try:
        if run is not None:
            begin(args, accelerator, trainer, run)
        metrics, rows = trainer.train()
        results = dict(
            metrics,
            model=args.model,
            dataset=args.dataset,
            seed=args.seed,
            parameters=parameters,
            weights="average" if args.model_ema else "last",
            input=data.config,
            augment=data.augment,
            device=str(accelerator.device),
            processes=accelerator.num_processes,
            mixed_precision=str(accelerator.mixed_precision),
            arguments=vars(args),
            versions=versions(),
        )
        accelerator.end_training()
        if run is not None and accelerator.is_main_process:
            write_results(args, run, results, rows)
            run.finish(args.keep_checkpoints)
    finally:
        if run is not None and accelerator.is_main_process:
            run.leave()
    return results, rows


def begin(args: argparse.Namespace, accelerator: Accelerator, trainer: Trainer, run: RunFolder) -> None:
    """Makes the run folder or takes over that of an unfinished run, and starts the trackers. All processes call it."""
    folder, damaged = None, {}
    if args.resume is not None:
        folder, state, damaged = find_checkpoint(accelerator, run, args.resume, trainer.identity())
    own = folder is not None and run.checkpoints.resolve() in folder.resolve().parents
    if accelerator.is_main_process:
        run.open(config_text(args), resume=own)
        for path, why in damaged.items():
            print(f"{PROGRAM}: passed over: {why}", file=sys.stderr)
            remove_folder(path)
    accelerator.wait_for_everyone()
    if folder is not None:
        trainer.resume(folder, state)
        run.begun_from = folder
        accelerator.print(f"resumed from {folder} after {trainer.position.updates} updates")
    start_trackers(accelerator, args)


def write_results(args: argparse.Namespace, run: RunFolder, results: dict[str, Any], rows: list[dict]) -> None:
    """Writes results.json and plot.png."""
    with told_failure(run):
        text = json.dumps(results, indent=2, default=str, allow_nan=False)
        write_text(run.work / "results.json", text + "\n")
        if not args.no_plot:
            draw_plot(run.work / "plot.png", rows, f"{args.model} on {args.dataset}")


def versions() -> dict[str, str]:
    """Returns the versions that a run depends on."""
    return dict(
        python=platform.python_version(),
        torch=torch.__version__,
        timm=timm.__version__,
        accelerate=accelerate.__version__,
        affdiv_zoo=affdiv_zoo.__version__,
    )


# --------------------------------------------------------------------------------------------------------------------
# The program
# --------------------------------------------------------------------------------------------------------------------


def is_finished(args: argparse.Namespace) -> bool:
    """Returns whether `--resume auto` has nothing to do, after checking that the complete run is the same."""
    run = RunFolder(args.output)
    if args.resume != "auto" or args.overwrite or run.names() or not (args.output / "results.json").is_file():
        return False
    try:
        old = dict(json.loads((args.output / "results.json").read_text())["arguments"])
    except (ValueError, KeyError, TypeError) as error:
        raise RecipeError(
            f"--resume auto: the results.json in {str(args.output)!r} is no run's ({one_line(error)}); name another "
            "--output or add --overwrite"
        ) from error
    check_same_run(f"--resume auto: {str(args.output)!r}", old, json.loads(json.dumps(plain(vars(args)))))
    if PartialState().is_main_process:
        run.tidy(args.keep_checkpoints)
    return True


def check_output(args: argparse.Namespace) -> None:
    """Raises a RecipeError unless the run can be written to `--output`, as a new run or as the rest of one."""
    run = RunFolder(args.output)
    resumes = args.resume is not None and bool(run.names())
    if resumes and args.resume != "auto":
        resumes = run.checkpoints.resolve() in Path(args.resume).resolve().parents
    run.check(args.overwrite, resumes)


def run(args: argparse.Namespace, stop: StopSignal | None = None) -> None:
    """Checks everything that can be checked, then trains and writes the run folder."""
    if is_finished(args):
        PartialState().print(f"{args.output} is finished already")
        return
    check_output(args)
    check_names(args)
    data = load_data(args, get_pretrained_cfg(args.model).to_dict())
    results, _ = fit(args, data, args.output, stop=stop)
    PartialState().print(last_line(args, results))


def last_line(args: argparse.Namespace, results: dict[str, Any]) -> str:
    """Words a run's outcome."""
    name, part = ("validation", "val") if args.test == "never" else ("test", "test")
    top1, images = results[f"{part}_top1"], results[f"{part}_images"]
    return (
        f"{args.model} on {args.dataset}: {name} accuracy {top1:.2%} ({round(top1 * images)}/{images}), "
        f"{name} loss {results[f'{part}_loss']:.4f}, {results['updates']} updates in {results['seconds']:.1f} s, "
        f"written to {args.output}"
    )


def interrupt(number: int, _: Any) -> NoReturn:
    """Handles a signal as Ctrl-C is handled, so that the clean-up runs."""
    raise KeyboardInterrupt(number)


def check_processes() -> None:
    """Raises a RecipeError if the launcher has started several processes that do not know of each other.

    accelerate takes a machine without GPUs for one that was not meant: each process would be a run of its own.
    """
    wanted = int(os.environ.get("WORLD_SIZE", "1"))
    # Accelerator's own way to make it, which PartialState() alone does not go.
    if PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU")).num_processes != wanted:
        raise RecipeError(
            f"the launcher has started {wanted} processes, which do not find each other; on CPUs, set "
            "ACCELERATE_USE_CPU=true in the environment"
        )


def run_program(program: str, action: Callable[[StopSignal], None]) -> int:
    """Runs a recipe and turns expected errors and signals into one line and a status.

    Args:
        program: The name that the line begins with.
        action: The recipe. It gets the handler of signals to stop, for `fit`.

    Returns:
        0; 2 after an error; 128 and the signal's number after a signal.
    """
    stop = StopSignal()
    try:
        with stop.installed():
            check_processes()
            action(stop)
    except ImageDecodeError as error:
        # A loader worker's error arrives with its traceback as the message, and from any process.
        print(f"{program}: error: {str(error).rsplit('ImageDecodeError: ', 1)[-1].strip()}", file=sys.stderr)
        return 2
    except RecipeError as error:
        report(str(error), program)
        return 2
    except Stopped as stopped:
        name = signal.Signals(stopped.number).name
        report(f"{name}: saved after {stopped.updates} updates; add --resume auto to go on", program)
        return 128 + stopped.number
    except KeyboardInterrupt as interruption:
        report("interrupted; nothing was written", program)
        return 128 + (interruption.args[0] if interruption.args else signal.SIGINT)
    finally:
        gc.collect()  # an error's traceback may hold a loader, whose workers end with it
    return 0


def main(argv: list[str] | None = None) -> int:
    """Runs the recipe."""
    args = parse_args(argv)
    return run_program(PROGRAM, lambda stop: run(args, stop))


if __name__ == "__main__":
    sys.exit(main())
