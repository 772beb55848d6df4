"""Which weights a model has: what its name alone does not say."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

_PIECE_BYTES = 64 << 20
"""Weights are hashed in pieces of this size, so that those of a GPU never lie in main memory as a whole."""


def weights_digest(model: nn.Module) -> bytes:
    """Return a digest of all weights with their names: 32 bytes. Takes about a second per GiB.

    Args:
        model: As loaded; a runner takes it apart.
    """
    digest = hashlib.blake2b(digest_size=32)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        for piece in _pieces(tensor):
            digest.update(piece.cpu().numpy().data)
    return digest.digest()


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    """Return a tensor's bytes, in pieces."""
    return torch.split(tensor.detach().contiguous().reshape(-1).view(torch.uint8), _PIECE_BYTES)
