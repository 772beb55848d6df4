"""The target, run over texts that are known: its hidden states for drafters that ask for them, and what passes take."""

import time
from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor

from outrider.ids import Epoch, Generation, SessionId, TokenClass
from outrider.messages import TargetFeatures
from outrider.messages import Tensor as Packed
from outrider.model.runner import Feed, KvSlot, ModelRunner, prefill_plan
from outrider.shadowing import Passes

NUM_TIMED = 15
"""Passes of each size that are timed."""
MAX_TIMED_LEN = 256
"""Tokens of the text behind which passes are timed."""


class Teacher:
    """A target; owned by one thread."""

    def __init__(self, runner: ModelRunner) -> None:
        """Take over a runner."""
        self._runner = runner

    @property
    def context_len(self) -> int:
        """Most tokens of a text."""
        return self._runner.info.context_len

    def features(self, token_ids: Sequence[int]) -> Tensor:
        """Return the last hidden state, after the final norm, of every position: [len(token_ids), hidden_size].

        Computed as prompts are, so that the last bits may differ from those of a live session.
        """
        slot = self._runner.new_slot()
        try:
            rows = [self._read(slot, token_ids[start:end]) for start, end in prefill_plan(0, len(token_ids))]
        finally:
            self._runner.free_slot(slot, forget=True)
        return torch.cat(rows)

    def passes(self, token_ids: Sequence[int], gamma: int) -> Passes:
        """Time passes behind a text, of one row and of gamma + 1; there are at least gamma + 2 tokens."""
        text = token_ids[:MAX_TIMED_LEN]
        slot = self._runner.new_slot()
        try:
            for start, end in prefill_plan(0, len(text) - gamma - 1):
                self._runner.forward([Feed(slot, tuple(text[start:end]), TokenClass.PROMPT, 0)])
            return Passes(self._timed(slot, text[-1:]), self._timed(slot, text[-gamma - 1 :]))
        finally:
            self._runner.free_slot(slot, forget=True)

    def _read(self, slot: KvSlot, token_ids: Sequence[int]) -> Tensor:
        feed = Feed(slot, tuple(token_ids), TokenClass.PROMPT, len(token_ids), want_hidden=True)
        [rows] = self._runner.forward([feed])
        if rows.hidden is None:
            raise RuntimeError("a runner that was asked for hidden states returned none")
        return rows.hidden

    def _timed(self, slot: KvSlot, token_ids: Sequence[int]) -> float:
        """Return the median time of decode passes over the same tokens."""
        length, times_s = slot.length, []
        for _ in range(NUM_TIMED):
            started_s = time.perf_counter()
            self._runner.forward([Feed(slot, tuple(token_ids), TokenClass.DECODE, len(token_ids))])
            times_s.append(time.perf_counter() - started_s)
            slot.truncate(length)
        return median(times_s)


def message(session_id: str, features: Tensor, start: int, end: int) -> TargetFeatures:
    """Return hidden states of positions [start, end) as a verifier sends them."""
    rows = features[start:end].contiguous()
    dtype = str(rows.dtype).removeprefix("torch.")
    data = rows.cpu().view(torch.uint8).numpy().tobytes()
    shape = (1, rows.shape[0], rows.shape[1])
    return TargetFeatures(SessionId(session_id), Epoch(Generation(1, 1)), start, Packed(dtype, shape, data))
