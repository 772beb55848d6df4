"""Hints to the drafter's window: which are taken, what a commit makes of them, and what lies change."""

import pytest

from draft_service.events import AskFrom, Count, Drawn, Planned, Rewind, Scheduled, Send
from draft_service.window import Window
from outrider.errors import ProtocolError
from outrider.ids import Mode
from outrider.messages import Pass, Proposal, RollbackHint, Speculation
from tests.unit.test_window import OFF, PIPELINED, PROMPT, SESSION, begin, commit, epoch, opened, propose

SEQUENTIAL = Speculation(gamma=2, restart_gamma=2, window=2)
WIDER = Speculation(gamma=2, restart_gamma=2, window=8)
TAKEN, LATE, ODD, OVERRULED = (Count(f"{name}_hint") for name in ("taken", "late", "odd", "overruled"))


def hint(start: int, token: int | None, round_: int = 1, attach: int = 1) -> RollbackHint:
    return RollbackHint(SESSION, epoch(round_, attach), start, token)


def hinted(speculation: Speculation = PIPELINED) -> Window:
    """A window that proposed 5, and was told that 9 follows it."""
    window = opened(speculation=speculation)
    propose(window, *(5, 6)[: speculation.restart_gamma])
    assert window.step(hint(5, 9))[0] == TAKEN
    return window


def test_a_hint_starts_the_next_epoch_behind_its_token_and_the_commit_changes_nothing_more() -> None:
    window = opened()
    propose(window, 5)
    propose(window, 6, 7)
    assert window.step(hint(5, 9)) == [TAKEN, Count("discarded", 2), Rewind(5)]
    assert (window.ids, window.seen_len, window.confirmed_len) == ([*PROMPT, 5, 9], 6, 4)
    assert propose(window, 1) == [Send(Proposal(SESSION, epoch(1), 6, 6, 10, (1,)))]
    assert window.step(commit(4, (5, 9), round_=1)) == []
    assert (window.confirmed_len, begin(window).base_len) == (6, 7)


def test_a_proposal_under_way_goes_on_when_its_hint_is_confirmed() -> None:
    window = hinted(SEQUENTIAL)
    ticket = begin(window).ticket
    window.step(Planned(ticket, 2))
    window.step(commit(4, (5, 9), round_=1, speculation=SEQUENTIAL))
    assert window.ticket == ticket
    assert window.step(Drawn(ticket, (1, 2))) == [Send(Proposal(SESSION, epoch(1), 6, 6, 8, (1, 2)))]


def test_a_hinted_reset_starts_again_at_its_position() -> None:
    window = opened()
    propose(window, 5)
    propose(window, 6, 7)
    assert window.step(hint(5, None)) == [TAKEN, Count("discarded", 2), Rewind(5)]
    assert (window.ids, window.epoch) == ([*PROMPT, 5], epoch(1))
    window.step(commit(4, (5,), round_=0))
    window.step(commit(5, (), round_=1))
    assert (window.confirmed_len, window.epoch) == (5, epoch(1))


def test_hints_may_run_ahead_of_commits_which_confirm_them_one_by_one() -> None:
    window = hinted()
    propose(window, 1)
    assert TAKEN in window.step(hint(7, 8, round_=2))
    assert window.ids == [*PROMPT, 5, 9, 1, 8]
    for told in (commit(4, (5,), 0), commit(5, (9,), 1), commit(6, (1,), 1), commit(7, (8,), 2)):
        assert window.step(told) == []
        assert window.confirmed_len == told.end
    assert (window.seen_len, window.epoch) == (8, epoch(2))


@pytest.mark.parametrize(
    ("late", "fate"),
    [
        (hint(5, 9), LATE),
        (hint(4, 9, round_=0), LATE),
        (hint(6, 2, round_=3), ODD),
        (hint(6, 2, round_=2, attach=2), ODD),
        (hint(6, 2, round_=9, attach=0), LATE),
        (hint(5, 2, round_=2), ODD),
        (hint(8, 2, round_=2), ODD),
    ],
    ids=["double", "stale", "gap", "generation to come", "generation gone", "behind what is seen", "beyond the chain"],
)
def test_a_hint_that_cannot_be_the_end_of_this_chain_changes_nothing(late: RollbackHint, fate: Count) -> None:
    window = hinted()
    propose(window, 1)
    assert window.step(late) == [fate]
    assert (window.ids, window.seen_len, window.epoch) == ([*PROMPT, 5, 9, 1], 6, epoch(1))


def test_a_hint_behind_its_commit_changes_nothing() -> None:
    window = opened()
    propose(window, 5)
    window.step(commit(4, (5, 9), round_=1))
    propose(window, 1)
    assert window.step(hint(5, 9)) == [LATE]
    assert window.ids == [*PROMPT, 5, 9, 1]


def test_a_commit_lost_behind_a_hint_is_asked_for_from_the_last_confirmed_place() -> None:
    window = hinted()
    propose(window, 1)
    assert window.step(commit(6, (1,), round_=1)) == [AskFrom(4)]
    assert window.step(commit(4, (5, 9, 1), round_=1)) == []
    assert (window.confirmed_len, window.seen_len) == (7, 7)


# --- speculation ----------------------------------------------------------------------------------------------------


def test_a_confirmation_sets_the_window_while_the_chain_has_not_reached_its_limit() -> None:
    window = hinted(SEQUENTIAL)
    window.step(commit(4, (5, 9), round_=1, speculation=WIDER))
    assert (window.limit, begin(window).count) == (14, 2)


def test_a_confirmation_does_not_move_the_limit_of_a_chain_that_stands_at_it() -> None:
    window = hinted(SEQUENTIAL)
    propose(window, 1, 2)
    window.step(commit(4, (5, 9), round_=1, speculation=WIDER))
    assert not window.wants_time, "a bonus may answer a chain at its limit"
    window.step(hint(8, 3, round_=2))
    assert window.limit == 9 + WIDER.window, "the next epoch begins with what was told last"


def test_a_confirmation_that_switches_drafting_off_lets_nothing_begin() -> None:
    window = hinted()
    window.step(commit(4, (5, 9), round_=1, speculation=OFF))
    assert (window.wants_time, window.step(Scheduled())) == (False, [])
    assert TAKEN in window.step(hint(6, 2, round_=2))
    assert not window.wants_time


def test_a_confirmation_that_switches_drafting_on_lets_it_begin() -> None:
    window = opened(speculation=OFF)
    window.step(hint(4, 9))
    assert not window.wants_time
    window.step(commit(4, (9,), round_=1))
    assert begin(window).base_len == 5


def test_a_hint_ends_a_silence() -> None:
    window = opened()
    window.step(Planned(begin(window).ticket, 0, until_len=6))
    assert not window.wants_time
    window.step(hint(4, 9))
    assert begin(window).base_len == 5


# --- lies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [Mode.GREEDY, Mode.REJECTION])
@pytest.mark.parametrize(
    "told",
    [((5, 8), 1), ((5,), 1), ((5, 9, 9), 0), ((6,), 0)],
    ids=["another token", "shorter", "longer before it", "another chain"],
)
def test_a_commit_overrules_a_hint_and_no_other_hint_is_taken(told: tuple[tuple[int, ...], int], mode: Mode) -> None:
    window, (ids, round_) = hinted(), told
    first, *_, last = window.step(commit(4, ids, round_))
    assert (first, last) == (OVERRULED, Send(Pass(SESSION, epoch(round_), 4 + len(ids), 5 + len(ids))))
    assert (tuple(window.ids), window.epoch) == (PROMPT + ids, epoch(round_))
    assert not window.wants_time, "what the verifier has of this epoch's chain is not known"
    assert window.step(hint(len(window.ids), 3, round_ + 1)) == [ODD]
    window.step(commit(4 + len(ids), (3, 3), round_))
    assert (window.ids[-2:], window.wants_time) == ([3, 3], False)
    window.step(commit(6 + len(ids), (7,), round_ + 1))
    assert begin(window).base_len == len(window.ids)


def test_a_proposal_begun_on_a_lie_is_forgotten() -> None:
    window = hinted(SEQUENTIAL)
    ticket = begin(window).ticket
    window.step(Planned(ticket, 2))
    window.step(commit(4, (5, 8), round_=1))
    assert window.ticket == 0
    assert window.step(Drawn(ticket, (1, 2))) == [Count("discarded", 2)]


def test_a_commit_that_skips_a_hinted_epoch_is_followed() -> None:
    window = hinted()
    window.step(commit(4, (5, 8, 8), round_=2))
    assert (window.ids, window.epoch, window.wants_time) == ([*PROMPT, 5, 8, 8], epoch(2), True)


def test_a_contradiction_without_a_hint_is_still_an_error() -> None:
    window = hinted()
    window.step(commit(4, (5, 9), round_=1))
    propose(window, 1)
    with pytest.raises(ProtocolError, match="differs from the chain"):
        window.step(commit(6, (2,), round_=1))
