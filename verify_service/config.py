"""Settings of a verifier: `OUTRIDER_VERIFY_*` environment variables."""

from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from outrider.config import ServiceSettings
from outrider.model.loader import DEFAULT_MODEL
from outrider.rpc import MAX_MESSAGE_BYTES

TOY = "toy"
"""Model name of the exact toy model, which needs no weights."""


class VerifySettings(ServiceSettings):
    """What a verifier can be told, beside what every service can."""

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_VERIFY_", frozen=True, extra="forbid")

    model: str = DEFAULT_MODEL
    """The target: the packaged model's name, a hub id, a folder, a `.gguf` file, or "toy"."""
    dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    """Type of weights and KV."""
    device: str = "cpu"
    """Where the model runs, as torch names it."""
    threads: int = Field(default=1, ge=1)
    """Threads of the model's arithmetic."""
    num_blocks: int = Field(default=256, ge=1)
    """Size of the KV pool, in blocks of 64 tokens."""
    context_len: int = Field(default=0, ge=0)
    """Most tokens of a session; 0: the model's own limit."""
    max_sessions: int = Field(default=64, ge=1)
    """Sessions decoded at once."""
    max_waiting: int = Field(default=256, ge=0)
    """Sessions that wait for a place; one more is refused."""
    retry_delay_s: float = Field(default=1.0, ge=0)
    """What a refused caller is told to wait."""
    body_limit_s: float = Field(default=30.0, gt=0)
    """Longest wait for a proposal that was announced; running out voids rejection mode's guarantee, and is counted."""
    idle_s: float = Field(default=600.0, ge=0)
    """How long a session's KV is kept after it ended."""
    max_message_bytes: int = Field(default=MAX_MESSAGE_BYTES, ge=1 << 16)
    """Largest message that is sent or taken; a larger one ends the stream it came on."""
    send_hints: bool = False
    """Whether draft workers are told of an epoch's end before the orchestrator's commit."""
    toy_seed: int = 0
    """Toy: seed of the language."""
    toy_order: int = Field(default=2, ge=0)
    """Toy: tokens that the language looks back."""
    toy_sharpness: float = Field(default=2.0, ge=0)
    """Toy: standard deviation of the language's logits."""
    toy_delay_s: float = Field(default=0.0, ge=0)
    """Toy: seconds of one pass."""
    heartbeat_ttl_s: float = Field(default=5.0, gt=0)
    """How long an announcement in the registry holds; renewed three times as often."""
