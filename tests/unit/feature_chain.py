"""A feature draft run on, row behind row, over KV of its own: what training and service have to equal."""

import torch
from torch import Tensor
from torch.nn import functional as fn

from outrider.drafting.feature import FeatureDraft


class FeatureChain:
    """One session of a draft."""

    def __init__(self, net: FeatureDraft) -> None:
        self._net = net
        self._keys = self._values = torch.zeros(0, net.shape.num_kv_heads, net.shape.head_dim)

    def extend(self, embedded: Tensor, features: Tensor) -> Tensor:
        """Run new positions right behind those before, [rows, hidden] each; return the guessed features."""
        entered = self._net.enter(embedded, features)
        positions = len(self._keys) + torch.arange(len(entered))
        queries, keys, values = self._net.project(entered, self._net.rotation(positions))
        self._keys, self._values = torch.cat([self._keys, keys]), torch.cat([self._values, values])
        seen = torch.arange(len(self._keys)) <= positions[:, None]
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in (queries, self._keys, self._values))
        attended = fn.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)
        return self._net.leave(entered, attended[0].transpose(0, 1).flatten(1))
