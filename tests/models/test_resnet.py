"""The ResNets in timm."""

import pytest
import timm
import torch
import torch.nn as nn

import affdiv_zoo
from affdiv_zoo.layers import PatchNormConv2d
from affdiv_zoo.models.resnet import CifarResNet

PATCHNORM = ("resnet18_patchnorm", "resnet20_cifar_patchnorm")


@pytest.mark.parametrize("name", PATCHNORM)
def test_no_batchnorm_is_left_and_every_convolution_is_corrected(name):
    model = timm.create_model(name)
    assert not any(isinstance(m, nn.modules.batchnorm._NormBase) for m in model.modules())
    assert not list(model.buffers())
    convs = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert all(type(m) is PatchNormConv2d for m in convs)
    assert len(convs) == {"resnet18_patchnorm": 20, "resnet20_cifar_patchnorm": 19}[name]


@pytest.mark.parametrize("name", PATCHNORM)
def test_weights_keep_the_twins_names_and_shapes(name):
    twin = timm.create_model({"resnet18_patchnorm": "resnet18"}.get(name, "resnet20_cifar")).state_dict()
    state = timm.create_model(name).state_dict()
    assert {k: v.shape for k, v in state.items() if k.endswith("weight")} == {
        k: v.shape for k, v in twin.items() if k.endswith("weight") and v.ndim > 1
    }


@pytest.mark.parametrize("name", PATCHNORM)
def test_a_sample_does_not_depend_on_its_batch(name):
    model = timm.create_model(name).double().train()
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(model(x)[:1], model(x[:1]))


@pytest.mark.parametrize("name", PATCHNORM)
def test_keywords_reach_every_layer(name):
    model = timm.create_model(name, correction="norm", center=False, scale="l2")
    convs = [m for m in model.modules() if isinstance(m, PatchNormConv2d)]
    assert {(m.correction, m.center, m.scale) for m in convs} == {("norm", False, "l2")}
    with pytest.raises(ValueError, match="correction='batch'"):
        timm.create_model(name, correction="batch")
    with pytest.raises(TypeError):
        timm.create_model(name, no_such_argument=1)


def test_issue_examples():
    assert timm.create_model("resnet18_patchnorm", num_classes=7, in_chans=1)(torch.randn(2, 1, 64, 64)).shape == (2, 7)
    model = timm.create_model("resnet18_patchnorm", features_only=True)
    assert [f.shape[1] for f in model(torch.randn(1, 3, 64, 64))] == [64, 64, 128, 256, 512]
    assert set(PATCHNORM) <= set(timm.list_models("*patchnorm*"))
    assert set(affdiv_zoo.list_models("resnet20*")) == {"resnet20_cifar", "resnet20_cifar_patchnorm"}
    assert not [name for name in affdiv_zoo.list_models(pretrained=True) if "." not in name]


@pytest.mark.parametrize(("depth", "millions"), ((20, 0.27), (32, 0.46), (56, 0.85)))
def test_cifar_nets_have_the_published_parameter_counts(depth, millions):
    """He et al., table 6."""
    assert sum(p.numel() for p in CifarResNet(depth).parameters()) / 1e6 == pytest.approx(millions, abs=0.01)
    with pytest.raises(ValueError, match="depth=21"):
        CifarResNet(21)


@pytest.mark.parametrize("name", ("resnet20_cifar", "resnet20_cifar_patchnorm"))
def test_cifar_nets_have_timms_interface(name):
    model = timm.create_model(name).eval()
    x = torch.randn(2, 3, 32, 32)
    features = model.forward_features(x)
    assert features.shape == (2, 64, 8, 8)
    torch.testing.assert_close(model.forward_head(features), model(x))
    last, maps = model.forward_intermediates(x, indices=[0, 2])
    assert [m.shape for m in maps] == [(2, 16, 32, 32), (2, 64, 8, 8)]
    torch.testing.assert_close(last, features)
    assert [m.shape[1] for m in model.forward_intermediates(x, 2, intermediates_only=True)] == [32, 64]
    assert [m.shape[1] for m in timm.create_model(name, features_only=True)(x)] == [16, 32, 64]
    model.set_grad_checkpointing()
    torch.testing.assert_close(model(x), model.forward_head(features))
    assert model.prune_intermediate_layers(1) == [2]
    model.reset_classifier(5, "avg")
    assert model(x).shape == (2, 5)
    with pytest.raises(TypeError):
        timm.create_model(name, no_such_argument=1)
