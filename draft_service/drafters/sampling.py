"""From a draft model's logits to the token that is sent and, where the mode needs it, the very row it is drawn from.

A head that knows only some ids (`Ranked`) gives the rest no mass: rows and draws are those of a law over the target's
ids all the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draft_service.drafters.protocol import DraftSession, Guessed
from outrider.history import GrammarState, History
from outrider.ids import Epoch, Mode
from outrider.messages import SamplingParams, SparseRow
from outrider.noise import gumbel_field_at, word64
from outrider.parameters import BAN_BIAS
from outrider.sampling import (
    coupled_token,
    draw_from_counts,
    greedy_token,
    likeliest,
    probabilities,
    processed_logits,
    sparse_row,
)
from outrider.verification.siblings import DraftWords, draw_sibling


@dataclass(slots=True)
class Penalised:
    """What a session has said, as far as its parameters need to know; drafts count like committed tokens."""

    prompt_len: int
    grammar: GrammarState | None = None
    """Where the request's grammar begins; never moved on."""
    _history: History | None = None
    _length: int = 0
    _kept: History | None = None
    """Of the text that rewinds have left alone, so that none of them makes all of it be read again."""
    _kept_len: int = 0
    _sound_len: int = 0

    def at(self, ids: Sequence[int]) -> History:
        """Return the history of a text; cheap when it is longer than the last one and `rewind` was told of changes."""
        history = self._history
        if history is None or self._length > len(ids):
            history = self._restarted(ids)
        history.advance(ids[self._length :])
        self._history, self._length = history, len(ids)
        return history

    def rewind(self, length: int) -> None:
        """The text at and past `length` is not what it was."""
        if length < self._length:
            self._sound_len = length if self._history is not None else min(length, self._sound_len)
            self._history = None
        if length < self._kept_len:
            self._kept, self._kept_len, self._sound_len = None, 0, length

    def _restarted(self, ids: Sequence[int]) -> History:
        """Return the history of the sound part of a text, of which `at` adds the rest."""
        kept = self._kept
        if kept is None or self._kept_len > len(ids):
            kept = History(ids[: self.prompt_len], grammar=None if self.grammar is None else self.grammar.copy())
            self._kept_len = min(self.prompt_len, len(ids))
        sound_len = min(self._sound_len, len(ids))
        if sound_len > self._kept_len:
            kept.advance(ids[self._kept_len : sound_len])
            self._kept_len = sound_len
        self._kept, self._length = kept, self._kept_len
        return kept.after(())


@dataclass(frozen=True, slots=True)
class Family:
    """Children of one node that are to be chosen."""

    nodes: tuple[int, ...]
    """Their indexes in the tree, in the order in which they are tested."""
    path: tuple[int, ...]
    """Tokens from below the text down to their parent."""


def guess_family(
    logits: Tensor, session: DraftSession, base_len: int, epoch: Epoch, family: Family, history: History | None
) -> tuple[tuple[int, ...], SparseRow | None]:
    """Choose the children of a node with the target's own parameters.

    Args:
        logits: [1, vocab_len] of the draft model behind the parent, padding cut off.
        session: mode, parameters and key; not of the block rule.
        base_len: absolute position of the tree's first tokens.
        epoch: the tree's.
        family: which children.
        history: of all ids before the tree; needed where the parameters use one.

    Returns:
        Their tokens, all different, and in modes that need rows the row that they were drawn from.
    """
    count, vocab_len, position = len(family.nodes), logits.shape[1], base_len + len(family.path)
    own = history.after(family.path) if history is not None else None
    if session.mode is Mode.GREEDY:
        row = processed_logits(logits, session.sampling, vocab_len, own)[0]
        return tuple(likeliest(row, count).tolist()), None
    probs = probabilities(logits, session.sampling, vocab_len, own)[0]
    if session.mode is Mode.COUPLED:
        return tuple(likeliest(_noisy(probs, session, position), count).tolist()), None
    return _drawn(probs, session, position, epoch, family)


def _noisy(probs: Tensor, session: DraftSession, position: int) -> Tensor:
    """Return what coupled mode compares: ln p + G, minus infinity where p is 0."""
    support = np.flatnonzero(probs.numpy())
    scores = torch.full(probs.shape, -torch.inf, dtype=torch.float64)
    noise = gumbel_field_at(session.draft_key, session.sample_index, position, support)
    scores[support] = probs[support].double().log() + torch.from_numpy(noise)
    return scores


def _drawn(
    probs: Tensor, session: DraftSession, position: int, epoch: Epoch, family: Family
) -> tuple[tuple[int, ...], SparseRow]:
    """Draw siblings without replacement; what the row has no token left for is named by its rank."""
    row, tokens = sparse_row(probs), list[int]()
    for node in family.nodes:
        token = draw_sibling(row, tokens, DraftWords(session.draft_key, position, epoch, node))
        if token is None:
            ranked = likeliest(probs, min(len(probs), len(tokens) + 1)).tolist()
            token = next(own for own in ranked if own not in tokens)
        tokens.append(token)
    return tuple(tokens), row


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


class Ranked:
    """The ids that a head knows, rising, so that the first of equal logits is that of the lowest id."""

    def __init__(self, token_ids: Sequence[int], vocab_len: int) -> None:
        """Take the ids of a head's rows, which rise and lie below `vocab_len`."""
        self.token_ids: npt.NDArray[np.int64] = np.asarray(token_ids, dtype=np.int64)
        self.vocab_len = vocab_len
        self._index = torch.from_numpy(self.token_ids)
        self._ids = frozenset(token_ids)

    def is_mute(self, sampling: SamplingParams) -> bool:
        """Whether a request bans every id there is; a request that does so for its first tokens counts as such."""
        banned = {token for token, bias in sampling.logit_bias if bias <= BAN_BIAS}
        if sampling.min_tokens:
            banned.update(sampling.end_token_ids)
        if sampling.allowed_token_ids:
            return not (self._ids & set(sampling.allowed_token_ids)) - banned
        return len(banned) >= len(self.token_ids) and banned.issuperset(self._ids)

    def widened(self, logits: Tensor) -> Tensor:
        """Return [1, vocab_len] logits that give all other ids no mass."""
        wide = logits.new_full((1, self.vocab_len), -torch.inf)
        wide[:, self._index] = logits
        return wide


def guess_ranked(
    logits: Tensor, ranked: Ranked, session: DraftSession, position: int, epoch: Epoch, history: History | None
) -> Guessed:
    """Choose the token at a position from logits of some ids; as `guess` does from those of all.

    Args:
        logits: [1, ids of the head].
        ranked: those ids.
        session: mode, parameters and key.
        position: absolute position of the token.
        epoch: the chain it belongs to.
        history: of all ids before it; needed where the parameters use one.
    """
    if not session.sampling.keeps_likeliest:
        return guess(ranked.widened(logits), session, position, epoch, history)
    ids = ranked.token_ids
    if session.mode is Mode.GREEDY:
        return Guessed((int(ids[greedy_token(logits[0])]),))
    probs = probabilities(logits, session.sampling, len(ids))[0]
    if session.mode is Mode.COUPLED:
        return Guessed((coupled_token(probs, session.draft_key, session.sample_index, position, ids),))
    narrow = sparse_row(probs)
    row = SparseRow(tuple(ids[list(narrow.token_ids)].tolist()), narrow.counts)
    return Guessed((draw_from_counts(row, word64(session.draft_key, position, epoch)),), (row,))
