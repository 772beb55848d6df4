"""What a session's rows depend on besides the model: which tokens came before, how many, and where a grammar stands.

Invariant: a history is a function of the tokens it was given, so it can be made again from a session's log, copied for
each branch of a tree, and moved on token by token inside a run.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt


class GrammarState(Protocol):
    """Where an output stands in its grammar (`outrider.grammar`)."""

    @property
    def is_broken(self) -> bool:
        """Whether the output holds a token that the grammar forbids."""
        ...

    def advance(self, token_ids: Sequence[int]) -> None:
        """Add tokens of the output."""
        ...

    def copy(self) -> "GrammarState":
        """Return a state that moves on by itself."""
        ...

    def allowed(self) -> npt.NDArray[np.bool_] | None:
        """Return [vocab_len], which tokens may come next; None where nothing can be said: it is broken."""
        ...


class History:
    """What a session has said, as far as its parameters need to know.

    Holds the distinct tokens of prompt and output, how often each occurs in the output, the output's length, and where
    its grammar stands.
    """

    def __init__(
        self, prompt_ids: Sequence[int] = (), output_ids: Sequence[int] = (), grammar: GrammarState | None = None
    ) -> None:
        """Begin with what was said before.

        Args:
            prompt_ids: the prompt; may be left out where there are no penalties.
            output_ids: what followed it.
            grammar: where it stands behind the prompt; the history's own from now on.
        """
        self._token_ids = list(dict.fromkeys(prompt_ids))
        self._slots = {token: slot for slot, token in enumerate(self._token_ids)}
        self._output_counts = [0] * len(self._token_ids)
        self.num_output = 0
        """Tokens of the output."""
        self.grammar = grammar
        self.advance(output_ids)

    def advance(self, output_ids: Sequence[int]) -> None:
        """Add committed output tokens."""
        for token in output_ids:
            slot = self._slots.setdefault(token, len(self._token_ids))
            if slot == len(self._token_ids):
                self._token_ids.append(token)
                self._output_counts.append(0)
            self._output_counts[slot] += 1
        self.num_output += len(output_ids)
        if self.grammar is not None and output_ids:
            self.grammar.advance(output_ids)

    def after(self, run: Sequence[int]) -> "History":
        """Return what the history would be after `run`; this one stays as it is."""
        later = History(grammar=None if self.grammar is None else self.grammar.copy())
        later._token_ids, later._slots = self._token_ids.copy(), self._slots.copy()
        later._output_counts, later.num_output = self._output_counts.copy(), self.num_output
        later.advance(run)
        return later

    @property
    def seen(self) -> tuple[list[int], list[int]]:
        """The distinct tokens, and for each its number of occurrences in the output (0: in the prompt only)."""
        return self._token_ids, self._output_counts
