"""What stands before the HTTP application: it counts every response, and binds browsers."""

import asyncio
from typing import NoReturn

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from orchestrator.http.app import make_app
from orchestrator.http.front import Front
from orchestrator.http.guard import Guard
from orchestrator.http.limits import HttpLimits
from orchestrator.metrics import Metrics


def counted(metrics: Metrics, route: str, status: str) -> float:
    labels = {"route": route, "status": status}
    return metrics.registry.get_sample_value("outrider_http_responses_total", labels) or 0.0


@pytest.mark.parametrize("path", ["/", "/main.js", "/health", "/v1/models", "/nothing"])
async def test_every_response_keeps_a_browser_from_loading_or_running_anything_else(path: str) -> None:
    metrics = Metrics()
    guarded = Guard(make_app(Front(metrics, lambda: "")), HttpLimits(), metrics.http_responses)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(guarded), base_url="http://here") as http:
        headers = (await http.get(path)).headers
    policy = headers["content-security-policy"].split("; ")
    assert {"default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"} <= set(policy)
    assert "require-trusted-types-for 'script'" in policy
    assert not [part for part in policy if "unsafe" in part or ":" in part], "nothing from elsewhere"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", "POST"),
        ("DELETE", "/v1/chat/completions", "POST"),
        ("POST", "/v1/models", "GET"),
        ("POST", "/v1/models/one", "GET"),
        ("POST", "/openapi.json", "GET, HEAD"),
        ("POST", "/", "GET, HEAD"),
        ("PUT", "/main.js", "GET, HEAD"),
        ("GET", "/v1/embeddings", ""),
        ("POST", "/v1/embeddings", ""),
        ("POST", "/nope", ""),
        ("DELETE", "/v1/completions/one", ""),
        ("PATCH", "/main.js/nope", ""),
    ],
)
async def test_an_unknown_url_is_404_and_a_known_one_asked_wrongly_405_that_names_the_methods(
    method: str, path: str, allowed: str
) -> None:
    transport = httpx.ASGITransport(make_app(Front(Metrics(), lambda: "")))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
        answer = await http.request(method, path)
    status, code, kind = (405, "method_not_allowed", "invalid_request_error") if allowed else (
        404, "unknown_url", "not_found_error",
    )  # fmt: skip
    assert (answer.status_code, answer.headers.get("allow", "")) == (status, allowed)
    error = answer.json()["error"]
    assert (error["code"], error["type"], error["param"]) == (code, kind, None)
    assert path.rpartition("/")[2] in error["message"]


async def test_a_response_to_a_defect_is_counted_too() -> None:
    metrics = Metrics()

    def broken() -> NoReturn:
        raise RuntimeError("a defect")

    guarded = Guard(make_app(Front(metrics, broken)), HttpLimits(), metrics.http_responses)
    transport = httpx.ASGITransport(guarded, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
        answer = await http.get("/health")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")
    assert counted(metrics, "/health", "500") == 1


async def test_a_response_that_is_cut_off_counts_as_one_that_was_not_waited_for() -> None:
    metrics, begun = Metrics(), asyncio.Event()

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        await asyncio.Event().wait()

    guarded = Guard(endless, HttpLimits(), metrics.http_responses)
    scope: Scope = {"type": "http", "path": "/v1/completions", "headers": []}

    async def nothing() -> NoReturn:
        raise AssertionError("nobody reads or writes")

    answering = asyncio.create_task(guarded(scope, nothing, lambda _: nothing()))
    await begun.wait()
    answering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answering
    assert counted(metrics, "/v1/completions", "499") == 1
