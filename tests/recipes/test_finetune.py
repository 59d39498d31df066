"""recipes/finetune.py: what becomes of head, input, frozen parts and conversion; distillation; runs that come back."""

import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch

pytest.importorskip("accelerate")
pytest.importorskip("datasets")
pytest.importorskip("sklearn")

import evaluate  # noqa: E402
import finetune as recipe  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from building import build_optimizer  # noqa: E402
from data import RecipeError, find_digits, stratified_split  # noqa: E402
from engine import Trainer  # noqa: E402
from pictures import (  # noqa: E402
    LAUNCH,
    NAMES,
    ROOT,
    picture,
    run_script,
    save_random_model,
    write_classes,
    write_shards,
)
from safetensors.torch import load_file  # noqa: E402
from timm.data import create_transform, resolve_data_config  # noqa: E402

import affdiv_zoo  # noqa: E402

pytestmark = pytest.mark.usefixtures("clean_process")
QUIET = ["--no-progress", "--no-plot"]
STILL = ["--max-steps", "1", "--lr", "1e-12", "--weight-decay", "0"]  # an update that changes nothing visible
SMALL = ["--dataset", "set", "--batch-size", "8", "--augment", "none"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in: images of two classes; a trained ResNet and ViT of three, and a ResNet of the same two."""
    write_classes(tmp_path / "set" / "train", 8)
    write_classes(tmp_path / "set" / "test", 5)
    save_random_model(tmp_path / "resnet", ["a", "b", "c"])
    save_random_model(tmp_path / "same", list(NAMES))
    save_random_model(tmp_path / "vit", ["a", "b", "c"], side=32, name="vit_nano_patch4_32")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def finetune(model: str, *arguments: str, output: str = "run", dataset: bool = True) -> dict:
    """Fine-tunes in this process and returns the results."""
    argv = ["--model", model, *(SMALL if dataset else []), *arguments, *QUIET, "--output", output, "--overwrite"]
    assert recipe.main(argv) == 0
    AcceleratorState._reset_state(True)
    return json.loads((Path(output) / "results.json").read_text())


def weights(folder: str) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "model.safetensors")


def error_of(argv: list[str], capsys: pytest.CaptureFixture) -> str:
    """Runs with a mistake and returns its message, after checking its form."""
    capsys.readouterr()
    try:
        status = recipe.main([*argv, *QUIET])
    except SystemExit as stop:  # argparse's own errors
        status = stop.code
    stderr = capsys.readouterr().err
    assert status == 2
    assert stderr.startswith("finetune.py: error: ") and stderr.count("\n") == 1, stderr
    return stderr.removeprefix("finetune.py: error: ")


def build(*arguments: str) -> tuple[recipe.FineTuning, torch.nn.Module, object]:
    """The model of a run, before its training."""
    args = recipe.parse_args([*SMALL, *arguments])
    name = recipe.complete_name(args.model)
    data = recipe.load_images(args, recipe.saved_config(name)[0])
    tuning = recipe.FineTuning(args, name, args.teacher and recipe.complete_name(args.teacher))
    return tuning, tuning.build(args, data), data


# --------------------------------------------------------------------------------------------------------------------
# Head, input, preprocessing
# --------------------------------------------------------------------------------------------------------------------


def test_the_head_is_new_and_the_rest_is_kept(here: Path):
    results = finetune("resnet", *STILL)
    old, new = weights("resnet"), weights("run")
    assert new.keys() == old.keys()
    assert new["fc.weight"].shape == (2, 64)
    for key in old:
        if not key.startswith("fc.") and "running" not in key and "num_batches" not in key:
            torch.testing.assert_close(new[key], old[key], rtol=0, atol=1e-9)
    model = timm.create_model("local-dir:run", pretrained=True)
    assert model.pretrained_cfg["label_names"] == list(NAMES)
    assert results["arguments"]["layer_decay"] == 0.9


def test_a_head_of_as_many_classes_is_new_too_unless_it_is_kept(here: Path):
    finetune("same", *STILL)
    assert not torch.allclose(weights("run")["fc.weight"], weights("same")["fc.weight"], atol=1e-3)
    finetune("same", *STILL, "--keep-head")
    torch.testing.assert_close(weights("run")["fc.weight"], weights("same")["fc.weight"], rtol=0, atol=1e-9)


def test_digits_become_gray_images_of_the_models_size(here: Path):
    results = finetune("resnet", *STILL, "--dataset", "digits", "--train-limit", "64", dataset=False)
    assert results["input"]["input_size"] == [1, 16, 16]
    torch.testing.assert_close(
        weights("run")["conv1.weight"], weights("resnet")["conv1.weight"].sum(1, keepdim=True), rtol=0, atol=1e-6
    )
    # timm's transform on one of them gives the same pixels: what evaluate.py and others will see.
    args = recipe.parse_args(["--model", "resnet", "--dataset", "digits"])
    data = recipe.load_images(args, recipe.saved_config("local-dir:resnet")[0])
    transform = create_transform(**resolve_data_config({}, model=timm.create_model("local-dir:run", pretrained=True)))
    from sklearn.datasets import load_digits

    _, held_out = stratified_split(find_digits().train.labels, 0.2, 0)
    image = np.rint(load_digits().images[held_out[3]] * (255 / 16)).astype(np.uint8)
    own = data.test[3][0] * data.config["std"][0] + data.config["mean"][0]
    run = json.loads(Path("run/results.json").read_text())["input"]
    theirs = transform(recipe.Image.fromarray(image)) * run["std"][0] + run["mean"][0]
    torch.testing.assert_close(own, theirs, rtol=0, atol=1e-5)


def test_colour_images_are_normalised_as_the_model_knows_it(here: Path):
    results = finetune("resnet", *STILL)
    assert results["input"]["mean"] == [0.5] * 3 and results["input"]["std"] == [0.25] * 3
    args = recipe.parse_args([*SMALL, "--model", "resnet"])
    data = recipe.load_images(args, recipe.saved_config("local-dir:resnet")[0])
    transform = create_transform(**resolve_data_config({}, model=timm.create_model("local-dir:resnet")))
    torch.testing.assert_close(data.test[0][0], transform(picture(0, 0)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("arguments", [[], ["--convert", "affine"], ["--img-size", "24"]], ids=" ".join)
@pytest.mark.parametrize("model", ["resnet", "vit"])
def test_a_runs_folder_gives_the_same_accuracy_in_evaluate(here: Path, model: str, arguments: list[str]):
    """Architecture, plan of the conversion, classes, size and normalisation all have to come back."""
    results = finetune(model, "--max-steps", "3", "--lr", "1e-3", *arguments)
    argv = ["--model", "run", "--results", "results.json", "--no-progress", "--workers", "0"]
    assert evaluate.main(argv) == 0
    again = json.loads(Path("results.json").read_text())
    assert again["images"] == results["test_images"] == 10
    assert again["top1"] == results["test_top1"]
    assert again["loss"] == pytest.approx(results["test_loss"], rel=1e-4)
    config = json.loads(Path("run/config.json").read_text())
    assert (config["architecture"] == "affdiv_converted") == ("--convert" in arguments)


def test_a_converted_folder_is_fine_tuned(here: Path):
    """Of finetune.py or of `affdiv-zoo convert`: the corrected head takes the new number of classes."""
    finetune("vit", "--convert", "norm", *STILL, output="converted")
    for name in ("x", "y", "z"):
        (here / "three" / "train" / name).mkdir(parents=True)
        (here / "three" / "test" / name).mkdir(parents=True)
        for index in range(4):
            picture(0, index, 32).save(here / "three" / "train" / name / f"{index}.png")
            picture(1, index, 32).save(here / "three" / "test" / name / f"{index}.png")
    finetune("converted", *STILL, "--dataset", "three", "--batch-size", "4", dataset=False)
    old, new = weights("converted"), weights("run")
    assert new["head.weight"].shape == (3, 96)
    torch.testing.assert_close(new["blocks.0.attn.qkv.weight"], old["blocks.0.attn.qkv.weight"], rtol=0, atol=1e-9)
    model = timm.create_model("local-dir:run", pretrained=True)
    assert type(model.head) is type(model.blocks[0].mlp.fc1)  # corrected still


# --------------------------------------------------------------------------------------------------------------------
# Rates, freezing
# --------------------------------------------------------------------------------------------------------------------


def test_rates_fall_towards_the_input(here: Path):
    _, model, _ = build("--model", "vit")
    args = recipe.parse_args([*SMALL, "--model", "vit", "--layer-decay", "0.75"])
    scales = {}
    for group in build_optimizer(args, model).param_groups:
        for parameter in group["params"]:
            scales[id(parameter)] = group["lr_scale"]
    named = dict(model.named_parameters())
    assert scales[id(named["head.weight"])] == 1
    assert scales[id(named["blocks.5.mlp.fc1.weight"])] == pytest.approx(0.75)
    assert scales[id(named["blocks.0.mlp.fc1.weight"])] == pytest.approx(0.75**6)


def test_frozen_patterns_stay_bit_by_bit_and_their_statistics_too(here: Path):
    finetune("resnet", "--max-steps", "3", "--freeze", "conv1*", "bn1*", "layer1.*")
    old, new = weights("resnet"), weights("run")
    for key in old:
        frozen = key.startswith(("conv1", "bn1", "layer1"))
        if key.startswith("fc."):
            continue
        assert torch.equal(old[key], new[key]) == frozen, key


def test_frozen_stages_are_the_stem_and_the_first_ones(here: Path):
    _, model, _ = build("--model", "resnet", "--freeze-stages", "2")
    frozen = {name.split(".")[0] for name, parameter in model.named_parameters() if not parameter.requires_grad}
    trained = {name.split(".")[0] for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert frozen == {"conv1", "bn1", "layer1"}
    assert trained == {"layer2", "layer3", "fc"}
    model.train()
    model(torch.randn(4, 3, 16, 16))
    assert not model.layer1[0].bn1.training and model.layer2[0].bn1.training


# --------------------------------------------------------------------------------------------------------------------
# Conversion and distillation
# --------------------------------------------------------------------------------------------------------------------


def test_an_exact_conversion_keeps_the_function(here: Path):
    save_random_model(here / "vit2", list(NAMES), side=32, name="vit_nano_patch4_32")
    _, plain, data = build("--model", "vit2", "--keep-head")
    _, converted, _ = build("--model", "vit2", "--keep-head", "--convert", "norm")
    images = torch.stack([data.test[index][0] for index in range(5)])
    assert sum("LayerNorm" in type(module).__name__ for module in plain.modules()) == 13
    assert not any("LayerNorm" in type(module).__name__ for module in converted.modules())
    torch.testing.assert_close(converted.eval()(images), plain.eval()(images), rtol=1e-4, atol=1e-5)


def test_the_conversion_is_fitted_on_training_images(here: Path, monkeypatch: pytest.MonkeyPatch):
    seen = []
    convert = affdiv_zoo.convert

    def spy(model, correction, center, scale, attention, example_input):
        seen.append((correction, center, scale, attention, example_input))
        return convert(model, correction, center, scale, attention, example_input)

    monkeypatch.setattr(affdiv_zoo, "convert", spy)
    options = ["--convert-center", "false", "--convert-scale", "l2", "--calibration-images", "6"]
    _, model, data = build("--model", "resnet", "--convert", "affine", *options)
    ((correction, center, scale, attention, images),) = seen
    assert (correction, center, scale, attention) == ("affine", False, "l2", "none")
    training = torch.stack([data.train[index][0] for index in range(16)])
    assert len(images) == 6 and all(any(torch.equal(image, other) for other in training) for image in images)
    assert type(model.conv1).__name__ == "PatchNormConv2d"


def test_distances():
    own, taught = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[0.0, 3.0], [0.0, 5.0]])
    assert recipe.feature_distance(own, taught) == pytest.approx(0.5)  # a right angle and none
    assert recipe.feature_distance(own, 7 * own) == pytest.approx(0, abs=1e-6)
    with pytest.raises(RecipeError, match="2 and 3 features"):
        recipe.feature_distance(own, torch.ones(2, 3))
    # KL of (3/4, 1/4) and (1/2, 1/2), at temperature 2, where the logits are doubled.
    teacher, student = 2 * torch.tensor([[3.0, 1.0]]).log(), torch.zeros(1, 2)
    expected = 4 * (0.75 * np.log(1.5) + 0.25 * np.log(0.5))
    assert recipe.logit_distance(student, teacher, 2.0) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("model", "correction"), [("resnet", "gradient"), ("vit", "norm")])
def test_features_are_compared_before_the_head_and_its_norm(here: Path, model: str, correction: str):
    """An exactly converted model has its teacher's features, also where the head has taken over the last norm."""
    tuning, student, data = build("--model", model, "--convert", correction, "--distill", "features")
    objective = tuning.make_objective(Accelerator(cpu=True), torch.nn.CrossEntropyLoss())
    assert tuning.watched() == (("fc", "fc") if model == "resnet" else ("fc_norm", "fc_norm"))
    images, labels = torch.stack([data.train[index][0] for index in range(4)]), torch.tensor([0, 0, 1, 1])

    def distance() -> torch.Tensor:
        logits = student.eval()(images)
        return objective(images, logits, labels) - torch.nn.functional.cross_entropy(logits, labels)

    assert distance().item() == pytest.approx(0, abs=1e-4)
    # Away from the teacher the distance is felt, by all of the student but its head, and not by the teacher.
    before = {key: value.clone() for key, value in tuning.teacher.state_dict().items()}
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(0.1 * parameter.std(correction=0) * torch.randn_like(parameter))
    student.zero_grad()
    loss = distance()
    assert loss.item() > 1e-3
    loss.backward()
    first = next(parameter for parameter in student.parameters() if parameter.ndim > 1)
    assert first.grad.abs().sum() > 0
    assert student.get_classifier().weight.grad.abs().max() < 1e-6
    assert all(torch.equal(before[key], value) for key, value in tuning.teacher.state_dict().items())
    assert all(parameter.grad is None for parameter in tuning.teacher.parameters())


def test_logits_are_compared_with_a_teacher_of_the_same_classes(here: Path):
    options = ["--distill", "logits", "--distill-weight", "3", "--distill-temperature", "1"]
    tuning, student, data = build("--model", "resnet", "--teacher", "same", *options)
    objective = tuning.make_objective(Accelerator(cpu=True), torch.nn.CrossEntropyLoss())
    images, labels = torch.stack([data.train[index][0] for index in range(4)]), torch.tensor([0, 0, 1, 1])
    logits = student(images)
    teacher = timm.create_model("local-dir:same", pretrained=True).eval()
    with torch.no_grad():
        target = teacher(images).softmax(1)
    entropy = -(target * target.log()).sum(1).mean()
    cross = -(target * logits.log_softmax(1)).sum(1).mean()
    expected = torch.nn.functional.cross_entropy(logits, labels) + 3 * (cross - entropy)
    assert objective(images, logits, labels).item() == pytest.approx(expected.item(), rel=1e-5)


# --------------------------------------------------------------------------------------------------------------------
# Whole runs
# --------------------------------------------------------------------------------------------------------------------


def test_a_stopped_run_goes_on_bit_by_bit(here: Path, monkeypatch: pytest.MonkeyPatch, capfd):
    options = ["--convert", "affine", "--distill", "features", "--freeze-stages", "1", "--epochs", "3", "--model-ema"]
    finetune("resnet", *options, output="whole")
    train_batch = Trainer.train_batch

    def stopped(self, batch, *arguments):
        train_batch(self, batch, *arguments)
        if (self.position.epoch, batch) == (1, 0):
            self.stop.number = 15

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_batch", stopped)
        assert recipe.main(["--model", "resnet", *SMALL, *options, *QUIET, "--output", "parts"]) == 128 + 15
    AcceleratorState._reset_state(True)
    capfd.readouterr()
    assert recipe.main(["--model", "resnet", *SMALL, *options, *QUIET, "--output", "parts", "--resume", "auto"]) == 0
    assert "resumed from" in capfd.readouterr().out
    one, two = weights("whole"), weights("parts")
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.slow
def test_two_processes_convert_and_distill(here: Path):
    launch = [*LAUNCH, "--quiet", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
    options = ["--convert", "affine", "--distill", "features", "--max-steps", "2", "--output", "run", *QUIET]
    script = [str(ROOT / "recipes" / "finetune.py"), "--model", "resnet", *SMALL]
    done = run_script([*launch, *script, *options], here, ACCELERATE_USE_CPU="true")
    assert done.returncode == 0, done.stderr
    assert json.loads((here / "run" / "results.json").read_text())["processes"] == 2
    assert done.stdout.count("swapped") == 1
    assert timm.create_model("local-dir:run", pretrained=True).num_classes == 2


def test_streams_are_fine_tuned(here: Path):
    write_shards(here / "shards", (6, 6))
    write_shards(here / "shards", (3,), "test")
    stream = ["--dataset", "shards", "--streaming", "--num-classes", "2", "--batch-size", "4", "--workers", "0"]
    results = finetune("resnet", *stream, "--convert", "affine", "--epochs", "1", dataset=False)
    assert results["updates"] == 3
    assert results["test_images"] == 3


def test_the_default_starts_from_bundled_weights_offline(here: Path):
    results = finetune(recipe.DEFAULT_MODEL, *STILL, "--train-limit", "64", dataset=False)
    assert results["dataset"] == "digits"
    old = timm.create_model(recipe.DEFAULT_MODEL, pretrained=True).state_dict()["layer1.0.conv1.weight"]
    torch.testing.assert_close(weights("run")["layer1.0.conv1.weight"], old, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_the_default_learns_digits(here: Path):
    done = run_script([*LAUNCH, str(ROOT / "recipes" / "finetune.py"), "--output", "run"], here)
    assert done.returncode == 0, done.stderr
    assert json.loads((here / "run" / "results.json").read_text())["test_top1"] >= 0.97


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "resnet20_cifar_patchnrm"], "close names: resnet20_cifar_patchnorm"),
        (["--model", "resnet32_cifar"], "has no trained weights"),
        (["--model", "nowhere/at/all"], "no such folder with a config.json"),
        (["--model", "resnet", "--teacher", "same"], "--teacher: is for --distill"),
        (["--model", "resnet", "--teacher", "nothing", "--distill", "logits"], "--teacher 'nothing' is unknown"),
        (["--model", "resnet", "--distill", "logits"], "name a --teacher with these"),
        (["--model", "same", "--teacher", "resnet", "--distill", "logits"], "--teacher 'resnet' has 3 classes"),
        (["--model", "resnet", "--keep-head"], "--keep-head: the model has 3 classes (a, b, c, ...)"),
        (["--model", "resnet", "--freeze", "conv9*"], "--freeze 'conv9*': no parameter has such a name"),
        (["--model", "resnet", "--freeze", "*"], "leaves nothing to train"),
        (["--model", "resnet", "--freeze-stages", "5"], "has 5 stages, the last of which is the head"),
        (["--model", "resnet", "--model-kwargs", "num_classes=3"], "the recipe sets that itself"),
        (["--model", "resnet", "--model-kwargs", "nothing=3"], "cannot be loaded with"),
        (["--model", "resnet", "--opt", "adamww"], "--opt 'adamww' is unknown to timm"),
        (["--model", "resnet", "--convert", "batch"], "invalid choice: 'batch'"),
        (["--model", "patchnorm", "--convert", "affine"], "cannot be converted (model is converted already"),
        (["--model", "mlp", "--convert", "affine"], "has no norm that can be swapped"),
        (["--model", "vit", "--teacher", "resnet", "--distill", "features", "--img-size", "32"], "96 and 64 features"),
    ],
)
def test_mistakes_get_one_line(here: Path, arguments: list[str], words: str, capsys):
    if "patchnorm" in arguments:
        save_random_model(here / "patchnorm", ["a", "b"], name="resnet20_cifar_patchnorm")
    if "mlp" in arguments:
        save_random_model(here / "mlp", ["a", "b"], side=32, name="mlp_cifar")
    assert words in error_of([*arguments, *SMALL, "--output", "run", "--max-steps", "1"], capsys)
    assert not (here / "run").exists()
