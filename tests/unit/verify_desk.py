"""An engine driven step by step on the test's own thread, and clients that play orchestrator and drafter for it."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import torch

from outrider.errors import OutriderError
from outrider.history import GrammarState
from outrider.ids import Epoch, Generation, Mode, SessionId, TokenClass, TokenKind, WorkerId
from outrider.messages import (
    DecodeAttach,
    DecodeOpen,
    DecodeProgress,
    DecodeResponseMessage,
    Proposal,
    ProposalHeader,
    ProposeHello,
    ProposeResponseMessage,
    SamplingParams,
    SparseRow,
    Speculation,
    Verdict,
    Vocabulary,
)
from outrider.model.kv import BlockSlot, pool_rows
from outrider.model.runner import BLOCK_LEN, Feed, ModelRunner, Rows
from outrider.model.toy import ToyLanguage, ToyRunner
from outrider.noise import Purpose, derive_key, word64
from outrider.sampling import coupled_token, draw_from_counts, greedy_ids, greedy_token, sparse_row
from verify_service.engine import Engine, EngineSettings
from verify_service.inbox import (
    CloseSession,
    InboxEvent,
    JoinWorker,
    LeaveWorker,
    OpenSession,
    Proposed,
    TellSession,
    Ticket,
)

VOCAB = 24
WORKER = WorkerId("draft-1")
KEY = bytes(range(16))
OFF = Speculation()

torch.set_num_threads(1)


@dataclass
class Clock:
    """Seconds that pass only when the desk says so."""

    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


class Desk:
    """An engine, its clock, and one draft worker's stream."""

    def __init__(
        self,
        runner: ModelRunner | None = None,
        settings: EngineSettings | None = None,
        feature_layers: tuple[int, ...] = (),
        takes_hints: bool = False,
    ) -> None:
        self.runner = runner or ToyRunner(ToyLanguage(VOCAB, seed=5))
        self.clock = Clock()
        self.engine = self.make_engine(settings or EngineSettings())
        self.tickets = count(1)
        self.to_worker: list[ProposeResponseMessage | OutriderError | None] = []
        self.takes_hints = takes_hints
        self.worker_ticket = self.join(feature_layers)

    def make_engine(self, settings: EngineSettings) -> Engine:
        return Engine(self.runner, VOCAB, settings, self.clock)

    def join(self, feature_layers: tuple[int, ...] = ()) -> Ticket:
        """Open the worker's stream, again if it is open."""
        self.worker_ticket = Ticket(next(self.tickets))
        hello = ProposeHello(WORKER, Vocabulary("toy", VOCAB), feature_layers, self.takes_hints)
        self.post(JoinWorker(self.worker_ticket, hello, self.to_worker.append))
        return self.worker_ticket

    def leave(self) -> None:
        """Break the worker's stream."""
        self.post(LeaveWorker(self.worker_ticket))

    def post(self, event: InboxEvent) -> None:
        self.engine.post(event)

    def propose(self, message: Proposal | ProposalHeader) -> None:
        self.post(Proposed(self.worker_ticket, message))

    def step(self, dt_s: float = 0.01) -> bool:
        self.clock.now_s += dt_s
        return self.engine.step()

    def run(self, clients: "Sequence[Client]", max_steps: int = 20_000) -> None:
        """Let everybody act until all clients are done."""
        for _ in range(max_steps):
            if all(client.done for client in clients):
                self.step()
                return
            for client in clients:
                client.act()
            self.step()
        raise AssertionError(f"not done: {[(client.request.session_id, len(client.committed)) for client in clients]}")


@dataclass
class Request:
    """What a client asks for."""

    session_id: str = "s"
    prompt: tuple[int, ...] = (1, 2, 3)
    mode: Mode = Mode.GREEDY
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    key: bytes = b""
    max_tokens: int = 40
    speculation: Speculation = field(default_factory=lambda: Speculation(4, 4, 8))
    num_logprobs: int = -1
    generation: Generation = Generation(1, 0)
    patience_s: float = 1.0
    classes: tuple[TokenClass, ...] = ()
    prompt_len: int = 0
    num_prompt_logprobs: int = -1
    grammar: GrammarState | None = None
    """Where the grammar of `sampling` begins."""


class ClassesMatter(ToyRunner):
    """A toy whose rows depend on the class of every token before them, as a real model's bits do.

    Classes lie in the pool's memory beside the tokens, so sharing the wrong block shows.
    """

    def __init__(self, num_blocks: int = 1024, language: ToyLanguage | None = None) -> None:
        super().__init__(language or ToyLanguage(VOCAB, seed=5), num_blocks=num_blocks)
        self._info = replace(self._info, classes_differ=True)
        self._pool.set_roots("classes matter", classes_differ=True)
        self._classes = [0] * (num_blocks * BLOCK_LEN)

    def copy_block(self, source: int, target: int) -> None:
        super().copy_block(source, target)
        held = self._classes[source * BLOCK_LEN : (source + 1) * BLOCK_LEN]
        self._classes[target * BLOCK_LEN : (target + 1) * BLOCK_LEN] = held

    def forward(self, feeds: Sequence[Feed]) -> list[Rows]:
        starts = [feed.slot.length for feed in feeds]
        outputs = super().forward([replace(feed, best_below=0) for feed in feeds])
        for feed, start, rows in zip(feeds, starts, outputs, strict=True):
            assert isinstance(feed.slot, BlockSlot)
            for row in pool_rows(feed.slot, start, feed.slot.length):
                self._classes[row] = int(feed.token_class)
            known = [self._classes[row] for row in pool_rows(feed.slot, 0, feed.slot.length)]
            for at in range(feed.num_rows):
                end = feed.slot.length - feed.num_rows + at + 1
                generator = torch.Generator().manual_seed(hash(tuple(known[:end])) % 2**31)
                rows.logits[at] += torch.randn(VOCAB, generator=generator, dtype=torch.float64)
            rows.best = greedy_ids(rows.logits[:, : feed.best_below]) if feed.best_below else None
        return outputs


Draft = Callable[[list[int]], torch.Tensor]
"""From tokens to the draft's law [vocab]."""


class Client:
    """One session: orchestrator and drafter in one, drafting whenever its dice say so."""

    def __init__(self, desk: Desk, request: Request, draft: Draft | None = None, eager: float = 0.7, seed: int = 0):
        self.desk = desk
        self.request = request
        self.draft = draft
        self.dice = random.Random(f"{seed}/{request.session_id}")
        self.eager = eager
        self.committed = list(request.prompt)
        self.kinds: list[TokenKind] = []
        self.verdicts: list[Verdict] = []
        self.received: list[DecodeResponseMessage | OutriderError | None] = []
        self.errors: list[OutriderError] = []
        self.ids = list(request.prompt)
        self.epoch = Epoch(request.generation)
        self.announced: int | None = None
        self.done = False
        self.ticket = Ticket(next(desk.tickets))
        grammar = None if request.grammar is None else request.grammar.copy()
        desk.post(OpenSession(self.ticket, self.opened(), self.receive, grammar))

    @property
    def limit(self) -> int:
        return (self.request.prompt_len or len(self.request.prompt)) + self.request.max_tokens

    @property
    def output(self) -> list[int]:
        return self.committed[self.request.prompt_len or len(self.request.prompt) :]

    def opened(self) -> DecodeOpen:
        ask = self.request
        return DecodeOpen(
            SessionId(ask.session_id), ask.generation, ask.prompt,
            ask.classes or (TokenClass.PROMPT,) * len(ask.prompt), ask.mode, ask.sampling, ask.key,
            prompt_len=ask.prompt_len or len(ask.prompt), num_logprobs=ask.num_logprobs, commit_limit=self.limit,
            num_prompt_logprobs=ask.num_prompt_logprobs,
            speculation=ask.speculation if self.draft else OFF, patience_s=ask.patience_s,
            worker_id=WORKER if self.draft else WorkerId(""),
        )  # fmt: skip

    def receive(self, item: DecodeResponseMessage | OutriderError | None) -> None:
        self.received.append(item)
        if isinstance(item, OutriderError):
            self.errors.append(item)
            self.done = True
        elif isinstance(item, Verdict):
            self._take(item)

    def _take(self, verdict: Verdict) -> None:
        assert verdict.start == len(self.committed), "verdicts leave no gap"
        self.verdicts.append(verdict)
        self.committed += verdict.token_ids
        self.kinds += verdict.kinds
        assert len(self.committed) <= self.limit
        if verdict.next_epoch != self.epoch:
            assert verdict.next_epoch > self.epoch, "an epoch only ends in a newer one"
            self.epoch, self.ids, self.announced = verdict.next_epoch, list(self.committed), None
        elif len(self.ids) < len(self.committed):
            self.ids = list(self.committed)  # a test has proposed behind this client's back
        assert self.ids[: len(self.committed)] == self.committed, "an epoch goes on only with its own chain"
        if len(self.committed) == self.limit and not self.done:
            self.done = True
            self.desk.post(CloseSession(self.ticket, keep_kv=False))

    def tell(self, message: DecodeAttach | DecodeProgress) -> None:
        self.desk.post(TellSession(self.ticket, message))

    def act(self) -> None:
        """Announce, or propose, if there is room and the dice agree."""
        if self.draft is None or self.done or self.dice.random() > self.eager:
            return
        plan = self.request.speculation
        room = min(len(self.committed) + plan.window, self.limit) - len(self.ids)
        count = self.announced or min(plan.gamma, room)
        if count < 1:
            return
        if self.request.mode.needs_rows and self.announced is None:
            self.announced = count
            self.desk.propose(ProposalHeader(SessionId(self.request.session_id), self.epoch, len(self.ids), count))
            return
        self.announced = None
        self.desk.propose(self.proposal(count))

    def proposal(self, count: int) -> Proposal:
        """Draw a proposal and go on from it."""
        base, tokens, rows = len(self.ids), [], []
        for _ in range(count):
            token, row = self._draw()
            self.ids.append(token)
            tokens.append(token)
            rows += [row] if row is not None else []
        seen = len(self.committed)
        return Proposal(
            SessionId(self.request.session_id), self.epoch, base, seen, seen + self.request.speculation.window,
            tuple(tokens), tuple(rows),
        )  # fmt: skip

    def _draw(self) -> tuple[int, SparseRow | None]:
        assert self.draft is not None
        law, position = self.draft(self.ids), len(self.ids)
        if self.request.mode is Mode.GREEDY:
            return greedy_token(law), None
        if self.request.mode is Mode.COUPLED:
            return coupled_token(law, derive_key(self.request.key, Purpose.FIELD), 0, position), None
        row = sparse_row(law)
        return draw_from_counts(row, word64(derive_key(self.request.key, Purpose.DRAFT), position, self.epoch)), row


def twin(request: Request, runner: ModelRunner | None = None) -> list[int]:
    """Return what the request yields alone, without any drafter."""
    desk = Desk(runner)
    client = Client(desk, request)
    desk.run([client])
    assert not client.errors
    return client.output


def noisy_draft(weight: float, seed: int = 77) -> Draft:
    """A drafter of the toy target, blended with noise: 0 is the target itself, 1 knows nothing."""
    language = ToyLanguage(VOCAB, seed=5).draft(weight, seed)
    return language.probs
