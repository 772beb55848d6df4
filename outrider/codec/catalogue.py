"""Codec of what `GetSession` and `ListModels` return; the sender is a peer."""

from google.protobuf.timestamp_pb2 import Timestamp

from outrider.codec import types as t
from outrider.codec.checks import PEER
from outrider.generation import ModelDescription, SessionSummary
from outrider.ids import Mode, SessionId
from outrider.v1 import generation_pb2 as pb

_STATUSES = {True: pb.SESSION_STATUS_RUNNING, False: pb.SESSION_STATUS_IDLE}


def session_to_proto(session: SessionSummary) -> pb.Session:
    """Encode what is stored about a session."""
    nanos = round(session.updated_at_s * 1e9)
    return pb.Session(
        session_id=session.session_id,
        model=session.model,
        status=_STATUSES[session.running],
        length=session.length,
        prompt_len=session.prompt_len,
        mode=t.mode_to_proto(session.mode),
        token_ids=session.token_ids,
        updated_at=Timestamp(seconds=nanos // 10**9, nanos=nanos % 10**9),
    )


def session_from_proto(message: pb.Session) -> SessionSummary:
    """Decode what is stored about a session.

    Raises:
        ProtocolError: a field is out of range.
    """
    PEER.require(message.status in _STATUSES.values(), "session.status", message.status, "a specified status")
    return SessionSummary(
        session_id=SessionId(PEER.name("session.session_id", message.session_id)),
        model=message.model,
        running=message.status == pb.SESSION_STATUS_RUNNING,
        length=PEER.integer("session.length", message.length),
        prompt_len=PEER.integer("session.prompt_len", message.prompt_len),
        mode=PEER.enum("session.mode", message.mode, Mode),
        token_ids=PEER.ids("session.token_ids", message.token_ids),
        updated_at_s=message.updated_at.seconds + message.updated_at.nanos / 1e9,
    )


def model_to_proto(model: ModelDescription) -> pb.ModelDescription:
    """Encode a model that can be asked for."""
    return pb.ModelDescription(
        model=model.model,
        vocabulary=t.vocabulary_to_proto(model.vocabulary),
        context_len=model.context_len,
        num_verifiers=model.num_verifiers,
        drafters=model.drafters,
        is_default=model.is_default,
    )


def model_from_proto(message: pb.ModelDescription) -> ModelDescription:
    """Decode a model that can be asked for.

    Raises:
        ProtocolError: a field is out of range.
    """
    return ModelDescription(
        model=PEER.name("model.model", message.model),
        vocabulary=t.vocabulary_from_proto(message.vocabulary),
        context_len=PEER.integer("model.context_len", message.context_len),
        num_verifiers=PEER.integer("model.num_verifiers", message.num_verifiers),
        drafters=tuple(message.drafters),
        is_default=message.is_default,
    )
