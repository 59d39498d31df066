"""Makes the recipes importable: they are scripts, which find each other beside themselves."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """One thread for every run of a module: bits depend on their number, and runs are compared bit by bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def clean_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Undoes what a recipe run in this process leaves behind, and keeps it away from the user's caches."""
    datasets = pytest.importorskip("datasets")
    state = pytest.importorskip("accelerate.state")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.delenv("RANK", raising=False)
    handler, threads = signal.getsignal(signal.SIGTERM), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    signal.signal(signal.SIGTERM, handler)
    torch.set_num_threads(threads)
    for shared in (state.AcceleratorState, state.PartialState, state.GradientState):
        shared._shared_state.clear()
