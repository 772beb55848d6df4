"""The real three machines and the real rules, played through one generation by a fixed schedule and a given source.

A schedule is a string of moves, "these once|these again and again"; what it lets happen when is fixed before anything
is drawn, so that it is a fair test of the law. A move that is not possible does nothing:

    d  the drafter makes a proposal (headers and rows as sent on the wire)    n  it passes instead
    p  the first message on the Propose stream arrives                        l  the log answers
    v  the verifier has rows                                                  c  the first verdict is committed
    h  the first hint reaches the drafter (without it in the schedule none is sent)                  H  it is lost
    t  patience runs out                          s  the drafter is swapped   r  the verifier is lost and opened again
    w  it is lost in the middle of a pass
    x  the Propose stream breaks and its messages are lost                    g  its first message is lost
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, cycle, islice
from typing import Protocol

import torch
from torch import Tensor

from draft_service import events as draft
from draft_service.window import Window
from orchestrator import events as orch
from orchestrator.rounds import Rounds
from outrider.ids import Epoch, Mode, SessionId, WorkerId
from outrider.messages import (
    DecodeOpen,
    DraftOpen,
    Proposal,
    ProposalHeader,
    ProposeMessage,
    RollbackHint,
    SamplingParams,
    SparseRow,
    Speculation,
    Verdict,
)
from outrider.noise import Purpose
from outrider.verification import Tree, judge_tree, rule_for
from tests.exactness.toy import Source
from tests.protocol.parts import EndAt, frozen, plan_for
from verify_service import events as verify
from verify_service.chain import Chain
from verify_service.reports import hint_of

SESSION = SessionId("s")
MAX_MOVES = 400
Use = tuple[Purpose, int, Epoch, int]


class TreeSource(Source, Protocol):
    """Draws that serve a drafter of trees, too."""

    def draw_sibling(self, row: SparseRow, before: Sequence[int]) -> int | None: ...


@dataclass
class CountedSource:
    """Passes draws on, and refuses to serve the same (purpose, position, epoch) twice: keys would repeat there."""

    inner: TreeSource
    epoch: Epoch = Epoch()
    used: set[Use] = field(default_factory=set)

    def use(self, purpose: Purpose, position: int, epoch: Epoch, node: int = 0) -> None:
        key = (purpose, position, epoch, node)
        assert key not in self.used, f"drawn twice from {key}"
        self.used.add(key)

    def accept(self, target_prob: float, draft_prob: float, position: int) -> bool:
        self.use(Purpose.COIN, position, self.epoch)
        return self.inner.accept(target_prob, draft_prob, position)

    def pick(self, weights: Tensor, purpose: Purpose, position: int) -> int:
        self.use(purpose, position, self.epoch)
        return self.inner.pick(weights, purpose, position)


@dataclass(frozen=True)
class Tables:
    """Target and draft: the next token's distribution for every prefix, as tensors and as rows on the wire."""

    target: Callable[[tuple[int, ...]], Tensor]
    """[vocab] float64 probabilities."""
    draft: Callable[[tuple[int, ...]], SparseRow]
    vocab_len: int = 3


@dataclass(frozen=True)
class Play:
    """One way to play; calling it plays once, with the source's outcomes, and returns the generated tokens."""

    tables: Tables
    schedule: str
    mode: Mode = Mode.REJECTION
    speculation: Speculation = Speculation(1, 1, 1)
    length: int = 3
    tree: tuple[int, ...] = ()
    """Parents of the trees that are proposed, no deeper than gamma; empty: runs are."""
    drafts_to_the_end: bool = True
    """Whether the drafter knows the final length and passes there, instead of drafting past it."""
    chain: type[Chain] = Chain
    window: type[Window] = Window
    late: Callable[[ProposeMessage], bool] = lambda message: False
    """Messages that arrive only after patience has run out once more."""
    cut: Callable[[Proposal], int] = lambda proposal: len(proposal.token_ids)
    """How many of the drawn tokens are really proposed; header and all."""
    witnesses: set[str] = field(default_factory=set, compare=False)
    """What was seen to happen on some path: causes of verdicts, kinds of tokens, counters, tests on a held row."""
    reads_chain: bool = False
    """Return what the verifier holds to be the text, for mistakes that the orchestrator would not pass on."""

    def __call__(self, source: TreeSource) -> tuple[int, ...]:
        return _Performance(self, CountedSource(source)).run()


PROMPT_LEN = 3


class _Performance:
    """One generation under way."""

    def __init__(self, play: Play, source: CountedSource) -> None:
        self.play, self.source = play, source
        self.rule = rule_for(play.mode)
        self.final_len = PROMPT_LEN + play.length
        self.rounds = Rounds(plan_for(self.final_len, play.speculation), EndAt(self.final_len))
        self.proposed: deque[verify.Arrived] = deque()
        self.verdicts: deque[orch.VerdictArrived] = deque()
        self.appended: deque[orch.Logged] = deque()
        self.hinted: deque[RollbackHint] = deque()
        self.window: Window | None = None
        self.worker_id = WorkerId("")
        self.timer: verify.StartTimer | None = None
        self.overdue = False
        self.orchestrate(orch.Started(WorkerId("v"), WorkerId("d1")))

    def run(self) -> tuple[int, ...]:
        once, again = self.play.schedule.split("|")
        for move in islice(chain(once, cycle(again)), MAX_MOVES):
            if self.rounds.over:
                text = self.chain.tokens if self.play.reads_chain else self.rounds.tokens
                return tuple(text[PROMPT_LEN:])
            getattr(self, f"move_{move}")()
            if "l" not in self.play.schedule:
                self.move_l()
        raise AssertionError(f"no end: {self.play.schedule}")

    # -- moves ---------------------------------------------------------------------------------------------------------

    def move_d(self, count: int | None = None) -> None:
        if self.window is not None and self.window.wants_time:
            self.tell_window(draft.Scheduled(), count)

    def move_n(self) -> None:
        self.move_d(0)

    def move_p(self) -> None:
        if self.proposed and (self.overdue or not self.play.late(self.proposed[0].message)):
            self.overdue = False
            self.tell_chain(self.proposed.popleft())

    def move_v(self) -> None:
        self.tell_chain(verify.Scheduled(32))
        self._settle(flush=True)

    def move_a(self) -> None:
        """A pass that waits for nobody."""
        self._settle(flush=False)
        self.tell_chain(verify.Scheduled(32, ahead=True))
        self._settle(flush=True)

    def move_w(self) -> None:
        """A pass begins, and never ends."""
        self._settle(flush=False)
        self.tell_chain(verify.Scheduled(32), judging=False)
        while self.verdicts:
            self.move_c()
        self.move_r()

    def _settle(self, *, flush: bool) -> None:
        """What needs no pass is done at once, and after a pass everything is reported."""
        before: object = None
        while (self.chain.held or flush) and frozen(self.chain) != before:
            before = frozen(self.chain)
            self.tell_chain(verify.Scheduled(0))

    def move_c(self) -> None:
        if self.verdicts:
            self.orchestrate(self.verdicts.popleft())

    def move_h(self) -> None:
        if self.hinted:
            self.tell_window(self.hinted.popleft())

    def move_H(self) -> None:
        if self.hinted:
            self.hinted.popleft()

    def move_l(self) -> None:
        if self.appended:
            self.orchestrate(self.appended.popleft())

    def move_t(self) -> None:
        self.overdue = True
        if self.timer is not None and self.timer.kind is verify.TimerKind.PATIENCE:
            self.tell_chain(verify.TimerExpired(self.timer.number))

    def move_s(self) -> None:
        if self.rounds._drafter is not None:
            self.orchestrate(orch.DrafterLost(self.rounds._drafter.generation, "swapped"))

    def move_r(self) -> None:
        self.play.witnesses.add("verifier lost")
        self.proposed.clear()
        self.orchestrate(orch.VerifierLost(self.rounds._opened, "lost"))

    def move_x(self) -> None:
        self.proposed.clear()
        self.tell_chain(verify.StreamBroken(self.worker_id))

    def move_g(self) -> None:
        if self.proposed:
            self.proposed.popleft()

    # -- machines ------------------------------------------------------------------------------------------------------

    def orchestrate(self, event: orch.Event) -> None:
        for command in self.rounds.step(event):
            match command:
                case orch.OpenVerifier():
                    self._open_verifier(command)
                case orch.TellVerifier():
                    self.tell_chain(command.message)
                case orch.OpenDrafter():
                    self._open_drafter(command)
                case orch.TellDrafter():
                    self.tell_window(command.commit)
                case orch.CloseDrafter():
                    self.window = None
                case orch.AppendLog():
                    self.appended.append(orch.Logged(command.start + len(command.token_ids)))
                case orch.ChooseDrafter():
                    self.orchestrate(orch.DrafterChosen(WorkerId(f"d{len(command.exclude) + 1}")))
                case orch.ChooseVerifier():
                    self.orchestrate(orch.VerifierChosen(WorkerId("v")))
                case _:
                    pass

    def _open_verifier(self, opened: orch.OpenVerifier) -> None:
        request = DecodeOpen(
            SESSION, opened.generation, opened.token_ids, opened.classes, self.play.mode, SamplingParams(), b"",
            commit_limit=opened.commit_limit, speculation=opened.speculation,
            worker_id=opened.drafter_id or WorkerId(""),
        )  # fmt: skip
        self.chain = self.play.chain(request, self.play.tables.vocab_len)

    def _open_drafter(self, opened: orch.OpenDrafter) -> None:
        request = DraftOpen(
            SESSION, opened.epoch, opened.token_ids, self.play.mode, SamplingParams(), b"", opened.speculation,
            WorkerId("v"), "", max_len=self.final_len if self.play.drafts_to_the_end else 0,
        )  # fmt: skip
        self.window, self.worker_id = self.play.window(request), opened.worker_id

    def tell_chain(self, event: verify.Event, *, judging: bool = True) -> None:
        for command in self.chain.step(event):
            match command:
                case verify.Test():
                    if judging:
                        self.tell_chain(self._judged(command))
                case verify.Report():
                    self._report(command)
                case verify.StartTimer():
                    self.timer = command
                case verify.Count():
                    self.play.witnesses.add(command.name)
                case verify.Rewind() | verify.Keep():
                    pass

    def _judged(self, test: verify.Test) -> verify.Judged:
        self.source.epoch = test.epoch
        if test.is_ahead:
            self.play.witnesses.add("ahead")
            return verify.Judged(0, 0, None)
        if test.from_held and test.token_ids:
            self.play.witnesses.add("held")
        context = tuple(self.chain.tokens)
        rows = [self.play.tables.target(context + test.token_ids[:index]) for index in range(len(test.token_ids) + 1)]
        if test.draw is not None:
            return verify.Judged(0, 0, self.rule.draw(rows[0], self.source, test.base_len))
        if test.tree is not None:
            self.play.witnesses.add("tree" if test.feed_parents else "path")
            found = judge_tree(
                test.tree, self.rule, lambda node: self._row(context, test, node), test.base_len, self.source
            )
            return verify.Judged(len(found.path), found.num_tested, found.drawn, found.path)
        judgement = self.rule.judge(_stacked(rows), test.token_ids, test.rows, test.base_len, self.source)
        return verify.Judged(judgement.num_accepted, judgement.num_tested, judgement.replacement)

    def _row(self, context: tuple[int, ...], test: verify.Test, node: int) -> Tensor:
        assert test.tree is not None
        return self.play.tables.target(context + test.tree.tokens(test.tree.path_to(node)))

    def _report(self, report: verify.Report) -> None:
        self.play.witnesses.update([report.cause, *(kind.name.lower() for kind in report.kinds)])
        verdict = Verdict(
            SESSION, report.epoch, report.start, report.token_ids, report.kinds, report.num_accepted,
            report.num_tested, report.next_epoch, report.cause,
        )  # fmt: skip
        self.verdicts.append(orch.VerdictArrived(self.rounds._opened, verdict))
        hint = hint_of(self.chain, report) if "h" in self.play.schedule else None
        self.hinted.extend([hint] if hint is not None else [])

    def tell_window(self, event: draft.Event, count: int | None = None) -> None:
        if self.window is None:
            return
        for command in self.window.step(event):
            match command:
                case draft.Begin():
                    self.tell_window(self._planned(command, count))
                case draft.Draw():
                    self._draw(command)
                case draft.Send():
                    self._send(command.message)
                case draft.Count():
                    self.play.witnesses.add(command.name)
                case _:
                    pass

    def _planned(self, begin: draft.Begin, count: int | None) -> draft.Planned:
        planned, parents = begin.count if count is None else count, self.play.tree
        if planned and parents:
            cut = Tree(parents, parents).down_to(planned)
            return draft.Planned(begin.ticket, len(cut), parents=cut.parents)
        return draft.Planned(begin.ticket, planned, begin.base_len + 1)

    def _draw_tree(self, command: draft.Draw) -> None:
        """Draw siblings without replacement, level by level; every node has a word of its own."""
        assert self.window is not None
        ids, rows, tokens = tuple(self.window.ids), list[SparseRow](), list[int]()
        shape = Tree(command.parents, command.parents)
        for parent, children in shape.families.items():
            path = Tree(tuple(tokens), command.parents[: len(tokens)]).tokens(shape.path_to(parent))
            rows.append(self.play.tables.draft(ids + path))
            before: list[int] = []
            for node in children:
                self.source.use(Purpose.DRAFT, len(ids) + len(path), self.window.epoch, node)
                token = self.source.inner.draw_sibling(rows[-1], before)
                named = next(own for own in range(self.play.tables.vocab_len) if own not in before)
                before.append(named if token is None else token)
            tokens += before
        self.tell_window(draft.Drawn(command.ticket, tuple(tokens), tuple(rows)))

    def _draw(self, command: draft.Draw) -> None:
        assert self.window is not None
        if command.parents:
            self._draw_tree(command)
            return
        ids, rows = tuple(self.window.ids), list[SparseRow]()
        for position in range(len(ids), len(ids) + command.count):
            rows.append(self.play.tables.draft(ids))
            self.source.use(Purpose.DRAFT, position, self.window.epoch)
            ids = (*ids, self.source.inner.draw_counts(rows[-1]))
        self.tell_window(draft.Drawn(command.ticket, ids[len(self.window.ids) :], tuple(rows)))

    def _send(self, message: ProposeMessage) -> None:
        if isinstance(message, Proposal):
            count = self.play.cut(message)
            if count < len(message.token_ids):
                announced = self.proposed.pop()
                if count == 0:
                    return
                header = ProposalHeader(SESSION, message.epoch, message.base_len, count)
                self.proposed.append(replace(announced, message=header))
                message = replace(message, token_ids=message.token_ids[:count], rows=message.rows[:count])
        self.proposed.append(verify.Arrived(self.worker_id, message))


def _stacked(rows: list[Tensor]) -> Tensor:

    return torch.stack(rows)
