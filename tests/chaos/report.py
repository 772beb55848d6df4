"""The table of a run, as a page and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks import machine, results
from tests.chaos.campaign import Outcome, Run
from tests.chaos.schedule import STORE, Edge, Fault, Kind

HEADER = ("fault", "at", "times", "met nobody", "waits", "p50, s", "p99, s", "longest, s", "paused", "their p50, s")


def write(name: str, seed: int, run: Run) -> str:
    """Return the page of a run; write it and its data to `benchmarks/results` if there is a name."""
    facts = machine.facts()
    page = _page(seed, run, facts)
    if name:
        results.write(name, _data(seed, run, facts), page)
    return page


def rows(run: Run) -> list[tuple[object, ...]]:
    """Return one row per kind of fault and of target."""
    found: dict[tuple[Kind, str], list[Outcome]] = {}
    for outcome in sorted(run.outcomes, key=lambda each: (list(Kind).index(each.fault.kind), place(each.fault))):
        found.setdefault((outcome.fault.kind, place(outcome.fault)), []).append(outcome)
    return [_row(kind, where, outcomes, run.usual_gap_s) for (kind, where), outcomes in found.items()]


def place(fault: Fault) -> str:
    """Return what kind of target a fault has."""
    if isinstance(fault.target, Edge):
        return f"{_role(fault.target.source)} > {_role(fault.target.target)}"
    return _role(fault.target)


def _role(name: str) -> str:
    role = name.partition("-")[0]
    return {"orchestrate": "orchestrator", "verify": "verifier", "draft": "draft worker", STORE: "store"}.get(
        role, role
    )


def _row(kind: Kind, where: str, outcomes: Sequence[Outcome], usual_gap_s: float) -> tuple[object, ...]:
    met = [each for each in outcomes if each.was_seen]
    waits = sorted(wait for each in met if each.alone for wait in each.waits_s)
    paused = [wait for wait in waits if wait > usual_gap_s]
    shown = [f"{quantile(waits, share):.2f}" if waits else "" for share in (0.5, 0.99, 1.0)]
    return (
        kind, where, len(met), len(outcomes) - len(met), len(waits), *shown, len(paused),
        f"{quantile(paused, 0.5):.2f}" if paused else "",
    )  # fmt: skip


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that a share of sorted values does not exceed."""
    return values[min(len(values) - 1, int(share * len(values)))]


def _page(seed: int, run: Run, facts: dict[str, str]) -> str:
    book = run.book
    met = sum(outcome.was_seen for outcome in run.outcomes)
    waits = sorted(wait for outcome in run.outcomes for wait in outcome.waits_s)
    lines = [
        "# Faults while sessions run",
        "",
        f'`make chaos ARGS="--seed {seed}"` repeats the sequence. {met} faults in {run.seconds:.0f} s, '
        f"{len(run.outcomes) - met} more met nobody; 16 sessions at a time, {book.num_sessions} in all with "
        f"{book.num_turns} turns, {book.num_tokens} tokens, {book.num_unavailable} times UNAVAILABLE, "
        f"{book.num_resumed} times resumed.",
        "",
        f"Violations: **{len(book.violations)}**",
        *(f"- {each.when_s:.1f} s, {each.what}: {each.words}" for each in book.violations[:50]),
        "",
        "Waits are the longest time without a token between the beginning of a fault that was alone and the first "
        "token after it, of every session that ran, those included that it did not concern. Paused is who waited "
        f"longer than {run.usual_gap_s:.2f} s, the longest gap "
        "while nothing was wrong."
        + (f" Over all faults: p50 {quantile(waits, 0.5):.2f} s, p99 {quantile(waits, 0.99):.2f} s." if waits else ""),
        "",
        results.table(HEADER, rows(run)),
        "",
        f"After each act all that was in use came back, at the latest after {max(run.returned_s, default=0.0):.1f} s; "
        f"{run.num_stored} sessions are stored.",
        "",
        results.facts_list(facts),
        "",
    ]
    return "\n".join(lines)


def _data(seed: int, run: Run, facts: dict[str, str]) -> dict[str, Any]:
    book = run.book
    return {
        "machine": facts,
        "seed": seed,
        "seconds": round(run.seconds, 1),
        "sessions": book.num_sessions,
        "turns": book.num_turns,
        "tokens": book.num_tokens,
        "unavailable": book.num_unavailable,
        "resumed": book.num_resumed,
        "violations": [asdict(each) for each in book.violations],
        "usual_gap_s": round(run.usual_gap_s, 3),
        "returned_s": [round(each, 1) for each in run.returned_s],
        "rows": [dict(zip(HEADER, row, strict=True)) for row in rows(run)],
        "faults": [
            {
                "fault": str(each.fault),
                "met": each.was_seen,
                "alone": each.alone,
                "longest_wait_s": round(max(each.waits_s, default=0.0), 3),
            }
            for each in run.outcomes
        ],
    }
