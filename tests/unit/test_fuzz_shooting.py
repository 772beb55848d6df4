"""What the fuzzing takes for a violation."""

import grpc
import pytest

from outrider.v1 import generation_pb2
from tests.fuzz.inputs import Call
from tests.fuzz.samples import METHODS
from tests.fuzz.shooting import Book, Shooter, deleted_by

DELETE = next(method for method in METHODS if method.name.endswith("/DeleteSession"))
GENERATE = next(method for method in METHODS if method.name.endswith("/Generate"))


def asks(session_id: str) -> Call:
    return Call(1, DELETE, (generation_pb2.DeleteSessionRequest(session_id=session_id).SerializeToString(),), 0.0)


def lost(session_id: str) -> grpc.aio.AioRpcError:
    words = f"session {session_id} is gone from the store: its data was lost, or it was deleted elsewhere"
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.DATA_LOSS, nothing, nothing, words)


@pytest.mark.parametrize(("session_id", "is_violation"), [("mine", False), ("another", True), ("min", True)])
def test_a_lost_session_is_a_violation_unless_a_call_deleted_it(session_id: str, is_violation: bool) -> None:
    book = Book(deleted=set(deleted_by(asks("mine"))))
    Shooter({}, book)._judge(Call(2, GENERATE, (), 0.0), lost(session_id))
    assert bool(book.violations) is is_violation


@pytest.mark.parametrize(("method", "is_violation"), [("Resume", False), ("Generate", True)])
def test_that_tokens_are_lost_is_a_violation_unless_a_call_claims_to_have_seen_them(
    method: str, is_violation: bool
) -> None:
    called = next(each for each in METHODS if each.name.endswith(f"/{method}"))
    words = "the log of session s ends at 61: what was shown from there to 65 is lost, and would be drawn differently"
    nothing = grpc.aio.Metadata()
    book = Book()
    error = grpc.aio.AioRpcError(grpc.StatusCode.DATA_LOSS, nothing, nothing, words)
    Shooter({}, book)._judge(Call(2, called, (), 0.0), error)
    assert bool(book.violations) is is_violation


def test_a_spoilt_request_deletes_nothing() -> None:
    assert deleted_by(Call(1, DELETE, (b"\xff\xff",), 0.0)) == []
    assert deleted_by(Call(1, GENERATE, asks("mine").inputs, 0.0)) == []
