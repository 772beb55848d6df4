"""Sessions' KV in the pool: who gets a slot, what it finds there already, and what is left when it goes.

KV is a cache: all of it can be computed again from a session's tokens and classes, with the same bits. What sessions
have committed stays in the pool under its content until the room is needed: for a session's next turn, for others that
begin alike, and for one that had to give way.

Invariant: between passes a slot holds exactly the blocks its length needs, all of its tokens are committed, and free,
cached and used blocks add up to the pool.
"""

from collections.abc import Callable, Iterable

from outrider.model.kv import num_blocks_for
from outrider.model.runner import KvSlot, ModelRunner
from verify_service.sessions import Session


class Residence:
    """The pool as the engine sees it."""

    def __init__(self, runner: ModelRunner, *, prefix_reuse: bool = True) -> None:
        """Serve from an empty pool.

        Args:
            runner: Whose pool it is.
            prefix_reuse: Whether anything that was computed is used again; off, every session begins at 0.
        """
        self._runner = runner
        self.prefix_reuse = prefix_reuse
        self.on_leave: Callable[[Session, bool], None] = lambda _session, _keep: None
        """Told of a session that is about to lose its slot, and whether what it has committed stays known."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole pool."""
        return self._runner.info.num_blocks

    @property
    def available_blocks(self) -> int:
        """Blocks that are free, or cached and can be given up."""
        return self._runner.free_blocks

    def settle_in(self, session: Session) -> int:
        """Give a session a slot, with what is known of its tokens; return how many those are."""
        session.slot = self._runner.new_slot()
        session.filling = True
        return self.take_over(session)

    def take_over(self, session: Session) -> int:
        """Let a filling session have what was computed meanwhile, by whomever; return how many tokens that is."""
        slot, end = session.slot, session.chain.kv_len
        if slot is None or not session.filling:
            return 0
        start, reused = slot.length, 0
        if self.prefix_reuse and session.scoring is None:
            reused = slot.match(session.chain.tokens[start:end], session.classes(end)[start:])
        session.filling = slot.length < end
        return reused

    def commit(self, session: Session) -> None:
        """All tokens of the session's slot are committed: their full blocks may be used by others."""
        if self.prefix_reuse and session.slot is not None:
            session.slot.commit(session.slot.length)

    def move_out(self, session: Session, *, keep: bool) -> None:
        """Take a session's slot away; what it has committed stays known only if `keep`. Idempotent."""
        self.on_leave(session, keep)
        slot, session.slot, session.filling = session.slot, None, False
        if slot is not None:
            self._runner.free_slot(slot, forget=not keep)

    def is_balanced(self, slots: Iterable[KvSlot]) -> bool:
        """Say whether these slots account for all blocks that are in use."""
        usage = self._runner.kv_usage
        held = sum(num_blocks_for(slot.length) for slot in slots)
        return usage.references == held and usage.used + self.available_blocks == usage.num_blocks
