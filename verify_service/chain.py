"""The verifier's chain of one session: which tokens are tested, when, and what ends an epoch.

A state machine without I/O, clock, randomness or numbers: events in, commands out. The engine carries the commands
out and answers every `Test` with `Judged` before it sends another event, so no event ever meets a test under way.

What it decides: whether a proposal continues the chain, is stale, or leaves a gap; which run is tested next and on
which rows; when the verifier draws a token itself; when patience runs. What it may not do: look at a token to decide
*whether* it is tested (`docs/protocol.md`, non-anticipation).

Invariants, checked after every step:

* KV length == committed length while a row is held, == committed length - 1 otherwise: the last token has not been fed;
* every token the verifier draws itself ends the epoch: round + 1, the rest of the chain forgotten;
* a token is tested at most once, and only as the continuation of what is committed in its own epoch;
* nothing is committed at or past `commit_limit`.
"""

from collections import deque
from dataclasses import dataclass
from typing import assert_never

from outrider.errors import ProtocolError
from outrider.ids import Epoch, Mode, SessionId, TokenKind, WorkerId
from outrider.messages import (
    DecodeAttach,
    DecodeOpen,
    DecodeProgress,
    Pass,
    Proposal,
    ProposalHeader,
    ProposeMessage,
    SparseRow,
    Speculation,
    VerdictCause,
)
from verify_service.events import (
    Arrived,
    Command,
    Count,
    Event,
    Judged,
    Report,
    Rewind,
    Scheduled,
    StartTimer,
    StreamBroken,
    Test,
    TimerExpired,
    TimerKind,
)

MAX_PARKED = 16
"""Messages kept for a generation that has not been announced yet."""
MAX_AHEAD = 1024
"""Most tokens a chain may hold beyond the committed length, whatever a drafter claims."""
MAX_EXPIRIES = 3
"""Patience running out so often in a row stops the waiting until a drafter is attached again."""
MAX_GARBAGE = 8
"""Garbage messages of one drafter before it is quarantined for the session."""


@dataclass(slots=True)
class _Run:
    """What is left of one proposal."""

    token_ids: tuple[int, ...]
    rows: tuple[SparseRow, ...]

    def take(self, count: int) -> tuple[tuple[int, ...], tuple[SparseRow, ...]]:
        """Remove and return the first `count` tokens and their rows."""
        taken = self.token_ids[:count], self.rows[:count]
        self.token_ids, self.rows = self.token_ids[count:], self.rows[count:]
        return taken


class Chain:
    """State of one session on the verifier; see the module's head."""

    def __init__(self, opened: DecodeOpen, vocab_len: int) -> None:
        """Start with the log's tokens committed, no drafter, and their KV up to the last but one.

        Args:
            opened: the session; `token_ids` is not empty.
            vocab_len: ids at or past it are garbage.
        """
        self.session_id: SessionId = opened.session_id
        self.mode: Mode = opened.mode
        self.vocab_len = vocab_len
        self.tokens: list[int] = list(opened.token_ids)
        """Committed ids, prompt included."""
        self.epoch = Epoch(opened.generation)
        self.worker_id: WorkerId | None = opened.worker_id or None
        self.held = False
        self.commit_limit = opened.commit_limit
        self.speculation: Speculation = opened.speculation
        self.patience_s = opened.patience_s
        self.guarantee_void = 0
        self._max_gamma = opened.speculation.gamma
        self._runs: deque[_Run] = deque()
        self._seen_len = 0
        self._limit = -1
        self._header: ProposalHeader | None = None
        self._plain_until = 0
        self._plain_due = False
        self._expiries = 0
        self._garbage = 0
        self._parked: list[Arrived] = []
        self._timer: tuple[TimerKind, int] | None = None
        self._timer_count = 0
        self._testing: Test | None = None
        self._unreported_kinds: list[TokenKind] = []
        self._unreported_tested = 0
        self._rides = False
        self._reported_len = len(self.tokens)

    # -- what the engine may ask -----------------------------------------------------------------------------------

    @property
    def committed_len(self) -> int:
        """Tokens committed so far, prompt included."""
        return len(self.tokens)

    @property
    def kv_len(self) -> int:
        """Length the session's KV has between passes."""
        return self.committed_len if self.held else self.committed_len - 1

    @property
    def chain_end(self) -> int:
        """Position the next proposal must start at."""
        return self.committed_len + sum(len(run.token_ids) for run in self._runs)

    @property
    def wants_rows(self) -> int:
        """Rows the model would have to compute for the next test; 0 when there is none, or a held row is enough."""
        if self.committed_len >= self.commit_limit:
            return 0
        if self._runs:
            return self._run_len() + (0 if self.held else 1)
        return 1 if self._draw_kind() is not None and not self.held else 0

    def step(self, event: Event) -> list[Command]:
        """Take one event; return what must be done, in order.

        Raises:
            ProtocolError: the engine broke the order of `Test` and `Judged`.
        """
        if (self._testing is None) == isinstance(event, Judged):
            raise ProtocolError(f"{type(event).__name__} while {'' if self._testing else 'not '}testing")
        out: list[Command] = []
        match event:
            case Scheduled():
                self._schedule(event.max_rows, out)
            case Judged():
                self._judged(event, out)
            case Arrived():
                self._arrived(event, out)
            case DecodeAttach():
                self._attach(event, out)
            case DecodeProgress():
                self._progress(event)
            case StreamBroken():
                if event.worker_id == self.worker_id:
                    self._reset(VerdictCause.RESET, out)
            case TimerExpired():
                self._expired(event, out)
            case _:
                assert_never(event)
        if self._testing is None:
            self._wait(out)
        return out

    # -- control ---------------------------------------------------------------------------------------------------

    def _attach(self, event: DecodeAttach, out: list[Command]) -> None:
        """Announce a generation; an empty worker id means nobody drafts. Lower or equal ones are late."""
        if event.generation <= self.epoch.generation:
            out.append(Count("stale"))
            return
        self._flush(VerdictCause.TESTED, out)
        self._forget_chain(out)
        self.epoch = Epoch(event.generation)
        self.worker_id = event.worker_id or None
        self._expiries = self._garbage = self._plain_until = 0
        self._report(self.epoch, VerdictCause.ATTACHED, out)
        parked, self._parked = self._parked, []
        for arrived in parked:
            self._arrived(arrived, out)

    def _progress(self, event: DecodeProgress) -> None:
        """Take new limits; those of an older generation are late."""
        if event.generation < self.epoch.generation:
            return
        self.commit_limit = max(self.commit_limit, event.commit_limit)
        self.speculation = event.speculation
        self.patience_s = event.patience_s
        self._max_gamma = max(self._max_gamma, event.speculation.gamma)

    def _reset(self, cause: str, out: list[Command]) -> None:
        """End the epoch without a token, so that the drafter starts again from the committed length."""
        self._flush(VerdictCause.TESTED, out)
        ended = self.epoch
        self._end_epoch(out)
        self._plain_until = 0
        self._report(ended, cause, out)

    # -- taking proposals ------------------------------------------------------------------------------------------

    def _arrived(self, event: Arrived, out: list[Command]) -> None:
        """Sort a message by its epoch: parked, stale, garbage, or taken."""
        message = event.message
        if message.epoch.generation > self.epoch.generation:
            self._park(event, out)
        elif message.epoch < self.epoch or event.worker_id != self.worker_id:
            out.append(Count("stale"))
        elif message.epoch > self.epoch or not self._is_sound(message):
            self._take_garbage(out)
        elif message.base_len < self.chain_end:
            out.append(Count("duplicate"))
        elif message.base_len > self.chain_end or self._misses_header(message):
            out.append(Count("gap"))
            self._reset(VerdictCause.RESET, out)
        else:
            self._take(message)

    def _park(self, event: Arrived, out: list[Command]) -> None:
        if len(self._parked) < MAX_PARKED:
            self._parked.append(event)
        else:
            out.append(Count("parked_overflow"))

    def expire_parked(self) -> int:
        """Drop what was parked for a generation that nobody announced in time; return how many messages."""
        dropped, self._parked = len(self._parked), []
        return dropped

    def _take_garbage(self, out: list[Command]) -> None:
        """Drop and count; a drafter that keeps sending garbage is cut off from this session."""
        out.append(Count("garbage"))
        self._garbage += 1
        if self._garbage >= MAX_GARBAGE:
            self.worker_id = None
            self._reset(VerdictCause.QUARANTINED, out)

    def _is_sound(self, message: ProposeMessage) -> bool:
        """Whether a message of the current epoch can be what an honest drafter sends."""
        match message:
            case ProposalHeader():
                return self.mode.needs_rows and 0 < message.count <= self._max_gamma
            case Pass():
                return message.until_len > message.base_len
            case Proposal():
                return self._is_sound_proposal(message)

    def _is_sound_proposal(self, proposal: Proposal) -> bool:
        count = len(proposal.token_ids)
        end = proposal.base_len + count
        return (
            0 < count <= self._max_gamma
            and len(proposal.rows) == (count if self.mode.needs_rows else 0)
            and proposal.seen_len <= self._reported_len
            and end <= proposal.limit <= self._reported_len + MAX_AHEAD
            and all(0 <= token < self.vocab_len for token in proposal.token_ids)
            and all(_row_fits(row, self.vocab_len) for row in proposal.rows)
        )

    def _misses_header(self, message: ProposeMessage) -> bool:
        """Whether a proposal that needs a header before it came without: the header was lost."""
        if not self.mode.needs_rows or not isinstance(message, Proposal):
            return False
        return self._header is None or self._header.count != len(message.token_ids)

    def _take(self, message: ProposeMessage) -> None:
        """The message continues the chain."""
        self._expiries = 0
        self._plain_due = False
        match message:
            case ProposalHeader():
                self._header = message
            case Pass():
                self._plain_until = message.until_len
            case Proposal():
                self._header = None
                self._runs.append(_Run(message.token_ids, message.rows))
                self._seen_len, self._limit = message.seen_len, message.limit

    # -- testing ---------------------------------------------------------------------------------------------------

    def _schedule(self, max_rows: int, out: list[Command]) -> None:
        """Hand out the next test, or report what is committed when there is none to do now."""
        test = self._next_test(max_rows)
        if test is not None and not test.feed:
            pass
        elif test is None or not self._rides:
            self._flush(VerdictCause.TESTED, out)
        if test is not None:
            self._testing = test
            out.append(test)

    def _next_test(self, max_rows: int) -> Test | None:
        if self.committed_len >= self.commit_limit:
            return None
        if self._runs and self.mode is not Mode.BLOCK and self.held:
            return self._test(1, feed=False)
        if self._runs:
            return self._test_run(max_rows)
        kind = self._draw_kind()
        if kind is None or (not self.held and max_rows < 1):
            return None
        feed = () if self.held else (self.tokens[-1],)
        return Test(self.epoch, self.committed_len, feed, self.held, (), (), kind)

    def _run_len(self) -> int:
        """Tokens that may be tested in one pass: a whole block, or all that has arrived, below the commit limit."""
        room = self.commit_limit - self.committed_len
        waiting = len(self._runs[0].token_ids) if self.mode is Mode.BLOCK else self.chain_end - self.committed_len
        return min(room, waiting)

    def _test_run(self, max_rows: int) -> Test | None:
        count = self._run_len()
        rows_before = 0 if self.held else 1
        if self.mode is not Mode.BLOCK:
            count = min(count, max_rows - rows_before)
        if count < 1 or count + rows_before > max_rows:
            return None
        return self._test(count, feed=True)

    def _test(self, count: int, *, feed: bool) -> Test:
        """Take `count` tokens off the chain to be tested."""
        token_ids: tuple[int, ...] = ()
        rows: tuple[SparseRow, ...] = ()
        while len(token_ids) < count:
            taken_ids, taken_rows = self._runs[0].take(count - len(token_ids))
            token_ids, rows = token_ids + taken_ids, rows + taken_rows
            if not self._runs[0].token_ids:
                self._runs.popleft()
        fed = ((() if self.held else (self.tokens[-1],)) + token_ids) if feed else ()
        return Test(self.epoch, self.committed_len, fed, self.held, token_ids, rows, None)

    def _draw_kind(self) -> TokenKind | None:
        """Kind of the token the verifier would draw itself now that nothing waits to be tested; None: it waits."""
        if self._header is not None and not self._plain_due:
            return None
        if self.held and self._nothing_follows():
            return TokenKind.BONUS
        alone = self.worker_id is None or not self.speculation.enabled or self._expiries >= MAX_EXPIRIES
        if alone or self._plain_due or self.committed_len < self._plain_until:
            return TokenKind.PLAIN
        return None

    def _nothing_follows(self) -> bool:
        """Whether the chain ended at its limit and its drafter knows all that was reported, so that it stands still."""
        return self.committed_len == self._limit and self._seen_len == self._reported_len

    def _judged(self, event: Judged, out: list[Command]) -> None:
        """Commit what a test accepted and what was drawn."""
        test, self._testing = self._testing, None
        if test is None:
            raise ProtocolError("Judged while not testing")
        accepted = test.token_ids[: event.num_accepted]
        self.tokens.extend(accepted)
        self._unreported_kinds.extend([TokenKind.ACCEPTED] * len(accepted))
        self._unreported_tested += event.num_tested
        self._rides = test.from_held and not test.feed
        if event.drawn is None:
            self.held = bool(test.feed)
            return
        self.tokens.append(event.drawn)
        self._unreported_kinds.append(TokenKind.RECOVERED if test.draw is None else test.draw)
        self.held = False
        wasted = len(test.token_ids) - event.num_tested
        if wasted:
            out.append(Count("wasted", wasted))
        if test.feed:
            out.append(Rewind(self.kv_len))
        self._end_by_own_token(test, out)

    def _end_by_own_token(self, test: Test, out: list[Command]) -> None:
        """The verifier drew a token: the epoch ends and everything is reported."""
        cause = VerdictCause.TESTED
        if test.draw is TokenKind.PLAIN:
            cause = VerdictCause.PATIENCE if self._plain_due else VerdictCause.PLAIN
        else:
            self._plain_until = 0
        ended = self.epoch
        self._end_epoch(out)
        self._report(ended, cause, out)

    # -- epochs and reports ----------------------------------------------------------------------------------------

    def _end_epoch(self, out: list[Command]) -> None:
        self._forget_chain(out)
        self.epoch = self.epoch.next_round()

    def _forget_chain(self, out: list[Command]) -> None:
        forgotten = self.chain_end - self.committed_len
        if forgotten:
            out.append(Count("wasted", forgotten))
        self._runs.clear()
        self._header = None
        self._plain_due = False
        self._limit = -1

    def _flush(self, cause: str, out: list[Command]) -> None:
        """Report accepted tokens that have not been reported yet."""
        if self._unreported_kinds:
            self._report(self.epoch, cause, out)

    def _report(self, tested_epoch: Epoch, cause: str, out: list[Command]) -> None:
        kinds = tuple(self._unreported_kinds)
        start = self.committed_len - len(kinds)
        accepted = kinds.count(TokenKind.ACCEPTED)
        tokens = tuple(self.tokens[start:])
        out.append(Report(tested_epoch, start, tokens, kinds, accepted, self._unreported_tested, self.epoch, cause))
        self._unreported_kinds.clear()
        self._unreported_tested = 0
        self._rides = False
        self._reported_len = self.committed_len

    # -- waiting ---------------------------------------------------------------------------------------------------

    def _expired(self, event: TimerExpired, out: list[Command]) -> None:
        """Draw a token without the drafter; the wait for an announced body ends at a hard limit, and is counted."""
        if self._timer is None or self._timer[1] != event.number:
            return
        kind, self._timer = self._timer[0], None
        self._plain_due = True
        if kind is TimerKind.BODY:
            self.guarantee_void += 1
            out.append(Count("guarantee_void"))
        else:
            self._expiries += 1

    def _wait(self, out: list[Command]) -> None:
        """Keep exactly the timer that this state needs."""
        idle = self.committed_len < self.commit_limit and not self._runs and self._draw_kind() is None
        if not idle:
            self._timer = None
            return
        kind = TimerKind.PATIENCE if self._header is None else TimerKind.BODY
        if self._timer is None or self._timer[0] is not kind:
            self._timer_count += 1
            self._timer = (kind, self._timer_count)
            out.append(StartTimer(kind, self._timer_count))


def _row_fits(row: SparseRow, vocab_len: int) -> bool:
    return all(0 <= token < vocab_len for token in row.token_ids)
