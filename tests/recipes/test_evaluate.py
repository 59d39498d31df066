"""recipes/evaluate.py: the numbers against plain PyTorch, which images and classes are used, and its errors."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import timm
import torch

pytest.importorskip("accelerate")
datasets = pytest.importorskip("datasets")

import evaluate as recipe  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from pictures import LAUNCH, NAMES, ROOT, picture, run_script, save_random_model, write_classes, write_shards  # noqa: E402
from timm.data import create_transform, resolve_data_config  # noqa: E402

pytestmark = pytest.mark.usefixtures("clean_process")
SCRIPT = ROOT / "recipes" / "evaluate.py"


def evaluate(tmp_path: Path, *arguments: object) -> dict:
    """Evaluates in this process and returns the results."""
    argv = [*map(str, arguments), "--results", str(tmp_path / "results.json"), "--no-progress", "--workers", "0"]
    assert recipe.main(argv) == 0
    AcceleratorState._reset_state(True)
    return json.loads((tmp_path / "results.json").read_text())


def error_of(argv: list[object], capsys: pytest.CaptureFixture) -> str:
    """Runs with a mistake and returns its message, after checking its form."""
    capsys.readouterr()
    assert recipe.main([*map(str, argv), "--no-progress"]) == 2
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    assert stderr.startswith("evaluate.py: error: ") and stderr.count("\n") == 1, stderr
    return stderr.removeprefix("evaluate.py: error: ")


def expected(model_folder: Path, images: list, labels: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and labels the plain way."""
    model = timm.create_model(f"local-dir:{model_folder}", pretrained=True).eval()
    transform = create_transform(**resolve_data_config({}, model=model))
    with torch.no_grad():
        return model(torch.stack([transform(image) for image in images])), torch.tensor(labels)


@pytest.fixture
def seven(tmp_path: Path) -> Path:
    """A model of random weights with seven classes, two of which are "light" and "dark", in that order."""
    return save_random_model(tmp_path / "seven", ["a", "light", "b", "dark", "c", "d", "e"])


def test_metrics_are_those_of_plain_pytorch(tmp_path: Path, seven: Path):
    write_classes(tmp_path / "set" / "train", 2)
    write_classes(tmp_path / "set" / "test", 9)
    results = evaluate(tmp_path, "--model", seven, "--dataset", tmp_path / "set", "--batch-size", 5)
    images = [picture(label, index) for label in (0, 1) for index in range(9)]
    # The data set's classes, dark and light, are 3 and 1 of the model.
    logits, labels = expected(seven, images, [3] * 9 + [1] * 9)
    hits = logits.argmax(1) == labels
    assert results["images"] == 18
    assert results["evaluated"] == "the test split"
    assert results["top1"] == hits.double().mean().item()
    assert results["top5"] == (logits.topk(5).indices == labels[:, None]).any(1).double().mean().item()
    assert results["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)
    assert results["label_names"] == list(NAMES)
    assert results["class_images"] == [9, 9]
    assert results["class_top1"] == [hits[:9].double().mean().item(), hits[9:].double().mean().item()]
    assert results["skipped"] == 0


def test_two_processes_count_every_image_once(tmp_path: Path, seven: Path):
    write_classes(tmp_path / "set" / "test", 6, broken=("dark/2",))
    write_classes(tmp_path / "set" / "train", 1)
    one = evaluate(tmp_path, "--model", seven, "--dataset", tmp_path / "set", "--max-decode-errors", 1)
    launch = [*LAUNCH, "--quiet", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0", str(SCRIPT)]
    arguments = ["--model", "seven", "--dataset", "set", "--batch-size", "4", "--max-decode-errors", "1"]
    done = run_script([*launch, *arguments, "--results", "two.json"], tmp_path, ACCELERATE_USE_CPU="true")
    assert done.returncode == 0, done.stderr
    two = json.loads((tmp_path / "two.json").read_text())
    assert two["images"] == 11 and two["skipped"] == 1
    assert two.pop("loss") == pytest.approx(one.pop("loss"), rel=1e-6)
    for key in ("model", "dataset"):
        one.pop(key), two.pop(key)
    assert one == two
    assert done.stdout.count("accuracy") == 1
    assert "1 unreadable images left out" in done.stdout
    assert "dark/002.png cannot be decoded" in done.stderr


def test_a_folder_of_class_folders_is_evaluated_as_a_whole(tmp_path: Path, seven: Path):
    write_classes(tmp_path / "set", 4)
    common = ("--model", seven, "--dataset", tmp_path / "set")
    results = evaluate(tmp_path, *common)
    assert (results["images"], results["evaluated"]) == (8, "all images")
    assert evaluate(tmp_path, *common, "--split", "held-out", "--test-fraction", 0.5)["images"] == 4
    write_classes(tmp_path / "splits" / "val", 3)
    results = evaluate(tmp_path, "--model", seven, "--dataset", tmp_path / "splits", "--split", "val")
    assert (results["images"], results["evaluated"]) == (6, "split 'val'")


def test_a_runs_folder_tells_what_it_was_tested_on(tmp_path: Path, seven: Path):
    write_classes(tmp_path / "set", 10)
    arguments = dict(dataset=str(tmp_path / "set"), test_fraction=0.3, split_seed=5)
    (seven / "results.json").write_text(json.dumps(dict(arguments=arguments)))
    results = evaluate(tmp_path, "--model", seven)
    assert results["images"] == 6
    assert results["evaluated"] == "the 30% held out with --split-seed 5"
    # An evaluation of that name would be the end of it.
    argv = ["--model", str(seven), "--results", str(seven / "results.json"), "--no-progress"]
    assert recipe.main(argv) == 2 and "arguments" in json.loads((seven / "results.json").read_text())
    # Not those of another data set.
    write_classes(tmp_path / "other", 10)
    assert evaluate(tmp_path, "--model", seven, "--dataset", tmp_path / "other")["images"] == 20


def test_streams_are_evaluated(tmp_path: Path, capsys):
    save_random_model(tmp_path / "model", ["0", "1"])
    write_shards(tmp_path / "set", (5, 4), "test", broken=("test-1-0",))
    stream = ("--model", tmp_path / "model", "--dataset", tmp_path / "set", "--streaming", "--max-decode-errors", 1)
    results = evaluate(tmp_path, *stream, "--num-classes", 2, "--batch-size", 4)
    kept = [(shard, index) for shard, size in enumerate((5, 4)) for index in range(size) if (shard, index) != (1, 0)]
    images = [picture(index % 2, 100 * shard + index) for shard, index in kept]
    logits, labels = expected(tmp_path / "model", images, [index % 2 for _, index in kept])
    assert results["images"] == 8
    assert results["skipped"] == 1
    assert results["top1"] == (logits.argmax(1) == labels).double().mean().item()
    assert results["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)
    assert "a stream cannot be split" in error_of([*stream, "--split", "held-out"], capsys)


def test_classes_without_matching_names_need_a_word(tmp_path: Path, capsys):
    write_classes(tmp_path / "set", 2)
    two = save_random_model(tmp_path / "two", ["yes", "no"])
    common = ["--model", two, "--dataset", tmp_path / "set"]
    message = error_of(common, capsys)
    assert "dark, light" in message and "yes, no" in message and "--by-position" in message
    assert evaluate(tmp_path, *common, "--by-position")["images"] == 4
    # A model that does not tell names: its number of classes has to fit.
    nameless = save_random_model(tmp_path / "nameless", [None] * 3)
    assert "2 classes and the model 3" in error_of(["--model", nameless, "--dataset", tmp_path / "set"], capsys)


def test_gray_models_get_gray_images(tmp_path: Path):
    write_classes(tmp_path / "set", 3)
    gray = save_random_model(tmp_path / "gray", list(NAMES), in_chans=1)
    results = evaluate(tmp_path, "--model", gray, "--dataset", tmp_path / "set")
    images = [picture(label, index).convert("L") for label in (0, 1) for index in range(3)]
    logits, labels = expected(gray, images, [0] * 3 + [1] * 3)
    assert results["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)


def test_image_size_and_keywords_reach_the_model(tmp_path: Path, seven: Path):
    write_classes(tmp_path / "set", 3)
    common = ("--model", seven, "--dataset", tmp_path / "set")
    usual, larger = evaluate(tmp_path, *common), evaluate(tmp_path, *common, "--img-size", 24)
    assert larger["input"]["input_size"] == [3, 24, 24]
    assert larger["loss"] != usual["loss"]
    assert evaluate(tmp_path, *common, "--model-kwargs", "act_layer=gelu")["loss"] != usual["loss"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "resnet20_cifar_patchnrm", "--dataset", "set"], "close names: resnet20_cifar_patchnorm"),
        (["--model", "resnet32_cifar", "--dataset", "set"], "has no trained weights"),
        (["--model", "resnet18.nothing", "--dataset", "set"], "Names with weights: resnet18.a1_in1k"),
        (["--model", "no/where", "--dataset", "set"], "no such folder with a config.json"),
        (["--model", "local-dir:nowhere", "--dataset", "set"], "there is no 'nowhere/config.json'"),
        (["--model", "empty", "--dataset", "set"], "holds no weights"),
        (["--model", "hf-hub:nobody/nothing", "--dataset", "set"], "cannot be loaded"),
        (["--model", "seven"], "--dataset: 'seven' is no run's folder"),
        (["--model", "listed"], "--dataset: 'listed' is no run's folder"),
        (["--model", "seven", "--dataset", "nowhere/at/all"], "no such folder"),
        (["--model", "seven", "--dataset", "digits", "--split", "test"], "has no splits"),
        (["--model", "seven", "--dataset", "set", "--split", "tst"], "--split 'tst'"),
        (["--model", "seven", "--dataset", "set", "--results", "set"], "is a folder; name a file"),
        (["--model", "seven", "--dataset", "set", "--model-kwargs", "nothing=1"], "cannot be loaded with nothing=1"),
        (["--model", "seven", "--dataset", "set", "--model-kwargs", "num_classes=2"], "the classifier would not be"),
        (["--model", "seven", "--dataset", "broken"], "light/001.png cannot be decoded"),
    ],
)
def test_mistakes_get_one_line(
    tmp_path: Path, seven: Path, arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys
):
    write_classes(tmp_path / "set" / "train", 1)
    write_classes(tmp_path / "broken", 2, broken=("light/1",))
    shutil.copytree(seven, tmp_path / "listed")
    (tmp_path / "listed" / "results.json").write_text("[]")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert words in error_of([*arguments, "--workers", "0"], capsys)


def test_ties_go_to_the_class_of_the_lower_number(tmp_path: Path, seven: Path, monkeypatch: pytest.MonkeyPatch):
    """As argmax has it: a model that says nothing is right for class 0 alone."""
    write_classes(tmp_path / "set", 3)
    two = save_random_model(tmp_path / "two", list(NAMES))
    load = recipe.load_pretrained

    def silent(*arguments, **kwargs):
        model = load(*arguments, **kwargs)
        torch.nn.init.zeros_(model.get_classifier().weight)
        torch.nn.init.zeros_(model.get_classifier().bias)
        return model

    monkeypatch.setattr(recipe, "load_pretrained", silent)
    results = evaluate(tmp_path, "--model", two, "--dataset", tmp_path / "set")
    assert results["class_top1"] == [1, 0]
    assert results["loss"] == pytest.approx(np.log(2), rel=1e-6)
