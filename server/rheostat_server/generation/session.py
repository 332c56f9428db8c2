"""A session: a request whose client may change its steering while it runs.

Invariants: updates are applied one after another. Each update is answered once. If an update came
before the last sample ended, its answer precedes the receipt. A refused update changes nothing.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import NamedTuple

from rheostat_engine import Plan
from rheostat_server.admission.admit import AdmittedRequest, admit
from rheostat_server.admission.planning import check_affordable
from rheostat_server.admission.updates import compile_update
from rheostat_server.delivery.row_messages import CapturedRows
from rheostat_server.engine.admission_queue import Reservation
from rheostat_server.errors import (
    Defect,
    EngineLost,
    InvalidValue,
    MissingField,
    NotSupported,
    QueueFull,
    RequestNotFound,
    RheostatError,
)
from rheostat_server.generation.responses import run
from rheostat_server.generation.sample import Response
from rheostat_server.generation.session_gains import SessionGains, refused
from rheostat_server.limits import RETRY_SECONDS, UNREAD_ANSWERS, UPDATES, WAITING_UPDATES
from rheostat_server.requests.active_request import ActiveRequest
from rheostat_server.requests.manager import RequestManager
from rheostat_server.requests.response_queue import Notice
from rheostat_server.requests.sequence import EngineSequence, SteeringChange
from rheostat_server.vectors.store import Vector
from rheostat_wire.message_parts import MessageParts
from rheostat_wire.v1 import (
    gain_pb2,
    generation_pb2,
    generation_service_pb2,
    receipt_pb2,
    steering_pb2,
)

_LOG = logging.getLogger(__name__)

_pb = generation_service_pb2
Message = generation_service_pb2.SessionRequest
Answer = generation_service_pb2.SessionResponse


class _Update(NamedTuple):
    """An update of the steering, or of its gains."""

    number: int
    change: steering_pb2.Steering | gain_pb2.Gain


async def run_session(
    messages: AsyncIterator[Message], manager: RequestManager
) -> AsyncGenerator[Answer | MessageParts, None]:
    """Runs a session: applies its client's messages, and yields the answers.

    Raises:
        RheostatError: the request could not start, or failed.
    """
    request = await _opening(messages)
    begun = False
    try:
        admitted = await admit(request, manager.admission, changeable=True)

        async def listen(active: ActiveRequest) -> None:
            await _Control(admitted, active, manager).listen(messages)

        async with aclosing(run(admitted, manager, listen)) as happenings:
            async for happening in happenings:
                begun = True
                yield _to_wire(happening)
    except RheostatError as error:
        if error.field and not begun:
            error.field = f"start.{error.field}"
        raise


async def _opening(messages: AsyncIterator[Message]) -> generation_service_pb2.GenerateRequest:
    async for message in messages:
        if message.WhichOneof("action") != "start":
            break
        if message.update_id:
            raise InvalidValue("start has no update_id", field="update_id")
        return message.start
    raise MissingField("a session's first message is start", field="start")


def _to_wire(happening: Response | CapturedRows | Notice) -> Answer | MessageParts:
    if isinstance(happening, CapturedRows):
        return happening.as_field(_pb.SessionResponse.CAPTURED_FIELD_NUMBER)
    if isinstance(happening, generation_pb2.UpdateApplied):
        return _pb.SessionResponse(applied=happening)
    if isinstance(happening, generation_pb2.UpdateRefused):
        return _pb.SessionResponse(refused=happening)
    kind = happening.WhichOneof("event")
    assert kind is not None
    answer = _pb.SessionResponse()
    getattr(answer, kind).CopyFrom(getattr(happening, kind))
    return answer


class _Control:
    """Applies a client's messages to a running request."""

    def __init__(
        self, admitted: AdmittedRequest, active: ActiveRequest, manager: RequestManager
    ) -> None:
        self._admitted = admitted
        self._active = active
        self._manager = manager
        self._server_wide = tuple(
            one for one in admitted.interventions if one.origin == receipt_pb2.ORIGIN_GLOBAL
        )
        self._spent = 0
        """Cost of the plan and its updates; 0 before the first update."""
        self._applied = 0
        self._last_number = 0
        self._updates: asyncio.Queue[_Update | None] = asyncio.Queue()
        self._waiting = 0
        """Updates of the steering in the queue."""
        self._gains = SessionGains(admitted, active, manager)

    async def listen(self, messages: AsyncIterator[Message]) -> None:
        """Reads and applies the client's messages, until the client sends no more."""
        worker = asyncio.create_task(self._work())
        try:
            async for message in messages:
                self._hear(message)
            self._updates.put_nowait(None)
            await worker
        except RheostatError as error:
            self._active.fail(error)
        except Exception as error:  # the task ends here, so any error must fail the request
            _LOG.error("session %s failed", self._admitted.request_id, exc_info=error)
            self._active.fail(Defect("the server could not read the session's messages"))
        finally:
            worker.cancel()
            await asyncio.wait({worker})

    def _hear(self, message: Message) -> None:
        self._active.pending_notices += 1
        if self._active.pending_notices > UNREAD_ANSWERS:
            self._active.fail(
                QueueFull(
                    f"{UNREAD_ANSWERS} answers wait to be read; read what the session sends",
                    retry_after=RETRY_SECONDS,
                )
            )
            return
        try:
            self._begin(message)
        except RheostatError as error:
            self._active.notify(refused(message.update_id, error))

    def _begin(self, message: Message) -> None:
        """Ends the request, or queues an update.

        Raises:
            RheostatError: the message is refused.
        """
        action = message.WhichOneof("action")
        if action is None:
            raise MissingField("one of steering, stop and gain is required")
        if action == "start":
            raise InvalidValue("only a session's first message is start", field="start")
        if message.update_id <= self._last_number:
            raise InvalidValue(
                f"update ids must rise; the last was {self._last_number}", field="update_id"
            )
        self._last_number = message.update_id
        if action == "stop":
            self._active.abort()
            self._active.notify(generation_pb2.UpdateApplied(update_id=message.update_id))
        elif action == "gain":
            self._gains.check(message.gain)
            self._updates.put_nowait(_Update(message.update_id, message.gain))
        else:
            if self._waiting >= WAITING_UPDATES:
                raise QueueFull(
                    f"{WAITING_UPDATES} updates wait already; try again later",
                    retry_after=RETRY_SECONDS,
                )
            self._waiting += 1
            self._updates.put_nowait(_Update(message.update_id, message.steering))

    async def _work(self) -> None:
        """Applies updates of the steering, and sends gains, one after another."""
        while (update := await self._updates.get()) is not None:
            number, change = update
            try:
                if isinstance(change, gain_pb2.Gain):
                    await self._gains.apply(number, change, self._install)
                else:
                    self._waiting -= 1
                    await self._gains.settled()
                    self._active.notify(await self._apply(number, change))
            except (EngineLost, Defect) as error:
                self._active.fail(error)
            except RheostatError as error:
                self._active.notify(refused(number, error))
            except Exception as error:  # no caller awaits this, so any error fails the request
                _LOG.error("update of %s failed", self._admitted.request_id, exc_info=error)
                self._active.fail(Defect("the server could not carry an update out"))

    async def _apply(
        self, number: int, steering: steering_pb2.Steering
    ) -> generation_pb2.UpdateApplied:
        """Applies an update.

        Raises:
            EngineLost, Defect: the request has failed.
            RheostatError: the update is refused.
        """
        signals = self._admitted.signals
        if signals is not None and (signals.rules or signals.gates):
            raise NotSupported(
                "the steering of a request with rules, or with signals of gates, can't be updated: "
                "send the request anew",
                field="steering",
            )
        if self._applied >= UPDATES:
            raise InvalidValue(
                f"{UPDATES} updates were carried out; a session takes no more", field="steering"
            )
        compiled = await compile_update(
            steering,
            self._manager.admission,
            self._admitted.context,
            self._server_wide,
            () if signals is None else signals.probes,
        )
        plan = replace(compiled.plan, request_id=self._active.plan_id(f"update{number}"))
        taken = await self._install(plan, compiled.vectors)
        self._applied += 1
        for sequence, first in taken:
            sequence.steering_changes.append(
                SteeringChange(number, first, compiled.interventions, compiled.work)
            )
        self._gains.begin_list(number, compiled.interventions, plan, compiled.work)
        return generation_pb2.UpdateApplied(
            update_id=number,
            first_positions=[
                generation_pb2.SamplePosition(sample=sequence.sample, position=first)
                for sequence, first in taken
            ],
        )

    async def _install(
        self, plan: Plan, vectors: Sequence[Vector] = ()
    ) -> list[tuple[EngineSequence, int]]:
        """Reserves what a plan needs, and applies its acts to the samples; as `_put`.

        Raises:
            EngineLost, Defect: the request has failed.
            RheostatError: the engine cannot hold the acts, or every sample has ended.
        """
        active, admitted = self._active, self._admitted
        spent = check_affordable(self._spent or admitted.plan.packed_acts.plan_cost, plan)
        reservation = Reservation(plan, len(active.own_samples))
        reserved: list[str] = []
        self._manager.admission_queue.reserve_now(
            reservation, prompt_len=admitted.prompt_len, reserved=reserved
        )
        try:
            await self._manager.pin_vectors(active, vectors)
        except BaseException:
            self._manager.admission_queue.release(reserved)
            raise
        active.reserved += reserved
        active.prepared.append(await self._manager.preparations.prepare(plan))
        taken = await self._put(plan)
        if not taken:
            raise RequestNotFound("every sample has ended")
        self._spent = spent
        return taken

    async def _put(self, plan: Plan) -> list[tuple[EngineSequence, int]]:
        """Applies a plan's acts to the samples, to each as soon as the engine runs it.

        Returns:
            The samples that have not ended, and the first position on which the acts apply.
        """
        firsts: dict[EngineSequence, int] = {}
        waiting = self._active.own_samples
        while waiting:
            # vLLM schedules the samples of a request in order, so the first is installed first.
            await waiting[0].installed_or_ended.wait()
            running = [
                sequence for sequence in waiting if sequence.installed and not sequence.ended
            ]
            waiting = [sequence for sequence in waiting if not sequence.installed_or_ended.is_set()]
            positions = await self._manager.steering_updates.apply(
                plan, [sequence.plan_id for sequence in running], self._admitted.prompt_len
            )
            firsts |= {
                sequence: first
                for sequence, first in zip(running, positions, strict=True)
                if first is not None
            }
        return [
            (sequence, firsts[sequence])
            for sequence in self._active.own_samples
            if sequence in firsts
        ]
