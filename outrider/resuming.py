"""How a client goes on when a stream is lost: what it has seen, whether to try again, where and when. No I/O.

A generation is one series of calls, `Generate` and then as many `Resume`s as it takes. `Progress` sees every event of
every call and passes on what is new: `Started` once, each token once. A try is *in vain* when it brings no new token.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.backoff import Backoff
from outrider.errors import (
    HandshakeFailed,
    LeaseLost,
    OutriderError,
    ProtocolError,
    ResourceExhausted,
    StoreUnavailable,
    Unavailable,
)
from outrider.generation import Chunk, Finished, GenerationEvent, Notice, PromptLogprobs, Started
from outrider.ids import SessionId
from outrider.store.errors import LeaseHeld

PASSING = (Unavailable, StoreUnavailable)
"""Errors after which another orchestrator, or a later try, may do."""
PASSING_ONCE_BEGUN = (*PASSING, LeaseLost, ResourceExhausted)
"""The same for a generation that has begun: a late call of our own may have taken it over, or there is no room yet."""

MAX_TAKEN_OVER = 3
"""Times that a generation may be taken over by another call before it is theirs: two clients must not fight."""


@dataclass(frozen=True, slots=True)
class Retry:
    """How hard a client tries."""

    max_attempts: int = 30
    """Tries in vain, one after the other, before it gives up; 1: none is repeated."""
    max_total_s: float = 30.0
    """Seconds without a new token before it gives up."""
    first_pause_s: float = 0.1
    """Pause when all addresses have been tried once; about twice as long after each further round."""
    longest_pause_s: float = 2.0

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ValueError: a figure is out of range; names it.
        """
        for name, value, least in (
            ("max_attempts", self.max_attempts, 1),
            ("max_total_s", self.max_total_s, 0),
            ("first_pause_s", self.first_pause_s, 0),
            ("longest_pause_s", self.longest_pause_s, self.first_pause_s),
        ):
            if not value >= least:
                raise ValueError(f"{name}: {value} is not allowed; expected at least {least}")


RETRY = Retry()
NO_RETRY = Retry(max_attempts=1)
"""Every lost stream is an error at once."""


@dataclass(slots=True)
class Progress:
    """What a client has seen of one generation, in however many calls."""

    session_id: SessionId = SessionId("")
    """Empty until it has begun."""
    position: int = 0
    """Absolute position of the first token that was not seen."""
    finished: bool = False

    def take(self, event: GenerationEvent) -> GenerationEvent | None:
        """Note an event; return it if the caller has not seen it, else None.

        Raises:
            ProtocolError: tokens are missing or come twice.
        """
        match event:
            case Started():
                return self._begin(event)
            case Chunk():
                if event.start != self.position:
                    raise ProtocolError(f"a chunk starts at {event.start}; expected {self.position}")
                self.position += len(event.token_ids)
            case Finished():
                self.finished = True
            case Notice() | PromptLogprobs():
                pass
        return event

    def _begin(self, event: Started) -> Started | None:
        if self.session_id:
            return None
        self.session_id, self.position = event.session_id, max(self.position, event.prompt_len)
        return event


@dataclass(slots=True)
class Tries:
    """Counts the tries of one call or generation, and says whether there is another one, and after which pause."""

    retry: Retry
    num_addresses: int
    clock: Callable[[], float] = time.monotonic
    num_in_vain: int = 0
    num_taken_over: int = 0
    num_not_trusted: int = 0
    """Addresses in a row with which TLS could not be agreed on."""
    _since_s: float = field(init=False)
    _backoff: Backoff = field(init=False)

    def __post_init__(self) -> None:
        """Begin now."""
        self._since_s = self.clock()
        self._backoff = Backoff(self.retry.first_pause_s, self.retry.longest_pause_s)

    def progressed(self) -> None:
        """Something new has come: what failed before counts no more."""
        self.num_in_vain, self.num_not_trusted, self._since_s = 0, 0, self.clock()
        self._backoff.reset()

    def pause_after(self, error: OutriderError, *, begun: bool) -> float:
        """Return the seconds to wait before the next try.

        Args:
            error: how the last one ended.
            begun: whether the generation has begun.

        Raises:
            OutriderError: `error`, if another try cannot help; one of its class that says how often was tried, if there
                have been enough.
        """
        # A try of ours that was lost may have left a lease behind, which runs out.
        passing = (*PASSING, LeaseHeld) if self.num_in_vain else PASSING
        if not isinstance(error, PASSING_ONCE_BEGUN if begun else passing):
            raise error
        self.num_taken_over += isinstance(error, LeaseLost)
        self.num_not_trusted = self.num_not_trusted + 1 if isinstance(error, HandshakeFailed) else 0
        # Another address may have another certificate; the same one has the same at every try.
        if self.num_taken_over > MAX_TAKEN_OVER or self.num_not_trusted >= self.num_addresses:
            raise error
        self.num_in_vain += 1
        # The other addresses are tried at once; a pause is for those that have failed already.
        pause_s = 0.0 if self.num_in_vain % self.num_addresses else self._backoff.next_s()
        if isinstance(error, ResourceExhausted):
            pause_s = max(pause_s, min(error.retry_delay_s, self.retry.longest_pause_s))
        waited_s = self.clock() - self._since_s
        left_s = self.retry.max_total_s - waited_s
        if self.num_in_vain >= self.retry.max_attempts or left_s <= 0:
            raise _given_up(error, self.num_in_vain, waited_s)
        return min(pause_s, left_s)  # the last try is at the end of the time


def _given_up(error: OutriderError, num_tries: int, seconds: float) -> OutriderError:
    """Return an error of the same class that says how often was tried."""
    if num_tries == 1:
        return error
    message = f"gave up after {num_tries} tries in {seconds:.1f} s; the last one: {error.message}"
    return type(error).rebuild(message, error.metadata())
