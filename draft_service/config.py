"""Settings of a draft worker: `OUTRIDER_DRAFT_*` environment variables."""

from typing import Annotated

from pydantic import Field, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from outrider.drafting.shipped import feature_for
from outrider.model.names import DEFAULT_MODEL
from outrider.model.settings import ModelSettings

WITH_MODEL = ("causal_lm", "feature", "medusa", "toy")
"""Kinds of drafters that have a model."""
WITHOUT_MODEL = ("prompt_lookup", "prediction")
"""Kinds of drafters that have none."""
AUTO = "auto"
"""The best there is without another model."""


class DraftSettings(ModelSettings):
    """What a draft worker can be told, beside what every service with a model can."""

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_DRAFT_", frozen=True, extra="forbid")

    drafter: str = "causal_lm"
    """How to guess: `causal_lm` with a language model, `prompt_lookup` by looking up earlier text, `prediction` with
    what the client expects, `feature` or `medusa` with a draft that was trained on the target's hidden states (one
    layer, or heads alone), `toy` with the toy model. Several with commas between, one with a model at most: the first
    that has an offer makes it. `auto`: `prompt_lookup,feature` where a trained draft ships for the model or
    `checkpoint` names one, else `prompt_lookup`."""
    label: str = Field(default="", max_length=256)
    """Name for workers of this sort, by which clients may ask for them."""
    model: str = DEFAULT_MODEL
    """The draft model; without one, and with `feature` and `medusa`, the target: its layers are not loaded."""
    checkpoint: str = ""
    """`feature`, `medusa`: folder of the trained draft, or name of one that ships; empty: what ships for the model."""
    layers: Annotated[tuple[int, ...] | None, NoDecode] = None
    """Layers of the model that are kept, such as "0,1,2,29"; empty: all."""
    min_ngram: int = Field(default=2, ge=1)
    """Prompt lookup: tokens that must agree at least."""
    tree_nodes: int = Field(default=0, ge=0, le=63)
    """`causal_lm`, `medusa`, `toy`: most tokens of a tree of guesses, verified in one pass; 0: guesses are a chain."""
    toy_agreement: float = Field(default=0.8, ge=0, le=1)
    """Toy: fraction of places where the draft's law is the target's."""
    tls_verifier_name: str = ""
    """Under mutual TLS: name that verifiers' certificates must have; empty: the host of the address called."""
    take_hints: bool = True
    """Whether verifiers are asked to tell of an epoch's end before the orchestrator does."""
    hang_s: float = Field(default=20.0, gt=0, le=3600)
    """A token step that takes longer counts as hanging: sessions end, health is NOT_SERVING until it is over."""
    propose_linger_s: float = Field(default=30.0, ge=0, le=3600)
    """How long the stream to a verifier stays open after its last session."""
    load_failure_linger_s: float = Field(default=30.0, ge=0, le=3600)
    """How long a worker whose model cannot be loaded goes on saying why before it exits with status 1."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The drafters, in the order in which they are asked; "auto" resolved."""
        if self.drafter != AUTO:
            return tuple(self.drafter.split(","))
        trained = self.checkpoint or feature_for(self.model, self.dtype, self.device)
        return ("prompt_lookup", "feature") if trained else ("prompt_lookup",)

    @field_validator("drafter")
    @classmethod
    def _check_kinds(cls, value: str) -> str:
        """Require kinds that exist, each once, with one model at most, or "auto" alone."""
        if value == AUTO:
            return value
        kinds = value.replace(" ", "").split(",")
        unknown = [kind for kind in kinds if kind not in (*WITH_MODEL, *WITHOUT_MODEL)]
        with_model = [kind for kind in kinds if kind in WITH_MODEL]
        if unknown:
            known = ", ".join((*WITH_MODEL, *WITHOUT_MODEL))
            raise ValueError(f"{unknown[0]!r} is not one of {known}, or {AUTO} alone")
        if len(set(kinds)) < len(kinds) or len(with_model) > 1:
            raise ValueError(f"each kind at most once, and one at most of {', '.join(WITH_MODEL)}")
        return ",".join(kinds)

    @field_validator("layers", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """Take comma-separated numbers."""
        if not isinstance(value, str):
            return value
        try:
            return tuple(int(part) for part in value.split(",")) if value.strip() else None
        except ValueError:
            raise ValueError('numbers with commas between, such as "0,1,2,29"') from None
