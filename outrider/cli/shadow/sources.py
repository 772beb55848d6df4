"""Sessions that are over: from the store of a cluster, or from a file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from outrider.cli.ranges import check_range
from outrider.errors import InvalidRequest, NotFound
from outrider.ids import SessionId
from outrider.shadowing import Logged, read_sessions
from outrider.store.connect import open_client
from outrider.store.errors import SessionNotFound
from outrider.store.finding import latest_sessions
from outrider.store.sessions import SessionStore

MOST_SESSIONS = 100_000
"""Sessions that can be asked for at once."""


@Parameter(name="*")
@dataclass(frozen=True)
class Source:
    """Where the sessions are."""

    store: Annotated[str, Parameter(env_var="OUTRIDER_ORCHESTRATOR_STORE_URL")] = ""
    """URL of the cluster's Redis or Valkey; unset: OUTRIDER_ORCHESTRATOR_STORE_URL. Other users see options."""
    sessions: str = ""
    """Ids of sessions in the store, with commas between them; unset: the latest."""
    latest: int = 20
    """How many sessions of the store, the latest first, if none are named."""
    file: Path | None = None
    """File of sessions instead of a store: one a line, as JSON with token_ids and prompt_len."""

    async def read(self) -> list[Logged]:
        """Return the sessions; at least one.

        Raises:
            InvalidRequest: an option is out of its range, or the file is wrong.
            NotFound: the store has no session that says anything.
            SessionNotFound: it has none of a name that was given.
            StoreUnavailable: it does not answer.
        """
        if self.file is not None:
            return read_sessions(self.file)
        if not self.store:
            raise InvalidRequest("store", self.store, "a URL, OUTRIDER_ORCHESTRATOR_STORE_URL to be set, or --file")
        check_range("latest", self.latest, 1, MOST_SESSIONS)
        named = [SessionId(name.strip()) for name in self.sessions.split(",") if name.strip()]
        return await read_store(self.store, named, self.latest)


async def read_store(url: str, named: Sequence[SessionId], latest: int) -> list[Logged]:
    """Return the latest turn of sessions of a store, without those in which nothing was generated.

    Args:
        url: of the store.
        named: ids; empty: those that changed last.
        latest: how many of those.
    """
    client = open_client(url)
    try:
        store = SessionStore(client)
        found = [await _read(store, name, gone=not named) for name in named or await latest_sessions(client, latest)]
    finally:
        await client.aclose()
    sessions = [each for each in found if each is not None]
    if not sessions:
        raise NotFound("the store has no session in which something was generated")
    return sessions


async def _read(store: SessionStore, session_id: SessionId, *, gone: bool) -> Logged | None:
    """Return a session; None if it has no answer, or, where it may be `gone` by now, if it is."""
    try:
        state, log = await store.read_state(session_id), await store.read_log(session_id)
    except SessionNotFound:
        if gone:
            return None
        raise
    if log.length <= state.prompt_len:
        return None
    return Logged(
        session_id, log.token_ids, state.prompt_len, state.mode, state.sampling, state.key, state.sample_index,
        state.model,
    )  # fmt: skip
