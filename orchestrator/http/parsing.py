"""What a model's text means: what it thought, what it says, which tools it calls. Pure, and fed piece by piece.

Markers are looked for across the borders of pieces: text that could be the beginning of one is held back. What is not
understood is content: an unknown marker, a call that is no JSON. The concatenation of the contents does not depend on
how the text was cut.

Known so far, by the markers in the model's own chat template: thoughts between `<think>` and `</think>`, and calls
between `<tool_call>` and `</tool_call>`, each a JSON object with `name` and `arguments`.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import assert_never

THINK_START, THINK_END = "<think>", "</think>"
CALL_START, CALL_END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class Format:
    """How a model marks what is not content."""

    thinks: bool = False
    """Whether thoughts are marked."""
    thinks_first: bool = False
    """Whether an answer begins in the middle of a thought, since the template has begun it."""
    calls: bool = False
    """Whether calls of tools are marked."""

    def __str__(self) -> str:
        """Say it in words, behind "answers are taken apart into"."""
        thoughts = ["thoughts, in which they begin" if self.thinks_first else "thoughts"] if self.thinks else []
        return ", ".join([*thoughts, *(["calls of tools"] if self.calls else []), "content"])


@dataclass(frozen=True, slots=True)
class Said:
    """Content."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """What the model thinks before it speaks."""

    text: str


@dataclass(frozen=True, slots=True)
class Called:
    """A whole call of a tool."""

    name: str
    arguments: str
    """A JSON object, as text."""


Piece = Said | Thought | Called


class Parser:
    """Takes a text apart as it comes."""

    def __init__(self, format: Format) -> None:  # noqa: A002 - it is the word
        """Start before the first character.

        Args:
            format: which markers mean something.
        """
        self._format = format
        self._state = "thought" if format.thinks and format.thinks_first else "said"
        self._held = ""
        self._blank = ""
        """White space that is content only if no marker follows."""
        self._after_marker = False
        self._spoken = False
        self.num_calls = 0
        """Calls so far."""

    def push(self, text: str) -> list[Piece]:
        """Take the next piece of the text, and return what became certain."""
        self._held += text
        return _joined(self._certain())

    def flush(self) -> list[Piece]:
        """Return what was held back; nothing follows."""
        text, self._held = self._held, ""
        match self._state:
            case "called":
                # A model may end without the last marker; and what ends in the middle is content, its marker too.
                call = _call(text)
                if call is None:
                    return _joined(chain(self._say(f"{CALL_START}{text}"), self._rest()))
                self.num_calls += 1
                return [call]
            case "thought":
                return [Thought(text)] if text else []
            case _:
                return _joined(chain(self._say(text), self._rest()))

    def _certain(self) -> Iterator[Piece]:
        """Take apart as far as nothing that may come changes it."""
        while True:
            marker, state = self._next()
            at = self._held.find(marker) if marker else -1
            if at < 0:
                yield from self._without_marker()
                return
            text, self._held = self._held[:at], self._held[at + len(marker) :]
            yield from self._before(text)
            if state == "thought":
                self._blank = ""
            self._state = state

    def _next(self) -> tuple[str, str]:
        """Return the marker that would come next here, and the state after it; empty: none would."""
        match self._state:
            case "thought":
                return THINK_END, "said"
            case "called":
                return CALL_END, "said"
            case _:
                starts = {}
                if self._format.thinks and not self._spoken and self._held.lstrip().startswith(THINK_START):
                    starts[THINK_START] = "thought"
                if self._format.calls:
                    starts[CALL_START] = "called"
                found = {marker: at for marker in starts if (at := self._held.find(marker)) >= 0}
                marker = min(found, key=lambda each: found[each], default="")
                return marker, starts.get(marker, "said")

    def _before(self, text: str) -> Iterator[Piece]:
        """Tell what stood before a marker."""
        match self._state:
            case "thought":
                self._after_marker = True
                if text:
                    yield Thought(text)
            case "called":
                call = _call(text)
                if call is None:
                    yield from self._say(f"{CALL_START}{text}{CALL_END}")
                else:
                    self.num_calls += 1
                    self._blank, self._after_marker = "", True
                    yield call
            case _:
                yield from self._say(text)

    def _without_marker(self) -> Iterator[Piece]:
        """Tell all but what could be the beginning of a marker."""
        match self._state:
            case "called":
                return
            case "thought":
                text = self._release(THINK_END)
                if text:
                    yield Thought(text)
            case _:
                markers = [THINK_START] if self._format.thinks and not self._spoken else []
                yield from self._say(self._release(*markers, *([CALL_START] if self._format.calls else [])))

    def _say(self, text: str) -> Iterator[Piece]:
        """Tell content; white space beside markers is none, and that at the end may be beside one."""
        text, self._blank = self._blank + text, ""
        if self._after_marker:
            text = text.lstrip()
        kept = text.rstrip() if self._format.calls or (self._format.thinks and not self._spoken) else text
        self._blank = text[len(kept) :]
        if kept:
            self._spoken, self._after_marker = True, False
            yield Said(kept)

    def _rest(self) -> Iterator[Piece]:
        """Tell white space that no marker came behind."""
        text, self._blank = self._blank, ""
        if text and not self._after_marker:
            yield Said(text)

    def _release(self, *markers: str) -> str:
        """Take out of what is held all but the longest end that could begin a marker."""
        held = self._held
        longest = max((len(marker) - 1 for marker in markers), default=0)
        keep = next(
            (n for n in range(min(longest, len(held)), 0, -1) if any(m.startswith(held[-n:]) for m in markers)), 0
        )
        cut = len(held) - keep
        self._held = held[cut:]
        return held[:cut]


def _call(text: str) -> Called | None:
    """Read a call; None: it is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):
        return Called(found["name"], arguments)
    return Called(found["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _joined(pieces: Iterator[Piece]) -> list[Piece]:
    """Put neighbours of a kind together."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        match piece:
            case Said():
                if isinstance(last, Said):
                    joined[-1] = Said(last.text + piece.text)
                    continue
            case Thought():
                if isinstance(last, Thought):
                    joined[-1] = Thought(last.text + piece.text)
                    continue
            case Called():
                pass
            case _:
                assert_never(piece)
        joined.append(piece)
    return joined


def format_of(template: str, rendered: str) -> Format:
    """Return which markers a model uses.

    Args:
        template: its chat template; empty: it has none.
        rendered: a conversation of one message after the template, up to the beginning of the answer.
    """
    thinks = THINK_END in template
    return Format(
        thinks=thinks,
        thinks_first=thinks and rendered.rstrip().endswith(THINK_START),
        calls=CALL_START in template and CALL_END in template,
    )
