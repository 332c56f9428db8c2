"""A session as its client has it."""

import asyncio
from dataclasses import dataclass, replace

import grpc

from rheostat_wire.v1 import (
    gain_pb2,
    generation_pb2,
    generation_service_pb2,
    steering_pb2,
)

from .conftest import Refusal, rest
from .fakes import ScriptedBackend
from .messages import request

P = 3
"""Tokens of the prompt."""


def start(*, batches: bool = False, **fields: object) -> generation_service_pb2.SessionRequest:
    fields.setdefault("sampling", generation_pb2.Sampling(max_tokens=6))
    return generation_service_pb2.SessionRequest(start=request(**fields), batches=batches)


def update(number: int, *interventions: steering_pb2.Intervention):
    steering = steering_pb2.Steering(interventions=interventions)
    return generation_service_pb2.SessionRequest(update_id=number, steering=steering)


def gain(number: int, factor: float | None, *interventions: int):
    message = gain_pb2.Gain(factor=factor, interventions=interventions)
    return generation_service_pb2.SessionRequest(update_id=number, gain=message)


def stop(number: int) -> generation_service_pb2.SessionRequest:
    return generation_service_pb2.SessionRequest(
        update_id=number, stop=generation_service_pb2.SessionStop()
    )


def applied(number: int, **positions: int) -> generation_pb2.UpdateApplied:
    """An answer; positions are given as s0=..., s1=..."""
    return generation_pb2.UpdateApplied(
        update_id=number,
        first_positions=[
            generation_pb2.SamplePosition(sample=int(name[1:]), position=position)
            for name, position in positions.items()
        ],
    )


@dataclass(frozen=True)
class RefusedUpdate(Refusal):
    """An update that was refused, with the details of a call that fails."""

    update_id: int = 0

    @classmethod
    def of_update(cls, message: generation_pb2.UpdateRefused) -> "RefusedUpdate":
        status = message.status
        code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
        return replace(cls.of_status(status, code, status.message), update_id=message.update_id)


class SessionCall:
    """The client side of a session."""

    def __init__(self, running) -> None:
        self.call = running.client.generation.Session()
        self.events: list[generation_service_pb2.SessionResponse] = []

    async def say(self, *messages: generation_service_pb2.SessionRequest) -> None:
        for message in messages:
            await self.call.write(message)

    async def hear(self, kind: str):
        """The next event of a kind; those before it are kept."""
        while True:
            event = await self.next()
            if event.WhichOneof("event") == kind:
                return getattr(event, kind)

    async def next(self) -> generation_service_pb2.SessionResponse:
        """The next message, which is kept."""
        event = await asyncio.wait_for(self.call.read(), 10)
        assert event is not grpc.aio.EOF
        self.events.append(event)
        return event

    async def refused(self) -> RefusedUpdate:
        """The next refusal; what comes before it is kept."""
        return RefusedUpdate.of_update(await self.hear("refused"))

    async def end(self) -> list[generation_service_pb2.SessionResponse]:
        """Every event, once the call has ended."""
        return await rest(self.call, self.events)


async def held(starter, count: int = 1, *, batches: bool = False, **fields: object):
    """A server, and a session whose samples wait after `count` tokens each."""
    backend = ScriptedBackend(hold=asyncio.Event(), hold_from=count)
    running = await starter(backend)
    talk = SessionCall(running)
    await talk.say(start(batches=batches, **fields))
    heard = 0
    while heard < count:
        event = await talk.next()
        heard += sum(len(one.tokens.token_ids) for one in (event.batch.events or [event]))
    return running, talk
