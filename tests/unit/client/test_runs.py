"""Stored runs, over both clients and from the shell."""

import datetime

import grpc
import numpy as np
import pytest
from google.protobuf import text_format

import rheostat
from rheostat import Point, Site
from rheostat._cli import main
from rheostat._points import site_to_wire
from rheostat_wire.v1 import capture_pb2, receipt_pb2, run_pb2, tensor_pb2
from rheostat_wire.v1 import run_service_pb2 as pb

EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)

STORED = text_format.Parse(
    """run_id: "clean" size_bytes: 512
       sites { point: POINT_RESID_PRE layer: 0 } sites { point: POINT_RESID_POST layer: 3 }
       sites { point: 99 layer: 3 }
       positions { start: 0 count: 2 } positions { start: 4 count: 1 }
       prompt_token_ids { ids: [5, 6, 7] }
       create_time { seconds: 60 nanos: 500000000 } lease_expire_time { seconds: 360 }
       labels { key: "set" value: "a" } dtype: DTYPE_BFLOAT16 width: 2""",
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
    dtype="bfloat16",
    width=2,
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


def test_a_run_is_found_by_its_id(client, server):
    server.on("GetRun", pb.GetRunResponse(run=STORED))
    assert client.run(lambda engine: engine.run("clean")) == INFO
    assert server.asked == [pb.GetRunRequest(run_id="clean")]


def test_a_prompt_is_captured_into_a_run(client, server):
    receipt = receipt_pb2.Receipt(request_id="r", prompt_token_count=3)
    server.on("CaptureRun", pb.CaptureRunResponse(run=STORED, receipt=receipt))
    run = client.run(
        lambda engine: engine.capture_run(
            "a",
            ["resid_pre", "resid_post"],
            layers=[0, 3],
            where=rheostat.positions(-1),
            steering=rheostat.replace(rheostat.Zeros()).at(
                points="resid_post", layers=1, where=rheostat.positions(0)
            ),
            run_id="clean",
            lease=60,
            lora="poet",
            labels={"set": "a"},
            dtype="float32",
        )
    )
    assert (run.id, run.positions, run.receipt.request_id) == ("clean", INFO.positions, "r")
    (asked,) = server.asked
    assert len(asked.steering.interventions) == 1
    asked.ClearField("steering")
    assert asked == text_format.Parse(
        """run_id: "clean" prompt { text: "a" }
           sites { points: [POINT_RESID_PRE, POINT_RESID_POST] list { layers: [0, 3] } }
           where { include { positions { start: -1 } } } lora_name: "poet" lease { seconds: 60 }
           labels { key: "set" value: "a" } dtype: DTYPE_FLOAT32""",
        pb.CaptureRunRequest(),
    )


def captured(layer: int, start: int, values: np.ndarray) -> pb.ReadRunResponse:
    tensor = tensor_pb2.Tensor(
        dtype=tensor_pb2.DTYPE_FLOAT32,
        shape=(1, *values.shape),
        encoding=tensor_pb2.ENCODING_RAW,
        inline=values.astype("<f4").tobytes(),
    )
    return pb.ReadRunResponse(
        captured=capture_pb2.Captured(
            sites=[site_to_wire(Site(Point.RESID_POST, layer))],
            positions=[{"start": start, "count": len(values)}],
            token_ids=range(start, start + len(values)),
            tensor=tensor,
        )
    )


def test_a_run_is_read_by_site(client, server):
    values = np.arange(8, dtype=np.float32).reshape(4, 2)
    server.on("ReadRun", [captured(1, 0, values[:3]), captured(1, 3, values[3:])])
    rows = client.run(
        lambda engine: engine.read_run(
            INFO, "resid_post", 1, positions=[0, -1], encoding="lz4_planes"
        )
    )
    assert np.array_equal(rows["resid_post", 1], values)
    assert rows.positions("resid_post", 1).tolist() == [0, 1, 2, 3]
    assert server.asked == [
        text_format.Parse(
            """run_id: "clean" sites { points: POINT_RESID_POST list { layers: 1 } }
               positions { positions: [0, -1] } encoding: ENCODING_LZ4_PLANES""",
            pb.ReadRunRequest(),
        )
    ]


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_rows_are_uploaded_site_by_site_in_pieces(client, server, monkeypatch, dtype):
    size = 4 if dtype is None else 2
    monkeypatch.setattr("rheostat._client.run_calls._CHUNK", 2 * 2 * size)
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    server.on("PutRun", pb.PutRunResponse(run=STORED))
    info = client.run(
        lambda engine: engine.put_run(
            {("resid_pre", 2): values, ("resid_post", 0): 2 * values},
            prompt_token_ids=[5, 6, 7],
            positions=[0, 1, 4],
            token_ids=[5, 6, 9],
            run_id="clean",
            lease=60,
            labels={"set": "a"},
            dtype=dtype,
        )
    )
    assert info == INFO
    header, *pieces = server.asked
    kind = "DTYPE_FLOAT32" if dtype is None else "DTYPE_BFLOAT16"
    assert header.header == text_format.Parse(
        f"""run_id: "clean" sites {{ point: POINT_RESID_PRE layer: 2 }}
            sites {{ point: POINT_RESID_POST layer: 0 }}
            positions {{ start: 0 count: 2 }} positions {{ start: 4 count: 1 }}
            prompt_token_ids {{ ids: [5, 6, 7] }} token_ids: [5, 6, 9] lease {{ seconds: 60 }}
            labels {{ key: "set" value: "a" }} dtype: {kind}""",
        pb.RunHeader(),
    )
    assert [
        (piece.rows.sites[0].layer, [(run.start, run.count) for run in piece.rows.positions])
        for piece in pieces
    ] == [(2, [(0, 2)]), (2, [(4, 1)]), (0, [(0, 2)]), (0, [(4, 1)])]
    assert all(list(piece.rows.tensor.shape)[::2] == [1, 2] for piece in pieces)
    assert len(pieces[0].rows.tensor.inline) == 4 * size


def test_rows_that_were_read_are_uploaded_at_their_positions(client, server):
    values = np.ones((2, 2), np.float32)
    server.on("ReadRun", [captured(1, 3, values)])
    server.on("PutRun", pb.PutRunResponse(run=STORED))
    rows = client.run(lambda engine: engine.read_run("clean"))
    client.run(lambda engine: engine.put_run(rows, prompt_token_ids=[1]))
    header = server.asked[1].header
    assert [(run.start, run.count) for run in header.positions] == [(3, 2)]
    assert list(header.token_ids) == [3, 4]


ROW = np.ones((1, 2), np.float32)


@pytest.mark.parametrize(
    ("rows", "fields", "path"),
    [
        ([ROW], {}, "rows"),
        ({}, {}, "rows"),
        ({("resid_post", 0): ROW[0]}, {}, "rows[resid_post[0]]"),
        ({("resid_post", 0): ROW * np.nan}, {}, "rows[resid_post[0]]"),
        ({("resid_post", 0): ROW, ("resid_post", 1): np.ones((2, 2))}, {}, "rows"),
        ({("resid_post", 0): ROW, ("resid_post", 1): ROW.astype(np.float16)}, {}, "rows"),
        ({("nowhere", 0): ROW}, {}, "sites.points"),
        ({("resid_post", -1): ROW}, {}, "rows"),
        ({("resid_post", 0): ROW}, {"positions": [0, 1]}, "positions"),
        ({("resid_post", 0): np.ones((2, 2))}, {"positions": [1, 1]}, "positions"),
        ({("resid_post", 0): ROW}, {"positions": [-1]}, "positions"),
        ({("resid_post", 0): ROW}, {"run_id": ""}, "run_id"),
        ({("resid_post", 0): ROW}, {"lease": 0}, "lease"),
    ],
)
def test_rows_that_are_no_run_are_not_sent(server, rows, fields, path):
    with (
        rheostat.connect(server.target) as engine,
        pytest.raises(rheostat.InvalidRequest) as raised,
    ):
        engine.put_run(rows, prompt_token_ids=[1], **fields)
    assert (raised.value.path, server.asked) == (path, [])


@pytest.mark.parametrize(
    ("call", "path"),
    [
        (lambda engine: engine.run(""), "run_id"),
        (lambda engine: engine.read_run("a/b"), "run_id"),
        (lambda engine: engine.read_run("a", layers=3), "sites.points"),
        (lambda engine: engine.read_run("a", positions=0.5), "positions"),
        (lambda engine: engine.read_run("a", encoding="full8"), "encoding"),
        (lambda engine: engine.capture_run("a", "resid_post", run_id=""), "run_id"),
        (lambda engine: engine.capture_run("a", "resid_post", lease=0), "lease"),
        (lambda engine: engine.capture_run("a", "resid_post", dtype="int8"), "dtype"),
        (lambda engine: engine.capture_run("", "resid_post"), "prompt"),
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
