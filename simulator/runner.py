"""A target that only takes time: the model of a simulated verifier, behind the protocol of all models."""

from collections.abc import Callable, Sequence

import torch

from outrider.errors import FailedPrecondition
from outrider.ids import TokenClass
from outrider.model.kv import BlockPool, BlockSlot
from outrider.model.pooled import PooledRunner
from outrider.model.runner import BlockAccess, Feed, InvalidFeed, ModelInfo, Rows
from simulator.costs import Costs
from simulator.text import NEXT, VOCAB

_NO_LOGITS = torch.empty(0, VOCAB)


class TimedRunner(PooledRunner):
    """Knows the text, keeps the accounts of its KV as every runner does, and lets time pass instead of computing."""

    def __init__(self, costs: Costs, num_blocks: int, context_len: int, spend: Callable[[float], None]) -> None:
        """Make a runner.

        Args:
            costs: seconds of passes.
            num_blocks: blocks of KV.
            context_len: most tokens of a slot.
            spend: lets so many seconds pass for its verifier.
        """
        super().__init__(BlockPool(num_blocks))
        self._costs, self._spend = costs, spend
        self._pool.set_roots("simulated", classes_differ=False)
        self.info = ModelInfo(
            name="simulated", vocab_size=VOCAB, context_len=context_len, dtype="simulated", hidden_size=1,
            row_classes=(costs.verify.max_rows,), max_rows=costs.verify.max_rows, exactness="bitwise",
            fingerprint="simulated", kv_bytes_per_token=1, num_blocks=num_blocks, classes_differ=False,
        )  # fmt: skip
        """What is fixed about it."""

    @property
    def block_access(self) -> BlockAccess:
        """There are no bytes in a simulated pool.

        Raises:
            FailedPrecondition: always; without a tier nobody asks.
        """
        raise FailedPrecondition("a simulated verifier has no KV tier")

    def forward(self, feeds: Sequence[Feed]) -> list[Rows]:
        """Let the passes' time pass, and tell the text behind each token; see `ModelRunner.forward`.

        Raises:
            InvalidFeed: a slot is foreign, or somebody wants logits, which a simulation has not.
        """
        if any(feed.num_rows and not feed.best_below for feed in feeds):
            raise InvalidFeed("a simulated verifier decodes greedily: it has no logits")
        slots = self._reserved(feeds)
        prompts = sum(feed.token_class is TokenClass.PROMPT for feed in feeds)
        decode_rows = sum(len(feed.token_ids) for feed in feeds if feed.token_class is TokenClass.DECODE)
        self._spend(self._costs.verify.seconds(decode_rows) + prompts * self._costs.verify_prompt_s)
        return [self._rows(slot, feed) for slot, feed in zip(slots, feeds, strict=True)]

    def _rows(self, slot: BlockSlot, feed: Feed) -> Rows:
        slot.advance(feed.token_ids, feed.token_class)
        if not feed.num_rows:
            return Rows(_NO_LOGITS)
        return Rows(_NO_LOGITS, best=torch.tensor([NEXT[token] for token in feed.token_ids[-feed.num_rows :]]))
