"""Selectors over gRPC: steering reaches the tokens that they name and no others."""

from collections import Counter

import pytest

import rheostat
from rheostat import generated, positions, span, token_ids, window

from ..engine.reference import HfReference
from .naive import BY_TOKEN, OPS, Placed, Where, add, compare, positions_of, row

pytestmark = pytest.mark.integration

PROMPT = "The king is sad. The king is happy. The queen"
OPTIONS = {"temperature": 0, "ignore_eos": True, "logprobs": 0}
OP = add(row(0), 1.5)


@pytest.mark.parametrize(
    ("where", "holds"),
    [
        ("prompt", lambda p, token, n: p < n),
        ("generated", lambda p, token, n: p >= n),
        (positions(0, 3, -1), lambda p, token, n: p in (0, 3, n - 1)),
        (window(-2, 24), lambda p, token, n: n - 2 <= p < 24),
        (generated(1, 3) | positions(2), lambda p, token, n: p == 2 or n + 1 <= p < n + 3),
        (span("king is", 1), lambda p, token, n: 10 <= p <= 12),
        (span("sad. The"), lambda p, token, n: 6 <= p <= 8),
        ("all" - span("king", 0) - generated(2), lambda p, t, n: p not in (3, 4) and p < n + 2),
    ],
    ids=["prompt", "generated", "positions", "window", "union", "nth-span", "span", "excludes"],
)
def test_a_selector_by_position_or_text_reaches_its_tokens_alone(
    engine: rheostat.Engine,
    reference: HfReference,
    where: rheostat.Selector | str,
    holds: Where,
) -> None:
    placed = Placed(OP, [2], where, holds)
    out = engine.generate(PROMPT, steering=[placed.ours], max_tokens=8, **OPTIONS)
    (found,) = compare(reference, out, [placed])
    (moved,) = found.moved[0].values()
    (applied,) = out.receipt.interventions
    assert positions_of(applied.rows[0].positions) == moved.positions
    assert applied.sites[0].row_count == len(moved.positions) > 0


@pytest.mark.parametrize("excluded", [False, True], ids=["among", "not-among"])
def test_token_ids_select_what_is_generated_too(
    engine: rheostat.Engine, reference: HfReference, excluded: bool
) -> None:
    plain = engine.generate(PROMPT, max_tokens=24, **OPTIONS)
    ids = {token for token, _ in Counter(plain.token_ids).most_common(3)}
    chosen = "all" - token_ids(*ids) if excluded else token_ids(*ids)
    placed = Placed(
        add(row(0), 0.2), [1, 4], chosen, lambda p, token, n: (token in ids) != excluded
    )
    out = engine.generate(PROMPT, steering=[placed.ours], max_tokens=24, **OPTIONS)
    (found,) = compare(reference, out, [placed])
    moved = next(iter(found.moved[0].values()))
    length = len(out.prompt_token_ids)
    inputs = out.token_ids[:-1]
    assert 0 < sum(p >= length for p in moved.positions) < len(inputs)
    (applied,) = out.receipt.interventions
    assert positions_of(applied.rows[0].positions) == moved.positions
    told = engine.explain(PROMPT, steering=[placed.ours], max_tokens=24)
    selection = told.interventions[0].selection
    found_ids = selection.excluded_token_ids if excluded else selection.token_ids
    assert set(found_ids) == ids


def test_token_ids_windows_and_every_op_but_replace_go_together(
    engine: rheostat.Engine, reference: HfReference
) -> None:
    plain = engine.generate(PROMPT, max_tokens=24, **OPTIONS)
    common = [token for token, _ in Counter(plain.token_ids).most_common(4)]
    selectors: list[tuple[rheostat.Selector, Where]] = [
        (token_ids(common[0], common[1]), lambda p, token, n: token in common[:2]),
        (generated(2, 9), lambda p, token, n: n + 2 <= p < n + 9),
        ("generated" - token_ids(common[2]), lambda p, token, n: p >= n and token != common[2]),
        (
            (token_ids(common[3]) | "prompt") - window(0, 3),
            lambda p, token, n: p >= 3 and (p < n or token == common[3]),
        ),
    ]
    placed = [
        Placed(op, [number % 3, 4], *selectors[number % len(selectors)])
        for number, op in enumerate(BY_TOKEN.values())
    ]
    out = engine.generate(PROMPT, steering=[one.ours for one in placed], max_tokens=24, **OPTIONS)
    (found,) = compare(reference, out, placed)
    for applied, moved in zip(out.receipt.interventions, found.moved, strict=True):
        want = next(iter(moved.values())).positions if moved else []
        got = [p for rows in applied.rows for p in positions_of(rows.positions)]
        assert got == want


def test_every_sample_of_a_request_is_steered_by_its_own_tokens(
    engine: rheostat.Engine, reference: HfReference
) -> None:
    ids = set(range(200, 700))
    placed = [
        Placed(OP, [2], token_ids(*sorted(ids)), lambda p, token, n: token in ids),
        Placed(OPS["norm_add"], [3], generated(4), lambda p, token, n: p >= n + 4),
    ]
    out = engine.generate(
        PROMPT,
        steering=[one.ours for one in placed],
        max_tokens=16,
        n=4,
        seed=3,
        temperature=1.0,
        ignore_eos=True,
        logprobs=0,
    )
    found = compare(reference, out, placed)
    assert len({sample.token_ids for sample in out.samples}) == 4
    for number, applied in enumerate(out.receipt.interventions):
        want = [next(iter(one.moved[number].values())).positions for one in found]
        assert [positions_of(rows.positions) for rows in applied.rows] == want
        assert [rows.sample for rows in applied.rows] == [0, 1, 2, 3]
        assert applied.sites[0].row_count == sum(map(len, want))
