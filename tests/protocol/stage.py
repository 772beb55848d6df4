"""The three real machines on a stage: scenes are played step by step, and written down as they happen.

Every step of a machine is a line with the event, followed by its commands, each behind an arrow. What one machine sends
waits on a stream until a scene lets it arrive.
"""

from collections import deque
from dataclasses import dataclass, field

from draft_service import events as draft
from draft_service.window import Window
from orchestrator import events as orch
from orchestrator.rounds import Rounds
from outrider.generation import Chunk
from outrider.ids import FinishReason, Mode, WorkerId
from outrider.messages import (
    COUNT_TOTAL,
    DecodeOpen,
    DraftOpen,
    RollbackHint,
    SamplingParams,
    SparseRow,
    Speculation,
    Verdict,
)
from tests.protocol.parts import PROMPT, SESSION, VOCAB, plan_for, target_token
from tests.protocol.script import command_line, event_line
from verify_service import events as verify
from verify_service.chain import Chain
from verify_service.reports import hint_of


@dataclass(frozen=True)
class StopAt:
    """A committer that ends at a position, with a stop token or without."""

    final_len: int
    stop_at: int = -1

    def take(self, start: int, token_ids, kinds, logprobs) -> orch.Outcome:  # type: ignore[no-untyped-def]
        end = min(start + len(token_ids), self.final_len)
        finish = FinishReason.LENGTH if end == self.final_len else None
        if start <= self.stop_at < end:
            end, finish = self.stop_at + 1, FinishReason.STOP
        return orch.Outcome(Chunk(start, tuple(token_ids[: end - start]), "", tuple(kinds[: end - start])), finish)


@dataclass
class Stage:
    """One generation of `num_tokens` tokens behind the toy prompt, positions 3 and up."""

    speculation: Speculation
    mode: Mode = Mode.GREEDY
    num_tokens: int = 6
    stop_at: int = -1
    hints: bool = False
    """Whether the verifier sends hints, on a stream of their own."""
    wrong: tuple[int, ...] = ()
    """Positions at which the drafter's next try is wrong."""
    lines: list[str] = field(default_factory=list)
    streams: dict[str, deque[object]] = field(default_factory=dict)
    chain: Chain | None = None
    window: Window | None = None
    worker_id: WorkerId = WorkerId("")
    drawing: draft.Draw | None = None
    opened_streams: int = 0

    def __post_init__(self) -> None:
        self.streams = {name: deque() for name in ("decode", "draft", "propose", "verdicts", "hints", "log")}
        final_len = len(PROMPT) + self.num_tokens
        self.rounds = Rounds(plan_for(final_len, self.speculation), StopAt(final_len, self.stop_at))
        self.orchestrator(orch.Started(WorkerId("v"), WorkerId("d1")))

    def note(self, text: str) -> None:
        """Write a remark of the scene."""
        self.lines.append(f"# {text}")

    def _write(self, who: str, event: object, commands: list[str]) -> None:
        self.lines.append(f"{who:<13}{event_line(event)}")
        self.lines.extend(f"{'':<13}-> {command}" for command in commands)

    # -- machines ----------------------------------------------------------------------------------------------------

    def orchestrator(self, event: orch.Event) -> None:
        commands = self.rounds.step(event)
        self._write("orchestrator", event, [command_line(command) for command in commands])
        for command in commands:
            match command:
                case orch.OpenVerifier() | orch.TellVerifier() | orch.CloseVerifier():
                    self.streams["decode"].append(command)
                case orch.OpenDrafter() | orch.TellDrafter() | orch.CloseDrafter():
                    self.streams["draft"].append(command)
                case orch.AppendLog():
                    self.streams["log"].append(orch.Logged(command.start + len(command.token_ids)))
                case _:
                    pass

    def verifier(self, event: verify.Event) -> None:
        assert self.chain is not None
        commands = self.chain.step(event)
        if commands or not isinstance(event, verify.Scheduled):
            self._write("verifier", event, [command_line(command) for command in commands])
        for command in commands:
            match command:
                case verify.Test():
                    self.verifier(self._judged(command))
                case verify.Report():
                    self.streams["verdicts"].append(orch.VerdictArrived(self.rounds._opened, _verdict(command)))
                    hint = hint_of(self.chain, command) if self.hints else None
                    self.streams["hints"].extend([hint] if hint is not None else [])
                case _:
                    pass

    def _judged(self, test: verify.Test) -> verify.Judged:
        assert self.chain is not None
        context = list(self.chain.tokens)
        for index, token in enumerate(test.token_ids):
            if token != target_token(context):
                return verify.Judged(index, index + 1, target_token(context))
            context.append(token)
        drawn = target_token(context) if test.draw is not None else None
        return verify.Judged(len(test.token_ids), len(test.token_ids), drawn)

    def drafter(self, event: draft.Event) -> None:
        assert self.window is not None
        commands = self.window.step(event)
        self._write("drafter", event, [command_line(command) for command in commands])
        for command in commands:
            match command:
                case draft.Send():
                    self.streams["propose"].append(verify.Arrived(self.worker_id, command.message))
                case draft.Draw():
                    self.drawing = command
                case _:
                    pass

    # -- what a scene may let happen ---------------------------------------------------------------------------------

    def begin(self, count: int | None = None, until_len: int = 0) -> None:
        """The drafter has time, and offers all it is asked for, or `count` tokens."""
        assert self.window is not None
        self.drafter(draft.Scheduled())
        under_way = self.window._draft
        assert under_way is not None
        self.drafter(draft.Planned(under_way.ticket, under_way.count if count is None else count, until_len))

    def draw(self) -> None:
        """The drafter draws the whole proposal."""
        assert self.window is not None
        assert self.drawing is not None
        context, start = list(self.window.ids), len(self.window.ids)
        for position in range(start, start + self.drawing.count):
            context.append((target_token(context) + (position in self.wrong)) % VOCAB)
        self.wrong = tuple(position for position in self.wrong if position >= len(context))
        rows = tuple(SparseRow((token,), (COUNT_TOTAL,)) for token in context[start:]) if self.mode.needs_rows else ()
        self.drafter(draft.Drawn(self.drawing.ticket, tuple(context[start:]), rows))
        self.drawing = None

    def propose(self) -> None:
        self.begin()
        self.draw()

    def verify(self) -> None:
        """The verifier has rows to spare until nothing is left to do."""
        assert self.chain is not None
        before = -1
        while before != len(self.lines):
            before = len(self.lines)
            self.verifier(verify.Scheduled(32))

    def verify_once(self) -> None:
        self.verifier(verify.Scheduled(32))

    def expire(self) -> None:
        assert self.chain is not None
        assert self.chain.timer.running is not None
        self.verifier(verify.TimerExpired(self.chain.timer.running[1]))

    def deliver(self, *names: str) -> None:
        """Let everything arrive that waits on these streams, one after the other."""
        for name in names:
            while self.streams[name]:
                self.deliver_one(name)

    def deliver_one(self, name: str) -> None:
        message = self.streams[name].popleft()
        match message:
            case orch.VerdictArrived() | orch.Logged():
                self.orchestrator(message)
            case verify.Arrived():
                self.verifier(message)
            case orch.OpenVerifier():
                self._open_verifier(message)
            case orch.TellVerifier():
                self.verifier(message.message)
            case orch.OpenDrafter():
                self._open_drafter(message)
            case orch.TellDrafter():
                self.drafter(message.commit)
            case RollbackHint():
                self.drafter(message)
            case _:
                self.lines.append(f"{'verifier' if name == 'decode' else 'drafter':<13}closed")

    def _open_verifier(self, opened: orch.OpenVerifier) -> None:
        request = DecodeOpen(
            SESSION, opened.generation, opened.token_ids, opened.classes, self.mode, SamplingParams(), b"",
            commit_limit=opened.commit_limit, speculation=opened.speculation,
            worker_id=opened.drafter_id or WorkerId(""),
        )  # fmt: skip
        self.chain = Chain(request, VOCAB)
        self.lines.append(f"{'verifier':<13}opened with {len(opened.token_ids)} tokens")

    def _open_drafter(self, opened: orch.OpenDrafter) -> None:
        request = DraftOpen(
            SESSION, opened.epoch, opened.token_ids, self.mode, SamplingParams(), b"", opened.speculation,
            WorkerId("v"), "",
        )  # fmt: skip
        self.window, self.worker_id = Window(request), opened.worker_id
        self.lines.append(f"{'drafter':<13}{opened.worker_id} opened with {len(opened.token_ids)} tokens")

    def play(self, *steps: str) -> None:
        """Do several things by name: a stream's name delivers it, anything else is a method."""
        for step in steps:
            if step in self.streams:
                self.deliver(step)
            else:
                getattr(self, step)()


def _verdict(report: verify.Report) -> Verdict:
    return Verdict(
        SESSION, report.epoch, report.start, report.token_ids, report.kinds, report.num_accepted, report.num_tested,
        report.next_epoch, report.cause,
    )  # fmt: skip
