"""recipes/release.py and results.py: weights, records, cards and the page of results follow from the ledgers."""

import hashlib
import json
import types

import pytest
import torch
import yaml

pytest.importorskip("accelerate")
pytest.importorskip("sklearn")

import release  # noqa: E402
import results  # noqa: E402
import sweep as harness  # noqa: E402
from data import RecipeError  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from sweep import Choice, Paired, Row  # noqa: E402

from affdiv_zoo.hub.cards import record_of, render_card  # noqa: E402

SWEEP = dict(
    dataset_name="digits",
    arguments=dict(dataset="digits", epochs=2, batch_size=64, opt="adamw", train_limit=600),
    methods=dict(affine=dict(model="mlp_cifar_affine"), layer=dict(model="mlp_cifar", model_kwargs=dict(norm="layer"))),
    tune=dict(grid=dict(lr=[0.003]), val_fraction=0.2),
    seeds=[3, 4],
    keep=True,
)


@pytest.fixture
def swept(clean_process, tmp_path, monkeypatch):
    """A finished sweep, and the places that a release writes to, in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    for name in ("WEIGHTS", "CARDS"):
        monkeypatch.setattr(release, name, tmp_path / name.lower())
    monkeypatch.setattr(release, "LOGITS", tmp_path / "logits.json")
    file = tmp_path / "toy.yaml"
    file.write_text(yaml.safe_dump(SWEEP))
    assert harness.main(["run", str(file)]) == 0
    return file


def test_release(swept, tmp_path, capsys):
    assert release.main([str(swept), "--method", "affine", "--twin", "layer", "--tag", "toy"]) == 0
    name = "mlp_cifar_affine.toy"
    assert capsys.readouterr().out.startswith(f"{name}: ")
    record = json.loads((tmp_path / "weights" / "records.json").read_text())[name]
    content = (tmp_path / "weights" / record["file"]).read_bytes()
    assert record["sha256"] == hashlib.sha256(content).hexdigest() and record["bytes"] == len(content)
    assert record["pretrained_cfg"]["input_size"] == [1, 8, 8]
    assert record["pretrained_cfg"]["label_names"] == [str(digit) for digit in range(10)]
    assert record["seed"] == 3 and [run["seed"] for run in record["runs"]] == [3, 4]

    lines = [json.loads(line) for line in swept.with_suffix(".jsonl").read_text().splitlines()]
    final = {
        (line["method"], line["arguments"]["seed"]): line["metrics"]["test_top1"]
        for line in lines
        if line["phase"] == "final"
    }
    assert [run["test_top1"] for run in record["runs"]] == [final["affine", 3], final["affine", 4]]
    difference = [final["affine", seed] - final["layer", seed] for seed in (3, 4)]
    assert record["twin"]["difference"] == pytest.approx(sum(difference) / 2)
    assert record["twin"]["model"] == "mlp_cifar" and record["twin"]["model_args"] == {"norm": "layer"}

    key = next(line["key"] for line in lines if (line["method"], line["arguments"]["seed"]) == ("affine", 3)
               and line["phase"] == "final")  # fmt: skip
    trained = load_file(tmp_path / "runs" / "toy" / key / "model.safetensors")
    stored = load_file(tmp_path / "weights" / record["file"])
    assert record["dtype"] == "float16"
    for tensor_name, tensor in trained.items():
        assert torch.equal(stored[tensor_name], tensor.half())
    assert record["metrics"]["test_top1"] == pytest.approx(final["affine", 3], abs=0.003)
    assert (tmp_path / "cards" / f"{name}.md").read_text() == render_card(record)
    assert len(json.loads((tmp_path / "logits.json").read_text())[name]) == 4


def test_release_refuses(swept, tmp_path, capsys):
    def message(*arguments):
        assert release.main([str(swept), *arguments]) == 2
        return capsys.readouterr().err

    assert "'afine'" in message("--method", "afine")
    assert "keep: true" in message("--method", "affine", "--runs", str(tmp_path / "elsewhere"))
    folders = list((tmp_path / "runs" / "toy").iterdir())
    for folder in folders:  # somebody else's weights
        state = load_file(folder / "model.safetensors")
        save_file({key: torch.zeros_like(value) for key, value in state.items()}, folder / "model.safetensors")
    assert "not that run's weights" in message("--method", "affine")
    assert not (tmp_path / "weights").exists() or not list((tmp_path / "weights").glob("*.safetensors"))


def test_release_refuses_what_a_tag_cannot_say(clean_process, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(release, "WEIGHTS", tmp_path / "weights")
    spec = {**SWEEP, "methods": {"centred": {"model": "mlp_cifar_affine", "model_kwargs": {"center": True}}}}
    file = tmp_path / "toy.yaml"
    file.write_text(yaml.safe_dump(spec))
    assert harness.main(["run", str(file)]) == 0
    assert release.main([str(file), "--method", "centred"]) == 2
    assert "Make those the model's defaults" in capsys.readouterr().err


def test_a_run_folder_has_a_card(swept, tmp_path):
    folder = next((tmp_path / "runs" / "toy").iterdir())
    record = record_of(folder)
    assert record["architecture"] in ("mlp_cifar", "mlp_cifar_affine") and record["dataset"] == "digits"
    card = render_card(record, "someone/net")
    assert "hf-hub:someone/net" in card and str(tmp_path) not in card


def test_a_card_names_no_place_on_this_machine(tmp_path):
    data, configuration = tmp_path / "my-images", tmp_path / "own.yaml"
    data.mkdir()
    configuration.touch()
    (tmp_path / "config.json").write_text(
        json.dumps(
            dict(architecture="resnet20_cifar_patchnorm", num_classes=2, pretrained_cfg=dict(input_size=[3, 32, 32]))
        )
    )
    arguments = dict(dataset=str(data), config=str(configuration), opt="adamw")
    (tmp_path / "results.json").write_text(json.dumps(dict(dataset=str(data), arguments=arguments, test_top1=0.5)))
    record = record_of(tmp_path)
    assert record["dataset"] == "my-images" and record["arguments"]["config"] == "own.yaml"
    card = render_card(record)
    assert str(tmp_path) not in card and "my-images" in card and "datasets:" not in card.split("---")[1]


def test_card_has_the_records_figures():
    record = dict(
        architecture="resnet20_cifar_patchnorm",
        tag="toy",
        model_args={},
        pretrained_cfg=dict(input_size=[3, 32, 32], num_classes=2, label_names=["ant", "bee"]),
        dataset="uoft-cs/cifar10",
        metrics=dict(test_top1=0.81234),
        seed=5,
        runs=[dict(seed=5, test_top1=0.80), dict(seed=6, test_top1=0.82)],
        twin=dict(model="resnet20_cifar", runs=[dict(seed=5, test_top1=0.75)], difference=0.05, low=-0.01, high=0.11),
        license="apache-2.0",
        file="x",
    )
    card = render_card(record)
    for words in ("81.23 %", "(seed 5)", "81.00 ± 1.41 %", "75.00 %", "+5.00 [-1.00, +11.00]", "ant, bee"):
        assert words in card, words
    assert "center=True" in card and "does not depend on the rest of its batch" in card
    twin = render_card({**record, "architecture": "resnet20_cifar"})
    assert "does not depend on the rest of its batch" not in twin and "center=" not in twin


def row(method, score, test):
    final = {seed: dict(metrics=dict(test_top1=value, diverged=False), phase="final") for seed, value in test.items()}
    return Row(method, None, Choice({"lr": 1.0}, [({"lr": 1.0}, score)]), [], final)


def test_goals_compare_the_methods_that_validation_chose():
    rows = {"a": row("a", 0.5, {0: 0.1}), "b": row("b", 0.6, {0: 0.2})}
    assert results.best(rows, ("a", "b")).method == "b"
    assert results.best(rows, ("a", "b", "c")) is None
    rows["b"].choice = None
    assert results.best(rows, ("a", "b")) is None


@pytest.mark.parametrize(
    "difference, word",
    [
        (None, "open (0 of 3"),
        (Paired(0.1, 2, 0.05, 0.15), "open (2 of 3"),
        (Paired(0.01, 3, -0.002, 0.02), "**met**"),
        (Paired(0.01, 3, -0.004, 0.02), "**not shown**"),
        (Paired(-0.01, 3, -0.02, -0.004), "**missed**"),
    ],
)
def test_verdicts(difference, word):
    goal = results.Goal("s", "text", ("a",), ("b",), margin=-0.003)
    assert results.verdict(goal, difference).startswith(word)


def test_the_page_is_what_the_ledgers_say():
    assert results.main(["--check"]) == 0


def test_a_goal_of_epochs():
    """Medians of the runs; ours has to reach the mark in every run."""
    goal = results.Goal("s", "text", ("a",), ("b",), margin=0.0, share=1.0)
    sweep = types.SimpleNamespace(thresholds=[0.8, 1.0])

    def row(method: str, *last: object) -> harness.Row:
        return harness.Row(method, "b", None, [], {0: {}, 1: {}, 2: {}}, times=[(1, 1.0, 3, 3), last])

    scratch = row("b", 6, 30.0, 2, 3)
    assert results.epochs_goal(goal, sweep, row("a", 2, 9.0, 3, 3), scratch) == (
        "2 epochs against 6",
        "3: `a`, `b`",
        "**met**",
    )
    for missed in [(6, 9.0, 3, 3), (2, 9.0, 2, 3), (None, None, 0, 3)]:
        assert results.epochs_goal(goal, sweep, row("a", *missed), scratch)[2] == "**missed**"
    assert results.epochs_goal(goal, sweep, None, scratch)[2] == "open (0 of 3 pairs)"


def test_every_goal_names_methods_that_its_sweep_has():
    for goal in results.GOALS:
        sweep = harness.Sweep(results.SWEEPS / f"{goal.sweep}.yaml")
        sweep.check_methods("goal", goal.ours + goal.peers)
        assert goal.share is None or goal.share in sweep.thresholds
    with pytest.raises(RecipeError):
        sweep.check_methods("goal", ["no such method"])


def test_a_run_folder_loads_in_transformers(swept, tmp_path):
    transformers = pytest.importorskip("transformers")
    import timm

    lines = [json.loads(line) for line in swept.with_suffix(".jsonl").read_text().splitlines()]
    key = next(line["key"] for line in lines if line["method"] == "affine" and line["phase"] == "final")
    folder = str(tmp_path / "runs" / "toy" / key)
    model = transformers.AutoModelForImageClassification.from_pretrained(folder)
    assert type(model).__name__ == "AffDivForImageClassification" and model.config.id2label[7] == "7"
    images = release.synthetic_images((1, 8, 8))
    with torch.no_grad():
        ours = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()(images)
        assert torch.equal(model(images).logits, ours)
