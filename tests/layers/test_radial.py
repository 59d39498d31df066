"""Radial maps and parameterised scales: the two halves of every normaliser."""

import copy

import pytest
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import create_act_layer, create_norm_layer
from timm.models._features_fx import create_feature_extractor

from affdiv_zoo import functional as af
from affdiv_zoo.layers import ParameterisedScale, RadialActivation


def scale_like(norm, dim=-1):
    """A ParameterisedScale with a norm's (random) weight and bias."""
    nn.init.normal_(norm.weight)
    bias = getattr(norm, "bias", None)
    scale = ParameterisedScale(len(norm.weight), bias is not None, dtype=norm.weight.dtype, dim=dim)
    scale.weight.data.copy_(norm.weight)
    if bias is not None:
        nn.init.normal_(bias)
        scale.bias.data.copy_(bias)
    return scale


def test_layer_norm_is_a_scale_of_a_centred_radial_map():
    norm = nn.LayerNorm(6, eps=1e-3, dtype=torch.float64)
    ours = nn.Sequential(RadialActivation("l2", center=True, scale="rms", eps=6e-3), scale_like(norm))
    x = torch.randn(3, 5, 6, dtype=torch.float64) + 2.0
    torch.testing.assert_close(ours(x), norm(x))


def test_rms_norm_is_a_scale_of_a_radial_map():
    norm = nn.RMSNorm(6, eps=1e-3, dtype=torch.float64)
    ours = nn.Sequential(RadialActivation("l2", scale="rms", eps=6e-3), scale_like(norm))
    x = torch.randn(3, 5, 6, dtype=torch.float64) + 2.0
    torch.testing.assert_close(ours(x), norm(x))


def test_channel_layer_norm_is_the_same_over_dimension_one():
    norm = create_norm_layer("layernorm2d", 6, eps=1e-3).double()
    ours = nn.Sequential(RadialActivation(dim=1, center=True, scale="rms", eps=6e-3), scale_like(norm, dim=1))
    x = torch.randn(2, 6, 4, 3, dtype=torch.float64) + 2.0
    torch.testing.assert_close(ours(x), norm(x))


def test_batch_norm_in_training_is_a_scale_of_the_radial_map_of_each_channel_of_the_batch():
    norm = nn.BatchNorm2d(5, eps=1e-3, dtype=torch.float64)
    scale = scale_like(norm, dim=0)
    x = torch.randn(3, 5, 4, 2, dtype=torch.float64) + 2.0
    channels = x.transpose(0, 1).flatten(1)
    n = channels.shape[1]
    radial = RadialActivation("l2", center=True, scale="rms", eps=n * 1e-3)
    torch.testing.assert_close(scale(radial(channels)), norm(x).transpose(0, 1).flatten(1))


def test_batch_norm_in_evaluation_is_nothing_but_a_scale():
    norm = nn.BatchNorm2d(5, eps=1e-3, dtype=torch.float64)
    scale = scale_like(norm, dim=1)
    x = torch.randn(3, 5, 4, 2, dtype=torch.float64) + 2.0
    norm(3 * x)
    norm.eval()
    with torch.no_grad():
        scale.weight.div_((norm.running_var + norm.eps).sqrt())
        scale.bias.sub_(norm.running_mean * scale.weight)
    torch.testing.assert_close(scale(x), norm(x))


def test_the_soft_map_is_the_affine_like_map_without_its_bias():
    x, w, b = torch.randn(4, 6), torch.randn(3, 6), torch.randn(3)
    for scale in ("l2", "rms"):
        soft = af.radial_map(x, "soft", scale=scale)
        with_bias, without = (af.affine_like_linear(x, w, b, scale=scale) for b in (b, torch.zeros(3)))
        torch.testing.assert_close(soft @ w.T, without)
        assert not torch.allclose(with_bias, without)


def test_known_values():
    """x = (3, 4): ||x|| = 5, and x - mean(x) = (-1/2, 1/2)."""
    x = torch.tensor([3.0, 4.0])
    torch.testing.assert_close(af.radial_map(x, eps=0.0), torch.tensor([0.6, 0.8]))
    torch.testing.assert_close(af.radial_map(x, "soft"), x / 26**0.5)
    torch.testing.assert_close(af.radial_map(x, scale="rms", eps=0.0), torch.tensor([0.6, 0.8]) * 2**0.5)
    torch.testing.assert_close(af.radial_map(x, "soft", scale="rms"), x * (3 / 26) ** 0.5)
    torch.testing.assert_close(af.radial_map(x, center=True, eps=0.0), torch.tensor([-1.0, 1.0]) / 2**0.5)
    scaled = af.parameterised_scale(x, torch.tensor([2.0, 3.0]), torch.tensor([1.0, -1.0]))
    torch.testing.assert_close(scaled, torch.tensor([7.0, 11.0]))


OPTIONS = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(("l2", "soft")),
        "center": st.booleans(),
        "scale": st.sampled_from(("l2", "rms")),
        "eps": st.sampled_from((1e-12, 1e-2)),
    }
)


@settings(max_examples=60)
@given(OPTIONS, st.lists(st.integers(2, 4), min_size=1, max_size=4), st.integers(-4, 3), st.integers(0, 99))
def test_the_map_equals_its_reference_along_every_dimension(options, shape, dim, seed):
    dim = dim % len(shape)
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 1.0
    expected = af.radial_map_reference(x, dim=dim, **options)
    for d in (dim, dim - len(shape)):
        torch.testing.assert_close(af.radial_map(x, dim=d, **options), expected)
    radii = expected.square().sum(dim).sqrt()
    limit = {"l2": 1.0, "rms": (shape[dim] + (options["kind"] == "soft")) ** 0.5}[options["scale"]]
    assert (radii <= limit * (1 + 1e-9)).all()


@pytest.mark.parametrize("kind", ("l2", "soft"))
@pytest.mark.parametrize("center", (False, True))
def test_gradcheck(kind, center):
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: af.radial_map(x, kind, dim=0, center=center, scale="rms"), x)
    assert torch.autograd.gradgradcheck(lambda x: af.radial_map(x, kind, center=center), x)
    w, b = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda *args: af.parameterised_scale(*args, dim=0), (x, w, b))


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32, torch.float64))
@pytest.mark.parametrize("kind", ("l2", "soft"))
@pytest.mark.parametrize("center", (False, True))
def test_every_size_of_input_in_every_dtype(dtype, kind, center):
    """Squares of these sizes do not fit float16, and not float32 either at its ends."""
    direction = torch.tensor([0.5, -0.5, 0.5, -0.5], dtype=torch.float64)  # length 1, mean 0
    sizes = [0.0, 1e-3, 1.0, 1e3, 3e4] if dtype == torch.float16 else [0.0, 1e-30, 1e-3, 1.0, 1e3, 1e20, 1e25]
    for size in sizes:
        x = (size * direction).to(dtype).requires_grad_()
        y = af.radial_map(x, kind, center=center, eps=1e-6)
        length = size / (size**2 + (1.0 if kind == "soft" else 1e-6)) ** 0.5
        assert y.dtype == dtype
        tolerance = {torch.float16: 2e-3, torch.bfloat16: 1e-2}.get(dtype, 1e-5)
        assert y.double().norm().item() == pytest.approx(length, rel=tolerance, abs=tolerance)
        (y * direction.to(dtype)).sum().backward()
        assert torch.isfinite(x.grad).all()
        assert x.grad.dtype == dtype


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_a_scale_keeps_the_inputs_dtype(dtype):
    x = torch.randn(2, 4).to(dtype)
    for bias in (True, False):
        layer = ParameterisedScale(4, bias)
        assert torch.equal(layer(x), x)
        assert layer(x).dtype == dtype
        assert layer.to(dtype)(x).dtype == dtype


@pytest.mark.filterwarnings("ignore")
def test_modules_trace_copy_and_move():
    model = nn.Sequential(RadialActivation("soft", dim=1, center=True, scale="rms"), ParameterisedScale(3, dim=1))
    x = torch.randn(2, 3, 4, 4)
    expected = af.radial_map(x, "soft", dim=1, center=True, scale="rms")
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(torch.jit.script(model)(x), expected)
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), expected)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), expected)
    torch.testing.assert_close(create_feature_extractor(model, {"1": "y"})(x)["y"], expected)
    torch.testing.assert_close(copy.deepcopy(model)(x), expected)
    scale = ParameterisedScale(3, device="meta", dtype=torch.float16)
    assert scale.weight.is_meta
    assert scale.bias.dtype == torch.float16
    assert RadialActivation(device="meta", dtype=torch.float16)(x).shape == x.shape
    assert {name for name, _ in scale.named_parameters()} == {"weight", "bias"}


def test_timms_factories_know_the_names():
    x = torch.randn(2, 3, 4, 4)
    for kind in ("l2", "soft"):
        layer = create_act_layer(f"radial_{kind}", inplace=True)  # timm leaves inplace out where a layer has none
        assert isinstance(layer, RadialActivation)
        torch.testing.assert_close(layer(x), af.radial_map(x, kind))
    assert isinstance(create_act_layer(RadialActivation, kind="soft", dim=1), RadialActivation)
    assert create_norm_layer("parameterised_scale", 4)(x).shape == x.shape
    assert create_norm_layer("parameterised_scale2d", 3, device="meta").weight.is_meta
    assert create_norm_layer("parameterised_scale2d", 3)(x).shape == x.shape


def test_names_are_optional(monkeypatch):
    """With a timm that keeps its names elsewhere, only the names are lost; and timm's own are never touched."""
    import timm.layers.create_act as acts
    import timm.layers.create_norm as norms

    from affdiv_zoo.layers.radial import _register_names

    taken = nn.ReLU
    monkeypatch.setattr(acts, "_ACT_LAYER_DEFAULT", {"radial_l2": taken})
    monkeypatch.delattr(norms, "_NORM_MAP")
    _register_names()
    assert acts._ACT_LAYER_DEFAULT["radial_l2"] is taken
    assert "radial_soft" in acts._ACT_LAYER_DEFAULT


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match="kind='L2' is not one of 'l2', 'soft'"):
        RadialActivation("L2")
    with pytest.raises(ValueError, match="scale='max'"):
        RadialActivation(scale="max")
    with pytest.raises(ValueError, match="eps=-1.0"):
        RadialActivation(eps=-1.0)
    with pytest.raises(TypeError, match="int64"):
        af.radial_map(torch.ones(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"input.shape\[1\] >= 2, got 1"):
        af.radial_map(torch.ones(3, 1), dim=1, center=True)
    with pytest.raises(ValueError, match=r"weight has shape \(3,\), expected \(4,\), input.shape\[-1\]"):
        ParameterisedScale(3)(torch.ones(2, 4))
    with pytest.raises(ValueError, match="bias has shape"):
        af.parameterised_scale(torch.ones(2, 4), torch.ones(4), torch.ones(3))
