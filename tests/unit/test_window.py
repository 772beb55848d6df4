"""The drafter's window, branch by branch: when a proposal starts, how long it is, what survives a commit."""

from dataclasses import replace

import pytest

from draft_service.events import (
    AskFrom,
    Begin,
    Command,
    Count,
    Draw,
    Drawn,
    Planned,
    Rewind,
    Scheduled,
    Send,
)
from draft_service.window import FOREVER, Window
from outrider.errors import ProtocolError
from outrider.ids import Epoch, Generation, Mode, SessionId, WorkerId
from outrider.messages import (
    COUNT_TOTAL,
    DraftCommit,
    DraftOpen,
    Pass,
    Proposal,
    ProposalHeader,
    SamplingParams,
    SparseRow,
    Speculation,
)

SESSION = SessionId("s")
PROMPT = (1, 2, 3, 4)
PIPELINED, OFF = Speculation(gamma=2, restart_gamma=1, window=4), Speculation()


def opened(mode: Mode = Mode.GREEDY, speculation: Speculation = PIPELINED, max_len: int = 0) -> Window:
    request = DraftOpen(SESSION, epoch(), PROMPT, mode, SamplingParams(), b"", speculation, WorkerId("v"), "here")
    return Window(replace(request, max_len=max_len))


def epoch(round_: int = 0, attach: int = 1) -> Epoch:
    return Epoch(Generation(1, attach), round_)


def row(token: int) -> SparseRow:
    return SparseRow((token,), (COUNT_TOTAL,))


def commit(
    start: int, ids: tuple[int, ...], round_: int = 0, speculation: Speculation = PIPELINED, attach: int = 1
) -> DraftCommit:
    return DraftCommit(epoch(round_, attach), start, ids, speculation)


def begin(window: Window) -> Begin:
    (command,) = window.step(Scheduled())
    assert isinstance(command, Begin)
    return command


def propose(window: Window, *ids: int) -> list[Command]:
    """Offer as many tokens as asked for, and draw these."""
    asked = begin(window)
    assert asked.count == len(ids)
    *_, draw = window.step(Planned(asked.ticket, asked.count))
    assert draw == Draw(asked.ticket, asked.count)
    return window.step(Drawn(asked.ticket, ids))


def test_the_first_proposal_of_an_epoch_is_a_restart_and_the_next_ones_are_full() -> None:
    window = opened()
    assert begin(window) == Begin(1, 4, 1)
    window.step(Planned(1, 1))
    sent = window.step(Drawn(1, (5,)))
    assert sent == [Send(Proposal(SESSION, epoch(), 4, 4, 8, (5,)))]
    assert begin(window) == Begin(2, 5, 2)


def test_the_chain_stands_still_at_its_limit_and_goes_on_with_a_commit() -> None:
    window = opened()
    propose(window, 5)
    propose(window, 6, 7)
    assert window.room == 1
    propose(window, 8)
    assert (window.wants_time, window.step(Scheduled())) == (False, [])
    assert window.step(commit(4, (5, 6))) == []
    assert (window.seen_len, window.limit, window.room) == (6, 10, 2)
    assert begin(window).base_len == 8


def test_tokens_are_drawn_one_by_one_and_sent_together() -> None:
    window = opened(speculation=Speculation(2, 2, 2))
    ticket = begin(window).ticket
    window.step(Planned(ticket, 2))
    assert window.step(Drawn(ticket, (5,))) == []
    assert window.step(Scheduled()) == [], "one proposal at a time"
    assert window.step(Drawn(ticket, (6,))) == [Send(Proposal(SESSION, epoch(), 4, 4, 6, (5, 6)))]


def test_a_header_announces_the_length_before_the_first_draw() -> None:
    window = opened(Mode.REJECTION)
    ticket = begin(window).ticket
    assert window.step(Planned(ticket, 1)) == [Send(ProposalHeader(SESSION, epoch(), 4, 1)), Draw(ticket, 1)]
    (sent,) = window.step(Drawn(ticket, (5,), (row(5),)))
    assert sent == Send(Proposal(SESSION, epoch(), 4, 4, 8, (5,), (row(5),)))


def test_a_drafter_may_offer_fewer_tokens_and_its_chain_is_not_at_the_limit_then() -> None:
    window = opened(speculation=Speculation(2, 2, 2))
    ticket = begin(window).ticket
    assert window.step(Planned(ticket, 1)) == [Draw(ticket, 1)]
    (sent,) = window.step(Drawn(ticket, (5,)))
    assert sent == Send(Proposal(SESSION, epoch(), 4, 4, 6, (5,)))


@pytest.mark.parametrize(("until", "said"), [(7, 7), (0, 5)])
def test_a_drafter_with_nothing_to_offer_passes_once_until_the_epoch_ends(until: int, said: int) -> None:
    window = opened()
    ticket = begin(window).ticket
    assert window.step(Planned(ticket, 0, until)) == [Send(Pass(SESSION, epoch(), 4, said))]
    assert not window.wants_time
    window.step(commit(4, (9,), round_=1))
    assert window.wants_time


def test_a_drafter_whose_context_is_full_passes_for_ever() -> None:
    window = opened(max_len=5)
    propose(window, 5)
    assert window.step(Scheduled()) == [Send(Pass(SESSION, epoch(), 5, FOREVER))]
    window.step(commit(4, (5, 9), round_=1))
    assert window.step(Scheduled()) == [Send(Pass(SESSION, epoch(1), 6, FOREVER))]


def test_a_window_of_zero_asks_for_nothing() -> None:
    window = opened(speculation=OFF)
    assert (window.wants_time, window.step(Scheduled())) == (False, [])
    window.step(commit(4, (5,), round_=1))
    assert begin(window).base_len == 5


def test_a_window_that_shrinks_under_a_proposal_moves_its_limit_to_its_end() -> None:
    window = opened(speculation=Speculation(4, 4, 8))
    propose(window, 5, 6, 7, 8)
    ticket = begin(window).ticket
    window.step(Planned(ticket, 4))
    assert window.step(commit(4, (5,), speculation=OFF)) == []
    (sent,) = window.step(Drawn(ticket, (9, 9, 9, 9)))
    assert sent == Send(Proposal(SESSION, epoch(), 8, 5, 12, (9, 9, 9, 9)))


def test_a_window_does_not_move_without_a_token() -> None:
    window = opened(speculation=Speculation(1, 1, 1))
    propose(window, 5)
    window.step(commit(4, (), speculation=PIPELINED))
    assert not window.wants_time, "the verifier may be drawing a bonus at the limit it was told"


# --- commits --------------------------------------------------------------------------------------------------------


def test_a_rejection_forgets_the_chain_behind_it_and_restarts() -> None:
    window = opened()
    propose(window, 5)
    propose(window, 6, 7)
    assert window.step(commit(4, (5, 9), round_=1)) == [Count("discarded", 2), Rewind(5)]
    assert (window.ids, window.seen_len, window.epoch) == ([*PROMPT, 5, 9], 6, epoch(1))
    assert begin(window) == Begin(3, 6, 1)


def test_a_bonus_behind_the_whole_chain_rewinds_nothing() -> None:
    window = opened()
    propose(window, 5)
    assert window.step(commit(4, (5, 6), round_=1)) == []
    assert window.ids == [*PROMPT, 5, 6]


def test_a_reset_restarts_from_the_committed_length() -> None:
    window = opened()
    propose(window, 5)
    propose(window, 6, 7)
    window.step(commit(4, (5,)))
    assert window.step(commit(5, (), round_=1)) == [Count("discarded", 2), Rewind(5)]
    assert window.ids == [*PROMPT, 5]


def test_a_plain_token_that_the_chain_had_guessed_keeps_what_was_computed_for_it() -> None:
    window = opened()
    propose(window, 5)
    propose(window, 6, 7)
    assert window.step(commit(4, (5,), round_=1)) == [Count("discarded", 2), Rewind(5)]


def test_a_proposal_under_way_is_abandoned_when_the_epoch_ends() -> None:
    window = opened(speculation=Speculation(2, 2, 4))
    ticket = begin(window).ticket
    window.step(Planned(ticket, 2))
    window.step(Drawn(ticket, (5,)))
    window.step(commit(4, (9,), round_=1))
    assert window.step(Drawn(ticket, (6,))) == [Count("discarded", 1)]
    assert window.step(Planned(ticket, 2)) == []
    assert window.ids == [*PROMPT, 9]


def test_an_answer_to_an_older_question_changes_nothing() -> None:
    window = opened()
    old = begin(window).ticket
    window.step(commit(4, (9,), round_=1))
    assert begin(window).ticket == old + 1
    assert window.step(Planned(old, 1)) == []
    assert window.step(Drawn(old, (5,))) == [Count("discarded", 1)]


@pytest.mark.parametrize(
    "late",
    [commit(4, (5,), round_=0), commit(4, (), round_=1), commit(5, (6,), round_=1, attach=2)],
    ids=["older epoch", "shorter", "another generation"],
)
def test_a_late_commit_changes_nothing(late: DraftCommit) -> None:
    window = opened()
    window.step(commit(4, (9,), round_=1))
    assert window.step(late) == [Count("late_commit")]
    assert (window.ids, window.epoch) == ([*PROMPT, 9], epoch(1))


def test_a_commit_behind_a_gap_is_asked_for_again() -> None:
    window = opened()
    propose(window, 5)
    assert window.step(commit(5, (6,))) == [AskFrom(4)]
    assert window.seen_len == 4
    assert window.step(commit(4, (5, 9), round_=1)) == []
    assert window.seen_len == 6


def test_a_commit_that_overlaps_confirms_what_is_new() -> None:
    window = opened()
    propose(window, 5)
    propose(window, 6, 7)
    window.step(commit(4, (5,)))
    assert window.step(commit(4, (5, 6))) == []
    assert window.seen_len == 6
    assert window.step(commit(4, (5, 6))) == []


# --- what the other side may not do ---------------------------------------------------------------------------------


def test_a_commit_that_contradicts_the_chain_it_confirms_is_an_error() -> None:
    window = opened()
    propose(window, 5)
    with pytest.raises(ProtocolError, match="differs from the chain"):
        window.step(commit(4, (6,)))


@pytest.mark.parametrize("count", [-1, 2])
def test_a_drafter_may_not_plan_more_than_it_is_asked_for(count: int) -> None:
    window = opened()
    ticket = begin(window).ticket
    with pytest.raises(ProtocolError, match="planned"):
        window.step(Planned(ticket, count))


@pytest.mark.parametrize(("mode", "ids"), [(Mode.GREEDY, (5, 6)), (Mode.REJECTION, (5,))], ids=["tokens", "no row"])
def test_a_drafter_may_not_draw_more_tokens_or_fewer_rows_than_planned(mode: Mode, ids: tuple[int, ...]) -> None:
    window = opened(mode)
    ticket = begin(window).ticket
    window.step(Planned(ticket, 1))
    with pytest.raises(ProtocolError, match="drawn"):
        window.step(Drawn(ticket, ids))
