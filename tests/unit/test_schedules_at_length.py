"""Two hundred random schedules each: on a small random transformer, and on the packaged model, in both dtypes.

In pieces of some minutes. `pytest -rP` prints what each piece has seen.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from outrider.model.names import ModelSpec
from outrider.model.opening import open_model
from outrider.model.probe import CANDIDATES
from outrider.model.runner import ModelRunner
from outrider.model.transformers_runner import TransformersRunner
from tests.unit.schedules import POOLS, Stage
from tests.unit.test_prefix_reuse import transformers

DTYPES = ("float32", "bfloat16")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def play(stage: Stage, seeds: range, max_tokens: int) -> None:
    """Play schedules, and say what was seen."""
    for seed in seeds:
        stage.play(seed, max_tokens)
    print(f"seeds {seeds.start} to {seeds.stop - 1}: {stage}")
    assert stage.totals["schedules"] == len(seeds)
    assert stage.totals["kv_reused_tokens"] > 0
    assert stage.totals["preempted"] > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("forced", [False, True], ids=["as probed", "classes forced apart"])
def test_schedules_on_a_small_transformer(dtype: str, forced: bool) -> None:
    """A hundred each way, two hundred in a dtype."""
    play(transformers(getattr(torch, dtype), forced=forced), range(100), 20)


def packaged(dtype: str) -> Stage:
    """The packaged model, one runner per size."""
    runners: dict[int, ModelRunner] = {}

    def make(num_blocks: int = 41) -> ModelRunner:
        if num_blocks not in runners:
            runners[num_blocks] = open_model(ModelSpec(dtype=dtype), num_blocks=num_blocks).runner
            assert runners[num_blocks].info.exactness == "bitwise"
        return runners[num_blocks]

    return Stage(make, make)


@pytest.mark.real_model
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("piece", range(8))
def test_schedules_on_the_packaged_model(dtype: str, piece: int) -> None:
    """Twenty-five in a piece."""
    play(packaged(dtype), range(25 * piece, 25 * piece + 25), 16)


@pytest.mark.real_model
def test_passes_of_sizes_that_do_not_agree_change_some_text() -> None:
    """Negative control: rows differ by how many share a pass, as they would without row classes."""
    stage = packaged("bfloat16")
    for num_blocks in (*POOLS, 41):
        runner = stage.make_runner(num_blocks)
        assert isinstance(runner, TransformersRunner)
        if runner.classes.rows == CANDIDATES:
            pytest.skip("on this machine passes of all sizes agree")
        runner.set_classes(replace(runner.classes, rows=CANDIDATES), "any size")
    with pytest.raises(AssertionError):
        play(stage, range(10), 16)
