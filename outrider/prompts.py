"""Files of prompts: JSON lines, or a text a line.

A line of a `.jsonl` file is an object with a `text`, and, where they are wanted:

    document    name of a text that follows the prompt: NAME.txt in the folder `documents` beside the file
    raw         true: the text is continued as it is, without the chat template
    demo        true: the prompt belongs to a small set

Every other file has one prompt a line, as plain text. Empty lines are skipped.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import InvalidRequest
from outrider.generation import ChatMessage, ChatPrompt, TextPrompt

FIELD = "prompts"
"""Name of the option that names the file."""
KNOWN = {"text": str, "document": str, "raw": bool, "demo": bool}
"""Fields of a line, and their types."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a file."""

    name: str
    """File and line, such as "edit-7"."""
    text: str
    raw: bool = False
    """Whether the text is continued as it is, without the chat template."""
    demo: bool = False
    """Whether it belongs to a small set."""

    @property
    def kind(self) -> str:
        """The file's name without its ending, such as "edit"."""
        return self.name.rpartition("-")[0]

    @property
    def asked(self) -> TextPrompt | ChatPrompt:
        """What a client sends."""
        return TextPrompt(self.text) if self.raw else ChatPrompt((ChatMessage("user", self.text),))


def read_prompts(path: Path) -> list[Prompt]:
    """Return a file's prompts, in order; at least one.

    Raises:
        InvalidRequest: the file cannot be read, has no prompt, or a line is wrong, which is named by its number.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InvalidRequest(FIELD, str(path), f"a file that can be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(FIELD, str(path), f"a file in UTF-8 (byte {error.start} is not)") from error
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    prompts = list(_json_lines(path, numbered) if path.suffix == ".jsonl" else _plain_lines(path, numbered))
    if not prompts:
        raise InvalidRequest(FIELD, str(path), "a file with at least one prompt")
    return prompts


def _plain_lines(path: Path, lines: Iterable[tuple[int, str]]) -> Iterable[Prompt]:
    return (Prompt(f"{path.stem}-{number}", line.strip()) for number, line in lines)


def _json_lines(path: Path, lines: Iterable[tuple[int, str]]) -> Iterable[Prompt]:
    for number, line in lines:
        fields = _fields(path, number, line)
        text = fields["text"]
        if "document" in fields:
            text = f"{text}\n\n{_document(path, number, fields['document'])}"
        yield Prompt(f"{path.stem}-{number}", text, fields.get("raw", False), fields.get("demo", False))


def _fields(path: Path, number: int, line: str) -> dict[str, Any]:
    """Read one line.

    Raises:
        InvalidRequest: it is no object, or a field is unknown, missing or of another type.
    """
    at = f"{path.name}, line {number}"
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise InvalidRequest(FIELD, at, f"JSON ({error})") from error
    if not isinstance(fields, dict) or not fields.get("text"):
        raise InvalidRequest(FIELD, at, 'an object with a "text" that is not empty')
    for name, value in fields.items():
        if name not in KNOWN:
            raise InvalidRequest(FIELD, at, f"no fields but {', '.join(KNOWN)}; it has {name!r}")
        if not isinstance(value, KNOWN[name]):
            raise InvalidRequest(FIELD, at, f"{name!r} to be a {'text' if KNOWN[name] is str else 'true or false'}")
    return fields


def _document(path: Path, number: int, name: str) -> str:
    """Return the text that a prompt refers to.

    Raises:
        InvalidRequest: there is none of that name.
    """
    at = f"{path.name}, line {number}"
    document = path.parent / "documents" / f"{name}.txt"
    if Path(name).name != name or not document.is_file():
        raise InvalidRequest(FIELD, at, f"the name of a text in {document.parent}, not {name!r}")
    return document.read_text(encoding="utf-8").rstrip()
