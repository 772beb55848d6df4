"""Guesses with a small network that continues the target's own hidden states, one token per session and step.

The verifier sends the feature of every position that it commits (`features.py`). A row whose feature has come takes
that one; a row of the chain takes the network's own guess, and one of a text that no feature was sent for a learned
stand-in. When a better feature comes for a row that is there already, the row and those behind it are computed again,
with the next token's. Nothing waits for a feature: a guess from a stand-in costs less than a pass without a guess.

A session that lags behind its text catches up in passes of a bounded number of rows, a bounded number of them per
step.

KV is a pool of blocks, as for a language model. Blocks computed from true features alone are known by their ids, stay
when a session ends as long as there is room, and are taken over by whoever begins with the same ids: the verifier
sends no features of what it knows itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draft_service.drafters.feature_net import MAX_ROWS, FeatureNet, NetRow
from draft_service.drafters.features import KEPT_BEHIND, Features
from draft_service.drafters.protocol import DrafterInfo, DraftSession, Failed, Guessed, Outcome, Plan, Work
from draft_service.drafters.sampling import Penalised, Ranked, guess_ranked
from draft_service.window import FOREVER
from outrider.ids import SessionId, TokenClass
from outrider.messages import TargetFeatures
from outrider.model.kv import BlockSlot, num_blocks_for


@dataclass(slots=True)
class _State:
    """One open session."""

    session: DraftSession
    slot: BlockSlot
    """Holds row t as position t, under the id of token t + 1; all of it depends on the first token, too."""
    features: Features
    penalised: Penalised
    own: dict[int, Tensor] = field(default_factory=dict)
    """Guesses of features, by position."""
    sound_len: int = 0
    """Rows from the first on whose features were all true."""
    redo_from: int | None = None
    """The first row that a better feature has come for."""
    wanting: bool = False
    """Whether a plan waits for the whole text; if not, catching up ends with the features that have come."""
    reserved_len: int = 0
    """Rows that KV blocks are promised for."""

    @property
    def promised_blocks(self) -> int:
        """Blocks promised, and not taken yet."""
        return max(0, num_blocks_for(self.reserved_len) - len(self.slot.blocks))

    def settle(self, num_rows: int) -> int:
        """Forget rows that must be computed again, the last of `num_rows` in any case; return where to go on."""
        length = min(self.slot.length, num_rows - 1)
        if self.redo_from is not None:
            length = min(length, self.redo_from)
        self.redo_from = None
        self.shorten(length)
        return length

    def shorten(self, length: int) -> None:
        """Forget rows at and past `length`."""
        if length < self.slot.length:
            self.slot.truncate(length)
        self.sound_len = min(self.sound_len, length)


@dataclass(frozen=True, slots=True)
class _Feed:
    """Rows of one session that are computed together."""

    state: _State
    start: int
    token_ids: list[int]
    wanted: bool
    """Whether the law of the last row is wanted."""


class FeatureDrafter:
    """The feature-level drafter; see the module's head."""

    def __init__(
        self, net: FeatureNet, ranked: Ranked, info: DrafterInfo, *, prompt_passes: int = 1, prefix_reuse: bool = True
    ) -> None:
        """Take over a network.

        Args:
            net: the network.
            ranked: the ids that its head knows.
            info: describes the drafter; asks for the last layer.
            prompt_passes: most passes per token step that only catch up, over all sessions.
            prefix_reuse: whether rows that were computed before, for whichever session, are used again.
        """
        self.info = info
        self._net, self._ranked = net, ranked
        self._prompt_passes, self._prefix_reuse = prompt_passes, prefix_reuse
        self._states: dict[SessionId, _State] = {}

    # -- the protocol ------------------------------------------------------------------------------------------------

    def open(self, session: DraftSession, ids: Sequence[int]) -> None:
        """Begin a session with the rows that are known of `ids`."""
        slot = self._net.pool.new_slot(by_class=False, behind=ids[:1])
        if self._prefix_reuse:
            slot.match(ids[1:-1], [TokenClass.PROMPT] * max(0, len(ids) - 2))
            if self._net.pool.num_free < sum(other.promised_blocks for other in self._states.values()):
                # What is known counted as free when others were promised room: their proposals are under way.
                slot.truncate(0)
        features = Features(self._net.hidden_size, self._net.dtype, self.info.context_len)
        self._states[session.session_id] = _State(
            session, slot, features, Penalised(session.prompt_len, session.grammar), sound_len=slot.length
        )

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
        if not self._reserve(state, len(ids) - 2 + num):
            return Plan(0, len(ids) + 1, "kv_full")
        state.wanting = self._lag(state, ids) > MAX_ROWS
        return None if state.wanting else Plan(num)

    def draw(self, batch: Sequence[Work]) -> list[Outcome]:
        """Draw one token for each session that can, and let others catch up."""
        feeds: dict[int, _Feed] = {}
        passes_left = self._prompt_passes
        for index, work in enumerate(batch):
            state = self._states[work.session_id]
            if work.count and self._lag(state, work.ids) <= MAX_ROWS:
                feeds[index] = _feed(state, work.ids, wanted=True)
            elif passes_left and self._is_behind(state, work):
                passes_left -= 1
                feeds[index] = _feed(state, work.ids, wanted=False)
        logits = self._run(feeds)
        return [self._outcome(work, logits.get(index)) for index, work in enumerate(batch)]

    def rewind(self, session_id: SessionId, length: int) -> None:
        """Forget rows that saw tokens at and past `length`; features are those of committed tokens, and stay."""
        state = self._states[session_id]
        state.shorten(max(0, length - 1))
        state.penalised.rewind(length)
        state.own = {position: row for position, row in state.own.items() if position < length}

    def close(self, session_id: SessionId, keep: bool) -> None:
        """Give the session's KV back; whole blocks from true features stay known if `keep`."""
        state = self._states.pop(session_id, None)
        if state is not None:
            state.slot.release(forget=not keep)

    def take_features(self, features: TargetFeatures) -> None:
        """Keep features for the rows that will want them.

        Raises:
            ValueError: they are those of another target.
        """
        state = self._states.get(features.session_id)
        if state is None:
            return
        fresh = state.features.take(features)
        better = [position for position in fresh if state.sound_len <= position < state.slot.length]
        if better:
            state.redo_from = min(better[0], state.slot.length if state.redo_from is None else state.redo_from)

    # -- catching up and drawing -------------------------------------------------------------------------------------

    def _lag(self, state: _State, ids: Sequence[int]) -> int:
        """Return how many rows must be computed for the law of the token after `ids`: at least the last one."""
        num_rows = len(ids) - 1
        return num_rows - state.settle(num_rows) if num_rows > 0 else 0

    def _is_behind(self, state: _State, work: Work) -> bool:
        """Whether there are rows to be computed ahead of a draw, and room for them.

        A proposal under way has room, and waits for the whole text, also where late features have set it back.
        """
        missing, num_rows = self._lag(state, work.ids), len(work.ids) - 1
        if work.count:
            return missing > MAX_ROWS
        if not state.wanting:
            missing -= max(0, num_rows - state.features.end)
        return missing > MAX_ROWS and num_rows + 1 < self.info.context_len and self._reserve(state, num_rows)

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
        return {index: next(laws) for index, feed in feeds.items() if feed.wanted}

    def _rows(self, feed: _Feed) -> list[NetRow]:
        state, last = feed.state, len(feed.token_ids) - 1
        return [
            NetRow(state.slot, at, token, self._feature(state, at), wanted=feed.wanted and at == feed.start + last)
            for at, token in enumerate(feed.token_ids, feed.start)
        ]

    def _feature(self, state: _State, position: int) -> Tensor:
        """Return the best that is known of a position's feature."""
        known = state.features.get(position)
        if known is None:
            known = state.own.get(position)
        return self._net.stand_in if known is None else known

    def _note(self, feed: _Feed, guesses: Tensor) -> None:
        """Take a pass's rows over."""
        state = feed.state
        state.slot.advance(feed.token_ids, TokenClass.PROMPT)
        while state.sound_len < state.slot.length and state.features.get(state.sound_len) is not None:
            state.sound_len += 1
        if feed.wanted:
            state.own |= dict(enumerate(guesses, feed.start + 1))
            if len(state.own) > 2 * KEPT_BEHIND:
                least = feed.start - KEPT_BEHIND
                state.own = {position: row for position, row in state.own.items() if position >= least}
        state.features.forget_before(state.slot.length)
        if self._prefix_reuse:
            state.slot.commit(state.sound_len)

    def _outcome(self, work: Work, logits: Tensor | None) -> Outcome:
        state = self._states[work.session_id]
        if logits is None:
            return Guessed(caught_up=not self._is_behind(state, work))
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


def _feed(state: _State, ids: Sequence[int], *, wanted: bool) -> _Feed:
    """Return the next rows of a session: all that are missing, or as many as a pass holds."""
    start = state.slot.length
    return _Feed(state, start, list(ids[start + 1 : start + 1 + MAX_ROWS]), wanted)
