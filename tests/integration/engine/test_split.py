"""A model split over two processes shows what Hugging Face's whole model shows, each row once."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rheostat_engine import ROUTERS, Plan, Point, Site, Window
from rheostat_engine.plan.points import site_count

from .forked import Context
from .models import EXPERTS, LAYERS, MIXTURES, build
from .offline import OfflineEngine, Outcome
from .plans import EVERYWHERE, add, as_hooks, capture, prompts, put, vector
from .reference import HfReference
from .test_attach import assert_rows, everything, planned, stepping
from .test_gates import check_cases
from .test_positions import VECTORS, assert_as_reference
from .test_shared_answers import OPEN, SHUT, gated, next_turn

pytestmark = pytest.mark.integration

Start = Callable[..., OfflineEngine]
SPLITS = {
    "llama over tensors": ("llama", {"tensor_parallel_size": 2}),
    "a mixture over tensors": ("qwen3_moe", {"tensor_parallel_size": 2}),
    # On a CPU vLLM 0.32 runs a pipeline only if it has warmed the model up, as it does to compile.
    "llama over layers": ("llama", {"pipeline_parallel_size": 2, "enforce_eager": False}),
}


@pytest.fixture(scope="module", autouse=True)
def workers_are_forked() -> Iterator[None]:
    """The eight workers of these tests import vLLM once."""
    from vllm.v1.executor import multiproc_executor

    context = Context()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiproc_executor, "get_mp_context", lambda: context)
        yield


def test_mates_of_steered_requests_are_bit_identical_to_stock_split_alike(start: Start) -> None:
    """The first test here, because its last engine is the one of the next tests."""
    options = {"tensor_parallel_size": 2}
    batch = prompts(6, 20, 30, seed=4)
    plain = start("llama", sited=False, **options).run(batch, max_tokens=6)
    engine = start("llama", **options)
    engine.load(dict(vector(seed) for seed in range(VECTORS)))
    middle = 4 * (LAYERS // 2)
    steered = Plan("", (add(0, middle, EVERYWHERE, 2.0),), capture(middle).captures)
    replaced = Plan("", (put(1, middle, ((4, 6), (22, 24))),))
    other = capture(*range(site_count(LAYERS)))
    mixed = engine.run(batch, [steered, None, other, replaced, None, other], max_tokens=6)
    for number, (one, two) in enumerate(zip(plain, mixed, strict=True)):
        same = one.token_ids == two.token_ids and one.logprobs == two.logprobs
        assert same == (number % 3 > 0)


class Split:
    """An engine of two workers, and the reference."""

    def __init__(self, name: str, engine: OfflineEngine, reference: HfReference) -> None:
        self.name = name
        self.engine = engine
        self.reference = reference
        stream = range(site_count(LAYERS))
        routers = range(ROUTERS, ROUTERS + LAYERS if name in MIXTURES else ROUTERS)
        self.sites = (*stream, *routers)


@pytest.fixture(scope="module", params=SPLITS.values(), ids=SPLITS)
def split(request: pytest.FixtureRequest, start: Start, models_root: Path) -> Split:
    name, options = request.param
    reference = HfReference(name, build(name, models_root))
    engine = start(name, **options)
    engine.load(dict(vector(seed) for seed in range(VECTORS)))
    return Split(name, engine, reference)


def trimmed(outcome: Outcome) -> Outcome:
    """With a router's rows as wide as they are."""
    for site, rows in outcome.rows.items():
        if site >= ROUTERS:
            outcome.rows[site] = {position: row[:EXPERTS] for position, row in rows.items()}
    return outcome


def test_steering_and_captures_at_every_site_equal_hugging_faces(split: Split) -> None:
    sites = split.engine.sites
    assert sites is not None
    assert dict(sites.refused) == {}
    assert sites.experts == dict.fromkeys(range(LAYERS if split.name in MIXTURES else 0), EXPERTS)
    batch = prompts(6, 20, 30, seed=1)
    own = capture(*split.sites).captures
    post = [Site(Point.RESID_POST, layer).index for layer in range(LAYERS)]
    rows = tuple(put(n % VECTORS, post[0], ((n, n + 1),)) for n in range(8))
    plans = [
        Plan("", (), own),
        Plan("", (add(0, 1, EVERYWHERE, 2.0), add(1, 4 * LAYERS - 2, ((3, 25),))), own),
        Plan("", (add(2, 3, ((5, 9),), 3.0),), own),
        None,
        Plan("", (put(0, post[0], ((7, 8),)), put(1, post[-1], ((4, 6), (22, 24)), 0.5)), own),
        Plan("", (rows[5],), own),
    ]
    shared = Plan("", rows, own, measured=False, window=Window(5, 6, 0))
    outcomes = split.engine.run(batch, [*plans[:-1], shared], max_tokens=6)
    for prompt, plan, outcome in zip(batch, plans, outcomes, strict=True):
        assert_as_reference(split.reference, prompt, plan or Plan(""), trimmed(outcome))
        if plan is not None:
            positions = list(range(len(prompt) + 5))
            found = {site: sorted(rows) for site, rows in outcome.rows.items()}
            assert found == dict.fromkeys(split.sites, positions)
            assert outcome.duplicates == 0
            assert outcome.released is not None
            assert outcome.released.captured == {site: len(positions) for site in split.sites}
            steered = {dose.site: dose.rows for dose in outcome.released.doses}
            assert len(steered) == (len(plan.acts) if plan is not plans[-1] else 0)


def test_the_lens_is_read_by_the_last_stage(split: Split) -> None:
    """Every rank of the stage takes part, because each has a part of the vocabulary."""
    sites = split.engine.sites
    assert sites is not None
    assert (sites.no_lens, sites.no_directions) == ("", "")
    last = Site(Point.RESID_POST, LAYERS - 1).index
    prompt = prompts(1, 9, 10, seed=3)[0]
    (outcome,) = split.engine.run([prompt], [capture(last)], max_tokens=1)
    row = np.array(outcome.rows[last][len(prompt) - 1], "<f4")
    tokens = [3, 70, 126]
    call = split.engine.llm.collective_rpc
    read = [a for a in call("rheostat_lens", args=(row.tobytes(), 2, tokens, b"")) if a is not None]
    assert read
    for answer in read:
        logprobs = np.frombuffer(answer["logprobs"], "<f4")
        expected = [outcome.logprobs[0][token] for token in tokens]
        np.testing.assert_allclose(logprobs, expected, atol=2e-4)
    made = [a for a in call("rheostat_directions", args=(tokens,)) if a is not None]
    assert len(made) == len(read)
    for answer, (weights, offsets) in zip(read, made, strict=True):
        directions = np.frombuffer(weights, "<f4").reshape(len(tokens), -1)
        scale = np.frombuffer(answer["scales"], "<f4")[0]
        logits = scale * (directions @ row) + np.frombuffer(offsets, "<f4")
        logprobs = np.frombuffer(answer["logprobs"], "<f4")
        normalizer = np.frombuffer(answer["log_normalizers"], "<f4")[0]
        np.testing.assert_allclose(logits, logprobs + normalizer, atol=2e-4)


def test_gates_and_signals_are_those_of_the_whole_model(split: Split) -> None:
    """Each rank decides by itself, from the whole stream."""
    assert split.engine.sites is not None
    if split.engine.sites.world_size > 1:
        pytest.skip("a pipeline, for which gates are not served")
    check_cases(split.engine, split.reference)


def test_answers_are_shared_as_the_first_tensor_rank_reports(split: Split) -> None:
    """Over a pipeline, the answer stays private."""
    (prompt,) = prompts(1, 70, 71, seed=70)
    split.engine.load(dict(vector(seed) for seed in range(6)))
    assert split.engine.sites is not None
    whole = 128 if split.engine.sites.world_size == 1 else 64
    assert next_turn(split.engine, prompt, None)[0] == 128
    assert next_turn(split.engine, prompt, gated(70, SHUT))[0] == whole
    assert next_turn(split.engine, prompt, gated(70, OPEN))[0] == 64


def test_each_row_is_delivered_by_one_worker(split: Split) -> None:
    before = split.engine.stats_of_all()
    (prompt,) = prompts(1, 20, 21, seed=2)
    (outcome,) = split.engine.run([prompt], [capture(*split.sites)], max_tokens=1)
    delivered = [
        new["captured_rows"] - old["captured_rows"]
        for old, new in zip(before, split.engine.stats_of_all(), strict=True)
    ]
    assert outcome.duplicates == 0
    total = 20 * len(split.sites)
    if split.engine.sites is not None and split.engine.sites.world_size == 1:
        assert delivered == [total, 0]
    else:
        # The stream between the two stages is the first one's.
        first = site_count(LAYERS // 2) * 20
        assert delivered == [first, total - first]


def test_requests_that_run_are_captured_from_one_position_on_all_workers(split: Split) -> None:
    stepped = stepping(split.engine)
    batch = prompts(4, 30, 40, seed=3)
    for number, prompt in enumerate(batch):
        stepped.begin(f"s{number}", prompt, planned(prompt, number), 10)
    stepped.step(4)
    stepped.update_captures(1, {f"s{n}": everything() for n in range(4)})
    outcomes = stepped.finish()
    for number in range(4):
        name = f"s{number}"
        assert assert_rows(stepped, split.reference, name, outcomes[name]) > len(batch[number])
    for stats in split.engine.stats_of_all():
        held = {key: stats[key] for key in stats if key.endswith("_used") or key == "requests"}
        assert set(held.values()) == {0}


def test_gains_act_from_one_position_on_all_workers(split: Split) -> None:
    stepped = stepping(split.engine)
    (prompt,) = prompts(1, 20, 21, seed=5)
    stream, middle = range(site_count(LAYERS)), 4 * (LAYERS // 2)
    acts = tuple(add(n, site, EVERYWHERE, 2.0) for n, site in enumerate((1, middle, middle + 2)))
    stepped.begin("gained", prompt, Plan("", acts, capture(*stream).captures), 12)
    stepped.step(4)
    stepped.give_gains("gained", tuple(replace(act, gain=n) for n, act in enumerate(acts)))
    stepped.set_gains(1, "gained", {0: 0.25, 1: 1.5})
    stepped.step(3)
    stepped.set_gains(2, "gained", {1: 0.0, 2: 3.0})
    outcome = stepped.finish()["gained"]
    tokens = [*prompt, *outcome.token_ids[:-1]]
    one, two = (event.first for event in outcome.gained)
    assert [event.change for event in outcome.gained] == [1, 2]
    assert len(prompt) < one < two < len(tokens)
    gains = {(0, one): (1, 1, 1), (one, two): (0.25, 1.5, 1), (two, len(tokens)): (0.25, 0, 3)}
    expected = tuple(
        replace(act, spans=(span,), scale=act.scale * gain)
        for span, each in gains.items()
        for act, gain in zip(acts, each, strict=True)
    )
    streams = split.reference.run(tokens, as_hooks(Plan("", expected), VECTORS, tokens)).streams
    for site in stream:
        np.testing.assert_allclose(outcome.stream(site), streams[site], rtol=1e-3, atol=1e-3)


def test_gates_of_parallel_blocks_are_those_of_the_whole_model(
    start: Start, models_root: Path
) -> None:
    """Their attention and MLP read the same row. The last test, because it starts a new engine."""
    reference = HfReference("gpt_neox", build("gpt_neox", models_root))
    check_cases(start("gpt_neox", tensor_parallel_size=2), reference, has_mid=False)
