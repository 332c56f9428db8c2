"""Captures into sinks, from the request to the reader."""

import asyncio

import grpc
import numpy as np
import pytest

from rheostat import captures
from rheostat_engine import Point, Site
from rheostat_server.errors import SinksFailed
from rheostat_wire.v1 import (
    capture_pb2,
    capture_service_pb2,
    generation_pb2,
    generation_service_pb2,
    types_pb2,
)

from ..conftest import Refusal, rest
from ..fakes import ScriptedBackend, row
from ..messages import capture, request, selector, site_set, window
from ..streams import captured, settled

Code = grpc.StatusCode
POST = types_pb2.POINT_RESID_POST


def stored(*layers: int, **target: object) -> capture_pb2.CaptureSpec:
    """A capture of resid_post into the sink "disk"."""
    fields = {name: target.pop(name) for name in ("where", "overload") if name in target}
    sink = capture_pb2.SinkTarget(**{"sink_name": "disk", **target})
    return capture_pb2.CaptureSpec(sites=site_set(POST, layers=layers or (1,)), sink=sink, **fields)


@pytest.fixture
async def disk(starter, tmp_path):
    """A server with a sink, and the folder of the sink."""
    running = await starter(sinks=(f"disk=filesystem:root={tmp_path}", "mem=memory"))
    return running, tmp_path


def sampled(tokens: int = 3, n: int = 1) -> generation_pb2.Sampling:
    return generation_pb2.Sampling(max_tokens=tokens, n=n, temperature=1.0 if n > 1 else 0.0)


async def generate(running, request_id: str, *specs, **fields):
    fields.setdefault("sampling", sampled())
    return await running.client.generate(
        request(request_id=request_id, captures=list(specs), **fields)
    )


async def artifacts(running, request_id: str, sink: str = ""):
    request_message = capture_service_pb2.GetArtifactsRequest(request_id=request_id, sink_name=sink)
    return (await running.client.capture.GetArtifacts(request_message)).artifacts


def expected(layer: int, positions) -> np.ndarray:
    index = Site(Point.RESID_POST, layer).index
    return np.stack([row(index, position) for position in positions])


@pytest.mark.parametrize("layout", ["PER_FILE", "PACKED", "SHARDED"])
async def test_stored_rows_are_read_back_as_the_engine_made_them(disk, layout) -> None:
    running, root = disk
    kind = capture_pb2.Layout.Value(f"LAYOUT_{layout}")
    events = await generate(running, "a", stored(0, 2, layout=kind, tag="probe"), capture())
    assert len(captured(events)) == 5
    (kept, inline) = events[-1].receipt.captures
    assert [(site.row_count, site.dropped_row_count) for site in kept.sites] == [(5, 0)] * 2
    assert [site.row_count for site in inline.sites] == [5]
    store = captures.open_captures(root, tag="probe")
    for layer in (0, 2):
        found = store.rows_of("a", "resid_post", layer)
        assert found.positions.tolist() == [0, 1, 2, 3, 4]
        assert found.token_ids.tolist() == [10, 11, 12, 13, 14]
        assert np.array_equal(found.values, expected(layer, range(5)))
    written = await artifacts(running, "a")
    assert {one.state for one in written} == {capture_service_pb2.ARTIFACT_STATE_COMPLETE}
    assert sum(one.row_count for one in written) == 10


async def test_samples_and_what_was_selected_are_kept_apart(disk) -> None:
    running, root = disk
    spec = stored(1, where=selector(window(-1)))
    await generate(running, "a", spec, sampling=sampled(n=2))
    found = captures.open_captures(root).rows_of("a", "resid_post", 1)
    assert (found.positions.tolist(), found.samples.tolist()) == ([2, 2], [0, 1])


async def test_an_aborted_request_leaves_the_rows_that_it_had(starter, tmp_path) -> None:
    running = await starter(
        ScriptedBackend(hold=asyncio.Event(), hold_from=3),
        sinks=(f"disk=filesystem:root={tmp_path}",),
    )
    call = running.client.generation.Generate(
        request(request_id="a", sampling=sampled(9), captures=[stored(1)])
    )
    heard = 0
    while heard < 3:
        heard += len((await call.read()).tokens.token_ids)
    call.cancel()
    await settled(running)
    (request_,) = captures.open_captures(tmp_path)
    assert request_.state == "aborted"
    assert len(captures.open_captures(tmp_path).rows_of("a", "resid_post", 1).positions) >= 3
    assert {one.state for one in await artifacts(running, "a")} == {
        capture_service_pb2.ARTIFACT_STATE_PARTIAL
    }


@pytest.mark.parametrize("sink", ["disk", "mem"])
@pytest.mark.parametrize("rpc", ["Generate", "Session"])
async def test_rows_that_are_kept_already_refuse_a_request_before_it_runs(disk, sink, rpc) -> None:
    running, root = disk
    kept = stored(1, sink_name=sink, tag="t")
    await generate(running, "a", kept)
    again = request(request_id="a", captures=[stored(0, tag="free"), kept])
    if rpc == "Generate":
        refusal = await running.client.refusal(again)
    else:
        opening = generation_service_pb2.SessionRequest(start=again)
        call = running.client.generation.Session(iter([opening]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest(call)
        refusal = Refusal.of(caught.value)
    field = "captures[1].sink" if rpc == "Generate" else "start.captures[1].sink"
    assert refusal.brief == (Code.ALREADY_EXISTS, "REASON_ARTIFACT_EXISTS", field)
    assert dict(refusal.metadata) == {"sink": sink, "tag": "t"}
    assert refusal.message.startswith("a ")
    assert len(running.backend.jobs) == 1
    if sink == "disk":
        found = captures.open_captures(root).rows_of("a", "resid_post", 1)
        assert len(found.positions) == 5
    await generate(running, "b", stored(1))
    stats = await settled(running)
    assert stats.leaked_count == 0


async def test_rows_that_wait_for_a_slow_sink_are_lost_under_a_policy_that_says_so(
    starter, tmp_path
) -> None:
    running = await starter(
        sinks=(f"disk=filesystem:root={tmp_path}",), request_buffer_bytes=16 * 2
    )
    spec = stored(1, overload=capture_pb2.OVERLOAD_DROP_NEWEST)
    events = await generate(running, "a", spec, sampling=sampled(8))
    (kept,) = events[-1].receipt.captures
    rows, lost = kept.sites[0].row_count, kept.sites[0].dropped_row_count
    assert rows + lost == 10
    assert lost > 0
    (request_,) = captures.open_captures(tmp_path)
    assert (request_.state, request_.dropped_rows) == ("partial", lost)
    refusal = await running.client.refusal(
        request(request_id="b", sampling=sampled(8), captures=[stored(1)])
    )
    assert refusal.reason == "REASON_CAPTURE_OVERFLOW"
    assert "b" not in captures.open_captures(tmp_path)


async def test_sinks_are_listed(disk) -> None:
    running, _ = disk
    answer = await running.client.capture.ListSinks(capture_service_pb2.ListSinksRequest())
    assert [(one.name, one.plugin_name, len(one.layouts)) for one in answer.sinks] == [
        ("disk", "filesystem", 3),
        ("mem", "memory", 0),
    ]


@pytest.mark.parametrize(
    ("spec", "reason", "field"),
    [
        (stored(sink_name="tape"), "REASON_SINK_NOT_FOUND", "captures[0].sink.sink_name"),
        (stored(tag="../up"), "REASON_INVALID_VALUE", "captures[0].sink.tag"),
        (stored(layout=77), "REASON_UNKNOWN_ENUM", "captures[0].sink.layout"),
        (stored(options={"speed": "9"}), "REASON_INVALID_VALUE", "captures[0].sink.options.speed"),
    ],
)
async def test_a_target_that_cannot_be_is_refused_by_field(disk, spec, reason, field) -> None:
    refusal = await disk[0].client.refusal(request(captures=[spec]))
    assert (refusal.reason, refusal.field) == (reason, field)


async def test_captures_that_one_file_cannot_hold_are_refused(disk) -> None:
    running, _ = disk
    refusal = await running.client.refusal(
        request(captures=[stored(0), stored(1, overload=capture_pb2.OVERLOAD_DROP_OLDEST)])
    )
    assert (refusal.reason, refusal.field) == ("REASON_INVALID_VALUE", "captures[1].overload")


async def test_artifacts_of_nobody_are_not_there(disk) -> None:
    running, _ = disk
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await artifacts(running, "nobody")
    assert Refusal.of(caught.value).reason == "REASON_ARTIFACT_NOT_FOUND"


async def test_a_server_whose_sink_cannot_be_made_does_not_start(starter) -> None:
    for text in ("disk=tape", "disk=filesystem:", "disk=filesystem:root=/proc/nothing"):
        with pytest.raises(SinksFailed):
            await starter(sinks=(text,))
