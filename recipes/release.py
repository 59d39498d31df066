"""Puts a sweep's weights into the package: file, record, model card and the logits that a test compares.

    python recipes/release.py recipes/sweeps/mlp.yaml --method affine --twin layer --tag cifar10 \
        --set dataset=path/to/cifar10

The sweep must have run with `keep: true` in its YAML file, so that the run folders are there. The weights are those of
the method's final run with the first seed, whatever its accuracy. They are stored as float16 if that changes at most
one of 2,000 answers on the test set, and as they are otherwise. All that is written follows from the ledger and the run
folder; `affdiv_zoo.weights.released` describes the record.
"""

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from building import build_model
from data import RecipeError, load_data
from safetensors.torch import load_file, save_file
from sweep import ROOT, Ledger, Row, Sweep, paired_difference, portable, setting, summarise
from timm.models import get_pretrained_cfg
from torch import nn
from torch.utils.data import DataLoader

from affdiv_zoo.hub.cards import render_card

PROGRAM = "release.py"
WEIGHTS = ROOT / "affdiv_zoo" / "weights"
CARDS = ROOT / "model_cards"
LOGITS = ROOT / "tests" / "weights" / "logits.json"
MAX_BYTES = 2_500_000
LICENSE = "apache-2.0"
CFG_KEYS = ("input_size", "mean", "std", "interpolation", "crop_pct", "crop_mode", "num_classes", "label_names")


def synthetic_images(size: tuple[int, int, int], count: int = 4) -> torch.Tensor:
    """Makes smooth images from waves, without a random generator: the same on every machine and version.

    Args:
        size: Channels, height and width.
        count: How many.

    Returns:
        `count` x channels x height x width, float32, between -1.5 and 1.5.
    """
    channels, height, width = size
    i = torch.arange(1, count + 1, dtype=torch.float64).view(-1, 1, 1, 1)
    c = torch.arange(channels, dtype=torch.float64).view(1, -1, 1, 1)
    y = torch.arange(height, dtype=torch.float64).view(1, 1, -1, 1) / height
    x = torch.arange(width, dtype=torch.float64).view(1, 1, 1, -1) / width
    return (torch.sin(6 * i * x + c) + 0.5 * torch.cos(9 * y * (c + 1) - i)).float()


@torch.no_grad()
def right_answers(model: nn.Module, loader: DataLoader) -> int:
    """Counts the right answers of a model."""
    model.eval()
    return sum(int((model(images).argmax(1) == labels).sum()) for images, labels in loader)


def write(path: Path, content: bytes) -> None:
    """Writes a file under a temporary name and renames it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part-{os.getpid()}")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def update_json(path: Path, name: str, value: Any) -> None:
    """Sets one entry of a JSON file."""
    entries = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    entries[name] = value
    write(path, (json.dumps(dict(sorted(entries.items())), indent=1) + "\n").encode())


def final_runs(row: Row, seeds: list[int]) -> list[dict[str, Any]]:
    """Returns the test accuracy of every seed; raises a RecipeError if some are missing."""
    missing = [seed for seed in seeds if seed not in row.final]
    if missing:
        raise RecipeError(
            f"method {row.method!r}: the final runs with seeds {missing} are missing; run the sweep first"
        )
    return [dict(seed=seed, test_top1=row.test[seed]) for seed in seeds]


def twin_record(ours: Row, twin: Row, sweep: Sweep) -> dict[str, Any]:
    """Returns the comparison with the twin."""
    difference = paired_difference(ours.test, twin.test)
    run = sweep.final_run(twin.method, twin.choice.point, sweep.seeds[0])
    return dict(
        model=run.args.model,
        model_args=run.args.model_kwargs,
        runs=final_runs(twin, sweep.seeds),
        difference=difference.mean,
        low=difference.low,
        high=difference.high,
    )


def release(args: argparse.Namespace) -> str:
    """Writes everything and returns a line about it."""
    sweep = Sweep(args.sweep, dict(args.settings))
    sweep.check_methods("--method", [args.method])
    rows = {row.method: row for row in summarise(sweep, Ledger(args.sweep.with_suffix(".jsonl")).read())}
    row = rows[args.method]
    if row.choice is None:
        raise RecipeError(f"--method {args.method!r}: its tuning runs are not all done; run the sweep first")
    runs = final_runs(row, sweep.seeds)
    seed = sweep.seeds[0]
    run, line = sweep.final_run(args.method, row.choice.point, seed), row.final[seed]
    folder = args.runs / sweep.name / run.key
    if not (folder / "model.safetensors").is_file():
        raise RecipeError(
            f"{str(folder)!r} has no model.safetensors; run the sweep with `keep: true` in its file, or set --runs"
        )

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    cfg = {**config["pretrained_cfg"], "num_classes": config["num_classes"]}
    cfg["label_names"] = config.get("label_names") or cfg.get("label_names")
    state = load_file(folder / "model.safetensors")
    half = {name: value.half() if value.is_floating_point() else value for name, value in state.items()}
    data = load_data(run.args, get_pretrained_cfg(run.args.model).to_dict())
    loader = DataLoader(data.test, batch_size=500, collate_fn=data.collate_fn)
    model = build_model(run.args, data)
    model.load_state_dict(state)
    right = right_answers(model, loader)
    total = len(data.test)
    if abs(right / total - line["metrics"]["test_top1"]) > 0.0005:
        raise RecipeError(
            f"{str(folder)!r} has a test accuracy of {right / total:.4f}, the ledger says "
            f"{line['metrics']['test_top1']:.4f}: these are not that run's weights, or not its data"
        )
    model.load_state_dict(half)
    right_half = right_answers(model, loader)
    use_half = abs(right_half - right) <= total / 2000
    stored = half if use_half else state
    model.load_state_dict(stored)
    images = synthetic_images(tuple(cfg["input_size"]))
    with torch.no_grad():
        logits = model(images)
        plain = build_model(argparse.Namespace(**{**vars(run.args), "model_kwargs": {}}), data).eval()
        plain.load_state_dict(stored)
        if not torch.equal(plain(images), logits):
            raise RecipeError(
                f"{run.args.model} with {run.args.model_kwargs} is not what its name alone stands for; timm could not "
                "make it again from a tag. Make those the model's defaults first"
            )

    name = f"{run.args.model}.{args.tag}"
    part = WEIGHTS / f".{name}.part"
    WEIGHTS.mkdir(parents=True, exist_ok=True)
    try:
        save_file(stored, part, metadata={"format": "pt"})
        if part.stat().st_size > MAX_BYTES:
            raise RecipeError(f"{name}: {part.stat().st_size} bytes; at most {MAX_BYTES} may come with the package")
        content = part.read_bytes()
    finally:
        part.unlink(missing_ok=True)
    record = dict(
        architecture=run.args.model,
        tag=args.tag,
        file=f"{name}.safetensors",
        sha256=hashlib.sha256(content).hexdigest(),
        bytes=len(content),
        dtype="float16" if use_half else "float32",
        parameters=line["metrics"]["parameters"],
        model_args=run.args.model_kwargs,
        pretrained_cfg={key: cfg[key] for key in CFG_KEYS if cfg.get(key) is not None},
        dataset="uoft-cs/cifar10" if sweep.dataset_name == "cifar10" else sweep.dataset_name,
        metrics={**line["metrics"], "test_top1": (right_half if use_half else right) / total},
        seed=seed,
        runs=runs,
        twin=twin_record(row, rows[args.twin], sweep) if args.twin else None,
        command=f"python recipes/sweep.py run {portable(args.sweep)} --only {args.method}",
        arguments=line["arguments"],
        versions=line["versions"],
        date=line["date"],
        license=LICENSE,
    )
    write(WEIGHTS / record["file"], content)
    update_json(WEIGHTS / "records.json", name, record)
    update_json(LOGITS, name, [[round(value, 5) for value in row] for row in logits.tolist()])
    write(CARDS / f"{name}.md", render_card(record).encode())
    return (
        f"{name}: {len(content)} bytes of {record['dtype']}; test accuracy {right / total:.2%} as trained, "
        f"{record['metrics']['test_top1']:.2%} as stored"
    )


def cards() -> str:
    """Writes the cards of all released weights again."""
    records = json.loads((WEIGHTS / "records.json").read_text(encoding="utf-8"))
    for name, record in records.items():
        write(CARDS / f"{name}.md", render_card(record).encode())
    return f"{len(records)} cards written to {portable(CARDS)}"


def main(argv: list[str] | None = None) -> int:
    """Releases one method's weights."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="Put a sweep's weights into the package, with their record, card and test logits."
    )
    parser.add_argument(
        "sweep", type=Path, nargs="?", help="the sweep's YAML file; without it, only the cards are made"
    )
    parser.add_argument("--method", help="whose weights")
    parser.add_argument("--twin", help="the method that the card compares it with")
    parser.add_argument("--tag", default="cifar10", help="timm's tag for the weights")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where the run folders are")
    parser.add_argument(
        "--set", dest="settings", type=setting, action="append", default=[], metavar="KEY=VALUE", help="as in sweep.py"
    )
    args = parser.parse_args(argv)
    if args.sweep and not args.method:
        parser.error("--method: name the method whose weights are to be released")
    try:
        print(release(args) if args.sweep else cards())
    except RecipeError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
