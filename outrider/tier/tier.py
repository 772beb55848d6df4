"""Loads and stores blocks on threads of its own, so that the thread that owns the model never waits for a server.

The model's thread hands over keys or bytes and goes on; what cannot be taken at once is refused and counted. Two
threads with a connection each, so that loading never stands behind writing. Nothing here raises because of the server.
"""

import logging
import queue
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Event, Lock, Thread

from outrider.certificates import TlsMaterial
from outrider.tier.breaker import Breaker
from outrider.tier.format import Identity, RefusedBlock, seal, unseal
from outrider.tier.server import BlockServer, TierError

log = logging.getLogger(__name__)

GROUP_BYTES = 2 << 20
"""Most bytes of one read, at least one block: a larger reply keeps a server from its other clients for long."""
MAX_GROUP = 32
MAX_LOADS = 256
"""Loads that wait for their turn."""
MAX_TOUCHED = 1024
"""Blocks of one refreshing call."""
_POLL_S = 0.05
"""How often a thread that waits looks whether it is still wanted."""


@dataclass(frozen=True, slots=True)
class TierSettings:
    """What can be chosen about a tier."""

    url: str
    ttl_s: float = 3600.0
    """How long a block stays after it was last of use."""
    budget_bytes: int = 1 << 30
    """Most bytes of this engine's blocks in the server."""
    in_flight_bytes: int = 64 << 20
    """Most bytes copied off and not yet stored, and as many loaded and not yet taken."""
    deadline_s: float = 1.0
    """Longest wait for a load, and for the next bytes of the server."""
    tls: TlsMaterial | None = None
    """For `rediss://`; None: what the URL names, or the system's CAs."""


class Tally:
    """Counts of several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, name: str, label: str = "", amount: float = 1) -> None:
        """Add to one count.

        Args:
            name: of the count.
            label: what kind of it.
            amount: how much.
        """
        with self._lock:
            self._counts[name, label] += amount  # type: ignore[assignment]  # seconds are fractions

    def counts(self) -> dict[tuple[str, str], float]:
        """Return all counts of this moment by (name, label)."""
        with self._lock:
            return dict(self._counts)

    def of(self, name: str, label: str = "") -> float:
        """Return one count."""
        return self.counts().get((name, label), 0)


class Load:
    """Blocks under way to one session: filled by the loading thread, emptied by the model's."""

    def __init__(self, keys: Sequence[bytes], max_waiting: int, notify: Callable[[], None]) -> None:
        """Ask for nothing yet.

        Args:
            keys: of the blocks, in the order of the text.
            max_waiting: most blocks that may be here without having been taken.
            notify: called on the loading thread when there is something new.
        """
        self.keys = tuple(keys)
        self.notify = notify
        self.asked_s = time.perf_counter()
        self.seconds = 0.0
        """From asking to the last block; final once `ended` is set."""
        self.num_loaded = 0
        self.ended = Event()
        """Set behind the last block."""
        self.cancelled = Event()
        """Set by the model's thread: nothing more is wanted."""
        self._arrived: queue.Queue[tuple[bytes, memoryview]] = queue.Queue(max_waiting)

    def put(self, key: bytes, data: memoryview) -> bool:
        """Hand a block over, waiting for room; False if it is not wanted any more."""
        while not self.cancelled.is_set():
            try:
                self._arrived.put((key, data), timeout=_POLL_S)
            except queue.Full:
                continue
            self.num_loaded += 1
            self.seconds = time.perf_counter() - self.asked_s
            self.notify()
            return True
        return False

    def take(self) -> tuple[bytes, memoryview] | None:
        """Return the next block that has arrived, if one has."""
        try:
            return self._arrived.get_nowait()
        except queue.Empty:
            return None

    def end(self) -> None:
        """No more blocks come."""
        if not self.num_loaded:
            self.seconds = time.perf_counter() - self.asked_s
        self.ended.set()
        self.notify()


@dataclass(frozen=True, slots=True)
class _Store:
    key: bytes
    blob: bytearray


@dataclass(frozen=True, slots=True)
class _Refresh:
    keys: tuple[bytes, ...]
    on_missing: Callable[[list[bytes]], None]


class BlockTier:
    """See the module's head. Its methods never block; any thread may call them."""

    def __init__(self, identity: Identity, settings: TierSettings, clock: Callable[[], float] = time.monotonic) -> None:
        """Make a tier; nothing is connected before it is used.

        Args:
            identity: of the engine whose blocks these are.
            settings: what can be chosen.
            clock: rising seconds, for pauses after failures.
        """
        self.identity = identity
        self.settings = settings
        self.tally = Tally()
        self._clock = clock
        blob_len = identity.blob_len
        self._max_blocks = max(1, settings.in_flight_bytes // blob_len)
        self._group = max(1, min(MAX_GROUP, GROUP_BYTES // blob_len))
        self._loads: queue.Queue[Load | None] = queue.Queue(MAX_LOADS)
        self._stores: queue.Queue[_Store | _Refresh | None] = queue.Queue(self._max_blocks)
        self._reading, self._writing = Breaker(), Breaker()
        self._stopping = False
        self._reader, self._writer = self._connect(), self._connect()
        self._threads = [
            Thread(target=self._read_all, name="kv-tier-read", daemon=True),
            Thread(target=self._write_all, name="kv-tier-write", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # -- for the model's thread ------------------------------------------------------------------------------------

    def load(self, keys: Sequence[bytes], notify: Callable[[], None]) -> Load | None:
        """Begin to load blocks of one text, in order, up to the first that is not there; None if it cannot be done now.

        Args:
            keys: at least one.
            notify: called on another thread whenever there is something to take, and at the end.
        """
        if self._reading.is_open(self._clock()):
            self.tally.add("skipped", "breaker")
            return None
        load = Load(keys, self._max_blocks, notify)
        try:
            self._loads.put_nowait(load)
        except queue.Full:
            self.tally.add("skipped", "queue_full")
            return None
        return load

    def give_up(self, load: Load) -> None:
        """The time for a load has run out; what has arrived may still be taken."""
        load.cancelled.set()
        self.tally.add("skipped", "deadline")
        self._reading.failed(self._clock())

    @property
    def can_store(self) -> bool:
        """Whether storing is worth trying: the server has answered lately."""
        return not self._writing.is_open(self._clock())

    @property
    def has_room(self) -> bool:
        """Whether one more block may be copied off."""
        return not self._stores.full()

    @property
    def in_flight_bytes(self) -> int:
        """Bytes copied off and not yet stored, about."""
        return self._stores.qsize() * self.identity.blob_len

    def store(self, key: bytes, blob: bytearray) -> None:
        """Store a block later; dropped and counted if there is no room.

        Args:
            key: of its content.
            blob: with the block behind the place of the header; not to be changed any more.
        """
        self._enqueue(_Store(key, blob))

    def refresh(self, keys: Sequence[bytes], on_missing: Callable[[list[bytes]], None]) -> None:
        """Give blocks of one text their whole TTL again, later.

        Args:
            keys: in the order of the text.
            on_missing: told on another thread which of them are not there, if any.
        """
        for first in range(0, len(keys), MAX_TOUCHED):
            self._enqueue(_Refresh(tuple(keys[first : first + MAX_TOUCHED]), on_missing))

    def close(self, timeout_s: float) -> bool:
        """Store what has been handed over, and end the threads; say whether all of it was done in time. Blocks."""
        until_s = time.monotonic() + timeout_s
        self._end_loading()
        try:
            self._stores.put(None, timeout=timeout_s)
        except queue.Full:
            log.warning("%d KV blocks could not be stored in time", self._stores.qsize())
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    # -- its own threads -------------------------------------------------------------------------------------------

    def _connect(self) -> BlockServer:
        settings = self.settings
        max_blocks = max(1, settings.budget_bytes // self.identity.blob_len)
        return BlockServer(
            settings.url,
            self.identity.namespace,
            ttl_s=settings.ttl_s,
            max_blocks=max_blocks,
            timeout_s=settings.deadline_s,
            tls=settings.tls,
        )

    def _enqueue(self, job: _Store | _Refresh) -> None:
        try:
            self._stores.put_nowait(job)
        except queue.Full:
            self.tally.add("dropped", "queue_full")

    def _end_loading(self) -> None:
        self._stopping = True
        try:
            self._loads.put_nowait(None)
        except queue.Full:
            log.debug("the loading thread ends after its present load")

    def _read_all(self) -> None:
        try:
            # Connecting is no part of what a block costs, by which the first load would be judged.
            self._reader.ping()
        except TierError as error:
            self._note_failure(self._reading, "loading", error)
        while not self._stopping:
            load = self._loads.get()
            if load is None:
                break
            try:
                self._fetch(load)
            except TierError as error:
                self._note_failure(self._reading, "loading", error)
            except Exception:
                # A defect here must not leave a session waiting: it computes its KV, and the log says why.
                log.exception("loading KV blocks has failed")
            load.end()
        self._reader.close()

    def _fetch(self, load: Load) -> None:
        started_s, missed = time.perf_counter(), False
        for first in range(0, len(load.keys), self._group):
            if load.cancelled.is_set() or self._stopping:
                break
            keys = load.keys[first : first + self._group]
            blobs = self._reader.get(keys)
            if not load.cancelled.is_set():
                self._reading.succeeded()
            if not all(self._deliver(load, key, blob) for key, blob in zip(keys, blobs, strict=True)):
                missed = True
                break
        self.tally.add("seconds", "loading", time.perf_counter() - started_s)
        if load.num_loaded and not missed:
            self._reader.touch(load.keys[:MAX_TOUCHED])

    def _deliver(self, load: Load, key: bytes, blob: bytes | None) -> bool:
        """Check one block and hand it over; say whether the next one is of use."""
        if blob is None:
            self.tally.add("missed")
            return False
        try:
            data = unseal(blob, key, self.identity)
        except RefusedBlock as error:
            self.tally.add("refused", error.reason)
            log.warning("a stored KV block was refused and deleted: %s", error.reason)
            self._reader.drop(key)
            return False
        if not load.put(key, data):
            return False
        self.tally.add("loaded")
        self.tally.add("bytes", "loading", len(blob))
        return True

    def _write_all(self) -> None:
        while True:
            job = self._stores.get()
            if job is None:
                break
            try:
                self._write(job)
            except TierError as error:
                self._note_failure(self._writing, "storing", error)
                self.tally.add("dropped", error.reason)
            except Exception:
                log.exception("storing a KV block has failed")
                self.tally.add("dropped", "defect")
        self._writer.close()

    def _write(self, job: _Store | _Refresh) -> None:
        if self._writing.is_open(self._clock()):
            self.tally.add("dropped", "breaker")
            return
        started_s = time.perf_counter()
        if isinstance(job, _Refresh):
            found = self._writer.touch(job.keys)
            missing = [key for key, is_there in zip(job.keys, found, strict=True) if not is_there]
            if missing:
                job.on_missing(missing)
        elif self._writer.touch([job.key])[0]:
            self.tally.add("present")
        else:
            self._put(job)
        self._writing.succeeded()
        self.tally.add("seconds", "storing", time.perf_counter() - started_s)

    def _put(self, job: _Store) -> None:
        seal(job.blob, job.key, self.identity)
        self.tally.add("evicted", amount=self._writer.put(job.key, memoryview(job.blob)))
        self.tally.add("stored")
        self.tally.add("bytes", "storing", len(job.blob))

    def _note_failure(self, breaker: Breaker, action: str, error: TierError) -> None:
        was_open = breaker.is_open(self._clock())
        breaker.failed(self._clock())
        self.tally.add("failures", error.reason)
        if breaker.is_open(self._clock()) and not was_open:
            log.warning("%s KV blocks pauses, the tier's server fails (%s): %s", action, error.reason, error)
