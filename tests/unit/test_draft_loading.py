"""What a draft worker is told to load is what it describes."""

import pytest

from draft_service.config import DraftSettings
from draft_service.loading import load_drafter


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
