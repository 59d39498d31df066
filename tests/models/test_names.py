"""Every name that the package adds: sizes, weights' names, keywords. On the meta device, so that all are cheap."""

import pytest
import timm
import torch
import torch.nn as nn

import affdiv_zoo
from affdiv_zoo.layers import CorrectedAttention, CorrectedLinear, PatchNormConv2d

# Millions of parameters. ResNet, ViT, Mixer: of timm's nets in its results tables. CIFAR ResNets: He et al., table 6.
# The rest by hand: the MLP is 3072 * 256 + 5 * 256^2 + 2560 weights, the CNN 27 * 32 + 3 * 9 * 32^2 + 320.
MILLIONS = {
    "resnet18_patchnorm": 11.69,
    "resnet34_patchnorm": 21.80,
    "resnet50_patchnorm": 25.56,
    "resnet101_patchnorm": 44.55,
    "resnet20_cifar": 0.27,
    "resnet32_cifar": 0.46,
    "resnet56_cifar": 0.85,
    "resnet20_cifar_patchnorm": 0.27,
    "resnet32_cifar_patchnorm": 0.46,
    "resnet56_cifar_patchnorm": 0.85,
    "vit_tiny_patch16_224_affine": 5.72,
    "vit_small_patch16_224_affine": 22.05,
    "vit_base_patch16_224_affine": 86.57,
    "vit_nano_patch4_32": 0.68,
    "vit_nano_patch4_32_affine": 0.68,
    "mixer_s32_224_affine": 19.10,
    "mixer_s16_224_affine": 18.53,
    "mixer_b16_224_affine": 59.88,
    "mlp_cifar": 1.12,
    "mlp_cifar_affine": 1.12,
    "cnn_cifar": 0.03,
    "cnn_cifar_patchnorm": 0.03,
}

CORRECTED = sorted(name for name in MILLIONS if name.endswith(("_patchnorm", "_affine")))


def meta(name, **kwargs):
    with torch.device("meta"):
        return timm.create_model(name, **kwargs)


def corrected_layers(model):
    return [m for m in model.modules() if isinstance(m, (CorrectedLinear, PatchNormConv2d))]


def test_the_zoo_is_complete():
    assert set(affdiv_zoo.list_models()) == set(MILLIONS)
    assert set(MILLIONS) <= set(timm.list_models())


@pytest.mark.parametrize("name", MILLIONS)
def test_sizes(name):
    """Norms and biases are at most one per cent of any of these nets."""
    assert sum(p.numel() for p in meta(name).parameters()) / 1e6 == pytest.approx(MILLIONS[name], rel=0.01, abs=0.005)


@pytest.mark.parametrize("name", CORRECTED)
def test_weights_keep_the_twins_names_and_shapes(name):
    """A checkpoint maps one to one, but for norms, the biases in their place and the attention's temperatures."""
    base = name.removesuffix("_patchnorm").removesuffix("_affine")
    twin = meta(base).state_dict()
    state = meta(name).state_dict()
    matrices = {k: v.shape for k, v in state.items() if v.ndim > 1}
    assert matrices == {k: v.shape for k, v in twin.items() if v.ndim > 1}
    vectors = {k for k, v in state.items() if v.ndim <= 1}
    assert all(k.endswith((".bias", ".attn.logit_scale")) for k in vectors)
    assert name.endswith("_patchnorm") or {k for k in vectors if not k.endswith("logit_scale")} <= set(twin)


@pytest.mark.parametrize("name", CORRECTED)
def test_no_norm_is_left(name):
    norms = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
    model = meta(name)
    assert not any(isinstance(m, norms) for m in model.modules())
    assert not list(model.buffers())


@pytest.mark.parametrize("name", CORRECTED)
@pytest.mark.parametrize(
    ("options", "wrong"),
    (
        (dict(correction="norm", center=False, scale="l2"), dict(correction="batch")),
        (dict(correction="gradient", center=True, scale="rms"), dict(scale="L2")),
    ),
)
def test_keywords_reach_every_corrected_layer(name, options, wrong):
    layers = corrected_layers(meta(name, **options))
    assert layers
    assert all({key: getattr(layer, key) for key in options} == options for layer in layers)
    ((key, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{key}='{value}'"):
        meta(name, **wrong)
    with pytest.raises(TypeError):
        meta(name, no_such_argument=1)


@pytest.mark.parametrize("attention", ("none", "projection", "separable", "logit", "exact"))
def test_the_attention_keyword_reaches_every_block(attention):
    model = meta("vit_nano_patch4_32_affine", attention=attention)
    found = [m.attention for m in model.modules() if isinstance(m, CorrectedAttention)]
    assert found == [attention] * 6
    with pytest.raises(ValueError, match="attention='flash'"):
        meta("vit_nano_patch4_32_affine", attention="flash")


def test_which_layers_are_corrected():
    """Those that norms fed in timm's nets, and heads; in PatchNorm nets all convolutions, in MLPs all linears."""
    fed = {
        "vit_nano_patch4_32_affine": {f"blocks.{i}.{n}" for i in range(6) for n in ("attn.qkv", "mlp.fc1")} | {"head"},
        "mixer_s32_224_affine": {f"blocks.{i}.{n}" for i in range(8) for n in ("mlp_tokens.fc1", "mlp_channels.fc1")}
        | {"head"},
        "mlp_cifar_affine": {f"layers.{i}.fc" for i in range(6)} | {"head"},
    }
    for name, expected in fed.items():
        modules = meta(name).named_modules()
        assert {n for n, m in modules if isinstance(m, (CorrectedLinear, PatchNormConv2d))} == expected
