"""Decoding in one process, on cores of its own: `transformers`, and draft and target beside each other without a wire.

The process is a pool of one worker, pinned before it loads anything. What it returns are times: when the call began,
and when how many tokens were there.
"""

import asyncio
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Self, cast

import torch
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging as transformers_logging

from benchmarks.drafts import CAUSAL_LM, LAYER_SUBSET, PROMPT_LOOKUP
from draft_service.drafters.causal_lm import CausalLm
from draft_service.drafters.prompt_lookup import PromptLookup
from draft_service.drafters.protocol import Drafter, DraftSession, Guessed, Work
from outrider.generation import ChatPrompt, TextPrompt
from outrider.ids import Epoch, Mode, SessionId, TokenClass
from outrider.messages import SamplingParams
from outrider.model.loader import load
from outrider.model.names import DEFAULT_MODEL, ModelSpec
from outrider.model.opening import OpenedModel, open_model
from outrider.model.runner import Feed, prefill_plan

DTYPE = "bfloat16"
NUM_BLOCKS = 64
SESSION = SessionId("alone")
GREEDY = SamplingParams(temperature=0.0)

Ask = TextPrompt | ChatPrompt


@dataclass(slots=True)
class Steps:
    """When how many tokens of each sequence were there."""

    started_s: float = field(default_factory=time.perf_counter)
    times_s: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    batch: int = 1
    num_tested: int = 0
    num_accepted: int = 0

    def add(self, count: int) -> None:
        """Note that so many tokens of each sequence were just decoded."""
        self.times_s.append(time.perf_counter())
        self.counts.append(count)


class OneProcess:
    """The process; an async context manager. Its calls run one after the other."""

    def __init__(self, cores: str, threads: int) -> None:
        """Prepare it.

        Args:
            cores: as `taskset -c` takes them.
            threads: of the models.
        """
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, context, initializer=_begin, initargs=(cores, threads))

    async def __aenter__(self) -> Self:
        """Start it, and wait until the models are loaded."""
        await self._call(_warm_up)
        return self

    async def __aexit__(self, *_: object) -> None:
        """End it."""
        self._pool.shutdown()

    async def generate(self, prompts: Sequence[Ask], num_tokens: int, draft: str = "", gamma: int = 0) -> Steps:
        """Decode with `transformers`, all prompts as one batch.

        Args:
            prompts: at least one; exactly one with a draft.
            num_tokens: of each.
            draft: none, `PROMPT_LOOKUP` or `CAUSAL_LM`.
            gamma: tokens per guess.
        """
        return await self._steps(_generate, tuple(prompts), num_tokens, draft, gamma)

    async def together(self, prompt: Ask, num_tokens: int, draft: str, gamma: int) -> Steps:
        """Draft and verify in turn with our own models and drafters, on the same core, without any protocol."""
        return await self._steps(_together, prompt, num_tokens, draft, gamma)

    async def _steps(self, work: Callable[..., Steps], *args: object) -> Steps:
        return cast(Steps, await self._call(work, *args))

    async def _call(self, work: Callable[..., Any], *args: object) -> Any:
        return await asyncio.wrap_future(self._pool.submit(work, *args))


# --- in the process -----------------------------------------------------------------------------------------------


def _begin(cores: str, threads: int) -> None:
    os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    cast(Any, transformers_logging).set_verbosity_error()
    torch.set_num_threads(threads)


def _warm_up() -> None:
    _generate((TextPrompt("Once upon a time"),), 2, "", 0)


@cache
def _stock(layers: tuple[int, ...] | None = None) -> tuple[Any, Any]:
    return load(ModelSpec(DEFAULT_MODEL, DTYPE, layers))


@cache
def _target() -> OpenedModel:
    return open_model(ModelSpec(DEFAULT_MODEL, DTYPE), num_blocks=NUM_BLOCKS)


@cache
def _drafter(kind: str) -> Drafter:
    vocab_len = _target().vocabulary.size
    if kind == PROMPT_LOOKUP:
        return PromptLookup(vocab_len, context_len=NUM_BLOCKS * 64)
    draft = open_model(ModelSpec(DEFAULT_MODEL, DTYPE, LAYER_SUBSET), num_blocks=NUM_BLOCKS)
    return CausalLm(draft.runner, vocab_len=vocab_len)


def _ids(prompt: Ask) -> list[int]:
    """Turn a prompt into ids as an orchestrator does."""
    tokenizer = _stock()[1]
    if isinstance(prompt, TextPrompt):
        return cast("list[int]", tokenizer.encode(prompt.text))
    messages = [{"role": message.role, "content": message.content} for message in prompt.messages]
    return cast("list[int]", tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])


class _Watch(BaseStreamer):
    """Is given the prompt first, then the tokens of every step."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._started = False

    def put(self, value: torch.Tensor) -> None:
        if self._started:
            self._steps.add(value.numel() // self._steps.batch)
        self._started = True

    def end(self) -> None:
        """Nothing is left to note."""


@torch.inference_mode()
def _generate(prompts: tuple[Ask, ...], num_tokens: int, draft: str, gamma: int) -> Steps:
    model = _stock()[0]
    rows = [_ids(prompt) for prompt in prompts]
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    more: dict[str, Any] = {}
    if draft == PROMPT_LOOKUP:
        more["prompt_lookup_num_tokens"] = gamma
    elif draft == CAUSAL_LM:
        more["assistant_model"] = _stock(LAYER_SUBSET)[0]
        more["assistant_model"].generation_config.num_assistant_tokens = gamma
        more["assistant_model"].generation_config.num_assistant_tokens_schedule = "constant"
    steps = Steps(batch=len(prompts))
    model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=num_tokens, min_new_tokens=num_tokens,
                   pad_token_id=0, streamer=_Watch(steps), **more)  # fmt: skip
    return steps


@torch.inference_mode()
def _together(prompt: Ask, num_tokens: int, draft: str, gamma: int) -> Steps:
    runner, drafter, ids = _target().runner, _drafter(draft), _ids(prompt)
    bound, end, slot, steps = _target().vocabulary.size, len(ids) + num_tokens, runner.new_slot(), Steps()
    for start, stop in prefill_plan(0, len(ids) - 1):
        runner.forward([Feed(slot, tuple(ids[start:stop]), TokenClass.PROMPT, 0)])
    drafter.open(DraftSession(SESSION, Mode.GREEDY, GREEDY, b"", len(ids)), ids)
    while len(ids) < end:
        guess = _guess(drafter, ids, min(gamma, end - len(ids)))
        fed = (ids[-1], *guess)
        [rows] = runner.forward([Feed(slot, fed, TokenClass.DECODE, len(fed), best_below=bound)])
        best = [int(token) for token in cast(torch.Tensor, rows.best)]
        accepted = next((place for place, token in enumerate(guess) if token != best[place]), len(guess))
        ids += best[: accepted + 1]
        slot.truncate(len(ids) - 1)
        drafter.rewind(SESSION, len(ids) - 1)
        steps.add(accepted + 1)
        steps.num_tested += min(accepted + 1, len(guess))
        steps.num_accepted += accepted
    drafter.close(SESSION, keep=False)
    runner.free_slot(slot, forget=True)
    return steps


def _guess(drafter: Drafter, ids: Sequence[int], gamma: int) -> tuple[int, ...]:
    """Return a whole proposal; empty where the drafter has nothing to offer."""
    text = list(ids)
    while (plan := drafter.plan(SESSION, text, gamma)) is None:
        drafter.draw([Work(SESSION, Epoch(), text, 0)])
    while (missing := len(ids) + plan.count - len(text)) > 0:
        [outcome] = drafter.draw([Work(SESSION, Epoch(), text, missing)])
        if not isinstance(outcome, Guessed):
            raise outcome.error
        text += outcome.token_ids
    return tuple(text[len(ids) :])
