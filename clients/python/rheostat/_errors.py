"""Every error that this package raises, server-side and client-side alike.

    RheostatError
    ├── InvalidRequest      INVALID_ARGUMENT     the request is wrong; `path` says where
    ├── NotFound            NOT_FOUND            no such vector, name, run, request, adapter
    ├── AlreadyExists       ALREADY_EXISTS       a running request has this id
    ├── Refused             FAILED_PRECONDITION  this model or configuration cannot do it
    ├── ResourceExhausted   RESOURCE_EXHAUSTED   bank, queue, store, message size; `retry_after`
    ├── OutOfRange          OUT_OF_RANGE         a cursor fell out of the replay window
    ├── DataLoss            DATA_LOSS            rows are gone
    ├── Aborted             ABORTED              another call took over
    ├── Cancelled           CANCELLED            the call was cancelled
    ├── DeadlineExceeded    DEADLINE_EXCEEDED    the timeout passed
    ├── Unavailable         UNAVAILABLE          no server there, warming up, draining
    ├── Unauthenticated     UNAUTHENTICATED      no token or certificate that is known
    ├── PermissionDenied    PERMISSION_DENIED    the caller lacks the role
    ├── Unimplemented       UNIMPLEMENTED        this server does not have this
    └── ServerError         INTERNAL, UNKNOWN    a defect of the server

The class follows from the status code alone, so a reason that a newer server invents still lands
in the right place; `reason` tells cases of one class apart. What the client can check before it
sends raises the same classes with the same reasons.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

_DETAILS_KEY = "grpc-status-details-bin"
_DOMAIN = "rheostat.dev"
_WARMING_UP = "REASON_WARMING_UP"
_NO_SUBSCRIPTION = "REASON_SUBSCRIPTION_NOT_FOUND"

START_ONE = "start one with rheostat serve MODEL, or connect to where one runs"
"""Advice if no server answers."""

CANCELLED_HERE = "the call was cancelled in this program, so it has no result"
"""The error text of a call that cancel(), close(), the end of its block or Ctrl-C ended."""
_CANCELLED_HERE = ("Locally cancelled by application!", "Channel closed!")
"""The texts that gRPC gives such a call."""

_CAUSES = (
    (
        re.compile(r"Failed parsing HTTP/2|http1\.x server"),
        "something else listens there, which does not speak gRPC",
    ),
    (re.compile(r"Connection refused"), "nothing listens there"),
    (re.compile(r"DNS|resolv|lookup failed"), "its host is not known"),
    (re.compile(r"No route|unreachable"), "its host cannot be reached"),
    (re.compile(r"[Tt]ime(d )?out|Deadline|FD Shutdown"), "its host does not answer"),
    (re.compile(r"removed|ocket closed|recvmsg|reset by|pipe|GOAWAY"), "the connection was lost"),
)
"""What gRPC says of a connection that fails, in words. The first that matches holds."""

_ARGUMENTS = (
    (re.compile(r"^(captures|open\.captures)\b"), "capture"),
    (re.compile(r"^open\.credit_bytes$"), "credit"),
    (re.compile(r"^policy\."), ""),
    (re.compile(r"^lora_name$"), "lora"),
    (re.compile(r"\.projection\.readouts\.readouts(\[\d+\])\.vector"), r".projection\1"),
    (re.compile(r"\.read\.vector\b"), ".direction"),
    (re.compile(r"^open\.filter\.(requests|labels)\.\w+"), r"\1"),
    (re.compile(r"^open\."), ""),
    (re.compile(r"\.sites\.list\."), "."),
)
"""Parts of a field path on the wire, and the Python argument that each corresponds to."""
_WORD = re.compile(r"\b(ENCODING|OVERLOAD|LAYOUT|DTYPE)_([A-Z0-9_]+)")
"""A word of the wire that is the value of an argument in Python."""

_ADVICE = {
    "grant at least as much, or 0 now and more later": "give credit= at least as much",
    "or row_layers that say which layer each row belongs to": (
        "or to be stored with layers=, which say the layer of each"
    ),
    ", or say with row_layers which layer each row is for": "",
}
"""What a server advises callers of the wire, and what works in Python."""


class Violation(NamedTuple):
    """One thing that is wrong with a request."""

    path: str
    """Field of the request, e.g. ``steering.interventions[2].where``; or what a precondition
    concerns."""
    description: str
    """A sentence that describes the error."""


class Resource(NamedTuple):
    """A resource that was not found, or that already exists."""

    type: str
    """Kind of thing: "vector", "run", ..."""
    name: str
    """Its name or digest."""


class RheostatError(Exception):
    """Base of all errors. Holds everything that the server said."""

    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN
    """gRPC status code; the same for every error of a class."""

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        violations: Iterable[Violation] = (),
        metadata: Mapping[str, str] | None = None,
        resource: Resource | None = None,
        retry_after: float | None = None,
        details: str = "",
    ) -> None:
        super().__init__(message)
        self.message: str = message
        """A sentence for people."""
        self.reason: str = reason
        """Name of a `Reason` of the wire, e.g. "REASON_UNKNOWN_LAYER"; "" if none was given."""
        self.violations: tuple[Violation, ...] = tuple(dict.fromkeys(violations))
        """Fields or preconditions that are violated, each once."""
        self.metadata: dict[str, str] = dict(metadata or {})
        """What the reason's comment promises, e.g. {"layers": "8"}."""
        self.resource: Resource | None = resource
        """What the error is about, if it names one thing."""
        self.retry_after: float | None = retry_after
        """Seconds after which trying again may help; None if the server gave no hint."""
        self.details: str = details
        """gRPC's own words, for a bug report, where no server said anything; else ""."""

    @property
    def path(self) -> str:
        """Path of the first violated field; "" if there is none."""
        return self.violations[0].path if self.violations else ""

    def __str__(self) -> str:
        """The message, the argument it concerns and the reason, on one line."""
        path = _argument(self.path)
        where = f" (at {path})" if path and path not in self.message else ""
        reason = f" [{self.reason}]" if self.reason else ""
        return f"{self.message}{where}{reason}"


class InvalidRequest(RheostatError):
    """The request is wrong in itself, whatever the state of the server."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class NotFound(RheostatError):
    """Something that the request names does not exist."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(RheostatError):
    """An id is in use."""

    code = grpc.StatusCode.ALREADY_EXISTS


class Refused(RheostatError):
    """This model, site, op or configuration cannot do it; the message says what can."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class ResourceExhausted(RheostatError):
    """Something is full or too large; `retry_after` is set if waiting helps."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class OutOfRange(RheostatError):
    """A cursor points at something that is no longer held."""

    code = grpc.StatusCode.OUT_OF_RANGE


class DataLoss(RheostatError):
    """Rows are gone that no policy allowed to lose."""

    code = grpc.StatusCode.DATA_LOSS


class Aborted(RheostatError):
    """Another call took this one's place."""

    code = grpc.StatusCode.ABORTED


class Cancelled(RheostatError):
    """The call was cancelled."""

    code = grpc.StatusCode.CANCELLED


class DeadlineExceeded(RheostatError):
    """The timeout passed first; the server aborted the request."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Unavailable(RheostatError):
    """No server answers at the target, or it admits nothing now."""

    code = grpc.StatusCode.UNAVAILABLE


class Unauthenticated(RheostatError):
    """The server does not know the caller."""

    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(RheostatError):
    """The caller lacks the role that the call needs."""

    code = grpc.StatusCode.PERMISSION_DENIED


class Unimplemented(RheostatError):
    """This server does not have this rpc or feature."""

    code = grpc.StatusCode.UNIMPLEMENTED


class ServerError(RheostatError):
    """A defect of the server, or an answer that breaks the contract."""

    code = grpc.StatusCode.INTERNAL


_BY_CODE = {error.code: error for error in RheostatError.__subclasses__()}
_BY_NUMBER = {code.value[0]: error for code, error in _BY_CODE.items()}


def invalid(path: str, description: str, reason: str = "REASON_INVALID_VALUE") -> InvalidRequest:
    """The error of a client-side check on the field at ``path``."""
    return InvalidRequest(description, reason=reason, violations=(Violation(path, description),))


def from_rpc(
    error: grpc.RpcError, target: str, timeout: float | None, *, begun: bool = False
) -> RheostatError:
    """The error of a call to ``target`` that failed, with the details in its trailers.

    ``timeout`` is what the call was given, in seconds; ``begun``: part of the answer had come.
    """
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return ServerError(str(error))
    code = error.code()
    kind = _BY_CODE.get(code, ServerError)
    details = _Details.of(_status_in(error.trailing_metadata() or ()))
    text = _in_python(error.details() or f"the call failed with {code.name}")
    if kind is Unavailable and not details.reason:  # a server of ours gives one
        lost = (
            f"the connection to {target} was lost before the answer had ended; send the request "
            "again once engine.wait_until_ready() has returned"
        )
        return kind(lost if begun else f"{unanswered(target, text)}; {START_ONE}", details=text)
    if kind is Cancelled and text in _CANCELLED_HERE:
        return kind(CANCELLED_HERE, details=text)
    if kind is DeadlineExceeded and timeout is not None:
        what = "the answer did not end" if begun else "no answer"
        message = f"{what} within the timeout of {timeout:g} s"
        return kind(message, reason=details.reason, details=text)
    if details.reason == _WARMING_UP:
        text += " (engine.wait_until_ready() waits for it)"
    if details.reason == _NO_SUBSCRIPTION and details.names_a_target and details.resource:
        text += f' (rows go to a sink by to=rheostat.Sink("{details.resource.name}"))'
    return details.error(kind, text)


def from_status(status: status_pb2.Status) -> RheostatError:
    """The error that a stream reports while the call goes on."""
    kind = _BY_NUMBER.get(status.code, ServerError)
    return _Details.of(status).error(kind, _in_python(status.message))


def unanswered(target: str, details: str) -> str:
    """That no server answers at ``target``, and why: ``said`` are gRPC's words."""
    return f"no server answers at {target}: {cause(details)}"


def cause(details: str) -> str:
    """Why there is no connection, in words, where gRPC's are known."""
    return next((ours for theirs, ours in _CAUSES if theirs.search(details)), details)


def _argument(path: str) -> str:
    """The path of a field as its argument is written."""
    for wire, ours in _ARGUMENTS:
        path = wire.sub(ours, path)
    return path


def _in_python(message: str) -> str:
    """A server's sentence with advice and words of the wire as arguments are written."""
    for wire, ours in _ADVICE.items():
        message = message.replace(wire, ours)
    return _WORD.sub(lambda word: f'{word[1].lower()}="{word[2].lower()}"', message)


def _status_in(trailers: Iterable[tuple[str, str | bytes]]) -> status_pb2.Status:
    """The status in a call's trailers; empty if there is none that can be read."""
    status = status_pb2.Status()
    for key, value in trailers:
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                status.ParseFromString(value)
            except DecodeError:
                return status_pb2.Status()
    return status


class _Details(NamedTuple):
    """The details of a google.rpc.Status, those of them that this package knows."""

    reason: str = ""
    metadata: Mapping[str, str] = {}
    violations: tuple[Violation, ...] = ()
    resource: Resource | None = None
    retry_after: float | None = None

    @property
    def names_a_target(self) -> bool:
        """Whether it is about where the rows of a request's captures go."""
        return any(violation.path.startswith("captures[") for violation in self.violations)

    def error(self, kind: type[RheostatError], message: str) -> RheostatError:
        """The error with these details."""
        return kind(
            message,
            reason=self.reason,
            violations=self.violations,
            metadata=self.metadata,
            resource=self.resource,
            retry_after=self.retry_after,
        )

    @classmethod
    def of(cls, status: status_pb2.Status) -> _Details:
        details = cls()
        info = error_details_pb2.ErrorInfo()
        fields = error_details_pb2.BadRequest()
        unmet = error_details_pb2.PreconditionFailure()
        resource = error_details_pb2.ResourceInfo()
        retry = error_details_pb2.RetryInfo()
        for detail in status.details:
            if detail.Unpack(info) and info.domain == _DOMAIN:
                details = details._replace(reason=info.reason, metadata=dict(info.metadata))
            elif detail.Unpack(fields):
                rows = tuple(Violation(v.field, v.description) for v in fields.field_violations)
                details = details._replace(violations=details.violations + rows)
            elif detail.Unpack(unmet):
                rows = tuple(Violation(v.subject, v.description) for v in unmet.violations)
                details = details._replace(violations=details.violations + rows)
            elif detail.Unpack(resource):
                details = details._replace(
                    resource=Resource(resource.resource_type, resource.resource_name)
                )
            elif detail.Unpack(retry):
                details = details._replace(
                    retry_after=retry.retry_delay.ToTimedelta().total_seconds()
                )
        return details
