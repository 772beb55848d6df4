"""Settings of a draft worker: `OUTRIDER_DRAFT_*` environment variables."""

from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from outrider.model.names import DEFAULT_MODEL
from outrider.model.settings import ModelSettings


class DraftSettings(ModelSettings):
    """What a draft worker can be told, beside what every service with a model can."""

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_DRAFT_", frozen=True, extra="forbid")

    drafter: Literal["causal_lm", "prompt_lookup", "feature", "medusa", "toy"] = "causal_lm"
    """How to guess: with a language model, by looking up earlier text, with a draft that was trained on the target's
    hidden states (one layer, or heads alone), or with the toy model."""
    model: str = DEFAULT_MODEL
    """The draft model; with `prompt_lookup`, `feature` and `medusa` the target: its layers are not loaded."""
    checkpoint: str = ""
    """`feature`, `medusa`: folder of the trained draft, or name of one that ships; empty: what ships for the model."""
    layers: Annotated[tuple[int, ...] | None, NoDecode] = None
    """Layers of the model that are kept, such as "0,1,2,29"; empty: all."""
    min_ngram: int = Field(default=2, ge=1)
    """Prompt lookup: tokens that must agree at least."""
    toy_agreement: float = Field(default=0.8, ge=0, le=1)
    """Toy: fraction of places where the draft's law is the target's."""
    tls_verifier_name: str = ""
    """Under mutual TLS: name that verifiers' certificates must have; empty: the host of the address called."""
    take_hints: bool = True
    """Whether verifiers are asked to tell of an epoch's end before the orchestrator does."""
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
