"""A watch as its client has it."""

import asyncio

import grpc
import numpy as np

from rheostat_wire.v1 import (
    capture_service_pb2,
    gate_pb2,
    generation_pb2,
    monitor_pb2,
    monitor_service_pb2,
)

from .conftest import Refusal
from .fakes import ScriptedBackend
from .messages import probe, request
from .streams import settled, until
from .subscribers import EVERY, PLENTY
from .talks import P

SAMPLING = generation_pb2.Sampling(max_tokens=6)

pb = monitor_service_pb2
Request = monitor_service_pb2.WatchRequest
Response = monitor_service_pb2.WatchResponse


def opening(
    *probes: gate_pb2.Probe,
    filter: capture_service_pb2.RequestFilter | None = EVERY,
    credit: int = PLENTY,
    **fields: object,
) -> monitor_service_pb2.WatchOpen:
    return pb.WatchOpen(filter=filter, probes=probes or [probe("a")], credit_bytes=credit, **fields)


def rule(
    bound: float, name: str = "high", probe_name: str = "a", **action: object
) -> monitor_pb2.Rule:
    condition = gate_pb2.Condition(probe_name=probe_name, above=bound)
    return monitor_pb2.Rule(name=name, conditions=[condition], **(action or {"observe": {}}))


class Watcher:
    """A call of Watch."""

    def __init__(self, running) -> None:
        self.call = running.client.monitor.Watch()
        running.client.kept.append(self.call)
        self.events: list[Response] = []
        self.name = ""

    @classmethod
    async def open(cls, running, message: monitor_service_pb2.WatchOpen) -> "Watcher":
        """A watch that stands."""
        one = cls(running)
        await one.call.write(Request(open=message))
        one.name = (await one.hear()).opened.watch_id
        return one

    @classmethod
    async def resume(cls, running, name: str, after: int, credit: int = PLENTY) -> "Watcher":
        point = pb.WatchResume(watch_id=name, after_sequence=after)
        return await cls.open(running, pb.WatchOpen(resume=point, credit_bytes=credit))

    async def say(self, **fields: object) -> None:
        await self.call.write(Request(**fields))

    async def hear(self) -> Response:
        """The next event."""
        event = await asyncio.wait_for(self.call.read(), 10)
        assert event is not grpc.aio.EOF
        self.events.append(event)
        return event

    async def until(self, kind: str, count: int = 1) -> Response:
        """Reads until so many events of a kind have come; the last of them."""
        while len(self.of(kind)) < count:
            await self.hear()
        return self.of(kind)[count - 1]

    async def rest(self) -> None:
        """Closes its side, and reads to the end."""
        await self.call.done_writing()
        while (event := await asyncio.wait_for(self.call.read(), 10)) is not grpc.aio.EOF:
            self.events.append(event)

    def of(self, kind: str) -> list[Response]:
        return [event for event in self.events if event.WhichOneof("event") == kind]

    def read(self, number: int = 1, sample: int = 0) -> dict[int, list[float]]:
        """What was read of a sample, by position."""
        found: dict[int, list[float]] = {}
        for event in self.of("signals"):
            signals = event.signals
            values = np.frombuffer(signals.values.inline, "<f4")
            values = values.reshape(tuple(signals.values.shape))
            row = 0
            for n, s, first, count in zip(
                signals.numbers,
                signals.samples,
                signals.first_positions,
                signals.row_counts,
                strict=True,
            ):
                for position in range(first, first + count):
                    if (n, s) == (number, sample):
                        assert position not in found
                        found[position] = values[row].tolist()
                    row += 1
            assert row == len(values)
        return found


async def watched(
    starter,
    *interventions,
    rules=(),
    own_rules=(),
    backend=None,
    batches: bool = False,
    **fields: object,
):
    """A server, a watch that steers, and a call whose samples wait after two tokens."""
    backend = backend or ScriptedBackend(hold=asyncio.Event(), hold_from=2)
    running = await starter(backend)
    watcher = await Watcher.open(running, opening(steers=True, rules=rules, batches=batches))
    fields.setdefault("sampling", SAMPLING)
    call = running.client.generation.Generate(
        request(request_id="r", steer=interventions, rules=own_rules, **fields)
    )
    await until(lambda: bool(backend.jobs) and len(backend.positions) == len(backend.jobs))
    await until(lambda: set(backend.positions.values()) == {P + 1})
    return running, watcher, call


async def refused(watcher: Watcher, count: int = 1) -> tuple[int, Refusal]:
    """The id and the refusal of the update that was refused as the `count`th."""
    message = (await watcher.until("refused", count)).refused
    refusal = Refusal.of_status(message.status, grpc.StatusCode.OK, message.status.message)
    return message.update_id, refusal


async def clean(running) -> bool:
    """Whether nothing is held once all requests have ended."""
    stats = await settled(running)
    return (stats.leaked_count, running.manager.ledger.requests) == (0, 0)
