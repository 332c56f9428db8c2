"""Vectors: numbers in, digests, arithmetic, and the interventions that come of them."""

import hashlib

import numpy as np
import pytest
from google.protobuf import text_format

import rheostat
from rheostat._arrays import vector_data
from rheostat._steering.steering import steering_to_wire
from rheostat_wire.v1 import steering_pb2

DIGEST = "ab" * 32


def wire(text: str) -> steering_pb2.Steering:
    return text_format.Parse(text, steering_pb2.Steering())


def stored(**fields: object) -> rheostat.Vector:
    return rheostat.Vector(
        DIGEST, "joy", (1, 3), "float32", (rheostat.Point.RESID_POST,), range(2, 6), **fields
    )


class FakeTensor:
    """What torch's tensors look like to the client; a bfloat16 one refuses numpy()."""

    def __init__(self, array: np.ndarray, bfloat16: bool = False) -> None:
        self.array, self.bfloat16 = array, bfloat16

    def detach(self) -> "FakeTensor":
        return self

    cpu = detach

    def float(self) -> "FakeTensor":
        return FakeTensor(self.array)

    def numpy(self) -> np.ndarray:
        if self.bfloat16:
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self.array


def test_the_digest_is_that_of_the_canonical_form():
    array = np.array([[1.0, -2.0, 0.5], [0.0, -0.0, 3.0]], np.float32)
    expected = hashlib.sha256(b"rheostat.v1 vector float32 2x3\n" + array.tobytes()).hexdigest()
    assert rheostat.inline(array).digest == expected


@pytest.mark.parametrize(
    ("array", "dtype", "element", "data"),
    [
        (np.array([1.0, -2.0], np.float32), None, "float32", b"\0\0\x80\x3f\0\0\0\xc0"),
        (np.array([1.0, -2.0], ">f4"), None, "float32", b"\0\0\x80\x3f\0\0\0\xc0"),
        (np.array([1.0, -2.0]), None, "float32", b"\0\0\x80\x3f\0\0\0\xc0"),
        ([1, -2], None, "float32", b"\0\0\x80\x3f\0\0\0\xc0"),
        (np.array([1.0, -2.0], np.float16), None, "float16", b"\0\x3c\0\xc0"),
        (np.array([1.0, -2.0]), "float16", "float16", b"\0\x3c\0\xc0"),
        (np.array([0x3F80, 0xC000], np.uint16), "bfloat16", "bfloat16", b"\x80\x3f\0\xc0"),
        (np.array([0x3F80, 0xC000], ">u2"), "bfloat16", "bfloat16", b"\x80\x3f\0\xc0"),
        (np.array([1.0, -2.0]), "bfloat16", "bfloat16", b"\x80\x3f\0\xc0"),
        (FakeTensor(np.array([1.0, -2.0], np.float32)), None, "float32", b"\0\0\x80\x3f\0\0\0\xc0"),
        (FakeTensor(np.array([1.0, -2.0], np.float32), True), None, "bfloat16", b"\x80\x3f\0\xc0"),
        (
            FakeTensor(np.array([1.0, -2.0], np.float32), True),
            "float32",
            "float32",
            b"\0\0\x80\x3f\0\0\0\xc0",
        ),
    ],
)
def test_numbers_travel_little_endian_in_their_own_type(array, dtype, element, data):
    found = vector_data(array, dtype)
    assert (found.element, found.shape, found.data) == (element, (1, 2), data)
    assert found.values.tolist() == [[1.0, -2.0]]


def test_rounding_to_bfloat16_is_to_nearest_even():
    halfway = np.array([0x3F808000, 0x3F818000, 0x3F808001], np.uint32).view(np.float32)
    data = vector_data(halfway, "bfloat16").data
    assert np.frombuffer(data, "<u2").tolist() == [0x3F80, 0x3F82, 0x3F81]


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.zeros((2, 2, 2)), "REASON_VECTOR_SHAPE"),
        (np.float32(1), "REASON_VECTOR_SHAPE"),
        (np.zeros((0, 4)), "REASON_VECTOR_SHAPE"),
        (np.array([1.0, np.nan]), "REASON_NON_FINITE"),
        (np.array([1.0, np.inf], np.float16), "REASON_NON_FINITE"),
        (np.array([1e300]), "REASON_NON_FINITE"),
        (np.array([1j]), "REASON_INVALID_VALUE"),
    ],
)
def test_arrays_that_cannot_be_vectors_are_refused_before_they_are_sent(array, reason):
    with pytest.raises(rheostat.InvalidRequest) as raised:
        rheostat.inline(array)
    assert (raised.value.reason, raised.value.path) == (reason, "vector")


def test_arithmetic_makes_scales_and_leaves_the_vector_alone():
    joy = stored()
    scales = [(joy * 4).scale, (4 * joy).scale, (joy / 2).scale, (-joy).scale]
    scales += [(-(joy * 3) / 2).scale, (np.float32(2) * joy).scale, (joy * np.float32(2)).scale]
    assert scales == [4.0, 4.0, 0.5, -1.0, -1.5, 2.0, 2.0]
    assert joy == stored()


def test_a_dose_acts_at_the_vectors_own_sites_on_every_token():
    expected = wire(
        """interventions {
             sites { points: POINT_RESID_POST range { start: 2 stop: 6 } }
             add { vector { digest: "%s" } scale: 4 }
           }"""
        % (r"\xab" * 32)
    )
    assert steering_to_wire([stored() * 4.0]) == expected


def test_at_replaces_what_it_names_and_keeps_the_rest():
    steer = (stored() * 2).at(points=["pre_attn", "resid_mid"]).at(layers=[7, 3], where="prompt")
    expected = wire(
        """interventions {
             sites {
               points: POINT_RESID_PRE points: POINT_RESID_MID list { layers: 3 layers: 7 }
             }
             where { include { phase: PHASE_PROMPT } }
             add { vector { digest: "%s" } scale: 2 }
           }"""
        % (r"\xab" * 32)
    )
    assert steering_to_wire(steer) == expected


def test_a_bare_vector_a_name_and_a_value_can_all_be_steered_with():
    inline = rheostat.inline(np.array([1.0], np.float32), points="attn_out", layers="all")
    name = rheostat.named("joy", points="mlp_out", layers=0)
    expected = wire(
        r"""interventions {
             sites { points: POINT_RESID_POST range { start: 2 stop: 6 } }
             add { vector { digest: "%s" } scale: 1 }
           }
           interventions {
             sites { points: POINT_ATTN_OUT all {} }
             add {
               vector { inline {
                 dtype: DTYPE_FLOAT32 shape: 1 shape: 1 encoding: ENCODING_RAW
                 inline: "\000\000\200\077"
               } }
               scale: 1
             }
           }
           interventions {
             sites { points: POINT_MLP_OUT list { layers: 0 } }
             add { vector { name: "joy" } scale: -0.5 }
           }"""
        % (r"\xab" * 32)
    )
    assert steering_to_wire([stored(), inline, -name / 2]) == expected


@pytest.mark.parametrize(
    "add",
    [
        lambda: 4 * stored() + 2 * rheostat.named("joy"),
        lambda: stored() + 2 * stored(),
        lambda: rheostat.ablate(stored()) + stored(),
        lambda: 4 * stored() - 2 * rheostat.named("joy"),
        lambda: sum([4 * stored(), 2 * rheostat.named("joy")]),
        lambda: sum([stored(), rheostat.named("joy")]),
    ],
)
def test_interventions_belong_in_a_list_and_a_sum_says_so(add):
    with pytest.raises(rheostat.InvalidRequest, match=r"give them in a list"):
        add()


def test_an_array_of_objects_holds_vectors_themselves():
    one, other = stored(), rheostat.named("joy")
    assert np.array([one, other], dtype=object).tolist() == [one, other]


def test_a_sum_of_vectors_is_answered_with_a_new_vector_of_their_rows():
    a, b = rheostat.inline([1.0, 2.0]), rheostat.inline([3.0, 5.0])
    for add, advice in (
        (lambda: a + b, "steering=[a, b] steers with both; rheostat.inline(a.values + b.values, "),
        (lambda: a - b, "steering=[a, -b] steers with both; rheostat.inline(a.values - b.values, "),
    ):
        with pytest.raises(rheostat.InvalidRequest) as raised:
            add()
        assert advice in raised.value.message
    assert rheostat.inline(a.values + b.values).values.tolist() == [[4.0, 7.0]]


@pytest.mark.parametrize(
    ("steer", "path", "reason"),
    [
        (rheostat.named("joy") * 2, "steering.interventions[1].sites", "REASON_MISSING_FIELD"),
        (
            stored() * float("nan"),
            "steering.interventions[1].add.scale",
            "REASON_NON_FINITE",
        ),
        (
            rheostat.inline(np.ones((3, 2)), points="resid_pre", layers=range(2)),
            "steering.interventions[1].add.vector",
            "REASON_VECTOR_SHAPE",
        ),
    ],
)
def test_doses_that_cannot_be_meant_name_the_field(steer, path, reason):
    with pytest.raises(rheostat.InvalidRequest) as raised:
        steering_to_wire([stored(), steer])
    assert (raised.value.path, raised.value.reason) == (path, reason)


@pytest.mark.parametrize(
    ("points", "layers", "path", "reason"),
    [
        ("resid_mind", 0, "sites.points", "REASON_UNKNOWN_ENUM"),
        ([], 0, "sites.points", "REASON_MISSING_FIELD"),
        (["resid_mid", "post_attn"], 0, "sites.points", "REASON_INVALID_VALUE"),
        ("resid_pre", -1, "sites.layers", "REASON_UNKNOWN_LAYER"),
        ("resid_pre", range(3, 3), "sites.layers", "REASON_INVALID_VALUE"),
        ("resid_pre", [1, 1], "sites.layers", "REASON_INVALID_VALUE"),
        ("resid_pre", "every", "sites.layers", "REASON_INVALID_VALUE"),
        ("resid_pre", 1.5, "sites.layers", "REASON_INVALID_VALUE"),
    ],
)
def test_unknown_points_and_layers_are_refused_before_they_are_sent(points, layers, path, reason):
    with pytest.raises(rheostat.InvalidRequest) as raised:
        rheostat.Capture(points, layers)
    assert (raised.value.path, raised.value.reason) == (path, reason)


def test_a_handle_without_numbers_says_how_to_get_them():
    with pytest.raises(rheostat.Refused) as raised:
        _ = stored().values
    assert (
        str(raised.value) == "joy has no numbers in this client; fetch it with engine.vectors.get"
    )


def test_handles_read_as_what_they_stand_for():
    assert repr(stored()) == "Vector(joy, float32 [1, 3], resid_post, layers 2-5)"
    assert repr(rheostat.named("a/b")) == "Vector(a/b)"
    unnamed = rheostat.inline(np.ones((2, 3)), points=["resid_pre", "resid_mid"], layers=[0, 4])
    expected = f"vector {unnamed.digest[:12]}, float32 [2, 3], resid_pre+resid_mid, layers 0, 4"
    assert repr(unnamed) == f"Vector({expected})"


def rows_of_layers(layers=range(6), **options):
    rows = np.arange(12, dtype=np.float32).reshape(6, 2)
    return rheostat.inline(rows, points="resid_post", layers=layers, **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_some_layers_of_a_vector_are_a_vector_of_their_rows(dtype):
    part = rows_of_layers(dtype=dtype).select(layers=[4, 2])
    assert part.values.tolist() == [[4.0, 5.0], [8.0, 9.0]]
    assert (part.layers, part.layers_of_rows, part.shape) == ((2, 4), (2, 4), (2, 2))
    assert part == rheostat.inline(part.values, points="resid_post", layers=[2, 4], dtype=dtype)
    assert rows_of_layers().select(layers="all") == rows_of_layers()
    assert rows_of_layers("all").select(layers=5).values.tolist() == [[10.0, 11.0]]


def test_some_layers_of_a_stored_vector_take_their_rows_at_the_server():
    vector = rheostat.Vector(DIGEST, "joy", (6, 3), "float32", ("resid_post",), range(6))
    (steered,) = steering_to_wire(vector.select(layers=3) * 0.5).interventions
    (dose,) = steering_to_wire(vector.at(layers=3) * 0.5).interventions
    assert list(steered.add.vector.row_layers.layers) == [0, 1, 2, 3, 4, 5]
    assert steered == dose


def test_one_row_is_the_row_of_any_layer():
    row = rheostat.inline([1.0, 2.0], points="resid_post", layers=3)
    assert row.select(layers=4) == rheostat.inline([1.0, 2.0], points="resid_post", layers=4)
    assert rheostat.named("joy").select(layers=4) == rheostat.named("joy", layers=4)


@pytest.mark.parametrize(
    ("select", "message"),
    [
        (
            lambda: rows_of_layers().select(layers=[5, 6]),
            "has rows for layers 0-5, not for layer 6",
        ),
        (
            lambda: rows_of_layers(None).select(layers=3),
            "has 6 rows whose layers are not known: give them with "
            "dataclasses.replace(vector, layers=range(6))",
        ),
    ],
)
def test_layers_without_a_row_cannot_be_selected(select, message):
    with pytest.raises(rheostat.InvalidRequest) as raised:
        select()
    assert (raised.value.path, raised.value.reason) == ("layers", "REASON_VECTOR_SHAPE")
    assert raised.value.message.endswith(message)


@pytest.mark.parametrize(
    "use",
    [
        lambda engine, dose: engine.vectors.put(dose, name="tone"),
        lambda engine, dose: engine.vectors.set_name("tone", dose),
        lambda _, dose: rheostat.inline(dose),
        lambda _, dose: rheostat.save_vector("tone.npz", dose),
        lambda _, dose: rheostat.Capture("resid_post", projection=dose),
        lambda _, dose: rheostat.Capture("resid_post", projection=[dose]),
        lambda _, dose: rheostat.ablate(dose),
        lambda _, dose: rheostat.clamp(dose, min=0),
    ],
)
def test_a_dose_in_the_place_of_a_vector_is_answered_with_how_to_take_a_layer(
    client, server, use, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(rheostat.InvalidRequest) as raised:
        client.run(lambda engine: use(engine, rows_of_layers().at(layers=3)))
    assert "this is a dose, not a vector" in raised.value.message
    assert "vector.select(layers=3) is a vector of the row of layer 3" in raised.value.message
    assert (server.asked, list(tmp_path.iterdir())) == ([], [])


@pytest.mark.parametrize(
    ("layers", "message"),
    [(3, "4 rows for 1 layer (3): a vector"), (range(3), "4 rows for 3 layers (0-2): a vector")],
)
def test_rows_that_are_not_one_for_each_layer_are_not_sent(client, server, layers, message):
    with pytest.raises(rheostat.InvalidRequest) as raised:
        client.run(
            lambda engine: engine.vectors.put(
                np.ones((4, 2)), points="resid_post", layers=layers, name="bad"
            )
        )
    assert (raised.value.path, raised.value.reason) == ("layers", "REASON_VECTOR_SHAPE")
    assert raised.value.message.startswith(message)
    assert server.asked == []


GET_TONE = (
    ', or use engine.vectors.get("tone"), which returns those that were stored with it, and raises '
    "NotFound if no vector has this name"
)
NUMBERS = rheostat.inline([1.0, 2.0])


@pytest.mark.parametrize(
    ("steer", "message"),
    [
        (
            rheostat.named("tone"),
            "the client does not know the points and layers of tone: give them, with "
            f".at(points=, layers=){GET_TONE}",
        ),
        (
            rheostat.named("tone").select(layers=12),
            f"the client does not know the points of tone: give them, with .at(points=){GET_TONE}",
        ),
        (
            rheostat.named("tone").at(points="resid_post"),
            f"the client does not know the layers of tone: give them, with .at(layers=){GET_TONE}",
        ),
        (
            NUMBERS,
            f"{NUMBERS.label} has no default points and layers: give them, with "
            ".at(points=, layers=)",
        ),
        (
            NUMBERS.at(layers=3),
            f"{NUMBERS.label} has no default points: give them, with .at(points=)",
        ),
        (
            NUMBERS.at("resid_post"),
            f"{NUMBERS.label} has no default layers: give them, with .at(layers=)",
        ),
    ],
)
def test_missing_points_and_layers_are_named_each(steer, message):
    with pytest.raises(rheostat.InvalidRequest) as raised:
        steering_to_wire(steer)
    assert (raised.value.message, raised.value.reason) == (message, "REASON_MISSING_FIELD")


def test_numpy_reads_the_numbers_of_a_vector():
    vector = rheostat.inline([[1.0, 2.0], [3.0, 4.0]], dtype="float16")
    assert np.asarray(vector).tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert np.asarray(vector).dtype == np.float32
    assert np.asarray(vector, dtype=np.float64).dtype == np.float64
    with pytest.raises(rheostat.Refused, match=r"fetch it with engine\.vectors\.get"):
        np.asarray(stored())


@pytest.mark.parametrize("given", ["text", ["text", "texts"]])
def test_a_text_is_no_vector(client, server, given):
    for use in (rheostat.inline, lambda text: client.run(lambda engine: engine.vectors.put(text))):
        with pytest.raises(
            rheostat.InvalidRequest, match="made of numbers, not of texts"
        ) as raised:
            use(given)
        assert "engine.vectors.derive(positive, negative, " in raised.value.message
    assert server.asked == []
