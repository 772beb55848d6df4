"""The report of a training: what was reached, and how loss and acceptance went over time."""

import math
from collections.abc import Mapping

from outrider.report.page import Plot, Section, Table, page
from outrider.report.plots import Bars, Series, bar_plot, line_plot
from outrider.training.acceptance import TEMPERATURES
from outrider.training.state import Point, State


def report(title: str, state: State, facts: Mapping[str, str]) -> str:
    """Return a page as HTML.

    Args:
        title: Of the page.
        state: Of the training; its curve has at least one point.
        facts: What it was made from and on.
    """
    minutes = [point.seconds / 60 for point in state.curve]
    loss = line_plot(
        "Loss against time", ("minutes of training", "nats"),
        [Series("", minutes, [point.loss for point in state.curve])],
    )  # fmt: skip
    acceptance = line_plot(
        "Acceptance against time", ("minutes of training", "accepted / tested"),
        [Series(name, minutes, _numbers(values)) for name, values in _acceptances(state.curve).items()],
    )  # fmt: skip
    return page(title, [_reached(state.curve[-1]), _course(state.curve, (loss, acceptance))], facts)


def acceptance_rows(point: Point) -> list[tuple[str, str]]:
    """Return names and values of what was reached at one moment."""
    rows = [("acceptance, temperature 0", shown(point.alpha))]
    rows += [
        (f"acceptance, temperature {temperature:g}", shown(value))
        for temperature, value in zip(TEMPERATURES, point.sampled, strict=True)
    ]
    rows.append(("tokens per round", shown(point.tokens_per_round)))
    if point.by_position:
        rows.append(("by position, temperature 0", " ".join(f"{share:.2f}" for share in point.by_position)))
    return rows


def shown(value: float | None) -> str:
    """Return a figure as text."""
    return "–" if value is None or math.isnan(value) else f"{value:.3f}"


def _reached(point: Point) -> Section:
    text = (
        "Acceptance is accepted / tested, tests ending at the first rejection, on texts that nothing was trained on. "
        "At temperature 0 chains are played over greedy texts; above it the mass that draft and target share is taken."
    )
    plots: tuple[Plot, ...] = ()
    if point.by_position:
        positions = [str(number) for number in range(1, len(point.by_position) + 1)]
        plots = (
            bar_plot("Acceptance by position, temperature 0", ("position in the chain", "accepted / tested"), positions,
                     [Bars("", point.by_position)]),
        )  # fmt: skip
    return Section("What was reached", text, Table(("figure", "value"), tuple(acceptance_rows(point))), plots)


def _course(curve: list[Point], plots: tuple[Plot, ...]) -> Section:
    rows = tuple(
        (f"{point.seconds / 60:.1f}", str(point.step), f"{point.num_tokens:,}", shown(point.loss), shown(point.alpha))
        for point in curve
    )
    header = ("minutes", "steps", "tokens", "loss", "acceptance")
    text = "The loss is the cross-entropy against the target's law, smoothed over steps and averaged over the chain."
    return Section("How it went", text, Table(header, rows), plots)


def _acceptances(curve: list[Point]) -> dict[str, list[float | None]]:
    named: dict[str, list[float | None]] = {"temperature 0": [point.alpha for point in curve]}
    for number, temperature in enumerate(TEMPERATURES):
        named[f"temperature {temperature:g}"] = [point.sampled[number] for point in curve]
    return named


def _numbers(values: list[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]
