"""A page that classifies an image and shows, layer by layer, what a corrected net divides by.

    pip install "affdiv-zoo[space]" && python app.py

Every corrected layer divides its map of x by its length, sqrt(||x||^2 + 1). In a convolution x is the patch under the
kernel, so that there is one divisor for every position: the patch norm, which is shown over the image. It is also the
square root of the affine divergence, by which a gradient step of an uncorrected layer would be too long there.
"""

import difflib
import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
import timm
import torch
from PIL import Image, ImageDraw
from timm.data import create_transform, resolve_model_data_config
from timm.layers import PatchEmbed
from torch import Tensor, nn

import affdiv_zoo
from affdiv_zoo.functional import patch_sqnorm
from affdiv_zoo.hub import HubError, pull
from affdiv_zoo.layers.linear import CorrectedLinear

if TYPE_CHECKING:
    import gradio

DEFAULT = "resnet20_cifar_patchnorm"
SHOWN_SIZE = 256  # pixels of the shorter side at which small images are shown
OPACITY = 0.6  # of a heat map over its image


@dataclass(frozen=True)
class Loaded:
    """A model, ready for images.

    Attributes:
        model: In evaluation mode.
        transform: From a PIL image to a tensor ``(channels, height, width)``.
        labels: Of the classes, in order.
        note: What the reader should know, in Markdown; empty if nothing.
    """

    model: nn.Module
    transform: Callable[[Image.Image], Tensor]
    labels: tuple[str, ...]
    note: str = ""


# -- The model ---------------------------------------------------------------------------------------------------------


def model_names() -> list[str]:
    """Names to choose from: first those with weights, with their tags, then all others."""
    trained = affdiv_zoo.list_models(pretrained=True)
    bases = {name.split(".")[0] for name in trained}
    return trained + [name for name in affdiv_zoo.list_models() if name not in bases]


@functools.lru_cache(maxsize=3)
def load(name: str) -> Loaded:
    """Makes a model by its name, or from the Hub by its id.

    Args:
        name: A name of :func:`model_names`, with weights if there are any; or ``user/name`` on the Hub, perhaps with
            ``@revision``. Only safetensors are read from there.

    Raises:
        ValueError: There is no such model, or what is on the Hub cannot be used; the message says what would work.
    """
    name = name.strip().removeprefix("hf-hub:")
    note = ""
    if "/" in name:
        repo_id, _, revision = name.partition("@")
        try:
            folder = pull(repo_id, revision=revision or None)
        except HubError as error:
            raise ValueError(str(error)) from error
        model = timm.create_model(f"local-dir:{folder}", pretrained=True)
    else:
        trained, base = affdiv_zoo.list_models(pretrained=True), name.split(".")[0]
        if name not in model_names() and base not in affdiv_zoo.list_models():
            close = difflib.get_close_matches(name, affdiv_zoo.list_models() + trained, 1)
            hint = f"did you mean {close[0]}?" if close else "choose one from the list, or user/name on the Hub"
            raise ValueError(f"there is no model {name!r}: {hint}")
        if name != base and name not in trained:
            raise ValueError(f"{base} has no weights {name!r}: choose one from the list")
        has_weights = name in trained or any(other.split(".")[0] == base for other in trained)
        model = timm.create_model(name, pretrained=has_weights)
        if not has_weights:
            note = f"**{name} has no trained weights yet: they are random, and so are the answers.**"
    model.eval()
    transform = create_transform(**resolve_model_data_config(model), is_training=False)
    names = model.pretrained_cfg.get("label_names") or ()
    labels = tuple(map(str, names)) if len(names) == model.num_classes else ()
    return Loaded(model, transform, labels or tuple(f"class {i}" for i in range(model.num_classes)), note)


# -- What it divides by ------------------------------------------------------------------------------------------------


def divisor(layer: nn.Module, x: Tensor) -> Tensor:
    """The length that a corrected layer divides its map of ``x`` by: sqrt(||x||^2 + 1) if affine-like with a bias.

    Args:
        layer: A corrected linear layer or convolution.
        x: Its input.

    Returns:
        A convolution: ``(batch, height, width)``, the mean over its groups. A linear layer: the input's shape without
        the last dimension.
    """
    if isinstance(layer, CorrectedLinear):
        x = x.double()
        square = (x - x.mean(-1, keepdim=True) if layer.center else x).square().sum(-1)
    else:
        square = patch_sqnorm(
            x.double(),
            layer.kernel_size,
            layer.stride,
            layer.padding,
            layer.dilation,
            layer.groups,
            padding_mode=layer.padding_mode,
            center=layer.center,
        )
    one = 1.0 if layer.correction != "norm" and layer.bias is not None else layer.eps
    root = (square + one).sqrt()
    return root if isinstance(layer, CorrectedLinear) else root.mean(1)


def run(model: nn.Module, image: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Classifies one image, and collects its divisors.

    Args:
        model: A timm model.
        image: ``(channels, height, width)``, normalised.

    Returns:
        The logits ``(classes,)``; and for every corrected layer whose divisors have places in the image, by its name,
        in the order of the calls, a map ``(rows, columns)``. A layer that sees the image as one vector has a 1 x 1 map.
    """
    maps: dict[str, Tensor] = {}
    prefix = getattr(model, "num_prefix_tokens", 0)
    grid = next((m.grid_size for m in model.modules() if isinstance(m, PatchEmbed)), None)

    def note(name: str, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        values = divisor(layer, args[0])[0]
        if isinstance(layer, CorrectedLinear):
            if values.ndim == 0:
                values = values.reshape(1, 1)
            elif values.ndim == 1 and grid is not None and len(values) == prefix + math.prod(grid):
                values = values[prefix:].reshape(*grid)
            elif values.ndim != 2:
                return  # one divisor for each channel, as where a mixer mixes tokens: of no place in the image
        maps[name] = values

    layers = {n: m for n, m in model.named_modules() if getattr(m, "correction", "none") != "none" and _is_map(m)}
    hooks = [m.register_forward_pre_hook(functools.partial(_call, note, n)) for n, m in layers.items()]
    try:
        with torch.inference_mode():
            logits = model(image.unsqueeze(0))[0]
    finally:
        for hook in hooks:
            hook.remove()
    return logits, maps


def _is_map(module: nn.Module) -> bool:
    return isinstance(module, CorrectedLinear | nn.Conv2d)


def _call(note: Callable, name: str, layer: nn.Module, args: tuple) -> None:
    note(name, layer, args)


# -- Pictures ----------------------------------------------------------------------------------------------------------


def seen(image: Tensor, model: nn.Module) -> Image.Image:
    """What the model sees: the prepared image, at a size that people see too."""
    config = resolve_model_data_config(model)
    mean, std = (torch.tensor(config[key]).view(-1, 1, 1) for key in ("mean", "std"))
    pixels = ((image * std + mean).clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    picture = Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).convert("RGB")
    factor = max(1, math.ceil(SHOWN_SIZE / min(picture.size)))
    return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)


def heat_map(values: Tensor, picture: Image.Image) -> Image.Image:
    """Lays a map over a picture: dark where it is smallest, yellow where it is largest."""
    low, high = values.min(), values.max()
    unit = ((values - low) / (high - low)).numpy() if high > low else np.full(values.shape, 0.5)
    colours = (matplotlib.colormaps["inferno"](unit)[..., :3] * 255).astype(np.uint8)
    layer = Image.fromarray(colours).resize(picture.size, Image.Resampling.NEAREST)
    return Image.blend(picture.convert("L").convert("RGB"), layer, OPACITY)


def samples() -> dict[str, Callable[[], Image.Image]]:
    """Images that come with this page: drawn here, or scikit-learn's."""
    return {"ship": _ship, "stripes": _stripes, "digit": _digit, "flower": lambda: _photo("flower.jpg")}


def _ship() -> Image.Image:
    image = Image.new("RGB", (256, 256), (150, 190, 225))
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 165, 256, 256), fill=(30, 75, 120))
    draw.polygon([(40, 140), (216, 140), (190, 185), (66, 185)], fill=(150, 40, 35))
    draw.rectangle((90, 105, 165, 140), fill=(235, 235, 230))
    draw.rectangle((135, 70, 153, 105), fill=(50, 50, 55))
    for x in range(100, 160, 18):
        draw.ellipse((x, 115, x + 9, 124), fill=(60, 90, 120))
    return image


def _stripes() -> Image.Image:
    """From left to right finer stripes, from top to bottom less contrast: where a patch norm is large shows at once."""
    y, x = np.mgrid[0:256, 0:256] / 256
    pixels = 127.5 + 127.5 * (1 - y) * np.sin(2 * math.pi * 20 * x**2)
    return Image.fromarray(pixels.round().astype(np.uint8)).convert("RGB")


def _digit() -> Image.Image:
    from sklearn.datasets import load_digits

    pixels = (load_digits().images[5] * 255 / 16).round().astype(np.uint8)
    return Image.fromarray(pixels).convert("RGB").resize((256, 256), Image.Resampling.NEAREST)


def _photo(name: str) -> Image.Image:
    from sklearn.datasets import load_sample_image

    photo = Image.fromarray(load_sample_image(name))
    left = (photo.width - photo.height) // 2
    return photo.crop((left, 0, left + photo.height, photo.height)).resize((256, 256))


# -- The page ----------------------------------------------------------------------------------------------------------


def classify(
    name: str, image: Image.Image | None
) -> tuple[dict[str, float], Image.Image, list[tuple[Image.Image, str]], str]:
    """What the button does.

    Args:
        name: As in :func:`load`.
        image: Any PIL image.

    Returns:
        Label to probability of the five most probable classes; what the model sees; a heat map and a caption for every
        layer; a note in Markdown.

    Raises:
        ValueError: No image, or no such model.
    """
    if image is None:
        raise ValueError("there is no image yet: upload one, or choose a sample")
    loaded = load(name)
    channels = loaded.model.pretrained_cfg["input_size"][0]
    prepared = loaded.transform(image.convert("L" if channels == 1 else "RGB"))
    logits, maps = run(loaded.model, prepared)
    top = logits.softmax(0).topk(min(5, len(logits)))
    answers = {loaded.labels[i]: p for p, i in zip(top.values.tolist(), top.indices.tolist(), strict=True)}
    picture = seen(prepared, loaded.model)
    pictures = [(heat_map(values, picture), caption(layer, values)) for layer, values in maps.items()]
    notes = [loaded.note] if loaded.note else []
    if not maps:
        notes.append(f"{name} has no corrected layers, so it divides by nothing: choose a patchnorm or affine model.")
    return answers, picture, pictures, "\n\n".join(notes)


def caption(layer: str, values: Tensor) -> str:
    """A heat map's caption, short enough for a quarter of the page: the layer, its smallest and its largest divisor."""
    low, high = f"{values.min():.3g}", f"{values.max():.3g}"
    return f"{layer}: {low}" + (f" to {high}" if low != high else "")


def build() -> "gradio.Blocks":
    """Makes the page."""
    import gradio as gr

    def answer(name: str, image: Image.Image | None):
        try:
            return classify(name, image)
        except ValueError as error:
            raise gr.Error(re.sub(r"\s+", " ", str(error))) from error

    drawn = samples()
    names = model_names()
    default = next((name for name in names if name.split(".")[0] == DEFAULT), names[0])
    with gr.Blocks(title="affdiv_zoo", analytics_enabled=False) as page:
        gr.Markdown(
            "# What a PatchNorm network divides by\n"
            "The layers of [The Affine Divergence](https://arxiv.org/abs/2512.22247) divide their map of x by "
            "√(‖x‖² + 1). In a convolution, x is the patch under the kernel: there is a divisor at every position, and "
            "no statistics of a batch. Choose a model and an image; below are the answers, and the divisors of every "
            "layer over the image."
        )
        with gr.Row():
            with gr.Column():
                model = gr.Dropdown(
                    names,
                    value=default,
                    allow_custom_value=True,
                    label="Model, or user/name on the Hub",
                    elem_id="model",
                )
                sample = gr.Radio(list(drawn), label="Sample", elem_id="sample")
                image = gr.Image(
                    type="pil", label="Image", elem_id="image", height=320, sources=["upload", "clipboard"]
                )
                button = gr.Button("Classify", variant="primary", elem_id="classify")
            with gr.Column():
                note = gr.Markdown(elem_id="note")
                label = gr.Label(num_top_classes=5, label="Answers", elem_id="answers")
                picture = gr.Image(label="What the model sees", elem_id="seen", height=320, interactive=False)
        gallery = gr.Gallery(
            label="Divisors, layer by layer: dark is a layer's smallest, yellow its largest",
            elem_id="divisors",
            columns=4,
            height=None,
            object_fit="contain",
        )
        sample.input(lambda chosen: drawn[chosen](), sample, image, api_name=False)
        image.upload(lambda: None, None, sample, api_name=False)
        button.click(answer, [model, image], [label, picture, gallery, note], api_name="classify")
    return page


if __name__ == "__main__":
    build().launch()
