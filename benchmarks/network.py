"""A longer wire between draft worker and verifier: `python -m benchmarks.network`.

Toy models whose passes take a known time; a proxy in front of the verifier delays everything in both directions. The
orchestrator stands with the draft worker, so that a round crosses the wire twice: with the proposal and with the
verdict.
"""

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product

from rich.console import Console

from benchmarks.machine import facts
from benchmarks.one_session.arms import Arm, modelled_rate
from benchmarks.one_session.report import round_cost
from benchmarks.one_session.toys import CASES, VERIFY_S, measure_arms, outside
from benchmarks.results import facts_list, table, write
from benchmarks.serving import Cores, pinned, toy_specs
from benchmarks.slow_wire import SlowWire, free_ports
from outrider.client import Client
from outrider.cluster import LocalCluster, ServiceSpec
from outrider.gamma import PLAIN, Costs, choose

TRIPS_S = (0.0, 0.001, 0.005, 0.020)
"""Round trips that are added."""
QUICK_TRIPS_S = (0.0, 0.005)
MAX_GAMMA = 16
EXPECTED_TRIP_S = 0.0015
"""What plans expect of a round without an added trip."""

HOW = """One session at a time, toy target and draft, {verify_ms:g} ms a pass; a toy's name has its rate of agreement
and its draft's milliseconds per token. The trip added is half on the way to the verifier, half on the way back. Plans
are those that `outrider.gamma` chooses for the trip; each arm runs {repetitions} times, arms in turn. The model's value
is for the arm's own alpha, t_d and t_v of the sequential arm, and r: the trip added and what rounds without it took
outside the models ("r measured" is the median of what sequential rounds really took there). The verifier has core
{verify} to itself, everything else and the delaying proxy share core {draft}."""

console = Console(highlight=False, width=180)


@dataclass(frozen=True, slots=True)
class Row:
    """One arm at one trip."""

    models: str
    added_ms: float
    arm: str
    plan: str
    rate: float
    low: float
    high: float
    model: float
    alpha: float
    r_measured_ms: float
    r_modelled_ms: float

    @property
    def cells(self) -> tuple[str, ...]:
        """As text, in the order of `HEADER`."""
        return (
            self.models,
            f"{self.added_ms:g}",
            self.arm,
            self.plan,
            f"{self.rate:.1f} ({self.low:.1f} … {self.high:.1f})",
            f"{self.model:.1f}",
            f"{self.rate / self.model:.2f}",
            f"{self.alpha:.2f}" if self.plan else "",
            f"{self.r_measured_ms:.2f}" if self.plan else "",
            f"{self.r_modelled_ms:.2f}" if self.plan else "",
        )


HEADER = ("models", "trip added, ms", "decoding", "g0, g, window", "tokens/s: median (lowest … highest)", "model",
          "measured / model", "alpha", "r measured, ms", "r of the model, ms")  # fmt: skip


async def measure(
    trips_s: Sequence[float], cases: Sequence[tuple[float, float]], repetitions: int, cores: Cores
) -> list[Row]:
    """Measure every case at every trip; the shortest trip, measured first, gives what is added to the others."""
    rows: list[Row] = []
    own_s: dict[tuple[float, float], float] = {}
    for added_s, case in product(trips_s, cases):
        console.print(f"toy, {case[0]:g}, {1000 * case[1]:g} ms, {1000 * added_s:g} ms added")
        arms = await _arms(added_s, case, repetitions, cores)
        measured_s = round_cost("", outside(arms[1])).p50_ms / 1000
        own_s.setdefault(case, max(0.0, measured_s - added_s))
        rows += _rows(added_s, case, arms, (measured_s, own_s[case] + added_s))
    return rows


async def _arms(added_s: float, case: tuple[float, float], repetitions: int, cores: Cores) -> list[Arm]:
    agreement, draft_s = case
    listen, advertised = free_ports(2)
    specs = [_behind(spec, listen, advertised) for spec in toy_specs(agreement, draft_s, VERIFY_S, cores)]
    plans = [choose(agreement, draft_s, VERIFY_S, EXPECTED_TRIP_S + added_s, MAX_GAMMA, way) for way in (False, True)]
    async with (
        SlowWire(advertised, listen, added_s / 2),
        LocalCluster(specs) as cluster,
        Client(cluster.address) as client,
    ):
        arms = [Arm("plain", PLAIN, client), Arm("sequential", plans[0], client), Arm("pipelined", plans[1], client)]
        await measure_arms(arms, repetitions)
        return arms


def _behind(spec: ServiceSpec, listen: int, advertised: int) -> ServiceSpec:
    """Put a verifier behind the proxy; a draft worker and an orchestrator stay as they are."""
    if spec.role != "verify":
        return spec
    where = {"OUTRIDER_VERIFY_LISTEN": f"127.0.0.1:{listen}", "OUTRIDER_VERIFY_ADVERTISE": f"127.0.0.1:{advertised}"}
    return replace(spec, settings={**spec.settings, **where})


def _rows(added_s: float, case: tuple[float, float], arms: Sequence[Arm], trips_s: tuple[float, float]) -> list[Row]:
    measured_s, modelled_s = trips_s
    sequential = arms[1]
    costs = Costs(sequential.draft_s, sequential.pass_s, modelled_s)
    rows: list[Row] = []
    for arm in arms:
        plan = arm.plan
        text = f"{plan.restart_gamma}, {plan.gamma}, {plan.window}" if plan.enabled else ""
        model = modelled_rate(arm, costs if plan.enabled else Costs(0.0, arm.pass_s))
        rows.append(
            Row(f"toy, {case[0]:g}, {1000 * case[1]:g} ms", 1000 * added_s, arm.name, text, arm.rate, min(arm.rates),
                max(arm.rates), model, arm.alpha, 1000 * measured_s, 1000 * modelled_s)
        )  # fmt: skip
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and write down."""
    parser = argparse.ArgumentParser(prog="benchmarks.network", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="two trips and one case, once; under another name")
    parser.add_argument("--name", default="network", help="name of the result files")
    asked = parser.parse_args(argv)
    repetitions = 1 if asked.quick else asked.repetitions
    trips_s, cases = (QUICK_TRIPS_S, CASES[-1:]) if asked.quick else (TRIPS_S, CASES)
    machine, cores = facts(), pinned()
    rows = asyncio.run(measure(trips_s, cases, repetitions, cores))
    how = HOW.format(verify_ms=1000 * VERIFY_S, repetitions=repetitions, verify=cores.verify, draft=cores.draft)
    shown = table(HEADER, [row.cells for row in rows])
    page = "\n\n".join(["# A longer wire", facts_list(machine), how, shown]) + "\n"
    console.print(page)
    data = {"machine": machine, "how": how, "rows": [asdict(row) for row in rows]}
    write(f"{asked.name}_quick" if asked.quick else asked.name, data, page)


if __name__ == "__main__":
    main()
