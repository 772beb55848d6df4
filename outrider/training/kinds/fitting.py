"""Least squares, for a draft's first layer: a start that no training steps have to be spent on."""

import torch
from torch import Tensor

RIDGE = 1e-2
"""Pull towards zero, as a share of the inputs' mean square."""


def joined(embedded: Tensor, features: Tensor, scale: float) -> Tensor:
    """Return a join's inputs, [..., 2 * hidden] float32.

    Args:
        embedded: [..., hidden]
        features: [..., hidden]
        scale: Of the embeddings.
    """
    return torch.cat([embedded.float() * scale, features.float()], dim=-1)


def least_squares(given: Tensor, wanted: Tensor) -> tuple[Tensor, float]:
    """Return the linear map that comes closest, and the share of the variance it explains.

    Args:
        given: [rows, inputs] float32
        wanted: [rows, outputs] float32

    Returns:
        Weights, [outputs, inputs], and at most 1.
    """
    ridge = RIDGE * given.square().sum(0).mean() * torch.eye(given.shape[1], device=given.device)
    fitted = torch.linalg.solve(given.T @ given + ridge, given.T @ wanted)
    unexplained = (given @ fitted - wanted).square().sum() / (wanted - wanted.mean(0)).square().sum()
    return fitted.T, 1.0 - float(unexplained)
