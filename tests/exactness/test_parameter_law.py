"""Unseeded text has the target's law under every parameter: chi-square of the engine with a drafter that differs.

Each generated token is turned into a number that is uniform if, given the tokens before it, the token was drawn from
the exact law, whatever those were (a randomised probability integral transform), so that long texts of every prefix
add up to one test. Tokens are ordered in two ways: by how much the parameter under test raises them, and by how much
likelier they are than under the draft. Where something is misapplied the numbers move to one side of one of them. The
exact law is written here once more, in plain Python, from the parameters' definitions.

False-alarm rate: `LEVEL` per test of a right implementation (half of it for each order). Keys and lots are fixed and
time is counted in steps, so a run gives the same outcome again. Every parameter has negative controls, which the same
test has to refuse: a verifier that forgets it; where it depends on earlier tokens, a verifier that does not count the
drafts before a row; where it weighs tokens, a drafter that draws without it and says otherwise. (Where it only bans
tokens or leaves them out, such a drafter draws from the same law among those that are left, and does no harm.)
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from benchmarks.exactness.sampler import Recipe, Sampler
from draft_service.drafters import sampling as draft_sampling
from draft_service.drafters.causal_lm import CausalLm
from draft_service.drafters.protocol import DraftSession, Guessed
from draft_service.drafters.toy import noisy
from outrider.errors import InvalidRequest
from outrider.grammar import Grammars
from outrider.history import History
from outrider.ids import Epoch, Mode, TokenKind
from outrider.messages import Grammar, GrammarKind, SamplingParams, Speculation
from outrider.model.toy import ToyLanguage, ToyRunner
from outrider.sampling import target_rows

LEVEL = 1e-4
PIECES = [b"", b"a", b"b", b"c", b"ab", b"ca", b"\n", b"d"]
"""A tiny vocabulary: id 0 ends an output."""
VOCAB = len(PIECES)
END = 0
PROMPT = (7, 2, 1)
LANGUAGE = ToyLanguage(VOCAB, seed=11, order=2, sharpness=1.1)
DRAFT = noisy(LANGUAGE, 0.5)
NUM_BINS = 8


class Pieces:
    """A tokenizer that is a list of pieces."""

    pieces = PIECES


GRAMMARS = Grammars(Pieces(), VOCAB)


@dataclass(frozen=True)
class Case:
    """A parameter under test, among others."""

    name: str
    sampling: SamplingParams
    against: dict[str, Any]
    """Another value of it: tokens are ordered by the ratio of both laws."""
    num_tokens: int = 24
    num: int = 40
    """Generations of a sample."""

    @property
    def forgotten(self) -> dict[str, Any]:
        """The parameter at its default."""
        return {self.name: getattr(SamplingParams(), self.name)}


def case(name: str, *, against: Any = None, num_tokens: int = 24, num: int = 40, **fields: Any) -> Case:
    other = getattr(SamplingParams(), name) if against is None else against
    return Case(name, SamplingParams(**{"temperature": 1.0} | fields), {name: other}, num_tokens, num)


CASES = [
    case("logit_bias", logit_bias=((1, -100.0), (3, 1.5), (END, -0.7))),
    case("repetition_penalty", repetition_penalty=6.0),
    case("presence_penalty", presence_penalty=2.0, top_k=7, num_tokens=6, num=160),
    case("frequency_penalty", frequency_penalty=1.5),
    case("temperature", temperature=0.4),
    case("top_k", top_k=2),
    case("top_p", top_p=0.5, temperature=1.2),
    case("min_p", min_p=0.5),
    case("allowed_token_ids", allowed_token_ids=(0, 2, 5, 6), repetition_penalty=1.2),
    case("min_tokens", min_tokens=3, end_token_ids=(END, 3, 6), against=99, num_tokens=5, num=250),
    case("grammar", grammar=Grammar(GrammarKind.REGEX, "(a|bc*|d\n?)+"), grammar_end_ids=(END,), num_tokens=6, num=200),
]
BY_NAME = {each.name: each for each in CASES}
WEIGHED = ("logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty", "temperature")
OF_EARLIER_TOKENS = ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens", "grammar")
WAYS = {
    "chains": (Mode.REJECTION, 0),
    "trees": (Mode.REJECTION, 6),
    "blocks": (Mode.BLOCK, 0),
}


# --- the law, once more -------------------------------------------------------------------------------------------


def exact_law(params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
    """Return the law of the next token from what the parameters are documented to mean."""
    probs = LANGUAGE.probs((*prompt, *output)).tolist()
    scores = {token: math.log(prob) for token, prob in enumerate(probs)}
    for token in list(scores):
        if is_banned(token, params, output):
            del scores[token]
    for token, bias in params.logit_bias:
        if token in scores:
            scores[token] += bias
    for token, score in scores.items():
        if token in prompt or token in output:
            scores[token] = score / params.repetition_penalty if score > 0 else score * params.repetition_penalty
        scores[token] -= params.presence_penalty * (token in output)
        scores[token] -= params.frequency_penalty * list(output).count(token)
    scores = {token: score / params.temperature for token, score in scores.items()}
    weights = {token: math.exp(score - max(scores.values())) for token, score in scores.items()}
    kept = sorted(weights, key=lambda token: (-weights[token], token))[: params.top_k or VOCAB]
    mass, total = 0.0, sum(weights[token] for token in kept)
    nucleus = []
    for token in kept:
        if mass < params.top_p * total or params.top_p == 1.0:
            nucleus.append(token)
        mass += weights[token]
    kept = [token for token in nucleus if weights[token] >= params.min_p]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(VOCAB)]


def is_banned(token: int, params: SamplingParams, output: Sequence[int]) -> bool:
    """Whether a token can not come next."""
    if any(own == token and bias <= -100 for own, bias in params.logit_bias):
        return True
    if params.allowed_token_ids and token not in params.allowed_token_ids:
        return True
    if params.grammar is not None and not may_follow(output, token):
        return True
    return len(output) < params.min_tokens and token in params.end_token_ids


def may_follow(output: Sequence[int], token: int) -> bool:
    """Whether a text of (a|bc*|d newline?)+ can go on with a token, or end; behind an end there are only ends."""
    if END in output or token == END:
        return token == END and (END in output or bool(output))
    state = "start"
    moves = {
        ("start", "a"): "a", ("start", "b"): "b", ("start", "d"): "d", ("a", "a"): "a", ("a", "b"): "b",
        ("a", "d"): "d", ("b", "c"): "b", ("b", "a"): "a", ("b", "b"): "b", ("b", "d"): "d", ("d", "\n"): "a",
        ("d", "a"): "a", ("d", "b"): "b", ("d", "d"): "d",
    }  # fmt: skip
    for letter in b"".join(PIECES[own] for own in (*output, token)).decode():
        if (state, letter) not in moves:
            return False
        state = moves[state, letter]
    return True


def p_value(case: Case, sequences: Sequence[Sequence[int]], lots: random.Random) -> float:
    """Return how well texts fit the law, in the order that fits worse; 0 where something has no mass."""
    counts = {"parameter": [0] * NUM_BINS, "draft": [0] * NUM_BINS}
    for sequence in sequences:
        for length, token in enumerate(sequence):
            law = exact_law(case.sampling, PROMPT, sequence[:length])
            if not law[token]:
                return 0.0
            others = {
                "parameter": exact_law(replace(case.sampling, **case.against), PROMPT, sequence[:length]),
                "draft": DRAFT.probs((*PROMPT, *sequence[:length])).tolist(),
            }
            for name, other in others.items():
                place = transformed(law, other, token, lots.random())
                counts[name][min(NUM_BINS - 1, int(NUM_BINS * place))] += 1
    return min(1.0, 2 * min(float(chisquare(found).pvalue) for found in counts.values()))


def transformed(law: list[float], other: list[float], token: int, lot: float) -> float:
    """Return a number in 0 .. 1, uniform if the token was drawn from the law; low for those that `other` prefers."""
    ratios = [own / (their or 1e-9) for own, their in zip(law, other, strict=True)]
    below = sum(own for own, ratio in zip(law, ratios, strict=True) if ratio < ratios[token])
    tied = [own for own, ratio in enumerate(ratios) if ratio == ratios[token] and own <= token]
    return below + sum(law[own] for own in tied) - law[token] * lot


# --- samples ------------------------------------------------------------------------------------------------------


def sample(case: Case, way: str, num: int) -> tuple[list[tuple[int, ...]], dict[TokenKind, int]]:
    """Return so many texts of the engine and a drafter that often differs, and how their tokens came about."""
    mode, tree_nodes = WAYS[way]
    drafter = CausalLm(ToyRunner(DRAFT), vocab_len=VOCAB, tree_nodes=tree_nodes)
    plan = Speculation(4, 4, 4 if tree_nodes else 8)
    recipe = Recipe(PROMPT, mode, case.sampling, case.num_tokens, plan, GRAMMARS.begin(case.sampling))
    with torch.inference_mode():
        sampler = Sampler(ToyRunner(LANGUAGE), drafter, VOCAB, num_lanes=16)
        found = sampler.sample(recipe, num, seed=sum(map(ord, case.name + way)))
    return found.sequences, found.kinds


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BY_NAME)
def test_the_law_of_unseeded_text_is_the_targets_under_every_parameter(name: str, way: str) -> None:
    num = BY_NAME[name].num if way == "chains" else BY_NAME[name].num // 2
    sequences, kinds = sample(BY_NAME[name], way, num)
    assert p_value(BY_NAME[name], sequences, random.Random(name)) > LEVEL
    assert kinds[TokenKind.ACCEPTED] > 40
    assert kinds[TokenKind.RECOVERED] + kinds[TokenKind.BONUS] > 40


# --- planted mistakes ---------------------------------------------------------------------------------------------


@contextmanager
def a_verifier_that_forgets(case: Case) -> Iterator[None]:
    def forgetful(rows: Tensor, mode: Mode, params: SamplingParams, *rest: Any) -> Tensor:
        return target_rows(rows, mode, replace(params, **case.forgotten), *rest)

    with patch("verify_service.judging.target_rows", forgetful):
        yield


@contextmanager
def a_drafter_that_draws_without(case: Case) -> Iterator[None]:
    """It says all the same that it drew with the parameter, where that could be."""

    def lying(logits: Tensor, session: DraftSession, position: int, epoch: Epoch, history: History | None) -> Guessed:
        told = guess(logits, session, position, epoch, history)
        without = replace(session, sampling=replace(session.sampling, **case.forgotten))
        drawn = guess(logits, without, position, epoch, history)
        return replace(told, token_ids=drawn.token_ids) if drawn.token_ids[0] in told.rows[0].token_ids else told

    guess = draft_sampling.guess
    with patch("draft_service.drafters.causal_lm.guess", lying):
        yield


class Deaf(History):
    """A history that does not hear of the drafts inside a run."""

    def after(self, run: Sequence[int]) -> History:
        copied = super().after(())
        copied.advance = lambda output_ids: None  # type: ignore[method-assign]
        return copied


@contextmanager
def a_verifier_that_does_not_count_drafts(case: Case) -> Iterator[None]:
    with patch("verify_service.sessions.History", Deaf):
        yield


Mistake = Callable[[Case], AbstractContextManager[None]]
PLANTED: list[tuple[str, Mistake]] = [
    *((name, a_verifier_that_forgets) for name in BY_NAME),
    *((name, a_drafter_that_draws_without) for name in WEIGHED),
    *((name, a_verifier_that_does_not_count_drafts) for name in OF_EARLIER_TOKENS),
]


@pytest.mark.parametrize(("name", "mistake"), PLANTED, ids=[f"{mistake.__name__}-{name}" for name, mistake in PLANTED])
def test_planted_mistake_is_refused(name: str, mistake: Mistake) -> None:
    own = BY_NAME[name]
    breaks = own.sampling.grammar is not None  # the engine notices by itself what its grammar forbids
    refusal = pytest.raises(InvalidRequest, match=r"sampling\.grammar") if breaks else nullcontext()
    with mistake(own), refusal:
        sequences, _ = sample(own, "chains", own.num)
        assert p_value(own, sequences, random.Random(name)) < LEVEL
