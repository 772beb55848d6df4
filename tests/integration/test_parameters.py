"""Every request parameter through the three real services: speculation changes no text, and bad input is named."""

import asyncio
import json
import random
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from draft_service.drafters.causal_lm import CausalLm
from draft_service.drafters.toy import noisy
from outrider.client import Client
from outrider.errors import InvalidRequest
from outrider.generation import Chunk, GenerationRequest, PromptLogprobs, SpeculationChoice, TokenPrompt
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
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": -99, "maximum": 99}},
        "required": ["a"],
        "additionalProperties": False,
    }
)
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
    requests = [random_request(draw, greedy=mode == "greedy") for _ in range(25)]
    async with cluster(valkey_url, TARGET, [drafter(tree_nodes=8 * (shape == "trees"))], adaptive=False) as client:
        pairs = [await pair(client, request) for request in requests]
    accepted = 0
    for request, (fast, plain) in zip(requests, pairs, strict=True):
        if isinstance(fast, InvalidRequest) or isinstance(plain, InvalidRequest):
            assert str(fast) == str(plain), request
            continue
        assert told(fast) == told(plain), request
        accepted += fast.finished.figures.num_accepted
    assert accepted > 60
    assert sum(isinstance(fast, Heard) for fast, _ in pairs) > 18


# --- grammars -------------------------------------------------------------------------------------------------------


def matches(grammar: Grammar, text: str) -> bool:
    """Whether a whole text is of a grammar, as far as this file's grammars go, without the library behind them."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return isinstance(json.loads(text)["a"], int)
        case GrammarKind.CHOICES:
            return text in json.loads(grammar.text)
        case GrammarKind.LARK:
            return re.fullmatch(r"(the |x|<[a-z]{1,4}>)+", text) is not None
        case _:
            return re.fullmatch(grammar.text, text) is not None


@pytest.mark.parametrize("grammar", GRAMMARS, ids=[grammar.kind.value for grammar in GRAMMARS])
async def test_text_that_ends_by_itself_matches_its_grammar_in_every_mode(valkey_url: str, grammar: Grammar) -> None:
    sampling = SamplingParams(grammar=grammar, logit_bias=((END, 4.0), *((own, -4.0) for own in TOY.encode(" \n\t\r"))))
    modes: list[dict[str, Any]] = [{"seed": 5}, {"mode": Mode.REJECTION}, {"mode": Mode.BLOCK}]
    modes.append({"sampling": replace(sampling, temperature=0.0)})
    async with cluster(valkey_url, TARGET, [drafter()], adaptive=False) as client:
        asked = [ask(**{"sampling": sampling, "max_tokens": 60, **mode}) for mode in modes for _ in range(3)]
        heard = await asyncio.gather(*(hear(client, request) for request in asked))
    ended = [each for each in heard if each.finished.reason is FinishReason.STOP]
    assert len(ended) >= 6
    assert all(matches(grammar, each.text) for each in ended)


async def test_a_grammar_that_bans_leave_no_way_on_ends_the_generation_by_name(valkey_url: str) -> None:
    (comma,) = TOY.encode(",")
    sampling = SamplingParams(
        temperature=0.0, grammar=Grammar(GrammarKind.REGEX, "xx,y"), logit_bias=((comma, -100.0),)
    )
    async with cluster(valkey_url, TARGET, [drafter()], adaptive=False) as client:
        for speculation in (OFF, SpeculationChoice(gamma=4, window=8)):
            with pytest.raises(InvalidRequest, match=r"sampling\.grammar"):
                await hear(client, ask(sampling=sampling, speculation=speculation))


async def test_a_session_with_a_grammar_goes_on_where_its_verifier_or_its_client_was_lost(valkey_url: str) -> None:
    grammar = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "array", "items": {"type": "integer"}, "minItems": 30}')
    request = ask(sampling=SamplingParams(grammar=grammar), seed=3, max_tokens=80)
    async with Bench(valkey_url) as bench:
        verifiers = [(await bench.verifier(toy_delay_s=0.005))[0] for _ in range(2)]
        worker, _ = await bench.drafter()
        _, _, client = await bench.orchestrator(verifiers, [worker], adaptive=False)
        whole = await hear(client, request)
        events, killed = [], False
        async for event in client.generate(request):
            events.append(event)
            if isinstance(event, Chunk) and not killed and event.start > len(PROMPT) + 10:
                killed = True
                busy = next(each for each in verifiers if each.app.describe().load)  # type: ignore[attr-defined]
                await busy.kill()
        heard = Heard(events)
        assert killed
        assert heard.token_ids == whole.token_ids
        started = heard.events[0]
        resumed = Heard([event async for event in client.resume(started.session_id, len(PROMPT) + 7)])  # type: ignore[union-attr]
        assert resumed.token_ids == whole.token_ids[7:]


# --- log-probabilities ----------------------------------------------------------------------------------------------


async def test_log_probabilities_of_a_prompt_are_the_models_own_and_the_first_token_has_none(valkey_url: str) -> None:
    prompt = tuple(TOY.encode("the cat sat on the mat. " * 30))
    async with cluster(valkey_url, TARGET, [drafter()], adaptive=False) as client:
        first = replace(ask(max_tokens=0, num_prompt_logprobs=2), prompt=TokenPrompt(prompt))
        heard = await hear(client, first)
        again = await hear(client, replace(first, max_tokens=3, sampling=SamplingParams(temperature=0.3)))
    told_of = [event for event in heard.events if isinstance(event, PromptLogprobs)]
    assert (heard.finished.reason, heard.token_ids) == (FinishReason.LENGTH, [])
    assert told_of == [event for event in again.events if isinstance(event, PromptLogprobs)]
    assert len(again.token_ids) == 3
    scores = [entry for part in told_of for entry in part.logprobs]
    assert [token for part in told_of for token in part.token_ids] == list(prompt)
    assert scores[0] is None
    for position, entry in enumerate(scores[1:], start=1):
        law = TARGET.probs(prompt[:position]).log()
        assert entry is not None
        assert entry.logprob == pytest.approx(float(law[prompt[position]]), abs=1e-9)
        best = torch.sort(law, descending=True, stable=True)
        assert [token for token, _ in entry.top] == best.indices[:2].tolist()


async def test_processed_log_probabilities_are_of_the_law_that_was_sampled_from(valkey_url: str) -> None:
    sampling = SamplingParams(temperature=0.7, top_k=5, logit_bias=((97, 2.0),))
    async with cluster(valkey_url, TARGET, [drafter()], adaptive=False) as client:
        heard = await hear(client, ask(sampling=sampling, seed=1, num_logprobs=8, processed_logprobs=True))
    entries = [entry for chunk in heard.chunks for entry in chunk.logprobs]
    assert len(entries) == len(heard.token_ids)
    ids = list(PROMPT)
    for token, entry in zip(heard.token_ids, entries, strict=True):
        law = probabilities(TARGET.probs(ids).log()[None], sampling, SIZE)[0]
        assert entry.logprob == pytest.approx(float(law[token].log()), abs=1e-9)
        assert {own for own, _ in entry.top} == set(torch.nonzero(law).squeeze(1).tolist())
        ids.append(token)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"sampling": SamplingParams(grammar=Grammar(GrammarKind.REGEX, "("))}, "sampling.grammar.regex"),
        ({"sampling": SamplingParams(min_tokens=30)}, "sampling.min_tokens"),
        ({"sampling": SamplingParams(allowed_token_ids=(SIZE,))}, "sampling.allowed_token_ids"),
        ({"sampling": SamplingParams(end_token_ids=(1,))}, "sampling.end_token_ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"num_prompt_logprobs": 129}, "prompt_logprobs"),
        ({"processed_logprobs": True}, "processed_logprobs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_bad_input_is_refused_by_the_name_of_its_field(
    valkey_url: str, fields: dict[str, Any], field: str
) -> None:
    async with cluster(valkey_url, TARGET) as client:
        with pytest.raises(InvalidRequest) as refused:
            await hear(client, ask(**fields))
    assert refused.value.field == field
