"""A model's text is taken apart into thoughts, content and calls, however it is cut."""

import random

import pytest

from orchestrator.http.parsing import Called, Format, Parser, Piece, Said, Thought, format_of

WORDS = [
    (Format(), "content"),
    (Format(calls=True), "calls of tools, content"),
    (Format(thinks=True, thinks_first=True, calls=True), "thoughts, in which they begin, calls of tools, content"),
]
ALL = Format(thinks=True, calls=True)
OPEN = Format(thinks=True, thinks_first=True, calls=True)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
ADD = Called("add", '{"a": 1, "b": [2]}')

CASES: dict[str, tuple[Format, str, list[Piece]]] = {
    "content": (ALL, "Hello, world.\n", [Said("Hello, world.\n")]),
    "nothing is known": (Format(), f"<think>x</think>{CALL}", [Said(f"<think>x</think>{CALL}")]),
    "a thought": (ALL, "<think>\nhm\n</think>\n\nYes.", [Thought("\nhm\n"), Said("Yes.")]),
    "a thought that the template began": (OPEN, "hm</think>Yes.", [Thought("hm"), Said("Yes.")]),
    "a thought without an end": (ALL, "<think>hm", [Thought("hm")]),
    "a thought later on": (ALL, "See <think> here.", [Said("See <think> here.")]),
    "a call": (ALL, CALL, [ADD]),
    "content, then a call": (ALL, f"I add.\n{CALL}", [Said("I add."), ADD]),
    "two calls": (ALL, f"{CALL}\n{CALL}\n", [ADD, ADD]),
    "all three": (ALL, f"<think>hm</think>\nSo:\n\n{CALL}", [Thought("hm"), Said("So:"), ADD]),
    "content between calls": (ALL, f"{CALL}\nand\n{CALL}", [ADD, Said("and"), ADD]),
    "a call without its end": (ALL, CALL.removesuffix("</tool_call>"), [ADD]),
    "a call that is no JSON": (ALL, "<tool_call>{nope}</tool_call>", [Said("<tool_call>{nope}</tool_call>")]),
    "a call without a name": (ALL, '<tool_call>{"a": 1}</tool_call>', [Said('<tool_call>{"a": 1}</tool_call>')]),
    "half a call": (ALL, 'Well <tool_call>{"name": "ad', [Said('Well <tool_call>{"name": "ad')]),
    "arguments as text": (ALL, '<tool_call>{"name":"f","arguments":"{}"}</tool_call>', [Called("f", "{}")]),
    "no arguments": (ALL, '<tool_call>{"name":"f"}</tool_call>', [Called("f", "{}")]),
    "what looks like a marker": (ALL, "a < b, <tool, <thin", [Said("a < b, <tool, <thin")]),
    "only white space": (ALL, " \n", [Said(" \n")]),
    "calls are not looked for": (Format(thinks=True), f"<think>a</think>{CALL}", [Thought("a"), Said(CALL)]),
}


def taken(marks: Format, parts: list[str]) -> list[Piece]:
    parser, pieces = Parser(marks), []
    for part in parts:
        pieces += parser.push(part)
    pieces += parser.flush()
    assert parser.num_calls == sum(isinstance(piece, Called) for piece in pieces)
    return joined(pieces)


def joined(pieces: list[Piece]) -> list[Piece]:
    whole: list[Piece] = []
    for piece in pieces:
        last = whole[-1] if whole else None
        if isinstance(piece, Said) and isinstance(last, Said):
            whole[-1] = Said(last.text + piece.text)
        elif isinstance(piece, Thought) and isinstance(last, Thought):
            whole[-1] = Thought(last.text + piece.text)
        else:
            whole.append(piece)
    return whole


@pytest.mark.parametrize("name", CASES)
def test_a_text_means_the_same_however_it_is_cut(name: str) -> None:
    marks, text, wanted = CASES[name]
    assert taken(marks, [text]) == wanted
    assert taken(marks, list(text)) == wanted
    lot = random.Random(7)
    for _ in range(40):
        cuts = sorted(lot.sample(range(len(text) + 1), min(4, len(text))))
        assert taken(marks, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == wanted


def test_content_is_given_out_as_soon_as_it_is_certain() -> None:
    parser = Parser(ALL)
    assert parser.push("Hello <") == [Said("Hello")]
    assert parser.push("b") == [Said(" <b")]
    assert parser.push("<tool_c") == []
    assert parser.push("ake>") == [Said("<tool_cake>")]


@pytest.mark.parametrize(
    ("template", "rendered", "wanted"),
    [
        ("", "", Format()),
        ("{{ messages }}", "x", Format()),
        ("... </think> ...", "<|assistant|>", Format(thinks=True)),
        ("... </think> ...", "<|assistant|><think>\n", Format(thinks=True, thinks_first=True)),
        ("<tool_call> </tool_call>", "x", Format(calls=True)),
    ],
    ids=["none", "plain", "thinks", "begins with a thought", "calls"],
)
def test_markers_are_found_in_the_chat_template(template: str, rendered: str, wanted: Format) -> None:
    assert format_of(template, rendered) == wanted


@pytest.mark.parametrize(("marks", "words"), WORDS, ids=["nothing", "calls", "all"])
def test_what_is_looked_for_can_be_said_in_words(marks: Format, words: str) -> None:
    assert str(marks) == words
