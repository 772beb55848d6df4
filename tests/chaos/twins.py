"""What is asked during a run, and what the answer must be: known before the first fault."""

from dataclasses import dataclass, replace

from outrider.generation import GenerationRequest, SpeculationChoice, TextPrompt
from outrider.ids import SessionId
from outrider.messages import SamplingParams
from outrider.model.toy import ToyTokenizer
from tests.e2e.toys import GREEDY, continued

NUM_SLOTS = 16
LEAST_TOKENS, MOST_TOKENS = 120, 420
LATER_EVERY, LATER_TOKENS = 3, 80
"""Every third session goes on with a further turn, of so many tokens."""
OFF, FREE = SpeculationChoice(off=True), SpeculationChoice()


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session, and the twin of its text."""

    prompt: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """The twin: computed from the language itself, without any service."""
    text: str = ""
    """The twin's text, as a cluster without faults and without speculation says it."""


@dataclass(frozen=True, slots=True)
class Script:
    """What one session says."""

    name: str
    seed: int | None
    """None: greedy."""
    turns: tuple[Turn, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """What the log holds at the end behind the first prompt, later prompts included."""
        first, *later = self.turns
        return first.token_ids + tuple(token for turn in later for token in (*turn.prompt_ids, *turn.token_ids))

    def request(
        self,
        index: int = 0,
        session_id: SessionId = SessionId(""),
        request_id: str = "",
        *,
        speculation: SpeculationChoice = FREE,
    ) -> GenerationRequest:
        """Return the request of a turn; a later one than the first names the session."""
        turn = self.turns[index]
        return GenerationRequest(
            TextPrompt(turn.prompt),
            session_id=session_id,
            request_id=request_id,
            max_tokens=len(turn.token_ids),
            sampling=GREEDY if self.seed is None else SamplingParams(),
            seed=self.seed,
            ignore_eos=True,
            speculation=speculation,
        )

    def with_texts(self, texts: list[str]) -> "Script":
        """Return the script with the texts of its twin."""
        return replace(
            self, turns=tuple(replace(turn, text=text) for turn, text in zip(self.turns, texts, strict=True))
        )


def scripts(
    count: int = NUM_SLOTS, most_tokens: int = MOST_TOKENS, later_every: int = LATER_EVERY
) -> tuple[Script, ...]:
    """Return the scripts of a run: greedy ones and seeded ones in turn, of different lengths, some of two turns."""
    made, least = [], min(LEAST_TOKENS, most_tokens)
    for index in range(count):
        seed = None if index % 2 == 0 else 100 + index
        kind = "greedy" if seed is None else f"seed {seed}"
        asked = [
            (
                f"the {'very ' * (index * 3)}old tale number {index} begins ",
                least + (most_tokens - least) * index // max(1, count - 1),
            )
        ]
        if later_every and index % later_every == 0:
            asked.append((" and then the cat ", LATER_TOKENS))
        made.append(Script(f"{index} ({kind})", seed, _turns(asked, seed)))
    return tuple(made)


def _turns(asked: list[tuple[str, int]], seed: int | None) -> tuple[Turn, ...]:
    """Return turns with prompts and numbers of tokens, each behind all before it."""
    log: list[int] = []
    turns = []
    for prompt, count in asked:
        prompt_ids = ToyTokenizer().encode(prompt)
        log += prompt_ids
        token_ids = continued(log, count, seed)
        log += token_ids
        turns.append(Turn(prompt, tuple(prompt_ids), tuple(token_ids)))
    return tuple(turns)
