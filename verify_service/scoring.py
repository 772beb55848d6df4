"""From logits to log-probabilities: of single tokens, and of a prompt.

A prompt's are taken from the rows of the passes that compute its KV, and told when that is complete.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from outrider.messages import DecodeOpen, PromptScores, TokenLogprobs

MAX_PART = 1 << 14
"""Log-probabilities of one message, those of the likeliest tokens included: about 250 KB."""


class Scoring:
    """What is known of one session's prompt so far.

    The row of a token is the law of the one behind it, so the first token has no log-probability, and the last one's
    row, which is computed with the first run, is not needed.
    """

    def __init__(self, opened: DecodeOpen, vocab_len: int) -> None:
        """Know nothing yet.

        Args:
            opened: asks for log-probabilities of its prompt.
            vocab_len: length of the tokenizer's id range.
        """
        self._ids = opened.token_ids[: opened.prompt_len]
        self._num_top, self._vocab_len = opened.num_prompt_logprobs, vocab_len
        self._scores: list[TokenLogprobs] = []

    def take(self, start: int, logits: Tensor) -> None:
        """Take the rows of the positions from `start` on; those of a prompt that is computed again are known already.

        Args:
            start: absolute position of the first row's token; no further than what is known.
            logits: [positions, vocab_size].
        """
        known = len(self._scores)
        if start >= len(self._ids) - 1:
            return
        if known < start:
            raise ValueError(f"rows from {start} on where {known} are known")
        rows = logits[known - start : max(0, len(self._ids) - 1 - start), : self._vocab_len]
        tokens = list(self._ids[known + 1 : known + 1 + len(rows)])
        self._scores += token_logprobs(rows, tokens, self._num_top)

    def parts(self) -> Iterator[PromptScores]:
        """Return what there is, in messages of bounded size; one at least."""
        step = max(1, MAX_PART // (self._num_top + 1))
        for first in range(0, max(1, len(self._scores)), step):
            yield PromptScores(first + 1, tuple(self._scores[first : first + step]))


def token_logprobs(rows: Tensor, tokens: list[int], num_top: int) -> list[TokenLogprobs]:
    """Return log-probabilities of tokens, and of the likeliest ones at their places.

    Args:
        rows: [num_tokens, vocab] logits, cut to the tokenizer's vocabulary; minus infinity where there is no mass.
        tokens: the token each row was for, [num_tokens].
        num_top: how many of the likeliest tokens to list, >= 0; of equal ones the lowest id comes first.
    """
    if not tokens:
        return []
    logs = torch.log_softmax(rows, dim=-1)
    own = logs.gather(1, torch.tensor(tokens, device=logs.device).unsqueeze(1)).squeeze(1).tolist()
    tops = [_likeliest(row, min(num_top, len(row))) for row in logs]
    return [TokenLogprobs(value, top) for value, top in zip(own, tops, strict=True)]


def _likeliest(row: Tensor, num: int) -> tuple[tuple[int, float], ...]:
    """Return (id, value) of the `num` largest values, largest first, equal ones by lowest id."""
    if num == 0:
        return ()
    candidates = torch.nonzero(row >= torch.topk(row, num).values[-1]).squeeze(1)
    order = torch.sort(row[candidates], descending=True, stable=True)
    pairs = zip(candidates[order.indices[:num]].tolist(), order.values[:num].tolist(), strict=True)
    return tuple((token, value) for token, value in pairs if value > -torch.inf)
