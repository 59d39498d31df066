"""The ViTs: the LayerNorm net folded into them, pooling, rebuilt patch embeddings, options that do not fit."""

import pytest
import timm
import torch
import torch.nn as nn

from affdiv_zoo.functional import affine_like_linear_reference, corrected_attention_logits_reference
from affdiv_zoo.layers import CorrectedLinear, PatchNormConv2d


def folded(state, n):
    """A pre-norm ViT's weights as centred norm-like ones: W' = W diag(w), b' = b + W v, for LayerNorm's w and v."""
    state = dict(state)
    for norm in [key.removesuffix(".weight") for key in state if "norm" in key and key.endswith(".weight")]:
        w, v = state.pop(f"{norm}.weight"), state.pop(f"{norm}.bias")
        fed = {"norm1": "attn.qkv", "norm2": "mlp.fc1", "fc_norm": "head", "norm": "head"}[norm.split(".")[-1]]
        prefix = norm.rpartition(".")[0]
        linear = f"{prefix}.{fed}" if prefix else fed
        state[f"{linear}.bias"] = state[f"{linear}.bias"] + state[f"{linear}.weight"] @ v
        state[f"{linear}.weight"] = state[f"{linear}.weight"] * w
    return state


@pytest.mark.parametrize("kwargs", ({}, dict(class_token=True, global_pool="token"), dict(init_values=0.1)))
def test_the_layernorm_net_is_a_centred_norm_like_one(kwargs):
    """Exact but for eps. So the corrected layers are where the norms fed, and nowhere else."""
    plain = timm.create_model("vit_nano_patch4_32", **kwargs).double()
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.2)
    model = timm.create_model(
        "vit_nano_patch4_32_affine", correction="norm", center=True, attention="projection", **kwargs
    ).double()
    result = model.load_state_dict(folded(plain.state_dict(), 96), strict=False)
    # The temperatures start at 1 / sqrt(head_dim) under "projection": plain attention's.
    assert all(key.endswith("logit_scale") for key in result.missing_keys) and not result.unexpected_keys
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-4)


def test_a_block_is_the_formulas_it_stands_for():
    """Separable attention and affine-like maps, written out."""
    model = timm.create_model("vit_nano_patch4_32_affine").double()
    block, x = model.blocks[0], torch.randn(2, 7, 96, dtype=torch.float64)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.2)

    def affine_like(x, weight, bias):
        return affine_like_linear_reference(x, weight, bias, scale="rms")

    def heads(x):
        return x.unflatten(-1, (3, 32)).transpose(1, 2)

    qkv = block.attn.qkv
    wq, wk, wv = qkv.weight.chunk(3)
    bq, bk, bv = qkv.bias.chunk(3)
    q, k, v = heads(x @ wq.T + bq), heads(x @ wk.T + bk), heads(affine_like(x, wv, bv))
    logits = corrected_attention_logits_reference(x, q, k, "separable")
    logits = logits * block.attn.logit_scale.exp()[:, None, None]
    mixed = (logits.softmax(-1) @ v).transpose(1, 2).flatten(2)
    y = x + mixed @ block.attn.proj.weight.T + block.attn.proj.bias
    hidden = nn.functional.gelu(affine_like(y, block.mlp.fc1.weight, block.mlp.fc1.bias))
    y = y + hidden @ block.mlp.fc2.weight.T + block.mlp.fc2.bias
    torch.testing.assert_close(block(x), y, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("pool", ("avg", "token", "max", "avgmax", "map", "prr"))
def test_pooling_and_class_token(pool):
    kwargs = dict(global_pool=pool, class_token=pool == "token", depth=2)
    model = timm.create_model("vit_nano_patch4_32_affine", **kwargs)
    x = torch.randn(2, 3, 32, 32)
    assert model(x).shape == (2, 10)
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    corrected = {name for name, m in model.named_modules() if isinstance(m, CorrectedLinear)}
    assert ({"attn_pool.kv", "attn_pool.mlp.fc1"} <= corrected) == (pool == "map")
    assert not any(isinstance(m, nn.LayerNorm) for m in model.modules())
    model.reset_classifier(5, "avg")
    assert model(x).shape == (2, 5) and isinstance(model.head, CorrectedLinear)


@pytest.mark.parametrize("name", ("pre_norm", "qk_norm", "scale_attn_norm", "scale_mlp_norm"))
def test_norms_that_cannot_be_replaced_are_refused(name):
    with pytest.raises(ValueError, match=f"{name}=True"):
        timm.create_model("vit_nano_patch4_32_affine", **{name: True})


def test_the_patch_embedding_is_plain_unless_asked_for():
    model = timm.create_model("vit_nano_patch4_32_affine")
    assert type(model.patch_embed.proj) is nn.Conv2d
    model.set_input_size(img_size=(64, 64), patch_size=(8, 8))
    assert type(model.patch_embed.proj) is nn.Conv2d
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 10)


@pytest.mark.parametrize("scale", ("l2", "rms"))
@pytest.mark.parametrize("correction", ("affine", "norm", "gradient"))
def test_a_rebuilt_patch_embedding_stays_corrected(correction, scale):
    """And sees the same in the same picture at twice the size."""
    options = dict(correction="norm", center=False, scale=scale, embed_correction=correction)
    model = timm.create_model("vit_nano_patch4_32_affine", depth=1, **options).double()
    embed = model.patch_embed
    nn.init.normal_(embed.proj.bias, std=10.0)
    colours = 100 * torch.randn(2, 3, 8, 8, dtype=torch.float64)  # one to a patch: resampling them is exact
    before = embed(colours.repeat_interleave(4, 2).repeat_interleave(4, 3))

    model.set_input_size(img_size=(64, 64), patch_size=(8, 8))
    conv = embed.proj
    assert type(conv) is PatchNormConv2d and conv.kernel_size == (8, 8)
    assert (conv.correction, conv.center, conv.scale) == (correction, False, scale)
    after = embed(colours.repeat_interleave(8, 2).repeat_interleave(8, 3))
    # rms multiplies by sqrt(n + 1), not sqrt(n), where the map is affine: 0.8 per cent for n = 48
    rtol = 1e-2 if (correction, scale) == ("affine", "rms") else 1e-4
    torch.testing.assert_close(after, before, rtol=rtol, atol=1e-3)  # timm resamples in float32, and colours are 100
    assert model(torch.randn(2, 3, 64, 64, dtype=torch.float64)).shape == (2, 10)

    model.set_input_size(img_size=(32, 32))  # nothing to rebuild
    assert embed.proj is conv


def test_the_embedding_takes_every_image_mode():
    for kwargs in (dict(dynamic_img_size=True), dict(dynamic_img_size=True, dynamic_img_pad=True), dict(in_chans=1)):
        model = timm.create_model("vit_nano_patch4_32_affine", depth=1, embed_correction="affine", **kwargs)
        size = (2, kwargs.get("in_chans", 3), 32, 32)
        assert model(torch.randn(size)).shape == (2, 10)
        assert type(model.patch_embed.proj) is PatchNormConv2d


@pytest.mark.parametrize("mode", ("", "jax", "jax_nlhb", "moco", "skip"))
def test_timms_initialisations_leave_corrected_layers_alone(mode):
    model = timm.create_model("vit_nano_patch4_32_affine", weight_init=mode)
    for layer in (model.head, model.blocks[0].mlp.fc1, model.blocks[5].attn.qkv):
        assert layer.weight.std().item() == pytest.approx(96**-0.5, rel=0.1)
        assert not layer.bias.any()
    assert model.blocks[0].attn.logit_scale.exp().allclose(torch.tensor((2.0 * 96) ** 0.5))
    if mode == "":
        assert model.blocks[0].attn.proj.weight.std().item() == pytest.approx(0.02, rel=0.1)
        assert model.blocks[0].mlp.fc2.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_no_weight_decay_as_in_timm():
    """The model names its positions; temperatures and biases are spared for having one dimension."""
    from timm.optim import param_groups_weight_decay

    model = timm.create_model("vit_nano_patch4_32_affine")
    twin = timm.create_model("vit_nano_patch4_32")
    assert model.no_weight_decay() == twin.no_weight_decay()
    assert "pos_embed" in model.no_weight_decay()
    spared, decayed = param_groups_weight_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay())
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)] for p in decayed["params"]} == {n for n, p in model.named_parameters() if n.endswith("weight")}
    assert {"pos_embed", "blocks.0.attn.logit_scale", "head.bias"} <= {names[id(p)] for p in spared["params"]}
