"""`outrider simulate`: a cluster in simulated time, before there is one."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from outrider.cli.ranges import check_range
from outrider.errors import InvalidRequest
from outrider.generation import SpeculationChoice
from simulator import questions
from simulator.costs import MOST_ROWS
from simulator.measured import DEFAULTS, Measured, alphas, by_rows, read
from simulator.memory_command import memory
from simulator.results import Summary
from simulator.setting import MOST_WORKERS, Fleet, Load, Prices, Setting, ZoneLoss

app = App(name="simulate", help="Run a cluster in simulated time: the real machines, workers that only take time.")
console = Console(highlight=False, width=160)

Flag = Annotated[bool, Parameter(negative="")]


@Parameter(name="*")
@dataclass(frozen=True)
class Given:
    """What is known, and what is asked about."""

    verify_ms: str | None = None
    """Milliseconds of a pass of the target, or by rows: 1:30,32:34. Default 30."""
    draft_ms: str | None = None
    """Milliseconds of a token step of the draft, or by sessions: 1:2,32:4. Default 2."""
    round_trip_ms: float | None = None
    """Between draft worker and verifier, everything included. Default 1."""
    zone_trip_ms: float | None = None
    """What a round trip to another zone takes longer. Default 0."""
    prompt_ms: float | None = None
    """A pass of the target over 64 tokens of a prompt. Default: the widest pass."""
    draft_prompt_ms: float | None = None
    """The same of the draft."""
    alpha: str | None = None
    """Shares of tested tokens that are accepted, comma-separated; sessions have them in turn. Default 0.7."""
    measured: Path | None = None
    """JSON with these figures, as benchmarks write it; options go before it."""
    arm: str = ""
    """Of a file of benchmarks.one_session, the setting to take."""
    max_rows: int = 32
    """Rows of the widest pass, unless more are described."""
    sessions: int = 8
    """At once."""
    prompt: int = 256
    """Tokens of each prompt."""
    tokens: int = 128
    """Tokens of each answer."""
    turns: int = 0
    """Generations of each client; 0: as many as time allows."""
    verifiers: int = 1
    """Verifiers."""
    drafts: int = 1
    """Draft workers."""
    orchestrators: int = 1
    """Orchestrators."""
    zones: int = 1
    """Workers of each role are spread over them in turn."""
    verifier_sessions: int = 64
    """Sessions that a verifier runs at once."""
    draft_sessions: int = 64
    """Sessions that a draft worker serves at once."""
    kv_tokens: int = 0
    """Tokens of KV that a verifier holds; 0: enough for all its sessions."""
    gamma: int | None = None
    """Tokens per proposal; unset: the policy decides."""
    window: int | None = None
    """Tokens that a drafter may be ahead, with --gamma; gamma itself means sequential rounds."""
    plain: Flag = False
    """Decode without drafts."""
    seconds: float = 30.0
    """Simulated seconds that are measured."""
    warm_up_s: float = 5.0
    """Simulated seconds before them; clients begin in their first half."""
    seed: int = 0
    """Of all chance; the same seed gives the same figures."""
    part: int = 1
    """Simulate one n-th of the cluster, and multiply."""
    price: tuple[str, ...] = ()
    """role=PRICE of an hour, repeatedly: verifier, draft, orchestrator."""
    json: Flag = False
    """Print JSON instead of tables."""

    def setting(self, lost: ZoneLoss | None = None) -> Setting:
        """Return what is to be simulated.

        Raises:
            InvalidRequest: an option is out of its range.
        """
        check_range("max_rows", self.max_rows, 2, MOST_ROWS)
        known = self._known()
        return Setting(
            known.costs(self.max_rows),
            Load(self.sessions, self.prompt, self.tokens, self.turns, known.alpha or (), self._choice()),
            Fleet(
                self.verifiers, self.drafts, self.orchestrators, self.zones, self.verifier_sessions,
                self.draft_sessions, self.kv_tokens,
            ),
            seconds=self.seconds,
            warm_up_s=self.warm_up_s,
            seed=self.seed,
            loss=lost,
        )  # fmt: skip

    def _known(self) -> Measured:
        said = Measured(
            None if self.verify_ms is None else by_rows("verify_ms", self.verify_ms),
            None if self.draft_ms is None else by_rows("draft_ms", self.draft_ms),
            self.round_trip_ms,
            self.zone_trip_ms,
            self.prompt_ms,
            self.draft_prompt_ms,
            alpha=None if self.alpha is None else alphas(self.alpha),
        )
        return said.over(read(self.measured, self.arm) if self.measured is not None else DEFAULTS).over(DEFAULTS)

    def _choice(self) -> SpeculationChoice:
        if self.gamma is not None:
            check_range("gamma", self.gamma, 1, 256)
        if self.window is not None:
            check_range("window", self.window, self.gamma or 1, 1024)
            if self.gamma is None:
                raise InvalidRequest("window", self.window, "unset without --gamma")
        return SpeculationChoice(off=self.plain, gamma=self.gamma, window=self.window)

    def prices(self) -> Prices:
        """Return the prices.

        Raises:
            InvalidRequest: one is no role=PRICE.
        """
        found: dict[str, float] = {}
        for text in self.price:
            role, _, price = text.partition("=")
            try:
                found[role] = float(price)
            except ValueError:
                raise InvalidRequest("price", text, "role=PRICE, such as verifier=4.1") from None
        return Prices(found)


GIVEN = Given()
app.command(memory)


@app.default
def cluster(*, given: Given = GIVEN) -> None:
    """Run one cluster.

    Args:
        given: What is known, and what is asked about.
    """
    setting, prices = given.setting(), given.prices()
    found = questions.run(setting, given.part)
    cost = prices.per_million(setting.fleet, found.tokens_per_s)
    if given.json:
        _print_json({**found.as_data(), "cost_per_million": cost})
        return
    console.print(_table(("", ""), [*_lines(found), *([("cost per million tokens", f"{cost:.2f}")] if cost else [])]))


@app.command
def ratio(*, most: int = 8, given: Given = GIVEN) -> None:
    """Say how many draft workers a cluster should have.

    Args:
        most: Most draft workers that are tried, 1 to 10000; numbers in between are tried in growing steps.
        given: What is known, and what is asked about.
    """
    check_range("most", most, 1, MOST_WORKERS)
    found = questions.ratio(given.setting(), steps(most), given.prices(), given.part)
    best, cheap = questions.enough(found), questions.cheapest(found)
    if given.json:
        rows = [{"drafts": each.drafts, "cost_per_million": each.cost, **each.summary.as_data()} for each in found]
        _print_json({"rows": rows, "enough": best.drafts, "cheapest": cheap.drafts if cheap else None})
        return
    header = ("draft workers", "tokens/s", "per session", "first token ms", "tokens per round", "verifier busy",
              "drafts busy", "cost per million")  # fmt: skip
    console.print(_table(header, [_ratio_row(each) for each in found]))
    console.print(f"enough: {best.drafts} draft workers for {given.verifiers} verifiers come within "
                  f"{100 * (1 - questions.ENOUGH):.0f} % of the best")  # fmt: skip
    if cheap is not None:
        console.print(f"cheapest: {cheap.drafts} draft workers, {cheap.cost:.2f} per million tokens")


@app.command
def load(*, given: Given = GIVEN) -> None:
    """Say from which load on drafting should yield: 1, 2, 4, ... up to --sessions.

    Args:
        given: What is known, and what is asked about.
    """
    _refuse(given, "part", "price")
    found = questions.levels(given.setting(), doubling(given.sessions))
    at = questions.yields_at(found)
    if given.json:
        _print_json({"rows": [each.as_data() for each in found], "yields_at": at})
        return
    header = ("sessions", "plain tokens/s", "always drafting", "to plain", "automatic", "to plain", "undrafted",
              "verifier busy")  # fmt: skip
    console.print(_table(header, [_level_row(each) for each in found]))
    console.print("drafting always wins up to here" if at is None else
                  f"drafting without a policy loses from {at} sessions on: there it should yield")  # fmt: skip


@app.command
def zone(*, lose: int = 0, at: float | None = None, detect_s: float = 1.0, given: Given = GIVEN) -> None:
    """Say what the loss of a zone does to the sessions.

    Args:
        lose: The zone, 0 to zones - 1.
        at: Simulated second at which it is lost; unset: in the middle of the measured time.
        detect_s: Seconds until its peers notice; 10 to 15 where a network falls silent.
        given: What is known, and what is asked about.
    """
    _refuse(given, "price")
    when = given.warm_up_s + given.seconds / 2 if at is None else at
    found = questions.loss(given.setting(ZoneLoss(lose, when, detect_s)), given.part)
    if given.json:
        figures = {"before": found.before, "lowest": found.lowest, "after": found.after}
        _print_json({**found.summary.as_data(), **figures})
        return
    summary = found.summary
    console.print(_table(("", ""), [
        ("tokens/s before", f"{found.before:.1f}"), ("lowest second behind it", f"{found.lowest:.0f}"),
        ("tokens/s in the last quarter", f"{found.after:.1f}"), ("sessions moved", str(summary.moved)),
        ("longest pause of those, median", _ms(summary.pause_s)), ("99 % of them below", _ms(summary.pause_p99_s)),
        ("generations that failed", str(summary.failed)), ("how it was found", f"with the real {summary.mode}"),
    ]))  # fmt: skip


def _refuse(given: Given, *names: str) -> None:
    """Refuse options that a question has no use for.

    Raises:
        InvalidRequest: one is set.
    """
    for name in names:
        if getattr(given, name) != getattr(GIVEN, name):
            raise InvalidRequest(name, getattr(given, name), "unset: it changes nothing here")


# --- tables ---------------------------------------------------------------------------------------------------------


def steps(most: int) -> list[int]:
    """Return 0, 1, 2, 3, 4, 6, 8, 12, 16, ... up to `most`."""
    found, each = [0, 1], 2
    while each <= most:
        found += [each, *([each * 3 // 2] if each > 1 and each * 3 // 2 <= most else [])]
        each *= 2
    return sorted({*found, most})


def doubling(most: int) -> list[int]:
    """Return 1, 2, 4, ... and `most`."""
    return sorted({*(1 << power for power in range(most.bit_length()) if 1 << power <= most), most})


def _lines(found: Summary) -> list[tuple[str, str]]:
    pauses = [("sessions moved", str(found.moved)), ("longest pause of those", _ms(found.pause_s))]
    return [
        ("sessions", str(found.sessions)),
        ("verifiers, draft workers", f"{found.verifiers}, {found.drafts}"),
        ("tokens per second", f"{found.tokens_per_s:.1f}"),
        ("tokens per second of a session", _number(found.session_tokens_per_s)),
        ("time to first token, median", _ms(found.first_token_s)),
        ("time to first token, 99 %", _ms(found.first_token_p99_s)),
        ("tokens per round", f"{found.tokens_per_round:.2f}"),
        ("acceptance", f"{found.alpha:.2f}"),
        ("tokens that nobody drafted", f"{100 * found.undrafted:.0f} %"),
        ("verifiers busy", _share(found.verifier_busy)),
        ("draft workers busy", _share(found.draft_busy)),
        ("generations finished, failed", f"{found.finished}, {found.failed}"),
        *(pauses if found.moved else []),
        ("how it was found", f"with the real {found.mode}: {found.events} events in {found.wall_s:.1f} s"),
    ]


def _ratio_row(each: questions.Ratio) -> tuple[str, ...]:
    found = each.summary
    return (
        str(each.drafts), f"{found.tokens_per_s:.1f}", _number(found.session_tokens_per_s), _ms(found.first_token_s),
        f"{found.tokens_per_round:.2f}", _share(found.verifier_busy), _share(found.draft_busy),
        "" if each.cost is None else f"{each.cost:.2f}",
    )  # fmt: skip


def _level_row(each: questions.Level) -> tuple[str, ...]:
    return (
        str(each.sessions), f"{each.plain.tokens_per_s:.1f}", f"{each.fixed.tokens_per_s:.1f}",
        f"{each.fixed_gain:.2f}", f"{each.automatic.tokens_per_s:.1f}", f"{each.gain:.2f}",
        f"{100 * each.automatic.undrafted:.0f} %", _share(each.automatic.verifier_busy),
    )  # fmt: skip


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    shown = Table(box=None, pad_edge=False, show_header=any(header))
    for index, name in enumerate(header):
        shown.add_column(name, justify="left" if not index else "right")
    for row in rows:
        shown.add_row(*row)
    return shown


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.1f}"


def _ms(seconds: float) -> str:
    return "" if math.isnan(seconds) else f"{1000 * seconds:.0f} ms"


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=2))
