"""A change of a running request's steering that its session or a watch asks for."""

import asyncio
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from rheostat_server.errors import RheostatError
from rheostat_server.errors.status import to_status
from rheostat_server.requests.response_queue import Notice
from rheostat_wire.v1 import gain_pb2, generation_pb2, receipt_pb2, steering_pb2


class Change(NamedTuple):
    """A change of the steering that a client asks for."""

    number: int
    """The client's number of it."""
    what: steering_pb2.Steering | gain_pb2.Gain
    """New steering, or a gain."""
    answer: Callable[[Notice], None]
    """Is called once, with the result."""
    watch: str = ""
    """The id of the watch that asks for it; empty: the session."""
    layer: bool = False
    """Whether the steering is the watch's layer; False: it takes the place of the request's own."""

    @property
    def is_gain(self) -> bool:
        """Whether it is a gain."""
        return isinstance(self.what, gain_pb2.Gain)

    def refuse(self, error: RheostatError) -> None:
        """Answers that it is refused."""
        if error.field and self.watch:
            error.field = _field_in_watch(error.field, "layer" if self.layer else "replace")
        self.answer(refused(self.number, error))


def _field_in_watch(field: str, steering: str) -> str:
    """The path of a field of a change in the message of a watch."""
    before, found, behind = field.partition("steering")
    return f"steer.{field}" if before or not found else f"steer.{steering}{behind}"


def refused(number: int, error: RheostatError) -> generation_pb2.UpdateRefused:
    """The answer to a change that is refused."""
    return generation_pb2.UpdateRefused(update_id=number, status=to_status(error))


class Control(Protocol):
    """Changes the steering of a running request."""

    @property
    def pending(self) -> bool:
        """Whether a change of a watch was not answered. The receipt would lack it."""

    @property
    def task(self) -> asyncio.Task[None] | None:
        """The task that applies changes; None if there is none."""

    @property
    def by_watches(self) -> Iterable[receipt_pb2.WatchReceipt]:
        """What watches have changed."""

    def submit(self, change: Change) -> None:
        """Applies a change after those before it.

        Raises:
            RheostatError: it is malformed, too many wait, or the request has ended. It is not
                answered then.
        """

    def cancel(self) -> None:
        """Ends the work, because the request ends. Changes that wait are refused."""
