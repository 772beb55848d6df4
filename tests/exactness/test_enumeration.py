"""The enumerator and the toy tables do what the exactness tests rely on."""

import pytest
import torch

from outrider.messages import SparseRow
from outrider.noise import Purpose
from outrider.sampling import greedy_token
from tests.exactness.enumeration import EnumeratingSource, enumerate_law
from tests.exactness.toy import VOCAB, Toy


def test_the_enumerator_visits_every_outcome_once() -> None:
    def run(source: EnumeratingSource) -> tuple[int, ...]:
        first = source.pick(torch.tensor([1.0, 0.0, 3.0]), Purpose.TARGET, 0)
        return (first, source.draw_counts(SparseRow((7, 5), (1 << 15, 1 << 15))) if first else 0)

    assert enumerate_law(run) == {(0, 0): 0.25, (2, 7): 0.375, (2, 5): 0.375}


def test_the_enumerator_refuses_code_with_randomness_of_its_own() -> None:
    calls = iter(range(100))

    def run(source: EnumeratingSource) -> tuple[int, ...]:
        sides = 2 if next(calls) == 0 else 3
        return (source.choose([(side, 1 / sides) for side in range(sides)]),)

    with pytest.raises(RuntimeError, match="not deterministic"):
        enumerate_law(run)


def test_the_enumerator_refuses_to_run_for_ever() -> None:
    with pytest.raises(RuntimeError, match="more than 4"):
        enumerate_law(lambda source: (source.choose([(i, 0.125) for i in range(8)]),), max_paths=4)


def test_the_toy_greedy_token_is_not_a_constant() -> None:
    prefixes = [(i, j) for i in range(VOCAB) for j in range(VOCAB)]
    assert len({greedy_token(Toy(1).logits(prefix)[:VOCAB]) for prefix in prefixes}) > 1
