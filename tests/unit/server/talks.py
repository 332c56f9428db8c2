"""A session as its client has it."""

import asyncio

import grpc

from rheostat._proto.v1 import (
    generation_pb2,
    generation_service_pb2,
    monitor_pb2,
    steering_pb2,
)

from .conftest import rest
from .fakes import ScriptedBackend
from .messages import request

P = 3
"""Tokens of the prompt."""


def start(**fields: object) -> generation_service_pb2.SessionRequest:
    fields.setdefault("sampling", generation_pb2.Sampling(max_tokens=6))
    return generation_service_pb2.SessionRequest(start=request(**fields))


def update(number: int, *interventions: steering_pb2.Intervention):
    steering = steering_pb2.Steering(interventions=interventions)
    return generation_service_pb2.SessionRequest(update_id=number, steering=steering)


def stop(number: int) -> generation_service_pb2.SessionRequest:
    return generation_service_pb2.SessionRequest(
        update_id=number, stop=generation_service_pb2.SessionStop()
    )


def applied(number: int, **positions: int) -> monitor_pb2.UpdateApplied:
    """An answer; positions are given as s0=..., s1=..."""
    return monitor_pb2.UpdateApplied(
        update_id=number,
        first_positions=[
            monitor_pb2.SamplePosition(sample=int(name[1:]), position=position)
            for name, position in positions.items()
        ],
    )


class Talk:
    """A session, as its client has it."""

    def __init__(self, running) -> None:
        self.call = running.client.generation.Session()
        self.events: list[generation_service_pb2.SessionResponse] = []

    async def say(self, *messages: generation_service_pb2.SessionRequest) -> None:
        for message in messages:
            await self.call.write(message)

    async def hear(self, kind: str):
        """The next event of a kind; those before it are kept."""
        while True:
            event = await asyncio.wait_for(self.call.read(), 10)
            assert event is not grpc.aio.EOF
            self.events.append(event)
            if event.WhichOneof("event") == kind:
                return getattr(event, kind)

    async def end(self) -> list[generation_service_pb2.SessionResponse]:
        """Every event, once the call has ended."""
        return await rest(self.call, self.events)


async def held(starter, count: int = 1, **fields: object):
    """A server, and a session whose samples wait after `count` tokens each."""
    backend = ScriptedBackend(hold=asyncio.Event(), hold_from=count)
    running = await starter(backend)
    talk = Talk(running)
    await talk.say(start(**fields))
    for _ in range(count):
        await talk.hear("tokens")
    return running, talk
