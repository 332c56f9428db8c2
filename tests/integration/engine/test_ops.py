"""Random steering on the real engine, against Hugging Face's model with naive hooks in float64.

Each draw is a batch of requests with different plans; the reference computes every request by
itself, from scratch, with every op written down as its formula says.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rheostat_engine import (
    OPEN_END,
    Act,
    Activation,
    Band,
    Capture,
    Kind,
    Normalise,
    Plan,
    Readout,
    Spans,
    TokenCondition,
)
from rheostat_engine.plan.points import site_count

from ...effort import FACTOR
from .groups import BOTH
from .models import LAYERS, VOCAB, build
from .offline import OfflineEngine, Outcome
from .plans import EVERYWHERE, as_hooks, prompts, selected, vector
from .reference import HfReference

pytestmark = pytest.mark.integration

SITES = range(site_count(LAYERS))
TOKENS = 5
VECTORS = 6
ROWS = 2e-5
"""Tolerance of rows, relative to the largest value of the stream. Draws that cancel little differed
by 1.4e-6."""
ROUNDINGS = 10
"""Rows may differ from float64 this many times as much as Hugging Face's own float32 rows. If a
draw makes rows large and then cancels them, float32 always loses digits. 1.8 times was seen."""
LOGPROBS = 3e-4
"""Tolerance of log-probabilities, in nats; 6e-6 was seen."""
BATCH = prompts(6, 4, 30, seed=5)


class Bench(NamedTuple):
    """The engine, and what it is compared with."""

    engine: OfflineEngine
    reference: HfReference
    """In float64."""
    rounded: HfReference
    """In float32. Its distance from `reference` shows how many digits a draw loses."""


@pytest.fixture(scope="module", params=BOTH)
def bench(
    request: pytest.FixtureRequest, start: Callable[..., OfflineEngine], models_root: Path
) -> Iterator[Bench]:
    path = build("llama", models_root)
    references = HfReference("llama", path, torch.float64), HfReference("llama", path)
    engine = start(enforce_eager=request.param == "eager")
    engine.load(dict(vector(seed) for seed in range(VECTORS)))
    yield Bench(engine, *references)
    stats = engine.stats()
    used = [stats[key] for key in stats if key.endswith("_used")]
    assert used
    assert (sum(used), stats["requests"]) == (0, 0)


def _spans(draw: st.DrawFn) -> Spans:
    edges = sorted(draw(st.sets(st.integers(0, 36), min_size=2, max_size=4)))
    pairs = list(zip(edges[::2], edges[1::2], strict=False))
    return tuple(pairs) if draw(st.booleans()) else ((edges[0], OPEN_END),)


@st.composite
def readouts(draw: st.DrawFn) -> Readout:
    """Any readout. Numbers of rows lie apart from its threshold, which no row meets by chance."""
    edge = st.floats(-1, 1, width=32)
    return Readout(
        draw(st.sampled_from(Normalise)), draw(st.sampled_from(Activation)), draw(edge), draw(edge)
    )


@st.composite
def acts(draw: st.DrawFn) -> Act:
    """Any act of the small model."""
    kind = draw(st.sampled_from([kind for kind in Kind if kind < Kind.READ]))
    count = draw(st.integers(1, {Kind.PULL: 3, Kind.REPLACE: 2, Kind.ADD_LAST: 2}.get(kind, 1)))
    seeds = draw(st.permutations(range(VECTORS)))[:count]
    sites = sorted(draw(st.sets(st.sampled_from(SITES), min_size=1, max_size=3)))
    bands: tuple[Band, ...] = ()
    orthogonal = False
    if kind is Kind.PULL:
        orthogonal = draw(st.booleans())
        edge = st.floats(-3, 3, width=32)
        if orthogonal:
            bands = (Band(0.0, 0.0, draw(st.floats(0, 1, width=32))),) * count
        else:
            low, high = sorted((draw(edge), draw(edge)))
            strength = draw(st.floats(-1, 2, width=32))
            open_low, open_high = draw(st.booleans()), draw(st.booleans())
            low, high = -np.inf if open_low else low, np.inf if open_high else high
            readout = draw(readouts())
            on = readout.activation in (Activation.RELU, Activation.JUMP_RELU)
            one = Band(low, high, strength, readout, False, on and draw(st.booleans()))
            bands = (one,) * count
            if count == 2 and draw(st.booleans()):
                bands = (one._replace(writes=True),)
    spans, conditions = _spans(draw), ()
    if draw(st.booleans()):
        ids = tuple(sorted(draw(st.sets(st.integers(0, VOCAB - 1), min_size=1, max_size=60))))
        conditions = (TokenCondition(spans, ids, draw(st.booleans())),)
        spans = ()
    return Act(
        kind=kind,
        vectors=tuple(vector(seed)[0] for seed in seeds),
        rows=tuple((site, (0,) * count) for site in sites),
        spans=spans,
        scale=draw(st.floats(0 if kind.acts_last else -1, 1, width=32)),
        bands=bands,
        orthogonal=orthogonal,
        conditions=conditions,
    )


def _large_then_cancelled() -> Act:
    """An act that makes rows 20 times as large; what later layers add to them stays small."""
    band = Band(0.0, 1.0, 1.0, Readout(Normalise.NONE, Activation.IDENTITY, 0.0, 0.0), writes=True)
    read, write = (vector(seed)[0] for seed in (3, 2))
    rows = ((10, (0, 0)), (11, (0, 0)))
    return Act(Kind.PULL, (read, write), rows, EVERYWHERE, 0.0, (band,))


def _check(bench: Bench, prompt: list[int], plan: Plan, outcome: Outcome) -> None:
    tokens = prompt + outcome.token_ids[:-1]
    hooks = as_hooks(plan, VECTORS, tokens)
    expected, rounded = bench.reference.run(tokens, hooks), bench.rounded.run(tokens, hooks)
    for site in SITES:
        want = expected.streams[site]
        lost = np.abs(rounded.streams[site] - want).max()
        atol = max(ROWS * np.abs(want).max(), ROUNDINGS * lost)
        np.testing.assert_allclose(outcome.stream(site), want, rtol=0, atol=atol)
    for step in range(TOKENS):
        want_logits = expected.logprobs[len(prompt) - 1 + step]
        np.testing.assert_allclose(outcome.logits(step), want_logits, rtol=0, atol=LOGPROBS)
    assert outcome.released is not None
    rows = {(dose.act, dose.site): dose.rows for dose in outcome.released.doses}
    touched = {index: len(selected(act, tokens)) for index, act in enumerate(plan.acts) if act.acts}
    assert rows == {
        (index, site): count
        for index, count in touched.items()
        if count
        for site, _ in plan.acts[index].rows
    }


@settings(max_examples=25 * FACTOR, deadline=None, suppress_health_check=list(HealthCheck))
@example(drawn=[[], [], [], [_large_then_cancelled()], [], []])
@given(drawn=st.lists(st.lists(acts(), max_size=4), min_size=6, max_size=6))
def test_random_steering_does_what_naive_hooks_do_in_hugging_face(
    bench: Bench, drawn: list[list[Act]]
) -> None:
    everything = Capture(tuple(SITES), EVERYWHERE)
    plans = [Plan("", tuple(one), (everything,)) for one in drawn]
    outcomes = bench.engine.run(BATCH, plans, max_tokens=TOKENS)
    for prompt, plan, outcome in zip(BATCH, plans, outcomes, strict=True):
        _check(bench, prompt, plan, outcome)


@pytest.mark.parametrize("kind", [Kind.NORM_ADD, Kind.PULL])
def test_a_huge_dose_reaches_neither_its_neighbours_nor_who_comes_after(
    bench: Bench, kind: Kind
) -> None:
    """Infinities would become NaN in the KV cache, whose blocks other requests get next."""
    digest, _ = vector(0)
    bands = (Band(1e38, 1e38, 1.0),) if kind is Kind.PULL else ()
    scale = 1.0 if kind is Kind.PULL else 3e38
    huge = Act(kind, (digest,), ((0, (0,)),), EVERYWHERE, scale, bands)
    plain = bench.engine.run(BATCH, max_tokens=TOKENS)
    plans = [None if i % 2 else Plan("", (huge,)) for i in range(len(BATCH))]
    beside = bench.engine.run(BATCH, plans, max_tokens=TOKENS)
    after = [bench.engine.run(BATCH, max_tokens=TOKENS) for _ in range(3)]
    for i, one in enumerate(plain):
        mates = [beside[i], *(run[i] for run in after)] if i % 2 else [run[i] for run in after]
        assert all((one.token_ids, one.logprobs) == (m.token_ids, m.logprobs) for m in mates), i
        assert not np.isnan([*beside[i].logprobs[-1].values()]).any()
    assert beside[0].logprobs != plain[0].logprobs
