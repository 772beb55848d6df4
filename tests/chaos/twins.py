"""What is asked during a run, and what the answer must be: known before the first fault."""

from dataclasses import dataclass, replace

from outrider.generation import GenerationRequest, SpeculationChoice, TextPrompt
from outrider.messages import SamplingParams
from tests.e2e.toys import GREEDY, expected

NUM_SLOTS = 16
LEAST_TOKENS, MOST_TOKENS = 120, 420
OFF, FREE = SpeculationChoice(off=True), SpeculationChoice()


@dataclass(frozen=True, slots=True)
class Script:
    """One request, and the twin of its text."""

    name: str
    prompt: str
    max_tokens: int
    seed: int | None
    """None: greedy."""
    token_ids: tuple[int, ...]
    """The twin: computed from the language itself, without any service."""
    text: str = ""
    """The twin's text, as a cluster without faults and without speculation says it."""

    def request(self, *, speculation: SpeculationChoice = FREE) -> GenerationRequest:
        """Return the request."""
        sampling = GREEDY if self.seed is None else SamplingParams()
        return GenerationRequest(
            TextPrompt(self.prompt),
            max_tokens=self.max_tokens,
            sampling=sampling,
            seed=self.seed,
            ignore_eos=True,
            speculation=speculation,
        )

    def with_text(self, text: str) -> "Script":
        """Return the script with the text of its twin."""
        return replace(self, text=text)


def scripts(count: int = NUM_SLOTS, most_tokens: int = MOST_TOKENS) -> tuple[Script, ...]:
    """Return the scripts of a run: greedy ones and seeded ones in turn, of different lengths."""
    made, least = [], min(LEAST_TOKENS, most_tokens)
    for index in range(count):
        seed = None if index % 2 == 0 else 100 + index
        prompt = f"the {'very ' * (index * 3)}old tale number {index} begins "
        length = least + (most_tokens - least) * index // max(1, count - 1)
        kind = "greedy" if seed is None else f"seed {seed}"
        made.append(Script(f"{index} ({kind})", prompt, length, seed, tuple(expected(prompt, length, seed))))
    return tuple(made)
