"""Errors in OpenAI's shape, and the table from Outrider's errors to HTTP statuses."""

import logging
import math
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from orchestrator.http.front import front_of
from orchestrator.http.invalid import invalid
from outrider.errors import (
    Code,
    HandedOver,
    InvalidRequest,
    LimitReached,
    NotFound,
    OutriderError,
    ResourceExhausted,
    StoreUnavailable,
    Unavailable,
    code_of,
)
from outrider.store.errors import SessionNotFound

log = logging.getLogger(__name__)

STATUSES: Mapping[Code, int] = {
    Code.CANCELLED: 409,
    Code.INVALID_ARGUMENT: 400,
    Code.DEADLINE_EXCEEDED: 504,
    Code.NOT_FOUND: 404,
    Code.PERMISSION_DENIED: 403,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.FAILED_PRECONDITION: 409,
    Code.ABORTED: 409,
    Code.INTERNAL: 500,
    Code.UNAVAILABLE: 503,
    Code.DATA_LOSS: 410,
    Code.UNAUTHENTICATED: 401,
}
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    410: "gone_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
"""OpenAI's `type` of a status; others are "server_error", or "invalid_request_error" below 500."""

CODES = {400: "bad_body", 404: "unknown_url", 405: "method_not_allowed", 408: "body_too_slow", 413: "body_too_large"}
"""OpenAI's `code` of errors that are HTTP's own."""

_UNAVAILABLE_RETRY_S = 1.0


def body_of(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return an error in OpenAI's shape."""
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def told(error: OutriderError) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Return status, body and headers of an error."""
    status = STATUSES[code_of(error)]
    message, param, code = error.message, None, error.reason.lower()
    if status >= 500 and code_of(error) is Code.INTERNAL:
        message = "the server failed; its log knows why"
    if isinstance(error, InvalidRequest):
        param = error.field
    if isinstance(error, NotFound):  # of what a client can ask for here, nothing else has a name
        param = "outrider.session_id" if isinstance(error, SessionNotFound) else "model"
    body = body_of(status, message, param, code)
    if isinstance(error, HandedOver):
        body["error"]["outrider"] = {"session_id": error.session_id, "next_position": error.next_position}
    return status, body, _headers(error)


def _headers(error: OutriderError) -> dict[str, str]:
    """Return what says when to try again, and which limit was reached."""
    if isinstance(error, Unavailable | StoreUnavailable):
        return {"retry-after": str(math.ceil(_UNAVAILABLE_RETRY_S))}
    if not isinstance(error, ResourceExhausted):
        return {}
    headers = {"retry-after": str(max(1, math.ceil(error.retry_delay_s)))}
    kind = {"requests_per_minute": "requests", "tokens_per_minute": "tokens", "tokens_per_day": "tokens"}
    if isinstance(error, LimitReached) and error.limit in kind:
        headers[f"x-ratelimit-remaining-{kind[error.limit]}"] = "0"
        headers[f"x-ratelimit-reset-{kind[error.limit]}"] = f"{error.retry_delay_s:g}s"
    return headers


def answer(error: OutriderError) -> JSONResponse:
    """Return the response that tells an error."""
    status, body, headers = told(error)
    return JSONResponse(body, status, headers)


def install(app: FastAPI) -> None:
    """Make an application tell all its errors in OpenAI's shape."""
    app.add_exception_handler(OutriderError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_defect)


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, OutriderError):
        raise error
    if code_of(error) is Code.INTERNAL:
        log.error("%s %s failed: %s", request.method, request.url.path, error)
    return answer(error)


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    """Tell the first field that is wrong, and count the call as refused."""
    if not isinstance(error, RequestValidationError):
        raise error
    found = invalid(error.errors(), request.headers.get("content-type", ""))
    desk = front_of(request).desk
    if desk is None:
        return answer(found)
    try:
        with desk.refusing():
            raise found
    except InvalidRequest:
        return answer(found)


async def _on_http(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, HTTPException):
        raise error
    status, headers, detail = error.status_code, dict(error.headers or {}), error.detail
    if status in (404, 405):
        # The page stands behind all routes, and knows nothing of methods.
        methods = _methods(request)
        if methods:
            status, headers["allow"], detail = 405, ", ".join(methods), "Method Not Allowed"
        detail = f"{detail}: {request.method} {request.url.path}"
    return JSONResponse(body_of(status, detail, None, CODES.get(status)), status, headers)


def _methods(request: Request) -> list[str]:
    """Return the methods that the path of a request has."""
    routes: list[Route] = request.app.state.routes
    there = (route for route in routes if route.matches(request.scope)[0] is not Match.NONE)
    return sorted({method for route in there for method in route.methods or ()})


async def _on_defect(request: Request, error: Exception) -> JSONResponse:
    """Keep a defect's text from the client; the server logs it, once."""
    return JSONResponse(body_of(500, "the server failed; its log knows why", None, "internal"), 500)
