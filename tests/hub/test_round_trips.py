"""Round trips over a loopback Hub: the command, timm and transformers in processes of their own; revisions; offline."""

import json
import os
import subprocess
import sys

import pytest
import timm
import torch
from conftest import environment_for
from huggingface_hub import HfApi
from local_hub import WRITE_TOKEN, serve
from safetensors.torch import load, load_file, save_file

from affdiv_zoo.hub import HubError, pull, push

COMMAND = ("-c", "from affdiv_zoo.cli import app; app()")

LOAD = """
import json, sys
import torch, timm
import affdiv_zoo
from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline
from PIL import Image

repo = sys.argv[1]
images = torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32)
with torch.no_grad():
    by_timm = timm.create_model(f"hf-hub:{repo}", pretrained=True).eval()(images)
    model = AutoModelForImageClassification.from_pretrained(repo).eval()
    by_transformers = model(images).logits
for again in sys.argv[2:]:
    affdiv_zoo.push_to_hub(model, again)
image = Image.new("RGB", (32, 32), (200, 30, 90))
classify = pipeline("image-classification", model=repo)
processor = AutoImageProcessor.from_pretrained(repo)
print(json.dumps({
    "timm": by_timm.tolist(),
    "transformers": by_transformers.tolist(),
    "class": type(model).__name__,
    "labels": list(model.config.id2label.values()),
    "pipeline": classify(image),
    "pixels": list(processor(image, return_tensors="pt")["pixel_values"].shape),
}))
"""


def run_python(environment, *args):
    """A Python process with other environment variables; the other settings, such as coverage's, stay."""
    command = [sys.executable, *args]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def published(saved_run, tmp_path_factory):
    """A Hub that has the run, pushed by the command, and a home that every process of this module shares."""
    home = tmp_path_factory.mktemp("home")
    with serve() as hub:
        environment = environment_for(hub, home)
        done = run_python(environment, *COMMAND, "push", str(saved_run), "--repo", "user/net")
        yield hub, environment, done


def expected_logits(folder):
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    images = torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32)
    with torch.no_grad():
        return model(images)


def test_the_command_pushed(published):
    hub, _, done = published
    assert hub.model("user/net").history() == ["Add model", "initial commit"]
    assert f"published as commit {hub.model('user/net').refs['branch']['main']}" in done.stdout
    assert "stays here: log.csv, results.json" in done.stdout


def test_timm_and_transformers_load_it_then_without_a_network_too(published, saved_run):
    hub, environment, _ = published
    online = json.loads(run_python(environment, "-c", LOAD, "user/net", "user/again").stdout)
    expected = expected_logits(saved_run)
    assert torch.equal(torch.tensor(online["timm"]), expected)
    assert torch.equal(torch.tensor(online["transformers"]), expected)
    assert online["class"] == "AffDivForImageClassification"
    assert online["labels"] == ["circle", "square", "star"]
    assert {answer["label"] for answer in online["pipeline"]} == {"circle", "square", "star"}
    assert online["pixels"] == [1, 3, 32, 32]

    # What transformers loaded, push_to_hub publishes again.
    first, again = hub.model("user/net").tree(), hub.model("user/again").tree()
    assert load(hub.read("user/again", "model.safetensors")).keys() == load_file(saved_run / "model.safetensors").keys()
    assert set(first) == set(again)

    asked = len(hub.log)
    offline = json.loads(run_python({**environment, "HF_HUB_OFFLINE": "1"}, "-c", LOAD, "user/net").stdout)
    assert offline == online
    assert len(hub.log) == asked


# -- In this process ---------------------------------------------------------------------------------------------------


def logits(source):
    model = timm.create_model(source, pretrained=True).eval()
    with torch.no_grad():
        return model(torch.ones(1, 3, 32, 32))


def test_revisions_and_tags(hub, client, run, tmp_path):
    api = HfApi(token=WRITE_TOKEN)
    first = push(run, "user/net")
    old = logits(f"local-dir:{run}")
    api.create_tag("user/net", tag="v1")
    weights = load_file(run / "model.safetensors")
    save_file({key: value * 2 for key, value in weights.items()}, run / "model.safetensors")
    new = logits(f"local-dir:{run}")
    second = push(run, "user/net")
    push(run, "user/net", revision="dev")
    assert not torch.equal(old, new)

    assert torch.equal(logits("hf-hub:user/net"), new)
    assert torch.equal(logits("hf-hub:user/net@v1"), old)
    assert torch.equal(logits(f"hf-hub:user/net@{first.commit}"), old)
    assert torch.equal(logits(f"hf-hub:user/net@{second.commit}"), new)
    assert torch.equal(logits("hf-hub:user/net@dev"), new)

    for revision, expected in (("v1", old), (first.commit, old), ("dev", new), (None, new)):
        folder = pull("user/net", tmp_path / f"pulled-{revision}", revision=revision)
        assert torch.equal(logits(f"local-dir:{folder}"), expected), revision


def test_pull_into_the_cache_serves_timm_without_a_network(hub, client, run, monkeypatch):
    push(run, "user/net")
    snapshot = pull("user/net")
    assert snapshot.is_relative_to(client)
    asked = len(hub.log)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert torch.equal(logits("hf-hub:user/net"), logits(f"local-dir:{run}"))
    assert pull("user/net") == snapshot
    with pytest.raises(HubError, match="user/other is not wholly in the cache, and HF_HUB_OFFLINE=1 is set"):
        pull("user/other")
    assert len(hub.log) == asked


def test_pull_does_not_write_over_things_unasked(hub, client, run, tmp_path):
    push(run, "user/net")
    target = tmp_path / "here"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="is not empty"):
        pull("user/net", target)
    assert [path.name for path in target.iterdir()] == ["notes.txt"]
    pull("user/net", target, overwrite=True)
    assert (target / "notes.txt").read_text() == "mine"
    assert (target / "config.json").read_bytes() == hub.read("user/net", "config.json")


def test_pull_leaves_out_what_is_not_the_models(hub, client, run):
    push(run, "user/net")
    HfApi(token=WRITE_TOKEN).upload_file(path_or_fileobj=b"x" * 100, path_in_repo="extra.bin", repo_id="user/net")
    assert not (pull("user/net") / "extra.bin").exists()


def test_private_repositories_need_a_token(hub, client, run, monkeypatch):
    push(run, "user/secret", private=True)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(HubError, match="hf auth login"):
        pull("user/secret")
    assert (pull("user/secret", token=WRITE_TOKEN) / "config.json").is_file()
