"""Log-probabilities of a session's present turn, beside its log, for requests that want them: told again when resumed.

One string per session, with records of one size from the turn's first generated token on; the size follows from how
many were asked for. A token's record is written before the token enters the log, under the same fencing number: what is
in the log has its record, and what lies behind the log's end is written again with the same or other tokens. A further
turn writes over it from the start.
"""

import struct
from collections.abc import Sequence

from outrider.messages import TokenLogprobs

NOBODY = 2**32 - 1
"""In place of a token id where a vocabulary has fewer entries than were asked for."""


def record_bytes(num_top: int) -> int:
    """Return the size of one token's record.

    Args:
        num_top: likeliest tokens per position, >= 0.
    """
    return 9 + 12 * num_top


def pack(logprobs: Sequence[TokenLogprobs], num_top: int) -> bytes:
    """Return the records of tokens: a mark, the token's own logarithm, then id and logarithm of each likeliest one."""
    packed = bytearray()
    for entry in logprobs:
        top = [*entry.top, *[(NOBODY, 0.0)] * (num_top - len(entry.top))]
        packed += struct.pack("<?d", True, entry.logprob) + b"".join(struct.pack("<Id", *scored) for scored in top)
    return bytes(packed)


def unpack(packed: bytes, num_top: int) -> tuple[TokenLogprobs, ...]:
    """Undo `pack`, up to the first record that was never written."""
    size, found = record_bytes(num_top), list[TokenLogprobs]()
    for at in range(0, len(packed) - size + 1, size):
        if not packed[at]:
            break
        found.append(_unpacked(packed[at : at + size]))
    return tuple(found)


def _unpacked(record: bytes) -> TokenLogprobs:
    _, logprob = struct.unpack_from("<?d", record)
    top = struct.iter_unpack("<Id", record[9:])
    return TokenLogprobs(logprob, tuple((token_id, value) for token_id, value in top if token_id != NOBODY))
