"""A cluster in simulated time: what it says where the answer is known, and that nothing is lost in it."""

import asyncio
import math
from dataclasses import replace

import pytest

from outrider.errors import FailedPrecondition, InvalidRequest
from outrider.gamma import Costs as Model
from outrider.gamma import pipelined_rate, plain_rate, sequential_rate
from outrider.generation import Chunk, SpeculationChoice
from outrider.ids import TokenKind, WorkerId
from simulator.clients import Broken, Client
from simulator.clock import Clock
from simulator.cluster import Cluster, simulate
from simulator.costs import Costs, StepCost, step_cost
from simulator.registry import at_once
from simulator.runner import TimedRunner
from simulator.setting import Fleet, Load, Setting, ZoneLoss
from simulator.text import CYCLE, NEXT, VOCAB, Luck, continuation, prompt

OFF = SpeculationChoice(off=True)


def flat(verify_ms: float = 30.0, draft_ms: float = 2.0, round_trip_ms: float = 0.0) -> Costs:
    """Passes and steps that cost the same however many rows they have."""
    verify, draft = step_cost("verify_ms", {1: verify_ms}), step_cost("draft_ms", {1: draft_ms})
    return Costs(verify, draft, hop_s=round_trip_ms / 2000, store_s=0.0)


def alone(costs: Costs, choice: SpeculationChoice, alpha: float = 0.8, tokens: int = 2000) -> Setting:
    """One session, once."""
    return Setting(costs, Load(1, 10, tokens, 1, (alpha,), choice), seconds=10_000, warm_up_s=0)


def sequential(gamma: int) -> SpeculationChoice:
    return SpeculationChoice(gamma=gamma, restart_gamma=gamma, window=gamma)


# --- one session, where the latency model is exact ------------------------------------------------------------------


def test_plain_decoding_takes_one_pass_for_each_token() -> None:
    assert simulate(alone(flat(), OFF)).session_tokens_per_s == pytest.approx(plain_rate(Model(0, 0.03)))


@pytest.mark.parametrize(("gamma", "trip_ms"), [(1, 0), (4, 1), (7, 20)])
def test_a_perfect_drafter_fills_every_sequential_round(gamma: int, trip_ms: float) -> None:
    found = simulate(alone(flat(round_trip_ms=trip_ms), sequential(gamma), 1.0, tokens=100 * (gamma + 1)))
    assert found.session_tokens_per_s == pytest.approx(sequential_rate(1.0, gamma, Model(0.002, 0.03, trip_ms / 1000)))


@pytest.mark.parametrize("trip_ms", [0, 5])
def test_a_drafter_that_is_always_wrong_costs_each_token_a_whole_round(trip_ms: float) -> None:
    found = simulate(alone(flat(round_trip_ms=trip_ms), sequential(3), 0.0, tokens=300))
    wrong = sequential_rate(0.0, 3, Model(0.002, 0.03, trip_ms / 1000))
    assert found.session_tokens_per_s == pytest.approx(wrong, rel=0.01)  # the last round drafts less
    assert found.alpha == 0.0


FIGURES = [(0.6, 2, 0.2, 4, (3, 15)), (0.6, 6, 1, 2, (1, 5)), (0.8, 2, 0.2, 7, (5, 15)), (0.8, 6, 1, 4, (1, 5)),
           (0.8, 6, 20, 5, (1, 5)), (0.9, 6, 1, 7, (1, 5))]  # fmt: skip
"""alpha, draft ms, round trip ms, best sequential gamma, best pipelined (g0, g), for a pass of 30 ms."""


@pytest.mark.parametrize(("alpha", "draft_ms", "trip_ms", "gamma", "_plan"), FIGURES)
def test_sequential_rounds_are_as_fast_as_the_latency_model_says(
    alpha: float, draft_ms: float, trip_ms: float, gamma: int, _plan: tuple[int, int]
) -> None:
    found = simulate(alone(flat(30, draft_ms, trip_ms), sequential(gamma), alpha))
    model = sequential_rate(found.alpha, gamma, Model(draft_ms / 1000, 0.03, trip_ms / 1000))
    assert found.session_tokens_per_s == pytest.approx(model, rel=0.02)


@pytest.mark.parametrize(("alpha", "draft_ms", "trip_ms", "_gamma", "plan"), FIGURES)
def test_pipelined_rounds_come_near_the_latency_model(
    alpha: float, draft_ms: float, trip_ms: float, _gamma: int, plan: tuple[int, int]
) -> None:
    first, gamma = plan
    window = gamma * (1 + math.ceil((gamma * draft_ms + trip_ms) / 30))
    choice = SpeculationChoice(gamma=gamma, restart_gamma=first, window=window)
    found = simulate(alone(flat(30, draft_ms, trip_ms), choice, alpha))
    model = pipelined_rate(found.alpha, first, gamma, Model(draft_ms / 1000, 0.03, trip_ms / 1000))
    # The model lets a chain go on for ever and a draft be waited for without a pass under way.
    assert 0.88 * model < found.session_tokens_per_s < 1.03 * model


def test_passes_that_cost_more_with_more_sessions_are_shared() -> None:
    costs = Costs(step_cost("verify_ms", {1: 20, 8: 34}), step_cost("draft_ms", {1: 2}), hop_s=0, store_s=0)
    found = simulate(Setting(costs, Load(8, 10, 400, 1, choice=OFF), seconds=100, warm_up_s=0))
    assert found.session_tokens_per_s == pytest.approx(1 / 0.034, rel=0.02)
    assert found.tokens_per_s == pytest.approx(8 / 0.034, rel=0.05)


# --- repeatable, and nothing lost -----------------------------------------------------------------------------------


def busy(**changes: object) -> Setting:
    """Several of everything, in two zones."""
    load = Load(12, 100, 48, 2, (0.5, 0.9))
    fleet = Fleet(verifiers=3, drafts=3, orchestrators=2, zones=2, verifier_sessions=5, draft_sessions=6)
    setting = Setting(replace(flat(round_trip_ms=1), zone_hop_s=0.001), load, fleet, seconds=200, warm_up_s=1)
    return replace(setting, **changes)  # type: ignore[arg-type]


def test_a_seed_repeats_everything() -> None:
    first, second = (replace(simulate(busy()), wall_s=0.0).as_data() for _ in range(2))
    assert first == second
    assert replace(simulate(busy(seed=1)), wall_s=0.0).as_data() != first


def test_every_client_gets_every_token_once() -> None:
    cluster = Cluster(busy())
    summary = cluster.run()
    assert summary.finished == 24
    assert [each.num_tokens for each in cluster.tally.told] == [48] * 24
    assert sum(summary.tokens_by_second) == 24 * 48


@pytest.mark.parametrize("zone", [0, 1])
def test_the_loss_of_a_zone_loses_no_token(zone: int) -> None:
    cluster = Cluster(busy(loss=ZoneLoss(zone, 1.5, 0.3)))
    summary = cluster.run()
    assert summary.finished == 24
    assert [each.num_tokens for each in cluster.tally.told] == [48] * 24
    assert 0 < summary.moved < 24
    assert summary.pause_s > 0.3
    gone = [each for each in cluster.orchestrators if each.zone == zone]
    assert all(not each.running for each in gone)


def test_a_client_notices_a_token_that_is_shown_twice_left_out_or_wrong() -> None:
    cluster = Cluster(busy())
    client = Client(cluster, 0)
    client.begin()
    right = continuation(prompt(0, 100)[-1], 4)
    client.took(Chunk(100, right[:2], "", (TokenKind.PLAIN,) * 2))
    for start, ids in ((100, right[:2]), (103, right[3:]), (102, (right[3],)), (102, right[3:])):
        with pytest.raises(Broken, match="session 0 was shown"):
            client.took(Chunk(start, ids, "", (TokenKind.PLAIN,) * len(ids)))
    with pytest.raises(Broken, match="ended with 2 of 48"):
        client.ended(True)


def test_without_draft_workers_everything_is_decoded_plain() -> None:
    found = simulate(busy(fleet=Fleet(drafts=0)))
    assert (found.finished, found.undrafted, found.alpha) == (24, 1.0, 0.0)


def test_sessions_beyond_a_verifiers_room_wait_their_turn() -> None:
    found = simulate(busy(fleet=Fleet(verifier_sessions=2), load=Load(8, 10, 40, 1, choice=OFF)))
    assert found.finished == 8
    assert found.first_token_p99_s > 3 * 40 * 0.03


@pytest.mark.parametrize("orchestrators", [1, 2])
def test_a_draft_worker_serves_no_more_sessions_than_it_has_places_for_though_all_come_at_once(
    orchestrators: int,
) -> None:
    fleet = Fleet(orchestrators=orchestrators, draft_sessions=2)
    setting = Setting(flat(round_trip_ms=1), Load(5, 10, 60, 1, (0.9,)), fleet, seconds=100, warm_up_s=0)
    cluster, loads = Cluster(setting), set[int]()
    for place in range(1000):
        cluster.clock.at(0.005 * place, lambda: loads.update(each.describe().load for each in cluster._drafts))
    found = cluster.run()
    assert max(loads) == 2
    assert found.finished == 5
    assert [each.num_tokens for each in cluster.tally.told] == [60] * 5
    assert 0.2 < found.undrafted < 0.8


# --- parts ----------------------------------------------------------------------------------------------------------


def test_things_of_one_moment_happen_in_the_order_in_which_they_were_set() -> None:
    clock = Clock()
    seen: list[str] = []
    for due_s, name in ((2.0, "c"), (1.0, "a"), (1.0, "b"), (9.0, "never")):
        clock.at(due_s, seen.append, name)
    clock.at(1.0, lambda: clock.at(0.5, seen.append, "late, so now"))
    clock.run(5.0)
    assert seen == ["a", "b", "late, so now", "c"]


def test_the_text_is_one_cycle_through_all_ids() -> None:
    assert sorted(CYCLE) == list(range(VOCAB))
    token, seen = 0, set()
    for _ in range(VOCAB):
        token = NEXT[token]
        seen.add(token)
    assert len(seen) == VOCAB
    assert continuation(CYCLE[-1], 3) == CYCLE[:3]


def test_no_two_sessions_share_a_prompt() -> None:
    prompts = {prompt(number, 5)[:2] for number in range(2 * VOCAB)}
    assert len(prompts) == 2 * VOCAB


def test_drafts_agree_at_the_rate_that_was_asked_for_and_always_at_the_same_places() -> None:
    luck = Luck(3, (0.25, 1.0, 0.0))
    share = [sum(luck.agrees(number, place) for place in range(4000)) / 4000 for number in range(3)]
    assert share[0] == pytest.approx(0.25, abs=0.03)
    assert share[1:] == [1.0, 0.0]
    assert all(Luck(3, (0.5,)).agrees(7, place) == Luck(3, (0.5,)).agrees(7, place) for place in range(100))


def test_times_between_known_rows_lie_on_a_line_and_more_rows_are_more_passes() -> None:
    cost = StepCost({2: 10.0, 6: 18.0}, 8)
    assert [cost.seconds(rows) for rows in (0, 1, 2, 4, 6, 8, 9, 16)] == [0, 10, 10, 14, 18, 18, 28, 36]


def test_a_choice_that_waits_for_something_is_a_defect() -> None:
    async def waits() -> None:
        await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="waits for something"):
        at_once(waits())


@pytest.mark.parametrize(
    ("make", "field", "allowed"),
    [
        (lambda: Load(sessions=0), "sessions", "1 to 1000000"),
        (lambda: Load(prompt=2), "prompt", "3 to 1000000"),
        (lambda: Load(alphas=(1.5,)), "alpha", "0 to 1"),
        (lambda: Load(alphas=()), "alpha", "at least one rate"),
        (lambda: Fleet(verifiers=0), "verifiers", "1 to 10000"),
        (lambda: Fleet(drafts=-1), "drafts", "0 to 10000"),
        (lambda: busy(seconds=0), "seconds", "0.001 to"),
        (lambda: busy(loss=ZoneLoss(2, 1)), "lose_zone", "0 to 1"),
        (lambda: busy(loss=ZoneLoss(0, 500)), "lose_at_s", "0 to 201"),
        (lambda: busy(fleet=Fleet(), loss=ZoneLoss(0, 1)), "zones", "2 or more"),
        (lambda: busy(fleet=Fleet(4, 4, zones=2), loss=ZoneLoss(0, 1)), "orchestrators", "2 or more"),
        (lambda: busy(fleet=Fleet(1, 4, 2, zones=2), loss=ZoneLoss(0, 1)), "verifiers", "left without zone 0"),
        (lambda: step_cost("verify_ms", {0: 1.0}), "verify_ms", "1 to 4096 rows"),
        (lambda: step_cost("verify_ms", {1: 0.0}), "verify_ms", "more than 0"),
        (lambda: step_cost("verify_ms", {1: 3.0, 2: 2.0}), "verify_ms", "do not fall"),
        (lambda: replace(flat(), hop_s=-1.0), "hop_s", "0 or more"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_what_is_out_of_range_is_named(make, field: str, allowed: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidRequest, match=field) as caught:
        make()
    assert allowed in caught.value.message


def test_a_worker_that_is_gone_is_forgotten_when_its_announcement_is_too_old() -> None:
    cluster = Cluster(busy(loss=ZoneLoss(0, 1.5)))
    cluster.run()
    cluster.clock.run(cluster.clock.now_s + 6.0)
    left = {worker.worker_id for worker in at_once(cluster.registry.workers("verify"))}
    assert left == {WorkerId("v1")}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_thousand_sessions_on_a_thousand_workers() -> None:
    costs = Costs(step_cost("verify_ms", {1: 30, 128: 60}), step_cost("draft_ms", {1: 2, 128: 8}), hop_s=0.0005)
    fleet = Fleet(300, 700, 8, zones=4)
    found = simulate(Setting(costs, Load(10_000, 10, 6, 1), fleet, seconds=10_000, warm_up_s=2))
    assert (found.finished, found.failed) == (10_000, 0)


# --- the policy, over many short generations ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verify_ms", "draft_ms", "trip_ms", "alpha"),
    [(5, 1, 3, 0.7), (5, 1, 1, 0.7), (16, 1.3, 8, 0.3), (16, 1, 16, 0.7)],
    ids=["quick", "near", "seldom-right", "far"],
)
def test_short_generations_draft_at_least_as_fast_as_plain_and_as_a_fixed_plan(
    verify_ms: float, draft_ms: float, trip_ms: float, alpha: float
) -> None:
    # Of under half a second each, with one after the other: what one has learnt is of use to the next.
    def rate(choice: SpeculationChoice) -> float:
        load = Load(1, 64, 96, 0, (alpha,), choice)
        setting = Setting(flat(verify_ms, draft_ms, trip_ms), load, seconds=12, warm_up_s=4)
        return simulate(setting).session_tokens_per_s

    automatic = rate(SpeculationChoice())
    assert automatic > 0.97 * rate(OFF)
    assert automatic > 0.95 * rate(SpeculationChoice(gamma=4, window=8))


def test_a_simulated_verifier_refuses_to_give_bytes_of_kv() -> None:
    with pytest.raises(FailedPrecondition, match="no KV tier"):
        _ = TimedRunner(flat(), 4, 256, lambda _: None).block_access
