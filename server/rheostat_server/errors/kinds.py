"""The root of all errors, and its branches."""

from collections.abc import Mapping
from typing import ClassVar, NamedTuple


class Resource(NamedTuple):
    """What was not found, or exists already."""

    kind: str
    name: str


class RheostatError(Exception):
    """A call that cannot be served, and why."""

    reason: ClassVar[str] = "REASON_INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        metadata: Mapping[str, str] | None = None,
        resource: Resource | None = None,
        retry_after: float | None = None,
    ) -> None:
        """An error with its details.

        Args:
            message: a sentence for people.
            field: path of the request's field concerned, e.g. "steering.interventions[2].where".
            metadata: further facts, as `Reason` documents them.
            resource: what was not found or exists already.
            retry_after: seconds after which another attempt makes sense.
        """
        super().__init__(message)
        self.message = message
        self.field = field
        self.metadata = dict(metadata or {})
        self.resource = resource
        self.retry_after = retry_after


class InvalidArgument(RheostatError):
    """The request is wrong whatever the server's state."""


class AlreadyExists(RheostatError):
    """An id is taken."""


class NotFound(RheostatError):
    """Something that the request names is not there."""


class FailedPrecondition(RheostatError):
    """This model or configuration cannot do it."""


class ResourceExhausted(RheostatError):
    """There is no room."""


class DataLoss(RheostatError):
    """Something is gone for good."""


class OutOfRange(RheostatError):
    """What is asked for is not kept any more."""


class Aborted(RheostatError):
    """Another call has taken over."""


class DeadlineExceeded(RheostatError):
    """There was no time."""


class Unavailable(RheostatError):
    """The server does not serve, now or for good."""


class Unimplemented(RheostatError):
    """The server does not have it."""


class Internal(RheostatError):
    """A defect."""
