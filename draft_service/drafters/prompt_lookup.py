"""Guesses that the text repeats itself: what followed the last tokens when they occurred before, follows again.

No model. The longest suffix of prompt and output that occurred before in the same session is found by a suffix
automaton, in constant time per token however long the text is; the tokens after its latest place are copied. A copy
that reaches the end of the text goes on in what it has copied, so a cycle continues for ever.

A copy that comes true goes on, unless more tokens agree elsewhere. One that does not is waited for: an edit replaces,
drops or inserts a few tokens, and then says again what the original says. So near the place where a copy ended, one
agreeing token is enough.

Where nothing is found, the verifier is let go for a while: every pass costs it a round trip, which text that repeats
nothing would pay for each token. It goes for as many tokens as have been without a match in a row, at most `MAX_SKIP`.
That number follows from the ids alone, like everything that is offered.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice

from draft_service.drafters.legal import Legal
from draft_service.drafters.protocol import DrafterInfo, DraftSession, Guessed, Outcome, Plan, Work
from draft_service.drafters.suffix_automaton import SuffixAutomaton
from outrider.ids import SessionId
from outrider.sampling import one_hot_row

MAX_SKIP = 8
"""Most tokens decoded without asking again: the round trip costs each an eighth, a match is found 8 tokens late."""
MAX_INDEXED = 4096
"""Tokens indexed per token step, about 30 ms: a long prompt does not hold up the others."""
BACK, AHEAD = 4, 8
"""How far from the place where a copy ended one agreeing token is enough."""
PATIENCE = 6
"""Tokens for which such a place is remembered."""
CERTAIN = 3
"""Agreeing tokens from which on another place is believed more than the neighbourhood of that one."""


@dataclass(slots=True)
class Repetitions:
    """What of a text is a copy of something earlier in it: a function of its tokens, whichever way it came about."""

    min_ngram: int
    prompt_len: int = 0
    """Shorter texts count as found: what a prompt repeats says little of its answer."""
    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    _places: list[int] = field(default_factory=list)
    """Per token: where the next one would be copied from; -1: nowhere."""
    _runs: list[int] = field(default_factory=list)
    """Per token: how many tokens of the copy agree; 0 or less: none since so many tokens, and nothing is offered."""
    _misses: list[int] = field(default_factory=list)
    """Per token: of how many texts in a row, the last one ending with it, nothing was offered."""

    def __len__(self) -> int:
        return len(self._places)

    @property
    def num_misses(self) -> int:
        """Of how many texts in a row, this one and those before it, the end was not found."""
        return self._misses[-1] if self._misses else 0

    @property
    def position(self) -> int | None:
        """Where the next token is copied from; None: nothing is offered."""
        return self._places[-1] if self._places and self._runs[-1] > 0 else None

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens at the end of the text."""
        for token in token_ids:
            self.automaton.extend((token,))
            place, run = self._next(token)
            self._places.append(place)
            self._runs.append(run)
            missed = len(self) >= self.prompt_len and self.position is None
            self._misses.append(self.num_misses + 1 if missed else 0)

    def truncate(self, length: int) -> None:
        """Forget the text at and past `length`."""
        self.automaton.truncate(length)
        for column in (self._places, self._runs, self._misses):
            del column[length:]

    def _next(self, token: int) -> tuple[int, int]:
        """Return place and run behind a token that was added."""
        match, before = self.automaton.match, self._places[-1] if self._places else -1
        if before >= 0:
            run = self._runs[-1]
            agrees = self.automaton.ids[before] == token
            if agrees and (match.length < CERTAIN or max(run, 0) + 1 >= match.length):
                return before + 1, max(run, 0) + 1
            near = self._near(before, token) if not agrees and match.length < CERTAIN else -1
            if near >= 0:
                return near, 1
            if match.length < self.min_ngram and run > -PATIENCE:
                return before + 1, min(run, 0) - 1
        return (match.position, match.length) if match.length >= self.min_ngram else (-1, 0)

    def _near(self, ended: int, token: int) -> int:
        """Return the place behind the nearest such token to where a copy ended, the earlier one of two; -1: none."""
        ids, first = self.automaton.ids, max(0, ended - BACK)
        found = [place for place in range(first, min(ended + AHEAD, len(ids) - 1)) if ids[place] == token]
        return min(found, key=lambda place: abs(place - ended)) + 1 if found else -1


@dataclass(slots=True)
class _State:
    """One session."""

    session: DraftSession
    text: Repetitions
    legal: Legal
    source: int | None = None
    """Position that the planned proposal is copied from."""


class PromptLookup:
    """The drafter that copies; see the module's head."""

    def __init__(self, vocab_len: int, *, context_len: int, min_ngram: int = 2) -> None:
        """Make a drafter.

        Args:
            vocab_len: Length of the tokenizer's id range.
            context_len: Most tokens of a session.
            min_ngram: Tokens that must agree at least, >= 1.

        Raises:
            ValueError: fewer than one token.
        """
        if min_ngram < 1:
            raise ValueError(f"min_ngram = {min_ngram}: must be >= 1")
        self.info = DrafterInfo("prompt_lookup", "", vocab_len, context_len)
        self._min_ngram = min_ngram
        self._states: dict[SessionId, _State] = {}

    def open(self, session: DraftSession, ids: Sequence[int]) -> None:
        """Begin with nothing indexed; a closed session leaves nothing behind, indexing is fast enough."""
        self._states[session.session_id] = _State(
            session, Repetitions(self._min_ngram, session.prompt_len), Legal(session)
        )

    def plan(self, session_id: SessionId, ids: Sequence[int], count: int) -> Plan | None:
        """Offer all tokens asked for if the text's end occurred before, else nothing for a while."""
        state = self._states[session_id]
        if not self._index(state, ids):
            return None
        state.source = state.text.position
        if state.source is not None:
            allowed = state.legal.num_allowed(ids, _copied(ids, state.source, count))
            return Plan(allowed) if allowed else Plan(0, len(ids) + 1, "banned")
        return Plan(0, len(ids) + min(MAX_SKIP, max(1, state.text.num_misses)), "no_match")

    def draw(self, batch: Sequence[Work]) -> list[Outcome]:
        """Copy whole proposals at once; index a part of a long text."""
        return [self._step(self._states[work.session_id], work) for work in batch]

    def rewind(self, session_id: SessionId, length: int) -> None:
        """Take the text at and past `length` out of the index."""
        self._states[session_id].text.truncate(length)
        self._states[session_id].legal.rewind(length)

    def close(self, session_id: SessionId, keep: bool) -> None:
        """Forget the session."""
        self._states.pop(session_id, None)

    def _index(self, state: _State, ids: Sequence[int]) -> bool:
        """Index the rest of a text if it is short enough to be done at once; say whether it was."""
        if len(ids) - len(state.text) > MAX_INDEXED:
            return False
        state.text.extend(ids[len(state.text) :])
        return True

    def _step(self, state: _State, work: Work) -> Outcome:
        if work.count and state.source is not None:
            return self._copy(state, state.source, work)
        if not self._index(state, work.ids):
            state.text.extend(work.ids[len(state.text) : len(state.text) + MAX_INDEXED])
            return Guessed(caught_up=False)
        return Guessed()

    def _copy(self, state: _State, source: int, work: Work) -> Outcome:
        tokens = _copied(work.ids, source, work.count)
        rows = tuple(one_hot_row(token) for token in tokens) if state.session.mode.needs_rows else ()
        return Guessed(tokens, rows)


def _copied(ids: Sequence[int], source: int, count: int) -> tuple[int, ...]:
    """Return so many tokens from a place of the text on; a copy that reaches the text's end goes on with itself."""
    return tuple(islice(cycle(ids[source : source + count]), count))
