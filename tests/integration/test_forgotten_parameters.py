"""What each parameter promises is kept with drafts, and would be missed: a request that forgets it breaks the promise.

Each promise is written here once more, from the parameters' page and the target's law. The parameters that shape a law
have their planted mistakes in `exactness/test_parameter_law.py`; here are those whose promise one text can show.
"""

import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from outrider.client import Client
from outrider.generation import GenerationRequest, PromptLogprobs, SpeculationChoice, TokenPrompt
from outrider.ids import FinishReason
from outrider.messages import Grammar, GrammarKind, SamplingParams
from outrider.model.toy import ToyLanguage, ToyTokenizer
from outrider.sampling import probabilities
from tests.integration.cluster_bench import Heard, hear
from tests.integration.odd_parts import SIZE, cluster, language_drafter

TOY = ToyTokenizer()
END = TOY.eos_token_id
TARGET = ToyLanguage(SIZE, 3, 2, 3.0)
PROMPT = tuple(TOY.encode("the cat "))
NUM = 24
GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=0.7, top_k=5)
AT_ONCE = ((END, 100.0),)
"""Makes an end of sequence the likeliest token everywhere."""


def likeliest() -> list[int]:
    ids = list(PROMPT)
    for _ in range(NUM):
        ids.append(int(TARGET.probs(ids).argmax()))
    return ids[len(PROMPT) :]


PLAIN = likeliest()
TEXT = TOY.decode(PLAIN)
HALF = PLAIN.index(PLAIN[NUM // 2])
OFF = SpeculationChoice(off=True)


@dataclass(frozen=True)
class Promise:
    """A parameter, and what holds of an answer that heeds it."""

    fields: dict[str, Any]
    holds: Callable[[Heard], bool]
    forgotten: dict[str, Any]
    """The parameter at its default."""
    like_the_twin: bool = False
    """Whether it is kept where the answer is that of the same request without drafts, whatever is forgotten."""


def promise(holds: Callable[[Heard], bool], like_the_twin: bool = False, **fields: Any) -> Promise:
    """Return a promise of the first field."""
    name = next(iter(fields))
    return Promise(fields, holds, {name: getattr(GenerationRequest(TokenPrompt(PROMPT)), name)}, like_the_twin)


def sampled(name: str, value: Any, holds: Callable[[Heard], bool], *, bias: Any = (), **fields: Any) -> Promise:
    """Return a promise of a field of the sampling parameters."""
    without = replace(GREEDY, logit_bias=bias)
    return Promise({"sampling": replace(without, **{name: value}), **fields}, holds, {"sampling": without})


def grammar(kind: GrammarKind, text: str, holds: Callable[[str], object]) -> Promise:
    def ended(heard: Heard) -> bool:
        return heard.finished.reason is FinishReason.STOP and bool(holds(heard.text))

    return sampled("grammar", Grammar(kind, text), ended, max_tokens=60)


def scored(heard: Heard) -> bool:
    """Whether log-probabilities are those of the distribution that was sampled from."""
    entries = [entry for chunk in heard.chunks for entry in chunk.logprobs]
    ids = list(PROMPT)
    for token, entry in zip(heard.token_ids, entries, strict=True):
        law = probabilities(TARGET.probs(ids).log()[None], WARM, SIZE)[0]
        if abs(entry.logprob - float(law[token].log())) > 1e-9:
            return False
        ids.append(token)
    return True


def is_number(text: str) -> bool:
    try:
        return isinstance(json.loads(text), int)
    except json.JSONDecodeError:
        return False


def top_of(heard: Heard) -> list[int]:
    return [len(entry.top) for chunk in heard.chunks for entry in chunk.logprobs]


CHOICES = ["the mat", "on a cat"]
PROMISES = {
    "max_tokens": promise(lambda heard: heard.token_ids == PLAIN[:9], max_tokens=9),
    "stop": promise(
        lambda heard: (heard.text, heard.finished.matched) == (TEXT[: TEXT.index(TEXT[5:8])], TEXT[5:8]),
        stop=(TEXT[5:8],),
    ),
    "stop_token_ids": promise(lambda heard: heard.token_ids == PLAIN[: HALF + 1], stop_token_ids=(PLAIN[HALF],)),
    "ignore_eos": promise(
        lambda heard: heard.token_ids == [END] * 5, ignore_eos=True, sampling=replace(GREEDY, logit_bias=AT_ONCE),
        max_tokens=5,
    ),
    "seed": promise(lambda heard: True, like_the_twin=True, seed=11, sampling=SamplingParams()),
    "sample_index": promise(lambda heard: True, like_the_twin=True, sample_index=1, seed=11, sampling=SamplingParams()),
    "logprobs": promise(lambda heard: top_of(heard) == [2] * NUM, num_logprobs=2),
    "processed_logprobs": promise(scored, processed_logprobs=True, num_logprobs=0, sampling=WARM, seed=4),
    "prompt_logprobs": promise(
        lambda heard: sum(len(each.logprobs) for each in heard.events if isinstance(each, PromptLogprobs))
        == len(PROMPT),
        num_prompt_logprobs=1,
    ),
    "banned": sampled("logit_bias", ((PLAIN[3], -100.0),), lambda heard: PLAIN[3] not in heard.token_ids),
    "allowed_token_ids": sampled("allowed_token_ids", (5, 60), lambda heard: {*heard.token_ids} <= {5, 60}),
    "min_tokens": sampled(
        "min_tokens", 6, lambda heard: len(heard.token_ids) == 7 and heard.token_ids.index(END) == 6, bias=AT_ONCE
    ),
    "json_schema": grammar(GrammarKind.JSON_SCHEMA, '{"type": "integer", "minimum": 10, "maximum": 99}', is_number),
    "regex": grammar(GrammarKind.REGEX, "(cat |a ){1,3}mat", re.compile("(cat |a ){1,3}mat").fullmatch),
    "lark": grammar(GrammarKind.LARK, 'start: "on" /[a-c]{2}/ "x"', re.compile("on[a-c]{2}x").fullmatch),
    "choices": grammar(GrammarKind.CHOICES, json.dumps(CHOICES), lambda text: text in CHOICES),
}  # fmt: skip


def ask(fields: dict[str, Any]) -> GenerationRequest:
    known = {"max_tokens": NUM, "sampling": GREEDY, "speculation": SpeculationChoice(gamma=4, window=8), **fields}
    return GenerationRequest(TokenPrompt(PROMPT), **known)


@pytest.fixture(scope="module")
async def client(valkey_url: str) -> AsyncIterator[Client]:
    async with cluster(valkey_url, TARGET, [language_drafter(TARGET)], adaptive=False) as opened:
        yield opened


@pytest.mark.parametrize("name", PROMISES)
async def test_a_promise_is_kept_with_drafts_and_broken_by_whoever_forgets_it(client: Client, name: str) -> None:
    own = PROMISES[name]
    twin = await hear(client, ask({**own.fields, "speculation": OFF}))

    def kept(heard: Heard) -> bool:
        return own.holds(heard) and (not own.like_the_twin or heard.token_ids == twin.token_ids)

    assert kept(await hear(client, ask(own.fields)))
    assert kept(twin)
    assert not kept(await hear(client, ask({**own.fields, **own.forgotten})))
