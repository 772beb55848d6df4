"""Texts to train on: token ids of many conversations, one after another, in one `.npz` file.

tokens          uint16 or wider, all texts, one after another
offsets         int64, n + 1: text i is tokens[offsets[i]:offsets[i + 1]]
prompt_lengths  int32, n: its first so many tokens are the prompt, which nobody drafts
temperature     float32, n: of the answer; 0 is greedy
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from outrider.errors import InvalidRequest

Ints = NDArray[np.int64]
ARRAYS = ("tokens", "offsets", "prompt_lengths", "temperature")
MIN_ANSWER = 3
"""Tokens of an answer: a draft's first guess is the second token, and there must be a third to see one chain."""


@dataclass(frozen=True, slots=True)
class Texts:
    """Many texts."""

    tokens: NDArray[Any]
    """[total], of an integer type."""
    offsets: Ints
    """[n + 1]"""
    prompt_lengths: Ints
    """[n]"""
    temperature: NDArray[np.float32]
    """[n]"""

    def __len__(self) -> int:
        """Return how many."""
        return len(self.prompt_lengths)

    @property
    def lengths(self) -> Ints:
        """Tokens of each text, [n]."""
        return np.diff(self.offsets)

    def text(self, number: int | np.integer[Any]) -> Ints:
        """Return one text's tokens."""
        return self.tokens[self.offsets[number] : self.offsets[number + 1]].astype(np.int64)

    def digest(self) -> str:
        """Return what tells these texts from others."""
        parts = (self.tokens.astype(np.int32), self.offsets, self.prompt_lengths)
        return hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in parts)).hexdigest()


@dataclass(frozen=True, slots=True)
class Split:
    """Numbers of texts by what they are for."""

    held_out: Ints
    training: Ints


def texts_of(parts: list[tuple[list[int], int, float]], vocab_size: int) -> Texts:
    """Put texts together.

    Args:
        parts: Tokens, prompt length and temperature of each.
        vocab_size: Ids are below it; decides how wide an id is kept.
    """
    lengths = np.array([len(tokens) for tokens, _, _ in parts], dtype=np.int64)
    kept = np.uint16 if vocab_size <= 1 << 16 else np.int32
    tokens = np.concatenate([np.array(tokens, dtype=kept) for tokens, _, _ in parts]) if parts else np.zeros(0, kept)
    return Texts(
        tokens,
        np.concatenate([np.zeros(1, np.int64), lengths.cumsum()]),
        np.array([prompt for _, prompt, _ in parts], dtype=np.int64),
        np.array([temperature for _, _, temperature in parts], dtype=np.float32),
    )


def joined_texts(parts: Sequence[Texts]) -> Texts:
    """Return the texts of several files, one after another.

    Args:
        parts: At least one.
    """
    lengths = np.concatenate([part.lengths for part in parts])
    return Texts(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([np.zeros(1, np.int64), lengths.cumsum()]),
        np.concatenate([part.prompt_lengths for part in parts]),
        np.concatenate([part.temperature for part in parts]),
    )


def write_texts(path: Path, texts: Texts) -> None:
    """Write a file that `read_texts` reads; an unfinished one never has its name."""
    part = path.with_name(path.name + ".part.npz")
    np.savez_compressed(
        part,
        tokens=texts.tokens,
        offsets=texts.offsets,
        prompt_lengths=texts.prompt_lengths.astype(np.int32),
        temperature=texts.temperature,
    )
    part.replace(path)


def read_texts(path: Path, vocab_size: int, max_len: int) -> Texts:
    """Read texts, cut them to a length, and leave out those without an answer then.

    Args:
        path: An `.npz` file.
        vocab_size: Every id is below it.
        max_len: Most tokens of a text.

    Raises:
        InvalidRequest: The file cannot be read, or an array is missing, of a wrong form or out of range; says which.
    """
    arrays = _arrays(path)
    tokens, offsets, prompts, temperature = (arrays[name] for name in ARRAYS)
    count = len(prompts)
    _check(offsets.shape == (count + 1,), "offsets", offsets.shape, f"({count + 1},), one more than prompt_lengths")
    steps = np.diff(offsets)
    falling = int(offsets[np.argmin(steps) + 1]) if count and steps.min() <= 0 else int(offsets[-1])
    rising = bool((steps > 0).all()) and (offsets[0], offsets[-1]) == (0, len(tokens))
    _check(rising, "offsets", falling, f"rising from 0 to the number of tokens, {len(tokens)}")
    _check(temperature.shape == (count,), "temperature", temperature.shape, f"({count},)")
    wrong = np.flatnonzero((prompts < 1) | (prompts > steps))
    bad = int(prompts[wrong[0]]) if len(wrong) else 1
    _check(not len(wrong), "prompt_lengths", bad, "at least 1 and at most the text's length")
    largest, smallest = (int(tokens.max()), int(tokens.min())) if len(tokens) else (0, 0)
    bad = smallest if smallest < 0 else largest
    _check(smallest >= 0 and largest < vocab_size, "tokens", bad, f"ids in [0, {vocab_size}), the target's")
    texts = Texts(tokens, offsets.astype(np.int64), prompts.astype(np.int64), temperature.astype(np.float32))
    return _shortened(texts, max_len, vocab_size)


def split(texts: Texts, seed: int, share: float = 0.05) -> Split:
    """Set texts aside that nothing is trained on or chosen by.

    Args:
        texts: At least two.
        seed: Of the choice.
        share: Of all texts; at least one is set aside.

    Raises:
        InvalidRequest: There are fewer than two texts.
    """
    _check(len(texts) >= 2, "texts", len(texts), "at least 2 with an answer: one to train on, one to measure with")
    order = np.random.default_rng(seed).permutation(len(texts))
    count = max(1, round(share * len(texts)))
    return Split(order[:count], order[count:])


def _arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of a file; see `read_texts`."""
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {name: file[name] for name in ARRAYS if name in file.files}
    except (OSError, ValueError, BadZipFile, AttributeError) as error:
        raise InvalidRequest("data", str(path), f"an .npz file that can be read ({error})") from error
    for name in ARRAYS:
        _check(name in found, name, "missing", "an array of the file; see outrider.training.texts")
        wanted = np.floating if name == "temperature" else np.integer
        array = found[name]
        _check(array.ndim == 1 and np.issubdtype(array.dtype, wanted), name, array.dtype, "one dimension of numbers")
    return found


def _shortened(texts: Texts, max_len: int, vocab_size: int) -> Texts:
    """Cut texts to a length; those whose answer is too short then are left out."""
    fitting = np.minimum(texts.lengths, max_len) - texts.prompt_lengths >= MIN_ANSWER
    if fitting.all() and texts.lengths.max(initial=0) <= max_len:
        return texts
    return texts_of(
        [
            (texts.text(number)[:max_len].tolist(), int(texts.prompt_lengths[number]), float(texts.temperature[number]))
            for number in np.flatnonzero(fitting)
        ],
        vocab_size,
    )


def _check(holds: bool, array: str, value: object, allowed: str) -> None:
    if not holds:
        raise InvalidRequest(f"data.{array}", value, allowed)
