"""What is fixed about one generation when it starts, and what an operator sets about all of them."""

from dataclasses import dataclass, field

from orchestrator.flight.keeping import Flights
from orchestrator.lately import Lately
from orchestrator.metrics import Metrics
from orchestrator.pass_costs import CostsByVerifier
from orchestrator.placement import Placement
from orchestrator.tuning import Limits
from outrider.generation import GenerationEvent
from outrider.ids import Generation, Mode, SessionId, TokenClass
from outrider.messages import DraftStatus, WorkerDescription
from outrider.noise import Purpose, derive_key
from outrider.store.records import SessionState
from outrider.store.sessions import SessionStore
from outrider.tracing import Tracer

OFF_BY_CHOICE = ("requested", "max_tokens", "configured")
"""Reasons to have no drafter that no search changes."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What an operator sets about generations."""

    limits: Limits = field(default_factory=Limits)
    lease_ttl_s: float = 10.0
    store_deadline_s: float = 15.0
    """How long the store may be away before a generation fails."""
    verifier_deadline_s: float = 15.0
    """How long a generation waits for a verifier."""
    verdict_timeout_s: float = 60.0
    """Silence of a verifier that has something to do, before it counts as lost."""
    drafter_retry_s: float = 1.0
    """Pause between two searches for a draft worker."""
    generation_timeout_s: float = 3600.0
    """Deadline of a worker's stream."""
    stall_timeout_s: float = 300.0
    """How long a client may leave unread what it is told; then it has to resume."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What all generations of a process share."""

    store: SessionStore
    placement: Placement
    metrics: Metrics
    settings: Settings
    pass_costs: CostsByVerifier = field(default_factory=CostsByVerifier)
    lately: Lately = field(default_factory=Lately)
    flights: Flights = field(default_factory=Flights)
    tracer: Tracer | None = None
    """Where spans go; None: nothing is traced."""


@dataclass(frozen=True, slots=True)
class Job:
    """One generation, placed and in the log."""

    session_id: SessionId
    fence: int
    owner: str
    """Name that the lease is held under."""
    state: SessionState
    token_ids: tuple[int, ...]
    """The log."""
    classes: tuple[TokenClass, ...]
    kinds: bytes
    verifier: WorkerDescription
    drafter: WorkerDescription | None
    off_reason: str = ""
    """Why there is no drafter."""
    next_position: int = 0
    """The client has everything before this."""
    greeting: tuple[GenerationEvent, ...] = ()
    """What the client is told before anything happens."""
    started_s: float = 0.0
    """When the request arrived, on the monotonic clock."""

    @property
    def final_len(self) -> int:
        """Position the generation may not pass."""
        return self.state.prompt_len + self.state.max_tokens

    @property
    def draft_key(self) -> bytes:
        """What a draft worker may know of the session's randomness: its own stream, or the coupled noise field."""
        match self.state.mode:
            case Mode.GREEDY:
                return b""
            case Mode.COUPLED:
                return derive_key(self.state.key, Purpose.FIELD)
            case Mode.REJECTION | Mode.BLOCK:
                return derive_key(self.state.key, Purpose.DRAFT)


@dataclass(frozen=True, slots=True)
class Drained:
    """The verifier whose stream was opened in that generation is stopping."""

    opened: Generation


@dataclass(frozen=True, slots=True)
class Reported:
    """The draft worker of that generation reported."""

    generation: Generation
    status: DraftStatus
