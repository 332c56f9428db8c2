"""Stored runs, over both clients and from the shell."""

import datetime

import grpc
import pytest
from google.protobuf import text_format

import rheostat
from rheostat import Point, Site
from rheostat._cli import main
from rheostat_wire.v1 import capture_pb2, run_pb2
from rheostat_wire.v1 import run_service_pb2 as pb

EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)

STORED = text_format.Parse(
    """run_id: "clean" size_bytes: 512
       sites { point: POINT_RESID_PRE layer: 0 } sites { point: POINT_RESID_POST layer: 3 }
       sites { point: 99 layer: 3 }
       positions { start: 0 count: 2 } positions { start: 4 count: 1 }
       prompt_token_ids { ids: [5, 6, 7] }
       create_time { seconds: 60 nanos: 500000000 } lease_expire_time { seconds: 360 }
       labels { key: "set" value: "a" }""",
    run_pb2.Run(),
)

INFO = rheostat.RunInfo(
    id="clean",
    sites=(Site(Point.RESID_PRE, 0), Site(Point.RESID_POST, 3)),
    positions=(range(2), range(4, 5)),
    prompt_token_ids=(5, 6, 7),
    size_bytes=512,
    create_time=EPOCH + datetime.timedelta(seconds=60.5),
    lease_expire_time=EPOCH + datetime.timedelta(seconds=360),
    labels={"set": "a"},
)


@pytest.mark.parametrize(
    ("run", "target"),
    [
        (rheostat.Run(), ""),
        (rheostat.Run("clean"), 'run_id: "clean"'),
        (rheostat.Run("a", lease=1.5), 'run_id: "a" lease { seconds: 1 nanos: 500000000 }'),
        (rheostat.Run(lease=86400), "lease { seconds: 86400 }"),
    ],
)
def test_a_capture_goes_into_a_run(run, target):
    capture = rheostat.Capture("resid_post", 3, to=run)
    assert capture.to == run
    spec = capture.to_wire()
    assert spec.WhichOneof("to") == "run"
    assert spec.run == text_format.Parse(target, capture_pb2.RunTarget())


@pytest.mark.parametrize(
    ("run", "path"),
    [
        (rheostat.Run(""), "captures.run"),
        (rheostat.Run("a b"), "captures.run"),
        (rheostat.Run("x" * 129), "captures.run"),
        (rheostat.Run("a", lease=0.9), "captures.run.lease"),
        (rheostat.Run("a", lease=86401), "captures.run.lease"),
        (rheostat.Run("a", lease=float("nan")), "captures.run.lease"),
        (rheostat.Run("a", lease="long"), "captures.run.lease"),
    ],
)
def test_a_run_that_cannot_be_is_refused_before_it_is_sent(client, server, run, path):
    with pytest.raises(rheostat.InvalidRequest) as raised:
        client.run(lambda e: e.generate("a", capture=rheostat.Capture("resid_post", to=run)))
    assert (raised.value.path, server.asked) == (path, [])


def test_runs_are_read_page_by_page(client, server):
    other = run_pb2.Run(run_id="other")
    server.on(
        "ListRuns",
        pb.ListRunsResponse(runs=[STORED], next_page_token="7"),
        pb.ListRunsResponse(runs=[other]),
    )
    found = client.run(lambda engine: engine.runs())
    assert found[0] == INFO
    assert [run.id for run in found] == ["clean", "other"]
    assert server.asked == [
        pb.ListRunsRequest(page_size=1000),
        pb.ListRunsRequest(page_size=1000, page_token="7"),
    ]


def test_a_deleted_run_gives_its_bytes(client, server):
    server.on("DeleteRun", pb.DeleteRunResponse(freed_bytes=512))
    assert client.run(lambda engine: engine.delete_run("clean")) == 512
    assert server.asked == [pb.DeleteRunRequest(run_id="clean")]


def test_a_run_that_is_in_use_is_refused_with_its_reason(client, server, refusal):
    code = grpc.StatusCode.FAILED_PRECONDITION
    server.on("DeleteRun", refusal.of(code, "in use", "REASON_RUN_IN_USE"))
    with pytest.raises(rheostat.Refused) as raised:
        client.run(lambda engine: engine.delete_run("clean"))
    assert raised.value.reason == "REASON_RUN_IN_USE"


def test_a_lease_is_renewed_in_seconds(client, server):
    server.on("RenewLease", pb.RenewLeaseResponse(run=STORED))
    assert client.run(lambda engine: engine.renew_lease("clean", 90.25)) == INFO
    wanted = 'run_id: "clean" lease { seconds: 90 nanos: 250000000 }'
    assert server.asked == [text_format.Parse(wanted, pb.RenewLeaseRequest())]


@pytest.mark.parametrize(
    ("call", "path"),
    [
        (lambda engine: engine.delete_run(""), "run_id"),
        (lambda engine: engine.delete_run("a/b"), "run_id"),
        (lambda engine: engine.renew_lease("clean", 0), "lease"),
        (lambda engine: engine.renew_lease(None, 5), "run_id"),
    ],
)
def test_what_names_no_run_and_what_is_no_lease_is_not_sent(server, call, path):
    with (
        rheostat.connect(server.target) as engine,
        pytest.raises(rheostat.InvalidRequest) as raised,
    ):
        call(engine)
    assert (raised.value.path, server.asked) == (path, [])


def test_the_shell_lists_and_deletes_runs(server, capsys):
    leased = run_pb2.Run(run_id="other", size_bytes=9)
    leased.lease_expire_time.seconds = 2**33
    server.on("ListRuns", pb.ListRunsResponse(runs=[STORED, leased]))
    server.on("DeleteRun", pb.DeleteRunResponse(freed_bytes=512))
    assert main(["runs", "list", "--target", server.target]) == 0
    assert main(["runs", "delete", "clean", "--target", server.target]) == 0
    head, first, second, deleted = capsys.readouterr().out.splitlines()
    assert first[head.index("POSITIONS") :].startswith("0-1, 4 ")
    assert first[head.index("BYTES") :].split() == ["512", "-", "set=a"]
    assert second.startswith("other  no sites")
    assert second[head.index("BYTES") :].split()[0] == "9"
    assert second.endswith(" s")
    assert deleted == "deleted clean; freed 512 bytes"
