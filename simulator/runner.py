"""A target that only takes time: the model of a simulated verifier, behind the protocol of all models."""

from collections.abc import Callable, Sequence

import torch

from outrider.errors import FailedPrecondition
from outrider.ids import TokenClass
from outrider.model.kv import BlockPool, BlockSlot, block_slot
from outrider.model.runner import BLOCK_LEN, BlockAccess, Feed, InvalidFeed, KvSlot, KvUsage, ModelInfo, Rows
from simulator.costs import Costs
from simulator.text import NEXT, VOCAB

_NO_LOGITS = torch.empty(0, VOCAB)


class TimedRunner:
    """Knows the text, keeps the accounts of its KV as every runner does, and lets time pass instead of computing."""

    def __init__(self, costs: Costs, num_blocks: int, context_len: int, spend: Callable[[float], None]) -> None:
        """Make a runner.

        Args:
            costs: seconds of passes.
            num_blocks: blocks of KV.
            context_len: most tokens of a slot.
            spend: lets so many seconds pass for its verifier.
        """
        self._costs, self._spend = costs, spend
        self._pool = BlockPool(num_blocks)
        self._pool.set_roots("simulated", classes_differ=False)
        self.info = ModelInfo(
            name="simulated", vocab_size=VOCAB, context_len=context_len, dtype="simulated", hidden_size=1,
            row_classes=(costs.verify.max_rows,), max_rows=costs.verify.max_rows, exactness="bitwise",
            fingerprint="simulated", kv_bytes_per_token=1, num_blocks=num_blocks, classes_differ=False,
        )  # fmt: skip
        """What is fixed about it."""

    @property
    def free_blocks(self) -> int:
        """Blocks that can be taken."""
        return self._pool.num_free

    @property
    def kv_usage(self) -> KvUsage:
        """How the pool is used."""
        return self._pool.usage

    @property
    def block_access(self) -> BlockAccess:
        """There are no bytes in a simulated pool.

        Raises:
            FailedPrecondition: always; without a tier nobody asks.
        """
        raise FailedPrecondition("a simulated verifier has no KV tier")

    def new_slot(self, *, by_class: bool = True) -> BlockSlot:
        """Return an empty slot."""
        return self._pool.new_slot(by_class=by_class)

    def free_slot(self, slot: KvSlot, *, forget: bool = False) -> None:
        """Give a slot's blocks back; idempotent."""
        own = block_slot(slot, self._pool)
        if own is not None:
            own.release(forget=forget)

    def forward(self, feeds: Sequence[Feed]) -> list[Rows]:
        """Let the passes' time pass, and tell the text behind each token; see `ModelRunner.forward`.

        Raises:
            InvalidFeed: a slot is foreign, or somebody wants logits, which a simulation has not.
        """
        slots = [self._own(feed) for feed in feeds]
        self._pool.reserve([(slot, slot.length + len(feed.token_ids)) for slot, feed in zip(slots, feeds, strict=True)])
        prompts = sum(feed.token_class is TokenClass.PROMPT for feed in feeds)
        decode_rows = sum(len(feed.token_ids) for feed in feeds if feed.token_class is TokenClass.DECODE)
        self._spend(self._costs.verify.seconds(decode_rows) + prompts * self._costs.verify_prompt_s)
        return [self._rows(slot, feed) for slot, feed in zip(slots, feeds, strict=True)]

    def _own(self, feed: Feed) -> BlockSlot:
        slot = block_slot(feed.slot, self._pool)
        if slot is None or (feed.num_rows and not feed.best_below):
            raise InvalidFeed("a simulated verifier decodes greedily, on its own slots")
        return slot

    def _rows(self, slot: BlockSlot, feed: Feed) -> Rows:
        slot.advance(feed.token_ids, feed.token_class)
        if not feed.num_rows:
            return Rows(_NO_LOGITS)
        return Rows(_NO_LOGITS, best=torch.tensor([NEXT[token] for token in feed.token_ids[-feed.num_rows :]]))


def blocks_for(tokens: int) -> int:
    """Return how many blocks of KV so many tokens take."""
    return -(-tokens // BLOCK_LEN)
