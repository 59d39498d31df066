"""Pushing to a loopback Hub: what goes, how it is reported, and which folders are refused."""

import json
import shutil

import pytest
import timm
import torch
from huggingface_hub import HfApi, ModelCard
from local_hub import WRITE_TOKEN, sha256
from safetensors.torch import load_file, save_file

import affdiv_zoo
from affdiv_zoo.hub import FolderError, HubError, push, push_to_hub

FILES = {"README.md", "config.json", "model.safetensors", "modeling_affdiv.py"}


def test_a_push_is_one_commit_of_weights_config_and_card(hub, client, run):
    report = push(run, "user/net")
    repo = hub.model("user/net")
    assert repo.history() == ["Add model", "initial commit"]
    assert set(repo.tree()) == FILES | {".gitattributes"}
    assert repo.tree()["model.safetensors"].lfs
    assert repo.tree()["model.safetensors"].sha256 == sha256((run / "model.safetensors").read_bytes())
    assert report.commit == repo.refs["branch"]["main"]
    assert report.states == dict.fromkeys(sorted(FILES), "new")
    assert set(report.left_out) == {"log.csv", "results.json"}
    assert not repo.private


def test_the_card_tells_the_metrics_in_the_hubs_form(hub, client, run):
    push(run, "user/net")
    data = ModelCard(hub.read("user/net", "README.md").decode()).data
    assert data.library_name == "timm"
    assert data.license == "apache-2.0"
    assert "image-classification" in data.tags
    assert [(r.metric_type, r.metric_value, r.task_type) for r in data.eval_results] == [
        ("accuracy", 87.5, "image-classification")  # test_top1 is 0.875
    ]
    card = hub.read("user/net", "README.md").decode()
    assert "hf-hub:user/net" in card
    assert "/home/me" not in card


def test_the_config_is_completed_for_transformers_and_says_how_to_prepare_images(hub, client, run):
    config = json.loads((run / "config.json").read_text())
    for key in ("model_type", "auto_map", "architectures"):  # as timm by itself leaves it
        del config[key]
    (run / "config.json").write_text(json.dumps(config))
    (run / "modeling_affdiv.py").unlink()
    push(run, "user/net")
    pushed = json.loads(hub.read("user/net", "config.json"))
    assert pushed["model_type"] == "affdiv"
    assert {"input_size", "mean", "std"} <= set(pushed["pretrained_cfg"])
    assert b"pip install affdiv-zoo" in hub.read("user/net", "modeling_affdiv.py")
    assert "model_type" not in json.loads((run / "config.json").read_text())  # the folder is left as it is


def test_the_same_again_is_no_commit(hub, client, run):
    first = push(run, "user/net")
    again = push(run, "user/net")
    assert hub.model("user/net").history() == ["Add model", "initial commit"]
    assert not again.changed
    assert again.commit == first.commit
    assert "nothing to do" in str(again)


def test_what_changed_is_sent_and_nothing_else(hub, client, run):
    push(run, "user/net")
    weights = load_file(run / "model.safetensors")
    save_file({key: value + 1 for key, value in weights.items()}, run / "model.safetensors")
    report = push(run, "user/net", commit_message="Better weights")
    assert hub.model("user/net").history()[0] == "Better weights"
    assert {path for path, state in report.states.items() if state == "changed"} == {"model.safetensors"}
    assert hub.read("user/net", "model.safetensors") == (run / "model.safetensors").read_bytes()


def test_files_of_others_stay(hub, client, run):
    push(run, "user/net")
    HfApi(token=WRITE_TOKEN).upload_file(
        path_or_fileobj=b"mine", path_in_repo="notes.txt", repo_id="user/net", commit_message="Notes"
    )
    (run / "README.md").write_text(hub.read("user/net", "README.md").decode() + "\nMore.\n")
    push(run, "user/net")
    assert hub.read("user/net", "notes.txt") == b"mine"
    assert hub.read("user/net", "README.md").endswith(b"More.\n")


def test_a_dry_run_sends_nothing(hub, client, run):
    text = str(push(run, "user/net", private=True, dry_run=True))
    assert hub.repos == {}
    assert "would be one commit to private user/net, branch main" in text
    assert all(name in text for name in FILES)
    assert {method for method, _, _ in hub.log} == {"GET"}

    push(run, "user/net")
    report = push(run, "user/net", dry_run=True)
    assert not report.changed
    (run / "README.md").write_text(hub.read("user/net", "README.md").decode() + "\nMore.\n")
    report = push(run, "user/net", dry_run=True)
    assert {path for path, state in report.states.items() if state == "changed"} == {"README.md"}
    assert report.commit is None
    assert len(hub.model("user/net").commits) == 2


def test_a_dry_run_needs_no_hub(client, run, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    report = push(run, "user/net", dry_run=True)
    assert set(report.states.values()) == {"not compared"}
    assert "HF_HUB_OFFLINE" in str(report)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE=1 is set"):
        push(run, "user/net")


def test_a_private_push(hub, client, run):
    push(run, "user/secret", private=True)
    assert hub.model("user/secret").private
    push(run, "user/open")
    with pytest.raises(HubError, match="user/open is public: make it private"):
        push(run, "user/open", private=True)
    assert hub.model("user/open").history() == ["Add model", "initial commit"]


def test_a_branch_is_made_and_main_left_alone(hub, client, run):
    push(run, "user/net", revision="feature/x")
    repo = hub.model("user/net")
    assert repo.history("feature/x") == ["Add model", "initial commit"]
    assert repo.history("main") == ["initial commit"]
    push(run, "user/net")
    assert repo.history("main") == ["Add model", "initial commit"]


def test_a_pull_request_leaves_the_branch_alone(hub, client, run):
    push(run, "user/net")
    weights = load_file(run / "model.safetensors")
    save_file({key: value + 1 for key, value in weights.items()}, run / "model.safetensors")
    report = push(run, "user/net", create_pr=True)
    repo = hub.model("user/net")
    assert repo.history() == ["Add model", "initial commit"]
    assert repo.history("refs/pr/1") == ["Add model", "Add model", "initial commit"]
    assert report.url.endswith("/user/net/discussions/1")
    assert "pull request" in str(report)


def test_a_name_that_is_none(client, run):
    with pytest.raises(HubError, match="it looks like user/name"):
        push(run, "not a name")
    with pytest.raises(HubError, match="it looks like user/name"):
        push(run, "not a name", dry_run=True)


# -- Folders that are refused: nothing is asked of the Hub -------------------------------------------------------------


def edit(path, **changes):
    data = json.loads(path.read_text())
    data.update(changes)
    path.write_text(json.dumps(data))


def edit_cfg(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    config["pretrained_cfg"].update(changes)
    (folder / "config.json").write_text(json.dumps(config))


def edit_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def write_card(folder, **changes):
    from affdiv_zoo.hub.cards import record_of, render_card

    card = ModelCard(render_card(record_of(folder)))
    for key, value in changes.items():
        setattr(card.data, key, value)
    card.save(folder / "README.md")


def other_accuracy(folder):
    from affdiv_zoo.hub.cards import record_of, render_card

    text = render_card(record_of(folder))
    assert "value: 87.5" in text
    (folder / "README.md").write_text(text.replace("value: 87.5", "value: 97.5"))


def head(weights):
    return next(key for key in weights if weights[key].shape == (3,))


REFUSED = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors is missing"),
    "pickled weights": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        "pytorch_model.bin: only safetensors are published",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    "config of another library": (lambda f: (f / "config.json").write_text("{}"), "config.json is not timm's"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), "config.json is not timm's"),
    "unknown architecture": (lambda f: edit(f / "config.json", architecture="resnet19"), "cannot make 'resnet19'"),
    "another architecture": (
        lambda f: edit(f / "config.json", architecture="mlp_cifar", model_args=dict(norm="batch", width=16, depth=2)),
        "model.safetensors lacks ",
    ),
    "another width": (
        lambda f: edit(f / "config.json", model_args={"width": 8, "depth": 2}),
        r"is \[16, 3072\], the model of config.json has \[8, 3072\]",
    ),
    "other classes in the config": (lambda f: edit(f / "config.json", num_classes=4), "num_classes is 4"),
    "other classes everywhere but in the weights": (
        lambda f: (edit(f / "config.json", num_classes=4, label_names=list("abcd")), edit_cfg(f, num_classes=4)),
        r"is \[3\], the model of config.json has \[4\]",
    ),
    "too few labels": (lambda f: edit(f / "config.json", label_names=["a", "b"]), "label_names has 2 names"),
    "no preprocessing": (lambda f: edit_cfg(f, mean=None), "pretrained_cfg has no mean"),
    "a tensor too few": (lambda f: edit_weights(f, lambda w: w.pop(head(w))), "model.safetensors lacks"),
    "a tensor too many": (
        lambda f: edit_weights(f, lambda w: w.update(extra=torch.zeros(1))),
        "model.safetensors has extra",
    ),
    "NaN": (lambda f: edit_weights(f, lambda w: w[head(w)].fill_(float("nan"))), "hold NaN or infinity"),
    "damaged weights": (lambda f: (f / "model.safetensors").write_bytes(b"x" * 100), "is damaged"),
    "metrics of another model": (lambda f: edit(f / "results.json", model="resnet20_cifar"), "of model resnet20_cifar"),
    "metrics of another size": (lambda f: edit(f / "results.json", parameters=7), "of a model with 7 parameters"),
    "metrics of other inputs": (
        lambda f: edit(f / "results.json", input={"input_size": [3, 64, 64]}),
        r"measured with input_size \[3, 64, 64\]",
    ),
    "broken metrics": (lambda f: (f / "results.json").write_text("{"), "results.json is no JSON"),
    "metrics that are a list": (lambda f: (f / "results.json").write_text("[1]"), "not what train.py writes"),
    "metrics that are null": (lambda f: (f / "results.json").write_text("null"), "not what train.py writes"),
    "metrics of no known arguments": (lambda f: edit(f / "results.json", arguments=5), r"writes \(arguments\)"),
    "metrics of an input of one number": (lambda f: edit(f / "results.json", input={"mean": 0.5}), "with mean 0.5"),
    "labels that are a number": (lambda f: edit(f / "config.json", label_names=5), "label_names is 5"),
    "a card that is no YAML": (
        lambda f: (f / "README.md").write_text("---\n: : [\n---\n"),
        "README.md has metadata that cannot be read",
    ),
    "a card with another accuracy": (other_accuracy, r"README.md says shapes accuracy 97.5, results.json 87.5"),
    "a card without metrics": (lambda f: write_card(f, eval_results=None), "README.md has no shapes accuracy"),
    "a card of another library": (lambda f: write_card(f, library_name="keras"), "library_name 'keras'"),
    "a card without a licence": (lambda f: write_card(f, license=None), "names no license"),
}


@pytest.mark.parametrize("spoil, message", REFUSED.values(), ids=REFUSED)
def test_a_folder_that_disagrees_is_refused(hub, client, run, spoil, message):
    spoil(run)
    with pytest.raises(FolderError, match=message):
        push(run, "user/net")
    assert hub.log == [] and hub.repos == {}


def test_all_problems_are_told_at_once(client, run):
    edit(run / "config.json", label_names=["a", "b"])
    edit(run / "results.json", parameters=7)
    with pytest.raises(FolderError) as caught:
        push(run, "user/net")
    assert len(caught.value.problems) == 2


def test_no_folder(client, tmp_path):
    with pytest.raises(FolderError, match="it is no folder"):
        push(tmp_path / "nothing", "user/net")


def test_a_generated_card_that_was_edited_is_pushed_as_it_is(hub, client, run):
    write_card(run, tags=["timm", "mine"])
    push(run, "user/net")
    assert hub.read("user/net", "README.md") == (run / "README.md").read_bytes()


# -- Models that are not saved yet -------------------------------------------------------------------------------------


def test_push_to_hub_takes_a_model(hub, client):
    model = timm.create_model("mlp_cifar_affine", num_classes=3, width=16, depth=2)
    report = affdiv_zoo.push_to_hub(model, "user/net", label_names=["a", "b", "c"], results={"test_top1": 0.5})
    assert set(report.states) == FILES
    again = timm.create_model("hf-hub:user/net", pretrained=True).eval()
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(again(images), model.eval()(images))
    assert again.pretrained_cfg["label_names"] == ["a", "b", "c"]
    assert ModelCard(hub.read("user/net", "README.md").decode()).data.eval_results[0].metric_value == 50
    # Labels that came with the weights go with them again.
    push_to_hub(again, "user/copy")
    assert json.loads(hub.read("user/copy", "config.json"))["label_names"] == ["a", "b", "c"]


def test_push_to_hub_takes_a_converted_model_with_its_report(hub, client):
    model = timm.create_model("resnet20_cifar", num_classes=3)
    images = torch.randn(4, 3, 32, 32)
    model, report = affdiv_zoo.convert(model, example_input=images)
    push_to_hub(model, "user/converted", report=report, label_names=["a", "b", "c"])
    again = timm.create_model("hf-hub:user/converted", pretrained=True).eval()
    assert torch.equal(again(images), model.eval()(images))
    assert "conversion.json" in hub.model("user/converted").tree()
    with pytest.raises(FolderError, match="pass report="):
        push_to_hub(model, "user/forgotten")


def test_push_to_hub_refuses_weights_that_diverged(hub, client):
    model = timm.create_model("mlp_cifar_affine", num_classes=3, width=16, depth=2)
    with torch.no_grad():
        next(model.parameters()).fill_(float("inf"))
    with pytest.raises(FolderError, match="hold NaN or infinity"):
        push_to_hub(model, "user/net")
    assert hub.repos == {}


def test_a_copy_of_what_was_pushed_can_be_pushed(hub, client, run, tmp_path):
    push(run, "user/net")
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    for name in FILES:
        (mirror / name).write_bytes(hub.read("user/net", name))
    shutil.rmtree(run)
    push(mirror, "user/mirror")
    assert hub.model("user/mirror").tree() == hub.model("user/net").tree()
