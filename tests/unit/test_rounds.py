"""The rounds of a generation, branch by branch: what is committed, logged and shown, and who is told what."""

from collections.abc import Sequence
from typing import TypeVar

import pytest

from orchestrator.events import (
    AppendLog,
    Cancelled,
    ChooseDrafter,
    ChooseVerifier,
    CloseDrafter,
    CloseVerifier,
    Command,
    Count,
    DrafterAsked,
    DrafterChosen,
    DrafterLost,
    Emit,
    Event,
    Fail,
    Failed,
    Finish,
    Logged,
    OpenDrafter,
    OpenVerifier,
    Outcome,
    Started,
    Taken,
    TellDrafter,
    TellVerifier,
    Tuned,
    VerdictArrived,
    VerifierChosen,
    VerifierLost,
)
from orchestrator.rounds import (
    MAX_AHEAD_OF_CLIENT,
    MAX_AHEAD_OF_LOG,
    MAX_EXPIRIES,
    MAX_REOPENS,
    PROGRESS_STRIDE,
    Plan,
    Rounds,
)
from outrider.errors import ProtocolError, Unavailable
from outrider.generation import Chunk
from outrider.ids import Epoch, FinishReason, Generation, SessionId, TokenClass, TokenKind, WorkerId
from outrider.messages import (
    DecodeAttach,
    DecodeProgress,
    DraftCommit,
    Speculation,
    TokenLogprobs,
    Verdict,
    VerdictCause,
)

PROMPT = (1, 2, 3, 4)
STOP = 10
ON, OFF = Speculation(2, 2, 4), Speculation()
VERIFIER, SPARE, WORKER, OTHER = WorkerId("v1"), WorkerId("v2"), WorkerId("d1"), WorkerId("d2")
T = TypeVar("T")


class StopAt:
    """Ends at a stop id or at a length."""

    def __init__(self, final_len: int) -> None:
        self.final_len = final_len

    def take(
        self, start: int, token_ids: Sequence[int], kinds: Sequence[TokenKind], logprobs: Sequence[TokenLogprobs]
    ) -> Outcome:
        count = min(len(token_ids), self.final_len - start)
        reason = FinishReason.LENGTH if start + count == self.final_len else None
        if STOP in token_ids[:count]:
            count, reason = token_ids.index(STOP) + 1, FinishReason.STOP
        chunk = Chunk(start, tuple(token_ids[:count]), "", tuple(kinds[:count]), tuple(logprobs[:count]))
        return Outcome(chunk, reason)


def planned(final_len: int = 20) -> Rounds:
    plan = Plan(3, PROMPT, (TokenClass.PROMPT,) * len(PROMPT), final_len, Tuned(ON, 1.0))
    return Rounds(plan, StopAt(final_len))


def running(final_len: int = 20, drafter: WorkerId | None = WORKER) -> Rounds:
    rounds = planned(final_len)
    rounds.step(Started(VERIFIER, drafter))
    return rounds


def generation(attach: int) -> Generation:
    return Generation(3, attach)


FIRST = generation(1)


def epoch(round_: int = 0, attach: int = 1) -> Epoch:
    return Epoch(generation(attach), round_)


def verdict(
    start: int, ids: tuple[int, ...], before: Epoch | None = None, after: Epoch | None = None, cause: str = "tested"
) -> Verdict:
    before = before or epoch()
    kinds = (TokenKind.ACCEPTED,) * len(ids)
    tested = len(ids) if cause == VerdictCause.TESTED else 0
    return Verdict(SessionId("s"), before, start, ids, kinds, tested, tested, after or before, cause)


def tell(rounds: Rounds, message: Verdict, opened: Generation | None = None) -> list[Command]:
    return rounds.step(VerdictArrived(opened or FIRST, message))


def only(commands: list[Command], kind: type[T]) -> T:
    found = [command for command in commands if isinstance(command, kind)]
    assert len(found) == 1, commands
    return found[0]


def counted(commands: list[Command]) -> list[str]:
    return [command.name for command in commands if isinstance(command, Count)]


# --- starting -------------------------------------------------------------------------------------------------------


def test_verifier_and_drafter_are_opened_at_once_with_the_same_tokens() -> None:
    classes = (TokenClass.PROMPT,) * 4
    assert planned().step(Started(VERIFIER, WORKER)) == [
        OpenVerifier(VERIFIER, FIRST, WORKER, PROMPT, classes, 20, ON, 1.0),
        OpenDrafter(WORKER, epoch(), PROMPT, ON),
    ]


def test_a_generation_without_a_drafter_says_why() -> None:
    rounds = planned()
    assert [type(command) for command in rounds.step(Started(VERIFIER, None, "no_worker"))] == [OpenVerifier]
    assert rounds.off_reason == "no_worker"


def test_a_generation_starts_once() -> None:
    with pytest.raises(ProtocolError, match="twice"):
        running().step(Started(VERIFIER, WORKER))


# --- commits --------------------------------------------------------------------------------------------------------


def test_a_verdict_is_logged_and_passed_on_and_shown_only_when_it_is_in_the_log() -> None:
    rounds = running()
    assert tell(rounds, verdict(4, (5, 6))) == [
        AppendLog(4, (5, 6), (TokenKind.ACCEPTED,) * 2),
        TellDrafter(DraftCommit(epoch(), 4, (5, 6), ON)),
    ]
    assert rounds.step(Logged(5)) == []
    (shown,) = rounds.step(Logged(6))
    assert shown == Emit(Chunk(4, (5, 6), "", (TokenKind.ACCEPTED,) * 2))


def test_a_reset_is_passed_on_without_tokens() -> None:
    rounds = running()
    commands = tell(rounds, verdict(4, (), epoch(), epoch(1), VerdictCause.RESET))
    assert commands == [TellDrafter(DraftCommit(epoch(1), 4, (), ON))]


def test_the_answer_to_the_first_attachment_tells_the_drafter_nothing_new() -> None:
    assert tell(running(), verdict(4, (), cause=VerdictCause.ATTACHED)) == []


@pytest.mark.parametrize(
    "late",
    [verdict(4, (5, 6)), verdict(4, (5,)), verdict(4, ()), verdict(5, (6,), epoch(), epoch(1))],
    ids=["double", "older", "empty", "ends before"],
)
def test_a_double_or_late_verdict_changes_nothing(late: Verdict) -> None:
    rounds = running()
    tell(rounds, verdict(4, (5, 6)))
    tell(rounds, verdict(6, (7,), epoch(), epoch(1)))
    assert tell(rounds, late) == [Count("late_verdict")]
    assert rounds.tokens == [*PROMPT, 5, 6, 7]


def test_a_verdict_of_another_stream_is_late() -> None:
    assert tell(running(), verdict(4, (5,)), generation(0)) == [Count("late_verdict")]


def test_a_verdict_that_overlaps_in_a_newer_epoch_adds_what_is_new() -> None:
    rounds = running()
    tell(rounds, verdict(4, (5, 6)))
    commands = tell(rounds, verdict(4, (5, 6, 7), epoch(), epoch(1)))
    assert only(commands, AppendLog).token_ids == (7,)
    assert only(commands, TellDrafter).commit == DraftCommit(epoch(1), 6, (7,), ON)


def test_a_gap_between_verdicts_loses_the_verifier() -> None:
    commands = tell(running(), verdict(6, (7,)))
    assert commands == [
        Count("verifier_lost"),
        CloseDrafter(FIRST),
        CloseVerifier(),
        ChooseVerifier(frozenset({VERIFIER})),
    ]


def test_a_stop_in_the_middle_of_a_run_ends_it_there_and_closes_both_streams() -> None:
    rounds = running()
    assert tell(rounds, verdict(4, (5, STOP, 6, 7))) == [
        AppendLog(4, (5, STOP), (TokenKind.ACCEPTED,) * 2),
        CloseDrafter(FIRST),
        CloseVerifier(),
    ]
    assert tell(rounds, verdict(8, (9,))) == [Count("late_verdict")]
    assert [type(command) for command in rounds.step(Logged(6))] == [Emit, Finish]
    assert rounds.over
    assert rounds.tokens == [*PROMPT, 5, STOP]


def test_the_length_limit_ends_a_run() -> None:
    rounds = running(final_len=6)
    tell(rounds, verdict(4, (5,)))
    tell(rounds, verdict(5, (6, 7, 8)))
    rounds.step(Logged(5))
    assert not rounds.over
    assert rounds.step(Logged(6))[-1] == Finish(FinishReason.LENGTH)


def test_a_log_cannot_be_longer_than_what_was_committed() -> None:
    rounds = running()
    rounds.step(Logged(99))
    assert rounds.logged_len == 4


@pytest.mark.parametrize("event", [Cancelled(), Failed(Unavailable("log"))])
def test_the_end_closes_both_streams_and_no_later_event_leads_to_anything(event: Cancelled | Failed) -> None:
    rounds = running()
    tell(rounds, verdict(4, (5,)))
    *closing, last = rounds.step(event)
    assert closing == [CloseDrafter(FIRST), CloseVerifier()]
    assert isinstance(last, Finish | Fail)
    assert rounds.over
    late: list[Event] = [
        Started(VERIFIER, None), VerdictArrived(FIRST, verdict(5, (6,))), Logged(5), Taken(5), Tuned(OFF, 1.0),
        DrafterLost(FIRST, "x"), DrafterChosen(OTHER), VerifierLost(FIRST, "x"), Cancelled(), Failed(Unavailable("x")),
    ]  # fmt: skip
    assert [rounds.step(later) for later in late] == [[]] * len(late)


def test_a_cancel_before_the_start_closes_nothing() -> None:
    assert planned().step(Cancelled()) == [Finish(FinishReason.CANCELLED)]


def test_a_cancel_while_the_last_append_is_under_way_closes_nothing_twice() -> None:
    rounds = running()
    tell(rounds, verdict(4, (STOP,)))
    assert rounds.step(Cancelled()) == [Finish(FinishReason.CANCELLED)]


# --- limits ---------------------------------------------------------------------------------------------------------


def test_the_verifier_is_told_a_new_limit_when_it_has_moved_far_enough_or_to_the_end() -> None:
    final_len = 4 + MAX_AHEAD_OF_LOG + 2 * PROGRESS_STRIDE - 1
    rounds = running(final_len)
    assert rounds.commit_limit == 4 + MAX_AHEAD_OF_LOG
    tell(rounds, verdict(4, tuple([5] * 2 * PROGRESS_STRIDE)))
    assert not [c for c in rounds.step(Logged(3 + PROGRESS_STRIDE)) if isinstance(c, TellVerifier)]
    told = only(rounds.step(Logged(4 + PROGRESS_STRIDE)), TellVerifier).message
    assert isinstance(told, DecodeProgress)
    assert (told.commit_limit, told.logged_len) == (4 + MAX_AHEAD_OF_LOG + PROGRESS_STRIDE, 4 + PROGRESS_STRIDE)
    told = only(rounds.step(Logged(5 + 2 * PROGRESS_STRIDE)), TellVerifier).message
    assert isinstance(told, DecodeProgress)
    assert told.commit_limit == final_len


def test_a_client_that_takes_nothing_holds_the_verifier_back() -> None:
    rounds = running(5000)
    tell(rounds, verdict(4, tuple([5] * 2000)))
    rounds.step(Logged(2004))
    assert rounds.commit_limit == 4 + MAX_AHEAD_OF_CLIENT
    told = only(rounds.step(Taken(500)), TellVerifier).message
    assert isinstance(told, DecodeProgress)
    assert told.commit_limit == 500 + MAX_AHEAD_OF_CLIENT
    rounds.step(Taken(400))
    assert rounds.taken_len == 500


def test_a_new_policy_is_told_at_once_to_the_verifier_and_with_the_next_commit_to_the_drafter() -> None:
    rounds = running()
    progress = DecodeProgress(FIRST, 4, 20, OFF, 2.0)
    assert rounds.step(Tuned(OFF, 2.0)) == [TellVerifier(progress)]
    assert rounds.step(Tuned(OFF, 2.0)) == []
    assert rounds.off_reason == "below_plain"
    assert only(tell(rounds, verdict(4, (5,))), TellDrafter).commit.speculation == OFF
    rounds.step(Tuned(ON, 2.0))
    assert rounds.off_reason == ""


def test_a_new_policy_before_the_start_is_used_at_the_start() -> None:
    rounds = planned()
    assert rounds.step(Tuned(OFF, 2.0)) == []
    assert only(rounds.step(Started(VERIFIER, None, "none")), OpenVerifier).speculation == OFF
    assert rounds.off_reason == "none"


# --- drafters -------------------------------------------------------------------------------------------------------


def test_a_lost_drafter_is_replaced_in_new_generations_and_opened_by_the_verdict_that_answers() -> None:
    rounds = running()
    tell(rounds, verdict(4, (5,)))
    assert rounds.step(DrafterLost(FIRST, "gone")) == [
        Count("drafter_lost"),
        CloseDrafter(FIRST),
        TellVerifier(DecodeAttach(generation(2), WorkerId(""))),
        ChooseDrafter(frozenset({WORKER})),
    ]
    assert rounds.off_reason == "drafter_gone"
    assert rounds.step(DrafterChosen(OTHER)) == [TellVerifier(DecodeAttach(generation(3), OTHER))]
    assert rounds.off_reason == ""
    # Verdicts from before and between are committed, and open nobody.
    for before in (verdict(5, (6,), epoch(), epoch(1)), verdict(6, (), epoch(0, 2), cause=VerdictCause.ATTACHED)):
        assert not [c for c in tell(rounds, before) if isinstance(c, OpenDrafter | TellDrafter)]
    attached = verdict(6, (), epoch(0, 3), cause=VerdictCause.ATTACHED)
    assert tell(rounds, attached) == [OpenDrafter(OTHER, epoch(0, 3), (*PROMPT, 5, 6), ON)]
    assert tell(rounds, attached) == []
    assert only(tell(rounds, verdict(6, (7,), epoch(0, 3))), TellDrafter).commit.start == 6


def test_no_other_drafter_to_be_had_means_going_on_without() -> None:
    rounds = running()
    rounds.step(DrafterLost(FIRST, "gone"))
    assert rounds.step(DrafterChosen(None)) == []
    assert rounds.off_reason == "drafter_gone"


def test_a_drafter_lost_before_it_was_opened_is_not_closed() -> None:
    rounds = running()
    rounds.step(DrafterLost(FIRST, "gone"))
    rounds.step(DrafterChosen(OTHER))
    commands = rounds.step(DrafterLost(generation(3), "gone"))
    assert not [command for command in commands if isinstance(command, CloseDrafter)]
    assert only(commands, ChooseDrafter).exclude == {WORKER, OTHER}


@pytest.mark.parametrize(
    "late",
    [DrafterLost(generation(0), "x"), DrafterAsked(generation(0), 4), DrafterChosen(OTHER)],
    ids=["loss of another", "question of another", "nobody was asked for"],
)
def test_a_late_event_of_a_drafter_changes_nothing(late: Event) -> None:
    assert running().step(late) == [Count("late_event")]


def test_patience_that_runs_out_three_times_in_a_row_replaces_the_drafter() -> None:
    rounds = running()
    tell(rounds, verdict(4, (5,), epoch(), epoch(1), VerdictCause.PATIENCE))
    tell(rounds, verdict(5, (6,), epoch(1), epoch(2)))
    for i in range(MAX_EXPIRIES - 1):
        between = verdict(6 + i, (7,), epoch(2 + i), epoch(3 + i), VerdictCause.PATIENCE)
        assert counted(tell(rounds, between)) == []
    last = verdict(8, (7,), epoch(4), epoch(5), VerdictCause.PATIENCE)
    assert counted(tell(rounds, last)) == ["drafter_lost"]
    assert rounds.off_reason == "drafter_slow"


def test_a_quarantined_drafter_is_replaced() -> None:
    rounds = running()
    commands = tell(rounds, verdict(4, (), epoch(), epoch(1), VerdictCause.QUARANTINED))
    assert only(commands, ChooseDrafter).exclude == {WORKER}
    assert rounds.off_reason == "drafter_quarantined"


@pytest.mark.parametrize(("position", "start"), [(5, 5), (-3, 0), (99, 6)])
def test_a_drafter_that_missed_a_commit_gets_the_tokens_again(position: int, start: int) -> None:
    rounds = running()
    tell(rounds, verdict(4, (5, 6), epoch(), epoch(1)))
    commit = DraftCommit(epoch(1), start, (*PROMPT, 5, 6)[start:], ON)
    assert rounds.step(DrafterAsked(FIRST, position)) == [TellDrafter(commit)]


# --- verifiers ------------------------------------------------------------------------------------------------------


def test_a_lost_verifier_is_replaced_and_both_are_opened_again_with_the_log() -> None:
    rounds = running()
    tell(rounds, verdict(4, (5,)))
    assert rounds.step(VerifierLost(FIRST, "gone"))[-1] == ChooseVerifier(frozenset({VERIFIER}))
    assert tell(rounds, verdict(5, (6,))) == [Count("late_verdict")]
    assert rounds.step(DrafterLost(FIRST, "x")) == [Count("late_event")]
    assert only(rounds.step(Logged(5)), Emit).chunk.token_ids == (5,), "what is in the log is shown meanwhile"
    opened, drafter = rounds.step(VerifierChosen(SPARE))
    assert isinstance(opened, OpenVerifier)
    assert (opened.worker_id, opened.generation, opened.token_ids) == (SPARE, generation(3), (*PROMPT, 5))
    assert opened.classes[-1] is TokenClass.DECODE
    assert drafter == OpenDrafter(WORKER, epoch(0, 3), (*PROMPT, 5), ON)
    assert rounds.step(DrafterAsked(generation(3), 5)) == [TellDrafter(DraftCommit(epoch(0, 3), 5, (), ON))]


def test_a_verifier_without_a_drafter_is_replaced_and_a_drafter_asked_for() -> None:
    rounds = running(drafter=None)
    rounds.step(VerifierLost(generation(0), "gone"))
    assert rounds.step(DrafterChosen(OTHER)) == [Count("late_event")]
    opened, asked = rounds.step(VerifierChosen(SPARE))
    assert isinstance(opened, OpenVerifier)
    assert asked == ChooseDrafter(frozenset())


def test_with_speculation_off_no_drafter_is_asked_for() -> None:
    rounds = running(drafter=None)
    rounds.step(Tuned(OFF, 1.0))
    rounds.step(VerifierLost(generation(0), "gone"))
    assert [type(command) for command in rounds.step(VerifierChosen(SPARE))] == [OpenVerifier]


def test_no_other_verifier_to_be_had_fails_the_generation() -> None:
    rounds = running()
    rounds.step(VerifierLost(FIRST, "gone"))
    (failed,) = rounds.step(VerifierChosen(None))
    assert isinstance(failed, Fail)
    assert isinstance(failed.error, Unavailable)


def test_verifiers_may_be_lost_only_so_often() -> None:
    rounds = running()
    for _ in range(MAX_REOPENS):
        rounds.step(VerifierLost(rounds.generation, "gone"))
        rounds.step(VerifierChosen(SPARE))
    assert isinstance(rounds.step(VerifierLost(rounds.generation, "gone"))[-1], Fail)
    assert rounds.over


@pytest.mark.parametrize("late", [VerifierLost(generation(0), "x"), VerifierChosen(SPARE)])
def test_a_late_event_of_a_verifier_changes_nothing(late: Event) -> None:
    assert running().step(late) == [Count("late_event")]
