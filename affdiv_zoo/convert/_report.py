"""What a conversion did, norm by norm."""

import json
import textwrap
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Result = Literal["exact", "approximate", "left"]


@dataclass
class LayerChange:
    """A layer that took over a norm's work.

    Attributes:
        name: The layer's name in the model.
        center: Its ``center``.
        eps: Its ``eps``.
        bias: Whether it has a bias now.
        difference: For approximate swaps, measured on ``example_input``: the RMS of (corrected layer - what it stands
            for), both given the converted model's input of the layer, over the RMS of the latter.
        std_ratio: For approximate swaps of BatchNorm, the mean over channels of the output's standard deviation over
            that in the original model.
    """

    name: str
    center: bool
    eps: float
    bias: bool = False
    difference: float | None = None
    std_ratio: float | None = None


@dataclass
class NormReport:
    """What became of one norm.

    Attributes:
        name: Its name in the model.
        kind: Its class's name.
        result: ``"exact"``, ``"approximate"`` or ``"left"``.
        why: The reason, or a remark.
        layers: The layers that were corrected in its stead.
    """

    name: str
    kind: str
    result: Result
    why: str = ""
    layers: list[LayerChange] = field(default_factory=list)

    @property
    def difference(self) -> float | None:
        """The largest difference of its layers, None unless approximate."""
        return max((c.difference for c in self.layers if c.difference is not None), default=None)


@dataclass
class AttentionChange:
    """An attention module that was corrected.

    Attributes:
        name: Its name in the model.
        difference: Measured on ``example_input``: the RMS of (corrected - uncorrected) over the RMS of the latter, both
            of the module's output for the same input.
    """

    name: str
    difference: float = 0.0


@dataclass
class ConversionReport:
    """What :func:`affdiv_zoo.convert` did; ``print`` shows it as a table.

    Attributes:
        model: The model's class name.
        correction: The correction asked for.
        scale: The scale asked for.
        attention: The attention correction asked for.
        norms: One entry per norm in the model.
        attentions: The attention modules that were corrected.
        output_difference: On ``example_input``, in evaluation mode: the largest absolute change of the model's output
            over its largest absolute value. None if the output holds no floating-point tensor.
        notes: Remarks on the whole model.
    """

    model: str
    correction: str
    scale: str
    attention: str = "none"
    norms: list[NormReport] = field(default_factory=list)
    attentions: list[AttentionChange] = field(default_factory=list)
    output_difference: float | None = None
    notes: list[str] = field(default_factory=list)

    def count(self, result: Result) -> int:
        """How many norms had this result."""
        return sum(n.result == result for n in self.norms)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain types, ready for JSON."""
        return asdict(self)

    def plan(self) -> str:
        """The swaps as one JSON string, for :func:`affdiv_zoo.convert.apply_plan`."""
        swaps = [
            [n.name, [[c.name, c.center, c.eps, c.bias] for c in n.layers]] for n in self.norms if n.result != "left"
        ]
        plan = {"correction": self.correction, "scale": self.scale, "swaps": swaps}
        if self.attentions:
            plan |= {"attention": self.attention, "attentions": [a.name for a in self.attentions]}
        return json.dumps(plan, separators=(",", ":"))

    def __str__(self) -> str:
        if not self.norms:
            head = f"{self.model}: no norms found, nothing to convert"
            return "\n".join([head, *self.notes])
        head = (
            f"{self.model}, correction={self.correction!r}: {len(self.norms)} norms, {self.count('exact')} swapped "
            f"exactly, {self.count('approximate')} approximately, {self.count('left')} left"
        )
        lines = textwrap.wrap(head, 100)
        if self.output_difference is not None:
            lines.append(
                f"largest relative change of the model's output on example_input: {self.output_difference:.1e}"
            )
        lines += [f"{'norm':30} {'kind':16} {'result':12} {'difference':>10}  why / layers", "-" * 100]
        for n in self.norms:
            text = n.why or ", ".join(c.name for c in n.layers)
            wrapped = textwrap.wrap(text, 27, break_on_hyphens=False) or [""]
            difference = "" if n.difference is None else f"{n.difference:.3f}"
            lines.append(
                f"{_short(n.name, 30):30} {_short(n.kind, 16):16} {n.result:12} {difference:>10}  {wrapped[0]}"
            )
            lines += [" " * 72 + w for w in wrapped[1:]]
        for a in self.attentions:
            kind = f"attention {self.attention}"
            lines.append(f"{_short(a.name, 30):30} {kind:29} {a.difference:10.3f}")
        return "\n".join(lines + self.notes)


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else "~" + text[-width + 1 :]
