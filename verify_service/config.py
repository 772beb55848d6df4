"""Settings of a verifier: `OUTRIDER_VERIFY_*` environment variables."""

from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from outrider.config import NameList
from outrider.model.memory import KvBudget, parse_budget
from outrider.model.settings import ModelSettings
from outrider.rpc import MAX_MESSAGE_BYTES
from outrider.tier.tier import TierSettings


class VerifySettings(ModelSettings):
    """What a verifier can be told, beside what every service with a model can."""

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_VERIFY_", frozen=True, extra="forbid")

    tensor_parallel: int = Field(default=1, ge=1, le=64)
    """Processes that share the model, each with its part of every layer: what `torchrun --nproc-per-node` starts."""
    rank_timeout_s: float = Field(default=60.0, ge=1, le=3600)
    """Longest that one of them waits for the others inside a pass, and at the start."""
    max_waiting: int = Field(default=256, ge=0)
    """Sessions that wait for a place; one more is refused."""
    retry_delay_s: float = Field(default=1.0, ge=0, le=3600)
    """What a refused caller is told to wait."""
    body_limit_s: float = Field(default=30.0, gt=0, le=3600)
    """Longest wait for a proposal that was announced; running out voids rejection mode's guarantee, and is counted."""
    sign_of_life_s: float = Field(default=5.0, gt=0, le=3600)
    """How often a session that waits for a place or its KV is told so; far below orchestrators' verdict time-out."""
    max_message_bytes: int = Field(default=MAX_MESSAGE_BYTES, ge=1 << 16, le=1 << 30)
    """Largest message that is sent or taken; a larger one ends the stream it came on."""
    tls_draft_workers: NameList = ("draft", "draft.*", "draft-*")
    """Under mutual TLS: names of certificates, comma-separated, "*" for any characters, that may propose."""
    certified_worker_ids: bool = False
    """Under mutual TLS: whether a draft worker's id has to be a name in its certificate, so that each has its own."""
    send_hints: bool = True
    """Whether draft workers that want it are told of an epoch's end before the orchestrator's commit."""
    audit_share: float = Field(default=0.01, ge=0, le=1)
    """Share of finished greedy and seeded sessions that are decoded again in idle time, to check the text; 0: none."""
    audit_max_tokens: int = Field(default=512, ge=2, le=65536)
    """Positions of such a session, prompt included, that are checked; it bounds what one check costs."""
    kv_tier_url: str = ""
    """redis://, rediss:// or unix:// URL of a server that stores blocks of KV, best one of its own; empty: none.

    With rediss:// the store's files are used, unless the URL names some itself.
    """
    kv_tier_ttl_s: float = Field(default=3600.0, ge=1, le=31_536_000)
    """How long a stored block stays after it was last of use."""
    kv_tier_budget: Annotated[KvBudget, NoDecode] = KvBudget(num_bytes=1 << 30)
    """Most bytes of stored blocks of one model on one kind of engine, such as "4GiB"."""
    kv_tier_in_flight: Annotated[KvBudget, NoDecode] = KvBudget(num_bytes=64 << 20)
    """Most bytes that wait in memory to be stored, and as many that were loaded and wait to be used."""
    kv_tier_deadline_s: float = Field(default=1.0, gt=0, le=60)
    """Longest wait for stored blocks before they are computed instead, and for the next bytes of the server."""

    @field_validator("kv_tier_budget", "kv_tier_in_flight", mode="before")
    @classmethod
    def _read_size(cls, value: object) -> object:
        """Take a size as text."""
        size = parse_budget(value) if isinstance(value, str) else value
        if isinstance(size, KvBudget) and not size.num_bytes:
            raise ValueError('a size such as "2GiB", not a share')
        return size

    @field_validator("kv_tier_url")
    @classmethod
    def _check_tier(cls, value: str, info: ValidationInfo) -> str:
        """Take what a single server's URL begins with; stored blocks reach a session through the reuse of prefixes."""
        if value and not value.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("a URL that begins with redis://, rediss:// or unix://")
        if value and not info.data.get("prefix_reuse", True):
            raise ValueError("nothing where prefix_reuse is off")
        if value and info.data.get("tensor_parallel", 1) > 1:
            raise ValueError("nothing where tensor_parallel is more than 1: each process has a part of every block")
        return value

    @property
    def tier(self) -> TierSettings:
        """What the tier is told.

        Raises:
            InvalidRequest: a file of TLS cannot be used.
        """
        own_files = "ssl_" in self.kv_tier_url.partition("?")[2]
        with_tls = self.kv_tier_url.startswith("rediss://") and not own_files
        return TierSettings(
            url=self.kv_tier_url,
            ttl_s=self.kv_tier_ttl_s,
            budget_bytes=self.kv_tier_budget.num_bytes,
            in_flight_bytes=self.kv_tier_in_flight.num_bytes,
            deadline_s=self.kv_tier_deadline_s,
            tls=self.store_tls() if with_tls else None,
        )
