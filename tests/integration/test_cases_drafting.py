"""Known traps of drafting that pauses, stutters or never begins, seen through the orchestrator's API."""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draft_service.app import DraftApp
from draft_service.config import DraftSettings
from outrider.errors import Unavailable
from outrider.generation import SpeculationChoice, Started
from outrider.ids import TokenKind
from outrider.rpc import channel, rpc_errors
from outrider.v1 import draft_pb2, draft_pb2_grpc, verify_pb2
from tests.integration.cluster_bench import Bench, Heard, Running, hear
from tests.integration.odd_parts import LANGUAGE, cluster, language_drafter
from tests.integration.test_cases_peers import OFF, PROMPT, SAID, STUTTERS, Session, ask, greedy, rogue_cluster

OTHER = (7, 3)
SEQUENTIAL = SpeculationChoice(gamma=4, window=4)
NO_MODEL = "/no/such/model"


def kinds_of(heard: Heard) -> Counter[TokenKind]:
    return Counter(kind for chunk in heard.chunks for kind in chunk.kinds)


async def test_case_19_after_fifty_plain_tokens_a_perfect_drafter_is_perfect_from_the_first_test(
    valkey_url: str,
) -> None:
    """Off for a turn and on for the next: a drafter that had not caught up would be rejected at once."""
    async with cluster(valkey_url, LANGUAGE, [language_drafter(LANGUAGE)], adaptive=False) as client:
        plain = await hear(client, ask(max_tokens=50, speculation=OFF))
        started = plain.events[0]
        assert isinstance(started, Started)
        assert kinds_of(plain) == {TokenKind.PLAIN: 50}
        drafted = await hear(
            client, replace(ask(OTHER, max_tokens=40, speculation=SEQUENTIAL), session_id=started.session_id)
        )
    assert drafted.token_ids == greedy([*PROMPT, *plain.token_ids, *OTHER], 40)
    figures = drafted.finished.figures
    assert figures.num_accepted == figures.num_tested >= 24


@pytest.mark.parametrize("fault", STUTTERS)
async def test_case_24_a_drafter_that_stutters_in_one_session_touches_no_other(valkey_url: str, fault: str) -> None:
    def says(session: Session) -> list[verify_pb2.ProposeRequest]:
        return [session.honest()] if tuple(session.ids[:2]) == OTHER else STUTTERS[fault](session)

    async with rogue_cluster(valkey_url, says) as (client, bench):
        stuttered, other = await asyncio.gather(hear(client, ask()), hear(client, ask(OTHER)))
        engine = bench.verifiers[0].engine
        assert engine is not None
        dropped = {name: engine.counters[name] for name in ("duplicate", "stale", "gap", "garbage")}
    assert stuttered.token_ids == SAID
    assert sum(dropped.values()) >= 3, "the messages were there, and were found wanting"
    assert other.token_ids == greedy(OTHER, 60)
    figures = other.finished.figures
    assert figures.num_accepted == figures.num_tested >= 30
    assert not figures.speculation_off


async def test_case_26_a_worker_without_its_model_says_why_and_the_cluster_serves_without_it(valkey_url: str) -> None:
    async with Bench(valkey_url) as bench:
        verifier, _ = await bench.verifier()
        broken = DraftApp(DraftSettings(drafter="causal_lm", model=NO_MODEL))
        await broken.start()
        running = asyncio.create_task(broken.run())
        try:
            assert NO_MODEL in await reason_of(broken.address)
            async with channel(broken.address) as to:
                health = await health_pb2_grpc.HealthStub(to).Check(health_pb2.HealthCheckRequest())
            assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
            alone = (await bench.orchestrator([verifier], [Running(broken)]))[2]
            heard = await hear(alone, ask())
            assert heard.token_ids == SAID
            assert kinds_of(heard) == {TokenKind.PLAIN: 60}
            assert heard.finished.figures.speculation_off == "no_drafter"
            good, _ = await bench.drafter()
            beside = (await bench.orchestrator([verifier], [Running(broken), good]))[2]
            heard = await hear(beside, ask())
            assert heard.token_ids == SAID
            assert kinds_of(heard)[TokenKind.ACCEPTED] > 0
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await broken.server.stop(0)


async def reason_of(address: str) -> str:
    """Return why a draft worker does not serve, once it has given up loading."""
    async with channel(address) as to, asyncio.timeout(60):
        stub = draft_pb2_grpc.DraftServiceStub(to)
        while True:
            try:
                with rpc_errors():
                    await stub.Describe(draft_pb2.DraftServiceDescribeRequest())
            except Unavailable as error:
                if "cannot" in error.message:
                    return error.message
            await asyncio.sleep(0.05)
