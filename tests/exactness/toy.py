"""Toy models with exact tables, and decoders that drive the real rules the way the services do, in a few lines."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from outrider.history import History
from outrider.ids import Mode
from outrider.messages import SamplingParams, SparseRow
from outrider.sampling import probabilities, sparse_row, target_rows
from outrider.verification import Draws, Judgement, Rule, rule_for

VOCAB = 3
PADDING = 2
"""Ids behind the vocabulary, with logits so large that any use of them would show."""


class Source(Draws, Protocol):
    """Draws that also serve a drafter."""

    def draw_counts(self, row: SparseRow) -> int: ...


@dataclass(frozen=True)
class Toy:
    """A random table: logits of the next token for every prefix, float64."""

    seed: int
    spread: float = 1.2

    def logits(self, prefix: tuple[int, ...]) -> Tensor:
        values = np.random.default_rng((self.seed, *prefix)).normal(size=VOCAB) * self.spread
        return torch.tensor([*values, *([1e4] * PADDING)], dtype=torch.float64)

    def next_probs(self, prefix: tuple[int, ...], params: SamplingParams) -> list[float]:
        row = probabilities(self.logits(prefix)[None], params, VOCAB, History((), prefix))
        values: list[float] = row[0].tolist()
        return values


@dataclass
class Decoder:
    """Sequential rounds: draft `gamma` tokens, judge them, draw a bonus if all are accepted."""

    target: Toy
    draft: Toy
    mode: Mode = Mode.REJECTION
    params: SamplingParams = SamplingParams()
    draft_params: SamplingParams = SamplingParams()
    gamma: int = 2
    length: int = 3
    bonus: bool = True
    rule: Rule = field(default_factory=lambda: rule_for(Mode.REJECTION))
    row_cache: dict[tuple[tuple[int, ...], tuple[int, ...]], Tensor] = field(default_factory=dict)
    draft_cache: dict[tuple[int, ...], SparseRow] = field(default_factory=dict)

    def __call__(self, source: Source) -> tuple[int, ...]:
        committed: tuple[int, ...] = ()
        while len(committed) < self.length:
            committed = self.round(source, committed)
        return committed[: self.length]

    def round(self, source: Source, committed: tuple[int, ...]) -> tuple[int, ...]:
        gamma = min(self.gamma, self.length - len(committed))
        tokens, draft_rows = self.propose(source, committed, gamma)
        rows = self.rows(committed, tokens)
        judgement = self.judge(source, rows, tokens, draft_rows, len(committed))
        committed += tokens[: judgement.num_accepted]
        if judgement.replacement is not None:
            return (*committed, judgement.replacement)
        if self.bonus and len(committed) < self.length:
            return (*committed, self.rule.draw(rows[len(tokens)], source, len(committed)))
        return committed

    def judge(
        self, source: Source, rows: Tensor, tokens: tuple[int, ...], draft_rows: Sequence[SparseRow], base_len: int
    ) -> Judgement:
        return self.rule.judge(rows, tokens, draft_rows, base_len, source)

    def draft_row(self, prefix: tuple[int, ...]) -> SparseRow:
        if prefix not in self.draft_cache:
            probs = self.draft.next_probs(prefix, self.draft_params)
            self.draft_cache[prefix] = sparse_row(torch.tensor(probs, dtype=torch.float64))
        return self.draft_cache[prefix]

    def propose(
        self, source: Source, prefix: tuple[int, ...], count: int
    ) -> tuple[tuple[int, ...], tuple[SparseRow, ...]]:
        rows: list[SparseRow] = []
        start = len(prefix)
        for _ in range(count):
            rows.append(self.draft_row(prefix))
            prefix = (*prefix, source.draw_counts(rows[-1]))
        return prefix[start:], tuple(rows)

    def rows(self, committed: tuple[int, ...], tokens: tuple[int, ...]) -> Tensor:
        key = (committed, tokens)
        if key not in self.row_cache:
            logits = torch.stack([self.target.logits((*committed, *tokens[:i])) for i in range(len(tokens) + 1)])
            self.row_cache[key] = target_rows(logits, self.mode, self.params, VOCAB, History((), committed), tokens)
        return self.row_cache[key]

    def plain(self, source: Source, committed: tuple[int, ...]) -> tuple[int, ...]:
        return (*committed, self.rule.draw(self.rows(committed, ())[0], source, len(committed)))


@dataclass
class PipelinedDecoder(Decoder):
    """One chain with proposals in flight and a held row: no bonus inside it; a rejection discards the rest."""

    in_flight: int = 2
    plain_after_rejection: bool = False

    def __call__(self, source: Source) -> tuple[int, ...]:
        committed: tuple[int, ...] = ()
        chain: list[tuple[tuple[int, ...], tuple[SparseRow, ...]]] = []
        while len(committed) < self.length:
            self.run_ahead(source, committed, chain)
            tokens, draft_rows = chain.pop(0)
            judgement = self.judge(source, self.rows(committed, tokens), tokens, draft_rows, len(committed))
            committed += tokens[: judgement.num_accepted]
            if judgement.replacement is None:
                continue
            committed = (*committed, judgement.replacement)
            chain.clear()
            if self.plain_after_rejection:
                committed = self.plain(source, committed)
        return committed[: self.length]

    def run_ahead(
        self,
        source: Source,
        committed: tuple[int, ...],
        chain: list[tuple[tuple[int, ...], tuple[SparseRow, ...]]],
    ) -> None:
        """Draw proposals until `in_flight` are waiting, each after the ones before it."""
        while len(chain) < self.in_flight:
            ahead = committed + tuple(token for tokens, _ in chain for token in tokens)
            room = self.length - len(ahead)
            if room <= 0:
                return
            chain.append(self.propose(source, ahead, min(self.gamma, room)))
