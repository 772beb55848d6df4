"""Which sorts of drafters lose against plain decoding, as the sessions of this process have measured. Pure.

A sort is what operators tell apart: the label of its workers, else their kind of drafter. Each session that has
measured enough says at the end of its drafter how many times plain decoding's tokens per second it is worth:

    in use ──── LOSSES sessions in a row below LOSING ────▶ set aside
       ▲                                                       │
       └──── RETURNS probes in a row at WINNING or more ───────┘

A sort that is set aside gets one new session every `PROBE_S`, the next one at once behind a probe that won. Between the
two bounds nothing is won and nothing lost: a drafter about as fast as plain neither goes nor comes back.
It sees rates and times only, never tokens.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean

LOSSES = 6
"""Sessions in a row that agree before a sort is set aside: the texts of one or two may just be hard to guess."""
LOSING = 0.95
"""Worth less than this fraction of plain decoding is clearly below it."""
WINNING = 1.0
"""What a probe must be worth."""
RETURNS = 2
"""Probes in a row that win before a sort is in use again."""
PROBE_S = 30.0
"""Pause between two probes."""
MAX_SORTS = 64
"""Sorts that are kept in mind; the one heard of least recently is forgotten."""
MEMORY = 16
"""Sessions whose worth is remembered for people to see."""


@dataclass(slots=True)
class Standing:
    """What is known of a sort."""

    set_aside: bool = False
    num_tested: int = 0
    num_accepted: int = 0
    gains: deque[float] = field(default_factory=lambda: deque(maxlen=MEMORY))
    """What it was worth in the last sessions, in rates of plain decoding."""
    _losses: int = 0
    _wins: int = 0
    _probe_due_s: float = 0.0

    @property
    def gain(self) -> float | None:
        """What it was worth lately; None before anything was measured."""
        return fmean(self.gains) if self.gains else None

    def judge(self, gain: float, now_s: float) -> bool:
        """Take what a session measured; return whether the sort's state has changed."""
        self.gains.append(gain)
        if self.set_aside:
            self._wins = self._wins + 1 if gain >= WINNING else 0
            self._probe_due_s = now_s if self._wins else self._probe_due_s
            changed = self._wins >= RETURNS
        else:
            self._losses = self._losses + 1 if gain < LOSING else 0
            changed = self._losses >= LOSSES
        if changed:
            self.set_aside, self._losses, self._wins = not self.set_aside, 0, 0
            self._probe_due_s = now_s + PROBE_S
        return changed

    def admits(self, now_s: float) -> bool:
        """Whether a new session may be given to it: it is in use, or a probe is due."""
        return not self.set_aside or now_s >= self._probe_due_s

    def given(self, now_s: float) -> None:
        """A new session was given to it."""
        self._probe_due_s = now_s + PROBE_S


class Standings:
    """The standings of all sorts."""

    def __init__(self, on_change: Callable[[str, bool], None] = lambda _, __: None) -> None:
        """Trust all.

        Args:
            on_change: told a sort, and whether it is set aside since.
        """
        self._on_change = on_change
        self._known: dict[str, Standing] = {}

    def of(self, sort: str) -> Standing:
        """Return a sort's standing."""
        standing = self._known.pop(sort, None) or Standing()
        self._known[sort] = standing
        if len(self._known) > MAX_SORTS:
            forgotten = next(iter(self._known))
            if self._known.pop(forgotten).set_aside:
                self._on_change(forgotten, False)
        return standing

    def all(self) -> dict[str, Standing]:
        """Return the standings by sort."""
        return dict(self._known)

    def judge(self, sort: str, gain: float, now_s: float) -> None:
        """Take what a session measured: `gain` times the tokens per second of plain decoding."""
        standing = self.of(sort)
        if standing.judge(gain, now_s):
            self._on_change(sort, standing.set_aside)
