"""What earlier sessions of a drafter at a verifier have measured, as what a new one believes before it has. Pure.

How often tokens are accepted differs between texts more than chance explains, by little with some drafters and by a lot
with others. So a prior is a beta distribution: its mean is that of all sessions, and it is worth the more tests the
more alike they were. A new session makes a short trial all the same (`orchestrator.plans`).
It sees rates and times only, never tokens.
"""

from collections import OrderedDict, deque
from statistics import fmean, median

from outrider.gamma import AlphaEstimator

MEMORY = 64
"""Sessions that count."""
MIN_SESSION_TESTS = 4.0
"""A session with fewer tests says nothing of how alike sessions are."""
MAX_SESSION_TESTS = 64.0
"""More tests of one session weigh no more."""
KNOWN_TESTS = 24.0
"""So many tests, of all sessions together, make a prior of use."""
MIN_WORTH, DEFAULT_WORTH, MAX_WORTH = 2.0, 8.0, 48.0
"""Tests that a prior is worth: at least; before there are enough sessions to tell; at most."""
HOPING_SESSIONS = 8
"""Sessions without which a text may be hoped to have everything drafted."""
MIN_SESSIONS = 3
"""Sessions that tell how alike they are."""
MAX_UNTRIED = 8
"""What is believed of a drafter that nobody tries cannot change."""
MAX_SORTS = 64


class Prior:
    """What is known of one sort of drafters at one verifier."""

    def __init__(self) -> None:
        """Know nothing."""
        self._sessions: deque[tuple[float, float]] = deque(maxlen=MEMORY)
        """(accepted, tested) of each session that is over."""
        self._undrafted: deque[float] = deque(maxlen=MEMORY)
        self._trips_s: deque[float] = deque(maxlen=MEMORY)
        self.draft_s = 0.0
        """Seconds per draft token, as the last session saw it."""
        self._num_untried = 0
        """Sessions in a row that asked for no drafts."""

    @property
    def num_tests(self) -> float:
        """Tests that count."""
        return sum(tested for _, tested in self._sessions)

    @property
    def is_known(self) -> bool:
        """Whether a session may decide by it alone."""
        return self.num_tests >= KNOWN_TESTS

    @property
    def is_stale(self) -> bool:
        """Whether so many sessions did without drafts that the next should try again, whatever its first test costs."""
        return self._num_untried >= MAX_UNTRIED

    @property
    def trip_s(self) -> float | None:
        """Median of the sessions' round trips; None before the first."""
        return median(self._trips_s) if self._trips_s else None

    @property
    def undrafted(self) -> float:
        """Mean share of tokens that nobody drafted."""
        return fmean(self._undrafted) if self._undrafted else 0.0

    @property
    def hoped_undrafted(self) -> float:
        """The same of the quarter of sessions that had most drafted; none, where few sessions are known."""
        known = sorted(self._undrafted)
        return known[len(known) // 4] if len(known) >= HOPING_SESSIONS else 0.0

    def note(self, judged: tuple[float, float], undrafted: float | None, trip_s: float | None, draft_s: float) -> None:
        """Take what a session has measured by its end.

        Args:
            judged: tokens accepted, tokens tested.
            undrafted: share of its tokens that nobody drafted while it asked for drafts; None: it did not.
            trip_s: its round trip, if it has measured one.
            draft_s: seconds per draft token; 0: not measured.
        """
        accepted, tested = judged
        self._num_untried = 0
        if tested > 0.0:
            weight = min(1.0, MAX_SESSION_TESTS / tested)
            self._sessions.append((accepted * weight, tested * weight))
        if undrafted is not None:
            self._undrafted.append(undrafted)
        if trip_s is not None:
            self._trips_s.append(trip_s)
        self.draft_s = draft_s or self.draft_s

    def pass_over(self) -> None:
        """Take that a session did without drafts."""
        self._num_untried += 1

    def estimator(self) -> AlphaEstimator:
        """Return what a new session believes."""
        usual = AlphaEstimator()
        accepted = sum(each for each, _ in self._sessions) + usual.prior_alpha * MIN_SESSION_TESTS
        alpha = accepted / (self.num_tests + MIN_SESSION_TESTS)
        return AlphaEstimator(alpha, self._worth(alpha))

    def _worth(self, alpha: float) -> float:
        """Return how many tests the mean is worth, by how much sessions differ beyond chance: method of moments."""
        seen = [(accepted / tested, tested) for accepted, tested in self._sessions if tested >= MIN_SESSION_TESTS]
        if len(seen) < MIN_SESSIONS:
            return DEFAULT_WORTH
        chance = alpha * (1.0 - alpha)
        total = sum(tested for _, tested in seen)
        spread = sum(tested * (rate - alpha) ** 2 for rate, tested in seen) / total
        beyond = spread - chance * len(seen) / total
        if beyond <= chance / (MAX_WORTH + 1.0):
            return MAX_WORTH
        return min(MAX_WORTH, max(MIN_WORTH, chance / beyond - 1.0))


class Priors:
    """The priors of one verifier, by sort of drafters."""

    def __init__(self) -> None:
        """Know none."""
        self._by_sort: OrderedDict[str, Prior] = OrderedDict()

    def of(self, sort: str) -> Prior:
        """Return a sort's prior; the one asked for least recently is forgotten."""
        prior = self._by_sort.setdefault(sort, Prior())
        self._by_sort.move_to_end(sort)
        if len(self._by_sort) > MAX_SORTS:
            self._by_sort.popitem(last=False)
        return prior
