"""Rules that steer, on a real engine, against hooks in Hugging Face's model that decide alike.

A rule that reads behind the sites at which it acts decides at each token what happens to the next
one. So the hooks run once for each generated token: what the rule reads there says how far it holds
at the tokens behind it.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import rheostat

from ..engine.reference import Change, Float, HfReference
from .test_gates import (
    ACT,
    EVERY_LAYER,
    LATE,
    LAYERS,
    MOOD,
    OPTIONS,
    PROMPT,
    PUSH,
    READ,
    probe,
    push,
    reference_streams,
    site,
)
from .test_signals import tokens_of

pytestmark = pytest.mark.integration

Act = Callable[[Float, Float], Float]
"""What the steering makes of rows of the stream, [n, W], and of 1 where the rule holds, [n, 1]."""


class Followed(NamedTuple):
    """What a rule does to a sample."""

    streams: dict[int, Float]
    fired: list[int]
    opened: list[bool]
    """By position: whether it steers."""


def added(x: Float, holds: Float) -> Float:
    return x + holds * PUSH[0]


def follow(
    reference: HfReference,
    tokens: list[int],
    length: int,
    fires: Callable[[Float], bool],
    holds: Callable[[list[int], int], bool],
    act: Act = added,
) -> Followed:
    """Decides token after token what a late rule does.

    Args:
        reference: the model.
        tokens: all inputs.
        length: of the prompt.
        fires: whether the rule fires at the last of some readings.
        holds: whether it holds at a position, after the positions at which it fired.
        act: what the steering does.
    """
    opened: list[bool] = []
    fired: list[int] = []
    read: list[Float] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        read.append(x.double().numpy() @ MOOD[0].astype(np.float64))
        return x

    def change(x: torch.Tensor) -> torch.Tensor:
        holding = np.array(opened, np.float32)[:, None]
        return torch.from_numpy(act(x.numpy(), holding).astype(np.float32))

    streams: dict[int, Float] = {}
    for position in range(len(tokens)):
        opened.append(position >= length and holds(fired, position))
        if position < length - 1:
            continue
        every = range(position + 1)
        changes = [Change(site(ACT), change, every), Change(site(LATE), note, every)]
        streams = reference.run(tokens[: position + 1], changes).streams
        for at in every if position == length - 1 else [position]:
            if fires(read[-1][: at + 1]):
                fired.append(at)
    return Followed(streams, fired, opened)


def above(bound: float) -> Callable[[Float], bool]:
    def fires(numbers: Float) -> bool:
        assert abs(numbers[-1] - bound) > 1e-3, "too near to a bound"
        return bool(numbers[-1] > bound)

    return fires


def last_within(count: float) -> Callable[[list[int], int], bool]:
    """Holds for so many positions behind one at which the rule fired."""
    return lambda fired, position: bool(fired) and position - fired[-1] <= count


HOLDS: dict[str, tuple[Any, Callable[[list[int], int], bool]]] = {
    "next token": ("next_token", last_within(1)),
    "three tokens": (3, last_within(3)),
    "rest": ("rest", last_within(np.inf)),
    "by default the rest": (None, last_within(np.inf)),
    "until it reads again": ("until_read", last_within(1)),
}


@pytest.fixture
def bound(engine: rheostat.Engine) -> float:
    """A number that about half the readings at the layer LATE exceed."""
    out = engine.generate(PROMPT, capture=EVERY_LAYER, **OPTIONS)
    numbers = np.sort(out.activations["resid_post", LATE] @ MOOD[0])
    middle = numbers[len(numbers) // 3 : 2 * len(numbers) // 3]
    at = int(np.argmax(np.diff(middle)))
    return float(middle[at : at + 2].mean())


def check(out: rheostat.Generation, expected: Followed) -> None:
    """The streams, the firings and the receipt of a request with one rule, "cheer"."""
    for layer in range(LAYERS):
        found = out.activations["resid_post", layer]
        np.testing.assert_allclose(found, expected.streams[site(layer)], atol=2e-3, rtol=0)
    assert out.signals.firings.get("cheer", np.zeros(0)).tolist() == expected.fired
    (applied,) = out.receipt.interventions
    if applied.origin == "rule":
        assert (applied.rule_name, applied.index) == ("cheer", 0)
        assert 0 <= applied.sites[0].row_count - sum(expected.opened) <= 1


@pytest.mark.parametrize("where", [None, "generated"])
@pytest.mark.parametrize("name", HOLDS)
def test_a_rule_that_reads_late_steers_the_tokens_behind(
    engine: rheostat.Engine, reference: HfReference, bound: float, name: str, where: Any
) -> None:
    hold, holds = HOLDS[name]
    when = probe(layers=LATE, where=where).above(bound)
    rule = rheostat.Rule("cheer", when, rheostat.Steer(push()), hold=hold)
    out = engine.generate(PROMPT, rules=rule, capture=EVERY_LAYER, **OPTIONS)
    length = len(out.prompt_token_ids)
    fires = above(bound)
    if where == "generated":
        fires = lambda numbers: len(numbers) > length and above(bound)(numbers)  # noqa: E731
    expected = follow(reference, tokens_of(out), length, fires, holds)
    check(out, expected)
    assert expected.fired
    if hold in ("next_token", "until_read"):
        assert {*expected.opened[length:]} == {False, True}


def test_a_rule_waits_for_several_tokens_and_takes_any_op(
    engine: rheostat.Engine, reference: HfReference, bound: float
) -> None:
    when = probe(layers=LATE).below(bound, for_tokens=2)
    away = rheostat.clamp(rheostat.inline(PUSH), min=4.0).at(points="resid_post", layers=ACT)
    rule = rheostat.Rule("cheer", when, rheostat.Steer(away), hold=2)
    out = engine.generate(PROMPT, rules=rule, capture=EVERY_LAYER, **OPTIONS)
    unit = (PUSH / np.linalg.norm(PUSH)).ravel()

    def clamped(x: Float, holds: Float) -> Float:
        along = (x @ unit)[:, None]
        return x + holds * (np.maximum(along, 4.0) - along) * unit

    def fires(numbers: Float) -> bool:
        return len(numbers) > 1 and bool((numbers[-2:] < bound).all())

    length = len(out.prompt_token_ids)
    expected = follow(reference, tokens_of(out), length, fires, last_within(2), clamped)
    check(out, expected)
    assert any(expected.opened)


def test_a_rule_that_reads_before_it_acts_steers_the_token_that_fires(
    engine: rheostat.Engine, reference: HfReference
) -> None:
    plain = engine.generate(PROMPT, capture=EVERY_LAYER, **OPTIONS)
    numbers = np.sort(plain.activations["resid_post", READ] @ MOOD[0])
    top = int(np.argmax(np.diff(numbers[-8:]))) - 8
    high = float(numbers[top : top + 2].mean() if top < -2 else numbers[-2:].mean())
    rule = rheostat.Rule("cheer", probe().above(high), rheostat.Steer(push()), hold=1)
    out = engine.generate(PROMPT, rules=rule, capture=EVERY_LAYER, **OPTIONS)

    def openness(z: Float, length: int) -> Float:
        fired = z[0] > high
        return (fired | np.append(False, fired[:-1])).astype(np.float32)

    expected = reference_streams(
        reference, tokens_of(out), [READ], openness, len(out.prompt_token_ids)
    )
    for layer in range(LAYERS):
        found = out.activations["resid_post", layer]
        np.testing.assert_allclose(found, expected[site(layer)], atol=2e-3, rtol=0)


def test_a_rule_that_never_fires_changes_no_bit(engine: rheostat.Engine) -> None:
    own = 0.5 * rheostat.inline(PUSH).at(points="resid_mid", layers=1)
    rule = rheostat.Rule("cheer", probe(layers=LATE).above(1e6), rheostat.Steer(push()))
    outs = [
        engine.generate(PROMPT, steering=own, rules=rules, capture=EVERY_LAYER, **OPTIONS)
        for rules in ((), rule)
    ]
    assert outs[0].token_ids == outs[1].token_ids
    for layer in range(LAYERS):
        plain, ruled = (out.activations["resid_post", layer] for out in outs)
        assert np.array_equal(plain, ruled)
    applied = {one.origin: one for one in outs[1].receipt.interventions}
    assert applied["rule"].sites[0].row_count == 0
    assert outs[1].signals.firings == {}


def test_a_prompt_is_shared_and_what_a_rule_changed_is_not(
    engine: rheostat.Engine, bound: float
) -> None:
    prompt = " ".join(["Earlier", *[PROMPT] * 30])
    read = probe(layers=LATE, where="generated")
    rule = rheostat.Rule("cheer", read.above(-1e6), rheostat.Steer(push()))
    options = {**OPTIONS, "max_tokens": 150, "logprobs": 0}
    cold = engine.generate(prompt, **OPTIONS)
    steered = engine.generate(prompt, rules=rule, **options)
    assert cold.receipt.cached_prompt_token_count == 0
    assert steered.receipt.cached_prompt_token_count > 0
    whole = [*steered.prompt_token_ids, *steered.token_ids]
    after = engine.generate(whole, **OPTIONS)
    assert after.receipt.cached_prompt_token_count <= len(steered.prompt_token_ids)
    assert after.receipt.cached_prompt_token_count > 0


def test_many_rules_act_each_on_its_own_request(engine: rheostat.Engine, bound: float) -> None:
    bounds = [bound + 0.05 * step for step in range(-8, 8)]

    def generate(limit: float) -> rheostat.Generation:
        when = probe(layers=LATE).above(limit)
        rule = rheostat.Rule("cheer", when, rheostat.Steer(push()), hold="next_token")
        return engine.generate(PROMPT, rules=rule, **OPTIONS)

    alone = [generate(limit) for limit in bounds[::5]]
    with ThreadPoolExecutor(len(bounds)) as threads:
        together = list(threads.map(generate, bounds))
    assert [one.token_ids for one in alone] == [one.token_ids for one in together[::5]]
    assert len({one.token_ids for one in together}) > 1


@pytest.mark.parametrize("factor", [0.0, 0.25, 3.0])
def test_a_rule_multiplies_the_steering_of_its_request(
    engine: rheostat.Engine, reference: HfReference, bound: float, factor: float
) -> None:
    when = probe(layers=LATE).above(bound)
    rule = rheostat.Rule("cheer", when, rheostat.Gain(factor), hold=2)
    out = engine.generate(PROMPT, steering=push(), rules=rule, capture=EVERY_LAYER, **OPTIONS)

    def act(x: Float, holds: Float) -> Float:
        return x + (1 + (factor - 1) * holds) * PUSH[0]

    length = len(out.prompt_token_ids)
    expected = follow(reference, tokens_of(out), length, above(bound), last_within(2), act)
    check(out, expected)
    assert any(expected.opened)
    (applied,) = out.receipt.interventions
    assert applied.origin == "request"
    acting = len(expected.opened) - (factor == 0) * sum(expected.opened)
    assert 0 <= applied.sites[0].row_count - acting <= 1


OPS = {
    "add": rheostat.inline(PUSH),
    "norm_add": rheostat.norm_add(rheostat.inline(PUSH), 0.2),
    "ablate": rheostat.ablate(rheostat.inline(PUSH)),
    "clamp": rheostat.clamp(rheostat.inline(PUSH), min=1.0),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("rule", ["never fires", "factor 1"])
def test_a_gain_that_multiplies_by_one_changes_no_bit(
    engine: rheostat.Engine, op: str, rule: str
) -> None:
    own = [OPS[op].at(points="resid_post", layers=ACT), OPS[op].at(points="resid_mid", layers=1)]
    never = rule == "never fires"
    gain = rheostat.Gain(0.0, [0, 1]) if never else rheostat.Gain(1.0)
    when = probe(layers=LATE).above(1e6 if never else -1e6)
    outs = [
        engine.generate(PROMPT, steering=own, rules=rules, capture=EVERY_LAYER, **OPTIONS)
        for rules in ((), rheostat.Rule("cheer", when, gain))
    ]
    assert outs[0].token_ids == outs[1].token_ids
    for layer in range(LAYERS):
        plain, ruled = (out.activations["resid_post", layer] for out in outs)
        assert np.array_equal(plain, ruled)


RED = {"team": "red"}
OTHERS = {
    "steer": (rheostat.Steer(push()), lambda x, holds: x + holds * PUSH[0]),
    "gain": (rheostat.Gain(0.25), lambda x, holds: x + (1 - 0.75 * holds) * PUSH[0]),
}
"""Actions on requests of others, and what they make of a stream; with `gain`, of their steering."""


@pytest.mark.parametrize("action", OTHERS)
def test_a_rule_of_a_watch_acts_on_the_requests_of_others(
    engine: rheostat.Engine, reference: HfReference, bound: float, action: str
) -> None:
    then, act = OTHERS[action]
    rule = rheostat.Rule("cheer", probe(layers=LATE).above(bound), then, hold="next_token")
    own = push() if action == "gain" else None
    with engine.watch(rules=rule, labels=RED) as watch:
        out = engine.generate(PROMPT, steering=own, labels=RED, capture=EVERY_LAYER, **OPTIONS)
        other = engine.generate(PROMPT, steering=own, capture=EVERY_LAYER, **OPTIONS)
        fired: list[int] = []
        for event in watch:
            if isinstance(event, rheostat.WatchedSignals):
                for readings in event:
                    fired += readings.firings.get("cheer", np.zeros(0, int)).tolist()
            if isinstance(event, rheostat.WatchedRequestEnded):
                assert not event.missed_reason
                break
    length = len(out.prompt_token_ids)
    expected = follow(reference, tokens_of(out), length, above(bound), last_within(1), act)
    for layer in range(LAYERS):
        found = out.activations["resid_post", layer]
        np.testing.assert_allclose(found, expected.streams[site(layer)], atol=2e-3, rtol=0)
    assert fired == expected.fired
    assert {*expected.opened[length:]} == {False, True}
    (applied,) = out.receipt.interventions
    if action == "steer":
        assert (applied.origin, applied.rule_name) == ("watch", "cheer")
        assert applied.watch_id == watch.id
        assert 0 <= applied.sites[0].row_count - sum(expected.opened) <= 1
    assert not out.receipt.rules
    assert len(other.receipt.interventions) == (action == "gain")
    plain = engine.generate(PROMPT, steering=own, capture=EVERY_LAYER, **OPTIONS)
    assert other.token_ids == plain.token_ids


def test_a_rule_of_the_server_multiplies_the_steering_of_requests(
    engine: rheostat.Engine, reference: HfReference, bound: float
) -> None:
    then, act = OTHERS["gain"]
    rule = rheostat.Rule("cheer", probe(layers=LATE).above(bound), then, hold="next_token")
    engine.steering.set_global(None, rules=rule)
    try:
        out = engine.generate(PROMPT, steering=push(), capture=EVERY_LAYER, **OPTIONS)
    finally:
        engine.steering.set_global(None)
    length = len(out.prompt_token_ids)
    expected = follow(reference, tokens_of(out), length, above(bound), last_within(1), act)
    for layer in range(LAYERS):
        found = out.activations["resid_post", layer]
        np.testing.assert_allclose(found, expected.streams[site(layer)], atol=2e-3, rtol=0)
    (found,) = out.receipt.rules
    assert found.server_wide
    positions = [p for one in found.samples[0].positions for p in one]
    assert positions == [p for p in expected.fired if p < len(tokens_of(out))]
    assert {*expected.opened[length:]} == {False, True}
