"""Codec of `draft.proto`: Draft, both ways. Every sender is a peer: bad messages raise `ProtocolError`."""

from typing import assert_never

from outrider.codec import types as t
from outrider.codec.checks import MAX_PREDICTION_TOKENS, PEER, duration
from outrider.ids import Mode, SessionId, WorkerId
from outrider.messages import (
    DraftClose,
    DraftCommit,
    DraftOpen,
    DraftRequestMessage,
    DraftResponseMessage,
    DraftStatus,
    Draining,
)
from outrider.v1 import draft_pb2 as pb

_MAX_COUNTER = 2**63 - 1


# --- orchestrator -> draft worker ---------------------------------------------------------------------------------


def draft_request_to_proto(message: DraftRequestMessage) -> pb.DraftRequest:
    """Encode what the orchestrator asks of a draft worker."""
    match message:
        case DraftOpen():
            return pb.DraftRequest(open=_open_to_proto(message))
        case DraftCommit():
            return pb.DraftRequest(commit=_commit_to_proto(message))
        case DraftClose():
            return pb.DraftRequest(close=pb.DraftClose(keep_kv=message.keep_kv))
        case _:
            assert_never(message)


def draft_request_from_proto(message: pb.DraftRequest) -> DraftRequestMessage:
    """Decode what an orchestrator asks.

    Raises:
        ProtocolError: nothing is set, or a field is out of range.
    """
    match message.WhichOneof("message"):
        case "open":
            return _open_from_proto(message.open)
        case "commit":
            return _commit_from_proto(message.commit)
        case "close":
            return DraftClose(message.close.keep_kv)
        case None:
            raise PEER.fault("message", None, "one of open, commit, close")
        case other:
            assert_never(other)


def _open_to_proto(message: DraftOpen) -> pb.DraftOpen:
    return pb.DraftOpen(
        session_id=message.session_id,
        epoch=t.epoch_to_proto(message.epoch),
        token_ids=message.token_ids,
        mode=t.mode_to_proto(message.mode),
        sampling=t.sampling_to_proto(message.sampling),
        draft_key=message.draft_key,
        speculation=t.speculation_to_proto(message.speculation),
        verifier_id=message.verifier_id,
        verifier_address=message.verifier_address,
        sample_index=message.sample_index,
        prompt_len=message.prompt_len,
        max_len=message.max_len,
        prediction=message.prediction,
        drafter=message.drafter,
    )


def _open_from_proto(message: pb.DraftOpen) -> DraftOpen:
    mode = PEER.enum("open.mode", message.mode, Mode)
    token_ids = PEER.ids("open.token_ids", message.token_ids, 1)
    return DraftOpen(
        session_id=SessionId(PEER.name("open.session_id", message.session_id)),
        epoch=t.epoch_from_proto(message.epoch),
        token_ids=token_ids,
        mode=mode,
        sampling=t.sampling_from_proto(message.sampling, PEER),
        draft_key=t.key_from_proto("open.draft_key", message.draft_key, mode),
        speculation=t.speculation_from_proto(message.speculation),
        verifier_id=WorkerId(PEER.name("open.verifier_id", message.verifier_id)),
        verifier_address=PEER.name("open.verifier_address", message.verifier_address),
        sample_index=PEER.integer("open.sample_index", message.sample_index),
        prompt_len=PEER.integer("open.prompt_len", message.prompt_len, 0, len(token_ids)),
        max_len=PEER.integer("open.max_len", message.max_len),
        prediction=PEER.ids("open.prediction", message.prediction, 0, MAX_PREDICTION_TOKENS),
        drafter=PEER.text("open.drafter", message.drafter),
    )


def _commit_to_proto(message: DraftCommit) -> pb.DraftCommit:
    return pb.DraftCommit(
        epoch=t.epoch_to_proto(message.epoch),
        start=message.start,
        token_ids=message.token_ids,
        speculation=t.speculation_to_proto(message.speculation),
    )


def _commit_from_proto(message: pb.DraftCommit) -> DraftCommit:
    return DraftCommit(
        epoch=t.epoch_from_proto(message.epoch),
        start=PEER.integer("commit.start", message.start),
        token_ids=PEER.ids("commit.token_ids", message.token_ids),
        speculation=t.speculation_from_proto(message.speculation),
    )


# --- draft worker -> orchestrator ---------------------------------------------------------------------------------


def draft_response_to_proto(message: DraftResponseMessage) -> pb.DraftResponse:
    """Encode what a draft worker reports."""
    match message:
        case DraftStatus():
            return pb.DraftResponse(status=_status_to_proto(message))
        case Draining():
            return pb.DraftResponse(draining=t.draining_to_proto(message))
        case _:
            assert_never(message)


def draft_response_from_proto(message: pb.DraftResponse) -> DraftResponseMessage:
    """Decode what a draft worker reports.

    Raises:
        ProtocolError: nothing is set, or a field is out of range.
    """
    match message.WhichOneof("message"):
        case "status":
            return _status_from_proto(message.status)
        case "draining":
            return t.draining_from_proto(message.draining)
        case None:
            raise PEER.fault("message", None, "one of status, draining")
        case other:
            assert_never(other)


def _status_to_proto(status: DraftStatus) -> pb.DraftStatus:
    return pb.DraftStatus(
        ready=status.ready,
        draft_time_per_token=duration(status.draft_s_per_token),
        num_drafted=status.num_drafted,
        num_discarded=status.num_discarded,
        drafter=status.drafter,
        missing_from=status.missing_from if status.missing_from >= 0 else None,
    )


def _status_from_proto(message: pb.DraftStatus) -> DraftStatus:
    missing = message.HasField("missing_from")
    return DraftStatus(
        ready=message.ready,
        draft_s_per_token=PEER.seconds("status.draft_time_per_token", message.draft_time_per_token),
        num_drafted=PEER.integer("status.num_drafted", message.num_drafted, 0, _MAX_COUNTER),
        num_discarded=PEER.integer("status.num_discarded", message.num_discarded, 0, _MAX_COUNTER),
        drafter=PEER.text("status.drafter", message.drafter),
        missing_from=PEER.integer("status.missing_from", message.missing_from) if missing else -1,
    )
