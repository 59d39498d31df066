"""``affdiv-zoo diagnose`` as a user runs it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from affdiv_zoo.cli import app
from affdiv_zoo.diagnostics import DivergenceReport

SMALL = ["--batch-size", "4", "--image-size", "32", "--steps", "1"]


def run(*argv: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["diagnose", *map(str, argv)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_two_models_side_by_side(tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, text = run("resnet20_cifar", "resnet20_cifar_patchnorm", "--out", out, *SMALL, "--verify", "--whole-step")
    assert code == 0, text
    assert "resnet20_cifar: 4 images of 32 px, after 1 updates" in text
    assert "resnet20_cifar_patchnorm: one SGD step on 4 samples in training mode" in text
    assert sorted(f.name for f in out.iterdir()) == ["report.html", "report.json", "report.png"]
    reports = [DivergenceReport.from_dict(d) for d in json.loads((out / "report.json").read_text())]
    plain, corrected = reports
    assert [r.model for r in reports] == ["resnet20_cifar", "resnet20_cifar_patchnorm"]
    assert max(r.max_verify_error for r in reports) < 1e-3
    # The paper's claim, on these nets: the correction makes the factor one constant per layer.
    assert plain.summary()["spread"] > 0.1 and corrected.summary()["spread"] < 1e-5
    assert all(e.norm_ratio > 0 for e in plain.layers)  # one update opens the branches that start at zero
    page = (out / "report.html").read_text()
    assert "resnet20_cifar_patchnorm" in page and "layer3.2.conv2" in page

    state = {f: f.read_bytes() for f in out.iterdir()}
    code, text = run("resnet20_cifar", "--out", out, *SMALL)
    assert code == 1 and "is not empty" in text
    assert state == {f: f.read_bytes() for f in out.iterdir()}
    code, text = run("resnet20_cifar", "--out", out, *SMALL, "--overwrite", "--eval", "--steps", 0)
    assert code == 0 and "in evaluation mode" in text


def test_the_same_seed_gives_the_same_numbers(tmp_path: Path) -> None:
    found = []
    for name in ("a", "b"):
        assert run("mlp_cifar", "--out", tmp_path / name, *SMALL, "--seed", 3)[0] == 0
        found.append((tmp_path / name / "report.json").read_text())
    assert found[0] == found[1]


def test_a_folder_of_images_and_a_model_of_fixed_size(tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    for kind in ("cat", "dog", "eel"):
        (tmp_path / "images" / kind).mkdir(parents=True)
        for i in range(3):
            pixels = chance.integers(0, 256, (20, 30, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / kind / f"{i}.png")
    kwargs = ["--model-kwargs", "depth=1", "--model-kwargs", "attention=logit"]
    code, text = run(
        "vit_nano_patch4_32_affine", "--images", tmp_path / "images", "--out", tmp_path / "out", *SMALL[:2], *kwargs
    )
    assert code == 0, text
    (data,) = json.loads((tmp_path / "out" / "report.json").read_text())
    assert data["batch_size"] == 4 and "32 px, after 10 updates" in text
    assert next(e for e in data["layers"] if e["kind"] == "logits")["correction"] == "logit"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["resnet17"], "'resnet17' is no timm model"),
        (["mlp_cifar", "--dataset", "mnist"], "--dataset 'mnist' is not 'digits'"),
        (["mlp_cifar", "--images", "nowhere"], "--images nowhere: no such folder"),
        (["mlp_cifar", "--model-kwargs", "width"], "--model-kwargs 'width': expected key=value"),
        (["mlp_cifar", "--model-kwargs", "wide=3"], "wide"),
    ],
)
def test_mistakes_are_named(argv: list[str], message: str, tmp_path: Path) -> None:
    code, text = run(*argv, "--out", tmp_path / "out", *SMALL)
    assert code == 1 and message in text and "Traceback" not in text
    assert not (tmp_path / "out").exists()
    assert torch.is_grad_enabled()
