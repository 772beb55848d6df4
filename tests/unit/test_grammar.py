"""Grammars: which tokens may come next, what is refused, and that a state is a function of the tokens alone."""

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from outrider.errors import InvalidRequest
from outrider.grammar import MAX_COMPILED, Grammars, State
from outrider.history import History
from outrider.messages import Grammar, GrammarKind, SamplingParams
from outrider.model.toy import ToyTokenizer
from outrider.sampling import probabilities

TOY = ToyTokenizer()
SIZE = len(TOY)
END = TOY.eos_token_id
GRAMMARS = Grammars(TOY, SIZE)


def begin(kind: GrammarKind, text: str, output: str = "", end_ids: tuple[int, ...] = (END,)) -> State:
    sampling = SamplingParams(grammar=Grammar(kind, text), grammar_end_ids=end_ids)
    state = GRAMMARS.begin(sampling, TOY.encode(output))
    assert state is not None
    return state


def next_pieces(state: State) -> set[bytes]:
    allowed = state.allowed()
    assert allowed is not None
    return {TOY.pieces[token] for token in np.flatnonzero(allowed).tolist()}


def test_a_request_without_a_grammar_has_no_state() -> None:
    assert GRAMMARS.begin(SamplingParams()) is None


def test_every_token_that_some_matching_text_goes_on_with_is_allowed_and_no_other() -> None:
    """By brute force: a token is allowed exactly if the text with it is a beginning of one of the texts."""
    texts = ["the cat sat", "the mat", "that", "\u4f60\u597d", 'a "b"\n']
    state_of = {
        text: begin(GrammarKind.CHOICES, json.dumps(texts), text) for text in ("", "the ", "th", "the mat", "tha")
    }
    for output, state in state_of.items():
        expected = {
            piece
            for piece in TOY.pieces
            if piece and any(t.encode().startswith(output.encode() + piece) for t in texts)
        }
        assert next_pieces(state) == (expected | {b""} if output in texts else expected)


@pytest.mark.parametrize(
    ("kind", "text", "output"),
    [
        (GrammarKind.REGEX, "[0-9]+(,[0-9]+)*", "12,3"),
        (GrammarKind.LARK, 'start: "a" start "b" | "x"', "aaxbb"),
        (GrammarKind.JSON_SCHEMA, '{"type": "object"}', '{"a": [1, {"b": null}], "c": "d"}'),
        (GrammarKind.CHOICES, '["yes", "no"]', "yes"),
    ],
    ids=["regex", "lark", "json", "choices"],
)
def test_a_complete_text_of_each_kind_may_end_and_an_incomplete_one_may_not(
    kind: GrammarKind, text: str, output: str
) -> None:
    assert b"" in next_pieces(begin(kind, text, output))
    assert b"" not in next_pieces(begin(kind, text, output[:-1])) or kind is GrammarKind.REGEX
    assert not begin(kind, text, output[:-1]).is_broken


def test_behind_an_end_there_are_only_ends_and_every_end_of_sequence_id_is_one() -> None:
    state = begin(GrammarKind.REGEX, "a+", "aa", end_ids=(END, 200))
    assert next_pieces(state) == {b"a", b"", TOY.pieces[200]}
    state.advance([200])
    assert next_pieces(state) == {b"", TOY.pieces[200]}
    state.advance([END, 200])
    assert not state.is_broken
    state.advance(TOY.encode("a"))
    assert state.is_broken


def test_an_end_before_the_text_is_complete_breaks_the_grammar() -> None:
    state = begin(GrammarKind.REGEX, "ab", "a")
    state.advance([END])
    assert state.is_broken
    assert state.allowed() is None


def test_a_copy_moves_on_by_itself() -> None:
    state = begin(GrammarKind.REGEX, "(cat )+mat")
    before = next_pieces(state)
    copy = state.copy()
    copy.advance(TOY.encode("cat cat mat"))
    assert next_pieces(copy) == {b""}
    assert next_pieces(state) == before
    broken = state.copy()
    broken.advance(TOY.encode("x"))
    assert broken.is_broken
    assert broken.copy().is_broken
    assert not state.is_broken


def test_a_state_from_the_log_is_the_state_that_was_moved_on_token_by_token() -> None:
    text = '{"a": "the cat"}'
    moved = begin(GrammarKind.JSON_SCHEMA, '{"type": "object"}')
    for end in range(1, len(TOY.encode(text)) + 1):
        moved.advance(TOY.encode(text)[end - 1 : end])
        again = begin(GrammarKind.JSON_SCHEMA, '{"type": "object"}')
        again.advance(TOY.encode(text)[:end])
        assert next_pieces(again) == next_pieces(moved)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (GrammarKind.REGEX, "("),
        (GrammarKind.REGEX, "(?=a)b"),
        (GrammarKind.JSON_SCHEMA, "{"),
        (GrammarKind.JSON_SCHEMA, "[]"),
        (GrammarKind.JSON_SCHEMA, '{"type": "objec"}'),
        (GrammarKind.JSON_SCHEMA, '{"not": {"minLength": 3}}'),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "http://example.com/x"}'),
        (GrammarKind.LARK, "start: unknown"),
        (GrammarKind.LARK, "a: /x/"),
    ],
)
def test_what_does_not_compile_is_refused_by_the_name_of_its_field(kind: GrammarKind, text: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"sampling\.grammar\.{kind}"):
        begin(kind, text)


def test_the_bytes_of_a_byte_level_tokenizer_are_known() -> None:
    """As those of most models are: a space is another letter in the token, and a character may be split."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<end>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(["the cat sat on the mat"] * 9, trainer)
    grammars = Grammars(SimpleNamespace(backend_tokenizer=backend), backend.get_vocab_size())
    sampling = SamplingParams(grammar=Grammar(GrammarKind.REGEX, "the( cat| \u4f60)*"), grammar_end_ids=(0,))
    for text, complete in (("the cat \u4f60", True), ("the ca", False), ("the", True), ("the mat", None)):
        state = grammars.begin(sampling, backend.encode(text).ids)
        assert state is not None
        assert state.is_broken == (complete is None)
        if complete is not None:
            allowed = state.allowed()
            assert allowed is not None
            assert bool(allowed[0]) == complete


def test_a_grammar_needs_an_end_and_a_tokenizer_that_knows_its_bytes() -> None:
    with pytest.raises(InvalidRequest, match="no end-of-sequence token"):
        begin(GrammarKind.REGEX, "a", end_ids=())
    with pytest.raises(InvalidRequest, match="bytes"):
        Grammars(object(), 10).begin(SamplingParams(grammar=Grammar(GrammarKind.REGEX, "a"), grammar_end_ids=(0,)))


def test_no_more_than_a_bounded_number_of_grammars_stays_compiled() -> None:
    grammars = Grammars(TOY, SIZE)
    for number in range(2 * MAX_COMPILED):
        grammars.begin(SamplingParams(grammar=Grammar(GrammarKind.REGEX, f"a{number}"), grammar_end_ids=(END,)))
    assert len(grammars._compiled) == MAX_COMPILED


def test_a_row_that_bans_leave_empty_stays_a_law_and_breaks_the_grammar_that_it_is_drawn_from() -> None:
    """Every row has to be a law: one behind a draft that will be rejected, too."""
    (letter,) = TOY.encode("a")
    sampling = SamplingParams(
        grammar=Grammar(GrammarKind.REGEX, "a"), grammar_end_ids=(END,), logit_bias=((letter, -100.0),)
    )
    history = History(grammar=GRAMMARS.begin(sampling))
    row = probabilities(torch.zeros(1, SIZE, dtype=torch.float64), sampling, SIZE, history)[0]
    assert float(row.sum()) == pytest.approx(1.0)
    assert row[letter] == 0.0
    history.advance([int(row.argmax())])
    assert history.grammar is not None
    assert history.grammar.is_broken


def test_neither_torch_nor_transformers_is_imported_for_grammars() -> None:
    code = "import sys, outrider.grammar; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
