"""What `outrider drafters compare` shows: two tables, and the same with plots as a report."""

import os
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version

from rich.table import Table as ShownTable

from outrider.cli.drafters.asking import Asking
from outrider.cli.drafters.tally import Measured, Way, predicted
from outrider.gamma import best_restart
from outrider.messages import Speculation
from outrider.report.page import Plot, Section, Table, page
from outrider.report.plots import Bars, Series, bar_plot, line_plot

MIN_TESTED = 10
"""Positions tested less often than that are not shown: their rate says little."""
LABEL_LEN = 24
"""Longest name in a plot."""
NOTHING = "–"
"""Where there was nothing to measure."""

DRAFTER_HEADER = ("drafter", "alpha", "t_d ms", "t_v ms", "cost", "r ms", "undrafted", "best gamma")
SPEED_HEADER = (
    "drafter", "way", "tokens per round", "speed-up", "predicted", "draft ms per token", "off at end", "texts equal",
)  # fmt: skip

HOW = """Each drafter has a local cluster of its own. In it every prompt is answered plain, in a trial, and in each way
that is measured, one session at a time, the ways taking turns; a speed-up is the ratio of two answers to one prompt in
one run, counted from the second chunk on: median, lowest and highest. Predictions are those of the latency model.

alpha is accepted of tested in the trial (sequential rounds of {trial} tokens). t_d: a draft token; t_v: a pass of one
row, and one of the trial's {rows}; cost: t_d over t_v; r: what of a round is neither; undrafted: tokens for which the
drafter had nothing. Best gamma, with the first proposal after a restart, is the latency model's for these figures;
"off": plain decoding is faster. Rows beyond the trial's are taken to cost what those do."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What was measured, and on what."""

    prompts: str
    """Name of the file."""
    num_prompts: int
    target: str
    dtype: str
    threads: int
    """Of each model."""
    asking: Asking


def facts(setting: Setting) -> dict[str, str]:
    """Return what a figure is worth nothing without."""
    asking = setting.asking
    warmth = f"temperature {asking.temperature:g}" + (f", seeds from {asking.seed}" if asking.temperature else "")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "target": f"{setting.target}, {setting.dtype}, threads of each model: {setting.threads}",
        "prompts": f"{setting.num_prompts} of {setting.prompts}",
        "answers": f"at most {asking.tokens} tokens, {warmth}",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "versions": ", ".join(f"{name} {version(name)}" for name in ("outrider", "torch", "transformers")),
    }


def tables(results: Sequence[Measured]) -> list[ShownTable]:
    """Return what a terminal shows."""
    positions = _position_table(results, _rates)
    return [
        _shown(DRAFTER_HEADER, _drafter_rows(results)),
        _shown(positions.header, positions.rows),
        _shown(SPEED_HEADER, _speed_rows(results)),
    ]


def _shown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> ShownTable:
    """Lay out a table in which only headers, and names of drafters, are broken into lines."""
    table = ShownTable(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(header[0], overflow="fold")
    for name in header[1:]:
        table.add_column(name.replace(" ", "\n"), no_wrap=True)
    for row in rows:
        table.add_row(*row)
    table.add_section()
    return table


def report(results: Sequence[Measured], setting: Setting, made_from: dict[str, str]) -> str:
    """Return the report as HTML."""
    trial = setting.asking.trial_gamma
    sections = [
        Section("Drafters", HOW.format(trial=trial, rows=trial + 1), Table(DRAFTER_HEADER, _drafter_rows(results))),
        Section("Speed", "", Table(SPEED_HEADER, _speed_rows(results)), (_speed_plot(results),)),
        Section("Acceptance by position", "", _position_table(results, _counts), (_position_plot(results),)),
        Section("What the model expects of longer proposals", LONGER, plots=(_gamma_plot(results, trial),)),
    ]
    return page("Drafters compared", sections, made_from)


LONGER = """Pipelined rounds with the measured acceptance and costs, and the best first proposal for each length."""


def _drafter_rows(results: Iterable[Measured]) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (
            each.drafter,
            _number(each.alpha),
            f"{1000 * each.times.draft_s:.2f}",
            f"{1000 * each.times.pass_s(1):.1f}, {1000 * each.times.pass_s(99):.1f}",
            f"{each.times.draft_s / each.times.pass_s(1):.3f}",
            f"{1000 * each.times.round_trip_s:.1f}",
            f"{each.undrafted:.2f}",
            f"{each.best.gamma} ({each.best.restart_gamma})" if each.best.enabled else "off",
        )
        for each in results
    )


def _speed_rows(results: Iterable[Measured]) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (
            each.drafter,
            way.name,
            f"{way.tokens_per_round:.2f}",
            spread(way),
            f"{way.predicted:.2f}",
            f"{1000 * way.draft_s_per_token:.2f}",
            f"{way.num_off} of {way.num_answers}",
            f"{way.num_equal} of {way.num_answers}",
        )
        for each in results
        for way in each.ways
    )


def spread(way: Way) -> str:
    """Write a speed-up as median, lowest and highest."""
    if way.speed_up is None:
        return f"{NOTHING} (answers too short)"
    return f"{way.speed_up:.2f} ({min(way.ratios):.2f} … {max(way.ratios):.2f})"


def _known_rates(result: Measured) -> list[float]:
    known = next((place for place, tested in enumerate(result.tested) if tested < MIN_TESTED), len(result.tested))
    return result.rates_by_position[:known]


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def _position_table(results: Sequence[Measured], cells: Callable[[Measured], Sequence[str]]) -> Table:
    """Lay out a row of cells for each drafter, one cell a position."""
    rows = [(each.drafter, cells(each)) for each in results]
    longest = max(1, *(len(each) for _, each in rows))
    header = ("accepted by position", *(str(place + 1) for place in range(longest)))
    return Table(header, tuple((name, *each, *[""] * (longest - len(each))) for name, each in rows))


def _rates(result: Measured) -> list[str]:
    return [f"{rate:.2f}" for rate in _known_rates(result)] or [NOTHING]


def _counts(result: Measured) -> list[str]:
    return [f"{accepted} / {tested}" for tested, accepted in zip(result.tested, result.accepted, strict=True)]


def _label(drafter: str) -> str:
    """Shorten a name for a plot."""
    return drafter if len(drafter) <= LABEL_LEN else drafter[: LABEL_LEN - 1] + "…"


def _position_plot(results: Sequence[Measured]) -> Plot:
    lines = [(_label(each.drafter), _known_rates(each)) for each in results]
    series = [Series(name, range(1, len(rates) + 1), rates) for name, rates in lines if rates]
    return line_plot("Accepted of tested", ("position in the proposal", "share"), series)


def _speed_plot(results: Sequence[Measured]) -> Plot:
    ways = [(_label(each.drafter), way) for each in results for way in each.ways if way.speed_up is not None]
    several = len({way.name for _, way in ways}) > 1
    groups = [f"{drafter}\n{way.name}" if several else drafter for drafter, way in ways]
    bars = [
        Bars("measured", [way.speed_up or 0.0 for _, way in ways], [(min(w.ratios), max(w.ratios)) for _, w in ways]),
        Bars("predicted", [way.predicted for _, way in ways]),
    ]
    return bar_plot("Speed-up over plain decoding", ("", "times plain"), groups, bars, level=1.0)


def _gamma_plot(results: Sequence[Measured], trial_gamma: int) -> Plot:
    gammas = range(1, 2 * trial_gamma + 1)
    series = []
    for each in results:
        alpha = each.alpha or 0.0
        plans = [Speculation(gamma, best_restart(alpha, gamma, each.times), 2 * gamma) for gamma in gammas]
        series.append(
            Series(_label(each.drafter), gammas, [predicted(alpha, each.undrafted, plan, each.times) for plan in plans])
        )
    return line_plot("Predicted speed-up", ("gamma", "times plain"), series, level=1.0)
