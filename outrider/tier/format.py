"""What a stored block looks like: a header that says what the bytes are, then the bytes. Pure.

A block is used only if its header names exactly what is wanted and the checksum fits; everything else is refused with a
reason, to be counted, deleted and computed again.
"""

import hashlib
import struct
from dataclasses import dataclass

from outrider.model.runner import BLOCK_LEN, BlockLayout

MAGIC = b"ORKV"
FORMAT_VERSION = 1
FIELDS = struct.Struct("<4sHHII12sQ16s32s")
"""Magic, version, tokens, layers, values per token, dtype, bytes that follow, engine, key; little-endian."""
CHECKSUM_LEN = 16
HEADER_LEN = FIELDS.size + CHECKSUM_LEN

REASONS = ("truncated", "magic", "version", "shape", "dtype", "engine", "key", "length", "checksum")
"""Why a block is refused, in the order in which it is checked."""


class RefusedBlock(ValueError):
    """Stored bytes that are not the block that is wanted."""

    def __init__(self, reason: str) -> None:
        """Keep the reason, one of `REASONS`."""
        super().__init__(f"a stored block is refused: {reason}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Identity:
    """What blocks must have in common to be exchanged."""

    layout: BlockLayout
    engine: bytes
    """16 bytes: a digest of the weights, of everything that decides the bits, and of some of these bits."""

    @property
    def namespace(self) -> str:
        """Part of all keys in the server: blocks of different kinds do not even meet."""
        return hashlib.blake2b(repr((FORMAT_VERSION, self.layout, self.engine)).encode(), digest_size=8).hexdigest()

    @property
    def blob_len(self) -> int:
        """Bytes of a stored block."""
        return HEADER_LEN + self.layout.num_bytes


def empty_blob(identity: Identity) -> bytearray:
    """Return room for a stored block; what follows the header is for the block's bytes."""
    return bytearray(identity.blob_len)


def seal(blob: bytearray, key: bytes, identity: Identity) -> None:
    """Write the header of a blob whose block is in place."""
    blob[: FIELDS.size] = _fields(key, identity)
    blob[FIELDS.size : HEADER_LEN] = _checksum(memoryview(blob))


def unseal(blob: bytes, key: bytes, identity: Identity) -> memoryview:
    """Return the block's bytes in a writable buffer.

    Args:
        blob: What the server returned.
        key: Of the block that is wanted.
        identity: Of the engine that wants it.

    Raises:
        RefusedBlock: It is anything else than that block, whole and unchanged.
    """
    if len(blob) < HEADER_LEN:
        raise RefusedBlock("truncated")
    found, wanted = FIELDS.unpack_from(blob), FIELDS.unpack(_fields(key, identity))
    names = ("magic", "version", "shape", "shape", "shape", "dtype", "length", "engine", "key")
    wrong = {name for name, has, wants in zip(names, found, wanted, strict=True) if has != wants}
    if len(blob) < HEADER_LEN + found[6]:
        wrong.add("truncated")
    elif len(blob) != identity.blob_len:
        wrong.add("length")
    for reason in ("magic", "version", "truncated", "shape", "dtype", "engine", "key", "length"):
        if reason in wrong:
            raise RefusedBlock(reason)
    own = memoryview(bytearray(blob))
    if own[FIELDS.size : HEADER_LEN] != _checksum(own):
        raise RefusedBlock("checksum")
    return own[HEADER_LEN:]


def _fields(key: bytes, identity: Identity) -> bytes:
    layout = identity.layout
    return FIELDS.pack(
        MAGIC, FORMAT_VERSION, BLOCK_LEN, layout.num_layers, layout.values_per_token, layout.dtype.encode(),
        layout.num_bytes, identity.engine, key,
    )  # fmt: skip


def _checksum(blob: memoryview) -> bytes:
    """Return the digest of everything but the checksum's own place."""
    digest = hashlib.blake2b(blob[: FIELDS.size], digest_size=CHECKSUM_LEN)
    digest.update(blob[HEADER_LEN:])
    return digest.digest()
