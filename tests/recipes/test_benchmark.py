"""The benchmarks: that they run and record everything, and that what they measure is what they say. Never a time."""

import copy
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
from torch import nn

BENCHMARK = Path(__file__).parents[2] / "recipes" / "benchmark"
sys.path.insert(0, str(BENCHMARK))

import layers  # noqa: E402
import models  # noqa: E402
import timing  # noqa: E402

QUICK = ["--quick", "--repeats", "2"]


def run_quick(program, tmp_path: Path, *argv: str) -> dict:
    """Runs a program and checks its record as far as both have the same."""
    file = tmp_path / "out.json"
    threads = torch.get_num_threads()
    assert program.main([*QUICK, "--json", str(file), *argv]) == 0
    assert torch.get_num_threads() == threads
    record = json.loads(file.read_text())
    assert record["complete"] and record["failed"] == []
    assert record["arguments"]["repeats"] == 2 and record["arguments"]["quick"] is True
    environment = record["environment"]
    assert environment["threads"] == threads and environment["cpu"] and environment["date"]
    assert environment["versions"]["torch"] == torch.__version__
    assert set(environment["versions"]) == {"affdiv_zoo", "python", "timm", "torch"}
    for row in record["rows"]:
        for key in ("ours", "peer", "ratio", "ratio_q1", "ratio_q3"):
            assert row[key] > 0 and math.isfinite(row[key]), row
        assert row["ratio_q1"] <= row["ratio"] <= row["ratio_q3"]
        assert row["repeats"] == (2 if row["unit"] == "ms" else 1) and row["calls"] >= 1
    return record


def test_layers_measures_every_row(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    record = run_quick(layers, tmp_path)
    names = [row["name"] for row in record["rows"]]
    rows, skipped = layers.rows(layers.parser("").parse_args(QUICK))
    assert names == [row.name for row in rows] and len(set(names)) == len(names)
    assert record["skipped"] == skipped
    assert {
        "quick-8-6/nchw/train/patchnorm-c+relu:conv+bn+relu",
        "quick-8to16-6/nhwc/infer/patchnorm+relu:conv+bias+relu",
        "quick-8-6/nhwc/train/gradient:conv+bias",
        "quick-8to16/train/affinelike-c:ln+linear",
    } <= set(names)
    table = capsys.readouterr().out.splitlines()
    assert all(any(line.startswith(name) for line in table) for name in names)
    assert max(map(len, table)) <= 110


def test_models_measures_every_row(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    record = run_quick(models, tmp_path, "--only", "resnet20_cifar/", "vit_nano_patch4_32/nchw")
    units = {row["name"]: row["unit"] for row in record["rows"]}
    pair = "resnet20_cifar_patchnorm:resnet20_cifar"
    for fmt in ("nchw", "nhwc"):
        for quantity in ("step", "forward", "infer", "infer-folded"):
            assert units[f"{pair}/{fmt}/{quantity}"] == "ms"
        for quantity in ("saved", "peak"):
            assert units[f"{pair}/{fmt}/{quantity}"] == "MiB"
    measured = {name.partition("/")[0] for name in units}
    assert measured | {s["name"] for s in record["skipped"]} >= {pair, "vit_nano_patch4_32_affine:vit_nano_patch4_32"}
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 110


def test_models_compares_any_two(tmp_path: Path) -> None:
    argv = ["--model", "resnet20_cifar_patchnorm", "--peer", "resnet20_cifar_patchnorm", "--image-size", "8"]
    argv += ["--peer-kwargs", "correction=none", "center=false", "--memory-format", "nchw", "--only", "/s"]
    record = run_quick(models, tmp_path, *argv)
    assert record["arguments"]["peer_kwargs"] == {"correction": "none", "center": False}
    saved = {row["name"].rpartition("/")[2]: row for row in record["rows"]}["saved"]
    assert saved["ours"] > saved["peer"]  # the correction needs at least its divisors again


def test_runs_as_a_script_and_lists_the_rows_asked_for() -> None:
    command = [sys.executable, str(BENCHMARK / "layers.py"), "--list", "--only", "r18-64-*nchw*c+relu:conv+bn"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert out == [f"r18-64-56/nchw/{mode}/patchnorm-c+relu:conv+bn+relu" for mode in ("train", "infer")]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--repeats", "0"], "--repeats 0"),
        (["--device", "nowhere"], "--device nowhere"),
        (["--json", "no/such/folder/out.json"], "there is no folder"),
        (["--model", "resnet18"], "belong together"),
        (["--model", "resnet18", "--peer", "resnet17"], "'resnet17'"),
        (["--model-kwargs", "center"], "key=value"),
    ],
)
def test_mistakes_are_named(argv: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as e:
        models.main(argv)
    assert e.value.code == 2 and message in capsys.readouterr().err


def test_a_row_that_fails_does_not_stop_the_others(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    def fail():
        raise RuntimeError("no such kernel\nand more")

    rows = [timing.Row("a", fail), timing.Row("b", lambda: (3.0, 2.0), "MiB")]
    args = timing.parse(timing.parser(""), ["--json", str(tmp_path / "out.json")])
    assert timing.run(rows, [], args) == 1
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["failed"] == [{"name": "a", "error": "RuntimeError: no such kernel\nand more"}]
    assert [(row["name"], row["ratio"]) for row in record["rows"]] == [("b", 1.5)]
    assert "a failed: RuntimeError: no such kernel" in capsys.readouterr().out
    args.only = ["c"]
    assert timing.run(rows, [], args) == 2


def test_calls_alternate_and_a_slowdown_of_both_cancels(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = 0.0, []

    def work(name: str, milliseconds: float) -> None:
        nonlocal clock
        calls.append(name)
        clock += 1e-3 * milliseconds * (10.0 if len(calls) > 20 else 1.0)  # from the eighth pair on all is slower

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock))
    result = timing.time_pair(lambda: work("A", 3.0), lambda: work("B", 2.0), seconds=1.0, repeats=9)
    assert calls == ["A", "B"] * (timing.WARM_UP_CALLS + 9)
    assert result["repeats"] == 9 and result["calls"] == 1
    assert [result[k] for k in ("ratio", "ratio_q1", "ratio_q3")] == pytest.approx([1.5] * 3)
    assert (result["ours"], result["peer"]) == pytest.approx((3.0, 2.0))  # medians: seven of nine pairs are fast

    calls.clear()
    result = timing.time_pair(lambda: work("A", 0.02), lambda: work("B", 0.01), seconds=1e-9)
    assert result["repeats"] == timing.MIN_PAIRS and result["calls"] > 1  # calls too short for the clock, in a bunch
    assert result["ratio"] == pytest.approx(2.0, rel=0.1)


def test_saved_bytes_of_nets_known_by_hand() -> None:
    linear, x = nn.Linear(8, 4), torch.randn(2, 8)
    relu_net = nn.Sequential(linear, nn.ReLU())
    saved_input, saved_relu = 2 * 8 * 4, 2 * 4 * 4
    assert models.saved_bytes(linear, x) == saved_input
    assert models.saved_bytes(relu_net, x) == saved_input + saved_relu
    # The gradient for the input needs the weight, a parameter: it exists anyway.
    assert models.saved_bytes(relu_net, x.clone().requires_grad_()) == saved_input + saved_relu
    # The next layer saves the ReLU's output once more: the same storage.
    assert models.saved_bytes(nn.Sequential(relu_net, nn.Linear(4, 3)), x) == saved_input + saved_relu
    # A view is counted with all of the storage that it keeps alive.
    assert models.saved_bytes(linear, torch.randn(5, 8)[:2]) == 5 * 8 * 4
    # Training's BatchNorm saves its input and, per channel, a mean and a standard deviation; a ReLU saves its output,
    # which in place is BatchNorm's.
    image, conv = torch.randn(2, 3, 5, 5), nn.Conv2d(3, 4, 1, bias=False)
    bn_net = nn.Sequential(conv, nn.BatchNorm2d(4), nn.ReLU(inplace=True))
    assert models.saved_bytes(bn_net, image) == 4 * (2 * 3 * 25 + 2 * 4 * 25 + 2 * 4 + 2 * 4 * 25)
    with torch.no_grad():
        assert models.saved_bytes(bn_net, image) == 0


def test_peak_bytes_of_allocations_known_by_hand() -> None:
    def call() -> None:
        a = torch.empty(1000)
        b = torch.empty(2000)
        del a
        c = torch.empty(500)
        del b, c

    for _ in range(2):  # what an earlier measurement left behind does not matter
        assert models.peak_bytes(call, torch.device("cpu")) == 4 * 3000
    kept = []
    assert models.peak_bytes(lambda: kept.append(torch.empty(100)), torch.device("cpu")) == 400
    with pytest.raises(ValueError, match="meta"):
        models.peak_bytes(call, torch.device("meta"))


# The second net's are timm's BatchNormAct2d, with an activation inside; the third's stem is a module of its own.
@pytest.mark.parametrize("name", ["resnet20_cifar", "mobilenetv3_small_050", "resnet26d"])
def test_folded_net_equals_the_unfolded_one(name: str) -> None:
    model = timm.create_model(name, num_classes=7).double()
    models.settle_batchnorm(model)
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    state = copy.deepcopy(model.state_dict())
    folded = models.fold_batchnorm(model, x)
    assert not models.has_batchnorm(folded) and models.has_batchnorm(model)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    with torch.no_grad():
        torch.testing.assert_close(folded(x), model.eval()(x), rtol=1e-9, atol=1e-12)
    models.check_folded(model, folded, x)
    with torch.no_grad():
        next(m for m in folded.modules() if isinstance(m, nn.Conv2d)).bias += 1e-3
    with pytest.raises(RuntimeError, match="differs from the original"):
        models.check_folded(model, folded, x)


def test_a_batchnorm_without_a_convolution_is_not_folded() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.BatchNorm2d(4))
    with pytest.raises(ValueError, match="cannot be folded"):
        models.fold_batchnorm(net, torch.randn(1, 3, 4, 4))
