"""What decides, beside load and KV, which draft workers sessions are given: the operator's policy, and who loses.

One per process. Placement asks it, running generations tell it what they measure, `orchestrator.policy_watch` brings
the policy. It does no I/O, and what it decides rests on names, rates and times alone, never on tokens.
"""

import json
import logging
import time
from collections.abc import Callable, Sequence

from orchestrator.figures import Round
from orchestrator.metrics import Metrics
from orchestrator.standings import Standings
from orchestrator.tuning import Tuning
from outrider.drafter_policy import STANDING, DrafterPolicy, sort_of
from outrider.messages import WorkerDescription

log = logging.getLogger(__name__)


class Witness:
    """Tells for one generation what its drafters were worth."""

    def __init__(self, steering: "Steering", tuning: Tuning, worker: WorkerDescription | None) -> None:
        """Begin with a draft worker, or without."""
        self._steering, self._tuning = steering, tuning
        self._sort = sort_of(worker) if worker is not None else ""

    def chosen(self, worker: WorkerDescription) -> None:
        """A draft worker takes over: of another sort, it is measured anew."""
        if sort_of(worker) != self._sort:
            self._sort = sort_of(worker)
            self._tuning.replaced(self._sort)

    def observe(self, committed: Round) -> None:
        """Take a committed verdict."""
        if committed.num_tested:
            self._steering.tested(self._sort, committed.num_accepted, committed.num_tested)

    def closed(self) -> None:
        """The draft worker is given up, or the generation is over."""
        worth = self._tuning.take_worth()
        self._tuning.left()
        if worth is not None:
            self._steering.judge(self._sort, worth)


class Steering:
    """The policy in force, and the standings of sorts of drafters."""

    def __init__(
        self, metrics: Metrics, *, sets_aside: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Detach, split and set aside nothing yet.

        Args:
            metrics: show who is left out.
            sets_aside: whether a sort that loses is set aside.
            clock: rising seconds.
        """
        self._metrics, self._sets_aside, self._clock = metrics, sets_aside, clock
        self.policy = DrafterPolicy()
        self._standings = Standings(self._changed)

    # -- the operator ----------------------------------------------------------------------------------------------

    def follow(self, policy: DrafterPolicy) -> None:
        """Follow a policy from now on."""
        if policy == self.policy:
            return
        split = " ".join(f"{name}={weight}" for name, weight in policy.split)
        log.info("drafters: detached are [%s], the split is [%s]", ", ".join(policy.detached), split)
        for name in {*self.policy.detached, *policy.detached}:
            self._metrics.drafter_out.labels(name, "detached").set(name in policy.detached)
        self.policy = policy

    # -- for placement ---------------------------------------------------------------------------------------------

    def trusted(self, workers: Sequence[WorkerDescription], *, new: bool) -> list[WorkerDescription]:
        """Return the workers whose sort is not set aside; for a new session, also those that are due for a probe."""
        now_s = self._clock()
        standings = ((worker, self._standings.of(sort_of(worker))) for worker in workers)
        return [worker for worker, each in standings if not each.set_aside or (new and each.admits(now_s))]

    def given(self, worker: WorkerDescription) -> None:
        """A new session was given to a worker."""
        self._standings.of(sort_of(worker)).given(self._clock())
        self._metrics.drafter_sessions.labels(sort_of(worker)).inc()

    # -- for generations -------------------------------------------------------------------------------------------

    def tested(self, sort: str, num_accepted: int, num_tested: int) -> None:
        """Count what a round tested of a sort's drafts."""
        standing = self._standings.of(sort)
        standing.num_tested += num_tested
        standing.num_accepted += num_accepted
        self._metrics.drafter_tested.labels(sort).inc(num_tested)
        self._metrics.drafter_accepted.labels(sort).inc(num_accepted)

    def judge(self, sort: str, gain: float) -> None:
        """Take what a drafter was worth to a session, in rates of plain decoding."""
        if self._sets_aside:
            self._standings.judge(sort, gain, self._clock())

    def _changed(self, sort: str, set_aside: bool) -> None:
        self._metrics.drafter_out.labels(sort, "below_plain").set(set_aside)
        if set_aside:
            log.warning("drafter %s is set aside: decoding plain was faster in several sessions", sort)
        else:
            log.info("drafter %s is in use again", sort)

    # -- for operators ---------------------------------------------------------------------------------------------

    def attributes(self) -> dict[str, str]:
        """Return the standings as attributes of a worker's description, for `outrider drafters list`."""
        return {
            STANDING + sort: json.dumps(
                {
                    "tested": each.num_tested,
                    "accepted": each.num_accepted,
                    "gain": each.gain,
                    "set_aside": each.set_aside,
                }
            )
            for sort, each in self._standings.all().items()
        }
