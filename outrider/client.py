"""The asynchronous client of `GenerationService`; `outrider.sync_client` has the same for code without an event loop.

    async with Client(["10.0.0.1:50051", "10.0.0.2:50051"]) as client:
        answer = await client.ask("Once upon a time", max_tokens=100, seed=7)
        async for event in client.stream([{"role": "user", "content": "Hello"}], temperature=0):
            ...

It is `outrider.AsyncClient` from outside.

A generation whose stream is lost goes on by itself, at the next of the addresses: no token comes twice, none is
missing, and all that is seen is a pause. How long that is tried is a `Retry`'s to say; then, and for everything that
another try cannot mend, calls raise `outrider.errors`. Leaving an iterator early calls the generation off; close it
(`contextlib.aclosing`) to do so at once.
"""

import asyncio
import logging
import os
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from outrider.address import ADDRESS, is_address
from outrider.asking import Answer, Parameters, Prompt, answer_of, request_of, samples_of
from outrider.codec.catalogue import model_from_proto, session_from_proto
from outrider.codec.generation import event_from_proto, request_to_proto, resume_to_proto
from outrider.errors import Cancelled, InvalidRequest, OutriderError, Unavailable
from outrider.generation import Chunk, GenerationEvent, GenerationRequest, ModelDescription, ResumeFrom, SessionSummary
from outrider.ids import SessionId
from outrider.resuming import NO_RETRY, RETRY, Progress, Retry, Tries
from outrider.rpc import ClientTls, channel, client_tls, rpc_errors
from outrider.tracing import current, leaving
from outrider.v1 import generation_pb2 as pb
from outrider.v1.generation_pb2_grpc import GenerationServiceStub

__all__ = ["DEFAULT_TIMEOUT_S", "NO_RETRY", "RETRY", "Client", "ClientTls", "Retry", "client_tls"]

log = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 3600.0
"""Deadline of a generation."""
SHORT_TIMEOUT_S = 10.0
"""Deadline of every other call."""
API_KEY_VARIABLE = "OUTRIDER_API_KEY"
"""Where the key is if it is not given."""
CLOSED = "the client is closed"
"""What whoever goes on with it is told."""
SAMPLES_AT_ONCE = 32
"""Samples of one request that run at the same time."""


T = TypeVar("T")


class Client:
    """Orchestrators of one cluster. An async context manager, or closed with `close`."""

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retry: Retry = RETRY,
        tls: ClientTls | None = None,
        api_key: str | None = None,
    ) -> None:
        """Connect with the first call.

        Args:
            addresses: of one orchestrator or several: host:port or unix:path.
            timeout_s: deadline of each generation, however often it is resumed.
            retry: how hard to try when an orchestrator is lost; `NO_RETRY`: not at all.
            tls: from `client_tls`, with the orchestrators' CA; None: plaintext.
            api_key: shown with every call, and readable on the way unless the channel has TLS; None: what
                OUTRIDER_API_KEY holds; empty: none.

        Raises:
            InvalidRequest: there is no address, one that is none, or the key has characters that no key has.
        """
        each = (addresses,) if isinstance(addresses, str) else tuple(addresses)
        if not each:
            raise InvalidRequest("addresses", each, "at least one")
        for address in each:
            if not is_address(address):
                raise InvalidRequest("addresses", address, ADDRESS)
        self._channels = [channel(address, tls=tls) for address in each]
        self._stubs = [GenerationServiceStub(opened) for opened in self._channels]
        self._metadata = _authorization(os.environ.get(API_KEY_VARIABLE, "") if api_key is None else api_key)
        self._timeout_s, self._retry = timeout_s, retry
        self._short: dict[str, Any] = {"timeout": SHORT_TIMEOUT_S, "metadata": self._metadata}
        """Of every call but generations."""
        self._at = 0
        """Index of the orchestrator that has answered last."""
        self._streams: set[Any] = set()
        """Calls of generations that are read; gRPC ends none of them when it closes their channel."""
        self._closed = False

    async def __aenter__(self) -> Self:
        """Return the client."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the channels."""
        await self.close()

    async def close(self) -> None:
        """Close the channels; generations that run are called off, and whoever follows them is told. Idempotent."""
        self._closed = True
        for call in tuple(self._streams):
            call.cancel()
        await asyncio.gather(*(each.close() for each in self._channels))

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Yield the events of a new generation: `Started` first, `Finished` last.

        A request for a further turn gets a `request_id` if it has none, so that it is never taken twice.

        Raises:
            OutriderError: it was refused, or failed.
        """
        if request.session_id and not request.request_id:
            request = replace(request, request_id=secrets.token_hex(12))
        message, metadata = request_to_proto(request), (*self._metadata, *leaving(current()))
        async with aclosing(
            self._followed(Progress(), lambda stub, s: stub.Generate(message, timeout=s, metadata=metadata))
        ) as events:
            async for event in events:
                yield event

    def stream(self, prompt: Prompt, **parameters: Unpack[Parameters]) -> AsyncGenerator[GenerationEvent, None]:
        """Yield the events of a new generation, as `generate` does.

        Args:
            prompt: text, token ids, messages, or a request whose fields the parameters change.
            **parameters: see `outrider.asking.Parameters`.

        Raises:
            OutriderError: it was refused, or failed.
        """
        return self.generate(request_of(prompt, parameters))

    async def ask(self, prompt: Prompt, **parameters: Unpack[Parameters]) -> Answer:
        """Return a whole answer; the arguments are those of `stream`.

        Raises:
            OutriderError: it was refused, or failed.
        """
        async with aclosing(self.stream(prompt, **parameters)) as events:
            return answer_of([event async for event in events])

    async def samples(self, prompt: Prompt, n: int, **parameters: Unpack[Parameters]) -> list[Answer]:
        """Return several answers to one request, generated side by side; with a seed, each is repeatable.

        Args:
            prompt: as for `stream`.
            n: how many, 1 .. 128; answer i is the one with `sample_index` i.
            **parameters: as for `stream`.

        Raises:
            OutriderError: one was refused, or failed; the others are called off.
        """
        places = asyncio.Semaphore(SAMPLES_AT_ONCE)

        async def one(request: GenerationRequest) -> Answer:
            async with places:
                return await self.ask(request)

        try:
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(one(each)) for each in samples_of(request_of(prompt, parameters), n)]
        except* OutriderError as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in asked]

    async def resume(self, session_id: SessionId, next_position: int) -> AsyncGenerator[GenerationEvent, None]:
        """Yield the events of a generation whose stream was lost, from the first token that was not seen.

        Args:
            session_id: from its `Started` event.
            next_position: absolute position of that token.

        Raises:
            OutriderError: there is nothing to go on with, what was shown is lost, or it failed.
        """
        # A stream without `Started` has not begun, though the session has.
        first = Progress(position=next_position)
        message = resume_to_proto(ResumeFrom(session_id, next_position))
        metadata = (*self._metadata, *leaving(current()))
        async with aclosing(
            self._followed(first, lambda stub, s: stub.Resume(message, timeout=s, metadata=metadata))
        ) as events:
            async for event in events:
                yield event

    async def _followed(
        self, progress: Progress, begin: Callable[[Any, float], Any]
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Yield the events of a generation to its end, in as many calls as it takes.

        Args:
            progress: what has been seen.
            begin: makes the first call, with a stub and a timeout in seconds.
        """
        deadline_s, tries, at = time.monotonic() + self._timeout_s, Tries(self._retry, len(self._stubs)), self._at
        while not progress.finished:
            self._require_open()
            begun, left_s = bool(progress.session_id), max(0.0, deadline_s - time.monotonic())
            call = self._resumed(self._stubs[at], progress, left_s) if begun else begin(self._stubs[at], left_s)
            try:
                async with aclosing(self._events(call)) as events:
                    async for event in events:
                        seen, self._at = progress.take(event), at
                        if isinstance(event, Chunk) and event.token_ids:
                            tries.progressed()
                        if seen is not None:
                            yield seen
                if not progress.finished:
                    raise Unavailable("the stream ended before the generation did")
            except OutriderError as error:
                at = await self._elsewhere(tries, error, at, begun=bool(progress.session_id))

    async def _elsewhere(self, tries: Tries, error: OutriderError, at: int, *, begun: bool) -> int:
        """Return the index of the next address, after a pause if there has to be one.

        Raises:
            OutriderError: there is no further try.
        """
        pause_s = tries.pause_after(error, begun=begun)
        log.info("going on elsewhere in %.1f s: %s", pause_s, error)
        await asyncio.sleep(pause_s)
        return (at + 1) % len(self._stubs)

    def _resumed(self, stub: Any, progress: Progress, timeout_s: float) -> Any:
        message = resume_to_proto(ResumeFrom(progress.session_id, progress.position))
        return stub.Resume(message, timeout=timeout_s, metadata=self._metadata)

    async def _answer(self, ask: Callable[[Any], Awaitable[T]]) -> T:
        """Ask for one answer, elsewhere too if need be; only for what may be asked twice."""
        tries, at = Tries(self._retry, len(self._stubs)), self._at
        while True:
            self._require_open()
            try:
                with self._call_errors():
                    return await ask(self._stubs[at])
            except OutriderError as error:
                at = await self._elsewhere(tries, error, at, begun=False)

    async def _events(self, call: Any) -> AsyncGenerator[GenerationEvent, None]:
        """Yield the events of a call; one that is left early is cancelled."""
        self._streams.add(call)
        try:
            with self._call_errors():
                async for response in call:
                    yield event_from_proto(response.event)
        finally:
            self._streams.discard(call)
            call.cancel()

    @contextmanager
    def _call_errors(self) -> Iterator[None]:
        """Turn failures of a call in the block into ours: its end by `close`, too, which looks like a task's end."""
        try:
            with rpc_errors():
                yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                self._require_open()
            raise

    def _require_open(self) -> None:
        if self._closed:
            raise Cancelled(CLOSED)

    async def session(self, session_id: SessionId, *, include_token_ids: bool = False) -> SessionSummary:
        """Return what is stored about a session.

        Raises:
            NotFound: there is none.
        """
        request = pb.GetSessionRequest(session_id=session_id, include_token_ids=include_token_ids)
        answer = await self._answer(lambda stub: stub.GetSession(request, **self._short))
        return session_from_proto(answer.session)

    async def delete(self, session_id: SessionId) -> None:
        """Forget a session, and call off its generation.

        Raises:
            NotFound: there is none.
        """
        request = pb.DeleteSessionRequest(session_id=session_id)
        await self._answer(lambda stub: stub.DeleteSession(request, **self._short))

    async def models(self) -> list[ModelDescription]:
        """Return the models that can be asked for now."""
        answer = await self._answer(lambda stub: stub.ListModels(pb.ListModelsRequest(), **self._short))
        return [model_from_proto(model) for model in answer.models]


def _authorization(api_key: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata that shows a key."""
    key = api_key.strip()
    if not key:
        return ()
    if not key.isascii() or not key.isprintable() or " " in key:
        raise InvalidRequest("api_key", "what was given", "printable ASCII without spaces")
    return (("authorization", f"Bearer {key}"),)
