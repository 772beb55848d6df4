"""The client for code without an event loop leaves none behind."""

import asyncio
import threading

import pytest

from outrider.errors import InvalidRequest
from outrider.sync_client import SyncClient


def test_a_client_that_cannot_be_made_leaves_no_event_loop_behind() -> None:
    client = SyncClient.__new__(SyncClient)
    with pytest.raises(InvalidRequest, match="addresses"):
        SyncClient.__init__(client, [])
    with pytest.raises(RuntimeError, match="Runner is closed"):
        client._runner.get_loop()


@pytest.mark.parametrize(
    "address", ["", "localhost", "127.0.0.1:99999", "127.0.0.1:", "http://127.0.0.1:7400", "unix:"]
)
def test_an_address_that_is_none_is_refused_before_it_is_called(address: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^addresses: .*host:port"):
        SyncClient(["127.0.0.1:7400", address])


async def test_inside_a_running_event_loop_the_other_client_is_named() -> None:
    with pytest.raises(RuntimeError, match="AsyncClient"):
        SyncClient("127.0.0.1:1")


def test_a_second_thread_is_told_that_a_client_is_for_one() -> None:
    with SyncClient("127.0.0.1:1") as client:
        loop = client._runner.get_loop()
        running, over = threading.Event(), asyncio.Event()

        async def busy() -> None:
            running.set()
            await over.wait()

        other = threading.Thread(target=lambda: client._runner.run(busy()))
        other.start()
        assert running.wait(60)
        try:
            with pytest.raises(RuntimeError, match="one thread at a time"):
                client.models()
        finally:
            loop.call_soon_threadsafe(over.set)
            other.join()
