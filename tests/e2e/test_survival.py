"""Processes that die, freeze or are told to stop in the middle of generations: a pause at most, and the same text."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from outrider.client import Client
from outrider.errors import DataLoss, Unavailable
from outrider.generation import GenerationRequest, Notice, Started
from outrider.ids import SessionId, TokenKind
from outrider.messages import SamplingParams
from outrider.store.connect import open_client
from outrider.store.sessions import SessionStore
from tests.e2e.toys import PROMPT, Heard, Toys, ask, expected, hear

pytestmark = pytest.mark.timeout(300)

SEED = 5
SEEDED: dict[str, Any] = {"sampling": SamplingParams(), "seed": SEED}
GRACE_S = 10.0


class Follower:
    """Hears a generation in the background."""

    def __init__(self, client: Client, request: GenerationRequest) -> None:
        self.heard = Heard()
        self._events = client.generate(request)
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        async with aclosing(self._events) as events:
            async for event in events:
                self.heard.events.append(event)
                self._news.set()
        self._news.set()

    async def until(self, condition: Callable[[Heard], bool]) -> None:
        """Wait for something to be heard; a generation that ends before is an error."""
        while not condition(self.heard):
            assert not self._task.done(), self._task.exception() or self.heard.events[-1]
            self._news.clear()
            await self._news.wait()

    async def end(self) -> Heard:
        """Hear the rest."""
        await self._task
        return self.heard

    async def leave(self) -> None:
        """Call the generation off if it still runs."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@asynccontextmanager
async def followed(client: Client, **fields: Any) -> AsyncIterator[tuple[Follower, Follower]]:
    """Start a greedy and a seeded generation, and wait until drafts have been accepted in both."""
    both = Follower(client, ask(**fields)), Follower(client, ask(**{**fields, **SEEDED}))
    try:
        for each in both:
            await each.until(lambda heard: heard.kinds.count(TokenKind.ACCEPTED) >= 6)
        yield both
    finally:
        for each in both:
            await each.leave()


def reasons(heard: Heard) -> list[str]:
    return [event.reason for event in heard.events if isinstance(event, Notice)]


def accepted_after_the_loss(heard: Heard) -> int:
    """Return how many drafts were accepted after the last notice."""
    lost = max(index for index, event in enumerate(heard.events) if isinstance(event, Notice))
    return Heard(heard.events[lost:]).kinds.count(TokenKind.ACCEPTED)


def assert_texts(followers: tuple[Follower, Follower]) -> None:
    """Require that what was heard so far is what the model says, greedy and seeded."""
    for each, seed in zip(followers, (None, SEED), strict=True):
        ids = each.heard.token_ids
        assert ids == expected(PROMPT, len(ids), seed)


async def kill(toys: Toys, name: str) -> None:
    """End a process at once, and wait until it is gone."""
    toys.cluster.services[name].signal(signal.SIGKILL)
    await toys.cluster.services[name].stop()


async def test_a_killed_draft_worker_costs_nothing_but_speed_and_its_replacement_is_attached(toys: Toys) -> None:
    (drafter,) = toys.running("draft")
    async with followed(await toys.client(), max_tokens=4000) as both:
        replacement = await toys.launch("draft")
        await kill(toys, drafter)
        for each in both:
            await each.until(lambda heard: "drafter_lost" in reasons(heard))
        await toys.cluster.announced(replacement)
        for each in both:
            await each.until(lambda heard: accepted_after_the_loss(heard) >= 20)
        assert_texts(both)


async def test_a_killed_draft_worker_without_a_replacement_leaves_plain_decoding_and_the_reason(toys: Toys) -> None:
    async with followed(await toys.client(), max_tokens=400) as both:
        await kill(toys, toys.running("draft")[0])
        for each in both:
            heard = await each.end()
            assert set(reasons(heard)) == {"drafter_lost"}
            assert TokenKind.PLAIN in heard.kinds
            assert heard.finished.usage.completion_tokens == 400
            assert heard.finished.figures.speculation_off.startswith("drafter_")
        assert_texts(both)


async def test_a_frozen_draft_worker_costs_patience_and_then_nothing(toys: Toys) -> None:
    drafter = toys.cluster.services[toys.running("draft")[0]]
    async with followed(await toys.client(), max_tokens=500) as both:
        drafter.signal(signal.SIGSTOP)
        try:
            for each in both:
                heard = await each.end()
                assert heard.finished.usage.completion_tokens == 500
                assert heard.finished.figures.speculation_off in ("drafter_slow", "drafter_unavailable")
            assert_texts(both)
        finally:
            drafter.signal(signal.SIGCONT)


async def test_a_killed_verifier_is_a_pause(toys: Toys) -> None:
    async with followed(await toys.client(), max_tokens=600) as both:
        busiest = max(toys.running("verify"), key=lambda name: toys.metric(name, "outrider_num_requests_running"))
        assert toys.metric(busiest, "outrider_num_requests_running") >= 1
        await kill(toys, busiest)
        told = [reasons(await each.end()) for each in both]
        assert ["verifier_lost"] in told
        assert_texts(both)
        assert [each.heard.finished.usage.completion_tokens for each in both] == [600, 600]


async def test_a_frozen_verifier_is_noticed_and_replaced(toys: Toys) -> None:
    async with followed(await toys.client(), max_tokens=600) as both:
        names = toys.running("verify")
        busiest = max(names, key=lambda name: toys.metric(name, "outrider_num_requests_running"))
        frozen = toys.cluster.services[busiest]
        frozen.signal(signal.SIGSTOP)
        try:
            told = [reasons(await each.end()) for each in both]
            assert any(reason[:1] == ["verifier_lost"] for reason in told)
            assert_texts(both)
        finally:
            frozen.signal(signal.SIGCONT)


async def cut_log(url: str, session_id: SessionId, length: int) -> None:
    """Lose the log's tail, as a failover of the store would."""
    client: Any = open_client(url)
    _, log, classes, kinds, _ = SessionStore(client)._keys(session_id)
    for key, size in ((log, 4), (classes, 1), (kinds, 1)):
        await client.set(key, (await client.get(key))[: length * size])
    await client.aclose()


def shown_by(follower: Follower) -> tuple[Started, int]:
    """Return how a generation began and the position after the last token that was seen."""
    started = follower.heard.events[0]
    assert isinstance(started, Started)
    return started, started.prompt_len + len(follower.heard.token_ids)


async def resumed(client: Client, session_id: SessionId, position: int) -> Heard:
    return Heard([event async for event in client.resume(session_id, position)])


async def test_after_an_orchestrator_was_killed_another_goes_on_with_no_token_twice_or_missing(toys: Toys) -> None:
    """The store loses what was shown last, too: greedy text is drawn again silently, unseeded text is a loss."""
    first, second = toys.running("orchestrate")
    client, other = await toys.client(first), await toys.client(second)
    unseeded = Follower(client, ask(max_tokens=400, sampling=SamplingParams()))
    await unseeded.until(lambda heard: len(heard.token_ids) >= 10)
    async with followed(client, max_tokens=400) as both:
        await kill(toys, first)
        for each, seed in zip(both, (None, SEED), strict=True):
            with pytest.raises(Unavailable):
                await each.end()
            started, position = shown_by(each)
            if seed is None:
                await cut_log(toys.cluster.store_url, started.session_id, position - 3)
            rest = await resumed(other, started.session_id, position)
            assert each.heard.token_ids + rest.token_ids == expected(PROMPT, 400, seed)
            assert rest.chunks[0].start == position
            assert rest.finished.usage.completion_tokens == 400
            whole = (await hear(other, ask(max_tokens=400, **(SEEDED if seed else {})))).text
            assert each.heard.text + rest.text == whole
    with pytest.raises(Unavailable):
        await unseeded.end()
    started, position = shown_by(unseeded)
    await cut_log(toys.cluster.store_url, started.session_id, position - 3)
    with pytest.raises(DataLoss):
        await resumed(other, started.session_id, position)


async def refused_by(client: Client) -> None:
    """Ask until an orchestrator that was told to stop takes nothing new."""
    async with asyncio.timeout(60):
        while True:
            try:
                await hear(client, ask(max_tokens=1))
            except Unavailable:
                return


async def test_told_to_stop_every_service_ends_with_status_0_and_generations_go_on(toys: Toys) -> None:
    """The last test of the run that needs the cluster: what ends here is not replaced."""
    first, second = toys.running("orchestrate")
    addresses = [await toys.address(name) for name in (first, second)]
    async with Client(addresses, timeout_s=100) as client, followed(client, max_tokens=700) as both:
        busiest = max(toys.running("verify"), key=lambda name: toys.metric(name, "outrider_num_requests_running"))
        leaving = [busiest, toys.running("draft")[0], first]
        # Ending an interpreter with these libraries takes a while beyond the grace on a busy machine.
        stopping = [asyncio.create_task(toys.cluster.services[name].stop(GRACE_S + 30)) for name in leaving]
        await refused_by(await toys.client(first))
        for each in both:
            heard = await each.end()
            assert heard.finished.usage.completion_tokens == 700
        assert_texts(both)
        assert await asyncio.gather(*stopping) == [0, 0, 0], [toys.log(name) for name in leaving]
    for name in leaving:
        assert "the drain was cut off" not in toys.log(name)
