"""Guesses what the client expects: the next tokens of its prediction, as long as the answer follows it.

No model. `outrider.alignment` knows at which place of the prediction the answer stands, also after deviations; while it
stands nowhere, nothing is offered, for as many tokens as have deviated in a row, at most `MAX_SKIP` (as in prompt
lookup, and for the same reason). All of it follows from the answer's ids alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from draft_service.drafters.legal import Legal
from draft_service.drafters.prompt_lookup import MAX_INDEXED, MAX_SKIP
from draft_service.drafters.protocol import DrafterInfo, DraftSession, Guessed, Outcome, Plan, Work
from draft_service.window import FOREVER
from outrider.alignment import Alignment
from outrider.ids import SessionId
from outrider.sampling import one_hot_row


@dataclass(slots=True)
class _State:
    """One session."""

    session: DraftSession
    aligned: Alignment
    legal: Legal
    place: int | None = None
    """Of the first token of the proposal being drawn."""

    @property
    def length(self) -> int:
        """Tokens of the session that were looked at."""
        return self.session.prompt_len + len(self.aligned)


class PredictionDrafter:
    """The drafter that follows a prediction; see the module's head."""

    def __init__(self, vocab_len: int, *, context_len: int) -> None:
        """Make a drafter.

        Args:
            vocab_len: Length of the tokenizer's id range.
            context_len: Most tokens of a session.
        """
        self.info = DrafterInfo("prediction", "", vocab_len, context_len)
        self._states: dict[SessionId, _State] = {}

    def open(self, session: DraftSession, ids: Sequence[int]) -> None:
        """Begin with an answer of no tokens."""
        self._states[session.session_id] = _State(session, Alignment(session.prediction), Legal(session))

    def plan(self, session_id: SessionId, ids: Sequence[int], count: int) -> Plan | None:
        """Offer what is left of the prediction, if the answer stands somewhere in it."""
        state = self._states[session_id]
        if not state.session.prediction:
            return Plan(0, FOREVER, "no_prediction")
        if not self._follow(state, ids):
            return None
        state.place = state.aligned.place
        if state.place is None:
            return Plan(0, len(ids) + min(MAX_SKIP, max(1, state.aligned.num_apart)), "not_aligned")
        allowed = state.legal.num_allowed(ids, state.session.prediction[state.place : state.place + count])
        return Plan(allowed) if allowed else Plan(0, len(ids) + 1, "banned")

    def draw(self, batch: Sequence[Work]) -> list[Outcome]:
        """Copy whole proposals at once; follow a part of a long answer."""
        return [self._step(self._states[work.session_id], work) for work in batch]

    def rewind(self, session_id: SessionId, length: int) -> None:
        """Forget where the answer stood at and past `length`."""
        state = self._states[session_id]
        state.aligned.truncate(max(0, length - state.session.prompt_len))
        state.legal.rewind(length)

    def close(self, session_id: SessionId, keep: bool) -> None:
        """Forget the session."""
        self._states.pop(session_id, None)

    def _follow(self, state: _State, ids: Sequence[int]) -> bool:
        """Follow the rest of an answer if it is short enough to be done at once; say whether it was."""
        if len(ids) - state.length > MAX_INDEXED:
            return False
        state.aligned.extend(ids[state.length :])
        return True

    def _step(self, state: _State, work: Work) -> Outcome:
        if work.count and state.place is not None:
            tokens = state.session.prediction[state.place : state.place + work.count]
            rows = tuple(map(one_hot_row, tokens)) if state.session.mode.needs_rows else ()
            return Guessed(tokens, rows)
        if state.session.prediction and not self._follow(state, work.ids):
            state.aligned.extend(work.ids[state.length : state.length + MAX_INDEXED])
            return Guessed(caught_up=False)
        return Guessed()
