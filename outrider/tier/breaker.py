"""Leaves a server alone that keeps failing, so that nobody waits for it. Pure; the time comes in from outside."""

from dataclasses import dataclass

FAILURES = 3
"""In a row, until the breaker opens."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


@dataclass(slots=True)
class Breaker:
    """Closed while all is well; open for a pause after failures in a row, longer after every failed try."""

    _failures: int = 0
    _until_s: float = float("-inf")

    def is_open(self, now_s: float) -> bool:
        """Whether the server is to be left alone; after the pause one caller after the other may try again."""
        return now_s < self._until_s

    def succeeded(self) -> None:
        """The server answered."""
        self._failures, self._until_s = 0, float("-inf")

    def failed(self, now_s: float) -> None:
        """The server did not answer, or not in time."""
        self._failures += 1
        if self._failures >= FAILURES:
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (self._failures - FAILURES))
            self._until_s = now_s + pause_s
