"""The bundled weights: the files are what the records say, and timm loads them offline, by name and by tag."""

import hashlib
import json
from pathlib import Path

import pytest
import timm
import torch
from huggingface_hub import ModelCard
from safetensors import safe_open
from timm.models import generate_default_cfgs

import affdiv_zoo
from affdiv_zoo import weights
from affdiv_zoo.hub.cards import render_card
from affdiv_zoo.models import _released
from affdiv_zoo.models.resnet import _cifar_cfg

ROOT = Path(__file__).resolve().parents[2]
LOGITS = Path(__file__).with_name("logits.json")
NAMES = sorted(weights.released())


def waves(channels: int, height: int, width: int) -> torch.Tensor:
    """The images whose logits are stored, written out pixel by pixel."""
    images = torch.empty(4, channels, height, width, dtype=torch.float64)
    for i in range(4):
        for c in range(channels):
            across = torch.sin(6 * (i + 1) * torch.arange(width, dtype=torch.float64) / width + c)
            down = 0.5 * torch.cos(9 * torch.arange(height, dtype=torch.float64) / height * (c + 1) - (i + 1))
            images[i, c] = down[:, None] + across[None, :]
    return images.float()


@pytest.mark.parametrize("name", NAMES)
def test_file_is_the_recorded_one(name):
    record = weights.released()[name]
    content = weights.path_of(name).read_bytes()
    assert hashlib.sha256(content).hexdigest() == record["sha256"]
    assert len(content) == record["bytes"] <= 2_500_000
    with safe_open(weights.path_of(name), "pt") as file:
        keys = list(file.keys())
        sizes = [file.get_tensor(key).numel() for key in keys if "running" not in key and "num_batches" not in key]
        kinds = {file.get_slice(key).get_dtype() for key in keys if "num_batches" not in key}
    assert sum(sizes) == record["parameters"]
    assert kinds == {{"float16": "F16", "float32": "F32"}[record["dtype"]]}


def test_all_weights_are_small():
    assert sum(record["bytes"] for record in weights.released().values()) <= 10_000_000
    files = {path.name for path in weights.FOLDER.glob("*.safetensors")}
    assert files == {record["file"] for record in weights.released().values()}


@pytest.mark.parametrize("name", NAMES)
def test_timm_loads_them_and_they_compute_what_they_did(name):
    record = weights.released()[name]
    expected = torch.tensor(json.loads(LOGITS.read_text())[name])
    for source in (name, record["architecture"]):
        model = timm.create_model(source, pretrained=True).eval()
        with torch.no_grad():
            logits = model(waves(*record["pretrained_cfg"]["input_size"]))
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-4)
    assert logits.dtype == torch.float32
    assert expected.std(0).min() > 0.01  # the images differ to the net


@pytest.mark.parametrize("name", NAMES)
def test_timm_knows_the_images_and_classes(name):
    record = weights.released()[name]
    cfg = timm.create_model(name, pretrained=True).pretrained_cfg
    wanted = record["pretrained_cfg"]
    for key in ("input_size", "mean", "std", "label_names"):
        assert list(cfg[key]) == list(wanted[key]), key
    assert cfg["num_classes"] == wanted["num_classes"] == len(wanted["label_names"])
    assert name in affdiv_zoo.list_models(pretrained=True)
    assert cfg["tag"] == record["tag"] and cfg["license"] == record["license"]
    assert not cfg.get("hf_hub_id") or name in weights.published()


@pytest.mark.parametrize("name", NAMES)
def test_card_is_generated_from_the_record(name):
    record = weights.released()[name]
    text = (ROOT / "model_cards" / f"{name}.md").read_text(encoding="utf-8")
    assert text == render_card(record)
    data = ModelCard(text).data
    assert data.library_name == "timm" and data.license == record["license"]
    (result,) = data.eval_results
    assert result.metric_value == pytest.approx(100 * record["metrics"]["test_top1"], abs=0.005)


def test_a_card_for_each_and_no_other():
    assert sorted(path.stem for path in (ROOT / "model_cards").glob("*.md")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_other_classes_and_channels(name):
    model = timm.create_model(name, pretrained=True, num_classes=3, in_chans=1)
    _, height, width = weights.released()[name]["pretrained_cfg"]["input_size"]
    assert model(torch.randn(2, 1, height, width)).shape == (2, 3)


def test_unknown_name():
    with pytest.raises(ValueError, match="name='resnet20.none'"):
        weights.path_of("resnet20.none")


RECORD = dict(
    architecture="resnet20_cifar_patchnorm",
    tag="toy",
    file="toy.safetensors",
    license="apache-2.0",
    pretrained_cfg=dict(
        input_size=[3, 32, 32], mean=[0.1, 0.2, 0.3], std=[1, 2, 3], num_classes=2, label_names=["a", "b"]
    ),
)


def configure(monkeypatch, published):
    name = "resnet20_cifar_patchnorm.toy"
    monkeypatch.setattr(_released, "released", lambda: {name: RECORD})
    monkeypatch.setattr(_released, "published", lambda: {name: published} if published else {})
    monkeypatch.setattr(_released, "path_of", lambda _: Path("/there/toy.safetensors"))
    cfgs = generate_default_cfgs(_released.released_cfgs(_cifar_cfg, "resnet20_cifar_patchnorm", "resnet20_cifar"))
    return cfgs["resnet20_cifar_patchnorm"], cfgs["resnet20_cifar"]


def test_nothing_on_the_hub_is_named_before_it_was_published(monkeypatch):
    ours, twin = configure(monkeypatch, None)
    assert list(ours.tags) == ["toy", "untrained"] and list(twin.tags) == ["untrained"]
    cfg = ours.default
    assert cfg.file == "/there/toy.safetensors" and cfg.hf_hub_id is None and not cfg.url
    assert cfg.mean == (0.1, 0.2, 0.3) and cfg.label_names == ("a", "b") and cfg.num_classes == 2
    assert not twin.default.has_weights


def test_published_weights_are_pinned_to_their_commit(monkeypatch):
    commit = "0123456789" * 4
    ours, _ = configure(monkeypatch, dict(repo_id="someone/toy", revision=commit))
    assert ours.default.hf_hub_id == f"someone/toy@{commit}"
    assert ours.default.file == "/there/toy.safetensors"  # which timm prefers


@pytest.mark.parametrize(
    "kwargs, warns",
    [
        (dict(pretrained=True, correction="norm"), True),
        (dict(pretrained=True, center=False), True),
        (dict(pretrained=True, center=True, correction="affine"), False),
        (dict(pretrained=True, num_classes=3), False),
        (dict(pretrained=False, correction="norm"), False),
        (dict(pretrained=True, correction="norm", pretrained_cfg_overlay=dict(file="own.safetensors")), False),
        (dict(pretrained=True, correction="norm", pretrained_cfg=dict(file="own.safetensors")), False),
        (dict(pretrained=True, correction="norm", pretrained_cfg="cifar10"), True),
    ],
)
def test_warns_where_weights_meet_another_map(kwargs, warns, recwarn):
    kwargs = dict(kwargs)
    cls = affdiv_zoo.models.resnet.PatchNormCifarResNet
    _released.warn_of_other_map(cls, "resnet20_cifar_patchnorm", kwargs.pop("pretrained"), kwargs)
    messages = [str(warning.message) for warning in recwarn]
    assert len(messages) == warns
    if warns:
        key = "correction" if "correction" in kwargs else "center"
        assert messages[0].startswith(f"{key}={kwargs[key]!r}") and "resnet20_cifar_patchnorm" in messages[0]
