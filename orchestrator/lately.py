"""What this process's generations did lately, for people to look at: how each gets on, and its last rounds. Pure.

Four of a round's times are told by whoever spends them: the pass and the wait for it by the verifier, drafting per
token by the draft worker, the append by the log. The way there and back shows only where a round begins a new chain:
at other times messages travel while the models work.

Nothing here knows a token or a word.
"""

from collections import deque
from dataclasses import dataclass, field

from orchestrator.acceptance import Acceptance
from orchestrator.figures import Meter, Round
from orchestrator.tuning import Tuning
from outrider.ids import SessionId

MAX_ROUNDS = 48
"""Rounds of a generation that are remembered."""
MAX_COURSES = 16
"""Generations that are remembered, whether they run or are over."""


@dataclass(slots=True)
class RoundTimes:
    """One round; times in seconds."""

    at_s: float
    """When its verdict came, on the monotonic clock."""
    end: int
    """Length of the session behind it, in tokens."""
    committed: Round
    took_s: float
    """Since the verdict before it, or since the request came."""
    draft_s: float
    """For the tokens that were tested, at the pace that the drafter reports."""
    network_s: float | None = None
    """Round trip; None: not measured in this round."""
    commit_s: float | None = None
    """None: not in the log yet."""


@dataclass(slots=True, eq=False)
class Course:
    """How one generation gets on."""

    session_id: SessionId
    owner: str
    """Id of the API key that owns the session."""
    started_s: float
    """When the request came, on the monotonic clock."""
    acceptance: Acceptance = field(default_factory=Acceptance)
    """Of all generations."""
    drafter: str = ""
    """Kind that was tested last; empty: none."""
    off_reason: str = ""
    """Why nothing is drafted now; empty: something is."""
    num_tokens: int = 0
    num_tested: int = 0
    num_accepted: int = 0
    rounds: deque[RoundTimes] = field(default_factory=lambda: deque(maxlen=MAX_ROUNDS))
    """The last ones, the oldest first."""
    _last_s: float = field(init=False)
    _network_s: float = 0.0

    def __post_init__(self) -> None:
        """Count the first round from the request on."""
        self._last_s = self.started_s

    @property
    def last_s(self) -> float:
        """When it got on last, on the monotonic clock."""
        return self._last_s

    def add(self, committed: Round, at_s: float, end: int, meter: Meter, tuning: Tuning) -> None:
        """Remember a committed verdict; one without tokens only counts.

        Args:
            committed: what of it was committed.
            at_s: when it came.
            end: length of the session behind it.
            meter: has counted it.
            tuning: measures the drafter's pace and the round trips; it need not have seen the verdict yet.
        """
        num_tested, num_accepted = committed.num_tested, committed.num_accepted
        self.num_tokens += len(committed.kinds)
        self.num_tested += num_tested
        self.num_accepted += num_accepted
        self.drafter = meter.drafter
        self.acceptance.add(meter.drafter, meter.distance, num_tested, num_accepted)
        if not committed.kinds:
            return
        network_s = tuning.network_s
        if self.rounds and network_s > self._network_s:
            self.rounds[-1].network_s = network_s - self._network_s
        drafted_s = tuning.pace.draft_s * num_tested
        self.rounds.append(RoundTimes(at_s, end, committed, at_s - self._last_s, drafted_s))
        self._last_s, self._network_s = at_s, network_s

    def logged(self, length: int, seconds: float) -> None:
        """Note that the log has reached a length, by an append that took so long."""
        for each in reversed(self.rounds):
            if each.commit_s is not None:
                return  # so are those before it
            if each.end <= length:
                each.commit_s = seconds


class Lately:
    """The generations that began last, and what was accepted in all."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self.acceptance = Acceptance()
        self._courses: deque[Course] = deque(maxlen=MAX_COURSES)

    @property
    def courses(self) -> list[Course]:
        """The generations that began last, the oldest first."""
        return list(self._courses)

    def begin(self, session_id: SessionId, owner: str, started_s: float) -> Course:
        """Follow a generation from its start."""
        course = Course(session_id, owner, started_s, self.acceptance)
        self._courses.append(course)
        return course
