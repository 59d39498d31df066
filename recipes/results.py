"""Writes RESULTS.md: what the sweeps in recipes/sweeps/ found, each table with the commands that make it again.

    python recipes/results.py            # writes recipes/RESULTS.md from the ledgers
    python recipes/results.py --check    # status 1 if RESULTS.md is not what the ledgers say

The goals and the rules by which they count as met are `GOALS` below; they were written before any final run.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

from data import RecipeError
from sweep import ROOT, Ledger, Paired, Row, Sweep, difference_cell, markdown, paired_difference, portable, summarise

PROGRAM = "results.py"
SWEEPS = ROOT / "recipes" / "sweeps"
RESULTS = ROOT / "recipes" / "RESULTS.md"
NAMES = ("resnet20", "resnet20_longer_tuning", "resnet20_small_batch", "vit_nano", "mlp", "resnet18_conversion")


@dataclasses.dataclass(frozen=True)
class Goal:
    """A comparison and when it counts as met.

    Attributes:
        sweep: The sweep's name.
        text: The goal, as the page has it.
        ours: Methods of the corrected nets; of several the one with the highest validation accuracy.
        peers: Methods of their twins; likewise.
        margin: Met if the lower end of the 95 % interval of the difference, paired by seed, is above this.
        runs: Least number of seeds.
        share: If set, the goal is another one: ours reach this share of the peer's last validation accuracy in fewer
            epochs than the peer does, by the medians, and in all runs.
    """

    sweep: str
    text: str
    ours: tuple[str, ...]
    peers: tuple[str, ...]
    margin: float
    runs: int = 3
    share: float | None = None


GOALS = (
    Goal(
        "resnet20",
        "`resnet20_cifar_patchnorm` is no worse than `resnet20_cifar` at batch 128, each under its better optimizer: "
        "the interval's lower end is above -0.3 points",
        ("patchnorm_sgd", "patchnorm_adamw"),
        ("batch_sgd", "batch_adamw"),
        -0.003,
    ),
    Goal(
        "resnet20_longer_tuning",
        "the same, both tuned again, on longer runs, after the test accuracies above were known",
        ("patchnorm",),
        ("batch",),
        -0.003,
    ),
    Goal(
        "resnet20_small_batch",
        "at batch 2, `resnet20_cifar_patchnorm` is ahead of `resnet20_cifar` by 2 points (the interval above that)",
        ("patchnorm_2",),
        ("batch_2",),
        0.02,
    ),
    Goal(
        "vit_nano",
        "`vit_nano_patch4_32_affine` (attention `separable`, the default) is no worse than `vit_nano_patch4_32`: the "
        "interval's lower end is above -0.3 points",
        ("separable",),
        ("layernorm",),
        -0.003,
    ),
    Goal(
        "mlp",
        "the affine-like net is ahead of the best of none, batch, layer, RMS and L2 norm, chosen by validation: the "
        "interval's lower end is above 0",
        ("affine",),
        ("none", "batch", "layer", "rms", "l2"),
        0.0,
    ),
    Goal(
        "mlp",
        "the same, centred (ours)",
        ("affine_centred",),
        ("none", "batch", "layer", "rms", "l2"),
        0.0,
    ),
    Goal(
        "resnet18_conversion",
        "a trained `resnet18` that is converted to PatchNorm and fine-tuned reaches the last accuracy of "
        "`resnet18_patchnorm` from scratch in fewer epochs",
        ("converted",),
        ("scratch",),
        0.0,
        share=1.0,
    ),
)


def best(rows: dict[str, Row], names: tuple[str, ...]) -> Row | None:
    """Returns the row with the highest mean validation accuracy at its chosen point; None while one is not tuned."""
    known = [rows[name] for name in names if name in rows]
    if len(known) < len(names) or any(row.choice is None for row in known):
        return None
    return max(known, key=lambda row: max((score for _, score in row.choice.scores), default=0.0))


def verdict(goal: Goal, difference: Paired | None) -> str:
    """Words whether a goal is met."""
    if difference is None or difference.n < goal.runs:
        return f"open ({0 if difference is None else difference.n} of {goal.runs} pairs)"
    if difference.low > goal.margin:
        return "**met**"
    if difference.high < goal.margin:
        return "**missed**"
    return "**not shown** (the interval holds both)"


def epochs_goal(goal: Goal, sweep: Sweep, ours: Row | None, peer: Row | None) -> tuple[str, str, str]:
    """Returns the cells of a goal that is about epochs: figure, pairs, verdict."""
    number = sweep.thresholds.index(goal.share)
    times = [row.times[number] if row and row.times and len(row.final) >= goal.runs else None for row in (ours, peer)]
    if None in times:
        return "", "", f"open ({min(len(row.final) if row else 0 for row in (ours, peer))} of {goal.runs} pairs)"
    (own, _, reached, runs), (others, *_) = times
    said = f"{own:g}" if reached else "none"
    fewer = reached == runs and own < others
    verdict = "**met**" if fewer else "**missed**"
    return f"{said} epochs against {others:g}", f"{runs}: `{ours.method}`, `{peer.method}`", verdict


def goal_lines(sweeps: dict[str, tuple[Sweep, list[Row]]]) -> list[str]:
    """Sets the table of goals."""
    lines = ["| goal | ours less twin, points [95 % interval] | pairs | verdict |", "|---|---|---|---|"]
    for goal in GOALS:
        sweep, rows = sweeps[goal.sweep][:2]
        known = {row.method: row for row in rows}
        ours, peer = best(known, goal.ours), best(known, goal.peers)
        if goal.share is not None:
            lines.append(f"| {goal.text} | {' | '.join(epochs_goal(goal, sweep, ours, peer))} |")
            continue
        difference = paired_difference(ours.test, peer.test) if ours and peer else None
        pairs = f"{difference.n}: `{ours.method}`, `{peer.method}`" if difference else ""
        cell = difference_cell(difference, difference.n) if difference else ""
        lines.append(f"| {goal.text} | {cell} | {pairs} | {verdict(goal, difference)} |")
    return lines


def about(file: Path) -> str:
    """Returns the comment at the head of a sweep's file as prose."""
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return " ".join(lines)


def page() -> str:
    """Returns the text of RESULTS.md."""
    sweeps = {}
    for name in NAMES:
        sweep = Sweep(SWEEPS / f"{name}.yaml")
        records = Ledger(SWEEPS / f"{name}.jsonl").read()
        sweeps[name] = (sweep, summarise(sweep, records), records)
    lines = [
        "# Results",
        "",
        "Generated by `python recipes/results.py` from the ledgers in `recipes/sweeps/`, one line of JSON a run. "
        "Every method is tuned on a validation part of the training set, on a grid of as many points; the test set is "
        "read once, at the end of each final run.",
        "",
        *goal_lines({name: (sweep, rows) for name, (sweep, rows, _) in sweeps.items()}),
    ]
    for name, (sweep, rows, records) in sweeps.items():
        file = portable(sweep.file)
        lines += [
            "",
            f"## {name}",
            "",
            about(sweep.file),
            "",
            "```bash",
            f"python recipes/sweep.py run {file}",
            f"python recipes/sweep.py summary {file}",
            "```",
            "",
            markdown(sweep, records, rows).rstrip("\n") if records else "No runs yet.",
        ]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Writes the page, or compares it."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Write recipes/RESULTS.md from the sweeps' ledgers.")
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if the page is out of date")
    args = parser.parse_args(argv)
    try:
        text = page()
    except RecipeError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    if args.check:
        same = RESULTS.is_file() and RESULTS.read_text(encoding="utf-8") == text
        print(f"{portable(RESULTS)} is {'up to date' if same else 'out of date'}")
        return 0 if same else 1
    part = RESULTS.with_name(RESULTS.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(RESULTS)
    print(f"{portable(RESULTS)} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
