"""What is written in a simulation: one endless text, and drafts that agree with it at a chosen rate. Pure.

The text is a cycle through all ids, so the token after another one is known without any memory, and a token that is
lost, repeated or out of order is seen at once. A session begins somewhere in the cycle, behind two ids that tell its
number, so that no two sessions share a prompt.
"""

from collections.abc import Sequence

VOCAB = 4096
"""Ids; also the length of the cycle."""
_MASK = (1 << 64) - 1


def _cycle() -> tuple[int, ...]:
    """Return all ids in an order without a pattern: a linear congruence of full period."""
    ids, token = [], 0
    for _ in range(VOCAB):
        ids.append(token)
        token = (token * 1229 + 2531) % VOCAB
    return tuple(ids)


CYCLE = _cycle()
NEXT = tuple(CYCLE[(place + 1) % VOCAB] for place in sorted(range(VOCAB), key=CYCLE.__getitem__))
"""By id: the token behind it."""


def prompt(number: int, length: int) -> tuple[int, ...]:
    """Return a session's prompt.

    Args:
        number: of the session, 0 .. VOCAB**2 - 1.
        length: in tokens, >= 3.
    """
    start = _mix(number) % VOCAB
    rest = length - 2
    whole = CYCLE[start:] + CYCLE * (rest // VOCAB + 1)
    return (number % VOCAB, number // VOCAB, *whole[:rest])


def continuation(last: int, count: int) -> tuple[int, ...]:
    """Return the tokens behind a token."""
    start = CYCLE.index(last) + 1
    return (CYCLE[start:] + CYCLE * (count // VOCAB + 1))[:count]


class Luck:
    """Which draft tokens agree with the text: decided by session and position alone, so that it can be repeated.

    So two settings with one seed meet the same luck, and whoever drafts a place again guesses the same there.
    """

    def __init__(self, seed: int, alphas: Sequence[float]) -> None:
        """Choose the luck.

        Args:
            seed: of everything.
            alphas: rates of agreement, [0, 1] each; sessions have them in turn.
        """
        self._seed = _mix(seed + 1)
        self._levels = tuple(round(alpha * 2.0**64) for alpha in alphas)

    def agrees(self, number: int, position: int) -> bool:
        """Whether the draft token at a position of a session is the text's."""
        word = _mix(self._seed ^ _mix((number << 24) + position))
        return word < self._levels[number % len(self._levels)]


def _mix(value: int) -> int:
    """Return 64 bits that look like chance (the finalizer of splitmix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
