"""The verifier's chain, branch by branch: what is tested, what ends an epoch, what is waited for."""

import pytest

from outrider.errors import ProtocolError
from outrider.ids import Generation, Mode, TokenKind, WorkerId
from outrider.messages import (
    DecodeAttach,
    DecodeProgress,
    Pass,
    Speculation,
    VerdictCause,
)
from tests.unit.chain_steps import (
    GEN,
    OFF,
    OTHER,
    PIPELINED,
    SEQUENTIAL,
    SESSION,
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
from verify_service.chain import MAX_PARKED, Chain
from verify_service.conduct import MAX_BROKEN, MAX_GARBAGE
from verify_service.events import (
    Count,
    Report,
    Rewind,
    Scheduled,
    StartTimer,
    StreamBroken,
    Test,
    TimerExpired,
    TimerKind,
)
from verify_service.timers import MAX_EXPIRIES

# --- testing --------------------------------------------------------------------------------------------------------


def test_a_run_is_fed_behind_the_last_token_and_tested_in_one_pass() -> None:
    chain = opened()
    assert (chain.committed_len, chain.kv_len, chain.wants_rows) == (4, 3, 0)
    assert arrive(chain, proposal(4, (5, 6))) == []
    assert (chain.chain_end, chain.wants_rows) == (6, 3)
    test = scheduled(chain)
    assert test == Test(epoch(), 4, (4, 5, 6), False, (5, 6), (), None)
    assert test.num_rows == 3


def test_an_accepted_run_holds_its_last_row_and_is_reported_without_ending_the_epoch() -> None:
    chain = opened()
    arrive(chain, proposal(4, (5, 6)))
    scheduled(chain)
    assert judge(chain, 2) == [StartTimer(TimerKind.PATIENCE, 1)]
    assert (chain.held, chain.kv_len, chain.epoch) == (True, 6, epoch())
    report = only(chain.step(Scheduled(32)), Report)
    accepted = (TokenKind.ACCEPTED, TokenKind.ACCEPTED)
    assert report == Report(epoch(), 4, (5, 6), accepted, 2, 2, epoch(), VerdictCause.TESTED)
    assert chain.step(Scheduled(32)) == []


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_a_rejection_at_any_position_ends_the_epoch_and_rewinds(accepted: int) -> None:
    chain = opened()
    arrive(
        chain,
        proposal(
            4,
            (
                5,
                6,
            ),
            limit=8,
        ),
    )
    arrive(chain, proposal(6, (7,), limit=8))
    scheduled(chain)
    commands = judge(chain, accepted, drawn=9)
    report = only(commands, Report)
    assert report.token_ids == (*(5, 6, 7)[:accepted], 9)
    assert report.kinds == (TokenKind.ACCEPTED,) * accepted + (TokenKind.RECOVERED,)
    assert (report.num_accepted, report.num_tested, report.next_epoch) == (accepted, accepted + 1, epoch(1))
    assert only(commands, Rewind).length == chain.kv_len == 4 + accepted
    assert counts(commands) == (["wasted"] if accepted < 2 else [])
    assert not chain.held


def test_a_rejection_wastes_what_was_still_waiting() -> None:
    chain = opened()
    arrive(chain, proposal(4, (5, 6)))
    scheduled(chain)
    judge(chain, 2)
    arrive(chain, proposal(6, (7, 8)))
    arrive(chain, proposal(8, (9,), limit=9))
    assert scheduled(chain).from_held
    assert Count("wasted", 2) in judge(chain, 0, drawn=1)
    assert chain.chain_end == chain.committed_len == 7


def test_the_held_row_tests_the_next_token_before_any_pass_and_its_verdict_rides_with_the_pass() -> None:
    chain = opened()
    arrive(chain, proposal(4, (5, 6)))
    scheduled(chain)
    judge(chain, 2)
    arrive(chain, proposal(6, (7, 8)))
    assert chain.wants_rows == 2
    held = scheduled(chain, 0)
    assert held == Test(epoch(), 6, (), True, (7,), (), None)
    assert judge(chain, 1) == []
    assert (chain.held, chain.kv_len, chain.wants_rows) == (False, 6, 2)
    (test,) = chain.step(Scheduled(32))
    assert test == Test(epoch(), 7, (7, 8), False, (8,), (), None)
    judge(chain, 0, drawn=1)


def test_where_draws_are_fresh_an_accepted_held_token_is_reported_before_the_next_pass_begins() -> None:
    chain = opened(Mode.REJECTION)
    for base, ids in ((4, (5, 6)), (6, (7, 8))):
        arrive(chain, header(base, 2))
        arrive(chain, with_rows(proposal(base, ids)))
        if base == 4:
            scheduled(chain)
            judge(chain, 2)
    scheduled(chain, 0)
    judge(chain, 1)
    report, test = chain.step(Scheduled(32))
    assert isinstance(report, Report)
    assert report.token_ids == (5, 6, 7)
    assert isinstance(test, Test)


def test_a_rejection_at_the_held_row_costs_no_pass_and_no_rewind() -> None:
    chain = opened()
    arrive(chain, proposal(4, (5, 6)))
    scheduled(chain)
    judge(chain, 2)
    arrive(chain, proposal(6, (7,)))
    scheduled(chain, 0)
    commands = judge(chain, 0, drawn=9)
    assert [type(command) for command in commands] == [Report, StartTimer]
    assert only(commands, Report).token_ids == (5, 6, 9)
    assert chain.kv_len == 6


def test_an_accepted_held_token_with_nothing_behind_it_is_reported_at_the_next_step() -> None:
    chain = opened()
    arrive(chain, proposal(4, (5, 6)))
    scheduled(chain)
    judge(chain, 2)
    arrive(chain, proposal(6, (7,)))
    scheduled(chain)
    judge(chain, 1)
    assert only(chain.step(Scheduled(32)), Report).token_ids == (5, 6, 7)


def test_few_rows_split_a_run_and_too_few_leave_it_waiting() -> None:
    chain = opened()
    arrive(chain, proposal(4, (5, 6)))
    assert chain.step(Scheduled(1)) == []
    assert scheduled(chain, 2).token_ids == (5,)
    judge(chain, 1)
    assert scheduled(chain).token_ids == (6,)


def test_a_block_waits_until_all_its_rows_fit_and_is_never_tested_on_the_held_row_alone() -> None:
    chain = opened(Mode.BLOCK)
    for base, ids in ((4, (5, 6)), (6, (7, 8))):
        arrive(chain, header(base, 2))
        arrive(chain, with_rows(proposal(base, ids)))
    assert chain.step(Scheduled(2)) == []
    assert scheduled(chain, 3).token_ids == (5, 6)
    judge(chain, 2)
    assert chain.wants_rows == 2
    assert only(chain.step(Scheduled(0)), Report).token_ids == (5, 6)
    test = scheduled(chain, 2)
    assert (test.feed, test.from_held, test.rows) == ((7, 8), True, (row(7), row(8)))


def test_the_engine_may_not_break_the_order_of_test_and_judged() -> None:
    chain = opened()
    with pytest.raises(ProtocolError, match="Judged while not testing"):
        judge(chain, 0)
    arrive(chain, proposal(4, (5,)))
    scheduled(chain)
    with pytest.raises(ProtocolError, match="Scheduled while testing"):
        chain.step(Scheduled(1))


# --- the commit limit -----------------------------------------------------------------------------------------------


def test_the_commit_limit_cuts_a_run_and_the_rest_waits_for_it_to_rise() -> None:
    chain = opened(limit=5)
    arrive(chain, proposal(4, (5, 6)))
    assert scheduled(chain).token_ids == (5,)
    assert judge(chain, 1) == []
    assert chain.wants_rows == 0
    assert only(chain.step(Scheduled(32)), Report).token_ids == (5,)
    assert chain.step(DecodeProgress(GEN, 5, 100, PIPELINED, 1.0)) == []
    assert scheduled(chain) == Test(epoch(), 5, (), True, (6,), (), None)


def test_the_commit_limit_cuts_a_block_and_the_rest_is_a_block_of_its_own() -> None:
    chain = opened(Mode.BLOCK, limit=5)
    arrive(chain, header(4, 2))
    arrive(chain, with_rows(proposal(4, (5, 6))))
    test = scheduled(chain)
    assert (test.token_ids, test.rows) == ((5,), (row(5),))
    judge(chain, 1)
    chain.step(Scheduled(32))
    chain.step(DecodeProgress(GEN, 5, 100, PIPELINED, 1.0))
    test = scheduled(chain)
    assert (test.token_ids, test.feed, test.from_held) == ((6,), (6,), True)


def test_at_the_commit_limit_nothing_is_drawn_and_no_patience_runs() -> None:
    chain = opened(limit=4)
    assert chain.step(Scheduled(32)) == []
    assert chain.step(DecodeProgress(GEN, 4, 3, PIPELINED, 1.0)) == []
    assert chain.commit_limit == 4
    assert only(chain.step(DecodeProgress(GEN, 4, 5, PIPELINED, 2.0)), StartTimer).kind is TimerKind.PATIENCE
    assert chain.patience_s == 2.0


def test_progress_of_an_older_generation_is_late() -> None:
    chain = opened()
    chain.step(DecodeProgress(Generation(1, 0), 4, 500, OFF, 9.0))
    assert (chain.commit_limit, chain.speculation, chain.patience_s) == (100, PIPELINED, 1.0)


# --- the verifier's own tokens --------------------------------------------------------------------------------------


def test_a_bonus_follows_a_chain_that_reached_its_limit_with_everything_seen() -> None:
    chain = opened(speculation=SEQUENTIAL)
    arrive(chain, proposal(4, (5, 6), limit=6))
    scheduled(chain)
    judge(chain, 2)
    assert chain.wants_rows == 0
    assert scheduled(chain, 0) == Test(epoch(), 6, (), True, (), (), TokenKind.BONUS)
    report = only(judge(chain, 0, drawn=9, tested=0), Report)
    assert report.token_ids == (5, 6, 9)
    assert (report.kinds[-1], report.num_tested, report.next_epoch) == (TokenKind.BONUS, 2, epoch(1))


def test_no_bonus_is_drawn_while_the_chain_may_go_on() -> None:
    chain = opened()
    arrive(chain, proposal(4, (5, 6), limit=8))
    scheduled(chain)
    judge(chain, 2)
    assert only(chain.step(Scheduled(32)), Report).token_ids == (5, 6)
    arrive(chain, proposal(6, (7, 8), seen=4, limit=8))
    scheduled(chain)
    judge(chain, 1)
    scheduled(chain)
    judge(chain, 1)
    assert chain.committed_len == 8
    reported = chain.step(Scheduled(32))
    assert [type(command) for command in reported] == [Report]
    assert chain.held, "a commit under way opens the window"


@pytest.mark.parametrize("speculation", [OFF, SEQUENTIAL])
def test_nobody_drafting_means_plain_tokens_without_waiting(speculation: Speculation) -> None:
    chain = opened(speculation=speculation, worker="" if speculation.enabled else WORKER)
    assert chain.wants_rows == 1
    assert chain.step(Scheduled(0)) == []
    assert scheduled(chain) == Test(epoch(), 4, (4,), False, (), (), TokenKind.PLAIN)
    commands = judge(chain, 0, drawn=9, tested=0)
    assert only(commands, Report) == Report(epoch(), 4, (9,), (TokenKind.PLAIN,), 0, 0, epoch(1), VerdictCause.PLAIN)
    assert StartTimer(TimerKind.PATIENCE, 1) not in commands


def test_a_plain_token_comes_from_the_held_row_if_there_is_one() -> None:
    chain = opened()
    arrive(chain, proposal(4, (5, 6)))
    scheduled(chain)
    judge(chain, 2)
    chain.step(DecodeProgress(GEN, 4, 100, OFF, 1.0))
    assert scheduled(chain, 0) == Test(epoch(), 6, (), True, (), (), TokenKind.PLAIN)


def test_a_pass_is_decoded_plain_up_to_its_end_in_every_epoch_until_then() -> None:
    chain = opened()
    arrive(chain, Pass(SESSION, epoch(), 4, 6))
    for _ in range(2):
        assert scheduled(chain).draw is TokenKind.PLAIN
        assert only(judge(chain, 0, drawn=9, tested=0), Report).cause == VerdictCause.PLAIN
    assert chain.step(Scheduled(32)) == []


def test_a_pass_behind_a_run_holds_after_the_run_and_is_forgotten_after_a_rejection() -> None:
    chain = opened()
    arrive(chain, proposal(4, (5, 6)))
    arrive(chain, Pass(SESSION, epoch(), 6, 9))
    scheduled(chain)
    judge(chain, 0, drawn=9)
    assert chain.step(Scheduled(32)) == []


def test_speculation_switched_on_again_is_announced_by_one_plain_token() -> None:
    chain = opened(speculation=OFF)
    assert chain.step(DecodeProgress(GEN, 4, 100, PIPELINED, 1.0)) == []
    assert scheduled(chain).draw is TokenKind.PLAIN
    assert only(judge(chain, 0, drawn=9, tested=0), Report).cause == VerdictCause.PLAIN
    assert chain.step(Scheduled(32)) == []


# --- patience -------------------------------------------------------------------------------------------------------


def waiting(chain: Chain) -> int:
    """Bring the chain to wait, and return its timer's number."""
    return only(chain.step(Scheduled(32)), StartTimer).number


def test_patience_that_runs_out_draws_one_token_and_says_so() -> None:
    chain = opened()
    assert chain.step(TimerExpired(waiting(chain))) == []
    assert scheduled(chain).draw is TokenKind.PLAIN
    commands = judge(chain, 0, drawn=9, tested=0)
    assert only(commands, Report).cause == VerdictCause.PATIENCE
    assert only(commands, StartTimer).number == 2


def test_a_timer_that_is_not_the_running_one_changes_nothing() -> None:
    chain = opened()
    number = waiting(chain)
    assert chain.step(TimerExpired(number + 1)) == []
    assert chain.step(Scheduled(32)) == []
    arrive(chain, proposal(4, (5,)))
    assert chain.step(TimerExpired(number)) == []
    assert scheduled(chain).token_ids == (5,)


def test_three_expiries_in_a_row_end_the_waiting_until_a_drafter_is_attached() -> None:
    chain = opened()
    number = waiting(chain)
    for _ in range(MAX_EXPIRIES):
        chain.step(TimerExpired(number))
        scheduled(chain)
        commands = judge(chain, 0, drawn=9, tested=0)
        number = max((c.number for c in commands if isinstance(c, StartTimer)), default=-1)
    assert number == -1
    assert scheduled(chain).draw is TokenKind.PLAIN
    judge(chain, 0, drawn=9, tested=0)
    assert only(chain.step(DecodeAttach(Generation(1, 2), OTHER)), StartTimer).kind is TimerKind.PATIENCE
    assert chain.step(Scheduled(32)) == []


def test_a_message_in_time_starts_the_count_of_expiries_again() -> None:
    chain = opened()
    number = waiting(chain)
    for round_ in range(MAX_EXPIRIES + 1):
        chain.step(TimerExpired(number))
        arrive(chain, proposal(4 + round_, (5,), seen=4 + round_, limit=9 + round_, at=epoch(round_)))
        assert scheduled(chain).token_ids == (5,), "what came before the draw is tested"
        number = only(judge(chain, 0, drawn=9), StartTimer).number


def test_an_announced_body_is_waited_for_up_to_a_hard_limit_that_is_counted_and_cuts_the_drafter_off() -> None:
    chain = opened(Mode.REJECTION)
    waiting(chain)
    timer = only(arrive(chain, header(4, 2)), StartTimer)
    assert timer.kind is TimerKind.BODY
    assert chain.step(Scheduled(32)) == []
    commands = chain.step(TimerExpired(timer.number))
    assert counts(commands) == ["guarantee_void"]
    assert only(commands, Report).cause == VerdictCause.QUARANTINED
    assert chain.guarantee_void == 1
    assert counts(arrive(chain, header(4, 2, chain.epoch))) == ["stale"]
    assert scheduled(chain).draw is TokenKind.PLAIN
    assert only(judge(chain, 0, drawn=9, tested=0), Report).cause == VerdictCause.PLAIN
    assert scheduled(chain).draw is TokenKind.PLAIN, "nobody is waited for"


# --- generations ----------------------------------------------------------------------------------------------------


def test_attaching_a_drafter_reports_the_length_it_starts_from_after_what_was_accepted() -> None:
    chain = opened()
    arrive(chain, proposal(4, (5, 6)))
    scheduled(chain)
    judge(chain, 2)
    arrive(chain, proposal(6, (7,)))
    commands = chain.step(DecodeAttach(Generation(1, 2), OTHER))
    flushed, attached = (command for command in commands if isinstance(command, Report))
    assert flushed.token_ids == (5, 6)
    assert attached == Report(epoch(0, 2), 6, (), (), 0, 0, epoch(0, 2), VerdictCause.ATTACHED)
    assert counts(commands) == ["wasted"]
    assert counts(arrive(chain, proposal(6, (7,)))) == ["stale"]
    assert chain.held, "the row belongs to the text, not to the drafter"


@pytest.mark.parametrize("attach", [0, 1])
def test_attaching_a_generation_that_is_not_newer_is_late(attach: int) -> None:
    chain = opened()
    assert counts(chain.step(DecodeAttach(Generation(1, attach), OTHER))) == ["stale"]
    assert (chain.worker_id, chain.epoch) == (WORKER, epoch())


def test_attaching_nobody_means_plain_decoding() -> None:
    chain = opened()
    chain.step(DecodeAttach(Generation(1, 2), WorkerId("")))
    assert chain.worker_id is None
    assert scheduled(chain).draw is TokenKind.PLAIN


def test_messages_of_a_generation_not_announced_yet_wait_for_it() -> None:
    chain = opened()
    assert counts(arrive(chain, proposal(4, (5,), at=epoch(0, 2)), OTHER)) == []
    assert chain.chain_end == 4
    chain.step(DecodeAttach(Generation(1, 2), OTHER))
    assert scheduled(chain).token_ids == (5,)


def test_parking_is_bounded_and_expires() -> None:
    chain = opened()
    early = proposal(4, (5,), at=epoch(0, 2))
    for _ in range(MAX_PARKED):
        assert counts(arrive(chain, early, OTHER)) == []
    assert counts(arrive(chain, early, OTHER)) == ["parked_overflow"]
    assert chain.expire_parked() == MAX_PARKED
    assert chain.expire_parked() == 0
    chain.step(DecodeAttach(Generation(1, 2), OTHER))
    assert chain.chain_end == 4


def test_a_broken_stream_of_the_attached_worker_resets_and_of_another_changes_nothing() -> None:
    chain = opened()
    arrive(chain, Pass(SESSION, epoch(), 4, 9))
    assert chain.step(StreamBroken(OTHER)) == []
    assert only(chain.step(StreamBroken(WORKER)), Report).cause == VerdictCause.RESET
    assert chain.step(Scheduled(32)) == [], "the pass is forgotten with its chain"


# --- who chooses among drawn tokens ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [Mode.REJECTION, Mode.BLOCK])
def test_a_drafter_that_makes_gaps_after_its_headers_voids_the_guarantee_and_is_soon_cut_off(mode: Mode) -> None:
    chain = opened(mode)
    causes = []
    for _ in range(MAX_GARBAGE):
        arrive(chain, header(4, 1, chain.epoch))
        commands = arrive(chain, with_rows(proposal(5, (6,), at=chain.epoch)))
        assert counts(commands) == ["gap", "guarantee_void"]
        causes.append(only(commands, Report).cause)
    assert causes == [VerdictCause.RESET] * (MAX_GARBAGE - 1) + [VerdictCause.QUARANTINED]
    assert chain.guarantee_void == MAX_GARBAGE
    assert counts(arrive(chain, header(4, 1, chain.epoch))) == ["stale"]
    assert scheduled(chain).draw is TokenKind.PLAIN


def test_a_gap_before_any_header_or_after_the_body_was_tested_voids_nothing() -> None:
    chain = opened(Mode.REJECTION)
    assert counts(arrive(chain, header(5, 1))) == ["gap"]
    arrive(chain, header(4, 1, chain.epoch))
    arrive(chain, with_rows(proposal(4, (5,), at=chain.epoch)))
    scheduled(chain)
    judge(chain, 1)
    assert counts(arrive(chain, header(7, 1, chain.epoch))) == ["gap"]
    assert chain.guarantee_void == 0


def test_a_gap_behind_a_body_that_waits_for_its_test_voids_the_guarantee() -> None:
    chain = opened(Mode.REJECTION)
    arrive(chain, header(4, 1))
    arrive(chain, with_rows(proposal(4, (5,))))
    assert counts(arrive(chain, header(9, 1))) == ["gap", "guarantee_void", "wasted"]


def test_garbage_of_another_round_after_a_header_ends_nothing_and_voids_nothing() -> None:
    chain = opened(Mode.REJECTION)
    arrive(chain, header(4, 1))
    assert counts(arrive(chain, header(4, 1, epoch(7)))) == ["garbage"]
    arrive(chain, with_rows(proposal(4, (5,))))
    assert scheduled(chain).token_ids == (5,)
    assert chain.guarantee_void == 0


@pytest.mark.parametrize("mode", [Mode.GREEDY, Mode.COUPLED])
def test_gaps_quarantine_where_no_rows_are_needed_and_void_nothing(mode: Mode) -> None:
    chain = opened(mode)
    causes = []
    for _ in range(MAX_GARBAGE):
        arrive(chain, proposal(4, (5,), at=chain.epoch))
        causes.append(only(arrive(chain, proposal(6, (6,), at=chain.epoch)), Report).cause)
    assert causes == [VerdictCause.RESET] * (MAX_GARBAGE - 1) + [VerdictCause.QUARANTINED]
    assert chain.guarantee_void == 0


def test_attaching_a_drafter_again_neither_clears_its_count_nor_lets_a_quarantined_one_in() -> None:
    chain = opened()
    for _ in range(MAX_GARBAGE - 1):
        arrive(chain, proposal(9, (5,), limit=10, at=chain.epoch))
    chain.step(DecodeAttach(Generation(1, 2), OTHER))
    commands = arrive(chain, proposal(9, (5,), limit=10, at=chain.epoch), OTHER)
    assert only(commands, Report).cause == VerdictCause.RESET, "another worker has a count of its own"
    chain.step(DecodeAttach(Generation(1, 3), WORKER))
    commands = arrive(chain, proposal(9, (5,), limit=10, at=chain.epoch))
    assert only(commands, Report).cause == VerdictCause.QUARANTINED
    report = only(chain.step(DecodeAttach(Generation(1, 4), WORKER)), Report)
    assert (report.cause, report.next_epoch) == (VerdictCause.QUARANTINED, epoch(0, 4))
    assert chain.worker_id is None
    assert scheduled(chain).draw is TokenKind.PLAIN


def test_streams_that_break_behind_a_header_are_counted_apart_and_quarantine_in_the_end() -> None:
    chain = opened(Mode.REJECTION)
    causes = []
    for _ in range(MAX_BROKEN):
        assert counts(chain.step(StreamBroken(WORKER))) == [], "nothing was announced"
        arrive(chain, header(4, 1, chain.epoch))
        commands = chain.step(StreamBroken(WORKER))
        assert counts(commands) == ["broken_after_header"]
        causes.append(only(commands, Report).cause)
    assert causes == [VerdictCause.RESET] * (MAX_BROKEN - 1) + [VerdictCause.QUARANTINED]
    assert chain.guarantee_void == 0
