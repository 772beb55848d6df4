"""The error tree on the wire: `OutriderError` <-> gRPC status with `google.rpc` details.

The status code comes from the table in `outrider.errors`. `ErrorInfo.reason` names the class, `ErrorInfo.metadata` what
is needed to rebuild it; `BadRequest` and `RetryInfo` say the same in the form that foreign clients understand.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from outrider.codec.checks import duration
from outrider.errors import (
    DEFAULT_CLASSES,
    Code,
    Internal,
    InvalidRequest,
    OutriderError,
    ResourceExhausted,
    Unavailable,
    class_of,
    code_of,
)
from outrider.handshake import handshake_error
from outrider.redaction import redacted

DOMAIN = "outrider"
"""`ErrorInfo.domain` of every error of ours."""
MAX_MESSAGE_CHARS = 2000
"""A status travels as metadata, which gRPC limits to 8 KiB in all."""
CANCELLED_HERE = "Locally cancelled by application!"
"""What grpc.aio says of a call that this side has cancelled."""


def status_of(error: OutriderError) -> Status:
    """Describe an error as a `google.rpc.Status` with details."""
    message = redacted(error.message)[:MAX_MESSAGE_CHARS]
    details: list[Message] = [ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata())]
    if isinstance(error, InvalidRequest):
        violation = BadRequest.FieldViolation(field=error.field, description=message)
        details.append(BadRequest(field_violations=[violation]))
    if isinstance(error, ResourceExhausted):
        details.append(RetryInfo(retry_delay=duration(error.retry_delay_s)))
    return Status(code=code_of(error).value, message=message, details=[_packed(detail) for detail in details])


def error_of(status: Status) -> OutriderError:
    """Rebuild the error that a status with details describes."""
    for detail in status.details:
        info = ErrorInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            cls = class_of(info.reason)
            if cls is not None:
                return cls.rebuild(status.message, info.metadata)
    return _error_by_code(status.code, status.message)


def error_of_call(error: grpc.RpcError) -> OutriderError:
    """Turn a failed call into our error; one without our details (gRPC's own, or a proxy's) goes by its code.

    But a bare CANCELLED that is not of this side's making is what gRPC answers to a call that meets a server's end.
    """
    if not isinstance(error, grpc.aio.AioRpcError):
        return Internal(f"unexpected kind of RPC error: {error!r}")
    message = error.details() or ""
    try:
        status = rpc_status.from_call(error)
    except (ValueError, DecodeError):  # the details contradict the status, or are not a Status at all
        status = None
    if status is None:
        if error.code() is grpc.StatusCode.CANCELLED and message != CANCELLED_HERE:
            return Unavailable(f"the server dropped the call, as one does that stops: {message}")
        return handshake_error(message) or _error_by_code(error.code().value[0], message)
    return error_of(status)


@contextmanager
def rpc_errors() -> Iterator[None]:
    """Turn failed calls inside the block into `OutriderError`s.

    Raises:
        OutriderError: a call in the block failed.
    """
    try:
        yield
    except grpc.RpcError as error:
        raise error_of_call(error) from error


def _error_by_code(code: int, message: str) -> OutriderError:
    """Choose the class for a bare status code."""
    try:
        cls = DEFAULT_CLASSES[Code(code)]
    except ValueError:
        cls = Internal
    return cls.rebuild(message, {})


def _packed(message: Message) -> Any:
    """Wrap a detail for `Status.details`."""
    packed = Any()
    packed.Pack(message)
    return packed
