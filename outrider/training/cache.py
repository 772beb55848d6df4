"""What the target makes of the texts, computed once: its last hidden states, and its likeliest next tokens.

Files in one folder, mapped into memory rather than read:

    features.bin    bfloat16 [tokens, hidden]; left out for drafts that do not read features
    law_ids.bin     uint16 or int32 [tokens, K], likeliest first: of the token behind each position
    law_probs.bin   float16 [tokens, K], at temperature 1
    done.bin        uint8 [texts]: which texts are finished; the rest is computed when it is opened again
    about.json      what it is of; a cache of anything else is refused

Laws are kept for the last prompt position and the answer, which is what drafts are trained on.
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.errors import FailedPrecondition
from outrider.training.about import check_same, describe, is_described
from outrider.training.texts import Ints, Texts

TOP = 24
"""Ids kept of each law; on chat they hold about 96 % of its mass."""
SPARE_BYTES = 1 << 30
"""Room that is left free on the disk."""
_HEAD_ROWS = 64
"""Rows whose logits exist at one time: 12 MB in float32 for 49,152 ids."""

Progress = Callable[[int], None]
"""Told how many tokens are finished."""


@dataclass(frozen=True, slots=True)
class CacheKey:
    """What a cache is of."""

    target: str
    vocabulary: str
    texts: str
    """Digest."""
    num_tokens: int
    num_texts: int
    hidden_size: int
    """0: no features are kept."""
    vocab_size: int

    @property
    def id_type(self) -> type[np.uint16] | type[np.int32]:
        """How wide an id is."""
        return np.uint16 if self.vocab_size <= 1 << 16 else np.int32

    @property
    def num_bytes(self) -> int:
        """Size on disk."""
        per_token = 2 * self.hidden_size + TOP * (np.dtype(self.id_type).itemsize + 2)
        return self.num_tokens * per_token + self.num_texts


class Cache:
    """An open cache."""

    def __init__(self, folder: Path, key: CacheKey, disk_limit: int) -> None:
        """Open a cache, or make an empty one.

        Args:
            folder: Where it is, or goes.
            key: What it must be of.
            disk_limit: Most bytes it may take.

        Raises:
            FailedPrecondition: It is of something else, or there is no room for it.
        """
        self.key = key
        fresh = not is_described(folder)
        if fresh:
            _check_room(folder, key.num_bytes, disk_limit)
        else:
            check_same(folder, asdict(key), "hidden states")
        tokens = key.num_tokens
        mode = "w+" if fresh else "r+"
        self._features = _mapped(folder / "features.bin", np.uint16, mode, (tokens, key.hidden_size))
        self.law_ids: NDArray[Any] = _mapped(folder / "law_ids.bin", key.id_type, mode, (tokens, TOP))
        self.law_probs: NDArray[Any] = _mapped(folder / "law_probs.bin", np.float16, mode, (tokens, TOP))
        self.done: NDArray[Any] = _mapped(folder / "done.bin", np.uint8, mode, (key.num_texts,))
        if fresh:
            describe(folder, asdict(key))

    def features(self, start: int, end: int) -> Tensor:
        """Return features of positions, [end - start, hidden] bfloat16, copied."""
        return torch.from_numpy(np.array(self._features[start:end])).view(torch.bfloat16)

    def keep(self, at: int, hidden: Tensor) -> None:
        """Keep the features of positions from `at` on, [rows, hidden]."""
        if self.key.hidden_size:
            bits = hidden.to(torch.bfloat16).cpu().view(torch.uint16).numpy()
            self._features[at : at + len(bits)] = bits


def fill(cache: Cache, model: Any, texts: Texts, batch_tokens: int, on_progress: Progress = lambda _: None) -> None:
    """Compute what is missing; may be interrupted and called again. Blocks for long.

    Args:
        cache: Of these texts.
        model: The target, as `outrider.model.loader.load` returns it.
        texts: The texts.
        batch_tokens: Most tokens of one pass, padding included; at least one text is taken.
        on_progress: Told after each pass.
    """
    finished = int(texts.lengths[cache.done.astype(bool)].sum())
    on_progress(finished)
    for numbers in _passes(texts.lengths, np.flatnonzero(cache.done == 0), batch_tokens):
        _compute(cache, model, texts, numbers)
        finished += int(texts.lengths[numbers].sum())
        on_progress(finished)


def _passes(lengths: Ints, missing: Ints, batch_tokens: int) -> Iterator[Ints]:
    """Yield texts of like lengths, so that little is padded."""
    waiting = missing[np.argsort(-lengths[missing], kind="stable")]
    while len(waiting):
        count = max(1, batch_tokens // int(lengths[waiting[0]]))
        yield waiting[:count]
        waiting = waiting[count:]


@torch.inference_mode()
def _compute(cache: Cache, model: Any, texts: Texts, numbers: Ints) -> None:
    """Run texts through the target; padding behind a text is invisible to it, as attention looks back only."""
    rows = [torch.from_numpy(texts.text(int(number))) for number in numbers]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(model.device)
    hidden = model.base_model(ids, use_cache=False).last_hidden_state
    head = model.get_output_embeddings()
    for row, number in enumerate(numbers):
        start, length = int(texts.offsets[number]), len(rows[row])
        cache.keep(start, hidden[row, :length])
        first = int(texts.prompt_lengths[number]) - 1
        for piece, at in _pieces(hidden[row, first : length - 1], start + first):
            law_ids, law_probs = likeliest(head(piece))
            cache.law_ids[at : at + len(piece)] = law_ids.cpu().numpy().astype(cache.law_ids.dtype)
            cache.law_probs[at : at + len(piece)] = law_probs.half().cpu().numpy()
    cache.done[numbers] = 1


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the likeliest ids of laws and their probabilities at temperature 1.

    Args:
        logits: [rows, vocab].

    Returns:
        [rows, K] int64, likeliest first, and [rows, K] float32; zeros behind the vocabulary's end.
    """
    best, ids = logits.topk(min(TOP, logits.shape[-1]), dim=-1)
    wide = logits.float()
    probs = (best.float() - wide.logsumexp(-1, keepdim=True)).exp()
    missing = TOP - ids.shape[-1]
    return torch.nn.functional.pad(ids, (0, missing)), torch.nn.functional.pad(probs, (0, missing))


def _pieces(hidden: Tensor, at: int) -> Iterator[tuple[Tensor, int]]:
    """Yield rows in pieces, with the position of each piece's first row."""
    for first in range(0, len(hidden), _HEAD_ROWS):
        yield hidden[first : first + _HEAD_ROWS], at + first


def _check_room(folder: Path, needed: int, limit: int) -> None:
    """Refuse a cache that is too large for its limit or its disk; see `Cache`."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free - SPARE_BYTES
    for room, name in ((limit, "the limit (--disk)"), (free, f"what is free in {folder}, less 1 GiB")):
        if needed > room:
            raise FailedPrecondition(
                f"the hidden states need {needed / 2**30:.2f} GiB of disk, {name} is {max(0, room) / 2**30:.2f} GiB: "
                "train on fewer tokens, raise the limit, or choose another --out"
            )


def _mapped(path: Path, dtype: Any, mode: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """Map a file; an empty array needs none."""
    if not all(shape):
        return np.zeros(shape, dtype)
    return cast(NDArray[Any], np.memmap(path, dtype, cast(Any, mode), shape=shape))
