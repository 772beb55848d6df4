"""KV found by content: the index, and pools whose slots share blocks, against a model that is easy to see through."""

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.ids import TokenClass
from outrider.model.kv import BlockPool, BlockSlot
from outrider.model.prefix import PrefixIndex, chained_key, root_key
from outrider.model.runner import BLOCK_LEN, PoolExhausted

DECODE, PROMPT = TokenClass.DECODE, TokenClass.PROMPT
Token = tuple[int, TokenClass]


def ids_of(length: int, start: int = 0) -> list[int]:
    return [start + at for at in range(length)]


def feed(pool: BlockPool, slot: BlockSlot, token_ids: Sequence[int], token_class: TokenClass = PROMPT) -> None:
    pool.reserve([(slot, slot.length + len(token_ids))])
    slot.advance(token_ids, token_class)


def filled(pool: BlockPool, token_ids: Sequence[int], token_class: TokenClass = PROMPT) -> BlockSlot:
    slot = pool.new_slot()
    feed(pool, slot, token_ids, token_class)
    slot.commit(slot.length)
    return slot


def matched(pool: BlockPool, token_ids: Sequence[int], token_class: TokenClass = PROMPT) -> BlockSlot:
    slot = pool.new_slot()
    slot.match(token_ids, [token_class] * len(token_ids))
    return slot


def known_len(pool: BlockPool, token_ids: Sequence[int], token_class: TokenClass = PROMPT) -> int:
    slot = matched(pool, token_ids, token_class)
    length = slot.length
    slot.release()
    return length


# --- keys -----------------------------------------------------------------------------------------------------------


def test_a_key_changes_with_every_token_every_class_the_order_and_what_came_before() -> None:
    root = root_key("engine", by_class=True)
    ids, classes = array("I", range(64)), bytes([PROMPT]) * 64
    keys = {chained_key(root, ids, classes), chained_key(chained_key(root, ids, classes), ids, classes)}
    for at in range(64):
        other = array("I", ids)
        other[at] += 1
        keys.add(chained_key(root, other, classes))
        keys.add(chained_key(root, ids, classes[:at] + bytes([DECODE]) + classes[at + 1 :]))
    keys.add(chained_key(root, array("I", reversed(ids)), classes))
    keys.add(chained_key(root, ids, b""))
    keys.add(chained_key(root_key("engine", by_class=False), ids, classes))
    keys.add(chained_key(root_key("another engine", by_class=True), ids, classes))
    assert len(keys) == 2 + 128 + 4


# --- the index ------------------------------------------------------------------------------------------------------


def test_the_first_block_with_some_content_keeps_the_key() -> None:
    index = PrefixIndex()
    assert index.enter(b"a", 1)
    assert not index.enter(b"a", 2)
    assert index.enter(b"a", 1), "entering again changes nothing"
    assert not index.enter(b"b", 1), "a block has one content"
    assert index.find(b"a") == 1
    index.withdraw(1)
    index.withdraw(1)
    assert index.find(b"a") is None
    assert not index.has(1)


def test_idle_blocks_are_given_up_in_the_order_in_which_they_were_last_used() -> None:
    index = PrefixIndex()
    for block in range(4):
        index.enter(bytes([block]), block)
    assert all(index.rest(block) for block in (2, 0, 3, 1))
    assert not index.rest(7)
    index.wake(0)
    assert index.rest(0)
    assert [index.evict() for _ in range(4)] == [2, 3, 1, 0]
    with pytest.raises(KeyError):
        index.evict()
    assert index.find(b"\x00") is None


# --- slots that share -----------------------------------------------------------------------------------------------


def test_only_whole_blocks_with_the_same_tokens_and_classes_are_taken_over() -> None:
    pool = BlockPool(16)
    first = filled(pool, ids_of(200))
    for token_ids, length in ((ids_of(300), 192), (ids_of(191), 128), (ids_of(63), 0), ([*ids_of(70), 5] * 2, 64)):
        slot = matched(pool, token_ids)
        assert slot.length == length
        assert slot.blocks == first.blocks[: length // 64]
        slot.release()
    assert known_len(pool, ids_of(200), DECODE) == 0
    assert known_len(pool, [9, *ids_of(199)]) == 0
    pool.check([first])


def test_blocks_stay_known_after_their_last_user_until_the_room_is_needed() -> None:
    pool = BlockPool(4)
    filled(pool, ids_of(130)).release()
    assert (pool.usage.cached, pool.usage.used, pool.num_free) == (2, 0, 4)
    again = matched(pool, ids_of(130))
    assert again.length == 128
    again.release()
    other = filled(pool, ids_of(256, 1000))
    assert pool.usage.cached == 0
    pool.check([other])
    assert known_len(pool, ids_of(130)) == 0


def test_of_a_text_given_up_in_part_the_beginning_stays() -> None:
    pool = BlockPool(8)
    filled(pool, ids_of(256)).release()
    other = filled(pool, ids_of(64 * 6, 1000))
    slot = matched(pool, ids_of(256))
    assert slot.length == 128
    pool.check([other, slot])


def test_forgotten_blocks_are_unknown_unless_somebody_else_uses_them() -> None:
    pool = BlockPool(8)
    first = filled(pool, ids_of(128))
    second = matched(pool, ids_of(128))
    feed(pool, second, ids_of(64, 128))
    second.commit(192)
    second.release(forget=True)
    assert known_len(pool, ids_of(192)) == 128
    first.release(forget=True)
    pool.check([])
    assert pool.usage.cached == 0


def test_a_copy_is_known_once_the_first_block_of_its_content_is_gone() -> None:
    pool = BlockPool(8)
    first, second = filled(pool, ids_of(64)), filled(pool, ids_of(64))
    assert pool.usage.shared == 0, "computed twice, so there are two"
    first.release(forget=True)
    assert known_len(pool, ids_of(64)) == 0
    second.release()
    assert known_len(pool, ids_of(64)) == 64


def test_nothing_is_taken_over_inside_a_block_or_in_a_freed_slot() -> None:
    pool = BlockPool(8)
    filled(pool, ids_of(128))
    slot = pool.new_slot()
    feed(pool, slot, ids_of(10))
    assert slot.match(ids_of(118, 10), [PROMPT] * 118) == 0
    feed(pool, slot, ids_of(54, 10))
    assert slot.match(ids_of(64, 64), [PROMPT] * 64) == 64
    slot.release()
    slot.release()
    for touch in (lambda: slot.match(ids_of(64), [PROMPT] * 64), lambda: slot.commit(0)):
        with pytest.raises(ValueError, match="freed"):
            touch()


def test_writing_into_a_shared_block_takes_a_copy_and_counts_it() -> None:
    copies: list[tuple[int, int]] = []
    pool = BlockPool(4, lambda source, target: copies.append((source, target)))
    first, second = filled(pool, ids_of(128)), matched(pool, ids_of(128))
    shared = list(first.blocks)
    second.truncate(100)
    assert second.growth(28) == 1
    feed(pool, second, [7] * 28)
    assert first.blocks == shared
    assert second.blocks[0] == shared[0]
    assert copies == [(shared[1], second.blocks[1])]
    assert known_len(pool, ids_of(128)) == 128, "the first one's content is known as before"
    first.truncate(100)
    third = matched(pool, ids_of(128))
    assert third.blocks == shared
    third.truncate(70)
    with pytest.raises(PoolExhausted):
        pool.reserve([(third, 71), (second, 129)])


def test_writing_into_a_known_block_of_ones_own_makes_it_unknown() -> None:
    pool = BlockPool(4)
    slot = filled(pool, ids_of(128))
    block = slot.blocks[1]
    slot.truncate(100)
    assert slot.growth(1) == 0
    feed(pool, slot, [7])
    assert slot.blocks[1] == block
    assert known_len(pool, ids_of(128)) == 64


def test_slots_that_do_not_mind_classes_share_among_themselves_only() -> None:
    pool = BlockPool(8)
    free = pool.new_slot(by_class=False)
    feed(pool, free, ids_of(64), DECODE)
    free.commit(64)
    other = pool.new_slot(by_class=False)
    assert other.match(ids_of(64), [PROMPT] * 64) == 64
    assert known_len(pool, ids_of(64), DECODE) == 0
    pool.set_roots("engine", classes_differ=False)
    assert known_len(pool, ids_of(64), DECODE) == 0, "another engine begins with nothing"
    filled(pool, ids_of(64), PROMPT)
    assert known_len(pool, ids_of(64), DECODE) == 64


def test_a_block_of_somebody_else_is_refused() -> None:
    pool = BlockPool(2)
    slot = filled(pool, ids_of(64))
    with pytest.raises(ValueError, match="does not belong"):
        pool.put([1 - slot.blocks[0]])


# --- against a model --------------------------------------------------------------------------------------------------


@dataclass
class Memory:
    """A pool, what its blocks hold, and the texts that its slots should hold."""

    num_blocks: int
    by_class: bool = True
    texts: dict[int, tuple[BlockSlot, list[Token]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cells: list[Token] = [(-1, PROMPT)] * (self.num_blocks * BLOCK_LEN)
        self.pool = BlockPool(self.num_blocks, self.copy)
        self.pool.set_roots("model", classes_differ=self.by_class)
        self.reused = self.copied = 0

    def copy(self, source: int, target: int) -> None:
        self.copied += 1
        self.cells[target * 64 : target * 64 + 64] = self.cells[source * 64 : source * 64 + 64]

    def open(self, name: int, text: list[Token]) -> None:
        """Begin with what is known of a text."""
        slot = self.pool.new_slot()
        self.reused += slot.match([token for token, _ in text], [token_class for _, token_class in text])
        self.texts[name] = slot, text[: slot.length]

    def write(self, name: int, tokens: list[Token]) -> None:
        """Feed tokens, one class at a time; drop the slot where there is no room."""
        slot, text = self.texts[name]
        for token, token_class in tokens:
            before = self.pool.usage
            try:
                self.pool.reserve([(slot, slot.length + 1)])
            except PoolExhausted:
                assert self.pool.usage == before
                return
            slot.advance([token], token_class)
            block, offset = slot.blocks[(slot.length - 1) // 64], (slot.length - 1) % 64
            self.cells[block * 64 + offset] = (token, token_class)
            text.append((token, token_class))

    def check(self) -> None:
        """Every slot reads its own text, and all counts add up."""
        self.pool.check([slot for slot, _ in self.texts.values()])
        usage = self.pool.usage
        assert usage.used + self.pool.num_free == self.num_blocks
        assert usage.holders == sum(bool(slot.blocks) for slot, _ in self.texts.values())
        for slot, text in self.texts.values():
            held = [self.cells[slot.blocks[at // 64] * 64 + at % 64] for at in range(slot.length)]
            if self.by_class:
                assert held == text
            assert [token for token, _ in held] == [token for token, _ in text]


@dataclass
class Play:
    """Random sessions over few tokens, so that texts begin alike often."""

    memory: Memory
    dice: random.Random

    def move(self) -> None:
        """Open, write, truncate, commit or close some session."""
        memory, dice = self.memory, self.dice
        name = dice.randrange(6)
        if name not in memory.texts:
            memory.open(name, self.text(dice.choice((0, 64, 130, 200))))
            return
        slot, text = memory.texts[name]
        match dice.choice(("write", "write", "write", "truncate", "commit", "close", "match")):
            case "write":
                memory.write(name, self.continuation(text, dice.randint(1, 90)))
            case "truncate":
                length = dice.randint(slot.length // 2, slot.length)
                slot.truncate(length)
                del text[length:]
            case "commit":
                slot.commit(dice.randint(0, slot.length))
            case "match":
                more = self.continuation(text, 128)
                grown = slot.match([token for token, _ in more], [token_class for _, token_class in more])
                memory.reused += grown
                text += more[:grown]
            case _:
                slot.release(forget=dice.random() < 0.2)
                del memory.texts[name]

    def text(self, length: int) -> list[Token]:
        return self.continuation([], length)

    def continuation(self, text: list[Token], length: int) -> list[Token]:
        """One of two texts for every place, in one of two classes, each constant over a block."""
        lean = self.dice.choice((0.0, 0.1))
        more: list[Token] = []
        for at in range(len(text), len(text) + length):
            branch = 1 if self.dice.random() < lean / 64 else 0
            more.append((at % 50 + 100 * branch, PROMPT if at < 128 else DECODE))
        return more


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), num_blocks=st.integers(3, 24), by_class=st.booleans())
def test_random_sessions_always_read_their_own_text_and_counts_add_up(
    seed: int, num_blocks: int, by_class: bool
) -> None:
    play = Play(Memory(num_blocks, by_class), random.Random(seed))
    for _ in range(60):
        play.move()
        play.memory.check()


def test_ten_thousand_moves_return_the_pool_to_its_start() -> None:
    memory = Memory(20)
    play = Play(memory, random.Random(7))
    for number in range(10_000):
        play.move()
        if number % 20 == 0:
            memory.check()
    assert memory.reused > 10_000
    assert memory.copied > 10
    for slot, _ in memory.texts.values():
        slot.release()
    memory.texts.clear()
    memory.check()
    assert memory.pool.num_free == 20
    assert memory.pool.usage.references == memory.pool.usage.used == memory.pool.usage.shared == 0


@pytest.mark.parametrize("mistake", ["no copy", "class left out", "parent left out"])
def test_planted_mistakes_in_sharing_are_noticed(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: what the property test checks fails when sharing is wrong."""
    memory = Memory(24)
    if mistake == "no copy":
        monkeypatch.setattr(BlockPool, "make_own", lambda _, block: block)
    if mistake == "class left out":
        monkeypatch.setattr("outrider.model.kv.chained_key", lambda parent, ids, _: chained_key(parent, ids, b""))
    if mistake == "parent left out":
        monkeypatch.setattr("outrider.model.kv.chained_key", lambda _, ids, classes: chained_key(b"", ids, classes))
    with pytest.raises((AssertionError, ValueError)):
        provoke(memory)


def provoke(memory: Memory) -> None:
    """Play what the planted mistakes cannot stand."""
    prompt = [(at % 50, PROMPT) for at in range(192)]
    memory.open(0, prompt)
    memory.write(0, prompt)
    memory.texts[0][0].commit(192)
    memory.open(1, [(token, DECODE) for token, _ in prompt])
    memory.write(1, [(token, DECODE) for token, _ in prompt[memory.texts[1][0].length :]])
    memory.check()
    assert not memory.reused
    memory.open(2, prompt[64:128])
    assert not memory.texts[2][0].length
    memory.open(3, prompt)
    slot, text = memory.texts[3]
    slot.truncate(100)
    del text[100:]
    memory.write(3, [(7, PROMPT)] * 10)
    memory.check()
