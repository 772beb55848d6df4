"""Codec of `VerifyService.Propose`, both ways. Every sender is a peer: bad messages raise `ProtocolError`."""

from typing import assert_never

from outrider.codec import types as t
from outrider.codec.checks import MAX_GAMMA, PEER
from outrider.ids import SessionId, WorkerId
from outrider.messages import (
    Draining,
    Pass,
    Proposal,
    ProposalHeader,
    ProposeHello,
    ProposeRequestMessage,
    ProposeResponseMessage,
    ProposeWelcome,
    RollbackHint,
    SparseRow,
    TargetFeatures,
)
from outrider.v1 import verify_pb2 as pb

MAX_FEATURE_LAYERS = 64


# --- draft worker -> verifier ----------------------------------------------------------------------------


def propose_request_to_proto(message: ProposeRequestMessage) -> pb.ProposeRequest:
    """Encode what a draft worker sends."""
    match message:
        case ProposeHello():
            return pb.ProposeRequest(hello=_hello_to_proto(message))
        case ProposalHeader():
            return pb.ProposeRequest(header=_header_to_proto(message))
        case Proposal():
            return pb.ProposeRequest(proposal=_proposal_to_proto(message))
        case Pass():
            return pb.ProposeRequest(pass_turn=_pass_to_proto(message))
        case _:
            assert_never(message)


def propose_request_from_proto(message: pb.ProposeRequest) -> ProposeRequestMessage:
    """Decode what a draft worker sends.

    Raises:
        ProtocolError: nothing is set, a field is out of range, or rows do not fit their tokens.
    """
    match message.WhichOneof("message"):
        case "hello":
            return _hello_from_proto(message.hello)
        case "header":
            return _header_from_proto(message.header)
        case "proposal":
            return _proposal_from_proto(message.proposal)
        case "pass_turn":
            return _pass_from_proto(message.pass_turn)
        case None:
            raise PEER.fault("message", None, "one of hello, header, proposal, pass_turn")
        case other:
            assert_never(other)


def _hello_to_proto(hello: ProposeHello) -> pb.ProposeHello:
    vocabulary = t.vocabulary_to_proto(hello.vocabulary)
    return pb.ProposeHello(
        worker_id=hello.worker_id,
        vocabulary=vocabulary,
        feature_layers=hello.feature_layers,
        takes_hints=hello.takes_hints,
    )


def _hello_from_proto(message: pb.ProposeHello) -> ProposeHello:
    PEER.count("hello.feature_layers", message.feature_layers, 0, MAX_FEATURE_LAYERS)
    return ProposeHello(
        worker_id=WorkerId(PEER.name("hello.worker_id", message.worker_id)),
        vocabulary=t.vocabulary_from_proto(message.vocabulary),
        feature_layers=tuple(PEER.integer("hello.feature_layers", layer, -1) for layer in message.feature_layers),
        takes_hints=message.takes_hints,
    )


def _header_to_proto(header: ProposalHeader) -> pb.ProposalHeader:
    epoch = t.epoch_to_proto(header.epoch)
    return pb.ProposalHeader(
        session_id=header.session_id, epoch=epoch, base_len=header.base_len, count=header.count, depth=header.depth
    )


def _header_from_proto(message: pb.ProposalHeader) -> ProposalHeader:
    return ProposalHeader(
        session_id=SessionId(PEER.name("header.session_id", message.session_id)),
        epoch=t.epoch_from_proto(message.epoch),
        base_len=PEER.integer("header.base_len", message.base_len),
        count=PEER.integer("header.count", message.count, 1, MAX_GAMMA),
        depth=PEER.integer("header.depth", message.depth, 0, message.count),
    )


def _proposal_to_proto(proposal: Proposal) -> pb.Proposal:
    return pb.Proposal(
        session_id=proposal.session_id,
        epoch=t.epoch_to_proto(proposal.epoch),
        base_len=proposal.base_len,
        seen_len=proposal.seen_len,
        limit=proposal.limit,
        token_ids=proposal.token_ids,
        rows=t.rows_to_proto(proposal.rows),
        parents=[parent + 1 for parent in proposal.parents],
    )


def _proposal_from_proto(message: pb.Proposal) -> Proposal:
    token_ids = PEER.ids("proposal.token_ids", message.token_ids, 1, MAX_GAMMA)
    rows = t.rows_from_proto(message.rows) if message.HasField("rows") else ()
    parents = _parents_from_proto(message, len(token_ids))
    if rows and parents:
        num_families = len(set(parents))
        PEER.count("proposal.rows", rows, num_families, num_families)
    elif rows:
        _check_rows(token_ids, rows)
    return Proposal(
        session_id=SessionId(PEER.name("proposal.session_id", message.session_id)),
        epoch=t.epoch_from_proto(message.epoch),
        base_len=PEER.integer("proposal.base_len", message.base_len),
        seen_len=PEER.integer("proposal.seen_len", message.seen_len),
        limit=PEER.integer("proposal.limit", message.limit),
        token_ids=token_ids,
        rows=rows,
        parents=parents,
    )


def _parents_from_proto(message: pb.Proposal, num_tokens: int) -> tuple[int, ...]:
    """Return the index of each token's parent, -1 for the committed text; empty for a run."""
    if not message.parents:
        return ()
    PEER.count("proposal.parents", message.parents, num_tokens, num_tokens)
    return tuple(PEER.integer("proposal.parents", number, 0, index) - 1 for index, number in enumerate(message.parents))


def _check_rows(token_ids: tuple[int, ...], rows: tuple[SparseRow, ...]) -> None:
    """Require one row per token, which lists it: a token with no mass in its row was not drawn from it."""
    PEER.count("proposal.rows", rows, len(token_ids), len(token_ids))
    for token_id, row in zip(token_ids, rows, strict=True):
        PEER.require(token_id in row.token_ids, "proposal.token_ids", token_id, "a token listed in its row")


def _pass_to_proto(message: Pass) -> pb.Pass:
    return pb.Pass(
        session_id=message.session_id,
        epoch=t.epoch_to_proto(message.epoch),
        base_len=message.base_len,
        until_len=message.until_len,
    )


def _pass_from_proto(message: pb.Pass) -> Pass:
    return Pass(
        session_id=SessionId(PEER.name("pass_turn.session_id", message.session_id)),
        epoch=t.epoch_from_proto(message.epoch),
        base_len=PEER.integer("pass_turn.base_len", message.base_len),
        until_len=PEER.integer("pass_turn.until_len", message.until_len, message.base_len + 1),
    )


# --- verifier -> draft worker ----------------------------------------------------------------------------


def propose_response_to_proto(message: ProposeResponseMessage) -> pb.ProposeResponse:
    """Encode what a verifier sends back to a draft worker."""
    match message:
        case ProposeWelcome():
            return pb.ProposeResponse(welcome=pb.ProposeWelcome(worker_id=message.worker_id))
        case TargetFeatures():
            return pb.ProposeResponse(features=_features_to_proto(message))
        case RollbackHint():
            return pb.ProposeResponse(rollback=_rollback_to_proto(message))
        case Draining():
            return pb.ProposeResponse(draining=t.draining_to_proto(message))
        case _:
            assert_never(message)


def propose_response_from_proto(message: pb.ProposeResponse) -> ProposeResponseMessage:
    """Decode what a verifier sends back.

    Raises:
        ProtocolError: nothing is set, or a field is out of range.
    """
    match message.WhichOneof("message"):
        case "welcome":
            return ProposeWelcome(WorkerId(PEER.name("welcome.worker_id", message.welcome.worker_id)))
        case "features":
            return _features_from_proto(message.features)
        case "rollback":
            return _rollback_from_proto(message.rollback)
        case "draining":
            return t.draining_from_proto(message.draining)
        case None:
            raise PEER.fault("message", None, "one of welcome, features, rollback, draining")
        case other:
            assert_never(other)


def _features_to_proto(message: TargetFeatures) -> pb.TargetFeatures:
    return pb.TargetFeatures(
        session_id=message.session_id,
        epoch=t.epoch_to_proto(message.epoch),
        position=message.position,
        features=t.tensor_to_proto(message.features),
    )


def _features_from_proto(message: pb.TargetFeatures) -> TargetFeatures:
    features = t.tensor_from_proto(message.features)
    PEER.count("features.features.shape", features.shape, 3, 3)
    return TargetFeatures(
        session_id=SessionId(PEER.name("features.session_id", message.session_id)),
        epoch=t.epoch_from_proto(message.epoch),
        position=PEER.integer("features.position", message.position),
        features=features,
    )


def _rollback_to_proto(message: RollbackHint) -> pb.RollbackHint:
    return pb.RollbackHint(
        session_id=message.session_id,
        epoch=t.epoch_to_proto(message.epoch),
        start=message.start,
        token_id=message.token_id,
    )


def _rollback_from_proto(message: pb.RollbackHint) -> RollbackHint:
    token_id = PEER.integer("rollback.token_id", message.token_id) if message.HasField("token_id") else None
    return RollbackHint(
        session_id=SessionId(PEER.name("rollback.session_id", message.session_id)),
        epoch=t.epoch_from_proto(message.epoch),
        start=PEER.integer("rollback.start", message.start),
        token_id=token_id,
    )
