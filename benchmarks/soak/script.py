"""What the clients of a soak ask: a fixed number of conversations, so that each twin is asked once."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.prompt_set import load_prompts
from outrider.generation import ChatMessage, ChatPrompt, GenerationRequest, SpeculationChoice, TextPrompt, TokenPrompt
from outrider.ids import Mode, SessionId
from outrider.messages import SamplingParams

LAWS = ("greedy", "greedy", "seeded", "seeded", "greedy then seeded", "unseeded", "unseeded block")
"""How a conversation's texts are drawn, in turn; the last two promise a law and no text."""
GREEDY = SamplingParams(temperature=0.0)
WARM = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=0.9, top_p=0.9),
    SamplingParams(temperature=1.0, top_k=40, frequency_penalty=0.4),
)
OPENING = (
    "You answer questions of people who are in a hurry. Be brief, be exact, and say so when you do not know. Use plain "
    "words and short sentences. Do not repeat the question. Where a number is asked for, give the number first and the "
    "reason behind it. Where a list is asked for, give at most five points, one on a line. Never invent sources. "
) * 2
"""What a third of all conversations begin with: several blocks of KV that they share."""
FOLLOW_UPS = ("Say that again in other words.", "Why?", "Give an example, please.", "And what follows from that?")


@dataclass(frozen=True, slots=True)
class Conversation:
    """One or two turns, without a word about speculation: each time it is played, that is drawn anew."""

    number: int
    law: str
    turns: tuple[GenerationRequest, ...]

    @property
    def has_twins(self) -> bool:
        """Whether its texts are promised."""
        return not self.law.startswith("unseeded")


@dataclass(frozen=True, slots=True)
class Sizes:
    """How long things are."""

    max_chars: int
    """Of a prompt drawn from the prompt set."""
    max_tokens: int
    """Of an answer."""
    vocab_len: int
    """For prompts of random ids."""


REAL_SIZES = Sizes(1400, 110, 49_000)
TOY_SIZES = Sizes(420, 130, 256)


def make_conversations(count: int, sizes: Sizes, seed: int) -> list[Conversation]:
    """Return so many conversations, the laws in turn."""
    dice = random.Random(f"conversations of {seed}")
    texts = [prompt.text for prompt in load_prompts()]
    return [_conversation(number, sizes, dice, dice.choice(texts)) for number in range(count)]


def _conversation(number: int, sizes: Sizes, dice: random.Random, text: str) -> Conversation:
    law = LAWS[number % len(LAWS)]
    chats = dice.random() < 0.5
    first = _first(text[: dice.randint(1, sizes.max_chars)], sizes, dice, chats=chats)
    prompts: list[TextPrompt | TokenPrompt | ChatPrompt] = [first]
    if dice.random() < 0.6:
        follow_up = dice.choice(FOLLOW_UPS)
        prompts.append(ChatPrompt((ChatMessage("user", follow_up),)) if chats else TextPrompt(f"\n\n{follow_up}\n\n"))
    turns = [_turn(prompt, law, index, sizes, dice) for index, prompt in enumerate(prompts)]
    return Conversation(number, law, tuple(turns))


def _first(text: str, sizes: Sizes, dice: random.Random, *, chats: bool) -> TextPrompt | TokenPrompt | ChatPrompt:
    """Return a first prompt: a third begins as others do, some are random ids."""
    shared = dice.random() < 0.33
    if chats:
        system = (ChatMessage("system", OPENING),) if shared else ()
        return ChatPrompt((*system, ChatMessage("user", text)))
    if dice.random() < 0.2:
        count = dice.choice((1, 2, 63, 64, 65, 128, dice.randint(3, 300)))
        return TokenPrompt(tuple(dice.randrange(5, sizes.vocab_len) for _ in range(count)))
    return TextPrompt(OPENING + text if shared else text)


def _turn(
    prompt: TextPrompt | TokenPrompt | ChatPrompt, law: str, index: int, sizes: Sizes, dice: random.Random
) -> GenerationRequest:
    greedy = law == "greedy" or (law == "greedy then seeded" and index == 0)
    unseeded = law.startswith("unseeded")
    return GenerationRequest(
        prompt,
        max_tokens=dice.randint(1, sizes.max_tokens),
        sampling=GREEDY if greedy else dice.choice(WARM),
        seed=None if greedy or unseeded else dice.randrange(1 << 64),
        stop=(dice.choice((".", "\n", " the ")) * dice.randint(1, 2),) if dice.random() < 0.2 else (),
        ignore_eos=dice.random() < 0.5,
        mode=Mode.BLOCK if law == "unseeded block" else None,
        num_logprobs=0 if dice.random() < 0.3 else None,
        return_token_origin=True,
    )


def speculating(turn: GenerationRequest, drafters: Sequence[str], dice: random.Random) -> GenerationRequest:
    """Return a turn with a random way of decoding."""
    chance = dice.random()
    if chance < 0.2:
        return replace(turn, speculation=SpeculationChoice(off=True))
    drafter = dice.choice(("", *drafters))
    if chance < 0.6:
        return replace(turn, drafter=drafter)
    gamma = dice.randint(1, 8)
    choice = SpeculationChoice(gamma=gamma, window=gamma * dice.choice((1, 2, 4)))
    return replace(turn, speculation=choice, drafter=drafter)


def plain(turn: GenerationRequest, session_id: SessionId) -> GenerationRequest:
    """Return a turn's twin, in a session of its own or the one of the turn before."""
    return replace(turn, speculation=SpeculationChoice(off=True), session_id=session_id)
