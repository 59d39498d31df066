"""What of a saved model's folder goes to the Hub, and whether its files agree with one another."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors import SafetensorError, safe_open

from affdiv_zoo.hf import REMOTE_CODE_FILE, complete_config, remote_code
from affdiv_zoo.hub._errors import FolderError
from affdiv_zoo.hub.cards import record_of, render_card

CARD, CONFIG, RESULTS, WEIGHTS = "README.md", "config.json", "results.json", "model.safetensors"
# Everything else in a folder stays here: logs, checkpoints with optimizer states, and results.json: its figures are on
# the card, and its arguments tell of paths on this machine.
PUBLISHED = (CARD, "LICENSE", CONFIG, "conversion.json", WEIGHTS, REMOTE_CODE_FILE)


@dataclass(frozen=True)
class Folder:
    """A model's folder as it would be on the Hub.

    Attributes:
        files: Path in the repository to content: bytes, or the file that has them.
        left_out: Names in the folder that do not go.
    """

    files: dict[str, bytes | Path]
    left_out: tuple[str, ...]


def prepare(folder: str | Path, repo_id: str | None = None) -> Folder:
    """Checks a folder that timm, transformers or the recipes saved, and completes it for the Hub.

    ``config.json`` gets what transformers needs beside timm's keys; where there is no ``README.md``, it is generated
    from the folder's records. Nothing is written.

    Args:
        folder: Has ``config.json`` and ``model.safetensors``; perhaps ``results.json`` and ``README.md``.
        repo_id: Where it would go, for a generated card's examples.

    Returns:
        What would be on the Hub.

    Raises:
        FolderError: Something is missing, or config, weights, metrics and card disagree.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FolderError(folder, ["it is no folder"])
    problems = list(_disagreements(folder))
    if problems:
        raise FolderError(folder, problems)
    files: dict[str, bytes | Path] = {name: folder / name for name in PUBLISHED if (folder / name).is_file()}
    config = complete_config(json.loads((folder / CONFIG).read_text()))
    files[CONFIG] = (json.dumps(config, indent=2) + "\n").encode()
    files[REMOTE_CODE_FILE] = remote_code().encode()
    if CARD not in files:
        files[CARD] = render_card(record_of(folder), repo_id).encode()
    left_out = sorted(path.name for path in folder.iterdir() if path.name not in PUBLISHED)
    return Folder(dict(sorted(files.items())), tuple(left_out))


def check_model(folder: Path, name: str) -> None:
    """Checks config and weights only.

    Args:
        folder: A folder with a model.
        name: What the error calls it.

    Raises:
        FolderError: They are not, or do not.
    """
    problems = [text for _, text in _model_problems(folder)]
    if problems:
        raise FolderError(name, problems)


def _disagreements(folder: Path) -> Iterator[str]:
    facts: dict[str, Any] = {}
    for fact, text in _model_problems(folder, facts):
        yield text
        if fact == "fatal":
            return
    results = None
    if (folder / RESULTS).is_file():
        try:
            results = json.loads((folder / RESULTS).read_text())
        except ValueError as error:
            yield f"{RESULTS} is no JSON ({error}): train or evaluate again"
        else:
            parts = results if isinstance(results, dict) else {RESULTS: results}
            wrong = [key for key in (RESULTS, "input", "arguments") if not isinstance(parts.get(key) or {}, dict)]
            if wrong or not isinstance(results, dict):
                yield f"{RESULTS} is not what train.py writes ({(wrong or [results])[0]}): train or evaluate again"
                return  # the card's metrics could not be read from it
            yield from _result_problems(results, facts)
    if (folder / CARD).is_file():
        yield from _card_problems(folder, results is not None)


def _model_problems(folder: Path, facts: dict[str, Any] | None = None) -> Iterator[tuple[str, str]]:
    """Pairs of "fatal" (nothing more can be told) or "problem", and a line; ``facts`` gets what later checks need."""
    facts = {} if facts is None else facts
    missing = [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]
    for name in missing:
        others = [p.name for p in sorted(folder.glob("*")) if p.suffix in (".bin", ".pt", ".pth", ".ckpt")]
        hint = f" (there is {', '.join(others)}: only safetensors are published)" if name == WEIGHTS and others else ""
        yield "fatal", f"{name} is missing{hint}: save the model with affdiv_zoo.hf.save_pretrained"
    if missing:
        return
    try:
        config = json.loads((folder / CONFIG).read_text())
        architecture, pretrained_cfg = config["architecture"], config["pretrained_cfg"]
    except (ValueError, TypeError, KeyError) as error:
        yield "fatal", f"{CONFIG} is not timm's ({error!r}): save the model with affdiv_zoo.hf.save_pretrained"
        return
    try:
        with torch.device("meta"):  # no memory, no initialisation
            model = timm.create_model(f"local-dir:{folder}", pretrained=False)
    except Exception as error:  # whatever a model's constructor raises
        yield "fatal", f"{CONFIG}: timm cannot make {architecture!r} of it ({type(error).__name__}: {error})"
        return
    classes = config.get("num_classes", model.num_classes)
    facts |= {"config": config, "parameters": sum(p.numel() for p in model.parameters())}

    if pretrained_cfg.get("num_classes", classes) != classes:
        yield "problem", f"{CONFIG}: num_classes is {classes}, in pretrained_cfg {pretrained_cfg['num_classes']}"
    for where, labels in (("label_names", config.get("label_names")), ("id2label", config.get("id2label"))):
        if labels is not None and not isinstance(labels, list | dict):
            yield "problem", f"{CONFIG}: {where} is {labels!r}, which are no names"
        elif labels is not None and len(labels) != classes:
            yield "problem", f"{CONFIG}: num_classes is {classes}, but {where} has {len(labels)} names"
    for key in ("input_size", "mean", "std"):
        if not pretrained_cfg.get(key):
            yield "problem", f"{CONFIG}: pretrained_cfg has no {key}, without which nobody can prepare an image"
    yield from (("problem", text) for text in _weight_problems(folder / WEIGHTS, model.state_dict()))


def _weight_problems(path: Path, expected: dict[str, torch.Tensor]) -> Iterator[str]:
    try:
        with safe_open(path, "pt") as weights:
            shapes = {key: tuple(weights.get_slice(key).get_shape()) for key in weights.keys()}  # noqa: SIM118
            bad = [key for key in shapes if not _finite(weights.get_tensor(key))]
    except SafetensorError as error:
        yield f"{path.name} is damaged ({error}): save the model again"
        return
    missing, unknown = sorted(expected.keys() - shapes.keys()), sorted(shapes.keys() - expected.keys())
    if missing:
        yield f"{path.name} lacks {_some(missing)}, which the model of {CONFIG} has"
    if unknown:
        yield f"{path.name} has {_some(unknown)}, which the model of {CONFIG} has not"
    for key in sorted(expected.keys() & shapes.keys()):
        if shapes[key] != tuple(expected[key].shape):
            yield f"{path.name}: {key} is {list(shapes[key])}, the model of {CONFIG} has {list(expected[key].shape)}"
    if bad:
        yield f"{path.name}: {_some(bad)} hold NaN or infinity: the run diverged"


def _finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def _result_problems(results: dict[str, Any], facts: dict[str, Any]) -> Iterator[str]:
    """Whether results.json is of this model: the metrics of another run must not get on its card."""
    config = facts["config"]
    name = str(results.get("model", "")).split(".")[0]
    if timm.is_model(name) and name != config["architecture"]:
        yield f"{RESULTS} is of model {name}, {CONFIG} of {config['architecture']}"
    if results.get("parameters", facts["parameters"]) != facts["parameters"]:
        yield f"{RESULTS} is of a model with {results['parameters']} parameters, the one here has {facts['parameters']}"
    for key in ("input_size", "mean", "std"):
        was, now = (results.get("input") or {}).get(key), config["pretrained_cfg"].get(key)
        if was is not None and now is not None and not _close(was, now):
            yield f"{RESULTS} was measured with {key} {was}, {CONFIG} has {now}"


def _close(a: Any, b: Any) -> bool:
    if not isinstance(a, list) or not isinstance(b, list):
        return a == b
    return len(a) == len(b) and all(math.isclose(x, y, rel_tol=1e-6) for x, y in zip(a, b, strict=True))


def _card_problems(folder: Path, has_results: bool) -> Iterator[str]:
    again = f"`affdiv-zoo card {folder} --write --overwrite` makes it anew"
    try:
        data = ModelCard((folder / CARD).read_text()).data
    except (ValueError, yaml.YAMLError) as error:
        yield f"{CARD} has metadata that cannot be read ({error}): {again}"
        return
    if not data.license:
        yield f"{CARD} names no license: {again}"
    if data.library_name != "timm":
        yield f"{CARD} has library_name {data.library_name!r} instead of 'timm': {again}"
    if has_results:
        stated, true = _metrics(data), _metrics(ModelCard(render_card(record_of(folder))).data)
        for key, value in true.items():
            if key not in stated:
                yield f"{CARD} has no {' '.join(key)}, {RESULTS} has {value}: {again}"
            elif stated[key] != value:
                yield f"{CARD} says {' '.join(key)} {stated[key]}, {RESULTS} {value}: {again}"


def _metrics(data: Any) -> dict[tuple[str, ...], Any]:
    """(data set, metric) to value, of a card's model-index."""
    return {(r.dataset_name, r.metric_type): r.metric_value for r in data.eval_results or []}


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
