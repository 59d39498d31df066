"""Attention logits: their divergence and updates against real steps."""

import pytest
import timm
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from affdiv_zoo import _plain, diagnose
from affdiv_zoo.diagnostics._attention import logit_updates
from affdiv_zoo.diagnostics._record import run
from affdiv_zoo.diagnostics._updates import layer_updates
from affdiv_zoo.layers import CorrectedAttention

KINDS = ["none", "projection", "separable", "logit", "exact"]


class Probe(nn.Module):
    """An attention, and a loss that one can aim at a single logit."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attn = attention

    def forward(self, x: torch.Tensor, **kwargs) -> torch.Tensor:
        return self.attn(x, **kwargs)


def logits_by_hand(attn: nn.Module, x: torch.Tensor, qkv: torch.Tensor) -> torch.Tensor:
    """What enters the softmax, from the layer's own formulas."""
    q, k, _ = qkv.unflatten(-1, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
    if getattr(attn, "attention", "none") == "none":
        return q @ k.mT * attn.scale
    t = attn.logit_scale.exp().view(-1, 1, 1)
    if attn.attention == "projection":
        return q @ k.mT * t
    return t * _plain.corrected_attention_logits(
        x, q, k, attn.attention, attn.qkv.bias is not None, attn.center, attn.eps
    )


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("attention", KINDS)
def test_divergence_of_a_pair_is_what_a_real_step_for_it_does(attention: str, center: bool) -> None:
    attn = CorrectedAttention(12, 2, qkv_bias=True, attention=attention, center=center).double()
    nn.init.normal_(attn.qkv.bias, std=0.3)
    x = 2 * torch.randn(2, 5, 12, dtype=torch.float64)
    record = run(Probe(attn), x, lambda out: (out**3).mean())
    (a,) = record.attentions
    layer = a.query.layer
    (u,) = list(logit_updates(a, {id(layer): layer_updates(layer, 2)}))
    for pair in [(0, 0, 1, 3), (1, 1, 2, 2), (1, 0, 4, 0)]:
        weights = [attn.qkv.weight, attn.qkv.bias]
        logit = logits_by_hand(attn, x, attn.qkv(x))[pair]
        grads = torch.autograd.grad(logit, weights)
        h = 1e-6
        moved = []
        for sign in (1, -1):
            weight, bias = (w + sign * h * g for w, g in zip(weights, grads, strict=True))
            stepped = {"weight": weight, "bias": bias}
            qkv = torch.func.functional_call(attn.qkv, stepped, (x,))
            moved.append(logits_by_hand(attn, x, qkv)[pair].item())
        assert u.divergence[pair].item() == pytest.approx((moved[0] - moved[1]) / (2 * h), rel=1e-5), pair


def test_plain_divergence_is_the_formula() -> None:
    attn = timm.layers.Attention(12, 2, qkv_bias=True).double()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    (a,) = (record := run(Probe(attn), x, lambda out: (out**3).mean())).attentions
    assert record.batch == 2
    (u,) = list(logit_updates(a, {id(a.query.layer): layer_updates(a.query.layer, 2)}))
    q, k, _ = attn.qkv(x).unflatten(-1, (3, 2, 6)).permute(2, 0, 3, 1, 4)
    s2 = x.square().sum(-1) + 1
    i, j = 1, 3
    want = k[0, 1, j].square().sum() * s2[0, i] + q[0, 1, i].square().sum() * s2[0, j]
    torch.testing.assert_close(u.divergence[0, 1, i, j], (want / 6).detach())


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("attention", [None, *KINDS])
def test_gradient_of_the_logits_is_autograds(
    attention: str | None, fused: bool, mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("affdiv_zoo.diagnostics._attention.CHUNK", 1)  # each sample by itself
    make = timm.layers.Attention if attention is None else CorrectedAttention
    attn = make(8, 2, **({} if attention is None else {"attention": attention})).double()
    attn.fused_attn = fused
    x = torch.randn(3, 4, 8, dtype=torch.float64)
    keep = torch.rand(3, 1, 4, 4) > 0.3
    keep |= torch.eye(4, dtype=torch.bool)
    kwargs = {
        "none": {},
        "causal": {"is_causal": True},
        "bool": {"attn_mask": keep},
        "float": {"attn_mask": torch.randn(4, 4, dtype=torch.float64)},
    }[mask]
    (a,) = run(Probe(attn), {"x": x, **kwargs}, lambda out: (out**3).mean()).attentions
    chunks = list(logit_updates(a, {id(a.query.layer): layer_updates(a.query.layer, 3)}))
    assert len(chunks) == 3
    ideal, valid = (torch.cat([getattr(u, key) for u in chunks]) for key in ("ideal", "valid"))

    logits = logits_by_hand(attn, x, attn.qkv(x)).detach().requires_grad_()
    v = attn.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)[2]
    shown = logits
    if mask == "causal":
        shown = logits.masked_fill(~torch.ones(4, 4, dtype=torch.bool).tril(), -torch.inf)
    elif mask == "bool":
        shown = logits.masked_fill(~keep, -torch.inf)
    elif mask == "float":
        shown = logits + kwargs["attn_mask"]
    out = attn.proj((shown.softmax(-1) @ v).transpose(1, 2).reshape(3, 4, 8))
    (want,) = torch.autograd.grad((out**3).mean(), logits)
    torch.testing.assert_close(ideal, want)
    assert valid.sum() == (shown > -torch.inf).sum()


@pytest.mark.parametrize("attention", KINDS)
def test_verified_in_a_model(attention: str) -> None:
    model = timm.create_model("vit_nano_patch4_32_affine", attention=attention, depth=2, img_size=16).double()
    report = diagnose(model, torch.randn(3, 3, 16, 16).double(), torch.tensor([1, 2, 3]), verify=True)
    found = [e for e in report.layers if e.kind == "logits"]
    assert [e.name for e in found] == ["blocks.0.attn.logits", "blocks.1.attn.logits"]
    assert all(e.verify_error < 1e-6 and e.correction == attention and e.rows == 3 * 3 * 16**2 for e in found)
    assert not any(e.name.endswith("logits") for e in report.not_covered)


def test_transformers_vit_and_what_cannot_be_reached() -> None:
    config = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=16)
    for implementation in ("sdpa", "eager"):
        made = transformers.ViTConfig(**config, patch_size=8, num_labels=3, attn_implementation=implementation)
        model = transformers.ViTForImageClassification(made)
        inputs = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 2])}
        report = diagnose(model, inputs, verify=True)
        assert report.max_verify_error < 1e-3
        logits = [e for e in report.layers if e.kind == "logits"]
        left = [e for e in report.not_covered if e.name.endswith(".logits")]
        assert (len(logits), len(left)) == ((1, 0) if implementation == "sdpa" else (0, 1))


@pytest.mark.parametrize(
    ("options", "reached", "why"),
    [
        ({}, True, ""),
        ({"qk_norm": True}, False, "something after them"),
        ({"attn_drop": 0.1}, False, "dropout"),
    ],
)
def test_options_of_timms_attention(options: dict, reached: bool, why: str) -> None:
    attn = timm.layers.Attention(8, 2, norm_layer=nn.LayerNorm, **options)
    x = torch.randn(2, 4, 8)
    report = diagnose(Probe(attn), x, x, lambda out, x: F.mse_loss(out, x))
    assert ("attn.logits" in [e.name for e in report.layers]) == reached
    left = {e.name: e.why for e in report.not_covered}
    assert ("attn.logits" in left) != reached and why in left.get("attn.logits", "")
    if options == {"attn_drop": 0.1}:
        report = diagnose(Probe(attn).eval(), x, x, lambda out, x: F.mse_loss(out, x))
        assert report["attn.logits"].divergence > 0


class Rotated(nn.Module):
    """Attention by torch's function, its queries multiplied before, in place or not, or not at all."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.q, self.kv, self.how = nn.Linear(8, 8), nn.Linear(8, 16), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, (k, v) = self.q(x), self.kv(x).chunk(2, -1)
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in (q, k, v))
        if self.how == "in place":
            q.mul_(2.0)
        elif self.how == "new":
            q = q * 2.0
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("how", ["not", "new", "in place"])
def test_queries_that_are_no_longer_the_layers_output_are_noticed(how: str) -> None:
    x = torch.randn(3, 5, 8).double()
    report = diagnose(Rotated(how).double(), x, x, lambda out, x: F.mse_loss(out, x), verify=True)
    assert [e.name for e in report.layers] == (["q", "kv", "logits"] if how == "not" else ["q", "kv"])
    assert [e.name for e in report.not_covered] == ([] if how == "not" else ["logits"])
    assert report.max_verify_error < 1e-6
