"""Who sits at this worker: one seat per open `Draft` stream, from the event loop's side.

Decides who may sit down (generation, room, draining), and brings orders to the model thread and reports back. A session
is drafted for by one generation at a time: a higher one takes the seat over, a lower one is refused for as long as it
is remembered.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from draft_service.drafters.protocol import DrafterInfo
from draft_service.orders import (
    Closed,
    CloseSession,
    Died,
    OpenSession,
    Order,
    Outgoing,
    Report,
    Reported,
    TakeCommit,
    TakeHint,
)
from draft_service.proposals import ProposeStreams
from draft_service.session import SessionKey
from draft_service.traces import DraftTrace, draft_trace
from outrider.errors import (
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    OutriderError,
    ProtocolError,
    ResourceExhausted,
    Unavailable,
)
from outrider.grammar import Grammars
from outrider.history import GrammarState
from outrider.ids import Generation, SessionId
from outrider.messages import (
    DraftClose,
    DraftCommit,
    DraftOpen,
    DraftRequestMessage,
    DraftResponseMessage,
    Draining,
    ProposeMessage,
    RollbackHint,
)
from outrider.parameters import validate
from outrider.rpc import Broken, Ended, Malformed, Stream
from outrider.sparing import Sparing
from outrider.telemetry import note_ids
from outrider.tracing import TraceParent, Tracer

log = logging.getLogger(__name__)

MAX_REMEMBERED = 4096
"""Sessions whose highest generation is remembered."""
OPEN_TIMEOUT_S = 10.0
"""How long a new stream may be silent."""
CLOSE_TIMEOUT_S = 2.0
"""How long the last status may take; the model thread may be in the middle of a token step, or hang."""

DraftStream = Stream[DraftResponseMessage, DraftRequestMessage]


@dataclass(eq=False)
class Seat:
    """One open stream."""

    key: SessionKey
    verifier_address: str
    stream: DraftStream
    ended: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done when the session is over, with the error that ended it if one did."""
    trace: DraftTrace | None = None
    """Told of its proposals; None: it is not traced."""
    closing: bool = False
    """Whether the orchestrator has closed it, and only the last status is waited for."""

    def end(self, error: OutriderError | None = None) -> None:
        """End the session's stream, once."""
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


class Seats:
    """All open streams; used on the event loop only."""

    def __init__(
        self, info: DrafterInfo, capacity: int, submit: Callable[[Order], None], proposals: ProposeStreams
    ) -> None:
        """Make an empty table.

        Args:
            info: of the drafter.
            capacity: most sessions at once.
            submit: gives orders to the model thread; must not block.
            proposals: streams to the verifiers, with the metrics of the worker.
        """
        self._info, self._capacity = info, capacity
        self._submit, self._proposals = submit, proposals
        self._sparing = Sparing()
        self._seats: dict[SessionId, Seat] = {}
        self._highest: OrderedDict[SessionId, Generation] = OrderedDict()
        self.empty = asyncio.Event()
        """Set while nobody sits here."""
        self.empty.set()
        self.tracer: Tracer | None = None
        """Where spans go; None: nothing is traced."""
        self.grammars: Grammars | None = None
        """Compiles requests' grammars; None: drafts ignore them."""
        self.draining = False
        self.trouble: OutriderError | None = None
        """Why nobody may sit down at present, other than draining."""

    def __len__(self) -> int:
        return len(self._seats)

    # -- one stream --------------------------------------------------------------------------------------------------

    async def serve(self, stream: DraftStream, trace: TraceParent | None = None) -> None:
        """Serve one stream to its end.

        Args:
            stream: of the orchestrator.
            trace: the generation's span; None: it has none.

        Raises:
            OutriderError: why it ended early; the stream's status.
        """
        opened = await _first(stream)
        note_ids(session=opened.session_id, trace=trace.name if trace is not None else "")
        self._check(opened)
        # Before anybody sits down: nothing may wait between that and the order, or a newer opening could overtake it.
        grammar = await self._grammar(opened)
        self._admit(opened)
        key, made = SessionKey(opened.session_id, opened.epoch.generation), draft_trace(self.tracer, trace)
        seat = Seat(key, opened.verifier_address, stream, trace=made)
        self._sit_down(seat)
        try:
            self._submit(OpenSession(opened, grammar))
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(self._read(seat))
                await seat.ended
                reading.cancel()
        finally:
            self._stand_up(seat)

    async def _grammar(self, opened: DraftOpen) -> GrammarState | None:
        """Return where a request's grammar begins, compiled on a thread of its own; without it drafts are worse."""
        if self.grammars is None or opened.sampling.grammar is None:
            return None
        try:
            return await asyncio.to_thread(self.grammars.begin, opened.sampling)
        except OutriderError as error:
            log.warning("drafts of session %s ignore its grammar: %s", opened.session_id, error)
            return None

    def _check(self, opened: DraftOpen) -> None:
        """Refuse an opening that says what this worker never takes."""
        validate(opened.sampling, self._info.vocab_len)
        self._check_ids("open.token_ids", opened.token_ids)
        self._check_ids("open.prediction", opened.prediction)
        if opened.drafter not in ("", self._info.kind, *self._info.drafters):
            offered = ", ".join(self._info.drafters or (self._info.kind,))
            raise FailedPrecondition(f"open.drafter: {opened.drafter!r} is not one of {offered}")

    def _admit(self, opened: DraftOpen) -> None:
        """Refuse an opening that is not allowed at present."""
        if self.draining:
            raise Unavailable("the draft worker is draining")
        if self.trouble is not None:
            raise self.trouble
        generation, highest = opened.epoch.generation, self._highest.get(opened.session_id, Generation())
        present = self._seats.get(opened.session_id)
        if generation < highest or (present is not None and generation == present.key.generation):
            raise FailedPrecondition(f"generation {generation} of the session came after {highest}")
        if present is None and len(self._seats) >= self._capacity:
            raise ResourceExhausted(f"all {self._capacity} sessions of the draft worker are taken")

    def _check_ids(self, field_name: str, token_ids: Sequence[int]) -> None:
        if token_ids and max(token_ids) >= self._info.vocab_len:
            raise ProtocolError(f"{field_name}: id {max(token_ids)} is not in 0 .. {self._info.vocab_len - 1}")

    def _sit_down(self, seat: Seat) -> None:
        """Take a session's seat, from whoever has it in a lower generation."""
        session_id, generation = seat.key
        present = self._seats.get(session_id)
        if present is not None:
            present.end(FailedPrecondition(f"superseded by generation {generation}"))
        self._seats[session_id] = seat
        self.empty.clear()
        self._highest[session_id] = generation
        self._highest.move_to_end(session_id)
        while len(self._highest) > MAX_REMEMBERED:
            self._highest.popitem(last=False)
        self._proposals.acquire(seat.verifier_address)

    def _stand_up(self, seat: Seat) -> None:
        """Clean up after exactly this opening; a newer one of the session is left alone."""
        self._proposals.release(seat.verifier_address)
        if self._seats.get(seat.key.session_id) is seat:
            del self._seats[seat.key.session_id]
        if not self._seats:
            self.empty.set()
        if not seat.closing:
            self._submit(CloseSession(seat.key, keep_kv=True))

    async def _read(self, seat: Seat) -> None:
        """Bring what arrives to the model thread, until the stream ends or the session is closed."""
        while True:
            match await seat.stream.receive():
                case DraftCommit() as commit:
                    self._check_ids("commit.token_ids", commit.token_ids)
                    self._submit(TakeCommit(seat.key, commit))
                    if seat.trace is not None:
                        seat.trace.told()
                case DraftClose(keep_kv):
                    seat.closing = True
                    self._submit(CloseSession(seat.key, keep_kv))
                    await asyncio.sleep(CLOSE_TIMEOUT_S)  # cancelled by `Closed`
                    seat.end()
                    return
                case DraftOpen():
                    raise ProtocolError("a session is opened once per stream")
                case Malformed(error):
                    # Dropped: if it was a commit, the next one shows the gap and is answered with `missing_from`.
                    if self._sparing.allows():
                        log.warning("session %s: %s", seat.key.session_id, error)
                    self._proposals.metrics.malformed.inc()
                case Ended() | Broken():
                    seat.end()
                    return

    # -- the model thread's reports ----------------------------------------------------------------------------------

    def deliver(self, reports: Sequence[Report]) -> None:
        """Pass on reports of the model thread, in order."""
        for report in reports:
            match report:
                case Outgoing():
                    self._proposals.send(report.verifier_address, report.message)
                    if self.tracer is not None:
                        self._trace(report.message)
                case Reported():
                    self._tell(report.key, report)
                case Closed():
                    self._end(report.key, None)
                case Died():
                    self._tell(report.key, Reported(report.key, report.status))
                    self._end(report.key, report.error)
                case _:
                    assert_never(report)

    def _trace(self, message: ProposeMessage) -> None:
        seat = self._seats.get(message.session_id)
        if seat is not None and seat.trace is not None and seat.key.generation == message.epoch.generation:
            seat.trace.said(message)

    def _tell(self, key: SessionKey, report: Reported) -> None:
        seat = self._find(key)
        if seat is not None:
            try:
                seat.stream.send(report.status)
            except Unavailable as error:  # the orchestrator does not read
                seat.end(error)

    def _end(self, key: SessionKey, error: OutriderError | None) -> None:
        seat = self._find(key)
        if seat is not None:
            seat.end(error)

    def _find(self, key: SessionKey) -> Seat | None:
        seat = self._seats.get(key.session_id)
        return seat if seat is not None and seat.key == key else None

    # -- everybody ---------------------------------------------------------------------------------------------------

    def take_hint(self, address: str, hint: RollbackHint) -> None:
        """Bring a hint to its session, if it comes from that session's own verifier and names a token there is."""
        seat = self._seats.get(hint.session_id)
        knows = seat is not None and seat.verifier_address == address
        unknown_token = hint.token_id is not None and hint.token_id >= self._info.vocab_len
        if seat is None or not knows or unknown_token or hint.epoch.generation != seat.key.generation:
            self._proposals.metrics.hints.labels("foreign").inc()
        else:
            self._submit(TakeHint(seat.key, hint))

    def refuse_verifier(self, address: str, error: OutriderError) -> None:
        """End the sessions of a verifier that does not want this worker."""
        for seat in list(self._seats.values()):
            if seat.verifier_address == address:
                seat.end(error)

    def end_all(self, error: OutriderError) -> None:
        """End all sessions by an error."""
        for seat in list(self._seats.values()):
            seat.end(error)

    def start_draining(self, reason: str) -> None:
        """Let nobody sit down any more, and tell those who sit."""
        self.draining = True
        for seat in list(self._seats.values()):
            try:
                seat.stream.send(Draining(reason))
            except Unavailable as error:
                seat.end(error)


async def _first(stream: DraftStream) -> DraftOpen:
    """Return the opening message of a stream.

    Raises:
        ProtocolError: something else came first.
        DeadlineExceeded: nothing came in time.
        Cancelled: the caller left before.
    """
    try:
        message = await stream.receive(OPEN_TIMEOUT_S)
    except TimeoutError:
        raise DeadlineExceeded(f"no DraftOpen within {OPEN_TIMEOUT_S:g} s") from None
    match message:
        case DraftOpen():
            return message
        case Malformed() | Broken():
            raise message.error
        case Ended():
            raise Cancelled("the stream ended before its DraftOpen")
        case _:
            raise ProtocolError(f"{type(message).__name__} came before the opening")
