"""Features on a draft worker: to whom they go, and what becomes of those that nobody can use."""

import pytest

from draft_service.drafters.protocol import Drafter
from draft_service.orders import GiveFeatures
from draft_service.parking import MAX_BYTES, PARKED_S, Heard, Parking
from draft_service.session import SessionKey
from outrider.ids import Epoch, Generation, SessionId
from outrider.messages import Proposal, TargetFeatures, Tensor
from tests.unit.draft_desk import ADDRESS, GENERATION, Desk, opening, sequential
from tests.unit.drafter_bench import prompt
from tests.unit.feature_bench import HIDDEN, feature_drafter, medusa, sent

TEXT = prompt(70)
OLDER, NEWER = Generation(1, 0), Generation(1, 2)


def give(desk: Desk, first: int, last: int, generation: Generation = GENERATION, address: str = ADDRESS) -> None:
    desk.worker.handle(GiveFeatures(address, sent(TEXT, first, last, epoch=Epoch(generation))))


def proposed(desk: Desk, generation: Generation = GENERATION) -> tuple[int, ...]:
    """Open the session and return its first proposal."""
    desk.open(opening("s", TEXT, sequential(4), generation=generation))
    desk.run()
    [proposal] = desk.sent(Proposal)
    return proposal.token_ids


@pytest.mark.parametrize("make", [feature_drafter, medusa])
def test_features_that_come_before_their_session_wait_for_it(make: type[Drafter]) -> None:
    early, late = Desk(make()), Desk(make())
    give(early, 0, 69)
    late.open(opening("s", TEXT, sequential(4)))
    give(late, 0, 69)
    late.run()
    assert proposed(early) == late.sent(Proposal)[-1].token_ids
    assert early.counted("features", fate="parked") == early.counted("features", fate="taken") == 69


def test_features_wait_for_a_newer_opening_and_not_for_an_older_one() -> None:
    desk, fresh = Desk(feature_drafter(prefix_reuse=False)), Desk(feature_drafter())
    without = proposed(desk)
    give(desk, 0, 69, NEWER)
    give(fresh, 0, 69, NEWER)
    again = proposed(desk, NEWER)
    assert again == proposed(fresh, NEWER) != without


@pytest.mark.parametrize("odd", [{"generation": OLDER}, {"address": "elsewhere:1"}])
def test_features_of_an_older_opening_or_of_another_verifier_change_nothing(odd: dict[str, object]) -> None:
    desk, other = Desk(feature_drafter()), Desk(feature_drafter())
    for each in (desk, other):
        each.open(opening("s", TEXT, sequential(4)))
    give(desk, 0, 69, **odd)  # type: ignore[arg-type]
    assert desk.counted("features", fate="stale") == 69
    desk.run()
    other.run()
    assert desk.sent(Proposal) == other.sent(Proposal)


def test_features_of_another_target_are_counted_and_the_session_goes_on() -> None:
    desk = Desk(feature_drafter())
    desk.open(opening("s", TEXT, sequential(4)))
    wrong = Tensor("float32", (1, 2, HIDDEN + 1), bytes(8 * (HIDDEN + 1)))
    desk.worker.handle(GiveFeatures(ADDRESS, TargetFeatures(SessionId("s"), Epoch(GENERATION), 0, wrong)))
    desk.run()
    assert len(desk.sent(Proposal)) == 1
    assert desk.counted("features", fate="unusable") == 2
    assert not desk.deaths()


def test_features_are_caught_up_with_while_a_session_waits_for_its_verdict() -> None:
    """So that a restart finds its prompt computed: nothing is left to do for the next guess but the guess."""
    long = prompt(250)
    drafter = feature_drafter()
    desk = Desk(drafter)
    desk.open(opening("s", long, sequential(4)))
    desk.run()
    assert desk.sent(Proposal)
    desk.worker.handle(GiveFeatures(ADDRESS, sent(long, 0, 249, epoch=Epoch(GENERATION))))
    assert desk.worker.has_work
    desk.run()
    drafter.rewind(SessionId("s"), 250)
    assert drafter.plan(SessionId("s"), long, 4) is not None
    desk.close(SessionKey(SessionId("s"), GENERATION))
    assert not desk.worker.has_work


# --- the waiting room -------------------------------------------------------------------------------------------------


def heard(name: str, size: int = 4, generation: Generation = GENERATION) -> Heard:
    tensor = Tensor("float32", (1, 1, size // 4), bytes(size))
    return Heard(ADDRESS, TargetFeatures(SessionId(name), Epoch(generation), 0, tensor))


def test_what_waits_is_bounded_in_bytes() -> None:
    parking = Parking()
    half = heard("a", MAX_BYTES // 2)
    assert [parking.put(half, 0.0) for _ in range(3)] == [True, True, False]
    assert parking.take(half.key, 0.1) == [half, half]
    assert parking.put(half, 0.2)


def test_what_waits_is_bounded_in_time() -> None:
    parking = Parking()
    parking.put(heard("a", MAX_BYTES), 0.0)
    assert not parking.put(heard("b"), PARKED_S / 2)
    assert parking.put(heard("b"), PARKED_S)
    assert parking.take(heard("a").key, PARKED_S) == []
    assert len(parking) == 1


def test_an_opening_takes_its_own_and_drops_what_was_for_older_ones() -> None:
    parking = Parking()
    mine, other, newer = heard("a"), heard("b"), heard("a", generation=NEWER)
    for each in (heard("a", generation=OLDER), mine, other, newer):
        parking.put(each, 0.0)
    assert parking.take(mine.key, 0.0) == [mine]
    assert (parking.take(other.key, 0.0), parking.take(newer.key, 0.0), len(parking)) == ([other], [newer], 0)
