"""The command line, the YAML file, and what each option of train.py does to the training."""

import csv
import json
import math
import re
from pathlib import Path

import pytest
import timm
import torch
import yaml
from safetensors.torch import load_file

pytest.importorskip("accelerate")
pytest.importorskip("sklearn")

import building  # noqa: E402
import data as recipe_data  # noqa: E402
import engine  # noqa: E402
import evaluation  # noqa: E402
import options  # noqa: E402
import records  # noqa: E402
import train as recipe  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from launching import Launch  # noqa: E402

pytestmark = pytest.mark.usefixtures("clean_process")

QUIET = ("--no-progress", "--no-plot")
PATCHNORM = ("--model", "mlp_cifar_affine", "--model-kwargs", "width=16", "depth=2")
BATCHNORM = ("--model", "mlp_cifar", "--model-kwargs", "width=16", "depth=2", "norm=batch")
# Plain SGD, which makes no difference of the gradients' last bits larger than they are.
SGD = ("--opt", "momentum", "--momentum", 0, "--weight-decay", 0, "--lr", 0.1)


def train(output: Path, *arguments: object) -> dict:
    """Trains in this process and returns the run's results."""
    status = recipe.main([*map(str, arguments), *QUIET, "--output", str(output)])
    AcceleratorState._reset_state(True)
    assert status == 0
    return json.loads((output / "results.json").read_text())


def weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "model.safetensors")


def rows(output: Path) -> list[dict[str, str]]:
    with open(output / "log.csv", newline="") as file:
        return list(csv.DictReader(file))


def error_of(arguments: tuple, capsys: pytest.CaptureFixture) -> str:
    """Runs with a mistake and returns its one line."""
    try:
        status = recipe.main(list(map(str, arguments)))
    except SystemExit as stop:
        status = stop.code
    finally:
        AcceleratorState._reset_state(True)
    stderr = capsys.readouterr().err
    assert status == 2 and stderr.count("\n") == 1, stderr
    return stderr


# --------------------------------------------------------------------------------------------------------------------
# The command line and the file
# --------------------------------------------------------------------------------------------------------------------


def test_help_fits_the_screen_and_shows_every_default(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "112")
    parser = recipe.build_parser()
    text = parser.format_help()
    assert max(map(len, text.splitlines())) <= 110
    titles = re.findall(r"^(\S[^:\n]*):$", text, re.MULTILINE)
    expected = ["model", "data", "augmentation", "training", "optimizer", "schedule", "loss and averaging"]
    assert titles == ["options", *expected, "evaluation", "checkpoints", "output"]
    joined = re.sub(r"\s+", " ", text)
    for action in parser._actions:
        assert action.help, action.dest
        if action.default not in (None, [], "==SUPPRESS==") and action.default is not False:
            assert f"(default: {action.default})" in joined, action.dest
    assert "--no-model-ema " not in text.split("A switch such as")[0]  # one form of each flag is enough


def test_command_line_goes_before_the_file_and_the_resolved_arguments_are_saved(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text(
        "model: mlp_cifar\nmodel-kwargs: {width: 16, depth: 2, norm: batch}\nlr: 1e-3\nepochs: 2\nmodel_ema: true\n"
        "mixed_precision: no\nopt_betas: [0.8, 0.9]\nworkers: null\nchannels_last: false\n"
    )
    command = ("--config", tmp_path / "mine.yaml", "--epochs", 1, "--no-model-ema", "--model-kwargs", "norm=none")
    train(tmp_path / "first", *command)
    saved = yaml.safe_load((tmp_path / "first" / "args.yaml").read_text())
    assert saved["model_kwargs"] == dict(width=16, depth=2, norm="none")
    assert (saved["lr"], saved["epochs"], saved["model_ema"], saved["opt_betas"]) == (1e-3, 1, False, [0.8, 0.9])
    assert saved["mixed_precision"] == "no"
    everything = set(vars(recipe.parse_args([])))
    assert set(saved) == everything - {"config", "output", "overwrite", "resume", "no_progress"}
    train(tmp_path / "again", "--config", tmp_path / "first" / "args.yaml")
    for key, value in weights(tmp_path / "first").items():
        assert torch.equal(value, weights(tmp_path / "again")[key])


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("learning_rate: 1", ["'learning_rate'", "no option"]),
        ("batchsize: 1", ["'batchsize'", "batch_size"]),
        ("lr: -1", ["argument --lr", "'-1'"]),
        ("sched: wavy", ["argument --sched", "'wavy'", "cosine"]),
        ("overwrite: 3", ["--overwrite"]),
        ("- lr", ["no options"]),
        ("lr: [", ["cannot be read"]),
    ],
)
def test_mistakes_in_the_file_are_one_line_that_names_it(text: str, parts: list[str], tmp_path: Path, capsys):
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    message = error_of(("--config", file, "--output", tmp_path / "run"), capsys)
    for part in ("train.py: error: --config", str(file), *parts):
        assert part in message
    assert "--config" in error_of(("--config", tmp_path / "missing.yaml"), capsys)


@pytest.mark.parametrize("file", sorted((Path(options.__file__).parent / "configs").glob("*.yaml")))
def test_configs_are_complete_commands(file: Path):
    args = recipe.parse_args(["--config", str(file)])
    building.check_names(args)
    assert file.stem.startswith(args.model)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--batch-size", 7, "--mixup", 0.2), ["--batch-size 7", "even"]),
        (("--train-limit", 20, "--cutmix", 1), ["--batch-size 64", "whole batch"]),
        (("--bce-target-thresh", 0.1), ["--bce-target-thresh", "--bce-loss"]),
        (("--patience", 2, "--test", "end"), ["--patience", "--val-fraction"]),
        (("--aa", "rand-x9"), ["--aa 'rand-x9'"]),
        ((*BATCHNORM, "--drop-path", 0.5), ["--drop-path 0.5", "mlp_cifar"]),
        (("--torchcompile", "fast"), ["--torchcompile 'fast'", "inductor"]),
    ],
)
def test_mistaken_options_are_one_line_and_leave_nothing(arguments: tuple, parts: list[str], tmp_path: Path, capsys):
    message = error_of((*arguments, *QUIET, "--output", tmp_path / "runs" / "run"), capsys)
    for part in parts:
        assert part in message
    assert not list(tmp_path.glob("runs/*"))


# --------------------------------------------------------------------------------------------------------------------
# Training
# --------------------------------------------------------------------------------------------------------------------


def reference_training(argv: tuple, groups: list[list[int]], clip: float | None = None) -> dict[str, torch.Tensor]:
    """Trains as plainly as possible, with one gradient of all images in each group of batches, and a constant rate."""
    args = recipe.parse_args(list(map(str, argv)))
    torch.manual_seed(args.seed)
    dataset = recipe_data.load_data(args, {})
    model = building.build_model(args, dataset)
    # The run's own order of images.
    accelerator = recipe.Accelerator(
        dataloader_config=recipe.DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed)
    )
    loader = accelerator.prepare(engine.build_loaders(args, dataset, 1)[0])
    batches = list(loader)
    for group in groups:
        images, labels = (torch.cat([batches[number][part] for number in group]) for part in (0, 1))
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        model.zero_grad()
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= args.lr * parameter.grad
    return model.state_dict()


@pytest.mark.parametrize("clip", [None, 0.1])
def test_accumulated_batches_are_one_gradient_of_all_their_images(tmp_path: Path, clip: float | None):
    """With five batches in an epoch, the last of three groups is one batch alone, and counts as a whole."""
    common = (*PATCHNORM, *SGD, "--sched", "constant", "--warmup-fraction", 0, "--epochs", 1)
    common += ("--train-limit", 80, "--batch-size", 16, *(("--clip-grad", clip) if clip else ()))
    results = train(tmp_path / "run", *common, "--grad-accum-steps", 2)
    assert results["updates"] == 3
    expected = reference_training(common, [[0, 1], [2, 3], [4]], clip)
    for key, value in weights(tmp_path / "run").items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-6)


def test_schedules_at_known_moments():
    def rates(*argv: object) -> list[float]:
        args = recipe.parse_args(["--lr", "0.5", *map(str, argv)])
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=args.lr)
        scheduler = building.build_scheduler(args, optimizer, total=100, updates_per_epoch=10)
        values = [optimizer.param_groups[0]["lr"]]
        for update in range(1, 100):
            scheduler.step_update(update)
            values.append(optimizer.param_groups[0]["lr"])
        return values

    cosine = rates("--warmup-epochs", 2, "--min-lr", 0.1, "--warmup-lr", 0.25)
    assert cosine[0] == 0.25 and cosine[10] == pytest.approx(0.375)  # half way up
    assert max(cosine) == pytest.approx(0.5, abs=0.04)
    assert cosine[50] == pytest.approx(0.1 + 0.4 * (1 + math.cos(math.pi * 50 / 100)) / 2)
    assert cosine[99] == pytest.approx(0.1, abs=1e-3)
    linear = rates("--sched", "linear", "--warmup-fraction", 0)
    assert linear[25] == pytest.approx(0.375) and linear[75] == pytest.approx(0.125)
    constant = rates("--sched", "constant", "--warmup-fraction", 0.1)
    assert constant[0] == 0.005 and set(constant[10:]) == {0.5}


def test_layer_decay_falls_from_the_head_to_the_stem():
    args = recipe.parse_args(["--layer-decay", "0.5", "--opt", "adamw"])
    model = timm.create_model("resnet20_cifar_patchnorm", num_classes=10)
    scales = {id(p): group["lr_scale"] for group in building.build_optimizer(args, model).param_groups
              for p in group["params"]}  # fmt: skip
    order = [scales[id(p)] for p in (model.conv1.weight, model.layer1[0].conv1.weight, model.fc.weight)]
    assert order[0] < order[1] < order[2] == 1
    ratios = [math.log2(value) for value in set(scales.values())]
    assert all(ratio == int(ratio) for ratio in ratios)


def test_more_training_options_reach_the_training(tmp_path: Path):
    """Each option alone has to change the weights that a run without it gives."""
    common = (*BATCHNORM, "--hflip", 0.5, "--workers", 0, "--max-steps", 2)
    common += ("--batch-size", 16, "--train-limit", 64, "--test", "never", "--val-fraction", 0.01)
    train(tmp_path / "plain", *common)
    for number, option in enumerate(
        (
            *(("--aa", "rand-m9-n2"), ("--reprob", 1), ("--scale", 0.2, 0.3), ("--vflip", 1), ("--mixup", 1)),
            *(("--cutmix", 1), ("--bce-loss",), ("--model-ema", "--model-ema-decay", 0.5), ("--opt-eps", 1)),
            *(("--opt-betas", 0.1, 0.1), ("--layer-decay", 0.5), ("--clip-grad", 1e-3, "--clip-mode", "value")),
            *(("--clip-grad", 1e-4, "--clip-mode", "agc"), ("--drop", 0.5)),
        )
    ):
        train(tmp_path / str(number), *common, *option)
        same = [torch.equal(value, weights(tmp_path / str(number))[key]) for key, value in
                weights(tmp_path / "plain").items() if value.is_floating_point()]  # fmt: skip
        assert not all(same), option


def test_what_must_not_change_the_weights_does_not(tmp_path: Path):
    common = ("--model", "resnet20_cifar_patchnorm", "--max-steps", 3, "--batch-size", 16, "--train-limit", 64)
    common += ("--test", "end")
    train(tmp_path / "plain", *common)
    plain = weights(tmp_path / "plain")
    # The averages of one update are that update's weights, and Mixup that mixes nothing leaves plain smoothing.
    for name, option, tolerance in (
        ("checkpointing", ("--grad-checkpointing",), 1e-5),
        ("ema", ("--model-ema", "--model-ema-decay", 0), 0),
        ("saving", ("--checkpoint-steps", 1, "--check-interval", 2), 0),
    ):
        train(tmp_path / name, *common, *option)
        for key, value in weights(tmp_path / name).items():
            torch.testing.assert_close(value, plain[key], rtol=tolerance, atol=tolerance)
    train(tmp_path / "smooth", *common, *SGD, "--label-smoothing", 0.2)
    train(tmp_path / "mixed", *common, *SGD, "--smoothing", 0.2, "--mixup", 1, "--mixup-prob", 0)
    for key, value in weights(tmp_path / "mixed").items():
        torch.testing.assert_close(value, weights(tmp_path / "smooth")[key], rtol=1e-4, atol=1e-6)


def test_compiled_training_is_the_same(tmp_path: Path):
    common = (*PATCHNORM, "--max-steps", 3, "--train-limit", 96, "--batch-size", 32)
    train(tmp_path / "plain", *common)
    train(tmp_path / "compiled", *common, "--torchcompile", "eager")
    for key, value in weights(tmp_path / "plain").items():
        torch.testing.assert_close(value, weights(tmp_path / "compiled")[key], rtol=1e-5, atol=1e-6)


def test_the_average_is_what_is_evaluated_and_saved(tmp_path: Path):
    results = train(tmp_path / "run", *BATCHNORM, "--epochs", 2, "--model-ema", "--model-ema-decay", 0.8)
    assert results["weights"] == "average"
    model = timm.create_model(f"local-dir:{tmp_path / 'run'}", pretrained=True).eval()
    test = recipe_data.load_data(recipe.parse_args([]), {}).test
    images, labels = test.__getitems__(range(len(test)))
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(images), labels).item()
    assert results["test_loss"] == pytest.approx(loss, rel=1e-5)


def test_best_weights_are_those_of_the_best_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    results_of = iter([(1.0, 0.1, 359), (0.5, 0.3, 359), (0.8, 0.5, 359), (0.6, 0.4, 359)])
    monkeypatch.setattr(engine, "evaluate", lambda *_: next(results_of))
    arguments = (*BATCHNORM, "--train-limit", 96, "--epochs", 4, "--keep-checkpoints", "--checkpoint-hist", 9)
    for metric, best in (("loss", 2), ("top1", 3)):
        results = train(tmp_path / metric, *arguments, "--eval-metric", metric)
        assert results["best_test_epoch"] == best
        there = load_file(tmp_path / metric / "checkpoints" / f"epoch-{best:04d}-batch-000000" / "model.safetensors")
        for key, value in weights(tmp_path / metric / "best").items():
            assert torch.equal(value, there[key])
        results_of = iter([(1.0, 0.1, 359), (0.5, 0.3, 359), (0.8, 0.5, 359), (0.6, 0.4, 359)])


def test_early_stop_and_evaluation_now_and_then(tmp_path: Path):
    # The weights hardly move, so no evaluation is better than the first.
    results = train(tmp_path / "early", *PATCHNORM, "--epochs", 9, "--lr", 1e-12, "--patience", 2, "--train-limit", 64)
    assert results["epochs"] == 3 == len(rows(tmp_path / "early"))
    train(tmp_path / "seldom", *BATCHNORM, "--epochs", 5, "--val-interval", 2, "--train-limit", 64)
    assert [row["test_top1"] != "" for row in rows(tmp_path / "seldom")] == [False, True, False, True, True]


# --------------------------------------------------------------------------------------------------------------------
# Two processes
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # a minute: four runs, two of them of two processes
def test_two_processes_are_one_with_the_same_batch_for_patchnorm_and_not_for_batchnorm(tmp_path: Path):
    # Few updates: what rounding makes different at first, training makes larger and larger.
    common = (*SGD, "--lr", 0.01, "--epochs", 2, "--train-limit", 96, "--test", "end", *QUIET)
    nets = dict(
        patchnorm=("--model", "resnet20_cifar_patchnorm"),
        batchnorm=("--model", "resnet20_cifar"),
    )
    difference = {}
    for name, model in nets.items():
        launches = [
            Launch(
                [*model, *common, "--batch-size", 32 // processes, "--output", tmp_path / f"{name}{processes}"],
                tmp_path / f"{name}{processes}.log",
                processes,
            )
            for processes in (1, 2)
        ]
        for launch in launches:
            assert set(launch.wait()) == {0}, launch.said()
        one, two = ([float(row["train_loss"]) for row in rows(tmp_path / f"{name}{number}")] for number in (1, 2))
        assert len(one) == 2
        difference[name] = max(abs(a - b) / a for a, b in zip(one, two, strict=True))
        assert json.loads((tmp_path / f"{name}2" / "results.json").read_text())["processes"] == 2
    assert difference["patchnorm"] < 1e-5
    assert difference["batchnorm"] > 5e-5
    # And so are the weights.
    first = weights(tmp_path / "patchnorm1")
    for key, value in weights(tmp_path / "patchnorm2").items():
        torch.testing.assert_close(value, first[key], rtol=1e-3, atol=1e-4)


# --------------------------------------------------------------------------------------------------------------------
# A loss that is not finite
# --------------------------------------------------------------------------------------------------------------------


def spoiled(layer: str, after: int, value: float = math.inf):
    """Makes train.py's model, with a layer whose output is spoiled from its n-th forward pass in training on."""

    def build(args, data):
        model = building.build_model(args, data)
        count = iter(range(10_000))

        def hook(module, inputs, output):
            return output + value if module.training and next(count) >= after else output

        model.get_submodule(layer).register_forward_hook(hook)
        return model

    return build


def test_divergence_names_step_rate_and_the_layer_that_was_first(tmp_path: Path):
    args = recipe.parse_args(
        ["--model", "resnet20_cifar", "--train-limit", "96", "--batch-size", "32", "--test", "end", "--lr", "0.5"]
        + ["--sched", "constant", "--warmup-fraction", "0", "--no-progress"]
    )
    data = recipe_data.load_data(args, {})
    with pytest.raises(engine.DivergedError) as caught:
        recipe.fit(args, data, tmp_path / "run", build=spoiled("layer2.0.conv1", after=4))
    message = str(caught.value)
    assert caught.value.epoch == 2 and len(caught.value.rows) == 1
    for part in ("epoch 2", "update 5 of 60", "rate of 0.5", "'layer2.0.conv1'", "Conv2d", "--clip-grad 1"):
        assert part in message
    # The last checkpoint is of the epoch before.
    assert [path.name for path in recipe.RunFolder(tmp_path / "run").names()] == ["epoch-0001-batch-000000"]


def test_the_cause_of_a_loss_that_is_not_finite():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(2, 2)))
    images = torch.ones(3, 2)
    assert "only the loss" in evaluation.find_nonfinite(model, images)
    assert "images themselves" in evaluation.find_nonfinite(model, images / 0)
    with torch.no_grad():
        model[1][1].weight[0, 0] = math.nan
    found = evaluation.find_nonfinite(model, images)
    assert "'1.1' (Linear)" in found and "weights are not finite" in found
    assert not any(module._forward_hooks for module in model.modules())


# --------------------------------------------------------------------------------------------------------------------
# What is told of a run
# --------------------------------------------------------------------------------------------------------------------


def test_tensorboard_gets_losses_rates_and_accuracies(tmp_path: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    arguments = (*BATCHNORM, "--epochs", 2, "--train-limit", 128, "--tracker", "tensorboard", "--log-interval", 1)
    train(tmp_path / "run", *arguments, "--project", "digits")
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "digits"))
    events.Reload()
    assert {"train/loss", "lr", "train/top1", "test/top1", "test/loss"} <= set(events.Tags()["scalars"])
    top1 = [(event.step, event.value) for event in events.Scalars("test/top1")]
    log = rows(tmp_path / "run")
    assert top1 == [(2, pytest.approx(float(log[0]["test_top1"]))), (4, pytest.approx(float(log[1]["test_top1"])))]
    assert len(events.Scalars("lr")) == 4


@pytest.mark.parametrize("tracker", options.TRACKERS)
def test_a_missing_tracker_is_one_line(tracker: str, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setitem(records.AVAILABLE, tracker, lambda: False)
    message = error_of((*BATCHNORM, "--tracker", tracker, "--output", tmp_path / "run"), capsys)
    assert f"--tracker {tracker}" in message and f"pip install {tracker}" in message
    assert not list(tmp_path.iterdir())


def test_plot_is_a_picture_and_needs_no_more_than_the_log(tmp_path: Path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    from PIL import Image

    log = [
        dict(epoch=1, train_loss=2.0, train_top1=0.1, test_loss=None, test_top1=None, lr=0.1, seconds=1.0),
        dict(epoch=2, train_loss=1.0, train_top1=0.5, test_loss=1.5, test_top1=0.4, lr=0.0, seconds=1.0),
    ]
    records.draw_plot(tmp_path / "plot.png", log, "a net on some data")
    with Image.open(tmp_path / "plot.png") as picture:
        assert picture.format == "PNG" and picture.width > 2 * picture.height
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 100  # something is drawn
    assert [path.name for path in tmp_path.iterdir()] == ["plot.png"]
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    records.draw_plot(tmp_path / "none.png", log, "without matplotlib")
    assert "pip install matplotlib" in capsys.readouterr().err and not (tmp_path / "none.png").exists()
