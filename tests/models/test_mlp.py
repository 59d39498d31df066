"""The fully connected nets."""

import pytest
import timm
import torch
import torch.nn as nn

from affdiv_zoo.layers import RadialActivation

SMALL = dict(width=32, depth=4)


def images(batch=3):
    return torch.randn(batch, 3, 32, 32, dtype=torch.float64)


@pytest.mark.parametrize(
    ("norm", "options"),
    (
        ("none", dict(correction="none")),
        ("l2", dict(correction="norm", scale="l2")),
        ("rms", dict(correction="norm", scale="rms")),
        ("layer", dict(correction="norm", scale="rms", center=True)),
    ),
)
def test_norms_and_norm_like_corrections_are_the_same_nets(norm, options):
    """The norms' gains and shifts are one and zero at first; eps stands in the mean square there."""
    normed = timm.create_model("mlp_cifar", norm=norm, **SMALL).double()
    corrected = timm.create_model("mlp_cifar_affine", **options, **SMALL).double()
    for module in normed.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.bias)
    state = {k: v for k, v in normed.state_dict().items() if "norm" not in k}
    corrected.load_state_dict(state)
    x = images()
    torch.testing.assert_close(corrected(x), normed(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("norm", "kind"),
    (("batch", nn.BatchNorm1d), ("layer", nn.LayerNorm), ("rms", nn.RMSNorm), ("l2", RadialActivation)),
)
def test_a_norm_stands_before_every_linear(norm, kind):
    model = timm.create_model("mlp_cifar", norm=norm, **SMALL)
    assert sum(isinstance(m, kind) for m in model.modules()) == SMALL["depth"] + 1
    assert not any(isinstance(m, (kind, RadialActivation)) for m in timm.create_model("mlp_cifar").modules())


def test_the_plain_net_is_what_it_says():
    model = timm.create_model("mlp_cifar", act="leaky_relu", **SMALL).double()
    x = images()
    y = x.flatten(1)
    for layer in model.layers:
        y = nn.functional.leaky_relu(y @ layer.fc.weight.T + layer.fc.bias)
    torch.testing.assert_close(model(x), y @ model.head.weight.T + model.head.bias)


def test_keywords():
    model = timm.create_model("mlp_cifar_affine", width=48, depth=2, act="gelu", img_size=(16, 8), in_chans=2)
    assert [layer.fc.in_features for layer in model.layers] == [2 * 16 * 8, 48]
    assert model(torch.randn(2, 2, 16, 8)).shape == (2, 10)
    x = torch.randn(5)
    torch.testing.assert_close(model.layers[0].act(x), nn.functional.gelu(x))
    for wrong in (dict(norm="group"), dict(act="tanhh"), dict(width=0), dict(depth=0)):
        ((key, value),) = wrong.items()
        with pytest.raises(ValueError, match=f"{key}={value!r}"):
            timm.create_model("mlp_cifar", **wrong)
    with pytest.raises(TypeError):
        timm.create_model("mlp_cifar_affine", norm="layer")


@pytest.mark.parametrize("depth", (1, 2, 5))
def test_features_of_shallow_nets(depth):
    model = timm.create_model("mlp_cifar", width=16, depth=depth, features_only=True)
    assert [m.shape for m in model(images().float())] == [(3, 16, 1, 1)] * min(depth, 3)


def test_both_nets_start_alike():
    """The same distribution of weights: N(0, 1 / fan_in)."""
    for name in ("mlp_cifar", "mlp_cifar_affine"):
        for layer in timm.create_model(name).layers:
            assert layer.fc.weight.std().item() == pytest.approx(layer.fc.in_features**-0.5, rel=0.05)
            assert not layer.fc.bias.any()
    paper = timm.create_model("mlp_cifar_affine", scale="l2")
    assert paper.layers[3].fc.weight.std().item() == pytest.approx(1.0, rel=0.05)


def test_the_corrected_net_takes_no_norm():
    with pytest.raises(TypeError, match="norm='layer'.*mlp_cifar"):
        timm.create_model("mlp_cifar_affine", norm="layer")
