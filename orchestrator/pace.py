"""How fast a session gets on: what its rounds take, and what the latency model makes of that for any plan. Pure.

Beside alpha, t_d, t_v by rows and r, two things that the formulas do not know are measured:

* what a round waits for: r is all of a restart that is neither drafting nor the pass. That includes the pass of other
  sessions that a restart finds under way, which a session that decodes plain does not wait for;
* tokens that the drafter had nothing for: their share while drafting is on, and what each of them waited.

It sees rates and times only, never tokens.
"""

from collections import deque
from statistics import fmean, median

from orchestrator.figures import Round
from orchestrator.pass_costs import PassCosts
from outrider.gamma import AlphaEstimator, Costs, pipelined_rate, plain_rate, sequential_rate
from outrider.ids import TokenKind
from outrider.messages import Speculation

WINDOW = 64
"""Measurements that count."""
MIN_LOAD = 2.0
"""Sessions in a pass from which on they are neighbours."""


class Pace:
    """The measurements of one session."""

    def __init__(self, passes: PassCosts) -> None:
        """Start without any; `passes` are those of its verifier, and are shared."""
        self.passes = passes
        self.alpha = AlphaEstimator()
        self.draft_s = 0.0
        self._verify_s: deque[float] = deque(maxlen=WINDOW)
        self._waits_s: deque[float] = deque(maxlen=WINDOW)
        self._undrafted_waits_s: deque[float] = deque(maxlen=WINDOW)
        self._loads: deque[float] = deque(maxlen=WINDOW)
        self._drafting: deque[tuple[int, int]] = deque(maxlen=WINDOW)
        """Per round while drafting is on: tokens, and those of them that nobody had drafted."""

    @property
    def verify_s(self) -> float | None:
        """Median of the pass times; None before the first."""
        return median(self._verify_s) if self._verify_s else None

    @property
    def num_rounds(self) -> int:
        """Rounds with drafting that count, at most `WINDOW`."""
        return len(self._drafting)

    @property
    def undrafted_share(self) -> float:
        """Tokens that the drafter had nothing for, of all while drafting was on."""
        tokens = sum(each for each, _ in self._drafting)
        return sum(plain for _, plain in self._drafting) / tokens if tokens else 0.0

    def begin(self, now_s: float) -> bool:
        """Start from what other sessions of the verifier have seen lately; say whether there are any.

        One session after the other has no neighbours: what the last text was like says nothing of the next.
        """
        load, waited_s = self.passes.neighbours(now_s) or (1.0, None)
        if load < MIN_LOAD:
            return False
        self._loads.append(load)
        self._verify_s += self.passes.by_own_rows(load, 1)
        self._waits_s += [] if waited_s is None else [waited_s]
        self.alpha = AlphaEstimator(self.passes.alpha.alpha)
        return True

    def observe(self, committed: Round, plan: Speculation, waited_s: float | None, now_s: float) -> None:
        """Take a committed verdict.

        Args:
            committed: the verdict.
            plan: in force.
            waited_s: if it ended a restart, what of it was neither drafting nor the pass.
            now_s: of a clock that all sessions share.
        """
        tested = committed.num_tested
        if tested:
            self.alpha = self.alpha.observe(committed.num_accepted, tested)
        if committed.verify_s > 0.0:
            self._verify_s.append(committed.verify_s)
            self.passes.observe(committed.num_rows, committed.verify_s)
        if committed.num_rows:
            # A run's length is not told where it was cut short by a rejection; the first of a chain is the most usual.
            own = max(tested, plan.restart_gamma + 1) if tested else 1
            self._loads.append(max(1.0, committed.num_rows / own))
            self.passes.note(now_s, self._loads[-1], waited_s if tested else None, (committed.num_accepted, tested))
        if waited_s is not None:
            (self._waits_s if tested else self._undrafted_waits_s).append(waited_s)
        if plan.enabled and committed.kinds:
            self._drafting.append((len(committed.kinds), committed.kinds.count(TokenKind.PLAIN)))

    def forget_drafting(self) -> None:
        """Drafting was switched on or off: what share had been drafted says little of what comes."""
        self._drafting.clear()

    def forget_drafter(self) -> None:
        """Another sort of drafter takes over: what was accepted, and what drafting took, were the other one's."""
        self.alpha, self.draft_s = AlphaEstimator(), 0.0
        self.forget_drafting()

    def costs(self, max_gamma: int) -> Costs | None:
        """Return t_d, t_v by rows and r; None before there is anything to go by."""
        waits_s = self._waits_s or self._undrafted_waits_s
        if self.verify_s is None or not waits_s:
            return None
        load = median(self._loads) if self._loads else 1.0
        by_rows = self.passes.by_own_rows(load, max_gamma + 1)
        return Costs(self.draft_s, self.verify_s, median(waits_s), by_rows)

    def rate(self, plan: Speculation, costs: Costs) -> float:
        """Return the tokens per second to expect under a plan; those that nobody drafts included."""
        if not plan.enabled:
            return plain_rate(costs)
        share = self.undrafted_share
        undrafted_s = costs.pass_s(1) + (fmean(self._undrafted_waits_s) if self._undrafted_waits_s else 0.0)
        return 1.0 / (share * undrafted_s + (1.0 - share) / self._drafted_rate(plan, costs))

    def _drafted_rate(self, plan: Speculation, costs: Costs) -> float:
        if plan.window > plan.gamma:
            return pipelined_rate(self.alpha.alpha, plan.restart_gamma, plan.gamma, costs)
        return sequential_rate(self.alpha.alpha, plan.gamma, costs)
