"""recipes/sweep.py: tuning, resuming, sharing a ledger, and the summary's numbers, on digits and with tiny nets."""

import hashlib
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

pytest.importorskip("accelerate")
pytest.importorskip("sklearn")

import engine  # noqa: E402
import finetune  # noqa: E402
import sweep as harness  # noqa: E402
import train as recipe  # noqa: E402
from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402
from data import RecipeError  # noqa: E402
from scipy import stats  # noqa: E402

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "recipes" / "sweep.py"
SWEEPS = sorted((ROOT / "recipes" / "sweeps").glob("*.yaml"))


@pytest.fixture(autouse=True)
def clean_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Undoes what a run in this process leaves behind; runs write nothing outside a folder of their own."""
    monkeypatch.chdir(tmp_path)
    handler, threads = signal.getsignal(signal.SIGTERM), torch.get_num_threads()
    yield
    signal.signal(signal.SIGTERM, handler)
    torch.set_num_threads(threads)
    for state in (AcceleratorState, PartialState, GradientState):
        state._shared_state.clear()


def tiny(**changes: object) -> dict:
    """A sweep of 2 x (3 + 2) runs of a few milliseconds."""
    spec = dict(
        dataset_name="digits",
        arguments=dict(
            dataset="digits",
            epochs=2,
            batch_size=64,
            opt="momentum",
            weight_decay=0,
            model_kwargs=dict(width=16, depth=2),
        ),
        methods=dict(
            plain=dict(model="mlp_cifar"), affine=dict(model="mlp_cifar_affine", model_kwargs=dict(scale="rms"))
        ),
        tune=dict(grid=dict(lr=[0.0001, 0.1, 0.001]), seeds=[7], val_fraction=0.2),
        seeds=[0, 1],
        baseline="plain",
    )
    return spec | changes


def write(folder: Path, spec: dict, name: str = "tiny.yaml") -> Path:
    """Writes a sweep's file."""
    path = folder / name
    path.write_text(yaml.safe_dump(spec, sort_keys=False))
    return path


def lines(path: Path) -> list[dict]:
    """Reads a ledger by hand."""
    return [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]


def run(path: Path, *options: object) -> int:
    """Runs a sweep in this process."""
    return harness.main(["run", str(path), *map(str, options)])


def error_of(argv: list[object], capsys: pytest.CaptureFixture) -> str:
    """Returns the message of a mistake, after checking its form."""
    assert harness.main(list(map(str, argv))) == 2
    stdout, stderr = capsys.readouterr()
    assert stdout == "" and stderr.startswith("sweep.py: error: ") and stderr.count("\n") == 1, stderr
    return stderr.removeprefix("sweep.py: error: ")


# --------------------------------------------------------------------------------------------------------------------
# Whole sweeps
# --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished sweep."""
    path = write(tmp_path_factory.mktemp("whole"), tiny())
    assert run(path) == 0
    return path


def test_every_run_is_there_once(whole: Path):
    records = lines(whole)
    counts = {(r["method"], r["phase"]): 0 for r in records}
    for record in records:
        counts[record["method"], record["phase"]] += 1
    assert counts == {
        ("plain", "tune"): 3, ("plain", "final"): 2, ("affine", "tune"): 3, ("affine", "final"): 2
    }  # fmt: skip
    assert len({record["key"] for record in records}) == 10


def test_the_best_rate_by_validation_is_taken(whole: Path):
    records = lines(whole)
    for method in ("plain", "affine"):
        tuning = [r for r in records if r["method"] == method and r["phase"] == "tune"]
        best = max(tuning, key=lambda r: r["metrics"]["val_top1"])["arguments"]["lr"]
        assert best == 0.1  # in two epochs the other rates learn next to nothing
        assert {r["arguments"]["lr"] for r in records if r["method"] == method and r["phase"] == "final"} == {best}


def test_tuning_leaves_the_test_set_alone_and_the_final_runs_read_it_once(tmp_path: Path, monkeypatch):
    sizes = []
    evaluate = engine.evaluate

    def spy(accelerator, model, loader, *rest):
        sizes.append(len(loader.dataset))
        return evaluate(accelerator, model, loader, *rest)

    monkeypatch.setattr(engine, "evaluate", spy)
    path = write(tmp_path, tiny(methods={"plain": {"model": "mlp_cifar"}}))
    assert run(path) == 0
    val_images = lines(path)[0]["metrics"]["val_images"]
    assert val_images == pytest.approx(0.2 * 1438, abs=5)
    assert sizes == [val_images] * 6 + [359] * 2  # three runs of two epochs, then two seeds
    for record in lines(path):
        tuning = record["phase"] == "tune"
        assert any("test" in name for name in record["metrics"]) != tuning
        assert ("val_top1" in record["curve"]) == ("val_top1" in record["metrics"]) == tuning
        assert record["metrics"]["train_images"] + record["metrics"]["val_images"] == 1797 - 359
        assert not any("test" in name for name in record["curve"])


def test_a_line_has_what_the_run_was_and_nothing_of_the_machine(whole: Path):
    for record in lines(whole):
        assert list(record) == [
            *("key", "sweep", "phase", "method", "arguments", "metrics", "curve"),
            *("device", "threads", "versions", "revision", "date"),
        ]
        assert record["sweep"] == "tiny" and record["threads"] == 1
        assert record["versions"]["torch"] == torch.__version__
        assert record["metrics"]["seconds"] > 0 and record["metrics"]["epochs"] == 2
        assert len(record["curve"]["train_loss"]) == len(record["curve"]["seconds"]) == 2
        assert str(whole.parent) not in json.dumps(record) and platform.node() not in json.dumps(record)


def test_a_run_in_a_sweep_is_the_run_of_train_py_alone(tmp_path: Path):
    """Whatever ran before it, with dropout and augmentation that both draw from a generator."""
    kwargs = dict(width=16, depth=2, drop_rate=0.2)
    arguments = tiny()["arguments"] | dict(augment="crop-flip", model_kwargs=kwargs)
    path = write(tmp_path, tiny(arguments=arguments))
    assert run(path) == 0
    torch.rand(3)
    for record in [lines(path)[i] for i in (4, -1)]:
        options = dict(record["arguments"])
        pairs = [f"{key}={value}" for key, value in options.pop("model_kwargs").items()]
        argv = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        output = tmp_path / record["key"]
        assert recipe.main([*argv, "--model-kwargs", *pairs, "--no-progress", "--output", str(output)]) == 0
        AcceleratorState._reset_state(True)
        results = json.loads((output / "results.json").read_text())
        compared = [name for name in record["metrics"] if name not in ("seconds", "diverged", "chance")]
        assert {"train_loss", "train_top1"} < set(compared) and len(compared) == 10 - (record["phase"] == "tune")
        assert {name: record["metrics"][name] for name in compared} == {name: results[name] for name in compared}


def test_finished_runs_are_skipped_and_more_seeds_run_only_what_is_new(whole: Path, tmp_path: Path, monkeypatch):
    ledger = tmp_path / "tiny.jsonl"
    ledger.write_bytes(whole.with_suffix(".jsonl").read_bytes())
    fitted = []
    fit = recipe.fit
    monkeypatch.setattr(recipe, "fit", lambda args, *rest: fitted.append(args.seed) or fit(args, *rest))
    before = ledger.read_bytes()
    assert run(write(tmp_path, tiny())) == 0
    assert fitted == [] and ledger.read_bytes() == before
    assert run(write(tmp_path, tiny(seeds=[0, 1, 2]))) == 0
    assert fitted == [2, 2] and ledger.read_bytes().startswith(before) and len(lines(ledger)) == 12
    assert run(write(tmp_path, tiny(seeds=[0, 1, 2])), "--set", "epochs=1", "--limit", 1) == 0
    assert fitted == [2, 2, 7] and lines(ledger)[-1]["arguments"]["epochs"] == 1


def test_an_interrupted_sweep_goes_on(whole: Path, tmp_path: Path, monkeypatch, capsys):
    path = write(tmp_path, tiny())
    calls = 0
    fit = recipe.fit

    def stop(*arguments):
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt(signal.SIGTERM)
        return fit(*arguments)

    monkeypatch.setattr(recipe, "fit", stop)
    assert run(path) == 128 + signal.SIGTERM
    assert "interrupted" in capsys.readouterr().err
    assert len(lines(path)) == 4
    assert run(path) == 0
    assert calls == 5 + 6

    def results(file: Path) -> dict:
        return {r["key"]: {k: v for k, v in r["metrics"].items() if k != "seconds"} for r in lines(file)}

    assert results(path) == results(whole)


def test_a_torn_last_line_is_reported_and_its_run_done_again(whole: Path, tmp_path: Path, capsys):
    path = write(tmp_path, tiny())
    ledger = path.with_suffix(".jsonl")
    good = whole.with_suffix(".jsonl").read_bytes()
    ledger.write_bytes(good[:-100])
    assert harness.main(["summary", str(path)]) == 0
    stdout, stderr = capsys.readouterr()
    assert "line 10 is torn" in stderr and "1 of 10 runs are missing" in stdout
    assert ledger.read_bytes() == good[:-100]  # a summary repairs nothing
    assert run(path) == 0
    assert "removed a torn last line" in capsys.readouterr().err
    assert len(lines(path)) == 10
    assert ledger.read_bytes().splitlines()[:9] == good.splitlines()[:9]
    assert lines(path)[-1]["metrics"]["test_top1"] == lines(whole)[-1]["metrics"]["test_top1"]


def test_a_last_line_without_its_end_is_kept(tmp_path: Path):
    ledger = harness.Ledger(tmp_path / "a.jsonl")
    ledger.path.write_text('{"key": "01", "metrics": {}}')
    ledger.append({"key": "02", "metrics": {}})
    assert list(ledger.read()) == ["01", "02"]


def test_a_line_that_is_no_record_is_reported_and_stays(tmp_path: Path, capsys):
    ledger = harness.Ledger(tmp_path / "a.jsonl")
    ledger.path.write_text('<<<<<<< HEAD\n{"key": "01", "metrics": {"a": 1}}\n{"key": "01", "metrics": {"a": 2}}\n')
    ledger.append({"key": "02", "metrics": {}})
    assert ledger.read() == {"01": {"key": "01", "metrics": {"a": 1}}, "02": {"key": "02", "metrics": {}}}
    ledger.read()
    assert capsys.readouterr().err.count("line 1 is no record") == 1
    assert ledger.path.read_text().startswith("<<<<<<< HEAD\n")


def test_divergence_is_a_result(tmp_path: Path, capsys):
    tune = dict(grid=dict(lr=[1e30, 0.1]), seeds=[7], val_fraction=0.2)
    path = write(tmp_path, tiny(methods={"plain": {"model": "mlp_cifar", "model_kwargs": {"act": "relu"}}}, tune=tune))
    assert run(path) == 0
    records = lines(path)
    assert [record["metrics"]["diverged"] for record in records] == [True, False, False, False]
    assert records[0]["metrics"]["val_top1"] is None and records[0]["metrics"]["chance"] == 0.1
    assert records[0]["metrics"]["epochs"] == 1
    assert "diverged in epoch 1" in capsys.readouterr().out
    assert harness.main(["summary", str(path)]) == 0
    assert "| 1 + 0 |" in capsys.readouterr().out


def test_two_processes_share_a_ledger(tmp_path: Path, capsys):
    """And one that is killed gives its run back."""
    path = write(tmp_path, tiny(arguments=tiny()["arguments"] | dict(epochs=8), seeds=list(range(15))))
    ledger = harness.Ledger(path.with_suffix(".jsonl"))
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    command = [sys.executable, str(SCRIPT), "run", str(path)]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline().startswith("[1/36] tune")
        assert run(path, "--limit", 8) == 0  # while the other one goes on
        other.kill()
        theirs = 1 + other.stdout.read().count("/36] ")
    ours = capsys.readouterr().out.count("/36] ")
    assert ours > 0 and theirs > 0
    done = ledger.path.read_bytes().count(b"\n")
    assert done - ours - theirs in (0, 1)  # its last line may not have been announced
    assert run(path) == 0
    keys = [record["key"] for record in lines(path)]
    assert len(keys) == len(set(keys)) == 36


def test_a_claimed_run_is_left_to_its_owner(tmp_path: Path, capsys):
    """Locks belong to processes, so another one has to hold it."""
    path = write(tmp_path, tiny(methods={"plain": {"model": "mlp_cifar"}}))
    run_ = harness.Sweep(path).tuning["plain"][0]
    ledger = harness.Ledger(path.with_suffix(".jsonl"))
    locker = (
        "import fcntl, sys\nfile = open(sys.argv[1], 'ab')\n"
        "fcntl.lockf(file, fcntl.LOCK_EX, 1, int(sys.argv[2]))\nprint('locked', flush=True)\nsys.stdin.read()"
    )
    command = [sys.executable, "-c", locker, str(ledger.lock_path), str(ledger._offset(run_.key))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout.readline() == "locked\n"
        assert not ledger.claim(run_.key)
        assert run(path, "--limit", 2) == 0
        assert [record["arguments"]["lr"] for record in lines(path)] == [0.1, 0.001]
        assert run(path, "--minutes", 0.01) == 0  # waits, since the final runs depend on it
        out = capsys.readouterr().out
        assert "waiting for 1 runs" in out and "3 of 5 left" in out
        assert harness.main(["status", str(path)]) == 0
        assert "running: tune plain lr=0.0001 seed=7" in capsys.readouterr().out
    assert run(path) == 0
    assert len(lines(path)) == 5


def test_a_run_that_another_process_has_just_finished_is_not_done_again(whole: Path, tmp_path: Path, monkeypatch):
    """Between the look at the ledger and the claim."""
    path = write(tmp_path, tiny())
    claim = harness.Ledger.claim

    def late(ledger: harness.Ledger, key: str) -> bool:
        if not ledger.path.exists():
            ledger.path.write_bytes(whole.with_suffix(".jsonl").read_bytes())
        return claim(ledger, key)

    monkeypatch.setattr(harness.Ledger, "claim", late)
    assert run(path) == 0
    assert lines(path) == lines(whole)


def test_methods_may_differ_in_precision(tmp_path: Path):
    """accelerate keeps such settings for the life of a process."""
    arguments = tiny()["arguments"] | dict(lr=0.1)
    methods = {name: dict(model="mlp_cifar", mixed_precision=name) for name in ("bf16", "no")}
    path = write(tmp_path, tiny(arguments=arguments, methods=methods, tune={}, seeds=[0], baseline=None))
    assert run(path) == 0
    losses = [record["metrics"]["train_loss"] for record in lines(path)]
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=0.05)


def test_run_folders_are_kept_on_request(tmp_path: Path):
    path = write(tmp_path, tiny(keep=True, methods={"plain": {"model": "mlp_cifar"}}, tune={}, seeds=[0]))
    assert run(path, "--set", "lr=0.1") == 0
    (record,) = lines(path)
    folder = tmp_path / "runs" / "tiny" / record["key"]
    results = json.loads((folder / "results.json").read_text())
    assert results["test_top1"] == record["metrics"]["test_top1"] and (folder / "model.safetensors").is_file()


def test_a_sweep_leaves_only_its_ledger(whole: Path):
    assert {path.name for path in whole.parent.iterdir()} == {"tiny.yaml", "tiny.jsonl", "tiny.jsonl.lock"}


def test_dry_run_and_status(whole: Path, tmp_path: Path, capsys):
    path = write(tmp_path, tiny())
    assert run(path, "--dry-run", "--only", "affine") == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in out] == ["todo"] * 4 and out[-1].endswith("final affine seeds 0 1")
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny.yaml"]
    path.with_suffix(".jsonl").write_text("".join(whole.with_suffix(".jsonl").read_text().splitlines(True)[:4]))
    assert harness.main(["status", str(path)]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert table[1][:4] == ["plain", "3/3", "0/2", "0"] and table[2][:4] == ["affine", "1/3", "0/2", "0"]
    assert run(path, "--dry-run") == 0
    out = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("done") for line in out) == 4
    assert sum("final plain lr=0.1 seed=" in line for line in out) == 2


# --------------------------------------------------------------------------------------------------------------------
# The summary, on ledgers made by hand
# --------------------------------------------------------------------------------------------------------------------

SEEDS = [3, 4, 5, 6]
TEST = {"plain": [0.50, 0.52, 0.49, 0.55], "affine": [0.53, 0.56, 0.50, None]}
CURVES = {"plain": [[0.2, 0.41, 0.5], [0.1, 0.3, 0.54]], "affine": [[0.45, 0.5, 0.6], [0.3, 0.45, 0.7]]}


def made_up(tmp_path: Path, missing: int = 0, **changes: object) -> tuple[harness.Sweep, Path]:
    """Writes a ledger of the best rate 0.1 for plain and 0.001 for affine, whose last run diverged.

    Every epoch took two seconds, and the curves of the best rates' two tuning seeds are CURVES.
    """
    tune = dict(grid=dict(lr=[0.0001, 0.001, 0.1]), seeds=[7, 8], val_fraction=0.2)
    path = write(tmp_path, tiny(seeds=SEEDS, tune=tune, **changes))
    sweep = harness.Sweep(path)
    ledger = harness.Ledger(path.with_suffix(".jsonl"))
    versions = dict(torch="2", timm="1")
    common = dict(versions=versions, revision="abc", device="cpu", threads=1)
    records = []
    for method, best in (("plain", 0.1), ("affine", 0.001)):
        for index, run_ in enumerate(sweep.tuning[method]):
            good = run_.point["lr"] == best
            curve = CURVES[method][index % 2] if good else [0.1, 0.1, 0.2]
            metrics = dict(val_top1=curve[-1], seconds=6, epochs=3, diverged=False, chance=0.1)
            curve = dict(val_top1=curve, seconds=[2, 2, 2])
            arguments = dict(run_.arguments)
            records.append(dict(common, key=run_.key, phase="tune", arguments=arguments, metrics=metrics, curve=curve))
    for method, best in (("plain", 0.1), ("affine", 0.001)):
        for seed, value in zip(SEEDS, TEST[method], strict=True):
            run_ = sweep.final_run(method, {"lr": best}, seed)
            metrics = dict(test_top1=value, seconds=10 + seed, epochs=3, diverged=value is None, chance=0.1)
            arguments = dict(run_.arguments)
            records.append(dict(common, key=run_.key, phase="final", arguments=arguments, metrics=metrics, curve={}))
    for record in records[: len(records) - missing]:
        ledger.append(record)
    return sweep, path


def test_summary_numbers(tmp_path: Path):
    sweep, path = made_up(tmp_path)
    plain, affine = harness.summarise(sweep, harness.Ledger(path.with_suffix(".jsonl")).read())
    assert plain.choice.point == {"lr": 0.1} and affine.choice.point == {"lr": 0.001}
    assert [score for _, score in affine.choice.scores] == pytest.approx([0.2, 0.65, 0.2])
    assert affine.test == {3: 0.53, 4: 0.56, 5: 0.50, 6: 0.1}  # the diverged run counts as chance
    assert plain.difference is None
    # Differences 0.03, 0.04, 0.01, -0.45: mean -0.37 / 4; Student's 97.5 % quantile for 3 degrees is 3.182446.
    half = 3.182446305 * statistics.stdev([0.03, 0.04, 0.01, -0.45]) / 2
    assert affine.difference.mean == pytest.approx(-0.0925)
    assert (affine.difference.low, affine.difference.high) == pytest.approx((-0.0925 - half, -0.0925 + half))
    peer = stats.ttest_rel([0.53, 0.56, 0.50, 0.1], TEST["plain"]).confidence_interval(0.95)
    assert (affine.difference.low, affine.difference.high) == pytest.approx((peer.low, peer.high))
    # plain ends at (0.5 + 0.54) / 2 = 0.52, of which 80 % is 0.416.
    assert plain.times == [(3, 6, 2, 2)]
    assert affine.times == [(1.5, 3, 2, 2)]


def test_summary_table(tmp_path: Path, capsys):
    _, path = made_up(tmp_path, thresholds=[0.8, 1.1])
    assert harness.main(["summary", str(path)]) == 0
    out = capsys.readouterr().out.splitlines()
    mean, sd = 100 * statistics.fmean(TEST["plain"]), 100 * statistics.stdev(TEST["plain"])
    assert (
        out[2]
        == f"| `plain` | lr=0.1 (!) | 52.00 | {mean:.2f} ± {sd:.2f} | 4 | 0 + 0 | 14.5 |  | 3 (6.0) | not reached |"
    )
    assert (mean, sd) == pytest.approx((51.5, 2.6457513))
    # Its whole runs took 13, 14 and 15 s. 110 % of 0.52 is 0.572, which both runs reach last.
    affine = ["`affine`", "lr=0.001", "65.00", "42.25 ± 21.64", "4", "0 + 1", "14.0", "-9.25 [-47.23, +28.73]"]
    assert out[3] == f"| {' | '.join(affine)} | 1.5 (3.0) | 3 (6.0) |"
    text = "\n".join(out)
    assert "`plain`: best rate is at the grid's edge (lr=0.1 of 0.0001, 0.001, 0.1)" in text
    assert "`affine`: best" not in text and "ties" not in text and "Unfinished" not in text
    assert "* `affine`: lr=0.0001: 20.00, **lr=0.001: 65.00**, lr=0.1: 20.00" in text


def test_summary_of_part_of_a_sweep(tmp_path: Path, capsys):
    sweep, path = made_up(tmp_path, missing=3)
    rows = harness.summarise(sweep, harness.Ledger(path.with_suffix(".jsonl")).read())
    assert (rows[1].difference.n, rows[1].difference.low) == (1, None)
    assert rows[1].difference.mean == pytest.approx(0.03)
    assert harness.main(["summary", str(path)]) == 0
    assert "3 of 20 runs are missing" in capsys.readouterr().out
    path.with_suffix(".jsonl").unlink()
    assert harness.main(["summary", str(path)]) == 0
    assert "| `plain` |  |  |  | 0 | 0 + 0 |  |  |  |" in capsys.readouterr().out


def test_summary_takes_another_baseline_and_says_how_it_was_made(tmp_path: Path, capsys):
    _, path = made_up(tmp_path)
    out = tmp_path / "tiny.md"
    assert harness.main(["summary", str(path), "--baseline", "affine", "--out", str(out)]) == 0
    text = out.read_text()
    assert "+9.25 [-28.73, +47.23]" in text and "less `affine`" in text
    assert "python recipes/sweep.py summary tiny.yaml --baseline affine --out tiny.md" in text
    assert str(tmp_path) not in text
    assert capsys.readouterr().out == ""


def test_methods_may_have_grids_and_baselines_of_their_own(tmp_path: Path):
    methods = tiny()["methods"]
    methods["affine"] |= dict(grid=dict(lr=[1, 2, 3]), baseline="affine")
    sweep = harness.Sweep(write(tmp_path, tiny(methods=methods)))
    assert sweep.points("affine") == [{"lr": 1}, {"lr": 2}, {"lr": 3}]
    assert sweep.baselines == {"plain": "plain", "affine": "affine"}
    methods["affine"]["grid"] = dict(lr=[1, 2])
    with pytest.raises(RecipeError, match="affine: grid: needs as many values of lr"):
        harness.Sweep(write(tmp_path, tiny(methods=methods)))


def test_choice_flags_ties_and_edges_of_every_axis(tmp_path: Path):
    grid = dict(lr=[0.01, 0.1, 0.03], weight_decay=[0.5, 0])
    sweep = harness.Sweep(write(tmp_path, tiny(tune=dict(grid=grid, seeds=[7, 8, 9], val_fraction=0.2))))
    # Equal means, though not to the last bit: (0.1 + 0.2 + 0.3) / 3 against (0.3 + 0.2 + 0.1) / 3 and the like.
    scores = {(0.03, 0.5): [0.7, 0.1, 0.1], (0.03, 0): [0.1, 0.1, 0.7]}
    records = {}
    for run_ in sweep.tuning["plain"]:
        value = scores.get((run_.point["lr"], run_.point["weight_decay"]), [0.2] * 3)[run_.args.seed - 7]
        records[run_.key] = dict(phase="tune", metrics=dict(val_top1=value, chance=0.1))
    choice = sweep.choose("plain", records)
    assert choice.point == {"lr": 0.03, "weight_decay": 0.5}
    assert choice.flags == [
        "best weight_decay is at the grid's edge (weight_decay=0.5 of 0.5, 0)",
        "lr=0.03 weight_decay=0.5 ties with lr=0.03 weight_decay=0",
    ]
    del records[sweep.tuning["plain"][-1].key]
    assert sweep.choose("plain", records) is None


# --------------------------------------------------------------------------------------------------------------------
# Keys and mistakes
# --------------------------------------------------------------------------------------------------------------------


def test_keys_follow_what_matters_and_nothing_else(tmp_path: Path):
    def keys(settings: dict | None = None, **changes: object) -> set[str]:
        sweep = harness.Sweep(write(tmp_path, tiny(**changes)), settings)
        return {run_.key for name in sweep.tuning for run_ in sweep.tuning[name]}

    usual = keys()
    assert len(usual) == 6
    assert keys({"dataset": str(tmp_path), "workers": 3}) == usual
    assert keys(seeds=[9], baseline="affine", tune=tiny()["tune"] | {"epochs": 2}) == usual
    swapped = dict(reversed(tiny()["methods"].items()))
    assert keys(methods=swapped) == usual
    for name, value in dict(epochs=3, label_smoothing=0.1, channels_last=True, dataset_name="other").items():
        assert not keys({name: value}) & usual, name


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_the_sweeps_of_the_repository_can_be_built(path: Path):
    sweep = harness.Sweep(path)
    assert sweep.dataset_name == "cifar10"
    plan = sweep.plan({})
    tuned = sum(map(len, sweep.tuning.values()))
    assert len({run_.key for run_ in plan}) == len(plan) == (tuned or len(sweep.methods) * len(sweep.seeds))
    for name in sweep.methods:
        args = next(run_.args for run_ in plan if run_.method == name)
        wanted = (0.1, "never") if tuned else (0.0, "end")
        assert (args.dataset, args.val_fraction, args.test) == ("uoft-cs/cifar10", *wanted)
        if sweep.methods[name].get("recipe") != "finetune":  # that wants a trained net
            recipe.check_names(args)
            data = type("Data", (), dict(config=dict(input_size=(3, 32, 32)), label_names=range(10)))
            recipe.build_optimizer(args, recipe.build_model(args, data))
        held_back = sweep.phases["final"].get("val_fraction", 0)  # for the epochs to an accuracy
        assert sweep.final_run(name, sweep.points(name)[0], 0).args.val_fraction == held_back


@pytest.mark.parametrize(
    ("changes", "options", "parts"),
    [
        (dict(method={}), [], ["'method'", "methods"]),
        (dict(methods={}), [], ["methods", "at least one"]),
        (dict(methods={"a": {"model": "mlp_cifa"}}, baseline=None), [], ["'a'", "'mlp_cifa'", "mlp_cifar"]),
        (dict(methods={"a": {"rate": 1}}, baseline=None), [], ["methods: a", "--rate=1"]),
        (dict(methods={"a": {"recipe": "fit"}}, baseline=None), [], ["methods: a", "recipe 'fit'", "train, finetune"]),
        (dict(methods={"a": {"lr": 0}}, baseline=None, tune={}), [], ["methods: a", "--lr", "'0'"]),
        (dict(methods={"a": {"seed": 0}}, baseline=None), [], ["'seed'", "leave it out"]),
        (dict(methods={"a": dict(model="mlp_cifar", model_kwargs={"act": 1})}, baseline=None), [], ["'a'", "act=1"]),
        (dict(seeds=[1, 1]), [], ["seeds", "[1, 1]"]),
        (dict(tune=dict(grid=dict(lr=[0.1]))), [], ["val_fraction"]),
        (dict(baseline="nobody"), [], ["baseline 'nobody'", "plain, affine"]),
        ({}, ["--only", "nobody"], ["--only 'nobody'", "plain, affine"]),
        ({}, ["--set", "lr=1"], ["--set lr", "varies"]),
        ({}, ["--set", "lr"], ["--set", "key=value"]),
        ({}, ["--set", "dataset=no/such/folder"], ["--dataset", "no/such/folder"]),
        ({}, ["--threads", 0], ["--threads", "'0'"]),
        ({}, ["--ledger", "tiny.yaml/no.jsonl"], ["--ledger"]),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_and_leave_nothing(changes, options, parts, tmp_path: Path, capsys):
    path = write(tmp_path, tiny(**changes))
    message = error_of(["run", path, *options], capsys)
    for part in parts:
        assert part in message
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny.yaml"]


def test_mistakes_in_files_are_one_line(tmp_path: Path, capsys):
    (tmp_path / "list.yaml").write_text("- a\n- b\n")
    (tmp_path / "bad.yaml").write_text("a: [\n")
    for name in ("none", "list", "bad"):
        assert f"{name}.yaml" in error_of(["status", tmp_path / f"{name}.yaml"], capsys)


def test_train_py_can_leave_the_test_set_out(tmp_path: Path, capsys):
    argv = ["--model", "mlp_cifar", "--max-steps", "2", "--no-progress", "--output", str(tmp_path / "run")]
    with pytest.raises(SystemExit):
        recipe.main([*argv, "--test", "never"])
    assert "--test never" in capsys.readouterr().err
    assert recipe.main([*argv, "--test", "never", "--val-fraction", "0.1"]) == 0
    assert "validation accuracy" in capsys.readouterr().out
    AcceleratorState._reset_state(True)
    assert not any(
        "test" in name for name in json.loads((tmp_path / "run" / "results.json").read_text()) if name != "arguments"
    )
    assert recipe.main([*argv, "--test", "end", "--overwrite"]) == 0
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert 0 <= results["test_top1"] <= 1 and math.isfinite(results["test_loss"])
    assert (tmp_path / "run" / "log.csv").read_text().splitlines()[0] == "epoch,train_loss,train_top1,lr,seconds"


COMMITTED = sorted((ROOT / "recipes").rglob("*.jsonl"))


def test_methods_may_be_runs_of_finetune_py(tmp_path: Path):
    """A conversion of a trained net in the same sweep as a net from scratch; its run is finetune.py's alone."""
    trained = tmp_path / "trained"
    flags = ["--model", "mlp_cifar", "--model-kwargs", "width=16", "depth=2", "norm=layer", "--epochs", "1"]
    assert recipe.main([*flags, "--output", str(trained), "--no-progress", "--no-plot"]) == 0
    converted = dict(recipe="finetune", model=str(trained), model_kwargs={}, convert="affine", keep_head=True)
    spec = tiny(
        methods=dict(scratch=dict(model="mlp_cifar_affine"), converted=converted), baseline="scratch", seeds=[3]
    )
    spec["arguments"]["model_kwargs"] = {}
    path = write(tmp_path, spec)
    assert run(path) == 0
    records = {(line["method"], line["phase"]): line for line in lines(path) if line["phase"] == "final"}
    assert len(lines(path)) == 2 * (3 + 1)
    record = records["converted", "final"]
    assert record["arguments"]["recipe"] == "finetune" and record["arguments"]["convert"] == "affine"
    assert "recipe" not in records["scratch", "final"]["arguments"]
    for line in lines(path):
        kept = harness.ledger_arguments(
            harness.to_args(line["arguments"], "test"), "digits", line["arguments"].get("recipe", "train")
        )
        assert kept == line["arguments"]
    alone = ["--convert", "affine", "--keep-head", "--epochs", "2", "--batch-size", "64", "--opt", "momentum"]
    alone += ["--weight-decay", "0", "--lr", str(record["arguments"]["lr"]), "--seed", "3", "--test", "end"]
    output = tmp_path / "alone"
    assert finetune.main([*alone, "--model", str(trained), "--output", str(output), "--no-progress", "--no-plot"]) == 0
    results = json.loads((output / "results.json").read_text())
    assert results["test_loss"] == pytest.approx(record["metrics"]["test_loss"], rel=1e-5)
    # At a rate of next to nothing the converted net is what was trained, and the other as it was made.
    slow = {line["method"]: line["metrics"]["val_top1"] for line in lines(path) if line["arguments"]["lr"] == 0.0001}
    assert slow["converted"] > slow["scratch"] + 0.2


@pytest.mark.parametrize("ledger", COMMITTED, ids=lambda path: path.stem)
def test_keys_of_finished_runs_stay_what_they_are(ledger: Path):
    """An argument that train.py gets later must not make a run that is done look like one that is missing."""
    records = [json.loads(line) for line in ledger.read_text().splitlines()]
    assert records
    for record in records:
        arguments = dict(record["arguments"])
        args = harness.to_args(arguments, str(ledger))
        kept = harness.ledger_arguments(args, arguments["dataset"], arguments.get("recipe", "train"))
        assert kept == arguments
        assert hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16] == record["key"]


def test_every_argument_changes_the_key_unless_it_cannot_change_the_result():
    before = harness.to_args({"model": "mlp_cifar"}, "test")
    changes = {"mixup": 0.2, "grad_accum_steps": 2, "model_ema": True, "reprob": 0.1, "sched": "linear"}
    for name, value in changes.items():
        after = harness.to_args({"model": "mlp_cifar", name: value}, "test")
        changed = harness.ledger_arguments(after, "digits")
        assert changed == harness.ledger_arguments(before, "digits") | {name: value}
    for name, value in {"workers": 2, "checkpoint_steps": 5, "no_plot": True}.items():
        after = harness.to_args({"model": "mlp_cifar", name: value}, "test")
        assert harness.ledger_arguments(after, "digits") == harness.ledger_arguments(before, "digits")
