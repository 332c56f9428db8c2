"""Requests that run are captured from their next step on: Hugging Face's rows, each once."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rheostat_engine import OPEN_END, Capture, Plan

from .groups import IN_TIGHT, PLAIN, TIGHT
from .models import LAYERS, build
from .offline import OfflineEngine, Outcome
from .plans import EVERYWHERE, add, as_hooks, capture, prompts, vector
from .reference import HfReference
from .stepped import Stepped

pytestmark = pytest.mark.integration

VECTORS = 3
Start = Callable[..., OfflineEngine]
NEW = (0, 3, 4 * LAYERS)
"""Sites that are asked for while requests run."""


@pytest.fixture(scope="module")
def reference(models_root: Path) -> HfReference:
    return HfReference("llama", build("llama", models_root))


def stepping(engine: OfflineEngine) -> Stepped:
    """Step by step, with vectors to steer with."""
    engine.load(dict(vector(seed) for seed in range(VECTORS)))
    return Stepped(engine)


def assert_rows(
    stepped: Stepped,
    reference: HfReference,
    name: str,
    outcome: Outcome,
) -> int:
    """Exactly the rows that should have come, have; returns the first of the new ones."""
    plan = stepped.plans[name] or Plan(name)
    tokens = [*stepped.prompts[name], *outcome.token_ids[:-1]]
    streams = reference.run(tokens, as_hooks(plan, VECTORS, tokens)).streams
    (attached,) = outcome.attached
    assert attached.error == ""
    first, end = attached.first, len(tokens)
    wanted = {(site, p) for site in NEW for p in range(first, end)}
    for one in plan.captures:
        wanted |= {(s, p) for s in one.sites for a, b in one.spans for p in range(a, min(b, first))}
    assert {(s, p) for s, rows in outcome.rows.items() for p in rows} == wanted
    assert outcome.duplicates == 0
    for site, rows in outcome.rows.items():
        for position, row in rows.items():
            np.testing.assert_allclose(row, streams[site][position], rtol=1e-3, atol=1e-3)
    return first


def everything(name: str = "") -> Plan:
    return Plan(name, (), (Capture(NEW, EVERYWHERE),))


def planned(prompt: list[int], number: int) -> Plan | None:
    """No plan, steering, its own captures, or both."""
    act = add(0, 4, ((len(prompt) - 3, OPEN_END),), 2.0)
    own = (Capture((2, 3), ((5, len(prompt) + 3),)),)
    return [None, Plan("", (act,)), Plan("", (), own), Plan("", (act,), own)][number % 4]


@pytest.mark.parametrize(
    ("steps", "options"),
    [
        *((steps, {"max_num_seqs": 4, "max_num_batched_tokens": 32}) for steps in (1, 2, 5, 9)),
        pytest.param(12, TIGHT, marks=IN_TIGHT),
    ],
    ids=["1", "2", "5", "9", "12, compiled"],
)
def test_rows_begin_where_it_is_said_in_a_chunked_prompt_and_after_it(
    start: Start, reference: HfReference, steps: int, options: dict[str, object]
) -> None:
    engine = start(**options)
    batch = prompts(4, 30, 40, seed=3)
    alone = [o.token_ids for o in engine.run(batch, max_tokens=12)] if steps == 2 else None
    stepped = stepping(engine)
    for number, prompt in enumerate(batch):
        stepped.begin(f"p{number}", prompt, planned(prompt, number), 12)
    stepped.step(steps)
    stepped.update_captures(1, {f"p{n}": everything() for n in range(4)})
    outcomes = stepped.finish()
    firsts = [assert_rows(stepped, reference, f"p{n}", outcomes[f"p{n}"]) for n in range(4)]
    assert max(firsts) > 0
    if alone is not None:
        assert outcomes["p0"].token_ids == alone[0]
    assert engine.stats()["requests"] == 0


def test_rows_come_once_through_preemption(start: Start, reference: HfReference) -> None:
    engine = start(max_num_seqs=6, num_gpu_blocks_override=9)
    batch = prompts(6, 30, 40, seed=4)
    for steps in (3, 60):
        stepped = stepping(engine)
        names = [f"q{steps}-{number}" for number in range(6)]
        for number, (name, prompt) in enumerate(zip(names, batch, strict=True)):
            stepped.begin(name, prompt, planned(prompt, number), 70)
        stepped.step(steps)
        stepped.update_captures(1, dict.fromkeys(names, everything()))
        outcomes = stepped.finish()
        preemptions = sum(o.released.preemptions for o in outcomes.values() if o.released)
        assert preemptions > 0
        for name in names:
            assert_rows(stepped, reference, name, outcomes[name])


@PLAIN
def test_one_that_was_not_scheduled_is_captured_from_where_its_cached_prefix_ends(
    start: Start, reference: HfReference
) -> None:
    engine = start()
    (prompt,) = prompts(1, 100, 101, seed=5)
    engine.run([prompt], max_tokens=2, skip_cache=False)
    stepped = stepping(engine)
    stepped.update_captures(1, {"late": everything(), "planned": everything()})
    stepped.begin("late", prompt, None, 4)
    stepped.begin("planned", prompt, Plan("", (), capture(2, spans=((98, 100),)).captures), 4)
    outcomes = stepped.finish()
    for name in ("late", "planned"):
        assert assert_rows(stepped, reference, name, outcomes[name]) == 96


@PLAIN
def test_what_is_not_wanted_any_more_is_not_copied(start: Start, reference: HfReference) -> None:
    engine = start()
    (prompt,) = prompts(1, 20, 21, seed=6)
    stepped = stepping(engine)
    stepped.begin("r", prompt, None, 12)
    stepped.step(2)
    stepped.update_captures(1, {"r": everything()})
    stepped.step(3)
    before = engine.stats()["captured_rows"]
    stepped.update_captures(2, {"r": Plan("r")})
    outcome = stepped.finish()["r"]
    assert engine.stats()["captured_rows"] == before
    first, last = (one.first for one in outcome.attached)
    positions = {site: sorted(rows) for site, rows in outcome.rows.items()}
    assert positions == {site: list(range(first, last)) for site in NEW}
    assert engine.stats()["requests"] == 0
