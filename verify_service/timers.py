"""How long a chain waits for its drafter: which timer it has running, and when it goes on plain."""

from outrider.ids import Epoch
from outrider.messages import VerdictCause
from verify_service.events import StartTimer, TimerKind

MAX_EXPIRIES = 3
"""Patience running out so often in a row stops the waiting until a drafter is attached again."""


class Timer:
    """The timer of a chain that waits for its drafter: at most one, replaced or dropped when what it guards changes."""

    def __init__(self) -> None:
        """Have none running."""
        self.running: tuple[TimerKind, int] | None = None
        """Kind and number."""
        self._count = 0

    def need(self, kind: TimerKind | None) -> StartTimer | None:
        """Keep a timer of this kind running, or none; return what starts a new one if there is none yet."""
        if kind is None:
            self.running = None
        elif self.running is None or self.running[0] is not kind:
            self._count += 1
            self.running = (kind, self._count)
            return StartTimer(kind, self._count)
        return None

    def expire(self, number: int) -> TimerKind | None:
        """Stop the timer of this number and return its kind; None if it is not the one that runs."""
        if self.running is None or self.running[1] != number:
            return None
        kind, self.running = self.running[0], None
        return kind


class Patience:
    """A chain's patience with the attached drafter, from the epoch on in which that was attached."""

    def __init__(self, epoch: Epoch) -> None:
        """Wait from now on."""
        self.is_due = False
        """Whether it has run out since a token came: the next one is drawn plain."""
        self.plain_until = 0
        """Length before which nothing is waited for, as the drafter has said that nothing will come."""
        self.plain_since = epoch
        """First epoch of the unbroken row of epochs that ended in plain tokens, the present one included."""
        self._expiries = 0

    def is_over(self, length: int) -> bool:
        """Whether the token behind so many is not waited for."""
        return self.is_due or length < self.plain_until or self._expiries >= MAX_EXPIRIES

    @property
    def cause(self) -> str:
        """Why a token is drawn plain."""
        return VerdictCause.PATIENCE if self.is_due else VerdictCause.PLAIN

    def expire(self) -> None:
        """It has run out."""
        self.is_due = True
        self._expiries += 1

    def renew(self) -> None:
        """The drafter has spoken."""
        self._expiries = 0

    def begin(self, epoch: Epoch, *, plain: bool) -> None:
        """An epoch begins; `plain` says whether the one before it ended in a plain token."""
        self.is_due = False
        if not plain:
            self.plain_until, self.plain_since = 0, epoch
