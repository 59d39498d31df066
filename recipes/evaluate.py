"""Evaluates a trained image classifier: accuracy, loss and each class's accuracy, on one or several processes.

    accelerate launch recipes/evaluate.py --model runs/resnet20_cifar_patchnorm-digits-seed0
    accelerate launch recipes/evaluate.py --model resnet50.a1_in1k --dataset ILSVRC/imagenet-1k --split validation \\
        --streaming

The first line evaluates a run of train.py or finetune.py on the images that it held out for testing. Preprocessing and
classes are those of the model's configuration. A model's and a data set's classes are matched by their names where both
have some: the data set may have fewer classes, in another order.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from checkpoints import write_text
from data import (
    TEST_SPLITS,
    UNREADABLE,
    RecipeError,
    Source,
    Split,
    TransformDataset,
    check_dataset_name,
    check_skipped,
    choose_positions,
    cpu_workers,
    find_source,
    listed,
    one_line,
    open_hub_dataset,
    pick_split,
)
from options import Parser, add_reading_options, count, fraction, model_kwarg, not_negative_int, parse
from pretrained import (
    check_keywords,
    complete_name,
    input_config,
    known_class_names,
    load_pretrained,
    outputs,
    try_input,
)
from timm.data import create_transform
from torch import nn
from torch.utils.data import Dataset
from train import run_program

PROGRAM = "evaluate.py"
HELD_OUT = "held-out"
# What a run's results.json tells of its data.
DATA_ARGUMENTS = (
    *(
        "dataset",
        "dataset_config",
        "train_split",
        "test_split",
        "image_key",
        "label_key",
        "test_fraction",
        "split_seed",
    ),
    *("streaming", "num_classes", "class_map"),
)


def build_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = Parser(
        prog=PROGRAM,
        usage="accelerate launch recipes/evaluate.py --model NAME [--dataset NAME] [options]",
        description="Evaluate a trained image classifier.",
    )
    add_trained_model_options(parser)
    group = parser.add_argument_group("data")
    group.add_argument(
        "--dataset",
        help="'digits', a folder of images, or a data set on the Hub, as for train.py; without it, what the run in the "
        "model's folder was tested on",
    )
    group.add_argument("--dataset-config", help="configuration of a Hub data set that has several")
    group.add_argument(
        "--split",
        help=f"the split to evaluate on, or {HELD_OUT!r}: the share of the training split that train.py holds out "
        "where there is no test split. Without it: the test split, found by the usual names, or else what was held out "
        "of the model's own data set, or else all images",
    )
    group.add_argument("--image-key", help="image column; found without it if there is just one")
    group.add_argument("--label-key", help="label column; found without it if there is just one class label")
    group.add_argument("--test-fraction", type=fraction, help=f"share of {HELD_OUT!r}; 0.2 or that of the model's run")
    group.add_argument("--split-seed", type=not_negative_int, help=f"which images are {HELD_OUT!r}; 0 or as the run's")
    group.add_argument(
        "--by-position",
        action="store_true",
        help="take the classes as they are numbered, although their names do not match",
    )
    add_reading_options(group, training=False)
    group = parser.add_argument_group("output")
    group.add_argument("--results", type=Path, metavar="FILE", help="write everything to this JSON file")
    group.add_argument("--no-progress", action="store_true", help="show no progress bar")
    return parser


def add_trained_model_options(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """Adds which trained model is used and how it is run."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        default=default,
        required=default is None,
        help="a folder with config.json and model.safetensors, hf-hub:owner/name, or a name of timm or affdiv_zoo",
    )
    group.add_argument(
        "--model-kwargs",
        type=model_kwarg,
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="keywords for timm.create_model: strings, numbers, true or false",
    )
    group.add_argument("--img-size", type=count, help="side of the square input; the model's own without it")
    group.add_argument("--batch-size", type=count, default=256, help="images per process and batch")
    group.add_argument("--workers", type=not_negative_int, help="loader workers per process; as the processors without")
    group.add_argument(
        "--mixed-precision", choices=("no", "bf16", "fp16"), help="autocast; accelerate's setting without it"
    )


def complete_arguments(args: argparse.Namespace) -> None:
    """Completes the arguments with what the run in the model's folder was trained and tested on.

    Raises:
        RecipeError: They do not go together.
    """
    own = run_arguments(args.model)
    args.own_dataset = args.dataset is None or args.dataset == own.get("dataset")
    if args.dataset is None:
        if "dataset" not in own:
            raise RecipeError(f"--dataset: {args.model!r} is no run's folder that tells of one; name one")
        for name in DATA_ARGUMENTS:
            if name in own and getattr(args, name, None) in (None, False):
                setattr(args, name, own[name])
    for name, default in (("train_split", None), ("test_split", None), ("test_fraction", 0.2), ("split_seed", 0)):
        if getattr(args, name, None) is None:
            # Which images were held out is a matter of the run, whoever names its data set.
            setattr(args, name, own.get(name, default) if args.own_dataset else default)
    if args.streaming and args.split == HELD_OUT:
        raise RecipeError(f"--split {HELD_OUT}: a stream cannot be split; leave --streaming out")
    if args.dataset == "digits" and args.split not in (None, HELD_OUT):
        raise RecipeError(f"--split {args.split!r}: 'digits' has no splits; leave it out")


def run_arguments(model: str) -> dict[str, Any]:
    """Returns the arguments of the run in a model's folder; none if there is no run."""
    try:
        return dict(json.loads((Path(model.removeprefix("local-dir:")) / "results.json").read_text())["arguments"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


# --------------------------------------------------------------------------------------------------------------------
# Data
# --------------------------------------------------------------------------------------------------------------------


def load_images(args: argparse.Namespace, config: dict[str, Any]) -> tuple[Dataset, list[str], str]:
    """Finds the images to evaluate on.

    Args:
        args: The arguments.
        config: timm's description of the model's input.

    Returns:
        The images with their class numbers in the data set, the data set's classes, and words for what they are.
    """
    transform = create_transform(**config)
    if args.streaming:
        return load_stream(args, transform)
    given = args.split not in (None, HELD_OUT)
    wanted = argparse.Namespace(**vars(args))
    if given:
        wanted.train_split, wanted.test_split = args.split, None
    try:
        source = find_source(wanted)
    except RecipeError as error:
        raise RecipeError(str(error).replace("--train-split", "--split").replace("--test-split", "--split")) from error
    split, positions, words = choose_images(args, source, given)
    if not len(positions):
        raise RecipeError(f"--dataset {args.dataset!r}: {words} holds no images")
    dataset = TransformDataset(
        split.images,
        split.labels,
        positions,
        transform,
        args.dataset,
        max_errors=args.max_decode_errors,
        replace=False,
        mode="L" if config["input_size"][0] == 1 else "RGB",
    )
    return dataset, source.label_names, words


def choose_images(args: argparse.Namespace, source: Source, given: bool) -> tuple[Split, np.ndarray, str]:
    """Returns the split, the positions in it, and words for them."""
    if given:
        return source.train, np.arange(len(source.train.labels)), f"split {args.split!r}"
    if args.split is None and source.test is not None:
        return source.test, np.arange(len(source.test.labels)), "the test split"
    if args.split == HELD_OUT or args.own_dataset or args.dataset == "digits":
        whole = Source(source.train, None, source.label_names)
        whole_args = argparse.Namespace(**{**vars(args), "val_fraction": 0.0, "train_limit": None})
        words = f"the {args.test_fraction:.0%} held out with --split-seed {args.split_seed}"
        return source.train, choose_positions(whole_args, whole)[2], words
    return source.train, np.arange(len(source.train.labels)), "all images"


def load_stream(args: argparse.Namespace, transform: Any) -> tuple[Dataset, list[str], str]:
    """Opens one split as a stream."""
    from streaming import make_stream, stream_columns

    check_dataset_name(args.dataset)
    splits = open_hub_dataset(args.dataset, args.dataset_config, streaming=True)
    name = pick_split(list(splits), args.split or args.test_split, TEST_SPLITS, "--split", args.dataset)
    columns = stream_columns(args, splits[name])
    return make_stream(args, splits[name], name, columns, transform, training=False), columns.names, f"split {name!r}"


def match_classes(dataset: str, names: list[str], model: nn.Module, by_position: bool) -> torch.Tensor:
    """Returns the model's number of each of a data set's classes.

    Args:
        dataset: The data set's name, for messages.
        names: Its classes.
        model: The model.
        by_position: Leave the names out of account.

    Raises:
        RecipeError: The names do not match, or the data set has more classes than the model.
    """
    known = known_class_names(model)
    if known == names:
        return torch.arange(len(names))
    if known is not None and not by_position:
        missing = [name for name in names if name not in known]
        if not missing:
            return torch.tensor([known.index(name) for name in names])
        raise RecipeError(
            f"--dataset {dataset!r}: the model does not know the classes {listed(missing[:5])}"
            f"{', ...' if len(missing) > 5 else ''}; it knows {listed(known[:5])}{', ...' if len(known) > 5 else ''}. "
            "If they are the same under other names, in the same order, add --by-position"
        )
    if len(names) > model.num_classes or (len(names) < model.num_classes and not by_position):
        raise RecipeError(
            f"--dataset {dataset!r} has {len(names)} classes and the model {model.num_classes}, whose names it does "
            "not tell"
        )
    return torch.arange(len(names))


# --------------------------------------------------------------------------------------------------------------------
# Evaluation
# --------------------------------------------------------------------------------------------------------------------


def evaluate(
    args: argparse.Namespace, accelerator: Accelerator, model: nn.Module, dataset: Dataset, classes: torch.Tensor
) -> dict[str, Any]:
    """Returns the metrics of a model on a data set.

    Args:
        args: The arguments.
        accelerator: What runs it.
        model: The model.
        dataset: The images with their class numbers in the data set.
        classes: The model's number of each of the data set's classes.
    """
    classes = classes.to(accelerator.device)
    workers = cpu_workers() if args.workers is None else args.workers
    losses, ranks, labels = [], [], []
    for logits, numbers in outputs(accelerator, model, dataset, args.batch_size, workers, not args.no_progress):
        readable = numbers != UNREADABLE
        logits, numbers = logits[readable], numbers[readable]
        wanted = classes[numbers]
        losses.append(nn.functional.cross_entropy(logits, wanted, reduction="none").double())
        # How many classes come before the right one. Of equals, the one of the lower number comes first.
        own = logits.gather(1, wanted[:, None])
        before = torch.arange(logits.shape[1], device=logits.device) < wanted[:, None]
        ranks.append(((logits > own) | (before & (logits == own))).sum(1))
        labels.append(numbers)
    skipped = check_skipped(accelerator, dataset, "evaluation")
    loss, rank, label = (torch.cat(parts).cpu() for parts in (losses, ranks, labels))
    if not len(label):
        raise RecipeError(f"--dataset {args.dataset!r}: none of the images can be decoded")
    metrics = dict(top1=(rank == 0).double().mean().item(), loss=loss.mean().item(), images=len(label), skipped=skipped)
    if model.num_classes > 5:
        metrics["top5"] = (rank < 5).double().mean().item()
    counts = torch.bincount(label, minlength=len(classes))
    hits = torch.bincount(label[rank == 0], minlength=len(classes))
    metrics["class_images"] = counts.tolist()
    pairs = zip(hits.tolist(), counts.tolist(), strict=True)
    metrics["class_top1"] = [hit / total if total else None for hit, total in pairs]
    return metrics


def run(args: argparse.Namespace) -> None:
    """Evaluates and prints the outcome."""
    name = complete_name(args.model)
    complete_arguments(args)
    if args.results is not None and args.results.is_dir():
        raise RecipeError(f"--results {str(args.results)!r} is a folder; name a file")
    if args.results is not None and args.results.name == "results.json" and run_arguments(str(args.results.parent)):
        raise RecipeError(f"--results {str(args.results)!r} is the record of a training run; name another file")
    check_keywords(args.model_kwargs)
    model = load_pretrained(name, **args.model_kwargs)
    config = input_config(model, args.img_size)
    try_input(model, config, args.model)
    dataset, names, words = load_images(args, config)
    classes = match_classes(args.dataset, names, model, args.by_position)
    accelerator = Accelerator(mixed_precision=args.mixed_precision)
    metrics = evaluate(args, accelerator, model, dataset, classes)
    if args.results is not None and accelerator.is_main_process:
        results = dict(
            metrics, model=args.model, dataset=args.dataset, evaluated=words, label_names=names, input=config
        )
        try:
            args.results.parent.mkdir(parents=True, exist_ok=True)
            write_text(args.results, json.dumps(results, indent=2, default=str) + "\n")
        except OSError as error:
            raise RecipeError(f"--results {str(args.results)!r} cannot be written ({one_line(error)})") from error
    top5 = f", top-5 {metrics['top5']:.2%}" if "top5" in metrics else ""
    accelerator.print(
        f"{args.model} on {args.dataset} ({words}): accuracy {metrics['top1']:.2%} "
        f"({round(metrics['top1'] * metrics['images'])}/{metrics['images']}){top5}, loss {metrics['loss']:.4f}"
        + (f", {metrics['skipped']} unreadable images left out" if metrics["skipped"] else "")
    )
    accelerator.end_training()


def main(argv: list[str] | None = None) -> int:
    """Runs the recipe."""
    args = parse(argv, build_parser())
    return run_program(PROGRAM, lambda stop: run(args))


if __name__ == "__main__":
    sys.exit(main())
