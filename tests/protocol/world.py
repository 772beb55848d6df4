"""All that can happen between the three machines: the streams, what is on them, and every possible next move.

A `State` is a tuple of numbers (`parts.Memory`): the three machines, the messages on each stream in order, and what the
search has left to spend on trouble. A `Move` is one event: a message arrives, the verifier or the drafter gets
time, a timer runs out, something breaks. Moves that cost nothing are what a fair scheduler does sooner or later; the
others are trouble, each kind with its own budget.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from draft_service import events as draft
from draft_service.window import Window
from orchestrator import events as orch
from orchestrator.rounds import Rounds
from outrider.ids import Mode, WorkerId
from outrider.messages import RollbackHint, Speculation, Verdict
from tests.protocol.parts import (
    PROMPT,
    BeginDraft,
    DrafterPart,
    DrawTokens,
    EndAt,
    Memory,
    OrchestratorPart,
    VerifierPart,
    Violation,
    check,
    plan_for,
    twin_text,
)
from tests.protocol.wording import say
from verify_service import events as verify
from verify_service.chain import Chain

NONE = -1
STREAMS = ("to_verifier", "to_orchestrator", "to_drafter", "asked", "proposed", "proposed_before", "hinted")
TROUBLE = ("timer", "break", "drop", "double", "drafter", "verifier", "hang", "tune", "unhint")

_DOUBLED = (verify.Arrived, orch.TellVerifier, orch.TellDrafter, orch.VerdictArrived, RollbackHint)
"""What may arrive twice."""


@dataclass(frozen=True)
class Setting:
    """One search: who plays, and how much trouble there may be."""

    num_tokens: int = 4
    speculation: Speculation = Speculation(1, 1, 1)
    mode: Mode = Mode.GREEDY
    rows: tuple[int, ...] = (32,)
    """Rows that a schedule of the verifier may have."""
    max_len: int = 0
    """Drafter's context; 0: no limit."""
    passes: bool = False
    """Whether the drafter may pass."""
    trees: bool = False
    """Whether the drafter guesses trees."""
    ahead: bool = False
    """Whether the verifier may feed its last token while it awaits the drafter."""
    hints: bool = False
    """Whether the verifier tells the drafter of an epoch's end: a stream of its own, which may lose anything."""
    slow_log: bool = False
    """Whether the log answers at some later time instead of at once."""
    tunings: tuple[Speculation, ...] = ()
    trouble: tuple[tuple[str, int], ...] = ()
    """How often each kind of trouble may strike."""
    chain: type[Chain] = Chain
    window: type[Window] = Window

    @property
    def final_len(self) -> int:
        return len(PROMPT) + self.num_tokens


class State(NamedTuple):
    """Everything, in numbers."""

    rounds: int
    chain: int = NONE
    window: int = NONE
    to_verifier: tuple[int, ...] = ()
    to_orchestrator: tuple[int, ...] = ()
    to_drafter: tuple[int, ...] = ()
    asked: tuple[int, ...] = ()
    proposed: tuple[int, ...] = ()
    """On the `Propose` stream of the drafter opened last."""
    proposed_before: tuple[int, ...] = ()
    """On that of the one before it."""
    hinted: tuple[int, ...] = ()
    """On the way back of the `Propose` stream, whoever drafts when it arrives."""
    placing: tuple[int, ...] = ()
    appending: tuple[int, ...] = ()
    shown: int = 0
    severed: bool = False
    """The `Propose` stream is down; what is sent now is lost."""
    unheard: bool = False
    """The drafter still talks to a verifier that is gone."""
    hung: bool = False
    blind: int = NONE
    """Epoch of a lost message that nothing has followed yet, so that only patience can notice."""
    budget: tuple[int, ...] = ()


class Move(NamedTuple):
    """One thing that can happen, and what is then."""

    label: str
    is_trouble: bool
    state: State


@dataclass(frozen=True)
class Broken:
    """On a `Propose` stream: it ended here, or begins again."""

    worker_id: WorkerId


@dataclass(frozen=True)
class Lost:
    """On a `Propose` stream: a message was here."""

    epoch: int


@dataclass
class World:
    """The rules of one setting."""

    setting: Setting
    memory: Memory = field(default_factory=Memory)

    # -- starting ----------------------------------------------------------------------------------------------------

    def start(self) -> State:
        """Return the state in which both streams have just been opened."""
        setting = self.setting
        plan = plan_for(setting.final_len, setting.speculation)
        rounds = Rounds(plan, EndAt(setting.final_len))
        budget = tuple(dict(setting.trouble).get(kind, 0) for kind in TROUBLE)
        state = State(self.memory.keep(OrchestratorPart(rounds)), budget=budget)
        return self.orchestrate(state, orch.Started(WorkerId("v"), WorkerId("d1")))

    def is_over(self, state: State) -> bool:
        return self.rounds(state).over

    def rounds(self, state: State) -> Rounds:
        part: OrchestratorPart = self.memory.parts[state.rounds]
        return part.rounds

    def chain(self, state: State) -> Chain | None:
        part: VerifierPart | None = self.memory.parts[state.chain] if state.chain != NONE else None
        return part.chain if part is not None else None

    def drafter(self, state: State) -> DrafterPart | None:
        part: DrafterPart | None = self.memory.parts[state.window] if state.window != NONE else None
        return part

    # -- one event at a machine --------------------------------------------------------------------------------------

    def orchestrate(self, state: State, event: orch.Event) -> State:
        """Give the rounds an event, and put what they command on the streams."""
        number, commands = self.memory.step(state.rounds, event)
        state = state._replace(rounds=number)
        for command in commands:
            state = self._command(state, command)
        return state

    def _command(self, state: State, command: orch.Command) -> State:
        match command:
            case orch.OpenVerifier() | orch.TellVerifier() | orch.CloseVerifier():
                return self._put(state, "to_verifier", command)
            case orch.OpenDrafter() | orch.TellDrafter() | orch.CloseDrafter():
                return self._put(state, "to_drafter", command)
            case orch.ChooseDrafter() | orch.ChooseVerifier():
                return self._put(state, "placing", command)
            case orch.AppendLog():
                logged = orch.Logged(command.start + len(command.token_ids))
                return self._put(state, "appending", logged)
            case orch.Emit():
                check(command.chunk.start == state.shown + len(PROMPT), "shown out of order")
                return state._replace(shown=state.shown + len(command.chunk.token_ids))
            case orch.Finish():
                check(state.shown == self.setting.num_tokens, f"finished after {state.shown} tokens were shown")
                return state
            case orch.Fail():
                raise Violation(f"failed: {command.error}")
            case _:
                return state

    def tell_chain(self, state: State, event: verify.Event) -> State:
        """Give the chain an event; its verdicts go to the orchestrator, its hints to the drafter."""
        number, said = self.memory.step(state.chain, event)
        state = state._replace(chain=number)
        opened = self.rounds(state)._opened
        for message in said:
            if isinstance(message, Verdict):
                state = self._put(state, "to_orchestrator", orch.VerdictArrived(opened, message))
            elif self.setting.hints and not state.severed:
                state = self._put(state, "hinted", message)
        return state

    def tell_window(self, state: State, event: Any) -> State:
        """Give the window an event; its messages go to the verifier, unless nobody hears them."""
        number, out = self.memory.step(state.window, event)
        part: DrafterPart = self.memory.parts[number]
        state = state._replace(window=number)
        for message in out:
            if isinstance(message, draft.AskFrom):
                generation = part.window.epoch.generation
                state = self._put(state, "asked", orch.DrafterAsked(generation, message.position))
            elif not (state.severed or state.unheard):
                state = self._put(state, "proposed", verify.Arrived(part.worker_id, message))
        return state

    def _put(self, state: State, stream: str, value: Any) -> State:
        longer: dict[str, Any] = {stream: (*getattr(state, stream), self.memory.number(value))}
        return state._replace(**longer)

    # -- delivery ----------------------------------------------------------------------------------------------------

    def deliver(self, state: State, stream: str, value: Any) -> State:
        """Let what was first on a stream arrive."""
        match stream:
            case "to_orchestrator" | "asked" | "appending":
                return self.orchestrate(state, value)
            case "placing":
                return self.orchestrate(state, _placed(value))
            case "to_verifier":
                return self._control_verifier(state, value)
            case "to_drafter":
                return self._control_drafter(state, value)
            case "hinted":
                return self.tell_window(state, value) if state.window != NONE else state
            case _:
                return self._proposed(state, value)

    def _control_verifier(self, state: State, command: Any) -> State:
        match command:
            case orch.OpenVerifier():
                part = VerifierPart.opened(command, self.setting.mode, self.setting.chain)
                return state._replace(chain=self.memory.keep(part))
            case orch.TellVerifier() if state.chain != NONE:
                return self.tell_chain(state, command.message)
            case orch.CloseVerifier():
                return state._replace(chain=NONE)
            case _:
                return state

    def _control_drafter(self, state: State, command: Any) -> State:
        match command:
            case orch.OpenDrafter():
                return self._open_drafter(state, command)
            case orch.TellDrafter() if state.window != NONE:
                return self.tell_window(state, command.commit)
            case orch.CloseDrafter():
                return state._replace(window=NONE)
            case _:
                return state

    def _proposed(self, state: State, value: Any) -> State:
        match value:
            case Broken():
                return self.tell_chain(state, verify.StreamBroken(value.worker_id))
            case Lost():
                return state._replace(blind=value.epoch)
            case _:
                return self.tell_chain(self._seen(state, value), value)

    def _open_drafter(self, state: State, command: orch.OpenDrafter) -> State:
        setting = self.setting
        part = DrafterPart.opened(command, setting.mode, setting.max_len, setting.window, trees=setting.trees)
        before = () if state.unheard else (*state.proposed_before, *state.proposed)
        return state._replace(
            window=self.memory.keep(part), proposed=(), proposed_before=before, severed=False, unheard=False, hung=False
        )

    def _seen(self, state: State, arrived: verify.Arrived) -> State:
        """A message behind a lost one shows the gap."""
        if state.blind == self.memory.number(arrived.message.epoch):
            return state._replace(blind=NONE)
        return state

    # -- moves -------------------------------------------------------------------------------------------------------

    def moves(self, state: State) -> Iterator[Move]:
        """Yield everything that can happen next; forced timers only where nothing else can."""
        num_free = 0
        for label, after in self._free(state):
            if after != state:
                num_free += 1
                yield Move(label, False, self.checked(after))
        if not num_free:
            yield from self._forced(state)
        for kind, label, after in self._troubles(state):
            index = TROUBLE.index(kind)
            left = state.budget[index]
            budget = (*after.budget[:index], left - 1, *after.budget[index + 1 :])
            yield Move(label, True, self.checked(after._replace(budget=budget)))

    def _free(self, state: State) -> Iterator[tuple[str, State]]:
        for stream in (*STREAMS, "placing", "appending"):
            waiting = getattr(state, stream)
            if waiting and not (stream.startswith("proposed") and state.chain == NONE):
                value = self.memory.values[waiting[0]]
                shorter: dict[str, Any] = {stream: waiting[1:]}
                yield f"{stream}: {say(value)}", self.deliver(state._replace(**shorter), stream, value)
        if state.chain != NONE:
            for max_rows in self.setting.rows:
                yield f"verifier has {max_rows} rows", self.tell_chain(state, verify.Scheduled(max_rows))
            if self.setting.ahead:
                yield "verifier runs ahead", self.tell_chain(state, verify.Scheduled(32, ahead=True))
        if state.severed and not state.unheard:
            yield "Propose stream opened again", self._broken(state)._replace(severed=False)
        yield from self._drafting(state)

    def _drafting(self, state: State) -> Iterator[tuple[str, State]]:
        drafter = self.drafter(state)
        if drafter is None or state.hung:
            return
        if drafter.window.wants_time:
            yield "drafter begins", self.tell_window(state, BeginDraft())
            if self.setting.passes:
                yield "drafter passes", self.tell_window(state, BeginDraft(passes=True))
        for choice in range(drafter.num_choices):
            yield f"drafter draws, wrong at {choice}", self.tell_window(state, DrawTokens(choice))

    def _forced(self, state: State) -> Iterator[Move]:
        """Where nothing else can happen, a silent drafter leaves it to the timer; any other silence is a dead state."""
        chain = self.chain(state)
        silent = state.hung or (chain is not None and state.blind == self.memory.number(chain.epoch))
        if not self.is_over(state):
            check(
                silent and chain is not None and chain.timer.running is not None,
                "dead state: nothing can happen any more",
            )
            yield Move("timer runs out at last", False, self.checked(self._expire(state)))

    def _expire(self, state: State) -> State:
        chain = self.chain(state)
        assert chain is not None
        assert chain.timer.running is not None
        return self.tell_chain(state, verify.TimerExpired(chain.timer.running[1]))

    def _broken(self, state: State) -> State:
        drafter = self.drafter(state)
        return self._put(state, "proposed", Broken(drafter.worker_id)) if drafter is not None else state

    def _troubles(self, state: State) -> Iterator[tuple[str, str, State]]:
        left = dict(zip(TROUBLE, state.budget, strict=True))
        chain, rounds = self.chain(state), self.rounds(state)
        if left["timer"] and chain is not None and chain.timer.running is not None:
            yield "timer", "timer runs out", self._expire(state)
        if left["break"] and state.window != NONE and not (state.severed or state.unheard):
            broken = self._broken(state._replace(proposed=(), hinted=()))
            yield "break", "Propose stream breaks", broken._replace(severed=True)
        if left["hang"] and state.window != NONE and not state.hung:
            yield "hang", "drafter hangs", state._replace(hung=True)
        if left["drafter"] and rounds._drafter is not None and not rounds.over:
            lost = orch.DrafterLost(rounds._drafter.generation, "lost")
            yield "drafter", "Draft stream breaks", self.orchestrate(state, lost)
        if left["verifier"] and state.chain != NONE and not rounds.over:
            yield "verifier", "verifier is lost", self._lose_verifier(state)
        if left["tune"]:
            speculation = self.setting.tunings[-left["tune"]]
            yield "tune", f"policy: {speculation}", self.orchestrate(state, orch.Tuned(speculation, 1.0))
        yield from self._mishaps(state, left)

    def _mishaps(self, state: State, left: dict[str, int]) -> Iterator[tuple[str, str, State]]:
        """Messages that are lost, or arrive twice."""
        if left["drop"] and state.proposed and state.chain != NONE:
            value = self.memory.values[state.proposed[0]]
            if isinstance(value, verify.Arrived):
                lost = self.memory.number(Lost(self.memory.number(value.message.epoch)))
                yield "drop", f"lost: {say(value)}", state._replace(proposed=(lost, *state.proposed[1:]))
        if left["unhint"] and state.hinted:
            value = self.memory.values[state.hinted[0]]
            yield "unhint", f"lost: {say(value)}", state._replace(hinted=state.hinted[1:])
        for stream in STREAMS if left["double"] else ():
            waiting = getattr(state, stream)
            value = self.memory.values[waiting[0]] if waiting else None
            if isinstance(value, _DOUBLED):
                if stream.startswith("proposed") and state.chain == NONE:
                    continue
                rotated: dict[str, Any] = {stream: (*waiting[1:], waiting[0])}
                again = state._replace(**rotated)
                yield "double", f"{stream}, and again later: {say(value)}", self.deliver(again, stream, value)

    def _lose_verifier(self, state: State) -> State:
        gone = state._replace(chain=NONE, to_verifier=(), proposed=(), proposed_before=(), unheard=True, severed=False)
        return self.orchestrate(gone, orch.VerifierLost(self.rounds(state)._opened, "lost"))

    # -- checks ------------------------------------------------------------------------------------------------------

    def checked(self, state: State) -> State:
        """Check what must hold between the machines; return the state."""
        if not self.setting.slow_log:
            while state.appending:
                logged = self.memory.values[state.appending[0]]
                state = self.orchestrate(state._replace(appending=state.appending[1:]), logged)
        rounds, chain, drafter = self.rounds(state), self.chain(state), self.drafter(state)
        if drafter is not None:
            window = drafter.window
            seen = tuple(window.ids[: window.seen_len])
            check(seen == twin_text(len(seen)), "the drafter has seen what was not committed")
            check(window.confirmed_len <= len(rounds.tokens), "the drafter was told more than was committed")
        if chain is not None and not state.unheard:
            check(rounds.tokens == chain.tokens[: len(rounds.tokens)], "orchestrator and verifier disagree")
        check(state.shown + len(PROMPT) <= rounds.logged_len, "shown before it was logged")
        return state


def _placed(asked: Any) -> orch.Event:
    if isinstance(asked, orch.ChooseVerifier):
        return orch.VerifierChosen(WorkerId("v"))
    return orch.DrafterChosen(WorkerId(f"d{len(asked.exclude) + 1}"))
