"""The weights that come with the package: safetensors files, and what is known of how they were made.

``records.json`` has a record for each, written by ``recipes/release.py`` from the runs' own results. ``published.json``
says which of them lie on the Hub, and at which commit; ``affdiv-zoo publish`` writes it after a push that succeeded.
"""

import functools
import json
from pathlib import Path
from typing import Any

__all__ = ["path_of", "published", "released"]

FOLDER = Path(__file__).resolve().parent


@functools.cache
def _read(name: str) -> str:
    path = FOLDER / name
    return path.read_text(encoding="utf-8") if path.is_file() else "{}"


def released() -> dict[str, dict[str, Any]]:
    """The records of the bundled weights.

    Returns:
        For every name ``architecture.tag`` a record: ``architecture``, ``tag``, ``file``, ``sha256``, ``bytes``,
        ``dtype``, ``parameters``, ``model_args``, ``pretrained_cfg`` (input size, mean, std, classes), ``dataset``,
        ``metrics`` and ``seed`` of the run whose weights they are, ``runs`` (the test accuracy of every seed), ``twin``
        (the comparison with the normalised net), ``command``, ``arguments``, ``versions``, ``date``, ``license``.
    """
    return json.loads(_read("records.json"))


def published() -> dict[str, dict[str, str]]:
    """Where the weights are on the Hub: ``{name: {"repo_id": ..., "revision": a commit}}``, empty if nowhere."""
    return json.loads(_read("published.json"))


def path_of(name: str) -> Path:
    """The safetensors file of one of the bundled weights.

    Args:
        name: ``architecture.tag``, such as ``"resnet20_cifar_patchnorm.cifar10"``.

    Raises:
        ValueError: There are no such weights.
    """
    records = released()
    if name not in records:
        known = ", ".join(sorted(records)) or "none"
        raise ValueError(f"name={name!r}: no such weights come with affdiv_zoo; there are {known}")
    return FOLDER / records[name]["file"]
