"""Image data for the training recipes: scikit-learn's digits, Hub data sets and folders of images.

The way from a name to tensors has three steps:

1. `load_data` finds the images of every split and their labels, without decoding anything.
2. Small images of one size are decoded once into a uint8 array (`ArrayDataset`). They are then cropped, flipped and
   normalised a batch at a time, which is what makes small experiments quick on a CPU. All other images stay where they
   are and go through timm's transforms one by one (`TransformDataset`).
3. In both cases the augmentation of a sample is a pure function of (seed, epoch, index). It depends neither on the
   number of workers or processes nor on what was drawn before, so that a resumed run sees the very same images.

Data sets that are too large to be listed first, are read as streams instead (`--streaming`, streaming.py).

An image that cannot be decoded stops the run, or is counted, reported and left out, up to `--max-decode-errors` in an
epoch. In training the next readable image of the set takes its place, so that all batches keep their size. In
evaluation its label becomes `UNREADABLE`, which the metrics leave out.
"""

import contextlib
import io
import os
import random
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import create_transform, get_img_extensions, resolve_data_config
from torch.utils.data import Dataset, get_worker_info

TRAIN_SPLITS = ("train", "training")
TEST_SPLITS = ("test", "validation", "val", "valid", "dev", "eval")
AUGMENTATIONS = ("auto", "none", "crop", "crop-flip")

MAX_ARRAY_SIDE = 64  # pixels; larger images are decoded as they are needed
MAX_ARRAY_BYTES = 2 * 2**30
CROP_PADDING = 4  # pixels
HUB_TIMEOUT = 5.0  # seconds
BLACK_SIDE = 256  # pixels of what stands for an unreadable image before the transform
UNREADABLE = -100  # the label of an evaluation image that cannot be decoded; what torch's cross-entropy ignores
WORKER_SLOTS = 256  # of DecodeErrors; workers beyond that many share slots, which could lose a count

# What Pillow raises on files that are no image, cut off or otherwise broken.
DECODE_ERRORS = (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError)


class RecipeError(Exception):
    """A mistake the user can mend. The message is one line that names the option, its value and what would work."""


class ImageDecodeError(RecipeError):
    """An image file that cannot be read. Unlike the other errors, it may strike one process of several."""


# --------------------------------------------------------------------------------------------------------------------
# Images that cannot be decoded
# --------------------------------------------------------------------------------------------------------------------


class DecodeErrors:
    """Counts a data set's images that could not be decoded in this epoch, in this process and all its loader workers.

    It lies in shared memory, as one flag for each image, so that an image that two processes get to fill up their last
    batches counts once; or, where images have no numbers, as one count for each worker. Nobody writes what another
    one reads back, so no lock is needed.

    Args:
        limit: How many may be skipped in an epoch. Each process stops as soon as it has more by itself, and
            `check_skipped` compares the sum over all processes.
        images: The number of images, or None to count in workers.
    """

    def __init__(self, limit: int = 0, images: int | None = None):
        self.limit = limit
        self.numbered = images is not None
        shape, kind = (images, torch.uint8) if self.numbered else (WORKER_SLOTS + 1, torch.int64)
        self.counts = torch.zeros(shape, dtype=kind).share_memory_()

    def reset(self) -> None:
        """Begins an epoch."""
        self.counts.zero_()

    @property
    def count(self) -> int:
        """The number in this epoch and process so far."""
        return int(self.counts.sum())

    def add(self, error: ImageDecodeError, index: int | None = None) -> None:
        """Counts and prints an image that is skipped, or raises its error if it is one too many.

        Args:
            error: What happened.
            index: The image's number, where images have one.
        """
        if self.numbered:
            self.counts[index] = 1
        else:
            worker = get_worker_info()
            self.counts[0 if worker is None else 1 + worker.id % WORKER_SLOTS] += 1
        if self.count > self.limit:
            raise too_many(self.count, self.limit, error) from error
        warn(f"skipped: {error}")

    def total(self, accelerator: Any) -> int:
        """Returns the number in this epoch and all processes, all of which have to call it."""
        count = accelerator.reduce(torch.tensor(self.count, device=accelerator.device), "sum")
        if not self.numbered or not count:
            return int(count)
        flags = self.counts.to(accelerator.device, torch.int32)
        return int((accelerator.reduce(flags, "sum") > 0).sum())


def too_many(count: int, limit: int, error: ImageDecodeError) -> ImageDecodeError:
    """Words the error of an image that is one too many."""
    if not limit:
        return ImageDecodeError(f"{error}, or allow for some with --max-decode-errors")
    return ImageDecodeError(f"--max-decode-errors {limit}: {count} images are unreadable, the last one: {error}")


def warn(message: str) -> None:
    """Writes one line to stderr, from whatever process or loader worker has something to say."""
    sys.stderr.write(f"{Path(sys.argv[0]).name or 'recipes'}: warning: {message}\n")  # one write, not cut by others
    sys.stderr.flush()


def check_skipped(accelerator: Any, dataset: Dataset, name: str) -> int:
    """Reports how many images were skipped in the epoch that has just ended. All processes have to call it.

    Args:
        accelerator: accelerate's Accelerator.
        dataset: The data set; one without an `errors` attribute skips nothing.
        name: What to call it, such as "training".

    Returns:
        The number of skipped images in all processes.

    Raises:
        RecipeError: There were more than `--max-decode-errors` in all processes together.
    """
    errors = getattr(dataset, "errors", None)
    if errors is None:
        return 0
    count = errors.total(accelerator)
    if count > errors.limit:
        raise RecipeError(
            f"--max-decode-errors {errors.limit}: {count} {name} images could not be decoded; "
            "replace or remove those named above, or raise the limit"
        )
    if count and accelerator.is_main_process:
        warn(f"{count} {name} image{'s' * (count > 1)} could not be decoded and left out in this epoch")
    return count


# --------------------------------------------------------------------------------------------------------------------
# Seeded choices
# --------------------------------------------------------------------------------------------------------------------


def sample_bits(seed: int, epoch: int, index: Sequence[int] | np.ndarray) -> np.ndarray:
    """Draws 64 random bits for each sample as a pure function of (seed, epoch, index).

    The three numbers go one after the other through SplitMix64's mixing step, so that the draws of neighbouring seeds,
    epochs and indices have nothing to do with each other.

    Args:
        seed: The run's seed.
        epoch: The epoch, from 0.
        index: The samples' positions in the training set.

    Returns:
        A uint64 array as long as `index`.
    """
    bits = np.zeros(len(index), dtype=np.uint64)
    for word in (seed, epoch, index):
        bits = bits + np.asarray(word, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        bits = bits ^ (bits >> np.uint64(31))
    return bits


@contextlib.contextmanager
def global_rngs_seeded(seed: int) -> Iterator[None]:
    """Seeds the global random generators that transforms draw from, and puts their states back afterwards."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def stratified_split(labels: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Splits positions in two, every class in the same proportion.

    Args:
        labels: The class of every sample.
        fraction: The second part's share of each class, rounded to whole samples.
        seed: Which samples go where.

    Returns:
        The positions of the first and of the second part, both ascending.
    """
    rng = np.random.default_rng(seed)
    first, second = [], []
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        count = round(fraction * len(members))
        second.append(members[:count])
        first.append(members[count:])
    return np.sort(np.concatenate(first)), np.sort(np.concatenate(second))


# --------------------------------------------------------------------------------------------------------------------
# Where the images are: one class for each kind of source
# --------------------------------------------------------------------------------------------------------------------


class ArrayImages:
    """Images that are in memory already, as N x H x W x C bytes."""

    def __init__(self, array: np.ndarray):
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    def load(self, index: int) -> Image.Image:
        image = self.array[index]
        return Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)

    def describe(self, index: int) -> str:
        return f"image {index}"


class FileImages:
    """Image files."""

    def __init__(self, paths: Sequence[Path]):
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def load(self, index: int) -> Image.Image:
        # Read at once: an image that Pillow opens by its path holds the file open until it is decoded.
        return Image.open(io.BytesIO(self.paths[index].read_bytes()))

    def describe(self, index: int) -> str:
        return str(self.paths[index])


class HubImages:
    """The image column of a `datasets.Dataset` with decoding switched off."""

    def __init__(self, column: Any, key: str, split: str):
        self.column = column
        self.key = key
        self.split = split

    def __len__(self) -> int:
        return len(self.column)

    def load(self, index: int) -> Image.Image:
        return open_encoded(self.column[int(index)][self.key])

    def describe(self, index: int) -> str:
        return f"row {index} of split {self.split!r}"


def open_encoded(item: dict[str, Any] | None) -> Image.Image:
    """Opens an image as `datasets` hands it over undecoded: its bytes, or a path or address."""
    item = item or {}
    if item.get("bytes") is not None:
        return Image.open(io.BytesIO(item["bytes"]))
    if not item.get("path"):
        raise ValueError("the row holds no image")
    if os.path.exists(item["path"]):
        return Image.open(io.BytesIO(Path(item["path"]).read_bytes()))
    import fsspec  # which datasets needs anyway

    with fsspec.open(item["path"], "rb") as file:
        return Image.open(io.BytesIO(file.read()))


@dataclass
class Split:
    """Images and their labels."""

    images: ArrayImages | FileImages | HubImages
    labels: np.ndarray
    unreadable: set[int] = field(default_factory=set)  # positions that `decode_small` could not decode

    def readable(self, positions: np.ndarray) -> np.ndarray:
        """Leaves the unreadable ones out of some positions."""
        return positions[~np.isin(positions, list(self.unreadable))]


@dataclass
class Source:
    """A data set that has been found.

    Attributes:
        train: The training images.
        test: The test images, if they have a split of their own.
        label_names: The classes' names, in the order of their numbers.
        arrays: What `decode_small` has made of the images so far, by `--img-size`.
    """

    train: Split
    test: Split | None
    label_names: list[str]
    arrays: dict[int | None, list[np.ndarray] | None] = field(default_factory=dict, repr=False)


def eight_bits(image: Image.Image) -> Image.Image:
    """Returns the upper half of gray with 16 bits, where Pillow would make all above 255 white; others as they are."""
    if not image.mode.startswith("I;16"):
        return image
    return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))


def load_image(images: ArrayImages | FileImages | HubImages, index: int, dataset: str) -> Image.Image:
    """Decodes one image as gray (`L`) if its file is gray and else as `RGB`; an unreadable one is a RecipeError."""
    try:
        image = images.load(index)
        image.load()  # Pillow has read no more than the header yet, and an error here is one that is counted
        image = eight_bits(image)
        return image if image.mode == "L" else image.convert("L" if image.mode == "1" else "RGB")
    except DECODE_ERRORS as error:
        # Pillow repeats the byte stream's address in some messages, which says nothing to anyone.
        why = "not an image" if isinstance(error, Image.UnidentifiedImageError) else one_line(error)
        raise ImageDecodeError(
            f"--dataset {dataset!r}: {images.describe(index)} cannot be decoded ({why}); replace or remove it"
        ) from error


def one_line(error: BaseException) -> str:
    """Returns the first line of an exception's message, or the exception's name where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def listed(names: Sequence[str]) -> str:
    """Joins names for a message."""
    return ", ".join(names) or "none"


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """Words the known names that are close to a wrong one, or an empty string."""
    close = get_close_matches(name, known, n=4)
    return f"; close names: {', '.join(close)}" if close else ""


# --------------------------------------------------------------------------------------------------------------------
# Digits
# --------------------------------------------------------------------------------------------------------------------


def find_digits() -> Source:
    """Returns scikit-learn's 1,797 gray 8x8 digits, which come inside that package."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise RecipeError("--dataset 'digits' comes with scikit-learn: pip install scikit-learn") from error
    digits = load_digits()
    # Grey levels run from 0 to 16.
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[..., None]
    names = [str(name) for name in digits.target_names]
    return Source(Split(ArrayImages(images), digits.target.astype(np.int64)), None, names)


# --------------------------------------------------------------------------------------------------------------------
# Folders of images
# --------------------------------------------------------------------------------------------------------------------


def image_files(folder: Path) -> Iterator[Path]:
    """Finds the image files in and below a folder, in no particular order."""
    extensions = set(get_img_extensions())
    return (path for path in folder.rglob("*") if path.suffix.lower() in extensions and path.is_file())


def class_folders(folder: Path) -> list[Path]:
    """Lists the sub-folders that hold images, sorted by name."""
    folders = (child for child in folder.iterdir() if child.is_dir() and not child.name.startswith("."))
    return sorted(child for child in folders if any(image_files(child)))


def read_class_folders(folder: Path, names: Sequence[str], dataset: str) -> Split:
    """Reads folder/<class>/<image>."""
    paths: list[Path] = []
    labels: list[int] = []
    for child in class_folders(folder):
        if child.name not in names:
            raise RecipeError(f"--dataset {dataset!r}: {str(child)!r} is no class of the training set")
        files = sorted(image_files(child))
        paths += files
        labels += [names.index(child.name)] * len(files)
    return Split(FileImages(paths), np.asarray(labels, dtype=np.int64))


def find_image_folder(root: Path, train_split: str | None, test_split: str | None, dataset: str) -> Source | None:
    """Finds train/ and test/ folders of class folders, or class folders alone.

    Returns:
        The source, or None if the folder is laid out in another way.
    """
    if any(root.glob("metadata.*")):
        return None  # the Hub's layout: the labels stand in that file
    children = {child.name: child for child in class_folders(root)}
    if not children:
        return None
    usual = (*TRAIN_SPLITS, *TEST_SPLITS)
    if train_split is None and test_split is None and not any(name in usual for name in children):
        train, test = root, None
    else:
        train_name = pick_split(list(children), train_split, TRAIN_SPLITS, "--train-split", dataset)
        others = [name for name in children if name != train_name]
        test_name = pick_split(others, test_split, TEST_SPLITS, "--test-split", dataset, required=False)
        train, test = children[train_name], test_name and children[test_name]
    names = [child.name for child in class_folders(train)]
    if not names:
        return None  # images without class folders: the Hub's layout again
    return Source(
        read_class_folders(train, names, dataset),
        read_class_folders(test, names, dataset) if test else None,
        names,
    )


def pick_split(
    splits: Sequence[str],
    wanted: str | None,
    usual: Sequence[str],
    option: str,
    dataset: str,
    required: bool = True,
) -> str | None:
    """Returns the split an option names, or the first of the usual names there is."""
    if wanted is not None:
        if wanted not in splits:
            raise RecipeError(f"{option} {wanted!r}: {dataset!r} has no such split; it has {listed(splits)}")
        return wanted
    found = next((name for name in usual if name in splits), None)
    if found is None and required:
        raise RecipeError(
            f"{option}: {dataset!r} has no split called {' or '.join(usual)}; name the one to use of {listed(splits)}"
        )
    return found


# --------------------------------------------------------------------------------------------------------------------
# The Hub, and folders in its layout
# --------------------------------------------------------------------------------------------------------------------


def hub_answers() -> bool:
    """Asks the Hub once, briefly. Any answer counts, an HTTP error too."""
    import huggingface_hub

    request = urllib.request.Request(huggingface_hub.constants.ENDPOINT, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=HUB_TIMEOUT).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def open_hub_dataset(name: str, config: str | None, streaming: bool = False) -> dict[str, Any]:
    """Opens a data set with `datasets`: from the Hub, its cache or a local folder; as streams, if asked for.

    Returns:
        The splits by name.
    """
    try:
        import datasets
    except ImportError as error:
        raise RecipeError(f"--dataset {name!r} needs the datasets package: pip install datasets") from error
    import huggingface_hub

    local = Path(name).exists()
    if not local and not huggingface_hub.constants.HF_HUB_OFFLINE and not hub_answers():
        # Without this, every file that is looked for is retried for many seconds. The cache is still used.
        huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    huggingface_hub.logging.set_verbosity_error()
    try:
        splits = datasets.load_dataset(name, config, streaming=streaming)
    except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError) as error:
        hint = "" if local else "; name 'digits', a Hub data set that can be reached or an existing folder"
        raise RecipeError(f"--dataset {name!r} cannot be loaded ({one_line(error)}){hint}") from error
    return splits


def find_hub_dataset(
    name: str,
    config: str | None,
    train_split: str | None,
    test_split: str | None,
    image_key: str | None,
    label_key: str | None,
) -> Source:
    """Finds a data set with `datasets`: on the Hub, in its cache or in a local folder."""
    splits = open_hub_dataset(name, config)
    import datasets

    train_name = pick_split(list(splits), train_split, TRAIN_SPLITS, "--train-split", name)
    others = [split for split in splits if split != train_name]
    test_name = pick_split(others, test_split, TEST_SPLITS, "--test-split", name, required=False)
    train = splits[train_name]
    image_key = find_image_key(train, image_key, name)
    label_key = find_label_key(train, label_key, image_key, name)
    label_names = find_label_names(train, label_key, name)

    def read(split_name: str) -> Split:
        split = splits[split_name]
        for option, key in (("--image-key", image_key), ("--label-key", label_key)):
            if key not in split.column_names:
                raise RecipeError(f"{option} {key!r}: split {split_name!r} of {name!r} has no such column")
        column = split.select_columns([image_key]).cast_column(image_key, datasets.Image(decode=False))
        labels = read_labels(split, label_key, label_names, split_name, name)
        return Split(HubImages(column, image_key, split_name), labels)

    return Source(read(train_name), read(test_name) if test_name else None, label_names)


def find_image_key(split: Any, wanted: str | None, name: str) -> str:
    """Returns the image column: the one that is asked for, or the only one there is."""
    import datasets
    import pyarrow

    keys = [key for key, feature in split.features.items() if isinstance(feature, datasets.Image)]
    if wanted is None:
        if len(keys) == 1:
            return keys[0]
        there = listed(keys or split.column_names)
        raise RecipeError(f"--image-key: {name!r} has {len(keys)} columns of images; name the one to use of {there}")
    if wanted not in split.column_names:
        raise RecipeError(f"--image-key {wanted!r}: {name!r} has no such column; it has {listed(split.column_names)}")
    # A parquet file written without `datasets` holds images too: as bytes, or as the {bytes, path} the Hub uses.
    stored = split.features.arrow_schema.field(wanted).type
    is_image = (
        pyarrow.types.is_binary(stored)
        or pyarrow.types.is_large_binary(stored)
        or (pyarrow.types.is_struct(stored) and {"bytes", "path"} <= {part.name for part in stored})
    )
    if wanted not in keys and not is_image:
        raise RecipeError(
            f"--image-key {wanted!r}: that column of {name!r} holds no images; columns of images: {listed(keys)}"
        )
    return wanted


def find_label_key(split: Any, wanted: str | None, image_key: str, name: str) -> str:
    """Returns the label column: the one that is asked for, the only ClassLabel, or WebDataset's `cls`."""
    import datasets

    columns = [key for key in split.column_names if key != image_key]
    if wanted is not None:
        if wanted not in columns:
            raise RecipeError(f"--label-key {wanted!r}: {name!r} has no such column; it has {listed(columns)}")
        return wanted
    keys = [key for key in columns if isinstance(split.features[key], datasets.ClassLabel)]
    keys = keys or [key for key in columns if key == "cls"]  # what WebDataset shards call it
    if len(keys) == 1:
        return keys[0]
    there = listed(keys or columns)
    raise RecipeError(f"--label-key: {name!r} has {len(keys)} columns of class labels; name the one to use of {there}")


def find_label_names(split: Any, label_key: str, name: str) -> list[str]:
    """Returns the classes' names: a ClassLabel's own, or else the different values of whole numbers or strings."""
    import datasets

    feature = split.features[label_key]
    if isinstance(feature, datasets.ClassLabel):
        return list(feature.names)
    if getattr(feature, "dtype", None) == "string":
        return sorted({str(value) for value in split[label_key]})
    if re.fullmatch(r"u?int\d+", str(getattr(feature, "dtype", None))):
        return [str(value) for value in range(max(split[label_key], default=-1) + 1)]
    raise RecipeError(f"--label-key {label_key!r}: that column of {name!r} holds neither class numbers nor class names")


def read_labels(split: Any, label_key: str, label_names: Sequence[str], split_name: str, name: str) -> np.ndarray:
    """Reads a split's labels as class numbers."""
    values = split[label_key][:]
    if values and isinstance(values[0], str):
        number = {label: index for index, label in enumerate(label_names)}
        values = [number.get(value, -1) for value in values]
    labels = np.asarray([-1 if value is None else value for value in values], dtype=np.int64)
    wrong = np.flatnonzero((labels < 0) | (labels >= len(label_names)))
    if len(wrong):
        raise RecipeError(
            f"--label-key {label_key!r}: row {wrong[0]} of split {split_name!r} of {name!r} has no class of the "
            f"training set ({len(wrong)} such rows); name a labelled split"
        )
    return labels


def find_source(args: Any) -> Source:
    """Finds the data set that `--dataset` names. Local paths go before Hub names."""
    name = args.dataset
    if name == "digits":
        return find_digits()
    path = Path(name)
    if path.is_dir():
        found = find_image_folder(path, args.train_split, args.test_split, name)
        if found is not None:
            return found
        if not any(child.is_file() for child in path.rglob("*")):
            raise RecipeError(
                f"--dataset {name!r}: the folder holds no images; expected train/ and test/ folders of class folders, "
                "class folders, or data files in the Hub's layout"
            )
    check_dataset_name(name)
    return find_hub_dataset(
        name, args.dataset_config, args.train_split, args.test_split, args.image_key, args.label_key
    )


def check_dataset_name(name: str) -> None:
    """Raises a RecipeError for what is neither a folder nor like the name of a data set on the Hub."""
    path = Path(name)
    if path.is_file():
        raise RecipeError(f"--dataset {name!r} is a file; name the folder it lies in")
    if not path.is_dir() and not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
        raise RecipeError(f"--dataset {name!r}: no such folder; name 'digits', a Hub data set or an existing folder")


# --------------------------------------------------------------------------------------------------------------------
# Small images: one array, batched augmentation
# --------------------------------------------------------------------------------------------------------------------


def decode_small(source: Source, img_size: int | None, dataset: str, limit: int = 0) -> list[np.ndarray] | None:
    """Decodes the images of all splits into uint8 arrays, N x H x W x C, if they are small squares of one size.

    Args:
        source: The images. The positions of those that cannot be decoded are noted in its splits.
        img_size: The side that the model is to see; None for the images' own.
        dataset: The data set's name, for messages.
        limit: How many images may be unreadable in all splits together.

    Returns:
        One array for each split there is, or None if the images are large, many, of several sizes or of another size
        than the model is to see.
    """
    splits = [split for split in (source.train, source.test) if split is not None]
    errors: list[ImageDecodeError] = []

    def decode(split: Split, index: int) -> Image.Image | None:
        try:
            return load_image(split.images, index, dataset)
        except ImageDecodeError as error:
            errors.append(error)
            if len(errors) > limit:
                raise too_many(len(errors), limit, error) from error
            return None

    first = next((image for index in range(len(splits[0].images)) if (image := decode(splits[0], index))), None)
    if first is None:
        return None
    width, height = first.size
    if width != height or width > MAX_ARRAY_SIDE or img_size not in (None, width):
        return None
    if sum(len(split.images) for split in splits) * height * width * 3 > MAX_ARRAY_BYTES:
        return None
    arrays, unreadable = [], []
    all_gray = True
    errors.clear()
    for split in splits:
        array = np.zeros((len(split.images), height, width, 3), dtype=np.uint8)
        unreadable.append(set())
        for index in range(len(split.images)):
            image = decode(split, index)
            if image is None:
                unreadable[-1].add(index)
                continue
            if image.size != (width, height):
                return None
            all_gray &= image.mode == "L"
            pixels = np.asarray(image)
            array[index] = pixels if pixels.ndim == 3 else pixels[..., None]
        arrays.append(array)
    # Only now: had any image another size, all would be decoded again, when they are needed.
    for split, positions in zip(splits, unreadable, strict=True):
        split.unreadable = positions
    if os.environ.get("RANK", "0") == "0":  # every process decodes the same images
        for error in errors:
            warn(f"skipped: {error}")
        if errors:
            warn(f"{len(errors)} image{'s' * (len(errors) > 1)} could not be decoded and left out of the data set")
    return [array[..., :1].copy() for array in arrays] if all_gray else arrays


def channel_statistics(images: np.ndarray) -> tuple[list[float], list[float]]:
    """Returns the mean and standard deviation of each channel of N x H x W x C bytes, on the scale from 0 to 1.

    They come from exact counts of the 256 values, which needs no floating-point copy of the images.
    """
    values = np.arange(256) / 255
    means, stds = [], []
    for channel in range(images.shape[-1]):
        share = np.bincount(images[..., channel].ravel(), minlength=256) / images[..., channel].size
        mean = float(share @ values)
        variance = float(share @ (values - mean) ** 2)
        means.append(round(mean, 6))
        stds.append(round(max(variance**0.5, 1 / 255), 6))  # never zero, not even for images of one colour
    return means, stds


def crop_and_flip(images: torch.Tensor, top: torch.Tensor, left: torch.Tensor, flip: torch.Tensor) -> torch.Tensor:
    """Crops every image out of its own black frame, `CROP_PADDING` pixels wide, and mirrors some.

    Args:
        images: N x H x W x C.
        top: The crops' first rows in the framed images, 0 to twice the padding.
        left: The crops' first columns likewise.
        flip: Whether to mirror each crop left to right.

    Returns:
        A tensor of the same shape.
    """
    count, height, width, _ = images.shape
    padding = (0, 0, CROP_PADDING, CROP_PADDING, CROP_PADDING, CROP_PADDING)
    framed = torch.nn.functional.pad(images, padding)
    rows = top[:, None] + torch.arange(height)
    columns = torch.arange(width).expand(count, width)
    columns = left[:, None] + torch.where(flip[:, None], width - 1 - columns, columns)
    return framed[torch.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]


class ArrayDataset(Dataset):
    """Images held as bytes, augmented and normalised a batch at a time.

    `__getitems__` is what a DataLoader calls with all indices of a batch where there is one; it returns the finished
    batch, so the loader needs `collate_fn=as_it_is`.
    """

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        mean: Sequence[float],
        std: Sequence[float],
        augment: str = "none",
        seed: int = 0,
    ):
        self.images = torch.from_numpy(images)
        self.labels = torch.from_numpy(labels)
        self.mean = torch.tensor(mean) * 255
        self.std = torch.tensor(std) * 255
        self.augment = augment
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch whose augmentation is drawn. accelerate's loaders call it."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        where = torch.as_tensor(indices)
        images = self.images[where]
        if self.augment != "none":
            bits = sample_bits(self.seed, self.epoch, indices)
            offsets = np.uint64(2 * CROP_PADDING + 1)
            # Disjoint ranges of bits; the remainder's bias over 31 bits is far below anything that matters.
            top, left, coin = (bits >> np.uint64(33)) % offsets, (bits & np.uint64(0x7FFFFFFF)) % offsets, bits >> 31
            flip = (coin & np.uint64(1)).astype(bool) & (self.augment == "crop-flip")
            images = crop_and_flip(
                images,
                torch.from_numpy(top.astype(np.int64)),
                torch.from_numpy(left.astype(np.int64)),
                torch.from_numpy(flip),
            )
        images = (images.float() - self.mean) / self.std
        return images.permute(0, 3, 1, 2).contiguous(), self.labels[where]


def as_it_is(batch: Any) -> Any:
    """Collates nothing: `ArrayDataset` hands over whole batches."""
    return batch


# --------------------------------------------------------------------------------------------------------------------
# All other images: timm's transforms, one image at a time
# --------------------------------------------------------------------------------------------------------------------


class TransformDataset(Dataset):
    """Images that are decoded when they are needed and go through a timm transform.

    Args:
        images: The images.
        labels: Their classes.
        positions: Which of the images are in this set.
        transform: From a PIL image to a tensor.
        dataset: The data set's name, for messages.
        seed: The run's seed.
        max_errors: How many images of an epoch may be unreadable.
        replace: Whether another image of the set takes the place of an unreadable one, as training wants it. If not,
            the image is black and its label `UNREADABLE`.
        mode: Pillow's mode that the transform gets: `RGB` or `L`.
    """

    def __init__(
        self,
        images: ArrayImages | FileImages | HubImages,
        labels: np.ndarray,
        positions: np.ndarray,
        transform: Any,
        dataset: str,
        seed: int = 0,
        max_errors: int = 0,
        replace: bool = True,
        mode: str = "RGB",
    ):
        self.images = images
        self.labels = labels
        self.positions = positions
        self.transform = transform
        self.dataset = dataset
        self.seed = seed
        self.errors = DecodeErrors(max_errors, len(positions))
        self.replace = replace
        self.mode = mode
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch whose augmentation is drawn. accelerate's loaders call it before they start workers."""
        self.epoch = epoch
        self.errors.reset()

    def __len__(self) -> int:
        return len(self.positions)

    def load(self, index: int) -> Image.Image:
        """Decodes one image of this set."""
        return load_image(self.images, int(self.positions[index]), self.dataset).convert(self.mode)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        used, readable = index, True
        try:
            image = self.load(index)
        except ImageDecodeError as error:
            self.errors.add(error, index)  # raises it if it is one too many
            if self.replace:
                used, image = self.next_readable(index)
            else:
                image, readable = Image.new(self.mode, (BLACK_SIDE, BLACK_SIDE)), False
        with global_rngs_seeded(int(sample_bits(self.seed, self.epoch, [index])[0])):
            pixels = self.transform(image)
        return pixels, int(self.labels[self.positions[used]]) if readable else UNREADABLE

    def next_readable(self, index: int) -> tuple[int, Image.Image]:
        """Finds the next image that can be decoded. Those on the way are counted when it is their own turn."""
        for step in range(1, len(self)):
            other = (index + step) % len(self)
            with contextlib.suppress(ImageDecodeError):
                return other, self.load(other)
        raise ImageDecodeError(f"--dataset {self.dataset!r}: none of {len(self)} images can be decoded")


# --------------------------------------------------------------------------------------------------------------------
# All together
# --------------------------------------------------------------------------------------------------------------------


@dataclass
class Data:
    """What a training run needs to know of its data.

    Attributes:
        train: The training images.
        val: The validation images, or None without `--val-fraction`.
        test: The test images.
        label_names: The classes' names, in the order of their numbers.
        config: timm's description of the input: input_size, mean, std, interpolation, crop_pct, crop_mode.
        in_memory: Whether the images are held as one array.
        augment: What is done to training images: none, crop or crop-flip.
    """

    train: Dataset
    val: Dataset | None
    test: Dataset
    label_names: list[str]
    config: dict[str, Any]
    in_memory: bool
    augment: str
    collate_fn: Any = field(default=None, repr=False)


def load_data(args: Any, pretrained_cfg: dict[str, Any], source: Source | None = None) -> Data:
    """Makes the data sets of a run.

    Which image is used for what follows from `--split-seed` alone, so that runs with different `--seed` are trained
    and tested on the same images.

    Args:
        args: The recipe's arguments.
        pretrained_cfg: timm's description of the model, for the input of images that are not held in memory.
        source: What `find_source` returns for these arguments, if it was called before. What is decoded here stays with
            it, so that the next run on it need not do it again.

    Returns:
        The data sets and what is known about them.
    """
    name, limit = args.dataset, args.max_decode_errors
    if args.streaming:
        from streaming import load_stream_data  # which imports this module

        return load_stream_data(args, pretrained_cfg)
    source = source or find_source(args)
    if len(source.label_names) < 2:
        raise RecipeError(f"--dataset {name!r} has {len(source.label_names)} class(es); at least 2 are needed")
    for split in (source.train, source.test):
        if split is not None and not len(split.images):
            raise RecipeError(f"--dataset {name!r}: the {'training' if split is source.train else 'test'} set is empty")
    train_positions, val_positions, test_positions = choose_positions(args, source)

    augment = choose_augmentation(args)
    arrays = None
    if not timm_augmentation(args):
        if args.img_size not in source.arrays:
            source.arrays[args.img_size] = decode_small(source, args.img_size, name, limit)
        arrays = source.arrays[args.img_size]
    if arrays is not None:
        train_array, test_array = arrays[0], arrays[-1]
        train_positions, val_positions = source.train.readable(train_positions), source.train.readable(val_positions)
        test_positions = (source.test or source.train).readable(test_positions)
        mean, std = channel_statistics(train_array[train_positions])
        _, height, width, channels = train_array.shape
        config = resolve_data_config(
            dict(input_size=(channels, height, width), mean=mean, std=std, crop_pct=1.0, crop_mode="center"),
            pretrained_cfg=pretrained_cfg,
        )

        def part(array: np.ndarray, split: Split, positions: np.ndarray, augment: str = "none") -> ArrayDataset:
            return ArrayDataset(array[positions], split.labels[positions], mean, std, augment, args.seed)

        train = part(train_array, source.train, train_positions, augment)
        val = part(train_array, source.train, val_positions)
        test = part(test_array, source.test or source.train, test_positions)
    else:
        config, train_transform, eval_transform, augment = build_transforms(args, pretrained_cfg)

        def part(split: Split, positions: np.ndarray, transform: Any, replace: bool = False) -> TransformDataset:
            return TransformDataset(split.images, split.labels, positions, transform, name, args.seed, limit, replace)

        train = part(source.train, train_positions, train_transform, replace=True)
        val = part(source.train, val_positions, eval_transform)
        test = part(source.test or source.train, test_positions, eval_transform)
    return Data(
        train=train,
        val=val if len(val) else None,
        test=test,
        label_names=source.label_names,
        config=config,
        in_memory=isinstance(train, ArrayDataset),
        augment=augment,
        collate_fn=as_it_is if isinstance(train, ArrayDataset) else None,
    )


def choose_augmentation(args: Any) -> str:
    """Returns what `--augment` stands for."""
    if args.augment == "auto":
        return "none" if args.dataset == "digits" else "crop-flip"  # a mirrored digit is another digit, or none
    return args.augment


def timm_augmentation(args: Any) -> dict[str, Any]:
    """Returns the options of `create_transform` that were given, by its names for them."""
    names = dict(
        aa="auto_augment",
        scale="scale",
        ratio="ratio",
        hflip="hflip",
        vflip="vflip",
        color_jitter="color_jitter",
        reprob="re_prob",
        train_interpolation="interpolation",
    )
    given = {theirs: getattr(args, ours, None) for ours, theirs in names.items()}
    return {name: value for name, value in given.items() if value is not None}


def build_transforms(args: Any, pretrained_cfg: dict[str, Any]) -> tuple[dict[str, Any], Any, Any, str]:
    """Makes timm's transforms for images that are not held in memory.

    Returns:
        timm's description of the input, the transforms for training and for evaluation, and the augmentation.
    """
    augment = choose_augmentation(args)
    size = (args.img_size,) * 2 if args.img_size else tuple(pretrained_cfg.get("input_size", (3, 224, 224))[1:])
    mean_std = {key: pretrained_cfg[key] for key in ("mean", "std") if len(pretrained_cfg.get(key) or ()) == 3}
    config = resolve_data_config(
        dict(input_size=(3, *size), **mean_std),
        pretrained_cfg={key: value for key, value in pretrained_cfg.items() if key not in ("mean", "std")},
    )
    given = timm_augmentation(args)
    settings = dict(config, hflip=0.5 if augment == "crop-flip" else 0.0, re_mode="pixel") | given
    try:
        train_transform = create_transform(**settings, is_training=True, no_aug=augment == "none" and not given)
    except (AssertionError, ValueError, KeyError, IndexError) as error:  # of a policy's name or settings
        why = one_line(error)
        raise RecipeError(f"--aa {args.aa!r}: timm does not take it ({why}); try rand-m9-mstd0.5") from error
    return config, train_transform, create_transform(**config), augment


def choose_positions(args: Any, source: Source) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the positions of the training, validation and test images in their splits."""
    train = np.arange(len(source.train.labels))
    val = train[:0]
    if source.test is not None:
        test = np.arange(len(source.test.labels))
    else:
        train, test = stratified_split(source.train.labels, args.test_fraction, args.split_seed)
        check_parts("--test-fraction", args.test_fraction, train, test)
    if args.val_fraction:
        first, second = stratified_split(source.train.labels[train], args.val_fraction, args.split_seed + 1)
        train, val = train[first], train[second]
        check_parts("--val-fraction", args.val_fraction, train, val)
    if args.train_limit is not None:
        if args.train_limit > len(train):
            raise RecipeError(f"--train-limit {args.train_limit}: there are only {len(train)} training images")
        train = np.random.default_rng(args.split_seed).permutation(train)[: args.train_limit]
    return train, val, test


def check_parts(option: str, fraction: float, first: np.ndarray, second: np.ndarray) -> None:
    """Raises a RecipeError if a split left one of its parts empty."""
    if not len(first) or not len(second):
        raise RecipeError(
            f"{option} {fraction}: splits the images into {len(first)} and {len(second)}; both parts need at least one"
        )


def cpu_workers() -> int:
    """Returns a sensible number of loader workers for decoding: the processors of each process, at most 8."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return max(1, min(8, (os.cpu_count() or 1) // processes))
