"""Channels to workers: one per address and role, and no more than so many however often workers come back elsewhere."""

from collections.abc import AsyncIterator

import pytest

import orchestrator.channels as channels_module
from orchestrator.channels import Channels


@pytest.fixture
async def channels(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Channels]:
    monkeypatch.setattr(channels_module, "MAX_CHANNELS", 2)
    made = Channels()
    yield made
    await made.close()


async def test_a_worker_has_one_channel_in_each_role(channels: Channels) -> None:
    assert channels.to("127.0.0.1:1", "draft") is channels.to("127.0.0.1:1", "draft")
    assert channels.to("127.0.0.1:1", "draft") is not channels.to("127.0.0.1:1", "verify")


async def test_of_many_channels_the_one_asked_for_longest_ago_is_let_go(channels: Channels) -> None:
    first, second = channels.to("127.0.0.1:1", "draft"), channels.to("127.0.0.1:2", "draft")
    assert channels.to("127.0.0.1:1", "draft") is first
    third = channels.to("127.0.0.1:3", "draft")
    assert channels.num_retired == 1, "streams may run on it"
    assert (channels.to("127.0.0.1:1", "draft"), channels.to("127.0.0.1:3", "draft")) == (first, third)
    assert channels.to("127.0.0.1:2", "draft") is not second
