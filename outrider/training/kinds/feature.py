"""Trains the feature draft, which starts as the target's own last layer on a linear guess of what that layer reads.

The join is the least-squares map from (embedding of the next token, feature) to what the target's last layer reads at
the next position, fitted on a few texts; layer, final norm and head are the target's. Such a start guesses 30 % of the
tokens before any training. Where the target is of another make, the layer starts at random.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from outrider.drafting.feature import FeatureDraft, FeatureShape
from outrider.errors import FailedPrecondition
from outrider.training.batches import Batch
from outrider.training.kinds.protocol import Target
from outrider.training.kinds.reader import FeatureReader
from outrider.training.unroll import unrolled


class FeatureTrainee(FeatureReader[FeatureDraft]):
    """A feature draft in training."""

    def __init__(self, target: Target, draft_ids: Tensor, intermediate_size: int, depth: int) -> None:
        """Make a network that starts from the target.

        Args:
            target: On the device that is trained on.
            draft_ids: Ids of the head, rising.
            intermediate_size: Of the layer; 0 takes the target's.
            depth: Steps of a chain that are trained.
        """
        super().__init__(target, FeatureDraft(_shape(target, len(draft_ids), intermediate_size)), draft_ids, depth)
        with torch.no_grad():
            start_from_last_layer(self.net, target.model)

    def guesses(self, batch: Batch, depth: int, missing: Tensor | None = None) -> Iterator[Tensor]:
        """Yield guessed features; see the protocol."""
        return unrolled(self.net, *self.read(batch, missing), depth)


def _shape(target: Target, draft_vocab: int, intermediate_size: int) -> FeatureShape:
    """Return sizes like the target's."""
    config = target.model.config
    heads = int(config.num_attention_heads)
    width = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    rope = getattr(config, "rope_parameters", None) or {}
    if width % 2:
        raise FailedPrecondition(
            f"heads of {width} values cannot be turned by their position: an even number is needed"
        )
    return FeatureShape(
        hidden_size=target.embedding.shape[1],
        num_heads=heads,
        num_kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=width,
        intermediate_size=intermediate_size or int(getattr(config, "intermediate_size", 4 * config.hidden_size)),
        draft_vocab_size=draft_vocab,
        rms_eps=float(getattr(config, "rms_norm_eps", 1e-5)),
        rope_theta=float(rope.get("rope_theta", 10_000.0)),
        embedding_scale=target.embedding_scale,
    )


def start_from_last_layer(net: FeatureDraft, model: Any) -> bool:
    """Copy the target's last layer and final norm into the network where they fit; say whether they did.

    A wider layer than the target's gets the target's values in front, and writes nothing from the rest at first.
    """
    layer, norm = _last_layer(model), getattr(model.base_model, "norm", None)
    parts = {} if layer is None else _parts(layer)
    if norm is None or any(getattr(part, "bias", None) is not None for part in parts.values()) or not parts:
        return False
    weights = {name: part.weight.detach().float().cpu() for name, part in parts.items()}
    qkv = torch.cat([weights["q"], weights["k"], weights["v"]])
    if qkv.shape != net.qkv.weight.shape or weights["down"].shape[0] != net.shape.hidden_size:
        return False
    net.qkv.weight.copy_(qkv)
    net.out.weight.copy_(weights["o"])
    net.norm_in.weight.copy_(weights["norm_in"])
    net.norm_mid.weight.copy_(weights["norm_mid"])
    net.norm_out.weight.copy_(norm.weight.detach().float().cpu())
    size = min(net.shape.intermediate_size, weights["down"].shape[1])
    net.down.weight.zero_()
    net.down.weight[:, :size] = weights["down"][:, :size]
    net.gate_up.weight[:size] = weights["gate"][:size]
    start = net.shape.intermediate_size
    net.gate_up.weight[start : start + size] = weights["up"][:size]
    return True


def _last_layer(model: Any) -> Any:
    """Return the target's last decoder layer, None where it has none under the usual name."""
    layers = getattr(model.base_model, "layers", None)
    return layers[-1] if layers is not None and len(layers) else None


def _parts(layer: Any) -> dict[str, Any]:
    """Return a Llama-like layer's parts; empty where it is built otherwise."""
    names = {
        "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
        "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
        "norm_in": "input_layernorm", "norm_mid": "post_attention_layernorm",
    }  # fmt: skip
    found = dict(layer.named_modules())
    return {name: found[path] for name, path in names.items()} if set(names.values()) <= found.keys() else {}


@torch.no_grad()
def fit_join(trainee: FeatureTrainee, model: Any, batches: list[Batch]) -> float:
    """Fit the join to what the target's last layer reads, and the stand-in to the mean feature; a few target passes.

    Args:
        trainee: Changed in place.
        model: The target.
        batches: A few thousand rows.

    Returns:
        The share of the variance that the fit explains; 0 where the target has no such layer and nothing was fitted.
    """
    layer = _last_layer(model)
    if layer is None:
        return 0.0
    explained, _ = trainee.fit(batches, lambda batch: _reads(model, layer, batch.token_ids)[:, 1:])
    return explained


def _reads(model: Any, layer: Any, token_ids: Tensor) -> Tensor:
    """Return what a layer of the target reads, [texts, positions, hidden]."""
    seen: list[Tensor] = []

    def keep(_: Any, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        seen.append(args[0] if args else kwargs["hidden_states"])

    handle = layer.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        model.base_model(token_ids, use_cache=False)
    finally:
        handle.remove()
    return seen[0]
