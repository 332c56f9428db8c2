"""Every architecture, every point: what Hugging Face's model shows under hooks, ours shows too."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from rheostat_engine import OPEN_END, ROUTERS, Act, Band, Capture, Kind, Plan, Point, Site, Spans
from rheostat_engine.plan.points import site_count
from rheostat_wire.noise import normal_row

from ...effort import at_length, some
from .gated_points import GENERATED as GATED_TOKENS
from .gated_points import PROBE, PUSH, GatedAct, GatedRun, gated_acts, run_gated
from .groups import group_of
from .models import CONFIGS, EXPERTS, LAYERS, MIXTURES, NO_MID, VOCAB, WIDTH, build
from .offline import OfflineEngine, Outcome
from .plans import vector
from .reference import Add, Change, Float, HfReference, Run

pytestmark = pytest.mark.integration

PROMPT = [int(t) for t in np.random.default_rng(0).integers(3, 128, 21)]
OTHER = [(token + 60) % 125 + 3 for token in PROMPT]
"""Another token at every position."""
SPANS = ((5, 13), (20, 21))
TOUCHED = [p for start, end in SPANS for p in range(start, end)]
VECTOR = np.random.default_rng(1).normal(size=(1, WIDTH)).astype(np.float32)
DIGEST = bytes(32)
EVERYWHERE = ((0, OPEN_END),)
GENERATED = 5
SCALE = 1.5
ROWS = 1e-5
"""Of rows, relative to the largest value of the stream. Two implementations in float32 add in other
orders; 1e-6 is the most that was seen of any architecture."""
LOGPROBS = 1e-4
"""Of log-probabilities, in nats. At most 5e-6 was seen, and each vector moves some by 1e-2."""


def sites_of(name: str) -> list[int]:
    """The sites that an architecture has."""
    mids = {Site(Point.RESID_MID, layer).index for layer in range(LAYERS)}
    routers = [ROUTERS + layer for layer in range(LAYERS) if name in MIXTURES]
    stream = [s for s in range(site_count(LAYERS)) if not (s in mids and name in NO_MID)]
    return [*stream, *routers]


def steered_sites(name: str) -> list[int]:
    """Each point of the first layer, of the last and of one in between."""
    wanted = sorted({Site(point, layer).index for layer in (0, 1, LAYERS - 1) for point in Point})
    return [s for s in wanted if s in sites_of(name) and s < ROUTERS]


class Continued(NamedTuple):
    """A prompt and its greedy continuation, as Hugging Face's model has them."""

    site: int | None
    """Where every token is steered; None: nowhere."""
    token_ids: list[int]
    """Generated tokens."""
    run: Run
    """Of the prompt and of all generated tokens but the last, which was no input."""


class Case(NamedTuple):
    """An architecture: the reference's runs and an engine."""

    name: str
    plain: Run
    other: Run
    steered: dict[int, Run]
    replaced: dict[int, Run]
    embedding_std: float
    noisy: dict[int, Run]
    continued: list[Continued]
    gated: list[GatedRun]
    shut: list[GatedAct]
    engine: OfflineEngine


BRANCHES = (Point.ATTN_OUT, Point.MLP_OUT)

COMPILED = ["gemma3", "gpt_neox", "granite", "llama", "olmo2", "qwen3_moe"]
"""The compiled architectures: at least one for each form of the stream, and for each way in which
branches are found. `test_invariants` compares more compiled models.

`make soak` compiles every architecture.
"""
CASES = [
    *((name, False) for name in some(sorted(CONFIGS), *COMPILED)),
    *((name, True) for name in sorted(CONFIGS)),
]
"""An architecture, and whether it is not compiled.

The engines that are not compiled come last, because `test_unembedding` continues with them.
"""


class Reference(NamedTuple):
    """What Hugging Face's model shows."""

    plain: Run
    other: Run
    """Of `OTHER`."""
    steered: dict[int, Run]
    replaced: dict[int, Run]
    """With the rows of `other` in the place of those of the touched positions, by site."""
    embedding_std: float
    """Standard deviation of the embedding's elements, as they enter the stream."""
    noisy: dict[int, Run]
    """With `noise` on the touched positions, by site."""
    continued: list[Continued]
    gated: list[GatedRun]
    shut: list[GatedAct]
    """Acts whose gates no token opens."""


@pytest.fixture(scope="session")
def refer(models_root: Path) -> Callable[[str], Reference]:
    """Runs an architecture's reference once, and before vLLM does.

    vLLM's Transformers backend changes Hugging Face's classes.
    """

    @cache
    def run_once(name: str) -> Reference:
        model = HfReference(name, build(name, models_root))
        plain = model.run(PROMPT)
        assert_adds_up(name, plain.streams)
        steered = {
            site: model.run(PROMPT, [Add(site, SCALE * VECTOR[0], TOUCHED)])
            for site in steered_sites(name)
        }
        other = model.run(OTHER)
        replaced = {
            site: model.run(PROMPT, [replacing(site, other.streams[site][TOUCHED])])
            for site in steered_sites(name)
        }
        every = model.run(range(VOCAB)).streams[Site(Point.RESID_PRE, 0).index]
        std = float(every.std(dtype=np.float64))
        noisy = {
            site: model.run(PROMPT, [with_noise(site, std)])
            for site in (Site(Point.RESID_PRE, 0).index, Site(Point.MLP_OUT, 1).index)
        }
        middle = Site(Point.RESID_PRE, LAYERS // 2).index
        continued = []
        for site in (None, middle):
            adds = [] if site is None else [Add(site, SCALE * VECTOR[0], slice(None))]
            token_ids = model.generate(PROMPT, GENERATED, adds)
            read = [*PROMPT, *token_ids[:-1]]
            continued.append(Continued(site, token_ids, model.run(read, adds)))
        unsteered = continued[0].run
        opening, shut = gated_acts(name, unsteered)
        gated = [run_gated(model, one, PROMPT, unsteered) for one in opening]
        return Reference(plain, other, steered, replaced, std, noisy, continued, gated, shut)

    return run_once


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            (name, eager), marks=[group_of(name, eager=eager), *([] if eager else [at_length])]
        )
        for name, eager in CASES
    ],
    ids=lambda param: f"{param[0]}-{'eager' if param[1] else 'compiled'}",
)
def case(
    request: pytest.FixtureRequest,
    start: Callable[..., OfflineEngine],
    refer: Callable[[str], Reference],
) -> Case:
    name, eager = request.param
    reference = refer(name)
    engine = start(name, enforce_eager=eager)
    engine.load({DIGEST: VECTOR, **dict(vector(seed) for seed in (PROBE, PUSH))})
    return Case(name, *reference, engine)


def replacing(site: int, rows: Float) -> Change:
    """A hook that puts rows at the touched positions."""
    return Change(site, lambda stream: torch.from_numpy(rows).to(stream.dtype), TOUCHED)


def noise(site: int, std: float) -> Float:
    """Rows that `Noise(embedding_std=3, seed=5)` adds at the touched positions."""
    rows = [3.0 * std * normal_row(5, site, position, WIDTH) for position in TOUCHED]
    return np.array(rows, np.float32)


def with_noise(site: int, std: float) -> Change:
    """A hook that adds it."""
    return Change(site, lambda stream: stream + torch.from_numpy(noise(site, std)), TOUCHED)


def assert_adds_up(name: str, found: Mapping[int, Float]) -> None:
    """The stream grows by its branches and by nothing else; [n, W] by site."""

    def at(point: Point, layer: int) -> Float:
        return found[Site(point, layer).index]

    for layer in range(LAYERS):
        steps = [(Point.RESID_PRE, Point.ATTN_OUT, Point.MLP_OUT, Point.RESID_POST)]
        if name not in NO_MID:
            steps = [
                (Point.RESID_PRE, Point.ATTN_OUT, Point.RESID_MID),
                (Point.RESID_MID, Point.MLP_OUT, Point.RESID_POST),
            ]
        for *parts, result in steps:
            want = at(result, layer)
            got = np.sum([at(point, layer) for point in parts], axis=0)
            assert np.abs(got - want).max() < ROWS * np.abs(want).max(), (layer, result)


def run(case: Case, site: int | None, spans: Spans = SPANS, max_tokens: int = 1) -> Outcome:
    """One prompt, captured everywhere, steered at a site."""
    acts = ()
    if site is not None:
        acts = (Act(Kind.ADD, (DIGEST,), ((site, (0,)),), spans, SCALE),)
    return run_acts(case, acts, max_tokens)


def run_acts(case: Case, acts: Sequence[Act], max_tokens: int = 1) -> Outcome:
    """One prompt with acts, captured everywhere."""
    (outcome,) = run_batch(case, [acts], max_tokens)
    return outcome


def run_batch(case: Case, batch: Sequence[Sequence[Act]], max_tokens: int = 1) -> list[Outcome]:
    """One prompt with the acts of each request of a batch, captured everywhere."""
    everything = Capture(tuple(sites_of(case.name)), EVERYWHERE)
    plans = [Plan("", tuple(acts), (everything,)) for acts in batch]
    return case.engine.run([PROMPT] * len(plans), plans, max_tokens=max_tokens)


def replace_rows(
    case: Case,
    site: int,
    rows: Float,
    positions: Sequence[int],
    alpha: float = 1.0,
    kind: Kind = Kind.REPLACE,
) -> list[Act]:
    """Puts rows, [n, W], at positions of a site, or adds them last."""
    digest = hashlib.sha256(rows.tobytes()).digest()
    case.engine.load({digest: rows})
    return [
        Act(kind, (digest,), ((site, (n,)),), ((position, position + 1),), alpha)
        for n, position in enumerate(positions)
    ]


def same(one: Outcome, other: Outcome) -> bool:
    """Equal in every bit."""
    rows = all(
        np.array_equal(rows_at(one, site), rows_at(other, site))
        for site in one.rows.keys() | other.rows.keys()
    )
    return rows and one.token_ids == other.token_ids and one.logprobs == other.logprobs


def rows_at(outcome: Outcome, site: int) -> Float:
    """Captured rows; a router's fill the first columns."""
    rows: Float = outcome.stream(site)
    return rows[:, :EXPERTS] if site >= ROUTERS else rows


def worst(outcome: Outcome, reference: Run) -> float:
    """The largest relative error of a captured stream over all sites."""
    return max(
        float(np.abs(rows_at(outcome, site) - stream).max() / np.abs(stream).max())
        for site, stream in reference.streams.items()
    )


def test_captured_streams_equal_hugging_face_at_every_site(case: Case) -> None:
    outcome = run(case, None)
    assert sorted(outcome.rows) == sorted(case.plain.streams) == sites_of(case.name)
    assert worst(outcome, case.plain) < ROWS
    assert np.abs(outcome.logits() - case.plain.logprobs[-1]).max() < LOGPROBS


def test_rows_of_generated_tokens_equal_hugging_face_at_every_site(case: Case) -> None:
    """Each is computed in a step of its own, by the paths of decode."""
    for site, token_ids, reference in case.continued:
        outcome = run(case, site, EVERYWHERE, GENERATED)
        assert outcome.token_ids == token_ids, site
        positions = [*range(len(PROMPT) + GENERATED - 1)]
        assert all(sorted(rows) == positions for rows in outcome.rows.values())
        assert worst(outcome, reference) < ROWS, site
        for step in range(GENERATED):
            want = reference.logprobs[len(PROMPT) - 1 + step]
            assert np.abs(outcome.logits(step) - want).max() < LOGPROBS, (site, step)


def test_the_stream_grows_by_its_branches_and_by_nothing_else(case: Case) -> None:
    for site in (None, *branches().intersection(case.steered)):
        outcome = run(case, site)
        assert_adds_up(case.name, {s: outcome.stream(s) for s in outcome.rows if s < ROUTERS})


def test_a_vector_added_to_attentions_branch_does_what_it_does_to_the_stream(case: Case) -> None:
    if case.name in NO_MID:
        pytest.skip("a parallel block has no stream after attention")
    one, other = (run(case, Site(point, 1).index) for point in (Point.ATTN_OUT, Point.RESID_MID))
    assert np.abs(one.logits() - other.logits()).max() < LOGPROBS


def test_an_added_vector_does_what_the_same_hook_does_in_hugging_face(case: Case) -> None:
    for site, reference in case.steered.items():
        outcome = run(case, site)
        assert worst(outcome, reference) < ROWS, site
        assert np.abs(outcome.logits() - reference.logprobs[-1]).max() < LOGPROBS, site
        effect = np.abs(reference.logprobs[-1] - case.plain.logprobs[-1]).max()
        assert effect > 1e-2, site


def test_replaced_rows_do_what_the_same_hook_does_in_hugging_face(case: Case) -> None:
    for site, reference in case.replaced.items():
        rows = case.other.streams[site][TOUCHED]
        outcome = run_acts(case, replace_rows(case, site, rows, TOUCHED))
        assert worst(outcome, reference) < ROWS, site
        assert np.abs(outcome.logits() - reference.logprobs[-1]).max() < LOGPROBS, site
        effect = np.abs(reference.logprobs[-1] - case.plain.logprobs[-1]).max()
        assert effect > 1e-2, site
        if site not in branches():  # a gain rounds the row
            assert np.array_equal(outcome.stream(site)[TOUCHED], rows), site
        assert outcome.released is not None
        assert sum(dose.rows for dose in outcome.released.doses) == len(TOUCHED)


def test_noise_does_what_the_same_hook_does_in_hugging_face(case: Case) -> None:
    assert case.engine.sites is not None
    assert case.engine.sites.embedding_std == pytest.approx(case.embedding_std, rel=1e-6)
    for site, reference in case.noisy.items():
        rows = noise(site, case.embedding_std)
        outcome = run_acts(case, replace_rows(case, site, rows, TOUCHED, kind=Kind.ADD_LAST))
        assert worst(outcome, reference) < ROWS, site
        assert np.abs(outcome.logits() - reference.logprobs[-1]).max() < LOGPROBS, site
        effect = np.abs(reference.logprobs[-1] - case.plain.logprobs[-1]).max()
        assert effect > 1e-2, site


def test_gates_that_read_at_any_point_do_what_hooks_do_in_hugging_face(case: Case) -> None:
    outcomes = run_batch(case, [run.gated.acts for run in case.gated], GATED_TOKENS)
    for expected, outcome in zip(case.gated, outcomes, strict=True):
        assert outcome.token_ids == expected.token_ids, expected.gated
        assert worst(outcome, expected.run) < ROWS, expected.gated
        for step in range(GATED_TOKENS):
            want = expected.run.logprobs[len(PROMPT) - 1 + step]
            assert np.abs(outcome.logits(step) - want).max() < LOGPROBS, (step, expected.gated)
    opened = [np.array(expected.opened) for expected in case.gated]
    assert sum(0.1 < one.mean() < 0.9 for one in opened) == len(case.shut)
    assert {one.mean() for one in opened} > {0.0, 1.0}


def test_gates_that_no_token_opens_change_no_bit(case: Case) -> None:
    """Two batches of as many requests, with and without acts, have the same schedule."""
    plain = run_batch(case, [()] * len(case.shut), GATED_TOKENS)
    shut = run_batch(case, [one.acts for one in case.shut], GATED_TOKENS)
    for gated, one, other in zip(case.shut, plain, shut, strict=True):
        assert same(one, other), gated


def branches() -> set[int]:
    """The sites of branches."""
    return {Site(point, layer).index for point in BRANCHES for layer in range(LAYERS)}


def test_all_rows_of_another_prompt_at_any_site_of_the_stream_give_its_logits(case: Case) -> None:
    everywhere = range(len(PROMPT))
    for site in sorted(case.other.streams.keys() - branches()):
        if site >= ROUTERS:
            continue
        rows = case.other.streams[site]
        whole = replace_rows(case, site, rows, everywhere)
        outcome, all_but_one = run_batch(
            case, [whole, replace_rows(case, site, rows[:-1], everywhere[:-1])]
        )
        assert np.abs(outcome.logits() - case.other.logprobs[-1]).max() < LOGPROBS, site
        assert np.abs(all_but_one.logits() - case.other.logprobs[-1]).max() > LOGPROBS, site


def test_replacing_rows_by_themselves_under_other_ops_changes_no_bit(case: Case) -> None:
    """Two batches of the same requests, with and without replacements, have the same schedule."""
    for site in case.steered:
        rows, pulled = ((site, (0,)),), (Band(-0.1, 0.1, 0.5),)
        before: list[tuple[Act, ...]] = [
            (),
            (Act(Kind.ADD, (DIGEST,), rows, SPANS, SCALE),),
            (Act(Kind.PULL, (DIGEST,), rows, SPANS, bands=(Band(0.0, 0.0, 1.0),)),),
            (
                Act(Kind.NORM_ADD, (DIGEST,), rows, SPANS, 0.3),
                Act(Kind.PULL, (DIGEST,), rows, SPANS, bands=pulled),
            ),
        ]
        plain = run_batch(case, before, GENERATED)
        # The replacement acts last, whatever its place in the list.
        replacements = [
            [*replace_rows(case, site, one.stream(site)[TOUCHED], TOUCHED), *acts]
            for one, acts in zip(plain, before, strict=True)
        ]
        patched = run_batch(case, replacements, GENERATED)
        for one, other, acts in zip(plain, patched, before, strict=True):
            assert same(one, other), (site, acts)


def test_a_row_moves_from_one_prompts_to_the_others_as_alpha_rises(case: Case) -> None:
    site, position = Site(Point.RESID_POST, 1).index, 9
    row = case.other.streams[site][[position]]
    plain = run_acts(case, ())
    assert same(plain, run_acts(case, replace_rows(case, site, row, [position], alpha=0.0)))
    start = plain.stream(site)[position]
    for alpha in (0.25, 0.5, 0.75, 1.0):
        outcome = run_acts(case, replace_rows(case, site, row, [position], alpha))
        want = start + alpha * (row[0] - start)
        np.testing.assert_allclose(outcome.stream(site)[position], want, rtol=1e-5, atol=1e-5)


def test_a_point_that_the_architecture_lacks_is_refused_by_name(case: Case) -> None:
    assert case.engine.sites is not None
    expected = {}
    if case.name in NO_MID:
        expected[Point.RESID_MID] = "attention and MLP run in parallel on the same stream"
    assert dict(case.engine.sites.refused) == expected
    routed = LAYERS if case.name in MIXTURES else 0
    assert case.engine.sites.experts == dict.fromkeys(range(routed), EXPERTS)
    assert case.engine.sites.unrouted == {}
