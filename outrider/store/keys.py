"""The records of API keys: hashes and limits, never the keys themselves.

Records and revocations are two hashes under one hash tag, so that each operation is one script in one cluster slot. A
record is written once; a revocation is written beside it and never undone.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from outrider.errors import InvalidRequest, NotFound
from outrider.keys import KeyRecord, read_record, write_record
from outrider.store.connect import ScriptRunner, StoreClient
from outrider.store.errors import StateUnreadable


class KeyStore:
    """Keys in Redis or Valkey; every method is idempotent and may raise `StoreUnavailable` in `deadline_s`."""

    def __init__(self, client: StoreClient, *, deadline_s: float = 3.0, prefix: str = "outrider") -> None:
        """Keep the client, which the caller closes.

        Args:
            client: from `outrider.store.connect.open_client`.
            deadline_s: most seconds one call may take.
            prefix: first part of every key.
        """
        self._scripts = ScriptRunner(client, deadline_s=deadline_s, with_prelude=False)
        self._keys = [f"{prefix}:{{keys}}:{part}" for part in ("records", "revoked")]

    async def create(self, record: KeyRecord) -> None:
        """Keep a new record.

        Raises:
            InvalidRequest: another record has its id.
        """
        reply = await self._run("keys_create", [record.key_id, write_record(record)])
        if reply[0] != b"OK":
            raise InvalidRequest("key_id", record.key_id, "an id that no other key has")

    async def find(self, key_id: str) -> KeyRecord | None:
        """Return the record with an id, None if there is none.

        Raises:
            StateUnreadable: this version cannot read it.
        """
        _, raw, revoked = await self._run("keys_find", [key_id])
        return None if raw is None else _record(raw, revoked)

    async def all(self) -> list[KeyRecord]:
        """Return all records, oldest first.

        Raises:
            StateUnreadable: this version cannot read one.
        """
        _, flat, revoked = await self._run("keys_list", [])
        when = _pairs(revoked)
        records = [_record(raw, when.get(key_id)) for key_id, raw in _pairs(flat).items()]
        return sorted(records, key=lambda record: (record.created_s, record.key_id))

    async def revoke(self, key_id: str) -> None:
        """Make a key invalid for good.

        Raises:
            NotFound: there is none with this id.
        """
        if (await self._run("keys_revoke", [key_id]))[0] != b"OK":
            raise NotFound(f"no key with the id {key_id!r} is in the store")

    async def _run(self, name: str, args: list[Any]) -> Any:
        return await self._scripts.run(name, self._keys, args, idempotent=True)


def _record(raw: bytes, revoked_ms: bytes | None) -> KeyRecord:
    try:
        record = read_record(raw, "key")
    except InvalidRequest as error:
        raise StateUnreadable(f"an API key's record cannot be read: {error}") from error
    return record if revoked_ms is None else replace(record, revoked_s=int(revoked_ms) / 1000)


def _pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))
