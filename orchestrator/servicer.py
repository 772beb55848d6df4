"""`GenerationService` over gRPC: finds out who calls, decodes, calls `orchestrator.sessions`, encodes.

Every method first asks `Access` who calls, and counts the call. Errors become statuses in `outrider.rpc`.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.access import Access, Caller
from orchestrator.quotas import Quotas, Ticket
from orchestrator.sessions import Sessions
from outrider.codec.catalogue import model_to_proto, session_to_proto
from outrider.codec.checks import CLIENT
from outrider.codec.generation import event_to_proto, request_from_proto, resume_from_proto
from outrider.errors import Unavailable
from outrider.generation import Finished, GenerationEvent, GenerationRequest
from outrider.ids import SessionId
from outrider.telemetry import note_ids
from outrider.tracing import arriving
from outrider.v1 import generation_pb2 as pb
from outrider.v1.generation_pb2_grpc import GenerationServiceServicer

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name


@dataclass(frozen=True, slots=True)
class Desk:
    """What calls are answered with."""

    sessions: Sessions
    access: Access
    quotas: Quotas
    refusing: Callable[[], AbstractContextManager[None]]
    """Counts what a block raises as a refused call."""

    async def told(
        self, ticket: Ticket, events: AsyncGenerator[GenerationEvent, None]
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Yield a generation's events, counted, as long as the caller's key is valid."""
        async with aclosing(events), aclosing(self.access.watched(ticket.caller, events)) as watched:
            async for event in watched:
                ticket.count(event)
                if isinstance(event, Finished):
                    await ticket.leave()  # before the client hears of the end, and may ask for more
                yield event


class GenerationServicer(GenerationServiceServicer):
    """Answers clients once it is opened for business."""

    def __init__(self) -> None:
        """Refuse everything until `open_for_business`."""
        self._opened: Desk | None = None

    def open_for_business(self, desk: Desk) -> None:
        """Answer from now on."""
        self._opened = desk

    @property
    def _desk(self) -> Desk:
        if self._opened is None:
            raise Unavailable("the orchestrator is starting")
        return self._opened

    async def _caller(self, context: Any) -> Caller:
        """Return who calls."""
        return await self._desk.access.caller(context.invocation_metadata())

    async def _asking(self, context: Any) -> Caller:
        """Return who calls, and count a call that generates nothing."""
        caller = await self._caller(context)
        await self._desk.quotas.request(caller)
        return caller

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Generate a continuation."""
        desk = self._desk
        with desk.refusing():
            trace = arriving(context.invocation_metadata())
            caller, asked = await self._caller(context), _within(request_from_proto(request), context.time_remaining())
            note_ids(session=asked.session_id, request=asked.request_id, trace=trace.name if trace else "")
        async with (
            desk.quotas.ticket(caller, asked.session_id) as ticket,
            aclosing(desk.told(ticket, desk.sessions.generate(asked, ticket))) as events,
        ):
            async for event in events:
                yield pb.GenerateResponse(event=event_to_proto(event))

    async def Resume(self, request: pb.ResumeRequest, context: Any) -> AsyncGenerator[pb.ResumeResponse, None]:
        """Go on with a generation."""
        desk = self._desk
        with desk.refusing():
            trace = arriving(context.invocation_metadata())
            caller, asked = await self._caller(context), resume_from_proto(request)
            note_ids(session=asked.session_id, trace=trace.name if trace else "")
        async with (
            desk.quotas.ticket(caller, asked.session_id, resuming=True) as ticket,
            aclosing(desk.told(ticket, desk.sessions.resume(asked, ticket))) as events,
        ):
            async for event in events:
                yield pb.ResumeResponse(event=event_to_proto(event))

    async def GetSession(self, request: pb.GetSessionRequest, context: Any) -> pb.GetSessionResponse:
        """Return what is stored about a session."""
        caller = await self._asking(context)
        session_id = SessionId(CLIENT.session("session_id", request.session_id))
        summary = await self._desk.sessions.summary(
            session_id, owner=caller.key_id, include_token_ids=request.include_token_ids
        )
        return pb.GetSessionResponse(session=session_to_proto(summary))

    async def DeleteSession(self, request: pb.DeleteSessionRequest, context: Any) -> pb.DeleteSessionResponse:
        """Forget a session."""
        caller = await self._asking(context)
        session_id = SessionId(CLIENT.session("session_id", request.session_id))
        await self._desk.sessions.delete(session_id, owner=caller.key_id)
        return pb.DeleteSessionResponse()

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        """List the models that can be asked for now."""
        await self._asking(context)
        return pb.ListModelsResponse(models=[model_to_proto(model) for model in await self._desk.sessions.models()])


def _within(asked: GenerationRequest, remaining_s: float | None) -> GenerationRequest:
    """Return a request that waits for a place no longer than its call may take."""
    limits_s = [limit_s for limit_s in (asked.max_wait_s, remaining_s) if limit_s is not None]
    return replace(asked, max_wait_s=max(0.0, min(limits_s))) if limits_s else asked
