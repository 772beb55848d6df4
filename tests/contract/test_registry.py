"""The registry's contract, on every server it may run on."""

import asyncio
import logging
import os
import signal
from dataclasses import replace
from typing import Any

import pytest

from outrider.errors import InvalidRequest
from outrider.ids import WorkerId
from outrider.messages import Vocabulary, WorkerDescription
from outrider.store.connect import StoreClient, open_client
from outrider.store.embedded import EmbeddedServer
from outrider.store.registry import Registry, keep_announced

WORKER = WorkerDescription(
    worker_id=WorkerId("v1"),
    role="verify",
    address="unix:/run/v1.sock",
    model="toy",
    vocabulary=Vocabulary("ab" * 32, 100),
    context_len=64,
    capacity=8,
    load=3,
    attributes={"zone": "a"},
)
DRAFTER = replace(WORKER, worker_id=WorkerId("d1"), role="draft", drafter="ngram")


def registry_keys(registry: Registry, role: str) -> list[str]:
    return [f"{registry._prefix}:workers:{{{role}}}:{part}" for part in ("index", "descriptions")]


async def test_announced_workers_are_found_under_their_role_in_order_of_id(registry: Registry) -> None:
    other = replace(WORKER, worker_id=WorkerId("a0"))
    for worker in (WORKER, DRAFTER, other):
        await registry.announce(worker, 60.0)
    assert await registry.workers("verify") == [other, WORKER]
    assert await registry.workers("draft") == [DRAFTER]
    assert await registry.workers("orchestrate") == []


async def test_an_announcement_replaces_the_one_before(registry: Registry) -> None:
    await registry.announce(WORKER, 60.0)
    await registry.announce(replace(WORKER, load=7, draining=True), 60.0)
    (found,) = await registry.workers("verify")
    assert (found.load, found.draining) == (7, True)


async def test_a_worker_that_falls_silent_is_gone_and_its_neighbour_stays(registry: Registry) -> None:
    await registry.announce(WORKER, 0.1)
    await registry.announce(replace(WORKER, worker_id=WorkerId("v2")), 60.0)
    await asyncio.sleep(0.15)
    assert [worker.worker_id for worker in await registry.workers("verify")] == ["v2"]


async def test_what_expired_is_removed_from_the_keys_and_the_keys_expire_too(
    client: StoreClient, registry: Registry
) -> None:
    raw: Any = client
    index, descriptions = registry_keys(registry, "verify")
    await registry.announce(WORKER, 0.05)
    await registry.announce(replace(WORKER, worker_id=WorkerId("v2")), 1.5)
    await asyncio.sleep(0.1)
    assert (await raw.zcard(index), await raw.hlen(descriptions)) == (2, 2)
    await registry.announce(replace(WORKER, worker_id=WorkerId("v2")), 1.5)
    assert (await raw.zcard(index), await raw.hlen(descriptions)) == (1, 1)
    async with asyncio.timeout(60):
        while (await raw.exists(index), await raw.exists(descriptions)) != (0, 0):  # noqa: ASYNC110  (the other end is a server)
            await asyncio.sleep(0.05)


async def test_a_withdrawn_worker_is_gone_at_once_and_withdrawing_again_is_harmless(registry: Registry) -> None:
    await registry.announce(WORKER, 60.0)
    await registry.announce(DRAFTER, 60.0)
    assert await registry.withdraw(WORKER.worker_id)
    assert not await registry.withdraw(WORKER.worker_id)
    assert await registry.workers("verify") == []
    assert await registry.workers("draft") == [DRAFTER]


async def test_an_unknown_role_or_a_time_to_live_of_zero_is_refused(registry: Registry) -> None:
    with pytest.raises(InvalidRequest, match="role"):
        await registry.announce(replace(WORKER, role="cook"), 60.0)
    with pytest.raises(InvalidRequest, match="role"):
        await registry.workers("cook")
    with pytest.raises(ValueError, match="ttl_s"):
        await registry.announce(WORKER, 0.0)


async def test_fields_of_a_later_version_are_ignored_and_an_unreadable_worker_is_left_out_and_logged_once(
    client: StoreClient, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    raw: Any = client
    _, descriptions = registry_keys(registry, "verify")
    for name in ("v1", "v2", "v3"):
        await registry.announce(replace(WORKER, worker_id=WorkerId(name)), 60.0)
    stored = (await raw.hget(descriptions, "v1")).replace(b'"role"', b'"colour":"red","role"')
    await raw.hset(descriptions, mapping={"v1": stored, "v2": b'{"worker_id":"v2"}', "v3": b"[]"})
    for _ in range(2):
        assert await registry.workers("verify") == [WORKER]
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == ["v2", "v3"]


async def known(registry: Registry, least_load: int) -> WorkerDescription:
    """Wait until the worker is known with so much load at least."""
    async with asyncio.timeout(60):
        while True:
            found = await registry.workers("verify")
            if found and found[0].load >= least_load:
                return found[0]
            await asyncio.sleep(0.01)


async def test_the_heartbeat_keeps_a_worker_known_with_its_present_load(registry: Registry) -> None:
    """Each beat has one more load, so that a load of four is seen when the first announcement has run out."""
    loads = iter(range(1000))
    heartbeat = asyncio.create_task(keep_announced(registry, lambda: replace(WORKER, load=next(loads)), 0.3))
    try:
        await known(registry, 0)
        later = await known(registry, 4)
        assert replace(later, load=WORKER.load) == WORKER
    finally:
        heartbeat.cancel()
    with pytest.raises(asyncio.CancelledError):
        await heartbeat


def levels(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the levels of what the registry has said: others may speak, too."""
    return [record.levelname for record in caplog.records if record.name == "outrider.store.registry"]


async def lines(caplog: pytest.LogCaptureFixture, count: int) -> None:
    """Wait until the registry has said so much."""
    async with asyncio.timeout(60):
        while len(levels(caplog)) < count:  # noqa: ASYNC110  (nothing announces a line)
            await asyncio.sleep(0.01)


async def test_the_heartbeat_outlives_an_outage_and_logs_its_begin_and_end_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="outrider.store.registry")
    async with EmbeddedServer() as server:
        client = open_client(server.url, timeout_s=0.4)
        registry = Registry(client, deadline_s=0.6)
        heartbeat = asyncio.create_task(keep_announced(registry, lambda: WORKER, 0.3))
        assert await known(registry, 0) == WORKER
        os.kill(server.pid, signal.SIGSTOP)
        await lines(caplog, 1)
        await asyncio.sleep(1.5)  # two tries more
        assert levels(caplog) == ["WARNING"]
        os.kill(server.pid, signal.SIGCONT)
        await lines(caplog, 2)
        assert levels(caplog) == ["WARNING", "INFO"]
        assert await known(registry, 0) == WORKER
        heartbeat.cancel()
        with pytest.raises(asyncio.CancelledError):
            await heartbeat
        await client.aclose()


async def test_an_error_that_is_no_outage_ends_the_heartbeat_and_reaches_the_caller(registry: Registry) -> None:
    with pytest.raises(InvalidRequest):
        await keep_announced(registry, lambda: replace(WORKER, role="cook"), 1.0)


async def test_a_heartbeat_ends_in_whichever_moment_it_is_cancelled(store_url: str) -> None:
    """Also in the one in which a write to the store has just been done."""
    for moment in range(60):
        client = open_client(store_url)
        beating = asyncio.create_task(keep_announced(Registry(client), lambda: WORKER, 60.0))
        for _ in range(moment):
            await asyncio.sleep(0)
        beating.cancel()
        done, _ = await asyncio.wait({beating}, timeout=60)
        assert done, f"cancelled after {moment} turns of the loop, it went on"
        await client.aclose()
