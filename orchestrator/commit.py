"""The commit function: where a generation ends, and what of it is text. Pure.

End of sequence, stop ids, stop strings, `max_tokens`, the context, text, log-probabilities and kinds all end at the
same token, whatever runs the tokens arrive in: every decision is made token by token from the tokens before it, so the
outcome of a sequence does not depend on how it was cut.

At one token a stop has priority over the length. Text after the start of a stop string is never given out, text that
could become one is held back, and an end of another kind gives out what was held back.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.events import Outcome
from orchestrator.text import Detokenizer
from outrider.generation import Chunk
from outrider.ids import FinishReason, TokenKind
from outrider.messages import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Ends:
    """What ends a generation."""

    final_len: int
    """Position it may not pass: prompt + max_tokens, or the context."""
    stop_ids: frozenset[int] = frozenset()
    """Stop ids of the request and, unless they are ignored, the model's end-of-sequence ids."""
    eos_ids: frozenset[int] = frozenset()
    """End-of-sequence ids: one of them ends without being named as what matched."""
    stop_strings: tuple[str, ...] = ()
    """Not empty, each."""
    min_len: int = 0
    """Position up to which a stop string that is complete is text: prompt + min_tokens."""


class Commit:
    """The committer of one generation (`orchestrator.events.Committer`)."""

    def __init__(self, ends: Ends, detokenizer: Detokenizer, mute_until: int = 0) -> None:
        """Start before the first generated token.

        Args:
            ends: what ends the generation.
            detokenizer: at the end of the prompt.
            mute_until: the text that tokens before this position made certain is not given out: a resuming client has
                it already.
        """
        self._ends = ends
        self._detokenizer = detokenizer
        self._mute_until = mute_until
        self._held = ""
        self._settled = 0
        """Characters of the held text in which stop strings are text."""
        self.matched = ""
        """The stop string, or the stop id as a number, that ended the generation."""
        self._longest = max((len(stop) for stop in ends.stop_strings), default=0)

    def take(
        self, start: int, token_ids: Sequence[int], kinds: Sequence[TokenKind], logprobs: Sequence[TokenLogprobs]
    ) -> Outcome:
        """Take tokens up to the one that ends the generation.

        Args:
            start: position of the first token; the end of what was taken before.
            token_ids: [n] committed tokens.
            kinds: [n], or empty.
            logprobs: [n], or empty.
        """
        text, count, finish, matched = "", 0, None, ""
        for count, token_id in enumerate(token_ids, start=1):
            given, finish, matched = self._one(token_id, start + count)
            if start + count > self._mute_until:
                text += given
            if finish is not None:
                break
        self.matched = matched
        chunk = Chunk(start, tuple(token_ids[:count]), text, tuple(kinds[:count]), tuple(logprobs[:count]))
        return Outcome(chunk, finish, matched)

    def _one(self, token_id: int, length: int) -> tuple[str, FinishReason | None, str]:
        """Take one token; return the text given out, and whether and by what it ends here."""
        if token_id in self._ends.stop_ids:
            matched = "" if token_id in self._ends.eos_ids else str(token_id)
            return self._rest(), FinishReason.STOP, matched
        self._held += self._detokenizer.push(token_id)
        if length < self._ends.min_len:
            self._settled = len(self._held)
            return self._release(), None, ""
        found = self._find_stop(self._held)
        if found is None and (length >= self._ends.final_len or self._ended_by_bytes()):
            self._held += self._detokenizer.flush()
            found = self._find_stop(self._held)
            if found is None:
                return self._rest(), FinishReason.LENGTH, ""
        if found is not None:
            at, stop = found
            text, self._held = self._held[:at], ""
            return text, FinishReason.STOP, stop
        return self._release(), None, ""

    def _ended_by_bytes(self) -> bool:
        """Return whether text that is held back, since bytes that follow might spoil it, completes a stop string.

        Nothing follows then. Models with byte fallback write a line's end like that.
        """
        pending = self._detokenizer.pending() if self._ends.stop_strings else ""
        return bool(pending) and self._find_stop(self._held + pending) is not None

    def _rest(self) -> str:
        """Give out everything: the end is no stop string's."""
        text, self._held = self._held + self._detokenizer.flush(), ""
        return text

    def _find_stop(self, text: str) -> tuple[int, str] | None:
        """Return where the first stop string starts, and which it is; of several at one place the longest."""
        found = [
            (text.find(stop, max(0, self._settled - len(stop) + 1)), -len(stop), stop)
            for stop in self._ends.stop_strings
        ]
        at, _, stop = min((entry for entry in found if entry[0] >= 0), default=(-1, 0, ""))
        return (at, stop) if at >= 0 else None

    def _release(self) -> str:
        """Give out all but the longest end that could be the beginning of a stop string."""
        keep = next((n for n in range(min(self._longest, len(self._held)), 0, -1) if self._may_begin(n)), 0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        self._settled = max(0, self._settled - cut)
        return text

    def _may_begin(self, length: int) -> bool:
        tail = self._held[-length:]
        return any(stop.startswith(tail) for stop in self._ends.stop_strings)


def visible(chunk: Chunk, position: int, *, with_kinds: bool = True) -> Chunk | None:
    """Return the part of a chunk that a client who knows everything before `position` has not seen; None: nothing.

    Its text is untouched: the committer muted what belongs to earlier tokens.

    Args:
        chunk: from the committer.
        position: >= 0.
        with_kinds: whether the client is told where tokens came from.
    """
    skip = min(max(0, position - chunk.start), len(chunk.token_ids))
    if skip == len(chunk.token_ids) and not chunk.text:
        return None
    kinds = chunk.kinds[skip:] if with_kinds else ()
    return Chunk(chunk.start + skip, chunk.token_ids[skip:], chunk.text, kinds, chunk.logprobs[skip:])
