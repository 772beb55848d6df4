"""`GenerationService` over gRPC: decodes, calls `orchestrator.sessions`, encodes.

Errors become statuses in `outrider.rpc`.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from orchestrator.sessions import Sessions
from outrider.codec.catalogue import model_to_proto, session_to_proto
from outrider.codec.checks import CLIENT
from outrider.codec.generation import event_to_proto, request_from_proto, resume_from_proto
from outrider.errors import Unavailable
from outrider.ids import SessionId
from outrider.v1 import generation_pb2 as pb
from outrider.v1.generation_pb2_grpc import GenerationServiceServicer

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name


class GenerationServicer(GenerationServiceServicer):
    """Answers clients once it is opened for business."""

    def __init__(self) -> None:
        """Refuse everything until `open_for_business`."""
        self._opened: Sessions | None = None

    def open_for_business(self, sessions: Sessions) -> None:
        """Answer from now on."""
        self._opened = sessions

    @property
    def _sessions(self) -> Sessions:
        if self._opened is None:
            raise Unavailable("the orchestrator is starting")
        return self._opened

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Generate a continuation."""
        async with aclosing(self._sessions.generate(request_from_proto(request))) as events:
            async for event in events:
                yield pb.GenerateResponse(event=event_to_proto(event))

    async def Resume(self, request: pb.ResumeRequest, context: Any) -> AsyncGenerator[pb.ResumeResponse, None]:
        """Go on with a generation."""
        async with aclosing(self._sessions.resume(resume_from_proto(request))) as events:
            async for event in events:
                yield pb.ResumeResponse(event=event_to_proto(event))

    async def GetSession(self, request: pb.GetSessionRequest, context: Any) -> pb.GetSessionResponse:
        """Return what is stored about a session."""
        session_id = SessionId(CLIENT.name("session_id", request.session_id))
        summary = await self._sessions.summary(session_id, include_token_ids=request.include_token_ids)
        return pb.GetSessionResponse(session=session_to_proto(summary))

    async def DeleteSession(self, request: pb.DeleteSessionRequest, context: Any) -> pb.DeleteSessionResponse:
        """Forget a session."""
        await self._sessions.delete(SessionId(CLIENT.name("session_id", request.session_id)))
        return pb.DeleteSessionResponse()

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        """List the models that can be asked for now."""
        return pb.ListModelsResponse(models=[model_to_proto(model) for model in await self._sessions.models()])
