"""`outrider drafters search-layers` on a tiny target: texts, times, and what is said of them."""

from pathlib import Path

import pytest
import torch

from outrider.cli.drafters import layer_costs, search_layers
from outrider.cli.drafters.layer_costs import best_speed, pass_times, write_samples
from outrider.cli.drafters.search_layers import How, Searched
from outrider.errors import InvalidRequest
from outrider.gamma import Costs
from outrider.model.loader import end_token_ids
from outrider.model.opening import OpenedModel
from outrider.model.tiny import random_model
from outrider.model.toy import ToyTokenizer
from outrider.model.transformers_runner import TransformersRunner
from outrider.model.vocabulary import vocabulary
from outrider.prompts import Prompt

torch.set_num_threads(1)

NUM_LAYERS = 3
PROMPTS = [Prompt("p-1", "the cat sat", raw=True), Prompt("p-2", "on the mat", raw=True)]


def opened() -> OpenedModel:
    toy = ToyTokenizer()
    model = random_model(num_hidden_layers=NUM_LAYERS, vocab_size=len(toy))
    runner = TransformersRunner(model, name="tiny", num_blocks=64)
    return OpenedModel(runner, toy, vocabulary(toy), end_token_ids(model, toy))  # type: ignore[arg-type]


def test_texts_are_greedy_answers_until_enough_is_written() -> None:
    target = opened()
    samples = write_samples(target, PROMPTS, tokens=12)
    assert [sample.token_ids[: sample.prompt_len] for sample in samples] == [
        tuple(ToyTokenizer().encode(prompt.text)) for prompt in PROMPTS
    ]
    written = sum(len(sample.token_ids) - sample.prompt_len for sample in samples)
    assert 2 <= written <= 12
    alone = write_samples(target, PROMPTS[:1], tokens=6)[0]
    assert alone.token_ids == samples[0].token_ids[: len(alone.token_ids)], "the same text beside another one"
    assert target.runner.kv_usage.used == 0


def test_a_pass_is_timed_for_every_number_of_rows() -> None:
    times_s = pass_times(opened(), 5)
    assert len(times_s) == 5
    assert all(seconds > 0 for seconds in times_s)
    assert times_s[2] == times_s[3], "three rows go as four"


def test_the_best_way_to_draft_is_found_also_where_none_pays() -> None:
    good = best_speed(0.8, Costs(0.1, 1.0))
    assert good[0] > 2.0
    bad, gamma, _ = best_speed(0.1, Costs(0.9, 1.0))
    assert (bad < 1.0, gamma) == (True, 1)


def test_the_command_searches_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the cat sat\non the mat\n")
    whole = random_model(num_hidden_layers=NUM_LAYERS, vocab_size=len(ToyTokenizer()))
    monkeypatch.setattr(search_layers, "open_model", lambda *_, **__: opened())
    monkeypatch.setattr(layer_costs, "open_model", lambda *_, **__: opened())
    monkeypatch.setattr(search_layers, "load", lambda _: (whole, None))
    search_layers.search_layers(prompts=prompts, searched=Searched("tiny"), how=How(keep=1, tokens=20))
    said = capsys.readouterr().out
    assert "kept" in said
    assert "--draft layers:" in said or "leave layers off" in said


@pytest.mark.parametrize(
    ("how", "field"),
    [(How(keep=3), "keep"), (How(beam=0), "beam"), (How(tokens=1), "tokens"), (How(minutes=-1.0), "minutes"),
     (How(round_trip_ms=-1.0), "round_trip_ms")],
    ids=["keep", "beam", "tokens", "minutes", "round trip"],
)  # fmt: skip
def test_an_option_out_of_its_range_is_named_before_the_target_writes_anything(
    how: How, field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompts.txt").write_text("the cat sat\n")
    monkeypatch.setattr(search_layers, "load", lambda _: (random_model(num_hidden_layers=NUM_LAYERS), None))
    monkeypatch.setattr(search_layers, "open_model", lambda *_, **__: pytest.fail("it is opened to write"))
    with pytest.raises(InvalidRequest) as caught:
        search_layers.search_layers(prompts=tmp_path / "prompts.txt", searched=Searched("tiny"), how=how)
    assert caught.value.field == field
