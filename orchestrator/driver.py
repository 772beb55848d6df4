"""Runs one generation: feeds what happens to `orchestrator.rounds` and carries out what it answers.

Everything that happens becomes an event in one queue, and one loop takes them in order; carrying a command out never
waits. What has to wait is a task of the driver's `TaskGroup`: the streams (`peers`), the log (`journal`), the searches
for workers (`search`), and a clock for retries and silence.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, assert_never

from orchestrator.commit import Commit
from orchestrator.events import (
    AppendLog,
    ChooseDrafter,
    ChooseVerifier,
    CloseDrafter,
    CloseVerifier,
    Command,
    Count,
    DrafterAsked,
    DrafterChosen,
    DrafterLost,
    Emit,
    Event,
    Fail,
    Failed,
    Finish,
    Logged,
    OpenDrafter,
    OpenVerifier,
    Started,
    TellDrafter,
    TellVerifier,
    VerdictArrived,
    VerifierChosen,
)
from orchestrator.figures import Meter, came_true, in_words, round_of
from orchestrator.job import Drained, Job, Reported, Tools
from orchestrator.journal import Journal
from orchestrator.pace import Pace
from orchestrator.peers import Fed, Peers
from orchestrator.placement import Wanted
from orchestrator.rounds import MOVED, Plan, Rounds
from orchestrator.search import Search
from orchestrator.showing import Showing
from orchestrator.steering import Witness
from orchestrator.traces import GenerationTrace
from orchestrator.tuning import Tuning
from outrider.drafter_policy import sort_of
from outrider.errors import DataLoss, HandedOver, Internal, NotFound, OutriderError, ResourceExhausted, Unavailable
from outrider.generation import Finished, GenerationEvent, Notice, PromptLogprobs, Usage
from outrider.ids import Epoch, WorkerId
from outrider.messages import Verdict, WorkerDescription
from outrider.store.records import KvLocation
from outrider.telemetry import log_ids

log = logging.getLogger(__name__)

TICK_S = 0.25
"""How often retries and silence are looked at."""


class Driver:
    """Runs one generation; see the module's head. `run` in a task, `events` for the client, `feed` from anywhere."""

    def __init__(self, job: Job, commit: Commit, tools: Tools) -> None:
        """Make everything the generation needs; nothing is opened yet.

        Args:
            job: the generation.
            commit: its committer, at the end of the log.
            tools: what all generations of the process share.
        """
        self._job, self._commit, self._metrics = job, commit, tools.metrics
        self._events: asyncio.Queue[Fed] = asyncio.Queue()
        self._journal = Journal(tools.store, job, tools.settings)
        self._pass_costs, self._stall_timeout_s = tools.pass_costs, tools.settings.stall_timeout_s
        pace = Pace(self._pass_costs.of(job.verifier.worker_id))
        self._tuning = Tuning(job.state.speculation, tools.settings.limits, pace, job.state.max_tokens)
        self._tuning.begin(time.monotonic(), sort_of(job.drafter) if job.drafter is not None else "")
        self._witness = Witness(tools.placement.steering, self._tuning, job.drafter)
        self._meter = Meter(job.started_s)
        self.course = tools.lately.begin(job.session_id, job.state.owner, job.started_s)
        self._trace = GenerationTrace(tools.tracer, job)
        # Not `self.feed`: a generation that is over must not have to wait, in a cycle, for the collection of garbage.
        feed = self._events.put_nowait
        self._peers = Peers(job, tools, feed, self._trace.metadata)
        self._search = Search(job, tools, self._peers, feed)
        self._showing = Showing(job, feed, self._peers.arrivals, tools.metrics.overhead_s)
        plan = Plan(job.fence, job.token_ids, job.classes, job.final_len, self._tuning.tuned)
        self._flights, self._flight = tools.flights, tools.flights.begin(job.session_id, job.fence, commit)
        self._rounds, self._spoken = Rounds(plan, self._flight.recorder), tools.metrics.speculation
        self._helpers: set[asyncio.Task[None]] = set()
        self._told_epoch = Epoch()
        self._round_s = job.started_s
        self.ended = asyncio.Event()
        """Set when nothing of the generation is left."""

    @property
    def owner(self) -> str:
        """Id of the API key that owns the session."""
        return self._job.state.owner

    @property
    def fence(self) -> int:
        """Fencing number of the generation's lease."""
        return self._job.fence

    # -- for whoever moves generations -------------------------------------------------------------------------------

    @property
    def verifier(self) -> WorkerDescription:
        """The verifier that was opened last."""
        return self._peers.verifier

    @property
    def drafter_id(self) -> WorkerId:
        """The draft worker that is attached; empty: none."""
        return WorkerId("") if self._rounds.off_reason else self._peers.drafter_id

    @property
    def wanted(self) -> Wanted:
        """What the generation needs of a draft worker."""
        return self._search.as_now(len(self._rounds.tokens))

    @property
    def attached(self) -> WorkerDescription | None:
        """The draft worker that is attached, also while nothing is asked of it."""
        return self._peers.known.get(self._rounds.drafter_id)

    def leave_drafter(self) -> None:
        """Give the draft worker up for another one; never waits."""
        self.feed(DrafterLost(self._rounds.generation, MOVED))

    # -- for the servicer ------------------------------------------------------------------------------------------

    def hand_over(self, why: str = "the orchestrator is stopping: resume the session at another one") -> None:
        """End here, in a way that lets the client go on, elsewhere or later; never waits."""
        self.feed(Failed(HandedOver(why, self._job.session_id, self._showing.length)))

    def feed(self, event: Fed) -> None:
        """Add an event; never waits."""
        self._events.put_nowait(event)

    def events(self) -> AsyncGenerator[GenerationEvent, None]:
        """Yield what the client is told, to the end.

        Raises:
            OutriderError: the generation failed.
        """
        return self._showing.events()

    async def run(self) -> None:
        """Run to the end; every error reaches the client, none the caller."""
        trace = self._trace.place
        with log_ids(session=self._job.session_id, key=self.owner, trace=trace.name if trace is not None else ""):
            await self._run()

    async def _run(self) -> None:
        self._metrics.running.inc()
        drafter_id = self._job.drafter.worker_id if self._job.drafter is not None else None
        self.feed(Started(self._job.verifier.worker_id, drafter_id, self._job.off_reason))
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._help(self._guarded(self._journal.write(self._on_logged)))
                self._help(self._guarded(self._journal.keep_lease(self._resident)))
                self._help(self._watch())
                await self._loop()
                for helper in tuple(self._helpers):
                    helper.cancel()
        except Exception as error:
            log.exception("the generation failed")
            await self._end_by_defect(Internal(f"the generation failed: {error!r}"))
        finally:
            self._trace.end("internal")
            self._tuning.end()
            self._metrics.running.dec()
            if self.course.off_reason:
                self._spoken.off_now.labels(self.course.off_reason).dec()
            self.ended.set()

    # -- the loop --------------------------------------------------------------------------------------------------

    async def _loop(self) -> None:
        """Take events until the generation is over."""
        while not self._rounds.over:
            event = await self._events.get()
            if isinstance(event, Reported):
                self._on_report(event)
            elif isinstance(event, PromptLogprobs):
                self._showing.put(event)
            elif isinstance(event, Drained):
                self._help(self._search.hand_over(event.opened))
            else:
                await self._step(event)

    async def _step(self, event: Event) -> None:
        """Give the machine one event and do what it answers; only the last command of all takes time."""
        if isinstance(event, DrafterChosen | VerifierChosen):
            if isinstance(event, DrafterChosen) and event.worker_id is not None and self.attached is None:
                self._witness.chosen(self._peers.known[event.worker_id])
            await self._step(self._tuning.attached(len(self._rounds.tokens)))
        length = len(self._rounds.tokens)
        commands = self._flight.recorder.step(self._rounds, event)
        if isinstance(event, VerdictArrived) and Count("late_verdict") not in commands:
            self._on_verdict(event.verdict, length)
        for command in commands:
            self._carry_out(command)
            if isinstance(command, Finish | Fail):
                await self._end(command)
        self._on_off_reason()

    def _carry_out(self, command: Command) -> None:  # noqa: C901, PLR0912  (one line per command)
        """Do what the machine asks; never waits."""
        match command:
            case OpenVerifier():
                self._tuning.moved(self._pass_costs.of(command.worker_id))
                self._peers.open_verifier(command, self._tasks)
                self._meter.add_engine(self._peers.verifier.fingerprint)
            case TellVerifier():
                self._peers.tell_verifier(command)
            case CloseVerifier():
                # Who begins in its place would count it among its neighbours.
                self._tuning.end()
                self._peers.close_verifier()
            case OpenDrafter():
                self._peers.open_drafter(command, self._tasks)
                self._meter.drafter = self._peers.drafter_kind
            case TellDrafter():
                self._tell_drafter(command)
            case CloseDrafter():
                self._witness.closed()
                self._peers.close_drafter(command)
            case ChooseDrafter():
                self._help(self._search.drafter(len(self._rounds.tokens), command.exclude))
            case ChooseVerifier():
                self._help(self._search.verifier(command.exclude))
            case AppendLog():
                self._journal.append(command.token_ids, command.kinds, command.logprobs)
            case Emit():
                self._showing.emit(command.chunk)
            case Count():
                self._count(command.name)
            case Finish() | Fail():
                self._peers.close_all()
            case _:
                assert_never(command)

    def _tell_drafter(self, command: TellDrafter) -> None:
        """Pass a commit on, and note when it starts a new chain."""
        if command.commit.epoch > self._told_epoch:
            self._told_epoch = command.commit.epoch
            self._tuning.restarted(command.commit.epoch, time.monotonic())
        self._peers.tell_drafter(command)

    # -- what is measured ------------------------------------------------------------------------------------------

    def _on_verdict(self, verdict: Verdict, length: int) -> None:
        """Count a verdict that was committed behind `length`, and let the policy look at it."""
        now_s = time.monotonic()
        committed = round_of(verdict, length - verdict.start, len(self._rounds.tokens) - length)
        log.debug("%d tokens: %s", len(self._rounds.tokens), committed)
        if committed.kinds:
            if self._meter.num_tokens:
                self._spoken.inter_token_s.observe((now_s - self._round_s) / len(committed.kinds))
            else:
                self._spoken.time_to_first_token_s.observe(now_s - self._job.started_s)
            self._round_s = now_s
        self._metrics.count_round(committed, self._meter.add_round(committed, now_s), self._peers.drafter_id)
        if num_void := self._meter.add_totals(self._peers.opened, verdict):
            self._spoken.guarantee_void.inc(num_void)
        self._witness.observe(committed)
        self.course.add(committed, now_s, len(self._rounds.tokens), self._meter, self._tuning)
        self._trace.observe(committed)
        trips_s, tuned = self._tuning.network_s, self._tuning.observe(committed, now_s)
        if self._tuning.network_s > trips_s:
            self._spoken.network_s.observe(self._tuning.network_s - trips_s)
        if tuned is not None:
            self.feed(tuned)

    def _on_report(self, report: Reported) -> None:
        self._spoken.drafted.inc(self._meter.add_status(report.generation, report.status))
        self._tuning.observe_status(report.status)
        if report.status.missing_from >= 0:
            self.feed(DrafterAsked(report.generation, report.status.missing_from))

    def _on_logged(self, length: int, seconds: float) -> None:
        self._spoken.commit_s.observe(seconds)
        self.course.logged(length, seconds)
        self._meter.add_time("commit", seconds)
        self.feed(Logged(length))

    def _on_off_reason(self) -> None:
        """Note a change of why nothing is drafted."""
        reason, before = self._rounds.off_reason, self.course.off_reason
        if reason == before:
            return
        if before:
            self._spoken.off_now.labels(before).dec()
        if reason:
            self._spoken.off.labels(reason).inc()
            self._spoken.off_now.labels(reason).inc()
        self.course.off_reason = reason

    def _resident(self) -> KvLocation:
        """Return which KV of the session its verifier holds: all but the last token's."""
        return KvLocation(self._peers.verifier.worker_id, max(0, len(self._rounds.tokens) - 1), self._rounds.epoch)

    def _count(self, name: str) -> None:
        self._metrics.events.labels(name).inc()
        if name == "drafter_lost":
            reason = self._rounds.off_reason
            self._search.lost(self._peers.drafter_id, reason)
            self._showing.put(Notice(name, f"decoding goes on without drafts: {reason}"))
        elif name == "verifier_lost":
            self._showing.put(Notice(name, "another verifier is looked for"))

    # -- tasks beside the loop -------------------------------------------------------------------------------------

    def _help(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task that has nothing to do once the generation is over; streams are not of this kind."""
        helper = self._tasks.create_task(work)
        self._helpers.add(helper)
        helper.add_done_callback(self._helpers.discard)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """Turn what the log and the lease cannot survive into an event.

        Whoever deletes the session here calls its generation off before, so one that is missing went another way.
        """
        try:
            await work
        except NotFound as error:
            lost = (
                f"session {self._job.session_id} is gone from the store: its data was lost, or it was deleted elsewhere"
            )
            log.warning("%s (%s)", lost, error)
            self.feed(Failed(DataLoss(lost)))
        except OutriderError as error:
            self.feed(Failed(error))

    async def _watch(self) -> None:
        """Look at intervals for a draft worker while there is none, and whether verifier or client are stuck."""
        while True:
            await asyncio.sleep(TICK_S)
            length = len(self._rounds.tokens)
            if self._search.due(self._rounds.off_reason):
                self._help(self._search.drafter(length))
            self._peers.require_word(may_go_on=length < self._rounds.commit_limit)
            if self._showing.unread_s(time.monotonic()) > self._stall_timeout_s:
                self.hand_over(f"the client has read nothing for {self._stall_timeout_s:g} s: resume the session")
                return

    # -- the end ---------------------------------------------------------------------------------------------------

    async def _end_by_defect(self, defect: Internal) -> None:
        """Do what can be done without knowing what is broken."""
        self._metrics.generations.labels("internal").inc()
        await self._journal.release()
        self._showing.put(defect)
        await self._flights.end(self._flight, "internal", defect)

    async def _end(self, last: Finish | Fail) -> None:
        """Leave the session in order, then tell the client."""
        self._meter.speculation_off = self._rounds.off_reason
        self._meter.add_time("network", self._tuning.network_s)
        error = last.error if isinstance(last, Fail) else None
        if isinstance(error, Unavailable) and isinstance(self._peers.last_error, ResourceExhausted):
            error = self._peers.last_error
        if isinstance(last, Finish):
            await self._journal.finish(last.reason, self._resident(), self._peers.drafter_id)
        else:
            await self._journal.release()
        outcome = last.reason.name.lower() if isinstance(last, Finish) else (error or last.error).reason.lower()
        self._metrics.generations.labels(outcome).inc()
        figures, state = self._meter.figures(time.monotonic()), self._job.state
        prompt_len, prediction = state.prompt_len, state.prediction
        if prediction:  # on a thread: it may be long
            figures = await asyncio.to_thread(came_true, figures, prediction, self._rounds.tokens[prompt_len:])
        self._metrics.total_s.observe(figures.total_s)
        self._trace.end(outcome, "" if error is None else error.message, figures)
        log.info("the generation ended (%s): %s", outcome, in_words(figures))
        usage = Usage(prompt_len, len(self._rounds.tokens) - prompt_len, min(prompt_len, self._meter.num_cached or 0))
        finished = Finished(last.reason, self._commit.matched, usage, figures) if isinstance(last, Finish) else None
        self._showing.put(finished or error or Internal("the generation ended without a reason"))
        await self._flights.end(self._flight, outcome, error)
