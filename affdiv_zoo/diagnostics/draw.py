"""The figures, with matplotlib, which is imported only here and only when something is drawn."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from affdiv_zoo._files import write_whole
from affdiv_zoo.diagnostics.report import DivergenceReport

__all__ = ["draw_evolution", "draw_reports", "save"]

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's, which people who see colours differently can tell apart."""

PARTS = (("same", 1.0), ("patch", 0.55), ("sample", 0.25))
"""The parts of the update, and how strongly they are drawn."""


def _matplotlib() -> Any:
    try:
        import matplotlib
        import matplotlib.figure
        import matplotlib.patches
    except ImportError as error:
        raise ImportError("the plots need matplotlib: pip install 'affdiv-zoo[plot]'") from error
    return matplotlib


def save(figure: Any, path: str | Path) -> None:
    """Writes a figure whole or not at all; makes the folder if there is none.

    Raises:
        ValueError: The format, which the path's ending tells, is unknown.
    """
    known = figure.canvas.get_supported_filetypes()
    kind = Path(path).suffix.lstrip(".").lower()
    if kind not in known:
        raise ValueError(f"path {str(path)!r} ends in none of {', '.join('.' + k for k in sorted(known))}")
    write_whole(path, lambda temporary: figure.savefig(temporary, format=kind, dpi=150, bbox_inches="tight"))


def draw_reports(reports: Sequence[DivergenceReport]) -> Any:
    """Four panels: the divergence against depth; spread, cosine and the parts' shares layer by layer.

    Args:
        reports: One or several, to be compared; bars of layers with the same name stand side by side.

    Returns:
        A ``matplotlib.figure.Figure``.

    Raises:
        ValueError: A report has no layers.
    """
    matplotlib = _matplotlib()
    for report in reports:
        if not report.layers:
            raise ValueError(f"the report of {report.model} has no layers")
    names = in_order([[e.name for e in r.layers] for r in reports])
    width = min(max(9.0, 3.0 + len(names) * (0.16 + 0.08 * len(reports))), 40.0)
    figure = matplotlib.figure.Figure(figsize=(width, 12), layout="constrained")
    depth, spread, cosine, shares = figure.subplots(4, 1, height_ratios=(1.2, 1, 1, 1.2))
    labels = [plain(label) for label in labelled(reports)]

    for i, (report, label) in enumerate(zip(reports, labels, strict=True)):
        rows = [e for e in report.layers if e.kind != "logits"]
        x = [(j + 0.5) / len(rows) for j in range(len(rows))]
        mean = [e.divergence for e in rows]
        low = [max(e.divergence - e.std, e.divergence / 10) for e in rows]  # zero has no place on a log scale
        depth.plot(x, mean, marker="o", markersize=3.5, color=COLORS[i % len(COLORS)], label=label)
        depth.fill_between(
            x, low, [e.divergence + e.std for e in rows], color=COLORS[i % len(COLORS)], alpha=0.15, linewidth=0
        )
    depth.set_yscale("log")
    depth.set_xlim(0, 1)
    depth.set_xlabel("depth (first layer to last)")
    depth.set_title("Same-sample divergence factor, mean and std over rows", loc="left")
    depth.legend(fontsize="small", loc="lower right", bbox_to_anchor=(1, 1), ncols=4, frameon=False)

    place = {name: i for i, name in enumerate(names)}
    bar = 0.8 / len(reports)
    for i, (report, label) in enumerate(zip(reports, labels, strict=True)):
        color = COLORS[i % len(COLORS)]
        x = [place[e.name] + (i - (len(reports) - 1) / 2) * bar for e in report.layers]
        spread.bar(x, [e.spread for e in report.layers], bar, color=color, label=label)
        cosine.bar(x, [e.cosine for e in report.layers], bar, color=color)
        bottom = [0.0] * len(x)
        for part, (_, strength) in enumerate(PARTS):
            height = [e.shares[part] for e in report.layers]
            shares.bar(x, height, bar, bottom, color=tint(color, strength))
            bottom = [b + h for b, h in zip(bottom, height, strict=True)]
    spread.set_title("Spread of the divergence factor, std / mean (ideal: 0)", loc="left")
    cosine.set_title("Cosine between the effective and the ideal update (ideal: 1)", loc="left")
    shares.set_title("Parts of the effective update", loc="left")
    texts = ("the row itself", "its sample's other rows", "other samples")
    keys = [
        matplotlib.patches.Patch(color=tint("#404040", strength), label=text)
        for text, (_, strength) in zip(texts, PARTS, strict=True)
    ]
    shares.legend(handles=keys, ncols=3, fontsize="small", loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
    for axes in (spread, cosine, shares):
        axes.set_xlim(-0.7, len(names) - 0.3)
        axes.set_xticks(range(len(names)), [""] * len(names))
    cosine.set_ylim(min(0.0, *(e.cosine for r in reports for e in r.layers)), 1)
    shares.set_ylim(0, 1)
    shares.set_xticks(range(len(names)), [plain(short(n)) for n in names], rotation=90, fontsize=7)
    for axes in (depth, spread, cosine, shares):
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_evolution(steps: Sequence[int], reports: Sequence[DivergenceReport], title: str = "") -> Any:
    """How the divergence, its spread, the cosine and the parts' shares change over training.

    Args:
        steps: Updates before each report.
        reports: Of the same model.
        title: Above the figure.

    Returns:
        A ``matplotlib.figure.Figure``: faint lines are the layers, from first (dark) to last (bright); strong ones the
        medians over the layers.

    Raises:
        ValueError: There are no reports.
    """
    if not reports:
        raise ValueError("there are no reports yet: nothing to draw")
    matplotlib = _matplotlib()
    figure = matplotlib.figure.Figure(figsize=(11, 7.5), layout="constrained")
    axes = figure.subplots(2, 2)
    colors = matplotlib.colormaps["viridis"]
    panels = (
        (axes[0][0], "divergence", "Same-sample divergence factor (mean)"),
        (axes[0][1], "spread", "Spread of the factor, std / mean (ideal: 0)"),
        (axes[1][0], "cosine", "Cosine of effective and ideal update (ideal: 1)"),
    )
    names = in_order([[e.name for e in r.layers if e.kind != "logits"] for r in reports])
    summaries = [r.summary() for r in reports]
    for ax, key, heading in panels:
        for i, name in enumerate(names):
            entries = [(s, r[name]) for s, r in zip(steps, reports, strict=True) if name in _names(r)]
            # Without a gradient there is no direction that could have a cosine.
            found = [(s, getattr(e, key)) for s, e in entries if key != "cosine" or e.norm_ratio > 0]
            if not found:
                continue
            color = colors(i / max(len(names) - 1, 1))
            ax.plot(
                *zip(*found, strict=True), color=color, alpha=0.45, linewidth=0.8, marker="." if len(found) == 1 else ""
            )
        median = [(s, m[key]) for s, m in zip(steps, summaries, strict=True) if key in m]
        if median:
            ax.plot(*zip(*median, strict=True), color="black", linewidth=2, marker="o", markersize=3.5, label="median")
            ax.legend()
        ax.set_title(heading, loc="left", fontsize="medium")
    axes[0][0].set_yscale("log")
    shares = axes[1][1]
    keys = ("same_share", "patch_share", "sample_share")
    found = [(s, m) for s, m in zip(steps, summaries, strict=True) if "same_share" in m]
    for i, (key, label) in enumerate(zip(keys, ("the row itself", "same sample", "other samples"), strict=True)):
        if found:
            shares.plot(
                [s for s, _ in found],
                [m[key] for _, m in found],
                marker="o",
                markersize=3.5,
                color=COLORS[i],
                label=label,
            )
    shares.set_ylim(0, 1)
    shares.set_title("Shares of the update, medians over the layers", loc="left", fontsize="medium")
    if found:
        shares.legend()
    for ax in axes.flat:
        ax.set_xlabel("updates")
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    if title:
        figure.suptitle(plain(title))
    return figure


def tint(color: str, strength: float) -> str:
    """A colour mixed with white."""
    parts = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - strength * (255 - p)):02x}" for p in parts)


def _names(report: DivergenceReport) -> set[str]:
    return {e.name for e in report.layers}


def in_order(lists: Sequence[Sequence[str]]) -> list[str]:
    """All names of several lists, in the order of the first and each new one behind its predecessor."""
    merged: list[str] = []
    for names in lists:
        at = 0
        for name in names:
            if name in merged:
                at = merged.index(name) + 1
            else:
                merged.insert(at, name)
                at += 1
    return merged


def labelled(reports: Sequence[DivergenceReport]) -> list[str]:
    """The models' names, numbered where they repeat."""
    names = [r.model for r in reports]
    return [n if names.count(n) == 1 else f"{n} ({names[: i + 1].count(n)})" for i, n in enumerate(names)]


def plain(text: str) -> str:
    """A text that matplotlib shows as it is: no formula between dollars, no entry of a legend that "_" hides."""
    text = text.replace("$", r"\$")
    return f"\u200b{text}" if text.startswith("_") else text


def short(name: str, width: int = 34) -> str:
    """The end of a long name."""
    return name if len(name) <= width else "~" + name[-width + 1 :]
