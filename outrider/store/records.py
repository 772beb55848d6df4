"""What the store holds of a session, as frozen values."""

from dataclasses import dataclass, field
from enum import Enum

from outrider.generation import SpeculationChoice
from outrider.ids import Epoch, FinishReason, Mode, TokenClass, WorkerId
from outrider.messages import SamplingParams

NO_WORKER = WorkerId("")
"""Nobody is placed there."""


class SessionStatus(Enum):
    """Where a generation stands."""

    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class SessionState:
    """Everything another orchestrator needs, besides the log, to go on with a session."""

    model: str
    mode: Mode
    prompt_len: int
    """Tokens of the log that are the prompt of the present generation."""
    max_tokens: int
    """Most tokens to generate after the prompt."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int | None = None
    """The client's seed; None: unseeded, `key` is random."""
    key: bytes = b""
    """16 bytes that all of the session's randomness comes from; empty in greedy mode."""
    sample_index: int = 0
    num_logprobs: int = -1
    """Top log-probabilities asked for per token; -1: none at all."""
    num_prompt_logprobs: int = -1
    """Top log-probabilities asked for per token of the prompt; -1: none at all."""
    processed_logprobs: bool = False
    """Whether tokens' log-probabilities are of the distribution that was sampled from."""
    stop_strings: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    speculation: SpeculationChoice = field(default_factory=SpeculationChoice)
    """The client's own choice of how far to draft."""
    drafter_kind: str = ""
    """Kind of drafter, or label of draft workers, asked for; empty: any."""
    prediction: tuple[int, ...] = ()
    """What the client expects behind the prompt."""
    return_origin: bool = False
    """Whether the client is told where each token came from."""
    request_id: str = ""
    """The client's name for the request that began this generation; empty: it gave none."""
    skip_special_tokens: bool = True
    """Whether the text leaves special tokens out."""
    fingerprint: str = ""
    """Engine that the generation began on: a text is the same bit for bit on that one."""
    status: SessionStatus = SessionStatus.RUNNING
    finish_reason: FinishReason | None = None
    verifier_id: WorkerId = NO_WORKER
    """Placement."""
    draft_id: WorkerId = NO_WORKER
    owner: str = ""
    """Id of the API key that made the session, and alone may use it; empty: made without a key."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to write to a session, as long as nobody takes it."""

    owner: str
    """Name of one orchestrator process; must not be used again after a restart."""
    fence: int
    """Rises by one with every change of owner; goes with every write."""
    expires_s: float
    """Seconds since 1970 by the server's clock; afterwards others may take the lease without force."""


@dataclass(frozen=True, slots=True)
class LogSlice:
    """Tokens [start, end) of a log, up to its end."""

    start: int
    token_ids: tuple[int, ...]
    classes: tuple[TokenClass, ...]
    length: int
    """Length of the whole log; smaller than `start` if the slice begins past its end (and is empty)."""
    kinds: bytes = b""
    """One `TokenKind` per token, 0 where none was given; empty if none were given from `start` on."""

    @property
    def end(self) -> int:
        """Position after the last token of the slice."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class KvLocation:
    """A worker's resident KV of a session."""

    worker_id: WorkerId
    prefix_len: int
    """Tokens of the log whose KV the worker holds; 0 takes it out of the directory."""
    epoch: Epoch = field(default_factory=Epoch)
    """Epoch in which it was last written."""
    last_used_s: float = 0.0
    """Seconds since 1970 by the server's clock; set by the store."""
