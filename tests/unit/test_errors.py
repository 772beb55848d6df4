"""The error tree: one table to the wire and back."""

import asyncio
from collections.abc import Iterator

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from outrider import errors
from outrider.errors import (
    Code,
    InvalidRequest,
    NotFound,
    OutriderError,
    ResourceExhausted,
    StoreUnavailable,
    Unavailable,
    VocabularyMismatch,
    class_of,
    code_of,
)
from outrider.status import MAX_MESSAGE_CHARS, error_of, error_of_call, status_of
from outrider.v1 import draft_pb2 as pb
from outrider.v1 import draft_pb2_grpc


def every_class(root: type[OutriderError] = OutriderError) -> Iterator[type[OutriderError]]:
    for cls in root.__subclasses__():
        if cls.__module__ == errors.__name__:
            yield cls
            yield from every_class(cls)


def an_example(cls: type[OutriderError]) -> OutriderError:
    return cls("top_p", 2.0, "a number in (0, 1]") if issubclass(cls, InvalidRequest) else cls("what happened")


def test_reasons_are_unique_and_lead_back_to_their_class() -> None:
    classes = list(every_class())
    assert len({cls.reason for cls in classes}) == len(classes)
    assert all(class_of(cls.reason) is cls for cls in classes)
    assert class_of("NO_SUCH_REASON") is None


def test_the_numbers_of_codes_are_those_of_grpc() -> None:
    numbers = {status.name: status.value[0] for status in grpc.StatusCode}
    assert all(numbers[code.name] == code.value for code in Code)


@pytest.mark.parametrize("cls", list(every_class()), ids=lambda cls: cls.__name__)
def test_every_error_is_in_the_tree_that_the_module_draws(cls: type[OutriderError]) -> None:
    assert errors.__doc__ is not None
    lines = [line for line in errors.__doc__.splitlines() if f"── {cls.__name__} " in line]
    assert len(lines) == 1
    assert code_of(an_example(cls)).name in lines[0].split()
    assert cls.reason in lines[0].split()


@pytest.mark.parametrize("cls", list(every_class()), ids=lambda cls: cls.__name__)
def test_every_error_survives_the_wire_with_its_fields(cls: type[OutriderError]) -> None:
    error = an_example(cls)
    received = error_of(Status.FromString(status_of(error).SerializeToString()))
    assert type(received) is cls
    assert received.message == error.message
    assert received.metadata() == error.metadata()


def test_an_unlisted_class_has_its_ancestors_code() -> None:
    assert code_of(VocabularyMismatch("id 7 differs")) is Code.FAILED_PRECONDITION
    assert code_of(StoreUnavailable("gone")) is Code.UNAVAILABLE


def test_foreign_clients_find_standard_details() -> None:
    violation, retry, info = BadRequest(), RetryInfo(), ErrorInfo()
    details = status_of(InvalidRequest("max_tokens", -1, "an integer >= 1")).details
    assert details[0].Unpack(info)
    assert (info.domain, info.reason) == ("outrider", "INVALID_REQUEST")
    assert details[1].Unpack(violation)
    assert violation.field_violations[0].field == "max_tokens"
    assert "-1" in violation.field_violations[0].description
    assert status_of(ResourceExhausted("full", 2.5)).details[1].Unpack(retry)
    assert retry.retry_delay.ToTimedelta().total_seconds() == 2.5


def test_a_status_of_a_newer_version_falls_back_to_its_code() -> None:
    status = status_of(NotFound("session x"))
    info = ErrorInfo()
    assert status.details[0].Unpack(info)
    info.reason = "SOMETHING_NEW"
    status.details[0].Pack(info)
    received = error_of(status)
    assert type(received) is NotFound
    assert received.message == "session x"


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        (14, Unavailable),
        (4, errors.DeadlineExceeded),
        (12, errors.Internal),
        (3, errors.Internal),
        (2, errors.Internal),
    ],
)
def test_a_bare_status_goes_by_its_code(code: int, cls: type[OutriderError]) -> None:
    assert type(error_of(Status(code=code, message="m"))) is cls


def test_a_damaged_retry_delay_takes_the_default() -> None:
    assert ResourceExhausted.rebuild("full", {"retry_delay_s": "soon"}).retry_delay_s == 1.0


def test_an_overlong_message_is_cut_so_that_the_status_fits_in_metadata() -> None:
    assert len(status_of(NotFound("x" * 100_000)).message) == MAX_MESSAGE_CHARS


async def test_a_call_to_nobody_is_unavailable() -> None:
    async with grpc.aio.insecure_channel("unix:/nonexistent/outrider.sock") as channel:
        call = draft_pb2_grpc.DraftServiceStub(channel).Describe(pb.DraftServiceDescribeRequest(), timeout=60)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(call, 60)
    assert type(error_of_call(caught.value)) is Unavailable


def test_details_that_contradict_the_status_are_not_believed() -> None:
    status = status_of(NotFound("session x"))
    trailer = grpc.aio.Metadata(("grpc-status-details-bin", status.SerializeToString()))
    contradiction = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), trailer, "gone")
    assert type(error_of_call(contradiction)) is Unavailable
    garbage = grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff\xff"))
    damaged = grpc.aio.AioRpcError(grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), garbage, "lost")
    assert type(error_of_call(damaged)) is NotFound


@pytest.mark.parametrize(
    ("details", "cls"), [("CANCELLED", Unavailable), ("Locally cancelled by application!", errors.Cancelled)]
)
def test_a_bare_cancelled_is_the_end_of_a_server_unless_this_side_cancelled(
    details: str, cls: type[OutriderError]
) -> None:
    nothing = grpc.aio.Metadata()
    assert type(error_of_call(grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, nothing, nothing, details))) is cls


def test_a_cancelled_with_our_details_stays_one() -> None:
    trailer = grpc.aio.Metadata(("grpc-status-details-bin", status_of(errors.Cancelled("left")).SerializeToString()))
    answered = grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, grpc.aio.Metadata(), trailer, "left")
    assert type(error_of_call(answered)) is errors.Cancelled


def test_a_class_outside_the_table_is_internal() -> None:
    assert code_of(OutriderError("bare")) is Code.INTERNAL
