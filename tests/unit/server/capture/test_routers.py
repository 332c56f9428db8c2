"""What a mixture's router says is captured like the stream, in rows of its own width."""

from dataclasses import replace

import grpc
import grpc.aio
import numpy as np
import pytest

from rheostat_engine import ROUTERS, Event, Rows
from rheostat_server.engine.row_widths import cutting_expert_rows
from rheostat_wire.v1 import (
    capture_pb2,
    engine_service_pb2,
    generation_service_pb2,
    steering_service_pb2,
    tensor_pb2,
    types_pb2,
    vector_pb2,
)

from ..conftest import Refusal
from ..fakes import LAYERS, SITES, WIDTH, ScriptedBackend, row
from ..messages import add, along, capture, request, site_set
from ..subscribers import EVERY, Subscriber, opening, rows_of

Code = grpc.StatusCode
ROUTER, POST = types_pb2.POINT_ROUTER_LOGITS, types_pb2.POINT_RESID_POST
EXPERTS = 3
MIXED = replace(SITES, experts={1: EXPERTS, 2: 2}, unrouted={0: "two mixtures"})


@pytest.fixture
async def mixture(starter):
    return await starter(ScriptedBackend(sites=MIXED))


def router(*layers: int, **fields: object) -> capture_pb2.CaptureSpec:
    return capture(site_set(ROUTER, layers=layers), **fields)


async def test_rows_have_a_value_for_each_expert(mixture) -> None:
    events = await mixture.client.generate(
        request(captures=[router(1), capture(site_set(POST, layers=[1])), router(2)])
    )
    parts = [event.captured for event in events if event.HasField("captured")]
    shapes = {(part.capture_index, tuple(part.tensor.shape)[2]) for part in parts}
    assert shapes == {(0, EXPERTS), (1, WIDTH), (2, 2)}
    (first, *_) = [part for part in parts if part.capture_index == 0]
    assert [(site.point, site.layer) for site in first.sites] == [(ROUTER, 1)]
    values = np.frombuffer(first.tensor.inline, "<f4").reshape(-1, EXPERTS)
    for position, value in enumerate(values):
        assert value.tolist() == row(ROUTERS + 1, position)[:EXPERTS].tolist()
    assert events[-1].receipt.captures[0].sites[0].row_count == 4


async def test_a_subscriber_gets_them_too(mixture) -> None:
    spec = capture_pb2.CaptureSpec(sites=site_set(ROUTER, layers=[1]))
    one = await Subscriber.open(mixture, opening(EVERY, [spec]))
    await mixture.client.generate(request(request_id="a"))
    await one.until("end_of_request")
    assert {len(values) for values in rows_of(one.events).values()} == {EXPERTS}


async def test_the_model_says_how_wide_each_layers_rows_are(mixture) -> None:
    model = await mixture.client.engine.GetModel(engine_service_pb2.GetModelRequest())
    routers = {
        layer: (group.width, group.capture.served)
        for group in model.sites
        for layer in group.layers
        if group.point == types_pb2.POINT_ROUTER_LOGITS
    }
    assert routers == {
        layer: (MIXED.experts.get(layer, 0), layer in MIXED.experts) for layer in range(LAYERS)
    }
    others = {group.width for group in model.sites if group.point != types_pb2.POINT_ROUTER_LOGITS}
    assert others == {WIDTH}


async def test_explain_counts_their_bytes(mixture) -> None:
    request_message = request(captures=[router(1), capture(site_set(POST, layers=[1]))])
    answer = await mixture.client.generation.Explain(
        generation_service_pb2.ExplainRequest(request=request_message)
    )
    sizes = [one.payload_bytes for one in answer.captures]
    assert sizes[0] * WIDTH == sizes[1] * EXPERTS > 0


async def refused(running, **fields: object) -> Refusal:
    return await running.client.refusal(request(**fields))


async def test_rows_of_two_widths_do_not_go_into_one_capture(mixture) -> None:
    both = capture(site_set(POST, ROUTER, layers=[1]))
    refusal = await refused(mixture, captures=[both])
    assert refusal.brief == (Code.INVALID_ARGUMENT, "REASON_INVALID_VALUE", "captures[0].sites")
    assert "capture router_logits separately" in refusal.message
    refusal = await refused(mixture, captures=[router(1, 2)])
    assert refusal.brief == (Code.INVALID_ARGUMENT, "REASON_INVALID_VALUE", "captures[0].sites")


async def test_no_more_numbers_are_kept_than_there_are_experts(mixture) -> None:
    fields = {"encoding": tensor_pb2.ENCODING_TOPK8, "kept": EXPERTS + 1}
    refusal = await refused(mixture, captures=[router(1, **fields)])
    assert refusal.brief == (Code.INVALID_ARGUMENT, "REASON_INVALID_VALUE", "captures[0].kept")
    events = await mixture.client.generate(
        request(captures=[router(1, encoding=tensor_pb2.ENCODING_TOPK8, kept=2)])
    )
    assert any(event.HasField("captured") for event in events)


async def test_a_router_is_not_projected(mixture) -> None:
    projection = along(vector_pb2.VectorRef(name="joy"))
    refusal = await refused(mixture, captures=[router(1, projection=projection)])
    assert refusal.brief == (
        Code.FAILED_PRECONDITION,
        "REASON_NOT_SUPPORTED",
        "captures[0].projection",
    )


async def test_rows_of_as_many_experts_as_the_stream_has_dimensions_come_whole(starter) -> None:
    running = await starter(ScriptedBackend(sites=replace(SITES, experts={1: WIDTH})))
    spec = router(1, encoding=tensor_pb2.ENCODING_FULL8)
    events = await running.client.generate(request(captures=[spec]))
    parts = [event.captured.tensor for event in events if event.HasField("captured")]
    assert {tuple(part.shape)[2] for part in parts} == {WIDTH}
    assert all(
        not one.encoding for capture in running.backend.jobs[0].plan.captures for one in [capture]
    )


async def test_a_layer_without_a_router_is_refused_with_the_reason(mixture, running) -> None:
    refusal = await refused(mixture, captures=[router(0)])
    assert refusal.brief[:2] == (Code.FAILED_PRECONDITION, "REASON_SITE_NOT_SERVED")
    assert "router_logits 0: two mixtures" in refusal.message
    refusal = await refused(running, captures=[router(0)])
    assert refusal.brief[:2] == (Code.FAILED_PRECONDITION, "REASON_SITE_NOT_SERVED")
    assert "the layer has no mixture of experts" in refusal.message
    assert not refusal.message.endswith("router_logits")


async def test_a_router_is_neither_steered_nor_averaged(mixture) -> None:
    refusal = await refused(mixture, steer=[add(sites=site_set(ROUTER, layers=[1]))])
    assert refusal.brief == (
        Code.FAILED_PRECONDITION,
        "REASON_NOT_SUPPORTED",
        "steering.interventions[0].sites",
    )
    prompt = types_pb2.Prompt(token_ids=types_pb2.TokenIds(ids=[1, 2]))
    request_message = steering_service_pb2.DeriveVectorsRequest(
        positive=[prompt],
        negative=[prompt],
        sites=site_set(ROUTER, layers=[1]),
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await mixture.client.steering.DeriveVectors(request_message).read()
    assert Refusal.of(caught.value).brief == (
        Code.FAILED_PRECONDITION,
        "REASON_NOT_SUPPORTED",
        "sites",
    )


async def test_the_model_names_routers_where_it_has_any(mixture, running) -> None:
    def groups(model) -> list[tuple[list[int], bool, str, bool]]:
        return [
            (
                list(group.layers),
                group.capture.served,
                group.capture.why_not,
                any(op.ability.served for op in group.ops),
            )
            for group in model.sites
            if group.point == ROUTER
        ]

    asked = engine_service_pb2.GetModelRequest()
    assert groups(await running.client.engine.GetModel(asked)) == []
    found = groups(await mixture.client.engine.GetModel(asked))
    assert sorted(found) == [
        ([0], False, "two mixtures", False),
        ([1], True, "", False),
        ([2], True, "", False),
    ]
    assert LAYERS == 3


def test_the_engines_rows_are_cut_to_their_width() -> None:
    told: list[Event] = []
    deliver = cutting_expert_rows(told.append, MIXED)
    data = np.arange(24, dtype=np.float32).reshape(3, 2, WIDTH)
    positions = np.array([3, 4], np.int32)
    deliver(Rows("r", (4, ROUTERS + 2, 8), positions, data))
    deliver(Rows("r", (ROUTERS + 2,), positions, data[:1]))
    deliver(whole := Rows("r", (4, 8), positions, data[:2]))
    found = [(one.sites, one.data.tolist()) for one in told if isinstance(one, Rows)]
    assert found == [
        ((4, 8), data[[0, 2]].tolist()),
        ((ROUTERS + 2,), [[[8.0, 9.0], [12.0, 13.0]]]),
        ((ROUTERS + 2,), [[[0.0, 1.0], [4.0, 5.0]]]),
        ((4, 8), data[:2].tolist()),
    ]
    assert [one.data.base for one in told[:3] if isinstance(one, Rows)] == [None] * 3
    assert told[3] is whole
