"""What every drafter promises, and what a drafter over a causal language model does with its KV."""

from dataclasses import replace

import pytest
import torch

from draft_service.drafters.causal_lm import MAX_DECODE_LAG, CausalLm
from draft_service.drafters.prompt_lookup import PromptLookup
from draft_service.drafters.protocol import Drafter, Failed, Guessed, Plan, Work
from draft_service.drafters.toy import noisy
from draft_service.window import FOREVER
from outrider.errors import FailedPrecondition
from outrider.ids import Epoch, Generation, Mode, SessionId
from outrider.messages import COUNT_TOTAL, SamplingParams, SparseRow
from outrider.model.probe import calibrate
from outrider.model.tiny import random_model
from outrider.model.toy import ToyLanguage
from outrider.model.transformers_runner import TransformersRunner
from outrider.noise import word64
from outrider.sampling import coupled_token, draw_from_counts, row_problem
from tests.unit.drafter_bench import (
    EPOCH,
    KEY,
    TARGET,
    VOCAB,
    continued,
    draw,
    guesses,
    likeliest,
    planned,
    prompt,
    session,
    toy,
)

S = SessionId("s")
LOOP = [3, 1, 4, 1, 5, 9] * 4


def lookup() -> PromptLookup:
    return PromptLookup(VOCAB, context_len=1024)


@pytest.fixture(params=["causal_lm", "prompt_lookup"])
def drafter(request: pytest.FixtureRequest) -> Drafter:
    return toy()[0] if request.param == "causal_lm" else lookup()


# --- every drafter ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("count", [1, 2, 7])
def test_a_proposal_has_the_planned_length_and_a_row_per_token_where_the_mode_needs_them(
    drafter: Drafter, mode: Mode, count: int
) -> None:
    drafter.open(session(mode=mode), LOOP)
    tokens, rows = draw(drafter, "s", LOOP, count)
    assert len(tokens) == count
    assert len(rows) == (count if mode.needs_rows else 0)
    assert all(not row_problem(row, token, VOCAB) for row, token in zip(rows, tokens, strict=False))


def test_the_same_session_closed_and_opened_again_drafts_the_same(drafter: Drafter) -> None:
    drafter.open(session(mode=Mode.REJECTION), LOOP)
    first = draw(drafter, "s", LOOP, 5)
    for keep in (True, False):
        drafter.close(S, keep)
        drafter.close(S, keep)
        drafter.open(session(mode=Mode.REJECTION), LOOP)
        assert draw(drafter, "s", LOOP, 5) == first


def test_planning_again_changes_nothing(drafter: Drafter) -> None:
    drafter.open(session(mode=Mode.REJECTION), LOOP)
    planned(drafter, "s", LOOP, 5)
    planned(drafter, "s", LOOP, 3)
    again = draw(drafter, "s", LOOP, 5)
    drafter.close(S, False)
    drafter.open(session(mode=Mode.REJECTION), LOOP)
    assert draw(drafter, "s", LOOP, 5) == again


@pytest.mark.parametrize("offset", range(6))
def test_after_a_rewind_a_drafter_drafts_as_if_it_had_never_seen_the_rest(drafter: Drafter, offset: int) -> None:
    drafter.open(session(mode=Mode.REJECTION), LOOP)
    tokens, _ = draw(drafter, "s", LOOP, 6)
    planned(drafter, "s", LOOP + tokens, 2)
    drafter.rewind(S, len(LOOP) + offset)
    text = LOOP + tokens[:offset] + [3, 1, 4]
    got = draw(drafter, "s", text, 4)
    drafter.close(S, False)
    drafter.open(session(mode=Mode.REJECTION), text)
    assert draw(drafter, "s", text, 4) == got


# --- tokens and rows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [Mode.REJECTION, Mode.BLOCK])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.7, top_p=0.9, min_p=0.01)])
def test_a_token_is_drawn_from_the_row_that_is_sent_with_the_draft_key(mode: Mode, sampling: SamplingParams) -> None:
    drafter, _ = toy()
    ids = prompt(9)
    epoch = Epoch(Generation(2, 3), 4)
    drafter.open(session(mode=mode, sampling=sampling), ids)
    tokens, rows = draw(drafter, "s", ids, 40, epoch)
    words = [word64(KEY, position, epoch) for position in range(9, 49)]
    assert tokens == [draw_from_counts(row, word) for row, word in zip(rows, words, strict=True)]
    assert tokens != [draw_from_counts(row, word) for row, word in zip(rows[1:] + rows[:1], words, strict=True)]
    assert all(sum(row.counts) == COUNT_TOTAL for row in rows)


def test_another_epoch_draws_other_tokens_from_the_same_row() -> None:
    drafter, _ = toy()
    ids = prompt(9)
    drafter.open(session(mode=Mode.REJECTION), ids)
    drawn = [draw(drafter, "s", ids, 1, EPOCH.__class__(EPOCH.generation, number)) for number in range(20)]
    assert len({tuple(rows) for _, rows in drawn}) == 1
    assert len({tuple(tokens) for tokens, _ in drawn}) > 1


def test_a_greedy_draft_is_the_models_likeliest_continuation() -> None:
    drafter, _ = toy()
    ids = prompt(70)
    drafter.open(session(), ids)
    assert draw(drafter, "s", ids, 80)[0] == continued(TARGET, ids, 80, likeliest)


def test_a_coupled_draft_uses_the_shared_noise_field() -> None:
    drafter, _ = toy()
    ids = prompt(20)
    drafter.open(session(mode=Mode.COUPLED), ids)
    expected = continued(TARGET, ids, 60, lambda law, position: coupled_token(law, KEY, 0, position))
    assert draw(drafter, "s", ids, 60)[0] == expected
    other = continued(TARGET, ids, 60, lambda law, position: coupled_token(law, bytes(16), 0, position))
    assert other != expected


def test_penalties_count_the_drafts_before_a_token() -> None:
    """Case 14: with the one law of an order-0 language, only the penalty can change the token."""
    constant = ToyLanguage(6, order=0, table={(): [0.4, 0.3, 0.15, 0.1, 0.04, 0.01]})
    drafter, _ = toy(constant, 6)
    sampling = SamplingParams(temperature=0.0, frequency_penalty=2.0)
    drafter.open(session(sampling=sampling, prompt_len=2), [5, 5, 0])
    tokens, _ = draw(drafter, "s", [5, 5, 0], 5)
    assert tokens == [1, 2, 3, 0, 1]
    drafter.rewind(S, 5)
    assert draw(drafter, "s", [5, 5, 0, 1, 3], 2)[0] == [2, 0]


def test_a_banned_token_is_never_drafted() -> None:
    drafter, _ = toy()
    ids = prompt(9)
    banned = likeliest(TARGET.probs(ids), 9)
    sampling = SamplingParams(logit_bias=((banned, -100.0),))
    for mode in Mode:
        drafter.open(session(mode=mode, sampling=replace(sampling, temperature=float(mode is not Mode.GREEDY))), ids)
        tokens, rows = draw(drafter, "s", ids, 60)
        assert banned not in tokens
        assert all(banned not in row.token_ids for row in rows)
        drafter.close(S, False)


def test_ids_past_the_vocabulary_are_never_drafted_however_likely_they_are() -> None:
    """Case 9, the draft's half: the padding has nearly all mass."""
    padded = ToyLanguage(8, order=0, table={(): [0.001, 0.002, 0.003, 0.004, 0.0, 0.0, 0.5, 0.49]})
    drafter, _ = toy(padded, 6)
    for mode in Mode:
        drafter.open(session(mode=mode), [0, 1, 2])
        assert max(draw(drafter, "s", [0, 1, 2], 40)[0]) < 6
        drafter.close(S, False)


def test_a_model_with_fewer_ids_than_its_vocabulary_is_refused() -> None:
    with pytest.raises(FailedPrecondition, match=r"24 ids.*25"):
        toy(vocab_len=25)


@pytest.mark.parametrize("temperature", [1e-6, 0.1, 2.0])
def test_extreme_temperatures_give_legal_rows(temperature: float) -> None:
    drafter, _ = toy()
    drafter.open(session(mode=Mode.REJECTION, sampling=SamplingParams(temperature=temperature)), LOOP)
    tokens, rows = draw(drafter, "s", LOOP, 20)
    assert not any(row_problem(row, token, VOCAB) for row, token in zip(rows, tokens, strict=True))


# --- the toy's noise ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("agreement", "low", "high"), [(1.0, 400, 400), (0.0, 0, 0), (0.7, 243, 317)])
def test_a_noisy_draft_agrees_with_its_target_at_the_chosen_rate(agreement: float, low: int, high: int) -> None:
    """400 greedy tokens; .7 within 4 standard deviations (37), a false alarm in 16,000 seeds."""
    target = ToyLanguage(VOCAB, seed=1, order=3)
    draft = noisy(target, agreement)
    text = prompt(400)
    same = sum(
        likeliest(draft.probs(text[:end]), end) == likeliest(target.probs(text[:end]), end) for end in range(400)
    )
    assert low <= same <= high


# --- catching up, rewinding, room ---------------------------------------------------------------------------------


def test_a_long_prompt_is_caught_up_one_pass_per_step_while_others_draw() -> None:
    drafter, runner = toy()
    long, short = prompt(300), prompt(5)
    drafter.open(session("long"), long)
    drafter.open(session("short"), short)
    assert drafter.plan(SessionId("long"), long, 4) is None
    assert drafter.plan(SessionId("short"), short, 8) == Plan(8)
    text, steps = list(short), 0
    caught_up = False
    while not caught_up:
        batch = [Work(SessionId("long"), EPOCH, long, 0), Work(SessionId("short"), EPOCH, text, 8 - steps)]
        first, second = map(guesses, drafter.draw(batch))
        assert not first.token_ids
        assert len(second.token_ids) == 1
        text += second.token_ids
        caught_up = first.caught_up
        steps += 1
    assert steps == 5
    assert sorted(runner.passes) == [4, 4, 4, 4, 8] + [64] * 5
    assert text == short + continued(TARGET, short, 5, likeliest)
    assert draw(drafter, "long", long, 5)[0] == continued(TARGET, long, 5, likeliest)


def test_a_few_missing_tokens_are_fed_with_the_last_one() -> None:
    drafter, runner = toy()
    ids = prompt(60)
    drafter.open(session(), ids)
    draw(drafter, "s", ids, 1)
    before = len(runner.passes)
    text = ids + prompt(MAX_DECODE_LAG)
    assert draw(drafter, "s", text, 1)[0] == continued(TARGET, text, 1, likeliest)
    assert runner.passes[before:] == [8]


@pytest.mark.parametrize("length", [1, 2, 62, 63, 64, 65, 127, 128, 129])
def test_prompts_of_every_length_around_a_block_are_caught_up(length: int) -> None:
    drafter, _ = toy()
    ids = prompt(length)
    drafter.open(session(prompt_len=1), ids)
    assert draw(drafter, "s", ids, 3)[0] == continued(TARGET, ids, 3, likeliest)


@pytest.mark.parametrize("offset", range(0, 130, 5))
def test_a_perfect_drafter_is_perfect_again_after_a_rejection_at_any_offset(offset: int) -> None:
    """Case 20, the draft's half; the toy's slot keeps the ids, so stale KV would change the law."""
    drafter, runner = toy()
    ids = prompt(30)
    drafter.open(session(), ids)
    tokens, _ = draw(drafter, "s", ids, 130)
    replaced = (tokens[offset] + 1) % VOCAB
    drafter.rewind(S, len(ids) + offset)
    text = ids + tokens[:offset] + [replaced]
    assert draw(drafter, "s", text, 20)[0] == continued(TARGET, text, 20, likeliest)
    drafter.close(S, False)
    assert runner.free_blocks == 64


def test_a_rewind_to_the_very_end_of_the_text_feeds_the_last_token_again() -> None:
    drafter, _ = toy()
    ids = prompt(30)
    drafter.open(session(), ids)
    tokens, _ = draw(drafter, "s", ids, 10)
    text = ids + tokens[:4]
    drafter.rewind(S, len(text))
    assert draw(drafter, "s", text, 4)[0] == tokens[4:8]


def test_nothing_is_offered_past_the_drafters_context() -> None:
    """Case 8: context 64, prompt 100; and the last tokens before the limit."""
    drafter, runner = toy(context_len=64)
    drafter.open(session(), prompt(100))
    assert drafter.plan(S, prompt(100), 4) == Plan(0, FOREVER, "context_full")
    assert drafter.draw([Work(S, EPOCH, prompt(100), 0)]) == [Guessed(caught_up=True)]
    assert not runner.passes
    drafter.close(S, True)
    ids = prompt(61)
    drafter.open(session(), ids)
    assert planned(drafter, "s", ids, 8) == Plan(3)
    tokens, _ = draw(drafter, "s", ids, 3)
    assert drafter.plan(S, ids + tokens, 8) == Plan(0, FOREVER, "context_full")


def test_a_session_without_room_passes_until_another_ends() -> None:
    drafter, runner = toy(num_blocks=4)
    for name in ("a", "b"):
        drafter.open(session(name), prompt(100))
    draw(drafter, "a", prompt(100), 1)
    draw(drafter, "b", prompt(100), 1)
    drafter.open(session("c"), prompt(10))
    assert drafter.plan(SessionId("c"), prompt(10), 4) == Plan(0, 11, "kv_full")
    assert drafter.draw([Work(SessionId("c"), EPOCH, prompt(10), 0)]) == [Guessed(caught_up=True)]
    drafter.close(SessionId("a"), keep=True)
    assert draw(drafter, "c", prompt(10), 4)[0] == continued(TARGET, prompt(10), 4, likeliest)
    for name in ("b", "c"):
        drafter.close(SessionId(name), keep=False)
    assert runner.free_blocks == 4


def test_room_that_a_plan_promised_is_not_given_to_another() -> None:
    drafter, _ = toy(num_blocks=2)
    for name in ("a", "b"):
        drafter.open(session(name), prompt(60))
    assert planned(drafter, "a", prompt(60), 8) == Plan(8)
    assert drafter.plan(SessionId("b"), prompt(60), 1) == Plan(0, 61, "kv_full")
    assert draw(drafter, "a", prompt(60), 8)[0] == continued(TARGET, prompt(60), 8, likeliest)


def test_kept_kv_is_not_taken_over_where_it_is_the_room_that_a_plan_was_promised() -> None:
    drafter, runner = toy(num_blocks=3)
    drafter.open(session("before"), prompt(129))
    draw(drafter, "before", prompt(129), 1)
    drafter.close(SessionId("before"), keep=True)
    ids = prompt(60, start=2)
    drafter.open(session("a"), ids)
    assert planned(drafter, "a", ids, 8) == Plan(8)
    drafter.open(session("again"), prompt(129))
    text = list(ids)
    while len(text) < 68:
        [outcome] = drafter.draw([Work(SessionId("a"), EPOCH, text, 68 - len(text))])
        text += guesses(outcome).token_ids
    assert text == ids + continued(TARGET, ids, 8, likeliest)
    assert runner.kv_usage.holders == 1


def test_kept_kv_is_taken_over_in_whole_blocks_by_ids() -> None:
    drafter, runner = toy()
    ids = prompt(200)
    drafter.open(session(), ids)
    tokens, _ = draw(drafter, "s", ids, 5)
    drafter.close(S, keep=True)
    before = len(runner.passes)
    other = [*ids[:199], (ids[199] + 1) % VOCAB, *tokens]
    drafter.open(session(), other)
    assert draw(drafter, "s", other, 3)[0] == continued(TARGET, other, 3, likeliest)
    assert runner.passes[before:].count(64) == 1, "192 of 205 tokens are known"
    drafter.close(S, keep=True)
    changed = [*ids[:100], (ids[100] + 1) % VOCAB, *ids[101:]]
    before = len(runner.passes)
    drafter.open(session(), changed)
    assert draw(drafter, "s", changed, 3)[0] == continued(TARGET, changed, 3, likeliest)
    assert runner.passes[before:].count(64) == 2, "64 of 200 tokens are known"


def test_a_prompt_is_computed_once_for_all_sessions_that_begin_with_it() -> None:
    drafter, runner = toy()
    for name, passes in (("a", 3), ("b", 0)):
        text = [*prompt(192), ord(name) % VOCAB]
        before = len(runner.passes)
        drafter.open(session(name), text)
        assert draw(drafter, name, text, 70)[0] == continued(TARGET, text, 70, likeliest)
        assert runner.passes[before:].count(64) == passes
    assert runner.kv_usage.shared == 3
    for name in ("a", "b"):
        drafter.close(SessionId(name), keep=False)
    assert (runner.kv_usage.cached, runner.free_blocks) == (0, 64)


def test_without_prefix_reuse_nothing_is_taken_over() -> None:
    runner = toy()[1]
    drafter = CausalLm(runner, vocab_len=VOCAB, prefix_reuse=False)
    for name in ("a", "b"):
        before = len(runner.passes)
        drafter.open(session(name), prompt(192))
        draw(drafter, name, prompt(192), 1)
        drafter.close(SessionId(name), keep=True)
        assert runner.passes[before:].count(64) == 3
    assert runner.kv_usage.cached == 0


def test_a_shorter_text_of_the_same_session_is_not_taken_for_what_its_kv_holds() -> None:
    drafter, _ = toy()
    ids = prompt(150)
    drafter.open(session(), ids)
    draw(drafter, "s", ids, 5)
    drafter.close(S, keep=True)
    drafter.open(session(), ids[:120])
    assert draw(drafter, "s", ids[:120], 4)[0] == continued(TARGET, ids[:120], 4, likeliest)


def test_a_share_that_cannot_be_sampled_fails_alone() -> None:
    drafter, _ = toy()
    ids = prompt(5)
    drafter.open(session("bad", Mode.REJECTION, key=b"short"), ids)
    drafter.open(session("good", Mode.REJECTION), ids)
    for name in ("bad", "good"):
        drafter.plan(SessionId(name), ids, 1)
    bad, good = drafter.draw([Work(SessionId(name), EPOCH, ids, 1) for name in ("bad", "good")])
    assert isinstance(bad, Failed)
    assert len(guesses(good).token_ids) == 1


# --- a real transformer -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(Mode))
def test_a_sessions_drafts_are_the_same_alone_and_among_busy_neighbours(mode: Mode) -> None:
    torch.set_num_threads(1)
    runner = TransformersRunner(random_model(), name="tiny", num_blocks=64)
    calibrate(runner)
    assert runner.info.exactness == "bitwise"
    drafter = CausalLm(runner, vocab_len=512)
    ids = [index * index * 31 % 509 for index in range(70)]
    drafter.open(session("alone", mode), ids)
    alone = draw(drafter, "alone", ids, 12)
    names = ["subject", *(f"n{index}" for index in range(5))]
    texts = {name: (ids if name == "subject" else ids[index : 20 + 9 * index]) for index, name in enumerate(names)}
    for name, text in texts.items():
        drafter.open(session(name, mode), text)
        planned(drafter, name, text, 12)
    busy = {name: list(text) for name, text in texts.items()}
    rows: list[SparseRow] = []
    for step in range(12):
        here = names[: 1 + step % len(names)]
        outcomes = drafter.draw([Work(SessionId(name), EPOCH, busy[name], 1) for name in here])
        for name, outcome in zip(here, outcomes, strict=True):
            busy[name] += guesses(outcome).token_ids
        rows += guesses(outcomes[0]).rows
    assert (busy["subject"][70:], rows) == alone
