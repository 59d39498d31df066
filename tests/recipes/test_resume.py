"""Runs of train.py that are killed, stopped, damaged or out of room, and what becomes of them."""

import contextlib
import csv
import json
import os
import random
import shutil
import signal
import sys
import tempfile
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


def test_killed_runs_end_with_the_same_bits(tmp_path: Path):
    assert kill_and_resume(tmp_path, kills=3, processes=1, seed=1) >= 1


@pytest.mark.slow  # 5 to 8 minutes each: 20 kills, and a start of Python after each
@pytest.mark.parametrize("processes", [1, 2])
def test_runs_killed_at_many_moments_end_with_the_same_bits(tmp_path: Path, processes: int):
    assert kill_and_resume(tmp_path, kills=20, processes=processes, seed=100 + processes) >= 10


# --------------------------------------------------------------------------------------------------------------------
# SIGTERM and SIGINT
# --------------------------------------------------------------------------------------------------------------------


def wait_for(condition: Callable[[], object], launch: Launch) -> None:
    """Waits until something holds, as long as the processes run."""
    while launch.is_alive() and not condition():
        time.sleep(0.01)


@pytest.mark.parametrize(("processes", "number"), [(1, signal.SIGTERM), (2, signal.SIGTERM), (1, signal.SIGINT)])
def test_signal_saves_and_ends_the_run(tmp_path: Path, processes: int, number: int):
    """The signal goes to one process alone, the last, as when a machine of several is taken away."""
    output, log = tmp_path / "run", tmp_path / "log"
    arguments = [*SMALL, "--epochs", 300, "--output", output]  # none of which it reaches
    launch = Launch(arguments, log, processes)
    wait_for((output.with_name("run.part") / "log.csv").exists, launch)
    os.kill(launch.processes[-1].pid, number)
    assert launch.wait() == [128 + number] * processes, launch.said()
    run = checkpoints.RunFolder(output)
    state = checkpoints.verify(run.names()[0])
    assert state["updates"] > 0 and not output.exists()
    lines = [line for line in launch.said().splitlines() if line.startswith("train.py")]
    name = signal.Signals(number).name
    assert lines == [f"train.py: error: {name}: saved after {state['updates']} updates; add --resume auto to go on"]
    assert {path.name for path in tmp_path.iterdir()} == {"run.part", "log"}
    assert "Traceback" not in launch.said()


def main(*arguments: object) -> int:
    """Runs the recipe in this process."""
    try:
        return recipe.main([*map(str, arguments), "--no-progress", "--no-plot"])
    finally:
        AcceleratorState._reset_state(True)


SMALL = (
    *("--model", "mlp_cifar", "--model-kwargs", "width=16", "depth=2", "norm=batch", "--train-limit", 96),
    *("--batch-size", 16, "--lr", 0.05, "--epochs", 4, "--augment", "crop", "--no-progress", "--no-plot"),
)


def stop_at(monkeypatch: pytest.MonkeyPatch, evaluation: int) -> None:
    """Has a signal arrive in one of the run's evaluations, from 1."""
    evaluate, count = engine.evaluate, iter(range(1, 100))

    def spy(*args, **kwargs):
        if next(count) == evaluation:
            signal.raise_signal(signal.SIGTERM)
        return evaluate(*args, **kwargs)

    monkeypatch.setattr(engine, "evaluate", spy)


@pytest.fixture
def unfinished(tmp_path: Path) -> checkpoints.RunFolder:
    """A run that was stopped in its third evaluation: with a checkpoint after two epochs and one of that moment."""
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 3)
        assert main(*SMALL, "--output", tmp_path / "run") == 128 + signal.SIGTERM
    run = checkpoints.RunFolder(tmp_path / "run")
    assert [path.name for path in run.names()] == ["epoch-0002-batch-000006", "epoch-0002-batch-000000"]
    return run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run to its end."""
    output = tmp_path_factory.mktemp("undisturbed") / "run"
    assert main(*SMALL, "--output", output) == 0
    return output


def test_stop_in_an_evaluation_is_resumed_there(unfinished, undisturbed: Path, capsys):
    assert main(*SMALL, "--output", unfinished.output, "--resume", "auto") == 0
    assert "resumed from" in capsys.readouterr().out
    assert_same_run(unfinished.output, undisturbed)
    assert not unfinished.work.exists() and not (unfinished.output / "checkpoints").exists()


def test_resume_auto_begins_goes_on_and_has_nothing_left_to_do(tmp_path: Path, undisturbed: Path, capsys):
    command = (*SMALL, "--output", tmp_path / "run", "--resume", "auto")
    assert main(*command) == 0  # there is nothing to go on with
    assert_same_run(tmp_path / "run", undisturbed)
    before = (tmp_path / "run" / "results.json").read_bytes()
    capsys.readouterr()
    assert main(*command) == 0
    assert "finished already" in capsys.readouterr().out
    assert (tmp_path / "run" / "results.json").read_bytes() == before
    assert main(*command, "--lr", 0.1) == 2
    assert "lr=0.05" in (message := capsys.readouterr().err) and "lr=0.1" in message


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"arguments": 5}'])
def test_a_record_that_is_no_runs_is_one_line(text: str, tmp_path: Path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "results.json").write_text(text)
    assert main(*SMALL, "--output", tmp_path / "run", "--resume", "auto") == 2
    stderr = capsys.readouterr().err
    assert "--resume auto: the results.json in" in stderr and stderr.count("\n") == 1
    assert (tmp_path / "run" / "results.json").read_text() == text


def test_an_unfinished_run_is_not_overwritten_by_chance(unfinished, capsys):
    before = [path.name for path in unfinished.names()]
    capsys.readouterr()
    assert main(*SMALL, "--output", unfinished.output) == 2
    message = capsys.readouterr().err
    assert "unfinished" in message and "--resume auto" in message and "--overwrite" in message
    assert [path.name for path in unfinished.names()] == before
    assert main(*SMALL, "--output", unfinished.output, "--overwrite", "--epochs", 1) == 0
    assert len(losses(unfinished.output)) == 1


def test_a_checkpoint_can_be_named_and_continue_elsewhere(unfinished, undisturbed: Path, tmp_path: Path):
    first = unfinished.names()[-1]
    assert main(*SMALL, "--output", tmp_path / "elsewhere", "--resume", first) == 0
    assert_same_run(tmp_path / "elsewhere", undisturbed)
    assert unfinished.work.is_dir()  # and the run it came from is as it was


def test_two_runs_do_not_share_a_folder(tmp_path: Path, capsys):
    launch = Launch([*SMALL, "--epochs", 300, "--output", tmp_path / "run"], tmp_path / "log")
    wait_for((tmp_path / "run.part" / "checkpoints").exists, launch)
    assert main(*SMALL, "--output", tmp_path / "run", "--overwrite") == 2
    assert "another process" in capsys.readouterr().err
    assert launch.is_alive()
    launch.kill()


def test_only_the_newest_checkpoints_stay(tmp_path: Path):
    assert main(*SMALL, "--output", tmp_path / "run", "--checkpoint-hist", 3, "--keep-checkpoints") == 0
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == [f"epoch-{epoch:04d}-batch-000000" for epoch in (2, 3, 4)]


# --------------------------------------------------------------------------------------------------------------------
# Damaged and foreign checkpoints
# --------------------------------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "truncated weights": ("model.safetensors", truncate, "bytes instead of"),
    "truncated optimizer": ("optimizer.bin", truncate, "bytes instead of"),
    "flipped bit": ("model.safetensors", flip_a_bit, "not what was written"),
    "missing file": ("state.json", Path.unlink, "is missing"),
    "no manifest": ("manifest.json", Path.unlink, "manifest.json"),
    "cut manifest": ("manifest.json", truncate, "manifest.json"),
    "a file too many": ("custom_checkpoint_0.pkl", lambda path: path.write_bytes(b"?"), "not its own"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_name_and_passed_over(damage: str, unfinished, undisturbed, capsys):
    name, change, why = DAMAGES[damage]
    folder = unfinished.names()[0]
    change(folder / name)
    capsys.readouterr()
    assert main(*SMALL, "--output", unfinished.output, "--resume", folder) == 2
    message = capsys.readouterr().err
    assert message.startswith("train.py: error: --resume") and message.count("\n") == 1
    for part in (str(folder), name, why):
        assert part in message
    # Of itself the run goes on from the one before, and comes to the same end.
    assert main(*SMALL, "--output", unfinished.output, "--resume", "auto") == 0
    assert str(folder) in capsys.readouterr().err
    assert_same_run(unfinished.output, undisturbed)


def test_a_run_with_nothing_but_damaged_checkpoints_is_not_begun_anew(unfinished, capsys):
    for folder in unfinished.names():
        truncate(folder / "model.safetensors")
    capsys.readouterr()
    assert main(*SMALL, "--output", unfinished.output, "--resume", "auto") == 2
    assert str(unfinished.names()[0]) in capsys.readouterr().err
    assert len(unfinished.names()) == 2


def test_foreign_checkpoints_are_refused_by_name(unfinished, undisturbed: Path, tmp_path: Path, capsys):
    folder = unfinished.names()[0]
    elsewhere = ("--output", tmp_path / "elsewhere")
    for resume, options, parts in (
        (folder, ("--model", "mlp_cifar_affine"), ("model='mlp_cifar'", "model='mlp_cifar_affine'")),
        (folder, ("--seed", 3), ("seed=0", "seed=3")),
        (undisturbed, (), (str(undisturbed), "no checkpoint of this recipe")),
        (tmp_path / "nowhere", (), (str(tmp_path / "nowhere"), "no such folder")),
    ):
        capsys.readouterr()
        arguments = [*SMALL, *elsewhere, "--resume", resume, *options]
        if "mlp_cifar_affine" in options:
            arguments.remove("norm=batch")
        assert main(*arguments) == 2
        message = capsys.readouterr().err
        assert message.count("\n") == 1
        for part in parts:
            assert part in message
        assert not list(tmp_path.glob("elsewhere*"))


class Bomb:
    """What a pickle can do when it is read."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_checkpoint_runs_no_code(unfinished, tmp_path: Path, capsys):
    """Even one whose manifest has been made to fit."""
    folder = unfinished.names()[0]
    for name in ("optimizer.bin", "random_states_0.pkl"):
        torch.save({"state": Bomb(tmp_path / "exploded")}, folder / name)
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["files"][name] = dict(
            bytes=(folder / name).stat().st_size, sha256=checkpoints.file_hash(folder / name)
        )
        (folder / "manifest.json").write_text(json.dumps(manifest))
        status = main(*SMALL, "--output", tmp_path / name, "--resume", folder)
        assert not (tmp_path / "exploded").exists()
        if name == "optimizer.bin":
            assert status == 2 and str(folder) in capsys.readouterr().err
            shutil.copy(unfinished.names()[1] / name, folder / name)
    torch.load(folder / "random_states_0.pkl", weights_only=False)
    assert (tmp_path / "exploded").exists()  # it would have


# --------------------------------------------------------------------------------------------------------------------
# No room, no permission
# --------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_files_only(_: Path) -> Iterator[None]:
    """Has the system refuse what makes a file larger than 20 kB."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextlib.contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """Fills the file system that a folder is on."""
    filler = folder / "filler"
    with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    try:
        yield
    finally:
        filler.unlink()


@contextlib.contextmanager
def no_permission(folder: Path) -> Iterator[None]:
    """Takes the permission to write into a folder away, from root too."""
    os.chmod(folder, 0o555)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        os.chmod(folder, 0o755)


def fail_in_third_epoch(output: Path, trouble: Callable, capsys) -> str:
    """Runs into trouble when the third checkpoint is to be written; returns the message."""
    save = engine.save_checkpoint
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:

        def spy(accelerator, run, state, *rest):
            if state["epoch"] == 3:
                stack.enter_context(trouble(run.checkpoints))
            return save(accelerator, run, state, *rest)

        patch.setattr(engine, "save_checkpoint", spy)
        capsys.readouterr()
        status = main(*SMALL, "--output", output)
    message = capsys.readouterr().err
    assert status == 2
    assert message.startswith("train.py: error: --output") and message.count("\n") == 1
    assert str(output) in message
    return message


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that every user may enter, which pytest's are not."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX limits and permissions")
@pytest.mark.parametrize(
    ("trouble", "why"),
    [(small_files_only, "MB free"), (no_permission, "Permission denied")],
    ids=["limit", "permission"],
)
def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(trouble, why, public_folder, undisturbed, capsys):
    output = public_folder / "run"
    message = fail_in_third_epoch(output, trouble, capsys)
    run = checkpoints.RunFolder(output)
    last = "epoch-0002-batch-000000"
    assert why in message and last in message and "--resume auto" in message
    assert [path.name for path in run.names()] == [last, "epoch-0001-batch-000000"]
    assert {path.name for path in run.checkpoints.iterdir()} == {path.name for path in run.names()}
    assert main(*SMALL, "--output", output, "--resume", "auto") == 0
    assert_same_run(output, undisturbed)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    import subprocess

    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if (
        sys.platform != "linux"
        or shutil.which("mount") is None
        or subprocess.run(mount, capture_output=True).returncode
    ):
        pytest.skip("this user may not mount a file system; the test with a limit on files shows nearly the same")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_leaves_the_checkpoint_before(small_disk: Path, undisturbed: Path, capsys):
    output = small_disk / "run"
    message = fail_in_third_epoch(output, full_disk, capsys)
    assert "epoch-0002-batch-000000" in message and "make room" in message
    assert [path.name for path in checkpoints.RunFolder(output).names()][0] == "epoch-0002-batch-000000"
    assert main(*SMALL, "--output", output, "--resume", "auto") == 0
    assert_same_run(output, undisturbed)


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX permissions")
def test_a_folder_that_cannot_be_written_is_told_before_training(public_folder: Path, capsys):
    folder = public_folder / "locked"
    folder.mkdir()
    with no_permission(folder):
        assert main(*SMALL, "--output", folder / "run") == 2  # before the data are read, which this user may not
    message = capsys.readouterr().err
    assert "--output" in message and "Permission denied" in message and message.count("\n") == 1
    assert not list(folder.iterdir())


def test_weights_load_without_the_recipe(undisturbed: Path):
    """The checkpoint's and the run's weights are safetensors with the model's own names."""
    names = load_file(undisturbed / "model.safetensors").keys()
    assert any(name.endswith("weight") for name in names) and not any("module." in name for name in names)
