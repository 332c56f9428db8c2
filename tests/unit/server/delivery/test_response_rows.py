"""Rows in a request's own response, where its client does not read: what each policy does."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing

import pytest

from rheostat_engine import Point, Site
from rheostat_server.admission.admit import admit
from rheostat_server.errors import CaptureOverflow, RheostatError, RowsLost
from rheostat_server.generation.responses import run
from rheostat_server.generation.sample import Response
from rheostat_wire.v1 import capture_pb2, engine_service_pb2

from ..fakes import ScriptedBackend, row
from ..messages import capture, request, site_set
from ..streams import captured, kinds, received, settled, until
from ..subscribers import POST, ROW, Subscriber, opening, sampled, wanted

FAIL, OLDEST, NEWEST, SPILL = (
    capture_pb2.OVERLOAD_FAIL,
    capture_pb2.OVERLOAD_DROP_OLDEST,
    capture_pb2.OVERLOAD_DROP_NEWEST,
    capture_pb2.OVERLOAD_SPILL,
)
TOKENS = 18
POSITIONS = 3 + TOKENS - 1


def spec(policy: int, *layers: int) -> capture_pb2.CaptureSpec:
    return capture(site_set(POST, layers=layers or (0, 1)), overload=policy)


async def stalled(
    running, specs: Sequence[capture_pb2.CaptureSpec], n: int = 1, **fields: object
) -> list[Response]:
    """What comes of a request whose client reads nothing before all of it was generated."""
    request_message = request(request_id="a", sampling=sampled(TOKENS, n), captures=specs, **fields)
    admitted = await admit(request_message, running.manager.admission)
    events = []
    async with aclosing(run(admitted, running.manager)) as responses:
        events.append(await anext(responses))
        active = running.manager._active_requests["a"]
        await until(lambda: active.settled or active.failed)
        spill_manager = running.manager.spill_manager
        if spill_manager is not None:
            await until(
                lambda: all(one._task is None or one._task.done() for one in spill_manager._spills)
            )
        events += [received(response) async for response in responses]
    return events


def lost(events: Sequence[Response], number: int = 0) -> list[int]:
    return [
        position
        for event in events
        if event.WhichOneof("event") == "dropped" and event.dropped.capture_index == number
        for run in event.dropped.positions
        for position in range(run.start, run.start + run.count)
    ]


def kept(events: Sequence[Response], number: int = 0) -> list[int]:
    return sorted({key[4] for key in captured(events) if key[0] == number})


@pytest.mark.parametrize("policy", [OLDEST, NEWEST])
async def test_rows_that_do_not_fit_are_lost_and_reported(starter, policy: int) -> None:
    running = await starter(request_buffer_bytes=8 * ROW)
    events = await stalled(running, [spec(policy)])
    gone, there = lost(events), kept(events)
    assert sorted(gone + there) == list(range(POSITIONS))
    assert 0 < len(there) <= 4
    assert there == (
        list(range(POSITIONS - len(there), POSITIONS))
        if policy == OLDEST
        else list(range(len(there)))
    )
    (receipt,) = events[-1].receipt.captures
    assert [(one.row_count, one.dropped_row_count) for one in receipt.sites] == [
        (len(there), len(gone))
    ] * 2
    stats = await running.client.engine.GetStats(engine_service_pb2.GetStatsRequest())
    assert stats.dropped_row_count == 2 * len(gone)


async def test_where_no_row_may_be_lost_the_request_fails(starter) -> None:
    running = await starter(request_buffer_bytes=8 * ROW)
    with pytest.raises(CaptureOverflow, match="--request-buffer-mib"):
        await stalled(running, [spec(FAIL)])
    await settled(running)


async def test_rows_wait_on_disk_and_come_in_order(starter, tmp_path) -> None:
    running = await starter(request_buffer_bytes=8 * ROW, spool=str(tmp_path))
    events = await stalled(running, [spec(SPILL)], n=3)
    rows = captured(events)
    assert rows == {
        (0, sample, POST, layer, position): row(
            Site(Point.RESID_POST, layer).index, position
        ).tolist()
        for sample in range(3)
        for layer in (0, 1)
        for position in range(POSITIONS)
    }
    for sample in range(3):
        starts = [
            event.captured.positions[0].start
            for event in events
            if event.WhichOneof("event") == "captured" and event.captured.sample == sample
        ]
        assert starts == sorted(starts)
    assert kinds(events)[-1] == "receipt"
    assert list(tmp_path.glob("*.spool")) == []


async def test_a_request_that_goes_away_leaves_no_file(starter, tmp_path) -> None:
    running = await starter(request_buffer_bytes=8 * ROW, spool=str(tmp_path))
    request_message = request(request_id="a", sampling=sampled(TOKENS, 3), captures=[spec(SPILL)])
    async with aclosing(
        run(await admit(request_message, running.manager.admission), running.manager)
    ) as responses:
        await anext(responses)
        await until(lambda: bool(list(tmp_path.glob("*.spool"))))
    await settled(running)
    await until(lambda: not list(tmp_path.glob("*.spool")))


async def test_captures_of_one_request_keep_their_own_policies(starter, tmp_path) -> None:
    running = await starter(request_buffer_bytes=8 * ROW, spool=str(tmp_path))
    events = await stalled(running, [spec(NEWEST), spec(SPILL), spec(OLDEST)])
    assert kept(events, 1) == list(range(POSITIONS))
    for number in (0, 2):
        assert sorted(kept(events, number) + lost(events, number)) == list(range(POSITIONS))
        assert lost(events, number)
    found = [
        [(one.row_count, one.dropped_row_count) for one in c.sites]
        for c in events[-1].receipt.captures
    ]
    assert found[1] == [(POSITIONS, 0)] * 2
    assert {sum(one) for sites in found for one in sites} == {POSITIONS}


async def test_rows_that_the_ring_lost_fail_a_request_that_may_not_lose_any(
    starter, tmp_path
) -> None:
    running = await starter(ScriptedBackend(lost_positions=frozenset({1, 5})), spool=str(tmp_path))
    for policy in (FAIL, SPILL):
        with pytest.raises(RowsLost, match="4 captured rows"):
            await stalled(running, [spec(policy)])
        await settled(running)
    events = await stalled(running, [spec(NEWEST)])
    assert (lost(events), kinds(events)[-1]) == ([1, 5], "receipt")


async def test_a_full_spool_fails_the_request(starter, tmp_path) -> None:
    running = await starter(request_buffer_bytes=8 * ROW, spool=str(tmp_path), spool_bytes=900)
    with pytest.raises(RheostatError, match="--spool-mib") as caught:
        await stalled(running, [spec(SPILL)], n=3)
    assert isinstance(caught.value, CaptureOverflow)
    await settled(running)
    await until(lambda: not list(tmp_path.glob("*.spool")))


async def test_an_observer_s_losses_are_not_the_response_s(starter) -> None:
    running = await starter(request_buffer_bytes=1 << 20)
    request_message = opening(specs=[wanted(0, 1)], credit=0, buffer_bytes=2 * ROW, overload=NEWEST)
    one = await Subscriber.open(running, request_message)
    events = await stalled(running, [spec(FAIL)])
    assert (kept(events), lost(events)) == (list(range(POSITIONS)), [])
    await one.credit(1 << 20)
    await one.until("end_of_request")
    assert one.events[-1].end_of_request.dropped_row_count > 0


async def test_a_stalled_client_holds_no_rows_after_it_has_gone(starter) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event(), hold_from=9))
    request_message = request(request_id="a", sampling=sampled(TOKENS), captures=[spec(NEWEST)])
    async with aclosing(
        run(await admit(request_message, running.manager.admission), running.manager)
    ) as responses:
        await anext(responses)
        active = running.manager._active_requests["a"]
        ((_, buffer),) = active.response_rows._open
        await until(lambda: buffer.byte_counter.rows > 0)
    assert (buffer.byte_counter.rows, buffer.used) == (0, 0)
    running.backend.hold.set()
    await settled(running)
