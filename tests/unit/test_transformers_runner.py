from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, BloomConfig, BloomForCausalLM

from outrider.errors import FailedPrecondition
from outrider.ids import TokenClass
from outrider.model.kv import BlockSlot
from outrider.model.planning import RowClasses
from outrider.model.probe import StockCheck, calibrate
from outrider.model.runner import Feed, InvalidFeed, KvSlot, ModelRunner, PoolExhausted, prefill_plan
from outrider.model.tiny import random_model
from outrider.model.transformers_runner import TransformersRunner

DECODE, PROMPT = TokenClass.DECODE, TokenClass.PROMPT
from_config: Any = AutoModelForCausalLM.from_config
IDS = tuple(index * index * 31 % 509 for index in range(300))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny_runner(dtype: torch.dtype = torch.float32, **kwargs: Any) -> TransformersRunner:
    runner = TransformersRunner(
        random_model(dtype=dtype), name="tiny", num_blocks=kwargs.pop("num_blocks", 32), **kwargs
    )
    calibrate(runner)
    return runner


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def runner(request: pytest.FixtureRequest) -> TransformersRunner:
    torch.set_num_threads(1)
    return tiny_runner(getattr(torch, request.param))


def prefilled(runner: ModelRunner, ids: Sequence[int]) -> KvSlot:
    slot = runner.new_slot()
    for start, end in prefill_plan(0, len(ids)):
        runner.forward([Feed(slot, tuple(ids[start:end]), PROMPT, 0)])
    return slot


def decode(runner: ModelRunner, slot: KvSlot, ids: Sequence[int]) -> Tensor:
    return runner.forward([Feed(slot, tuple(ids), DECODE, len(ids))])[0].logits


def in_runs(runner: ModelRunner, slot: KvSlot, end: int, run: int) -> Tensor:
    """Decode IDS up to `end` in runs of `run` tokens."""
    return torch.cat([decode(runner, slot, IDS[at : min(at + run, end)]) for at in range(slot.length, end, run)])


@pytest.fixture
def twin(runner: TransformersRunner) -> Iterator[Tensor]:
    """Rows of IDS[50:200], decoded one by one behind a prefilled prompt."""
    slot = prefilled(runner, IDS[:50])
    yield in_runs(runner, slot, 200, 1)
    runner.free_slot(slot)


def test_the_probe_finds_classes_that_are_exact_here(runner: TransformersRunner) -> None:
    assert runner.info.exactness == "bitwise"
    assert runner.info.max_rows == runner.info.row_classes[-1]
    assert runner.free_blocks == runner.info.num_blocks


@pytest.mark.parametrize("run", [2, 3, 5, 8, 13, 31, 32, 77, 150])
def test_rows_do_not_depend_on_the_length_of_a_run(runner: TransformersRunner, twin: Tensor, run: int) -> None:
    slot = prefilled(runner, IDS[:50])
    assert torch.equal(in_runs(runner, slot, 200, run), twin)
    runner.free_slot(slot)


@pytest.mark.parametrize("order", [1, -1])
def test_rows_do_not_depend_on_neighbours(runner: TransformersRunner, twin: Tensor, order: int) -> None:
    slot, others = prefilled(runner, IDS[:50]), [prefilled(runner, IDS[count : 2 * count]) for count in (3, 64, 100)]
    rows = []
    for start in range(50, 200, 4):
        run = IDS[start : min(start + 4, 200)]
        guest = runner.new_slot()
        feeds = [Feed(slot, run, DECODE, len(run)), Feed(guest, IDS[:9], PROMPT, 1)]
        feeds += [Feed(other, IDS[: 1 + (start + at) % 9], DECODE, 1) for at, other in enumerate(others)]
        rows.append(runner.forward(feeds[::order])[::order][0].logits)
        runner.free_slot(guest)
    assert torch.equal(torch.cat(rows), twin)
    for each in (slot, *others):
        runner.free_slot(each)


def test_a_rollback_to_every_offset_of_a_block_leaves_no_trace(runner: TransformersRunner, twin: Tensor) -> None:
    slot = prefilled(runner, IDS[:50])
    in_runs(runner, slot, 60, 10)
    for target in range(60, 130):
        decode(runner, slot, [7, 8, 9])
        slot.truncate(target)
        row = decode(runner, slot, IDS[target : target + 1])
        assert torch.equal(row[0], twin[target - 50]), target
    runner.free_slot(slot)


def test_kv_rebuilt_with_the_recorded_classes_gives_the_same_rows(runner: TransformersRunner, twin: Tensor) -> None:
    slot = prefilled(runner, IDS[:50])
    runner.forward([Feed(slot, IDS[50:150], DECODE, 0)])
    assert torch.equal(in_runs(runner, slot, 200, 6), twin[100:])
    runner.free_slot(slot)


def test_a_prompt_resumed_inside_a_block_gives_the_same_rows(runner: TransformersRunner, twin: Tensor) -> None:
    slot = runner.new_slot()
    for start, end in ((0, 20), (20, 21), (21, 50)):
        runner.forward([Feed(slot, IDS[start:end], PROMPT, 0)])
    assert torch.equal(in_runs(runner, slot, 60, 5), twin[:10])
    runner.free_slot(slot)


def test_scattered_blocks_give_the_same_rows(runner: TransformersRunner, twin: Tensor) -> None:
    free = runner.free_blocks
    fillers = [prefilled(runner, IDS[:1]) for _ in range(free)]
    for filler in fillers[::3]:
        runner.free_slot(filler)
    slot = prefilled(runner, IDS[:50])
    assert torch.equal(in_runs(runner, slot, 200, 7), twin)
    assert isinstance(slot, BlockSlot)
    assert slot.blocks != list(range(slot.blocks[0], slot.blocks[0] + len(slot.blocks)))
    for each in (slot, *fillers):
        runner.free_slot(each)
    assert runner.free_blocks == free


def test_a_rollback_that_is_forgotten_changes_the_rows(runner: TransformersRunner, twin: Tensor) -> None:
    slot = prefilled(runner, IDS[:50])
    decode(runner, slot, [7])
    assert not torch.equal(decode(runner, slot, IDS[50:51])[0], twin[0])
    runner.free_slot(slot)


def test_shapes_that_the_probe_rejects_are_not_needed_for_one_fixed_shape() -> None:
    runner = tiny_runner()
    runner.set_classes(RowClasses((8,), (8,)), "")
    rows = []
    for run in (1, 3, 8, 20):
        slot = prefilled(runner, IDS[:50])
        rows.append(in_runs(runner, slot, 90, run))
        runner.free_slot(slot)
    assert all(torch.equal(rows[0], other) for other in rows[1:])


def test_rows_equal_the_stock_forward_up_to_rounding() -> None:
    with torch.inference_mode():
        stock = random_model()(torch.tensor([IDS[:200]])).logits[0]
    for fused in (True, False):
        runner = tiny_runner(fused=fused)
        assert runner.fused == fused
        slot = prefilled(runner, IDS[:50])
        torch.testing.assert_close(in_runs(runner, slot, 200, 9), stock[50:], atol=2e-4, rtol=1e-4)


def test_prompt_rows_and_hidden_states_can_be_asked_for() -> None:
    runner = tiny_runner()
    with torch.inference_mode():
        stock = random_model()(torch.tensor([IDS[:40]])).logits[0]
    rows = runner.forward([Feed(runner.new_slot(), IDS[:40], PROMPT, 30, want_hidden=True)])[0]
    torch.testing.assert_close(rows.logits, stock[10:], atol=2e-4, rtol=1e-4)
    assert rows.hidden is not None
    assert rows.hidden.shape == (30, 64)
    head = runner.model.get_output_embeddings()
    torch.testing.assert_close(head(rows.hidden.clone()), rows.logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("fused", [True, False])
def test_hidden_states_alone_are_the_same_and_cost_no_head(fused: bool) -> None:
    runner = tiny_runner(fused=fused)
    both = runner.forward([Feed(runner.new_slot(), IDS[:40], PROMPT, 40, want_hidden=True)])[0]
    feeds = [
        Feed(runner.new_slot(), IDS[:40], PROMPT, 40, want_hidden=True, hidden_only=True),
        Feed(runner.new_slot(), IDS[:7], PROMPT, 1),
    ]
    alone, other = runner.forward(feeds)
    assert both.hidden is not None
    assert alone.hidden is not None
    assert torch.equal(alone.hidden, both.hidden)
    assert alone.logits.shape == (40, 0 if fused else 512)
    assert other.logits.shape == (1, 512)


def test_no_rows_asked_for_gives_empty_rows() -> None:
    runner = tiny_runner()
    rows = runner.forward([Feed(runner.new_slot(), (1, 2), DECODE, 0, want_hidden=True)])[0]
    assert rows.logits.shape == (0, 512)
    assert rows.hidden is not None
    assert rows.hidden.shape == (0, 64)
    assert runner.forward([]) == []


def test_a_full_pool_refuses_before_anything_changes() -> None:
    runner = tiny_runner(num_blocks=4)
    slot, other = prefilled(runner, IDS[:128]), runner.new_slot()
    before = decode(runner, slot, IDS[128:129])
    slot.truncate(128)
    with pytest.raises(PoolExhausted):
        runner.forward([Feed(slot, IDS[128:129], DECODE, 1), Feed(other, IDS[:100], DECODE, 0)])
    assert (slot.length, other.length, runner.free_blocks) == (128, 0, 2)
    assert torch.equal(decode(runner, slot, IDS[128:129]), before)


def test_a_pass_that_fails_gives_its_blocks_back() -> None:
    runner = tiny_runner()

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    handle = runner.model.get_input_embeddings().register_forward_pre_hook(fail)
    slot = runner.new_slot()
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.forward([Feed(slot, IDS[:70], DECODE, 1)])
    assert (slot.length, runner.free_blocks) == (0, 32)
    handle.remove()
    assert decode(runner, slot, IDS[:2]).shape == (2, 512)


def test_bad_feeds_are_refused() -> None:
    runner = tiny_runner(context_len=100)
    freed = runner.new_slot()
    runner.free_slot(freed)
    for feed, message in (
        (Feed(runner.new_slot(), (512,), DECODE, 0), "token id 512"),
        (Feed(runner.new_slot(), IDS[:101], DECODE, 0), "context of 100"),
        (Feed(runner.new_slot(), IDS[:65], PROMPT, 0), "block border"),
        (Feed(freed, (1,), DECODE, 0), "freed"),
    ):
        with pytest.raises(InvalidFeed, match=message):
            runner.forward([feed])
    assert runner.free_blocks == 32


def test_a_probe_result_is_kept_and_read_again(tmp_path: Any) -> None:
    first = calibrate(tiny_runner(), tmp_path)
    second = calibrate(tiny_runner(), tmp_path)
    assert (first.cached, second.cached) == (False, True)
    assert (first.classes, first.fingerprint) == (second.classes, second.fingerprint)
    for file in (tmp_path / "probe").iterdir():
        file.write_text("{")
    assert not calibrate(tiny_runner(), tmp_path).cached


SMALL = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.2,
    "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("gpt2", {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("mistral", {"sliding_window": 24}),
        ("gemma2", {"sliding_window": 24, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0}),
        ("granite", {"logits_scaling": 4.0, "embedding_multiplier": 2.0}),
        ("cohere", {"logit_scale": 0.25}),
        ("phi3", {}),
    ],
)
def test_other_architectures_equal_their_stock_forward_and_are_invariant(kind: str, extra: dict[str, Any]) -> None:
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, **((SMALL if kind != "gpt2" else {"vocab_size": 512}) | extra))
    model = from_config(config).train(False)
    stock = StockCheck(model)
    runner = TransformersRunner(model, name=kind, num_blocks=16)
    assert calibrate(runner).classes.exactness == "bitwise"
    assert stock.verify(runner) < 1e-5


def test_a_runner_that_computes_something_else_is_found_out() -> None:
    stock = StockCheck(random_model(seed=1))
    runner = TransformersRunner(random_model(seed=2), name="impostor", num_blocks=8)
    with pytest.raises(FailedPrecondition, match="impostor: rows over the block pool differ"):
        stock.verify(runner)


def test_attention_that_cannot_be_replaced_is_refused_by_name() -> None:
    config = BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2)
    with pytest.raises(FailedPrecondition, match="BloomForCausalLM does not let its attention be replaced"):
        TransformersRunner(BloomForCausalLM(config), name="bloom", num_blocks=4)


def test_a_rotation_that_depends_on_neighbours_is_refused_by_name() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(FailedPrecondition, match="rotary embedding of type dynamic"):
        TransformersRunner(random_model(rope_parameters=rope), name="moving", num_blocks=4)


def test_rows_may_be_changed_in_place() -> None:
    runner = tiny_runner()
    rows = runner.forward([Feed(runner.new_slot(), (1, 2), DECODE, 2, want_hidden=True)])[0]
    rows.logits[0, 3] = -torch.inf
    assert rows.hidden is not None
    rows.hidden.add_(1.0)


def test_a_feature_the_block_pool_lacks_is_refused_by_name() -> None:
    config = AutoConfig.for_model("gpt_oss", **(SMALL | {"num_local_experts": 2, "num_experts_per_tok": 1}))
    runner = TransformersRunner(from_config(config), name="sinks", num_blocks=4)
    with pytest.raises(FailedPrecondition, match="s_aux"):
        runner.forward([Feed(runner.new_slot(), (1,), DECODE, 1)])
    assert runner.free_blocks == 4
