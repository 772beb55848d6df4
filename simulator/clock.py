"""Simulated time: things to do, in the order of their times. Pure."""

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

Action = Callable[..., None]


class Clock:
    """Time passes from one event to the next; events of one moment happen in the order in which they were set."""

    def __init__(self) -> None:
        """Start at 0 s with nothing to do."""
        self.now_s = 0.0
        self.num_events = 0
        """Done so far."""
        self._heap: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._numbers = count()

    def __call__(self) -> float:
        """Return the time, in seconds."""
        return self.now_s

    def at(self, due_s: float, action: Action, *arguments: Any) -> None:
        """Have something done at a time; one that is past means now."""
        heapq.heappush(self._heap, (max(due_s, self.now_s), next(self._numbers), action, arguments))

    def after(self, delay_s: float, action: Action, *arguments: Any) -> None:
        """Have something done later."""
        self.at(self.now_s + delay_s, action, *arguments)

    def run(self, until_s: float, done: Callable[[], bool] = lambda: False) -> None:
        """Let time pass up to `until_s`, or until `done` says so, or until nothing is left to do."""
        while self._heap and self._heap[0][0] <= until_s and not done():
            self.now_s, _, action, arguments = heapq.heappop(self._heap)
            self.num_events += 1
            action(*arguments)
