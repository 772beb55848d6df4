"""What API keys use, counted in Redis, so that the limits hold over all orchestrators together.

Requests and tokens are buckets that fill evenly up to their limit. A generation's tokens, of the prompt and of the
longest answer it may give, are set aside before it begins, and what it did not take is given back at its end. It may
begin while anything is left, so that a request larger than the limit can pass at all; the next one waits until the debt
is paid. A generation holds a place, and what is set aside for it, as long as somebody renews it: those of a process
that is gone come back.
"""

import math
from typing import Any

from outrider.errors import LimitReached
from outrider.keys import KeyLimits
from outrider.store.connect import ScriptRunner, StoreClient

PLACE_TTL_S = 15.0
"""How long a place is held without renewal."""
BUSY_DELAY_S = 1.0
"""What a client is told to wait for one of its own generations to end."""

_WORDS = {
    "requests_per_minute": "{} requests per minute",
    "concurrent": "{} generations at one time",
    "tokens_per_minute": "{} tokens per minute",
    "tokens_per_day": "{} tokens per day",
}


class Usage:
    """What keys use; every method is idempotent per ticket and may raise `StoreUnavailable` in `deadline_s`.

    A ticket is the name of one generation's place: session/nonce.
    """

    def __init__(
        self,
        client: StoreClient,
        *,
        deadline_s: float = 3.0,
        prefix: str = "outrider",
        place_ttl_s: float = PLACE_TTL_S,
    ) -> None:
        """Keep the client, which the caller closes.

        Args:
            client: from `outrider.store.connect.open_client`.
            deadline_s: most seconds one call may take.
            prefix: first part of every key.
            place_ttl_s: how long a place is held without renewal.
        """
        self._scripts = ScriptRunner(client, deadline_s=deadline_s, with_prelude=False)
        self._prefix = prefix
        self.place_ttl_s = place_ttl_s

    async def request(self, key_id: str, limits: KeyLimits) -> None:
        """Count a call that generates nothing.

        Raises:
            LimitReached: too many requests.
        """
        await self._run("enter", key_id, limits)

    async def enter(self, key_id: str, limits: KeyLimits, ticket: str, *, resuming: bool = False) -> None:
        """Count a call that generates, and take a place.

        Args:
            key_id: whose.
            limits: of the key.
            ticket: names the place.
            resuming: the session's earlier place is not counted, since what holds it is about to end.

        Raises:
            LimitReached: too many requests or generations, or no tokens are left.
        """
        await self._run("resume" if resuming else "enter", key_id, limits, ticket)

    async def reserve(self, key_id: str, limits: KeyLimits, ticket: str, tokens: int) -> None:
        """Set tokens aside for a generation that has its place.

        Raises:
            LimitReached: no tokens are left.
        """
        await self._run("reserve", key_id, limits, ticket, tokens)

    async def renew(self, key_id: str, limits: KeyLimits, ticket: str, tokens: int) -> None:
        """Hold a place for longer; `tokens` are still set aside."""
        await self._run("renew", key_id, limits, ticket, tokens)

    async def leave(self, key_id: str, limits: KeyLimits, ticket: str, tokens: int) -> None:
        """Give a place up, and the `tokens` that are still set aside."""
        await self._run("leave", key_id, limits, ticket, tokens)

    async def _run(self, operation: str, key_id: str, limits: KeyLimits, ticket: str = "", tokens: int = 0) -> None:
        keys = [f"{self._prefix}:keys:{{{key_id}}}:{part}" for part in ("buckets", "places", "holdings")]
        args: list[Any] = [
            operation,
            ticket,
            round(self.place_ttl_s * 1000),
            tokens,
            limits.requests_per_minute,
            limits.concurrent,
            limits.tokens_per_minute,
            limits.tokens_per_day,
        ]
        reply = await self._scripts.run("usage", keys, args, idempotent=bool(ticket))
        if reply[0] == b"LIMIT":
            raise _reached(reply[1].decode(), reply[2] / 1000, limits)


def _reached(name: str, delay_s: float, limits: KeyLimits) -> LimitReached:
    allowed = _WORDS[name].format(getattr(limits, name))
    delay_s = delay_s or BUSY_DELAY_S
    message = f"this API key may use {allowed} ({name}); try again in {math.ceil(delay_s)} s"
    return LimitReached(message, delay_s, name)
