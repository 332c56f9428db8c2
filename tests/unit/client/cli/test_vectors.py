"""``rheostat vectors import`` and ``export``."""

import json
import os

import numpy as np
import pytest
from safetensors.numpy import save_file

import rheostat
from rheostat._cli import main
from rheostat._points import site_set
from rheostat_wire.v1 import engine_service_pb2
from rheostat_wire.v1 import steering_service_pb2 as pb

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
    data = pb.GetVectorResponse(chunk=ROWS.tobytes())
    server.on("GetVector", [pb.GetVectorResponse(info=info), data])


def takes_vectors(server, listed: pb.ListVectorsResponse | None = None) -> None:
    """Script what storing a vector asks."""
    server.on("GetModel", engine_service_pb2.GetModelResponse(model_name="demo", layer_count=8))
    server.on("ListVectors", listed or pb.ListVectorsResponse())
    server.on("PutVector", pb.PutVectorResponse())


def test_import_stores_what_the_file_says(server, capsys, tmp_path):
    path = tmp_path / "x.safetensors"
    rheostat.save_vector(path, joy())
    takes_vectors(server)
    assert main(["vectors", "import", str(path), "--target", server.target]) == 0
    header = server.asked[2].header
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
    takes_vectors(server)
    line = ["vectors", "import", str(path), "--format", "npz", "--name", "b", "--description", "c"]
    line += ["--points", "mlp_out", "--layers", "0-1", "--target", server.target]
    assert main(line) == 0
    header = server.asked[2].header
    assert (header.name, header.description, list(header.sites.list.layers)) == ("b", "c", [0, 1])


def test_import_names_what_has_no_name_by_its_file(server, capsys, tmp_path):
    path = tmp_path / "sad.gguf"
    rheostat.save_vector(path, joy(None))
    save_file({"W_dec": ROWS}, tmp_path / "sae_weights.safetensors")
    config = {"d_in": 2, "d_sae": 2, "hook_name": "blocks.3.hook_resid_pre"}
    (tmp_path / "cfg.json").write_text(json.dumps(config))
    takes_vectors(server)
    assert main(["vectors", "import", str(path), "--target", server.target]) == 0
    line = ["vectors", "import", str(tmp_path), "--feature", "1", "--target", server.target]
    assert main(line) == 0
    *_, first, _ = server.asked[:4]
    *_, second, row = server.asked
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
    assert server.asked == [pb.GetVectorRequest(name="tone/joy")]


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


def test_a_name_that_moves_is_told(server, capsys, tmp_path):
    path = tmp_path / "joy.npy"
    np.save(path, ROWS)
    before = pb.ListVectorsResponse()
    before.vectors.add(digest=b"\xab" * 32, name="joy", dtype="DTYPE_FLOAT32", shape=[1, 2])
    takes_vectors(server, before)
    assert main(["vectors", "put", str(path), "--target", server.target]) == 0
    assert capsys.readouterr() == (
        f"{joy().digest}  joy\n",
        f"storing joy ...\nrheostat: the name joy moved here from {'ab' * 32}\n",
    )


def test_a_name_that_stays_is_not_told(server, capsys, tmp_path):
    path = tmp_path / "joy.npy"
    np.save(path, ROWS)
    before = pb.ListVectorsResponse()
    same, other = bytes.fromhex(joy().digest), b"\xab" * 32
    before.vectors.add(digest=same, name="joy", dtype="DTYPE_FLOAT32", shape=[2, 2])
    before.vectors.add(digest=other, name="joyful", dtype="DTYPE_FLOAT32", shape=[2, 2])
    takes_vectors(server, before)
    assert main(["vectors", "put", str(path), "--target", server.target]) == 0
    assert capsys.readouterr().err == "storing joy ...\n"


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ("7-8", "demo has the layers 0 to 7, no layer 8"),
        ("3", "2 rows for 1 layer (3): a vector has one row, or one per layer"),
        ("all", "2 rows for 8 layers (all): a vector has one row, or one per layer"),
    ],
)
@pytest.mark.parametrize("action", ["put", "import"])
def test_rows_that_fit_no_layers_are_not_stored(server, capsys, tmp_path, action, layers, said):
    path = tmp_path / ("joy.npy" if action == "put" else "joy.npz")
    np.save(path, ROWS) if action == "put" else rheostat.save_vector(path, joy())
    takes_vectors(server)
    line = ["vectors", action, str(path), "--points", "resid_post", "--layers", layers]
    assert main([*line, "--target", server.target]) == 2
    assert capsys.readouterr() == ("", f"rheostat: {said}\n")
    assert server.asked == [engine_service_pb2.GetModelRequest()]


def test_import_points_to_put_for_one_array(server, capsys, tmp_path):
    path = tmp_path / "joy.npy"
    np.save(path, ROWS)
    assert main(["vectors", "import", str(path), "--target", server.target]) == 2
    message = f"rheostat: {path} is one array: store it with rheostat vectors put\n"
    assert (capsys.readouterr(), server.asked) == (("", message), [])


@pytest.mark.parametrize(
    ("ending", "hint"), [(".txt", ""), (".safetensors", "; rheostat vectors export writes it")]
)
def test_get_refuses_a_file_name_of_another_format(server, capsys, tmp_path, ending, hint):
    path = tmp_path / f"joy{ending}"
    assert main(["vectors", "get", "joy", str(path), "--target", server.target]) == 2
    assert capsys.readouterr().err == f"rheostat: {path} does not end in .npy{hint}\n"
    assert (server.asked, path.exists()) == ([], False)


@pytest.mark.parametrize(("action", "ending"), [("get", ".npy"), ("export", ".npz")])
def test_a_file_that_is_there_is_replaced_only_with_force(server, capsys, tmp_path, action, ending):
    path = tmp_path / f"joy{ending}"
    path.write_text("mine")
    serve(server, name="joy")
    line = ["vectors", action, "joy", str(path), "--target", server.target]
    assert main(line) == 2
    message = f"rheostat: {path} exists already; --force replaces it\n"
    assert (capsys.readouterr(), server.asked) == (("", message), [])
    assert path.read_text() == "mine"
    assert main([*line, "--force"]) == 0
    assert path.read_bytes() != b"mine"


def test_a_vector_that_cannot_be_written_leaves_the_file_as_it_was(
    server, capsys, tmp_path, monkeypatch
):
    def full(file, _: object) -> None:
        file.write(b"part")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    path = tmp_path / "joy.npy"
    path.write_text("mine")
    serve(server, name="joy")
    assert main(["vectors", "get", "joy", str(path), "--force", "--target", server.target]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"rheostat: cannot write {path}: No space left on device"
    assert (path.read_text(), os.listdir(tmp_path)) == ("mine", [path.name])


def test_export_offers_no_format_that_is_only_read(capsys):
    with pytest.raises(SystemExit):
        main(["vectors", "export", "joy", "x", "--format", "sae"])
    said = "--format cannot be 'sae'; it is one of safetensors, npz, gguf\n"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("own", [[4, 6], "all"])
def test_export_takes_the_rows_of_the_layers_asked_for(server, tmp_path, own):
    serve(server, name="joy", sites=site_set(joy().points, own if own == "all" else (4, 6)))
    path, last = tmp_path / "x.gguf", 1 if own == "all" else 6
    line = ["vectors", "export", "joy", str(path), "--layers", str(last)]
    assert main([*line, "--target", server.target]) == 0
    assert rheostat.load_vector(path) == rheostat.Vector(
        **{
            **vars(rheostat.inline(ROWS[1], points="resid_post", layers=[last])),
            "name": "joy",
        }
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--layers", "5-6"], "tone/joy has layers 4, 6, and not 5"),
        (["--layers", "all"], "tone/joy has layers 4, 6, and not all"),
        (["--points", "resid_mid"], "tone/joy acts at resid_post, not at resid_mid"),
    ],
)
def test_export_gives_no_row_to_another_site(server, capsys, tmp_path, flags, said):
    serve(server, name="tone/joy", sites=site_set(joy().points, joy().layers))
    path = tmp_path / "x.gguf"
    line = ["vectors", "export", "tone/joy", str(path), *flags, "--target", server.target]
    assert main(line) == 2
    assert capsys.readouterr().err == f"fetching tone/joy ...\nrheostat: {said}\n"
    assert not path.exists()


def test_one_row_for_all_layers_is_exported_for_some(server, tmp_path):
    one = rheostat.inline(ROWS[0])
    info = pb.VectorInfo(
        digest=bytes.fromhex(one.digest), name="joy", dtype="DTYPE_FLOAT32", shape=[1, 2],
        sites=site_set(joy().points, "all"),
    )  # fmt: skip
    data = pb.GetVectorResponse(chunk=ROWS[0].tobytes())
    server.on("GetVector", [pb.GetVectorResponse(info=info), data])
    path = tmp_path / "x.npz"
    line = ["vectors", "export", "joy", str(path), "--layers", "2-3", "--target", server.target]
    assert main(line) == 0
    found = rheostat.load_vector(path)
    assert (found.layers, found.shape, found.digest) == ((2, 3), (1, 2), one.digest)


def test_what_gguf_cannot_hold_is_told_with_what_to_type(server, capsys, tmp_path):
    serve(server, name="joy", sites=site_set(joy().points, range(2)))
    path = tmp_path / "x.gguf"
    assert main(["vectors", "export", "joy", str(path), "--target", server.target]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "rheostat: control vectors begin at layer 1; llama.cpp cannot steer layer 0: save a "
        "vector with other layers, or write .safetensors [REASON_INVALID_VALUE]; "
        "--layers 1-5, say, takes the rows of those layers"
    )
    assert not path.exists()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], {}),
        (["--new"], {"expected_digest": b""}),
        (["--expect", "mirth"], {"expected_digest": b"\xcd" * 32}),
    ],
)
def test_a_stored_vector_gets_a_name(server, capsys, options, expected):
    listed = pb.ListVectorsResponse()
    sites = {"points": ["POINT_RESID_POST"], "list": {"layers": [4]}}
    shape = {"dtype": "DTYPE_FLOAT32", "shape": [1, 2]}
    listed.vectors.add(digest=b"\xab" * 32, name="joy", description="glad", sites=sites, **shape)
    listed.vectors.add(digest=b"\xcd" * 32, name="mirth", **shape)
    server.on("ListVectors", listed)
    server.on("SetName", pb.SetNameResponse(previous_digest=b"\xcd" * 32))
    line = ["vectors", "name", "best", "ab" * 4, *options, "--target", server.target]
    assert main(line) == 0
    assert server.asked[-1] == pb.SetNameRequest(
        name="best", digest=b"\xab" * 32, description="glad", sites=sites, **expected
    )
    assert capsys.readouterr() == (
        f"{'ab' * 32}  best\n",
        f"rheostat: the name best moved here from {'cd' * 32}\n",
    )
