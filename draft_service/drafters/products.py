"""Products with the weights of a trained draft, as both kinds of drafts that read hidden states run them."""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from outrider.drafting.checkpoint import Draft
from outrider.model.packed import packed

Product = Callable[[Tensor], Tensor]
"""[rows, in] -> [rows, out]"""


def product(weight: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Product:
    """Return the product with a weight [out, in], packed where that is possible."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach().to(dtype), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().to(dtype), requires_grad=False)
    return cast(Product, packed(linear).forward)


def joining(draft: Draft, dtype: torch.dtype) -> Product:
    """Return the product that joins embeddings with features [rows, 2 * hidden], which scales embeddings too."""
    hidden = draft.shape.hidden_size
    scale = torch.ones(2 * hidden)
    scale[:hidden] = draft.shape.embedding_scale
    return product(draft.join.weight * scale, dtype)
