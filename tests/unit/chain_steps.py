"""A chain of one small session, and the steps that its tests are made of."""

from dataclasses import replace
from typing import TypeVar

from outrider.ids import Epoch, Generation, Mode, SessionId, TokenClass, WorkerId
from outrider.messages import (
    COUNT_TOTAL,
    DecodeOpen,
    Pass,
    Proposal,
    ProposalHeader,
    SamplingParams,
    SparseRow,
    Speculation,
)
from verify_service.chain import Chain
from verify_service.events import (
    Arrived,
    Command,
    Count,
    Judged,
    Report,
    Scheduled,
    Test,
)

SESSION, WORKER, OTHER = SessionId("s"), WorkerId("d1"), WorkerId("d2")
VOCAB = 11
PROMPT = (1, 2, 3, 4)
"""Committed length 4 at the start."""
PIPELINED, SEQUENTIAL, OFF = Speculation(2, 2, 4), Speculation(2, 2, 2), Speculation()
GEN = Generation(1, 1)
T = TypeVar("T")


def opened(
    mode: Mode = Mode.GREEDY, speculation: Speculation = PIPELINED, limit: int = 100, worker: str = WORKER
) -> Chain:
    classes = (TokenClass.PROMPT,) * len(PROMPT)
    request = DecodeOpen(SESSION, GEN, PROMPT, classes, mode, SamplingParams(), b"", commit_limit=limit)
    return Chain(replace(request, speculation=speculation, worker_id=WorkerId(worker)), VOCAB)


def epoch(round_: int = 0, attach: int = 1) -> Epoch:
    return Epoch(Generation(1, attach), round_)


def row(token: int) -> SparseRow:
    return SparseRow((token,), (COUNT_TOTAL,))


def proposal(base: int, ids: tuple[int, ...], seen: int = 4, limit: int = 8, at: Epoch | None = None) -> Proposal:
    return Proposal(SESSION, at or epoch(), base, seen, limit, ids)


def with_rows(message: Proposal) -> Proposal:
    return replace(message, rows=tuple(row(token) for token in message.token_ids))


def header(base: int, count: int, at: Epoch | None = None) -> ProposalHeader:
    return ProposalHeader(SESSION, at or epoch(), base, count)


def arrive(chain: Chain, message: Proposal | ProposalHeader | Pass, worker: WorkerId = WORKER) -> list[Command]:
    return chain.step(Arrived(worker, message))


def scheduled(chain: Chain, max_rows: int = 32) -> Test:
    """Schedule and return the test; whatever is reported before it is a flush."""
    *flushed, test = chain.step(Scheduled(max_rows))
    assert isinstance(test, Test)
    assert all(isinstance(command, Report) for command in flushed)
    return test


def judge(chain: Chain, accepted: int, drawn: int | None = None, tested: int | None = None) -> list[Command]:
    """Answer the test under way: one more is tested than accepted where a token was drawn in its place."""
    if tested is None:
        tested = accepted + (drawn is not None)
    return chain.step(Judged(accepted, tested, drawn))


def only(commands: list[Command], kind: type[T]) -> T:
    found = [command for command in commands if isinstance(command, kind)]
    assert len(found) == 1, commands
    return found[0]


def counts(commands: list[Command]) -> list[str]:
    return [command.name for command in commands if isinstance(command, Count)]
