"""Networks of trained drafts, and the folders they are kept in."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.drafting import checkpoint
from outrider.drafting.blending import blend
from outrider.drafting.checkpoint import CONFIG, WEIGHTS, Origin
from outrider.drafting.feature import FeatureDraft, FeatureShape
from outrider.drafting.medusa import MedusaHeads, MedusaShape
from outrider.drafting.shipped import FEATURE, shipped
from outrider.errors import FailedPrecondition, NotFound, VocabularyMismatch
from outrider.messages import Vocabulary

VOCABULARY = Vocabulary("ab" * 32, 300)
EMBEDDING = torch.randn(300, 32, generator=torch.Generator().manual_seed(1))


def net() -> FeatureDraft:
    torch.manual_seed(2)
    made = FeatureDraft(FeatureShape(32, 4, 2, 8, 48, 50, rope_theta=1e4, embedding_scale=3.0))
    made.draft_ids.copy_(torch.arange(50) * 3)
    return made.requires_grad_(False)


def heads() -> MedusaHeads:
    torch.manual_seed(2)
    return MedusaHeads(MedusaShape(32, 3, 50)).requires_grad_(False)


def origin() -> Origin:
    return Origin("a target", VOCABULARY, checkpoint.embedding_mean(EMBEDDING), {"steps": 7})


def saved(folder: Path) -> Path:
    checkpoint.save(folder, net(), origin(), torch.float32)
    return folder


@pytest.mark.parametrize("kind", ["feature", "medusa"])
def test_a_saved_draft_is_read_back_as_it_was(kind: str, tmp_path: Path) -> None:
    made = net() if kind == "feature" else heads()
    checkpoint.save(tmp_path, made, origin(), torch.float32)
    read = checkpoint.load(tmp_path, torch.float32)
    assert (read.kind, read.draft.shape) == (kind, made.shape)
    assert read.origin.recipe == {"steps": 7}
    assert (tmp_path / WEIGHTS).stat().st_mode == (tmp_path / CONFIG).stat().st_mode
    for name, tensor in made.state_dict().items():
        assert torch.equal(tensor, read.draft.state_dict()[name]), name


def test_a_draft_takes_its_own_target_in_whichever_dtype(tmp_path: Path) -> None:
    read = checkpoint.load(saved(tmp_path))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        read.check_target(VOCABULARY, EMBEDDING.to(dtype))


def test_a_draft_refuses_a_target_with_another_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(VocabularyMismatch, match="trained for the vocabulary abababababab of a target"):
        checkpoint.load(saved(tmp_path)).check_target(Vocabulary("cd" * 32, 300), EMBEDDING)


def test_a_draft_refuses_a_target_of_another_width(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match=r"features of 32 values .*, the target has 64"):
        checkpoint.load(saved(tmp_path)).check_target(VOCABULARY, torch.zeros(300, 64))


def test_a_draft_refuses_a_target_with_other_weights(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match="the target's embedding differs from that model's"):
        checkpoint.load(saved(tmp_path)).check_target(VOCABULARY, EMBEDDING.flip(1))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("kind", "eagle", "kind 'eagle' is not feature or medusa"),
        ("version", 2, "version 2 is not 1"),
        ("feature_layer", -2, "feature_layer -2 is not -1"),
        ("kind", ["feature"], r"kind \['feature'\] is not feature or medusa"),
        ("hidden_size", 64, "does not fit its config.json"),
        ("hidden_size", "32", "sizes of no network"),
        ("num_heads", -3, "sizes of no network"),
        ("target_vocabulary", {"size": 300}, "target_vocabulary is none: .*fingerprint"),
        ("target_vocabulary", None, "target_vocabulary is none"),
    ],
)
def test_a_configuration_that_is_not_right_is_named(field: str, value: object, said: str, tmp_path: Path) -> None:
    path = saved(tmp_path) / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(FailedPrecondition, match=said):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize("field", ["recipe", "num_heads"])
def test_a_configuration_without_a_field_is_refused(field: str, tmp_path: Path) -> None:
    path = saved(tmp_path) / CONFIG
    fields = json.loads(path.read_text())
    del fields[field]
    path.write_text(json.dumps(fields))
    with pytest.raises(FailedPrecondition, match=f"lacks {field}"):
        checkpoint.load(tmp_path)


def test_a_folder_without_a_draft_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=CONFIG):
        checkpoint.load(tmp_path)
    (saved(tmp_path) / WEIGHTS).unlink()
    with pytest.raises(NotFound, match=WEIGHTS):
        checkpoint.load(tmp_path)


def test_a_mean_of_another_width_is_refused(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, net(), replace(origin(), embedding_mean=torch.zeros(31)))
    with pytest.raises(FailedPrecondition, match="no target_embedding_mean of 32 values"):
        checkpoint.load(tmp_path)


def test_cut_off_weights_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path) / WEIGHTS
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(FailedPrecondition, match="cannot be read"):
        checkpoint.load(tmp_path)


def test_a_blend_is_the_mean_of_all_weights_and_says_what_it_is_made_of(tmp_path: Path) -> None:
    first, second = tmp_path / "first", saved(tmp_path / "second")
    other = net()
    for parameter in other.parameters():
        parameter.mul_(3.0)
    checkpoint.save(first, other, replace(origin(), recipe={"steps": 5}), torch.float32)
    blend(first, second, 0.75, tmp_path / "mean")
    read = checkpoint.load(tmp_path / "mean", torch.float32)
    for name, tensor in net().state_dict().items():
        expected = tensor * (1.5 if name in dict(net().named_parameters()) else 1.0)
        assert torch.allclose(read.draft.state_dict()[name].float(), expected.float(), rtol=0.01), name
    assert read.origin.recipe == {
        "blend": {"first": 0.25, "second": 0.75}, "first": {"steps": 5}, "second": {"steps": 7},
    }  # fmt: skip
    read.check_target(VOCABULARY, EMBEDDING)


@pytest.mark.parametrize("what", ["kind", "shape", "vocabulary", "ids"])
def test_drafts_that_do_not_fit_each_other_are_not_blended(what: str, tmp_path: Path) -> None:
    made, made_for = net(), origin()
    if what == "kind":
        checkpoint.save(tmp_path / "other", heads(), origin())
    elif what == "shape":
        shape = replace(made.shape, intermediate_size=64)
        checkpoint.save(tmp_path / "other", FeatureDraft(shape).requires_grad_(False), origin())
    elif what == "vocabulary":
        checkpoint.save(tmp_path / "other", made, replace(made_for, vocabulary=Vocabulary("cd" * 32, 300)))
    else:
        made.draft_ids.add_(1)
        checkpoint.save(tmp_path / "other", made, made_for)
    with pytest.raises(FailedPrecondition, match=what):
        blend(saved(tmp_path / "one"), tmp_path / "other", 0.5, tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


def test_the_draft_that_ships_is_small_and_is_the_default_targets() -> None:
    folder = shipped(FEATURE)
    assert folder is not None
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 20_000_000
    read = checkpoint.load(folder)
    assert read.origin.target == "smollm2-135m-instruct"
    ids = read.draft.draft_ids
    assert torch.equal(ids, torch.unique(ids))
    assert shipped("../drafting") is None
    assert shipped("") is None
