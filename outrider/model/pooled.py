"""What runners over a pool of blocks have in common: slots, and the accounts of who uses which block."""

from collections.abc import Sequence

from outrider.model.kv import BlockPool, BlockSlot, block_slot
from outrider.model.runner import Feed, InvalidFeed, KvSlot, KvUsage


class PooledRunner:
    """The part of `ModelRunner` that is a pool's."""

    def __init__(self, pool: BlockPool) -> None:
        """Take over a pool."""
        self._pool = pool

    @property
    def free_blocks(self) -> int:
        """Blocks that can be taken."""
        return self._pool.num_free

    @property
    def kv_usage(self) -> KvUsage:
        """How the pool is used."""
        return self._pool.usage

    def new_slot(self, *, by_class: bool = True) -> BlockSlot:
        """Return an empty slot."""
        return self._pool.new_slot(by_class=by_class)

    def free_slot(self, slot: KvSlot, *, forget: bool = False) -> None:
        """Give a slot's blocks back; idempotent."""
        own = block_slot(slot, self._pool)
        if own is not None:
            own.release(forget=forget)

    def _reserved(self, feeds: Sequence[Feed]) -> list[BlockSlot]:
        """Return the feeds' slots, with room for all of them.

        Raises:
            InvalidFeed: A slot is freed or foreign.
            PoolExhausted: Not enough free blocks.
        """
        slots = [self._own_slot(feed.slot) for feed in feeds]
        self._pool.reserve([(slot, slot.length + len(feed.token_ids)) for slot, feed in zip(slots, feeds, strict=True)])
        return slots

    def _own_slot(self, slot: KvSlot) -> BlockSlot:
        own = block_slot(slot, self._pool)
        if own is None:
            raise InvalidFeed("the slot is freed or belongs to another runner")
        return own
