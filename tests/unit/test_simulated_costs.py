"""What takes time in a simulated cluster is paid where it falls due, once, and is told; and how questions reckon."""

from dataclasses import replace

import pytest

from orchestrator.figures import Round
from outrider.ids import Epoch, TokenKind, WorkerId
from outrider.messages import WorkerDescription
from simulator import questions
from simulator.clock import Clock
from simulator.cluster import simulate
from simulator.costs import Costs
from simulator.questions import Level, Ratio
from simulator.registry import TTL_S, Registry, at_once
from simulator.results import Summary, Tally, Told, upper
from simulator.setting import Fleet, Load, Prices, Setting, ZoneLoss
from simulator.workers import MODEL, VOCABULARY
from tests.unit.test_simulator import OFF, alone, flat, sequential

GAMMA = 4


def with_costs(**changes: float) -> Costs:
    return replace(flat(), **changes)  # type: ignore[arg-type]


# --- models and messages --------------------------------------------------------------------------------------------


def test_each_model_is_busy_for_its_share_of_a_sequential_round() -> None:
    found = simulate(alone(flat(30, 2, 10), sequential(GAMMA), 1.0))
    assert found.verifier_busy == pytest.approx(30 / 48, rel=0.02)
    assert found.draft_busy == pytest.approx(8 / 48, rel=0.02)
    assert found.orchestrator_busy == 0.0


def test_the_share_that_nobody_drafted_is_what_came_after_the_loss_of_the_only_draft_worker() -> None:
    load, fleet = Load(1, 10, 400, 1, (1.0,), sequential(GAMMA)), Fleet(2, 1, 2, zones=2)
    found = simulate(Setting(flat(), load, fleet, seconds=1000, warm_up_s=0, loss=ZoneLoss(0, 1.0, 0.3)))
    drafted = (GAMMA + 1) / 0.038  # tokens of one second
    assert found.undrafted == pytest.approx(1 - drafted / 400, abs=0.03)


def test_what_was_before_the_measured_time_is_not_counted() -> None:
    whole = alone(flat(), OFF, tokens=400)
    later = simulate(replace(whole, warm_up_s=6.0))
    assert later.verifier_busy == pytest.approx(1.0, rel=0.02)
    assert later.tokens_per_s == pytest.approx(1 / 0.03, rel=0.02)


def test_a_verifier_pays_for_each_verdict_and_a_draft_worker_for_each_proposal() -> None:
    verdicts = simulate(alone(with_costs(verdict_s=0.01), OFF))
    assert verdicts.session_tokens_per_s == pytest.approx(1 / 0.04, rel=0.01)
    usual, proposals = (
        simulate(alone(costs, sequential(GAMMA), 1.0)) for costs in (flat(), with_costs(proposal_s=0.01))
    )
    round_s = (GAMMA + 1) / usual.session_tokens_per_s
    assert (GAMMA + 1) / proposals.session_tokens_per_s == pytest.approx(round_s + 0.01, rel=0.02)


def test_an_orchestrator_takes_one_verdict_after_the_other() -> None:
    setting = Setting(with_costs(message_s=0.01), Load(8, 10, 10_000, 0, choice=OFF), seconds=60, warm_up_s=20)
    found = simulate(setting)
    assert found.tokens_per_s == pytest.approx(100, rel=0.02)
    assert found.orchestrator_busy > 0.9, "it has more to do than it can"


def test_a_token_is_shown_when_it_is_in_the_log() -> None:
    usual, slow = (simulate(alone(costs, OFF, tokens=50)) for costs in (flat(), with_costs(store_s=0.25)))
    assert slow.first_token_s - usual.first_token_s == pytest.approx(0.25)


def test_a_draft_worker_reads_a_prompt_block_by_block_before_its_first_proposal() -> None:
    def first_token_s(draft_prompt_s: float) -> float:
        costs = with_costs(draft_prompt_s=draft_prompt_s, verify_prompt_s=0.001)
        load = Load(1, 640, 100, 1, (1.0,), sequential(GAMMA))
        return simulate(Setting(costs, load, seconds=1000, warm_up_s=0)).first_token_s

    # Ten blocks, the last one of which goes along with the first token.
    assert first_token_s(0.1) - first_token_s(0.001) == pytest.approx(9 * 0.099)


def test_another_zone_is_farther_away() -> None:
    costs = replace(flat(round_trip_ms=2), zone_hop_s=0.003)
    assert costs.hop(1, 1) == pytest.approx(0.001)
    assert costs.hop(0, 1) == costs.hop(1, 0) == pytest.approx(0.004)


# --- what is told ---------------------------------------------------------------------------------------------------


def test_the_longest_pause_of_a_generation_is_told() -> None:
    told = Told(1.0)
    for now_s in (3.0, 4.0, 9.0, 10.0):
        told.take(2, now_s)
    assert (told.first_s, told.pause_s) == (3.0, 5.0)
    assert told.rate == pytest.approx(6 / 7)


def test_a_tally_counts_from_the_measured_time_on_and_every_second() -> None:
    tally = Tally(5.0)
    told = Told(0.0)
    for now_s in (4.9, 5.0, 5.5):
        tally.deliver(told, 3, now_s)
    assert tally.tokens == 6
    assert dict(tally.tokens_by_second) == {4: 3, 5: 6}
    kinds = (TokenKind.ACCEPTED, TokenKind.ACCEPTED, TokenKind.PLAIN)
    committed = Round(Epoch(), Epoch().next_round(), "tested", kinds, 3, 2, 0.01, 0.0)
    for now_s in (4.9, 5.0):
        tally.note(committed, now_s)
    assert tally.counts == {"rounds": 1, "tested": 3, "accepted": 2, "plain": 1, "committed": 3}


def test_a_share_of_all_does_not_exceed_its_quantile() -> None:
    assert upper(map(float, range(200))) == 198.0
    assert upper([2.0, float("nan"), 1.0]) == 2.0


def test_a_worker_that_is_gone_answers_nobody_while_the_registry_still_believes_in_it() -> None:
    clock = Clock()
    registry, here = Registry(clock), [WorkerDescription(WorkerId("v0"), "verify", "v0", MODEL, VOCABULARY, 64)]
    registry.join(lambda: here[0] if here else None, 0.0)
    assert registry.is_alive(WorkerId("v0"))
    assert not registry.is_alive(WorkerId("v1"))
    here.clear()
    assert not registry.is_alive(WorkerId("v0"))
    assert [each.worker_id for each in at_once(registry.workers("verify"))] == ["v0"]
    clock.run(TTL_S)
    assert at_once(registry.workers("verify")) == ()


# --- questions ------------------------------------------------------------------------------------------------------


def halves() -> tuple[Setting, Setting]:
    """A cluster of which a zone is lost, and the half of it."""
    load, fleet = Load(16, 50, 48, 2), Fleet(verifiers=4, drafts=4, orchestrators=4, zones=2)
    whole = Setting(flat(), load, fleet, seconds=200, warm_up_s=1, loss=ZoneLoss(1, 1.5, 0.3))
    return whole, replace(
        whole, load=replace(load, sessions=8), fleet=replace(fleet, verifiers=2, drafts=2, orchestrators=2)
    )


def test_what_a_part_counts_is_multiplied_and_what_it_measures_is_not() -> None:
    whole, half = halves()
    one, found = questions.run(whole, 2), simulate(half)
    assert 0 < one.moved == 2 * found.moved
    assert (one.finished, one.failed) == (2 * found.finished, 2 * found.failed)
    assert one.finished == 32
    assert one.tokens_by_second == tuple(2 * count for count in found.tokens_by_second)
    assert one.tokens_per_s == 2 * found.tokens_per_s
    assert (one.first_token_s, one.pause_s, one.alpha) == (found.first_token_s, found.pause_s, found.alpha)


@pytest.fixture(scope="module")
def base() -> Summary:
    return simulate(alone(flat(), OFF, tokens=10))


def test_enough_is_the_fewest_near_the_best_and_the_cheapest_the_lowest_cost(base: Summary) -> None:
    rows = [(0, 50.0, 9.0), (1, 96.9, 5.0), (2, 97.1, 4.0), (3, 100.0, 4.0), (4, 99.0, 6.0)]
    found = [Ratio(drafts, replace(base, tokens_per_s=rate), cost) for drafts, rate, cost in rows]
    assert questions.enough(found).drafts == 2
    cheapest = questions.cheapest(found)
    assert cheapest is not None
    assert cheapest.drafts == 2
    assert questions.cheapest([replace(each, cost=None) for each in found]) is None


def test_drafting_yields_where_it_loses_without_a_policy(base: Summary) -> None:
    def level(sessions: int, fixed: float, automatic: float) -> Level:
        plain, kept, chosen = (replace(base, tokens_per_s=rate) for rate in (100.0, fixed, automatic))
        return Level(sessions, plain, kept, chosen)

    levels = [level(1, 150, 90), level(2, 101, 120), level(4, 99, 110), level(8, 60, 100)]
    assert questions.yields_at(levels) == 4
    assert questions.yields_at(levels[:2]) is None
    assert levels[0].gain == pytest.approx(0.9)


def test_no_draft_workers_means_plain_decoding_that_nobody_looks_for_any() -> None:
    setting = alone(flat(), sequential(GAMMA), tokens=60)
    none, one = questions.ratio(setting, (0, 1), Prices({"verifier": 3.6}))
    assert none.summary.tokens_per_round == 1.0
    assert one.summary.alpha > 0
    assert none.cost == pytest.approx(3.6 / (none.summary.tokens_per_s * 3600) * 1e6)
