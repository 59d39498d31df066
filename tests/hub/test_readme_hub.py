"""The README's Hub section, against a loopback Hub."""

import re
import shlex
from pathlib import Path

import pytest
import timm
from typer.testing import CliRunner

import affdiv_zoo
from affdiv_zoo.cli import app

README = (Path(__file__).parents[2] / "README.md").read_text()
SECTION = README.split("\n## Hub\n")[1].split("\n## ")[0]
COMMANDS = [line for line in SECTION.splitlines() if line.startswith("affdiv-zoo ")]


def test_the_commands_do_what_they_say_in_this_order(hub, client, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    run.rename(tmp_path / "runs/my-run")
    assert len(COMMANDS) == 5
    for line in COMMANDS:
        args = shlex.split(line, comments=True)[1:]
        if args[0] == "publish" and not affdiv_zoo.list_models(pretrained=True):
            continue  # nothing is released yet
        done = CliRunner().invoke(app, args)
        assert done.exit_code == 0, f"{line}: {done.output}"
    assert hub.model("user/name").history() == ["Add model", "initial commit"]
    assert (tmp_path / "here/config.json").read_bytes() == hub.read("user/name", "config.json")
    assert set(hub.repos) == {("models", "user/name")}


@pytest.mark.parametrize("dry_run", [True, False])
def test_the_example_pushes_without_dry_run(hub, client, dry_run):
    snippet = re.search(r"^```python\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL)[1]
    assert "dry_run=True" in snippet
    exec(snippet.replace("dry_run=True", f"dry_run={dry_run}"), {})
    assert ("models", "user/name") not in hub.repos if dry_run else hub.model("user/name").history()[0] == "Add model"
    if not dry_run:
        model = timm.create_model("hf-hub:user/name", pretrained=True)
        assert model.num_classes == 3
