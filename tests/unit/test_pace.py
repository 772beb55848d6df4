"""What rounds take by rows, by waiting and without a draft, and what the policy makes of it."""

from dataclasses import replace

import pytest

from orchestrator.figures import Round
from orchestrator.pace import Pace
from orchestrator.pass_costs import MAX_VERIFIERS, CostsByVerifier, PassCosts
from orchestrator.plans import TRIAL
from orchestrator.tuning import EARLIER_SESSIONS, NOTHING_DRAFTED, PROBE_EVERY, PROBE_LIMIT, Limits, Tuning
from outrider.gamma import PLAIN, Costs, best_plan, plain_rate, sequential_rate
from outrider.generation import SpeculationChoice
from outrider.ids import Epoch, Generation, TokenKind, WorkerId
from outrider.messages import Speculation, VerdictCause

PLACE = Epoch(Generation(1, 1), 0)
STEPS_S = {1: 0.023, 2: 0.025, 4: 0.026, 8: 0.031, 16: 0.040, 32: 0.059}
"""What passes of the packaged model take, by rows that they are padded to."""


def pass_s(rows: int) -> float:
    return next(seconds for size, seconds in STEPS_S.items() if rows <= size)


def measured() -> PassCosts:
    costs = PassCosts()
    for size, seconds in STEPS_S.items():
        costs.observe(size, seconds)
    return costs


def drafted(accepted: int, tested: int, rows: int, epoch: Epoch = PLACE) -> Round:
    kinds = (TokenKind.ACCEPTED,) * accepted + (TokenKind.RECOVERED,) * (tested > accepted)
    return Round(epoch, epoch.next_round(), VerdictCause.TESTED, kinds, tested, accepted, pass_s(rows), 0.0, rows)


def plain(rows: int = 1, epoch: Epoch = PLACE) -> Round:
    return Round(
        epoch, epoch.next_round(), VerdictCause.PLAIN, (TokenKind.PLAIN,), 0, 0, pass_s(rows), 0.0, rows
    )  # fmt: skip


def test_rows_cost_what_the_class_costs_that_they_are_padded_to() -> None:
    by_rows = measured().by_own_rows(1.0, 17)
    assert by_rows == tuple(pass_s(rows) for rows in range(1, 18))


def test_with_company_everybody_is_taken_to_do_the_same() -> None:
    by_rows = measured().by_own_rows(8.0, 9)
    assert by_rows[0] == STEPS_S[8]
    assert by_rows[3] == STEPS_S[32]
    assert by_rows[4] == pytest.approx(STEPS_S[32] + STEPS_S[8])
    assert by_rows[7] == pytest.approx(2 * STEPS_S[32])


def test_an_unseen_class_costs_what_the_next_smaller_one_does_until_it_is_seen() -> None:
    costs = PassCosts()
    assert costs.by_own_rows(1.0, 4) == ()
    costs.observe(3, 0.03)
    assert costs.by_own_rows(1.0, 17) == (0.03,) * 8 + (0.06,) * 8 + (0.12,), "no class is skipped"
    costs.observe(32, 0.05)
    assert costs.by_own_rows(1.0, 17) == (0.03,) * 8 + (0.05,) * 9
    costs.observe(16, 0.05)
    assert costs.by_own_rows(1.0, 17) == (0.03,) * 8 + (0.05,) * 9


def shared(sessions: int, rows: int) -> Round:
    return replace(plain(rows), num_sessions=sessions)


def test_what_a_pass_takes_beside_the_model_is_the_time_between_passes_that_all_were_in() -> None:
    pace = Pace(PassCosts())
    neighbour = pace.passes.company.join()
    neighbour.drafted = True
    # Nothing before; 4 ms beside; a pass without a neighbour, and the time behind it; 4 ms; a prompt's pass between.
    for now_s, sessions in ((1.0, 2), (1.029, 2), (1.2, 1), (1.3, 2), (1.329, 2), (1.4, 2)):
        pace.observe(shared(sessions, 2), PLAIN, None, now_s)
    assert sum(pace.passes.beside.costs) == pytest.approx(0.004 * 3 / 5, rel=0.01)


def test_a_proposal_that_came_after_its_pass_says_nothing_of_when_that_ended() -> None:
    pace = Pace(PassCosts())
    late = replace(shared(2, 2), from_ahead=True)
    for now_s, verdict in (
        (1.0, shared(2, 2)),
        (1.03, late),
        (1.06, shared(2, 2)),
        (1.09, replace(late, queue_s=0.02)),
    ):
        pace.observe(verdict, PLAIN, None, now_s)
    assert pace.passes.beside.costs == pytest.approx((0.0025, 0.0), rel=0.01), "the last two alone"


def test_what_being_drafted_for_takes_beside_the_model_is_paid_by_all_who_share_the_passes() -> None:
    costs = measured()
    for drafts in (8, 0) * 20:
        costs.beside.observe(8, drafts, 0.0005 * 8 + 0.001 * drafts)
    assert costs.by_own_rows(8.0, 2) == pytest.approx((STEPS_S[8] + 0.004, STEPS_S[16] + 0.012), rel=0.01)
    assert costs.by_own_rows(1.0, 2) == (STEPS_S[1], STEPS_S[2]), "alone it is part of the round trip"


def test_a_larger_pass_is_never_taken_to_be_cheaper() -> None:
    costs = PassCosts()
    for rows, seconds in ((1, 0.03), (2, 0.02), (4, 0.04)):
        costs.observe(rows, seconds)
    assert costs.by_own_rows(1.0, 4) == (0.03, 0.03, 0.04, 0.04)


def test_a_verifiers_costs_are_shared_and_the_longest_unused_ones_forgotten() -> None:
    book = CostsByVerifier()
    first = book.of(WorkerId("v0"))
    assert book.of(WorkerId("v0")) is first
    for number in range(1, MAX_VERIFIERS + 1):
        book.of(WorkerId(f"v{number}"))
    assert book.of(WorkerId("v0")) is not first


def test_a_draft_that_costs_nothing_is_as_long_as_its_rows_are_worth() -> None:
    costs = Costs(0.0, 0.023, 0.0012, measured().by_own_rows(1.0, 17))
    plans = [best_plan(alpha, costs, 16, pipelined=True) for alpha in (0.4, 0.6, 0.95)]
    assert [(plan.restart_gamma, plan.gamma) for plan in plans] == [(3, 4), (3, 4), (15, 16)]
    assert best_plan(0.05, costs, 16, pipelined=True) == PLAIN
    assert best_plan(0.6, costs, 16, pipelined=False).gamma == 3
    assert sequential_rate(0.6, 3, costs) == pytest.approx((1 - 0.6**4) / 0.4 / (0.0012 + 0.026))
    assert plain_rate(costs) == pytest.approx(1 / 0.023)


def test_a_full_verifier_drafts_less_than_an_idle_one() -> None:
    alone = Costs(0.0, 0.023, 0.0012, measured().by_own_rows(1.0, 17))
    full = Costs(0.0, 0.031, 0.031, measured().by_own_rows(8.0, 17))
    assert best_plan(0.6, alone, 16, pipelined=True).enabled
    assert not best_plan(0.4, full, 16, pipelined=True).enabled


def test_undrafted_tokens_count_with_what_they_waited() -> None:
    pace = Pace(measured())
    for _ in range(8):
        pace.observe(drafted(3, 3, 4), Speculation(4, 3, 8), 0.002, 0.0)
        pace.observe(plain(), Speculation(4, 3, 8), 0.004, 0.0)
    costs = pace.costs(16)
    assert costs is not None
    assert pace.undrafted_share == 0.25
    plan = Speculation(3, 3, 3)
    drafted_s = 1 / sequential_rate(pace.alpha.alpha, 3, costs)
    assert 1 / pace.rate(plan, costs) == pytest.approx(0.25 * (STEPS_S[1] + 0.004) + 0.75 * drafted_s)
    assert pace.rate(PLAIN, costs) == pytest.approx(1 / STEPS_S[1])


def test_without_a_measurement_there_is_nothing_to_go_by() -> None:
    pace = Pace(PassCosts())
    assert pace.costs(16) is None
    pace.observe(plain(), PLAIN, None, 0.0)
    assert pace.costs(16) is None


class Lonely:
    """A session whose drafter never has anything to offer, beside others that make every answer late."""

    def __init__(self, waited_s: float, rows: int = 8) -> None:
        self.tuning = Tuning(SpeculationChoice(), Limits())
        self.waited_s, self.rows = waited_s, rows
        self.now_s = 0.0
        self.epoch = PLACE

    def round(self) -> None:
        self.tuning.restarted(self.epoch, self.now_s)
        self.now_s += STEPS_S[self.rows] + (self.waited_s if self.tuning.speculation.enabled else 0.0)
        self.tuning.observe(plain(self.rows, self.epoch), self.now_s)
        self.epoch = self.epoch.next_round()


def test_a_drafter_that_only_makes_the_verifier_wait_is_switched_off() -> None:
    session = Lonely(0.031)
    for _ in range(16):
        session.round()
    assert (session.tuning.speculation, session.tuning.reason) == (PLAIN, NOTHING_DRAFTED)


def test_waiting_that_hardly_matters_switches_nothing_off_that_has_a_pass_to_itself() -> None:
    session = Lonely(0.0002, rows=1)
    for _ in range(100):
        session.round()
    assert session.tuning.speculation.enabled


def test_a_probe_without_guesses_ends() -> None:
    session = Lonely(0.031)
    while session.tuning.speculation.enabled or session.tuning.reason != NOTHING_DRAFTED:
        session.round()
    on = []
    for _ in range(PROBE_EVERY + PROBE_LIMIT + 1):
        session.now_s += 0.1  # a probe comes after a number of tokens, but no sooner than after some time
        session.round()
        on.append(session.tuning.speculation.enabled)
    assert sum(on) == PROBE_LIMIT + 1
    assert not on[-1]


def full_house(accepted: int, tested: int, num_sessions: int = 8, trip_s: float = 0.002) -> PassCosts:
    """Return the costs of a verifier whose sessions fill its passes, and whose drafts are accepted so often."""
    passes = measured()
    for _ in range(num_sessions):
        passes.company.join()
        pace = Pace(passes)
        for _ in range(10):
            pace.observe(drafted(accepted, tested, 32), Speculation(4, 4, 4), max(0.05, trip_s), 9.5)
            pace.observe_trip(trip_s)
        pace.leave()
    return passes


def begun(passes: PassCosts, now_s: float, choice: SpeculationChoice | None = None) -> Tuning:
    tuning = Tuning(choice or SpeculationChoice(), Limits(), Pace(passes))
    tuning.begin(now_s)
    return tuning


def test_a_session_beside_others_begins_with_what_they_have_seen() -> None:
    assert begun(full_house(0, 4), 10.0).speculation == TRIAL, "its text may be quite unlike theirs"
    lost = begun(full_house(0, 4, trip_s=0.2), 10.0)
    assert (lost.speculation, lost.reason) == (PLAIN, EARLIER_SESSIONS), "a trial would take too long"
    assert begun(full_house(4, 4), 10.0).speculation.gamma > 1


def test_beside_others_of_whom_nothing_is_known_a_session_begins_with_a_trial() -> None:
    passes = measured()
    others = [passes.company.join() for _ in range(3)]
    assert begun(passes, 10.0).speculation == TRIAL
    for other in others:
        passes.company.leave(other)
    assert begun(passes, 10.0).speculation == Limits().default, "sessions that have ended are nobody's company"


def test_what_others_waited_long_ago_counts_no_more() -> None:
    passes = measured()
    pace = Pace(passes)
    for _ in range(40):
        pace.observe(drafted(0, 1, 32), Speculation(4, 4, 4), 0.05, 9.5)
    assert passes.neighbours(10.0) is not None
    assert passes.neighbours(60.0) is None
    assert begun(PassCosts(), 10.0).speculation == Limits().default


def test_a_pinned_plan_begins_as_it_was_asked_for() -> None:
    choice = SpeculationChoice(gamma=5)
    assert begun(full_house(1, 4), 10.0, choice).speculation.gamma == 5
