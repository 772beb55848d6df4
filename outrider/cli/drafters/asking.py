"""Answers every prompt in every way, one session at a time, on a cluster that runs.

Ways take turns within a prompt, and the order of the turns moves on with every prompt, so that whatever happens to the
machine in the meantime happens to all of them. All ways answer with the same text where it is repeatable: at
temperature 0, and above it because every prompt has a seed.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from outrider.cli.drafters.tally import Answer, Asked
from outrider.client import Client
from outrider.errors import DataLoss
from outrider.generation import Chunk, Finished, GenerationRequest, SpeculationChoice
from outrider.ids import TokenKind
from outrider.messages import SamplingParams, Speculation
from outrider.prompts import Prompt

AUTOMATIC = "automatic"
"""The way in which the policy decides how far is drafted."""
PLAIN = SpeculationChoice(off=True)
MOST_GAMMA = 64
"""Longest proposal that measurements ask for."""
WARM_UP_TOKENS = 8
"""Generated and thrown away first, so that nobody pays for first use."""

Progress = Callable[[int], None]
"""Told how many prompts are done."""


@dataclass(frozen=True, slots=True)
class Asking:
    """How prompts are asked."""

    tokens: int
    """Most tokens of an answer."""
    temperature: float
    seed: int
    """Of the first prompt, above temperature 0; the next has the next."""
    trial_gamma: int
    gammas: tuple[int | None, ...]
    """Tokens per proposal of each way that is measured; None: automatic."""

    def request(self, prompt: Prompt, number: int, choice: SpeculationChoice) -> GenerationRequest:
        """Return what a client sends."""
        return GenerationRequest(
            prompt.asked,
            max_tokens=self.tokens,
            sampling=SamplingParams(temperature=self.temperature),
            seed=self.seed + number if self.temperature else None,
            speculation=choice,
            return_token_origin=True,
        )

    @property
    def choices(self) -> list[SpeculationChoice]:
        """Plain, the trial, and then the ways."""
        trial = SpeculationChoice(gamma=self.trial_gamma, window=self.trial_gamma)
        return [PLAIN, trial, *(SpeculationChoice(gamma=gamma) for gamma in self.gammas)]


async def answer(client: Client, request: GenerationRequest) -> Answer:
    """Run one generation to its end.

    Raises:
        OutriderError: it failed.
    """
    times_s: list[float] = []
    chunks: list[Chunk] = []
    async with aclosing(client.generate(request)) as events:
        async for event in events:
            if isinstance(event, Chunk) and event.token_ids:
                times_s.append(time.perf_counter())
                chunks.append(event)
            elif isinstance(event, Finished):
                ids = tuple(token for chunk in chunks for token in chunk.token_ids)
                counts = tuple(len(chunk.token_ids) for chunk in chunks)
                tested = tuple(any(kind is not TokenKind.PLAIN for kind in chunk.kinds) for chunk in chunks)
                return Answer(tuple(times_s), counts, tested, ids, event.figures)
    raise DataLoss("a generation ended without its last event")


async def ask_all(client: Client, prompts: Sequence[Prompt], asking: Asking, progress: Progress) -> Asked:
    """Answer every prompt in every way.

    Args:
        client: of a cluster with one kind of drafter.
        prompts: at least one.
        asking: how.
        progress: told after each prompt.

    Raises:
        OutriderError: a generation failed.
    """
    choices = asking.choices
    answers: list[list[Answer]] = [[] for _ in choices]
    short = Asking(WARM_UP_TOKENS, asking.temperature, asking.seed, asking.trial_gamma, asking.gammas)
    for choice in choices[:2]:
        await answer(client, short.request(prompts[0], 0, choice))
    for number, prompt in enumerate(prompts):
        turns = [(number + turn) % len(choices) for turn in range(len(choices))]
        for turn in turns:
            answers[turn].append(await answer(client, asking.request(prompt, number, choices[turn])))
        progress(number + 1)
    ways = [
        (AUTOMATIC if gamma is None else f"gamma {gamma}", gamma and Speculation(gamma, gamma, 2 * gamma), each)
        for gamma, each in zip(asking.gammas, answers[2:], strict=True)
    ]
    return Asked(answers[0], answers[1], [(name, plan or None, each) for name, plan, each in ways])
