"""The draft service over real gRPC: sessions, the Propose stream, refusals, failures, draining."""

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draft_service.__main__ import main
from draft_service.app import DraftApp
from draft_service.config import DraftSettings
from draft_service.drafters.causal_lm import CausalLm
from draft_service.drafters.protocol import Outcome, Work
from draft_service.loading import Loaded, Progress
from outrider.codec.draft import draft_request_to_proto
from outrider.codec.types import description_from_proto
from outrider.errors import (
    FailedPrecondition,
    Internal,
    InvalidRequest,
    OutriderError,
    ProtocolError,
    ResourceExhausted,
    Unavailable,
    VocabularyMismatch,
)
from outrider.ids import Epoch, Generation, Mode, SessionId
from outrider.messages import (
    DraftClose,
    DraftRequestMessage,
    DraftStatus,
    Draining,
    Grammar,
    GrammarKind,
    Pass,
    Proposal,
    ProposalHeader,
    RollbackHint,
    SamplingParams,
    WorkerDescription,
)
from outrider.model.toy import ToyRunner, ToyTokenizer
from outrider.model.vocabulary import vocabulary
from outrider.rpc import Ended, channel, rpc_errors
from outrider.store.connect import open_client
from outrider.store.registry import Registry
from outrider.v1 import draft_pb2, draft_pb2_grpc
from tests.integration.draft_bench import (
    LANGUAGE,
    PROMPT,
    TIMEOUT_S,
    VOCAB,
    DraftStream,
    commit,
    draft_app,
    draft_call,
    error_of,
    greedy,
    opening,
    recording_verifier,
    until,
    until_async,
)


async def health(address: str) -> int:
    async with channel(address) as to_worker:
        stub = health_pb2_grpc.HealthStub(to_worker)
        return int((await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)).status)


async def describe(address: str) -> WorkerDescription:
    async with channel(address) as to_worker:
        stub = draft_pb2_grpc.DraftServiceStub(to_worker)
        with rpc_errors():
            answer = await stub.Describe(draft_pb2.DraftServiceDescribeRequest(), timeout=TIMEOUT_S)
        return description_from_proto(answer.worker)


async def serves(address: str) -> bool:
    return await health(address) == int(SERVING)


async def last_status(stream: DraftStream) -> DraftStatus:
    """Close the session and return the status that ends the stream."""
    stream.send(DraftClose())
    last: DraftStatus | None = None
    while not isinstance(message := await stream.receive(TIMEOUT_S), Ended):
        assert isinstance(message, DraftStatus), message
        last = message
    assert last is not None
    return last


SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


# --- sessions -----------------------------------------------------------------------------------------------------


async def test_a_session_is_drafted_for_round_by_round_and_reports_at_its_end() -> None:
    async with recording_verifier() as (verifier, address), draft_app() as app, draft_call(app.address) as stream:
        stream.send(opening(address))
        text = PROMPT
        for number in range(5):
            proposal = await verifier.next()
            assert isinstance(proposal, Proposal)
            assert (proposal.base_len, proposal.epoch.round) == (len(text), number)
            assert proposal.token_ids == greedy(text, 4)
            stream.send(commit(len(text), greedy(text, 5), number + 1))
            text += greedy(text, 5)
        await verifier.next()
        first = await stream.receive(TIMEOUT_S)
        assert isinstance(first, DraftStatus)
        assert first.ready
        status = await last_status(stream)
        assert (status.drafter, status.num_drafted) == ("toy", 24)
        assert status.draft_s_per_token > 0
        assert [hello.worker_id for hello in verifier.hellos] == ["d"]


async def test_all_sessions_of_a_verifier_share_one_stream() -> None:
    async with recording_verifier() as (verifier, address), draft_app() as app:
        async with draft_call(app.address) as one, draft_call(app.address) as two:
            one.send(opening(address, "one"))
            two.send(opening(address, "two", mode=Mode.REJECTION))
            messages = [await verifier.next() for _ in range(3)]
        assert {type(m) for m in messages} == {Proposal, ProposalHeader}
        assert {m.session_id for m in messages} == {"one", "two"}
        assert len(verifier.hellos) == 1


async def test_prompt_lookup_needs_no_model() -> None:
    async with (
        recording_verifier() as (verifier, address),
        draft_app(drafter="prompt_lookup", model="toy") as app,
        draft_call(app.address) as stream,
    ):
        ids = (1, 2, 3, 4, 1, 2)
        stream.send(replace(opening(address, mode=Mode.REJECTION), token_ids=ids, prompt_len=6))
        assert isinstance(await verifier.next(), ProposalHeader)
        proposal = await verifier.next()
        assert isinstance(proposal, Proposal)
        assert proposal.token_ids == (3, 4, 1, 2)
        assert (await describe(app.address)).drafter == "prompt_lookup"


async def test_a_missed_commit_is_asked_for_on_the_stream() -> None:
    async with recording_verifier() as (_, address), draft_app() as app, draft_call(app.address) as stream:
        stream.send(opening(address))
        stream.send(commit(25, (1,), 1))
        missing = -1
        while missing < 0:
            message = await stream.receive(TIMEOUT_S)
            assert isinstance(message, DraftStatus)
            missing = message.missing_from
        assert missing == len(PROMPT)


async def test_a_higher_generation_takes_the_session_over_and_a_lower_one_is_refused() -> None:
    async with recording_verifier() as (verifier, address), draft_app() as app, draft_call(app.address) as old:
        old.send(opening(address, attach=2))
        await verifier.next()
        for attach in (1, 2):
            async with draft_call(app.address) as late:
                late.send(opening(address, attach=attach))
                assert isinstance(await error_of(late.receive), FailedPrecondition)
        async with draft_call(app.address) as new:
            new.send(opening(address, attach=3))
            error = await error_of(old.receive)
            assert isinstance(error, FailedPrecondition)
            assert "superseded" in error.message
            proposal = await verifier.next()
            assert proposal.epoch.generation.attach == 3
            assert (await last_status(new)).num_drafted == 4


async def test_a_client_that_disappears_frees_its_place() -> None:
    async with recording_verifier() as (verifier, address), draft_app(max_sessions=1) as app:
        async with draft_call(app.address) as stream:
            stream.send(opening(address))
            await verifier.next()
            async with draft_call(app.address) as second:
                second.send(opening(address, "other"))
                assert isinstance(await error_of(second.receive), ResourceExhausted)
        await until(lambda: app.seats is not None and not len(app.seats))
        async with draft_call(app.address) as second:
            second.send(opening(address, "other"))
            assert (await verifier.next()).session_id == "other"


LETTER = Grammar(GrammarKind.REGEX, "a+")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"token_ids": (1, VOCAB)}, ProtocolError),
        ({"sampling": SamplingParams(temperature=0.0, logit_bias=((VOCAB, 1.0),))}, InvalidRequest),
        ({"sampling": SamplingParams(grammar=LETTER, grammar_end_ids=(VOCAB,))}, InvalidRequest),
        ({"prompt_len": 99}, ProtocolError),
        ({"draft_key": b"", "mode": Mode.COUPLED}, ProtocolError),
    ],
)
async def test_an_opening_that_makes_no_sense_is_refused_and_others_go_on(
    change: dict[str, object], expected: type[OutriderError]
) -> None:
    async with recording_verifier() as (verifier, address), draft_app() as app, draft_call(app.address) as good:
        good.send(opening(address, "good"))
        await verifier.next()
        async with draft_call(app.address) as bad:
            bad.send(replace(opening(address, "bad"), **change))  # type: ignore[arg-type]
            assert isinstance(await error_of(bad.receive), expected)
        good.send(commit(20, greedy(PROMPT, 5), 1))
        assert (await verifier.next()).session_id == "good"


async def test_a_stream_that_does_not_begin_with_an_opening_is_refused() -> None:
    async with draft_app() as app, draft_call(app.address) as stream:
        stream.send(commit(0, (1,), 1))
        assert isinstance(await error_of(stream.receive), ProtocolError)


async def test_a_message_that_says_nothing_is_dropped_and_counted_and_the_session_goes_on() -> None:
    async with recording_verifier() as (verifier, address), draft_app() as app, channel(app.address) as to_worker:
        call = draft_pb2_grpc.DraftServiceStub(to_worker).Draft()
        await call.write(draft_request_to_proto(opening(address)))
        await verifier.next()
        await call.write(draft_pb2.DraftRequest())
        await until(lambda: counted(app, "malformed_messages") == 1)
        await call.write(draft_request_to_proto(commit(20, greedy(PROMPT, 5), 1)))
        assert (await verifier.next()).base_len == 25
        call.cancel()


@pytest.mark.parametrize("message", [commit(20, (VOCAB,), 1), opening("nowhere:1", attach=2)])
async def test_a_session_that_is_sent_what_no_orchestrator_says_is_ended(message: DraftRequestMessage) -> None:
    async with recording_verifier() as (verifier, address), draft_app() as app, draft_call(app.address) as stream:
        stream.send(opening(address))
        await verifier.next()
        stream.send(message)
        assert isinstance(await error_of(stream.receive), ProtocolError)


async def test_a_commit_against_the_chain_fails_only_its_session() -> None:
    async with recording_verifier() as (verifier, address), draft_app() as app:
        async with draft_call(app.address) as bad, draft_call(app.address) as good:
            bad.send(opening(address, "bad"))
            good.send(opening(address, "good"))
            for _ in range(2):
                await verifier.next()
            bad.send(commit(20, ((greedy(PROMPT, 1)[0] + 1) % VOCAB,), 0))
            assert isinstance(await error_of(bad.receive), ProtocolError)
            good.send(commit(20, greedy(PROMPT, 5), 1))
            assert (await verifier.next()).session_id == "good"


# --- the Propose stream -------------------------------------------------------------------------------------------


async def test_what_is_drafted_before_the_verifier_is_there_arrives_when_it_is() -> None:
    async with recording_verifier() as (_, address):
        pass
    async with draft_app() as app, draft_call(app.address) as stream:
        stream.send(opening(address))
        await until(lambda: counted(app, "propose_connects", result="failed") >= 1)
        async with recording_verifier(address) as (verifier, _):
            proposal = await verifier.next()
            assert isinstance(proposal, Proposal)
            assert proposal.token_ids == greedy(PROMPT, 4)


async def test_a_broken_stream_is_opened_again_and_what_fell_between_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("draft_service.proposals.FIRST_BACKOFF_S", 1.0)
    async with recording_verifier() as (verifier, address), draft_app() as app, draft_call(app.address) as stream:
        stream.send(opening(address))
        await verifier.next()
        verifier.hang_up.set()
        await until(lambda: verifier.ended == 1)
        await asyncio.sleep(0.02)
        stream.send(commit(20, greedy(PROMPT, 5), 1))
        verifier.hang_up.clear()
        await until(lambda: counted(app, "dropped_messages") >= 1)
        await until(lambda: len(verifier.streams) >= 2)
        stream.send(commit(25, greedy(PROMPT, 7)[5:6], 2))
        while True:
            proposal = await verifier.next()
            if proposal.epoch.round == 2:
                break
        assert isinstance(proposal, Proposal)
        assert proposal.base_len == 26


async def test_a_refused_vocabulary_fails_the_sessions_of_that_verifier_only() -> None:
    """Case 10, the draft worker's half: the reason reaches the orchestrator."""
    async with (
        recording_verifier() as (refusing, bad_address),
        recording_verifier() as (verifier, address),
        draft_app() as app,
        draft_call(app.address) as good,
        draft_call(app.address) as bad,
    ):
        refusing.refusal = VocabularyMismatch("id 7 is 'a' there and 'b' here")
        bad.send(opening(bad_address, "bad"))
        good.send(opening(address, "good"))
        error = await error_of(bad.receive)
        assert isinstance(error, VocabularyMismatch)
        assert "id 7" in error.message
        assert (await verifier.next()).session_id == "good"
        refusing.refusal = None
        async with draft_call(app.address) as again:
            again.send(opening(bad_address, "bad", attach=2))
            assert (await refusing.next()).session_id == "bad"


async def test_a_hint_starts_the_next_round_before_the_commit() -> None:
    async with recording_verifier() as (verifier, address), draft_app() as app, draft_call(app.address) as stream:
        opened = opening(address)
        stream.send(opened)
        await verifier.next()
        assert verifier.hellos[0].takes_hints
        *_, own = greedy(PROMPT, 5)
        verifier.streams[0].send(RollbackHint(opened.session_id, opened.epoch.next_round(), 24, own))
        proposal = await verifier.next()
        assert isinstance(proposal, Proposal)
        assert (proposal.epoch.round, proposal.base_len, proposal.seen_len) == (1, 25, 25)
        stream.send(commit(20, greedy(PROMPT, 5), 1))
        stream.send(commit(25, greedy(PROMPT, 10)[5:], 2))
        following = await verifier.next()
        assert isinstance(following, Proposal)
        assert (following.epoch.round, following.base_len) == (2, 30)
        assert counted(app, "rollback_hints", fate="taken") == 1


async def test_hints_of_strangers_and_unexpected_messages_of_a_verifier_change_nothing() -> None:
    async with (
        recording_verifier() as (verifier, address),
        recording_verifier() as (other, other_address),
        draft_app() as app,
        draft_call(app.address) as stream,
        draft_call(app.address) as of_other,
    ):
        opened, first, epoch = opening(address), opening(other_address, "other"), Epoch(Generation(1, 1), 1)
        stream.send(opened)
        of_other.send(first)
        await verifier.next()
        await other.next()
        own = RollbackHint(opened.session_id, epoch, 20, 3)
        other.streams[0].send(own)
        for odd in (
            replace(own, session_id=SessionId("nobody's")),
            replace(own, token_id=VOCAB),
            replace(own, epoch=Epoch(Generation(1, 2), 1)),
        ):
            verifier.streams[0].send(odd)
        verifier.streams[0].send(Draining("for the test"))
        await until(lambda: counted(app, "rollback_hints", fate="foreign") == 4)
        assert verifier.messages.empty()
        stream.send(commit(20, greedy(PROMPT, 5), 1))
        assert (await verifier.next()).base_len == 25


async def test_a_worker_may_be_set_to_take_no_hints() -> None:
    async with recording_verifier() as (verifier, address), draft_app(take_hints=False) as app:
        async with draft_call(app.address) as stream:
            stream.send(opening(address))
            await verifier.next()
        assert not verifier.hellos[0].takes_hints


async def test_an_unused_stream_is_closed_after_a_while() -> None:
    async with recording_verifier() as (verifier, address), draft_app(propose_linger_s=0.05) as app:
        async with draft_call(app.address) as stream:
            stream.send(opening(address))
            await verifier.next()
            await last_status(stream)
        await until(lambda: verifier.ended == 1)
        async with draft_call(app.address) as stream:
            stream.send(opening(address, attach=2))
            assert (await verifier.next()).epoch.generation.attach == 2


async def test_a_stream_that_a_verifier_ends_is_opened_again_only_when_a_session_needs_it() -> None:
    async with recording_verifier() as (verifier, address), draft_app() as app:
        async with draft_call(app.address) as stream:
            stream.send(opening(address))
            await verifier.next()
            await last_status(stream)
        verifier.hang_up.set()
        await until(lambda: verifier.ended == 1)
        verifier.hang_up.clear()
        await asyncio.sleep(0.2)  # a stream that is needed is opened again within 75 ms
        assert len(verifier.streams) == 1
        async with draft_call(app.address) as stream:
            stream.send(opening(address, attach=2))
            assert (await verifier.next()).epoch.generation.attach == 2


# --- a drafter that fails -----------------------------------------------------------------------------------------


class Moody(CausalLm):
    """Raises or hangs in a token step when told to."""

    def __init__(self) -> None:
        super().__init__(ToyRunner(LANGUAGE), vocab_len=VOCAB, kind="toy")
        self.raises = False
        self.hangs = threading.Event()
        self.hangs.set()

    def draw(self, batch: Sequence[Work]) -> list[Outcome]:
        self.hangs.wait(TIMEOUT_S)
        if self.raises:
            raise RuntimeError("bad mood")
        return super().draw(batch)

    def load(self, settings: DraftSettings, on_progress: Progress) -> Loaded:
        return Loaded(self, vocabulary(ToyTokenizer()))


async def test_a_drafter_that_raises_fails_its_sessions_and_serves_the_next() -> None:
    """Case 25: raises."""
    drafter = Moody()
    async with recording_verifier() as (verifier, address), draft_app(drafter.load) as app:
        drafter.raises = True
        async with draft_call(app.address) as stream:
            stream.send(opening(address))
            error = await error_of(stream.receive)
        assert isinstance(error, Internal)
        assert "bad mood" in error.message
        assert counted(app, "session_failures", cause="draw") == 1
        drafter.raises = False
        async with draft_call(app.address) as stream:
            stream.send(opening(address, attach=2))
            assert isinstance(await verifier.next(), Proposal)
        assert await health(app.address) == SERVING


async def test_a_drafter_that_hangs_is_seen_and_recovers() -> None:
    """Case 25: hangs."""
    drafter = Moody()
    async with recording_verifier() as (verifier, address), draft_app(drafter.load, hang_s=1.0) as app:
        drafter.hangs.clear()
        async with draft_call(app.address) as stream:
            stream.send(opening(address))
            error = await error_of(stream.receive)
        assert isinstance(error, Unavailable)
        assert "has not answered" in error.message
        await until(lambda: gauge(app, "degraded") == 1)
        assert await health(app.address) == NOT_SERVING
        assert (await describe(app.address)).draining
        drafter.hangs.set()
        await until(lambda: gauge(app, "degraded") == 0)
        async with draft_call(app.address) as stream:
            stream.send(opening(address, attach=2))
            while (await verifier.next()).epoch.generation.attach != 2:
                pass
        assert await health(app.address) == SERVING


async def test_a_drafter_that_keeps_failing_ends_the_worker() -> None:
    """Case 25: dies."""
    drafter = Moody()
    drafter.raises = True
    async with recording_verifier() as (_, address), draft_app(drafter.load) as app:
        for attach in range(5):
            async with draft_call(app.address) as stream:
                stream.send(opening(address, attach=attach))
                assert isinstance(await error_of(stream.receive), Internal | Unavailable)
        assert app.seats is not None
        await until(lambda: app.seats is not None and app.seats.trouble is not None)
        async with draft_call(app.address) as stream:
            stream.send(opening(address, attach=9))
            assert isinstance(await error_of(stream.receive), Unavailable)


async def test_a_drafter_that_cannot_be_loaded_is_not_serving_and_says_why() -> None:
    """Case 26."""
    async with draft_app(ready=False, drafter="causal_lm", model="/no/such/model") as app:

        async def given_up() -> bool:
            return "cannot" in (await unavailable(app.address)).message

        await until_async(given_up)
        error = await unavailable(app.address)
        assert "/no/such/model" in error.message
        assert await health(app.address) == NOT_SERVING
        async with draft_call(app.address) as stream:
            stream.send(opening("nowhere:1"))
            assert "/no/such/model" in (await error_of(stream.receive)).message


async def unavailable(address: str) -> Unavailable:
    with pytest.raises(Unavailable) as caught:
        await describe(address)
    return caught.value


# --- the process --------------------------------------------------------------------------------------------------


async def test_a_draining_worker_tells_its_sessions_and_refuses_new_ones() -> None:
    async with recording_verifier() as (verifier, address), draft_app() as app, draft_call(app.address) as stream:
        stream.send(opening(address))
        await verifier.next()
        draining = asyncio.create_task(app.drain())
        while not isinstance(await stream.receive(TIMEOUT_S), Draining):
            pass
        async with draft_call(app.address) as late:
            late.send(opening(address, "late"))
            assert isinstance(await error_of(late.receive), Unavailable)
        stream.send(commit(20, greedy(PROMPT, 5), 1))
        assert isinstance(await verifier.next(), Proposal)
        assert not draining.done()
        await last_status(stream)
        await asyncio.wait_for(draining, TIMEOUT_S)


async def test_the_worker_is_in_the_registry_while_it_serves(valkey_url: str) -> None:
    client = open_client(valkey_url)
    registry = Registry(client)
    try:
        async with draft_app(store_url=valkey_url, worker_id="draft-in-registry", max_sessions=7) as app:

            async def found() -> list[WorkerDescription]:
                return [w for w in await registry.workers("draft") if w.worker_id == "draft-in-registry"]

            await until_async(found)
            [worker] = await found()
            assert worker == await describe(app.address)
            assert (worker.drafter, worker.capacity, worker.address) == ("toy", 7, app.address)
        assert not await found()
    finally:
        await client.aclose()


async def test_the_process_serves_and_ends_with_status_0_on_sigterm() -> None:
    process, address = await start_process(OUTRIDER_DRAFT_DRAFTER="toy")
    try:
        await until_async(lambda: serves(address))
        async with recording_verifier() as (verifier, verifier_address), draft_call(address) as stream:
            stream.send(opening(verifier_address))
            assert isinstance(await verifier.next(), Proposal | Pass)
            await last_status(stream)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 60) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.usefixtures("logging_as_before")
def test_the_exit_status_is_1_when_the_model_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_DRAFT_MODEL", "/no/such/model")
    monkeypatch.setenv("OUTRIDER_DRAFT_LOAD_FAILURE_LINGER_S", "0.1")
    assert main() == 1


@pytest.mark.usefixtures("logging_as_before")
def test_the_exit_status_is_1_when_the_address_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("OUTRIDER_DRAFT_LISTEN", f"127.0.0.1:{taken.getsockname()[1]}")
        assert main() == 1


def test_a_setting_that_does_not_exist_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUTRIDER_DRAFT_MODELL", "x")
    assert main() == 2
    assert "OUTRIDER_DRAFT_MODELL" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "layers"), [("0,1,28,29", (0, 1, 28, 29)), ("", None), ("7", (7,))])
def test_kept_layers_are_a_list_of_numbers(
    monkeypatch: pytest.MonkeyPatch, text: str, layers: tuple[int, ...] | None
) -> None:
    monkeypatch.setenv("OUTRIDER_DRAFT_LAYERS", text)
    assert DraftSettings.load().layers == layers


@pytest.mark.parametrize("text", ["0,x", "0 1", "1.5"])
def test_kept_layers_that_are_no_numbers_are_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("OUTRIDER_DRAFT_LAYERS", text)
    with pytest.raises(InvalidRequest, match="OUTRIDER_DRAFT_LAYERS"):
        DraftSettings.load()


async def start_process(**settings: str) -> tuple[asyncio.subprocess.Process, str]:
    """Start a draft worker; return it with the address that it logs."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "draft_service",
        env={**os.environ, "GRPC_VERBOSITY": "ERROR", "OUTRIDER_DRAFT_LISTEN": "127.0.0.1:0", **settings},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    while True:
        line = (await asyncio.wait_for(process.stderr.readline(), 60)).decode()
        assert line, "the process ended"
        if "listens on" in line:
            return process, line.split()[-1]


def counted(app: DraftApp, name: str, **labels: str) -> float:
    return _sample(app, f"{name}_total", labels)


def gauge(app: DraftApp, name: str) -> float:
    return _sample(app, name, {})


def _sample(app: DraftApp, name: str, labels: dict[str, str]) -> float:
    return float(app.metrics.registry.get_sample_value(f"outrider_draft_{name}", labels) or 0.0)
