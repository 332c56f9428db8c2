"""Room for uploads: taken with the header, given back however they end."""

import asyncio
import gc
import os
from collections.abc import AsyncIterator
from contextlib import suppress

import numpy as np
import pytest

from rheostat_server.errors import QueueFull, RheostatError
from rheostat_server.vectors import upload
from rheostat_server.vectors.upload import Uploads
from rheostat_wire.v1 import steering_service_pb2, types_pb2

from ..fakes import LAYERS, WIDTH
from ..messages import site_set
from ..streams import until
from ..uploads import chunk, header, values

steering = steering_service_pb2
SIZE = len(values())


class Sender:
    """An upload on its way, whose messages come when the test says so."""

    def __init__(self, uploads: Uploads) -> None:
        self.messages: asyncio.Queue[steering.PutVectorRequest | None] = asyncio.Queue()
        self.stored = asyncio.Event()
        self.receiving = asyncio.create_task(self._receive(uploads))

    def send(self, *messages: steering.PutVectorRequest | None) -> None:
        for message in messages:
            self.messages.put_nowait(message)

    async def read(self) -> None:
        """Returns once all that was sent has been read, and what follows from it done."""
        await until(self.messages.empty)
        for _ in range(10):
            await asyncio.sleep(0)

    async def _receive(self, uploads: Uploads) -> None:
        async with uploads.receive(self._each(), WIDTH, LAYERS, 1 << 20):
            await self.stored.wait()

    async def _each(self) -> AsyncIterator[steering.PutVectorRequest]:
        while (message := await self.messages.get()) is not None:
            yield message


@pytest.fixture(autouse=True)
def room_for_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "UPLOADED_BYTES", 3 * SIZE)


async def fits(uploads: Uploads, rows: int) -> bool:
    """Whether an upload of so many rows finds room."""
    sender = Sender(uploads)
    sender.send(header(rows), chunk(values(rows=rows)), None)
    sender.stored.set()
    try:
        await sender.receiving
    except QueueFull:
        return False
    return True


async def test_a_header_takes_the_room_of_all_that_will_come() -> None:
    uploads = Uploads()
    first = Sender(uploads)
    first.send(header(2))
    await first.read()
    assert [await fits(uploads, rows) for rows in (1, 2)] == [True, False]
    first.send(chunk(values(rows=2)), None)
    await first.read()
    assert not await fits(uploads, 2)
    first.stored.set()
    await first.receiving
    assert await fits(uploads, 3)


@pytest.mark.parametrize(
    "rest",
    [
        [chunk(values(np.nan, rows=3)), None],
        [chunk(values()), None],
        [header(), None],
        [chunk(values(rows=4)), None],
    ],
    ids=["not finite", "too short", "a second header", "too long"],
)
async def test_a_refused_upload_gives_its_room_back(rest) -> None:
    uploads = Uploads()
    sender = Sender(uploads)
    sender.send(header(3), *rest)
    with pytest.raises(RheostatError):
        await sender.receiving
    assert await fits(uploads, 3)


async def test_an_upload_that_nobody_sends_any_more_gives_its_room_back() -> None:
    uploads = Uploads()
    sender = Sender(uploads)
    sender.send(header(3), chunk(values()))
    await sender.read()
    assert not await fits(uploads, 1)
    sender.receiving.cancel()
    with suppress(asyncio.CancelledError):
        await sender.receiving
    assert await fits(uploads, 3)


def resident_mib() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


def test_what_is_kept_of_a_header_keeps_nothing_of_its_message() -> None:
    """64 messages with a description of 4 MiB, and then a short one, are 256 MiB."""
    sites = site_set(types_pb2.POINT_RESID_POST, layers=[1])
    long = header(description="z" * (4 << 20)).SerializeToString()
    data = long + header(name="joy", description="x", sites=sites).SerializeToString()
    gc.collect()
    before = resident_mib()
    kept = [
        upload._copy(steering.PutVectorRequest.FromString(data).header).sites for _ in range(64)
    ]
    assert kept == [sites] * 64
    assert resident_mib() - before < 64
