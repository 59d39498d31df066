"""A loopback Hub for each test, and this process's huggingface_hub as its client."""

import json
import time

import huggingface_hub
import pytest
import timm
import torch
from huggingface_hub import constants
from local_hub import WRITE_TOKEN, Hub, serve

from affdiv_zoo.hf import save_pretrained

LABELS = ("circle", "square", "star")


@pytest.fixture
def hub():
    with serve() as hub:
        yield hub


@pytest.fixture
def client(hub, tmp_path, monkeypatch):
    """Turns this process's huggingface_hub to the loopback Hub, with a cache of its own; returns the cache's folder.

    huggingface_hub reads the environment when it is imported, which was long ago.
    """
    cache = tmp_path / "cache"
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    # Of 10 MB: a small file that is cut would have nothing to resume from.
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 2**14)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))  # whoever runs this may be logged in
    monkeypatch.setenv("HF_TOKEN", WRITE_TOKEN)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between tries
    huggingface_hub.close_session()  # connections to the last test's Hub
    yield cache
    huggingface_hub.close_session()


@pytest.fixture
def environment(hub, tmp_path):
    """Environment variables for a process of its own that talks to the loopback Hub."""
    return environment_for(hub, tmp_path / "home")


def environment_for(hub: Hub, home) -> dict[str, str]:
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_TOKEN": WRITE_TOKEN,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1,localhost",
    }


@pytest.fixture(scope="session")
def saved_run(tmp_path_factory):
    """A folder as a run of recipes/train.py leaves it; see the fixture ``run``."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    model = timm.create_model("mlp_cifar_affine", num_classes=len(LABELS), width=16, depth=2)
    save_pretrained(model, folder, label_names=LABELS)
    results = {
        "test_top1": 0.875,
        "test_loss": 0.4375,
        "test_images": 48,
        "train_top1": 0.9375,
        "train_loss": 0.25,
        "train_images": 144,
        "val_images": 0,
        "epochs": 2,
        "updates": 6,
        "seconds": 1.5,
        "model": "mlp_cifar_affine",
        "dataset": "/home/me/shapes",
        "seed": 0,
        "parameters": sum(p.numel() for p in model.parameters()),
        "input": {"input_size": [3, 32, 32]},
        "augment": "none",
        "device": "cpu",
        "processes": 1,
        "mixed_precision": "no",
        "arguments": {"model": "mlp_cifar_affine", "dataset": "/home/me/shapes", "epochs": 2, "lr": 0.01, "seed": 0},
        "versions": {"torch": torch.__version__, "timm": timm.__version__},
    }
    (folder / "results.json").write_text(json.dumps(results))
    (folder / "log.csv").write_text("epoch,train_loss\n1,0.5\n2,0.25\n")
    return folder


@pytest.fixture
def run(saved_run, tmp_path):
    """A copy of ``saved_run`` that the test may spoil."""
    folder = tmp_path / "run"
    folder.mkdir()
    for path in saved_run.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder
