"""What a diagnosis found: :class:`DivergenceReport`, with its table, its figures and its page."""

import statistics
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["DivergenceReport", "LayerDivergence", "NotCovered"]


@dataclass
class LayerDivergence:
    """One layer, or one attention's logits. The quantities are defined in :mod:`affdiv_zoo.diagnostics`.

    Attributes:
        name: The layer's name in the model; that of logits ends in ``.logits``.
        kind: The class of the module, or ``"logits"``.
        correction: ``"none"``, ``"affine"``, ``"norm"`` or ``"gradient"``; of logits the attention correction.
        rows: Over how many rows (samples x positions x groups x calls) or pairs of tokens the moments are taken.
        calls: How often the layer is called in one pass.
        divergence: The mean over the rows of the same-sample divergence factor K(p, p): by how much more than the ideal
            update a row's own gradient moves it.
        std: Its standard deviation over the rows.
        cosine: Between the effective update of all of the layer's outputs and the ideal one.
        norm_ratio: The length of the effective update over the ideal one's.
        same: The length of the update by each row's own gradient, over the ideal one's.
        patch: That of the update by the same sample's other rows: other patches, other tokens, other calls.
        sample: That of the update by other samples.
        verify_error: The largest relative difference between prediction and measurement, None without ``verify``.
        whole_cosine: As ``cosine``, measured in a step of all parameters at once; None without ``whole_step``, of
            logits, and of layers without a gradient or with several parts.
        whole_norm_ratio: As ``norm_ratio``, in that step.
        note: A remark.
    """

    name: str
    kind: str
    correction: str
    rows: int
    calls: int
    divergence: float
    std: float
    cosine: float
    norm_ratio: float
    same: float
    patch: float
    sample: float
    verify_error: float | None = None
    whole_cosine: float | None = None
    whole_norm_ratio: float | None = None
    note: str = ""

    @property
    def spread(self) -> float:
        """std / mean of the divergence factor: 0 where every row moves by the same multiple of its ideal update."""
        return self.std / self.divergence if self.divergence else 0.0

    @property
    def shares(self) -> tuple[float, float, float]:
        """The lengths of the three parts over their sum: the row itself, its sample's other rows, other samples."""
        whole = self.same + self.patch + self.sample
        return (self.same / whole, self.patch / whole, self.sample / whole) if whole else (0.0, 0.0, 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Everything, the properties too, as plain types."""
        same, patch, sample = self.shares
        return asdict(self) | {
            "spread": self.spread,
            "same_share": same,
            "patch_share": patch,
            "sample_share": sample,
        }


@dataclass
class NotCovered:
    """A module with parameters, or an attention's logits, that the diagnosis does not reach.

    Attributes:
        name: Its name in the model.
        kind: Its class.
        parameters: How many it has of its own.
        why: The reason.
    """

    name: str
    kind: str
    parameters: int
    why: str


@dataclass
class DivergenceReport:
    """What :func:`affdiv_zoo.diagnose` found; ``print`` shows it as a table.

    Attributes:
        model: The model's name or class.
        batch_size: The number of samples.
        loss: The loss on them.
        optimizer: The class of the optimizer whose step ``cosine`` and ``norm_ratio`` describe; None for the gradient.
        training: Whether the model was in training mode.
        layers: One entry per layer and per attention's logits, in the model's order.
        not_covered: What is not among them, and why.
    """

    model: str
    batch_size: int
    loss: float
    optimizer: str | None = None
    training: bool = False
    layers: list[LayerDivergence] = field(default_factory=list)
    not_covered: list[NotCovered] = field(default_factory=list)

    def __getitem__(self, name: str) -> LayerDivergence:
        """The layer of this name.

        Raises:
            KeyError: There is none.
        """
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(f"{name!r} is not among the report's layers: {', '.join(e.name for e in self.layers)}")

    @property
    def max_verify_error(self) -> float | None:
        """The largest difference between a prediction and its measurement; None without ``verify``."""
        return max((e.verify_error for e in self.layers if e.verify_error is not None), default=None)

    def summary(self) -> dict[str, float]:
        """Medians over the layers (logits apart): robust numbers to follow over training.

        A layer without a gradient (in front of a zero weight, such as that of a residual block's last BatchNorm) counts
        for the divergence and the spread only.

        Returns:
            ``divergence``, ``spread``, ``cosine``, ``norm_ratio``, ``same_share``, ``patch_share`` and
            ``sample_share``, and ``logits_divergence`` and ``logits_spread`` where logits are covered.
        """
        layers = [e.to_dict() for e in self.layers if e.kind != "logits"]
        moving = [e for e in layers if e["same"] > 0]
        logits = [e.to_dict() for e in self.layers if e.kind == "logits"]
        median = lambda key, rows: statistics.median(e[key] for e in rows)  # noqa: E731
        found = {key: median(key, layers) for key in ("divergence", "spread") if layers}
        keys = ("cosine", "norm_ratio", "same_share", "patch_share", "sample_share")
        found |= {key: median(key, moving) for key in keys if moving}
        return found | {f"logits_{key}": median(key, logits) for key in ("divergence", "spread") if logits}

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain types, ready for JSON."""
        return asdict(self) | {"layers": [e.to_dict() for e in self.layers], "summary": self.summary()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "DivergenceReport":
        """The report that :meth:`to_dict` was called on."""
        pick = lambda kind, d: kind(**{k: v for k, v in d.items() if k in kind.__dataclass_fields__})  # noqa: E731
        report = pick(cls, data)
        report.layers = [pick(LayerDivergence, d) for d in data["layers"]]
        report.not_covered = [pick(NotCovered, d) for d in data["not_covered"]]
        return report

    def to_frame(self) -> Any:
        """One row per layer as a ``pandas.DataFrame``, indexed by name.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError("to_frame needs pandas: pip install pandas, or use to_dict()") from error
        return pandas.DataFrame([e.to_dict() for e in self.layers]).set_index("name")

    def plot(self, path: str | Path, others: "Sequence[DivergenceReport]" = ()) -> None:
        """Draws the layers' bars and the divergence against depth; further reports beside this one.

        Args:
            path: An image file; its ending (.png, .svg, .pdf) decides the format.
            others: Reports to compare with.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: A report has no layers, or the format is unknown.
        """
        from affdiv_zoo.diagnostics.draw import draw_reports, save

        save(draw_reports([self, *others]), path)

    def save_html(self, path: str | Path, others: "Sequence[DivergenceReport]" = ()) -> None:
        """Writes one self-contained page, which a browser shows without a server or a network.

        Args:
            path: The file to write.
            others: Reports to compare with.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: A report has no layers.
        """
        from affdiv_zoo.diagnostics.html import write_page

        write_page([self, *others], path)

    def __str__(self) -> str:
        step = "one SGD step" if self.optimizer is None else f"one step of {self.optimizer}"
        mode = "training" if self.training else "evaluation"
        lines = [f"{self.model}: {step} on {self.batch_size} samples in {mode} mode, loss {self.loss:.4g}"]
        width = min(max((len(e.name) for e in self.layers), default=5), 36)
        optional = optional_columns([self])
        lines.append(
            f"{'layer':{width}} {'kind':16} {'correct.':10} {'divergence':>10} {'spread':>7} {'cosine':>7} {'norm':>9}"
            f" {'same':>5} {'patch':>6} {'sample':>6}" + "".join(f" {column.head:>8}" for column in optional)
        )
        lines.append("-" * len(lines[-1]))
        for e in self.layers:
            same, patch, sample = e.shares
            row = (
                f"{_short(e.name, width):{width}} {_short(e.kind, 16):16} {e.correction:10} {number(e.divergence):>10} "
                f"{e.spread:7.3f} {e.cosine:7.3f} {number(e.norm_ratio):>9} {same:5.0%} {patch:6.0%} {sample:6.0%}"
            )
            lines.append(row + "".join(f" {column.text(e):>8}" for column in optional))
        lines += [
            "ideal: spread 0 and cosine 1; the height of the divergence is a common factor, which the rate absorbs.",
            "norm: ||effective|| / ||ideal||; same, patch, sample: the shares of the row itself, of other rows of its",
            "sample, and of other samples",
        ]
        lines += _wrapped(self.note_lines())
        if self.not_covered:
            lines.append(f"not covered ({len(self.not_covered)}):")
            lines += _wrapped(self.not_covered_lines())
        return "\n".join(lines)

    def note_lines(self) -> list[str]:
        """The layers' remarks, alike ones in one line."""
        return _together((e.note, e.name) for e in self.layers if e.note)

    def not_covered_lines(self) -> list[str]:
        """What is not covered, alike ones in one line."""
        return _together(
            ((e.why, e.name or "(the model)") for e in self.not_covered), [e.kind for e in self.not_covered]
        )


@dataclass(frozen=True)
class OptionalColumn:
    """A column that is shown where any layer has its number.

    Attributes:
        key: The attribute of :class:`LayerDivergence`.
        head: In the printed table.
        title: In the page.
    """

    key: str
    head: str
    title: str

    def text(self, entry: LayerDivergence) -> str:
        """The number as shown; empty if there is none."""
        value = getattr(entry, self.key)
        if value is None:
            return ""
        return {"verify_error": f"{value:.0e}", "whole_cosine": f"{value:.3f}"}.get(self.key) or number(value)


def optional_columns(reports: "Sequence[DivergenceReport]") -> list[OptionalColumn]:
    """Those that one of the reports needs."""
    columns = (
        OptionalColumn("verify_error", "verify", "verified to"),
        OptionalColumn("whole_cosine", "all: cos", "cosine, all layers moving"),
        OptionalColumn("whole_norm_ratio", "all:norm", "norm ratio, all layers moving"),
    )
    return [c for c in columns if any(getattr(e, c.key) is not None for r in reports for e in r.layers)]


def _together(remarks: Iterable[tuple[str, str]], kinds: Sequence[str] = ()) -> list[str]:
    """(remark, name) pairs, one line for each remark (and kind), with the first names."""
    names: dict[tuple[str, str], list[str]] = {}
    for i, (remark, name) in enumerate(remarks):
        names.setdefault((kinds[i] if kinds else "", remark), []).append(name)
    lines = []
    for (kind, remark), found in names.items():
        what = kind or ("layer" if len(found) == 1 else "layers")
        lines.append(f"{len(found)} {what} ({', '.join(found[:3])}{', ...' if len(found) > 3 else ''}): {remark}")
    return lines


def _wrapped(texts: list[str]) -> list[str]:
    return [line for t in texts for line in textwrap.wrap(t, 110, initial_indent="  ", subsequent_indent="      ")]


def number(value: float) -> str:
    """Four significant digits in at most nine characters."""
    return f"{value:.4g}" if 1e-3 <= abs(value) < 1e5 or value == 0 else f"{value:.2e}"


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else "~" + text[-width + 1 :]
