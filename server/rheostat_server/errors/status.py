"""From an error to the google.rpc.Status in a call's trailing metadata."""

from itertools import islice

from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from rheostat_server.errors import AlreadyExists, FailedPrecondition, NotFound, RheostatError

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
    return status_pb2.Status(
        code=code_pb2.Code.Value(error.code),
        message=message,
        details=[_packed(detail) for detail in details],
    )


def _cut(text: str, limit: int) -> str:
    """As much of a text as `limit` bytes hold."""
    return text.encode(errors="replace")[:limit].decode(errors="ignore")


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
