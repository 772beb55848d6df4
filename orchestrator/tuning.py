"""From what one session measures to how far it drafts and how long its verifier waits. Pure: times come in.

The policy itself is `outrider.gamma`; here are its inputs and its steadiness:

* alpha from the verdicts' tests; draft seconds per token from the drafter's reports; pass times by rows from the
  verdicts of all sessions; the round trip from restarts: the time from a commit that starts a new epoch until the first
  verdict that tested in it, less drafting and the pass (`orchestrator.pace`);
* a plan changes only where the model promises `GAIN` more tokens a second than the present one, and at most every
  `STRIDE` rounds; to go without drafts, `OFF_GAIN` is enough;
* patience is a multiple of the slowest restarts seen lately (p99 of a window). It is generous until there are some:
  a drafter may be prefilling a long prompt. One that ran out counts as a restart of twice its length, so that a
  patience too short for its drafter grows; but a drafter of which nothing has come yet is given less each time, once
  it has had the time that reading the session takes on a slow machine;
* a session begins with what earlier sessions of the verifier have measured of its drafter (`orchestrator.priors`), but
  no session goes without a trial of its own because of them: its text may be quite unlike theirs. A trial is one token
  at a time behind a pass that does not wait for it (`outrider.ahead`), which costs neither rows nor time if the drafter
  is quicker than a pass, and is over after a pass and a half's time if not. Where what it finds is more than chance
  explains, the earlier sessions count for nearly nothing;
* beside others, how many rows a session has is not its own choice: `orchestrator.company` divides them;
* where the policy says not to draft at all, a probe of the same kind keeps its inputs alive, every `PROBE_EVERY` tokens
  at first, and half as often after every one that was in vain, but at once where far fewer sessions share the passes
  than when it was switched off. A session that was switched off stays so for `OFF_S` at least.

Why it does not draft is one of `REASONS`.

It sees rates and times only, never tokens.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from orchestrator import plans
from orchestrator.events import Tuned
from orchestrator.figures import Round
from orchestrator.pace import WINDOW, Pace
from orchestrator.pass_costs import PassCosts
from orchestrator.plans import GAIN, TRIAL, Planner
from outrider.gamma import PLAIN, Costs
from outrider.generation import SpeculationChoice
from outrider.ids import Epoch, TokenKind
from outrider.messages import DraftStatus, Speculation, VerdictCause

STRIDE = 8
"""Rounds between two looks at the plan."""
OFF_GAIN = 1.03
"""The same of decoding without drafts: it is what a session is never to be slower than."""
MIN_TESTS = 8
"""Tests, or tokens that nobody drafted, before the first default is given up."""
WORTH_TESTS = 16
"""Tests by which a session judges what its drafter was worth."""
PROBE_EVERY = 128
"""Tokens decoded plain before the first probe."""
PROBE_LATEST = 1024
"""The same before later ones, at most."""
PROBE_ROUNDS = 8
"""Rounds with tests that a probe lasts."""
LEARN_ROUNDS = 4
"""Rounds without drafts in which a session sees what passes take that are not drafted for, where nobody knows."""
OFF_S = 10.0
"""How long a session that was switched off stays so."""
RELIEF = 0.6
"""A probe is due at once where only this share is left of the sessions there were when drafting was switched off."""
PROBE_LIMIT = 32
"""Rounds that a probe lasts at most."""
MIN_RESTARTS = 4
"""Restarts measured before patience follows them."""
UNPROVEN_CUT = 4.0
"""A drafter of which nothing has come yet is given so many times less after each expiry."""
SLOW_READING = 200.0
"""Tokens a second that a drafter attached in mid-generation may take to read the session, and still be worth having."""
PATIENCE_FACTOR = 3.0
"""Patience, in slowest restarts."""
BELOW_PLAIN = "below_plain"
PASSES_FULL = "passes_full"
EARLIER_SESSIONS = "earlier_sessions"
NOTHING_DRAFTED = "nothing_drafted"
REASONS = (BELOW_PLAIN, PASSES_FULL, EARLIER_SESSIONS, NOTHING_DRAFTED)
"""Why nothing is drafted: this session measured that plain decoding is faster; it would not be, but rows of the passes
that others share bring more elsewhere; earlier sessions of the drafter have measured it, and a trial would cost too
much; the drafter had nothing in time for what was said here so far, so nothing of it could be tested."""
Limits = plans.Limits


@dataclass(slots=True)
class Tuning:
    """The measurements and the present choice of one session."""

    choice: SpeculationChoice
    """The request's own figures, which stay as they are."""
    limits: Limits
    pace: Pace = field(default_factory=lambda: Pace(PassCosts()))
    """With the pass costs that sessions of the verifier share."""
    max_tokens: int = plans.LONG_ANSWER
    """Of the answer."""
    speculation: Speculation = field(init=False)
    patience_s: float = field(init=False)
    _restarts_s: deque[float] = field(init=False, default_factory=lambda: deque(maxlen=WINDOW))
    network_s: float = field(init=False, default=0.0)
    """Sum of the measured round trips."""
    _restarting: tuple[Epoch, float] | None = field(init=False, default=None)
    _rounds: int = field(init=False, default=0)
    _plain_tokens: int = field(init=False, default=0)
    _probing: int = field(init=False, default=0)
    _probed_rounds: int = field(init=False, default=0)
    _proven: bool = field(init=False, default=False)
    """Whether something was tested since a worker was opened."""
    _reading_s: float = field(init=False, default=0.0)
    """What is left of the time that an attached drafter may read without being given less."""
    reason: str = field(init=False, default=BELOW_PLAIN)
    """Why nothing is drafted, where that is so; one of `REASONS`."""
    _planner: Planner = field(init=False)
    _probe_after: int = field(init=False, default=PROBE_EVERY)
    """Plain tokens before the next probe."""
    _off_since_s: float = field(init=False, default=-OFF_S)
    _in_earnest: bool = field(init=False, default=True)
    """Whether more is drafted than what a trial is."""
    _learning: int = field(init=False, default=0)
    """Rounds without drafts that are left until a plan is chosen."""
    _has_learned: bool = field(init=False, default=False)
    """Whether it has decoded such rounds: neighbours that are drafted for may keep them from telling anything."""
    _before: Speculation = field(init=False, default=PLAIN)
    """The plan before these."""
    _off_load: float = field(init=False, default=1.0)
    """Sessions that shared the passes when drafting was switched off."""
    _num_tests: int = field(init=False, default=0)
    _num_drafts_tested: int = field(init=False, default=0)
    """Since the drafter's worth was taken last, or another sort of drafter took over."""

    def __post_init__(self) -> None:
        """Start from the default, with the request's own figures in it."""
        self._planner = Planner(self.choice, self.limits, self.pace, self.max_tokens)
        self.speculation = self._planner.default()
        self.patience_s = self.limits.max_patience_s

    def begin(self, now_s: float, sort: str = "") -> None:
        """Join the sessions of the verifier, and choose the first plan by what they have measured; else the default.

        Args:
            now_s: of a clock that all sessions share.
            sort: of the drafter.
        """
        self._planner.join()
        self.pace.meet(sort)
        if self._planner.is_fixed:
            return
        beside = self.pace.begin(now_s)
        costs = self._planner.costs() if self.pace.prior.is_known else None
        if costs is not None:
            self._choose_first(costs, now_s)
        elif beside:
            self._set(self._planner.pinned(TRIAL))

    def left(self) -> None:
        """The drafter is given up: what was measured of it is of use to other sessions."""
        self.pace.leave()

    def end(self) -> None:
        """Leave the sessions of the verifier; idempotent."""
        self._planner.leave()

    def moved(self, passes: PassCosts) -> None:
        """Another verifier takes over, whose passes cost what its sessions say."""
        if passes is not self.pace.passes:
            self._planner.leave()
            self.pace.passes = passes
            self._planner.join()

    @property
    def tuned(self) -> Tuned:
        """The present choice."""
        return Tuned(self.speculation, self.patience_s, self.reason)

    # -- measurements ----------------------------------------------------------------------------------------------

    def restarted(self, epoch: Epoch, now_s: float) -> None:
        """The drafter is told now to start in this epoch."""
        self._restarting = (epoch, now_s)

    def attached(self, length: int) -> Tuned:
        """A worker is opened anew and has to read the whole session, of `length` tokens: be patient as at the start.

        At the start drafter and verifier read at the same time; here the verifier waits from the first token on.
        """
        self._restarts_s.clear()
        self._restarting, self._proven = None, False
        self._reading_s = length / SLOW_READING
        self.patience_s = self.limits.max_patience_s
        return self.tuned

    def replaced(self, sort: str = "") -> None:
        """Another sort of drafter takes over: begin anew, also where the one before had been switched off."""
        self.pace.replaced(sort)
        self._num_tests = self._num_drafts_tested = self._plain_tokens = self._probing = 0
        self._probe_after, self._off_since_s = PROBE_EVERY, -OFF_S
        self.speculation = self._planner.default()

    def take_worth(self) -> float | None:
        """Return what the drafter is worth: rate of the best plan that drafts, in rates of plain decoding.

        None until enough was tested since it was taken last, and where the plan may not change: such a session drafts
        as far as it is told to.
        """
        planner = self._planner
        costs = planner.costs()
        if planner.is_fixed or costs is None or self._num_drafts_tested < WORTH_TESTS:
            return None
        self._num_drafts_tested = 0
        alone, ahead = (planner.gain(plan, costs) for plan in planner.drafting(costs))
        # Ahead no drafter loses: one that does not win there either earns nothing.
        return ahead if ahead > max(alone, GAIN) else alone

    def observe_status(self, status: DraftStatus) -> None:
        """Take a drafter's report."""
        self.pace.observe_status(status)

    def observe(self, committed: Round, now_s: float) -> Tuned | None:
        """Take a committed verdict; return the new choice if it changed."""
        self._rounds += 1
        self._planner.follow(self.speculation)
        self.pace.observe(committed, self.speculation, self._measure_restart(committed, now_s), now_s)
        self._num_tests += committed.num_tested or committed.kinds.count(TokenKind.PLAIN)
        self._num_drafts_tested += committed.num_tested
        self._proven = self._proven or committed.num_tested > 0
        before = (self.speculation, self.patience_s)
        if committed.cause == VerdictCause.PATIENCE:
            self._ran_out()
        self._replan(committed, now_s)
        return None if (self.speculation, self.patience_s) == before else self.tuned

    def _ran_out(self) -> None:
        """Wait longer for a drafter that has shown it can deliver, and less and less for one that has not."""
        if self._proven:
            self._restarts_s.append(min(2.0 * self.patience_s, self.limits.max_patience_s))
            return
        self._reading_s -= self.patience_s
        if self._reading_s <= 0.0:
            self.patience_s = max(self.limits.min_patience_s, self.patience_s / UNPROVEN_CUT)

    def _measure_restart(self, committed: Round, now_s: float) -> float | None:
        """The first verdict of an epoch ends the restart that began it; return what of it was no work of a model."""
        if self._restarting is None or self._restarting[0] != committed.epoch or not committed.kinds:
            return None
        taken_s = now_s - self._restarting[1]
        self._restarting = None
        if not committed.num_tested:
            return None if committed.cause == VerdictCause.PATIENCE else max(0.0, taken_s - committed.verify_s)
        self._restarts_s.append(taken_s)
        waited_s = taken_s - self.speculation.restart_gamma * self.pace.draft_s
        # A pass that had begun before the proposal came is none of the restart's own.
        waited_s = max(0.0, waited_s - (0.0 if committed.from_ahead else committed.verify_s))
        trip_s = max(0.0, waited_s - committed.queue_s)
        self.pace.observe_trip(trip_s)
        self.network_s += trip_s
        return waited_s

    # -- choices ---------------------------------------------------------------------------------------------------

    def _replan(self, committed: Round, now_s: float) -> None:
        if self._planner.is_fixed:
            self._set_patience()
        elif self._probing:
            self._go_on_probing(committed, now_s)
        elif self._learning:
            self._learning -= not committed.num_tested
            if not self._learning:
                self._set(self._before)
                self._choose(now_s)
        elif not self.speculation.enabled:
            self._wait_for_probe(committed, now_s)
        elif self._rounds % STRIDE == 0 and self._num_tests >= MIN_TESTS:
            self._set_patience()
            self._choose(now_s)
        elif self._is_urgent():
            self._choose(now_s)

    def _is_urgent(self) -> bool:
        """Whether the plan need not wait for the next look: its rows are others' by now, or a trial is over."""
        if self._planner.takes_too_much(self.speculation, is_new=self._rounds < STRIDE):
            return True
        return self.speculation == TRIAL and self._is_settled()

    def _is_settled(self) -> bool:
        """Whether a trial need not wait for the next look: it costs too much, or the text is unlike earlier ones."""
        costs = self._planner.costs()
        if costs is None:
            return False
        return self.pace.is_unlike or (self.pace.lost_s > 0.0 and not self._planner.owes_trial(costs))

    def _set_patience(self) -> None:
        """Follow the measured restarts; changes under a fifth are not worth a message."""
        if self._rounds % STRIDE or len(self._restarts_s) < MIN_RESTARTS:
            return
        wanted = PATIENCE_FACTOR * _quantile(self._restarts_s, 0.99)
        wanted = min(self.limits.max_patience_s, max(self.limits.min_patience_s, wanted))
        if abs(wanted - self.patience_s) > 0.2 * self.patience_s:
            self.patience_s = wanted

    def _choose_first(self, costs: Costs, now_s: float) -> None:
        """Choose before anything was measured here; a trial where earlier sessions leave it open."""
        plan, default = self._best_or_trial(costs, now_s), self._planner.default()
        # Before it is known what a draft token takes, long proposals may take any time.
        self._set(plan if self.pace.is_timed or plan.gamma <= default.gamma else default)
        if not self.speculation.enabled:
            self._note_off(now_s, self._why_off(costs))

    def _choose(self, now_s: float) -> None:
        """Take the policy's plan where it is clearly better than the present one."""
        planner, present, costs = self._planner, self.speculation, self._planner.costs()
        if costs is None:
            return
        plan = self._best_or_trial(costs, now_s)
        if _is_earnest(plan) and not self._in_earnest and now_s - self._off_since_s < OFF_S:
            # A trial that goes on meanwhile only keeps the draft worker busy.
            plan = PLAIN
        if not (planner.knows_plain or self._has_learned):
            self._before, self._has_learned = present, True
            self._set(PLAIN)
            self._learning = LEARN_ROUNDS
            return
        if plan.gamma > present.gamma and not self.pace.is_timed:
            return
        off = not _is_earnest(plan)
        # A trial takes the place of no drafts at all. One that is over only keeps the draft worker busy.
        promise, margin = (1.0, OFF_GAIN) if off else (planner.gain(plan, costs), GAIN)
        # Beside others the division has its own margins: what all gain by it is not this session's alone.
        better = planner.is_beside or (off and present == TRIAL) or promise > margin * planner.gain(present, costs)
        if plan != present and better:
            self._plain_tokens = 0
            if not plan.enabled:
                self._note_off(now_s, self._why_off(costs))
            elif self._in_earnest and not _is_earnest(plan):
                self._off_since_s = now_s
            self._set(plan)

    def _best_or_trial(self, costs: Costs, now_s: float) -> Speculation:
        plan = self._planner.best(costs, now_s)
        if not plan.enabled and (self._planner.owes_trial(costs) or self._planner.is_open(costs)):
            return self._planner.pinned(TRIAL)
        return plan

    def _why_off(self, costs: Costs) -> str:
        """Return why the best is not to draft."""
        planner = self._planner
        if planner.is_beside and max(planner.gain(each, costs) for each in planner.drafting(costs)) > 1.0:
            return PASSES_FULL
        if self.pace.num_tests:
            return BELOW_PLAIN
        return NOTHING_DRAFTED if self.pace.num_undrafted else EARLIER_SESSIONS

    def _note_off(self, now_s: float, reason: str) -> None:
        self.reason, self._off_since_s, self._off_load = reason, now_s, self.pace.load()

    def _set(self, plan: Speculation) -> None:
        if plan.enabled != self.speculation.enabled:
            self.pace.forget_drafting()
        self.speculation, self._in_earnest = plan, _is_earnest(plan)

    def _wait_for_probe(self, committed: Round, now_s: float) -> None:
        self._plain_tokens += len(committed.kinds)
        relieved = self.pace.load() <= RELIEF * self._off_load and self._plain_tokens >= STRIDE
        if self._plain_tokens < self._probe_after and not relieved:
            return
        if now_s - self._off_since_s < OFF_S and not relieved:
            return
        self._off_load = self.pace.load()
        self._plain_tokens, self._probing, self._probed_rounds = 0, PROBE_ROUNDS, 0
        self._set(self._planner.pinned(TRIAL))

    def _go_on_probing(self, committed: Round, now_s: float) -> None:
        """Decide after some rounds with tests; patience that ran out, or a drafter without guesses, ends a probe."""
        self._probing -= bool(committed.num_tested)
        self._probed_rounds += 1
        if committed.cause == VerdictCause.PATIENCE or self._probed_rounds > PROBE_LIMIT:
            self._end_probe(now_s, PLAIN)
        elif not self._probing:
            planner, costs = self._planner, self._planner.costs()
            plan = PLAIN if costs is None else planner.best(costs, now_s)
            # One row more than plain decoding's is what the next look may take away again.
            clear = plan.gamma > 2 if planner.is_beside else costs is not None and planner.gain(plan, costs) > GAIN
            self._end_probe(now_s, plan if clear else PLAIN)

    def _end_probe(self, now_s: float, plan: Speculation) -> None:
        self._probing = 0
        if plan.enabled:
            self._probe_after = PROBE_EVERY
        else:
            self._probe_after = min(PROBE_LATEST, 2 * self._probe_after)
            self._off_since_s = now_s
        self._set(plan)


def _is_earnest(plan: Speculation) -> bool:
    return plan.enabled and plan != TRIAL


def _quantile(values: Iterable[float], share: float) -> float:
    """Return the value that at least `share` of the values do not exceed; there is at least one."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
