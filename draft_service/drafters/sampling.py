"""From a draft model's logits to the token that is sent and, where the mode needs it, the very row it is drawn from."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from draft_service.drafters.protocol import DraftSession, Guessed
from outrider.ids import Epoch, Mode
from outrider.noise import word64
from outrider.sampling import (
    History,
    coupled_token,
    draw_from_counts,
    greedy_token,
    probabilities,
    processed_logits,
    sparse_row,
)


@dataclass(slots=True)
class Penalised:
    """What a session has said, as far as penalties need to know; drafts count like committed tokens."""

    prompt_len: int
    _history: History | None = None
    _length: int = 0

    def at(self, ids: Sequence[int]) -> History:
        """Return the history of a text; cheap when it is longer than the last one and `rewind` was told of changes."""
        if self._history is None or self._length > len(ids):
            self._history, self._length = History(ids[: self.prompt_len]), min(self.prompt_len, len(ids))
        self._history.advance(ids[self._length :])
        self._length = len(ids)
        return self._history

    def rewind(self, length: int) -> None:
        """The text at and past `length` is not what it was."""
        if length < self._length:
            self._history = None


def guess(logits: Tensor, session: DraftSession, position: int, epoch: Epoch, history: History | None) -> Guessed:
    """Choose the token at a position with the target's own parameters.

    Args:
        logits: [1, vocab_len] of the draft model, padding cut off.
        session: mode, parameters and key.
        position: absolute position of the token.
        epoch: the chain it belongs to; a word of the draft stream is used once per (position, epoch).
        history: of all ids before it; needed where the parameters use one.

    Returns:
        One token, with its row in modes that need rows.
    """
    vocab_len = logits.shape[1]
    if session.mode is Mode.GREEDY:
        return Guessed((greedy_token(processed_logits(logits, session.sampling, vocab_len, history)[0]),))
    probs = probabilities(logits, session.sampling, vocab_len, history)[0]
    if session.mode is Mode.COUPLED:
        return Guessed((coupled_token(probs, session.draft_key, session.sample_index, position),))
    row = sparse_row(probs)
    return Guessed((draw_from_counts(row, word64(session.draft_key, position, epoch)),), (row,))
