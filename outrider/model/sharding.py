"""Models that `transformers` has split over several processes: whether, in how many parts, and whether that can be.

What makes a part of a weight is known by its mesh: importing its class takes a second that most processes can save.
"""

from typing import Any, cast

from torch import Tensor, nn

from outrider.errors import FailedPrecondition


def num_shards(model: nn.Module) -> int:
    """Return over how many ranks a loaded model is split; 1: not at all."""
    meshes = (getattr(weight, "device_mesh", None) for weight in model.parameters())
    return next((int(mesh.size()) for mesh in meshes if mesh is not None), 1)


def local(rows: Tensor) -> Tensor:
    """Return numbers that every rank has all of as an ordinary tensor."""
    whole: Any = getattr(rows, "full_tensor", None)
    return rows if whole is None else cast(Tensor, whole())


def require_divisible(config: Any, size: int) -> None:
    """Check that each rank gets whole heads.

    Args:
        config: of the model.
        size: ranks.

    Raises:
        FailedPrecondition: it does not; names both numbers.
    """
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    for name, number in (("attention heads", heads), ("key-value heads", kv_heads)):
        if number % size:
            sizes = [count for count in range(1, kv_heads + 1) if not kv_heads % count and not heads % count]
            raise FailedPrecondition(
                f"tensor_parallel = {size}: the model's {number} {name} cannot be shared out evenly; allowed are "
                f"{', '.join(map(str, sizes))}"
            )
