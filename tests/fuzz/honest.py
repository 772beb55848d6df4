"""Clients that behave, beside those that do not: every text must be that of its twin."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from outrider.client import Client
from outrider.errors import OutriderError, ResourceExhausted
from outrider.messages import SamplingParams
from tests.e2e.toys import PROMPT, ask, expected, hear
from tests.fuzz.shooting import Book

NUM_TOKENS = 60
SEEDS = (None, 23, 31)
"""Of each client; None is greedy."""


@asynccontextmanager
async def honest_clients(client: Client, book: Book) -> AsyncIterator[None]:
    """Generate again and again for the time of the block; then let what runs come to its end."""
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for seed in SEEDS:
            tasks.create_task(_generate_on(client, seed, book, stop))
        try:
            yield
        finally:
            stop.set()


async def _generate_on(client: Client, seed: int | None, book: Book, stop: asyncio.Event) -> None:
    twin = expected(PROMPT, NUM_TOKENS, seed)
    fields: dict[str, Any] = {} if seed is None else {"seed": seed, "sampling": SamplingParams()}
    while not stop.is_set():
        try:
            heard = await hear(client, ask(max_tokens=NUM_TOKENS, **fields))
        except ResourceExhausted:
            book.num_refused += 1
            await asyncio.sleep(0.2)
        except OutriderError as error:
            book.violations.append(f"an honest client of seed {seed} met {error!r}")
        else:
            book.num_honest += 1
            if heard.token_ids != twin:
                book.violations.append(f"an honest text of seed {seed} is not its twin's: {heard.token_ids}")
