"""Keeps lines of a log few, where a peer decides how often there is a reason for one.

Whoever may send messages may send bad ones without end; a line for each would let a peer fill the disk. Counters tell
how many there were, the lines only what they were like.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable

EVERY_S = 10.0
"""Least time between two lines of a kind."""

log = logging.getLogger(__name__)


class Sparing:
    """Lets the first line of a kind pass, and then one in a while."""

    def __init__(self, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic) -> None:
        """Let every kind pass.

        Args:
            every_s: least time between two lines of a kind.
            clock: rising seconds.
        """
        self._every_s, self._clock = every_s, clock
        self._last_s: dict[str, float] = {}
        self._left_out: Counter[str] = Counter()

    def allows(self, kind: str = "") -> bool:
        """Return whether a line may be written now, and tell how many were left out before it.

        Args:
            kind: what is told apart; never anything that a peer may choose, for every kind is remembered.
        """
        now_s = self._clock()
        if now_s - self._last_s.get(kind, -self._every_s) < self._every_s:
            self._left_out[kind] += 1
            return False
        self._last_s[kind] = now_s
        left_out = self._left_out.pop(kind, 0)
        if left_out:
            log.info("%d lines like the next one were left out", left_out)
        return True
