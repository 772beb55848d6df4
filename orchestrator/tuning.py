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
* a session that begins beside others starts from what they have seen lately: a short one could not find out by itself
  that drafting does not pay on a full verifier;
* where the policy says not to draft at all, a short probe every `PROBE_EVERY` tokens keeps its inputs alive.

It sees rates and times only, never tokens.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from orchestrator.events import Tuned
from orchestrator.figures import Round
from orchestrator.pace import WINDOW, Pace
from orchestrator.pass_costs import PassCosts
from outrider.gamma import PLAIN, best_draft, best_plan
from outrider.generation import SpeculationChoice
from outrider.ids import Epoch, TokenKind
from outrider.messages import DraftStatus, Speculation, VerdictCause

STRIDE = 8
"""Rounds between two looks at the plan."""
GAIN = 1.05
"""A new plan must promise so many times the present one's tokens per second."""
OFF_GAIN = 1.03
"""The same of decoding without drafts: it is what a session is never to be slower than."""
MIN_TESTS = 16
"""Tests, or tokens that nobody drafted, before the first default is given up."""
PROBE_EVERY = 128
"""Tokens decoded plain between two probes."""
PROBE_ROUNDS = 4
"""Rounds with tests that a probe lasts."""
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


@dataclass(slots=True)
class Tuning:
    """The measurements and the present choice of one session."""

    choice: SpeculationChoice
    """The request's own figures, which stay as they are."""
    limits: Limits
    pace: Pace = field(default_factory=lambda: Pace(PassCosts()))
    """With the pass costs that sessions of the verifier share."""
    speculation: Speculation = field(init=False)
    patience_s: float = field(init=False)
    _restarts_s: deque[float] = field(init=False, default_factory=lambda: deque(maxlen=WINDOW))
    _trips_s: deque[float] = field(init=False, default_factory=lambda: deque(maxlen=WINDOW))
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
    _num_tests: int = field(init=False, default=0)
    _num_drafts_tested: int = field(init=False, default=0)
    """Since the drafter's worth was taken last, or another sort of drafter took over."""

    def __post_init__(self) -> None:
        """Start from the default, with the request's own figures in it."""
        self.speculation = self._pinned(self.limits.default)
        self.patience_s = self.limits.max_patience_s

    def begin(self, now_s: float) -> None:
        """Choose the first plan by what other sessions of the verifier have seen lately; without any, the default."""
        if not self._fixed() and self.pace.begin(now_s):
            self._choose()

    @property
    def round_trip_s(self) -> float | None:
        """Median of the measured round trips; None before the first."""
        return _quantile(self._trips_s, 0.5) if self._trips_s else None

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
        return Tuned(self.speculation, self.patience_s)

    def replaced(self) -> None:
        """Another sort of drafter takes over: begin anew, also where the one before had been switched off."""
        self.pace.forget_drafter()
        self._num_tests = self._num_drafts_tested = self._plain_tokens = self._probing = 0
        self.speculation = self._pinned(self.limits.default)

    def take_worth(self) -> float | None:
        """Return what the drafter is worth: rate of the best plan that drafts, in rates of plain decoding.

        None until enough was tested since it was taken last, and where the plan may not change: such a session drafts
        as far as it is told to.
        """
        costs = self.pace.costs(self.limits.max_gamma)
        if self._fixed() or costs is None or self._num_drafts_tested < MIN_TESTS:
            return None
        self._num_drafts_tested = 0
        plan = best_draft(self.pace.alpha.alpha, costs, self.limits.max_gamma, self.limits.pipelined)
        return self.pace.rate(plan, costs) / self.pace.rate(PLAIN, costs)

    def observe_status(self, status: DraftStatus) -> None:
        """Take a drafter's report."""
        if status.draft_s_per_token > 0.0:
            self.pace.draft_s = status.draft_s_per_token

    def observe(self, committed: Round, now_s: float) -> Tuned | None:
        """Take a committed verdict; return the new choice if it changed."""
        self._rounds += 1
        self.pace.observe(committed, self.speculation, self._measure_restart(committed, now_s), now_s)
        self._num_tests += committed.num_tested or committed.kinds.count(TokenKind.PLAIN)
        self._num_drafts_tested += committed.num_tested
        self._proven = self._proven or committed.num_tested > 0
        before = (self.speculation, self.patience_s)
        if committed.cause == VerdictCause.PATIENCE:
            self._ran_out()
        self._replan(committed)
        if (self.speculation, self.patience_s) == before:
            return None
        return Tuned(self.speculation, self.patience_s)

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
        waited_s = max(0.0, taken_s - self.speculation.restart_gamma * self.pace.draft_s - committed.verify_s)
        trip_s = max(0.0, waited_s - committed.queue_s)
        self._trips_s.append(trip_s)
        self.network_s += trip_s
        return waited_s

    # -- choices ---------------------------------------------------------------------------------------------------

    def _replan(self, committed: Round) -> None:
        if self._fixed():
            self._set_patience()
        elif self._probing:
            self._go_on_probing(committed)
        elif not self.speculation.enabled:
            self._wait_for_probe(committed)
        elif self._rounds % STRIDE == 0 and self._num_tests >= MIN_TESTS:
            self._set_patience()
            self._choose()

    def _fixed(self) -> bool:
        """Whether the plan may not change, by request or by configuration."""
        return not self.limits.adaptive or self.choice.off or self.choice.gamma is not None

    def _set_patience(self) -> None:
        """Follow the measured restarts; changes under a fifth are not worth a message."""
        if self._rounds % STRIDE or len(self._restarts_s) < MIN_RESTARTS:
            return
        wanted = PATIENCE_FACTOR * _quantile(self._restarts_s, 0.99)
        wanted = min(self.limits.max_patience_s, max(self.limits.min_patience_s, wanted))
        if abs(wanted - self.patience_s) > 0.2 * self.patience_s:
            self.patience_s = wanted

    def _choose(self) -> None:
        """Take the policy's plan where it is clearly better than the present one."""
        limits, pace = self.limits, self.pace
        costs = pace.costs(limits.max_gamma)
        if costs is None:
            return
        plan = self._pinned(best_plan(pace.alpha.alpha, costs, limits.max_gamma, limits.pipelined))
        if pace.rate(plan, costs) < pace.rate(PLAIN, costs):
            plan = PLAIN
        gain = GAIN if plan.enabled else OFF_GAIN
        if pace.rate(plan, costs) > gain * pace.rate(self.speculation, costs):
            self._plain_tokens = 0
            self._set(plan)

    def _set(self, plan: Speculation) -> None:
        if plan.enabled != self.speculation.enabled:
            self.pace.forget_drafting()
        self.speculation = plan

    def _wait_for_probe(self, committed: Round) -> None:
        self._plain_tokens += len(committed.kinds)
        if self._plain_tokens >= PROBE_EVERY:
            self._plain_tokens, self._probing, self._probed_rounds = 0, PROBE_ROUNDS, 0
            self._set(self._pinned(Speculation(2, 2, 2)))

    def _go_on_probing(self, committed: Round) -> None:
        """Decide after some rounds with tests; patience that ran out, or a drafter without guesses, ends a probe."""
        self._probing -= bool(committed.num_tested)
        self._probed_rounds += 1
        if committed.cause == VerdictCause.PATIENCE or self._probed_rounds > PROBE_LIMIT:
            self._probing = 0
            self._set(PLAIN)
        elif not self._probing:
            self._choose()
            costs = self.pace.costs(self.limits.max_gamma)
            if costs is not None and self.pace.rate(self.speculation, costs) <= GAIN * self.pace.rate(PLAIN, costs):
                self._set(PLAIN)

    def _pinned(self, plan: Speculation) -> Speculation:
        """Put the request's own figures into a plan."""
        choice = self.choice
        if choice.off:
            return PLAIN
        if choice.gamma is not None:
            window = 2 * choice.gamma if self.limits.pipelined else choice.gamma
            return Speculation(choice.gamma, choice.restart_gamma or choice.gamma, choice.window or window)
        if choice.restart_gamma is not None and plan.enabled:
            return Speculation(plan.gamma, min(plan.gamma, choice.restart_gamma), plan.window)
        return plan


def _quantile(values: Iterable[float], share: float) -> float:
    """Return the value that at least `share` of the values do not exceed; there is at least one."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
