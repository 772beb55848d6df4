"""Every request parameter through the three real services: speculation changes no text, and bad input is named."""

import asyncio
import json
import random
import re
from dataclasses import replace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from draft_service.app import DraftApp
from draft_service.config import DraftSettings
from draft_service.drafters.causal_lm import CausalLm
from draft_service.drafters.toy import noisy
from outrider.client import Client
from outrider.errors import InvalidRequest
from outrider.generation import Chunk, GenerationRequest, PromptLogprobs, ResumeFrom, SpeculationChoice, TokenPrompt
from outrider.ids import FinishReason, Mode
from outrider.messages import Grammar, GrammarKind, SamplingParams
from outrider.model.toy import ToyLanguage, ToyRunner, ToyTokenizer
from outrider.sampling import probabilities
from tests.integration.cluster_bench import Bench, Heard, hear
from tests.integration.odd_parts import SIZE, cluster

TOY = ToyTokenizer()
TARGET = ToyLanguage(SIZE, 3, 1, 3.0)
OFF = SpeculationChoice(off=True)
PROMPT = tuple(TOY.encode("the cat "))
END = TOY.eos_token_id
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
GRAMMARS = [
    Grammar(GrammarKind.REGEX, "(cat |a |on |[0-9]{1,3},)+mat"),
    Grammar(GrammarKind.JSON_SCHEMA, SCHEMA),
    Grammar(GrammarKind.LARK, 'start: ("the " | "x" | item)+\nitem: "<" /[a-z]{1,4}/ ">"'),
    Grammar(GrammarKind.CHOICES, json.dumps(["the cat sat on the mat. ", "the mat", "\u4f60\u597d \U0001f600"])),
]


def drafter(agreement: float = 0.7, tree_nodes: int = 0) -> CausalLm:
    return CausalLm(ToyRunner(noisy(TARGET, agreement)), vocab_len=SIZE, kind="toy", tree_nodes=tree_nodes)


def ask(**fields: Any) -> GenerationRequest:
    known: dict[str, Any] = {
        "max_tokens": 24, "sampling": SamplingParams(temperature=0.0), "return_token_origin": True,
        "speculation": SpeculationChoice(gamma=4, window=8), **fields,
    }  # fmt: skip
    return GenerationRequest(TokenPrompt(PROMPT), **known)


# --- text identity with the twin ------------------------------------------------------------------------------------


def random_request(draw: random.Random, *, greedy: bool) -> GenerationRequest:
    """Return a request with a random value of every parameter; about half of each kind are at their defaults."""

    def maybe(value: Any, default: Any) -> Any:
        return value if draw.random() < 0.5 else default

    grammar = maybe(draw.choice(GRAMMARS), None)
    some = tuple(sorted({END, *draw.sample(range(SIZE), 40), *range(97, 110)}))
    sampling = SamplingParams(
        logit_bias=maybe(((draw.randrange(1, SIZE), -100.0), (draw.randrange(SIZE), 2.0)), ()),
        repetition_penalty=maybe(draw.uniform(0.8, 1.5), 1.0),
        presence_penalty=maybe(draw.uniform(-1, 1), 0.0),
        frequency_penalty=maybe(draw.uniform(-1, 1), 0.0),
        temperature=0.0 if greedy else draw.choice([0.5, 1.0, 1.3]),
        top_k=maybe(draw.randrange(1, 60), 0),
        top_p=maybe(draw.uniform(0.5, 1.0), 1.0),
        min_p=maybe(draw.uniform(0.0, 0.2), 0.0),
        allowed_token_ids=maybe(some, ()) if grammar is None else (),
        min_tokens=maybe(draw.randrange(12), 0) if grammar is None else 0,
        grammar=grammar,
    )
    if len({token for token, _ in sampling.logit_bias}) < len(sampling.logit_bias):
        sampling = SamplingParams(temperature=sampling.temperature)
    logprobs = maybe(draw.randrange(4), None)
    return ask(
        max_tokens=draw.randrange(12, 30),
        sampling=sampling,
        seed=None if greedy else draw.randrange(1 << 32),
        sample_index=draw.randrange(3),
        stop=maybe((draw.choice(["a", "t ", "on", "x", ","]),), ()),
        stop_token_ids=maybe((draw.randrange(SIZE),), ()),
        ignore_eos=grammar is None and draw.random() < 0.3,
        num_logprobs=logprobs,
        processed_logprobs=logprobs is not None and draw.random() < 0.5,
        num_prompt_logprobs=maybe(1, None),
    )


def told(heard: Heard) -> tuple[Any, ...]:
    """Return all that does not say how it came about."""
    logprobs = [entry for chunk in heard.chunks for entry in chunk.logprobs]
    prompt = [event for event in heard.events if isinstance(event, PromptLogprobs)]
    return heard.token_ids, heard.text, heard.finished.reason, heard.finished.matched, logprobs, prompt


async def pair(client: Client, request: GenerationRequest) -> tuple[Heard | InvalidRequest, Heard | InvalidRequest]:
    """Ask with drafts and without; a grammar that bans leave no way on is refused by name, alike."""
    found = await asyncio.gather(
        hear(client, request), hear(client, replace(request, speculation=OFF)), return_exceptions=True
    )
    for each in found:
        if isinstance(each, BaseException) and not isinstance(each, InvalidRequest):
            raise each
    return found[0], found[1]  # type: ignore[return-value]  # other exceptions were raised


@pytest.mark.parametrize("mode", ["greedy", "coupled"])
@pytest.mark.parametrize("shape", ["chains", "trees"])
async def test_any_combination_of_parameters_gives_the_twins_text_log_probabilities_and_end(
    valkey_url: str, shape: str, mode: str
) -> None:
    draw = random.Random(f"{shape} {mode}")
    requests = [random_request(draw, greedy=mode == "greedy") for _ in range(40)]
    async with cluster(valkey_url, TARGET, [drafter(tree_nodes=8 * (shape == "trees"))], adaptive=False) as client:
        pairs = [await pair(client, request) for request in requests]
    accepted = 0
    for request, (fast, plain) in zip(requests, pairs, strict=True):
        if isinstance(fast, InvalidRequest) or isinstance(plain, InvalidRequest):
            assert str(fast) == str(plain), request
            continue
        assert told(fast) == told(plain), request
        accepted += fast.finished.figures.num_accepted
    assert accepted > 100
    assert sum(isinstance(fast, Heard) for fast, _ in pairs) > 30
