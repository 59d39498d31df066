"""What a run tells of itself: log.csv, trackers, and the plot at its end."""

import argparse
import csv
import io
import sys
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import is_tensorboard_available, is_trackio_available, is_wandb_available
from checkpoints import write_text
from data import RecipeError
from options import plain

from affdiv_zoo.diagnostics import DivergenceLogger

AVAILABLE = dict(tensorboard=is_tensorboard_available, trackio=is_trackio_available, wandb=is_wandb_available)


def check_trackers(args: argparse.Namespace) -> None:
    """Raises a RecipeError if a tracker's package is missing: accelerate would leave it out without a word."""
    for name in args.tracker or ():
        if not AVAILABLE[name]():
            raise RecipeError(f"--tracker {name}: that package is not there: pip install {name}")


def start_trackers(accelerator: Accelerator, args: argparse.Namespace) -> None:
    """Starts the trackers with the run's arguments."""
    if not args.tracker:
        return
    config = {}
    for name, value in vars(args).items():
        value = plain(value)
        config[name] = value if isinstance(value, bool | int | float | str) else str(value)
    accelerator.init_trackers(args.project, config=config)


def write_log(path: Path, columns: tuple[str, ...], rows: list[dict[str, Any]]) -> None:
    """Writes one row for each epoch; cells of what was not evaluated are empty."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def write_divergence(args: argparse.Namespace, folder: Path, divergence: DivergenceLogger) -> None:
    """Writes divergence.json and divergence.png, if anything was diagnosed."""
    if not divergence.reports:
        return
    divergence.save(folder / "divergence.json")
    if args.no_plot:
        return
    try:
        divergence.plot(folder / "divergence.png", f"{args.model} on {args.dataset}")
    except ImportError as error:
        print(f"no divergence.png: {error}", file=sys.stderr)


def draw_plot(path: Path, rows: list[dict[str, Any]], title: str) -> None:
    """Draws loss, accuracy and learning rate over the epochs as a PNG file.

    Without matplotlib there is a note on stderr and no file.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        print("no plot.png: that needs matplotlib (pip install matplotlib)", file=sys.stderr)
        return
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    for axes, (name, label) in zip(
        figure.subplots(1, 3), (("loss", "loss"), ("top1", "accuracy"), ("lr", "learning rate")), strict=True
    ):
        for column in (column for column in rows[0] if column == name or column.endswith(f"_{name}")):
            points = [(row["epoch"], row[column]) for row in rows if row[column] is not None]
            axes.plot(*zip(*points, strict=True), marker="." if len(points) < 50 else None, label=column)
        axes.set_xlabel("epoch")
        axes.set_ylabel(label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        if name != "lr":
            axes.legend(frameon=False)
    temporary = path.with_name(f".{path.name}.part")
    try:
        figure.savefig(temporary, format="png", dpi=120)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
