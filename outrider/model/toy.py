"""A toy language model with exact probabilities behind the runner protocol, and a toy tokenizer.

The next token's law is a function of the last `order` tokens: from an explicit table, else from a keyed hash. The
pool's memory stores the token ids themselves, and a row is read from there through the slot's blocks, so a missed
rollback, a token fed twice, a foreign block or one that somebody else has written to shows as a wrong row.
"""

import hashlib
import json
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outrider.errors import NotFound
from outrider.ids import TokenClass
from outrider.model.block_access import PoolAccess
from outrider.model.kv import BlockPool, BlockSlot, pool_rows
from outrider.model.memory import KvBudget
from outrider.model.pooled import PooledRunner
from outrider.model.runner import BLOCK_LEN, BlockLayout, Feed, ModelInfo, Rows, check_feeds
from outrider.model.settings import ModelSettings
from outrider.sampling import greedy_ids
from outrider.verification.tree import Tree

TOY = "toy"
"""Name of the toy in settings; it needs no weights."""
TOKEN_BYTES = 8
"""What a toy remembers of a token."""
MAX_TOY_BLOCKS = 1024
"""Most blocks that a toy makes of a budget: its tokens are so small that it would make a million."""
MAX_LAWS = 4096
"""Laws that a language remembers, the latest: whoever chooses the prompts chooses how many there are."""
MAX_PASSES = 4096
"""Passes that a toy remembers, the latest."""


@dataclass(frozen=True)
class ToyLanguage:
    """Next-token laws in float64, exact up to the rounding of one normalisation."""

    vocab_size: int
    seed: int = 0
    order: int = 2
    """How many of the last tokens the law depends on."""
    sharpness: float = 2.0
    """Standard deviation of the hashed logits: 0 is uniform, 4 nearly deterministic."""
    table: Mapping[tuple[int, ...], Sequence[float]] = field(default_factory=dict)
    """Explicit laws by context (the last min(order, length) ids); anything absent is hashed."""
    never: frozenset[int] = frozenset()
    """Ids without mass in hashed laws, for instance the end of sequence."""
    blend: "tuple[float, ToyLanguage] | None" = None
    """(weight, other): the law is (1 - weight) * own + weight * other's; makes a draft of known closeness."""
    _memo: OrderedDict[tuple[int, ...], Tensor] = field(default_factory=OrderedDict, repr=False, compare=False)

    def probs(self, context: Sequence[int]) -> Tensor:
        """Return the law of the token after `context`: [vocab_size] float64, sums to 1."""
        key = tuple(context[-self.order :]) if self.order else ()
        law = self._memo.get(key)
        if law is None:
            law = self._memo[key] = self._own(key)
            if len(self._memo) > MAX_LAWS:
                self._memo.popitem(last=False)
        if self.blend is None:
            return law
        weight, other = self.blend
        return (1.0 - weight) * law + weight * other.probs(context)

    def draft(self, weight: float, seed: int) -> "ToyLanguage":
        """Return a drafter of this language: its law blended with an unrelated one.

        Args:
            weight: 0 is the language itself, 1 has nothing to do with it.
            seed: Of the unrelated language.
        """
        noise = ToyLanguage(self.vocab_size, seed, self.order, self.sharpness, never=self.never)
        return ToyLanguage(
            self.vocab_size, self.seed, self.order, self.sharpness, self.table, self.never, (weight, noise)
        )

    def _own(self, key: tuple[int, ...]) -> Tensor:
        if key in self.table:
            law = torch.tensor(self.table[key], dtype=torch.float64)
        else:
            digest = hashlib.blake2b(repr((self.seed, key)).encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
            logits = torch.randn(self.vocab_size, generator=generator, dtype=torch.float64) * self.sharpness
            logits[sorted(self.never)] = -torch.inf
            law = torch.softmax(logits, dim=0)
        if law.shape != (self.vocab_size,) or bool((law < 0).any()) or float(law.sum()) <= 0:
            raise ValueError(f"the law after {key} is not {self.vocab_size} non-negative numbers with a positive sum")
        return law / law.sum()


class ToyRunner(PooledRunner):
    """The runner protocol over a `ToyLanguage`, with the accounting of the real one."""

    def __init__(
        self,
        language: ToyLanguage,
        *,
        context_len: int = 4096,
        num_blocks: int = 1024,
        row_classes: tuple[int, ...] = (4, 8, 16, 32),
        delay_s: float = 0.0,
        name: str = "toy",
    ) -> None:
        """Make a runner.

        Args:
            language: Where the rows come from.
            context_len: Most tokens of a slot.
            num_blocks: Blocks of 64 tokens.
            row_classes: Row counts of a pass, rising.
            delay_s: Seconds that one pass takes (slept), to imitate a model's cost.
            name: The model's name.
        """
        super().__init__(BlockPool(num_blocks, self.copy_block, self.move_tokens))
        self._language = language
        self._memory = [0] * (num_blocks * BLOCK_LEN)
        self._delay_s = delay_s
        self.passes: list[int] = []
        """Rows of the last `MAX_PASSES` passes after padding: a decode pass its class, a prompt pass 64."""
        self._info = ModelInfo(
            name=name, vocab_size=language.vocab_size, context_len=context_len, dtype="float64", hidden_size=1,
            row_classes=row_classes, max_rows=row_classes[-1], exactness="bitwise", fingerprint="toy",
            kv_bytes_per_token=TOKEN_BYTES, num_blocks=num_blocks, classes_differ=False,
            trees=True,
        )  # fmt: skip
        self._pool.set_roots("toy", classes_differ=False)

    @property
    def info(self) -> ModelInfo:
        """What is fixed about this runner."""
        return self._info

    @property
    def block_access(self) -> PoolAccess:
        """The pool's blocks as bytes."""
        return PoolAccess(self._pool, self)

    @property
    def layout(self) -> BlockLayout:
        """What one block's bytes are: its token ids."""
        return BlockLayout("int64", 1, 1, TOKEN_BYTES * BLOCK_LEN)

    def copy_block(self, source: int, target: int) -> None:
        """Copy what a block of the memory holds to another block."""
        held = self._memory[source * BLOCK_LEN : (source + 1) * BLOCK_LEN]
        self._memory[target * BLOCK_LEN : (target + 1) * BLOCK_LEN] = held

    def move_tokens(self, sources: list[int], targets: list[int]) -> None:
        """Copy single tokens of the memory to other places, which may overlap."""
        held = [self._memory[row] for row in sources]
        for row, token in zip(targets, held, strict=True):
            self._memory[row] = token

    def copy_out(self, block: int, into: memoryview) -> None:
        """Write a block's bytes into a buffer."""
        into[:] = array("q", self._memory[block * BLOCK_LEN : (block + 1) * BLOCK_LEN]).tobytes()

    def copy_in(self, block: int, data: memoryview) -> None:
        """Overwrite a block with bytes that `copy_out` gave."""
        self._memory[block * BLOCK_LEN : (block + 1) * BLOCK_LEN] = array("q", bytes(data))

    def forward(self, feeds: Sequence[Feed]) -> list[Rows]:
        """Run feeds; see `ModelRunner.forward`."""
        check_feeds(feeds, self._info)
        slots = self._reserved(feeds)
        self._count_passes(feeds)
        return [self._rows(slot, feed) for slot, feed in zip(slots, feeds, strict=True)]

    def _rows(self, slot: BlockSlot, feed: Feed) -> Rows:
        start, count = slot.length, len(feed.token_ids)
        for row, token in zip(pool_rows(slot, start, start + count), feed.token_ids, strict=True):
            self._memory[row] = token
        tree = Tree(feed.token_ids, feed.parents or tuple(range(-1, count - 1)))
        held = self._read(slot) if feed.num_rows else []
        paths = [tree.path_to(node) for node in range(count - feed.num_rows, count)]
        texts = [held[:start] + [held[start + node] for node in path] for path in paths]
        if feed.parents:
            slot.spread(tree)
        else:
            slot.advance(feed.token_ids, feed.token_class)
        laws = [self._language.probs(text) for text in texts]
        logits = torch.stack(laws).log() if laws else torch.empty(0, self._info.vocab_size, dtype=torch.float64)
        hidden = torch.tensor([[float(len(text))] for text in texts]).reshape(-1, 1) if feed.want_hidden else None
        if feed.best_below:
            return Rows(logits[:0], hidden, greedy_ids(logits[:, : feed.best_below]))
        return Rows(logits, hidden)

    def _read(self, slot: BlockSlot) -> list[int]:
        """Return what the memory has in a slot's blocks."""
        held: list[int] = []
        for block in slot.blocks:
            held += self._memory[block * BLOCK_LEN : (block + 1) * BLOCK_LEN]
        return held

    def _count_passes(self, feeds: Sequence[Feed]) -> None:
        """Record, and sleep for, the passes a real runner would make."""
        prompts = sum(feed.token_class is TokenClass.PROMPT for feed in feeds)
        rows = sum(len(feed.token_ids) for feed in feeds if feed.token_class is TokenClass.DECODE)
        full, rest = divmod(rows, self._info.max_rows)
        sizes = [BLOCK_LEN] * prompts + [self._info.max_rows] * full
        if rest:
            sizes.append(next(size for size in self._info.row_classes if size >= rest))
        self.passes += sizes
        del self.passes[:-MAX_PASSES]
        if self._delay_s and sizes:
            time.sleep(self._delay_s * len(sizes))


def toy_blocks(wanted: int | KvBudget) -> int:
    """Return the size of a toy's pool: what is wanted, of a budget as much as a toy can use.

    Raises:
        FailedPrecondition: A budget without room for one block.
    """
    if isinstance(wanted, int):
        return wanted
    return min(MAX_TOY_BLOCKS, wanted.num_blocks(TOKEN_BYTES * BLOCK_LEN, torch.device("cpu")))


def toy_of(settings: ModelSettings, change: Callable[[ToyLanguage], ToyLanguage] = lambda target: target) -> ToyRunner:
    """Make the toy that a service's settings describe.

    Args:
        settings: Of the service.
        change: Makes the language that is spoken out of the target's.

    Raises:
        FailedPrecondition: A budget without room for one block.
    """
    target = ToyLanguage(len(ToyTokenizer()), settings.toy_seed, settings.toy_order, settings.toy_sharpness)
    return ToyRunner(
        change(target),
        context_len=settings.context_len or 4096,
        num_blocks=toy_blocks(settings.pool),
        delay_s=settings.toy_delay_s,
    )


def toy_from_name(name: str, num_blocks: int = 1024) -> ToyRunner:
    """Make a toy runner from a name, so that a service can be started with one.

    Args:
        name: "toy", or "toy:" and options: `seed=3`, `sharpness=2.5`, `draft=0.2` (a drafter that far from the toy of
            the same seed), `delay_ms=5` per pass, `context=4096`; separated by commas.
        num_blocks: Blocks of 64 tokens.

    Raises:
        NotFound: An option that does not exist, or is not a number.
    """
    options = {"seed": 0.0, "sharpness": 3.0, "draft": 0.0, "delay_ms": 0.0, "context": 4096.0}
    for part in filter(None, name.removeprefix("toy").removeprefix(":").split(",")):
        key, _, value = part.partition("=")
        try:
            options[key] = float(value) if key in options else options[key]
        except (KeyError, ValueError) as error:
            raise NotFound(f"model {name!r}: {part!r} is not one of {', '.join(options)} with a number") from error
    language = ToyLanguage(len(ToyTokenizer()), int(options["seed"]), sharpness=options["sharpness"])
    if options["draft"]:
        language = language.draft(options["draft"], int(options["seed"]) + 1)
    return ToyRunner(
        language,
        context_len=int(options["context"]),
        num_blocks=num_blocks,
        delay_s=options["delay_ms"] / 1e3,
        name=name,
    )


class ToyTokenizer:
    """Ids for small strings, with the part of the `transformers` tokenizer interface that Outrider uses.

    Every byte has an id, so any text can be encoded and a character may be split over tokens; words are added on top.
    """

    chat_template: str | None = None

    def __init__(
        self, words: Sequence[str] = ("the ", "cat ", "sat ", "on ", "a ", "mat", ". ", "\u4f60\u597d")
    ) -> None:
        """Make a tokenizer.

        Args:
            words: Multi-character pieces, tried longest first.
        """
        halves = ["\U0001f600".encode()[:2], "\U0001f600".encode()[2:]]
        self._pieces = [b"", *(bytes([value]) for value in range(256)), *(word.encode() for word in words), *halves]
        self._by_piece = {piece: token for token, piece in enumerate(self._pieces) if piece}
        self._longest = max(len(piece) for piece in self._pieces)
        self.eos_token_id = 0
        self.all_special_ids = [0]
        self.name_or_path = "toy"

    def __len__(self) -> int:
        return len(self._pieces)

    @property
    def pieces(self) -> Sequence[bytes]:
        """The bytes of each id; none for the end of sequence."""
        return self._pieces

    def get_vocab(self) -> dict[str, int]:
        """Return the map from piece (Latin-1 view of its bytes) to id."""
        return {piece.decode("latin-1") or "<eos>": token for token, piece in enumerate(self._pieces)}

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text, longest piece first; there are no special tokens to add."""
        data, ids, start = text.encode(), [], 0
        while start < len(data):
            sizes = range(min(self._longest, len(data) - start), 0, -1)
            size = next(size for size in sizes if data[start : start + size] in self._by_piece)
            ids.append(self._by_piece[data[start : start + size]])
            start += size
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of ids; an incomplete character shows as U+FFFD, the end of sequence as `<eos>`."""
        eos = b"" if skip_special_tokens else b"<eos>"
        data = b"".join(self._pieces[token] if token else eos for token in token_ids)
        return data.decode(errors="replace")

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """Return the tokens beside the vocabulary proper: none that could be written."""
        return {}

    def get_chat_template(self, chat_template: str | None = None, tools: list[Any] | None = None) -> str:
        """Return what conversations are shown by, in words: the toy has no other."""
        return "tools, then messages, then the assistant's turn"

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tokenize: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[Any] | None = None,
        chat_template: str | None = None,
    ) -> list[int] | str:
        """Join messages as `role: content` lines; the answer's role is appended when asked for."""
        text = f"tools: {json.dumps(tools)}\n" if tools else ""
        for message in conversation:
            calls = f" {json.dumps(message['tool_calls'])}" if "tool_calls" in message else ""
            text += f"{message['role']}: {message.get('content', '')}{calls}\n"
        text = text[:-1] if continue_final_message else text
        text += "assistant: " if add_generation_prompt else ""
        return self.encode(text) if tokenize else text
