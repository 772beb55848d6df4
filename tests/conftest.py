"""Fixtures for the whole suite."""

from collections.abc import AsyncIterator

import pytest

from outrider.store.embedded import EmbeddedServer


@pytest.fixture(scope="session")
async def valkey_url() -> AsyncIterator[str]:
    """URL of one embedded server for the whole run: use your own session ids and key prefixes."""
    async with EmbeddedServer() as server:
        yield server.url
