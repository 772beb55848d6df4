"""Records what `orchestrator.rounds` is told and answers, in a ring of bounded length. Pure but for its clock.

The machine has no I/O, so its state, the events after it and what the committer made of each run are all that is needed
to have it do the same again (`orchestrator.flight.replay`). The ring has two segments, each of a state and the events
behind it; the older one goes when the newer one is full. Recording keeps references to values that exist anyway, and
copies the state once per segment: nothing that shows beside a round.
"""

import copy
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from orchestrator.events import Command, Committer, Event, Outcome
from orchestrator.rounds import Rounds
from outrider.ids import TokenKind
from outrider.messages import TokenLogprobs

NOT_STATE = "committer"
"""The one field of the machine that is not its own state."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One step of the machine."""

    at_s: float
    """Seconds, on the recorder's clock."""
    event: Event
    outcomes: tuple[Outcome, ...]
    """What the committer answered meanwhile, in order."""
    commands: tuple[Command, ...]
    error: str = ""
    """What the step raised, instead of commands."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A state, and what followed."""

    state: Mapping[str, Any]
    """The machine's fields, by name."""
    entries: list[Entry] = field(default_factory=list)


def state_of(rounds: Rounds) -> dict[str, Any]:
    """Return a copy of the machine's state; a shallow one is enough, for what lists hold does not change."""
    return {each.name: copy.copy(getattr(rounds, each.name)) for each in fields(rounds) if each.name != NOT_STATE}


class Recorder:
    """Stands between a driver and its machine, and between the machine and its committer."""

    def __init__(self, committer: Committer, num_events: int, clock: Callable[[], float]) -> None:
        """Record nothing yet.

        Args:
            committer: of the machine.
            num_events: that are kept, about; 0 keeps none.
            clock: rising seconds.
        """
        self._committer, self._clock = committer, clock
        self._per_segment = (num_events + 1) // 2
        self._segments: deque[Segment] = deque(maxlen=2)
        self._outcomes: list[Outcome] = []
        self.dropped = False
        """Whether the ring has lost the beginning."""

    @property
    def segments(self) -> list[Segment]:
        """What is recorded, copied, the oldest first."""
        return [Segment(segment.state, list(segment.entries)) for segment in self._segments]

    def forget(self) -> None:
        """Let go of what is recorded at once, whoever still holds the recorder."""
        self._segments.clear()

    def take(
        self, start: int, token_ids: Sequence[int], kinds: Sequence[TokenKind], logprobs: Sequence[TokenLogprobs]
    ) -> Outcome:
        """Have the committer take a run, and note what it made of it."""
        outcome = self._committer.take(start, token_ids, kinds, logprobs)
        if self._per_segment:
            self._outcomes.append(outcome)
        return outcome

    def step(self, rounds: Rounds, event: Event) -> list[Command]:
        """Have the machine take an event, and note both.

        Raises:
            ProtocolError: the machine did.
        """
        if not self._per_segment:
            return rounds.step(event)
        segment = self._segment(rounds)
        commands, error = list[Command](), ""
        self._outcomes = []
        try:
            commands = rounds.step(event)
        except Exception as raised:
            error = repr(raised)
            raise
        finally:
            entry = Entry(self._clock(), event, tuple(self._outcomes), tuple(commands), error)
            segment.entries.append(entry)
        return commands

    def _segment(self, rounds: Rounds) -> Segment:
        """Return the segment that the next entry belongs to."""
        if not self._segments or len(self._segments[-1].entries) >= self._per_segment:
            self.dropped = self.dropped or len(self._segments) == self._segments.maxlen
            self._segments.append(Segment(state_of(rounds)))
        return self._segments[-1]
