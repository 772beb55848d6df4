import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter, TokenType

from outrider.errors import FailedPrecondition, NotFound
from outrider.ids import TokenClass
from outrider.model import gguf
from outrider.model.loader import end_token_ids, keep_layers, load
from outrider.model.names import DEFAULT_MODEL, ModelSpec, cache_dir, locate
from outrider.model.opening import OpenedModel, open_model
from outrider.model.runner import Feed, KvSlot, prefill_plan
from outrider.model.tiny import random_model
from outrider.model.toy import ToyTokenizer
from outrider.model.vocabulary import first_difference, vocabulary

DECODE, PROMPT = TokenClass.DECODE, TokenClass.PROMPT


@pytest.fixture(scope="module")
def opened() -> OpenedModel:
    """The packaged model; converted into the user's cache the first time."""
    torch.set_num_threads(1)
    return open_model(ModelSpec(), num_blocks=24)


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("OUTRIDER_CACHE")
    assert cache_dir() == Path.home() / ".cache" / "outrider"


def test_a_local_folder_is_loaded_with_the_layers_asked_for(tmp_path: Path) -> None:
    random_model(num_hidden_layers=4).save_pretrained(tmp_path)
    with pytest.raises(FailedPrecondition, match=r"layers \(0, 4\) are not rising numbers in \[0, 4\)"):
        keep_layers(random_model(num_hidden_layers=4), (0, 4))
    model = random_model(num_hidden_layers=4)
    whole = random_model(num_hidden_layers=4)
    keep_layers(model, (0, 3))
    assert model.config.num_hidden_layers == 2
    assert torch.equal(model.model.layers[1].mlp.up_proj.weight, whole.model.layers[3].mlp.up_proj.weight)
    assert locate(str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize("layers", [(), (1, 1), (1, 0), (-1,)])
def test_layers_that_make_no_sense_are_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(FailedPrecondition, match="not rising numbers"):
        keep_layers(random_model(), layers)


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "missing.gguf", "a/b/c"])
def test_an_unknown_model_is_named_with_what_is_known(name: str) -> None:
    with pytest.raises(NotFound, match=DEFAULT_MODEL) as caught:
        load(ModelSpec(name))
    assert name in str(caught.value)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"no config\.json"):
        load(ModelSpec(str(tmp_path)))


def test_a_folder_that_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(NotFound, match="cannot be loaded"):
        load(ModelSpec(str(tmp_path)))


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(FailedPrecondition, match="'int3' is not one of bfloat16"):
        load(ModelSpec(dtype="int3"))


def test_a_label_names_the_kept_layers() -> None:
    assert ModelSpec("m").label == "m"
    assert ModelSpec("m", layers=(0, 29)).label == "m[0,29]"


def write_gguf(path: Path, hidden: int = 32, vocab_size: int = 8) -> None:
    """Write a one-layer Llama with random weights, as llama.cpp stores it."""
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<eos>", *"abcdef"[: vocab_size - 2], "ab"])
    writer.add_token_types([TokenType.CONTROL, *[TokenType.NORMAL] * (vocab_size - 1)])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    random = np.random.default_rng(1)
    matrices = {"token_embd": (vocab_size, hidden), "output": (vocab_size, hidden)}
    matrices |= {f"blk.0.{name}": (hidden, hidden) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
    matrices |= {f"blk.0.{name}": (hidden, hidden) for name in ("ffn_gate", "ffn_up", "ffn_down")}
    for name, shape in matrices.items():
        writer.add_tensor(f"{name}.weight", random.standard_normal(shape, dtype=np.float32))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(hidden, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_loads_and_is_converted_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "tiny.v1.gguf"
    write_gguf(source)
    stages: list[str] = []
    spec = ModelSpec(str(source), dtype="float32")
    threads = [threading.Thread(target=load, args=(spec, lambda stage, _: stages.append(stage))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stages.count("reading the GGUF file") == 1
    assert stages.count("loading the model") == 6
    model, tokenizer = load(spec)
    assert (model.config.num_hidden_layers, model.dtype) == (1, torch.float32)
    assert end_token_ids(model, tokenizer) == (0,)
    assert tokenizer.decode([1, 2]) == "ab"
    folders = [path.name for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()]
    assert folders == [f"tiny.v1-{gguf.content_key(source)}"]


def test_a_file_that_is_no_gguf_leaves_nothing_behind(tmp_path: Path) -> None:
    source = tmp_path / "broken.gguf"
    source.write_bytes(b"GGUF")
    with pytest.raises(NotFound, match=r"broken\.gguf cannot be converted"):
        gguf.converted(source, tmp_path / "cache", lambda *_: None)
    assert [path.name for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()] == []


def test_other_contents_have_another_key(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_bytes(b"x" * 3_000_000)
    shutil.copy(first, second)
    assert gguf.content_key(first) == gguf.content_key(second)
    second.write_bytes(b"x" * 2_999_999 + b"y")
    assert gguf.content_key(first) != gguf.content_key(second)


def test_vocabularies_are_equal_exactly_when_their_maps_are() -> None:
    ours, swapped = ToyTokenizer(), ToyTokenizer(words=("cat ", "the "))
    assert vocabulary(ours) == vocabulary(ToyTokenizer())
    assert vocabulary(ours).fingerprint != vocabulary(swapped).fingerprint
    assert vocabulary(ours).size == len(ours)


def test_the_first_differing_id_is_named() -> None:
    assert first_difference({"a": 0, "b": 1, "c": 2}, {"a": 0, "b": 1, "c": 2}) is None
    assert first_difference({"a": 0, "b": 1, "c": 2}, {"a": 0, "b": 2, "c": 1}) == (1, "b", "c")
    assert first_difference({"a": 0, "b": 1}, {"a": 0}) == (1, "b", None)


@pytest.mark.real_model
def test_the_packaged_model_speaks_its_chat_format_and_ends(opened: OpenedModel) -> None:
    assert opened.end_token_ids == (2,)
    assert opened.vocabulary.size == opened.runner.info.vocab_size == 49152
    assert opened.runner.info.exactness == "bitwise"
    ids, text = _answer(opened, "What is the capital of France? Answer in one word.", 24)
    assert "Paris" in text
    assert ids[-1] == 2


@pytest.mark.real_model
def test_rows_of_the_packaged_model_do_not_depend_on_grouping(opened: OpenedModel) -> None:
    runner = opened.runner
    ids = opened.tokenizer.encode("One two three four five six seven eight nine ten. " * 9)[:90]
    results = []
    for run in (1, 7, 32):
        slot, other = _prefilled(opened, ids[:50]), _prefilled(opened, ids[:5])
        rows = []
        for start in range(50, 90, run):
            part = tuple(ids[start : min(start + run, 90)])
            feeds = [Feed(other, (ids[0],), DECODE, 1), Feed(slot, part, DECODE, len(part))]
            rows.append(runner.forward(feeds[run % 2 :])[-1].logits)
        results.append(torch.cat(rows))
        runner.free_slot(slot)
        runner.free_slot(other)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert runner.free_blocks == 24


def _prefilled(opened: OpenedModel, ids: Sequence[int]) -> KvSlot:
    slot = opened.runner.new_slot()
    for start, end in prefill_plan(0, len(ids)):
        opened.runner.forward([Feed(slot, tuple(ids[start:end]), PROMPT, 0)])
    return slot


def _answer(opened: OpenedModel, question: str, max_tokens: int) -> tuple[list[int], str]:
    """Return a greedy answer."""
    tokenizer = opened.tokenizer
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = tokenizer.encode(str(prompt))
    slot = _prefilled(opened, ids[:-1])
    last = int(ids[-1])
    answer: list[int] = []
    while len(answer) < max_tokens and last not in opened.end_token_ids:
        rows = opened.runner.forward([Feed(slot, (last,), DECODE, 1)])[0]
        last = int(rows.logits[0].argmax())
        answer.append(last)
    opened.runner.free_slot(slot)
    return answer, str(tokenizer.decode(answer))
