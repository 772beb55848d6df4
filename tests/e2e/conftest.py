"""One cluster of real processes for the whole run."""

from collections.abc import AsyncIterator

import pytest

from tests.e2e.toys import Toys


@pytest.fixture(scope="session")
async def toy_processes() -> AsyncIterator[Toys]:
    """Processes that tests may harm; ask for `toys` instead, which repairs them first."""
    async with Toys() as made:
        yield made


@pytest.fixture
async def toys(toy_processes: Toys) -> Toys:
    """A whole cluster: two verifiers, a draft worker, two orchestrators."""
    await toy_processes.repair()
    return toy_processes
