"""Every error that this package raises, whether the server or the client detects it.

    RheostatError
    ├── InvalidRequest      INVALID_ARGUMENT     the request is wrong; `path` names the field
    ├── NotFound            NOT_FOUND            no such vector, name, run, request, adapter
    ├── AlreadyExists       ALREADY_EXISTS       a running request, or a run, has this id
    ├── Refused             FAILED_PRECONDITION  this model or configuration does not support it
    ├── ResourceExhausted   RESOURCE_EXHAUSTED   bank, queue, store, message size; `retry_after`
    ├── OutOfRange          OUT_OF_RANGE         a cursor fell out of the replay window
    ├── DataLoss            DATA_LOSS            rows are gone
    ├── Aborted             ABORTED              another call took over
    ├── Cancelled           CANCELLED            the call was cancelled
    ├── DeadlineExceeded    DEADLINE_EXCEEDED    the timeout passed
    ├── Unavailable         UNAVAILABLE          no server answers, or it warms up or drains
    ├── Unauthenticated     UNAUTHENTICATED      the server does not accept the token or certificate
    ├── PermissionDenied    PERMISSION_DENIED    the caller lacks the role
    ├── Unimplemented       UNIMPLEMENTED        this server lacks the rpc or feature
    └── ServerError         INTERNAL, UNKNOWN    a defect of the server

The status code alone decides the class, so a reason that only newer servers send gets the right
class too. `reason` distinguishes cases of one class. Checks in the client raise the same classes
with the same reasons.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

_DETAILS_KEY = "grpc-status-details-bin"
_DOMAIN = "rheostat.dev"
_WARMING_UP = "REASON_WARMING_UP"
_NO_SUBSCRIPTION = "REASON_SUBSCRIPTION_NOT_FOUND"
_NO_NAME = "REASON_NAME_NOT_FOUND"

START_ONE = "start one with rheostat serve MODEL, or connect to a running one"
"""Advice if no server answers."""

LIST_VECTORS = " (engine.vectors.list() shows what is stored)"
"""Advice if no vector has a name."""

CANCELLED_HERE = "the call was cancelled in this program, so it has no result"
"""The error text of a call that cancel(), close(), the end of its block or Ctrl-C ended."""
_CANCELLED_HERE = (
    "Locally cancelled by application!",
    "Channel closed!",
    "Stream removed (Channel closed!)",  # if its answer has begun
)
"""The details that gRPC gives such a call."""

_UNBEGUN = "CANCELLED"
"""The details that gRPC gives a call if it drops it before the server has begun it."""

_CAUSES = (
    (
        re.compile(r"Failed parsing HTTP/2|http1\.x server"),
        "something else listens there, which does not speak gRPC",
    ),
    (re.compile(r"Connection refused"), "nothing listens there"),
    (re.compile(r"DNS|resolv|lookup failed"), "its host name cannot be resolved"),
    (re.compile(r"No route|unreachable"), "its host cannot be reached"),
    (re.compile(r"[Tt]ime(d )?out|Deadline|FD Shutdown"), "its host does not answer"),
    (re.compile(r"removed|ocket closed|recvmsg|reset by|pipe|GOAWAY"), "the connection was lost"),
)
"""Patterns of gRPC's details of a failed connection, and their causes. The first match counts."""

_FIELDS = {
    "baseline_count": "baselines",
    "combine_sites": "combine",
    "expected_digest": "expected",
    "group_labels": "groups",
    "layer_window": "window",
    "lora_name": "lora",
    "max_concurrent_cells": "concurrency",
    "minus_token_id": "minus",
    "name_prefix": "prefix",
    "noise_count": "count",
}
"""Protobuf fields, and the Python arguments of another name."""
_ARGUMENTS = (
    (re.compile(r"^(captures|open\.captures)\b"), "capture"),
    (re.compile(r"^(capture\[\d+\])\.(sink|run)\b(\.(sink_name|run_id))?"), r"\1.to"),
    (re.compile(r"^steering\.interventions\b"), "steering"),
    (re.compile(r"^open\.credit_bytes$"), "credit"),
    (re.compile(r"^(policy|sampling|header)\."), ""),
    (re.compile(r"^(text$|chat$|chat\.messages\b|token_ids\.ids\b)"), "prompt"),
    (re.compile(r"\.projection\.readouts\.readouts(\[\d+\])\.vector"), r".projection\1"),
    (re.compile(r"^(grades\[\d+\])\.token\.metric"), r"\1"),
    (re.compile(r"^(grades\[\d+\])(\.probe)+(\.read)?"), r"\1"),
    (re.compile(r"^(pairs\[\d+\])\.(noise|zeros|mean|run_id)\b"), r"\1.corrupt"),
    (re.compile(r"^(pairs\[\d+\]\.\w+)\.alternatives(\[\d+\])?(\.ids)?"), r"\1\2"),
    (re.compile(r"\.read\.vector\b"), ".direction"),
    (re.compile(r"^open\.filter\.(requests|labels)\.\w+"), r"\1"),
    (re.compile(r"^open\."), ""),
    (re.compile(r"\bsites\.(list\.)?(points|layers)\b"), r"\2"),
    *((re.compile(rf"\b{field}\b"), argument) for field, argument in _FIELDS.items()),
)
"""Parts of a protobuf field path, and the Python argument that each corresponds to."""
_ENUMS = {
    "ACTIVATION": "activation",
    "COMBINE": "combine",
    "DERIVE_METHOD": "method",
    "DTYPE": "dtype",
    "ENCODING": "encoding",
    "FIT_DIRECTION": "directions",
    "LAYOUT": "layout",
    "NORMALISE": "normalise",
    "OVERLOAD": "overload",
    "POOL": "pool",
}
"""Protobuf enums of which errors name values, and the Python argument that takes each."""
_ENUM_VALUE = re.compile(rf"\b({'|'.join(_ENUMS)})_([A-Z0-9_]+)")
"""A protobuf enum value, and in its groups the enum and the value of the Python argument."""
_METRIC = re.compile(r"\bMETRIC_([A-Z_]+)")
"""A grade of a sweep, and in its group the word for it."""

_ADVICE = {
    "grant at least as much, or 0 now and more later": "give credit= at least as much",
    "or row_layers that say which layer each row belongs to": (
        "or to be stored with layers=, which say the layer of each"
    ),
    ", or say with row_layers which layer each row is for": "",
}
"""Advice in a server's errors, which names protobuf fields, and the advice for Python callers."""


class Violation(NamedTuple):
    """One error in a request."""

    path: str
    """Field of the request, e.g. ``steering.interventions[2].where``, or subject of a
    precondition."""
    description: str


class Resource(NamedTuple):
    """A resource that was not found, or that already exists."""

    type: str
    """Kind of resource: "vector", "run", ..."""
    name: str


class RheostatError(Exception):
    """Base of all errors, with all details that the server sent."""

    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN
    """gRPC status code, the same for every error of a class."""

    def __init_subclass__(cls, code: grpc.StatusCode | None = None) -> None:
        cls.code = code or cls.code

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
        """Name of a `Reason` of errors.proto, e.g. "REASON_UNKNOWN_LAYER"; "" if none was given."""
        self.violations: tuple[Violation, ...] = tuple(dict.fromkeys(violations))
        """Violated fields or preconditions, each once."""
        self.metadata: dict[str, str] = dict(metadata or {})
        """Values that errors.proto documents for the reason, e.g. {"layers": "8"}."""
        self.resource: Resource | None = resource
        """The resource that is missing or exists already, if there is one."""
        self.retry_after: float | None = retry_after
        """Seconds after which a retry may succeed; None if the server gave no hint."""
        self.details: str = details
        """gRPC's own error text, for bug reports, if no server answered; else ""."""

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


class InvalidRequest(RheostatError, code=grpc.StatusCode.INVALID_ARGUMENT):
    """The request is wrong, whatever the state of the server."""


class NotFound(RheostatError, code=grpc.StatusCode.NOT_FOUND):
    """The request names something that does not exist."""


class AlreadyExists(RheostatError, code=grpc.StatusCode.ALREADY_EXISTS):
    """An id is in use."""


class Refused(RheostatError, code=grpc.StatusCode.FAILED_PRECONDITION):
    """This model, site, op or configuration does not support it; the message names what does."""


class ResourceExhausted(RheostatError, code=grpc.StatusCode.RESOURCE_EXHAUSTED):
    """Something is full or too large; `retry_after` is set if waiting helps."""


class OutOfRange(RheostatError, code=grpc.StatusCode.OUT_OF_RANGE):
    """A cursor points at an event that the server no longer stores."""


class DataLoss(RheostatError, code=grpc.StatusCode.DATA_LOSS):
    """Rows were lost although no overload policy allowed it."""


class Aborted(RheostatError, code=grpc.StatusCode.ABORTED):
    """Another call replaced this call."""


class Cancelled(RheostatError, code=grpc.StatusCode.CANCELLED):
    """The call was cancelled."""


class DeadlineExceeded(RheostatError, code=grpc.StatusCode.DEADLINE_EXCEEDED):
    """The timeout passed first; the server aborted the request."""


class Unavailable(RheostatError, code=grpc.StatusCode.UNAVAILABLE):
    """No server answers at the target, or it admits no requests now."""


class Unauthenticated(RheostatError, code=grpc.StatusCode.UNAUTHENTICATED):
    """The server does not accept the caller's token or certificate."""


class PermissionDenied(RheostatError, code=grpc.StatusCode.PERMISSION_DENIED):
    """The caller lacks the role that the call needs."""


class Unimplemented(RheostatError, code=grpc.StatusCode.UNIMPLEMENTED):
    """This server does not have this rpc or feature."""


class ServerError(RheostatError, code=grpc.StatusCode.INTERNAL):
    """A defect of the server, or an answer that violates the protocol."""


_BY_CODE = {error.code: error for error in RheostatError.__subclasses__()}
_BY_NUMBER = {code.value[0]: error for code, error in _BY_CODE.items()}


def invalid(path: str, description: str, reason: str = "REASON_INVALID_VALUE") -> InvalidRequest:
    """The error of a check in the client of the field at ``path``."""
    return InvalidRequest(description, reason=reason, violations=(Violation(path, description),))


def missing_library(what: str, error: ModuleNotFoundError, extra: str) -> Refused:
    """The error of ``what`` that needs an optional library, which an extra brings."""
    return Refused(
        f"{what} needs {error.name}: pip install {error.name}, or, in a checkout, "
        f"pip install '.[{extra}]'"
    )


def from_rpc(
    error: grpc.RpcError, target: str, timeout: float | None, *, begun: bool = False
) -> RheostatError:
    """The error of a failed call to ``target``, with the details in its trailers.

    ``timeout`` is that of the call, in seconds; ``begun``: part of the answer had arrived.
    """
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return ServerError(str(error))
    code = error.code()
    kind = _BY_CODE.get(code, ServerError)
    details = _Details.of(_status_in(error.trailing_metadata() or ()))
    text = _in_python(error.details() or f"the call failed with {code.name}")
    if kind is Unavailable and not details.reason:  # a Rheostat server always gives a reason
        lost = (
            f"the connection to {target} was lost before the answer had ended; send the request "
            "again once engine.wait_until_ready() has returned"
        )
        return kind(lost if begun else f"{unanswered(target, text)}; {START_ONE}", details=text)
    if kind is Unimplemented and not details.reason:  # also from a Rheostat server without the rpc
        message = (
            f"{target} does not know this call: no Rheostat server listens there, or an older one, "
            "or a proxy does not pass it on"
        )
        return kind(message, details=text)
    if kind is Cancelled and text in _CANCELLED_HERE:
        return kind(CANCELLED_HERE, details=text)
    if text == _UNBEGUN and not (begun or details.reason):
        message = (
            f"{target} cancelled the call before it began: it ends, or thousands of calls began at "
            "the same time; send the request again"
        )
        return kind(message, details=text)
    if kind is DeadlineExceeded and timeout is not None:
        what = "the answer did not end" if begun else "no answer"
        message = f"{what} within the timeout of {timeout:g} s"
        return kind(message, reason=details.reason, details=text)
    if details.reason == _WARMING_UP:
        text += " (engine.wait_until_ready() waits for it)"
    if details.reason == _NO_NAME:
        text += LIST_VECTORS
    of_capture = any(violation.path.startswith("captures[") for violation in details.violations)
    if details.reason == _NO_SUBSCRIPTION and of_capture and details.resource:
        text += f' (rows go to a sink by to=rheostat.Sink("{details.resource.name}"))'
    return details.error(kind, text)


def from_status(status: status_pb2.Status) -> RheostatError:
    """The error that a stream reports while its call continues."""
    kind = _BY_NUMBER.get(status.code, ServerError)
    return _Details.of(status).error(kind, _in_python(status.message))


def unanswered(target: str, details: str) -> str:
    """The text that no server answers at ``target``, with the cause in gRPC's ``details``."""
    return f"no server answers at {target}: {cause(details)}"


def cause(details: str) -> str:
    """The cause of a failed connection in plain words; unknown details stay as they are."""
    return next((text for pattern, text in _CAUSES if pattern.search(details)), details)


def _argument(path: str) -> str:
    """The Python argument that a protobuf field path corresponds to."""
    for pattern, argument in _ARGUMENTS:
        path = pattern.sub(argument, path)
    return path


def _in_python(message: str) -> str:
    """A server's message, whose protobuf fields and enum values become Python arguments."""
    for advice, python_advice in _ADVICE.items():
        message = message.replace(advice, python_advice)
    message = _METRIC.sub(lambda match: f'"{match[1].lower()}"', message)
    return _ENUM_VALUE.sub(lambda match: f'{_ENUMS[match[1]]}="{match[2].lower()}"', message)


def _status_in(trailers: Iterable[tuple[str, str | bytes]]) -> status_pb2.Status:
    """The status in the trailers of a call; empty if there is none, or if it cannot be parsed."""
    status = status_pb2.Status()
    for key, value in trailers:
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                status.ParseFromString(value)
            except DecodeError:
                return status_pb2.Status()
    return status


@dataclass
class _Details:
    """The details of a google.rpc.Status that this package understands."""

    reason: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    violations: list[Violation] = field(default_factory=list)
    resource: Resource | None = None
    retry_after: float | None = None

    def error(self, kind: type[RheostatError], message: str) -> RheostatError:
        """The error with these details."""
        return kind(message, **vars(self))

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
                details.reason, details.metadata = info.reason, dict(info.metadata)
            elif detail.Unpack(fields):
                wrong = fields.field_violations
                details.violations += [Violation(v.field, v.description) for v in wrong]
            elif detail.Unpack(unmet):
                wanted = unmet.violations
                details.violations += [Violation(v.subject, v.description) for v in wanted]
            elif detail.Unpack(resource):
                details.resource = Resource(resource.resource_type, resource.resource_name)
            elif detail.Unpack(retry):
                details.retry_after = retry.retry_delay.ToTimedelta().total_seconds()
        return details
