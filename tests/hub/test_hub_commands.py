"""The commands push, pull, card and publish: what they print, and with which status they end."""

import pytest
from huggingface_hub import ModelCard
from typer.testing import CliRunner

from affdiv_zoo.cli import app


def affdiv_zoo(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args])


def test_push_dry_run_then_push_then_pull(hub, client, run, tmp_path):
    done = affdiv_zoo("push", run, "--repo", "user/net", "--dry-run")
    assert done.exit_code == 0 and "dry run: would be one commit" in done.output
    assert hub.repos == {}
    done = affdiv_zoo("push", run, "--repo", "user/net", "--private", "--revision", "dev", "--message", "Mine")
    assert done.exit_code == 0, done.output
    assert hub.model("user/net").private
    assert hub.model("user/net").history("dev") == ["Mine", "initial commit"]
    done = affdiv_zoo("pull", "user/net", tmp_path / "here", "--revision", "dev")
    assert done.exit_code == 0 and done.output.strip().endswith(str(tmp_path / "here"))
    assert (tmp_path / "here/model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()
    done = affdiv_zoo("pull", "user/net", tmp_path / "here", "--revision", "dev")
    assert done.exit_code == 1 and "is not empty" in done.stderr
    done = affdiv_zoo("pull", "user/net", tmp_path / "here", "--revision", "dev", "--overwrite")
    assert done.exit_code == 0


def test_create_pr(hub, client, run):
    affdiv_zoo("push", run, "--repo", "user/net", "--revision", "dev")
    done = affdiv_zoo("push", run, "--repo", "user/net", "--create-pr")
    assert done.exit_code == 0 and "/user/net/discussions/1" in done.output
    assert hub.model("user/net").history() == ["initial commit"]


@pytest.mark.parametrize(
    "args, message",
    [
        (("push", "nothing", "--repo", "user/net"), "error: nothing is no complete model whose files agree"),
        (("pull", "user/nothing"), "error: there is no model user/nothing"),
        (("card", "nothing"), "error: "),
        (("publish", "nothing", "--namespace", "user"), "error: pattern='nothing'"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_errors_are_one_message_and_status_1(hub, client, args, message):
    done = affdiv_zoo(*args)
    assert done.exit_code == 1
    assert done.stderr.startswith(message)
    assert "Traceback" not in done.output


def test_card_prints_or_writes(run):
    printed = affdiv_zoo("card", run)
    assert printed.exit_code == 0
    assert not (run / "README.md").exists()
    assert affdiv_zoo("card", run, "--write").exit_code == 0
    assert ModelCard((run / "README.md").read_text()).data.eval_results[0].metric_value == 87.5
    assert (run / "README.md").read_text().strip() == printed.output.strip()
    (run / "README.md").write_text("mine")
    refused = affdiv_zoo("card", run, "--write")
    assert refused.exit_code == 1 and "--overwrite" in refused.stderr
    assert (run / "README.md").read_text() == "mine"
    assert affdiv_zoo("card", run, "--write", "--overwrite").exit_code == 0
    assert (run / "README.md").read_text() != "mine"
