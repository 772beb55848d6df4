"""The exactness audit: while nothing else is to be done, finished sessions are decoded again, as twins without drafter.

A twin begins with what its session began with, uses nothing that was computed before, and draws by the same rule and
key. Greedy and coupled sessions must come out as they did, bit for bit, whatever their drafters sent; so each audit is
a measurement of the promise on live traffic. Prompts and tokens stay in this process and in no log.

Real sessions come first: a step is one pass, taken only while no session is open. As soon as one opens, the twin's KV
is given back and its session waits for the next idle time. What a real session may lose to it is the rest of one pass
and some cached blocks, no more than `AuditSettings.max_tokens` need.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from outrider.history import GrammarState
from outrider.ids import Mode, TokenClass, WorkerId
from outrider.messages import DecodeOpen, Speculation
from outrider.model.runner import Feed, KvSlot, ModelRunner
from outrider.telemetry import log_ids
from verify_service.alarms import Alarms
from verify_service.driver import Driver
from verify_service.events import Scheduled
from verify_service.inbox import Ticket
from verify_service.sessions import Session
from verify_service.workers import Workers

log = logging.getLogger(__name__)

MAX_QUEUED = 4
"""Finished sessions that wait for idle time; more are skipped."""
MAX_TRIES = 3
"""Times that a twin may be given up before its session is skipped."""
SKIPPED = ("queue_full", "too_long", "given_up", "no_room", "failed")
"""Why sampled sessions were not checked."""


@dataclass(frozen=True, slots=True)
class AuditSettings:
    """How much is checked."""

    share: float = 0.0
    """Of the finished greedy and coupled sessions, 0 .. 1; 0: none."""
    max_tokens: int = 512
    """Positions of a session, prompt included, that are looked at; what lies behind them is not."""


@dataclass(slots=True)
class _Record:
    """A finished session."""

    opened: DecodeOpen
    tokens: tuple[int, ...]
    """What it had committed in the end, as far as it is looked at."""
    grammar: GrammarState | None = None
    """Where its output stood in its grammar when it was opened."""
    tries: int = 0


@dataclass(frozen=True, slots=True)
class _Twin:
    """A session that is decoded again."""

    record: _Record
    session: Session
    slot: KvSlot


class Audit:
    """Samples finished sessions and runs their twins; owned by the engine's thread."""

    def __init__(
        self, runner: ModelRunner, vocab_len: int, settings: AuditSettings, clock: Callable[[], float]
    ) -> None:
        """Check nothing yet.

        Args:
            runner: of the engine.
            vocab_len: length of the tokenizer's id range.
            settings: how much is checked; nothing at all where rows depend on the batch.
            clock: rising seconds.
        """
        self._runner, self._vocab_len, self._settings = runner, vocab_len, settings
        self._share = settings.share if runner.info.exactness == "bitwise" else 0.0
        self._due = 0.0
        self._queue: deque[_Record] = deque()
        self._twin: _Twin | None = None
        self.counters: Counter[str] = Counter()
        """`checked`, `mismatch`, `tokens`, and the reasons of `SKIPPED`; read-only for others."""
        # Of its own, so that no twin counts as traffic. A chain without a drafter starts no timer.
        self._driver = Driver(Workers(Counter()), Alarms(), Counter(), clock, 0.0, False, _reraise)

    def note(self, session: Session) -> None:
        """A session has ended in good order: keep it for a check if it is its turn."""
        opened, tokens = session.opened, tuple(session.chain.tokens)
        if opened.mode not in (Mode.GREEDY, Mode.COUPLED) or len(tokens) == len(opened.token_ids):
            return
        self._due += self._share
        if self._due < 1:
            return
        self._due -= 1
        if len(opened.token_ids) >= self._settings.max_tokens:
            self.counters["too_long"] += 1
        elif len(self._queue) >= MAX_QUEUED:
            self.counters["queue_full"] += 1
        else:
            self._queue.append(_Record(opened, tokens[: self._settings.max_tokens], session.grammar_at_open))

    def give_up(self) -> None:
        """A real session needs the engine: give back what the twin holds, and try later."""
        twin = self._twin
        if twin is None:
            return
        twin.record.tries += 1
        if twin.record.tries < MAX_TRIES:
            self._queue.append(twin.record)
            self._end()
        else:
            self._skip("given_up")

    def step(self) -> bool:
        """Run one pass of a twin, if there is one to run; say whether there was."""
        if self._twin is None and self._queue:
            self._begin(self._queue.popleft())
        twin = self._twin
        if twin is None:
            return False
        with log_ids(session=twin.record.opened.session_id):
            try:
                self._advance(twin)
            except Exception:
                log.exception("a twin of session %s failed", twin.record.opened.session_id)
                self._skip("failed")
        return True

    def _begin(self, record: _Record) -> None:
        """Open the twin: as its session was opened, but without a drafter, and up to where that session came."""
        opened = replace(
            record.opened,
            commit_limit=len(record.tokens),
            speculation=Speculation(),
            worker_id=WorkerId(""),
            num_logprobs=-1,
            num_prompt_logprobs=-1,
        )
        grammar = None if record.grammar is None else record.grammar.copy()
        session = Session(Ticket(0), opened, lambda _verdict: None, self._vocab_len, grammar=grammar)
        # A slot that is never matched or committed shares nothing: a wrong block could not be found with itself.
        session.slot = slot = self._runner.new_slot()
        session.filling = slot.length < session.chain.kv_len
        self._twin = _Twin(record, session, slot)

    def _advance(self, twin: _Twin) -> None:
        """Compute a stretch of the twin's KV, or its next token."""
        if twin.session.filling:
            self._fill(twin)
        elif self._has_room(twin, 1) and not self._decode(twin):
            self._settle(twin)

    def _fill(self, twin: _Twin) -> None:
        info, session = self._runner.info, twin.session
        first, last, token_class = session.fill_range(classes_differ=info.classes_differ, max_decode=info.max_rows)
        if not self._has_room(twin, last - first):
            return
        self._runner.forward([Feed(twin.slot, tuple(session.chain.tokens[first:last]), token_class, 0)])
        session.filling = twin.slot.length < session.chain.kv_len

    def _decode(self, twin: _Twin) -> bool:
        """Draw the twin's next token; say whether it is its session's and more are to come."""
        session, tokens = twin.session, twin.record.tokens
        test = self._driver.step(session, Scheduled(1))
        if test is None:
            raise ValueError(f"a twin stops at {session.chain.committed_len} of {len(tokens)} tokens")
        feed = Feed(twin.slot, test.feed, TokenClass.DECODE, len(test.feed), best_below=session.best_below)
        (rows,) = self._runner.forward([feed])
        self._driver.judge(session, test, rows.logits if rows.best is None else rows.best)
        done = session.chain.committed_len
        return done < len(tokens) and session.chain.tokens[-1] == tokens[done - 1]

    def _settle(self, twin: _Twin) -> None:
        """The twin is through, or differs: say so."""
        opened, tokens, own = twin.record.opened, twin.record.tokens, twin.session.chain.tokens
        start, position = len(opened.token_ids), len(own) - 1
        self.counters["checked"] += 1
        self.counters["tokens"] += len(own) - start
        if own[-1] != tokens[position]:
            self.counters["mismatch"] += 1
            log.error(
                "exactness audit: session %s (%s) differs from its twin at position %d, token %d of %d drawn",
                opened.session_id,
                opened.mode.name.lower(),
                position,
                position - start + 1,
                len(tokens) - start,
            )
        self._end()

    def _has_room(self, twin: _Twin, num_tokens: int) -> bool:
        """Whether the pool has blocks for so many tokens; if not, the twin is over."""
        if twin.slot.growth(num_tokens) <= self._runner.free_blocks:
            return True
        self._skip("no_room")
        return False

    def _skip(self, reason: str) -> None:
        self.counters[reason] += 1
        self._end()

    def _end(self) -> None:
        twin, self._twin = self._twin, None
        if twin is not None:
            self._runner.free_slot(twin.slot, forget=True)


def _reraise(_session: Session, error: Exception) -> None:
    raise error
