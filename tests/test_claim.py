"""The paper's claim itself: how a real SGD step in float64 moves the activation of one sample."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from affdiv_zoo.layers import CorrectedLinear, PatchNormConv1d, PatchNormConv2d, PatchNormConv3d

CONVS = (PatchNormConv1d, PatchNormConv2d, PatchNormConv3d)


def effective_update(layer, x):
    """-(activation after - before) / (eta g) per output, after one step of torch's SGD on sum(g z)."""
    eta = 1e-3  # any size is right: z is linear in the parameters
    g = torch.randn(layer(x).shape, dtype=x.dtype)
    before = layer(x)
    optimizer = torch.optim.SGD(layer.parameters(), lr=eta)
    (g * before).sum().backward()
    optimizer.step()
    return -(layer(x) - before) / (eta * g)


def expected_update(correction, scale, bias, sqnorm, n):
    """The design's table, column "effective update"; a scale s multiplies every activation, so the update by s^2."""
    s2 = {"l2": 1.0, "rms": float(n + (bias and correction == "affine"))}[scale]
    return {
        "none": sqnorm + bias,
        "affine": s2,
        "norm": s2 + bias,
        "gradient": 1.0,
    }[correction]


@pytest.mark.parametrize("correction", ("none", "affine", "norm", "gradient"))
@pytest.mark.parametrize("scale", ("l2", "rms"))
@pytest.mark.parametrize("center", (False, True))
@pytest.mark.parametrize("bias", (False, True))
@settings(max_examples=6)
@given(n=st.integers(2, 12), out=st.integers(1, 5), size=st.floats(0.1, 30.0), seed=st.integers(0, 999))
def test_linear_step(correction, scale, center, bias, n, out, size, seed):
    torch.manual_seed(seed)
    layer = CorrectedLinear(
        n, out, bias, dtype=torch.float64, correction=correction, center=center, scale=scale, eps=0.0
    )
    x = size * torch.randn(1, n, dtype=torch.float64) + 1.0
    sqnorm = float((x - center * x.mean()).square().sum())
    got = effective_update(layer, x)
    torch.testing.assert_close(
        got, torch.full_like(got, expected_update(correction, scale, bias, sqnorm, n)), rtol=1e-7, atol=0
    )


@pytest.mark.parametrize("dims", (1, 2, 3))
@pytest.mark.parametrize("correction", ("none", "affine", "norm", "gradient"))
@pytest.mark.parametrize("scale", ("l2", "rms"))
@pytest.mark.parametrize("center", (False, True))
@pytest.mark.parametrize("bias", (False, True))
def test_convolution_step_with_one_output_position(dims, correction, scale, center, bias):
    layer = CONVS[dims - 1](
        4, 6, 3, padding=1, stride=9, groups=2, bias=bias, dtype=torch.float64,
        correction=correction, center=center, scale=scale, eps=0.0,
    )  # fmt: skip
    x = torch.randn(1, 4, *[2] * dims, dtype=torch.float64) + 1.0
    got = effective_update(layer, x)
    assert got.shape == (1, 6, *[1] * dims)
    n = 2 * 3**dims
    for group in range(2):
        part = x[0, 2 * group : 2 * group + 2]
        sqnorm = part.square().sum() - center * part.sum() ** 2 / n  # the rest of the patch is padding: zeros
        expected = expected_update(correction, scale, bias, float(sqnorm), n)
        rows = got[0, 3 * group : 3 * group + 3]
        torch.testing.assert_close(rows, torch.full_like(rows, expected), rtol=1e-7, atol=0)


def test_without_a_correction_the_update_grows_with_the_input_and_with_it_it_does_not():
    x = torch.randn(1, 8, dtype=torch.float64)
    for correction, ratio in (("none", 100.0), ("affine", 1.0), ("gradient", 1.0)):
        updates = []
        for size in (10.0, 100.0):
            layer = CorrectedLinear(8, 3, dtype=torch.float64, correction=correction, scale="l2")
            updates.append(effective_update(layer, size * x / x.norm()).mean())
        assert float(updates[1] / updates[0]) == pytest.approx(ratio, rel=0.01)
