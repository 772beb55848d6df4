"""Known traps about where a generation ends, and what of it is text: through the orchestrator, with real services."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from outrider.client import Client
from outrider.generation import GenerationRequest, SpeculationChoice, TokenPrompt
from outrider.ids import FinishReason, TokenKind
from outrider.messages import SamplingParams
from outrider.model.toy import ToyLanguage, ToyTokenizer
from outrider.sampling import greedy_token
from tests.integration.cluster_bench import hear
from tests.integration.odd_parts import LANGUAGE, SIZE, Blind, Padded, Script, cluster, language_drafter

GREEDY = SamplingParams(temperature=0.0)
OFF = SpeculationChoice(off=True)
PROMPT = (5, 9, 12)


def ask(prompt: tuple[int, ...] = PROMPT, **fields: Any) -> GenerationRequest:
    known: dict[str, Any] = {
        "max_tokens": 16, "sampling": GREEDY, "ignore_eos": True, "return_token_origin": True,
        "speculation": SpeculationChoice(gamma=8, window=8), **fields,
    }  # fmt: skip
    return GenerationRequest(TokenPrompt(prompt), **known)


def greedy(prompt: tuple[int, ...], count: int, language: ToyLanguage = LANGUAGE) -> list[int]:
    """Return what the model says, straight from its law."""
    ids = list(prompt)
    while len(ids) < len(prompt) + count:
        ids.append(greedy_token(language.probs(ids)))
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
async def perfect(valkey_url: str) -> AsyncIterator[Client]:
    """A cluster whose drafter is always right."""
    async with cluster(valkey_url, LANGUAGE, [language_drafter(LANGUAGE)], adaptive=False) as client:
        yield client


async def test_case_01_a_stop_inside_an_accepted_run_ends_there_unless_the_limit_comes_first(perfect: Client) -> None:
    """Five tokens wanted, STOP the third of six proposed: three come; with STOP behind the limit, five."""
    said = greedy(PROMPT, 7)
    assert len(set(said)) == 7
    stopped = await hear(perfect, ask(max_tokens=5, stop_token_ids=(said[2],)))
    assert (stopped.token_ids, stopped.finished.reason) == (said[:3], FinishReason.STOP)
    assert stopped.finished.matched == str(said[2])
    assert stopped.finished.figures.num_accepted == 3
    cut = await hear(perfect, ask(max_tokens=5, stop_token_ids=(said[5],)))
    assert (cut.token_ids, cut.finished.reason) == (said[:5], FinishReason.LENGTH)


def prompts_before_an_end(language: ToyLanguage, before: int) -> tuple[tuple[int, ...], list[int]]:
    """Return a prompt, and its continuation in which token 0, the end of sequence, comes after `before` tokens."""
    for first in range(1, language.vocab_size):
        said = greedy((first, 17), 60, language)
        if 0 in said[before + 1 :]:
            at = said.index(0, before + 1)
            if 0 not in said[:at]:
                return (first, 17, *said[: at - before]), said[at - before : at + 4]
    raise AssertionError("no prompt leads to the end of sequence")


@pytest.mark.parametrize("gamma", [1, 4])
async def test_case_03_nothing_comes_after_an_end_of_sequence_at_any_offset_of_a_run(
    perfect: Client, gamma: int
) -> None:
    for offset in range(gamma + 2):
        prompt, said = prompts_before_an_end(LANGUAGE, offset)
        assert said[offset] == 0
        choice = SpeculationChoice(gamma=gamma, window=2 * gamma)
        for shape in (choice, OFF):
            heard = await hear(perfect, ask(prompt, ignore_eos=False, speculation=shape))
            assert (heard.token_ids, heard.finished.reason) == (said[: offset + 1], FinishReason.STOP)
            assert "<eos>" not in heard.text
        on = await hear(perfect, ask(prompt, ignore_eos=True, speculation=choice, max_tokens=offset + 4))
        assert on.token_ids == said[: offset + 4]


async def test_case_04_a_drafter_that_only_proposes_ends_ends_nothing(valkey_url: str) -> None:
    said = greedy(PROMPT, 60)
    assert 0 not in said
    async with cluster(valkey_url, LANGUAGE, [Blind(lambda _: 0)], adaptive=False) as client:
        async with asyncio.timeout(60):
            heard = await hear(client, ask(max_tokens=60, ignore_eos=False))
    assert (heard.token_ids, heard.finished.reason) == (said, FinishReason.LENGTH)
    assert heard.finished.figures.num_accepted == 0
    assert heard.finished.figures.num_tested > 0


async def test_case_05_exactly_the_wanted_number_of_tokens_is_delivered_and_counted(perfect: Client) -> None:
    said = greedy(PROMPT, 20)
    shapes = [(tokens, gamma) for tokens in range(1, 21) for gamma in range(1, 9)]
    requests = [ask(max_tokens=t, speculation=SpeculationChoice(gamma=g, window=2 * g)) for t, g in shapes]
    for start in range(0, len(requests), 16):
        batch = await asyncio.gather(*(hear(perfect, request) for request in requests[start : start + 16]))
        for (tokens, gamma), heard in zip(shapes[start:], batch, strict=False):
            assert heard.token_ids == said[:tokens], (tokens, gamma)
            assert heard.finished.usage.completion_tokens == tokens
            figures = heard.finished.figures
            assert figures.num_accepted == figures.num_tested
            assert figures.num_accepted + figures.num_bonus + figures.num_plain == tokens


async def test_case_09_padding_is_never_spoken_and_padded_sizes_need_not_be_equal(valkey_url: str) -> None:
    target, draft = Padded(SIZE + 33, own=LANGUAGE), Padded(SIZE + 97, own=LANGUAGE)
    async with cluster(valkey_url, target, [language_drafter(draft)], adaptive=False) as client:
        for fields in ({}, {"sampling": SamplingParams(), "seed": 3}, {"sampling": SamplingParams()}):
            heard = await hear(client, ask(max_tokens=60, num_logprobs=5, **fields))
            assert max(heard.token_ids) < SIZE
            assert heard.finished.figures.num_accepted > 0
            scored = [token_id for chunk in heard.chunks for entry in chunk.logprobs for token_id, _ in entry.top]
            assert max(scored) < SIZE
        assert (await hear(client, ask())).token_ids == greedy(PROMPT, 16)


TEXT = (
    "na\u0308ive \U0001f468\u200d\U0001f469\u200d\U0001f467 \u4f60\u597d, \u65e5\u672c\u8a9e! "
    "e\u0301 \U0001f600\U0001f600 \u0928\u093f x"
)
"""Combining marks, a joined emoji, CJK, and characters of two to four bytes."""


@pytest.mark.parametrize("gamma", [0, 1, 2, 3, 5, 8])
async def test_case_27_characters_split_over_tokens_arrive_whole_in_every_chunking(valkey_url: str, gamma: int) -> None:
    script = tuple(byte + 1 for byte in TEXT.encode())  # the toy's ids of single bytes
    target = Script(SIZE, script=script, prompt_len=len(PROMPT))
    wrong_now_and_then = Blind(lambda ids: 1 if len(ids) % 7 == 0 else script[(len(ids) - len(PROMPT)) % len(script)])
    choice = SpeculationChoice(gamma=gamma, window=2 * gamma) if gamma else OFF
    async with cluster(valkey_url, target, [wrong_now_and_then], adaptive=False) as client:
        heard = await hear(client, ask(max_tokens=len(script), speculation=choice))
        assert heard.token_ids == list(script)
        assert heard.text == TEXT
        assert "\ufffd" not in "".join(chunk.text for chunk in heard.chunks)
        stopped = await hear(client, ask(max_tokens=len(script), speculation=choice, stop=("\u65e5\u672c",)))
        assert stopped.text == TEXT[: TEXT.index("\u65e5")]
        half = await hear(client, ask(max_tokens=len("na\u0308ive ".encode()) + 2, speculation=choice))
        assert half.text == ToyTokenizer().decode(half.token_ids)  # an incomplete character at the very end is shown


async def test_case_30_no_top_logprobs_wanted_gives_empty_lists(perfect: Client) -> None:
    heard = await hear(perfect, ask(num_logprobs=0))
    entries = [entry for chunk in heard.chunks for entry in chunk.logprobs]
    assert len(entries) == 16
    assert all(entry.top == () and entry.logprob < 0 for entry in entries)
    assert TokenKind.ACCEPTED in [kind for chunk in heard.chunks for kind in chunk.kinds]
    none = await hear(perfect, ask())
    assert [entry for chunk in none.chunks for entry in chunk.logprobs] == []
