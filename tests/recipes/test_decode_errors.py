"""Images that cannot be decoded, in folders and Hub data sets: counted, reported, left out up to a limit."""

import argparse
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("datasets")

import data as recipe_data  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from pictures import write_classes  # noqa: E402
from PIL import Image  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

pytestmark = pytest.mark.usefixtures("clean_process")


def load(dataset: Path, limit: int, **changes: object) -> recipe_data.Data:
    values = dict(dataset=str(dataset), dataset_config=None, train_split=None, test_split=None, image_key=None)
    values |= dict(label_key=None, val_fraction=0.0, train_limit=None, img_size=16, augment="crop-flip", seed=3)
    values |= dict(test_fraction=0.5, split_seed=0, streaming=False, max_decode_errors=limit)
    return recipe_data.load_data(argparse.Namespace(**values | changes), {})


def write(folder: Path) -> Path:
    """Writes 12 training images, of which 3 are broken, and 8 test images, of which 1 is."""
    write_classes(folder / "train", 6, broken=("dark/1", "dark/2", "light/5"))
    write_classes(folder / "test", 4, broken=("light/0",))
    return folder


@pytest.mark.parametrize("workers", [0, 2])
def test_training_takes_the_next_readable_image_and_counts(tmp_path: Path, workers: int, capfd):
    accelerator = Accelerator(cpu=True)
    train = load(write(tmp_path / "set"), 3).train
    for epoch in (0, 1):  # the count begins anew in each epoch
        train.set_epoch(epoch)
        batches = list(DataLoader(train, batch_size=4, num_workers=workers))
        assert [len(labels) for _, labels in batches] == [4, 4, 4]
        labels = torch.cat([labels for _, labels in batches]).tolist()
        assert labels == [0] * 6 + [1] * 5 + [0]  # the last one is replaced by the first
        assert recipe_data.check_skipped(accelerator, train, "training") == 3
        err = capfd.readouterr().err
        for name in ("dark/001.png", "dark/002.png", "light/005.png"):
            assert err.count(name) == 1
        assert "warning: 3 training images could not be decoded" in err


def test_the_replacement_is_repeatable_and_augmented_for_its_place(tmp_path: Path):
    train = load(write(tmp_path / "set"), 3).train
    first, again, original = train[1][0], train[1][0], train[3][0]
    assert torch.equal(first, again)
    assert not torch.equal(first, original)  # the same image, 003.png, cropped in another way
    plain = load(tmp_path / "set", 3, augment="none").train
    assert torch.equal(plain[1][0], plain[3][0])


def test_evaluation_marks_unreadable_images(tmp_path: Path):
    accelerator = Accelerator(cpu=True)
    test = load(write(tmp_path / "set"), 1).test
    labels = [label for _, label in test]
    assert labels == [0] * 4 + [recipe_data.UNREADABLE] + [1] * 3
    assert recipe_data.check_skipped(accelerator, test, "test") == 1
    # The mark is what torch's loss ignores, alone or with smoothing.
    logits = torch.randn(8, 2)
    known = torch.tensor(labels) >= 0
    for smoothing in (0.0, 0.1):
        loss = torch.nn.CrossEntropyLoss(label_smoothing=smoothing)
        assert loss(logits, torch.tensor(labels)) == loss(logits[known], torch.tensor(labels)[known])


@pytest.mark.parametrize("limit", [0, 2])
@pytest.mark.parametrize("workers", [0, 1])
def test_one_too_many_stops(tmp_path: Path, limit: int, workers: int):
    train = load(write(tmp_path / "set"), limit).train
    words = "--max-decode-errors 2: 3 images are unreadable" if limit else r"001.png' cannot be decoded .*--max-decode"
    with pytest.raises(recipe_data.ImageDecodeError, match=words.replace("'", "")):
        list(DataLoader(train, batch_size=4, num_workers=workers))


def test_the_limit_holds_for_all_processes_together(tmp_path: Path):
    """Two processes of 2 errors each, one of them in both: within the limit of 2 by themselves, but not together."""
    one, two = (load(tmp_path / "set" if rank else write(tmp_path / "set"), 2).train for rank in (0, 1))
    one[1], one[2], two[2], two[11]
    assert one.errors.count == two.errors.count == 2

    class Pair:
        device, is_main_process = "cpu", True

        @staticmethod
        def reduce(value: torch.Tensor, how: str) -> torch.Tensor:
            assert how == "sum"
            return value + (two.errors.counts if value.ndim else two.errors.count)

    with pytest.raises(recipe_data.RecipeError, match="--max-decode-errors 2: 3 training images"):
        recipe_data.check_skipped(Pair(), one, "training")


def test_a_set_without_a_readable_image_is_an_error(tmp_path: Path):
    write_classes(tmp_path / "set", 2, broken=("dark/0", "dark/1", "light/0", "light/1"))
    train = load(tmp_path / "set", 9).train
    with pytest.raises(recipe_data.ImageDecodeError, match="none of 2 images"):
        train[0]


def test_small_images_are_left_out_of_the_array(tmp_path: Path, capfd):
    data = load(write(tmp_path / "set"), 4, img_size=None)
    assert data.in_memory
    assert data.train.labels.tolist() == [0] * 4 + [1] * 5
    assert data.test.labels.tolist() == [0] * 4 + [1] * 3
    assert (data.train.images.flatten(1).amax(1) > 0).all()  # no black ones
    err = capfd.readouterr().err
    assert err.count("skipped: ") == 4
    assert "4 images could not be decoded" in err
    with pytest.raises(recipe_data.ImageDecodeError, match="--max-decode-errors 3: 4 images are unreadable"):
        load(tmp_path / "set", 3, img_size=None)
    with pytest.raises(recipe_data.ImageDecodeError, match=r"001.png cannot be decoded .*--max-decode-errors"):
        load(tmp_path / "set", 0, img_size=None)


@pytest.mark.parametrize("img_size", [None, 16])
def test_gray_files_that_are_cut_off_count_too(tmp_path: Path, img_size: int | None):
    write_classes(tmp_path / "set", 4)
    for path in (tmp_path / "set").rglob("*.png"):
        Image.open(path).convert("L").save(path)
    cut = tmp_path / "set" / "dark" / "001.png"
    cut.write_bytes(cut.read_bytes()[:-40])  # the header, which tells size and mode, is whole
    data = load(tmp_path / "set", 1, img_size=img_size, test_fraction=0.25)
    images = [image for part in (data.train, data.test) for image, label in part if label >= 0]
    assert len(images) == 7 if data.in_memory else len(images) in (7, 8)
    with pytest.raises(recipe_data.ImageDecodeError, match="001.png cannot be decoded"):
        data = load(tmp_path / "set", 0, img_size=img_size)
        assert list(data.train) and list(data.test)


def test_sixteen_bits_keep_their_shades(tmp_path: Path):
    shades = np.arange(0, 65536, 4096, dtype=np.uint16).reshape(4, 4)
    Image.fromarray(shades).save(tmp_path / "deep.png")
    image = recipe_data.load_image(recipe_data.FileImages([tmp_path / "deep.png"]), 0, "set")
    assert image.mode == "L" and np.asarray(image).tolist() == (shades // 256).tolist()


def test_statistics_do_not_see_what_is_left_out(tmp_path: Path):
    write(tmp_path / "set")
    write_classes(tmp_path / "whole" / "train", 6)
    for name in ("dark/001.png", "dark/002.png", "light/005.png"):
        (tmp_path / "whole" / "train" / name).unlink()
    write_classes(tmp_path / "whole" / "test", 4)
    one, two = load(tmp_path / "set", 4, img_size=None), load(tmp_path / "whole", 0, img_size=None)
    assert one.config["mean"] == two.config["mean"]
    assert one.config["std"] == two.config["std"]
