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


Taken = TypeVar("Taken", contravariant=True)


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


class Fold(Protocol[Taken, Step, Whole]):
    """What a response stream is folded into."""

    def feed(self, message: Taken, /) -> list[Step]:
        """Take a message; give its events."""

    def result(self) -> Whole:
        """All of it, once the stream has ended with OK."""


@dataclass(frozen=True)
class Unary(Generic[Answer, Result]):
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
class Upload(Generic[Answer, Result]):
    """Many requests, one answer."""

    path: str
    requests: UploadRequests
    answer: type[Answer]
    read: Callable[[Answer], Result]


@dataclass(frozen=True)
class Download(Generic[Answer, Step, Result]):
    """One request, many answers."""

    path: str
    request: Message
    answer: type[Answer]
    fold: Callable[[], Fold[Answer, Step, Result]]


@dataclass(frozen=True)
class Talk(Generic[Answer]):
    """Many requests, many answers."""

    path: str
    answer: type[Answer]


Script: TypeAlias = Generator[Unary[Answer, Answer], Answer, Result]
"""Unary calls of which each depends on the answer before: yields calls, is sent answers."""


def every_page(
    path: str, request: Callable[[str], Message], answer: type[Page]
) -> Script[Page, list[Page]]:
    """Every page of a listing, whose requests are made of the pages' tokens."""
    pages: list[Page] = []
    token = ""
    while True:
        page = yield Unary(path, request(token), answer, lambda page: page)
        pages.append(page)
        token = page.next_page_token
        if not token:
            return pages


def serialize(message: Message) -> bytes:
    """The bytes of a request."""
    return message.SerializeToString()
