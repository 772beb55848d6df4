"""The asynchronous client of `GenerationService`.

    async with Client("127.0.0.1:50051") as client:
        async for event in client.generate(GenerationRequest(TextPrompt("Once upon a time"))):
            ...

Failed calls raise `outrider.errors`. Leaving an iterator early calls the generation off; close it
(`contextlib.aclosing`) to do so at once.
"""

import os
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any, Self

from outrider.codec.catalogue import model_from_proto, session_from_proto
from outrider.codec.generation import event_from_proto, request_to_proto, resume_to_proto
from outrider.errors import InvalidRequest
from outrider.generation import GenerationEvent, GenerationRequest, ModelDescription, ResumeFrom, SessionSummary
from outrider.ids import SessionId
from outrider.rpc import ClientTls, channel, rpc_errors
from outrider.v1 import generation_pb2 as pb
from outrider.v1.generation_pb2_grpc import GenerationServiceStub

DEFAULT_TIMEOUT_S = 3600.0
"""Deadline of a generation."""
SHORT_TIMEOUT_S = 10.0
"""Deadline of every other call."""
API_KEY_VARIABLE = "OUTRIDER_API_KEY"
"""Where the key is if it is not given."""


class Client:
    """One orchestrator, over one channel. An async context manager, or closed with `close`."""

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        tls: ClientTls | None = None,
        api_key: str | None = None,
    ) -> None:
        """Connect with the first call.

        Args:
            address: host:port or unix:path.
            timeout_s: deadline of each generation.
            tls: from `client_tls`, with the orchestrator's CA; None: plaintext.
            api_key: shown with every call, and readable on the way unless the channel has TLS; None: what
                OUTRIDER_API_KEY holds; empty: none.

        Raises:
            InvalidRequest: the key has characters that no key has.
        """
        self._channel = channel(address, tls=tls)
        self._stub = GenerationServiceStub(self._channel)
        self._timeout_s = timeout_s
        self._metadata = _authorization(os.environ.get(API_KEY_VARIABLE, "") if api_key is None else api_key)

    async def __aenter__(self) -> Self:
        """Return the client."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the channel."""
        await self.close()

    async def close(self) -> None:
        """Close the channel; generations that run are called off. Idempotent."""
        await self._channel.close()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Yield the events of a new generation: `Started` first, `Finished` last.

        Raises:
            OutriderError: it was refused, or failed.
        """
        async for event in _events(
            self._stub.Generate(request_to_proto(request), timeout=self._timeout_s, metadata=self._metadata)
        ):
            yield event

    async def resume(self, session_id: SessionId, next_position: int) -> AsyncGenerator[GenerationEvent, None]:
        """Yield the events of a generation whose stream was lost, from the first token that was not seen.

        Args:
            session_id: from its `Started` event.
            next_position: absolute position of that token.

        Raises:
            OutriderError: there is nothing to go on with, what was shown is lost, or it failed.
        """
        request = resume_to_proto(ResumeFrom(session_id, next_position))
        async for event in _events(self._stub.Resume(request, timeout=self._timeout_s, metadata=self._metadata)):
            yield event

    async def session(self, session_id: SessionId, *, include_token_ids: bool = False) -> SessionSummary:
        """Return what is stored about a session.

        Raises:
            NotFound: there is none.
        """
        request = pb.GetSessionRequest(session_id=session_id, include_token_ids=include_token_ids)
        with rpc_errors():
            answer = await self._stub.GetSession(request, timeout=SHORT_TIMEOUT_S, metadata=self._metadata)
        return session_from_proto(answer.session)

    async def delete(self, session_id: SessionId) -> None:
        """Forget a session, and call off its generation.

        Raises:
            NotFound: there is none.
        """
        with rpc_errors():
            request = pb.DeleteSessionRequest(session_id=session_id)
            await self._stub.DeleteSession(request, timeout=SHORT_TIMEOUT_S, metadata=self._metadata)

    async def models(self) -> list[ModelDescription]:
        """Return the models that can be asked for now."""
        with rpc_errors():
            answer = await self._stub.ListModels(
                pb.ListModelsRequest(), timeout=SHORT_TIMEOUT_S, metadata=self._metadata
            )
        return [model_from_proto(model) for model in answer.models]


def _authorization(api_key: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata that shows a key."""
    key = api_key.strip()
    if not key:
        return ()
    if not key.isascii() or not key.isprintable() or " " in key:
        raise InvalidRequest("api_key", "what was given", "printable ASCII without spaces")
    return (("authorization", f"Bearer {key}"),)


async def _events(call: Any) -> AsyncGenerator[GenerationEvent, None]:
    """Yield the events of a call; one that is left early is cancelled."""
    try:
        with rpc_errors():
            async for response in call:
                yield event_from_proto(response.event)
    finally:
        call.cancel()
