"""The speaking half of a session: updates of a running request.

Every update that `Updates.steer` takes is answered by exactly one event, the server's or, where the
request ended before the server answered, a refusal made here; afterwards no update is taken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeAlias

from rheostat._connection.calls import Accumulator, Answer, BidiCall, Result, Step
from rheostat._errors import NotFound, Refused, RheostatError, from_status
from rheostat._responses.accumulator import GenerationAccumulator
from rheostat._responses.results import Event, Generation
from rheostat._steering.steering import SteeringLike, steering_to_wire
from rheostat_wire.v1 import generation_pb2, generation_service_pb2, steering_pb2

_ENDED = "the request has ended"
_NOT_FOUND = "REASON_REQUEST_NOT_FOUND"


@dataclass(frozen=True)
class UpdateApplied:
    """An update was carried out."""

    update_id: int
    """The update, as `steer` named it."""
    first_positions: Mapping[int, int]
    """By sample, the first absolute position that it acts on; a finished sample has none."""


@dataclass(frozen=True)
class UpdateRefused:
    """An update was refused; the request goes on as it was."""

    update_id: int
    """The update, as `steer` named it."""
    error: RheostatError
    """Why, as the error that a call would raise: `ResourceExhausted` if the bank is full."""

    @property
    def reason(self) -> str:
        """Name of the error's reason: "REASON_BANK_FULL"."""
        return self.error.reason

    @property
    def message(self) -> str:
        """A sentence for people."""
        return self.error.message

    @property
    def field(self) -> str:
        """Path of the field that is wrong, "" if none is: "steering.interventions[2].where"."""
        return self.error.path


SessionEvent: TypeAlias = Event | UpdateApplied | UpdateRefused
"""What a session yields. The `Receipt` comes last."""


class Updates:
    """Writes a session's messages, in the order of their ids. Threads may share it."""

    def __init__(
        self,
        start: generation_service_pb2.GenerateRequest,
        send: Callable[[generation_service_pb2.SessionRequest | None], None],
    ) -> None:
        """Say which request to run; ``send`` hands a message over, and None closes."""
        self._send = send
        self._lock = threading.Lock()
        self._last_id = 0
        self._unanswered: list[int] = []
        self._stops: set[int] = set()
        self._ended = False
        send(generation_service_pb2.SessionRequest(start=start))

    def steer(self, steering: SteeringLike) -> int:
        """Replace the request's steering. Raises Refused if the request has ended."""
        message = steering_to_wire(steering) or steering_pb2.Steering()
        with self._lock:
            if self._ended:
                raise Refused(_ENDED, reason=_NOT_FOUND)
            update_id = self._next_id()
            self._unanswered.append(update_id)
            self._send(generation_service_pb2.SessionRequest(update_id=update_id, steering=message))
            return update_id

    def stop(self) -> None:
        """End the request, if it has not ended."""
        with self._lock:
            if not self._ended:
                update_id = self._next_id()
                self._stops.add(update_id)
                self._send(
                    generation_service_pb2.SessionRequest(
                        update_id=update_id, stop=generation_service_pb2.SessionStop()
                    )
                )

    def answered(self, update_id: int) -> bool:
        """The server answered an update. False: it was a stop, whose answer is the end itself."""
        with self._lock:
            if update_id in self._unanswered:
                self._unanswered.remove(update_id)
            return update_id not in self._stops

    def close(self) -> None:
        """Take no further update."""
        with self._lock:
            if not self._ended:
                self._ended = True
                self._send(None)

    def unanswered(self) -> list[UpdateRefused]:
        """Refusals of the updates that no answer came to, once each."""
        with self._lock:
            update_ids, self._unanswered = self._unanswered, []
        return [
            UpdateRefused(update_id, NotFound(_ENDED, reason=_NOT_FOUND))
            for update_id in update_ids
        ]

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id


class SessionAccumulator:
    """From `SessionResponse` messages to events and a `Generation`."""

    def __init__(self, updates: Updates, whole: GenerationAccumulator) -> None:
        """Answers go to ``updates``, everything else to ``whole``."""
        self._updates = updates
        self._whole = whole

    def add(self, message: generation_service_pb2.SessionResponse) -> list[SessionEvent]:
        """The message's events."""
        match message.WhichOneof("event"):
            case "applied":
                is_update = self._updates.answered(message.applied.update_id)
                return [_read_applied(message.applied)] if is_update else []
            case "refused":
                self._updates.answered(message.refused.update_id)
                return [_read_refused(message.refused)]
            case "receipt":
                self._updates.close()
                return [*self._updates.unanswered(), *self._whole.add(message)]
        return [*self._whole.add(message)]

    def result(self) -> Generation:
        """The generation, once the stream has ended with OK."""
        return self._whole.result()


def _read_applied(message: generation_pb2.UpdateApplied) -> UpdateApplied:
    return UpdateApplied(
        message.update_id, {sample.sample: sample.position for sample in message.first_positions}
    )


def _read_refused(message: generation_pb2.UpdateRefused) -> UpdateRefused:
    return UpdateRefused(message.update_id, from_status(message.status))


@dataclass(frozen=True)
class SessionCall(BidiCall[Answer], Generic[Answer, Step, Result]):
    """A talk of which the first request is known."""

    start: generation_service_pb2.GenerateRequest
    accumulator: Callable[[Updates], Accumulator[Answer, Step, Result]]
