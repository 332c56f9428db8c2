"""Cuts the connections of a watch while requests run, and compares what came with what was read."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

import rheostat

from ...server.fakes import WIDTH, reading
from ..cutting_proxy import CuttingProxy
from ..rows_server import PROMPT, AioSubscriber, RowsServer, SyncSubscriber

_WIDE = rheostat.probe(
    rheostat.inline(np.ones((1, WIDTH), np.float32)), points="resid_post", layers=[0, 1]
)
_TOKENS = 5
_POSITIONS = len(PROMPT) + _TOKENS - 1
_BACKLOG = 200
"""Most requests whose end, and most updates whose answer was not read."""


class CutWatch(NamedTuple):
    """What came of a watch whose connections were cut."""

    cuts: int
    requests: int
    events: int
    readings: int
    """Positions that were read."""
    updates: int
    lost: int
    """Positions, events, ends and answers that did not come."""
    repeated: int
    """Those that came more than once."""
    wrong: int
    """Positions with other numbers, and events out of order."""


def cut_watch(
    running: RowsServer,
    proxy: CuttingProxy,
    client: SyncSubscriber | AioSubscriber,
    cuts: int,
    seed: int,
    on_lost: str = "continue",
) -> CutWatch:
    """Watches requests over a proxy that resets the sockets while messages travel both ways."""

    def ask() -> None:
        while not enough.is_set():
            if len(asked) - len(table.ended) > _BACKLOG:  # more would fill the buffer
                enough.wait(0.01)
                continue
            asked.append(f"r{len(asked)}")
            running.generate(asked[-1], tokens=_TOKENS)

    def take() -> None:
        event = next(watch)
        if isinstance(event, rheostat.UpdateApplied | rheostat.UpdateRefused):
            answers.append(event.update_id)
        else:
            sequences.append(event.sequence)
            table.add(event)

    rng = random.Random(seed)
    enough = threading.Event()
    table = rheostat.WatchTable()
    asked: list[str] = []
    sequences: list[int] = []
    sent: list[int] = []
    answers: list[int] = []
    done = 0
    with (
        ThreadPoolExecutor(1) as threads,
        client.watch(probes=_WIDE, every=True, credit=1 << 10, on_lost=on_lost) as watch,
    ):
        asking = threads.submit(ask)
        try:
            while done < cuts:
                take()
                if rng.random() < 0.05 and len(sent) - len(answers) < _BACKLOG:
                    sent.append(watch.stop("nobody"))
                if rng.random() < 0.3:
                    done += proxy.cut() > 0
        finally:
            enough.set()
        asking.result(30)
        while len(table.ended) < len(asked) or len(answers) < len(sent):
            take()
    came = [position for key in table for position in table[key].positions.tolist()]
    each = {(*key, position) for key in table for position in table[key].positions.tolist()}
    last = sequences[-1]
    wanted = len(asked) * _POSITIONS
    return CutWatch(
        done,
        len(asked),
        len(sequences),
        len(came),
        len(sent),
        lost=(wanted - len(each))
        + (last - len(set(sequences)))
        + (len(asked) - len(table.ended))
        + len(set(sent) - set(answers)),
        repeated=(len(came) - len(each))
        + (len(sequences) - len(set(sequences)))
        + (len(answers) - len(set(answers))),
        wrong=sum(_wrong(table[key]) for key in table) + (sequences != sorted(sequences)),
    )


def _wrong(readings: rheostat.Readings) -> int:
    """The number of positions whose numbers are not those that the engine has read."""
    expected = [[reading(0, p), reading(1, p)] for p in readings.positions.tolist()]
    return int(np.any(readings[_WIDE] != np.array(expected, np.float32), axis=1).sum())
