"""A worker's captures and their way out, on a CPU, and what stands for a CUDA stream."""

import contextlib
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch

from rheostat_engine import Capture, Event, Plan, Released, RowEncoding, Rows
from rheostat_engine.channel.events import ReleasedHead
from rheostat_engine.worker.capture.captures import Captures
from rheostat_engine.worker.capture.request_progress import Ended, RequestProgress
from rheostat_engine.worker.state.site_slots import SiteSlots
from rheostat_engine.worker.transport.event_sender import EventSender, Frame
from rheostat_engine.worker.transport.row_encodings import RowEncodings
from rheostat_engine.worker.transport.row_sender import RowSender

from ...formed import check_formed
from ...frames import Server, installed
from ...strategies import SITES
from ...tables import CPU, WIDTH

OTHERS = "; further failures within 60 s are not logged"
LOST = f"captured rows or signals could not be copied off the device and are lost{OTHERS}"


class Device:
    """A worker's captures and their way out; a forward pass writes what `row` says."""

    def __init__(self, server: Server, *, ring: int = 40, scratch: int = 1 << 20) -> None:
        self.row_sender = RowSender(EventSender(server.address), CPU, server.area, scratch=scratch)
        self.encodings = RowEncodings(width=WIDTH, itemsize=4, vectors={}, limit=1 << 20)
        self.ring = torch.zeros(ring, WIDTH)
        site_slots = SiteSlots((SITES - 1) // 4)
        present = frozenset(range(SITES))
        self.captures = Captures(
            self.ring,
            self.row_sender,
            self.encodings,
            site_slots=site_slots,
            present=present,
            rank=0,
        )
        self.progress = RequestProgress(site_slots.numbers)
        self.progress.make_room(2)

    def install(self, *captures: Capture) -> None:
        plan = Plan("r", captures=captures)
        self.progress.start(1, 0)
        self.held = self.captures.put(1, plan.packed_captures.encoded)
        self.row_sender.send(Frame(installed()))

    def step(self, start: int, count: int) -> None:
        numbers, positions = np.ones(count, np.int64), np.arange(start, start + count)
        copying = self.captures.begin(numbers, positions, self.progress)
        self.progress.advance(numbers[:1], positions[:1], positions[:1] + count)
        assert copying is not None
        for token, position in enumerate(positions):
            for site in np.flatnonzero(copying.base[0]):
                at = copying.first_row + copying.base[0, site] - 1 + token
                self.ring[at] = torch.from_numpy(row(site, position))
        self.captures.end()

    def release(self) -> None:
        span = self.progress.span(1)
        rows = self.captures.put(1, None, self.held, first=span[1], computed=span).counted
        (report,) = self.progress.released([Ended(1, "r", rows, measured=True)])
        self.row_sender.send(Frame(ReleasedHead(0, 1, report)))


def row(site: int, position: int) -> np.ndarray:
    return np.random.default_rng([site, position]).normal(size=WIDTH).astype(np.float32)


def events_of(server: Server) -> list[Event]:
    """Everything up to the end of the request."""
    count = 1
    while True:
        server.wait_for(count)
        events = list(server.events)  # more may come at any time
        if isinstance(events[-1], Released):
            return events
        count = len(events) + 1


def check(events: list[Event], wanted: dict[int, RowEncoding | None], positions: range) -> None:
    """Every row has come once, in its form."""
    found = Counter[tuple[int, int]]()
    for event in events:
        if not isinstance(event, Rows):
            continue
        for site, rows in zip(event.sites, event.data, strict=True):
            encoding = wanted[site]
            assert event.encoding == (encoding.key if encoding is not None else b"")
            for position, data in zip(event.positions.tolist(), rows, strict=True):
                found[site, position] += 1
                if encoding is None:
                    assert data.tobytes() == row(site, position).tobytes()
                else:
                    check_formed(encoding, row(site, position), data)
    assert found == Counter((site, p) for site in wanted for p in positions)


def failing(times: int, real: Callable[..., object]) -> Callable[..., object]:
    """A function that has no memory so many times."""
    left = [times]

    def call(*args: object, **kwargs: object) -> object:
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*args, **kwargs)

    return call


class FakeStream:
    """Stands for a CUDA stream on a machine without one."""

    def __init__(self, device: object = None) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


def simulated_cuda_sender(
    server: Server, monkeypatch: pytest.MonkeyPatch, stream: type, event: type
) -> RowSender:
    """A sender whose device has such streams and events."""
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    return RowSender(EventSender(server.address), torch.device("cuda"), server.area, scratch=64)
