"""Interventions: what each op says on the wire, what is refused before it, and how it reads."""

import dataclasses
import math

import numpy as np
import pytest
from google.protobuf import text_format

import rheostat
from rheostat import Ablate, Add, Band, Clamp, NormAdd, Point, Scale
from rheostat._steering.steering import steering_to_wire
from rheostat_wire.v1 import steering_pb2

JOY = rheostat.named("joy", points="resid_post", layers=range(2, 6))
FEAR = rheostat.named("fear", points="resid_post", layers=[2, 3, 4, 5])
CALM = rheostat.named("calm", points="resid_mid", layers=1)
BARE = rheostat.named("bare")
SITES = "sites { points: POINT_RESID_POST range { start: 2 stop: 6 } }"


def wire(text: str) -> steering_pb2.Steering:
    text = text.replace("UNIT", "normalise: NORMALISE_UNIT")
    return text_format.Parse(text, steering_pb2.Steering())


@pytest.mark.parametrize(
    ("made", "value", "op"),
    [
        (JOY * 4, Add(JOY, 4.0), 'add { vector { name: "joy" } scale: 4 }'),
        (
            rheostat.norm_add(JOY),
            NormAdd(JOY, 1.0),
            'norm_add { vector { name: "joy" } scale: 1 }',
        ),
        (
            rheostat.norm_add(JOY, -0.25),
            NormAdd(JOY, -0.25),
            'norm_add { vector { name: "joy" } scale: -0.25 }',
        ),
        (
            rheostat.ablate(JOY),
            Ablate((JOY,), 1.0),
            'ablate { directions { name: "joy" } strength: 1 }',
        ),
        (
            rheostat.ablate(JOY, FEAR, BARE, strength=0.5),
            Ablate((JOY, FEAR, BARE), 0.5),
            """ablate {
                 directions { name: "joy" } directions { name: "fear" } directions { name: "bare" }
                 strength: 0.5
               }""",
        ),
        (
            rheostat.clamp(JOY, min=-1, max=2.5, strength=0),
            Clamp((Band(JOY, -1, 2.5, 0),)),
            """clamp {
                 bands { read { vector { name: "joy" } UNIT } min: -1 max: 2.5 strength: 0 }
               }""",
        ),
        (
            rheostat.clamp(JOY, min=0, max=0),
            Clamp((Band(JOY, 0, 0),)),
            'clamp { bands { read { vector { name: "joy" } UNIT } min: 0 max: 0 strength: 1 } }',
        ),
        (
            rheostat.clamp(rheostat.band(JOY, max=0), rheostat.band(FEAR, 1, strength=0.5)),
            Clamp((Band(JOY, None, 0), Band(FEAR, 1, None, 0.5))),
            """clamp {
                 bands { read { vector { name: "joy" } UNIT } max: 0 strength: 1 }
                 bands { read { vector { name: "fear" } UNIT } min: 1 strength: 0.5 }
               }""",
        ),
        (
            rheostat.scale(JOY, np.float32(-1)),
            Scale(JOY, -1),
            'scale { read { vector { name: "joy" } UNIT } factor: -1 }',
        ),
    ],
)
def test_an_op_says_its_formulas_numbers_at_the_vectors_own_sites(made, value, op):
    assert made == value
    assert steering_to_wire(made) == wire(f"interventions {{ {SITES} {op} }}")


@pytest.mark.parametrize(
    "made",
    [
        CALM * 2,
        rheostat.norm_add(CALM),
        rheostat.ablate(CALM, JOY),
        rheostat.clamp(CALM, min=0),
        rheostat.scale(CALM, 0),
    ],
)
def test_every_op_can_act_elsewhere_and_stays_what_it_is(made):
    moved = made.at(points=["resid_pre", "attn_out"], layers="all").at(where="prompt")
    (sent,) = steering_to_wire(moved).interventions
    expected = wire(
        """interventions {
             sites { points: POINT_RESID_PRE points: POINT_ATTN_OUT all {} }
             where { include { phase: PHASE_PROMPT } }
           }"""
    ).interventions[0]
    assert (sent.sites, sent.where) == (expected.sites, expected.where)
    assert type(moved) is type(made)
    assert dataclasses.replace(moved, points=None, layers=None, where=made.where) == made


def test_a_list_keeps_the_order_of_its_ops():
    steering = [JOY, rheostat.ablate(FEAR), JOY * 2, rheostat.scale(JOY, 0)]
    sent = steering_to_wire(steering)
    ops = [one.WhichOneof("op") for one in sent.interventions]
    assert ops == ["add", "ablate", "add", "scale"]


ZERO = rheostat.inline(np.array([[1.0, 2.0], [0.0, 0.0]]), points="resid_pre", layers=range(2))
THREE = rheostat.inline(np.ones((3, 2)), points="resid_pre", layers=range(2))


@pytest.mark.parametrize(
    ("made", "path", "reason", "message"),
    [
        (
            rheostat.norm_add(JOY, math.inf),
            "norm_add.scale",
            "REASON_NON_FINITE",
            "the scale is not finite",
        ),
        (JOY * 1e39, "add.scale", "REASON_NON_FINITE", "the scale is not finite"),
        (
            JOY * -1e-50,
            "add.scale",
            "REASON_INVALID_VALUE",
            "the scale -1e-50 is 0 in float32: write 0, or 1e-45 and above",
        ),
        (
            rheostat.scale(JOY, "much"),
            "scale.factor",
            "REASON_INVALID_VALUE",
            "the factor is a number, not 'much'",
        ),
        (
            rheostat.norm_add(ZERO),
            "norm_add.vector",
            "REASON_ZERO_VECTOR",
            f"{ZERO.label} is zero and has no direction",
        ),
        (
            rheostat.clamp(ZERO, min=0),
            "clamp.bands[0].read.vector",
            "REASON_ZERO_VECTOR",
            f"{ZERO.label} is zero and has no direction",
        ),
        (
            rheostat.ablate(BARE, THREE),
            "ablate.directions[1]",
            "REASON_VECTOR_SHAPE",
            f"{THREE.label} has 3 rows for 2 layers (0-1)",
        ),
        (
            rheostat.ablate(),
            "",
            "REASON_MISSING_FIELD",
            "an op without a vector does nothing",
        ),
        (
            rheostat.ablate(*[JOY] * 9),
            "ablate.directions",
            "REASON_INVALID_VALUE",
            "9 directions; at most 8 go together",
        ),
        (
            rheostat.ablate(JOY, strength=1.5),
            "ablate.strength",
            "REASON_INVALID_VALUE",
            "a strength is 0 to 1, not 1.5",
        ),
        (
            rheostat.ablate(JOY, strength=math.nan),
            "ablate.strength",
            "REASON_NON_FINITE",
            "the strength is not finite",
        ),
        (
            rheostat.clamp(*[Band(JOY, 0)] * 9),
            "clamp.bands",
            "REASON_INVALID_VALUE",
            "9 bands; at most 8 go together",
        ),
        (
            rheostat.clamp(JOY, max=math.nan),
            "clamp.bands[0].max",
            "REASON_NON_FINITE",
            "the max is not finite",
        ),
        (
            rheostat.clamp(JOY, min=0, strength=-0.1),
            "clamp.bands[0].strength",
            "REASON_INVALID_VALUE",
            "a strength is 0 to 1, not -0.1",
        ),
        (
            rheostat.scale(BARE, 2),
            "sites",
            "REASON_MISSING_FIELD",
            "the client does not know the points and layers of bare: give them, with "
            '.at(points=, layers=), or use engine.vectors.get("bare"), which returns those that '
            "were stored with it, and raises NotFound if no vector has this name",
        ),
        (
            rheostat.ablate(JOY, CALM),
            "sites",
            "REASON_INVALID_VALUE",
            "the vectors are meant for different sites: give the sites, with .at(points=, layers=)",
        ),
    ],
)
def test_what_an_op_cannot_mean_names_the_field(made, path, reason, message):
    with pytest.raises(rheostat.InvalidRequest) as raised:
        steering_to_wire([JOY, made])
    found = raised.value
    field = f"steering.interventions[1].{path}".rstrip(".")
    assert (found.path, found.reason, found.message) == (field, reason, message)


@pytest.mark.parametrize("make", [rheostat.clamp, rheostat.band])
@pytest.mark.parametrize(
    ("bounds", "path", "reason", "message"),
    [
        ({}, "clamp", "REASON_MISSING_FIELD", "a band needs min, max or both"),
        (
            {"min": 3, "max": np.float32(1)},
            "clamp.max",
            "REASON_INVALID_VALUE",
            "max 1 is below min 3",
        ),
    ],
)
def test_bounds_that_no_number_meets_are_refused_at_once(make, bounds, path, reason, message):
    with pytest.raises(rheostat.InvalidRequest) as raised:
        make(JOY, **bounds)
    assert (raised.value.path, raised.value.reason, raised.value.message) == (path, reason, message)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: rheostat.ablate(JOY, "fear"),
            'ablate takes vectors, not a name: use rheostat.named("fear", points=..., layers=...)',
        ),
        (
            lambda: rheostat.norm_add(np.ones(2)),
            "norm_add takes vectors, not ndarray: "
            "use rheostat.inline(array, points=..., layers=...)",
        ),
        (
            lambda: rheostat.scale(JOY * 2, 0),
            "scale takes vectors: this is a dose, not a vector, as .at(...) and a scale make "
            "doses: pass its vector; vector.select(layers=3) is a vector of the row of layer 3",
        ),
        (
            lambda: steering_to_wire([rheostat.band(JOY, min=0)]),
            "a band acts in a clamp: use rheostat.clamp(rheostat.band(...))",
        ),
        *(
            (
                make,
                "clamp takes one vector with min and max, or bands alone: "
                "clamp(band(a, min=0), band(b, max=1))",
            )
            for make in (
                lambda: rheostat.clamp(min=0),
                lambda: rheostat.clamp(JOY, FEAR, min=0),
                lambda: rheostat.clamp(JOY, Band(FEAR, 0)),
                lambda: rheostat.clamp(Band(FEAR, 0), max=3),
            )
        ),
    ],
)
def test_what_is_no_direction_is_refused_where_it_is_written(make, message):
    with pytest.raises(rheostat.InvalidRequest) as raised:
        make()
    assert raised.value.message == message


def test_the_smallest_scales_that_float32_holds_are_sent_as_they_are():
    least = float(np.finfo(np.float32).smallest_subnormal)
    for scale, expected in ((least, least), (2.0**-150 * 1.001, least), (-0.0, 0.0)):
        (sent,) = steering_to_wire(JOY * scale).interventions
        assert sent.add.scale == expected


def test_interventions_read_as_what_they_do():
    told = [
        str(one)
        for one in (
            (JOY * 0.5).at(points="resid_mid", layers=range(2, 4), where="prompt"),
            rheostat.norm_add(JOY, 0.1),
            rheostat.ablate(JOY, FEAR, strength=0.5),
            rheostat.clamp(
                Band(JOY, -1, 2), Band(FEAR, None, 0, 0.5), Band(CALM, 3), Band(JOY, 4, 4)
            ),
            rheostat.scale(JOY, -1).at(points=["resid_pre", "resid_mid"], layers="all"),
        )
    ]
    assert told == [
        'add 0.5 * joy at resid_mid 2-3 on "prompt"',
        "norm_add 0.1 * joy",
        "ablate joy, fear (strength 0.5)",
        "clamp joy to -1..2, fear to ..0 (strength 0.5), calm to 3.., joy to 4",
        "scale joy by -1 at resid_pre+resid_mid all",
    ]


def test_interventions_cannot_be_changed_and_name_their_vectors():
    made = rheostat.clamp(Band(JOY, 0), Band(FEAR, 0)).at(points="resid_mid", layers=3)
    assert (made.vectors, made.points, made.layers) == ((JOY, FEAR), (Point.RESID_MID,), (3,))
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.bands = ()


@pytest.mark.parametrize(
    ("meant_for", "layers", "named"),
    [
        ([2, 4, 5], 4, [2, 4, 5]),
        ([2, 4, 5], [2, 5], [2, 4, 5]),
        ("all", [1], [0, 1, 2]),
        ([2, 4, 5], [2, 4, 5], []),
        ("all", "all", []),
        (range(3), [0, 1, 2], []),
        ([2, 4, 5], "all", [2, 4, 5]),
    ],
)
def test_a_vector_of_many_layers_gives_the_rows_of_those_where_it_acts(meant_for, layers, named):
    rows = rheostat.inline(np.eye(3, 8), points="resid_post", layers=meant_for)
    sent = rows.at(layers=layers).to_wire("x").add.vector
    assert list(sent.row_layers.layers) == named


@pytest.mark.parametrize("layers", [[4, 6], [7, 8, 9]])
def test_rows_of_other_layers_are_refused_before_they_are_sent(layers):
    rows = rheostat.inline(np.eye(3, 8), points="resid_post", layers=[2, 4, 5])
    with pytest.raises(rheostat.InvalidRequest, match=r"rows for layers 2, 4, 5, not") as raised:
        rows.at(layers=layers).to_wire("x")
    assert raised.value.reason == "REASON_VECTOR_SHAPE"


def test_rows_act_at_other_layers_once_it_is_said_that_they_are_for_those():
    rows = rheostat.inline(np.eye(3, 8), points="resid_post", layers=[2, 4, 5])
    moved = dataclasses.replace(rows, row_layers=(7, 8, 9)).at(layers=[7, 8, 9])
    assert list(moved.to_wire("x").add.vector.row_layers.layers) == [7, 8, 9]
