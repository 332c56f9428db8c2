"""What a program asks of a watch besides its events."""

from __future__ import annotations

from abc import ABC, abstractmethod

from rheostat._errors import Refused
from rheostat._responses.signals import SignalColumn
from rheostat._watches.requests import stop_request
from rheostat._watches.state import WatchState
from rheostat_wire.v1 import monitor_service_pb2


class WatchControls(ABC):
    """The properties of a watch, and its updates, the same in both clients."""

    def __init__(self, state: WatchState) -> None:
        self._state = state

    def __repr__(self) -> str:
        return f"Watch({self._state.id!r})" if self._state.id else "Watch(not open)"

    @property
    def id(self) -> str:
        """Its id. Raises Refused before it is open."""
        if not self._state.id:
            raise Refused("the watch is not open yet: enter it with async with")
        return self._state.id

    @property
    def columns(self) -> tuple[SignalColumn, ...]:
        """What the columns of its readings are; empty before it is open."""
        return self._state.columns

    @property
    def missed(self) -> dict[str, str]:
        """Reasons why selected requests that began before are not read, by request id.

        At most 1024.
        """
        return dict(self._state.missed)

    def stop(self, request_id: str, label: str = "") -> int:
        """End a running request of the watch, and return the update's id without waiting.

        The request ends with the finish reason "watch" and the label; tokens that its client has
        got stay. An event reports the outcome: `UpdateApplied`, or `UpdateRefused`, for instance
        because the request does not run any more. In `rheostat.aio` it is not awaited.

        Args:
            request_id: the request.
            label: why, for people: `Finished.label`. At most 255 bytes.

        Raises:
            InvalidRequest: an argument is malformed.
            Refused: the watch has ended or is closed, or the answers to 1024 updates were not read.
        """
        return self._update(stop_request(request_id, label))

    @abstractmethod
    def _update(self, message: monitor_service_pb2.WatchRequest) -> int:
        """Sends an update; returns its id."""
