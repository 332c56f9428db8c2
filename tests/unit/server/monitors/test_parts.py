"""What watches read of a request, with a scripted engine."""

from rheostat_engine import SignalsWait
from rheostat_wire.v1 import generation_pb2, monitor_service_pb2

from ..conftest import Running
from ..messages import probe, request
from ..watchers import Watcher, opening, rule

pb = monitor_service_pb2
SAMPLING = generation_pb2.Sampling(max_tokens=4)


async def test_signals_may_wait_if_nothing_reacts_to_them(running: Running) -> None:
    async def wait(*openings, **fields: object) -> SignalsWait:
        watchers = [await Watcher.open(running, one) for one in openings]
        await running.client.generate(request(sampling=SAMPLING, **fields))
        for watcher in watchers:
            await watcher.rest()
        return running.backend.jobs[-1].plan.signals_wait

    summary = opening(report=pb.WATCH_REPORT_SUMMARY)
    mine = probe("mine")
    mine.signals = True
    never, few, many = SignalsWait
    assert await wait(summary) is many
    assert await wait(summary, opening(report=pb.WATCH_REPORT_SUMMARY, steers=True)) is many
    assert await wait(opening()) is few
    assert await wait(summary, opening(on_lost=pb.WATCH_LOST_STOP)) is few
    assert await wait() is never
    assert await wait(summary, opening(steers=True)) is never
    assert await wait(opening(), opening(on_lost=pb.WATCH_LOST_HOLD)) is never
    assert await wait(summary, probes=[mine]) is never
    assert await wait(opening(), probes=[mine]) is never
    assert await wait(opening(rules=[rule(1e9)], report=pb.WATCH_REPORT_SUMMARY)) is never
    assert await wait(opening(), hold_back=2) is never
    assert await wait(opening(buffer_bytes=1 << 20)) is never
    assert await wait(opening(credit=1 << 20)) is never
    assert await wait(summary, hold_back=2) is many
    own = {"probes": [probe("mine")], "rules": [rule(1e9, probe_name="mine")]}
    assert await wait(summary, **own) is never
