"""The README's Python examples run as they stand."""

import re
from pathlib import Path

import pytest
import torch

README = (Path(__file__).parent.parent / "README.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda s: s.splitlines()[-1][:40])
def test_snippet_runs(snippet, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = {}
    exec(snippet, scope)
    if "same" in scope:
        x = torch.randn(2, 3, 32, 32)
        assert torch.equal(scope["same"].eval()(x), scope["classify"].model(x).logits)
        assert scope["model"](x).logits.shape == (2, 5)
    if "before" in scope:
        assert (scope["model"](scope["images"]) - scope["before"]).abs().max() < 1e-4


def test_there_are_snippets_and_commands():
    assert len(SNIPPETS) >= 2
    assert 'pip install -e ".[recipes]" && accelerate launch recipes/train.py' in README
    assert 'pip install -e ".[test]" && pytest' in README
