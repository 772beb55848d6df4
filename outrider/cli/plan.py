"""`outrider plan`: what the latency model says of a drafter, before there is one."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from outrider.cli.ranges import check_range
from outrider.errors import InvalidRequest
from outrider.gamma import (
    Costs,
    best_plan,
    best_restart,
    break_even_alpha,
    break_even_draft_s,
    pipelined_rate,
    plain_rate,
    sequential_rate,
    words_per_pass,
    words_per_pipelined_pass,
)

console = Console(highlight=False)
MOST_GAMMA = 256
"""Longest proposal that a table may have."""
NAMES = {False: "sequential", True: "pipelined"}


@dataclass(frozen=True, slots=True)
class Guess:
    """A drafter as one imagines it; times are in passes where nothing is known of seconds."""

    alpha: float
    costs: Costs
    max_gamma: int
    known_s: bool
    """Whether `costs` is in seconds."""

    def rate(self, gamma: int, pipelined: bool) -> float:
        """Return tokens per second, or per pass, with proposals of `gamma`."""
        if not pipelined:
            return sequential_rate(self.alpha, gamma, self.costs)
        return pipelined_rate(self.alpha, best_restart(self.alpha, gamma, self.costs), gamma, self.costs)

    def words(self, gamma: int, pipelined: bool) -> float:
        """Return tokens per round (sequential) or per pass of the target (pipelined)."""
        if not pipelined:
            return words_per_pass(self.alpha, gamma)
        return words_per_pipelined_pass(self.alpha, best_restart(self.alpha, gamma, self.costs), gamma)

    def speed_up(self, gamma: int, pipelined: bool) -> float:
        """Return the rate over that of plain decoding."""
        return self.rate(gamma, pipelined) / plain_rate(self.costs)


def plan(
    *,
    alpha: float,
    cost: float,
    rtt: float = 0.0,
    verify_ms: float | None = None,
    max_gamma: int = 12,
    pipelined: Annotated[bool | None, Parameter(negative="--sequential")] = None,
) -> None:
    """Say what a drafter would bring: words per round, speed-up, the best gamma, and when to switch it off.

    Args:
        alpha: Share of tested tokens that are accepted, 0 to 1.
        cost: Time of a draft token over that of a pass of the target.
        rtt: Milliseconds of a round trip between draft worker and verifier, everything included; needs --verify-ms.
        verify_ms: Milliseconds of a pass of the target; unset: everything is in passes.
        max_gamma: Longest proposal that is looked at, 1 to 256.
        pipelined: Only rounds in which the drafter runs ahead, or only those in which it waits; unset: both.
    """
    guess = _checked(alpha, cost, rtt, verify_ms, max_gamma)
    ways = (False, True) if pipelined is None else (pipelined,)
    console.print(table(guess, ways))
    for way in ways:
        console.print(summary(guess, way), soft_wrap=True)


def _checked(alpha: float, cost: float, rtt: float, verify_ms: float | None, max_gamma: int) -> Guess:
    """Return what was asked about.

    Raises:
        InvalidRequest: an option is out of its range.
    """
    check_range("alpha", alpha, 0, 1)
    if not 0.0 <= cost < math.inf:
        raise InvalidRequest("cost", cost, "0 or more, and finite")
    if not 0.0 <= rtt < math.inf:
        raise InvalidRequest("rtt", rtt, "0 ms or more, and finite")
    if verify_ms is not None and not 0.0 < verify_ms < math.inf:
        raise InvalidRequest("verify_ms", verify_ms, "more than 0 ms, and finite")
    if rtt and verify_ms is None:
        raise InvalidRequest("rtt", rtt, "0 without --verify-ms: a round trip is compared with a pass")
    check_range("max_gamma", max_gamma, 1, MOST_GAMMA)
    verify_s = 1.0 if verify_ms is None else verify_ms / 1000.0
    return Guess(alpha, Costs(cost * verify_s, verify_s, rtt / 1000.0), max_gamma, verify_ms is not None)


def table(guess: Guess, ways: Iterable[bool]) -> Table:
    """Lay out words per round and speed-up for each gamma."""
    lines = Table(box=None, pad_edge=False)
    lines.add_column("gamma", justify="right")
    for way in ways:
        for name in ("words per pass" if way else "words per round", f"{NAMES[way]} speed-up"):
            lines.add_column(name, justify="right")
    for gamma in range(1, guess.max_gamma + 1):
        cells = [(f"{guess.words(gamma, way):.2f}", f"{guess.speed_up(gamma, way):.2f}") for way in ways]
        lines.add_row(str(gamma), *(cell for pair in cells for cell in pair))
    return lines


def summary(guess: Guess, way: bool) -> str:
    """Say in a few lines what is best, and when to switch off.

    Args:
        guess: the drafter.
        way: whether rounds are pipelined.
    """
    best = best_plan(guess.alpha, guess.costs, guess.max_gamma, way)
    lines = [f"\n{NAMES[way]}:"]
    if best.enabled:
        rate = guess.rate(best.gamma, way)
        first = f" (first proposal {best.restart_gamma}, window {best.window})" if way else ""
        seconds = f", {rate:.1f} tokens per second instead of {plain_rate(guess.costs):.1f}" if guess.known_s else ""
        lines.append(f"  best gamma {best.gamma}{first}: {rate / plain_rate(guess.costs):.2f} times plain{seconds}")
    else:
        lines.append(f"  off: nothing up to gamma {guess.max_gamma} is faster than plain decoding")
    return "\n".join([*lines, *_break_even(guess, way)])


def _break_even(guess: Guess, way: bool) -> list[str]:
    draft_s, verify_s, trip_s = guess.costs.draft_s, guess.costs.verify_s, guess.costs.round_trip_s
    alpha = break_even_alpha(draft_s, verify_s, trip_s, guess.max_gamma, way)
    cost = break_even_draft_s(guess.alpha, verify_s, trip_s, guess.max_gamma, way) / verify_s
    at_cost = f"at cost {draft_s / verify_s:g}"
    return [
        f"  break-even alpha {alpha:.3f} {at_cost}: switch off below it"
        if alpha <= 1.0
        else f"  no break-even alpha {at_cost}: off even if every token is accepted",
        f"  break-even cost {cost:.3f} at alpha {guess.alpha:g}: switch off above it"
        if cost
        else f"  no break-even cost at alpha {guess.alpha:g}: off even if drafts are free",
    ]
