"""From an error to the google.rpc.Status in a call's trailing metadata."""

from functools import lru_cache
from itertools import islice

from google.protobuf import any, duration
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from rheostat_server.errors import (
    AlreadyExists,
    FailedPrecondition,
    NotFound,
    Resource,
    RheostatError,
)

DOMAIN = "rheostat.dev"
"""Domain of every ErrorInfo."""

# Statuses travel as headers, of which gRPC takes 8 KiB in all. There a byte of the message becomes
# three if it has to be escaped, and details grow by a third. A message is in up to three details.
_MESSAGE_BYTES = 512
_NAME_BYTES = 256
_METADATA_BYTES = 128
_METADATA_ENTRIES = 4


def to_status(error: RheostatError) -> status_pb2.Status:
    """The status of an error.

    Details are an ErrorInfo, then, as far as they apply: BadRequest, PreconditionFailure,
    ResourceInfo, RetryInfo. Texts are cut so that the status fits into a call's metadata.
    """
    resource = error.resource if isinstance(error, NotFound | AlreadyExists) else None
    if resource is not None:
        resource = Resource(_cut(resource.kind, _NAME_BYTES), _cut(resource.name, _NAME_BYTES))
    cached = _status(
        error.code,
        error.reason,
        _cut(error.message, _MESSAGE_BYTES),
        _cut(error.field, _NAME_BYTES),
        tuple(
            (_cut(key, _METADATA_BYTES), _cut(value, _METADATA_BYTES))
            for key, value in islice(error.metadata.items(), _METADATA_ENTRIES)
        ),
        isinstance(error, FailedPrecondition),
        resource,
        error.retry_after,
    )
    status = status_pb2.Status()
    status.CopyFrom(cached)  # the caller may change it
    return status


@lru_cache(maxsize=64)
def _status(
    code: str,
    reason: str,
    message: str,
    field: str,
    metadata: tuple[tuple[str, str], ...],
    failed_precondition: bool,
    resource: Resource | None,
    retry_after: float | None,
) -> status_pb2.Status:
    """The status with this content, whose texts are already cut.

    Cached, because a client may get a thousand equal refusals at once, and packing the details
    takes most of the time of a refusal.
    """
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=dict(metadata))
    ]
    if field:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=field, description=message, reason=reason
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if failed_precondition:
        failure = error_details_pb2.PreconditionFailure.Violation(
            type=reason, subject=field, description=message
        )
        details.append(error_details_pb2.PreconditionFailure(violations=[failure]))
    if resource is not None:
        details.append(
            error_details_pb2.ResourceInfo(
                resource_type=resource.kind,
                resource_name=resource.name,
                description=message,
            )
        )
    if retry_after is not None:
        delay = duration.from_milliseconds(round(retry_after * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return status_pb2.Status(
        code=code_pb2.Code.Value(code),
        message=message,
        details=map(any.pack, details),
    )


def _cut(text: str, limit: int) -> str:
    """As much of a text as `limit` bytes hold."""
    return text.encode(errors="replace")[:limit].decode(errors="ignore")
