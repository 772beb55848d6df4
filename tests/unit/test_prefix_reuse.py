"""KV taken over from other sessions changes no bit, and neither does anything else about who comes when, and with whom.

The schedules are those of `schedules.py`. The long form, in `test_schedules_at_length.py`, plays 200 on each model.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from outrider.model.prefix import chained_key
from outrider.model.probe import calibrate
from outrider.model.runner import ModelRunner
from outrider.model.tiny import random_model
from outrider.model.toy import ToyLanguage, ToyRunner
from outrider.model.transformers_runner import TransformersRunner
from tests.unit.schedules import Stage
from tests.unit.verify_desk import VOCAB, ClassesMatter


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def toys(*, classes_differ: bool) -> Stage:
    language = ToyLanguage(VOCAB, seed=5)

    def make(num_blocks: int = 64) -> ModelRunner:
        if classes_differ:
            return ClassesMatter(num_blocks, language)
        return ToyRunner(language, num_blocks=num_blocks)

    return Stage(make, make)


@pytest.mark.parametrize("classes_differ", [False, True])
def test_a_hundred_random_schedules_on_the_toy_say_what_their_twins_say(classes_differ: bool) -> None:
    """With the other half, 200."""
    stage = toys(classes_differ=classes_differ)
    for seed in range(100):
        stage.play(seed, max_tokens=20)
    assert stage.totals["kv_reused_tokens"] > stage.totals["filled_tokens"] / 8
    assert stage.totals["preempted"] > 0
    assert stage.totals["texts"] > 300
    assert stage.totals["unseeded"] > 50


def test_a_key_that_leaves_classes_out_changes_some_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the same schedules, and a planted mistake."""
    monkeypatch.setattr("outrider.model.kv.chained_key", lambda parent, ids, _: chained_key(parent, ids, b""))
    stage = toys(classes_differ=True)
    with pytest.raises(AssertionError):
        for seed in range(100):
            stage.play(seed, max_tokens=20)


def transformers(dtype: torch.dtype, *, forced: bool) -> Stage:
    """A random transformer; one runner per size, so that what earlier schedules left in it is taken over by later."""
    runners: dict[int, TransformersRunner] = {}

    def make(num_blocks: int = 40) -> ModelRunner:
        if num_blocks not in runners:
            runner = TransformersRunner(random_model(dtype=dtype), name="tiny", num_blocks=num_blocks)
            calibrate(runner)
            assert runner.info.exactness == "bitwise"
            if forced:
                runner.set_classes(replace(runner.classes, classes_differ=True), "forced")
            runners[num_blocks] = runner
        return runners[num_blocks]

    return Stage(make, lambda: make(41))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("forced", [False, True], ids=["as probed", "classes forced apart"])
def test_random_schedules_on_a_transformer_say_what_their_twins_say(dtype: torch.dtype, forced: bool) -> None:
    stage = transformers(dtype, forced=forced)
    for seed in range(5):
        stage.play(seed, max_tokens=20)
    assert stage.totals["kv_reused_tokens"] > stage.totals["filled_tokens"] / 8
    assert stage.totals["texts"] > 10
