"""Updates of a running request.

Every call of `Updates.steer` and `Updates.gain` gets exactly one event: the server's answer, or a
refusal from the client if the request ended before the server answered. Later calls raise Refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

from rheostat._connection.calls import BidiCall
from rheostat._errors import NotFound, Refused
from rheostat._responses.accumulator import GenerationAccumulator
from rheostat._responses.results import Event, Generation
from rheostat._responses.updates import UpdateApplied, UpdateRefused, read_applied, read_refused
from rheostat._steering.steering import SteeringLike, gain_to_wire, steering_to_wire
from rheostat_wire.v1 import generation_service_pb2, steering_pb2

_ENDED = "the request has ended"
_NOT_FOUND = "REASON_REQUEST_NOT_FOUND"

SESSION = BidiCall("/rheostat.v1.GenerationService/Session", generation_service_pb2.SessionResponse)
"""The call of a session."""

SessionEvent: TypeAlias = Event | UpdateApplied | UpdateRefused
"""The events of a session. The last one is the `Receipt`."""


class Updates:
    """Sends the updates of a session in the order of their ids. Thread-safe."""

    def __init__(
        self,
        start: generation_service_pb2.GenerateRequest,
        send: Callable[[generation_service_pb2.SessionRequest | None], None],
    ) -> None:
        """Sends ``start``, the request to run. ``send`` sends a message; None ends the stream."""
        self._send = send
        self._lock = threading.Lock()
        self._last_id = 0
        self._unanswered: dict[int, None] = {}
        self._stops: set[int] = set()
        self._ended = False
        send(generation_service_pb2.SessionRequest(start=start, batches=True))

    def steer(self, steering: SteeringLike) -> int:
        """Replace the request's steering. Raises Refused if the request has ended."""
        message = steering_to_wire(steering) or steering_pb2.Steering()
        return self._update(generation_service_pb2.SessionRequest(steering=message))

    def gain(self, factor: float, interventions: Sequence[int]) -> int:
        """Multiply the request's steering by a number. Raises Refused if the request has ended."""
        message = gain_to_wire(factor, interventions)
        return self._update(generation_service_pb2.SessionRequest(gain=message))

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
        """Removes an update that the server answered. Returns False if it was a stop."""
        with self._lock:
            self._unanswered.pop(update_id, None)
            return update_id not in self._stops

    def close(self) -> None:
        """Refuse further updates."""
        with self._lock:
            if not self._ended:
                self._ended = True
                self._send(None)

    def _update(self, message: generation_service_pb2.SessionRequest) -> int:
        """Sends an update that gets an answer; returns its id."""
        with self._lock:
            if self._ended:
                raise Refused(_ENDED, reason=_NOT_FOUND)
            message.update_id = self._next_id()
            self._unanswered[message.update_id] = None
            self._send(message)
            return message.update_id

    def unanswered(self) -> list[UpdateRefused]:
        """Refusals of the updates that got no answer; the next call returns none of them again."""
        with self._lock:
            update_ids, self._unanswered = self._unanswered, {}
        return [
            UpdateRefused(update_id, NotFound(_ENDED, reason=_NOT_FOUND))
            for update_id in update_ids
        ]

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id


class SessionAccumulator:
    """Turns `SessionResponse` messages into events and a `Generation`."""

    def __init__(self, updates: Updates, generation: GenerationAccumulator) -> None:
        self._updates = updates
        self._generation = generation

    def add(self, message: generation_service_pb2.SessionResponse) -> list[SessionEvent]:
        """The events of a message."""
        match message.WhichOneof("event"):
            case "batch":
                return [event for one in message.batch.events for event in self.add(one)]
            case "applied":
                is_update = self._updates.answered(message.applied.update_id)
                return [read_applied(message.applied)] if is_update else []
            case "refused":
                self._updates.answered(message.refused.update_id)
                return [read_refused(message.refused)]
            case "receipt":
                self._updates.close()
                return [*self._updates.unanswered(), *self._generation.add(message)]
        return [*self._generation.add(message)]

    def result(self) -> Generation:
        """The generation, once the stream has ended with OK."""
        return self._generation.result()
