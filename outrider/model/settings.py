"""Settings that every service with a model of its own knows."""

from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic_settings import NoDecode

from outrider.config import NameList, ServiceSettings
from outrider.model.memory import KvBudget, parse_budget
from outrider.model.names import DEFAULT_MODEL


class ModelSettings(ServiceSettings):
    """What a service with a model can be told, beside what every service can."""

    model: str = DEFAULT_MODEL
    """The packaged model's name, a hub id, a folder, a `.gguf` file, or "toy"."""
    dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    """Type of weights and KV."""
    device: str = "cpu"
    """Where the model runs, as torch names it."""
    threads: int = Field(default=1, ge=1, le=1024)
    """Threads of the model's arithmetic."""
    kv_budget: Annotated[KvBudget, NoDecode] = KvBudget(num_bytes=512 << 20)
    """Memory of the KV pool: a size such as "2GiB", or a share of what is free once the model is loaded, as "40%"."""
    num_blocks: int = Field(default=0, ge=0)
    """Size of the KV pool in blocks of 64 tokens; 0: what the budget has room for."""
    prefix_reuse: bool = True
    """Whether KV that was computed before, for whichever session, is used again; no text depends on it."""
    context_len: int = Field(default=0, ge=0)
    """Most tokens of a session; 0: the model's own limit."""
    max_sessions: int = Field(default=64, ge=1)
    """Sessions served at once."""
    tls_orchestrators: NameList = ("orchestrator", "orchestrator.*", "orchestrator-*")
    """Under mutual TLS: names of certificates, comma-separated, "*" for any characters, that may open sessions."""
    toy_seed: int = 0
    """Toy: seed of the target's language."""
    toy_order: int = Field(default=2, ge=0)
    """Toy: tokens that the language looks back."""
    toy_sharpness: float = Field(default=2.0, ge=0)
    """Toy: standard deviation of the language's logits."""
    toy_delay_s: float = Field(default=0.0, ge=0)
    """Toy: seconds of one pass."""
    heartbeat_ttl_s: float = Field(default=5.0, gt=0, le=600)
    """How long an announcement in the registry holds; renewed three times as often."""

    @field_validator("kv_budget", mode="before")
    @classmethod
    def _read_budget(cls, value: object) -> object:
        """Take a size or a share as text."""
        return parse_budget(value) if isinstance(value, str) else value

    @property
    def pool(self) -> int | KvBudget:
        """Size of the KV pool: blocks if they are set, else the budget."""
        return self.num_blocks or self.kv_budget
