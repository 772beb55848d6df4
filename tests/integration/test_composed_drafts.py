"""A client's prediction and several drafters of one worker, through the orchestrator's API."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from draft_service.drafters.composed import Composed
from draft_service.drafters.prediction import PredictionDrafter
from draft_service.drafters.prompt_lookup import PromptLookup
from draft_service.drafters.protocol import Drafter
from outrider.client import Client
from outrider.errors import InvalidRequest
from outrider.generation import (
    GenerationRequest,
    Notice,
    SpeculationChoice,
    Started,
    TextPrediction,
    TextPrompt,
    TokenPrediction,
    TokenPrompt,
)
from outrider.ids import Mode, TokenKind
from outrider.messages import SamplingParams
from outrider.model.toy import ToyLanguage
from outrider.store.connect import open_client
from outrider.store.sessions import SessionStore
from tests.integration.cluster_bench import Bench, Heard, hear
from tests.integration.odd_parts import SIZE, cluster

KINDS = "prediction,prompt_lookup,toy"
OFF = SpeculationChoice(off=True)
FLAT = ToyLanguage(SIZE, seed=3, order=0, sharpness=1.0)
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": SamplingParams(temperature=0.0)},
    "coupled": {"sampling": SamplingParams(), "seed": 11},
    "rejection": {"sampling": SamplingParams(), "mode": Mode.REJECTION},
}


def ask(**fields: Any) -> GenerationRequest:
    known: dict[str, Any] = {
        "max_tokens": 40, "ignore_eos": True, "speculation": SpeculationChoice(gamma=4, window=8),
        "return_token_origin": True, **MODES["greedy"], **fields,
    }  # fmt: skip
    return GenerationRequest(known.pop("prompt", TextPrompt("the cat sat on ")), **known)


@pytest.fixture(scope="module")
async def bench(valkey_url: str) -> AsyncIterator[Bench]:
    async with Bench(valkey_url) as made:
        yield made


@pytest.fixture(scope="module")
async def client(bench: Bench) -> Client:
    """A cluster with one worker of several drafters; its model is right half of the time."""
    verifier, _ = await bench.verifier()
    drafter, _ = await bench.drafter(drafter=KINDS, toy_agreement=0.5, label="blue")
    return (await bench.orchestrator([verifier], [drafter], adaptive=False))[2]


def edited(ids: list[int]) -> tuple[int, ...]:
    """Return a text with a few tokens replaced, left out and put in."""
    return (*ids[:8], 5, *ids[9:16], *ids[18:30], 6, 7, *ids[30:])


def reasons(heard: Heard) -> list[str]:
    return [event.reason for event in heard.events if isinstance(event, Notice)]


@pytest.mark.parametrize("mode", ["greedy", "coupled"])
async def test_the_text_is_the_twins_whoever_drafts_and_whatever_is_expected(client: Client, mode: str) -> None:
    twin = await hear(client, ask(speculation=OFF, **MODES[mode]))
    expected = edited(twin.token_ids)
    predicted = await hear(client, ask(prediction=TokenPrediction(expected), **MODES[mode]))
    assert (predicted.token_ids, predicted.text) == (twin.token_ids, twin.text)
    figures = predicted.finished.figures
    assert figures.accepted_prediction_tokens == 37, "40 said, one replaced, two left out of what was expected"
    assert figures.rejected_prediction_tokens == len(expected) - 37
    for drafter in (*KINDS.split(","), KINDS, "blue", ""):
        heard = await hear(client, ask(drafter=drafter, prediction=TokenPrediction(expected), **MODES[mode]))
        assert heard.token_ids == twin.token_ids
        one_of = [drafter] if drafter in KINDS.split(",") else [*KINDS.split(","), KINDS]
        assert heard.finished.figures.drafter in one_of
        assert reasons(heard) == []


async def test_a_prediction_that_comes_true_saves_most_passes(client: Client) -> None:
    twin = await hear(client, ask(speculation=OFF))
    heard = await hear(client, ask(prediction=TokenPrediction(tuple(twin.token_ids)), drafter="prediction"))
    assert heard.token_ids == twin.token_ids
    figures = heard.finished.figures
    assert figures.tokens_per_round > 3.0
    assert (figures.drafter, figures.num_accepted) == ("prediction", figures.num_tested)


async def test_what_is_expected_stays_with_the_session_until_its_next_turn(bench: Bench, client: Client) -> None:
    heard = await hear(client, ask(prediction=TokenPrediction((1, 2, 3))))
    started = heard.events[0]
    assert isinstance(started, Started)
    of_store = open_client(bench.store_url)
    try:
        store = SessionStore(of_store)
        assert (await store.read_state(started.session_id)).prediction == (1, 2, 3)
        again = [event async for event in client.resume(started.session_id, started.prompt_len)]
        assert Heard(again).token_ids == heard.token_ids
        await hear(client, replace(ask(), session_id=started.session_id))
        assert (await store.read_state(started.session_id)).prediction == ()
    finally:
        await of_store.aclose()


async def test_a_drafter_that_nobody_offers_is_told_with_those_that_are_and_the_text_comes_plain(
    client: Client,
) -> None:
    heard = await hear(client, ask(drafter="medusa"))
    notices = [event for event in heard.events if isinstance(event, Notice)]
    assert [notice.reason for notice in notices] == ["drafter_not_offered"]
    assert all(word in notices[0].text for word in ("'medusa'", "blue", "prompt_lookup", KINDS))
    figures = heard.finished.figures
    assert (figures.speculation_off, figures.num_drafted) == ("drafter_not_offered", 0)
    assert heard.token_ids == (await hear(client, ask(speculation=OFF))).token_ids
    assert {"blue", "prediction", "toy"} <= set((await client.models())[0].drafters)


async def test_a_prediction_that_nobody_looks_at_is_told(bench: Bench) -> None:
    verifier, _ = await bench.verifier()
    drafter, _ = await bench.drafter()
    client = (await bench.orchestrator([verifier], [drafter]))[2]
    heard = await hear(client, ask(prediction=TokenPrediction((1, 2, 3))))
    assert reasons(heard) == ["prediction_unused"]
    assert heard.finished.figures.drafter == "toy"


@pytest.mark.parametrize(
    ("prediction", "field"),
    [
        (TokenPrediction((1, SIZE)), "prediction.token_ids[1]"),
        (TokenPrediction((-1,)), "prediction.token_ids[0]"),
        (TokenPrediction((2**31,)), "prediction.token_ids[0]"),
        (TokenPrediction(()), "prediction.token_ids"),
        (TextPrediction("the cat " * 20_000), "prediction.text"),
    ],
    ids=["past the vocabulary", "negative", "past all ids", "none", "too long"],
)
async def test_case_23_impossible_predictions_are_named_and_not_drafted(
    client: Client, prediction: TextPrediction | TokenPrediction, field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await hear(client, ask(prediction=prediction))
    assert caught.value.field == field


@pytest.mark.parametrize("drafter", ["prediction", "prompt_lookup"])
@pytest.mark.parametrize("mode", ["greedy", "coupled", "rejection"])
async def test_case_15_a_banned_token_is_neither_predicted_nor_copied_and_never_appears(
    valkey_url: str, drafter: str, mode: str
) -> None:
    banned = int(FLAT.probs(()).argmax())
    fields = MODES[mode]
    sampling = replace(fields["sampling"], logit_bias=((banned, -100.0),))
    copier = {"prediction": PredictionDrafter, "prompt_lookup": PromptLookup}[drafter](SIZE, context_len=1000)
    request = ask(
        prompt=TokenPrompt((banned,) * 12), prediction=TokenPrediction((banned,) * 60), max_tokens=30,
        **{**fields, "sampling": sampling},
    )  # fmt: skip
    async with cluster(valkey_url, FLAT, [copier], adaptive=False) as client:
        heard = await hear(client, request)
    assert banned not in heard.token_ids
    assert len(heard.token_ids) == 30
    # What a drafter offers in spite of a ban is case 15 of `test_cases_sampling.py`. Lookup finds other things, too.
    if drafter == "prediction":
        assert heard.finished.figures.num_drafted == 0
        assert {kind for chunk in heard.chunks for kind in chunk.kinds} == {TokenKind.PLAIN}


async def test_case_8_a_composition_with_too_small_a_context_is_not_used_and_the_reason_is_told(
    valkey_url: str,
) -> None:
    parts: list[Drafter] = [PredictionDrafter(SIZE, context_len=64), PromptLookup(SIZE, context_len=64)]
    async with cluster(valkey_url, FLAT, [Composed(parts)]) as client:
        heard = await hear(client, ask(prompt=TokenPrompt((1, 2) * 50)))
    assert heard.finished.figures.speculation_off == "drafter_context"
    assert len(heard.token_ids) == 40
