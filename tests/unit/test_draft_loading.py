"""What a draft worker is told to load is what it describes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoTokenizer

from draft_service.config import DraftSettings
from draft_service.loading import load_drafter
from outrider.drafting.checkpoint import Origin, embedding_mean, save
from outrider.drafting.shipped import FEATURE
from outrider.errors import FailedPrecondition, NotFound
from outrider.messages import Vocabulary
from outrider.model import embedding
from outrider.model.names import DEFAULT_MODEL, ModelSpec
from outrider.model.toy import ToyTokenizer
from outrider.model.vocabulary import vocabulary
from tests.unit.feature_bench import HIDDEN, random_draft, target

SIZE = len(ToyTokenizer())


@pytest.mark.real_model
def test_the_pool_of_a_language_model_drafter_is_there_to_be_described() -> None:
    """Its description and its gauges are those of this runner."""
    loaded = load_drafter(DraftSettings(layers=(0,), num_blocks=8, context_len=256), lambda *_: None)
    assert loaded.runner is not None
    assert (loaded.runner.info.num_blocks, loaded.runner.kv_usage.used) == (8, 0)


@pytest.mark.real_model
def test_a_drafter_that_looks_up_has_no_model_and_no_pool() -> None:
    loaded = load_drafter(DraftSettings(drafter="prompt_lookup"), lambda *_: None)
    assert loaded.runner is None
    assert loaded.vocabulary.size > 0


# --- several ----------------------------------------------------------------------------------------------------------


def toy_settings(drafter: str) -> DraftSettings:
    return DraftSettings(drafter=drafter, model="toy")


def test_several_drafters_are_loaded_in_their_order_with_one_vocabulary() -> None:
    loaded = load_drafter(toy_settings("prediction, prompt_lookup,toy"), lambda *_: None)
    assert loaded.drafter.info.drafters == ("prediction", "prompt_lookup", "toy")
    assert loaded.runner is not None
    assert loaded.vocabulary == vocabulary(ToyTokenizer())
    copying = load_drafter(toy_settings("prediction,prompt_lookup"), lambda *_: None)
    assert (copying.drafter.info.kind, copying.runner) == ("prediction,prompt_lookup", None)
    assert load_drafter(toy_settings("prediction"), lambda *_: None).drafter.info.drafters == ()


@pytest.mark.parametrize(
    ("drafter", "why"),
    [
        ("", "'' is not one of causal_lm, feature"),
        ("prompt_lookup,nonsense", "'nonsense' is not one of"),
        ("auto,toy", "'auto' is not one of .* or auto alone"),
        ("prompt_lookup,prompt_lookup", "each kind at most once"),
        ("causal_lm,feature", "one at most of causal_lm, feature"),
    ],
    ids=["empty", "unknown", "not alone", "twice", "two models"],
)
def test_drafters_that_do_not_exist_or_do_not_go_together_are_named(drafter: str, why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        DraftSettings(drafter=drafter)


@pytest.mark.parametrize(
    ("known", "kinds"),
    [
        ({}, ("prompt_lookup", "feature")),
        ({"model": "other"}, ("prompt_lookup",)),
        ({"model": "other", "checkpoint": "/d"}, ("prompt_lookup", "feature")),
        ({"dtype": "float16"}, ("prompt_lookup",)),
        ({"device": "cuda:1"}, ("prompt_lookup",)),
    ],
    ids=["ships", "ships not", "named", "float16", "cuda"],
)
def test_the_best_without_another_model_is_lookup_and_a_trained_draft_where_one_runs(
    known: dict[str, Any], kinds: tuple[str, ...]
) -> None:
    assert DraftSettings(drafter="auto", **known).kinds == kinds


def test_layers_that_are_no_numbers_are_refused_by_what_is_allowed() -> None:
    with pytest.raises(ValueError, match="numbers with commas between"):
        DraftSettings.model_validate({"layers": "0,last"})


# --- trained drafts ---------------------------------------------------------------------------------------------------


def stored(folder: Path, kind: str = "feature", shift: float = 0.0, fingerprint: str = "") -> Path:
    """Write a random draft for the tiny target that `tiny_target` stores."""
    rows = target(SIZE).get_input_embeddings().weight + shift
    own = vocabulary(ToyTokenizer())
    origin = Origin("tiny", Vocabulary(fingerprint or own.fingerprint, own.size), embedding_mean(rows))
    save(folder, random_draft(kind, vocab_size=SIZE), origin)
    return folder


@pytest.fixture
def tiny_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the folder of a tiny target; its tokenizer is the toy's, which has no files."""
    folder = tmp_path / "target"
    target(SIZE).save_pretrained(folder)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda _: ToyTokenizer())
    return str(folder)


def settings_for(model: str, checkpoint: Path | str, drafter: str = "feature", **more: Any) -> DraftSettings:
    known = {"dtype": "float32", "num_blocks": 8, **more}
    return DraftSettings(drafter=drafter, model=model, checkpoint=str(checkpoint), **known)


@pytest.mark.parametrize("kind", ["feature", "medusa"])
def test_a_trained_draft_asks_for_the_last_layer_and_names_its_target(
    kind: str, tiny_target: str, tmp_path: Path
) -> None:
    loaded = load_drafter(settings_for(tiny_target, stored(tmp_path / "draft", kind), kind), lambda *_: None)
    info = loaded.drafter.info
    assert (info.kind, info.model, info.feature_layers, info.feature_size) == (kind, tiny_target, (-1,), HIDDEN)
    assert (info.vocab_len, info.context_len) == (SIZE, 1024)
    assert loaded.vocabulary == vocabulary(ToyTokenizer())
    shorter = settings_for(tiny_target, tmp_path / "draft", kind, context_len=100)
    assert load_drafter(shorter, lambda *_: None).drafter.info.context_len == 100


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"fingerprint": "other"}, "vocabulary other of tiny"),
        ({"shift": 1.0}, "embedding differs"),
        ({"kind": "medusa"}, "kind 'medusa', OUTRIDER_DRAFT_DRAFTER is 'feature'"),
    ],
)
def test_a_draft_of_another_target_or_kind_is_refused(
    changes: dict[str, Any], why: str, tiny_target: str, tmp_path: Path
) -> None:
    with pytest.raises(FailedPrecondition, match=why):
        load_drafter(settings_for(tiny_target, stored(tmp_path / "draft", **changes)), lambda *_: None)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"checkpoint": "nowhere", "device": "cuda"}, "not on 'cuda' in float32"),
        ({"checkpoint": "nowhere", "dtype": "float16"}, "not on 'cpu' in float16"),
    ],
)
def test_what_a_trained_draft_cannot_do_is_said_before_anything_is_loaded(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(FailedPrecondition, match=why):
        load_drafter(settings_for("nowhere", **settings), lambda *_: None)


def test_a_folder_without_a_checkpoint_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"no config\.json"):
        load_drafter(settings_for("nowhere", tmp_path), lambda *_: None)
    with pytest.raises(NotFound, match="OUTRIDER_DRAFT_CHECKPOINT has to name"):
        load_drafter(settings_for("nowhere", ""), lambda *_: None)


@pytest.mark.real_model
@pytest.mark.parametrize("named", ["", FEATURE])
def test_the_draft_that_ships_for_a_target_is_found_by_itself(named: str) -> None:
    loaded = load_drafter(settings_for(DEFAULT_MODEL, named, dtype="bfloat16"), lambda *_: None)
    assert (loaded.drafter.info.kind, loaded.drafter.info.model) == ("feature", DEFAULT_MODEL)


def test_the_embedding_is_read_without_the_layers(tiny_target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding, "load", None)
    found = embedding.outline(ModelSpec(tiny_target, "float32"))
    assert torch.equal(found.embedding, target(SIZE).get_input_embeddings().weight)
