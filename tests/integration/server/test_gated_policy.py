"""Gates of the server-wide policy: no call can shed them, and a cached prefix is still read."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

import rheostat
from rheostat_engine import Point, Site

from ..engine.reference import Change, Float, HfReference
from .conftest import Server

pytestmark = pytest.mark.integration

WIDTH, LAYERS, READ, ACT = 128, 6, 1, 3
PROMPT = "The weather was grey and Anna felt"
OPTIONS = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
EVERY_LAYER = rheostat.Capture("resid_post", "all")


def direction(seed: int) -> Float:
    vector = np.random.default_rng(seed).normal(size=(1, WIDTH)).astype(np.float32)
    return (vector / np.linalg.norm(vector)).astype(np.float32)


MOOD, PUSH, OWN = direction(1), 3 * direction(2), 2 * direction(3)


def policy(bound: float) -> rheostat.Intervention:
    """Steers at a layer if the prompt's mean is above a bound."""
    probe = rheostat.probe(
        rheostat.inline(MOOD), points="resid_post", layers=READ, where="prompt", name="mood"
    )
    gate = rheostat.gate(probe.above(bound, pool="mean", after_prompt=True), hold="rest")
    return rheostat.inline(PUSH).at(points="resid_post", layers=ACT).when(gate)


@pytest.fixture
def mean(engine: rheostat.Engine) -> float:
    """What the policy's probe reads of the prompt."""
    out = engine.generate(PROMPT, capture=EVERY_LAYER, **OPTIONS)
    rows = out.activations["resid_post", READ][: len(out.prompt_token_ids)]
    return float((rows @ MOOD[0]).mean())


@pytest.fixture
def cleared(engine: rheostat.Engine) -> Iterator[rheostat.Engine]:
    yield engine
    engine.steering.set_global(None)


def moved_by(rows: Float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x + torch.from_numpy(rows)


def expected(reference: HfReference, tokens: list[int], length: int, own: bool) -> dict[int, Float]:
    """The streams under the open policy, and a steering of the request's own."""
    site = Site(Point.RESID_POST, ACT).index
    acting = range(length - 1, len(tokens))
    changes = [Change(site, moved_by(PUSH), acting)]
    if own:
        changes.append(Change(site, moved_by(OWN), range(len(tokens))))
    return reference.run(tokens, changes).streams


def test_an_open_gate_of_the_server_steers_every_request_and_its_receipt_says_so(
    cleared: rheostat.Engine, reference: HfReference, mean: float
) -> None:
    engine = cleared
    engine.steering.set_global(policy(mean - 0.01))
    own_probe = rheostat.probe(rheostat.inline(OWN), points="resid_post", layers=READ, name="mood")
    own = rheostat.inline(OWN).at(points="resid_post", layers=ACT).when(own_probe.above(-1e6))
    for steering in (None, own):
        out = engine.generate(PROMPT, steering=steering, capture=EVERY_LAYER, **OPTIONS)
        tokens = [*out.prompt_token_ids, *out.token_ids[:-1]]
        streams = expected(reference, tokens, len(out.prompt_token_ids), steering is not None)
        for layer in range(LAYERS):
            wanted = streams[Site(Point.RESID_POST, layer).index]
            np.testing.assert_allclose(
                out.activations["resid_post", layer], wanted, atol=2e-3, rtol=0
            )
        first = out.receipt.interventions[0]
        assert (first.origin, first.index) == ("global", 0)
        assert first.sites[0].row_count >= OPTIONS["max_tokens"]
        assert len(out.receipt.interventions) == 1 + (steering is not None)
    assert engine.steering.get_global().version == out.receipt.global_version


def test_a_cached_prefix_is_still_read(cleared: rheostat.Engine, mean: float) -> None:
    engine = cleared
    plain = engine.generate(PROMPT * 6, **OPTIONS)  # fills the cache
    engine.steering.set_global(policy(mean - 100))
    out = engine.generate(PROMPT * 6, **OPTIONS)
    assert out.receipt.cached_prompt_token_count == 0
    assert out.receipt.interventions[0].sites[0].row_count >= OPTIONS["max_tokens"]
    assert out.token_ids != plain.token_ids
    engine.steering.set_global(policy(mean + 100))
    shut = engine.generate(PROMPT * 6, **OPTIONS)
    assert shut.token_ids == plain.token_ids
    assert shut.receipt.interventions[0].sites[0].row_count == 0


def test_a_baseline_is_gated_as_its_request_is(cleared: rheostat.Engine, mean: float) -> None:
    engine = cleared
    engine.steering.set_global(policy(mean - 0.01))
    gated = engine.generate(PROMPT, **OPTIONS)
    own = rheostat.inline(OWN).at(points="resid_post", layers=ACT)
    out = engine.generate(PROMPT, steering=own, with_baseline=True, **OPTIONS)
    assert out.baseline.token_ids == gated.token_ids


def test_calls_that_run_prompts_are_gated_too(cleared: rheostat.Engine, mean: float) -> None:
    """The gate opens for one of two prompts, at its last token, whose row these calls read."""
    engine = cleared
    other = "A table"
    out = engine.generate(other, capture=EVERY_LAYER, **OPTIONS)
    rows = out.activations["resid_post", READ][: len(out.prompt_token_ids)]
    bound = (mean + float((rows @ MOOD[0]).mean())) / 2
    high, low = (PROMPT, other) if mean > bound else (other, PROMPT)
    there = {"points": "resid_post", "layers": [ACT]}

    def derived() -> Float:
        found = engine.vectors.derive([high], [low], **there)
        return engine.vectors.get(digest=found.vector.digest).values[0]

    def stored(prompt: str) -> Float:
        engine.capture_run(prompt, run_id="gated", **there)
        row = engine.read_run("gated")["resid_post", ACT][-1]
        engine.delete_run("gated")
        return row

    before = derived(), stored(high), stored(low)
    engine.steering.set_global(policy(bound))
    after = derived(), stored(high), stored(low)
    for was, became, moved in zip(before, after, (1, 1, 0), strict=True):
        np.testing.assert_allclose(became - was, moved * PUSH[0], atol=2e-3)


def test_rules_of_the_policy_stop_and_steer_every_request_of_a_real_engine(
    cleared: rheostat.Engine, server: Server
) -> None:
    engine = cleared
    plain = engine.generate(PROMPT, capture=EVERY_LAYER, **OPTIONS)
    length = len(plain.prompt_token_ids)
    read = plain.activations["resid_post", READ] @ MOOD[0]
    row = length + int(np.argmax(read[length:-1]))
    bound = float(read[row]) - 1e-3
    after = rheostat.probe(
        rheostat.inline(MOOD), points="resid_post", layers=READ, where="generated", name="after"
    )
    fires = [p for p in range(length, len(read)) if read[p] > bound]
    engine.steering.set_global(None, rules=rheostat.Rule("grim", after.above(bound)))
    own = rheostat.Rule("grim", after.above(bound), rheostat.Observe())
    for number, rules in enumerate((None, own)):
        out = engine.generate(PROMPT, rules=rules, request_id=f"audited-{number}", **OPTIONS)
        assert (out.finish_reason, out.samples[0].stop) == ("rule", "grim")
        assert out.samples[0].policy_version == engine.steering.get_global().version
        assert out.token_ids == plain.token_ids[: fires[0] - length + 1]
        (found,) = [one for one in out.receipt.rules if one.server_wide]
        assert [p for one in found.samples[0].positions for p in one] == fires[:1]
        assert len(out.receipt.rules) == (1 if rules is None else 2)
    version = out.receipt.global_version
    log = server.log.read_text()
    for number in range(2):
        line = f"policy version={version} rule=grim action=stop request=audited-{number} sample=0"
        assert log.count(f"{line} positions={fires[0]} ended=sample") == 1
    steer = rheostat.Steer(rheostat.inline(PUSH).at(points="resid_post", layers=ACT))
    engine.steering.set_global(None, rules=rheostat.Rule("push", after.above(bound), steer))
    steered = engine.generate(PROMPT, capture=EVERY_LAYER, **OPTIONS)
    rows = steered.activations["resid_post", ACT]
    same = plain.activations["resid_post", ACT]
    assert steered.token_ids[: fires[0] - length + 1] == plain.token_ids[: fires[0] - length + 1]
    np.testing.assert_allclose(rows[: fires[0]], same[: fires[0]], atol=1e-5, rtol=0)
    np.testing.assert_allclose(rows[fires[0]], same[fires[0]] + PUSH[0], atol=1e-3, rtol=0)
    (applied,) = steered.receipt.interventions
    assert (applied.origin, applied.rule_name) == ("global", "push")
