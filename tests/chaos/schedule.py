"""Which faults a run has, and when: a pure function of its seed, so that a seed repeats a run's sequence.

A deck of kinds is dealt again and again, and each kind goes round the targets it can hit; so a short run has every
kind, and a long one every kind at every target. Each fault heals after a bounded time. A quarter of them begin while
the one before is still there.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import TypeVar

ORCHESTRATORS = ("orchestrate-0", "orchestrate-1")
VERIFIERS = ("verify-0", "verify-1")
DRAFTERS = ("draft-0", "draft-1")
SERVICES = (*ORCHESTRATORS, *VERIFIERS, *DRAFTERS)
STORE = "store"
CLIENT = "client"
PROCESSES = (*SERVICES, STORE)

OVERLAP_SHARE = 0.25
"""Share of the faults that begin before the one in front of them has healed."""
LONG_SHARE = 0.08
"""Share of freezes and cuts that outlive the keepalive of connections; only where long ones are asked for."""
LONG_S = (16.0, 20.0)


class Kind(StrEnum):
    """What is done from outside."""

    KILL = "kill -9"
    FREEZE = "SIGSTOP"
    RESTART = "SIGTERM and start"
    DELAY = "delay"
    LOSS = "loss"
    RESET = "reset"
    PARTITION = "partition"
    HALF_OPEN = "half-open"
    FULL_MEMORY = "OOM replies"
    FULL_DISK = "disk full"
    LOADING = "-LOADING"
    CLOCK = "clock jump"


@dataclass(frozen=True, slots=True)
class Edge:
    """The connections that one process has opened to another."""

    source: str
    target: str

    def __str__(self) -> str:
        return f"{self.source} > {self.target}"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault."""

    number: int
    kind: Kind
    target: str | Edge
    pause_s: float
    """Time before it, from the healing of the one before; from its beginning, if it overlaps."""
    hold_s: float
    """Time until it heals; for a kill, until the process is started again."""
    amount: float = 0.0
    """Seconds of delay, or of the jump of a clock; share of what is lost; 1 or 0: which direction is cut."""
    overlaps: bool = False
    """Whether it begins while the one before is still there."""
    linger_s: float = 0.0
    """How much longer than `hold_s` it stays, at most, if it has met nobody by then; only on connections."""

    def __str__(self) -> str:
        return f"#{self.number} {self.kind} of {self.target} for {self.hold_s:.1f} s ({self.amount:.3g})"


EDGES = (
    *(Edge(CLIENT, name) for name in ORCHESTRATORS),
    *(Edge(*pair) for pair in product(ORCHESTRATORS, VERIFIERS)),
    *(Edge(*pair) for pair in product(ORCHESTRATORS, DRAFTERS)),
    *(Edge(*pair) for pair in product(DRAFTERS, VERIFIERS)),
    *(Edge(name, STORE) for name in SERVICES),
)
TARGETS: dict[Kind, Sequence[str | Edge]] = {
    **dict.fromkeys((Kind.KILL, Kind.FREEZE, Kind.RESTART, Kind.CLOCK), PROCESSES),
    **dict.fromkeys((Kind.DELAY, Kind.LOSS, Kind.RESET, Kind.PARTITION, Kind.HALF_OPEN), EDGES),
    **dict.fromkeys((Kind.FULL_MEMORY, Kind.FULL_DISK, Kind.LOADING), (STORE,)),
}
HOLDS_S: dict[Kind, tuple[float, float]] = {
    Kind.KILL: (0.1, 1.5),
    Kind.FREEZE: (0.3, 4.0),
    Kind.RESTART: (0.0, 0.0),
    Kind.DELAY: (1.0, 3.0),
    Kind.LOSS: (1.0, 3.0),
    Kind.RESET: (0.0, 0.0),
    Kind.PARTITION: (0.5, 4.0),
    Kind.HALF_OPEN: (0.5, 4.0),
    Kind.FULL_MEMORY: (0.5, 3.0),
    Kind.FULL_DISK: (0.5, 3.0),
    Kind.LOADING: (1.0, 3.0),
    Kind.CLOCK: (1.5, 3.0),
}
ESSENTIALS: Sequence[tuple[Kind, str | Edge]] = (
    (Kind.KILL, "verify-0"),
    (Kind.DELAY, Edge(CLIENT, "orchestrate-1")),
    (Kind.KILL, "orchestrate-0"),
    (Kind.PARTITION, Edge("orchestrate-1", "verify-1")),
    (Kind.KILL, "draft-0"),
    (Kind.LOSS, Edge(CLIENT, "orchestrate-1")),
    (Kind.FREEZE, "verify-1"),
    (Kind.RESET, Edge(CLIENT, "orchestrate-1")),
    (Kind.RESTART, "orchestrate-1"),
    (Kind.HALF_OPEN, Edge("orchestrate-0", STORE)),
    (Kind.LOADING, STORE),
    (Kind.FREEZE, "draft-1"),
    (Kind.RESTART, "verify-0"),
    (Kind.RESET, Edge("orchestrate-0", "verify-1")),
    (Kind.FULL_MEMORY, STORE),
    (Kind.CLOCK, "verify-1"),
    (Kind.RESTART, "draft-1"),
    (Kind.PARTITION, Edge("orchestrate-0", STORE)),
    (Kind.FULL_DISK, STORE),
    (Kind.FREEZE, "orchestrate-0"),
)
"""The short form's: what each service and the store can meet, in pairs that are there together."""
LINGER_S = 15.0
"""How much longer a fault of the short form stays on a connection that nobody has used yet."""
SHORT_HOLD = 0.4
"""Share of the longest hold that the short form goes up to."""
SHORT_LOSS = 0.5
"""What the short form loses: so much that it is never nothing."""
LONG_KINDS = (Kind.FREEZE, Kind.PARTITION, Kind.HALF_OPEN)
T = TypeVar("T")


def plan(seed: int, count: int, *, kinds: Iterable[Kind] = Kind, long_ones: bool = False) -> tuple[Fault, ...]:
    """Return a run's faults, in order.

    Args:
        seed: repeats a sequence, together with the other arguments.
        count: how many.
        kinds: those that this machine can do.
        long_ones: whether some outlive the keepalive of connections.
    """
    lot = random.Random(seed)
    deck = _dealt(lot, list(kinds))
    rounds = {kind: _dealt(lot, list(TARGETS[kind])) for kind in Kind}
    faults: list[Fault] = []
    for number in range(1, count + 1):
        kind = next(deck)
        target = next(rounds[kind])
        overlaps = bool(faults) and not faults[-1].overlaps and lot.random() < OVERLAP_SHARE
        overlaps = overlaps and _apart(faults[-1].target, target)
        is_long = long_ones and kind in LONG_KINDS and lot.random() < LONG_SHARE
        hold_s = lot.uniform(*(LONG_S if is_long else HOLDS_S[kind]))
        faults.append(Fault(number, kind, target, lot.uniform(0.0, 0.6), hold_s, _amount(lot, kind), overlaps))
    return tuple(faults)


def essentials(seed: int, *, kinds: Iterable[Kind] = Kind) -> tuple[Fault, ...]:
    """Return the faults of the short form, in order; the seed settles how long each lasts, and when it begins.

    Args:
        seed: repeats a sequence.
        kinds: those that this machine can do.
    """
    lot, able = random.Random(seed), frozenset(kinds)
    faults: list[Fault] = []
    for number, (kind, target) in enumerate(ESSENTIALS, 1):
        low, high = HOLDS_S[kind]
        hold_s, pause_s = lot.uniform(low, max(low, SHORT_HOLD * high)), lot.uniform(0.0, 0.6)
        amount = SHORT_LOSS if kind is Kind.LOSS else _amount(lot, kind)
        if kind in able:
            second = number % 2 == 0
            faults.append(Fault(number, kind, target, pause_s, hold_s, amount, overlaps=second, linger_s=LINGER_S))
    return tuple(faults)


def groups(faults: Sequence[Fault]) -> list[list[Fault]]:
    """Return the faults that are there together: each one with those that overlap it."""
    found: list[list[Fault]] = []
    for fault in faults:
        if fault.overlaps and found:
            found[-1].append(fault)
        else:
            found.append([fault])
    return found


def _dealt(lot: random.Random, deck: list[T]) -> Iterator[T]:
    """Deal a deck, shuffled anew each time it has run out."""
    while True:
        lot.shuffle(deck)
        yield from tuple(deck)


def _apart(one: str | Edge, other: str | Edge) -> bool:
    """Whether two targets have no process in common that both would start, stop or reach through."""
    return _ends(one).isdisjoint(_ends(other))


def _ends(target: str | Edge) -> set[str]:
    return {target.source, target.target} if isinstance(target, Edge) else {target}


def _amount(lot: random.Random, kind: Kind) -> float:
    match kind:
        case Kind.DELAY:
            return lot.uniform(0.01, 0.15)
        case Kind.LOSS:
            return lot.uniform(0.02, 0.2)
        case Kind.CLOCK:
            return float(lot.choice((-7200, -600, -30, 30, 600, 7200)))
        case Kind.HALF_OPEN:
            return float(lot.randrange(2))
        case _:
            return 0.0
