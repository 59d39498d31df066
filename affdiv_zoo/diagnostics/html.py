"""The report as one page: its style, its figure and its few lines of script inside, nothing loaded from anywhere."""

import io
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from affdiv_zoo._files import write_whole
from affdiv_zoo.diagnostics.draw import COLORS, PARTS, _matplotlib, draw_reports, in_order, labelled, tint
from affdiv_zoo.diagnostics.report import DivergenceReport, LayerDivergence, OptionalColumn, number, optional_columns

__all__ = ["page", "write_page"]

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2126; background: #fff; margin: 0 auto; padding: 1.5rem;
  max-width: 1320px; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; }
p { max-width: 78ch; margin: .4rem 0; } code { font-family: ui-monospace, monospace; font-size: .92em; }
.scroll { overflow-x: auto; border: 1px solid #d8dde2; border-radius: 6px; }
.tall { max-height: 75vh; overflow-y: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .87rem; width: 100%; }
th, td { padding: .25rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #edf0f2; }
th { background: #f3f5f7; font-weight: 600; } thead { position: sticky; top: 0; }
th[data-sort] { cursor: pointer; } th[data-sort]:hover { text-decoration: underline; }
th:first-child, td:first-child, .left { text-align: left; }
td:first-child { font-family: ui-monospace, monospace; font-size: .82rem; }
tbody tr:hover td { background: #f8fafb; }
.first { border-left: 2px solid #d8dde2; }
.bar { display: flex; width: 110px; height: 12px; border-radius: 2px; overflow: hidden; background: #eceff1; }
.dot { display: inline-block; width: .7em; height: .7em; border-radius: 50%; margin-right: .4em; }
.key { display: inline-block; width: 1.1em; height: .75em; margin: 0 .3em 0 .8em; vertical-align: baseline; }
.muted { color: #66707a; } svg { width: 100%; height: auto; } ul { padding-left: 1.2rem; } li { margin: .15rem 0; }
"""

SCRIPT = """
document.querySelectorAll('th[data-sort]').forEach(function (th) {
  th.addEventListener('click', function () {
    var table = th.closest('table'), body = table.tBodies[0], i = Number(th.dataset.sort);
    var down = th.dataset.down !== '1';
    table.querySelectorAll('th').forEach(function (t) { delete t.dataset.down; });
    th.dataset.down = down ? '1' : '0';
    var value = function (row) { return row.cells[i].dataset.value; };
    Array.from(body.rows).sort(function (a, b) {
      var x = parseFloat(value(a)), y = parseFloat(value(b));
      if (isNaN(x)) return 1;
      if (isNaN(y)) return -1;
      return i === 0 ? x - y : (down ? y - x : x - y);
    }).forEach(function (row) { body.appendChild(row); });
  });
});
"""

COLUMNS = (
    ("divergence", "mean of the same-sample divergence factor: a row's update by itself over its ideal update"),
    ("spread", "its standard deviation over its mean; 0 is ideal"),
    ("cosine", "between the effective and the ideal update of all outputs; 1 is ideal"),
    ("norm ratio", "length of the effective update over the ideal one's"),
    ("parts", "of the effective update, by length: the row itself, its sample's other rows, other samples"),
)


def write_page(reports: Sequence[DivergenceReport], path: str | Path) -> None:
    """Writes :func:`page` into a file, whole or not at all; makes the folder if there is none."""
    text = page(reports)
    write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def page(reports: Sequence[DivergenceReport]) -> str:
    """The page's source.

    Args:
        reports: One or several, side by side.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: A report has no layers.
    """
    figure = _figure(reports)
    labels = labelled(reports)
    title = "Affine divergence: " + " and ".join(labels)
    sections = [
        f"<h1>{escape(title)}</h1>",
        "<p>How one training step moves the outputs of every layer, against the ideal update &minus;&eta; "
        "&part;L/&part;z. Only the layer's own parameters move, its input is held. Definitions: "
        "<code>help(affdiv_zoo.diagnostics)</code>; paper: George Bird, <i>The Affine Divergence</i>, arXiv "
        "2512.22247.</p>",
        "<h2>Summary</h2>",
        _summary(reports, labels),
        "<h2>Figure</h2>",
        figure,
        "<h2>Layers</h2>",
        "<ul>" + "".join(f"<li><b>{name}</b>: {text}</li>" for name, text in COLUMNS) + "</ul>",
        "<p>Parts, strong to faint: "
        + "".join(
            f'<span class="key" style="background:{tint("#404040", strength)}"></span>{name}'
            for name, strength in PARTS
        )
        + '. <span class="muted">A click on a column\'s head sorts; on "layer" it restores the order.</span></p>',
        _layers(reports, labels),
        "<h2>Remarks</h2>",
        *(_remarks(r, label) for r, label in zip(reports, labels, strict=True)),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(sections)
        + f"\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _figure(reports: Sequence[DivergenceReport]) -> str:
    """The plot as SVG that stands in a page."""
    buffer = io.StringIO()
    with _matplotlib().rc_context({"svg.fonttype": "none", "font.family": "sans-serif", "svg.hashsalt": "affdiv"}):
        draw_reports(reports).savefig(buffer, format="svg", metadata={"Date": None}, bbox_inches="tight")
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    return re.sub(r"<metadata>.*?</metadata>", "", svg, count=1, flags=re.DOTALL)


def _dot(i: int) -> str:
    return f'<span class="dot" style="background:{COLORS[i % len(COLORS)]}"></span>'


def _summary(reports: Sequence[DivergenceReport], labels: list[str]) -> str:
    heads = ("model", "layers", "batch", "mode", "step", "loss", "divergence", "spread", "cosine", "norm ratio")
    heads += ("itself", "same sample", "other samples", "verified to")
    rows = []
    for i, (r, label) in enumerate(zip(reports, labels, strict=True)):
        s = r.summary()
        cells = [
            f"{_dot(i)}{escape(label)}",
            str(len(r.layers)),
            str(r.batch_size),
            "training" if r.training else "evaluation",
            escape(r.optimizer or "SGD"),
            number(r.loss),
            *(number(s[k]) if k in s else "" for k in ("divergence", "spread", "cosine", "norm_ratio")),
            *(f"{s[k]:.0%}" if k in s else "" for k in ("same_share", "patch_share", "sample_share")),
            "" if r.max_verify_error is None else f"{r.max_verify_error:.0e}",
        ]
        rows.append("<tr>" + "".join(f"<td>{c}</td>" for c in cells) + "</tr>")
    head = "".join(f"<th>{h}</th>" for h in heads)
    note = '<p class="muted">Medians over the layers, attention logits apart.</p>'
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>{note}'
    )


def _layers(reports: Sequence[DivergenceReport], labels: list[str]) -> str:
    optional = optional_columns(reports)
    heads = ["kind", "divergence", "spread", "cosine", "norm ratio", "parts", *(c.title for c in optional)]
    top = "".join(
        f'<th class="first left" colspan="{len(heads)}">{_dot(i)}{escape(label)}</th>' for i, label in enumerate(labels)
    )
    second, column = '<th data-sort="0">layer</th>', 1
    for _ in reports:
        for j, h in enumerate(heads):
            second += f'<th data-sort="{column}">{h}</th>' if j else f'<th class="first left">{h}</th>'
            column += 1
    by_name = [{e.name: e for e in r.layers} for r in reports]
    body = []
    for n, name in enumerate(in_order([[e.name for e in r.layers] for r in reports])):
        cells = f'<td data-value="{n}">{escape(name)}</td>'
        for i, found in enumerate(by_name):
            cells += _cells(found[name], i, optional) if name in found else _blank(len(heads))
        body.append(f"<tr>{cells}</tr>")
    return (
        '<div class="scroll tall"><table><thead><tr><th></th>'
        f"{top}</tr><tr>{second}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _blank(columns: int) -> str:
    return '<td class="first" data-value=""></td>' + '<td data-value=""></td>' * (columns - 1)


def _cells(e: LayerDivergence, i: int, optional: Sequence[OptionalColumn]) -> str:
    values = ((e.divergence, number(e.divergence)), (e.spread, f"{e.spread:.3f}"), (e.cosine, f"{e.cosine:.3f}"))
    values += ((e.norm_ratio, number(e.norm_ratio)),)
    color = COLORS[i % len(COLORS)]
    bar = "".join(
        f'<span style="width:{share:.1%};background:{tint(color, strength)}"></span>'
        for share, (_, strength) in zip(e.shares, PARTS, strict=True)
    )
    tip = ", ".join(f"{name} {share:.0%}" for share, (name, _) in zip(e.shares, PARTS, strict=True))
    correction = "" if e.correction == "none" else f' <span class="muted">{escape(e.correction)}</span>'
    out = f'<td class="first left">{escape(e.kind)}{correction}</td>'
    out += "".join(f'<td data-value="{value!r}">{shown}</td>' for value, shown in values)
    out += f'<td data-value="{e.shares[0]!r}" title="{tip}"><span class="bar">{bar}</span></td>'
    for column in optional:
        value = getattr(e, column.key)
        out += f'<td data-value="{"" if value is None else value}">{column.text(e)}</td>'
    return out


def _remarks(report: DivergenceReport, label: str) -> str:
    lines = report.note_lines() + [f"not covered: {line}" for line in report.not_covered_lines()]
    items = "".join(f"<li>{escape(line)}</li>" for line in lines) or "<li>none</li>"
    return f"<p><b>{escape(label)}</b></p><ul>{items}</ul>"
