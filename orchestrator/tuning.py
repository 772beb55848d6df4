"""From what one session measures to how far it drafts and how long its verifier waits. Pure: times come in.

The policy itself is `outrider.gamma`; here are its inputs and its steadiness:

* alpha from the verdicts' tests; draft seconds per token from the drafter's reports; pass time from the verdicts; the
  round trip from restarts: the time from a commit that starts a new epoch until the first verdict that tested in it,
  less drafting, queueing and the pass;
* a plan changes only where the model promises `GAIN` more tokens a second than the present one, and at most every
  `STRIDE` rounds;
* patience is a multiple of the slowest restarts seen lately (p99 of a window). It is generous until there are some:
  a drafter may be prefilling a long prompt. One that ran out counts as a restart of twice its length, so that a
  patience too short for its drafter grows; but a drafter of which nothing has come yet is given less each time, once
  it has had the time that reading the session takes on a slow machine;
* where the policy says not to draft at all, a short probe every `PROBE_EVERY` tokens keeps its inputs alive.

It sees rates and times only, never tokens.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from orchestrator.events import Tuned
from orchestrator.figures import Round
from outrider.gamma import PLAIN, AlphaEstimator, Costs, choose, pipelined_rate, plain_rate, sequential_rate
from outrider.generation import SpeculationChoice
from outrider.ids import Epoch
from outrider.messages import DraftStatus, Speculation, VerdictCause

WINDOW = 64
"""Measurements that count."""
STRIDE = 8
"""Rounds between two looks at the plan."""
GAIN = 1.05
"""A new plan must promise so many times the present one's tokens per second."""
MIN_TESTS = 16
"""Tests before the first default is given up."""
PROBE_EVERY = 128
"""Tokens decoded plain between two probes."""
PROBE_ROUNDS = 4
"""Rounds with tests that a probe lasts."""
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

    default: Speculation = Speculation(4, 4, 8)
    """Before anything is measured."""
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
    speculation: Speculation = field(init=False)
    patience_s: float = field(init=False)
    alpha: AlphaEstimator = field(init=False, default_factory=AlphaEstimator)
    draft_s: float = field(init=False, default=0.0)
    _verify_s: deque[float] = field(init=False, default_factory=lambda: deque(maxlen=WINDOW))
    _restarts_s: deque[float] = field(init=False, default_factory=lambda: deque(maxlen=WINDOW))
    _trips_s: deque[float] = field(init=False, default_factory=lambda: deque(maxlen=WINDOW))
    network_s: float = field(init=False, default=0.0)
    """Sum of the measured round trips."""
    _restarting: tuple[Epoch, float] | None = field(init=False, default=None)
    _rounds: int = field(init=False, default=0)
    _plain_tokens: int = field(init=False, default=0)
    _probing: int = field(init=False, default=0)
    _proven: bool = field(init=False, default=False)
    """Whether something was tested since a worker was opened."""
    _reading_s: float = field(init=False, default=0.0)
    """What is left of the time that an attached drafter may read without being given less."""
    _num_tests: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        """Start from the default, with the request's own figures in it."""
        self.speculation = self._pinned(self.limits.default)
        self.patience_s = self.limits.max_patience_s

    @property
    def round_trip_s(self) -> float | None:
        """Median of the measured round trips; None before the first."""
        return _quantile(self._trips_s, 0.5) if self._trips_s else None

    @property
    def verify_s(self) -> float | None:
        """Median of the pass times; None before the first."""
        return _quantile(self._verify_s, 0.5) if self._verify_s else None

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

    def observe_status(self, status: DraftStatus) -> None:
        """Take a drafter's report."""
        if status.draft_s_per_token > 0.0:
            self.draft_s = status.draft_s_per_token

    def observe(self, committed: Round, now_s: float) -> Tuned | None:
        """Take a committed verdict; return the new choice if it changed."""
        self._rounds += 1
        if committed.verify_s > 0.0:
            self._verify_s.append(committed.verify_s)
        if committed.num_tested:
            self.alpha = self.alpha.observe(committed.num_accepted, committed.num_tested)
            self._num_tests += committed.num_tested
            self._measure_restart(committed, now_s)
            self._proven = True
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

    def _measure_restart(self, committed: Round, now_s: float) -> None:
        """The first verdict that tested in an epoch ends the restart that began it."""
        if self._restarting is None or self._restarting[0] != committed.epoch:
            return
        taken_s = now_s - self._restarting[1]
        self._restarting = None
        self._restarts_s.append(taken_s)
        drafting_s = self.speculation.restart_gamma * self.draft_s
        trip_s = max(0.0, taken_s - drafting_s - committed.verify_s - committed.queue_s)
        self._trips_s.append(trip_s)
        self.network_s += trip_s

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
        verify_s, round_trip_s = self.verify_s, self.round_trip_s
        if verify_s is None or round_trip_s is None:
            return
        alpha, limits = self.alpha.alpha, self.limits
        plan = self._pinned(choose(alpha, self.draft_s, verify_s, round_trip_s, limits.max_gamma, limits.pipelined))
        costs = Costs(self.draft_s, verify_s, round_trip_s)
        if _rate(plan, alpha, costs) > GAIN * _rate(self.speculation, alpha, costs):
            self.speculation = plan
            self._plain_tokens = 0

    def _wait_for_probe(self, committed: Round) -> None:
        self._plain_tokens += len(committed.kinds)
        if self._plain_tokens >= PROBE_EVERY:
            self._plain_tokens, self._probing = 0, PROBE_ROUNDS
            self.speculation = self._pinned(Speculation(2, 2, 2))

    def _go_on_probing(self, committed: Round) -> None:
        """Decide after some rounds with tests; patience that ran out ends a probe at once."""
        self._probing -= bool(committed.num_tested)
        if committed.cause == VerdictCause.PATIENCE:
            self._probing = 0
            self.speculation = PLAIN
        elif not self._probing:
            self._choose()
            verify_s, round_trip_s = self.verify_s, self.round_trip_s
            if verify_s is not None and round_trip_s is not None:
                costs = Costs(self.draft_s, verify_s, round_trip_s)
                if _rate(self.speculation, self.alpha.alpha, costs) <= GAIN * plain_rate(costs):
                    self.speculation = PLAIN

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


def _rate(plan: Speculation, alpha: float, costs: Costs) -> float:
    """Return the latency model's tokens per second under a plan."""
    if not plan.enabled:
        return plain_rate(costs)
    if plan.window > plan.gamma:
        return pipelined_rate(alpha, plan.restart_gamma, plan.gamma, costs)
    return sequential_rate(alpha, plan.gamma, costs)


def _quantile(values: Iterable[float], share: float) -> float:
    """Return the value that at least `share` of the values do not exceed; there is at least one."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
