"""Blocks of a pool as bytes, named by their content: what a tier outside the process needs of a runner.

A block is read while the pool knows it, and one that comes from elsewhere enters the pool as a cached block, known and
used by nobody, which sessions then find like any other. So nothing that is written here can reach a session's own KV.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.ids import TokenClass
from outrider.model.kv import BlockPool
from outrider.model.prefix import chained_key
from outrider.model.runner import BLOCK_LEN, BlockLayout


class BlockMemory(Protocol):
    """Where blocks lie."""

    @property
    def layout(self) -> BlockLayout:
        """What one block's bytes are."""
        ...

    def copy_out(self, block: int, into: memoryview) -> None:
        """Write a block's bytes into a writable buffer of exactly their number."""
        ...

    def copy_in(self, block: int, data: memoryview) -> None:
        """Overwrite a block with bytes that `copy_out` gave; the buffer is writable, but is not written to."""
        ...


@dataclass(frozen=True, slots=True)
class PoolAccess:
    """`BlockAccess` over a pool and its memory."""

    pool: BlockPool
    memory: BlockMemory

    @property
    def layout(self) -> BlockLayout:
        """What one block's bytes are."""
        return self.memory.layout

    def keys(self, token_ids: Sequence[int], classes: Sequence[TokenClass]) -> list[bytes]:
        """Return the keys of all full blocks of a text; see `BlockAccess.keys`."""
        by_class = self.pool.classes_differ
        parent, keys = self.pool.root(by_class=by_class), []
        for first in range(0, len(token_ids) - BLOCK_LEN + 1, BLOCK_LEN):
            held = bytes(classes[first : first + BLOCK_LEN]) if by_class else b""
            parent = chained_key(parent, array("I", token_ids[first : first + BLOCK_LEN]), held)
            keys.append(parent)
        return keys

    def read(self, key: bytes, into: memoryview) -> bool:
        """Copy a block out; see `BlockAccess.read`."""
        block = self.pool.find(key)
        if block is None:
            return False
        self.memory.copy_out(block, into)
        return True

    def adopt(self, key: bytes, parent: bytes | None, data: memoryview) -> bool:
        """Take a block in; see `BlockAccess.adopt`."""
        return self.pool.adopt(key, parent, lambda block: self.memory.copy_in(block, data))

    def watch(self, on_known: Callable[[bytes], None]) -> None:
        """Be told of blocks that become known; see `BlockAccess.watch`."""
        self.pool.on_known = on_known
