"""The `VerifyService` RPCs: streams on the event loop, joined to the engine's thread by its inbox and by `Outlet`s.

A handler decodes, checks and passes on; it never decides anything about a session.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

from outrider.codec.decode import decode_request_from_proto, decode_response_to_proto
from outrider.codec.propose import propose_request_from_proto, propose_response_to_proto
from outrider.codec.tokens import token_map_to_proto
from outrider.codec.types import description_to_proto
from outrider.errors import Cancelled, DeadlineExceeded, InvalidRequest, OutriderError, ProtocolError, Unavailable
from outrider.grammar import Grammars
from outrider.history import GrammarState
from outrider.ids import SessionId
from outrider.messages import (
    DecodeAttach,
    DecodeClose,
    DecodeOpen,
    DecodeProgress,
    DecodeRequestMessage,
    DecodeResponseMessage,
    ProposeHello,
    ProposeRequestMessage,
    ProposeResponseMessage,
    ProposeWelcome,
    Vocabulary,
    WorkerDescription,
)
from outrider.model.vocabulary import HasVocabulary
from outrider.rpc import Broken, Ended, Malformed, Stream, peer_names, server_stream
from outrider.telemetry import note_ids
from outrider.tracing import Tracer, arriving
from outrider.v1 import verify_pb2, verify_pb2_grpc
from verify_service import inbox
from verify_service.engine import Engine
from verify_service.inbox import Ticket
from verify_service.outlet import Handover, Outlet, until_end
from verify_service.owners import Owners
from verify_service.requests import check_hello, check_limit, check_open
from verify_service.traces import traced

SERVICE_NAME = "outrider.v1.VerifyService"
FIRST_MESSAGE_S = 10.0
"""How long a new stream may take to say who it is."""

log = logging.getLogger(__name__)

FirstT = TypeVar("FirstT")


@dataclass(frozen=True, slots=True)
class Garbage:
    """A draft worker's message that breaks the protocol, but names its session."""

    session_id: SessionId
    error: ProtocolError


@dataclass(frozen=True, slots=True)
class Serving:
    """What is served, once it can be."""

    engine: Engine
    handover: Handover
    """By which the engine's thread speaks to the streams."""
    vocabulary: Vocabulary
    context_len: int
    describe: Callable[[], WorkerDescription]
    tokenizer: HasVocabulary | None = None
    """Whose map is told to those who ask."""
    grammars: Grammars | None = None
    """Compiles requests' grammars; None: there are none."""


class VerifyServicer(verify_pb2_grpc.VerifyServiceServicer):
    """The RPCs; they answer UNAVAILABLE until `open_for_business` and `Decode` again does from `start_draining` on."""

    def __init__(self, owners: Owners | None = None) -> None:
        """Serve nothing yet.

        Args:
            owners: who may speak for which draft worker.
        """
        self._owners = owners or Owners()
        self.unready = "the model is being loaded"
        """Why nothing is served, until it is."""
        self.dropped: Counter[str] = Counter()
        """Messages of peers that were dropped here, by reason."""
        self._serving: Serving | None = None
        self._draining = ""
        self._dismissed = False
        self.tracer: Tracer | None = None
        """Where spans go; None: nothing is traced."""
        self._tickets = count(1)
        self._num_open = 0
        self.empty = asyncio.Event()
        """Set while no `Decode` stream is open."""
        self.empty.set()

    def open_for_business(self, serving: Serving) -> None:
        """Serve from now on."""
        self._serving = serving

    def start_draining(self, reason: str) -> None:
        """Refuse new sessions and tell all streams."""
        self._draining = reason
        if self._serving is not None:
            self._serving.engine.post(inbox.Drain(reason))

    def dismiss_workers(self) -> None:
        """End the draft workers' streams, behind what they were told; no session is left that needs them."""
        self._dismissed = True
        if self._serving is not None:
            self._serving.engine.post(inbox.Dismiss())

    async def Describe(
        self, request: verify_pb2.VerifyServiceDescribeRequest, context: Any
    ) -> verify_pb2.VerifyServiceDescribeResponse:
        """Say what this verifier serves."""
        serving = self._ready()
        tokens = None
        if request.with_tokens and serving.tokenizer is not None:
            tokens = await asyncio.to_thread(token_map_to_proto, serving.tokenizer.get_vocab())
        return verify_pb2.VerifyServiceDescribeResponse(worker=description_to_proto(serving.describe()), tokens=tokens)

    # Coroutines, not the generators of the stub: they write whenever the engine's thread has something to say.
    async def Decode(  # type: ignore[override]
        self, request_iterator: AsyncIterator[verify_pb2.DecodeRequest], context: Any
    ) -> None:
        """Decode one session; see the proto file."""
        serving = self._ready()
        self._refuse_if_draining()
        async with server_stream(
            request_iterator, context, decode_response_to_proto, decode_request_from_proto
        ) as stream:
            opened = await self._first(stream, DecodeOpen)
            check_open(opened, serving.vocabulary.size, serving.context_len)
            grammar = await _grammar(serving, opened)
            self._refuse_if_draining()  # it may have begun meanwhile: a session that enters now would never hear of it
            outlet: Outlet[DecodeResponseMessage] = Outlet(stream, serving.handover)
            ticket = Ticket(next(self._tickets))
            trace = arriving(context.invocation_metadata())
            note_ids(session=opened.session_id, trace=trace.name if trace else "")
            send = traced(outlet.send, self.tracer, trace)
            serving.engine.post(inbox.OpenSession(ticket, opened, send, grammar))
            self._count_open(1)
            log.info(
                "session %s opens in %s with %d tokens", opened.session_id, opened.generation, len(opened.token_ids)
            )
            try:
                error = await until_end(outlet, self._read_decode(serving, stream, ticket, outlet))
            finally:
                serving.engine.post(inbox.CloseSession(ticket, keep_kv=True))
                self._count_open(-1)
        if error is not None:
            raise error

    async def Propose(  # type: ignore[override]
        self, request_iterator: AsyncIterator[verify_pb2.ProposeRequest], context: Any
    ) -> None:
        """Take one draft worker's proposals; see the proto file."""
        serving = self._ready()
        async with server_stream(request_iterator, context, propose_response_to_proto, read_proposal) as stream:
            hello = await self._first(stream, ProposeHello)
            note_ids(worker=hello.worker_id)
            check_hello(hello, serving.vocabulary)
            if self._dismissed:
                raise Unavailable(self._draining)
            with self._owners.claim(hello.worker_id, peer_names(context)):
                error = await self._take_proposals(serving, stream, hello)
        if error is not None:
            raise error

    async def _take_proposals(
        self,
        serving: Serving,
        stream: "Stream[ProposeResponseMessage, ProposeRequestMessage | Garbage]",
        hello: ProposeHello,
    ) -> OutriderError | None:
        """Serve a draft worker's stream to its end; return the error that it ended with."""
        stream.send(ProposeWelcome(serving.describe().worker_id))
        outlet: Outlet[ProposeResponseMessage] = Outlet(stream, serving.handover)
        ticket = Ticket(next(self._tickets))
        serving.engine.post(inbox.JoinWorker(ticket, hello, outlet.send))
        try:
            return await until_end(outlet, self._read_propose(serving, stream, ticket, outlet))
        finally:
            serving.engine.post(inbox.LeaveWorker(ticket))

    def _refuse_if_draining(self) -> None:
        if self._draining:
            raise Unavailable(self._draining)

    def _count_open(self, change: int) -> None:
        self._num_open += change
        if self._num_open:
            self.empty.clear()
        else:
            self.empty.set()

    def _ready(self) -> Serving:
        if self._serving is None:
            raise Unavailable(self.unready)
        return self._serving

    async def _first(self, stream: "Stream[Any, Any]", kind: type[FirstT]) -> FirstT:
        """Return the first message, which has to be of this kind."""
        try:
            item = await stream.receive(FIRST_MESSAGE_S)
        except TimeoutError:
            raise DeadlineExceeded(f"no {kind.__name__} within {FIRST_MESSAGE_S:g} s") from None
        if isinstance(item, Malformed | Garbage | Broken):
            raise item.error
        if isinstance(item, Ended):
            raise Cancelled(f"the stream ended before its {kind.__name__}")
        if not isinstance(item, kind):
            raise ProtocolError(f"the first message is a {type(item).__name__}; expected {kind.__name__}")
        return item

    async def _read_decode(
        self,
        serving: Serving,
        stream: "Stream[DecodeResponseMessage, DecodeRequestMessage]",
        ticket: Ticket,
        outlet: Outlet[DecodeResponseMessage],
    ) -> None:
        """Pass an orchestrator's messages on until it closes, or its stream ends."""
        while True:
            match await stream.receive():
                case DecodeAttach() as attach:
                    serving.engine.post(inbox.TellSession(ticket, attach))
                case DecodeProgress() as progress:
                    check_limit("progress.commit_limit", progress.commit_limit, serving.context_len)
                    serving.engine.post(inbox.TellSession(ticket, progress))
                case DecodeClose(keep_kv):
                    serving.engine.post(inbox.CloseSession(ticket, keep_kv))
                    break
                case Malformed(error):
                    self._drop("malformed_decode", error)
                case DecodeOpen():
                    self._drop("repeated_open", ProtocolError("a Decode stream opens once"))
                case Ended():
                    outlet.end(Cancelled("the stream ended without a close"))
                    break
                case Broken(error):
                    outlet.end(error)
                    break

    async def _read_propose(
        self,
        serving: Serving,
        stream: "Stream[ProposeResponseMessage, ProposeRequestMessage | Garbage]",
        ticket: Ticket,
        outlet: Outlet[ProposeResponseMessage],
    ) -> None:
        """Pass a draft worker's messages on until its stream ends."""
        while True:
            match await stream.receive():
                case Garbage(session_id, error):
                    self._drop("malformed", error)
                    serving.engine.post(inbox.Malformed(ticket, session_id))
                case Malformed(error):
                    self._drop("malformed", error)
                case ProposeHello():
                    self._drop("repeated_hello", ProtocolError("a Propose stream says hello once"))
                case Ended():
                    outlet.end(None)
                    break
                case Broken(error):
                    outlet.end(error)
                    break
                case message:
                    serving.engine.post(inbox.Proposed(ticket, message))

    def _drop(self, reason: str, error: OutriderError) -> None:
        self.dropped[reason] += 1
        log.debug("dropped a message (%s): %s", reason, error)


async def _grammar(serving: Serving, opened: DecodeOpen) -> GrammarState | None:
    """Return where a session's output stands in its grammar; compiled on a thread of its own.

    Raises:
        InvalidRequest: the grammar does not compile, or none can be used here.
    """
    sampling, output = opened.sampling, opened.token_ids[opened.prompt_len :]
    if sampling.grammar is None:
        return None
    if serving.grammars is None:
        raise InvalidRequest("sampling.grammar", sampling.grammar.kind, "none: this verifier has no tokenizer")
    return await asyncio.to_thread(serving.grammars.begin, sampling, output)


def read_proposal(request: verify_pb2.ProposeRequest) -> ProposeRequestMessage | Garbage:
    """Decode a draft worker's message; a bad one that names its session is kept as garbage of that session.

    Raises:
        ProtocolError: it is bad and names no session.
    """
    try:
        return propose_request_from_proto(request)
    except ProtocolError as error:
        kind = request.WhichOneof("message")
        session_id = getattr(getattr(request, kind), "session_id", "") if kind else ""
        if not session_id:
            raise
        return Garbage(SessionId(session_id), error)
