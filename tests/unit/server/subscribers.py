"""A subscription as its client has it."""

import asyncio
import struct
from collections.abc import Sequence

import google_crc32c
import grpc
import grpc.aio
import numpy as np
import pytest

from rheostat_engine import Point, Site
from rheostat_wire.message_parts import MessageParts
from rheostat_wire.v1 import capture_pb2, capture_service_pb2, generation_pb2, types_pb2

from .conftest import Refusal
from .fakes import WIDTH, row
from .messages import request, site_set

Message = capture_service_pb2.SubscribeRequest
POST = types_pb2.POINT_RESID_POST
ROW = 4 * WIDTH
"""Bytes of a row."""

PROMPT = 3
"""Tokens of the prompt of `request`."""

PLENTY = 1 << 40
"""More credit than a test needs."""

EVERY = capture_service_pb2.RequestFilter(every=capture_service_pb2.EveryRequest())


def by_id(*ids: str) -> capture_service_pb2.RequestFilter:
    return capture_service_pb2.RequestFilter(
        requests=capture_service_pb2.RequestIds(request_ids=ids)
    )


def by_label(**labels: str) -> capture_service_pb2.RequestFilter:
    return capture_service_pb2.RequestFilter(labels=capture_service_pb2.Labels(labels=labels))


def wanted(*layers: int, **fields: object) -> capture_pb2.CaptureSpec:
    """A capture of resid_post for a subscription."""
    sites = site_set(types_pb2.POINT_RESID_POST, layers=layers or (1,))
    return capture_pb2.CaptureSpec(sites=sites, **fields)


def opening(
    filter: capture_service_pb2.RequestFilter | None = EVERY,
    specs: Sequence[capture_pb2.CaptureSpec] = (),
    credit: int = PLENTY,
    **fields: object,
) -> capture_service_pb2.SubscribeOpen:
    return capture_service_pb2.SubscribeOpen(
        filter=filter, captures=specs, credit_bytes=credit, **fields
    )


def resuming(
    subscription: str, after: int = 0, credit: int = PLENTY
) -> capture_service_pb2.SubscribeOpen:
    point = capture_service_pb2.ResumePoint(subscription_id=subscription, after_sequence=after)
    return capture_service_pb2.SubscribeOpen(resume=point, credit_bytes=credit)


def received(
    response: capture_service_pb2.SubscribeResponse | MessageParts,
) -> capture_service_pb2.SubscribeResponse:
    """A response as its client receives it."""
    if not isinstance(response, MessageParts):
        return response
    return capture_service_pb2.SubscribeResponse.FromString(response.joined())


class Subscriber:
    """A call of Subscribe, as its client has it."""

    def __init__(self, running) -> None:
        self.call = running.client.capture.Subscribe()
        running.client.kept.append(self.call)
        self.events: list[capture_service_pb2.SubscribeResponse] = []
        self.name = ""

    @classmethod
    async def open(
        cls, running, request_message: capture_service_pb2.SubscribeOpen
    ) -> "Subscriber":
        """A subscription that stands."""
        one = cls(running)
        await one.call.write(capture_service_pb2.SubscribeRequest(open=request_message))
        opened = await one.hear()
        one.name = opened.opened.subscription_id
        return one

    async def ack(self, sequence: int) -> None:
        ack = capture_service_pb2.Ack(sequence=sequence)
        await self.call.write(capture_service_pb2.SubscribeRequest(ack=ack))

    async def credit(self, size: int) -> None:
        credit = capture_service_pb2.Credit(bytes=size)
        await self.call.write(capture_service_pb2.SubscribeRequest(credit=credit))

    async def hear(self) -> capture_service_pb2.SubscribeResponse:
        """The next event."""
        event = await asyncio.wait_for(self.call.read(), 10)
        assert event is not grpc.aio.EOF
        self.events.append(event)
        return event

    async def until(self, kind: str, count: int = 1) -> None:
        """Reads until so many events of a kind have come."""
        while sum(event.WhichOneof("event") == kind for event in self.events) < count:
            await self.hear()

    async def rest(self) -> None:
        """Closes its side, and reads to the end."""
        await self.call.done_writing()
        while (event := await asyncio.wait_for(self.call.read(), 10)) is not grpc.aio.EOF:
            self.events.append(event)
        assert await self.call.code() == grpc.StatusCode.OK

    @property
    def numbered(self) -> list[capture_service_pb2.SubscribeResponse]:
        return [event for event in self.events if event.sequence]


def rows_of(events) -> dict[tuple[str, int, int, int, int], list[float]]:
    """(request, sample, layer, position, token) -> row; each once."""
    found = {}
    for event in events:
        if event.WhichOneof("event") != "captured":
            continue
        part = event.captured
        values = np.frombuffer(part.tensor.inline, "<f4").reshape(tuple(part.tensor.shape))
        assert google_crc32c.value(part.tensor.inline) == part.tensor.crc32c
        at = [p for run in part.positions for p in range(run.start, run.start + run.count)]
        for i, site in enumerate(part.sites):
            for j, (position, token) in enumerate(zip(at, part.token_ids, strict=True)):
                key = (part.request_id, part.sample, site.layer, position, token)
                assert key not in found
                found[key] = values[i, j].tolist()
    return found


def ends_of(events) -> dict[str, capture_service_pb2.EndOfRequest]:
    """By request; each once, after everything of it, with counts and checksum that are right."""
    found: dict[str, capture_service_pb2.EndOfRequest] = {}
    chunks: dict[str, int] = {}
    rows: dict[str, int] = {}
    lost: dict[str, int] = {}
    checksums: dict[str, bytes] = {}
    for event in events:
        kind = event.WhichOneof("event")
        if kind not in ("captured", "dropped", "end_of_request"):
            continue
        part = getattr(event, kind)
        name = part.request_id
        assert name not in found
        if kind == "captured":
            chunks[name] = chunks.get(name, 0) + 1
            rows[name] = rows.get(name, 0) + len(part.sites) * len(part.token_ids)
            checksums[name] = checksums.get(name, b"") + struct.pack("<I", part.tensor.crc32c)
        elif kind == "dropped":
            lost[name] = lost.get(name, 0) + part.row_count
        else:
            found[name] = part
            assert (part.chunk_count, part.row_count) == (chunks.get(name, 0), rows.get(name, 0))
            assert part.dropped_row_count == lost.get(name, 0)
            assert part.crc32c == google_crc32c.value(checksums.get(name, b""))
    return found


def site(layer: int) -> int:
    return Site(Point.RESID_POST, layer).index


def expected(request_id: str, *layers: int, samples: int = 1, tokens: int = 3) -> dict:
    """Every row of a request with the test's prompt."""
    return {
        (request_id, sample, layer, position, 10 + position): row(site(layer), position).tolist()
        for sample in range(samples)
        for layer in layers
        for position in range(PROMPT + tokens - 1)
    }


def sampled(tokens: int = 3, n: int = 1) -> generation_pb2.Sampling:
    return generation_pb2.Sampling(max_tokens=tokens, n=n, temperature=1.0 if n > 1 else 0.0)


async def generate(running, request_id: str, tokens: int = 3, n: int = 1, **fields: object):
    return await running.client.generate(
        request(request_id=request_id, sampling=sampled(tokens, n), **fields)
    )


async def failure(subscriber: Subscriber) -> Refusal:
    async def read_on() -> None:
        while True:
            await subscriber.hear()

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_on()
    return Refusal.of(caught.value)
