import time

import pytest
import torch

from outrider.errors import NotFound
from outrider.ids import TokenClass
from outrider.model import toy
from outrider.model.names import ModelSpec
from outrider.model.opening import open_model
from outrider.model.runner import Feed, InvalidFeed, ModelRunner, PoolExhausted
from outrider.model.toy import ToyLanguage, ToyRunner, ToyTokenizer, toy_from_name

DECODE, PROMPT = TokenClass.DECODE, TokenClass.PROMPT


def test_a_row_is_the_logarithm_of_the_table() -> None:
    law = (0.5, 0.25, 0.25, 0.0)
    runner = ToyRunner(ToyLanguage(4, order=1, table={(2,): law}))
    rows = runner.forward([Feed(runner.new_slot(), (1, 2), DECODE, 1)])[0]
    assert rows.logits.dtype == torch.float64
    assert torch.equal(rows.logits.exp(), torch.tensor([law], dtype=torch.float64))


def test_hashed_laws_are_laws_and_depend_on_seed_and_context() -> None:
    language = ToyLanguage(7, seed=1)
    law = language.probs((3, 4))
    assert float(law.sum()) == pytest.approx(1.0, abs=1e-15)
    assert torch.equal(law, ToyLanguage(7, seed=1).probs((9, 9, 3, 4)))
    assert not torch.equal(law, language.probs((4, 3)))
    assert not torch.equal(law, ToyLanguage(7, seed=2).probs((3, 4)))


def test_a_language_remembers_its_latest_laws_alone_and_others_come_out_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(toy, "MAX_LAWS", 3)
    language = ToyLanguage(7, seed=1)
    laws = [language.probs((0, token)) for token in range(7)]
    assert list(language._memo) == [(0, 4), (0, 5), (0, 6)]
    assert all(torch.equal(language.probs((0, token)), law) for token, law in enumerate(laws))


def test_a_law_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="positive sum"):
        ToyLanguage(2, order=1, table={(0,): (-1.0, 2.0)}).probs((0,))


def test_a_token_that_never_comes_has_no_mass() -> None:
    assert float(ToyLanguage(5, never=frozenset({0})).probs((1,))[0]) == 0.0


def test_a_draft_is_as_close_as_its_weight_says() -> None:
    target = ToyLanguage(6, seed=3)
    assert torch.equal(target.draft(0.0, 9).probs((1, 2)), target.probs((1, 2)))
    near, far = (
        float((target.draft(weight, 9).probs((1, 2)) - target.probs((1, 2))).abs().sum()) for weight in (0.1, 1.0)
    )
    assert near == pytest.approx(0.1 * far)


def test_rows_do_not_depend_on_how_a_text_is_fed() -> None:
    runner = ToyRunner(ToyLanguage(9, order=3))
    ids = tuple(index * 5 % 9 for index in range(20))
    whole = runner.forward([Feed(runner.new_slot(), ids, DECODE, 20)])[0].logits
    slot = runner.new_slot()
    parts = [runner.forward([Feed(slot, (token,), DECODE, 1)])[0].logits for token in ids]
    assert torch.equal(whole, torch.cat(parts))


def test_a_rollback_that_was_forgotten_shows_as_a_wrong_row() -> None:
    runner = ToyRunner(ToyLanguage(9))
    good, bad = runner.new_slot(), runner.new_slot()
    for slot in (good, bad):
        runner.forward([Feed(slot, (1, 2, 3), DECODE, 0)])
    good.truncate(2)
    right, wrong = (rows.logits for rows in runner.forward([Feed(good, (5,), DECODE, 1), Feed(bad, (5,), DECODE, 1)]))
    fresh = runner.forward([Feed(runner.new_slot(), (1, 2, 5), DECODE, 1)])[0].logits
    assert torch.equal(right, fresh)
    assert not torch.equal(wrong, fresh)


def test_passes_are_counted_in_row_classes() -> None:
    runner = ToyRunner(ToyLanguage(4), row_classes=(4, 8))
    feeds = [Feed(runner.new_slot(), (1,) * 5, DECODE, 0), Feed(runner.new_slot(), (1,) * 6, DECODE, 0)]
    runner.forward([*feeds, Feed(runner.new_slot(), (1,), PROMPT, 0)])
    assert runner.passes == [64, 8, 4]


def test_a_runner_remembers_its_latest_passes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy, "MAX_PASSES", 3)
    runner = ToyRunner(ToyLanguage(4), row_classes=(4, 8, 16))
    slot = runner.new_slot()
    for count in (1, 5, 9, 1, 5):
        runner.forward([Feed(slot, (1,) * count, DECODE, 0)])
    assert runner.passes == [16, 4, 8]


def test_a_pass_takes_its_delay() -> None:
    runner = ToyRunner(ToyLanguage(4), delay_s=0.02)
    start = time.perf_counter()
    runner.forward([Feed(runner.new_slot(), (1,), DECODE, 1)])
    assert time.perf_counter() - start >= 0.02
    assert runner.forward([]) == []


def test_blocks_are_accounted_for() -> None:
    runner: ModelRunner = ToyRunner(ToyLanguage(4), num_blocks=3)
    slot = runner.new_slot()
    runner.forward([Feed(slot, (1,) * 65, DECODE, 0)])
    assert runner.free_blocks == 1
    with pytest.raises(PoolExhausted):
        runner.forward([Feed(slot, (1,), DECODE, 0), Feed(runner.new_slot(), (1,) * 65, DECODE, 0)])
    assert (slot.length, runner.free_blocks) == (65, 1)
    runner.free_slot(slot)
    runner.free_slot(slot)
    assert runner.free_blocks == 3


@pytest.mark.parametrize(
    ("ids", "token_class", "num_rows", "message"),
    [
        ((), DECODE, 0, "no tokens"),
        ((4,), DECODE, 0, r"token id 4 is outside \[0, 4\)"),
        ((-1,), DECODE, 0, "token id -1"),
        ((1, 1), DECODE, 3, "num_rows 3"),
        ((1,) * 101, DECODE, 0, "exceed the context of 100"),
        ((1,) * 65, PROMPT, 0, "cross a block border"),
    ],
)
def test_a_bad_feed_is_refused_and_changes_nothing(
    ids: tuple[int, ...], token_class: TokenClass, num_rows: int, message: str
) -> None:
    runner = ToyRunner(ToyLanguage(4), context_len=100, num_blocks=4)
    slot = runner.new_slot()
    with pytest.raises(InvalidFeed, match=message):
        runner.forward([Feed(runner.new_slot(), (1,), DECODE, 1), Feed(slot, ids, token_class, num_rows)])
    assert (slot.length, runner.free_blocks) == (0, 4)


def test_a_freed_a_foreign_and_a_doubled_slot_are_refused() -> None:
    runner, other = ToyRunner(ToyLanguage(4)), ToyRunner(ToyLanguage(4))
    freed = runner.new_slot()
    runner.free_slot(freed)
    twice = runner.new_slot()
    for slots in ([freed], [other.new_slot()], [twice, twice]):
        with pytest.raises(InvalidFeed, match="slot"):
            runner.forward([Feed(slot, (1,), DECODE, 1) for slot in slots])


def test_any_text_survives_the_tokenizer_and_characters_may_be_split() -> None:
    tokenizer = ToyTokenizer()
    text = "the cat \U0001f600 \u4f60\u597d e\u0301!"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    halves = tokenizer.encode("\U0001f600")
    assert len(halves) == 2
    assert tokenizer.decode(halves[:1]).startswith("\ufffd")
    assert len(set(tokenizer.get_vocab().values())) == len(tokenizer)


def test_the_end_of_sequence_is_skipped_when_asked_for() -> None:
    tokenizer = ToyTokenizer()
    ids = [*tokenizer.encode("a mat"), tokenizer.eos_token_id]
    assert tokenizer.decode(ids) == "a mat<eos>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a mat"


def test_a_chat_ends_with_the_assistants_turn() -> None:
    tokenizer = ToyTokenizer()
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "user: hi\nassistant: "
    assert tokenizer.apply_chat_template(chat) == tokenizer.encode("user: hi\nassistant: ")


def test_a_toy_opens_by_name_like_any_model() -> None:
    opened = open_model(ModelSpec("toy:seed=3,context=100"))
    draft = open_model(ModelSpec("toy:seed=3,draft=0.2"))
    assert opened.runner.info.context_len == 100
    assert opened.vocabulary == draft.vocabulary
    rows = [
        each.runner.forward([Feed(each.runner.new_slot(), (5, 6), DECODE, 1)])[0].logits.exp()
        for each in (opened, draft)
    ]
    assert 0.01 < float((rows[0] - rows[1]).abs().sum()) / 2 < 0.2


@pytest.mark.parametrize("name", ["toy:speed=3", "toy:seed=x"])
def test_an_unknown_toy_option_is_named(name: str) -> None:
    with pytest.raises(NotFound, match=name.removeprefix("toy:")):
        toy_from_name(name)
