"""Attaches subscriptions to requests that already run, and detaches them from running requests.

Invariants: a request neither waits for an observer nor is refused because of one. If the engine has
no capacity for an observer's captures, the observer gets no rows, and the reason. Changes of a
sample's captures reach the engine in the order of their numbers.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

from rheostat_engine import (
    OPEN_END,
    Attached,
    Capture,
    CaptureNeed,
    ModelSites,
    Plan,
    PlanTooLarge,
)
from rheostat_server.admission.estimates import estimate_observers
from rheostat_server.capture.engine_captures import engine_captures
from rheostat_server.capture.specs import ResolvedCapture
from rheostat_server.delivery.row_feed import RowFeed
from rheostat_server.engine.admission_queue import AdmissionQueue
from rheostat_server.engine.backend import Backend, CapturesUpdate
from rheostat_server.errors import BankFull, CaptureOverflow, EngineLost
from rheostat_server.requests.active_request import ActiveRequest
from rheostat_server.requests.sequence import EngineSequence, SequenceKind
from rheostat_server.selectors.spans import clipped
from rheostat_server.subscriptions.observer_captures import (
    Attachment,
    ObserverCapture,
    observer_captures,
)
from rheostat_server.subscriptions.pending_changes import (
    MissedRequest,
    PendingAttachment,
    PendingChange,
)
from rheostat_server.subscriptions.registry import Subscriptions
from rheostat_server.subscriptions.subscription import Subscription
from rheostat_server.tasks.futures import keep
from rheostat_server.tasks.offload import offload_plan
from rheostat_server.tasks.turns import Turns
from rheostat_server.tensors import FloatType

_LOG = logging.getLogger(__name__)

PATIENCE = 1.0
"""Seconds that the opening of a subscription may wait for running requests, approximately."""

_ENDING = "it is about to end"
_LATE = "the server had no time for it: too many requests run, or the captures are too fragmented"
_FRAGMENTED = "all its captures together would be too fragmented: use fewer, longer spans"


class LateAttachment:
    """Changes the captures of running requests. Used on the event loop alone."""

    def __init__(
        self,
        backend: Backend,
        sites: ModelSites,
        subscriptions: Subscriptions,
        queue: AdmissionQueue,
        active_requests: Mapping[str, ActiveRequest],
        routes: Mapping[str, tuple[ActiveRequest, EngineSequence]],
        add_route: Callable[[ActiveRequest, EngineSequence], None],
    ) -> None:
        """No captures have changed.

        Args:
            backend: the engine.
            sites: its sites.
            subscriptions: the open subscriptions.
            queue: holds the ledger of the engine's capacity.
            active_requests: the active requests, by id.
            routes: the receivers of the engine's events, by the id of a plan.
            add_route: adds a receiver.
        """
        self._backend = backend
        self._sites = sites
        self._subscriptions = subscriptions
        self._queue = queue
        self._active_requests = active_requests
        self._routes = routes
        self._add_route = add_route
        self._changed: dict[ActiveRequest, None] = {}
        """Requests whose new captures were not sent to the engine."""
        self._gone: set[str] = set()
        """Plan ids of ended samples, whose waiting changes the workers must discard."""
        self._sending: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._openings, self._catching_up = Turns(1), Turns(1)
        """Turns to attach new subscriptions, and to attach subscriptions to new requests."""

    async def attach(self, subscription: Subscription) -> None:
        """Attaches a new subscription to the running requests that it selects.

        Requests that wait for capacity are attached by `catch_up`, because an observer must not
        take the capacity for which they wait.

        Returns once each request has run its next step, or after `PATIENCE`.
        """
        subscription.on_left = partial(self._detach, subscription)
        running = [
            active
            for active in self._active_requests.values()
            if active.capacity_reserved
            and subscription.selects(active.admitted.request_id, active.admitted.labels)
        ]
        for active in running:
            active.attachment_attempts.add(subscription.name)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PATIENCE
        pending: list[PendingAttachment] = []
        for active in running:
            if loop.time() > deadline:
                _miss(subscription, active, _LATE)
                continue
            pending += await self._attach(subscription, active, named=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                for attachment in pending:
                    await attachment.resolved.wait()

    async def catch_up(self, active: ActiveRequest) -> None:
        """Attaches the subscriptions that were opened while the request was admitted.

        Also ends the captures for subscriptions that ended meanwhile. Is called once the request
        has reserved its capacity.
        """
        admitted = active.admitted
        if not len(self._subscriptions) and not admitted.observer_captures:
            return
        attempted = {
            observer_capture.subscription.name for observer_capture in admitted.observer_captures
        } | active.attachment_attempts
        for subscription in self._subscriptions.selecting(admitted.request_id, admitted.labels):
            if subscription.name not in attempted:
                await self._attach(subscription, active, named=False)
        if not all(observer.subscription.taking for observer in _observing(active)):
            self._change(active, _running(active))

    def detach(self, active: ActiveRequest) -> None:
        """Ends the waits for changes of a request that has ended."""
        for sequence in active.sequences:
            sequence.resolve_all_changes()
            if sequence.capture_changes > sequence.answered_changes:
                sequence.answered_changes = sequence.capture_changes
                self._gone.add(sequence.plan_id)
        if self._gone:
            self._send()

    async def _attach(
        self, subscription: Subscription, active: ActiveRequest, *, named: bool
    ) -> list[PendingAttachment]:
        """Attaches a subscription to a request. Returns a change for each running sample.

        At most one attachment begins in an iteration of the event loop, because it can take
        milliseconds. Cells of a sweep start together, and every open subscription may select each.

        Args:
            subscription: the subscription.
            active: the request.
            named: whether `SubscribeOpened` names the request, because the subscription is new.
        """
        await (self._openings if named else self._catching_up).turn()
        if not named and (not subscription.taking or active.closed):
            return []
        context = active.admitted.context
        spent = sum(observer.subscription.captures.cost for observer in _observing(active))
        (observer_capture,) = await offload_plan(
            estimate_observers([subscription], context.prompt_len),
            observer_captures,
            [subscription],
            context,
            spent,
        )
        async with active.capture_lock:
            need, reason = await self._need(active, observer_capture)
            sequences = _running(active)
            reason = observer_capture.missed or reason
            reason = reason or self._reserve(active, observer_capture, sequences, need)
            if reason and named:
                _miss(subscription, active, reason)
                return []
            if not subscription.taking or active.closed or not sequences:
                return []
            return self._add(active, observer_capture, sequences, reason, named=named)

    def _add(
        self,
        active: ActiveRequest,
        observer_capture: ObserverCapture,
        sequences: Sequence[EngineSequence],
        reason: str,
        *,
        named: bool,
    ) -> list[PendingAttachment]:
        """Adds a feed to a request; `reason` says why the engine captures nothing for it."""
        subscription = observer_capture.subscription
        feed = subscription.feed(
            active.admitted.request_id,
            active.admitted.prompt.token_ids,
            observer_capture.captures,
            FloatType(self._sites.dtype),
            fail=None,
        )
        active.outputs.add(feed, {})
        if observer_capture.missed:
            subscription.miss(feed, reason)
            return []
        if reason:
            _refuse(subscription, feed, reason)
            return []
        subscription.attached = (*subscription.attached, feed)
        active.attachments.append(Attachment(observer_capture, feed, named))
        self._change(active, sequences)
        pending: list[PendingAttachment] = []
        for sequence in sequences:
            feed.attach(sequence.key, sequence.tokens)
            pending.append(
                PendingAttachment(sequence.capture_changes, feed, partial(_refuse, subscription))
            )
            sequence.pending_changes.append(pending[-1])
        return pending

    async def _need(
        self, active: ActiveRequest, observer_capture: ObserverCapture | None = None
    ) -> tuple[CaptureNeed, str]:
        """The capacity that a sample needs beyond its own plan, with one more observer if given.

        Returns:
            The capacity, and the reason if no engine could capture all of it, otherwise "".
        """
        captures = self._captured(active)
        if observer_capture is not None:
            captures += observer_capture.captures.values()
        return await offload_plan(
            _work(active, observer_capture),
            _need_beside,
            active.sequences[0].job.plan,
            captures,
            _computed(active),
            active.admitted.prompt_len,
            self._queue.step_tokens,
        )

    def _reserve(
        self,
        active: ActiveRequest,
        observer_capture: ObserverCapture,
        sequences: Sequence[EngineSequence],
        need: CaptureNeed,
    ) -> str:
        """Reserves the capacity for one more observer. Returns the reason if it cannot, or "".

        Earlier reservations stay, because the engine may not have applied earlier changes yet.
        """
        if not sequences or not observer_capture.subscription.taking:
            return _ENDING
        queue, name = self._queue, _reservation(active)
        before = queue.ledger.observed(name)
        rows, sites = max(before.rows, len(sequences) * need.rows), max(before.sites, need.sites)
        try:
            queue.reserve_captures(name, CaptureNeed(rows, sites), active.reserved)
        except (BankFull, CaptureOverflow) as error:
            return f"the engine has no capacity for its rows: {error.message}"
        return ""

    def _captured(self, active: ActiveRequest) -> list[ResolvedCapture]:
        """All current captures of a request."""
        beside = (
            observer.beside for observer in _observing(active) if observer.subscription.taking
        )
        return [*active.admitted.captures, *chain.from_iterable(beside)]

    def _detach(self, subscription: Subscription) -> None:
        """Stops all captures for a subscription that takes no more rows."""
        subscription.on_left = lambda: None
        for active in self._active_requests.values():
            # Until a request has capacity, all its observers may still be refused. A change now
            # would make the engine capture for the others without room for their rows. `catch_up`
            # ends the captures for this subscription later.
            if not active.capacity_reserved:
                continue
            if all(observer.subscription is not subscription for observer in _observing(active)):
                continue
            detached = [
                attachment
                for attachment in active.attachments
                if attachment.observer_capture.subscription is subscription
            ]
            for attachment in detached:
                active.outputs.remove(attachment.feed)
                active.attachments.remove(attachment)
            self._change(active, _running(active))
            if detached:
                keep(self._tasks, self._release(active))

    async def _release(self, active: ActiveRequest) -> None:
        """Releases capacity of detached subscriptions, once the engine has applied the change."""
        while changes := _awaiting(active):
            for change in changes:
                await change.resolved.wait()
        async with active.capture_lock:
            name = _reservation(active)
            need, sequences = CaptureNeed(0, 0), _running(active)
            if active.attachments and sequences:
                need, _ = await self._need(active)
            if name in active.reserved and not _awaiting(active):
                rows = len(sequences) * need.rows
                self._queue.reserve_captures(name, need._replace(rows=rows), active.reserved)

    def _change(self, active: ActiveRequest, sequences: Sequence[EngineSequence]) -> None:
        """Numbers a change of the captures of some samples, and sends it soon."""
        for sequence in sequences:
            sequence.capture_changes += 1
            self._add_route(active, sequence)
            if not sequence.job.has_plan:
                sequence.released.clear()
        if sequences:
            self._changed[active] = None
            self._send()

    def _send(self) -> None:
        """Starts the task that sends all changes to the engine, unless it runs."""
        if self._sending is None or self._sending.done():
            self._sending = keep(self._tasks, self._send_all())

    async def _send_all(self) -> None:
        while self._changed or self._gone:
            changes: dict[str, CapturesUpdate | None] = {}
            while self._changed:
                if changes:
                    await asyncio.sleep(0)
                active = next(iter(self._changed))
                del self._changed[active]
                changes |= await self._changes(active)
            changes |= dict.fromkeys(self._gone)
            self._gone.clear()
            if not changes:  # the changed samples have ended
                continue
            try:
                await self._backend.update_captures(changes)
            except EngineLost:
                return  # the manager ends every request, and with it every wait
            except Exception as error:  # no caller awaits this task, so any error ends the waits
                _LOG.error("changed captures were not sent to the engine", exc_info=error)
                self._fail(
                    {name: update.number for name, update in changes.items() if update is not None}
                )

    async def _changes(self, active: ActiveRequest) -> dict[str, CapturesUpdate]:
        """The updates of a request's samples, by plan id; empty if they cannot be made."""
        prompt_len = active.admitted.prompt_len
        changed = {
            sequence.plan_id: (sequence.capture_changes, _computed_by(sequence, prompt_len))
            for sequence in _running(active)
        }
        try:
            captures, first = self._captured(active), _computed(active)
            updated = await offload_plan(_work(active), _captures_from, captures, first)
        except Exception as error:  # any error ends the waits, and other requests go on
            name = active.admitted.request_id
            _LOG.error("the changed captures of %s could not be made", name, exc_info=error)
            self._fail({name: number for name, (number, _) in changed.items()})
            return {}
        return {name: CapturesUpdate(number, updated, at) for name, (number, at) in changed.items()}

    def _fail(self, numbers: Mapping[str, int]) -> None:
        """Ends the waits for changes, by plan id, that cannot be sent to the engine."""
        for name, number in numbers.items():
            route = self._routes.get(name)
            if route is not None:
                failed = Attached(name, number, OPEN_END, "the change could not be sent")
                route[1].resolve_changes(failed)


def _miss(subscription: Subscription, active: ActiveRequest, reason: str) -> None:
    missed = MissedRequest(active.admitted.request_id, reason)
    subscription.missed = (*subscription.missed, missed)


def _observing(active: ActiveRequest) -> list[ObserverCapture]:
    """The observers of a request, also those that were detached but are still captured."""
    observed = () if active.unobserved else active.admitted.observer_captures
    return [
        *(observer_capture for observer_capture in observed if observer_capture.observed),
        *(attachment.observer_capture for attachment in active.attachments),
    ]


def _work(active: ActiveRequest, other: ObserverCapture | None = None) -> int:
    """Bytes that `offload` counts for all captures of a request, and of one more observer."""
    observing = [*_observing(active), *([] if other is None else [other])]
    subscriptions = [observer_capture.subscription for observer_capture in observing]
    return active.admitted.work + estimate_observers(subscriptions, active.admitted.prompt_len)


def _running(active: ActiveRequest) -> list[EngineSequence]:
    """The samples of a request that the engine may still capture.

    The engine may have released a sample whose last token has not arrived yet. It would never
    answer a change of that sample.
    """
    if active.closed:
        return []
    own = (sequence for sequence in active.sequences if sequence.kind is not SequenceKind.SCORE)
    return [sequence for sequence in own if not sequence.ended and not sequence.engine_done]


def _awaiting(active: ActiveRequest) -> list[PendingChange]:
    """The latest change of each sample, if the engine has not answered it."""
    pending: list[PendingChange] = []
    for sequence in active.sequences:
        in_engine = sequence.kind is not SequenceKind.SCORE and not (
            sequence.ended and sequence.released.is_set()
        )
        if in_engine and sequence.answered_changes < sequence.capture_changes:
            pending.append(PendingChange(sequence.capture_changes))
            sequence.pending_changes.append(pending[-1])
    return pending


def _reservation(active: ActiveRequest) -> str:
    """The name of the reservation for captures beyond the request's own plan."""
    return active.plan_id("observed")


def _computed(active: ActiveRequest) -> int:
    """A position up to which every running sample has computed its rows."""
    prompt_len = active.admitted.prompt_len
    return min((_computed_by(sequence, prompt_len) for sequence in _running(active)), default=0)


def _computed_by(sequence: EngineSequence, prompt_len: int) -> int:
    """A position up to which a sample has computed its rows."""
    return prompt_len + len(sequence.tokens) - 1 if sequence.tokens else 0


def _captures_from(captures: Sequence[ResolvedCapture], first: int) -> tuple[Capture, ...]:
    """The engine's captures from a position on."""
    cut = [
        replace(capture, spans=clipped(capture.spans, first, OPEN_END))
        for capture in engine_captures(captures)
    ]
    return tuple(capture for capture in cut if capture.spans)


def _need_beside(
    plan: Plan,
    captures: Sequence[ResolvedCapture],
    first: int,
    prompt_len: int,
    step_tokens: int,
) -> tuple[CaptureNeed, str]:
    """The capacity that captures from a position on need beyond a plan; see `_need`."""
    together = Plan("", (), _captures_from(captures, first))
    try:
        own, total = (
            captured.packed_captures.need(prompt_len=prompt_len, max_step_tokens=step_tokens)
            for captured in (plan, together)
        )
    except PlanTooLarge:
        return CaptureNeed(0, 0), _FRAGMENTED
    if total.rows <= own.rows and total.sites <= own.sites:
        return CaptureNeed(0, 0), ""
    return CaptureNeed(max(0, total.rows - own.rows), total.sites), ""


def _refuse(subscription: Subscription, feed: RowFeed, reason: str) -> None:
    """Reports to a subscription that the engine cannot capture a request for it."""
    if subscription.taking:
        problem = f"the engine cannot capture a running request: {reason}. Capture less"
        subscription.refuse(feed, frozenset(feed.captures), problem)
