"""Signals and a few raw rows, whose copy the step thread launches itself."""

import threading
from typing import Any

import pytest
import torch

from rheostat_engine import Capture, Codec, Installed, Released, RowEncoding, Rows, SignalRows
from rheostat_engine.worker.transport.event_sender import Frame
from rheostat_engine.worker.transport.row_sender import copy_at_once, pack

from ...frames import Server, installed, released, signals
from ...strategies import EVERYWHERE
from ...tables import WIDTH
from .devices import LOST, Device, FakeStream, check, events_of, failing, simulated_cuda_sender

EIGHT = RowEncoding(Codec.FULL8)


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


def test_a_few_rows_take_the_thread_while_the_device_still_copies_earlier_ones(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = False

    class Event:
        def __init__(self, *, blocking: bool) -> None:
            pass

        def record(self, stream: object) -> None:
            pass

        def query(self) -> bool:
            return copied

    row_sender = simulated_cuda_sender(server, monkeypatch, FakeStream, Event)
    server.area.pinned = True
    rows = torch.zeros(2, WIDTH)
    assert row_sender._copies_at_once(rows)
    row_sender._last_copy = row_sender._fence(None)  # as after rows that the thread has copied
    assert not row_sender._copies_at_once(rows)
    copied = True
    assert row_sender._copies_at_once(rows)
    server.area.pinned = False
    assert not row_sender._copies_at_once(rows)
    row_sender.close()


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
