"""Brings what is wanted of a pass from the device to the CPU, in one copy.

Of a row that somebody only needs the likeliest token of, nothing but that id is brought.
"""

from collections.abc import Iterator, Sequence
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
    parts: list[Tensor] = []
    for want in wants:
        rows = slice(want.first, want.first + want.count)
        logits = output.logits[rows]
        parts.append(greedy_ids(logits[:, : want.best_below]) if want.best_below else logits)
        if want.hidden:
            parts.append(output.hidden[rows])
    arrived = iter(_to_cpu(parts))
    return [_piece(want, arrived, output) for want in wants]


def _piece(want: Want, arrived: Iterator[Tensor], output: PassOutput) -> Piece:
    own = next(arrived)
    hidden = next(arrived).clone() if want.hidden else None
    if want.best_below:
        return Piece(torch.empty(0, output.logits.shape[1]), hidden, own)
    return Piece(own.to(torch.float32, copy=True), hidden, None)


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
