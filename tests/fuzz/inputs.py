"""One call after another, each from the seed of the run and its own number alone, so that any can be made again."""

from dataclasses import dataclass, replace
from random import Random

from google.protobuf.message import Message

from tests.fuzz.mutation import damaged, noise, shaken
from tests.fuzz.samples import METHODS, Facts, Method

BATCH = 100
"""Calls that share names."""
WAITS_S = (0.0, 0.0, 0.0, 0.02, 0.1)
"""How long a caller leaves its side of a stream open behind its last message."""


@dataclass(frozen=True, slots=True)
class Call:
    """What is sent on one stream, and then the end of it."""

    number: int
    method: Method
    inputs: tuple[bytes, ...]
    wait_s: float


def make_call(seed: int, number: int, facts: Facts) -> Call:
    """Return a call of a run."""
    dice = Random(f"{seed}:{number}")
    method = METHODS[number % len(METHODS)]
    messages = method.make(dice, replace(facts, batch=number // BATCH))
    if method.streams:
        messages = _reordered(messages, dice)
    inputs = tuple(_spoilt(message, dice, sound=method.streams and dice.random() < 0.5) for message in messages)
    return Call(number, method, inputs, dice.choice(WAITS_S) if method.streams else 0.0)


def _reordered(messages: list[Message], dice: Random) -> list[Message]:
    """Leave the order of most streams as it is; drop, double or shuffle the messages of others."""
    match dice.randrange(10):
        case 0:
            return dice.sample(messages, len(messages))
        case 1:
            return messages[1:] or messages
        case 2:
            return messages * 2
        case _:
            return messages


def _spoilt(message: Message, dice: Random, *, sound: bool) -> bytes:
    """Return the bytes of a message, spoilt or not; a sound one lets the stream live until the next."""
    lot = 0.0 if sound else dice.random()
    if lot < 0.15:
        return message.SerializeToString()
    if lot < 0.55:
        return shaken(message, dice).SerializeToString()
    if lot < 0.75:
        return damaged(message.SerializeToString(), dice)
    if lot < 0.9:
        return damaged(shaken(message, dice).SerializeToString(), dice)
    return noise(dice)
