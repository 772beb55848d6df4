"""Policy glue: what is measured, when the plan changes, and how patience follows the restarts."""

from orchestrator.figures import Round
from orchestrator.plans import TRIAL
from orchestrator.tuning import BELOW_PLAIN, MIN_TESTS, OFF_S, PROBE_EVERY, PROBE_ROUNDS, STRIDE, Limits, Tuning
from outrider.gamma import PLAIN
from outrider.generation import SpeculationChoice
from outrider.ids import Epoch, Generation, TokenKind
from outrider.messages import DraftStatus, Speculation, VerdictCause

FREE = SpeculationChoice()
LIMITS = Limits(Speculation(4, 4, 8), max_gamma=16)


def committed(accepted: int, tested: int, *, epoch: int = 0, cause: str = VerdictCause.TESTED) -> Round:
    kinds = (TokenKind.ACCEPTED,) * accepted + (TokenKind.RECOVERED,) * (tested > accepted)
    if not kinds:
        kinds = (TokenKind.PLAIN,)
    place = Epoch(Generation(1, 1), epoch)
    return Round(place, place.next_round(), cause, kinds, tested, accepted, 0.03, 0.0)


class Session:
    """A session whose restarts take a given time."""

    def __init__(self, choice: SpeculationChoice = FREE, limits: Limits = LIMITS, draft_s: float = 0.003) -> None:
        self.tuning = Tuning(choice, limits)
        self.tuning.observe_status(DraftStatus(draft_s_per_token=draft_s))
        self.now_s = 0.0
        self.epoch = 0

    def round(self, accepted: int, tested: int, restart_s: float = 0.05) -> bool:
        """Restart, test; return whether the plan or the patience changed."""
        self.epoch += 1
        self.tuning.restarted(Epoch(Generation(1, 1), self.epoch), self.now_s)
        self.now_s += restart_s
        return self.tuning.observe(committed(accepted, tested, epoch=self.epoch), self.now_s) is not None

    def wait_for_probe(self, token_s: float = 0.2) -> int:
        """Decode plain until something is drafted; return how many tokens that took."""
        tokens = 0
        while not self.tuning.speculation.enabled:
            self.now_s += token_s
            self.tuning.observe(committed(0, 0, cause=VerdictCause.PLAIN), self.now_s)
            tokens += 1
        return tokens

    def disappoint(self) -> None:
        """Reject everything until nothing is drafted any more."""
        for _ in range(200):
            if self.tuning.speculation.enabled:
                self.round(0, 1)


def test_before_measurements_the_default_holds_and_patience_is_generous() -> None:
    tuning = Tuning(FREE, LIMITS)
    assert (tuning.speculation, tuning.patience_s) == (Speculation(4, 4, 8), LIMITS.max_patience_s)
    assert tuning.pace.trip_s is None
    assert tuning.pace.verify_s is None


def test_a_good_drafter_is_allowed_longer_proposals() -> None:
    session = Session()
    for _ in range(100):
        session.round(8, 8)
    assert session.tuning.speculation.gamma > 4
    assert session.tuning.speculation.window > session.tuning.speculation.gamma


def test_until_it_is_known_what_drafting_takes_no_proposal_grows() -> None:
    session = Session(draft_s=0.0)
    for _ in range(3 * STRIDE):
        session.round(4, 4)
    assert session.tuning.speculation == LIMITS.default
    session.tuning.observe_status(DraftStatus(draft_s_per_token=0.001))
    for _ in range(STRIDE):
        session.round(4, 4)
    assert session.tuning.speculation.gamma > 4


def test_a_useless_drafter_is_switched_off_and_probed_ever_more_seldom() -> None:
    session = Session(draft_s=0.02)
    session.disappoint()
    assert (session.tuning.speculation, session.tuning.reason) == (PLAIN, BELOW_PLAIN)
    waits = []
    for _ in range(3):
        waits.append(session.wait_for_probe())
        assert session.tuning.speculation == TRIAL
        for _ in range(PROBE_ROUNDS):
            session.round(0, 1)
        assert session.tuning.speculation == PLAIN
    assert waits == [PROBE_EVERY, 2 * PROBE_EVERY, 4 * PROBE_EVERY]


def test_a_session_that_was_switched_off_is_not_probed_for_some_time_however_fast_it_is() -> None:
    session = Session(draft_s=0.02)
    session.disappoint()
    assert session.wait_for_probe(token_s=OFF_S / 999.5) == 1000


def test_a_probe_of_a_drafter_that_has_become_good_switches_it_on() -> None:
    session = Session(draft_s=0.02)
    session.disappoint()
    session.tuning.observe_status(DraftStatus(draft_s_per_token=0.001))
    for _ in range(8):
        if not session.tuning.speculation.enabled:
            session.wait_for_probe()
        for _ in range(PROBE_ROUNDS):
            session.round(2, 2, restart_s=0.035)
    assert session.tuning.speculation.gamma > 1
    for _ in range(100):
        session.round(2, 2, restart_s=0.035)
    assert session.tuning.speculation.enabled


def test_a_probe_ends_at_once_when_patience_runs_out() -> None:
    session = Session(draft_s=0.02)
    session.disappoint()
    session.wait_for_probe()
    session.tuning.observe(committed(0, 0, cause=VerdictCause.PATIENCE), session.now_s)
    assert session.tuning.speculation == PLAIN


def test_the_plan_does_not_change_every_round() -> None:
    session = Session()
    changes = 0
    for _ in range(400):
        drafted_s = session.tuning.speculation.restart_gamma * 0.003
        changes += session.round(3, 4, restart_s=drafted_s + 0.03 + 0.011)
    assert changes <= 6


def test_nothing_changes_before_enough_was_tested() -> None:
    session = Session()
    changed = [session.round(0, 1) for _ in range(MIN_TESTS - 1)]
    assert not any(changed[: STRIDE - 1])
    assert session.tuning.speculation == LIMITS.default


def test_a_requests_own_figures_stay() -> None:
    pinned = Session(SpeculationChoice(gamma=3, restart_gamma=2, window=12))
    for _ in range(100):
        pinned.round(0, 1)
    assert pinned.tuning.speculation == Speculation(3, 2, 12)
    assert Tuning(SpeculationChoice(gamma=3), LIMITS).speculation == Speculation(3, 3, 6)
    assert Tuning(SpeculationChoice(gamma=3), Limits(pipelined=False)).speculation == Speculation(3, 3, 3)
    assert Tuning(SpeculationChoice(restart_gamma=2), LIMITS).speculation == Speculation(4, 2, 8)
    assert Tuning(SpeculationChoice(off=True), LIMITS).speculation == PLAIN


def test_without_adaptation_the_default_stays() -> None:
    session = Session(limits=Limits(adaptive=False))
    for _ in range(100):
        session.round(0, 1)
    assert session.tuning.speculation == Limits().default


def test_the_round_trip_is_what_a_restart_takes_beside_drafting_and_the_pass() -> None:
    session = Session(SpeculationChoice(gamma=4))
    for _ in range(10):
        session.round(1, 2, restart_s=0.03 + 4 * 0.003 + 0.01)
    assert abs((session.tuning.pace.trip_s or 0.0) - 0.01) < 1e-9
    assert abs(session.tuning.network_s - 0.1) < 1e-9


def test_a_verdict_of_another_epoch_ends_no_restart() -> None:
    tuning = Tuning(FREE, LIMITS)
    tuning.restarted(Epoch(Generation(1, 1), 5), 0.0)
    tuning.observe(committed(1, 1, epoch=4), 1.0)
    assert tuning.pace.trip_s is None


def test_patience_follows_the_slowest_restarts_within_its_bounds() -> None:
    session = Session(SpeculationChoice(gamma=4))
    for _ in range(64):
        session.round(1, 2, restart_s=0.1)
    assert abs(session.tuning.patience_s - 0.3) < 1e-9
    quick = Session(SpeculationChoice(gamma=4))
    for _ in range(64):
        quick.round(1, 2, restart_s=0.001)
    assert quick.tuning.patience_s == LIMITS.min_patience_s


def test_patience_that_runs_out_grows() -> None:
    session = Session(SpeculationChoice(gamma=4))
    for _ in range(64):
        session.round(1, 2, restart_s=0.05)
    before = session.tuning.patience_s
    for _ in range(STRIDE):
        session.tuning.observe(committed(0, 0, cause=VerdictCause.PATIENCE), session.now_s)
    assert session.tuning.patience_s > before


def test_a_drafter_of_which_nothing_has_come_is_given_less_each_time() -> None:
    tuning = Tuning(SpeculationChoice(gamma=4), LIMITS)
    given = []
    for _ in range(4):
        tuning.observe(committed(0, 0, cause=VerdictCause.PATIENCE), 0.0)
        given.append(tuning.patience_s)
    assert given == [0.5, 0.125, 0.1, 0.1]


def test_a_worker_opened_anew_is_given_the_time_of_a_start() -> None:
    session = Session(SpeculationChoice(gamma=4))
    for _ in range(64):
        session.round(1, 2, restart_s=0.05)
    tuned = session.tuning.attached(100)
    assert (tuned.speculation, tuned.patience_s) == (session.tuning.speculation, LIMITS.max_patience_s)
    assert not session.round(1, 2)


def test_a_drafter_attached_to_a_long_session_is_given_time_to_read_it() -> None:
    """Three expiries replace it: 1,000 tokens may take 6 s and not 2.6; a short session waits no longer than before."""
    for length, expected in ((1000, [2.0, 2.0, 0.5]), (400, [0.5, 0.125, 0.1]), (10, [0.5, 0.125, 0.1])):
        tuning = Tuning(SpeculationChoice(gamma=4), LIMITS)
        tuning.attached(length)
        given = []
        for _ in range(3):
            tuning.observe(committed(0, 0, cause=VerdictCause.PATIENCE), 0.0)
            given.append(tuning.patience_s)
        assert given == expected
