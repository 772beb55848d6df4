"""What clients ask and what they are told, as frozen values.

`outrider.codec.generation` turns them into protobuf and back, and any other front door builds the same values. Nothing
here knows about the wire. A decoded `GenerationRequest` has passed all checks that need no model: ids against a
vocabulary and lengths against a context are the orchestrator's to check.
"""

from dataclasses import dataclass

from outrider.ids import FinishReason, Mode, SessionId, TokenKind
from outrider.messages import SamplingParams, TokenLogprobs, Vocabulary


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text to continue."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids to continue, taken as they are."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that the assistant made."""

    name: str
    """Of the function."""
    arguments: str = ""
    """A JSON object as text; empty: one without members."""
    id: str = ""
    """The call's own name, to which a message of the tool answers."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation."""

    role: str
    """"system", "developer", "user", "assistant" or "tool"."""
    content: str = ""
    """Empty beside tool calls: nothing was said, and the template sees no content."""
    name: str = ""
    """Of the speaker, or of the tool that answers; empty: none."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Only of an assistant."""
    tool_call_id: str = ""
    """The call that this message answers; only of a tool."""
    reasoning: str = ""
    """What the assistant thought before it spoke."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation to answer; the model's chat template turns it into tokens."""

    messages: tuple[ChatMessage, ...]
    tools: str = ""
    """Tools that may be called: a JSON array of definitions as text; empty: none."""
    template_arguments: str = ""
    """Further variables of the template: a JSON object as text; empty: none."""
    add_generation_prompt: bool | None = None
    """Whether the template ends with the beginning of an answer; None: unless the last message is continued."""
    continue_final_message: bool = False
    """Whether the last message is left open and continued."""
    chat_template: str = ""
    """Instead of the model's, where the server allows it; empty: the model's."""
    parse_special_tokens: bool = False
    """Whether special tokens written in messages, tools or arguments are taken as such, instead of as plain text."""


@dataclass(frozen=True, slots=True)
class TextPrediction:
    """An expected answer as text."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrediction:
    """An expected answer as token ids."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SpeculationChoice:
    """A client's own choice of how far to draft; None leaves a figure to measurement."""

    off: bool = False
    """Decode without drafts; excludes the other fields."""
    gamma: int | None = None
    restart_gamma: int | None = None
    window: int | None = None
    """Needs gamma, and is at least that."""
    max_gamma: int | None = None
    """Most tokens per proposal where gamma is left to measurement; excludes gamma."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A checked request for a continuation."""

    prompt: TextPrompt | TokenPrompt | ChatPrompt
    model: str = ""
    """Empty: the server's default."""
    session_id: SessionId = SessionId("")
    """Empty: a new session."""
    max_tokens: int | None = None
    """None: the server's default, or what the context holds. 0 needs `num_prompt_logprobs`: nothing is generated."""
    sampling: SamplingParams = SamplingParams()
    seed: int | None = None
    """0 .. 2^64 - 1; None: a fresh random key."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    mode: Mode | None = None
    """None: AUTO."""
    speculation: SpeculationChoice = SpeculationChoice()
    drafter: str = ""
    """Kind of drafter, or label of draft workers; empty: any."""
    num_logprobs: int | None = None
    """Top log-probabilities per token; None: none at all."""
    num_prompt_logprobs: int | None = None
    """Top log-probabilities per token of the prompt; None: none at all."""
    processed_logprobs: bool = False
    """Whether log-probabilities of generated tokens are of what was sampled from, not the model's own."""
    return_token_origin: bool = False
    sample_index: int = 0
    request_id: str = ""
    """The client's name for this request, by which a repeat of it is known; empty: none."""
    prediction: TextPrediction | TokenPrediction | None = None
    """What the answer is expected to be; excludes `speculation.off`."""
    priority: int = 0
    """Who goes first where places are scarce, -8 .. 8; higher first."""
    max_wait_s: float | None = None
    """Longest wait for a place; None: the server's."""
    skip_special_tokens: bool = True
    """Whether the text leaves special tokens out."""


@dataclass(frozen=True, slots=True)
class ResumeFrom:
    """Go on with a generation from the first token the client has not seen."""

    session_id: SessionId
    next_position: int


# --- events -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """The generation began; always the first event."""

    session_id: SessionId
    prompt_len: int
    """Position of the first generated token."""
    mode: Mode
    exactness: str = "bitwise"
    """"bitwise" or "distribution"."""
    model: str = ""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of committed tokens, and the text that became certain with it."""

    start: int
    token_ids: tuple[int, ...]
    text: str
    kinds: tuple[TokenKind, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of the whole prompt under the model itself; told in parts, before the first chunk.

    Earlier turns are included. A resumed stream tells them again, unless its generation is over.
    """

    start: int
    """Absolute position of the first token; the first part's is 0, the next one's where the last one ended."""
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...]
    """One per token; None for the one at position 0, which follows nothing."""


@dataclass(frozen=True, slots=True)
class Notice:
    """The generation is degraded, and goes on: slower, never wrong."""

    reason: str
    """A stable label."""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """What was consumed, in tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Figures:
    """How the generation went; counts cover this generation only."""

    num_rounds: int = 0
    num_rollbacks: int = 0
    num_drafted: int = 0
    num_tested: int = 0
    num_accepted: int = 0
    tested_per_position: tuple[int, ...] = ()
    """Tests at each distance from the start of an epoch, nearest first."""
    accepted_per_position: tuple[int, ...] = ()
    """Acceptances at each distance; as long as tested_per_position."""
    num_stale: int = 0
    num_plain: int = 0
    num_recovered: int = 0
    num_bonus: int = 0
    tokens_per_second: float = 0.0
    tokens_per_round: float = 0.0
    draft_s: float = 0.0
    network_s: float = 0.0
    queue_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0
    time_to_first_token_s: float = 0.0
    total_s: float = 0.0
    speculation_off: str = ""
    """Why speculation was off at the end, a stable label; empty: it was on."""
    guarantee_void: int = 0
    engine_fingerprint: str = ""
    drafter: str = ""
    accepted_prediction_tokens: int = 0
    """Tokens of the client's prediction that appear in the answer."""
    rejected_prediction_tokens: int = 0
    """Tokens of the client's prediction that do not."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The generation ended; always the last event."""

    reason: FinishReason
    matched: str = ""
    """The stop string, or the stop id as a number, that ended it; else empty."""
    usage: Usage = Usage()
    figures: Figures = Figures()


GenerationEvent = Started | PromptLogprobs | Chunk | Notice | Finished


# --- what the other calls return ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """What is stored about a session."""

    session_id: SessionId
    model: str
    running: bool
    """Whether a generation is under way, or was interrupted and can be resumed."""
    length: int
    prompt_len: int
    mode: Mode
    token_ids: tuple[int, ...] = ()
    updated_at_s: float = 0.0
    """Seconds since the epoch of Unix time."""


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A model that can be asked for."""

    model: str
    vocabulary: Vocabulary
    context_len: int
    num_verifiers: int = 0
    drafters: tuple[str, ...] = ()
    is_default: bool = False
