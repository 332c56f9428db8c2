"""Zoomed sweeps, on an engine whose answers follow from the rows that are replaced."""

import math

import numpy as np
import pytest

from rheostat_wire.v1 import (
    replace_pb2,
    selector_pb2,
    steering_pb2,
    sweep_pb2,
    types_pb2,
)

from ..conftest import rest
from ..fakes import (
    LAYERS,
)
from ..messages import selector, site_set, window
from .patched import (
    POST,
    PatchedBackend,
    grid,
    order,
    pair,
    prompt,
    refused,
    swept,
)


async def test_zoom_announces_what_it_adds(starter) -> None:
    running = await starter(PatchedBackend())
    ids = [20 + i for i in range(9)]
    one = pair(prompt=prompt(*ids), corrupt=prompt(*ids[:5], 99, *ids[6:]))
    zoom = sweep_pb2.Zoom(layer_stride=2, column_stride=4, layer_radius=1, column_radius=1)
    whole, summary = await swept(running, order(one))
    started, *events, last = await rest(running.client.sweep.Sweep(order(one, zoom=zoom)))
    assert started.started.cell_count == 2 * 2  # columns 5 and 8
    kinds = [event.WhichOneof("event") for event in events]
    phase = events[kinds.index("phase")].phase
    assert kinds.index("phase") == 4
    assert len(kinds) == 5 + phase.added_cell_count
    assert len(phase.around) == 1
    for event in events:
        if event.HasField("cell"):
            assert event.cell.values == whole[event.cell.index].values
    assert np.isnan(grid(last.summary)).sum() == 27 - 4 - phase.added_cell_count
    assert summary.grades[0].peak == 5


def around(*positions: int) -> selector_pb2.Selector:
    return selector(*(window(position, position + 1 or None) for position in positions))


SAME = [20 + i for i in range(9)]
CHANGED = prompt(*SAME[:3], 99, 98, *SAME[5:])
"""Differs at positions 3 and 4."""
LONGER = prompt(*SAME[:3], 99, 98, 97, *SAME[4:])
NOISE = sweep_pb2.NoiseCorruption(
    noise=replace_pb2.NoiseSource(std=1.0),
    sites=site_set(types_pb2.POINT_RESID_PRE, layers=[0]),
    where=around(2, 3, 6),
)


def noise_at(position: int) -> steering_pb2.Intervention:
    noise = replace_pb2.Replace(noise=replace_pb2.NoiseSource(std=1.0))
    return steering_pb2.Intervention(
        sites=site_set(POST, layers=[0]), where=around(position), replace=noise
    )


@pytest.mark.parametrize(
    ("pairs", "fields", "columns"),
    [
        # From the last position at which the prompts begin to differ, in strides, to the last one.
        ([{"corrupt": CHANGED}], {}, [4, 7, 8]),
        ([{"corrupt": CHANGED}], {"column_stride": 1}, [3, 4, 5, 6, 7, 8]),
        ([{"corrupt": prompt(*(token + 9 for token in SAME))}], {}, [1, 4, 7, 8]),
        ([{"corrupt": LONGER}], {}, [4, 7, 8]),
        ([{"noise": NOISE}], {}, [3, 6, 8]),
        ([{"zeros": replace_pb2.ZeroSource()}], {}, [0, 3, 6, 8]),
        # Where any pair changes.
        ([{"corrupt": CHANGED}, {"corrupt": prompt(*SAME[:7], 99, SAME[8])}], {}, [4, 7, 8]),
        # Steering may differ with the length of the prompt.
        ([{"corrupt": CHANGED}], {"steering": [noise_at(0)]}, [4, 7, 8]),
        ([{"noise": NOISE}], {"steering": [noise_at(0)]}, [3, 6, 8]),
        ([{"corrupt": LONGER}], {"steering": [noise_at(-9)]}, [0, 3, 6, 8]),
        # Nothing changes, so nothing is left out.
        ([{"corrupt": CHANGED}], {"where": around(0, 1, 2)}, [1, 2]),
    ],
)
async def test_zoom_leaves_out_columns_in_which_nothing_can_change(
    starter, pairs, fields, columns
) -> None:
    running = await starter(PatchedBackend())
    stride = fields.pop("column_stride", 3)
    steer = steering_pb2.Steering(interventions=fields.pop("steering", []))
    zoom = sweep_pb2.Zoom(layer_stride=9, column_stride=stride, layer_radius=0, column_radius=0)
    request = order(
        *(pair(prompt=prompt(*SAME), **one) for one in pairs), zoom=zoom, steering=steer, **fields
    )
    cells, _ = await swept(running, request)
    assert sorted({cell.column for cell in cells.values()}) == columns


async def test_zoom_with_wide_radii_runs_all_columns_in_which_something_may_change(starter) -> None:
    running = await starter(PatchedBackend())
    most = 2**32 - 1
    zoom = sweep_pb2.Zoom(
        layer_stride=most, column_stride=most, layer_radius=most, column_radius=most, peak_count=16
    )
    one = pair(prompt=prompt(*SAME), corrupt=CHANGED)
    cells, _ = await swept(running, order(one, zoom=zoom))
    assert {(cell.row, cell.column) for cell in cells.values()} == {
        (row, column) for row in range(LAYERS) for column in range(3, 9)
    }


async def test_zoom_sends_no_cell_that_is_done(starter) -> None:
    running = await starter(PatchedBackend())
    ids = [20 + i for i in range(9)]
    one = pair(prompt=prompt(*ids), corrupt=prompt(*ids[:5], 99, *ids[6:]))
    zoom = sweep_pb2.Zoom(layer_stride=2, column_stride=4, layer_radius=1, column_radius=1)
    cells, _ = await swept(running, order(one, zoom=zoom))
    indices = sorted(cells)
    # Two coarse cells and a fine one.
    kept = [5, 8, next(index for index in indices if index not in (5, 8, 23, 26))]
    done = [sweep_pb2.CellRun(start=index, count=1) for index in kept]
    request = order(one, zoom=zoom, done=done)
    started, *events, _ = await rest(running.client.sweep.Sweep(request))
    sent = [event.cell.index for event in events if event.HasField("cell")]
    (phase,) = (event.phase for event in events if event.HasField("phase"))
    assert sorted([*sent, *kept]) == indices
    assert started.started.cell_count + phase.added_cell_count == len(sent)


async def test_zoom_runs_no_cell_whose_value_it_is_given(starter) -> None:
    backend = PatchedBackend()
    running = await starter(backend)
    ids = [20 + i for i in range(9)]
    one = pair(prompt=prompt(*ids), corrupt=prompt(*ids[:5], 99, *ids[6:]))
    zoom = sweep_pb2.Zoom(layer_stride=2, column_stride=4, layer_radius=1, column_radius=1)
    started, *events, _ = await rest(running.client.sweep.Sweep(order(one, zoom=zoom)))
    cells = [event.cell for event in events if event.HasField("cell")]
    coarse, fine = cells[: started.started.cell_count], cells[started.started.cell_count :]
    backend.asked.clear()
    kept = [*coarse[1:], fine[0]]  # in an order of its own
    request = order(
        one,
        zoom=zoom,
        done=[sweep_pb2.CellRun(start=cell.index, count=1) for cell in kept],
        done_values=[cell.values[0] for cell in kept],
    )
    _, *events, _ = await rest(running.client.sweep.Sweep(request))
    sent = [event.cell.index for event in events if event.HasField("cell")]
    assert sorted(sent) == sorted(cell.index for cell in (coarse[0], *fine[1:]))
    assert sum(bool(job.plan.acts) for job in backend.asked) == len(sent)


async def test_zoom_goes_by_the_values_that_it_is_given(starter) -> None:
    running = await starter(PatchedBackend())
    zoom = sweep_pb2.Zoom(layer_stride=1, column_stride=3, layer_radius=0, column_radius=1)
    done = [sweep_pb2.CellRun(start=8, count=1), sweep_pb2.CellRun(start=3, count=1)]
    request = order(zoom=zoom, done=done, done_values=[math.nan, 1000.0])
    _, *events, _ = await rest(running.client.sweep.Sweep(request))
    (phase,) = (event.phase for event in events if event.HasField("phase"))
    assert list(phase.around) == [3]


@pytest.mark.parametrize(
    ("done", "values", "reason"),
    [
        ([(0, 2)], [1.0], "REASON_INVALID_VALUE"),
        ([], [1.0], "REASON_INVALID_VALUE"),
        ([(0, 2), (1, 2)], [1.0] * 4, "REASON_INVALID_VALUE"),
        ([(0, 1)], [math.inf], "REASON_NON_FINITE"),
    ],
)
async def test_values_of_done_cells_are_one_each(starter, done, values, reason) -> None:
    running = await starter(PatchedBackend())
    runs = [sweep_pb2.CellRun(start=start, count=count) for start, count in done]
    refusal = await refused(running, order(done=runs, done_values=values))
    assert (refusal.reason, refusal.field) == (reason, "done_values")
