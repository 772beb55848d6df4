"""How journals keep the leases of their sessions."""

import asyncio

from orchestrator.job import Settings
from outrider.ids import WorkerId
from outrider.store.connect import open_client
from outrider.store.records import KvLocation
from outrider.store.sessions import SessionStore
from tests.contract.writer import Writer, open_session

SETTINGS = Settings(lease_ttl_s=3.0)
"""Renewed after 0.5 to 1 s."""
NUM_SESSIONS = 16


async def test_leases_that_were_taken_together_are_not_renewed_in_one_moment(valkey_url: str) -> None:
    """A burst of them would delay the rounds of all sessions; sixteen moments within 150 of 500 ms are no chance."""
    client = open_client(valkey_url)
    store = SessionStore(client)
    opened = [await open_session(store) for _ in range(NUM_SESSIONS)]
    renewed: list[float] = []

    def resident() -> KvLocation:
        renewed.append(asyncio.get_running_loop().time())
        return KvLocation(WorkerId("v1"), len(renewed))

    writers = [Writer(store, *each, settings=SETTINGS) for each in opened]
    tasks = [asyncio.create_task(writer.journal.keep_lease(resident)) for writer in writers]
    async with asyncio.timeout(60):
        while len(renewed) < NUM_SESSIONS:  # noqa: ASYNC110  (nothing announces it)
            await asyncio.sleep(0.02)
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(each, asyncio.CancelledError) for each in ended)
    await client.aclose()
    assert max(renewed[:NUM_SESSIONS]) - min(renewed[:NUM_SESSIONS]) > 0.15
