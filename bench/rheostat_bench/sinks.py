"""Speed of writing rows to sinks and reading them back, by layout and format.

Requests are written from several threads, as the server does it, in the blocks of a mebibyte that
captured rows come in. A time is that from the first block to the last request that is safe on the
disk: flushed, hashed and published. "disk" is the reference: the same bytes into one file, flushed,
with nothing else. "decode" writes a position at a time, as rows come while a model generates.
Reading takes every row of every site through the client's reader; "verify" reads the SHA-256s.

    rheostat bench sinks --out results
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rheostat.captures import open_captures
from rheostat_bench.machine import circumstances
from rheostat_bench.summaries import Figures
from rheostat_engine import Point, Site
from rheostat_server.limits import CHUNK_BYTES
from rheostat_server.sinks.filesystem import Filesystem
from rheostat_server.sinks.formats import Format
from rheostat_server.sinks.memory import Memory
from rheostat_server.sinks.protocol import (
    CaptureAbout,
    Ending,
    Layout,
    Outcome,
    RequestAbout,
    RowBlock,
    Sink,
)
from rheostat_server.sinks.samples import request
from rheostat_server.tensors import FloatType

_GIB = 1 << 30


class Load(NamedTuple):
    """What is written."""

    requests: int
    layers: int
    positions: int
    width: int

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, float32."""
        return self.requests * self.layers * self.positions * self.width * 4

    @property
    def sites(self) -> tuple[Site, ...]:
        """Where the rows are of."""
        return tuple(Site(Point.RESID_POST, layer) for layer in range(self.layers))


class Arm(NamedTuple):
    """One way to keep rows."""

    name: str
    """What the table calls it."""
    layout: Layout | None
    """None: in memory."""
    kind: Format = Format.SAFETENSORS
    decode: bool = False
    """Whether rows come a position at a time."""
    buffer_bytes: int = 64 << 20


ARMS = (
    *(Arm(f"{layout}, {kind}", layout, kind) for kind in Format for layout in Layout),
    *(Arm(f"{layout}, decode", layout, decode=True) for layout in Layout),
    Arm("packed, spooled", Layout.PACKED, buffer_bytes=1 << 20),
    Arm("memory", None),
)
"""What is measured besides the disk itself."""

DISK = Arm("disk", None)
"""The reference."""


def blocks(load: Load, *, decode: bool) -> list[RowBlock]:
    """The rows of a request as they come. Every request has the same: nothing compresses them."""
    random = np.random.default_rng(0)
    step = 1 if decode else max(1, CHUNK_BYTES // (load.layers * load.width * 4))
    found = []
    for first in range(0, load.positions, step):
        positions = np.arange(first, min(first + step, load.positions), dtype=np.int32)
        shape = (load.layers, len(positions), load.width)
        rows = random.standard_normal(shape, dtype=np.float32)
        found.append(RowBlock(0, 0, load.sites, positions, positions, {"rows": rows}))
    return found


def write(sink: Sink, about: RequestAbout, rows: Sequence[RowBlock]) -> None:
    """Records one request."""
    recording = sink.open(about)
    for block in rows:
        recording.write(block)
    recording.finish(Outcome(Ending.COMPLETE))


def written(root: Path, arm: Arm, load: Load, threads: int) -> float:
    """Seconds that all requests took; their files are below `root`."""
    sink: Sink = (
        Memory(2 * load.nbytes)
        if arm.layout is None
        else Filesystem(root, kind=arm.kind, buffer_bytes=arm.buffer_bytes)
    )
    rows = blocks(load, decode=arm.decode)
    capture = CaptureAbout(0, load.sites, FloatType.FLOAT32, load.width)
    abouts = [request(f"bench-{n}", arm.layout, [capture]) for n in range(load.requests)]
    with ThreadPoolExecutor(threads) as pool:
        begun = time.perf_counter()
        for done in [pool.submit(write, sink, about, rows) for about in abouts]:
            done.result()
        took = time.perf_counter() - begun
    sink.close()
    return took


def plain(root: Path, load: Load) -> float:
    """Seconds for the same bytes into one file."""
    root.mkdir()
    rows = [block.parts["rows"].data for block in blocks(load, decode=False)]
    begun = time.perf_counter()
    with (root / "rows").open("wb", buffering=0) as file:
        for _ in range(load.requests):
            for data in rows:
                file.write(data)
        os.fsync(file.fileno())
    return time.perf_counter() - begun


def read(root: Path, load: Load) -> float:
    """Seconds to read every row as float32."""
    store = open_captures(root)
    begun = time.perf_counter()
    rows = sum(
        len(batch)
        for site in load.sites
        for batch in store.rows(site.point.value, site.layer, batch=4096)
    )
    took = time.perf_counter() - begun
    if rows != load.requests * load.layers * load.positions:
        raise RuntimeError(f"{rows} rows came back")
    return took


def verified(root: Path) -> float:
    """Seconds to read every SHA-256."""
    begun = time.perf_counter()
    open_captures(root).verify()
    return time.perf_counter() - begun


def measure(place: Path, load: Load, threads: int, repeats: int) -> Figures:
    """GiB per second of rows, by the median and the fastest repeat, and files. Arms take turns."""
    times: dict[str, dict[str, list[float]]] = {}
    files: dict[str, int] = {}

    def timed(arm: str, what: str, work: Callable[[], float]) -> None:
        times.setdefault(arm, {}).setdefault(what, []).append(work())

    root = place / "root"
    for _ in range(repeats):
        for arm in (DISK, *ARMS):
            work = partial(written, root, arm, load, threads)
            timed(arm.name, "write", partial(plain, root, load) if arm is DISK else work)
            found = [path for path in root.rglob("*") if path.is_file() and path.name != ".lock"]
            files[arm.name] = len(found)
            if arm.layout is not None:
                timed(arm.name, "read", partial(read, root, load))
                timed(arm.name, "verify", partial(verified, root))
            shutil.rmtree(root, ignore_errors=True)
            os.sync()
    size = load.nbytes / _GIB
    table: Figures = {}
    for name, kinds in times.items():
        row = {"files": float(files[name])}
        for what, seconds in kinds.items():
            row[f"{what}_gib_s"] = size / statistics.median(seconds)
            row[f"{what}_fastest_gib_s"] = size / min(seconds)
        table[name] = row
    return table


def tables(result: Mapping[str, Figures]) -> str:
    """The table of a result in Markdown, as the documentation holds it."""
    lines = ["| | write | read | verify | files |", "|" + "---|" * 5]
    for name, row in result["summary"].items():
        speeds = (row.get(f"{what}_gib_s") for what in ("write", "read", "verify"))
        cells = " | ".join("" if speed is None else f"{speed:.2f} GiB/s" for speed in speeds)
        lines.append(f"| {name} | {cells} | {row['files']:.0f} |")
    return "\n".join(lines)


def main() -> None:
    """Measures, prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a folder, for sinks.json")
    parser.add_argument("--place", type=Path, help="a folder on the disk to measure")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--positions", type=int, default=128)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    load = Load(arguments.requests, arguments.layers, arguments.positions, arguments.width)
    with tempfile.TemporaryDirectory(dir=arguments.place) as place:
        table = measure(Path(place), load, arguments.threads, arguments.repeats)
    result = {
        "benchmark": "sinks",
        "device": f"CPU, {platform.machine()}",
        **circumstances(),
        "dtype": "float32",
        **load._asdict(),
        "bytes": load.nbytes,
        "threads": arguments.threads,
        "repeats": arguments.repeats,
        "load_average_at_end": os.getloadavg()[0],
        "summary": table,
    }
    (arguments.out / "sinks.json").write_text(json.dumps(result, indent=1))
    print(tables({"summary": table}))


if __name__ == "__main__":
    main()
