"""The page's functions without a browser: the right divisors in the right places, answers, samples and errors."""

import importlib.util
import sys
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
import yaml
from PIL import Image

import affdiv_zoo
from affdiv_zoo.hf import save_pretrained
from affdiv_zoo.hub import HubError

SPACE = Path(__file__).parents[2] / "recipes" / "space"


def load_app():
    spec = importlib.util.spec_from_file_location("space_app", SPACE / "app.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["space_app"] = module  # dataclasses look for it
    spec.loader.exec_module(module)
    return module


app = load_app()


def inputs_of(model, image):
    """Every corrected layer's input, by name; copies, since activations in place follow."""
    found = {}
    for name, layer in model.named_modules():
        if getattr(layer, "correction", "none") != "none":
            layer.register_forward_pre_hook(lambda layer, args, name=name: found.update({name: args[0].clone()}))
    with torch.no_grad():
        model(image.unsqueeze(0))
    return found


@pytest.mark.parametrize("center", [False, True])
def test_a_convolutions_map_is_the_patch_norm(center):
    model = timm.create_model("resnet20_cifar_patchnorm", center=center).eval()
    image = torch.randn(3, 32, 32)
    _, maps = app.run(model, image)
    layers = dict(model.named_modules())
    assert list(maps) == [name for name, m in layers.items() if isinstance(m, torch.nn.Conv2d)]
    for name, x in inputs_of(model, image).items():
        if name not in maps:
            continue
        layer = layers[name]
        patches = F.unfold(x.double(), layer.kernel_size, padding=layer.padding, stride=layer.stride)[0]  # (n, places)
        if center:
            patches = patches - patches.mean(0)
        expected = (patches.square().sum(0) + 1).sqrt().view_as(maps[name])
        torch.testing.assert_close(maps[name].double(), expected)


def test_the_map_times_the_output_is_the_plain_convolution():
    model = timm.create_model("resnet20_cifar_patchnorm", center=False, scale="l2").eval()
    image, conv = torch.randn(3, 32, 32), model.conv1
    _, maps = app.run(model, image)
    act, conv.act = conv.act, "none"
    divided = conv(image.unsqueeze(0))[0]
    conv.act = act
    plain = F.conv2d(image.unsqueeze(0), conv.weight, conv.bias, padding=1)[0]
    torch.testing.assert_close(divided * maps["conv1"].float(), plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("correction", ["affine", "norm"])
def test_a_transformers_maps_are_the_tokens_lengths_in_their_places(correction):
    model = timm.create_model("vit_nano_patch4_32_affine", correction=correction).eval()
    image = torch.randn(3, 32, 32)
    _, maps = app.run(model, image)
    assert {"blocks.0.attn.qkv", "blocks.0.mlp.fc1"} <= set(maps)
    found = inputs_of(model, image)
    for name, values in maps.items():
        tokens = found[name][0]
        if tokens.ndim == 1:  # the classifier's
            assert values.shape == (1, 1)
            continue
        one = 1.0 if correction == "affine" else 1e-6
        assert values.shape == (8, 8)
        expected = (tokens[-64:].double().square().sum(-1) + one).sqrt().reshape(8, 8)
        torch.testing.assert_close(values.double(), expected)


def test_a_token_of_a_larger_model_is_where_its_patch_is():
    model = timm.create_model("vit_tiny_patch16_224_affine", embed_correction="affine", img_size=64).eval()
    image = torch.zeros(3, 64, 64)
    image[:, 16:32, 48:64] = 5.0  # the patch in row 1, column 3
    _, maps = app.run(model, image)
    assert maps["patch_embed.proj"].argmax() == 4 + 3
    assert maps["blocks.0.attn.qkv"].shape == (4, 4)  # without the class token
    lengths = inputs_of(model, image)["blocks.0.attn.qkv"][0, 1:].double().square().sum(-1)
    torch.testing.assert_close(maps["blocks.0.attn.qkv"].double().flatten(), (lengths + 1).sqrt())


def test_layers_without_places_have_none():
    mixer = timm.create_model("mixer_s32_224_affine").eval()
    _, maps = app.run(mixer, torch.randn(3, 224, 224))
    assert "blocks.0.mlp_channels.fc1" in maps and maps["blocks.0.mlp_channels.fc1"].shape == (7, 7)
    assert not any("mlp_tokens" in name for name in maps)
    mlp = timm.create_model("mlp_cifar_affine").eval()
    _, maps = app.run(mlp, torch.randn(3, 32, 32))
    assert maps and {tuple(values.shape) for values in maps.values()} == {(1, 1)}


def test_watching_does_not_change_the_answer():
    for name in ("resnet20_cifar_patchnorm", "vit_nano_patch4_32_affine"):
        model = timm.create_model(name).eval()
        image = torch.randn(3, 32, 32)
        logits, _ = app.run(model, image)
        with torch.no_grad():
            torch.testing.assert_close(logits, model(image.unsqueeze(0))[0], atol=1e-4, rtol=1e-4)
        assert not any(m._forward_pre_hooks for m in model.modules())


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """A model on the Hub, as far as the page can tell; fetching itself is tested with the Hub."""
    torch.manual_seed(0)
    model = timm.create_model("resnet20_cifar_patchnorm", num_classes=6)
    save_pretrained(model, tmp_path / "net", label_names=["ant", "bee", "cat", "dog", "elk", "fly"])
    asked = []

    def pull(repo_id, revision=None):
        asked.append((repo_id, revision))
        if repo_id == "user/missing":
            raise HubError("there is no model user/missing")
        return tmp_path / "net"

    monkeypatch.setattr(app, "pull", pull)
    app.load.cache_clear()
    yield model.eval(), asked
    app.load.cache_clear()


def test_classify_gives_the_models_own_answers(trained):
    model, asked = trained
    image = Image.new("RGB", (50, 40), (200, 30, 90))
    answers, picture, pictures, note = app.classify("user/net@v1", image)
    assert asked == [("user/net", "v1")]
    loaded = app.load("user/net@v1")
    with torch.no_grad():
        probabilities = model(loaded.transform(image).unsqueeze(0)).softmax(1)[0]
    expected = dict(zip(["ant", "bee", "cat", "dog", "elk", "fly"], probabilities.tolist(), strict=True))
    best = sorted(expected, key=expected.get, reverse=True)[:5]
    assert list(answers) == best
    assert answers == pytest.approx({label: expected[label] for label in best}, abs=1e-4)
    assert picture.size == (256, 256)
    assert len(pictures) == 19  # convolutions of a ResNet-20 without projections
    assert pictures[0][1].startswith("conv1: ")
    assert note == ""


def test_a_model_without_weights_says_so():
    assert "random" in app.classify("resnet56_cifar_patchnorm", Image.new("RGB", (32, 32)))[3] or any(
        name.startswith("resnet56_cifar_patchnorm.") for name in affdiv_zoo.list_models(pretrained=True)
    )


def test_a_net_without_corrected_layers_says_so():
    answers, _, pictures, note = app.classify("resnet20_cifar", Image.new("RGB", (32, 32)))
    assert len(answers) == 5 and pictures == [] and "no corrected layers" in note


@pytest.mark.parametrize(
    "name, message",
    [
        ("resnet20_cifar_patchnrom", "did you mean resnet20_cifar_patchnorm"),
        ("resnet18", "there is no model 'resnet18'"),  # timm's own: this page is about ours
        ("resnet20_cifar_patchnorm.no_such_tag", "has no weights 'resnet20_cifar_patchnorm.no_such_tag'"),
        ("user/missing", "there is no model user/missing"),
        ("", "there is no model ''"),
    ],
)
def test_a_wrong_name_is_told(trained, name, message):
    with pytest.raises(ValueError, match=message):
        app.classify(name, Image.new("RGB", (32, 32)))


def test_no_image_is_told():
    with pytest.raises(ValueError, match="there is no image yet"):
        app.classify("resnet20_cifar_patchnorm", None)


def test_the_brightest_place_of_a_heat_map_is_where_the_map_is_largest():
    values = torch.ones(4, 4)
    values[1, 2] = 9.0
    pixels = app.heat_map(values, Image.new("RGB", (64, 64), (100, 100, 100)))
    brightness = torch.tensor(list(pixels.convert("L").tobytes())).view(64, 64)
    ys, xs = torch.where(brightness == brightness.max())
    assert (ys.min(), ys.max(), xs.min(), xs.max()) == (16, 31, 32, 47)
    assert app.caption("conv1", values) == "conv1: 1 to 9"
    assert app.caption("fc", torch.tensor([[3.0]])) == "fc: 3"


def test_what_the_model_sees_is_the_image_again():
    model = timm.create_model("resnet20_cifar_patchnorm")
    image = Image.new("RGB", (32, 32), (200, 30, 90))
    shown = app.seen(app.create_transform(**app.resolve_model_data_config(model))(image), model)
    assert shown.size == (256, 256) and shown.getpixel((100, 100)) == (200, 30, 90)


def test_the_samples_are_images():
    for name, make in app.samples().items():
        image = make()
        assert image.mode == "RGB" and image.size == (256, 256), name
        assert len(set(image.getdata())) > 4, name


def test_the_names_are_ours_and_those_with_weights_come_first():
    names = app.model_names()
    assert {name.split(".")[0] for name in names} == set(affdiv_zoo.list_models())
    trained = affdiv_zoo.list_models(pretrained=True)
    assert names[: len(trained)] == trained


def test_the_space_says_how_it_is_run():
    metadata = yaml.safe_load((SPACE / "README.md").read_text().split("---")[1])
    assert metadata["sdk"] == "gradio" and (SPACE / metadata["app_file"]).is_file()
    assert len(metadata["short_description"]) <= 60  # the Hub's limit
    assert (SPACE / "requirements.txt").read_text() == "affdiv-zoo[space]\n"


def test_the_page_is_built():
    pytest.importorskip("gradio", reason="the page needs gradio: pip install -e '.[space]'")
    page = app.build()
    labels = {block.label for block in page.blocks.values() if getattr(block, "label", None)}
    assert {"Model, or user/name on the Hub", "Sample", "Image", "Answers", "What the model sees"} <= labels
