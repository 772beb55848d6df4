"""Nobody waits without bound: the promise at the head of `verify_service/scheduler.py`, while long prompts are read."""

import random
import sys
from collections import Counter
from collections.abc import Iterator
from types import FrameType

import pytest

from outrider.ids import Generation, Mode, SessionId
from outrider.messages import Proposal, SamplingParams, Speculation
from outrider.model.toy import ToyLanguage, ToyRunner
from tests.unit.verify_desk import VOCAB, Client, Desk, Request, noisy_draft
from verify_service.engine import EngineSettings
from verify_service.scheduler import longest_wait
from verify_service.sessions import Session

GREEDY, WARM = SamplingParams(temperature=0.0), SamplingParams(temperature=0.8)


class Hunger:
    """Counts, for each session that has something to feed, the decode passes in a row that had no rows for it."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.missed: Counter[int] = Counter()
        self.hungry: dict[int, int] = {}
        self.worst = 0
        self.bound = 0

    def step(self) -> None:
        before = self.desk.engine.counters["decode_passes"]
        self.desk.step()
        passed = self.desk.engine.counters["decode_passes"] - before
        sessions = list(self.sessions())
        for session in sessions:
            fed = self.hungry.get(session.ticket) != session.chain.committed_len
            self.missed[session.ticket] = 0 if fed else self.missed[session.ticket] + passed
            self.worst = max(self.worst, self.missed[session.ticket])
            bound = longest_wait(len(sessions), 32, most_rows=17, whole=session.chain.mode is Mode.BLOCK)
            self.bound = max(self.bound, bound)
            assert self.missed[session.ticket] < bound, (session.opened.session_id, len(sessions))
        self.hungry = {session.ticket: session.chain.committed_len for session in sessions if session.chain.wants_rows}

    def sessions(self) -> Iterator[Session]:
        """Those whose KV is complete."""
        return (session for session in self.desk.engine._roster.in_turn() if session.ready)


def talker(desk: Desk, number: int, mode: Mode, dice: random.Random) -> Client:
    """A session with a short prompt and an untiring drafter, or none."""
    gamma = dice.randint(1, 16)
    plan = Speculation(gamma, gamma, min(16, gamma * dice.randint(1, 3)))
    request = Request(
        f"talker{number}", (number % VOCAB,), mode, GREEDY if mode is Mode.GREEDY else WARM,
        b"" if mode is Mode.GREEDY else bytes([number]) * 16, 300, plan,
    )  # fmt: skip
    return Client(desk, request, noisy_draft(0.05) if dice.random() < 0.9 else None, eager=1.0)


@pytest.mark.parametrize("modes", [(Mode.GREEDY,), (Mode.BLOCK,), tuple(Mode)], ids=["greedy", "block", "all"])
def test_every_session_gets_rows_within_the_stated_number_of_passes_while_long_prompts_come_and_go(
    modes: tuple[Mode, ...],
) -> None:
    dice = random.Random(6)
    desk = Desk(ToyRunner(ToyLanguage(VOCAB, seed=5)))
    hunger = Hunger(desk)
    talkers = [talker(desk, number, dice.choice(modes), dice) for number in range(14)]
    readers: list[Client] = []
    for step in range(200):
        if step % 10 == 0:
            prompt = tuple(dice.randrange(VOCAB) for _ in range(dice.choice((70, 300, 1000))))
            readers.append(Client(desk, Request(f"reader{step}", prompt, max_tokens=dice.randint(1, 20))))
        for client in talkers:
            client.act()
        hunger.step()
    assert all(len(client.output) >= 200 // hunger.bound for client in talkers if not client.done)
    assert sum(client.done for client in readers) > 5
    assert hunger.worst > 0, "the pass was never too small, so nothing was tried"


def test_the_stated_number_of_passes_is_reached_but_not_passed() -> None:
    """Nine sessions of eight rows each share passes of 32: the last of them is in the third pass."""
    desk = Desk(ToyRunner(ToyLanguage(VOCAB, seed=5)))
    clients = [
        Client(desk, Request(f"s{number}", speculation=Speculation(7, 7, 7)), noisy_draft(0.0), eager=1.0)
        for number in range(9)
    ]
    desk.step()
    for client in clients:
        client.act()
    for wanted in (4, 8, 9):
        assert sum(bool(client.output) for client in clients) < wanted
        desk.step()
        assert sum(bool(client.output) for client in clients) == wanted
    assert longest_wait(9, 32, most_rows=8) == 3


def test_trees_wait_until_they_are_first_in_line() -> None:
    """Three trees of twenty tokens: no two of them fit into one pass of 32, and none is cut."""
    desk = Desk(ToyRunner(ToyLanguage(VOCAB, seed=5)))
    clients = [
        Client(desk, Request(f"s{number}", speculation=Speculation(1, 1, 1)), noisy_draft(0.0)) for number in range(3)
    ]
    desk.step()
    for client in clients:
        base = len(client.committed)
        name = SessionId(client.request.session_id)
        desk.propose(Proposal(name, client.epoch, base, base, base + 1, tuple(range(20)), (), (-1,) * 20))
    for served in (1, 2, 3):
        desk.step()
        assert sum(bool(client.output) for client in clients) == served
    assert longest_wait(3, 32, most_rows=21, whole=True) == 3


def test_planted_mistake_a_session_that_keeps_its_turn_makes_others_wait_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control: rows go to the oldest session first, again and again."""
    monkeypatch.setattr("verify_service.roster.Roster.served", lambda *_: None)
    with pytest.raises(AssertionError):
        test_every_session_gets_rows_within_the_stated_number_of_passes_while_long_prompts_come_and_go((Mode.GREEDY,))


def test_a_step_reads_one_stretch_of_prompt_while_anybody_can_decode_even_if_nobody_does() -> None:
    """A proposal that arrives in the middle of it waits for no more than that."""
    runner = ToyRunner(ToyLanguage(VOCAB, seed=5))
    desk = Desk(runner, EngineSettings(fill_beside=1, fill_alone=8))
    waiting = Client(desk, Request("waiting", patience_s=100.0), noisy_draft(0.0), eager=1.0)
    desk.step()
    for number in range(8):
        prompt = (number, *range(20)) * 20
        Client(desk, Request(f"reader{number}", prompt, max_tokens=1, generation=Generation(1, 0)))
    runner.passes.clear()
    for count in range(1, 9):
        desk.step()
        assert runner.passes == [64] * count
    waiting.act()
    desk.step()
    assert len(waiting.output) == 4


def _calls_of_a_pass(num_sessions: int) -> float:
    """Return how many function calls a decode pass takes, for each of its sessions."""
    runner = ToyRunner(ToyLanguage(VOCAB, seed=5), row_classes=(8, 64), num_blocks=256)
    desk = Desk(runner, EngineSettings(fill_beside=num_sessions))
    for number in range(num_sessions):
        Client(desk, Request(f"s{number}", (number % VOCAB,), speculation=Speculation()))
    for _ in range(3):
        desk.step()
    calls = [0]

    def count(_frame: FrameType, event: str, _arg: object) -> None:
        calls[0] += event == "call"

    sys.setprofile(count)
    try:
        desk.step()
    finally:
        sys.setprofile(None)
    assert runner.passes[-1] == num_sessions
    return calls[0] / num_sessions


def test_a_session_costs_a_pass_no_more_work_beside_many_others_than_beside_few() -> None:
    assert _calls_of_a_pass(64) <= _calls_of_a_pass(8)
