"""``rheostat runs get`` and ``put``: runs in files, bit for bit."""

import json
import sys

import numpy as np
import pytest
from google.protobuf import text_format
from safetensors.numpy import save_file

from rheostat import Point, Site
from rheostat._cli import main
from rheostat._points import site_to_wire
from rheostat_wire.dtypes import TO_WIRE, narrow
from rheostat_wire.v1 import capture_pb2, run_pb2, tensor_pb2
from rheostat_wire.v1 import run_service_pb2 as pb

SITES = (Site(Point.RESID_PRE, 0), Site(Point.RESID_POST, 3))
VALUES = np.array([[[1.5, -2.0], [3.0, 0.25]], [[5.0, 6.0], [7.0, -8.0]]], np.float32)


def served(server, dtype: str = "bfloat16") -> None:
    """A run of two sites at positions 1 and 4."""
    run = text_format.Parse(
        f"""run_id: "clean" size_bytes: 32
            sites {{ point: POINT_RESID_PRE layer: 0 }} sites {{ point: POINT_RESID_POST layer: 3 }}
            positions {{ start: 1 count: 1 }} positions {{ start: 4 count: 1 }}
            prompt_token_ids {{ ids: [5, 6, 7] }} labels {{ key: "set" value: "a" }}
            dtype: DTYPE_{dtype.upper()} width: 2""",
        run_pb2.Run(),
    )
    tensor = tensor_pb2.Tensor(
        dtype=TO_WIRE[dtype],
        shape=VALUES.shape,
        encoding=tensor_pb2.ENCODING_RAW,
        inline=narrow(VALUES, dtype).tobytes(),
    )
    rows = capture_pb2.Captured(
        sites=map(site_to_wire, SITES),
        positions=[{"start": 1, "count": 1}, {"start": 4, "count": 1}],
        token_ids=[6, 9],
        tensor=tensor,
    )
    server.on("GetRun", pb.GetRunResponse(run=run))
    server.on("ReadRun", [pb.ReadRunResponse(captured=rows)])
    server.on("PutRun", pb.PutRunResponse(run=run))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_run_goes_to_a_file_and_back_bit_for_bit(server, capsys, tmp_path, monkeypatch, dtype):
    monkeypatch.chdir(tmp_path)
    served(server, dtype)
    assert main(["runs", "get", "clean", "--target", server.target]) == 0
    assert capsys.readouterr() == (
        f"clean.safetensors  2 x {dtype} [2, 2]\n",
        "fetching clean ...\n",
    )
    server.asked.clear()
    line = ["runs", "put", "clean.safetensors", "--id", "again", "--lease", "60"]
    assert main([*line, "--target", server.target]) == 0
    out = capsys.readouterr().out
    assert out == "clean  resid_pre 0, resid_post 3, positions 1, 4\n"
    header, *pieces = server.asked
    assert header.header == text_format.Parse(
        f"""run_id: "again"
            sites {{ point: POINT_RESID_PRE layer: 0 }} sites {{ point: POINT_RESID_POST layer: 3 }}
            positions {{ start: 1 count: 1 }} positions {{ start: 4 count: 1 }}
            prompt_token_ids {{ ids: [5, 6, 7] }} token_ids: [6, 9] lease {{ seconds: 60 }}
            labels {{ key: "set" value: "a" }} dtype: DTYPE_{dtype.upper()}""",
        pb.RunHeader(),
    )
    sent = [(piece.rows.sites[0].layer, piece.rows.tensor.inline) for piece in pieces]
    assert sent == [
        (0, narrow(VALUES[0], dtype).tobytes()),
        (3, narrow(VALUES[1], dtype).tobytes()),
    ]


def test_some_sites_are_asked_for_and_labels_are_replaced(server, tmp_path):
    served(server)
    path = str(tmp_path / "x")
    line = ["runs", "get", "clean", path, "--points", "resid_post", "--layers", "3"]
    assert main([*line, "--target", server.target]) == 0
    assert server.asked[-1] == text_format.Parse(
        """run_id: "clean" sites { points: POINT_RESID_POST list { layers: 3 } }
           encoding: ENCODING_RAW""",
        pb.ReadRunRequest(),
    )
    server.asked.clear()
    assert main(["runs", "put", path, "--label", "team=red", "--target", server.target]) == 0
    header = server.asked[0].header
    assert (dict(header.labels), header.run_id, header.HasField("lease")) == (
        {"team": "red"}, "", False,
    )  # fmt: skip


def test_a_file_is_replaced_only_when_forced(server, tmp_path, capsys):
    served(server)
    path = tmp_path / "x.safetensors"
    path.write_text("mine")
    line = ["runs", "get", "clean", str(path), "--target", server.target]
    assert main(line) == 2
    assert capsys.readouterr().err.endswith("exists already; --force replaces it\n")
    assert (path.read_text(), server.asked) == ("mine", [])
    assert main([*line, "--force"]) == 0


ABOUT = {"prompt_token_ids": [5], "positions": [0], "token_ids": [5]}


@pytest.mark.parametrize(
    ("tensor", "about", "said"),
    [
        ("resid_post.3", None, 'has no entry "rheostat_run": write runs with rheostat runs get'),
        ("resid_post.3", {}, "is no run ('prompt_token_ids')"),
        ("resid_post.3", [], "is no run ("),
        ("resid_post.3", {**ABOUT, "positions": ["a"]}, "is no run ("),
        ("vector", ABOUT, "is no run ("),
        ("resid_post.x", ABOUT, "is no run ("),
        ("resid_post.3", {**ABOUT, "positions": [0, 1]}, "2 positions are given for 1 row of"),
    ],
)
def test_a_file_that_is_no_run_is_not_sent(server, tmp_path, capsys, tensor, about, said):
    path = tmp_path / "x.safetensors"
    metadata = None if about is None else {"rheostat_run": json.dumps(about)}
    save_file({tensor: np.ones((1, 2), np.float32)}, path, metadata=metadata)
    assert main(["runs", "put", str(path), "--target", server.target]) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert said in err
    assert server.asked == []


def test_a_missing_file_and_a_missing_library_are_told(server, tmp_path, capsys, monkeypatch):
    path = tmp_path / "x.safetensors"
    assert main(["runs", "put", str(path), "--target", server.target]) == 2
    assert f"{path} cannot be read" in capsys.readouterr().err
    served(server)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert main(["runs", "get", "clean", str(path), "--target", server.target]) == 1
    assert "this file format needs safetensors" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
