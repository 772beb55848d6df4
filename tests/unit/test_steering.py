"""Who drafts beside load and KV: detached drafters, sessions split between sorts, and sorts that lose."""

import random

from orchestrator.figures import Round
from orchestrator.metrics import Metrics
from orchestrator.placement import Wanted
from orchestrator.standings import LOSING, LOSSES, PROBE_S, RETURNS
from orchestrator.steering import Steering, Witness
from orchestrator.tuning import Limits, Tuning
from outrider.drafter_policy import DrafterPolicy
from outrider.generation import SpeculationChoice
from outrider.ids import Epoch, Generation, TokenKind, WorkerId
from outrider.messages import DraftStatus, Speculation, VerdictCause, WorkerDescription
from tests.unit.test_placement import Clock, drafter, placement, worker

A = worker("a", "draft", drafter="feature")
B = worker("b", "draft", drafter="prompt_lookup", load=7)
SPLIT = DrafterPolicy(split=(("feature", 1), ("prompt_lookup", 1)))
NEW = Wanted(new=True)


def sessions(kind: str, number: int = 20) -> list[str]:
    """Return sessions that the split assigns to a kind."""
    return [each for each in map(str, range(200)) if SPLIT.assigned(each) == kind][:number]


def losing(steering: Steering, sort: str) -> None:
    for _ in range(LOSSES):
        steering.judge(sort, LOSING - 0.1)


def steered(*workers: WorkerDescription, sets_aside: bool = True) -> tuple[Steering, Clock, Metrics]:
    clock, metrics = Clock(), Metrics()
    return Steering(metrics, sets_aside=sets_aside, clock=clock), clock, metrics


# --- policy -----------------------------------------------------------------------------------------------------------


async def test_a_detached_drafter_is_chosen_by_nobody_not_even_by_whoever_names_it() -> None:
    placed = placement(A, B)
    placed.steering.follow(DrafterPolicy().detach("feature"))
    assert await drafter(placed, Wanted(resident={WorkerId("a"): 50})) == ("b", "")
    assert await drafter(placed, Wanted("feature")) == (None, "drafter_not_offered")
    assert await placed.offered(worker("v")) == ["prompt_lookup"]
    placed.steering.follow(DrafterPolicy())
    assert await drafter(placed) == ("a", "")


async def test_a_split_goes_before_kv_and_load_and_is_the_same_for_running_sessions() -> None:
    placed = placement(A, B)
    placed.steering.follow(SPLIT)
    for session in sessions("prompt_lookup"):
        wanted = Wanted(session_id=session, resident={WorkerId("a"): 50})
        assert await drafter(placed, wanted) == ("b", "")
        assert await placed.drafters(worker("v"), wanted) == [B], "the busy one is not left for the other side"


async def test_a_session_whose_side_is_away_gets_the_other_side_before_the_rest() -> None:
    placed = placement(worker("rest", "draft", drafter="causal_lm"), B)
    placed.steering.follow(SPLIT)
    assert {await drafter(placed, Wanted(session_id=each)) for each in sessions("feature")} == {("b", "")}


async def test_a_request_that_names_a_drafter_and_one_with_a_prediction_go_before_the_split() -> None:
    follows = worker("follows", "draft", drafter="prediction", drafters=("prediction",))
    placed = placement(A, B, follows)
    placed.steering.follow(SPLIT)
    for session in sessions("prompt_lookup"):
        assert await drafter(placed, Wanted("feature", session_id=session)) == ("a", "")
        assert await drafter(placed, Wanted(session_id=session, predicted=True)) == ("follows", "")
    blues = [worker(each.worker_id, "draft", drafter=each.drafter, label="blue") for each in (A, B)]
    named = placement(*blues)
    named.steering.follow(SPLIT)
    for session in sessions("prompt_lookup"):
        wanted = Wanted("blue", session_id=session, resident={WorkerId("a"): 50})
        assert await drafter(named, wanted) == ("a", ""), "its KV is there"


def test_who_is_detached_is_shown_and_shown_no_more_when_it_is_back() -> None:
    steering, _, metrics = steered()

    def out() -> float | None:
        labels = {"drafter": "feature", "reason": "detached"}
        return metrics.registry.get_sample_value("outrider_drafter_out", labels)

    steering.follow(DrafterPolicy().detach("feature"))
    assert out() == 1
    steering.follow(SPLIT)
    assert out() == 0


# --- sorts that lose --------------------------------------------------------------------------------------------------


async def test_a_sort_that_loses_gets_no_new_session_where_there_is_another_or_none_at_all() -> None:
    placed = placement(A, B)
    losing(placed.steering, "feature")
    assert await drafter(placed, NEW) == ("b", "")
    alone = placement(A)
    losing(alone.steering, "feature")
    assert await drafter(alone, NEW) == (None, "drafter_set_aside")


async def test_whoever_names_a_drafter_or_fixes_gamma_gets_one_that_is_set_aside() -> None:
    placed = placement(A)
    losing(placed.steering, "feature")
    assert await drafter(placed, Wanted("feature", new=True)) == ("a", "")
    assert await drafter(placed, Wanted(new=True, insists=True)) == ("a", "")


async def test_only_a_session_that_begins_tries_a_sort_that_is_set_aside_and_one_at_a_time() -> None:
    steering, clock, _ = steered()
    losing(steering, "feature")
    clock.now_s += PROBE_S
    assert steering.trusted([A, B], new=False) == [B]
    assert steering.trusted([A, B], new=True) == [A, B]
    steering.given(A)
    assert steering.trusted([A, B], new=True) == [B]
    for _ in range(RETURNS):
        steering.judge("feature", 1.2)
    assert steering.trusted([A, B], new=False) == [A, B]


def test_the_state_has_its_reason_as_a_label_and_an_operator_can_switch_all_of_it_off() -> None:
    for sets_aside, expected in ((True, 1.0), (False, None)):
        steering, _, metrics = steered(sets_aside=sets_aside)
        losing(steering, "feature")
        labels = {"drafter": "feature", "reason": "below_plain"}
        assert metrics.registry.get_sample_value("outrider_drafter_out", labels) == expected


def test_workers_are_told_apart_by_label_before_kind() -> None:
    steering, _, _ = steered()
    blue = worker("c", "draft", drafter="feature", label="blue")
    losing(steering, "blue")
    assert steering.trusted([A, blue], new=True) == [A]


# --- what a session tells ---------------------------------------------------------------------------------------------


class Session:
    """A session that tests one token per restart."""

    def __init__(self, steering: Steering, choice: SpeculationChoice | None = None) -> None:
        self.tuning = Tuning(choice or SpeculationChoice(), Limits(Speculation(4, 4, 8)))
        self.witness = Witness(steering, self.tuning, A)
        self.rounds, self.now_s = 0, 0.0
        self.lot = random.Random(5)

    def run(self, rounds: int, alpha: float, draft_s: float = 0.01) -> None:
        self.tuning.observe_status(DraftStatus(draft_s_per_token=draft_s))
        for _ in range(rounds):
            self.rounds += 1
            epoch = Epoch(Generation(1, 1), self.rounds)
            self.tuning.restarted(epoch, self.now_s)
            self.now_s += 0.05
            accepted = self.lot.random() < alpha
            kind = TokenKind.ACCEPTED if accepted else TokenKind.RECOVERED
            told = Round(epoch, epoch.next_round(), VerdictCause.TESTED, (kind,), 1, int(accepted), 0.03, 0.0)
            self.witness.observe(told)
            self.tuning.observe(told, self.now_s)


def known(steering: Steering) -> dict[str, tuple[int, int, float | None]]:
    return {sort: (one.num_accepted, one.num_tested, one.gain) for sort, one in steering._standings.all().items()}


def test_a_session_tells_at_its_end_once_what_its_drafter_was_worth() -> None:
    for alpha, wins in ((0.0, False), (1.0, True)):
        steering, _, _ = steered()
        session = Session(steering)
        session.run(40, alpha)
        session.witness.closed()
        session.witness.closed()
        standing = steering._standings.of("feature")
        assert (standing.num_tested, standing.num_accepted) == (40, 40 * alpha)
        assert len(standing.gains) == 1
        assert (standing.gains[0] > 1.0) == wins
        assert (standing.gains[0] < LOSING) != wins


def test_a_session_that_has_tested_little_or_does_as_it_is_told_says_nothing() -> None:
    steering, _, _ = steered()
    short, told = Session(steering), Session(steering, SpeculationChoice(gamma=2))
    short.run(8, 0.0)
    told.run(40, 0.0)
    for session in (short, told):
        session.witness.closed()
    assert known(steering)["feature"][2] is None


def test_a_drafter_of_another_sort_is_measured_by_itself_and_drafts_where_the_one_before_was_switched_off() -> None:
    steering, _, _ = steered()
    session = Session(steering)
    session.run(60, 0.0, draft_s=0.02)
    assert not session.tuning.speculation.enabled
    session.witness.closed()
    session.witness.chosen(B)
    assert session.tuning.speculation == Speculation(4, 4, 8)
    session.run(40, 1.0, draft_s=0.001)
    session.witness.closed()
    first, second = known(steering)["feature"], known(steering)["prompt_lookup"]
    assert first[2] is not None
    assert second[2] is not None
    assert first[2] < 1.0 < second[2]
    assert second[:2] == (40, 40)
    assert session.tuning.pace.alpha.alpha > 0.8, "what the one before had rejected does not count"


def test_another_worker_of_the_same_sort_goes_on_from_what_is_known() -> None:
    steering, _, _ = steered()
    session = Session(steering)
    session.run(60, 0.0, draft_s=0.02)
    session.witness.chosen(worker("a2", "draft", drafter="feature"))
    assert not session.tuning.speculation.enabled
