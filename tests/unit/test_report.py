"""Reports: what a page holds, and that it holds all it needs."""

import base64
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from outrider.errors import InvalidRequest
from outrider.report.page import Plot, Section, Table, page, save
from outrider.report.plots import Bars, Series, bar_plot, line_plot

LINE = line_plot("Acceptance", ("position", "share"), [Series("a drafter", [1, 2, 3], [0.8, 0.7, math.nan])])
BARS = bar_plot(
    "Speed-up", ("prompt", "times plain"), ["chat", "edit"],
    [Bars("measured", [1.5, 2.0], [(1.2, 1.7), (1.9, 2.2)]), Bars("predicted", [1.6, 2.1])], level=1.0,
)  # fmt: skip


class _Loads(HTMLParser):
    """Collects what a browser would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]


def _texts(plot: Plot) -> list[str]:
    root = ElementTree.fromstring(plot.svg)
    return [text.text or "" for text in root.iter("{http://www.w3.org/2000/svg}text")]


def test_a_page_shows_title_text_table_plots_and_facts() -> None:
    section = Section("Rates", "One.\n\nTwo.", Table(("drafter", "alpha"), (("lookup", "0.61"),)), (LINE,))
    html = page("A report", [section], {"commit": "abc"})
    for part in ("<h1>A report</h1>", "<h2>Rates</h2>", "<p>One.</p>", "<p>Two.</p>", "<td>0.61</td>", "<dd>abc</dd>"):
        assert part in html
    encoded = re.search(r'src="data:image/svg\+xml;base64,([^"]+)"', html)
    assert encoded is not None
    assert base64.b64decode(encoded.group(1)).decode() == LINE.svg


def test_a_page_fetches_nothing_and_runs_nothing() -> None:
    seen = _Loads()
    seen.feed(page("A report", [Section("Both", plots=(LINE, BARS))]))
    assert seen.fetched
    assert all(each.startswith("data:image/svg+xml;base64,") for each in seen.fetched)
    assert not {"script", "link", "iframe"} & set(seen.tags)
    for plot in (LINE, BARS):
        assert not re.search(r'(?:href|src)="(?!#)', plot.svg)
        assert not re.search(r"url\((?!#)", plot.svg)


def test_what_is_passed_in_is_never_markup() -> None:
    bad = "<script>alert(1)</script>\"'"
    html = page(bad, [Section(bad, bad, Table((bad,), ((bad,),)), (Plot(bad, "<svg/>"),))], {bad: bad})
    assert "<script" not in html
    assert html.count("&lt;script&gt;") == 10


def test_a_plot_names_its_axes_and_lines_and_is_the_same_every_time() -> None:
    assert {"position", "share", "a drafter"} <= set(_texts(LINE))
    assert {"chat", "edit", "measured", "predicted", "times plain"} <= set(_texts(BARS))
    again = line_plot("Acceptance", ("position", "share"), [Series("a drafter", [1, 2, 3], [0.8, 0.7, math.nan])])
    assert again == LINE


def test_figures_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ValueError, match="'a' has 2 x and 1 y"):
        line_plot("t", ("x", "y"), [Series("a", [1, 2], [1])])
    with pytest.raises(ValueError, match="'b' has not 2 values"):
        bar_plot("t", ("x", "y"), ["one", "two"], [Bars("b", [1])])
    with pytest.raises(ValueError, match="row 2 has 1 cells, the header 2"):
        Table(("a", "b"), (("1", "2"), ("3",)))


def test_a_report_that_cannot_be_written_names_the_option(tmp_path: Path) -> None:
    save(tmp_path / "report.html", "<p>", "html")
    assert (tmp_path / "report.html").read_text() == "<p>"
    with pytest.raises(InvalidRequest, match="html"):
        save(tmp_path / "missing" / "report.html", "<p>", "html")
