"""From an error to the google.rpc.Status that travels in a call's trailing metadata."""

from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from rheostat_server.errors import (
    AlreadyExists,
    FailedPrecondition,
    NotFound,
    RheostatError,
    status_code,
)

DOMAIN = "rheostat"
"""Domain of every ErrorInfo."""

DETAILS_KEY = "grpc-status-details-bin"
"""Key of the trailing metadata that holds the status."""

_TEXT_LIMIT = 512
"""Characters of a text; statuses travel as headers, which gRPC limits to some KiB in all."""


def to_status(error: RheostatError) -> status_pb2.Status:
    """The status of an error.

    Details are an ErrorInfo, then, as far as they apply: BadRequest, PreconditionFailure,
    ResourceInfo, RetryInfo.
    """
    message, field = error.message[:_TEXT_LIMIT], error.field[:_TEXT_LIMIT]
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
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
                resource_type=error.resource.kind,
                resource_name=error.resource.name[:_TEXT_LIMIT],
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


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
