"""Brings what is wanted of a pass from the device to the CPU, in one copy.

Of a row that somebody only needs the likeliest token of, nothing but that id is brought.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.model.decoders import PassOutput
from outrider.sampling import greedy_ids


@dataclass(frozen=True, slots=True)
class Want:
    """What somebody wants of consecutive rows of a pass's output."""

    feed: int
    first: int
    count: int
    hidden: bool = False
    best_below: int = 0
    """If positive, the likeliest of the ids below it is wanted instead of logits."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What was wanted, on the CPU; ordinary tensors that may be changed in place."""

    logits: Tensor
    """[count, vocab_size] float32; no rows if only the likeliest ids were wanted."""
    hidden: Tensor | None
    """[count, hidden_size]"""
    best: Tensor | None
    """[count] int64"""


def fetch(output: PassOutput, wants: Sequence[Want]) -> list[Piece]:
    """Return what is wanted of a pass.

    Args:
        output: Of the pass; may be overwritten afterwards.
        wants: Any rows in any order.
    """
    likeliest = _likeliest(output.logits, wants)
    parts = list(likeliest.values())
    for want in wants:
        rows = slice(want.first, want.first + want.count)
        if not want.best_below:
            parts.append(output.logits[rows])
        if want.hidden:
            parts.append(output.hidden[rows])
    arrived = iter(_to_cpu(parts))
    likeliest = {below: next(arrived) for below in likeliest}
    return [_piece(want, likeliest, arrived, output) for want in wants]


def _likeliest(logits: Tensor, wants: Sequence[Want]) -> dict[int, Tensor]:
    """Return the likeliest of the ids below each wanted limit, of all rows up to the last that it is wanted of.

    Together: a device takes hardly longer for all rows than for those of one session, and so does the way to it.
    """
    ends: dict[int, int] = {}
    for want in wants:
        if want.best_below:
            ends[want.best_below] = max(ends.get(want.best_below, 0), want.first + want.count)
    return {below: greedy_ids(logits[:end, :below]) for below, end in ends.items()}


def _piece(want: Want, likeliest: Mapping[int, Tensor], arrived: Iterator[Tensor], output: PassOutput) -> Piece:
    logits = None if want.best_below else next(arrived).to(torch.float32, copy=True)
    hidden = next(arrived).clone() if want.hidden else None
    if logits is not None:
        return Piece(logits, hidden, None)
    own = likeliest[want.best_below][want.first : want.first + want.count]
    return Piece(torch.empty(0, output.logits.shape[1]), hidden, own)


def _to_cpu(parts: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts on the CPU; from a GPU in one transfer."""
    if not parts or parts[0].device.type == "cpu":
        return list(parts)
    return unpacked(packed_bytes(parts).to("cpu"), parts)


def packed_bytes(parts: Sequence[Tensor]) -> Tensor:
    """Return the bytes of all parts end to end, each begun at a multiple of 8: [n] uint8."""
    pieces: list[Tensor] = []
    for part in parts:
        flat = part.contiguous().view(-1).view(torch.uint8)
        pieces += [flat, flat.new_zeros(-len(flat) % 8)]
    return torch.cat(pieces)


def unpacked(data: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """Take `packed_bytes` apart again; views of `data` with the parts' shapes and types."""
    found, start = [], 0
    for part in parts:
        size = part.numel() * part.element_size()
        found.append(data[start : start + size].view(part.dtype).view(part.shape))
        start += size + -size % 8
    return found
