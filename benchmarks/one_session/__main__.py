"""Measures, prints and writes down: `python -m benchmarks.one_session`; see the package's docstring."""

import argparse
import asyncio
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table as ShownTable

from benchmarks.machine import facts
from benchmarks.one_session.alone import ALONE_HEADER
from benchmarks.one_session.real import RealResults, measure_real
from benchmarks.one_session.report import COST_HEADER, HEADER, RoundCost, as_data
from benchmarks.one_session.toys import EXPECTED_TRIP_S, VERIFY_S, ToyResults, measure_toys
from benchmarks.results import facts_list, table, write
from benchmarks.serving import pinned

HOW = """One session at a time. The verifier has core {verify} to itself; the draft worker, the orchestrator, the store
and the client share core {draft}. Each arm runs {repetitions} times, arms in turn; the rate counts tokens after the
first chunk. The model's value is that of `outrider.gamma` for the arm's own alpha and t_d, t_v of the sequential arm,
and r: the median round outside the models, toy draft and target (in toy arms their own, so that their sequential rate
checks little more than the formula). A toy's name has its rate of agreement and its draft's milliseconds per token; its
target takes {toy_ms:g} ms a pass. "undrafted" is the share of tokens for which the drafter offered nothing; the model
lets each of them take a pass and a trip. "plain, both cores" runs the target with two threads on the cores that the
other arms use. One process: no services, streams or store; draft and target take turns on the verifier's core, or
`transformers` uses both with two threads; gamma is that of the sequential arm."""

console = Console(highlight=False, width=180)

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Header and rows."""


def main() -> None:
    """Run what the command line asks for."""
    asked = _arguments()
    machine = facts()
    cores = pinned()
    toys = ToyResults([], [], EXPECTED_TRIP_S)
    real = RealResults([], [])
    if "toy" in asked.parts:
        toys = asyncio.run(measure_toys(asked.repetitions, cores, console.print))
    if "real" in asked.parts:
        real = asyncio.run(measure_real(asked.repetitions, cores, toys.trip_s, asked.prompts, console.print))
    rows, costs = [*real.rows, *toys.rows], [*toys.costs, *real.costs]
    alone = [each.cells(real.rows[0].rate) for each in real.alone]
    how = HOW.format(verify=cores.verify, draft=cores.draft, repetitions=asked.repetitions, toy_ms=1000 * VERIFY_S)
    tables = [
        (HEADER, [each.cells for each in rows]),
        (ALONE_HEADER, alone),
        (COST_HEADER, [_cost_cells(each) for each in costs]),
    ]
    for header, lines in tables:
        _print(header, lines)
    data = as_data(rows, costs) | {"alone": [dict(zip(ALONE_HEADER, cells, strict=True)) for cells in alone]}
    name = f"{asked.name}_quick" if asked.quick else asked.name
    path = write(name, {"machine": machine, "how": how, **data}, _page(machine, how, tables))
    console.print(f"written to {path.relative_to(path.parents[2])}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.one_session", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=5, help="demo prompts per repetition of the real model")
    parser.add_argument("--parts", default="toy,real", help="of toy and real; r comes from toy")
    parser.add_argument("--name", default="one_session", help="name of the result files")
    parser.add_argument("--quick", action="store_true", help="everything once, two prompts; under another name")
    asked = parser.parse_args()
    if asked.quick:
        asked.repetitions, asked.prompts = 1, 2
    return asked


def _cost_cells(cost: RoundCost) -> tuple[str, ...]:
    return cost.setting, str(cost.num_rounds), f"{cost.p50_ms:.2f}", f"{cost.p99_ms:.2f}"


def _print(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    shown = ShownTable()
    for name in header:
        shown.add_column(name)
    for cells in rows:
        shown.add_row(*cells)
    console.print(shown)


def _page(machine: dict[str, str], how: str, tables: Sequence[Table]) -> str:
    rows, alone, costs = (table(header, lines) for header, lines in tables)
    parts = [
        "# One session: measured beside the latency model",
        facts_list(machine),
        how,
        rows,
        "## In one process",
        alone,
        "## A round outside the models",
        "What sequential rounds took beyond drafting and verifying. Toy passes take a known time, so theirs is the "
        "protocol's own cost; rounds of the real model also show how much its passes vary around their mean.",
        costs,
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
