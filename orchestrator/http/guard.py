"""What stands before the application: names for requests, limits of bodies, headers for browsers.

It is plain ASGI, so that it costs a streamed chunk next to nothing.
"""

import asyncio
import contextlib
import re
import secrets
from collections.abc import Iterable

from prometheus_client import Counter
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.http.errors import body_of
from orchestrator.http.limits import HttpLimits
from outrider.telemetry import log_ids
from outrider.tracing import arriving

REQUEST_ID = "x-request-id"
POLICY = "; ".join((
    "default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self'", "connect-src 'self'",
    "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'", "require-trusted-types-for 'script'",
    "trusted-types 'none'",
))  # fmt: skip
"""Content security policy: a page from here loads nothing from elsewhere, and runs no script that is written in it; no
text may become markup, whatever a script does with it."""
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}

CLOSE = {"connection": "close"}
DISCARD_S = 2.0
DISCARD_TIMES = 4
"""How much more than allowed is read of a body that is too large, before the connection is closed."""

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/cluster", "/health", "/metrics")


class Guard:
    """Lets requests through to an application; see the module's head."""

    def __init__(self, app: ASGIApp, limits: HttpLimits, responses: Counter) -> None:
        """Keep the application.

        Args:
            app: what answers.
            limits: of bodies and times.
            responses: counts responses by route and status.
        """
        self._app, self._limits, self._responses = app, limits, responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        name = headers.get(REQUEST_ID, "")
        request_id = name if _NAME.fullmatch(name) else f"req_{secrets.token_hex(12)}"
        exchange = _Exchange(receive, send, self._limits, request_id)
        arriving(headers.items())
        try:
            with log_ids(request=request_id):
                await self._answer(scope, headers, exchange)
        finally:  # a defect is answered, and then raised for the server to log
            self._responses.labels(_route(scope["path"]), str(exchange.status or 499)).inc()

    async def _answer(self, scope: Scope, headers: Headers, exchange: "_Exchange") -> None:
        announced = headers.get("content-length", "0")
        if announced.isascii() and announced.isdecimal() and int(announced[:20]) > self._limits.max_body_bytes:
            body = body_of(413, exchange.too_large, None, "body_too_large")
            await JSONResponse(body, 413, CLOSE)(scope, exchange.receive, exchange.send)
            return
        await self._app(scope, exchange.receive, exchange.send)


class _Exchange:
    """Both directions of one request."""

    def __init__(self, receive: Receive, send: Send, limits: HttpLimits, request_id: str) -> None:
        self._receive, self._send, self._limits, self._request_id = receive, send, limits, request_id
        self._num_bytes = 0
        self._whole = False
        self._deadline_s = asyncio.get_running_loop().time() + limits.read_timeout_s
        self.too_large = f"the body has more than {limits.max_body_bytes} bytes"
        self.status = 0
        """Of the response; 0 as long as there is none."""

    async def receive(self) -> Message:
        """Pass on what the client sends; raises where the body is too large or too slow."""
        if self._whole:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline_s):
                message = await self._receive()
        except TimeoutError:
            text = f"the body did not arrive within {self._limits.read_timeout_s:g} s"
            raise HTTPException(408, text, CLOSE) from None
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._limits.max_body_bytes:
            raise HTTPException(413, self.too_large, CLOSE)
        self._whole = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        """Pass on what the client is told; waits while it does not read."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self.status == 413:
                await self._discard()
            headers = MutableHeaders(raw=list(message.get("headers", ())))
            headers[REQUEST_ID] = self._request_id
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
            message = {**message, "headers": headers.raw}
        await self._send(message)

    async def _discard(self) -> None:
        """Read on for a while: a client that is cut off while it sends may never see the answer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_S):
                while self._num_bytes <= DISCARD_TIMES * self._limits.max_body_bytes:
                    message = await self._receive()
                    self._num_bytes += len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return


def cors_headers() -> Iterable[str]:
    """Return the headers of responses that pages of other origins may read."""
    return (REQUEST_ID, "retry-after", "x-ratelimit-limit-requests", "x-ratelimit-limit-tokens",
            "x-ratelimit-remaining-requests", "x-ratelimit-remaining-tokens")  # fmt: skip


def _route(path: str) -> str:
    """Return what a path is counted under: a few names, whatever strangers ask for."""
    return next((route for route in _ROUTES if path == route or path.startswith(f"{route}/")), "other")
