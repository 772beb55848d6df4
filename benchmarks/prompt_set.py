"""The two hundred prompts of `benchmarks/prompts/`; its README says where they are from."""

from pathlib import Path

from outrider.prompts import Prompt, read_prompts

HELD_OUT = "held_out_chat"
"""Chat prompts that nothing was trained or tuned on; they are not among the two hundred."""
FOLDER = Path(__file__).parent / "prompts"
KINDS = ("chat", "summarise", "translate", "edit", "code", "answer", "prose", "repetition", "unicode")


def load_prompts() -> list[Prompt]:
    """Return all prompts, the kinds taking turns, so that any prefix of the list is varied."""
    by_kind = [prompts_of(kind) for kind in KINDS]
    longest = max(map(len, by_kind))
    return [prompts[index] for index in range(longest) for prompts in by_kind if index < len(prompts)]


def prompts_of(kind: str) -> list[Prompt]:
    """Return the prompts of one kind, held-out ones too."""
    return read_prompts(FOLDER / f"{kind}.jsonl")


def demo_prompts() -> list[Prompt]:
    """Return the small set: one prompt of nearly every kind."""
    return [prompt for prompt in load_prompts() if prompt.demo]
