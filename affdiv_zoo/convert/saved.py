"""Converted timm models on disk: a folder that ``timm.create_model("local-dir:DIR")`` loads after the import."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn as nn
import yaml
from timm.data import create_transform, resolve_data_config
from timm.models import build_model_with_cfg, generate_default_cfgs, load_checkpoint, register_model
from timm.models._hub import save_for_hf

from affdiv_zoo._checks import check_choice, check_model_name
from affdiv_zoo.convert._convert import apply_plan, convert
from affdiv_zoo.convert._report import ConversionReport

__all__ = ["save_converted"]  # register_model adds the entry point

default_cfgs = generate_default_cfgs(
    {"affdiv_converted.untrained": {"url": "", "num_classes": 1000, "input_size": (3, 224, 224)}}
)


def _build(base: str, plan: str, **kwargs: Any) -> nn.Module:
    model = timm.create_model(base, **kwargs)
    return apply_plan(model, plan) if plan else model


@register_model
def affdiv_converted(pretrained: bool = False, base: str = "resnet18", plan: str = "", **kwargs: Any) -> nn.Module:
    """Any timm model after :func:`affdiv_zoo.convert`: made for the folders that :func:`save_converted` writes.

    Args:
        pretrained: Load the weights that ``pretrained_cfg`` tells of.
        base: The timm name of the model that was converted.
        plan: The swaps, :meth:`ConversionReport.plan`; none if empty.
        **kwargs: As the base model takes them.
    """
    features = dict(out_indices=3, feature_cls="getter")
    return build_model_with_cfg(
        _build, "affdiv_converted", pretrained, base=base, plan=plan, feature_cfg=features, **kwargs
    )


def save_converted(
    model: nn.Module,
    report: ConversionReport,
    directory: str | Path,
    overwrite: bool = False,
    model_args: dict[str, Any] | None = None,
) -> None:
    """Writes ``model.safetensors``, ``config.json`` and ``conversion.json`` (the report) into a folder.

    ``timm.create_model("local-dir:DIR", pretrained=True)`` loads it where ``affdiv_zoo`` is imported. Every file is
    written elsewhere first and renamed, so that none is ever half there.

    Args:
        model: A model that ``timm.create_model`` made and :func:`affdiv_zoo.convert` converted.
        report: What the conversion returned.
        directory: Made if it does not exist.
        overwrite: Replace the three files in a folder that is not empty.
        model_args: The keywords that ``timm.create_model`` was given; older timm versions do not remember them.

    Raises:
        FileExistsError: The folder is not empty.
        ValueError: timm did not make the model.
    """
    directory = Path(directory)
    check_directory(directory, overwrite)
    cfg = getattr(model, "pretrained_cfg", None)
    if not cfg or not timm.is_model(cfg.get("architecture", "")):
        raise ValueError(
            f"model is a {type(model).__name__} that timm.create_model did not make: save its state_dict() and "
            "report.plan(), and load them with affdiv_zoo.convert.apply_plan"
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        model.pretrained_cfg = {**cfg, "architecture": "affdiv_converted"}
        model_args = {k: v for k, v in (model_args or {}).items() if not k.startswith("pretrained_cfg")}
        model_args |= {"base": cfg["architecture"], "plan": report.plan()}
        try:
            save_for_hf(model, temporary, model_args=model_args, safe_serialization=True)
        finally:
            model.pretrained_cfg = cfg
        path = temporary / "config.json"
        config = json.loads(path.read_text())
        config["model_args"].pop("num_classes", None)  # else transformers' TimmWrapper would pass it twice
        path.write_text(json.dumps(config, indent=2) + "\n")
        (temporary / "conversion.json").write_text(json.dumps(report.to_dict(), indent=2) + "\n")
        directory.mkdir(exist_ok=True)
        for file in sorted(temporary.iterdir(), key=lambda f: f.name == "config.json"):  # last: what loaders look for
            os.replace(file, directory / file.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_directory(directory: Path, overwrite: bool) -> None:
    """Raises FileExistsError where writing would replace something that nobody said may go."""
    if directory.exists() and not directory.is_dir():
        raise FileExistsError(f"{directory} is a file: name a folder")
    if directory.is_dir() and any(directory.iterdir()) and not overwrite:
        raise FileExistsError(f"{directory} is not empty: name another folder, or pass --overwrite (overwrite=True)")


def convert_to_directory(
    name: str,
    directory: Path,
    *,
    correction: str,
    center: str,
    scale: str,
    attention: str,
    pretrained: bool,
    checkpoint: Path | None,
    images: Path | None,
    samples: int,
    model_kwargs: list[str],
    overwrite: bool,
) -> ConversionReport:
    """``affdiv-zoo convert``: makes a timm model, converts and saves it; the options as the command explains them.

    Raises:
        ValueError: An option does not fit, or there is no such model.
        OSError: A file is missing, or the folder is not empty.
    """
    check_choice("center", center, ("auto", "true", "false"))
    check_directory(directory, overwrite)  # before minutes of work
    check_model_name(name)
    if checkpoint is not None and not checkpoint.is_file():
        raise FileNotFoundError(f"--checkpoint {checkpoint}: no such file")
    pairs = [pair.partition("=") for pair in model_kwargs]
    for key, equals, _ in pairs:
        if not (key and equals):
            raise ValueError(f"--model-kwargs {key!r}: expected key=value")
    kwargs = {key: yaml.safe_load(value) for key, _, value in pairs}
    model = timm.create_model(name, pretrained=pretrained, **kwargs)
    if checkpoint is not None:
        load_checkpoint(model, str(checkpoint))
    example = None if images is None else load_images(model, images, samples)
    center = {"auto": None, "true": True, "false": False}[center]
    model, report = convert(model, correction, center, scale, attention, example)
    save_converted(model, report, directory, overwrite, kwargs)
    return report


def load_images(model: nn.Module, folder: Path, samples: int) -> torch.Tensor:
    """Images from a folder and those below it, evenly picked, as the timm model wants them: one batch.

    Raises:
        ValueError: There is none.
    """
    from PIL import Image

    files = [f for f in sorted(Path(folder).rglob("*")) if f.suffix.lower() in Image.registered_extensions()]
    if not files:
        raise ValueError(f"no images in {folder}")
    transform = create_transform(**resolve_data_config({}, model=model))
    mode = "L" if model.pretrained_cfg["input_size"][0] == 1 else "RGB"
    picked = files[:: -(-len(files) // samples)]
    return torch.stack([transform(Image.open(f).convert(mode)) for f in picked])
