"""Readers of answers of the asyncio client: running generations and sessions, and listings.

``tools/generate`` writes the synchronous twin, ``streams.py``, from this module.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, Self

from rheostat._client.sessions import SESSION, SessionAccumulator, SessionEvent, Updates
from rheostat._connection.aio_connection import Connection, Responses
from rheostat._connection.calls import (
    Accumulator,
    Answer,
    DownloadCall,
    Item,
    Page,
    PagedCall,
    Result,
    Step,
)
from rheostat._errors import RheostatError
from rheostat._responses.accumulator import GenerationAccumulator
from rheostat._responses.results import Event, Generation
from rheostat._steering.steering import SteeringLike
from rheostat_wire.v1 import generation_service_pb2


class Reader(Generic[Answer, Step, Result]):
    """Reads a response stream: events as they arrive, then one result made of all of them."""

    def __init__(
        self, responses: Responses[Answer], accumulator: Accumulator[Answer, Step, Result]
    ) -> None:
        self._responses = responses
        self._accumulator = accumulator
        self._events: deque[Step] = deque()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Step:
        while not self._events:
            self._events.extend(self._accumulator.add(await anext(self._responses)))
        return self._events.popleft()

    async def result(self) -> Result:
        """Read to the end, and return the result. It includes events that were read before."""
        async for _ in self:
            pass
        return self._accumulator.result()

    def cancel(self) -> None:
        """End the call; the server frees its resources. Does nothing if it has ended already."""
        self._responses.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.cancel()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._responses.target!r})"


async def run_download(
    connection: Connection, call: DownloadCall[Answer, Step, Result], timeout: float | None
) -> Result:
    """Run a call with many answers and return its result. ``timeout`` None: no limit."""
    responses = connection.download(call, timeout)
    async with Reader(responses, call.accumulator()) as reader:
        return await reader.result()


async def list_all(connection: Connection, call: PagedCall[Page, Item]) -> list[Item]:
    """Fetch every page of a listing and return all entries."""
    entries: list[Item] = []
    token = ""
    while True:
        page = await connection.unary(call.page(token))
        entries += call.read(page)
        token = page.next_page_token
        if not token:
            return entries


class Stream(Reader[generation_service_pb2.GenerateResponse, Event, Generation]):
    """A running generation: an iterator of events; ``result()`` returns the `Generation`."""


class Session(Reader[generation_service_pb2.SessionResponse, SessionEvent, Generation]):
    """A `Stream` whose steering can be replaced while it runs, also by other threads.

    Each call of `steer` or `gain` gets one event, `UpdateApplied` or `UpdateRefused`, before the
    `Receipt`. In `rheostat.aio`, `steer`, `gain`, `stop` and `cancel` are not awaited, and the
    event loop must run when a session is opened.
    """

    def __init__(
        self,
        connection: Connection,
        request: generation_service_pb2.GenerateRequest,
        timeout: float | None,
    ) -> None:
        """Made by `Engine`; starts the call."""
        responses = connection.bidi(SESSION, timeout)
        self._updates = Updates(request, responses.send)
        responses.on_end(self._updates.close)
        generation = GenerationAccumulator(request)
        super().__init__(responses, SessionAccumulator(self._updates, generation))

    async def __anext__(self) -> SessionEvent:
        try:
            return await super().__anext__()
        except RheostatError:
            self._updates.close()
            raise

    def steer(self, steering: SteeringLike) -> int:
        """Replace the request's own steering, and return the update's id without waiting.

        The update acts from the server's next step on, never before the first generated token.
        ``None`` or ``[]`` leaves only the server-wide steering. An event reports the outcome.
        Raises InvalidRequest if the client finds an error, Refused if the request has ended.
        """
        return self._updates.steer(steering)

    def gain(self, factor: float, interventions: Sequence[int] = ()) -> int:
        """Multiply the request's own steering by a number, and return the update's id at once.

        The number replaces the one before, which is 1 at first. It acts from the server's next step
        on, never before the first generated token, and until the next `steer`. A session may change
        it with every token, for thousands of tokens. An event reports the outcome.

        Args:
            factor: 0 (off) to 16.
            interventions: indices in the steering of the request or the last `steer`. Empty: all.

        Raises:
            InvalidRequest: the client finds an error.
            Refused: the request has ended.
        """
        return self._updates.gain(factor, interventions)

    def stop(self) -> None:
        """End the request with the finish reason "aborted". The receipt still comes.

        Does nothing if the request has ended already.
        """
        self._updates.stop()

    def cancel(self) -> None:
        """End the call; the server frees its resources. Does nothing if it has ended already."""
        self._updates.close()
        super().cancel()
