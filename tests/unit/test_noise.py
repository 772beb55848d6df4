"""Keyed counter streams: pinned integers, independent counters and keys, and the laws of what is derived from them."""

from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from outrider.ids import Epoch, Generation
from outrider.noise import (
    KEY_BYTES,
    Purpose,
    derive_key,
    field_words,
    gumbel,
    gumbel_field,
    gumbel_field_at,
    seed_key,
    uniform,
    word64,
)

REPEATABLE = settings(deadline=None, database=None, derandomize=True)
KEY = bytes(range(16))
EPOCH = Epoch(Generation(3, 1), 4)


def test_the_integers_are_the_same_on_every_machine() -> None:
    """Pinned: a change of any of these changes the text of every seeded session."""
    assert seed_key(1).hex() == "dc66886cd74d0c59a95fe13c4d11eded"
    assert derive_key(KEY, Purpose.DRAFT).hex() == "27d6f9c03364de37eaa3d0e8f99870c6"
    assert word64(KEY, 17, EPOCH) == 16159429534262674857
    words = [3213562746335377068, 15182442131553239822, 8724726330215305940]
    assert field_words(KEY, 0, 17, np.array([0, 1, 49151])).tolist() == words


def test_the_vectorised_field_equals_the_same_arithmetic_in_plain_integers() -> None:
    def finalise(word: int) -> int:
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
        return word ^ word >> 31

    counters = (2).to_bytes(8, "little") + (99).to_bytes(8, "little")
    row_key = blake2b(counters, digest_size=16, key=KEY, person=b"outrider-field").digest()
    low, high = (int.from_bytes(half, "little") for half in (row_key[:8], row_key[8:]))
    ids = [0, 1, 2, 4095, 4096, 9000]
    expected = [finalise(finalise((i + 1) * 0x9E3779B97F4A7C15 % 2**64 ^ low) ^ high) for i in ids]
    assert field_words(KEY, 2, 99, np.arange(9001))[ids].tolist() == expected


def test_every_purpose_has_its_own_key() -> None:
    keys = {derive_key(KEY, purpose) for purpose in Purpose}
    assert len(keys | {KEY}) == len(Purpose) + 1
    assert {len(key) for key in keys} == {KEY_BYTES}


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, 2**64 - 1, -(2**63)])
def test_seeds_of_64_bits_signed_or_unsigned_are_taken(seed: int) -> None:
    assert len(seed_key(seed)) == KEY_BYTES


def test_different_seeds_have_different_keys() -> None:
    assert len({seed_key(seed) for seed in (-1, 0, 1, 255, 256, 2**63, 2**64 - 1, -(2**63))}) == 8


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_a_seed_of_more_than_64_bits_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match="seed"):
        seed_key(seed)


@pytest.mark.parametrize("key", [b"", bytes(15), bytes(17)])
def test_a_key_of_another_length_is_refused(key: bytes) -> None:
    with pytest.raises(ValueError, match="must have 16"):
        word64(key, 0, EPOCH)


def test_every_counter_changes_the_word() -> None:
    words = [
        word64(KEY, 5, EPOCH),
        word64(KEY, 6, EPOCH),
        word64(KEY, 5, EPOCH.next_round()),
        word64(KEY, 5, Epoch(Generation(4, 1), 4)),
        word64(KEY, 5, Epoch(Generation(3, 2), 4)),
        word64(KEY, 5, EPOCH, index=1),
        word64(derive_key(KEY, Purpose.COIN), 5, EPOCH),
    ]
    assert len(set(words)) == len(words)
    assert word64(KEY, 5, EPOCH) == words[0]


@REPEATABLE
@given(st.integers(0, 2**40), st.integers(0, 2**40))
def test_a_uniform_number_is_the_top_53_bits_of_its_word(position: int, round_: int) -> None:
    epoch = Epoch(Generation(), round_)
    value = uniform(KEY, position, epoch)
    assert 0.0 <= value < 1.0
    assert value * 2**53 == word64(KEY, position, epoch) >> 11


def test_uniform_numbers_over_positions_and_rounds_are_uniform() -> None:
    """Kolmogorov-Smirnov on 20,000 numbers of a fixed key, false-alarm rate 1e-4; squared numbers are rejected."""
    values = [uniform(KEY, position, Epoch(Generation(), round_)) for position in range(200) for round_ in range(100)]
    assert stats.kstest(values, "uniform").pvalue > 1e-4
    assert stats.kstest(np.square(values), "uniform").pvalue < 1e-4


def test_a_tokens_noise_does_not_depend_on_the_other_tokens() -> None:
    field = gumbel_field(KEY, 2, 99, 49_152)
    some = np.random.default_rng(0).permutation(49_152)[:5_000]
    assert np.array_equal(gumbel_field_at(KEY, 2, 99, some), field[some])
    assert np.array_equal(gumbel_field_at(KEY, 2, 99, some[:7]), field[some[:7]])
    assert gumbel_field_at(KEY, 2, 99, some[:0]).shape == (0,)


def test_asking_for_noise_leaves_the_ids_alone() -> None:
    ids = np.arange(10)
    gumbel_field_at(KEY, 0, 0, ids)
    assert ids.tolist() == list(range(10))


def test_key_sample_index_and_position_change_the_field() -> None:
    rows = [
        gumbel_field(key, sample, position, 64)
        for key in (KEY, seed_key(1))
        for sample in (0, 1)
        for position in (0, 1, 2**33)
    ]
    correlations = np.corrcoef(rows) - np.eye(len(rows))
    assert np.abs(correlations).max() < 0.6


def test_the_field_is_standard_gumbel_along_tokens_and_along_positions() -> None:
    """Kolmogorov-Smirnov, 49,152 tokens and 5,000 positions, false-alarm rate 1e-4 each.

    The control shifts by .06, which moves the distribution function by .022, twice the critical distance.
    """
    along_tokens = gumbel_field(KEY, 0, 0, 49_152)
    along_positions = [float(gumbel_field_at(KEY, 0, i, np.array([7]))[0]) for i in range(5_000)]
    assert stats.kstest(along_tokens, "gumbel_r").pvalue > 1e-4
    assert stats.kstest(along_positions, "gumbel_r").pvalue > 1e-4
    assert stats.kstest(along_tokens + 0.06, "gumbel_r").pvalue < 1e-4


def test_neighbouring_tokens_and_positions_are_uncorrelated() -> None:
    """Correlation of 49,000 pairs, |r| below 4.5 standard errors (false-alarm rate 1e-5 each)."""
    rows = [field_words(KEY, 0, i, np.arange(49_152)).astype(np.float64) for i in range(3)]
    pairs = [(rows[0][:-1], rows[0][1:]), (rows[0][:-2], rows[0][2:]), (rows[0], rows[1]), (rows[1], rows[2])]
    assert all(abs(np.corrcoef(a, b)[0, 1]) < 4.5 / np.sqrt(len(a)) for a, b in pairs)


def test_all_bits_of_the_field_are_fair() -> None:
    """Each of 64 bits over 200,000 words: within 5 standard deviations of one half (false-alarm rate 4e-5 in all)."""
    words = np.concatenate([field_words(KEY, 0, i, np.arange(20_000)) for i in range(10)])
    for bit in range(64):
        ones = int(((words >> np.uint64(bit)) & np.uint64(1)).sum())
        assert abs(ones - len(words) / 2) < 5 * np.sqrt(len(words)) / 2


def test_noise_is_finite_even_for_the_extreme_words() -> None:
    extremes = np.array([0, 2**64 - 1], dtype=np.uint64)
    noise = gumbel(extremes)
    assert np.isfinite(noise).all()
    assert noise[0] < -3.5
    assert noise[1] > 36.0
