"""What every HTTP request is answered with, and the dependencies by which routes reach it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CollectorRegistry

from orchestrator.access import Caller
from orchestrator.servicer import Desk
from outrider.errors import Unavailable

KIB = 1 << 10


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What a client may ask of the HTTP server itself."""

    max_body_bytes: int = 8 << 20
    """Largest body of a request."""
    max_head_bytes: int = 32 * KIB
    """Largest request line and headers together."""
    max_connections: int = 4096
    """Connections at once; more are closed unheard."""
    read_timeout_s: float = 20.0
    """How long a request's head may take to arrive, and its body."""
    keep_alive_s: float = 75.0
    """How long a connection may wait for its next request."""
    stall_timeout_s: float = 120.0
    """How long a client may refuse to read, before its connection is closed."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages browsers let call this server; "*": all of them."""


@dataclass(slots=True)
class Front:
    """What routes work with; `desk` is set once requests are taken."""

    registry: CollectorRegistry
    """What /metrics shows."""
    why_not: Callable[[], str]
    """Says why requests cannot be served now; empty: they can."""
    limits: HttpLimits = HttpLimits()
    desk: Desk | None = None

    @property
    def open_desk(self) -> Desk:
        """The desk.

        Raises:
            Unavailable: it is not open yet.
        """
        if self.desk is None:
            raise Unavailable("the orchestrator is starting")
        return self.desk


_bearer = HTTPBearer(auto_error=False, description="An API key, where keys are required.")


def front_of(request: Request) -> Front:
    """Return what the application works with."""
    front: Front = request.app.state.front
    return front


async def calling(
    request: Request, _: Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)] = None
) -> Caller:
    """Return who calls, by the same keys as over gRPC.

    Raises:
        Unauthenticated: no key, or one that is not valid.
        Unavailable: the orchestrator is starting.
    """
    return await front_of(request).open_desk.access.caller(request.headers.items())


async def asking(request: Request, caller: Annotated[Caller, Depends(calling)]) -> Caller:
    """Return who calls, and count a call that generates nothing.

    Raises:
        LimitReached: too many.
    """
    await front_of(request).open_desk.quotas.request(caller)
    return caller


FrontHere = Annotated[Front, Depends(front_of)]
"""Parameter of a route: what it works with."""
Calling = Annotated[Caller, Depends(calling)]
"""Parameter of a route that generates: who calls."""
Asking = Annotated[Caller, Depends(asking)]
"""Parameter of a route that generates nothing: who calls, counted against their limits."""
