"""Known traps about what is drawn: through the orchestrator, with real services and unusual draft workers."""

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM

from draft_service.app import DraftApp
from draft_service.config import DraftSettings
from outrider.client import Client
from outrider.generation import GenerationRequest, SpeculationChoice, TextPrompt, TokenPrompt
from outrider.ids import TokenKind
from outrider.messages import COUNT_TOTAL, SamplingParams
from outrider.model.toy import ToyLanguage
from outrider.sampling import probabilities, sparse_row
from tests.integration.cluster_bench import Bench, Heard, hear
from tests.integration.odd_parts import LANGUAGE, SIZE, Blind, OtherParameters, cluster, language_drafter
from tests.unit.test_parallel import save_model
from verify_service.app import VerifyApp
from verify_service.config import VerifySettings

GREEDY = SamplingParams(temperature=0.0)
OFF = SpeculationChoice(off=True)
PROMPT = (5, 9, 12)
FALSE_ALARM = 1e-6
"""Chance that a right build fails one of the statistical tests here: unseeded requests have fresh keys."""


def ask(prompt: tuple[int, ...] = PROMPT, **fields: Any) -> GenerationRequest:
    known: dict[str, Any] = {
        "max_tokens": 60, "sampling": SamplingParams(), "ignore_eos": True, "return_token_origin": True,
        "speculation": SpeculationChoice(gamma=4, window=8), **fields,
    }  # fmt: skip
    return GenerationRequest(TokenPrompt(prompt), **known)


def kinds(heard: Heard) -> list[TokenKind]:
    return [kind for chunk in heard.chunks for kind in chunk.kinds]


# --- equal target and draft ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-3, 0.3, 1.0, 2.0])
async def test_case_11_an_equal_draft_is_accepted_always_or_as_often_as_its_sent_rows_allow(
    valkey_url: str, temperature: float
) -> None:
    """False-alarm rate: 4 standard deviations, 6e-5 for each temperature in rejection mode; else none."""
    sampling = SamplingParams(temperature=temperature)
    async with cluster(valkey_url, LANGUAGE, [language_drafter(LANGUAGE)], adaptive=False) as client:
        seed = None if temperature == 0.0 else 3
        certain = (await hear(client, ask(sampling=sampling, seed=seed))).finished.figures
        assert certain.num_accepted == certain.num_tested > 40
        if temperature > 0.0:
            batch = [hear(client, ask(sampling=sampling, max_tokens=150, num_logprobs=0)) for _ in range(4)]
            for heard in await asyncio.gather(*batch):
                entries = [entry.logprob for chunk in heard.chunks for entry in chunk.logprobs]
                assert all(np.isfinite(entries))
                assert_accepted_as_expected(heard, sampling)


def assert_accepted_as_expected(heard: Heard, sampling: SamplingParams) -> None:
    """Compare acceptances with the sum of each tested position's overlap of the target's law and the sent row."""
    ids, mean, variance, accepted = list(PROMPT), 0.0, 0.0, 0
    for token, kind in zip(heard.token_ids, kinds(heard), strict=True):
        if kind in (TokenKind.ACCEPTED, TokenKind.RECOVERED):
            law = probabilities(LANGUAGE.probs(ids).log()[None], sampling, SIZE)[0]
            row = sparse_row(law)
            pairs = zip(row.token_ids, row.counts, strict=True)
            overlap = sum(min(float(law[token_id]), count / COUNT_TOTAL) for token_id, count in pairs)
            mean, variance = mean + overlap, variance + overlap * (1 - overlap)
            accepted += kind is TokenKind.ACCEPTED
        ids.append(token)
    assert mean > 20
    assert abs(accepted - mean) <= 4 * variance**0.5 + 1e-6, (accepted, mean, variance)


# --- another draft ------------------------------------------------------------------------------------------------

FLAT = ToyLanguage(SIZE, 7, 0, 1.0)
"""One law for every position: each token of a generation is a draw of its own."""
OTHER = SamplingParams(temperature=0.5, top_k=40)


async def law_p_value(valkey_url: str, drafter: Any) -> tuple[float, int]:
    """Return how well 6,000 unseeded tokens fit the target's law, and how many of them were accepted drafts."""
    async with cluster(valkey_url, FLAT, [drafter], adaptive=False) as client:
        heard = await asyncio.gather(*(hear(client, ask(max_tokens=750)) for _ in range(8)))
    counts = Counter(token for each in heard for token in each.token_ids)
    law = np.asarray(FLAT.probs(()))
    order = np.argsort(law)
    groups = np.array_split(order, 40)  # rare tokens together, so that each group is expected often enough
    found = [sum(counts[int(token)] for token in group) for group in groups]
    wanted = [law[group].sum() * 6000 for group in groups]
    accepted = sum(each.finished.figures.num_accepted for each in heard)
    return float(chisquare(found, wanted).pvalue), accepted


async def test_case_12_a_draft_with_other_parameters_leaves_the_targets_law(valkey_url: str) -> None:
    """False-alarm rate 1e-6."""
    p_value, accepted = await law_p_value(valkey_url, OtherParameters(FLAT, OTHER))
    assert p_value > FALSE_ALARM
    assert accepted > 600


async def test_case_12_planted_mistake_rows_that_the_tokens_were_not_drawn_from_are_found_out(valkey_url: str) -> None:
    """The negative control of the test above."""
    p_value, accepted = await law_p_value(valkey_url, OtherParameters(FLAT, OTHER, lies=True))
    assert p_value < FALSE_ALARM
    assert accepted > 600


# --- seeds, penalties, bans ---------------------------------------------------------------------------------------


async def test_case_13_and_17_a_seeded_text_is_the_same_alone_and_among_busy_unseeded_neighbours(
    valkey_url: str,
) -> None:
    async with Bench(valkey_url) as bench:
        verifier, _ = await bench.verifier(toy_delay_s=0.002)
        drafter, _ = await bench.drafter()
        _, _, client = await bench.orchestrator([verifier], [drafter])
        seeded = ask(seed=11)
        alone = await hear(client, seeded)
        assert alone.token_ids == (await hear(client, ask(seed=11, speculation=OFF))).token_ids
        neighbours = [ask(seed=12), *[ask(max_tokens=80) for _ in range(6)], ask(sampling=GREEDY), ask(PROMPT * 40)]
        crowd = await asyncio.gather(*(hear(client, request) for request in [seeded, *neighbours, seeded]))
        assert crowd[0].token_ids == crowd[-1].token_ids == alone.token_ids
        unseeded = [tuple(each.token_ids) for each in crowd[2:8]]
        assert len(set(unseeded)) == len(unseeded)
        assert {len(each) for each in unseeded} == {80}


async def test_case_14_under_a_frequency_penalty_a_repeating_drafter_changes_nothing(valkey_url: str) -> None:
    """The likeliest token of every position is proposed for ever: from its second repetition on the penalty counts."""
    penalised = SamplingParams(temperature=0.0, frequency_penalty=2.0)
    likeliest = int(FLAT.probs(()).argmax())
    async with cluster(valkey_url, FLAT, [Blind(lambda _: likeliest)], adaptive=False) as client:
        heard = await hear(client, ask(sampling=penalised))
        twin = await hear(client, ask(sampling=penalised, speculation=OFF))
    assert heard.token_ids == twin.token_ids
    assert heard.token_ids[0] == likeliest
    assert len(set(heard.token_ids)) > 3
    assert heard.finished.figures.num_accepted > 0


@pytest.mark.parametrize(
    "fields",
    [{"sampling": GREEDY}, {"seed": 4}, {}],
    ids=["greedy", "coupled", "rejection"],
)
async def test_case_15_a_banned_token_that_is_always_proposed_never_appears(
    valkey_url: str, fields: dict[str, Any]
) -> None:
    banned = int(FLAT.probs(()).argmax())
    base = fields.get("sampling", SamplingParams())
    sampling = SamplingParams(temperature=base.temperature, logit_bias=((banned, -100.0),))
    async with cluster(valkey_url, FLAT, [Blind(lambda _: banned)], adaptive=False) as client:
        heard = await hear(client, ask(max_tokens=120, **{**fields, "sampling": sampling}))
    assert banned not in heard.token_ids
    assert heard.finished.figures.num_accepted == 0
    assert heard.finished.figures.num_recovered > 0


# --- log-probabilities --------------------------------------------------------------------------------------------


async def test_case_16_log_probabilities_are_the_twins_bit_for_bit_and_those_of_transformers(
    valkey_url: str, tmp_path: Path
) -> None:
    """For accepted and recovered tokens alike; the draft is the first of the target's two layers."""
    save_model(tmp_path)
    small: dict[str, Any] = {"model": str(tmp_path), "dtype": "float32", "num_blocks": 16}
    async with Bench(valkey_url) as bench:
        verifier = await bench._run(VerifyApp(VerifySettings(**small)))
        draft = await bench._run(DraftApp(DraftSettings(drafter="causal_lm", layers=(0,), **small)))
        _, _, client = await bench.orchestrator([verifier], [draft], model=str(tmp_path), adaptive=False)
        request = ask(seed=3, max_tokens=80, num_logprobs=3)
        heard = await hear(client, request)
        twin = await hear(client, replace(request, speculation=OFF))
    assert {TokenKind.ACCEPTED, TokenKind.RECOVERED} <= set(kinds(heard))
    entries = [entry for chunk in heard.chunks for entry in chunk.logprobs]
    assert heard.token_ids == twin.token_ids
    assert entries == [entry for chunk in twin.chunks for entry in chunk.logprobs]
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        rows = model(torch.tensor([[*PROMPT, *heard.token_ids]])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    for token, row, entry in zip(heard.token_ids, rows, entries, strict=True):
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-3)
        assert [value for _, value in entry.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-3)


# --- prompt lookup ------------------------------------------------------------------------------------------------


def lookup_prompts() -> list[str]:
    """Return 200 prompts: words once, words over and over, phrases that come back, mixed scripts."""
    words = ["the ", "cat ", "sat ", "on ", "a ", "mat", ". ", "\u4f60\u597d", "x", "\U0001f600"]
    once = ["".join(words[(i + k * (1 + i % 3)) % 10] for k in range(1 + i % 9)) for i in range(80)]
    repeated = [words[i % 10] * (5 + 3 * i) for i in range(60)]
    phrases = [(words[i % 10] + words[(i // 10) % 10] + words[(3 * i) % 10]) * (2 + i % 17) for i in range(60)]
    return once + repeated + phrases


async def test_case_18_prompt_lookup_leaves_the_text_alone_whatever_gamma_is(valkey_url: str) -> None:
    async with Bench(valkey_url) as bench:
        verifier, _ = await bench.verifier(toy_order=1)
        lookup = await bench._run(DraftApp(DraftSettings(drafter="prompt_lookup", model="toy", min_ngram=1)))
        _, _, client = await bench.orchestrator([verifier], [lookup], adaptive=False)
        accepted = 0
        prompts = lookup_prompts()
        assert len(prompts) == 200
        for start in range(0, 200, 20):
            batch = await asyncio.gather(*(_texts(client, text) for text in prompts[start : start + 20]))
            for text, (tokens, num_accepted) in zip(prompts[start:], batch, strict=False):
                assert len(set(tokens)) == 1, text
                accepted += num_accepted
        assert accepted > 400


async def _texts(client: Client, text: str) -> tuple[list[tuple[int, ...]], int]:
    """Return a prompt's texts for the twin and each gamma, and how many drafts were accepted."""
    shapes = [OFF, *(SpeculationChoice(gamma=gamma, window=gamma * 2) for gamma in (1, 2, 5, 20))]
    heard = [
        await hear(client, GenerationRequest(TextPrompt(text), max_tokens=12, sampling=GREEDY, ignore_eos=True,
                                             speculation=shape))
        for shape in shapes
    ]  # fmt: skip
    return [tuple(each.token_ids) for each in heard], sum(each.finished.figures.num_accepted for each in heard)
