"""The ``affdiv-zoo diagnose`` command: models side by side on the same images."""

import json
from collections.abc import Callable
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
import yaml
from timm.data import ImageDataset, create_transform, resolve_data_config
from torch import Tensor, nn

from affdiv_zoo._checks import check_model_name
from affdiv_zoo._files import write_whole
from affdiv_zoo.convert.saved import check_directory
from affdiv_zoo.diagnostics._diagnose import diagnose
from affdiv_zoo.diagnostics.report import DivergenceReport

WARM_UP_STEPS = 10
"""Of models with random weights: some branches start with a zero weight at their end, and have no gradient before."""

SMALL = 64
"""Side of small images for nets that take any size."""


def diagnose_to_directory(
    names: list[str],
    directory: Path,
    *,
    dataset: str,
    images: Path | None,
    batch_size: int,
    image_size: int | None,
    steps: int | None,
    pretrained: bool,
    eval_mode: bool,
    verify: bool,
    whole_step: bool,
    model_kwargs: list[str],
    seed: int,
    device: str,
    overwrite: bool,
    say: Callable[[str], None] = print,
) -> list[DivergenceReport]:
    """Makes timm models, diagnoses them on the same images, and writes report.html, report.png and report.json.

    Args:
        names: timm's names; ``local-dir:FOLDER`` for a run folder.
        directory: Made if there is none.
        dataset: ``"digits"``, scikit-learn's, scaled up; ignored with ``images``.
        images: A folder of class folders.
        batch_size: Images of the diagnosed step.
        image_size: Side of the images; by default the model's own, or 64 for digits where the model takes any size.
        steps: Updates with AdamW before the diagnosis; by default 10 for random weights and none for pretrained ones.
        pretrained: Start from timm's weights.
        eval_mode: Diagnose in evaluation mode instead of training mode.
        verify: As in :func:`affdiv_zoo.diagnose`.
        whole_step: As in :func:`affdiv_zoo.diagnose`.
        model_kwargs: ``key=value`` for ``timm.create_model``.
        seed: Of the weights, the choice of images and the updates.
        device: ``"auto"``, ``"cpu"``, ``"cuda"``, ...
        overwrite: Replace the files in a folder that is not empty.
        say: Told what is being done.

    Returns:
        The reports, in the models' order.

    Raises:
        ImportError: scikit-learn is needed and not installed.
        OSError: A file is missing, or the folder is not empty.
        ValueError: An option does not fit, or there is no such model.
    """
    check_directory(directory, overwrite)  # before minutes of work
    if images is None and dataset != "digits":
        raise ValueError(f"--dataset {dataset!r} is not 'digits'; use --images FOLDER for a folder of class folders")
    if images is not None and not images.is_dir():
        raise FileNotFoundError(f"--images {images}: no such folder")
    kwargs = {}
    for pair in model_kwargs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise ValueError(f"--model-kwargs {pair!r}: expected key=value")
        kwargs[key] = yaml.safe_load(value)
    for name in names:
        if ":" not in name:
            check_model_name(name)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"

    classes, load = _digits() if images is None else _folder(images)
    reports = []
    for name in names:
        torch.manual_seed(seed)
        trained = pretrained or name.startswith("local-dir:")
        options = dict(kwargs, num_classes=classes)
        model, size = _create(name, trained, options, image_size, small=images is None)
        warm_up = steps if steps is not None else 0 if trained else WARM_UP_STEPS
        x, y = load(model, size, (warm_up + 1) * batch_size, torch.Generator().manual_seed(seed))
        if len(x) < 2:
            raise ValueError(f"there are {len(x)} images, at least 2 are needed")
        model, x, y = model.to(device).train(), x.to(device), y.to(device)
        say(f"{name}: {min(batch_size, len(x))} images of {size} px" + f", after {warm_up} updates" * (warm_up > 0))
        _warm_up(model, x, y, batch_size, warm_up)
        model.train(not eval_mode)
        x, y = x[-batch_size:], y[-batch_size:]
        reports.append(diagnose(model, x, y, verify=verify, whole_step=whole_step, name=name))

    directory.mkdir(parents=True, exist_ok=True)
    reports[0].save_html(directory / "report.html", reports[1:])
    reports[0].plot(directory / "report.png", reports[1:])
    text = json.dumps([r.to_dict() for r in reports], indent=1) + "\n"
    write_whole(directory / "report.json", lambda temporary: temporary.write_text(text))
    return reports


def _create(name: str, pretrained: bool, options: dict, image_size: int | None, small: bool) -> tuple[nn.Module, int]:
    """The model, and the side of its images."""
    fixed = False
    if ":" not in name:
        cfg = timm.get_pretrained_cfg(name)
        fixed = cfg is not None and cfg.fixed_input_size
    if image_size is not None and fixed:
        options = dict(options, img_size=image_size)
    model = timm.create_model(name, pretrained=pretrained, **options)
    own = resolve_data_config({}, model=model)["input_size"][-1]
    fixed = fixed or bool(model.pretrained_cfg.get("fixed_input_size"))
    return model, image_size or (own if fixed or not small else min(own, SMALL))


def _warm_up(model: nn.Module, x: Tensor, y: Tensor, batch_size: int, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for i in range(steps):
        part = slice(i * batch_size, (i + 1) * batch_size)
        if len(x[part]) < 2:
            break
        optimizer.zero_grad()
        F.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()
    optimizer.zero_grad()


Loader = Callable[[nn.Module, int, int, torch.Generator], tuple[Tensor, Tensor]]


def _digits() -> tuple[int, Loader]:
    """The number of classes, and what makes images and labels of a size."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("--dataset digits needs scikit-learn: pip install 'affdiv-zoo[recipes]'") from error
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1)
    images = (images - images.mean()) / images.std()
    labels = torch.from_numpy(digits.target).long()

    def load(model: nn.Module, size: int, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        picked = torch.randperm(len(images), generator=generator)[:count]
        channels = resolve_data_config({}, model=model)["input_size"][0]
        x = F.interpolate(images[picked], size=(size, size), mode="bilinear", align_corners=False)
        return x.expand(-1, channels, -1, -1).contiguous(), labels[picked]

    return 10, load


def _folder(folder: Path) -> tuple[int, Loader]:
    """As :func:`_digits`, of class folders."""
    data = ImageDataset(str(folder))
    classes = len(data.reader.class_to_idx)

    def load(model: nn.Module, size: int, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        config = resolve_data_config({}, model=model)
        config["input_size"] = (config["input_size"][0], size, size)
        data.transform = create_transform(**config)
        picked = torch.randperm(len(data), generator=generator)[:count].tolist()
        x, y = zip(*(data[i] for i in picked), strict=True)
        return torch.stack(x), torch.tensor(y)

    return classes, load
