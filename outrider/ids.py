"""Identifiers and positions, as distinct types.

Positions are absolute and count tokens from the start of the session: the first token of the prompt is at position 0,
and a *length* is the position of the token that comes next.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import NewType

SessionId = NewType("SessionId", str)
WorkerId = NewType("WorkerId", str)
TokenId = NewType("TokenId", int)


@dataclass(frozen=True, slots=True, order=True)
class Generation:
    """Who drafts for a session: made by the lease-holding orchestrator, never by a worker."""

    fence: int = 0
    """Fencing number of the orchestrator's lease; a newer owner's is larger."""
    attach: int = 0
    """Number of drafters attached under that lease so far."""


@dataclass(frozen=True, slots=True, order=True)
class Epoch:
    """One chain of draft tokens, compared lexicographically.

    Only the orchestrator makes generations; only the verifier makes rounds.
    """

    generation: Generation = Generation()
    round: int = 0
    """Rises with every token the verifier draws itself and with every reset; starts at 0 in each generation."""

    def next_round(self) -> "Epoch":
        """Return the epoch that follows this one in the same generation."""
        return Epoch(self.generation, self.round + 1)


class TokenClass(IntEnum):
    """The kind of pass that first computed a token's KV; a rebuild uses the same kind, so that bits are the same."""

    PROMPT = 1
    DECODE = 2


class TokenKind(IntEnum):
    """Where a committed token came from."""

    PLAIN = 1
    """Drawn from the target with nothing to test."""
    ACCEPTED = 2
    """A draft token that passed its test."""
    RECOVERED = 3
    """Drawn from the residual distribution after a rejection."""
    BONUS = 4
    """Drawn from the target after a whole run was accepted and nothing followed."""


class Mode(IntEnum):
    """Verification mode."""

    GREEDY = 1
    COUPLED = 2
    REJECTION = 3
    BLOCK = 4
    """Rejection mode with the block rule."""

    @property
    def needs_rows(self) -> bool:
        """Whether proposals must carry the rows that their tokens were drawn from."""
        return self in (Mode.REJECTION, Mode.BLOCK)


class FinishReason(IntEnum):
    """Why a generation ended."""

    STOP = 1
    """An end-of-sequence token, a stop id or a stop string."""
    LENGTH = 2
    """max_tokens, or the target's context, was reached."""
    CANCELLED = 3
