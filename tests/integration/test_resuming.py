"""The client library goes on by itself when orchestrators or wires are lost: the same text, once, and whole."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from outrider.client import NO_RETRY, RETRY, Client, Retry
from outrider.codec.generation import event_from_proto, request_to_proto
from outrider.errors import HandedOver, InvalidRequest, LeaseLost, Unavailable
from outrider.generation import (
    Chunk,
    GenerationEvent,
    GenerationRequest,
    SpeculationChoice,
    Started,
    TextPrompt,
)
from outrider.ids import SessionId, TokenKind
from outrider.messages import SamplingParams
from outrider.model.toy import ToyRunner, ToyTokenizer
from outrider.rpc import rpc_errors
from outrider.sync_client import SyncClient
from outrider.v1.generation_pb2_grpc import GenerationServiceStub
from tests.integration.cluster_bench import Bench, Heard, Running, hear, until
from tests.integration.cut_wire import CutWire
from tests.integration.odd_parts import SIZE, VOCABULARY, Script
from verify_service.app import VerifyApp
from verify_service.config import VerifySettings
from verify_service.loading import Loaded

GREEDY = SamplingParams(temperature=0.0)
OFF = SpeculationChoice(off=True)
PINNED = SpeculationChoice(gamma=4, window=8)
MODES: list[dict[str, Any]] = [{}, {"sampling": SamplingParams(), "seed": 4}, {"sampling": SamplingParams()}]
MODE_NAMES = ["greedy", "coupled", "rejection"]


def ask(text: str = "the cat sat on ", **fields: Any) -> GenerationRequest:
    known: dict[str, Any] = {
        "max_tokens": 60, "sampling": GREEDY, "ignore_eos": True, "speculation": PINNED, "return_token_origin": True,
    }  # fmt: skip
    return GenerationRequest(TextPrompt(text), **{**known, **fields})


class Pair:
    """Two orchestrators over the same workers, each behind a wire that can be cut."""

    def __init__(self, bench: Bench, orchestrators: list[Running], wires: list[CutWire]) -> None:
        self.bench, self.orchestrators, self.wires = bench, orchestrators, wires

    def client(self, retry: Retry = RETRY) -> Client:
        client = Client([wire.address for wire in self.wires], timeout_s=60, retry=retry)
        self.bench._exits.push_async_callback(client.close)
        return client

    def cut(self) -> None:
        for wire in self.wires:
            wire.cut()


async def paired(bench: Bench, verifier: Running, drafters: list[Running], **settings: Any) -> Pair:
    orchestrators, wires = [], []
    for _ in range(2):
        running, app, _ = await bench.orchestrator([verifier], drafters, **settings)
        orchestrators.append(running)
        wires.append(await bench._exits.enter_async_context(CutWire(app.address)))
    return Pair(bench, orchestrators, wires)


@pytest.fixture
async def pair(valkey_url: str) -> AsyncIterator[Pair]:
    """Toys that take 5 ms a pass, so that something can happen in the middle."""
    async with Bench(valkey_url) as bench:
        verifier, _ = await bench.verifier(toy_delay_s=0.005)
        drafter, _ = await bench.drafter(toy_delay_s=0.0005)
        yield await paired(bench, verifier, [drafter], hand_over_after_s=0.1)


async def interrupted(client: Client, request: GenerationRequest, harm: Callable[[int], Any], every: int = 1) -> Heard:
    """Hear a generation, doing harm after every so many chunks; `harm` is told how often it was done before."""
    events: list[GenerationEvent] = []
    count = 0
    async for event in client.generate(request):
        events.append(event)
        if isinstance(event, Chunk) and len(Heard(events).chunks) % every == 0:
            await harm(count)
            count += 1
    assert count, "nothing was done"
    return Heard(events)


async def assert_whole(client: Client, heard: Heard, request: GenerationRequest) -> None:
    """Require one start, every token of the log once, and the text of exactly these tokens."""
    starts = [event for event in heard.events if isinstance(event, Started)]
    assert len(starts) == 1
    positions = [chunk.start + index for chunk in heard.chunks for index in range(len(chunk.token_ids))]
    assert positions == list(range(starts[0].prompt_len, starts[0].prompt_len + len(positions)))
    summary = await client.session(starts[0].session_id, include_token_ids=True)
    assert list(summary.token_ids[starts[0].prompt_len :]) == heard.token_ids
    assert len(heard.token_ids) == request.max_tokens
    assert heard.text == ToyTokenizer().decode([token for token in heard.token_ids if token])
    assert heard.finished.usage.completion_tokens == request.max_tokens
    assert len([kind for chunk in heard.chunks for kind in chunk.kinds]) == request.max_tokens


@pytest.mark.parametrize("fields", MODES, ids=MODE_NAMES)
async def test_cut_after_every_third_chunk_a_generation_is_heard_once_and_whole(
    pair: Pair, fields: dict[str, Any]
) -> None:
    client, request = pair.client(), ask(**fields)

    async def cut(_: int) -> None:
        pair.cut()

    heard = await interrupted(client, request, cut, every=3)
    await assert_whole(client, heard, request)
    if fields.get("seed") or not fields:
        assert heard.token_ids == (await hear(client, ask(**{**fields, "speculation": OFF}))).token_ids


async def test_the_next_orchestrator_goes_on_when_one_is_killed(pair: Pair) -> None:
    client, request = pair.client(), ask()

    async def kill(count: int) -> None:
        if count == 0:
            await pair.orchestrators[0].kill()

    heard = await interrupted(client, request, kill, every=5)
    await assert_whole(client, heard, request)


@pytest.mark.parametrize("fields", MODES, ids=MODE_NAMES)
async def test_an_orchestrator_told_to_stop_hands_its_generations_over(pair: Pair, fields: dict[str, Any]) -> None:
    """The one that stops says where to go on; whoever does not use that is told so as UNAVAILABLE."""
    app: Any = pair.orchestrators[0].app
    draining: list[asyncio.Task[None]] = []

    async def drain(count: int) -> None:
        if count == 0:
            draining.append(asyncio.create_task(app.drain()))

    client, request = pair.client(), ask(max_tokens=400, **fields)
    stubborn = Client(pair.wires[0].address, timeout_s=60, retry=NO_RETRY)
    other = asyncio.create_task(hear(stubborn, request))
    heard = await interrupted(client, request, drain, every=5)
    await assert_whole(client, heard, request)
    with pytest.raises(HandedOver) as told:
        await other
    await asyncio.wait_for(draining[0], 60)
    left = await client.session(told.value.session_id)  # type: ignore[arg-type]
    assert left.prompt_len < told.value.next_position <= left.length
    assert [event async for event in client.resume(told.value.session_id, told.value.next_position)]  # type: ignore[arg-type]
    await stubborn.close()


async def test_without_any_orchestrator_the_error_says_how_often_was_tried_in_bounded_time(pair: Pair) -> None:
    client = pair.client(Retry(max_attempts=6, max_total_s=10, first_pause_s=0.01, longest_pause_s=0.02))

    async def kill_all(count: int) -> None:
        if count == 0:
            await asyncio.gather(*(each.kill() for each in pair.orchestrators))

    started_s = time.monotonic()
    with pytest.raises(Unavailable, match="gave up after 6 tries"):
        await interrupted(client, ask(max_tokens=400), kill_all)
    assert time.monotonic() - started_s < 30
    short = pair.client(Retry(max_attempts=1000, max_total_s=0.3))
    started_s = time.monotonic()
    with pytest.raises(Unavailable, match="gave up after"):
        await hear(short, ask())
    assert time.monotonic() - started_s < 30


async def test_what_cannot_be_mended_is_an_error_at_once(pair: Pair) -> None:
    started_s = time.monotonic()
    with pytest.raises(InvalidRequest):
        await hear(pair.client(), ask(stop_token_ids=(10**6,)))
    assert time.monotonic() - started_s < 20, "tries would take 30 s"


async def test_resuming_keeps_the_clients_choice_of_speculation_and_origins(pair: Pair) -> None:
    async def cut(count: int) -> None:
        if count == 0:
            pair.cut()

    plain = await interrupted(pair.client(), ask(speculation=OFF), cut, every=5)
    assert plain.finished.figures.speculation_off == "requested"
    assert {kind for chunk in plain.chunks for kind in chunk.kinds} == {TokenKind.PLAIN}
    pinned = await interrupted(pair.client(), ask(speculation=SpeculationChoice(gamma=1, window=1)), cut, every=5)
    figures = pinned.finished.figures
    assert figures.tested_per_position[2:] == (), "gamma was 1"
    assert figures.num_accepted > 0


@pytest.mark.parametrize("num_logprobs", [0, 3])
async def test_log_probabilities_are_told_once_for_every_token_however_often_the_wire_is_cut(
    pair: Pair, num_logprobs: int
) -> None:
    async def cut(_: int) -> None:
        pair.cut()

    client = pair.client()
    whole = await hear(client, ask(num_logprobs=num_logprobs))
    twin = [entry for chunk in whole.chunks for entry in chunk.logprobs]
    assert len(twin) == 60
    assert {len(entry.top) for entry in twin} == {num_logprobs}
    heard = await interrupted(client, ask(num_logprobs=num_logprobs), cut, every=3)
    assert [entry for chunk in heard.chunks for entry in chunk.logprobs] == twin
    started = heard.events[0]
    assert isinstance(started, Started)
    again = Heard([event async for event in client.resume(started.session_id, started.prompt_len + 50)])
    assert [entry for chunk in again.chunks for entry in chunk.logprobs] == twin[50:]


async def test_a_turn_that_is_asked_for_again_is_not_appended_twice(pair: Pair) -> None:
    """As when its first answer was lost before anything of it arrived. The same words in a new request are a turn."""
    client = pair.client()
    first = await hear(client, ask(max_tokens=10))
    started = first.events[0]
    assert isinstance(started, Started)
    again = ask("a mat. ", max_tokens=10, session_id=started.session_id, request_id="turn-2")
    turns = [await hear(client, again) for _ in range(2)]
    assert turns[0].token_ids == turns[1].token_ids
    length = (await client.session(started.session_id)).length
    assert length == started.prompt_len + 10 + len(ToyTokenizer().encode("a mat. ")) + 10
    await hear(client, ask("a mat. ", max_tokens=10, session_id=started.session_id))
    assert (await client.session(started.session_id)).length == length + len(ToyTokenizer().encode("a mat. ")) + 10


async def test_a_turn_goes_on_when_its_orchestrator_is_lost_before_it_has_answered(pair: Pair) -> None:
    client = pair.client()
    started = (await hear(client, ask(max_tokens=10))).events[0]
    assert isinstance(started, Started)

    async def cut_soon() -> None:
        first: Any = pair.orchestrators[0].app
        await until(lambda: len(first.sessions) > 0)
        pair.cut()

    cutting = asyncio.create_task(cut_soon())
    heard = await hear(client, ask("a mat. ", max_tokens=30, session_id=started.session_id))
    await cutting
    assert len(heard.token_ids) == 30
    assert sum(isinstance(event, Started) for event in heard.events) == 1
    length = (await client.session(started.session_id)).length
    assert length == started.prompt_len + 10 + len(ToyTokenizer().encode("a mat. ")) + 30


async def test_two_clients_that_want_one_session_do_not_fight_for_ever(pair: Pair) -> None:
    first, second = pair.client(), pair.client()
    events = first.generate(ask(max_tokens=1500))
    started = await anext(events)
    assert isinstance(started, Started)

    async def drain(stream: AsyncIterator[GenerationEvent]) -> BaseException | None:
        try:
            async for _ in stream:
                pass
        except LeaseLost as error:
            return error
        return None

    ends = await asyncio.wait_for(
        asyncio.gather(drain(events), drain(second.resume(started.session_id, started.prompt_len))), 50
    )
    assert sum(end is None for end in ends) == 1, "one goes on to the end"


TEXT = (
    "na\u0308ive \U0001f468\u200d\U0001f469\u200d\U0001f467 \u4f60\u597d, \u65e5\u672c\u8a9e! \U0001f600\u0928\u093f x"
)
"""Combining marks, a joined emoji, CJK, and characters of two to four bytes."""


@pytest.mark.parametrize(("stop", "shown"), [((), TEXT), (("\u65e5\u672c",), TEXT[: TEXT.index("\u65e5")])])
async def test_text_held_back_when_the_wire_was_cut_comes_whole_and_once(
    valkey_url: str, stop: tuple[str, ...], shown: str
) -> None:
    """Every byte is a token of its own, and the wire is cut after each: inside characters and inside a stop string."""
    script = tuple(byte + 1 for byte in TEXT.encode())
    prompt = ToyTokenizer().encode("abc")
    runner = ToyRunner(Script(SIZE, script=script, prompt_len=len(prompt)), delay_s=0.005)
    async with Bench(valkey_url) as bench:
        verifier = VerifyApp(VerifySettings(model="toy"), lambda *_: Loaded(runner, VOCABULARY, ToyTokenizer()))
        pair = await paired(bench, await bench._run(verifier), [])

        async def cut(_: int) -> None:
            pair.cut()

        asked = ask("abc", max_tokens=len(script), speculation=OFF, stop=stop)
        heard = await interrupted(pair.client(), asked, cut)
        assert heard.text == shown
        assert heard.token_ids == list(script[: len(heard.token_ids)])
        assert len(heard.chunks) > 5


async def test_the_client_without_an_event_loop_goes_on_by_itself_too(pair: Pair) -> None:
    addresses = [wire.address for wire in pair.wires]
    loop = asyncio.get_running_loop()

    def run() -> tuple[list[GenerationEvent], int, bool]:
        events: list[GenerationEvent] = []
        with SyncClient(addresses, timeout_s=60) as client:
            for event in client.generate(ask()):
                events.append(event)
                if len(events) == 6:
                    loop.call_soon_threadsafe(pair.cut)
            (model,) = client.models()
            started = events[0]
            assert isinstance(started, Started)
            again = list(client.resume(started.session_id, started.prompt_len + 50))
            assert Heard(again).token_ids == Heard(events).token_ids[50:]
            client.delete(started.session_id)
            for event in client.generate(ask(max_tokens=1000)):
                if isinstance(event, Chunk):
                    break
        return events, model.num_verifiers, True

    events, num_verifiers, left = await asyncio.to_thread(run)
    assert left
    assert num_verifiers == 1
    assert Heard(events).token_ids == (await hear(pair.client(), ask(speculation=OFF))).token_ids


async def test_a_client_that_reads_nothing_loses_its_place_and_none_of_its_text(valkey_url: str) -> None:
    """Log-probabilities fill what a stream holds, which does not grow here, within some fifty tokens."""
    request, events = ask(num_logprobs=128, max_tokens=250), list[GenerationEvent]()
    async with Bench(valkey_url) as bench:
        verifier, served = await bench.verifier(toy_delay_s=0.005)
        _, app, client = await bench.orchestrator([verifier], [], stall_timeout_s=0.3)
        sessions, engine = app.sessions, served.engine
        assert sessions is not None
        assert engine is not None
        async with grpc.aio.insecure_channel(app.address, options=[("grpc.http2.bdp_probe", 0)]) as opened:
            call = GenerationServiceStub(opened).Generate(request_to_proto(request))
            with pytest.raises(HandedOver, match=r"read nothing for 0\.3 s") as told, rpc_errors():
                async for response in call:
                    events.append(event_from_proto(response.event))
                    if len(events) == 2:
                        await until(lambda: not len(sessions))
                        await until(lambda: not engine.num_sessions)
        rest = client.resume(SessionId(told.value.session_id), told.value.next_position)
        events += [event async for event in rest if not isinstance(event, Started)]
        await assert_whole(client, Heard(events), request)
