"""The page and the data of a soak."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.results import facts_list, table
from benchmarks.soak.findings import Evidence
from benchmarks.soak.ledger import histogram
from benchmarks.watching import percentiles

TITLE = "# A long run at full load"
SHARES = (0.5, 0.95, 0.99, 1.0)
SHOWN = ("decode_passes", "decode_rows", "filled_tokens", "kv_reused_tokens", "preempted", "wasted", "stale")
"""Counts of the verifier on the page; all of them are in the data."""


def page(machine: Mapping[str, str], how: str, seen: Evidence, wrong: Sequence[str]) -> str:
    """Return the page."""
    parts = [TITLE, facts_list(machine), how, _verdict(wrong), "## What the clients did", _counts(seen)]
    parts += ["## Time between chunks of a generation, and to its first token", _waits(seen), _histogram(seen)]
    parts += ["## Memory: median of each third, MiB", _memory(seen), "## At rest, before and after", _rest(seen)]
    return "\n\n".join(parts) + "\n"


def data(machine: Mapping[str, str], how: str, seen: Evidence, wrong: Sequence[str]) -> dict[str, Any]:
    """Return the same for machines."""
    ledger = seen.ledger
    return {
        "machine": dict(machine),
        "how": how,
        "findings": list(wrong),
        "clients": dict(sorted(ledger.counts.items())),
        "verifier": dict(sorted(seen.verifier.items())),
        "gap_s": dict(zip(map(str, SHARES), percentiles(ledger.gaps_s or [0.0], SHARES), strict=True)),
        "first_token_s": dict(zip(map(str, SHARES), percentiles(ledger.first_s or [0.0], SHARES), strict=True)),
        "gap_histogram": dict(histogram(ledger.gaps_s)),
        "memory_thirds_bytes": {name: list(values) for name, values in seen.thirds.items()},
        "rest_before": seen.rest_before,
        "rest_after": seen.rest_after,
        "sessions_left_unnamed": seen.orphans,
        "keys_left": seen.keys_left,
    }


def _verdict(wrong: Sequence[str]) -> str:
    if not wrong:
        return "**Nothing was found wrong.**"
    return "\n".join([f"**{len(wrong)} findings:**", "", *(f"- {words}" for words in wrong)])


def _counts(seen: Evidence) -> str:
    rows = [(name, f"{count:,}") for name, count in sorted(seen.ledger.counts.items())]
    rows += [(f"verifier: {name}", f"{seen.verifier.get(name, 0):,.0f}") for name in SHOWN]
    return table(("what", "count"), rows)


def _waits(seen: Evidence) -> str:
    rows = []
    for name, values in (("between chunks", seen.ledger.gaps_s), ("to the first token", seen.ledger.first_s)):
        rows.append((name, *(f"{value:.2f}" for value in percentiles(values or [0.0], SHARES))))
    return table(("seconds", "p50", "p95", "p99", "longest"), rows)


def _histogram(seen: Evidence) -> str:
    return table(("between chunks", "count"), [(name, f"{count:,}") for name, count in histogram(seen.ledger.gaps_s)])


def _memory(seen: Evidence) -> str:
    rows = [
        (name, *(f"{value / 2**20:.1f}" for value in values), f"{100 * (values[2] / values[0] - 1):+.1f} %")
        for name, values in seen.thirds.items()
    ]
    return table(("process", "first", "second", "last", "last to first"), rows)


def _rest(seen: Evidence) -> str:
    rows = [(name, f"{before:g}", f"{seen.rest_after.get(name, 0.0):g}") for name, before in seen.rest_before.items()]
    rows.append(("store: keys of sessions", "0", str(seen.keys_left)))
    return table(("gauge", "before", "after"), rows)
