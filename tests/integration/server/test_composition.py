"""Server-wide and per-request steering compose; what is the same is so to the last bit."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

import rheostat

from ..engine.reference import HfReference
from .naive import OPS, Op, Placed, add, compare, everywhere, norm_add, positions_of, row

pytestmark = pytest.mark.integration

PROMPT = "The Eiffel Tower is in the city of"
OPTIONS = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 3}
VECTOR = row(0)


@pytest.fixture
def shared(engine: rheostat.Engine) -> Iterator[rheostat.Engine]:
    """A client that may set server-wide steering; afterwards there is none."""
    yield engine
    engine.steering.set_global(None)


NOTHING = {
    "scale-0": rheostat.inline(VECTOR) * 0.0,
    "zero-vector": rheostat.inline(0 * VECTOR) * 3.0,
    "norm-0": rheostat.norm_add(rheostat.inline(VECTOR), 0.0),
    "ablate-0": rheostat.ablate(rheostat.inline(VECTOR), strength=0.0),
    "band-0": rheostat.clamp(rheostat.inline(VECTOR), min=9.0, strength=0.0),
    "wide-band": rheostat.clamp(rheostat.inline(VECTOR), min=-1e6, max=1e6),
    "factor-1": rheostat.scale(rheostat.inline(VECTOR), 1.0),
}


@pytest.mark.parametrize("name", NOTHING)
def test_an_op_that_asks_for_nothing_changes_no_bit(engine: rheostat.Engine, name: str) -> None:
    plain = engine.generate(PROMPT, **OPTIONS)
    idle = NOTHING[name].at(points=["resid_mid", "resid_post"], layers="all")
    out = engine.generate(PROMPT, steering=[idle], **OPTIONS)
    assert (out.token_ids, out.logprobs) == (plain.token_ids, plain.logprobs)
    active = OPS["add"].does.at(points="resid_post", layers=2)
    alone = engine.generate(PROMPT, steering=[active], **OPTIONS)
    beside = engine.generate(PROMPT, steering=[idle, active], **OPTIONS)
    assert beside.logprobs == alone.logprobs != plain.logprobs


@pytest.mark.parametrize("name", OPS)
def test_a_name_a_digest_and_the_numbers_themselves_are_one_vector(
    engine: rheostat.Engine, name: str
) -> None:
    one = everywhere(OPS[name], [1, 4]).ours
    stored = {v.digest: engine.vectors.put(v.values, name=f"v{i}") for i, v in _numbered(one)}
    named = {v.digest: rheostat.named(f"v{i}") for i, v in _numbered(one)}
    ways = [one, _with(one, stored), _with(one, named)]
    outs = [engine.generate(PROMPT, steering=[way], **OPTIONS) for way in ways]
    assert outs[0].logprobs == outs[1].logprobs == outs[2].logprobs
    digests = tuple(vector.digest for vector in one.vectors)
    assert [out.receipt.interventions[0].digests for out in outs] == [digests] * 3
    for i, _ in _numbered(one):
        engine.vectors.delete(f"v{i}")


def test_a_vector_of_every_layer_acts_at_one_of_them_with_its_own_row(
    engine: rheostat.Engine,
) -> None:
    rows = np.concatenate([row(layer) for layer in range(engine.model().layer_count)])
    engine.vectors.put(rows, points="resid_post", layers="all", name="every")
    (stored,) = [info.vector for info in engine.vectors.list("every")]
    alone = engine.generate(
        PROMPT, steering=0.4 * rheostat.inline(rows[3]).at(points="resid_post", layers=3), **OPTIONS
    )
    out = engine.generate(PROMPT, steering=0.4 * stored.at(layers=3), **OPTIONS)
    plain = engine.generate(PROMPT, **OPTIONS)
    assert out.logprobs == alone.logprobs != plain.logprobs
    engine.vectors.delete("every")


def test_the_order_of_adds_does_not_matter_and_of_other_ops_it_does(
    engine: rheostat.Engine,
) -> None:
    adds = [add(row(i), 0.3 * (i + 1)).does.at(points="resid_post", layers=2) for i in range(3)]
    outs = [
        engine.generate(PROMPT, steering=order, **OPTIONS).logprobs
        for order in itertools.permutations(adds)
    ]
    assert outs == [outs[0]] * 6
    other = OPS["norm_add"].does.at(points="resid_post", layers=2)
    first = engine.generate(PROMPT, steering=[adds[0], other], **OPTIONS)
    last = engine.generate(PROMPT, steering=[other, adds[0]], **OPTIONS)
    assert first.logprobs != last.logprobs


def test_base_and_prompt_steering_are_their_sum_on_the_prompt(
    engine: rheostat.Engine, reference: HfReference
) -> None:
    base, prefill = everywhere(add(row(0), 0.4), [2]), _on_prompt(add(row(1), 0.6))
    both = engine.generate(PROMPT, steering=[base.ours, prefill.ours], **OPTIONS)
    compare(reference, both, [base, prefill])
    summed = 0.4 * row(0) + 0.6 * row(1)
    apart = [
        rheostat.inline(summed).at(points="resid_post", layers=2, where="prompt"),
        (0.4 * rheostat.inline(row(0))).at(points="resid_post", layers=2, where="generated"),
    ]
    again = engine.generate(PROMPT, steering=apart, **OPTIONS)
    assert again.token_ids == both.token_ids
    got = [step.token.logprob for step in again.logprobs]
    np.testing.assert_allclose(got, [s.token.logprob for s in both.logprobs], atol=1e-4)


def test_server_wide_steering_comes_first_and_adds_up_with_the_requests(
    shared: rheostat.Engine, reference: HfReference
) -> None:
    wide = [everywhere(add(row(0), 0.5), [2]), everywhere(OPS["clamp-pin"], [2, 4])]
    own = [everywhere(add(row(1), 0.5), [2]), everywhere(norm_add(row(2), 0.2), [4])]
    listed = [one.ours for one in (*wide, *own)]
    alone = shared.generate(PROMPT, steering=listed, **OPTIONS)
    version = shared.steering.set_global([one.ours for one in wide])
    both = shared.generate(PROMPT, steering=[one.ours for one in own], **OPTIONS)
    assert both.logprobs == alone.logprobs
    compare(reference, both, [*wide, *own])
    receipt = both.receipt
    assert receipt.global_version == version == shared.steering.get_global().version
    assert [(one.origin, one.index) for one in receipt.interventions] == [
        ("global", 0),
        ("global", 1),
        ("request", 0),
        ("request", 1),
    ]
    only = shared.generate(PROMPT, **OPTIONS)
    compare(reference, only, wide)


def test_server_wide_adds_and_a_requests_are_summed_in_any_order(shared: rheostat.Engine) -> None:
    one, two = (everywhere(add(row(i), 0.5), [2]).ours for i in (0, 1))
    outs = []
    for wide, own in ((one, two), (two, one)):
        shared.steering.set_global([wide])
        outs.append(shared.generate(PROMPT, steering=[own], **OPTIONS).logprobs)
    assert outs[0] == outs[1]


def test_a_change_of_server_wide_steering_concerns_later_requests_alone(
    shared: rheostat.Engine, reference: HfReference
) -> None:
    options = {"max_tokens": 200, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    before, after = everywhere(OPS["add"], [2]), everywhere(OPS["scale"], [3])
    first = shared.steering.set_global([before.ours])
    alone = shared.generate("My day was", **options)
    with shared.stream("My day was", **options) as running:
        next(running)
        second = shared.steering.set_global([after.ours], expected_version=first)
        later = shared.generate("My day was", **options)
        running_out = running.result()
    assert second == first + 1
    assert running_out.token_ids == alone.token_ids
    assert (running_out.receipt.global_version, later.receipt.global_version) == (first, second)
    assert [one.op for one in running_out.receipt.interventions] == ["add"]
    compare(reference, later, [after])


def test_a_change_that_expects_another_version_is_refused_and_changes_nothing(
    shared: rheostat.Engine,
) -> None:
    steering = [everywhere(OPS["ablate"], [2]).ours]
    version = shared.steering.set_global(steering)
    with pytest.raises(rheostat.Refused) as caught:
        shared.steering.set_global(None, expected_version=version - 1)
    assert caught.value.reason == "REASON_VERSION_CONFLICT"
    assert caught.value.metadata == {"version": str(version)}
    held = shared.steering.get_global()
    assert (held.version, len(held.interventions)) == (version, 1)
    assert shared.steering.set_global(held.interventions, expected_version=version) == version + 1


def test_server_wide_steering_holds_its_vectors_whatever_becomes_of_their_names(
    shared: rheostat.Engine,
) -> None:
    shared.vectors.put(VECTOR, name="tone")
    shared.steering.set_global([rheostat.named("tone", points="resid_post", layers=2) * 2.0])
    before = shared.generate(PROMPT, **OPTIONS)
    shared.vectors.put(-VECTOR, name="tone")
    moved = shared.generate(PROMPT, **OPTIONS)
    shared.vectors.delete("tone")
    gone = shared.generate(PROMPT, **OPTIONS)
    assert before.logprobs == moved.logprobs == gone.logprobs


@pytest.mark.parametrize("name", OPS)
def test_explain_tells_what_the_receipt_then_says(shared: rheostat.Engine, name: str) -> None:
    wide = everywhere(OPS[name], [0, 5]).ours
    shared.steering.set_global([wide])
    own = OPS[name].does.at(
        points=["resid_pre", "resid_post"],
        layers=[1, 3],
        where=(rheostat.window(-3) | rheostat.generated(2)) - rheostat.span("Eiffel"),
    )
    told = shared.explain(PROMPT, steering=[own], **OPTIONS)
    out = shared.generate(PROMPT, steering=[own], **OPTIONS)
    assert told.prompt_token_ids == out.prompt_token_ids
    assert told.global_version == out.receipt.global_version
    for said, done in zip(told.interventions, out.receipt.interventions, strict=True):
        assert (said.origin, said.index, said.op) == (done.origin, done.index, done.op)
        assert said.digests == done.digests
        assert list(said.sites) == [one.site for one in done.sites]
        (rows,) = done.rows
        assert said.selection.positions == rows.positions
        assert {one.row_count for one in done.sites} == {len(positions_of(rows.positions))}
        doses = {one.site: one.dose for one in done.sites if one.dose is not None}
        assert len(doses) == len(done.sites)
        if name == "add":
            assert said.doses == pytest.approx({s: d.norm for s, d in doses.items()}, rel=1e-3)
        elif name == "norm_add":
            relative = {site: dose.relative_mean for site, dose in doses.items()}
            assert said.doses == pytest.approx(relative, rel=1e-3)
        else:
            assert said.doses == {}


def _on_prompt(op: Op) -> Placed:
    return Placed(op, [2], "prompt", lambda p, token, length: p < length)


def _numbered(one: rheostat.Intervention) -> list[tuple[int, rheostat.Vector]]:
    return list(enumerate(one.vectors))


def _with(
    one: rheostat.Intervention, handles: dict[str | None, rheostat.Vector]
) -> rheostat.Intervention:
    """The same op with other handles on its vectors."""
    if isinstance(one, rheostat.Ablate):
        return replace(one, directions=tuple(handles[v.digest] for v in one.directions))
    if isinstance(one, rheostat.Clamp):
        bands = (replace(band, direction=handles[band.direction.digest]) for band in one.bands)
        return replace(one, bands=tuple(bands))
    if isinstance(one, rheostat.Scale):
        return replace(one, direction=handles[one.direction.digest])
    if isinstance(one, rheostat.Replace):
        (vector,) = one.vectors
        return replace(one, source=handles[vector.digest])
    assert isinstance(one, rheostat.Add | rheostat.NormAdd)
    return replace(one, vector=handles[one.vector.digest])
