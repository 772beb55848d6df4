"""Scenes of the real machines against the transcripts that stand beside this file.

`REWRITE_TRANSCRIPTS=1 pytest tests/protocol/test_transcripts.py` writes them anew; read the difference before you
commit it.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator import events as orch
from outrider.ids import Mode, WorkerId
from outrider.messages import Speculation
from tests.protocol.stage import Stage

FOLDER = Path(__file__).parent / "transcripts"
SEQUENTIAL, PIPELINED = Speculation(2, 2, 2), Speculation(2, 2, 4)
LONGEST = 72


def full_acceptance_sequential() -> Stage:
    """window = gamma: a run is tested, a bonus token follows, and the next run starts behind it."""
    stage = Stage(SEQUENTIAL)
    for _ in range(2):
        stage.play("decode", "draft")
        stage.propose()
        stage.play("propose", "verify", "verdicts", "log")
    return stage


def full_acceptance_pipelined() -> Stage:
    """window = 2 gamma: the second run is under way while the first is tested, and meets the held row."""
    stage = Stage(PIPELINED, num_tokens=5)
    stage.play("decode", "draft")
    stage.propose()
    stage.deliver("propose")
    stage.verify()
    stage.propose()
    stage.play("verdicts", "draft", "propose", "verify")
    stage.propose()
    stage.play("verdicts", "draft", "propose", "verify", "verdicts", "log")
    return stage


def rejection_at_each_position() -> Stage:
    """A run of three whose first, second, third token is wrong; the rest of it is wasted."""
    stage = Stage(Speculation(3, 3, 3), num_tokens=9, wrong=(3, 5, 8))
    for _ in range(3):
        stage.play("decode", "draft")
        stage.propose()
        stage.play("propose", "verify", "verdicts", "log")
    return stage


def rejection_at_the_held_row() -> Stage:
    """A rejection on the held row costs no pass, and takes everything in flight with it."""
    stage = Stage(PIPELINED, wrong=(5,))
    stage.play("decode", "draft")
    stage.propose()
    stage.play("propose", "verify")
    stage.propose()
    stage.play("propose", "verify", "verdicts", "draft")
    return stage


def late_and_double_verdicts() -> Stage:
    """A verdict that comes twice, and one of a stream that is closed: both change nothing."""
    stage = Stage(SEQUENTIAL, num_tokens=9)
    stage.play("decode", "draft")
    stage.propose()
    stage.play("propose", "verify")
    first = stage.streams["verdicts"][0]
    assert isinstance(first, orch.VerdictArrived)
    stage.play("verdicts", "draft")
    stage.note("the same verdict once more")
    stage.orchestrator(first)
    stage.note("the verifier is lost and replaced; then the old stream's verdict comes a third time")
    stage.orchestrator(orch.VerifierLost(first.opened, "connection reset"))
    stage.orchestrator(orch.VerifierChosen(WorkerId("v2")))
    stage.orchestrator(first)
    return stage


def patience() -> Stage:
    """A slow drafter: patience runs out, one plain token is drawn, and what was under way is stale."""
    stage = Stage(PIPELINED)
    stage.play("decode", "draft")
    stage.verify()
    stage.propose()
    stage.note("the proposal is still on its way")
    stage.expire()
    stage.play("verify", "propose", "verdicts", "draft")
    stage.propose()
    stage.play("propose", "verify", "verdicts")
    return stage


def drafter_loss_and_replacement() -> Stage:
    """The verifier goes on plain at once; the next drafter starts from the length that answers its attachment."""
    stage = Stage(PIPELINED, num_tokens=8)
    stage.play("decode", "draft")
    stage.propose()
    stage.orchestrator(orch.DrafterLost(stage.rounds.generation, "connection reset"))
    stage.play("draft", "decode")
    stage.note("the lost drafter's last proposal arrives")
    stage.play("propose", "verify_once")
    stage.orchestrator(orch.DrafterChosen(WorkerId("d2")))
    stage.play("decode", "verdicts", "draft")
    stage.propose()
    stage.play("propose", "verify", "verdicts")
    return stage


def verifier_loss() -> Stage:
    """Both are opened again with the log's tokens, in new generations; the client sees a pause."""
    stage = Stage(PIPELINED, num_tokens=4)
    stage.play("decode", "draft")
    stage.propose()
    stage.play("propose", "verify", "verdicts")
    stage.orchestrator(orch.VerifierLost(stage.rounds._opened, "connection reset"))
    stage.streams["decode"].clear()
    stage.play("draft", "log")
    stage.orchestrator(orch.VerifierChosen(WorkerId("v2")))
    stage.play("decode", "draft")
    stage.propose()
    stage.play("propose", "verify", "verdicts", "log")
    return stage


def cancel() -> Stage:
    """The client goes away while a proposal is under way: both streams are closed, and what comes later is nothing."""
    stage = Stage(PIPELINED)
    stage.play("decode", "draft")
    stage.propose()
    stage.play("propose", "verify")
    stage.orchestrator(orch.Cancelled())
    stage.play("decode", "draft")
    stage.note("the verdict was under way")
    stage.deliver("verdicts")
    return stage


def stop_in_mid_run() -> Stage:
    """The second of three accepted tokens ends the generation: the third never happened."""
    stage = Stage(Speculation(3, 3, 3), stop_at=4)
    stage.play("decode", "draft")
    stage.propose()
    stage.play("propose", "verify", "verdicts", "decode", "draft", "log")
    return stage


def rejection_mode_header_and_body() -> Stage:
    """The length is announced before the first draw; patience ends with the header, and the body is waited for."""
    stage = Stage(PIPELINED, mode=Mode.REJECTION, wrong=(4,))
    stage.play("decode", "draft")
    stage.verify()
    stage.begin()
    stage.deliver("propose")
    stage.note("the drafter is slow: no patience runs, only the hard limit of the body")
    stage.verify()
    stage.draw()
    stage.play("propose", "verify", "verdicts", "draft")
    return stage


def a_pass() -> Stage:
    """A drafter that finds nothing to propose says until where, and the verifier decodes plain without waiting."""
    stage = Stage(PIPELINED, num_tokens=4)
    stage.play("decode", "draft")
    stage.begin(count=0, until_len=5)
    stage.play("propose", "verify", "verdicts", "draft")
    stage.propose()
    stage.play("propose", "verify", "verdicts", "log")
    return stage


def reset_on_a_gap() -> Stage:
    """A lost proposal shows in the next one: the epoch ends without a token, and drafting starts again."""
    stage = Stage(PIPELINED)
    stage.play("decode", "draft")
    stage.propose()
    stage.propose()
    stage.note("the first proposal is lost")
    stage.streams["propose"].popleft()
    stage.play("propose", "verdicts", "draft")
    stage.propose()
    stage.play("propose", "verify", "verdicts")
    return stage


def hints() -> Stage:
    """A hint starts the next epoch before the commit, which confirms it; one that comes later changes nothing."""
    stage = Stage(PIPELINED, num_tokens=8, wrong=(3, 5), hints=True)
    stage.play("decode", "draft")
    stage.propose()
    stage.play("propose", "verify", "hints")
    stage.note("the chain goes on behind the hinted token; the commit is still on its way")
    stage.propose()
    stage.play("verdicts", "draft", "propose", "verify")
    stage.note("this time the commit is faster")
    stage.play("verdicts", "draft", "hints")
    stage.propose()
    return stage


def hints_behind_a_gap() -> Stage:
    """A hint is lost: the next one does not say all that came before it, and the commits are waited for."""
    stage = Stage(PIPELINED, wrong=(3,), hints=True)
    stage.play("decode", "draft")
    stage.propose()
    stage.play("propose", "verify")
    stage.expire()
    stage.verify()
    stage.note("the first hint is lost")
    stage.streams["hints"].popleft()
    stage.play("hints", "verdicts", "draft")
    stage.propose()
    stage.play("propose", "verify", "verdicts", "log")
    return stage


SCENES: list[Callable[[], Stage]] = [
    full_acceptance_sequential, full_acceptance_pipelined, rejection_at_each_position, rejection_at_the_held_row,
    late_and_double_verdicts, patience, drafter_loss_and_replacement, verifier_loss, cancel, stop_in_mid_run,
    rejection_mode_header_and_body, a_pass, reset_on_a_gap, hints, hints_behind_a_gap,
]  # fmt: skip


def written(scene: Callable[[], Stage]) -> str:
    title = scene.__name__.replace("_", " ").capitalize()
    return "\n".join([title, "", scene.__doc__ or "", "", *scene().lines, ""])


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_a_scene_is_played_as_it_is_written(scene: Callable[[], Stage]) -> None:
    path, text = FOLDER / f"{scene.__name__}.txt", written(scene)
    if os.environ.get("REWRITE_TRANSCRIPTS"):
        path.write_text(text)
    assert text == path.read_text()
    assert len(text.splitlines()) <= LONGEST, "a page each"


def test_no_transcript_is_left_over() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == {scene.__name__ for scene in SCENES}
