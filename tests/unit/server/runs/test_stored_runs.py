"""Captures into runs, from the request to the store and its rpcs."""

import asyncio
import threading

import grpc
import numpy as np
import pytest
from google.protobuf import duration_pb2

from rheostat_engine import Point, Site
from rheostat_server.runs.store import RunDraft
from rheostat_server.runs.targets import RunTarget
from rheostat_server.sinks import CaptureAbout, Outcome
from rheostat_server.sinks.memory import MemoryRecording
from rheostat_server.tensors import FloatType
from rheostat_wire.v1 import (
    capture_pb2,
    engine_service_pb2,
    generation_pb2,
    generation_service_pb2,
    run_pb2,
    run_service_pb2,
    tensor_pb2,
    types_pb2,
)

from ..fakes import WIDTH, ScriptedBackend, row
from ..messages import (
    FIRST,
    add,
    along,
    capture,
    request,
    selector,
    site_set,
    tensor,
    window,
)
from ..streams import captured, settled
from ..talks import SessionCall, start, stop
from ..uploads import refusal_of

Code = grpc.StatusCode
POST = types_pb2.POINT_RESID_POST
pb = run_service_pb2

ROW = WIDTH * 4
"""Bytes of a row."""


def into(run: str = "", *layers: int, lease: float | None = None, **fields: object):
    """A capture of resid_post into a run."""
    target = capture_pb2.RunTarget(run_id=run)
    if lease is not None:
        target.lease.FromNanoseconds(round(lease * 1e9))
    sites = site_set(POST, layers=layers or (1,))
    return capture_pb2.CaptureSpec(sites=sites, run=target, **fields)


def sampled(tokens: int = 3, n: int = 1) -> generation_pb2.Sampling:
    return generation_pb2.Sampling(max_tokens=tokens, n=n, temperature=1.0 if n > 1 else 0.0)


async def generate(running, *specs, **fields):
    fields.setdefault("sampling", sampled())
    return await running.client.generate(request(captures=list(specs), **fields))


async def listed(running, **fields: object) -> pb.ListRunsResponse:
    return await running.client.runs.ListRuns(pb.ListRunsRequest(**fields))


async def names(running) -> list[str]:
    return [run.run_id for run in (await listed(running)).runs]


def rows(running, run_id: str, layer: int) -> np.ndarray:
    run = running.manager.runs.hold(run_id, "")
    running.manager.runs.release(run)
    return run.rows(Site(Point.RESID_POST, layer))


async def test_a_run_holds_the_rows_that_an_inline_capture_gets(running) -> None:
    sites = site_set(POST, layers=(0, 2))
    chosen = selector(window(1, 3), window(4, 5))
    events = await generate(
        running,
        into("clean", 0, 2, lease=60, where=chosen),
        capture(sites, where=chosen),
        labels={"set": "a"},
    )
    kept, inline = events[-1].receipt.captures
    assert (kept.run_id, inline.run_id) == ("clean", "")
    assert [(site.row_count, site.dropped_row_count) for site in kept.sites] == [(3, 0), (3, 0)]
    answer = await listed(running)
    (run,) = answer.runs
    assert run.lease_expire_time.ToNanoseconds() - run.create_time.ToNanoseconds() == pytest.approx(
        60e9, abs=1e3
    )
    assert run.size_bytes == answer.used_bytes >= 6 * ROW
    assert answer.capacity_bytes == 1 << 30
    run.ClearField("size_bytes")
    run.ClearField("create_time")
    run.ClearField("lease_expire_time")
    assert run == run_pb2.Run(
        run_id="clean",
        sites=[types_pb2.Site(point=POST, layer=layer) for layer in (0, 2)],
        positions=[
            types_pb2.PositionRun(start=1, count=2),
            types_pb2.PositionRun(start=4, count=1),
        ],
        prompt_token_ids=types_pb2.TokenIds(ids=[10, 11, 12]),
        labels={"set": "a"},
        dtype=tensor_pb2.DTYPE_FLOAT32,
        width=WIDTH,
    )
    got = captured(events)
    for layer in (0, 2):
        wanted = [got[1, 0, POST, layer, position] for position in (1, 2, 4)]
        assert rows(running, "clean", layer).tolist() == wanted


async def test_a_run_without_an_id_is_given_one_and_a_lease_of_an_hour(running) -> None:
    events = await generate(running, into())
    (run,) = (await listed(running)).runs
    assert run.run_id == events[-1].receipt.captures[0].run_id != ""
    assert run.lease_expire_time.seconds - run.create_time.seconds in (3599, 3600, 3601)
    await generate(running, into())
    assert len(await names(running)) == 2


async def test_rows_of_the_baseline_are_none_of_the_run(running) -> None:
    await generate(running, into("a"), steer=[add()], with_baseline=True)
    (run,) = (await listed(running)).runs
    assert list(run.positions) == [types_pb2.PositionRun(start=0, count=5)]
    assert len(rows(running, "a", 1)) == 5


async def test_an_id_in_use_is_refused_by_generate_and_by_explain(running) -> None:
    await generate(running, into("a"))
    message = request(captures=[capture(), into("a")])
    refusal = await running.client.refusal(message)
    brief = (Code.ALREADY_EXISTS, "REASON_RUN_EXISTS", "captures[1].run.run_id")
    assert (refusal.brief, refusal.resource) == (brief, "a")
    explained = generation_service_pb2.ExplainRequest(request=message)
    refusal = await refusal_of(running.client.generation.Explain(explained))
    assert refusal.brief == (*brief[:2], f"request.{brief[2]}")
    assert await names(running) == ["a"]


async def test_explain_stores_nothing(running) -> None:
    explained = generation_service_pb2.ExplainRequest(request=request(captures=[into("a")]))
    answer = await running.client.generation.Explain(explained)
    assert answer.captures[0].payload_bytes == 4 * ROW
    assert await names(running) == []


async def test_an_aborted_request_leaves_no_run_and_frees_its_id(starter) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event(), hold_from=3))
    call = running.client.generation.Generate(request(sampling=sampled(9), captures=[into("a")]))
    heard = 0
    while heard < 3:
        heard += len((await call.read()).tokens.token_ids)
    refusal = await running.client.refusal(request(captures=[into("a")]))
    assert refusal.reason == "REASON_RUN_EXISTS"
    refusal = await refusal_of(running.client.runs.DeleteRun(pb.DeleteRunRequest(run_id="a")))
    assert refusal.brief[:2] == (Code.FAILED_PRECONDITION, "REASON_RUN_IN_USE")
    assert (await listed(running)).used_bytes > 0
    call.cancel()
    stats = await settled(running)
    assert (stats.run_count, stats.run_bytes, stats.leaked_count) == (0, 0, 0)
    running.backend.hold.set()
    await generate(running, into("a"))
    assert await names(running) == ["a"]


async def test_a_session_that_is_stopped_leaves_no_run_and_its_receipt_names_none(starter) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event(), hold_from=2))
    talk = SessionCall(running)
    await talk.say(start(sampling=sampled(9), captures=[into("a")]))
    await talk.hear("tokens")
    await talk.say(stop(1))
    events = await talk.end()
    assert events[-1].receipt.captures[0].run_id == ""
    assert (await settled(running)).run_count == 0


async def test_a_request_that_fails_once_its_run_is_complete_leaves_none(
    starter, monkeypatch
) -> None:
    running = await starter(sinks=("mem=memory",))
    complete = threading.Event()
    finish = RunDraft.finish

    def finish_run(draft: RunDraft, outcome: Outcome) -> None:
        finish(draft, outcome)
        assert draft.complete
        complete.set()

    def fail(recording: MemoryRecording, outcome: Outcome) -> None:
        assert complete.wait(10)
        raise OSError("no space left")

    monkeypatch.setattr(RunDraft, "finish", finish_run)
    monkeypatch.setattr(MemoryRecording, "finish", fail)
    mem = capture_pb2.CaptureSpec(
        sites=site_set(POST, layers=[1]), sink=capture_pb2.SinkTarget(sink_name="mem")
    )
    refusal = await running.client.refusal(request(captures=[into("r"), mem]))
    assert refusal.reason == "REASON_ROWS_LOST"
    stats = await settled(running)
    assert (stats.run_count, stats.run_bytes, stats.leaked_count) == (0, 0, 0)


async def test_a_run_that_lost_rows_under_a_policy_has_the_others(starter) -> None:
    running = await starter(request_buffer_bytes=2 * ROW)
    spec = into("a", overload=capture_pb2.OVERLOAD_DROP_NEWEST)
    events = await generate(running, spec, sampling=sampled(8))
    (kept,) = events[-1].receipt.captures
    assert kept.run_id == "a"
    assert kept.sites[0].dropped_row_count > 0
    (run,) = (await listed(running)).runs
    assert sum(one.count for one in run.positions) == kept.sites[0].row_count
    refusal = await running.client.refusal(request(sampling=sampled(8), captures=[into("b")]))
    assert refusal.reason == "REASON_CAPTURE_OVERFLOW"
    assert await names(running) == ["a"]


async def test_rows_of_a_run_may_wait_on_disk(starter, tmp_path) -> None:
    running = await starter(request_buffer_bytes=2 * ROW, spool=str(tmp_path))
    spec = into("a", overload=capture_pb2.OVERLOAD_SPILL)
    await generate(running, spec, sampling=sampled(8))
    wanted = [row(Site(Point.RESID_POST, 1).index, position) for position in range(10)]
    assert np.array_equal(rows(running, "a", 1), wanted)


async def test_a_run_that_is_made_for_no_request_is_a_leak(running) -> None:
    about = CaptureAbout(0, (Site(Point.RESID_POST, 1),), FloatType.FLOAT32, WIDTH)
    draft = running.manager.runs.begin(RunTarget("a", 1.0), about, (), {}, "", lossless=True)
    assert (await settled(running)).leaked_count == 1
    draft.drop()
    assert (await settled(running)).leaked_count == 0


async def test_a_run_whose_rows_the_engine_had_no_room_for_is_none(starter) -> None:
    running = await starter(ScriptedBackend(lost_positions=frozenset({1})))
    refusal = await running.client.refusal(request(captures=[into("a")]))
    assert (refusal.code, refusal.reason) == (Code.DATA_LOSS, "REASON_ROWS_LOST")
    assert refusal.metadata == (("rows", "1"),)
    assert (await settled(running)).run_bytes == 0
    lossy = into("a", overload=capture_pb2.OVERLOAD_DROP_OLDEST)
    events = await generate(running, lossy)
    (run,) = (await listed(running)).runs
    assert [(one.start, one.count) for one in run.positions] == [(0, 1), (2, 3)]
    assert events[-1].receipt.captures[0].sites[0].dropped_row_count == 1


async def test_a_run_that_finds_no_room_fails_its_request(starter) -> None:
    running = await starter(runs_bytes=4096 + 3 * 4 + 1 + 4 * (ROW + 8))
    await generate(running, into("a"), sampling=sampled(2))
    full = (Code.RESOURCE_EXHAUSTED, "REASON_STORE_FULL")
    refusal = await running.client.refusal(request(captures=[into("b")]))
    assert refusal.brief[:2] == full
    await running.client.runs.DeleteRun(pb.DeleteRunRequest(run_id="a"))
    refusal = await running.client.refusal(request(sampling=sampled(8), captures=[into("b")]))
    assert refusal.brief[:2] == full
    stats = await settled(running)
    assert (stats.run_count, stats.run_bytes, stats.leaked_count) == (0, 0, 0)
    await generate(running, into("b"), sampling=sampled(2))
    assert await names(running) == ["b"]


async def test_a_prompt_whose_rows_never_fit_is_refused_before_it_runs(starter) -> None:
    running = await starter(runs_bytes=3 * ROW - 1)
    refusal = await running.client.refusal(request(captures=[into("b")]))
    assert refusal.brief == (
        Code.RESOURCE_EXHAUSTED,
        "REASON_STORE_FULL",
        "captures[0].run.run_id",
    )
    assert running.backend.jobs == []


@pytest.mark.parametrize(
    ("specs", "fields", "field"),
    [
        ([into("../up")], {}, "captures[0].run.run_id"),
        ([into("x" * 129)], {}, "captures[0].run.run_id"),
        ([into(lease=0.5)], {}, "captures[0].run.lease"),
        ([into(lease=24 * 3600 + 1)], {}, "captures[0].run.lease"),
        ([into(lease=-5)], {}, "captures[0].run.lease"),
        ([into(encoding=tensor_pb2.ENCODING_FULL8)], {}, "captures[0].encoding"),
        ([into(encoding=tensor_pb2.ENCODING_LZ4_PLANES)], {}, "captures[0].encoding"),
        ([into(projection=along(tensor(FIRST)))], {}, "captures[0].projection"),
        ([into("a"), into("a", 2)], {}, "captures[1].run.run_id"),
        ([into("a")], {"sampling": sampled(n=2)}, "sampling.n"),
    ],
)
async def test_what_cannot_be_a_run_is_refused_by_field(running, specs, fields, field) -> None:
    refusal = await running.client.refusal(request(captures=specs, **fields))
    assert refusal.brief == (Code.INVALID_ARGUMENT, "REASON_INVALID_VALUE", field)


async def test_runs_are_listed_oldest_first_and_page_by_page(running) -> None:
    for run in "cab":
        await generate(running, into(run))
    first = await listed(running, page_size=2)
    assert [run.run_id for run in first.runs] == ["c", "a"]
    await running.client.runs.DeleteRun(pb.DeleteRunRequest(run_id="a"))
    rest = await listed(running, page_size=2, page_token=first.next_page_token)
    assert ([run.run_id for run in rest.runs], rest.next_page_token) == (["b"], "")


async def test_a_page_ends_early_rather_than_growing_huge(running, monkeypatch) -> None:
    monkeypatch.setattr("rheostat_server.api.paging.PAGE_BYTES", 1)
    for run in "ab":
        await generate(running, into(run))
    first = await listed(running)
    assert [run.run_id for run in first.runs] == ["a"]
    rest = await listed(running, page_token=first.next_page_token)
    assert ([run.run_id for run in rest.runs], rest.next_page_token) == (["b"], "")


async def test_a_deleted_run_frees_its_bytes_and_its_id(running) -> None:
    await generate(running, into("a"))
    before = (await listed(running)).used_bytes
    answer = await running.client.runs.DeleteRun(pb.DeleteRunRequest(run_id="a"))
    assert answer.freed_bytes == before > 0
    assert (await listed(running)).used_bytes == 0
    await generate(running, into("a"))
    assert await names(running) == ["a"]


async def test_a_lease_is_renewed_and_never_shortened(running) -> None:
    await generate(running, into("a", lease=60))

    async def renewed(seconds: int | None) -> int:
        message = pb.RenewLeaseRequest(run_id="a")
        if seconds is not None:
            message.lease.seconds = seconds
        run = (await running.client.runs.RenewLease(message)).run
        return round(
            (run.lease_expire_time.ToNanoseconds() - run.create_time.ToNanoseconds()) / 1e9
        )

    assert await renewed(1) == 60
    assert await renewed(None) >= 3600
    assert await renewed(7200) >= 7200


@pytest.mark.parametrize(
    ("rpc", "message", "brief"),
    [
        ("DeleteRun", pb.DeleteRunRequest(run_id="a"), (Code.NOT_FOUND, "RUN_NOT_FOUND", "run_id")),
        ("DeleteRun", pb.DeleteRunRequest(), (Code.INVALID_ARGUMENT, "INVALID_VALUE", "run_id")),
        (
            "RenewLease",
            pb.RenewLeaseRequest(run_id="a"),
            (Code.NOT_FOUND, "RUN_NOT_FOUND", "run_id"),
        ),
        (
            "RenewLease",
            pb.RenewLeaseRequest(run_id="a", lease=duration_pb2.Duration(nanos=5)),
            (Code.INVALID_ARGUMENT, "INVALID_VALUE", "lease"),
        ),
        (
            "ListRuns",
            pb.ListRunsRequest(page_token="x"),
            (Code.INVALID_ARGUMENT, "INVALID_VALUE", "page_token"),
        ),
    ],
)
async def test_what_an_rpc_cannot_do_it_says(running, rpc, message, brief) -> None:
    refusal = await refusal_of(getattr(running.client.runs, rpc)(message))
    assert (refusal.code, refusal.reason.removeprefix("REASON_"), refusal.field) == brief


async def test_the_server_says_how_many_runs_there_are_and_may_be(starter) -> None:
    running = await starter(runs_bytes=1 << 20)
    await generate(running, into("a"))
    stats = await running.client.engine.GetStats(engine_service_pb2.GetStatsRequest())
    assert (stats.run_count, stats.run_bytes) == (1, (await listed(running)).used_bytes)
    model = await running.client.engine.GetModel(engine_service_pb2.GetModelRequest())
    assert model.limits.run_bytes == 1 << 20
