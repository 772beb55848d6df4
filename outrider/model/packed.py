"""Linear layers whose weights are stored in the order that the CPU's matrix kernel reads them.

A pass over few rows is bound by reading weights. Reading them in the kernel's own blocked order nearly halves that time
(measured: 30 layers of the default model, one row, bfloat16: 8.5 ms instead of 15). On devices and builds without
these kernels nothing is packed.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

_ROWS_HINT = 32
"""Rows of a typical large pass; the kernel library chooses the block order by it."""


class PackedLinear(nn.Module):
    """The same function as the linear layer it was made from, for inference only."""

    def __init__(self, linear: nn.Linear) -> None:
        """Pack a layer's weight; the layer itself is not changed.

        Args:
            linear: On the CPU, in a dtype that `can_pack` accepts.
        """
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        ops = cast(Any, torch.ops.mkldnn)
        with torch.inference_mode():
            self._packed: Tensor = ops._reorder_linear_weight(linear.weight.detach(), _ROWS_HINT)
        self._bias = None if linear.bias is None else linear.bias.detach()
        self._apply_packed = ops._linear_pointwise

    def forward(self, rows: Tensor) -> Tensor:
        """Return rows times the weight, plus the bias: [..., out_features]."""
        return cast(Tensor, self._apply_packed(rows, self._packed, self._bias, "none", [], ""))


def can_pack(weight: Tensor) -> bool:
    """Whether weights of this device and dtype have packed kernels here."""
    if weight.device.type != "cpu" or not cast(Any, torch.backends.mkldnn).is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight") or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if weight.dtype is torch.bfloat16:
        return bool(cast(Any, torch.ops.mkldnn)._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32


def packed(linear: nn.Module) -> nn.Module:
    """Return the layer packed where that is possible, else the layer itself."""
    if type(linear) is nn.Linear and can_pack(linear.weight):
        return PackedLinear(linear)
    return linear


def unmap(model: nn.Module) -> None:
    """Give weights that are still used on the CPU memory of their own, so that a mapped checkpoint file can go.

    A file stays mapped as long as one tensor lies in it: the few weights that are not packed (embedding, norms) would
    keep a second copy of all the others resident.
    """
    with torch.no_grad():
        for weight in model.parameters():
            if weight.device.type == "cpu":
                weight.data = weight.data.clone()
