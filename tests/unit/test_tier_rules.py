"""The tier's decisions, without a server: what is taken for a block, whether loading pays, when to pause."""

from dataclasses import replace

import pytest

from outrider.model.runner import BlockLayout
from outrider.tier.breaker import FAILURES, LONGEST_PAUSE_S, Breaker
from outrider.tier.format import (
    CHECKSUM_LEN,
    FIELDS,
    HEADER_LEN,
    REASONS,
    Identity,
    RefusedBlock,
    empty_blob,
    seal,
    unseal,
)
from outrider.tier.speeds import Speeds

LAYOUT = BlockLayout("bfloat16", 2, 8, 1024)
OURS = Identity(LAYOUT, bytes(range(16)))
KEY = bytes(range(32))


def stored(identity: Identity = OURS, key: bytes = KEY) -> bytearray:
    blob = empty_blob(identity)
    blob[HEADER_LEN:] = bytes(at % 251 for at in range(identity.layout.num_bytes))
    seal(blob, key, identity)
    return blob


def refusal(blob: bytes) -> str:
    with pytest.raises(RefusedBlock) as caught:
        unseal(blob, KEY, OURS)
    return caught.value.reason


def test_a_block_comes_back_as_it_went() -> None:
    blob = stored()
    assert unseal(bytes(blob), KEY, OURS) == blob[HEADER_LEN:]


FIELD_PLACES = {
    "magic": (0, "magic"), "version": (4, "version"), "tokens": (6, "shape"), "layers": (8, "shape"),
    "values": (12, "shape"), "dtype": (16, "dtype"), "more bytes": (28, "truncated"), "engine": (36, "engine"),
    "key": (52, "key"), "checksum": (FIELDS.size, "checksum"), "first byte": (HEADER_LEN, "checksum"),
    "last byte": (-1, "checksum"),
}  # fmt: skip


@pytest.mark.parametrize("name", FIELD_PLACES)
def test_one_changed_bit_in_any_field_is_refused_with_the_field_as_reason(name: str) -> None:
    place, reason = FIELD_PLACES[name]
    blob = stored()
    blob[place] ^= 1
    assert refusal(bytes(blob)) == reason


def test_any_changed_byte_is_refused() -> None:
    blob = stored()
    for place in range(len(blob)):
        blob[place] ^= 0x40
        assert refusal(bytes(blob)) in REASONS
        blob[place] ^= 0x40
    assert unseal(bytes(blob), KEY, OURS) == blob[HEADER_LEN:]


@pytest.mark.parametrize("length", [0, 1, FIELDS.size, HEADER_LEN - 1, HEADER_LEN, HEADER_LEN + 1023])
def test_a_block_that_is_cut_off_anywhere_is_refused_as_truncated(length: int) -> None:
    assert refusal(bytes(stored()[:length])) == "truncated"


def test_a_block_with_something_behind_it_is_refused() -> None:
    assert refusal(bytes(stored()) + b"x") == "length"


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (replace(OURS, layout=replace(LAYOUT, dtype="float32")), "dtype"),
        (replace(OURS, layout=replace(LAYOUT, num_layers=3)), "shape"),
        (replace(OURS, layout=replace(LAYOUT, values_per_token=16)), "shape"),
        (replace(OURS, layout=replace(LAYOUT, num_bytes=1023)), "length"),
        (replace(OURS, engine=bytes(16)), "engine"),
    ],
    ids=["dtype", "layers", "values", "length", "engine"],
)
def test_a_whole_block_of_another_kind_is_refused_and_has_other_names(other: Identity, reason: str) -> None:
    assert refusal(bytes(stored(other))) == reason
    assert other.namespace != OURS.namespace


def test_a_whole_block_of_another_text_is_refused() -> None:
    assert refusal(bytes(stored(key=bytes(32)))) == "key"


def test_the_checksum_covers_what_the_header_says() -> None:
    blob = stored()
    assert len(blob) == FIELDS.size + CHECKSUM_LEN + LAYOUT.num_bytes == OURS.blob_len


# --- speeds ----------------------------------------------------------------------------------------------------------


def test_an_unknown_tier_is_tried_with_one_block() -> None:
    assert Speeds(0.1).plan(15, 0.0) == 1
    assert Speeds(0.1).plan(0, 0.0) == 0


def test_a_faster_tier_is_used_for_all_blocks_and_a_slower_one_for_none_but_a_probe_now_and_then() -> None:
    speeds = Speeds(0.1)
    speeds.loaded(4, 0.1)
    assert speeds.load_s == 0.025
    assert speeds.plan(15, 0.0) == 15
    slow = Speeds(0.1, load_s=0.2)
    assert [slow.plan(15, now_s) for now_s in (0.0, 1.0, 29.0, 30.0, 31.0)] == [1, 0, 0, 1, 0]


def test_estimates_follow_what_is_measured() -> None:
    speeds = Speeds(0.1, load_s=0.001)
    for _ in range(20):
        speeds.loaded(1, 0.5)
    assert speeds.plan(15, 0.0) == 1, "it has become slower than computing"
    for _ in range(20):
        speeds.prefilled(8, 8.0)
    assert speeds.prefill_s == pytest.approx(1.0, rel=0.01)
    assert speeds.plan(15, 1.0) == 15


def test_a_load_that_brought_nothing_counts_as_slow() -> None:
    speeds = Speeds(0.1)
    speeds.loaded(0, 0.7)
    assert speeds.load_s == 0.7


def test_nobody_waits_longer_than_computing_would_take() -> None:
    assert Speeds(0.1).patience_s(3, 1.0) == pytest.approx(0.3)
    assert Speeds(0.1).patience_s(30, 1.0) == 1.0


# --- breaker ---------------------------------------------------------------------------------------------------------


def test_a_breaker_opens_after_failures_in_a_row_and_for_longer_each_time() -> None:
    breaker, now_s, pauses = Breaker(), 0.0, []
    for _ in range(FAILURES - 1):
        breaker.failed(now_s)
        assert not breaker.is_open(now_s)
    for _ in range(8):
        breaker.failed(now_s)
        start_s = now_s
        while breaker.is_open(now_s):
            now_s += 0.5
        pauses.append(now_s - start_s)
    assert pauses == [1, 2, 4, 8, 16, LONGEST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_S]


def test_a_success_closes_it_and_forgets_the_failures_before() -> None:
    breaker = Breaker()
    for _ in range(FAILURES):
        breaker.failed(0.0)
    assert breaker.is_open(0.5)
    breaker.succeeded()
    assert not breaker.is_open(0.5)
    breaker.failed(1.0)
    assert not breaker.is_open(1.0)
