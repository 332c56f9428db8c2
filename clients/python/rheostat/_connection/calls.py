"""Calls as values: a path, a request, and how the answer is read.

The two clients differ only in how they carry such a value to the server and back, so nothing about
a call is written twice.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar

from google.protobuf.message import Message

from rheostat_wire.v1 import capture_service_pb2, run_service_pb2, steering_service_pb2

Answer = TypeVar("Answer", bound=Message)
Result = TypeVar("Result")
Step = TypeVar("Step")
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
"""Entries of a page that are asked for: as many as a server gives."""


class Accumulator(Protocol[MessageT, Step, Whole]):
    """Makes events, and one result, of the messages of a response stream."""

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
    """The requests of an upload, made while gRPC takes them."""

    failure: BaseException | None
    """What ended them early. gRPC discards it, so the connection raises it."""

    def __iter__(self) -> Iterator[Message]: ...
    def __next__(self) -> Message: ...


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


@dataclass(frozen=True)
class BidiCall(Generic[Answer]):
    """Many requests, many answers."""

    path: str
    answer: type[Answer]


PagedCall: TypeAlias = Generator[UnaryCall[Answer, Answer], Answer, Result]
"""Calls of which each depends on the answer before: it yields calls and is sent answers."""


def every_page(
    path: str, request: Callable[[str], Message], answer: type[Page]
) -> PagedCall[Page, list[Page]]:
    """Every page of a listing, whose requests are made of the pages' tokens."""
    pages: list[Page] = []
    token = ""
    while True:
        page = yield UnaryCall(path, request(token), answer, lambda page: page)
        pages.append(page)
        token = page.next_page_token
        if not token:
            return pages


def serialize(message: Message) -> bytes:
    """The bytes of a request."""
    return message.SerializeToString()
