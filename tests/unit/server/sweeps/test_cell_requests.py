"""Cells of neighbouring columns share the tables of a plan, and each does what it alone should."""

from collections import Counter

import numpy as np
import pytest

from rheostat_engine import ModelSites
from rheostat_server.engine.backend import Job
from rheostat_server.requests.manager import RequestManager
from rheostat_server.sweeps import cell_requests
from rheostat_wire.v1 import (
    replace_pb2,
    steering_pb2,
    steering_service_pb2,
    sweep_pb2,
    sweep_service_pb2,
)

from ..fakes import LAYERS, sites_with
from ..messages import above, add, at_post1, probe, selector, site_set, token_range, window
from ..streams import settled
from ..tracing_calls import JitteryBackend
from .patched import CLEAN, CORRUPT, POST, PatchedBackend, grid, order, pair, prompt, swept

ROOM = sites_with(bank_rows=512, slots=512, steps=512)


def tables(jobs: list[Job]) -> int:
    """The number of different tables of acts."""
    return len({id(job.plan.packed_acts) for job in jobs})


async def run(
    starter, request: sweep_service_pb2.SweepRequest, sites: ModelSites = ROOM
) -> tuple[np.ndarray, list[Job]]:
    """The values of a sweep, and the jobs of its cells."""
    backend = PatchedBackend()
    backend.sites = sites
    running = await starter(backend)
    _, summary = await swept(running, request)
    await settled(running)
    first = len(request.steering.interventions)
    return grid(summary), [job for job in backend.asked if len(job.plan.acts) > first]


def replaced(where, layer: int = 1) -> steering_pb2.Intervention:
    """Rows that become zeros."""
    return steering_pb2.Intervention(
        sites=site_set(POST, layers=[layer]),
        where=where,
        replace=replace_pb2.Replace(zeros=replace_pb2.ZeroSource()),
    )


async def test_the_cells_of_a_row_share_a_table_and_each_has_its_window(starter) -> None:
    values, jobs = await run(starter, order())
    assert len(jobs) == LAYERS * len(CLEAN)
    assert tables(jobs) == LAYERS
    windows = sorted(job.plan.window for job in jobs)
    assert windows == [(p, p + 1, 0) for p in range(len(CLEAN)) for _ in range(LAYERS)]
    alone, jobs = await run(starter, order(), sites_with())
    assert tables(jobs) == 2 * LAYERS  # less room: two columns share one
    assert values.tolist() == alone.tolist()


REQUESTS = {
    "steering": lambda: order(
        steering=steering_pb2.Steering(interventions=[replaced(selector(window(2, 3)), 0)])
    ),
    "steering at the same row": lambda: order(
        steering=steering_pb2.Steering(interventions=[replaced(selector(window(1, 3)))])
    ),
    "windows of layers": lambda: order(layer_window=3),
    "groups": lambda: order(
        pair(groups=[selector(window(1, 3)), selector(window(3, 4)), selector(window(0, 2))]),
        group_labels=["middle", "end", "begin"],
    ),
    "two pairs": lambda: order(pair(), pair(corrupt=pair().corrupt)),
    "alpha": lambda: order(alpha=0.25),
    "noise direction": lambda: order(direction=sweep_pb2.SWEEP_DIRECTION_NOISE),
    "some cells": lambda: order(done=[sweep_pb2.CellRun(start=1, count=6)]),
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_shared_plans_give_what_plans_of_their_own_give(
    starter, monkeypatch, name: str
) -> None:
    shared, jobs = await run(starter, REQUESTS[name]())
    assert tables(jobs) < len(jobs)
    monkeypatch.setattr(cell_requests, "_COLUMNS", 1)
    alone, jobs = await run(starter, REQUESTS[name]())
    assert tables(jobs) == len(jobs)
    np.testing.assert_array_equal(shared, alone)


async def test_cells_that_the_engine_can_only_hold_one_by_one_share_nothing(starter) -> None:
    long_pair = pair(
        prompt=prompt(*range(2, 14)),
        corrupt=prompt(*range(3, 15)),
        groups=[selector(window(0, 5)), selector(window(5, 10))],
    )
    request = order(long_pair, group_labels=["first", "second"])
    values, jobs = await run(starter, request, sites_with())
    assert tables(jobs) == len(jobs) == 2 * LAYERS
    assert np.isfinite(values).all()
    few = order(pair(groups=[selector(window(0, 1)), selector(window(1, 4))]))
    few.group_labels.extend(["one", "three"])
    ahead = steering_pb2.Steering(
        interventions=[replaced(selector(window(position, position + 1)), 0) for position in (0, 1)]
    )
    few.steering.CopyFrom(ahead)
    values, jobs = await run(starter, few, sites_with(slots=4))
    assert len(jobs) == 2 * LAYERS
    assert np.isfinite(values).all()


async def test_columns_with_gaps_or_common_positions_have_plans_of_their_own(starter) -> None:
    groups = [
        selector(window(0, 1)),
        selector(window(1, 2), window(3, 4)),  # a gap
        selector(window(0, 2)),  # overlaps the first
        selector(window(2, 3)),
    ]
    one = pair(groups=groups)
    request = order(one, group_labels=["a", "b", "c", "d"], sites=site_set(POST, layers=[1]))
    request.max_concurrent_cells = 1
    _, jobs = await run(starter, request)
    first, gap, overlapping, last = (job.plan for job in jobs)
    assert first.packed_acts is last.packed_acts
    assert tables(jobs) == 3
    # With a window, these cells too reuse blocks that were computed before their first row.
    assert [plan.window for plan in (gap, overlapping)] == [(1, 4, 0), (0, 2, 0)]


async def test_a_cell_that_only_fits_without_a_window_has_none(starter) -> None:
    """With a window, steering at a replaced row needs one more slot: for rows outside of it."""
    steered = [replaced(selector(window(0, 1)), 0), replaced(selector(window(1, 2)))]
    one = pair(groups=[selector(window(1, 3)), selector(window(0, 1), window(3, 4))])
    request = order(one, group_labels=["a", "b"], sites=site_set(POST, layers=[1]))
    request.steering.interventions.extend(steered)
    values, jobs = await run(starter, request)
    assert sorted(job.plan.window for job in jobs) == [(0, 4, 2), (1, 3, 2)]
    tight, jobs = await run(starter, request, sites_with(slots=3))
    assert [job.plan.window for job in jobs] == [None, None]
    np.testing.assert_array_equal(tight, values)


async def test_a_column_without_a_partner_fails_alone(starter) -> None:
    backend = PatchedBackend()
    backend.sites = ROOM
    running = await starter(backend)
    longer = (*CORRUPT[:2], 11, *CORRUPT[2:])
    one = pair(corrupt=pair().corrupt)
    one.corrupt.token_ids.ids[:] = longer
    cells, _ = await swept(running, order(one))
    failed = {cell.column for cell in cells.values() if cell.HasField("error")}
    assert failed == {1}
    assert {job.plan.window[0] for job in backend.asked if job.plan.acts} == {0, 3, 4}
    await settled(running)


async def test_cells_under_rules_about_tokens_have_plans_of_their_own(starter) -> None:
    backend = JitteryBackend()
    backend.sites = ROOM
    running = await starter(backend)
    ruled = at_post1(add=add().add, where=selector(token_range(8)))
    steering = steering_pb2.Steering(interventions=[ruled])
    cells, _ = await swept(running, order(steering=steering))
    jobs = [job for job in backend.asked if len(job.plan.acts) > 1]
    assert len(jobs) == len(cells) == LAYERS * len(CLEAN)
    assert all(job.plan.window is None and job.plan.packed_acts.ruled for job in jobs)
    await settled(running)


async def test_cells_under_a_policy_with_gates_have_plans_of_their_own(starter) -> None:
    backend = JitteryBackend()
    backend.sites = ROOM
    running = await starter(backend)
    gated = add()
    gated.gate.conditions.append(above(0.5))
    policy = steering_service_pb2.Policy(
        steering=steering_pb2.Steering(interventions=[gated]), probes=[probe()]
    )
    await running.client.steering.SetGlobal(steering_service_pb2.SetGlobalRequest(policy=policy))
    cells, _ = await swept(running, order())
    assert not [cell.error.message for cell in cells.values() if cell.HasField("error")]
    jobs = [job for job in backend.asked if len(job.plan.acts) > 2]
    assert len(jobs) == len(cells) == LAYERS * len(CLEAN)
    assert all(job.plan.window is None and job.plan.packed_acts.gate_states for job in jobs)
    await settled(running)


@pytest.mark.parametrize(
    ("concurrency", "others", "samples"), [(4, 0, 1), (8, 0, 2), (16, 0, 4), (16, 1, 1)]
)
async def test_cells_that_share_a_plan_are_samples_of_one_request(
    starter, monkeypatch, concurrency: int, others: int, samples: int
) -> None:
    """Beside requests of others, each cell starts alone, so that their tokens wait less."""
    monkeypatch.setattr(RequestManager, "client_requests", property(lambda _: others))
    _, jobs = await run(starter, order(max_concurrent_cells=concurrency))
    assert len(jobs) == LAYERS * len(CLEAN)
    requests = Counter(job.plan.request_id.partition("#")[0] for job in jobs)
    assert set(requests.values()) == {samples}
