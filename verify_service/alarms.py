"""Things to do at a later time, on the engine's thread and by its clock."""

import heapq
from collections.abc import Callable
from itertools import count


class Alarms:
    """A heap of deadlines. Nothing is ever taken back: what is late must be harmless, as a chain's old timers are."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, due_s: float, action: Callable[[], None]) -> None:
        """Have `action` done at `due_s`, seconds on the engine's clock."""
        heapq.heappush(self._heap, (due_s, next(self._numbers), action))

    def fire(self, now_s: float) -> None:
        """Do everything that is due."""
        while self._heap and self._heap[0][0] <= now_s:
            heapq.heappop(self._heap)[2]()

    def next_in(self, now_s: float) -> float | None:
        """Return the seconds until something is due, at least 0; None if nothing ever is."""
        return max(0.0, self._heap[0][0] - now_s) if self._heap else None
