"""What passes of a verifier cost by their rows, and who shares them, as all sessions of the process see it. Pure.

Engines pad passes up to classes of rows, mostly powers of two, so that is how costs are kept. A class that has not been
seen is taken to cost what the next smaller one does: the policy tries it, and it is seen; those above it twice as much,
and so on, so that none is skipped.

Passes that nobody is drafted for are kept apart, for a draft worker may share memory or cores with the verifier: they
say what drafting is to be compared with.

Where sessions share passes, what messages take beside the model (`orchestrator.beside`) is added.
"""

from collections import deque
from collections.abc import Callable
from statistics import median

from orchestrator.beside import Beside
from orchestrator.company import MIN_LOAD, Company
from orchestrator.priors import Priors
from outrider.gamma import AlphaEstimator
from outrider.ids import WorkerId

MEMORY = 32
"""Passes of a class that count."""
CLASSES = (1, 2, 4, 8, 16, 32)
WIDEST = CLASSES[-1]
"""Rows of the widest pass; more rows are several passes."""
RECENT_S = 2.0
"""For how long it counts what sessions have seen of their neighbours."""
MIN_RECENT = 8
"""Rounds seen lately that say something of the neighbours."""
MAX_VERIFIERS = 64
"""Verifiers whose costs are kept."""


class CostsByVerifier:
    """The costs of every verifier that was used lately."""

    def __init__(self) -> None:
        self._costs: dict[WorkerId, PassCosts] = {}

    def of(self, verifier_id: WorkerId) -> "PassCosts":
        """Return a verifier's costs, which all its sessions add to."""
        costs = self._costs.pop(verifier_id, None) or PassCosts()
        self._costs[verifier_id] = costs
        if len(self._costs) > MAX_VERIFIERS:
            del self._costs[next(iter(self._costs))]
        return costs


class PassCosts:
    """Costs of one verifier's passes."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}
        """Of the model, by class, while somebody is drafted for."""
        self._plain: dict[int, deque[float]] = {}
        """The same while nobody is."""
        self._lately: deque[tuple[float, float, float | None]] = deque(maxlen=MEMORY)
        """When, sessions in the pass, and what a restart waited, if one ended."""
        self.alpha = AlphaEstimator(memory_tests=1000.0)
        """Of all sessions' tests."""
        self.company = Company()
        """This process's sessions of the verifier."""
        self.beside = Beside()
        """What shared passes take beside the model."""
        self.priors = Priors()
        """What earlier sessions of each sort of drafters have measured."""

    def note(self, now_s: float, load: float, waited_s: float | None, judged: tuple[int, int]) -> None:
        """Take what a session's round says to those that begin: (tokens accepted, tokens tested) is judged."""
        self._lately.append((now_s, load, waited_s))
        if judged[1]:
            self.alpha = self.alpha.observe(*judged)

    def neighbours(self, now_s: float) -> tuple[float, float | None] | None:
        """Return the sessions that shared passes lately and what restarts waited; None if little was seen."""
        seen = [(load, waited_s) for when_s, load, waited_s in self._lately if now_s - when_s <= RECENT_S]
        if len(seen) < MIN_RECENT:
            return None
        waits_s = [waited_s for _, waited_s in seen if waited_s is not None]
        return median(load for load, _ in seen), median(waits_s) if waits_s else None

    def plain_s(self, num_sessions: int) -> float | None:
        """Return the seconds from pass to pass of so many sessions, >= 1, that nobody drafts for; None: not known.

        Where none of them were seen they are to those that are drafted for as passes of other classes.
        """
        per_session = self.beside.costs[0] if num_sessions >= MIN_LOAD else 0.0
        full, rest = divmod(num_sessions, WIDEST)
        sizes = [WIDEST] * full + [_class_of(rest)] * bool(rest)
        if all(size in self._plain for size in sizes):
            return sum(median(self._plain[size]) for size in sizes) + num_sessions * per_session
        drafted_s, both = self.by_rows(), self._plain.keys() & self._seconds.keys()
        if drafted_s is None or not both:
            return None
        share = min(1.0, median(median(self._plain[size]) / median(self._seconds[size]) for size in both))
        return share * drafted_s(num_sessions) + num_sessions * per_session

    def observe(self, num_rows: int, seconds: float, *, is_plain: bool = False) -> None:
        """Take the figures of a pass; those of no pass change nothing.

        Args:
            num_rows: of all sessions.
            seconds: of the model.
            is_plain: whether nobody drafts for any of the sessions.
        """
        if num_rows > 0 and seconds > 0.0:
            seen = self._plain if is_plain else self._seconds
            seen.setdefault(_class_of(num_rows), deque(maxlen=MEMORY)).append(seconds)

    @property
    def is_empty(self) -> bool:
        """Whether no pass was measured, or none that told its rows."""
        return not self._seconds and not self._plain

    def by_rows(self) -> Callable[[int], float] | None:
        """Return the seconds of passes by their rows, >= 1, of all sessions; None: nothing was measured."""
        known = self._rising()
        if not known:
            return None
        of_class = {size: _of_class(known, size) for size in CLASSES}
        widest_s = of_class[WIDEST]

        def pass_s(num_rows: int) -> float:
            full, rest = divmod(num_rows, WIDEST)
            return full * widest_s + (of_class[_class_of(rest)] if rest else 0.0)

        return pass_s

    def by_own_rows(self, load: float, max_rows: int) -> tuple[float, ...]:
        """Return the seconds of passes with 1, 2, ... max_rows rows of a session; empty before anything was measured.

        Args:
            load: sessions that share a pass, >= 1; all of them are taken to do what the session does, for rows that
                one session gains by are paid for by all.
            max_rows: >= 1.
        """
        pass_s = self.by_rows()
        if pass_s is None:
            return ()
        per_session, per_draft = self.beside.costs if load >= MIN_LOAD else (0.0, 0.0)
        beside_s = [load * per_session, *[load * (per_session + per_draft)] * (max_rows - 1)]
        return tuple(pass_s(round(load * rows)) + beside_s[rows - 1] for rows in range(1, max_rows + 1))

    def divide(self, num_sessions: int, now_s: float) -> None:
        """Divide the rows of passes between this process's sessions again, if it is time to and anything was measured.

        Args:
            num_sessions: that shared a pass, as the one that asks has seen it; where passes tell it anew, or more
                have begun by now, that counts.
            now_s: of a clock that all sessions share.
        """
        pass_s = self.by_rows() if self.company.is_due(now_s) else None
        if pass_s is None:
            return
        lately = self.neighbours(now_s)
        num_sessions = max(len(self.company), num_sessions if lately is None else round(lately[0]))
        per_session, per_draft = self.beside.costs
        beside_s, plain_s = num_sessions * per_session, self.plain_s(num_sessions)
        self.company.divide(num_sessions, lambda rows: pass_s(rows) + beside_s, now_s, per_draft, plain_s)

    def _rising(self) -> list[tuple[int, float]]:
        """Return the classes seen and their medians, none lower than a smaller class's."""
        known: list[tuple[int, float]] = []
        seen = {**self._plain, **self._seconds}
        for size in sorted(seen):
            floor = known[-1][1] if known else 0.0
            known.append((size, max(floor, median(seen[size]))))
        return known


def _of_class(known: list[tuple[int, float]], size: int) -> float:
    seen, seconds = next((each for each in reversed(known) if each[0] <= size), known[0])
    guessed = seconds * max(1.0, size / (2 * seen))
    return min([guessed, *(larger_s for larger, larger_s in known if larger > size)])


def _class_of(num_rows: int) -> int:
    """Return the power of two that a pass is padded to."""
    return min(WIDEST, 1 << (num_rows - 1).bit_length())
