"""What the HTTP door says of requests that it, or the sessions behind it, refuse: by the names the client used."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.integration.cluster_bench import Bench, until
from tests.integration.http_door import Door, door


@pytest.fixture(scope="module")
async def shared(valkey_url: str) -> AsyncIterator[Door]:
    """A cluster that no test harms."""
    async with Bench(valkey_url) as bench, door(bench, drafts=False) as opened:
        yield opened


async def test_a_body_sent_as_a_form_is_told_which_content_type_is_meant(shared: Door) -> None:
    for headers in ({"content-type": "application/x-www-form-urlencoded"}, {}):
        response = await shared.http.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "content-type"
        assert error["message"].endswith("expected application/json")


async def test_the_schema_speaks_to_clients_and_has_no_further_fields_of_messages(shared: Door) -> None:
    schema: Any = (await shared.http.get("/openapi.json")).json()
    assert schema["info"]["description"].startswith("OpenAI's API")
    assert schema["components"]["schemas"]["Message"]["additionalProperties"] is False


LATE: dict[str, tuple[dict[str, Any], int, str]] = {
    "a schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}}, 400,
        "response_format",
    ),
    "a regular expression": ({"guided_regex": "("}, 400, "guided_regex"),
    "too long": ({"messages": [{"role": "user", "content": "x" * 9000}]}, 400, "messages"),
    "a model": ({"model": "gpt-4"}, 404, "model"),
    "a session": ({"outrider": {"session_id": "nobody"}}, 404, "outrider.session_id"),
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", LATE)
async def test_what_the_sessions_refuse_has_the_name_under_which_it_was_sent(
    shared: Door, name: str, stream: bool
) -> None:
    given, status, param = LATE[name]
    body = {"messages": [{"role": "user", "content": "x"}], "stream": stream, **given}
    response = await shared.ask("/v1/chat/completions", **body)
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param, response.text


async def test_an_id_that_no_token_has_is_refused_also_where_its_text_is_to_be_told(shared: Door) -> None:
    response = await shared.ask("/v1/completions", prompt=[5, 609148033], echo=True)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith("prompt"), response.text
    assert "609148033" in response.json()["error"]["message"]


async def test_where_no_place_comes_free_in_time_a_client_is_told_when_to_try_again(valkey_url: str) -> None:
    async with (
        Bench(valkey_url) as bench,
        door(bench, drafts=False, verifier={"toy_delay_s": 0.01}, max_sessions=1, max_waiting=1) as opened,
    ):
        sessions = opened.app.sessions
        assert sessions is not None
        known: dict[str, Any] = {"prompt": "the cat ", "ignore_eos": True}
        held = asyncio.create_task(opened.ask(**known, max_tokens=3900))
        await until(lambda: len(sessions) == 1)
        for stream in (False, True):
            late = await opened.ask(**known, stream=stream, max_tokens=2, outrider={"max_wait_s": 0.1})
            assert late.status_code == 429, late.text
            assert int(late.headers["retry-after"]) >= 1
            assert late.json()["error"]["type"] == "rate_limit_error"
        waiting = asyncio.create_task(opened.ask(**known, max_tokens=2))
        value = opened.app.metrics.registry.get_sample_value
        await until(lambda: value("outrider_num_requests_waiting") == 1)
        behind = await opened.ask(**known, max_tokens=2, priority=1)
        assert behind.status_code == 429, "the line is full, and who is further behind goes"
        assert int(behind.headers["retry-after"]) >= 1
        first = asyncio.create_task(opened.ask(**known, max_tokens=2, priority=-8))
        assert (await waiting).status_code == 429, "who goes first pushes the last one out"
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)
        assert (await first).status_code == 200
