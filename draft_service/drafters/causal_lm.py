"""Guesses with a causal language model: one decode pass for all sessions that draw, one token each.

A session whose KV lags behind its text catches up first: a few tokens (corrections, a bonus) go into the decode pass
with the last one; more go through prompt passes, a bounded number of them per token step, so that a long prompt does
not hold up the others.

KV of a proposal is reserved when it is planned. A session for which there is no room offers nothing, which depends on
the other sessions' lengths only. KV of prompts and of closed sessions stays in the pool as long as there is room, and
is taken over by whoever begins with the same ids, in whole blocks. By which kind of pass it was computed does not
matter here: a guess may be a different one, and is a guess all the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from draft_service.drafters.growing import Growth, ModeShapes, grow
from draft_service.drafters.protocol import (
    DrafterInfo,
    DraftSession,
    Failed,
    Guessed,
    Outcome,
    Plan,
    Work,
)
from draft_service.drafters.sampling import Penalised, guess
from draft_service.window import FOREVER
from outrider.errors import FailedPrecondition
from outrider.ids import SessionId, TokenClass
from outrider.model.kv import num_blocks_for
from outrider.model.runner import Feed, KvSlot, ModelRunner, Rows, prefill_plan

MAX_DECODE_LAG = 8
"""Tokens fed at once in a decode pass; measured there, nine rows cost what one costs. More lag is prompt work."""


@dataclass(slots=True)
class _State:
    """One open session."""

    session: DraftSession
    slot: KvSlot
    """Holds the text's own tokens, never those of a text that was given up."""
    penalised: Penalised
    committed_len: int
    """Tokens that it was opened with; others may have their KV as soon as it is computed."""
    reserved_len: int = 0
    """Tokens that KV blocks are promised for."""
    growth: Growth | None = None
    """The tree under way; it is of no use once its epoch or its place is another."""

    def grown(self, work: Work) -> Growth:
        """Return the tree that is being drawn, a new one if there is none of this epoch at this place."""
        place = (work.epoch, len(work.ids), work.parents)
        if self.growth is None or (self.growth.epoch, self.growth.base_len, self.growth.parents) != place:
            self.growth = Growth(*place)
        return self.growth

    @property
    def promised_blocks(self) -> int:
        """Blocks promised, and not taken yet."""
        return max(0, num_blocks_for(self.reserved_len) - num_blocks_for(self.slot.length))


class CausalLm:
    """The language-model drafter; see the module's head."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        vocab_len: int,
        kind: str = "causal_lm",
        prompt_passes: int = 1,
        prefix_reuse: bool = True,
        tree_nodes: int = 0,
    ) -> None:
        """Take over a runner.

        Args:
            runner: the draft model.
            vocab_len: Length of the tokenizer's id range.
            kind: Name of the drafter in descriptions and metrics.
            prompt_passes: Most prompt passes per token step, over all sessions.
            prefix_reuse: Whether KV that was computed before, for whichever session, is used again.
            tree_nodes: Most tokens of a tree; 0 guesses runs. So does a model whose passes cannot have branches.

        Raises:
            FailedPrecondition: the model has no rows for some of the vocabulary's ids.
        """
        info = runner.info
        if info.vocab_size < vocab_len:
            raise FailedPrecondition(
                f"draft model {info.name} knows {info.vocab_size} ids, its vocabulary has {vocab_len}"
            )
        self.info = DrafterInfo(
            kind, info.name, vocab_len, info.context_len, info.dtype, info.exactness, info.fingerprint
        )
        self._runner = runner
        self._prompt_passes = prompt_passes
        self._prefix_reuse = prefix_reuse
        self._shapes = ModeShapes(tree_nodes if info.trees else 0)
        self._states: dict[SessionId, _State] = {}

    # -- the protocol ------------------------------------------------------------------------------------------------

    def open(self, session: DraftSession, ids: Sequence[int]) -> None:
        """Begin a session with what is known of `ids`; the last one is fed in any case, for its row."""
        slot = self._runner.new_slot(by_class=False)
        if self._prefix_reuse:
            slot.match(ids[:-1], [TokenClass.PROMPT] * (len(ids) - 1))
            if self._runner.free_blocks < sum(other.promised_blocks for other in self._states.values()):
                # What is known counted as free when others were promised room: their proposals are under way.
                slot.truncate(0)
        self._states[session.session_id] = _State(
            session, slot, Penalised(session.prompt_len, session.grammar), len(ids) - 1
        )

    def plan(self, session_id: SessionId, ids: Sequence[int], count: int) -> Plan | None:
        """Offer what fits into the model's context, if there is KV for it."""
        state = self._states[session_id]
        num = min(count, self.info.context_len - len(ids))
        if num <= 0:
            return Plan(0, FOREVER, "context_full")
        parents = self._shapes.parents(state.session.mode, num)
        num = len(parents) or num
        if not self._reserve(state, len(ids) + num):
            return Plan(0, len(ids) + 1, "kv_full")
        return None if self._lag(state, ids) > MAX_DECODE_LAG else Plan(num, parents=parents)

    def learn(self, session_id: SessionId, families: Sequence[tuple[int, int]]) -> None:
        """Let the shapes of later trees know; see `GrowsTrees`."""
        state = self._states.get(session_id)
        if state is not None:
            self._shapes.learn(state.session.mode, families)

    def draw(self, batch: Sequence[Work]) -> list[Outcome]:
        """Run one decode pass, and as many prompt passes as are allowed."""
        feeds: dict[int, Feed] = {}
        passes_left = self._prompt_passes
        for index, work in enumerate(batch):
            feed = self._feed(self._states[work.session_id], work)
            if feed is not None and feed.token_class is TokenClass.PROMPT:
                passes_left -= 1
                feed = feed if passes_left >= 0 else None
            if feed is not None:
                feeds[index] = feed
        rows = dict(zip(feeds, self._forward(list(feeds.values())), strict=True))
        for index, feed in feeds.items():
            if feed.parents:
                feed.slot.keep(range(len(batch[index].ids) - feed.slot.length))
            self._commit(self._states[batch[index].session_id])
        return [self._outcome(work, rows.get(index)) for index, work in enumerate(batch)]

    def rewind(self, session_id: SessionId, length: int) -> None:
        """Lower the KV's length."""
        state = self._states[session_id]
        _shorten(state.slot, length)
        state.penalised.rewind(length)

    def close(self, session_id: SessionId, keep: bool) -> None:
        """Give the session's KV back; what it holds stays known if `keep`, its last guesses too, which do no harm."""
        state = self._states.pop(session_id, None)
        if state is None:
            return
        if keep:
            state.committed_len = state.slot.length
            self._commit(state)
        self._runner.free_slot(state.slot, forget=not keep)

    # -- catching up and drawing -------------------------------------------------------------------------------------

    def _lag(self, state: _State, ids: Sequence[int]) -> int:
        """Return how many tokens must be fed for a row after `ids`: at least the last one."""
        _shorten(state.slot, len(ids) - 1)
        return len(ids) - state.slot.length

    def _feed(self, state: _State, work: Work) -> Feed | None:
        """Return a session's next feed; None if it needs none."""
        ids, slot = work.ids, state.slot
        lag = self._lag(state, ids)
        if lag > MAX_DECODE_LAG:
            if work.count == 0 and not self._worth_catching_up(state, ids):
                return None
            start, end = prefill_plan(slot.length, len(ids) - 1)[0]
            return Feed(slot, tuple(ids[start:end]), TokenClass.PROMPT, 0)
        if not work.count:
            return None
        tail = tuple(ids[slot.length :])
        growth = state.grown(work) if work.parents else None
        if growth is None or not growth.token_ids:
            return Feed(slot, tail, TokenClass.DECODE, 1)
        # All levels so far again: few rows cost what one costs, and the text's own KV stays alone in the slot.
        num = len(growth.token_ids)
        parents = (*range(-1, len(tail) - 1), *(parent + len(tail) for parent in work.parents[:num]))
        ids_fed = (*tail, *growth.token_ids)
        return Feed(slot, ids_fed, TokenClass.DECODE, len(growth.level), parents=parents)

    def _worth_catching_up(self, state: _State, ids: Sequence[int]) -> bool:
        return len(ids) < self.info.context_len and self._reserve(state, len(ids) + 1)

    def _forward(self, feeds: list[Feed]) -> list[Rows]:
        return self._runner.forward(feeds) if feeds else []

    def _outcome(self, work: Work, rows: Rows | None) -> Outcome:
        """Choose a session's token if its row is there."""
        state = self._states[work.session_id]
        if rows is None or not len(rows.logits):
            behind = self._lag(state, work.ids) > MAX_DECODE_LAG and self._worth_catching_up(state, work.ids)
            return Guessed(caught_up=not behind)
        try:
            history = state.penalised.at(work.ids) if state.session.sampling.uses_history else None
            logits = rows.logits[:, : self.info.vocab_len]
            if work.parents:
                return grow(state.session, state.grown(work), logits, history)
            return guess(logits, state.session, len(work.ids), work.epoch, history)
        except Exception as error:  # one session's row or parameters must not take the others along
            return Failed(error)

    # -- room --------------------------------------------------------------------------------------------------------

    def _reserve(self, state: _State, length: int) -> bool:
        """Promise KV for `length` tokens to a session; False if it is not there."""
        promised = sum(other.promised_blocks for other in self._states.values() if other is not state)
        needed = max(0, num_blocks_for(length) - num_blocks_for(state.slot.length))
        if self._runner.free_blocks < promised + needed:
            state.reserved_len = 0
            return False
        state.reserved_len = length
        return True

    def _commit(self, state: _State) -> None:
        if self._prefix_reuse:
            state.slot.commit(state.committed_len)


def _shorten(slot: KvSlot, length: int) -> None:
    """Forget positions at and past `length`, if there are any."""
    if length < slot.length:
        slot.truncate(length)
