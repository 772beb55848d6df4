"""The session store: the committed log, the lease that guards it, the state and the KV directory of each session.

Every change is one Lua script, so that it happens whole or not at all, and every change by an owner names the fencing
number of its lease, so that a stale owner is refused by the server itself.

Invariants:

* The log only grows, and only from its end; ids, classes and kinds grow together.
* At most one fencing number is valid. It rises with every change of owner and is given once: after the first, 1, it is
  a time of the server's clock, so that grants which a failover lost and those that follow it are never mistaken.
* All keys of a session share a hash tag and a time to live, which every change renews.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from outrider.errors import InvalidRequest, StoreError
from outrider.ids import SessionId
from outrider.messages import TokenLogprobs
from outrider.store import encoding
from outrider.store.connect import ScriptRunner, StoreClient
from outrider.store.errors import Fenced, LeaseHeld, LogConflict, LogGap, SessionExists, SessionNotFound
from outrider.store.logprobs import pack, record_bytes, unpack
from outrider.store.records import KvLocation, Lease, LogSlice, SessionState

PARTS = ("state", "log", "classes", "kinds", "kv")
"""Keys of a session, in the order of the scripts' KEYS."""
MAX_KV_LOCATIONS = 8
"""Workers in a session's KV directory; the longest unused go first."""
REMEMBERED_MS = 3_600_000
"""Time that a deletion is remembered: far more than a lease holder, who renews every few seconds, takes to see it."""


class SessionStore:
    """Sessions on one Redis or Valkey server or cluster; safe for any number of concurrent callers.

    Every method may raise `StoreUnavailable` within `deadline_s` (a write may then have happened, so a caller repeats
    what is idempotent), and `InvalidRequest` for an id that is empty or contains braces. Within that time the store
    itself asks again: a server that restarts, is replaced or is full for a moment is a pause. Where the first of two
    such tries was carried out and only its reply lost, a refusal (`Fenced`) may be that of the second.
    """

    def __init__(
        self, client: StoreClient, *, session_ttl_s: float = 86_400.0, deadline_s: float = 3.0, prefix: str = "outrider"
    ) -> None:
        """Keep the client, which the caller closes.

        Args:
            client: from `outrider.store.connect.open_client`.
            session_ttl_s: seconds that a session outlives its last change.
            deadline_s: most seconds one call may take.
            prefix: first part of every key.
        """
        self._scripts = ScriptRunner(client, deadline_s=deadline_s)
        self._ttl_ms = _milliseconds(session_ttl_s)
        self._prefix = prefix

    async def create(
        self,
        session_id: SessionId,
        state: SessionState,
        token_ids: Sequence[int],
        classes: Sequence[int],
        owner: str,
        lease_ttl_s: float,
    ) -> Lease:
        """Write state, prompt and lease (fence 1) of a new session. Idempotent, as long as nothing is appended to it.

        Args:
            session_id: the new session.
            state: its first state.
            token_ids: the prompt, [n].
            classes: one `TokenClass` per token, [n].
            owner: name of the caller, not used before.
            lease_ttl_s: seconds the lease lasts without renewal.

        Raises:
            SessionExists: the id is in use by another owner, or for other tokens; nothing was written.
            ValueError: an id, class or state value is out of range, or the numbers of ids and classes differ.
        """
        packed = _packed(token_ids, classes)
        args = [self._ttl_ms, _named(owner), _milliseconds(lease_ttl_s), *packed, *encoding.encode_state(state)]
        return _lease(owner, await self._run("create", session_id, args))

    async def restore(
        self, session_id: SessionId, lease: Lease, state: SessionState, log: LogSlice, lease_ttl_s: float
    ) -> int:
        """Write anew what a failover has lost of a session whose lease the caller was given; return the log's length.

        Idempotent. What the store still has of the log must be the same; the state becomes the given one.

        Args:
            session_id: the session.
            lease: the caller's.
            state: what the present generation began with.
            log: the whole log, from 0.
            lease_ttl_s: seconds the lease lasts from now.

        Raises:
            Fenced: another owner took it since; nothing was written.
            LogConflict: the store holds other tokens; nothing was written.
            SessionNotFound: it was deleted.
            ValueError: the log does not begin at 0, or a value is out of range.
        """
        if log.start != 0:
            raise ValueError(f"a session is restored from its whole log, not from {log.start}")
        held = (_named(lease.owner), lease.fence, _milliseconds(lease_ttl_s))
        values = encoding.encode_fields({each.name: getattr(state, each.name) for each in fields(state)})
        args = [self._ttl_ms, *held, *_packed(log.token_ids, log.classes), log.kinds, *values]
        return int((await self._run("restore", session_id, args))[1])

    async def acquire_lease(self, session_id: SessionId, owner: str, ttl_s: float, force: bool = False) -> Lease:
        """Take or keep the lease. Idempotent: the present owner gets the same fencing number again.

        Args:
            session_id: the session.
            owner: name of the calling process.
            ttl_s: seconds the lease lasts without renewal.
            force: take it even if another owner's lease has not expired.

        Raises:
            LeaseHeld: another owner's lease has not expired, and no force.
            SessionNotFound: no such session.
        """
        args = [self._ttl_ms, _named(owner), _milliseconds(ttl_s), int(force)]
        return _lease(owner, await self._run("acquire", session_id, args))

    async def renew_lease(self, session_id: SessionId, fence: int, ttl_s: float) -> Lease:
        """Let the lease run `ttl_s` seconds from now. Idempotent. An expired lease that nobody took is renewed.

        Raises:
            Fenced: another owner took it, or it was released.
            SessionNotFound: no such session.
        """
        reply = await self._run("renew", session_id, [self._ttl_ms, fence, _milliseconds(ttl_s)])
        return _lease(reply[3].decode(), reply)

    async def release_lease(self, session_id: SessionId, fence: int) -> None:
        """Give the lease up, so that the next owner needs neither force nor patience, and trim the log. Idempotent.

        Raises:
            Fenced: another owner took it.
            SessionNotFound: no such session.
        """
        await self._run("release", session_id, [self._ttl_ms, fence])

    async def append(
        self,
        session_id: SessionId,
        fence: int,
        start: int,
        token_ids: Sequence[int],
        classes: Sequence[int],
        kinds: bytes = b"",
    ) -> int:
        """Append tokens [start, start + n) to the log and return its length afterwards, in tokens.

        Idempotent: whatever part of the range is in the log already must be the same ids and classes, and only the rest
        is written. After a failover lost the log's tail the caller gets `LogGap` and appends again from its mirror.

        Args:
            session_id: the session.
            fence: fencing number of the caller's lease.
            start: absolute position of the first token, at most the log's length.
            token_ids: ids, [n].
            classes: one `TokenClass` per token, [n].
            kinds: one `TokenKind` per token, [n], or empty; not compared.

        Raises:
            Fenced: the number is not the current one; nothing was written.
            LogGap: `start` is past the log's end; nothing was written.
            LogConflict: other tokens are there; nothing was written.
            SessionNotFound: no such session.
            ValueError: an argument is out of range, or lengths differ.
        """
        if start < 0:
            raise ValueError(f"start must be >= 0, not {start}")
        if kinds and len(kinds) != len(token_ids):
            raise ValueError(f"{len(kinds)} kinds for {len(token_ids)} tokens")
        args = [self._ttl_ms, fence, start, *_packed(token_ids, classes), kinds]
        return int((await self._run("append", session_id, args))[1])

    async def begin_turn(
        self,
        session_id: SessionId,
        fence: int,
        start: int,
        token_ids: Sequence[int],
        classes: Sequence[int],
        state: SessionState,
    ) -> int:
        """Append the prompt of a further turn and set the whole state, both or neither; return the log's length.

        Idempotent: a turn that is there already, with nothing behind it, is left as it is.

        Args:
            session_id: the session.
            fence: fencing number of the caller's lease.
            start: absolute position of the prompt's first token, the log's length.
            token_ids: the prompt, [n].
            classes: one `TokenClass` per token, [n].
            state: the state that the turn begins with.

        Raises:
            Fenced: the number is not the current one; nothing was written.
            LogGap: `start` is past the log's end; nothing was written.
            LogConflict: other tokens are there; nothing was written.
            SessionNotFound: no such session.
            ValueError: an argument is out of range, or lengths differ.
        """
        if start < 0:
            raise ValueError(f"start must be >= 0, not {start}")
        values = encoding.encode_fields({each.name: getattr(state, each.name) for each in fields(state)})
        args = [self._ttl_ms, fence, start, *_packed(token_ids, classes), *values]
        return int((await self._run("begin_turn", session_id, args))[1])

    async def read_log(self, session_id: SessionId, start: int = 0) -> LogSlice:
        """Return the log from `start` (>= 0) to its end. Idempotent. Past the end the slice is empty.

        Raises:
            SessionNotFound: no such session.
            StateUnreadable: the log holds a token class this version does not know.
            ValueError: `start` is negative.
        """
        if start < 0:
            raise ValueError(f"start must be >= 0, not {start}")
        _, length, ids, classes, kinds = await self._run("read_log", session_id, [start])
        # A later turn's prompt is written without kinds, and so they end before the log does until its first token.
        padded = kinds.ljust(length - start, b"\0") if kinds else b""
        return LogSlice(start, encoding.unpack_ids(ids), encoding.unpack_classes(classes), length, padded)

    async def put_logprobs(
        self, session_id: SessionId, fence: int, at: int, logprobs: Sequence[TokenLogprobs], num_top: int
    ) -> None:
        """Write log-probabilities of generated tokens; before the tokens are appended. Idempotent.

        Args:
            session_id: the session.
            fence: fencing number of the caller's lease.
            at: how many generated tokens of the present turn come before them.
            logprobs: one per token, [n].
            num_top: most likeliest tokens of each.

        Raises:
            Fenced: the number is not the current one; nothing was written.
            SessionNotFound: no such session.
        """
        args = [self._ttl_ms, fence, at * record_bytes(num_top), pack(logprobs, num_top)]
        await self._run("put_logprobs", session_id, args, parts=("state", "logprobs"))

    async def read_logprobs(self, session_id: SessionId, num_top: int) -> tuple[TokenLogprobs, ...]:
        """Return the log-probabilities of the present turn, from its first generated token on. Idempotent.

        Args:
            session_id: the session.
            num_top: what they were written with.
        """
        reply = await self._run("read_logprobs", session_id, [], parts=("state", "logprobs"))
        return unpack(reply[1], num_top)

    async def read_state(self, session_id: SessionId) -> SessionState:
        """Return the state. Idempotent.

        Raises:
            SessionNotFound: no such session.
            StateUnreadable: the stored state lacks a required field, or a field cannot be read.
        """
        return encoding.decode_state(_pairs((await self._run("read_state", session_id, []))[1]))

    async def update_state(self, session_id: SessionId, fence: int, **fields: Any) -> None:
        """Set fields of the state to new values, all at once; others stay. Idempotent.

        Args:
            session_id: the session.
            fence: fencing number of the caller's lease.
            **fields: new values of fields of `SessionState`.

        Raises:
            Fenced: the number is not the current one; nothing was written.
            SessionNotFound: no such session.
            ValueError: a name is no field of `SessionState`, or its value does not fit.
        """
        if fields:
            await self._run("update_state", session_id, [self._ttl_ms, fence, *encoding.encode_fields(fields)])

    async def put_kv_location(self, session_id: SessionId, fence: int, location: KvLocation) -> None:
        """Note which prefix of the session's KV a worker holds now; an empty prefix removes the worker. Idempotent.

        Of more than `MAX_KV_LOCATIONS` workers the longest unused is forgotten.

        Raises:
            Fenced: the number is not the current one; nothing was written.
            SessionNotFound: no such session.
        """
        args = [self._ttl_ms, fence, location.worker_id, encoding.encode_location(location), MAX_KV_LOCATIONS]
        await self._run("put_kv", session_id, args)

    async def kv_locations(self, session_id: SessionId) -> tuple[KvLocation, ...]:
        """Return the KV directory, longest prefix first. Idempotent.

        Raises:
            SessionNotFound: no such session.
            StateUnreadable: an entry cannot be read.
        """
        raw = _pairs((await self._run("read_kv", session_id, []))[1])
        locations = [encoding.decode_location(worker_id, value) for worker_id, value in raw.items()]
        return tuple(sorted(locations, key=lambda location: (-location.prefix_len, location.worker_id)))

    async def delete(self, session_id: SessionId, fence: int | None = None) -> bool:
        """Remove everything of a session; return whether it was there. Idempotent.

        What stays for an hour is a mark, for a lease holder that would otherwise take the session for lost. A repeat by
        the store after a lost reply returns False although the first try did the work.

        Args:
            session_id: the session.
            fence: refuse if this is not the current fencing number; None deletes whoever owns the session.

        Raises:
            Fenced: the number is not the current one; nothing was removed.
        """
        args = ["" if fence is None else fence, min(REMEMBERED_MS, self._ttl_ms)]
        return bool((await self._run("delete", session_id, args, parts=(*PARTS, "logprobs")))[1])

    async def _run(self, name: str, session_id: SessionId, args: list[Any], parts: Sequence[str] = PARTS) -> list[Any]:
        """Run a script on a session's keys and turn a refusal into its error; all of them may be repeated."""
        reply: list[Any] = await self._scripts.run(name, self._keys(session_id, parts), args, idempotent=True)
        if reply[0] != b"OK":
            raise _refusal(session_id, reply)
        return reply

    def _keys(self, session_id: SessionId, parts: Sequence[str] = PARTS) -> list[str]:
        if not session_id or "{" in session_id or "}" in session_id:
            raise InvalidRequest("session_id", session_id, "a text that is not empty and contains no braces")
        return [f"{self._prefix}:{{{session_id}}}:{part}" for part in parts]


def _refusal(session_id: SessionId, reply: list[Any]) -> StoreError:
    """Return the error for a script's reply that is not OK."""
    match reply:
        case [b"EXISTS"]:
            return SessionExists(f"session {session_id} exists already")
        case [b"NOT_FOUND"]:
            return SessionNotFound.of(session_id)
        case [b"HELD", owner]:
            return LeaseHeld(f"session {session_id} is held by {owner.decode()}", owner.decode())
        case [b"FENCED", current]:
            return Fenced(f"session {session_id} is not ours any more: its fencing number is {current}", current)
        case [b"GAP", length]:
            return LogGap(f"the log of session {session_id} ends at {length}, before the range", length)
        case [b"CONFLICT", length]:
            return LogConflict(f"the log of session {session_id} (length {length}) holds other tokens there", length)
        case _:
            return StoreError(f"the session store gave an answer this version does not know: {reply!r}")


def _lease(owner: str, reply: list[Any]) -> Lease:
    return Lease(owner, reply[1], int(reply[2]) / 1000)


def _pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _packed(token_ids: Sequence[int], classes: Sequence[int]) -> tuple[bytes, bytes]:
    if len(token_ids) != len(classes):
        raise ValueError(f"{len(classes)} classes for {len(token_ids)} tokens")
    return encoding.pack_ids(token_ids), encoding.pack_classes(classes)


def _named(owner: str) -> str:
    if not owner:
        raise ValueError("a lease needs an owner's name")  # an empty owner is how a released lease is written
    return owner


def _milliseconds(seconds: float) -> int:
    if not seconds > 0:
        raise ValueError(f"a time to live must be positive, not {seconds}")
    return max(1, round(seconds * 1000))
