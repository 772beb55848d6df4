"""Block accounting of a KV pool, and the tensors behind it.

`BlockPool` decides which block belongs to which slots; `KvCache` holds the numbers. A slot's blocks are kept side by
side where there is room, so that reading one after the other is reading on in memory. Where a block lies never changes
what is computed from it. `blocks.py` counts who uses which block.

A block is *free*, *used* by one slot or several, or *cached*: used by none, known by its content (`prefix.py`), and
given up, longest unused first, when a slot needs room. Several slots may read a block; who wants to write into one that
others use takes a copy first, and one that is known by its content stops being known.
"""

from array import array
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outrider.ids import TokenClass
from outrider.model.blocks import Blocks
from outrider.model.prefix import chained_key
from outrider.model.runner import BLOCK_LEN, BlockLayout, KvSlot, PoolExhausted
from outrider.verification.tree import Tree

_CLASS_BYTES = {token_class: bytes([token_class]) for token_class in TokenClass}


class BlockSlot:
    """A session's block table and tokens; the block at index i holds positions [64 i, 64 i + 64)."""

    __slots__ = ("_by_class", "_classes", "_keys", "_pool", "_root", "_token_ids", "_tree", "blocks")

    def __init__(self, pool: "BlockPool", *, by_class: bool = True, behind: Sequence[int] = ()) -> None:
        self._pool: BlockPool | None = pool
        self._by_class = by_class
        root = pool.root(by_class=by_class)
        self._root = chained_key(root, array("I", behind), b"") if behind else root
        self._token_ids = array("I")
        self._classes = bytearray()
        self._keys: list[bytes] = []
        """Of the first blocks; all of those are full."""
        self._tree: Tree | None = None
        """What was fed last, if it was a tree: its nodes' KV lies one after another behind the length."""
        self.blocks: list[int] = []

    @property
    def length(self) -> int:
        """Tokens whose KV is valid."""
        return len(self._token_ids)

    @property
    def capacity(self) -> int:
        """Positions that the blocks held now have room for."""
        return len(self.blocks) * BLOCK_LEN

    def advance(self, token_ids: Sequence[int], token_class: TokenClass) -> None:
        """Note tokens whose KV has been written behind the length; there is room for them."""
        self._token_ids.extend(token_ids)
        self._classes += _CLASS_BYTES[token_class] * len(token_ids)
        self._tree = None

    def spread(self, tree: Tree) -> None:
        """Note a tree whose KV has been written behind the length; there is room for it."""
        self._tree = tree

    def keep(self, path: Sequence[int]) -> None:
        """Take over one path of the tree that was fed last; see `KvSlot.keep`."""
        pool, tree, start = self._living(), self._tree, self.length
        if tree is None or tuple(path) != (tree.path_to(path[-1]) if path else ()):
            raise ValueError(f"{list(path)} is no path of the tree fed last" if tree else "no tree was fed last")
        if tuple(path) != tuple(range(len(path))):
            sources = [pool_row(self, start + node) for node in path]
            pool.move(sources, [pool_row(self, start + index) for index in range(len(path))])
        self.advance(tree.tokens(path), TokenClass.DECODE)
        self.drop_spare()

    def truncate(self, length: int) -> None:
        """Forget positions at or behind `length` and give back the blocks that hold nothing else."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a slot of length {self.length} to {length}")
        del self._token_ids[length:], self._classes[length:], self._keys[length // BLOCK_LEN :]
        self._tree = None
        self.drop_spare()

    def match(self, token_ids: Sequence[int], classes: Sequence[TokenClass]) -> int:
        """Take over known blocks for the tokens behind the length; see `KvSlot.match`."""
        pool, start = self._living(), self.length
        if start % BLOCK_LEN:
            return 0
        self.commit(start)
        blocks = list(self.blocks)
        for first in range(0, len(token_ids) - BLOCK_LEN + 1, BLOCK_LEN):
            ids = array("I", token_ids[first : first + BLOCK_LEN])
            held = bytes(classes[first : first + BLOCK_LEN]) if self._by_class else bytes(BLOCK_LEN)
            key = self._next_key(ids, held)
            block = pool.share(key)
            if block is None:
                break
            self._keys.append(key)
            self._token_ids.extend(ids)
            self._classes += held
            blocks.append(block)
        self._set_blocks(blocks)
        return self.length - start

    def commit(self, length: int) -> None:
        """Make the full blocks of the first `length` tokens known by their content; idempotent."""
        pool = self._living()
        known = len(self._keys)
        self._extend_keys(min(length, self.length))
        for index in range(known, len(self._keys)):
            pool.enter(self._keys[index], self.blocks[index])

    def growth(self, num_tokens: int) -> int:
        """Return how many blocks of the pool a feed of so many tokens takes."""
        more = num_blocks_for(self.length + num_tokens) - len(self.blocks)
        return max(0, more) + (num_tokens > 0 and self._must_copy())

    def drop_spare(self) -> None:
        """Give back the blocks behind the length."""
        keep = num_blocks_for(self.length)
        if self._pool is not None and keep < len(self.blocks):
            # The last block first: so it is given up before those that it is found through.
            self._pool.put(reversed(self.blocks[keep:]))
            self._set_blocks(self.blocks[:keep])

    def grow(self, length: int) -> None:
        """Take blocks until there is room for `length` positions, and make the block at the length the slot's own."""
        pool = self._living()
        if self._writes_into_a_block() and length > self.length:
            index = self.length // BLOCK_LEN
            own = pool.make_own(self.blocks[index])
            if own != self.blocks[index]:
                self._set_blocks([*self.blocks[:index], own, *self.blocks[index + 1 :]])
        while self.capacity < length:
            self._set_blocks([*self.blocks, pool.take(self.blocks[-1] if self.blocks else None)])

    def release(self, *, forget: bool = False) -> None:
        """Give everything back and become unusable; idempotent.

        Args:
            forget: Whether blocks that no other slot uses become unknown too.
        """
        pool = self._pool
        if pool is None:
            return
        for key, block in zip(self._keys, self.blocks, strict=False):
            # A copy may be known now where the first block of its content has been given up since.
            pool.enter(key, block)
        if forget:
            pool.forget(self.blocks)
        self.truncate(0)
        self._pool = None

    def belongs_to(self, pool: "BlockPool") -> bool:
        """Whether the slot is alive and was made for this pool."""
        return self._pool is pool

    def _living(self) -> "BlockPool":
        if self._pool is None:
            raise ValueError("the slot has been freed")
        return self._pool

    def _writes_into_a_block(self) -> bool:
        """Whether the next token goes into a block that holds tokens already."""
        return self.length % BLOCK_LEN != 0

    def _must_copy(self) -> bool:
        pool = self._pool
        return (
            pool is not None
            and self._writes_into_a_block()
            and pool.num_users(self.blocks[self.length // BLOCK_LEN]) > 1
        )

    def _extend_keys(self, length: int) -> None:
        """Compute the keys of the full blocks of the first `length` tokens."""
        for first in range(len(self._keys) * BLOCK_LEN, length - BLOCK_LEN + 1, BLOCK_LEN):
            last = first + BLOCK_LEN
            self._keys.append(self._next_key(self._token_ids[first:last], bytes(self._classes[first:last])))

    def _next_key(self, token_ids: "array[int]", classes: bytes) -> bytes:
        parent = self._keys[-1] if self._keys else self._root
        return chained_key(parent, token_ids, classes if self._by_class else b"")

    def _set_blocks(self, blocks: list[int]) -> None:
        if self._pool is not None:
            self._pool.num_holders += bool(blocks) - bool(self.blocks)
        self.blocks = blocks


class BlockPool(Blocks):
    """The blocks of a pool, and the slots that hold them."""

    def new_slot(self, *, by_class: bool = True, behind: Sequence[int] = ()) -> BlockSlot:
        """Return an empty slot of this pool.

        Args:
            by_class: Whether its keys cover classes, where they matter.
            behind: Ids that have no place in the slot, and decide what its KV is all the same.
        """
        return BlockSlot(self, by_class=by_class and self._classes_differ, behind=behind)

    def reserve(self, wants: list[tuple[BlockSlot, int]]) -> None:
        """Make room in all slots for the given lengths, or in none.

        Raises:
            PoolExhausted: They need more blocks than are free or cached.
        """
        needed = sum(slot.growth(length - slot.length) for slot, length in wants)
        if needed > self.num_free:
            raise PoolExhausted(needed, self.num_free)
        self._reclaim(needed)
        for slot, length in wants:
            slot.grow(length)

    def check(self, slots: list[BlockSlot]) -> None:
        """Check that these slots, the cached blocks and the free ones make up the pool exactly.

        Raises:
            ValueError: A block is lost, miscounted or in two states, or a slot holds more or fewer blocks than its
                length needs.
        """
        owned = [block for slot in slots for block in slot.blocks]
        if sorted([*set(owned), *self._free, *self._index.idle]) != list(range(self.num_blocks)):
            raise ValueError("blocks are lost or owned twice")
        if any(owned.count(block) != users for block, users in enumerate(self._users)):
            raise ValueError("the users of a block are miscounted")
        shared = sum(users > 1 for users in self._users)
        if (len(owned), shared) != (self._num_references, self._num_shared):
            raise ValueError("the totals do not fit the blocks")
        if any(len(slot.blocks) != num_blocks_for(slot.length) for slot in slots):
            raise ValueError("a slot's blocks do not fit its length")


def num_blocks_for(length: int) -> int:
    """Return how many blocks `length` positions need."""
    return -(-length // BLOCK_LEN)


def block_slot(slot: KvSlot, pool: BlockPool) -> BlockSlot | None:
    """Return the slot as a block slot of this pool, or None if it is freed or foreign."""
    return slot if isinstance(slot, BlockSlot) and slot.belongs_to(pool) else None


class KvCache:
    """Keys and values of all blocks: per layer [num_blocks * 64, 2 * kv_heads, head_dim], keys before values.

    Position p of a slot lies at row `blocks[p // 64] * 64 + p % 64`, and one copy writes a token's keys and values.
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
        self.on_move: Callable[[list[int], list[int]], None] = lambda _sources, _targets: None
        """Told first of rows that are copied, so that other ranks do the same."""
        self.on_copy: Callable[[int, int], None] = lambda _source, _target: None
        """The same for whole blocks."""
        self.layers = [torch.zeros(rows, 2 * heads, dim, dtype=dtype, device=device) for heads, dim in shapes]

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy keys and values of single pool rows to others, which may overlap."""
        self.on_move(sources, targets)
        device = self.layers[0].device
        read, write = torch.tensor(sources, device=device), torch.tensor(targets, device=device)
        for pool in self.layers:
            pool.index_copy_(0, write, pool.index_select(0, read))

    def copy(self, source: int, target: int) -> None:
        """Copy one block's keys and values to another block."""
        self.on_copy(source, target)
        for pool in self.layers:
            blocks = pool.view(-1, BLOCK_LEN, *pool.shape[1:])
            blocks[target].copy_(blocks[source])

    @property
    def layout(self) -> BlockLayout:
        """What one block's bytes are."""
        first = self.layers[0]
        values = sum(pool[0].numel() for pool in self.layers)
        num_bytes = values * BLOCK_LEN * first.dtype.itemsize
        return BlockLayout(str(first.dtype).removeprefix("torch."), len(self.layers), values, num_bytes)

    def copy_out(self, block: int, into: memoryview) -> None:
        """Write one block's bytes into a writable buffer of exactly their number."""
        target, parts = torch.frombuffer(into, dtype=torch.uint8), self._bytes_of(block)
        if target.device == parts[0].device:
            torch.cat(parts, out=target)
        else:
            # Joined on the device first: one transfer instead of one per layer.
            target.copy_(torch.cat(parts))

    def copy_in(self, block: int, data: memoryview) -> None:
        """Overwrite one block with bytes that `copy_out` gave."""
        parts = self._bytes_of(block)
        source = torch.frombuffer(data, dtype=torch.uint8).to(parts[0].device)
        for part, held in zip(parts, torch.split(source, [len(part) for part in parts]), strict=True):
            part.copy_(held)

    def _bytes_of(self, block: int) -> list[Tensor]:
        """Return a block's bytes in each layer, as views."""
        rows = slice(block * BLOCK_LEN, (block + 1) * BLOCK_LEN)
        return [pool[rows].reshape(-1).view(torch.uint8) for pool in self.layers]


def pool_row(slot: BlockSlot, place: int) -> int:
    """Return the pool row of a place in a slot."""
    return slot.blocks[place // BLOCK_LEN] * BLOCK_LEN + place % BLOCK_LEN


def pool_rows(slot: BlockSlot, first: int, last: int) -> list[int]:
    """Return the pool rows of positions [first, last) of a slot."""
    return [pool_row(slot, place) for place in range(first, last)]
