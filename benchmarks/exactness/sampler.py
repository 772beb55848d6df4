"""Thousands of short generations of one prompt, through the verifier's own engine and a real drafter, on one thread.

Each *lane* is a session that is opened again and again, with the next key each time: the engine and the drafter keep
the full blocks of the prompt's KV, so a generation costs little more than its own tokens. Lanes share passes, and a
lane that got no room in a pass drafts on meanwhile, so proposals are in flight as they are in a cluster. Time is
counted in steps, which makes a run repeatable.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count as counter

from draft_service.drafters.causal_lm import CausalLm
from draft_service.drafters.protocol import DraftSession, Guessed, Work
from outrider.errors import OutriderError
from outrider.history import GrammarState
from outrider.ids import Epoch, Generation, Mode, SessionId, TokenClass, TokenKind, WorkerId
from outrider.messages import (
    DecodeOpen,
    DecodeResponseMessage,
    Proposal,
    ProposalHeader,
    ProposeHello,
    SamplingParams,
    SparseRow,
    Speculation,
    Verdict,
    Vocabulary,
)
from outrider.model.runner import ModelRunner
from outrider.noise import Purpose, derive_key, seed_key
from outrider.shape import Shape
from verify_service.engine import Engine
from verify_service.inbox import CloseSession, JoinWorker, OpenSession, Proposed, Ticket

WORKER = WorkerId("draft-1")
STEP_S = 0.001
"""Seconds that one step is taken to last."""
PATIENCE_S = 1000.0
"""Longer than any run: nobody is ever late here."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What every generation of a sample has in common."""

    prompt: tuple[int, ...]
    mode: Mode
    sampling: SamplingParams
    num_tokens: int = 3
    speculation: Speculation = Speculation(2, 2, 4)
    grammar: GrammarState | None = None
    """Where the grammar of `sampling` begins, for target and drafter; every generation has copies."""
    takes_likeliest: bool = False
    """A planted lie: the drafter proposes its likeliest token and says that it drew it."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A finished sample."""

    sequences: list[tuple[int, ...]]
    kinds: dict[TokenKind, int]
    """How many tokens came about in which way."""


@dataclass(slots=True)
class _Run:
    """A proposal that is being drawn."""

    base_len: int
    count: int
    parents: tuple[int, ...] = ()
    token_ids: list[int] = field(default_factory=list)
    rows: list[SparseRow] = field(default_factory=list)


class _Lane:
    """One session's present generation: orchestrator and draft worker in one."""

    def __init__(self, name: str, number: int, seed: int, recipe: Recipe) -> None:
        self.session_id = SessionId(name)
        self.epoch = Epoch(Generation(number, 0))
        self.key = seed_key(seed)
        self.recipe = recipe
        self.committed = list(recipe.prompt)
        self.ids = list(recipe.prompt)
        self.kinds: list[TokenKind] = []
        self.run: _Run | None = None
        self.rewind_to: int | None = None
        self.waits = False
        """Whether a tree is under way, behind which nothing is proposed."""
        self.failure: OutriderError | None = None

    @property
    def limit(self) -> int:
        return len(self.recipe.prompt) + self.recipe.num_tokens

    @property
    def done(self) -> bool:
        return len(self.committed) == self.limit

    @property
    def room(self) -> int:
        """Tokens of the next proposal."""
        plan = self.recipe.speculation
        if self.waits:
            return 0
        return min(plan.gamma, min(len(self.committed) + plan.window, self.limit) - len(self.ids))

    def opened(self) -> DecodeOpen:
        recipe = self.recipe
        classes = (TokenClass.PROMPT,) * len(recipe.prompt)
        return DecodeOpen(
            self.session_id, self.epoch.generation, recipe.prompt, classes, recipe.mode, recipe.sampling, self.key,
            prompt_len=len(recipe.prompt), commit_limit=self.limit, speculation=recipe.speculation,
            patience_s=PATIENCE_S, worker_id=WORKER,
        )  # fmt: skip

    def draft_session(self) -> DraftSession:
        key = derive_key(self.key, Purpose.DRAFT)
        recipe = self.recipe
        prompt_len = len(recipe.prompt)
        return DraftSession(self.session_id, recipe.mode, recipe.sampling, key, prompt_len, grammar=recipe.grammar)

    def receive(self, item: DecodeResponseMessage | OutriderError | None) -> None:
        """Take what the engine says; a newer epoch discards the chain."""
        if isinstance(item, OutriderError):
            self.failure = item
        if not isinstance(item, Verdict):
            return
        self.committed += item.token_ids
        self.kinds += item.kinds
        if item.next_epoch != self.epoch:
            same = (index for index, (old, new) in enumerate(zip(self.ids, self.committed, strict=False)) if old != new)
            self.rewind_to = next(same, min(len(self.ids), len(self.committed)))
            self.epoch, self.ids, self.run, self.waits = item.next_epoch, list(self.committed), None, False


class Sampler:
    """See the module's head."""

    def __init__(self, runner: ModelRunner, drafter: CausalLm, vocab_len: int, num_lanes: int = 32) -> None:
        """Take over a target and a drafter.

        Args:
            runner: the target.
            drafter: guesses for all lanes.
            vocab_len: length of the tokenizer's id range.
            num_lanes: sessions at a time.
        """
        self._now_s = 0.0
        self._engine = Engine(runner, vocab_len, clock=lambda: self._now_s)
        self._drafter = drafter
        self._num_lanes = num_lanes
        self._tickets = counter(1)
        self._generations = counter(1)
        self._worker_ticket = Ticket(next(self._tickets))
        hello = ProposeHello(WORKER, Vocabulary("same", vocab_len))
        self._engine.post(JoinWorker(self._worker_ticket, hello, lambda _: None))

    def sample(self, recipe: Recipe, num: int, seed: int) -> Sample:
        """Run so many generations with keys that follow from the seed.

        Raises:
            OutriderError: the engine ended a session.
            RuntimeError: nothing moves any more.
        """
        waiting = counter(0)
        lanes: dict[str, tuple[_Lane, Ticket]] = {}
        sequences: list[tuple[int, ...]] = []
        kinds: dict[TokenKind, int] = dict.fromkeys(TokenKind, 0)
        started = idle = 0
        while len(sequences) < num:
            for name in (f"lane-{index}" for index in range(self._num_lanes)):
                if name not in lanes and started < num:
                    lanes[name] = self._open(name, (seed << 32) + next(waiting), recipe)
                    started += 1
            self._draft([lane for lane, _ in lanes.values()])
            self._now_s += STEP_S
            idle = 0 if self._engine.step() else idle + 1
            if idle > 1000:
                raise RuntimeError("neither engine nor drafter has anything to do")
            for name, (lane, ticket) in list(lanes.items()):
                if lane.failure is not None:
                    raise lane.failure
                if lane.done:
                    self._close(lane, ticket)
                    del lanes[name]
                    sequences.append(tuple(lane.committed[len(recipe.prompt) :]))
                    for kind in lane.kinds:
                        kinds[kind] += 1
        return Sample(sequences, kinds)

    # -- lanes -----------------------------------------------------------------------------------------------------

    def _open(self, name: str, seed: int, recipe: Recipe) -> tuple[_Lane, Ticket]:
        lane = _Lane(name, next(self._generations), seed, recipe)
        ticket = Ticket(next(self._tickets))
        grammar = None if recipe.grammar is None else recipe.grammar.copy()
        self._engine.post(OpenSession(ticket, lane.opened(), lane.receive, grammar))
        self._drafter.open(lane.draft_session(), lane.ids)
        return lane, ticket

    def _close(self, lane: _Lane, ticket: Ticket) -> None:
        self._engine.post(CloseSession(ticket, keep_kv=True))
        self._drafter.close(lane.session_id, keep=True)

    # -- drafting --------------------------------------------------------------------------------------------------

    def _draft(self, lanes: Sequence[_Lane]) -> None:
        """Let every lane with room announce, draw and send one proposal, all lanes one token at a time."""
        for lane in lanes:
            if lane.rewind_to is not None:
                self._drafter.rewind(lane.session_id, lane.rewind_to)
                lane.rewind_to = None
        behind = [lane for lane in lanes if lane.room > 0 and not self._begin(lane)]
        while drawing := [lane for lane in lanes if lane.run is not None]:
            self._draw(drawing)
        if behind:
            self._drafter.draw([Work(lane.session_id, lane.epoch, lane.ids, 0) for lane in behind])

    def _begin(self, lane: _Lane) -> bool:
        """Announce a proposal; False if the drafter has to read first."""
        plan = self._drafter.plan(lane.session_id, lane.ids, lane.room)
        if plan is None or not plan.count:
            return False
        lane.run = _Run(len(lane.ids), plan.count, plan.parents)
        depth = len(Shape(plan.parents).levels) if plan.parents else 0
        self._post(ProposalHeader(lane.session_id, lane.epoch, len(lane.ids), plan.count, depth))
        return True

    def _draw(self, lanes: Sequence[_Lane]) -> None:
        """Draw one token for each lane, and send the proposals that are complete with it."""
        works = [
            Work(lane.session_id, lane.epoch, lane.ids, lane.run.count - len(lane.run.token_ids), lane.run.parents)
            for lane in lanes
            if lane.run is not None
        ]
        for lane, outcome in zip(lanes, self._drafter.draw(works), strict=True):
            if not isinstance(outcome, Guessed):
                raise outcome.error
            self._take(lane, outcome)

    def _take(self, lane: _Lane, guessed: Guessed) -> None:
        run, plan = lane.run, lane.recipe.speculation
        if run is None:
            return
        tokens = guessed.token_ids
        if lane.recipe.takes_likeliest:
            tokens = tuple(row.token_ids[0] for row in guessed.rows)
        lane.waits = bool(run.parents)
        lane.ids += () if lane.waits else tokens
        run.token_ids += tokens
        run.rows += guessed.rows
        if len(run.token_ids) == run.count:
            seen = len(lane.committed)
            self._post(
                Proposal(
                    lane.session_id, lane.epoch, run.base_len, seen, seen + plan.window,
                    tuple(run.token_ids), tuple(run.rows), run.parents,
                )
            )  # fmt: skip
            lane.run = None

    def _post(self, message: ProposalHeader | Proposal) -> None:
        self._engine.post(Proposed(self._worker_ticket, message))
