"""How much memory KV takes: budgets, what a pool reports, and weights that are there once."""

from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import nn

from draft_service.config import DraftSettings
from outrider.errors import FailedPrecondition, InvalidRequest
from outrider.ids import TokenClass
from outrider.model import memory
from outrider.model.kv_gauges import KvGauges, describe_pool
from outrider.model.memory import KvBudget, free_bytes, parse_budget
from outrider.model.packed import unmap
from outrider.model.runner import BLOCK_LEN, Feed, KvSlot
from outrider.model.tiny import random_model
from outrider.model.toy import MAX_TOY_BLOCKS, ToyLanguage, ToyRunner, toy_blocks
from outrider.model.transformers_runner import TransformersRunner
from verify_service.config import VerifySettings

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("2GiB", KvBudget(num_bytes=2 << 30)),
        ("1.5 gib", KvBudget(num_bytes=3 << 29)),
        ("500MB", KvBudget(num_bytes=500_000_000)),
        ("4096", KvBudget(num_bytes=4096)),
        (" 40% ", KvBudget(share=0.4)),
        ("100%", KvBudget(share=1.0)),
    ],
)
def test_a_budget_is_a_size_or_a_share(text: str, budget: KvBudget) -> None:
    assert parse_budget(text) == budget


@pytest.mark.parametrize("text", ["", "much", "-1GiB", "0", "0%", "101%", "2 GiB more", "1TiB", "1e9"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"%|free memory"):
        parse_budget(text)


def test_a_budget_gives_as_many_blocks_as_fit_and_at_least_one() -> None:
    assert KvBudget(num_bytes=1000).num_blocks(300, CPU) == 3
    with pytest.raises(FailedPrecondition, match="no room for one block of 1001"):
        KvBudget(num_bytes=1000).num_blocks(1001, CPU)
    half, tenth = (KvBudget(share=share).num_blocks(1 << 20, CPU) for share in (0.5, 0.1))
    assert half == pytest.approx(5 * tenth, rel=0.2), "memory of a shared machine moves meanwhile"


def test_free_memory_is_what_the_control_group_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    whole = free_bytes(CPU)
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert free_bytes(CPU) == pytest.approx(whole, rel=0.2)
    (tmp_path / "memory.max").write_text("1000\n")
    assert free_bytes(CPU) == 300
    (tmp_path / "memory.max").write_text("600\n")
    assert free_bytes(CPU) == 0


@pytest.mark.parametrize(
    ("settings", "prefix"), [(VerifySettings, "OUTRIDER_VERIFY_"), (DraftSettings, "OUTRIDER_DRAFT_")]
)
def test_the_pool_comes_from_the_budget_unless_blocks_are_set(
    settings: type[VerifySettings] | type[DraftSettings], prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert settings.load().pool == KvBudget(num_bytes=512 << 20)
    monkeypatch.setenv(prefix + "KV_BUDGET", "40%")
    assert settings.load().pool == KvBudget(share=0.4)
    monkeypatch.setenv(prefix + "NUM_BLOCKS", "7")
    assert settings.load().pool == 7
    monkeypatch.setenv(prefix + "KV_BUDGET", "plenty")
    with pytest.raises(InvalidRequest, match="plenty"):
        settings.load()


def test_a_runner_fills_its_budget_and_says_so() -> None:
    runner = TransformersRunner(random_model(), name="tiny", num_blocks=KvBudget(num_bytes=1 << 20))
    info = runner.info
    assert info.kv_block_bytes == 64 * 2 * 2 * 2 * 16 * 4, "positions, keys and values, layers, heads, width, float32"
    assert info.num_blocks == (1 << 20) // info.kv_block_bytes == runner.free_blocks
    described = describe_pool(info)
    assert int(described["kv_pool_bytes"]) == info.num_blocks * info.kv_block_bytes <= 1 << 20
    assert int(described["kv_bytes_per_token"]) * BLOCK_LEN == info.kv_block_bytes


def test_a_toy_takes_of_a_budget_what_it_can_use() -> None:
    assert toy_blocks(5) == 5
    assert toy_blocks(KvBudget(num_bytes=512 << 20)) == MAX_TOY_BLOCKS
    assert toy_blocks(KvBudget(num_bytes=8 * 64 * 3)) == 3


def gauges(runner: ToyRunner) -> dict[str, float]:
    """Return what is shown, in blocks."""
    registry = CollectorRegistry()
    registry.register(KvGauges(runner))
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    assert not any(sample.labels for sample in samples)
    return {
        sample.name.removeprefix("outrider_kv_").removesuffix("_bytes"): sample.value / runner.info.kv_block_bytes
        for sample in samples
        if sample.name.endswith("_bytes")
    }


def test_gauges_say_what_is_used_shared_cached_and_private() -> None:
    runner = ToyRunner(ToyLanguage(4), num_blocks=10)
    ids = (1, 2) * 64

    def begun() -> KvSlot:
        slot = runner.new_slot()
        slot.match(ids, [TokenClass.PROMPT] * 128)
        for _ in range(slot.length, 128, 64):
            runner.forward([Feed(slot, ids[:64], TokenClass.PROMPT, 0)])
        runner.forward([Feed(slot, (3,), TokenClass.DECODE, 0)])
        slot.commit(slot.length)
        return slot

    assert gauges(runner) == {"pool": 10, "used": 0, "shared": 0, "cached": 0, "private_per_session": 0}
    first = begun()
    assert gauges(runner) == {"pool": 10, "used": 3, "shared": 0, "cached": 0, "private_per_session": 3}
    second = begun()
    assert gauges(runner) == {"pool": 10, "used": 4, "shared": 2, "cached": 0, "private_per_session": 1}
    runner.free_slot(first)
    runner.free_slot(second)
    assert gauges(runner) == {"pool": 10, "used": 0, "shared": 0, "cached": 2, "private_per_session": 0}


def test_weights_that_stay_leave_the_mapped_file(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(4, 4)}, tmp_path / "weights.pt")
    mapped = torch.load(tmp_path / "weights.pt", mmap=True)["weight"]
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(mapped, requires_grad=False)
    before = layer.weight.data_ptr()
    unmap(layer)
    assert layer.weight.data_ptr() != before
    assert torch.equal(layer.weight, torch.ones(4, 4))
