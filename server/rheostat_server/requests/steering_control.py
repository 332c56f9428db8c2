"""Changes the steering of a running request, for its session and for the watches that read it.

Invariants: changes are applied one after another, in the order in which they came. Each change is
answered once. A refused change changes nothing. Work on a change ends before the request releases
what it has reserved.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol

from rheostat_engine import Plan
from rheostat_server.admission.admit import AdmissionContext
from rheostat_server.admission.planning import GoingOn, check_affordable
from rheostat_server.admission.updates import Kept, Replacing, compile_update
from rheostat_server.engine.admission_queue import AdmissionQueue, Reservation
from rheostat_server.engine.gain_updates import GainUpdates
from rheostat_server.engine.preparations import Preparations
from rheostat_server.engine.steering_updates import SteeringUpdates
from rheostat_server.errors import (
    Defect,
    EngineLost,
    InvalidValue,
    NotSupported,
    QueueFull,
    RequestNotFound,
    RheostatError,
)
from rheostat_server.limits import (
    RETRY_SECONDS,
    UPDATES,
    WAITING_GAINS,
    WAITING_UPDATES,
    WATCH_CHANGES,
)
from rheostat_server.requests.active_request import ActiveRequest
from rheostat_server.requests.request_gains import Positions, RequestGains
from rheostat_server.requests.response_queue import Notice
from rheostat_server.requests.sequence import EngineSequence, SteeringChange
from rheostat_server.requests.steering_change import Change
from rheostat_server.steering.gains import check_form
from rheostat_server.steering.interventions import Intervention
from rheostat_server.vectors.store import Vector
from rheostat_wire.v1 import gain_pb2, generation_pb2, receipt_pb2, steering_pb2

_LOG = logging.getLogger(__name__)

_ENDED = "every sample has ended"


class EngineAccess(Protocol):
    """What a change of the steering needs of the server."""

    admission_queue: AdmissionQueue
    """The engine's capacity."""
    preparations: Preparations
    """Builds tables in the workers."""
    steering_updates: SteeringUpdates
    """Sends acts to the engine."""
    gain_updates: GainUpdates
    """Sends gains to the engine."""

    @property
    def admission(self) -> AdmissionContext:
        """Everything that a new steering is checked against."""

    async def pin_vectors(self, active: ActiveRequest, vectors: Sequence[Vector]) -> None:
        """Loads vectors, and keeps them until the request ends."""


class _Part(NamedTuple):
    """A part of the steering that is replaced as a whole."""

    interventions: tuple[Intervention, ...] = ()
    work: int = 0
    """Bytes that `offload` counts for each pass over them."""


class SteeringControl:
    """Changes the steering of one request. Used on the event loop alone."""

    def __init__(self, active: ActiveRequest, engine: EngineAccess) -> None:
        """Nothing has changed yet.

        Args:
            active: the request.
            engine: applies the changes.
        """
        self._active = active
        self._admitted = active.admitted
        self._engine = engine
        every = self._admitted.interventions
        self._server_wide = tuple(
            intervention
            for intervention in every
            if intervention.origin == receipt_pb2.ORIGIN_GLOBAL
        )
        others = every[len(self._server_wide) :]
        own = tuple(intervention for intervention in others if intervention.own)
        self._own = _Part(own, self._admitted.work)
        """The request's own interventions that are in force."""
        self._ruled = _Part(others[len(own) :], self._admitted.work)
        """What its rules steer, and those of watches. It stays."""
        self._going_on = GoingOn.of(self._admitted.plan)
        self._layers: dict[str, _Part] = {}
        """The layers of watches, which act in the order of their first changes."""
        self._spent = 0
        """Cost of the plan and its updates; 0 before the first update."""
        self._applied = 0
        """Changes of the steering, without gains, that were carried out."""
        self._queue: deque[Change] = deque()
        self._unanswered: Counter[tuple[str, bool]] = Counter()
        """Changes that were not answered, by watch, and by whether they are gains."""
        self._pending = 0
        """Changes of watches that were not answered."""
        self._gains = RequestGains(active, engine.gain_updates)
        self._task: asyncio.Task[None] | None = None
        self._receipts: dict[str, receipt_pb2.WatchReceipt] = {}
        """What each watch has changed."""

    @property
    def pending(self) -> bool:
        """Whether a change of a watch was not answered. The receipt would lack it."""
        return self._pending > 0

    @property
    def by_watches(self) -> Iterable[receipt_pb2.WatchReceipt]:
        """What watches have changed, in the order of their first changes."""
        return self._receipts.values()

    @property
    def task(self) -> asyncio.Task[None] | None:
        """The task that applies changes; None if there is none."""
        return None if self._task is None or self._task.done() else self._task

    def submit(self, change: Change) -> None:
        """Applies a change after those before it.

        Raises:
            RheostatError: it is malformed, too many wait, or the request has ended. It is not
                answered then.
        """
        most, what = WAITING_UPDATES, "updates"
        if isinstance(change.what, gain_pb2.Gain):
            check_form(change.what, "gain")
            most, what = WAITING_GAINS, "gains"
        if all(sequence.ended for sequence in self._active.own_samples) or self._active.closed:
            raise RequestNotFound(_ENDED)
        kind = change.watch, change.is_gain
        if self._unanswered[kind] >= most:
            raise QueueFull(
                f"{most} {what} wait for their answers already; send the next once some have been "
                "answered",
                field="gain" if change.is_gain else "",
                retry_after=RETRY_SECONDS,
            )
        self._unanswered[kind] += 1
        self._pending += bool(change.watch)
        change = change._replace(answer=partial(self._answer, change))
        if self.task is None and self._gains.installed and isinstance(change.what, gain_pb2.Gain):
            # A task would cost more than sending the gain, and begin in the next iteration.
            with self._refusing(change):
                self._gains.apply(change.watch, change.what, partial(_answer_gain, change))
            return
        self._queue.append(change)
        if self.task is None:
            self._task = asyncio.create_task(self._work())
            self._task.add_done_callback(self._ended)

    def cancel(self) -> None:
        """Ends the work, because the request ends; changes that wait are refused."""
        if self._task is not None:
            self._task.cancel()
        while self._queue:
            self._queue.popleft().refuse(RequestNotFound(_ENDED))

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Forgets a task that has ended: its error refers to this object."""
        if self._task is task:
            self._task = None

    def _answer(self, change: Change, notice: Notice) -> None:
        self._unanswered[change.watch, change.is_gain] -= 1
        self._pending -= bool(change.watch)
        if change.watch and isinstance(notice, generation_pb2.UpdateApplied):
            self._record(change, notice)
        change.answer(notice)
        if change.watch:
            self._active.on_answered()

    def _record(self, change: Change, notice: generation_pb2.UpdateApplied) -> None:
        """Notes a change of a watch for the receipt."""
        receipt = self._receipts.setdefault(
            change.watch, receipt_pb2.WatchReceipt(watch_id=change.watch)
        )
        receipt.change_count += 1
        if sum(len(written.changes) for written in self._receipts.values()) < WATCH_CHANGES:
            done = receipt.changes.add(
                update_id=change.number, first_positions=notice.first_positions
            )
            if isinstance(change.what, gain_pb2.Gain):
                done.gain.CopyFrom(change.what)
            else:
                message = done.layer if change.layer else done.replace
                message.intervention_count = len(change.what.interventions)

    async def _work(self) -> None:
        """Applies changes of the steering, and sends gains, one after another."""
        while self._queue:
            change = self._queue.popleft()
            with self._refusing(change):
                if isinstance(change.what, gain_pb2.Gain):
                    setter, number, gain = change.watch, change.number, change.what
                    if not self._gains.installed:
                        await self._gains.install(setter, number, gain, self._install)
                    self._gains.apply(setter, gain, partial(_answer_gain, change))
                else:
                    await self._gains.settled()
                    change.answer(await self._apply(change, change.what))

    @contextmanager
    def _refusing(self, change: Change) -> Iterator[None]:
        """Answers a change with a refusal if the block raises an exception."""
        try:
            yield
        except asyncio.CancelledError:
            change.refuse(RequestNotFound(_ENDED))
            raise
        except (EngineLost, Defect) as error:
            self._active.fail(error)
            change.refuse(error)
        except RheostatError as error:
            change.refuse(error)
        except Exception as error:  # no caller handles this, so any error fails the request
            _LOG.error("update of %s failed", self._admitted.request_id, exc_info=error)
            failure = Defect("the server could not carry an update out")
            self._active.fail(failure)
            change.refuse(failure)

    async def _apply(
        self, change: Change, steering: steering_pb2.Steering
    ) -> generation_pb2.UpdateApplied:
        """Replaces the request's own steering, or the layer of a watch.

        Raises:
            EngineLost, Defect: the request has failed.
            RheostatError: the update is refused.
        """
        number, watch = change.number, change.watch
        self._check_replaceable(change)
        kept = self._kept(watch if change.layer else "")
        origin = receipt_pb2.ORIGIN_WATCH if change.layer else receipt_pb2.ORIGIN_UPDATE
        compiled = await compile_update(
            steering,
            self._engine.admission,
            self._admitted.context,
            kept,
            Replacing(origin, number, watch),
        )
        plan = replace(compiled.plan, request_id=self._active.plan_id(f"update{number}{watch}"))
        taken = await self._install(plan, compiled.vectors)
        self._applied += 1
        every, work = compiled.interventions, compiled.work
        for sequence, first in taken:
            sequence.steering_changes.append(
                SteeringChange(0 if watch else number, first, every, work)
            )
        part = _Part(compiled.own, work - kept.work)
        if change.layer:
            self._layers[watch] = part
            self._gains.begin_plan(every, plan, work)
        else:
            self._own = part
            self._gains.begin_list((watch, number), every, plan, work)
        return generation_pb2.UpdateApplied(
            update_id=number,
            first_positions=[
                generation_pb2.SamplePosition(sample=sequence.sample, position=first)
                for sequence, first in taken
            ],
        )

    def _check_replaceable(self, change: Change) -> None:
        """Checks that steering can be replaced now.

        Raises:
            NotSupported: gains would be lost.
            InvalidValue: too much was replaced already.
        """
        signals = self._admitted.signals
        if not change.layer and signals and any(rule.gains for rule in signals.rules):
            raise NotSupported(
                "a rule multiplies the steering of this request, its own, the server's or that of "
                "a watch, and would not multiply other steering: send the request anew",
                field="steering",
            )
        if change.layer and self._gains.multiply:
            raise NotSupported(
                "a layer would begin with gains of 1, and gains of this request are others: set "
                "them to 1 first",
                field="steering",
            )
        if self._applied >= UPDATES:
            raise InvalidValue(
                f"{UPDATES} updates were carried out; a request takes no more", field="steering"
            )

    def _kept(self, watch: str) -> Kept:
        """What stays when the layer of a watch, or the request's own steering, is replaced."""
        before = [_Part(self._server_wide)]
        after = [self._ruled, *self._layers.values()]
        if watch:
            place = 1 + [*self._layers, watch].index(watch)
            before += [self._own, *after[:place]]
            after = after[place + 1 :]
        return Kept(
            tuple(intervention for part in before for intervention in part.interventions),
            tuple(intervention for part in after for intervention in part.interventions),
            self._going_on,
            sum(part.work for part in (*before, *after)),
        )

    async def _install(
        self, plan: Plan, vectors: Sequence[Vector] = ()
    ) -> list[tuple[EngineSequence, int]]:
        """Reserves what a plan needs, and applies its acts to the samples; as `_put`.

        Raises:
            EngineLost, Defect: the request has failed.
            RheostatError: the engine cannot hold the acts, or every sample has ended.
        """
        active, admitted, engine = self._active, self._admitted, self._engine
        spent = check_affordable(self._spent or admitted.plan.packed_acts.plan_cost, plan)
        reservation = Reservation(plan, len(active.own_samples))
        reserved: list[str] = []
        engine.admission_queue.reserve_now(
            reservation, prompt_len=admitted.prompt_len, reserved=reserved
        )
        try:
            await engine.pin_vectors(active, vectors)
        except BaseException:
            engine.admission_queue.release(reserved)
            raise
        active.reserved += reserved
        active.prepared.append(await engine.preparations.prepare(plan))
        taken = await self._put(plan)
        if not taken:
            raise RequestNotFound(_ENDED)
        self._spent = spent
        return taken

    async def _put(self, plan: Plan) -> list[tuple[EngineSequence, int]]:
        """Applies a plan's acts to the samples, to each as soon as the engine runs it.

        Returns:
            The samples that have not ended, and the first position on which the acts apply.
        """
        taken: list[tuple[EngineSequence, int]] = []
        waiting = self._active.own_samples
        while waiting:
            # vLLM schedules the samples of a request in order, so the first is installed first.
            await waiting[0].installed_or_ended.wait()
            running = [
                sequence for sequence in waiting if sequence.installed and not sequence.ended
            ]
            waiting = [sequence for sequence in waiting if not sequence.installed_or_ended.is_set()]
            positions = await self._engine.steering_updates.apply(
                plan, [sequence.plan_id for sequence in running], self._admitted.prompt_len
            )
            for sequence, first in zip(running, positions, strict=True):
                if first is not None:
                    taken.append((sequence, first))
        return sorted(taken, key=lambda one: one[0].sample)


def _answer_gain(change: Change, firsts: Positions) -> None:
    if firsts:
        change.answer(generation_pb2.UpdateApplied(update_id=change.number, first_positions=firsts))
    else:
        change.refuse(RequestNotFound(_ENDED))
