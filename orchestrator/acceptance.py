"""How many drafts are accepted, by drafter and by distance from the start of an epoch, in one process. Pure."""

from collections.abc import Mapping

MAX_DRAFTERS = 32
"""Drafters that are counted; the one heard of least recently is forgotten."""
MAX_DISTANCE = 16
"""Distances that are counted one by one; what is farther counts nowhere here."""


class Acceptance:
    """Counts of tests and acceptances."""

    def __init__(self) -> None:
        """Count nothing yet."""
        self._counts: dict[str, tuple[list[int], list[int]]] = {}

    def add(self, drafter: str, first: int, num_tested: int, num_accepted: int) -> None:
        """Count the tests of one verdict.

        Args:
            drafter: kind of the drafter.
            first: distance of the first test from the start of its epoch, >= 0.
            num_tested: tests, one after the other; after a rejection there is none.
            num_accepted: the first so many were accepted.
        """
        if not num_tested or first >= MAX_DISTANCE:
            return
        tested, accepted = self._counts.pop(drafter, ([0] * MAX_DISTANCE, [0] * MAX_DISTANCE))
        self._counts[drafter] = tested, accepted
        if len(self._counts) > MAX_DRAFTERS:
            del self._counts[next(iter(self._counts))]
        for distance in range(first, min(first + num_tested, MAX_DISTANCE)):
            tested[distance] += 1
            accepted[distance] += distance < first + num_accepted

    def by_drafter(self) -> Mapping[str, tuple[tuple[int, int], ...]]:
        """Return (tested, accepted) at each distance, up to the last one tested, by drafter in order of name."""
        return {drafter: _pairs(*self._counts[drafter]) for drafter in sorted(self._counts)}


def _pairs(tested: list[int], accepted: list[int]) -> tuple[tuple[int, int], ...]:
    end = max(distance + 1 for distance, count in enumerate(tested) if count)
    return tuple(zip(tested[:end], accepted[:end], strict=True))
