"""Measures, prints and writes down: `python -m benchmarks.one_session`; see the package's docstring."""

import argparse
import asyncio
import os
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.machine import facts
from benchmarks.one_session.real import RealResults, measure_real
from benchmarks.one_session.report import COST_HEADER, HEADER, RoundCost, Row, as_data
from benchmarks.one_session.toys import EXPECTED_TRIP_S, VERIFY_S, ToyResults, measure_toys
from benchmarks.results import facts_list, table, write
from benchmarks.serving import Cores

HOW = """One session at a time. The verifier has core {verify} to itself; the draft worker, the orchestrator, the store
and the client share core {draft}. Each arm runs {repetitions} times, arms in turn; the rate counts tokens after the
first chunk. The model's value is that of `outrider.gamma` for the arm's own alpha and t_d, t_v of the sequential arm,
and r: the median round outside the models, toy draft and target (in toy arms their own, so that their sequential rate
checks little more than the formula). A toy's name has its rate of agreement and its draft's milliseconds per token; its
target takes {toy_ms:g} ms a pass. "undrafted" is the share of tokens for which the
drafter offered nothing; the model lets each of them take a pass and a trip. "plain, both cores" runs the target with
two threads on the cores that the other arms use."""

console = Console(highlight=False, width=180)


def main() -> None:
    """Run what the command line asks for."""
    asked = _arguments()
    machine = facts()
    cores = _pin()
    toys = ToyResults([], [], EXPECTED_TRIP_S)
    real = RealResults([], [])
    if "toy" in asked.parts:
        toys = asyncio.run(measure_toys(asked.repetitions, cores, console.print))
    if "real" in asked.parts:
        real = asyncio.run(measure_real(asked.repetitions, cores, toys.trip_s, asked.prompts, console.print))
    rows, costs = [*real.rows, *toys.rows], [*toys.costs, *real.costs]
    how = HOW.format(verify=cores.verify, draft=cores.draft, repetitions=asked.repetitions, toy_ms=1000 * VERIFY_S)
    _print(HEADER, [each.cells for each in rows])
    _print(COST_HEADER, [_cost_cells(each) for each in costs])
    path = write(asked.name, {"machine": machine, "how": how, **as_data(rows, costs)}, _page(machine, how, rows, costs))
    console.print(f"written to {path.relative_to(path.parents[2])}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.one_session", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=8, help="demo prompts per repetition of the real model")
    parser.add_argument("--parts", default="toy,real", help="of toy and real; r comes from toy")
    parser.add_argument("--name", default="one_session", help="name of the result files")
    return parser.parse_args()


def _pin() -> Cores:
    """Put this process, and with it the store, on the draft worker's core; return where the services go."""
    available = sorted(os.sched_getaffinity(0))
    if len(available) < 2:
        raise SystemExit("needs two cores: one for the verifier, one for the draft worker")
    verify, draft = available[:2]
    os.sched_setaffinity(0, {draft})
    return Cores(str(verify), str(draft), str(draft))


def _cost_cells(cost: RoundCost) -> tuple[str, ...]:
    return cost.setting, str(cost.num_rounds), f"{cost.p50_ms:.2f}", f"{cost.p99_ms:.2f}"


def _print(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    shown = Table()
    for name in header:
        shown.add_column(name)
    for cells in rows:
        shown.add_row(*cells)
    console.print(shown)


def _page(machine: dict[str, str], how: str, rows: list[Row], costs: list[RoundCost]) -> str:
    parts = [
        "# One session: measured beside the latency model",
        facts_list(machine),
        how,
        table(HEADER, [each.cells for each in rows]),
        "## A round outside the models",
        "What sequential rounds took beyond drafting and verifying. Toy passes take a known time, so theirs is the "
        "protocol's own cost; rounds of the real model also show how much its passes vary around their mean.",
        table(COST_HEADER, [_cost_cells(each) for each in costs]),
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
