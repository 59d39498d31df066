"""The ends of the floating-point formats: finite, and within a few units in the last place of float64."""

import pytest
import torch
import torch.nn.functional as F

from affdiv_zoo import _fused
from affdiv_zoo.functional import corrected_linear, corrected_qkv, patch_norm_conv, patch_sqnorm, radial_map

HALF_MAX, HALF_SUBNORMAL = 65504.0, 6e-8
SIZES = {
    torch.float64: (0.0, 1e-30, 1.0, 1e18),
    torch.float32: (0.0, 1e-30, 1.0, 1e18, "mixed", "offset"),
    torch.bfloat16: (0.0, 1e-30, 1.0, 1e18, "mixed"),
    torch.float16: (0.0, HALF_SUBNORMAL, 1.0, HALF_MAX, "mixed"),
}
CASES = [(dtype, size) for dtype, sizes in SIZES.items() for size in sizes]

# The stated accuracy, in units in the last place of the dtype, of the sum of the absolute values of the terms that make
# up a number: what a plain convolution or matrix product of the same inputs is accurate to.
ULPS = 8


def inputs(shape, dtype, size):
    x = torch.randn(shape, dtype=torch.float64)
    if size == "mixed":
        x = x * 10.0 ** torch.randint(-4, 4, shape)
    elif size == "offset":
        x = x + 1e3
    elif size in (HALF_MAX, HALF_SUBNORMAL):
        x = x.sign() * size
    else:
        x = x * size
    return x.to(dtype)


def check(got, expected, magnitude, dtype):
    """``|got - expected| <= ULPS ulp(dtype) magnitude``, or that many of the smallest number that the dtype has."""
    assert got.dtype == dtype
    assert torch.isfinite(got).all()
    info = torch.finfo(dtype)
    error = (got.double() - expected).abs()
    bound = ULPS * info.eps * (magnitude + info.smallest_normal)
    assert (error <= bound).all(), f"{float((error / bound).max()) * ULPS:.1f} ulp"


@pytest.fixture(params=("node", "plain"))
def path(request, monkeypatch):
    """Both ways to compute a map: its own autograd node, and torch operations as under torch.compile."""
    if request.param == "plain":
        monkeypatch.setattr(_fused, "usable", lambda: False)
    return request.param


CORRECTED_CASES = [
    (*case, correction)
    for case in CASES
    for correction in ("affine", "norm", "gradient")
    if (correction, case[1]) != ("gradient", HALF_MAX)  # W x + b itself is beyond float16 there, as for nn.Linear
]


@pytest.mark.parametrize("center", (False, True))
@pytest.mark.parametrize(("dtype", "size", "correction"), CORRECTED_CASES)
def test_linear(dtype, size, center, correction, path):
    n, scale = 384, "rms"
    x = inputs((6, n), dtype, size).requires_grad_()
    w = (torch.randn(5, n) / n**0.5).to(dtype).requires_grad_()
    b = torch.randn(5).to(dtype).requires_grad_()
    z = corrected_linear(x, w, b, correction=correction, center=center, scale=scale)
    g = torch.randn(z.shape).to(dtype)
    grads = torch.autograd.grad(z, (x, w, b), g)

    X, W, B, G = (t.detach().double() for t in (x, w, b, g))
    Xc = X - X.mean(-1, keepdim=True) if center else X
    q = Xc.square().sum(-1, keepdim=True) + {"affine": 1.0, "norm": 1e-6, "gradient": 1.0}[correction]
    r, s = q.rsqrt(), {"affine": (n + 1) ** 0.5, "norm": n**0.5, "gradient": 1.0}[correction]
    aX = X.abs() + (X.abs().mean(-1, keepdim=True) if center else 0.0)
    u = Xc @ W.t()
    if correction == "gradient":
        check(z, u + B, aX @ W.abs().t() + B.abs(), dtype)
        gx = G @ W
        check(grads[0], gx - gx.mean(-1, keepdim=True) if center else gx, G.abs() @ W.abs() * 2, dtype)
        check(grads[1], (G / q).t() @ Xc, (G / q).abs().t() @ aX, dtype)
        check(grads[2], (G / q).sum(0), (G / q).abs().sum(0), dtype)
        return
    inside = correction == "affine"
    divided = s * r * (u + B * inside)
    check(z, divided + B * (not inside), s * r * (aX @ W.abs().t()) + B.abs() * (1 if not inside else s * r), dtype)
    gu = s * r * G
    dot = (G * divided).sum(-1, keepdim=True)
    gx = gu @ W - Xc * r * r * dot
    size_gx = gu.abs() @ W.abs() + aX * r * r * (G.abs() * (s * r * (aX @ W.abs().t() + B.abs() * inside))).sum(
        -1, keepdim=True
    )
    if center:
        gx, size_gx = gx - gx.mean(-1, keepdim=True), size_gx + size_gx.mean(-1, keepdim=True)
    check(grads[0], gx, size_gx, dtype)
    check(grads[1], gu.t() @ Xc, gu.abs().t() @ aX, dtype)
    check(grads[2], (gu if inside else G).sum(0), (gu if inside else G).abs().sum(0), dtype)


@pytest.mark.parametrize("center", (False, True))
@pytest.mark.parametrize(("dtype", "size", "correction"), CORRECTED_CASES)
def test_convolution(dtype, size, center, correction, path):
    channels, n = 64, 576
    x = inputs((2, channels, 6, 5), dtype, size).requires_grad_()
    w = (torch.randn(4, channels, 3, 3) / n**0.5).to(dtype).requires_grad_()
    b = torch.randn(4).to(dtype).requires_grad_()
    z = patch_norm_conv(x, w, b, padding=1, correction=correction, center=center, scale="rms")
    g = torch.randn(z.shape).to(dtype)
    grads = torch.autograd.grad(z, (x, w, b), g)

    X, W, B, G = (t.detach().double() for t in (x, w, b, g))
    box = torch.ones(1, channels, 3, 3, dtype=torch.float64)
    mean = F.conv2d(X, box, padding=1) / n
    patches = F.unfold(X, 3, padding=1)
    patches = patches - center * patches.mean(1, keepdim=True)
    q = patches.square().sum(1).view(2, 1, 6, 5) + (1e-6 if correction == "norm" else 1.0)
    r, inside = q.rsqrt(), correction == "affine"
    s = (n + inside) ** 0.5
    rows_mean = W.mean((1, 2, 3), keepdim=True)
    Wc = W - center * rows_mean
    aW = W.abs() + center * W.abs().mean((1, 2, 3), keepdim=True)
    B4 = B.view(1, -1, 1, 1)
    back = lambda t, kernel: F.conv_transpose2d(t, kernel, padding=1)  # noqa: E731
    unfolded, absolute = F.unfold(X, 3, padding=1), F.unfold(X.abs(), 3, padding=1)

    def check_weight_grad(got, scaled):
        gw = torch.einsum("bop,bnp->on", scaled.flatten(2), unfolded).view_as(W)
        size_gw = torch.einsum("bop,bnp->on", scaled.abs().flatten(2), absolute).view_as(W)
        if center:
            gw, size_gw = gw - gw.mean((1, 2, 3), keepdim=True), size_gw + size_gw.mean((1, 2, 3), keepdim=True)
        check(got, gw, size_gw, dtype)

    if correction == "gradient":
        check(z, F.conv2d(X, Wc, padding=1) + B4, F.conv2d(X.abs(), aW, padding=1) + B4.abs(), dtype)
        check(grads[0], back(G, Wc), back(G.abs(), aW), dtype)
        check_weight_grad(grads[1], G / q)
        # Centred, the divisor is accurate to the spread's share of the input.
        condition = 2 * (absolute + absolute.mean(1, keepdim=True)).square().sum(1).view_as(q) / q if center else 1.0
        check(grads[2], (G / q).sum((0, 2, 3)), (G.abs() / q * (1 + condition)).sum((0, 2, 3)), dtype)
        return
    divided = s * r * (F.conv2d(X, Wc, padding=1) + B4 * inside)
    size_divided = s * r * (F.conv2d(X.abs(), aW, padding=1) + B4.abs() * inside)
    check(z, divided + B4 * (not inside), size_divided + B4.abs() * (not inside), dtype)
    gu, dot, size_dot = s * r * G, (G * divided).sum(1, keepdim=True), (G.abs() * size_divided).sum(1, keepdim=True)
    one = torch.ones(1, 1, 3, 3, dtype=torch.float64)
    gx = back(gu, Wc) - X * back(r * r * dot, one) + center * back(r * r * dot * mean, one)
    a_mean = F.conv2d(X.abs(), box, padding=1) / n
    size_gx = back(gu.abs(), aW) + X.abs() * back(r * r * size_dot, one) + center * back(r * r * size_dot * a_mean, one)
    check(grads[0], gx, size_gx, dtype)
    check_weight_grad(grads[1], gu)
    # Centred, the divisor itself is accurate to the spread's share of the input.
    a_patches = F.unfold(X.abs(), 3, padding=1) + center * a_mean.flatten(2)
    condition = (a_patches.square().sum(1).view(2, 1, 6, 5) / q).sqrt() if inside else 1.0
    gb, size_gb = (gu, gu.abs() * (1 + condition)) if inside else (G, G.abs())
    check(grads[2], gb.sum((0, 2, 3)), size_gb.sum((0, 2, 3)), dtype)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32))
def test_gradient_corrected_weights_take_the_whole_step_where_the_squared_norm_leaves_half_types(dtype, path):
    """||x||^2 = 3e7: its inverse is subnormal in float16, and was 24 % off when it was multiplied with first."""
    n = 384
    x, w = torch.full((2, n), 300.0).to(dtype), torch.zeros(3, n, dtype=dtype, requires_grad=True)
    corrected_linear(x, w, None, correction="gradient").sum().backward()
    assert torch.allclose(w.grad.float(), torch.tensor(2 / (300.0 * n)), rtol=0.02)


@pytest.mark.parametrize("size", (0.0, 1e-30, 1e-6))
@pytest.mark.parametrize("eps", (1e-6, 1e-12, 1e-16))
def test_gradients_are_finite_beside_a_tiny_eps(size, eps, path):
    x = (torch.randn(2, 8, 4, 4) * size).requires_grad_()
    conv, linear = torch.randn(3, 8, 3, 3), torch.randn(3, 4)
    outputs = [
        patch_norm_conv(x, conv, None, padding=1, eps=eps),
        corrected_linear(x, linear, None, correction="norm", eps=eps),
        radial_map(x, "l2", eps=eps),
    ]
    if size == 1e-6 and eps < 1e-12:  # beside which eps is nothing: lengths are one
        torch.testing.assert_close(outputs[2].norm(dim=-1), torch.ones(2, 8, 4), rtol=1e-3, atol=0)
    for z in outputs:
        assert torch.isfinite(torch.autograd.grad(z.sum(), x)[0]).all()


QKV_CASES = [case for case in CASES if case[0] != torch.float64]


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("attention", ("projection", "separable"))
@pytest.mark.parametrize(("dtype", "size"), QKV_CASES)
def test_queries_keys_and_values(dtype, size, attention, bias, path):
    """Against the same in float64, whose inputs and parameters are the rounded ones."""
    n, heads = 64, 2
    x = inputs((2, 5, n), dtype, size)
    w, b = (torch.randn(3 * n, n) / n**0.5).to(dtype), torch.randn(3 * n).to(dtype) if bias else None
    t = torch.full((heads,), (2 * n) ** 0.5).to(dtype)

    def run(dtype):
        tensors = [p if p is None else p.to(dtype).requires_grad_() for p in (x, w, b, t)]
        qkv = corrected_qkv(*tensors, attention, scale="rms")
        gs = [torch.linspace(-1, 1, n // heads).to(dtype).expand_as(part) for part in qkv]
        return qkv, torch.autograd.grad(qkv, [p for p in tensors if p is not None], gs)

    (got, grads), (expected, expected_grads) = run(dtype), run(torch.float64)
    rtol = 64 * torch.finfo(dtype).eps  # of the largest: entries are sums of terms of both signs
    for a, e in zip((*got, *grads), (*expected, *expected_grads), strict=True):
        assert a.dtype == dtype
        assert not a.isnan().any()
        if float(e.abs().max()) < torch.finfo(dtype).max:  # zero tokens' own gradient, 1e3 g without a bias, may not be
            bound = rtol * float(e.abs().max()) + 16 * torch.finfo(dtype).smallest_normal
            assert float((a.double() - e).abs().max()) <= bound


@pytest.mark.parametrize("center", (False, True))
def test_patch_norms_keep_their_digits_beside_a_large_mean(center):
    """A mean 10^4 times the spread: the textbook difference of sums would have no digit left in float32."""
    x = (torch.randn(2, 16, 7, 7, dtype=torch.float64) * 1e-1 + 1e3).float()
    patches = F.unfold(x.double(), 3)
    patches = patches - center * patches.mean(1, keepdim=True)
    expected = patches.square().sum(1).view(2, 1, 5, 5)
    torch.testing.assert_close(patch_sqnorm(x, 3, center=center).double(), expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
@pytest.mark.parametrize("correction", ("none", "affine", "norm", "gradient"))
@pytest.mark.parametrize("center", (False, True))
def test_non_finite_inputs_are_not_hidden(bad, correction, center):
    kwargs = dict(correction=correction, center=center)
    x = torch.randn(2, 3, 5, 5)
    x[0, 1, 2, 2] = bad
    z = patch_norm_conv(x, torch.randn(4, 3, 3, 3), torch.randn(4), padding=1, **kwargs)
    assert not torch.isfinite(z[0, :, 1:4, 1:4]).any()
    assert torch.isfinite(z[1]).all()
    assert torch.isfinite(z[0, :, 0]).all()
    rows = corrected_linear(x[:, :, 2, 2], torch.randn(4, 3), torch.randn(4), **kwargs)
    assert not torch.isfinite(rows[0]).any()
    assert torch.isfinite(rows[1]).all()


@pytest.mark.parametrize("correction", ("none", "affine", "norm", "gradient"))
@pytest.mark.parametrize("center", (False, True))
def test_empty_batches_and_strided_inputs(correction, center):
    kwargs = dict(correction=correction, center=center)
    w, b = torch.randn(4, 3, 3, 3, requires_grad=True), torch.randn(4, requires_grad=True)
    x = torch.randn(0, 3, 5, 5, requires_grad=True)
    z = patch_norm_conv(x, w, b, **kwargs)
    assert z.shape == (0, 4, 3, 3)
    assert [g.shape for g in torch.autograd.grad(z.sum(), (x, w, b))] == [x.shape, w.shape, b.shape]
    z = corrected_linear(x.new_zeros(0, 27), w.flatten(1), b, **kwargs)
    assert z.shape == (0, 4)
    assert not torch.autograd.grad(z.sum(), w)[0].any()

    x = torch.randn(2, 5, 6, 3).permute(0, 3, 1, 2)[:, :, :, ::2]
    dense = x.contiguous()
    torch.testing.assert_close(patch_norm_conv(x, w, b, **kwargs), patch_norm_conv(dense, w, b, **kwargs))
    rows, matrix = x.mT, torch.randn(4, 5)
    torch.testing.assert_close(
        corrected_linear(rows, matrix, b, **kwargs), corrected_linear(rows.contiguous(), matrix, b, **kwargs)
    )


def test_channels_last_is_kept():
    x = torch.randn(2, 8, 6, 6).to(memory_format=torch.channels_last).requires_grad_()
    w = torch.randn(4, 8, 3, 3).to(memory_format=torch.channels_last)
    z = patch_norm_conv(x, w, torch.randn(4), padding=1, center=True, act="relu")
    assert z.is_contiguous(memory_format=torch.channels_last)
    assert torch.autograd.grad(z.sum(), x)[0].is_contiguous(memory_format=torch.channels_last)


def test_a_common_mean_costs_no_accuracy_in_bfloat16():
    """Centred rows, rounded to bfloat16, no longer sum to zero; what is left must not meet the mean of the input."""
    w, b = (torch.randn(8, 16, 3, 3) / 12).bfloat16(), torch.randn(8).bfloat16()
    errors = []
    for offset in (0.0, 30.0):
        x = (torch.randn(2, 16, 8, 8) + offset).bfloat16()
        expected = patch_norm_conv(x.double(), w.double(), b.double(), center=True, scale="rms")
        errors.append(
            float((patch_norm_conv(x, w, b, center=True, scale="rms").double() - expected).square().mean().sqrt())
        )
    assert errors[1] < 2 * errors[0]
