"""Codec of `types.proto`: what several services say."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from outrider.codec.checks import MAX_DRAFTERS, MAX_GAMMA, MAX_LOGPROBS, MAX_TEXT_CHARS, MAX_WINDOW, PEER, Checks
from outrider.codec.constraints import bans_from_proto, grammar_to_proto
from outrider.ids import Epoch, Generation, Mode, TokenKind, WorkerId
from outrider.messages import (
    COUNT_TOTAL,
    Draining,
    SamplingParams,
    SparseRow,
    Speculation,
    Tensor,
    TokenLogprobs,
    Vocabulary,
    WorkerDescription,
)
from outrider.parameters import BIAS, RANGES, allowed_bias
from outrider.v1 import types_pb2 as pb

MAX_ROW_TOKENS = 128
"""Most tokens listed in a draft row."""
MAX_LOGIT_BIAS = 4096
"""Most biased tokens of a request."""
MAX_TENSOR_AXES = 8
MAX_ATTRIBUTES = 64
"""Most attributes of a worker's description."""
KEY_BYTES = 16

_FloatField = Literal["repetition_penalty", "presence_penalty", "frequency_penalty", "temperature", "top_p", "min_p"]

_ROLES = {
    "verify": pb.WORKER_ROLE_VERIFY,
    "draft": pb.WORKER_ROLE_DRAFT,
    "orchestrate": pb.WORKER_ROLE_ORCHESTRATE,
}
_GUARANTEES = {"bitwise": pb.GUARANTEE_BITWISE, "distribution": pb.GUARANTEE_DISTRIBUTION}
_DTYPES = {
    "float32": (pb.D_TYPE_FLOAT32, 4),
    "float16": (pb.D_TYPE_FLOAT16, 2),
    "bfloat16": (pb.D_TYPE_BFLOAT16, 2),
    "int32": (pb.D_TYPE_INT32, 4),
}
_ROLE_NAMES = {number: name for name, number in _ROLES.items()}
_GUARANTEE_NAMES = {number: name for name, number in _GUARANTEES.items()}
_DTYPE_NAMES = {number: name for name, (number, _) in _DTYPES.items()}


# --- generations, epochs, modes -----------------------------------------------------------------------------------


def generation_to_proto(generation: Generation) -> pb.Generation:
    """Encode a generation."""
    return pb.Generation(fence=generation.fence, attach=generation.attach)


def generation_from_proto(message: pb.Generation) -> Generation:
    """Decode a generation; every value is legal."""
    return Generation(message.fence, message.attach)


def epoch_to_proto(epoch: Epoch) -> pb.Epoch:
    """Encode an epoch."""
    return pb.Epoch(generation=generation_to_proto(epoch.generation), round=epoch.round)


def epoch_from_proto(message: pb.Epoch) -> Epoch:
    """Decode an epoch; every value is legal."""
    return Epoch(generation_from_proto(message.generation), message.round)


def mode_to_proto(mode: Mode) -> pb.Mode.ValueType:
    """Encode a mode."""
    return pb.Mode.ValueType(mode.value)


def key_from_proto(field: str, key: bytes, mode: Mode) -> bytes:
    """Return a peer's key if its length fits the mode: none in greedy mode, 16 bytes elsewhere."""
    size = 0 if mode is Mode.GREEDY else KEY_BYTES
    PEER.require(len(key) == size, field, f"{len(key)} bytes", f"{size} bytes in mode {mode.name}")
    return key


def kinds_to_proto(kinds: Sequence[TokenKind]) -> list[pb.TokenKind.ValueType]:
    """Encode token kinds."""
    return [pb.TokenKind.ValueType(kind) for kind in kinds]


def kinds_from_proto(field: str, values: Sequence[int], checks: Checks) -> tuple[TokenKind, ...]:
    """Decode token kinds."""
    return tuple(checks.enum(field, value, TokenKind) for value in values)


def guarantee_to_proto(exactness: str) -> pb.Guarantee.ValueType:
    """Encode "bitwise" or "distribution"."""
    return _GUARANTEES[exactness]


def guarantee_from_proto(field: str, value: pb.Guarantee.ValueType) -> str:
    """Decode a peer's guarantee."""
    PEER.require(value in _GUARANTEE_NAMES, field, value, "a specified guarantee")
    return _GUARANTEE_NAMES[value]


# --- sampling and speculation -------------------------------------------------------------------------------------


def sampling_to_proto(sampling: SamplingParams) -> pb.SamplingParams:
    """Encode sampling parameters, every field explicitly."""
    return pb.SamplingParams(
        logit_bias=[pb.LogitBias(token_id=token_id, bias=bias) for token_id, bias in sampling.logit_bias],
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        allowed_token_ids=sampling.allowed_token_ids,
        min_tokens=sampling.min_tokens,
        grammar=None if sampling.grammar is None else grammar_to_proto(sampling.grammar),
        end_token_ids=sampling.end_token_ids,
        grammar_end_ids=sampling.grammar_end_ids,
    )


def sampling_from_proto(message: pb.SamplingParams, checks: Checks) -> SamplingParams:
    """Decode and check sampling parameters; fields not set take their defaults."""
    default = SamplingParams()

    def number(name: _FloatField) -> float:
        value: float = getattr(message if message.HasField(name) else default, name)
        checks.require(RANGES[name].holds(value), f"sampling.{name}", value, RANGES[name].allowed)
        return value

    checks.require(RANGES["top_k"].holds(message.top_k), "sampling.top_k", message.top_k, RANGES["top_k"].allowed)
    return SamplingParams(
        **bans_from_proto(message, checks),
        logit_bias=_logit_bias(message.logit_bias, checks),
        repetition_penalty=number("repetition_penalty"),
        presence_penalty=number("presence_penalty"),
        frequency_penalty=number("frequency_penalty"),
        temperature=number("temperature"),
        top_k=message.top_k,
        top_p=number("top_p"),
        min_p=number("min_p"),
    )


def _logit_bias(entries: Sequence[pb.LogitBias], checks: Checks) -> tuple[tuple[int, float], ...]:
    """Decode biases: distinct legal ids, finite values."""
    ids = checks.ids("sampling.logit_bias.token_id", [entry.token_id for entry in entries], 0, MAX_LOGIT_BIAS)
    checks.require(len(set(ids)) == len(ids), "sampling.logit_bias.token_id", ids, "distinct ids")
    for entry in entries:
        checks.require(allowed_bias(entry.bias), "sampling.logit_bias.bias", entry.bias, BIAS)
    return tuple((entry.token_id, entry.bias) for entry in entries)


def speculation_to_proto(speculation: Speculation) -> pb.Speculation:
    """Encode how far a drafter may run."""
    return pb.Speculation(
        gamma=speculation.gamma,
        restart_gamma=speculation.restart_gamma,
        window=speculation.window,
        ahead=speculation.ahead,
    )


def speculation_from_proto(message: pb.Speculation) -> Speculation:
    """Decode how far a drafter may run: not at all, or restart_gamma <= gamma <= window."""
    if not message.window:
        return Speculation()
    gamma = PEER.integer("speculation.gamma", message.gamma, 1, MAX_GAMMA)
    restart_gamma = PEER.integer("speculation.restart_gamma", message.restart_gamma, 1, gamma)
    window = PEER.integer("speculation.window", message.window, gamma, MAX_WINDOW)
    return Speculation(gamma, restart_gamma, window, message.ahead)


# --- rows, log-probabilities, tensors -----------------------------------------------------------------------------


def rows_to_proto(rows: Sequence[SparseRow]) -> pb.DraftRows | None:
    """Pack draft rows; None if there are none."""
    if not rows:
        return None
    ids = [token_id for row in rows for token_id in row.token_ids]
    counts = [count for row in rows for count in row.counts]
    return pb.DraftRows(
        lengths=[len(row.token_ids) for row in rows],
        token_ids=np.asarray(ids, dtype="<u4").tobytes(),
        counts=(np.asarray(counts, dtype=np.int64) - 1).astype("<u2").tobytes(),
    )


def rows_from_proto(message: pb.DraftRows) -> tuple[SparseRow, ...]:
    """Unpack a peer's draft rows.

    Raises:
        ProtocolError: a length, an id or a count is out of range, ids repeat within a row, the counts of a row do not
            sum to 2^16, or the packed bytes are too long or too short.
    """
    lengths = message.lengths
    PEER.count("rows.lengths", lengths, 0, MAX_GAMMA)
    for length in lengths:
        PEER.integer("rows.lengths", length, 1, MAX_ROW_TOKENS)
    total = sum(lengths)
    PEER.require(len(message.token_ids) == 4 * total, "rows.token_ids", len(message.token_ids), f"{4 * total} bytes")
    PEER.require(len(message.counts) == 2 * total, "rows.counts", len(message.counts), f"{2 * total} bytes")
    ids = np.frombuffer(message.token_ids, dtype="<u4").tolist()
    counts = (np.frombuffer(message.counts, dtype="<u2").astype(np.int64) + 1).tolist()
    rows: list[SparseRow] = []
    start = 0
    for length in lengths:
        rows.append(_row(ids[start : start + length], counts[start : start + length]))
        start += length
    return tuple(rows)


def _row(ids: list[int], counts: list[int]) -> SparseRow:
    """Check one row."""
    PEER.ids("rows.token_ids", ids)
    PEER.require(len(set(ids)) == len(ids), "rows.token_ids", ids, "distinct ids within a row")
    PEER.require(sum(counts) == COUNT_TOTAL, "rows.counts", sum(counts), f"counts that sum to {COUNT_TOTAL}")
    return SparseRow(tuple(ids), tuple(counts))


def logprobs_to_proto(logprobs: Sequence[TokenLogprobs]) -> list[pb.TokenLogprobs]:
    """Encode log-probabilities, one message per token."""
    return [
        pb.TokenLogprobs(
            logprob=entry.logprob,
            top=[pb.ScoredToken(token_id=token_id, logprob=logprob) for token_id, logprob in entry.top],
        )
        for entry in logprobs
    ]


def logprobs_from_proto(field: str, messages: Sequence[pb.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    """Decode a peer's log-probabilities; minus infinity is legal, NaN is not."""
    return tuple(_token_logprobs(field, message) for message in messages)


def _token_logprobs(field: str, message: pb.TokenLogprobs) -> TokenLogprobs:
    PEER.ids(f"{field}.top", [entry.token_id for entry in message.top], 0, MAX_LOGPROBS)
    values = [message.logprob, *(entry.logprob for entry in message.top)]
    PEER.require(not any(math.isnan(value) for value in values), field, values, "no NaN")
    return TokenLogprobs(message.logprob, tuple((entry.token_id, entry.logprob) for entry in message.top))


def tensor_to_proto(tensor: Tensor) -> pb.Tensor:
    """Encode a dense array."""
    return pb.Tensor(dtype=_DTYPES[tensor.dtype][0], shape=tensor.shape, data=tensor.data)


def tensor_from_proto(message: pb.Tensor) -> Tensor:
    """Decode a peer's dense array; its data must have exactly the size its shape says."""
    PEER.require(message.dtype in _DTYPE_NAMES, "tensor.dtype", message.dtype, "a specified element type")
    PEER.count("tensor.shape", message.shape, 0, MAX_TENSOR_AXES)
    for extent in message.shape:
        PEER.integer("tensor.shape", extent, 1)
    dtype = _DTYPE_NAMES[message.dtype]
    size = math.prod(message.shape) * _DTYPES[dtype][1]
    PEER.require(len(message.data) == size, "tensor.data", len(message.data), f"{size} bytes")
    return Tensor(dtype, tuple(message.shape), message.data)


# --- descriptions -------------------------------------------------------------------------------------------------


def vocabulary_to_proto(vocabulary: Vocabulary) -> pb.Vocabulary:
    """Encode a vocabulary's identity."""
    return pb.Vocabulary(fingerprint=vocabulary.fingerprint, size=vocabulary.size)


def vocabulary_from_proto(message: pb.Vocabulary) -> Vocabulary:
    """Decode a peer's vocabulary."""
    return Vocabulary(
        PEER.name("vocabulary.fingerprint", message.fingerprint), PEER.integer("vocabulary.size", message.size, 1)
    )


def description_to_proto(worker: WorkerDescription) -> pb.WorkerDescription:
    """Encode a worker's description."""
    return pb.WorkerDescription(
        worker_id=worker.worker_id,
        role=_ROLES[worker.role],
        address=worker.address,
        model=worker.model,
        vocabulary=vocabulary_to_proto(worker.vocabulary),
        context_len=worker.context_len,
        dtype=worker.dtype,
        drafter=worker.drafter,
        guarantee=guarantee_to_proto(worker.exactness),
        fingerprint=worker.fingerprint,
        capacity=worker.capacity,
        load=worker.load,
        draining=worker.draining,
        attributes=worker.attributes,
        label=worker.label,
        drafters=worker.drafters,
    )


def description_from_proto(message: pb.WorkerDescription) -> WorkerDescription:
    """Decode a peer's description."""
    PEER.require(message.role in _ROLE_NAMES, "worker.role", message.role, "a specified role")
    return WorkerDescription(
        worker_id=WorkerId(PEER.name("worker.worker_id", message.worker_id)),
        role=_ROLE_NAMES[message.role],
        address=PEER.name("worker.address", message.address),
        model=PEER.text("worker.model", message.model, MAX_TEXT_CHARS),
        vocabulary=vocabulary_from_proto(message.vocabulary),
        context_len=PEER.integer("worker.context_len", message.context_len),
        dtype=PEER.text("worker.dtype", message.dtype),
        drafter=PEER.text("worker.drafter", message.drafter),
        exactness=guarantee_from_proto("worker.guarantee", message.guarantee),
        fingerprint=PEER.text("worker.fingerprint", message.fingerprint, MAX_TEXT_CHARS),
        capacity=PEER.integer("worker.capacity", message.capacity),
        load=PEER.integer("worker.load", message.load),
        draining=message.draining,
        attributes=_attributes(message.attributes),
        label=PEER.text("worker.label", message.label),
        drafters=_drafters(message.drafters),
    )


def _drafters(drafters: Sequence[str]) -> tuple[str, ...]:
    PEER.count("worker.drafters", drafters, 0, MAX_DRAFTERS)
    return tuple(PEER.name("worker.drafters", drafter) for drafter in drafters)


def _attributes(attributes: Mapping[str, str]) -> dict[str, str]:
    PEER.require(len(attributes) <= MAX_ATTRIBUTES, "worker.attributes", len(attributes), f"at most {MAX_ATTRIBUTES}")
    for name, value in attributes.items():
        PEER.text("worker.attributes", name)
        PEER.text(f"worker.attributes[{name}]", value, MAX_TEXT_CHARS)
    return dict(attributes)


def draining_to_proto(draining: Draining) -> pb.Draining:
    """Encode the notice that the sender is stopping."""
    return pb.Draining(reason=draining.reason)


def draining_from_proto(message: pb.Draining) -> Draining:
    """Decode the notice that the sender is stopping."""
    return Draining(PEER.text("draining.reason", message.reason, MAX_TEXT_CHARS))
