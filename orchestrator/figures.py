"""How a generation went, counted from the verdicts that were committed and from what the drafters report. Pure.

Only what was committed counts: a run that the commit function cut short counts up to its last committed token, and a
late verdict not at all. A proposal that was never tested counts as drafted, never as tested or rejected.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from outrider.alignment import num_agreeing
from outrider.generation import Figures
from outrider.ids import Epoch, Generation, TokenKind
from outrider.messages import DraftStatus, Verdict, VerdictCause

MAX_POSITIONS = 4096
"""Distances from the start of an epoch that are counted one by one."""


@dataclass(frozen=True, slots=True)
class Round:
    """One committed verdict, as the round log has it."""

    epoch: Epoch
    next_epoch: Epoch
    cause: str
    kinds: tuple[TokenKind, ...]
    """Of the tokens that were committed."""
    num_tested: int
    num_accepted: int
    verify_s: float
    queue_s: float
    num_rows: int = 0
    """Rows of its passes, those of other sessions included."""
    num_sessions: int = 0
    """Sessions that shared them; 0: not known."""
    from_ahead: bool = False
    """Whether its figures are those of a pass that began before what was tested arrived."""

    @property
    def rolled_back(self) -> bool:
        """Whether its epoch ended with a rejection or a reset."""
        if self.cause in (VerdictCause.RESET, VerdictCause.QUARANTINED):
            return True
        return self.num_accepted < self.num_tested or TokenKind.RECOVERED in self.kinds


def round_of(verdict: Verdict, skipped: int, committed: int) -> Round:
    """Return what of a verdict was committed.

    Args:
        verdict: as it arrived.
        skipped: leading tokens that were known already.
        committed: tokens after them that were taken; fewer than the rest if the generation ended in the run.
    """
    end = skipped + committed
    kinds = verdict.kinds[skipped:end]
    accepted, tested = kinds.count(TokenKind.ACCEPTED), verdict.num_tested
    if skipped or end < len(verdict.token_ids):
        tested = accepted + kinds.count(TokenKind.RECOVERED)
    return Round(
        verdict.epoch, verdict.next_epoch, verdict.cause, kinds, tested, accepted, verdict.verify_s, verdict.queue_s,
        verdict.num_rows, verdict.num_sessions, verdict.from_ahead,
    )  # fmt: skip


class Meter:
    """Accumulates the figures of one generation."""

    def __init__(self, started_s: float) -> None:
        """Start counting.

        Args:
            started_s: when the request arrived, on the clock of all later times.
        """
        self._started_s = started_s
        self._first_s = self._last_s = 0.0
        self._num_tokens = 0
        self._counts = dict.fromkeys(("rounds", "rollbacks", "tested", "accepted", "plain", "recovered", "bonus"), 0)
        self._tested: list[int] = []
        self._accepted: list[int] = []
        self._depth = 0
        self._epoch = Epoch()
        self._times = {"queue": 0.0, "verify": 0.0, "network": 0.0, "commit": 0.0}
        self._drafted: dict[Generation, DraftStatus] = {}
        self._fingerprints: list[str] = []
        self._streams: dict[Generation, tuple[int, int]] = {}
        """Late proposals, and voids of the guarantee, of each stream to a verifier."""
        self.speculation_off = ""
        self.drafter = ""
        self.num_cached: int | None = None
        """Tokens of the log whose KV the first verifier found; None before its first tokens."""
        self.distance = 0
        """Of the last round's first test from the start of its epoch."""

    @property
    def num_tokens(self) -> int:
        """Tokens committed so far."""
        return self._num_tokens

    def add_round(self, committed: Round, now_s: float) -> int:
        """Count a committed verdict; return how far from the start of its epoch its first test was."""
        counts, kinds = self._counts, committed.kinds
        counts["rounds"] += bool(kinds)
        counts["rollbacks"] += committed.rolled_back
        counts["tested"] += committed.num_tested
        counts["accepted"] += committed.num_accepted
        counts["plain"] += kinds.count(TokenKind.PLAIN)
        counts["recovered"] += kinds.count(TokenKind.RECOVERED)
        counts["bonus"] += kinds.count(TokenKind.BONUS)
        self._times["queue"] += committed.queue_s
        self._times["verify"] += committed.verify_s
        self.distance = self._add_positions(committed)
        if kinds:
            self._first_s = self._first_s or now_s
            self._last_s = now_s
            self._num_tokens += len(kinds)
        return self.distance

    def _add_positions(self, committed: Round) -> int:
        """Count tests and acceptances by their distance from the start of their epoch; return the first one's."""
        if committed.epoch != self._epoch:
            self._epoch, self._depth = committed.epoch, 0
        first = self._depth
        for index in range(committed.num_tested):
            position = min(self._depth + index, MAX_POSITIONS - 1)
            if position == len(self._tested):
                self._tested.append(0)
                self._accepted.append(0)
            self._tested[position] += 1
            self._accepted[position] += index < committed.num_accepted
        self._depth += committed.num_accepted
        return first

    def add_status(self, generation: Generation, status: DraftStatus) -> int:
        """Note a drafter's latest report, whose counts are totals of its session; return what it drafted since."""
        before = self._drafted.get(generation, DraftStatus()).num_drafted
        self._drafted[generation] = status
        self.drafter = status.drafter or self.drafter
        return max(0, status.num_drafted - before)

    def add_engine(self, fingerprint: str) -> None:
        """Note the engine that verifies from now on."""
        if fingerprint and self._fingerprints[-1:] != [fingerprint]:
            self._fingerprints.append(fingerprint)

    def add_totals(self, opened: Generation, verdict: Verdict) -> int:
        """Note what a verdict says of all its stream so far; return how often more the guarantee was void.

        Args:
            opened: generation in which the stream was opened; each begins at nought.
            verdict: the latest one.
        """
        if self.num_cached is None and verdict.token_ids:
            self.num_cached = verdict.num_cached
        num_stale, num_void = self._streams.get(opened, (0, 0))
        total = max(num_stale, verdict.num_stale), max(num_void, verdict.guarantee_void)
        self._streams[opened] = total
        return total[1] - num_void

    def add_time(self, name: str, seconds: float) -> None:
        """Add to the time of "network" or "commit"."""
        self._times[name] += max(0.0, seconds)

    def figures(self, now_s: float) -> Figures:
        """Return everything counted so far."""
        counts, tokens = self._counts, self._num_tokens
        statuses = self._drafted.values()
        reported = sum(status.num_drafted for status in statuses)
        # Reports come at intervals: what was tested since the last one was drafted too, and took as long per token.
        num_drafted = max(counts["tested"], reported)
        draft_s = sum(status.num_drafted * status.draft_s_per_token for status in statuses)
        return Figures(
            num_rounds=counts["rounds"],
            num_rollbacks=counts["rollbacks"],
            num_drafted=num_drafted,
            num_tested=counts["tested"],
            num_accepted=counts["accepted"],
            tested_per_position=tuple(self._tested),
            accepted_per_position=tuple(self._accepted),
            num_stale=sum(num_stale for num_stale, _ in self._streams.values()),
            num_plain=counts["plain"],
            num_recovered=counts["recovered"],
            num_bonus=counts["bonus"],
            tokens_per_second=_ratio(tokens - 1, self._last_s - self._first_s),
            tokens_per_round=_ratio(tokens, counts["rounds"]),
            draft_s=draft_s * _ratio(num_drafted, reported),
            network_s=self._times["network"],
            queue_s=self._times["queue"],
            verify_s=self._times["verify"],
            commit_s=self._times["commit"],
            time_to_first_token_s=max(0.0, self._first_s - self._started_s) if tokens else 0.0,
            total_s=max(0.0, now_s - self._started_s),
            speculation_off=self.speculation_off,
            guarantee_void=sum(num_void for _, num_void in self._streams.values()),
            engine_fingerprint=" -> ".join(self._fingerprints),
            drafter=self.drafter,
        )


def came_true(figures: Figures, prediction: Sequence[int], said: Sequence[int]) -> Figures:
    """Return figures with how much of a client's prediction came true; may take long for a long one."""
    accepted = num_agreeing(prediction, said)
    rejected = len(prediction) - accepted
    return replace(figures, accepted_prediction_tokens=accepted, rejected_prediction_tokens=rejected)


def in_words(figures: Figures) -> str:
    """Return all figures but those that are nought, by name; for the log."""
    return ", ".join(f"{name} {_short(value)}" for name, value in asdict(figures).items() if value)


def _short(value: str | float | tuple[int, ...]) -> str:
    match value:
        case tuple():
            return " ".join(map(str, value))
        case float():
            return f"{value:.3f}"
        case _:
            return str(value)


def _ratio(part: float, whole: float) -> float:
    return part / whole if part > 0 and whole > 0 else 0.0
