"""A model over two ranks: the text of one rank, the same rows but for rounding, and a loss that is noticed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from outrider.errors import FailedPrecondition, InvalidRequest
from outrider.model.names import ModelSpec
from outrider.model.opening import open_model
from outrider.model.parallel import own_rank
from outrider.model.sharding import num_shards, require_divisible
from outrider.model.tiny import random_model
from tests.ports import free_port
from tests.unit.parallel_rank import decode

ROOT = Path(__file__).parents[2]


def save_model(folder: Path) -> None:
    """Write a random model with a tokenizer of words."""
    random_model().save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(512)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    made: Any = PreTrainedTokenizerFast
    made(tokenizer_object=words, eos_token="w0", unk_token="w1").save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model(path)
    return path


@pytest.fixture(scope="module")
def ranks(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str]]:
    """Exit status and output of both ranks."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    common = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "OUTRIDER_CACHE": str(tmp_path_factory.mktemp("cache"))}
    command = [sys.executable, "-m", "tests.unit.parallel_rank", str(folder)]
    running = [
        subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **common, **meeting, "RANK": str(rank)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [each.communicate(timeout=100) for each in running]
    finally:
        for each in running:
            each.kill()
            each.wait()
    return [(each.returncode, out or error) for each, (out, error) in zip(running, outputs, strict=True)]


def said(ranks: list[tuple[int, str]]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in ranks[0][1].splitlines() if line.startswith("{")]


def test_two_ranks_decode_the_text_of_one(folder: Path, ranks: list[tuple[int, str]]) -> None:
    alone, together = decode(open_model(ModelSpec(str(folder), "float32"), num_blocks=8).runner), said(ranks)[0]
    assert together["tokens"] == alone["tokens"]
    for name in ("first", "copied", "branched"):
        ours, theirs = torch.tensor(together[name]), torch.tensor(alone[name])
        # Sums over ranks have another order: rows agree up to rounding, and where they do not the pass is wrong.
        assert ours.shape == theirs.shape
        assert float((ours - theirs).abs().max()) < 1e-4 * float(theirs.std())
    assert together["fingerprint"] != alone["fingerprint"]
    assert together["exactness"] in ("bitwise", "distribution")


def test_a_leader_whose_rank_is_gone_ends_with_an_error(ranks: list[tuple[int, str]]) -> None:
    assert ranks[1][0] == 3
    assert ranks[0][0] == 1
    assert "rank 0 of 2 has lost another one" in said(ranks)[1]["broken"]


@pytest.mark.parametrize(("size", "name"), [(3, "4 attention heads"), (4, "2 key-value heads")])
def test_heads_that_cannot_be_shared_out_are_named(size: int, name: str) -> None:
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2)
    with pytest.raises(FailedPrecondition, match=rf"tensor_parallel = {size}.*{name}.*allowed are 1, 2"):
        require_divisible(config, size)
    require_divisible(config, 2)


def test_the_number_of_processes_must_be_what_torchrun_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert own_rank(2) == 1
    for size in (1, 4):
        with pytest.raises(InvalidRequest, match="tensor_parallel"):
            own_rank(size)
    monkeypatch.delenv("WORLD_SIZE")
    assert own_rank(1) == 0
    with pytest.raises(InvalidRequest, match="torchrun --nproc-per-node 2"):
        own_rank(2)


def test_a_model_that_is_not_split_has_one_shard() -> None:
    assert num_shards(random_model()) == 1
