"""What models and their KV take in memory: how many sessions a device holds. Pure."""

from dataclasses import dataclass

from outrider.errors import InvalidRequest

BLOCK_LEN = 64
"""Tokens of a block of KV; a session has whole blocks."""
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
GIB = float(1 << 30)


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a model, what its memory depends on."""

    parameters: float
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"

    @property
    def weight_bytes(self) -> float:
        """All weights."""
        return self.parameters * BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """KV of a token: a key and a value for each layer and key-value head."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES[self.dtype]

    def kv_bytes(self, sessions: int, context: int) -> int:
        """Return the KV of so many sessions at full length, and the block that padding is written to."""
        return (sessions * -(-context // BLOCK_LEN) + 1) * BLOCK_LEN * self.token_bytes


@dataclass(frozen=True, slots=True)
class Need:
    """What a worker needs beside its own software."""

    weight_bytes: float
    kv_bytes: float

    @property
    def total_bytes(self) -> float:
        """Both."""
        return self.weight_bytes + self.kv_bytes


def needs(shape: Shape, sessions: int, context: int, ranks: int = 1) -> Need:
    """Return what one rank of a worker needs.

    Args:
        shape: of its model.
        sessions: that it holds at once.
        context: most tokens of a session.
        ranks: processes that share the model and the KV.

    Raises:
        InvalidRequest: the heads cannot be shared out.
    """
    if ranks < 1 or shape.kv_heads % ranks:
        raise InvalidRequest("ranks", ranks, f"1, or a number that divides the {shape.kv_heads} key-value heads")
    return Need(shape.weight_bytes / ranks, shape.kv_bytes(sessions, context) / ranks)


def sessions_that_fit(shape: Shape, context: int, device_bytes: float, ranks: int = 1) -> int:
    """Return how many sessions at full length a worker holds on devices of so many bytes, one for each rank."""
    room = device_bytes * ranks - shape.weight_bytes
    block = BLOCK_LEN * shape.token_bytes
    return max(0, int((room - block) // (-(-context // BLOCK_LEN) * block)))


def shape_of(name: str, text: str, dtype: str) -> Shape:
    """Read "8.03,32,8,128": billions of parameters, layers, key-value heads, width of a head.

    Args:
        name: of the option, for errors.
        text: what was given.
        dtype: of weights and KV.

    Raises:
        InvalidRequest: it is none of those, or one is out of its range.
    """
    wanted = "billions of parameters, layers, key-value heads and head width, such as 8.03,32,8,128"
    if dtype not in BYTES:
        raise InvalidRequest("dtype", dtype, f"one of {', '.join(BYTES)}")
    try:
        billions, layers, kv_heads, head_dim = text.split(",")
        shape = Shape(float(billions) * 1e9, int(layers), int(kv_heads), int(head_dim), dtype)
    except ValueError as error:
        raise InvalidRequest(name, text, wanted) from error
    if not (0.0 < shape.parameters < 1e14 and min(shape.layers, shape.kv_heads, shape.head_dim) >= 1):
        raise InvalidRequest(name, text, f"{wanted}, all of them positive")
    return shape
