"""Which timer a chain has running: at most one, replaced or dropped when what it guards changes."""

from verify_service.events import StartTimer, TimerKind


class Timer:
    """The timer of a chain that waits for its drafter."""

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
