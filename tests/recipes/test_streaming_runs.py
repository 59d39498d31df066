"""Whole runs of train.py on streams: shared by processes, resumed exactly, with unreadable images reported."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("datasets")

import train as recipe  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from engine import Stopped, Trainer  # noqa: E402
from pictures import LAUNCH, ROOT, run_script, write_shards  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

pytestmark = pytest.mark.usefixtures("clean_process")
SCRIPT = ROOT / "recipes" / "train.py"
MODEL = ["--model", "resnet20_cifar", "--img-size", "16", "--batch-size", "4", "--augment", "crop-flip"]
STREAM = ["--dataset", "set", "--streaming", "--num-classes", "2", "--train-images", "26", "--shuffle-buffer", "4"]
QUIET = ["--no-progress", "--no-plot"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with 2 training shards of 13 images, 2 of them broken, and 7 test images, 1 broken."""
    write_shards(tmp_path / "set", (13, 13), broken=("train-0-1", "train-1-6"))
    write_shards(tmp_path / "set", (4, 3), "test", broken=("test-1-1",))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(output: str, *arguments: str) -> dict:
    argv = [*MODEL, *STREAM, *QUIET, "--max-decode-errors", "9", "--output", output, *arguments]
    assert recipe.main(argv) == 0
    AcceleratorState._reset_state(True)
    return json.loads((Path(output) / "results.json").read_text())


def test_a_run_on_a_stream_counts_reports_and_evaluates(here: Path, capfd):
    results = train("run", "--epochs", "2", "--workers", "2")
    assert results["updates"] == 12  # 26 // 4 in each epoch
    assert results["train_images"] == 26
    assert results["test_images"] == 6  # without the broken one
    err = capfd.readouterr().err
    assert err.count("test-1-1") == 2  # once in each evaluation
    assert err.count("1 evaluation image could not be decoded") == 2
    assert "training images could not be decoded" in err


def test_one_unreadable_image_stops_by_default(here: Path, capfd):
    argv = [*MODEL, *STREAM, *QUIET, "--output", "run", "--workers", "1"]
    assert recipe.main(argv) == 2
    err = capfd.readouterr().err.strip()
    assert "cannot be decoded" in err and "--max-decode-errors" in err
    assert "\n" not in err


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_stopped_run_goes_on_bit_by_bit(here: Path, workers: str, monkeypatch: pytest.MonkeyPatch, capfd):
    """Stopped in the middle of the second epoch, by what SIGTERM does."""
    options = ["--epochs", "3", "--workers", workers, "--mixup", "0.2", "--checkpoint-steps", "1"]
    train("whole", *options)
    train_batch = Trainer.train_batch

    def stopped(self, batch, *arguments):
        train_batch(self, batch, *arguments)
        if (self.position.epoch, batch) == (1, 2):
            self.stop.number = 15

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_batch", stopped)
        argv = [*MODEL, *STREAM, *QUIET, "--max-decode-errors", "9", "--output", "parts", *options]
        assert recipe.main(argv) == 128 + 15
    AcceleratorState._reset_state(True)
    assert not Path("parts").exists()
    capfd.readouterr()
    train("parts", *options, "--resume", "auto")
    assert "resumed from" in capfd.readouterr().out
    one, two = load_file("whole/model.safetensors"), load_file("parts/model.safetensors")
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    assert Stopped  # what the signal raises


def test_another_number_of_workers_cannot_go_on(here: Path, monkeypatch: pytest.MonkeyPatch, capfd):
    argv = [*MODEL, *STREAM, *QUIET, "--max-decode-errors", "9", "--output", "run", "--keep-checkpoints"]
    common = ["--epochs", "1", "--max-steps", "2"]
    assert recipe.main([*argv, *common, "--workers", "0"]) == 0
    AcceleratorState._reset_state(True)
    checkpoint = str(next(Path("run/checkpoints").iterdir()))
    other = [name if name != "run" else "other" for name in argv]
    capfd.readouterr()
    assert recipe.main([*other, *common, "--workers", "1", "--resume", checkpoint]) == 2
    assert "stream_workers=0" in capfd.readouterr().err


@pytest.mark.slow
def test_two_processes_share_a_stream(here: Path):
    launch = [*LAUNCH, "--quiet", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0", str(SCRIPT)]
    arguments = [*MODEL, *STREAM, *QUIET, "--max-decode-errors", "9", "--workers", "1", "--epochs", "2"]
    done = run_script([*launch, *arguments, "--output", "run"], here, ACCELERATE_USE_CPU="true")
    assert done.returncode == 0, done.stderr
    results = json.loads((here / "run" / "results.json").read_text())
    assert results["processes"] == 2
    assert results["updates"] == 6  # 26 // (2 * 4) in each epoch
    assert results["test_images"] == 6  # not a multiple of two processes nor of the batch
    assert done.stderr.count("1 evaluation image could not be decoded") == 2
