"""The modules: torch's arguments, initialisation, state, swapping in place."""

import pytest
import torch
import torch.nn as nn

from affdiv_zoo.functional import corrected_linear, patch_norm_conv
from affdiv_zoo.layers import (
    AffineLikeLinear,
    CorrectedLinear,
    GradientCorrectedLinear,
    NormLikeLinear,
    PatchNormConv1d,
    PatchNormConv2d,
    PatchNormConv3d,
)

CONVS = ((PatchNormConv1d, nn.Conv1d), (PatchNormConv2d, nn.Conv2d), (PatchNormConv3d, nn.Conv3d))
LINEARS = ((AffineLikeLinear, "affine"), (NormLikeLinear, "norm"), (GradientCorrectedLinear, "gradient"))


@pytest.mark.parametrize(("cls", "correction"), LINEARS)
def test_linear_layers_are_their_map(cls, correction):
    layer = cls(6, 4, center=True)
    x = torch.randn(2, 3, 6)
    assert isinstance(layer, nn.Linear)
    assert layer.correction == correction
    expected = corrected_linear(x, layer.weight, layer.bias, correction=correction, center=True, scale="rms")
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize(("cls", "base"), CONVS)
def test_convolutions_take_torchs_arguments_in_torchs_order(cls, base):
    args = (4, 6, 3, 2, 1, 1, 2, True, "circular")
    layer, plain = cls(*args), base(*args)
    assert isinstance(layer, base)
    assert {k: v.shape for k, v in layer.state_dict().items()} == {k: v.shape for k, v in plain.state_dict().items()}
    x = torch.randn(2, 4, *[6] * (plain.weight.ndim - 2))
    assert layer(x).shape == plain(x).shape
    expected = patch_norm_conv(
        x, layer.weight, layer.bias, 2, 1, groups=2, padding_mode="circular", correction="affine", scale="rms"
    )
    assert torch.equal(layer(x), expected)
    layer.load_state_dict(plain.state_dict())
    layer.correction = "none"
    torch.testing.assert_close(layer(x), plain(x))


@pytest.mark.parametrize("scale", ("l2", "rms"))
@pytest.mark.parametrize("correction", ("affine", "norm"))
def test_initial_outputs_have_unit_variance_whatever_the_input(scale, correction):
    for size in (1.0, 30.0):
        linear = CorrectedLinear(64, 4000, correction=correction, scale=scale)
        conv = PatchNormConv2d(8, 500, 3, padding=1, correction=correction, scale=scale)
        assert linear(size * torch.randn(8, 64)).var().item() == pytest.approx(1.0, rel=0.1)
        z = conv(size * torch.rand(4, 8, 6, 6))
        assert z.var().item() == pytest.approx(1.0, rel=0.1)


def test_from_conv_swaps_in_place():
    plain = nn.Conv2d(4, 6, 3, padding=1, bias=False).double()
    weight, calls = plain.weight, []
    plain.register_forward_hook(lambda *_: calls.append(1))
    layer = PatchNormConv2d.from_conv(plain, center=True)
    assert layer is plain
    assert type(layer) is PatchNormConv2d
    assert layer.weight is weight
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    expected = patch_norm_conv(x, weight, torch.zeros(6, dtype=x.dtype), padding=1, center=True, scale="rms")
    torch.testing.assert_close(layer(x), expected)
    assert calls == [1]
    assert PatchNormConv2d.from_conv(nn.Conv2d(2, 2, 3, bias=False, device="meta")).bias.is_meta
    assert PatchNormConv2d.from_conv(nn.Conv2d(2, 2, 3, bias=False), bias=False).bias is None


def test_from_conv_refuses_other_classes():
    class Special(nn.Conv2d):
        pass

    for module in (Special(2, 2, 3), nn.Conv1d(2, 2, 3), PatchNormConv2d(2, 2, 3), nn.Linear(2, 2)):
        with pytest.raises(TypeError, match=f"conv is a {type(module).__name__}, expected exactly Conv2d"):
            PatchNormConv2d.from_conv(module)


def test_constructors_refuse_bad_options():
    with pytest.raises(ValueError, match="correction='affin'"):
        PatchNormConv2d(2, 2, 3, correction="affin")
    with pytest.raises(ValueError, match="scale='max'"):
        AffineLikeLinear(2, 2, scale="max")
    for make in (lambda: PatchNormConv2d(2, 2, 3, center="no"), lambda: AffineLikeLinear(2, 2, center="no")):
        with pytest.raises(ValueError, match="center='no' is not True or False"):
            make()
    with pytest.raises(ValueError, match="got 1"):
        PatchNormConv2d(4, 4, 1, groups=4, center=True)
    with pytest.raises(ValueError, match="got 1"):
        AffineLikeLinear(1, 4, center=True)
    with pytest.raises(TypeError):
        AffineLikeLinear(2, 2, True, None, None, "affine")  # the correction is keyword-only


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32, torch.float64))
def test_the_dtype_is_kept(dtype):
    for layer, x in ((AffineLikeLinear(6, 4), torch.randn(2, 6)), (PatchNormConv2d(3, 4, 3), torch.randn(2, 3, 5, 5))):
        for correction in ("none", "affine", "norm", "gradient"):
            layer.correction = correction
            assert layer.to(dtype)(x.to(dtype)).dtype == dtype


def test_devices_and_deep_copies():
    import copy

    layer = PatchNormConv2d(3, 4, 3, center=True, scale="l2", device="meta", dtype=torch.float16)
    assert layer.weight.is_meta
    assert layer.weight.dtype == torch.float16
    assert copy.deepcopy(layer).center is True
    assert "correction=affine, center=True, scale=l2" in repr(layer)
