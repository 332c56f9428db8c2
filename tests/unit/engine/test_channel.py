"""What the workers send arrives, in order, as events of requests; nothing else gets in the way."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import zmq

from rheostat_engine import EngineSettings, Event, Installed, Released, Rows, WorkerChannel
from rheostat_engine.channel import EventMerger
from rheostat_engine.core.delivery import Delivery, Frame
from rheostat_engine.events import (
    Head,
    InstalledHead,
    ReleasedHead,
    RowsHead,
    decode_head,
    encode_head,
    split_rows,
)

Plain = tuple[object, ...]


def installed(request_id: str = "r", *, rank: int = 0, number: int = 1, error: str = "") -> Head:
    return InstalledHead(rank, number, request_id, error)


def released(
    request_id: str = "r",
    *,
    rank: int = 0,
    number: int = 1,
    captured: dict[int, int] | None = None,
    lost: int = 0,
    preemptions: int = 0,
) -> Head:
    return ReleasedHead(
        rank, number, request_id, [3, 0], captured or {}, lost, preemptions, (2, 9), 0
    )


def int64(*values: int) -> bytes:
    return np.array(values, "<i8").tobytes()


def rows(
    site: int = 2, count: int = 2, *, rank: int = 0, number: int = 1, dtype: str = "float32"
) -> Head:
    """One block of two columns from position 5 on."""
    return RowsHead(rank, dtype, 2, [[site]], int64(number), int64(0), int64(5), int64(count))


def payload(count: int = 2) -> bytes:
    return np.arange(2 * count, dtype="<f4").tobytes()


def plain(event: Event) -> Plain:
    """An event as values that can be compared."""
    if isinstance(event, Rows):
        return event.request_id, event.site, event.positions.tolist(), event.data.tolist()
    return (event,)


def feed(merger: EventMerger, *heads: Head) -> list[Plain]:
    """What the merger makes of frames; rows bring their payload."""
    events = []
    for head in heads:
        body = payload() if isinstance(head, RowsHead) else b""
        events += merger.feed(encode_head(head), body)
    return [plain(event) for event in events]


ROWS_OF_2 = ("r", 2, [5, 6], [[0.0, 1.0], [2.0, 3.0]])
ROWS_OF_7 = ("r", 7, [5, 6], [[0.0, 1.0], [2.0, 3.0]])


def test_heads_survive_the_wire() -> None:
    for head in (installed(error="why"), rows(), released(captured={4: 2})):
        assert decode_head(encode_head(head)) == head


def test_a_frame_of_rows_is_split_into_requests_and_sites() -> None:
    head = RowsHead(
        rank=0,
        dtype="bfloat16",
        width=2,
        classes=[[0, 4], [3]],
        number=int64(7, 8),
        which=int64(0, 1),
        start=int64(10, 0),
        count=int64(2, 1),
    )
    data = np.arange(10, dtype="<u2")
    events = split_rows(head, data.tobytes(), {7: "a", 8: "b"})
    assert [plain(event) for event in events] == [
        ("a", 0, [10, 11], [[0, 1], [2, 3]]),
        ("a", 4, [10, 11], [[4, 5], [6, 7]]),
        ("b", 3, [0], [[8, 9]]),
    ]
    assert {event.data.dtype for event in events} == {np.dtype("u2")}
    assert {event.positions.dtype for event in events} == {np.dtype("i4")}


@pytest.mark.parametrize("count", [1, 3])
def test_a_frame_whose_labels_do_not_fit_its_rows_is_refused(count: int) -> None:
    head = rows(count=count)
    assert isinstance(head, RowsHead)
    with pytest.raises(ValueError, match=f"^a frame of 2 rows labels {count}$"):
        split_rows(head, payload(2), {1: "r"})


def test_one_worker_is_taken_at_its_word() -> None:
    merger = EventMerger(1)
    assert feed(merger, installed(error="why"), rows(), released(captured={2: 2}, lost=1)) == [
        (Installed("r", "why"),),
        ROWS_OF_2,
        (Released("r", (3, 0), {2: 2}, 1, 0, (2, 9)),),
    ]


def test_several_workers_have_all_to_speak_before_a_request_is_installed_or_released() -> None:
    merger = EventMerger(3)
    assert feed(merger, installed(rank=2), installed(rank=0)) == []
    assert feed(merger, installed(rank=1)) == [(Installed("r", ""),)]
    assert feed(merger, released(rank=0, captured={0: 4}, lost=1, preemptions=1)) == []
    assert feed(merger, rows(rank=1)) == [ROWS_OF_2]
    assert feed(merger, released(rank=1, captured={2: 2}, lost=2, preemptions=1)) == []
    assert feed(merger, released(rank=2, preemptions=1)) == [
        (Released("r", (3, 0), {0: 4, 2: 2}, 3, 1, (2, 9)),)
    ]


def test_an_error_of_one_worker_wins() -> None:
    merger = EventMerger(2)
    assert feed(merger, installed(rank=0, error="full"), installed(rank=1)) == [
        (Installed("r", "full"),)
    ]


def test_rows_of_a_fast_worker_wait_until_the_slow_one_has_installed_the_plan() -> None:
    merger = EventMerger(2)
    assert feed(merger, installed(rank=0), rows(2), rows(7)) == []
    assert feed(merger, installed(rank=1)) == [(Installed("r", ""),), ROWS_OF_2, ROWS_OF_7]
    assert feed(merger, rows(7)) == [ROWS_OF_7]


def test_each_worker_has_numbers_of_its_own_and_gives_them_out_again() -> None:
    merger = EventMerger(2)
    feed(merger, installed("a", rank=0, number=1), installed("a", rank=1, number=2))
    feed(merger, installed("b", rank=0, number=2), installed("b", rank=1, number=1))
    found = feed(merger, rows(rank=0, number=1), rows(rank=1, number=1))
    assert [event[0] for event in found] == ["a", "b"]
    feed(merger, released("a", rank=0, number=1), released("a", rank=1, number=2))
    feed(merger, installed("c", rank=0, number=1), installed("c", rank=1, number=2))
    assert [event[0] for event in feed(merger, rows(rank=1, number=2))] == ["c"]


class Server:
    """A channel whose events go into a list, and a worker's end of it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.loop = asyncio.new_event_loop()
        self._loop_thread = threading.Thread(target=self.loop.run_forever)
        self._loop_thread.start()
        self.channel = WorkerChannel(EngineSettings(channel=address), ranks=1)
        self.events: list[Event] = []
        self._news = threading.Condition()
        self.channel.start(self.loop, self._deliver)

    def _deliver(self, event: Event) -> None:
        with self._news:
            self.events.append(event)
            self._news.notify_all()

    def wait_for(self, count: int) -> list[Plain]:
        with self._news:
            assert self._news.wait_for(lambda: len(self.events) >= count, 30)
            return [plain(event) for event in self.events]

    def close_loop(self) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._loop_thread.join()
            self.loop.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(f"ipc://{tmp_path}/channel")
    yield server
    server.channel.close()
    server.close_loop()


class Fence:
    """Something that the device does later."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def synchronize(self) -> None:
        self._tensor.copy_(torch.arange(4.0).view(2, 2))


def test_everything_arrives_in_the_order_in_which_it_was_handed_over(server: Server) -> None:
    delivery = Delivery(server.address)
    delivery.send(Frame(installed()))
    for _ in range(50):
        late = torch.zeros(2, 2)
        delivery.send(Frame(rows(), late, Fence(late)))
        delivery.send(Frame(rows(7), torch.arange(4.0).view(2, 2)))
    delivery.send(Frame(released()))
    assert server.wait_for(102) == [
        (Installed("r", ""),),
        *[ROWS_OF_2, ROWS_OF_7] * 50,
        (Released("r", (3, 0), {}, 0, 0, (2, 9)),),
    ]
    delivery.close()


def test_what_waits_for_a_slow_loop_stays_bounded_and_none_of_it_is_lost(server: Server) -> None:
    held = threading.Event()
    server.loop.call_soon_threadsafe(held.wait)
    delivery = Delivery(server.address)
    delivery.send(Frame(installed()))
    values = torch.zeros(20_000, 2)
    for _ in range(200):
        delivery.send(Frame(rows(7, count=20_000), values))
    settled = -1
    while settled != delivery.pending_bytes:
        settled = delivery.pending_bytes
        held.wait(0.5)
    held.set()
    assert len(server.wait_for(201)) == 201
    assert 0 < settled < 200 * values.nbytes
    delivery.close()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda d: str(d)[6:]
)
def test_rows_keep_their_bits(server: Server, dtype: torch.dtype) -> None:
    values = torch.randn(3, 2, generator=torch.Generator().manual_seed(0)).to(dtype)
    delivery = Delivery(server.address)
    delivery.send(Frame(installed()))
    delivery.send(Frame(rows(count=3, dtype=str(dtype).removeprefix("torch.")), values))
    delivery.close()
    server.wait_for(2)
    event = server.events[1]
    assert isinstance(event, Rows)
    assert event.data.tobytes() == values.view(torch.uint8).numpy().tobytes()


def test_a_worker_may_connect_before_the_server_has_bound(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/late"
    delivery = Delivery(address)
    delivery.send(Frame(installed()))
    server = Server(address)
    assert server.wait_for(1) == [(Installed("r", ""),)]
    delivery.close()
    server.channel.close()
    server.close_loop()


BAD_FRAMES = {
    "no message": [b"", b""],
    "one part": [encode_head(installed("lost"))],
    "three parts": [encode_head(installed("lost")), b"", b""],
    "not msgpack": [b"\xc1 what", b""],
    "other fields": [b"\x81\xa4type\xa9installed", b""],
    "torn rows": [encode_head(rows()), b"abc"],
    "rows of nobody": [encode_head(rows(number=99)), payload()],
    "rows of no worker": [encode_head(rows(rank=5)), payload()],
    "rows of no type": [encode_head(rows(dtype="complex")), payload()],
    "too few rows": [encode_head(rows(count=3)), payload()],
    "torn labels": [
        encode_head(RowsHead(0, "float32", 2, [[2]], b"123", b"", b"", b"")),
        payload(),
    ],
    "rows of no class": [
        encode_head(RowsHead(0, "float32", 2, [], int64(1), int64(0), int64(5), int64(2))),
        payload(),
    ],
    "positions beyond reason": [
        encode_head(RowsHead(0, "float32", 2, [[2]], int64(1), int64(0), int64(2**62), int64(2))),
        payload(),
    ],
    "rows without columns": [
        encode_head(RowsHead(0, "float32", 0, [[2]], int64(1), int64(0), int64(5), int64(2))),
        b"",
    ],
    "released by nobody": [encode_head(released(rank=9)), b""],
}


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_a_bad_frame_is_logged_and_skipped(
    server: Server, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(server.address)
        socket.send_multipart([encode_head(installed()), b""])
        socket.send_multipart(BAD_FRAMES[name])
        socket.send_multipart([encode_head(rows()), payload()])
        assert server.wait_for(2) == [(Installed("r", ""),), ROWS_OF_2]
    assert [record.message for record in caplog.records] == [
        "a frame of the side channel is malformed and was skipped"
    ]


def test_closing_frees_the_address(server: Server) -> None:
    path = Path(server.address.removeprefix("ipc://"))
    assert path.exists()
    server.channel.close()
    assert not path.exists()
    WorkerChannel(EngineSettings(channel=server.address), ranks=1).close()
    assert not path.exists()


def test_an_address_that_is_taken_is_refused(server: Server, tmp_path: Path) -> None:
    with pytest.raises(zmq.ZMQError):
        WorkerChannel(EngineSettings(channel=f"ipc://{tmp_path}/no/such/folder"), ranks=1)


def test_a_channel_whose_loop_has_closed_can_still_be_closed(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    server.close_loop()
    delivery = Delivery(server.address)
    delivery.send(Frame(installed()))
    delivery.close()
    closing = threading.Thread(target=server.channel.close, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
