"""What every HTTP request is answered with, and the dependencies by which routes reach it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from orchestrator.access import Caller
from orchestrator.http.limits import HttpLimits
from orchestrator.http.served import Served
from orchestrator.metrics import Metrics
from orchestrator.servicer import Desk
from outrider.errors import Unavailable
from outrider.tracing import arriving


@dataclass(slots=True)
class Front:
    """What routes work with; `desk` is set once requests are taken."""

    metrics: Metrics
    """Of the process: what /metrics shows."""
    why_not: Callable[[], str]
    """Says why requests cannot be served now; empty: they can."""
    limits: HttpLimits = field(default_factory=HttpLimits)
    desk: Desk | None = None
    known: Served | None = None
    """The served model; set together with the desk."""

    def open(self, desk: Desk, known: Served) -> None:
        """Take requests from now on.

        Args:
            desk: what they are answered with.
            known: the served model.
        """
        self.desk, self.known = desk, known

    @property
    def open_desk(self) -> Desk:
        """The desk.

        Raises:
            Unavailable: it is not open yet.
        """
        if self.desk is None:
            raise Unavailable("the orchestrator is starting")
        return self.desk

    @property
    def served(self) -> Served:
        """The served model.

        Raises:
            Unavailable: its tokenizer is not loaded yet.
        """
        if self.known is None:
            raise Unavailable("the orchestrator is starting")
        return self.known


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
    arriving(request.headers.items())
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
