"""Trained models by name, for finetune.py, evaluate.py and predict.py.

A name is one of timm's or of this plugin's with weights, with or without a tag (`resnet18.a1_in1k`); a repository on
the Hub (`hf-hub:owner/name`); or a folder that holds config.json and model.safetensors, as train.py, finetune.py and
`affdiv-zoo convert` write it (`local-dir:path`, or the path alone).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import timm
import torch
from accelerate import Accelerator
from data import RecipeError, did_you_mean, hub_answers, listed, one_line
from timm.data import ImageNetInfo, infer_imagenet_subset, resolve_data_config
from timm.models import get_pretrained_cfg, load_model_config_from_hf
from timm.models._hub import load_model_config_from_path
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from tqdm import tqdm

import affdiv_zoo  # registers the models

DEFAULT_MODEL = "resnet20_cifar_patchnorm.cifar10"  # bundled with the package

# What timm, safetensors and the Hub's client raise on a name, a file or a connection that is no good.
LOAD_ERRORS = (OSError, RuntimeError, ValueError, KeyError, TypeError, AssertionError)


def complete_name(name: str, option: str = "--model") -> str:
    """Returns the name of a trained model as timm takes it.

    Args:
        name: The name as the user gives it.
        option: The option it is the value of, for messages.

    Raises:
        RecipeError: There is no such model, or it has no weights.
    """
    if (Path(name) / "config.json").is_file():
        name = f"local-dir:{name}"
    if name.startswith("local-dir:"):
        folder = Path(name.removeprefix("local-dir:"))
        if not (folder / "config.json").is_file():
            raise RecipeError(f"{option} {name!r}: there is no {str(folder / 'config.json')!r}; name a run's folder")
        if not any(folder.glob("*.safetensors")):
            raise RecipeError(f"{option} {name!r}: the folder holds no weights; expected model.safetensors")
        return name
    if name.startswith(("hf-hub:", "hf_hub:")):
        return name
    if ":" in name or "/" in name or Path(name).is_dir():
        raise RecipeError(
            f"{option} {name!r}: no such folder with a config.json; name one, a repository as hf-hub:owner/name, or a "
            "model of timm or affdiv_zoo"
        )
    if not timm.is_model(name):
        raise RecipeError(f"{option} {name!r} is unknown to timm{did_you_mean(name, timm.list_models())}")
    try:
        has_weights = get_pretrained_cfg(name).has_weights
    except RuntimeError as error:
        tags = timm.list_models(f"{name.partition('.')[0]}.*", pretrained=True)
        raise RecipeError(f"{option} {name!r}: {one_line(error)} Names with weights: {listed(tags)}") from error
    if not has_weights:
        bundled = affdiv_zoo.list_models(pretrained=True)
        raise RecipeError(
            f"{option} {name!r} has no trained weights; name a folder with some, a timm model of "
            f"timm.list_models(pretrained=True), or of affdiv_zoo: {listed(bundled)}"
        )
    return name


def go_offline_if_unreachable(name: str) -> None:
    """Asks the Hub briefly where a model's weights come from it; if it is silent, only the cache is looked at.

    Without this, every file is retried for many seconds.
    """
    constants = huggingface_hub.constants
    if name.startswith("local-dir:") or constants.HF_HUB_OFFLINE:
        return
    cfg = None if name.startswith(("hf-hub:", "hf_hub:")) else get_pretrained_cfg(name)
    if cfg is not None and (cfg.file or not cfg.hf_hub_id):
        return
    if not hub_answers():
        constants.HF_HUB_OFFLINE = True


def check_keywords(kwargs: dict[str, Any]) -> None:
    """Raises a RecipeError for keywords with which a model's outputs would not be those that it was trained for."""
    for key in ("num_classes", "features_only"):
        if key in kwargs:
            raise RecipeError(f"--model-kwargs {key}={kwargs[key]}: the classifier would not be the trained one")


def load_pretrained(name: str, **kwargs: Any) -> nn.Module:
    """Creates a trained model with its weights.

    Args:
        name: What `complete_name` returns.
        **kwargs: As `timm.create_model` takes them, such as `num_classes`, `in_chans` and `img_size`.

    Raises:
        RecipeError: The weights cannot be had, or do not fit the keywords.
    """
    go_offline_if_unreachable(name)
    try:
        return timm.create_model(name, pretrained=True, **kwargs)
    except LOAD_ERRORS as error:
        given = " ".join(f"{key}={value}" for key, value in kwargs.items())
        raise RecipeError(
            f"--model {name!r} cannot be loaded{f' with {given}' if given else ''} ({one_line(error)})"
        ) from error


def saved_config(name: str) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """Returns what is known of a trained model without its weights.

    Args:
        name: What `complete_name` returns.

    Returns:
        timm's pretrained_cfg; timm's name of the architecture; and the keywords that were saved with it.

    Raises:
        RecipeError: Its configuration cannot be had.
    """
    if not name.startswith(("local-dir:", "hf-hub:", "hf_hub:")):
        return get_pretrained_cfg(name).to_dict(), name.partition(".")[0], {}
    go_offline_if_unreachable(name)
    read = load_model_config_from_path if name.startswith("local-dir:") else load_model_config_from_hf
    try:
        cfg, architecture, arguments = read(name.partition(":")[2])
    except LOAD_ERRORS as error:
        raise RecipeError(f"--model {name!r} cannot be loaded ({one_line(error)})") from error
    return dict(cfg), architecture, dict(arguments or {})


def input_config(model: nn.Module, img_size: int | None = None) -> dict[str, Any]:
    """Returns timm's description of a trained model's input, for `timm.data.create_transform`."""
    config = resolve_data_config({}, model=model)
    if img_size is not None:
        config["input_size"] = (config["input_size"][0], img_size, img_size)
    return config


def try_input(model: nn.Module, config: dict[str, Any], name: str) -> None:
    """Raises a RecipeError unless a model takes an empty image of the size that is asked for."""
    channels, height, width = config["input_size"]
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, channels, height, width))
    except (RuntimeError, ValueError, AssertionError) as error:
        raise RecipeError(
            f"--img-size {height}: {name} does not take {channels}x{height}x{width} images ({one_line(error)})"
        ) from error


def known_class_names(model: nn.Module) -> list[str] | None:
    """Returns the classes' names from a model's configuration, or None if it does not tell them."""
    names = model.pretrained_cfg.get("label_names")
    return None if names is None or len(names) != model.num_classes else [str(name) for name in names]


def class_names(model: nn.Module) -> list[str]:
    """Returns names for a model's classes: its configuration's, ImageNet's by timm's tables, or numbers."""
    names = known_class_names(model)
    if names is not None:
        return names
    try:
        subset = infer_imagenet_subset(model)
        if subset is not None:
            info = ImageNetInfo(subset)
            return [info.index_to_description(index) for index in range(model.num_classes)]
    except (KeyError, IndexError, AssertionError):
        pass  # other classes of that number
    return [str(number) for number in range(model.num_classes)]


@torch.no_grad()
def outputs(
    accelerator: Accelerator, model: nn.Module, dataset: Dataset, batch_size: int, workers: int, progress: bool
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Runs a model over a data set, every image once, on however many processes.

    Args:
        accelerator: What runs it.
        model: The model; it goes to the device and into eval mode.
        dataset: Pairs of an image and a number.
        batch_size: Images per process and batch.
        workers: Loader workers per process.
        progress: Whether to show a bar.

    Yields:
        The logits, as float32, and the numbers of all processes' images, in the data set's order.
    """
    loader = DataLoader(dataset, batch_size=batch_size, num_workers=workers)
    # Not the model: only training needs its wrappers.
    model, loader = model.to(accelerator.device).eval(), accelerator.prepare(loader)
    length = None if isinstance(dataset, IterableDataset) else len(loader)
    hidden = not progress or not accelerator.is_main_process
    for images, numbers in tqdm(loader, total=length, unit="batch", disable=hidden):
        with accelerator.autocast():
            logits = model(images)
        yield accelerator.gather_for_metrics((logits.float(), numbers))
