"""Requests under adapters are steered and captured in one batch with others."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from rheostat_engine import Act, Capture, Kind, Plan, Point, Site
from rheostat_engine.plan.points import site_count

from ..adapters import merged, write_adapter
from .models import LAYERS, build
from .offline import OfflineEngine
from .plans import EVERYWHERE, add, prompts, vector
from .reference import Add, HfReference

pytestmark = pytest.mark.integration

TARGETS = {"self_attn.q_proj": (64, 64), "self_attn.o_proj": (64, 64), "mlp.down_proj": (96, 64)}
"""Input and output width of each linear layer that the adapters change."""
TOKENS = 4


class Adapted(NamedTuple):
    """The engine, and a reference per adapter; None: without one."""

    engine: OfflineEngine
    paths: dict[str, Path]
    references: dict[str | None, HfReference]


@pytest.fixture(scope="module")
def adapted(
    start: Callable[..., OfflineEngine],
    models_root: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Adapted:
    folder = tmp_path_factory.mktemp("adapters")
    base = build("llama", models_root)
    paths = {
        name: write_adapter(folder / name, seed, layers=4, targets=TARGETS, scale=0.2)
        for seed, name in enumerate(("a", "b"))
    }
    references: dict[str | None, HfReference] = {None: HfReference("llama", base)}
    for name, path in paths.items():
        references[name] = HfReference("llama", merged(base, path, folder / f"merged-{name}"))
    # One slot more than adapters: on a CPU vLLM reads the last one for tokens without an adapter.
    # vLLM compiles no model with adapters there.
    engine = start(enable_lora=True, max_lora_rank=8, max_loras=3)
    engine.load(dict(vector(seed) for seed in range(3)))
    return Adapted(engine, paths, references)


def test_steered_requests_under_different_adapters_share_a_batch(adapted: Adapted) -> None:
    from vllm.lora.request import LoRARequest

    names: list[str | None] = [None, "a", "b", "a", None, "b"]
    batch = prompts(len(names), 6, 20, seed=41)
    everything = (Capture(tuple(range(site_count(LAYERS))), EVERYWHERE),)
    plans = [
        Plan("", (add(i % 3, 4, scale=1.5),) if i % 2 else (), everything)
        for i in range(len(names))
    ]
    requests = {
        name: LoRARequest(name, number + 1, str(path))
        for number, (name, path) in enumerate(adapted.paths.items())
    }
    loras = [None if name is None else requests[name] for name in names]
    outcomes = adapted.engine.run(batch, plans, max_tokens=TOKENS, loras=loras)
    for number, (name, prompt, plan, outcome) in enumerate(
        zip(names, batch, plans, outcomes, strict=True)
    ):
        tokens = prompt + outcome.token_ids[:-1]
        hooks = [Add(4, 1.5 * vector(number % 3)[1][0], slice(None))] if plan.acts else []
        expected = adapted.references[name].run(tokens, hooks)
        for site, want in expected.streams.items():
            scale = np.abs(want).max()
            np.testing.assert_allclose(outcome.stream(site), want, rtol=0, atol=2e-4 * scale)
        for step in range(TOKENS):
            want = expected.logprobs[len(prompt) - 1 + step]
            np.testing.assert_allclose(outcome.logits(step), want, rtol=0, atol=2e-3)


def test_the_lens_reads_rows_under_an_adapter(adapted: Adapted) -> None:
    """No adapter here changes the head, so the lens of the last row is the model's own answer."""
    from vllm.lora.request import LoRARequest

    last = Site(Point.RESID_POST, LAYERS - 1).index
    batch = prompts(2, 6, 20, seed=42)
    plan = Plan("", (), (Capture((last,), EVERYWHERE),))
    lora = LoRARequest("a", 1, str(adapted.paths["a"]))
    engine = adapted.engine
    outcomes = engine.run(batch, [plan, plan], max_tokens=1, loras=[lora, None])
    rows = [one.rows[last][len(p) - 1] for p, one in zip(batch, outcomes, strict=True)]
    data = np.array(rows * 20, "<f4").tobytes()  # more rows than requests run at a time
    (answer,) = engine.llm.collective_rpc("rheostat_lens", args=(data, 1, [3, 70], b""))
    logprobs = np.frombuffer(answer["logprobs"], "<f4").reshape(40, 2)
    expected = [[one.logprobs[0][token] for token in (3, 70)] for one in outcomes]
    np.testing.assert_allclose(logprobs, expected * 20, rtol=0, atol=2e-3)
    (again,) = engine.run(batch[:1], max_tokens=1, loras=[lora])
    assert again.logprobs[0][3] == pytest.approx(outcomes[0].logprobs[0][3], abs=1e-4)


def test_adapters_do_not_share_what_the_prefix_cache_holds(adapted: Adapted) -> None:
    from vllm.lora.request import LoRARequest

    (prompt,) = prompts(1, 100, 101, seed=42)
    ours = LoRARequest("a", 1, str(adapted.paths["a"]))
    steered = Plan("", (Act(Kind.ADD, (vector(0)[0],), ((4, (0,)),), EVERYWHERE),))
    assert adapted.engine.llm.reset_prefix_cache()
    cached = [
        adapted.engine.run([prompt], [plan], skip_cache=False, loras=[lora])[0].cached
        for plan, lora in (
            (steered, ours),
            (steered, ours),
            (steered, None),
            (None, ours),
            (None, None),
            (None, ours),
        )
    ]
    assert cached == [0, 96, 0, 0, 0, 96]


def test_an_adapter_of_another_model_is_refused_and_the_engine_goes_on(
    adapted: Adapted, tmp_path: Path
) -> None:
    """Only vLLM finds this out, once its engine runs. The server does not start then."""
    from vllm.lora.request import LoRARequest

    other = write_adapter(
        tmp_path / "odd", 0, layers=1, targets={"other.nonsense": (64, 64)}, scale=0.2
    )
    with pytest.raises(ValueError, match="nonsense"):
        adapted.engine.llm.llm_engine.add_lora(LoRARequest("odd", 9, str(other)))
    ours = LoRARequest("a", 1, str(adapted.paths["a"]))
    (outcome,) = adapted.engine.run(prompts(1, 6, 7), max_tokens=TOKENS, loras=[ours])
    assert len(outcome.token_ids) == TOKENS
