"""What the services say to each other, as frozen values.

`outrider.codec` turns them into protobuf and back; nothing here knows about the wire. All positions are absolute
(`outrider.ids`).
"""

from dataclasses import dataclass, field
from enum import StrEnum

from outrider.ids import Epoch, Generation, Mode, SessionId, TokenClass, TokenKind, WorkerId

COUNT_TOTAL = 1 << 16
"""The integer counts of a draft row sum to this."""


@dataclass(frozen=True, slots=True)
class SparseRow:
    """A draft distribution on the wire: probability of `token_ids[i]` is `counts[i] / 2**16`, of all others 0."""

    token_ids: tuple[int, ...]
    """Distinct ids, at most 128."""
    counts: tuple[int, ...]
    """Positive, the sum is `COUNT_TOTAL`."""


class GrammarKind(StrEnum):
    """In which language a grammar is written."""

    JSON_SCHEMA = "json_schema"
    """The text is a JSON schema; `{"type": "object"}` is any JSON object."""
    REGEX = "regex"
    LARK = "lark"
    """Lark's dialect of EBNF, from the rule `start`."""
    CHOICES = "choices"
    """The text is a JSON list of strings, one of which is the output."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the whole output must match."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the target's logits become the distribution that is sampled from.

    Fields are in the order of use, except that what bans tokens by their ids, by length or by grammar comes first.
    """

    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, bias added to its logit); -100 or less bans the token."""
    repetition_penalty: float = 1.0
    """> 0; tokens already in prompt or output: logit divided by it if positive, multiplied if negative."""
    presence_penalty: float = 0.0
    """-2 .. 2; subtracted once for every token already in the output."""
    frequency_penalty: float = 0.0
    """-2 .. 2; subtracted per earlier occurrence in the output."""
    temperature: float = 1.0
    """>= 0; 0 is greedy."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """(0, 1]; keep the smallest set of likeliest tokens that reaches this mass."""
    min_p: float = 0.0
    """[0, 1]; keep tokens at least this fraction as likely as the likeliest."""
    allowed_token_ids: tuple[int, ...] = ()
    """All other tokens are banned; empty allows every token. At most 32768, distinct."""
    min_tokens: int = 0
    """Ids of `end_token_ids` are banned until the output has so many tokens."""
    grammar: Grammar | None = None
    """Tokens that cannot continue the output so that it matches are banned; where it is complete, an end is allowed."""
    end_token_ids: tuple[int, ...] = ()
    """Ids that end the output, set by the orchestrator and by no client: what `min_tokens` bans."""
    grammar_end_ids: tuple[int, ...] = ()
    """End-of-sequence ids, set by the orchestrator and by no client: what follows a complete output of a grammar."""

    @property
    def uses_penalties(self) -> bool:
        """Whether a row depends on which tokens came before it."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def uses_history(self) -> bool:
        """Whether a row depends on the tokens before it other than through the model."""
        return self.uses_penalties or self.min_tokens > 0 or self.grammar is not None

    @property
    def keeps_likeliest(self) -> bool:
        """Whether the likeliest token of a row is that of the model's own logits."""
        return not (self.uses_history or self.logit_bias or self.allowed_token_ids)


@dataclass(frozen=True, slots=True)
class Speculation:
    """How far a drafter may run; sent with every commit. All zero switches speculation off."""

    gamma: int = 0
    """Tokens per proposal."""
    restart_gamma: int = 0
    """Tokens of the first proposal of an epoch; 1 .. gamma."""
    window: int = 0
    """Most tokens the chain may be ahead of the committed length; >= gamma. Equal to gamma: sequential rounds."""
    ahead: bool = False
    """Whether the verifier computes the row behind a rollback without waiting for what is to be tested on it."""

    @property
    def enabled(self) -> bool:
        """Whether anything may be drafted at all."""
        return self.window > 0


# --- draft worker -> verifier (Propose) ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProposalHeader:
    """Announces a proposal before its first token is drawn (modes that need rows)."""

    session_id: SessionId
    epoch: Epoch
    base_len: int
    count: int
    depth: int = 0
    """Of a tree that will follow; 0: a run will."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A run of the chain: transport only, its borders mean nothing except to the block rule.

    Or a tree, which ends the chain.
    """

    session_id: SessionId
    epoch: Epoch
    base_len: int
    """Absolute position of the first token."""
    seen_len: int
    """Committed length the drafter had been told when it sent this."""
    limit: int
    """Position the chain may reach without another commit: seen_len + window."""
    token_ids: tuple[int, ...]
    rows: tuple[SparseRow, ...] = ()
    """In modes that need them, else empty: one per token, or, of a tree, one per family, by their first children."""
    parents: tuple[int, ...] = ()
    """Of a tree: index of each token's parent, which comes before it, or -1; siblings in the order drawn."""


@dataclass(frozen=True, slots=True)
class Pass:
    """The drafter proposes nothing before `until_len`; decided before any draw."""

    session_id: SessionId
    epoch: Epoch
    base_len: int
    until_len: int


ProposeMessage = ProposalHeader | Proposal | Pass


@dataclass(frozen=True, slots=True)
class ProposeHello:
    """A draft worker introduces itself: the first message of its Propose stream."""

    worker_id: WorkerId
    vocabulary: "Vocabulary"
    feature_layers: tuple[int, ...] = ()
    """Target layers whose hidden states it wants back; -1 is the last, after its final norm."""
    takes_hints: bool = False
    """Whether it wants to hear of the end of an epoch before the orchestrator's commit."""


ProposeRequestMessage = ProposeHello | ProposeMessage


# --- verifier -> draft worker (Propose) ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProposeWelcome:
    """The verifier accepts a draft worker: the first message of the way back."""

    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class Tensor:
    """A dense array on the wire, row-major."""

    dtype: str
    """"float32", "float16", "bfloat16" or "int32"."""
    shape: tuple[int, ...]
    data: bytes
    """Little-endian elements without padding."""


@dataclass(frozen=True, slots=True)
class TargetFeatures:
    """The target's hidden states of committed positions."""

    session_id: SessionId
    epoch: Epoch
    position: int
    """Absolute position of the first row."""
    features: Tensor
    """[layers, positions, hidden]."""


@dataclass(frozen=True, slots=True)
class RollbackHint:
    """Sent before the authoritative commit: `token_id` was committed at `start`, `epoch` begins behind it."""

    session_id: SessionId
    epoch: Epoch
    start: int
    token_id: int | None = None
    """None: the chain was reset, and drafting restarts at `start`."""


@dataclass(frozen=True, slots=True)
class Draining:
    """The sender is stopping; running sessions go on until its grace is over."""

    reason: str = ""


ProposeResponseMessage = ProposeWelcome | TargetFeatures | RollbackHint | Draining


# --- verifier -> orchestrator (Decode) ----------------------------------------------------------------------------


class VerdictCause:
    """Why a verdict was sent (plain constants: they label metrics and transcripts)."""

    ATTACHED = "attached"
    TESTED = "tested"
    PLAIN = "plain"
    PATIENCE = "patience"
    RESET = "reset"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities of one token: under the model itself, or of what was sampled from if that was asked."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), likeliest first."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the verifier commits: tokens [start, start + len(token_ids)); zero tokens report an epoch change."""

    session_id: SessionId
    epoch: Epoch
    """Epoch of the tokens that were tested."""
    start: int
    token_ids: tuple[int, ...]
    kinds: tuple[TokenKind, ...]
    num_accepted: int
    num_tested: int
    """Tests made; stops at the first rejection. 0 for plain tokens."""
    next_epoch: Epoch
    """Epoch from which the drafter goes on: `epoch` unless a token of the verifier's own or a reset ended it."""
    cause: str = VerdictCause.TESTED
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token when asked for, else empty."""
    verify_s: float = 0.0
    """Seconds of model time of the pass."""
    queue_s: float = 0.0
    """Seconds the oldest tested proposal waited for the pass."""
    num_rows: int = 0
    """Rows of the pass, all sessions, before padding."""
    guarantee_void: int = 0
    """Times so far that announced tokens went untested by the drafter's doing (rejection modes)."""
    num_stale: int = 0
    """Proposals so far, on this stream, that came too late to be tested."""
    num_sessions: int = 0
    """Sessions that shared the pass; 0: it is not known."""
    from_ahead: bool = False
    """Whether the figures are those of a pass that had begun before what was tested arrived."""
    num_cached: int = 0
    """Tokens the stream opened with whose KV was found instead of computed; 0 in a verdict without tokens."""

    @property
    def end(self) -> int:
        """Committed length after this verdict."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Preparing:
    """The session waits for a place, or its KV is being computed; said every few seconds for as long as that lasts."""


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of the prompt under the model itself; sent in parts, before the first verdict with tokens."""

    start: int
    """Absolute position of the first token, >= 1: the one at position 0 follows nothing, and has none."""
    logprobs: tuple[TokenLogprobs, ...]
    """Of the tokens from there on; the last part ends at the prompt's end. Empty only for a prompt of one token."""


DecodeResponseMessage = Verdict | Draining | Preparing | PromptScores


# --- orchestrator -> verifier (Decode) ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DecodeOpen:
    """Opens a session on a verifier with the ids of its log."""

    session_id: SessionId
    generation: Generation
    token_ids: tuple[int, ...]
    classes: tuple[TokenClass, ...]
    mode: Mode
    sampling: SamplingParams
    key: bytes
    """16 bytes: the session's random key, or the seed's key in coupled mode. Empty in greedy mode."""
    sample_index: int = 0
    prompt_len: int = 0
    """Length of the prompt: penalties count output tokens after it."""
    num_logprobs: int = -1
    """Top log-probabilities per token; -1 sends none at all."""
    num_prompt_logprobs: int = -1
    """Top log-probabilities per token of the prompt; -1 sends none at all."""
    processed_logprobs: bool = False
    """Whether tokens' log-probabilities are of the distribution that was sampled from, not the model's own."""
    commit_limit: int = 0
    speculation: Speculation = Speculation()
    patience_s: float = 1.0
    worker_id: WorkerId = WorkerId("")
    """The drafter of `generation`, opened at the same time with the same tokens; empty: nobody drafts."""


@dataclass(frozen=True, slots=True)
class DecodeAttach:
    """Names the one drafter of a later generation; answered by a zero-token verdict, with which it is opened."""

    generation: Generation
    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class DecodeProgress:
    """How far the verifier may commit and how it should wait."""

    generation: Generation
    logged_len: int
    commit_limit: int
    speculation: Speculation
    patience_s: float


@dataclass(frozen=True, slots=True)
class DecodeClose:
    """The generation is over; KV may stay for the session's next turn."""

    keep_kv: bool = True


DecodeRequestMessage = DecodeOpen | DecodeAttach | DecodeProgress | DecodeClose


# --- orchestrator -> draft worker (Draft) -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DraftOpen:
    """Opens a session on a draft worker; it connects to the verifier by itself."""

    session_id: SessionId
    epoch: Epoch
    token_ids: tuple[int, ...]
    mode: Mode
    sampling: SamplingParams
    draft_key: bytes
    """16 bytes: the session's draft key in rejection modes, the field key in coupled mode. Empty in greedy mode."""
    speculation: Speculation
    verifier_id: WorkerId
    verifier_address: str
    sample_index: int = 0
    prompt_len: int = 0
    max_len: int = 0
    """Nothing is proposed at or beyond this position."""
    prediction: tuple[int, ...] = ()
    """What the client expects behind the prompt."""
    drafter: str = ""
    """Kind that alone may draft, where a worker offers several; empty: the worker's own rule."""


@dataclass(frozen=True, slots=True)
class DraftCommit:
    """Tokens [start, start + len) are committed; the chain goes on, or restarts at their end if `epoch` is newer."""

    epoch: Epoch
    start: int
    token_ids: tuple[int, ...]
    speculation: Speculation

    @property
    def end(self) -> int:
        """Committed length after this commit."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class DraftClose:
    """The session is over, or has another drafter now."""

    keep_kv: bool = True


DraftRequestMessage = DraftOpen | DraftCommit | DraftClose


# --- draft worker -> orchestrator (Draft) -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DraftStatus:
    """What the drafter measured; sent once when it is ready and then at intervals."""

    ready: bool = True
    draft_s_per_token: float = 0.0
    num_drafted: int = 0
    num_discarded: int = 0
    drafter: str = ""
    """Kind; where a worker offers several, of the one that drafted last."""
    missing_from: int = -1
    """>= 0: a commit was missed; send the tokens from this position again."""


DraftResponseMessage = DraftStatus | Draining


# --- descriptions ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What two workers must share to be paired."""

    fingerprint: str
    """Hex SHA-256 over the token -> id map."""
    size: int
    """Length of the tokenizer's id range; ids at or past it are padding and never emitted."""


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """What a worker says of itself, in `Describe` and in the registry."""

    worker_id: WorkerId
    role: str
    """"verify", "draft" or "orchestrate"."""
    address: str
    """host:port or unix:path."""
    model: str
    vocabulary: Vocabulary
    context_len: int
    """Most tokens of a session, prompt included."""
    dtype: str = ""
    drafter: str = ""
    """Kind of drafter; empty on verifiers."""
    exactness: str = "bitwise"
    """"bitwise" or "distribution"."""
    fingerprint: str = ""
    """Engine fingerprint: instruction set or GPU, torch, row classes."""
    capacity: int = 0
    """Sessions it serves at once."""
    load: int = 0
    """Sessions it serves now."""
    draining: bool = False
    attributes: dict[str, str] = field(default_factory=dict)
    label: str = ""
    """Name that operators give to workers of one sort."""
    drafters: tuple[str, ...] = ()
    """Kinds of drafters that are offered one by one; empty: `drafter` alone."""

    def offers(self, drafter: str) -> bool:
        """Whether a draft worker is, or has, the drafter of that kind or label; an empty one is any."""
        return drafter in ("", self.drafter, self.label, *self.drafters)
