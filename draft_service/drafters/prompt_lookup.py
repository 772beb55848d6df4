"""Guesses that the text repeats itself: what followed the last tokens when they occurred before, follows again.

No model. The longest suffix of prompt and output, of `max_ngram` down to `min_ngram` tokens, is looked up among all
earlier places of the same session; the latest wins, and the tokens after it are copied. A copy that reaches the end of
the text goes on in what it has copied, so a cycle continues for ever.

The index maps every n-gram to the positions that followed it, rising. One more token adds one position per n; one less
takes them away again, so the cost of a token is O(max_ngram) however the text is rewound.

Where nothing is found, the verifier is let go for a while: every pass costs it a round trip, which text that repeats
nothing would pay for each token. It goes for as many tokens as have been without a match in a row, at most `MAX_SKIP`.
That number follows from the ids alone, like everything that is offered.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from draft_service.drafters.protocol import DrafterInfo, DraftSession, Guessed, Outcome, Plan, Work
from outrider.ids import SessionId
from outrider.sampling import one_hot_row

MAX_SKIP = 8
"""Most tokens decoded without asking again: the round trip costs each an eighth, a match is found 8 tokens late."""


@dataclass(slots=True)
class NgramIndex:
    """Where each n-gram of a text was followed by something."""

    min_ngram: int
    max_ngram: int
    prompt_len: int = 0
    """Shorter texts count as found: what a prompt repeats says little of its answer."""
    ids: list[int] = field(default_factory=list)
    _followers: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    _misses: list[int] = field(default_factory=list)
    """Per token: of how many texts in a row, the last one ending with it, the end was not found."""

    @property
    def num_misses(self) -> int:
        """Of how many texts in a row, this one and those before it, the end was not found."""
        return self._misses[-1] if self._misses else 0

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens at the end of the text."""
        for token in token_ids:
            position = len(self.ids)
            for gram in self._grams():
                self._followers.setdefault(gram, []).append(position)
            self.ids.append(token)
            missed = len(self.ids) >= self.prompt_len and self.find() is None
            self._misses.append(self.num_misses + 1 if missed else 0)

    def truncate(self, length: int) -> None:
        """Forget the text at and past `length`."""
        while len(self.ids) > length:
            self.ids.pop()
            self._misses.pop()
            for gram in self._grams():
                places = self._followers[gram]
                places.pop()
                if not places:
                    del self._followers[gram]

    def find(self) -> int | None:
        """Return the latest position that followed the longest known suffix of the text; None if none is known."""
        for gram in self._grams():
            places = self._followers.get(gram)
            if places:
                return places[-1]
        return None

    def _grams(self) -> list[tuple[int, ...]]:
        """Return the suffixes of the text, longest first."""
        end = len(self.ids)
        longest = min(self.max_ngram, end)
        return [tuple(self.ids[end - size :]) for size in range(longest, self.min_ngram - 1, -1)]


@dataclass(slots=True)
class _State:
    """One session."""

    session: DraftSession
    index: NgramIndex
    source: int | None = None
    """Position that the proposal being drawn copies next."""


class PromptLookup:
    """The n-gram drafter; see the module's head."""

    def __init__(self, vocab_len: int, *, context_len: int, min_ngram: int = 2, max_ngram: int = 8) -> None:
        """Make a drafter.

        Args:
            vocab_len: Length of the tokenizer's id range.
            context_len: Most tokens of a session.
            min_ngram: Tokens that must agree at least, >= 1.
            max_ngram: Tokens compared at most, >= min_ngram.

        Raises:
            ValueError: the n-gram lengths contradict each other.
        """
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"n-grams of {min_ngram} .. {max_ngram} tokens: must be 1 <= min <= max")
        self.info = DrafterInfo("prompt_lookup", "", vocab_len, context_len)
        self._sizes = (min_ngram, max_ngram)
        self._states: dict[SessionId, _State] = {}

    def open(self, session: DraftSession, ids: Sequence[int]) -> None:
        """Index the session's text; a closed session leaves nothing behind, indexing is fast enough."""
        state = _State(session, NgramIndex(*self._sizes, session.prompt_len))
        state.index.extend(ids)
        self._states[session.session_id] = state

    def plan(self, session_id: SessionId, ids: Sequence[int], count: int) -> Plan:
        """Offer all tokens asked for if the text's end occurred before, else nothing for a while."""
        state = self._states[session_id]
        state.index.extend(ids[len(state.index.ids) :])
        state.source = state.index.find()
        if state.source is not None:
            return Plan(count)
        return Plan(0, len(ids) + min(MAX_SKIP, max(1, state.index.num_misses)), "no_match")

    def draw(self, batch: Sequence[Work]) -> list[Outcome]:
        """Copy whole proposals at once."""
        return [self._copy(self._states[work.session_id], work) for work in batch]

    def rewind(self, session_id: SessionId, length: int) -> None:
        """Take the text at and past `length` out of the index."""
        self._states[session_id].index.truncate(length)

    def close(self, session_id: SessionId, keep: bool) -> None:
        """Forget the session."""
        self._states.pop(session_id, None)

    def _copy(self, state: _State, work: Work) -> Outcome:
        if not work.count or state.source is None:
            return Guessed()
        text = list(work.ids[state.source :])
        for offset in range(work.count):
            text.append(text[offset])
        tokens = tuple(text[-work.count :])
        state.source += work.count
        rows = tuple(one_hot_row(token) for token in tokens) if state.session.mode.needs_rows else ()
        return Guessed(tokens, rows)
