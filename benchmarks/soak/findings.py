"""What is wrong with a soak: every finding is a sentence, and one is enough to fail."""

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.soak.ledger import Ledger
from benchmarks.soak.watching import Rest, above

MAX_GROWTH = 0.05
"""Share by which a process's memory may be larger in the last third than in the first."""
NEVER = ("failed_sessions", "failed_passes", "kv_unbalanced", "draft_row_mismatch", "garbage")
"""Counts of the verifier that stay 0 as long as everybody is honest."""
ALWAYS = ("preempted", "kv_reused_tokens", "filled_tokens", "decode_passes")
"""Counts of the verifier without which the run has tried less than it says."""
SAID_TOO = ("came back", "second turns", "accepted", "recovered", "texts compared, whole", "texts without a twin")
"""Counts of the clients likewise."""

Thirds = Mapping[str, tuple[float, float, float]]


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that was seen."""

    ledger: Ledger
    thirds: Thirds
    rest_before: Rest
    rest_after: Rest
    orphans: int
    """Sessions in the store whose client left before it was told their name."""
    keys_left: int
    """Keys of sessions in the store when all of them are deleted."""
    verifier: Mapping[str, float]
    """The verifier's counts by kind."""
    complaints: list[str]
    max_gap_s: float


def findings(seen: Evidence) -> list[str]:
    """Return what is wrong, in sentences; empty if nothing is."""
    return [*seen.ledger.wrong, *_leaks(seen), *_waits(seen), *_engine(seen), *seen.complaints, *_untried(seen)]


def _leaks(seen: Evidence) -> list[str]:
    wrong = [
        f"{name} grew from {first / 2**20:.1f} to {last / 2**20:.1f} MiB"
        for name, (first, _, last) in seen.thirds.items()
        if last > (1 + MAX_GROWTH) * first
    ]
    higher = above(seen.rest_after, seen.rest_before)
    wrong += [f"{name} is {now:g} at rest, and was {before:g}" for name, (before, now) in higher.items()]
    unnamed = seen.ledger.counts["left before the first token"]
    if seen.orphans > unnamed:
        wrong.append(f"{seen.orphans} sessions are left in the store, and only {unnamed} clients left early")
    if seen.keys_left:
        wrong.append(f"{seen.keys_left} keys are left in the store")
    return wrong


def _waits(seen: Evidence) -> list[str]:
    longest_s = max(seen.ledger.gaps_s, default=0.0)
    if longest_s <= seen.max_gap_s:
        return []
    return [f"{longest_s:.1f} s between two chunks of a generation, where {seen.max_gap_s:g} s are allowed"]


def _engine(seen: Evidence) -> list[str]:
    return [f"the verifier counts {seen.verifier[kind]:g} {kind}" for kind in NEVER if seen.verifier.get(kind)]


def _untried(seen: Evidence) -> list[str]:
    counted = [(kind, seen.verifier.get(kind, 0)) for kind in ALWAYS]
    counted += [(kind, seen.ledger.counts[kind]) for kind in SAID_TOO]
    return [f"the run tried nothing: {kind} is 0" for kind, count in counted if not count]
