"""The methods by which a program acts on the requests of a watch."""

from __future__ import annotations

from collections.abc import Sequence

from rheostat._event_streams.worker import StreamBase
from rheostat._fields import utf8_text
from rheostat._responses.signals import SignalColumn
from rheostat._steering.steering import SteeringLike, gain_to_wire, steering_to_wire
from rheostat._watches.events import WatchEvent
from rheostat._watches.state import WatchState
from rheostat_wire.v1 import monitor_service_pb2, steering_pb2


class WatchControls(StreamBase[monitor_service_pb2.WatchResponse, WatchEvent]):
    """The properties of a watch, and its updates, the same in both clients."""

    _state: WatchState

    @property
    def columns(self) -> tuple[SignalColumn, ...]:
        """The columns of its readings; empty before it is open."""
        return self._state.columns

    def stop(self, request_id: str, label: str = "") -> int:
        """End a running request of the watch, and return the update's id without waiting.

        The request ends with the finish reason "watch" and the label. Its client keeps the tokens
        that were sent. An event reports the outcome: `UpdateApplied`, or `UpdateRefused`, for
        instance because the request no longer runs. In `rheostat.aio` it is not awaited.

        If the server reads more than 64 samples in a step, readings come up to three steps late to
        a watch that only observes. Those of requests that begin after its first stop do not.

        Args:
            request_id: the request.
            label: the reason, for people: `Finished.label`. At most 255 bytes.

        Raises:
            InvalidRequest: an argument is malformed.
            Refused: the watch has ended or is closed.
            ResourceExhausted: the answers to 4096 updates were not read. The program reads the
                watch's events too slowly for its updates.
        """
        stop = monitor_service_pb2.WatchStop(
            request_id=utf8_text(request_id, "stop.request_id", "a request id"),
            label=utf8_text(label, "stop.label", "a label"),
        )
        return self._update(monitor_service_pb2.WatchRequest(stop=stop))

    def steer(self, request_id: str, steering: SteeringLike) -> int:
        """Set the watch's own layer of a request's steering, and return the update's id at once.

        The layer acts after the request's own steering, which stays. It replaces the layer that
        this watch has set before; ``None`` or ``[]`` removes it. It acts from the server's next
        step on, also after the watch has ended. An event reports the outcome, as for `gain`.

        Args:
            request_id: the request; the watch must have been opened with ``steers=True``.
            steering: interventions without gates, in the order in which they act.

        Raises:
            InvalidRequest: an argument is malformed.
            Refused, ResourceExhausted: as for `stop`.
        """
        steer = monitor_service_pb2.WatchSteer(
            request_id=utf8_text(request_id, "steer.request_id", "a request id"),
            layer=steering_to_wire(steering) or steering_pb2.Steering(),
        )
        return self._update(monitor_service_pb2.WatchRequest(steer=steer))

    def gain(self, request_id: str, factor: float, interventions: Sequence[int] = ()) -> int:
        """Multiply a request's own steering by a number, and return the update's id at once.

        The number replaces what this watch has set before, which is 1 at first. It acts from the
        server's next step on, also after the watch has ended. The gain of an intervention is the
        product of those of its session and of all watches. An event reports the outcome, as for
        `stop`; `UpdateApplied.first_positions` has the first position of each sample. If the
        connection breaks before the answer arrives, the number is set again.

        Args:
            request_id: the request; the watch must have been opened with ``steers=True``.
            factor: 0 (off) to 16.
            interventions: indices in the request's steering. Empty: all.

        Raises:
            InvalidRequest: an argument is malformed.
            Refused, ResourceExhausted: as for `stop`.
        """
        steer = monitor_service_pb2.WatchSteer(
            request_id=utf8_text(request_id, "steer.request_id", "a request id"),
            gain=gain_to_wire(factor, interventions),
        )
        return self._update(monitor_service_pb2.WatchRequest(steer=steer))

    def _update(self, message: monitor_service_pb2.WatchRequest) -> int:
        """Sends an update; returns its id."""
        return self._worker.act(lambda: self._state.update(message))
