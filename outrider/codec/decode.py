"""Codec of `VerifyService.Decode`, both ways. Every sender is a peer: bad messages raise `ProtocolError`."""

from typing import Literal, assert_never

from google.protobuf.duration_pb2 import Duration

from outrider.codec import types as t
from outrider.codec.checks import MAX_LOGPROBS, PEER, duration
from outrider.ids import Mode, SessionId, TokenClass, WorkerId
from outrider.messages import (
    DecodeAttach,
    DecodeClose,
    DecodeOpen,
    DecodeProgress,
    DecodeRequestMessage,
    DecodeResponseMessage,
    Draining,
    Preparing,
    PromptScores,
    Verdict,
    VerdictCause,
)
from outrider.v1 import verify_pb2 as pb

DEFAULT_PATIENCE_S = 1.0

_CAUSES = {
    VerdictCause.ATTACHED: pb.VERDICT_CAUSE_ATTACHED,
    VerdictCause.TESTED: pb.VERDICT_CAUSE_TESTED,
    VerdictCause.PLAIN: pb.VERDICT_CAUSE_PLAIN,
    VerdictCause.PATIENCE: pb.VERDICT_CAUSE_PATIENCE,
    VerdictCause.RESET: pb.VERDICT_CAUSE_RESET,
    VerdictCause.QUARANTINED: pb.VERDICT_CAUSE_QUARANTINED,
}
_CAUSE_NAMES = {number: name for name, number in _CAUSES.items()}


# --- orchestrator -> verifier -----------------------------------------------------------------------------


def decode_request_to_proto(message: DecodeRequestMessage) -> pb.DecodeRequest:
    """Encode what the orchestrator asks of a verifier."""
    match message:
        case DecodeOpen():
            return pb.DecodeRequest(open=_open_to_proto(message))
        case DecodeAttach():
            generation = t.generation_to_proto(message.generation)
            return pb.DecodeRequest(attach=pb.DecodeAttach(generation=generation, worker_id=message.worker_id))
        case DecodeProgress():
            return pb.DecodeRequest(progress=_progress_to_proto(message))
        case DecodeClose():
            return pb.DecodeRequest(close=pb.DecodeClose(keep_kv=message.keep_kv))
        case _:
            assert_never(message)


def decode_request_from_proto(message: pb.DecodeRequest) -> DecodeRequestMessage:
    """Decode what an orchestrator asks.

    Raises:
        ProtocolError: nothing is set, or a field is out of range.
    """
    match message.WhichOneof("message"):
        case "open":
            return _open_from_proto(message.open)
        case "attach":
            generation = t.generation_from_proto(message.attach.generation)
            worker_id = PEER.text("attach.worker_id", message.attach.worker_id)
            return DecodeAttach(generation, WorkerId(worker_id))
        case "progress":
            return _progress_from_proto(message.progress)
        case "close":
            return DecodeClose(message.close.keep_kv)
        case None:
            raise PEER.fault("message", None, "one of open, attach, progress, close")
        case other:
            assert_never(other)


def _open_to_proto(message: DecodeOpen) -> pb.DecodeOpen:
    return pb.DecodeOpen(
        session_id=message.session_id,
        generation=t.generation_to_proto(message.generation),
        token_ids=message.token_ids,
        classes=bytes(message.classes),
        mode=t.mode_to_proto(message.mode),
        sampling=t.sampling_to_proto(message.sampling),
        key=message.key,
        sample_index=message.sample_index,
        prompt_len=message.prompt_len,
        num_logprobs=message.num_logprobs if message.num_logprobs >= 0 else None,
        commit_limit=message.commit_limit,
        speculation=t.speculation_to_proto(message.speculation),
        patience=duration(message.patience_s),
        worker_id=message.worker_id,
        num_prompt_logprobs=message.num_prompt_logprobs if message.num_prompt_logprobs >= 0 else None,
        processed_logprobs=message.processed_logprobs,
    )


def _open_from_proto(message: pb.DecodeOpen) -> DecodeOpen:
    mode = PEER.enum("open.mode", message.mode, Mode)
    token_ids = PEER.ids("open.token_ids", message.token_ids, 1)
    PEER.require(len(message.classes) == len(token_ids), "open.classes", len(message.classes), "one class per token")
    return DecodeOpen(
        session_id=SessionId(PEER.name("open.session_id", message.session_id)),
        generation=t.generation_from_proto(message.generation),
        token_ids=token_ids,
        classes=tuple(PEER.enum("open.classes", value, TokenClass) for value in message.classes),
        mode=mode,
        sampling=t.sampling_from_proto(message.sampling, PEER),
        key=t.key_from_proto("open.key", message.key, mode),
        sample_index=PEER.integer("open.sample_index", message.sample_index),
        prompt_len=PEER.integer("open.prompt_len", message.prompt_len, 0, len(token_ids)),
        num_logprobs=_num_logprobs("num_logprobs", message),
        num_prompt_logprobs=_num_logprobs("num_prompt_logprobs", message),
        processed_logprobs=message.processed_logprobs,
        commit_limit=PEER.integer("open.commit_limit", message.commit_limit),
        speculation=t.speculation_from_proto(message.speculation),
        patience_s=_patience("open.patience", message.patience if message.HasField("patience") else None),
        worker_id=WorkerId(PEER.text("open.worker_id", message.worker_id)),
    )


def _num_logprobs(field: Literal["num_logprobs", "num_prompt_logprobs"], message: pb.DecodeOpen) -> int:
    """Decode how many of the likeliest tokens are wanted; -1: no log-probabilities at all."""
    value: int = getattr(message, field)
    return PEER.integer(f"open.{field}", value, 0, MAX_LOGPROBS) if message.HasField(field) else -1


def _progress_to_proto(message: DecodeProgress) -> pb.DecodeProgress:
    return pb.DecodeProgress(
        generation=t.generation_to_proto(message.generation),
        logged_len=message.logged_len,
        commit_limit=message.commit_limit,
        speculation=t.speculation_to_proto(message.speculation),
        patience=duration(message.patience_s),
    )


def _progress_from_proto(message: pb.DecodeProgress) -> DecodeProgress:
    return DecodeProgress(
        generation=t.generation_from_proto(message.generation),
        logged_len=PEER.integer("progress.logged_len", message.logged_len),
        commit_limit=PEER.integer("progress.commit_limit", message.commit_limit),
        speculation=t.speculation_from_proto(message.speculation),
        patience_s=_patience("progress.patience", message.patience if message.HasField("patience") else None),
    )


def _patience(field: str, value: Duration | None) -> float:
    """Decode patience, with its default where it is not set."""
    return DEFAULT_PATIENCE_S if value is None else PEER.seconds(field, value)


# --- verifier -> orchestrator -----------------------------------------------------------------------------


def decode_response_to_proto(message: DecodeResponseMessage) -> pb.DecodeResponse:
    """Encode what a verifier answers."""
    match message:
        case Verdict():
            return pb.DecodeResponse(verdict=_verdict_to_proto(message))
        case Draining():
            return pb.DecodeResponse(draining=t.draining_to_proto(message))
        case Preparing():
            return pb.DecodeResponse(preparing=pb.Preparing())
        case PromptScores():
            return pb.DecodeResponse(prompt_scores=_scores_to_proto(message))
        case _:
            assert_never(message)


def decode_response_from_proto(message: pb.DecodeResponse) -> DecodeResponseMessage:
    """Decode what a verifier answers.

    Raises:
        ProtocolError: nothing is set, a field is out of range, or lists that belong together differ in length.
    """
    match message.WhichOneof("message"):
        case "verdict":
            return _verdict_from_proto(message.verdict)
        case "draining":
            return t.draining_from_proto(message.draining)
        case "preparing":
            return Preparing()
        case "prompt_scores":
            return _scores_from_proto(message.prompt_scores)
        case None:
            raise PEER.fault("message", None, "one of verdict, draining, preparing, prompt_scores")
        case other:
            assert_never(other)


def _scores_to_proto(scores: PromptScores) -> pb.PromptScores:
    return pb.PromptScores(start=scores.start, logprobs=t.logprobs_to_proto(scores.logprobs))


def _scores_from_proto(message: pb.PromptScores) -> PromptScores:
    start = PEER.integer("prompt_scores.start", message.start, 1)
    return PromptScores(start, t.logprobs_from_proto("prompt_scores.logprobs", message.logprobs))


def _verdict_to_proto(verdict: Verdict) -> pb.Verdict:
    return pb.Verdict(
        session_id=verdict.session_id,
        epoch=t.epoch_to_proto(verdict.epoch),
        start=verdict.start,
        token_ids=verdict.token_ids,
        kinds=t.kinds_to_proto(verdict.kinds),
        num_accepted=verdict.num_accepted,
        num_tested=verdict.num_tested,
        next_epoch=t.epoch_to_proto(verdict.next_epoch),
        cause=_CAUSES[verdict.cause],
        logprobs=t.logprobs_to_proto(verdict.logprobs),
        verify_time=duration(verdict.verify_s),
        queue_time=duration(verdict.queue_s),
        num_rows=verdict.num_rows,
        guarantee_void=verdict.guarantee_void,
        num_stale=verdict.num_stale,
        num_sessions=verdict.num_sessions,
        from_ahead=verdict.from_ahead,
        num_cached=verdict.num_cached,
    )


def _verdict_from_proto(message: pb.Verdict) -> Verdict:
    token_ids = PEER.ids("verdict.token_ids", message.token_ids)
    PEER.require(message.cause in _CAUSE_NAMES, "verdict.cause", message.cause, "a specified cause")
    verdict = Verdict(
        session_id=SessionId(PEER.name("verdict.session_id", message.session_id)),
        epoch=t.epoch_from_proto(message.epoch),
        start=PEER.integer("verdict.start", message.start),
        token_ids=token_ids,
        kinds=t.kinds_from_proto("verdict.kinds", message.kinds, PEER),
        num_accepted=PEER.integer("verdict.num_accepted", message.num_accepted, 0, message.num_tested),
        num_tested=PEER.integer("verdict.num_tested", message.num_tested),
        next_epoch=t.epoch_from_proto(message.next_epoch),
        cause=_CAUSE_NAMES[message.cause],
        logprobs=t.logprobs_from_proto("verdict.logprobs", message.logprobs),
        verify_s=PEER.seconds("verdict.verify_time", message.verify_time),
        queue_s=PEER.seconds("verdict.queue_time", message.queue_time),
        num_rows=PEER.integer("verdict.num_rows", message.num_rows),
        guarantee_void=PEER.integer("verdict.guarantee_void", message.guarantee_void),
        num_stale=PEER.integer("verdict.num_stale", message.num_stale),
        num_sessions=PEER.integer("verdict.num_sessions", message.num_sessions),
        from_ahead=message.from_ahead,
        num_cached=PEER.integer("verdict.num_cached", message.num_cached),
    )
    count = len(token_ids)
    PEER.count("verdict.kinds", verdict.kinds, count, count)
    if verdict.logprobs:
        PEER.count("verdict.logprobs", verdict.logprobs, count, count)
    PEER.require(verdict.next_epoch >= verdict.epoch, "verdict.next_epoch", verdict.next_epoch, "an epoch >= epoch")
    return verdict
