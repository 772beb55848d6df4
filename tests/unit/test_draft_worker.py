"""The draft worker's token steps: proposals, epochs, catching up, failures, reports; without thread or network."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from draft_service.drafters.prompt_lookup import PromptLookup
from draft_service.drafters.protocol import Drafter, DrafterInfo, DraftSession, Guessed, Outcome, Plan, Work
from draft_service.drafters.toy import noisy
from draft_service.orders import Closed, Died, GiveFeatures
from draft_service.session import SessionKey
from draft_service.window import FOREVER
from draft_service.worker import MAX_FAILED_STEPS, STATUS_INTERVAL_S, DrafterBroken
from outrider.errors import Internal, ProtocolError
from outrider.ids import Epoch, Generation, Mode, SessionId
from outrider.messages import Pass, Proposal, ProposalHeader, Speculation, TargetFeatures, Tensor
from outrider.model.toy import ToyLanguage
from tests.unit.draft_desk import ADDRESS, GENERATION, Desk, opening, sequential
from tests.unit.drafter_bench import TARGET, VOCAB, continued, likeliest, prompt, toy

OFF = Speculation()


def greedy(ids: Sequence[int], count: int) -> list[int]:
    return continued(TARGET, ids, count, likeliest)


@dataclass
class Round:
    """One greedy round, played by the test: what was proposed, accepted, and how the text went on."""

    desk: Desk
    key: SessionKey
    text: list[int]
    number: int = 0

    def play(self, gamma: int, reject_at: int | None = None) -> int:
        """Judge one proposal as the target would, or reject it at an offset; return how many tokens were accepted."""
        self.desk.run()
        [proposal] = self.desk.sent(Proposal, self.key.session_id)
        assert (proposal.base_len, proposal.epoch.round) == (len(self.text), self.number)
        accepted = 0
        while accepted < len(proposal.token_ids) and accepted != reject_at:
            if [proposal.token_ids[accepted]] != greedy(self.text, 1):
                break
            self.text.append(proposal.token_ids[accepted])
            accepted += 1
        own = (proposal.token_ids[accepted] + 1) % VOCAB if accepted == reject_at else greedy(self.text, 1)[0]
        self.text.append(own)
        self.number += 1
        committed = self.text[-accepted - 1 :]
        self.desk.commit(self.key, len(self.text) - len(committed), committed, self.number, sequential(gamma))
        return accepted


# --- proposing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [1, 2, 5, 8])
def test_a_perfect_drafter_is_accepted_in_full_round_after_round(gamma: int) -> None:
    desk = Desk(toy()[0])
    ids = prompt(20)
    rounds = Round(desk, desk.open(opening("s", ids, sequential(gamma))), list(ids))
    assert [rounds.play(gamma) for _ in range(20)] == [gamma] * 20
    assert rounds.text == ids + greedy(ids, 20 * (gamma + 1))


def test_rejections_at_every_offset_leave_a_perfect_drafter_perfect() -> None:
    """Case 20, over three KV blocks."""
    desk = Desk(toy()[0])
    rounds = Round(desk, desk.open(opening("s", prompt(20), sequential(8))), prompt(20))
    for turn in range(24):
        assert rounds.play(8, reject_at=turn % 8) == turn % 8
        assert rounds.play(8) == 8


def test_after_fifty_plain_tokens_a_perfect_drafter_is_perfect_at_once() -> None:
    """Case 19."""
    desk = Desk(toy()[0])
    ids = prompt(20)
    key = desk.open(opening("s", ids, sequential(4)))
    rounds = Round(desk, key, list(ids))
    rounds.play(4)
    for _ in range(50):
        rounds.text += greedy(rounds.text, 1)
        rounds.number += 1
        desk.commit(key, len(rounds.text) - 1, rounds.text[-1:], rounds.number, OFF)
        desk.run()
    assert not desk.messages()
    desk.commit(key, len(rounds.text), (), rounds.number + 1, sequential(4))
    rounds.number += 1
    assert [rounds.play(4) for _ in range(2)] == [4, 4]


def test_a_pipelined_chain_runs_to_its_window_and_on_with_each_commit() -> None:
    desk = Desk(toy()[0])
    ids = prompt(10)
    speculation = Speculation(gamma=4, restart_gamma=2, window=10)
    key = desk.open(opening("s", ids, speculation))
    desk.run()
    chain = greedy(ids, 14)
    sent = desk.sent(Proposal)
    assert [(p.base_len, p.limit, list(p.token_ids)) for p in sent] == [
        (10, 20, chain[:2]),
        (12, 20, chain[2:6]),
        (16, 20, chain[6:10]),
    ]
    desk.commit(key, 10, chain[:2], 0, speculation)
    desk.run()
    assert [(p.base_len, p.seen_len, list(p.token_ids)) for p in desk.sent(Proposal)] == [(20, 12, chain[10:12])]


@pytest.mark.parametrize("mode", [Mode.REJECTION, Mode.BLOCK])
def test_a_header_with_the_count_is_out_before_the_first_token_is_drawn(mode: Mode) -> None:
    inner, _ = toy()
    desk = Desk(inner)
    seen_at_draw: list[int] = []

    class Watched(Forwarding):
        def draw(self, batch: Sequence[Work]) -> list[Outcome]:
            seen_at_draw.append(len(desk.reports))
            return super().draw(batch)

    desk = Desk(Watched(inner))
    desk.open(opening("s", prompt(5), sequential(4), mode))
    desk.run()
    messages = desk.messages()
    assert [type(m) for m in messages] == [ProposalHeader, Proposal]
    header, proposal = messages
    assert isinstance(header, ProposalHeader)
    assert isinstance(proposal, Proposal)
    assert (header.base_len, header.count) == (5, 4) == (proposal.base_len, len(proposal.token_ids))
    assert len(proposal.rows) == 4
    assert seen_at_draw[0] == 2  # ready, header


def test_neither_count_nor_order_of_messages_depends_on_the_tokens_drawn() -> None:
    """Non-anticipation: a language that says EOS (0) nearly always, and one that cannot, look the same from outside."""
    shapes = []
    for language in (
        ToyLanguage(VOCAB, order=0, table={(): [0.9] + [0.1 / (VOCAB - 1)] * (VOCAB - 1)}),
        ToyLanguage(VOCAB, order=0, table={(): [0.0] + [1 / (VOCAB - 1)] * (VOCAB - 1)}),
    ):
        desk = Desk(toy(language)[0])
        desk.open(opening("s", prompt(5), Speculation(4, 2, 30), Mode.REJECTION))
        shape = []
        while desk.worker.has_work:
            desk.worker.step()
            sent = desk.messages()
            shape.append([(type(m), m.base_len, len(m.token_ids) if isinstance(m, Proposal) else 0) for m in sent])
        shapes.append(shape)
    assert shapes[0] == shapes[1]
    assert len(shapes[0]) > 28


def test_a_session_past_the_drafters_context_passes_for_ever_and_the_reason_is_counted() -> None:
    """Case 8."""
    desk = Desk(toy(context_len=64)[0])
    desk.open(opening("s", prompt(100), sequential(4)))
    desk.run()
    [message] = desk.sent(Pass)
    assert (message.base_len, message.until_len) == (100, FOREVER)
    assert desk.counted("passes", reason="context_full") == 1
    assert [status.ready for status in desk.statuses()] == [True]


def test_a_chain_at_the_sessions_end_passes_for_ever() -> None:
    desk = Desk(toy()[0])
    desk.open(opening("s", prompt(10), sequential(4), max_len=13))
    desk.run()
    sent = desk.messages()
    assert [type(m) for m in sent] == [Proposal, Pass]
    assert sent[1].base_len == 13
    assert desk.counted("passes", reason="max_len") == 1


def test_without_a_match_prompt_lookup_passes_until_the_next_commit() -> None:
    desk = Desk(PromptLookup(VOCAB, context_len=1000))
    key = desk.open(opening("s", [1, 2, 3, 4, 1], sequential(4)))
    desk.run()
    [message] = desk.sent(Pass)
    assert (message.base_len, message.until_len) == (5, 6)
    desk.commit(key, 5, [2], 1, sequential(4))
    desk.run()
    assert [p.token_ids for p in desk.sent(Proposal)] == [(3, 4, 1, 2)]
    assert desk.counted("passes", reason="no_match") == 1


# --- epochs between token steps -----------------------------------------------------------------------------------


def test_a_new_epoch_ends_a_stale_draft_between_two_token_steps() -> None:
    desk = Desk(toy()[0])
    ids = prompt(6)
    key = desk.open(opening("s", ids, sequential(8)))
    for _ in range(4):
        desk.worker.step()
    desk.commit(key, 6, [greedy(ids, 1)[0] - 1], 1, sequential(3))
    ids.append(greedy(ids, 1)[0] - 1)
    desk.run()
    [proposal] = desk.sent(Proposal)
    assert (proposal.epoch.round, proposal.base_len) == (1, 7)
    assert list(proposal.token_ids) == greedy(ids, 3)
    assert desk.counted("discarded_tokens") == 4
    assert desk.counted("drafted_tokens", drafter="causal_lm") == 7


def test_speculation_switched_off_in_a_new_epoch_stops_a_draft() -> None:
    desk = Desk(toy()[0])
    key = desk.open(opening("s", prompt(10), sequential(8)))
    desk.worker.step()
    desk.commit(key, 10, [7], 1, OFF)
    assert not desk.worker.has_work
    assert not desk.messages()


def test_a_commit_that_was_missed_is_asked_for() -> None:
    desk = Desk(toy()[0])
    ids = prompt(10)
    key = desk.open(opening("s", ids, OFF))
    desk.run()
    desk.statuses()
    desk.commit(key, 12, [3], 1, sequential(2))
    assert [status.missing_from for status in desk.statuses()] == [10]
    desk.commit(key, 10, [1, 2, 3], 1, sequential(2))
    desk.run()
    assert [list(p.token_ids) for p in desk.sent(Proposal)] == [greedy([*ids, 1, 2, 3], 2)]


def test_late_commits_and_closings_of_a_generation_that_is_gone_change_nothing() -> None:
    desk = Desk(toy()[0])
    old = desk.open(opening("s", prompt(10), sequential(2)))
    new = desk.open(opening("s", prompt(10), sequential(2), generation=Generation(1, 2)))
    desk.commit(old, 10, [5], 1, sequential(2))
    desk.close(old, keep_kv=False)
    desk.run()
    assert [p.epoch for p in desk.sent(Proposal)] == [Epoch(new.generation)]
    assert [report.key for report in desk.take(Closed)] == [old]


# --- many sessions ------------------------------------------------------------------------------------------------


def test_a_long_prompt_does_not_hold_up_other_sessions() -> None:
    desk = Desk(toy()[0])
    desk.open(opening("long", prompt(400), sequential(4)))
    desk.open(opening("s", prompt(5), sequential(4)))
    for _ in range(4):
        desk.worker.step()
    assert len(desk.sent(Proposal)) == 1
    desk.run()
    assert [list(p.token_ids) for p in desk.sent(Proposal, "long")] == [greedy(prompt(400), 4)]


def test_several_long_prompts_are_caught_up_in_turns() -> None:
    drafter, runner = toy()
    desk = Desk(drafter)
    for name in "abcd":
        desk.open(opening(name, prompt(200), sequential(4)))
    while runner.passes.count(64) < 12:
        desk.worker.step()
    assert not desk.messages()  # all four have about 3 of their 4 blocks; none has overtaken the others
    desk.run()
    assert sorted(m.session_id for m in desk.messages()) == list("abcd")


def test_sessions_share_each_decode_pass() -> None:
    drafter, runner = toy()
    desk = Desk(drafter)
    for name in "abcd":
        desk.open(opening(name, prompt(1), sequential(6), prompt_len=1))
    desk.run()
    assert runner.passes == [4] * 6
    assert len(desk.messages()) == 4


# --- failures -----------------------------------------------------------------------------------------------------


class Forwarding:
    """A drafter around another, for tests that change one of its answers."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.info: DrafterInfo = inner.info

    def open(self, session: DraftSession, ids: Sequence[int]) -> None:
        self.inner.open(session, ids)

    def plan(self, session_id: SessionId, ids: Sequence[int], count: int) -> Plan | None:
        return self.inner.plan(session_id, ids, count)

    def draw(self, batch: Sequence[Work]) -> list[Outcome]:
        return self.inner.draw(batch)

    def rewind(self, session_id: SessionId, length: int) -> None:
        self.inner.rewind(session_id, length)

    def close(self, session_id: SessionId, keep: bool) -> None:
        self.inner.close(session_id, keep)


class Raising(Forwarding):
    """Raises in one method, for as long as it is told to."""

    def __init__(self, inner: Drafter, where: str) -> None:
        super().__init__(inner)
        self.where = where

    def _maybe(self, where: str) -> None:
        if where == self.where:
            raise RuntimeError(f"broken in {where}")

    def open(self, session: DraftSession, ids: Sequence[int]) -> None:
        self._maybe("open")
        super().open(session, ids)

    def plan(self, session_id: SessionId, ids: Sequence[int], count: int) -> Plan | None:
        self._maybe("plan")
        return super().plan(session_id, ids, count)

    def draw(self, batch: Sequence[Work]) -> list[Outcome]:
        self._maybe("draw")
        return super().draw(batch)

    def rewind(self, session_id: SessionId, length: int) -> None:
        self._maybe("rewind")
        super().rewind(session_id, length)

    def close(self, session_id: SessionId, keep: bool) -> None:
        self._maybe("close")
        super().close(session_id, keep)


@pytest.mark.parametrize("where", ["open", "plan", "draw", "rewind"])
def test_a_drafter_that_raises_ends_the_session_with_the_cause_and_serves_the_next(where: str) -> None:
    """Case 25."""
    drafter = Raising(toy()[0], where)
    desk = Desk(drafter)
    key = desk.open(opening("s", prompt(10), sequential(4)))
    desk.run()
    desk.commit(key, 10, [7], 1, sequential(4))
    desk.run()
    [death] = desk.take(Died)
    assert isinstance(death.error, Internal)
    assert f"broken in {where}" in death.error.message
    assert desk.counted("session_failures", cause="plan" if where == "rewind" else where) == 1
    desk.messages()
    drafter.where = ""
    desk.open(opening("s", prompt(10), sequential(4), generation=Generation(1, 2)))
    desk.run()
    assert [list(p.token_ids) for p in desk.sent(Proposal)] == [greedy(prompt(10), 4)]


def test_a_drafter_that_raises_while_closing_is_counted_and_the_session_is_over() -> None:
    desk = Desk(Raising(toy()[0], "close"))
    desk.close(desk.open(opening("s", prompt(10), OFF)))
    assert len(desk.take(Closed)) == 1
    assert desk.counted("session_failures", cause="close") == 1
    assert not desk.worker.has_work


def test_a_failed_step_ends_only_the_sessions_that_were_in_it() -> None:
    drafter = Raising(toy()[0], "")
    desk = Desk(drafter)
    idle = desk.open(opening("idle", prompt(5), OFF))
    desk.run()
    drafter.where = "draw"
    desk.open(opening("s", prompt(5), sequential(2)))
    desk.run()
    assert list(desk.deaths()) == ["s"]
    drafter.where = ""
    desk.commit(idle, 5, [1], 1, sequential(2))
    desk.run()
    assert len(desk.sent(Proposal, "idle")) == 1


def test_steps_that_fail_again_and_again_mean_that_the_drafter_is_broken() -> None:
    desk = Desk(Raising(toy()[0], "draw"))
    for number in range(MAX_FAILED_STEPS - 1):
        desk.open(opening(f"s{number}", prompt(5), sequential(2)))
        desk.worker.step()
    desk.open(opening("last", prompt(5), sequential(2)))
    with pytest.raises(DrafterBroken):
        desk.worker.step()
    assert len(desk.deaths()) == MAX_FAILED_STEPS


def test_a_commit_that_contradicts_the_chain_ends_that_session_alone() -> None:
    desk = Desk(toy()[0])
    bad = desk.open(opening("bad", prompt(10), sequential(4)))
    desk.open(opening("s", prompt(10), sequential(4)))
    desk.worker.step()
    desk.run()
    right = greedy(prompt(10), 1)[0]
    desk.commit(bad, 10, [(right + 1) % VOCAB], 0, sequential(4))
    assert {name: type(error) for name, error in desk.deaths().items()} == {"bad": ProtocolError}
    assert len(desk.sent(Proposal)) == 1


def test_a_drafter_that_draws_more_than_it_was_asked_for_loses_the_session() -> None:
    class Greedy(Forwarding):
        def draw(self, batch: Sequence[Work]) -> list[Outcome]:
            return [Guessed((1, 2, 3)) for _ in batch]

    desk = Desk(Greedy(toy()[0]))
    desk.open(opening("s", prompt(5), sequential(2)))
    desk.run()
    assert isinstance(desk.deaths()["s"], ProtocolError)


def test_slots_return_after_sessions_that_failed() -> None:
    inner, runner = toy()
    drafter = Raising(inner, "")
    desk = Desk(drafter)
    desk.open(opening("s", prompt(200), sequential(2)))
    desk.run()
    desk.close(SessionKey(SessionId("s"), GENERATION), keep_kv=False)
    desk.open(opening("t", prompt(200), sequential(2)))
    desk.worker.step()
    drafter.where = "draw"
    desk.run()
    assert list(desk.deaths()) == ["t"]
    assert runner.free_blocks == 64


def test_ten_thousand_rounds_leave_no_block_behind() -> None:
    """Case 21, the draft's half, shortened: 2,000 rounds of random acceptance, some of them in another session."""
    drafter, runner = toy(noisy(TARGET, 0.7), context_len=4096, num_blocks=64)
    desk = Desk(drafter)
    for session in range(10):
        ids = prompt(20 + session)
        key = desk.open(opening(f"s{session % 3}", ids, sequential(4), generation=Generation(1, session)))
        rounds = Round(desk, key, list(ids))
        for _ in range(200):
            rounds.play(4)
        desk.close(key, keep_kv=bool(session % 2))
    desk.open(opening("all", prompt(4000), sequential(1)))
    desk.run()
    desk.close(SessionKey(SessionId("all"), GENERATION), keep_kv=False)
    assert runner.free_blocks == 64


# --- reports ------------------------------------------------------------------------------------------------------


def test_ready_is_reported_once_when_the_prompt_is_computed() -> None:
    drafter, runner = toy()
    desk = Desk(drafter)
    desk.open(opening("s", prompt(200), OFF))
    desk.worker.step()
    assert not desk.statuses()
    desk.run()
    assert [status.ready for status in desk.statuses()] == [True]
    assert runner.passes == [64] * 3  # the last eight tokens go into the first decode pass


def test_a_session_in_which_nothing_can_be_drafted_costs_no_pass() -> None:
    """Case 6, the draft's half."""
    drafter, runner = toy()
    desk = Desk(drafter)
    desk.open(opening("s", prompt(200), sequential(4), max_len=200))
    desk.run()
    assert [(m.base_len, m.until_len) for m in desk.sent(Pass)] == [(200, FOREVER)]
    assert runner.passes == []


def test_the_reported_time_is_that_of_a_token_step_as_this_session_sees_it() -> None:
    """Two sessions in one step of 30 ms: 30 ms per token for each, not 15; counts equal what was drawn."""
    inner, _ = toy()
    desk = Desk(inner)

    class Slow(Forwarding):
        def draw(self, batch: Sequence[Work]) -> list[Outcome]:
            desk.now_s += 0.03
            return super().draw(batch)

    desk = Desk(Slow(inner))
    keys = [desk.open(opening(name, prompt(5), sequential(4))) for name in "ab"]
    desk.run()
    desk.statuses()
    desk.commit(keys[0], 5, [7], 1, OFF)
    desk.close(keys[0])
    [status] = desk.statuses()
    assert status.draft_s_per_token == pytest.approx(0.03)
    assert (status.num_drafted, status.num_discarded, status.drafter) == (4, 4, "causal_lm")


def test_a_proposal_copied_at_once_costs_each_token_its_share() -> None:
    inner = PromptLookup(VOCAB, context_len=100)
    desk = Desk(inner)

    class Slow(Forwarding):
        def draw(self, batch: Sequence[Work]) -> list[Outcome]:
            desk.now_s += 0.01
            return super().draw(batch)

    desk = Desk(Slow(inner))
    key = desk.open(opening("s", [1, 2, 3, 1, 2], sequential(5)))
    desk.run()
    desk.close(key)
    assert desk.statuses()[-1].draft_s_per_token == pytest.approx(0.002)


def test_a_working_session_reports_at_intervals() -> None:
    inner, _ = toy()
    desk = Desk(inner)

    class Slow(Forwarding):
        def draw(self, batch: Sequence[Work]) -> list[Outcome]:
            desk.now_s += STATUS_INTERVAL_S / 4
            return super().draw(batch)

    desk = Desk(Slow(inner))
    desk.open(opening("s", prompt(5), Speculation(4, 4, 16)))
    desk.run()
    assert [status.num_drafted for status in desk.statuses()] == [0, 4, 8, 12, 16]


def test_a_session_that_waits_for_every_verdict_reports_too() -> None:
    inner, _ = toy()
    desk = Desk(inner)

    class Slow(Forwarding):
        def draw(self, batch: Sequence[Work]) -> list[Outcome]:
            desk.now_s += 0.3
            return super().draw(batch)

    desk = Desk(Slow(inner))
    key = desk.open(opening("s", prompt(5), sequential(1)))
    for length in range(5, 11):
        desk.run()
        desk.commit(key, length, [7], length - 4, sequential(1))
    assert max(status.num_drafted for status in desk.statuses()) >= 4


def test_features_reach_a_drafter_that_takes_them_and_no_other() -> None:
    class Taking(Forwarding):
        def __init__(self, inner: Drafter) -> None:
            super().__init__(inner)
            self.taken: list[TargetFeatures] = []

        def take_features(self, features: TargetFeatures) -> None:
            self.taken.append(features)

    features = TargetFeatures(SessionId("s"), Epoch(GENERATION), 3, Tensor("float32", (1, 1, 1), bytes(4)))
    taking = Taking(toy()[0])
    for drafter in (taking, toy()[0]):
        desk = Desk(drafter)
        desk.open(opening("s", prompt(5), sequential(1)))
        desk.worker.handle(GiveFeatures(ADDRESS, features))
    assert taking.taken == [features]
