"""API keys from a mounted file of records, so that an orchestrator needs no key in the store.

One record a line, as `outrider keys create --offline` prints them; empty lines and lines that begin with "#" mean
nothing. The file is looked at again when it has changed. A changed file that cannot be read leaves the keys as they
were: a slip of the pen must not lock everybody out, and it is logged as a warning, each second that somebody calls.
"""

import asyncio
import logging
import time
from pathlib import Path

from outrider.errors import InvalidRequest
from outrider.keys import KeyRecord, read_record

MAX_FILE_BYTES = 16 << 20
LOOK_S = 1.0
"""How often it is looked whether the file has changed, at most."""

log = logging.getLogger(__name__)


class KeyFile:
    """The records of a file; `load` first."""

    def __init__(self, path: Path) -> None:
        """Keep the path."""
        self._path = path
        self._records: dict[str, KeyRecord] = {}
        self._seen: tuple[int, ...] = ()
        self._looked_s = 0.0

    async def load(self) -> None:
        """Read the file now.

        Raises:
            InvalidRequest: it cannot be read, is too large, or has a line that is no record.
        """
        self._looked_s = time.monotonic()
        try:
            found = await asyncio.to_thread(_read, self._path, self._seen)
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest("key_file", str(self._path), f"a file that can be read ({error})") from error
        if found is not None:
            self._records, self._seen = found

    async def find(self, key_id: str) -> KeyRecord | None:
        """Return the record with an id, None if there is none."""
        if time.monotonic() - self._looked_s >= LOOK_S:
            try:
                await self.load()
            except InvalidRequest as error:
                log.warning("the keys stay as they were: %s", error)
        return self._records.get(key_id)


def _read(path: Path, seen: tuple[int, ...]) -> tuple[dict[str, KeyRecord], tuple[int, ...]] | None:
    """Return the records and what the file looked like; None if it looks as before."""
    found = path.stat()
    looks = (found.st_mtime_ns, found.st_ino, found.st_size)
    if looks == seen:
        return None
    if found.st_size > MAX_FILE_BYTES:
        raise InvalidRequest("key_file", f"{found.st_size} bytes", f"at most {MAX_FILE_BYTES} bytes")
    records: dict[str, KeyRecord] = {}
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            record = read_record(line, f"{path}:{number}")
            if record.key_id in records:
                raise InvalidRequest(f"{path}:{number}.key_id", record.key_id, "an id that no line before has")
            records[record.key_id] = record
    return records, looks
