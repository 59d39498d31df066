"""The recipes' command line: arguments in groups, a YAML file for any of them, and one-line answers to mistakes.

A recipe builds its parser from the `add_*_options` that it needs and reads the command line with `parse`. Options from
`--config FILE` count as if they stood before those of the command line.
"""

import argparse
import contextlib
import math
import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import yaml
from data import AUGMENTATIONS, did_you_mean, one_line

TRACKERS = ("tensorboard", "trackio", "wandb")
SCHEDULES = ("cosine", "linear", "constant")
NOT_IN_CONFIG = ("config", "output", "overwrite", "resume", "no_progress")  # of one start, not of what a run is


# --------------------------------------------------------------------------------------------------------------------
# argparse
# --------------------------------------------------------------------------------------------------------------------


class Flag(argparse.BooleanOptionalAction):
    """An option without a value, which `--no-...` takes back. The help shows only the first form."""


class HelpFormatter(argparse.HelpFormatter):
    """Shows the defaults that say something, and one form of each flag."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=34, width=min(110, _terminal_columns()))

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if any(action.default is nothing for nothing in (None, False, argparse.SUPPRESS)) or action.default == []:
            return text
        return f"{text} (default: %(default)s)"

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, Flag):
            return action.option_strings[0]
        if action.option_strings and action.nargs != 0:
            # Once: argparse repeats the value after each name.
            value = self._format_args(action, self._get_default_metavar_for_optional(action))
            return f"{', '.join(action.option_strings)} {value}"
        return super()._format_action_invocation(action)


def _terminal_columns() -> int:
    import shutil

    return shutil.get_terminal_size((110, 24)).columns - 2


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, without the usage before it."""

    def __init__(self, **kwargs: Any):
        super().__init__(formatter_class=HelpFormatter, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        report(message, self.prog)
        sys.exit(2)


def report(message: str, program: str) -> None:
    """Writes one line to stderr; of several processes only the main one does."""
    if os.environ.get("RANK", "0") == "0":
        print(f"{program}: error: {message}", file=sys.stderr)


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


count = number(int, 1)
seed = number(int, 0, 4_000_000_000)  # numpy's end at 2**32, and each process adds its number
not_negative_int = number(int, 0)
not_negative = number(float, 0)
positive = number(float, 0, low_open=True)
share = number(float, 0, 1)
fraction = number(float, 0, 1, low_open=True, high_open=True)
below_one = number(float, 0, 1, high_open=True)


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


# --------------------------------------------------------------------------------------------------------------------
# The groups of options
# --------------------------------------------------------------------------------------------------------------------


def add_config_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--config`."""
    parser.add_argument(
        "-c",
        "--config",
        type=Path,
        metavar="FILE",
        help="YAML file with any of these options (lr: 0.01), such as a run's args.yaml; the command line goes first",
    )


def add_model_options(
    parser: argparse.ArgumentParser,
    default: str = "resnet20_cifar_patchnorm",
    what: str = "a model name of timm or of affdiv_zoo",
) -> None:
    """Adds what the model is and how it is run. `what` tells of the names that there are."""
    group = parser.add_argument_group("model")
    group.add_argument("--model", default=default, help=what)
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
    group.add_argument("--drop", type=below_one, metavar="RATE", help="dropout before the head (drop_rate)")
    group.add_argument("--drop-path", type=below_one, metavar="RATE", help="stochastic depth (drop_path_rate)")
    group.add_argument("--channels-last", action=Flag, default=False, help="keep tensors in channels-last memory order")
    group.add_argument(
        "--grad-checkpointing", action=Flag, default=False, help="recompute activations instead of keeping them"
    )
    group.add_argument(
        "--torchcompile", nargs="?", const="inductor", metavar="BACKEND", help="torch.compile; inductor without a name"
    )
    group.add_argument(
        "--mixed-precision", choices=("no", "bf16", "fp16"), help="autocast; accelerate's setting without it"
    )


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """Adds where the images come from and what is evaluated on."""
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
        type=below_one,
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
        "--split-seed", type=not_negative_int, default=0, help="decides which images are held out or left out"
    )
    group.add_argument(
        "--workers",
        type=not_negative_int,
        help="loader workers per process; without it, 0 for images held in memory",
    )
    add_reading_options(group)


def add_reading_options(group: argparse._ArgumentGroup, training: bool = True) -> None:
    """Adds how images are read: as streams, and what becomes of those that cannot be decoded."""
    group.add_argument(
        "--streaming",
        action=Flag,
        default=False,
        help="read a Hub data set, WebDataset shards or a folder shard by shard, without download or index",
    )
    if training:
        group.add_argument(
            "--shuffle-buffer", type=count, default=1000, metavar="N", help="images that --streaming draws from"
        )
        group.add_argument(
            "--train-images", type=count, metavar="N", help="size of a streamed training split that does not tell it"
        )
    group.add_argument(
        "--num-classes", type=number(int, 2), metavar="N", help="classes of a stream whose labels are mere numbers"
    )
    group.add_argument("--class-map", type=Path, metavar="FILE", help="classes of a stream, one name a line")
    group.add_argument(
        "--max-decode-errors",
        type=not_negative_int,
        default=0,
        metavar="N",
        help="leave out so many images an epoch that cannot be decoded, each with a warning; 0: stop at the first",
    )


def add_augmentation_options(parser: argparse.ArgumentParser) -> None:
    """Adds what is done to training images and their labels: timm's transforms, Mixup and CutMix."""
    group = parser.add_argument_group(
        "augmentation",
        "Any of the options from --aa to --train-interpolation sends the images through timm's transforms.",
    )
    group.add_argument(
        "--augment",
        choices=AUGMENTATIONS,
        default="auto",
        help="auto: none for digits and crop-flip for all others",
    )
    group.add_argument(
        "--aa", metavar="POLICY", help="AutoAugment: rand-m9-mstd0.5-inc1, augmix-m5-w4-d2, original, 3a"
    )
    group.add_argument("--scale", type=positive, nargs=2, metavar=("LOW", "HIGH"), help="random area of the crop")
    group.add_argument(
        "--ratio", type=positive, nargs=2, metavar=("LOW", "HIGH"), help="random aspect ratio of the crop"
    )
    group.add_argument("--hflip", type=share, metavar="PROB", help="probability of mirroring left to right")
    group.add_argument("--vflip", type=share, metavar="PROB", help="probability of mirroring top to bottom")
    group.add_argument("--color-jitter", type=not_negative, metavar="FACTOR", help="colour jitter")
    group.add_argument("--reprob", type=share, metavar="PROB", help="probability of random erasing")
    group.add_argument(
        "--train-interpolation", choices=("random", "bilinear", "bicubic"), help="resampling of training images"
    )
    group.add_argument("--mixup", type=not_negative, default=0.0, metavar="ALPHA", help="Mixup; 0 for none")
    group.add_argument("--cutmix", type=not_negative, default=0.0, metavar="ALPHA", help="CutMix; 0 for none")
    group.add_argument(
        "--mixup-prob", type=share, default=1.0, metavar="PROB", help="share of batches with Mixup or CutMix"
    )
    group.add_argument(
        "--mixup-switch-prob", type=share, default=0.5, metavar="PROB", help="share of CutMix where both are on"
    )
    group.add_argument(
        "--mixup-mode", choices=("batch", "pair", "elem"), default="batch", help="draw anew for each of these"
    )
    group.add_argument(
        "--mixup-off-epoch",
        type=not_negative_int,
        default=0,
        metavar="N",
        help="no mixing from this epoch on; 0: never",
    )


def add_training_options(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Adds optimizer, schedule, loss and moving average. `defaults` replaces the defaults of some, by name."""
    group = parser.add_argument_group("training")
    group.add_argument("--epochs", type=count, default=20, help="times to go through the training set")
    group.add_argument("--max-steps", type=count, help="stop after this many updates, the schedule ending there too")
    group.add_argument("--batch-size", type=count, default=64, help="training images per process and forward pass")
    group.add_argument(
        "--grad-accum-steps", type=count, default=1, metavar="N", help="batches of each process that make one update"
    )
    group.add_argument("--seed", type=seed, default=0, help="decides weights, order and augmentation")

    group = parser.add_argument_group("optimizer")
    group.add_argument("--opt", default="adamw", help="a timm optimizer")
    group.add_argument("--lr", type=positive, default=1e-2, help="highest learning rate")
    group.add_argument("--weight-decay", type=not_negative, default=0.05, help="weight decay")
    group.add_argument("--momentum", type=below_one, default=0.9, help="momentum, for optimizers with one")
    group.add_argument("--opt-eps", type=positive, metavar="EPS", help="epsilon, for optimizers with one")
    group.add_argument("--opt-betas", type=below_one, nargs="+", metavar="BETA", help="betas, for optimizers with some")
    group.add_argument(
        "--layer-decay",
        type=number(float, 0, 1, low_open=True),
        metavar="FACTOR",
        help="the rate falls by this factor from each layer to the one before it",
    )
    group.add_argument("--clip-grad", type=positive, help="largest norm of the gradient")
    group.add_argument(
        "--clip-mode",
        choices=("norm", "value", "agc"),
        default="norm",
        help="what --clip-grad bounds: the norm, each value, or each unit's norm against its weights' (agc)",
    )

    group = parser.add_argument_group("schedule")
    group.add_argument("--sched", choices=SCHEDULES, default="cosine", help="course of the rate after the warm-up")
    group.add_argument("--warmup-fraction", type=below_one, default=0.1, help="share of the updates with a rising rate")
    group.add_argument(
        "--warmup-epochs", type=not_negative, metavar="N", help="the same in epochs, instead of --warmup-fraction"
    )
    group.add_argument(
        "--warmup-lr", type=not_negative, metavar="LR", help="first rate; a hundredth of --lr without it"
    )
    group.add_argument("--min-lr", type=not_negative, default=0.0, metavar="LR", help="last rate")

    group = parser.add_argument_group("loss and averaging")
    group.add_argument("--label-smoothing", "--smoothing", type=below_one, default=0.0, help="label smoothing")
    group.add_argument("--bce-loss", action=Flag, default=False, help="binary cross-entropy with each class")
    group.add_argument(
        "--bce-target-thresh", type=fraction, metavar="T", help="round mixed labels to 0 or 1 at this for --bce-loss"
    )
    group.add_argument(
        "--model-ema",
        action=Flag,
        default=False,
        help="average the weights over updates; evaluate and save the average",
    )
    group.add_argument(
        "--model-ema-decay", type=below_one, default=0.9998, metavar="D", help="the average's decay per update"
    )
    group.add_argument(
        "--model-ema-warmup", action=Flag, default=False, help="let the decay rise to that in the first updates"
    )
    for name in defaults:
        if not any(action.dest == name for action in parser._actions):
            raise ValueError(f"{name!r} is no option of training")
    parser.set_defaults(**defaults)


def add_evaluation_options(parser: argparse.ArgumentParser) -> None:
    """Adds when to evaluate, when to stop, and when to save what a killed run needs."""
    group = parser.add_argument_group("evaluation")
    group.add_argument("--eval-batch-size", type=count, default=256, help="images per process and evaluation batch")
    group.add_argument(
        "--val-interval",
        type=count,
        default=1,
        metavar="EPOCHS",
        help="evaluate each so many epochs, and after the last",
    )
    group.add_argument("--eval-metric", choices=("top1", "loss"), default="top1", help="what the best epoch is best in")
    group.add_argument(
        "--patience",
        type=count,
        metavar="N",
        help="stop when so many evaluations in a row were no better than the best",
    )

    group = parser.add_argument_group("checkpoints")
    group.add_argument(
        "--resume",
        metavar="auto|FOLDER",
        help="auto: go on with the unfinished run of --output if there is one; or name one of its checkpoints",
    )
    group.add_argument(
        "--checkpoint-interval", type=count, default=1, metavar="EPOCHS", help="save each so many epochs"
    )
    group.add_argument("--checkpoint-steps", type=count, metavar="UPDATES", help="save each so many updates too")
    group.add_argument("--checkpoint-hist", type=count, default=2, metavar="N", help="checkpoints to keep")
    group.add_argument(
        "--keep-checkpoints", action=Flag, default=False, help="keep the last ones when the run is finished"
    )
    group.add_argument(
        "--check-interval",
        type=count,
        default=1,
        metavar="BATCHES",
        help="look for a loss that is not finite, or a signal to stop, each so many batches; an accelerator waits then",
    )


def add_output_options(parser: argparse.ArgumentParser, folder: str) -> None:
    """Adds where a run is written and how it is followed. `folder` tells of the default."""
    group = parser.add_argument_group("output")
    group.add_argument("--output", type=Path, help=f"run folder; {folder} without it")
    group.add_argument("--overwrite", action=Flag, default=False, help="replace the run folder of an earlier run")
    group.add_argument("--no-progress", action="store_true", help="show no progress bar")
    group.add_argument("--no-plot", action="store_true", help="draw no plot.png")
    group.add_argument(
        "--tracker",
        choices=TRACKERS,
        nargs="+",
        action="extend",
        help="also log to these; into the run folder or as their own settings say",
    )
    group.add_argument("--project", default="affdiv_zoo", help="the trackers' project")
    group.add_argument(
        "--diagnose-every",
        type=count,
        metavar="UPDATES",
        help="measure every layer's divergence so often, on up to 32 of the batch's images, into divergence.json and "
        "divergence.png; the training is not changed, and each time costs about two updates",
    )
    group.add_argument(
        "--log-interval", type=count, default=10, metavar="UPDATES", help="log the loss to the trackers so often"
    )


def option_names(parser: argparse.ArgumentParser, *titles: str) -> tuple[str, ...]:
    """Returns the names of the arguments in the groups with these titles."""
    groups = [group for group in parser._action_groups if group.title in titles]
    return tuple(action.dest for group in groups for action in group._group_actions)


# --------------------------------------------------------------------------------------------------------------------
# The YAML file
# --------------------------------------------------------------------------------------------------------------------


def read_config(file: Path, parser: argparse.ArgumentParser) -> list[str]:
    """Returns the options of a YAML file in the form that they have on the command line."""
    try:
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        parser.error(f"--config {str(file)!r} cannot be read ({one_line(error)}); name a YAML file")
    if settings is None:
        return []
    if not isinstance(settings, dict):
        parser.error(f"--config {str(file)!r} holds no options; write one `name: value` on each line")
    actions = {action.dest: action for action in parser._actions if action.option_strings}
    argv: list[str] = []
    for key, value in settings.items():
        name = str(key).lstrip("-").replace("-", "_")
        if name not in actions or name in ("help", "config"):
            close = did_you_mean(name, list(actions))
            parser.error(f"--config {str(file)!r}: {str(key)!r} is no option{close}; see --help for all")
        argv += to_argv(actions[name], value)
    # Once by themselves, so that a mistake is known to be the file's.
    plain_error = parser.error
    parser.error = lambda message: plain_error(f"--config {str(file)!r}: {message}")  # type: ignore[method-assign]
    try:
        parser.parse_args(argv)
    finally:
        del parser.error
        if parser.error != plain_error:  # it was replaced before
            parser.error = plain_error  # type: ignore[method-assign]
    return argv


def to_argv(action: argparse.Action, value: Any) -> list[str]:
    """Words one option with a value from a YAML file."""
    option = next((text for text in action.option_strings if text.startswith("--")), action.option_strings[0])
    if value is None or value == [] or value == {}:
        return []
    if isinstance(value, bool):
        if isinstance(action, Flag):
            return [option if value else f"--no-{option[2:]}"]
        if action.nargs == 0:
            return [option] if value else []
        if action.choices and not value and "no" in action.choices:
            return [f"{option}=no"]  # YAML's `no` is false
        return [f"{option}={str(value).lower()}"]
    if isinstance(value, dict):
        pairs = (f"{key}={str(item).lower() if isinstance(item, bool) else item}" for key, item in value.items())
        return [option, *pairs]
    if isinstance(value, list):
        return [option, *map(str, value)]
    return [f"{option}={value}"]


def parse(argv: list[str] | None, parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parses the command line after the file that `--config` names; `model_kwargs` becomes a dictionary."""
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    if getattr(args, "config", None) is not None:
        args = parser.parse_args(read_config(args.config, parser) + list(argv))
    if hasattr(args, "model_kwargs"):
        args.model_kwargs = dict(args.model_kwargs)
    return args


def config_text(args: argparse.Namespace) -> str:
    """Returns the YAML file that gives these arguments again."""
    settings = {name: plain(value) for name, value in vars(args).items() if name not in NOT_IN_CONFIG}
    return yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)


def plain(value: Any) -> Any:
    """Returns a value in the types that YAML and JSON have."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def default_output(args: argparse.Namespace, names: Iterable[str]) -> Path:
    """Returns runs/<names joined by dashes>, without what no file name should have."""
    return Path("runs", re.sub(r"[^\w.-]+", "_", "-".join(names)))
