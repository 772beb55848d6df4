"""An orchestrator in simulated time: it places generations, carries their messages, and takes a while for each verdict.

Placement, breakers, standings and pass costs are the real ones, one set for each orchestrator, as in its process.
"""

from collections.abc import Callable, Collection
from typing import Protocol

from orchestrator.events import (
    AppendLog,
    ChooseDrafter,
    ChooseVerifier,
    CloseDrafter,
    CloseVerifier,
    Command,
    Count,
    DrafterChosen,
    DrafterLost,
    Emit,
    Fail,
    Finish,
    Logged,
    OpenDrafter,
    OpenVerifier,
    Taken,
    TellDrafter,
    TellVerifier,
    VerdictArrived,
    VerifierChosen,
    VerifierLost,
)
from orchestrator.figures import Round
from orchestrator.metrics import Metrics
from orchestrator.pass_costs import CostsByVerifier, PassCosts
from orchestrator.placement import Room, Wanted
from outrider.errors import OutriderError, Unavailable
from outrider.generation import Chunk
from outrider.ids import Generation, Mode, SessionId, WorkerId
from outrider.messages import (
    DecodeOpen,
    DecodeResponseMessage,
    DraftOpen,
    DraftStatus,
    SamplingParams,
    Verdict,
    WorkerDescription,
)
from simulator.clock import Clock
from simulator.costs import Costs
from simulator.generation import Job, TimedGeneration
from simulator.registry import Registry, TimedPlacement, at_once
from simulator.setting import Setting
from simulator.wires import Wires
from simulator.workers import MODEL

GREEDY = SamplingParams(temperature=0.0)
VERIFIER_RETRY_S = 0.5
VERIFIER_DEADLINE_S = 15.0
"""How long a generation looks for another verifier."""


class Ear(Protocol):
    """A client of a generation."""

    def took(self, chunk: Chunk) -> None:
        """Tokens arrive."""
        ...

    def logged(self, length: int) -> None:
        """The session log is so long."""
        ...

    def ended(self, whole: bool) -> None:
        """The generation is over: delivered whole, or with an error."""
        ...

    def moved(self) -> None:
        """It lost a worker."""
        ...

    def noted(self, committed: Round) -> None:
        """A verdict was committed."""
        ...


class TimedOrchestrator:
    """See the module's head."""

    def __init__(
        self, number: int, zone: int, setting: Setting, clock: Clock, registry: Registry, wires: Wires
    ) -> None:
        self.number, self.zone, self.alive = number, zone, True
        self.busy_s = 0.0
        self._setting, self._clock, self._wires = setting, clock, wires
        self._costs: Costs = setting.costs
        metrics = Metrics()
        self.placement = TimedPlacement(registry, clock, metrics, setting.seed * 1009 + number)
        self._pass_costs = CostsByVerifier()
        self._free_s = 0.0
        self.running: dict[TimedGeneration, Ear] = {}

    # -- beginning ---------------------------------------------------------------------------------------------------

    def begin(
        self, session: tuple[SessionId, int], token_ids: tuple[int, ...], prompt_len: int, final_len: int, ear: Ear
    ) -> None:
        """Begin, or resume, a generation.

        Args:
            session: its id, and the fencing number of its lease.
            token_ids: its log.
            prompt_len: of it, the prompt.
            final_len: where it ends.
            ear: its client.

        Raises:
            OutriderError: no verifier is to be had.
        """
        length, choice = len(token_ids), self._setting.load.choice
        verifier = at_once(self.placement.choose_verifier(MODEL, room=Room(length + 1, final_len)))
        drafter, reason = None, "requested"
        if not choice.off:
            wanted = Wanted(length=length, session_id=session[0], new=True, insists=choice.gamma is not None)
            drafter, reason = at_once(self.placement.choose_drafter(verifier, wanted))
        job = Job(*session, token_ids, prompt_len, final_len, verifier, drafter, reason, choice, self._setting.limits)
        generation = TimedGeneration(job, self, self.placement.steering)
        self.running[generation] = ear
        generation.start()

    # -- surroundings of a generation --------------------------------------------------------------------------------

    @property
    def now_s(self) -> float:
        """The time."""
        return self._clock.now_s

    def pass_costs(self, verifier_id: WorkerId) -> PassCosts:
        """Return a verifier's costs, as all sessions here see them."""
        return self._pass_costs.of(verifier_id)

    def noted(self, generation: TimedGeneration, committed: Round) -> None:
        """A verdict was committed."""
        self.running[generation].noted(committed)

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Have something done later, if this orchestrator still lives."""
        self._clock.after(delay_s, self._if_alive, action)

    def carry(self, generation: TimedGeneration, command: Command) -> None:
        """Do what a generation asks for."""
        match command:
            case OpenVerifier() | TellVerifier() | CloseVerifier():
                self._to_verifier(generation, command)
            case OpenDrafter() | TellDrafter() | CloseDrafter():
                self._to_drafter(generation, command)
            case ChooseDrafter():
                self._choose_drafter(generation, command.exclude)
            case ChooseVerifier():
                self._choose_verifier(generation, command.exclude, self.now_s + VERIFIER_DEADLINE_S)
            case AppendLog():
                length = command.start + len(command.token_ids)
                self._clock.after(self._costs.store_s, self._log, generation, length)
            case Emit():
                self.running[generation].took(command.chunk)
                generation.feed(Taken(command.chunk.start + len(command.chunk.token_ids)))
            case Count():
                self._count(generation, command.name)
            case Finish() | Fail():
                self._wires.close(generation)
                self.running.pop(generation).ended(isinstance(command, Finish))

    # -- to workers --------------------------------------------------------------------------------------------------

    def _to_verifier(self, generation: TimedGeneration, command: OpenVerifier | TellVerifier | CloseVerifier) -> None:
        held = generation.held
        match command:
            case OpenVerifier():
                held.opened = command.generation
                self._wires.open_verifier(self, generation, _decode_open(generation, command))
            case TellVerifier():
                self._wires.tell_verifier(self, generation, command.message)
            case CloseVerifier():
                self._wires.close_verifier(self, generation)

    def _to_drafter(self, generation: TimedGeneration, command: OpenDrafter | TellDrafter | CloseDrafter) -> None:
        match command:
            case OpenDrafter():
                generation.held.drafting = command.epoch.generation
                self._wires.open_drafter(self, generation, _draft_open(generation, command))
            case TellDrafter():
                self._wires.tell_drafter(self, generation, command.commit)
            case CloseDrafter():
                self._wires.close_drafter(self, generation, command.generation)

    # -- from workers ------------------------------------------------------------------------------------------------

    def heard_verifier(
        self, generation: TimedGeneration, opened: Generation, heard: DecodeResponseMessage | OutriderError | None
    ) -> None:
        """Something of a verifier arrives; an orchestrator takes verdicts one after the other."""
        if not self.alive or generation not in self.running:
            return
        if isinstance(heard, Verdict):
            self._free_s = max(self._free_s, self.now_s) + self._costs.message_s
            self.busy_s += self._costs.message_s
            self._clock.at(self._free_s, self._verdict, generation, opened, heard)
        elif isinstance(heard, OutriderError):
            self.lost_verifier(generation, opened, heard.reason.lower(), broken=isinstance(heard, Unavailable))

    def _verdict(self, generation: TimedGeneration, opened: Generation, verdict: Verdict) -> None:
        if not self.alive or generation not in self.running:
            return
        if verdict.num_tested and generation.held.drafter is not None:
            self.placement.breakers.succeeded(generation.held.drafter.worker_id, generation.held.drafter_opened_s)
        self.placement.breakers.succeeded(generation.held.verifier.worker_id, generation.held.verifier_opened_s)
        generation.feed(VerdictArrived(opened, verdict))

    def heard_drafter(self, generation: TimedGeneration, drafting: Generation, status: DraftStatus) -> None:
        """A draft worker reports."""
        if self.alive and generation in self.running:
            generation.heard(status, drafting)

    def lost_verifier(self, generation: TimedGeneration, opened: Generation, reason: str, *, broken: bool) -> None:
        """A stream to a verifier ended."""
        if not self.alive or generation not in self.running or generation.held.opened != opened:
            return
        if broken:
            self.placement.breakers.failed(generation.held.verifier.worker_id)
        generation.feed(VerifierLost(opened, reason))

    def break_verifier(self, generation: TimedGeneration, opened: Generation) -> None:
        """The verifier of a generation is gone, and this is when it is noticed."""
        self.lost_verifier(generation, opened, "unavailable", broken=True)

    def lost_drafter(self, generation: TimedGeneration, drafting: Generation, reason: str) -> None:
        """A stream to a draft worker ended."""
        if not self.alive or generation not in self.running or generation.held.drafting != drafting:
            return
        if generation.held.drafter is not None and reason == "unavailable":
            self.placement.breakers.failed(generation.held.drafter.worker_id)
        generation.feed(DrafterLost(drafting, reason))

    # -- searches ----------------------------------------------------------------------------------------------------

    def _choose_drafter(self, generation: TimedGeneration, exclude: Collection[WorkerId]) -> None:
        choice = self._setting.load.choice
        wanted = Wanted(
            length=len(generation.rounds.tokens),
            exclude=frozenset(exclude) | generation.lost_ids,
            session_id=generation.job.session_id,
            insists=choice.gamma is not None,
        )
        worker, _ = at_once(self.placement.choose_drafter(generation.held.verifier, wanted))
        if worker is not None:
            generation.held.drafter = worker
            generation.feed(DrafterChosen(worker.worker_id))

    def _choose_verifier(self, generation: TimedGeneration, exclude: Collection[WorkerId], give_up_s: float) -> None:
        if generation not in self.running:
            return
        try:
            room = Room(generation.job.final_len)
            worker = at_once(self.placement.choose_verifier(MODEL, exclude, room=room))
        except OutriderError:
            if self.now_s + VERIFIER_RETRY_S > give_up_s:
                generation.feed(VerifierChosen(None))
            else:
                self.later(VERIFIER_RETRY_S, lambda: self._choose_verifier(generation, exclude, give_up_s))
            return
        generation.held.verifier = worker
        generation.feed(VerifierChosen(worker.worker_id))

    # -- the rest ----------------------------------------------------------------------------------------------------

    def _log(self, generation: TimedGeneration, length: int) -> None:
        """The log is longer; whoever resumes the session finds it so, also where this process is gone by then."""
        if self.alive and generation in self.running:
            self.running[generation].logged(length)
            generation.feed(Logged(length))

    def _count(self, generation: TimedGeneration, name: str) -> None:
        if name in ("drafter_lost", "verifier_lost"):
            self.running[generation].moved()
        if name == "drafter_lost" and generation.rounds.off_reason in ("drafter_slow", "drafter_stuck"):
            drafter = generation.held.drafter
            if drafter is not None:
                self.placement.breakers.failed(drafter.worker_id)

    def _if_alive(self, action: Callable[[], None]) -> None:
        if self.alive:
            action()


def _decode_open(generation: TimedGeneration, command: OpenVerifier) -> DecodeOpen:
    return DecodeOpen(
        generation.job.session_id, command.generation, command.token_ids, command.classes, Mode.GREEDY, GREEDY, b"",
        prompt_len=generation.job.prompt_len, commit_limit=command.commit_limit, speculation=command.speculation,
        patience_s=command.patience_s, worker_id=command.drafter_id or WorkerId(""),
    )  # fmt: skip


def _draft_open(generation: TimedGeneration, command: OpenDrafter) -> DraftOpen:
    verifier: WorkerDescription = generation.held.verifier
    return DraftOpen(
        generation.job.session_id, command.epoch, command.token_ids, Mode.GREEDY, GREEDY, b"", command.speculation,
        verifier.worker_id, verifier.address, prompt_len=generation.job.prompt_len, max_len=generation.job.final_len,
    )  # fmt: skip
