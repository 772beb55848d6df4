"""The whole path through real processes: every mode, text and ids, figures, conversations, turns."""

import asyncio
from typing import Any

import pytest

from outrider.generation import (
    ChatMessage,
    ChatPrompt,
    Chunk,
    GenerationRequest,
    SpeculationChoice,
    Started,
    TokenPrompt,
)
from outrider.ids import FinishReason, Mode, TokenKind
from outrider.messages import SamplingParams
from outrider.model.toy import ToyTokenizer
from tests.e2e.toys import GREEDY, OFF, PROMPT, Toys, ask, expected, hear

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("seed", [None, 11], ids=["greedy", "coupled"])
async def test_text_is_the_twins_and_the_models_own_for_every_shape_of_speculation(
    toys: Toys, seed: int | None
) -> None:
    client = await toys.client()
    fields: dict[str, Any] = {} if seed is None else {"sampling": SamplingParams(), "seed": seed}
    shapes = [OFF, *(SpeculationChoice(gamma=g, window=g * w) for g, w in ((1, 1), (2, 4), (4, 2), (8, 1), (16, 4)))]
    heard = await asyncio.gather(*(hear(client, ask(speculation=shape, **fields)) for shape in shapes))
    for each in heard:
        assert each.token_ids == expected(PROMPT, 40, seed)
        assert each.text == heard[0].text == ToyTokenizer().decode(each.token_ids, skip_special_tokens=True)
        started = each.events[0]
        assert isinstance(started, Started)
        assert started.mode is (Mode.GREEDY if seed is None else Mode.COUPLED)
    assert [each.finished.figures.num_accepted > 0 for each in heard] == [False, True, True, True, True, True]


@pytest.mark.parametrize("mode", [None, Mode.REJECTION, Mode.BLOCK], ids=["auto", "rejection", "block"])
async def test_without_a_seed_drafts_are_verified_by_rejection(toys: Toys, mode: Mode | None) -> None:
    heard = await hear(await toys.client(), ask(sampling=SamplingParams(), mode=mode))
    started = heard.events[0]
    assert isinstance(started, Started)
    assert started.mode is (mode or Mode.REJECTION)
    assert len(heard.token_ids) == 40
    assert heard.finished.figures.num_accepted > 0
    assert heard.finished.figures.guarantee_void == 0


async def test_ids_text_and_a_conversation_say_the_same_if_their_tokens_are_the_same(toys: Toys) -> None:
    client = await toys.client()
    chat = ChatPrompt((ChatMessage("system", "a mat. "), ChatMessage("user", "the cat ")))
    text = "system: a mat. \nuser: the cat \nassistant: "
    ids = TokenPrompt(tuple(ToyTokenizer().encode(text)))
    spoken = [
        await hear(client, ask(text, max_tokens=20)),
        *[
            await hear(client, GenerationRequest(prompt, max_tokens=20, sampling=GREEDY, ignore_eos=True))
            for prompt in (chat, ids)
        ],
    ]
    for each in spoken:
        assert each.token_ids == expected(text, 20)


async def test_figures_are_those_of_what_was_streamed(toys: Toys) -> None:
    heard = await hear(await toys.client(), ask(max_tokens=60, num_logprobs=2))
    figures, usage, kinds = heard.finished.figures, heard.finished.usage, heard.kinds
    assert heard.finished.reason is FinishReason.LENGTH
    assert usage.completion_tokens == len(heard.token_ids) == len(kinds) == 60
    assert usage.prompt_tokens == len(ToyTokenizer().encode(PROMPT))
    counts = (figures.num_accepted, figures.num_recovered, figures.num_bonus, figures.num_plain)
    assert counts == tuple(
        kinds.count(kind) for kind in (TokenKind.ACCEPTED, TokenKind.RECOVERED, TokenKind.BONUS, TokenKind.PLAIN)
    )
    assert figures.num_accepted <= figures.num_tested <= figures.num_drafted
    assert figures.drafter == "toy"
    assert figures.speculation_off == ""
    assert 0 < figures.verify_s < figures.total_s
    assert figures.time_to_first_token_s < figures.total_s
    for chunk in heard.chunks:
        assert [len(entry.top) for entry in chunk.logprobs] == [2] * len(chunk.token_ids)


async def test_a_second_turn_goes_on_with_the_first_at_another_orchestrator(toys: Toys) -> None:
    one, two = [await toys.client(name) for name in toys.running("orchestrate")]
    first = await hear(one, ask(max_tokens=12))
    started = first.events[0]
    assert isinstance(started, Started)
    second = await hear(two, ask("a mat", session_id=started.session_id, max_tokens=12))
    summary = await one.session(started.session_id, include_token_ids=True)
    encode = ToyTokenizer().encode
    assert list(summary.token_ids) == [*encode(PROMPT), *first.token_ids, *encode("a mat"), *second.token_ids]
    whole = TokenPrompt(summary.token_ids[: -len(second.token_ids)])
    twin = await hear(two, GenerationRequest(whole, max_tokens=12, sampling=GREEDY, ignore_eos=True, speculation=OFF))
    assert second.token_ids == twin.token_ids


async def test_chunks_follow_each_other_without_gap_or_overlap(toys: Toys) -> None:
    events = (await hear(await toys.client(), ask(max_tokens=60))).events
    started = events[0]
    assert isinstance(started, Started)
    position = started.prompt_len
    for event in events:
        if isinstance(event, Chunk):
            assert event.start == position
            position += len(event.token_ids)
    assert position == started.prompt_len + 60
