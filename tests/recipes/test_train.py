"""recipes/train.py and recipes/data.py: whole runs, the layouts of data they read, their errors, their augmentation."""

import csv
import io
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch

pytest.importorskip("accelerate")
datasets = pytest.importorskip("datasets")
pytest.importorskip("sklearn")

import data as recipe_data  # noqa: E402
import engine  # noqa: E402
import huggingface_hub  # noqa: E402
import options  # noqa: E402
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
import train as recipe  # noqa: E402
from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402
from PIL import Image  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from timm.data import create_transform  # noqa: E402

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "recipes" / "train.py"
RUN_FILES = {"args.yaml", "best", "config.json", "log.csv", "model.safetensors", "plot.png", "results.json"}
RUN_FILES |= {"modeling_affdiv.py"}  # of models of this package
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch"]
NOWHERE = "http://127.0.0.1:9"  # the discard port: nothing listens there


def run_script(command: list[str], cwd: Path, **env: str) -> subprocess.CompletedProcess:
    """Runs a command as a user would, in a folder of its own."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1", **env)
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(autouse=True)
def clean_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Undoes what a run in this process leaves behind, and keeps it away from the user's caches and the network."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", NOWHERE)
    monkeypatch.delenv("RANK", raising=False)
    handler, threads = signal.getsignal(signal.SIGTERM), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    signal.signal(signal.SIGTERM, handler)
    torch.set_num_threads(threads)
    for state in (AcceleratorState, PartialState, GradientState):
        state._shared_state.clear()


def train(output: Path, *arguments: object) -> dict:
    """Trains in this process and returns the run's results."""
    argv = [*map(str, arguments), "--output", str(output), "--no-progress"]
    assert recipe.main(argv) == 0
    AcceleratorState._reset_state(True)
    return json.loads((output / "results.json").read_text())


def error_of(argv: list[object], capsys: pytest.CaptureFixture) -> str:
    """Runs with a mistake and returns its message, after checking its form."""
    try:
        status = recipe.main(list(map(str, argv)))
    except SystemExit as stop:  # argparse's own errors
        status = stop.code
    stdout, stderr = capsys.readouterr()
    assert status == 2
    assert stdout == ""
    assert stderr.startswith("train.py: error: ") and stderr.count("\n") == 1, stderr
    return stderr.removeprefix("train.py: error: ")


# --------------------------------------------------------------------------------------------------------------------
# Data to train on. Class 0 is dark and class 1 is bright, so that a handful of updates tells them apart.
# --------------------------------------------------------------------------------------------------------------------


def picture(label: int, index: int, size: tuple[int, int] = (12, 12), mode: str = "RGB") -> Image.Image:
    """Draws one image."""
    rng = np.random.default_rng([label, index])
    shape = size[::-1] if mode == "L" else (*size[::-1], 3)
    return Image.fromarray((rng.integers(0, 60, shape) + 190 * label).astype(np.uint8))


def write_classes(
    folder: Path, count: int, sizes: tuple[tuple[int, int], ...] = ((12, 12),), mode: str = "RGB"
) -> None:
    """Writes folder/{dark,light}/<n>.png."""
    for label, name in enumerate(("dark", "light")):
        (folder / name).mkdir(parents=True)
        for index in range(count):
            picture(label, index, sizes[index % len(sizes)], mode).save(folder / name / f"{index}.png")


def png(label: int, index: int) -> bytes:
    """Returns a PNG file's bytes."""
    buffer = io.BytesIO()
    picture(label, index).save(buffer, "PNG")
    return buffer.getvalue()


def write_parquet(folder: Path, train_count: int = 12, test_count: int = 5, test_name: str = "test") -> None:
    """Writes a data set as the Hub stores it: typed columns, `img` and `label`, one parquet file for each split."""
    features = datasets.Features(img=datasets.Image(), label=datasets.ClassLabel(names=["dark", "light"]))
    folder.mkdir(parents=True)
    for split, count in (("train", train_count), (test_name, test_count)):
        rows = [
            {"img": {"bytes": png(label, index), "path": None}, "label": label}
            for index in range(count)
            for label in (0, 1)
        ]
        datasets.Dataset.from_list(rows, features=features).to_parquet(folder / f"{split}-00000-of-00001.parquet")


def write_plain_parquet(folder: Path, labels: list) -> None:
    """Writes parquet files as a program without `datasets` does: bare bytes, no types."""
    folder.mkdir(parents=True)
    for split in ("train", "validation"):
        images = [png(index % 2, index) for index in range(len(labels))]
        pq.write_table(pa.table({"png": images, "kind": labels}), folder / f"{split}.parquet")


# --------------------------------------------------------------------------------------------------------------------
# The main command
# --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def default_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess]:
    """The README's command without any argument."""
    cwd = tmp_path_factory.mktemp("default")
    done = run_script([*LAUNCH, str(SCRIPT)], cwd)
    assert done.returncode == 0, done.stderr
    return cwd / "runs" / "resnet20_cifar_patchnorm-digits-seed0", done


def test_default_run_learns_digits_and_says_so(default_run):
    folder, done = default_run
    results = json.loads((folder / "results.json").read_text())
    assert results["test_top1"] >= 0.97
    assert results["test_images"] >= 350
    lines = [line for line in done.stdout.splitlines() if "test accuracy" in line]
    assert len(lines) == 1
    assert f"test accuracy {results['test_top1']:.2%}" in lines[0]
    assert "runs/resnet20_cifar_patchnorm-digits-seed0" in lines[0]
    assert "step/s" in done.stderr  # the progress bar


def test_default_run_writes_its_folder_and_nothing_else(default_run):
    folder, _ = default_run
    assert {path.name for path in folder.iterdir()} == RUN_FILES
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_results_hold_metrics_arguments_and_versions(default_run):
    folder, _ = default_run
    results = json.loads((folder / "results.json").read_text())
    assert results["best_test_top1"] >= results["test_top1"]
    assert 0 < results["test_loss"] < 0.3
    assert 0 < results["seconds"] < 300
    assert results["train_images"] + results["test_images"] == 1797
    assert results["seed"] == results["arguments"]["seed"] == 0
    assert results["arguments"].keys() == vars(recipe.parse_args([])).keys()
    assert set(results["versions"]) == {"python", "torch", "timm", "accelerate", "affdiv_zoo"}
    assert results["versions"]["timm"] == timm.__version__


def test_log_has_a_row_for_each_epoch(default_run):
    folder, _ = default_run
    results = json.loads((folder / "results.json").read_text())
    with open(folder / "log.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["epoch", "train_loss", "train_top1", "test_loss", "test_top1", "lr", "seconds"]
    assert [int(row["epoch"]) for row in rows] == list(range(1, results["epochs"] + 1))
    assert float(rows[-1]["test_top1"]) == results["test_top1"]
    assert float(rows[-1]["test_loss"]) == results["test_loss"]
    assert float(rows[-1]["train_loss"]) < float(rows[0]["train_loss"])
    rates = [float(row["lr"]) for row in rows]
    assert rates[-1] < 1e-4 < rates[0] and max(rates) <= 1e-2


def test_run_folder_loads_in_timm_and_repeats_the_test_accuracy(default_run):
    """Weights, classes and preprocessing all have to be right for timm's own transform to give the same result."""
    folder, _ = default_run
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    cfg = model.pretrained_cfg
    assert cfg["label_names"] == [str(digit) for digit in range(10)]
    assert cfg["num_classes"] == model.num_classes == 10
    assert tuple(cfg["input_size"]) == (1, 8, 8)
    transform = create_transform(
        input_size=tuple(cfg["input_size"]),
        mean=tuple(cfg["mean"]),
        std=tuple(cfg["std"]),
        interpolation=cfg["interpolation"],
        crop_pct=cfg["crop_pct"],
    )
    source = recipe_data.find_digits()
    _, held_out = recipe_data.stratified_split(source.train.labels, 0.2, 0)
    batch = torch.stack([transform(source.train.images.load(index)) for index in held_out])
    labels = torch.from_numpy(source.train.labels[held_out])
    with torch.no_grad():
        logits = model(batch)
    results = json.loads((folder / "results.json").read_text())
    assert (logits.argmax(1) == labels).double().mean().item() == results["test_top1"]
    assert torch.nn.functional.cross_entropy(logits, labels).item() == pytest.approx(results["test_loss"], rel=1e-3)


def test_run_folder_gives_timm_the_architecture_alone_too(default_run):
    folder, _ = default_run
    trained = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    model = timm.create_model(f"local-dir:{folder}").eval()
    images = torch.randn(3, 1, 8, 8)
    assert not torch.equal(model(images), trained(images))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    assert torch.equal(model(images), trained(images))


def test_run_folder_loads_in_transformers(default_run):
    transformers = pytest.importorskip("transformers")
    folder, _ = default_run
    model = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    images = torch.randn(3, 1, 8, 8)
    expected = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()(images)
    assert torch.equal(model(images).logits, expected)
    assert model.config.id2label[7] == "7"


def test_two_processes_test_every_image_once(tmp_path: Path):
    launch = [*LAUNCH, "--multi_gpu", "--num_processes", "2", "--main_process_port", "0", str(SCRIPT)]
    arguments = ["--model", "resnet20_cifar", "--max-steps", "3", "--eval-batch-size", "50", "--output", "run"]
    done = run_script([*launch, *arguments], tmp_path, ACCELERATE_USE_CPU="true")
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["processes"] == 2
    assert results["test_images"] == 359  # neither a multiple of two processes nor of the batch
    assert done.stdout.count("test accuracy") == 1
    # The same model tested by one process.
    model = timm.create_model(f"local-dir:{tmp_path / 'run'}", pretrained=True).eval()
    args = recipe.parse_args([])
    test = recipe_data.load_data(args, model.pretrained_cfg).test
    images, labels = test.__getitems__(range(len(test)))
    with torch.no_grad():
        top1 = (model(images).argmax(1) == labels).double().mean().item()
    assert results["test_top1"] == pytest.approx(top1, abs=1.5 / 359)


def test_help_is_grouped_and_shows_defaults(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as stop:
        recipe.main(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    for part in ("model:", "data:", "training:", "output:", "resnet20_cifar_patchnorm", "(default: 0.01)"):
        assert part in text


# --------------------------------------------------------------------------------------------------------------------
# Repeatability and options
# --------------------------------------------------------------------------------------------------------------------


def weights_equal(first: Path, second: Path) -> bool:
    """Compares two runs' weights bit by bit."""
    one, two = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    assert one.keys() == two.keys()
    return all(torch.equal(one[key], two[key]) for key in one)


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(tmp_path: Path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(tmp_path / name, "--max-steps", 3, "--seed", seed, "--augment", "crop-flip")
    assert weights_equal(tmp_path / "a", tmp_path / "b")
    assert not weights_equal(tmp_path / "a", tmp_path / "c")


def test_augmentation_does_not_depend_on_workers(tmp_path: Path):
    write_classes(tmp_path / "set", 8, sizes=((20, 20), (30, 24)))
    for workers in (0, 1):
        train(
            tmp_path / str(workers),
            *("--dataset", tmp_path / "set", "--model", "test_resnet", "--img-size", 32, "--max-steps", 4),
            *("--batch-size", 4, "--workers", workers),
        )
    assert weights_equal(tmp_path / "0", tmp_path / "1")


def test_validation_keeps_the_test_set_for_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sizes = []
    evaluate = engine.evaluate

    def spy(accelerator, model, loader, *rest):
        sizes.append(len(loader.dataset))
        return evaluate(accelerator, model, loader, *rest)

    monkeypatch.setattr(engine, "evaluate", spy)
    results = train(tmp_path / "run", "--val-fraction", 0.1, "--epochs", 2, "--train-limit", 128)
    val_images = results["val_images"]
    assert sizes == [val_images, val_images, 359]
    assert val_images == pytest.approx(143, abs=5)  # a tenth of each class, rounded
    assert results["train_images"] == 128
    assert {"val_top1", "val_loss", "best_val_top1", "test_top1"} <= results.keys()
    assert "best_test_top1" not in results  # it was never looked for
    header = (tmp_path / "run" / "log.csv").read_text().splitlines()[0]
    assert header == "epoch,train_loss,train_top1,val_loss,val_top1,lr,seconds"


def test_training_options_reach_the_training(tmp_path: Path):
    """Each option alone has to change the weights that a run without it gives."""
    common = ("--model", "resnet20_cifar", "--max-steps", 2, "--batch-size", 16)
    train(tmp_path / "plain", *common)
    options = {
        "opt": ("--opt", "sgd"),
        "lr": ("--lr", 1e-3),
        "weight-decay": ("--weight-decay", 5),
        "clip": ("--clip-grad", 1e-3),
        "smoothing": ("--label-smoothing", 0.2),
        "precision": ("--mixed-precision", "bf16"),
        "warmup": ("--warmup-fraction", 0.5),
        "augment": ("--augment", "crop"),
        "limit": ("--train-limit", 100),
    }
    for name, option in options.items():
        results = train(tmp_path / name, *common, *option)
        assert not weights_equal(tmp_path / "plain", tmp_path / name), name
        assert results["updates"] == 2
    train(tmp_path / "sgd", *common, "--opt", "sgd", "--momentum", 0.5)
    assert not weights_equal(tmp_path / "opt", tmp_path / "sgd")


def test_training_images_are_shuffled_and_whole_batches_used():
    args = recipe.parse_args(["--batch-size", "100"])
    data = recipe_data.load_data(args, {})
    loader = engine.build_loaders(args, data, processes=1)[0]
    order = torch.cat([labels for _, labels in loader])
    assert len(order) == 1400
    assert not torch.equal(order, data.train.labels[:1400])
    # A training set below one batch is used all the same.
    args = recipe.parse_args(["--batch-size", "100", "--train-limit", "60"])
    loader = engine.build_loaders(args, recipe_data.load_data(args, {}), processes=1)[0]
    assert [len(labels) for _, labels in loader] == [60]


def test_channels_last_changes_the_memory_and_not_the_model(tmp_path: Path):
    for name, option in (("first", []), ("last", ["--channels-last"])):
        train(tmp_path / name, "--model", "resnet20_cifar", "--max-steps", 1, *option)
    first, last = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "last"))
    assert first.keys() == last.keys()
    for key in first:
        torch.testing.assert_close(first[key], last[key], rtol=1e-3, atol=1e-3)


def test_model_keywords_and_input_size_come_back_with_the_run(tmp_path: Path):
    train(
        tmp_path / "run",
        *("--model", "test_vit", "--img-size", 32, "--max-steps", 1),
        *("--model-kwargs", "class_token=false", "global_pool=avg", "qkv_bias=False", "mlp_ratio=1.5"),
    )
    model = timm.create_model(f"local-dir:{tmp_path / 'run'}", pretrained=True)
    assert model.patch_embed.img_size == (32, 32)
    assert model.cls_token is None
    assert model.blocks[0].attn.qkv.bias is None
    assert model.pretrained_cfg["mean"] == [
        0.5,
        0.5,
        0.5,
    ]  # images this large are prepared as the model usually has them


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a=1", 1), ("a=1.5", 1.5), ("a=1e-3", 1e-3), ("a=true", True), ("a=False", False), ("a=x=y", "x=y"), ("a=", "")],
)
def test_model_keywords_are_typed(text: str, expected: object):
    key, value = options.model_kwarg(text)
    assert key == "a"
    assert value == expected and type(value) is type(expected)


# --------------------------------------------------------------------------------------------------------------------
# Layouts of data
# --------------------------------------------------------------------------------------------------------------------


SMALL = ("--model", "resnet20_cifar", "--epochs", 6, "--batch-size", 8, "--eval-batch-size", 4)


def test_folder_with_splits(tmp_path: Path):
    write_classes(tmp_path / "set" / "train", 12)
    write_classes(tmp_path / "set" / "val", 5)
    results = train(tmp_path / "run", "--dataset", tmp_path / "set", *SMALL)
    assert (results["train_images"], results["test_images"]) == (24, 10)
    assert results["test_top1"] == 1.0
    assert results["augment"] == "crop-flip"
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["pretrained_cfg"]["label_names"] == ["dark", "light"]
    assert config["pretrained_cfg"]["input_size"] == [3, 12, 12]
    assert "num_classes" not in config["model_args"]


def test_folder_of_class_folders_is_split(tmp_path: Path):
    write_classes(tmp_path / "set", 10, mode="L")
    results = train(tmp_path / "run", "--dataset", tmp_path / "set", *SMALL, "--test-fraction", 0.3)
    assert (results["train_images"], results["test_images"]) == (14, 6)
    assert results["input"]["input_size"] == [1, 12, 12]  # gray files make a gray model


def test_images_of_several_sizes_go_through_timms_transforms(tmp_path: Path):
    write_classes(tmp_path / "set" / "train", 8, sizes=((20, 20), (90, 70)))
    write_classes(tmp_path / "set" / "test", 3, sizes=((33, 50),))
    model = ("--model", "test_resnet", "--img-size", 32, "--workers", 0)
    results = train(tmp_path / "run", "--dataset", tmp_path / "set", *model, "--epochs", 4, "--batch-size", 8)
    assert results["test_images"] == 6
    assert results["input"]["input_size"] == [3, 32, 32]
    usual = timm.get_pretrained_cfg("test_resnet")
    assert tuple(results["input"]["mean"]) == tuple(usual.mean)


@pytest.mark.parametrize("test_name", ["test", "validation"])
def test_hub_layout(tmp_path: Path, test_name: str):
    write_parquet(tmp_path / "set" / "plain_text", test_name=test_name)
    results = train(tmp_path / "run", "--dataset", tmp_path / "set", *SMALL)
    assert (results["train_images"], results["test_images"]) == (24, 10)
    assert results["test_top1"] == 1.0
    named = ("--image-key", "img", "--label-key", "label", "--train-split", "train", "--test-split", test_name)
    train(tmp_path / "named", "--dataset", tmp_path / "set", *SMALL, *named)
    assert weights_equal(tmp_path / "run", tmp_path / "named")


@pytest.mark.parametrize("labels", [[0, 1] * 8, ["dark", "light"] * 8])
def test_hub_layout_without_types(tmp_path: Path, labels: list):
    write_plain_parquet(tmp_path / "set", labels)
    keys = ("--image-key", "png", "--label-key", "kind")
    results = train(tmp_path / "run", "--dataset", tmp_path / "set", *SMALL, *keys)
    assert results["test_top1"] == 1.0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["label_names"] == sorted({str(label) for label in labels})


# --------------------------------------------------------------------------------------------------------------------
# Mistakes
# --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data sets with something wrong."""
    root = tmp_path_factory.mktemp("faulty")
    (root / "empty" / "train").mkdir(parents=True)
    (root / "file.txt").write_text("not a folder")
    write_parquet(root / "hub")
    write_classes(root / "corrupt", 4)
    (root / "corrupt" / "light" / "2.png").write_bytes(b"this is not a PNG")
    write_classes(root / "cut", 4)
    whole = (root / "cut" / "dark" / "1.png").read_bytes()
    (root / "cut" / "dark" / "1.png").write_bytes(whole[: len(whole) // 2])
    write_classes(root / "one", 4)
    for path in (root / "one" / "light").iterdir():
        path.unlink()
    write_classes(root / "strange" / "train", 4)
    write_classes(root / "strange" / "test", 4)
    (root / "strange" / "test" / "light").rename(root / "strange" / "test" / "green")
    write_classes(root / "splits" / "train", 4)
    write_classes(root / "splits" / "val", 4)
    write_plain_parquet(root / "unlabelled", [0, 1, 0, -1])
    (root / "broken").mkdir()
    (root / "broken" / "train.parquet").write_bytes(b"this is not parquet")
    return root


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ("--model resnet20_cifar_patchnrom", ["--model", "'resnet20_cifar_patchnrom'", "resnet20_cifar_patchnorm"]),
        ("--model resnet18.nothing", ["--model", "'resnet18.nothing'", "tag"]),
        ("--model test_vit", ["--model", "'test_vit'", "1x8x8", "--img-size"]),
        ("--model-kwargs center", ["--model-kwargs", "'center'", "key=value"]),
        ("--model-kwargs colour=red", ["--model-kwargs", "colour=red", "resnet20_cifar_patchnorm"]),
        ("--model-kwargs checkpoint_path=x.pth", ["--model-kwargs", "checkpoint_path", "leave it out"]),
        ("--opt adamv", ["--opt", "'adamv'", "adamw"]),
        ("--opt sgd --momentum 0", ["--opt 'sgd'", "--momentum 0.0", "Nesterov"]),
        ("--opt adamw --opt-betas 0.9", ["--opt 'adamw'", "--opt-betas 0.9"]),
        ("--opt adahessian", ["--opt 'adahessian'", "second derivatives"]),
        ("--model vit_nano_patch4_32 --model-kwargs num_heads=0", ["--model-kwargs num_heads=0", "zero"]),
        ("--lr 0", ["--lr", "'0'", "above 0"]),
        ("--lr nan", ["--lr", "'nan'", "above 0"]),
        ("--epochs 0", ["--epochs", "'0'", "at least 1"]),
        ("--batch-size many", ["--batch-size", "'many'", "whole number"]),
        ("--val-fraction 1", ["--val-fraction", "'1'", "below 1"]),
        ("--val-fraction 0.0001", ["--val-fraction", "0.0001", "at least one"]),
        ("--label-smoothing -0.1", ["--label-smoothing", "-0.1"]),
        ("--seed -1", ["--seed", "'-1'", "at least 0"]),
        ("--seed 4294967296", ["--seed", "'4294967296'", "at most 4e+09"]),
        ("--augment mirror", ["--augment", "'mirror'", "crop-flip"]),
        ("--mixed-precision fp32", ["--mixed-precision", "'fp32'", "bf16"]),
        ("--epoch 3", ["--epoch"]),
        ("--train-limit 5000", ["--train-limit", "5000", "1438"]),
        ("--dataset {}/nowhere", ["--dataset", "nowhere", "no such folder"]),
        ("--dataset someone/nothing", ["--dataset", "'someone/nothing'", "Hub", "digits"]),
        ("--dataset nothing", ["--dataset", "'nothing'", "Hub", "digits"]),
        ("--dataset {}/file.txt", ["--dataset", "file.txt", "folder"]),
        ("--dataset {}/empty", ["--dataset", "empty", "no images", "class folders"]),
        ("--dataset {}/corrupt", ["--dataset", "corrupt/light/2.png", "not an image"]),
        ("--dataset {}/cut", ["--dataset", "cut/dark/1.png", "cannot be decoded"]),
        ("--dataset {}/one", ["--dataset", "1 class(es)", "at least 2"]),
        ("--dataset {}/strange", ["--dataset", "strange/test/green", "training set"]),
        ("--dataset {}/splits --test-split test", ["--test-split", "'test'", "val"]),
        ("--dataset {}/hub --train-split training", ["--train-split", "'training'", "train, test"]),
        ("--dataset {}/hub --image-key image", ["--image-key", "'image'", "img, label"]),
        ("--dataset {}/hub --image-key label", ["--image-key", "'label'", "no images", "img"]),
        ("--dataset {}/hub --label-key fine_label", ["--label-key", "'fine_label'", "it has label"]),
        ("--dataset {}/unlabelled", ["--image-key", "png, kind"]),
        ("--dataset {}/unlabelled --image-key png", ["--label-key", "kind"]),
        ("--dataset {}/unlabelled --image-key png --label-key kind", ["--label-key", "row 3", "split 'train'"]),
        ("--dataset {}/broken", ["--dataset", "broken", "cannot be loaded"]),
    ],
)
def test_mistake_is_one_line_and_leaves_nothing(arguments, parts, faulty, tmp_path, capsys):
    output = tmp_path / "runs" / "run"
    argv = [argument.format(faulty) for argument in arguments.split()]
    message = error_of([*argv, "--output", output], capsys)
    for part in parts:
        assert part in message
    assert not output.parent.exists()


@pytest.mark.parametrize("output", [".", "..", "/"])
def test_an_output_without_a_name_is_one_line(output: str, tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert f"--output '{output}' is no folder of its own" in error_of(["--output", output, "--overwrite"], capsys)
    assert not list((tmp_path / "here").iterdir())


def test_mistake_ends_the_script_with_one_line(tmp_path: Path):
    done = run_script([sys.executable, str(SCRIPT), "--model", "resnet20_cifra", "--output", "run"], tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("train.py: error: --model 'resnet20_cifra'") and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_half_precision_on_a_cpu_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture):
    if torch.cuda.is_available():
        pytest.skip("there is an accelerator, for which fp16 is right")
    message = error_of(["--mixed-precision", "fp16", "--output", tmp_path / "run"], capsys)
    assert "--mixed-precision 'fp16'" in message and "bf16" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("workers", [0, 1])
def test_corrupt_image_found_in_training_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture, workers: int):
    write_classes(tmp_path / "set" / "train", 6, sizes=((80, 80),))
    write_classes(tmp_path / "set" / "test", 2, sizes=((80, 80),))
    (tmp_path / "set" / "train" / "light" / "3.png").write_bytes(b"this is not a PNG")
    model = ["--model", "test_resnet", "--img-size", 32, "--workers", workers, "--no-progress"]
    message = error_of(["--dataset", tmp_path / "set", *model, "--output", tmp_path / "runs" / "run"], capsys)
    assert message.startswith("--dataset") and "train/light/3.png" in message
    assert not list((tmp_path / "runs").iterdir())


def test_divergence_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture):
    arguments = ["--model", "resnet20_cifar", "--opt", "sgd", "--lr", 1e30, "--max-steps", 3, "--no-progress"]
    message = error_of([*arguments, "--output", tmp_path / "runs" / "run"], capsys)
    assert "--lr 1e+30" in message and "epoch 1" in message
    assert not list((tmp_path / "runs").iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    """Reads all files in and below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


QUICK = ("--model", "resnet20_cifar", "--max-steps", 1, "--train-limit", 32)


def test_output_folder_is_replaced_only_on_request(tmp_path: Path, capsys: pytest.CaptureFixture):
    output = tmp_path / "run"
    output.mkdir()  # an empty one is in nobody's way
    train(output, *QUICK)
    before = contents(output)
    capsys.readouterr()
    message = error_of([*QUICK, "--output", output], capsys)
    assert "--output" in message and "--overwrite" in message
    assert contents(output) == before
    (output / "stale.txt").write_text("of the earlier run")
    train(output, *QUICK, "--seed", 1, "--overwrite")
    assert {path.name for path in output.iterdir()} == RUN_FILES
    assert (output / "model.safetensors").read_bytes() != before["model.safetensors"]
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["run"]


def test_overwrite_spares_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("Call me Ishmael.")
    (tmp_path / "note").write_text("a file")
    for name, why in (("thesis", "no run's folder"), ("note", "is a file"), ("note/run", "cannot be made")):
        assert why in error_of([*QUICK, "--output", tmp_path / name, "--overwrite"], capsys)
    assert (tmp_path / "thesis" / "chapter1.tex").read_text() == "Call me Ishmael."
    assert (tmp_path / "note").read_text() == "a file"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_before_training_leaves_the_earlier_run_as_it_was(number: int, tmp_path: Path, monkeypatch, capsys):
    output = tmp_path / "run"
    train(output, *QUICK)
    before = contents(output)
    capsys.readouterr()
    monkeypatch.setattr(recipe, "load_data", lambda *_: signal.raise_signal(number))
    assert recipe.main([*map(str, QUICK), "--output", str(output), "--overwrite", "--no-progress"]) == 128 + number
    stderr = capsys.readouterr().err
    assert "interrupted; nothing was written" in stderr and stderr.count("\n") == 1
    assert contents(output) == before
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["run"]


def test_a_bug_keeps_its_traceback_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(engine, "evaluate", fail)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        recipe.main([*map(str, QUICK), "--output", str(tmp_path / "runs" / "run"), "--no-progress"])
    assert not list((tmp_path / "runs").iterdir())


def test_only_the_main_process_reports(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setenv("RANK", "1")
    assert recipe.main(["--model", "nothing"]) == 2
    assert capsys.readouterr() == ("", "")


# --------------------------------------------------------------------------------------------------------------------
# The parts of data.py
# --------------------------------------------------------------------------------------------------------------------


def mix(value: int) -> int:
    """SplitMix64's step, in plain Python."""
    mask = 2**64 - 1
    value = (value + 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


def test_sample_bits_known_values():
    assert mix(0) == 0xE220A8397B1DCDAF  # the generator's published first output for state 0
    for seed, epoch, index in ((0, 0, 0), (3, 17, 49_999)):
        expected = mix((mix((mix(seed) + epoch) % 2**64) + index) % 2**64)
        assert recipe_data.sample_bits(seed, epoch, [index]).tolist() == [expected]


def test_sample_bits_are_drawn_for_each_sample_alone():
    together = recipe_data.sample_bits(1, 2, [5, 9, 5, 0])
    assert together.tolist() == [recipe_data.sample_bits(1, 2, [index])[0] for index in (5, 9, 5, 0)]
    draws = [recipe_data.sample_bits(seed, epoch, range(100)) for seed in range(3) for epoch in range(3)]
    assert len(np.unique(np.concatenate(draws))) == 900


def test_crop_and_flip_known_values():
    images = torch.arange(1, 1 + 4 * 9, dtype=torch.uint8).reshape(4, 3, 3, 1)
    centre = recipe_data.CROP_PADDING
    result = recipe_data.crop_and_flip(
        images,
        top=torch.tensor([centre, centre + 1, centre, 0]),
        left=torch.tensor([centre, centre, centre - 1, 0]),
        flip=torch.tensor([False, False, True, False]),
    )[..., 0]
    assert result[0].tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert result[1].tolist() == [[13, 14, 15], [16, 17, 18], [0, 0, 0]]  # a row up, black below
    assert result[2].tolist() == [[20, 19, 0], [23, 22, 0], [26, 25, 0]]  # a column to the right, then mirrored
    assert result[3].tolist() == [[0] * 3] * 3  # the frame's corner


def array_dataset(augment: str, seed: int = 0, count: int = 300) -> recipe_data.ArrayDataset:
    """Noise with labels."""
    images = np.random.default_rng(0).integers(0, 256, (count, 10, 10, 3), dtype=np.uint8)
    return recipe_data.ArrayDataset(images, np.arange(count), [0.5] * 3, [0.25] * 3, augment, seed)


def test_batches_without_augmentation_are_the_normalised_images():
    dataset = array_dataset("none")
    images, labels = dataset.__getitems__([7, 3])
    assert images.shape == (2, 3, 10, 10) and images.is_contiguous()
    assert labels.tolist() == [7, 3]
    expected = (dataset.images[7].permute(2, 0, 1).float() / 255 - 0.5) / 0.25
    torch.testing.assert_close(images[0], expected)
    dataset.set_epoch(1)
    assert torch.equal(dataset[7][0], images[0])


def test_array_augmentation_is_a_function_of_seed_epoch_and_index():
    dataset = array_dataset("crop-flip")
    dataset.set_epoch(4)
    batch, _ = dataset.__getitems__([5, 9, 200])
    torch.manual_seed(123)
    again = array_dataset("crop-flip")
    again.__getitems__([1, 2, 3])  # what was drawn before does not matter
    again.set_epoch(4)
    assert torch.equal(again.__getitems__([200, 5])[0], batch[[2, 0]])
    for other in (array_dataset("crop-flip", seed=1), array_dataset("crop-flip")):
        other.set_epoch(4 + (other.seed == 0))
        assert not torch.equal(other.__getitems__([5, 9, 200])[0], batch)


def test_array_augmentation_uses_every_offset_and_flips_half():
    """A bright pixel tells where a picture was cropped, its darker neighbour whether it was mirrored."""
    count, centre = 2000, 12
    images = np.zeros((count, 25, 25, 1), dtype=np.uint8)
    images[:, centre, centre] = 255
    images[:, centre, centre + 1] = 100
    where, flips = [], []
    for augment in ("crop", "crop-flip"):
        dataset = recipe_data.ArrayDataset(images, np.zeros(count, dtype=np.int64), [0.0], [1.0], augment)
        batch, _ = dataset.__getitems__(range(count))
        place = batch.flatten(1).argmax(1)
        rows, columns = place // 25, place % 25
        right = batch[torch.arange(count), 0, rows, columns + 1] > 0
        where.append(
            {(row, column) for row, column in zip((rows - centre).tolist(), (columns - centre).tolist(), strict=True)}
        )
        flips.append((~right).double().mean().item())
    every = {(row, column) for row in range(-4, 5) for column in range(-4, 5)}
    assert where[0] == every and where[1] == every
    assert flips[0] == 0
    assert 0.45 < flips[1] < 0.55


def test_transformed_images_are_a_function_of_seed_epoch_and_index():
    array = np.random.default_rng(0).integers(0, 256, (6, 40, 40, 3), dtype=np.uint8)
    transform = create_transform((3, 32, 32), is_training=True, auto_augment="rand-m9-n2")

    def make(seed: int = 0) -> recipe_data.TransformDataset:
        images = recipe_data.ArrayImages(array)
        return recipe_data.TransformDataset(images, np.arange(6) * 10, np.array([5, 0, 3]), transform, "noise", seed)

    dataset = make()
    state = torch.get_rng_state()
    image, label = dataset[0]
    assert label == 50
    assert torch.equal(torch.get_rng_state(), state)  # the rest of the program draws what it would have drawn
    torch.manual_seed(99)
    assert torch.equal(make()[0][0], image)
    assert not torch.equal(make(seed=1)[0][0], image)
    dataset.set_epoch(1)
    assert not torch.equal(dataset[0][0], image)


def test_stratified_split():
    labels = np.repeat([0, 1, 2], [10, 20, 5])
    first, second = recipe_data.stratified_split(labels, 0.2, seed=0)
    assert np.bincount(labels[second]).tolist() == [2, 4, 1]
    assert sorted([*first, *second]) == list(range(35))
    assert recipe_data.stratified_split(labels, 0.2, seed=0)[1].tolist() == second.tolist()
    assert recipe_data.stratified_split(labels, 0.2, seed=1)[1].tolist() != second.tolist()


def test_channel_statistics():
    images = np.random.default_rng(0).integers(0, 200, (50, 7, 7, 3), dtype=np.uint8)
    mean, std = recipe_data.channel_statistics(images)
    assert mean == pytest.approx((images / 255).mean((0, 1, 2)), abs=1e-6)
    assert std == pytest.approx((images / 255).std((0, 1, 2)), abs=1e-6)
    assert recipe_data.channel_statistics(np.zeros((2, 3, 3, 1), dtype=np.uint8))[1][0] > 0


def test_statistics_come_from_the_training_images_alone(tmp_path: Path):
    args = recipe.parse_args(["--val-fraction", "0.5"])
    data = recipe_data.load_data(args, {})
    mean, std = recipe_data.channel_statistics(data.train.images.numpy())
    assert data.config["mean"] == tuple(mean) and data.config["std"] == tuple(std)
    everything = recipe_data.channel_statistics(recipe_data.find_digits().train.images.array)
    assert mean != everything[0]


def test_splits_do_not_overlap_and_follow_the_split_seed_alone():
    def labels_and_images(*argv: str) -> list[torch.Tensor]:
        data = recipe_data.load_data(recipe.parse_args(["--val-fraction", "0.2", *argv]), {})
        return [part.images for part in (data.train, data.val, data.test)]

    parts = labels_and_images()
    assert sum(map(len, parts)) == 1797
    assert math.isclose(len(parts[1]) / (len(parts[0]) + len(parts[1])), 0.2, abs_tol=0.01)
    assert len(torch.unique(torch.cat(parts).flatten(1), dim=0)) == 1797  # all digits differ
    for same, other in zip(parts, labels_and_images("--seed", "5"), strict=True):
        assert torch.equal(same, other)
    assert not torch.equal(parts[2], labels_and_images("--split-seed", "5")[2])
