import random

import pytest

from outrider.ids import TokenClass
from outrider.model.kv import BlockPool, BlockSlot, num_blocks_for, pool_rows
from outrider.model.runner import BLOCK_LEN, PoolExhausted, prefill_plan


def fill(slot: BlockSlot, length: int) -> None:
    """Let a slot hold `length` tokens."""
    slot.advance([7] * (length - slot.length), TokenClass.DECODE)


def grown(pool: BlockPool, length: int) -> BlockSlot:
    slot = pool.new_slot()
    pool.reserve([(slot, length)])
    fill(slot, length)
    return slot


def test_a_slot_holds_as_many_blocks_as_its_length_needs() -> None:
    pool = BlockPool(8)
    for length in (1, 63, 64, 65, 128, 129):
        slot = grown(pool, length)
        assert len(slot.blocks) == num_blocks_for(length)
        pool.check([slot])
        slot.release()
    assert pool.num_free == 8


def test_truncating_returns_only_the_blocks_behind_the_length() -> None:
    pool = BlockPool(8)
    slot = grown(pool, 200)
    before = list(slot.blocks)
    slot.truncate(65)
    assert slot.blocks == before[:2]
    slot.truncate(64)
    assert slot.blocks == before[:1]
    slot.truncate(0)
    assert pool.num_free == 8


@pytest.mark.parametrize("length", [-1, 11])
def test_a_slot_cannot_be_truncated_to_what_it_never_held(length: int) -> None:
    slot = grown(BlockPool(1), 10)
    with pytest.raises(ValueError, match="cannot truncate"):
        slot.truncate(length)
    assert slot.length == 10


def test_a_reservation_that_does_not_fit_changes_nothing() -> None:
    pool = BlockPool(4)
    first, second = grown(pool, 64), pool.new_slot()
    with pytest.raises(PoolExhausted) as caught:
        pool.reserve([(first, 192), (second, 129)])
    assert (caught.value.needed, caught.value.free) == (5, 3)
    assert pool.num_free == 3
    pool.check([first, second])


def test_a_released_slot_cannot_grow_and_releasing_again_is_harmless() -> None:
    pool = BlockPool(2)
    slot = grown(pool, 64)
    slot.release()
    slot.release()
    assert pool.num_free == 2
    with pytest.raises(ValueError, match="freed"):
        slot.grow(1)


def test_giving_a_block_back_twice_is_refused() -> None:
    pool = BlockPool(2)
    block = pool.take(None)
    pool.put([block])
    with pytest.raises(ValueError, match="does not belong"):
        pool.put([block])


def test_the_blocks_of_slots_that_grow_in_turns_lie_side_by_side_while_there_is_room() -> None:
    pool = BlockPool(64)
    slots = [grown(pool, 1) for _ in range(4)]
    for length in range(64, 8 * BLOCK_LEN, BLOCK_LEN):
        for slot in slots:
            pool.reserve([(slot, length)])
            fill(slot, length)
    assert all(slot.blocks == list(range(slot.blocks[0], slot.blocks[0] + 7)) for slot in slots)
    pool.check(slots)


def test_ten_thousand_random_moves_lose_no_block() -> None:
    chance = random.Random(5)
    pool = BlockPool(40)
    slots = [pool.new_slot() for _ in range(6)]
    for _ in range(10_000):
        slot = chance.choice(slots)
        if chance.random() < 0.5:
            slot.truncate(chance.randint(0, slot.length))
        else:
            length = slot.length + chance.randint(1, 90)
            try:
                pool.reserve([(slot, length)])
                fill(slot, length)
            except PoolExhausted:
                slot.truncate(0)
        pool.check(slots)
    for slot in slots:
        slot.release()
    assert pool.num_free == 40


def test_a_lost_block_is_found_by_the_check() -> None:
    pool = BlockPool(3)
    slot = grown(pool, 64)
    pool.take(None)
    with pytest.raises(ValueError, match="lost"):
        pool.check([slot])


def test_positions_map_to_pool_rows_through_the_block_table() -> None:
    pool = BlockPool(4)
    slot = grown(pool, 1)
    slot.blocks = [3, 1]
    assert pool_rows(slot, 62, 66) == [3 * 64 + 62, 3 * 64 + 63, 64, 65]


@pytest.mark.parametrize(
    ("start", "end", "chunks"),
    [
        (0, 64, [(0, 64)]),
        (10, 130, [(10, 64), (64, 128), (128, 130)]),
        (64, 65, [(64, 65)]),
        (70, 80, [(70, 80)]),
        (5, 5, []),
        (9, 4, []),
    ],
)
def test_a_prompt_is_cut_at_block_borders(start: int, end: int, chunks: list[tuple[int, int]]) -> None:
    assert prefill_plan(start, end) == chunks
