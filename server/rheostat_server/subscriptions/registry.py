"""The open subscriptions, and those that wait until their readers reconnect.

Invariant: an observer neither delays nor refuses a request that it watches. If the engine has no
capacity for its rows, they count as lost, or the subscription fails, by its overload policy.
"""

import asyncio
import contextlib
import logging
import re
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from rheostat_engine import ModelSites
from rheostat_server import validation
from rheostat_server.delivery.delivery_buffer import Deliveries
from rheostat_server.delivery.spill_manager import SpillManager
from rheostat_server.engine.worker_vectors import WorkerVectorCache
from rheostat_server.errors import (
    EngineLost,
    InvalidValue,
    QueueFull,
    Resource,
    RheostatError,
    StoreFull,
    SubscriptionNotFound,
)
from rheostat_server.limits import DEFAULT_SUBSCRIPTIONS, ID_BYTES, RETRY_SECONDS, SUBSCRIPTIONS
from rheostat_server.model_info import ModelInfo
from rheostat_server.selectors.selection import typical_context
from rheostat_server.subscriptions.flow_control import check_credit, position_bytes
from rheostat_server.subscriptions.opening import check_opening
from rheostat_server.subscriptions.subscription import Subscription
from rheostat_server.tensors import FloatType
from rheostat_server.vectors.store import Vector
from rheostat_wire.v1 import capture_pb2, capture_service_pb2

_LOG = logging.getLogger(__name__)

_ID = re.compile(r"[0-9a-f]{32}")
"""Ids of subscriptions. The first 8 digits are those of the process that opened it."""

_REMEMBERED = 256
"""Failed subscriptions whose errors are kept for readers that resume them."""


class Subscriptions:
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
        self.buffer_bytes = buffer_bytes
        self.resume_window = resume_window
        self._sites = sites
        self._loader = loader
        self._loads: set[asyncio.Task[None]] = set()
        self._typical = typical_context(info)
        self._heartbeat = heartbeat
        self._deliveries = deliveries
        self._spill_manager = spill_manager
        self._process = secrets.token_hex(4)
        self._open: dict[str, Subscription] = {}
        self._failed: OrderedDict[str, Subscription] = OrderedDict()
        self._expiries: dict[str, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        """Number of subscriptions that are open or can be resumed."""
        return len(self._open)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of rows that were not sent yet."""
        return sum(subscription.buffer.waiting for subscription in self._open.values())

    @property
    def used_bytes(self) -> int:
        """Bytes of memory of their rows, including sent and unacknowledged ones."""
        return sum(subscription.buffer.total.weight for subscription in self._open.values())

    @property
    def waiting(self) -> int:
        """Number of subscriptions without a reader."""
        return len(self._expiries)

    async def open(self, observer_capture: capture_service_pb2.SubscribeOpen) -> Subscription:
        """Opens a subscription, which captures requests that are admitted from now on.

        Raises:
            InvalidArgument, FailedPrecondition: it is malformed, or asks for what is not served.
            MessageTooLarge: it is too large.
            NotFound: a vector is not stored or a name not known.
            QueueFull, StoreFull: other subscriptions take all the memory.
        """
        opening = await check_opening(
            observer_capture,
            model=self._sites,
            typical=self._typical,
            store=self._loader.store,
            spools=self._spill_manager is not None,
        )
        templates, row_type = opening.captures.templates, FloatType(self._sites.dtype)
        check_credit(observer_capture, templates, row_type)
        subscription = Subscription(
            self._process + secrets.token_hex(12),
            opening.requests if templates else None,
            opening.captures,
            observer_capture.overload
            if observer_capture.HasField("overload")
            else capture_pb2.OVERLOAD_FAIL,
            buffer_bytes=self._buffer(observer_capture, position_bytes(templates, row_type)),
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
        subscription.expect(observer_capture.credit_bytes)
        if observer_capture.shared_memory:
            subscription.transport.share(subscription.buffer.limit, observer_capture.namespace)
        self._open[subscription.name] = subscription
        inline = subscription.transport.inline_reason
        _LOG.info(
            "subscription %s: %d captures%s",
            subscription.name,
            len(templates),
            f"; no shared memory: {inline}" if inline else "",
        )
        return subscription

    def _buffer(self, observer_capture: capture_service_pb2.SubscribeOpen, least: int) -> int:
        """Bytes of the buffer of a new subscription, one position of which takes `least`.

        Raises:
            InvalidValue: it asks for more memory than all subscriptions have.
            QueueFull: other subscriptions leave too little memory, or there are too many.
        """
        size = observer_capture.buffer_bytes if observer_capture.HasField("buffer_bytes") else 0
        if size > self.buffer_bytes:
            raise InvalidValue(
                f"a subscription has at most {self.buffer_bytes} bytes", field="open.buffer_bytes"
            )
        size = size or max(self.buffer_bytes // DEFAULT_SUBSCRIPTIONS, least)
        free = self.buffer_bytes - sum(
            subscription.buffer.limit for subscription in self._open.values()
        )
        if len(self._open) >= SUBSCRIPTIONS or size > free:
            raise QueueFull(
                f"{len(self._open)} subscriptions are open; {max(0, free)} of "
                f"{self.buffer_bytes} bytes are left for another. Ask for fewer buffer_bytes, or "
                "wait until one ends (without a reader, after --resume-window), or raise the "
                "server's --subscriptions-mib",
                field="open.buffer_bytes",
                retry_after=RETRY_SECONDS,
            )
        return size

    def resume(self, point: capture_service_pb2.ResumePoint) -> Subscription:
        """A subscription whose connection broke.

        Raises:
            SubscriptionNotFound: it has ended.
            CursorExpired: events after the cursor were already discarded.
            InvalidValue: the cursor is a number that was never sent.
            RheostatError: it has failed meanwhile.
        """
        name = point.subscription_id
        validation.text_bytes(name, ID_BYTES, "open.resume.subscription_id")
        subscription = self._open.get(name) or self._failed.get(name)
        if subscription is None:
            raise self._not_found(name, "open.resume.subscription_id")
        subscription.resume_after(point.after_sequence)
        self._cancel_expiry(name)
        return subscription

    def disconnected(self, subscription: Subscription, call: object) -> None:
        """Handles the end of a call. The subscription waits for another one."""
        subscription.leave(call)
        if subscription.ended:
            self._remove(subscription)
        elif not subscription.connected and subscription.name in self._open:
            self._cancel_expiry(subscription.name)
            loop = asyncio.get_running_loop()
            self._expiries[subscription.name] = loop.call_later(
                self.resume_window, self._expire, subscription
            )

    def discard(self, subscription: Subscription) -> None:
        """Removes a subscription whose reader never got its id, or did not reconnect in time."""
        self._remove(subscription)
        subscription.fail(self._not_found(subscription.name, "open.resume.subscription_id"))
        self._failed.pop(subscription.name, None)

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

    def end(self, reason: RheostatError) -> None:
        """Captures no more rows, sends the waiting ones, then ends each call with `reason`."""
        for subscription in list(self._open.values()):
            subscription.close(reason)

    def remove_shared_memory(self) -> None:
        """Removes shared memory of subscriptions whose readers did not reconnect."""
        for subscription in self._open.values():
            subscription.transport.close()

    def lose(self, error: RheostatError) -> None:
        """Ends every subscription with an error."""
        for subscription in list(self._open.values()):
            subscription.fail(error)

    def _keep(self, subscription: Subscription, vectors: Sequence[Vector]) -> None:
        """Keeps the vectors on which its rows are projected until the subscription ends.

        Raises:
            StoreFull: the vectors do not fit into the store.
        """
        if not vectors:
            return
        self._loader.store.retain(vectors)
        subscription.vectors = vectors
        load = asyncio.create_task(self._load(vectors))
        self._loads.add(load)
        load.add_done_callback(self._loads.discard)

    async def _load(self, vectors: Sequence[Vector]) -> None:
        """Loads vectors into the workers before a request waits for them."""
        with contextlib.suppress(EngineLost):  # every request fails with this error
            await self._loader.ensure(vectors)

    def _not_found(self, name: str, field: str) -> SubscriptionNotFound:
        if _ID.fullmatch(name) and not name.startswith(self._process):
            return gone_with_its_server(name)
        return SubscriptionNotFound(
            "there is no such subscription: it has ended, its client did not resume it in time, or "
            "this is the name of something else, such as a sink",
            field=field,
            resource=Resource("subscription", name[:128]),
        )

    def _on_failed(self, subscription: Subscription) -> None:
        _LOG.info("subscription %s failed: %s", subscription.name, subscription.failure)
        self._remove(subscription)
        self._failed[subscription.name] = subscription
        while len(self._failed) > _REMEMBERED:
            self._failed.popitem(last=False)

    def _expire(self, subscription: Subscription) -> None:
        _LOG.info("subscription %s: its reader did not come back", subscription.name)
        self.discard(subscription)

    def _remove(self, subscription: Subscription) -> None:
        self._cancel_expiry(subscription.name)
        subscription.transport.close()
        if self._open.pop(subscription.name, None) is not None:
            self._loader.store.release(subscription.vectors)

    def _cancel_expiry(self, name: str) -> None:
        expiry = self._expiries.pop(name, None)
        if expiry is not None:
            expiry.cancel()


def gone_with_its_server(name: str) -> SubscriptionNotFound:
    """The refusal of a subscription that another process of the server opened."""
    return SubscriptionNotFound(
        "the server was restarted since this subscription was opened, and the subscription is "
        "gone: open another",
        field="open.resume.subscription_id",
        resource=Resource("subscription", name[:128]),
    )
