"""A draft that only takes time: it guesses the text at a chosen rate, behind the protocol of all drafters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draft_service.drafters.protocol import DrafterInfo, DraftSession, Guessed, Outcome, Plan, Work
from outrider.ids import SessionId
from outrider.model.runner import BLOCK_LEN
from simulator.costs import Costs
from simulator.text import NEXT, VOCAB, Luck

KIND = "simulated"


def number_of(session_id: SessionId) -> int:
    """Return a simulated session's number."""
    return int(session_id[1:])


@dataclass(slots=True)
class _Reading:
    """How far a session's tokens have been read."""

    number: int
    length: int = 0


class TimedDrafter:
    """Draws a token a step for each session of a batch; reads one block of somebody's prompt beside it."""

    def __init__(self, costs: Costs, luck: Luck, context_len: int, spend: Callable[[float], None]) -> None:
        """Make a drafter; `spend` lets so many seconds pass for its worker."""
        self._costs, self._luck, self._spend = costs, luck, spend
        self._readings: dict[SessionId, _Reading] = {}
        self.info = DrafterInfo(KIND, "simulated", VOCAB, context_len)
        """What is fixed about it."""

    def open(self, session: DraftSession, ids: Sequence[int]) -> None:
        """Begin a session; nothing of it is known."""
        self._readings[session.session_id] = _Reading(number_of(session.session_id))

    def plan(self, session_id: SessionId, ids: Sequence[int], count: int) -> Plan | None:
        """Offer all that is asked for, once the prompt is read."""
        return None if self._lag(self._readings[session_id], ids) else Plan(count)

    def draw(self, batch: Sequence[Work]) -> list[Outcome]:
        """Draw a token for each session that is drawing, and read one block of a prompt."""
        behind = next((work for work in batch if self._lag(self._readings[work.session_id], work.ids)), None)
        if behind is not None:
            reading = self._readings[behind.session_id]
            reading.length = min(len(behind.ids), (reading.length // BLOCK_LEN + 1) * BLOCK_LEN)
        drawing = sum(work.count > 0 for work in batch)
        self._spend(self._costs.draft.seconds(drawing) + (self._costs.draft_prompt_s if behind is not None else 0.0))
        return [self._outcome(work) for work in batch]

    def rewind(self, session_id: SessionId, length: int) -> None:
        """Forget what was read from `length` on."""
        reading = self._readings[session_id]
        reading.length = min(reading.length, length)

    def close(self, session_id: SessionId, keep: bool) -> None:
        """End a session; idempotent."""
        self._readings.pop(session_id, None)

    def _lag(self, reading: _Reading, ids: Sequence[int]) -> bool:
        """Whether more has to be read than goes along with the next token."""
        return len(ids) - reading.length > BLOCK_LEN

    def _outcome(self, work: Work) -> Guessed:
        reading = self._readings[work.session_id]
        behind = self._lag(reading, work.ids)
        if behind or not work.count:
            return Guessed(caught_up=not behind)
        own, reading.length = NEXT[work.ids[-1]], len(work.ids) + 1
        agrees = self._luck.agrees(reading.number, len(work.ids))
        return Guessed((own if agrees else (own + 1) % VOCAB,))
