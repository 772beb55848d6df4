"""The whole path: a real client, orchestrator, verifier, draft worker and store, with the toy model."""

import asyncio
import gc
import math
import os
import signal
import sys
import time
import weakref
from collections.abc import AsyncIterator
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from orchestrator.admission import Place
from orchestrator.opening import Opened
from orchestrator.quotas import Ticket
from outrider.client import Client
from outrider.errors import (
    DataLoss,
    FailedPrecondition,
    InvalidRequest,
    LeaseLost,
    NotFound,
    OutriderError,
    ProtocolError,
    ResourceExhausted,
    StoreUnavailable,
    Unavailable,
)
from outrider.generation import (
    ChatMessage,
    ChatPrompt,
    Chunk,
    Finished,
    GenerationRequest,
    Notice,
    ResumeFrom,
    SpeculationChoice,
    Started,
    TextPrompt,
    TokenPrompt,
)
from outrider.ids import FinishReason, Mode, SessionId, TokenClass, TokenKind
from outrider.messages import SamplingParams
from outrider.model.toy import ToyTokenizer
from outrider.store.connect import open_client
from outrider.store.embedded import EmbeddedServer
from outrider.store.sessions import SessionStore
from tests.integration.cluster_bench import Bench, Heard, Running, hear, until

ROOT = Path(__file__).parents[2]
GREEDY = SamplingParams(temperature=0.0)
PROMPT = TextPrompt("the cat sat on ")
OFF = SpeculationChoice(off=True)
PINNED = SpeculationChoice(gamma=4, window=8)


def ask(prompt: Any = PROMPT, **fields: Any) -> GenerationRequest:
    known: dict[str, Any] = {
        "max_tokens": 40,
        "sampling": GREEDY,
        "ignore_eos": True,
        "speculation": PINNED,
        "return_token_origin": True,
        **fields,
    }
    return GenerationRequest(prompt, **known)


@pytest.fixture
async def bench(valkey_url: str) -> AsyncIterator[Bench]:
    async with Bench(valkey_url) as made:
        yield made


@pytest.fixture(scope="module")
async def shared(valkey_url: str) -> AsyncIterator[Client]:
    """A whole cluster that no test harms."""
    async with Bench(valkey_url) as made:
        verifier, _ = await made.verifier(max_sessions=8)
        drafter, _ = await made.drafter()
        _, _, client = await made.orchestrator([verifier], [drafter])
        yield client


async def slow_cluster(bench: Bench, **orchestrator: Any) -> tuple[Running, Running, Any, Client]:
    """Make a cluster that takes 10 ms a pass, so that something can happen in the middle."""
    verifier, _ = await bench.verifier(toy_delay_s=0.01)
    drafter, _ = await bench.drafter(toy_delay_s=0.001)
    _, app, client = await bench.orchestrator([verifier], [drafter], **orchestrator)
    return verifier, drafter, app, client


# --- the path -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "fields"),
    [(Mode.GREEDY, {}), (Mode.COUPLED, {"sampling": SamplingParams(), "seed": 11})],
    ids=["greedy", "coupled"],
)
async def test_speculation_returns_the_twins_text(shared: Client, mode: Mode, fields: dict[str, Any]) -> None:
    twin = await hear(shared, ask(speculation=OFF, **fields))
    for choice in (SpeculationChoice(gamma=1, window=1), PINNED, SpeculationChoice(gamma=8, window=32)):
        heard = await hear(shared, ask(speculation=choice, **fields))
        started = heard.events[0]
        assert isinstance(started, Started)
        assert started.mode is mode
        assert (heard.token_ids, heard.text) == (twin.token_ids, twin.text)
        assert heard.finished.figures.num_accepted > 0
    assert twin.finished.figures.speculation_off == "requested"


@pytest.mark.parametrize("mode", [Mode.REJECTION, Mode.BLOCK])
async def test_unseeded_requests_are_verified_by_rejection(shared: Client, mode: Mode) -> None:
    heard = await hear(shared, ask(sampling=SamplingParams(), mode=mode))
    assert len(heard.token_ids) == 40
    assert heard.finished.figures.num_accepted > 0
    assert heard.finished.figures.guarantee_void == 0


async def test_the_streamed_text_is_the_text_of_the_streamed_tokens(shared: Client) -> None:
    heard = await hear(shared, ask(max_tokens=60))
    assert heard.text == ToyTokenizer().decode(heard.token_ids, skip_special_tokens=True)
    started = heard.events[0]
    assert isinstance(started, Started)
    position = started.prompt_len
    for chunk in heard.chunks:
        assert chunk.start == position
        position += len(chunk.token_ids)
    assert heard.finished.usage.completion_tokens == 60
    assert heard.finished.reason is FinishReason.LENGTH


async def test_figures_count_every_committed_token_by_its_kind(shared: Client) -> None:
    """Case 28 from outside: the kinds of the tokens shown are the counters."""
    heard = await hear(shared, ask(max_tokens=60))
    kinds = [kind for chunk in heard.chunks for kind in chunk.kinds]
    figures = heard.finished.figures
    assert len(kinds) == 60
    assert figures.num_accepted == kinds.count(TokenKind.ACCEPTED)
    assert figures.num_plain == kinds.count(TokenKind.PLAIN)
    assert figures.num_recovered == kinds.count(TokenKind.RECOVERED)
    assert figures.num_bonus == kinds.count(TokenKind.BONUS)
    assert sum(figures.tested_per_position) == figures.num_tested <= figures.num_drafted


async def test_one_token_needs_no_draft_work(shared: Client) -> None:
    """Case 6."""
    heard = await hear(shared, ask(max_tokens=1))
    figures = heard.finished.figures
    assert len(heard.token_ids) == 1
    assert (figures.speculation_off, figures.num_drafted, figures.drafter) == ("max_tokens", 0, "")


async def test_a_stop_string_in_mid_run_ends_text_ids_and_logprobs_together(shared: Client) -> None:
    """Case 2."""
    whole = await hear(shared, ask(speculation=OFF))
    stop = whole.text[20:22]
    twin = await hear(shared, ask(speculation=OFF, stop=(stop,), num_logprobs=0))
    heard = await hear(shared, ask(stop=(stop,), num_logprobs=0))
    assert heard.text == twin.text == whole.text[: whole.text.index(stop)]
    assert heard.token_ids == twin.token_ids
    logprobs = [entry for chunk in heard.chunks for entry in chunk.logprobs]
    assert logprobs == [entry for chunk in twin.chunks for entry in chunk.logprobs]
    assert len(logprobs) == len(heard.token_ids) == heard.finished.usage.completion_tokens
    assert (heard.finished.reason, heard.finished.matched) == (FinishReason.STOP, stop)


async def test_a_prompt_near_the_context_ends_at_the_context_as_the_twin_does(bench: Bench) -> None:
    """Case 7."""
    verifier, _ = await bench.verifier(context_len=64)
    drafter, _ = await bench.drafter(context_len=64)
    _, _, client = await bench.orchestrator([verifier], [drafter])
    prompt = TokenPrompt(tuple(range(1, 62)))
    choice = SpeculationChoice(gamma=8, window=16)
    heard = await hear(client, ask(prompt, max_tokens=None, speculation=choice))
    twin = await hear(client, ask(prompt, max_tokens=None, speculation=OFF))
    assert heard.token_ids == twin.token_ids
    assert (len(heard.token_ids), heard.finished.reason) == (3, FinishReason.LENGTH)


async def test_a_prompt_goes_to_a_verifier_that_can_hold_it(bench: Bench) -> None:
    large, _ = await bench.verifier(context_len=4096)
    small, _ = await bench.verifier(context_len=64)
    _, _, client = await bench.orchestrator([large, small], [])
    long = TextPrompt("the cat sat on " * 20)
    for _ in range(8):
        assert len((await hear(client, ask(long, max_tokens=3))).token_ids) == 3
    with pytest.raises(InvalidRequest, match=r"'8000 tokens'.*1 \.\. 4095 tokens"):
        await hear(client, ask(TextPrompt("the cat sat on " * 2000)))


async def test_a_lost_verifier_is_not_replaced_by_one_that_cannot_hold_the_generation(bench: Bench) -> None:
    large, _ = await bench.verifier(context_len=4096, toy_delay_s=0.01)
    small, _ = await bench.verifier(context_len=64)
    _, _, client = await bench.orchestrator([large, small], [], verifier_deadline_s=0.3)
    events: list[Any] = []
    with pytest.raises(Unavailable, match="no verifier is available"):
        async for event in client.generate(ask(max_tokens=400)):
            events.append(event)
            if len(events) == 4:
                await large.kill()
    with pytest.raises(Unavailable, match="to its end"):
        _ = [event async for event in client.resume(events[0].session_id, events[0].prompt_len)]


async def test_a_draft_worker_with_a_small_context_is_not_used_and_the_reason_is_told(bench: Bench) -> None:
    """Case 8."""
    verifier, _ = await bench.verifier()
    drafter, _ = await bench.drafter(context_len=64)
    _, _, client = await bench.orchestrator([verifier], [drafter])
    heard = await hear(client, ask(TokenPrompt((5,) * 100)))
    assert len(heard.token_ids) == 40
    assert heard.finished.figures.speculation_off == "drafter_context"


async def test_a_conversation_goes_through_the_chat_template(shared: Client) -> None:
    chat = ChatPrompt((ChatMessage("user", "a mat. "),))
    heard = await hear(shared, ask(chat))
    plain = await hear(shared, ask(TextPrompt("user: a mat. \nassistant: ")))
    assert heard.token_ids == plain.token_ids


async def test_a_second_turn_continues_the_log(shared: Client) -> None:
    first = await hear(shared, ask(max_tokens=10))
    started = first.events[0]
    assert isinstance(started, Started)
    second = await hear(shared, ask(TextPrompt("a mat"), session_id=started.session_id, max_tokens=10))
    summary = await shared.session(started.session_id, include_token_ids=True)
    prompt, more = ToyTokenizer().encode(PROMPT.text), ToyTokenizer().encode("a mat")
    assert list(summary.token_ids) == [*prompt, *first.token_ids, *more, *second.token_ids]
    whole = TokenPrompt((*prompt, *first.token_ids, *more))
    assert second.token_ids == (await hear(shared, ask(whole, max_tokens=10))).token_ids
    assert not summary.running


async def test_the_log_says_of_every_turn_that_its_last_prompt_token_goes_with_the_first_run(
    shared: Client, valkey_url: str
) -> None:
    first = await hear(shared, ask(max_tokens=10))
    started = first.events[0]
    assert isinstance(started, Started)
    await hear(shared, ask(TextPrompt("a mat"), session_id=started.session_id, max_tokens=5))
    of_store: Any = open_client(valkey_url)
    logged = await SessionStore(of_store).read_log(started.session_id)
    await of_store.aclose()
    lengths = [len(ToyTokenizer().encode(text)) for text in (PROMPT.text, "a mat")]
    (first_len, second_len), prompt, decode = lengths, TokenClass.PROMPT, TokenClass.DECODE
    expected = [prompt] * (first_len - 1) + [decode] * 11 + [prompt] * (second_len - 1) + [decode] * 6
    assert list(logged.classes) == expected


async def test_untrusted_drafters_make_unseeded_requests_coupled(bench: Bench) -> None:
    verifier, _ = await bench.verifier()
    drafter, _ = await bench.drafter()
    _, _, client = await bench.orchestrator([verifier], [drafter], trust_drafters=False)
    one, two = [await hear(client, ask(sampling=SamplingParams())) for _ in range(2)]
    started = one.events[0]
    assert isinstance(started, Started)
    assert started.mode is Mode.COUPLED
    assert one.token_ids != two.token_ids


async def test_models_sessions_and_deletion(shared: Client) -> None:
    model = (await shared.models())[0]
    assert (model.model, model.num_verifiers, model.drafters, model.is_default) == ("toy", 1, ("toy",), True)
    heard = await hear(shared, ask(max_tokens=2))
    started = heard.events[0]
    assert isinstance(started, Started)
    await shared.delete(started.session_id)
    with pytest.raises(NotFound):
        await shared.session(started.session_id)
    async with asyncio.timeout(60):
        with pytest.raises(NotFound):
            while True:  # a generation that is still ending is called off, which is no error
                await shared.delete(started.session_id)


# --- bad input ----------------------------------------------------------------------------------------------------


BAD = [
    (ask(TextPrompt("")), "text"),
    (ask(TokenPrompt(())), "token_ids"),
    (ask(TokenPrompt((5, 267))), "token_ids[1]"),
    (ask(TokenPrompt((5,) * 4096)), "prompt"),
    (ask(model="other"), "model"),
    (ask(max_tokens=0), "max_tokens"),
    (ask(stop=("",)), "stop[0]"),
    (ask(stop_token_ids=(400,)), "stop_token_ids[0]"),
    (ask(num_logprobs=200), "logprobs"),
    (ask(sampling=SamplingParams(temperature=-1.0)), "sampling.temperature"),
    (ask(sampling=SamplingParams(temperature=math.nan)), "sampling.temperature"),
    (ask(sampling=SamplingParams(top_p=0.0)), "sampling.top_p"),
    (ask(sampling=SamplingParams(logit_bias=((300, 1.0),))), "sampling.logit_bias.token_id[0]"),
    (ask(sampling=SamplingParams(), mode=Mode.GREEDY), "sampling.temperature"),
    (ask(sampling=SamplingParams(), mode=Mode.COUPLED), "seed"),
    (ask(sampling=SamplingParams(), mode=Mode.BLOCK, seed=3), "seed"),
    (ask(sampling=SamplingParams(), mode=Mode.REJECTION, seed=3), "seed"),
    (ask(speculation=SpeculationChoice(off=True, gamma=3)), "speculation.off"),
    (ask(speculation=SpeculationChoice(gamma=4, window=3)), "speculation.window"),
    (ask(speculation=SpeculationChoice(window=3)), "speculation.gamma"),
    (ask(speculation=SpeculationChoice(gamma=0)), "speculation.gamma"),
]


@pytest.mark.parametrize(("request_", "field"), BAD, ids=[field for _, field in BAD])
async def test_a_bad_field_is_refused_by_name(shared: Client, request_: GenerationRequest, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await hear(shared, request_)
    assert refused.value.field == field
    assert refused.value.allowed
    assert len((await hear(shared, ask(max_tokens=3))).token_ids) == 3


async def test_an_unknown_session_is_not_found(shared: Client) -> None:
    with pytest.raises(NotFound):
        await hear(shared, ask(session_id=SessionId("nobody")))
    with pytest.raises(NotFound):
        _ = [event async for event in shared.resume(SessionId("nobody"), 3)]


# --- losing workers -----------------------------------------------------------------------------------------------


async def test_without_a_draft_worker_the_text_is_the_same_and_the_reason_is_told(bench: Bench, shared: Client) -> None:
    verifier, _ = await bench.verifier()
    _, _, client = await bench.orchestrator([verifier], [])
    heard = await hear(client, ask())
    assert heard.token_ids == (await hear(shared, ask())).token_ids
    assert heard.finished.figures.speculation_off == "no_drafter"


async def test_a_killed_draft_worker_changes_nothing_but_the_speed(bench: Bench, shared: Client) -> None:
    """Case 25."""
    _, drafter, _, client = await slow_cluster(bench)
    events: list[Any] = []
    async for event in client.generate(ask(max_tokens=60)):
        events.append(event)
        if len(events) == 4:
            await drafter.kill()
    heard = Heard(events)
    assert heard.token_ids == (await hear(shared, ask(max_tokens=60, speculation=OFF))).token_ids
    assert heard.finished.figures.num_accepted > 0
    assert heard.finished.figures.speculation_off.startswith("drafter_")
    assert any(isinstance(event, Notice) and event.reason == "drafter_lost" for event in events)


async def test_a_draft_worker_that_comes_back_is_used_again(bench: Bench, shared: Client) -> None:
    verifier, _ = await bench.verifier(toy_delay_s=0.01)
    first, app = await bench.drafter(toy_delay_s=0.001)
    _, _, client = await bench.orchestrator([verifier], [first], drafter_retry_s=0.1)
    events: list[Any] = []
    async for event in client.generate(ask(max_tokens=600)):
        events.append(event)
        if len(events) == 4:
            await first.kill()
        if len(events) == 30:
            await bench.drafter(toy_delay_s=0.001, listen=app.address)
    heard = Heard(events)
    assert heard.token_ids == (await hear(shared, ask(max_tokens=600, speculation=OFF))).token_ids
    late = [kind for chunk in heard.chunks[60:] for kind in chunk.kinds]
    assert TokenKind.ACCEPTED in late
    assert heard.finished.figures.speculation_off == ""


async def test_a_lost_verifier_is_replaced_and_the_client_sees_only_a_pause(bench: Bench, shared: Client) -> None:
    first, _ = await bench.verifier(toy_delay_s=0.01)
    second, _ = await bench.verifier(toy_delay_s=0.01)
    drafter, _ = await bench.drafter(toy_delay_s=0.001)
    verifiers = {first.app.address: first, second.app.address: second}
    _, app, client = await bench.orchestrator([first, second], [drafter])
    events: list[Any] = []
    async for event in client.generate(ask(max_tokens=60)):
        events.append(event)
        if len(events) == 4:
            assert app.sessions is not None
            (driver,) = app.sessions._running.values()
            await verifiers[driver._peers.verifier.address].kill()
    heard = Heard(events)
    assert heard.token_ids == (await hear(shared, ask(max_tokens=60, speculation=OFF))).token_ids
    assert any(isinstance(event, Notice) and event.reason == "verifier_lost" for event in events)


async def test_without_any_verifier_a_request_is_refused_and_health_says_so(bench: Bench) -> None:
    verifier, _ = await bench.verifier()
    _, _, client = await bench.orchestrator([verifier], [])
    await verifier.kill()
    await asyncio.sleep(1.1)
    with pytest.raises(Unavailable):
        await hear(client, ask())


async def test_a_verifier_that_dies_for_good_fails_the_generation_in_time(bench: Bench) -> None:
    verifier, _, _, client = await slow_cluster(bench, verifier_deadline_s=0.3)
    with pytest.raises(Unavailable):
        async for event in client.generate(ask(max_tokens=400)):
            if isinstance(event, Chunk):
                await verifier.kill()


# --- clients that go away, and resuming ---------------------------------------------------------------------------


async def test_a_client_that_leaves_frees_its_slots(bench: Bench) -> None:
    """Case 22."""
    verifier, verify = await bench.verifier(toy_delay_s=0.005, max_sessions=2, max_waiting=0)
    drafter, draft = await bench.drafter(toy_delay_s=0.001, max_sessions=2)
    _, app, client = await bench.orchestrator([verifier], [drafter])
    for wait in (1, 3, 6):
        async with aclosing(client.generate(ask(max_tokens=2000))) as events:
            count = 0
            async for _ in events:
                count += 1
                if count > wait:
                    break
        await until(lambda: verify.engine is not None and verify.engine.num_sessions == 0)
        await until(lambda: draft.seats is not None and len(draft.seats) == 0)
    await until(lambda: app.sessions is not None and len(app.sessions) == 0)
    both = await asyncio.gather(*(hear(client, ask(max_tokens=10)) for _ in range(2)))
    assert [len(heard.token_ids) for heard in both] == [10, 10]


async def test_a_generation_that_is_over_is_gone_without_a_collection_of_garbage(bench: Bench) -> None:
    verifier, _ = await bench.verifier(toy_delay_s=0.002)
    drafter, _ = await bench.drafter()
    _, app, client = await bench.orchestrator([verifier], [drafter])
    sessions = app.sessions
    assert sessions is not None
    gc.collect()
    gc.disable()
    try:
        async with aclosing(client.generate(ask())) as events:
            await anext(events)
            (driver,) = map(weakref.ref, sessions.running())
            assert [event async for event in events]
        await until(lambda: driver() is None)
    finally:
        gc.enable()


async def left_after(client: Client, request: GenerationRequest, num_tokens: int) -> tuple[SessionId, Heard]:
    """Leave a generation after at least so many tokens."""
    seen: list[Any] = []
    async with aclosing(client.generate(request)) as events:
        async for event in events:
            seen.append(event)
            if len(Heard(seen).token_ids) >= num_tokens:
                break
    assert isinstance(seen[0], Started)
    return seen[0].session_id, Heard(seen)


@pytest.mark.parametrize("fields", [{}, {"sampling": SamplingParams(), "seed": 4}], ids=["greedy", "coupled"])
async def test_another_orchestrator_resumes_with_no_token_twice_or_missing(
    bench: Bench, shared: Client, fields: dict[str, Any]
) -> None:
    verifier, drafter, _, client = await slow_cluster(bench)
    _, _, other = await bench.orchestrator([verifier], [drafter])
    twin = await hear(shared, ask(max_tokens=60, speculation=OFF, **fields))
    for num_tokens in (1, 7, 20):
        session_id, before = await left_after(client, ask(max_tokens=60, **fields), num_tokens)
        position = before.chunks[0].start + len(before.token_ids)
        after = Heard([event async for event in other.resume(session_id, position)])
        assert before.token_ids + after.token_ids == twin.token_ids
        assert before.text + after.text == twin.text
        assert after.finished.usage.completion_tokens == 60


async def test_resuming_further_back_tells_the_logged_tokens_again(shared: Client) -> None:
    heard = await hear(shared, ask(max_tokens=30))
    started = heard.events[0]
    assert isinstance(started, Started)
    for seen in (0, 1, 13, 30):
        again = Heard([event async for event in shared.resume(started.session_id, started.prompt_len + seen)])
        assert again.token_ids == heard.token_ids[seen:]
        assert again.finished.reason is FinishReason.LENGTH
        assert heard.text.endswith(again.text)
    with pytest.raises(InvalidRequest):
        _ = [event async for event in shared.resume(started.session_id, 3)]
    with pytest.raises(InvalidRequest):
        _ = [event async for event in shared.resume(started.session_id, started.prompt_len + 31)]


async def cut_log(url: str, session_id: SessionId, length: int) -> None:
    """Lose the log's tail, as a failover of the store would."""
    client: Any = open_client(url)
    store = SessionStore(client)
    _, log, classes, kinds, _ = store._keys(session_id)
    for key, size in ((log, 4), (classes, 1), (kinds, 1)):
        value = await client.get(key)
        await client.set(key, value[: length * size])
    await client.aclose()


async def test_what_was_shown_and_lost_is_drawn_again_silently_if_it_is_determined(
    bench: Bench, shared: Client, valkey_url: str
) -> None:
    _, _, app, client = await slow_cluster(bench)
    session_id, before = await left_after(client, ask(max_tokens=60), 20)
    await until(lambda: len(app.sessions) == 0)
    start = before.chunks[0].start
    await cut_log(valkey_url, session_id, start + 5)
    after = Heard([event async for event in client.resume(session_id, start + len(before.token_ids))])
    twin = await hear(shared, ask(max_tokens=60, speculation=OFF))
    assert before.token_ids + after.token_ids == twin.token_ids
    assert before.text + after.text == twin.text


async def test_what_was_shown_and_lost_in_rejection_mode_is_data_loss(bench: Bench, valkey_url: str) -> None:
    _, _, app, client = await slow_cluster(bench)
    request = ask(max_tokens=60, sampling=SamplingParams())
    session_id, before = await left_after(client, request, 10)
    await until(lambda: len(app.sessions) == 0)
    start = before.chunks[0].start
    await cut_log(valkey_url, session_id, start + 2)
    with pytest.raises(DataLoss):
        _ = [event async for event in client.resume(session_id, start + len(before.token_ids))]


async def test_of_two_orchestrators_that_own_a_session_the_older_is_fenced(bench: Bench, shared: Client) -> None:
    verifier, drafter, _, older = await slow_cluster(bench)
    _, _, newer = await bench.orchestrator([verifier], [drafter])
    events: list[Any] = []
    resumed: asyncio.Task[Heard] | None = None

    async def resume() -> Heard:
        return Heard([event async for event in newer.resume(events[0].session_id, events[0].prompt_len)])

    with pytest.raises(LeaseLost):
        async for event in older.generate(ask(max_tokens=200)):
            events.append(event)
            if len(events) == 4:
                resumed = asyncio.create_task(resume())
    assert resumed is not None
    twin = await hear(shared, ask(max_tokens=200, speculation=OFF))
    assert (await resumed).token_ids == twin.token_ids
    told = Heard([event for event in events if not isinstance(event, Notice)])
    assert told.token_ids == twin.token_ids[: len(told.token_ids)]


def breaks(app: Any) -> dict[Any, Any]:
    """Workers that the orchestrator leaves out, or has left out."""
    found: dict[Any, Any] = app.sessions._tools.placement.breakers._circuits
    return found


async def test_of_calls_that_resume_a_session_at_once_one_goes_on_and_nobody_else_is_refused(
    bench: Bench, shared: Client
) -> None:
    verifier, drafter, app, client = await slow_cluster(bench)
    _, other_app, other = await bench.orchestrator([verifier], [drafter])
    session_id, before = await left_after(client, ask(max_tokens=200), 5)
    position = before.chunks[0].start + len(before.token_ids)

    async def resume(by: Client) -> Heard | OutriderError:
        try:
            return Heard([event async for event in by.resume(session_id, position)])
        except OutriderError as error:
            return error

    calls = [asyncio.create_task(resume(by)) for by in (client, client, other, client, other)]
    for _ in range(10):
        for by in (client, other):
            assert len((await hear(by, ask(max_tokens=3))).token_ids) == 3
    ended = await asyncio.gather(*calls)
    assert not breaks(app)
    assert not breaks(other_app)
    errors = [each for each in ended if isinstance(each, OutriderError)]
    (heard,) = [each for each in ended if isinstance(each, Heard)]
    assert [type(each) for each in errors if not isinstance(each, LeaseLost)] == []
    twin = await hear(shared, ask(max_tokens=200, speculation=OFF))
    assert before.token_ids + heard.token_ids == twin.token_ids


async def test_a_resuming_call_that_finds_a_newer_one_running_gives_way(bench: Bench) -> None:
    """Two calls open at once, and the one with the older lease is launched last."""
    _, _, app, client = await slow_cluster(bench)
    session_id, before = await left_after(client, ask(max_tokens=400), 5)
    position = before.chunks[0].start + len(before.token_ids)
    assert app.sessions is not None
    opening = app.sessions._opening
    older = await opening.resume(ResumeFrom(session_id, position), 0.0, Ticket())
    assert isinstance(older, Opened)
    async with aclosing(client.resume(session_id, position)) as newer:
        await anext(newer)
        running = app.sessions._running[session_id]
        with pytest.raises(LeaseLost):
            app.sessions._launch(older, Place(lambda: None))
        assert app.sessions._running[session_id] is running
        assert isinstance(await anext(newer), Chunk)


@pytest.mark.parametrize(("token_id", "refused"), [(2**31 - 1, InvalidRequest), (2**32 - 1, ProtocolError)])
async def test_a_session_that_a_verifier_refuses_fails_at_once_and_alone(
    bench: Bench, valkey_url: str, token_id: int, refused: type[OutriderError]
) -> None:
    _, _, app, client = await slow_cluster(bench)
    session_id, before = await left_after(client, ask(TextPrompt("the cat sat on " * 20), max_tokens=60), 5)
    client_of_store: Any = open_client(valkey_url)
    _, log, *_ = SessionStore(client_of_store)._keys(session_id)
    await client_of_store.setrange(log, 0, token_id.to_bytes(4, "little"))
    await client_of_store.aclose()
    started_s = time.monotonic()
    with pytest.raises(refused, match="token_ids"):
        _ = [event async for event in client.resume(session_id, before.chunks[0].start + len(before.token_ids))]
    assert time.monotonic() - started_s < 10.0, "another verifier was not waited for"
    assert not breaks(app)
    assert len((await hear(client, ask(max_tokens=3))).token_ids) == 3


async def test_a_session_with_a_generation_under_way_takes_no_second_one(bench: Bench) -> None:
    _, _, _, client = await slow_cluster(bench)
    async with aclosing(client.generate(ask(max_tokens=500))) as events:
        started = await anext(events)
        assert isinstance(started, Started)
        with pytest.raises(FailedPrecondition):
            await hear(client, ask(session_id=started.session_id))


async def test_deleting_a_session_calls_its_generation_off(bench: Bench) -> None:
    _, _, _, client = await slow_cluster(bench)
    events: list[Any] = []
    async for event in client.generate(ask(max_tokens=1000)):
        events.append(event)
        if len(events) == 3:
            await client.delete(events[0].session_id)
    assert Heard(events).finished.reason is FinishReason.CANCELLED


async def test_a_session_that_the_store_lost_is_written_anew_and_goes_on(
    bench: Bench, shared: Client, valkey_url: str
) -> None:
    _, _, _, client = await slow_cluster(bench)
    of_store: Any = open_client(valkey_url)
    events: list[Any] = []
    async for event in client.generate(ask(max_tokens=60)):
        events.append(event)
        if len(events) == 3:
            await of_store.delete(*SessionStore(of_store)._keys(events[0].session_id))
    twin = await hear(shared, ask(max_tokens=60, speculation=OFF))
    told = Heard([event for event in events if not isinstance(event, Notice)])
    assert told.token_ids == twin.token_ids
    log = await SessionStore(of_store).read_log(events[0].session_id)
    assert list(log.token_ids[events[0].prompt_len :]) == told.token_ids
    assert told.finished.reason is FinishReason.LENGTH
    await of_store.aclose()


async def test_a_session_that_was_deleted_elsewhere_is_data_loss_and_no_regular_end(
    bench: Bench, valkey_url: str
) -> None:
    _, _, _, client = await slow_cluster(bench)
    of_store = open_client(valkey_url)
    events: list[Any] = []
    with pytest.raises(DataLoss, match="gone from the store"):
        async for event in client.generate(ask(max_tokens=1000)):
            events.append(event)
            if len(events) == 3:
                assert await SessionStore(of_store).delete(events[0].session_id)
    await of_store.aclose()
    assert not any(isinstance(event, Finished) for event in events)


async def test_a_session_is_resumed_and_continued_on_the_verifier_that_holds_its_kv(
    bench: Bench, shared: Client
) -> None:
    """Written while a generation runs and at its end; of five verifiers chance would take the same one rarely."""
    verifiers = [(await bench.verifier(toy_delay_s=0.01))[0] for _ in range(5)]
    running, _, client = await bench.orchestrator(verifiers, [], lease_ttl_s=0.3)
    _, _, other = await bench.orchestrator(verifiers, [])
    session_id, before = await left_by_a_killed_orchestrator(running, client, ask(max_tokens=160), 100)
    of_store = open_client(bench.store_url)
    store = SessionStore(of_store)
    (location,) = await store.kv_locations(session_id)
    start = before.chunks[0].start
    assert start < location.prefix_len <= start + 160
    assert location.epoch.generation.fence >= 1
    after = Heard([event async for event in other.resume(session_id, start + len(before.token_ids))])
    twin = await hear(shared, ask(max_tokens=160, speculation=OFF))
    assert before.token_ids + after.token_ids == twin.token_ids
    for length in (160, 170):
        (later,) = await store.kv_locations(session_id)
        assert later.worker_id == location.worker_id
        assert later.last_used_s > location.last_used_s
        assert later.prefix_len >= start + length - 1
        await hear(other, ask(session_id=session_id, max_tokens=10))
    await of_store.aclose()


async def left_by_a_killed_orchestrator(
    running: Running, client: Client, request: GenerationRequest, num_tokens: int
) -> tuple[SessionId, Heard]:
    """Hear some tokens of a generation, then end its orchestrator as a crash would; return what was heard."""
    events: list[Any] = []
    with pytest.raises(Unavailable):
        async for event in client.generate(request):
            events.append(event)
            if len(Heard(events).token_ids) >= num_tokens:
                await running.kill()
    return events[0].session_id, Heard(events)


async def test_a_full_orchestrator_refuses_with_a_delay(bench: Bench) -> None:
    _, _, _, client = await slow_cluster(bench, max_sessions=1, max_waiting=0)
    async with aclosing(client.generate(ask(max_tokens=500))) as events:
        await anext(events)
        with pytest.raises(ResourceExhausted) as refused:
            await hear(client, ask())
        assert refused.value.retry_delay_s > 0


async def test_a_verifier_whose_queue_is_longer_than_its_silence_may_be_is_not_lost(bench: Bench) -> None:
    verifier, _ = await bench.verifier(toy_delay_s=0.01, max_sessions=1, sign_of_life_s=0.05)
    _, app, client = await bench.orchestrator([verifier], [], verdict_timeout_s=1.0)
    async with aclosing(client.generate(ask(max_tokens=2000))) as events:
        await anext(events)
        await anext(events)
        second = asyncio.create_task(hear(client, ask(max_tokens=5)))
        await asyncio.sleep(2.5)
        assert not second.done()
    assert len((await second).token_ids) == 5
    assert not app.metrics.registry.get_sample_value("outrider_orchestrator_events_total", {"event": "verifier_lost"})


async def test_calls_that_are_refused_before_they_begin_are_counted_by_reason(bench: Bench) -> None:
    _, _, app, client = await slow_cluster(bench, max_sessions=1, max_waiting=0)

    def refused() -> dict[str, float]:
        (family,) = [each for each in app.metrics.registry.collect() if each.name == "outrider_refused_calls"]
        return {each.labels["reason"]: each.value for each in family.samples if each.name.endswith("_total")}

    with pytest.raises(InvalidRequest):
        await hear(client, ask(max_tokens=0))
    with pytest.raises(NotFound):
        await hear(client, ask(session_id=SessionId("nobody")))
    async with aclosing(client.generate(ask(max_tokens=500))) as events:
        await anext(events)
        for _ in range(2):
            with pytest.raises(ResourceExhausted):
                await hear(client, ask())
    counted = {reason: value for reason, value in refused().items() if value}
    assert counted == {"invalid_request": 1, "session_not_found": 1, "resource_exhausted": 2}


async def test_a_busy_verifier_is_reported_as_exhausted(bench: Bench) -> None:
    verifier, _ = await bench.verifier(toy_delay_s=0.01, max_sessions=1, max_waiting=0)
    _, app, client = await bench.orchestrator([verifier], [], verifier_deadline_s=1.0)
    async with aclosing(client.generate(ask(max_tokens=2000))) as events:
        await anext(events)
        await anext(events)
        with pytest.raises(OutriderError) as refused:
            await hear(client, ask())
        assert isinstance(refused.value, ResourceExhausted)
        ended = app.metrics.registry.get_sample_value("outrider_generations_total", {"outcome": "resource_exhausted"})
        assert ended == 1


async def test_draining_lets_what_runs_finish_and_takes_nothing_new(bench: Bench) -> None:
    _, _, app, client = await slow_cluster(bench)
    events = client.generate(ask(max_tokens=30))
    await anext(events)
    draining = asyncio.create_task(app.drain())
    await asyncio.sleep(0.02)
    with pytest.raises(Unavailable):
        await hear(client, ask())
    rest = [event async for event in events]
    assert len(Heard(rest).token_ids) == 30
    await asyncio.wait_for(draining, 60)


# --- the store goes away ------------------------------------------------------------------------------------------


async def test_a_generation_waits_for_a_store_that_pauses_and_shows_nothing_meanwhile(shared: Client) -> None:
    async with EmbeddedServer() as server, Bench(server.url) as bench:
        _, _, _, client = await slow_cluster(bench)
        events: list[Any] = []
        times_s: list[float] = []
        async for event in client.generate(ask(max_tokens=60)):
            events.append(event)
            times_s.append(time.monotonic())
            if len(events) == 4:
                os.kill(server.pid, signal.SIGSTOP)
                asyncio.get_running_loop().call_later(1.0, os.kill, server.pid, signal.SIGCONT)
        assert max(later - sooner for sooner, later in pairwise(times_s)) > 0.8
        assert Heard(events).token_ids == (await hear(shared, ask(max_tokens=60, speculation=OFF))).token_ids


async def test_a_store_that_stays_away_ends_the_generation_within_its_deadline() -> None:
    async with EmbeddedServer() as server, Bench(server.url) as bench:
        _, _, _, client = await slow_cluster(bench, store_deadline_s=0.5)
        events: list[Any] = []
        try:
            with pytest.raises(StoreUnavailable):
                async for event in client.generate(ask(max_tokens=400)):
                    events.append(event)
                    if len(events) == 4:
                        os.kill(server.pid, signal.SIGSTOP)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        summary = await client.session(events[0].session_id, include_token_ids=True)
        shown = Heard(events).token_ids
        assert summary.running
        assert list(summary.token_ids[events[0].prompt_len :][: len(shown)]) == shown


async def test_a_log_that_lost_its_tail_is_written_again(bench: Bench, shared: Client, valkey_url: str) -> None:
    _, _, _, client = await slow_cluster(bench)
    events: list[Any] = []
    async for event in client.generate(ask(max_tokens=60)):
        events.append(event)
        if len(events) == 10:
            await cut_log(valkey_url, events[0].session_id, events[0].prompt_len + 1)
    twin = await hear(shared, ask(max_tokens=60, speculation=OFF))
    assert Heard(events).token_ids == twin.token_ids
    summary = await client.session(events[0].session_id, include_token_ids=True)
    assert list(summary.token_ids[events[0].prompt_len :]) == twin.token_ids


# --- the process --------------------------------------------------------------------------------------------------


async def orchestrator_process(**settings: str) -> tuple[int, str]:
    """Run `python -m orchestrator` until it is healthy, end it with SIGTERM, and return its status and output."""
    environment = {**os.environ, **{f"OUTRIDER_ORCHESTRATOR_{name}": value for name, value in settings.items()}}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "orchestrator", env=environment, stderr=asyncio.subprocess.PIPE, cwd=ROOT
    )
    assert process.stderr is not None
    output = ""
    async with asyncio.timeout(100):
        while line := (await process.stderr.readline()).decode():
            output += line
            if "can be reached" in line:
                process.send_signal(signal.SIGTERM)
        return await process.wait(), output


async def test_the_process_serves_with_a_store_of_its_own_and_ends_in_order(bench: Bench) -> None:
    verifier, _ = await bench.verifier()
    status, output = await orchestrator_process(MODEL="toy", VERIFY_ADDRESSES=verifier.app.address)
    assert status == 0, output
    assert "draining" in output


@pytest.mark.parametrize(
    ("settings", "told"),
    [({"GAMA": "3"}, "OUTRIDER_ORCHESTRATOR_GAMMA"), ({"GAMMA": "4", "WINDOW": "2"}, "at least gamma")],
)
async def test_an_unknown_or_bad_setting_is_refused_at_the_start(settings: dict[str, str], told: str) -> None:
    status, output = await orchestrator_process(**settings)
    assert (status, told in output) == (2, True)


async def test_a_model_without_a_tokenizer_ends_the_process_with_an_error() -> None:
    status, output = await orchestrator_process(MODEL="./nothing")
    assert (status, "nothing" in output) == (1, True)
