"""Who is let in while the store is there, away, and away for long; and by a file of keys."""

import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter

from orchestrator.access import ANYBODY, ASK, Access, Caller
from orchestrator.key_file import KeyFile
from outrider.errors import InvalidRequest, StoreUnavailable, Unauthenticated
from outrider.keys import KeyLimits, make_key, write_record
from outrider.redaction import redacted
from outrider.store.connect import open_client
from outrider.store.embedded import EmbeddedServer
from outrider.store.keys import KeyStore


def show(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


@pytest.fixture
def refused() -> Counter:
    return Counter("refused", "Refused", ["reason"], registry=CollectorRegistry())


async def test_without_sources_everybody_is_let_in(refused: Counter) -> None:
    assert await Access((), refused).caller(()) is ANYBODY


async def test_a_refusal_is_counted(refused: Counter, tmp_path: Path) -> None:
    access = Access([KeyFile(tmp_path / "keys")], refused)
    (tmp_path / "keys").touch()
    for _ in range(2):
        with pytest.raises(Unauthenticated):
            await access.caller(())
    assert refused.labels("unauthenticated")._value.get() == 2


# --- the store is away ----------------------------------------------------------------------------------------------


async def test_a_key_used_lately_goes_on_while_the_store_is_away_and_no_other_is_let_in(
    refused: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr("orchestrator.access.time", SimpleNamespace(monotonic=lambda: now_s, time=time.time))
    async with EmbeddedServer() as server:
        client = open_client(server.url, timeout_s=0.5)
        keys = KeyStore(client, deadline_s=0.5)
        (used, first), (unused, second) = (make_key(name, KeyLimits(), 1.0) for name in ("used", "unused"))
        await keys.create(first)
        await keys.create(second)
        access = Access([keys], refused, cache_s=0.0, grace_s=1.5)
        caller = await access.caller(show(used))
        await server.stop()
        now_s += 1.4
        assert await access.caller(show(used)) == caller
        with pytest.raises(StoreUnavailable):
            await access.caller(show(unused))
        with pytest.raises(Unauthenticated):  # known by its id, yet not the key
            await access.caller(show(used[:-43] + "A" * 43))
        now_s += 0.2
        with pytest.raises(StoreUnavailable):
            await access.caller(show(used))
        await client.aclose()


async def test_a_generation_under_way_is_not_ended_by_an_outage(refused: Counter) -> None:
    async with EmbeddedServer() as server:
        client = open_client(server.url, timeout_s=0.5)
        keys = KeyStore(client, deadline_s=0.5)
        key, record = make_key("one", KeyLimits(), 1.0)
        await keys.create(record)
        access = Access([keys], refused, cache_s=0.0, grace_s=0.0)
        caller = await access.caller(show(key))
        await server.stop()
        assert [event async for event in access.watched(caller, numbers())] == [0, 1, 2]
        await client.aclose()


async def numbers() -> AsyncIterator[int]:
    for number in range(3):
        yield number


async def test_a_key_whose_record_became_anothers_ends_what_runs(refused: Counter, valkey_url: str) -> None:
    client = open_client(valkey_url)
    key, record = make_key("one", KeyLimits(), 1.0)
    keys = KeyStore(client, prefix=f"test-{record.key_id}")
    await keys.create(record)
    access = Access([keys], refused, cache_s=0.0)
    caller = await access.caller(show(key))
    assert caller == Caller(record.key_id, KeyLimits(), record.sha256)
    with pytest.raises(Unauthenticated):
        await anext(access.watched(Caller(caller.key_id, caller.limits, "0" * 64), numbers()))
    await client.aclose()


# --- a file ---------------------------------------------------------------------------------------------------------


async def test_a_file_is_read_again_when_it_has_changed_and_one_that_cannot_be_read_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("orchestrator.key_file.LOOK_S", 0.0)
    path = tmp_path / "keys"
    (_, one), (_, two) = (make_key(name, KeyLimits(), 1.0) for name in ("one", "two"))
    path.write_bytes(write_record(one))
    keys = KeyFile(path)
    await keys.load()
    assert await keys.find(one.key_id) == one
    replaced = tmp_path / "new"
    replaced.write_bytes(b"# mounted secrets are replaced whole\n" + write_record(two) + b"\n")
    replaced.rename(path)
    assert await keys.find(one.key_id) is None
    assert await keys.find(two.key_id) == two
    path.write_bytes(b"{")
    with caplog.at_level(logging.WARNING):
        assert await keys.find(two.key_id) == two
    assert "keys:1" in caplog.text
    path.unlink()
    assert await keys.find(two.key_id) == two


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"nonsense\n", "keys:1"),
        (b"\xff\n", "can be read"),
        (b"\n# x\n{}\n", "keys:3.key_id"),
        (write_record(make_key("a", KeyLimits(), 1.0)[1]).join([b"", b"\n"]) * 2, "keys:2.key_id"),
        (None, "can be read"),
    ],
)
async def test_a_file_that_cannot_be_used_is_refused_at_the_start_naming_the_line(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidRequest, match=words):
        await KeyFile(path).load()


def test_what_a_caller_without_a_key_is_told_survives_redaction() -> None:
    assert redacted(ASK) == ASK
