"""Placement: who is chosen, who is left out, and for how long."""

import logging
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from orchestrator.breakers import FIRST_BREAK_S, JITTER, Breakers
from orchestrator.channels import Channels
from orchestrator.pairing import check_pair
from orchestrator.placement import UNSEEN_S, Placement, Room, StaticSource, Wanted, describe
from outrider.codec import types as t
from outrider.errors import FailedPrecondition, InvalidRequest, Unavailable, VocabularyMismatch
from outrider.ids import WorkerId
from outrider.messages import Vocabulary, WorkerDescription
from outrider.rpc import RpcServer
from outrider.v1 import draft_pb2, draft_pb2_grpc, verify_pb2, verify_pb2_grpc

WORDS = Vocabulary("aa" * 32, 100)


def worker(name: str, role: str = "verify", **fields: object) -> WorkerDescription:
    known: dict[str, object] = {"capacity": 8, "vocabulary": WORDS, "context_len": 128, **fields}
    return WorkerDescription(WorkerId(name), role, "127.0.0.1:1", "m", **known)  # type: ignore[arg-type]


WORKERS = [worker(f"v{load}", load=load) for load in range(5)]


class Known:
    """A source that is told its workers."""

    def __init__(self, *workers: WorkerDescription) -> None:
        self.all = list(workers)

    async def workers(self, role: str) -> Sequence[WorkerDescription]:
        return [each for each in self.all if each.role == role]


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def placement(
    *workers: WorkerDescription, clock: Clock | None = None, vocabulary: Vocabulary | None = None
) -> Placement:
    breakers = Breakers(lot=random.Random(2), clock=clock or Clock())
    return Placement(Known(*workers), Channels(), vocabulary, breakers=breakers, lot=random.Random(1))


async def chosen(placed: Placement, **asked: object) -> str:
    return str((await placed.choose_verifier("m", **asked)).worker_id)  # type: ignore[arg-type]


async def drafter(placed: Placement, wanted: Wanted | None = None) -> tuple[str | None, str]:
    found, reason = await placed.choose_drafter(worker("v"), wanted or Wanted())
    return (None if found is None else str(found.worker_id)), reason


async def test_the_verifier_with_most_of_the_sessions_kv_is_chosen_before_the_least_loaded() -> None:
    placed = placement(worker("busy", load=5), worker("idle"), worker("other", load=1))
    assert await chosen(placed) in ("idle", "other")
    resident = {WorkerId("busy"): 64, WorkerId("other"): 10}
    assert await chosen(placed, resident=resident) == "busy"


async def test_a_full_verifier_is_the_last_choice_even_with_kv() -> None:
    placed = placement(worker("full", load=8), worker("idle"))
    assert await chosen(placed, resident={WorkerId("full"): 64}) == "idle"


async def test_the_engine_that_a_seeded_session_began_on_is_preferred() -> None:
    placed = placement(worker("amx", fingerprint="amx", load=3), worker("avx", fingerprint="avx"))
    assert await chosen(placed, fingerprint="amx") == "amx"


async def test_equals_are_drawn_by_lot() -> None:
    placed = placement(*(worker(f"v{index}") for index in range(4)))
    assert len({await chosen(placed) for _ in range(100)}) == 4


async def test_of_many_the_less_loaded_of_two_is_taken_and_not_always_the_least_loaded() -> None:
    clock = Clock()
    placed = placement(*(worker(f"v{load}", load=load) for load in range(5)), clock=clock)
    counts: Counter[str] = Counter()
    for _ in range(2000):
        counts[await chosen(placed)] += 1
        clock.now_s += UNSEEN_S
    shares = [counts[f"v{load}"] / 2000 for load in range(5)]
    # Drawn in pairs out of five, a worker wins all pairs with busier ones. Without the seed one run in 10^7 would fail.
    assert shares == pytest.approx([0.4, 0.3, 0.2, 0.1, 0.0], abs=0.06)


async def test_a_lot_with_a_seed_repeats_its_choices() -> None:
    placed = placement(*WORKERS), placement(*WORKERS)
    first, second = [[await chosen(each) for _ in range(20)] for each in placed]
    assert first == second


async def test_what_was_given_a_moment_ago_counts_before_it_is_announced() -> None:
    placed = placement(worker("a"), worker("b"))
    assert Counter([await chosen(placed) for _ in range(10)]) == {"a": 5, "b": 5}


async def test_a_busy_verifier_is_left_for_one_with_at_most_half_its_share_whatever_kv_it_has() -> None:
    resident = {WorkerId("old"): 500}
    for old, new, expected in [(5, 0, "old"), (6, 4, "old"), (6, 3, "new"), (7, 0, "new")]:
        placed = placement(worker("old", load=old), worker("new", load=new))
        assert await chosen(placed, resident=resident) == expected, (old, new)


async def test_the_draft_worker_that_holds_the_session_is_taken_again_unless_it_is_busy() -> None:
    wanted = Wanted(resident={WorkerId("old"): 10})
    assert await drafter(placement(worker("old", "draft", load=5), worker("new", "draft")), wanted) == ("old", "")
    assert await drafter(placement(worker("old", "draft", load=7), worker("new", "draft")), wanted) == ("new", "")


async def test_excluded_verifiers_are_taken_only_when_there_is_no_other() -> None:
    placed = placement(worker("a"), worker("b"))
    assert await chosen(placed, exclude={"a"}) == "b"
    assert await chosen(placed, exclude={"a", "b"}) in {"a", "b"}


async def test_a_verifier_whose_context_is_too_small_is_never_drawn() -> None:
    clock = Clock()
    placed = placement(worker("small", context_len=64), worker("large", context_len=4096, load=5), clock=clock)
    for needed, expected in [(64, "small"), (65, "large")] * 8:
        assert await chosen(placed, room=Room(needed)) == expected
        clock.now_s += UNSEEN_S
    assert await chosen(placed, room=Room(65), exclude={WorkerId("large")}) == "large"
    with pytest.raises(InvalidRequest, match="4096"):
        await chosen(placed, room=Room(4097))


async def test_a_verifier_that_holds_all_that_was_asked_for_is_preferred() -> None:
    placed = placement(worker("small", context_len=64), worker("large", context_len=4096, load=5))
    assert await chosen(placed, room=Room(11, 100)) == "large"
    assert await chosen(placed, room=Room(11, 50)) == "small"
    assert await chosen(placed, room=Room(11, 5000)) == "small"


async def test_draining_verifiers_other_models_and_other_vocabularies_are_never_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    foreign = replace(worker("foreign"), vocabulary=Vocabulary("bb" * 32, 100))
    placed = placement(worker("gone", draining=True), replace(worker("x"), model="n"), foreign, vocabulary=WORDS)
    with caplog.at_level(logging.WARNING), pytest.raises(Unavailable):
        await placed.choose_verifier("m")
    assert "foreign" in caplog.text


async def test_what_comes_late_on_a_stream_that_was_open_before_a_failure_does_not_undo_it() -> None:
    clock = Clock()
    placed = placement(worker("a", "draft"), clock=clock)
    opened_s = clock.now_s
    clock.now_s += 1
    placed.breakers.failed(WorkerId("a"))
    placed.breakers.succeeded(WorkerId("a"), opened_s)
    assert await drafter(placed) == (None, "no_drafter")
    clock.now_s += FIRST_BREAK_S * (1 + JITTER)
    assert await drafter(placed) == (None, "no_drafter"), "nothing answers at its address"
    clock.now_s += 2 * FIRST_BREAK_S * (1 + JITTER)
    placed.breakers.succeeded(WorkerId("a"), clock.now_s)
    assert await drafter(placed) == ("a", "")


async def test_the_least_loaded_draft_worker_of_the_wanted_kind_is_chosen() -> None:
    lookup = worker("lookup", "draft", drafter="prompt_lookup")
    model = worker("model", "draft", drafter="causal_lm", load=1)
    placed = placement(lookup, model)
    assert await drafter(placed) == ("lookup", "")
    assert await drafter(placed, Wanted("causal_lm")) == ("model", "")
    assert await drafter(placed, Wanted(exclude={WorkerId("lookup"), WorkerId("model")})) == (None, "no_drafter")


async def test_a_drafter_is_wanted_by_kind_by_one_kind_of_several_or_by_label() -> None:
    lookup = worker("lookup", "draft", drafter="prompt_lookup", label="blue")
    both = worker("both", "draft", drafter="prompt_lookup,causal_lm", drafters=("prompt_lookup", "causal_lm"), load=1)
    placed = placement(lookup, both)
    assert await drafter(placed, Wanted("causal_lm")) == ("both", "")
    assert await drafter(placed, Wanted("prompt_lookup,causal_lm")) == ("both", "")
    assert await drafter(placed, Wanted("blue")) == ("lookup", "")
    assert await placed.offered(worker("v")) == ["blue", "causal_lm", "prompt_lookup", "prompt_lookup,causal_lm"]


async def test_a_drafter_that_nobody_offers_is_a_reason_of_its_own() -> None:
    placed = placement(worker("model", "draft", drafter="causal_lm"))
    assert await drafter(placed, Wanted("medusa")) == (None, "drafter_not_offered")
    assert await drafter(placement(), Wanted("medusa")) == (None, "no_drafter")
    busy = placement(worker("model", "draft", drafter="medusa", load=8))
    assert await drafter(busy, Wanted("medusa")) == (None, "no_drafter"), "it is offered, and full"


async def test_where_there_is_a_prediction_a_worker_that_follows_it_comes_before_kv_and_load() -> None:
    model = worker("model", "draft", drafter="causal_lm")
    follows = worker("follows", "draft", drafter="prediction,toy", drafters=("prediction", "toy"), load=5)
    placed, resident = placement(model, follows), {WorkerId("model"): 50}
    assert await drafter(placed, Wanted(predicted=True, resident=resident)) == ("follows", "")
    assert await drafter(placed, Wanted(resident=resident)) == ("model", "")
    alone = placement(model)
    assert await drafter(alone, Wanted(predicted=True)) == ("model", ""), "a preference, no condition"


async def test_a_draft_worker_whose_context_the_prompt_fills_is_no_use_and_the_reason_says_so() -> None:
    """Case 8."""
    placed = placement(worker("small", "draft", context_len=64))
    assert await drafter(placed, Wanted(length=100)) == (None, "drafter_context")
    assert await drafter(placed, Wanted(length=63)) == ("small", "")


async def test_a_full_draft_worker_is_not_asked() -> None:
    placed = placement(worker("full", "draft", load=8))
    assert await drafter(placed) == (None, "no_drafter")


def test_a_drafter_is_not_paired_with_a_target_whose_hidden_states_it_cannot_read() -> None:
    target = replace(worker("v1"), attributes={"hidden_size": "576"})
    drafter = replace(worker("d1", "draft"), drafter="feature", attributes={"feature_size": "576", "hidden_size": "1"})
    check_pair(target, drafter)
    check_pair(worker("v1"), drafter)
    check_pair(target, replace(drafter, attributes={"hidden_size": "960"}))
    with pytest.raises(FailedPrecondition, match=r"d1 \(feature.*576 wide.*v1.*960 wide"):
        check_pair(replace(target, attributes={"hidden_size": "960"}), drafter)


async def test_another_vocabulary_is_refused_naming_both_and_skipped(caplog: pytest.LogCaptureFixture) -> None:
    """Cases 9 and 10: the map decides, its padded size does not."""
    swapped = replace(worker("swapped", "draft"), vocabulary=Vocabulary("bb" * 32, 100))
    padded = replace(worker("padded", "draft", load=3), vocabulary=Vocabulary(WORDS.fingerprint, 128))
    with pytest.raises(VocabularyMismatch, match=r"swapped.*bbbb.*v1.*aaaa"):
        check_pair(worker("v1"), swapped)
    check_pair(worker("v1"), padded)
    placed = placement(swapped, padded)
    with caplog.at_level(logging.WARNING):
        assert [await drafter(placed) for _ in range(3)] == [("padded", "")] * 3
    assert caplog.text.count("not paired") == 1
    assert await drafter(placement(swapped)) == (None, "vocabulary")


class _Verify(verify_pb2_grpc.VerifyServiceServicer):
    async def Describe(self, request: object, context: object) -> verify_pb2.VerifyServiceDescribeResponse:
        return verify_pb2.VerifyServiceDescribeResponse(worker=t.description_to_proto(worker("v")))


class _Draft(draft_pb2_grpc.DraftServiceServicer):
    async def Describe(self, request: object, context: object) -> draft_pb2.DraftServiceDescribeResponse:
        return draft_pb2.DraftServiceDescribeResponse(worker=t.description_to_proto(worker("d", "draft")))


async def test_workers_describe_themselves_and_dead_or_renamed_ones_are_left_out() -> None:
    server, channels = RpcServer(), Channels()
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(_Verify(), server.server)  # type: ignore[abstract]
    draft_pb2_grpc.add_DraftServiceServicer_to_server(_Draft(), server.server)  # type: ignore[abstract]
    address = await server.start("127.0.0.1:0", [])
    try:
        assert (await describe("draft", channels.to(address, "draft"))).worker_id == "d"
        addresses = {"verify": [address, "127.0.0.1:1"], "draft": [address]}
        source = StaticSource(addresses, channels, fresh_s=60)
        clock = Clock()
        renamed = replace(worker("old", "draft"), address=address)
        answering = replace(worker("d", "draft", load=3), address=address)
        placed = Placement(Known(renamed, answering), channels, breakers=Breakers(clock=clock))
        for name in ("old", "d"):
            placed.breakers.failed(WorkerId(name))
        clock.now_s += FIRST_BREAK_S * (1 + JITTER)
        found, _ = await placed.choose_drafter(worker("v"), Wanted())
        assert found == answering
        assert [each.worker_id for each in await placed.drafters(worker("v"))] == ["d"]
        assert [each.worker_id for each in await source.workers("verify")] == ["v"]
        assert [each.worker_id for each in await source.workers("draft")] == ["d"]
        await server.stop(0)
        assert [each.worker_id for each in await source.workers("verify")] == ["v"]
        fresh = StaticSource(addresses, channels, fresh_s=0)
        assert await fresh.workers("verify") == []
    finally:
        await channels.close()
        await server.stop(0)
