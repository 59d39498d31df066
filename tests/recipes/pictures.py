"""What the recipes' tests share: small images on disk, and commands run as a user runs them.

Class 0 ("dark") is dark and class 1 ("light") bright, so that a handful of updates tells them apart.
"""

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from timm.models._hub import save_for_hf

import affdiv_zoo  # noqa: F401  registers the models

ROOT = Path(__file__).parents[2]
NAMES = ("dark", "light")
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch"]


def picture(label: int, index: int, size: int = 12) -> Image.Image:
    """Draws one image."""
    rng = np.random.default_rng([label, index])
    return Image.fromarray((rng.integers(0, 60, (size, size, 3)) + 190 * label).astype(np.uint8))


def png(label: int, index: int, size: int = 12) -> bytes:
    """Returns a PNG file's bytes."""
    buffer = io.BytesIO()
    picture(label, index, size).save(buffer, "PNG")
    return buffer.getvalue()


def write_classes(folder: Path, count: int, size: int = 12, broken: tuple[str, ...] = ()) -> None:
    """Writes folder/{dark,light}/<n>.png, of which those named as `dark/3` are cut off."""
    for label, name in enumerate(NAMES):
        (folder / name).mkdir(parents=True)
        for index in range(count):
            data = png(label, index, size)
            path = folder / name / f"{index:03}.png"
            path.write_bytes(data[: len(data) // 2] if f"{name}/{index}" in broken else data)


def write_tar(path: Path, rows: list[tuple[str, int, bytes]]) -> None:
    """Writes a WebDataset shard: `<key>.cls` and `<key>.png` for each (key, class, bytes)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for key, label, image in rows:
            for suffix, data in (("cls", str(label).encode()), ("png", image)):
                info = tarfile.TarInfo(f"{key}.{suffix}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


def write_shards(folder: Path, sizes: tuple[int, ...], split: str = "train", broken: tuple[str, ...] = ()) -> None:
    """Writes WebDataset shards of as many images; the keys are `<split>-<shard>-<n>`, those in `broken` are cut off."""
    for shard, size in enumerate(sizes):
        rows = []
        for index in range(size):
            key, data = f"{split}-{shard}-{index}", png(index % 2, 100 * shard + index)
            rows.append((key, index % 2, data[: len(data) // 2] if key in broken else data))
        write_tar(folder / f"{split}-{shard:04}.tar", rows)


def run_script(command: list[str], cwd: Path, **env: str) -> subprocess.CompletedProcess:
    """Runs a command as a user would, in a folder of its own and offline."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", **env)
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


def save_random_model(folder: Path, classes: list, in_chans: int = 3, side: int = 16, name: str = "resnet20_cifar"):
    """Writes a model with random weights as a recipe writes trained ones, and returns its folder.

    Args:
        folder: Where to.
        classes: The classes' names; None for classes without names.
        in_chans: Channels.
        side: Height and width of its images.
        name: The timm model.
    """
    torch.manual_seed(7)
    model = timm.create_model(name, num_classes=len(classes), in_chans=in_chans)
    cfg = dict(input_size=(in_chans, side, side), num_classes=len(classes), pool_size=None)
    cfg |= dict(mean=(0.5,) * in_chans, std=(0.25,) * in_chans, crop_pct=1.0, interpolation="bilinear")
    cfg |= dict(label_names=tuple(classes)) if None not in classes else {}
    save_for_hf(model, folder, model_config=dict(pretrained_cfg=cfg), safe_serialization=True)
    return folder
