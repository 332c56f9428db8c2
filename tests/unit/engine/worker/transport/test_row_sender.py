"""Rows leave the worker in their forms, whatever fails on the way; no step waits for a reader."""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rheostat_engine import (
    Capture,
    Codec,
    Event,
    Installed,
    Plan,
    Released,
    RowEncoding,
    Rows,
    SignalRows,
)
from rheostat_engine.channel.events import Head, ReleasedHead, RowsHead, encode_head
from rheostat_engine.worker.capture.captures import Captures
from rheostat_engine.worker.capture.request_progress import Ended, RequestProgress
from rheostat_engine.worker.state.site_slots import SiteSlots
from rheostat_engine.worker.transport import event_sender as event_sender
from rheostat_engine.worker.transport.event_sender import EventSender, Frame
from rheostat_engine.worker.transport.row_encodings import RowEncoder, RowEncodings
from rheostat_engine.worker.transport.row_sender import (
    Group,
    PacedCopies,
    RowSender,
    copy_at_once,
    pack,
    packed_bytes,
)

from ...formed import check_formed
from ...frames import DOSE, Server, installed, int64, released, signals
from ...strategies import EVERYWHERE, SITES
from ...tables import CPU, WIDTH

EIGHT = RowEncoding(Codec.FULL8)
TOP = RowEncoding(Codec.TOPK8, kept=2)
HALF = RowEncoding(Codec.CAST, "bfloat16")
OTHERS = "; further failures within 60 s are not logged"
NO_ROOM = f"captured rows could not be encoded and are sent raw{OTHERS}"
LOST = f"captured rows or signals could not be copied off the device and are lost{OTHERS}"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(f"ipc://{tmp_path}/channel")
    yield server
    server.channel.close()
    server.close_loop()


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


def test_rows_that_are_being_copied_take_their_room_once(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    copying, go_on = threading.Event(), threading.Event()
    copy = PacedCopies.copy

    def paused(self: PacedCopies, target: torch.Tensor, values: torch.Tensor) -> None:
        copying.set()
        assert go_on.wait(10)
        copy(self, target, values)

    monkeypatch.setattr(PacedCopies, "copy", paused)
    row_sender = RowSender(EventSender(server.address), CPU, server.area, scratch=1)
    rows = torch.zeros(server.area.size * 3 // 4 // (4 * WIDTH), WIDTH)
    head = RowsHead(0, "float32", WIDTH, [], b"", b"", b"", b"")
    row_sender.send_rows(head, rows, [Group(None, len(rows))])
    assert copying.wait(10)
    assert row_sender.free_bytes == server.area.size - rows.nbytes
    go_on.set()
    row_sender.close()


def test_rows_whose_fence_fails_free_their_room_once(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: RowSender) -> None:
        raise RuntimeError("the device has failed")

    monkeypatch.setattr(RowSender, "_fence", broken)
    row_sender = RowSender(EventSender(server.address), CPU, server.area, scratch=1)
    rows = torch.zeros(4, WIDTH)
    head = RowsHead(0, "float32", WIDTH, [], b"", b"", b"", b"")
    row_sender.send_rows(head, rows, [Group(None, len(rows))])
    row_sender.close()
    assert row_sender.free_bytes <= server.area.free_bytes  # no more than there is
    assert row_sender.lost_rows == len(rows)


@pytest.mark.parametrize("scratch", [1, 1000, 1 << 20])
def test_several_forms_of_a_step_leave_together_through_a_ring_that_goes_round(
    server: Server, scratch: int
) -> None:
    device = Device(server, scratch=scratch)
    wanted = {0: EIGHT, 1: None, 2: TOP, 3: EIGHT, 4: HALF}
    device.install(*(Capture((site,), EVERYWHERE, encoding) for site, encoding in wanted.items()))
    for start in range(0, 70, 7):  # 35 of the ring's 39 rows at a time
        device.step(start, 7)
    device.release()
    events = events_of(server)
    check(events, wanted, range(70))
    released = events[-1]
    assert isinstance(released, Released)
    assert (released.captured, released.lost_rows) == (dict.fromkeys(range(5), 70), 0)
    sizes = [WIDTH * 4 if f is None else f.row_bytes(WIDTH) for f in wanted.values()]
    assert device.row_sender.left_bytes == 70 * sum(sizes) < 70 * 5 * 4 * WIDTH
    assert device.row_sender.free_bytes == 1 << 20
    assert len(device.encodings) == 0
    device.row_sender.close()


def failing(times: int, real: Callable[..., object]) -> Callable[..., object]:
    """A function that has no memory so many times."""
    left = [times]

    def call(*args: object, **kwargs: object) -> object:
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*args, **kwargs)

    return call


def test_rows_that_cannot_be_encoded_leave_as_they_are(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(RowEncoder, "encode", failing(1, RowEncoder.encode))
    device = Device(server)
    device.install(Capture((0, 2), EVERYWHERE, EIGHT), Capture((1,), EVERYWHERE))
    device.step(0, 4)
    device.step(4, 4)
    device.release()
    events = events_of(server)
    first = [one for one in events if isinstance(one, Rows) and one.positions[0] == 0]
    rest = [one for one in events if isinstance(one, Rows) and one.positions[0] == 4]
    check(first, {0: None, 1: None, 2: None}, range(4))
    check(rest, {0: EIGHT, 1: None, 2: EIGHT}, range(4, 8))
    released = events[-1]
    assert isinstance(released, Released)
    assert (released.captured, released.lost_rows) == ({0: 8, 1: 8, 2: 8}, 0)
    assert (device.row_sender.plain_rows, device.row_sender.lost_rows) == (8, 0)
    assert [one.message for one in caplog.records] == [NO_ROOM]
    device.row_sender.close()


def test_rows_that_cannot_leave_are_lost_are_counted_and_nothing_else_is(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rheostat_engine.worker.transport.row_sender.pack", failing(2, pack))
    device = Device(server)
    device.install(Capture((0, 2), EVERYWHERE, EIGHT), Capture((1,), EVERYWHERE))
    device.step(0, 4)
    device.step(4, 6)
    device.release()
    events = events_of(server)
    check(events, {0: EIGHT, 1: None, 2: EIGHT}, range(4, 10))
    released = events[-1]
    assert isinstance(released, Released)
    assert (released.captured, released.lost_rows) == ({0: 6, 1: 6, 2: 6}, 12)
    assert device.row_sender.lost_rows == 12
    assert device.row_sender.free_bytes == 1 << 20
    assert [one.message for one in caplog.records] == [NO_ROOM, LOST]
    device.row_sender.close()


def test_rows_whose_copy_fails_later_are_counted_as_lost(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def synchronize(self) -> None:
            raise RuntimeError("CUDA error")

    send = EventSender.send
    monkeypatch.setattr(
        EventSender,
        "send",
        lambda self, f: send(self, f._replace(ready=Broken()) if f.fallback else f),
    )
    device = Device(server)
    device.install(Capture((3,), EVERYWHERE, HALF))
    device.step(0, 5)
    device.release()
    *_, released = events_of(server)
    assert isinstance(released, Released)
    assert (released.captured, released.lost_rows) == ({}, 5)
    assert device.row_sender.lost_rows == 5
    device.row_sender.close()


class FakeStream:
    """Stands for a CUDA stream on a machine without one."""

    def __init__(self, device: object = None) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass


class FakeEvent:
    """Stands for a CUDA event; only the first few can be recorded."""

    left = 0

    def record(self, stream: object = None) -> None:
        FakeEvent.left -= 1
        if FakeEvent.left < 0:
            raise RuntimeError("CUDA error")

    def synchronize(self) -> None:
        pass


def test_a_ring_never_waits_for_rows_whose_event_cannot_be_recorded(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(FakeEvent, "left", 1)  # the rows are written; that they left is not known
    row_sender = RowSender(
        EventSender(server.address), torch.device("cuda"), server.area, scratch=64
    )
    row_sender.send(Frame(installed()))
    head = RowsHead(0, "float32", WIDTH, [[2]], int64(1), int64(0), int64(5), int64(3))
    fence = row_sender.send_rows(head, torch.zeros(3, WIDTH), [Group(None, 3)])
    waiting = threading.Thread(target=fence.synchronize, daemon=True)
    waiting.start()
    waiting.join(30)
    assert not waiting.is_alive()
    row_sender.send(Frame(released()))
    ended = server.wait_for(2)[1]
    assert ended == (Released("r", (DOSE,), True, {}, 3, 0, (2, 9)),)
    assert row_sender.lost_rows == 3
    assert server.area.free_bytes == server.area.size
    assert [one.message for one in caplog.records] == [LOST]
    row_sender.close()


class CopyEngine:
    """Stands for a device whose copies end only when somebody waits for an event behind them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine, copy = self, torch.Tensor.copy_
        self.launched = 0
        """Bytes of the copies so far."""
        self.ended = 0
        """Bytes of those that are over."""
        self.most = 0
        """The most bytes that were under way at once."""

        class Event:
            def __init__(self, **options: object) -> None:
                self.bytes = 0

            def record(self, stream: object = None) -> None:
                self.bytes = engine.launched

            def synchronize(self) -> None:
                engine.ended = max(engine.ended, self.bytes)

        def launch(target: torch.Tensor, values: torch.Tensor, **options: object) -> torch.Tensor:
            engine.launched += values.nbytes
            engine.most = max(engine.most, engine.launched - engine.ended)
            return copy(target, values)

        monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(torch.Tensor, "copy_", launch)


@pytest.mark.parametrize(("in_flight", "intervals"), [(1, 1), (2, 2), (5, 5), (0, 80)])
def test_few_pieces_of_many_rows_are_copied_at_once_so_that_tokens_get_between(
    server: Server, monkeypatch: pytest.MonkeyPatch, in_flight: int, intervals: int
) -> None:
    raw = WIDTH * 4
    monkeypatch.setattr("rheostat_engine.worker.transport.row_sender._CHUNK", 4 * raw)
    engine = CopyEngine(monkeypatch)
    row_sender = RowSender(
        EventSender(server.address),
        torch.device("cuda"),
        server.area,
        scratch=64,
        in_flight=in_flight,
    )
    row_sender.send(Frame(installed()))
    rows = torch.arange(320 * WIDTH).reshape(320, WIDTH).float()
    # Two large groups, and many that are smaller than a piece: those wait for nothing each.
    sizes = [99, 121, *[1] * 100]
    head = RowsHead(0, "float32", WIDTH, [[2]], int64(1), int64(0), int64(5), int64(320))
    fence = row_sender.send_rows(head, rows, [Group(None, size) for size in sizes])
    fence.synchronize()
    assert engine.launched == engine.ended == rows.nbytes
    assert engine.most == intervals * 4 * raw
    row_sender.send(Frame(released()))
    server.wait_for(3)
    delivered = server.events[1]
    assert isinstance(delivered, Rows)
    assert delivered.data.tobytes() == rows.numpy().tobytes()
    row_sender.close()


def test_rows_whose_labels_cannot_be_sent_are_counted_as_lost(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(head: Head) -> bytes:
        if isinstance(head, RowsHead) and not broken.is_set():
            broken.set()
            raise RuntimeError("no memory")
        return encode_head(head)

    broken = threading.Event()
    monkeypatch.setattr(event_sender, "encode_head", encode)
    device = Device(server)
    device.install(Capture((3,), EVERYWHERE))
    device.step(0, 5)
    device.step(5, 2)
    device.release()
    events_of(server)
    assert device.row_sender.lost_rows == 5
    device.row_sender.close()


def test_a_server_that_does_not_read_holds_up_no_step(server: Server) -> None:
    held = threading.Event()
    server.loop.call_soon_threadsafe(held.wait)
    device = Device(server, ring=200)
    device.install(Capture((0, 1, 2, 3, 4), EVERYWHERE, EIGHT))
    steps = 100
    for number in range(steps):  # many times the ring, and more frames than the channel takes
        device.step(39 * number, 39)
    held.set()
    device.release()
    events = events_of(server)
    released = events[-1]
    assert isinstance(released, Released)
    sent = sum(one.data.shape[0] * one.data.shape[1] for one in events if isinstance(one, Rows))
    assert sent + released.lost_rows == steps * 39 * 5
    assert isinstance(events[0], Installed)
    device.row_sender.close()


def test_slabs_make_the_same_bytes() -> None:
    rows = torch.randn(33, WIDTH, generator=torch.Generator().manual_seed(0))
    encodings = RowEncodings(width=WIDTH, itemsize=4, vectors={}, limit=1 << 20)
    groups = [Group(encodings[encodings.acquire(encoding)], 11) for encoding in (EIGHT, TOP, None)]
    whole = torch.zeros(packed_bytes(rows, groups), dtype=torch.uint8)
    copies = PacedCopies(None, 2)
    pack(rows, groups, whole, scratch=1 << 30, copies=copies)
    for scratch in (0, 500, 3000):
        slabs = torch.zeros_like(whole)
        pack(rows, groups, slabs, scratch=scratch, copies=copies)
        assert torch.equal(slabs, whole)


def test_signals_come_beside_rows_and_bit_for_bit(server: Server) -> None:
    device = Device(server)
    device.install(Capture((0, 1), EVERYWHERE))
    values = torch.randn(2, 3)
    device.step(0, 5)
    device.row_sender.send_signals(signals(), values)
    device.step(5, 2)
    device.release()
    events = events_of(server)
    (event,) = [event for event in events if isinstance(event, SignalRows)]
    assert event.values is not None
    assert event.values.tolist() == values.tolist()
    check([one for one in events if one is not event], {0: None, 1: None}, range(7))
    device.row_sender.close()


def test_signals_do_not_overtake_rows_that_wait_for_the_thread(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    going = threading.Event()

    def slow(*args: Any, **kwargs: Any) -> None:
        threads.append(threading.current_thread().name)
        going.wait(10)
        pack(*args, **kwargs)

    monkeypatch.setattr("rheostat_engine.worker.transport.row_sender.pack", slow)
    monkeypatch.setattr("rheostat_engine.worker.transport.row_sender._SMALL", 2 * 3 * 4)
    device = Device(server)
    device.install(Capture((0,), EVERYWHERE))
    device.row_sender.send_signals(signals(), torch.zeros(2, 3))  # the thread has nothing to do
    device.step(0, 2)
    for number in (1.0, 2.0):
        device.row_sender.send_signals(signals(), torch.full((2, 3), number))
    going.set()
    device.release()
    events = events_of(server)
    kinds = [type(event) for event in events]
    assert kinds == [Installed, SignalRows, Rows, SignalRows, SignalRows, Released]
    read = [event.values for event in events if isinstance(event, SignalRows)]
    assert [values[0, 0] for values in read if values is not None] == [0, 1, 2]
    assert threads == ["rheostat-rows"] * 3
    device.row_sender.close()


def test_a_few_raw_rows_leave_without_the_thread_and_through_a_ring_that_goes_round(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[tuple[str, int]] = []

    def noted(target: torch.Tensor, values: torch.Tensor) -> None:
        copied.append((threading.current_thread().name, len(values)))
        copy_at_once(target, values)

    monkeypatch.setattr("rheostat_engine.worker.transport.row_sender.copy_at_once", noted)
    device = Device(server, ring=10)
    device.install(Capture((0, 3), EVERYWHERE))
    for start in range(0, 30, 3):
        device.step(start, 3)
    device.release()
    events = events_of(server)
    check(events, {0: None, 3: None}, range(30))
    assert copied == [(threading.main_thread().name, 6)] * 10
    released = events[-1]
    assert isinstance(released, Released)
    assert (released.captured, released.lost_rows) == ({0: 30, 3: 30}, 0)
    assert device.row_sender.left_bytes == 60 * WIDTH * 4
    device.row_sender.close()


def test_a_few_raw_rows_whose_copy_fails_are_counted_as_lost(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    copying = "rheostat_engine.worker.transport.row_sender.copy_at_once"
    monkeypatch.setattr(copying, failing(1, copy_at_once))
    device = Device(server)
    device.install(Capture((0, 3), EVERYWHERE))
    device.step(0, 4)
    device.step(4, 2)
    device.release()
    events = events_of(server)
    check(events, {0: None, 3: None}, range(4, 6))
    released = events[-1]
    assert isinstance(released, Released)
    assert (released.captured, released.lost_rows) == ({0: 2, 3: 2}, 8)
    assert device.row_sender.lost_rows == 8
    assert device.row_sender.free_bytes == 1 << 20
    assert [one.message for one in caplog.records] == [LOST]
    device.row_sender.close()


@pytest.mark.parametrize("larger", [False, True])
def test_many_rows_and_encoded_rows_leave_through_the_thread(
    server: Server, monkeypatch: pytest.MonkeyPatch, larger: bool
) -> None:
    copying = "rheostat_engine.worker.transport.row_sender.copy_at_once"
    monkeypatch.setattr(copying, failing(1, copy_at_once))
    if larger:
        monkeypatch.setattr("rheostat_engine.worker.transport.row_sender._SMALL", 4 * WIDTH * 4 - 1)
    form = None if larger else EIGHT
    device = Device(server)
    device.install(Capture((0,), EVERYWHERE, form))
    device.step(0, 4)
    device.release()
    check(events_of(server), {0: form}, range(4))
    device.row_sender.close()


def test_small_signals_whose_copy_fails_are_reported_as_lost(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    copying = "rheostat_engine.worker.transport.row_sender.copy_at_once"
    monkeypatch.setattr(copying, failing(1, copy_at_once))
    row_sender = Device(server).row_sender
    row_sender.send(Frame(installed()))
    row_sender.send_signals(signals(), torch.ones(2, 3))
    row_sender.send_signals(signals(), torch.ones(2, 3))
    row_sender.send(Frame(released()))
    lost, come = [event for event in events_of(server) if isinstance(event, SignalRows)]
    assert (lost.values, come.values is None) == (None, False)
    assert row_sender.free_bytes == 1 << 20
    assert [one.message for one in caplog.records] == [LOST]
    row_sender.close()


def test_signals_that_find_no_room_are_reported_as_lost(server: Server) -> None:
    device = Device(server)
    device.row_sender.send(Frame(installed()))
    head = signals(readings=1 << 18, gates=0)  # two megabytes
    device.row_sender.send_signals(head, torch.zeros(2, 1 << 18))
    device.row_sender.send_signals(signals(), torch.ones(2, 3))
    device.row_sender.send(Frame(released()))
    lost, come = [event for event in events_of(server) if isinstance(event, SignalRows)]
    assert (lost.values, lost.starts, lost.counts) == (None, (5,), (2,))
    assert come.values is not None
    assert device.row_sender.lost_rows == 0
    device.row_sender.close()


def test_rows_leave_room_for_signals(server: Server) -> None:
    row_sender = Device(server).row_sender
    free = row_sender.free_bytes
    row_sender.kept_free = free // 4
    assert row_sender.free_bytes == free - free // 4
    row_sender.close()
