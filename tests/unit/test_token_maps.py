"""Token -> id maps on the wire: whole, small enough, and checked."""

import pytest

from outrider.codec.tokens import token_map_from_proto, token_map_to_proto
from outrider.errors import ProtocolError
from outrider.rpc.transport import MAX_MESSAGE_BYTES
from outrider.v1 import types_pb2 as pb


def test_a_map_with_gaps_an_empty_token_and_lone_surrogates_arrives_whole() -> None:
    tokens = {"b": 7, "a": 2, "": 9, "\ud800": 3, "Ġthe": 1000}
    message = token_map_to_proto(tokens)
    assert list(message.token_ids) == [2, 3, 7, 9, 1000]
    assert token_map_from_proto(pb.TokenMap.FromString(message.SerializeToString())) == tokens


def test_a_map_of_150_000_long_tokens_fits_a_message_many_times() -> None:
    message = token_map_to_proto({f"{number:030d}": number for number in range(150_000)})
    assert 8 * message.ByteSize() < MAX_MESSAGE_BYTES


@pytest.mark.parametrize(
    "message",
    [
        pb.TokenMap(),
        pb.TokenMap(tokens=[b"a", b"b"], token_ids=[1]),
        pb.TokenMap(tokens=[b"a"], token_ids=[1, 2]),
        pb.TokenMap(tokens=[b"a"], token_ids=[2**31]),
        pb.TokenMap(tokens=[b"\xff"], token_ids=[1]),
    ],
    ids=["nothing told", "id missing", "token missing", "impossible id", "not UTF-8"],
)
def test_a_map_that_is_none_is_refused(message: pb.TokenMap) -> None:
    with pytest.raises(ProtocolError):
        token_map_from_proto(message)
