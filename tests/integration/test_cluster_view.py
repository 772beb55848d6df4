"""GET /cluster and /cluster/events of a real cluster: what they show, to whom, and how many may watch."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestrator.http.live import MAX_WATCHERS
from outrider.keys import KeyLimits, make_key, write_record
from tests.integration.announced_bench import Gateway, gateway
from tests.integration.cluster_bench import until

SECRET = "the cat sat on the mat"


def chat(**fields: Any) -> dict[str, Any]:
    """Return the body of a chat."""
    return {"messages": [{"role": "user", "content": SECRET}], "max_completion_tokens": 40, "temperature": 0, **fields}


@pytest.fixture(scope="module")
async def shared() -> AsyncIterator[Gateway]:
    async with gateway() as made:
        yield made


@pytest.fixture
async def http(shared: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=shared.url, timeout=60) as made:
        yield made


async def first(client: httpx.AsyncClient, count: int = 1, **options: Any) -> list[dict[str, Any]]:
    """Return the first events of a stream."""
    found: list[dict[str, Any]] = []
    async with client.stream("GET", "cluster/events", **options) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-store"
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line.removeprefix("data: ")))
            if len(found) == count:
                break
    return found


async def opens(client: httpx.AsyncClient) -> bool:
    """Whether there is room for a stream."""
    async with client.stream("GET", "cluster/events") as response:
        return response.status_code == 200


# --- what is shown ----------------------------------------------------------------------------------------------------


async def test_workers_and_what_ran_are_shown_and_no_word_of_it(shared: Gateway, http: httpx.AsyncClient) -> None:
    answered = (await http.post("v1/chat/completions", json=chat())).json()
    response = await http.get("cluster")
    found = response.json()
    roles = {worker["role"]: worker for worker in found["workers"]}
    assert roles.keys() == {"verify", "draft", "orchestrate"}
    assert roles["draft"]["drafters"] == ["toy"]
    assert found["timelines"][0]["session"] == answered["outrider"]["session_id"]
    assert sum(each["tokens"] for each in found["timelines"][0]["rounds"]) == 40
    assert all(each["verify_ms"] is not None for each in found["timelines"][0]["rounds"])
    tested = sum(each["tested"] for drafter in found["acceptance"] for each in drafter["positions"])
    assert tested > 0
    for hidden in (SECRET, answered["choices"][0]["message"]["content"], shared.verifier.address):
        assert hidden not in response.text
        assert json.dumps(hidden) not in response.text


async def test_a_stream_tells_the_same_again_and_again(shared: Gateway, http: httpx.AsyncClient) -> None:
    events = await first(http, 2)
    once = (await http.get("cluster")).json()
    assert [each.keys() for each in events] == [once.keys(), once.keys()]
    assert events[0]["workers"] == once["workers"]


async def test_a_session_is_shown_while_it_runs_and_its_rounds_afterwards() -> None:
    async with gateway(delay_s=0.03) as made, httpx.AsyncClient(base_url=made.url, timeout=60) as client:
        async with client.stream("POST", "v1/chat/completions", json=chat(stream=True, max_completion_tokens=400)) as s:
            async for line in s.aiter_lines():
                if '"content":' in line and '"content":""' not in line:
                    break
            (session,) = (await client.get("cluster")).json()["sessions"]
            assert session["tokens"] > 0
            assert session["verifier"] == made.verifier.worker_id
        await until(lambda: made.num_sessions == 0)
        after = (await client.get("cluster")).json()
        assert after["sessions"] == []
        assert [(each["session"], each["running"]) for each in after["timelines"]] == [(session["id"], False)]


# --- to whom ----------------------------------------------------------------------------------------------------------


async def test_with_keys_a_stranger_sees_nothing_and_each_key_its_own_sessions(tmp_path: Path) -> None:
    made_keys = [make_key(name, KeyLimits(), time.time()) for name in ("one", "two")]
    file = tmp_path / "keys"
    file.write_bytes(b"\n".join(write_record(record) for _, record in made_keys) + b"\n")
    headers = [{"authorization": f"Bearer {key}"} for key, _ in made_keys]
    async with (
        gateway(require_keys=True, key_file=str(file), key_cache_s=0) as made,
        httpx.AsyncClient(base_url=made.url, timeout=60) as client,
    ):
        for path in ("cluster", "cluster/events"):
            refused = await client.get(path)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "unauthenticated"
        answer = await client.post("v1/chat/completions", json=chat(), headers=headers[0])
        session = answer.json()["outrider"]["session_id"]
        mine, hers = [(await client.get("cluster", headers=each)).json() for each in headers]
        assert [each["session"] for each in mine["timelines"]] == [session]
        assert hers["timelines"] == []
        (event,) = await first(client, headers=headers[1])
        assert session not in json.dumps(event)
        async with client.stream("GET", "cluster/events", headers=headers[1]) as response:
            file.write_bytes(write_record(made_keys[0][1]) + b"\n")
            lines = [line async for line in response.aiter_lines() if line]
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "unauthenticated"


# --- how many, and how long -------------------------------------------------------------------------------------------


async def test_so_many_may_watch_and_no_more_until_one_leaves(shared: Gateway, http: httpx.AsyncClient) -> None:
    limits = httpx.Limits(max_connections=MAX_WATCHERS + 8)
    async with httpx.AsyncClient(base_url=shared.url, timeout=60, limits=limits) as client, AsyncExitStack() as exits:
        opened = [await exits.enter_async_context(client.stream("GET", "cluster/events")) for _ in range(MAX_WATCHERS)]
        assert all(each.status_code == 200 for each in opened)
        refused = await client.get("cluster/events")
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) > 0
        assert (await client.get("cluster")).status_code == 200
    async with asyncio.timeout(60):
        while not await opens(http):  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.1)


async def test_a_stream_ends_when_the_orchestrator_stops() -> None:
    async with gateway() as made, httpx.AsyncClient(base_url=made.url, timeout=60) as client:
        async with client.stream("GET", "cluster/events") as response:
            lines = response.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            await made.app.drain()
            async for _ in lines:
                pass
