"""What came of a simulation. Pure."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from orchestrator.figures import Round
from outrider.ids import TokenKind


@dataclass(slots=True)
class Told:
    """One generation as its client sees it."""

    began_s: float
    first_s: float = math.nan
    last_s: float = math.nan
    num_tokens: int = 0
    num_first: int = 0
    """Tokens that came first, all at once."""
    pause_s: float = 0.0
    """Longest time without a token, after the first."""
    moved: bool = False
    """Whether a worker or an orchestrator was lost under it."""
    done: bool = False

    def take(self, count: int, now_s: float) -> None:
        """Tokens arrive."""
        if not self.num_tokens:
            self.first_s, self.num_first = now_s, count
        else:
            self.pause_s = max(self.pause_s, now_s - self.last_s)
        self.num_tokens += count
        self.last_s = now_s

    @property
    def rate(self) -> float:
        """Tokens per second after the first ones; not a number where there is nothing to go by."""
        seconds = self.last_s - self.first_s
        return (self.num_tokens - self.num_first) / seconds if seconds > 0.0 else math.nan


@dataclass(slots=True)
class Tally:
    """Everything that is counted while a simulation runs."""

    measured_from_s: float
    tokens_by_second: Counter[int] = field(default_factory=Counter)
    tokens: int = 0
    """In the measured time."""
    counts: Counter[str] = field(default_factory=Counter)
    """Of the measured time: rounds, tested, accepted, and tokens by kind; of all of it: what happens to generations."""
    told: list[Told] = field(default_factory=list)
    """Generations that ended, or were under way at the end."""
    finished: int = 0

    def deliver(self, told: Told, count: int, now_s: float) -> None:
        """A client takes tokens."""
        told.take(count, now_s)
        self.tokens_by_second[int(now_s)] += count
        if now_s >= self.measured_from_s:
            self.tokens += count

    def note(self, committed: Round, now_s: float) -> None:
        """A verdict was committed."""
        if now_s < self.measured_from_s:
            return
        counts = self.counts
        counts["rounds"] += bool(committed.kinds)
        counts["tested"] += committed.num_tested
        counts["accepted"] += committed.num_accepted
        counts["plain"] += committed.kinds.count(TokenKind.PLAIN)
        counts["committed"] += len(committed.kinds)


@dataclass(frozen=True, slots=True)
class Summary:
    """The answer."""

    mode: str
    """How it was found: "machines", or "machines, 1 of N" where a part stands for the whole."""
    sessions: int
    verifiers: int
    drafts: int
    tokens_per_s: float
    """Of all sessions, in the measured time."""
    session_tokens_per_s: float
    """Median over generations, of their tokens behind the first ones."""
    first_token_s: float
    """Median."""
    first_token_p99_s: float
    tokens_per_round: float
    alpha: float
    """Accepted of tested."""
    undrafted: float
    """Share of tokens that nobody had drafted."""
    verifier_busy: float
    """Share of the measured time in which a verifier's model ran, mean."""
    draft_busy: float
    orchestrator_busy: float
    finished: int
    """Generations that were delivered whole."""
    failed: int
    """That gave up with an error and were begun again."""
    moved: int
    """Sessions that lost a worker, or their orchestrator, and went on elsewhere."""
    pause_s: float
    """Longest pause of those, median."""
    pause_p99_s: float
    simulated_s: float
    events: int
    wall_s: float
    """Real seconds that the simulation took."""
    tokens_by_second: tuple[int, ...]
    """Delivered in each simulated second, from the first on."""

    def as_data(self) -> dict[str, Any]:
        """Return it as plain values; what is not a number is null."""
        return {name: _plain(getattr(self, name)) for name in self.__slots__}


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value


def middle(values: Iterable[float]) -> float:
    """Return the median of what is a number; not a number if nothing is."""
    known = [value for value in values if not math.isnan(value)]
    return median(known) if known else math.nan


def upper(values: Iterable[float], share: float = 0.99) -> float:
    """Return the value that a share of all does not exceed; not a number if there is none."""
    known = sorted(value for value in values if not math.isnan(value))
    return known[min(len(known) - 1, int(share * len(known)))] if known else math.nan


def mean(values: Sequence[float]) -> float:
    """Return the mean; 0 of nothing."""
    return fmean(values) if values else 0.0
