"""Publishing all released weights: one repository each, idempotent, with a record of what is where."""

import json

import pytest
import timm
import torch
from local_hub import sha256
from safetensors.torch import save_file

from affdiv_zoo import weights
from affdiv_zoo.hub import FolderError, HubError, publish

SPECS = {
    "mlp_cifar_affine.shapes": dict(width=16, depth=2, center=False),
    "mlp_cifar.shapes": dict(width=16, depth=2, norm="layer"),
}


@pytest.fixture
def released(tmp_path, monkeypatch):
    """Two made-up weights in place of the package's, one of them stored in float16; returns their records."""
    folder = tmp_path / "weights"
    folder.mkdir()
    records = {}
    for name, args in SPECS.items():
        architecture, tag = name.split(".")
        model = timm.create_model(architecture, num_classes=3, **args)
        dtype = torch.float16 if "affine" in name else torch.float32
        path = folder / f"{name}.safetensors"
        save_file({key: value.to(dtype) for key, value in model.state_dict().items()}, path)
        records[name] = {
            "architecture": architecture,
            "tag": tag,
            "file": path.name,
            "sha256": sha256(path.read_bytes()),
            "dtype": str(dtype).removeprefix("torch."),
            "model_args": args,
            "pretrained_cfg": {
                "input_size": [3, 32, 32],
                "mean": [0.5, 0.5, 0.5],
                "std": [0.25, 0.25, 0.25],
                "interpolation": "bilinear",
                "crop_pct": 1.0,
                "num_classes": 3,
                "label_names": ["circle", "square", "star"],
            },
            "dataset": "user/shapes",
            "metrics": {"test_top1": 0.875},
            "license": "apache-2.0",
        }
    monkeypatch.setattr(weights, "released", lambda: records)
    monkeypatch.setattr(weights, "path_of", lambda name: folder / records[name]["file"])
    return records


def test_every_weight_gets_a_repository_and_the_record_says_where(hub, client, released, tmp_path):
    record = tmp_path / "published.json"
    reports = dict(publish("user", record=record))
    assert set(reports) == set(SPECS)
    noted = json.loads(record.read_text())
    images = torch.randn(2, 3, 32, 32)
    for name in SPECS:
        repo = hub.model(f"user/{name}")
        assert repo.history() == ["Publish weights", "initial commit"]
        assert noted[name] == {"repo_id": f"user/{name}", "revision": repo.refs["branch"]["main"]}
        assert repo.tree()["model.safetensors"].sha256 == released[name]["sha256"]  # the file itself
        model = timm.create_model(f"hf-hub:user/{name}@{noted[name]['revision']}", pretrained=True).eval()
        assert model.pretrained_cfg["label_names"] == ["circle", "square", "star"]
        assert model.pretrained_cfg["std"] == [0.25, 0.25, 0.25]
        local = timm.create_model(released[name]["architecture"], num_classes=3, **released[name]["model_args"]).eval()
        timm.models.load_checkpoint(local, str(weights.path_of(name)))
        assert torch.equal(model(images), local(images))
        assert json.loads(hub.read(f"user/{name}", "config.json"))["dtype"] == "float32"
        assert f"hf-hub:user/{name}" in hub.read(f"user/{name}", "README.md").decode()


def test_again_there_is_nothing_to_do(hub, client, released, tmp_path):
    record = tmp_path / "published.json"
    list(publish("user", record=record))
    text, commits = record.read_text(), {name: list(hub.model(f"user/{name}").commits) for name in SPECS}
    written = record.stat().st_mtime_ns
    start = len(hub.log)
    assert not any(report.changed for _, report in publish("user", record=record))
    assert {method for method, _, _ in hub.log[start:]} == {"GET"}
    assert record.read_text() == text and record.stat().st_mtime_ns == written  # not even written again
    assert {name: list(hub.model(f"user/{name}").commits) for name in SPECS} == commits


def test_a_lost_record_is_found_again_without_a_commit(hub, client, released, tmp_path):
    record = tmp_path / "published.json"
    list(publish("user", record=record))
    text = record.read_text()
    record.unlink()
    list(publish("user", record=record))
    assert record.read_text() == text
    assert len(hub.model("user/mlp_cifar.shapes").commits) == 2


def test_what_changed_is_published_and_pinned_anew(hub, client, released, tmp_path):
    record = tmp_path / "published.json"
    list(publish("user", record=record))
    before = json.loads(record.read_text())
    released["mlp_cifar.shapes"]["metrics"]["test_top1"] = 0.75
    changed = {name for name, report in publish("user", record=record) if report.changed}
    after = json.loads(record.read_text())
    assert changed == {"mlp_cifar.shapes"}
    assert {name for name in SPECS if before[name] != after[name]} == changed
    assert after["mlp_cifar.shapes"]["revision"] == hub.model("user/mlp_cifar.shapes").refs["branch"]["main"]


def test_a_dry_run_changes_nothing(hub, client, released, tmp_path):
    record = tmp_path / "published.json"
    reports = dict(publish("user", record=record, dry_run=True))
    assert all(report.changed and report.commit is None for report in reports.values())
    assert hub.repos == {} and not record.exists()


def test_a_pattern_chooses_and_other_records_stay(hub, client, released, tmp_path):
    record = tmp_path / "published.json"
    record.write_text('{"other.x": {"repo_id": "user/other.x", "revision": "abc"}}')
    list(publish("user", "mlp_cifar.*", record=record))
    assert set(json.loads(record.read_text())) == {"mlp_cifar.shapes", "other.x"}
    with pytest.raises(ValueError, match="pattern='nothing' matches none of the weights: mlp_cifar.shapes, mlp_cifar_"):
        list(publish("user", "nothing", record=record))


def test_after_a_failure_it_goes_on_where_it_stopped(hub, client, released, tmp_path):
    record = tmp_path / "published.json"
    hub.fault("POST", "/models/user/mlp_cifar_affine.shapes/commit/", status=403)
    with pytest.raises(HubError, match="make one with write access"):
        list(publish("user", record=record))
    assert set(json.loads(record.read_text())) == {"mlp_cifar.shapes"}
    changed = [name for name, report in publish("user", record=record) if report.changed]
    assert changed == ["mlp_cifar_affine.shapes"]
    assert set(json.loads(record.read_text())) == set(SPECS)


def test_weights_that_are_not_those_of_the_record_are_refused(hub, client, released, tmp_path):
    path = weights.path_of("mlp_cifar.shapes")
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    with pytest.raises(FolderError, match="its SHA-256 is"):
        list(publish("user", "mlp_cifar.*", record=tmp_path / "published.json"))
    assert hub.repos == {}


def test_the_packages_own_weights_can_be_published(hub, client, tmp_path):
    reports = dict(publish("user", record=tmp_path / "published.json")) if weights.released() else {}
    assert set(reports) == set(weights.released())
    for name in reports:
        ours, theirs = (timm.create_model(n, pretrained=True).eval() for n in (name, f"hf-hub:user/{name}"))
        images = torch.randn(2, *ours.pretrained_cfg["input_size"])
        with torch.no_grad():
            assert torch.equal(ours(images), theirs(images)), name
