"""CaptureRun, GetRun and ReadRun, over a real channel."""

import asyncio

import grpc
import pytest

from rheostat_engine import Point, Site
from rheostat_server.api import runs
from rheostat_server.delivery import run_messages
from rheostat_server.limits import CHUNK_BYTES
from rheostat_wire.v1 import run_service_pb2 as pb
from rheostat_wire.v1 import (
    selector_pb2,
    steering_pb2,
    tensor_pb2,
    types_pb2,
)

from ..conftest import Refusal, rest
from ..fakes import WIDTH, ScriptedBackend, row
from ..messages import PROMPT, add, selector, site_set, window
from ..stored_runs import (
    ANSWERS,
    LZ4,
    NUMBERS,
    POST,
    PRE,
    RAW,
    by_site,
    header,
    nothing_left,
    put,
    read,
    rows,
    site,
    span,
)
from ..streams import settled
from ..uploads import refusal_of

Code = grpc.StatusCode


async def capture(running, **fields: object) -> pb.CaptureRunResponse:
    fields.setdefault("prompt", ANSWERS)
    fields.setdefault("sites", site_set(POST, layers=[0, 2]))
    return await running.client.runs.CaptureRun(pb.CaptureRunRequest(**fields), timeout=10)


async def test_a_prompt_is_captured_and_read(running) -> None:
    answer = await capture(running, run_id="a", labels={"set": "b"}, lease={"seconds": 60})
    run, receipt = answer.run, answer.receipt
    assert (run.run_id, dict(run.labels), list(run.positions)) == ("a", {"set": "b"}, [span(0, 3)])
    assert run.lease_expire_time.seconds - run.create_time.seconds in (59, 60, 61)
    assert receipt.captures[0].run_id == "a"
    found = by_site(await read(running, "a"))
    assert found == {
        (POST, layer, position): row(Site(Point.RESID_POST, layer).index, position).tolist()
        for layer in (0, 2)
        for position in range(3)
    }


async def test_some_positions_are_captured_under_steering(running) -> None:
    steering = steering_pb2.Steering(interventions=[add()])
    answer = await capture(running, steering=steering, where=selector(window(-1)))
    assert list(answer.run.positions) == [span(2)]
    assert len(answer.receipt.interventions) == 1
    assert running.backend.jobs[-1].plan.acts


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({"prompt": types_pb2.Prompt()}, "MISSING_FIELD", "prompt"),
        ({"prompt": {"token_ids": {}}}, "MISSING_FIELD", "prompt.token_ids.ids"),
        ({"prompt": {"token_ids": {"ids": [1] * 64}}}, "PROMPT_TOO_LONG", "prompt.token_ids"),
        ({"sites": None}, "MISSING_FIELD", "sites"),
        ({"sites": site_set(POST, layers=[99])}, "UNKNOWN_LAYER", "sites.list.layers[0]"),
        ({"run_id": "/"}, "INVALID_VALUE", "run_id"),
        ({"lease": {"seconds": 0}}, "INVALID_VALUE", "lease"),
        ({"labels": {"": "a"}}, "INVALID_VALUE", "labels"),
        ({"dtype": tensor_pb2.DTYPE_INT32}, "INVALID_VALUE", "dtype"),
        ({"where": selector_pb2.Selector()}, "EMPTY_SELECTOR", "where"),
        (
            {"where": selector(selector_pb2.Range(phase=types_pb2.PHASE_GENERATED))},
            "INVALID_POSITION",
            "where.include[0].phase",
        ),
        ({"where": selector(window(1, 4))}, "INVALID_POSITION", "where.include[0].positions.end"),
        (
            {"where": selector_pb2.Selector(include=[PROMPT], exclude=[PROMPT])},
            "INVALID_POSITION",
            "where",
        ),
        ({"sites": site_set(layers=[0])}, "MISSING_FIELD", "sites.points"),
    ],
)
async def test_what_cannot_be_captured_is_refused_by_field(running, fields, reason, field) -> None:
    refusal = await refusal_of(capture(running, **fields))
    assert refusal.brief == (Code.INVALID_ARGUMENT, f"REASON_{reason}", field)
    await nothing_left(running)


async def test_ids_adapters_and_memory_of_a_captured_run(starter) -> None:
    running = await starter(runs_bytes=4500)
    await capture(running, run_id="a", where=selector(window(0, 1)))
    for fields, brief in (
        ({"run_id": "a"}, (Code.ALREADY_EXISTS, "REASON_RUN_EXISTS", "run_id")),
        ({"lora_name": "no"}, (Code.NOT_FOUND, "REASON_LORA_NOT_FOUND", "lora_name")),
    ):
        assert (await refusal_of(capture(running, **fields))).brief == brief
    refusal = await refusal_of(capture(running, run_id="b"))
    assert refusal.brief[:2] == (Code.RESOURCE_EXHAUSTED, "REASON_STORE_FULL")
    assert (await settled(running)).run_count == 1


async def test_a_cancelled_capture_leaves_nothing(starter) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event()))
    message = pb.CaptureRunRequest(prompt=ANSWERS, sites=site_set(POST, layers=[0]))
    call = running.client.runs.CaptureRun(message)
    while not running.backend.jobs:
        await asyncio.sleep(0.01)
    call.cancel()
    await nothing_left(running)


@pytest.mark.parametrize("encoding", [None, RAW, LZ4])
async def test_sites_and_positions_are_chosen(running, encoding) -> None:
    await capture(running, run_id="a", sites=site_set(POST, layers=[0, 1, 2]))
    chosen = {} if encoding is None else {"encoding": encoding}
    sites = site_set(POST, PRE, layers=[1, 2])
    answers = await read(running, "a", sites=sites, positions={"positions": [-1, 0]}, **chosen)
    (one,) = [answer.captured for answer in answers]
    assert list(one.sites) == [site(1, PRE), site(1), site(2, PRE), site(2)]
    assert (list(one.positions), list(one.token_ids)) == ([span(0), span(2)], [10, 12])
    assert one.tensor.HasField("crc32c")
    assert by_site(answers) == {
        (point, layer, position): row(
            Site(Point.RESID_POST, layer - (point == PRE)).index, position
        ).tolist()
        for point in (POST, PRE)
        for layer in (1, 2)
        for position in (0, 2)
    }


async def test_rows_come_in_pieces_by_site_then_position(running, monkeypatch) -> None:
    await capture(running, run_id="a", sites=site_set(POST, layers=[0, 1, 2]))
    whole = by_site(await read(running, "a"))
    for size in (1, WIDTH * 8, WIDTH * 12, WIDTH * 24, CHUNK_BYTES):
        monkeypatch.setattr(run_messages, "CHUNK_BYTES", size)
        answers = await read(running, "a")
        order = [
            (place.layer, run.start)
            for answer in answers
            for place in answer.captured.sites
            for run in answer.captured.positions
        ]
        assert order == sorted(order)
        assert by_site(answers) == whole
        assert max(len(answer.captured.tensor.inline) for answer in answers) <= max(size, WIDTH * 4)


@pytest.mark.parametrize(
    ("fields", "code", "reason", "field"),
    [
        ({"run_id": "b"}, "NOT_FOUND", "RUN_NOT_FOUND", "run_id"),
        ({"run_id": ""}, "INVALID_ARGUMENT", "INVALID_VALUE", "run_id"),
        ({"sites": site_set(POST, layers=[1])}, "FAILED_PRECONDITION", "RUN_INCOMPLETE", "sites"),
        ({"sites": {}}, "INVALID_ARGUMENT", "MISSING_FIELD", "sites.points"),
        (
            {"positions": {"positions": [3]}},
            "FAILED_PRECONDITION",
            "RUN_INCOMPLETE",
            "positions.positions",
        ),
        ({"positions": {}}, "INVALID_ARGUMENT", "INVALID_VALUE", "positions.positions"),
        (
            {"positions": {"positions": [2, -1]}},
            "INVALID_ARGUMENT",
            "INVALID_VALUE",
            "positions.positions",
        ),
        (
            {"positions": {"positions": [-4]}},
            "INVALID_ARGUMENT",
            "INVALID_VALUE",
            "positions.positions",
        ),
        ({"encoding": 0}, "INVALID_ARGUMENT", "UNKNOWN_ENUM", "encoding"),
        (
            {"encoding": tensor_pb2.ENCODING_FULL8},
            "FAILED_PRECONDITION",
            "NOT_SUPPORTED",
            "encoding",
        ),
    ],
)
async def test_what_cannot_be_read_is_refused(running, fields, code, reason, field) -> None:
    await capture(running, run_id="a")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(running, **{"run_id": "a", **fields})
    refusal = Refusal.of(caught.value)
    assert refusal.brief == (Code[code], f"REASON_{reason}", field)
    await running.client.runs.DeleteRun(pb.DeleteRunRequest(run_id="a"))


async def test_a_run_that_is_read_is_neither_deleted_nor_evicted(starter, monkeypatch) -> None:
    running = await starter(runs_bytes=4096 + 1000)
    await put(running, header(), rows(NUMBERS))
    run = running.manager.runs.hold("up", "")
    running.manager.runs.release(run)
    run.lease_expire_time = 0.0
    gate, reads = asyncio.Event(), asyncio.Event()

    async def wait(size, work, *arguments):
        reads.set()
        await gate.wait()
        return work(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(runs, "offload", wait)
        call = running.client.runs.ReadRun(pb.ReadRunRequest(run_id="up"))
        await reads.wait()
    refusal = await refusal_of(running.client.runs.DeleteRun(pb.DeleteRunRequest(run_id="up")))
    assert refusal.brief == (Code.FAILED_PRECONDITION, "REASON_RUN_IN_USE", "run_id")
    refusal = await refusal_of(put(running, header(run_id="b"), rows(NUMBERS)))
    assert refusal.reason == "REASON_STORE_FULL"
    gate.set()
    assert len(await rest(call)) == 1
    await put(running, header(run_id="b"), rows(NUMBERS))
    assert (await settled(running)).run_count == 1


async def test_a_reader_that_leaves_releases_its_run(running, monkeypatch) -> None:
    await put(running, header(), rows(NUMBERS))
    reads = asyncio.Event()

    async def never(size, work, *arguments):
        reads.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(runs, "offload", never)
        call = running.client.runs.ReadRun(pb.ReadRunRequest(run_id="up"))
        await reads.wait()
        call.cancel()
        run = running.manager.runs.hold("up", "")
        while run.users > 1:
            await asyncio.sleep(0.01)
        running.manager.runs.release(run)
    await running.client.runs.DeleteRun(pb.DeleteRunRequest(run_id="up"))


async def test_a_run_that_is_not_there_cannot_be_got(running) -> None:
    refusal = await refusal_of(running.client.runs.GetRun(pb.GetRunRequest(run_id="a")))
    assert refusal.brief == (Code.NOT_FOUND, "REASON_RUN_NOT_FOUND", "run_id")
