"""The commands `outrider keys …`: make, list and revoke the API keys of a cluster's clients."""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from outrider.errors import InvalidRequest
from outrider.keys import KeyLimits, KeyRecord, make_key, write_record
from outrider.store.connect import open_client
from outrider.store.keys import KeyStore

app = App(name="keys", help="Make, list and revoke the API keys of clients.")
console = Console(highlight=False)
notes = Console(stderr=True, highlight=False)

_UNITS = {"m": 60, "h": 3600, "d": 86_400}

Store = Annotated[str, Parameter(env_var="OUTRIDER_ORCHESTRATOR_STORE_URL")]
"""An option would be seen by everybody who lists this machine's processes; better the variable."""


@Parameter(name="*")
@dataclass(frozen=True)
class Allowed:
    """What the key may use; 0 is without limit."""

    requests_per_minute: int = 0
    """Calls of any kind."""
    concurrent: int = 0
    """Generations at one time."""
    tokens_per_minute: int = 0
    """Tokens of prompts and answers."""
    tokens_per_day: int = 0
    """Tokens of prompts and answers."""
    weight: int = 1
    """Share of the places where they are scarce, 1 .. 1000."""
    max_priority: int = 0
    """Highest priority of its requests, -8 .. 8."""

    def limits(self) -> KeyLimits:
        """Return what is kept."""
        return KeyLimits(
            self.requests_per_minute,
            self.concurrent,
            self.tokens_per_minute,
            self.tokens_per_day,
            self.weight,
            self.max_priority,
        )


NOTHING_LIMITED = Allowed()


@app.command
def create(
    name: str, /, *, store: Store = "", file: Path | None = None, expires: str = "", allowed: Allowed = NOTHING_LIMITED
) -> None:
    """Make a key for NAME and print it, once: only its hash is kept.

    Args:
        name: Whose key it is.
        store: URL of the cluster's Redis or Valkey; unset: OUTRIDER_ORCHESTRATOR_STORE_URL.
        file: Append the record to this file of an orchestrator's OUTRIDER_ORCHESTRATOR_KEY_FILE, instead of the store.
        expires: When it ends: a number and m, h or d, such as 90d; unset: never.
        allowed: What it may use.
    """
    now_s = time.time()
    key, record = make_key(name, allowed.limits(), now_s, now_s + _seconds(expires) if expires else None)
    if file is not None:
        _append(file, record)
    else:
        asyncio.run(_create(required(store), record))
    notes.print(f"key {record.key_id} of {name}; it is shown here and never again:", markup=False)
    console.print(key, markup=False, soft_wrap=True)


@app.command(name="list")
def list_(*, store: Store = "") -> None:
    """List the keys in the store: ids, names and limits, never the keys.

    Args:
        store: URL of the cluster's Redis or Valkey; unset: OUTRIDER_ORCHESTRATOR_STORE_URL.
    """
    table = Table("id", "name", "created", "state", "limits", box=None, pad_edge=False)
    for record in asyncio.run(_all(required(store))):
        table.add_row(record.key_id, record.name, _date(record.created_s), _state(record), _words(record.limits))
    console.print(table, markup=False)


@app.command
def revoke(key_id: str, /, *, store: Store = "") -> None:
    """Make a key in the store invalid for good; orchestrators heed it within seconds.

    Args:
        key_id: Id of the key, from `outrider keys list`.
        store: URL of the cluster's Redis or Valkey; unset: OUTRIDER_ORCHESTRATOR_STORE_URL.
    """
    asyncio.run(_revoke(required(store), key_id))
    notes.print(f"key {key_id} is revoked", markup=False)


@asynccontextmanager
async def _opened(store: str) -> AsyncIterator[KeyStore]:
    client = open_client(store)
    try:
        yield KeyStore(client)
    finally:
        await client.aclose()


async def _create(store: str, record: KeyRecord) -> None:
    async with _opened(store) as keys:
        await keys.create(record)


async def _all(store: str) -> list[KeyRecord]:
    async with _opened(store) as keys:
        return await keys.all()


async def _revoke(store: str, key_id: str) -> None:
    async with _opened(store) as keys:
        await keys.revoke(key_id)


def _append(file: Path, record: KeyRecord) -> None:
    try:
        with file.open("ab") as out:
            out.write(write_record(record) + b"\n")
    except OSError as error:
        raise InvalidRequest("file", str(file), f"a file that can be written ({error.strerror})") from error


def required(store: str) -> str:
    """Return the URL of the store.

    Raises:
        InvalidRequest: there is none.
    """
    if not store:
        raise InvalidRequest("store", store, "a URL, or OUTRIDER_ORCHESTRATOR_STORE_URL to be set")
    return store


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d{1,6})([mhd])", text)
    if match is None or int(match.group(1)) == 0:
        raise InvalidRequest("expires", text, "a number from 1 on, and m, h or d, such as 90d")
    return int(match.group(1)) * _UNITS[match.group(2)]


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def _state(record: KeyRecord) -> str:
    if record.revoked_s is not None:
        return f"revoked {_date(record.revoked_s)}"
    if record.expires_s is None:
        return "valid"
    return f"{'expired' if record.expires_s <= time.time() else 'valid until'} {_date(record.expires_s)}"


def _words(limits: KeyLimits) -> str:
    named = (
        (limits.requests_per_minute, "requests/min"),
        (limits.concurrent, "at one time"),
        (limits.tokens_per_minute, "tokens/min"),
        (limits.tokens_per_day, "tokens/day"),
    )
    places = [f"weight {limits.weight}"] * (limits.weight != 1)
    places += [f"priority up to {limits.max_priority}"] * (limits.max_priority != 0)
    return ", ".join([*(f"{limit} {unit}" for limit, unit in named if limit), *places]) or "none"
