"""The whole policy in simulated time: against plain decoding, against fixed proposals, by load, text and machine.

Simulated time is the same on every machine, so ratios are asserted. `python -m benchmarks.control` measures the same on
real processes.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from orchestrator.company import Company
from orchestrator.figures import Round
from orchestrator.pace import Pace
from orchestrator.pass_costs import PassCosts
from orchestrator.plans import FIRST_TESTS, TRIAL, Limits
from orchestrator.priors import DEFAULT_WORTH, MAX_UNTRIED, MAX_WORTH, Prior
from orchestrator.tuning import LEARN_ROUNDS, STRIDE, Tuning
from outrider.ahead import Claim, ahead_rate, best_ahead, divide_rows
from outrider.gamma import PLAIN, Costs, best_plan, pipelined_rate, plain_rate
from outrider.generation import SpeculationChoice
from outrider.ids import Epoch, Generation, TokenKind
from outrider.messages import DraftStatus, VerdictCause
from tests.unit.control_machines import (
    BUSY,
    FAR,
    GPU,
    LOOKUP_ON_CPU,
    ONE_MEMORY,
    QUICK,
    SLOW_DRAFTER,
    TRAINED_ON_CPU,
    Machine,
)
from tests.unit.control_sim import OFF, Simulation, Text

GAMMAS = (1, 2, 4)
ALIKE, MIXED = (0.45, 0.5, 0.55), (0.3, 0.5, 0.85)


def texts(num: int, alphas: Sequence[float], undrafted: Sequence[float] = (0.0,), *, seed: int = 1) -> list[Text]:
    dice = Random(seed)
    return [Text(dice.choice(alphas), dice.choice(undrafted)) for _ in range(num)]


def ratios(machine: Machine, said: Sequence[Text], places: int) -> dict[str, float]:
    """Return tokens per second of the policy and of fixed gammas, in those of plain decoding."""
    plain = Simulation(machine, said, places, choice=OFF).run().rate
    choices = {"automatic": SpeculationChoice()} | {str(gamma): SpeculationChoice(gamma=gamma) for gamma in GAMMAS}
    return {
        name: Simulation(machine, said, places, choice=choice).run().rate / plain for name, choice in choices.items()
    }


CASES = {
    "lookup, alone": (LOOKUP_ON_CPU, (0.6, 0.8, 0.9), (0.5, 0.8, 0.95), 1),
    "lookup, 4": (LOOKUP_ON_CPU, (0.6, 0.8, 0.9), (0.5, 0.8, 0.95), 4),
    "lookup, 16": (LOOKUP_ON_CPU, (0.6, 0.8, 0.9), (0.5, 0.8, 0.95), 16),
    "texts alike, alone": (TRAINED_ON_CPU, ALIKE, (0.0,), 1),
    "texts alike, 4": (TRAINED_ON_CPU, ALIKE, (0.0,), 4),
    "texts alike, 8": (TRAINED_ON_CPU, ALIKE, (0.0,), 8),
    "a quick drafter, texts alike, 8": (QUICK, (0.6,), (0.0,), 8),
    "texts differ, 16": (TRAINED_ON_CPU, MIXED, (0.0,), 16),
    "seldom right, alone": (TRAINED_ON_CPU, (0.25,), (0.0,), 1),
    "texts differ, alone": (TRAINED_ON_CPU, MIXED, (0.0,), 1),
    "texts differ, 4": (TRAINED_ON_CPU, MIXED, (0.0,), 4),
    "a trip of half a pass, seldom right": (FAR, (0.3,), (0.0,), 1),
    "a trip of half a pass, at times right": (FAR, (0.45,), (0.0,), 1),
    "a trip of half a pass, mostly right": (FAR, (0.65,), (0.0,), 1),
    "messages that take their time, 4": (BUSY, MIXED, (0.0,), 4),
    "messages that take their time, 8": (BUSY, MIXED, (0.0,), 8),
    "one memory, alone": (ONE_MEMORY, ALIKE, (0.0,), 1),
    "one memory, 4": (ONE_MEMORY, MIXED, (0.0,), 4),
    "one memory, texts alike, 4": (ONE_MEMORY, ALIKE, (0.0,), 4),
    "a GPU, alone": (GPU, (0.5, 0.7, 0.8), (0.0,), 1),
    "a GPU, 8": (GPU, (0.5, 0.7, 0.8), (0.0,), 8),
    "a drafter that is never right, alone": (TRAINED_ON_CPU, (0.0,), (0.0,), 1),
    "a drafter that is never right, 8": (TRAINED_ON_CPU, (0.0,), (0.0,), 8),
}


@pytest.mark.parametrize("name", CASES)
def test_the_policy_is_no_slower_than_plain_and_close_to_the_best_fixed_proposals(name: str) -> None:
    machine, alphas, undrafted, places = CASES[name]
    found = ratios(machine, texts(max(16, 3 * places), alphas, undrafted), places)
    best = max(rate for gamma, rate in found.items() if gamma != "automatic")
    assert found["automatic"] >= 0.97, found
    assert found["automatic"] >= 0.95 * best, found


def test_a_drafter_that_takes_a_fifth_of_a_pass_for_a_token_is_made_use_of_beside_others() -> None:
    """Its runs fit into a pass, and no session is kept waiting for its share: twice plain decoding's speed."""
    easy = texts(16, (0.8, 0.9))
    plain = Simulation(SLOW_DRAFTER, easy, 4, choice=OFF).run().rate
    assert Simulation(SLOW_DRAFTER, easy, 4).run().rate >= 2.0 * plain


@pytest.mark.parametrize("seed", [1, 3])
@pytest.mark.parametrize("places", [1, 4, 16])
@pytest.mark.parametrize("machine", [TRAINED_ON_CPU, GPU], ids=["cpu", "gpu"])
def test_in_steady_load_a_session_switches_at_most_once_in_ten_seconds(
    machine: Machine, places: int, seed: int
) -> None:
    """The first choice is none: a session that begins knows nothing of its text. Where one ends the load is another."""
    passes = PassCosts()
    passes.observe(1, machine.pass_s(1, 1), is_plain=True)
    for rows in (1, 2, 4, 8, 16, 32):
        passes.observe(rows, machine.pass_s(rows, min(rows, places)))
    num_tokens = 1000 if places < 16 else 300
    done = Simulation(machine, texts(places, MIXED, seed=seed), places, num_tokens=num_tokens, passes=passes).run()
    for switches in done.switches:
        settled = [when_s for when_s in switches[1:] if when_s <= done.seconds]
        assert all(later - earlier >= 10.0 for earlier, later in pairwise(settled)), switches


def speed_up(machine: Machine, before: Sequence[Text], last: Text, num_tokens: int = 96) -> float:
    """Return the tokens per second of a session behind others, in those of plain decoding."""
    passes = PassCosts()
    if before:
        Simulation(machine, before, 1, passes=passes).run()
    plain = Simulation(machine, [last], 1, choice=OFF, num_tokens=num_tokens).run().rate
    return Simulation(machine, [last], 1, passes=passes, num_tokens=num_tokens).run().rate / plain


HISTORIES = {
    "a drafter that was hardly ever right": (TRAINED_ON_CPU, [Text(0.05)] * 12),
    "the same on a GPU": (GPU, [Text(0.05)] * 12),
    "chats in which nothing repeats": (LOOKUP_ON_CPU, [Text(0.3, 0.97)] * 12),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_what_earlier_sessions_say_keeps_no_session_from_finding_out_that_its_text_is_different(name: str) -> None:
    machine, before = HISTORIES[name]
    fresh, behind = (speed_up(machine, texts, Text(0.95)) for texts in ([], before))
    assert fresh > 1.5
    assert behind >= 0.9 * fresh, (fresh, behind)


@pytest.mark.parametrize("num_tokens", [40, 100])
@pytest.mark.parametrize("trip", [0.5, 1.2, 1.9, 2.5])
def test_a_trial_of_a_drafter_that_is_too_slow_costs_little_of_an_answer(trip: float, num_tokens: int) -> None:
    """`trip`: what a draft token and its way take, in passes."""
    machine = replace(TRAINED_ON_CPU, draft_s=trip * TRAINED_ON_CPU.pass_s(1, 1) - 2 * TRAINED_ON_CPU.hop_s)
    assert speed_up(machine, [Text(0.05)] * 12, Text(0.05), num_tokens=num_tokens) >= 0.98


def test_why_nothing_is_drafted_is_told_apart() -> None:
    full = Simulation(TRAINED_ON_CPU, texts(48, ALIKE), 16).run()
    assert "passes_full" in full.off
    useless = Simulation(TRAINED_ON_CPU, texts(12, (0.0,)), 1).run()
    assert useless.off[-1] == "below_plain", "it has made a trial of its own"
    slow = replace(TRAINED_ON_CPU, draft_s=0.1)
    assert Simulation(slow, texts(6, (0.0,)), 1).run().off[-1] == "earlier_sessions"


def test_a_drafter_that_earlier_sessions_found_too_slow_is_tried_again_now_and_then() -> None:
    slow = replace(TRAINED_ON_CPU, draft_s=0.1)
    off = Simulation(slow, texts(40, (0.0,)), 1).run().off
    assert off[11:].count("below_plain") == 1 + 27 // (MAX_UNTRIED + 1)
    assert set(off[10:]) == {"below_plain", "earlier_sessions"}


def test_sessions_make_only_short_trials_once_others_have_made_theirs() -> None:
    passes = PassCosts()
    first = Simulation(TRAINED_ON_CPU, texts(12, (0.0,)), 1, passes=passes).run()
    later = Simulation(TRAINED_ON_CPU, texts(12, (0.0,)), 1, passes=passes).run()
    assert later.num_tested <= 12 * FIRST_TESTS < 0.6 * first.num_tested


# --- ahead ----------------------------------------------------------------------------------------------------------

FLAT = Costs(0.002, 0.02, 0.003)


def test_one_token_ahead_is_as_fast_as_plain_decoding_whatever_alpha_is() -> None:
    for alpha in (0.0, 0.3, 0.7, 1.0):
        assert ahead_rate(alpha, 1, 1, FLAT) == pytest.approx(plain_rate(FLAT))
    slow = Costs(0.03, 0.02, 0.003)
    assert ahead_rate(0.0, 1, 1, slow) == pytest.approx(1 / 0.033)


def test_ahead_a_chain_takes_a_pass_for_its_first_token_and_one_for_each_run() -> None:
    """By hand: g0 = g = 2, alpha 1/2: a pass; with 1/2 a second one; with 1/4 each of those that follow another."""
    passes = 1 + 0.5 * (1 + 0.25 / (1 - 0.25))
    assert ahead_rate(0.5, 2, 2, Costs(0.0, 1.0)) == pytest.approx(2.0 / passes)


def test_running_ahead_wins_where_little_is_accepted_and_waiting_where_much_is() -> None:
    rows = Costs(0.002, 0.0173, 0.003, (0.0173, 0.0175, 0.0191, 0.0191, *(0.0243,) * 4, *(0.0335,) * 9))
    low, high = best_ahead(0.2, rows, 16), best_ahead(0.95, rows, 16)
    waiting_low, waiting_high = best_plan(0.2, rows, 16, pipelined=True), best_plan(0.95, rows, 16, pipelined=True)
    assert not waiting_low.enabled
    assert low[1] > 1.01 * plain_rate(rows)
    assert pipelined_rate(0.95, waiting_high.restart_gamma, waiting_high.gamma, rows) > high[1]


# --- rows -----------------------------------------------------------------------------------------------------------


def stairs(rows: int) -> float:
    return 1.0 if rows <= 16 else 1.6


def test_rows_go_where_a_token_is_likeliest_to_be_accepted() -> None:
    claims = [Claim(0.9), Claim(0.2), Claim(0.6), Claim(0.9, undrafted=0.9)]
    division = divide_rows(claims, 0, stairs)
    assert division.rows[0] > division.rows[2] > division.rows[1]
    assert division.rows[0] >= division.rows[3]
    assert division.gain > 1.0


def test_where_passes_are_nearly_full_the_least_likely_give_their_rows_up_first() -> None:
    claims = [Claim(alpha) for alpha in (0.9, 0.8, 0.5, 0.3)]
    roomy, tight = divide_rows(claims, 0, stairs).rows, divide_rows(claims, 9, stairs).rows
    given_up = [(before - after) / (before - 1) for before, after in zip(roomy, tight, strict=True) if before > 1]
    assert tight[0] > 1
    assert tight[-1] == 1
    assert given_up == sorted(given_up)


def test_in_full_passes_nobody_drafts() -> None:
    division = divide_rows([Claim(0.6)] * 16, 0, stairs)
    assert (division.rows, division.gain) == ((1,) * 16, 1.0)


def test_a_division_stays_until_another_one_is_better_by_a_margin() -> None:
    company = Company()
    members = [company.join() for _ in range(2)]
    for member in members:
        member.alpha, member.most = 0.3, 16

    def steep(rows: int) -> float:
        return 1.0 + 0.1 * (rows - 2)

    company.divide(2, steep, 0.0)
    first = [member.rows for member in members]
    assert 1.0 < company.gain < 1.04
    assert first == [1, 1]
    members[0].rows = 2
    assert not company.is_due(0.1), "no sooner than after a quarter of a second"
    assert company.is_due(1.0)
    company.divide(2, steep, 1.0)
    assert 1.01 < company.gain < 1.04
    assert [member.rows for member in members] == [2, 2]
    assert company.drafts


def test_how_far_rows_vary_about_their_mean_decides_whether_a_pass_is_full() -> None:
    """Eight sessions with half their passes of three rows: sixteen rows on average, and every third pass is above."""
    claims = [Claim(0.65, most=3)] * 8
    enough, tight = divide_rows(claims, 0, lambda rows: 1.0 if rows <= 24 else 1.6), divide_rows(claims, 0, stairs)
    assert enough.gain > 1.4
    assert enough.rows == (3,) * 8
    assert tight.gain < enough.gain
    assert sum(tight.rows) < 24


def test_who_claims_rows_for_the_first_time_need_not_wait_for_the_next_division() -> None:
    company = Company()
    first, second = company.join(), company.join()
    company.claim(first, 16)
    company.divide(2, lambda _: 1.0, 0.0)
    assert first.rows > 1
    company.claim(second, 16)
    assert company.is_due(0.0)
    company.divide(2, lambda _: 1.0, 0.0)
    assert second.rows > 1
    company.claim(second, 8)
    assert not company.is_due(0.1)


def test_passes_are_taken_for_those_of_all_who_share_them() -> None:
    """Eight, of whom two have yet to begin; or eight, as passes say, where one that asks remembers nine."""
    passes = PassCosts()
    for size, seconds in ((8, 0.022), (16, 0.030)):
        for is_plain in (True, False):
            passes.observe(size, seconds, is_plain=is_plain)
    members = [passes.company.join() for _ in range(8)]
    for member in members[:6]:
        member.alpha, member.most = 0.5, 16
    for now_s, load, remembered in ((1.0, 6.0, 6), (2.0, 8.0, 9)):
        for _ in range(32):
            passes.note(now_s, load, None, (0, 0))
        passes.divide(remembered, now_s)
        assert not passes.company.drafts


def beside_others(passes: PassCosts, draft_s: float = 0.001) -> Tuning:
    """Return a session beside others whose texts have all been easy, on a GPU that has room."""
    for size in (1, 2, 4, 8, 16, 32):
        for is_plain in (True, False):
            passes.observe(size, 0.02, is_plain=is_plain)
    for _ in range(2):
        passes.priors.of("d").note((80, 100), 0.0, 0.001, draft_s)
    others = [Tuning(SpeculationChoice(), Limits(), Pace(passes)) for _ in range(3)]
    for other in others:
        other.begin(0.0, "d")
    tuning = Tuning(SpeculationChoice(), Limits(), Pace(passes))
    tuning.begin(0.0, "d")
    return tuning


def test_beside_others_no_run_is_longer_than_what_is_drafted_in_a_pass() -> None:
    """One that takes longer misses passes: 20 ms a pass, 1 and 6 ms a token."""
    assert beside_others(PassCosts()).speculation.gamma > 3
    assert beside_others(PassCosts(), draft_s=0.006).speculation.gamma == 3
    assert beside_others(PassCosts(), draft_s=0.012).speculation in (PLAIN, TRIAL)


def test_where_nobody_is_to_draft_any_more_all_stop_at_once() -> None:
    """A few that go on would make everybody's passes the larger ones for little."""
    passes = PassCosts()
    tuning = beside_others(passes)
    place = Epoch(Generation(1, 1), 0)
    tested = Round(place, place, VerdictCause.TESTED, (TokenKind.ACCEPTED,) * 3, 3, 3, 0.02, 0.0, 4, 4)
    for number in range(STRIDE + 1):
        tuning.observe(tested, 0.02 * number)
    assert tuning.speculation.gamma > 2
    for size in (8, 16, 32):
        for _ in range(64):
            passes.observe(size, 0.2)
    passes.divide(4, 1.0)
    assert not passes.company.drafts
    tuning.observe(tested, 1.0)
    assert tuning.speculation in (PLAIN, TRIAL)


def test_who_decodes_plain_has_no_share_in_the_rows() -> None:
    """It does not take any before its probe: what the division promises must not count on it."""
    passes = PassCosts()
    tuning = beside_others(passes)
    assert passes.company.drafts
    others = [member for member in passes.company.members if member.most > 1]
    tuning.speculation = PLAIN
    place = Epoch(Generation(1, 1), 0)
    tuning.observe(Round(place, place, VerdictCause.PLAIN, (TokenKind.PLAIN,), 0, 0, 0.02, 0.0, 4, 4), 0.02)
    assert len([member for member in passes.company.members if member.most > 1]) == len(others) - 1


def test_who_is_drafted_for_has_to_be_worth_what_it_takes_beside_the_rows() -> None:
    claims = [Claim(0.9), Claim(0.6), Claim(0.5), Claim(0.4)]
    free, dear = divide_rows(claims, 0, stairs), divide_rows(claims, 0, stairs, 0.2)
    assert free.rows[-1] > 1
    assert dear.rows[0] > 1
    assert dear.rows[-1] == 1
    assert divide_rows(claims, 0, stairs, 2.0).rows == (1, 1, 1, 1)


def test_a_session_that_chose_before_others_came_gives_its_rows_up_with_its_next_round() -> None:
    passes = PassCosts()
    for size in (1, 2, 4, 8, 16, 32):
        for is_plain in (True, False):
            passes.observe(size, 0.02 + 0.2 * (size > 8), is_plain=is_plain)
    passes.priors.of("d").note((80, 100), 0.0, 0.001, 0.001)
    passes.priors.of("d").note((80, 100), 0.0, 0.001, 0.001)
    tuning = Tuning(SpeculationChoice(), Limits(), Pace(passes))
    tuning.begin(0.0, "d")
    assert tuning.speculation.gamma > 4
    others = [Tuning(SpeculationChoice(), Limits(), Pace(passes)) for _ in range(7)]
    for other in others:
        other.begin(0.01, "d")
    place = Epoch(Generation(1, 1), 0)
    kinds = (TokenKind.ACCEPTED,)
    verdict = Round(place, place.next_round(), VerdictCause.TESTED, kinds, 1, 1, 0.03, 0.0, 8, 8)
    tuning.observe(verdict, 0.3)
    others[0].observe(verdict, 0.6)
    tuning.observe(verdict, 0.61)
    assert tuning.speculation.gamma == 1


def test_no_plan_is_chosen_before_it_is_known_what_a_pass_without_drafts_takes() -> None:
    """A first session on a new cluster has only seen passes with drafts: they say nothing of what plain ones take."""
    tuning = Tuning(SpeculationChoice(), Limits(), Pace(PassCosts()))
    tuning.begin(0.0, "d")
    tuning.observe_status(DraftStatus(draft_s_per_token=0.001, num_drafted=1))
    place = Epoch(Generation(1, 1), 0)
    rejected = Round(place, place.next_round(), VerdictCause.TESTED, (TokenKind.RECOVERED,), 1, 0, 0.019, 0.0, 4, 1)
    now_s = 0.0
    for _ in range(16):
        tuning.restarted(place, now_s)
        now_s += 0.03
        tuning.observe(rejected, now_s)
    assert tuning.speculation == PLAIN
    plain = replace(
        rejected, cause=VerdictCause.PLAIN, kinds=(TokenKind.PLAIN,), num_tested=0, verify_s=0.01, num_rows=1
    )
    for _ in range(LEARN_ROUNDS):
        now_s += 0.01
        tuning.observe(plain, now_s)
    assert not tuning.speculation.enabled, "nine passes of 10 ms in the time of five drafted ones"


def test_passes_that_drafting_slows_down_count_against_it() -> None:
    """A draft worker on the verifier's machine shares its memory: of a row 19 ms are left of 16."""
    passes = PassCosts()
    pace = Pace(passes)
    for rows, seconds in ((1, 0.019), (2, 0.019), (4, 0.0195), (8, 0.022)):
        passes.observe(rows, seconds)
    costs = Costs(0.001, 0.019, 0.003, passes.by_own_rows(1.0, 8))
    before = pace.rate(TRIAL, costs) / pace.rate(PLAIN, costs)
    passes.observe(1, 0.016, is_plain=True)
    assert before == pytest.approx(1.0)
    assert pace.rate(TRIAL, costs) / pace.rate(PLAIN, costs) == pytest.approx(16 / 19)


def test_passes_without_drafts_are_known_by_rows_or_else_by_what_other_rows_have_lost() -> None:
    passes = PassCosts()
    assert passes.plain_s(4) is None
    for rows in (1, 4, 8):
        passes.observe(rows, 0.02 * rows)
    assert passes.plain_s(4) is None, "nobody has seen one"
    passes.observe(1, 0.015, is_plain=True)
    assert passes.plain_s(4) == pytest.approx(0.06)
    passes.observe(4, 0.07, is_plain=True)
    assert passes.plain_s(4) == pytest.approx(0.07)
    claims = [Claim(0.5, most=4)] * 4
    free, slowed = (divide_rows(claims, 0, lambda rows: 0.02 + 0.0001 * rows, 0.0, plain_s) for plain_s in (None, 0.02))
    assert slowed.gain == pytest.approx(free.gain * 0.02 / 0.0204)


# --- priors ---------------------------------------------------------------------------------------------------------


def seen(*rates: float, tests: int = 32) -> Prior:
    prior = Prior()
    for rate in rates:
        prior.note((rate * tests, tests), 0.0, 0.003, 0.002)
    return prior


def test_sessions_that_are_all_alike_are_worth_many_tests_and_different_ones_few() -> None:
    alike, different = seen(*[0.5] * 8).estimator(), seen(*[0.1, 0.9] * 4).estimator()
    assert [alike.alpha, different.alpha] == pytest.approx([0.5, 0.5], abs=0.01)
    assert alike.prior_tests == MAX_WORTH
    assert different.prior_tests < 3.0
    assert seen(0.2).estimator().prior_tests == DEFAULT_WORTH


def test_differences_by_chance_are_no_differences_of_texts() -> None:
    dice = Random(3)
    rates = [sum(dice.random() < 0.5 for _ in range(16)) / 16 for _ in range(60)]
    assert seen(*rates, tests=16).estimator().prior_tests > 20


def test_few_texts_that_nobody_could_draft_leave_hope_for_the_next() -> None:
    prior = Prior()
    for _ in range(7):
        prior.note((0, 0), 1.0, None, 0.0)
    assert (prior.undrafted, prior.hoped_undrafted) == (1.0, 0.0)
    prior.note((0, 0), 0.25, None, 0.0)
    assert prior.hoped_undrafted == 1.0
    for _ in range(2):
        prior.note((0, 0), 0.25, None, 0.0)
    assert prior.hoped_undrafted == 0.25


def test_a_prior_is_of_use_once_there_are_tests_enough() -> None:
    prior = Prior()
    assert (prior.is_known, prior.trip_s, prior.undrafted) == (False, None, 0.0)
    prior.note((3, 8), 0.5, 0.004, 0.0)
    assert not prior.is_known
    prior.note((10, 20), None, 0.002, 0.005)
    assert prior.is_known
    assert (prior.trip_s, prior.undrafted, prior.draft_s) == (pytest.approx(0.003), 0.5, 0.005)
