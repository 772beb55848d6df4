"""Cross-entropy of a draft's laws against the target's, a few rows at a time.

The laws are compared as they are and sharpened, as at temperature 1/2: a perfect draft is the best answer to both, and
an imperfect one spends more of its strength on which token is likeliest, which is what counts at low temperatures.

All laws of a batch at once would take hundreds of megabytes several times over, in steps that do nothing but move
them; a piece of them stays in the processor's cache from product to gradient. The gradients are therefore made along
with the loss, and `backward` only scales them.
"""

from typing import Any

import torch
from torch import Tensor

PIECE = 256
"""Rows at a time."""
SHARPNESS = 2.0
"""Factor of the logits of a sharpened law."""
SHARPENED_SHARE = 0.5
"""Weight of the loss of the sharpened laws; that of the laws as they are is 1."""


class _Agreement(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, guesses: Tensor, head: Tensor, places: Tensor, known: Tensor, sharpened: Tensor) -> Any:
        loss, shared = torch.zeros((), device=guesses.device), torch.empty(len(guesses), device=guesses.device)
        by_guess, by_law = torch.empty_like(guesses), guesses.new_empty(len(guesses), len(head))
        for start in range(0, len(guesses), PIECE):
            rows = slice(start, start + PIECE)
            laws, at = (guesses[rows] @ head.T).float(), places[rows].clamp(min=0)
            sharp_loss, sharp_slopes, _ = _compared(laws * SHARPNESS, at, sharpened[rows])
            plain_loss, slopes, shared[rows] = _compared(laws, at, known[rows])
            loss += plain_loss + SHARPENED_SHARE * sharp_loss
            by_law[rows] = slopes.add_(sharp_slopes, alpha=SHARPENED_SHARE * SHARPNESS)
            by_guess[rows] = by_law[rows] @ head
        ctx.count = max(1, len(guesses))
        ctx.save_for_backward(guesses, by_guess, by_law)
        ctx.mark_non_differentiable(shared)
        return loss / ctx.count, shared

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        guesses, by_guess, by_law = ctx.saved_tensors
        scale = slopes[0] / ctx.count
        to_head = (by_law.T @ guesses) * scale if ctx.needs_input_grad[1] else None
        return by_guess * scale, to_head, None, None, None


def _compared(laws: Tensor, places: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compare laws.

    Args:
        laws: [rows, ids] float32, logits; used up.
        places: [rows, K] int64.
        wanted: [rows, K] float32, 0 for what the draft does not know.

    Returns:
        The summed cross-entropy, its slopes by the logits, [rows, ids], and the mass each row shares, [rows].
    """
    total, mass = laws.logsumexp(-1, keepdim=True), wanted.sum(-1, keepdim=True)
    chosen = laws.gather(-1, places)
    loss = (total * mass).sum() - (chosen * wanted).sum()
    shared = torch.minimum((chosen - total).exp(), wanted).sum(-1)
    slopes = laws.sub_(total).exp_().mul_(mass).scatter_add_(-1, places, -wanted)
    return loss, slopes, shared


def agreement(guesses: Tensor, head: Tensor, places: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean loss of rows, and the mass that each row's law shares with the target's.

    Args:
        guesses: [rows, hidden], what the head reads.
        head: [ids of the draft, hidden].
        places: [rows, K] int64: where the draft has the target's likeliest ids, -1 where it has not.
        probs: [rows, K] float32, of those ids, at temperature 1; the rest of the target's mass is not trained on.

    Returns:
        A scalar with a gradient, and [rows] without one.
    """
    sharp = probs**SHARPNESS
    sharp = sharp / sharp.sum(-1, keepdim=True).clamp(min=1e-30)
    inside = places >= 0
    loss, shared = _Agreement.apply(guesses, head, places, probs * inside, sharp * inside)  # type: ignore[no-untyped-call]
    return loss, shared
