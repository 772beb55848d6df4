"""What a lost process costs a client: `python -m benchmarks.resume`.

Toy models whose passes take a known time, as real processes. One client follows one generation through the loss of its
orchestrator (kill -9, with the client library's defaults, over two addresses) and another through the loss of its draft
worker. Reported is the longest pause between two chunks around the loss, less the usual pause, and how many tokens the
verifier computed again.
"""

import argparse
import asyncio
import signal
import socket
import statistics
import time
import urllib.request
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from itertools import pairwise

from rich.console import Console

from benchmarks.machine import facts
from benchmarks.results import facts_list, table, write
from outrider.client import Client
from outrider.cluster import LocalCluster, ServiceSpec
from outrider.generation import Chunk, GenerationRequest, SpeculationChoice, TextPrompt
from outrider.messages import SamplingParams

PASS_S = 0.02
"""One pass of the toy target."""
DRAFT_S = 0.002
BEFORE = 40
"""Tokens before the loss."""
TOKENS = 160
LOSSES = 8
COMPUTED = 'outrider_verify_events_total{kind="filled_tokens"}'
"""The verifier's count of tokens whose KV it computed ahead of decoding."""
PROMPT = "the cat sat on a mat. " * 40
LIMITS_S = {"orchestrate": 2.0, "draft": 0.1 + PASS_S}
"""What a loss may add: resuming; and the least patience that a verifier is ever given, with one pass."""

HOW = """Toy target ({pass_ms:g} ms a pass) and toy draft, prompt of {prompt} characters, {tokens} tokens, greedy;
{losses} losses of each kind, after {before} tokens. A pause is the time from the last chunk before the loss to the
first one after it, less the median pause of the same generation. "Computed again" is what the verifier prefilled for
the resumed session, of all its tokens: resident KV is used again but for the last, incomplete block. Everything shares
the machine's cores."""

console = Console(highlight=False, width=160)


@dataclass(frozen=True, slots=True)
class Loss:
    """One process that was killed under a generation."""

    role: str
    pause_s: float
    usual_s: float
    computed: int
    length: int
    """Tokens of the session at its end."""

    @property
    def added_s(self) -> float:
        """What the loss added."""
        return max(0.0, self.pause_s - self.usual_s)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class Cluster:
    """One verifier, and as many of the others as are needed after each loss."""

    def __init__(self) -> None:
        self.metrics_port = _free_port()
        self._count = 0
        specs = [self._verifier(), self.spec("draft"), *(self.spec("orchestrate") for _ in range(2))]
        self.processes = LocalCluster(specs)

    def _verifier(self) -> ServiceSpec:
        settings = {"MODEL": "toy", "TOY_DELAY_S": str(PASS_S), "METRICS_PORT": str(self.metrics_port)}
        return ServiceSpec("verify", "verify", {f"OUTRIDER_VERIFY_{key}": value for key, value in settings.items()})

    def spec(self, role: str) -> ServiceSpec:
        """Describe one more service."""
        self._count += 1
        if role == "draft":
            settings = {"OUTRIDER_DRAFT_DRAFTER": "toy", "OUTRIDER_DRAFT_MODEL": "toy"}
            return ServiceSpec(f"draft-{self._count}", role, {**settings, "OUTRIDER_DRAFT_TOY_DELAY_S": str(DRAFT_S)})
        return ServiceSpec(f"{role}-{self._count}", role, {"OUTRIDER_ORCHESTRATOR_MODEL": "toy"})

    def alive(self, role: str) -> list[str]:
        """Return the names of the live services of a role."""
        return [name for name, each in self.processes.services.items() if each.running and each.spec.role == role]

    async def replace(self, role: str) -> None:
        """Start one more service of a role and wait for it."""
        spec = self.spec(role)
        await self.processes.launch(spec)
        await self.processes.announced(spec.name)

    async def addresses(self) -> list[str]:
        """Return the orchestrators' addresses."""
        return [(await self.processes.announced(name)).address for name in self.alive("orchestrate")]

    async def knows_the_living(self, role: str) -> bool:
        """Whether exactly the live services of a role are announced."""
        return {worker.worker_id for worker in await self.processes.workers(role)} == set(self.alive(role))

    def computed(self) -> float:
        """Return how many tokens the verifier has prefilled so far."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(COMPUTED))


async def lose(cluster: Cluster, role: str) -> Loss:
    """Follow a generation through the loss of one process."""
    times_s, sizes, position, killed_at, computed = list[float](), list[int](), 0, 0, 0.0
    request = GenerationRequest(
        TextPrompt(PROMPT), max_tokens=TOKENS, sampling=SamplingParams(temperature=0.0), ignore_eos=True,
        speculation=SpeculationChoice(gamma=4, window=8),
    )  # fmt: skip
    async with Client(await cluster.addresses()) as client, aclosing(client.generate(request)) as events:
        async for event in events:
            if not isinstance(event, Chunk):
                continue
            times_s.append(time.monotonic())
            sizes.append(len(event.token_ids))
            position = event.start + len(event.token_ids)
            if killed_at == 0 and sum(sizes) >= BEFORE:
                killed_at, computed = len(times_s), cluster.computed()
                cluster.processes.services[cluster.alive(role)[0]].signal(signal.SIGKILL)
                times_s[-1] = time.monotonic()
    pauses_s = [later - sooner for sooner, later in pairwise(times_s)]
    around = pauses_s[killed_at - 1 : killed_at + 4]
    return Loss(role, max(around), statistics.median(pauses_s), round(cluster.computed() - computed), position)


async def measure(losses: int) -> list[Loss]:
    """Measure losses of both kinds."""
    cluster, found = Cluster(), list[Loss]()
    async with cluster.processes:
        for role in ("orchestrate", "draft"):
            for _ in range(losses):
                found.append(await lose(cluster, role))
                console.print(f"{role}: {1000 * found[-1].added_s:.0f} ms added")
                await _settled(cluster, role)
    return found


async def _settled(cluster: Cluster, role: str) -> None:
    """Replace what was killed, and wait until nobody is announced who is dead."""
    await cluster.replace(role)
    async with asyncio.timeout(60):
        while not await cluster.knows_the_living(role):  # noqa: ASYNC110  (time to live runs out)
            await asyncio.sleep(0.1)


def _row(role: str, losses: Sequence[Loss]) -> tuple[str, ...]:
    added_ms = sorted(1000 * each.added_s for each in losses)
    most = max(losses, key=lambda each: each.computed)
    worst = "yes" if added_ms[-1] <= 1000 * LIMITS_S[role] else "no"
    return (
        role, str(len(losses)), f"{statistics.median(added_ms):.0f}", f"{added_ms[-1]:.0f}",
        f"{1000 * LIMITS_S[role]:.0f}", worst, f"{1000 * statistics.median(each.usual_s for each in losses):.0f}",
        f"{most.computed} of {most.length}" if role == "orchestrate" else "",
    )  # fmt: skip


HEADER = ("killed", "losses", "added ms, median", "added ms, most", "limit ms", "within it", "usual pause ms",
          "computed again, most")  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and write down."""
    parser = argparse.ArgumentParser(prog="benchmarks.resume", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two losses of each kind; under another name")
    asked = parser.parse_args(argv)
    num_losses, machine = 2 if asked.quick else LOSSES, facts()
    losses = asyncio.run(measure(num_losses))
    how = HOW.format(pass_ms=1000 * PASS_S, prompt=len(PROMPT), tokens=TOKENS, losses=num_losses, before=BEFORE)
    rows = [_row(role, [each for each in losses if each.role == role]) for role in LIMITS_S]
    page = "\n\n".join(["# A process is killed", facts_list(machine), how, table(HEADER, rows)]) + "\n"
    console.print(page)
    data = {"machine": machine, "how": how, "losses": [{**asdict(each), "added_s": each.added_s} for each in losses]}
    write("resume_quick" if asked.quick else "resume", data, page)


if __name__ == "__main__":
    main()
