"""``rheostat vectors import`` and ``export``."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import rheostat
from rheostat._cli import main
from rheostat._points import site_set
from rheostat._proto.v1 import steering_service_pb2 as pb

ROWS = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)


def joy(name: str | None = "tone/joy") -> rheostat.Vector:
    vector = rheostat.inline(ROWS, points="resid_post", layers=[4, 6])
    return rheostat.Vector(
        vector.digest, name, vector.shape, vector.dtype, vector.points, vector.layers, vector.rows,
        by_value=True, description="glad",
    )  # fmt: skip


def serve(server, **fields: object) -> None:
    info = pb.VectorInfo(
        digest=bytes.fromhex(joy().digest), dtype="DTYPE_FLOAT32", shape=[2, 2], **fields
    )
    data = pb.GetVectorsResponse(chunk=ROWS.tobytes())
    server.on("GetVectors", [pb.GetVectorsResponse(info=info), data])


def test_import_stores_what_the_file_says(server, capsys, tmp_path):
    path = tmp_path / "x.safetensors"
    rheostat.save_vector(path, joy())
    server.on("PutVectors", pb.PutVectorsResponse())
    assert main(["vectors", "import", str(path), "--target", server.target]) == 0
    header = server.asked[0].header
    assert (header.name, header.description, list(header.sites.list.layers)) == (
        "tone/joy",
        "glad",
        [4, 6],
    )
    out, err = capsys.readouterr()
    assert (out, err) == (f"{joy().digest}  tone/joy\n", "storing tone/joy ...\n")


def test_import_takes_the_command_line_s_word_before_the_file_s(server, tmp_path):
    path = tmp_path / "x.bin"
    rheostat.save_vector(path, joy(), format="npz")
    server.on("PutVectors", pb.PutVectorsResponse())
    line = ["vectors", "import", str(path), "--format", "npz", "--name", "b", "--description", "c"]
    line += ["--points", "mlp_out", "--layers", "0-1", "--target", server.target]
    assert main(line) == 0
    header = server.asked[0].header
    assert (header.name, header.description, list(header.sites.list.layers)) == ("b", "c", [0, 1])


def test_import_names_what_has_no_name_by_its_file(server, capsys, tmp_path):
    path = tmp_path / "sad.gguf"
    rheostat.save_vector(path, joy(None))
    save_file({"W_dec": ROWS}, tmp_path / "sae_weights.safetensors")
    config = {"d_in": 2, "d_sae": 2, "hook_name": "blocks.3.hook_resid_pre"}
    (tmp_path / "cfg.json").write_text(json.dumps(config))
    server.on("PutVectors", pb.PutVectorsResponse())
    assert main(["vectors", "import", str(path), "--target", server.target]) == 0
    line = ["vectors", "import", str(tmp_path), "--feature", "1", "--target", server.target]
    assert main(line) == 0
    first, _, second, row = server.asked
    assert [first.header.name, second.header.name] == ["sad", f"{tmp_path.name}/1"]
    assert row.chunk == ROWS[1].tobytes()
    assert second.header.description == "SAE feature 1 of blocks.3.hook_resid_pre"


@pytest.mark.parametrize("suffix", ["safetensors", "npz", "gguf"])
def test_export_writes_what_the_server_says(server, capsys, tmp_path, suffix):
    serve(server, name="tone/joy", description="glad", sites=site_set(joy().points, joy().layers))
    path = tmp_path / f"x.{suffix}"
    assert main(["vectors", "export", "tone/joy", str(path), "--target", server.target]) == 0
    assert capsys.readouterr().out == f"{path}  float32 [2, 2]\n"
    found = rheostat.load_vector(path)
    assert (found, found.description) == (joy(), "glad")
    assert server.asked == [pb.GetVectorsRequest(name="tone/joy")]


def test_export_by_digest_may_be_told_where_it_acts(server, tmp_path):
    serve(server)
    path = tmp_path / "x.bin"
    line = ["vectors", "export", joy().digest, str(path), "--format", "gguf"]
    line += ["--points", "resid_post", "--layers", "4,6", "--target", server.target]
    assert main(line) == 0
    assert rheostat.load_vector(path, format="gguf") == joy(None)


def test_a_file_that_is_no_vector_is_a_wrong_command_line(server, capsys, tmp_path):
    path = tmp_path / "x.npz"
    path.write_bytes(b"PK")
    assert main(["vectors", "import", str(path), "--target", server.target]) == 2
    out, err = capsys.readouterr()
    assert (out, server.asked, err.count("\n")) == ("", [], 1)
    assert err.startswith(f"rheostat: {path} cannot be read (")
