"""How far to draft: the latency model of one session, and the policy that follows from it. Pure.

Symbols of the formulas: alpha, the probability that a tested token is accepted; g, tokens per proposal; g0, tokens
of the first proposal after a restart; t_d, draft seconds per token; t_v, seconds of a verify pass; r, seconds of a
round trip between draft worker and verifier, everything included. Where a pass costs more the more rows it has, t_v is
that of the rows in question: one for a plain token, g + 1 for a proposal behind a token that has yet to be fed, g for a
proposal behind a held row.

The policy sees rates and times only, never tokens: what decides whether a token is tested must not have looked at it.
"""

import math
from dataclasses import dataclass

from outrider.messages import Speculation

PLAIN = Speculation()
"""Speculation switched off."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What one session's steps take."""

    draft_s: float
    """t_d: seconds per draft token, >= 0."""
    verify_s: float
    """t_v: seconds per verify pass, > 0; of any number of rows unless `by_rows` says more."""
    round_trip_s: float = 0.0
    """r: seconds of a round trip between draft worker and verifier, >= 0."""
    by_rows: tuple[float, ...] = ()
    """t_v of passes with 1, 2, 3, ... of the session's rows, each > 0; the last holds for more."""

    def __post_init__(self) -> None:
        """Refuse what no clock measures.

        Raises:
            ValueError: a time is negative, not finite, or verify_s is 0.
        """
        for name, value in (("draft_s", self.draft_s), ("round_trip_s", self.round_trip_s)):
            if not 0.0 <= value < math.inf:
                raise ValueError(f"{name} = {value}: must be finite and >= 0")
        for seconds in (self.verify_s, *self.by_rows):
            if not 0.0 < seconds < math.inf:
                raise ValueError(f"verify_s = {seconds}: must be finite and > 0")

    def pass_s(self, rows: int) -> float:
        """Return t_v of a pass with so many of the session's rows, >= 1."""
        return self.by_rows[min(rows, len(self.by_rows)) - 1] if self.by_rows else self.verify_s


def plain_rate(costs: Costs) -> float:
    """Return tokens per second without speculation: 1 / t_v."""
    return 1.0 / costs.pass_s(1)


def words_per_pass(alpha: float, gamma: int) -> float:
    """Return the expected tokens of one sequential round: 1 + alpha + ... + alpha**gamma."""
    return float(gamma + 1) if alpha == 1.0 else (1.0 - alpha ** (gamma + 1)) / (1.0 - alpha)


def sequential_rate(alpha: float, gamma: int, costs: Costs) -> float:
    """Return tokens per second when each proposal waits for the verdict on the one before.

    Args:
        alpha: in [0, 1].
        gamma: tokens per proposal, >= 1.
        costs: the session's times.

    Source: Leviathan et al. 2023, section 3.3, with a round trip added.
    """
    return words_per_pass(alpha, gamma) / (gamma * costs.draft_s + costs.round_trip_s + costs.pass_s(gamma + 1))


def pipelined_rate(alpha: float, restart_gamma: int, gamma: int, costs: Costs) -> float:
    """Return tokens per second when drafting runs ahead and the row after an accepted run is held.

    One chain yields 1 / (1 - alpha) tokens: the restart's draft, trip and pass, then a pass or a draft, whichever
    is longer, for every further run of g tokens that the chain survives into.

    Args:
        alpha: in [0, 1].
        restart_gamma: g0, tokens of the first proposal of a chain, 1 .. gamma.
        gamma: g, tokens of every later proposal.
        costs: the session's times.
    """
    restart_s = restart_gamma * costs.draft_s + costs.round_trip_s + costs.pass_s(restart_gamma + 1)
    run_s = max(costs.pass_s(gamma), gamma * costs.draft_s)
    # (1 - alpha) / (1 - alpha**g) is written as one over a sum, which has no pole at alpha = 1.
    return 1.0 / ((1.0 - alpha) * restart_s + alpha ** (restart_gamma + 1) * run_s / words_per_pass(alpha, gamma - 1))


def words_per_pipelined_pass(alpha: float, restart_gamma: int, gamma: int) -> float:
    """Return the expected tokens per target pass of `pipelined_rate`'s chains.

    A chain yields 1 / (1 - alpha) tokens, and takes the restart's pass and one for every run that it survives into. At
    gamma = restart_gamma it is a little less than what a sequential round yields, which has a bonus token where this
    one has a held row: the gain is in the time of the rounds.

    Args:
        alpha: in [0, 1].
        restart_gamma: g0, tokens of the first proposal of a chain, 1 .. gamma.
        gamma: g, tokens of every later proposal.
    """
    return 1.0 / (1.0 - alpha + alpha ** (restart_gamma + 1) / words_per_pass(alpha, gamma - 1))


def upper_bound(alpha: float, costs: Costs) -> float:
    """Return what no single chain can exceed: its 1 / (1 - alpha) tokens need at least one draft, trip and pass."""
    chain_s = (1.0 - alpha) * (costs.verify_s + costs.round_trip_s + costs.draft_s)
    return 1.0 / chain_s if chain_s > 0.0 else math.inf


def choose(
    alpha: float, draft_s: float, verify_s: float, round_trip_s: float, max_gamma: int, pipelined: bool
) -> Speculation:
    """Choose how far to draft where passes cost the same however many rows they have; see `best_plan`.

    Args:
        alpha: acceptance probability of a tested token, in [0, 1].
        draft_s: seconds per draft token, >= 0.
        verify_s: seconds per verify pass, > 0.
        round_trip_s: seconds of a round trip, >= 0.
        max_gamma: most tokens of a proposal, >= 0.
        pipelined: whether the drafter may run ahead of the verdicts.

    Returns:
        `PLAIN` where nothing is faster than decoding plain; the smaller proposal where two are equally fast.

    Raises:
        ValueError: an argument is out of range.
    """
    return best_plan(alpha, Costs(draft_s, verify_s, round_trip_s), max_gamma, pipelined)


def best_plan(alpha: float, costs: Costs, max_gamma: int, pipelined: bool) -> Speculation:
    """Choose how far to draft.

    Sequential rounds take the gamma of the highest rate. Pipelined rounds draft at most as many tokens as fit into a
    pass, t_v / t_d: exactly so many where rows cost nothing, the best number of them otherwise; and take the best first
    proposal for that.

    Args:
        alpha: acceptance probability of a tested token, in [0, 1].
        costs: the session's times.
        max_gamma: most tokens of a proposal, >= 0.
        pipelined: whether the drafter may run ahead of the verdicts.

    Returns:
        `PLAIN` where nothing is faster than decoding plain; the smaller proposal where two are equally fast.

    Raises:
        ValueError: an argument is out of range.
    """
    _check_alpha(alpha)
    if max_gamma < 0:
        raise ValueError(f"max_gamma = {max_gamma}: must be >= 0")
    if max_gamma == 0:
        return PLAIN
    plan, rate = _best_draft(alpha, costs, max_gamma, pipelined)
    return plan if rate > plain_rate(costs) else PLAIN


def best_draft(alpha: float, costs: Costs, max_gamma: int, pipelined: bool) -> Speculation:
    """Return the best plan of those that draft, also where decoding plain is faster; arguments as in `best_plan`.

    Raises:
        ValueError: an argument is out of range; max_gamma must be >= 1.
    """
    _check_alpha(alpha)
    if max_gamma < 1:
        raise ValueError(f"max_gamma = {max_gamma}: must be >= 1")
    return _best_draft(alpha, costs, max_gamma, pipelined)[0]


def break_even_alpha(draft_s: float, verify_s: float, round_trip_s: float, max_gamma: int, pipelined: bool) -> float:
    """Return the alpha above which speculation pays, to three decimals (rounded up); above 1 if it never does.

    Args and errors are those of `choose`.
    """
    steps = range(1001)
    return next(
        (
            step / 1000
            for step in steps
            if choose(step / 1000, draft_s, verify_s, round_trip_s, max_gamma, pipelined).enabled
        ),
        math.inf,
    )


def break_even_draft_s(alpha: float, verify_s: float, round_trip_s: float, max_gamma: int, pipelined: bool) -> float:
    """Return t_d below which speculation pays, to a thousandth of a pass; 0 if not even free drafts do.

    Args and errors are those of `choose`. A draft token that takes as long as a pass never pays.
    """

    def pays(draft_s: float) -> bool:
        return choose(alpha, draft_s, verify_s, round_trip_s, max_gamma, pipelined).enabled

    if not pays(0.0):
        return 0.0
    low, high = 0.0, verify_s
    while high - low > verify_s / 2000:
        middle = (low + high) / 2
        low, high = (middle, high) if pays(middle) else (low, middle)
    return (low + high) / 2


def best_restart(alpha: float, gamma: int, costs: Costs) -> int:
    """Return g0, the best number of tokens of a chain's first proposal where later ones have `gamma`."""
    return max(range(1, gamma + 1), key=lambda restart: pipelined_rate(alpha, restart, gamma, costs))


def runs_in_flight(gamma: int, costs: Costs) -> int:
    """Return how many proposals the window must hold so that the verifier never waits while a chain survives.

    One is in its pass; the next ones cover the time from a verdict to the arrival of a proposal that it permits.
    """
    run_s = max(costs.pass_s(gamma), gamma * costs.draft_s)
    return 1 + math.ceil((gamma * costs.draft_s + costs.round_trip_s) / run_s - 1e-9)


def _best_draft(alpha: float, costs: Costs, max_gamma: int, pipelined: bool) -> tuple[Speculation, float]:
    return (_best_pipelined if pipelined else _best_sequential)(alpha, costs, max_gamma)


def _best_sequential(alpha: float, costs: Costs, max_gamma: int) -> tuple[Speculation, float]:
    gamma = max(range(1, max_gamma + 1), key=lambda g: sequential_rate(alpha, g, costs))
    return Speculation(gamma, gamma, gamma), sequential_rate(alpha, gamma, costs)


def _best_pipelined(alpha: float, costs: Costs, max_gamma: int) -> tuple[Speculation, float]:
    # The hair keeps 30 ms / 6 ms from becoming 4 by rounding.
    fitting = [g for g in range(2, max_gamma + 1) if g * costs.draft_s <= costs.pass_s(g) * (1.0 + 1e-9)]
    gammas = [1, *fitting] if costs.by_rows else [max([1, *fitting])]
    pairs = [(restart, gamma) for gamma in gammas for restart in range(1, gamma + 1)]
    restart, gamma = max(pairs, key=lambda pair: pipelined_rate(alpha, pair[0], pair[1], costs))
    plan = Speculation(gamma, restart, gamma * runs_in_flight(gamma, costs))
    return plan, pipelined_rate(alpha, restart, gamma, costs)


def _check_alpha(alpha: float) -> None:
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha = {alpha}: must be in [0, 1]")


@dataclass(frozen=True, slots=True)
class AlphaEstimator:
    """Estimates alpha as accepted / tested, recent tests weighing more, with a prior until there are enough of them.

    Tests stop at a rejection, which does not bias the ratio: whether a token is tested depends on earlier ones only.
    """

    prior_alpha: float = 0.6
    """What is believed before anything was tested, in [0, 1]."""
    prior_tests: float = 8.0
    """How many tests that belief is worth, > 0; it does not fade, so that a session without recent tests returns to
    it."""
    memory_tests: float = 200.0
    """A test's weight falls by a factor e over this many later ones, > 0."""
    accepted: float = 0.0
    """Faded number of accepted tokens."""
    tested: float = 0.0
    """Faded number of tested tokens."""

    @property
    def alpha(self) -> float:
        """The estimate, in [0, 1]."""
        return (self.accepted + self.prior_alpha * self.prior_tests) / (self.tested + self.prior_tests)

    def observe(self, num_accepted: int, num_tested: int) -> "AlphaEstimator":
        """Return the estimator after one more judgement.

        Raises:
            ValueError: not 0 <= num_accepted <= num_tested.
        """
        if not 0 <= num_accepted <= num_tested:
            raise ValueError(f"{num_accepted} accepted of {num_tested} tested")
        fade = math.exp(-num_tested / self.memory_tests)
        return AlphaEstimator(
            self.prior_alpha,
            self.prior_tests,
            self.memory_tests,
            self.accepted * fade + num_accepted,
            self.tested * fade + num_tested,
        )
