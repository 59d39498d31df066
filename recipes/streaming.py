"""Data sets read as streams: shards of tar, parquet or other files that `datasets` reads one after the other.

Nothing is downloaded or indexed first, and no more than a buffer of images is held. What holds:

* Each process and each of its loader workers reads shards of its own, if the number of shards is a multiple of the
  number of processes. If not, every process reads all shards and keeps each n-th image, which is correct and slow.
* An epoch is a fixed number of whole batches, the same in all processes: the number of images / (batch size x
  processes). A worker whose shards end earlier begins them again in another order.
* The images, their order and their augmentation are a function of the seed, the epoch, the numbers of processes and
  workers, the size of the buffer and the files. A run that is resumed with the same of those gets the very same
  batches. It reads again what it skips, for shards cannot be entered in the middle.
* The order is random among shards and among `--shuffle-buffer` neighbours. A shard of one class makes batches of one
  class: mix the classes when you write the shards.
* Test images are read by the main process, which sends the others their share: every image is counted once.
"""

import copy
import os
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.data_loader import prepare_data_loader
from data import (
    BLACK_SIDE,
    DECODE_ERRORS,
    TEST_SPLITS,
    TRAIN_SPLITS,
    UNREADABLE,
    Data,
    DecodeErrors,
    ImageDecodeError,
    RecipeError,
    build_transforms,
    check_dataset_name,
    eight_bits,
    find_image_key,
    find_label_key,
    global_rngs_seeded,
    one_line,
    open_encoded,
    open_hub_dataset,
    pick_split,
    sample_bits,
    warn,
)
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

# What reading a stream may raise, besides what Pillow raises on an image.
READ_ERRORS = (OSError, ValueError, RuntimeError, EOFError, KeyError, tarfile.TarError)


class StreamDataset(IterableDataset):
    """A split of a data set that is read in order, decoded and put through a timm transform.

    Args:
        stream: A `datasets.IterableDataset` whose images are not decoded.
        image_key: Its column of images.
        label_key: Its column of labels.
        classes: The classes' names, or None if the labels are their numbers.
        num_classes: How many classes there are.
        transform: From a PIL image to a tensor.
        dataset: The data set's name, for messages.
        split: The split's name, for messages.
        length: How many images the split has; None if that is not known, which only evaluation allows.
        training: Training shuffles, repeats and leaves out unreadable images; evaluation has each image once and marks
            unreadable ones by the label `UNREADABLE`.
        seed: The run's seed.
        shuffle_buffer: How many images to choose the next one from.
        limit: How many unreadable images an epoch may have.
    """

    def __init__(
        self,
        stream: Any,
        image_key: str,
        label_key: str,
        classes: list[str] | None,
        num_classes: int,
        transform: Any,
        dataset: str,
        split: str,
        length: int | None,
        training: bool,
        seed: int = 0,
        shuffle_buffer: int = 1000,
        limit: int = 0,
    ):
        self.stream = stream
        self.image_key = image_key
        self.label_key = label_key
        self.numbers = classes and {name: number for number, name in enumerate(classes)}
        self.num_classes = num_classes
        self.transform = transform
        self.dataset = dataset
        self.split = split
        self.length = length
        self.training = training
        self.seed = seed
        self.shuffle_buffer = shuffle_buffer
        self.errors = DecodeErrors(limit)
        self.epoch = 0
        self.rank, self.processes, self.batch_size = 0, 1, 1

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch, as for `data.TransformDataset`."""
        self.epoch = epoch
        self.errors.reset()

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError(f"the number of images of split {self.split!r} is not known")
        return self.length

    def part(self, rank: int, processes: int, batch_size: int) -> "StreamDataset":
        """Returns one process's share of the training images: as many whole batches as every other process has."""
        part = copy.copy(self)
        part.rank, part.processes, part.batch_size = rank, processes, batch_size
        part.length = max(1, len(self) // (batch_size * processes)) * batch_size
        return part

    def shards(self) -> int:
        """The number of shards that this process reads."""
        return self.ordered(0).n_shards

    def ordered(self, round_: int) -> Any:
        """Returns this process's images in the order of an epoch's first, second ... round."""
        from datasets.distributed import split_dataset_by_node

        if not self.training:
            return self.stream
        seed = int(sample_bits(self.seed, self.epoch, [round_])[0]) % 2**32
        return split_dataset_by_node(
            self.stream.shuffle(seed=seed, buffer_size=self.shuffle_buffer), self.rank, self.processes
        )

    def rows(self, round_: int) -> Iterator[dict[str, Any]]:
        """Reads rows, with errors that name the data set."""
        rows = iter(self.ordered(round_))
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except READ_ERRORS as error:
                raise ImageDecodeError(
                    f"--dataset {self.dataset!r}: split {self.split!r} cannot be read on ({one_line(error)})"
                ) from error
            yield row

    def label(self, row: dict[str, Any]) -> int:
        """Returns a row's class number."""
        value = row[self.label_key]
        number = self.numbers.get(value, -1) if self.numbers else -1 if value is None else int(value)
        if not 0 <= number < self.num_classes:
            raise ImageDecodeError(
                f"--label-key {self.label_key!r}: {self.describe(row)} has the label {value!r}, which is none of the "
                f"{self.num_classes} classes; name a labelled split, or correct --num-classes or --class-map"
            )
        return number

    def describe(self, row: dict[str, Any]) -> str:
        """Names a row in a message."""
        item = row[self.image_key]
        name = row.get("__key__") or (item.get("path") if isinstance(item, dict) else None)
        where = f" of {row['__url__']}" if row.get("__url__") else ""
        return f"image {name!r}{where} of split {self.split!r}" if name else f"an image of split {self.split!r}"

    def decode(self, row: dict[str, Any]) -> Image.Image:
        """Decodes a row's image."""
        try:
            return eight_bits(open_encoded(row[self.image_key])).convert("RGB")
        except DECODE_ERRORS as error:
            why = "not an image" if isinstance(error, Image.UnidentifiedImageError) else one_line(error)
            raise ImageDecodeError(
                f"--dataset {self.dataset!r}: {self.describe(row)} cannot be decoded ({why}); replace or remove it"
            ) from error

    def decoded(self, round_: int) -> Iterator[tuple[Image.Image, int]]:
        """Decodes this worker's rows; unreadable ones are counted and left out or marked."""
        for row in self.rows(round_):
            label = self.label(row)
            try:
                yield self.decode(row), label
            except ImageDecodeError as error:
                self.errors.add(error)  # raises it if it is one too many
                if not self.training:
                    yield Image.new("RGB", (BLACK_SIDE, BLACK_SIDE)), UNREADABLE

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        if not self.training:
            if os.environ.get("RANK", "0") != "0":
                return  # accelerate reads in the main process, but begins to in all
            for image, label in self.decoded(0):
                yield self.transform(image), label
            return
        worker = get_worker_info()
        index, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        batches = len(self) // self.batch_size
        left = len(range(index, batches, workers)) * self.batch_size
        count, round_ = 0, 0
        # The loader takes a batch from each worker in turn: an image's place in the epoch follows from these two.
        own = (self.rank * workers + index) << 40
        while left:
            before = left
            for image, label in self.decoded(round_):
                with global_rngs_seeded(int(sample_bits(self.seed, self.epoch, [own + count])[0])):
                    pixels = self.transform(image)
                yield pixels, label
                count, left = count + 1, left - 1
                if not left:
                    return
            if left == before:
                raise ImageDecodeError(
                    f"--dataset {self.dataset!r}: split {self.split!r} has no image for process {self.rank} of "
                    f"{self.processes}; use fewer processes or more images"
                )
            round_ += 1


def train_loader(
    dataset: StreamDataset, batch_size: int, workers: int, worker_init_fn: Callable[[int], None] | None = None
) -> DataLoader:
    """Makes a loader of this process's share of a stream.

    It is one of accelerate's loaders already, and `Accelerator.prepare` leaves it as it is: accelerate's own way with
    iterable data sets is to read everything in the main process.

    Args:
        dataset: The whole training stream.
        batch_size: Images per process and batch.
        workers: Loader workers per process; no more than there are shards are used.
        worker_init_fn: As torch's DataLoader takes it.

    Returns:
        The loader; its length is the number of batches.
    """
    state = PartialState()
    part = dataset.part(state.process_index, state.num_processes, batch_size)
    workers = min(workers, part.shards())
    loader = DataLoader(part, batch_size, num_workers=workers, drop_last=True, worker_init_fn=worker_init_fn)
    loader = prepare_data_loader(
        loader, device=state.device, num_processes=1, process_index=0, put_on_device=True, dispatch_batches=False
    )
    loader._is_accelerate_prepared = True
    return loader


def load_stream_data(args: Any, pretrained_cfg: dict[str, Any]) -> Data:
    """Makes the data sets of a run with `--streaming`; the arguments are those of `data.load_data`.

    Raises:
        RecipeError: The data set cannot be read, or the arguments ask for what a stream cannot give.
    """
    name = args.dataset
    for option, value in (("--val-fraction", args.val_fraction), ("--train-limit", args.train_limit)):
        if value:
            raise RecipeError(f"{option} {value}: a stream cannot be split; leave it or --streaming out")
    if name == "digits":
        raise RecipeError("--streaming: 'digits' is in memory; leave --streaming out or name another --dataset")
    check_dataset_name(name)
    splits = open_hub_dataset(name, args.dataset_config, streaming=True)
    train_name = pick_split(list(splits), args.train_split, TRAIN_SPLITS, "--train-split", name)
    others = [split for split in splits if split != train_name]
    # A stream cannot be split at random, so there has to be a test split.
    test_name = pick_split(others, args.test_split, TEST_SPLITS, "--test-split", name)
    columns = stream_columns(args, splits[train_name])
    config, train_transform, eval_transform, augment = build_transforms(args, pretrained_cfg)
    return Data(
        train=make_stream(args, splits[train_name], train_name, columns, train_transform, training=True),
        val=None,
        test=make_stream(args, splits[test_name], test_name, columns, eval_transform, training=False),
        label_names=columns.names,
        config=config,
        in_memory=False,
        augment=augment,
    )


@dataclass
class Columns:
    """Where a stream's images and labels are.

    Attributes:
        image: The column of images.
        label: The column of labels.
        names: The classes' names.
        labels_are_names: Whether the labels are names and not numbers.
    """

    image: str
    label: str
    names: list[str]
    labels_are_names: bool


def stream_columns(args: Any, stream: Any) -> Columns:
    """Finds the columns of a split and the classes.

    Raises:
        RecipeError: They cannot be told, or are not there.
    """
    if stream.features is None:
        raise RecipeError(
            f"--streaming: the columns of {args.dataset!r} are not known before it is read; leave --streaming out"
        )
    image = find_image_key(stream, args.image_key, args.dataset)
    label = find_label_key(stream, args.label_key, image, args.dataset)
    feature = stream.features[label]
    return Columns(image, label, class_names(args, feature, label), getattr(feature, "dtype", None) == "string")


def make_stream(args: Any, stream: Any, split: str, columns: Columns, transform: Any, training: bool) -> StreamDataset:
    """Makes the data set of one split.

    Args:
        args: The recipe's arguments.
        stream: What `datasets` opened.
        split: Its name.
        columns: What `stream_columns` found in it, or in the training split.
        transform: From a PIL image to a tensor.
        training: Whether it is for training.

    Raises:
        RecipeError: The split lacks a column, or its images cannot be counted.
    """
    import datasets

    for option, key in (("--image-key", columns.image), ("--label-key", columns.label)):
        if key not in (stream.features or ()):
            raise RecipeError(f"{option} {key!r}: split {split!r} of {args.dataset!r} has no such column")
    keep = [key for key in (columns.image, columns.label, "__key__", "__url__") if key in stream.features]
    length = (args.train_images or count_images(stream, split, columns.label, args.dataset)) if training else None
    return StreamDataset(
        stream.select_columns(keep).cast_column(columns.image, datasets.Image(decode=False)),
        columns.image,
        columns.label,
        columns.names if columns.labels_are_names else None,
        len(columns.names),
        transform,
        args.dataset,
        split,
        length,
        training,
        seed=args.seed if training else 0,
        shuffle_buffer=args.shuffle_buffer if training else 1,
        limit=args.max_decode_errors,
    )


def class_names(args: Any, feature: Any, label_key: str) -> list[str]:
    """Returns the classes' names, which a stream tells only if its labels are of the type ClassLabel."""
    import datasets

    if args.class_map is not None:
        try:
            names = [line.strip() for line in Path(args.class_map).read_text().splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"--class-map {str(args.class_map)!r} cannot be read ({one_line(error)})") from error
    elif isinstance(feature, datasets.ClassLabel):
        names = list(feature.names)
    elif args.num_classes is not None and getattr(feature, "dtype", None) != "string":
        names = [str(number) for number in range(args.num_classes)]
    else:
        raise RecipeError(
            f"--label-key {label_key!r}: a stream does not tell the classes of that column; name a --class-map, a text "
            "file with one class a line, or, for labels that are numbers from 0, give --num-classes"
        )
    if len(set(names)) < 2 or len(set(names)) < len(names):
        raise RecipeError(f"--dataset {args.dataset!r} has {len(set(names))} different class(es) of {len(names)}")
    return names


def count_images(stream: Any, split: str, label_key: str, dataset: str) -> int:
    """Returns a split's number of images: what `datasets` knows, or else by reading it once."""
    known = (stream.info.splits or {}).get(split)
    if known is not None and known.num_examples:
        return known.num_examples
    if PartialState().is_main_process:
        warn(f"--dataset {dataset!r}: counting the images of split {split!r}; --train-images N saves that")
    try:
        count = sum(1 for _ in stream.select_columns([label_key]))
    except READ_ERRORS as error:
        raise RecipeError(f"--dataset {dataset!r}: split {split!r} cannot be read ({one_line(error)})") from error
    if not count:
        raise RecipeError(f"--dataset {dataset!r}: split {split!r} is empty")
    return count
