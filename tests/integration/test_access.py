"""Who may call, how much, and whose sessions are whose: real clients, orchestrators and store, with the toy model."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from outrider.client import NO_RETRY, Client
from outrider.errors import InvalidRequest, LimitReached, NotFound, Unauthenticated, Unavailable
from outrider.generation import (
    Chunk,
    Finished,
    GenerationEvent,
    GenerationRequest,
    SpeculationChoice,
    Started,
    TextPrompt,
)
from outrider.ids import SessionId
from outrider.keys import KeyLimits, KeyRecord, make_key, write_record
from outrider.messages import SamplingParams
from outrider.rpc import channel
from outrider.store.connect import open_client
from outrider.store.keys import KeyStore
from outrider.store.sessions import SessionStore
from outrider.v1 import generation_pb2 as pb
from outrider.v1.generation_pb2_grpc import GenerationServiceStub
from tests.integration.cluster_bench import Bench, Running, hear

SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"]
NOBODY = "00000000000000000000beef"
WAIT_S = 0.3
"""How long a key is believed here, and what shows that a place is lost; seconds in earnest."""


def ask(text: str = "the cat sat on ", **fields: Any) -> GenerationRequest:
    known: dict[str, Any] = {
        "max_tokens": 8,
        "sampling": SamplingParams(temperature=0.0),
        "ignore_eos": True,
        "speculation": SpeculationChoice(off=True),
        **fields,
    }
    return GenerationRequest(TextPrompt(text), **known)


@dataclass
class House:
    """A verifier, two orchestrators that want keys, and one that lets everybody in."""

    bench: Bench
    keys: KeyStore
    store: SessionStore
    addresses: list[str]
    running: list[Running]
    open_address: str
    clients: list[Client] = field(default_factory=list)

    async def key(self, **limits: int) -> str:
        key, record = make_key("somebody", KeyLimits(**limits), time.time())
        await self.keys.create(record)
        return key

    def client(self, key: str, which: int = 0) -> Client:
        return self._kept(Client(self.addresses[which], timeout_s=60, retry=NO_RETRY, api_key=key))

    async def pair(self, **limits: int) -> tuple[Client, Client]:
        """One key's clients of both orchestrators."""
        key = await self.key(**limits)
        return self.client(key, 0), self.client(key, 1)

    def anybody(self) -> Client:
        return self._kept(Client(self.open_address, timeout_s=60, retry=NO_RETRY, api_key=""))

    def _kept(self, client: Client) -> Client:
        self.clients.append(client)
        return client


async def build(url: str, **settings: Any) -> tuple[Bench, House]:
    bench = await Bench(url).__aenter__()
    verifier, _ = await bench.verifier(toy_delay_s=0.01)
    known = {"require_keys": True, "key_cache_s": WAIT_S, **settings}
    made = [await bench.orchestrator([verifier], [], **known) for _ in range(2)]
    _, open_app, _ = await bench.orchestrator([verifier], [])
    opened = open_client(url)
    bench._exits.push_async_callback(opened.aclose)
    addresses = [app.address for _, app, _ in made]
    running = [each for each, _, _ in made]
    return bench, House(bench, KeyStore(opened), SessionStore(opened), addresses, running, open_app.address)


@pytest.fixture(scope="module")
async def house(valkey_url: str) -> AsyncIterator[House]:
    bench, made = await build(valkey_url)
    yield made
    for client in made.clients:
        await client.close()
    await bench.__aexit__()


# --- who may call ---------------------------------------------------------------------------------------------------


async def call(address: str, method: str, request: Any, metadata: Any = ()) -> grpc.aio.AioRpcError | None:
    """Call a method, to its end; return the error it ends with."""
    async with channel(address) as to:
        calling = getattr(GenerationServiceStub(to), method)(request, timeout=60, metadata=metadata)
        try:
            if SERVICE.methods_by_name[method].server_streaming:
                async for _ in calling:
                    pass
            else:
                await calling
        except grpc.aio.AioRpcError as error:
            return error
    return None


def message(method: str) -> Any:
    return getattr(pb, SERVICE.methods_by_name[method].input_type.name)()


def show(value: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", value),)


async def test_every_method_wants_a_valid_key_before_it_looks_at_anything_else(house: House) -> None:
    good = await house.key()
    late, revoked = make_key("late", KeyLimits(), 1.0, 2.0), make_key("revoked", KeyLimits(), 1.0)
    for _, record in (late, revoked):
        await house.keys.create(record)
    await house.keys.revoke(revoked[1].key_id)
    other = await house.key()
    shown = [
        (),
        show(""),
        show(good),
        show(f"Basic {good}"),
        show("Bearer "),
        show("Bearer " + "x" * 4000),
        show(f"Bearer outrider-{NOBODY[:12]}-{'A' * 43}"),
        show(f"Bearer {good[:24]}{other[24:]}"),
        show(f"Bearer {late[0]}"),
        show(f"Bearer {revoked[0]}"),
        show(f"Bearer {good}") + show(f"Bearer {good}"),
    ]
    for method in SERVICE.methods_by_name:
        for metadata in shown:
            error = await call(house.addresses[0], method, message(method), metadata)
            assert error is not None, (method, metadata)
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED, (method, metadata, error)
            assert "outrider-" not in str(error.details()).replace("outrider-…", ""), error
        error = await call(house.addresses[0], method, message(method), show(f"bearer {good}"))
        assert error is None or error.code() is grpc.StatusCode.INVALID_ARGUMENT, (method, error)


async def test_a_stranger_is_told_the_same_of_an_unknown_id_and_of_a_wrong_secret(house: House) -> None:
    good = await house.key()
    unknown = f"Bearer outrider-{NOBODY[:12]}-{'A' * 43}"
    wrong = f"Bearer {good[:22]}{'A' * 43}"
    told = [
        await call(house.addresses[0], "ListModels", pb.ListModelsRequest(), show(each)) for each in (unknown, wrong)
    ]
    assert all(each is not None for each in told)
    assert len({(each.code(), each.details(), str(each.trailing_metadata())) for each in told if each}) == 1


async def test_health_answers_without_a_key(house: House) -> None:
    async with channel(house.addresses[0]) as to:
        answer = await health_pb2_grpc.HealthStub(to).Check(health_pb2.HealthCheckRequest(), timeout=60)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_the_client_takes_its_key_from_the_environment_or_the_argument(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_API_KEY", f"{await house.key()}\n")
    async with Client(house.addresses[0]) as client:
        assert (await client.models())[0].model == "toy"
    async with Client(house.addresses[0], api_key="") as client:
        with pytest.raises(Unauthenticated, match="an API key is needed"):
            await client.models()
    with pytest.raises(InvalidRequest, match="api_key") as refused:
        Client(house.addresses[0], api_key="a secret\nX: y")
    assert "secret" not in str(refused.value)


async def test_a_revocation_ends_what_runs_and_refuses_what_comes_within_the_time_a_key_is_believed(
    house: House,
) -> None:
    key = await house.key()
    client, began = house.client(key), 0.0
    with pytest.raises(Unauthenticated, match="revoked"):
        async for event in client.generate(ask(max_tokens=3900)):
            if isinstance(event, Chunk) and not began:
                await house.keys.revoke(key.split("-")[1])
                began = time.monotonic()
            assert not began or time.monotonic() < began + WAIT_S + 20, "the text would take twice as long"
    assert began
    with pytest.raises(Unauthenticated, match="revoked"):
        await client.models()


# --- whose sessions -------------------------------------------------------------------------------------------------

Use = Callable[[Client, SessionId], Any]


async def _heard(events: Any) -> list[GenerationEvent]:
    return [event async for event in events]


USES: dict[str, Use] = {
    "Generate": lambda client, session_id: _heard(client.generate(ask("more", session_id=session_id))),
    "Resume": lambda client, session_id: _heard(client.resume(session_id, 15)),
    "GetSession": lambda client, session_id: client.session(session_id, include_token_ids=True),
    "DeleteSession": lambda client, session_id: client.delete(session_id),
}


def test_every_method_that_names_a_session_is_tried() -> None:
    naming = {name for name, each in SERVICE.methods_by_name.items() if "session_id" in each.input_type.fields_by_name}
    assert naming == set(USES)


async def refusal(use: Use, client: Client, session_id: SessionId) -> tuple[Any, ...]:
    """Return all that a refused client learns, the session's name apart."""
    with pytest.raises(NotFound) as refused:
        await use(client, session_id)
    cause = refused.value.__cause__
    assert isinstance(cause, grpc.aio.AioRpcError)
    status = rpc_status.from_call(cause)
    assert status is not None
    return type(refused.value), cause.code(), str(status).replace(session_id, "SESSION")


@pytest.mark.parametrize("method", USES)
@pytest.mark.parametrize("which", [0, 1], ids=["the same orchestrator", "another orchestrator"])
async def test_a_foreign_session_looks_like_one_that_does_not_exist_and_is_not_touched(
    house: House, method: str, which: int
) -> None:
    owner, foreign = house.client(await house.key()), house.client(await house.key(), which)
    running = owner.generate(ask(max_tokens=60))
    started = await anext(running)
    assert isinstance(started, Started)
    session_id = started.session_id
    idle = (await hear(owner, ask())).events[0]
    assert isinstance(idle, Started)
    absent = await refusal(USES[method], foreign, SessionId(NOBODY))
    before = await house.store.read_state(idle.session_id)
    for theirs in (session_id, idle.session_id):
        assert await refusal(USES[method], foreign, theirs) == absent
    assert await house.store.read_state(idle.session_id) == before
    # the running one goes on as if nothing had been: a lease taken away would end it
    heard = [event async for event in running]
    assert isinstance(heard[-1], Finished)
    assert heard[-1].usage.completion_tokens == 60
    for theirs in (session_id, idle.session_id):
        assert (await owner.session(theirs)).session_id == theirs


async def test_sessions_made_with_a_key_and_without_one_are_foreign_to_each_other(house: House) -> None:
    keyed, open_ = house.client(await house.key()), house.anybody()
    ids = [(await hear(client, ask())).events[0] for client in (keyed, open_)]
    for client, other in ((keyed, ids[1]), (open_, ids[0])):
        assert isinstance(other, Started)
        for use in USES.values():
            assert (await refusal(use, client, other.session_id)) == (await refusal(use, client, SessionId(NOBODY)))


async def test_the_owner_uses_a_session_on_every_orchestrator_and_keeps_it_over_turns(house: House) -> None:
    first, second = await house.pair()
    started = (await hear(first, ask())).events[0]
    assert isinstance(started, Started)
    turn = await hear(second, ask(" and ", session_id=started.session_id))
    assert turn.finished.usage.completion_tokens == 8
    length = (await first.session(started.session_id)).length
    resumed = [event async for event in first.resume(started.session_id, length - 2)]
    assert sum(len(event.token_ids) for event in resumed if isinstance(event, Chunk)) == 2
    with pytest.raises(NotFound):
        await house.client(await house.key()).session(started.session_id)
    await second.delete(started.session_id)
    with pytest.raises(NotFound):
        await first.session(started.session_id)


async def test_a_client_cannot_make_a_session_of_a_name_it_chose(house: House) -> None:
    client = house.client(await house.key())
    for name, error in (
        (NOBODY, NotFound),
        ("../x", InvalidRequest),
        ("a b", InvalidRequest),
        ("a" * 129, InvalidRequest),
    ):
        with pytest.raises(error):
            await hear(client, ask(session_id=SessionId(name)))


# --- how much -------------------------------------------------------------------------------------------------------


async def test_two_orchestrators_share_a_keys_requests_and_the_refusal_says_when_to_come_back(house: House) -> None:
    key = await house.key(requests_per_minute=120)
    here, there = house.client(key, 0), house.client(key, 1)
    first_s = time.monotonic()
    taken = 0
    with pytest.raises(LimitReached) as refused:
        while time.monotonic() < first_s + 20:
            await (here, there)[taken % 2].models()
            taken += 1
    passed_s = time.monotonic() - first_s
    assert 120 <= taken <= 120 + 2 * passed_s + 1
    assert refused.value.limit == "requests_per_minute"
    error = await call(house.addresses[1], "ListModels", pb.ListModelsRequest(), show(f"Bearer {key}"))
    if error is not None:  # one more may have come back meanwhile
        status, retry = rpc_status.from_call(error), RetryInfo()
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert status is not None
        assert any(detail.Unpack(retry) for detail in status.details)
        assert 0 < retry.retry_delay.ToMilliseconds() <= 500
    await asyncio.sleep(1.0)
    await here.models()


async def test_every_method_counts_as_a_request(house: House) -> None:
    for method in SERVICE.methods_by_name:
        key = await house.key(requests_per_minute=1)
        filled = message(method)
        if "session_id" in filled.DESCRIPTOR.fields_by_name:
            filled.session_id = NOBODY
        if method == "Generate":
            filled.text = "the"
        for code in ({grpc.StatusCode.OK, grpc.StatusCode.NOT_FOUND}, {grpc.StatusCode.RESOURCE_EXHAUSTED}):
            error = await call(house.addresses[0], method, filled, show(f"Bearer {key}"))
            assert (grpc.StatusCode.OK if error is None else error.code()) in code, (method, error)


async def test_generations_at_one_time_are_counted_over_orchestrators_and_the_end_makes_room_at_once(
    house: House,
) -> None:
    here, there = await house.pair(concurrent=1)
    for _ in range(3):
        running = here.generate(ask(max_tokens=100))
        await anext(running)
        with pytest.raises(LimitReached) as refused:
            await hear(there, ask())
        assert refused.value.limit == "concurrent"
        async for event in running:
            if isinstance(event, Finished):
                await hear(there, ask(max_tokens=2))  # at once, while the first call is not closed yet


async def test_a_client_that_goes_away_gives_its_place_back(house: House) -> None:
    here, there = await house.pair(concurrent=1)
    async with aclosing(here.generate(ask(max_tokens=900))) as running:
        await anext(running)
    await eventually(lambda: hear(there, ask()))


async def eventually(attempt: Callable[[], Any], within_s: float = 60.0) -> None:
    """Try until no limit refuses it."""
    async with asyncio.timeout(within_s):
        while True:
            try:
                await attempt()
            except LimitReached:
                await asyncio.sleep(0.05)
            else:
                return


async def test_tokens_are_shared_too_and_what_a_generation_does_not_take_comes_back(house: House) -> None:
    here, there = await house.pair(tokens_per_day=100)
    prompt_len = (await hear(here, ask(max_tokens=1))).finished.usage.prompt_tokens
    left = 100 - prompt_len - 1
    async with aclosing(there.generate(ask(max_tokens=900))) as running:  # may begin, and takes all
        seen = 0
        async for event in running:
            seen += len(event.token_ids) if isinstance(event, Chunk) else 0
            if seen >= 5:
                with pytest.raises(LimitReached, match="tokens per day"):
                    await hear(here, ask(max_tokens=1))
                break
    await eventually(lambda: hear(here, ask(max_tokens=1)))
    left -= prompt_len + seen + prompt_len + 1
    passed = 0
    with pytest.raises(LimitReached) as refused:
        while passed < 40:
            await hear((here, there)[passed % 2], ask(max_tokens=4))
            passed += 1
    assert abs(passed - math.ceil(left / (prompt_len + 4))) <= 1  # what was on its way to the client counts
    assert refused.value.limit == "tokens_per_day"
    assert 0 < refused.value.retry_delay_s <= 86_400 * (prompt_len + 5) / 100


async def test_a_turn_without_tokens_left_writes_nothing_and_can_be_tried_again(house: House) -> None:
    here, _ = await house.pair(tokens_per_minute=3000)
    started = (await hear(here, ask(max_tokens=2))).events[0]
    assert isinstance(started, Started)
    key_id = (await house.store.read_state(started.session_id)).owner
    length = (await house.store.read_log(started.session_id)).length
    async with aclosing(here.generate(ask(max_tokens=3500))) as running:
        await anext(running)
        with pytest.raises(LimitReached, match="tokens_per_minute"):
            await hear(here, ask(" more", session_id=started.session_id))
    assert (await house.store.read_log(started.session_id)).length == length
    assert (await house.store.read_state(started.session_id)).owner == key_id
    await eventually(lambda: hear(here, ask(" more", session_id=started.session_id, max_tokens=2)))


async def test_a_killed_orchestrators_place_is_free_for_its_session_at_once_and_for_others_soon(
    valkey_url: str,
) -> None:
    bench, house = await build(valkey_url, key_place_ttl_s=4.0)
    async with bench:
        here, there = await house.pair(concurrent=1)
        heard: list[GenerationEvent] = []
        running = here.generate(ask(max_tokens=40))
        with pytest.raises(Unavailable):
            async for event in running:
                heard.append(event)
                if len(heard) == 4:
                    # as a crash: nothing is given back
                    for ticket in tuple(_tickets(house.running[0])):
                        ticket._held = False
                    await house.running[0].kill()
        started, last = heard[0], heard[-1]
        assert isinstance(started, Started)
        assert isinstance(last, Chunk)
        with pytest.raises(LimitReached):
            await hear(there, ask())
        position = last.start + len(last.token_ids)
        resumed = [event async for event in there.resume(started.session_id, position)]
        assert isinstance(resumed[-1], Finished)
        await eventually(lambda: hear(there, ask()))
        for client in house.clients:
            await client.close()


def _tickets(running: Running) -> Any:
    app: Any = running.app
    return app._servicer._desk.quotas._open


# --- keys from a file -----------------------------------------------------------------------------------------------


async def test_keys_of_a_mounted_file_count_and_a_line_taken_out_counts_no_more(
    valkey_url: str, tmp_path: Path
) -> None:
    path = tmp_path / "keys.jsonl"
    (one, first), (two, second) = (make_key(name, KeyLimits(), 1.0) for name in ("one", "two"))

    def write(*records: KeyRecord) -> None:
        path.write_bytes(b"# keys\n\n" + b"\n".join(map(write_record, records)))

    write(first)
    bench, house = await build(valkey_url, key_file=str(path), key_cache_s=0)
    async with bench:
        with_one, with_two = house.client(one), house.client(two)
        assert (await with_one.models())[0].model == "toy"
        with pytest.raises(Unauthenticated):
            await with_two.models()
        assert (await house.client(await house.key()).models())[0].model == "toy"  # the store's count beside them
        write(second)
        async with asyncio.timeout(60):
            while True:
                try:
                    await with_two.models()
                    break
                except Unauthenticated:
                    await asyncio.sleep(0.1)
        with pytest.raises(Unauthenticated):
            await with_one.models()
        for client in house.clients:
            await client.close()
