"""The line for places: who of those that wait goes next, and who is refused. Pure; times come in.

Fair queueing over keys: every generation that a key asks for stands one turn behind the key's last one (half a turn for
a key of weight 2), and never before those that were served already. So keys share the places in the ratio of their
weights, however many generations each asks for, and a key that has asked for nothing lately is served next. Whoever is
turned away or gives up has had no turn: asking again costs a key nothing.

A priority moves a generation by `PRIORITY_TURNS` turns of its key. That is a head start and no more: whoever asks
often, at whatever priority, falls behind by a turn each time, so nobody waits for ever.

Where the line is full the last one in it goes, be it the new one or one that waits: a key that fills the line by itself
loses its own.
"""

from bisect import insort
from dataclasses import dataclass, field

PRIORITY_TURNS = 4.0
"""Turns that a step of priority is worth."""
MEMORY = 0.1
"""Weight of the latest generation in what is known of how long they hold a place."""


@dataclass(order=True, slots=True)
class Waiter:
    """A generation in line."""

    turn: float
    """When it is its turn; lower ones go first."""
    number: int
    """Of its arrival: among equals the first to come goes first."""
    key_id: str = field(compare=False)
    start: float = field(compare=False)
    """Its key's turn without the priority: what the line has come to once it is served."""
    end: float = field(compare=False)
    """Where the key's next one starts."""


class Line:
    """Those that wait, and what is known of how fast places become free."""

    def __init__(self, num_places: int, max_waiting: int) -> None:
        """Begin empty.

        Args:
            num_places: generations at one time, >= 1.
            max_waiting: most that wait, >= 0.
        """
        self._num_places, self._max_waiting = num_places, max_waiting
        self._waiting: list[Waiter] = []
        self._served: dict[str, float] = {}
        """By key: the end of its last generation that was served."""
        self._now = 0.0
        """Turn of the generation that was served last."""
        self._count = 0
        self._held_s: float | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def join(self, key_id: str, weight: int, priority: int) -> tuple[Waiter, Waiter | None]:
        """Stand in line; return where, and who has to leave it because it is full: perhaps the same.

        Args:
            key_id: whose.
            weight: share of the key, >= 1.
            priority: higher ones go first.
        """
        if not self._waiting:
            # Where nobody had to wait, nobody has taken anything from anybody.
            self._served.clear()
        waiting = (each.end for each in self._waiting if each.key_id == key_id)
        start = max(self._now, self._served.get(key_id, 0.0), *waiting)
        turn = 1.0 / weight
        self._count += 1
        waiter = Waiter(start + turn - priority * PRIORITY_TURNS * turn, self._count, key_id, start, start + turn)
        insort(self._waiting, waiter)
        return waiter, self._waiting.pop() if len(self._waiting) > self._max_waiting else None

    def leave(self, waiter: Waiter) -> None:
        """Give up; idempotent."""
        if waiter in self._waiting:
            self._waiting.remove(waiter)

    def next(self) -> Waiter | None:
        """Take who is next out of the line; None: nobody waits."""
        if not self._waiting:
            return None
        waiter = self._waiting.pop(0)
        self.serve(waiter)
        return waiter

    def serve(self, waiter: Waiter) -> None:
        """It has its place: the line has come to its turn."""
        self._now = max(self._now, waiter.start)
        self._served[waiter.key_id] = max(waiter.end, self._served.get(waiter.key_id, 0.0))

    def held(self, seconds: float) -> None:
        """A place was held for so long."""
        before = seconds if self._held_s is None else self._held_s
        self._held_s = before + MEMORY * (seconds - before)

    def wait_s(self, waiter: Waiter | None = None) -> float:
        """Return the wait to expect for one in line, or for one behind all; 0 before anything is known."""
        ahead = self._waiting.index(waiter) if waiter in self._waiting else len(self._waiting)
        return 0.0 if self._held_s is None else (ahead + 1) * self._held_s / self._num_places
