"""The two hundred prompts of `benchmarks/prompts/`; its README says where they are from."""

import json
from dataclasses import dataclass
from pathlib import Path

from outrider.generation import ChatMessage, ChatPrompt, TextPrompt

HELD_OUT = "held_out_chat"
"""Chat prompts that nothing was trained or tuned on; they are not among the two hundred."""
FOLDER = Path(__file__).parent / "prompts"
KINDS = ("chat", "summarise", "translate", "edit", "code", "answer", "prose", "repetition", "unicode")


@dataclass(frozen=True, slots=True)
class LabelledPrompt:
    """A prompt and what kind of work it asks for."""

    name: str
    """Kind and line number, such as "edit-7"."""
    kind: str
    text: str
    raw: bool
    """Whether the text is continued as it is, without the chat template."""
    demo: bool
    """Whether it belongs to the small set."""

    @property
    def prompt(self) -> TextPrompt | ChatPrompt:
        """What a client sends."""
        return TextPrompt(self.text) if self.raw else ChatPrompt((ChatMessage("user", self.text),))


def load_prompts() -> list[LabelledPrompt]:
    """Return all prompts, the kinds taking turns, so that any prefix of the list is varied."""
    lines = {kind: _read(kind) for kind in KINDS}
    longest = max(len(prompts) for prompts in lines.values())
    return [lines[kind][index] for index in range(longest) for kind in KINDS if index < len(lines[kind])]


def prompts_of(kind: str) -> list[LabelledPrompt]:
    """Return the prompts of one kind, held-out ones too."""
    return _read(kind)


def demo_prompts() -> list[LabelledPrompt]:
    """Return the small set: one prompt of nearly every kind."""
    return [prompt for prompt in load_prompts() if prompt.demo]


def _read(kind: str) -> list[LabelledPrompt]:
    lines = (FOLDER / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()
    return [_parse(kind, number, json.loads(line)) for number, line in enumerate(lines, 1)]


def _parse(kind: str, number: int, fields: dict[str, object]) -> LabelledPrompt:
    text = str(fields["text"])
    if "document" in fields:
        document = (FOLDER / "documents" / f"{fields['document']}.txt").read_text(encoding="utf-8")
        text = f"{text}\n\n{document.rstrip()}"
    return LabelledPrompt(f"{kind}-{number}", kind, text, bool(fields.get("raw")), bool(fields.get("demo")))
