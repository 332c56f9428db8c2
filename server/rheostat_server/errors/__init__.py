"""The errors of calls, as a tree of status codes and reasons.

    RheostatError
    ├── InvalidArgument
    │   ├── MissingField · InvalidValue · UnknownEnum · UnknownField · NonFinite
    │   ├── EmptySelector · InvalidPosition · SpanNotFound · SpanAmbiguous
    │   ├── UnknownLayer · UnknownToken · PromptTooLong
    │   └── TensorPayload · VectorShape · ZeroVector · DigestMismatch · TruncatedUpload
    ├── AlreadyExists ── DuplicateRequest · RunExists · ArtifactExists
    ├── NotFound
    │   ├── VectorNotFound · NameNotFound · RunNotFound · RequestNotFound · LoraNotFound
    │   └── SubscriptionNotFound · SinkNotFound · ArtifactNotFound · ControllerNotFound
    ├── FailedPrecondition
    │   ├── SiteNotServed · OpNotServed · NotSupported · NoTokenizer · NoChatTemplate
    │   └── VersionConflict · NameConflict · RunInUse · ControllerDisabled
    ├── ResourceExhausted ── BankFull · QueueFull · StoreFull · MessageTooLarge · CaptureOverflow
    │                        · ResponseOverflow
    ├── DataLoss ── RowsLost
    ├── OutOfRange ── CursorExpired
    ├── Aborted ── Superseded
    ├── DeadlineExceeded ── DeadlinePassed
    ├── Unavailable ── WarmingUp · Draining · EngineLost · CacheSuspect
    ├── Unimplemented ── NotImplementedHere
    └── Internal ── Defect

A branch has the name of its gRPC status code. A leaf has the name of its value of
`rheostat.v1.Reason`, unless it sets a different value. For example, UnknownLayer is
INVALID_ARGUMENT with REASON_UNKNOWN_LAYER. Texts are for people and contain no Python reprs.
Errors that keep the server from starting, or end it, are at the end of this module.
"""

import errno
import re
from collections.abc import Mapping
from typing import ClassVar, NamedTuple


class Resource(NamedTuple):
    """A resource that was not found, or that already exists."""

    kind: str
    name: str


class RheostatError(Exception):
    """A call that cannot be served, and why."""

    code: ClassVar[str] = "INTERNAL"
    """The name of the status code."""
    reason: ClassVar[str] = "REASON_INTERNAL"

    def __init_subclass__(cls) -> None:
        """Derives a branch's code, or a leaf's reason, from the name of the class."""
        name, base = re.sub(r"\B(?=[A-Z])", "_", cls.__name__).upper(), cls.__mro__[1]
        if base is RheostatError:
            cls.code = name
        elif RheostatError in base.__bases__ and "reason" not in vars(cls):
            cls.reason = f"REASON_{name}"

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
    """The server no longer keeps the requested item."""


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


class MissingField(InvalidArgument):
    """A required field or oneof is not set."""


class InvalidValue(InvalidArgument):
    """A value is outside its limits, malformed, repeated or at odds with another."""


class UnknownEnum(InvalidArgument):
    """An enum is unspecified or has an unknown value."""


class UnknownField(InvalidArgument):
    """A message has a field that this server does not know."""


class NonFinite(InvalidArgument):
    """A number is infinite or not a number."""


class EmptySelector(InvalidArgument):
    """A selector is present and has no range."""


class InvalidPosition(InvalidArgument):
    """A position lies outside the request, or a window is empty."""


class SpanNotFound(InvalidArgument):
    """A span's text, or its occurrence, is not in the prompt."""


class SpanAmbiguous(InvalidArgument):
    """A span's text occurs more than once and no occurrence was chosen."""


class UnknownLayer(InvalidArgument):
    """A layer is not below the number of layers."""


class UnknownToken(InvalidArgument):
    """A token id is not below the vocabulary's size."""


class TensorPayload(InvalidArgument):
    """A tensor's payload does not fit its dtype, shape, encoding or checksum."""


class VectorShape(InvalidArgument):
    """A vector has the wrong rank, width or number of rows."""


class ZeroVector(InvalidArgument):
    """A vector that is normalised is zero."""


class GateOrder(InvalidArgument):
    """A probe is read after the site at which its gate acts."""


class DigestMismatch(InvalidArgument):
    """An upload's bytes do not have the digest that its header gives."""


class TruncatedUpload(InvalidArgument):
    """An upload ended early."""


class PromptTooLong(InvalidArgument):
    """Prompt and max_tokens exceed the context length."""


class DuplicateRequest(AlreadyExists):
    """A running request has this id."""


class RunExists(AlreadyExists):
    """A run has this id."""


class ArtifactExists(AlreadyExists):
    """The sink holds rows under this request id and tag."""


class VectorNotFound(NotFound):
    """No vector with this digest is stored."""


class NameNotFound(NotFound):
    """No vector has this name."""


class RunNotFound(NotFound):
    """No run has this id; it may have been evicted."""


class RequestNotFound(NotFound):
    """No such request is running."""


class LoraNotFound(NotFound):
    """No such adapter is loaded."""


class SubscriptionNotFound(NotFound):
    """There is no such subscription, open or resumable."""


class WatchNotFound(NotFound):
    """There is no such watch, open or resumable."""


class ControllerNotFound(NotFound):
    """The server has no such controller."""


class SinkNotFound(NotFound):
    """The server has no such sink."""


class ArtifactNotFound(NotFound):
    """No sink wrote anything for the request."""


class SiteNotServed(FailedPrecondition):
    """The model has no such site."""


class OpNotServed(FailedPrecondition):
    """The op cannot be done at this site."""


class NotSupported(FailedPrecondition):
    """This configuration cannot do it."""


class NoTokenizer(FailedPrecondition):
    """The server has no tokenizer."""


class NoChatTemplate(FailedPrecondition):
    """The model has no chat template."""


class VersionConflict(FailedPrecondition):
    """The server-wide steering has another version."""


class NameConflict(FailedPrecondition):
    """The name is on another vector than was expected."""


class RunIncomplete(FailedPrecondition):
    """The run lacks a site or position that is needed of it."""


class NoContrast(FailedPrecondition):
    """Clean and corrupt prompt grade alike, so that there is nothing to recover."""


class ControllerDisabled(FailedPrecondition):
    """The controller failed or was too slow."""


class RunInUse(FailedPrecondition):
    """A request uses the run, or makes it."""


class BankFull(ResourceExhausted):
    """The request needs more bank rows or slots than there are, or than come free in time."""


class QueueFull(ResourceExhausted):
    """Too many requests wait."""


class StoreFull(ResourceExhausted):
    """Held vectors or leased runs fill their store."""


class MessageTooLarge(ResourceExhausted):
    """A message, vector or inline tensor exceeds its limit."""


class CaptureOverflow(ResourceExhausted):
    """Rows came, or would come, faster than they can be handed over."""


class ResponseOverflow(ResourceExhausted):
    """Tokens came faster than the caller read them."""


class RowsLost(DataLoss):
    """Rows are gone that no policy allowed to lose."""

    @classmethod
    def no_room(cls, rows: int) -> "RowsLost":
        """The error of `rows` that the engine had no room for."""
        return cls(
            f"{rows} captured rows are lost: they found no room. Capture fewer sites or tokens, or "
            "raise the server's --staging-mib and --capture-mib",
            metadata={"rows": str(rows)},
        )

    @classmethod
    def no_signals(cls, positions: int) -> "RowsLost":
        """The error of a request that may be stopped, if signals of some positions are lost."""
        return cls(
            f"what probes have read at {positions} positions is lost, so whether the request's "
            "rules fired is unknown: raise the server's --staging-mib, or send the request again",
            metadata={"rows": str(positions)},
        )


class CursorExpired(OutOfRange):
    """The cursor is older than what is kept for a resumption."""


class Superseded(Aborted):
    """Another call took this subscription up."""


class DeadlinePassed(DeadlineExceeded):
    """The call's deadline passed."""

    reason = "REASON_DEADLINE"


class WarmingUp(Unavailable):
    """The model is being loaded."""


class Draining(Unavailable):
    """The server admits nothing more."""


class EngineLost(Unavailable):
    """The engine or one of its workers is gone."""


class WatchLost(Unavailable):
    """A lost watch selects the request, and says that its requests stop."""


class CacheSuspect(Unavailable):
    """The request may have read KV that was computed without the plan that it was cached under."""


class NotImplementedHere(Unimplemented):
    """This server does not have this rpc or feature."""

    reason = "REASON_UNIMPLEMENTED"


class Defect(Internal):
    """A defect of the server."""

    reason = "REASON_INTERNAL"


class ServerFailed(Exception):
    """The server has to end; the message says why and what to do.

    Each subclass has its own exit code.
    """

    exit_code: ClassVar[int] = 1


class StartupError(ServerFailed):
    """The server cannot start."""


class InvalidConfig(StartupError):
    """A setting cannot be used."""

    exit_code = 2


class PortInUse(StartupError):
    """The address cannot be listened on."""

    exit_code = 3

    @classmethod
    def of(cls, address: str, error: OSError) -> "PortInUse":
        """The error of an `address` that the system does not give."""
        why = (error.strerror or str(error)).lower()
        if error.errno == errno.EADDRINUSE:
            why += ", perhaps by another rheostat serve: end it, or choose --port"
        return cls(f"cannot listen on {address}: {why}")


class ModelNotFound(StartupError):
    """There is no such model or adapter, or it cannot be read."""

    exit_code = 4


class EngineFailed(StartupError):
    """The engine did not come up."""

    exit_code = 5


class VectorDirFailed(StartupError):
    """The folder of vectors cannot be used."""

    exit_code = 6


class SinksFailed(StartupError):
    """A sink cannot be made."""

    exit_code = 7


class SpoolFailed(StartupError):
    """The folder of rows that wait on disk cannot be used."""

    exit_code = 8


class FrontEndFailed(StartupError):
    """A process that speaks gRPC for the server did not start."""

    exit_code = 10


class PolicyFailed(StartupError):
    """The file of the server-wide policy cannot be read, or its policy cannot be enforced."""

    exit_code = 11


class EngineDied(ServerFailed):
    """The engine was lost while the server served. A new process can serve again."""

    exit_code = 9
