"""The small convolutional nets."""

import pytest
import timm
import torch
import torch.nn as nn
from timm.layers import GroupNorm, GroupNorm1, RmsNorm2d

from affdiv_zoo.functional import affine_like_linear
from affdiv_zoo.layers import PatchNormConv2d

SMALL = dict(width=16, depth=3)


def images(batch=3, size=32):
    return torch.randn(batch, 3, size, size, dtype=torch.float64)


@pytest.mark.parametrize(
    ("norm", "kind"), (("batch", nn.BatchNorm2d), ("layer", GroupNorm1), ("rms", RmsNorm2d), ("group", GroupNorm))
)
def test_a_norm_stands_behind_every_convolution(norm, kind):
    model = timm.create_model("cnn_cifar", norm=norm, **SMALL)
    assert [type(layer.norm) for layer in model.layers] == [kind] * SMALL["depth"]
    assert {type(layer.norm) for layer in timm.create_model("cnn_cifar").layers} == {nn.Identity}


def test_what_the_norms_normalise():
    """One image's mean squares: of everything, of a pixel's channels, of eight channels; by their definitions."""
    x = 3 * images() @ torch.randn(32, 32, dtype=torch.float64) + 1
    over = {"layer": (1, 2, 3), "rms": (1,)}
    for norm, dims in over.items():
        layer = timm.create_model("cnn_cifar", norm=norm, **SMALL).double().layers[0]
        z = layer.conv(x)
        ones = torch.ones((), dtype=torch.float64)
        torch.testing.assert_close(layer.norm(z).square().mean(dims).mean(), ones, rtol=1e-3, atol=1e-3)
    layer = timm.create_model("cnn_cifar", norm="group", **SMALL).double().layers[0]
    y = layer.norm(layer.conv(x)).unflatten(1, (2, 8))
    torch.testing.assert_close(y.mean((2, 3, 4)), torch.zeros(3, 2, dtype=torch.float64), atol=1e-6, rtol=0)


def test_the_plain_net_is_what_it_says():
    model = timm.create_model("cnn_cifar", act="leaky_relu", **SMALL).double()
    x = images()
    y = x
    for layer, stride in zip(model.layers, (2, 1, 2), strict=True):
        y = nn.functional.leaky_relu(nn.functional.conv2d(y, layer.conv.weight, layer.conv.bias, stride, 1))
    assert y.shape == (3, 16, 8, 8)
    torch.testing.assert_close(model(x), y.mean((2, 3)) @ model.head.weight.T + model.head.bias)


def test_the_patchnorm_net_is_the_affine_like_map_on_every_patch():
    model = timm.create_model("cnn_cifar_patchnorm", center=False, scale="l2", **SMALL).double()
    x = images()
    y = x
    for layer, stride in zip(model.layers, (2, 1, 2), strict=True):
        patches = nn.functional.unfold(y, 3, padding=1, stride=stride).mT
        z = affine_like_linear(patches, layer.conv.weight.flatten(1), layer.conv.bias, scale="l2")
        y = z.mT.unflatten(2, (y.shape[2] // stride, -1)).relu()
    torch.testing.assert_close(model.forward_features(x), y)
    assert type(model.head) is nn.Linear


def test_reductions_end_at_eight():
    model = timm.create_model("cnn_cifar", depth=9, width=8)
    assert [info["reduction"] for info in model.feature_info] == [2, 2, 4, 4, 8, 8, 8, 8, 8]
    assert model.forward_features(images().float()).shape == (3, 8, 4, 4)


def test_keywords():
    for wrong in (dict(norm="l2"), dict(act="tanhh"), dict(width=0), dict(depth=0), dict(norm="group", width=12)):
        key = list(wrong)[-1]
        with pytest.raises(ValueError, match=f"{key}={wrong[key]!r}"):
            timm.create_model("cnn_cifar", **wrong)
    with pytest.raises(TypeError):
        timm.create_model("cnn_cifar_patchnorm", norm="layer")


def test_both_nets_start_alike():
    for options, unit in ((dict(), False), (dict(scale="l2"), True)):
        for layer in timm.create_model("cnn_cifar_patchnorm", **options).layers:
            assert type(layer.conv) is PatchNormConv2d and not layer.conv.bias.any()
            n = layer.conv.weight[0].numel()
            assert layer.conv.weight.std().item() == pytest.approx(1 if unit else n**-0.5, rel=0.1)
    for layer in timm.create_model("cnn_cifar").layers:
        assert layer.conv.weight.std().item() == pytest.approx(layer.conv.weight[0].numel() ** -0.5, rel=0.1)
