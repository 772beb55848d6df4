"""How fast a session gets on: what its rounds take, and what the latency model makes of that for any plan. Pure.

Beside alpha, t_d, t_v by rows and r, two things that the formulas do not know are measured:

* what a round waits for: r is all of a restart that is neither drafting nor the pass. That includes the pass of other
  sessions that a restart finds under way, which a session that decodes plain does not wait for;
* tokens that the drafter had nothing for: their share while drafting is on, and what each of them waited.

It sees rates and times only, never tokens.
"""

from collections import deque
from dataclasses import replace
from math import sqrt
from statistics import fmean, median

from orchestrator.company import MIN_LOAD
from orchestrator.figures import Round
from orchestrator.pass_costs import PassCosts
from orchestrator.priors import MIN_WORTH, Prior
from outrider.ahead import ahead_rate
from outrider.gamma import AlphaEstimator, Costs, pipelined_rate, plain_rate, sequential_rate
from outrider.ids import TokenKind
from outrider.messages import DraftStatus, Speculation

WINDOW = 64
"""Measurements that count."""
MIN_DRAFTING = 8
"""Rounds of a session's own that say how much of its text nobody drafts."""
UNLIKE = 3.0
"""Standard deviations by which a text that is unlike the earlier ones differs from what they lead to expect."""
UNLIKE_TESTS = 3
"""Tests that it takes to tell."""
LATE_S = 0.001
"""A proposal that waited less for its test had not come when the pass was over that it is tested behind."""
CLEAR = 0.05
"""Nearer to 0 or 1 no prior is taken to be when a text is compared with it: nothing is that sure."""


class Pace:
    """The measurements of one session."""

    def __init__(self, passes: PassCosts) -> None:
        """Start without any; `passes` are those of its verifier, and are shared."""
        self.passes = passes
        self.alpha = AlphaEstimator()
        self.draft_s = 0.0
        self.is_timed = False
        """Whether it was ever told what drafting takes; until then it may be anything."""
        self.sort = ""
        """Of the drafter."""
        self.is_retrial = False
        """Whether nobody has tried the drafter for so long that this session does, whatever its first test costs."""
        self.is_unlike = False
        """Whether this text has been found to be unlike the earlier ones: then they tell little of it."""
        self.lost_s = 0.0
        """What the rounds of trials took longer than passes that wait for nobody."""
        self._judged = (0, 0)
        """Tokens accepted and tested of this drafter."""
        self._last_pass_s: float | None = None
        """When the verdict of the last pass came, if the session was sure to share the next one."""
        self._trips_s: deque[float] = deque(maxlen=WINDOW)
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
    def num_tests(self) -> int:
        """Tests of this drafter by this session."""
        return self._judged[1]

    @property
    def num_undrafted(self) -> int:
        """Tokens that this drafter had nothing for while drafting was on, lately."""
        return sum(plain for _, plain in self._drafting)

    @property
    def undrafted_share(self) -> float:
        """Tokens that the drafter had nothing for, of all while drafting was on."""
        tokens = sum(each for each, _ in self._drafting)
        return sum(plain for _, plain in self._drafting) / tokens if tokens else 0.0

    @property
    def prior(self) -> Prior:
        """What earlier sessions of the drafter have measured at this verifier."""
        return self.passes.priors.of(self.sort)

    @property
    def deviation(self) -> float:
        """Standard deviation of what is believed of alpha."""
        alpha, tests = self.alpha.alpha, self.alpha.tested + self.alpha.prior_tests
        return sqrt(alpha * (1.0 - alpha) / (tests + 1.0))

    def meet(self, sort: str) -> None:
        """Begin with a drafter: believe of it what earlier sessions have measured."""
        self.sort = sort
        prior = self.prior
        self._judged, self.lost_s, self.is_unlike = (0, 0), 0.0, False
        self.alpha = prior.estimator() if prior.num_tests else AlphaEstimator()
        self.draft_s = prior.draft_s
        self.is_timed, self.is_retrial = self.draft_s > 0.0, prior.is_stale

    def begin(self, now_s: float) -> bool:
        """Start from what other sessions of the verifier have seen lately; say whether there are any.

        One session after the other has no neighbours: of them the prior tells.
        """
        load, waited_s = self.passes.neighbours(now_s) or (1.0, None)
        load = max(load, float(len(self.passes.company)))
        if load < MIN_LOAD:
            return False
        self._loads.append(load)
        self._waits_s += [] if waited_s is None else [waited_s]
        return True

    def load(self) -> float:
        """Return how many sessions share a pass, this one included."""
        return median(self._loads) if self._loads else 1.0

    def leave(self) -> None:
        """The drafter goes: what was measured of it is of use to others."""
        undrafted = self.undrafted_share if self._drafting else None
        if self._judged[1] or undrafted is not None:
            trip_s = median(self._trips_s) if self._trips_s else None
            self.prior.note(self._judged, undrafted, trip_s, self.draft_s)
        else:
            self.prior.pass_over()
        self._judged = (0, 0)

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
            self._judged = (self._judged[0] + committed.num_accepted, self._judged[1] + tested)
            if not self.is_unlike and self._differs():
                self.is_unlike, self.alpha = True, replace(self.alpha, prior_tests=MIN_WORTH)
        if committed.verify_s > 0.0:
            self._verify_s.append(committed.verify_s)
            is_plain = not (plan.enabled or tested or self.passes.company.num_drafted)
            self.passes.observe(committed.num_rows, committed.verify_s, is_plain=is_plain)
        if committed.num_rows:
            # Where sessions are not counted: a run's length is not told where a rejection cut it short; the first of a
            # chain is the most usual.
            own = max(tested, plan.restart_gamma + 1) if tested else 1
            self._loads.append(float(committed.num_sessions) or max(1.0, committed.num_rows / own))
            self.passes.note(now_s, self._loads[-1], waited_s if tested else None, (committed.num_accepted, tested))
            self._observe_beside(committed, plan, now_s)
            self.lost_s += self.draft_cost_s() if plan.ahead and plan.gamma == 1 else 0.0
        if waited_s is not None:
            (self._waits_s if tested else self._undrafted_waits_s).append(waited_s)
            if plan.ahead and plan.gamma == 1:
                more_s = self.draft_s - (committed.verify_s if committed.from_ahead else 0.0) if tested else 0.0
                self.lost_s += max(0.0, waited_s + more_s)
        if plan.enabled and committed.kinds:
            self._drafting.append((len(committed.kinds), committed.kinds.count(TokenKind.PLAIN)))

    def _observe_beside(self, committed: Round, plan: Speculation, now_s: float) -> None:
        """Take what the time since the last pass had beside the model, if all neighbours were in both, and none waits.

        Only verdicts that came with the end of a pass say when that was: a proposal that comes later is tested at once,
        on the row that was held. With another pass in between it would be longer by about as much as the model takes.
        """
        shares_all = committed.num_sessions >= max(MIN_LOAD, self.load()) and (plan.ahead or not plan.enabled)
        if not shares_all or (committed.from_ahead and committed.queue_s < LATE_S):
            self._last_pass_s = None
            return
        if self._last_pass_s is not None:
            beside_s = max(0.0, now_s - self._last_pass_s - committed.verify_s)
            if beside_s < committed.verify_s / 2.0:
                self.passes.beside.observe(committed.num_sessions, self.passes.company.num_drafted, beside_s)
        self._last_pass_s = now_s

    def draft_cost_s(self) -> float:
        """Return what being drafted for adds to all neighbours' passes together, beside rows, in each pass."""
        load = self.load()
        return load * self.passes.beside.costs[1] if load >= MIN_LOAD else 0.0

    def _differs(self) -> bool:
        """Whether this text differs from earlier sessions' by more than chance explains."""
        accepted, tested = self._judged
        worth = self.alpha.prior_tests
        if tested < UNLIKE_TESTS or not self.prior.is_known:
            return False
        expected = min(1.0 - CLEAR, max(CLEAR, self.alpha.prior_alpha))
        spread = sqrt(expected * (1.0 - expected) * (1.0 / tested + 1.0 / worth))
        return abs(accepted / tested - expected) > UNLIKE * spread

    def observe_status(self, status: DraftStatus) -> None:
        """Take a drafter's report."""
        self.draft_s = status.draft_s_per_token or self.draft_s
        self.is_timed = self.is_timed or self.draft_s > 0.0 or status.num_drafted > 0

    def observe_trip(self, trip_s: float) -> None:
        """Take a round trip without any wait for a pass."""
        self._trips_s.append(trip_s)

    def forget_drafting(self) -> None:
        """Drafting was switched on or off: what share had been drafted says little of what comes."""
        self._drafting.clear()

    def replaced(self, sort: str) -> None:
        """Another sort of drafter takes over: what was accepted, and what drafting took, were the other one's."""
        self.meet(sort)
        self.forget_drafting()

    def costs(self, max_gamma: int) -> Costs | None:
        """Return t_d, t_v by rows and r; None before there is anything to go by."""
        wait_s, verify_s = self._wait_s(), self.verify_s
        by_rows = self.passes.by_own_rows(self.load(), max_gamma + 1)
        if wait_s is None or (verify_s is None and not by_rows):
            return None
        return Costs(self.draft_s, verify_s or by_rows[0], wait_s, by_rows)

    def _wait_s(self) -> float | None:
        """Return r: of this session, else the trips of earlier ones; None if neither is known."""
        waits_s = self._waits_s or self._undrafted_waits_s
        return median(waits_s) if waits_s else self.prior.trip_s

    @property
    def trip_s(self) -> float | None:
        """Median of the round trips without any wait for a pass; of earlier sessions before the first of this one."""
        return median(self._trips_s) if self._trips_s else self.prior.trip_s

    def undrafted(self, *, hoped: bool = False) -> float:
        """Return the share of tokens to expect that nobody drafts: earlier sessions', until there are rounds enough.

        Args:
            hoped: whether it may be the better of them.
        """
        if len(self._drafting) >= MIN_DRAFTING:
            return self.undrafted_share
        return self.prior.hoped_undrafted if hoped else self.prior.undrafted

    def rate(self, plan: Speculation, costs: Costs, hoped_alpha: float | None = None) -> float:
        """Return the tokens per second to expect under a plan; those that nobody drafts included.

        Args:
            plan: of any kind.
            costs: from `costs`.
            hoped_alpha: to reckon with, and with as much drafted as can be hoped for; None: what is believed.
        """
        if not plan.enabled:
            plain_s = self.passes.plain_s(round(self.load()))
            return plain_rate(costs) if plain_s is None else 1.0 / plain_s
        alpha, share = hoped_alpha, self.undrafted(hoped=hoped_alpha is not None)
        undrafted_s = costs.pass_s(1) + (fmean(self._undrafted_waits_s) if self._undrafted_waits_s else 0.0)
        drafted = self._drafted_rate(plan, costs, self.alpha.alpha if alpha is None else alpha)
        return 1.0 / (share * undrafted_s + (1.0 - share) / drafted)

    def _drafted_rate(self, plan: Speculation, costs: Costs, alpha: float) -> float:
        if plan.ahead:
            return ahead_rate(alpha, plan.restart_gamma, plan.gamma, self.without_waits(costs))
        if plan.window > plan.gamma:
            return pipelined_rate(alpha, plan.restart_gamma, plan.gamma, costs)
        return sequential_rate(alpha, plan.gamma, costs)

    def without_waits(self, costs: Costs) -> Costs:
        """Return costs whose round trip is the bare one: a pass that runs ahead waits for nobody's."""
        trip_s = self.trip_s
        return costs if trip_s is None else replace(costs, round_trip_s=min(trip_s, costs.round_trip_s))
