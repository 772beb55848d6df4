"""Trees of proposals on the wire."""

import pytest

from outrider.codec.propose import propose_request_from_proto, propose_request_to_proto
from outrider.errors import ProtocolError
from outrider.ids import Epoch, SessionId
from outrider.messages import COUNT_TOTAL, Proposal, ProposalHeader, SparseRow
from outrider.v1 import verify_pb2 as pb

ROWS = (SparseRow((5, 6), (COUNT_TOTAL - 9, 9)), SparseRow((7,), (COUNT_TOTAL,)))
TREE = Proposal(SessionId("s"), Epoch(), 4, 4, 10, (5, 6, 7), (), (-1, -1, 0))


def sent(message: Proposal | ProposalHeader) -> pb.ProposeRequest:
    return pb.ProposeRequest.FromString(propose_request_to_proto(message).SerializeToString())


@pytest.mark.parametrize(
    "message",
    [TREE, Proposal(TREE.session_id, TREE.epoch, 4, 4, 10, (5, 6, 7), ROWS, (-1, -1, 0)),
     Proposal(TREE.session_id, TREE.epoch, 4, 4, 10, (5, 6, 7)), ProposalHeader(SessionId("s"), Epoch(), 4, 3, 2)],
    ids=["tree", "tree with rows", "run", "header"],
)  # fmt: skip
def test_trees_arrive_as_they_were_sent(message: Proposal | ProposalHeader) -> None:
    assert propose_request_from_proto(sent(message)) == message


@pytest.mark.parametrize(
    ("parents", "field"), [((0, 0), "parents"), ((0, 2, 0), "parents"), ((1, 0, 0), "parents")],
    ids=["too few", "own parent", "first has one"],
)  # fmt: skip
def test_parents_that_make_no_tree_are_refused(parents: tuple[int, ...], field: str) -> None:
    message = sent(TREE)
    del message.proposal.parents[:]
    message.proposal.parents.extend(parents)
    with pytest.raises(ProtocolError, match=field):
        propose_request_from_proto(message)


def test_a_row_too_many_is_refused() -> None:
    message = sent(Proposal(TREE.session_id, TREE.epoch, 4, 4, 10, (5, 6, 7), (*ROWS, ROWS[1]), (-1, -1, 0)))
    with pytest.raises(ProtocolError, match="rows"):
        propose_request_from_proto(message)


def test_a_header_deeper_than_its_tokens_is_refused() -> None:
    with pytest.raises(ProtocolError, match="depth"):
        propose_request_from_proto(sent(ProposalHeader(SessionId("s"), Epoch(), 4, 3, 4)))
