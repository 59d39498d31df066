"""Settings shared by all tests."""

import os

# Before anything imports huggingface_hub: no test may ask a server outside this machine.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

import affdiv_zoo  # noqa: F401  registers the models with timm

# Wall-clock deadlines would make the tests depend on the machine's load.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
