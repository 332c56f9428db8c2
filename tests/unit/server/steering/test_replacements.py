"""The rows that a Replace puts in: the acts that they become, and all that is refused of them."""

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np
import pytest

from rheostat_engine import OPEN_END, Act, Kind, Point, Site
from rheostat_server import errors
from rheostat_server.admission.admit import AdmissionContext
from rheostat_server.admission.admitted_request import AdmittedRequest
from rheostat_server.limits import OFFLOAD_BYTES
from rheostat_server.runs.store import Run, RunStore
from rheostat_server.runs.targets import RunTarget
from rheostat_server.sinks import CaptureAbout, Ending, Outcome, RowBlock
from rheostat_server.steering import replacements
from rheostat_server.steering.estimates import estimate_steering
from rheostat_server.steering.replacements import align
from rheostat_server.tensors import FloatType
from rheostat_wire.noise import normal_row
from rheostat_wire.v1 import receipt_pb2, replace_pb2, selector_pb2, steering_pb2, types_pb2

from ..admissions import admission_context, admitted, named, refused, stored
from ..fakes import SITES, WIDTH
from ..messages import (
    ONES,
    PROMPT,
    at_post1,
    generated,
    request,
    selector,
    site_set,
    tensor,
    token_range,
    window,
)

PRE, MID, POST = types_pb2.POINT_RESID_PRE, types_pb2.POINT_RESID_MID, types_pb2.POINT_RESID_POST
OP = "steering.interventions[0].replace"
POST1 = 8
"""Index of the site resid_post 1."""
ZEROS = replace_pb2.ZeroSource()


def replacing(
    *, where: selector_pb2.Selector | None = None, sites: types_pb2.SiteSet | None = None, **fields
) -> steering_pb2.Intervention:
    """A Replace at resid_post 1 and all positions of the prompt, unless arguments say otherwise."""
    others = {} if sites is None else {"sites": sites}
    return at_post1(
        replace=replace_pb2.Replace(**fields), where=where or selector(PROMPT), **others
    )


def admit_one(
    intervention: steering_pb2.Intervention, at: AdmissionContext | None = None
) -> AdmittedRequest:
    return admitted(request(steer=[intervention]), at)


def acts(
    intervention: steering_pb2.Intervention, at: AdmissionContext | None = None
) -> tuple[Act, ...]:
    return admit_one(intervention, at).plan.acts


def refused_one(
    intervention: steering_pb2.Intervention, at: AdmissionContext | None = None
) -> tuple[type, str]:
    return refused(request(steer=[intervention]), at)


def rows_of(at: AdmittedRequest) -> np.ndarray:
    """The rows that are put in, [n, WIDTH]."""
    rows = at.interventions[0].op.vectors[0]
    return np.frombuffer(rows.float32_bytes(), "<f4").reshape(rows.rows, WIDTH)


def with_run(
    rows: np.ndarray | None = None,
    *,
    run_id: str = "clean",
    sites: Sequence[Site] = (Site(Point.RESID_POST, 0), Site(Point.RESID_POST, 1)),
    positions: Sequence[int] = (0, 1, 2, 3),
    tokens: Sequence[int] = (10, 11, 12, 13),
    width: int = WIDTH,
) -> AdmissionContext:
    """An admission whose server stores a run: [sites, positions, width]."""
    if rows is None:
        rows = np.arange(len(sites) * len(positions) * width, dtype=np.float32) + 1
    runs = RunStore(1 << 20)
    about = CaptureAbout(0, tuple(sites), FloatType.FLOAT32, width)
    draft = runs.begin(RunTarget(run_id, 60.0), about, list(tokens), {}, "run", lossless=True)
    block = RowBlock(
        capture_index=0,
        sample=0,
        sites=tuple(sites),
        positions=np.asarray(positions, np.int32),
        token_ids=np.zeros(len(positions), np.int32),
        parts={"rows": rows.reshape(len(sites), len(positions), width)},
    )
    draft.write(block)
    draft.finish(Outcome(Ending.COMPLETE, 0, ("length",)))
    assert draft.keep()
    return dataclasses.replace(admission_context(), runs=runs)


def stored_run(at: AdmissionContext, run_id: str = "clean") -> Run:
    assert at.runs is not None
    run = at.runs.hold(run_id, "")
    at.runs.release(run)
    return run


def from_run(**fields: object) -> steering_pb2.Intervention:
    others = {name: fields.pop(name) for name in ("where", "sites") if name in fields}
    source = replace_pb2.RunSource(**{"run_id": "clean", **fields})
    return replacing(run=source, **others)


def positions(*numbers: int) -> replace_pb2.PositionList:
    return replace_pb2.PositionList(positions=numbers)


def test_one_row_replaces_all_selected_positions() -> None:
    at = admission_context()
    vector = stored(at)
    assert acts(replacing(vector=named(), alpha=0.25), at) == (
        Act(Kind.REPLACE, (vector.digest,), ((POST1, (0,)),), ((0, 3),), scale=0.25),
    )
    later = selector(window(1), generated())
    (act,) = acts(replacing(vector=named(), where=later), at)
    assert act.spans == ((1, OPEN_END),)


def test_zeros_replace_at_all_sites() -> None:
    (act,) = acts(replacing(zeros=ZEROS, sites=site_set(POST, layers=[0, 2])))
    assert act.kind is Kind.REPLACE
    assert tuple(act.rows) == ((4, (0,)), (12, (0,)))
    assert act.scale == 1.0


def test_a_vector_of_several_rows_has_one_for_each_layer() -> None:
    rows = tensor(np.arange(1, 2 * WIDTH + 1).reshape(2, WIDTH))
    (act,) = acts(replacing(vector=rows, sites=site_set(MID, POST, layers=[0, 2])))
    assert tuple(act.rows) == ((2, (0,)), (4, (0,)), (10, (1,)), (12, (1,)))


def test_rows_by_site_and_position_are_an_act_for_each_position() -> None:
    values = np.arange(1, 2 * 2 * WIDTH + 1, dtype=np.float32).reshape(2, 2, WIDTH)
    at = admit_one(
        replacing(
            rows=tensor(values).inline,
            sites=site_set(POST, layers=[0, 1]),
            where=selector(window(0, 1), window(2, 3)),
        )
    )
    first, second = at.plan.acts
    assert (tuple(first.rows), first.spans) == (((4, (0,)), (8, (2,))), ((0, 1),))
    assert (tuple(second.rows), second.spans) == (((4, (1,)), (8, (3,))), ((2, 3),))
    assert np.array_equal(rows_of(at), values.reshape(4, WIDTH))


def test_rows_of_another_shape_are_refused() -> None:
    values = np.ones((1, 2, WIDTH), np.float32)
    assert refused_one(replacing(rows=tensor(values).inline)) == (
        errors.VectorShape,
        f"{OP}.rows.shape",
    )


def test_rows_of_a_run_replace_rows_of_the_same_site_and_position() -> None:
    at = with_run()
    found = admit_one(from_run(), at)
    run = stored_run(at)
    assert np.array_equal(rows_of(found), run.rows(Site(Point.RESID_POST, 1))[:3])
    assert [act.spans for act in found.plan.acts] == [((0, 1),), ((1, 2),), ((2, 3),)]
    replacement = found.interventions[0].op.replacement
    assert replacement is not None
    assert replacement.run_id == "clean"
    assert replacement.positions == replacement.source_positions == (0, 1, 2)
    assert run.users == 0
    assert replacement.sha256 == hashlib.sha256(rows_of(found).tobytes()).digest()


def test_a_run_is_read_under_either_name_of_a_site() -> None:
    at = with_run()
    by_other_name = admit_one(from_run(sites=site_set(PRE, layers=[2])), at)
    assert np.array_equal(rows_of(by_other_name), rows_of(admit_one(from_run(), at)))


def test_positions_of_a_run_may_differ_and_count_from_its_prompts_end() -> None:
    at = with_run()
    found = admit_one(from_run(positions=positions(3, -4), where=selector(window(0, 2))), at)
    rows = stored_run(at).rows(Site(Point.RESID_POST, 1))
    assert np.array_equal(rows_of(found), rows[[3, 0]])


def test_rows_of_another_site_may_be_put_in() -> None:
    at = with_run()
    other = types_pb2.Site(point=POST, layer=0)
    found = admit_one(from_run(site=other, sites=site_set(MID, POST, layers=[2])), at)
    rows = stored_run(at).rows(Site(Point.RESID_POST, 0))[:3]
    assert np.array_equal(rows_of(found), np.concatenate([rows, rows]))


def test_prompts_are_aligned_by_their_ends() -> None:
    at = with_run(tokens=(10, 99, 98, 12))
    aligned = replace_pb2.ALIGNMENT_AFFIXES
    found = admit_one(from_run(alignment=aligned, where=selector(window(0, 1), window(2, 3))), at)
    rows = stored_run(at).rows(Site(Point.RESID_POST, 1))
    assert np.array_equal(rows_of(found), rows[[0, 3]])
    assert refused_one(from_run(alignment=aligned), at) == (errors.RunIncomplete, f"{OP}.run")


@pytest.mark.parametrize(
    ("tokens", "others", "partners"),
    [
        ([1, 2, 3], [1, 2, 3], [0, 1, 2, 3]),
        ([1, 2, 3], [1, 9, 3], [0, -1, 2, 3]),
        ([1, 2, 3], [1, 9, 8, 3], [0, -1, 3, 4]),
        ([1, 2, 2, 3], [1, 2, 3], [0, 1, -1, 2, 3]),
        ([1, 2], [5, 6, 7], [-1, -1, 3]),
        ([1], [1, 1, 1], [0, 3]),
    ],
)
def test_a_position_has_its_partner_or_none(
    tokens: list[int], others: list[int], partners: list[int]
) -> None:
    aligned = align(tokens, others)
    assert [aligned.partner(position) for position in range(len(tokens) + 1)] == partners


def test_the_mean_of_a_run_is_one_row_for_each_site() -> None:
    at = with_run()
    sites = site_set(POST, layers=[0, 1])
    found = admit_one(replacing(mean=replace_pb2.MeanSource(run_id="clean"), sites=sites), at)
    run = stored_run(at)
    means = [run.rows(Site(Point.RESID_POST, layer)).mean(axis=0) for layer in (0, 1)]
    np.testing.assert_allclose(rows_of(found), means, rtol=1e-6)
    (act,) = found.plan.acts
    assert (tuple(act.rows), act.spans) == (((4, (0,)), (8, (1,))), ((0, 3),))
    twice = replace_pb2.MeanSource(run_id="clean", positions=positions(3, -1))
    assert refused_one(replacing(mean=twice), at) == (errors.InvalidValue, f"{OP}.mean.positions")
    some = replace_pb2.MeanSource(run_id="clean", positions=positions(1, -1))
    found = admit_one(replacing(mean=some), at)
    rows = run.rows(Site(Point.RESID_POST, 1))
    np.testing.assert_allclose(rows_of(found), [rows[[1, 3]].mean(axis=0)], rtol=1e-6)


@pytest.mark.parametrize(
    ("source", "error", "field"),
    [
        ({"run_id": "gone"}, errors.RunNotFound, "run.run_id"),
        ({"run_id": ""}, errors.InvalidValue, "run.run_id"),
        ({"positions": positions(0, 1)}, errors.InvalidValue, "run.positions"),
        ({"positions": positions()}, errors.InvalidValue, "run.positions"),
        ({"positions": positions(0, 1, 4)}, errors.RunIncomplete, "run.positions"),
        ({"positions": positions(0, 1, -5)}, errors.InvalidValue, "run.positions"),
        (
            {"positions": positions(0, 1, 2), "alignment": replace_pb2.ALIGNMENT_IDENTITY},
            errors.InvalidValue,
            "run.positions",
        ),
        ({"alignment": 9}, errors.UnknownEnum, "run.alignment"),
        ({"alignment": 0}, errors.UnknownEnum, "run.alignment"),
        ({"site": types_pb2.Site(point=POST, layer=2)}, errors.RunIncomplete, "run"),
        (
            {"site": types_pb2.Site(point=POST, layer=99)},
            errors.UnknownLayer,
            "run.site.layer",
        ),
        ({"site": types_pb2.Site(point=77, layer=1)}, errors.UnknownEnum, "run.site.point"),
        ({"sites": site_set(MID, layers=[1])}, errors.RunIncomplete, "run"),
    ],
)
def test_a_run_that_cannot_serve_is_refused(source: dict, error: type, field: str) -> None:
    at = with_run()
    assert refused_one(from_run(**source), at) == (error, f"{OP}.{field}")
    assert stored_run(at).users == 0


def test_a_run_of_another_width_is_refused() -> None:
    at = with_run(width=WIDTH + 1)
    assert refused_one(from_run(), at) == (errors.VectorShape, f"{OP}.run.run_id")
    assert stored_run(at).users == 0


def test_a_run_that_is_made_anew_is_read_anew() -> None:
    at = with_run()
    first = rows_of(admit_one(from_run(), at))
    assert at.runs is not None
    at.runs.delete("clean", "")
    again = dataclasses.replace(at, runs=with_run(np.full(2 * 4 * WIDTH, 7, np.float32)).runs)
    assert (rows_of(admit_one(from_run(), again)) == 7).all()
    assert not np.array_equal(first, rows_of(admit_one(from_run(), again)))


def test_a_mask_weighs_dimensions() -> None:
    dimensions = replace_pb2.DimensionMask(dimensions=replace_pb2.Dimensions(dimensions=[0, 2]))
    (act,) = acts(replacing(zeros=ZEROS, mask=dimensions))
    assert len(act.vectors) == 2
    assert tuple(act.rows) == ((POST1, (0, 0)),)
    at = admit_one(replacing(zeros=ZEROS, mask=dimensions))
    weights = np.frombuffer(at.interventions[0].op.vectors[1].float32_bytes(), "<f4")
    assert weights.tolist() == [1.0, 0.0, 1.0, *[0.0] * (WIDTH - 3)]
    ramp = np.linspace(0, 1, WIDTH, dtype=np.float32)
    weighted = replace_pb2.DimensionMask(weights=tensor(ramp).inline)
    at = admit_one(replacing(zeros=ZEROS, mask=weighted))
    found = np.frombuffer(at.interventions[0].op.vectors[1].float32_bytes(), "<f4")
    np.testing.assert_allclose(found, ramp, atol=4e-3)


def noise(
    seed: int = 0, *, where: selector_pb2.Selector | None = None, **scale: float
) -> steering_pb2.Intervention:
    return replacing(noise=replace_pb2.NoiseSource(seed=seed, **scale), where=where)


def test_noise_is_a_row_added_at_each_site_and_position() -> None:
    source = replace_pb2.NoiseSource(seed=7, std=0.5)
    sites = site_set(POST, layers=[0, 1])
    at = admit_one(replacing(noise=source, sites=sites, where=selector(window(1, 3)), alpha=0.25))
    want = [0.5 * normal_row(7, s, p, WIDTH) for s in (4, POST1) for p in (1, 2)]
    assert np.array_equal(rows_of(at), np.array(want, np.float32))
    digest = at.interventions[0].op.vectors[0].digest
    assert at.plan.acts == tuple(
        Act(Kind.ADD_LAST, (digest,), ((4, (row,)), (POST1, (2 + row,))), ((p, p + 1),), 0.25)
        for row, p in enumerate((1, 2))
    )
    replacement = at.interventions[0].op.replacement
    assert replacement is not None
    assert (replacement.positions, replacement.source_positions) == ((1, 2), ())
    assert replacement.sha256 == hashlib.sha256(rows_of(at).tobytes()).digest()


def test_noise_of_a_row_depends_on_nothing_else_in_the_request() -> None:
    every = rows_of(admit_one(noise(3, std=1.0)))
    alone = rows_of(admit_one(noise(3, std=1.0, where=selector(window(1, 2)))))
    assert np.array_equal(alone, every[1:2])
    other_name = replacing(
        noise=replace_pb2.NoiseSource(seed=3, std=1.0), sites=site_set(PRE, layers=[2])
    )
    assert np.array_equal(rows_of(admit_one(other_name)), every)
    assert not np.array_equal(rows_of(admit_one(noise(4, std=1.0))), every)


def test_noise_may_be_a_multiple_of_the_embeddings_deviation() -> None:
    at = admission_context(dataclasses.replace(SITES, embedding_std=0.02))
    (want,) = [0.02 * 3.0 * normal_row(0, POST1, 1, WIDTH)]
    found = rows_of(admit_one(noise(embedding_std=3.0, where=selector(window(1, 2))), at))
    np.testing.assert_array_equal(found[0], want.astype(np.float32))
    reason = "the token embedding is quantised"
    unknown = admission_context(dataclasses.replace(SITES, embedding_refused=reason))
    with pytest.raises(errors.NotSupported, match=f"because {reason}: give std"):
        admit_one(noise(embedding_std=3.0), unknown)


def masked(**fields: object) -> steering_pb2.Intervention:
    return replacing(zeros=ZEROS, mask=replace_pb2.DimensionMask(**fields))


def dims(*numbers: int) -> replace_pb2.Dimensions:
    return replace_pb2.Dimensions(dimensions=numbers)


@pytest.mark.parametrize(
    ("intervention", "error", "field"),
    [
        (replacing(), errors.MissingField, "replace"),
        (replacing(zeros=ZEROS, alpha=1.5), errors.InvalidValue, "replace.alpha"),
        (replacing(zeros=ZEROS, alpha=np.nan), errors.NonFinite, "replace.alpha"),
        (replacing(vector=named()), errors.NameNotFound, "replace.vector.name"),
        (replacing(noise=replace_pb2.NoiseSource()), errors.MissingField, "replace.noise"),
        (noise(std=0.0), errors.InvalidValue, "replace.noise.std"),
        (noise(std=-1.0), errors.InvalidValue, "replace.noise.std"),
        (noise(std=np.nan), errors.NonFinite, "replace.noise.std"),
        (noise(std=1e18), errors.NonFinite, "replace.noise"),
        (noise(std=3e38), errors.NonFinite, "replace.noise"),
        (noise(embedding_std=0.0), errors.InvalidValue, "replace.noise.embedding_std"),
        (noise(embedding_std=3.0), errors.NotSupported, "replace.noise.embedding_std"),
        (noise(relative_std=3.0), errors.NotSupported, "replace.noise.relative_std"),
        (at_post1(replace=replace_pb2.Replace(zeros=ZEROS)), errors.MissingField, "where"),
        (replacing(zeros=ZEROS, where=selector(token_range(5))), errors.InvalidValue, "where"),
        (masked(), errors.MissingField, "replace.mask"),
        (masked(dimensions=dims()), errors.InvalidValue, "replace.mask.dimensions.dimensions"),
        (masked(dimensions=dims(1, 1)), errors.InvalidValue, "replace.mask.dimensions.dimensions"),
        (masked(dimensions=dims(WIDTH)), errors.InvalidValue, "replace.mask.dimensions.dimensions"),
        (
            masked(weights=tensor(np.full(WIDTH, 1.5)).inline),
            errors.InvalidValue,
            "replace.mask.weights.inline",
        ),
        (
            masked(weights=tensor(np.ones(WIDTH - 1)).inline),
            errors.VectorShape,
            "replace.mask.weights.shape",
        ),
        (
            replacing(vector=tensor(1e16 * ONES)),
            errors.NonFinite,
            "replace.vector",
        ),
        (from_run(), errors.RunNotFound, "replace.run.run_id"),
    ],
)
def test_a_malformed_replace_is_refused_by_field(
    intervention: steering_pb2.Intervention, error: type, field: str
) -> None:
    expected = f"steering.interventions[0].{field}"
    assert refused_one(intervention) == (error, expected)


@pytest.mark.parametrize(
    "nothing",
    [
        replacing(zeros=ZEROS, alpha=0.0),
        replacing(
            zeros=ZEROS, mask=replace_pb2.DimensionMask(weights=tensor(np.zeros(WIDTH)).inline)
        ),
        replacing(rows=tensor(np.ones((1, 3, WIDTH))).inline, alpha=0.0),
        replacing(
            rows=tensor(np.ones((1, 3, WIDTH))).inline,
            mask=replace_pb2.DimensionMask(weights=tensor(np.zeros(WIDTH)).inline),
        ),
    ],
)
def test_what_replaces_nothing_has_no_act(nothing: steering_pb2.Intervention) -> None:
    at = admit_one(nothing)
    assert at.plan.acts == ()
    assert at.interventions[0].op.op == receipt_pb2.OP_REPLACE


def test_too_many_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.ones((2, 3, WIDTH), np.float32)
    six = replacing(rows=tensor(values).inline, sites=site_set(POST, layers=[0, 1]))
    monkeypatch.setattr(replacements, "REPLACED_ROWS", 6)
    assert len(acts(six)) == 3
    monkeypatch.setattr(replacements, "REPLACED_ROWS", 5)
    assert refused_one(six) == (errors.InvalidValue, f"{OP}.rows")
    monkeypatch.undo()
    monkeypatch.setattr(replacements, "VECTOR_BYTES", 6 * WIDTH * 4 - 1)
    assert refused_one(six) == (errors.InvalidValue, f"{OP}.rows")


@pytest.mark.parametrize("source", ["run", "mean"])
def test_rows_of_a_run_are_resolved_on_a_thread(source: str) -> None:
    """A run may have any length, and so may the answer of a request with a short prompt."""
    at = with_run()
    source_of = {"run": replace_pb2.RunSource, "mean": replace_pb2.MeanSource}[source]
    intervention = replacing(**{source: source_of(run_id="clean")})
    steering = steering_pb2.Steering(interventions=[intervention])
    assert estimate_steering(steering, 1, at.sites, at.store.view()) > OFFLOAD_BYTES
