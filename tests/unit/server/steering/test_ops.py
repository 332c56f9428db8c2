"""Every op: the act that it becomes, and all that is refused of it."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine import OPEN_END, Act, Band, Kind, TokenCondition
from rheostat_engine.plan.plan import read_plan, steering_of
from rheostat_server import errors
from rheostat_server.steering.directions import DEPENDENT
from rheostat_wire.v1 import receipt_pb2, steering_pb2, types_pb2, vector_pb2

from ..admissions import admission_context, admitted, named, refused, stored
from ..fakes import WIDTH
from ..messages import (
    FIRST,
    FOURTH,
    ONES,
    PROMPT,
    SECOND,
    THIRD,
    ablate,
    add,
    at_post1,
    band,
    clamp,
    norm_add,
    request,
    scaled,
    selector,
    site_set,
    tensor,
    token_range,
    window,
)

PRE, MID, POST = types_pb2.POINT_RESID_PRE, types_pb2.POINT_RESID_MID, types_pb2.POINT_RESID_POST
STEER = "steering.interventions[0]"
ALWAYS = ((0, OPEN_END),)
POST1 = 8
"""Index of the site resid_post 1."""


def acts(*steer: steering_pb2.Intervention, at=None) -> tuple[Act, ...]:
    return admitted(request(steer=steer), at).plan.acts


def digest(values: np.ndarray) -> bytes:
    ((add_digest,),) = [act.vectors for act in acts(add(tensor(values)))]
    return add_digest


def test_norm_add_scales_with_the_stream() -> None:
    assert acts(norm_add(tensor(2 * ONES), -0.5), norm_add()) == (
        Act(Kind.NORM_ADD, (digest(2 * ONES),), ((POST1, (0,)),), ALWAYS, scale=-0.5),
        Act(Kind.NORM_ADD, (digest(ONES),), ((POST1, (0,)),), ALWAYS),
    )


def test_ablate_pulls_a_span_to_zero() -> None:
    assert acts(ablate(tensor(FIRST), tensor(ONES), strength=0.25)) == (
        Act(
            Kind.PULL,
            (digest(FIRST), digest(ONES)),
            ((POST1, (0, 0)),),
            ALWAYS,
            bands=(Band(0, 0, 0.25),) * 2,
            orthogonal=True,
        ),
    )


def test_clamp_pulls_into_bands_one_after_the_other() -> None:
    given_bands = (
        band(tensor(FIRST), -1.0, max=2.0),
        band(tensor(SECOND), max=0.5, strength=0.5),
        band(tensor(THIRD), 3.0),
    )
    assert acts(clamp(*given_bands)) == (
        Act(
            Kind.PULL,
            (digest(FIRST), digest(SECOND), digest(THIRD)),
            ((POST1, (0, 0, 0)),),
            ALWAYS,
            bands=(Band(-1, 2, 1), Band(-math.inf, 0.5, 0.5), Band(3, math.inf, 1)),
        ),
    )


def test_scale_pulls_the_other_part_to_zero() -> None:
    assert [act.bands for act in acts(scaled(-1.0), scaled(0.0), scaled(1.5))] == [
        (Band(0, 0, 2),),
        (Band(0, 0, 1),),
        (Band(0, 0, -0.5),),
    ]
    assert acts(scaled(0.0))[0].orthogonal is False


def test_each_vector_of_an_op_has_its_own_row_at_each_layer() -> None:
    by_layer = tensor(np.arange(1, 2 * WIDTH + 1).reshape(2, WIDTH))
    one = ablate(by_layer, tensor(FIRST), sites=site_set(MID, POST, layers=[2, 0]))
    assert acts(one)[0].rows == ((2, (0, 0)), (4, (0, 0)), (10, (1, 0)), (12, (1, 0)))


def of_layers(values: np.ndarray, *layers: int) -> vector_pb2.VectorRef:
    ref = tensor(values)
    ref.row_layers.layers.extend(layers)
    return ref


def test_rows_act_at_the_layers_that_they_are_said_to_belong_to() -> None:
    rows = np.arange(1, 2 * WIDTH + 1).reshape(2, WIDTH)
    (first,) = acts(add(of_layers(rows, 2, 1)))
    assert first.rows == ((POST1, (1,)),)
    (both,) = acts(add(of_layers(rows, 2, 0), sites=site_set(POST, layers=[0, 2])))
    assert both.rows == ((4, (1,)), (12, (0,)))
    zero_elsewhere = np.concatenate([0 * ONES, ONES])
    assert acts(norm_add(of_layers(zero_elsewhere, 0, 1)))[0].rows == ((POST1, (1,)),)


@pytest.mark.parametrize(
    ("layers", "error", "field"),
    [
        ([0, 2], errors.VectorShape, "add.vector"),
        ([1], errors.VectorShape, "add.vector"),
        ([0, 1, 2], errors.VectorShape, "add.vector"),
        ([1, 1], errors.InvalidValue, "add.vector.row_layers.layers"),
        (range(1025), errors.InvalidValue, "add.vector.row_layers.layers"),
    ],
)
def test_rows_that_belong_to_other_layers_are_refused(layers, error, field) -> None:
    ref = of_layers(np.ones((2, WIDTH)), *layers)
    assert refused(request(steer=[add(ref)])) == (error, f"{STEER}.{field}")


def test_to_name_no_layers_for_rows_is_refused() -> None:
    ref = tensor(ONES)
    ref.row_layers.SetInParent()
    assert refused(request(steer=[add(ref)])) == (
        errors.InvalidValue,
        f"{STEER}.add.vector.row_layers.layers",
    )


def test_acts_keep_the_order_of_the_interventions() -> None:
    mixed = acts(scaled(2.0), add(), clamp(band(low=0.0)), norm_add(), ablate(tensor(ONES)))
    assert [act.kind for act in mixed] == [
        Kind.PULL,
        Kind.ADD,
        Kind.PULL,
        Kind.NORM_ADD,
        Kind.PULL,
    ]


def test_conditions_on_generated_tokens_are_part_of_the_act() -> None:
    (act,) = acts(norm_add(where=selector(PROMPT, token_range(50), exclude=[token_range(11)])))
    assert (act.spans, act.conditions) == (
        ((0, 1), (2, 3)),
        (TokenCondition(((3, OPEN_END),), (50,), True),),
    )


def test_the_engine_reads_every_act_as_it_was_written() -> None:
    where = selector(PROMPT, token_range(50, 12), window(3, 4), exclude=[token_range(99)])
    steer = [
        add(where=where),
        norm_add(where=where),
        ablate(tensor(FIRST), tensor(ONES), where=where),
        clamp(band(low=1.0), band(max=-2.0), where=where),
        scaled(-3.0, where=where),
    ]
    plan = admitted(request(steer=steer)).plan
    assert len(plan.acts) == 5
    sealed, table = read_plan(plan.to_wire()).acts, plan.packed_acts.table
    assert sealed is not None
    assert table is not None
    found = steering_of(sealed)
    assert (found.acts, found.clauses, found.sets) == (table.acts, table.clauses, table.sets)
    assert found.intervals.members == table.intervals.members
    assert found.intervals.starts.tolist() == table.intervals.starts.tolist()
    assert found.intervals.sets.tolist() == table.intervals.sets.tolist()


@pytest.mark.parametrize(
    "idle",
    [
        norm_add(scale=0.0),
        ablate(tensor(ONES), strength=0.0),
        clamp(band(low=1.0, strength=0.0)),
        scaled(1.0),
        scaled(0.0, where=selector(PROMPT, exclude=[PROMPT])),
    ],
)
def test_what_changes_no_bit_has_no_act(idle) -> None:
    got = admitted(request(steer=[idle]))
    assert (got.plan.acts, got.vectors, len(got.interventions)) == ((), (), 1)


def test_a_band_without_strength_is_left_out_of_its_act() -> None:
    one = clamp(band(tensor(FIRST), 1.0, strength=0.0), band(tensor(SECOND), 2.0))
    got = admitted(request(steer=[one]))
    (act,) = got.plan.acts
    assert (act.vectors, act.rows, act.bands) == (
        (digest(SECOND),),
        ((POST1, (0,)),),
        (Band(2, math.inf, 1),),
    )
    assert [vector.digest for vector in got.vectors] == [digest(SECOND)]
    assert [v.digest for v in got.interventions[0].op.vectors] == [digest(FIRST), digest(SECOND)]


ZERO = tensor(np.zeros((1, WIDTH)))
DIRECTIONS = [tensor(one) for one in (FIRST, SECOND, THIRD, FOURTH)]
LONG = np.concatenate([FIRST, 0 * FIRST])
UNIT = vector_pb2.Readout(normalise=vector_pb2.NORMALISE_UNIT)
BARE = {
    "norm_add": steering_pb2.NormAdd(),
    "clamp": steering_pb2.Clamp(bands=[steering_pb2.Band(min=1)]),
    "scale": steering_pb2.Scale(factor=2),
}


@pytest.mark.parametrize(
    ("intervention", "error", "field"),
    [
        (at_post1(norm_add=BARE["norm_add"]), errors.MissingField, "norm_add.vector"),
        (norm_add(vector_pb2.VectorRef()), errors.MissingField, "norm_add.vector"),
        (norm_add(scale=math.nan), errors.NonFinite, "norm_add.scale"),
        (norm_add(scale=-math.inf), errors.NonFinite, "norm_add.scale"),
        (norm_add(ZERO), errors.ZeroVector, "norm_add.vector"),
        (norm_add(ZERO, 0.0), errors.ZeroVector, "norm_add.vector"),
        (norm_add(named("gone")), errors.NameNotFound, "norm_add.vector.name"),
        (norm_add(tensor(np.ones((2, WIDTH)))), errors.VectorShape, "norm_add.vector"),
        (
            norm_add(tensor(LONG), sites=site_set(POST, layers=[0, 1])),
            errors.ZeroVector,
            "norm_add.vector",
        ),
        (norm_add(tensor(ONES * np.nan)), errors.NonFinite, "norm_add.vector.inline.inline"),
        (ablate(), errors.MissingField, "ablate.directions"),
        (ablate(*DIRECTIONS * 3), errors.InvalidValue, "ablate.directions"),
        (
            ablate(tensor(ONES), vector_pb2.VectorRef()),
            errors.MissingField,
            "ablate.directions[1]",
        ),
        (ablate(tensor(ONES), named("gone")), errors.NameNotFound, "ablate.directions[1].name"),
        (ablate(tensor(ONES), ZERO), errors.ZeroVector, "ablate.directions[1]"),
        (
            ablate(tensor(ONES), tensor(np.ones((3, WIDTH)))),
            errors.VectorShape,
            "ablate.directions[1]",
        ),
        (ablate(tensor(ONES), tensor(-3 * ONES)), errors.InvalidValue, "ablate.directions[1]"),
        (
            ablate(tensor(FIRST), tensor(SECOND), tensor(5 * SECOND - FIRST), strength=0.0),
            errors.InvalidValue,
            "ablate.directions[2]",
        ),
        (ablate(tensor(ONES), strength=-0.1), errors.InvalidValue, "ablate.strength"),
        (ablate(tensor(ONES), strength=1.1), errors.InvalidValue, "ablate.strength"),
        (ablate(tensor(ONES), strength=math.nan), errors.NonFinite, "ablate.strength"),
        (clamp(), errors.MissingField, "clamp.bands"),
        (clamp(*[band(low=0.0)] * 9), errors.InvalidValue, "clamp.bands"),
        (at_post1(clamp=BARE["clamp"]), errors.MissingField, "clamp.bands[0].read"),
        (
            clamp(steering_pb2.Band(read=UNIT, min=0.0)),
            errors.MissingField,
            "clamp.bands[0].read.vector",
        ),
        (clamp(band(low=0.0), band()), errors.MissingField, "clamp.bands[1]"),
        (clamp(band(low=1.0, max=0.5)), errors.InvalidValue, "clamp.bands[0].max"),
        (clamp(band(low=math.nan)), errors.NonFinite, "clamp.bands[0].min"),
        (clamp(band(low=-math.inf)), errors.NonFinite, "clamp.bands[0].min"),
        (clamp(band(max=math.inf)), errors.NonFinite, "clamp.bands[0].max"),
        (
            clamp(band(low=0.0), band(low=0.0, strength=2.0)),
            errors.InvalidValue,
            "clamp.bands[1].strength",
        ),
        (clamp(band(low=0.0, strength=math.inf)), errors.NonFinite, "clamp.bands[0].strength"),
        (clamp(band(ZERO, 0.0)), errors.ZeroVector, "clamp.bands[0].read.vector"),
        (clamp(band(ZERO, 0.0, strength=0.0)), errors.ZeroVector, "clamp.bands[0].read.vector"),
        (scaled(), errors.MissingField, "scale.factor"),
        (scaled(math.inf), errors.NonFinite, "scale.factor"),
        (at_post1(scale=BARE["scale"]), errors.MissingField, "scale.read"),
        (
            at_post1(scale=steering_pb2.Scale(read=UNIT, factor=2.0)),
            errors.MissingField,
            "scale.read.vector",
        ),
        (scaled(2.0, ZERO), errors.ZeroVector, "scale.read.vector"),
        (scaled(1.0, ZERO), errors.ZeroVector, "scale.read.vector"),
        (scaled(2.0, named("/")), errors.InvalidValue, "scale.read.vector.name"),
        (
            scaled(2.0, vector_pb2.VectorRef(digest=bytes(32))),
            errors.VectorNotFound,
            "scale.read.vector.digest",
        ),
        (scaled(2.0, sites=site_set(PRE, POST)), errors.InvalidValue, "sites"),
    ],
)
def test_a_wrong_op_is_refused_by_field(intervention, error, field) -> None:
    assert refused(request(steer=[intervention])) == (error, f"{STEER}.{field}")


def test_what_is_added_may_be_zero() -> None:
    assert admitted(request(steer=[add(ZERO)])).plan.acts == ()


def test_directions_must_be_independent_at_every_layer() -> None:
    both = site_set(POST, layers=[0, 1])
    first = tensor(np.concatenate([FIRST, FIRST]))
    apart = tensor(np.concatenate([SECOND, THIRD]))
    alike = tensor(np.concatenate([SECOND, 2 * FIRST]))
    assert len(acts(ablate(first, apart, sites=both))) == 1
    with pytest.raises(errors.InvalidValue) as caught:
        admitted(request(steer=[ablate(first, alike, sites=both)]))
    assert caught.value.field == f"{STEER}.ablate.directions[1]"
    assert caught.value.message.startswith("row 1 lies in the span of the directions before it")


def test_bands_of_one_direction_may_meet() -> None:
    assert len(acts(clamp(band(low=0.0), band(max=3.0)))) == 1


@pytest.mark.parametrize(("factor", "dependent"), [(0.5, True), (2.0, False)])
def test_directions_are_dependent_within_a_part_of_their_norm(factor, dependent) -> None:
    tilt = factor * DEPENDENT
    nearly = tensor(1e6 * (math.cos(tilt) * FIRST + math.sin(tilt) * SECOND))
    message = request(steer=[ablate(tensor(3 * FIRST), nearly)])
    if dependent:
        assert refused(message) == (errors.InvalidValue, f"{STEER}.ablate.directions[1]")
    else:
        assert len(admitted(message).plan.acts) == 1


@given(st.lists(st.tuples(*[st.integers(-2, 2)] * WIDTH), min_size=2, max_size=WIDTH))
def test_directions_are_dependent_where_the_matrix_lacks_rank(rows) -> None:
    # The Gram determinant of integers is one: a rest is 0 or at least 1/64, of a norm of at most 4.
    matrix = np.array(rows, dtype=np.float32)
    message = request(steer=[ablate(*(tensor(row[None]) for row in matrix))])
    if any(not row.any() for row in matrix):
        assert refused(message)[0] is errors.ZeroVector
        return
    ranks = [np.linalg.matrix_rank(matrix[: k + 1].astype(np.float64)) for k in range(len(rows))]
    first = next((k for k, rank in enumerate(ranks) if rank <= k), None)
    if first is None:
        assert len(admitted(message).plan.acts) == 1
    else:
        assert refused(message) == (errors.InvalidValue, f"{STEER}.ablate.directions[{first}]")


def test_named_vectors_serve_every_op() -> None:
    at = admission_context()
    vector = stored(at)
    steer = [
        norm_add(named()),
        ablate(named()),
        clamp(band(named(), 0.0)),
        scaled(2.0, named()),
    ]
    got = admitted(request(steer=steer), at)
    assert {act.vectors for act in got.plan.acts} == {(vector.digest,)}
    assert got.vectors == (vector,)
    assert [one.op.op for one in got.interventions] == [
        receipt_pb2.OP_NORM_ADD,
        receipt_pb2.OP_ABLATE,
        receipt_pb2.OP_CLAMP,
        receipt_pb2.OP_SCALE,
    ]


def test_too_many_steps_at_one_site_are_refused() -> None:
    eight = [band(tensor(ONES), float(i)) for i in range(8)]
    assert len(acts(*[clamp(*eight)] * 8)) == 8
    with pytest.raises(errors.InvalidValue) as caught:
        admitted(request(steer=[*[clamp(*eight)] * 8, scaled(2.0)]))
    assert (caught.value.field, caught.value.message) == (
        "steering",
        "65 steps meet at one site; at most 64 can",
    )
    apart = [
        *[clamp(*eight, where=selector(window(0, 1)))] * 8,
        scaled(2.0, where=selector(window(1, 2))),
    ]
    assert len(acts(*apart)) == 9


def test_too_many_sets_of_token_ids_are_refused() -> None:
    steer = [norm_add(where=selector(token_range(50 + i))) for i in range(5)]
    assert len(acts(*steer[:4])) == 4
    with pytest.raises(errors.InvalidValue) as caught:
        admitted(request(steer=steer))
    assert (caught.value.field, caught.value.message) == (
        "steering",
        "5 different sets of token ids meet at one position; at most 4 can",
    )
