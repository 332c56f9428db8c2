"""Speed of captured rows from a worker to the server's event loop, in two processes.

The engine's own way: the outlet writes rows into memory that both share, a message says where, and
the server copies them out. No model and no device; both ends share this machine's cores with
whatever else runs there.

    rheostat bench channel --out results
"""

import argparse
import asyncio
import json
import multiprocessing
import platform
import statistics
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from rheostat_bench.machine import circumstances
from rheostat_bench.summaries import Figures
from rheostat_engine import EngineSettings, Event, Rows, WorkerChannel
from rheostat_engine.channel.events import Installed, InstalledHead, RowsHead
from rheostat_engine.worker.transport.event_sender import EventSender, Frame
from rheostat_engine.worker.transport.row_sender import Group, RowSender
from rheostat_engine.worker.transport.staging_area import StagingArea
from rheostat_server.tasks.allocator import keep_freed_memory

_SPAWNED = multiprocessing.get_context("spawn")
_WIDTH = 4096
_ROW = 2 * _WIDTH
_GB = 1e9
_WAITING = 1 << 30
"""Bytes of the area."""
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
"""The measured workloads: rows of one request's prompt, and one position of many requests."""


def _installed() -> list[InstalledHead]:
    return [InstalledHead(0, number, Installed(str(number), "")) for number in range(_MOST)]


def _rows() -> torch.Tensor:
    torch.set_num_threads(1)
    return torch.ones(max(load.rows for load in ARMS), _WIDTH, dtype=torch.bfloat16)


def _stage(address: str, told: Connection) -> None:
    """A worker with a staging area."""
    cpu = torch.device("cpu")
    area = StagingArea(_WAITING, cpu)
    row_sender = RowSender(EventSender(address), cpu, area, scratch=1)
    rows = _rows()
    for head in _installed():
        row_sender.send(Frame(head))
    told.send(area.report(0))
    while (load := told.recv()) is not None:
        head, groups = load.head(), [Group(None, load.rows)]
        for _ in range(load.frames):
            while row_sender.free_bytes < load.rows * _ROW:
                time.sleep(0.0002)
            row_sender.send_rows(head, rows[: load.rows], groups)
    row_sender.close()


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


class Took(NamedTuple):
    """What one turn of an arm took."""

    seconds: float
    cpu_seconds: float
    """Of the server's process."""


def measure(repeats: int) -> dict[str, list[Took]]:
    """The turns of every arm, after one that doesn't count."""
    keep_freed_memory()  # as the server does
    received = _Received()
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/channel"
        ours, theirs = _SPAWNED.Pipe()
        worker = _SPAWNED.Process(target=_stage, args=(address, theirs), daemon=True)
        worker.start()
        channel = WorkerChannel(EngineSettings(channel=address), ranks=1)
        channel.attach([{"staging": ours.recv()}])
        channel.start(received.loop, received.deliver)
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
        channel.close()
    return {name: turns[1:] for name, turns in found.items()}


def main() -> None:
    """Measures, prints a table and writes `channel.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a folder, for channel.json")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    found = measure(arguments.repeats)
    table: Figures = {
        load.name: {
            "gb_per_s": statistics.median(load.nbytes / t.seconds / _GB for t in found[load.name]),
            "best_gb_per_s": max(load.nbytes / t.seconds / _GB for t in found[load.name]),
            "server_cpu_s_per_gb": statistics.median(
                t.cpu_seconds / load.nbytes * _GB for t in found[load.name]
            ),
        }
        for load in ARMS
    }
    result = {
        "benchmark": "channel",
        "measures": "rows from a worker's thread to the server's event loop, each in its process",
        "device": f"CPU, {platform.machine()}",
        **circumstances(),
        "row_bytes": _ROW,
        "repeats": arguments.repeats,
        "arms": {load.name: load._asdict() for load in ARMS},
        "summary": table,
        "seconds": {name: [t.seconds for t in turns] for name, turns in found.items()},
    }
    (arguments.out / "channel.json").write_text(json.dumps(result, indent=1))
    print(f"{'':20}{'GB/s':>9}{'best':>9}{'CPU s/GB':>11}")
    for name, row in table.items():
        print(
            f"{name:20}{row['gb_per_s']:9.2f}{row['best_gb_per_s']:9.2f}"
            f"{row['server_cpu_s_per_gb']:11.2f}"
        )


if __name__ == "__main__":
    main()
