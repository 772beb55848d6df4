"""Draws lines and bars as SVG. The same data give the same bytes; no window and no global state is involved."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from outrider.report.page import Plot

SIZE_IN = (6.4, 3.6)
"""Width and height of a plot, in inches of 72 points."""
STYLE: dict[Any, object] = {
    "svg.hashsalt": "outrider",  # ids follow from content, not from chance
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # a dollar sign is one
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "axes.axisbelow": True,
    # Told apart by those who do not tell red from green.
    "axes.prop_cycle": "cycler('color', ['#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9', '#555555'])",
}
MARKED = 24
"""Lines of at most so many points have a mark at each."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a plot."""

    name: str
    """In the legend; empty: not there."""
    x: Sequence[float]
    y: Sequence[float]
    """As many as x; NaN leaves a gap."""
    style: Literal["solid", "dashed"] = "solid"


@dataclass(frozen=True, slots=True)
class Bars:
    """One bar in each group of a plot."""

    name: str
    """In the legend; empty: not there."""
    values: Sequence[float]
    """One per group."""
    ranges: Sequence[tuple[float, float]] = ()
    """Lowest and highest of each group, drawn as whiskers; empty: none."""


def line_plot(
    title: str, labels: tuple[str, str], series: Sequence[Series], *, level: float | None = None, log_x: bool = False
) -> Plot:
    """Draw lines.

    Args:
        title: what is seen.
        labels: of the x axis and the y axis, with their units.
        series: the lines.
        level: y of a horizontal line to compare with; None: none.
        log_x: whether x is logarithmic.

    Raises:
        ValueError: a line has not as many y as x.
    """
    figure, axes = _axes(labels)
    with rc_context(STYLE):
        for line in series:
            if len(line.x) != len(line.y):
                raise ValueError(f"{line.name!r} has {len(line.x)} x and {len(line.y)} y")
            marker = "o" if len(line.x) <= MARKED else ""
            axes.plot(line.x, line.y, label=line.name, linestyle=line.style, marker=marker, markersize=3.5)
        if log_x:
            axes.set_xscale("log")
    return _finished(figure, axes, title, level)


def bar_plot(
    title: str, labels: tuple[str, str], groups: Sequence[str], bars: Sequence[Bars], *, level: float | None = None
) -> Plot:
    """Draw groups of bars.

    Args:
        title: what is seen.
        labels: of the x axis and the y axis, with their units.
        groups: names of the groups.
        bars: of each group, in the same order.
        level: y of a horizontal line to compare with; None: none.

    Raises:
        ValueError: there are not as many values, or ranges, as groups.
    """
    figure, axes = _axes(labels)
    width = 0.8 / max(1, len(bars))
    with rc_context(STYLE):
        for index, each in enumerate(bars):
            if len(each.values) != len(groups) or len(each.ranges) not in (0, len(groups)):
                raise ValueError(f"{each.name!r} has not {len(groups)} values, or not as many ranges")
            places = [group + (index - (len(bars) - 1) / 2) * width for group in range(len(groups))]
            axes.bar(places, each.values, width * 0.92, label=each.name, yerr=_whiskers(each), capsize=3)
        axes.set_xticks(range(len(groups)), groups)
        axes.grid(visible=False, axis="x")
    return _finished(figure, axes, title, level)


def _whiskers(bars: Bars) -> list[list[float]] | None:
    """Return how far the ranges reach down and up from the values."""
    if not bars.ranges:
        return None
    pairs = list(zip(bars.values, bars.ranges, strict=True))
    return [[value - low for value, (low, _) in pairs], [high - value for value, (_, high) in pairs]]


def _axes(labels: tuple[str, str]) -> tuple[Figure, Axes]:
    with rc_context(STYLE):
        figure = Figure(figsize=SIZE_IN, layout="constrained")
        axes = figure.add_subplot()
        axes.set_xlabel(labels[0])
        axes.set_ylabel(labels[1])
    return figure, axes


def _finished(figure: Figure, axes: Axes, title: str, level: float | None) -> Plot:
    with rc_context(STYLE):
        if level is not None:
            axes.axhline(level, color="#888888", linewidth=1)
        if any(name for name in axes.get_legend_handles_labels()[1]):
            axes.legend(frameon=False)
        out = io.StringIO()
        unnamed: dict[str, str | None] = {"Creator": None, "Date": None, "Format": None, "Type": None}
        figure.savefig(out, format="svg", metadata=unnamed)
    return Plot(title, out.getvalue())
