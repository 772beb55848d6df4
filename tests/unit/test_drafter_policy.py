"""The operator's policy on drafters: names, shares, and the record."""

from collections import Counter

import pytest

from outrider.drafter_policy import DrafterPolicy, read_policy, split_of, write_policy
from outrider.errors import InvalidRequest
from outrider.ids import WorkerId
from outrider.messages import Vocabulary, WorkerDescription

SPLIT = DrafterPolicy(split=(("feature", 80), ("prompt_lookup", 20)))
SESSIONS = [f"session-{number}" for number in range(10_000)]


def worker(name: str, drafter: str, **fields: object) -> WorkerDescription:
    known: dict[str, object] = {"drafter": drafter, **fields}
    return WorkerDescription(WorkerId(name), "draft", "h:1", "m", Vocabulary("aa", 9), 64, **known)  # type: ignore[arg-type]


def test_sessions_are_assigned_in_the_proportions_of_the_split() -> None:
    counts = Counter(map(SPLIT.assigned, SESSIONS))
    # The hash is fixed, so this cannot fail by chance; three deviations of 10,000 draws are 120.
    assert counts["feature"] == pytest.approx(8000, abs=120)
    assert counts["feature"] + counts["prompt_lookup"] == len(SESSIONS)


def test_a_session_is_assigned_to_the_same_drafter_every_time_and_without_a_split_to_none() -> None:
    again = read_policy(write_policy(SPLIT))
    assert [SPLIT.assigned(each) for each in SESSIONS[:100]] == [again.assigned(each) for each in SESSIONS[:100]]
    assert DrafterPolicy().assigned("s") == ""


def test_other_weights_move_no_more_sessions_than_they_have_to() -> None:
    after = DrafterPolicy(split=(("feature", 70), ("prompt_lookup", 30)))
    moved = [each for each in SESSIONS if SPLIT.assigned(each) != after.assigned(each)]
    assert len(moved) == pytest.approx(1000, abs=100)
    assert {after.assigned(each) for each in moved} == {"prompt_lookup"}


def test_the_assigned_drafter_ranks_first_then_the_splits_others_then_the_rest() -> None:
    workers = [worker("a", "feature"), worker("b", "x", label="prompt_lookup"), worker("c", "causal_lm")]
    by_side = {SPLIT.assigned(each): [SPLIT.rank(one, each) for one in workers] for each in SESSIONS[:50]}
    assert by_side == {"feature": [0, 1, 2], "prompt_lookup": [1, 0, 2]}
    assert [DrafterPolicy().rank(one, "s") for one in workers] == [0, 0, 0]


def test_a_worker_is_detached_by_its_id_its_label_its_kind_or_any_kind_it_composes() -> None:
    composed = worker("w", "prompt_lookup,causal_lm", label="blue", drafters=("prompt_lookup", "causal_lm"))
    for name in ("w", "blue", "causal_lm", "prompt_lookup", "prompt_lookup,causal_lm"):
        assert DrafterPolicy().detach(name).why_detached(composed) == name
    assert DrafterPolicy().detach("feature").why_detached(composed) == ""
    assert DrafterPolicy().why_detached(worker("w", "feature")) == ""


def test_detaching_twice_is_once_and_attaching_what_is_attached_is_an_error() -> None:
    policy = DrafterPolicy().detach("a").detach("b").detach("a")
    assert policy.detached == ("a", "b")
    assert policy.attach("a").detached == ("b",)
    with pytest.raises(InvalidRequest, match=r"name: 'c' .*a, b"):
        policy.attach("c")


@pytest.mark.parametrize("policy", [DrafterPolicy(), DrafterPolicy(("a", "b ü"), SPLIT.split)], ids=["empty", "full"])
def test_a_record_is_read_back_as_it_was_written(policy: DrafterPolicy) -> None:
    assert read_policy(write_policy(policy)) == policy


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b'{"detached": "all"}',
        b'{"detached": [""]}',
        b'{"split": [["a", 0]]}',
        b'{"split": [["a"]]}',
        b'{"only": []}',
        b"\xff",
    ],
    ids=["empty", "list", "text", "no-name", "no-weight", "half", "unknown", "bytes"],
)
def test_a_record_that_is_damaged_or_from_another_version_is_refused_with_the_place(raw: bytes) -> None:
    with pytest.raises(InvalidRequest, match="policy"):
        read_policy(raw)


def test_names_that_nobody_can_have_are_not_written() -> None:
    with pytest.raises(InvalidRequest, match="detached"):
        write_policy(DrafterPolicy().detach("x" * 257))


@pytest.mark.parametrize("shares", [["a"], ["=5"], ["a=0"], ["a=-1"], ["a=1.5"], ["a=1000001"], ["a=1", "a=2"]])
def test_shares_that_are_none_are_refused(shares: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="split"):
        split_of(shares)


def test_shares_are_read_in_their_order() -> None:
    assert split_of(["b=20", "a=b=80"]) == (("b", 20), ("a=b", 80))
