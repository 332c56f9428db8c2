"""From an error to its status code, and to the google.rpc.Status in a call's trailing metadata."""

from collections.abc import Mapping
from itertools import islice

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from rheostat_server.errors import (
    Aborted,
    AlreadyExists,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    OutOfRange,
    ResourceExhausted,
    RheostatError,
    Unavailable,
    Unimplemented,
)

DOMAIN = "rheostat.dev"
"""Domain of every ErrorInfo."""

# Statuses travel as headers, of which gRPC takes 8 KiB in all. There a byte of the message becomes
# three if it has to be escaped, and details grow by a third. A message is in up to three details.
_MESSAGE_BYTES = 512
_NAME_BYTES = 256
_METADATA_BYTES = 128
_METADATA_ENTRIES = 4


STATUS_CODES: Mapping[type[RheostatError], grpc.StatusCode] = {
    InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    NotFound: grpc.StatusCode.NOT_FOUND,
    FailedPrecondition: grpc.StatusCode.FAILED_PRECONDITION,
    ResourceExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    DataLoss: grpc.StatusCode.DATA_LOSS,
    OutOfRange: grpc.StatusCode.OUT_OF_RANGE,
    Aborted: grpc.StatusCode.ABORTED,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    Unimplemented: grpc.StatusCode.UNIMPLEMENTED,
    Internal: grpc.StatusCode.INTERNAL,
}
"""From exception to status code; a leaf has its branch's."""


def status_code(error: RheostatError) -> grpc.StatusCode:
    """The status code of an error."""
    for kind in type(error).__mro__:
        if kind in STATUS_CODES:
            return STATUS_CODES[kind]
    return grpc.StatusCode.INTERNAL


def to_status(error: RheostatError) -> status_pb2.Status:
    """The status of an error.

    Details are an ErrorInfo, then, as far as they apply: BadRequest, PreconditionFailure,
    ResourceInfo, RetryInfo. Texts are cut so that the status fits into a call's metadata.
    """
    message, field = _cut(error.message, _MESSAGE_BYTES), _cut(error.field, _NAME_BYTES)
    metadata = {
        _cut(key, _METADATA_BYTES): _cut(value, _METADATA_BYTES)
        for key, value in islice(error.metadata.items(), _METADATA_ENTRIES)
    }
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)
    ]
    if field:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=field, description=message, reason=error.reason
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, FailedPrecondition):
        failure = error_details_pb2.PreconditionFailure.Violation(
            type=error.reason, subject=field, description=message
        )
        details.append(error_details_pb2.PreconditionFailure(violations=[failure]))
    if error.resource is not None and isinstance(error, NotFound | AlreadyExists):
        details.append(
            error_details_pb2.ResourceInfo(
                resource_type=_cut(error.resource.kind, _NAME_BYTES),
                resource_name=_cut(error.resource.name, _NAME_BYTES),
                description=message,
            )
        )
    if error.retry_after is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(error.retry_after * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    number: int = status_code(error).value[0]
    return status_pb2.Status(
        code=number, message=message, details=[_packed(detail) for detail in details]
    )


def _cut(text: str, limit: int) -> str:
    """As much of a text as `limit` bytes hold."""
    return text.encode(errors="replace")[:limit].decode(errors="ignore")


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
