"""Settings of a draft worker: `OUTRIDER_DRAFT_*` environment variables."""

from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from outrider.config import ServiceSettings
from outrider.model.loader import DEFAULT_MODEL
from outrider.model.memory import KvBudget, parse_budget


class DraftSettings(ServiceSettings):
    """What a draft worker can be told, beside what every service can."""

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_DRAFT_", frozen=True, extra="forbid")

    drafter: Literal["causal_lm", "prompt_lookup", "toy"] = "causal_lm"
    """How to guess: with a language model, by looking up earlier text, or with the toy model."""
    model: str = DEFAULT_MODEL
    """The draft model; with `prompt_lookup` the model whose vocabulary counts: its weights are not loaded."""
    layers: Annotated[tuple[int, ...] | None, NoDecode] = None
    """Layers of the model that are kept, such as "0,1,2,29"; empty: all."""
    dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    """Type of weights and KV."""
    device: str = "cpu"
    """Where the model runs, as torch names it."""
    threads: int = Field(default=1, ge=1)
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
    min_ngram: int = Field(default=2, ge=1)
    """Prompt lookup: tokens that must agree at least."""
    max_ngram: int = Field(default=8, ge=1)
    """Prompt lookup: tokens compared at most."""
    toy_seed: int = 0
    """Toy: seed of the target's language."""
    toy_order: int = Field(default=2, ge=0)
    """Toy: tokens that the language looks back."""
    toy_sharpness: float = Field(default=2.0, ge=0)
    """Toy: standard deviation of the language's logits."""
    toy_agreement: float = Field(default=0.8, ge=0, le=1)
    """Toy: fraction of places where the draft's law is the target's."""
    toy_delay_s: float = Field(default=0.0, ge=0)
    """Toy: seconds of one pass."""
    heartbeat_ttl_s: float = Field(default=5.0, gt=0)
    """How long an announcement in the registry holds; renewed three times as often."""
    hang_s: float = Field(default=20.0, gt=0)
    """A token step that takes longer counts as hanging: sessions end, health is NOT_SERVING until it is over."""
    propose_linger_s: float = Field(default=30.0, ge=0)
    """How long the stream to a verifier stays open after its last session."""
    load_failure_linger_s: float = Field(default=30.0, ge=0)
    """How long a worker whose model cannot be loaded goes on saying why before it exits with status 1."""

    @field_validator("layers", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """Take comma-separated numbers."""
        if not isinstance(value, str):
            return value
        return tuple(int(part) for part in value.split(",")) if value.strip() else None

    @property
    def pool(self) -> int | KvBudget:
        """Size of the KV pool: blocks if they are set, else the budget."""
        return self.num_blocks or self.kv_budget

    @field_validator("kv_budget", mode="before")
    @classmethod
    def _read_budget(cls, value: object) -> object:
        """Take a size or a share as text."""
        return parse_budget(value) if isinstance(value, str) else value
