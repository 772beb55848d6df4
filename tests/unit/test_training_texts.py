"""Texts that drafts are trained on, what the target makes of them, and whole trainings in a folder."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outrider.cli.drafters.train import Course, Job, Network, Source, _plan, _schedule
from outrider.drafting import checkpoint
from outrider.errors import FailedPrecondition, InvalidRequest
from outrider.model.loader import load
from outrider.model.names import ModelSpec
from outrider.model.tiny import random_model
from outrider.model.vocabulary import vocabulary
from outrider.prompts import Prompt
from outrider.training.cache import TOP, Cache, fill
from outrider.training.job import Plan, Watch, check_memory, train
from outrider.training.kinds.protocol import Target
from outrider.training.state import Schedule, State
from outrider.training.texts import read_texts, split, write_texts
from outrider.training.writing import Nucleus, Wish, written
from tests.unit.training_bench import VOCAB, Setting, key_of, make_setting, quick, some_texts, tiny_target

CHAT = (
    "{% for m in messages %}[ {{ m['role'] }} ] {{ m['content'] }} [end] {% endfor %}"
    "{% if add_generation_prompt %}[ assistant ] {% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny target that has a tokenizer with a chat template."""
    path = tmp_path_factory.mktemp("target")
    random_model(vocab_size=VOCAB, hidden_size=32, intermediate_size=48).save_pretrained(path)
    words = ["[end]", "[", "]", "user", "assistant", *(f"w{number}" for number in range(VOCAB - 5))]
    model = models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="w0")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    make: Any = PreTrainedTokenizerFast
    make(tokenizer_object=tokenizer, eos_token="[end]", chat_template=CHAT).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    model, tokenizer = load(ModelSpec(str(folder), "float32"))
    return Target("tiny", model, tokenizer, vocabulary(tokenizer))


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return make_setting(tmp_path_factory.mktemp("cache"))


def test_texts_are_read_as_they_were_written(tmp_path: Path) -> None:
    texts = some_texts()
    write_texts(tmp_path / "texts.npz", texts)
    assert read_texts(tmp_path / "texts.npz", VOCAB, 512).digest() == texts.digest()


def test_long_texts_are_cut_and_those_without_an_answer_then_are_left_out(tmp_path: Path) -> None:
    texts = some_texts()
    texts.prompt_lengths[0] = 9
    write_texts(tmp_path / "texts.npz", texts)
    read = read_texts(tmp_path / "texts.npz", VOCAB, 11)
    assert len(read) == len(texts) - 1
    assert set(read.lengths) == {11}
    assert read.text(0).tolist() == texts.text(1)[:11].tolist()


@pytest.mark.parametrize(
    ("array", "change", "said"),
    [
        ("tokens", lambda a: a + VOCAB, rf"data.tokens: \d+ is not allowed; expected ids in \[0, {VOCAB}\)"),
        ("offsets", lambda a: a[:-1], "data.offsets: .* one more than prompt_lengths"),
        ("offsets", lambda a: a[::-1], r"data.offsets: \d+ is not allowed; expected rising from 0"),
        ("prompt_lengths", lambda a: a * 0, "data.prompt_lengths: 0 is not allowed; expected at least 1"),
        ("prompt_lengths", lambda a: a * 0.5, "data.prompt_lengths: .*float"),
        ("temperature", lambda a: a[1:], "data.temperature"),
        ("temperature", lambda a: None, "temperature: 'missing'"),
    ],
    ids=["ids too high", "offsets too few", "offsets falling", "no prompt", "lengths of another type", "few", "none"],
)
def test_an_array_that_is_not_right_is_named(array: str, change: Any, said: str, tmp_path: Path) -> None:
    texts = some_texts()
    arrays: dict[str, Any] = {
        "tokens": texts.tokens, "offsets": texts.offsets, "prompt_lengths": texts.prompt_lengths,
        "temperature": texts.temperature,
    }  # fmt: skip
    arrays[array] = change(arrays[array])
    np.savez(tmp_path / "texts.npz", **{name: value for name, value in arrays.items() if value is not None})
    with pytest.raises(InvalidRequest, match=said):
        read_texts(tmp_path / "texts.npz", VOCAB, 512)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "texts.npz").write_bytes(b"nothing of the kind")
    with pytest.raises(InvalidRequest, match=r"an \.npz file that can be read"):
        read_texts(tmp_path / "texts.npz", VOCAB, 512)


def test_texts_set_aside_are_the_same_for_the_same_seed_and_never_trained_on() -> None:
    texts = some_texts(40)
    parts, again, other = split(texts, 1), split(texts, 1), split(texts, 2)
    assert parts.held_out.tolist() == again.held_out.tolist() != other.held_out.tolist()
    assert sorted([*parts.held_out, *parts.training]) == list(range(40))
    assert len(parts.held_out) == 2


def test_the_cache_holds_the_targets_hidden_states_and_laws(setting: Setting) -> None:
    number = 5
    ids = torch.from_numpy(setting.texts.text(number))[None]
    out = setting.target.model(ids, output_hidden_states=True)
    start, end = (int(setting.texts.offsets[number + each]) for each in (0, 1))
    kept = setting.cache.features(start, end).float()
    torch.testing.assert_close(kept, out.hidden_states[-1][0], rtol=1e-2, atol=1e-2)
    probs, best = out.logits[0].softmax(-1).topk(TOP)
    rows = slice(int(setting.texts.prompt_lengths[number]) - 1, end - start - 1)
    assert (setting.cache.law_ids[start:end][rows] == best[rows].numpy()).all()
    np.testing.assert_allclose(setting.cache.law_probs[start:end][rows], probs[rows].numpy(), atol=1e-3)


def test_a_cache_that_was_interrupted_is_completed_and_not_made_anew(tmp_path: Path) -> None:
    target, texts = tiny_target(), some_texts()
    key, seen = key_of(target, texts), []

    def stop(amount: int) -> None:
        seen.append(amount)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fill(Cache(tmp_path, key, 1 << 30), target.model, texts, 128, stop)
    assert 0 < seen[-1] < len(texts.tokens)
    again: list[int] = []
    cache = Cache(tmp_path, key, 1 << 30)
    fill(cache, target.model, texts, 128, again.append)
    assert (again[0], again[-1]) == (seen[-1], len(texts.tokens))
    assert cache.done.all()


def test_a_cache_above_its_limit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    key = key_of(tiny_target(), some_texts())
    with pytest.raises(FailedPrecondition, match=r"need 0\.00 GiB of disk, the limit \(--disk\) is 0\.00 GiB"):
        Cache(tmp_path / "cache", key, key.num_bytes - 1)
    assert not list((tmp_path / "cache").iterdir())
    Cache(tmp_path / "cache", key, key.num_bytes)
    assert sum(path.stat().st_size for path in (tmp_path / "cache").glob("*.bin")) == key.num_bytes


def test_a_cache_of_other_texts_is_refused(setting: Setting, tmp_path: Path) -> None:
    Cache(tmp_path, setting.cache.key, 1 << 30)
    with pytest.raises(FailedPrecondition, match=r"another training \(texts, num_tokens, num_texts differ\)"):
        Cache(tmp_path, key_of(setting.target, some_texts(9)), 1 << 30)


def test_the_target_asks_itself_inside_its_chat_template(target: Target, tmp_path: Path) -> None:
    texts = written(target, Wish(tokens=200, answer_len=12, batch=6), [], tmp_path, lambda _: None)
    assert len(texts.tokens) >= 200
    for number in range(len(texts)):
        prompt = target.tokenizer.decode(texts.text(number)[: texts.prompt_lengths[number]])
        assert prompt.startswith("[ user ] ")
        assert prompt.endswith("[end] [ assistant ]")
        assert 3 <= texts.lengths[number] - texts.prompt_lengths[number] <= 12


def test_given_prompts_are_answered_greedily_by_the_first_batch(target: Target, tmp_path: Path) -> None:
    texts = written(
        target, Wish(tokens=10, answer_len=8, batch=2), [Prompt("a", "w7"), Prompt("b", "w8 w9", True)], tmp_path, print
    )
    prompts = [target.tokenizer.decode(texts.text(i)[: texts.prompt_lengths[i]]) for i in range(len(texts))]
    assert set(prompts) <= {"[ user ] w7 [end] [ assistant ]", "w8 w9"}
    first = texts.text(0)
    assert texts.temperature[0] == 0.0
    for place in range(int(texts.prompt_lengths[0]), len(first)):
        assert target.model(torch.from_numpy(first[:place])[None]).logits[0, -1].argmax() == first[place]


def test_writing_goes_on_where_it_was_interrupted_with_the_same_texts(target: Target, tmp_path: Path) -> None:
    wish, halved = Wish(tokens=250, answer_len=10, batch=4), tmp_path / "halved"
    whole = written(target, wish, [], tmp_path / "whole", lambda _: None)

    def stop(amount: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        written(target, wish, [], halved, stop)
    kept = {path.name: path.stat().st_mtime_ns for path in halved.glob("*.npz")}
    assert len(kept) == 1
    assert written(target, wish, [], halved, lambda _: None).digest() == whole.digest()
    assert {name: (halved / name).stat().st_mtime_ns for name in kept} == kept, "nothing is written twice"
    assert len(list(halved.glob("*.npz"))) > 1


def test_texts_of_other_prompts_are_not_taken_for_those_of_these(target: Target, tmp_path: Path) -> None:
    wish = Wish(tokens=10, answer_len=8, batch=2)
    written(target, wish, [Prompt("a", "w7")], tmp_path, lambda _: None)
    written(target, replace(wish, tokens=60, seed=2), [Prompt("b", "w7")], tmp_path, lambda _: None)
    with pytest.raises(FailedPrecondition, match=r"texts of another training \(prompts differ\)"):
        written(target, wish, [Prompt("a", "w8")], tmp_path, lambda _: None)
    with pytest.raises(FailedPrecondition, match=r"texts of another training \(answer_len differ\)"):
        written(target, replace(wish, answer_len=9), [Prompt("a", "w7")], tmp_path, lambda _: None)


@pytest.mark.parametrize("spread", [0.1, 2.0, 5.0])
def test_what_is_drawn_from_is_the_smallest_set_of_that_mass_at_the_temperature(spread: float) -> None:
    logits = spread * torch.randn(4, 6000, generator=torch.Generator().manual_seed(1))
    drawn_from = Nucleus(0.7, 0.95)(torch.zeros(4, 1), logits)
    for row, kept in zip((logits / 0.7).softmax(-1), drawn_from.isfinite(), strict=True):
        likeliest, ids = row.sort(descending=True)
        assert set(ids[: int(kept.sum())].tolist()) == set(kept.nonzero().flatten().tolist())
        assert likeliest[: int(kept.sum())].sum() > 0.95 - 1e-5
        assert likeliest[: int(kept.sum()) - 1].sum() < 0.95 + 1e-5
    assert torch.equal(drawn_from[drawn_from.isfinite()], (logits / 0.7)[drawn_from.isfinite()])


def test_a_target_that_says_next_to_nothing_is_not_asked_for_ever(target: Target, tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match="no answer of at least 3 tokens"):
        written(target, Wish(tokens=10, answer_len=2, batch=2), [Prompt("a", "w7")], tmp_path, lambda _: None)


class Stopping(Watch):
    """Ends a training after some steps."""

    def __init__(self, after: int) -> None:
        self.after = after

    def step(self, state: State) -> bool:
        return state.step == self.after


def plan_of(kind: Any, target: Path, out: Path, resume: bool = False) -> Plan:
    spec = ModelSpec(str(target), "float32")
    wish = Wish(tokens=1500, answer_len=16, batch=24)
    return Plan(spec, kind, out, wish=wish, draft_vocab=48, hidden=64, layers=1, resume=resume)


@pytest.mark.parametrize("kind", ["feature", "medusa"])
def test_a_training_leaves_a_draft_of_its_target_and_a_report(kind: str, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    state, finished = train(plan_of(kind, folder, out), quick(), Stopping(4))
    assert (state.step, finished) == (4, False)
    with pytest.raises(FailedPrecondition, match="go on with --resume"):
        train(plan_of(kind, folder, out), quick(), Watch())
    state, finished = train(plan_of(kind, folder, out, resume=True), quick(), Watch())
    assert (state.step, finished) == (12, True)
    read = checkpoint.load(out / "draft")
    model, tokenizer = load(ModelSpec(str(folder), "float32"))
    read.check_target(vocabulary(tokenizer), cast(Any, model.get_input_embeddings()).weight)
    assert read.kind == kind
    assert read.origin.recipe["steps"] == 12
    html = (out / "report.html").read_text()
    assert html.count("data:image/svg+xml") == 3
    assert "http://" not in html.replace("http://www.w3.org", "")


@pytest.mark.parametrize("kind", ["feature", "medusa"])
def test_a_training_goes_on_from_a_draft_with_its_weights_sizes_and_ids(
    kind: Any, folder: Path, tmp_path: Path
) -> None:
    train(plan_of(kind, folder, tmp_path / "first"), quick(3), Watch())
    first = checkpoint.load(tmp_path / "first" / "draft").draft
    plan = plan_of(kind, folder, tmp_path / "second")
    plan = replace(plan, start=tmp_path / "first" / "draft", draft_vocab=20, intermediate=16)
    train(plan, replace(quick(1), learning_rate=1e-12), Watch())
    second = checkpoint.load(tmp_path / "second" / "draft").draft
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name
    other: Any = "medusa" if kind == "feature" else "feature"
    with pytest.raises(InvalidRequest, match=f"a draft of kind {other}; it is of kind {kind}"):
        train(replace(plan, kind=other, folder=tmp_path / "third"), quick(1), Watch())


def test_a_small_model_is_left_as_a_folder_that_loads_as_any_other(folder: Path, tmp_path: Path) -> None:
    train(plan_of("small-lm", folder, tmp_path / "out"), quick(4), Watch())
    assert not (tmp_path / "out" / "cache" / "features.bin").exists()
    model, tokenizer = load(ModelSpec(str(tmp_path / "out" / "draft"), "float32"))
    assert model.config.num_hidden_layers == 1
    assert vocabulary(tokenizer) == vocabulary(load(ModelSpec(str(folder), "float32"))[1])


def test_nothing_is_resumed_where_there_is_nothing(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match="holds no training that could be resumed"):
        train(plan_of("feature", folder, tmp_path, resume=True), quick(), Watch())


def test_steps_that_do_not_fit_into_memory_are_refused(setting: Setting) -> None:
    feature, small = setting.trainee("feature"), setting.trainee("small-lm")
    assert 0 < check_memory(feature, quick()) < 1 << 30
    # A chain of 3 over 48 ids of width 32, and single steps over all 96 ids of width 64.
    for trainee, row_bytes in ((feature, 3 * (48 * 12 + 32 * 64)), (small, 96 * 12 + 64 * 64)):
        more = [check_memory(trainee, Schedule(batch_tokens=tokens)) for tokens in (1, 101)]
        assert more[1] - more[0] == 100 * row_bytes
    with pytest.raises(FailedPrecondition, match=r"lower --batch-tokens, --depth or --draft-vocab"):
        check_memory(feature, Schedule(batch_tokens=1 << 30))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"source": Source(tokens=10)}, "tokens: 10 is not allowed; expected 1000 to"),
        ({"source": Source(disk="much")}, "disk: 'much' is not allowed; expected a size such as"),
        ({"source": Source(disk="40%")}, "disk: '40%'"),
        ({"source": Source(prompts=Path("a"), data=Path("b"))}, "data: 'b' is not allowed; expected not there beside"),
        ({"network": Network(depth=0)}, "depth: 0 is not allowed; expected 1 to 16"),
        ({"network": Network(hidden=32)}, "hidden: 32 is not allowed; expected 64 to"),
    ],
    ids=["tokens", "disk", "share of disk", "two sources", "depth", "hidden"],
)
def test_an_option_out_of_its_range_is_named(options: dict[str, Any], said: str) -> None:
    chosen: dict[str, Any] = {"source": Source(), "network": Network()} | options
    with pytest.raises(InvalidRequest, match=said):
        _plan(ModelSpec("tiny"), Job("feature"), chosen["source"], chosen["network"], 1)


@pytest.mark.parametrize(
    ("course", "said"),
    [
        (Course(minutes=0), "minutes: 0 is not allowed"),
        (Course(learning_rate=2.0), "learning_rate: 2.0 is not allowed; expected 1e-07 to 1.0"),
        (Course(batch_tokens=1), "batch_tokens: 1 is not allowed; expected 16 to"),
    ],
    ids=["minutes", "learning rate", "batch"],
)
def test_a_course_out_of_its_range_is_named(course: Course, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        _schedule(course)
