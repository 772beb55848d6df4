"""Searches every interleaving of the real machines: breadth first, each state once; a trace found is a shortest one.

What is checked in every state stands in `parts` and `world`. Beyond that a search shows that from every state it has
reached a fair run comes to the end, without any timer unless a drafter is silent.
"""

from array import array
from collections import deque
from dataclasses import dataclass

import pytest

from tests.protocol.parts import Violation
from tests.protocol.world import Setting, State, World


class Found(AssertionError):
    """A violation, with the moves that lead to it."""

    def __init__(self, violation: Violation, trace: list[str]) -> None:
        super().__init__("\n  ".join([str(violation), *trace]))
        self.violation = str(violation)
        self.trace = trace


@dataclass(frozen=True)
class Explored:
    """What a search has seen."""

    num_states: int
    num_moves: int
    num_ends: int
    depth: int
    complete: bool
    """Whether nothing was left out: no state is deeper."""


class Search:
    """One search; `run` it once."""

    def __init__(self, setting: Setting, max_depth: int, max_states: int) -> None:
        self.world = World(setting)
        self.max_depth = max_depth
        self.max_states = max_states
        self.states: list[State] = []
        self.depths = array("i")
        self.parents = array("i")
        self.labels: list[str] = []
        self.numbers: dict[State, int] = {}
        self.free_edges: list[tuple[int, int]] = []
        self.live: deque[int] = deque()
        """States that are known to come to the end: those over, and those at the border of the search."""

    def run(self) -> Explored:
        """Search until nothing is new, or the depth is reached; raise `Found` on the first violation."""
        self._add(self.world.start(), -1, "start")
        num_moves = num_ends = 0
        for number, state in enumerate(self.states):  # grows while it is walked
            if self.world.is_over(state):
                num_ends += 1
                self.live.append(number)
            elif self.depths[number] >= self.max_depth or len(self.states) > self.max_states:
                self.live.append(number)
            else:
                num_moves += self._expand(number, state)
        self._check_liveness()
        complete = max(self.depths) < self.max_depth and len(self.states) <= self.max_states
        return Explored(len(self.states), num_moves, num_ends, max(self.depths), complete)

    def _expand(self, number: int, state: State) -> int:
        num_moves = 0
        try:
            for label, is_trouble, after in self.world.moves(state):
                num_moves += 1
                target = self._add(after, number, label)
                if not is_trouble:
                    self.free_edges.append((number, target))
        except Violation as violation:
            raise Found(violation, self._trace(number)) from violation
        return num_moves

    def _add(self, state: State, parent: int, label: str) -> int:
        number = self.numbers.setdefault(state, len(self.states))
        if number == len(self.states):
            self.states.append(state)
            self.parents.append(parent)
            self.labels.append(label)
            self.depths.append(self.depths[parent] + 1 if parent >= 0 else 0)
        return number

    def _check_liveness(self) -> None:
        """From every state moves that cost nothing lead to the end: else a fair run could go round for ever."""
        backward: dict[int, list[int]] = {}
        for source, target in self.free_edges:
            backward.setdefault(target, []).append(source)
        alive = set(self.live)
        while self.live:
            for source in backward.get(self.live.popleft(), ()):
                if source not in alive:
                    alive.add(source)
                    self.live.append(source)
        if len(alive) < len(self.states):
            dead = next(number for number in range(len(self.states)) if number not in alive)
            raise Found(Violation("no fair run comes to the end from here"), self._trace(dead))

    def _trace(self, number: int) -> list[str]:
        trace: list[str] = []
        while number >= 0:
            trace.append(self.labels[number])
            number = self.parents[number]
        return trace[::-1]


def explore(setting: Setting, max_depth: int = 10_000, max_states: int = 2_000_000) -> Explored:
    """Search all interleavings of a setting.

    Raises:
        Found: an invariant is broken, a state is dead, or a fair run need not end.
    """
    return Search(setting, max_depth, max_states).run()


def searched(setting: Setting) -> Explored:
    """Search, print what was seen, and insist that nothing was left out."""
    explored = explore(setting)
    print(f"{setting}: {explored}")
    assert explored.complete
    assert explored.num_ends > 0
    return explored


def found(setting: Setting) -> Found:
    """Search for a planted mistake; return what was found."""
    with pytest.raises(Found) as caught:
        explore(setting)
    return caught.value
