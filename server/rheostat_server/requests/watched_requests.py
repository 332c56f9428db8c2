"""What watches do to the running requests that they read: they stop, hold and steer them.

A watch also reports to its client the requests that it selects but does not read, and why.
"""

import logging
from collections.abc import Callable, Mapping

from rheostat_server.admission.admitted_request import AdmittedRequest
from rheostat_server.engine.backend import StoppedBy
from rheostat_server.engine.gain_updates import GainUpdates
from rheostat_server.errors import NotSupported
from rheostat_server.limits import MISSED_REQUESTS
from rheostat_server.monitors.registry import Watches
from rheostat_server.monitors.watch import Watch
from rheostat_server.requests.active_request import ActiveRequest
from rheostat_server.requests.response_queue import Notice
from rheostat_server.requests.steering_change import Change
from rheostat_server.subscriptions.pending_changes import MissedRequest
from rheostat_wire.v1 import monitor_service_pb2

_LOG = logging.getLogger(__name__)


class WatchedRequests:
    """Acts on requests for watches. Used on the event loop alone."""

    def __init__(
        self,
        watches: Watches,
        active_requests: Mapping[str, ActiveRequest],
        gain_updates: GainUpdates,
    ) -> None:
        """Acts on the running requests.

        Args:
            watches: the open watches.
            active_requests: a live view of the running requests, by id.
            gain_updates: sends gains to the engine.
        """
        self.send_gains = gain_updates.send_now
        """Sends the gains that `steer` has set. Otherwise they are sent in the next iteration."""
        self._watches = watches
        self._active_requests = active_requests
        watches.stop = self._stop_all
        watches.hold = self._hold_all
        watches.go_on = self._go_on_all

    def announce_running(self, watch: Watch) -> None:
        """Reports to a new watch the requests that it selects, and that began before it."""
        watch.missed = [
            MissedRequest(request_id, "it began before the watch")
            for request_id, active in self._active_requests.items()
            if watch.selects(request_id, active.admitted.labels)
        ][:MISSED_REQUESTS]

    def announce_late(self, admitted: AdmittedRequest) -> None:
        """Reports a request to watches that were opened while it was admitted, and do not read it.

        Raises:
            WatchLost: a lost watch selects it, whose requests are refused.
        """
        if self._watches.any and not admitted.unwatched:
            reading = [part.watch.name for part in admitted.watch_parts]
            for watch in self._watches.selecting(
                admitted.request_id, admitted.labels, excluding=reading
            ):
                watch.miss(admitted.request_id, "its admission began before the watch")

    def pass_over(self, request_id: str, why: str) -> None:
        """Reports to watches that something which they select is not read, and why.

        Raises:
            WatchLost: a lost watch selects it, whose requests are refused.
            NotSupported: a rule of a watch may stop what it selects.
        """
        if not self._watches.any:
            return
        selecting = self._watches.selecting(request_id, {})
        if any(watch.stops for watch in selecting):
            raise NotSupported(f"a watch may stop this request, but {why}")
        for watch in selecting:
            watch.miss(request_id, why)

    def stop(self, watch: Watch, request_id: str, label: str) -> bool:
        """Ends a request that a watch reads; returns whether it ran."""
        watch.acts = True
        active = self._read_by(watch, request_id)
        if active is None:
            return False
        active.stop(StoppedBy("", label, watch.name))
        return True

    def steer(
        self,
        watch: Watch,
        steer: monitor_service_pb2.WatchSteer,
        answer: Callable[[Notice], None],
    ) -> bool:
        """Changes the steering of a request that a watch reads; returns whether it ran.

        Args:
            watch: the watch, which steers.
            steer: its message, with a change.
            answer: is called once with the result.

        Raises:
            RheostatError: the change is refused at once.
        """
        active = self._read_by(watch, steer.request_id)
        if active is None:
            return False
        assert active.control is not None  # because a watch that steers reads it
        layer = steer.HasField("layer")
        what = steer.gain if steer.HasField("gain") else steer.layer if layer else steer.replace
        change = Change(steer.update_id, what, answer, watch.name, layer=layer)
        active.control.submit(change)
        return True

    async def until_not_held(self, active: ActiveRequest) -> None:
        """Waits while a request that has not started is read by a watch that has no reader."""
        for watched_part in active.watched:
            if watched_part.part.watch.holding:
                active.holds.begin(watched_part.part.watch.name)
        await active.holds.none()

    def _read_by(self, watch: Watch, request_id: str) -> ActiveRequest | None:
        active = self._active_requests.get(request_id)
        if active is None or all(
            watched_part.part.watch is not watch for watched_part in active.watched
        ):
            return None
        return active

    def _stop_all(self, watch: Watch) -> None:
        """Ends all requests of a watch that was lost."""
        for request_id, active in list(self._active_requests.items()):
            self.stop(watch, request_id, "the watch was lost")
            active.holds.end(watch.name)

    def _hold_all(self, watch: Watch) -> None:
        """Holds all requests that a watch reads."""
        held = [
            request_id
            for request_id in list(self._active_requests)
            if self._read_by(watch, request_id)
        ]
        for request_id in held:
            self._active_requests[request_id].holds.begin(watch.name)
        _LOG.warning("watch %s has no reader: its %d requests are held", watch.name, len(held))

    def _go_on_all(self, watch: Watch) -> None:
        """Lets all requests go on that a watch holds."""
        for active in list(self._active_requests.values()):
            active.holds.end(watch.name)
