"""All interleavings with a drafter that guesses trees: what `test_explorer` shows of runs holds of them too."""

import pytest

import orchestrator.rounds as rounds_module
from outrider.errors import ProtocolError
from outrider.ids import Mode
from outrider.messages import Speculation
from tests.protocol import mistakes
from tests.protocol.explorer import explore, found, searched
from tests.protocol.world import Setting
from verify_service import events as verify
from verify_service.chain import Chain

DEEP, FLAT, WIDE = Speculation(2, 2, 2), Speculation(1, 1, 1), Speculation(2, 2, 4)
MODES = pytest.mark.parametrize("mode", [Mode.GREEDY, Mode.REJECTION], ids=lambda mode: mode.name)


@MODES
@pytest.mark.parametrize("speculation", [DEEP, FLAT, WIDE], ids=["deep", "flat", "wide window"])
def test_without_trouble_every_run_ends_without_a_timer(speculation: Speculation, mode: Mode) -> None:
    searched(Setting(num_tokens=5, speculation=speculation, mode=mode, trees=True))


@MODES
@pytest.mark.parametrize("trouble", ["timer", "break", "drop", "double", "drafter", "verifier", "hang"])
def test_one_trouble_at_any_moment_breaks_nothing(trouble: str, mode: Mode) -> None:
    searched(Setting(num_tokens=3, speculation=DEEP, mode=mode, trouble=((trouble, 1),), trees=True))


@pytest.mark.parametrize("trouble", ["timer", "double", "unhint", "drop"])
def test_hints_that_cannot_tell_a_path_break_nothing(trouble: str) -> None:
    searched(Setting(num_tokens=3, speculation=DEEP, trouble=((trouble, 1),), hints=True, trees=True))


@pytest.mark.parametrize("tunings", [(FLAT,), (Speculation(),), (WIDE,)], ids=["shallower", "off", "wider"])
def test_a_policy_that_changes_at_any_moment_breaks_nothing(tunings: tuple[Speculation, ...]) -> None:
    searched(Setting(num_tokens=3, speculation=DEEP, tunings=tunings, trouble=(("tune", 1),), trees=True))


def test_a_commit_limit_close_ahead_of_the_log_cuts_trees_and_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds_module, "MAX_AHEAD_OF_LOG", 2)
    monkeypatch.setattr(rounds_module, "PROGRESS_STRIDE", 1)
    searched(Setting(num_tokens=4, speculation=DEEP, slow_log=True, trees=True))


class KeepsTheEpochOfATree(Chain):
    """Goes on in the epoch of a tree that was accepted whole, as behind a run."""

    def _end_epoch(self, out: list[verify.Command], *, plain: bool = False) -> None:
        if self._testing is None and self._unreported.reported_len < self.committed_len:
            self._forget_chain(out)
        else:
            super()._end_epoch(out, plain=plain)


def test_a_tree_that_does_not_end_its_epoch_is_found() -> None:
    with pytest.raises(ProtocolError, match="differs from the chain"):
        explore(Setting(num_tokens=4, speculation=DEEP, chain=KeepsTheEpochOfATree, trees=True))


def test_acceptance_by_length_rather_than_epoch_is_found() -> None:
    setting = Setting(
        num_tokens=4, speculation=DEEP, trouble=(("break", 1),), chain=mistakes.AcceptsByLength, trees=True
    )
    assert "never proposed" in found(setting).violation
