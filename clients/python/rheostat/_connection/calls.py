"""Calls as values: a path, a request, and a function that reads the answer.

Both clients carry out the same values, so a call is defined only once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeAlias, TypeVar

from google.protobuf.message import Message

from rheostat_wire.v1 import capture_service_pb2, run_service_pb2, steering_service_pb2

Answer = TypeVar("Answer", bound=Message)
"""A message of the server."""
Result = TypeVar("Result")
"""The value that the caller gets once the call has ended."""
Item = TypeVar("Item")
"""An entry of a listing."""
Step = TypeVar("Step")
"""An event that the caller gets while the call runs."""
MessageT = TypeVar("MessageT", contravariant=True)
Whole = TypeVar("Whole", covariant=True)
Page = TypeVar(
    "Page",
    capture_service_pb2.GetArtifactsResponse,
    capture_service_pb2.ListSinksResponse,
    run_service_pb2.ListRunsResponse,
    steering_service_pb2.ListVectorsResponse,
)


PAGE = 1000
"""Entries per page: the server's maximum."""


class Accumulator(Protocol[MessageT, Step, Whole]):
    """Turns the messages of a response stream into events, and one result."""

    def add(self, message: MessageT, /) -> list[Step]:
        """The events of the next message."""

    def result(self) -> Whole:
        """The result, once the stream has ended with OK."""


@dataclass(frozen=True)
class UnaryCall(Generic[Answer, Result]):
    """One request, one answer."""

    path: str
    request: Message
    answer: type[Answer]
    read: Callable[[Answer], Result]


class UploadRequests(Protocol):
    """The requests of an upload, which gRPC pulls one by one."""

    failure: BaseException | None
    """An exception of the iterator. gRPC discards it, so the connection raises it."""

    def __iter__(self) -> Iterator[Message]: ...


@dataclass(frozen=True)
class UploadCall(Generic[Answer, Result]):
    """Many requests, one answer."""

    path: str
    requests: UploadRequests
    answer: type[Answer]
    read: Callable[[Answer], Result]


@dataclass(frozen=True)
class DownloadCall(Generic[Answer, Step, Result]):
    """One request, many answers."""

    path: str
    request: Message
    answer: type[Answer]
    accumulator: Callable[[], Accumulator[Answer, Step, Result]]


JoinRequests: TypeAlias = Callable[[Sequence[Message]], Iterable[Message]]
"""Joins requests that wait to be sent into fewer requests, in the same order."""


@dataclass(frozen=True)
class BidiCall(Generic[Answer]):
    """Many requests, many answers."""

    path: str
    answer: type[Answer]
    join_requests: JoinRequests = field(default=list, kw_only=True)


@dataclass(frozen=True)
class PagedCall(Generic[Page, Item]):
    """A listing: a request for each page, and entries in each answer."""

    path: str
    request: Callable[[str], Message]
    """Makes a request from a page token."""
    answer: type[Page]
    read: Callable[[Page], list[Item]]

    def page(self, token: str) -> UnaryCall[Page, Page]:
        """The call of one page."""
        return UnaryCall(self.path, self.request(token), self.answer, lambda page: page)


def serialize(message: Message) -> bytes:
    return message.SerializeToString()
