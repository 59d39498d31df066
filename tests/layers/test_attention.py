"""Corrected attention: what a real step does to a logit, its formulas, and its fit into timm."""

import copy
import math

import pytest
import timm
import torch
import torch.nn as nn
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from timm.layers import Attention, LayerNorm
from torch.utils.checkpoint import checkpoint

from affdiv_zoo import functional as af
from affdiv_zoo.layers import CorrectedAttention, CorrectedLinear
from affdiv_zoo.layers import attention as attention_module

MODES = ("none", "projection", "separable", "logit", "exact")
CORRECTED = MODES[1:]
RESCALED = ("projection", "separable")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def build(attention, dim=12, heads=3, qkv_bias=True, seed=0, **kwargs):
    torch.manual_seed(seed)
    layer = CorrectedAttention(dim, heads, qkv_bias=qkv_bias, attention=attention, **kwargs)
    if qkv_bias and not layer.qkv.bias.is_meta:
        nn.init.normal_(layer.qkv.bias, std=0.1)
    return layer


def logits_of(layer, x, monkeypatch):
    """What an unfused layer takes the softmax of."""
    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(attention_module, "maybe_add_mask", lambda attn, mask: seen.append(attn) or attn)
        patch.setattr(layer, "fused_attn", False)
        layer(x)
    return seen[0]


# ---------------------------------------------------------------------------------------------------------------------
# The claim
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def setting():
    """16 tokens of sizes 0 to 3, one head of dimension 8, in float64."""
    torch.manual_seed(0)
    kwargs = dict(dtype=torch.float64)
    x = torch.randn(16, 32, **kwargs) * torch.rand(16, 1, **kwargs) * 3
    w = [torch.randn(8, 32, **kwargs) / 32**0.5 for _ in range(2)]
    b = [torch.randn(8, **kwargs) * 0.1 for _ in range(2)]
    return x, [w[0], b[0], w[1], b[1]]


def effective_updates(logits, params, eta=1e-6):
    """-(change of a logit) / (eta g) after a step of gradient descent for this logit alone, for every logit."""
    params = [p.clone().requires_grad_() for p in params]
    before = logits(*params)
    updates = torch.empty_like(before, requires_grad=False)
    for i in range(before.shape[0]):
        for j in range(before.shape[1]):
            grads = torch.autograd.grad(before[i, j], params, retain_graph=True)
            with torch.no_grad():
                after = logits(*(p - eta * g for p, g in zip(params, grads, strict=True)))
            updates[i, j] = (before[i, j].detach() - after[i, j]) / eta
    return updates


# attention: bounds of the mean, bounds of the spread (std / mean); the functions' documented figures lie within.
CLAIMS = {
    "none": ((100.0, math.inf), (1.0, math.inf)),
    "projection": ((0.4, 0.6), (0.2, 0.35)),
    "separable": ((0.9, 1.1), (0.05, 0.15)),
    "logit": ((0.9, 1.1), (0.03, 0.10)),
    "exact": ((0.9999, 1.0001), (0.0, 1e-4)),
}


@pytest.mark.parametrize("attention", MODES)
def test_a_step_moves_a_logit_as_claimed(attention, setting):
    x, params = setting

    def logits(wq, bq, wk, bk):
        q, k = (x @ wq.T + bq)[None], (x @ wk.T + bk)[None]
        return af.corrected_attention_logits(x, q, k, attention)[0]

    updates = effective_updates(logits, params)
    mean, spread = float(updates.mean()), float(updates.std() / updates.mean())
    (low, high), (least, most) = CLAIMS[attention]
    assert low < mean < high
    assert least <= spread < most


@pytest.mark.parametrize("attention", CORRECTED)
def test_a_step_moves_a_layers_logit_as_claimed(attention, setting, monkeypatch):
    x, params = setting
    layer = build(attention, 32, 1, attn_head_dim=8, temperature=1.0, scale="l2", dtype=torch.float64)

    def logits(wq, bq, wk, bk):
        state = {
            "qkv.weight": torch.cat([wq, wk, torch.zeros_like(wk)]),
            "qkv.bias": torch.cat([bq, bk, torch.zeros_like(bk)]),
        }
        seen = []
        with monkeypatch.context() as patch:
            patch.setattr(attention_module, "maybe_add_mask", lambda attn, mask: seen.append(attn) or attn)
            layer.fused_attn = False
            torch.func.functional_call(layer, state, (x[None],))
        return seen[0][0, 0]

    updates = effective_updates(logits, params)
    mean, spread = float(updates.mean()), float(updates.std() / updates.mean())
    (low, high), (least, most) = CLAIMS[attention]
    assert low < mean < high
    assert least <= spread < most


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("center", (False, True))
def test_the_divergence_is_what_a_step_shows(bias, center):
    torch.manual_seed(1)
    x = torch.randn(5, 6, dtype=torch.float64) + 1.0
    seen = x - center * x.mean(-1, keepdim=True)
    params = [torch.randn(4, 6, dtype=x.dtype) for _ in range(2)] + [torch.randn(4, dtype=x.dtype) for _ in range(2)]
    params = params if bias else params[:2]

    def qk(wq, wk, *b):
        q, k = seen @ wq.T, seen @ wk.T
        return (q + b[0], k + b[1]) if b else (q, k)

    def logits(*params):
        q, k = qk(*params)
        return q @ k.T

    q, k = qk(*params)
    divergence = af.logit_divergence(x, q[None], k[None], bias=bias, center=center, eps=0.0)[0]
    torch.testing.assert_close(effective_updates(logits, params, 1e-7), divergence, rtol=1e-4, atol=0)


def test_exact_logits_are_a_distance():
    """A gradient of length 1 in the space of (q / s, k / s), the sign of q . k, and at most the shorter of the two."""
    torch.manual_seed(2)
    x = torch.zeros(7, 3, dtype=torch.float64)  # s = 1
    q, k = (torch.randn(2, 7, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    logits = af.corrected_attention_logits(x, q, k, "exact", eps=0.0)
    assert torch.equal(logits.sign(), (q @ k.mT).sign())
    assert (logits.abs() <= torch.minimum(q.norm(dim=-1)[..., None], k.norm(dim=-1)[..., None, :]) + 1e-12).all()
    gq, gk = torch.autograd.grad(logits[1, 2, 5], (q, k))
    torch.testing.assert_close(gq.square().sum() + gk.square().sum(), torch.ones((), dtype=x.dtype))


# ---------------------------------------------------------------------------------------------------------------------
# Formulas
# ---------------------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    st.sampled_from(MODES),
    st.lists(st.integers(1, 3), max_size=2),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(2, 6),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_logits_and_their_gradients_equal_the_references(
    attention, batch, heads, tokens, head_dim, dim, bias, center, seed
):
    assume(attention != "exact" or head_dim > 1)  # single numbers come near the kink of ||q - k|| at q = k
    torch.manual_seed(seed)
    x = (torch.randn(*batch, tokens, dim, dtype=torch.float64) + 1.0).requires_grad_()
    q, k = (torch.randn(*batch, heads, tokens, head_dim, dtype=torch.float64, requires_grad=True) for _ in range(2))
    kwargs = dict(bias=bias, center=center, eps=1e-14)
    got = af.corrected_attention_logits(x, q, k, attention, **kwargs)
    expected = af.corrected_attention_logits_reference(x, q, k, attention, **kwargs)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)
    g = torch.randn_like(got)
    wanted = (x, q, k)
    for a, b in zip(
        torch.autograd.grad(got, wanted, g, allow_unused=True, materialize_grads=True),
        torch.autograd.grad(expected, wanted, g, allow_unused=True, materialize_grads=True),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_separable_by_hand():
    """x = (0, 0), (3, 4): s = 1, sqrt 26. q_1 = 2, k_2 = 8: 16 / sqrt(2 * 2 * 1 * 8 * sqrt 26)."""
    x = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    q, k = torch.tensor([[[2.0], [1.0]]]), torch.tensor([[[1.0], [8.0]]])
    expected = 16 / math.sqrt(32 * math.sqrt(26))
    logits = af.corrected_attention_logits(x, q, k, "separable")
    assert float(logits[0, 0, 1]) == pytest.approx(expected, rel=1e-5)
    a, b = af.separable_attention_scales(x, q, k)
    assert float(2 * a[0, 0] * b[0, 1] * 8) == pytest.approx(expected, rel=1e-5)
    assert float(af.corrected_attention_logits(x, q, k, "logit")[0, 0, 1]) == pytest.approx(16 / 168**0.5, rel=1e-5)
    # D = 8^2 * 1 + 2^2 * 26 = 168
    assert float(af.logit_divergence(x, q, k)[0, 0, 1]) == pytest.approx(168)


@pytest.mark.parametrize("attention", RESCALED)
@pytest.mark.parametrize("correction", ("none", "affine", "norm", "gradient"))
@pytest.mark.parametrize("center", (False, True))
@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("scale", ("l2", "rms"))
def test_qkv_is_the_linear_layer_then_the_logits(attention, correction, center, bias, scale):
    """Also gradients: the single node for "affine" against separate maps and the reference logits."""
    torch.manual_seed(3)
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64, requires_grad=True)  # noqa: E731
    x, w, b, t = make(2, 5, 6), make(24, 6), make(24) if bias else None, make(2)
    options = dict(center=center, eps=1e-13)
    q, k, v = af.corrected_qkv(x, w, b, t.exp(), attention, correction=correction, scale=scale, **options)

    seen = x - x.mean(-1, keepdim=True) if center else x
    bs = [None] * 3 if b is None else b.chunk(3)
    linear = [af.corrected_linear(x, *wb, correction=correction, scale=scale, **options) for wb in zip(w.chunk(3), bs)]  # noqa: B905
    split = lambda t: t.unflatten(-1, (2, 4)).transpose(1, 2)  # noqa: E731
    if attention == "projection":
        logits = split(linear[0]) @ split(linear[1]).mT
    else:
        plain = [split(nn.functional.linear(seen, *wb)) for wb in zip(w.chunk(3), bs)]  # noqa: B905
        logits = af.corrected_attention_logits_reference(x, plain[0], plain[1], "separable", bias=bias, **options)
    logits = logits * t.exp().view(-1, 1, 1)
    torch.testing.assert_close(q @ k.mT, logits)
    torch.testing.assert_close(v, split(linear[2]))
    tensors = [p for p in (x, w, b, t) if p is not None]
    gs = torch.randn_like(logits), torch.randn_like(v)
    got = torch.autograd.grad((q @ k.mT, v), tensors, gs)
    expected = torch.autograd.grad((logits, split(linear[2])), tensors, gs)
    for a, e in zip(got, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-6, atol=1e-8)


def test_gradcheck_where_nothing_is_held_constant():
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64, requires_grad=True)  # noqa: E731
    x, w, b, t = make(1, 3, 4), make(12, 4), make(12), torch.ones(2, dtype=torch.float64, requires_grad=True)
    qkv = lambda *args: af.corrected_qkv(*args, "projection", scale="rms")  # noqa: E731
    assert torch.autograd.gradcheck(qkv, (x, w, b, t))
    assert torch.autograd.gradgradcheck(qkv, (x, w, b, t))
    x, q, k = make(3, 4), make(2, 3, 5), make(2, 3, 5)
    for attention in ("projection", "exact"):
        assert torch.autograd.gradcheck(lambda *args, a=attention: af.corrected_attention_logits(*args, a), (x, q, k))


def test_the_nodes_second_derivatives_are_the_plain_operations():
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64, requires_grad=True)  # noqa: E731
    args = make(2, 3, 4), make(12, 4), make(12), torch.ones(2, dtype=torch.float64, requires_grad=True)

    def second(node):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(af._fused, "usable", lambda: node)
            outputs = af.corrected_qkv(*args, "separable")
        first = torch.autograd.grad([o.square().sum() for o in outputs], args, create_graph=True)
        return torch.autograd.grad([g.square().sum() for g in first], args)

    for a, b in zip(second(True), second(False), strict=True):
        torch.testing.assert_close(a, b)


# ---------------------------------------------------------------------------------------------------------------------
# The layer
# ---------------------------------------------------------------------------------------------------------------------

MASKS = {
    "no mask": {},
    "bool mask": dict(attn_mask=torch.rand(5, 5, generator=torch.Generator().manual_seed(0)) > 0.3),
    "float mask": dict(attn_mask=torch.randn(2, 1, 5, 5, generator=torch.Generator().manual_seed(0))),
    "causal": dict(is_causal=True),
}
MASKS["bool mask"]["attn_mask"].fill_diagonal_(True)  # a row without any key is not a number in torch


@pytest.mark.parametrize("fused", (True, False))
@pytest.mark.parametrize("mask", MASKS)
def test_none_is_timms_attention(fused, mask):
    args = (12, 3, 8, 10, True, True, True, True, True, 0.1, 0.1, LayerNorm)  # all of timm's, in timm's order
    theirs, ours = Attention(*args), CorrectedAttention(*args)
    assert isinstance(ours, Attention)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    theirs.fused_attn = ours.fused_attn = fused
    x = torch.randn(2, 5, 12)
    for training in (True, False):
        torch.manual_seed(0)
        expected = theirs.train(training)(x, **MASKS[mask])
        torch.manual_seed(0)
        assert torch.equal(ours.train(training)(x, **MASKS[mask]), expected)


@pytest.mark.parametrize("attention", CORRECTED)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("qk_norm", (False, True))
def test_fused_and_unfused_agree_and_masks_mask(attention, mask, qk_norm):
    layer = build(attention, qk_norm=qk_norm, norm_layer=LayerNorm, gated=True, center=True)
    x = torch.randn(2, 5, 12)
    fused = layer(x, **MASKS[mask])
    layer.fused_attn = False
    torch.testing.assert_close(layer(x, **MASKS[mask]), fused, rtol=1e-4, atol=1e-5)
    if mask == "causal":
        torch.testing.assert_close(layer(x[:, :1]), fused[:, :1], rtol=1e-4, atol=1e-5)
    assert set(layer.state_dict()) - {"logit_scale"} == set(
        build("none", qk_norm=qk_norm, norm_layer=LayerNorm, gated=True).state_dict()
    )


@pytest.mark.parametrize("attention", CORRECTED)
@pytest.mark.parametrize("scale", ("l2", "rms"))
@pytest.mark.parametrize("center", (False, True))
@pytest.mark.parametrize("qkv_bias", (False, True))
def test_random_tokens_have_initial_logits_of_unit_size(attention, scale, center, qkv_bias, monkeypatch):
    layer = CorrectedAttention(192, 6, qkv_bias=qkv_bias, attention=attention, scale=scale, center=center)
    x = torch.randn(2, 60, 192) * torch.rand(2, 60, 1).mul(10).add(1)  # whatever their sizes
    assert logits_of(layer, x, monkeypatch).std().item() == pytest.approx(1.0, abs=0.12)
    v = layer.qkv(x)[..., 2 * 192 :]
    assert v.std().item() == pytest.approx(1.0, abs=0.1)


def test_the_temperature_is_a_parameter_per_head_and_multiplies_the_logits(monkeypatch):
    x = torch.randn(1, 4, 12)
    for attention in CORRECTED:
        layer = build(attention, temperature=2.5)
        torch.testing.assert_close(layer.logit_scale.exp(), torch.full((3,), 2.5))
        before = logits_of(layer, x, monkeypatch)
        with torch.no_grad():
            layer.logit_scale[1] += math.log(3.0)
        ratio = torch.tensor([1.0, 3.0, 1.0]).view(3, 1, 1).expand(1, 3, 4, 4)
        torch.testing.assert_close(logits_of(layer, x, monkeypatch) / before, ratio, rtol=1e-4, atol=1e-4)
        layer(x).square().sum().backward()
        assert (layer.logit_scale.grad != 0).all()
        layer.reset_parameters()
        torch.testing.assert_close(layer.logit_scale.exp(), torch.full((3,), 2.5))


def test_corrected_output_projection():
    layer = build("separable", proj_correction="norm", scale="l2")
    assert isinstance(layer.proj, CorrectedLinear)
    assert (layer.proj.correction, layer.proj.scale) == ("norm", "l2")
    assert type(build("separable").proj) is nn.Linear


@pytest.mark.parametrize("attention", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero", ("tokens", "queries"))
@pytest.mark.parametrize("qkv_bias", (False, True))
@pytest.mark.parametrize("fused", (True, False))
def test_zeros_have_finite_outputs_and_gradients(attention, dtype, zero, qkv_bias, fused):
    layer = build(attention, qkv_bias=qkv_bias).to(dtype)
    layer.fused_attn = fused
    x = torch.randn(2, 5, 12).to(dtype)
    with torch.no_grad():
        if zero == "tokens":
            x[:, 1:3] = 0.0
            if qkv_bias:
                layer.qkv.bias.zero_()
        else:
            for p in layer.qkv.parameters():
                p[:24] = 0.0
    x.requires_grad_()
    y = layer(x)
    assert y.dtype == dtype
    y.float().square().sum().backward()
    for t in (y, x.grad, *(p.grad for p in layer.parameters())):
        assert torch.isfinite(t).all()
        assert t.dtype == dtype


@pytest.mark.parametrize("attention", CORRECTED)
@pytest.mark.parametrize("size", (1e-25, 1e-3, 1e3, 1e15))
def test_logits_hold_at_the_ends_of_float32(attention, size):
    """Without the size in it: x, q and k grow together."""
    torch.manual_seed(4)
    x, q, k = torch.randn(5, 6), torch.randn(2, 5, 3), torch.randn(2, 5, 3)
    x, q, k = (size * t for t in (x, q, k))
    got = af.corrected_attention_logits(x, q, k, attention, eps=0.0 if size > 1 else 1e-6)
    eps = 0.0 if size > 1 else 1e-6
    s = (x.double().square().sum(-1) + 1).sqrt()[:, None]
    u, v = q.double() / s, k.double() / s
    a, n, m = u @ v.mT, u.square().sum(-1)[..., None] + eps, v.square().sum(-1)[..., None, :] + eps
    expected = {
        "projection": lambda: a,
        "separable": lambda: a / (2 * (n * m).sqrt()).sqrt(),
        "logit": lambda: a / (n + m - eps).sqrt(),
        "exact": lambda: ((n + m - eps + 2 * a).sqrt() - (n + m - eps - 2 * a).sqrt()) / 2,
    }[attention]()
    torch.testing.assert_close(got.double(), expected, rtol=1e-3, atol=1e-4 if size > 1 else 1e-9)


@pytest.mark.parametrize("attention", MODES)
def test_half_precision_and_autocast_stay_close(attention):
    layer = build(attention, 48, 3)
    x = 3 * torch.randn(2, 9, 48)
    expected = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), expected, rtol=0.1, atol=0.05)
    for dtype in (torch.float16, torch.bfloat16):
        y = copy.deepcopy(layer).to(dtype)(x.to(dtype))
        torch.testing.assert_close(y.float(), expected, rtol=0.1, atol=0.05)


@pytest.mark.parametrize("attention", MODES)
@pytest.mark.filterwarnings("ignore")
def test_tracers_and_transforms(attention):
    layer = build(attention, correction="affine", center=True).eval()
    x = torch.randn(2, 5, 12, requires_grad=True)
    expected = layer(x)
    wanted = (x, *layer.parameters())
    grads = torch.autograd.grad(expected.square().sum(), wanted)

    def check(function):
        y = function(x)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
        for a, b in zip(torch.autograd.grad(y.square().sum(), wanted), grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)

    torch.compiler.reset()
    check(torch.compile(layer, fullgraph=True, backend="aot_eager"))
    check(torch.jit.script(layer))
    check(lambda x: checkpoint(layer, x, use_reentrant=False))
    torch.testing.assert_close(torch.export.export(layer, (x.detach(),)).module()(x), expected, rtol=1e-4, atol=1e-5)
    features = timm.models._features_fx.create_feature_extractor(nn.Sequential(layer), {"0": "y"})
    torch.testing.assert_close(features(x)["y"], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.jit.script(features)(x)["y"], expected, rtol=1e-4, atol=1e-5)
    clone = copy.deepcopy(layer)
    assert clone.logit_scale is None or clone.logit_scale is not layer.logit_scale
    torch.testing.assert_close(clone(x), expected)
    batched = torch.func.vmap(lambda x: layer(x[None])[0])(x)
    torch.testing.assert_close(batched, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", RESCALED)
def test_the_qkv_module_is_called_where_somebody_watches_or_replaced_it(attention):
    layer = build(attention)
    x = torch.randn(2, 5, 12)
    expected, calls = layer(x), []
    hook = layer.qkv.register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(layer(x), expected)
    assert calls == [1]
    hook.remove()

    class Adapter(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.bias = base, base.bias

        def forward(self, x):
            calls.append(2)
            return self.base(x)

    layer.qkv = Adapter(layer.qkv)
    torch.testing.assert_close(layer(x), expected)
    assert calls == [1, 2]


def test_devices_dtypes_and_timms_vit():
    layer = build("exact", device="meta", dtype=torch.float16)
    assert all(p.is_meta and p.dtype == torch.float16 for p in layer.parameters())
    assert layer(torch.empty(2, 5, 12, device="meta", dtype=torch.float16)).shape == (2, 5, 12)

    class Separable(CorrectedAttention):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, attention="separable", **kwargs)

    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, attn_layer=Separable)
    x = torch.randn(2, 3, 32, 32)
    y = vit(x)
    vit.set_grad_checkpointing()
    torch.testing.assert_close(vit(x), y)
    assert "attention=separable" in repr(vit.blocks[0].attn)


ERRORS = [
    (dict(attention="seperable"), "attention='seperable' is not one of 'none', 'projection', 'separable'"),
    (dict(attention="logit", correction="afine"), "correction='afine'"),
    (dict(proj_correction="afine"), "proj_correction='afine'"),
    (dict(attention="logit", scale="L2"), "scale='L2'"),
    (dict(attention="logit", eps=-1.0), "eps=-1.0"),
    (dict(attention="logit", temperature=0.0), "temperature=0.0"),
    (dict(attention="none", temperature=1.0), "temperature=1.0 with attention='none'"),
]


@pytest.mark.parametrize(("kwargs", "message"), ERRORS)
def test_layer_errors_name_the_argument(kwargs, message):
    with pytest.raises(ValueError, match=message):
        CorrectedAttention(12, 3, **kwargs)


def test_unknown_arguments_are_type_errors():
    with pytest.raises(TypeError):
        CorrectedAttention(12, 3, heads=3)


def test_function_errors_name_the_argument():
    x, q = torch.ones(5, 6), torch.ones(2, 5, 3)
    with pytest.raises(ValueError, match="attention='dot' is not one of"):
        af.corrected_attention_logits(x, q, q, "dot")
    with pytest.raises(ValueError, match=r"key \(2, 5, 4\), expected both"):
        af.corrected_attention_logits(x, q, torch.ones(2, 5, 4))
    with pytest.raises(ValueError, match=r"query has shape \(2, 4, 3\)"):
        af.separable_attention_scales(x, q[:, :4], q[:, :4])
    with pytest.raises(TypeError, match="int64"):
        af.logit_divergence(x, q.long(), q)
    w, t = torch.ones(12, 6), torch.ones(2)
    with pytest.raises(ValueError, match="attention='logit' is not one of 'projection', 'separable'"):
        af.corrected_qkv(x[None], w, None, t, "logit")
    with pytest.raises(ValueError, match=r"input has shape \(5, 6\)"):
        af.corrected_qkv(x, w, None, t)
    with pytest.raises(ValueError, match=r"temperature has shape \(5,\)"):
        af.corrected_qkv(x[None], w, None, torch.ones(5))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_causal", (False, True))
def test_flex_attention_gives_the_same_logits(is_causal):
    """Without a gradient: flex_attention has no backward pass on a CPU."""
    torch.manual_seed(0)
    eager = CorrectedAttention(32, num_heads=2, qkv_bias=True, attention="logit").double().eval()
    flex = CorrectedAttention(32, num_heads=2, qkv_bias=True, attention="logit", flex=True).double().eval()
    flex.load_state_dict(eager.state_dict())
    x = torch.randn(2, 12, 32, dtype=torch.float64)
    with torch.no_grad():
        assert flex._can_flex(x, None)
        torch.testing.assert_close(flex(x, is_causal=is_causal), eager(x, is_causal=is_causal))
    assert not flex._can_flex(x, None)  # with a gradient
    torch.testing.assert_close(flex(x, is_causal=is_causal), eager(x, is_causal=is_causal))
    with pytest.raises(ValueError, match="flex=True with attention='exact'"):
        CorrectedAttention(32, attention="exact", flex=True)
