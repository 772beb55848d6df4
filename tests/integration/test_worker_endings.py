"""How workers end: in good order whatever has become of the store, and without a session that nobody told of it."""

import asyncio
from typing import Any

import pytest

from draft_service.app import DraftApp
from draft_service.config import DraftSettings
from outrider.codec.decode import decode_request_to_proto, decode_response_from_proto
from outrider.errors import Unavailable
from outrider.rpc import Broken, client_stream
from outrider.store.connect import open_client
from outrider.store.embedded import EmbeddedServer
from outrider.store.registry import Registry
from outrider.v1 import verify_pb2
from tests.integration.verify_bench import LIMIT_S, connected, undrafted, verifier
from verify_service.app import VerifyApp
from verify_service.config import VerifySettings


def worker(role: str, store_url: str) -> VerifyApp | DraftApp:
    settings: dict[str, Any] = {"worker_id": "w", "store_url": store_url, "heartbeat_ttl_s": 60.0}
    if role == "verify":
        return VerifyApp(VerifySettings(model="toy", **settings))
    return DraftApp(DraftSettings(drafter="toy", **settings))


@pytest.mark.parametrize("role", ["verify", "draft"])
async def test_a_worker_that_is_stopped_while_the_store_is_gone_ends_in_good_order(role: str) -> None:
    async with EmbeddedServer() as server:
        app = worker(role, server.url)
        await app.start()
        running = asyncio.create_task(app.run())
        client = open_client(server.url)
        async with asyncio.timeout(LIMIT_S):
            while not await Registry(client).workers(role):  # noqa: ASYNC110  (it has to be asked for)
                await asyncio.sleep(0.01)
        await client.aclose()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await app.server.stop(0.0)


async def test_a_session_that_opens_its_stream_before_the_draining_and_speaks_after_it_is_refused() -> None:
    """It would not be told of the draining, and hold the verifier up for as long as it runs."""
    async with verifier() as app, connected(app) as stub:
        call = stub.Decode()
        async with client_stream(call, decode_request_to_proto, decode_response_from_proto) as stream:
            await stub.Describe(verify_pb2.VerifyServiceDescribeRequest(), timeout=LIMIT_S)
            await app.drain()
            stream.send(undrafted())
            said = await stream.receive(LIMIT_S)
        assert isinstance(said, Broken)
        assert isinstance(said.error, Unavailable)
