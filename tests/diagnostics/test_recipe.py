"""``--diagnose-every`` of the training recipe."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))

from safetensors.torch import load_file  # noqa: E402

from affdiv_zoo.diagnostics import DivergenceReport  # noqa: E402

pytestmark = pytest.mark.usefixtures("quiet_process")

SMALL = [
    "--model",
    "mlp_cifar_affine",
    "--model-kwargs",
    "depth=2",
    "width=16",
    "--train-limit",
    "80",
    "--test-fraction",
]
SMALL += ["0.05", "--batch-size", "16", "--epochs", "2", "--no-progress"]


@pytest.fixture
def quiet_process(monkeypatch: pytest.MonkeyPatch):
    """Undoes what a recipe run in this process leaves behind."""
    import signal

    import torch

    state = pytest.importorskip("accelerate.state", reason="the recipes need accelerate")
    monkeypatch.delenv("RANK", raising=False)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    threads = torch.get_num_threads()
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    torch.set_num_threads(threads)
    for shared in (state.AcceleratorState, state.PartialState, state.GradientState):
        shared._shared_state.clear()


def train(output: Path, *argv: object) -> Path:
    import train as recipe

    assert recipe.main([*SMALL, "--output", str(output), *map(str, argv)]) == 0
    return output


def test_the_run_is_the_same_and_its_divergence_is_written(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", "--no-plot")
    watched = train(tmp_path / "watched", "--diagnose-every", 4)
    a, b = (load_file(run / "model.safetensors") for run in (plain, watched))
    assert all(a[key].equal(b[key]) for key in a)
    assert not (plain / "divergence.json").exists()
    state = json.loads((watched / "divergence.json").read_text())
    assert state["steps"] == [0, 4, 8]  # of 10 updates
    reports = [DivergenceReport.from_dict(d) for d in state["reports"]]
    assert all(r.batch_size == 16 and r.training for r in reports)
    assert reports[0].summary()["spread"] < 1e-5 < reports[0].summary()["sample_share"]
    assert (watched / "divergence.png").read_bytes()[:4] == b"\x89PNG"


def test_a_resumed_run_keeps_what_was_found_before(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", "--diagnose-every", 3, "--keep-checkpoints", "--no-plot")
    first = sorted((whole / "checkpoints").iterdir())[1]  # of the first epoch's end; the one before it is the beginning
    again = train(tmp_path / "again", "--diagnose-every", 3, "--resume", first, "--no-plot")
    states = [json.loads((run / "divergence.json").read_text()) for run in (whole, again)]
    assert states[0]["steps"] == [0, 3, 6, 9] and states[0] == states[1]
    assert not (again / "divergence.png").exists()
