"""What holds of all scripts of sessions and registry: old servers know their commands, and no key stays for ever."""

import re
from collections.abc import Coroutine
from importlib.resources import files
from pathlib import Path
from typing import Any

from outrider.ids import SessionId, TokenClass, WorkerId
from outrider.messages import Vocabulary, WorkerDescription
from outrider.store.connect import open_client
from outrider.store.embedded import EmbeddedServer
from outrider.store.records import KvLocation, LogSlice
from outrider.store.registry import Registry
from outrider.store.sessions import SessionStore
from tests.contract.servers import REDIS, command, program
from tests.contract.writer import PROMPT, PROMPT_CLASSES, STATE

CALL = re.compile(r"redis\.p?call\('([A-Za-z]+)'")
OLDEST = (6, 2, 0)


def scripts() -> dict[str, str]:
    """Return all scripts by name."""
    folder = files("outrider.store.scripts")
    return {path.name: path.read_text("utf-8") for path in folder.iterdir() if path.name.endswith(".lua")}


@REDIS
async def test_every_command_in_a_script_is_as_old_as_redis_6_2() -> None:
    used = sorted({name.lower() for text in scripts().values() for name in CALL.findall(text)})
    assert "append" in used
    async with EmbeddedServer(program=program("redis")) as server:
        for name in (*used, "lmpop"):
            # Asked by a script: the client has another way to read the reply of COMMAND.
            ask = "return redis.call('COMMAND', 'DOCS', ARGV[1])"
            answer: Any = await command(server.url, "EVAL", ask, 0, name)
            facts = dict(zip(answer[1][::2], answer[1][1::2], strict=True))
            since = tuple(map(int, facts[b"since"].split(b".")))
            assert (since <= OLDEST) == (name != "lmpop"), f"{name} exists since {since}"


async def test_every_key_of_sessions_and_registry_has_a_time_to_live(tmp_path: Path) -> None:
    """After each step, so that no script forgets one; 60 s here, and in the registry what each entry asks for."""
    async with EmbeddedServer(tmp_path / "data") as server:
        client = open_client(server.url)
        untyped: Any = client
        store, registry, session_id = SessionStore(client, session_ttl_s=60.0), Registry(client), SessionId("s")
        lease = await store.create(session_id, STATE, PROMPT, PROMPT_CLASSES, "one", 10.0)
        mirror = LogSlice(0, (*PROMPT, 1), (*PROMPT_CLASSES, TokenClass.DECODE), 4, b"\x00\x00\x00\x01")
        worker = WorkerDescription(WorkerId("v1"), "verify", "unix:/v1", "toy", Vocabulary("ab" * 32, 100), 64)
        steps: tuple[Coroutine[Any, Any, object], ...] = (
            store.append(session_id, lease.fence, 3, [1], [TokenClass.DECODE], b"\x01"),
            store.put_kv_location(session_id, lease.fence, KvLocation(WorkerId("v1"), 3)),
            store.update_state(session_id, lease.fence, seed=1),
            store.begin_turn(session_id, lease.fence, 4, [], [], STATE),
            store.renew_lease(session_id, lease.fence, 10.0),
            store.release_lease(session_id, lease.fence),
            store.restore(session_id, lease, STATE, mirror, 10.0),
            store.acquire_lease(session_id, "two", 10.0, force=True),
            registry.announce(worker, 30.0),
            store.delete(session_id),
            store.restore(SessionId("lost"), lease, STATE, mirror, 10.0),
        )
        for number, step in enumerate(steps):
            await step
            ttls = {key: await untyped.pttl(key) async for key in untyped.scan_iter()}
            assert ttls
            assert all(0 < ttl <= 60_000 for ttl in ttls.values()), f"after step {number}: {ttls}"
        await client.aclose()
