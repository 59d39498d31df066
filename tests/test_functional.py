"""The maps against independent float64 references, over random shapes and options."""

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import CORRECTIONS, SCALES, conv_cases, loop_patches, map_of_vectors, options

from affdiv_zoo import functional as af


def randn(*shape, seed, offset=0.0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).add(offset).to(dtype)


@settings(max_examples=600)
@given(
    options,
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from((0.0, 3.0)),
    st.integers(0, 999),
)
def test_linear_equals_the_formula(options, n, out, rows, bias, offset, seed):
    n += options["center"]  # one number cannot be centred
    x, w = randn(rows, n, seed=seed, offset=offset), randn(out, n, seed=seed + 1)
    b = randn(out, seed=seed + 2) if bias else None
    expected = map_of_vectors(x, w, b, **options)
    torch.testing.assert_close(af.corrected_linear(x, w, b, **options), expected, rtol=1e-9, atol=1e-9)
    single = af.corrected_linear(x.float(), w.float(), None if b is None else b.float(), **options)
    torch.testing.assert_close(
        single.double(), expected, rtol=1e-4, atol=1e-4 if offset == 0.0 or not options["center"] else 1e-2
    )


@settings(max_examples=600)
@given(conv_cases(), options)
def test_patch_norm_conv_equals_the_formula_on_every_patch(case, options):
    groups, kernel = case["args"]["groups"], case["kernel"]
    x = randn(case["batch"], case["channels"], *case["size"], seed=case["seed"], offset=case["offset"])
    w = randn(case["out_channels"], case["channels"] // groups, *kernel, seed=case["seed"] + 1)
    b = randn(case["out_channels"], seed=case["seed"] + 2) if case["bias"] else None
    if options["center"] and w[0].numel() < 2:
        with pytest.raises(ValueError, match="center=True"):
            af.patch_norm_conv(x, w, b, **case["args"], **options)
        return
    patches = loop_patches(x, kernel, **case["args"])
    per_group = w.shape[0] // groups
    expected = []
    for g in range(groups):
        rows = patches[:, g].movedim(1, -1).flatten(0, -2)
        part = slice(g * per_group, (g + 1) * per_group)
        z = map_of_vectors(rows, w[part].flatten(1), None if b is None else b[part], **options)
        expected.append(z.unflatten(0, (x.shape[0], *patches.shape[3:])).movedim(-1, 1))
    expected = torch.cat(expected, 1)
    torch.testing.assert_close(af.patch_norm_conv(x, w, b, **case["args"], **options), expected, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(
        af.patch_norm_conv_reference(x, w, b, **case["args"], **options), expected, rtol=1e-7, atol=1e-7
    )


@settings(max_examples=400)
@given(conv_cases(), st.booleans())
def test_patch_sqnorm_equals_the_sum_over_every_patch(case, center):
    x = randn(case["batch"], case["channels"], *case["size"], seed=case["seed"], offset=case["offset"])
    patches = loop_patches(x, case["kernel"], **case["args"])
    center = center and patches.shape[2] > 1
    if center:
        patches = patches - patches.mean(2, keepdim=True)
    expected = (patches * patches).sum(2)
    for function in (af.patch_sqnorm, af.patch_sqnorm_reference):
        got = function(x, case["kernel"], **case["args"], center=center)
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
    single = af.patch_sqnorm(x.bfloat16(), case["kernel"], **case["args"], center=center)
    assert single.dtype == torch.float32


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("center", (False, True))
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("bias", (False, True))
def test_gradients_equal_the_references(correction, center, scale, bias):
    """Also of "gradient", whose backward is not the derivative of its forward, so that gradcheck cannot judge it."""
    kwargs = dict(correction=correction, center=center, scale=scale)
    x, w, b = randn(2, 4, 6, 5, seed=1), randn(6, 2, 3, 2, seed=2), randn(6, seed=3) if bias else None
    tensors = [t.requires_grad_() for t in (x, w, b) if t is not None]
    args = dict(stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2)
    g = randn(*af.patch_norm_conv(x, w, b, **args).shape, seed=4)
    fast = torch.autograd.grad(af.patch_norm_conv(x, w, b, **args, **kwargs), tensors, g)
    slow = torch.autograd.grad(af.patch_norm_conv_reference(x, w, b, **args, **kwargs), tensors, g)
    for f, s in zip(fast, slow, strict=True):
        torch.testing.assert_close(f, s, rtol=1e-8, atol=1e-8)

    x, w = randn(3, 7, seed=5).requires_grad_(), randn(6, 7, seed=6).requires_grad_()
    tensors = [t for t in (x, w, b) if t is not None]
    reference = {
        "affine": af.affine_like_linear_reference,
        "norm": af.norm_like_linear_reference,
        "gradient": af.gradient_corrected_linear_reference,
    }.get(correction)
    if reference is None:
        return
    shared = {k: v for k, v in kwargs.items() if k in inspect.signature(reference).parameters}
    g = randn(3, 6, seed=7)
    fast = torch.autograd.grad(af.corrected_linear(x, w, b, **kwargs), tensors, g)
    slow = torch.autograd.grad(reference(x, w, b, **shared), tensors, g)
    for f, s in zip(fast, slow, strict=True):
        torch.testing.assert_close(f, s, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("correction", ("none", "affine", "norm"))
@pytest.mark.parametrize("center", (False, True))
def test_gradcheck(correction, center):
    x, w, b = randn(2, 4, 5, 4, seed=1), randn(4, 2, 3, 3, seed=2), randn(4, seed=3)
    conv = lambda x, w, b: af.patch_norm_conv(  # noqa: E731
        x, w, b, 2, 1, groups=2, correction=correction, center=center, scale="rms"
    )
    assert torch.autograd.gradcheck(conv, [t.requires_grad_() for t in (x, w, b)])
    x, w = randn(3, 5, seed=4), randn(4, 5, seed=5)
    linear = lambda x, w, b: af.corrected_linear(x, w, b, correction=correction, center=center)  # noqa: E731
    assert torch.autograd.gradcheck(linear, [t.requires_grad_() for t in (x, w, b)])


def test_affine_and_norm_coincide_without_a_bias():
    x, w = randn(3, 4, 6, 6, seed=1), randn(5, 4, 3, 3, seed=2)
    for scale in SCALES:
        affine, norm = (af.patch_norm_conv(x, w, correction=c, scale=scale) for c in ("affine", "norm"))
        assert torch.equal(affine, norm)
        affine, norm = (
            f(x, w[:, 0, :, :2].flatten(1), scale=scale) for f in (af.affine_like_linear, af.norm_like_linear)
        )
        assert torch.equal(affine, norm)


def test_affine_is_norm_of_the_augmented_vector():
    x, w, b = randn(3, 6, seed=1), randn(4, 6, seed=2), randn(4, seed=3)
    augmented = torch.cat([x, torch.ones(3, 1, dtype=x.dtype)], 1)
    expected = af.norm_like_linear(augmented, torch.cat([w, b[:, None]], 1), eps=0.0)
    torch.testing.assert_close(af.affine_like_linear(x, w, b), expected)


def test_known_values():
    """By hand: x = (3, 4), so ||x||^2 + 1 = 26, and x - mean(x) = (-1/2, 1/2), so ||.||^2 + 1 = 3/2."""
    x, w, b = torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 2.0]]), torch.tensor([1.0])
    torch.testing.assert_close(af.affine_like_linear(x, w, b), torch.tensor([[12.0 / 26.0**0.5]]))
    torch.testing.assert_close(
        af.affine_like_linear(x, w, b, scale="rms"), torch.tensor([[12.0 * (3.0 / 26.0) ** 0.5]])
    )
    torch.testing.assert_close(af.norm_like_linear(x, w, b, eps=0.0), torch.tensor([[11.0 / 5.0 + 1.0]]))
    torch.testing.assert_close(af.affine_like_linear(x, w, b, center=True), torch.tensor([[1.5 / 1.5**0.5]]))
    torch.testing.assert_close(af.gradient_corrected_linear(x, w, b), torch.tensor([[12.0]]))


def test_a_convolution_without_a_batch_is_the_same():
    x, w, b = randn(4, 6, 6, seed=1), randn(5, 4, 3, 3, seed=2), randn(5, seed=3)
    torch.testing.assert_close(af.patch_norm_conv(x, w, b), af.patch_norm_conv(x[None], w, b)[0])
    torch.testing.assert_close(af.patch_sqnorm(x, (3, 3)), af.patch_sqnorm(x[None], 3)[0])


LINEAR_ERRORS = [
    (dict(input=torch.ones(2, 3, dtype=torch.int64)), TypeError, "int64"),
    (dict(input=torch.ones(2, 4)), ValueError, r"\(2, 4\).*3"),
    (dict(weight=torch.ones(4, 3, 1)), ValueError, r"weight has shape \(4, 3, 1\)"),
    (dict(bias=torch.ones(3)), ValueError, r"bias has shape \(3,\), expected \(4,\)"),
    (dict(weight=torch.ones(4, 3, dtype=torch.float64)), TypeError, "weight torch.float64"),
    (dict(correction="afine"), ValueError, "correction='afine' is not one of 'none', 'affine'"),
    (dict(scale="L2"), ValueError, "scale='L2'"),
    (dict(eps=-1.0), ValueError, "eps=-1.0"),
    (dict(center="false"), ValueError, "center='false' is not True or False"),
    (dict(input=torch.ones(2, 1), weight=torch.ones(4, 1), center=True), ValueError, "in_features >= 2, got 1"),
]


@pytest.mark.parametrize(("bad", "error", "message"), LINEAR_ERRORS)
def test_linear_errors_name_the_argument(bad, error, message):
    good = dict(input=torch.ones(2, 3), weight=torch.ones(4, 3), bias=torch.ones(4))
    with pytest.raises(error, match=message):
        af.corrected_linear(**{**good, **bad})


CONV_ERRORS = [
    (dict(input=torch.ones(2, 4, 8, 8, dtype=torch.uint8)), TypeError, "uint8"),
    (dict(input=torch.ones(8, 8)), ValueError, r"input has shape \(8, 8\)"),
    (dict(input=torch.ones(1, 2, 4, 8, 8)), ValueError, r"input has shape \(1, 2, 4, 8, 8\)"),
    (dict(input=torch.ones(2, 3, 8, 8)), ValueError, "input has 3 channels, weight"),
    (dict(groups=3), ValueError, "groups=3 does not divide the input's 4 channels"),
    (dict(groups=4, weight=torch.ones(6, 1, 3, 3)), ValueError, "groups=4 does not divide the weight's 6"),
    (dict(weight=torch.ones(6, 4)), ValueError, "0 spatial dimensions"),
    (dict(weight=torch.ones(6, 4, 9, 3)), ValueError, "spans 9 in spatial dimension 0, more than the padded input's 8"),
    (dict(dilation=4), ValueError, "dilation=.4, 4. spans 9"),
    (dict(bias=torch.ones(4)), ValueError, r"bias has shape \(4,\)"),
    (dict(padding_mode="zero"), ValueError, "padding_mode='zero'"),
    (dict(padding="some"), ValueError, "padding='some'"),
    (dict(padding="same", stride=2), ValueError, "padding='same' needs stride 1"),
    (dict(stride=(1, 1, 1)), ValueError, "stride=.1, 1, 1."),
    (dict(correction="patch"), ValueError, "correction='patch'"),
]


@pytest.mark.parametrize(("bad", "error", "message"), CONV_ERRORS)
def test_conv_errors_name_the_argument(bad, error, message):
    good = dict(input=torch.ones(2, 4, 8, 8), weight=torch.ones(6, 4, 3, 3), bias=torch.ones(6))
    with pytest.raises(error, match=message):
        af.patch_norm_conv(**{**good, **bad})
