"""What sessions cost in Redis or Valkey: `python -m benchmarks.store`.

Memory is the difference of the server's `used_memory` over many sessions of 1,000 tokens each, all keys counted; time
is that of one commit as an orchestrator makes it, to a server on the same machine with an append-only file.
"""

import argparse
import asyncio
import random
import secrets
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.machine import facts
from benchmarks.results import facts_list, table, write
from outrider.ids import Epoch, FinishReason, Generation, Mode, SessionId, TokenClass, WorkerId
from outrider.messages import SamplingParams
from outrider.store.connect import StoreClient, open_client
from outrider.store.embedded import EmbeddedServer, find_server
from outrider.store.records import KvLocation, SessionState, SessionStatus
from outrider.store.sessions import SessionStore

GIB = 2**30
NUM_TOKENS = 1000
PROMPT_LEN = 100
COMMIT = 4
"""Tokens of one commit: about what a round brings."""
VOCABULARY = 150_000
WANTED_PER_GIB = 100_000
WANTED_P50_MS = 1.0

HOW = """Sessions have {num_tokens} tokens, {prompt_len} of them prompt, token classes and kinds, the state of a seeded
request with a key and a stop string, a lease, and one entry in the KV directory. *Idle* sessions have ended and given
their lease up, as nearly all stored sessions have; *running* ones have not, and the server keeps room behind strings
that grow. Memory is `used_memory` after {num_idle} idle or {num_running} running sessions, less that before, divided by
their number. A commit appends {commit} tokens under the fencing number and refreshes the time to live of all keys,
awaited in Python; the append-only file is synced every second."""

console = Console(highlight=False, width=160)


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured on one server."""

    server: str
    idle_bytes: float
    """Per session."""
    running_bytes: float
    p50_ms: float
    p99_ms: float
    commits_per_s: float
    """Of 32 sessions at once."""

    @property
    def per_gib(self) -> int:
        """Idle sessions in 2**30 bytes."""
        return int(GIB / self.idle_bytes)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is done."""

    idle: int = 6000
    running: int = 500
    commits: int = 4000


QUICK = Sizes(idle=300, running=50, commits=300)

STATE = SessionState(
    model="SmolLM2-135M-Instruct",
    mode=Mode.COUPLED,
    prompt_len=PROMPT_LEN,
    max_tokens=NUM_TOKENS - PROMPT_LEN,
    sampling=SamplingParams(temperature=0.7, top_p=0.9),
    seed=7,
    stop_strings=("\n\n",),
    stop_ids=(0, 2),
    verifier_id=WorkerId("verify-host-1-0123abcd"),
)


class Load:
    """Writes sessions as orchestrators do."""

    def __init__(self, client: StoreClient) -> None:
        """Write through a client."""
        self._store = SessionStore(client)
        self._ids = random.Random(1).choices(range(VOCABULARY), k=NUM_TOKENS)

    async def session(self, commit: int, *, finish: bool) -> None:
        """Write one whole session by appends of `commit` tokens."""
        session_id, fence = await self._begin()
        for start in range(PROMPT_LEN, NUM_TOKENS, commit):
            await self._commit(session_id, fence, start, commit)
        location = KvLocation(STATE.verifier_id, NUM_TOKENS - 1, Epoch(Generation(fence, 3), 100))
        await self._store.put_kv_location(session_id, fence, location)
        if finish:
            ended = {"status": SessionStatus.FINISHED, "finish_reason": FinishReason.LENGTH}
            await self._store.update_state(session_id, fence, **ended, draft_id=WorkerId("draft-host-1-0123abcd"))
            await self._store.release_lease(session_id, fence)

    async def commit_times(self, count: int) -> list[float]:
        """Return the seconds of single commits, one after the other, over as many sessions as that takes."""
        times: list[float] = []
        while len(times) < count:
            session_id, fence = await self._begin()
            for start in range(PROMPT_LEN, NUM_TOKENS, COMMIT):
                began = time.perf_counter()
                await self._commit(session_id, fence, start, COMMIT)
                times.append(time.perf_counter() - began)
        return times[:count]

    async def _begin(self) -> tuple[SessionId, int]:
        session_id, state = SessionId(secrets.token_hex(12)), replace(STATE, key=secrets.token_bytes(16))
        classes = [TokenClass.PROMPT] * PROMPT_LEN
        owner = f"orchestrator-host-{secrets.token_hex(4)}/{secrets.token_hex(8)}"
        lease = await self._store.create(session_id, state, self._ids[:PROMPT_LEN], classes, owner, 10.0)
        return session_id, lease.fence

    async def _commit(self, session_id: SessionId, fence: int, start: int, count: int) -> None:
        token_ids = self._ids[start : start + count]
        await self._store.append(
            session_id, fence, start, token_ids, [TokenClass.DECODE] * len(token_ids), b"\x01" * len(token_ids)
        )


async def used(client: StoreClient) -> int:
    """Return the server's `used_memory`."""
    untyped: Any = client
    return int((await untyped.info("memory"))["used_memory"])


async def fill(client: StoreClient, count: int, commit: int, *, finish: bool) -> float:
    """Write sessions, 16 at once, and return the bytes that each takes."""
    load = Load(client)
    await load.session(commit, finish=finish)  # connections and scripts are there
    before = await used(client)
    left = iter(range(count))

    async def writer() -> None:
        for _ in left:
            await load.session(commit, finish=finish)

    await asyncio.gather(*(writer() for _ in range(16)))
    return (await used(client) - before) / count


async def measure(program: Path, sizes: Sizes) -> Row:
    """Measure one server program."""
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as folder:
        async with EmbeddedServer(Path(folder), program=program) as server:
            client = open_client(server.url)
            untyped: Any = client
            about = await untyped.info("server")
            times = sorted(await Load(client).commit_times(sizes.commits))
            began = time.perf_counter()
            await asyncio.gather(*(Load(client).commit_times(sizes.commits // 16) for _ in range(32)))
            rate = 32 * (sizes.commits // 16) / (time.perf_counter() - began)
            idle = await fill(client, sizes.idle, 50, finish=True)
            running = await fill(client, sizes.running, COMMIT, finish=False)
            await client.aclose()
    name = f"Valkey {about['valkey_version']}" if "valkey_version" in about else f"Redis {about['redis_version']}"
    p50_ms, p99_ms = 1000 * statistics.median(times), 1000 * times[int(0.99 * len(times))]
    return Row(name, idle, running, p50_ms, p99_ms, rate)


def report(rows: Sequence[Row]) -> str:
    """Return the table."""
    header = ("server", "bytes per idle session", "idle sessions per GiB", "bytes per running session",
              "commit p50, ms", "commit p99, ms", "commits/s, 32 sessions")  # fmt: skip
    cells = [
        (row.server, f"{row.idle_bytes:.0f}", f"{row.per_gib:,}", f"{row.running_bytes:.0f}",
         f"{row.p50_ms:.3f}", f"{row.p99_ms:.3f}", f"{row.commits_per_s:.0f}")
        for row in rows
    ]  # fmt: skip
    return table(header, cells)


def main() -> None:
    """Measure the servers that are here; exit with 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few sessions: shows only that everything runs")
    sizes = QUICK if (quick := parser.parse_args().quick) else Sizes()
    machine = facts()
    redis = shutil.which("redis-server")
    programs = [find_server(), *([Path(redis)] if redis else [])]
    rows = [asyncio.run(measure(program, sizes)) for program in programs]
    goals = f"at least {WANTED_PER_GIB:,} idle sessions per GiB, p50 of a commit at most {WANTED_P50_MS:g} ms"
    missed = [row.server for row in rows if row.per_gib < WANTED_PER_GIB or row.p50_ms > WANTED_P50_MS]
    verdict = f"Goals ({goals}): {'missed on ' + ', '.join(missed) if missed else 'reached'}."
    how = HOW.format(num_tokens=NUM_TOKENS, prompt_len=PROMPT_LEN, num_idle=sizes.idle, num_running=sizes.running,
                     commit=COMMIT)  # fmt: skip
    page = f"# Sessions in the store\n\n{how}\n\n{report(rows)}\n\n{verdict}\n\n{facts_list(machine)}\n"
    data = {"machine": machine, "rows": [{**asdict(row), "per_gib": row.per_gib} for row in rows]}
    console.print(page, markup=False)
    console.print(str(write("store_quick" if quick else "store", data, page)))
    raise SystemExit(1 if missed else 0)


if __name__ == "__main__":
    main()
