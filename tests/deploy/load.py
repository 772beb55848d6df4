"""Sessions that run while something happens to their cluster, each text compared with what it must be.

As a program, `python -m tests.deploy.load ADDRESS SESSIONS GENERATIONS`, for a host of its own: prints as JSON how many
generations ended, and the wrong ones.
"""

import asyncio
import json
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from types import TracebackType
from typing import Self

from outrider.client import Client, Retry
from outrider.generation import Chunk, GenerationRequest, SpeculationChoice, TextPrompt
from outrider.messages import SamplingParams
from outrider.model.toy import ToyLanguage, ToyTokenizer
from outrider.noise import Purpose, derive_key, seed_key
from outrider.sampling import coupled_token, greedy_token

LANGUAGE = ToyLanguage(len(ToyTokenizer()), 0, 2, 2.0)
"""What the toy model speaks by default."""
NUM_TOKENS = 32
RETRY = Retry(max_attempts=1000, max_total_s=200.0)


@cache
def text_of(prompt: str, count: int, seed: int | None) -> list[int]:
    """Return what must come behind a prompt, straight from the language."""
    ids = list(ToyTokenizer().encode(prompt))
    start, key = len(ids), derive_key(seed_key(seed or 0), Purpose.FIELD)
    while len(ids) < start + count:
        law = LANGUAGE.probs(ids)
        ids.append(greedy_token(law) if seed is None else coupled_token(law, key, 0, len(ids)))
    return ids[start:]


def request_of(prompt: str, count: int, seed: int | None) -> GenerationRequest:
    """Return a request with a text that can be foretold; greedy without a seed."""
    sampling = SamplingParams(temperature=0.0) if seed is None else SamplingParams()
    fixed = SpeculationChoice(gamma=4, window=8)  # whether drafting pays is not the question here
    return GenerationRequest(
        TextPrompt(prompt), max_tokens=count, sampling=sampling, seed=seed, ignore_eos=True, speculation=fixed
    )


@dataclass
class Load:
    """So many sessions at once, one generation after the other, until the block ends."""

    addresses: list[str]
    """Of orchestrators; clients go on at another one where one is lost, and look here anew for each generation."""
    num_sessions: int = 16
    num_tokens: int = NUM_TOKENS
    done: int = 0
    """Generations that came to their end with the right text."""
    wrong: list[str] = field(default_factory=list)
    _tasks: list["asyncio.Task[None]"] = field(default_factory=list)
    _over: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._session(number)) for number in range(self.num_sessions)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let every generation end."""
        self._over.set()
        if error is not None:
            for task in self._tasks:
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*self._tasks, return_exceptions=True)
            return
        async with asyncio.timeout(200):
            await asyncio.gather(*self._tasks)

    async def more(self, count: int) -> None:
        """Wait until so many more generations have ended."""
        wanted = self.done + count
        async with asyncio.timeout(200):
            while self.done < wanted:
                for task in self._tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.05)

    async def _session(self, number: int) -> None:
        turn = 0
        while not self._over.is_set():
            prompt, seed = f"session {number} ", (None if turn % 2 else number)
            tokens: list[int] = []
            async with Client(self.addresses, retry=RETRY, timeout_s=200) as client:
                async for event in client.generate(request_of(prompt, self.num_tokens, seed)):
                    if isinstance(event, Chunk):
                        tokens += event.token_ids
            if tokens != text_of(prompt, self.num_tokens, seed):
                self.wrong.append(f"session {number}, turn {turn}: {tokens}")
            self.done += 1
            turn += 1


async def _main(address: str, num_sessions: int, generations: int) -> None:
    async with Load([address], num_sessions) as load:
        await load.more(generations)
    print(json.dumps({"done": load.done, "wrong": load.wrong}))


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
