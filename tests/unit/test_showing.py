"""What a client is told, and what is made of how far it has got."""

import asyncio
import time
from collections import deque
from dataclasses import replace

from prometheus_client import CollectorRegistry, Histogram

from orchestrator.events import Taken
from orchestrator.job import Job
from orchestrator.rounds import PROGRESS_STRIDE
from orchestrator.showing import Showing
from outrider.generation import Chunk, Finished, GenerationEvent, Usage
from outrider.ids import FinishReason, Mode, SessionId, TokenClass, TokenKind, WorkerId
from outrider.messages import Vocabulary, WorkerDescription
from outrider.store.records import SessionState

PROMPT = (1, 2, 3, 4)
VERIFIER = WorkerDescription(WorkerId("v"), "verify", "unix:/v", "toy", Vocabulary("ab" * 32, 100), 64)
JOB = Job(
    session_id=SessionId("s"), fence=1, owner="one",
    state=SessionState(model="toy", mode=Mode.GREEDY, prompt_len=len(PROMPT), max_tokens=1000, return_origin=True),
    token_ids=PROMPT, classes=(TokenClass.PROMPT,) * len(PROMPT), kinds=b"", verifier=VERIFIER, drafter=None,
)  # fmt: skip
FINISHED = Finished(FinishReason.LENGTH, "", Usage(len(PROMPT), 0))


class Shown:
    """A client that takes everything at once."""

    def __init__(self, job: Job = JOB) -> None:
        self.fed: list[Taken] = []
        self.arrivals: deque[tuple[int, float]] = deque()
        self.registry = CollectorRegistry()
        histogram = Histogram("overhead", "of a round", registry=self.registry)
        self.showing = Showing(job, self.fed.append, self.arrivals, histogram)

    def emit(self, start: int, num_tokens: int = 1) -> None:
        kinds = (TokenKind.PLAIN,) * num_tokens
        self.showing.emit(Chunk(start, tuple(range(num_tokens)), "x" * num_tokens, kinds))

    async def to_the_end(self) -> list[GenerationEvent]:
        self.showing.put(FINISHED)
        return [event async for event in self.showing.events()]

    @property
    def num_observed(self) -> float | None:
        return self.registry.get_sample_value("overhead_count")


async def test_the_machine_hears_of_what_was_taken_only_where_it_may_move_the_limit() -> None:
    shown = Shown()
    for start in range(len(PROMPT), len(PROMPT) + 2 * PROGRESS_STRIDE + 5):
        shown.emit(start)
    assert len(await shown.to_the_end()) == 2 * PROGRESS_STRIDE + 6
    assert shown.fed == [Taken(len(PROMPT) + PROGRESS_STRIDE), Taken(len(PROMPT) + 2 * PROGRESS_STRIDE)]


async def test_what_a_resuming_client_has_already_counts_as_taken_and_is_not_shown() -> None:
    known = len(PROMPT) + 2 * PROGRESS_STRIDE
    shown = Shown(replace(JOB, next_position=known))
    shown.showing.emit(Chunk(len(PROMPT), tuple(range(2 * PROGRESS_STRIDE)), "", ()))
    assert shown.fed == [Taken(known)]
    assert shown.showing.length == known
    assert await shown.to_the_end() == [FINISHED]


async def test_a_client_that_did_not_ask_is_not_told_where_tokens_came_from() -> None:
    for asked in (True, False):
        shown = Shown(replace(JOB, state=replace(JOB.state, return_origin=asked)))
        shown.emit(len(PROMPT), 2)
        chunk = (await shown.to_the_end())[0]
        assert isinstance(chunk, Chunk)
        assert chunk.kinds == ((TokenKind.PLAIN,) * 2 if asked else ())


async def test_a_client_is_late_only_while_it_has_something_to_read() -> None:
    shown, later_s = Shown(), time.monotonic() + 1000.0
    events = shown.showing.events()
    waiting = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    assert shown.showing.unread_s(later_s) == 0.0, "it waits for the first token"
    shown.emit(4)
    await waiting
    assert 900.0 < shown.showing.unread_s(later_s) <= 1000.0
    shown.emit(5)
    assert 900.0 < shown.showing.unread_s(later_s) <= 1000.0
    waiting = asyncio.ensure_future(anext(events))
    await waiting
    waiting = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    assert shown.showing.unread_s(later_s) == 0.0, "it has read everything"
    waiting.cancel()


async def test_what_a_round_takes_is_counted_once_its_tokens_are_written() -> None:
    shown = Shown()
    shown.arrivals.extend([(5, 0.0), (7, 0.0), (8, 0.0)])
    shown.emit(4)
    shown.emit(5, 2)
    shown.showing.put(FINISHED)
    events = shown.showing.events()
    await anext(events)
    assert shown.num_observed == 0, "the client has not come back for more"
    await anext(events)
    assert shown.num_observed == 1
    await anext(events)
    assert shown.num_observed == 2
    assert shown.arrivals == deque([(8, 0.0)]), "its tokens are not shown yet"
    await events.aclose()
