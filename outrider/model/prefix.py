"""Which blocks of KV are known by their content, and which of those may be given up first.

A *key* names everything that decides the bits of a full block: its tokens and all tokens before them, the class of each
(where classes matter), and the engine. Keys are BLAKE2b digests of 256 bits, chained over blocks; two different texts
with one key would be a collision that nobody knows how to make, so no ids are stored for a second look, and keys keep
their meaning outside this process.

Invariants:
    - A key belongs to at most one block, a block to at most one key.
    - An idle block has a key: nothing else would ever find it again.
"""

import hashlib
from array import array
from collections import OrderedDict


def root_key(fingerprint: str, *, by_class: bool) -> bytes:
    """Return where the chains of one engine begin.

    Args:
        fingerprint: Of the engine.
        by_class: Whether its keys cover classes; chains with and without never meet.
    """
    return hashlib.blake2b(f"{fingerprint}/{by_class:d}".encode(), digest_size=32).digest()


def chained_key(parent: bytes, token_ids: "array[int]", classes: bytes) -> bytes:
    """Return the key of a block.

    Args:
        parent: Key of the block before it, or the root.
        token_ids: Of the block's positions, a fixed number of them, so that the parts cannot run into each other.
        classes: One byte per position, or none where classes do not matter.
    """
    return hashlib.blake2b(parent + token_ids.tobytes() + classes, digest_size=32).digest()


class PrefixIndex:
    """Maps keys to blocks; keeps the blocks that nobody uses in the order in which they were last used."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_idle(self) -> int:
        """Blocks that nobody uses."""
        return len(self._idle)

    @property
    def idle(self) -> list[int]:
        """Blocks that nobody uses, the one to give up first in front."""
        return list(self._idle)

    def find(self, key: bytes) -> int | None:
        """Return the block with this content, idle or not."""
        return self._block_of.get(key)

    def has(self, block: int) -> bool:
        """Whether a block can be found by its content."""
        return block in self._key_of

    def enter(self, key: bytes, block: int) -> bool:
        """Make a block that is in use known; say whether it is, now or since before.

        The first block with some content keeps the key: who computed it again keeps a copy of their own.
        """
        if self._key_of.get(block) == key:
            return True
        if key in self._block_of or block in self._key_of:
            return False
        self._block_of[key], self._key_of[block] = block, key
        return True

    def withdraw(self, block: int) -> None:
        """Make a block unknown: its content is about to change, or it is given up. Idempotent."""
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
            self._idle.pop(block, None)

    def rest(self, block: int) -> bool:
        """The last user has left: keep the block as the latest idle one; False if it is not known."""
        if block not in self._key_of:
            return False
        self._idle[block] = None
        return True

    def wake(self, block: int) -> None:
        """An idle block is used again."""
        del self._idle[block]

    def evict(self) -> int:
        """Give up the block that has been idle longest, and return it.

        Raises:
            KeyError: None is idle.
        """
        block, _ = self._idle.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        return block
