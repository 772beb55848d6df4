"""What copying drafters offer where the request bans something: its beginning, up to the first token that is banned."""

import random
from typing import Any

import pytest

from draft_service.drafters.legal import Legal
from draft_service.drafters.prediction import PredictionDrafter
from draft_service.drafters.prompt_lookup import PromptLookup
from draft_service.drafters.protocol import DraftSession, Guessed, Work
from draft_service.drafters.sampling import Penalised
from outrider.grammar import Grammars
from outrider.ids import Epoch, Mode, SessionId
from outrider.messages import Grammar, GrammarKind, SamplingParams
from outrider.model.toy import ToyTokenizer

TOY = ToyTokenizer()
GRAMMARS = Grammars(TOY, len(TOY))
S = SessionId("s")
PROMPT = TOY.encode("abcdxabcdx")
A, B, C, D, X = TOY.encode("abcdx")


def session(prompt_len: int = len(PROMPT), prediction: tuple[int, ...] = (), **fields: Any) -> DraftSession:
    sampling = SamplingParams(temperature=0.0, **fields)
    return DraftSession(
        S, Mode.GREEDY, sampling, b"", prompt_len, prediction=prediction, grammar=GRAMMARS.begin(sampling)
    )


CASES: list[tuple[dict[str, Any], int]] = [
    ({}, 5),
    ({"allowed_token_ids": (A, B, X)}, 2),
    ({"logit_bias": ((D, -100.0), (A, -99.0))}, 3),
    ({"min_tokens": 4, "end_token_ids": (D,)}, 3),
    ({"min_tokens": 3, "end_token_ids": (D,)}, 5),
    ({"grammar": Grammar(GrammarKind.REGEX, "abc[ef]"), "grammar_end_ids": (0,)}, 3),
    ({"grammar": Grammar(GrammarKind.REGEX, "b+"), "grammar_end_ids": (0,)}, 0),
    ({"allowed_token_ids": (B, C)}, 0),
]


@pytest.mark.parametrize(("fields", "count"), CASES)
def test_lookup_and_prediction_offer_what_they_copy_up_to_what_is_banned(fields: dict[str, Any], count: int) -> None:
    copied = (A, B, C, D, X)
    for drafter, own in (
        (PromptLookup(len(TOY), context_len=100), session(**fields)),
        (PredictionDrafter(len(TOY), context_len=100), session(prediction=copied, **fields)),
    ):
        drafter.open(own, PROMPT)
        plan = drafter.plan(S, PROMPT, 5)
        assert plan is not None
        assert plan.count == count
        if not count:
            assert (plan.reason, plan.until_len) == ("banned", len(PROMPT) + 1)
            continue
        (drawn,) = drafter.draw([Work(S, Epoch(), PROMPT, plan.count)])
        assert isinstance(drawn, Guessed)
        assert drawn.token_ids == copied[:count]


def test_what_is_banned_follows_the_text_also_where_that_is_taken_back() -> None:
    legal = Legal(session(grammar=Grammar(GrammarKind.REGEX, "(ab|cd)+x"), grammar_end_ids=(0,)))
    assert legal.num_allowed(PROMPT, (A, B, X, A)) == 3
    assert legal.num_allowed([*PROMPT, C], (A, B)) == 0
    assert legal.num_allowed([*PROMPT, C, D], (X,)) == 1
    legal.rewind(len(PROMPT) + 1)
    assert legal.num_allowed([*PROMPT, C, D, A], (B, X)) == 2
    legal.rewind(len(PROMPT))
    assert legal.num_allowed([*PROMPT, A], (D, B)) == 0
    assert legal.num_allowed([*PROMPT, A], (B,)) == 1


@pytest.mark.parametrize("seed", range(5))
def test_a_history_that_is_kept_over_rewinds_is_the_one_that_is_read_anew(seed: int) -> None:
    draw, kept = random.Random(seed), Penalised(3)
    ids = [1, 2, 3]
    for _ in range(60):
        for _ in range(draw.choice([0, 0, 1, 2])):
            length = draw.randrange(3, len(ids) + 1)
            kept.rewind(length)
            ids = [*ids[:length], 7]
        ids += [draw.randrange(5) for _ in range(draw.randrange(1, 4))]
        fresh = Penalised(3).at(ids)
        found = kept.at(ids)
        assert dict(zip(*found.seen, strict=True)) == dict(zip(*fresh.seen, strict=True))
        assert found.num_output == fresh.num_output
