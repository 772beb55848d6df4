"""What steps of models and trips between machines take: the calibration of a simulation. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from outrider.errors import InvalidRequest

MOST_ROWS = 4096
"""Widest pass that can be described."""
MOST_MS = 3_600_000.0


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one pass by its rows: given at some row counts, between them on a line."""

    by_rows: Mapping[int, float]
    max_rows: int
    """Rows of the widest pass; more rows are more passes."""
    _seconds: tuple[float, ...] = field(init=False, repr=False)
    """Of passes with 1, 2, ... max_rows rows."""

    def __post_init__(self) -> None:
        """Fill the table."""
        object.__setattr__(self, "_seconds", tuple(_at(self.by_rows, rows) for rows in range(1, self.max_rows + 1)))

    def seconds(self, rows: int) -> float:
        """Return what so many rows take, in as many passes as they need; 0 rows take nothing."""
        full, rest = divmod(rows, self.max_rows)
        return full * self._seconds[-1] + (self._seconds[rest - 1] if rest else 0.0)


def _at(by_rows: Mapping[int, float], rows: int) -> float:
    known = sorted(by_rows.items())
    if rows <= known[0][0]:
        return known[0][1]
    for (low, low_s), (high, high_s) in pairwise(known):
        if rows <= high:
            return low_s + (high_s - low_s) * (rows - low) / (high - low)
    return known[-1][1]


def step_cost(name: str, by_rows_ms: Mapping[int, float], max_rows: int = 32) -> StepCost:
    """Return the cost of a step from milliseconds.

    Args:
        name: of the option, for errors.
        by_rows_ms: milliseconds by rows, at least one entry.
        max_rows: rows of the widest pass, unless more are described.

    Raises:
        InvalidRequest: a number is out of its range, or more rows take less time than fewer.
    """
    if not by_rows_ms:
        raise InvalidRequest(name, "", "at least one time")
    for rows, ms in by_rows_ms.items():
        if not 1 <= rows <= MOST_ROWS:
            raise InvalidRequest(name, rows, f"1 to {MOST_ROWS} rows")
        if not 0.0 < ms <= MOST_MS:
            raise InvalidRequest(name, ms, f"more than 0 and at most {MOST_MS:g} ms")
    times = [by_rows_ms[rows] for rows in sorted(by_rows_ms)]
    if any(later < earlier for earlier, later in pairwise(times)):
        raise InvalidRequest(name, str(dict(by_rows_ms)), "times that do not fall with more rows")
    return StepCost({rows: ms / 1000.0 for rows, ms in by_rows_ms.items()}, max(max_rows, *by_rows_ms))


@dataclass(frozen=True, slots=True)
class Costs:
    """All times of a cluster, in seconds."""

    verify: StepCost
    """A decode pass of the target."""
    draft: StepCost
    """A token step of the draft: a row is a session."""
    verify_prompt_s: float = 0.0
    """A pass of the target over 64 tokens of a prompt; 0: what a full decode pass takes."""
    draft_prompt_s: float = 0.0
    """The same of the draft."""
    hop_s: float = 0.0005
    """A message from one machine to another of the same zone, everything included; half a round trip."""
    zone_hop_s: float = 0.0
    """What it takes longer to another zone."""
    store_s: float = 0.0005
    """An append to the session log."""
    verdict_s: float = 0.0
    """What a verifier needs for each verdict beside the pass."""
    proposal_s: float = 0.0
    """What a draft worker needs for each proposal beside its token steps."""
    message_s: float = 0.0
    """What an orchestrator, one process, needs for each verdict."""

    def __post_init__(self) -> None:
        """Fill in what follows from the rest.

        Raises:
            InvalidRequest: a time is negative or not finite.
        """
        for name in ("verify_prompt_s", "draft_prompt_s", "hop_s", "zone_hop_s", "store_s", "verdict_s", "proposal_s",
                     "message_s"):  # fmt: skip
            if not 0.0 <= getattr(self, name) < math.inf:
                raise InvalidRequest(name, getattr(self, name), "0 or more seconds, and finite")
        if not self.verify_prompt_s:
            object.__setattr__(self, "verify_prompt_s", self.verify.seconds(self.verify.max_rows))
        if not self.draft_prompt_s:
            object.__setattr__(self, "draft_prompt_s", self.draft.seconds(self.draft.max_rows))

    def hop(self, origin: int, target: int) -> float:
        """Return what a message takes from one zone to another."""
        return self.hop_s if origin == target else self.hop_s + self.zone_hop_s
