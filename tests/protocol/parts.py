"""The three real machines as values that a search can copy, compare and step, each with what surrounds it in a service.

Around the verifier's chain stands a greedy toy target, which judges tests and keeps count of the KV; around the
drafter's window a drafter whose every token is right or wrong as the search decides. Each part checks its own
invariants after every step. What a part adds to its machine is only what the checks need.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

import draft_service.window as window_module
import orchestrator.rounds as rounds_module
from draft_service import events as draft
from draft_service.window import Window
from orchestrator.events import OpenDrafter, OpenVerifier, Outcome, Tuned
from orchestrator.rounds import Rounds
from outrider.generation import Chunk
from outrider.ids import Epoch, FinishReason, Mode, SessionId, TokenClass, TokenKind, WorkerId
from outrider.messages import (
    COUNT_TOTAL,
    DecodeOpen,
    DraftCommit,
    DraftOpen,
    Proposal,
    ProposalHeader,
    ProposeMessage,
    RollbackHint,
    SamplingParams,
    SparseRow,
    TokenLogprobs,
    Verdict,
)
from outrider.verification import Tree
from verify_service import events as verify
from verify_service.chain import Chain
from verify_service.conduct import Conduct
from verify_service.reports import hint_of
from verify_service.timers import Patience, Timer
from verify_service.unreported import Unreported
from verify_service.waiting import Waiting

SESSION = SessionId("s")
VOCAB = 11
PROMPT = (1, 2, 3)
M = TypeVar("M")

_INNER = (Waiting, Conduct, Patience, Timer, Unreported, window_module._Draft, rounds_module._Drafter)
"""Mutable values inside the machines."""
_NAMES_ONLY = {"_count", "_tickets", "ticket", "plan", "committer"}
"""Fields that only name things, or never change: states that differ in nothing else are equal."""


class Violation(AssertionError):
    """An invariant of the protocol is broken."""


def check(holds: bool, message: str) -> None:
    """Raise unless an invariant holds."""
    if not holds:
        raise Violation(message)


def copied(machine: M) -> M:
    """Return a copy that shares nothing mutable with the machine."""
    twin = object.__new__(type(machine))
    for name in _fields(machine):
        object.__setattr__(twin, name, _copied_value(getattr(machine, name)))
    return twin


def frozen(machine: object) -> tuple[Hashable, ...]:
    """Return everything that tells two states of a machine apart."""
    return tuple(_frozen_value(name, getattr(machine, name)) for name in _fields(machine) if name not in _NAMES_ONLY)


def _fields(machine: object) -> Sequence[str]:
    slots: Sequence[str] = getattr(type(machine), "__slots__", ())
    return slots or tuple(vars(machine))


def _copied_value(value: Any) -> Any:
    if isinstance(value, list | deque | set):
        return type(value)(value)
    return copied(value) if isinstance(value, _INNER) else value


def _frozen_value(name: str, value: Any) -> Hashable:
    if name == "running":
        return None if value is None else value[0]
    if isinstance(value, list | deque):
        return tuple(value)
    if isinstance(value, set):
        return frozenset(value)
    return frozen(value) if isinstance(value, _INNER) else value


def target_token(ids: Sequence[int]) -> int:
    """Return the greedy target's next token."""
    return (sum(ids[-3:]) * 7 + len(ids) * 3) % VOCAB


@cache
def twin_text(length: int) -> tuple[int, ...]:
    """Return what plain decoding would say."""
    ids = list(PROMPT)
    while len(ids) < length:
        ids.append(target_token(ids))
    return tuple(ids)


# --- verifier -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class VerifierPart:
    """A chain, its greedy target, the length of its KV, and what the checks have to remember."""

    chain: Chain
    kv_len: int
    offered: frozenset[tuple[Epoch, int, int]] = frozenset()
    """(epoch, position, token) of all proposals that arrived in epochs that are not over."""
    bonus: tuple[Epoch, int] | None = None
    """Epoch and position of the last bonus token."""

    @classmethod
    def opened(cls, command: OpenVerifier, mode: Mode, machine: type[Chain] = Chain) -> "VerifierPart":
        request = DecodeOpen(
            SESSION, command.generation, command.token_ids, command.classes, mode, SamplingParams(), b"",
            commit_limit=command.commit_limit, speculation=command.speculation,
            worker_id=command.drafter_id or WorkerId(""),
        )  # fmt: skip
        chain = machine(request, VOCAB)
        return cls(chain, chain.kv_len)

    def key(self) -> Hashable:
        return frozen(self.chain), self.kv_len, self.offered, self.bonus

    def copy(self) -> "VerifierPart":
        return replace(self, chain=copied(self.chain))

    def step(self, event: verify.Event) -> list[Verdict | RollbackHint]:
        """Take an event, judge what is to be tested, check everything; return verdicts, each before its hint."""
        if isinstance(event, verify.Arrived):
            self._arrived(event.message)
        out: list[Verdict | RollbackHint] = []
        commands = self.chain.step(event)
        if isinstance(event, verify.Arrived) and verify.Count("garbage") in commands:
            # Only a larger gamma that this side has not heard of yet may look like it.
            unheard_of = _size(event.message) > self.chain._max_gamma
            check(unheard_of, f"an honest {event.message} was taken for garbage")
        self._carry_out(commands, out)
        self._check()
        return out

    def _arrived(self, message: ProposeMessage) -> None:
        if isinstance(message, Proposal):
            depths = Tree(message.token_ids, message.parents).depths or range(1, len(message.token_ids) + 1)
            places = zip(message.token_ids, depths, strict=True)
            self.offered |= {(message.epoch, message.base_len + depth - 1, token) for token, depth in places}
        if self.bonus is not None and isinstance(message, Proposal | ProposalHeader):
            late = message.epoch == self.bonus[0] and message.base_len >= self.bonus[1]
            check(not late, f"a bonus was drawn at {self.bonus[1]} while {message} was coming")

    def _carry_out(self, commands: list[verify.Command], out: list[Verdict | RollbackHint]) -> None:
        for command in commands:
            match command:
                case verify.Test():
                    self._carry_out(self.chain.step(self._judged(command)), out)
                case verify.Rewind():
                    self.kv_len = command.length
                case verify.Keep():
                    self.kv_len += len(command.path)
                case verify.Report():
                    out.append(self._verdict(command))
                    hint = hint_of(self.chain, command)
                    out.extend([hint] if hint is not None else [])
                case verify.StartTimer() | verify.Count():
                    pass

    def _judged(self, test: verify.Test) -> verify.Judged:
        self.kv_len += 0 if test.feed_parents else len(test.feed)
        context = list(self.chain.tokens)
        if test.is_ahead:
            return verify.Judged(0, 0, None)
        if test.tree is not None:
            return self._judged_tree(test, test.tree, context)
        for index, token in enumerate(test.token_ids):
            proposed = (test.epoch, test.base_len + index, token) in self.offered
            check(proposed, f"token {token} at {test.base_len + index} was never proposed in epoch {test.epoch}")
            own = target_token(context)
            if own != token:
                return verify.Judged(index, index + 1, own)
            context.append(own)
        drawn = target_token(context) if test.draw is not None else None
        return verify.Judged(len(test.token_ids), len(test.token_ids), drawn)

    def _judged_tree(self, test: verify.Test, tree: Tree, context: list[int]) -> verify.Judged:
        for token, depth in zip(tree.token_ids, tree.depths, strict=True):
            place = test.base_len + depth - 1
            check((test.epoch, place, token) in self.offered, f"token {token} at {place} was never proposed")
        path: list[int] = []
        while True:
            own, node = target_token(context), path[-1] if path else -1
            children = tree.families.get(node, ())
            won = next((child for child in children if tree.token_ids[child] == own), None)
            if won is None:
                return verify.Judged(len(path), len(path) + bool(children), own, tuple(path))
            path.append(won)
            context.append(own)

    def _verdict(self, report: verify.Report) -> Verdict:
        place = (report.epoch, report.start + len(report.kinds) - 1)
        # A tree that is there, and is cut by the commit limit, is not one that is coming.
        if TokenKind.BONUS in report.kinds and place not in {entry[:2] for entry in self.offered}:
            self.bonus = place
        return Verdict(
            SESSION, report.epoch, report.start, report.token_ids, report.kinds, report.num_accepted,
            report.num_tested, report.next_epoch, report.cause,
        )  # fmt: skip

    def _check(self) -> None:
        chain = self.chain
        check(tuple(chain.tokens) == twin_text(len(chain.tokens)), "the verifier committed another text")
        check(self.kv_len == chain.kv_len, f"KV of {self.kv_len} tokens, {chain.kv_len} expected")
        check(chain.committed_len <= chain.commit_limit, "committed past the limit")
        self.offered = frozenset(entry for entry in self.offered if entry[0] >= chain.epoch)


def _size(message: ProposeMessage) -> int:
    match message:
        case Proposal():
            return Tree(message.token_ids, message.parents).depth or len(message.token_ids)
        case ProposalHeader():
            return message.depth or message.count
        case _:
            return 0


# --- drafter --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BeginDraft:
    """The worker has time; the drafter offers all it is asked for, or passes."""

    passes: bool = False


@dataclass(frozen=True, slots=True)
class DrawTokens:
    """The drafter draws the whole proposal; its token `wrong_at` is not the target's.

    Of a tree: the path of this number in `PATHS` is right.
    """

    wrong_at: int


TREES = {1: (-1, -1), 2: (-1, -1, 0)}
"""Shapes of trees by their depth."""
PATHS = {1: ((), (0,), (1,)), 2: ((), (0,), (1,), (0, 2))}
"""What may be right of them."""


@dataclass(slots=True)
class DrafterPart:
    """A window and its drafter."""

    window: Window
    worker_id: WorkerId
    trees: bool = False
    """Whether it guesses trees, at most two deep."""

    @classmethod
    def opened(
        cls, command: OpenDrafter, mode: Mode, max_len: int, machine: type[Window] = Window, *, trees: bool = False
    ) -> "DrafterPart":
        request = DraftOpen(
            SESSION, command.epoch, command.token_ids, mode, SamplingParams(), b"", command.speculation,
            WorkerId("v"), "", max_len=max_len,
        )  # fmt: skip
        return cls(machine(request), command.worker_id, trees)

    def key(self) -> Hashable:
        return frozen(self.window), self.worker_id, self.trees

    def copy(self) -> "DrafterPart":
        return replace(self, window=copied(self.window))

    @property
    def num_choices(self) -> int:
        """In how many ways the proposal under way can be wrong, or right; once a chain is wrong the rest is all one."""
        drawing = self.window._draft
        if drawing is None:
            return 0
        if drawing.parents:
            return len(PATHS[Tree(drawing.parents, drawing.parents).depth])
        return drawing.count + 1 if tuple(self.window.ids) == twin_text(len(self.window.ids)) else 1

    def step(self, event: DraftCommit | RollbackHint | BeginDraft | DrawTokens) -> list[ProposeMessage | draft.AskFrom]:
        """Take an event; return what is sent."""
        out: list[ProposeMessage | draft.AskFrom] = []
        match event:
            case BeginDraft():
                self._carry_out(self.window.step(draft.Scheduled()), event.passes, out)
            case DrawTokens():
                self._carry_out(self.window.step(self._drawn(event.wrong_at)), False, out)
            case _:
                self._carry_out(self.window.step(event), False, out)
        return out

    def _carry_out(
        self, commands: list[draft.Command], passes: bool, out: list[ProposeMessage | draft.AskFrom]
    ) -> None:
        for command in commands:
            match command:
                case draft.Begin():
                    self._carry_out(self.window.step(self._planned(command, passes)), False, out)
                case draft.Send():
                    out.append(command.message)
                case draft.AskFrom():
                    out.append(command)
                case draft.Draw() | draft.Rewind() | draft.Count() | draft.Followed():
                    pass

    def _planned(self, begin: draft.Begin, passes: bool) -> draft.Planned:
        if passes or not self.trees:
            return draft.Planned(begin.ticket, 0 if passes else begin.count)
        parents = TREES[min(2, begin.count)]
        return draft.Planned(begin.ticket, len(parents), parents=parents)

    def _drawn_tree(self, drawing: Any, path: tuple[int, ...]) -> draft.Drawn:
        """Draw a tree of which one path is right, as far as the text is."""
        tokens: list[int] = []
        for node in range(len(drawing.parents)):
            tree = Tree(tuple(tokens), drawing.parents[:node])
            parent = drawing.parents[node]
            own = target_token([*self.window.ids, *tree.tokens(tree.path_to(parent))])
            tokens.append(own if node in path else (own + 1 + node) % VOCAB)
        tree = Tree(tuple(tokens), drawing.parents)
        firsts = [tokens[children[0]] for children in tree.families.values()]
        rows = tuple(SparseRow((token,), (COUNT_TOTAL,)) for token in firsts) if self.window._needs_rows else ()
        return draft.Drawn(drawing.ticket, tree.token_ids, rows)

    def _drawn(self, wrong_at: int) -> draft.Drawn:
        window = self.window
        drawing = window._draft
        assert drawing is not None
        if drawing.parents:
            depth = Tree(drawing.parents, drawing.parents).depth
            return self._drawn_tree(drawing, PATHS[depth][wrong_at])
        context = list(window.ids)
        for index in range(drawing.count):
            context.append((target_token(context) + (index == wrong_at)) % VOCAB)
        token_ids = tuple(context[len(window.ids) :])
        rows = tuple(SparseRow((token,), (COUNT_TOTAL,)) for token in token_ids) if window._needs_rows else ()
        return draft.Drawn(drawing.ticket, token_ids, rows)


# --- orchestrator ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EndAt:
    """A committer that knows only the length."""

    final_len: int

    def take(
        self, start: int, token_ids: Sequence[int], kinds: Sequence[TokenKind], logprobs: Sequence[TokenLogprobs]
    ) -> Outcome:
        count = min(len(token_ids), self.final_len - start)
        check(count > 0, "the committer was asked for nothing")
        done = start + count == self.final_len
        chunk = Chunk(start, tuple(token_ids[:count]), "", tuple(kinds[:count]), tuple(logprobs[:count]))
        return Outcome(chunk, FinishReason.LENGTH if done else None)


@dataclass(slots=True)
class OrchestratorPart:
    """The rounds of one generation."""

    rounds: Rounds

    def key(self) -> Hashable:
        return frozen(self.rounds)

    def copy(self) -> "OrchestratorPart":
        return OrchestratorPart(copied(self.rounds))

    def step(self, event: Any) -> list[Any]:
        """Take an event; return the rounds' own commands."""
        commands = self.rounds.step(event)
        rounds = self.rounds
        check(tuple(rounds.tokens) == twin_text(len(rounds.tokens)), "the orchestrator committed another text")
        check(rounds.logged_len <= len(rounds.tokens) <= rounds.plan.final_len, "logged <= committed <= limit")
        return commands


def plan_for(final_len: int, speculation: Any) -> rounds_module.Plan:
    """Return the plan of a generation behind the toy prompt."""
    classes = (TokenClass.PROMPT,) * len(PROMPT)
    return rounds_module.Plan(1, PROMPT, classes, final_len, Tuned(speculation, 1.0))


# --- memory ---------------------------------------------------------------------------------------------------------

Part = VerifierPart | DrafterPart | OrchestratorPart


class Memory:
    """Numbers parts and messages, so that a state of the world is a tuple of integers, and remembers every step."""

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.values: list[Any] = []
        self._part_numbers: dict[Hashable, int] = {}
        self._value_numbers: dict[Hashable, int] = {}
        self._steps: dict[tuple[int, int], tuple[int, tuple[Any, ...]]] = {}

    def number(self, value: Hashable) -> int:
        """Return the number of a message or an event."""
        found = self._value_numbers.setdefault(value, len(self.values))
        if found == len(self.values):
            self.values.append(value)
        return found

    def keep(self, part: Part) -> int:
        """Return the number of a part's state."""
        found = self._part_numbers.setdefault((type(part), part.key()), len(self.parts))
        if found == len(self.parts):
            self.parts.append(part)
        return found

    def step(self, part: int, event: Hashable) -> tuple[int, tuple[Any, ...]]:
        """Return the number of the state after an event, and what the step gave out."""
        at = (part, self.number(event))
        if at not in self._steps:
            fresh = self.parts[part].copy()
            out = tuple(fresh.step(event))
            self._steps[at] = self.keep(fresh), out
        return self._steps[at]
