"""Hints as one more stream beside the commits: every interleaving, every loss, every double, and what a search finds.

Settings and checks are those of `test_explorer`; a hint races the commit that it announces in all of them.
"""

from typing import Any

import pytest

from outrider.errors import ProtocolError
from outrider.ids import Mode
from outrider.messages import Speculation
from tests.protocol import mistakes
from tests.protocol.explorer import explore, found, searched
from tests.protocol.world import Setting

OFF = Speculation()
SEQUENTIAL, SEQUENTIAL_2 = Speculation(1, 1, 1), Speculation(2, 2, 2)
PIPELINED, PIPELINED_2 = Speculation(1, 1, 2), Speculation(2, 1, 4)
TROUBLES = ("timer", "break", "drop", "double", "drafter", "verifier", "hang", "unhint")


def hinting(num_tokens: int = 3, speculation: Speculation = PIPELINED, *trouble: str, **fields: Any) -> Setting:
    budget = tuple((kind, trouble.count(kind)) for kind in sorted(set(trouble)))
    return Setting(num_tokens, speculation, hints=True, trouble=budget, **fields)


@pytest.mark.parametrize("mode", [Mode.GREEDY, Mode.REJECTION, Mode.BLOCK], ids=lambda mode: mode.name)
@pytest.mark.parametrize(
    "speculation", [SEQUENTIAL, SEQUENTIAL_2, PIPELINED, PIPELINED_2], ids=["1x1", "2x1", "1x2", "2x2"]
)
def test_hints_that_race_their_commits_break_nothing(speculation: Speculation, mode: Mode) -> None:
    searched(hinting(4 if mode is Mode.GREEDY else 3, speculation, mode=mode))


@pytest.mark.parametrize("mode", [Mode.GREEDY, Mode.REJECTION, Mode.BLOCK], ids=lambda mode: mode.name)
@pytest.mark.parametrize("trouble", TROUBLES)
def test_hints_and_one_trouble_at_any_moment_break_nothing(trouble: str, mode: Mode) -> None:
    brief = trouble == "break" or (trouble in ("drafter", "timer", "verifier") and mode is not Mode.GREEDY)
    speculation = SEQUENTIAL if trouble == "break" and mode is not Mode.GREEDY else PIPELINED
    searched(hinting(2 if brief else 3, speculation, trouble, mode=mode))


@pytest.mark.parametrize("trouble", [("unhint", "unhint"), ("unhint", "timer"), ("unhint", "double")], ids="+".join)
def test_hints_that_are_lost_beside_another_trouble_break_nothing(trouble: tuple[str, str]) -> None:
    searched(hinting(3, PIPELINED, *trouble))


@pytest.mark.parametrize(
    ("before", "tunings"),
    [
        (PIPELINED, (OFF,)),
        (OFF, (PIPELINED,)),
        (PIPELINED, (OFF, PIPELINED)),
        (SEQUENTIAL, (PIPELINED,)),
        (PIPELINED, (SEQUENTIAL,)),
    ],
    ids=["off", "on", "off and on", "wider", "narrower"],
)
def test_a_policy_that_changes_between_a_hint_and_its_commit_breaks_nothing(
    before: Speculation, tunings: tuple[Speculation, ...]
) -> None:
    searched(hinting(3, before, *["tune"] * len(tunings), tunings=tunings))


@pytest.mark.parametrize("mode", [Mode.GREEDY, Mode.REJECTION], ids=lambda mode: mode.name)
def test_hints_to_a_drafter_that_may_pass_break_nothing(mode: Mode) -> None:
    searched(hinting(4, PIPELINED, mode=mode, passes=True))


def test_hints_to_a_drafter_whose_context_fills_up_break_nothing() -> None:
    searched(hinting(4, PIPELINED, max_len=5))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", [Mode.GREEDY, Mode.REJECTION, Mode.BLOCK], ids=lambda mode: mode.name)
@pytest.mark.parametrize("trouble", TROUBLES)
def test_hints_and_one_trouble_in_longer_runs_break_nothing(trouble: str, mode: Mode) -> None:
    searched(hinting(3, PIPELINED_2 if mode is Mode.GREEDY else PIPELINED, trouble, mode=mode))


# --- planted mistakes -----------------------------------------------------------------------------------------------


def test_a_window_that_widens_without_a_token_is_found() -> None:
    setting = hinting(3, SEQUENTIAL, "tune", tunings=(PIPELINED,), window=mistakes.WidensOnAConfirmation)
    assert "a bonus was drawn" in found(setting).violation


def test_hints_taken_over_a_gap_are_found() -> None:
    setting = hinting(4, PIPELINED, "unhint", "timer", window=mistakes.TakesHintsOverAGap)
    assert "seen what was not committed" in found(setting).violation


def test_hints_of_another_generation_are_found() -> None:
    setting = hinting(2, PIPELINED, "drafter", "drop", window=mistakes.TakesHintsOfAnyGeneration)
    assert "taken for garbage" in found(setting).violation


@pytest.mark.parametrize("machine", [mistakes.DraftsAgainOnAConfirmation, mistakes.TakesLateHints])
def test_a_chain_that_is_started_twice_in_one_epoch_is_found(machine: type) -> None:
    with pytest.raises(ProtocolError, match="differs from the chain"):
        explore(hinting(3, PIPELINED, window=machine))


def test_a_silence_that_outlasts_its_epoch_is_found() -> None:
    setting = hinting(3, PIPELINED, passes=True, window=mistakes.StaysSilentAfterAHint)
    assert "dead state" in found(setting).violation


def test_a_window_that_is_not_taken_from_a_confirmation_is_found() -> None:
    machine = mistakes.TakesAConfirmationForALateCommit
    assert "dead state" in found(hinting(3, OFF, "tune", tunings=(PIPELINED,), window=machine)).violation
