"""Where prompts are tokenized: at once where they are short, else on other threads, few at a time.

Few, for templates are programs in Python, which hold up the event loop whatever thread they run on.
"""

import asyncio
from collections.abc import Callable, Sequence

from orchestrator.language import Language, Prompt
from outrider.generation import ChatPrompt, TextPrediction, TextPrompt, TokenPrediction, TokenPrompt

LONG = 2000
"""Characters, or ids, from which on it is done on another thread; conversations always are."""
MAX_AT_ONCE = 2
"""Texts that are tokenized on other threads at once."""

Ids = tuple[int, ...]


class Tokenizing:
    """Tokenizes for all generations of a process."""

    def __init__(self, language: Language) -> None:
        """Keep the served model's language."""
        self._language = language
        self._places = asyncio.Semaphore(MAX_AT_ONCE)

    async def prompt(self, prompt: Prompt, after: Sequence[int] = ()) -> Ids:
        """Return a prompt's ids; see `Language.encode`.

        Raises:
            InvalidRequest: the prompt is empty, or a conversation that the model's template refuses.
        """
        short = not isinstance(prompt, ChatPrompt) and _size(prompt) < LONG
        return await self._done(short, lambda: self._language.encode(prompt, after=after))

    async def prediction(self, prediction: TextPrediction | TokenPrediction | None) -> Ids:
        """Return the ids of what is expected; none where nothing is.

        Raises:
            InvalidRequest: it has more tokens than allowed, or none.
        """
        short = prediction is None or _size(prediction) < LONG
        return await self._done(short, lambda: self._language.encode_prediction(prediction))

    async def _done(self, short: bool, work: Callable[[], Ids]) -> Ids:
        if short:
            return work()
        async with self._places:
            return await asyncio.to_thread(work)


def _size(given: TextPrompt | TokenPrompt | TextPrediction | TokenPrediction) -> int:
    return len(given.text if isinstance(given, TextPrompt | TextPrediction) else given.token_ids)
