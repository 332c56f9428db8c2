"""GGUF control vectors, as repeng and llama.cpp write and read them."""

import gguf
import numpy as np
import pytest

import rheostat
from rheostat import Point

WIDTH = 32  # one block of the quantised types
RNG = np.random.default_rng(0)
DIRECTIONS = {layer: RNG.standard_normal(WIDTH).astype(np.float32) for layer in (12, 10, 11)}


def write(path, directions, hint="llama", architecture="controlvector", order="LITTLE", **tensor):
    """A control vector as repeng's `ControlVector.export_gguf` writes it."""
    writer = gguf.GGUFWriter(path, architecture, endianess=gguf.GGUFEndian[order])
    writer.add_string(f"{architecture}.model_hint", hint)
    writer.add_uint32(f"{architecture}.layer_count", len(directions))
    for layer, row in directions.items():
        writer.add_tensor(f"direction.{layer}", row, **tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stacked(directions) -> np.ndarray:
    return np.stack([directions[layer] for layer in sorted(directions)])


def test_direction_n_acts_where_block_n_leaves_with_a_row_per_layer_that_is_named(tmp_path):
    write(tmp_path / "joy.gguf", DIRECTIONS)
    found = rheostat.load_vector(tmp_path / "joy.gguf")
    expected = rheostat.inline(stacked(DIRECTIONS), points="resid_post", layers=[10, 11, 12])
    assert found == expected
    assert found.description == "control vector for llama"


def test_a_file_that_is_not_gguf_is_refused_with_the_reason(tmp_path):
    path = tmp_path / "joy.gguf"
    path.write_text("hi")
    with pytest.raises(rheostat.InvalidRequest, match="it is not a GGUF file"):
        rheostat.load_vector(path)


def test_repeng_s_first_block_is_layer_0(tmp_path):
    write(tmp_path / "joy.gguf", {0: DIRECTIONS[10], 1: DIRECTIONS[11]}, hint="unknown")
    found = rheostat.load_vector(tmp_path / "joy.gguf")
    assert (found.layers, found.description) == ((0, 1), "")


def test_a_saved_vector_is_what_llama_cpp_asks_for(tmp_path):
    path = tmp_path / "joy.gguf"
    vector = rheostat.inline(stacked(DIRECTIONS), points="resid_post", layers=range(10, 13))
    rheostat.save_vector(path, vector, model_hint="llama")
    reader = gguf.GGUFReader(path)
    fields = {
        key: reader.get_field(key).contents()
        for key in ("general.architecture", "controlvector.model_hint", "controlvector.layer_count")
    }
    assert list(fields.values()) == ["controlvector", "llama", 3]
    assert [(t.name, t.tensor_type.name, t.shape.tolist()) for t in reader.tensors] == [
        (f"direction.{layer}", "F32", [WIDTH]) for layer in (10, 11, 12)
    ]
    for tensor in reader.tensors:
        assert np.array_equal(tensor.data, DIRECTIONS[int(tensor.name[10:])])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_numbers_come_back_as_float32_exactly_with_name_and_description(tmp_path, dtype):
    path = tmp_path / "joy.gguf"
    whole = rheostat.inline(stacked(DIRECTIONS), points="post_block", layers=(1, 4, 9), dtype=dtype)
    written = rheostat.Vector(
        whole.digest, "tone/joy", whole.shape, whole.dtype, whole.points, whole.layers, whole.rows,
        description="glad, ünï",
    )  # fmt: skip
    rheostat.save_vector(path, written)
    read = rheostat.load_vector(path)
    assert (read.name, read.description, read.dtype) == ("tone/joy", "glad, ünï", "float32")
    assert (read.points, read.layers) == ((Point.RESID_POST,), (1, 4, 9))
    assert np.array_equal(read.values.view(np.uint32), written.values.view(np.uint32))


def test_one_row_for_several_layers_is_written_for_each(tmp_path):
    path = tmp_path / "joy.gguf"
    rheostat.save_vector(path, rheostat.inline(DIRECTIONS[10], points="resid_post", layers=[3, 5]))
    read = rheostat.load_vector(path)
    assert read == rheostat.inline(
        np.stack([DIRECTIONS[10]] * 2), points="resid_post", layers=[3, 5]
    )


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_other_types_are_widened_as_their_format_defines(tmp_path, kind):
    path = tmp_path / "joy.gguf"
    dtype = gguf.GGMLQuantizationType[kind]
    packed = gguf.quants.quantize(DIRECTIONS[10], dtype)
    write(path, {7: packed}, raw_dtype=dtype if kind != "F16" else None)
    expected = gguf.quants.dequantize(packed, dtype)
    assert np.array_equal(rheostat.load_vector(path).values, expected[None, :])


@pytest.mark.parametrize(
    ("directions", "fields", "said"),
    [
        ({}, {}, "names no layer: it needs tensors direction.1"),
        ({"x": np.ones(4, np.float32)}, {}, "names no layer"),
        ({1: np.ones(4, np.float32), 2: np.ones(8, np.float32)}, {}, "of several widths"),
        ({1: np.ones((1, 4), np.float32)}, {}, "direction.1 of rank 2"),
        ({1: np.array([1, np.nan], np.float32)}, {}, "not finite"),
        ({1: np.array([1, np.inf], np.float16)}, {}, "not finite"),
        ({1: np.ones(4, np.int32)}, {}, "has direction.1 as I32: save it as F32"),
        (
            {1: np.ones(4, np.float32)},
            {"order": "BIG"},
            "another byte order than this machine: convert it with gguf-convert-endian",
        ),
        (
            {1: np.ones(4, np.float32)},
            {"architecture": "llama"},
            'its general.architecture is "llama"',
        ),
    ],
)
def test_a_file_that_is_no_control_vector_says_what_is_wrong(tmp_path, directions, fields, said):
    path = tmp_path / "joy.gguf"
    write(path, directions, **fields)
    with pytest.raises(rheostat.InvalidRequest) as raised:
        rheostat.load_vector(path)
    assert raised.value.path == str(path)
    assert said in raised.value.message


def test_a_file_that_cannot_be_written_whole_is_closed(tmp_path, monkeypatch):
    class Full(gguf.GGUFWriter):
        def write_tensors_to_file(self) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            closed.append(self.fout[0])
            super().close()

    closed = []
    monkeypatch.setattr(gguf, "GGUFWriter", Full)
    vector = rheostat.inline(np.ones(4), points="resid_post", layers=1)
    with pytest.raises(rheostat.InvalidRequest, match="No space left"):
        rheostat.save_vector(tmp_path / "joy.gguf", vector)
    assert (list(tmp_path.iterdir()), [file.closed for file in closed]) == ([], [True])


def test_a_layer_that_is_named_twice_is_refused(tmp_path):
    write(tmp_path / "joy.gguf", {"1": DIRECTIONS[10], "01": DIRECTIONS[11]})
    with pytest.raises(rheostat.InvalidRequest, match="names layer 1 twice"):
        rheostat.load_vector(tmp_path / "joy.gguf")


@pytest.mark.parametrize(
    ("rows", "points", "layers", "path", "said"),
    [
        (1, "resid_pre", [1], "points", "act at resid_post, but this vector at resid_pre"),
        (1, ["resid_post", "mlp_out"], [1], "points", "at resid_post+mlp_out"),
        (1, None, None, "points", "but this vector at no point"),
        (1, "resid_post", "all", "layers", "name their layers by number"),
        (1, "resid_post", None, "layers", "name their layers by number"),
        (2, "resid_post", [0, 1], "layers", "begin at layer 1; llama.cpp cannot steer layer 0"),
        (2, "resid_post", [1, 2, 3], "layers", "2 rows for 3 layers"),
    ],
)
def test_a_vector_that_the_format_cannot_hold_is_refused_and_leaves_no_file(
    tmp_path, rows, points, layers, path, said
):
    vector = rheostat.inline(np.ones((rows, 4)), points=points, layers=layers)
    with pytest.raises(rheostat.InvalidRequest) as raised:
        rheostat.save_vector(tmp_path / "joy.gguf", vector)
    assert raised.value.path == path
    assert said in raised.value.message
    assert list(tmp_path.iterdir()) == []
