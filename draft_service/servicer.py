"""The `DraftService` RPCs: what is said before the drafter is ready, and one `Draft` stream per session after it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from draft_service.seats import DraftStream, Seats
from outrider.codec.draft import draft_request_from_proto, draft_response_to_proto
from outrider.codec.tokens import token_map_to_proto
from outrider.codec.types import description_to_proto
from outrider.errors import Unavailable
from outrider.messages import WorkerDescription
from outrider.model.vocabulary import HasVocabulary
from outrider.rpc import server_stream
from outrider.tracing import arriving
from outrider.v1 import draft_pb2, draft_pb2_grpc

SERVICE_NAME = "outrider.v1.DraftService"


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """Answers calls; has no drafter until `open_for_business`."""

    def __init__(self) -> None:
        """Begin without a drafter."""
        self.unready = "the drafter is being loaded"
        """Why there is no drafter; shown by `Describe`."""
        self._seats: Seats | None = None
        self._describe: Callable[[], WorkerDescription] | None = None
        self._tokenizer: HasVocabulary | None = None

    def open_for_business(
        self, seats: Seats, describe: Callable[[], WorkerDescription], tokenizer: HasVocabulary | None = None
    ) -> None:
        """Serve sessions from now on; the tokenizer's map is told to those who ask."""
        self._seats, self._describe, self._tokenizer = seats, describe, tokenizer

    async def Describe(
        self, request: draft_pb2.DraftServiceDescribeRequest, context: Any
    ) -> draft_pb2.DraftServiceDescribeResponse:
        """Say what this worker serves.

        Raises:
            Unavailable: nothing yet, or never; says why.
        """
        if self._describe is None:
            raise Unavailable(self.unready)
        tokens = None
        if request.with_tokens and self._tokenizer is not None:
            tokens = await asyncio.to_thread(token_map_to_proto, self._tokenizer.get_vocab())
        return draft_pb2.DraftServiceDescribeResponse(worker=description_to_proto(self._describe()), tokens=tokens)

    # A coroutine, not the generator of the stub: it writes to its stream whenever the model thread reports.
    async def Draft(  # type: ignore[override]
        self, request_iterator: AsyncIterator[draft_pb2.DraftRequest], context: Any
    ) -> None:
        """Draft for one session; see `Seats.serve` for how it ends."""
        if self._seats is None:
            raise Unavailable(self.unready)
        stream: DraftStream
        async with server_stream(
            request_iterator, context, draft_response_to_proto, draft_request_from_proto
        ) as stream:
            await self._seats.serve(stream, arriving(context.invocation_metadata()))
