"""The output law with several drafters as one equals the target's, by exact enumeration of the real machines.

The real composition of the real copying drafters and of one that draws from a table; nothing is sampled.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from draft_service import events as draft
from draft_service.drafters.composed import Composed
from draft_service.drafters.prediction import PredictionDrafter
from draft_service.drafters.prompt_lookup import PromptLookup
from draft_service.drafters.protocol import Drafter, DrafterInfo, DraftSession, Guessed, Outcome, Plan, Work
from orchestrator import events as orch
from outrider.ids import Mode, SessionId
from outrider.messages import SamplingParams, Speculation
from outrider.noise import Purpose
from outrider.sampling import one_hot_row
from tests.exactness.protocol_play import (
    PROMPT_LEN,
    SESSION,
    CountedSource,
    Play,
    Tables,
    TreeSource,
    _Performance,
)
from tests.exactness.test_protocol_enumerated import CAUGHT, DRAWN, EXACT, PIPELINED, SEQUENTIAL, distance
from tests.exactness.toy import VOCAB

BOTH = pytest.mark.parametrize("mode", [Mode.REJECTION, Mode.BLOCK], ids=["token rule", "block rule"])
PREDICTION = (2, 0, 1, 2)


class FromTable:
    """Draws from a table, one token at a time, with outcomes that are dictated."""

    def __init__(self, tables: Tables, source: CountedSource) -> None:
        self.info = DrafterInfo("table", "", VOCAB, 64)
        self._tables, self._source = tables, source

    def open(self, session: DraftSession, ids: Sequence[int]) -> None: ...

    def plan(self, session_id: SessionId, ids: Sequence[int], count: int) -> Plan:
        return Plan(count)

    def draw(self, batch: Sequence[Work]) -> list[Outcome]:
        [work] = batch
        row = self._tables.draft(tuple(work.ids))
        self._source.use(Purpose.DRAFT, len(work.ids), work.epoch)
        return [Guessed((self._source.inner.draw_counts(row),), (row,))]

    def rewind(self, session_id: SessionId, length: int) -> None: ...

    def close(self, session_id: SessionId, keep: bool) -> None: ...


class Anticipating(Composed):
    """Looks at what was drawn before it settles who has drawn it: a token it does not like is another one's."""

    def draw(self, batch: Sequence[Work]) -> list[Outcome]:
        [outcome] = super().draw(batch)
        if isinstance(outcome, Guessed) and outcome.token_ids == (0,) and outcome.rows != (one_hot_row(0),):
            outcome = Guessed((1,), (one_hot_row(1),))
        return [outcome]


@dataclass(frozen=True)
class ComposedPlay(Play):
    """A play whose drafter is a composition."""

    composition: type[Composed] = Composed

    def __call__(self, source: TreeSource) -> tuple[int, ...]:
        return _Composing(self, CountedSource(source)).run()


class _Composing(_Performance):
    """One generation, with a drafter behind the window."""

    play: ComposedPlay
    drafter: Drafter

    def _open_drafter(self, opened: orch.OpenDrafter) -> None:
        super()._open_drafter(opened)
        copying: list[Drafter] = [PredictionDrafter(VOCAB, context_len=64), PromptLookup(VOCAB, context_len=64)]
        self.drafter = self.play.composition([*copying, FromTable(self.play.tables, self.source)])
        sampling = SamplingParams()
        session = DraftSession(SESSION, self.play.mode, sampling, b"", PROMPT_LEN, prediction=PREDICTION)
        self.drafter.open(session, opened.token_ids)

    def tell_window(self, event: draft.Event, count: int | None = None) -> None:
        if self.window is None:
            return
        for command in self.window.step(event):
            match command:
                case draft.Begin():
                    self._begin(command)
                case draft.Draw():
                    self._draw(command)
                case draft.Rewind():
                    self.drafter.rewind(SESSION, command.length)
                case draft.Send():
                    self._send(command.message)
                case _:
                    pass

    def _begin(self, begin: draft.Begin) -> None:
        assert self.window is not None
        plan = self.drafter.plan(SESSION, self.window.ids, begin.count)
        assert plan is not None
        self.play.witnesses.add(plan.drafter)
        self.tell_window(draft.Planned(begin.ticket, plan.count, plan.until_len))

    def _draw(self, command: draft.Draw) -> None:
        window, left = self.window, command.count
        assert window is not None
        while left:
            [outcome] = self.drafter.draw([Work(SESSION, window.epoch, window.ids, left)])
            assert isinstance(outcome, Guessed)
            left -= len(outcome.token_ids)
            self.tell_window(draft.Drawn(command.ticket, outcome.token_ids, outcome.rows))


SCHEDULES = {
    "sequential": ("|dppvc", SEQUENTIAL),
    "in flight": ("|ddppvdppvc", PIPELINED),
    "longer, in flight": ("|dppdvcpp", Speculation(2, 1, 4)),
    "swapped in flight": ("ddppvs|vccdppvc", PIPELINED),
    "with patience": ("dvtv|ppcddppvc", PIPELINED),
    "with hints": ("|dppvhdcdppvc", Speculation(2, 1, 4)),
}


@BOTH
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_law_is_the_targets_whoever_makes_the_proposals(name: str, mode: Mode) -> None:
    schedule, speculation = SCHEDULES[name]
    play = ComposedPlay(DRAWN, schedule, mode, speculation)
    assert distance(play) < EXACT
    assert {"prediction", "table"} <= play.witnesses


def test_lookup_takes_part_too() -> None:
    play = ComposedPlay(DRAWN, "|dppvc", Mode.REJECTION, SEQUENTIAL, length=4)
    assert distance(play) < EXACT
    assert {"prediction", "prompt_lookup", "table"} <= play.witnesses


def test_who_draws_settled_after_looking_is_caught() -> None:
    play = ComposedPlay(DRAWN, "|dppvc", Mode.REJECTION, SEQUENTIAL, composition=Anticipating)
    assert distance(play) > CAUGHT
