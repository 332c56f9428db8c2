"""How fast captured rows come from a worker to the server's event loop, in two processes.

"staging" is the engine's own way: the outlet writes rows into memory that both share, and a message
says where. "messages" is what it is measured against: the same rows inside ZeroMQ's messages. No
model and no device; both ends share this machine's cores with whatever else runs there.

    python -m rheostat_server.bench.channel --out results
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import zmq

from rheostat_engine import EngineSettings, Event, Rows, WorkerChannel
from rheostat_engine.channel import EventMerger
from rheostat_engine.core.delivery import Delivery, Frame
from rheostat_engine.core.outlet import Group, Outlet
from rheostat_engine.core.staging import StagingArea
from rheostat_engine.events import InstalledHead, RowsHead, decode_head, encode_head

_SPAWNED = multiprocessing.get_context("spawn")
_WIDTH = 4096
_ROW = 2 * _WIDTH
_GB = 1e9
_WAITING = 1 << 30
"""Bytes that may wait for the server: the area's, and about as many in messages."""
_MOST = 128
"""Requests of one frame."""


class Load(NamedTuple):
    """The frames of one arm."""

    name: str
    requests: int
    sites: int
    positions: int
    """Of each request, at each site."""
    frames: int

    @property
    def rows(self) -> int:
        """Rows of a frame."""
        return self.requests * self.sites * self.positions

    @property
    def nbytes(self) -> int:
        """Bytes of all frames."""
        return self.rows * _ROW * self.frames

    def head(self) -> RowsHead:
        """What the worker says of a frame."""
        count = self.requests
        columns = ([*range(count)], [0] * count, [0] * count, [self.positions] * count)
        number, which, start, positions = (np.array(c, "<i8").tobytes() for c in columns)
        sites = [[*range(self.sites)]]
        return RowsHead(0, "bfloat16", _WIDTH, sites, number, which, start, positions)


ARMS = (
    Load("prompt, 1 MiB", 1, 1, 128, 64),
    Load("prompt, 32 MiB", 1, 32, 128, 8),
    Load("prompt, 256 MiB", 1, 32, 1024, 2),
    Load("decode, 32 MiB", _MOST, 32, 1, 8),
)
"""What is measured: rows of one request's prompt, and one position of many requests."""


def _installed() -> list[InstalledHead]:
    return [InstalledHead(0, number, str(number), "") for number in range(_MOST)]


def _rows() -> torch.Tensor:
    torch.set_num_threads(1)
    return torch.ones(max(load.rows for load in ARMS), _WIDTH, dtype=torch.bfloat16)


def _stage(address: str, told: Connection) -> None:
    """A worker with a staging area."""
    cpu = torch.device("cpu")
    area = StagingArea(_WAITING, cpu)
    outlet = Outlet(Delivery(address), cpu, area, scratch=1)
    rows = _rows()
    for head in _installed():
        outlet.send(Frame(head))
    told.send(area.report(0))
    while (load := told.recv()) is not None:
        head, groups = load.head(), [Group(None, load.rows)]
        for _ in range(load.frames):
            while outlet.free_bytes < load.rows * _ROW:
                time.sleep(0.0002)
            outlet.send_rows(head, rows[: load.rows], groups)
    outlet.close()


def _message(address: str, told: Connection) -> None:
    """A worker that puts rows into messages."""
    rows = _rows()
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(address)
        told.send(None)
        while (load := told.recv()) is not None:
            socket.setsockopt(zmq.SNDHWM, max(1, _WAITING // (load.rows * _ROW) // 2))
            for _ in range(load.frames):
                copy = rows[: load.rows].clone().view(torch.uint8).numpy().data.cast("B")
                socket.send_multipart([encode_head(load.head()), copy], copy=False)


class _Received:
    """Counts on the event loop what has come."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._nbytes = 0
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def deliver(self, event: Event) -> None:
        if isinstance(event, Rows):
            with self._news:
                self._nbytes += event.data.nbytes
                self._news.notify_all()

    def wait_for(self, nbytes: int) -> None:
        with self._news:
            self._news.wait_for(lambda: self._nbytes >= nbytes)
            self._nbytes -= nbytes


class _Messages:
    """The server's end of rows in messages."""

    def __init__(self, address: str, received: _Received) -> None:
        self._received = received
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 16)
        self._socket.bind(address)
        self._merger = EventMerger(1)
        for head in _installed():
            self._merger.feed(head)
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self) -> None:
        while True:
            head, payload = self._socket.recv_multipart()
            events = self._merger.feed(decode_head(head), payload)
            self._received.loop.call_soon_threadsafe(self._deliver, events)

    def _deliver(self, events: Sequence[Event]) -> None:
        for event in events:
            self._received.deliver(event)


class Took(NamedTuple):
    """What one turn of an arm took."""

    seconds: float
    cpu_seconds: float
    """Of the server's process."""


def measure(way: str, repeats: int) -> dict[str, list[Took]]:
    """The turns of every arm, after one that doesn't count."""
    received = _Received()
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/channel"
        ours, theirs = _SPAWNED.Pipe()
        worker = _SPAWNED.Process(
            target=_stage if way == "staging" else _message, args=(address, theirs), daemon=True
        )
        worker.start()
        if way == "staging":
            channel = WorkerChannel(EngineSettings(channel=address), ranks=1)
            channel.attach([{"staging": ours.recv()}])
            channel.start(received.loop, received.deliver)
        else:
            _Messages(address, received)
            ours.recv()
        found: dict[str, list[Took]] = {load.name: [] for load in ARMS}
        for _ in range(repeats + 1):
            for load in ARMS:
                begun, busy = time.perf_counter(), time.process_time()
                ours.send(load)
                received.wait_for(load.nbytes)
                took = Took(time.perf_counter() - begun, time.process_time() - busy)
                found[load.name].append(took)
        ours.send(None)
        worker.join()
        if way == "staging":
            channel.close()
    return {name: turns[1:] for name, turns in found.items()}


def main() -> None:
    """Measures, prints a table and writes `channel.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a folder, for channel.json")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    found = {way: measure(way, arguments.repeats) for way in ("messages", "staging")}
    table = {
        load.name: {
            way: {
                "gb_per_s": statistics.median(load.nbytes / t.seconds / _GB for t in turns),
                "best_gb_per_s": max(load.nbytes / t.seconds / _GB for t in turns),
                "cpu_s_per_gb": statistics.median(t.cpu_seconds / load.nbytes * _GB for t in turns),
            }
            for way, turns in ((way, by_arm[load.name]) for way, by_arm in found.items())
        }
        for load in ARMS
    }
    result = {
        "benchmark": "channel",
        "measures": "rows from a worker's thread to the server's event loop, each in its process",
        "device": f"CPU, {platform.machine()}, {os.cpu_count()} cores",
        "row_bytes": _ROW,
        "repeats": arguments.repeats,
        "arms": {load.name: load._asdict() for load in ARMS},
        "summary": table,
        "seconds": {
            way: {name: [t.seconds for t in turns] for name, turns in by_arm.items()}
            for way, by_arm in found.items()
        },
    }
    (arguments.out / "channel.json").write_text(json.dumps(result, indent=1))
    print(f"{'GB/s, median (best); CPU s/GB':32}{'messages':>22}{'staging':>22}")
    for name, row in table.items():
        cells = (
            f"{one['gb_per_s']:8.2f} ({one['best_gb_per_s']:4.2f}){one['cpu_s_per_gb']:6.2f}"
            for one in row.values()
        )
        print(f"{name:32}" + "".join(f"{cell:>22}" for cell in cells))


if __name__ == "__main__":
    main()
