"""The report: plots, tables and the page of claims, from the ledgers alone.

    python recipes/reproduce/report.py            # README.md and results/
    python recipes/reproduce/report.py --full     # the same of the *_full sweeps, to README_full.md and results_full/

What a claim needs is written in `CLAIMS` and `verdict`, in code; nothing in the page is typed by hand. Runs that are
missing are left out, and a claim without runs says so.
"""

import argparse
import collections
import dataclasses
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from scipy import stats

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))

import sweep as harness  # noqa: E402  found by the line above

from affdiv_zoo.layers import AffineLikeLinear, NormLikeLinear  # noqa: E402

SWEEPS = ("fc_tanh", "fc_leaky_relu", "cnn", "batch_size")
CLASSICAL = ("batch", "layer", "rms", "l2")
CNN_CLASSICAL = ("batch", "layer", "rms", "group")
PLAIN = ("affine", "affine_centred", "batch")  # what is compared with the plain net
NARROW = 1

# Points of per cent. "Matches" and "comparable" are claims of no difference, which no experiment can show: they hold if
# the interval lies above minus a margin. The rules were written when the 256 x 6 tanh nets had been run, and changed
# twice after results were seen: claim 3 asks every net to be above chance, and claim 10 was added.
MARGIN = 1.0
CNN_MARGIN = 2.0
CHANCE = 10.0
WORKS = 1.0  # a net works if the interval of its accuracy lies this far above chance

HOLDS, FAILS, OPEN, NO_RUNS = "holds", "fails", "open", "no runs"
COLOURS = {
    "none": "#7f7f7f",
    "batch": "#1f77b4",
    "layer": "#17becf",
    "rms": "#2ca02c",
    "l2": "#8c564b",
    "group": "#9467bd",
    "affine": "#d62728",
    "affine_l2": "#ff9896",
    "affine_centred": "#ff7f0e",
    "gradient": "#e377c2",
}
METHODS = (*COLOURS, "pn_affine", "pn_affine_l2", "pn_norm", "pn_centred", "pn_gradient")


# --------------------------------------------------------------------------------------------------------------------
# What was measured
# --------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Cell:
    """A net without its method.

    Attributes:
        sweep: The sweep's name without `_full`.
        width: Of the layers.
        depth: Number of layers.
        batch_size: Images per update.
    """

    sweep: str
    width: int
    depth: int
    batch_size: int

    @property
    def act(self) -> str:
        """The activation's name."""
        return self.sweep.removeprefix("fc_").replace("_", " ") if self.sweep.startswith("fc_") else ""

    def __str__(self) -> str:
        return f"{self.width} x {self.depth}"


@dataclasses.dataclass
class Result:
    """A method's runs in a cell.

    Attributes:
        test: Test accuracy in per cent by seed; chance for a run that diverged.
        diverged: How many of these diverged.
        lr: The chosen rate.
        edge: Whether that is the grid's lowest or highest.
        rates: Validation accuracy in per cent by rate.
    """

    test: dict[int, float]
    diverged: int
    lr: float
    edge: bool
    rates: dict[float, float]

    @property
    def mean(self) -> float:
        """The mean test accuracy."""
        return statistics.fmean(self.test.values())


Results = dict[Cell, dict[str, Result]]


def read(folder: Path, suffix: str) -> tuple[Results, list[dict]]:
    """Reads the ledgers.

    Args:
        folder: Where `sweeps` and `ledgers` are.
        suffix: "" or "_full".

    Returns:
        The results, and all lines that took part.
    """
    results: Results = collections.defaultdict(dict)
    used: dict[str, dict] = {}
    for name in SWEEPS:
        ledger = harness.Ledger(folder / "ledgers" / f"{name}{suffix}.jsonl")
        records = ledger.read()
        if not records:
            continue
        plan = harness.Sweep(folder / "sweeps" / f"{name}{suffix}.yaml")
        for row in harness.summarise(plan, records):
            used.update({record["key"]: record for record in (*row.tuned, *row.final.values())})
            if not row.final:
                continue
            arguments = plan.methods[row.method]
            kwargs = arguments["model_kwargs"]
            cell = Cell(name, kwargs["width"], kwargs["depth"], arguments["batch_size"])
            method = re.fullmatch(r"(?:w\d+_d\d+|b\d+)_(\w+)", row.method).group(1)
            scores = {point["lr"]: 100 * score for point, score in row.choice.scores}
            lr = row.choice.point["lr"]
            results[cell][method] = Result(
                test={seed: 100 * value for seed, value in row.test.items()},
                diverged=harness.diverged(row.final.values()),
                lr=lr,
                edge=lr in (min(scores), max(scores)),
                rates=scores,
            )
    return dict(results), list(used.values())


# --------------------------------------------------------------------------------------------------------------------
# Statistics
# --------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval, and how many numbers and cells are behind it."""

    mean: float
    low: float
    high: float
    n: int
    cells: int

    def __str__(self) -> str:
        return f"{self.mean:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def stratified(groups: Iterable[list[float]]) -> Interval | None:
    """The mean over cells of the means over seeds, with Student's interval from the spread within the cells.

    The cells are taken as they are: the interval says what other seeds would give in these nets, not what other nets
    would. All cells are supposed to have the same spread; the degrees of freedom are n less the number of cells.

    Args:
        groups: The numbers of each cell, by seed.

    Returns:
        None if no spread can be seen.
    """
    groups = [group for group in groups if group]
    n, cells = sum(map(len, groups)), len(groups)
    if n <= cells:
        return None
    means = [statistics.fmean(group) for group in groups]
    square = sum((x - mean) ** 2 for group, mean in zip(groups, means, strict=True) for x in group) / (n - cells)
    error = math.sqrt(square * sum(1 / len(group) for group in groups)) / cells
    half = float(stats.t.ppf(0.975, n - cells)) * error
    mean = statistics.fmean(means)
    return Interval(mean, mean - half, mean + half, n, cells)


def differences(results: Results, cells: Iterable[Cell], ours: str, theirs: Iterable[str]) -> list[list[float]]:
    """Accuracy of a method less the mean of others', paired by seed, for every cell that has them all."""
    theirs = list(theirs)
    groups = []
    for cell in cells:
        row = results[cell]
        if any(name not in row for name in (ours, *theirs)):
            continue
        seeds = set(row[ours].test).intersection(*(row[name].test for name in theirs))
        groups.append(
            [row[ours].test[s] - statistics.fmean(row[name].test[s] for name in theirs) for s in sorted(seeds)]
        )
    return groups


def contrast(left: list[list[float]], right: list[list[float]]) -> Interval | None:
    """The mean of some cells less that of others, with Student's interval from the spread within all cells."""
    left, right = [g for g in left if g], [g for g in right if g]
    one, two = stratified(left), stratified(right)
    if one is None or two is None:
        return None
    groups = left + right
    freedom = sum(map(len, groups)) - len(groups)
    square = sum(sum((x - statistics.fmean(g)) ** 2 for x in g) for g in groups) / freedom
    weights = [sum(1 / len(g) for g in side) / len(side) ** 2 for side in (left, right)]
    half = float(stats.t.ppf(0.975, freedom)) * math.sqrt(square * sum(weights))
    mean = one.mean - two.mean
    return Interval(mean, mean - half, mean + half, one.n + two.n, len(groups))


def correlation(points: dict[int, list[float]], draws: int = 10000) -> Interval | None:
    """Spearman's rank correlation of accuracy and batch size, with a bootstrap interval.

    The seeds are drawn anew within every batch size (percentiles, fixed random numbers).

    Args:
        points: Accuracies by batch size.
        draws: Of the bootstrap.

    Returns:
        None for fewer than three batch sizes.
    """
    points = {size: values for size, values in sorted(points.items()) if len(values) > 1}
    if len(points) < 3:
        return None
    sizes = np.repeat(list(points), [len(values) for values in points.values()])
    random = np.random.default_rng(0)
    drawn = np.concatenate([random.choice(values, (draws, len(values))) for values in points.values()], axis=1)
    measured = rank_correlation(sizes, np.concatenate(list(points.values()))[None])
    low, high = np.quantile(rank_correlation(sizes, drawn), (0.025, 0.975))
    return Interval(float(measured[0]), float(low), float(high), len(sizes), len(points))


def rank_correlation(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Spearman's correlation of x with every row; 0 for a constant row."""
    x, y = stats.rankdata(x), stats.rankdata(rows, axis=1)
    x, y = x - x.mean(), y - y.mean(1, keepdims=True)
    norm = np.sqrt((x**2).sum() * (y**2).sum(1))
    return np.divide(y @ x, norm, out=np.zeros(len(rows)), where=norm > 0)


# --------------------------------------------------------------------------------------------------------------------
# The claims
# --------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Part:
    """One comparison of a claim: what, its figure, when it holds, and whether it does, fails or stays open."""

    what: str
    figure: Interval | None
    rule: str
    outcome: str


def above(what: str, figure: Interval | None, bound: float = 0.0) -> Part:
    """Holds if the interval lies above a bound, fails if it lies below."""
    rule = f"above {bound:g}".replace("-", "−")
    if figure is None:
        return Part(what, None, rule, NO_RUNS)
    return Part(what, figure, rule, HOLDS if figure.low > bound else FAILS if figure.high < bound else OPEN)


def below(what: str, figure: Interval | None, bound: float = 0.0) -> Part:
    """Holds if the interval lies below a bound, fails if it lies above."""
    rule = f"below {bound:g}".replace("-", "−")
    if figure is None:
        return Part(what, None, rule, NO_RUNS)
    return Part(what, figure, rule, HOLDS if figure.high < bound else FAILS if figure.low > bound else OPEN)


def not_below(what: str, figure: Interval | None) -> Part:
    """Fails if the interval lies below zero, holds otherwise: the claim is `positive or not at all`."""
    rule = "not below 0"
    if figure is None:
        return Part(what, None, rule, NO_RUNS)
    return Part(what, figure, rule, FAILS if figure.high < 0 else HOLDS)


def verdict(parts: list[Part]) -> str:
    """Reproduced if all parts hold, not if none does and one fails, undecided if all are open, else partly.

    "So far" if there are no runs for some of the parts.
    """
    outcomes = [part.outcome for part in parts if part.outcome != NO_RUNS]
    if not outcomes:
        return NO_RUNS
    if all(outcome == HOLDS for outcome in outcomes):
        found = "reproduced"
    elif HOLDS in outcomes:
        found = "partly"
    else:
        found = "not reproduced" if FAILS in outcomes else "undecided"
    return found if len(outcomes) == len(parts) else f"{found} so far"


def usual(results: Results) -> list[Cell]:
    """The fully connected nets wider than one."""
    return [cell for cell in results if cell.act and cell.width > NARROW]


def matches_or_beats(results: Results) -> list[Part]:
    """Affine-like less every classical normaliser, over all fully connected nets that are wider than one."""
    cells = usual(results)
    return [
        above(f"{ours} less {norm}", stratified(differences(results, cells, ours, [norm])), bound=-MARGIN)
        for ours in ("affine", "affine_l2")
        for norm in CLASSICAL
    ]


def deep_wide_tanh(results: Results) -> list[Part]:
    """The lead of affine-like over the mean of the classical normalisers: deep less shallow, and so on."""

    def lead(choose: Callable[[Cell], bool]) -> list[list[float]]:
        return differences(results, [cell for cell in usual(results) if choose(cell)], "affine", CLASSICAL)

    shared = [(c.width, c.depth) for c in usual(results) if c.act == "tanh"]
    shared = {shape for shape in shared if Cell("fc_leaky_relu", *shape, 128) in results}
    wide, narrow = 256, 16
    return [
        above(
            "lead at depth 12 less that at depth 2 (width 256)",
            contrast(
                lead(lambda c: c.width == wide and c.depth == 12), lead(lambda c: c.width == wide and c.depth == 2)
            ),
        ),
        above(
            "lead at width 256 less that at width 16 (depth 6)",
            contrast(
                lead(lambda c: c.depth == 6 and c.width == wide), lead(lambda c: c.depth == 6 and c.width == narrow)
            ),
        ),
        above(
            "lead with tanh less that with leaky ReLU (shapes of both)",
            contrast(
                lead(lambda c: c.act == "tanh" and (c.width, c.depth) in shared),
                lead(lambda c: c.act == "leaky relu" and (c.width, c.depth) in shared),
            ),
        ),
    ]


def width_one(results: Results) -> list[Part]:
    """Each affine-like net of width 1 is above chance, and every classical normaliser's nets are behind them."""
    cells = [cell for cell in results if cell.act and cell.width == NARROW and "affine" in results[cell]]
    parts = [
        above(
            f"affine less chance, {cell.act} {cell}",
            stratified([[x - CHANCE for x in results[cell]["affine"].test.values()]]),
            bound=WORKS,
        )
        for cell in cells
    ] or [above("affine less chance", None, bound=WORKS)]
    return parts + [
        above(f"affine less {norm}", stratified(differences(results, cells, "affine", [norm]))) for norm in CLASSICAL
    ]


def by_batch_size(results: Results, method: str, less: str | None = None) -> dict[int, list[float]]:
    """Accuracies by batch size; less another method's of the same seed, if one is given."""
    points = {}
    for cell, row in results.items():
        if cell.sweep == "batch_size" and method in row and (less is None or less in row):
            test = row[method].test
            if less is not None:
                test = {s: x - row[less].test[s] for s, x in test.items() if s in row[less].test}
            points[cell.batch_size] = list(test.values())
    return points


def batch_hypothesis(results: Results) -> list[Part]:
    """Rank correlations: negative for structural corrections, not negative for BatchNorm and the plain net."""

    def rho(method: str) -> Interval | None:
        return correlation(by_batch_size(results, method))

    parts = [below(f"correlation of {method}", rho(method)) for method in ("affine", "affine_centred")]
    return parts + [not_below(f"correlation of {method}", rho(method)) for method in ("batch", "none")]


def batch_relative(results: Results) -> list[Part]:
    """This takes out what the batch size, and so the number of updates, does to any net."""
    parts = [
        below(f"correlation of {method} less none", correlation(by_batch_size(results, method, "none")))
        for method in ("affine", "affine_centred")
    ]
    name = "correlation of batch less none"
    return [*parts, not_below(name, correlation(by_batch_size(results, "batch", "none")))]


def patchnorm(results: Results) -> list[Part]:
    """The paper's PatchNorms less every classical normaliser, over all convolutional nets."""
    cells = [cell for cell in results if cell.sweep == "cnn"]
    return [
        above(
            f"{ours} less {norm}",
            stratified(differences(results, cells, ours, [norm])),
            bound=-CNN_MARGIN,
        )
        for ours in ("pn_affine", "pn_norm")
        for norm in CNN_CLASSICAL
    ]


def patchnorm_centred(results: Results) -> list[Part]:
    """The centred PatchNorm less every classical normaliser, over all convolutional nets."""
    cells = [cell for cell in results if cell.sweep == "cnn"]
    return [
        above(
            f"pn_centred less {norm}",
            stratified(differences(results, cells, "pn_centred", [norm])),
            bound=-CNN_MARGIN,
        )
        for norm in CNN_CLASSICAL
    ]


def scale_invariance(results: Results) -> list[Part]:
    """Affine-like, which is not scale-invariant, against its scale-invariant twins and against no correction."""
    cells = usual(results)
    parts = [
        above(
            f"affine less {norm} (scale-invariant)",
            stratified(differences(results, cells, "affine", [norm])),
            bound=-MARGIN,
        )
        for norm in ("rms", "l2", "layer")
    ]
    gap = stratified(differences(results, [c for c in results if c.sweep == "cnn"], "pn_affine", ["pn_norm"]))
    return [*parts, above("pn_affine less pn_norm (scale-invariant)", gap, bound=-CNN_MARGIN)]


def gradient_only(results: Results) -> list[Part]:
    """Affine-like less gradient-only, over all fully connected nets; and the latter less the plain net."""
    cells = usual(results)
    parts = [above("affine less gradient", stratified(differences(results, cells, "affine", ["gradient"])))]
    parts.append(above("gradient less none", stratified(differences(results, cells, "gradient", ["none"]))))
    narrow = [cell for cell in results if cell.act and cell.width == NARROW]
    what = "affine less gradient at width 1"
    return [*parts, above(what, stratified(differences(results, narrow, "affine", ["gradient"])))]


def plain(results: Results) -> list[Part]:
    """Corrections less no correction and no normaliser, over all nets; BatchNorm for comparison."""
    cells, narrow = usual(results), [cell for cell in results if cell.act and cell.width == NARROW]
    parts = [above(f"{ours} less none", stratified(differences(results, cells, ours, ["none"]))) for ours in PLAIN]
    parts.append(above("affine less none at width 1", stratified(differences(results, narrow, "affine", ["none"]))))
    cells = [cell for cell in results if cell.sweep == "cnn"]
    return parts + [
        above(f"{ours} less none, convolutional", stratified(differences(results, cells, ours, ["none"])))
        for ours in ("pn_affine", "pn_centred", "batch")
    ]


@dataclasses.dataclass(frozen=True)
class Claim:
    """What is claimed, whose claim it is, how it is checked, and by which sweeps."""

    text: str
    whose: str
    check: Callable[[Results], list[Part]]
    sweeps: tuple[str, ...]


FC = ("fc_tanh", "fc_leaky_relu")
CLAIMS = (
    Claim("Affine-like matches or beats the classical normalisers", "paper", matches_or_beats, FC),
    Claim("Its lead is largest in deep and in wide nets, and with tanh", "paper", deep_wide_tanh, FC),
    Claim("It keeps working at width 1, where normalisers fail", "paper", width_one, FC),
    Claim(
        "Structural corrections correlate negatively with the batch size, BatchNorm and no normaliser positively or "
        "not at all",
        "paper",
        batch_hypothesis,
        ("batch_size",),
    ),
    Claim(
        "The same of the lead over the plain net of equal batch size and seed",
        "our check",
        batch_relative,
        ("batch_size",),
    ),
    Claim("PatchNorm is comparable with the other normalisers", "paper", patchnorm, ("cnn",)),
    Claim("The centred PatchNorm is comparable with them", "ours", patchnorm_centred, ("cnn",)),
    Claim("Scale invariance is not necessary for success", "paper", scale_invariance, (*FC, "cnn")),
    Claim("The structural correction is better than the gradient-only one", "question", gradient_only, FC),
    Claim("Corrected nets are better than plain ones", "question", plain, (*FC, "cnn")),
)


# --------------------------------------------------------------------------------------------------------------------
# The geometry of single layers
# --------------------------------------------------------------------------------------------------------------------


def cloud(n: int = 400) -> torch.Tensor:
    """Points of the plane around (1, 0.5), of all radii up to three. `(n, 2)`, float64."""
    random = torch.Generator().manual_seed(0)
    return torch.randn(n, 2, generator=random, dtype=torch.float64) + torch.tensor([1.0, 0.5], dtype=torch.float64)


def maps() -> dict[str, torch.nn.Module]:
    """Layers with W = 1 and b = 0: what each does to its input. BatchNorm as in training."""
    norms = {
        "no normaliser": torch.nn.Identity(),
        "BatchNorm": torch.nn.BatchNorm1d(2),
        "LayerNorm": torch.nn.LayerNorm(2),
        "RMSNorm": torch.nn.RMSNorm(2),
        "norm-like (L2)": NormLikeLinear(2, 2, scale="l2"),
        "affine-like": AffineLikeLinear(2, 2, scale="l2"),
        "affine-like, centred": AffineLikeLinear(2, 2, scale="l2", center=True),
    }
    for layer in norms.values():
        if isinstance(layer, torch.nn.Linear):
            torch.nn.init.eye_(layer.weight)
    return {name: layer.double() for name, layer in norms.items()}


def geometry() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The cloud under every map, and that of the cloud at twice the size."""
    with torch.no_grad():
        once = {name: layer(cloud()).numpy() for name, layer in maps().items()}
        twice = {name: layer(2 * cloud()).numpy() for name, layer in maps().items()}
    return once, twice


def geometry_table() -> str:
    """What the maps keep, in numbers."""
    once, twice = geometry()
    radius = np.linalg.norm(cloud().numpy(), axis=1)
    head = ["map", "radii afterwards", "rank correlation with the radii before", "moved by doubling the input"]
    lines = [harness.table_line(head), harness.table_line(["---"] * len(head))]
    for name, points in once.items():
        radii = np.linalg.norm(points, axis=1)
        low, high = np.quantile(radii, (0.05, 0.95))
        flat = high - low < 1e-2 * high
        rank = "(all radii alike)" if flat else f"{stats.spearmanr(radius, radii).statistic:.2f}"
        moved = np.median(np.linalg.norm(twice[name] - points, axis=1) / np.maximum(radii, 1e-12))
        invariant = " (scale-invariant)" if moved < 1e-3 else ""
        lines.append(harness.table_line([name, f"{low:.2f} to {high:.2f}", rank, f"{moved:.0%}{invariant}"]))
    note = (
        "400 points of the plane; W = 1 and b = 0; radii from the 5th to the 95th percentile; medians. Centring leaves "
        "two numbers one dimension: LayerNorm makes two points of the plane, the centred affine-like map a segment."
    )
    return "\n".join([*lines, "", note]) + "\n"


# --------------------------------------------------------------------------------------------------------------------
# Tables
# --------------------------------------------------------------------------------------------------------------------


def accuracy_cell(result: Result | None) -> str:
    """Words a method's accuracy."""
    if result is None:
        return ""
    text = f"{result.mean:.2f}"
    if len(result.test) > 1:
        text += f" ± {statistics.stdev(result.test.values()):.2f}"
    if result.diverged:
        text += f" ({result.diverged} diverged)"
    return text + (" !" if result.edge else "")


def accuracy_table(results: Results, cells: list[Cell], label: Callable[[Cell], str], head: str) -> str:
    """Sets a line per method and a column per cell; the best of a column is bold."""
    methods = [name for name in METHODS if any(name in results[cell] for cell in cells)]
    lines = [harness.table_line([head, *map(label, cells)]), harness.table_line(["---"] * (len(cells) + 1))]
    best = {cell: max(result.mean for result in results[cell].values()) for cell in cells}
    for name in methods:
        row = []
        for cell in cells:
            text = accuracy_cell(results[cell].get(name))
            row.append(f"**{text}**" if text and results[cell][name].mean == best[cell] else text)
        lines.append(harness.table_line([f"`{name}`", *row]))
    return "\n".join(lines) + "\n"


def rates_table(results: Results, cells: list[Cell], label: Callable[[Cell], str]) -> str:
    """Sets the validation accuracies of all rates."""
    lines = [harness.table_line(["net", "method", "validation accuracy by rate"]), harness.table_line(["---"] * 3)]
    for cell in cells:
        for name, result in results[cell].items():
            scores = [
                f"**{lr:g}: {score:.1f}**" if lr == result.lr else f"{lr:g}: {score:.1f}"
                for lr, score in result.rates.items()
            ]
            lines.append(harness.table_line([label(cell), f"`{name}`", ", ".join(scores)]))
    return "\n".join(lines) + "\n"


ACCURACIES = (
    "Test accuracy in per cent, mean ± standard deviation over the final seeds. `!`: the best rate was the highest or "
    "the lowest of the grid. A run that diverged counts as chance, 10 %."
)


def fc_text(results: Results) -> str:
    """The tables of the fully connected nets."""
    text = ["# Fully connected nets\n", f"Width x depth of the hidden layers. {ACCURACIES}\n"]
    for name in FC:
        cells = sorted((c for c in results if c.sweep == name), key=lambda c: (c.width, c.depth))
        if not cells:
            continue
        text += [f"## {cells[0].act}\n", accuracy_table(results, cells, str, "method")]
        text += ["Affine-like less each normaliser, paired by seed [95 % interval]:\n"]
        head = ["net", *(f"less `{name}`" for name in ("none", *CLASSICAL, "gradient"))]
        text += [harness.table_line(head), harness.table_line(["---"] * len(head))]
        for cell in cells:
            gaps = [stratified(differences(results, [cell], "affine", [n])) for n in ("none", *CLASSICAL, "gradient")]
            text.append(harness.table_line([str(cell), *(str(gap or "") for gap in gaps)]))
        text += ["", rates_table(results, cells, str)]
    return "\n".join(text)


def cnn_text(results: Results) -> str:
    """The tables of the convolutional nets."""
    cells = [c for c in results if c.sweep == "cnn"]
    if not cells:
        return "# Convolutional nets\n\nNo runs.\n"
    text = [
        "# Convolutional nets\n",
        f"Channels x layers. {ACCURACIES}\n",
        accuracy_table(results, cells, str, "method"),
    ]
    text += ["Less each normaliser, paired by seed [95 % interval]:\n"]
    head = ["method", *(f"less `{name}`" for name in ("none", *CNN_CLASSICAL))]
    text += [harness.table_line(head), harness.table_line(["---"] * len(head))]
    for ours in METHODS:
        if ours.startswith("pn_") and any(ours in results[cell] for cell in cells):
            gaps = [stratified(differences(results, cells, ours, [name])) for name in ("none", *CNN_CLASSICAL)]
            text.append(harness.table_line([f"`{ours}`", *(str(gap or "") for gap in gaps)]))
    return "\n".join([*text, "", rates_table(results, cells, str)])


def batch_text(results: Results) -> str:
    """The tables of the batch sizes."""
    cells = sorted((c for c in results if c.sweep == "batch_size"), key=lambda c: c.batch_size)
    if not cells:
        return "# Batch size\n\nNo runs.\n"
    size = lambda cell: f"batch {cell.batch_size}"  # noqa: E731
    text = ["# Batch size\n", f"{ACCURACIES}\n", accuracy_table(results, cells, size, "method")]
    text += [
        "Spearman's rank correlation with the batch size [95 % interval of a bootstrap over the seeds, drawn within "
        "every batch size], of the accuracy, and of the lead over `none` with the same seed:\n"
    ]
    head = ["method", "accuracy", "lead over `none`"]
    text += [harness.table_line(head), harness.table_line(["---"] * 3)]
    for name in COLOURS:
        rho = correlation(by_batch_size(results, name))
        lead = correlation(by_batch_size(results, name, "none")) if name != "none" else None
        if rho is not None:
            text.append(harness.table_line([f"`{name}`", str(rho), str(lead or "")]))
    text += [
        "",
        "All runs see as many images, so that large batches make fewer updates: that alone lowers every accuracy at "
        "large batches. The lead over `none` takes out what any net suffers from it.\n",
    ]
    return "\n".join([*text, rates_table(results, cells, size)])


# --------------------------------------------------------------------------------------------------------------------
# Plots
# --------------------------------------------------------------------------------------------------------------------


def drawings(results: Results) -> dict[str, tuple[str, Callable[[Path], None]]]:
    """The plots there are runs for: file name -> what it shows, and what draws it."""
    some = {cell.sweep for cell in results}
    found: dict[str, tuple[str, Callable[[Path], None]]] = {}
    if some.intersection(FC):
        if panels(results):
            found["fully_connected"] = ("Accuracy against width and depth", lambda p: plot_fully_connected(results, p))
        found["differences"] = ("Lead of affine-like in every net", lambda p: plot_differences(results, p))
    if "batch_size" in some:
        found["batch_size"] = ("Accuracy against batch size", lambda p: plot_batch_size(results, p))
    if "cnn" in some:
        found["cnn"] = ("Convolutional nets", lambda p: plot_cnn(results, p))
    found["geometry"] = ("What each map does to a cloud in the plane", plot_geometry)
    return {f"{name}.png": drawing for name, drawing in found.items()}


def plots(results: Results, out: Path) -> None:
    """Draws everything there are runs for."""
    import matplotlib

    matplotlib.use("Agg")
    for name, (_, draw) in drawings(results).items():
        draw(out / name)


def save(figure, path: Path) -> None:
    """Writes a PNG and forgets the figure."""
    from matplotlib import pyplot

    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def plot_geometry(path: Path) -> None:
    """The cloud under every map, coloured by the radius before."""
    from matplotlib import pyplot

    once, _ = geometry()
    radius = np.linalg.norm(cloud().numpy(), axis=1)
    figure, axes = pyplot.subplots(2, 4, figsize=(12, 6.4), layout="constrained")
    for axis, (name, points) in zip(axes.flat, once.items(), strict=False):
        circle = np.linspace(0, 2 * np.pi, 200)
        dots = axis.scatter(*points.T, c=radius, s=9, cmap="viridis")
        axis.plot(np.cos(circle), np.sin(circle), color="black", linewidth=0.5, linestyle=":")
        reach = 1.15 * max(1.0, np.abs(points).max())
        axis.set(title=name, xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")
    for axis in axes.flat[len(once) :]:
        axis.axis("off")
    figure.colorbar(dots, ax=axes.flat[len(once)], label="radius before the map", fraction=0.3)
    figure.suptitle("What a layer with W = 1, b = 0 makes of a cloud in the plane (dotted: the unit circle)")
    save(figure, path)


def line(axis, x: list[int], columns: list[Result], name: str) -> None:
    """Draws a method's means and standard deviations."""
    spread = [statistics.stdev(r.test.values()) if len(r.test) > 1 else 0.0 for r in columns]
    axis.errorbar(x, [r.mean for r in columns], spread, color=COLOURS[name], marker="o", capsize=2, label=name, ms=4)


def panels(results: Results) -> list[tuple[str, str, list[Cell]]]:
    """What can be drawn against width or depth: a title, the axis and its cells, the other one fixed."""
    found = []
    for act in dict.fromkeys(cell.act for cell in results if cell.act):
        for by, fixed in (("width", "depth"), ("depth", "width")):
            cells = [cell for cell in results if cell.act == act]
            (_, most), *_ = count = collections.Counter(getattr(cell, fixed) for cell in cells).most_common()
            if most > 1:
                at = max(value for value, number in count if number == most)
                chosen = sorted((c for c in cells if getattr(c, fixed) == at), key=lambda c: getattr(c, by))
                found.append((f"{act}, {fixed} {at}", by, chosen))
    return found


def plot_fully_connected(results: Results, path: Path) -> None:
    """Accuracy against width and against depth."""
    from matplotlib import pyplot

    drawn = panels(results)
    figure, axes = pyplot.subplots(1, len(drawn), figsize=(4.2 * len(drawn), 4.2), layout="constrained", squeeze=False)
    for axis, (title, by, cells) in zip(axes[0], drawn, strict=True):
        for name in COLOURS:
            own = [cell for cell in cells if name in results[cell]]
            if own:
                line(axis, [getattr(cell, by) for cell in own], [results[cell][name] for cell in own], name)
        axis.set(title=title, xlabel=by, ylabel="test accuracy (%)", xscale="log")
        ticks = [getattr(cell, by) for cell in cells]
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.minorticks_off()
        axis.axhline(CHANCE, color="black", linewidth=0.5, linestyle=":")
    axes[0][0].legend(fontsize=8)
    save(figure, path)


def plot_differences(results: Results, path: Path) -> None:
    """The lead of affine-like over each normaliser in every net, with intervals."""
    from matplotlib import pyplot

    cells = sorted((c for c in results if c.act), key=lambda c: (c.act, c.width, c.depth))
    names = ("none", *CLASSICAL, "gradient")
    figure, axis = pyplot.subplots(figsize=(8, 1.5 + 0.75 * len(cells)), layout="constrained")
    for i, cell in enumerate(cells):
        for j, name in enumerate(names):
            gap = stratified(differences(results, [cell], "affine", [name]))
            if gap is not None:
                y = i + 0.12 * (j - len(names) / 2)
                error = [[gap.mean - gap.low], [gap.high - gap.mean]]
                label = name if name not in axis.get_legend_handles_labels()[1] else None
                axis.errorbar(gap.mean, y, xerr=error, color=COLOURS[name], marker="o", ms=4, capsize=2, label=label)
    axis.axvline(0, color="black", linewidth=0.5)
    axis.set_yticks(range(len(cells)), [f"{cell.act} {cell}" for cell in cells])
    axis.invert_yaxis()
    axis.set(xlabel="test accuracy of affine-like less that of ... (points), 95 % interval")
    axis.legend(fontsize=8)
    save(figure, path)


def plot_batch_size(results: Results, path: Path) -> None:
    """Accuracy, and lead over the plain net, against the batch size."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for name in COLOURS:
        for axis, less in zip(axes, (None, "none"), strict=True):
            points = dict(sorted(by_batch_size(results, name, less).items()))
            if points:
                means = [statistics.fmean(values) for values in points.values()]
                spread = [statistics.stdev(v) if len(v) > 1 else 0.0 for v in points.values()]
                axis.errorbar(list(points), means, spread, color=COLOURS[name], marker="o", capsize=2, label=name, ms=4)
                axis.set_xscale("log")
                axis.set_xticks(list(points), [str(size) for size in points])
                axis.minorticks_off()
    axes[0].set(xlabel="batch size", ylabel="test accuracy (%)", title="as many images, tuned rates")
    axes[1].set(xlabel="batch size", ylabel="lead over `none` (points)", title="less the plain net of the same seed")
    axes[0].legend(fontsize=8)
    save(figure, path)


def plot_cnn(results: Results, path: Path) -> None:
    """Accuracy of every method, one dot per seed."""
    from matplotlib import pyplot

    cells = [cell for cell in results if cell.sweep == "cnn"]
    figure, axes = pyplot.subplots(1, len(cells), figsize=(6.5 * len(cells), 4), layout="constrained", squeeze=False)
    for axis, cell in zip(axes[0], cells, strict=True):
        names = [name for name in METHODS if name in results[cell]]
        for i, name in enumerate(names):
            values = list(results[cell][name].test.values())
            colour = "#d62728" if name.startswith("pn_") else "#1f77b4"
            axis.plot(values, [i] * len(values), "o", color=colour, alpha=0.6, ms=5)
            axis.plot(statistics.fmean(values), i, "|", color="black", ms=14)
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()
        axis.set(xlabel="test accuracy (%)", title=f"{cell}: a dot per seed, the mean as a bar")
        axis.grid(axis="x", linewidth=0.3)
    save(figure, path)


# --------------------------------------------------------------------------------------------------------------------
# The page
# --------------------------------------------------------------------------------------------------------------------


def command(name: str) -> str:
    """Words the command that makes a sweep's runs."""
    return f"python ../sweep.py run sweeps/{name}.yaml --ledger ledgers/{name}.jsonl"


def planned(folder: Path, name: str) -> int:
    """The number of runs that a sweep asks for, from its YAML file."""
    spec = harness.read_yaml(folder / "sweeps" / f"{name}.yaml")
    points = len(spec["tune"]["grid"]["lr"]) * len(spec["tune"]["seeds"])
    return len(spec["methods"]) * (points + len(spec["seeds"]))


def page(results: Results, used: list[dict], folder: Path, suffix: str, figures: str) -> str:
    """Sets the page of claims.

    Args:
        results: What was measured.
        used: The ledgers' lines behind it.
        folder: Where the sweeps are.
        suffix: Of the sweeps' names.
        figures: The folder of the plots and tables, seen from the page.
    """
    count = collections.Counter(record["sweep"] for record in used)
    phases = collections.Counter(record["phase"] for record in used)
    hours = sum(record["metrics"]["seconds"] for record in used) / 3600
    bad = harness.diverged(used)
    text = [
        "# The paper's experiments\n",
        "Claims of the Affine Divergence paper (George Bird, arXiv 2512.22247) on CIFAR-10, by "
        "[the sweep harness](../sweep.py). This page is written by `report.py` from the ledgers; rules, margins and "
        "the statistics are in its code.\n",
        f"**{len(used)} runs** are behind it ({phases['tune']} of tuning, {phases['final']} final; {bad} diverged; "
        f"{hours:.1f} hours on one core of a busy machine): "
        + ", ".join(f"`{name}` {count[name + suffix]} of {planned(folder, name + suffix)}" for name in SWEEPS)
        + f". The verdicts are those of nets of their size and budget ({'large' if suffix else 'small and short'}, see "
        "[below](#how)).\n",
        "| claim | whose | our figures | verdict | sweeps |",
        "| --- | --- | --- | --- | --- |",
    ]
    details, outcomes = [], collections.defaultdict(list)
    for number, claim in enumerate(CLAIMS, 1):
        parts = claim.check(results)
        outcome = verdict(parts)
        if claim.whose == "question":
            outcome = re.sub("(not )?reproduced", lambda match: "no" if match[1] else "yes", outcome)
        outcomes[claim.whose == "paper", outcome].append(str(number))
        tally = collections.Counter(part.outcome for part in parts)
        figure = "; ".join(f"{part.what}: {part.figure.mean:+.2f}" for part in parts if part.figure)
        counts = ", ".join(f"{tally[name]} {name}" for name in (HOLDS, OPEN, FAILS, NO_RUNS) if tally[name])
        figure = f"{figure} ({counts})" if figure else counts
        cells = [f"[{number}. {claim.text}](#claim-{number})", claim.whose, figure, f"**{outcome}**"]
        text.append(harness.table_line([*cells, ", ".join(f"`{name}{suffix}`" for name in claim.sweeps)]))
        details += [
            f"### Claim {number}\n",
            f"{claim.text}: **{outcome}**. {claim.check.__doc__.splitlines()[0]}\n",
            "| what | figure [95 % interval] | nets | n | holds if the interval is | outcome |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for part in parts:
            sizes = (str(part.figure.cells), str(part.figure.n)) if part.figure else ("", "")
            details.append(harness.table_line([part.what, str(part.figure or ""), *sizes, part.rule, part.outcome]))
        details += ["", "```bash", "cd recipes/reproduce"]
        details += [command(name + suffix) for name in claim.sweeps]
        details += ["```", ""]
    text.insert(2, in_short(outcomes))
    text += [
        "",
        "Accuracies in points of per cent. The verdict follows from the parts below: *reproduced* (to a question: "
        "*yes*) if all hold, *not reproduced* (*no*) if none holds and one fails, *undecided* if all intervals contain "
        "the bound, else *partly*; *so far* if some parts have no runs yet.\n",
        "Batch sizes are compared at as many epochs, as the paper's hypothesis is put, so that a larger batch also "
        "means fewer updates, which holds any net back: claim 4 cannot tell the two apart, claim 5 takes out what "
        "they have in common.\n",
        *(f"![{title}]({figures}/{name})\n" for name, (title, _) in drawings(results).items()),
        f"All accuracies: [fully connected]({figures}/fully_connected.md), [convolutional]({figures}/cnn.md), "
        f"[batch size]({figures}/batch_size.md).\n",
        "## The claims, part by part\n",
        "The interval of a difference is Student's t over the differences paired by seed, pooled over the nets: it "
        "says what other seeds would give in these nets, not what other nets would. That of a correlation is a "
        "bootstrap over the seeds. Intervals are not corrected for their number.\n",
        *details,
        "## What single layers do\n",
        geometry_table(),
        HOW.format(
            suffix=suffix,
            option=" --full" if suffix else "",
            full=", ".join(f"{planned(folder, n + '_full'):,}" for n in SWEEPS),
        ),
        provenance(used),
    ]
    return "\n".join(text)


def in_short(outcomes: dict[tuple[bool, str], list[str]]) -> str:
    """Words the verdicts, (whether it is the paper's claim, verdict) -> numbers of the claims, as a sentence or two."""
    order = ("reproduced", "yes", "partly", "not reproduced", "no", "undecided", NO_RUNS)
    sentences = []
    for papers, whose in ((True, "the paper's claims"), (False, "our own questions and checks")):
        found = {outcome: numbers for (is_papers, outcome), numbers in outcomes.items() if is_papers == papers}
        ranked = sorted(found, key=lambda outcome: order.index(outcome.removesuffix(" so far")))
        said = "; ".join(f"*{outcome}* {', '.join(found[outcome])}" for outcome in ranked)
        sentences.append(f"Of {whose}: {said}.")
    return f"**In short.** {' '.join(sentences)}\n"


HOW = """## How

* Methods: `none`, `batch`, `layer`, `rms`, `l2` are norms before every linear layer (behind every convolution);
  `l2` is also the paper's norm-like map. `affine` is affine-like with `scale="rms"`, `affine_l2` in the paper's form,
  the same map with other weights and rates; `affine_centred` is ours; `gradient` corrects the gradient alone. `pn_...`
  are PatchNorm convolutions. A centred map of one number is nothing (the layer raises an error): width 1 has none.
* Every method has four learning rates, a factor of about three apart, and the one of the best accuracy on validation
  images, split off the training set, is taken. Where the rates of a map lie was found by a pilot, also on
  validation images (`sweeps/pilot.yaml`). The test set is read once per final run, with other seeds, on the whole
  training part.
* No augmentation, SGD with momentum 0.9, a cosine schedule. `sweeps/*.yaml` have all of it; `grids.py` writes them.
* The small sweeps: 5,000 (convolutional nets) or 10,000 training images, three or four epochs, so that a run takes
  seconds on one core.
* What a GPU would add: the `..._full` sweeps ({full} runs), on all 50,000 images, for 20 to 30
  epochs, with ten seeds, more widths, depths and batch sizes, and larger convolutional nets.

```bash
cd recipes/reproduce
for name in fc_tanh fc_leaky_relu cnn batch_size; do
  python ../sweep.py run sweeps/$name{suffix}.yaml --ledger ledgers/$name{suffix}.jsonl
done
python report.py{option}
```

Finished runs are in the ledgers and are not run again; `--set dataset=path/to/cifar10` uses a copy of the data,
`--only` does some methods, and several processes may share a ledger.
"""


def provenance(used: list[dict]) -> str:
    """Words what the runs were made with."""
    if not used:
        return ""
    stamps = {
        "revision": {record["revision"] or "unknown" for record in used},
        "torch": {record["versions"]["torch"] for record in used},
        "timm": {record["versions"]["timm"] for record in used},
        "device": {record["device"] for record in used},
        "threads": {str(record["threads"]) for record in used},
    }
    return "Made with " + "; ".join(f"{name} {', '.join(sorted(values))}" for name, values in stamps.items()) + ".\n"


def texts(folder: Path, suffix: str = "") -> tuple[dict[str, str], Results]:
    """Makes all Markdown files from the ledgers.

    Args:
        folder: Where `sweeps` and `ledgers` are.
        suffix: "" or "_full".

    Returns:
        The texts by path, seen from where they are to be written, and the results.
    """
    results, used = read(folder, suffix)
    figures = f"results{suffix}"
    return {
        f"README{suffix}.md": page(results, used, folder, suffix, figures),
        f"{figures}/fully_connected.md": fc_text(results),
        f"{figures}/cnn.md": cnn_text(results),
        f"{figures}/batch_size.md": batch_text(results),
    }, results


def main(argv: list[str] | None = None) -> int:
    """Writes everything."""
    parser = argparse.ArgumentParser(description="Write the plots, the tables and the page of claims.")
    parser.add_argument("--full", action="store_true", help="of the *_full sweeps")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder to write to (default: beside this file)")
    parser.add_argument("--no-plots", action="store_true", help="only the Markdown files")
    args = parser.parse_args(argv)
    suffix = "_full" if args.full else ""
    written, results = texts(FOLDER, suffix)
    (args.out / f"results{suffix}").mkdir(parents=True, exist_ok=True)
    for name, content in written.items():
        (args.out / name).write_text(content, encoding="utf-8")
    if not args.no_plots:
        plots(results, args.out / f"results{suffix}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
