"""Converted timm models on disk, and the ``convert`` command."""

import json

import pytest
import timm
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import affdiv_zoo
from affdiv_zoo.cli import app
from affdiv_zoo.convert import save_converted


def run(*args):
    return CliRunner().invoke(app, ["convert", *map(str, args)])


@pytest.mark.parametrize(
    ("name", "options", "size"),
    (
        ("test_resnet", ["--correction", "affine"], 64),
        ("test_vit", ["--correction", "norm", "--attention", "separable", "--center", "true"], 32),
        ("beit_base_patch16_224", ["--correction", "affine", "--scale", "l2"], 32),
    ),
)
def test_round_trip(tmp_path, name, options, size):
    kwargs = {"num_classes": 7, "in_chans": 1} | (
        {"pretrained_cfg_overlay": {"input_size": [1, 64, 64]}}
        if name == "test_resnet"
        else {"img_size": 32, "depth": 2, "embed_dim": 48}
    )
    torch.manual_seed(1)
    source = timm.create_model(name, **kwargs)
    save_file(source.state_dict(), tmp_path / "source.safetensors")
    pairs = [part for k, v in kwargs.items() for part in ("--model-kwargs", f"{k}={v}")]
    result = run(name, "--out", tmp_path / "out", "--checkpoint", tmp_path / "source.safetensors", *options, *pairs)
    assert result.exit_code == 0, result.output
    assert "norms" in result.output and sorted(p.name for p in tmp_path.iterdir()) == ["out", "source.safetensors"]

    # The same conversion in Python, from the same weights.
    named = dict(zip((o.removeprefix("--") for o in options[::2]), options[1::2], strict=True))
    named["center"] = {"true": True}.get(named.get("center"))
    expected, report = affdiv_zoo.convert(source, **named)
    loaded = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True)
    x = torch.randn(2, 1, size, size)
    assert torch.equal(loaded.eval()(x), expected.eval()(x))
    assert json.loads((tmp_path / "out" / "conversion.json").read_text()) == report.to_dict()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architecture"] == "affdiv_converted" and config["num_classes"] == 7
    assert "num_classes" not in config["model_args"]
    assert all(isinstance(v, str | int | float | bool | list) for v in config["model_args"].values())

    # Fine-tuning: another head, the rest of the weights.
    other = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True, num_classes=3)
    assert other(x).shape == (2, 3)
    body = [k for k in expected.state_dict() if not k.startswith(("fc.", "head."))]
    assert all(torch.equal(other.state_dict()[k], expected.state_dict()[k]) for k in body)


def test_a_full_folder_is_refused_unless_told(tmp_path):
    (tmp_path / "kept.txt").write_text("mine")
    result = run("test_resnet", "--out", tmp_path)
    assert result.exit_code == 1 and "not empty" in result.output
    assert [p.name for p in tmp_path.iterdir()] == ["kept.txt"]
    result = run("test_resnet", "--out", tmp_path, "--overwrite")
    assert result.exit_code == 0, result.output
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "config.json",
        "conversion.json",
        "kept.txt",
        "model.safetensors",
    ]


@pytest.mark.parametrize(
    ("args", "message"),
    (
        (["no_such_model"], "is no timm model"),
        (["resnet18_patchnrm"], "did you mean resnet18_patchnorm"),
        (["test_resnet", "--correction", "batch"], "correction='batch'"),
        (["test_resnet", "--center", "maybe"], "center='maybe'"),
        (["test_resnet", "--model-kwargs", "num_classes"], "expected key=value"),
        (["test_resnet", "--checkpoint", "nowhere.safetensors"], "nowhere.safetensors"),
        (["test_resnet", "--images", "nowhere"], "no images in nowhere"),
        (["resnet18_patchnorm"], "converted already, or of this package"),
    ),
)
def test_mistakes_are_answered_in_one_line(tmp_path, args, message):
    result = run(*args, "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert message in result.output and result.output.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_images_calibrate(tmp_path):
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    (tmp_path / "images" / "a").mkdir(parents=True)
    for i in range(5):
        pixels = torch.randint(0, 256, (40, 50, 3), generator=generator, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(tmp_path / "images" / "a" / f"{i}.png")
    result = run("test_resnet", "--out", tmp_path / "out", "--images", tmp_path / "images", "--samples", 3)
    assert result.exit_code == 0, result.output
    assert "Calibrated on noise" not in result.output


def test_models_of_other_libraries_are_sent_to_their_plan(tmp_path):
    model = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 4))
    model, report = affdiv_zoo.convert(model, "norm", example_input=torch.randn(2, 4))
    with pytest.raises(ValueError, match="apply_plan"):
        save_converted(model, report, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_entry_point_is_timms_but_no_model_of_the_zoo():
    assert timm.is_model("affdiv_converted") and "affdiv_converted" not in affdiv_zoo.list_models()
    with pytest.raises(TypeError):
        timm.create_model("affdiv_converted", no_such_argument=1)
