"""Bans by id, by length and by grammar: what they do to a row, and which combinations are refused by name."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from orchestrator.requests import Defaults, check, check_length, with_ends
from outrider.errors import InvalidRequest
from outrider.generation import GenerationRequest, TokenPrompt
from outrider.history import History
from outrider.messages import Grammar, GrammarKind, SamplingParams, Vocabulary
from outrider.parameters import validate
from outrider.sampling import processed_logits

GRAMMAR = Grammar(GrammarKind.REGEX, "a+")
ZEROS = torch.zeros(4, 6, dtype=torch.float64)


def kept(params: SamplingParams, history: History | None = None, run: tuple[int, ...] = ()) -> list[list[int]]:
    """Return the tokens that have mass in each of four rows."""
    rows = processed_logits(ZEROS, params, 6, history, run)
    return [torch.nonzero(row > -torch.inf).squeeze(1).tolist() for row in rows]


def test_all_but_the_allowed_tokens_are_banned_in_every_row() -> None:
    params = SamplingParams(allowed_token_ids=(5, 1, 3), logit_bias=((3, -100.0), (0, 50.0)))
    assert kept(params) == [[1, 5]] * 4


@pytest.mark.parametrize("spoken", range(5))
def test_ends_are_banned_until_the_output_with_the_drafts_before_a_row_is_long_enough(spoken: int) -> None:
    params = SamplingParams(min_tokens=3, end_token_ids=(0, 4))
    history = History((9, 9), (1,) * spoken)
    rows = kept(params, history, (2, 2, 2))
    assert rows == [[1, 2, 3, 5] if spoken + index < 3 else [0, 1, 2, 3, 4, 5] for index in range(4)]
    assert history.num_output == spoken


def test_bans_do_not_change_the_rows_they_were_given() -> None:
    before = ZEROS.clone()
    kept(SamplingParams(min_tokens=3, end_token_ids=(0,), allowed_token_ids=(0, 1)), History())
    assert torch.equal(ZEROS, before)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"allowed_token_ids": (6,)}, "allowed_token_ids"),
        ({"allowed_token_ids": (1, 2), "logit_bias": ((1, -100.0), (2, -101.0))}, "allowed_token_ids"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 2, "allowed_token_ids": (0,), "end_token_ids": (0,)}, "min_tokens"),
        ({"min_tokens": 2, "end_token_ids": tuple(range(6))}, "min_tokens"),
        ({"min_tokens": 1, "grammar": GRAMMAR, "grammar_end_ids": (0,)}, "min_tokens"),
        ({"grammar": GRAMMAR}, "grammar"),
        ({"grammar": GRAMMAR, "grammar_end_ids": (0,), "logit_bias": ((0, -100.0),)}, "grammar"),
        ({"grammar": GRAMMAR, "grammar_end_ids": (0,), "allowed_token_ids": (1, 2)}, "grammar"),
    ],
)
def test_bans_that_leave_nothing_are_refused_by_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        validate(SamplingParams(**fields), 6)
    assert refused.value.field == f"sampling.{field}"
    assert "<" not in refused.value.message, "what it held, in the client's words"


def test_bans_that_leave_something_are_taken() -> None:
    validate(SamplingParams(min_tokens=5, allowed_token_ids=(0, 1), end_token_ids=(0,)), 6)
    validate(SamplingParams(grammar=GRAMMAR, grammar_end_ids=(0, 3), logit_bias=((0, -100.0),)), 6)


def asked(**fields: Any) -> GenerationRequest:
    return GenerationRequest(TokenPrompt((1, 2)), **fields)


def test_what_ends_an_output_is_told_to_the_services_only_where_it_matters() -> None:
    ends = frozenset((4, 0))
    assert with_ends(asked(stop_token_ids=(3,)), ends).sampling == SamplingParams()
    least = asked(stop_token_ids=(3,), sampling=SamplingParams(min_tokens=2))
    assert with_ends(least, ends).sampling.end_token_ids == (0, 3, 4)
    assert with_ends(replace(least, ignore_eos=True), ends).sampling.end_token_ids == (3,)
    assert with_ends(asked(sampling=SamplingParams(grammar=GRAMMAR)), ends).sampling.grammar_end_ids == (0, 4)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": 3, "sampling": SamplingParams(min_tokens=4)}, "sampling.min_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"processed_logprobs": True}, "processed_logprobs"),
        ({"ignore_eos": True, "sampling": SamplingParams(grammar=GRAMMAR, grammar_end_ids=(0,))}, "ignore_eos"),
    ],
)
def test_fields_that_contradict_each_other_are_refused_by_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check(asked(**fields), Vocabulary("v", 6))
    assert refused.value.field == field


def test_no_tokens_may_be_asked_for_where_the_prompt_is_asked_about() -> None:
    check(asked(max_tokens=0, num_prompt_logprobs=0), Vocabulary("v", 6))
    assert check_length(2, 0, 10, Defaults(max_tokens=4)) == 0
    assert check_length(2, None, 10, Defaults(max_tokens=4)) == 4
    assert check_length(2, None, 10, Defaults()) == 8


def test_more_tokens_at_least_than_at_most_are_refused_whatever_sets_the_limit() -> None:
    for max_tokens, defaults in ((5, Defaults()), (None, Defaults(max_tokens=5)), (None, Defaults())):
        with pytest.raises(InvalidRequest, match="min_tokens"):
            check_length(2, max_tokens, 10, defaults, min_tokens=9)
    assert check_length(2, 5, 10, Defaults(), min_tokens=5) == 5
