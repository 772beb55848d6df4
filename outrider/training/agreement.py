"""Cross-entropy of a draft's laws against the target's, a few rows at a time.

All laws of a batch at once would take hundreds of megabytes several times over, in steps that do nothing but move
them; a piece of them stays in the processor's cache from product to gradient. The gradients are therefore made along
with the loss, and `backward` only scales them.
"""

from typing import Any

import torch
from torch import Tensor

PIECE = 256
"""Rows at a time."""


class _Agreement(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, guesses: Tensor, head: Tensor, places: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        loss = torch.zeros((), device=guesses.device)
        shared = torch.empty(len(guesses), device=guesses.device)
        by_guess, by_law = torch.empty_like(guesses), guesses.new_empty(len(guesses), len(head))
        for start in range(0, len(guesses), PIECE):
            rows = slice(start, start + PIECE)
            laws = (guesses[rows] @ head.T).float()
            total = laws.logsumexp(-1, keepdim=True)
            chosen, wanted = laws.gather(-1, places[rows].clamp(min=0)), probs[rows]
            mass = wanted.sum(-1, keepdim=True)
            loss += (total * mass).sum() - (chosen * wanted).sum()
            shared[rows] = torch.minimum((chosen - total).exp(), wanted).sum(-1)
            slopes = laws.sub_(total).exp_().mul_(mass).scatter_add_(-1, places[rows].clamp(min=0), -wanted)
            by_law[rows] = slopes
            by_guess[rows] = by_law[rows] @ head
        count = max(1, len(guesses))
        ctx.save_for_backward(guesses, by_guess, by_law)
        ctx.count = count
        ctx.mark_non_differentiable(shared)
        return loss / count, shared

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        guesses, by_guess, by_law = ctx.saved_tensors
        scale = slopes[0] / ctx.count
        to_head = (by_law.T @ guesses) * scale if ctx.needs_input_grad[1] else None
        return by_guess * scale, to_head, None, None


def agreement(guesses: Tensor, head: Tensor, places: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean cross-entropy of rows, and the mass that each row's law shares with the target's.

    Args:
        guesses: [rows, hidden], what the head reads.
        head: [ids of the draft, hidden].
        places: [rows, K] int64: where the draft has the target's likeliest ids, -1 where it has not.
        probs: [rows, K] float32, of those ids, at temperature 1; the rest of the target's mass is not trained on.

    Returns:
        A scalar with a gradient, and [rows] without one.
    """
    known = probs * (places >= 0)
    loss, shared = _Agreement.apply(guesses, head, places, known)  # type: ignore[no-untyped-call]
    return loss, shared
