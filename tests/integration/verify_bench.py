"""A verifier served in-process over a real socket, and hand-written peers: one orchestrator's stream, one drafter's."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import grpc

from outrider.codec.decode import decode_request_to_proto, decode_response_from_proto
from outrider.codec.propose import propose_request_to_proto, propose_response_from_proto
from outrider.errors import OutriderError
from outrider.ids import Epoch, Generation, Mode, SessionId, TokenClass, TokenKind, WorkerId
from outrider.messages import (
    DecodeClose,
    DecodeOpen,
    DecodeRequestMessage,
    DecodeResponseMessage,
    Draining,
    Preparing,
    PromptScores,
    Proposal,
    ProposeHello,
    ProposeRequestMessage,
    ProposeResponseMessage,
    ProposeWelcome,
    SamplingParams,
    Speculation,
    Verdict,
    Vocabulary,
)
from outrider.model.toy import ToyLanguage, ToyTokenizer
from outrider.model.vocabulary import vocabulary
from outrider.rpc import Broken, Ended, Malformed, Stream, channel, client_stream
from outrider.sampling import greedy_token
from outrider.v1 import verify_pb2, verify_pb2_grpc
from verify_service.app import VerifyApp
from verify_service.config import VerifySettings

DRAFTER = WorkerId("draft-1")
LANGUAGE = ToyLanguage(len(ToyTokenizer()), 0, 2, 2.0)
"""What the toy verifier speaks by default."""
VOCABULARY = vocabulary(ToyTokenizer())
PLAN = Speculation(4, 4, 8)
LIMIT_S = 60.0
"""Nothing in these tests takes that long."""

DecodeStream = Stream[DecodeRequestMessage, DecodeResponseMessage]
ProposeStream = Stream["ProposeRequestMessage | verify_pb2.ProposeRequest", ProposeResponseMessage]


def expected_text(prompt: tuple[int, ...], count: int) -> list[int]:
    """Return the greedy text, straight from the language."""
    ids = list(prompt)
    while len(ids) < len(prompt) + count:
        ids.append(greedy_token(LANGUAGE.probs(ids)))
    return ids[len(prompt) :]


@asynccontextmanager
async def verifier(**overrides: object) -> AsyncIterator[VerifyApp]:
    """Serve the toy model for the time of the block."""
    settings = VerifySettings.load(**{"model": "toy", "worker_id": "verify-1", **overrides})
    app = VerifyApp(settings)
    await app.start()
    running = asyncio.create_task(app.run())
    try:
        async with asyncio.timeout(LIMIT_S):
            await app.ready.wait()
        yield app
    finally:
        await app.server.stop(0.0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@asynccontextmanager
async def connected(app: VerifyApp) -> "AsyncIterator[verify_pb2_grpc.VerifyServiceAsyncStub]":
    """Return a stub of the verifier."""
    connection = channel(app.address)
    try:
        yield verify_pb2_grpc.VerifyServiceStub(connection)
    finally:
        await connection.close()


def opening(session_id: str = "s", **changes: object) -> DecodeOpen:
    """Return a greedy session of 40 tokens with one drafter."""
    opened = DecodeOpen(
        SessionId(session_id), Generation(1, 0), (1, 2, 3), (TokenClass.PROMPT,) * 3, Mode.GREEDY,
        SamplingParams(temperature=0.0), b"", prompt_len=3, commit_limit=43, speculation=PLAN, patience_s=0.3,
        worker_id=DRAFTER,
    )  # fmt: skip
    return replace(opened, **changes)  # type: ignore[arg-type]


def undrafted(session_id: str = "s", **changes: object) -> DecodeOpen:
    """Return the same session with nobody who drafts."""
    return opening(session_id, **{"speculation": Speculation(), "worker_id": WorkerId(""), **changes})


@dataclass
class Control:
    """The orchestrator's side of one session."""

    stream: DecodeStream
    opened: DecodeOpen
    call: "grpc.aio.StreamStreamCall[verify_pb2.DecodeRequest, verify_pb2.DecodeResponse]"

    def __post_init__(self) -> None:
        self.committed = list(self.opened.token_ids)
        self.verdicts: list[Verdict] = []
        self.draining = False
        self.stream.send(self.opened)

    @property
    def output(self) -> list[int]:
        return self.committed[self.opened.prompt_len :]

    @property
    def epoch(self) -> Epoch:
        return self.verdicts[-1].next_epoch if self.verdicts else Epoch(self.opened.generation)

    @property
    def kinds(self) -> list[TokenKind]:
        return [kind for verdict in self.verdicts for kind in verdict.kinds]

    async def verdict(self) -> Verdict:
        """Return the next verdict.

        Raises:
            OutriderError: the stream ended.
        """
        while True:
            item = await self.stream.receive(LIMIT_S)
            if isinstance(item, Draining):
                self.draining = True
            if isinstance(item, Draining | Preparing):
                continue
            assert not isinstance(item, Malformed | Ended | PromptScores), item
            if isinstance(item, Broken):
                raise item.error
            assert item.start == len(self.committed)
            self.committed += item.token_ids
            self.verdicts.append(item)
            return item

    async def finish(self) -> list[int]:
        """Take verdicts to the end, close, and return the output."""
        while len(self.committed) < self.opened.commit_limit:
            await self.verdict()
        self.stream.send(DecodeClose(keep_kv=False))
        assert isinstance(await self.stream.receive(LIMIT_S), Ended)
        return self.output

    async def error(self) -> OutriderError:
        """Take verdicts until the stream breaks; return with what."""
        while True:
            try:
                await self.verdict()
            except OutriderError as error:
                return error


@asynccontextmanager
async def control(stub: "verify_pb2_grpc.VerifyServiceAsyncStub", opened: DecodeOpen) -> AsyncIterator[Control]:
    """Open a session."""
    call = stub.Decode()
    async with client_stream(call, decode_request_to_proto, decode_response_from_proto) as stream:
        yield Control(stream, opened, call)


def _encode(message: "ProposeRequestMessage | verify_pb2.ProposeRequest") -> verify_pb2.ProposeRequest:
    """Let tests send what no honest encoder would."""
    return message if isinstance(message, verify_pb2.ProposeRequest) else propose_request_to_proto(message)


@asynccontextmanager
async def propose_stream(
    stub: "verify_pb2_grpc.VerifyServiceAsyncStub",
    worker_id: WorkerId = DRAFTER,
    spoken: Vocabulary = VOCABULARY,
    feature_layers: tuple[int, ...] = (),
) -> AsyncIterator[ProposeStream]:
    """Open a drafter's stream; the hello is sent, and its answer not yet read."""
    async with client_stream(stub.Propose(), _encode, propose_response_from_proto) as stream:
        stream.send(ProposeHello(worker_id, spoken, feature_layers))
        yield stream


@asynccontextmanager
async def drafter(stub: "verify_pb2_grpc.VerifyServiceAsyncStub") -> AsyncIterator[ProposeStream]:
    """Open a drafter's stream and wait until it is welcome."""
    async with propose_stream(stub) as stream:
        assert await stream.receive(LIMIT_S) == ProposeWelcome(WorkerId("verify-1"))
        yield stream


def next_proposal(session: Control, skip: int = 0, count: int = 4, wrong_at: int = -1) -> Proposal:
    """Return what an all-knowing drafter proposes next; `skip` tokens of the chain are under way already.

    Args:
        session: with the committed tokens and the epoch.
        skip: tokens proposed before and not judged yet.
        count: tokens to propose.
        wrong_at: index of a token that is made wrong; -1: none.
    """
    seen = len(session.committed)
    ids = session.committed + expected_text(tuple(session.committed), skip + count)
    tokens = ids[seen + skip :]
    if wrong_at >= 0:
        tokens[wrong_at] = (tokens[wrong_at] + 1) % VOCABULARY.size
    return Proposal(session.opened.session_id, session.epoch, seen + skip, seen, seen + PLAN.window, tuple(tokens))
