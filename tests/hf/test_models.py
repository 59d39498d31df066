"""What transformers users do with a model, on ours."""

import copy

import numpy as np
import pytest
import timm
import torch
import torch.nn as nn
from PIL import Image
from transformers import AutoModel, AutoModelForImageClassification, Trainer, TrainingArguments, pipeline

from affdiv_zoo.functional import corrected_attention_logits_reference
from affdiv_zoo.hf import AffDivBackbone, AffDivConfig, AffDivForImageClassification, AffDivModel

VIT = dict(architecture="vit_nano_patch4_32_affine", model_args={"depth": 2}, num_labels=4)
RESNET = dict(architecture="resnet20_cifar_patchnorm", model_args={"depth": 8}, num_labels=4)
NAMES = ["red", "green", "blue", "none"]


@pytest.fixture
def x():
    return torch.randn(2, 3, 32, 32)


@pytest.fixture(params=("vit", "resnet"))
def folder(request, tmp_path):
    torch.manual_seed(1)
    config = AffDivConfig(**{"vit": VIT, "resnet": RESNET}[request.param], id2label=dict(enumerate(NAMES)))
    AffDivForImageClassification(config).save_pretrained(tmp_path)
    return tmp_path


one_by_default = pytest.mark.parametrize(
    "folder", ("vit", pytest.param("resnet", marks=pytest.mark.slow)), indirect=True
)


def initial(config):
    """timm's own initialisation, from the same seed."""
    torch.manual_seed(5)
    model = timm.create_model(config.architecture, num_classes=config.num_labels, **config.model_args)
    return model.state_dict()


@pytest.mark.parametrize("arguments", (VIT, RESNET, dict(architecture="vit_nano_patch4_32", num_labels=4)))
def test_initialisation_is_timms_and_not_transformers(arguments):
    config = AffDivConfig(**arguments)
    expected = initial(config)
    torch.manual_seed(5)
    model = AutoModelForImageClassification.from_config(config)
    assert all(torch.equal(value, expected[name]) for name, value in model.timm_model.state_dict().items())


def test_the_config_fills_in_what_the_architecture_has():
    config = AffDivConfig(architecture="resnet20_cifar_patchnorm")
    assert config.num_labels == 10 and config.pretrained_cfg["input_size"] == [3, 32, 32]
    config = AffDivConfig(architecture="vit_tiny_patch16_224_affine", model_args=dict(img_size=64, in_chans=1))
    assert config.num_labels == 1000 and config.pretrained_cfg["input_size"] == [1, 64, 64]
    assert AffDivConfig(architecture="mlp_cifar", model_args={"num_classes": 3}).num_labels == 3


@pytest.mark.parametrize("name", ("classifier", "block"))
def test_what_a_checkpoint_lacks_is_filled_from_a_fresh_model(folder, name, monkeypatch):
    """The new head gets timm's initialisation, and so does a layer that the file does not have; the rest stays."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    key = next(k for k in weights if k.endswith(("mlp.fc1.weight", "layer2.0.conv1.weight")))
    if name == "block":
        del weights[key]
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    kwargs = dict(num_labels=3, ignore_mismatched_sizes=True) if name == "classifier" else {}
    torch.manual_seed(5)
    model, info = AutoModelForImageClassification.from_pretrained(folder, output_loading_info=True, **kwargs)
    new = {k.removeprefix("timm_model.") for k in info["missing_keys"]}
    new |= {k[0].removeprefix("timm_model.") for k in info["mismatched_keys"]}
    assert len(new) == (2 if name == "classifier" else 1)
    expected = initial(model.config)
    for k, value in model.timm_model.state_dict().items():
        assert torch.equal(value, expected[k] if k in new else weights[k]), k


def test_meta_initialisation_and_materialisation(folder, x):
    model = AutoModelForImageClassification.from_pretrained(folder)
    with torch.device("meta"):
        empty = AutoModelForImageClassification.from_config(model.config)
    assert all(t.is_meta for t in empty.parameters())
    assert {k: v.shape for k, v in empty.state_dict().items()} == {k: v.shape for k, v in model.state_dict().items()}
    empty.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(empty.eval()(x).logits, model(x).logits)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_half_precision_loading(folder, dtype, x):
    exact = AutoModelForImageClassification.from_pretrained(folder)
    model = AutoModelForImageClassification.from_pretrained(folder, dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    rounded = copy.deepcopy(exact).to(dtype)
    assert all(map(torch.equal, model.state_dict().values(), rounded.state_dict().values()))
    logits = model(x).logits  # the images are float32
    assert logits.dtype == dtype
    torch.testing.assert_close(logits.float(), exact(x).logits, atol=0.05, rtol=0.05)
    model.save_pretrained(folder / "half")
    assert AutoModelForImageClassification.from_pretrained(folder / "half", dtype="auto").dtype == dtype


def test_device_map_and_offloading(folder, x):
    """Weights on disk come when a layer's forward is called: none may be read around it."""
    expected = AutoModelForImageClassification.from_pretrained(folder)
    for device_map in ("auto", "cpu", {"timm_model": "cpu"}):
        model = AutoModelForImageClassification.from_pretrained(folder, device_map=device_map)
        assert torch.equal(model(x).logits, expected(x).logits)
    model = AutoModelForImageClassification.from_pretrained(
        folder, device_map={"timm_model": "disk"}, offload_folder=folder / "offload"
    )
    assert all(p.is_meta for p in model.parameters()) and model.device.type == "cpu"
    torch.testing.assert_close(model(x).logits, expected(x).logits, rtol=1e-5, atol=1e-5)


def test_gradient_checkpointing_changes_memory_and_not_gradients(folder, x):
    gradients = []
    for enable in (False, True):
        model = AutoModelForImageClassification.from_pretrained(folder).train()
        if enable:
            model.gradient_checkpointing_enable()
            assert model.timm_model.grad_checkpointing
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t.numel()) or t, lambda t: t):
            loss = model(x, labels=torch.tensor([0, 1])).loss
        loss.backward()
        gradients.append((sum(saved), [p.grad for p in model.parameters()]))
    assert gradients[1][0] < gradients[0][0]
    for a, b in zip(gradients[0][1], gradients[1][1], strict=True):
        torch.testing.assert_close(a, b)
    model.gradient_checkpointing_disable()
    assert not model.timm_model.grad_checkpointing


def test_losses(folder, x):
    model = AutoModelForImageClassification.from_pretrained(folder)
    labels = torch.tensor([3, 1])
    output = model(x, labels=labels)
    assert torch.equal(output.loss, nn.functional.cross_entropy(output.logits, labels))
    model.config.problem_type = "multi_label_classification"
    labels = torch.tensor([[1.0, 0, 1, 0], [0, 0, 0, 1]])
    assert torch.equal(
        model(x, labels=labels).loss, nn.functional.binary_cross_entropy_with_logits(output.logits, labels)
    )


def test_hidden_states_are_timms_intermediates(folder, x):
    model = AutoModel.from_pretrained(folder)
    _, expected = model.timm_model.forward_intermediates(x)
    states = model(x, output_hidden_states=True).hidden_states
    assert len(states) == len(expected) and all(map(torch.equal, states, expected))
    some = model(x, output_hidden_states=[1]).hidden_states
    assert len(some) == 1 and torch.equal(some[0], expected[1])
    model.config.output_hidden_states = True
    assert len(model(x, return_dict=False)) == 3


def logits_by_hand(attention, tokens):
    """What goes into the softmax, from the layer's own queries and keys."""
    batch, n, _ = tokens.shape
    q, k, _ = attention.qkv(tokens).reshape(batch, n, 3, attention.num_heads, -1).permute(2, 0, 3, 1, 4)
    if attention.attention == "none":
        return q @ k.mT * attention.scale
    if attention.attention == "projection":  # the layer has corrected them
        logits = q @ k.mT
    else:
        logits = corrected_attention_logits_reference(tokens, q, k, attention.attention)
    return logits * attention.logit_scale.exp().view(-1, 1, 1)


@pytest.mark.parametrize("attention", ("none", "projection", "separable", "logit", "exact"))
def test_attention_maps(attention, x):
    config = AffDivConfig(
        architecture="vit_nano_patch4_32_affine", model_args={"depth": 2, "attention": attention}, num_labels=4
    )
    model = AffDivForImageClassification(config).eval()
    plain = model(x)
    assert plain.attentions is None
    inputs = []
    handles = [
        b.attn.register_forward_pre_hook(lambda _, args: inputs.append(args[0])) for b in model.timm_model.blocks
    ]
    output = model(x, output_attentions=True)
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(output.logits, plain.logits, rtol=1e-5, atol=1e-5)
    assert len(output.attentions) == 2
    for block, tokens, attentions in zip(model.timm_model.blocks, inputs, output.attentions, strict=True):
        assert attentions.shape == (2, 3, 64, 64)
        torch.testing.assert_close(attentions, logits_by_hand(block.attn, tokens).softmax(-1), rtol=1e-4, atol=1e-6)
        assert not block.attn.attn_drop._forward_hooks
        assert block.attn.fused_attn == timm.layers.use_fused_attn()
    features = AffDivModel(config).eval()(x, output_attentions=True, output_hidden_states=True)
    assert len(features.attentions) == len(features.hidden_states) == 2
    assert len(AffDivBackbone(config).eval()(x, output_attentions=True).attentions) == 2


def test_attention_maps_of_plain_timm_models_and_of_none(x):
    config = AffDivConfig(architecture="vit_nano_patch4_32", model_args={"depth": 1}, num_labels=4)
    model = AffDivModel(config).eval()
    (attention,) = model(x, output_attentions=True).attentions
    torch.testing.assert_close(attention.sum(-1), torch.ones(2, 3, 64))
    with pytest.raises(ValueError, match="resnet20_cifar_patchnorm has no attention maps"):
        AffDivModel(AffDivConfig(**RESNET))(x, output_attentions=True)


def test_eager_attention_is_eager(x):
    config = AffDivConfig(**VIT)
    model = AffDivForImageClassification._from_config(config, attn_implementation="eager").eval()
    assert not any(block.attn.fused_attn for block in model.timm_model.blocks)
    model.config.output_attentions = True
    assert len(model(x).attentions) == 2


@pytest.mark.parametrize("size", ((32, 32), (48, 40)))
def test_interpolated_position_encodings_are_timms(size):
    config = AffDivConfig(**VIT)
    model = AffDivForImageClassification(config).eval()
    dynamic = timm.create_model(config.architecture, num_classes=4, dynamic_img_size=True, **config.model_args).eval()
    dynamic.load_state_dict(model.timm_model.state_dict())
    x = torch.randn(2, 3, *size)
    assert torch.equal(model(x, interpolate_pos_encoding=True).logits, dynamic(x))
    if size != (32, 32):
        with pytest.raises(AssertionError, match="height"):
            model(x)  # and nothing has changed
    maps = AffDivBackbone(config)(x, interpolate_pos_encoding=True).feature_maps
    assert maps[0].shape == (2, 96, size[0] // 4, size[1] // 4)


def test_interpolation_where_there_is_nothing_to_interpolate(x):
    resnet = AffDivForImageClassification(AffDivConfig(**RESNET)).eval()
    large = torch.randn(1, 3, 48, 40)
    assert torch.equal(resnet(large, interpolate_pos_encoding=True).logits, resnet(large).logits)
    mlp = AffDivModel(AffDivConfig(architecture="mlp_cifar_affine", model_args={"width": 8, "depth": 1}))
    with pytest.raises(ValueError, match="mlp_cifar_affine takes images of one size"):
        mlp(large, interpolate_pos_encoding=True)


@pytest.mark.parametrize(
    ("arguments", "indices"), ((VIT, [0, 1]), (RESNET, [0, 2]), (dict(architecture="mlp_cifar_affine"), [1, 5]))
)
def test_backbone_features_are_timms(arguments, indices, x, tmp_path):
    config = AffDivConfig(**arguments)
    AffDivForImageClassification(config).save_pretrained(tmp_path)
    backbone, info = AffDivBackbone.from_pretrained(tmp_path, out_indices=indices, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    expected = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, features_only=True, out_indices=indices)
    maps, expected_maps = backbone(x).feature_maps, expected.eval()(x)
    assert len(maps) == len(indices) and all(map(torch.equal, maps, expected_maps))
    assert backbone.channels == expected.feature_info.channels() == [m.shape[1] for m in maps]
    assert backbone.out_features == [config.stage_names[i] for i in indices]
    assert len(backbone(x, output_hidden_states=True).hidden_states) == len(config.stage_names)
    last = AffDivBackbone.from_pretrained(tmp_path)
    assert last.out_indices == [len(config.stage_names) - 1] and len(last(x).feature_maps) == 1
    with pytest.raises(ValueError, match="out_features"):
        AffDivBackbone.from_pretrained(tmp_path, out_features=["nowhere"])


@one_by_default
def test_torch_compile(folder, x):
    model = AutoModelForImageClassification.from_pretrained(folder)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x).logits, model(x).logits)


def picture(color):
    image = np.zeros((40, 50, 3), np.uint8)
    image[..., color] = 255
    return Image.fromarray(image)


def test_pipelines(folder):
    classify = pipeline("image-classification", model=str(folder))
    model, processor = classify.model, classify.image_processor
    assert isinstance(model, AffDivForImageClassification)
    results = classify([picture(0), picture(1)], top_k=4)
    inputs = processor([picture(0), picture(1)], return_tensors="pt")
    probabilities = model(**inputs).logits.softmax(-1)
    for result, expected in zip(results, probabilities.tolist(), strict=True):
        assert {r["label"] for r in result} == set(NAMES)
        for r in result:
            assert r["score"] == pytest.approx(expected[NAMES.index(r["label"])], abs=1e-6)
    extract = pipeline("image-feature-extraction", model=str(folder))
    features = AutoModel.from_pretrained(folder)(**processor(picture(0), return_tensors="pt"))
    torch.testing.assert_close(torch.tensor(extract(picture(0))), features.last_hidden_state.detach())
    torch.testing.assert_close(torch.tensor(extract(picture(0), pool=True)), features.pooler_output.detach())


class Colours(torch.utils.data.Dataset):
    """Noise with one channel raised: the label."""

    def __init__(self, n):
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.arange(n) % 3
        self.images = torch.randn(n, 3, 32, 32, generator=generator)
        self.images[torch.arange(n), self.labels] += 1

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"pixel_values": self.images[i], "labels": self.labels[i]}


def trainer(folder, output, **kwargs):
    arguments = TrainingArguments(
        output_dir=str(output),
        learning_rate=3e-3,
        per_device_train_batch_size=8,
        max_steps=10,
        save_steps=5,
        logging_steps=5,
        eval_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **kwargs,
    )
    model = AutoModelForImageClassification.from_pretrained(folder)
    accuracy = lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())}  # noqa: E731
    return Trainer(model, arguments, train_dataset=Colours(48), eval_dataset=Colours(24), compute_metrics=accuracy)


@one_by_default
def test_trainer_trains_resumes_and_evaluates(folder, tmp_path):
    whole = trainer(folder, tmp_path / "whole")
    before = whole.evaluate()
    whole.train()
    after = whole.evaluate()
    assert after["eval_loss"] < before["eval_loss"] and after["eval_accuracy"] > 0.6
    assert whole.predict(Colours(6)).predictions.shape == (6, 4)

    resumed = trainer(folder, tmp_path / "whole")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-5"))
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)
    x = torch.randn(2, 3, 32, 32)
    saved = timm.create_model(f"local-dir:{tmp_path / 'whole' / 'checkpoint-10'}", pretrained=True)
    assert torch.equal(saved.eval()(x), whole.model.eval()(x).logits)


def test_state_dicts_of_timm_load(x):
    source = timm.create_model("mlp_cifar", width=8, depth=1)
    save_args = dict(architecture="mlp_cifar", model_args=dict(width=8, depth=1))
    model = AffDivForImageClassification(AffDivConfig(**save_args))
    model.load_state_dict(source.state_dict())
    assert torch.equal(model(x).logits, source(x))
