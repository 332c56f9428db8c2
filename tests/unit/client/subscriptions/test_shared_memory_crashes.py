"""Shared memory when a side is killed: rows are taken up by another process, nothing is left."""

import multiprocessing
import subprocess
import sys
import zlib
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import NamedTuple

import numpy as np
import pytest

import rheostat
from rheostat_bench import stream
from rheostat_server.subscriptions.shared_memory import FOLDER

SITES = 4
PROMPT = 512
ROWS = (stream._StandIn()._rows.astype(np.uint32) << 16).view(np.float32)
"""What the stand-in captures, by position, at every site."""

SUBSCRIBER = """
import sys, zlib
import rheostat
from rheostat._subscriptions import shared_memory

target, name, sequence, ends = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
shared = 0
read = shared_memory.Mapping.payload

def counted(mapping, ref):
    global shared
    shared += 1
    return read(mapping, ref)

shared_memory.Mapping.payload = counted
engine = rheostat.connect(target)
options = dict(ack="manual", shared_memory=True)
if name:
    subscription = engine.resume(rheostat.Cursor(name, sequence), **options)
else:
    capture = rheostat.Capture("resid_post", layers=range(4))
    subscription = engine.subscribe(every=True, capture=capture, **options)
print(subscription.id, subscription._state.payloads._mapping.name, flush=True)
while ends:
    event = next(subscription)
    if isinstance(event, rheostat.EndOfRequest):
        ends -= 1
        numbers = (event.sequence, "end", event.row_count, 0, 0, shared)
    else:
        first, count = int(event.positions[0]), len(event.positions)
        crc = zlib.crc32(event.values.tobytes())
        numbers = (event.sequence, event.request_id, first, count, crc, shared)
    sys.stdout.write(" ".join(map(str, numbers)) + "\\n")  # a kill never leaves half a line
    sys.stdout.flush()
    subscription.ack()
subscription.close()
"""


class Server(NamedTuple):
    """A server in a process of its own."""

    process: BaseProcess
    told: Connection
    target: str


def start() -> Server:
    ours, theirs = stream._SPAWNED.Pipe()
    process = stream._SPAWNED.Process(target=stream._serve, args=(theirs,))
    process.start()
    return Server(process, ours, f"127.0.0.1:{ours.recv()}")


@pytest.fixture
def server() -> Iterator[Server]:
    one = start()
    yield one
    if one.process.is_alive():
        one.told.send(None)
    one.process.join(20)
    assert not one.process.is_alive()


def subscriber(server: Server, name: str = "", sequence: int = 0, ends: int = 1000):
    script = [sys.executable, "-c", SUBSCRIBER, server.target, name, str(sequence), str(ends)]
    child = subprocess.Popen(script, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    opened = child.stdout.readline().split()
    return child, opened[0], FOLDER / opened[1]


def generate(server: Server, count: int) -> None:
    with rheostat.connect(server.target) as engine:
        for number in range(count):
            engine.generate([5] * PROMPT, request_id=f"r{number}", max_tokens=1, ignore_eos=True)


def assert_rows(lines: list[list[str]], requests: int) -> None:
    """Every position of every request once, its rows bit for bit."""
    covered: dict[str, list[tuple[int, int]]] = {}
    for _, name, first, count, crc, _ in lines:
        if name == "end":
            assert int(first) == PROMPT * SITES
            continue
        rows = ROWS[int(first) : int(first) + int(count)]
        assert int(crc) == zlib.crc32(np.stack([rows] * SITES).tobytes())
        covered.setdefault(name, []).append((int(first), int(first) + int(count)))
    assert set(covered) == {f"r{number}" for number in range(requests)}
    for parts in covered.values():
        edges = [0, *(end for _, end in sorted(parts))]
        assert [start for start, _ in sorted(parts)] == edges[:-1]
        assert edges[-1] == PROMPT


def test_another_process_takes_up_what_a_killed_subscriber_had(server) -> None:
    child, name, memory = subscriber(server)
    with child:
        generate(server, 6)
        assert child.stdout is not None
        lines = [child.stdout.readline().split() for _ in range(5)]
        child.kill()
        lines += [line.split() for line in child.stdout.readlines()]
    assert memory.exists()  # the server's own, which keeps what was not acknowledged
    lines = [line for line in lines if len(line) == 6]
    ended = sum(line[1] == "end" for line in lines)
    other, again, same = subscriber(server, name, int(lines[-1][0]), 6 - ended)
    with other:
        assert other.stdout is not None
        rest = [line.split() for line in other.stdout.readlines()]
        assert other.wait(20) == 0
    assert (again, same) == (name, memory)
    told = lines + rest
    assert [int(line[0]) for line in told] == list(range(1, len(told) + 1))
    assert_rows(told, 6)
    # Until the server knows that a client has mapped the memory, its rows come inline.
    assert int(lines[-1][5]) + int(rest[-1][5]) > 0
    assert not memory.exists()


def test_a_killed_server_is_an_error_and_the_next_one_removes_its_memory(server) -> None:
    capture = rheostat.Capture("resid_post", layers=range(SITES))
    options = {"shared_memory": True, "views": True, "ack": "manual"}
    with rheostat.connect(server.target) as engine:
        subscription = engine.subscribe(every=True, capture=capture, **options)
        subscription._state.reconnect_timeout = 0.5
        memory = FOLDER / subscription._state.payloads._mapping.name
        generate(server, 3)
        events = [next(subscription) for _ in range(2)]
        assert memory.exists()  # before the kill, because any server that starts removes it
        server.process.kill()
        server.process.join()
        with pytest.raises(rheostat.Unavailable):
            events.extend(subscription)
        following = start()
        try:
            assert not memory.exists()
            with rheostat.connect(following.target) as fresh:
                cursor = subscription.acknowledged
                with pytest.raises(rheostat.NotFound, match="the server was restarted"):
                    fresh.resume(cursor)
        finally:
            following.told.send(None)
            following.process.join(20)
        shared = 0
        for event in events:  # what was mapped stays as it was
            if isinstance(event, rheostat.CapturedRows):
                first, count = int(event.positions[0]), len(event.positions)
                rows = np.stack([ROWS[first : first + count]] * SITES)
                assert event.values.tobytes() == rows.tobytes()
                shared += event.elements is not None
        assert shared == len([e for e in events if isinstance(e, rheostat.CapturedRows)]) > 0


def test_a_killed_client_leaves_nothing_once_the_server_ends() -> None:
    one = start()
    child, _, memory = subscriber(one)
    with child:
        child.kill()
    assert memory.exists()
    one.told.send(None)
    one.process.join(20)
    assert not memory.exists()
    assert not multiprocessing.active_children()
