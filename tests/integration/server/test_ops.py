"""Every op over gRPC does what its formula does in Hugging Face's model, as the receipt says."""

import asyncio

import numpy as np
import pytest

import rheostat
from rheostat import Capture, Point, Site

from ..engine.reference import HfReference
from .conftest import Server
from .naive import (
    OPS,
    POINTS,
    Placed,
    ablate,
    add,
    clamp,
    compare,
    everywhere,
    norm_add,
    number_of,
    positions_of,
    row,
)

pytestmark = pytest.mark.integration

PROMPT = "The Eiffel Tower is in the city of"
LENGTH = 9
OPTIONS = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 0}


@pytest.mark.parametrize("name", OPS)
def test_an_op_does_what_its_formula_does_in_hugging_faces_model(
    engine: rheostat.Engine, reference: HfReference, name: str
) -> None:
    placed = everywhere(OPS[name], [1, 3])
    out = engine.generate(PROMPT, steering=[placed.ours], capture=Capture("resid_post"), **OPTIONS)
    (found,) = compare(reference, out, [placed])
    for layer in range(6):
        want = found.run.streams[number_of(Site(Point.RESID_POST, layer))]
        got = out.activations["resid_post", layer]
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-4 * np.abs(want).max())
    plain = engine.generate(PROMPT, **OPTIONS)
    assert plain.logprobs != out.logprobs


@pytest.mark.parametrize("name", OPS)
def test_the_doses_of_a_receipt_are_those_of_hugging_faces_stream(
    engine: rheostat.Engine, reference: HfReference, name: str
) -> None:
    placed = [
        Placed(OPS[name], [0, 2, 5], "prompt", lambda p, token, length: p < length),
        Placed(add(row(9), 0.5), [2], "generated", lambda p, token, length: p >= length),
    ]
    out = engine.generate(PROMPT, steering=[one.ours for one in placed], **OPTIONS)
    (found,) = compare(reference, out, placed)
    for applied, moved in zip(out.receipt.interventions, found.moved, strict=True):
        assert [one.site for one in applied.sites] == sorted(moved, key=lambda site: site.layer)
        for one in applied.sites:
            want = moved[one.site]
            assert one.row_count == len(want.positions)
            assert one.dose is not None
            assert one.dose.norm == pytest.approx(want.norms.mean(), rel=0.01)
            assert one.dose.relative_mean == pytest.approx(want.relative.mean(), rel=0.01)
            assert one.dose.relative_max == pytest.approx(want.relative.max(), rel=0.01)
        (rows,) = applied.rows
        assert positions_of(rows.positions) == want.positions


def test_ops_at_one_site_act_in_the_order_of_the_list(
    engine: rheostat.Engine, reference: HfReference
) -> None:
    ops = [
        add(row(0), 0.5),
        norm_add(row(1), 0.3),
        ablate([row(0), row(1)], 0.9),
        clamp([(row(2), 1.0, 2.0, 1.0)]),
        add(row(1), -0.4),
        add(row(3), 0.4),
    ]
    seen = []
    for order in (ops, ops[::-1]):
        placed = [everywhere(op, [2]) for op in order]
        out = engine.generate(PROMPT, steering=[one.ours for one in placed], **OPTIONS)
        compare(reference, out, placed)
        assert [one.op for one in out.receipt.interventions] == [_word(op.does) for op in order]
        seen.append(out.logprobs)
    assert seen[0] != seen[1]


def test_all_ops_share_a_batch_and_each_request_gets_its_own(
    server: Server, engine: rheostat.Engine, reference: HfReference
) -> None:
    many = [[], *([everywhere(op, [1, 4])] for op in OPS.values())] * 2

    async def run() -> list[rheostat.Generation]:
        async with rheostat.aio.connect(server.target) as client:
            return await asyncio.gather(
                *(
                    client.generate(
                        PROMPT[: 12 + number], steering=[one.ours for one in placed], **OPTIONS
                    )
                    for number, placed in enumerate(many)
                )
            )

    for placed, out in zip(many, asyncio.run(run()), strict=True):
        compare(reference, out, placed)


def test_every_point_of_a_layer_takes_every_op(
    engine: rheostat.Engine, reference: HfReference
) -> None:
    placed = [everywhere(op, [2], POINTS) for op in OPS.values()]
    out = engine.generate(PROMPT, steering=[one.ours for one in placed], **OPTIONS)
    (found,) = compare(reference, out, placed)
    for applied, moved in zip(out.receipt.interventions, found.moved, strict=True):
        assert {one.site for one in applied.sites} == set(moved)
        assert [one.row_count for one in applied.sites] == [16] * len(POINTS)


def _word(one: rheostat.Intervention) -> str:
    return {"NormAdd": "norm_add"}.get(type(one).__name__, type(one).__name__.lower())
