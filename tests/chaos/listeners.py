"""Clients of a run: each asks for one script again and again, holds every event against the twin, and resumes.

A listener only knows what any client knows: the public RPCs. The one error it may meet is UNAVAILABLE; it then goes on,
at another orchestrator, from the first token that it has not seen. Where its client resumes by itself it meets none
before that client gives up.
"""

import asyncio
import secrets
import time
from bisect import bisect_right
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise

from outrider.client import Client
from outrider.errors import Code, OutriderError, code_of
from outrider.generation import Chunk, Finished, GenerationEvent, Started
from outrider.ids import FinishReason, SessionId
from outrider.store.errors import LeaseHeld
from tests.chaos.twins import Script, Turn

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 1.0
"""Between two attempts to go on."""
SILENCE_S = 75.0
"""A session without a token for longer hangs: more than any fault lasts, and the verdict time-out with it."""

Events = AsyncGenerator[GenerationEvent, None]


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that must not happen."""

    when_s: float
    """On the clock of the run."""
    what: str
    """Kind, as counted in the table."""
    words: str


@dataclass
class Book:
    """What all listeners of a run write into."""

    violations: list[Violation] = field(default_factory=list)
    num_sessions: int = 0
    num_turns: int = 0
    num_tokens: int = 0
    num_resumed: int = 0
    num_unavailable: int = 0
    done: list[tuple[SessionId, tuple[int, ...], int]] = field(default_factory=list)
    """Sessions that ended and whose log is yet to be compared: id, what it must hold behind its prompt, and where."""
    started_s: float = field(default_factory=time.monotonic)

    def violated(self, what: str, words: str) -> None:
        """Note a violation."""
        self.violations.append(Violation(time.monotonic() - self.started_s, what, words))


class Listener:
    """One slot."""

    def __init__(self, script: Script, clients: Sequence[Client], book: Book, first: int = 0) -> None:
        """Listen to nothing yet.

        Args:
            script: what is asked.
            clients: tried in turn.
            book: where what happens is noted.
            first: index of the client to begin with.
        """
        self.script, self._clients, self._book, self._turn = script, clients, book, first
        self.arrivals: list[float] = []
        """When tokens came, on the monotonic clock."""
        self.is_running = False
        self.session_id = SessionId("")
        self._turn_number, self._turn_began, self._request_id = 0, False, ""
        self._prompt_len = 0
        self._seen: list[int] = []
        self._text: list[str] = []
        self._is_over = False

    @property
    def _asked(self) -> Turn:
        return self.script.turns[self._turn_number]

    def silence(self, from_s: float, to_s: float) -> float | None:
        """Return the longest wait for a token in a span of time; None while the first one after it has not come.

        A token that was on its way already, when something broke, ends no wait that matters.
        """
        after = bisect_right(self.arrivals, to_s)
        if after == len(self.arrivals):
            return None
        within = [from_s, *self.arrivals[bisect_right(self.arrivals, from_s) : after + 1]]
        return max(later - earlier for earlier, later in pairwise(within))

    async def listen(self, wanted: Callable[[], bool]) -> None:
        """Run one session after the other, for as long as they are wanted; the last one to its end."""
        while wanted():
            try:
                self.is_running = True
                await self.one_session()
            finally:
                self.is_running = False

    async def one_session(self) -> None:
        """Run one session to its end, turn by turn, whatever happens on the way."""
        self.session_id = SessionId("")
        for number in range(len(self.script.turns)):
            self._turn_number, self._turn_began, self._request_id = number, False, secrets.token_hex(8)
            self._seen, self._text, self._is_over = [], [], False
            if not await self._one_turn():
                return
        self._book.num_sessions += 1
        first_len = self._prompt_len + len(self._seen) - len(self.script.token_ids)
        self._book.done.append((self.session_id, self.script.token_ids, first_len))

    async def _one_turn(self) -> bool:
        """Run one turn to its end; return whether it has come there."""
        pause_s = FIRST_PAUSE_S
        while not self._is_over:
            before = len(self._seen)
            try:
                await self._attempt()
            except OutriderError as error:
                self._turn += 1
                if not self._may_meet(error):
                    self._violated("client error", f"{type(error).__name__}: {error}")
                    return False
                self._book.num_unavailable += 1
                pause_s = FIRST_PAUSE_S if len(self._seen) > before else min(LONGEST_PAUSE_S, 2 * pause_s)
                await asyncio.sleep(pause_s)
            except TimeoutError:
                self._violated("no progress", f"no token for {SILENCE_S:g} s")
                return False
        self._close()
        return True

    def _may_meet(self, error: OutriderError) -> bool:
        """Whether an error is one that a client may meet.

        A further turn takes no lease by force: that of the turn before, if its end was lost, has to run out.
        """
        waits_for_lease = isinstance(error, LeaseHeld) and self._turn_number > 0 and not self._turn_began
        return waits_for_lease or code_of(error) is Code.UNAVAILABLE

    async def _attempt(self) -> None:
        """Hear one stream to its end."""
        client = self._clients[self._turn % len(self._clients)]
        if self._turn_began:
            self._book.num_resumed += 1
            events = client.resume(self.session_id, self._prompt_len + len(self._seen))
        else:
            request_id = self._request_id if self._turn_number else ""
            events = client.generate(self.script.request(self._turn_number, self.session_id, request_id))
        async with aclosing(self._altered(events)) as heard:
            while not self._is_over:
                async with asyncio.timeout(SILENCE_S):
                    event = await anext(heard, None)
                if event is None:
                    self._violated("client error", "the stream ended without an end of the generation")
                    self._is_over = True
                else:
                    self._take(event)

    def _altered(self, events: Events) -> Events:
        """Return the events as they come; negative controls change them here."""
        return events

    def _take(self, event: GenerationEvent) -> None:
        match event:
            case Started():
                self._begin(event)
            case Chunk():
                self._take_chunk(event)
            case Finished():
                self._is_over = True
                if event.reason is not FinishReason.LENGTH:
                    self._violated("wrong end", f"finished with {event.reason.name}")
            case _:
                pass

    def _begin(self, started: Started) -> None:
        """Note where the turn's text begins: behind all before it."""
        before = self.script.turns[: self._turn_number]
        prompts = sum(len(turn.prompt_ids) for turn in self.script.turns[: self._turn_number + 1])
        start = prompts + sum(len(turn.token_ids) for turn in before)
        if self.session_id not in ("", started.session_id) or started.prompt_len != start:
            words = f"begins as {started.session_id} at {started.prompt_len}, expected {start}"
            self._violated("wrong session", words)
        self.session_id, self._prompt_len, self._turn_began = started.session_id, started.prompt_len, True

    def _take_chunk(self, chunk: Chunk) -> None:
        now_s = time.monotonic()
        position = self._prompt_len + len(self._seen)
        if chunk.start != position:
            word = "token missing" if chunk.start > position else "token twice"
            self._violated(word, f"a chunk begins at {chunk.start}, expected {position}")
        self._seen.extend(chunk.token_ids)
        self._text.append(chunk.text)
        self.arrivals.extend([now_s] * len(chunk.token_ids))
        self._book.num_tokens += len(chunk.token_ids)
        twin = list(self._asked.token_ids[len(self._seen) - len(chunk.token_ids) : len(self._seen)])
        if twin != list(chunk.token_ids):
            self._violated("other text", f"at {chunk.start}: {list(chunk.token_ids)}, its twin has {twin}")

    def _close(self) -> None:
        """Hold the whole turn against the twin, once its end has come."""
        self._book.num_turns += 1
        if tuple(self._seen) != self._asked.token_ids:
            self._violated("other text", f"{len(self._seen)} tokens, its twin has {len(self._asked.token_ids)}")
        elif "".join(self._text) != self._asked.text:
            self._violated("other text", f"{''.join(self._text)!r}, its twin has {self._asked.text!r}")

    def _violated(self, what: str, words: str) -> None:
        self._book.violated(what, f"slot {self.script.name}, session {self.session_id or 'not begun'}: {words}")
