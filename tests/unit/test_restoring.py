"""KV comes back from the tier bit for bit, and whatever goes wrong there costs no session a token."""

import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from redis import Redis

from outrider.ids import Mode
from outrider.messages import SamplingParams
from outrider.model.planning import RowClasses
from outrider.model.probe import calibrate
from outrider.model.runner import BLOCK_LEN, ModelRunner
from outrider.model.tiny import random_model
from outrider.model.toy import ToyLanguage
from outrider.model.transformers_runner import TransformersRunner
from outrider.store.embedded import EmbeddedServer
from outrider.tier.format import FIELDS, HEADER_LEN
from outrider.tier.tier import TierSettings
from tests.unit.tier_desk import Cluster, StoredClasses, TierDesk, Wire, kv_bytes, moved
from tests.unit.verify_desk import VOCAB, Client, Desk, Request
from verify_service.inbox import CloseSession
from verify_service.sessions import effective_classes

PROMPT = tuple(at * at % VOCAB for at in range(140))
LANGUAGE = ToyLanguage(VOCAB, seed=5)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
async def server() -> AsyncIterator[EmbeddedServer]:
    async with EmbeddedServer() as running:
        yield running


@pytest.fixture
def admin(server: EmbeddedServer) -> Iterator[Any]:
    client: Any = Redis.from_url(server.url)
    client.flushall()
    yield client
    client.close()


@pytest.fixture
def settings(server: EmbeddedServer, admin: Any) -> TierSettings:
    """Of a server with nothing in it."""
    return TierSettings(server.url, deadline_s=30.0)


@pytest.fixture
def toys(settings: TierSettings) -> Iterator[Cluster]:
    cluster = Cluster(lambda: StoredClasses(64, LANGUAGE), settings)
    yield cluster
    cluster.close()


def transformer(dtype: torch.dtype, *, forced: bool = False) -> Callable[[], ModelRunner]:
    found: list[tuple[RowClasses, str]] = []

    def make() -> ModelRunner:
        runner = TransformersRunner(random_model(dtype=dtype), name="tiny", num_blocks=40)
        if not found:
            report = calibrate(runner)
            assert report.classes.exactness == "bitwise"
            found.append((replace(report.classes, classes_differ=report.classes.classes_differ or forced), "tiny"))
        runner.set_classes(*found[0])
        return runner

    return make


def greedy(**changes: object) -> Request:
    return replace(Request("s", PROMPT, max_tokens=120, num_logprobs=0), **changes)  # type: ignore[arg-type]


def coupled(**changes: object) -> Request:
    return greedy(mode=Mode.COUPLED, sampling=SamplingParams(temperature=1.0), key=bytes(16), **changes)


def said_by(client: Client) -> tuple[list[int], list[float]]:
    return client.output, [entry.logprob for verdict in client.verdicts for entry in verdict.logprobs]


def alone(make: Callable[[], ModelRunner], request: Request) -> tuple[list[int], list[float]]:
    desk = Desk(make())
    client = Client(desk, request)
    desk.run([client])
    return said_by(client)


def run_until(desk: TierDesk, client: Client, num_tokens: int) -> None:
    desk.until(lambda: len(client.output) >= num_tokens)


def play_out(desk: TierDesk, request: Request) -> Client:
    client = Client(desk, request)
    desk.run([client])
    assert not client.errors
    return client


def stored_blobs(admin: Any) -> list[bytes]:
    return [name for name in admin.keys("outrider:kv:*") if not name.endswith(b"index")]


MAKERS: dict[str, Callable[[], ModelRunner]] = {
    "toy": lambda: StoredClasses(64, LANGUAGE),
    "float32": transformer(torch.float32),
    "bfloat16": transformer(torch.bfloat16),
    "bfloat16, classes apart": transformer(torch.bfloat16, forced=True),
}


@pytest.mark.parametrize("request_of", [greedy, coupled], ids=["greedy", "coupled"])
@pytest.mark.parametrize("maker", MAKERS)
def test_a_session_goes_on_at_another_verifier_with_the_same_bits_after_its_first_one_died(
    settings: TierSettings, maker: str, request_of: Callable[[], Request]
) -> None:
    make, request = MAKERS[maker], request_of()
    cluster = Cluster(make, settings)
    twin_text, twin_logprobs = alone(make, request)
    first = cluster.verifier()
    client = Client(first, request)
    run_until(first, client, 70)
    first.die()

    second, third = cluster.verifier(), cluster.verifier(url="unix:///nowhere.sock")
    again, anew = (Client(desk, moved(client)) for desk in (second, third))
    for desk, reopened in ((second, again), (third, anew)):
        run_until(desk, reopened, len(client.output) + 2)
    log, classes = again.opened().token_ids[:-1], effective_classes(again.opened())[:-1]
    num_blocks = len(log) // BLOCK_LEN
    assert second.engine.counters["kv_restored_tokens"] == num_blocks * BLOCK_LEN == second.count("loaded") * BLOCK_LEN
    assert third.engine.counters["kv_restored_tokens"] == 0
    # The bits themselves: as they were computed at first, as they came back, and computed anew.
    assert kv_bytes(first, log, classes) == kv_bytes(second, log, classes) == kv_bytes(third, log, classes)

    for desk, reopened in ((second, again), (third, anew)):
        desk.run([reopened])
        text, logprobs = said_by(reopened)
        assert text == twin_text
        assert logprobs == twin_logprobs[-len(logprobs) :]
    cluster.close()


def test_sessions_that_move_all_the_time_say_what_their_twins_say(settings: TierSettings) -> None:
    """Random moments, small pools, beginnings in common; every verifier's successor starts empty."""
    restored = preempted = 0
    for seed in range(12):
        dice = random.Random(seed)
        cluster = Cluster(lambda dice=dice: StoredClasses(dice.choice((8, 12, 64)), LANGUAGE), settings)  # type: ignore[misc]
        asks = [coupled(session_id=f"s{at}", prompt=PROMPT[: 100 + 13 * at], max_tokens=90) for at in range(4)]
        clients: list[Client] = []
        for generation in range(1, 5):
            desk = cluster.verifier()
            clients = [Client(desk, ask) for ask in asks]
            for _ in range(dice.randrange(60)):
                desk.step()
            desk.die()
            asks = [moved(client, generation + 1) for client in clients]
            restored += desk.engine.counters["kv_restored_tokens"]
            preempted += desk.engine.counters["preempted"]
        desk = cluster.verifier()
        going = [Client(desk, ask) for ask in asks if len(ask.prompt) < ask.prompt_len + ask.max_tokens]
        desk.run(going)
        for ask, client in zip(asks, clients, strict=True):
            text = next((one.output for one in going if one.request is ask), client.output)
            twin = coupled(session_id="twin", prompt=ask.prompt[: ask.prompt_len], max_tokens=90)
            assert text == alone(MAKERS["toy"], twin)[0], (seed, ask)
        cluster.close()
    assert restored > 100 * BLOCK_LEN
    assert preempted > 0


def test_sessions_that_begin_alike_load_their_beginning_once(toys: Cluster) -> None:
    first = toys.verifier()
    play_out(first, greedy(max_tokens=5))
    first.die()
    second = toys.verifier()
    asks = [greedy(session_id=f"s{at}", prompt=(*PROMPT, at), max_tokens=20) for at in range(4)]
    clients = [Client(second, ask) for ask in asks]
    second.run(clients)
    assert [client.output for client in clients] == [alone(MAKERS["toy"], ask)[0] for ask in asks]
    assert second.count("loaded") == 2, "two blocks, by one of four"
    assert second.engine.counters["kv_restored_tokens"] == 2 * BLOCK_LEN
    assert second.engine.counters["kv_reused_tokens"] == 3 * 2 * BLOCK_LEN
    assert [client.verdicts[0].num_cached for client in clients] == [2 * BLOCK_LEN] * 4


def test_what_is_stored_already_is_not_written_again(toys: Cluster) -> None:
    first, second = toys.verifier(), toys.verifier(prefill_s=0.0)
    play_out(first, greedy(max_tokens=5))
    first.die()
    speeds = second.tier.speeds
    speeds.load_s, speeds.probe_every_s = 1.0, 1e9
    speeds.plan(1, time.monotonic())
    play_out(second, greedy(max_tokens=5))
    second.die()
    assert (second.count("stored"), second.count("present"), second.count("loaded")) == (0, 2, 0)


# --- what is found is not what it should be ---------------------------------------------------------------------------

CORRUPTIONS: dict[str, tuple[Callable[[bytearray], bytes], str]] = {
    "magic": (lambda blob: flip(blob, 0), "magic"),
    "version": (lambda blob: flip(blob, 4), "version"),
    "shape": (lambda blob: flip(blob, 12), "shape"),
    "dtype": (lambda blob: flip(blob, 16), "dtype"),
    "length": (lambda blob: bytes(blob) + b"more", "length"),
    "engine": (lambda blob: flip(blob, 36), "engine"),
    "key": (lambda blob: flip(blob, 52), "key"),
    "checksum": (lambda blob: flip(blob, FIELDS.size), "checksum"),
    "bytes": (lambda blob: flip(blob, HEADER_LEN + 100), "checksum"),
    "cut off": (lambda blob: bytes(blob[:-1]), "truncated"),
    "nothing": (lambda blob: b"", "truncated"),
}


def flip(blob: bytearray, place: int) -> bytes:
    blob[place] ^= 1
    return bytes(blob)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corrupt_block_is_refused_deleted_and_computed_again(toys: Cluster, admin: Any, name: str) -> None:
    damage, reason = CORRUPTIONS[name]
    first = toys.verifier()
    client = Client(first, greedy())
    run_until(first, client, 70)
    first.die()
    blobs = stored_blobs(admin)
    assert len(blobs) == 3
    for blob in blobs:
        admin.set(blob, damage(bytearray(admin.get(blob))))
    second = toys.verifier()
    again = play_out(second, moved(client))
    assert again.output == alone(MAKERS["toy"], greedy())[0]
    assert second.count("refused", reason) == 1, "the first one ends the load"
    assert (second.count("loaded"), second.engine.counters["kv_restored_tokens"]) == (0, 0)
    second.die()
    third = toys.verifier()
    play_out(third, moved(client))
    assert third.count("loaded") == 1, "the first block is whole again; the second was still in the way"


def test_blocks_that_were_exchanged_are_refused(toys: Cluster, admin: Any) -> None:
    first = toys.verifier()
    client = play_out(first, greedy())
    first.die()
    names = stored_blobs(admin)
    values = admin.mget(names)
    for name, value in zip(names, values[1:] + values[:1], strict=True):
        admin.set(name, value)
    second = toys.verifier()
    assert play_out(second, greedy()).output == client.output
    assert second.count("refused", "key") == 1


def test_a_planted_mistake_in_a_restored_block_changes_the_text(toys: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without checks, one wrong bit shows."""
    first = toys.verifier()
    client = play_out(first, greedy())
    first.die()

    def careless(blob: bytes, _key: bytes, _identity: object) -> memoryview:
        data = memoryview(bytearray(blob))[HEADER_LEN:]
        data[len(data) // 2] ^= 1
        return data

    monkeypatch.setattr("outrider.tier.tier.unseal", careless)
    second = toys.verifier()
    assert play_out(second, greedy()).output != client.output


# --- limits -----------------------------------------------------------------------------------------------------------


def test_the_budget_holds_and_what_had_to_go_is_computed(toys: Cluster, admin: Any) -> None:
    blob_len = toys.verifier().tier.blocks.identity.blob_len
    first = toys.verifier(budget_bytes=2 * blob_len)
    client = play_out(first, greedy(max_tokens=250))
    first.die()
    assert len(stored_blobs(admin)) == 2
    assert first.count("evicted") == first.count("stored") - 2 > 0
    second = toys.verifier()
    assert play_out(second, greedy(max_tokens=250)).output == client.output


def test_stored_blocks_of_a_running_session_outlive_their_ttl_and_come_back_when_lost(
    toys: Cluster, admin: Any
) -> None:
    desk = toys.verifier(ttl_s=2.0)
    client = Client(desk, greedy(max_tokens=3))
    idle = Client(desk, greedy(session_id="idle", max_tokens=4000))
    desk.run([client])
    desk.until(lambda: len(stored_blobs(admin)) >= 2)
    end_s = time.monotonic() + 3.0
    while time.monotonic() < end_s and len(idle.output) < 1500:
        desk.step()
        time.sleep(0.005)
    first_keys = desk.runner.block_access.keys(PROMPT, [idle.opened().classes[0]] * 128)
    assert all(desk.tier.blocks._reader.get(first_keys[:2]))
    admin.flushall()
    desk.until(lambda: len(stored_blobs(admin)) >= 2)
    desk.post(CloseSession(idle.ticket, keep_kv=True))
    desk.settle()
    time.sleep(2.1)
    assert stored_blobs(admin) == []


def test_a_tier_that_is_slower_than_computing_is_not_used_but_for_a_probe(toys: Cluster) -> None:
    first = toys.verifier()
    play_out(first, greedy())
    first.die()
    second = toys.verifier(prefill_s=1e-7)
    second.tier.speeds.load_s = 1.0
    for name in ("a", "b", "c"):
        prompt = PROMPT if name == "a" else tuple((7 * at + ord(name)) % VOCAB for at in range(140))
        play_out(second, greedy(session_id=name, prompt=prompt))
    assert second.count("loaded") <= 1
    assert second.count("skipped", "slower") >= 2


# --- the server fails -------------------------------------------------------------------------------------------------


def test_a_tier_that_was_never_there_costs_nothing_but_a_count(toys: Cluster) -> None:
    desk = toys.verifier(url="unix:///nowhere/at/all.sock")
    twin = alone(MAKERS["toy"], greedy())[0]
    for at in range(5):
        assert play_out(desk, greedy(session_id=f"s{at}", prompt=(at, *PROMPT[1:]))).output
    assert play_out(desk, greedy()).output == twin
    desk.settle()
    assert desk.count("failures", "unreachable") >= 3
    assert desk.count("skipped", "breaker") > 0
    assert desk.count("dropped", "breaker") > 0
    assert desk.count("stored") == 0


async def test_a_frozen_server_delays_a_session_by_the_deadline_at_most_and_then_nobody(toys: Cluster) -> None:
    async with EmbeddedServer() as own:
        first = toys.verifier(url=own.url)
        client = play_out(first, greedy())
        first.die()
        second = toys.verifier(url=own.url, deadline_s=0.2)
        os.kill(own.pid, signal.SIGSTOP)
        waited = 0.0
        try:
            started_s = time.monotonic()
            for at in range(8):
                assert len(play_out(second, greedy(session_id=f"s{at}", prompt=(*PROMPT[:-1], at))).output) == 120
                waited = waited or time.monotonic() - started_s
            assert second.tier.blocks.in_flight_bytes <= second.tier.blocks.settings.in_flight_bytes
        finally:
            os.kill(own.pid, signal.SIGCONT)
        assert waited > 0.2, "the first one waited for the deadline"
        assert 1 <= second.count("skipped", "deadline") <= 3, "then the tier was known to be slow, or left alone"
        assert play_out(second, greedy(session_id="last")).output == client.output


def test_a_load_that_stops_in_the_middle_is_given_up_and_what_has_come_is_used(
    toys: Cluster, server: EmbeddedServer, tmp_path: Any
) -> None:
    first = toys.verifier()
    client = play_out(first, greedy(prompt=PROMPT * 3))
    first.die()
    twin = client.output
    blob_len = first.tier.blocks.identity.blob_len
    wire = Wire(server.url, str(tmp_path / "w"), freeze_after=int(2.5 * blob_len))
    second = toys.verifier(url=wire.url, deadline_s=1.5)
    second.tier.blocks._group = 1
    again = play_out(second, greedy(prompt=PROMPT * 3))
    assert again.output == twin
    assert second.count("skipped", "deadline") == 1
    assert second.engine.counters["kv_restored_tokens"] == 2 * BLOCK_LEN
    toys.close()
    wire.close()


async def test_a_server_without_memory_stores_nothing_and_nothing_waits_for_it(toys: Cluster) -> None:
    async with EmbeddedServer(arguments=("--maxmemory", "1")) as own:
        desk = toys.verifier(url=own.url)
        assert play_out(desk, greedy()).output == alone(MAKERS["toy"], greedy())[0]
        desk.die()
    assert desk.count("dropped", "full") > 0
    assert desk.count("stored") == 0


def test_blocks_that_wait_to_be_stored_are_bounded_by_bytes(
    toys: Cluster, tmp_path: Any, server: EmbeddedServer
) -> None:
    wire = Wire(server.url, str(tmp_path / "w"), freeze_after=0)
    blob_len = toys.verifier().tier.blocks.identity.blob_len
    desk = toys.verifier(url=wire.url, in_flight_bytes=3 * blob_len, deadline_s=0.3)
    desk.tier.speeds.load_s, desk.tier.speeds.prefill_s = 1.0, 0.0
    client = Client(desk, greedy(max_tokens=900))
    most = 0
    while not client.done:
        desk.step()
        most = max(most, int(desk.tier.blocks.in_flight_bytes))
    assert most == 3 * blob_len
    assert not client.errors
    toys.close()
    wire.close()
