"""Guesses with a small network that continues the target's own hidden states, one token per session and step.

The verifier sends the feature of every position that it commits (`features.py`). A row whose feature has come takes
that one; a row of the chain takes the network's own guess, and one of a text that no feature was sent for a learned
stand-in. When a better feature comes for a row that is there already, the row and those behind it are computed again,
with the next token's. Nothing waits for a feature: a guess from a stand-in costs less than a pass without a guess.

What lies further back than a pass helps hardly: the target's features know of it. So nothing is computed before a guess
is wanted, and a session that has fallen behind its text by more than a pass, or just began, reads its last tokens and
goes on from there. Whatever was done before, the first guess takes one pass.

KV is a pool of blocks, as for a language model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draft_service.drafters.feature_net import MAX_ROWS, FeatureNet, NetRow
from draft_service.drafters.features import MAX_KEPT, Features
from draft_service.drafters.protocol import DrafterInfo, DraftSession, Failed, Guessed, Outcome, Plan, Work
from draft_service.drafters.sampling import Penalised, Ranked, guess_ranked
from draft_service.window import FOREVER
from outrider.ids import SessionId, TokenClass
from outrider.messages import TargetFeatures
from outrider.model.kv import BlockSlot, num_blocks_for

SHORT_ROWS = 8
"""Rows that a session in mid-proposal computes at most, if features came as they should."""


@dataclass(slots=True)
class _State:
    """One open session."""

    session: DraftSession
    slot: BlockSlot
    """Its rows, each under the id of the token behind it."""
    features: Features
    penalised: Penalised
    base: int = 0
    """Position that the first row takes the feature of; what counts rows begins there."""
    own: dict[int, Tensor] = field(default_factory=dict)
    """Guesses of features, by position."""
    redo_from: int | None = None
    """The first row that a better feature has come for."""
    reserved_len: int = 0
    """Rows that KV blocks are promised for."""

    @property
    def promised_blocks(self) -> int:
        """Blocks promised, and not taken yet."""
        return max(0, num_blocks_for(self.reserved_len) - len(self.slot.blocks))

    def missing(self, length: int) -> int:
        """Forget rows that must be computed again, and those that a text of `length` >= 2 tokens has left behind.

        Returns:
            Rows to be computed for the law of the token after the text, 1 .. MAX_ROWS: the last one in any case.
        """
        sound = min(self.slot.length, length - self.base - 2)
        if self.redo_from is not None:
            sound = min(sound, self.redo_from)
        self.redo_from = None
        if sound < 0 or length - self.base - 1 - sound > MAX_ROWS:
            self.base, sound = max(0, length - 1 - MAX_ROWS), 0
        self.shorten(sound)
        return length - self.base - 1 - sound

    def shorten(self, length: int) -> None:
        """Forget rows at and past `length`."""
        if length < self.slot.length:
            self.slot.truncate(length)


@dataclass(frozen=True, slots=True)
class _Feed:
    """Rows of one session that are computed together."""

    state: _State
    start: int
    token_ids: list[int]


class FeatureDrafter:
    """The feature-level drafter; see the module's head."""

    def __init__(self, net: FeatureNet, ranked: Ranked, info: DrafterInfo) -> None:
        """Take over a network.

        Args:
            net: the network.
            ranked: the ids that its head knows.
            info: describes the drafter; asks for the last layer.
        """
        self.info = info
        self._net, self._ranked = net, ranked
        self._states: dict[SessionId, _State] = {}

    # -- the protocol ------------------------------------------------------------------------------------------------

    def open(self, session: DraftSession, ids: Sequence[int]) -> None:
        """Begin a session; nothing is computed yet."""
        del ids
        features = Features(self._net.hidden_size, self._net.dtype, self.info.context_len)
        penalised = Penalised(session.prompt_len, session.grammar)
        self._states[session.session_id] = _State(session, self._net.pool.new_slot(by_class=False), features, penalised)

    def plan(self, session_id: SessionId, ids: Sequence[int], count: int) -> Plan | None:
        """Offer what fits into the context, if there is KV for it; a text needs two tokens to have a row."""
        state = self._states[session_id]
        if len(ids) < 2:
            return Plan(0, 2, "too_short")
        if self._ranked.is_mute(state.session.sampling):
            return Plan(0, FOREVER, "all_banned")
        num = min(count, self.info.context_len - len(ids))
        if num <= 0:
            return Plan(0, FOREVER, "context_full")
        state.missing(len(ids))
        if not self._reserve(state, len(ids) - 2 - state.base + num):
            return Plan(0, len(ids) + 1, "kv_full")
        return Plan(num)

    def draw(self, batch: Sequence[Work]) -> list[Outcome]:
        """Draw one token for each session; at most one that has much to read is among those of a step."""
        feeds: dict[int, _Feed] = {}
        is_read = False
        for index, work in enumerate(batch):
            if work.count:
                feed = _feed(self._states[work.session_id], work.ids)
                is_long = len(feed.token_ids) > SHORT_ROWS
                if not (is_long and is_read):
                    feeds[index] = feed
                is_read = is_read or is_long
        logits = self._run(feeds)
        return [self._outcome(work, logits.get(index)) for index, work in enumerate(batch)]

    def rewind(self, session_id: SessionId, length: int) -> None:
        """Forget rows that saw tokens at and past `length`; features are those of committed tokens, and stay."""
        state = self._states[session_id]
        state.shorten(max(0, length - 1 - state.base))
        state.penalised.rewind(length)
        state.own = {position: row for position, row in state.own.items() if position < length}

    def close(self, session_id: SessionId, keep: bool) -> None:
        """Give the session's KV back: none is worth to be kept where any text begins with one pass."""
        del keep
        state = self._states.pop(session_id, None)
        if state is not None:
            state.slot.release(forget=True)

    def take_features(self, features: TargetFeatures) -> None:
        """Keep features for the rows that will want them.

        Raises:
            ValueError: they are those of another target.
        """
        state = self._states.get(features.session_id)
        if state is None:
            return
        fresh = (position - state.base for position in state.features.take(features))
        better = next((row for row in fresh if row >= 0), state.slot.length)
        if better < state.slot.length:
            state.redo_from = better if state.redo_from is None else min(better, state.redo_from)

    # -- drawing -----------------------------------------------------------------------------------------------------

    def _run(self, feeds: dict[int, _Feed]) -> dict[int, Tensor]:
        """Compute feeds in as few passes as hold them; return the laws that are wanted, [1, draft_vocab_size] each."""
        logits: dict[int, Tensor] = {}
        group: dict[int, _Feed] = {}
        for index, feed in feeds.items():
            if sum(len(each.token_ids) for each in group.values()) + len(feed.token_ids) > MAX_ROWS:
                logits |= self._pass(group)
                group = {}
            group[index] = feed
        return logits | self._pass(group) if group else logits

    def _pass(self, feeds: dict[int, _Feed]) -> dict[int, Tensor]:
        ends = [(feed.state.slot, feed.start + len(feed.token_ids)) for feed in feeds.values()]
        self._net.pool.reserve(ends)
        rows = [row for feed in feeds.values() for row in self._rows(feed)]
        output = self._net.run(rows)
        first, laws = 0, iter(torch.split(output.logits, 1))
        for feed in feeds.values():
            last = first + len(feed.token_ids)
            self._note(feed, output.guesses[first:last])
            first = last
        return {index: next(laws) for index in feeds}

    def _rows(self, feed: _Feed) -> list[NetRow]:
        state, last = feed.state, len(feed.token_ids) - 1
        return [
            NetRow(state.slot, feed.start + at, token, self._feature(state, feed.start + at), wanted=at == last)
            for at, token in enumerate(feed.token_ids)
        ]

    def _feature(self, state: _State, row: int) -> Tensor:
        """Return the best that is known of the feature that a row takes."""
        position = state.base + row
        known = state.features.get(position)
        if known is None:
            known = state.own.get(position)
        return self._net.stand_in if known is None else known

    def _note(self, feed: _Feed, guesses: Tensor) -> None:
        """Take a pass's rows over."""
        state = feed.state
        state.slot.advance(feed.token_ids, TokenClass.PROMPT)
        first = state.base + feed.start
        state.own |= dict(enumerate(guesses, first + 1))
        if len(state.own) > MAX_KEPT:
            state.own = {position: row for position, row in state.own.items() if position >= first - MAX_KEPT // 2}

    def _outcome(self, work: Work, logits: Tensor | None) -> Outcome:
        state = self._states[work.session_id]
        if logits is None:
            return Guessed(caught_up=not work.count)
        try:
            history = state.penalised.at(work.ids) if state.session.sampling.uses_history else None
            return guess_ranked(logits, self._ranked, state.session, len(work.ids), work.epoch, history)
        except Exception as error:  # one session's row or parameters must not take the others along
            return Failed(error)

    # -- room --------------------------------------------------------------------------------------------------------

    def _reserve(self, state: _State, length: int) -> bool:
        """Promise KV for `length` rows to a session; False if it is not there."""
        promised = sum(other.promised_blocks for other in self._states.values() if other is not state)
        needed = max(0, num_blocks_for(length) - len(state.slot.blocks))
        if self._net.pool.num_free < promised + needed:
            state.reserved_len = 0
            return False
        state.reserved_len = length
        return True


def _feed(state: _State, ids: Sequence[int]) -> _Feed:
    """Return the rows that the law of the next token takes."""
    token_ids = list(ids[-state.missing(len(ids)) :])
    return _Feed(state, state.slot.length, token_ids)
