"""In which order workers are tried: by rank, and among equals by load, with two choices. Pure; lots are given to it.

Two choices: of two drawn by lot the less loaded is taken. What is known of loads is always a little old; if everybody
took the least loaded worker, all would take the same one until the next announcement.

The rule of leaving, for everything that moves: a worker is *busy* from three quarters of its capacity on, and is left
for another one only if that carries at most half of its share. So two workers never hand sessions to and fro, and the
KV of a session counts more than a small difference.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from outrider.messages import WorkerDescription

BUSY = 0.75
"""Share of its capacity from which on a worker counts as busy."""
RELIEF = 0.5
"""A busy worker is left for one with at most this fraction of its share."""


def share(worker: WorkerDescription) -> float:
    """Return how much of its capacity a worker uses; a capacity of 0 is unknown, and counts as 1."""
    return worker.load / max(1, worker.capacity)


def is_full(worker: WorkerDescription) -> bool:
    """Whether a worker says it has no room; a capacity of 0 is unknown."""
    return 0 < worker.capacity <= worker.load


def relieves(other: WorkerDescription, worker: WorkerDescription) -> bool:
    """Whether `worker` is so busy that it is left for `other`; see the module's head."""
    return share(worker) >= BUSY and share(other) <= RELIEF * share(worker) and other.worker_id != worker.worker_id


def is_left(worker: WorkerDescription, others: Iterable[WorkerDescription]) -> bool:
    """Whether a worker is so busy that it is left for one of the others."""
    return any(relieves(other, worker) for other in others)


def in_turn(
    workers: Sequence[WorkerDescription],
    rank: Callable[[WorkerDescription], tuple[Any, ...]],
    load: Callable[[WorkerDescription], float],
    lot: random.Random,
) -> Iterator[WorkerDescription]:
    """Yield workers in the order in which they are tried; what is not asked for is not drawn.

    Args:
        workers: in any order that is always the same, so that a lot with a seed repeats its choices.
        rank: lower ranks come first.
        load: decides within a rank, by two choices.
        lot: draws.
    """
    for _, group in groupby(sorted(workers, key=rank), key=rank):
        rest = list(group)
        while rest:
            best = min(lot.sample(rest, min(2, len(rest))), key=load)
            rest.remove(best)
            yield best
