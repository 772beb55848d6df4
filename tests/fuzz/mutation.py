"""How messages are spoilt: field by field, so that they stay messages, and byte by byte, so that they need not."""

import math
from collections.abc import Sequence
from random import Random
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

MessageT = TypeVar("MessageT", bound=Message)

STRINGS = (
    "", " ", "\x00", "a" * 65, "a" * 100_000, "é" * 5_000, "\u202e\ufeff\u200d", "\U0001f9d1\u200d\U0001f680" * 50,
    "../..", "{}", "*", "fuzz-1", "nobody", "127.0.0.1:1", "unix:/nowhere", "a\r\nb", "%s%n", "coupled", "toy",
)  # fmt: skip
DOUBLES = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, 100.0)
BOUNDS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}
ODD_BYTES = (b"\xff" * 9 + b"\x01", b"\xff" * 10, b"\x80" * 40, b"\xff\xff\xff\xff\x0f", b"\xed\xa0\x80", b"\xc0\x80")
"""Numbers too long or too large, and text that is no UTF-8."""
ENTRIES = (0, 1, 2, 17, 64, 65, 300, 5_000)
"""Lengths that a list is given."""


def shaken(message: MessageT, dice: Random) -> MessageT:
    """Return a copy in which one to four fields, however deep, are something else."""
    copy = type(message)()
    copy.CopyFrom(message)
    for _ in range(dice.randint(1, 4)):
        _change_one(copy, dice)
    return copy


def _change_one(message: Message, dice: Random) -> None:
    """Change one field; go down into the messages that are there, more often than not."""
    inner = [value for field, value in message.ListFields() if _is_message(field) and not field.is_repeated]
    if inner and dice.random() < 0.75:
        _change_one(dice.choice(inner), dice)
        return
    fields: Sequence[Any] = message.DESCRIPTOR.fields
    if not fields:
        return
    field = dice.choice(fields)
    if dice.random() < 0.15:
        message.ClearField(field.name)
    elif field.is_repeated:
        _fill(getattr(message, field.name), field, dice)
    elif _is_message(field):
        getattr(message, field.name).SetInParent()
        _change_one(getattr(message, field.name), dice)
    else:
        setattr(message, field.name, _odd(field, dice))


def _fill(entries: Any, field: FieldDescriptor, dice: Random) -> None:
    """Change a list: another length, or one other entry."""
    if len(entries) and dice.random() < 0.5:
        where = dice.randrange(len(entries))
        if _is_message(field):
            _change_one(entries[where], dice)
        else:
            entries[where] = _odd(field, dice)
        return
    count = dice.choice(ENTRIES)
    del entries[count:]
    if _is_message(field):
        for _ in range(min(count, 300) - len(entries)):
            _change_one(entries.add(), dice)
        return
    value = _odd(field, dice)
    # A long text many times over is what `grown` is for.
    entries.extend([value] * ((count if not isinstance(value, str | bytes) else min(count, 65)) - len(entries)))


def _odd(field: FieldDescriptor, dice: Random) -> object:
    """Return a value that fits the field's type, and seldom more than that."""
    kind = field.cpp_type
    if kind in BOUNDS:
        low, high = BOUNDS[kind]
        usual = (0, 1, 2, 3, 63, 64, 65, 255, 256, 267, 1024, 4095, 4096, 4097, 65_536, 2**31 - 1)
        return dice.choice((*usual, low, high, high - 1, dice.randint(low, high)))
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return dice.random() < 0.5
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return dice.choice((*DOUBLES, dice.uniform(-1e6, 1e6)))
    if field.type == FieldDescriptor.TYPE_BYTES:
        return dice.randbytes(dice.choice((0, 1, 15, 16, 17, 1000)))
    return dice.choice(STRINGS)


def _is_message(field: FieldDescriptor) -> bool:
    return bool(field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE)


def noise(dice: Random) -> bytes:
    """Return bytes that have nothing to do with any message."""
    return dice.randbytes(dice.choice((0, 1, 2, 8, 40, 200, 5_000)))


def damaged(data: bytes, dice: Random) -> bytes:
    """Return the bytes of a message, spoilt in one to three ways."""
    for _ in range(dice.randint(1, 3)):
        data = dice.choice(DAMAGES)(data, dice)
    return data


def _flipped(data: bytes, dice: Random) -> bytes:
    changed = bytearray(data or b"\x00")
    for _ in range(dice.randint(1, 8)):
        changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def _cut(data: bytes, dice: Random) -> bytes:
    return data[: dice.randrange(len(data) + 1)]


def _inserted(data: bytes, dice: Random) -> bytes:
    where = dice.randrange(len(data) + 1)
    return data[:where] + dice.choice((*ODD_BYTES, noise(dice))) + data[where:]


def _twice(data: bytes, dice: Random) -> bytes:
    """Repeat a part, or all: the fields of a message merge, a choice of several keeps the last."""
    start = dice.randrange(len(data) + 1)
    part = data if dice.random() < 0.5 else data[start : start + dice.randint(1, 50)]
    return data + part * dice.choice((1, 2, 50))


def _nested(data: bytes, dice: Random) -> bytes:
    """Wrap it again and again: deeper than a parser's limit, or not."""
    number = dice.randint(1, 18)
    for _ in range(dice.choice((1, 2, 20, 99, 101, 150))):
        data = varint(number << 3 | 2) + varint(len(data)) + data
    return data


def _grown(data: bytes, dice: Random) -> bytes:
    """Add a field that nobody knows, or a known one, of an extreme length, present or merely claimed."""
    length = dice.choice((0, 127, 128, 70_000, 2**31 - 1, 2**32, 2**63))
    return data + varint(dice.randint(1, 40) << 3 | 2) + varint(length) + bytes(length if length <= 70_000 else 5)


def _tagged(data: bytes, dice: Random) -> bytes:
    """Add a field of any number, of any kind of value, of a value that does not fit."""
    tag = dice.choice((dice.randrange(200), dice.getrandbits(35)))
    return data + varint(tag) + varint(dice.getrandbits(dice.choice((1, 31, 32, 63, 64, 70))))


DAMAGES = (_flipped, _flipped, _cut, _inserted, _twice, _nested, _grown, _tagged)


def varint(number: int) -> bytes:
    """Return a number as protobuf writes it; of more than 64 bits, as it never does."""
    groups = []
    while number > 127:
        groups.append(number & 127 | 128)
        number >>= 7
    return bytes([*groups, number])
