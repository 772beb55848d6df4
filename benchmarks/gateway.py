"""What the HTTP door costs: `python -m benchmarks.gateway`.

Part one: one stream at a time through gRPC and through HTTP, in turn, on the same orchestrator, with a toy model that
takes a fixed time per pass. The time between two chunks is a round; the medians' difference is what HTTP adds.

Part two: 500 connections that wait and 50 streams at once, and what a round is late compared with one stream alone.
The orchestrator runs in a process of its own, so that the clients' work is not its.
"""

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import psutil

from benchmarks.machine import facts
from benchmarks.results import facts_list, table, write
from outrider.client import Client
from outrider.cluster import LocalCluster, ServiceSpec
from outrider.errors import Unavailable
from outrider.generation import Chunk, GenerationRequest, SpeculationChoice, TextPrompt
from outrider.messages import SamplingParams

PROMPT = "the cat sat on "
PASS_S = 0.01
WANTED_OVERHEAD_MS = 1.0
WANTED_LATE_MS = 10.0


@dataclass
class Gaps:
    """Times between chunks, in milliseconds."""

    values: list[float] = field(default_factory=list)

    def quantile(self, share: float) -> float:
        """Return a quantile."""
        ordered = sorted(self.values)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def over_grpc(client: Client, num_tokens: int, gaps: Gaps) -> None:
    """Ask for one stream and note when its chunks come."""
    request = GenerationRequest(
        TextPrompt(PROMPT), max_tokens=num_tokens, sampling=SamplingParams(temperature=0.0), ignore_eos=True,
        speculation=SpeculationChoice(off=True),
    )  # fmt: skip
    last = 0.0
    async for event in client.generate(request):
        now = time.perf_counter()
        if isinstance(event, Chunk):
            if last:
                gaps.values.append(1000 * (now - last))
            last = now


async def over_http(address: str, num_tokens: int, gaps: Gaps) -> None:
    """Ask for one stream and note when its chunks come; it only looks at them, so that it costs the machine little."""
    host, _, port = address.rpartition(":")
    body = json.dumps({
        "prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "outrider": {"off": True, "return_token_origin": True},
    }).encode()  # fmt: skip
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n"
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
    try:
        writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + body)
        last = 0.0
        while not (line := await reader.readline()).startswith(b"data: [DONE]"):
            now = time.perf_counter()
            if not line:
                raise Unavailable("the stream ended early")
            if b'"texts":[' in line:
                if last:
                    gaps.values.append(1000 * (now - last))
                last = now
    finally:
        writer.close()


def specs(http: str) -> list[ServiceSpec]:
    """Return the services: a verifier of fixed speed, and an orchestrator with both doors."""
    verify = {
        "OUTRIDER_VERIFY_MODEL": "toy", "OUTRIDER_VERIFY_TOY_DELAY_S": str(PASS_S),
        "OUTRIDER_VERIFY_MAX_SESSIONS": "64", "OUTRIDER_VERIFY_THREADS": "1",
    }  # fmt: skip
    orchestrate = {"OUTRIDER_ORCHESTRATOR_MODEL": "toy", "OUTRIDER_ORCHESTRATOR_HTTP_LISTEN": http}
    return [ServiceSpec("verify-1", "verify", verify), ServiceSpec("orchestrator-1", "orchestrate", orchestrate)]


async def overhead(client: Client, address: str, pairs: int, num_tokens: int) -> tuple[Gaps, Gaps]:
    """Measure both doors in turn."""
    grpc_gaps, http_gaps = Gaps(), Gaps()
    await over_grpc(client, 20, Gaps())
    await over_http(address, 20, Gaps())
    for _ in range(pairs):
        await over_grpc(client, num_tokens, grpc_gaps)
        await over_http(address, num_tokens, http_gaps)
    return grpc_gaps, http_gaps


async def crowd(
    address: str, client: Client, pid: int, num_active: int, num_idle: int, num_tokens: int
) -> dict[str, Any]:
    """Measure many streams at once, through either door, beside connections that wait."""
    host, _, port = address.rpartition(":")
    process, memory = psutil.Process(pid), list[float]()
    async with AsyncExitStack() as exits:
        for _ in range(num_idle):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n")
            exits.callback(writer.close)
        grpc_gaps, http_gaps = Gaps(), Gaps()
        for _ in range(3):
            memory.append(process.memory_info().rss / 2**20)
            await asyncio.gather(*(over_grpc(client, num_tokens, grpc_gaps) for _ in range(num_active)))
            await asyncio.gather(*(over_http(address, num_tokens, http_gaps) for _ in range(num_active)))
        memory.append(process.memory_info().rss / 2**20)
    return {"grpc": grpc_gaps, "http": http_gaps, "memory_mib": memory}


def _row(name: str, gaps: Gaps) -> tuple[object, ...]:
    return (name, len(gaps.values), *(f"{gaps.quantile(share):.2f}" for share in (0.5, 0.9, 0.99)))


def page(alone: tuple[Gaps, Gaps], many: dict[str, Any], machine: dict[str, str], sizes: Sequence[int]) -> str:
    """Write the results for people."""
    added = alone[1].quantile(0.5) - alone[0].quantile(0.5)
    late = many["http"].quantile(0.99) - many["grpc"].quantile(0.99)
    reached = "reached" if added <= WANTED_OVERHEAD_MS and late <= WANTED_LATE_MS else "missed"
    memory = ", ".join(f"{each:.0f}" for each in many["memory_mib"])
    rows = [
        _row("gRPC, one stream", alone[0]),
        _row("HTTP, one stream", alone[1]),
        _row(f"gRPC, {sizes[0]} streams", many["grpc"]),
        _row(f"HTTP, {sizes[0]} streams", many["http"]),
    ]
    return f"""# The HTTP door

Times between two chunks of a stream, in ms, of a toy model that takes {1000 * PASS_S:g} ms per pass, without
drafts: each chunk is a round of one token. Clients, orchestrator and verifier are three processes that share this
machine's cores; both doors were asked in turn. Beside the {sizes[0]} streams {sizes[1]} connections waited.

{table(("door", "rounds", "p50", "p90", "p99"), rows)}

A round over HTTP takes {added:+.2f} ms more than over gRPC at the median (goal: at most {WANTED_OVERHEAD_MS:g}); with
{sizes[0]} streams at once {late:+.2f} ms at the 99th percentile (goal: at most {WANTED_LATE_MS:g}): {reached}.
Memory of the orchestrator's process before and after each of three rounds of streams: {memory} MiB.

{facts_list(machine)}
"""


async def measure(options: argparse.Namespace) -> tuple[tuple[Gaps, Gaps], dict[str, Any]]:
    """Start the services, and measure both parts."""
    async with LocalCluster(specs("127.0.0.1:0")) as cluster, Client(cluster.address, timeout_s=300) as client:
        service = cluster.services["orchestrator-1"]
        address = _http_address(service.log_path.read_text())
        alone = await overhead(client, address, options.pairs, options.tokens)
        many = await crowd(address, client, service.pid, options.active, options.idle, options.tokens)
    return alone, many


def _http_address(log: str) -> str:
    """Return the address of the HTTP door, as the orchestrator has logged it."""
    line = next(line for line in log.splitlines() if "OpenAI's API at http://" in line)
    return line.partition("http://")[2].partition("/v1")[0]


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--active", type=int, default=50)
    parser.add_argument("--idle", type=int, default=500)
    options = parser.parse_args()
    machine = {**facts(), "load after": f"{os.getloadavg()[0]:.2f}"}
    alone, many = asyncio.run(measure(options))
    data = {
        "alone_ms": {name: _numbers(gaps) for name, gaps in zip(("grpc", "http"), alone, strict=True)},
        "many_ms": {name: _numbers(many[name]) for name in ("grpc", "http")},
        "memory_mib": many["memory_mib"],
        "machine": machine,
    }
    print(write("gateway", data, page(alone, many, machine, (options.active, options.idle))))


def _numbers(gaps: Gaps) -> dict[str, float]:
    return {
        "count": len(gaps.values),
        "mean": statistics.fmean(gaps.values),
        **{f"p{round(100 * share)}": gaps.quantile(share) for share in (0.5, 0.9, 0.99)},
    }


if __name__ == "__main__":
    main()
