"""The open watches, and those that were lost.

A watch is lost if its client does not resume it in time, or reads too slowly. Then its requests go
on or end, as the client has chosen. The client can also choose that they are held until it resumes
the watch, and end if it does not. If they end, new requests that the watch selects are refused
until a watch with the same filter is opened, because they must not run unwatched.
"""

import logging
from collections.abc import Callable, Container, Mapping, Sequence
from typing import NamedTuple

from rheostat_server.engine.worker_vectors import WorkerVectorCache
from rheostat_server.errors import InvalidValue, QueueFull, Resource, WatchNotFound
from rheostat_server.limits import MIB, RETRY_SECONDS, SUBSCRIPTIONS
from rheostat_server.monitors.opening import WatchContext, check_opening
from rheostat_server.monitors.watch import Watch, lost_watch_error
from rheostat_server.subscriptions.observed import ObservedRequests
from rheostat_server.subscriptions.registry import Subscriptions
from rheostat_server.subscriptions.stream_registry import EventStreams
from rheostat_server.tasks.turns import TimedTurns
from rheostat_server.vectors.store import Vector
from rheostat_wire.v1 import monitor_service_pb2

_LOG = logging.getLogger(__name__)

_BUFFER_BYTES = 8 * MIB
"""Bytes of a watch's buffer by default."""

_CHANGES_SECONDS = 0.004
"""CPU seconds of each iteration of the event loop in which changes of requests may begin. A message
may have 1,024 changes, which must not delay the tokens of other clients. But gains of 32 streams,
which come in one message, should be set at once."""

_Key = tuple[frozenset[str] | None, frozenset[tuple[str, str]]]
"""Equal for filters that select the same requests."""


class LostWatch(NamedTuple):
    """A lost watch, whose requests are refused."""

    name: str
    requests: ObservedRequests


class Watches(EventStreams[Watch]):
    """Watches that are open or can be resumed. Used on the event loop alone."""

    def __init__(
        self,
        context: WatchContext,
        loader: WorkerVectorCache,
        subscriptions: Subscriptions,
        *,
        resume_window: float,
        heartbeat: float,
    ) -> None:
        """No watch is open.

        Args:
            context: what openings are checked against.
            loader: loads the vectors of probes into the workers.
            subscriptions: share their memory with watches.
            resume_window: seconds in which a reader may reconnect.
            heartbeat: the longest silence of a watch, in seconds.
        """
        super().__init__(resume_window=resume_window, heartbeat=heartbeat)
        self.stop: Callable[[Watch], None] = lambda _: None
        """Ends the requests that a lost watch was watching."""
        self.hold: Callable[[Watch], None] = lambda _: None
        """Holds the requests of a watch that no call reads."""
        self.go_on: Callable[[Watch], None] = lambda _: None
        """Ends the hold of a watch's requests."""
        self.change_turns = TimedTurns(_CHANGES_SECONDS)
        """Limits the time for the changes of all watches in an iteration of the event loop."""
        self._context = context
        self._loader = loader
        self._subscriptions = subscriptions
        self._lost: dict[_Key, LostWatch] = {}
        self._opening = 0
        """Number of watches whose vectors are being loaded."""

    @property
    def any(self) -> bool:
        """Whether a watch may select a request."""
        return bool(self._open or self._lost)

    async def open(self, opened: monitor_service_pb2.WatchOpen) -> Watch:
        """Opens a watch, which reads requests that are admitted from now on.

        Raises:
            InvalidArgument, FailedPrecondition: it is malformed, or not supported.
            NotFound: a vector is not stored, or a name is unknown.
            QueueFull, StoreFull: other watches and subscriptions take all the memory.
        """
        settings = await check_opening(opened, self._context)
        key = _key(settings.requests)
        size = self._buffer(opened, key)
        self._subscriptions.watched_bytes += size
        self._opening += 1
        try:
            await self._load(settings.readings.vectors)
        except BaseException:
            self._subscriptions.watched_bytes -= size
            raise
        finally:
            self._opening -= 1
        watch = Watch(
            self._new_name(),
            settings,
            buffer_bytes=size,
            heartbeat=self._heartbeat,
            resume_window=self.resume_window,
            on_failed=self._on_failed,
        )
        self._open[watch.name] = watch
        self._lost.pop(key, None)
        _LOG.info(
            "watch %s of %s: %d columns, rules: %s; if it is lost: %s",
            watch.name,
            settings.requests,
            settings.readings.columns,
            ", ".join(rule.name for rule in settings.readings.rules) or "none",
            monitor_service_pb2.WatchLost.Name(settings.on_lost),
        )
        return watch

    def selecting(
        self, request_id: str, labels: Mapping[str, str], excluding: Container[str] = ()
    ) -> list[Watch]:
        """The watches that select a request, except those whose ids are in `excluding`.

        Raises:
            WatchLost: a lost watch selects it, whose requests are refused.
        """
        for lost in self._lost.values():
            if lost.requests.hold(request_id, labels):
                raise lost_watch_error(lost.name, lost.requests)
        return [
            watch
            for name, watch in self._open.items()
            if name not in excluding and watch.selects(request_id, labels)
        ]

    def resume(self, name: str, after_sequence: int) -> Watch:
        """Resumes a watch whose connection broke. Held requests continue."""
        watch = super().resume(name, after_sequence)
        if watch.holds_if_lost:
            self.go_on(watch)
        return watch

    def disconnected(self, stream: Watch, call: object) -> None:
        """Handles the end of a call. The watch waits to be resumed."""
        super().disconnected(stream, call)
        if stream.holding and stream.name in self._open:
            self.hold(stream)

    async def _load(self, vectors: Sequence[Vector]) -> None:
        """Loads vectors into the workers. The store keeps them until `release`."""
        self._loader.store.retain(vectors)
        try:
            await self._loader.ensure(vectors)
        except BaseException:
            self._loader.store.release(vectors)
            raise

    def _buffer(self, opened: monitor_service_pb2.WatchOpen, key: _Key) -> int:
        most = self._subscriptions.buffer_bytes
        size = opened.buffer_bytes if opened.HasField("buffer_bytes") else min(_BUFFER_BYTES, most)
        if not 1 << 16 <= size <= most:
            raise InvalidValue(f"must be 65536 to {most} bytes", field="open.buffer_bytes")
        free = self._subscriptions.free_bytes
        count = len(self._open) + self._opening + len(self._lost) - (key in self._lost)
        if count >= SUBSCRIPTIONS or size > free:
            raise QueueFull(
                f"{len(self._open)} watches are open and {len(self._lost)} are lost, of at most "
                f"{SUBSCRIPTIONS}; {max(0, free)} of {most} bytes are left. Ask for fewer "
                "buffer_bytes, or wait until one ends (without a reader, after --resume-window), "
                "or raise the server's --subscriptions-mib",
                field="open.buffer_bytes",
                retry_after=RETRY_SECONDS,
            )
        return size

    @property
    def _resume_path(self) -> str:
        return "open.resume.watch_id"

    def _not_found(self, name: str, field: str) -> WatchNotFound:
        if self._of_another_process(name):
            return gone_with_its_server(name)
        return WatchNotFound(
            "there is no such watch: it has ended, or its client did not resume it in time",
            field=field,
            resource=Resource("watch", name[:128]),
        )

    def _released(self, stream: Watch) -> None:
        self._loader.store.release(stream.settings.readings.vectors)
        self._subscriptions.watched_bytes -= stream.buffer.limit
        if not stream.stops_if_lost or stream.dismissed:
            return
        _LOG.warning("watch %s is lost: its requests are ended and refused", stream.name)
        requests = stream.settings.requests
        self._lost[_key(requests)] = LostWatch(stream.name, requests)
        self.stop(stream)


def _key(requests: ObservedRequests) -> _Key:
    return requests.ids, frozenset((requests.labels or {}).items())


def gone_with_its_server(name: str) -> WatchNotFound:
    """The error for resuming a watch that an earlier process of the server opened."""
    return WatchNotFound(
        "the server was restarted since this watch was opened, and the watch is gone: open another",
        field="open.resume.watch_id",
        resource=Resource("watch", name[:128]),
    )
