"""Runs a feature draft over whole texts as a chain would: several steps on its own guesses.

Step 1 at row i reads the target's feature of position i. Step k reads the guess that step k - 1 made at row i - 1, and
attends as a chain that began k - 1 rows earlier would: to keys of true features up to row i - k + 1, then to one key of
each later step. All rows of a text are the heads of chains at once, so one pass trains every length of chain.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as fn

from outrider.drafting.feature import FeatureDraft


def unrolled(net: FeatureDraft, embedded: Tensor, features: Tensor, depth: int) -> Iterator[Tensor]:
    """Yield the guesses of step 1, step 2, ... of chains that begin at every row.

    Args:
        net: The network.
        embedded: [texts, rows, hidden], of the tokens at row + 1.
        features: [texts, rows, hidden], the target's or the stand-in.
        depth: How many steps.

    Yields:
        [texts, rows, hidden]; in step k the first k - 1 rows of a text mean nothing.
    """
    num_rows = embedded.shape[1]
    rotation = net.rotation(torch.arange(num_rows, device=embedded.device))
    steps: list[tuple[Tensor, Tensor]] = []
    for step in range(depth):
        entered = net.enter(embedded, features)
        queries, keys, values = net.project(entered, rotation)
        steps.append((keys, values))
        guesses = net.leave(entered, _attend(queries, steps))
        yield guesses
        if step + 1 < depth:
            features = fn.pad(guesses[:, :-1], (0, 0, 1, 0))


def _attend(queries: Tensor, steps: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attend as the last of the steps.

    Args:
        queries: [texts, rows, heads, head_dim], of the last step.
        steps: Keys and values of each step so far, [texts, rows, kv_heads, head_dim].

    Returns:
        [texts, rows, heads * head_dim].
    """
    (texts, rows, heads, width), kv_heads, late = queries.shape, steps[0][0].shape[2], len(steps) - 1
    queries = queries.view(texts, rows, kv_heads, -1, width) * width**-0.5
    grouped = queries.permute(0, 2, 3, 1, 4).reshape(texts * kv_heads, -1, width)
    keys, values = (tensor.transpose(1, 2).reshape(texts * kv_heads, rows, width) for tensor in steps[0])
    hidden = torch.ones(rows, rows, dtype=torch.bool, device=queries.device).triu(1 - late)
    bias = torch.zeros(rows, rows, dtype=queries.dtype, device=queries.device).masked_fill_(hidden, float("-inf"))
    scores = (grouped @ keys.transpose(1, 2)).view(texts, kv_heads, -1, rows, rows) + bias
    diagonals = [_shifted(entry, late - 1 - number) for number, entry in enumerate(steps[1:])]
    own = [torch.einsum("tighd,tigd->tghi", queries, keys_k) for keys_k, _ in diagonals]
    weights = torch.cat([scores, *(column[..., None] for column in own)], dim=-1).softmax(dim=-1)
    seen = (weights[..., :rows].reshape(texts * kv_heads, -1, rows) @ values).view(texts, kv_heads, -1, rows, width)
    attended = seen.permute(0, 3, 1, 2, 4)
    for number, (_, values_k) in enumerate(diagonals):
        attended = attended + weights[..., rows + number].permute(0, 3, 1, 2)[..., None] * values_k[:, :, :, None]
    return attended.reshape(texts, rows, heads * width)


def _shifted(entry: tuple[Tensor, Tensor], by: int) -> tuple[Tensor, Tensor]:
    """Move keys and values of a step down, so that row i holds those of row i - by."""
    if not by:
        return entry
    keys, values = (fn.pad(tensor[:, :-by], (0, 0, 0, 0, by, 0)) for tensor in entry)
    return keys, values
