"""Vectors in files of our own and in plain ones: what is written is read, bit for bit."""

import json
import os
import struct
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from safetensors.numpy import load_file, save_file

import rheostat
from rheostat import Point
from rheostat._files._errors import replacing
from rheostat_wire.v1 import steering_service_pb2 as pb

BITS = np.array([[0x3F80, 0xC000, 0x0001], [0x4040, 0x8000, 0x7F7F]], np.uint16)
VALUES = np.array([[1.0, -2.0, 3e-8], [0.0, -0.0, 65504.0]])
OWN = ("safetensors", "npz")


def vector(dtype: str = "float32", **fields: object) -> rheostat.Vector:
    array = BITS if dtype == "bfloat16" else VALUES
    made = rheostat.inline(array, dtype=dtype, points="resid_post", layers=range(2, 4))
    return replace(made, name="tone/joy", description="glad, ünï", **fields)


def plain_bfloat16(path: Path, bits: np.ndarray, name: str = "x") -> None:
    """A safetensors file as its specification has it, without a library."""
    said = {"dtype": "BF16", "shape": list(bits.shape), "data_offsets": [0, bits.nbytes]}
    header = json.dumps({name: said}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bits.astype("<u2").tobytes())


@pytest.mark.parametrize("suffix", OWN)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_vector_comes_back_with_every_bit_and_word(tmp_path, suffix, dtype):
    written = vector(dtype)
    path = tmp_path / f"joy.{suffix}"
    rheostat.save_vector(path, written)
    read = rheostat.load_vector(path)
    assert read == written
    assert (read.rows, read.description) == (written.rows, written.description)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("suffix", OWN)
@pytest.mark.parametrize(
    ("points", "layers"),
    [
        (None, None),
        ((Point.RESID_PRE, Point.MLP_OUT), "all"),
        ((Point.RESID_MID,), (3, 9)),
        ((Point.RESID_MID,), range(2, 8, 3)),
    ],
)
def test_points_and_layers_come_back_in_their_own_form(tmp_path, suffix, points, layers):
    path = tmp_path / f"joy.{suffix}"
    written = vector(points=points, layers=layers)
    rheostat.save_vector(path, replace(written, name=None))
    assert rheostat.load_vector(path) == replace(written, name=None)


def test_a_vector_of_some_layers_has_a_row_for_each_of_them(tmp_path):
    rows = np.arange(11 * 4, dtype=np.float32).reshape(11, 4)
    written = rheostat.inline(rows, points="resid_pre", layers=range(10, 21))
    path = tmp_path / "some.safetensors"
    rheostat.save_vector(path, written)
    read = rheostat.load_vector(path)
    assert (read.points, read.layers) == ((Point.RESID_PRE,), range(10, 21))
    assert np.array_equal(read.values, rows)


def test_other_readers_of_the_formats_read_our_files(tmp_path):
    rheostat.save_vector(tmp_path / "joy.safetensors", vector("float16"))
    rheostat.save_vector(tmp_path / "joy.npz", vector("bfloat16"))
    (tensor,) = load_file(tmp_path / "joy.safetensors").values()
    assert (tensor.dtype, tensor.tolist()) == (np.float16, VALUES.astype(np.float16).tolist())
    with np.load(tmp_path / "joy.npz") as archive:
        assert archive["vector"]["bfloat16"].tolist() == BITS.tolist()


def test_a_bfloat16_file_is_one_for_other_readers(tmp_path):
    rheostat.save_vector(tmp_path / "joy.safetensors", vector("bfloat16"))
    data = (tmp_path / "joy.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    said = json.loads(data[8 : 8 + length])["vector"]
    assert (said["dtype"], said["shape"]) == ("BF16", [2, 3])
    start, stop = said["data_offsets"]
    assert data[8 + length :][start:stop] == BITS.astype("<u2").tobytes()


@pytest.mark.parametrize(
    ("array", "element"),
    [(VALUES, "float32"), (VALUES.astype(np.float32), "float32"), (VALUES[0], "float32"),
     (VALUES.astype(np.float16), "float16")],
)  # fmt: skip
@pytest.mark.parametrize("suffix", OWN)
def test_a_plain_file_with_one_array_leaves_open_where_it_acts(tmp_path, suffix, array, element):
    path = tmp_path / f"x.{suffix}"
    if suffix == "npz":
        np.savez(path, direction=array)
    else:
        save_file({"direction": array}, path)
    expected = rheostat.inline(array, dtype=element)
    assert rheostat.load_vector(path) == expected
    assert rheostat.load_vector(str(path)).points is None


def test_a_plain_bfloat16_tensor_is_read_as_its_bits(tmp_path):
    plain_bfloat16(tmp_path / "x.safetensors", BITS)
    found = rheostat.load_vector(tmp_path / "x.safetensors")
    assert found == rheostat.inline(BITS, dtype="bfloat16")
    assert found.values.view(np.uint32).tolist() == (BITS.astype(np.uint32) << 16).tolist()


def test_the_format_may_be_said(tmp_path):
    path = tmp_path / "joy.bin"
    rheostat.save_vector(path, vector(), format="npz")
    assert rheostat.load_vector(path, format="npz") == vector()
    with pytest.raises(rheostat.InvalidRequest, match=r"does not end in \.safetensors, \.npz or"):
        rheostat.load_vector(path)
    with pytest.raises(rheostat.InvalidRequest, match="unknown format 'pt': give safetens"):
        rheostat.load_vector(path, format="pt")
    with pytest.raises(rheostat.InvalidRequest, match="only SAEs have features, not npz files"):
        rheostat.load_vector(path, format="npz", feature=1)


def write(path: Path, content: object, about: object = None) -> None:
    """A file of our two formats that holds this, with this text."""
    text = {} if about is None else {"rheostat_vector": json.dumps(about)}
    arrays = content if isinstance(content, dict) else {"vector": content}
    if path.suffix == ".npz":
        np.savez(path, **arrays, **{name: np.array(one) for name, one in text.items()})
    else:
        save_file(arrays, path, metadata=text)


ABOUT = {"name": None, "description": "", "points": ["resid_post"], "layers": [0]}
ONE = np.ones((1, 3), np.float32)


@pytest.mark.parametrize("suffix", OWN)
@pytest.mark.parametrize(
    ("content", "about", "said", "reason"),
    [
        (np.ones((1, 1, 3)), None, "not [1, 1, 3]", "VECTOR_SHAPE"),
        (np.ones((0, 3)), None, "not [0, 3]", "VECTOR_SHAPE"),
        (np.array([1.0, np.nan]), None, "not finite", "NON_FINITE"),
        (np.array([np.inf], np.float16), None, "not finite", "NON_FINITE"),
        ({"a": ONE, "b": ONE}, None, "(a, b)", "INVALID_VALUE"),
        (ONE, [], "did not write", "INVALID_VALUE"),
        (ONE, {**ABOUT, "points": ["nowhere"]}, "unknown point 'nowhere'", "INVALID_VALUE"),
        (ONE, {**ABOUT, "layers": [-1]}, "layers count from 0, not -1", "INVALID_VALUE"),
        (ONE, {**ABOUT, "layers": []}, "no layer is named", "INVALID_VALUE"),
        (ONE, {**ABOUT, "layers": {"start": 1}}, "'stop'", "INVALID_VALUE"),
        (ONE, {**ABOUT, "name": 3}, "must be strings", "INVALID_VALUE"),
        (ONE, {"name": "a"}, "'points'", "INVALID_VALUE"),
        (np.ones((2, 3)), {**ABOUT, "layers": [1, 2, 3]}, "2 rows for 3 layers", "VECTOR_SHAPE"),
    ],
)
def test_a_file_that_is_no_vector_says_what_is_wrong(
    tmp_path, suffix, content, about, said, reason
):
    path = tmp_path / f"x.{suffix}"
    write(path, content, about)
    with pytest.raises(rheostat.InvalidRequest) as raised:
        rheostat.load_vector(path)
    assert (raised.value.reason, raised.value.path) == (f"REASON_{reason}", str(path))
    assert said in raised.value.message


def test_tensors_of_whole_numbers_are_refused(tmp_path):
    save_file({"x": np.ones((1, 3), np.int64)}, tmp_path / "x.safetensors")
    with pytest.raises(rheostat.InvalidRequest, match='type I64 in "x": save it as F32'):
        rheostat.load_vector(tmp_path / "x.safetensors")


def test_an_archive_without_an_array_is_refused(tmp_path):
    np.savez(tmp_path / "x.npz")
    with pytest.raises(rheostat.InvalidRequest, match=r"holds 0 arrays \(none\)"):
        rheostat.load_vector(tmp_path / "x.npz")


def test_pickles_are_not_opened(tmp_path):
    np.savez(tmp_path / "x.npz", vector=np.array([{}], object))
    with pytest.raises(rheostat.InvalidRequest, match="cannot be read"):
        rheostat.load_vector(tmp_path / "x.npz")


@pytest.mark.parametrize("suffix", [*OWN, "gguf"])
def test_a_file_that_is_cut_anywhere_is_refused(tmp_path, suffix):
    path = tmp_path / f"joy.{suffix}"
    rows = np.ones((2, 8), np.float32)  # GGUF pads rows to 32 bytes; a cut in padding loses none
    rheostat.save_vector(path, rheostat.inline(rows, points="resid_post", layers=[2, 3]))
    whole = path.read_bytes()
    for length in [*range(0, len(whole), 7), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(rheostat.InvalidRequest, match="cannot be read"):
            rheostat.load_vector(path)


@pytest.mark.parametrize("suffix", [*OWN, "gguf"])
def test_a_file_that_is_not_there_is_refused(tmp_path, suffix):
    path = tmp_path / f"joy.{suffix}"
    with pytest.raises(rheostat.InvalidRequest, match="No such file or directory") as raised:
        rheostat.load_vector(path)
    assert raised.value.path == str(path)


def test_one_array_that_calls_itself_an_archive_is_refused(tmp_path):
    with (tmp_path / "x.npz").open("wb") as file:
        np.save(file, ONE)
    with pytest.raises(rheostat.InvalidRequest, match="is not an archive, but one array"):
        rheostat.load_vector(tmp_path / "x.npz")


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "joy.safetensors"
    rheostat.save_vector(path, vector("float16"))
    before = path.read_bytes()

    def fail(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "replace", fail)
        with pytest.raises(rheostat.InvalidRequest, match=r"cannot be written \(No space left"):
            rheostat.save_vector(path, vector())
    assert (list(tmp_path.iterdir()), path.read_bytes()) == ([path], before)
    rheostat.save_vector(path, vector())
    assert rheostat.load_vector(path) == vector()


def test_a_link_stays_and_its_file_is_replaced(tmp_path):
    target, link = tmp_path / "real" / "joy.npz", tmp_path / "link.npz"
    target.parent.mkdir()
    link.symlink_to(target)
    rheostat.save_vector(link, vector())
    assert (link.is_symlink(), rheostat.load_vector(target)) == (True, vector())
    assert list(target.parent.iterdir()) == [target]


def test_a_replaced_file_keeps_its_mode(tmp_path):
    path = tmp_path / "rows.npz"
    path.touch(0o600)
    with replacing(path) as temporary:
        temporary.write_text("new")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new", 0o600)


def test_a_pipe_is_written_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with replacing(pipe) as temporary:
            temporary.write_text("new")
        assert os.read(read, 10) == b"new"
    finally:
        os.close(read)
    assert pipe.is_fifo()


def test_a_full_disk_is_no_missing_folder(tmp_path):
    def write(error: OSError) -> str:
        with pytest.raises(rheostat.InvalidRequest) as caught, replacing(tmp_path / "a.npz"):
            raise error
        return str(caught.value)

    assert "does its folder exist?" in write(FileNotFoundError(2, "No such file"))
    full = write(OSError(28, "No space left on device"))
    assert "cannot be written (No space left on device): write to another place" in full


def test_writers_of_one_file_do_not_meet_before_it_is_whole(tmp_path):
    path = tmp_path / "joy.npz"
    with replacing(path) as first, replacing(path) as second:
        assert first != second
        first.write_bytes(b"1")
        second.write_bytes(b"2")
    assert ([*tmp_path.iterdir()], path.read_bytes()) == ([path], b"1")


def test_what_cannot_be_written_says_why(tmp_path):
    with pytest.raises(rheostat.InvalidRequest, match="does its folder exist"):
        rheostat.save_vector(tmp_path / "no" / "joy.npz", vector())
    with pytest.raises(rheostat.InvalidRequest, match="SAEs can only be read"):
        rheostat.save_vector(tmp_path / "joy", vector(), format="sae")
    with pytest.raises(rheostat.Refused, match=r"joy has no numbers in this client; fetch it"):
        rheostat.save_vector(tmp_path / "joy.npz", rheostat.named("joy"))
    with pytest.raises(rheostat.InvalidRequest, match=r"such as rheostat\.inline\(array, "):
        rheostat.save_vector(tmp_path / "joy.npz", np.ones(2))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("suffix", "library"), [("safetensors", "safetensors"), ("gguf", "gguf")])
def test_a_missing_library_names_what_to_install(tmp_path, monkeypatch, suffix, library):
    path = tmp_path / f"joy.{suffix}"
    rheostat.save_vector(path, vector())
    monkeypatch.setitem(sys.modules, library, None)
    expected = (
        f"this file format needs {library}: pip install {library}, "
        "or, in a checkout, pip install '.[files]'"
    )
    for use in (
        lambda: rheostat.load_vector(path),
        lambda: rheostat.save_vector(path, vector()),
    ):
        with pytest.raises(rheostat.Refused) as raised:
            use()
        assert str(raised.value) == expected


def test_a_loaded_vector_is_put_with_all_that_its_file_says(client, server, tmp_path):
    rheostat.save_vector(tmp_path / "joy.npz", vector("bfloat16"))
    loaded = rheostat.load_vector(tmp_path / "joy.npz")
    server.on("PutVector", pb.PutVectorResponse())
    stored = client.run(lambda engine: engine.vectors.put(loaded))
    header, chunk = server.asked
    expected = text_format.Parse(
        """header {
             dtype: DTYPE_BFLOAT16 shape: 2 shape: 3 total_bytes: 12 name: "tone/joy"
             description: "glad, ünï"
             sites { points: POINT_RESID_POST range { start: 2 stop: 4 } }
           }""",
        pb.PutVectorRequest(),
    )
    expected.header.digest = bytes.fromhex(loaded.digest)
    assert (header, chunk.chunk) == (expected, BITS.astype("<u2").tobytes())
    assert stored == replace(loaded, rows=None, by_value=False)
    assert stored.description == "glad, ünï"


def test_what_put_is_told_goes_before_what_the_file_says(client, server, tmp_path):
    server.on("PutVector", pb.PutVectorResponse())
    client.run(
        lambda engine: engine.vectors.put(
            vector("float16"), name="b", description="", points="mlp_out", layers=[1, 3],
            dtype="float32",
        )
    )  # fmt: skip
    header = server.asked[0].header
    assert (header.name, header.description, list(header.sites.list.layers)) == ("b", "", [1, 3])
    assert server.asked[1].chunk == VALUES.astype(np.float16).astype("<f4").tobytes()


def test_a_handle_without_numbers_cannot_be_put(client, server):
    with pytest.raises(rheostat.Refused, match="joy has no numbers in this client"):
        client.run(lambda engine: engine.vectors.put(rheostat.named("joy")))
    assert server.asked == []


def test_a_fetched_vector_keeps_its_description(client, server):
    data = VALUES.astype("<f4").tobytes()
    stored = pb.VectorInfo(
        digest=bytes.fromhex(rheostat.inline(VALUES).digest), name="joy", dtype="DTYPE_FLOAT32",
        shape=[2, 3], description="glad",
    )  # fmt: skip
    server.on("GetVector", [pb.GetVectorResponse(info=stored), pb.GetVectorResponse(chunk=data)])
    assert client.run(lambda engine: engine.vectors.get("joy")).description == "glad"


def test_a_vector_in_the_place_of_its_file_is_answered_with_the_order() -> None:
    with pytest.raises(rheostat.InvalidRequest) as raised:
        rheostat.save_vector(vector("float32"), "v.npz")
    assert raised.value.message == "the file comes first: save_vector(path, vector)"
