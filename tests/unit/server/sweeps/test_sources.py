"""Where a sweep's rows come from, and what a cell can be too much for."""

import asyncio
from collections.abc import AsyncGenerator

import numpy as np
import pytest

from rheostat_server.admission.admitted_request import AdmittedRequest
from rheostat_server.errors import QueueFull
from rheostat_server.limits import POINTS, RANGES, REQUEST_RANGES
from rheostat_server.requests import manager
from rheostat_server.sweeps import measurements, sources
from rheostat_wire.v1 import (
    replace_pb2,
    run_service_pb2,
    steering_pb2,
    sweep_pb2,
    types_pb2,
)

from ..conftest import rest
from ..fakes import LAYERS, WIDTH, sites_with
from ..messages import selector, site_set, token_range, window
from ..stored_runs import header, nothing_left, put, rows, span
from ..stored_runs import site as site_message
from ..streams import settled, until
from .patched import (
    CLEAN,
    CORRUPT,
    POST,
    Code,
    PatchedBackend,
    logprob,
    order,
    pair,
    prompt,
    refused,
    site,
    swept,
)


def zeros(count: int, layer: int) -> steering_pb2.Steering:
    """The last token's row of a layer becomes zeros, again and again."""
    one = steering_pb2.Intervention(
        sites=site_set(POST, layers=[layer]),
        where=selector(window(-1)),
        replace=replace_pb2.Replace(zeros=replace_pb2.ZeroSource()),
    )
    return steering_pb2.Steering(interventions=[one] * count)


async def put_run(running, values: np.ndarray, ids: tuple[int, ...]) -> None:
    """Stores rows of layer 1, [positions]: each element is the position's value."""
    at = [span(0, len(values))]
    tokens = types_pb2.TokenIds(ids=ids)
    given = np.repeat(values[None, :, None], WIDTH, axis=2)
    await put(
        running,
        header(sites=[site_message(1)], positions=at, prompt_token_ids=tokens),
        rows(given, [site_message(1)], at),
    )


async def test_a_cell_that_its_steering_leaves_no_room_for_fails_alone(starter) -> None:
    backend = PatchedBackend()
    backend.sites = sites_with(steps=500)
    running = await starter(backend)
    cells, summary = await swept(running, order(steering=zeros(64, 1)))
    failed = {index for index, cell in cells.items() if cell.HasField("error")}
    assert failed == {1 * 4 + 3}
    (error,) = (cells[index].error for index in failed)
    assert error.code == Code.INVALID_ARGUMENT.value[0]
    assert "65 steps meet at one site" in error.message
    assert len(cells) == LAYERS * 4
    assert [(one.start, one.count) for one in summary.missing] == [(7, 1)]
    await settled(running)


async def test_only_the_wanted_rows_of_a_run_are_taken(starter) -> None:
    backend = PatchedBackend()
    running = await starter(backend)
    await put_run(running, np.array([1.0, 20.0, 3.0, 1e30]), CORRUPT)
    request = order(
        pair(run_id="up"),
        direction=sweep_pb2.SWEEP_DIRECTION_NOISE,
        sites=site_set(POST, layers=[1]),
        where=selector(window(1, 2)),
    )
    cells, _ = await swept(running, request)
    change = (20 - CLEAN[1]) / (1 + site(1))
    assert cells[0].values == [pytest.approx(logprob(sum(CLEAN) + change))]
    assert {vector.rows for vector in backend.vectors.values()} == {1}
    request.where.CopyFrom(selector(window(2, 4)))
    cells, _ = await swept(running, request)
    assert "reaches 1e+30" in cells[1].error.message


async def test_positions_that_a_run_lacks_are_errors_of_their_cells(starter) -> None:
    running = await starter(PatchedBackend())
    await put_run(running, np.array([1.0, 20.0]), CORRUPT)
    one = pair(run_id="up")
    request = order(one, direction=sweep_pb2.SWEEP_DIRECTION_NOISE)
    cells, _ = await swept(running, request)
    for cell in cells.values():
        if (cell.row, cell.column) in ((1, 0), (1, 1)):
            assert cell.values
        else:
            assert "the run up has no row" in cell.error.message
    assert "position 3" in cells[7].error.message


async def test_a_run_that_was_replaced_meanwhile_is_refused(starter, monkeypatch) -> None:
    running = await starter(PatchedBackend())
    await put_run(running, np.array([1.0, 20.0, 3.0, 4.0]), CORRUPT)
    sources_of = measurements.sources_of

    async def later(*args: object) -> object:
        if not running.manager.runs.delete("up", ""):
            raise AssertionError
        await put_run(running, np.array([1.0, 20.0, 3.0]), CORRUPT[:3])
        return await sources_of(*args)

    monkeypatch.setattr(measurements, "sources_of", later)
    request = order(pair(run_id="up"), direction=sweep_pb2.SWEEP_DIRECTION_NOISE)
    refusal = await refused(running, request)
    assert (refusal.reason, refusal.field) == ("REASON_RUN_NOT_FOUND", "pairs[0].run_id")
    assert "another prompt" in refusal.message


async def test_scattered_positions_are_captured_together(starter, monkeypatch) -> None:
    assert sources._RANGES <= RANGES
    assert sources._RANGES * POINTS <= REQUEST_RANGES
    monkeypatch.setattr(sources, "_RANGES", 2)
    backend = PatchedBackend()
    running = await starter(backend)
    ids = [7, 8, 7, 8, 7, 8]
    one = pair(
        prompt=prompt(*ids),
        corrupt=prompt(*(token + 10 for token in ids)),
        groups=[selector(token_range(7))],
    )
    request = order(one, group_labels=["sevens"], sites=site_set(POST, layers=[1]))
    cells, _ = await swept(running, request)
    base = sum(ids) + 10 * len(ids)
    assert cells[0].values == [pytest.approx(logprob(base - 3 * 10 / (1 + site(1))))]
    (captured,) = (job for job in backend.jobs if job not in backend.asked)
    assert [capture.spans for capture in captured.plan.captures] == [((0, 5),)]


async def test_captures_wait_for_room_as_cells_do(starter, monkeypatch) -> None:
    running = await starter(PatchedBackend())
    refusals = 2
    check_queue = manager.check_queue

    def refuse(admitted: AdmittedRequest, *args: int, **counts: int) -> None:
        nonlocal refusals
        if admitted.captures and refusals:
            refusals -= 1
            raise QueueFull("full", retry_after=1.0)
        check_queue(admitted, *args, **counts)

    monkeypatch.setattr(manager, "check_queue", refuse)
    cells, _ = await swept(running, order())
    assert not refusals
    assert all(cell.values for cell in cells.values())
    await nothing_left(running)


async def test_captures_wait_while_requests_wait(starter, monkeypatch) -> None:
    backend = PatchedBackend(waiting=1)
    running = await starter(backend)
    monkeypatch.setattr(manager.RequestManager, "foreground_requests", property(lambda _: 1000))
    call = running.client.sweep.Sweep(order())
    await call.read()
    await asyncio.sleep(0.05)
    assert not backend.jobs
    backend.waiting = 0
    await rest(call)


async def test_tokens_of_captures_are_counted(starter) -> None:
    backend = PatchedBackend(cached=2)
    running = await starter(backend)
    _, summary = await swept(running, order())
    captured = [job for job in backend.jobs if job not in backend.asked]
    assert len(captured) == 1
    expected = sum(len(job.prompt) - 2 for job in backend.jobs)
    assert summary.computed_token_count == expected


async def test_a_run_that_does_not_fit_names_the_pair(starter) -> None:
    running = await starter(PatchedBackend())
    running.manager.runs.capacity = 8
    refusal = await refused(running, order(pair(), pair()))
    assert (refusal.reason, refusal.field) == ("REASON_STORE_FULL", "pairs[0]")
    await settled(running)


async def test_the_lease_of_kept_runs_begins_at_the_end(starter) -> None:
    backend = PatchedBackend(room=asyncio.Event())
    running = await starter(backend)
    request = order()
    request.keep_runs.FromMilliseconds(1500)
    call = running.client.sweep.Sweep(request)
    await until(lambda: backend.asked)
    await asyncio.sleep(0.3)
    backend.room.set()
    await rest(call)
    listed = await running.client.runs.ListRuns(run_service_pb2.ListRunsRequest())
    (run,) = listed.runs
    lease = run.lease_expire_time.ToNanoseconds() - run.create_time.ToNanoseconds()
    assert lease > 1.75e9


async def test_a_call_that_ends_while_its_run_is_stored_leaves_no_run(starter, monkeypatch) -> None:
    running = await starter(PatchedBackend())
    run, stored = sources.run, asyncio.Event()

    async def slow(*args: object) -> AsyncGenerator[object, None]:
        async for response in run(*args):
            if response.HasField("receipt"):
                stored.set()
                await asyncio.Event().wait()
            yield response

    monkeypatch.setattr(sources, "run", slow)
    call = running.client.sweep.Sweep(order())
    await call.read()
    await stored.wait()
    assert len(running.manager.runs) == 1
    call.cancel()
    await until(lambda: not len(running.manager.runs))
    await nothing_left(running)
