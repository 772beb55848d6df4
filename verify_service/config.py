"""Settings of a verifier: `OUTRIDER_VERIFY_*` environment variables."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from outrider.config import NameList
from outrider.model.settings import ModelSettings
from outrider.rpc import MAX_MESSAGE_BYTES

TOY = "toy"
"""Model name of the exact toy model, which needs no weights."""


class VerifySettings(ModelSettings):
    """What a verifier can be told, beside what every service with a model can."""

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_VERIFY_", frozen=True, extra="forbid")

    max_waiting: int = Field(default=256, ge=0)
    """Sessions that wait for a place; one more is refused."""
    retry_delay_s: float = Field(default=1.0, ge=0)
    """What a refused caller is told to wait."""
    body_limit_s: float = Field(default=30.0, gt=0)
    """Longest wait for a proposal that was announced; running out voids rejection mode's guarantee, and is counted."""
    max_message_bytes: int = Field(default=MAX_MESSAGE_BYTES, ge=1 << 16)
    """Largest message that is sent or taken; a larger one ends the stream it came on."""
    tls_draft_workers: NameList = ("draft", "draft.*", "draft-*")
    """Under mutual TLS: names of certificates, comma-separated, "*" for any characters, that may propose."""
    certified_worker_ids: bool = False
    """Under mutual TLS: whether a draft worker's id has to be a name in its certificate, so that each has its own."""
    send_hints: bool = True
    """Whether draft workers that want it are told of an epoch's end before the orchestrator's commit."""
