"""The target's hidden states of one session, as far as they have come and are still of use.

A feature is that of a committed position, so it never changes: of two with one position the one of the later epoch
holds. They come in order of position, within a generation. What never comes (the verifier had the position's KV
already, or the stream was not up) is not waited for: whoever uses features has a stand-in for missing ones.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.ids import Epoch
from outrider.messages import TargetFeatures

MAX_KEPT = 128
"""Features kept of a session at most; of more, the oldest go."""
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(slots=True)
class Features:
    """What is known; see the module's head."""

    hidden_size: int
    dtype: torch.dtype
    """That they are kept in."""
    max_len: int
    """Positions at or past it are dropped."""
    end: int = 0
    """One more than the highest position that came."""
    _rows: dict[int, tuple[Epoch, Tensor]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, message: TargetFeatures) -> list[int]:
        """Take what is new.

        Returns:
            Positions whose feature was not known, rising.

        Raises:
            ValueError: it is not the last layer of a target of this size.
        """
        rows = self._rows_of(message)
        fresh = []
        end = max(0, min(len(rows), self.max_len - message.position))
        for at in range(max(0, end - MAX_KEPT), end):
            position, row = message.position + at, rows[at]
            known = self._rows.get(position)
            if known is None or known[0] < message.epoch:
                self._rows[position] = message.epoch, row
                if known is None:
                    fresh.append(position)
        self.end = max(self.end, min(self.max_len, message.position + end))
        while len(self._rows) > MAX_KEPT:
            del self._rows[next(iter(self._rows))]
        return fresh

    def get(self, position: int) -> Tensor | None:
        """Return the feature of a position [hidden_size], if it is known."""
        known = self._rows.get(position)
        return None if known is None else known[1]

    def _rows_of(self, message: TargetFeatures) -> Tensor:
        """Return [positions, hidden_size] of the one layer."""
        tensor = message.features
        layers, count, size = tensor.shape
        if layers != 1 or size != self.hidden_size or tensor.dtype not in _DTYPES:
            raise ValueError(
                f"features of {layers} layers, {size} wide, in {tensor.dtype}; wanted is 1 layer, {self.hidden_size} "
                f"wide, in one of {', '.join(_DTYPES)}"
            )
        rows = torch.frombuffer(bytearray(tensor.data), dtype=_DTYPES[tensor.dtype])
        return rows.view(count, size).to(self.dtype)
