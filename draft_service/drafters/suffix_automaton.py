"""Where the end of a growing text occurred before: an online suffix automaton that can be rewound.

A state stands for suffixes that end at the same places; its link leads to the longest shorter suffix that ends at more
of them. The link of the whole text's state is therefore the longest suffix that occurred before, and it is found
without a search: a token costs constant time on average however long the text is, and however long the match.

Each step is written down and can be taken back in reverse. Only the last `MAX_UNDO` steps are kept, more than any chain
is long; a text rewound further is built again.

Where a suffix occurred last is exact unless more than `MAX_CLASSES` suffixes of the text with different occurrences are
longer than it, which only text does that repeats a few tokens over and over; then it is some earlier place.

Source: Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text".
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

MAX_UNDO = 2048
"""Steps that can be taken back; a chain is at most 1024 tokens ahead of what is committed."""
MAX_CLASSES = 32
"""Suffixes whose latest place is written down at each token, longest first."""


class Match(NamedTuple):
    """A suffix of the text that occurred before."""

    length: int
    """Tokens that agree; 0: not even the last token occurred before."""
    position: int
    """Of the token that followed its latest earlier occurrence."""


NO_MATCH = Match(0, -1)


@dataclass(frozen=True, slots=True)
class _Step:
    """What one token changed."""

    last: int
    """The state before it."""
    extended: tuple[int, ...]
    """States that got a transition by the token."""
    redirected: tuple[int, ...]
    """States whose transition leads to the copy of a state instead of the state."""
    split: int
    """The state that was copied; -1: none was."""
    latest: tuple[tuple[int, int], ...]
    """States whose latest place changed, and what it was."""


class SuffixAutomaton:
    """A text and its repetitions; see the module's head."""

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        """Begin with a text."""
        self._forget()
        self.extend(token_ids)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def match(self) -> Match:
        """The longest suffix of the text that occurred before, at its latest place."""
        return Match(self._agreeing[-1], self._places[-1]) if self.ids else NO_MATCH

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens at the end."""
        for token in token_ids:
            self._append(token)

    def truncate(self, length: int) -> None:
        """Forget the text at and past `length`."""
        if length >= len(self.ids):
            return
        if len(self.ids) - length > len(self._steps):
            kept = self.ids[:length]
            self._forget()
            self.extend(kept)
            return
        while len(self.ids) > length:
            self._take_back(self._steps.pop())

    # -- one step, and back ------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        self.ids: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._latest = [-1]
        self._last = 0
        self._steps: deque[_Step] = deque(maxlen=MAX_UNDO)
        # Per token: the match behind it. Plain numbers, which the garbage collector need not visit.
        self._agreeing: list[int] = []
        self._places: list[int] = []

    def _append(self, token: int) -> None:
        following, link, lengths = self._next, self._link, self._length
        last, state = self._last, len(following)
        self._add_state({}, lengths[last] + 1, 0, len(self.ids))
        extended, redirected, split, place = list[int](), list[int](), -1, last
        while place >= 0 and token not in following[place]:
            following[place][token] = state
            extended.append(place)
            place = link[place]
        if place >= 0:
            reached = following[place][token]
            if lengths[reached] == lengths[place] + 1:
                link[state] = reached
            else:
                split, copy = reached, len(following)
                self._add_state(dict(following[split]), lengths[place] + 1, link[split], self._latest[split])
                while place >= 0 and following[place].get(token) == split:
                    following[place][token] = copy
                    redirected.append(place)
                    place = link[place]
                link[split] = link[state] = copy
        self._last = state
        self.ids.append(token)
        self._steps.append(_Step(last, tuple(extended), tuple(redirected), split, self._note(link[state])))

    def _add_state(self, following: dict[int, int], length: int, link: int, latest: int) -> None:
        self._next.append(following)
        self._length.append(length)
        self._link.append(link)
        self._latest.append(latest)

    def _note(self, longest: int) -> tuple[tuple[int, int], ...]:
        """Note the match, then that its suffixes occur here, too; return what their latest places were."""
        latest, link, position = self._latest, self._link, len(self.ids) - 1
        self._agreeing.append(self._length[longest])
        self._places.append(latest[longest] + 1 if longest else NO_MATCH.position)
        before, state = list[tuple[int, int]](), longest
        while state > 0 and len(before) < MAX_CLASSES:
            before.append((state, latest[state]))
            latest[state] = position
            state = link[state]
        return tuple(before)

    def _take_back(self, step: _Step) -> None:
        token = self.ids.pop()
        self._agreeing.pop()
        self._places.pop()
        for state, latest in step.latest:
            self._latest[state] = latest
        if step.split >= 0:
            copy = len(self._next) - 1
            for place in step.redirected:
                self._next[place][token] = step.split
            self._link[step.split] = self._link[copy]
            self._drop_state()
        for place in step.extended:
            del self._next[place][token]
        self._drop_state()
        self._last = step.last

    def _drop_state(self) -> None:
        for column in (self._next, self._length, self._link, self._latest):
            column.pop()
