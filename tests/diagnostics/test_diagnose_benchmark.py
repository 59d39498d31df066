"""What a diagnosis costs, counted and not timed; and that the benchmark of it measures what it says."""

import json
import sys
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F

from affdiv_zoo import diagnose

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes" / "benchmark"))

import diagnose as benchmark  # noqa: E402


def test_the_counts_of_products_known_by_hand() -> None:
    a, b = torch.randn(3, 4, 5), torch.randn(3, 5, 6)
    product = 2 * 3 * 4 * 5 * 6 / 1e9
    assert benchmark.giga_flops(lambda: a @ b) == pytest.approx(product)
    assert benchmark.giga_flops(lambda: torch.addbmm(torch.zeros(4, 6), a, b)) == pytest.approx(product)
    assert benchmark.largest(lambda: torch.ones(3, 4, 6).sum()) == 3 * 4 * 6
    assert benchmark.largest(lambda: torch.zeros(10, 10)[:2].exp()) == 100


@pytest.mark.parametrize("name", ["resnet18", "resnet18_patchnorm"])
def test_a_diagnosis_multiplies_less_than_three_training_steps(name: str) -> None:
    model = timm.create_model(name, num_classes=10).train()
    x, y = torch.randn(4, 3, 96, 96), torch.tensor([1, 2, 3, 4])
    step = benchmark.giga_flops(lambda: F.cross_entropy(model(x), y).backward())
    assert 1.5 * step < benchmark.giga_flops(lambda: diagnose(model, x, y)) < 2.5 * step


def test_memory_grows_with_the_positions_and_not_with_their_square() -> None:
    model = timm.create_model("resnet20_cifar_patchnorm").train()
    model.conv1.stride = (1, 1)
    sizes = []
    for side in (32, 128):  # 16 times the positions
        x, y = torch.randn(2, 3, side, side), torch.tensor([1, 2])
        sizes.append(benchmark.largest(lambda x=x, y=y: diagnose(model, x, y)))
    assert sizes[1] <= 16 * sizes[0] and sizes[1] <= 2**23 < (128 * 128) ** 2


def test_it_runs_and_records(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    argv = ["--quick", "--repeats", "1", "--memory-format", "nchw", "--json", str(file), "--only", "mlp_cifar", "/64/"]
    assert benchmark.main(argv) == 0
    record = json.loads(file.read_text())
    assert record["complete"] and record["failed"] == []
    rows = {row["name"]: row for row in record["rows"]}
    title = "mlp_cifar/32/4/nchw"
    assert set(rows) == {f"{title}/{q}" for q in ("step", "flops", "peak")} | {"resnet18/64/2/nchw/largest"}
    assert 1 < rows[f"{title}/flops"]["ratio"] < 3 and all(row["ours"] > 0 < row["peer"] for row in rows.values())
