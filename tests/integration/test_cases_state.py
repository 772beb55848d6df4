"""Known traps of state: a draft switched off and on again, and clients that leave at the worst moments."""

import asyncio
from contextlib import aclosing
from itertools import groupby
from typing import Any

import pytest

from draft_service.app import DraftApp
from orchestrator.app import OrchestratorApp
from orchestrator.events import Tuned
from outrider.client import Client
from outrider.generation import Chunk, GenerationRequest, SpeculationChoice, Started, TokenPrompt
from outrider.ids import SessionId, TokenKind
from outrider.messages import SamplingParams, Speculation
from outrider.noise import Purpose, derive_key, seed_key
from outrider.sampling import coupled_token, greedy_token
from tests.integration.cluster_bench import Bench, Heard, hear, until
from tests.integration.odd_parts import LANGUAGE
from verify_service.app import VerifyApp

PROMPT = (5, 9, 12)
ON, OFF = Speculation(4, 4, 8), Speculation()


def ask(max_tokens: int, **fields: Any) -> GenerationRequest:
    known: dict[str, Any] = {
        "max_tokens": max_tokens, "sampling": SamplingParams(temperature=0.0), "ignore_eos": True,
        "return_token_origin": True, "speculation": SpeculationChoice(gamma=4, window=8), **fields,
    }  # fmt: skip
    return GenerationRequest(TokenPrompt(PROMPT), **known)


# --- off and on again ---------------------------------------------------------------------------------------------


def said(count: int, seed: int | None) -> list[int]:
    """Return what the model says behind the prompt, straight from its law."""
    ids, key = list(PROMPT), derive_key(seed_key(seed or 0), Purpose.FIELD)
    while len(ids) < len(PROMPT) + count:
        law = LANGUAGE.probs(ids)
        ids.append(greedy_token(law) if seed is None else coupled_token(law, key, 0, len(ids)))
    return ids[len(PROMPT) :]


def tune(app: OrchestratorApp, session_id: SessionId, speculation: Speculation) -> None:
    """Let a running generation draft otherwise from now on, as its policy would."""
    assert app.sessions is not None
    driver = app.sessions._running[session_id]
    driver._tuning.speculation = speculation  # else the next change of patience would bring the old plan back
    driver.feed(Tuned(speculation, 2.0))


def kinds(heard: Heard) -> list[TokenKind]:
    return [kind for chunk in heard.chunks for kind in chunk.kinds]


async def switching(app: OrchestratorApp, client: Client, request: GenerationRequest) -> Heard:
    """Run a request; after 40 tokens nothing is drafted, until 50 tokens in a row have been decoded plain."""
    heard = Heard([])
    plans = [ON, OFF]
    async for event in client.generate(request):
        heard.events.append(event)
        if isinstance(event, Chunk):
            heard.chunks.append(event)
        ready = len(heard.token_ids) >= 40 if len(plans) == 2 else kinds(heard)[-50:] == [TokenKind.PLAIN] * 50
        if plans and ready:
            started = heard.events[0]
            assert isinstance(started, Started)
            tune(app, started.session_id, plans.pop())
    return heard


@pytest.mark.parametrize("seed", [None, 4], ids=["greedy", "seeded"])
async def test_case_19_a_perfect_drafter_is_perfect_again_at_once_after_fifty_tokens_without_it(
    valkey_url: str, seed: int | None
) -> None:
    fields: dict[str, Any] = {} if seed is None else {"seed": seed, "sampling": SamplingParams()}
    async with Bench(valkey_url) as bench:
        verifier, _ = await bench.verifier(toy_delay_s=0.02)
        drafter, _ = await bench.drafter(toy_agreement=1.0)
        _, app, client = await bench.orchestrator([verifier], [drafter], adaptive=False)
        heard = await switching(app, client, ask(300, **fields))
    assert heard.token_ids == said(300, seed)
    figures = heard.finished.figures
    assert figures.num_accepted == figures.num_tested > 120, "those of the first rounds after the pause too"
    runs = [(kind, len(list(run))) for kind, run in groupby(kinds(heard))]
    pause = max(runs, key=lambda run: run[1] * (run[0] is TokenKind.PLAIN))
    assert pause[1] >= 50
    after = [length for kind, length in runs[runs.index(pause) + 1 :] if kind is TokenKind.PLAIN]
    assert sum(after) <= 1, "drafting has begun again for good"


# --- turns --------------------------------------------------------------------------------------------------------


async def second_turn(client: Client, *, leaves: bool) -> Heard:
    """Ask twice in one session; whoever leaves does so before the second answer's first token, and comes back."""
    started = (await hear(client, ask(5))).events[0]
    assert isinstance(started, Started)
    request = ask(12, session_id=started.session_id)
    if not leaves:
        return await hear(client, request)
    async with aclosing(client.generate(request)) as events:
        started = await anext(events)
    assert isinstance(started, Started)
    return Heard([event async for event in client.resume(started.session_id, started.prompt_len)])


async def test_a_second_turn_that_was_left_before_its_first_token_can_be_resumed(valkey_url: str) -> None:
    async with Bench(valkey_url) as bench:
        verifier, _ = await bench.verifier(toy_delay_s=0.05)
        drafter, _ = await bench.drafter(toy_agreement=1.0)
        _, _, client = await bench.orchestrator([verifier], [drafter])
        whole, resumed = [await second_turn(client, leaves=leaves) for leaves in (False, True)]
    assert len(whole.token_ids) == 12
    assert resumed.token_ids == whole.token_ids
    assert resumed.text == whole.text


# --- clients that leave -------------------------------------------------------------------------------------------

SLOW_S = 0.8
"""What a client leaves in the middle of."""
MOMENTS = {
    "while a draft is pending": (0.0, SLOW_S, SLOW_S / 3, (0, 1)),
    "while a verify is pending": (SLOW_S, 0.0, SLOW_S / 3, (1, 0)),
    "in between": (0.02, 0.02, 0.0, (1, 1)),
}
"""Seconds of a pass and of a draft's step, seconds from a token until the client leaves, and how many passes and steps
there may be from then on: in the first two moments there must be just so many, for they are under way."""


def work_done(verify: VerifyApp, draft: DraftApp) -> tuple[int, int]:
    """Return the passes and the draft's steps that have come to their end."""
    assert verify.engine is not None
    steps = draft.metrics.registry.get_sample_value("outrider_draft_step_seconds_count")
    return verify.engine.counters["decode_passes"], int(steps or 0)


def places_free(verify: VerifyApp, draft: DraftApp) -> bool:
    assert verify.engine is not None
    assert draft.seats is not None
    return verify.engine.num_sessions == 0 and len(draft.seats) == 0


@pytest.mark.parametrize("moment", MOMENTS)
async def test_case_22_a_client_that_leaves_frees_its_places_within_a_round_and_a_burst_passes(
    valkey_url: str, moment: str
) -> None:
    verify_s, draft_s, wait_s, may_follow = MOMENTS[moment]
    speculation = SpeculationChoice(gamma=1, window=1)
    async with Bench(valkey_url) as bench:
        verifier, verify = await bench.verifier(toy_delay_s=verify_s, max_sessions=2, max_waiting=0)
        drafter, draft = await bench.drafter(toy_delay_s=draft_s, toy_agreement=1.0, max_sessions=2)
        _, app, client = await bench.orchestrator([verifier], [drafter], adaptive=False)
        async with aclosing(client.generate(ask(100, speculation=speculation))) as events:
            async for event in events:
                if isinstance(event, Chunk) and TokenKind.ACCEPTED in event.kinds:
                    break
            await asyncio.sleep(wait_s)
            before = work_done(verify, draft)
        await until(lambda: places_free(verify, draft))
        await until(lambda: app.sessions is not None and len(app.sessions) == 0)
        await asyncio.sleep(SLOW_S)
        followed = tuple(now - then for now, then in zip(work_done(verify, draft), before, strict=True))
        assert followed == may_follow if wait_s else all(n <= m for n, m in zip(followed, may_follow, strict=True))
        assert verify.engine is not None
        assert verify.engine._runner.kv_usage.used == 0
        burst = await asyncio.gather(*(hear(client, ask(3, speculation=speculation)) for _ in range(2)))
    assert burst[0].token_ids == burst[1].token_ids
    assert len(burst[0].token_ids) == 3
