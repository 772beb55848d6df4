"""The operator's policy on drafters: one record that all orchestrators of a cluster read.

It is one key, so that each operation is one script in one cluster slot. Whoever changes it writes only over what was
read: of two operators at once, the second one's change is made again on the first one's.
"""

from collections.abc import Callable

from outrider.drafter_policy import DrafterPolicy, read_policy, write_policy
from outrider.errors import InvalidRequest
from outrider.store.connect import ScriptRunner, StoreClient
from outrider.store.errors import StateUnreadable


class PolicyStore:
    """The record in Redis or Valkey; every method is idempotent and may raise `StoreUnavailable` in `deadline_s`."""

    def __init__(self, client: StoreClient, *, deadline_s: float = 3.0, prefix: str = "outrider") -> None:
        """Keep the client, which the caller closes.

        Args:
            client: from `outrider.store.connect.open_client`.
            deadline_s: most seconds one call may take.
            prefix: first part of every key.
        """
        self._scripts = ScriptRunner(client, deadline_s=deadline_s, with_prelude=False)
        self._keys = [f"{prefix}:{{drafters}}:policy"]

    async def read(self) -> DrafterPolicy:
        """Return the policy; where there is none, nothing is detached or split.

        Raises:
            StateUnreadable: this version cannot read it.
        """
        return _policy(await self._raw())

    async def change(self, changed: Callable[[DrafterPolicy], DrafterPolicy]) -> DrafterPolicy:
        """Change the policy; return what it is now.

        Args:
            changed: returns the new policy for the present one; is called again if that has changed meanwhile.

        Raises:
            InvalidRequest: the new one cannot be kept.
            StateUnreadable: this version cannot read the present one.
        """
        while True:
            raw = await self._raw()
            policy = changed(_policy(raw))
            if await self._write(raw, policy):
                return policy

    async def reset(self) -> None:
        """Detach and split nothing, whatever the record holds; also one that nobody can read."""
        while not await self._write(await self._raw(), DrafterPolicy()):
            pass

    async def _raw(self) -> bytes:
        _, raw = await self._scripts.run("policy_read", self._keys, [], idempotent=True)
        return raw or b""

    async def _write(self, was: bytes, policy: DrafterPolicy) -> bool:
        """Write over what was read; return False if that is there no more."""
        args = [was, write_policy(policy)]
        return bool((await self._scripts.run("policy_write", self._keys, args, idempotent=True))[0] == b"OK")


def _policy(raw: bytes) -> DrafterPolicy:
    try:
        return read_policy(raw) if raw else DrafterPolicy()
    except InvalidRequest as error:
        raise StateUnreadable(f"the policy on drafters cannot be read: {error}") from error
