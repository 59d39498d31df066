"""What timm's users rely on, for small nets of every family. timm's own tests, in tests/upstream, run on all names."""

import copy
from functools import partial

import pytest
import timm
import torch
import torch.nn as nn
from timm.layers import DropPath, LayerScale
from timm.models import group_parameters
from timm.optim import create_optimizer_v2, param_groups_layer_decay

from affdiv_zoo.layers import CorrectedLinear, PatchNormConv2d

# As small as they can be with three levels of features.
MODELS = {
    "resnet18_patchnorm": dict(layers=(1, 1, 1, 1), channels=(16, 32, 64, 64)),
    "resnet50_patchnorm": dict(layers=(1, 1, 1, 1), channels=(8, 16, 32, 32)),
    "resnet20_cifar": dict(depth=8),
    "resnet20_cifar_patchnorm": dict(depth=8),
    "vit_nano_patch4_32": dict(depth=3),
    "vit_nano_patch4_32_affine": dict(depth=3),
    "mixer_s16_224_affine": dict(img_size=32, patch_size=8, embed_dim=32, num_blocks=3),
    "mlp_cifar": dict(depth=3, width=64),
    "mlp_cifar_affine": dict(depth=3, width=64),
    "cnn_cifar": dict(depth=5, norm="batch"),
    "cnn_cifar_patchnorm": dict(depth=5),
}
FIXED = ("vit_", "mixer_", "mlp_")  # nets for one image size

every_model = pytest.mark.parametrize(
    "create", [pytest.param(partial(timm.create_model, n, **k), id=n) for n, k in MODELS.items()]
)


def images(batch=2, channels=3, size=32):
    return torch.randn(batch, channels, size, size)


def options(layer):
    return {key: getattr(layer, key) for key in ("correction", "center", "scale")}


@every_model
def test_forward_is_head_of_features(create):
    model, x = create().eval(), images()
    features = model.forward_features(x)
    torch.testing.assert_close(model.forward_head(features), model(x))
    pooled = model.forward_head(features, pre_logits=True)
    assert pooled.shape == (2, model.head_hidden_size)
    torch.testing.assert_close(model.get_classifier()(pooled), model(x))


@every_model
def test_features_only(create):
    model, x = create(features_only=True).eval(), images()
    maps = model(x)
    assert [m.shape[1] for m in maps] == model.feature_info.channels()
    assert [32 // m.shape[2] for m in maps] == model.feature_info.reduction()
    last = create(features_only=True, out_indices=(-1,)).eval()
    last.load_state_dict(model.state_dict(), strict=False)
    (only,) = last(x)
    torch.testing.assert_close(only, maps[-1])


@every_model
def test_forward_intermediates(create):
    model, x = create().eval(), images()
    final, maps = model.forward_intermediates(x)
    assert len(maps) == len(model.feature_info)
    torch.testing.assert_close(final, model.forward_features(x))
    assert [m.shape[1] for m in maps] == [info["num_chs"] for info in model.feature_info]
    some = model.forward_intermediates(x, [0, 2], intermediates_only=True, stop_early=True)
    torch.testing.assert_close(some, [maps[0], maps[2]])
    pruned = copy.deepcopy(model)
    kept = pruned.prune_intermediate_layers([2])
    torch.testing.assert_close(pruned.forward_intermediates(x, kept, intermediates_only=True)[0], maps[2])
    assert sum(p.numel() for p in pruned.parameters()) < sum(p.numel() for p in model.parameters())


@every_model
def test_reset_classifier_keeps_its_kind(create):
    model, x = create(), images()
    before = model.get_classifier()
    model.reset_classifier(7)
    after = model.get_classifier()
    assert model(x).shape == (2, 7)
    assert type(after) is type(before) and after is not before
    if isinstance(before, CorrectedLinear):
        assert options(after) == options(before)
    model.reset_classifier(0)
    assert isinstance(model.get_classifier(), nn.Identity)
    assert model(x).shape == (2, model.head_hidden_size)
    torch.testing.assert_close(create(num_classes=0)(x).shape, model(x).shape)
    model.reset_classifier(3, "avg")
    assert model(x).shape == (2, 3)


@pytest.mark.parametrize("name", ("vit_nano_patch4_32_affine", "mlp_cifar_affine"))
def test_a_rebuilt_head_keeps_other_options_too(name):
    model = timm.create_model(name, correction="norm", center=True, scale="l2", num_classes=0).double()
    model.reset_classifier(4)
    assert options(model.get_classifier()) == dict(correction="norm", center=True, scale="l2")
    assert model.get_classifier().weight.dtype == torch.float64


@every_model
def test_in_chans(create):
    assert (
        create(in_chans=1)(images(channels=1)).shape
        == create(in_chans=5)(images(channels=5)).shape
        == (2, create().num_classes)
    )


@every_model
def test_grad_checkpointing_changes_nothing(create):
    model, x = create().double(), images().double()
    model.eval()  # BatchNorm would see the recomputed batch twice
    grads = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        model(x).square().sum().backward()
        grads.append({n: p.grad for n, p in model.named_parameters()})
    torch.testing.assert_close(grads[0], grads[1])


@every_model
def test_layer_decay(create):
    """Every parameter is in one group; learning rates grow from the stem to the head."""
    model = create()
    groups = param_groups_layer_decay(model, layer_decay=0.5)
    in_groups = [p for group in groups for p in group["params"]]
    assert {id(p) for p in in_groups} == {id(p) for p in model.parameters()}
    assert len(in_groups) == len(list(model.parameters()))

    scale = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    scales = {n: scale[id(p)] for n, p in model.named_parameters()}
    ids = group_parameters(model, model.group_matcher(coarse=False), reverse=True)
    ordered = [scales[n] for n in sorted(scales, key=lambda n: ids[n])]
    assert ordered == sorted(ordered)
    head = next(n for n, m in model.named_modules() if m is model.get_classifier())
    stem = model.default_cfg["first_conv"] or "layers.0.fc"
    assert scales[f"{head}.weight"] == 1.0
    assert scales[f"{stem}.weight"] == min(scales.values()) < 0.3
    optimizer = create_optimizer_v2(model, opt="adamw", lr=0.1, weight_decay=0.1, layer_decay=0.5)
    assert len(optimizer.param_groups) == len(groups)


@every_model
def test_weight_decay_spares_vectors_and_embeddings(create):
    model = create()
    optimizer = create_optimizer_v2(model, opt="adamw", lr=0.1, weight_decay=0.1)
    spared = {id(p) for group in optimizer.param_groups if group["weight_decay"] == 0 for p in group["params"]}
    expected = {n for n, p in model.named_parameters() if p.ndim <= 1 or n == "pos_embed"}
    assert {n for n, p in model.named_parameters() if id(p) in spared} == expected


@pytest.mark.parametrize("name", [n for n in MODELS if not n.startswith(("mlp_", "cnn_"))])  # no residual paths
def test_drop_path_rate(name):
    model = timm.create_model(name, drop_path_rate=0.3, **MODELS[name])
    rates = [m.drop_prob for m in model.modules() if isinstance(m, DropPath)]
    assert max(rates) == pytest.approx(0.3)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)  # timm starts the blocks' last ones at zero, and then there is nothing to drop
    x = images(8)
    model.eval()
    torch.testing.assert_close(model(x), model(x))
    model.train()
    assert not torch.allclose(model(x), model(x))


@every_model
def test_drop_rate(create):
    model, x = create(drop_rate=0.5), images()
    assert not torch.allclose(model(x), model(x))
    model.eval()
    torch.testing.assert_close(model(x), model(x))


@every_model
def test_scriptable(create):
    model, x = create(scriptable=True).eval(), images()
    scripted = torch.jit.script(model)
    torch.testing.assert_close(scripted(x), model(x))
    torch.testing.assert_close(scripted(x[:1]), model(x[:1]))


@pytest.mark.parametrize("name", [n for n in MODELS if n != "resnet18_patchnorm"])  # slow, and ResNet-50's is alike
def test_exportable(name):
    model, x = timm.create_model(name, exportable=True, **MODELS[name]).eval(), images()
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},))
    more = images(5)
    torch.testing.assert_close(program.module()(more), model(more))


@every_model
def test_meta_device_then_initialised(create):
    """Built without memory, then given memory and weights by timm's own method."""
    with torch.device("meta"):
        model = create()
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert model(images().to("meta")).shape == (2, model.num_classes)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor.zero_()
    for module in model.modules():  # what timm's ResNet and Mixer leave to the layers
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    model.init_weights()
    assert all(t.isfinite().all() for t in model.state_dict().values())
    assert model(images()).isfinite().all()


@every_model
def test_init_weights_makes_the_distribution_of_the_constructor(create):
    """Each weight's spread; corrected layers keep their own, though timm's initialisation passes over them."""
    model = create()
    before = {n: p.std().item() for n, p in model.named_parameters() if p.numel() > 2000}
    model.init_weights()
    for name, parameter in model.named_parameters():
        if name in before:
            assert parameter.std().item() == pytest.approx(before[name], rel=0.15), name


@every_model
def test_pretrained_cfg_overlay(create, tmp_path):
    """Weights from a file, and adapted: other classes, other channels."""
    model, x = create().eval(), images()
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    overlay = dict(file=str(tmp_path / "weights.pth"), num_classes=model.num_classes)
    loaded = create(pretrained=True, pretrained_cfg_overlay=overlay).eval()
    torch.testing.assert_close(loaded(x), model(x))
    adapted = create(pretrained=True, pretrained_cfg_overlay=overlay, num_classes=3, in_chans=1).eval()
    assert adapted(images(channels=1)).shape == (2, 3)
    # timm sums the colours' weights: a grey image in one channel is the same image in three
    stem = model.default_cfg["first_conv"] or "layers.0.fc"
    old, new = model.get_submodule(stem).weight, adapted.get_submodule(stem).weight
    torch.testing.assert_close(old.view(len(old), 3, -1).sum(1), new.view(len(new), -1))
    assert dict(create(pretrained_cfg_overlay=dict(mean=(0.5, 0.5, 0.5))).pretrained_cfg)["mean"] == (0.5, 0.5, 0.5)


@every_model
def test_a_sample_does_not_depend_on_its_batch(create):
    model, x = create().double().eval(), images(3).double()
    torch.testing.assert_close(model(x)[:1], model(x[:1]))


@pytest.mark.parametrize("name", [n for n in MODELS if n.startswith(FIXED)])
def test_a_wrong_image_size_is_named(name):
    with pytest.raises(AssertionError, match=r"\(40\)"):
        timm.create_model(name, **MODELS[name])(images(size=40))


@pytest.mark.parametrize("name", [n for n in MODELS if not n.startswith(FIXED)])
def test_other_image_sizes(name):
    model = timm.create_model(name, **MODELS[name])
    assert model(torch.randn(1, 3, 48, 40)).shape == (1, model.num_classes)


@pytest.mark.parametrize("name", [n for n in MODELS if "affine" in n or "patchnorm" in n])
def test_the_net_starts_with_outputs_of_useful_size(name):
    """Corrected layers have outputs of unit variance whatever the input's size; residual sums grow from there."""
    model = timm.create_model(name, **MODELS[name]).eval()
    for size in (1e-2, 1.0, 1e2):
        features = model.forward_features(size * images(16))
        logits = model(size * images(16))
        assert features.isfinite().all() and 0.02 < logits.std() < 5, (size, logits.std())


@pytest.mark.parametrize("name", ("vit_nano_patch4_32", "vit_nano_patch4_32_affine"))
def test_init_values(name):
    model = timm.create_model(name, init_values=0.01)
    scales = [m for m in model.modules() if isinstance(m, LayerScale)]
    assert len(scales) == 2 * 6
    assert all((m.weight if hasattr(m, "weight") else m.gamma).eq(0.01).all() for m in scales)
    assert not [m for m in timm.create_model(name).modules() if isinstance(m, LayerScale)]


@pytest.mark.parametrize("name", ("vit_nano_patch4_32", "vit_nano_patch4_32_affine"))
def test_dynamic_img_size_is_set_input_size(name):
    dynamic = timm.create_model(name, dynamic_img_size=True).eval()
    x = torch.randn(2, 3, 48, 40)
    fixed = timm.create_model(name).eval()
    fixed.load_state_dict(dynamic.state_dict())
    fixed.set_input_size(img_size=(48, 40))
    torch.testing.assert_close(dynamic(x), fixed(x))
    padded = timm.create_model(name, dynamic_img_size=True, dynamic_img_pad=True)
    assert padded(torch.randn(2, 3, 30, 37)).shape == (2, 10)


def test_convolutions_stay_patchnorm_in_feature_extractors():
    """features_only wraps and prunes: no plain convolution may come out of it."""
    for name in ("resnet18_patchnorm", "resnet20_cifar_patchnorm"):
        model = timm.create_model(name, features_only=True)
        convs = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
        assert convs and all(type(m) is PatchNormConv2d for m in convs)
