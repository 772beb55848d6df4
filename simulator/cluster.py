"""A whole cluster in simulated time, its clients, and the loss of a zone."""

import logging
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from draft_service.metrics import DraftMetrics
from outrider.ids import WorkerId
from outrider.messages import WorkerDescription
from outrider.model.kv import num_blocks_for
from simulator.clients import Client
from simulator.clock import Clock
from simulator.orchestrator import TimedOrchestrator
from simulator.registry import RENEWALS, TTL_S, Registry
from simulator.results import Summary, Tally, mean, middle, upper
from simulator.setting import Setting
from simulator.text import Luck
from simulator.wires import Wires
from simulator.workers import TimedDraftWorker, TimedVerifier, VerifierRoom

NOTICE_S = 0.5
"""How long the end of a peer goes unnoticed where nothing else is said."""
MAX_WAITING = 1_000_000
"""Sessions may wait for a place at a verifier: the waiting shows in the time to the first token."""


Machine = TimedVerifier | TimedDraftWorker | TimedOrchestrator


class Cluster:
    """See the module's head; `run` once."""

    def __init__(self, setting: Setting) -> None:
        """Start everything at 0 s."""
        self.setting, self.clock = setting, Clock()
        self.tally = Tally(setting.warm_up_s)
        self._lot = random.Random(setting.seed)
        self.registry = Registry(self.clock)
        detect_s = setting.loss.detect_s if setting.loss is not None else NOTICE_S
        self._wires = Wires(self.clock, setting.costs, detect_s)
        self._verifiers = [self._verifier(index) for index in range(setting.fleet.verifiers)]
        metrics, luck = DraftMetrics(), Luck(setting.seed, setting.load.alphas)
        self._drafts = [self._draft(index, luck, metrics) for index in range(setting.fleet.drafts)]
        self.orchestrators = [
            TimedOrchestrator(index, index % setting.fleet.zones, setting, self.clock, self.registry, self._wires)
            for index in range(setting.fleet.orchestrators)
        ]
        self._clients = [Client(self, number) for number in range(setting.load.sessions)]
        self._num_gone = 0
        self._busy_before: dict[Machine, float] = {}

    # -- building ----------------------------------------------------------------------------------------------------

    def _verifier(self, index: int) -> TimedVerifier:
        fleet, load = self.setting.fleet, self.setting.load
        context_len = load.prompt + load.tokens
        whole = num_blocks_for(context_len) + 1
        num_blocks = num_blocks_for(fleet.kv_tokens) if fleet.kv_tokens else whole * fleet.verifier_sessions
        room = VerifierRoom(fleet.verifier_sessions, MAX_WAITING, max(whole, num_blocks), context_len)
        worker = TimedVerifier(WorkerId(f"v{index}"), index % fleet.zones, self.clock, self.setting.costs, room)
        self._wires.verifiers[worker.worker_id] = worker
        self._announce(worker)
        return worker

    def _draft(self, index: int, luck: Luck, metrics: DraftMetrics) -> TimedDraftWorker:
        fleet, load = self.setting.fleet, self.setting.load
        worker = TimedDraftWorker(
            WorkerId(f"d{index}"), index % fleet.zones, self.clock, self.setting.costs, luck,
            context_len=load.prompt + load.tokens + 1, capacity=fleet.draft_sessions, metrics=metrics,
            post=self._wires.reported,
        )  # fmt: skip
        self._wires.drafts[worker.worker_id] = worker
        self._announce(worker)
        return worker

    def _announce(self, worker: TimedVerifier | TimedDraftWorker) -> None:
        def describe() -> WorkerDescription | None:
            return worker.describe() if worker.alive else None

        self.registry.join(describe, self._lot.uniform(0.0, TTL_S / RENEWALS))

    # -- for clients -------------------------------------------------------------------------------------------------

    def orchestrator_for(self, number: int) -> TimedOrchestrator:
        """Return an orchestrator that lives, each in turn."""
        alive = [each for each in self.orchestrators if each.alive]
        return alive[number % len(alive)]

    def gone(self, client: Client) -> None:
        """A client has had all its turns."""
        self._num_gone += 1

    # -- running -----------------------------------------------------------------------------------------------------

    def run(self) -> Summary:
        """Let everything happen.

        Raises:
            Broken: a client got another text than it should.
        """
        setting, began_s = self.setting, time.perf_counter()
        for client in self._clients:
            self.clock.at(self._lot.uniform(0.0, setting.warm_up_s / 2), client.begin)
        self.clock.at(setting.warm_up_s, self._measure)
        if setting.loss is not None:
            self.clock.at(setting.loss.at_s, self._lose, setting.loss.zone)
        with torch.inference_mode(), _quiet():
            self.clock.run(setting.warm_up_s + setting.seconds, lambda: self._num_gone == len(self._clients))
        return self._summary(time.perf_counter() - began_s)

    def _measure(self) -> None:
        for each in self._machines():
            self._busy_before[each] = each.busy_s

    def _lose(self, zone: int) -> None:
        """Everything of a zone stops; whoever talked to it notices after a while."""
        lost = [each for each in self._machines() if each.zone == zone]
        for each in lost:
            each.alive = False
        for each in lost:
            if isinstance(each, TimedVerifier):
                self._wires.lose_verifier(each)
            elif isinstance(each, TimedDraftWorker):
                self._wires.lose_draft_worker(each)
            else:
                self._orphan(each)
        for orchestrator in self.orchestrators:
            if orchestrator.alive:
                self._tell_of_losses(orchestrator)

    def _orphan(self, orchestrator: TimedOrchestrator) -> None:
        running, orchestrator.running = orchestrator.running, {}
        for generation, client in running.items():
            self._wires.abandon(generation)
            generation.tuning.end()
            if isinstance(client, Client):
                self.clock.after(self._wires.detect_s, client.orphaned)

    def _tell_of_losses(self, orchestrator: TimedOrchestrator) -> None:
        delay_s = self._wires.detect_s
        for generation in orchestrator.running:
            held = generation.held
            if not self._wires.verifiers[held.verifier.worker_id].alive:
                self.clock.after(delay_s, orchestrator.break_verifier, generation, held.opened)
            drafter = held.drafter
            if drafter is not None and held.drafting is not None and not self._wires.drafts[drafter.worker_id].alive:
                self.clock.after(delay_s, orchestrator.lost_drafter, generation, held.drafting, "unavailable")

    # -- the answer --------------------------------------------------------------------------------------------------

    def _summary(self, wall_s: float) -> Summary:
        setting, tally = self.setting, self.tally
        end_s = self.clock.now_s if self._num_gone == len(self._clients) else setting.warm_up_s + setting.seconds
        measured_s = max(1e-9, end_s - setting.warm_up_s)
        counts, told = tally.counts, tally.told
        moved = [each for each in told if each.moved]
        return Summary(
            mode="machines",
            sessions=setting.load.sessions,
            verifiers=setting.fleet.verifiers,
            drafts=setting.fleet.drafts,
            tokens_per_s=tally.tokens / measured_s,
            session_tokens_per_s=middle(each.rate for each in told),
            first_token_s=middle(each.first_s - each.began_s for each in told),
            first_token_p99_s=upper(each.first_s - each.began_s for each in told),
            tokens_per_round=counts["committed"] / max(1, counts["rounds"]),
            alpha=counts["accepted"] / max(1, counts["tested"]),
            undrafted=counts["plain"] / max(1, counts["committed"]),
            verifier_busy=self._busy(self._verifiers, measured_s),
            draft_busy=self._busy(self._drafts, measured_s),
            orchestrator_busy=self._busy(self.orchestrators, measured_s),
            finished=tally.finished,
            failed=counts["failed"],
            moved=len(moved),
            pause_s=middle(each.pause_s for each in moved),
            pause_p99_s=upper(each.pause_s for each in moved),
            simulated_s=end_s,
            events=self.clock.num_events,
            wall_s=wall_s,
            tokens_by_second=tuple(tally.tokens_by_second[second] for second in range(int(end_s) + 1)),
        )

    def _machines(self) -> list[Machine]:
        return [*self._verifiers, *self._drafts, *self.orchestrators]

    def _busy(self, workers: Sequence[Machine], seconds: float) -> float:
        return mean([(each.busy_s - self._busy_before.get(each, 0.0)) / seconds for each in workers])


def simulate(setting: Setting) -> Summary:
    """Run a setting to its end."""
    return Cluster(setting).run()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what the machines log about simulated trouble out of a real log."""
    loggers = [logging.getLogger(name) for name in ("orchestrator", "verify_service", "draft_service")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
