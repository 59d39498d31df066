"""The reproduction: sweeps and pages are what their generators make, and the verdicts follow from the figures."""

import importlib
import itertools
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from scipy import stats

FOLDER = Path(__file__).parents[2] / "recipes" / "reproduce"
sys.path.insert(0, str(FOLDER))

pytest.importorskip("accelerate")
grids = importlib.import_module("grids")
report = importlib.import_module("report")

Cell, Result, Interval, Part = report.Cell, report.Result, report.Interval, report.Part


def result(*values, diverged=0):
    return Result(dict(enumerate(values)), diverged, 0.1, False, {0.03: 1.0, 0.1: 2.0})


def world(lead=3.0, narrow=5.0, slope=-1.0, patch=1.0):
    """Made-up results of little noise in which all claims are true, for positive leads and a negative slope."""
    noise = (-0.1, 0.0, 0.15)
    results = {}
    for act, width, depth in itertools.product(("tanh", "leaky_relu"), (1, 16, 256), (2, 6, 12)):
        own = narrow if width == 1 else lead * (1 + (width == 256) + depth / 6 + (act == "tanh"))
        base = 10.0 if width == 1 else 40.0
        row = {name: result(*(base + x for x in noise)) for name in ("none", "gradient", *report.CLASSICAL)}
        for name in ("affine", "affine_l2"):
            row[name] = result(*(base + own + 0.5 * x for x in noise))
        results[Cell(f"fc_{act}", width, depth, 128)] = row
    row = {name: result(*(50 + x for x in noise)) for name in ("none", *report.CNN_CLASSICAL)}
    for name in ("pn_affine", "pn_norm", "pn_centred"):
        row[name] = result(*(50 + patch - 0.5 * x for x in noise))
    results[Cell("cnn", 16, 4, 64)] = row
    for i, size in enumerate((8, 32, 128, 512)):
        row = {name: result(*(30 + 0.01 * i + x for x in noise)) for name in ("none", "batch")}
        for name in ("affine", "affine_centred"):
            row[name] = result(*(30 + slope * i + x / 2 for x in noise))
        results[Cell("batch_size", 64, 4, size)] = row
    return results


# --------------------------------------------------------------------------------------------------------------------
# Generated files
# --------------------------------------------------------------------------------------------------------------------


def test_the_sweeps_are_what_grids_writes():
    for name, text in grids.files().items():
        assert (FOLDER / "sweeps" / name).read_text() == text, f"{name}: run recipes/reproduce/grids.py"


@pytest.mark.parametrize("name", [name for name in grids.files() if "_full" not in name])
def test_all_methods_of_a_sweep_have_the_same_budget(name):
    spec = report.harness.read_yaml(FOLDER / "sweeps" / name)
    assert {len(method["grid"]["lr"]) for method in spec["methods"].values()} == {len(grids.RATES)}
    for method in spec["methods"].values():
        rates = method["grid"]["lr"]
        assert all(2.9 < b / a < 3.4 for a, b in itertools.pairwise(rates))


def test_the_pages_are_what_the_committed_ledgers_give(tmp_path, capsys):
    assert report.main(["--out", str(tmp_path), "--no-plots"]) == 0
    assert capsys.readouterr().err == "", "every line of the ledgers is a record"
    names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.md")}
    assert "README.md" in names and len(names) == 4
    for name in names:
        assert (tmp_path / name).read_text() == (FOLDER / name).read_text(), f"{name}: run recipes/reproduce/report.py"


def test_every_plot_of_the_page_is_there():
    shown = set(report.re.findall(r"\]\((results/\w+\.png)\)", (FOLDER / "README.md").read_text()))
    assert "results/geometry.png" in shown and len(shown) == len(list((FOLDER / "results").glob("*.png")))
    assert all((FOLDER / name).stat().st_size > 10_000 for name in shown)


def test_plots(tmp_path):
    """All are drawn from made-up results, those without runs are left out."""
    pytest.importorskip("matplotlib")
    image = importlib.import_module("matplotlib.image")
    report.plots({}, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["geometry.png"]
    report.plots({cell: row for cell, row in world().items() if cell.width < 256 and cell.depth < 12}, tmp_path)
    assert len(list(tmp_path.iterdir())) == 5
    for path in tmp_path.iterdir():
        colours = (255 * image.imread(path)[..., :3]).astype(int) @ (65536, 256, 1)
        assert len(np.unique(colours)) > 50, path.name


# --------------------------------------------------------------------------------------------------------------------
# Statistics
# --------------------------------------------------------------------------------------------------------------------


def test_one_cells_interval_is_students():
    values = [0.3, -0.1, 0.8, 0.5]
    got = report.stratified([values])
    known = stats.ttest_1samp(values, 0).confidence_interval()
    assert (got.mean, got.low, got.high) == pytest.approx((statistics.fmean(values), known.low, known.high))
    assert (got.n, got.cells) == (4, 1)


def test_cells_are_strata():
    """What differs between the cells is no error: two cells of means 0 and 10, each with variance 1."""
    got = report.stratified([[-1.0, 0.0, 1.0], [9.0, 10.0, 11.0]])
    half = stats.t.ppf(0.975, 4) * (1 / 3 + 1 / 3) ** 0.5 / 2
    assert (got.mean, got.high - got.mean) == pytest.approx((5.0, half))
    assert report.stratified([[1.0], [2.0]]) is None and report.stratified([]) is None


def test_a_contrast_is_the_two_sample_test():
    left, right = [0.3, -0.1, 0.8], [1.5, 1.2, 0.4, 0.9]
    got = report.contrast([left], [right])
    known = stats.ttest_ind(left, right).confidence_interval()
    assert (got.low, got.high) == pytest.approx((known.low, known.high))
    assert report.contrast([left], []) is None


def test_differences_are_paired_by_seed():
    cell = Cell("fc_tanh", 16, 6, 128)
    row = {"affine": Result({0: 5.0, 1: 7.0, 3: 1.0}, 0, 0.1, False, {}), "batch": result(1.0, 2.0, 9.0)}
    assert report.differences({cell: row}, [cell], "affine", ["batch"]) == [[4.0, 5.0]]
    assert report.differences({cell: row}, [cell], "affine", ["batch", "layer"]) == []


def test_correlation():
    points = {512: [1.0, 0.5], 8: [4.0, 3.5], 32: [3.0, 2.2]}
    got = report.correlation(points)
    known = stats.spearmanr([8, 8, 32, 32, 512, 512], [4.0, 3.5, 3.0, 2.2, 1.0, 0.5]).statistic
    assert got.mean == pytest.approx(known) and got.low <= got.mean <= got.high < 0
    same = report.correlation({size: [1.0, 2.0, 3.0] for size in (8, 32, 128)})
    assert same.mean == pytest.approx(0, abs=1e-12) and same.low < -0.2 and same.high > 0.2
    constant = report.correlation({size: [1.0, 1.0] for size in (8, 32, 128)}, draws=10)
    assert (constant.low, constant.high) == (0, 0)
    assert report.correlation({8: [1.0, 2.0], 32: [1.0, 2.0]}) is None


# --------------------------------------------------------------------------------------------------------------------
# Verdicts
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "outcomes"),  # of: above 0, above -1, below 0, not below 0
    (
        (0.1, 0.5, ("holds", "holds", "fails", "holds")),
        (-0.5, 0.5, ("open", "holds", "open", "holds")),
        (-1.5, 0.5, ("open", "open", "open", "holds")),
        (-0.9, -0.1, ("fails", "holds", "holds", "fails")),
        (-3.0, -2.0, ("fails", "fails", "holds", "fails")),
    ),
)
def test_outcomes(low, high, outcomes):
    figure = Interval((low + high) / 2, low, high, 3, 1)
    rules = (
        report.above("", figure),
        report.above("", figure, bound=-1.0),
        report.below("", figure),
        report.not_below("", figure),
    )
    assert tuple(part.outcome for part in rules) == outcomes
    assert report.above("", None).outcome == report.below("", None).outcome == report.not_below("", None).outcome
    assert report.above("", None).outcome == "no runs"


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    (
        (("holds", "holds"), "reproduced"),
        (("holds", "no runs"), "reproduced so far"),
        (("fails", "no runs"), "not reproduced so far"),
        (("holds", "open"), "partly"),
        (("holds", "fails"), "partly"),
        (("open", "fails"), "not reproduced"),
        (("open", "open"), "undecided"),
        (("no runs",), "no runs"),
    ),
)
def test_verdicts(outcomes, verdict):
    assert report.verdict([Part("", None, "", outcome) for outcome in outcomes]) == verdict


def verdicts(results):
    return [report.verdict(claim.check(results)) for claim in report.CLAIMS]


def test_claims_follow_the_figures():
    """The same checks on worlds in which the claims are true, and in which they are not."""
    assert verdicts(world())[:8] == ["reproduced"] * 8
    # The batch claims keep the parts about BatchNorm and the plain net; the norm-like PatchNorm ties with its twin.
    wrong = verdicts(world(lead=-3.0, narrow=0.0, slope=1.0, patch=-9.0))
    assert [wrong[i] for i in (0, 1, 2, 5, 6)] == ["not reproduced"] * 3 + ["not reproduced"] * 2
    assert wrong[3] == wrong[4] == wrong[7] == "partly"
    assert verdicts({}) == ["no runs"] * len(report.CLAIMS)
    batch = report.batch_hypothesis(world(slope=1.0))
    assert [part.outcome for part in batch] == ["fails", "fails", "holds", "holds"]


def test_width_one_needs_more_than_chance():
    outcomes = [part.outcome for part in report.width_one(world(narrow=0.5))]
    assert outcomes == ["fails"] * 6 + ["holds"] * 4


# --------------------------------------------------------------------------------------------------------------------
# What single layers do
# --------------------------------------------------------------------------------------------------------------------


def test_geometry():
    once, twice = report.geometry()
    before = np.linalg.norm(report.cloud().numpy(), axis=1)
    radii = {name: np.linalg.norm(points, axis=1) for name, points in once.items()}
    assert radii["norm-like (L2)"] == pytest.approx(1, abs=1e-3)
    assert radii["RMSNorm"] == pytest.approx(2**0.5, abs=1e-3)
    assert radii["affine-like"] == pytest.approx(before / np.sqrt(before**2 + 1))
    assert np.linalg.matrix_rank(once["affine-like, centred"], tol=1e-9) == 1
    moved = {name: np.abs(twice[name] - points).max() for name, points in once.items()}
    assert max(moved["norm-like (L2)"], moved["RMSNorm"], moved["BatchNorm"]) < 1e-2 < moved["affine-like"]


def test_width_one():
    """LayerNorm of one number is a constant, RMSNorm and L2 leave its sign; affine-like still tells images apart."""
    torch.manual_seed(0)
    images = torch.randn(32, 3, 32, 32)
    distinct = {}
    for norm in ("layer", "rms", "l2"):
        outputs = timm.create_model("mlp_cifar", norm=norm, width=1, depth=3)(images)
        distinct[norm] = len(torch.unique(outputs.round(decimals=2), dim=0))
    assert distinct["layer"] == 1 and distinct["rms"] <= 2 and distinct["l2"] <= 2
    outputs = timm.create_model("mlp_cifar_affine", width=1, depth=3)(images)
    assert len(torch.unique(outputs.round(decimals=2), dim=0)) > 10
    with pytest.raises(ValueError, match="center=True"):
        timm.create_model("mlp_cifar_affine", width=1, center=True)
