"""The real machines, all interleavings: what holds in every state, and which planted mistakes a search finds.

The settings are small and the searches complete: no depth limit, every order of messages, every choice of right and
wrong drafts, and every place where one (in the slow ones, two) of the troubles can strike. `pytest -rP` prints the
numbers of states.
"""

import pytest

import orchestrator.rounds as rounds_module
from outrider.ids import Mode
from outrider.messages import Speculation
from tests.protocol import mistakes
from tests.protocol.explorer import found, searched
from tests.protocol.world import Setting
from verify_service.chain import Chain

OFF = Speculation()
SEQUENTIAL, SEQUENTIAL_2 = Speculation(1, 1, 1), Speculation(2, 2, 2)
PIPELINED, PIPELINED_2 = Speculation(1, 1, 2), Speculation(2, 1, 4)
ONE_OF_EACH = ("timer", "break", "drop", "double", "drafter", "verifier", "hang")


@pytest.mark.parametrize("mode", [Mode.GREEDY, Mode.REJECTION, Mode.BLOCK], ids=lambda mode: mode.name)
@pytest.mark.parametrize(
    "speculation", [SEQUENTIAL, SEQUENTIAL_2, PIPELINED, PIPELINED_2], ids=["1x1", "2x1", "1x2", "2x2"]
)
def test_without_trouble_every_run_ends_without_a_timer(speculation: Speculation, mode: Mode) -> None:
    searched(Setting(num_tokens=5 if mode is Mode.GREEDY else 4, speculation=speculation, mode=mode))


@pytest.mark.parametrize("mode", [Mode.GREEDY, Mode.REJECTION, Mode.BLOCK], ids=lambda mode: mode.name)
@pytest.mark.parametrize("trouble", ONE_OF_EACH)
def test_one_trouble_at_any_moment_breaks_nothing(trouble: str, mode: Mode) -> None:
    num_tokens = 3 if mode is Mode.GREEDY or trouble not in ("drafter", "break") else 2
    searched(Setting(num_tokens=num_tokens, speculation=PIPELINED, mode=mode, trouble=((trouble, 1),)))


@pytest.mark.parametrize("trouble", ["timer", "break", "double", "drafter", "verifier"])
def test_one_trouble_in_sequential_rounds_breaks_nothing(trouble: str) -> None:
    searched(Setting(num_tokens=4, speculation=SEQUENTIAL_2, trouble=((trouble, 1),)))


@pytest.mark.parametrize(
    ("before", "tunings"),
    [
        (PIPELINED, (OFF,)),
        (OFF, (PIPELINED,)),
        (PIPELINED, (OFF, PIPELINED)),
        (SEQUENTIAL, (Speculation(2, 2, 4),)),
        (Speculation(2, 2, 4), (SEQUENTIAL,)),
    ],
    ids=["off", "on", "off and on", "wider", "narrower"],
)
def test_a_policy_that_changes_at_any_moment_breaks_nothing(
    before: Speculation, tunings: tuple[Speculation, ...]
) -> None:
    searched(Setting(num_tokens=3, speculation=before, tunings=tunings, trouble=(("tune", len(tunings)),)))


@pytest.mark.parametrize("mode", [Mode.GREEDY, Mode.REJECTION], ids=lambda mode: mode.name)
def test_a_drafter_that_may_pass_at_any_time_breaks_nothing(mode: Mode) -> None:
    searched(Setting(num_tokens=4, speculation=PIPELINED, passes=True, mode=mode))


AHEAD, AHEAD_2 = Speculation(1, 1, 2, ahead=True), Speculation(2, 2, 4, ahead=True)
LONG = [pytest.param(AHEAD_2, mode, marks=pytest.mark.slow) for mode in (Mode.REJECTION, Mode.BLOCK)]


@pytest.mark.parametrize(
    ("speculation", "mode"),
    [
        *(
            (plan, mode)
            for plan in (SEQUENTIAL, PIPELINED, AHEAD)
            for mode in (Mode.GREEDY, Mode.REJECTION, Mode.BLOCK)
        ),
        (AHEAD_2, Mode.GREEDY),
        *LONG,
    ],
)
def test_a_verifier_that_runs_ahead_at_any_moment_breaks_nothing(speculation: Speculation, mode: Mode) -> None:
    num_tokens = 3 if mode is Mode.GREEDY else 2
    searched(Setting(num_tokens=num_tokens, speculation=speculation, mode=mode, ahead=True, trouble=(("timer", 1),)))


def test_a_policy_that_begins_and_ends_to_run_ahead_breaks_nothing() -> None:
    tunings = (AHEAD, PIPELINED)
    searched(Setting(num_tokens=3, speculation=PIPELINED, ahead=True, tunings=tunings, trouble=(("tune", 2),)))


def test_a_drafter_whose_context_fills_up_breaks_nothing() -> None:
    searched(Setting(num_tokens=4, speculation=PIPELINED, max_len=5))


def test_a_log_that_answers_late_and_rows_that_are_short_break_nothing() -> None:
    searched(Setting(num_tokens=4, speculation=Speculation(2, 2, 4), rows=(0, 2, 32), slow_log=True))


def test_a_commit_limit_close_ahead_of_the_log_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds_module, "MAX_AHEAD_OF_LOG", 2)
    monkeypatch.setattr(rounds_module, "PROGRESS_STRIDE", 1)
    for mode in (Mode.GREEDY, Mode.BLOCK):
        searched(Setting(num_tokens=4, speculation=Speculation(2, 2, 4), slow_log=True, mode=mode))


TWO = [
    ("break", "drafter"),
    ("double", "timer"),
    ("drafter", "timer"),
    ("break", "double"),
    ("verifier", "timer"),
    ("drop", "drop"),
]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("trouble", TWO, ids="+".join)
def test_two_troubles_at_any_moments_break_nothing(trouble: tuple[str, str]) -> None:
    budget = tuple((kind, trouble.count(kind)) for kind in sorted(set(trouble)))
    num_tokens = 2 if trouble == ("break", "drafter") else 3
    searched(Setting(num_tokens=num_tokens, speculation=PIPELINED, trouble=budget))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", [Mode.GREEDY, Mode.REJECTION, Mode.BLOCK], ids=lambda mode: mode.name)
@pytest.mark.parametrize("trouble", ONE_OF_EACH)
def test_one_trouble_in_longer_runs_breaks_nothing(trouble: str, mode: Mode) -> None:
    num_tokens, speculation = (4, PIPELINED_2) if mode is Mode.GREEDY and trouble != "drafter" else (3, PIPELINED)
    searched(Setting(num_tokens=num_tokens, speculation=speculation, mode=mode, trouble=((trouble, 1),)))


# --- planted mistakes -----------------------------------------------------------------------------------------------


def test_a_silent_drop_on_a_gap_is_found() -> None:
    setting = Setting(num_tokens=3, speculation=PIPELINED, trouble=(("drop", 1),), chain=mistakes.DropsOnAGap)
    assert "dead state" in found(setting).violation


def test_a_lost_stream_that_is_believed_to_carry_on_is_found() -> None:
    machine = mistakes.KeepsTheChainOfALostStream
    setting = Setting(num_tokens=3, speculation=PIPELINED, trouble=(("break", 1),), chain=machine)
    assert "dead state" in found(setting).violation


def test_epochs_numbered_by_both_sides_are_found() -> None:
    setting = Setting(num_tokens=3, speculation=SEQUENTIAL, window=mistakes.NumbersItsOwnEpochs)
    assert "round=0" in found(setting).violation, "the drafter is still in an epoch that a bonus has ended"


@pytest.mark.parametrize("machine", [mistakes.DrawsABonusTooEarly, mistakes.ForgetsWhatWasSeen])
def test_a_bonus_while_more_is_coming_is_found(machine: type[Chain]) -> None:
    setting = Setting(num_tokens=5, speculation=Speculation(2, 2, 4), chain=machine)
    assert "a bonus was drawn" in found(setting).violation


def test_acceptance_by_length_rather_than_epoch_is_found() -> None:
    setting = Setting(num_tokens=3, speculation=PIPELINED, chain=mistakes.AcceptsByLength)
    assert "never proposed in epoch" in found(setting).violation


def test_a_drafter_that_ignores_the_epoch_of_a_commit_is_found() -> None:
    machine = mistakes.IgnoresTheEpochOfACommit
    setting = Setting(num_tokens=3, speculation=PIPELINED, trouble=(("timer", 1),), window=machine)
    assert "dead state" in found(setting).violation


def test_waiting_for_a_drafter_that_has_not_heard_of_its_window_is_found() -> None:
    setting = Setting(
        num_tokens=3, speculation=OFF, tunings=(PIPELINED,), trouble=(("tune", 1),),
        chain=mistakes.WaitsForADrafterThatKnowsNothing,
    )  # fmt: skip
    assert "dead state" in found(setting).violation


def test_a_longer_proposal_dropped_without_a_word_is_found() -> None:
    setting = Setting(
        num_tokens=4, speculation=SEQUENTIAL, tunings=(Speculation(2, 2, 4),), trouble=(("tune", 1),),
        chain=mistakes.DropsGarbageOnly,
    )  # fmt: skip
    assert "dead state" in found(setting).violation


def test_a_limit_below_the_end_of_its_own_proposal_is_found() -> None:
    setting = Setting(
        num_tokens=4, speculation=Speculation(2, 2, 4), tunings=(SEQUENTIAL,), trouble=(("tune", 1),),
        window=mistakes.ClaimsTooLowALimit,
    )  # fmt: skip
    assert "taken for garbage" in found(setting).violation


def test_a_trace_is_a_shortest_one_and_can_be_read() -> None:
    trace = found(Setting(num_tokens=3, speculation=PIPELINED, chain=mistakes.AcceptsByLength)).trace
    assert trace[:3] == ["start", "to_verifier: OpenVerifier", "to_drafter: OpenDrafter"]
    assert len(trace) < 12
