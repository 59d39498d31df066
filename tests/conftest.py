"""Settings shared by all tests."""

import os

# Before anything imports huggingface_hub: no test may ask a server outside this machine.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

import affdiv_zoo  # noqa: F401  registers the models with timm

# Wall-clock deadlines would make the tests depend on the machine's load, and new examples in every run on chance: a red
# run should mean a change. `pytest --hypothesis-profile=random` looks for new ones.
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("same", settings.get_profile("random"), derandomize=True)
settings.load_profile("same")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
