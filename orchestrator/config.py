"""Settings of an orchestrator: `OUTRIDER_ORCHESTRATOR_*` environment variables."""

import math
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import SettingsConfigDict

from orchestrator.flight.keeping import FlightSettings
from orchestrator.http.limits import HttpLimits, Markers
from orchestrator.job import Settings
from orchestrator.requests import Defaults
from orchestrator.tuning import Limits
from outrider.certificates import TlsFiles, TlsMaterial
from outrider.config import NameList, ServiceSettings
from outrider.ids import Mode
from outrider.messages import Speculation
from outrider.model.names import DEFAULT_MODEL


class OrchestratorSettings(ServiceSettings):
    """What an orchestrator can be told, beside what every service can; without `store_url` it runs its own store."""

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_ORCHESTRATOR_", frozen=True, extra="forbid")

    model: str = DEFAULT_MODEL
    """The served model; only its tokenizer is loaded. "toy": the toy model's."""
    chat_template: str = ""
    """File with a chat template, in Jinja, used instead of the model's; empty: the model's."""
    allow_chat_templates: bool = False
    """Whether clients may bring a chat template: a program, in a sandbox that bounds its time but not its memory."""
    require_keys: bool = False
    """Whether clients need an API key. If not, everybody may call, and sessions belong to whoever knows their name."""
    key_file: str = ""
    """File of records of keys, beside those in the store; only where `require_keys` is set."""
    store_keys: bool = True
    """Whether keys in the store are valid; if not, only those of `key_file`: who can write to the store makes none."""
    key_cache_s: float = Field(default=2.0, ge=0, le=60)
    """How long what is known of a key is believed; a revocation takes effect within that time."""
    key_grace_s: float = Field(default=60.0, ge=0, le=3600)
    """How long a key that was used lately is let in while the store is away."""
    flight_events: int = Field(default=256, ge=0, le=65536)
    """Last events of each generation that the flight recorder keeps in memory, about; 0: none."""
    flight_folder: str = ""
    """Folder that records of failed generations are written to, and of all on SIGUSR1; empty: none are written."""
    flight_tokens: bool = False
    """Whether records hold token ids, text and log-probabilities; if not, only how many there were."""
    flight_files: int = Field(default=200, ge=1, le=100_000)
    """Records that stay in the folder; the oldest go."""
    verify_addresses: NameList = ()
    """Verifiers, comma-separated; empty: those in the registry."""
    draft_addresses: NameList = ()
    """Draft workers, comma-separated; only beside `verify_addresses`, since otherwise the registry is asked."""
    serve_tls_cert: str = ""
    """File with the certificate that clients see; with its key it turns on TLS for clients."""
    serve_tls_key: str = ""
    """File with that certificate's key."""
    serve_tls_client_ca: str = ""
    """File with CAs; where it is named, clients need a certificate of one of them."""
    tls_verifier_name: str = ""
    """Under mutual TLS: name that verifiers' certificates must have; empty: the host of the address called."""
    tls_draft_name: str = ""
    """Under mutual TLS: name that draft workers' certificates must have; empty: the host of the address called."""
    key_place_ttl_s: float = Field(default=15.0, ge=0.5, le=600)
    """How long a generation counts against its key's limits after its orchestrator is gone."""
    max_request_bytes: int = Field(default=16 << 20, ge=1 << 16, le=64 << 20)
    """Largest message of a client, and largest answer; four characters of a prompt may take up to 16 bytes."""
    http_listen: str = ""
    """Where to serve OpenAI's API over HTTP: host:port (port 0 takes a free one) or unix:path; empty: nowhere."""
    http_markers: Markers = "auto"
    """How answers mark thoughts and calls of tools: as in the model's chat template, or fixed; none: all is content."""
    http_cors_origins: NameList = ()
    """Origins, comma-separated, whose pages browsers let call the HTTP API; "*": all of them."""
    http_max_body_bytes: int = Field(default=8 << 20, ge=1 << 10, le=64 << 20)
    """Largest body of an HTTP request."""
    http_max_head_bytes: int = Field(default=32 << 10, ge=1 << 10, le=1 << 20)
    """Largest request line and headers of an HTTP request together."""
    http_max_connections: int = Field(default=4096, ge=1)
    """HTTP connections at once; more are closed unheard."""
    http_read_timeout_s: float = Field(default=20.0, gt=0, le=3600)
    """How long the head of an HTTP request may take to arrive, and its body."""
    http_keep_alive_s: float = Field(default=75.0, ge=1, le=3600)
    """How long an HTTP connection may wait for its next request."""
    http_stall_timeout_s: float = Field(default=120.0, gt=0, le=3600)
    """How long an HTTP client may refuse to read a response, before its connection is closed."""
    max_sessions: int = Field(default=256, ge=1)
    """Generations at once."""
    max_waiting: int = Field(default=256, ge=0)
    """Generations that wait for a place; more are refused with a delay."""
    max_wait_s: float = Field(default=30.0, ge=0, le=3600)
    """Longest wait for a place; a request, or its deadline, can only shorten it."""
    default_max_tokens: int = Field(default=0, ge=0)
    """Tokens of a request that does not say; 0: as many as the context holds."""
    unseeded_mode: Literal["rejection", "block"] = "rejection"
    """How requests without a seed and above temperature 0 are verified."""
    trust_drafters: bool = True
    """Whether draft workers are believed to draw from the rows they send; if not, unseeded requests are coupled."""
    gamma: int = Field(default=4, ge=1, le=256)
    """Tokens per proposal before anything is measured."""
    window: int = Field(default_factory=lambda earlier: 2 * int(earlier["gamma"]), ge=1, le=1024)
    """Tokens a drafter may be ahead before anything is measured; at least gamma, and twice it if unset."""
    restart_gamma: int = Field(default_factory=lambda earlier: min(3, int(earlier["gamma"])), ge=1, le=256)
    """Tokens of the first proposal of a chain before anything is measured; at most gamma; 3, or gamma, if unset."""
    max_gamma: int = Field(default_factory=lambda earlier: max(16, int(earlier["gamma"])), ge=1, le=256)
    """Most tokens per proposal that the policy may choose; at least gamma, and 16 or gamma if unset."""
    pipelined: bool = True
    """Whether the policy may let a drafter run ahead of the verdicts."""
    adaptive: bool = True
    """Whether measurement changes how far is drafted."""
    speculation: bool = True
    """Whether anything is drafted; if not, all decode plain, whatever requests say."""
    max_patience_s: float = Field(default=2.0, ge=0, le=60)
    """Most time a verifier waits for a drafter, at most a minute; also that before restarts were measured."""
    min_patience_s: float = Field(default_factory=lambda earlier: min(0.1, float(earlier["max_patience_s"])), ge=0)
    """Least; at most the longest, and 0.1 or that if unset."""
    session_ttl_s: float = Field(default=86_400.0, gt=0, le=31_536_000)
    """How long a session outlives its last change."""
    lease_ttl_s: float = Field(default=10.0, gt=0, le=3600)
    """How long a session's lease holds without renewal."""
    store_deadline_s: float = Field(default=15.0, gt=0, le=3600)
    """How long the store may be away before a generation fails."""
    verifier_deadline_s: float = Field(default=15.0, gt=0, le=3600)
    """How long a running generation waits for another verifier."""
    verdict_timeout_s: float = Field(default=60.0, gt=0, le=3600)
    """Silence of a verifier with something to do, before it counts as lost; one with a queue says so every few s."""
    drafter_retry_s: float = Field(default=1.0, gt=0, le=3600)
    """Pause between two searches for a draft worker."""
    breaker_failures: int = Field(default=1, ge=1)
    """Failures in a row after which a worker is left out until it answers again."""
    placement_seed: int | None = None
    """Seed of the lots that choose workers; unset: none, so that orchestrators choose differently."""
    set_aside: bool = True
    """Whether drafters that several sessions have measured below plain decoding get no new sessions but a few tries."""
    rebalance_s: float = Field(default=1.0, ge=0, le=3600)
    """Pause between two moves of a generation from a busy draft worker to one with room; 0: none is moved."""
    hand_over_after_s: float | None = Field(default=None, ge=0)
    """When told to stop: how long generations may go on before clients are sent elsewhere; unset: half the grace."""
    generation_timeout_s: float = Field(default=3600.0, gt=0, le=604_800)
    """Most time of one generation on a worker."""
    stall_timeout_s: float = Field(default=300.0, gt=0, le=3600)
    """How long a client may leave unread what it is told, before its generation ends and has to be resumed."""
    heartbeat_ttl_s: float = Field(default=5.0, gt=0, le=600)
    """How long an announcement in the registry holds; renewed three times as often."""

    @field_validator("draft_addresses")
    @classmethod
    def _beside_verifiers(cls, draft_addresses: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        """Require verifiers' addresses too: workers come from addresses or from the registry, never from both."""
        if draft_addresses and not info.data.get("verify_addresses"):
            raise ValueError(
                "OUTRIDER_ORCHESTRATOR_VERIFY_ADDRESSES to be set too; without it all workers come from the registry"
            )
        return draft_addresses

    @field_validator("key_file")
    @classmethod
    def _beside_required(cls, key_file: str, info: ValidationInfo) -> str:
        """Require that keys are required: a file that nobody reads looks like protection."""
        if key_file and not info.data.get("require_keys"):
            raise ValueError("OUTRIDER_ORCHESTRATOR_REQUIRE_KEYS to be set too; without it no key is looked at")
        return key_file

    @field_validator("store_keys")
    @classmethod
    def _some_source(cls, store_keys: bool, info: ValidationInfo) -> bool:
        """Require that there are keys at all."""
        if not store_keys and not info.data.get("key_file"):
            raise ValueError("true, or OUTRIDER_ORCHESTRATOR_KEY_FILE to be set: there would be no key at all")
        return store_keys

    @field_validator("window", "max_gamma")
    @classmethod
    def _covers(cls, most: int, info: ValidationInfo) -> int:
        """Require that a window holds a proposal, and that the policy may choose what is begun with."""
        gamma = info.data.get("gamma", 1)
        if most < gamma:
            raise ValueError(f"at least gamma ({gamma})")
        return most

    @field_validator("restart_gamma")
    @classmethod
    def _fits(cls, restart_gamma: int, info: ValidationInfo) -> int:
        """Require that the first proposal is no longer than the others."""
        gamma = info.data.get("gamma", 256)
        if restart_gamma > gamma:
            raise ValueError(f"at most gamma ({gamma})")
        return restart_gamma

    @field_validator("min_patience_s")
    @classmethod
    def _below_most(cls, min_patience_s: float, info: ValidationInfo) -> float:
        """Require that the least patience is no longer than the longest, which would be all there ever is."""
        most_s = info.data.get("max_patience_s", min_patience_s)
        if min_patience_s > most_s:
            raise ValueError(f"at most max_patience_s ({most_s:g})")
        return min_patience_s

    @field_validator("hand_over_after_s")
    @classmethod
    def _within_grace(cls, hand_over_after_s: float | None, info: ValidationInfo) -> float | None:
        """Require that there is time left to send clients elsewhere: behind the grace they are cut off."""
        grace_s = info.data.get("grace_s", math.inf)
        if hand_over_after_s and hand_over_after_s >= grace_s:
            raise ValueError(f"0, or less than grace_s ({grace_s:g})")
        return hand_over_after_s

    def generations(self) -> Settings:
        """Return what concerns generations."""
        limits = Limits(
            Speculation(self.gamma, self.restart_gamma, self.window),
            self.max_gamma,
            self.pipelined,
            self.adaptive,
            self.min_patience_s,
            self.max_patience_s,
            self.speculation,
        )
        return Settings(
            limits,
            self.lease_ttl_s,
            self.store_deadline_s,
            self.verifier_deadline_s,
            self.verdict_timeout_s,
            self.drafter_retry_s,
            self.generation_timeout_s,
            self.stall_timeout_s,
        )

    def flights(self) -> FlightSettings:
        """Return what concerns the flight recorder."""
        return FlightSettings(self.flight_events, self.flight_folder, self.flight_tokens, self.flight_files)

    def http_limits(self) -> HttpLimits:
        """Return what HTTP clients may ask of the server itself."""
        return HttpLimits(
            self.http_max_body_bytes,
            self.http_max_head_bytes,
            self.http_max_connections,
            self.http_read_timeout_s,
            self.http_keep_alive_s,
            self.http_stall_timeout_s,
            self.http_cors_origins,
        )

    def serve_tls(self) -> TlsMaterial | None:
        """Read the files of TLS with clients; None: it is off.

        Raises:
            InvalidRequest: some of them are named and others, that they need, are not; or one cannot be used.
        """
        files = TlsFiles(self.file("serve_tls_cert"), self.file("serve_tls_key"), self.file("serve_tls_client_ca"))
        if not files.any_named:
            return None
        files.require(files.cert, files.key)
        return TlsMaterial(files)

    def defaults(self) -> Defaults:
        """Return what requests that do not say get."""
        mode = Mode.BLOCK if self.unseeded_mode == "block" else Mode.REJECTION
        return Defaults(self.default_max_tokens, mode, self.trust_drafters)
