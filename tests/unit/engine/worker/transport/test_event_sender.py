"""What is handed over on a worker reaches the server's loop, whatever else arrives there."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq

from rheostat_engine import (
    Dropped,
    EngineSettings,
    Event,
    Installed,
    Released,
    Rows,
    WorkerChannel,
)
from rheostat_engine.channel import frame_copies
from rheostat_engine.channel.events import (
    Head,
    RowsHead,
    encode_head,
)
from rheostat_engine.channel.row_batcher import REQUESTS_AT_ONCE
from rheostat_engine.channel.staging import StagingRange
from rheostat_engine.channel.worker_channel import EventQueue
from rheostat_engine.worker.transport.event_sender import EventSender, Frame
from rheostat_engine.worker.transport.row_sender import RowSender

from ...frames import DOSE, ROWS_OF_2, ROWS_OF_7, Server, installed, int64, payload, released, rows

MANY = REQUESTS_AT_ONCE + 4


class Fence:
    """Something that the device does later."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def synchronize(self) -> None:
        self._tensor.copy_(torch.arange(4.0).view(2, 2))


class Broken:
    """Something that the device fails at."""

    def synchronize(self) -> None:
        raise RuntimeError("CUDA error")


def test_everything_arrives_in_the_order_in_which_it_was_handed_over(server: Server) -> None:
    event_sender = EventSender(server.address)
    event_sender.send(Frame(installed()))
    for _ in range(50):
        late, staged = server.stage(rows(), torch.zeros(2, 2))
        event_sender.send(Frame(late, Fence(staged.view(torch.float32).view(2, 2))))
        event_sender.send(Frame(server.stage(rows(7), payload())[0]))
    event_sender.send(Frame(released()))
    assert server.wait_for(102) == [
        (Installed("r", ""),),
        *[ROWS_OF_2, ROWS_OF_7] * 50,
        (Released("r", (DOSE,), True, {}, 0, 0, (2, 9)),),
    ]
    event_sender.close()


def test_reports_of_many_requests_arrive_from_one_message(server: Server) -> None:
    event_sender = EventSender(server.address)
    names = [f"r{number}" for number in range(20)]
    heads = [installed(name, number=number) for number, name in enumerate(names)]
    event_sender.send(Frame(heads))
    event_sender.send(Frame([]))
    event_sender.send(Frame(installed("last", number=20)))
    assert server.wait_for(21) == [(Installed(name, ""),) for name in [*names, "last"]]
    event_sender.close()


def test_frames_that_are_made_of_something_late_keep_their_place(server: Server) -> None:
    event_sender = EventSender(server.address)
    event_sender.send(Frame(installed()))
    late = torch.zeros(2, 2)

    def heads() -> list[Head]:
        dose = DOSE._replace(change=float(late.sum()))
        return [released(doses=[dose]), installed("next"), released("next")]

    event_sender.send(Frame(heads, ready=Fence(late)))
    event_sender.send(Frame(installed("last")))
    assert server.wait_for(5) == [
        (Installed("r", ""),),
        (Released("r", (DOSE._replace(change=6.0),), True, {}, 0, 0, (2, 9)),),
        (Installed("next", ""),),
        (Released("next", (DOSE,), True, {}, 0, 0, (2, 9)),),
        (Installed("last", ""),),
    ]
    event_sender.close()


def test_rows_of_many_requests_that_wait_for_later_rows_arrive_without_later_frames(
    server: Server,
) -> None:
    event_sender = EventSender(server.address)
    for number in range(MANY):
        event_sender.send(Frame(installed(f"r{number}", number=number)))
    for position in range(3):
        columns = (range(MANY), [0] * MANY, [position] * MANY, [1] * MANY)
        head = RowsHead(0, "float32", 2, [[3]], *(int64(*column) for column in columns))
        event_sender.send(Frame(server.stage(head, torch.full((MANY, 2), 1.0 * position))[0]))
    came = server.wait_for_rows(3 * MANY)
    assert came == {f"r{number}": [0, 1, 2] for number in range(MANY)}
    event_sender.close()


def test_a_frame_that_cannot_be_made_is_logged_and_takes_no_other_with_it(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    event_sender = EventSender(server.address)
    event_sender.send(Frame(installed()))
    torn = server.stage(rows(), payload())[0]
    event_sender.send(Frame(torn, Broken(), fallback=[torn.as_lost]))
    event_sender.send(Frame(server.stage(rows(7), payload())[0]))
    unread = [released(doses=[], measured=False)]
    event_sender.send(Frame(lambda: [released(doses=[(1 / 0,) * 6])], fallback=unread))
    event_sender.send(Frame(installed("late")))
    event_sender.send(Frame(list, ready=Broken(), fallback=[released("late")]))
    event_sender.send(Frame(installed("next")))
    assert server.wait_for(6) == [
        (Installed("r", ""),),
        ROWS_OF_7,
        (Released("r", (), False, {}, 2, 0, (2, 9)),),
        (Installed("late", ""),),
        (Released("late", (DOSE,), True, {}, 0, 0, (2, 9)),),
        (Installed("next", ""),),
    ]
    lost = "captured rows or signals could not be read and are lost"
    unmeasured = "measurements could not be read; their requests are released without doses"
    assert [(one.message, bool(one.exc_info)) for one in caplog.records] == [
        (lost, True),
        (unmeasured, True),
        (unmeasured, True),
    ]
    assert server.area.free_bytes == server.area.size
    event_sender.close()


def test_the_outlet_hands_over_what_was_measured_as_it_was_then(server: Server) -> None:
    row_sender = RowSender(
        EventSender(server.address), torch.device("cpu"), server.area, scratch=64
    )
    row_sender.send(Frame(installed()))
    measured = torch.tensor([[4.0]])
    held = threading.Event()

    def heads(values: torch.Tensor) -> list[Head]:
        assert held.wait(30)
        return [released(doses=[DOSE._replace(change=values.item())])]

    row_sender.send_measured(measured, heads, [])
    measured.zero_()
    held.set()
    assert server.wait_for(2)[1] == (
        Released("r", (DOSE._replace(change=4.0),), True, {}, 0, 0, (2, 9)),
    )
    row_sender.send(Frame(installed("next")))
    row_sender.send_measured(measured, lambda _: [released(lost=1 // 0)], [released("next")])
    assert server.wait_for(4)[3] == (Released("next", (DOSE,), True, {}, 0, 0, (2, 9)),)
    assert row_sender.free_bytes == server.area.size
    row_sender.close()


def test_what_waits_for_a_slow_loop_stays_in_the_area_and_none_of_it_is_lost(
    server: Server,
) -> None:
    held = threading.Event()
    server.loop.call_soon_threadsafe(held.wait)
    event_sender = EventSender(server.address)
    event_sender.send(Frame(installed()))
    for _ in range(200):
        event_sender.send(Frame(server.stage(rows(7, count=500), bytes(4000))[0]))
    settled = -1
    while settled != server.area.free_bytes:
        settled = server.area.free_bytes
        held.wait(0.5)
    held.set()
    assert len(server.wait_for(201)) == 201
    assert settled < server.area.size - 150 * 4000
    assert server.area.free_bytes == server.area.size
    event_sender.close()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda d: str(d)[6:]
)
def test_rows_keep_their_bits(server: Server, dtype: torch.dtype) -> None:
    values = torch.randn(3, 2, generator=torch.Generator().manual_seed(0)).to(dtype)
    event_sender = EventSender(server.address)
    event_sender.send(Frame(installed()))
    head = rows(count=3, dtype=str(dtype).removeprefix("torch."))
    event_sender.send(Frame(server.stage(head, values)[0]))
    event_sender.close()
    server.wait_for(2)
    event = server.events[1]
    assert isinstance(event, Rows)
    assert event.data.tobytes() == values.view(torch.uint8).numpy().tobytes()


def test_large_frames_are_copied_by_threads_and_come_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_copies, "FRAME_BYTES", 1 << 20)
    blocks, width = 9, 1 << 17  # half a mebibyte each
    server = Server(f"ipc://{tmp_path}/channel", area=8 << 20)
    values = torch.arange(blocks, dtype=torch.float32)[:, None].expand(-1, width).contiguous()
    event_sender = EventSender(server.address)
    numbers = [*range(blocks)]
    for number in numbers:
        event_sender.send(Frame(installed(f"r{number}", number=number)))
    zeros, ones = int64(*[0] * blocks), int64(*[1] * blocks)
    head = RowsHead(0, "float32", width, [[2]], int64(*numbers), zeros, zeros, ones)
    event_sender.send(Frame(server.stage(head, values)[0]))
    event_sender.close()
    server.wait_for(2 * blocks)
    came = [event for event in server.events if isinstance(event, Rows)]
    assert [(event.request_id, set(event.data.flat)) for event in came] == [
        (f"r{number}", {float(number)}) for number in numbers
    ]
    assert all(event.data.base is None for event in came)
    server.channel.close()
    server.close_loop()


def test_a_worker_may_connect_before_the_server_has_bound(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/late"
    event_sender = EventSender(address)
    event_sender.send(Frame(installed()))
    server = Server(address)
    assert server.wait_for(1) == [(Installed("r", ""),)]
    event_sender.close()
    server.channel.close()
    server.close_loop()


BAD_FRAMES: dict[str, list[bytes]] = {
    "no message": [b""],
    "a bad part": [encode_head(installed("kept", number=2)), b""],
    "not msgpack": [b"\xc1 what"],
    "other fields": [b"\x81\xa4type\xa9installed"],
    "released by nobody": [encode_head(released(rank=9))],
}

DROPPED = (Dropped(Released("r", (), False, {}, 0, 0, (0, 0))),)
"""What is said of a request whose end could not be read: it must not wait for another."""

BAD_ROWS = {
    "torn rows": (rows(), b"abc"),
    "rows of nobody": (rows(number=99), payload()),
    "rows of no type": (rows(dtype="complex"), payload()),
    "too few rows": (rows(count=3), payload()),
    "torn labels": (RowsHead(0, "float32", 2, [[2]], b"123", b"", b"", b""), payload()),
    "rows of no class": (
        RowsHead(0, "float32", 2, [], int64(1), int64(0), int64(5), int64(2)),
        payload(),
    ),
    "positions beyond reason": (
        RowsHead(0, "float32", 2, [[2]], int64(1), int64(0), int64(2**62), int64(2)),
        payload(),
    ),
    "rows without columns": (
        RowsHead(0, "float32", 0, [[2]], int64(1), int64(0), int64(5), int64(2)),
        b"",
    ),
}


@pytest.mark.parametrize("name", [*BAD_FRAMES, *BAD_ROWS])
def test_a_bad_frame_is_logged_and_skipped_and_holds_no_room(
    server: Server, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(server.address)
        socket.send(encode_head(installed()))
        if name in BAD_ROWS:
            socket.send(encode_head(server.stage(*BAD_ROWS[name])[0]))
        else:
            socket.send_multipart(BAD_FRAMES[name])
        good, _ = server.stage(rows(), payload())
        socket.send(encode_head(good))
        others = [DROPPED] if name == "released by nobody" else []
        if name == "a bad part":
            others = [(Installed("kept", ""),)]
        assert server.wait_for(2 + len(others)) == [(Installed("r", ""),), *others, ROWS_OF_2]
    assert [record.message for record in caplog.records] == [
        "a frame of the side channel could not be parsed and was skipped"
    ]
    assert server.area.free_bytes == server.area.size


@pytest.mark.parametrize(("name", "lost"), [("torn rows", 2), ("torn labels", 0)])
def test_rows_of_a_malformed_frame_are_counted_as_lost_where_its_labels_can_be_read(
    server: Server, name: str, lost: int
) -> None:
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(server.address)
        for head in (installed(), server.stage(*BAD_ROWS[name])[0], released()):
            socket.send(encode_head(head))
        ended = server.wait_for(2)[1]
    assert ended == (Released("r", (DOSE,), True, {}, lost, 0, (2, 9)),)


def test_an_event_that_cannot_be_taken_in_is_named_and_takes_no_other_with_it(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.refused = {"second"}
    names = ["first", "second", "third"]
    event_sender = EventSender(server.address)
    for number, name in enumerate(names):
        event_sender.send(Frame(installed(name, number=number)))
    zeros, ones = int64(0, 0, 0), int64(1, 1, 1)
    head = RowsHead(0, "float32", 2, [[2]], int64(0, 1, 2), zeros, zeros, ones)
    event_sender.send(Frame(server.stage(head, bytes(24))[0]))
    event_sender.send(Frame(released("second", number=1)))
    event_sender.close()
    server.wait_for(7)
    told = [(type(event), event.request_id) for event in server.events]
    assert told == [
        (Installed, "first"),
        (Dropped, "second"),
        (Installed, "third"),
        (Rows, "first"),
        (Dropped, "second"),
        (Rows, "third"),
        (Dropped, "second"),
    ]
    dropped = [event.report for event in server.events if isinstance(event, Dropped)]
    assert [type(report) for report in dropped] == [Installed, Rows, Released]
    assert [one.message for one in caplog.records] == [
        f"an event of request second could not be processed ({count} failures since the start)"
        for count in (1, 2, 3)
    ]


class Loop:
    """An event loop that runs nothing by itself."""

    def __init__(self) -> None:
        self.turns: list[Callable[[], None]] = []

    def call_soon(self, turn: Callable[[], None]) -> None:
        self.turns.append(turn)


def test_the_events_of_a_large_frame_are_spread_over_turns_of_the_loop_in_their_order() -> None:
    loop: Any = Loop()  # in place of asyncio's
    came: list[str] = []
    frames: list[int] = []
    events = EventQueue(loop, lambda event: came.append(event.request_id), lambda: frames.append(0))
    large = [Installed(f"{number}", "") for number in range(1000)]
    events.put(large)
    events.put([Installed("next", "")])
    at_once = [len(came)]
    while loop.turns:
        loop.turns.pop(0)()
        at_once.append(len(came) - sum(at_once))
        assert len(frames) == (len(came) >= 1000) + (len(came) > 1000)
    assert max(at_once) <= 64
    assert came == [*(one.request_id for one in large), "next"]


def test_the_events_of_all_frames_of_a_turn_share_its_time() -> None:
    def deliver(event: Event) -> None:
        nonlocal clock
        clock += 0.004
        came.append(event.request_id)

    clock = 0.0
    loop: Any = Loop()  # as above
    came: list[str] = []
    frames: list[int] = []
    events = EventQueue(loop, deliver, lambda: frames.append(0), lambda: clock)
    for number in range(5):
        events.put([Installed(f"{number}a", ""), Installed(f"{number}b", "")])
    at_once = [len(came)]
    while loop.turns:
        loop.turns.pop(0)()
        at_once.append(len(came) - sum(at_once))
    assert at_once == [3, 3, 3, 1, 0]
    assert came == [f"{number}{which}" for number in range(5) for which in "ab"]
    assert len(frames) == 5


def test_the_limit_of_events_holds_for_all_frames_of_a_turn_together() -> None:
    loop: Any = Loop()  # as above
    came: list[str] = []
    events = EventQueue(loop, lambda event: came.append(event.request_id), lambda: None, lambda: 0)
    for number in range(70):
        events.put([Installed(str(number), "")])
    assert len(came) == 32  # the end of a frame counts, too
    while loop.turns:
        loop.turns.pop(0)()
    assert came == [str(number) for number in range(70)]


def test_an_event_of_which_nobody_can_be_told_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    def deliver(event: Event) -> None:
        came.append(event)
        if event.request_id == "bad":
            raise RuntimeError

    came: list[Event] = []
    loop: Any = Loop()  # as above
    events = EventQueue(loop, deliver, lambda: None)
    bad = Installed("bad", "")
    events.put([bad, Installed("good", "")])
    assert came == [bad, Dropped(bad), Installed("good", "")]
    assert events.failed == len(caplog.records) == 2


MISPLACED = {
    "before the area": StagingRange(-64, 16),
    "beyond its end": StagingRange(0, 2**20 + 1),
    "over its end": StagingRange(2**20 - 64, 65),
    "of no size": StagingRange(0, -1),
    "far ahead": StagingRange(2**62, 16),
    "in the next but one round": StagingRange(2**22, 16),
}


@pytest.mark.parametrize("name", MISPLACED)
def test_rows_that_would_lie_elsewhere_are_lost_and_counted(
    server: Server, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    good, _ = server.stage(rows(7), payload())
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(server.address)
        wrong = msgspec.structs.replace(rows(), staging_range=MISPLACED[name])
        for head in (installed(), wrong, good, released(captured={2: 2, 7: 2})):
            socket.send(encode_head(head))
        assert server.wait_for(3)[1:] == [
            ROWS_OF_7,
            (Released("r", (DOSE,), True, {7: 2}, 2, 0, (2, 9)),),
        ]
    assert [one.message for one in caplog.records] == [
        "captured rows or signals could not be read and are lost"
    ]


@pytest.mark.parametrize("staging_range", [None, StagingRange(0, 16)])
def test_rows_of_a_worker_that_shares_no_memory_are_lost_and_counted(
    tmp_path: Path, staging_range: StagingRange | None
) -> None:
    server = Server(f"ipc://{tmp_path}/channel")
    server.channel.attach([{"staging": None}])
    event_sender = EventSender(server.address)
    for head in (
        installed(),
        msgspec.structs.replace(rows(), staging_range=staging_range),
        released(captured={2: 2}),
    ):
        event_sender.send(Frame(head))
    assert server.wait_for(2)[1] == (Released("r", (DOSE,), True, {}, 2, 0, (2, 9)),)
    event_sender.close()
    server.channel.close()
    server.close_loop()


def test_closing_frees_the_address(server: Server) -> None:
    path = Path(server.address.removeprefix("ipc://"))
    assert path.exists()
    server.channel.close()
    assert not path.exists()
    WorkerChannel(EngineSettings(channel=server.address), ranks=1).close()
    assert not path.exists()


def test_an_address_that_cannot_be_bound_is_refused_and_nothing_is_left_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    monkeypatch.setattr(zmq, "Context", lambda: context)
    with pytest.raises(zmq.ZMQError):
        WorkerChannel(EngineSettings(channel=f"ipc://{tmp_path}/no/such/folder"), ranks=1)
    assert context.closed


def test_a_channel_whose_loop_has_closed_can_still_be_closed(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    server.close_loop()
    event_sender = EventSender(server.address)
    event_sender.send(Frame(installed()))
    event_sender.close()
    closing = threading.Thread(target=server.channel.close, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
