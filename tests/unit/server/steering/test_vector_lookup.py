"""Rows of a vector that is used by name belong to the layers that it was stored for."""

import grpc
import numpy as np
import pytest

from rheostat._capture.encodings import read_tensor
from rheostat_wire.v1 import (
    capture_service_pb2,
    steering_pb2,
    steering_service_pb2,
    types_pb2,
    vector_pb2,
)

from ..conftest import Refusal
from ..fakes import WIDTH, row
from ..messages import ablate, add, along, capture, norm_add, request, site_set
from ..subscribers import EVERY, Subscriber, opening, site
from ..uploads import chunk, header, put, refusal_of

Code = grpc.StatusCode
POST = types_pb2.POINT_RESID_POST
ROWS = np.stack([np.full(WIDTH, 1.0), np.full(WIDTH, 2.0)]).astype("<f4")
ELSEWHERE = '"joy" has rows for layers 0, 2, not for all of layers'


def at(*layers: int) -> types_pb2.SiteSet:
    return site_set(POST, layers=layers)


def joy(*row_layers: int) -> vector_pb2.VectorRef:
    ref = vector_pb2.VectorRef(name="joy")
    ref.row_layers.layers.extend(row_layers)
    if not row_layers:
        ref.ClearField("row_layers")
    return ref


async def stored(running, sites: types_pb2.SiteSet | None, rows: np.ndarray = ROWS) -> None:
    await put(running.client, header(len(rows), name="joy", sites=sites), chunk(rows.tobytes()))


async def doses(running, ref: vector_pb2.VectorRef, *layers: int) -> dict[int, float]:
    """The largest number that is added at each layer."""
    await running.client.generate(request(steer=[add(ref, sites=at(*layers))]))
    (act,) = running.backend.jobs[-1].plan.acts
    return {layer: float(ROWS[dict(act.rows)[site(layer)][0]].max()) for layer in layers}


async def refused(running, **fields: object) -> Refusal:
    return await running.client.refusal(request(**fields))


@pytest.mark.parametrize(
    "sites",
    [
        site_set(POST, layers=[0, 2]),
        site_set(POST, layers=[2, 0]),
        types_pb2.SiteSet(points=[POST], range=types_pb2.LayerRange(stop=3, step=2)),
    ],
)
async def test_a_name_is_steered_with_by_the_rows_of_its_layers(running, sites) -> None:
    await stored(running, sites)
    assert await doses(running, joy(), 0) == {0: 1}
    assert await doses(running, joy(), 2) == {2: 2}
    assert await doses(running, joy(), 0, 2) == {0: 1, 2: 2}


@pytest.mark.parametrize("layers", [(1, 2), (0, 1, 2), (1,)])
@pytest.mark.parametrize("op", [add, norm_add, ablate])
async def test_a_name_with_rows_for_other_layers_is_refused(running, op, layers) -> None:
    await stored(running, at(0, 2))
    refusal = await refused(running, steer=[op(joy(), sites=at(*layers))])
    assert (refusal.code, refusal.reason) == (Code.INVALID_ARGUMENT, "REASON_VECTOR_SHAPE")
    shown = {(1, 2): "1-2", (0, 1, 2): "0-2", (1,): "1"}[layers]
    assert f"{ELSEWHERE} {shown}" in refusal.message
    assert refusal.field.startswith("steering.interventions[0]")


async def test_a_projection_by_name_takes_the_rows_of_its_layers(running) -> None:
    await stored(running, at(0, 2))
    one = capture(at(2), projection=along(joy()))
    events = await running.client.generate(request(captures=[one]))
    (part, *_) = (e.captured for e in events if e.WhichOneof("event") == "captured")
    numbers = read_tensor(part.tensor).values[0, :, 0]
    assert numbers[0] == pytest.approx(float(ROWS[1] @ row(site(2), 0)))
    refusal = await refused(running, captures=[capture(at(1, 2), projection=along(joy()))])
    assert refusal.reason == "REASON_VECTOR_SHAPE"
    assert f"{ELSEWHERE} 1-2" in refusal.message
    assert refusal.field == "captures[0].projection.readouts.readouts[0].vector"


async def test_a_subscription_projects_by_name_on_the_rows_of_its_layers(running) -> None:
    await stored(running, at(0, 2))
    specs = [capture(at(1, 2), projection=along(joy()))]
    specs[0].ClearField("to")
    one = Subscriber(running)
    await one.call.write(capture_service_pb2.SubscribeRequest(open=opening(EVERY, specs)))
    refusal = await refusal_of(one.hear())
    assert refusal.reason == "REASON_VECTOR_SHAPE"
    assert f"{ELSEWHERE} 1-2" in refusal.message


async def test_what_a_request_says_of_the_rows_counts_more_than_the_name(running) -> None:
    await stored(running, at(0, 2))
    assert await doses(running, joy(1, 2), 1, 2) == {1: 1, 2: 2}


@pytest.mark.parametrize(
    "sites", [None, at(0), at(0, 0), types_pb2.SiteSet(points=[POST], all=types_pb2.AllLayers())]
)
async def test_a_name_that_does_not_say_its_layers_gives_a_row_to_each(running, sites) -> None:
    await stored(running, sites)
    assert await doses(running, joy(), 1, 2) == {1: 1, 2: 2}


async def test_one_row_is_for_all_layers_whatever_its_name_says(running) -> None:
    await stored(running, at(1), ROWS[:1])
    assert await doses(running, joy(), 0, 2) == {0: 1, 2: 1}


async def test_server_wide_steering_by_name_keeps_the_layers_of_its_rows(running) -> None:
    await stored(running, at(0, 2))
    pb = steering_service_pb2

    async def set_global(steering: steering_pb2.Steering) -> None:
        await running.client.steering.SetGlobal(pb.SetGlobalRequest(policy={"steering": steering}))

    refusal = await refusal_of(
        set_global(steering_pb2.Steering(interventions=[add(joy(), sites=at(1, 2))]))
    )
    assert f"{ELSEWHERE} 1-2" in refusal.message
    await set_global(steering_pb2.Steering(interventions=[add(joy(), sites=at(2))]))
    for _ in range(2):  # the second time, as it was read
        held = await running.client.steering.GetGlobal(pb.GetGlobalRequest())
        await running.client.generate(request())
        (act,) = running.backend.jobs[-1].plan.acts
        assert act.rows == ((site(2), (1,)),)
        await set_global(held.policy.steering)
