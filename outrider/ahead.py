"""Passes that do not wait: the latency model of a verifier that runs ahead of its drafter, alone and in company. Pure.

Symbols are those of `outrider.gamma`. A verifier that runs ahead feeds the last committed token at once, while the
drafter still guesses what follows, and holds the row. What arrives meanwhile has its first token tested on that row,
without a pass: a rejection there has cost no row that plain decoding would not have had. So a chain takes

* a pass of one row, or draft and trip where they take longer;
* if its first token is accepted, a pass of g0 rows, which tests g0 - 1 more tokens and holds a row for the next one;
* a pass of g rows for every further run that it survives into.

With g0 = g = 1 that is plain decoding's speed exactly, as long as a draft token and a trip take no longer than a pass,
whatever alpha is: a trial that costs nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

from outrider.gamma import Costs, runs_in_flight, words_per_pass
from outrider.messages import Speculation


def ahead_rate(alpha: float, restart_gamma: int, gamma: int, costs: Costs) -> float:
    """Return tokens per second of one session whose verifier runs ahead.

    Args:
        alpha: acceptance probability of a tested token, in [0, 1].
        restart_gamma: g0, tokens of the first proposal of a chain, 1 .. gamma.
        gamma: g, tokens of every later proposal.
        costs: the session's times; the round trip without any wait for a pass.
    """
    first_s = max(costs.pass_s(1), restart_gamma * costs.draft_s + costs.round_trip_s)
    second_s = costs.pass_s(restart_gamma)
    run_s = max(costs.pass_s(gamma), gamma * costs.draft_s)
    chain_s = (1.0 - alpha) * (first_s + alpha * second_s)
    return 1.0 / (chain_s + alpha ** (restart_gamma + 1) * run_s / words_per_pass(alpha, gamma - 1))


def best_ahead(alpha: float, costs: Costs, max_gamma: int) -> tuple[Speculation, float]:
    """Return the best plan of a verifier that runs ahead, and its tokens per second; the shorter of two equal ones.

    Args:
        alpha: in [0, 1].
        costs: the session's times.
        max_gamma: most tokens of a proposal, >= 1.
    """
    gammas = [1, *(g for g in range(2, max_gamma + 1) if g * costs.draft_s <= costs.pass_s(g) * (1.0 + 1e-9))]
    pairs = [(restart, gamma) for gamma in gammas for restart in range(1, gamma + 1)]
    restart, gamma = max(pairs, key=lambda pair: ahead_rate(alpha, pair[0], pair[1], costs))
    return ahead_plan(restart, gamma, costs), ahead_rate(alpha, restart, gamma, costs)


def ahead_plan(restart_gamma: int, gamma: int, costs: Costs) -> Speculation:
    """Return a plan that runs ahead, with a window in which the verifier never waits while a chain survives."""
    return Speculation(gamma, restart_gamma, gamma * runs_in_flight(gamma, costs), ahead=True)


# --- in company ---------------------------------------------------------------------------------------------------


ENOUGH = 0.995
"""Rows are given until so much of the most that could be had is reached: the last ones bring next to nothing."""
EIGHTHS = (-1.534, -0.887, -0.489, -0.157, 0.157, 0.489, 0.887, 1.534)
"""Middles of a normal law's eighths, in standard deviations."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What one session would make of rows."""

    alpha: float
    """Acceptance probability of a tested token, in [0, 1]."""
    undrafted: float = 0.0
    """Share of its tokens that nobody drafts, in [0, 1]."""
    most: int = 16
    """Most rows of a pass that it can use, >= 1; 1: it decodes plain, or is only tried."""


@dataclass(frozen=True, slots=True)
class Division:
    """Who gets how many rows of a pass."""

    rows: tuple[int, ...]
    """By claim, each >= 1."""
    gain: float
    """Tokens per second of all sessions together, in those of plain decoding, >= 1."""


def divide_rows(
    claims: Sequence[Claim],
    others: int,
    pass_s: Callable[[int], float],
    per_draft_s: float = 0.0,
    plain_s: float | None = None,
) -> Division:
    """Divide the rows of passes that sessions share: each goes where an accepted token is likeliest.

    Every session has the row that it decodes plain with. The next rows are given one by one, those first that bring
    the most tokens, and as many are given as the passes are worth: where a pass is near its limit, those whose next
    draft token is least likely to be accepted go without.

    Args:
        claims: one per session that has a drafter.
        others: further sessions, of one row each.
        pass_s: seconds of a pass by rows, which need not be smooth.
        per_draft_s: what a session with further rows adds to every pass beside them.
        plain_s: seconds of a pass where no session has further rows; None: by `pass_s`.
    """
    num = len(claims) + others
    total = _InPass(float(num), float(num), 0.0)
    rates = [num / (pass_s(num) if plain_s is None else plain_s)]
    taken: list[int] = []
    for _, index, more in _steps(claims):
        total = total.plus(more)
        taken.append(index)
        rates.append(total.tokens / (_mean_pass_s(num, total, pass_s) + len(set(taken)) * per_draft_s))
    enough = next(count for count, rate in enumerate(rates) if rate >= ENOUGH * max(rates))
    given = [1] * len(claims)
    for index in taken[:enough]:
        given[index] += 1
    return Division(tuple(given), rates[enough] / rates[0])


class _InPass(NamedTuple):
    """What sessions make of an average pass, or make more of it: sums over sessions."""

    tokens: float
    rows: float
    variance: float
    """Of the rows."""

    def plus(self, more: "_InPass") -> "_InPass":
        return _InPass(*(mine + other for mine, other in zip(self, more, strict=True)))

    def less(self, other: "_InPass") -> "_InPass":
        return _InPass(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))


def _steps(claims: Sequence[Claim]) -> list[tuple[float, int, _InPass]]:
    """Return every further row of every claim, the most worth while first: (-worth, claim, what it adds)."""
    steps = []
    for index, claim in enumerate(claims):
        before, worth = _InPass(1.0, 1.0, 0.0), float("inf")
        for gamma in range(2, claim.most + 1):
            now = _per_pass(claim, gamma)
            more = now.less(before)
            # A later row is never ranked before an earlier one of the same session.
            worth = min(worth, more.tokens / max(1e-9, more.rows))
            steps.append((-worth, index, more))
            before = now
    return sorted(steps, key=lambda step: step[:2])


def _per_pass(claim: Claim, gamma: int) -> _InPass:
    """Return what a session makes of an average pass, where its runs have `gamma` rows."""
    alpha, undrafted = min(claim.alpha, 0.999), claim.undrafted
    runs = alpha / (1.0 - alpha**gamma)
    tokens, passes = 1.0 / (1.0 - alpha), 1.0 + runs
    # All by token: those that nobody drafts take a pass and a row each.
    runs = (1.0 - undrafted) * runs / tokens
    passes = undrafted + (1.0 - undrafted) * passes / tokens
    share = runs / passes
    return _InPass(1.0 / passes, 1.0 + share * (gamma - 1), share * (1.0 - share) * (gamma - 1) ** 2)


def _mean_pass_s(num: int, total: _InPass, pass_s: Callable[[int], float]) -> float:
    """Return what passes of so many sessions take on average: rows vary about their mean as a normal law does."""
    deviation = sqrt(max(0.0, total.variance))
    return sum(pass_s(max(num, round(total.rows + each * deviation))) for each in EIGHTHS) / len(EIGHTHS)
