"""Randomness as a pure function of keys and counters: the same integers on every machine, nothing to seed or to carry.

Two generators, both counter-based:

* `word64`: one 64-bit word per (key, position, epoch, index), a keyed BLAKE2b of the counters. All scalar draws use
  it: draft tokens, acceptance coins, replacements, bonus and plain tokens. The epoch is part of the counter, so
  nothing is drawn twice from the same word when a position is visited again after a rollback.
* the noise field of coupled mode: one word per (key, sample index, position, token). BLAKE2b turns all but the
  token into a 128-bit row key; the token then passes two keyed rounds of the SplitMix64 finaliser, which vectorise
  over a vocabulary. The field knows no epoch, because in coupled mode the text has to be a function of the seed
  alone.

Invariants: keys of different purposes are independent, so a draft worker that holds the draft key (or the field
key) learns nothing about the verifier's coins; only integers decide, floats are derived from them last.

Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators" (the finaliser, constants of
variant 13); Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (counters instead of state).
"""

import struct
from enum import IntEnum
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from outrider.ids import Epoch

KEY_BYTES = 16
"""Length of every key."""

_STREAM = b"outrider-word"
_ROW = b"outrider-field"
_DERIVE = b"outrider-derive"
_SEED = b"outrider-seed"

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_TO_52_BITS = np.uint64(12)
_CHUNK = 4096
"""Tokens mixed at a time: 32 KB of words, so that all passes over a chunk stay in the first cache level."""


class Purpose(IntEnum):
    """What a stream of random words is for; each has its own key."""

    DRAFT = 1
    """Draft tokens; the only stream a draft worker may know in rejection mode."""
    COIN = 2
    """Acceptance tests."""
    REPLACEMENT = 3
    """Recovered tokens."""
    TARGET = 4
    """Bonus and plain tokens."""
    FIELD = 5
    """The noise field of coupled mode, known to both sides."""


def derive_key(session_key: bytes, purpose: Purpose) -> bytes:
    """Derive the key of one stream.

    Args:
        session_key: `KEY_BYTES` bytes, from which all streams of a session follow.
        purpose: the stream.

    Returns:
        `KEY_BYTES` bytes that reveal neither the session's key nor any other stream's.

    Raises:
        ValueError: the key has another length.
    """
    return _hashed(session_key, _DERIVE, struct.pack("<Q", purpose))


def seed_key(seed: int) -> bytes:
    """Turn a client's seed, any integer of at most 64 bits (signed or unsigned), into a session key.

    Raises:
        ValueError: the seed is outside -2**63 .. 2**64 - 1.
    """
    if not -(1 << 63) <= seed < (1 << 64):
        raise ValueError(f"seed = {seed}: must be in -2**63 .. 2**64 - 1")
    return blake2b(seed.to_bytes(9, "little", signed=True), digest_size=KEY_BYTES, person=_SEED).digest()


def word64(key: bytes, position: int, epoch: Epoch, index: int = 0) -> int:
    """Return the word of (position, epoch, index) in a stream.

    Args:
        key: the stream's key, from `derive_key`.
        position: absolute position of the token being decided, >= 0.
        epoch: the chain it is decided in.
        index: tells several words of one position and epoch apart, >= 0.

    Returns:
        An integer uniform on 0 .. 2**64 - 1.

    Raises:
        ValueError: the key has a wrong length.
    """
    generation = epoch.generation
    counters = struct.pack("<5Q", position, generation.fence, generation.attach, epoch.round, index)
    return int.from_bytes(_hashed(key, _STREAM, counters)[:8], "little")


def uniform(key: bytes, position: int, epoch: Epoch, index: int = 0) -> float:
    """Return the same word as a float uniform on [0, 1) with 53 bits; it can be exactly 0 and is never 1."""
    return (word64(key, position, epoch, index) >> 11) * 2.0**-53


def field_words(
    key: bytes, sample_index: int, position: int, token_ids: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint64]:
    """Return the noise field's words at one position.

    Args:
        key: the field's key.
        sample_index: which of several samples of one prompt, >= 0.
        position: absolute position, >= 0.
        token_ids: [num] token ids, >= 0.

    Returns:
        [num] words, each uniform on 0 .. 2**64 - 1 and dependent on its own token only.
    """
    row_key = np.frombuffer(_hashed(key, _ROW, struct.pack("<2Q", sample_index, position)), dtype="<u8")
    words = token_ids.astype(np.uint64)
    scratch = np.empty(min(_CHUNK, len(words)), dtype=np.uint64)
    for start in range(0, len(words), _CHUNK):
        chunk = words[start : start + _CHUNK]
        chunk += np.uint64(1)
        chunk *= _GOLDEN
        for half in row_key:
            chunk ^= half
            _mix(chunk, scratch[: len(chunk)])
    return words


def gumbel_field_at(
    key: bytes, sample_index: int, position: int, token_ids: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return standard Gumbel noise for the given tokens of one position.

    Args:
        key: the field's key.
        sample_index: which of several samples of one prompt, >= 0.
        position: absolute position, >= 0.
        token_ids: [num] token ids, >= 0, in any order.

    Returns:
        [num] finite values; a token's value does not depend on which other tokens are asked for.

    Source: Gumbel 1954; Maddison, Tarlow, Minka 2014 (argmax of log-probability plus Gumbel noise is a sample).
    """
    return gumbel(field_words(key, sample_index, position, token_ids))


def gumbel(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Turn uniform 64-bit words into finite standard Gumbel values, by the top 52 bits of each."""
    # Half a step up keeps the uniform inside (0, 1), so that both logarithms are finite; with 53 bits the largest
    # would round to 1.
    noise = (words >> _TO_52_BITS).astype(np.float64)
    noise += 0.5
    noise *= 2.0**-52
    for _ in range(2):
        np.log(noise, out=noise)
        np.negative(noise, out=noise)
    return noise


def gumbel_field(key: bytes, sample_index: int, position: int, vocab_size: int) -> npt.NDArray[np.float64]:
    """Return the noise of one position for the whole vocabulary: [vocab_size] standard Gumbel values."""
    return gumbel_field_at(key, sample_index, position, np.arange(vocab_size, dtype=np.int64))


def _mix(words: npt.NDArray[np.uint64], scratch: npt.NDArray[np.uint64]) -> None:
    """Apply the SplitMix64 finaliser, a bijection of 64-bit words, in place."""
    for shift, factor in zip(_SHIFTS[:2], (_MIX_1, _MIX_2), strict=True):
        np.right_shift(words, shift, out=scratch)
        words ^= scratch
        words *= factor
    np.right_shift(words, _SHIFTS[2], out=scratch)
    words ^= scratch


def _hashed(key: bytes, domain: bytes, counters: bytes) -> bytes:
    """Hash counters under a key; `domain` keeps uses of one key apart."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"key of {len(key)} bytes: must have {KEY_BYTES}")
    return blake2b(counters, digest_size=KEY_BYTES, key=key, person=domain).digest()
