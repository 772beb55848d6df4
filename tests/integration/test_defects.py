"""What a defect costs, and a part that talks nonsense: one generation at most, counted, and nothing is left behind."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.admission import Place
from orchestrator.app import OrchestratorApp
from orchestrator.job import Drained
from orchestrator.opening import Opened
from orchestrator.quotas import Ticket
from orchestrator.text import Decoder
from outrider.client import Client
from outrider.errors import Internal, LeaseLost, StoreError, Unavailable
from outrider.generation import GenerationRequest, Notice, ResumeFrom, SpeculationChoice, Started, TextPrompt
from outrider.ids import Generation
from outrider.messages import PromptScores, SamplingParams, TokenLogprobs, WorkerDescription
from outrider.model.toy import ToyTokenizer
from tests.integration.cluster_bench import Bench, Running, hear, until


@pytest.fixture
async def bench(valkey_url: str) -> AsyncIterator[Bench]:
    async with Bench(valkey_url) as made:
        yield made


def ask(**fields: Any) -> GenerationRequest:
    known: dict[str, Any] = {
        "max_tokens": 40, "sampling": SamplingParams(temperature=0.0), "ignore_eos": True,
        "speculation": SpeculationChoice(gamma=4, window=8), **fields,
    }  # fmt: skip
    return GenerationRequest(TextPrompt("the cat sat on "), **known)


async def slow(bench: Bench, *drafters: Running, **settings: Any) -> tuple[OrchestratorApp, Client]:
    verifier, _ = await bench.verifier(toy_delay_s=0.01)
    _, app, client = await bench.orchestrator([verifier], list(drafters), **settings)
    return app, client


class Faulty(ToyTokenizer):
    """A tokenizer that fails at one token."""

    poison = -1

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        if token_ids and token_ids[-1] == self.poison:
            raise RuntimeError("a defect")
        return super().decode(token_ids, skip_special_tokens)


async def test_a_generation_that_ends_by_a_defect_is_counted_and_gives_its_lease_up(bench: Bench) -> None:
    app, client = await slow(bench)
    said = (await hear(client, ask())).token_ids
    assert app.sessions is not None
    faulty, opening = Faulty(), app.sessions._opening
    opening._language = replace(opening._language, decoder=Decoder(faulty))
    prompt = opening._language.encode(ask().prompt)
    faulty.poison = next(token for token in said if token not in prompt)
    begun: list[Started] = []
    with pytest.raises(Internal):
        async for event in client.generate(ask()):
            begun += [event] if isinstance(event, Started) else []
    ended = app.metrics.registry.get_sample_value("outrider_generations_total", {"outcome": "internal"})
    assert ended == 1
    await until(lambda: app.sessions is not None and not len(app.sessions))
    faulty.poison = -1
    assert (await hear(client, ask(session_id=begun[0].session_id))).token_ids, "the lease is free at once"


async def test_a_verifier_whose_scores_of_a_prompt_make_no_sense_is_opened_again(bench: Bench) -> None:
    app, client = await slow(bench)
    twin = await hear(client, ask())
    events = []
    async for event in client.generate(ask()):
        events.append(event)
        if isinstance(event, Started):
            assert app.sessions is not None
            peers = app.sessions.running()[0]._peers
            peers._from_verifier(peers.opened, PromptScores(event.prompt_len, (TokenLogprobs(-1.0),)))
    assert [each.reason for each in events if isinstance(each, Notice)] == ["verifier_lost"]
    assert [token for each in events for token in getattr(each, "token_ids", ())] == twin.token_ids


async def test_nobody_looks_on_for_a_successor_of_a_verifier_that_is_replaced(bench: Bench) -> None:
    app, client = await slow(bench)
    assert app.sessions is not None
    async for event in client.generate(ask()):
        if isinstance(event, Started):
            driver = app.sessions.running()[0]
            before = len(driver._helpers)
            driver.feed(Drained(Generation(0, 0)))
            await until(driver._events.empty)
            await asyncio.sleep(0.05)
            assert len(driver._helpers) == before, "it would read the registry for as long as the generation runs"


class Gate:
    """Workers that are told once a gate is open."""

    def __init__(self, source: Any) -> None:
        self._source, self.opened = source, asyncio.Event()

    async def workers(self, role: str) -> Sequence[WorkerDescription]:
        await self.opened.wait()
        return await self._source.workers(role)  # type: ignore[no-any-return]


async def test_a_generation_that_is_opened_while_the_process_ends_is_sent_elsewhere(bench: Bench) -> None:
    app, client = await slow(bench)
    sessions = app.sessions
    assert sessions is not None
    placement = sessions.tools.placement
    placement._source = gate = Gate(placement._source)
    asked = asyncio.create_task(hear(client, ask()))
    await until(lambda: len(sessions) == 1)
    await sessions.__aexit__()
    gate.opened.set()
    with pytest.raises(Unavailable, match="is stopping"):
        await asked
    assert (len(sessions), sessions.running()) == (0, [])


async def test_a_call_that_gives_way_to_a_newer_one_has_begun_nothing(bench: Bench) -> None:
    app, client = await slow(bench)
    assert app.sessions is not None
    async with aclosing(client.generate(ask(max_tokens=400))) as events:
        started = await anext(events)
        assert isinstance(started, Started)
        await anext(events)
    await until(lambda: app.sessions is not None and not len(app.sessions))
    asked, lately = ResumeFrom(started.session_id, started.prompt_len), app.sessions.tools.lately
    older = await app.sessions._opening.resume(asked, 0.0, Ticket())
    assert isinstance(older, Opened)
    async with aclosing(client.resume(asked.session_id, asked.next_position)) as newer:
        await anext(newer)
        known = lately.courses
        with pytest.raises(LeaseLost):
            app.sessions._launch(older, Place(lambda: None))
        assert lately.courses == known, "a generation that never ran is shown as one that is over"


class Refusing:
    """Workers of a registry that refuses to tell of draft workers."""

    def __init__(self, source: Any) -> None:
        self._source, self.refuses = source, False

    async def workers(self, role: str) -> Sequence[WorkerDescription]:
        if self.refuses and role == "draft":
            raise StoreError("the session store refused workers: no permission")
        return await self._source.workers(role)  # type: ignore[no-any-return]


async def test_a_store_that_refuses_to_tell_of_draft_workers_costs_speed_alone(bench: Bench) -> None:
    drafter, _ = await bench.drafter()
    app, client = await slow(bench, drafter, drafter_retry_s=0.05)
    twin = await hear(client, ask())
    assert app.sessions is not None
    placement = app.sessions.tools.placement
    placement._source = source = Refusing(placement._source)
    events = []
    async for event in client.generate(ask()):
        events.append(event)
        if isinstance(event, Started):
            source.refuses = True
            await drafter.kill()
    assert [token for each in events for token in getattr(each, "token_ids", ())] == twin.token_ids
