"""The verifier over real sockets: streams that open, break, lie, take over and drain."""

import asyncio
import os
import signal
import sys
import threading

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.codec.types import description_from_proto
from outrider.errors import (
    Cancelled,
    FailedPrecondition,
    InvalidRequest,
    NotFound,
    OutriderError,
    ProtocolError,
    ResourceExhausted,
    Unavailable,
    VocabularyMismatch,
)
from outrider.ids import Epoch, Generation, SessionId, TokenClass, TokenKind, WorkerId
from outrider.messages import (
    DecodeAttach,
    DecodeClose,
    Draining,
    Pass,
    Proposal,
    SamplingParams,
    TargetFeatures,
    VerdictCause,
    Vocabulary,
)
from outrider.rpc import Broken, Ended, channel, rpc_errors
from outrider.store.connect import open_client
from outrider.store.registry import Registry
from outrider.v1 import verify_pb2, verify_pb2_grpc
from tests.integration.verify_bench import (
    DRAFTER,
    LIMIT_S,
    PLAN,
    VOCABULARY,
    Control,
    ProposeStream,
    connected,
    control,
    drafter,
    expected_text,
    next_proposal,
    opening,
    propose_stream,
    undrafted,
    verifier,
)
from verify_service.app import VerifyApp
from verify_service.config import VerifySettings
from verify_service.loading import Loaded, Progress, load_target

TEXT = expected_text((1, 2, 3), 40)


async def health(app: VerifyApp) -> int:
    connection = channel(app.address)
    try:
        reply = await health_pb2_grpc.HealthStub(connection).Check(health_pb2.HealthCheckRequest(), timeout=LIMIT_S)
        return int(reply.status)
    finally:
        await connection.close()


async def settled(app: VerifyApp, num_sessions: int = 0) -> None:
    """Wait until the engine has so many sessions."""
    assert app.engine is not None
    for _ in range(int(LIMIT_S / 0.005)):
        if app.engine.num_sessions == num_sessions:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"{app.engine.num_sessions} sessions, not {num_sessions}")


async def draft_along(session: Control, proposals: ProposeStream, wrong_every: int = 3) -> list[int]:
    """Propose after every verdict, with one wrong token in every `wrong_every`-th proposal."""
    number = 0
    while len(session.committed) < session.opened.commit_limit:
        number += 1
        room = session.opened.commit_limit - len(session.committed)
        proposals.send(next_proposal(session, count=min(4, room), wrong_at=0 if number % wrong_every == 0 else -1))
        await session.verdict()
    return await session.finish()


# --- the ordinary course ------------------------------------------------------------------------------------------


async def test_a_drafted_session_says_what_the_model_says_and_a_description_tells_of_it() -> None:
    async with verifier() as app, connected(app) as stub:
        async with drafter(stub) as proposals, control(stub, opening()) as session:
            assert await draft_along(session, proposals) == TEXT
            assert {TokenKind.ACCEPTED, TokenKind.RECOVERED} <= set(session.kinds)
        described = description_from_proto((await stub.Describe(verify_pb2.VerifyServiceDescribeRequest())).worker)
        assert (described.role, described.model, described.vocabulary) == ("verify", "toy", VOCABULARY)
        assert described.address == app.address
        await settled(app)


async def test_sessions_run_side_by_side_on_one_propose_stream() -> None:
    async with verifier() as app, connected(app) as stub, drafter(stub) as proposals:

        async def one(index: int) -> list[int]:
            async with control(stub, opening(f"s{index}", token_ids=(index, 2, 3))) as session:
                return await draft_along(session, proposals, wrong_every=2 + index)

        texts = await asyncio.gather(*(one(index) for index in range(8)))
    assert list(texts) == [expected_text((index, 2, 3), 40) for index in range(8)]


async def test_hidden_states_come_back_on_the_propose_stream() -> None:
    async with verifier() as app, connected(app) as stub, propose_stream(stub, feature_layers=(-1,)) as proposals:
        await proposals.receive(LIMIT_S)
        async with control(stub, opening(patience_s=30.0)) as session:
            proposals.send(next_proposal(session))
            await session.verdict()
            first, second = [await proposals.receive(LIMIT_S) for _ in range(2)]
    assert isinstance(first, TargetFeatures)
    assert isinstance(second, TargetFeatures)
    assert (first.position, first.features.shape) == (0, (1, 2, 1))
    assert (second.position, second.features.shape) == (2, (1, 5, 1))


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"token_ids": (1, 2, VOCABULARY.size)}, "open.token_ids[2]"),
        ({"prompt_len": 0}, "open.prompt_len"),
        ({"commit_limit": 5000}, "open.commit_limit"),
        ({"token_ids": (1,) * 4097, "classes": (TokenClass.PROMPT,) * 4097}, "open.token_ids"),
        ({"sampling": SamplingParams(logit_bias=((VOCABULARY.size, 1.0),))}, "sampling.logit_bias"),
    ],
)
async def test_an_impossible_session_is_refused_by_the_name_of_its_field(
    changes: dict[str, object], field: str
) -> None:
    async with verifier() as app, connected(app) as stub, control(stub, undrafted(**changes)) as session:  # type: ignore[arg-type]
        error = await session.error()
        assert isinstance(error, InvalidRequest)
        assert error.field == field
        async with control(stub, undrafted("other")) as other:
            assert await other.finish() == TEXT


async def test_a_stream_must_begin_with_its_own_first_message() -> None:
    async with verifier() as app, connected(app) as stub:
        async with control(stub, opening()) as session:
            call = stub.Decode()
            await call.write(verify_pb2.DecodeRequest(close=verify_pb2.DecodeClose()))
            with pytest.raises(ProtocolError), rpc_errors():
                await call.read()
            assert isinstance(session, Control)
        call = stub.Decode()
        await call.done_writing()
        with pytest.raises(Cancelled), rpc_errors():
            await call.read()


async def test_a_drafter_of_another_vocabulary_or_with_impossible_wishes_is_refused() -> None:
    other = Vocabulary("f" * 64, VOCABULARY.size)
    async with verifier() as app, connected(app) as stub:
        async with propose_stream(stub, spoken=other) as proposals:
            end = await proposals.receive(LIMIT_S)
            assert isinstance(end, Broken)
            assert isinstance(end.error, VocabularyMismatch)
            assert "ffffffffffff" in end.error.message
        async with propose_stream(stub, feature_layers=(3,)) as proposals:
            end = await proposals.receive(LIMIT_S)
            assert isinstance(end, Broken)
            assert isinstance(end.error, FailedPrecondition)
            assert "(3,)" in end.error.message


async def test_a_session_too_many_is_refused_with_a_delay() -> None:
    async with verifier(max_sessions=1, max_waiting=0, retry_delay_s=0.7) as app, connected(app) as stub:
        async with control(stub, opening("first")):
            await settled(app, 1)
            async with control(stub, opening("second")) as second:
                error = await second.error()
        assert isinstance(error, ResourceExhausted)
        assert error.retry_delay_s == 0.7


# --- garbage, and messages out of order ---------------------------------------------------------------------------


def raw(**fields: object) -> verify_pb2.ProposeRequest:
    """Build a proposal that no encoder of ours would."""
    honest: dict[str, object] = {"session_id": "s", "base_len": 3, "seen_len": 3, "limit": 11, "token_ids": [1]}
    message = verify_pb2.Proposal(**{**honest, **fields})  # type: ignore[arg-type]
    message.epoch.generation.fence = 1
    return verify_pb2.ProposeRequest(proposal=message)


GARBAGE = {
    "an id below 0": raw(token_ids=[-1]),
    "an id of 2**31": raw(token_ids=[2**31]),
    "the vocabulary's size": raw(token_ids=[VOCABULARY.size]),
    "an empty list": raw(token_ids=[]),
    "more than asked": raw(token_ids=[1] * 5),
    "more than anybody may": raw(token_ids=[1] * 300),
    "rows that nobody wants": raw(rows=verify_pb2.Proposal().rows),
    "rows that do not fit": raw(rows={"lengths": [2], "token_ids": b"", "counts": b""}),
    "no message at all": verify_pb2.ProposeRequest(),
    "a session nobody has": raw(session_id="nobody", token_ids=[-1]),
    "a second hello": verify_pb2.ProposeRequest(hello=verify_pb2.ProposeHello(worker_id="x")),
}


@pytest.mark.parametrize("kind", GARBAGE)
async def test_garbage_is_dropped_and_the_text_stays(kind: str) -> None:
    async with verifier() as app, connected(app) as stub, drafter(stub) as proposals:
        async with control(stub, opening()) as session, control(stub, opening("neighbour")) as neighbour:
            for _ in range(3):
                proposals.send(GARBAGE[kind])
            texts = await asyncio.gather(draft_along(session, proposals), draft_along(neighbour, proposals))
        assert list(texts) == [TEXT, TEXT]
        assert VerdictCause.RESET not in [verdict.cause for verdict in neighbour.verdicts]


async def test_a_drafter_that_sends_only_garbage_is_cut_off_from_that_session_only() -> None:
    async with verifier() as app, connected(app) as stub, drafter(stub) as proposals:
        async with control(stub, opening(patience_s=5.0)) as session, control(stub, opening("neighbour")) as neighbour:
            await settled(app, 2)
            for _ in range(8):
                proposals.send(GARBAGE["an id below 0"])
            texts = await asyncio.gather(session.finish(), draft_along(neighbour, proposals))
        assert list(texts) == [TEXT, TEXT]
        assert VerdictCause.QUARANTINED in [verdict.cause for verdict in session.verdicts]
        assert TokenKind.ACCEPTED in neighbour.kinds


@pytest.mark.parametrize("fault", ["repeated", "replayed", "reordered", "lost"])
async def test_proposals_repeated_replayed_reordered_or_lost_leave_the_text_alone(fault: str) -> None:
    async with verifier() as app, connected(app) as stub, drafter(stub) as proposals:
        sent: list[Proposal] = []

        def unreliable(session: Control) -> None:
            pair = [next_proposal(session), next_proposal(session, skip=4)]
            orders = {
                "repeated": [pair[0], pair[0], pair[1], pair[1]],
                "replayed": [*pair, *sent],
                "reordered": [pair[1], pair[0]],
                "lost": [pair[1]],
            }
            sent.extend(pair)
            for message in orders[fault]:
                proposals.send(message)

        async with control(stub, opening(patience_s=0.05)) as session, control(stub, undrafted("b")) as neighbour:
            while len(session.committed) < 30:
                unreliable(session)
                await session.verdict()
            assert await session.finish() == TEXT
            assert await neighbour.finish() == TEXT


async def test_an_attach_or_progress_that_comes_late_changes_nothing() -> None:
    async with (
        verifier() as app,
        connected(app) as stub,
        drafter(stub),
        control(stub, opening(patience_s=1.0)) as session,
    ):
        session.stream.send(DecodeAttach(Generation(1, 2), DRAFTER))
        assert (await session.verdict()).cause == VerdictCause.ATTACHED
        session.stream.send(DecodeAttach(Generation(1, 1), WorkerId("late")))
        assert await session.finish() == TEXT
        assert {verdict.next_epoch.generation for verdict in session.verdicts} == {Generation(1, 2)}


# --- streams that break -------------------------------------------------------------------------------------------


async def test_a_drafter_that_hangs_costs_patience_and_one_that_passes_costs_nothing() -> None:
    async with verifier() as app, connected(app) as stub, drafter(stub) as proposals:
        async with control(stub, opening(patience_s=0.05)) as session:
            assert await session.finish() == TEXT
            causes = [verdict.cause for verdict in session.verdicts]
            assert causes[:3] == [VerdictCause.PATIENCE] * 3
            assert set(causes[3:]) == {VerdictCause.PLAIN}
        async with control(stub, opening("passed", patience_s=60.0)) as session:
            proposals.send(Pass(SessionId("passed"), session.epoch, 3, 43))
            assert await session.finish() == TEXT


async def test_a_drafter_that_dies_resets_its_sessions_and_the_text_goes_on() -> None:
    async with verifier() as app, connected(app) as stub, control(stub, undrafted("alone")) as alone:
        async with control(stub, opening(patience_s=1.0)) as session:
            call = stub.Propose()
            async with drafter(stub) as proposals:
                proposals.send(next_proposal(session))
                await session.verdict()
                base = len(session.committed)
            verdict = await session.verdict()
            assert (verdict.cause, verdict.token_ids, verdict.start) == (VerdictCause.RESET, (), base)
            assert verdict.next_epoch == Epoch(Generation(1, 0), verdict.epoch.round + 1)
            call.cancel()
            assert await session.finish() == TEXT
        assert await alone.finish() == TEXT
        assert VerdictCause.RESET not in [verdict.cause for verdict in alone.verdicts]


async def test_an_oversize_message_closes_that_stream_only() -> None:
    async with verifier(max_message_bytes=1 << 16) as app, connected(app) as stub:
        async with drafter(stub) as proposals, control(stub, opening(patience_s=30.0)) as session:
            await settled(app, 1)
            proposals.send(raw(session_id="x" * (1 << 17)))
            assert (await session.verdict()).cause == VerdictCause.RESET
            end = await proposals.receive(LIMIT_S)
            assert isinstance(end, Broken)
            async with drafter(stub) as again:
                assert await draft_along(session, again) == TEXT
                assert TokenKind.ACCEPTED in session.kinds


async def test_a_reopened_propose_stream_ends_the_older_one_and_resets_its_sessions() -> None:
    async with (
        verifier() as app,
        connected(app) as stub,
        drafter(stub) as older,
        control(stub, opening(patience_s=30.0)) as session,
    ):
        await settled(app, 1)
        async with drafter(stub) as newer:
            end = await older.receive(LIMIT_S)
            assert isinstance(end, Broken)
            assert isinstance(end.error, FailedPrecondition)
            assert (await session.verdict()).cause == VerdictCause.RESET
            assert await draft_along(session, newer) == TEXT


async def test_a_proposal_before_its_session_is_parked_and_delivered() -> None:
    async with verifier() as app, connected(app) as stub, drafter(stub) as proposals:
        tokens = tuple(TEXT[:4])
        proposals.send(Proposal(SessionId("s"), Epoch(Generation(1, 0)), 3, 3, 3 + PLAN.window, tokens))
        await asyncio.sleep(0.1)
        async with control(stub, opening(patience_s=30.0)) as session:
            assert (await session.verdict()).token_ids == tokens


async def test_a_client_that_disappears_frees_its_place_at_once() -> None:
    async with verifier(max_sessions=1, max_waiting=0) as app, connected(app) as stub:
        for how in ("cancel", "half-close"):
            async with control(stub, opening(how)) as session:
                await settled(app, 1)
                if how == "cancel":
                    session.call.cancel()
                else:
                    await session.call.done_writing()
                    assert isinstance(await session.error(), Cancelled)
                await settled(app, 0)
            async with control(stub, undrafted("after")) as after:
                assert await after.finish() == TEXT


async def test_a_newer_generation_takes_the_session_over_and_an_older_one_cannot() -> None:
    async with verifier() as app, connected(app) as stub, control(stub, opening()) as old:
        await settled(app, 1)
        newer = undrafted(generation=Generation(2, 0))
        async with control(stub, newer) as new:
            error = await old.error()
            assert isinstance(error, FailedPrecondition)
            assert "superseded" in error.message
            async with control(stub, opening(generation=Generation(1, 9))) as late:
                assert isinstance(await late.error(), FailedPrecondition)
            assert await new.finish() == TEXT


# --- start and stop -----------------------------------------------------------------------------------------------


async def test_health_is_not_serving_until_the_model_is_there() -> None:
    gate = threading.Event()

    def slowly(settings: VerifySettings, on_progress: Progress) -> Loaded:
        gate.wait(LIMIT_S)
        return load_target(settings, on_progress)

    app = VerifyApp(VerifySettings.load(model="toy"), slowly)
    await app.start()
    running = asyncio.create_task(app.run())
    try:
        assert await health(app) == health_pb2.HealthCheckResponse.NOT_SERVING
        async with connected(app) as stub:
            with pytest.raises(Unavailable, match="being loaded"), rpc_errors():
                await stub.Describe(verify_pb2.VerifyServiceDescribeRequest())
            gate.set()
            await app.ready.wait()
            assert await health(app) == health_pb2.HealthCheckResponse.SERVING
            await stub.Describe(verify_pb2.VerifyServiceDescribeRequest())
    finally:
        gate.set()
        await app.server.stop(0.0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_model_that_does_not_exist_ends_the_verifier_with_the_reason() -> None:
    app = VerifyApp(VerifySettings.load(model="./no/such/folder"))
    await app.start()
    try:
        with pytest.raises(NotFound, match="no/such/folder"):
            await app.run()
        assert await health(app) == health_pb2.HealthCheckResponse.NOT_SERVING
    finally:
        await app.server.stop(0.0)


async def test_a_draining_verifier_refuses_newcomers_tells_everybody_and_lets_the_running_finish() -> None:
    async with verifier(toy_delay_s=0.005) as app, connected(app) as stub:
        async with drafter(stub) as proposals, control(stub, undrafted()) as session:
            await session.verdict()
            draining = asyncio.create_task(app.drain())
            assert await proposals.receive(LIMIT_S) == Draining("the verifier is stopping")
            async with control(stub, opening("late")) as late:
                error = await late.error()
            assert isinstance(error, Unavailable)
            assert not draining.done()
            assert await session.finish() == TEXT
            assert session.draining
            async with asyncio.timeout(LIMIT_S):
                await draining
        assert app.describe().draining


async def test_a_draining_verifier_without_sessions_lets_its_draft_workers_go_at_once() -> None:
    async with verifier() as app, connected(app) as stub, drafter(stub) as proposals:
        async with asyncio.timeout(LIMIT_S / 3):
            await app.drain()
            await app.server.stop(LIMIT_S)
        assert await proposals.receive(LIMIT_S) == Draining("the verifier is stopping")
        assert isinstance(await proposals.receive(LIMIT_S), Ended)


async def test_a_draft_workers_stream_lasts_as_long_as_a_draining_verifiers_last_session() -> None:
    async with verifier(toy_delay_s=0.005) as app, connected(app) as stub, drafter(stub) as proposals:
        async with control(stub, undrafted()) as session:
            await session.verdict()
            draining = asyncio.create_task(app.drain())
            assert await proposals.receive(LIMIT_S) == Draining("the verifier is stopping")
            with pytest.raises(TimeoutError):
                await proposals.receive(0.05)
            assert await session.finish() == TEXT
        assert isinstance(await proposals.receive(LIMIT_S), Ended)
        await draining
        async with propose_stream(stub, WorkerId("late")) as late:
            refused = await late.receive(LIMIT_S)
        assert isinstance(refused, Broken)
        assert isinstance(refused.error, Unavailable)


async def test_an_engine_that_breaks_ends_the_process_and_all_streams(caplog: pytest.LogCaptureFixture) -> None:
    app = VerifyApp(VerifySettings.load(model="toy"))
    await app.start()
    running = asyncio.create_task(app.run())
    await app.ready.wait()
    assert app.engine is not None
    try:
        async with connected(app) as stub, control(stub, opening()) as session:
            await settled(app, 1)
            app.engine.post("nonsense")  # type: ignore[arg-type]
            assert isinstance(await session.error(), Unavailable)
            with pytest.raises(ExceptionGroup):
                await running
        assert await health(app) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert "the engine has stopped" in caplog.text
    finally:
        await app.server.stop(0.0)


async def test_the_process_announces_itself_serves_and_stops_in_good_order(valkey_url: str) -> None:
    environment = {
        **os.environ,
        "OUTRIDER_VERIFY_MODEL": "toy",
        "OUTRIDER_VERIFY_STORE_URL": valkey_url,
        "OUTRIDER_VERIFY_WORKER_ID": "verify-process",
        "OUTRIDER_VERIFY_GRACE_S": "5",
    }
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "verify_service", env=environment)
    client = open_client(valkey_url)
    registry = Registry(client)
    try:
        async with asyncio.timeout(60):
            while not (found := [w for w in await registry.workers("verify") if w.worker_id == "verify-process"]):
                assert process.returncode is None
                await asyncio.sleep(0.1)
        connection = channel(found[0].address)
        stub = verify_pb2_grpc.VerifyServiceStub(connection)
        async with control(stub, undrafted()) as session:
            assert await session.finish() == TEXT
        async with control(stub, opening("unfinished", patience_s=60.0)) as session:
            await asyncio.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            session.stream.send(DecodeClose())
            assert isinstance(await session.stream.receive(LIMIT_S), Draining | Ended)
            async with asyncio.timeout(LIMIT_S):
                assert await process.wait() == 0
        await connection.close()
        assert "verify-process" not in [worker.worker_id for worker in await registry.workers("verify")]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await client.aclose()


def test_a_bad_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_VERIFY_MAX_SESIONS", "3")
    with pytest.raises(OutriderError, match="OUTRIDER_VERIFY_MAX_SESIONS"):
        VerifySettings.load()
