"""What a client sees of one generation, and percentiles of it."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from outrider.client import Client
from outrider.generation import Chunk, Figures, Finished, GenerationRequest


@dataclass(slots=True)
class Watched:
    """One generation on the client's clock."""

    started_s: float = field(default_factory=time.perf_counter)
    times_s: list[float] = field(default_factory=list)
    """Of every chunk of tokens."""
    counts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    figures: Figures = field(default_factory=Figures)

    @property
    def first_s(self) -> float:
        """Time to the first token."""
        return self.times_s[0] - self.started_s

    @property
    def rate(self) -> float:
        """Tokens per second after the first chunk."""
        seconds = self.times_s[-1] - self.times_s[0]
        return sum(self.counts[1:]) / seconds if seconds > 0.0 else 0.0


async def watch(client: Client, request: GenerationRequest) -> Watched:
    """Run a generation to its end.

    Raises:
        OutriderError: it failed.
    """
    seen = Watched()
    async for event in client.generate(request):
        if isinstance(event, Chunk) and event.token_ids:
            seen.times_s.append(time.perf_counter())
            seen.counts.append(len(event.token_ids))
            seen.token_ids += event.token_ids
        elif isinstance(event, Finished):
            seen.figures = event.figures
    return seen


def times_per_token(times_s: Sequence[float], counts: Sequence[int]) -> list[float]:
    """Return, for every token after the first chunk, its share of the time that its chunk took."""
    shares: list[float] = []
    for (before, after), count in zip(pairwise(times_s), counts[1:], strict=True):
        shares += [(after - before) / count] * count
    return shares


def percentiles(values: Iterable[float], shares: Sequence[float] = (0.5, 0.95, 0.99)) -> list[float]:
    """Return the values that such shares of all values do not exceed; there is at least one value."""
    ordered = sorted(values)
    return [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in shares]
