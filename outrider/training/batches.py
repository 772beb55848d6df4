"""Which texts come when, and how they are laid out.

Row i of a text is the draft's input at position i: it knows the tokens up to i + 1 and features up to i, and is to give
the law of token i + 2, which is the target's law behind position i + 1. So a text of n tokens has n - 1 rows; those
that are trained on begin at the last prompt position, where drafting begins.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from outrider.training.cache import TOP, Cache
from outrider.training.texts import Ints, Texts

_POOL = 400
"""Texts sorted by length together: more pads less, and makes batches less mixed."""


@dataclass(slots=True)
class Batch:
    """Texts side by side, padded at their ends."""

    token_ids: Tensor
    """[texts, rows + 1] int64"""
    features: Tensor
    """[texts, rows + 1, hidden]; width 0 where none are kept."""
    law_ids: Tensor
    """[texts, rows, K] int64, of the target's ids: the likeliest tokens at row + 2."""
    law_probs: Tensor
    """[texts, rows, K] float32"""
    mask: Tensor
    """[texts, rows] bool: rows whose law is known."""
    first: list[int]
    """First such row of each text; the mask is solid from there to `last`."""
    last: list[int]
    """Row behind the last such."""
    greedy: list[bool]
    """Whether the answer was written at temperature 0."""

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        return sum(self.last) + 2 * len(self.last)

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device."""
        names = ("token_ids", "features", "law_ids", "law_probs", "mask")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


def epoch_batches(texts: Texts, numbers: Ints, batch_tokens: int, seed: int) -> list[Ints]:
    """Return the batches of one pass over texts, in an order that follows from the seed alone.

    Args:
        texts: All of them.
        numbers: Which to take.
        batch_tokens: Most tokens of a batch, padding included; at least one text is taken.
        seed: Of this epoch.
    """
    rng = np.random.default_rng(seed)
    order, lengths = rng.permutation(numbers), texts.lengths
    batches: list[Ints] = []
    for at in range(0, len(order), _POOL):
        pool = order[at : at + _POOL]
        batches += _filled(pool[np.argsort(lengths[pool], kind="stable")], lengths, batch_tokens)
    return [batches[place] for place in rng.permutation(len(batches))]


def _filled(numbers: Ints, lengths: Ints, batch_tokens: int) -> Iterator[Ints]:
    """Cut texts that rise in length into batches."""
    start = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or (end + 1 - start) * int(lengths[numbers[end]]) > batch_tokens:
            yield numbers[start:end]
            start = end


def assemble(cache: Cache, texts: Texts, numbers: Ints) -> Batch:
    """Lay texts out; their hidden states and laws must be computed.

    Args:
        cache: Of the texts.
        texts: All of them.
        numbers: Which.
    """
    lengths = [int(length) for length in texts.lengths[numbers]]
    shape = (len(numbers), max(lengths) - 1)
    token_ids = torch.zeros(shape[0], shape[1] + 1, dtype=torch.int64)
    features = torch.zeros(*token_ids.shape, cache.key.hidden_size, dtype=torch.bfloat16)
    law_ids, law_probs = torch.zeros(*shape, TOP, dtype=torch.int64), torch.zeros(*shape, TOP)
    mask = torch.zeros(shape, dtype=torch.bool)
    first = [int(texts.prompt_lengths[number]) - 1 for number in numbers]
    for row, (number, length) in enumerate(zip(numbers, lengths, strict=True)):
        start = int(texts.offsets[number])
        token_ids[row, :length] = torch.from_numpy(texts.text(int(number)))
        features[row, :length] = cache.features(start, start + length)
        rows, source = slice(first[row], length - 2), slice(start + first[row] + 1, start + length - 1)
        law_ids[row, rows] = torch.from_numpy(cache.law_ids[source].astype(np.int64))
        law_probs[row, rows] = torch.from_numpy(cache.law_probs[source].astype(np.float32))
        mask[row, rows] = True
    greedy = [bool(texts.temperature[number] == 0) for number in numbers]
    return Batch(token_ids, features, law_ids, law_probs, mask, first, [length - 2 for length in lengths], greedy)
