"""Runs of train.py that are killed, stopped, damaged or out of room, and what becomes of them."""

import contextlib
import csv
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("accelerate")
pytest.importorskip("sklearn")

import checkpoints  # noqa: E402
import engine  # noqa: E402
import train as recipe  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from launching import Launch  # noqa: E402

pytestmark = pytest.mark.usefixtures("clean_process")

# Everything at once that a resumed run could get wrong: random transforms in two workers, Mixup and CutMix, dropout,
# BatchNorm's statistics, averaged weights, momentum, accumulation with a short last group, and evaluation in between.
EVERYTHING = (
    *("--model", "resnet20_cifar", "--img-size", 16, "--train-limit", 160, "--epochs", 3, "--batch-size", 8),
    *("--reprob", 0.3, "--hflip", 0.5, "--mixup", 0.4, "--cutmix", 1, "--drop", 0.1, "--workers", 2),
    *("--model-ema", "--model-ema-decay", 0.9, "--grad-accum-steps", 3, "--opt", "momentum", "--lr", 0.05),
    *("--checkpoint-steps", 2, "--eval-batch-size", 100, "--no-progress", "--no-plot"),
)


@pytest.fixture(scope="module", autouse=True)
def server_path() -> Iterator[None]:
    """Lets the server that forks the runs find what it is to import first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        yield


def assert_same_run(one: Path, other: Path) -> None:
    """Checks that two complete runs have the same bits, but for times."""
    files = {path.relative_to(one) for path in one.rglob("*.safetensors")}
    assert files == {path.relative_to(other) for path in other.rglob("*.safetensors")}
    assert Path("model.safetensors") in files and Path("best/model.safetensors") in files
    for name in files:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    assert losses(one) == losses(other)


def losses(folder: Path) -> list[dict[str, str]]:
    """Reads a run's log without its times."""
    with open(folder / "log.csv", newline="") as file:
        return [{name: value for name, value in row.items() if name != "seconds"} for row in csv.DictReader(file)]


def assert_nothing_half_written(output: Path) -> None:
    """Checks what is there after a kill: whole checkpoints, and a complete run or none."""
    for folder in checkpoints.RunFolder(output).names():
        checkpoints.verify(folder)
    if output.exists():
        assert {"model.safetensors", "config.json", "results.json", "log.csv"} <= {p.name for p in output.iterdir()}


# --------------------------------------------------------------------------------------------------------------------
# SIGKILL
# --------------------------------------------------------------------------------------------------------------------


def kill_and_resume(folder: Path, kills: int, processes: int, seed: int) -> int:
    """Kills runs at random moments until that has happened so often, resuming each, and checks all that are complete.

    A moment is some time after one of the next checkpoints has appeared, or after the start. The time is random, up to
    what lies between two checkpoints: so the moments lie in updates, evaluations and the writing of checkpoints.

    Returns:
        How often a run went on from a checkpoint.
    """
    rng = random.Random(seed)
    whole = folder / "whole"
    launch = Launch([*EVERYTHING, "--output", whole], folder / "whole.log", processes)
    assert launch.wait() == [0] * processes, launch.said()
    results = json.loads((whole / "results.json").read_text())
    between = results["seconds"] / (results["updates"] / 2 + results["epochs"])
    killed = number = resumed = 0
    while True:
        output, log = folder / f"killed{number}", folder / f"killed{number}.log"
        run = checkpoints.RunFolder(output)
        seen, wanted = set(run.names()), rng.choice((0, 1, 1, 2))
        launch = Launch([*EVERYTHING, "--output", output, "--resume", "auto"], log, processes)
        if killed < kills:
            while launch.is_alive() and len(set(run.names()) - seen) < wanted:
                time.sleep(0.01)
            launch.wait(rng.uniform(0, between))
            if launch.is_alive():
                launch.kill()
                killed += 1
                assert_nothing_half_written(output)
                continue
        assert launch.wait() == [0] * processes, launch.said()
        assert_same_run(whole, output)
        assert sorted(path.name for path in folder.glob(f"*{output.name}*")) == [output.name, log.name]
        resumed += launch.said().count("resumed from")
        number += 1
        if killed >= kills:
            return resumed


@pytest.mark.parametrize("processes", [1, 2])
def test_killed_runs_end_with_the_same_bits(tmp_path: Path, processes: int):
    assert kill_and_resume(tmp_path, kills=3, processes=processes, seed=processes) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_runs_killed_at_many_moments_end_with_the_same_bits(tmp_path: Path, processes: int):
    assert kill_and_resume(tmp_path, kills=20, processes=processes, seed=100 + processes) >= 10
