"""The open subscriptions: which requests they tap, and what becomes of one whose reader is gone.

Invariant: an observer neither delays nor refuses a request that it watches. Where its rows find no
room in the engine, they count as lost, or it fails, as its policy says.
"""

import asyncio
import contextlib
import logging
import uuid
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rheostat._proto.v1 import capture_pb2, capture_service_pb2
from rheostat_engine import ModelSites
from rheostat_server import checks
from rheostat_server.capture.reservoir import Losses
from rheostat_server.capture.specs import (
    ResolvedCapture,
    Target,
    check_spill,
    direction_vectors,
    find_all_directions,
    project_all,
    resolve_capture,
)
from rheostat_server.capture.spillway import Spillway
from rheostat_server.checks import join
from rheostat_server.errors import (
    EngineLost,
    InvalidValue,
    MissingField,
    QueueFull,
    Resource,
    RheostatError,
    SubscriptionNotFound,
)
from rheostat_server.limits import (
    CAPTURES,
    DEFAULT_SUBSCRIPTIONS,
    LABELS,
    SUBSCRIBED_REQUESTS,
    SUBSCRIPTIONS,
)
from rheostat_server.line import RETRY
from rheostat_server.loader import VectorLoader
from rheostat_server.model_info import ModelInfo
from rheostat_server.selection import SelectionContext, selector_work, typical_context
from rheostat_server.subscriptions.room import check_room, position_bytes
from rheostat_server.subscriptions.subscription import Subscription
from rheostat_server.tensors import FloatType
from rheostat_server.vector_lookup import FoundVector
from rheostat_server.vectors import Vector

_LOG = logging.getLogger(__name__)

_REMEMBERED = 256
"""Ended subscriptions of which it is still known how they ended."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What a subscription wants of a request."""

    subscription: Subscription
    captures: Mapping[int, ResolvedCapture]
    """By the number under which its rows go out."""
    own: frozenset[int] = frozenset()
    """Those that the request itself sends; with any, it fails where the subscription overflows."""

    @property
    def observed(self) -> bool:
        """Whether the subscription wants something that the request does not know of."""
        return len(self.captures) > len(self.own)


def merged(wishes: Sequence[Wish]) -> tuple[Wish, ...]:
    """Wishes of which each subscription has one, so that the request ends there once."""
    found: dict[str, Wish] = {}
    for wish in wishes:
        name = wish.subscription.name
        other = found.get(name)
        if other is None:
            found[name] = wish
        else:
            found[name] = Wish(
                wish.subscription,
                {**other.captures, **wish.captures},
                other.own or wish.own,
            )
    return tuple(found.values())


class Subscriptions:
    """Subscriptions that are open or can be resumed. Lives on the event loop."""

    def __init__(
        self,
        info: ModelInfo,
        sites: ModelSites,
        loader: VectorLoader,
        *,
        buffer_bytes: int,
        resume_window: float,
        heartbeat: float,
        losses: Losses | None = None,
        spillway: Spillway | None = None,
    ) -> None:
        """None is open.

        Args:
            info: the model.
            sites: its sites.
            loader: brings the vectors that rows are projected on to the workers.
            buffer_bytes: bytes that all of them together may hold.
            resume_window: seconds that one waits for its reader to come back.
            heartbeat: the longest silence of one, in seconds.
            losses: counts what is lost on the way to their readers.
            spillway: where rows may wait that find no room in memory.
        """
        self.buffer_bytes = buffer_bytes
        self.resume_window = resume_window
        self._sites = sites
        self._loader = loader
        self._loads: set[asyncio.Task[None]] = set()
        self._typical = typical_context(info)
        self._heartbeat = heartbeat
        self._losses = losses
        self._spillway = spillway
        self._open: dict[str, Subscription] = {}
        self._failed: OrderedDict[str, Subscription] = OrderedDict()
        self._expiries: dict[str, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        """How many are open or can be resumed."""
        return len(self._open)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of rows that none of them has sent yet."""
        return sum(one.reservoir.waiting for one in self._open.values())

    @property
    def waiting(self) -> int:
        """How many have no reader now."""
        return len(self._expiries)

    def open(self, wish: capture_service_pb2.SubscribeOpen) -> Subscription:
        """A new subscription, which captures from requests that are admitted from now on.

        Raises:
            InvalidArgument, FailedPrecondition: it is malformed, or asks for what is not served.
            NotFound: a vector is not stored or a name not known.
            QueueFull, StoreFull: the others hold all that there is.
        """
        captures = self._check(wish)
        check_room(wish, captures, FloatType(self._sites.dtype))
        size = wish.buffer_bytes if wish.HasField("buffer_bytes") else 0
        free = self.buffer_bytes - sum(one.reservoir.limit for one in self._open.values())
        if size > self.buffer_bytes:
            raise InvalidValue(
                f"a subscription has at most {self.buffer_bytes} bytes", field="open.buffer_bytes"
            )
        size = size or max(
            self.buffer_bytes // DEFAULT_SUBSCRIPTIONS,
            position_bytes(captures, FloatType(self._sites.dtype)),
        )
        if len(self._open) >= SUBSCRIPTIONS or size > free:
            raise QueueFull(
                f"{len(self._open)} subscriptions are open; {max(0, free)} of "
                f"{self.buffer_bytes} bytes are left for another. Ask for fewer buffer_bytes, or "
                "wait until one ends (without a reader, after --resume-window), or raise the "
                "server's --subscriptions-mib",
                field="open.buffer_bytes",
                retry_after=RETRY,
            )
        subscription = Subscription(
            uuid.uuid4().hex,
            wish.filter,
            wish.captures,
            wish.overload if wish.HasField("overload") else capture_pb2.OVERLOAD_FAIL,
            buffer_bytes=size,
            heartbeat=self._heartbeat,
            resume_window=self.resume_window,
            on_failed=self._on_failed,
            losses=self._losses,
            spillway=self._spillway,
        )
        self._project(subscription, captures)
        subscription.expect(wish.credit_bytes)
        if wish.shared_memory:
            subscription.carrier.share(size, wish.namespace)
        self._open[subscription.name] = subscription
        inline = subscription.carrier.inline_reason
        _LOG.info(
            "subscription %s: %d specs%s",
            subscription.name,
            len(subscription.specs),
            f"; no shared memory: {inline}" if inline else "",
        )
        return subscription

    def resume(self, point: capture_service_pb2.ResumePoint) -> Subscription:
        """A subscription whose connection broke.

        Raises:
            SubscriptionNotFound: it is gone.
            CursorExpired, InvalidValue: it cannot go on from there.
            RheostatError: it has failed meanwhile.
        """
        name = point.subscription_id
        subscription = self._open.get(name) or self._failed.get(name)
        if subscription is None:
            raise _not_found(name, "open.resume.subscription_id")
        subscription.resume_after(point.after_sequence)
        self._stay(name)
        return subscription

    def left(self, subscription: Subscription, call: object) -> None:
        """A call that read one has ended: the subscription waits for another."""
        subscription.leave(call)
        if subscription.ended:
            self._remove(subscription)
        elif not subscription.connected and subscription.name in self._open:
            self._stay(subscription.name)
            loop = asyncio.get_running_loop()
            self._expiries[subscription.name] = loop.call_later(
                self.resume_window, self._expire, subscription
            )

    def forsake(self, subscription: Subscription) -> None:
        """One whose reader will not come back, or has never heard of it, is gone."""
        self._remove(subscription)
        subscription.fail(_not_found(subscription.name, "open.resume.subscription_id"))
        self._failed.pop(subscription.name, None)

    def named(self, name: str, path: str) -> Subscription:
        """One that takes rows.

        Raises:
            SubscriptionNotFound: there is none.
        """
        found = self._open.get(name)
        if found is None or not found.taking:
            raise _not_found(name, path)
        return found

    def selecting(self, request_id: str, labels: Mapping[str, str]) -> list[Subscription]:
        """Those whose filter selects a request."""
        return [one for one in self._open.values() if one.selects(request_id, labels)]

    def work(self, subscriptions: Sequence[Subscription], context: SelectionContext) -> int:
        """Bytes that `wishes` goes over; see `offload`."""
        specs = [spec for one in subscriptions for spec in one.specs]
        size = sum(spec.ByteSize() for spec in specs) + sum(one.projecting for one in subscriptions)
        return size + selector_work([spec.where for spec in specs], context)

    def wishes(
        self, subscriptions: Sequence[Subscription], context: SelectionContext
    ) -> list[Wish]:
        """What some of them want of a request that does not know of them."""
        return [
            Wish(one, dict(enumerate(self._resolved(one.specs, one.directions, context))))
            for one in subscriptions
        ]

    def end(self) -> None:
        """Nothing more is captured: what waits is sent, then each ends."""
        for one in list(self._open.values()):
            one.close()

    def remove_shared_memory(self) -> None:
        """Leaves nothing behind, though nobody took up what waits for its reader."""
        for one in self._open.values():
            one.carrier.close()

    def lose(self, error: RheostatError) -> None:
        """Ends all with an error."""
        for one in list(self._open.values()):
            one.fail(error)

    def _resolved(
        self,
        specs: Sequence[capture_pb2.CaptureSpec],
        directions: Sequence[Sequence[FoundVector]],
        context: SelectionContext,
    ) -> tuple[ResolvedCapture, ...]:
        """Specs in a request; what its prompt does not have is not captured."""
        return project_all(self._drafted(specs, context), directions, self._sites)

    def _drafted(
        self, specs: Sequence[capture_pb2.CaptureSpec], context: SelectionContext
    ) -> list[ResolvedCapture]:
        """The same without what rows are projected on."""
        lenient = replace(context, lenient=True)
        return [
            resolve_capture(
                spec, self._sites, lenient, f"open.captures[{number}]", Target.SUBSCRIPTION
            )
            for number, spec in enumerate(specs)
        ]

    def _project(self, subscription: Subscription, captures: Sequence[ResolvedCapture]) -> None:
        """Holds what its rows are projected on for as long as it is there.

        Names are looked up now: what they mean later is another subscription's.
        """
        found = find_all_directions(captures, self._loader.store, self._sites)
        vectors = [*direction_vectors(project_all(captures, found, self._sites)).values()]
        if not vectors:
            return
        self._loader.store.keep(vectors)
        subscription.directions = found
        subscription.projecting = sum(one.projecting for one in captures)
        load = asyncio.create_task(self._load(vectors))
        self._loads.add(load)
        load.add_done_callback(self._loads.discard)

    async def _load(self, vectors: Sequence[Vector]) -> None:
        """Brings vectors to the workers before a request waits for them."""
        with contextlib.suppress(EngineLost):  # every request hears of that
            await self._loader.ensure(vectors)

    def _check(self, wish: capture_service_pb2.SubscribeOpen) -> list[ResolvedCapture]:
        """Refuses a wish that cannot be served; what it captures of a typical request."""
        if not wish.HasField("filter"):
            raise MissingField("a filter is required", field="open.filter")
        _check_filter(wish.filter)
        checks.at_most(len(wish.captures), CAPTURES, "open.captures", "captures")
        for number, spec in enumerate(wish.captures):
            path = f"open.captures[{number}]"
            target = spec.WhichOneof("to")
            if target is not None:
                raise InvalidValue("the rows come here", field=join(path, target))
            if spec.HasField("overload"):
                raise InvalidValue(
                    "the subscription's own policy holds", field=join(path, "overload")
                )
        captures = self._drafted(wish.captures, self._typical)
        if wish.HasField("overload"):
            checks.known_enum(wish.overload, capture_pb2.Overload.values(), "open.overload")
            check_spill(wish.overload, "open.overload", spools=self._spillway is not None)
        return captures

    def _on_failed(self, subscription: Subscription) -> None:
        _LOG.info("subscription %s failed: %s", subscription.name, subscription.failure)
        self._remove(subscription)
        self._failed[subscription.name] = subscription
        while len(self._failed) > _REMEMBERED:
            self._failed.popitem(last=False)

    def _expire(self, subscription: Subscription) -> None:
        _LOG.info("subscription %s: its reader did not come back", subscription.name)
        self.forsake(subscription)

    def _remove(self, subscription: Subscription) -> None:
        self._stay(subscription.name)
        subscription.carrier.close()
        if self._open.pop(subscription.name, None) is not None:
            found = (one.vector for many in subscription.directions for one in many)
            self._loader.store.let_go([*{vector.digest: vector for vector in found}.values()])

    def _stay(self, name: str) -> None:
        expiry = self._expiries.pop(name, None)
        if expiry is not None:
            expiry.cancel()


def _check_filter(wanted: capture_service_pb2.RequestFilter) -> None:
    path = "open.filter"
    kind = checks.required(wanted.WhichOneof("kind"), path, "requests, labels and every")
    if kind == "requests":
        ids, field = wanted.requests.request_ids, f"{path}.requests.request_ids"
        if not ids:
            raise InvalidValue("at least one request id is required", field=field)
        checks.at_most(len(ids), SUBSCRIBED_REQUESTS, field, "request ids")
        for index, one in enumerate(ids):
            checks.matches(one, checks.REQUEST_ID, f"{field}[{index}]")
    elif kind == "labels":
        labels, field = wanted.labels.labels, f"{path}.labels.labels"
        if not labels:
            raise InvalidValue("at least one label is required", field=field)
        checks.at_most(len(labels), LABELS, field, "labels")


def _not_found(name: str, field: str) -> SubscriptionNotFound:
    return SubscriptionNotFound(
        "there is no such subscription: it has ended, nobody took it up in time, or this is the "
        "name of something else, such as a sink",
        field=field,
        resource=Resource("subscription", name[:128]),
    )
