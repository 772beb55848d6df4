"""Follows a text through a prediction of it: at which place of the prediction the text stands after each token. Pure.

As long as the text says what was predicted, the place moves on with it. A deviation (tokens replaced, left out, put in,
blocks moved) is survived: the place expected next is kept, and the text is found again where its last tokens agree with
the prediction, near that place first. Near means within `NEAR` tokens, where one agreeing token is enough; within
`REACH`, two; anywhere else `FAR`. Among several places the one wins where most of the last tokens agree, then the
nearest.

The place is a function of the text, and is rewound with it. A token costs a bounded number of comparisons: it looks at
no more than `MAX_PLACES` places of equal tokens, whatever the prediction says.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

NEAR = 8
"""Tokens from the expected place within which one agreeing token is enough."""
REACH = 64
"""Tokens from the expected place within which two agreeing tokens are enough."""
FAR = 3
"""Tokens that must agree anywhere else."""
MAX_PLACES = 16
"""Places that are compared, nearest first."""
MAX_AGREEING = 16
"""Tokens that are compared at each."""
MAX_DRIFT = 16
"""Tokens of a deviation for which the expected place moves on, as if each stood for one of the prediction."""


class Alignment:
    """One text and its prediction; see the module's head."""

    def __init__(self, prediction: Sequence[int]) -> None:
        """Stand at the prediction's begin, with an empty text, which agrees with everything.

        Args:
            prediction: the expected tokens.
        """
        self.prediction = tuple(prediction)
        self.ids: list[int] = []
        """The text so far."""
        self.matched: list[int] = []
        """Per token of the text: its place in the prediction; -1: it is none of its tokens."""
        self._expected = [0]
        self._runs = [1]
        """Behind each token: how many agree; 0 or less: none since so many tokens."""
        self._places: dict[int, list[int]] = defaultdict(list)
        self._far: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for place, token in enumerate(self.prediction):
            self._places[token].append(place)
            if place + 1 >= FAR:
                self._far[self.prediction[place + 1 - FAR : place + 1]].append(place)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def place(self) -> int | None:
        """Place of the predicted next token; None while the two do not agree, or at the prediction's end."""
        return self._expected[-1] if self._runs[-1] > 0 and self._expected[-1] < len(self.prediction) else None

    @property
    def num_apart(self) -> int:
        """Tokens since text and prediction agreed."""
        return max(0, -self._runs[-1])

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens at the end of the text."""
        for token in token_ids:
            self.ids.append(token)
            expected, run = self._next(token)
            self.matched.append(expected - 1 if run > 0 else -1)
            self._expected.append(expected)
            self._runs.append(run)

    def truncate(self, length: int) -> None:
        """Forget the text at and past `length`."""
        for column, kept in ((self.ids, length), (self.matched, length), (self._expected, length + 1)):
            del column[kept:]
        del self._runs[length + 1 :]

    def _next(self, token: int) -> tuple[int, int]:
        """Return expected place and run behind a token that was added."""
        expected, run = self._expected[-1], self._runs[-1]
        if expected < len(self.prediction) and self.prediction[expected] == token:
            return expected + 1, max(run, 0) + 1
        found, agreeing = self._find(token, expected)
        if agreeing:
            return found + 1, agreeing
        apart = min(run, 0) - 1
        return min(expected + (apart >= -MAX_DRIFT), len(self.prediction)), apart

    def _find(self, token: int, expected: int) -> tuple[int, int]:
        """Return where the text goes on, and how many tokens agree there; 0: nowhere."""
        best = (0, 0, 0)
        for place in _nearest(self._places.get(token, []), expected, REACH):
            agreeing, distance = self._agreeing(place), abs(place - expected)
            if agreeing > 1 or distance <= NEAR:
                best = max(best, (agreeing, -distance, place))
        if best[0] >= FAR:
            return best[2], best[0]
        for place in _nearest(self._far.get(tuple(self.ids[-FAR:]), []), expected, len(self.prediction)):
            best = max(best, (self._agreeing(place), -abs(place - expected), place))
        return best[2], best[0]

    def _agreeing(self, place: int) -> int:
        """Return how many tokens up to a place are the text's last ones, counted up to a limit."""
        longest = min(place + 1, len(self.ids), MAX_AGREEING)
        for count in range(longest):
            if self.prediction[place - count] != self.ids[-1 - count]:
                return count
        return longest


def num_agreeing(prediction: Sequence[int], ids: Sequence[int]) -> int:
    """Return how many tokens of a prediction appear in a text, each counted once; takes time for long ones."""
    aligned = Alignment(prediction)
    aligned.extend(ids)
    return len({place for place in aligned.matched if place >= 0})


def _nearest(places: list[int], expected: int, reach: int) -> list[int]:
    """Return the places within reach of the expected one, at most `MAX_PLACES`, of those before and behind it alike."""
    middle, half = bisect_left(places, expected), MAX_PLACES // 2
    around = places[max(0, middle - half) : middle + half]
    return [place for place in around if abs(place - expected) <= reach]
