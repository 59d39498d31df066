"""recipes/predict.py: the CSV file against plain timm, the contact sheet's pixels, which files are read, and errors."""

import csv
import os
import shutil
import sys
from pathlib import Path

import pytest
import timm
import torch

pytest.importorskip("accelerate")

import predict as recipe  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from pictures import LAUNCH, ROOT, picture, run_script, save_random_model, write_classes  # noqa: E402
from PIL import Image  # noqa: E402
from timm.data import create_transform, resolve_data_config  # noqa: E402

pytestmark = pytest.mark.usefixtures("clean_process")
CLASSES = ["ant", "bee", "cat, or kitten", "dog"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a model and seven images in it."""
    save_random_model(tmp_path / "model", CLASSES)
    write_classes(tmp_path / "images", 3)
    (tmp_path / "images" / "notes.txt").write_text("no image")
    picture(1, 9).save(tmp_path / "one.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def predict(*arguments: object) -> list[dict[str, str]]:
    """Predicts in this process and returns the table."""
    argv = [*map(str, arguments), "--model", "model", "--no-progress", "--workers", "0", "--overwrite"]
    assert recipe.main(argv) == 0
    AcceleratorState._reset_state(True)
    return table(Path("predictions"))


def table(folder: Path) -> list[dict[str, str]]:
    with open(folder / "predictions.csv", newline="") as file:
        return list(csv.DictReader(file))


def expected(paths: list[str]) -> torch.Tensor:
    """Probabilities the plain way."""
    model = timm.create_model("local-dir:model", pretrained=True).eval()
    transform = create_transform(**resolve_data_config({}, model=model))
    with torch.no_grad():
        return model(torch.stack([transform(Image.open(path).convert("RGB")) for path in paths])).softmax(1)


def test_table_is_what_timm_predicts(here: Path):
    rows = predict("images", "one.png", "images/dark/000.png", "--batch-size", 3)
    paths = [f"images/{name}/{index:03}.png" for name in ("dark", "light") for index in range(3)] + ["one.png"]
    assert [row["path"] for row in rows] == paths  # each once, in order
    assert list(rows[0]) == ["path", "class", "probability"]
    probabilities, classes = expected(paths).max(1)
    assert [row["class"] for row in rows] == [CLASSES[index] for index in classes]
    for row, probability in zip(rows, probabilities.tolist(), strict=True):
        assert float(row["probability"]) == pytest.approx(probability, abs=2e-6)


def test_topk_has_a_pair_of_columns_for_each_class(here: Path):
    rows = predict("images", "--topk", 9)
    header = ["path", "class", "probability", "class_2", "probability_2", "class_3", "probability_3"]
    assert list(rows[0]) == [*header, "class_4", "probability_4"]  # there are no more than four classes
    for row in rows:
        shares = [float(row[name]) for name in row if name.startswith("probability")]
        assert sum(shares) == pytest.approx(1, abs=1e-5)
        assert shares == sorted(shares, reverse=True)
        assert {row[name] for name in row if name.startswith("class")} == set(CLASSES)


def test_contact_sheet_shows_the_images_in_order(here: Path):
    predict("images", "--sheet-images", 4, "--sheet-size", 48)
    sheet = Image.open("predictions/contact_sheet.png")
    cell, margin = 48 + recipe.MARGIN, recipe.MARGIN
    assert sheet.width == 2 * cell + margin  # 4 images in 2 columns
    for number, (label, index) in enumerate([(0, 0), (0, 1), (0, 2), (1, 0)]):
        left, top = margin + number % 2 * cell, margin + number // 2 * (cell + 2 * (recipe.TEXT_SIZE + 3))
        shown = sheet.crop((left, top, left + 48, top + 48))
        assert shown.tobytes() == picture(label, index).resize((48, 48), Image.Resampling.NEAREST).tobytes()
        caption = sheet.crop((left, top + 48, left + 48, top + 48 + recipe.TEXT_SIZE + 3))
        assert min(caption.convert("L").tobytes()) < 128  # something is written there
    shutil.rmtree("predictions")
    predict("images", "--sheet-images", 0)
    assert [path.name for path in Path("predictions").iterdir()] == ["predictions.csv"]


def test_contact_sheet_keeps_proportions_and_cuts_long_captions():
    wide = Image.new("RGB", (200, 100), "red")
    sheet = recipe.contact_sheet([wide], [("a very long caption that cannot fit", "")], 40)
    assert sheet.getpixel((recipe.MARGIN + 20, recipe.MARGIN + 20)) == (255, 0, 0)
    assert sheet.getpixel((recipe.MARGIN + 20, recipe.MARGIN + 5)) == (255, 255, 255)  # 40 x 20 in the middle
    right = sheet.crop((recipe.MARGIN + 41, recipe.MARGIN + 40, sheet.width, sheet.height))
    assert set(right.convert("L").tobytes()) == {255}


def test_unreadable_files_are_counted_and_left_out(here: Path, capsys):
    write_classes(here / "mixed", 3, broken=("dark/1", "light/2"))
    rows = predict("mixed", "--max-decode-errors", 2)
    assert [row["path"][6:-4] for row in rows] == ["dark/000", "dark/002", "light/000", "light/001"]
    stdout, stderr = capsys.readouterr()
    assert "4 images, 2 unreadable left out: written to predictions" in stdout
    assert "mixed/dark/001.png cannot be decoded" in stderr and "mixed/light/002.png cannot be decoded" in stderr
    assert recipe.main(["mixed", "--model", "model", "--output", "other", "--max-decode-errors", "1"]) == 2
    assert "--max-decode-errors 1: 2 images are unreadable" in capsys.readouterr().err
    assert not Path("other").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such file names")
def test_any_file_name_is_written(here: Path):
    (here / "odd").mkdir()
    for name in (b"caf\xe9.png", b"two\nlines.png", "\u65e5\u672c.png".encode()):
        (here / "odd" / os.fsdecode(name)).write_bytes((here / "one.png").read_bytes())
    rows = predict("odd")
    assert sorted(row["path"] for row in rows) == [r"odd/caf\udce9.png", "odd/two\nlines.png", "odd/\u65e5\u672c.png"]
    assert Image.open("predictions/contact_sheet.png").size[0] > 0


@pytest.mark.slow
def test_two_processes_write_the_same_table_as_one(here: Path):
    one = predict("images", "one.png", "--topk", 2)
    launch = [*LAUNCH, "--quiet", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
    arguments = [str(ROOT / "recipes" / "predict.py"), "images", "one.png", "--topk", "2", "--model", "model"]
    done = run_script([*launch, *arguments, "--batch-size", "2", "--output", "two"], here, ACCELERATE_USE_CPU="true")
    assert done.returncode == 0, done.stderr
    assert table(here / "two") == one


def test_files_of_an_earlier_call_stay(here: Path, capsys):
    predict("one.png")
    before = Path("predictions/predictions.csv").read_text()
    assert recipe.main(["images", "--model", "model"]) == 2
    assert "has a predictions.csv; name another folder or add --overwrite" in capsys.readouterr().err
    assert Path("predictions/predictions.csv").read_text() == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "PATH 'nowhere': no such file or folder"),
        (["model"], "no images; file names end in"),
        (["images", "--output", "one.png"], "--output 'one.png' is a file"),
        (["images", "--model", "nowhere/model"], "no such folder with a config.json"),
        (["images", "--model-kwargs", "num_classes=2"], "num_classes=2: the classifier would not be the trained one"),
        (["images", "--img-size", "1"], "does not take 3x1x1 images"),
        (["model/config.json"], "config.json cannot be decoded (not an image)"),
    ],
)
def test_mistakes_get_one_line(here: Path, arguments: list[str], words: str, capsys):
    common = [] if "--model" in arguments else ["--model", "model"]
    if "--img-size" in arguments:  # a model of one size
        save_random_model(here / "model", CLASSES, name="test_vit", side=160)
    assert recipe.main([*arguments, *common, "--workers", "0", "--no-progress"]) == 2
    stdout, stderr = capsys.readouterr()
    assert stdout == "" and stderr.startswith("predict.py: error: ") and stderr.count("\n") == 1, stderr
    assert words in stderr


def test_classes_without_names_are_imagenets_or_numbers(here: Path):
    thousand = save_random_model(here / "thousand", [None] * 1000)
    few = save_random_model(here / "few", [None] * 3)
    names = [
        recipe.class_names(timm.create_model(f"local-dir:{folder}", pretrained=True)) for folder in (thousand, few)
    ]
    assert names[0][0].startswith("tench") and len(names[0]) == 1000
    assert names[1] == ["0", "1", "2"]
