"""Which plan a session would do best with: alone by the latency model, beside others by its share of the rows. Pure.

It knows nothing of steadiness: whether a better plan is taken up, and when, is `orchestrator.tuning`'s business.
"""

from dataclasses import dataclass, replace

from orchestrator.company import MIN_LOAD, Member
from orchestrator.pace import Pace
from outrider.ahead import ahead_plan, best_ahead
from outrider.gamma import PLAIN, Costs, best_draft
from outrider.generation import SpeculationChoice
from outrider.messages import Speculation

GAIN = 1.05
"""A new plan must promise so many times the present one's tokens per second."""
LEAST_GAIN = 1.02
"""What drafting must promise of plain decoding's tokens per second: with less it only keeps the draft worker busy."""
TRIAL_TESTS = 24
"""Tests after which a trial ends, whatever is still open."""
FIRST_TESTS = 8
"""Tests that every session makes of its drafter, whatever earlier ones say: its text may be quite unlike theirs."""
FIRST_PASSES = 1.5
"""Passes that those may cost where they are not free, and what they cost neighbours is counted too."""
LONG_ANSWER = 100
"""Tokens of an answer that may lose so much; a shorter one may lose the same share, 1.5 %."""
DOUBT = 1.3
"""Standard deviations of alpha that a trial gives a drafter the benefit of."""
IN_TIME = 0.9
"""Part of a pass in which a drafter that begins anew has to be done, to be sure of the next one."""
FREE = 0.985
"""A trial that keeps so much of plain decoding's rate costs nothing."""
TRIAL = Speculation(1, 1, 1, ahead=True)
"""One token at a time, behind a pass that does not wait for it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What an operator sets."""

    default: Speculation = Speculation(4, 3, 8)
    """Before anything is measured; the rows of its passes are powers of two, to which engines pad."""
    max_gamma: int = 16
    pipelined: bool = True
    """Whether a drafter may run ahead of the verdicts."""
    adaptive: bool = True
    """False keeps the default."""
    min_patience_s: float = 0.1
    max_patience_s: float = 2.0
    """Also the patience before restarts were measured."""
    speculates: bool = True
    """False: nothing is drafted, whatever is measured or asked for."""


class Planner:
    """Plans for one session."""

    def __init__(self, choice: SpeculationChoice, limits: Limits, pace: Pace, max_tokens: int) -> None:
        """Keep what plans depend on.

        Args:
            choice: the request's own figures, which stay as they are.
            limits: the operator's.
            pace: what the session measures.
            max_tokens: of the answer.
        """
        self._first_passes = FIRST_PASSES * min(1.0, max_tokens / LONG_ANSWER)
        self._choice, self._limits, self._pace = choice, limits, pace
        self._member = Member()

    @property
    def is_fixed(self) -> bool:
        """Whether the plan may not change, by request or by configuration."""
        limits, choice = self._limits, self._choice
        return not (limits.adaptive and limits.speculates) or choice.off or choice.gamma is not None

    @property
    def max_gamma(self) -> int:
        """Most tokens of a proposal."""
        return min(self._limits.max_gamma, self._choice.max_gamma or self._limits.max_gamma)

    @property
    def is_beside(self) -> bool:
        """Whether passes are shared, so that their rows are divided."""
        return self._pace.load() >= MIN_LOAD

    def takes_too_much(self, plan: Speculation, *, is_new: bool) -> bool:
        """Whether a plan has more rows of the passes that are shared than are given to the session by now.

        That all but one were taken away may be noise, unless it is so for all: else only one that is new, which chose
        before others came, heeds it.
        """
        least = 1 if is_new or not self._pace.passes.company.drafts else 2
        return self.is_beside and self._member.rows >= least and plan.gamma > self._member.rows

    # -- among the others ------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Be one of the sessions of the verifier."""
        self._member = self._pace.passes.company.join()

    def follow(self, plan: Speculation) -> None:
        """Tell the others which plan is in force: who decodes plain takes no rows until it asks again."""
        self._member.drafted = plan.enabled
        if not plan.enabled:
            self._member.most = 1

    def leave(self) -> None:
        """Be none of them any more; idempotent."""
        self._pace.passes.company.leave(self._member)

    @property
    def knows_plain(self) -> bool:
        """Whether passes without drafts were seen, without which nothing can be said of what drafting gains."""
        passes = self._pace.passes
        return passes.is_empty or passes.plain_s(round(self._pace.load())) is not None

    # -- plans -----------------------------------------------------------------------------------------------------

    def costs(self) -> Costs | None:
        """Return what the session's steps take; None before there is anything to go by."""
        return self._pace.costs(self._limits.max_gamma)

    def default(self) -> Speculation:
        """Return what holds before anything is measured."""
        return self.pinned(self._limits.default)

    def best(self, costs: Costs, now_s: float) -> Speculation:
        """Return the best plan, which may be not to draft."""
        if self.is_beside:
            return self._divided(costs, now_s)
        plans = [self.pinned(plan) for plan in self.drafting(costs)]
        best = max(plans, key=lambda plan: self._pace.rate(plan, costs))
        return best if self.gain(best, costs) > LEAST_GAIN else PLAIN

    def drafting(self, costs: Costs, alpha: float | None = None) -> tuple[Speculation, Speculation]:
        """Return the best plan that waits for its drafter, and the best one that runs ahead of it.

        Args:
            costs: from `costs`.
            alpha: to reckon with; None: what is believed.
        """
        alpha = self._pace.alpha.alpha if alpha is None else alpha
        ahead, _ = best_ahead(alpha, self._pace.without_waits(costs), self.max_gamma)
        return best_draft(alpha, costs, self.max_gamma, self._limits.pipelined), ahead

    def gain(self, plan: Speculation, costs: Costs, hoped_alpha: float | None = None) -> float:
        """Return the tokens per second of a plan for a session by itself, in those of plain decoding."""
        return self._pace.rate(plan, costs, hoped_alpha) / self._pace.rate(PLAIN, costs)

    def owes_trial(self, costs: Costs) -> bool:
        """Whether the session has yet to make the tests that it makes whatever earlier sessions say."""
        bare = self._pace.without_waits(costs)
        extra_s = max(0.0, bare.draft_s + bare.round_trip_s - bare.pass_s(1)) + self._pace.draft_cost_s()
        # Beside others a row that nobody drafts for is one that the division could have made more of.
        made = self._pace.num_tests + (self._pace.num_undrafted if self.is_beside else 0)
        if self._pace.is_retrial and self._pace.lost_s == 0.0:
            return made < FIRST_TESTS
        # Two rounds: another one has begun by the time that the verifier hears that the trial is over.
        return made < FIRST_TESTS and self._pace.lost_s + 2.0 * extra_s <= self._first_passes * bare.pass_s(1)

    def is_open(self, costs: Costs) -> bool:
        """Whether a trial could still find out something, and costs nothing; `costs` are those of `costs`."""
        pass_s = costs.pass_s(1)
        kept = self.gain(TRIAL, costs) * pass_s / (pass_s + self._pace.draft_cost_s())
        if self._pace.num_tests >= TRIAL_TESTS or kept < FREE:
            return False
        hoped = min(1.0, self._pace.alpha.alpha + DOUBT * self._pace.deviation)
        return any(self.gain(plan, costs, hoped) > GAIN for plan in self.drafting(costs, hoped))

    def pinned(self, plan: Speculation) -> Speculation:
        """Put the request's own figures into a plan."""
        choice, most = self._choice, self.max_gamma
        if choice.off or not self._limits.speculates:
            return PLAIN
        if choice.gamma is not None:
            window = 2 * choice.gamma if self._limits.pipelined else choice.gamma
            return Speculation(choice.gamma, choice.restart_gamma or choice.gamma, choice.window or window)
        if choice.max_gamma is not None and plan.gamma > most:
            # In a window of as many proposals.
            window = plan.window // plan.gamma * most
            plan = replace(plan, gamma=most, restart_gamma=min(most, plan.restart_gamma), window=window)
        if choice.restart_gamma is not None and plan.enabled:
            return replace(plan, restart_gamma=min(plan.gamma, choice.restart_gamma))
        return plan

    def _divided(self, costs: Costs, now_s: float) -> Speculation:
        """Return the plan for the rows that a session has among the others."""
        pace, member = self._pace, self._member
        member.alpha = pace.alpha.alpha
        member.undrafted = pace.undrafted()
        bare = pace.without_waits(costs)
        pass_s = pace.verify_s or bare.pass_s(1)
        # Runs that take longer to draft than others' passes miss some of them.
        most = next((g for g in range(self.max_gamma, 1, -1) if g * bare.draft_s <= pass_s), 1)
        pace.passes.company.claim(member, most)
        pace.passes.divide(round(pace.load()), now_s)
        if member.rows <= 1:
            return PLAIN
        # Others' pass begins at once, and what is not there in time misses it.
        limit_s = IN_TIME * pass_s - bare.round_trip_s
        in_time = (g for g in range(2, member.rows + 1) if g * bare.draft_s <= limit_s)
        return self.pinned(ahead_plan(max(in_time, default=1), member.rows, bare))
