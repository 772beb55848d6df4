"""Block accounting of a KV pool, and the tensors behind it.

`BlockPool` decides which block belongs to which slot; `KvCache` holds the numbers. A slot's blocks are kept side by
side where there is room, because attention then reads the pool through a view; scattered blocks are gathered first.
Where a block lies never changes what is computed from it.
"""

import torch
from torch import Tensor

from outrider.model.runner import BLOCK_LEN, KvSlot, PoolExhausted


class BlockSlot:
    """A session's block table and length; the block at index i holds positions [64 i, 64 i + 64)."""

    __slots__ = ("_pool", "blocks", "contiguous", "length")

    def __init__(self, pool: "BlockPool") -> None:
        self._pool: BlockPool | None = pool
        self.blocks: list[int] = []
        self.contiguous = True
        self.length = 0

    @property
    def capacity(self) -> int:
        """Positions that the blocks held now have room for."""
        return len(self.blocks) * BLOCK_LEN

    def truncate(self, length: int) -> None:
        """Forget positions at or behind `length` and give back the blocks that hold nothing else."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a slot of length {self.length} to {length}")
        self.length = length
        self.drop_spare()

    def drop_spare(self) -> None:
        """Give back the blocks behind the length."""
        keep = num_blocks_for(self.length)
        if self._pool is not None and keep < len(self.blocks):
            self._pool.put(self.blocks[keep:])
            self._set_blocks(self.blocks[:keep])

    def grow(self, length: int) -> None:
        """Take blocks until there is room for `length` positions."""
        if self._pool is None:
            raise ValueError("the slot has been freed")
        while self.capacity < length:
            self._set_blocks([*self.blocks, self._pool.take(self.blocks[-1] if self.blocks else None)])

    def release(self) -> None:
        """Give everything back and become unusable; idempotent."""
        self.length = 0
        self.drop_spare()
        self._pool = None

    def belongs_to(self, pool: "BlockPool") -> bool:
        """Whether the slot is alive and was made for this pool."""
        return self._pool is pool

    def _set_blocks(self, blocks: list[int]) -> None:
        self.blocks = blocks
        self.contiguous = all(block == blocks[0] + index for index, block in enumerate(blocks))


class BlockPool:
    """Which blocks are free. Every block is free or in exactly one slot."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._free = set(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that belong to no slot."""
        return len(self._free)

    def new_slot(self) -> BlockSlot:
        """Return an empty slot of this pool."""
        return BlockSlot(self)

    def take(self, after: int | None) -> int:
        """Take one block: the one following `after` if it is free, else one with the most room behind it.

        Raises:
            PoolExhausted: No block is free.
        """
        if not self._free:
            raise PoolExhausted(1, 0)
        block = after + 1 if after is not None and after + 1 in self._free else self._roomiest()
        self._free.remove(block)
        return block

    def put(self, blocks: list[int]) -> None:
        """Take back blocks.

        Raises:
            ValueError: A block is free already, or not of this pool.
        """
        for block in blocks:
            if block in self._free or not 0 <= block < self.num_blocks:
                raise ValueError(f"block {block} does not belong to a slot of this pool")
            self._free.add(block)

    def reserve(self, wants: list[tuple[BlockSlot, int]]) -> None:
        """Make room in all slots for the given lengths, or in none.

        Raises:
            PoolExhausted: They need more blocks than are free.
        """
        needed = sum(max(0, num_blocks_for(length) - len(slot.blocks)) for slot, length in wants)
        if needed > self.num_free:
            raise PoolExhausted(needed, self.num_free)
        for slot, length in wants:
            slot.grow(length)

    def check(self, slots: list[BlockSlot]) -> None:
        """Check that these slots and the free blocks make up the pool exactly.

        Raises:
            ValueError: A block is owned twice, lost, or a slot holds more or fewer blocks than its length needs.
        """
        owned = [block for slot in slots for block in slot.blocks]
        if sorted([*owned, *self._free]) != list(range(self.num_blocks)):
            raise ValueError("blocks are lost or owned twice")
        if any(len(slot.blocks) != num_blocks_for(slot.length) for slot in slots):
            raise ValueError("a slot's blocks do not fit its length")

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


def num_blocks_for(length: int) -> int:
    """Return how many blocks `length` positions need."""
    return -(-length // BLOCK_LEN)


def block_slot(slot: KvSlot, pool: BlockPool) -> BlockSlot | None:
    """Return the slot as a block slot of this pool, or None if it is freed or foreign."""
    return slot if isinstance(slot, BlockSlot) and slot.belongs_to(pool) else None


class KvCache:
    """Keys and values of all blocks: per layer [num_blocks * 64, 2 * kv_heads, head_dim], keys before values.

    Position p of a slot lies at row `blocks[p // 64] * 64 + p % 64`, so a run of neighbouring blocks is a view, and one
    copy writes a token's keys and values.
    """

    def __init__(
        self, shapes: list[tuple[int, int]], num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate zeros: what is masked must still be a finite number.

        Args:
            shapes: (kv_heads, head_dim) of each layer.
            num_blocks: Blocks of 64 positions.
            dtype: The model's.
            device: The model's.
        """
        rows = num_blocks * BLOCK_LEN
        self.layers = [torch.zeros(rows, 2 * heads, dim, dtype=dtype, device=device) for heads, dim in shapes]

    def read(self, layer: int, where: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [kv_heads, n, head_dim] of pool rows: a view for a slice, a copy for row numbers."""
        pool = self.layers[layer]
        both = (pool[where] if isinstance(where, slice) else pool.index_select(0, where)).transpose(0, 1)
        heads = both.shape[0] // 2
        return both[:heads], both[heads:]


def pool_rows(slot: BlockSlot, first: int, last: int) -> list[int]:
    """Return the pool rows of positions [first, last) of a slot."""
    return [slot.blocks[pos // BLOCK_LEN] * BLOCK_LEN + pos % BLOCK_LEN for pos in range(first, last)]
