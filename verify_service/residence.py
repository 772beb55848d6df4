"""Whose KV is in the pool: slots of sessions that run, and of sessions that may come back.

KV is a cache: all of it can be computed again from a session's tokens and classes, with the same bits. Idle KV is given
up first, the longest unused before others.

Invariant: between passes a slot holds exactly the blocks its length needs, so free and held blocks add up to the pool.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterable

from outrider.ids import SessionId
from outrider.model.kv import num_blocks_for
from outrider.model.runner import KvSlot, ModelRunner
from verify_service.sessions import Resident, Session, common_prefix

log = logging.getLogger(__name__)


class Residence:
    """The pool as the engine sees it."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._idle: OrderedDict[SessionId, Resident] = OrderedDict()

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole pool."""
        return self._runner.info.num_blocks

    @property
    def num_idle(self) -> int:
        """Sessions whose KV is kept without use."""
        return len(self._idle)

    @property
    def available_blocks(self) -> int:
        """Blocks that are free, or would be if all idle KV were given up."""
        return self._runner.free_blocks + sum(num_blocks_for(kept.slot.length) for kept in self._idle.values())

    def settle_in(self, session: Session) -> int:
        """Give a session a slot, with what is left of its earlier KV if that is its own; return how many tokens are."""
        kept = self._idle.pop(session.opened.session_id, None)
        classes_differ = self._runner.info.classes_differ
        reused = common_prefix(kept.token_ids, kept.classes if classes_differ else None, session) if kept else 0
        if kept is not None and reused:
            kept.slot.truncate(reused)
            session.slot = kept.slot
        else:
            if kept is not None:
                self._runner.free_slot(kept.slot)
            session.slot = self._runner.new_slot()
        session.filling = reused < session.chain.kv_len
        return reused

    def move_out(self, session: Session, *, keep: bool, now_s: float) -> None:
        """Take a session's slot away; its KV stays for later if `keep`, else its blocks are free now. Idempotent."""
        slot, session.slot, session.filling = session.slot, None, False
        if slot is None:
            return
        session_id = session.opened.session_id
        self.forget(session_id)
        if keep and slot.length:
            ids = session.chain.tokens[: slot.length]
            self._idle[session_id] = Resident(slot, ids, session.classes(slot.length), now_s)
        else:
            self._runner.free_slot(slot)

    def forget(self, session_id: SessionId) -> None:
        """Give up a session's idle KV, if there is any."""
        kept = self._idle.pop(session_id, None)
        if kept is not None:
            self._runner.free_slot(kept.slot)

    def forget_before(self, since_s: float) -> None:
        """Give up what nobody has used since `since_s`."""
        while self._idle and next(iter(self._idle.values())).since_s <= since_s:
            self.forget(next(iter(self._idle)))

    def make_room(self, blocks: int) -> bool:
        """Give up idle KV until so many blocks are free; say whether they are."""
        while self._runner.free_blocks < blocks and self._idle:
            self.forget(next(iter(self._idle)))
        return self._runner.free_blocks >= blocks

    def is_balanced(self, slots: Iterable[KvSlot]) -> bool:
        """Say whether free blocks, those of idle sessions and those of these slots make up the whole pool."""
        held = sum(num_blocks_for(slot.length) for slot in slots)
        return self.available_blocks + held == self.num_blocks


def growth(slot: KvSlot, num_tokens: int) -> int:
    """Return how many more blocks a slot needs for so many more tokens."""
    return num_blocks_for(slot.length + num_tokens) - num_blocks_for(slot.length)
