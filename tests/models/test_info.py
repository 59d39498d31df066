"""``affdiv-zoo list`` and ``affdiv-zoo info``."""

import pytest
import timm
import torch
from typer.testing import CliRunner

import affdiv_zoo
from affdiv_zoo.cli import app
from affdiv_zoo.models._info import count_macs


def run(*args):
    return CliRunner().invoke(app, args)


def test_list():
    assert run("list").stdout.split() == affdiv_zoo.list_models()
    assert run("list", "resnet20*").stdout.split() == ["resnet20_cifar", "resnet20_cifar_patchnorm"]
    nothing = run("list", "resnet19*")
    assert nothing.exit_code == 1 and nothing.stderr.count("\n") == 1 and "'resnet19*'" in nothing.stderr


@pytest.mark.parametrize("name", [*affdiv_zoo.list_models(), "resnet18.a1_in1k"])
def test_info_fits_a_terminal(name):
    result = run("info", name)
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert result.stdout.startswith(f"{name}\n")


@pytest.mark.parametrize(
    ("name", "rows"),
    (
        ("resnet20_cifar", ["layer3.2.conv2 | 3x3 conv 64 to 64 | -", "fc | 64 to 10 | -"]),
        (
            "resnet20_cifar_patchnorm",
            ["layer3.2.conv2 | 3x3 conv 64 to 64 | affine, centred, rms", "fc | 64 to 10 | -"],
        ),
        (
            "vit_nano_patch4_32_affine",
            [
                "patch_embed.proj | 4x4 conv 3 to 96 | -",
                "blocks.5.attn | 3 heads | separable attention",
                "blocks.5.attn.qkv | 96 to 288 | v: affine, rms",
                "blocks.5.attn.proj | 96 to 96 | -",
                "head | 96 to 10 | affine, rms",
            ],
        ),
        ("mlp_cifar_affine", ["layers.0.fc | 3072 to 256 | affine, rms"]),
        ("resnext50_32x4d", ["layer1.0.conv2 | 3x3 conv 128 to 128 in 32 groups | -"]),
    ),
)
def test_info_tells_each_layers_correction(name, rows):
    lines = [[cell.strip() for cell in line.split("  ") if cell] for line in run("info", name).stdout.splitlines()]
    for row in rows:
        assert row.split(" | ") in lines


def test_info_facts():
    """20 layers of 3x3 convolutions; the published 0.27 M parameters and 41 M multiply-accumulates."""
    lines = run("info", "resnet20_cifar").stdout.splitlines()
    assert "parameters  0.27 M" in lines
    assert "MACs        40.6 M for an image of 3 x 32 x 32" in lines
    assert "classes     10" in lines
    assert "a1_in1k" in run("info", "resnet18").stdout


@pytest.mark.parametrize(
    ("name", "giga"),  # timm's results tables
    (("resnet18_patchnorm", 1.82), ("vit_tiny_patch16_224_affine", 1.26), ("mixer_b16_224_affine", 12.62)),
)
def test_macs(name, giga):
    with torch.device("meta"):
        model = timm.create_model(name)
    assert count_macs(model) / 1e9 == pytest.approx(giga, rel=0.01)


@pytest.mark.parametrize(
    ("name", "hint"),
    (
        ("resnet18_pachnorm", "resnet18_patchnorm"),
        ("convnext_tny", "convnext_tiny"),
        ("???", "timm.list_models()"),
    ),
)
def test_an_unknown_name_is_answered_with_one_line(name, hint):
    result = run("info", name)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1 and name in result.stderr and hint in result.stderr


def test_version():
    result = run("--version")
    assert result.exit_code == 0 and result.output.strip() == affdiv_zoo.__version__
