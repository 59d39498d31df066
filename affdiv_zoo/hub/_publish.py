"""All of the released weights to the Hub, each in a repository of its own."""

import fnmatch
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models._hub import save_config_for_hf

from affdiv_zoo import weights
from affdiv_zoo._files import write_text
from affdiv_zoo.hub._errors import FolderError
from affdiv_zoo.hub._folder import CARD, CONFIG, WEIGHTS
from affdiv_zoo.hub._push import PushReport, push
from affdiv_zoo.hub.cards import render_card

__all__ = ["publish"]

RECORD = Path(weights.__file__).with_name("published.json")


def publish(
    namespace: str,
    pattern: str = "*",
    *,
    commit_message: str = "Publish weights",
    token: str | None = None,
    private: bool = False,
    dry_run: bool = False,
    record: str | Path = RECORD,
) -> Iterator[tuple[str, PushReport]]:
    """Publishes released weights as ``namespace/<architecture>.<tag>``, one commit each, one after the other.

    Calling it again does only what is left: a repository that has all of its files already gets no commit. After each
    push the repository and the commit are written into ``record``, which the models' ``hf_hub_id`` are pinned to.

    Args:
        namespace: A user or an organisation on the Hub.
        pattern: A wildcard for names of weights, such as ``"*.cifar10"``.
        commit_message: As in :func:`push`.
        token: As in :func:`push`.
        private: As in :func:`push`.
        dry_run: As in :func:`push`; ``record`` is left as it is.
        record: A JSON file: name to ``{"repo_id", "revision"}``. Made if it does not exist; other names stay.

    Yields:
        The name of the weights, and what was done.

    Raises:
        FolderError: Weights are not those of their record.
        HubError: As in :func:`push`. What was done before is recorded, so that another call goes on from there.
        ValueError: No name matches.
    """
    released = weights.released()
    names = sorted(fnmatch.filter(released, pattern))
    if not names:
        raise ValueError(f"pattern={pattern!r} matches none of the weights: {', '.join(sorted(released)) or 'none'}")
    for name in names:
        repo_id = f"{namespace}/{name}"
        with tempfile.TemporaryDirectory(prefix="affdiv_zoo-") as temporary:
            folder = Path(temporary)
            write_release(folder, released[name], weights.path_of(name), repo_id)
            report = push(folder, repo_id, commit_message=commit_message, token=token, private=private, dry_run=dry_run)
        if not dry_run:
            _note(Path(record), name, report)
        yield name, report


def write_release(folder: Path, record: dict[str, Any], path: Path, repo_id: str) -> None:
    """Writes the folder of released weights: the file itself, its configuration and its card.

    Args:
        folder: Empty.
        record: Of ``affdiv_zoo.weights.released()``.
        path: The weights.
        repo_id: Where the folder goes.

    Raises:
        FolderError: The file's SHA-256 is not that of the record.
    """
    shutil.copyfile(path, folder / WEIGHTS)
    sha256 = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    if sha256 != record["sha256"]:
        raise FolderError(path, [f"its SHA-256 is {sha256}, that of its record {record['sha256']}: release it again"])
    cfg = record["pretrained_cfg"]
    with torch.device("meta"):
        model = timm.create_model(
            record["architecture"], pretrained_cfg_overlay={**cfg, "tag": record["tag"]}, **record["model_args"]
        )
    own = {"pretrained_cfg": {**cfg, "license": record["license"]}}
    if cfg.get("label_names"):
        own["label_names"] = list(cfg["label_names"])
    save_config_for_hf(model, str(folder / CONFIG), model_config=own, model_args=record["model_args"])
    config = json.loads((folder / CONFIG).read_text())
    config["dtype"] = "float32"  # transformers would compute in the file's float16
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    (folder / CARD).write_text(render_card(record, repo_id))


def _note(path: Path, name: str, report: PushReport) -> None:
    """Writes down where the weights are, unless that is there already."""
    noted = json.loads(path.read_text()) if path.is_file() else {}
    entry = {"repo_id": report.repo_id, "revision": report.commit}
    if noted.get(name) == entry:
        return
    noted[name] = entry
    write_text(path, json.dumps(dict(sorted(noted.items())), indent=2) + "\n")
