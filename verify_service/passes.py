"""Runs planned passes and puts their rows to use: decode passes are judged, prompt passes fill KV.

Decode and prompt passes are separate calls of the model, so that verdicts leave before any prompt is worked on.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from outrider.errors import Internal
from outrider.ids import TokenClass
from outrider.model.runner import ModelRunner, Rows, RunnerBroken
from verify_service.driver import Driver
from verify_service.residence import Residence
from verify_service.scheduler import Scheduler, Work
from verify_service.sessions import Fresh, Session


@dataclass(slots=True)
class Passes:
    """The model, and what is done with its rows."""

    runner: ModelRunner
    scheduler: Scheduler
    residence: Residence
    driver: Driver
    counters: Counter[str]
    clock: Callable[[], float]
    flush: Callable[[], None]
    """Lets what was said so far leave, before the model makes everybody wait."""
    on_prompts: Callable[[int, float], None] = lambda _passes, _seconds: None
    """Told how many prompt passes took how many seconds."""

    def decode(self) -> bool:
        """Run one decode pass; say whether there was one."""
        works = self.scheduler.decode_work()
        if not works:
            return False
        started_s = self.clock()
        outputs = self._forward(works)
        verify_s = self.clock() - started_s
        num_rows = sum(len(work.feed.token_ids) for work in works)
        for work, rows in zip(works, outputs, strict=False):
            figures = work.figures
            figures.verify_s += verify_s
            figures.num_rows += num_rows
            figures.num_sessions = len(works)
            if work.test is not None and work.test.token_ids:
                figures.queue_s = max(figures.queue_s, work.session.waited_s(work.test.base_len, started_s))
            self._finish(work, rows)
        self.counters["decode_passes"] += 1
        self.counters["decode_rows"] += num_rows
        return True

    def fill(self, max_stretches: int) -> bool:
        """Compute missing KV; say whether any was missing."""
        works = self.scheduler.fill_work(max_stretches)
        started_s = time.perf_counter()
        outputs = self._forward(works)
        if outputs and all(work.feed.token_class is TokenClass.PROMPT for work in works):
            # A prompt pass costs the same however few of its rows are used.
            self.on_prompts(len(works), time.perf_counter() - started_s)
        for work, rows in zip(works, outputs, strict=False):
            self._finish(work, rows)
        self.counters["filled_tokens"] += sum(len(work.feed.token_ids) for work in works)
        return bool(works)

    def _forward(self, works: list[Work]) -> list[Rows]:
        """Run the model; if it fails, so do the sessions of this pass, and only they."""
        if not works:
            return []
        self.flush()
        try:
            return self.runner.forward([work.feed for work in works])
        except RunnerBroken:
            raise  # nobody can be served any more
        except Exception as error:
            self.counters["failed_passes"] += 1
            for work in works:
                self.driver.fail(work.session, error)
            return []

    def _finish(self, work: Work, rows: Rows) -> None:
        """Judge one part of a pass, or note that its KV has grown."""
        session = work.session
        try:
            if rows.hidden is not None:
                session.fresh = Fresh(session.chain.epoch, work.start, rows.hidden)
            if work.test is not None:
                self.driver.judge(session, work.test, rows.logits if rows.best is None else rows.best)
            else:
                self._filled(work, rows)
            self.driver.tell_features(session)
            self._check(session, work)
            self.residence.commit(session)
        except Exception as error:
            self.driver.fail(session, error)

    def _filled(self, work: Work, rows: Rows) -> None:
        """Note a stretch of KV that is there now."""
        session = work.session
        if session.scoring is not None:
            session.scoring.take(work.start, rows.logits)
        session.note_computed(work.start, work.start + len(work.feed.token_ids))
        if work.feed.slot.length == session.chain.kv_len:
            session.filling = False
            self.driver.make_ready(session)

    def _check(self, session: Session, work: Work) -> None:
        length, expected = work.feed.slot.length, session.chain.kv_len
        if length > expected or (session.ready and length != expected):
            raise Internal(f"KV of {length} tokens where the chain has {expected}")
