"""The engine and what a request asks besides tokens: a prompt's log-probabilities, and grammars that are audited."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from outrider.grammar import Grammars
from outrider.messages import Grammar, GrammarKind, PromptScores, SamplingParams, TokenLogprobs
from outrider.model.runner import BLOCK_LEN
from outrider.model.toy import ToyLanguage, ToyRunner
from tests.unit.verify_desk import VOCAB, ClassesMatter, Client, Desk, Request, noisy_draft
from verify_service.audit import AuditSettings
from verify_service.engine import EngineSettings

LANGUAGE = ToyLanguage(VOCAB, seed=5)
LONG = Request(prompt=tuple(at * 7 % VOCAB for at in range(3 * BLOCK_LEN + 10)), max_tokens=4, num_prompt_logprobs=1)
PIECES = [b"", *(bytes([97 + own]) for own in range(VOCAB - 1))]


class Pieces:
    """A tokenizer that is a list of letters."""

    pieces = PIECES


def scores(client: Client) -> list[TokenLogprobs]:
    """Return what a client was told of its prompt, whose parts follow one another."""
    parts = [item for item in client.received if isinstance(item, PromptScores)]
    found: list[TokenLogprobs] = []
    for part in parts:
        assert part.start == len(found) + 1
        found += part.logprobs
    return found


def assert_right(client: Client, prompt: tuple[int, ...]) -> None:
    found = scores(client)
    assert len(found) == len(prompt) - 1
    for position, entry in enumerate(found, start=1):
        law = LANGUAGE.probs(prompt[:position]).log()
        assert entry.logprob == pytest.approx(float(law[prompt[position]]), abs=1e-12)
        assert [token for token, _ in entry.top] == [int(law.argmax())]


def test_a_prompt_is_scored_before_anything_is_committed_also_where_its_kv_was_there() -> None:
    desk = Desk(ToyRunner(LANGUAGE))
    plain = Client(desk, replace(LONG, session_id="first", num_prompt_logprobs=-1), noisy_draft(0.4))
    desk.run([plain])
    client = Client(desk, LONG, noisy_draft(0.4))
    desk.run([client])
    assert_right(client, LONG.prompt)
    assert isinstance(client.received[0], PromptScores)
    assert client.output == plain.output
    assert not scores(plain)


@pytest.mark.parametrize("prompt", [(3,), (3, 4), LONG.prompt[:BLOCK_LEN], LONG.prompt[: BLOCK_LEN + 1]], ids=len)
def test_prompts_of_every_length_are_scored_once(prompt: tuple[int, ...]) -> None:
    desk = Desk(ToyRunner(LANGUAGE))
    client = Client(desk, replace(LONG, prompt=prompt), noisy_draft(0.4))
    desk.run([client])
    assert_right(client, prompt)
    assert sum(isinstance(item, PromptScores) for item in client.received) == 1


def test_a_session_that_gave_its_place_up_scores_what_it_had_not() -> None:
    """The younger of two that do not fit together loses its KV in the middle of its prompt."""
    desk = Desk(ToyRunner(LANGUAGE, num_blocks=6))
    clients = [
        Client(desk, replace(LONG, session_id=name, prompt=(own, *LONG.prompt), max_tokens=60), noisy_draft(0.4))
        for own, name in enumerate(("older", "younger"))
    ]
    desk.run(clients)
    for own, client in enumerate(clients):
        assert_right(client, (own, *LONG.prompt))
        assert not client.errors


def test_scores_leave_in_parts_of_bounded_size() -> None:
    desk = Desk(ToyRunner(LANGUAGE))
    with patch("verify_service.scoring.MAX_PART", 40):
        client = Client(desk, LONG, noisy_draft(0.4))
        desk.run([client])
    assert_right(client, LONG.prompt)
    assert sum(isinstance(item, PromptScores) for item in client.received) > 5


def test_of_a_resumed_session_the_prompt_alone_is_scored() -> None:
    desk = Desk(ToyRunner(LANGUAGE))
    prompt_len = 2 * BLOCK_LEN - 3
    client = Client(desk, replace(LONG, prompt_len=prompt_len, max_tokens=BLOCK_LEN * 2), noisy_draft(0.4))
    desk.run([client])
    assert_right(client, LONG.prompt[:prompt_len])


@pytest.mark.parametrize("runner", [ToyRunner, ClassesMatter], ids=["toy", "classes_matter"])
def test_a_session_with_a_grammar_and_its_twin_draw_the_same(runner: Any) -> None:
    sampling = SamplingParams(
        temperature=0.0,
        grammar=Grammar(GrammarKind.REGEX, "([a-d]{1,3}w){40}"),
        grammar_end_ids=(0,),
        presence_penalty=0.3,
    )
    grammar = Grammars(Pieces(), VOCAB).begin(sampling)
    request = Request(prompt=(1, 2, 3), sampling=sampling, grammar=grammar, max_tokens=60, num_prompt_logprobs=0)
    desk = Desk(ClassesMatter() if runner is ClassesMatter else None, EngineSettings(audit=AuditSettings(share=1.0)))
    client = Client(desk, request, noisy_draft(0.4))
    desk.run([client])
    for _ in range(200):
        if not desk.step():
            break
    assert desk.engine.audit.counters["checked"] == 1
    assert not desk.engine.audit.counters["mismatch"]
    assert not client.errors
    text = b"".join(PIECES[token] for token in client.output).decode()
    assert set(text) <= set("abcdw")
    assert text.count("w") >= 15
