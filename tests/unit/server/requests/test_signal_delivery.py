"""Signals of several requests that come together, as those of a step."""

import asyncio
from dataclasses import dataclass, field

import numpy as np
import pytest

from rheostat_engine import Event, SignalRows
from rheostat_server.engine.backend import Job
from rheostat_wire.v1 import generation_pb2

from ..fakes import Paced, reading
from ..messages import probe, request
from ..streams import until
from ..subscribers import by_label
from ..talks import P
from ..watchers import Watcher, clean, opening

RED = {"team": "red"}


@dataclass
class Together(Paced):
    """An engine that delivers the signals of all samples of a step in one event."""

    waiting: list[SignalRows] = field(default_factory=list)
    most: int = 0
    """The most samples whose signals were delivered together."""

    def _signal(self, job: Job, start: int, end: int) -> None:
        rows = self.signals(job.plan, start, end)
        if rows is not None:
            if not self.waiting:
                asyncio.get_running_loop().call_soon(self._deliver_waiting)
            self.waiting.append(rows)

    def _release(self, job: Job, computed: int) -> None:
        self._deliver_waiting()
        super()._release(job, computed)

    def _deliver_waiting(self) -> None:
        waiting, self.waiting = self.waiting, []
        if waiting:
            self.most = max(self.most, len(waiting))
            self.deliver(joined(waiting))


def joined(events: list[SignalRows]) -> Event:
    """One event with the signals of several requests, which may have fewer columns than others."""
    readings = max(event.readings for event in events)
    values = None
    if all(event.values is not None for event in events):
        values = np.full((sum(map(sum, (one.counts for one in events))), readings), 7, np.float32)
        row = 0
        for event in events:
            for part in event.values:
                values[row, : event.readings] = part[: event.readings]
                row += 1
    return SignalRows(
        tuple(name for event in events for name in event.request_ids),
        tuple(start for event in events for start in event.starts),
        tuple(count for event in events for count in event.counts),
        values,
        readings,
    )


def tokens(count: int, n: int = 1) -> generation_pb2.Sampling:
    return generation_pb2.Sampling(max_tokens=count, n=n, temperature=1 if n > 1 else 0)


@pytest.mark.parametrize("overrun", [0, 3])
async def test_each_watch_reads_its_requests_and_no_row_behind_their_ends(
    starter, overrun: int
) -> None:
    backend = Together(overrun=overrun, unscheduled=asyncio.Event())
    running = await starter(backend)
    every = await Watcher.open(running, opening(probe("a"), probe("b")))
    red = await Watcher.open(running, opening(probe("a"), filter=by_label(**RED)))
    mine = probe("mine")
    mine.signals = True
    lengths = {"long": 9, "red": 4, "several": 6, "own": 7}
    calls = [
        request(request_id="long", sampling=tokens(9)),
        request(request_id="red", sampling=tokens(4), labels=RED),
        request(request_id="several", sampling=tokens(6, n=2), labels=RED),
        request(request_id="own", sampling=tokens(7), probes=[mine]),
    ]
    answers = [asyncio.create_task(running.client.generate(call)) for call in calls]
    await until(lambda: len(backend.jobs) == 5)
    backend.unscheduled.set()
    events = await asyncio.gather(*answers)
    await every.until("ended", 4)
    await red.until("ended", 2)
    assert backend.most == 5
    for watcher, columns in ((every, 2), (red, 1)):
        for begun in (event.begun for event in watcher.of("begun")):
            # The columns of each watch follow those of the request and of earlier watches.
            first = {"own": 1}.get(begun.request_id, 0) + (2 if watcher is red else 0)
            end = P + lengths[begun.request_id] - 1
            for sample in range(begun.sample_count):
                assert watcher.read(begun.number, sample) == {
                    p: [reading(first + column, p) for column in range(columns)] for p in range(end)
                }
    assert {event.begun.request_id for event in red.of("begun")} == {"red", "several"}
    values = [e.signals.values.inline for e in events[3] if e.HasField("signals")]
    assert np.frombuffer(b"".join(values), "<f4").tolist() == [reading(0, p) for p in range(P + 6)]
    assert await clean(running)


async def test_a_watch_that_ends_leaves_the_signals_to_others(starter) -> None:
    backend = Together(hold=asyncio.Event(), hold_from=3)
    running = await starter(backend)
    first = await Watcher.open(running, opening())
    second = await Watcher.open(running, opening())
    calls = [
        asyncio.create_task(
            running.client.generate(request(request_id=name, sampling=tokens(count)))
        )
        for name, count in (("a", 6), ("b", 8))
    ]
    await until(lambda: list(backend.positions.values()) == [P + 2] * 2)
    await first.say(leave={"end": True})
    await first.rest()
    backend.hold.set()
    await asyncio.gather(*calls)
    await second.until("ended", 2)
    for begun in (event.begun for event in second.of("begun")):
        end = P + {"a": 6, "b": 8}[begun.request_id] - 1
        assert second.read(begun.number) == {p: [reading(1, p)] for p in range(end)}
    assert await clean(running)
