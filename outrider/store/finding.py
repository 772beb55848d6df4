"""Finds sessions without knowing their ids: for operators' commands, never on the way of a request."""

import heapq

from redis.exceptions import RedisError

from outrider.errors import StoreUnavailable
from outrider.ids import SessionId
from outrider.store.connect import UNREACHED, StoreClient

BATCH = 500
"""Keys that the server looks at per call, so that nobody waits long for it."""


async def latest_sessions(client: StoreClient, count: int, *, prefix: str = "outrider") -> list[SessionId]:
    """Return the sessions that changed last, the latest first.

    Every change renews a session's time to live, so the longest is left to the latest; where the orchestrators of one
    store keep sessions for different times, the order is only roughly that. Goes through all keys of the store.

    Args:
        client: of the store.
        count: most sessions, >= 0.
        prefix: first part of every key.

    Raises:
        StoreUnavailable: the store does not answer.
    """
    start, end = f"{prefix}:{{", "}:state"
    found: list[tuple[int, str]] = []
    try:
        async for key in client.scan_iter(match=f"{prefix}:{{*}}:state", count=BATCH):
            name = key.decode()[len(start) : -len(end)]
            found.append((int(await client.pttl(key)), name))
    except (RedisError, *UNREACHED) as error:
        raise StoreUnavailable(f"the session store does not answer: {error}") from error
    return [SessionId(name) for _, name in heapq.nlargest(count, found)]
