"""Sweeps: many runs of train.py or finetune.py from one YAML file, tuned alike, resumable and summed up.

    python recipes/sweep.py run recipes/sweeps/mlp.yaml
    python recipes/sweep.py status recipes/sweeps/mlp.yaml
    python recipes/sweep.py summary recipes/sweeps/mlp.yaml --out mlp.md

Phase 1, `tune`: every method at every point of the grid and with every tuning seed, on a training set from which a
validation part was split off. The test set is not evaluated. Phase 2, `final`: every method at its point of the highest
mean validation accuracy, on the whole training set, with the final seeds. The test set is evaluated once, at the end.

A finished run is one line of the ledger, a JSON-lines file beside the YAML file. A run is known by its key, a hash of
the arguments that matter: what has a line is not run again, so an interrupted sweep goes on where it was, a longer list
of seeds runs only what is new, and several processes may work on one ledger at once. Keys do not follow the code: after
a change of the layers, begin another ledger. Every line has the revision; the summary says if there are several.

The YAML file:

    dataset_name: cifar10         # in the ledger and in the key, whatever --set dataset=... says
    arguments:                    # of train.py, for all runs
      dataset: uoft-cs/cifar10
      epochs: 5
    methods:                      # name: its own arguments
      batch: {model: mlp_cifar, model_kwargs: {norm: batch}}
      affine: {model: mlp_cifar_affine}
      tuned: {recipe: finetune, model: runs/digits}  # a run of finetune.py, and of its options
    tune:                         # without it, the methods are run as they stand
      grid: {lr: [0.01, 0.03, 0.1]}   # a method may have a `grid` of its own, with as many values
      seeds: [100]
      val_fraction: 0.1
      epochs: 2                   # and other arguments for the tuning runs alone
    final: {}                     # arguments for the final runs alone
    seeds: [0, 1, 2]              # of the final runs
    baseline: batch               # of the paired differences; a method may have a `baseline` of its own
    thresholds: [0.8]             # shares of the baseline's final accuracy, for the time to accuracy
    keep: false                   # true: also write the run folders, to runs/<sweep>/<key>
"""

import argparse
import contextlib
import dataclasses
import datetime
import functools
import hashlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import finetune
import torch
import train
import yaml
from accelerate.state import AcceleratorState, GradientState
from checkpoints import FREE
from data import Data, ImageDecodeError, RecipeError, did_you_mean, find_source, listed, load_data, one_line
from timm.models import get_pretrained_cfg

try:
    import fcntl
except ImportError:  # Windows, where only one process may work on a ledger
    fcntl = None

PROGRAM = "sweep.py"
RECIPES = {"train": train, "finetune": finetune}
ROOT = Path(__file__).resolve().parents[1]
KEYS = ("dataset_name", "arguments", "methods", "tune", "final", "seeds", "baseline", "thresholds", "keep")
POLL_SECONDS = 0.5

# What the harness decides itself.
RESERVED = ("seed", "test", "config", "output", "overwrite", "resume", "no_progress")
# What does not change a run's result, or depends on the machine.
UNKEYED = ("dataset", *FREE)
# What is in the key of every run. All other arguments are only where they are not at their defaults, so that one which
# train.py gets later does not change the keys of earlier runs.
ALWAYS_KEYED = (
    *("model", "model_kwargs", "dataset", "val_fraction", "test", "test_fraction", "split_seed", "augment", "epochs"),
    *("batch_size", "opt", "lr", "weight_decay", "momentum", "warmup_fraction", "label_smoothing", "seed"),
)
# What does not change the data that a run sees. A name that is missing here only costs time.
NO_DATA = (
    *("model", "model_kwargs", "channels_last", "epochs", "max_steps", "batch_size", "opt", "lr", "weight_decay"),
    *("momentum", "warmup_fraction", "clip_grad", "label_smoothing", "seed", "mixed_precision", "output", "test"),
    *("drop", "drop_path", "sched", "warmup_epochs", "warmup_lr", "min_lr", "layer_decay", "grad_accum_steps"),
    *("mixup", "cutmix", "bce_loss", "model_ema", "model_ema_decay"),
)
# finetune.py scales the images for the model, but for these.
FINETUNE_NO_DATA = (
    *(name for name in NO_DATA if name not in ("model", "model_kwargs")),
    *("convert", "convert_center", "convert_scale", "convert_attention", "calibration_images", "keep_head", "freeze"),
    *("freeze_stages", "distill", "teacher", "distill_weight", "distill_temperature"),
)
NO_SOURCE = (*NO_DATA, "img_size", "train_limit", "val_fraction", "test_fraction", "split_seed", "augment")
# What decides a run's result beside the package.
CODE = (
    "train",
    "finetune",
    "pretrained",
    "data",
    "building",
    "engine",
    "evaluation",
    "checkpoints",
    "options",
    "streaming",
)
CFG_KEYS = ("input_size", "interpolation", "mean", "std", "crop_pct", "crop_mode")

METRICS = (
    *("val_top1", "val_loss", "test_top1", "test_loss", "train_top1", "train_loss"),
    *("train_images", "val_images", "test_images", "parameters", "epochs", "updates", "seconds"),
)


# --------------------------------------------------------------------------------------------------------------------
# The sweep
# --------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        key: A hash of `arguments`.
        phase: "tune" or "final".
        method: The method's name.
        point: The values of the grid's arguments.
        recipe: "train" or "finetune".
        args: What the recipe gets.
        arguments: The same as the ledger has it: only what matters, and nothing of the machine.
    """

    key: str
    phase: str
    method: str
    point: dict[str, Any]
    recipe: str
    args: argparse.Namespace
    arguments: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.phase:5} {self.method} {words(self.point)} seed={self.args.seed}".replace("  ", " ")


@dataclasses.dataclass
class Choice:
    """A method's point of the highest mean validation accuracy; the first of several.

    Attributes:
        point: The values of the grid's arguments.
        scores: The mean validation accuracy of every point, in the grid's order; empty without tuning.
        runs: The tuning runs at the point.
        flags: What to be wary of.
    """

    point: dict[str, Any]
    scores: list[tuple[dict[str, Any], float]] = dataclasses.field(default_factory=list)
    runs: list[Run] = dataclasses.field(default_factory=list)
    flags: list[str] = dataclasses.field(default_factory=list)


class Sweep:
    """What a YAML file asks for.

    Args:
        file: The YAML file.
        settings: Arguments that replace those of the file, from `--set`.

    Raises:
        RecipeError: The file cannot be read, has an unknown key, or asks for what the recipe does not take.
    """

    def __init__(self, file: Path, settings: dict[str, Any] | None = None):
        self.file, self.name = file, file.stem
        spec = read_yaml(file)
        for key in spec:
            if key not in KEYS:
                raise RecipeError(f"{file}: key {key!r} is unknown{did_you_mean(key, KEYS)}; known: {listed(KEYS)}")
        self.settings = dict(settings or {})
        dataset_name = self.settings.pop("dataset_name", None)
        common = self._mapping(spec, "arguments")
        self.dataset_name = str(dataset_name or spec.get("dataset_name") or common.get("dataset", "digits"))
        methods, tune = self._mapping(spec, "methods"), self._mapping(spec, "tune")
        if not methods:
            raise RecipeError(f"{file}: methods: there are none; name at least one")
        grid, self.tune_seeds = tune.pop("grid", {}), self._seeds(tune.pop("seeds", [0]), "tune: seeds")
        self.seeds = self._seeds(spec.get("seeds", [0]), "seeds")
        self.thresholds = [float(share) for share in spec.get("thresholds", [0.8])]
        self.keep = bool(spec.get("keep", False))
        self.phases = {"tune": tune, "final": self._mapping(spec, "final")}
        if grid and not (tune.get("val_fraction") or common.get("val_fraction")):
            raise RecipeError(f"{file}: tune: there is a grid but no val_fraction to choose by; set one, such as 0.1")

        self.methods: dict[str, dict[str, Any]] = {}
        self.grids: dict[str, dict[str, list]] = {}
        self.baselines: dict[str, str | None] = {}
        for name in methods:
            if not isinstance(name, str):
                raise RecipeError(f"{file}: methods: {name!r} is no name in YAML; put it in quotes")
            own = self._mapping(methods, name)
            self.grids[name] = own.pop("grid", grid)
            self.baselines[name] = own.pop("baseline", spec.get("baseline"))
            self.methods[name] = merged(common, own)
            if {k: len(v) for k, v in self.grids[name].items()} != {k: len(v) for k, v in grid.items()}:
                raise RecipeError(
                    f"{file}: methods: {name}: grid: needs as many values of {listed(list(grid))} as tune's"
                )
        for baseline in self.baselines.values():
            self.check_methods("baseline", [baseline] if baseline else [])
        for key in self.settings:
            if key in grid or key == "model_kwargs":
                raise RecipeError(f"--set {key}=...: the sweep varies that itself; change {file}")
        self.runs: dict[tuple, Run] = {}  # parsing arguments takes a while
        # Made now, so that every mistake in the file is found before the first run.
        self.tuning = {name: list(self._tuning_runs(name)) for name in self.methods}
        for name in self.methods:
            self.final_run(name, self.points(name)[0], self.seeds[0])

    def _mapping(self, spec: dict[str, Any], key: str) -> dict[str, Any]:
        value = spec.get(key)
        if not isinstance(value, dict | None):
            raise RecipeError(f"{self.file}: {key}: {value!r} is no mapping; write `name: value` lines below it")
        return dict(value or {})

    def _seeds(self, seeds: Any, what: str) -> list[int]:
        good = isinstance(seeds, list) and all(type(seed) is int for seed in seeds)
        if not good or not seeds or len(set(seeds)) < len(seeds):
            raise RecipeError(f"{self.file}: {what}: {seeds!r} is no list of different whole numbers, such as [0, 1]")
        return seeds

    def check_methods(self, what: str, names: Iterable[str]) -> None:
        """Raises a RecipeError for a name that is no method's."""
        for name in names:
            if name not in self.methods:
                raise RecipeError(
                    f"{what} {name!r}: {self.file} has no such method; it has {listed(list(self.methods))}"
                )

    def points(self, method: str) -> list[dict[str, Any]]:
        """Returns the points of a method's grid, in its order."""
        grid = self.grids[method]
        return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]

    def _run(self, phase: str, method: str, point: dict[str, Any], seed: int) -> Run:
        known = (phase, method, *point.values(), seed)
        if known not in self.runs:
            self.runs[known] = self._make_run(phase, method, point, seed)
        return self.runs[known]

    def _make_run(self, phase: str, method: str, point: dict[str, Any], seed: int) -> Run:
        arguments = merged(self.methods[method], self.phases[phase], point, self.settings)
        for name in RESERVED:
            if name in arguments:
                raise RecipeError(f"{self.file}: argument {name!r}: the sweep sets that itself; leave it out")
        arguments.update(seed=seed, test="never" if phase == "tune" else "end", no_progress=True)
        args = to_args(arguments, f"{self.file}: methods: {method}")
        recipe = arguments.get("recipe", "train")
        kept = ledger_arguments(args, self.dataset_name, recipe)
        key = hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]
        return Run(key, phase, method, {name: getattr(args, name) for name in point}, recipe, args, kept)

    def _tuning_runs(self, method: str) -> Iterator[Run]:
        if self.grids[method]:
            for point, seed in itertools.product(self.points(method), self.tune_seeds):
                yield self._run("tune", method, point, seed)

    def final_run(self, method: str, point: dict[str, Any], seed: int) -> Run:
        """Returns a method's final run of one seed at a point."""
        return self._run("final", method, point, seed)

    def choose(self, method: str, records: dict[str, dict]) -> Choice | None:
        """Chooses a method's point by the tuning runs; None while some are missing."""
        runs = self.tuning[method]
        if not runs:
            return Choice(point={})
        if any(run.key not in records for run in runs):
            return None
        groups = [list(group) for _, group in itertools.groupby(runs, lambda run: run.point)]
        # Rounded, since the means of equally many right answers may differ in their last bit.
        means = [round(statistics.fmean(accuracy(records[run.key]) for run in group), 9) for group in groups]
        scores = [(group[0].point, mean) for group, mean in zip(groups, means, strict=True)]
        best = max(score for _, score in scores)
        point = next(point for point, score in scores if score == best)
        flags = []
        for name, value in point.items():
            values = [other[name] for other, _ in scores]
            if len(set(values)) > 1 and type(value) in (int, float) and value in (min(values), max(values)):
                what = "rate" if name == "lr" else name
                flags.append(f"best {what} is at the grid's edge ({name}={value:g} of {listed_values(values)})")
        ties = [words(other) for other, score in scores if score == best and other != point]
        if ties:
            flags.append(f"{words(point)} ties with {', '.join(ties)}")
        return Choice(point, scores, [run for run in runs if run.point == point], flags)

    def plan(self, records: dict[str, dict], only: Iterable[str] = ()) -> list[Run]:
        """Lists the runs that can be named so far, done or not: final ones need their method's tuning.

        Tuning goes method by method, the final runs seed by seed: so an unfinished sweep has whole pairs.
        """
        methods = [name for name in self.methods if not only or name in only]
        choices = {name: self.choose(name, records) for name in methods}
        runs = [run for name in methods for run in self.tuning[name]]
        for seed, name in itertools.product(self.seeds, methods):
            if choices[name] is not None:
                runs.append(self.final_run(name, choices[name].point, seed))
        return list({run.key: run for run in reversed(runs)}.values())[::-1]  # the first of equal ones


def read_yaml(file: Path) -> dict[str, Any]:
    """Reads a mapping from a YAML file."""
    try:
        spec = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RecipeError(f"{str(file)!r} cannot be read ({one_line(error)}); name a sweep's YAML file") from error
    if not isinstance(spec, dict):
        raise RecipeError(f"{str(file)!r} is no sweep; see the top of recipes/sweep.py for what to write")
    return spec


def merged(*layers: dict[str, Any]) -> dict[str, Any]:
    """Merges arguments; later ones win, and `model_kwargs` are merged in the same way."""
    result: dict[str, Any] = {}
    for layer in layers:
        kwargs = {**(result.get("model_kwargs") or {}), **(layer.get("model_kwargs") or {})}
        result = {**result, **layer, "model_kwargs": kwargs}
    return result


@functools.cache
def recipe_parser(recipe: str) -> argparse.ArgumentParser:
    """Returns a recipe's command line, the errors of which are RecipeErrors."""

    def fail(message: str) -> NoReturn:
        raise RecipeError(message)

    parser = RECIPES[recipe].build_parser()
    parser.error = fail
    return parser


def to_args(arguments: dict[str, Any], where: str) -> argparse.Namespace:
    """Has the recipe's own command line check arguments and fill in its defaults."""
    recipe = arguments.get("recipe", "train")
    if recipe not in RECIPES:
        raise RecipeError(f"{where}: recipe {recipe!r} is unknown; known: {listed(list(RECIPES))}")
    parser = recipe_parser(recipe)
    argv = []
    for name, value in arguments.items():
        option = "--" + str(name).replace("_", "-")
        if name == "recipe":
            continue
        if name == "model_kwargs":
            argv += [option] if value else []
            argv += [f"{key}={str(item).lower() if isinstance(item, bool) else item}" for key, item in value.items()]
        elif value is True:
            argv.append(option)
        elif value is not None and not (value is False and parser.get_default(name) is False):
            argv.append(f"{option}={value}")
    try:
        return RECIPES[recipe].parse_args(argv, parser)
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from error


def ledger_arguments(args: argparse.Namespace, dataset_name: str, recipe: str = "train") -> dict[str, Any]:
    """Returns the arguments that matter, without options that are off: a new one does not change old runs' keys."""
    default = recipe_parser(recipe).get_default
    items = {
        name: value
        for name, value in vars(args).items()
        if name not in UNKEYED and (name in ALWAYS_KEYED or value != default(name))
    }
    kept = {name: value for name, value in items.items() if value is not None and value is not False and value != {}}
    return {"dataset": dataset_name, **kept, **({} if recipe == "train" else {"recipe": recipe})}


def words(point: dict[str, Any]) -> str:
    """Words a point of the grid."""
    return " ".join(f"{name}={value:g}" if type(value) is float else f"{name}={value}" for name, value in point.items())


def listed_values(values: Iterable[Any]) -> str:
    """Words the different values of one argument."""
    return ", ".join(f"{value:g}" for value in dict.fromkeys(values))


# --------------------------------------------------------------------------------------------------------------------
# The ledger
# --------------------------------------------------------------------------------------------------------------------


def say(message: str) -> None:
    """Writes one line to stderr."""
    print(f"{PROGRAM}: {message}", file=sys.stderr, flush=True)


class Ledger:
    """A JSON-lines file of finished runs, which several processes may extend.

    A process claims a run by locking one byte, which the key determines, of a file beside the ledger. Such locks end
    with their process, however it ends; the file may stay. (It is another file because closing the ledger after reading
    it would give up all locks on it.)

    Args:
        path: The file; it need not exist.
    """

    def __init__(self, path: Path):
        self.path = path
        self.lock_path = path.with_name(path.name + ".lock")
        self.lock_file: Any = None
        self.reported: set[int] = set()

    def read(self) -> dict[str, dict]:
        """Returns the lines by key, of equal keys the first. A line that is no record is reported once and ignored."""
        try:
            lines = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise RecipeError(f"--ledger {str(self.path)!r} cannot be read ({error.strerror}); name a file") from error
        records: dict[str, dict] = {}
        for number, line in enumerate(lines, 1):
            record = parse_line(line)
            if record is not None:
                records.setdefault(record["key"], record)
            elif line.strip() and number not in self.reported:
                self.reported.add(number)
                what = "torn" if number == len(lines) else "no record"
                say(f"{self.path}: line {number} is {what} and is ignored; its run is done again")
        return records

    def append(self, record: dict[str, Any]) -> None:
        """Adds a line in one write, after removing what a crash may have left of another."""
        line = json.dumps(record, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        with self._locked(0), open(self.path, "ab+") as file:
            file.seek(0)
            *_, tail = file.read().rpartition(b"\n")
            if parse_line(tail) is not None:
                line = b"\n" + line
            elif tail:
                file.truncate(file.tell() - len(tail))
                say(f"{self.path}: removed a torn last line")
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def claim(self, key: str) -> bool:
        """Takes a run for this process; False if another one has it."""
        return self._lock(self._offset(key), wait=False)

    def release(self, key: str) -> None:
        """Gives a run back."""
        self._unlock(self._offset(key))

    @staticmethod
    def _offset(key: str) -> int:
        return 1 + (int(key, 16) >> 2)  # below 2**62: file offsets are signed

    @contextlib.contextmanager
    def _locked(self, offset: int) -> Iterator[None]:
        self._lock(offset, wait=True)
        try:
            yield
        finally:
            self._unlock(offset)

    def _lock(self, offset: int, wait: bool) -> bool:
        if fcntl is None:
            return True
        try:
            if self.lock_file is None:
                self.lock_path.parent.mkdir(parents=True, exist_ok=True)
                self.lock_file = open(self.lock_path, "ab")  # noqa: SIM115  open while the process has claims
            fcntl.lockf(self.lock_file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, offset)
        except (BlockingIOError, PermissionError) as error:
            if self.lock_file is None:
                raise RecipeError(f"--ledger {str(self.path)!r} cannot be written; name another") from error
            return False
        except OSError as error:
            raise RecipeError(
                f"--ledger {str(self.path)!r} cannot be locked ({error.strerror}); name another"
            ) from error
        return True

    def _unlock(self, offset: int) -> None:
        if fcntl is not None:
            fcntl.lockf(self.lock_file, fcntl.LOCK_UN, 1, offset)


def parse_line(line: bytes) -> dict | None:
    """Returns a line's record, or None."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and {"key", "metrics"} <= record.keys() else None


def accuracy(record: dict) -> float:
    """Returns what a run was for: the validation accuracy in tuning, else the test accuracy; chance if it diverged."""
    metrics = record["metrics"]
    value = metrics["val_top1" if record["phase"] == "tune" else "test_top1"]
    return metrics["chance"] if value is None else value


# --------------------------------------------------------------------------------------------------------------------
# Running
# --------------------------------------------------------------------------------------------------------------------


class SharedData:
    """Data that is found, decoded and split once for all runs on it."""

    def __init__(self) -> None:
        self.source_key = self.data_key = self.source = self.data = None

    def get(self, run: Run) -> Data:
        """Returns what the recipe would load."""
        args = run.args
        if run.recipe == "finetune":
            cfg, no_data = finetune.saved_config(finetune.complete_name(args.model))[0], FINETUNE_NO_DATA
            args.img_size = args.img_size or cfg["input_size"][-1]  # as load_images does
        else:
            cfg, no_data = get_pretrained_cfg(args.model).to_dict(), NO_DATA
        source_key = {name: value for name, value in vars(args).items() if name not in NO_SOURCE}
        data_key = {name: value for name, value in vars(args).items() if name not in no_data}
        data_key["cfg"] = [run.recipe, *(cfg.get(name) for name in CFG_KEYS)]
        if run.recipe == "train" and source_key != self.source_key:
            self.source, self.data_key = find_source(args), None
            self.source_key = source_key
        if data_key != self.data_key:
            self.data_key = self.data = None  # frees memory before more is needed
            self.data = load_data(args, cfg, self.source) if run.recipe == "train" else finetune.load_images(args, cfg)
            self.data_key = data_key
        for part in (self.data.train, self.data.val, self.data.test):
            if part is not None:
                part.seed = args.seed
                part.set_epoch(0)
        return self.data


def tuning(run: Run) -> finetune.FineTuning:
    """Returns what makes the model of a run of finetune.py."""
    names = [(run.args.model, "--model"), (run.args.teacher, "--teacher")]
    return finetune.FineTuning(run.args, *(name and finetune.complete_name(name, option) for name, option in names))


def check_runs(runs: Iterable[Run], shared: SharedData) -> None:
    """Builds every method's model and optimizer once, so that no mistake waits for hours."""
    for run in {run.method: run for run in runs}.values():
        try:
            if run.recipe == "finetune":
                finetune.check_optimizer_name(run.args)
                model = tuning(run).build(run.args, shared.get(run))
            else:
                train.check_names(run.args)
                model = train.build_model(run.args, shared.get(run))
            train.build_optimizer(run.args, model)
        except RecipeError as error:
            raise RecipeError(f"method {run.method!r}: {error}") from error


def execute(sweep: Sweep, run: Run, shared: SharedData) -> dict[str, Any]:
    """Trains once and returns the ledger's line."""
    data = shared.get(run)
    hooks = {}
    if run.recipe == "finetune":
        fine = tuning(run)
        hooks = dict(build=fine.build, make_objective=fine.make_objective)
    start = time.perf_counter()
    metrics: dict[str, Any] = {}
    try:
        results, rows = train.fit(run.args, data, Path("runs", sweep.name, run.key) if sweep.keep else None, **hooks)
        metrics.update((name, results[name]) for name in METRICS if name in results)
    except train.DivergedError as error:  # a result too
        rows = error.rows
        metrics["val_top1" if run.phase == "tune" else "test_top1"] = None
        metrics.update(epochs=error.epoch, seconds=time.perf_counter() - start)
    finally:
        # accelerate keeps its settings for the life of a process: the next run may have others.
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
    metrics.update(diverged="train_loss" not in metrics, chance=1 / len(data.label_names))
    curve = {name: [float(f"{row[name]:.6g}") for row in rows] for name in (rows[0] if rows else ())}
    return dict(
        key=run.key,
        sweep=sweep.name,
        phase=run.phase,
        method=run.method,
        arguments=run.arguments,
        metrics=metrics,
        curve=curve,
        device="cuda" if torch.cuda.is_available() else "cpu",
        threads=torch.get_num_threads(),
        versions=train.versions(),
        revision=revision(),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


@functools.cache
def revision() -> str | None:
    """Returns the commit of the code, with `-dirty` if it has changed since; None outside a checkout."""

    def git(*command: str) -> str:
        return subprocess.run(["git", "-C", ROOT, *command], capture_output=True, text=True, check=True).stdout.strip()

    if not (ROOT / ".git").exists():  # else a checkout around an installed copy would answer
        return None
    try:
        # The ledger itself may be under version control and does not count.
        changed = git("status", "--porcelain", "--", "affdiv_zoo", *(f"recipes/{name}.py" for name in CODE))
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def run_sweep(sweep: Sweep, ledger: Ledger, args: argparse.Namespace) -> int:
    """Does the runs that are missing, until all are done or a limit is reached."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise RecipeError("accelerate launch is for train.py; start sweep.py by itself, as often as there are cores")
    torch.set_num_threads(args.threads)
    deadline = time.monotonic() + 60 * args.minutes if args.minutes is not None else float("inf")
    total = sum(len(sweep.tuning[name]) + len(sweep.seeds) for name in args.only or sweep.methods)
    shared, finished, waiting, checked = SharedData(), 0, False, False
    while True:
        records = ledger.read()
        pending = [run for run in sweep.plan(records, args.only) if run.key not in records]
        if not pending or time.monotonic() >= deadline or (args.limit is not None and finished >= args.limit):
            break
        if not checked:
            check_runs(pending, shared)
            checked = True
        run = next((run for run in pending if ledger.claim(run.key)), None)
        if run is None:
            if not waiting:
                print(f"waiting for {len(pending)} runs of other processes", flush=True)
            waiting = True
            time.sleep(POLL_SECONDS)
            continue
        waiting = False
        try:
            if run.key in ledger.read():  # it was finished after the last look
                continue
            record = execute(sweep, run, shared)
            ledger.append(record)
        finally:
            ledger.release(run.key)
        finished += 1
        print(f"[{count_done(sweep, ledger.read(), args.only)}/{total}] {run}: {outcome(record)}", flush=True)
    left = total - count_done(sweep, records, args.only)
    print(f"{finished} runs done, {left} of {total} left" if left else f"{finished} runs done, all {total} are there")
    return 0


def count_done(sweep: Sweep, records: dict[str, dict], only: Iterable[str]) -> int:
    """Counts the runs that have a line, run by run: methods may share some."""
    methods = [name for name in sweep.methods if not only or name in only]
    done = sum(run.key in records for name in methods for run in sweep.tuning[name])
    return done + sum(len(final_records(sweep, name, records)) for name in methods)


def final_records(sweep: Sweep, method: str, records: dict[str, dict]) -> dict[int, dict]:
    """Returns a method's final lines by seed."""
    choice = sweep.choose(method, records)
    if choice is None:
        return {}
    runs = {seed: sweep.final_run(method, choice.point, seed) for seed in sweep.seeds}
    return {seed: records[run.key] for seed, run in runs.items() if run.key in records}


def outcome(record: dict) -> str:
    """Words a result."""
    metrics = record["metrics"]
    what = "validation" if record["phase"] == "tune" else "test"
    value = f"diverged in epoch {metrics['epochs']}" if metrics["diverged"] else f"{what} {accuracy(record):.2%}"
    return f"{value}, {metrics['seconds']:.1f} s"


def dry_run(sweep: Sweep, ledger: Ledger, args: argparse.Namespace) -> int:
    """Prints what would be run."""
    records = ledger.read()
    for run in sweep.plan(records, args.only):
        print(f"{'done' if run.key in records else 'todo'}  {run.key}  {run}")
    for name in args.only or sweep.methods:
        if sweep.choose(name, records) is None:
            print(f"todo  {'after tuning':16}  final {name} seeds {' '.join(map(str, sweep.seeds))}")
    return 0


def status(sweep: Sweep, ledger: Ledger, args: argparse.Namespace) -> int:
    """Prints how far every method is and what the rest will take."""
    records = ledger.read()
    rows = [("method", "tune", "final", "diverged", "spent", "left")]
    plan = sweep.plan(records)
    known = [records[run.key] for run in plan if run.key in records]
    pace = [seconds_per_epoch(record) for record in known]
    for name in sweep.methods:
        tuned = [records[run.key] for run in sweep.tuning[name] if run.key in records]
        final = list(final_records(sweep, name, records).values())
        own = [seconds_per_epoch(record) for record in tuned + final] or pace
        todo = [run for run in sweep.tuning[name] if run.key not in records]
        epochs = sum(run.args.epochs for run in todo)
        epochs += (len(sweep.seeds) - len(final)) * sweep.final_run(name, sweep.points(name)[0], 0).args.epochs
        left = f"{statistics.median(own) * epochs / 60:.0f} min" if own else "?"
        spent = sum(record["metrics"]["seconds"] for record in tuned + final)
        diverged = sum(record["metrics"]["diverged"] for record in tuned + final)
        counts = (f"{len(tuned)}/{len(sweep.tuning[name])}", f"{len(final)}/{len(sweep.seeds)}", str(diverged))
        rows.append((name, *counts, f"{spent / 60:.0f} min", left))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    if ledger.lock_path.exists():
        for run in plan:
            if run.key not in records and not ledger.claim(run.key):
                print(f"running: {run}")
    return 0


def seconds_per_epoch(record: dict) -> float:
    """Returns a run's pace."""
    return record["metrics"]["seconds"] / record["metrics"]["epochs"]


# --------------------------------------------------------------------------------------------------------------------
# The summary
# --------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Paired:
    """The mean of paired differences; `low` and `high` are its 95 % confidence interval by Student's t, from n = 2."""

    mean: float
    n: int
    low: float | None = None
    high: float | None = None


def paired_difference(ours: dict[int, float], peer: dict[int, float]) -> Paired | None:
    """Compares two methods on the seeds that both have; None if there is no such seed."""
    differences = [ours[seed] - peer[seed] for seed in ours if seed in peer]
    if not differences:
        return None
    mean, n = statistics.fmean(differences), len(differences)
    if n < 2:
        return Paired(mean, n)
    from scipy import stats  # comes with scikit-learn

    half = float(stats.t.ppf(0.975, n - 1)) * statistics.stdev(differences) / n**0.5
    return Paired(mean, n, mean - half, mean + half)


def time_to(record: dict, target: float) -> tuple[int, float] | None:
    """Returns the epochs and the seconds after which a run's validation accuracy has reached a target first."""
    seconds = itertools.accumulate(record["curve"]["seconds"]) if record["curve"] else ()
    for epoch, (value, spent) in enumerate(zip(record["curve"].get("val_top1", ()), seconds, strict=True), 1):
        if value >= target:
            return epoch, spent
    return None


@dataclasses.dataclass
class Row:
    """A method's line of the summary. Accuracies are shares, not per cent.

    Attributes:
        method: Its name.
        baseline: What it is compared with.
        choice: Its point of the grid; None while tuning runs are missing.
        tuned: The tuning lines that are there.
        final: The final lines by seed.
        difference: Test accuracy less the baseline's, seed by seed.
        times: For every threshold: (epochs, seconds, runs that reached it, runs), the medians of the runs that did.
    """

    method: str
    baseline: str | None
    choice: Choice | None
    tuned: list[dict]
    final: dict[int, dict]
    difference: Paired | None = None
    times: list[tuple[float | None, float | None, int, int] | None] = dataclasses.field(default_factory=list)

    @property
    def test(self) -> dict[int, float]:
        """The test accuracies by seed."""
        return {seed: accuracy(record) for seed, record in self.final.items()}

    def curves(self, records: dict[str, dict]) -> list[dict]:
        """The lines with a validation curve: the final ones, or else the tuning ones at the chosen point."""
        final = [record for record in self.final.values() if record["arguments"].get("val_fraction")]
        return final or [records[run.key] for run in (self.choice.runs if self.choice else ())]


def summarise(sweep: Sweep, records: dict[str, dict], baseline: str | None = None) -> list[Row]:
    """Makes the summary's lines.

    Args:
        sweep: The sweep.
        records: The ledger's lines by key.
        baseline: What to compare all methods with, instead of what the sweep says.

    Returns:
        One line per method.
    """
    rows = {
        name: Row(
            name,
            baseline or sweep.baselines[name],
            sweep.choose(name, records),
            [records[run.key] for run in sweep.tuning[name] if run.key in records],
            final_records(sweep, name, records),
        )
        for name in sweep.methods
    }
    for row in rows.values():
        peer = rows.get(row.baseline)
        if peer is None:
            continue
        if peer is not row:
            row.difference = paired_difference(row.test, peer.test)
        ends = [record["curve"]["val_top1"][-1] for record in peer.curves(records) if not record["metrics"]["diverged"]]
        curves = row.curves(records)
        for share in sweep.thresholds:
            if not ends or not curves:
                row.times.append(None)
                continue
            reached = [time_to(record, share * statistics.fmean(ends)) for record in curves]
            hits = [hit for hit in reached if hit is not None]
            medians = [statistics.median(column) for column in zip(*hits, strict=True)] or [None, None]
            row.times.append((*medians, len(hits), len(curves)))
    return list(rows.values())


def markdown(sweep: Sweep, records: dict[str, dict], rows: list[Row]) -> str:
    """Sets the summary as Markdown."""
    baselines = list(dict.fromkeys(row.baseline for row in rows if row.baseline))
    versus = f"`{baselines[0]}`" if len(baselines) == 1 else "its baseline"
    reach = [f"{share:.0%} of {versus}: epochs (s)" for share in sweep.thresholds] if baselines else []
    head = ["method", "chosen", "validation", "test", "n", "diverged", "s / run"]
    head += [f"less {versus} [95 % interval]", *reach] if baselines else []
    lines = [table_line(head), table_line(["---"] * len(head))]
    for row in rows:
        choice, test = row.choice, list(row.test.values())
        score = max((value for _, value in choice.scores), default=None) if choice else None
        cells = [f"`{row.method}`"]
        cells.append("" if choice is None else (words(choice.point) or "as it is") + (" (!)" if choice.flags else ""))
        cells.append("" if score is None else f"{100 * score:.2f}")
        cells.append(f"{100 * statistics.fmean(test):.2f}" if test else "")
        if len(test) > 1:
            cells[-1] += f" ± {100 * statistics.stdev(test):.2f}"
        cells.append(str(len(test)))
        cells.append(f"{diverged(row.tuned)} + {diverged(row.final.values())}")
        whole = [record["metrics"]["seconds"] for record in row.final.values() if not record["metrics"]["diverged"]]
        cells.append(f"{statistics.median(whole):.1f}" if whole else "")
        if baselines:
            cells.append(difference_cell(row.difference, len(test)))
            cells += [time_cell(time) for time in row.times] or [""] * len(reach)
        lines.append(table_line(cells))

    notes = [f"`{row.method}`: {flag}" for row in rows if row.choice for flag in row.choice.flags]
    notes.append(
        f"Accuracies in per cent: the mean over {len(sweep.tune_seeds)} tuning seeds, and the mean over n final seeds "
        "± the sample standard deviation. A run whose loss is no longer finite has diverged (tuning + final) and "
        "counts as chance. The difference is paired by seed; its interval is Student's t. Seconds are medians."
    )
    if reach:
        notes.append(
            "Time to accuracy: the first epoch with a validation accuracy of that share of the baseline's last one, "
            "median over the final runs if they have a validation part, else over the tuning runs at the chosen point."
        )
    used = [record for row in rows for record in (*row.tuned, *row.final.values())]
    total = sum(len(sweep.tuning[row.method]) + len(sweep.seeds) for row in rows)
    if len(used) < total:
        notes.append(f"**Unfinished**: {total - len(used)} of {total} runs are missing.")
    stamps = {
        "revision": {record["revision"] or "unknown" for record in used},
        "torch": {record["versions"]["torch"] for record in used},
        "timm": {record["versions"]["timm"] for record in used},
        "device": {record["device"] for record in used},
        "threads": {str(record["threads"]) for record in used},
    }
    if used:
        notes.append("; ".join(f"{name} {', '.join(sorted(values))}" for name, values in stamps.items()) + ".")
    if len(stamps["revision"]) > 1:
        notes.append("**Runs of several revisions are mixed.**")
    lines += ["", *(f"* {note}" for note in notes)]

    tuned = [row for row in rows if row.choice and row.choice.scores]
    if tuned:
        lines += ["", "Validation accuracy at every point of the grid:", ""]
        for row in tuned:
            points = [
                f"**{words(point)}: {100 * score:.2f}**"
                if point == row.choice.point
                else f"{words(point)}: {100 * score:.2f}"
                for point, score in row.choice.scores
            ]
            lines.append(f"* `{row.method}`: {', '.join(points)}")
    return "\n".join(lines) + "\n"


def table_line(cells: Iterable[str]) -> str:
    """Sets one line of a table."""
    return f"| {' | '.join(cells)} |"


def diverged(records: Iterable[dict]) -> int:
    """Counts the runs that diverged."""
    return sum(record["metrics"]["diverged"] for record in records)


def difference_cell(difference: Paired | None, n: int) -> str:
    """Words a difference in points of per cent."""
    if difference is None:
        return ""
    text = f"{100 * difference.mean:+.2f}"
    if difference.low is not None:
        text += f" [{100 * difference.low:+.2f}, {100 * difference.high:+.2f}]"
    return text if difference.n == n else f"{text} (n = {difference.n})"


def time_cell(time: tuple[float | None, float | None, int, int] | None) -> str:
    """Words the time to an accuracy."""
    if time is None:
        return ""
    epochs, seconds, hits, count = time
    if not hits:
        return "not reached"
    return f"{epochs:g} ({seconds:.1f})" + (f" in {hits} of {count}" if hits < count else "")


def summary(sweep: Sweep, ledger: Ledger, args: argparse.Namespace) -> int:
    """Prints the summary, or writes it together with the commands that make it."""
    if args.baseline is not None:
        sweep.check_methods("--baseline", [args.baseline])
    records = ledger.read()
    text = markdown(sweep, records, summarise(sweep, records, args.baseline))
    if args.out is None:
        print(text, end="")
        return 0
    file, options = portable(sweep.file), ""
    if args.ledger is not None:
        options += f" --ledger {portable(args.ledger)}"
    for key, value in args.settings:
        if key != "dataset":  # a place, which the summary does not need
            options += f" --set {key}={value}"
    baseline = f" --baseline {args.baseline}" if args.baseline else ""
    lines = [
        f"# Sweep `{sweep.name}` on {sweep.dataset_name}",
        "",
        "```bash",
        f"python recipes/sweep.py run {file}{options}",
        f"python recipes/sweep.py summary {file}{options}{baseline} --out {portable(args.out)}",
        "```",
        "",
        text,
    ]
    try:
        args.out.write_text("\n".join(lines), encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"--out {str(args.out)!r} cannot be written ({error.strerror}); name a file") from error
    return 0


def portable(path: Path) -> str:
    """Returns a path as others can use it: from the repository's root, or the name alone."""
    path = path.resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


# --------------------------------------------------------------------------------------------------------------------
# The command line
# --------------------------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are RecipeErrors."""

    def error(self, message: str) -> NoReturn:
        raise RecipeError(message)


def setting(text: str) -> tuple[str, Any]:
    """Parses `key=value`, the value as YAML."""
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form key=value")
    return key, yaml.safe_load(value)


def build_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = Parser(prog=PROGRAM, description="Run, follow and sum up sweeps of train.py.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("file", type=Path, help="the sweep's YAML file")
    common.add_argument("--ledger", type=Path, help="the JSON-lines file of results; without it, beside the YAML file")
    common.add_argument(
        "--set",
        dest="settings",
        type=setting,
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="replace arguments of train.py in all runs, such as dataset=path/to/cifar10 for a copy on this machine",
    )
    run = commands.add_parser("run", parents=[common], allow_abbrev=False, help="do the runs that are missing")
    run.add_argument("--limit", type=train.number(int, 0), help="do at most this many runs")
    run.add_argument("--minutes", type=train.number(float, 0), help="begin no run after this many minutes")
    run.add_argument("--only", nargs="+", default=[], metavar="METHOD", help="only these methods")
    run.add_argument("--threads", type=train.number(int, 1), default=1, help="threads per process (default: 1)")
    run.add_argument("--dry-run", action="store_true", help="print what would be run")
    commands.add_parser("status", parents=[common], allow_abbrev=False, help="print how far a sweep is")
    sums = commands.add_parser("summary", parents=[common], allow_abbrev=False, help="print the table of results")
    sums.add_argument("--baseline", metavar="METHOD", help="compare all methods with this one")
    sums.add_argument("--out", type=Path, help="write the table there, with the commands that make it")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs a command and turns expected errors into one line and a status."""
    # The default handler would leave a kept run's half-written folder.
    previous = signal.signal(signal.SIGTERM, train.interrupt)
    try:
        args = build_parser().parse_args(argv)
        sweep = Sweep(args.file, dict(args.settings))
        ledger = Ledger(args.ledger or args.file.with_suffix(".jsonl"))
        if args.command == "run":
            sweep.check_methods("--only", args.only)
            args.only = [name for name in sweep.methods if name in args.only]
            return (dry_run if args.dry_run else run_sweep)(sweep, ledger, args)
        return {"status": status, "summary": summary}[args.command](sweep, ledger, args)
    except ImageDecodeError as error:
        say(f"error: {str(error).rsplit('ImageDecodeError: ', 1)[-1].strip()}")
        return 2
    except RecipeError as error:
        say(f"error: {error}")
        return 2
    except KeyboardInterrupt as stop:
        say("interrupted; the finished runs are in the ledger, and the same command goes on")
        return 128 + (stop.args[0] if stop.args else signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, previous)


if __name__ == "__main__":
    sys.exit(main())
