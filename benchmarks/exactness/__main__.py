"""Runs the parts, prints their counts, writes them down; exit status 1 unless all of them passed.

python -m benchmarks.exactness                                  all of it
python -m benchmarks.exactness --parts greedy,law --sample 24   some of it, smaller
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from benchmarks.drafts import CAUSAL_LM, PROMPT_LOOKUP
from benchmarks.exactness.law import check_law
from benchmarks.exactness.outcome import Outcome
from benchmarks.exactness.stock import DTYPE, check_stock
from benchmarks.exactness.twins import check_twins
from benchmarks.machine import facts
from benchmarks.prompt_set import load_prompts
from benchmarks.results import facts_list, table, write
from benchmarks.serving import Progress, real_specs
from outrider.client import Client
from outrider.cluster import LocalCluster
from outrider.ids import Mode

PARTS = ("float32", "greedy", "coupled", "law")
STOCK_PROMPTS = 50
STOCK_TOKENS = 24
TWIN_TOKENS = 32
LAW_GENERATIONS = 1500
LAW_SHARE = LAW_GENERATIONS / 200
"""Generations of a sample of the law per prompt of `--sample`."""

console = Console(highlight=False)


def main() -> None:
    """Run what the command line asks for."""
    asked = _arguments()
    machine = facts()
    outcomes = [_run(part, asked.sample) for part in asked.parts]
    passed = all(outcome.passed for outcome in outcomes)
    verdict = "exact" if passed else "NOT exact"
    data = {"machine": machine, "verdict": verdict, "parts": [asdict(outcome) for outcome in outcomes]}
    path = write(asked.name, data, _page(machine, outcomes, verdict))
    console.print(f"\n{verdict}; written to {path.relative_to(path.parents[2])}")
    sys.exit(0 if passed else 1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.exactness", description=__doc__)
    parser.add_argument("--parts", type=_parts, default=PARTS, help=f"comma-separated, of {', '.join(PARTS)}")
    parser.add_argument("--sample", type=int, default=0, help="prompts per part at most; 0: all that belong to it")
    parser.add_argument("--name", default="exactness", help="name of the result files")
    return parser.parse_args()


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    if unknown := set(parts) - set(PARTS):
        raise argparse.ArgumentTypeError(f"no such part: {', '.join(sorted(unknown))}")
    return parts


def _run(part: str, sample: int) -> Outcome:
    console.print(f"[bold]{part}[/bold]")
    runs: dict[str, Callable[[], Outcome]] = {
        "float32": lambda: asyncio.run(_stock(sample or STOCK_PROMPTS)),
        "greedy": lambda: asyncio.run(_twins(Mode.GREEDY, sample)),
        "coupled": lambda: asyncio.run(_twins(Mode.COUPLED, sample)),
        "law": lambda: check_law(round(sample * LAW_SHARE) or LAW_GENERATIONS, threads=os.cpu_count() or 1),
    }
    outcome = runs[part]()
    _show(outcome)
    return outcome


async def _stock(num: int) -> Outcome:
    async with (
        LocalCluster(real_specs(DTYPE, (CAUSAL_LM, PROMPT_LOOKUP))) as cluster,
        Client(cluster.address) as client,
    ):
        with _progress() as progress:
            return await check_stock(client, load_prompts()[:num], STOCK_TOKENS, progress)


async def _twins(mode: Mode, num: int) -> Outcome:
    specs = real_specs("bfloat16", (CAUSAL_LM, PROMPT_LOOKUP))
    async with LocalCluster(specs) as cluster, Client(cluster.address) as client:
        with _progress() as progress:
            return await check_twins(client, load_prompts()[: num or None], mode, TWIN_TOKENS, progress)


@contextmanager
def _progress() -> Iterator[Progress]:
    """Show how far a stretch of generations is, on a line that vanishes."""
    with console.status("asking") as status:
        yield lambda done, total: status.update(f"{done} of {total}")


def _show(outcome: Outcome) -> None:
    console.print(f"  {outcome.num_equal} of {outcome.num_checked} as promised, {outcome.seconds:.0f} s")
    console.print("  " + ", ".join(f"{amount} {name}" for name, amount in outcome.counts.items()))
    groups = Table(box=None, padding=(0, 2, 0, 2), show_header=False)
    for name, (equal, checked) in outcome.groups.items():
        groups.add_row(name, f"{equal} / {checked}")
    console.print(groups)
    for line in outcome.notes:
        console.print(f"  {line}", soft_wrap=True)
    for line in outcome.mismatches:
        console.print(f"  [red]mismatch:[/red] {line}", soft_wrap=True, markup=True)


def _page(machine: dict[str, str], outcomes: list[Outcome], verdict: str) -> str:
    rows = [
        (each.part, each.num_checked, each.num_equal, len(each.mismatches), round(each.seconds)) for each in outcomes
    ]
    parts = [f"# Exactness: {verdict}", facts_list(machine)]
    parts.append(table(("part", "checked", "as promised", "mismatches", "seconds"), rows))
    for outcome in outcomes:
        counts = ", ".join(f"{amount} {name}" for name, amount in outcome.counts.items())
        groups = [(name, f"{equal} / {checked}") for name, (equal, checked) in outcome.groups.items()]
        lines = [f"- {line}" for line in outcome.notes + [f"**mismatch** {each}" for each in outcome.mismatches]]
        parts += [f"## {outcome.part}", counts, table(("group", "as promised"), groups), "\n".join(lines)]
    return "\n\n".join(part for part in parts if part) + "\n"


if __name__ == "__main__":
    main()
