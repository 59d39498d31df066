"""peft's LoRA on corrected layers: the low-rank term is inside the map."""

import copy

import pytest
import timm
import torch
import torch.nn as nn
from peft import IA3Config, LoHaConfig, LoraConfig, PeftModel, get_peft_model

from affdiv_zoo.functional import norm_like_linear
from affdiv_zoo.hf import AffDivConfig, AffDivForImageClassification, register_lora
from affdiv_zoo.layers import CorrectedLinear, PatchNormConv1d, PatchNormConv2d, PatchNormConv3d

LAYERS = {
    "linear": (lambda **k: CorrectedLinear(6, 5, **k), (3, 6)),
    "conv1d": (lambda **k: PatchNormConv1d(4, 5, 3, padding=1, **k), (2, 4, 7)),
    "conv2d": (lambda **k: PatchNormConv2d(4, 5, 3, stride=2, **k), (2, 4, 7, 7)),
    "conv2d 1x1": (lambda **k: PatchNormConv2d(4, 5, 1, **k), (2, 4, 3, 3)),
    "conv3d": (lambda **k: PatchNormConv3d(2, 3, 2, **k), (2, 2, 3, 4, 4)),
}


def adapted(layer, config=None, name="default"):
    """The layer in a model with an adapter that is not zero."""
    model = get_peft_model(nn.Sequential(layer), config or LoraConfig(target_modules=["0"], r=2, lora_alpha=3), name)
    randomise(model)
    return model


def randomise(model):
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)


def low_rank_term(adapter):
    """s B A, by convolving unit impulses for convolutions: independent of how peft merges."""
    a, b = adapter.lora_A["default"].weight, adapter.lora_B["default"].weight
    return torch.einsum("or,ri...->oi...", b.flatten(1), a) * adapter.scaling["default"]


@pytest.mark.parametrize("center", (False, True))
@pytest.mark.parametrize("correction", ("affine", "norm", "gradient", "none"))
@pytest.mark.parametrize("kind", LAYERS)
def test_the_term_is_inside_the_map_and_merging_is_exact(kind, correction, center):
    make, shape = LAYERS[kind]
    layer = make(bias=True, correction=correction, center=center).double()
    plain = copy.deepcopy(layer)
    nn.init.normal_(layer.bias)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(shape, dtype=torch.float64)
    model = adapted(layer).double()
    adapter = model.base_model.model[0]

    summed = copy.deepcopy(plain)
    summed.weight.data += low_rank_term(adapter)
    y = model(x)
    torch.testing.assert_close(y, summed(x))
    assert (y - plain(x)).abs().max() > 1e-3
    if correction in ("affine", "norm"):  # what peft does with layers that it does not know is something else
        term = low_rank_term(adapter)
        outside = plain(x) + type(plain).__mro__[1 if kind == "linear" else 2].forward(copy_with(plain, term), x)
        assert (outside - y).abs().max() > 1e-3

    model.merge_adapter()
    assert torch.equal(model(x), y)
    model.unmerge_adapter()
    assert torch.equal(adapter.base_layer.weight, plain.weight)
    assert torch.equal(model(x), y)
    with model.disable_adapter():
        assert torch.equal(model(x), plain(x))
    model.merge_adapter()
    with model.disable_adapter():  # unmerges by itself
        assert torch.equal(model(x), plain(x))
    model.merge_adapter(safe_merge=True)
    assert torch.equal(model(x), y)
    merged = model.merge_and_unload()
    assert type(merged[0]) is type(plain) and torch.equal(merged(x), y)


def copy_with(layer, weight):
    plain = copy.deepcopy(layer)
    plain.weight.data, plain.bias = weight, None
    return plain


def test_affine_like_by_the_formula():
    """s (W x + c B A x + b) / sqrt(||x||^2 + 1), term by term."""
    layer = CorrectedLinear(6, 5, correction="affine", scale="l2").double()
    nn.init.normal_(layer.bias)
    x = torch.randn(3, 6, dtype=torch.float64)
    model = adapted(layer).double()
    adapter = model.base_model.model[0]
    a, b = adapter.lora_A["default"].weight, adapter.lora_B["default"].weight
    z = x @ layer.weight.T + 3 / 2 * x @ a.T @ b.T + layer.bias
    torch.testing.assert_close(model(x), z / (x.square().sum(-1, keepdim=True) + 1).sqrt())


def test_gradients_reach_the_adapter_and_no_more():
    layer = CorrectedLinear(6, 5, correction="norm")
    model = adapted(layer)
    x = torch.randn(3, 6)
    model(x).square().sum().backward()
    adapter = model.base_model.model[0]
    a, b = adapter.lora_A["default"].weight, adapter.lora_B["default"].weight
    copies = [t.detach().clone().requires_grad_() for t in (a, b)]
    weight = layer.weight.detach() + 1.5 * copies[1] @ copies[0]
    norm_like_linear(x, weight, layer.bias.detach(), scale=layer.scale, eps=layer.eps).square().sum().backward()
    torch.testing.assert_close(a.grad, copies[0].grad)
    torch.testing.assert_close(b.grad, copies[1].grad)
    assert layer.weight.grad is None and layer.bias.grad is None


def test_two_adapters():
    model = adapted(CorrectedLinear(6, 5))
    model.add_adapter("second", LoraConfig(target_modules=["0"], r=3))
    randomise(model)
    x = torch.randn(3, 6)
    outputs = []
    for names in (["default"], ["second"], ["default", "second"]):
        model.base_model.set_adapter(names)
        outputs.append(model(x))
        model.merge_adapter()
        assert torch.equal(model(x), outputs[-1])
        model.unmerge_adapter()
        assert torch.equal(model(x), outputs[-1])
    assert not torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])
    with pytest.raises(ValueError, match="adapter_names"):
        model(x, adapter_names=["default", "second", "default"])


def test_bfloat16_merges_exactly():
    model = adapted(CorrectedLinear(6, 5).bfloat16())
    x = torch.randn(3, 6, dtype=torch.bfloat16)
    y = model(x)
    assert y.dtype == torch.bfloat16
    model.merge_adapter()
    assert torch.equal(model(x), y)


@pytest.mark.parametrize(
    ("architecture", "targets", "modules"),
    (
        ("vit_nano_patch4_32_affine", ["qkv", "proj", "fc1", "fc2", "head"], {"depth": 2}),
        pytest.param("resnet20_cifar_patchnorm", ["conv1", "conv2", "fc"], {"depth": 8}, marks=pytest.mark.slow),
        ("mlp_cifar_affine", "all-linear", {"width": 16, "depth": 2}),
    ),
)
@pytest.mark.parametrize("how", ("get_peft_model", "add_adapter"))
def test_models_train_save_and_load(architecture, targets, modules, how, tmp_path, monkeypatch):
    # transformers 5.24 asks for a peft that is not out yet; what these tests use of it is in 0.21.
    monkeypatch.setattr("transformers.integrations.peft.check_peft_version", lambda min_version: None)
    config = AffDivConfig(architecture=architecture, model_args=modules, num_labels=3)
    base = AffDivForImageClassification(config).eval()
    base.save_pretrained(tmp_path / "base")
    x, labels = torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 0])
    lora = LoraConfig(target_modules=targets, r=2)
    before = base(x).logits
    if how == "add_adapter":
        base.add_adapter(lora)
        model = base
    else:
        model = get_peft_model(base, lora)
    torch.testing.assert_close(model(x).logits, before, rtol=1e-5, atol=1e-5)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.01)
    losses = []
    for _ in range(4):
        loss = model(x, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    trained = model(x).logits

    model.save_pretrained(tmp_path / "adapter")  # read again without a word of ours
    fresh = AffDivForImageClassification.from_pretrained(tmp_path / "base")
    if how == "add_adapter":
        fresh.load_adapter(str(tmp_path / "adapter"))
        torch.testing.assert_close(fresh.eval()(x).logits, trained, rtol=1e-5, atol=1e-5)
        return
    loaded = PeftModel.from_pretrained(fresh, tmp_path / "adapter").eval()
    torch.testing.assert_close(loaded(x).logits, trained, rtol=1e-5, atol=1e-5)
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(merged(x).logits, trained, rtol=1e-5, atol=1e-5)
    merged.save_pretrained(tmp_path / "merged")
    saved = timm.create_model(f"local-dir:{tmp_path / 'merged'}", pretrained=True).eval()
    torch.testing.assert_close(saved(x), trained, rtol=1e-5, atol=1e-5)


def test_mixed_precision_and_compile():
    model = adapted(CorrectedLinear(6, 5))
    x = torch.randn(3, 6)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
        model.merge_adapter()
        assert torch.equal(model(x), y)
        model.unmerge_adapter()
    compiled = torch.compile(model.base_model.model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize(
    "wrong", (dict(lora_dropout=0.1), dict(use_dora=True), dict(lora_bias=True)), ids=lambda d: next(iter(d))
)
def test_what_has_no_place_inside_is_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}.*CorrectedLinear"):
        adapted(CorrectedLinear(6, 5), LoraConfig(target_modules=["0"], **wrong))
    adapted(nn.Linear(6, 5), LoraConfig(target_modules=["0"], **wrong))  # other layers are peft's affair


def test_groups_are_refused():
    with pytest.raises(ValueError, match="groups=2"), pytest.warns(UserWarning, match="groups > 1"):
        adapted(PatchNormConv2d(4, 4, 3, groups=2))


@pytest.mark.parametrize("config", (LoHaConfig, IA3Config))
def test_other_methods_are_refused(config):
    kwargs = dict(feedforward_modules=[]) if config is IA3Config else {}
    with pytest.raises(TypeError, match="outside of its corrected map"):
        get_peft_model(nn.Sequential(CorrectedLinear(6, 5)), config(target_modules=["0"], **kwargs))
    get_peft_model(nn.Sequential(nn.Linear(6, 5)), config(target_modules=["0"], **kwargs))


def test_a_config_from_before_the_import_needs_one_line():
    early = LoraConfig(target_modules=["0"], r=2, lora_alpha=3)
    early._custom_modules = {}  # as peft makes it
    with pytest.raises(TypeError, match="register_lora"):
        adapted(CorrectedLinear(6, 5), copy.deepcopy(early))
    model = adapted(CorrectedLinear(6, 5), register_lora(early))
    x = torch.randn(3, 6)
    y = model(x)
    assert torch.equal(model.merge_and_unload()(x), y)


def test_pefts_own_way_of_adapting_parameters_agrees():
    """``target_parameters`` puts the term into the weight, too; it is let through."""
    layer = CorrectedLinear(6, 5)
    model = adapted(copy.deepcopy(layer))
    other = adapted(layer, LoraConfig(target_modules=[], target_parameters=["0.weight"], r=2, lora_alpha=3))
    values = {k.split("lora_")[-1]: v for k, v in model.state_dict().items() if "lora_" in k}
    other.load_state_dict({k: values[k.split("lora_")[-1]] for k in other.state_dict() if "lora_" in k}, strict=False)
    x = torch.randn(3, 6)
    torch.testing.assert_close(model(x), other(x))
