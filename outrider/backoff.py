"""Pauses between tries: each about twice as long as the one before, with chance in it.

Chance, so that many that failed together do not come back together.
"""

import random
from dataclasses import dataclass, field


@dataclass(slots=True)
class Backoff:
    """The pauses of one series of tries."""

    first_s: float
    longest_s: float
    lot: random.Random = field(default_factory=random.Random)
    _next_s: float = field(init=False)

    def __post_init__(self) -> None:
        """Begin with the first."""
        self.reset()

    def next_s(self) -> float:
        """Return the next pause, between half of its nominal length and all of it."""
        pause_s, self._next_s = self._next_s, min(self.longest_s, 2 * self._next_s)
        return pause_s * self.lot.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Begin again: a try has worked."""
        self._next_s = self.first_s
