"""The open subscriptions, and those that wait until their readers reconnect.

Invariant: an observer neither delays nor refuses a request that it watches. If the engine has no
capacity for its rows, they count as lost, or the subscription fails, by its overload policy.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence

from rheostat_engine import ModelSites
from rheostat_server import validation
from rheostat_server.config import ModelInfo
from rheostat_server.delivery.delivery_buffer import Deliveries
from rheostat_server.delivery.spill_manager import SpillManager
from rheostat_server.engine.worker_vectors import WorkerVectorCache
from rheostat_server.errors import (
    EngineLost,
    InvalidValue,
    QueueFull,
    Resource,
    StoreFull,
    SubscriptionNotFound,
)
from rheostat_server.limits import DEFAULT_SUBSCRIPTIONS, ID_BYTES, RETRY_SECONDS, SUBSCRIPTIONS
from rheostat_server.selectors.selection import typical_context
from rheostat_server.subscriptions.flow_control import check_credit, position_bytes
from rheostat_server.subscriptions.opening import check_opening
from rheostat_server.subscriptions.stream_registry import EventStreams
from rheostat_server.subscriptions.subscription import Subscription
from rheostat_server.tasks.futures import keep
from rheostat_server.tensors import FloatType
from rheostat_server.vectors.store import Vector
from rheostat_wire.v1 import capture_pb2, capture_service_pb2

_LOG = logging.getLogger(__name__)


class Subscriptions(EventStreams[Subscription]):
    """Subscriptions that are open or can be resumed. Used on the event loop alone."""

    def __init__(
        self,
        info: ModelInfo,
        sites: ModelSites,
        loader: WorkerVectorCache,
        *,
        buffer_bytes: int,
        resume_window: float,
        heartbeat: float,
        deliveries: Deliveries | None = None,
        spill_manager: SpillManager | None = None,
    ) -> None:
        """No subscription is open.

        Args:
            info: the model.
            sites: its sites.
            loader: loads the vectors of projections into the workers.
            buffer_bytes: the most bytes that the rows of all subscriptions may take.
            resume_window: seconds in which a reader may reconnect.
            heartbeat: the longest silence of a subscription, in seconds.
            deliveries: counts rows that are lost before they reach their readers.
            spill_manager: stores rows on disk that do not fit into memory.
        """
        super().__init__(resume_window=resume_window, heartbeat=heartbeat)
        self.buffer_bytes = buffer_bytes
        self.watched_bytes = 0
        """Bytes of the buffers of watches, which share the memory."""
        self._sites = sites
        self._loader = loader
        self._loads: set[asyncio.Task[None]] = set()
        self._typical = typical_context(info)
        self._deliveries = deliveries
        self._spill_manager = spill_manager

    @property
    def waiting_bytes(self) -> int:
        """Bytes of rows that were not sent yet."""
        return sum(subscription.buffer.waiting for subscription in self._open.values())

    @property
    def used_bytes(self) -> int:
        """Bytes of memory of their rows, including sent and unacknowledged ones."""
        return sum(subscription.buffer.total.weight for subscription in self._open.values())

    @property
    def free_bytes(self) -> int:
        """Bytes that are left for the buffers of further subscriptions and watches."""
        limits = sum(subscription.buffer.limit for subscription in self._open.values())
        return self.buffer_bytes - limits - self.watched_bytes

    async def open(self, opened: capture_service_pb2.SubscribeOpen) -> Subscription:
        """Opens a subscription, which captures requests that are admitted from now on.

        Raises:
            InvalidArgument, FailedPrecondition: it is malformed, or asks for what is not served.
            MessageTooLarge: it is too large.
            NotFound: a vector is not stored or a name not known.
            QueueFull, StoreFull: other subscriptions take all the memory.
        """
        opening = await check_opening(
            opened,
            model=self._sites,
            typical=self._typical,
            store=self._loader.store,
            spools=self._spill_manager is not None,
        )
        templates, row_type = opening.captures.templates, FloatType(self._sites.dtype)
        check_credit(opened, templates, row_type)
        subscription = Subscription(
            self._new_name(),
            opening.requests if templates else None,
            opening.captures,
            opened.overload if opened.HasField("overload") else capture_pb2.OVERLOAD_FAIL,
            buffer_bytes=self._buffer(opened, position_bytes(templates, row_type)),
            heartbeat=self._heartbeat,
            resume_window=self.resume_window,
            on_failed=self._on_failed,
            deliveries=self._deliveries,
            spill_manager=self._spill_manager,
        )
        try:
            self._keep(subscription, opening.vectors)
        except StoreFull:
            subscription.buffer.close()  # or the spill manager would keep its place
            raise
        subscription.expect(opened.credit_bytes)
        if opened.shared_memory:
            subscription.transport.share(subscription.buffer.limit, opened.namespace)
        self._open[subscription.name] = subscription
        inline = subscription.transport.inline_reason
        _LOG.info(
            "subscription %s: %d captures%s",
            subscription.name,
            len(templates),
            f"; no shared memory: {inline}" if inline else "",
        )
        return subscription

    def _buffer(self, opened: capture_service_pb2.SubscribeOpen, least: int) -> int:
        """Bytes of the buffer of a new subscription, one position of which takes `least`.

        Raises:
            InvalidValue: it asks for more memory than all subscriptions have.
            QueueFull: as many subscriptions are open as may be, or they leave too little memory.
        """
        if len(self._open) >= SUBSCRIPTIONS:
            raise QueueFull(
                f"{len(self._open)} subscriptions are open or wait for their readers, the most "
                "that may be. Wait until one ends (without a reader, after --resume-window)",
                retry_after=RETRY_SECONDS,
            )
        size = opened.buffer_bytes if opened.HasField("buffer_bytes") else 0
        if size > self.buffer_bytes:
            raise InvalidValue(
                f"a subscription has at most {self.buffer_bytes} bytes", field="open.buffer_bytes"
            )
        size = size or max(self.buffer_bytes // DEFAULT_SUBSCRIPTIONS, least)
        free = self.free_bytes
        if size > free:
            raise QueueFull(
                f"{len(self._open)} subscriptions are open; {max(0, free)} of "
                f"{self.buffer_bytes} bytes are left for another. Ask for fewer buffer_bytes, or "
                "wait until one ends (without a reader, after --resume-window), or raise the "
                "server's --subscriptions-mib",
                field="open.buffer_bytes",
                retry_after=RETRY_SECONDS,
            )
        return size

    def named(self, name: str, path: str) -> Subscription:
        """The subscription with an id, which takes rows.

        Raises:
            SubscriptionNotFound: there is none, or it has ended.
        """
        validation.text_bytes(name, ID_BYTES, path)
        subscription = self._open.get(name)
        if subscription is None or not subscription.taking:
            raise self._not_found(name, path)
        return subscription

    def selecting(self, request_id: str, labels: Mapping[str, str]) -> list[Subscription]:
        """The subscriptions whose filter selects a request."""
        return [
            subscription
            for subscription in self._open.values()
            if subscription.selects(request_id, labels)
        ]

    def remove_shared_memory(self) -> None:
        """Removes shared memory of subscriptions whose readers did not reconnect."""
        for subscription in self._open.values():
            subscription.transport.close()

    def _keep(self, subscription: Subscription, vectors: Sequence[Vector]) -> None:
        """Keeps the vectors on which its rows are projected until the subscription ends.

        Raises:
            StoreFull: the vectors do not fit into the store.
        """
        if not vectors:
            return
        self._loader.store.retain(vectors)
        subscription.vectors = vectors
        keep(self._loads, self._load(vectors))

    async def _load(self, vectors: Sequence[Vector]) -> None:
        """Loads vectors into the workers before a request waits for them."""
        with contextlib.suppress(EngineLost):  # every request fails with this error
            await self._loader.ensure(vectors)

    @property
    def _resume_path(self) -> str:
        return "open.resume.subscription_id"

    def _not_found(self, name: str, field: str) -> SubscriptionNotFound:
        if self._of_another_process(name):
            return gone_with_its_server(name)
        return SubscriptionNotFound(
            "there is no such subscription: it has ended, its client did not resume it in time, or "
            "this is the name of something else, such as a sink",
            field=field,
            resource=Resource("subscription", name[:128]),
        )

    def _released(self, stream: Subscription) -> None:
        self._loader.store.release(stream.vectors)


def gone_with_its_server(name: str) -> SubscriptionNotFound:
    """The refusal of a subscription that another process of the server opened."""
    return SubscriptionNotFound(
        "the server was restarted since this subscription was opened, and the subscription is "
        "gone: open another",
        field="open.resume.subscription_id",
        resource=Resource("subscription", name[:128]),
    )
