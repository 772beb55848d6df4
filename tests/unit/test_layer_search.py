"""The search for layers to keep: what it measures is what a draft of those layers would say."""

import pytest
import torch

from outrider.errors import FailedPrecondition
from outrider.model.layer_search import LayerAgreement, Sample, Subset, search
from outrider.model.loader import keep_layers
from outrider.model.tiny import random_model

torch.set_num_threads(1)

NUM_LAYERS = 5
SAMPLES = [Sample(tuple((7 * i * i + 3 * i) % 512 for i in range(40)), 10), Sample(tuple(range(5, 30)), 4)]


def agreement(idle: tuple[int, ...] = (), samples: list[Sample] = SAMPLES) -> LayerAgreement:
    """Return a tiny model, some of whose layers add nothing."""
    model = random_model(num_hidden_layers=NUM_LAYERS)
    for index in idle:
        layer = model.model.layers[index]
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return LayerAgreement(model, samples)


def said(layers: tuple[int, ...], sample: Sample) -> torch.Tensor:
    """Return what a model with these layers only says behind the prompt, loaded as a draft worker would."""
    model = random_model(num_hidden_layers=NUM_LAYERS)
    keep_layers(model, layers)
    with torch.no_grad():
        logits = model(torch.tensor([sample.token_ids]), use_cache=False).logits[0]
    guesses: torch.Tensor = logits[sample.prompt_len - 1 : -1].argmax(-1)
    return guesses


@pytest.mark.parametrize("layers", [(0, 1, 2, 3), (0, 2, 4), (1,)], ids=str)
def test_the_share_is_that_of_a_draft_with_these_layers(layers: tuple[int, ...]) -> None:
    whole = tuple(range(NUM_LAYERS))
    equal = torch.cat([said(layers, sample) == said(whole, sample) for sample in SAMPLES])
    assert agreement().alpha(layers) == pytest.approx(float(equal.double().mean()))
    assert agreement().num_positions == len(equal) == 30 + 21


def test_leaving_out_each_layer_gives_the_same_as_measuring_each_subset_alone() -> None:
    measured = agreement()
    assert measured._shares, "candidates share what is computed before the layer they leave out"
    for subset in measured.without_each((0, 1, 3, 4)):
        assert subset.alpha == measured.alpha(subset.layers)
    measured._shares = False
    assert list(measured.without_each((0, 1, 3))) == list(agreement().without_each((0, 1, 3)))


def test_layers_that_add_nothing_are_left_out_first() -> None:
    found = search(agreement(idle=(1, 3)), keep=2, beam=1)
    assert [len(subset.layers) for subset in found] == [4, 3, 2]
    assert found[1] == Subset((0, 2, 4), 1.0)
    assert found[2].alpha < 1.0


def test_a_wider_beam_finds_nothing_worse_and_the_model_is_whole_afterwards() -> None:
    measured = agreement()
    narrow, wide = search(measured, keep=1, beam=1), search(measured, keep=1, beam=100)
    assert all(w.alpha >= n.alpha for n, w in zip(narrow, wide, strict=True))
    assert measured.alpha(measured.all_layers) == 1.0


def test_a_search_that_is_called_off_returns_the_sizes_it_has_finished() -> None:
    tried: list[Subset] = []

    def until_seven(subset: Subset) -> bool:
        tried.append(subset)
        return len(tried) < 7

    found = search(agreement(), keep=1, beam=1, on_step=until_seven)
    assert [len(subset.layers) for subset in found] == [4]
    assert found[0].alpha == max(subset.alpha for subset in tried[:5])


@pytest.mark.parametrize(("keep", "beam"), [(0, 1), (NUM_LAYERS, 1), (2, 0)], ids=["none", "all", "no beam"])
def test_a_size_that_no_subset_has_is_refused(keep: int, beam: int) -> None:
    with pytest.raises(FailedPrecondition, match=r"1 \.\. 4 of the 5 layers"):
        search(agreement(), keep, beam)


def test_texts_without_anything_to_guess_are_refused() -> None:
    with pytest.raises(FailedPrecondition, match="nothing to guess"):
        agreement(samples=[Sample((1, 2, 3), 3)])
