"""A run: inputs in rounds, honest clients beside them, and after each a look at what must not change."""

import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from outrider.client import Client
from outrider.generation import Started
from outrider.rpc import channel
from outrider.v1 import verify_pb2, verify_pb2_grpc
from tests.e2e.toys import Toys, ask
from tests.fuzz.health import Witness, at_rest, names, not_serving, returned
from tests.fuzz.honest import honest_clients
from tests.fuzz.inputs import make_call
from tests.fuzz.samples import Facts
from tests.fuzz.shooting import Book, Shooter

ROUND = 1_000
"""Calls between two looks."""
NUM_SESSIONS = 12
"""Sessions of clients that callers know the names of, made anew for every round."""
MAX_GROWTH_BYTES = 64 << 20
"""How much the resident memory of a service may grow behind the first round, however many follow.

Not nothing: what services remember is bounded, but fills up; the C library's allocator keeps holes; and calls that are
over wait for a collection of garbage.
"""


@dataclass
class Run:
    """What a run has found, and how it went."""

    book: Book = field(default_factory=Book)
    seconds: float = 0.0
    num_calls: int = 0
    rss: dict[str, list[int]] = field(default_factory=dict)
    """Resident bytes of every service: before, and behind each round."""

    def growth(self) -> dict[str, int]:
        """Return by how much the memory of every service grew behind the first round."""
        return {name: max(sizes[1:]) - sizes[1] for name, sizes in self.rss.items() if len(sizes) > 1}


class Campaign:
    """Sends the inputs of a seed to a cluster."""

    def __init__(self, toys: Toys, seed: int, on_news: Callable[[str], None] = lambda _: None) -> None:
        """Prepare a run; all of it is settled by the seed, but for names that the cluster gives."""
        self._toys, self._seed, self._on_news = toys, seed, on_news
        self.run = Run()
        self._book = self.run.book

    async def play(self, num_inputs: int, round_size: int = ROUND) -> Run:
        """Send as many inputs, at least; stop at a round that finds something."""
        client, witness = await self._toys.client(), Witness.of(self._toys)
        await self._facts(client)  # a first use of everything, before anything is measured
        before = await at_rest(self._toys)
        self._weigh()
        began_s = time.monotonic()
        while self._book.num_inputs < num_inputs and not self._book.violations:
            facts = await self._facts(client)
            await self._round(client, facts, round_size)
            self._book.violations += await not_serving(self._toys) + witness.defects()
            self._weigh()
            self.run.seconds = time.monotonic() - began_s
            self._on_news(f"{self._book.num_inputs} inputs, {self._book.num_honest} honest texts, {self._mib()}")
        self._book.violations += [f"not returned: {each}" for each in await returned(self._toys, before)]
        self._book.violations += [f"memory of {name} grew by {by} bytes" for name, by in self._overgrown()]
        return self.run

    async def _round(self, client: Client, facts: Facts, size: int) -> None:
        first = self.run.num_calls
        async with AsyncExitStack() as exits:
            shooter = await exits.enter_async_context(Shooter(await self._addresses(), self._book))
            await exits.enter_async_context(honest_clients(client, self._book))
            await shooter.shoot(make_call(self._seed, number, facts) for number in range(first, first + size))
        self.run.num_calls += size

    async def _addresses(self) -> dict[str, str]:
        return {
            role: await self._toys.address(self._toys.running(role)[0]) for role in ("orchestrate", "verify", "draft")
        }

    async def _facts(self, client: Client) -> Facts:
        """Return what callers know; sessions of earlier rounds may be deleted by now."""
        verify_address = (await self._addresses())["verify"]
        async with channel(verify_address) as to:
            asked = verify_pb2.VerifyServiceDescribeRequest()
            described = await verify_pb2_grpc.VerifyServiceStub(to).Describe(asked, timeout=60)
        sessions = [await self._session(client) for _ in range(NUM_SESSIONS)]
        workers = tuple(self._toys.running("draft"))
        return Facts(verify_address, described.worker.vocabulary, workers, tuple(sessions))

    async def _session(self, client: Client) -> str:
        events = [event async for event in client.generate(ask(max_tokens=2))]
        return next(str(event.session_id) for event in events if isinstance(event, Started))

    def _weigh(self) -> None:
        for name in names(self._toys):
            self.run.rss.setdefault(name, []).append(self._toys.rss(name))

    def _overgrown(self) -> list[tuple[str, int]]:
        return [(name, by) for name, by in self.run.growth().items() if by > MAX_GROWTH_BYTES]

    def _mib(self) -> str:
        return ", ".join(f"{name} {sizes[-1] >> 20} MiB" for name, sizes in self.run.rss.items())
