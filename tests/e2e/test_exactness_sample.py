"""Exactness of the real model through three processes, on a small sample; `make exactness` runs all of it."""

from collections.abc import AsyncIterator

import pytest
import torch

from benchmarks.drafts import CAUSAL_LM, PROMPT_LOOKUP
from benchmarks.exactness.law import SAMPLINGS, Bench, check_law, check_planted, check_right, open_bench
from benchmarks.exactness.outcome import Outcome
from benchmarks.exactness.sampler import Recipe
from benchmarks.exactness.stock import check_stock
from benchmarks.exactness.twins import check_twins
from benchmarks.prompt_set import KINDS, load_prompts
from benchmarks.serving import real_specs
from outrider.client import Client
from outrider.cluster import LocalCluster
from outrider.ids import Mode

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(900)]

DRAFTERS = (CAUSAL_LM, PROMPT_LOOKUP)


@pytest.fixture(scope="module")
async def client() -> AsyncIterator[Client]:
    """A client of a bfloat16 cluster with a language-model drafter and a lookup."""
    async with LocalCluster(real_specs("bfloat16", DRAFTERS), start_timeout_s=300.0) as cluster:
        async with Client(cluster.address) as connected:
            yield connected


@pytest.fixture(scope="module")
def bench() -> Bench:
    """Target and layer-subset draft in this process."""
    torch.set_num_threads(1)
    return open_bench()


def require_promised(outcome: Outcome, num_checked: int) -> None:
    assert not outcome.mismatches
    assert outcome.num_checked == num_checked
    assert outcome.num_equal + outcome.counts.get("parted at a tie", 0) == num_checked
    assert outcome.counts["accepted"] > 0 < outcome.counts["rejected"], "nothing was put to the test"


def test_there_are_two_hundred_different_prompts_of_all_kinds() -> None:
    prompts = load_prompts()
    assert len({(prompt.text, prompt.raw) for prompt in prompts}) == 200
    assert {prompt.kind for prompt in prompts} == set(KINDS)


@pytest.mark.parametrize("mode", [Mode.GREEDY, Mode.COUPLED])
async def test_bfloat16_text_equals_the_twins(client: Client, mode: Mode) -> None:
    require_promised(await check_twins(client, load_prompts()[:8], mode, 16), 8)


async def test_float32_greedy_text_equals_what_transformers_generates() -> None:
    async with LocalCluster(real_specs("float32", DRAFTERS), start_timeout_s=300.0) as cluster:
        async with Client(cluster.address) as client:
            require_promised(await check_stock(client, load_prompts()[1:5], 10), 4)


def test_the_token_rule_follows_the_targets_law_at_temperature_1(bench: Bench) -> None:
    """False-alarm rate 1e-3; keys are fixed, so the outcome is the same on every run on one engine."""
    outcome = Outcome("law")
    recipe = Recipe(bench.prompt, Mode.REJECTION, SAMPLINGS["temperature 1"], num_tokens=2)
    with torch.inference_mode():
        check_right(outcome, bench, recipe, "temperature 1", 300)
    assert not outcome.mismatches


def test_a_drafter_that_lies_about_its_rows_is_noticed(bench: Bench) -> None:
    """The negative control: the same test, with planted mistakes."""
    outcome = Outcome("law")
    with torch.inference_mode():
        check_planted(
            outcome, bench, Recipe(bench.prompt, Mode.REJECTION, SAMPLINGS["temperature 1"], num_tokens=2), 300
        )
    assert not outcome.mismatches


@pytest.mark.slow
@pytest.mark.parametrize("mode", [Mode.GREEDY, Mode.COUPLED])
async def test_more_bfloat16_text_equals_the_twins(client: Client, mode: Mode) -> None:
    require_promised(await check_twins(client, load_prompts()[8:72], mode, 32), 64)


@pytest.mark.slow
def test_both_rules_follow_the_targets_law_and_planted_mistakes_do_not() -> None:
    """False-alarm rate 1e-3 for each of four tests."""
    assert not check_law(1000).mismatches
