"""Frames of workers, events as plain values, and a server that receives them."""

import asyncio
import threading
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import torch

from rheostat_engine import (
    Dose,
    Dropped,
    EngineSettings,
    Event,
    Installed,
    Released,
    Rows,
    WorkerChannel,
)
from rheostat_engine.channel.events import (
    Head,
    InstalledHead,
    ReleasedHead,
    RowsHead,
    SignalsHead,
    decode_head,
    encode_head,
)
from rheostat_engine.channel.worker_channel import EventMerger
from rheostat_engine.worker.transport.staging_area import StagingArea

Plain = tuple[object, ...]
DOSE = Dose(0, 2, 7, 3.5, 1.75, 0.5)


def installed(request_id: str = "r", *, rank: int = 0, number: int = 1, error: str = "") -> Head:
    return InstalledHead(rank, number, Installed(request_id, error))


def released(
    request_id: str = "r",
    *,
    rank: int = 0,
    number: int = 1,
    captured: dict[int, int] | None = None,
    lost: int = 0,
    preemptions: int = 0,
    doses: Sequence[Dose] = (DOSE,),
    measured: bool = True,
) -> Head:
    report = Released(
        request_id=request_id,
        doses=tuple(doses),
        measured=measured,
        captured=captured or {},
        lost_rows=lost,
        preemptions=preemptions,
        computed=(2, 9),
    )
    return ReleasedHead(rank, number, report)


def int64(*values: int) -> bytes:
    return np.array(values, "<i8").tobytes()


def rows(
    site: int = 2, count: int = 2, *, rank: int = 0, number: int = 1, dtype: str = "float32"
) -> RowsHead:
    """One block of two columns from position 5 on."""
    return RowsHead(rank, dtype, 2, [[site]], int64(number), int64(0), int64(5), int64(count))


def signals(*, numbers: bytes = b"", readings: int = 2, gates: int = 1) -> SignalsHead:
    """Signals of two positions from 5 on, of one request."""
    return SignalsHead(0, readings, gates, numbers or int64(1), int64(5), int64(2))


def payload(count: int = 2) -> bytes:
    return np.arange(2 * count, dtype="<f4").tobytes()


def plain(event: Event) -> Plain:
    """An event as values that can be compared."""
    if isinstance(event, Rows):
        return event.request_id, event.sites, event.positions.tolist(), event.data.tolist()
    return (event,)


def feed(merger: EventMerger, *heads: Head) -> list[Plain]:
    """What the merger makes of frames; rows bring their payload."""
    events = []
    for head in heads:
        body = payload() if isinstance(head, RowsHead) else b""
        events += merger.feed(decode_head(encode_head(head)), body)
    return [plain(event) for event in events]


ROWS_OF_2 = ("r", (2,), [5, 6], [[[0.0, 1.0], [2.0, 3.0]]])
ROWS_OF_7 = ("r", (7,), [5, 6], [[[0.0, 1.0], [2.0, 3.0]]])


class Server:
    """A channel whose events go into a list, and the memory of a worker."""

    def __init__(self, address: str, area: int = 1 << 20) -> None:
        self.address = address
        self.area = StagingArea(area, torch.device("cpu"))
        self.loop = asyncio.new_event_loop()
        self._loop_thread = threading.Thread(target=self.loop.run_forever)
        self._loop_thread.start()
        self.channel = WorkerChannel(EngineSettings(channel=address), ranks=1)
        self.channel.attach([{"staging": self.area.report(0)}])
        self.events: list[Event] = []
        self.refused: set[str] = set()
        """Requests whose events can't be taken in."""
        self._news = threading.Condition()
        self.channel.start(self.loop, self._deliver)

    def stage(self, head: RowsHead, values: torch.Tensor | bytes) -> tuple[RowsHead, torch.Tensor]:
        """A head whose rows lie in the area, and the bytes there."""
        data = values if isinstance(values, bytes) else values.view(torch.uint8).numpy().tobytes()
        staging_range = self.area.reserve(len(data))
        assert staging_range is not None
        staged = self.area[staging_range]
        if data:
            staged.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return msgspec.structs.replace(head, staging_range=staging_range), staged

    def _deliver(self, event: Event) -> None:
        if event.request_id in self.refused and not isinstance(event, Dropped):
            raise RuntimeError(event.request_id)
        with self._news:
            self.events.append(event)
            self._news.notify_all()

    def wait_for(self, count: int) -> list[Plain]:
        with self._news:
            assert self._news.wait_for(lambda: len(self.events) >= count, 30)
            return [plain(event) for event in self.events]

    def wait_for_rows(self, count: int) -> dict[str, list[int]]:
        """The positions of all rows, by request, once so many rows have come."""
        with self._news:
            assert self._news.wait_for(lambda: len([*self._positions()]) >= count, 30)
            came: dict[str, list[int]] = {}
            for name, position in self._positions():
                came.setdefault(name, []).append(position)
            return came

    def _positions(self) -> Iterator[tuple[str, int]]:
        for event in self.events:
            if isinstance(event, Rows):
                yield from ((event.request_id, at) for at in event.positions.tolist())

    def close_loop(self) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._loop_thread.join()
            self.loop.close()
