"""recipes/streaming.py: what each process and worker gets, that it is repeatable, and what is refused."""

import argparse
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("datasets")

import data as recipe_data  # noqa: E402
import streaming  # noqa: E402
from accelerate import Accelerator, skip_first_batches  # noqa: E402
from pictures import png, write_classes, write_shards, write_tar  # noqa: E402

pytestmark = pytest.mark.usefixtures("clean_process")


def arguments(dataset: Path, **changes: object) -> argparse.Namespace:
    """What load_data reads of a recipe's arguments."""
    values = dict(dataset=str(dataset), dataset_config=None, train_split=None, test_split=None, image_key=None)
    values |= dict(label_key=None, val_fraction=0.0, train_limit=None, img_size=16, augment="none", seed=3)
    values |= dict(streaming=True, shuffle_buffer=4, train_images=None, num_classes=2, class_map=None)
    return argparse.Namespace(**values | dict(max_decode_errors=0) | changes)


def load(dataset: Path, **changes: object) -> recipe_data.Data:
    return recipe_data.load_data(arguments(dataset, **changes), {})


def keys(dataset: streaming.StreamDataset) -> list[str]:
    """The keys of the rows that one process without workers reads in an epoch's first round."""
    return [row["__key__"] for row in dataset.rows(0)]


def same(one: list, two: list) -> bool:
    """Compares batches bit by bit."""
    return len(one) == len(two) and all(
        torch.equal(a, b) for x, y in zip(one, two, strict=True) for a, b in zip(x, y, strict=True)
    )


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Six training shards of 8 images each and two test shards of 3 and 2."""
    write_shards(tmp_path / "set", (8,) * 6)
    write_shards(tmp_path / "set", (3, 2), "test")
    return tmp_path / "set"


def test_webdataset_shards_give_classes_images_and_counts(shards: Path):
    data = load(shards)
    assert data.label_names == ["0", "1"]
    assert len(data.train) == 48
    assert data.val is None
    batch = [(tuple(image.shape), label) for image, label in data.test]
    assert [label for _, label in batch] == [0, 1, 0, 0, 1]  # in order, each once
    assert {shape for shape, _ in batch} == {(3, 16, 16)}
    # Class 0 is dark: the right image came with each label.
    brightness = {label: image.mean().item() for image, label in data.test}
    assert brightness[0] < 0 < brightness[1]


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_processes_share_the_images_without_overlap(shards: Path, processes: int):
    """4 processes do not divide 6 shards: then each reads everything and keeps every fourth image."""
    data = load(shards)
    parts = [data.train.part(rank, processes, 4) for rank in range(processes)]
    read = [keys(part) for part in parts]
    assert sorted(sum(read, [])) == sorted(f"train-{shard}-{index}" for shard in range(6) for index in range(8))
    assert all(part.shards() == (6 // processes if 6 % processes == 0 else 6) for part in parts)
    assert {len(part) for part in parts} == {48 // (4 * processes) * 4}  # all the same, in whole batches


def test_order_follows_from_seed_and_epoch(shards: Path):
    one, two = load(shards).train, load(shards).train
    assert keys(one) == keys(two)
    assert keys(one) != sorted(keys(one))
    two.set_epoch(1)
    assert keys(one) != keys(two)
    one.set_epoch(1)
    assert keys(one) == keys(two)
    assert keys(load(shards, seed=4).train) != keys(load(shards).train)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_is_repeatable_and_can_be_entered_in_the_middle(shards: Path, workers: int):
    Accelerator(cpu=True)

    def loader():
        loader = streaming.train_loader(load(shards, augment="crop-flip").train, 5, workers)
        loader.set_epoch(2)
        return loader

    batches = list(loader())
    assert len(batches) == len(loader()) == 9  # 48 // 5
    assert {len(labels) for _, labels in batches} == {5}
    assert same(batches, list(loader()))
    resumed = skip_first_batches(loader(), 4)
    assert same(batches[4:], list(resumed))
    other = loader()
    other.set_epoch(3)
    assert not same(batches, list(other))


def test_workers_see_each_image_once(shards: Path):
    Accelerator(cpu=True)
    data = load(shards)
    images = torch.cat([images for images, _ in streaming.train_loader(data.train, 4, 3)])
    assert len(images) == 48
    assert len(images.flatten(1).unique(dim=0)) == 48
    # More workers than shards would stand idle, and the epoch would be short.
    assert streaming.train_loader(data.train, 4, 10).num_workers == 6


def test_accelerate_leaves_the_loader_alone(shards: Path):
    accelerator = Accelerator(cpu=True)
    loader = streaming.train_loader(load(shards).train, 4, 0)
    assert accelerator.prepare(loader) is loader


def test_uneven_shards_are_begun_again_until_the_epoch_is_full(tmp_path: Path):
    """Two processes of one shard each: 2 images and 14. Both have to make the same number of updates."""
    write_shards(tmp_path / "set", (2, 14))
    write_shards(tmp_path / "set", (2,), "test")
    train = load(tmp_path / "set").train
    for rank in (0, 1):
        part = train.part(rank, 2, 4)
        assert len(list(part)) == len(part) == 8


def test_fewer_images_than_processes_are_an_error(tmp_path: Path):
    write_shards(tmp_path / "set", (2,))
    write_shards(tmp_path / "set", (2,), "test")
    train = load(tmp_path / "set").train
    with pytest.raises(recipe_data.RecipeError, match="no image for process 2 of 3"):
        list(train.part(2, 3, 4))


@pytest.mark.parametrize("workers", [0, 2])
def test_decode_errors_are_counted_across_workers_and_skipped(tmp_path: Path, workers: int, capfd):
    accelerator = Accelerator(cpu=True)
    broken = ("train-0-1", "train-1-0", "train-1-5")
    write_shards(tmp_path / "set", (8, 8), broken=broken)
    write_shards(tmp_path / "set", (4,), "test", broken=("test-0-2",))
    data = load(tmp_path / "set", max_decode_errors=3)
    # 13 of 16 images can be read: the epoch's last three come from a second round, which may meet broken ones again.
    data.train.length = 13 if workers == 0 else 12
    loader = streaming.train_loader(data.train, 1 if workers == 0 else 3, workers)
    for epoch in (0, 1):
        loader.set_epoch(epoch)
        assert sum(len(labels) for _, labels in loader) == data.train.length
        count = recipe_data.check_skipped(accelerator, data.train, "training")
        assert 2 <= count <= 3  # the last image of the epoch may lie before the last broken one
        err = capfd.readouterr().err
        assert err.count("skipped: ") == count
        assert f"warning: {count} training images could not be decoded" in err
    # Evaluation marks the image instead, so that the number of images stays.
    assert [label for _, label in data.test] == [0, 1, recipe_data.UNREADABLE, 1]
    assert recipe_data.check_skipped(accelerator, data.test, "test") == 1


def test_one_decode_error_too_many_stops_and_names_the_image(tmp_path: Path):
    write_shards(tmp_path / "set", (8,), broken=("train-0-1", "train-0-6"))
    write_shards(tmp_path / "set", (2,), "test")
    with pytest.raises(recipe_data.ImageDecodeError, match=r"train-0-.* cannot be decoded .*--max-decode-errors"):
        list(load(tmp_path / "set").train)
    with pytest.raises(recipe_data.ImageDecodeError, match="--max-decode-errors 1: 2 images are unreadable"):
        list(load(tmp_path / "set", max_decode_errors=1).train)


def test_image_folders_stream_with_their_class_names(tmp_path: Path):
    write_classes(tmp_path / "set" / "train", 4)
    write_classes(tmp_path / "set" / "test", 2)
    data = load(tmp_path / "set", num_classes=None)
    assert data.label_names == ["dark", "light"]
    assert len(data.train) == 8
    for image, label in data.test:
        assert (image.mean() > 0) == bool(label)


def test_class_names_come_from_a_file(shards: Path, tmp_path: Path):
    (tmp_path / "names.txt").write_text("tench\ngoldfish\n")
    assert load(shards, class_map=tmp_path / "names.txt").label_names == ["tench", "goldfish"]


def test_images_are_counted_once_or_told(shards: Path, capfd):
    assert len(load(shards, train_images=40).train) == 40
    assert "counting" not in capfd.readouterr().err
    load(shards)
    assert "counting the images of split 'train'; --train-images N saves that" in capfd.readouterr().err


def test_what_a_stream_cannot_do_is_refused(shards: Path, tmp_path: Path):
    for words, changes in {
        "--val-fraction 0.1: a stream cannot be split": dict(val_fraction=0.1),
        "--train-limit 5": dict(train_limit=5),
        "'digits' is in memory": dict(dataset="digits"),
        "does not tell the classes.*--num-classes": dict(num_classes=None),
        "no-such.txt' cannot be read": dict(class_map="no-such.txt"),
        "--train-split 'tr': .* it has": dict(train_split="tr"),
        "--image-key 'png2'": dict(image_key="png2"),
        "no such folder": dict(dataset="./nowhere"),
    }.items():
        with pytest.raises(recipe_data.RecipeError, match=words):
            load(changes.pop("dataset", shards), **changes)
    write_shards(tmp_path / "train_only", (4,))
    with pytest.raises(recipe_data.RecipeError, match="--test-split"):
        load(tmp_path / "train_only")


def test_a_label_beyond_the_classes_names_the_row(tmp_path: Path):
    write_tar(tmp_path / "set" / "train-0.tar", [("a", 0, png(0, 0)), ("b", 5, png(0, 1))])
    write_shards(tmp_path / "set", (2,), "test")
    with pytest.raises(recipe_data.RecipeError, match="image 'b' of .*train-0.tar.* has the label 5"):
        list(load(tmp_path / "set", num_classes=3).train)


def test_a_truncated_shard_stops_the_run(shards: Path):
    path = shards / "train-0003.tar"
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(recipe_data.RecipeError, match="cannot be read"):
        list(load(shards).train)
    with pytest.raises(recipe_data.RecipeError, match="'train' cannot be read on"):
        list(load(shards, train_images=48).train)
