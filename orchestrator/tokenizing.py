"""Where prompts are tokenized: at once where they are short, else on other threads, few at a time.

Few, for templates are programs in Python, which hold up the event loop whatever thread they run on.
"""

import asyncio
from collections.abc import Callable, Sequence

from orchestrator.language import Language, Prompt
from outrider.generation import TextPrediction, TextPrompt, TokenPrediction

LONG_TEXT = 2000
"""Characters from which on a text is tokenized on another thread."""
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
        short = isinstance(prompt, TextPrompt) and len(prompt.text) < LONG_TEXT
        return await self._done(short, lambda: self._language.encode(prompt, after=after))

    async def prediction(self, prediction: TextPrediction | TokenPrediction | None) -> Ids:
        """Return the ids of what is expected; none where nothing is.

        Raises:
            InvalidRequest: it has more tokens than allowed, or none.
        """
        short = not isinstance(prediction, TextPrediction) or len(prediction.text) < LONG_TEXT
        return await self._done(short, lambda: self._language.encode_prediction(prediction))

    async def _done(self, short: bool, work: Callable[[], Ids]) -> Ids:
        if short:
            return work()
        async with self._places:
            return await asyncio.to_thread(work)
