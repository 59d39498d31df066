"""What a conversion makes of the architectures of three libraries; ``architectures.py`` prints it as a table."""

import pytest
import torch
from architectures import EXPECTED, TRANSFORMERS, row

QUICK = [f"transformers/{name}" for name in TRANSFORMERS]
QUICK += [f"timm/test_{name}" for name in ("resnet", "efficientnet", "convnext", "vit")]
ALL = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in EXPECTED]


@pytest.mark.parametrize("name", ALL)
def test_norms_are_found_and_outputs_kept(name):
    counts, difference, report, norms = row(name)
    assert counts == EXPECTED[name]
    assert counts[0] == norms
    assert all(n.why for n in report.norms if n.result == "left")
    assert difference < (0.5 if counts[2] else 1e-4)


@pytest.mark.parametrize("name", [p for p in ALL if p.values[0] in EXPECTED and not EXPECTED[p.values[0]][2]])
def test_exact_swaps_are_exact_in_float64(name):
    """Llama's and T5's norms compute in float32 themselves, so 1e-5 there."""
    _, difference, *_ = row(name, prepare=torch.nn.Module.double)
    own_float32 = any(word in name for word in ("Llama", "Qwen", "Gemma", "T5"))
    assert difference < (1e-5 if own_float32 else 1e-11)


@pytest.mark.parametrize("name", ALL)
def test_gradient_only_changes_no_output(name):
    counts, difference, *_ = row(name, "gradient")
    assert counts[2] == 0 and difference < 1e-5
