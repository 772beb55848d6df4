"""What must be as it was before, once all sessions have ended: places, KV, leases, and the log as the client saw it."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from tests.chaos.fleet import LEASE_TTL_S, Fleet
from tests.chaos.listeners import Book
from tests.chaos.schedule import DRAFTERS, ORCHESTRATORS, SERVICES, VERIFIERS

RETURN_S = 45.0
"""How long what was used may take to return: a connection that was cut is noticed by its keepalive after 15 s; later
where a machine is busy."""
WATCHED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(ORCHESTRATORS, ("outrider_num_requests_running",)),
    **dict.fromkeys(
        VERIFIERS, ("outrider_num_requests_running", "outrider_num_requests_waiting", "outrider_kv_used_bytes")
    ),
    **dict.fromkeys(DRAFTERS, ("outrider_draft_sessions", "outrider_kv_used_bytes")),
}
Usage = dict[str, dict[str, float]]


async def usage(fleet: Fleet) -> Usage:
    """Return what every service has in use, as its metrics say."""
    found: Usage = {}
    for name in SERVICES:
        samples = await fleet.samples(name)
        found[name] = {sample: samples[sample] for sample in WATCHED[name]}
    return found


async def check_usage(fleet: Fleet, before: Usage, book: Book, within_s: float = RETURN_S) -> float:
    """Require that everything in use returns to what it was; return the seconds that it took."""
    began_s = time.monotonic()
    for name, words in fleet.ended().items():
        book.violated("ended by itself", f"{name}: {words}")
        return 0.0
    while True:
        now = await usage(fleet)
        took_s = time.monotonic() - began_s
        if now == before:
            return took_s
        if took_s > within_s:
            for name, samples in now.items():
                for sample, value in samples.items():
                    if value != before[name][sample]:
                        book.violated("not returned", f"{name}: {sample} is {value}, was {before[name][sample]}")
            return took_s
        await asyncio.sleep(0.2)


async def check_logs(fleet: Fleet, book: Book) -> None:
    """Require that the log of every session that ended holds what its client has seen, and nothing else."""
    done, book.done = book.done, []
    for session_id, seen, prompt_len in done:
        logged = await fleet.sessions.read_log(session_id)
        generated = logged.token_ids[prompt_len:]
        if generated != seen:
            words = f"session {session_id}: the log holds {len(generated)} tokens, the client knows of {len(seen)}"
            book.violated("log differs", words)


async def check_leases(fleet: Fleet, book: Book, within_s: float = LEASE_TTL_S + RETURN_S) -> int:
    """Require that no session is held any more; return how many there are.

    Who was killed cannot give a lease up: that one runs out, and nobody may renew it.
    """
    admin: Any = fleet.store.admin
    deadline_s = time.monotonic() + within_s
    held: list[str] = []
    number = 0
    while True:
        seconds, microseconds = await admin.time()
        now_ms = int(seconds) * 1000 + int(microseconds) // 1000
        held, number = [], 0
        async for key in admin.scan_iter("*}:state", count=1000):
            owner, expires = await admin.hmget(key, "lease.owner", "lease.expires_ms")
            number += 1
            if owner and int(expires) > now_ms:
                held.append(f"{key.decode()} by {owner.decode()}")
        if not held or time.monotonic() > deadline_s:
            break
        await asyncio.sleep(0.5)
    for each in held:
        book.violated("lease held", each)
    return number
