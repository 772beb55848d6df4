"""Which blocks of a pool are free, used or cached, by whom they are used, and what their content is known by."""

from collections.abc import Callable, Iterable

from outrider.model.prefix import PrefixIndex, root_key
from outrider.model.runner import KvUsage, PoolExhausted


class Blocks:
    """Which blocks are free, used or cached; every block is exactly one of the three."""

    def __init__(
        self,
        num_blocks: int,
        copy: Callable[[int, int], None] = lambda _source, _target: None,
        move: Callable[[list[int], list[int]], None] = lambda _sources, _targets: None,
    ) -> None:
        """Make a pool of free blocks.

        Args:
            num_blocks: At least one.
            copy: Copies what a block holds, from the first to the second.
            move: Copies what single rows of the pool hold, from the first ones to the second ones, which may overlap.
        """
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._copy = copy
        self.move = move
        self._free = set(range(num_blocks))
        self._users = [0] * num_blocks
        self._num_shared = 0
        self._num_references = 0
        self.num_holders = 0
        """Slots that have blocks."""
        self._index = PrefixIndex()
        self.on_known: Callable[[bytes], None] = lambda _key: None
        """Told the key of each block that becomes known by being computed, not by being adopted."""
        self.set_roots("", classes_differ=True)

    @property
    def num_free(self) -> int:
        """Blocks that can be taken: free and cached ones."""
        return len(self._free) + self._index.num_idle

    @property
    def usage(self) -> KvUsage:
        """How the pool is used at present."""
        cached = self._index.num_idle
        used = self.num_blocks - len(self._free) - cached
        return KvUsage(self.num_blocks, used, self._num_shared, cached, self._num_references, self.num_holders)

    def set_roots(self, fingerprint: str, *, classes_differ: bool) -> None:
        """Begin chains of keys afresh; slots fed before must be fed again.

        Args:
            fingerprint: Of the engine.
            classes_differ: Whether classes decide the bits; where they do not, no key covers them.
        """
        self._classes_differ = classes_differ
        self._roots = {by_class: root_key(fingerprint, by_class=by_class) for by_class in (True, False)}

    def root(self, *, by_class: bool) -> bytes:
        """Return where a slot's chain of keys begins."""
        return self._roots[by_class]

    @property
    def classes_differ(self) -> bool:
        """Whether keys may cover classes."""
        return self._classes_differ

    def num_users(self, block: int) -> int:
        """Return how many slots use a block."""
        return self._users[block]

    def take(self, after: int | None) -> int:
        """Take one block: the one following `after` if it is free, else one with the most room behind it.

        Raises:
            PoolExhausted: No block is free or cached.
        """
        self._reclaim(1)
        if not self._free:
            raise PoolExhausted(1, 0)
        block = after + 1 if after is not None and after + 1 in self._free else self._roomiest()
        self._free.remove(block)
        self._add_user(block)
        return block

    def put(self, blocks: Iterable[int]) -> None:
        """Take back one slot's share in blocks; those without another user are cached if known, else free.

        Raises:
            ValueError: A block is used by nobody, or not of this pool.
        """
        for block in blocks:
            if not 0 <= block < self.num_blocks or not self._users[block]:
                raise ValueError(f"block {block} does not belong to a slot of this pool")
            self._users[block] -= 1
            self._num_references -= 1
            self._num_shared -= self._users[block] == 1
            if not self._users[block] and not self._index.rest(block):
                self._free.add(block)

    def share(self, key: bytes) -> int | None:
        """Take a share in the block with this content, if there is one."""
        block = self._index.find(key)
        if block is None:
            return None
        if not self._users[block]:
            self._index.wake(block)
        self._add_user(block)
        return block

    def enter(self, key: bytes, block: int) -> None:
        """Make a used block known by its content, unless another one is."""
        if not self._index.has(block) and self._index.enter(key, block):
            self.on_known(key)

    def find(self, key: bytes) -> int | None:
        """Return the block with this content, if there is one; takes no share in it."""
        return self._index.find(key)

    def adopt(self, key: bytes, parent: bytes | None, write: Callable[[int], None]) -> bool:
        """Fill a block with content that was computed elsewhere and keep it as a cached one, unless it is known.

        Args:
            key: Of the content.
            parent: Key of the block before it, beside which it is put if there is room.
            write: Writes the content into the block it is given.

        Returns:
            Whether the content is known now; False if there is no room.
        """
        if self._index.find(key) is not None:
            return True
        if not self.num_free:
            return False
        block = self.take(self._index.find(parent) if parent is not None else None)
        try:
            write(block)
            self._index.enter(key, block)
        finally:
            self.put([block])
        return True

    def make_own(self, block: int) -> int:
        """Return a block with this block's content that only the caller uses and that is not known: itself or a copy.

        Raises:
            PoolExhausted: A copy is needed and there is no room.
        """
        if self._users[block] == 1:
            self._index.withdraw(block)
            return block
        own = self.take(None)
        self._copy(block, own)
        self.put([block])
        return own

    def forget(self, blocks: Iterable[int]) -> None:
        """Make those of one slot's blocks unknown that no other slot uses."""
        for block in blocks:
            if self._users[block] == 1:
                self._index.withdraw(block)

    def _add_user(self, block: int) -> None:
        self._users[block] += 1
        self._num_references += 1
        self._num_shared += self._users[block] == 2

    def _reclaim(self, needed: int) -> None:
        """Give up cached blocks where fewer than `needed` are free.

        An eighth of the pool at once: blocks that were taken one after another are given up together, so that slots go
        on finding neighbouring ones.
        """
        if len(self._free) >= needed:
            return
        for _ in range(min(self._index.num_idle, max(needed - len(self._free), self.num_blocks // 8))):
            self._free.add(self._index.evict())

    def _roomiest(self) -> int:
        """Return a block that leaves its slot room to grow: inside the longest run of free blocks.

        The run's middle when a slot may still grow into its beginning, else its first block.
        """
        best_start, best_len = 0, 0
        start = 0
        while start < self.num_blocks:
            end = start
            while end in self._free:
                end += 1
            if end - start > best_len:
                best_start, best_len = start, end - start
            start = end + 1
        return best_start if best_start == 0 else best_start + best_len // 2
