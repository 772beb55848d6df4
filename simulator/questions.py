"""What a simulation is asked: how many draft workers, from which load on drafting yields, what the loss of a zone does.

Each question is a handful of settings that differ in one figure, with the same luck.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.errors import InvalidRequest
from outrider.generation import SpeculationChoice
from outrider.messages import Speculation
from simulator.cluster import simulate
from simulator.results import Summary
from simulator.setting import Prices, Setting

OFF = SpeculationChoice(off=True)
ENOUGH = 0.97
"""Share of the best throughput from which on more draft workers bring little."""


def run(setting: Setting, part: int = 1) -> Summary:
    """Run a setting, or the n-th part of it and multiply.

    A part has its share of the sessions and of each role's workers, so every worker carries what it would carry in the
    whole. What the whole has beside that, many sessions to choose places for, is not in it.

    Args:
        setting: the whole.
        part: 1 runs all; n one n-th.

    Raises:
        InvalidRequest: it cannot be divided so.
    """
    if part == 1:
        return simulate(setting)
    fleet, load = setting.fleet, setting.load
    for name, value in (("sessions", load.sessions), ("verifiers", fleet.verifiers), ("drafts", fleet.drafts)):
        if part < 1 or value % part or (value < part and name != "drafts"):
            raise InvalidRequest("part", part, f"1, or a number that divides {name} ({value})")
    smaller = replace(
        setting,
        load=replace(load, sessions=load.sessions // part),
        fleet=replace(
            fleet,
            verifiers=fleet.verifiers // part,
            drafts=fleet.drafts // part,
            orchestrators=math.ceil(fleet.orchestrators / part),
        ),
    )
    found = simulate(smaller)
    return replace(
        found,
        mode=f"machines, 1 of {part}",
        sessions=load.sessions,
        verifiers=fleet.verifiers,
        drafts=fleet.drafts,
        tokens_per_s=found.tokens_per_s * part,
        finished=found.finished * part,
        failed=found.failed * part,
        moved=found.moved * part,
        tokens_by_second=tuple(count * part for count in found.tokens_by_second),
    )


@dataclass(frozen=True, slots=True)
class Ratio:
    """One number of draft workers."""

    drafts: int
    summary: Summary
    cost: float | None
    """Of a million tokens."""


def ratio(setting: Setting, counts: Iterable[int], prices: Prices, part: int = 1) -> list[Ratio]:
    """Run a setting with different numbers of draft workers; none means plain decoding."""
    found = []
    for drafts in counts:
        load = setting.load if drafts else replace(setting.load, choice=OFF)
        one = replace(setting, load=load, fleet=replace(setting.fleet, drafts=drafts))
        summary = run(one, part)
        found.append(Ratio(drafts, summary, prices.per_million(one.fleet, summary.tokens_per_s)))
    return found


def enough(found: Sequence[Ratio]) -> Ratio:
    """Return the fewest draft workers that come near the best throughput; there is at least one answer."""
    best = max(each.summary.tokens_per_s for each in found)
    return next(each for each in found if each.summary.tokens_per_s >= ENOUGH * best)


def cheapest(found: Sequence[Ratio]) -> Ratio | None:
    """Return the number of draft workers with the lowest cost; None without prices."""
    priced = [(each.cost, each.drafts, each) for each in found if each.cost is not None]
    return min(priced, key=lambda entry: entry[:2])[2] if priced else None


@dataclass(frozen=True, slots=True)
class Level:
    """One load, with and without drafts."""

    sessions: int
    plain: Summary
    fixed: Summary
    """Drafting as far as ever, whatever the load."""
    automatic: Summary

    @property
    def fixed_gain(self) -> float:
        """Times plain, without a policy."""
        return self.fixed.tokens_per_s / self.plain.tokens_per_s

    @property
    def gain(self) -> float:
        """Times plain, with the policy."""
        return self.automatic.tokens_per_s / self.plain.tokens_per_s

    def as_data(self) -> dict[str, Any]:
        """Return it as plain values."""
        arms = {name: getattr(self, name).as_data() for name in ("plain", "fixed", "automatic")}
        return {"sessions": self.sessions, **arms}


def levels(setting: Setting, sessions: Iterable[int]) -> list[Level]:
    """Run a setting at different loads."""
    default: Speculation = setting.limits.default
    fixed = SpeculationChoice(gamma=default.gamma, restart_gamma=default.restart_gamma, window=default.window)
    found = []
    for count in sessions:
        plain, kept, automatic = (
            simulate(replace(setting, load=replace(setting.load, sessions=count, choice=choice)))
            for choice in (OFF, fixed, setting.load.choice)
        )
        found.append(Level(count, plain, kept, automatic))
    return found


def yields_at(found: Sequence[Level]) -> int | None:
    """Return the load from which on fixed drafting loses against plain decoding; None: nowhere."""
    losing = [each.sessions for each in found if each.fixed_gain < 1.0]
    return losing[0] if losing else None


@dataclass(frozen=True, slots=True)
class Loss:
    """What the loss of a zone did, in tokens per second of all sessions."""

    summary: Summary
    before: float
    lowest: float
    """Of the seconds behind it."""
    after: float
    """Of the last quarter of the run."""


def loss(setting: Setting, part: int = 1) -> Loss:
    """Run a setting in which a zone is lost.

    Raises:
        InvalidRequest: none is.
    """
    if setting.loss is None:
        raise InvalidRequest("lose_zone", "", "the number of a zone")
    summary = run(setting, part)
    at, from_s, end = int(setting.loss.at_s), int(setting.warm_up_s), int(summary.simulated_s)
    seconds = summary.tokens_by_second
    tail = seconds[max(at + 1, end - max(1, (end - at) // 4)) : end]
    return Loss(summary, _mean(seconds[from_s:at]), min(seconds[at + 1 : end], default=0), _mean(tail))


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else 0.0
