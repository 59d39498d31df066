"""One folder, both libraries."""

import json
import os

import pytest
import timm
import torch
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    TimmWrapperForImageClassification,
    TimmWrapperModel,
)

import affdiv_zoo
from affdiv_zoo.convert import save_converted
from affdiv_zoo.hf import (
    REMOTE_CODE_FILE,
    AffDivBackbone,
    AffDivConfig,
    AffDivForImageClassification,
    AffDivModel,
    complete_config,
    complete_folder,
    save_pretrained,
)

LABELS = ["a", "b", "c", "d", "e", "f", "g"]

# With the size of the images that each takes.
MODELS = {
    "resnet20_cifar_patchnorm": (dict(depth=8, correction="norm", center=False), (3, 32, 32)),
    "resnet20_cifar": (dict(depth=8), (3, 32, 32)),
    "vit_nano_patch4_32_affine": (dict(depth=2, attention="logit"), (3, 32, 32)),
    "mixer_s32_224_affine": (dict(num_blocks=1, img_size=64), (3, 64, 64)),
    "mlp_cifar_affine": (dict(width=16, depth=2, in_chans=1), (1, 32, 32)),
}


def load_all(folder, x, expected):
    """Both libraries, and transformers without our classes: the same numbers, bit by bit."""
    assert torch.equal(timm.create_model(f"local-dir:{folder}", pretrained=True).eval()(x), expected)
    for cls in (AutoModelForImageClassification, AffDivForImageClassification, TimmWrapperForImageClassification):
        model, info = cls.from_pretrained(folder, output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
        assert torch.equal(model(x).logits, expected), cls
    return AutoModelForImageClassification.from_pretrained(folder)


@pytest.mark.parametrize("name", MODELS)
def test_round_trips_are_bit_identical(name, tmp_path):
    model_args, size = MODELS[name]
    source = timm.create_model(name, num_classes=7, **model_args).eval()
    x = torch.randn(2, *size)
    expected = source(x)

    wrapped = AffDivForImageClassification.from_timm(source, LABELS)
    assert torch.equal(wrapped(x).logits, expected) and not wrapped.training
    wrapped.save_pretrained(tmp_path / "transformers")
    save_pretrained(source, tmp_path / "timm", label_names=LABELS, model_args=model_args)
    for folder in (tmp_path / "transformers", tmp_path / "timm"):
        assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors", REMOTE_CODE_FILE]
        with safe_open(folder / "model.safetensors", "pt") as file:
            assert set(file.keys()) == set(source.state_dict())
        model = load_all(folder, x, expected)
        assert model.config.id2label == dict(enumerate(LABELS))
        assert model.config.label2id == {label: i for i, label in enumerate(LABELS)}
        processor = AutoImageProcessor.from_pretrained(folder)
        assert processor.data_config["input_size"] == size
        assert len(processor.data_config["mean"]) == size[0]
        assert sum(processor.data_config["mean"]) / size[0] == pytest.approx(sum(source.pretrained_cfg["mean"]) / 3)

        features = AutoModel.from_pretrained(folder)
        assert torch.equal(features(x).last_hidden_state, source.forward_features(x))
        assert torch.equal(features(x).pooler_output, source.forward_head(source.forward_features(x), pre_logits=True))
        assert torch.equal(TimmWrapperModel.from_pretrained(folder)(x).pooler_output, features(x).pooler_output)

    configs = [json.loads((tmp_path / f / "config.json").read_text()) for f in ("transformers", "timm")]
    for config in configs:
        assert "num_classes" not in config["model_args"]
        for key in ("do_pooling", "dtype", "transformers_version"):  # transformers' own, with no effect on the model
            config.pop(key, None)
        assert config["pretrained_cfg"].pop("num_classes", 7) == 7  # timm repeats it there
    arguments = [config.pop("model_args") for config in configs]
    assert configs[0] == configs[1]
    assert all({**arguments[1], **a} == arguments[1] for a in arguments)
    again = AutoConfig.from_pretrained(tmp_path / "transformers")
    assert complete_config(again.to_dict()) == again.to_dict()


def test_weights_trained_in_transformers_load_in_timm(tmp_path):
    """A model that no from_pretrained has made: TimmWrapper itself would keep its prefix in the file."""
    config = AffDivConfig(architecture="vit_nano_patch4_32_affine", model_args={"depth": 1}, num_labels=3)
    model = AffDivForImageClassification(config).eval()
    model.save_pretrained(tmp_path)
    x = torch.randn(2, 3, 32, 32)
    load_all(tmp_path, x, model(x).logits)


@pytest.mark.parametrize("cls", (AffDivModel, AffDivBackbone))
def test_a_model_without_classifier_loads_in_timm_as_one(cls, tmp_path):
    config = AffDivConfig(architecture="resnet20_cifar_patchnorm", num_labels=5)
    model = cls(config).eval()
    model.save_pretrained(tmp_path)
    x = torch.randn(2, 3, 32, 32)
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert loaded.num_classes == 0 and torch.equal(loaded.forward_features(x), model.timm_model.forward_features(x))
    with pytest.raises(ValueError, match="num_labels"):
        AutoModelForImageClassification.from_pretrained(tmp_path)
    fine_tuned = AutoModelForImageClassification.from_pretrained(tmp_path, num_labels=4)
    assert fine_tuned(x).logits.shape == (2, 4)


@pytest.mark.parametrize(
    ("name", "kwargs", "size"),
    (
        pytest.param("test_resnet", {}, 64, marks=pytest.mark.slow),
        ("swin_tiny_patch4_window7_224", dict(depths=(1, 1), embed_dim=24, num_heads=(2, 2), img_size=56), 56),
        ("eva02_tiny_patch14_224", dict(depth=1, embed_dim=48, num_heads=2, img_size=56), 56),
    ),
)
def test_converted_models(name, kwargs, size, tmp_path):
    """Swin's attention index and EVA's rotary embedding are buffers that no file has; transformers leaves them."""
    kwargs = dict(num_classes=7, **kwargs)
    model = timm.create_model(name, **kwargs).eval()
    if name != "test_resnet":
        assert {name for name, _ in model.named_buffers()} - set(model.state_dict())
    x = torch.randn(2, 3, size, size)
    model, report = affdiv_zoo.convert(model, "affine", example_input=x)
    save_converted(model, report, tmp_path / "model", model_args=kwargs)
    complete_folder(tmp_path / "model")
    expected = model.eval()(x)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "model")
    assert type(loaded) is AffDivForImageClassification and torch.equal(loaded(x).logits, expected)
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(timm.create_model(f"local-dir:{tmp_path / 'again'}", pretrained=True).eval()(x), expected)
    assert torch.equal(AutoModelForImageClassification.from_pretrained(tmp_path / "again")(x).logits, expected)


def test_timms_copy_of_the_class_count_goes_and_its_other_keys_stay():
    config = {
        "architecture": "resnet20_cifar",
        "num_classes": 10,
        "model_args": {"num_classes": 10, "depth": 32},
        "pretrained_cfg": {"mean": [0.5]},
        "extra": 1,
    }
    before = json.dumps(config)
    done = complete_config(config)
    assert json.dumps(config) == before
    assert done["model_args"] == {"depth": 32} and done["extra"] == 1 and done["num_classes"] == 10
    assert done["model_type"] == "affdiv" and done["architectures"] == ["AffDivForImageClassification"]
    assert complete_config(done) == done
    assert "model_args" not in complete_config({**config, "model_args": {"num_classes": 10}})
    assert complete_config({**config, "num_classes": 0})["architectures"] == ["AffDivModel"]


def test_labels_follow_the_classifier(tmp_path):
    save_pretrained(timm.create_model("mlp_cifar", width=8, depth=1, num_classes=7), tmp_path, label_names=LABELS)
    model = AutoModelForImageClassification.from_pretrained(tmp_path, num_labels=3, ignore_mismatched_sizes=True)
    model.save_pretrained(tmp_path / "three")
    config = json.loads((tmp_path / "three" / "config.json").read_text())
    assert config["num_classes"] == 3 and config["label_names"] == ["LABEL_0", "LABEL_1", "LABEL_2"]
    assert AutoConfig.from_pretrained(tmp_path / "three").num_labels == 3
    names = {0: "x", 1: "y"}
    model = AutoModelForImageClassification.from_pretrained(tmp_path, id2label=names, ignore_mismatched_sizes=True)
    assert model.config.id2label == names and model(torch.randn(1, 3, 32, 32)).logits.shape == (1, 2)


def test_mistakes_are_named(tmp_path):
    with pytest.raises(ValueError, match="architecture='resnet20_cifar_pachnorm'.*resnet20_cifar_patchnorm"):
        AffDivConfig(architecture="resnet20_cifar_pachnorm")
    with pytest.raises(ValueError, match="'resnet20_cifar_patchnorm.cifar' has an unknown tag: its tags are cifar10"):
        AffDivConfig(architecture="resnet20_cifar_patchnorm.cifar")
    with pytest.raises(ValueError, match="unknown tag: there are none; write 'resnet18_patchnorm'"):
        AffDivConfig(architecture="resnet18_patchnorm.a1_in1k")
    with pytest.raises(ValueError, match="no 'architecture'"):
        complete_config({"model_type": "vit"})
    with pytest.raises(FileNotFoundError, match="no config.json"):
        complete_folder(tmp_path)
    model = timm.create_model("mlp_cifar", width=8, depth=1)
    with pytest.raises(ValueError, match="2 names, the model 10 classes"):
        save_pretrained(model, tmp_path / "out", label_names=["a", "b"])
    with pytest.raises(ValueError, match="2 names, the model 10 classes"):
        AffDivForImageClassification.from_timm(model, ["a", "b"])
    for function in (lambda m: save_pretrained(m, tmp_path / "out"), AffDivModel.from_timm):
        with pytest.raises(ValueError, match="Linear that timm.create_model did not make"):
            function(torch.nn.Linear(2, 2))
    converted, _ = affdiv_zoo.convert(timm.create_model("test_resnet"), "affine")
    with pytest.raises(ValueError, match="bn1.*save_converted"):
        save_pretrained(converted, tmp_path / "out")
    with pytest.raises(ValueError, match="bn1"):
        AffDivForImageClassification.from_timm(converted)
    assert os.listdir(tmp_path) == []


def test_a_failed_write_leaves_the_folder_as_it_was(tmp_path, monkeypatch):
    model = timm.create_model("mlp_cifar", width=8, depth=1)
    save_pretrained(model, tmp_path / "model")
    before = {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()}
    model.layers[0].fc.weight.data.zero_()
    monkeypatch.setattr("affdiv_zoo.hf.folder.complete_folder", lambda directory: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_pretrained(model, tmp_path / "model")
    assert before == {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()}
    assert os.listdir(tmp_path) == ["model"]


def test_pickled_weights_are_not_loaded(tmp_path):
    save_pretrained(timm.create_model("mlp_cifar", width=8, depth=1), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        AutoModelForImageClassification.from_pretrained(tmp_path)
