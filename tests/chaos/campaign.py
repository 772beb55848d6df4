"""A run: sessions on the one side, faults on the other, and after each fault a look at both.

A run is a row of acts. In an act all slots run sessions while a number of faults happen; at its end the slots finish
what they have begun, and places, KV, leases and logs are looked at.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import pairwise

from outrider.client import NO_RETRY, Client
from outrider.errors import Unavailable
from outrider.generation import Chunk, Started
from outrider.ids import SessionId
from tests.chaos.balance import Usage, check_leases, check_logs, check_usage, usage
from tests.chaos.faults import Trace, strike
from tests.chaos.fleet import Fleet
from tests.chaos.listeners import Book, Listener
from tests.chaos.schedule import ORCHESTRATORS, Fault, groups
from tests.chaos.twins import OFF, Script

TIMEOUT_S = 900.0
"""Deadline of a session, pauses included."""
QUIET_S = 2.0
"""Time without faults at the start, in which the usual gaps between tokens are learnt."""
RECOVERY_S = 80.0
"""Longest wait for the next token of every session after a fault."""


@dataclass
class Outcome:
    """What became of a fault."""

    fault: Fault
    injected_s: float = 0.0
    """When it began, on the monotonic clock."""
    healed_s: float = 0.0
    was_seen: bool = False
    """Whether it met anything."""
    alone: bool = True
    """Whether no other fault was there at the same time."""
    waits_s: list[float] = field(default_factory=list)
    """The longest wait for a token from its beginning to the first one after it, of every session that ran."""


@dataclass
class Run:
    """What a run has found."""

    book: Book = field(default_factory=Book)
    outcomes: list[Outcome] = field(default_factory=list)
    usual_gap_s: float = 0.0
    """Longest wait for a token while nothing is wrong: who waits longer has been paused."""
    num_stored: int = 0
    """Sessions in the store at the end, those that a lost call left behind included."""
    returned_s: list[float] = field(default_factory=list)
    """How long the return of what was in use took, by act."""
    seconds: float = 0.0


class Campaign:
    """Runs faults against a fleet that is up."""

    def __init__(
        self,
        fleet: Fleet,
        scripts: Sequence[Script],
        *,
        listener: type[Listener] = Listener,
        quiet_s: float = QUIET_S,
        on_news: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Prepare a run.

        Args:
            fleet: the processes.
            scripts: one per slot.
            listener: who listens; another class for a negative control.
            quiet_s: time without faults at the start of each act.
            on_news: told what happens.
        """
        self._fleet, self._scripts, self._kind, self._say = fleet, scripts, listener, on_news
        self._quiet_s = quiet_s
        self.run = Run()
        self._clients: list[Client] = []
        """One for each orchestrator, which leaves resuming to us."""
        self._resuming: list[Client] = []
        """Clients that know all orchestrators and resume by themselves."""
        self._listeners: list[Listener] = []

    async def play(self, faults: Sequence[Fault], act_len: int = 30) -> Run:
        """Run all faults, in acts of so many; stop after the act in which something was wrong."""
        began_s = time.monotonic()
        async with AsyncExitStack() as exits:
            addresses = [self._fleet.address(name) for name in ORCHESTRATORS]
            for index in range(len(addresses)):
                self._clients.append(Client(addresses[index], timeout_s=TIMEOUT_S, retry=NO_RETRY))
                self._resuming.append(Client([*addresses[index:], *addresses[:index]], timeout_s=TIMEOUT_S))
            for client in (*self._clients, *self._resuming):
                exits.push_async_callback(client.close)
            self._scripts = await self._twins()
            before = await usage(self._fleet)
            acts = _acts(groups(faults), act_len)
            for number, act in enumerate(acts, 1):
                self._say(f"act {number} of {len(acts)}")
                await self._act(act)
                await self._look(before)
                if self.run.book.violations:
                    break
        self.run.seconds = time.monotonic() - began_s
        return self.run

    async def _twins(self) -> tuple[Script, ...]:
        """Run every script once without faults and without speculation, and keep the text."""

        async def twin(index: int, script: Script) -> Script:
            client = self._clients[index % len(self._clients)]
            session_id, texts = SessionId(""), list[str]()
            for number, turn in enumerate(script.turns):
                events = [event async for event in client.generate(script.request(number, session_id, speculation=OFF))]
                chunks = [event for event in events if isinstance(event, Chunk)]
                session_id = next(event.session_id for event in events if isinstance(event, Started))
                if tuple(token for chunk in chunks for token in chunk.token_ids) != turn.token_ids:
                    self.run.book.violated("twin", f"slot {script.name}: without faults the text is not the language's")
                texts.append("".join(chunk.text for chunk in chunks))
            return script.with_texts(texts)

        return tuple(await asyncio.gather(*(twin(index, script) for index, script in enumerate(self._scripts))))

    async def _act(self, act: Sequence[Sequence[Fault]]) -> None:
        self._listeners = [
            self._kind(script, self._resuming if index // 2 % 2 else self._clients, self.run.book, index)
            for index, script in enumerate(self._scripts)
        ]
        wanted = True
        async with asyncio.TaskGroup() as slots:
            for listener in self._listeners:
                slots.create_task(listener.listen(lambda: wanted))
            try:
                await self._learn_gap()
                for group in act:
                    await self._group(group)
            finally:
                wanted = False
        self._say("all sessions have ended")

    async def _learn_gap(self) -> None:
        """Learn how long a token is waited for when nothing is wrong."""
        await asyncio.sleep(self._quiet_s)
        gaps = [later - earlier for listener in self._listeners for earlier, later in pairwise(listener.arrivals)]
        self.run.usual_gap_s = max([self.run.usual_gap_s, *gaps])

    async def _group(self, group: Sequence[Fault]) -> None:
        """Run the faults that are there together, then wait until every session goes on."""
        outcomes = [Outcome(fault, alone=len(group) == 1) for fault in group]
        async with asyncio.TaskGroup() as together:
            for outcome in outcomes:
                await asyncio.sleep(outcome.fault.pause_s)
                together.create_task(self._fault(outcome))
        await self._recovered(outcomes)
        self.run.outcomes.extend(outcomes)

    async def _fault(self, outcome: Outcome) -> None:
        trace, book = Trace(), self.run.book
        try:
            await strike(self._fleet, outcome.fault, trace)
        except (TimeoutError, Unavailable) as error:
            book.violated("no return", f"after {outcome.fault} it was not there again: {error}")
        outcome.was_seen = trace.was_seen
        outcome.injected_s, outcome.healed_s = trace.injected_s, time.monotonic()
        if trace.wrong:
            book.violated("wrong end", trace.wrong)

    async def _recovered(self, outcomes: Sequence[Outcome]) -> None:
        """Wait for the next token of every session, and note how long each fault has kept it waiting."""
        until_s = time.monotonic() + RECOVERY_S
        for outcome in outcomes:
            for listener in self._listeners:
                while (wait_s := listener.silence(outcome.injected_s, outcome.healed_s)) is None:
                    if time.monotonic() > until_s:
                        words = f"slot {listener.script.name} has no token after {outcome.fault}"
                        self.run.book.violated("no progress", words)
                        return
                    await asyncio.sleep(0.02)
                outcome.waits_s.append(wait_s)
            seen = "" if outcome.was_seen else ", met nobody"
            self._say(f"{outcome.fault}{seen}: longest wait {max(outcome.waits_s):.2f} s")

    async def _look(self, before: Usage) -> None:
        """Look at what must be as before now that no session runs."""
        book = self.run.book
        self.run.returned_s.append(await check_usage(self._fleet, before, book))
        self.run.num_stored = await check_leases(self._fleet, book)
        await check_logs(self._fleet, book)


def _acts(found: Sequence[Sequence[Fault]], act_len: int) -> list[list[Sequence[Fault]]]:
    """Divide groups of faults into acts of about so many faults; one act without faults if there are none."""
    acts: list[list[Sequence[Fault]]] = [[]]
    for group in found:
        if sum(map(len, acts[-1])) >= act_len:
            acts.append([])
        acts[-1].append(group)
    return acts
