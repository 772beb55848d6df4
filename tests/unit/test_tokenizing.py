"""What is tokenized at once waits for nobody; what takes long is done a few at a time."""

import asyncio

import pytest

from orchestrator.language import load_language
from orchestrator.tokenizing import LONG, MAX_AT_ONCE, Tokenizing
from outrider.generation import ChatMessage, ChatPrompt, TextPrediction, TextPrompt, TokenPrediction, TokenPrompt


@pytest.fixture
async def busy() -> Tokenizing:
    """All places for long work are taken."""
    tokenizing = Tokenizing(load_language("toy"))
    for _ in range(MAX_AT_ONCE):
        await tokenizing._places.acquire()
    return tokenizing


async def test_ids_and_short_texts_are_tokenized_while_others_take_long(busy: Tokenizing) -> None:
    async with asyncio.timeout(10):
        assert await busy.prompt(TokenPrompt((5, 9))) == (5, 9)
        assert await busy.prompt(TextPrompt("ab"))
        assert await busy.prediction(TokenPrediction((5, 9))) == (5, 9)
        assert await busy.prediction(TextPrediction("ab"))
        assert await busy.prediction(None) == ()


@pytest.mark.parametrize(
    "prompt",
    [TextPrompt("a" * LONG), TokenPrompt((5,) * LONG), ChatPrompt((ChatMessage("user", "hi"),))],
    ids=["text", "ids", "conversation"],
)
async def test_what_may_take_long_waits_for_a_place(
    busy: Tokenizing, prompt: TextPrompt | TokenPrompt | ChatPrompt
) -> None:
    waiting = asyncio.create_task(busy.prompt(prompt))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting.done()
    busy._places.release()
    assert len(await waiting) > 0
