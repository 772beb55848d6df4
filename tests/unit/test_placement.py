"""Placement: who is chosen, who is left out, and for how long."""

import logging
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from orchestrator.channels import Channels
from orchestrator.pairing import check_pair
from orchestrator.placement import FIRST_BREAK_S, Placement, Room, StaticSource, Wanted, describe
from outrider.codec import types as t
from outrider.errors import InvalidRequest, Unavailable, VocabularyMismatch
from outrider.ids import WorkerId
from outrider.messages import Vocabulary, WorkerDescription
from outrider.rpc import RpcServer
from outrider.v1 import draft_pb2, draft_pb2_grpc, verify_pb2, verify_pb2_grpc

WORDS = Vocabulary("aa" * 32, 100)


def worker(name: str, role: str = "verify", **fields: object) -> WorkerDescription:
    known: dict[str, object] = {"capacity": 8, "vocabulary": WORDS, "context_len": 128, **fields}
    return WorkerDescription(WorkerId(name), role, "127.0.0.1:1", "m", **known)  # type: ignore[arg-type]


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
    return Placement(Known(*workers), Channels(), vocabulary, lot=random.Random(1), clock=clock or Clock())


async def chosen(placed: Placement, **asked: object) -> str:
    return str((await placed.choose_verifier("m", **asked)).worker_id)  # type: ignore[arg-type]


async def drafter(placed: Placement, wanted: Wanted | None = None) -> tuple[str | None, str]:
    found, reason = await placed.choose_drafter(worker("v"), wanted or Wanted())
    return (None if found is None else str(found.worker_id)), reason


async def test_the_verifier_with_most_of_the_sessions_kv_is_chosen_before_the_least_loaded() -> None:
    placed = placement(worker("busy", load=5), worker("idle"), worker("other", load=1))
    assert await chosen(placed) == "idle"
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


async def test_excluded_verifiers_are_taken_only_when_there_is_no_other() -> None:
    placed = placement(worker("a"), worker("b"))
    assert await chosen(placed, exclude={"a"}) == "b"
    assert await chosen(placed, exclude={"a", "b"}) in {"a", "b"}


async def test_a_verifier_whose_context_is_too_small_is_never_drawn() -> None:
    placed = placement(worker("small", context_len=64), worker("large", context_len=4096, load=5))
    assert {await chosen(placed, room=Room(64)) for _ in range(8)} == {"small"}
    assert {await chosen(placed, room=Room(65)) for _ in range(8)} == {"large"}
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


async def test_a_failed_worker_is_left_out_for_a_while_and_longer_after_each_failure() -> None:
    clock = Clock()
    placed = placement(worker("a"), clock=clock)
    for count in range(3):
        placed.failed(WorkerId("a"))
        clock.now_s += FIRST_BREAK_S * 2**count - 0.01
        assert await placed.verifiers("m") == []
        clock.now_s += 0.02
        assert len(await placed.verifiers("m")) == 1
    placed.succeeded(WorkerId("a"), placed.now_s())
    placed.failed(WorkerId("a"))
    clock.now_s += FIRST_BREAK_S + 0.01
    assert len(await placed.verifiers("m")) == 1


async def test_what_comes_late_on_a_stream_that_was_open_before_a_failure_does_not_undo_it() -> None:
    clock = Clock()
    placed = placement(worker("a", "draft"), clock=clock)
    opened_s = placed.now_s()
    clock.now_s += 1
    placed.failed(WorkerId("a"))
    placed.succeeded(WorkerId("a"), opened_s)
    assert await drafter(placed) == (None, "no_drafter")
    clock.now_s += FIRST_BREAK_S + 0.01
    assert await drafter(placed) == (None, "no_drafter"), "nothing answers at its address"
    clock.now_s += 2 * FIRST_BREAK_S + 0.01
    placed.succeeded(WorkerId("a"), clock.now_s)
    assert await drafter(placed) == ("a", "")


async def test_the_least_loaded_draft_worker_of_the_wanted_kind_is_chosen() -> None:
    lookup = worker("lookup", "draft", drafter="prompt_lookup")
    model = worker("model", "draft", drafter="causal_lm", load=1)
    placed = placement(lookup, model)
    assert await drafter(placed) == ("lookup", "")
    assert await drafter(placed, Wanted("causal_lm")) == ("model", "")
    assert await drafter(placed, Wanted(exclude={WorkerId("lookup"), WorkerId("model")})) == (None, "no_drafter")


async def test_a_draft_worker_whose_context_the_prompt_fills_is_no_use_and_the_reason_says_so() -> None:
    """Case 8."""
    placed = placement(worker("small", "draft", context_len=64))
    assert await drafter(placed, Wanted(length=100)) == (None, "drafter_context")
    assert await drafter(placed, Wanted(length=63)) == ("small", "")


async def test_a_full_draft_worker_is_not_asked() -> None:
    placed = placement(worker("full", "draft", load=8))
    assert await drafter(placed) == (None, "no_drafter")


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
        placed = Placement(Known(renamed, answering), channels, clock=clock)
        for name in ("old", "d"):
            placed.failed(WorkerId(name))
        clock.now_s += FIRST_BREAK_S + 0.01
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
