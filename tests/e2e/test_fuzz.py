"""Random and mutated messages on every RPC of a cluster of processes; `make fuzz` sends many more."""

import secrets

import pytest

from tests.e2e.toys import Toys
from tests.fuzz.campaign import Campaign

pytestmark = pytest.mark.timeout(240)


async def test_messages_that_are_random_or_spoilt_disturb_nobody(toys: Toys) -> None:
    seed = secrets.randbelow(1_000_000)
    run = await Campaign(toys, seed).play(num_inputs=3_000, round_size=800)
    assert not run.book.violations, (seed, run.book.violations)
    assert run.book.num_honest >= 3
