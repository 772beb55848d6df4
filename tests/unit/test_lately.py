"""What generations did lately: acceptance by drafter and distance, and the last rounds with their times."""

from orchestrator.acceptance import MAX_DISTANCE, MAX_DRAFTERS, Acceptance
from orchestrator.figures import Meter, Round
from orchestrator.lately import MAX_COURSES, MAX_ROUNDS, Course, Lately
from orchestrator.tuning import Limits, Tuning
from outrider.generation import SpeculationChoice
from outrider.ids import Epoch, Generation, SessionId, TokenKind
from outrider.messages import VerdictCause

LETTERS = {"a": TokenKind.ACCEPTED, "r": TokenKind.RECOVERED, "p": TokenKind.PLAIN}
FIRST = Epoch(Generation(1, 1), 0)


def committed(kinds: str, tested: int, epoch: Epoch = FIRST) -> Round:
    accepted = kinds.count("a")
    words = tuple(LETTERS[letter] for letter in kinds)
    return Round(epoch, epoch, VerdictCause.TESTED, words, tested, accepted, verify_s=0.02, queue_s=0.003)


class Followed:
    """A generation whose rounds are counted as its driver counts them."""

    def __init__(self, course: Course) -> None:
        self.course, self.meter = course, Meter(course.started_s)
        self.tuning = Tuning(SpeculationChoice(), Limits())
        self.end = 10

    def round(self, kinds: str, tested: int, at_s: float, epoch: Epoch = FIRST) -> None:
        each = committed(kinds, tested, epoch)
        self.end += len(kinds)
        self.meter.add_round(each, at_s)
        self.course.add(each, at_s, self.end, self.meter, self.tuning)


def begun(lately: Lately, name: str = "s", owner: str = "") -> Followed:
    return Followed(lately.begin(SessionId(name), owner, 100.0))


# --- acceptance -------------------------------------------------------------------------------------------------------


def test_tests_are_counted_by_drafter_and_distance() -> None:
    acceptance = Acceptance()
    acceptance.add("lookup", 0, 3, 2)
    acceptance.add("lookup", 2, 2, 2)
    acceptance.add("feature", 0, 1, 0)
    assert acceptance.by_drafter() == {"feature": ((1, 0),), "lookup": ((1, 1), (1, 1), (2, 1), (1, 1))}


def test_distances_beyond_the_last_that_is_counted_count_nowhere() -> None:
    acceptance = Acceptance()
    acceptance.add("d", MAX_DISTANCE - 1, 5, 5)
    acceptance.add("d", MAX_DISTANCE, 5, 5)
    assert acceptance.by_drafter()["d"] == (*[(0, 0)] * (MAX_DISTANCE - 1), (1, 1))


def test_a_round_without_tests_counts_nothing() -> None:
    acceptance = Acceptance()
    acceptance.add("d", 0, 0, 0)
    assert acceptance.by_drafter() == {}


def test_the_drafter_heard_of_least_recently_is_forgotten() -> None:
    acceptance = Acceptance()
    for index in range(MAX_DRAFTERS):
        acceptance.add(f"d{index}", 0, 1, 1)
    acceptance.add("d0", 0, 1, 1)
    acceptance.add("new", 0, 1, 1)
    assert "d0" in acceptance.by_drafter()
    assert "d1" not in acceptance.by_drafter()
    assert len(acceptance.by_drafter()) == MAX_DRAFTERS


# --- courses ----------------------------------------------------------------------------------------------------------


def test_a_course_counts_tokens_tests_and_acceptances() -> None:
    lately = Lately()
    followed = begun(lately)
    followed.meter.drafter = "lookup"
    followed.round("aar", 3, 100.1)
    followed.round("p", 0, 100.2, Epoch(FIRST.generation, 1))
    course = followed.course
    assert (course.num_tokens, course.num_tested, course.num_accepted, course.drafter) == (4, 3, 2, "lookup")
    assert lately.acceptance.by_drafter() == {"lookup": ((1, 1), (1, 1), (1, 0))}


def test_runs_of_one_epoch_are_counted_at_their_own_distances() -> None:
    lately = Lately()
    followed = begun(lately)
    followed.round("aa", 2, 100.1)
    followed.round("ar", 2, 100.2)
    assert lately.acceptance.by_drafter() == {"": ((1, 1), (1, 1), (1, 1), (1, 0))}


def test_a_round_takes_the_time_since_the_one_before_it() -> None:
    followed = begun(Lately())
    for at_s in (100.25, 100.75, 101.0):
        followed.round("p", 0, at_s)
    assert [each.took_s for each in followed.course.rounds] == [0.25, 0.5, 0.25]
    assert followed.course.last_s == 101.0


def test_verdicts_without_tokens_are_no_rounds() -> None:
    followed = begun(Lately())
    followed.round("", 0, 100.5)
    followed.round("p", 0, 101.0)
    assert [each.took_s for each in followed.course.rounds] == [1.0]


def test_drafting_takes_the_drafters_pace_for_each_token_tested() -> None:
    followed = begun(Lately())
    followed.tuning.pace.draft_s = 0.004
    followed.round("aar", 3, 100.1)
    assert followed.course.rounds[0].draft_s == 0.012


def test_a_round_trip_belongs_to_the_round_that_it_was_measured_in() -> None:
    followed = begun(Lately())
    trips = (0.0, 0.0, 0.005, 0.005)  # the sum, as it stands when each verdict comes; the second round measured one
    for sum_s, at_s in zip(trips, (100.1, 100.2, 100.3, 100.4), strict=True):
        followed.tuning.network_s = sum_s
        followed.round("ar", 2, at_s)
    assert [each.network_s for each in followed.course.rounds] == [None, 0.005, None, None]


def test_an_append_is_the_commit_of_all_rounds_that_it_brought_into_the_log() -> None:
    followed = begun(Lately())
    for at_s in (100.1, 100.2, 100.3):
        followed.round("aa", 2, at_s)
    followed.course.logged(12, 0.001)
    followed.course.logged(14, 0.002)
    assert [each.commit_s for each in followed.course.rounds] == [0.001, 0.002, None]


def test_only_the_last_rounds_and_courses_are_remembered() -> None:
    lately = Lately()
    for name in range(2 * MAX_COURSES):
        followed = begun(lately, str(name))
        for index in range(MAX_ROUNDS + 5):
            followed.round("p", 0, 101.0 + index)
    assert [course.session_id for course in lately.courses] == [str(n) for n in range(MAX_COURSES, 2 * MAX_COURSES)]
    assert all(len(course.rounds) == MAX_ROUNDS for course in lately.courses)
