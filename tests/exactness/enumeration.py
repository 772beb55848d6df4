"""Exact laws by running real code through every possible outcome of its randomness.

`enumerate_law` calls a function again and again, each time with a source that forces another sequence of outcomes,
depth first, and adds up the probability of each result. Whatever takes its randomness from a source of this kind
can be examined: a rule, a whole round, or state machines with proposals in flight.

    law = enumerate_law(lambda source: decode(source))
    assert total_variation(law, sequential_law(next_probs, length)) < 1e-12
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

from torch import Tensor

from outrider.messages import COUNT_TOTAL, SparseRow
from outrider.noise import Purpose
from outrider.sampling import draw_from_counts
from outrider.verification.rule import passes
from outrider.verification.siblings import Left, draw_sibling

T = TypeVar("T")
Law = dict[tuple[int, ...], float]
Coin = Callable[[float, float, float], bool]


class EnumeratingSource:
    """A source of randomness whose outcomes are dictated; it satisfies `verification.Draws`.

    `weight` is the probability of the outcomes so far. `grid` = N makes a coin u one of the N values 0, 1/N … and
    asks `coin` about each (exact where the acceptance probabilities are multiples of 1/N); without it the
    probability is min(1, p/q).
    """

    def __init__(self, script: Sequence[int] = (), grid: int = 0, coin: Coin = passes) -> None:
        self.path = list(script)
        self.widths: list[int] = []
        self.weight = 1.0
        self.grid = grid
        self.coin = coin

    def choose(self, options: Sequence[tuple[T, float]]) -> T:
        """Return one of the (value, probability) options; those of probability 0 do not exist."""
        possible = [(value, weight) for value, weight in options if weight > 0.0]
        depth = len(self.widths)
        self.widths.append(len(possible))
        if depth == len(self.path):
            self.path.append(0)
        value, weight = possible[self.path[depth]]
        self.weight *= weight
        return value

    def accept(self, target_prob: float, draft_prob: float, position: int) -> bool:
        """Try both sides of the coin."""
        del position
        if self.grid:
            hits = sum(self.coin(step / self.grid, target_prob, draft_prob) for step in range(self.grid))
            chance = hits / self.grid
        else:
            chance = min(1.0, target_prob / draft_prob)
        return self.choose([(True, chance), (False, 1.0 - chance)])

    def pick(self, weights: Tensor, purpose: Purpose, position: int) -> int:
        """Try every index that has weight."""
        del purpose, position
        values = weights.double().tolist()
        total = sum(values)
        return self.choose([(index, value / total) for index, value in enumerate(values)])

    def draw_counts(self, row: SparseRow) -> int:
        """Try every token of a draft row, through the real integer draw."""
        starts = accumulate(row.counts, initial=0)
        words = [(start << 48, count / COUNT_TOTAL) for start, count in zip(starts, row.counts, strict=False)]
        return draw_from_counts(row, self.choose(words))

    def draw_sibling(self, row: SparseRow, before: Sequence[int]) -> int | None:
        """Try every token that is left of a draft row, through the real integer draw."""
        left = Left.of(row, before)
        if not left.counts:
            return draw_sibling(row, before, lambda _: 0)
        starts = accumulate(left.counts, initial=0)
        options = [(slot, count / left.total) for slot, count in zip(starts, left.counts, strict=False)]
        word = word_of(self.choose(options), left.total)
        return draw_sibling(row, before, lambda _: word)

    def next_script(self) -> list[int] | None:
        """Return the outcomes to dictate next, or None when all have been tried."""
        script = self.path[: len(self.widths)]
        while script and script[-1] + 1 == self.widths[len(script) - 1]:
            script.pop()
        if not script:
            return None
        script[-1] += 1
        return script


def word_of(slot: int, total: int) -> int:
    """Return the smallest word that a draw below `total` takes and turns into `slot`."""
    return -(-((slot << 64) + (1 << 64) % total) // total)


def enumerate_law(
    run: Callable[[EnumeratingSource], tuple[int, ...]],
    grid: int = 0,
    coin: Coin = passes,
    max_paths: int = 300_000,
) -> Law:
    """Return the exact law of what `run` returns.

    Args:
        run: takes all of its randomness from the source it is given, and is otherwise deterministic.
        grid: see `EnumeratingSource`.
        coin: see `EnumeratingSource`.
        max_paths: more outcomes than this are an error, so that a test cannot silently take hours.
    """
    law: Law = defaultdict(float)
    script: list[int] | None = []
    for _ in range(max_paths):
        source = EnumeratingSource(script or [], grid, coin)
        law[run(source)] += source.weight
        script = source.next_script()
        if script is None:
            break
    else:
        raise RuntimeError(f"more than {max_paths} outcomes")
    total = sum(law.values())
    if abs(total - 1.0) > 1e-9:
        raise RuntimeError(f"probabilities sum to {total}: the code under test is not deterministic given its draws")
    return dict(law)


def sequential_law(next_probs: Callable[[tuple[int, ...]], Sequence[float]], length: int) -> Law:
    """Return the law of the first `length` tokens of plain decoding, from the table of next-token probabilities."""
    law: Law = {(): 1.0}
    for _ in range(length):
        law = {
            (*prefix, token): mass * prob
            for prefix, mass in law.items()
            for token, prob in enumerate(next_probs(prefix))
            if prob > 0.0
        }
    return law


def total_variation(law: Mapping[tuple[int, ...], float], other: Mapping[tuple[int, ...], float]) -> float:
    """Return half the sum of absolute differences."""
    return sum(abs(law.get(key, 0.0) - other.get(key, 0.0)) for key in {*law, *other}) / 2.0
