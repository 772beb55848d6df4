"""What the orchestrator adds to a round, through either door: `python -m benchmarks.gateway`.

The orchestrator has a core of its own; verifier, store and clients share another one, so that their work is not its.
The model is a toy that takes a fixed time per pass, and nothing drafts: each chunk is a round of one token.

Part one: one stream at a time through gRPC and through HTTP, in turn. Part two: many streams at once, at a stated
number of rounds a second, beside streams that wait for a place; a pass takes at most 32 of them, whose verdicts come
together.
"""

import argparse
import asyncio
import os
import statistics
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from benchmarks.counters import Counters
from benchmarks.doors import ACTIVE, WAITING, Gaps, over_grpc, over_http
from benchmarks.machine import facts
from benchmarks.results import facts_list, table, write
from benchmarks.serving import Cores, pinned
from outrider.cli.local import free_ports
from outrider.client import Client
from outrider.cluster import LocalCluster, Service, ServiceSpec

OVERHEAD = "outrider_round_overhead_seconds"
PASSES = "outrider_verify_events_total:decode_passes"
ALONE_PASS_S = 0.01
LOADS_PASS_S = (0.05, 0.025, 0.01)
"""Of 50 streams a pass takes 32, so that each has some 12, 25 or 60 rounds a second."""
SETTLE_S = 1.0
REPETITIONS = 3
WANTED_MS = 1.0
WANTED_P99_MS = 10.0
SHARES = (0.5, 0.9, 0.99)

Stream = Callable[[int, Gaps, int], Awaitable[None]]
"""Asks for so many tokens, notes its gaps, and has a priority."""


@dataclass
class Measured:
    """What one door did under one load."""

    door: str
    pass_s: float
    num_streams: int
    gaps: Gaps = field(default_factory=Gaps)
    seconds: float = 0.0
    own: list[Counters] = field(default_factory=list)
    """Of the orchestrator, per repetition."""
    verifiers: list[Counters] = field(default_factory=list)
    clients_cpu_s: float = 0.0

    @property
    def num_rounds(self) -> float:
        """Rounds whose chunks were written."""
        return sum(each.values[f"{OVERHEAD}_count"] for each in self.own)

    def overhead_ms(self, share: float) -> float:
        """Return a quantile of what the orchestrator added to a round."""
        names = self.own[0].values
        summed = {name: sum(each.values.get(name, 0.0) for each in self.own) for name in names}
        return 1000 * Counters(summed, 0.0, 0.0).quantile(OVERHEAD, share)

    def row(self) -> tuple[object, ...]:
        """Return the line of the table."""
        rounds, passes = self.num_rounds, sum(each.values[PASSES] for each in self.verifiers)
        cpu_ms = [1000 * sum(each.cpu_s for each in counted) / rounds for counted in (self.own, self.verifiers)]
        return (
            f"{self.door}, {self.num_streams}, {1000 * self.pass_s:g} ms",
            f"{rounds / self.seconds:.0f}", f"{rounds / passes:.1f}",
            *(f"{self.overhead_ms(share):.2f}" for share in SHARES),
            *(f"{self.gaps.quantile(share):.1f}" for share in SHARES),
            f"{cpu_ms[0]:.2f}", f"{100 * sum(each.cpu_s for each in self.own) / self.seconds:.0f} %",
            f"{cpu_ms[1]:.2f}", f"{1000 * self.clients_cpu_s / rounds:.2f}",
        )  # fmt: skip

    def data(self) -> dict[str, Any]:
        """Return everything, for machines."""
        return {
            "door": self.door,
            "streams": self.num_streams,
            "pass_ms": 1000 * self.pass_s,
            "rounds": self.num_rounds,
            "seconds": self.seconds,
            "passes": sum(each.values[PASSES] for each in self.verifiers),
            "overhead_ms": {f"p{round(100 * share)}": self.overhead_ms(share) for share in SHARES},
            "gap_ms": {"mean": statistics.fmean(self.gaps.values)}
            | {f"p{round(100 * share)}": self.gaps.quantile(share) for share in SHARES},
            "orchestrator_cpu_s": sum(each.cpu_s for each in self.own),
            "verifier_cpu_s": sum(each.cpu_s for each in self.verifiers),
            "clients_cpu_s": self.clients_cpu_s,
            "memory_mib": [each.memory_mib for each in self.own],
        }


@dataclass(frozen=True, slots=True)
class Bench:
    """A running cluster, and its two doors."""

    services: tuple[Service, Service]
    """Orchestrator and verifier."""
    ports: tuple[int, int]
    """Of their metrics."""
    doors: dict[str, Stream]

    async def read(self) -> tuple[Counters, Counters]:
        """Read what both services have counted."""
        orchestrator, verifier = zip(self.services, self.ports, strict=True)
        return await Counters.read(orchestrator[0].pid, orchestrator[1]), await Counters.read(
            verifier[0].pid, verifier[1]
        )

    async def watch(self, measured: Measured, during: Awaitable[object]) -> None:
        """Note what happens while something is awaited."""
        loop = asyncio.get_running_loop()
        before, began_s, own = await self.read(), loop.time(), os.times()
        measured.gaps.is_open = True
        await during
        measured.gaps.is_open = False
        ended_s, spent, after = loop.time(), os.times(), await self.read()
        measured.seconds += ended_s - began_s
        measured.clients_cpu_s += spent.user + spent.system - own.user - own.system
        measured.own.append(after[0].since(before[0]))
        measured.verifiers.append(after[1].since(before[1]))


def specs(pass_s: float, places: int, ports: Sequence[int], cores: Cores) -> list[ServiceSpec]:
    """Return the services: a verifier of fixed speed, and an orchestrator with both doors."""
    verify = {
        "OUTRIDER_VERIFY_MODEL": "toy", "OUTRIDER_VERIFY_TOY_DELAY_S": str(pass_s),
        "OUTRIDER_VERIFY_MAX_SESSIONS": str(places), "OUTRIDER_VERIFY_THREADS": "1",
        "OUTRIDER_VERIFY_METRICS_PORT": str(ports[1]),
    }  # fmt: skip
    orchestrate = {
        "OUTRIDER_ORCHESTRATOR_MODEL": "toy", "OUTRIDER_ORCHESTRATOR_HTTP_LISTEN": "127.0.0.1:0",
        "OUTRIDER_ORCHESTRATOR_MAX_SESSIONS": str(places), "OUTRIDER_ORCHESTRATOR_MAX_WAITING": "2000",
        "OUTRIDER_ORCHESTRATOR_MAX_WAIT_S": "600", "OUTRIDER_ORCHESTRATOR_METRICS_PORT": str(ports[0]),
    }  # fmt: skip
    return [
        ServiceSpec("verify-1", "verify", verify, cores.draft),
        ServiceSpec("orchestrator-1", "orchestrate", orchestrate, cores.verify),
    ]


async def opened(exits: AsyncExitStack, pass_s: float, places: int, cores: Cores) -> Bench:
    """Start a cluster whose passes take so long, and which runs so many generations at once."""
    ports = free_ports(2)
    cluster = await exits.enter_async_context(LocalCluster(specs(pass_s, places, ports, cores)))
    client = await exits.enter_async_context(Client(cluster.address, timeout_s=900))
    orchestrator, verifier = cluster.services["orchestrator-1"], cluster.services["verify-1"]
    address = _http_address(orchestrator.log_path.read_text())
    doors: dict[str, Stream] = {
        "gRPC": lambda tokens, gaps, priority: over_grpc(client, tokens, gaps, priority),
        "HTTP": lambda tokens, gaps, priority: over_http(address, tokens, gaps, priority),
    }
    return Bench((orchestrator, verifier), (ports[0], ports[1]), doors)


def _http_address(log: str) -> str:
    """Return the address of the HTTP door, as the orchestrator has logged it."""
    line = next(line for line in log.splitlines() if "OpenAI's API at http://" in line)
    return line.partition("http://")[2].partition("/v1")[0]


async def alone(pairs: int, num_tokens: int, cores: Cores) -> list[Measured]:
    """Measure one stream at a time, through both doors in turn."""
    async with AsyncExitStack() as exits:
        bench = await opened(exits, ALONE_PASS_S, 50, cores)
        found = {door: Measured(door, ALONE_PASS_S, 1) for door in bench.doors}
        for stream in bench.doors.values():
            await stream(20, Gaps(), ACTIVE)
        for _ in range(pairs):
            for door, stream in bench.doors.items():
                await bench.watch(found[door], stream(num_tokens, found[door].gaps, ACTIVE))
    return list(found.values())


async def crowd(pass_s: float, sizes: tuple[int, int], seconds: float, cores: Cores) -> list[Measured]:
    """Measure many streams at once, through both doors in turn, beside others that wait for a place.

    Args:
        pass_s: of the toy model.
        sizes: streams that are told something, and streams that wait.
        seconds: of each repetition.
        cores: where the services run.
    """
    num_active, num_waiting = sizes
    async with AsyncExitStack() as exits:
        bench = await opened(exits, pass_s, num_active, cores)
        found = {door: Measured(door, pass_s, num_active, Gaps(is_open=False)) for door in bench.doors}
        for _ in range(REPETITIONS):
            for door, measured in found.items():
                async with asyncio.TaskGroup() as tasks:
                    num_tokens = int(4 * seconds / pass_s)
                    measured.gaps.expect(num_active)
                    stream = bench.doors[door]
                    active = [tasks.create_task(_run(stream, num_tokens, measured.gaps)) for _ in range(num_active)]
                    await measured.gaps.begun.wait()
                    waiting = [
                        tasks.create_task(_run(each, 1, Gaps(), WAITING))
                        for each in bench.doors.values()
                        for _ in range(num_waiting // 2)
                    ]
                    await asyncio.sleep(SETTLE_S + num_waiting / 200)
                    await bench.watch(measured, asyncio.sleep(seconds))
                    for task in (*waiting, *active):
                        task.cancel()
    return list(found.values())


async def _run(stream: Stream, num_tokens: int, gaps: Gaps, priority: int = ACTIVE) -> None:
    """Run a stream as a task."""
    await stream(num_tokens, gaps, priority)


def page(found: Sequence[Measured], num_waiting: int, machine: dict[str, str]) -> str:
    """Write the results for people."""
    header = (
        "door, streams, pass", "rounds/s", "verdicts per pass", *(f"added p{round(100 * each)}" for each in SHARES),
        *(f"gap p{round(100 * each)}" for each in SHARES), "orchestrator's CPU", "of its core", "verifier's CPU",
        "clients' CPU",
    )  # fmt: skip
    one, many = [each for each in found if each.num_streams == 1], [each for each in found if each.num_streams > 1]
    worst_ms = max(each.overhead_ms(0.5) for each in one)
    lines = [f"{1000 * each.pass_s:g} ms, {each.door}: {each.overhead_ms(0.99):.2f}" for each in many]
    memory = "; ".join(
        f"{1000 * each.pass_s:g} ms, {each.door}: {', '.join(f'{own.memory_mib:.0f}' for own in each.own)}"
        for each in many
    )
    return f"""# What the orchestrator adds to a round

Milliseconds. "added": from a verdict's arrival in the orchestrator until its chunk was written to the client's
connection, the append to the log and all waiting for other streams' rounds included (`{OVERHEAD}`,
interpolated in its buckets). "gap": between two chunks as the client sees them: a pass, or two where the streams are
too many for one, and all that delays or bundles them on the way. CPU is per round. A toy model of fixed speed without
drafts: each chunk is a round of one token. The orchestrator has a core of its own; verifier, store and clients share
another one.
Beside many streams, {num_waiting} others wait for a place, half through either door.

{table(header, [each.row() for each in found])}

One stream: {worst_ms:.2f} ms are added at the median of the slower door (goal: at most {WANTED_MS:g}).
Many streams, at the 99th percentile (goal: at most {WANTED_P99_MS:g}): {"; ".join(lines)}.
Memory of the orchestrator after each repetition, MiB: {memory}.

{facts_list(machine)}
"""


async def measure(options: argparse.Namespace, cores: Cores) -> list[Measured]:
    """Measure both parts."""
    found = await alone(options.pairs, options.tokens, cores)
    for pass_s in LOADS_PASS_S:
        found += await crowd(pass_s, (options.active, options.waiting), options.seconds, cores)
    return found


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--active", type=int, default=50)
    parser.add_argument("--waiting", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    machine = facts()
    found = asyncio.run(measure(options, pinned()))
    machine |= {"load after": f"{os.getloadavg()[0]:.2f}"}
    data = {"measured": [each.data() for each in found], "waiting": options.waiting, "machine": machine}
    print(write("gateway", data, page(found, options.waiting, machine)))


if __name__ == "__main__":
    main()
