"""The conversion: what it finds, what it folds, what it leaves and says."""

import copy
import json
import re
import warnings

import pytest
import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import BatchNormAct2d, LayerNorm2d, RmsNorm, RmsNorm2d, SimpleNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import affdiv_zoo
from affdiv_zoo.convert import apply_plan
from affdiv_zoo.layers import CorrectedAttention, CorrectedLinear, PatchNormConv2d

N = 6  # features of the small nets

NORMS = {
    "LayerNorm": lambda eps: nn.LayerNorm(N, eps=eps),
    "LayerNorm, no bias": lambda eps: nn.LayerNorm(N, eps=eps, bias=False),
    "LayerNorm, no parameters": lambda eps: nn.LayerNorm(N, eps=eps, elementwise_affine=False),
    "RMSNorm": lambda eps: nn.RMSNorm(N, eps=eps),
    "RMSNorm, default eps": lambda eps: nn.RMSNorm(N),
    "timm RmsNorm": lambda eps: RmsNorm(N, eps=eps),
    "Llama": lambda eps: LlamaRMSNorm(N, eps=eps),
    "Gemma": lambda eps: GemmaRMSNorm(N, eps=eps),
}


def randomise(model, seed=0, size=0.5):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += size * torch.randn(p.shape, generator=generator).to(p.dtype)
        for m in model.modules():
            if getattr(m, "running_var", None) is not None:
                m.running_mean.normal_(generator=generator)
                m.running_var.uniform_(0.5, 2.0, generator=generator)
    return model


class Net(nn.Module):
    """Modules, and a forward made of them."""

    def __init__(self, forward, **modules):
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)
        self.how = forward
        randomise(self)

    def forward(self, *args, **kwargs):
        return self.how(self, *args, **kwargs)


def convert(model, x, correction="norm", **kwargs):
    """Converts; returns the report by norm name, after the checks that hold for every exact or left swap."""
    before = copy.deepcopy(model).eval()(x)
    model, report = affdiv_zoo.convert(model, correction, example_input=x, **kwargs)
    if not report.count("approximate"):
        torch.testing.assert_close(model.eval()(x), before, rtol=1e-5, atol=1e-5)
    return {n.name: n for n in report.norms}


# ---------------------------------------------------------------------------------------------------------------------
# LayerNorm and RMSNorm
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", NORMS)
@settings(max_examples=6)
@given(
    bias=st.booleans(),
    scale=st.sampled_from(("rms", "l2")),
    eps=st.sampled_from((1e-6, 1e-3, 0.05)),
    size=st.sampled_from((0.05, 1.0, 30.0)),
    seed=st.integers(0, 100),
)
def test_norm_like_is_exact(kind, bias, scale, eps, size, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(NORMS[kind](eps), nn.Linear(N, 3, bias=bias)).double()
    randomise(model, seed)
    weight = model[1].weight
    x = size * torch.randn(5, N, dtype=torch.float64)
    before = copy.deepcopy(model)(x)
    model, report = affdiv_zoo.convert(model, "norm", scale=scale, example_input=torch.randn(3, N).double())
    # Llama's and Gemma's compute in float32 whatever they are given.
    tolerance = 1e-5 if kind in ("Llama", "Gemma") else 1e-11
    torch.testing.assert_close(model(x), before, rtol=tolerance, atol=tolerance)
    assert [n.result for n in report.norms] == ["exact"]
    assert type(model[0]) is nn.Identity and not list(model[0].parameters())
    assert type(model[1]) is CorrectedLinear and model[1].weight is weight
    assert model[1].center == kind.startswith("LayerNorm")
    # Only a shift of the norm makes a bias.
    assert (model[1].bias is not None) == (bias or kind == "LayerNorm")


@pytest.mark.parametrize("norm", (LayerNorm2d, RmsNorm2d))
def test_channel_norms_fold_into_pointwise_convolutions(norm):
    model = nn.Sequential(norm(N), nn.Conv2d(N, 4, 1, stride=2)).double()
    entry = convert(randomise(model), torch.randn(2, N, 6, 5, dtype=torch.float64))["0"]
    assert entry.result == "exact" and type(model[1]) is PatchNormConv2d
    # A square map whose width is the number of channels: both dimensions fit, only one is the norm's.
    model = nn.Sequential(norm(N), nn.Conv2d(N, 4, 1)).double()
    assert convert(randomise(model), torch.randn(2, N, N, N).double())["0"].result == "exact"


@pytest.mark.parametrize("correction", ("affine", "norm"))
def test_affine_without_bias_is_norm(correction):
    model = randomise(nn.Sequential(nn.RMSNorm(N), nn.Linear(N, 3, bias=False)))
    assert convert(model, torch.randn(4, N), correction)["0"].result == "exact"
    assert model[1].correction == correction and model[1].bias is None


@pytest.mark.parametrize(("correction", "center"), (("affine", None), ("norm", False), ("affine", False)))
def test_the_reported_difference_is_the_layers(correction, center):
    model = randomise(nn.Sequential(nn.LayerNorm(N), nn.Linear(N, 3))).double()
    x = 3 * torch.randn(20, N, dtype=torch.float64) + 1
    before = copy.deepcopy(model)(x)
    entry = convert(model, x, correction, center=center)["0"]
    assert entry.result == "approximate"
    expected = (model(x) - before).square().mean().sqrt() / before.square().mean().sqrt()
    assert entry.difference == pytest.approx(expected.item(), rel=1e-6)
    assert 1e-4 < entry.difference < 0.5


def test_affine_approaches_the_norm_for_long_vectors_of_one_length():
    """(Wx + b) / ||[x; 1]|| with b times the length is Wx / ||x|| + b."""
    model = randomise(nn.Sequential(nn.LayerNorm(N), nn.Linear(N, 3))).double()
    x = torch.randn(20, N, dtype=torch.float64)
    x = x - x.mean(-1, keepdim=True)
    x = 1e3 * x / x.norm(dim=-1, keepdim=True)
    assert convert(model, x, "affine")["0"].difference < 1e-6


def test_the_fit_is_the_best():
    """No other factor on the weights, or on the bias, comes closer to the part that it replaces."""
    model = randomise(nn.Sequential(nn.LayerNorm(N, eps=0.3), nn.Linear(N, 3))).double()
    x = torch.randn(50, N, dtype=torch.float64)
    original = copy.deepcopy(model)
    assert convert(model, x, "affine")["0"].result == "approximate"
    centred = x - x.mean(-1, keepdim=True)
    bias_part = model[1].bias * ((N + 1) / (centred.square().sum(-1, keepdim=True) + 1)) ** 0.5
    bias_goal = original[1](original[0].bias)
    for part, goal in ((bias_part, bias_goal), (model(x) - bias_part, original(x) - bias_goal)):
        lower, best, upper = (float((f * part - goal).detach().square().sum()) for f in (0.99, 1.0, 1.01))
        assert best < lower and best < upper


# ---------------------------------------------------------------------------------------------------------------------
# What feeds what
# ---------------------------------------------------------------------------------------------------------------------

MOVES = {
    "view": lambda y: y.view(2, 2, 6, N),
    "flatten": lambda y: y.flatten(0, 1),
    "windows": lambda y: y.view(2, 2, 2, 3, N).permute(0, 3, 1, 2, 4).reshape(-1, 4, N),
    "roll": lambda y: y.roll(1, dims=1),
    "transpose": lambda y: y.transpose(0, 1).contiguous(),
    "there and back": lambda y: y.transpose(1, 2).clone().transpose(1, 2),
    "first token": lambda y: y[:, 0],
    "slices": lambda y: y[:, 1:-1],
    "unbind": lambda y: y.unbind(1)[3],
    "chunk": lambda y: y.chunk(2, dim=1)[1],
    "split": lambda y: y.split([3, 9], dim=1)[0],
    "index": lambda y: y[:, torch.tensor([3, 1, 1])],
    "mask": lambda y: y[torch.arange(24).view(2, 12) % 2 == 0],
    "index_select": lambda y: y.index_select(1, torch.tensor([2, 0])),
    "flip": lambda y: y.flip(1),
    "expand": lambda y: y[None].expand(3, -1, -1, -1),
    "squeeze": lambda y: y[:, :1].squeeze(1),
    "no padding": lambda y: F.pad(y, (0, 0, 0, 0)),
    "no change": lambda y: F.dropout(y.to(y.dtype).detach().contiguous(), 0.5, training=False),
}
NOT_MOVES = {
    "add": lambda y: y + 1,
    "mean": lambda y: y.mean(1),
    "relu_": lambda y: y.relu_(),
    "constant_pad_nd": lambda y: F.pad(y, (0, 0, 0, 1)),
    "masked_fill": lambda y: y.masked_fill(torch.arange(12).view(12, 1) < 3, 0.0),
    "cat": lambda y: torch.cat([y, y], 1),
    "_unsafe_view": lambda y: y.transpose(1, 2).reshape(2, 12, N),  # (features, tokens) cut up anew
    "index": lambda y: y[..., torch.arange(N - 1, -1, -1)],
    "flip": lambda y: y.flip(-1),
    "roll": lambda y: y.roll(1, -1),
    "_to_copy": lambda y: y.float().double(),
    "max": lambda y: y.max(1).values,
}


@pytest.mark.parametrize("name", MOVES)
def test_moves_of_whole_vectors_are_followed(name):
    move = MOVES[name]
    net = Net(lambda m, x: m.fc(move(m.norm(x))), norm=nn.LayerNorm(N), fc=nn.Linear(N, 3)).double()
    entry = convert(net, torch.randn(2, 12, N).double())["norm"]
    assert entry.result == "exact"
    assert ("padding" in entry.why) == (name == "no padding")


@pytest.mark.parametrize("name", NOT_MOVES)
def test_everything_else_is_named(name):
    move = NOT_MOVES[name]
    net = Net(lambda m, x: m.fc(move(m.norm(x))), norm=nn.LayerNorm(N), fc=nn.Linear(N, 3)).double()
    entry = convert(net, torch.randn(2, 12, N).double())["norm"]
    assert entry.result == "left"
    assert re.match(rf"its output goes to {name}\b", entry.why), entry.why


def lin(n_in=N, n_out=N, **kwargs):
    return nn.Linear(n_in, n_out, **kwargs)


def functional(m, x):
    return F.linear(m.norm(x), m.fc.weight)


def parallel(m, x):
    y = m.norm(x)
    return m.q(y) * m.k(y) + m.v(y[:, :1])


def change_in_place(m, x):
    x = x * 1.0
    y = m.norm(x)
    x += 1
    return m.fc(y)


def tied(**modules):
    modules["fc2"].weight = modules["fc"].weight
    return modules


class OwnLinear(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


LEFT = {
    "add in": Net(lambda m, x: x + m.fc(y := m.norm(x)) + y, norm=nn.LayerNorm(N), fc=lin()),
    "it is part of the model's output": Net(lambda m, x: (m.fc(y := m.norm(x)), y)[1], norm=nn.LayerNorm(N), fc=lin()),
    "nothing uses its output": Net(lambda m, x: (m.norm(x), m.fc(x))[1], norm=nn.LayerNorm(N), fc=lin()),
    "not called on example_input": Net(lambda m, x: m.fc(x), norm=nn.LayerNorm(N), fc=lin()),
    "mm in": Net(functional, norm=nn.LayerNorm(N), fc=lin()),
    "fc.weight is used outside of the layer, by t in": Net(
        lambda m, x: m.fc(m.norm(x)) + F.linear(x, m.fc.weight), norm=nn.LayerNorm(N), fc=lin()
    ),
    "its parameters are used outside of it": Net(
        lambda m, x: m.fc(m.norm(x)) * m.norm.weight, norm=nn.LayerNorm(N), fc=lin()
    ),
    "fc is fed by something else too": Net(lambda m, x: m.fc(m.norm(x)) + m.fc(x), norm=nn.LayerNorm(N), fc=lin()),
    "fc is fed by norm2 too": Net(
        lambda m, x: m.fc(m.norm(x)) + m.fc(m.norm2(x)), norm=nn.LayerNorm(N), norm2=nn.LayerNorm(N), fc=lin()
    ),
    "its input is changed in place": Net(change_in_place, norm=nn.LayerNorm(N), fc=lin()),
    "fc mixes another dimension": Net(
        lambda m, x: m.fc(m.norm(x).transpose(1, 2)), norm=nn.LayerNorm(N), fc=lin(4, 3)
    ),
    "fc is a OwnLinear": Net(lambda m, x: m.fc(m.norm(x)), norm=nn.LayerNorm(N), fc=OwnLinear(N, N)),
    "fc.weight is tied to fc2.weight": Net(
        lambda m, x: m.fc2(m.fc(m.norm(x))), **tied(norm=nn.LayerNorm(N), fc=lin(), fc2=lin())
    ),
    "fc.weight is computed": Net(
        lambda m, x: m.fc(m.norm(x)), norm=nn.LayerNorm(N), fc=nn.utils.spectral_norm(lin())
    ),
    "does not compute a LayerNorm": Net(lambda m, x: m.fc(m.norm(x)), norm=SimpleNorm(N), fc=lin()),
    "norm2 (LayerNorm)": Net(
        lambda m, x: m.fc(m.norm2(m.norm(x))), norm=nn.LayerNorm(N), norm2=nn.LayerNorm(N), fc=lin()
    ),
    "GroupNorm normalises over positions": Net(
        lambda m, x: m.fc(m.norm(x.transpose(1, 2)).transpose(1, 2)), norm=nn.GroupNorm(2, N), fc=lin()
    ),
}  # fmt: skip


@pytest.mark.parametrize("reason", LEFT)
def test_what_is_left_and_why(reason):
    net = copy.deepcopy(LEFT[reason]).double()
    entry = convert(net, torch.randn(2, 4, N, dtype=torch.float64))["norm"]
    assert entry.result == "left" and not entry.layers
    assert reason in entry.why
    assert not isinstance(net.norm, nn.Identity)


def test_several_layers_and_several_calls():
    net = Net(parallel, norm=nn.LayerNorm(N), q=lin(), k=lin(bias=False), v=lin()).double()
    entry = convert(net, torch.randn(2, 4, N).double())["norm"]
    assert entry.result == "exact" and [c.name for c in entry.layers] == ["q", "k", "v"]
    net = Net(lambda m, x: m.a(m.norm(x)) + m.b(m.norm(2 * x + 1)), norm=nn.LayerNorm(N), a=lin(), b=lin()).double()
    assert convert(net, torch.randn(2, 4, N).double())["norm"].result == "exact"


def test_a_hook_that_changes_the_norm_is_noticed():
    net = Net(lambda m, x: m.fc(m.norm(x)), norm=nn.LayerNorm(N), fc=lin())
    net.norm.register_forward_hook(lambda m, args, out: out * 3)
    assert "a hook" in convert(net, torch.randn(2, 4, N))["norm"].why


def test_what_no_trace_can_see_is_warned_of():
    net = Net(lambda m, x: m.fc(y := m.norm(x)) + float(y.numpy().sum()), norm=nn.LayerNorm(N), fc=lin())
    with pytest.warns(UserWarning, match="did not see"), torch.no_grad():
        affdiv_zoo.convert(net, "norm", example_input=torch.randn(2, 4, N))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = randomise(nn.Sequential(nn.LayerNorm(N), lin()))
        affdiv_zoo.convert(model, "norm", example_input=torch.randn(2, N))


def test_replaced_forwards_are_left():
    net = Net(lambda m, x: m.fc(m.norm(x)), norm=nn.LayerNorm(N), fc=lin())
    net.fc.forward = lambda x: nn.Linear.forward(net.fc, x) + 1
    assert "fc.forward was replaced" in convert(net, torch.randn(2, N))["norm"].why


def test_torchs_encoder_layer_keeps_its_norms():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    entries = convert(randomise(model), torch.randn(2, 3, 8))
    assert len(entries) == 4 and all("TransformerEncoderLayer" in e.why for e in entries.values())


# ---------------------------------------------------------------------------------------------------------------------
# BatchNorm
# ---------------------------------------------------------------------------------------------------------------------


def stats(layer, model, x):
    """Per-channel mean and deviation of what a module returns while the model runs."""
    seen = []
    handle = layer.register_forward_hook(lambda m, a, y: seen.append(y.movedim(1, -1).flatten(0, -2)))
    model(x)
    handle.remove()
    return seen[0].mean(0), seen[0].std(0, correction=0)


CONVS = {
    "3x3": (nn.Conv2d(4, N, 3, padding=1), nn.BatchNorm2d(N)),
    "no bias, stride, dilation": (nn.Conv2d(4, N, 3, 2, padding=2, dilation=2, bias=False), nn.BatchNorm2d(N)),
    "grouped": (nn.Conv2d(4, N, 3, groups=2), nn.BatchNorm2d(N, affine=False)),
    "depthwise": (nn.Conv2d(4, 4, 3, groups=4), nn.BatchNorm2d(4, eps=0.1)),
    "reflect": (nn.Conv2d(4, N, 3, padding=1, padding_mode="reflect"), nn.BatchNorm2d(N)),
}


@pytest.mark.parametrize("correction", ("affine", "norm"))
@pytest.mark.parametrize("name", CONVS)
def test_each_channel_keeps_its_mean_and_deviation(name, correction):
    conv, norm = copy.deepcopy(CONVS[name])
    second = nn.Sequential(nn.Conv2d(norm.num_features, 5, 3), nn.BatchNorm2d(5))
    model = randomise(nn.Sequential(conv, norm, nn.ReLU(), *second)).double().train()
    x = torch.randn(4, 4, 12, 12, dtype=torch.float64) + 0.5
    model.eval()
    expected = [stats(model[i], model, x) for i in (1, 4)]
    original = copy.deepcopy(model)
    weight = model[0].weight
    entries = convert(model, x, correction)
    for i, (mean, std) in zip((1, 4), expected, strict=True):  # the second one sees the converted first one's outputs
        got_mean, got_std = stats(model[i], model, x)
        torch.testing.assert_close(got_mean, mean, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(got_std, std, rtol=1e-8, atol=1e-8)
    assert [e.result for e in entries.values()] == ["approximate"] * 2
    assert entries["1"].layers[0].std_ratio == pytest.approx(1.0)
    assert model[0].weight is weight and model[0].center and type(model[1]) is nn.Identity
    difference = model[:2](x) - original[:2](x)
    expected = difference.square().mean().sqrt() / original[:2](x).square().mean().sqrt()
    assert entries["1"].difference == pytest.approx(expected.item(), rel=1e-6)
    assert not list(model.buffers())


def test_patches_of_one_length_convert_exactly():
    """Then PatchNorm divides by a constant, which the gain takes back: the calibration finds the original map."""
    model = randomise(nn.Sequential(nn.Conv2d(4, N, 1), nn.BatchNorm2d(N))).double()
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    x = x - x.mean(1, keepdim=True)
    x = x / x.norm(dim=1, keepdim=True)
    for correction in ("affine", "norm"):
        converted = copy.deepcopy(model)
        assert convert(converted, x, correction)["1"].difference < 1e-6
        torch.testing.assert_close(converted(x), model.eval()(x))


def test_linear_layers_in_front_of_batchnorm():
    model = randomise(nn.Sequential(lin(), nn.BatchNorm1d(N), nn.Tanh())).double().eval()
    x = torch.randn(30, N, dtype=torch.float64)
    mean, std = stats(model[1], model, x)
    assert convert(model, x, "affine")["1"].result == "approximate"
    torch.testing.assert_close(stats(model[0], model, x), (mean, std))


def test_degenerate_channels_stay_finite():
    """A norm whose scale is zero, a single position, and an input without variation."""
    for x in (torch.randn(2, 4, 5, 5), torch.randn(1, 4, 3, 3), torch.ones(2, 4, 5, 5), torch.zeros(2, 4, 5, 5)):
        for correction in ("affine", "norm"):
            model = randomise(nn.Sequential(nn.Conv2d(4, N, 3), nn.BatchNorm2d(N)))
            with torch.no_grad():
                model[1].weight[:2] = 0
            mean, _ = stats(model[1], model.eval(), x)
            convert(model, x, correction)
            assert all(p.isfinite().all() for p in model.parameters())
            torch.testing.assert_close(stats(model[1], model, x)[0], mean, rtol=1e-4, atol=1e-4)


def test_fused_activations_stay():
    model = nn.Sequential(nn.Conv2d(4, N, 3), BatchNormAct2d(N)).eval()
    convert(randomise(model), x := torch.randn(2, 4, 6, 6), "affine")
    assert [type(m) for m in model[1]] == [nn.ReLU]
    assert (model(x) >= 0).all() and (model(x) == 0).any()


def test_single_entry_patches_are_not_centred():
    model = randomise(nn.Sequential(nn.Conv2d(4, 4, 1, groups=4), nn.BatchNorm2d(4)))
    entry = convert(model, torch.randn(2, 4, 5, 5), "affine")["1"]
    assert not model[0].center and "one entry" in entry.why


BN_LEFT = {
    "its input comes from the model's input": Net(lambda m, x: m.norm(x), norm=nn.BatchNorm2d(4)),
    "its input comes from add in": Net(
        lambda m, x: m.norm(x + m.conv(x)), conv=nn.Conv2d(4, 4, 3, padding=1), norm=nn.BatchNorm2d(4)
    ),
    "the output of conv also goes to mul in": Net(
        lambda m, x: m.norm(y := m.conv(x)) * y, conv=nn.Conv2d(4, 4, 3), norm=nn.BatchNorm2d(4)
    ),
    "called more than once": Net(
        lambda m, x: m.norm(m.norm(m.conv(x))), conv=nn.Conv2d(4, 4, 3), norm=nn.BatchNorm2d(4)
    ),
    "conv is called more than once": Net(
        lambda m, x: m.norm(m.conv(x)) + m.conv(x), conv=nn.Conv2d(4, 4, 3), norm=nn.BatchNorm2d(4)
    ),
    "keeps no running statistics": Net(
        lambda m, x: m.norm(m.conv(x)), conv=nn.Conv2d(4, 4, 3), norm=nn.BatchNorm2d(4, track_running_stats=False)
    ),
    "InstanceNorm2d normalises over positions": Net(
        lambda m, x: m.norm(m.conv(x)), conv=nn.Conv2d(4, 4, 3), norm=nn.InstanceNorm2d(4, track_running_stats=True)
    ),
    "conv is a ConvTranspose2d": Net(
        lambda m, x: m.norm(m.conv(x)), conv=nn.ConvTranspose2d(4, 4, 3), norm=nn.BatchNorm2d(4)
    ),
    "its input comes from the norm first": Net(
        lambda m, x: m.norm(m.first(x)), first=LayerNorm2d(4), norm=nn.BatchNorm2d(4)
    ),
}


@pytest.mark.parametrize("reason", BN_LEFT)
def test_batchnorms_that_are_left(reason):
    entry = convert(copy.deepcopy(BN_LEFT[reason]), torch.randn(2, 4, 6, 6), "affine")["norm"]
    assert entry.result == "left"
    assert reason in entry.why


def test_a_layer_takes_over_one_norm():
    model = randomise(nn.Sequential(LayerNorm2d(4), nn.Conv2d(4, N, 1), nn.BatchNorm2d(N)))
    entries = convert(model, torch.randn(2, 4, 5, 5), "norm")
    assert [e.result for e in entries.values()] == ["exact", "left"]
    assert "1 has taken over 0 already" in entries["2"].why


# ---------------------------------------------------------------------------------------------------------------------
# The gradient-only correction
# ---------------------------------------------------------------------------------------------------------------------


def test_gradient_keeps_the_forward_pass_and_corrects_the_backward():
    model = randomise(nn.Sequential(nn.LayerNorm(N), lin())).double()
    plain = copy.deepcopy(model)
    x = torch.randn(1, N, dtype=torch.float64)
    entry = convert(model, x, "gradient")["0"]
    assert entry.result == "exact" and isinstance(model[0], nn.LayerNorm)
    for m in (model, plain):
        m(x).square().sum().backward()
    divergence = plain[0](x).square().sum() + 1
    torch.testing.assert_close(model[1].weight.grad, plain[1].weight.grad / divergence)
    conv = randomise(nn.Sequential(nn.Conv2d(4, N, 3), nn.BatchNorm2d(N)))
    assert convert(conv, torch.randn(2, 4, 6, 6), "gradient")["1"].result == "exact"
    assert conv[0].correction == "gradient" and isinstance(conv[1], nn.BatchNorm2d)


# ---------------------------------------------------------------------------------------------------------------------
# What survives, what is refused, what is said
# ---------------------------------------------------------------------------------------------------------------------


def test_what_survives():
    model = timm.create_model("test_vit", img_size=32, depth=2, num_classes=5).to(torch.bfloat16).train()
    randomise(model)
    model.blocks[0].eval()
    model.blocks[1].attn.qkv.requires_grad_(False)
    calls = []
    model.blocks[0].norm1.register_forward_hook(lambda *_: calls.append("norm"))
    model.blocks[0].attn.qkv.register_forward_pre_hook(lambda *_: calls.append("qkv"))
    modules = dict(model.named_modules())
    modes = {name: m.training for name, m in modules.items()}
    weights = {name: p for name, p in model.named_parameters() if "norm" not in name}
    optimizer = torch.optim.AdamW(model.parameters())
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    random_state = torch.get_rng_state()
    converted, report = affdiv_zoo.convert(model, "norm")
    assert converted is model and dict(model.named_modules()) == modules
    assert torch.equal(torch.get_rng_state(), random_state)
    assert {name: m.training for name, m in model.named_modules()} == modes
    after = dict(model.named_parameters())
    assert after.keys() == weights.keys() and all(after[n] is p and id(p) in held for n, p in weights.items())
    assert {p.dtype for p in after.values()} == {torch.bfloat16}
    assert [n for n, p in after.items() if not p.requires_grad] == [
        "blocks.1.attn.qkv.weight",
        "blocks.1.attn.qkv.bias",
    ]
    assert report.output_difference < 0.1
    calls.clear()
    model(torch.randn(1, 3, 32, 32, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert calls == ["norm", "qkv"]


def test_inputs_of_every_kind_and_defaults():
    net = Net(lambda m, x, y=0: m.fc(m.norm(x)) + y, norm=nn.LayerNorm(N), fc=lin())
    x = torch.randn(3, N)
    for example in (x, (x, 1.0), [x], {"x": x, "y": 2.0}):
        assert affdiv_zoo.convert(copy.deepcopy(net), "norm", example_input=example)[1].count("exact") == 1
    with pytest.raises(ValueError, match="example_input=None.*Net"):
        affdiv_zoo.convert(net)
    net.pretrained_cfg = {"input_size": (3, 8, 8)}
    with pytest.raises(ValueError, match=r"example_input=None.*\(2, 3, 8, 8\)"):
        affdiv_zoo.convert(net)
    model = timm.create_model("test_vit", img_size=32, depth=1, in_chans=1)
    assert affdiv_zoo.convert(model, "norm")[1].count("exact") == 3


def small():
    return nn.Sequential(nn.LayerNorm(N), lin())


def compiled_in_place():
    model = small()
    model.compile()
    return model


def with_integers():
    model = small()
    model[1].weight = nn.Parameter(torch.zeros(N, N, dtype=torch.int8), requires_grad=False)
    return model


REFUSED = {
    "expected a torch.nn.Module": lambda: "resnet50",
    "wrapped": lambda: nn.DataParallel(small()),
    "scripted or traced": lambda: torch.jit.trace(small(), torch.randn(2, N)),
    r"compiled \(OptimizedModule\)": lambda: torch.compile(small()),
    r"compiled \(Sequential\)": compiled_in_place,
    "torch.int8, so quantised": with_integers,
    "meta device": lambda: small().to("meta"),
    "lazy": lambda: nn.Sequential(nn.LayerNorm(N), nn.LazyLinear(3)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message):
    with pytest.raises(TypeError, match=message):
        affdiv_zoo.convert(REFUSED[message](), "norm", example_input=torch.randn(2, N))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    (
        ({"correction": "none"}, "correction='none' is not one of"),
        ({"scale": "max"}, "scale='max'"),
        ({"center": "yes"}, "center='yes'"),
        ({"correction": "gradient", "center": True}, "center=True"),
        ({"attention": "flash"}, "attention='flash'"),
        ({"attention": "separable"}, "has no timm.layers.Attention"),
        ({"correction": "gradient", "attention": "separable"}, "correction='gradient' keeps"),
    ),
)
def test_arguments(kwargs, message):
    model = small()
    with pytest.raises(ValueError, match=message):
        affdiv_zoo.convert(model, example_input=torch.randn(2, N), **kwargs)
    assert type(model[1]) is nn.Linear


def test_a_second_conversion_is_refused():
    model, _ = affdiv_zoo.convert(small(), "norm", example_input=torch.randn(2, N))
    with pytest.raises(ValueError, match="converted already"):
        affdiv_zoo.convert(model, "norm", example_input=torch.randn(2, N))


def test_nothing_to_convert_is_a_report():
    _, report = affdiv_zoo.convert(nn.Sequential(lin()), example_input=torch.randn(2, N))
    assert report.norms == [] and report.output_difference == 0.0
    assert str(report) == "Sequential: no norms found, nothing to convert"


def test_the_report():
    model = timm.create_model("efficientnet_b0", num_classes=4)
    _, report = affdiv_zoo.convert(model, "affine", example_input=torch.randn(1, 3, 32, 32))
    text = str(report)
    assert max(map(len, text.splitlines())) <= 100
    assert all(n.name[-28:] in text and n.layers[0].name in re.sub(r"\s+", " ", text) for n in report.norms)
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
    assert report.to_dict()["norms"][0]["layers"][0]["name"] == "conv_stem"


@pytest.mark.parametrize("correction", ("norm", "affine", "gradient"))
def test_plans_rebuild_the_model(correction):
    build = lambda: timm.create_model("convnext_atto", num_classes=4, depths=(1, 1, 1, 1))  # noqa: E731
    model, report = affdiv_zoo.convert(build(), correction, example_input=torch.randn(1, 3, 64, 64))
    with torch.device("meta"):
        again = apply_plan(build(), report.plan())
    again.load_state_dict(model.state_dict(), assign=True)
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(again.eval()(x), model.eval()(x))
    with pytest.raises(ValueError, match="does not have"):
        apply_plan(nn.Sequential(), report.plan())
    with pytest.raises(ValueError, match="plan='nonsense'"):
        apply_plan(build(), "nonsense")


# ---------------------------------------------------------------------------------------------------------------------
# Attention
# ---------------------------------------------------------------------------------------------------------------------


def vit():
    model = timm.create_model("test_vit", img_size=48, depth=2, num_classes=4)
    return randomise(model, size=0.1).double().eval()


def test_projection_attention_keeps_the_function():
    model = vit()
    x = torch.randn(2, 3, 48, 48, dtype=torch.float64)
    before = model(x)
    model, report = affdiv_zoo.convert(model, "norm", attention="projection", example_input=x)
    torch.testing.assert_close(model(x), before)
    assert isinstance(model.blocks[0].attn, CorrectedAttention) and len(report.attentions) == 2


@pytest.mark.parametrize("attention", ("separable", "logit", "exact"))
@pytest.mark.parametrize("correction", ("norm", "affine"))
def test_other_attentions_report_their_difference(attention, correction):
    model = vit()
    x = torch.randn(2, 3, 48, 48, dtype=torch.float64)
    plain, _ = affdiv_zoo.convert(copy.deepcopy(model), correction, example_input=x)
    model, report = affdiv_zoo.convert(model, correction, attention=attention, example_input=x)
    tokens = model._pos_embed(model.patch_embed(x))
    a, b = plain.blocks[0].attn(tokens), model.blocks[0].attn(tokens)
    expected = ((b - a).square().mean().sqrt() / a.square().mean().sqrt()).item()
    assert report.attentions[0].difference == pytest.approx(expected, rel=1e-6)
    with torch.no_grad():  # the fitted temperatures are closer than halves and doubles of them
        for factor in (0.5, 2.0):
            other = copy.deepcopy(model.blocks[0].attn)
            other.logit_scale += torch.tensor(factor).log()
            assert (other(tokens) - a).square().mean() > (b - a).square().mean()
    again = apply_plan(vit(), report.plan())
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(x), model(x))


@pytest.mark.parametrize("name", ("test_resnet", "mobilenetv2_100"))
@pytest.mark.parametrize("correction", ("affine", "norm", "gradient"))
def test_converted_nets_train(name, correction):
    """timm's activations and residual additions work in place, on what a converted convolution returns."""
    model = timm.create_model(name, num_classes=3)
    images = torch.randn(4, 3, 64, 64)
    model, _ = affdiv_zoo.convert(model, correction, example_input=images)
    model.train()
    torch.nn.functional.cross_entropy(model(images), torch.tensor([0, 1, 2, 0])).backward()
    for parameter_name, parameter in model.named_parameters():
        if correction == "gradient" or "bn" not in parameter_name:
            assert parameter.grad is not None, parameter_name
            assert torch.isfinite(parameter.grad).all(), parameter_name


def test_a_convolution_with_a_forward_hook_keeps_its_batch_norm():
    """The statistics were taken behind the hook, the calibration would be before it."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    model, report = affdiv_zoo.convert(model, "affine", example_input=torch.randn(2, 3, 6, 6))
    assert report.norms[0].result == "left"
    assert "0 has a forward hook" in report.norms[0].why
