"""Signals and rules over gRPC, on a real engine, against hooks in Hugging Face's model."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pytest
import torch

import rheostat

from ..engine.reference import Change, Float, HfReference
from .test_gates import (
    ACT,
    ALSO_READ,
    BOTH,
    EVERY_LAYER,
    LATE,
    MOOD,
    OPTIONS,
    PROMPT,
    READ,
    Readings,
    direction,
    probe,
    push,
    running_mean,
    site,
    two_in_a_row,
)

pytestmark = pytest.mark.integration

OTHER = direction(5)


@pytest.fixture
def readings(engine: rheostat.Engine) -> Readings:
    out = engine.generate(PROMPT, capture=EVERY_LAYER, **OPTIONS)
    return Readings(out.activations["resid_post", READ] @ MOOD[0], len(out.prompt_token_ids))


def read_by_hooks(
    reference: HfReference, tokens: list[int], layer: int, along: Float = MOOD
) -> Float:
    """What a hook reads of each token, in float64: [tokens]."""
    found: list[Float] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        found.append(x.double().numpy() @ along[0].astype(np.float64))
        return x

    reference.run(tokens, [Change(site(layer), note, range(len(tokens)))])
    return found[-1]


def tokens_of(out: rheostat.Generation) -> list[int]:
    """The tokens that were inputs of the model."""
    return [*out.prompt_token_ids, *out.token_ids[:-1]]


def test_probes_read_what_hooks_read_in_hugging_face(
    engine: rheostat.Engine, reference: HfReference
) -> None:
    wide = probe(layers="all", name="wide")
    other = rheostat.probe(
        rheostat.inline(OTHER),
        points="resid_post",
        layers=LATE,
        where="generated",
        bias=0.5,
        activation="relu",
    )
    out = engine.generate(PROMPT, probes=[wide, other], **OPTIONS)
    tokens = tokens_of(out)
    assert out.signals.positions.tolist() == list(range(len(tokens)))
    assert out.signals.token_ids.tolist() == tokens
    for layer in range(6):
        expected = read_by_hooks(reference, tokens, layer)
        np.testing.assert_allclose(out.signals[wide][:, layer], expected, atol=2e-3, rtol=0)
    length = len(out.prompt_token_ids)
    found = out.signals[other]
    assert np.isnan(found[:length]).all()
    expected = np.maximum(read_by_hooks(reference, tokens, LATE, OTHER) + 0.5, 0)
    np.testing.assert_allclose(found[length:], expected[length:], atol=2e-3, rtol=0)


def test_a_probe_with_a_row_per_layer_reads_each_layer_with_its_own_row(
    engine: rheostat.Engine, reference: HfReference
) -> None:
    layers = [0, 2, 3, 5]
    rows = np.concatenate([direction(20 + layer) for layer in layers])
    read = rheostat.probe(rheostat.inline(rows), points="resid_post", layers=layers)
    plain = engine.generate(PROMPT, probes=read, **OPTIONS)
    tokens = tokens_of(plain)
    expected = [
        read_by_hooks(reference, tokens, layer, row[None])
        for layer, row in zip(layers, rows, strict=True)
    ]
    np.testing.assert_allclose(plain.signals[read], np.stack(expected, 1), atol=2e-3, rtol=0)
    largest = np.max(expected, 0)
    ordered = np.sort(largest)
    # The bound lies in the widest gap between readings, so that rounding changes no firing.
    at = len(ordered) // 3 + int(np.argmax(np.diff(ordered[len(ordered) // 3 : -2])))
    bound = float(ordered[at : at + 2].mean())
    rule = rheostat.Rule("any", read.above(bound), rheostat.Observe())
    ruled = engine.generate(PROMPT, rules=rule, **OPTIONS)
    fired = ruled.signals.firings["any"].tolist()
    assert fired == np.flatnonzero(largest > bound).tolist()
    assert 0 < len(fired) < len(tokens)


def test_signals_of_steered_tokens_are_those_behind_the_steering(
    engine: rheostat.Engine,
) -> None:
    read = probe(layers=ACT)
    out = engine.generate(PROMPT, probes=read, steering=push(), capture=EVERY_LAYER, **OPTIONS)
    rows = out.activations["resid_post", ACT] @ MOOD[0]
    np.testing.assert_allclose(out.signals[read], rows, atol=1e-3, rtol=0)


def test_a_gate_says_how_far_it_is_open(engine: rheostat.Engine, readings: Readings) -> None:
    middle = readings.middle
    gate = rheostat.gate(probe().summed(), form=rheostat.Ramp(middle - 1, middle + 1), signals=True)
    read = probe(name="also")
    out = engine.generate(PROMPT, steering=push(gate), probes=read, **OPTIONS)
    expected = np.clip((out.signals[read] - middle + 1) / 2, 0, 1)
    np.testing.assert_allclose(out.signals.openness(0), expected, atol=1e-5, rtol=0)
    assert len(np.unique(expected)) > 2


class Case(NamedTuple):
    """A rule, and the tokens at which it fires."""

    when: Callable[[float], rheostat.Condition]
    fires: Callable[[Float, float], Float]
    """From the readings [sites, n] and the middle of the first ones to whether it fires, [n]."""
    layers: tuple[int, ...] = (READ,)


CASES = {
    "per token": Case(lambda m: probe().above(m), lambda z, m: z[0] > m),
    "below": Case(lambda m: probe().below(m), lambda z, m: z[0] < m),
    "mean so far": Case(
        lambda m: probe().above(m, pool="mean"), lambda z, m: running_mean(z[0]) > m
    ),
    "two in a row": Case(
        lambda m: probe().above(m, for_tokens=2), lambda z, m: two_in_a_row(z[0], m) > 0
    ),
    "all layers": Case(
        lambda m: probe(layers=BOTH).above(m, combine="all"), lambda z, m: (z > m).all(0), BOTH
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_rule_fires_where_hooks_say_so(
    engine: rheostat.Engine, reference: HfReference, readings: Readings, name: str
) -> None:
    case, middle = CASES[name], readings.middle
    rule = rheostat.Rule("grim", case.when(middle), rheostat.Observe())
    out = engine.generate(PROMPT, rules=rule, **OPTIONS)
    tokens = tokens_of(out)
    z = np.stack([read_by_hooks(reference, tokens, layer) for layer in case.layers])
    expected = np.flatnonzero(case.fires(z, middle)).tolist()
    assert out.signals.firings.get("grim", np.zeros(0)).tolist() == expected
    assert 0 < len(expected) < len(tokens)
    (listed,) = out.receipt.rules
    assert [p for one in listed.samples[0].positions for p in one] == expected
    assert listed.samples[0].position_count == len(expected)


@pytest.mark.parametrize("drop_sampled", [True, False])
def test_a_rule_stops_at_the_row_that_fires(
    engine: rheostat.Engine, readings: Readings, drop_sampled: bool
) -> None:
    plain = engine.generate(PROMPT, **OPTIONS)
    length = readings.prompt_len
    generated = readings.numbers[length:]
    bound = float(np.sort(generated)[len(generated) // 2])
    row = length + int(np.flatnonzero(generated > bound)[0])
    read = probe(where="generated")
    rule = rheostat.Rule("grim", read.above(bound), rheostat.Stop("too grim", drop_sampled))
    out = engine.generate(
        PROMPT, rules=rule, probes=read, capture=rheostat.Capture("resid_post", READ), **OPTIONS
    )
    kept = row - length + 1 + (not drop_sampled)
    assert out.token_ids == plain.token_ids[:kept]
    assert plain.text.startswith(out.text)
    assert len(out.logprobs) == kept
    sample = out.samples[0]
    assert (sample.finish_reason, sample.stop, sample.label) == ("rule", "grim", "too grim")
    assert out.signals.positions.tolist() == list(range(length, row + 1))
    assert len(out.activations["resid_post", READ]) == row + 1
    assert out.receipt.rules[0].samples == (
        rheostat.RuleFirings(0, (range(row, row + 1),), 1, stopped=True),
    )


def test_a_rule_at_a_prompt_token_generates_nothing(engine: rheostat.Engine) -> None:
    rule = rheostat.Rule("never", probe(where="prompt").above(-1e6, after_prompt=True))
    out = engine.generate(PROMPT, rules=rule, **OPTIONS)
    assert (out.text, out.token_ids, out.finish_reason) == ("", (), "rule")


def test_a_rule_may_read_behind_everything(engine: rheostat.Engine) -> None:
    rule = rheostat.Rule("late", probe(layers=LATE, where="generated").above(-1e6))
    out = engine.generate(PROMPT, rules=rule, **OPTIONS)
    assert len(out.token_ids) == 1
    assert out.finish_reason == "rule"


def test_a_cached_prompt_is_still_read(engine: rheostat.Engine) -> None:
    long_prompt = " ".join(["Tomorrow", *[PROMPT] * 30])
    engine.generate(long_prompt, **OPTIONS)
    read = probe()
    out = engine.generate(long_prompt, probes=read, **OPTIONS)
    assert out.receipt.cached_prompt_token_count == 0
    assert len(out.signals) == len(tokens_of(out))
    again = engine.generate(long_prompt, probes=probe(where="generated"), **OPTIONS)
    assert again.receipt.cached_prompt_token_count > 0


def test_many_rules_stop_each_its_own_request(engine: rheostat.Engine) -> None:
    plain = engine.generate(PROMPT, capture=EVERY_LAYER, **OPTIONS)
    rows = plain.activations["resid_post", READ][len(plain.prompt_token_ids) :]
    rules, kept = [], []
    for seed in range(10, 34):
        along = direction(seed)
        numbers = rows @ along[0]
        ordered = np.sort(numbers)
        at = len(ordered) - 4 + int(np.argmax(np.diff(ordered[-4:])))
        bound = float(ordered[at : at + 2].mean())  # as far from every number as it can be
        read = rheostat.probe(
            rheostat.inline(along), points="resid_post", layers=READ, where="generated"
        )
        rules.append(rheostat.Rule("grim", read.above(bound)))
        kept.append(int(np.flatnonzero(numbers > bound)[0]) + 1)
    with ThreadPoolExecutor(len(rules)) as threads:
        found = threads.map(lambda rule: engine.generate(PROMPT, rules=rule, **OPTIONS), rules)
    assert [one.token_ids for one in found] == [plain.token_ids[:count] for count in kept]
    assert len(set(kept)) > 4


def test_all_samples_end_with_the_first_that_fires(engine: rheostat.Engine) -> None:
    read = probe(layers=ALSO_READ, where="generated")
    rule = rheostat.Rule("all", read.above(-1e6, for_tokens=3), rheostat.Stop(all_samples=True))
    out = engine.generate(
        PROMPT, rules=rule, n=3, temperature=1.0, max_tokens=12, ignore_eos=True, seed=3
    )
    assert {sample.finish_reason for sample in out.samples} == {"rule"}
    assert max(len(sample.token_ids) for sample in out.samples) == 3


def test_held_back_tokens_are_not_sent_after_a_stop(engine: rheostat.Engine) -> None:
    with engine.session(PROMPT, hold_back=4, **{**OPTIONS, "max_tokens": 200}) as session:
        for event in session:
            if isinstance(event, rheostat.Tokens):
                session.stop()
    assert session.result().finish_reason == "aborted"
    out = engine.generate(PROMPT, hold_back=4, **OPTIONS)
    assert out.token_ids == engine.generate(PROMPT, **OPTIONS).token_ids


def test_a_stream_gives_signals_with_its_tokens(engine: rheostat.Engine) -> None:
    read = probe()
    stream = engine.stream(PROMPT, probes=read, **OPTIONS)
    events = list(stream)
    signals = [event for event in events if isinstance(event, rheostat.Signals)]
    assert len(signals) > 1
    parts = np.concatenate([one[read] for one in signals])
    assert parts.tolist() == stream.result().signals[read].tolist()
