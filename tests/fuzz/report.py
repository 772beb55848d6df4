"""The table of a run, as a page and as JSON."""

from typing import Any

from benchmarks import machine, results
from tests.fuzz.campaign import Run
from tests.fuzz.samples import METHODS


def write(name: str, seed: int, run: Run) -> str:
    """Return the page of a run; write it and its data to `benchmarks/results` if there is a name."""
    facts = machine.facts()
    page = _page(seed, run, facts)
    if name:
        results.write(name, _data(seed, run, facts), page)
    return page


def _page(seed: int, run: Run, facts: dict[str, str]) -> str:
    book = run.book
    lines = [
        "# Random and mutated messages on every RPC",
        "",
        f'`make fuzz ARGS="--seed {seed} --inputs {book.num_inputs}"` repeats the calls. '
        f"{book.num_inputs} messages in {run.num_calls} calls, {run.seconds:.0f} s. Beside them {book.num_honest} "
        "generations of honest clients, greedy and seeded, each compared with its twin "
        f"({book.num_refused} times one was told to come back later).",
        "",
        f"Violations: **{len(book.violations)}**",
        *(f"- {each[:400]}" for each in book.violations[:50]),
        "",
        'How calls ended. "Left by its caller" are those that were taken: the caller heard enough. INTERNAL as a '
        "protocol error is the answer to a peer that breaks the protocol between services, and no defect.",
        "",
        results.table(("method", "ended", "calls"), _rows(run)),
        "",
        "Resident memory, MiB; growth counts from the end of the first round.",
        "",
        results.table(("service", "before", "after the first round", "in the end", "growth"), _sizes(run)),
        "",
        results.facts_list(facts),
        "",
    ]
    return "\n".join(lines)


def _rows(run: Run) -> list[tuple[object, ...]]:
    order = {method.name: i for i, method in enumerate(METHODS)}
    ends = sorted(run.book.statuses.items(), key=lambda each: (order[each[0][0]], -each[1]))
    return [(method, end, count) for (method, end), count in ends]


def _sizes(run: Run) -> list[tuple[object, ...]]:
    growth = run.growth()
    return [
        (name, *(f"{size / 2**20:.0f}" for size in (sizes[0], sizes[1], sizes[-1])), f"{growth[name] / 2**20:.1f}")
        for name, sizes in run.rss.items()
        if name in growth
    ]


def _data(seed: int, run: Run, facts: dict[str, str]) -> dict[str, Any]:
    book = run.book
    return {
        "machine": facts,
        "seed": seed,
        "inputs": book.num_inputs,
        "calls": run.num_calls,
        "seconds": round(run.seconds, 1),
        "honest_texts": book.num_honest,
        "honest_refused": book.num_refused,
        "violations": book.violations,
        "ends": [dict(zip(("method", "ended", "calls"), row, strict=True)) for row in _rows(run)],
        "rss_bytes": run.rss,
    }
