"""Reports: what they say, as text, frame, plot and page."""

import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from affdiv_zoo.diagnostics import DivergenceReport, LayerDivergence, NotCovered
from affdiv_zoo.diagnostics.draw import draw_evolution, draw_reports, in_order, labelled


def layer(name: str, **numbers) -> LayerDivergence:
    values = dict(divergence=4.0, std=1.0, cosine=0.5, norm_ratio=8.0, same=3.0, patch=2.0, sample=1.0) | numbers
    return LayerDivergence(name, "Linear", "none", 12, 1, **values)


def report(model: str = "net", **numbers) -> DivergenceReport:
    layers = [
        layer("a.fc1", **numbers),
        layer("a.fc2", verify_error=1e-9, note="a remark"),
        layer("head", divergence=9.0),
    ]
    missing = [NotCovered("norm", "LayerNorm", 4, "a normaliser"), NotCovered("norm2", "LayerNorm", 4, "a normaliser")]
    return DivergenceReport(model, 8, 2.25, None, True, layers, missing)


def test_numbers_by_hand() -> None:
    e = layer("x")
    assert e.spread == 0.25 and e.shares == (0.5, pytest.approx(1 / 3), pytest.approx(1 / 6))
    assert layer("x", same=0.0, patch=0.0, sample=0.0).shares == (0, 0, 0) and layer("x", divergence=0.0).spread == 0
    found = report(cosine=0.9).summary()
    assert found["divergence"] == 4.0 and found["spread"] == 0.25 and found["cosine"] == 0.5
    assert found["same_share"] == 0.5 and not any(k.startswith("logits") for k in found)


def test_layers_without_a_gradient_count_for_the_divergence_alone() -> None:
    r = report()
    r.layers += [
        layer(f"still{i}", divergence=100.0, cosine=0.0, norm_ratio=0.0, same=0.0, patch=0.0, sample=0.0)
        for i in range(9)
    ]
    assert r.summary()["divergence"] == 100.0 and r.summary()["cosine"] == 0.5
    r.layers.append(LayerDivergence("attn.logits", "logits", "none", 4, 1, 7.0, 0.7, 1.0, 1.0, 1.0, 0.0, 0.0))
    assert r.summary()["logits_divergence"] == 7.0 and r.summary()["logits_spread"] == pytest.approx(0.1)


def test_table() -> None:
    lines = str(report()).splitlines()
    assert lines[0] == "net: one SGD step on 8 samples in training mode, loss 2.25"
    row = next(line for line in lines if line.startswith("a.fc1")).split()
    assert row == ["a.fc1", "Linear", "none", "4", "0.250", "0.500", "8", "50%", "33%", "17%"]
    assert "1e-09" in next(line for line in lines if line.startswith("a.fc2"))
    assert "  1 layer (a.fc2): a remark" in lines and "not covered (2):" in lines
    assert "  2 LayerNorm (norm, norm2): a normaliser" in lines
    r = report()
    r.layers[0].name = "very." * 20 + "long"
    r.layers[0].norm_ratio = 123456789.0
    text = str(r)
    assert max(map(len, text.splitlines())) <= 130
    assert "\n~.very.very.very.very.very.very.long Linear" in text and "1.23e+08" in text


def test_dict_and_back() -> None:
    data = json.loads(json.dumps(report().to_dict(), allow_nan=False))
    assert data["layers"][0]["spread"] == 0.25 and data["summary"]["cosine"] == 0.5
    assert DivergenceReport.from_dict(data) == report()
    assert report()["head"].divergence == 9.0
    with pytest.raises(KeyError, match=r"'tail' is not among .* head"):
        report()["tail"]


def test_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = report().to_frame()
    assert list(frame.index) == ["a.fc1", "a.fc2", "head"] and frame.loc["head", "divergence"] == 9.0
    assert frame["spread"].iloc[0] == 0.25
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="to_frame needs pandas"):
        report().to_frame()


def test_order_of_several_models_layers() -> None:
    assert in_order([["a", "c", "d"], ["a", "b", "c", "e"]]) == ["a", "b", "c", "e", "d"]
    assert labelled([report("x"), report("y"), report("x")]) == ["x (1)", "y", "x (2)"]


def test_the_figure_shows_the_numbers() -> None:
    figure = draw_reports([report("one", cosine=-0.25), report("two")])
    depth, spread, cosine, shares = figure.axes
    assert [line.get_label() for line in depth.lines] == ["one", "two"]
    assert list(depth.lines[0].get_ydata()) == [4.0, 4.0, 9.0]
    assert [bar.get_height() for bar in spread.patches[:3]] == [0.25, 0.25, pytest.approx(1 / 9)]
    assert [bar.get_height() for bar in cosine.patches[:2]] == [-0.25, 0.5] and cosine.get_ylim()[0] <= -0.25
    stacks = {}
    for bar in shares.patches:
        stacks[bar.get_x()] = stacks.get(bar.get_x(), 0.0) + bar.get_height()
    assert len(stacks) == 6 and all(total == pytest.approx(1.0) for total in stacks.values())
    assert [t.get_text() for t in shares.get_xticklabels()] == ["a.fc1", "a.fc2", "head"]
    with pytest.raises(ValueError, match="empty has no layers"):
        draw_reports([report(), DivergenceReport("empty", 1, 0.0)])


def test_names_are_drawn_as_they_are(tmp_path: Path) -> None:
    r = report("_$a$ <b>")
    r.layers[0].name = r"<i>$x_$\\frac"
    r.save_html(tmp_path / "page.html", [report("$\\other$")])  # none of it is a formula, good or bad
    source = (tmp_path / "page.html").read_text()
    assert "_$a$ &lt;b&gt;" in source.partition("<svg")[2].partition("</svg>")[0]
    assert r"&lt;i&gt;$x_$\\frac" in source.partition("<svg")[2].partition("</svg>")[0]
    assert len(draw_reports([r]).axes[0].get_legend().get_texts()) == 1  # "_" would hide it
    draw_evolution([0], [r], "$x_$").savefig(tmp_path / "evolution.svg")


def test_the_evolution() -> None:
    figure = draw_evolution([0, 10], [report(), report(cosine=0.7, divergence=2.0)])
    divergence, _, cosine, shares = figure.axes
    lines = {tuple(line.get_ydata()) for line in cosine.lines}
    assert (0.5, 0.7) in lines and (0.5, 0.5) in lines and len(cosine.lines) == 4  # three layers and the median
    assert list(divergence.lines[-1].get_xdata()) == [0, 10] and list(divergence.lines[-1].get_ydata()) == [4.0, 4.0]
    assert len(shares.lines) == 3
    with pytest.raises(ValueError, match="no reports yet"):
        draw_evolution([], [])


def test_files_are_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "new" / "plot.png"
    report().plot(path, [report("other")])
    assert path.read_bytes()[:4] == b"\x89PNG" and [f.name for f in path.parent.iterdir()] == ["plot.png"]
    report().plot(tmp_path / "plot.svg")
    assert "<svg" in (tmp_path / "plot.svg").read_text()
    with pytest.raises(ValueError, match=r"ends in none of .*\.png"):
        report().plot(tmp_path / "plot.txt")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["new", "plot.svg"]


def test_plots_need_matplotlib_and_say_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'affdiv-zoo\[plot\]'"):
        report().plot(tmp_path / "plot.png")
    with pytest.raises(ImportError, match="need matplotlib"):
        report().save_html(tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []


class Page(HTMLParser):
    """Tags, attributes and text of a page; fails where tags do not close in order."""

    VOID = {"meta", "br", "path", "use", "rect", "line"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.text: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data.strip())


def test_the_page_is_self_contained_and_complete(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    mine, other = report("mine <b>&"), report("other")
    other.layers.append(layer("extra<i>", cosine=math.pi / 4))
    mine.save_html(path, [other])
    source = path.read_text()
    page = Page(source)
    loaded = [value for _, attrs in page.tags for key, value in attrs.items() if key in ("src", "href", "xlink:href")]
    assert all(value.startswith("#") for value in loaded)  # the figure's own definitions
    assert not re.search(r"url\((?!#)|@import|<link|<iframe", source)
    assert "<b>&" not in source.replace("<b>&amp;", "") and "mine &lt;b&gt;&amp;" in source
    text = " ".join(page.text)
    assert "extra<i>" not in source and "extra&lt;i&gt;" in source
    for shown in ("a.fc1", "head", "extra", "0.785", "a remark", "2 LayerNorm (norm, norm2): a normaliser", "1e-09"):
        assert shown in text, shown
    rows = source.partition("<h2>Layers</h2>")[2].partition("<tbody>")[2].partition("</tbody>")[0].split("<tr>")[1:]
    assert len(rows) == 4 and len({row.count("<td") for row in rows}) == 1  # blanks where a model has no such layer
    assert [tag for tag, _ in page.tags].count("svg") == 1
    report().save_html(tmp_path / "again.html")
    report().save_html(tmp_path / "same.html")
    assert (tmp_path / "again.html").read_text() == (tmp_path / "same.html").read_text()  # no dates, no chance


def test_a_real_report_of_zero_and_of_many_layers_can_be_drawn(tmp_path: Path) -> None:
    r = report(divergence=0.0, std=0.0)
    r.layers += [layer(f"blocks.{i}.fc") for i in range(60)]
    r.plot(tmp_path / "many.png")
    assert (tmp_path / "many.png").stat().st_size > 1000
    assert torch.is_grad_enabled()
