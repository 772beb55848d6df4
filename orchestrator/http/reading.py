"""JSON of clients: what other readers would not take, and what cannot be told again, is refused as no JSON."""

import json
import re
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import Request, Response
from fastapi.routing import APIRoute

_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
"""Escapes of half a surrogate pair, which have no meaning by themselves."""


class JsonRequest(Request):
    """A request whose body is read strictly."""

    async def json(self) -> Any:
        """Return the body's value.

        Raises:
            json.JSONDecodeError: it is no JSON, or none that has a meaning everywhere.
        """
        if not hasattr(self, "_json"):
            self._json = read_json(await self.body())
        return self._json


class JsonRoute(APIRoute):
    """A route whose body is read strictly."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what answers requests."""
        answer = super().get_route_handler()

        async def handler(request: Request) -> Response:
            return await answer(JsonRequest(request.scope, request.receive))

        return handler


def read_json(body: bytes) -> Any:
    """Read JSON.

    Raises:
        json.JSONDecodeError: numbers that are none or have thousands of digits, text that is no Unicode, deep nesting.
    """
    try:
        value = json.loads(body, parse_constant=_no_constant)
        if _HALF.search(body):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise json.JSONDecodeError("nested too deep", "", 0) from None
    except ValueError as error:
        raise json.JSONDecodeError(str(error).partition(";")[0], "", 0) from None
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
