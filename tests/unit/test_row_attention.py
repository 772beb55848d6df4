"""Attention of decode rows on a CPU: right, and the same bits in whatever company."""

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.model.row_attention import MAX_RUN, NO_TREE, Runs, is_supported
from outrider.model.runner import BLOCK_LEN

KV_HEADS, GROUP, DIM, SCALE = 3, 2, 24, 0.2
NUM_BLOCKS = 24


def pool_of(dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(NUM_BLOCKS * BLOCK_LEN, 2 * KV_HEADS, DIM, generator=generator).to(dtype)


def queries_of(positions: list[int], dtype: torch.dtype) -> Tensor:
    """Return queries that are a function of the position, so that a position has the same one in every pass."""
    rows = [torch.randn(KV_HEADS, GROUP, DIM, generator=torch.Generator().manual_seed(at)) for at in positions]
    return torch.stack(rows).to(dtype)


def attended(pool: Tensor, runs: list[tuple[list[int], list[int]]], window: int = 0, padding: int = 0) -> Tensor:
    """Attend with runs of (positions, blocks); [rows + padding, KV_HEADS * GROUP * DIM]."""
    counts = [len(positions) for positions, _ in runs]
    first = [sum(counts[:index]) for index in range(len(counts))]
    width = max(len(blocks) for _, blocks in runs)
    table = [blocks + [NUM_BLOCKS - 1] * (width - len(blocks)) for _, blocks in runs]
    positions = [at for own, _ in runs for at in own] + [0] * padding
    runs_of = Runs(
        np.array(first), np.array(counts), np.array(table), np.array(positions),
        np.full(len(runs), NO_TREE), np.zeros((len(positions), 0), np.int64),
    )  # fmt: skip
    return runs_of.attend(queries_of(positions, pool.dtype), pool, SCALE, window)


def reference(pool: Tensor, position: int, blocks: list[int], window: int) -> Tensor:
    first = max(0, position + 1 - window) if window else 0
    rows = [blocks[at // BLOCK_LEN] * BLOCK_LEN + at % BLOCK_LEN for at in range(first, position + 1)]
    both = pool[rows].double().transpose(0, 1)
    query = queries_of([position], pool.dtype)[0].double()
    weights = torch.softmax(query @ both[:KV_HEADS].transpose(1, 2) * SCALE, -1)
    return torch.matmul(weights, both[KV_HEADS:]).flatten()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 1, 5, 70])
def test_rows_are_softmax_attention_over_the_keys_they_see(dtype: torch.dtype, window: int) -> None:
    pool = pool_of(dtype)
    runs = [([0, 1, 2], [7]), ([62, 63, 64, 65], [3, 9]), ([200], [5, 1, 0, 2])]
    out = attended(pool, runs, window, padding=2)
    wanted = [reference(pool, at, blocks, window) for positions, blocks in runs for at in positions]
    tolerance = 1e-6 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(out[:-2].double(), torch.stack(wanted), atol=tolerance, rtol=tolerance)
    assert not out[-2:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 50])
def test_a_rows_bits_do_not_depend_on_its_run_nor_on_neighbours(dtype: torch.dtype, window: int) -> None:
    pool, blocks = pool_of(dtype), [4, 11, 8]
    positions = list(range(120, 120 + MAX_RUN))
    together = attended(pool, [(positions, blocks)], window)
    for index, at in enumerate(positions):
        alone = attended(pool, [([at], blocks)], window)
        beside = attended(pool, [([3], [2]), ([at], blocks), ([300, 301], [1, 3, 5, 6, 7])], window, padding=3)
        assert torch.equal(alone[0], together[index])
        assert torch.equal(beside[1], together[index])


def test_a_rows_bits_do_not_depend_on_where_its_blocks_lie() -> None:
    pool = pool_of(torch.bfloat16)
    moved = pool.clone()
    for source, target in ((4, 20), (11, 2)):
        moved[target * BLOCK_LEN : (target + 1) * BLOCK_LEN] = pool[source * BLOCK_LEN : (source + 1) * BLOCK_LEN]
    assert torch.equal(attended(pool, [([100, 101], [4, 11])]), attended(moved, [([100, 101], [20, 2])]))


def test_threads_share_the_work_and_leave_the_bits() -> None:
    pool, before = pool_of(torch.bfloat16), torch.get_num_threads()
    runs = [(list(range(300, 308)), [0, 1, 2, 3, 4]), (list(range(290, 298)), [5, 6, 7, 8, 9])]
    try:
        torch.set_num_threads(1)
        alone = attended(pool, runs)
        for threads in (2, 3, 5):
            torch.set_num_threads(threads)
            assert torch.equal(attended(pool, runs), alone)
    finally:
        torch.set_num_threads(before)


def test_a_number_that_is_none_is_not_hidden() -> None:
    pool = pool_of(torch.float32)
    pool[4 * BLOCK_LEN + 10, 0, 0] = float("nan")
    out = attended(pool, [([9, 10, 70], [4, 5])])
    assert out[0].isfinite().all()
    assert out[1].isnan().any()
    assert out[2].isnan().any()


def test_far_scores_neither_overflow_nor_vanish_wrongly() -> None:
    pool = pool_of(torch.float32)
    pool[:, :KV_HEADS] *= 1000
    out = attended(pool, [([150], [0, 1, 2])])
    torch.testing.assert_close(out[0].double(), reference(pool, 150, [0, 1, 2], 0), atol=1e-4, rtol=1e-4)


def test_only_what_can_be_computed_is_taken() -> None:
    assert is_supported(torch.device("cpu"), torch.bfloat16)
    assert is_supported(torch.device("cpu"), torch.float32)
    assert not is_supported(torch.device("cpu"), torch.float16)
    assert not is_supported(torch.device("cuda"), torch.bfloat16)
