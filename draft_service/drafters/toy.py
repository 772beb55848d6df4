"""A toy draft model whose tokens agree with its toy target's at a chosen rate."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from outrider.model.toy import ToyLanguage


@dataclass(frozen=True)
class NoisyLanguage(ToyLanguage):
    """A toy language that, at some places, takes every token for the one after it.

    Its likeliest token is the target's at a fraction `agreement` of places, and the one after it at the others: 1 is a
    perfect drafter, 0 one that is always wrong at temperature 0. A place is a context and its length, so the same text
    meets the same noise however often it is drafted.
    """

    agreement: float = 1.0
    """0 .. 1."""
    noise_seed: int = 0
    """Which places are wrong."""

    def probs(self, context: Sequence[int]) -> Tensor:
        """Return the law of the token after `context`: [vocab_size] float64, sums to 1."""
        law = super().probs(context)
        place = repr((self.noise_seed, len(context), tuple(context[-max(1, self.order) :])))
        word = int.from_bytes(hashlib.blake2b(place.encode(), digest_size=8).digest(), "little")
        return law if word < self.agreement * 2.0**64 else law.roll(1)


def noisy(target: ToyLanguage, agreement: float, noise_seed: int = 0) -> NoisyLanguage:
    """Return a draft of a toy target that agrees with it at the given rate."""
    return NoisyLanguage(
        target.vocab_size, target.seed, target.order, target.sharpness, target.table, target.never, target.blend,
        agreement=agreement, noise_seed=noise_seed,
    )  # fmt: skip
