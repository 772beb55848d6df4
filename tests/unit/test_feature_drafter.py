"""Drafting from the target's features: they come in any order, late or never, and leave no trace but better guesses."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from draft_service.drafters.feature import FeatureDrafter
from draft_service.drafters.feature_net import MAX_ROWS, FeatureNet, NetRow
from draft_service.drafters.features import MAX_KEPT, Features
from draft_service.drafters.protocol import Guessed, Plan, Work
from draft_service.drafters.sampling import guess_ranked
from draft_service.trained import rank
from draft_service.window import FOREVER
from outrider.drafting.feature import FeatureDraft
from outrider.errors import FailedPrecondition
from outrider.history import History
from outrider.ids import Epoch, Generation, Mode, SessionId, TokenClass
from outrider.messages import SamplingParams
from outrider.model.kv import BlockSlot
from outrider.noise import word64
from outrider.sampling import coupled_token, draw_from_counts, probabilities
from tests.unit.drafter_bench import EPOCH, KEY, VOCAB, draw, guesses, planned, prompt, session
from tests.unit.feature_bench import (
    HEADS,
    KNOWN_IDS,
    feature_drafter,
    features_of,
    medusa,
    message,
    random_draft,
    sent,
    target,
)
from tests.unit.feature_chain import FeatureChain

S = SessionId("s")
TEXT = prompt(90, 2)


def opened(ids: list[int], known: int | None = None, mode: Mode = Mode.GREEDY, **settings: Any) -> FeatureDrafter:
    """Return a drafter with one session that has the features of the first positions, all but the last by default."""
    drafter = feature_drafter(**settings)
    drafter.open(session(mode=mode, prompt_len=len(ids)), ids)
    if known is None or known:
        drafter.take_features(sent(ids, 0, len(ids) - 1 if known is None else known))
    return drafter


# --- the network --------------------------------------------------------------------------------------------------


def feed(net: FeatureNet, slot: BlockSlot, ids: list[int], rows: torch.Tensor, parts: list[int]) -> torch.Tensor:
    """Run consecutive rows of one text in passes of the given sizes; return their logits."""
    logits, start = [], 0
    for count in parts:
        net.pool.reserve([(slot, start + count)])
        part = [NetRow(slot, at, ids[at + 1], rows[at], wanted=True) for at in range(start, start + count)]
        logits.append(net.run(part).logits)
        slot.advance([row.token_id for row in part], TokenClass.PROMPT)
        start += count
    return torch.cat(logits)


def made_net(dtype: torch.dtype = torch.float32) -> tuple[FeatureDraft, FeatureNet]:
    draft = random_draft("feature")
    assert isinstance(draft, FeatureDraft)
    embedding = target().get_input_embeddings().weight
    return draft, FeatureNet(draft, embedding, dtype=dtype, num_blocks=8, context_len=256)


def test_the_network_computes_what_the_trained_one_does() -> None:
    draft, net = made_net()
    rows, embedding = features_of(TEXT), target().get_input_embeddings().weight
    with torch.no_grad():
        expected = draft.logits(FeatureChain(draft).extend(embedding[torch.tensor(TEXT[1:])], rows[:-1]))
    got = feed(net, net.pool.new_slot(), TEXT, rows, [1, 2, 3, 32, 31, 20])
    assert torch.allclose(got, expected, atol=1e-4)
    assert not torch.allclose(got, expected.roll(1, 0), atol=1e-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_have_the_same_bits_however_they_are_grouped_and_whoever_is_beside_them(dtype: torch.dtype) -> None:
    _, net = made_net(dtype)
    rows = features_of(TEXT).to(dtype)
    whole = feed(net, net.pool.new_slot(), TEXT, rows, [32, 32, 25])
    assert torch.equal(feed(net, net.pool.new_slot(), TEXT, rows, [1, 1, 7, 23, 30, 2, 25]), whole)
    mine, other = net.pool.new_slot(), net.pool.new_slot()
    for at in range(40):
        net.pool.reserve([(mine, at + 1), (other, at + 1)])
        both = [
            NetRow(other, at, TEXT[-at], rows[-at], wanted=True),
            NetRow(mine, at, TEXT[at + 1], rows[at], wanted=True),
        ]
        assert torch.equal(net.run(both).logits[1], whole[at])
        mine.advance([TEXT[at + 1]], TokenClass.PROMPT)
        other.advance([TEXT[-at]], TokenClass.PROMPT)


# --- features that come, or do not ----------------------------------------------------------------------------------


def test_features_change_what_is_drafted() -> None:
    assert draw(opened(TEXT), "s", TEXT, 12) != draw(opened(TEXT, 0), "s", TEXT, 12)


@pytest.mark.parametrize("known", [0, 1, 40, 63, 64, 65, 88])
def test_it_drafts_with_any_number_of_features_missing_at_the_end(known: int) -> None:
    assert len(draw(opened(TEXT, known, Mode.REJECTION), "s", TEXT, 6)[0]) == 6


@pytest.mark.parametrize("missing", [1, 30, 64])
def test_it_drafts_with_features_missing_at_the_start(missing: int) -> None:
    """As behind a prefix that the verifier had before: a stand-in takes their place."""
    late, early = (feature_drafter() for _ in range(2))
    for drafter in (late, early):
        drafter.open(session(prompt_len=len(TEXT)), TEXT)
    early.take_features(sent(TEXT, missing, 89))
    tokens = draw(late, "s", TEXT, 8)
    late.take_features(sent(TEXT, missing, 89))
    late.rewind(S, len(TEXT))
    assert draw(late, "s", TEXT, 8) == draw(early, "s", TEXT, 8) != tokens


def test_features_that_come_late_twice_or_in_parts_end_in_the_same_drafts() -> None:
    expected = draw(opened(TEXT, mode=Mode.REJECTION), "s", TEXT, 8)
    drafter = opened(TEXT, 0, Mode.REJECTION)
    assert draw(drafter, "s", TEXT, 8) != expected
    for first, last in ((0, 30), (30, 31), (10, 40), (0, 30), (40, 89)):
        drafter.rewind(S, len(TEXT))
        drafter.take_features(sent(TEXT, first, last))
    assert draw(drafter, "s", TEXT, 8) == expected


def test_a_feature_of_an_older_epoch_does_not_replace_a_newer_one() -> None:
    drafter = opened(TEXT, 88)
    expected = draw(opened(TEXT), "s", TEXT, 8)
    wrong = torch.ones(1, features_of(TEXT).shape[1])
    newer = Epoch(EPOCH.generation, 5)
    drafter.take_features(sent(TEXT, 88, 89, epoch=newer))
    drafter.take_features(message(wrong, 88, epoch=Epoch(EPOCH.generation, 4)))
    assert draw(drafter, "s", TEXT, 8) == expected
    other = opened(TEXT, 88)
    other.take_features(message(wrong, 88, epoch=newer))
    assert draw(other, "s", TEXT, 8) != expected


def test_accepted_tokens_are_computed_again_from_their_true_features() -> None:
    """A chain whose first tokens are accepted goes on as a fresh session with the same ids and features does."""
    drafter = opened(TEXT)
    tokens, _ = draw(drafter, "s", TEXT, 6)
    text = [*TEXT, *tokens]
    drafter.take_features(sent(text, 89, 93))
    drafter.rewind(S, 94)
    restarted = [*text[:94], 7]
    expected = draw(opened(restarted), "s", restarted, 8)
    drafter.take_features(sent(restarted, 93, 94))
    assert draw(drafter, "s", restarted, 8) == expected
    without = opened(TEXT)
    draw(without, "s", TEXT, 6)
    without.rewind(S, 94)
    assert draw(without, "s", restarted, 8) != expected


@pytest.mark.parametrize("offset", range(7))
def test_rewound_to_any_offset_it_drafts_as_a_fresh_session(offset: int) -> None:
    begun = TEXT[:24]
    drafter = opened(begun, mode=Mode.REJECTION)
    tokens, _ = draw(drafter, "s", begun, 6)
    length = len(begun) + offset
    text = [*begun, *tokens[:offset], 3, 1]
    drafter.take_features(sent(text, 23, length))
    drafter.rewind(S, length)
    drafter.take_features(sent(text, length, length + 1))
    expected = draw(opened(text, mode=Mode.REJECTION), "s", text, 5)
    assert draw(drafter, "s", text, 5) == expected


@pytest.mark.parametrize("kept", range(5))
def test_what_was_rejected_leaves_nothing_behind_where_features_do_not_come(kept: int) -> None:
    """Neither the rows that saw it nor what they guessed: as if the chain had ended before it."""
    drafts = []
    for drawn in (kept + 1, 6):
        drafter = opened(TEXT, mode=Mode.REJECTION)
        tokens, _ = draw(drafter, "s", TEXT, drawn)
        drafter.rewind(S, len(TEXT) + kept)
        drafts.append(draw(drafter, "s", [*TEXT, *tokens[:kept], 3, 1], 5))
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize("pause", [31, 32, 33, 200])
def test_after_a_pause_it_goes_on_in_one_pass_from_all_that_is_missing_or_else_as_a_fresh_session(pause: int) -> None:
    drafter = opened(TEXT, mode=Mode.REJECTION)
    draw(drafter, "s", TEXT, 1)
    text = TEXT + prompt(pause, 5)
    drafter.take_features(sent(text, 89, len(text) - 1))
    drafter.rewind(S, len(TEXT))
    [outcome] = drafter.draw([Work(S, EPOCH, text, 0)])
    assert outcome == Guessed(), "nothing is done before it is wanted"
    fresh = draw(opened(text, mode=Mode.REJECTION), "s", text, 4)
    assert planned(drafter, "s", text, 4) == Plan(4)
    [outcome] = drafter.draw([Work(S, EPOCH, text, 4)])
    assert len(guesses(outcome).token_ids) == 1
    drafter.rewind(S, len(text))
    knows_no_more = draw(drafter, "s", text, 4) == fresh
    assert knows_no_more == (pause > MAX_ROWS)


def test_what_lies_further_back_than_a_pass_is_not_read() -> None:
    text = prompt(300)
    other = [*text[: 300 - MAX_ROWS - 1][::-1], *text[300 - MAX_ROWS - 1 :]]
    assert text != other
    drafts = []
    for ids in (text, other):
        drafter = feature_drafter()
        drafter.open(session(prompt_len=300), ids)
        drafter.take_features(sent(text, 0, 299))
        drafts.append(draw(drafter, "s", ids, 6))
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize("length", [90, 97, 98, 128])
def test_a_proposal_that_late_features_set_back_is_drawn_to_its_end(length: int) -> None:
    """However many rows that leaves: what is drawn already has no features, and still counts as text."""
    text = prompt(length, 2)
    drafter = opened(text, 0)
    planned(drafter, "s", text, 6)
    grown = list(text)
    for step in range(12):
        if step == 3:
            drafter.take_features(sent(text, 0, length - 1))
        grown += guesses(drafter.draw([Work(S, EPOCH, grown, length + 6 - len(grown))])[0]).token_ids
        if len(grown) == length + 6:
            return
    raise AssertionError(f"{len(grown) - length} of 6 tokens were drawn")


def test_one_text_is_read_at_a_time_and_nobody_else_is_held_up_by_it() -> None:
    drafter, long = feature_drafter(), prompt(300)
    names = [SessionId("a"), SessionId("b"), S]
    for name in names:
        drafter.open(session(name, prompt_len=300), long)
        planned(drafter, name, long, 3)
    drafter.draw([Work(S, EPOCH, long, 3)])
    drafter.rewind(S, 300)
    works = [Work(name, EPOCH, long, 3) for name in names]
    steps = [[len(guesses(outcome).token_ids) for outcome in drafter.draw(works)] for _ in range(2)]
    assert steps == [[1, 0, 1], [1, 1, 1]]


def test_drafts_do_not_depend_on_the_batch() -> None:
    texts = {f"s{number}": prompt(20 + 9 * number, number + 1) for number in range(8)}
    alone = {}
    for name, text in texts.items():
        drafter = feature_drafter()
        drafter.open(session(name, Mode.REJECTION, prompt_len=len(text)), text)
        drafter.take_features(sent(text, 0, len(text) - 1, name))
        alone[name] = draw(drafter, name, text, 5)
    together = feature_drafter()
    for name, text in texts.items():
        together.open(session(name, Mode.REJECTION, prompt_len=len(text)), text)
        together.take_features(sent(text, 0, len(text) - 1, name))
        planned(together, name, text, 5)
    grown, rows = {name: list(text) for name, text in texts.items()}, {name: [] for name in texts}  # type: ignore[var-annotated]
    for _ in range(5 + len(texts)):
        left = {name: 5 - len(grown[name]) + len(text) for name, text in texts.items()}
        works = [Work(SessionId(name), EPOCH, grown[name], count) for name, count in left.items() if count]
        for name, outcome in zip([work.session_id for work in works], together.draw(works), strict=True):
            grown[name] += guesses(outcome).token_ids
            rows[name] += guesses(outcome).rows
    assert {name: (grown[name][len(text) :], rows[name]) for name, text in texts.items()} == alone


# --- what is kept ---------------------------------------------------------------------------------------------------


def test_closed_sessions_give_their_blocks_back() -> None:
    drafter = feature_drafter(num_blocks=4)
    for number in range(20):
        drafter.open(session(prompt_len=90), prompt(90, number))
        assert len(draw(drafter, "s", prompt(90, number), 3)[0]) == 3
        drafter.close(S, keep=number % 2 == 0)
    assert drafter._net.pool.num_free == 4


def test_a_session_without_room_for_its_kv_passes_and_the_others_draft() -> None:
    drafter = feature_drafter(num_blocks=1)
    for name in ("s", "t"):
        drafter.open(session(name, prompt_len=90), TEXT)
    assert planned(drafter, "s", TEXT, 4) == Plan(4)
    assert planned(drafter, "t", TEXT, 4) == Plan(0, 91, "kv_full")
    drafter.close(S, keep=False)
    assert planned(drafter, "t", TEXT, 4) == Plan(4)


def test_a_context_that_is_full_is_passed_for_good() -> None:
    """Case 8: the drafter's context has 64 tokens, the prompt 90."""
    drafter = opened(TEXT, context_len=64)
    assert drafter.plan(S, TEXT, 4) == Plan(0, FOREVER, "context_full")
    assert drafter.draw([Work(S, EPOCH, TEXT, 0)]) == [Guessed()]
    assert opened(TEXT[:62], 61, context_len=64).plan(S, TEXT[:62], 4) in {None, Plan(2)}


def test_a_text_of_one_token_is_too_short() -> None:
    drafter = opened([5], 0)
    assert drafter.plan(S, [5], 4) == Plan(0, 2, "too_short")
    assert len(draw(drafter, "s", [5, 6], 4)[0]) == 4


def test_features_kept_of_a_session_are_bounded() -> None:
    kept = Features(2, torch.float32, 10 * MAX_KEPT)
    for first in range(0, 3 * MAX_KEPT, 50):
        assert len(kept.take(message(torch.zeros(50, 2), first))) == 50
    assert len(kept) == MAX_KEPT
    assert kept.get(kept.end - 1) is not None
    assert kept.take(message(torch.zeros(500, 2), kept.end))[0] == kept.end - MAX_KEPT
    assert len(kept) == MAX_KEPT


def test_features_past_the_context_are_dropped() -> None:
    kept = Features(2, torch.float32, 6)
    assert kept.take(message(torch.zeros(4, 2), 4)) == [4, 5]
    assert kept.take(message(torch.zeros(4, 2), 9)) == []
    assert (len(kept), kept.end) == (2, 6)


@pytest.mark.parametrize("shape", [(1, 31), (2, 33)])
def test_features_of_another_width_change_nothing(shape: tuple[int, int]) -> None:
    drafter = opened(TEXT)
    with pytest.raises(ValueError, match=rf"{shape[1]} wide.*32 wide"):
        drafter.take_features(message(torch.zeros(shape), 0))
    assert draw(drafter, "s", TEXT, 5) == draw(opened(TEXT), "s", TEXT, 5)


# --- ids that the head does not know ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(Mode))
def test_only_known_ids_are_drafted_and_their_rows_are_over_the_targets_ids(mode: Mode) -> None:
    known = set(random_draft("feature").draft_ids.tolist())
    tokens, rows = draw(opened(TEXT, mode=mode), "s", TEXT, 30)
    assert set(tokens) <= known
    assert all(set(row.token_ids) <= known for row in rows)
    assert len(set(tokens)) > 2


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(temperature=0.7, top_p=0.9, frequency_penalty=1.0)]
)
def test_a_row_of_some_ids_draws_as_a_row_of_all_with_no_mass_elsewhere_does(sampling: SamplingParams) -> None:
    """The noise and the words are those of the target's ids."""
    ranked = rank(random_draft("feature"), VOCAB)
    logits = 2 * torch.randn(1, KNOWN_IDS, generator=torch.Generator().manual_seed(1))
    wide = ranked.widened(logits)
    for position in range(30):
        described = session(mode=Mode.COUPLED, sampling=sampling)
        got = guess_ranked(logits, ranked, described, position, EPOCH, _history(sampling))
        law = probabilities(wide, sampling, VOCAB, _history(sampling))[0]
        assert got.token_ids == (coupled_token(law, KEY, 0, position),)
        got = guess_ranked(logits, ranked, replace(described, mode=Mode.REJECTION), position, EPOCH, _history(sampling))
        [row] = got.rows
        assert got.token_ids == (draw_from_counts(row, word64(KEY, position, EPOCH)),)
        mass = torch.zeros(VOCAB)
        mass[list(row.token_ids)] = torch.tensor(row.counts) / 65536
        assert torch.allclose(mass, law, atol=0.02)


def _history(sampling: SamplingParams) -> Any:
    return History(TEXT[:3], TEXT[3:9]) if sampling.uses_history else None


def test_ids_past_the_vocabulary_are_never_drafted() -> None:
    """Case 9: a head trained on padded ids."""
    draft = random_draft("feature", vocab_size=VOCAB)
    known = draft.draft_ids.tolist()
    ranked = rank(draft, 12)
    assert ranked.token_ids.tolist() == sorted(token for token in known if token < 12)
    assert draft.head.weight.shape[0] == len(ranked.token_ids)


def test_ids_that_come_twice_are_refused() -> None:
    draft = random_draft("medusa")
    draft.draft_ids[1] = draft.draft_ids[0]
    with pytest.raises(FailedPrecondition, match="distinct"):
        rank(draft, VOCAB)


@pytest.mark.parametrize("make", [feature_drafter, medusa])
def test_a_banned_token_is_never_drafted_and_a_ban_of_all_is_a_pass(make: Any) -> None:
    """Case 15."""
    known = random_draft("feature" if make is feature_drafter else "medusa").draft_ids.tolist()
    for mode in Mode:
        drafter = make()
        sampling = SamplingParams(temperature=float(mode is not Mode.GREEDY))
        drafter.open(session(mode=mode, sampling=sampling, prompt_len=90), TEXT)
        drafter.take_features(sent(TEXT, 0, 89))
        favourite = draw(drafter, "s", TEXT, 1)[0][0]
        drafter.close(S, keep=False)
        drafter.open(session(mode=mode, sampling=replace(sampling, logit_bias=((favourite, -100.0),))), TEXT)
        drafter.take_features(sent(TEXT, 0, 89))
        tokens, rows = draw(drafter, "s", TEXT, 4)
        assert favourite not in tokens
        assert all(favourite not in row.token_ids for row in rows)
        drafter.close(S, keep=False)
        drafter.open(session(mode=mode, sampling=replace(sampling, logit_bias=tuple((k, -100.0) for k in known))), TEXT)
        assert drafter.plan(S, TEXT, 4) == Plan(0, FOREVER, "all_banned")
        drafter.close(S, keep=False)


# --- Medusa ---------------------------------------------------------------------------------------------------------


def test_medusa_passes_until_a_feature_is_near() -> None:
    drafter = medusa()
    drafter.open(session(prompt_len=90), TEXT)
    assert drafter.plan(S, TEXT, 9) == Plan(0, 91, "no_feature")
    drafter.take_features(sent(TEXT, 0, 88 - HEADS + 1))
    assert drafter.plan(S, TEXT, 9) == Plan(0, 91, "no_feature")
    drafter.take_features(sent(TEXT, 88 - HEADS + 1, 88 - HEADS + 2))
    assert drafter.plan(S, TEXT, 9) == Plan(1)
    drafter.take_features(sent(TEXT, 88, 89))
    assert drafter.plan(S, TEXT, 9) == Plan(HEADS)
    assert drafter.plan(S, TEXT, 2) == Plan(2)


@pytest.mark.parametrize("split", [1, 2, 3])
def test_medusas_rows_do_not_depend_on_drafted_tokens_nor_on_how_a_chain_is_cut(split: int) -> None:
    """Heads left over go on where the chain was cut, whatever its tokens were."""

    def fresh() -> Any:
        drafter = medusa()
        drafter.open(session(mode=Mode.REJECTION, prompt_len=90), TEXT)
        drafter.take_features(sent(TEXT, 0, 89))
        return drafter

    tokens, rows = draw(fresh(), "s", TEXT, HEADS)
    drafter = fresh()
    first = draw(drafter, "s", TEXT, split)
    others = [(token + 1) % VOCAB for token in first[0]]
    second = draw(drafter, "s", [*TEXT, *others], HEADS - split)
    assert (first[0] + second[0], first[1] + second[1]) == (tokens, rows)
    assert drafter.plan(S, [*TEXT, *tokens], 5) == Plan(0, len(TEXT) + HEADS + 1, "no_feature")


def test_medusa_draws_what_its_heads_say_of_the_last_feature() -> None:
    drafter, heads = medusa(), random_draft("medusa")
    drafter.open(session(prompt_len=90), TEXT)
    drafter.take_features(sent(TEXT, 80, 89))
    embedded = target().get_input_embeddings().weight[TEXT[89]]
    with torch.no_grad():
        laws = heads.logits(heads.guesses(embedded, features_of(TEXT)[88]))  # type: ignore[operator]
    assert draw(drafter, "s", TEXT, HEADS)[0] == heads.draft_ids[laws.argmax(-1)].tolist()


def test_medusa_after_a_rewind_drafts_as_a_fresh_session() -> None:
    used, fresh = medusa(), medusa()
    for drafter in (used, fresh):
        drafter.open(session(mode=Mode.REJECTION, prompt_len=90), TEXT)
    used.take_features(sent(TEXT, 0, 89))
    tokens, _ = draw(used, "s", TEXT, HEADS)
    text = [*TEXT, tokens[0], 9]
    used.take_features(sent(text, 89, 91))
    used.rewind(S, 91)
    fresh.take_features(sent(text, 60, 91))
    assert draw(used, "s", text, HEADS) == draw(fresh, "s", text, HEADS)


def test_features_of_a_session_that_is_closed_are_dropped() -> None:
    for drafter in (feature_drafter(), medusa()):
        drafter.open(session(prompt_len=90), TEXT)
        drafter.close(S, keep=True)
        drafter.take_features(sent(TEXT, 0, 89))
        drafter.open(session(prompt_len=90), TEXT)
        drafter.rewind(S, 50)


def test_many_epochs_draw_a_row_by_its_law() -> None:
    """Chi-square at one place over 400 epochs; false alarm in one seed of 1,000."""
    drafter = opened(TEXT, mode=Mode.REJECTION)
    counts: dict[int, int] = {}
    [_], [row] = draw(drafter, "s", TEXT, 1)
    for number in range(400):
        [token], _ = draw(drafter, "s", TEXT, 1, Epoch(Generation(1, 1), number))
        counts[token] = counts.get(token, 0) + 1
    expected = {token: 400 * count / 65536 for token, count in zip(row.token_ids, row.counts, strict=True)}
    rare = sum(value for value in expected.values() if value < 5)
    found = sum(counts.get(token, 0) for token, value in expected.items() if value < 5)
    terms = [(counts.get(t, 0) - value) ** 2 / value for t, value in expected.items() if value >= 5]
    terms.append((found - rare) ** 2 / max(rare, 1e-9) if rare >= 5 else 0.0)
    limits = {2: 13.8, 3: 16.3, 4: 18.5, 5: 20.5, 6: 22.5, 7: 24.3, 8: 26.1, 9: 27.9, 10: 29.6, 12: 32.9, 15: 37.7}
    assert len(terms) > 2
    assert sum(terms) < next(limit for degrees, limit in limits.items() if degrees >= len(terms) - 1)
