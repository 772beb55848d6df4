"""What the chain makes of arriving messages: taken, stale, early, doubled, with a gap before it, or garbage."""

from dataclasses import replace

import pytest

from outrider.ids import Mode, TokenKind
from outrider.messages import (
    COUNT_TOTAL,
    DecodeProgress,
    Pass,
    Proposal,
    ProposalHeader,
    SparseRow,
    Speculation,
    VerdictCause,
)
from tests.unit.chain_steps import (
    GEN,
    OTHER,
    SESSION,
    VOCAB,
    WORKER,
    arrive,
    counts,
    epoch,
    header,
    judge,
    only,
    opened,
    proposal,
    row,
    scheduled,
    with_rows,
)
from verify_service.chain import Chain
from verify_service.conduct import MAX_GARBAGE
from verify_service.events import (
    Report,
    StreamBroken,
)
from verify_service.intake import MAX_AHEAD

# --- sorting what arrives -------------------------------------------------------------------------------------------


def test_a_message_of_an_ended_epoch_or_of_another_worker_is_stale() -> None:
    chain = opened()
    chain.step(StreamBroken(WORKER))
    assert counts(arrive(chain, proposal(4, (5,)))) == ["stale"]
    assert counts(arrive(chain, proposal(4, (5,), at=epoch(1)), OTHER)) == ["stale"]
    assert counts(arrive(chain, passed(5, 40, 1), OTHER)) == ["stale"]
    assert chain.chain_end == 4
    assert chain.num_stale == 2, "a pass is no proposal"


def passed(base: int, until: int, round_: int) -> Pass:
    return Pass(SESSION, epoch(round_), base, until)


def plain_chain(num_plain: int) -> Chain:
    """Return a chain whose drafter had nothing for so many tokens, and whose verifier waits for it now."""
    chain = opened()
    arrive(chain, passed(4, 4 + num_plain, 0))
    for _ in range(num_plain):
        scheduled(chain)
        judge(chain, 0, 9)
    assert chain.awaits_drafter
    return chain


def test_a_pass_that_comes_behind_plain_tokens_prolongs_decoding_plain() -> None:
    chain = plain_chain(3)
    assert counts(arrive(chain, passed(6, 9, 2))) == []
    for _ in range(2):
        assert not chain.awaits_drafter
        assert scheduled(chain).draw is TokenKind.PLAIN
        judge(chain, 0, 9)
    assert chain.awaits_drafter
    assert chain.committed_len == 9


def test_a_late_pass_never_shortens_and_none_of_another_worker_or_older_row_counts() -> None:
    chain = plain_chain(2)
    arrive(chain, passed(5, 20, 1))
    arrive(chain, passed(5, 7, 1))
    assert counts(arrive(chain, passed(5, 40, 1), OTHER)) == ["stale"]
    for _ in range(14):
        scheduled(chain)
        judge(chain, 0, 9)
    assert chain.awaits_drafter
    chain.step(StreamBroken(WORKER))
    assert counts(arrive(chain, passed(20, 40, 16))) == ["stale"]
    assert chain.awaits_drafter


def test_a_pass_of_before_a_rejection_is_stale() -> None:
    chain = opened()
    arrive(chain, proposal(4, (5,)))
    scheduled(chain)
    judge(chain, 0, 9)
    assert counts(arrive(chain, passed(5, 9, 0))) == ["stale"]
    assert chain.awaits_drafter


def test_a_late_pass_behind_a_proposal_changes_nothing() -> None:
    chain = plain_chain(1)
    arrive(chain, proposal(5, (6,), seen=5, at=epoch(1)))
    arrive(chain, passed(4, 30, 0))
    scheduled(chain)
    judge(chain, 1)
    assert chain.awaits_drafter


def test_a_duplicate_changes_nothing() -> None:
    chain = opened()
    arrive(chain, proposal(4, (5, 6)))
    assert counts(arrive(chain, proposal(4, (5, 6)))) == ["duplicate"]
    assert chain.chain_end == 6


def test_a_gap_resets_the_chain_and_reports_what_was_accepted_first() -> None:
    chain = opened()
    arrive(chain, proposal(4, (5, 6)))
    scheduled(chain)
    judge(chain, 2)
    commands = arrive(chain, proposal(7, (8,)))
    flushed, reset = (command for command in commands if isinstance(command, Report))
    assert (flushed.token_ids, flushed.next_epoch) == ((5, 6), epoch())
    assert reset == Report(epoch(), 6, (), (), 0, 0, epoch(1), VerdictCause.RESET)
    assert counts(commands) == ["gap"]


@pytest.mark.parametrize(
    "message",
    [
        proposal(4, (-1,)),
        proposal(4, (2**31,)),
        proposal(4, (VOCAB,)),
        proposal(4, ()),
        proposal(4, (5, 6, 7)),
        proposal(4, (5,), seen=5),
        proposal(4, (5,), limit=4),
        proposal(4, (5,), limit=4 + MAX_AHEAD + 1),
        with_rows(proposal(4, (5,))),
        header(4, 1),
        Pass(SESSION, epoch(), 4, 4),
    ],
    ids=["id -1", "id 2^31", "id = vocabulary", "empty", "more than asked", "seen too much", "past its limit",
         "limit far ahead", "rows not asked for", "header not asked for", "pass to nowhere"],
)  # fmt: skip
def test_garbage_is_dropped_and_counted_and_restarts_the_drafter(message: Proposal | ProposalHeader | Pass) -> None:
    chain = opened()
    commands = arrive(chain, message)
    assert counts(commands) == ["garbage"]
    assert only(commands, Report).cause == VerdictCause.RESET
    assert (chain.chain_end, chain.epoch) == (4, epoch(1))
    arrive(chain, proposal(4, (5,), at=epoch(1)))
    assert scheduled(chain).token_ids == (5,)


@pytest.mark.parametrize(
    "message",
    [
        proposal(4, (5,)),
        replace(proposal(4, (5,)), rows=(row(6),)),
        replace(proposal(4, (5,)), rows=(SparseRow((5, VOCAB), (COUNT_TOTAL // 2, COUNT_TOTAL // 2)),)),
        replace(proposal(4, (5,)), rows=(SparseRow((5,), (COUNT_TOTAL - 1,)),)),
        replace(proposal(4, (5,)), rows=(SparseRow((), ()),)),
        header(4, 0),
        header(4, 3),
    ],
    ids=["no rows", "row of another token", "row past the vocabulary", "wrong sum", "empty row", "no tokens announced",
         "more announced than asked"],
)  # fmt: skip
def test_garbage_of_modes_with_rows_is_dropped_and_counted(message: Proposal | ProposalHeader) -> None:
    chain = opened(Mode.REJECTION)
    arrive(chain, header(4, 1))
    assert counts(arrive(chain, message)) == ["garbage", "guarantee_void"]


def test_a_round_that_the_verifier_never_made_is_garbage_and_moves_nothing() -> None:
    chain = opened()
    commands = arrive(chain, proposal(4, (5,), at=epoch(7)))
    assert counts(commands) == ["garbage"]
    assert chain.epoch == epoch()


def test_repeated_garbage_quarantines_the_drafter_for_the_session() -> None:
    chain = opened()
    for _ in range(MAX_GARBAGE - 1):
        arrive(chain, proposal(4, (-1,), at=chain.epoch))
    assert only(arrive(chain, proposal(4, (-1,), at=chain.epoch)), Report).cause == VerdictCause.QUARANTINED
    assert counts(arrive(chain, proposal(4, (5,), at=chain.epoch))) == ["stale"]
    assert scheduled(chain).draw is TokenKind.PLAIN


def test_a_body_without_its_header_is_a_gap() -> None:
    chain = opened(Mode.REJECTION)
    assert counts(arrive(chain, with_rows(proposal(4, (5,))))) == ["gap"]
    arrive(chain, header(4, 2, epoch(1)))
    assert counts(arrive(chain, with_rows(proposal(4, (5,), at=epoch(1))))) == ["gap", "guarantee_void"]


@pytest.mark.parametrize("message", [header(4, 1), Pass(SESSION, epoch(), 4, 9)], ids=["another header", "a pass"])
def test_nothing_but_the_body_follows_a_header(message: ProposalHeader | Pass) -> None:
    chain = opened(Mode.REJECTION)
    arrive(chain, header(4, 2))
    assert counts(arrive(chain, message)) == ["gap", "guarantee_void"]


def test_a_header_and_its_body_are_taken_together() -> None:
    chain = opened(Mode.REJECTION)
    arrive(chain, header(4, 2))
    arrive(chain, with_rows(proposal(4, (5, 6))))
    assert scheduled(chain).rows == (row(5), row(6))


def test_a_larger_gamma_is_taken_once_the_orchestrator_has_asked_for_it() -> None:
    chain = opened()
    chain.step(DecodeProgress(GEN, 4, 100, Speculation(3, 3, 6), 1.0))
    arrive(chain, proposal(4, (5, 6, 7)))
    assert scheduled(chain).token_ids == (5, 6, 7)
