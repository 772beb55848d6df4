"""Who calls: takes the API key from a call's metadata, and looks up what is kept of it.

What was found is believed for `cache_s` seconds, so a revocation takes effect within that time, also for generations
under way. While the store is away a key that was found before goes on for `grace_s` seconds, and no other is let in.

All that a stranger can learn is that a key is not valid: an unknown id and a wrong secret get the same answer. Only
whoever holds the whole key is told that it was revoked or has expired.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from prometheus_client import Counter

from outrider.errors import StoreUnavailable, Unauthenticated
from outrider.keys import KeyLimits, KeyRecord, belongs, key_id_of

MAX_KNOWN = 10_000
"""Most keys whose record is kept; the one that was used longest ago goes first."""

ASK = "send one as `authorization: Bearer KEY`"
WRONG = "the API key is not valid"

EventT = TypeVar("EventT")

log = logging.getLogger(__name__)


class KeySource(Protocol):
    """Where records of keys are."""

    async def find(self, key_id: str) -> KeyRecord | None:
        """Return the record with an id, None if there is none."""
        ...


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, and what they may use; without a key: anybody, and everything."""

    key_id: str = ""
    """Owner of the sessions that are made."""
    limits: KeyLimits = field(default_factory=KeyLimits)
    sha256: str = ""
    """Of the key that was shown."""


ANYBODY = Caller()


class Access:
    """Lets calls in that show a valid key, or all if no key is required."""

    def __init__(
        self, sources: Sequence[KeySource], refused: Counter, *, cache_s: float = 2.0, grace_s: float = 60.0
    ) -> None:
        """Keep the sources.

        Args:
            sources: asked one after the other; none: everybody is let in.
            refused: counts refusals by reason.
            cache_s: how long a record is believed.
            grace_s: how long it is when no source can be asked.
        """
        self._sources, self._cache_s, self._grace_s = tuple(sources), cache_s, grace_s
        self._known: OrderedDict[str, tuple[KeyRecord, float]] = OrderedDict()
        self._refused = refused.labels("unauthenticated")

    async def caller(self, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
        """Return who calls.

        Raises:
            Unauthenticated: no key, or one that is not valid.
            StoreUnavailable: the key cannot be looked up, and was not lately.
        """
        if not self._sources:
            return ANYBODY
        try:
            return await self._holder(_bearer(metadata))
        except Unauthenticated:
            self._refused.inc()
            raise

    async def watched(self, caller: Caller, events: AsyncIterator[EventT]) -> AsyncGenerator[EventT, None]:
        """Yield events as long as the caller's key is valid.

        Raises:
            Unauthenticated: it was revoked, or has expired.
        """
        async for event in events:
            if caller.key_id:
                await self._recheck(caller)
            yield event

    async def _holder(self, key: str) -> Caller:
        record = await self._record(key_id_of(key))
        if record is None or not belongs(key, record):
            raise Unauthenticated(WRONG)
        _require_current(record)
        return Caller(record.key_id, record.limits, record.sha256)

    async def _recheck(self, caller: Caller) -> None:
        try:
            record = await self._record(caller.key_id)
        except StoreUnavailable:
            return  # what is under way ends with the store's own deadline, not sooner
        if record is None or record.sha256 != caller.sha256:
            raise Unauthenticated(WRONG)
        _require_current(record)

    async def _record(self, key_id: str | None) -> KeyRecord | None:
        if key_id is None:
            return None
        record, read_s = self._known.get(key_id, (None, 0.0))
        age_s = time.monotonic() - read_s
        if record is not None and age_s < self._cache_s:
            self._known.move_to_end(key_id)
            return record
        try:
            return await self._look_up(key_id)
        except StoreUnavailable:
            if record is None or age_s >= self._grace_s:
                raise
            log.debug("key %s is believed for now: the store is away", key_id)
            return record

    async def _look_up(self, key_id: str) -> KeyRecord | None:
        asked_s = time.monotonic()
        for source in self._sources:
            record = await source.find(key_id)
            if record is not None:
                self._known[key_id] = record, asked_s
                self._known.move_to_end(key_id)
                if len(self._known) > MAX_KNOWN:
                    self._known.popitem(last=False)
                return record
        self._known.pop(key_id, None)
        return None


def _bearer(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Return the key that was sent; exactly one, so that no proxy and we can mean different ones."""
    values = [value for name, value in metadata if name == "authorization"]
    if not values:
        raise Unauthenticated(f"an API key is needed: {ASK}")
    scheme, _, key = values[0].partition(" ") if isinstance(values[0], str) else ("", "", "")
    if len(values) > 1 or scheme.lower() != "bearer":
        raise Unauthenticated(f"this is no API key: {ASK}")
    return key.strip()


def _require_current(record: KeyRecord) -> None:
    if record.revoked_s is not None:
        raise Unauthenticated("the API key was revoked")
    if record.expires_s is not None and time.time() >= record.expires_s:
        raise Unauthenticated("the API key has expired")
