"""Rows leave the worker in their forms, whatever fails on the way; no step waits for a reader."""

import contextlib
import threading

import pytest
import torch

from rheostat_engine import (
    Capture,
    Codec,
    Installed,
    Released,
    RowEncoding,
    Rows,
)
from rheostat_engine.channel.events import Head, RowsHead, encode_head
from rheostat_engine.worker.transport import event_sender as event_sender
from rheostat_engine.worker.transport.event_sender import EventSender, Frame
from rheostat_engine.worker.transport.row_encodings import RowEncoder, RowEncodings
from rheostat_engine.worker.transport.row_sender import (
    Group,
    PacedCopies,
    RowSender,
    pack,
    packed_bytes,
)

from ...frames import DOSE, Server, installed, int64, released
from ...strategies import EVERYWHERE
from ...tables import CPU, WIDTH
from .devices import (
    LOST,
    OTHERS,
    Device,
    FakeStream,
    check,
    events_of,
    failing,
    simulated_cuda_sender,
)

EIGHT = RowEncoding(Codec.FULL8)
TOP = RowEncoding(Codec.TOPK8, kept=2)
HALF = RowEncoding(Codec.CAST, "bfloat16")
NO_ROOM = f"captured rows could not be encoded and are sent raw{OTHERS}"


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


class FakeEvent:
    """Stands for a CUDA event; only the first few can be recorded."""

    left = 0

    def __init__(self, blocking: bool = False) -> None:
        pass

    def record(self, stream: object = None) -> None:
        FakeEvent.left -= 1
        if FakeEvent.left < 0:
            raise RuntimeError("CUDA error")

    def synchronize(self) -> None:
        pass


def test_a_ring_never_waits_for_rows_whose_event_cannot_be_recorded(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FakeEvent, "left", 1)  # the rows are written; that they left is not known
    row_sender = simulated_cuda_sender(server, monkeypatch, FakeStream, FakeEvent)
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


def test_lost_rows_keep_their_range_while_a_copy_may_still_write_to_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, go_on = threading.Event(), threading.Event()

    class Stream(FakeStream):
        def synchronize(self) -> None:
            waits.set()
            assert go_on.wait(10)

    monkeypatch.setattr(FakeEvent, "left", 1)  # the rows are written; that they left is not known
    row_sender = simulated_cuda_sender(server, monkeypatch, Stream, FakeEvent)
    row_sender.send(Frame(installed()))
    head = RowsHead(0, "float32", WIDTH, [[2]], int64(1), int64(0), int64(5), int64(3))
    row_sender.send_rows(head, torch.zeros(3, WIDTH), [Group(None, 3)])
    row_sender.send(Frame(released()))
    assert waits.wait(10)
    assert server.area.free_bytes < server.area.size
    go_on.set()
    server.wait_for(2)
    assert server.area.free_bytes == server.area.size
    assert row_sender.lost_rows == 3
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


def test_rows_leave_room_for_signals(server: Server) -> None:
    row_sender = Device(server).row_sender
    free = row_sender.free_bytes
    row_sender.kept_free = free // 4
    assert row_sender.free_bytes == free - free // 4
    row_sender.close()
