"""The verifier's chain of one session: which tokens are tested, when, and what ends an epoch.

A state machine without I/O, clock, randomness or numbers: events in, commands out. The engine carries the commands
out and answers every `Test` with `Judged` before it sends another event, so no event ever meets a test under way.

What it decides: whether a proposal continues the chain, is stale, or leaves a gap; which run is tested next and on
which rows; when the verifier draws a token itself; when patience runs. What it may not do: look at a token to decide
*whether* it is tested (`docs/protocol.md`, non-anticipation).

Invariants, checked after every step:

* KV length == committed length while a row is held, == committed length - 1 otherwise: the last token has not been fed;
* every token the verifier draws itself ends the epoch: round + 1, the rest of the chain forgotten;
* a tree ends its chain: nothing is taken behind it, and its test always draws a token of the verifier's own;
* a token is tested at most once, and only as the continuation of what is committed in its own epoch;
* nothing is committed at or past `commit_limit`.
"""

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
    Speculation,
    VerdictCause,
)
from verify_service.conduct import Conduct
from verify_service.events import (
    Arrived,
    Command,
    Count,
    Event,
    Judged,
    Scheduled,
    StreamBroken,
    Test,
    TimerExpired,
    TimerKind,
)
from verify_service.intake import Fate, Standing, fate_of
from verify_service.picking import Place, ahead_test, next_test, rows_wanted
from verify_service.timers import Patience, Timer
from verify_service.unreported import Unreported
from verify_service.waiting import Waiting

MAX_PARKED = 16
"""Messages kept for a generation that has not been announced yet."""


class Chain:
    """State of one session on the verifier; see the module's head."""

    def __init__(self, opened: DecodeOpen, vocab_len: int, *, trees: bool = True) -> None:
        """Start with the log's tokens committed, no drafter, and their KV up to the last but one.

        Args:
            opened: the session; `token_ids` is not empty.
            vocab_len: ids at or past it are garbage.
            trees: whether a pass can have branches; where it cannot, of a tree the path of first children is tested.
        """
        self._trees = trees
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
        self.guarantee_void = self.num_stale = 0
        self._max_gamma = opened.speculation.gamma
        self._waiting = Waiting()
        self._conduct = Conduct()
        self._parked: list[Arrived] = []
        self._patience, self.timer = Patience(self.epoch), Timer()
        self._testing: Test | None = None
        self._unreported = Unreported(self.committed_len)

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
        return self.committed_len + len(self._waiting)

    @property
    def awaits_drafter(self) -> bool:
        """Whether nothing waits to be tested, and the next token has to come from the drafter or from patience."""
        return self.committed_len < self.commit_limit and not self._waiting and self._draw_kind() is None

    @property
    def may_feed_ahead(self) -> bool:
        """Whether the last token could be fed while the drafter is awaited: what it sends is tested on that row then.

        A row computed ahead is held like the one behind an accepted run. It decides nothing: when the drafter does not
        answer, it is the row that patience draws from.
        """
        return self._testing is None and self.awaits_drafter and not self.held

    @property
    def wants_rows(self) -> int:
        """Rows the model would have to compute for the next test; 0 when there is none, or a held row is enough."""
        return rows_wanted(self._place(), self._waiting, self._draw_kind())

    @property
    def wants_all_rows(self) -> bool:
        """Whether the next test cannot be cut: it gets all the rows that it wants, or none."""
        return self.mode is Mode.BLOCK or (self._waiting.tree is not None and not self._waiting.run_len)

    def step(self, event: Event) -> list[Command]:
        """Take one event; return what must be done, in order.

        Raises:
            ProtocolError: the engine broke the order of `Test` and `Judged`.
        """
        if self._testing is not None and not isinstance(event, Judged):
            raise ProtocolError(f"{type(event).__name__} while testing")
        out: list[Command] = []
        match event:
            case Scheduled():
                self._schedule(event, out)
            case Judged():
                self._judged(event, out)
            case Arrived():
                self._arrived(event, out)
            case DecodeAttach():
                self._attach(event, out)
            case DecodeProgress():
                self._progress(event)
            case StreamBroken():
                self._broken(event, out)
            case TimerExpired():
                self._expired(event, out)
            case _:
                assert_never(event)
        self._wait(out)
        return out

    # -- control ---------------------------------------------------------------------------------------------------

    def _attach(self, event: DecodeAttach, out: list[Command]) -> None:
        """Announce a generation; an empty worker id means nobody drafts. Lower or equal ones are late."""
        if event.generation <= self.epoch.generation:
            out.append(Count("stale"))
            return
        self._flush(out)
        self._forget_chain(out)
        self.epoch = Epoch(event.generation)
        self._patience = Patience(self.epoch)
        barred = self._conduct.is_quarantined(event.worker_id)
        self.worker_id = None if barred else event.worker_id or None
        self._report(self.epoch, VerdictCause.QUARANTINED if barred else VerdictCause.ATTACHED, out)
        parked, self._parked = self._parked, []
        for arrived in parked:
            self._arrived(arrived, out)

    def _progress(self, event: DecodeProgress) -> None:
        """Take new limits; those of an older generation are late."""
        if event.generation < self.epoch.generation:
            return
        self.commit_limit = max(self.commit_limit, event.commit_limit)
        if event.speculation.enabled and not self.speculation.enabled:
            # The drafter hears of its new window with the next commit, so there must be one without waiting for it.
            self._patience.plain_until = max(self._patience.plain_until, self.committed_len + 1)
        self.speculation = event.speculation
        self.patience_s = event.patience_s
        self._max_gamma = max(self._max_gamma, event.speculation.gamma)

    def _reset(self, cause: str, out: list[Command]) -> None:
        """End the epoch without a token, so that the drafter starts again from the committed length."""
        self._flush(out)
        ended = self.epoch
        self._end_epoch(out)
        self._report(ended, cause, out)

    def _broken(self, event: StreamBroken, out: list[Command]) -> None:
        """Whatever was on the way may be lost; an honest drafter seldom loses what it announced."""
        if event.worker_id != self.worker_id:
            return
        owed = self._is_owed()
        if owed:
            out.append(Count("broken_after_header"))
        self._start_again(out, quarantined=owed and self._conduct.broken(event.worker_id))

    # -- taking proposals ------------------------------------------------------------------------------------------

    def _arrived(self, event: Arrived, out: list[Command]) -> None:
        """Do with a message what `verify_service.intake` says of it."""
        match fate_of(event.message, event.worker_id, self._standing()):
            case Fate.TAKEN:
                self._take(event.message)
            case Fate.PROLONGS:
                self._prolong(event.message)
            case Fate.PARKED:
                self._park(event, out)
            case Fate.STALE:
                self.num_stale += isinstance(event.message, Proposal)
                out.append(Count("stale"))
            case Fate.DUPLICATE:
                out.append(Count("duplicate"))
            case Fate.GAP:
                self._blame("gap", out)
            case Fate.GARBAGE:
                # In the current epoch the chain has a hole now, and an honest drafter that only heard of a larger gamma
                # sooner than this side did would wait for a commit that cannot come.
                self._blame("garbage", out, resets=event.message.epoch == self.epoch)
            case _ as unknown:
                assert_never(unknown)

    def _standing(self) -> Standing:
        header = self._waiting.header
        return Standing(
            self.epoch, self.worker_id, self.mode, self.vocab_len, self._max_gamma, self.chain_end,
            self._unreported.reported_len, announced=header.count if header is not None else 0,
            plain_since=self._patience.plain_since, announced_depth=header.depth if header is not None else 0,
            is_closed=self._waiting.tree is not None,
        )  # fmt: skip

    def _prolong(self, message: ProposeMessage) -> None:
        """Go on plain as long as a late pass says, unless something came after it."""
        self._patience.renew()
        if isinstance(message, Pass) and not self._waiting:
            self._patience.plain_until = max(self._patience.plain_until, message.until_len)

    def _park(self, event: Arrived, out: list[Command]) -> None:
        if len(self._parked) < MAX_PARKED:
            self._parked.append(event)
        else:
            out.append(Count("parked_overflow"))

    def expire_parked(self) -> int:
        """Drop what was parked for a generation that nobody announced in time; return how many messages."""
        dropped, self._parked = len(self._parked), []
        return dropped

    def _blame(self, name: str, out: list[Command], *, resets: bool = True) -> None:
        """Drop and count, against the attached worker; if that ends the epoch, it may choose among drawn tokens."""
        out.append(Count(name))
        quarantined = self.worker_id is not None and self._conduct.fault(self.worker_id)
        if quarantined or resets:
            if self._is_owed():
                self._void(out)
            self._start_again(out, quarantined=quarantined)

    def _is_owed(self) -> bool:
        """Whether tokens were announced that have not been tested: the drafter may know them, and dislike them."""
        return self.mode.needs_rows and self._waiting.is_owed

    def _void(self, out: list[Command]) -> None:
        self.guarantee_void += 1
        out.append(Count("guarantee_void"))

    def _start_again(self, out: list[Command], *, quarantined: bool) -> None:
        """Reset, without the attached worker for the rest of the session if it is quarantined."""
        if quarantined and self.worker_id is not None:
            self._conduct.quarantine(self.worker_id)
            self.worker_id = None
        self._reset(VerdictCause.QUARANTINED if quarantined else VerdictCause.RESET, out)

    def _take(self, message: ProposeMessage) -> None:
        """The message continues the chain."""
        self._patience.renew()
        self._patience.is_due = False
        match message:
            case ProposalHeader():
                self._waiting.header = message
            case Pass():
                self._patience.plain_until = message.until_len
            case Proposal():
                self._waiting.add(message, trees=self._trees)
            case _:
                assert_never(message)

    # -- testing ---------------------------------------------------------------------------------------------------

    def _schedule(self, event: Scheduled, out: list[Command]) -> None:
        """Hand out the next test, or report what is committed when there is none to do now."""
        place = self._place()
        test = next_test(place, self._waiting, self._draw_kind(), event.max_rows)
        if test is None and event.ahead and event.max_rows and self.may_feed_ahead:
            test = ahead_test(place)
        # What rides would keep its drafter waiting where the next pass needs nothing of it.
        if test is None or test.is_ahead or (test.feed and not self._unreported.rides):
            self._flush(out)
        if test is not None:
            self._testing = test
            out.append(test)

    def _place(self) -> Place:
        room = self.commit_limit - self.committed_len
        plan = self.speculation
        most_rows = plan.gamma if plan.ahead else 0
        return Place(self.epoch, self.committed_len, self.tokens[-1], self.held, room, self.mode, most_rows)

    def _draw_kind(self) -> TokenKind | None:
        """Kind of the token that the verifier would draw itself now; None: something is to be tested, or awaited."""
        if self._waiting.is_owed:
            return None
        if self.held and self._nothing_follows():
            return TokenKind.BONUS
        alone = self.worker_id is None or not self.speculation.enabled
        return TokenKind.PLAIN if alone or self._patience.is_over(self.committed_len) else None

    def _nothing_follows(self) -> bool:
        """Whether the chain ended at its limit and its drafter knows all that was reported, so that it stands still."""
        knows_all = self._waiting.seen_len == self._unreported.reported_len
        return knows_all and self.committed_len == self._waiting.limit

    def _judged(self, event: Judged, out: list[Command]) -> None:
        """Commit what a test accepted and what was drawn."""
        test, self._testing = self._testing, None
        if test is None:
            raise ProtocolError("Judged while not testing")
        accepted = test.accepted(event)
        self.tokens.extend(accepted)
        self._unreported.tested(len(accepted), event.num_tested)
        # Where draws are fresh after a failure, what is reported must not depend on how a test went: a verifier lost in
        # the next pass would take accepted tokens with it and leave rejected ones.
        self._unreported.rides = test.from_held and not test.feed and not self.mode.needs_rows
        if event.drawn is None:
            self.held = bool(test.feed)
            return
        self.tokens.append(event.drawn)
        passed = TokenKind.BONUS if event.num_accepted == event.num_tested else TokenKind.RECOVERED
        self._unreported.drawn(test.draw or passed)
        self.held = False
        wasted, kept = test.num_untested(event), test.kept(event, self.kv_len)
        out.extend([Count("wasted", wasted)] if wasted else [])
        out.extend([kept] if kept is not None else [])
        self._end_by_own_token(test, out)

    def _end_by_own_token(self, test: Test, out: list[Command]) -> None:
        """The verifier drew a token: the epoch ends and everything is reported."""
        plain = test.draw is TokenKind.PLAIN
        ended, cause = self.epoch, self._patience.cause if plain else VerdictCause.TESTED
        self._end_epoch(out, plain=plain)
        self._report(ended, cause, out)

    # -- epochs and reports ----------------------------------------------------------------------------------------

    def _end_epoch(self, out: list[Command], *, plain: bool = False) -> None:
        self._forget_chain(out)
        self.epoch = self.epoch.next_round()
        self._patience.begin(self.epoch, plain=plain)

    def _forget_chain(self, out: list[Command]) -> None:
        if self._waiting:
            out.append(Count("wasted", self._waiting.num_tokens))
        self._waiting.clear()

    def _flush(self, out: list[Command]) -> None:
        """Report accepted tokens that have not been reported yet."""
        if self._unreported:
            self._report(self.epoch, VerdictCause.TESTED, out)

    def _report(self, tested_epoch: Epoch, cause: str, out: list[Command]) -> None:
        out.append(self._unreported.report(self.tokens, tested_epoch, self.epoch, cause))

    # -- waiting ---------------------------------------------------------------------------------------------------

    def _expired(self, event: TimerExpired, out: list[Command]) -> None:
        """Draw a token without the drafter; one that withholds an announced body up to the hard limit is cut off."""
        kind = self.timer.expire(event.number)
        if kind is TimerKind.BODY:
            self._void(out)
            self._start_again(out, quarantined=True)
        elif kind is TimerKind.PATIENCE:
            self._patience.expire()

    def _wait(self, out: list[Command]) -> None:
        """Keep exactly the timer that this state needs; a test under way leaves it alone."""
        if self._testing is not None:
            return
        guarded = TimerKind.PATIENCE if self._waiting.header is None else TimerKind.BODY
        started = self.timer.need(guarded if self.awaits_drafter else None)
        out.extend([started] if started is not None else [])
