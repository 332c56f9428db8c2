"""Gates over gRPC: what they do equals hooks in Hugging Face's model that read and decide alike."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import rheostat
from rheostat_engine import Point, Site

from ..engine.reference import Change, Float, HfReference

pytestmark = pytest.mark.integration

WIDTH, LAYERS = 128, 6
PROMPT = "The weather was grey and Anna felt"
COUNT = 16
OPTIONS = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "logprobs": 5}
READ, ALSO_READ, ACT = 1, 2, 3
"""Layers: at resid_post of the first two it is read, at that of the last it is acted."""
EVERY_LAYER = rheostat.Capture("resid_post", "all")

Openness = Callable[[Float, int], Float]
"""From the readings [sites, n] and the length of the prompt to how far the gate is open, [n]."""


def direction(seed: int) -> Float:
    """A unit vector, [1, W]."""
    vector = np.random.default_rng(seed).normal(size=(1, WIDTH)).astype(np.float32)
    return (vector / np.linalg.norm(vector)).astype(np.float32)


MOOD, PUSH = direction(1), 3 * direction(2)


def probe(**fields: object) -> rheostat.Probe:
    fields.setdefault("layers", READ)
    return rheostat.probe(rheostat.inline(MOOD), points="resid_post", **fields)


def push(gate: rheostat.Gate | rheostat.Condition | None = None) -> rheostat.Intervention:
    added = rheostat.inline(PUSH).at(points="resid_post", layers=ACT)
    return added if gate is None else added.when(gate)


class Readings(NamedTuple):
    """What a probe reads of a request that isn't steered, which says where bounds can lie."""

    numbers: Float
    """[n] at the layer READ."""
    prompt_len: int

    @property
    def middle(self) -> float:
        """A number in the middle of them, as far from each as it can be."""
        ordered = np.sort(self.numbers)
        central = ordered[len(ordered) // 3 : 2 * len(ordered) // 3]
        at = int(np.argmax(np.diff(central)))
        return float(central[at : at + 2].mean())


@pytest.fixture
def readings(engine: rheostat.Engine) -> Readings:
    out = engine.generate(PROMPT, capture=EVERY_LAYER, **OPTIONS)
    return Readings(out.activations["resid_post", READ] @ MOOD[0], len(out.prompt_token_ids))


def held(opened: Float, count: int) -> Float:
    """Open as it was at the last opening, so many tokens long."""
    found = np.zeros_like(opened)
    for position, value in enumerate(opened):
        if value > 0:
            found[position : position + count + 1] = value
    return found


def reference_streams(
    reference: HfReference, tokens: list[int], layers: list[int], openness: Openness, length: int
) -> dict[int, Float]:
    """The streams of tokens under hooks that read, decide and add."""
    read: dict[int, Float] = {}

    def reading(layer: int) -> Change:
        def note(x: torch.Tensor) -> torch.Tensor:
            read[layer] = x.double().numpy() @ MOOD[0].astype(np.float64)
            return x

        return Change(site(layer), note, range(len(tokens)))

    def act(x: torch.Tensor) -> torch.Tensor:
        opened = openness(np.stack([read[layer] for layer in layers]), length)
        return x + torch.from_numpy(opened[:, None] * PUSH[0]).float()

    changes = [*map(reading, layers), Change(site(ACT), act, range(len(tokens)))]
    return reference.run(tokens, changes).streams


def site(layer: int) -> int:
    return Site(Point.RESID_POST, layer).index


class Case(NamedTuple):
    """A gate, and what it says."""

    gate: Callable[[float], rheostat.Gate | rheostat.Condition]
    """Of the middle of the readings."""
    openness: Callable[[float], Openness]
    layers: tuple[int, ...] = (READ,)


def step(above: Callable[[Float], Float]) -> Callable[[float], Openness]:
    """Open where a number made of the readings of one site is above the middle."""
    return lambda middle: lambda z, length: (above(z[0]) > middle).astype(np.float32)


def at_prompt_end(pooled: Callable[[Float], float]) -> Callable[[float], Openness]:
    """Decided at the last prompt token, and open from there on."""

    def of(middle: float) -> Openness:
        def openness(z: Float, length: int) -> Float:
            opened = np.zeros(z.shape[1], np.float32)
            opened[length - 1 :] = pooled(z[0, :length]) > middle
            return opened

        return openness

    return of


def running_mean(z: Float) -> Float:
    return np.cumsum(z) / np.arange(1, len(z) + 1)


def two_in_a_row(z: Float, middle: float) -> Float:
    """1 where this number and the one before are above the middle."""
    above = z > middle
    return (above & np.append(False, above[:-1])).astype(np.float32)


def with_hysteresis(z: Float, middle: float, until: float) -> Float:
    """1 from a number above the middle on, up to the next that is not above `until`."""
    found = np.zeros(len(z), np.float32)
    for position, number in enumerate(z):
        found[position] = number > (until if position and found[position - 1] else middle)
    return found


BOTH = (READ, ALSO_READ)
CASES = {
    "always": Case(lambda m: probe().above(-1e6), lambda m: lambda z, n: np.ones(z.shape[1])),
    "per token": Case(lambda m: probe().above(m), step(lambda z: z)),
    "below": Case(lambda m: probe().below(m), lambda m: lambda z, n: (z[0] < m).astype(np.float32)),
    "between": Case(
        lambda m: probe().between(m, m + 1),
        lambda m: lambda z, n: ((z[0] > m) & (z[0] < m + 1)).astype(np.float32),
    ),
    "inverted": Case(
        lambda m: rheostat.gate(probe().above(m), invert=True),
        lambda m: lambda z, n: (z[0] <= m).astype(np.float32),
    ),
    "mean so far": Case(lambda m: probe().above(m, pool="mean"), step(running_mean)),
    "largest so far": Case(lambda m: probe().above(m, pool="max"), step(np.maximum.accumulate)),
    "two in a row": Case(
        lambda m: probe().above(m, for_tokens=2),
        lambda m: lambda z, n: two_in_a_row(z[0], m),
    ),
    "with hysteresis": Case(
        lambda m: probe().above(m, until=m - 0.7),
        lambda m: lambda z, n: with_hysteresis(z[0], m, m - 0.7),
    ),
    "sigmoid": Case(
        lambda m: rheostat.gate(
            probe().summed(), form=rheostat.Sigmoid(sharpness=2.0, threshold=m)
        ),
        lambda m: lambda z, n: 1 / (1 + np.exp(-2 * (z[0] - m))),
    ),
    "ramp": Case(
        lambda m: rheostat.gate(probe().summed(), form=rheostat.Ramp(m - 1, m + 1)),
        lambda m: lambda z, n: np.clip((z[0] - m + 1) / 2, 0, 1),
    ),
    "held for three tokens": Case(
        lambda m: rheostat.gate(probe().above(m), hold=3),
        lambda m: lambda z, n: held((z[0] > m).astype(np.float32), 3),
    ),
    "held for the rest": Case(
        lambda m: rheostat.gate(probe().above(m), hold="rest"),
        lambda m: lambda z, n: np.maximum.accumulate((z[0] > m).astype(np.float32)),
    ),
    "once, of the prompt's mean": Case(
        lambda m: rheostat.gate(
            probe(where="prompt").above(m, pool="mean", after_prompt=True), hold="rest"
        ),
        at_prompt_end(np.mean),
    ),
    "once, of the last prompt token": Case(
        lambda m: rheostat.gate(
            probe(where=rheostat.window(-1, None)).above(-1e6, after_prompt=True), hold="rest"
        ),
        at_prompt_end(lambda z: 1e9),
    ),
    "sum over layers": Case(
        lambda m: rheostat.gate(probe(layers=BOTH).summed(), form=2 * m),
        lambda m: lambda z, n: (z.sum(0) > 2 * m).astype(np.float32),
        BOTH,
    ),
    "all layers": Case(
        lambda m: probe(layers=BOTH).above(m, combine="all"),
        lambda m: lambda z, n: (z > m).all(0).astype(np.float32),
        BOTH,
    ),
    "vote of layers": Case(
        lambda m: rheostat.gate(
            probe(layers=BOTH).above(m, combine="vote"), form=rheostat.Ramp(0, 1)
        ),
        lambda m: lambda z, n: (z > m).mean(0),
        BOTH,
    ),
    "any of two probes": Case(
        lambda m: rheostat.gate(probe().above(m), probe(layers=ALSO_READ).below(m), combine="any"),
        lambda m: lambda z, n: ((z[0] > m) | (z[1] < m)).astype(np.float32),
        BOTH,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_gate_does_what_hooks_do_in_hugging_face(
    engine: rheostat.Engine, reference: HfReference, readings: Readings, name: str
) -> None:
    case, middle = CASES[name], readings.middle
    out = engine.generate(PROMPT, steering=push(case.gate(middle)), capture=EVERY_LAYER, **OPTIONS)
    tokens = [*out.prompt_token_ids, *out.token_ids[:-1]]
    openness = case.openness(middle)
    expected = reference_streams(
        reference, tokens, list(case.layers), openness, readings.prompt_len
    )
    rows = {layer: out.activations["resid_post", layer] for layer in range(LAYERS)}
    for layer, found in rows.items():
        np.testing.assert_allclose(found, expected[site(layer)], atol=2e-3, rtol=0)
    opened = openness(
        np.stack([rows[layer] @ MOOD[0] for layer in case.layers]), readings.prompt_len
    )
    (applied,) = out.receipt.interventions
    beyond = 1  # the scheduler may compute a token more than is delivered
    assert 0 <= applied.sites[0].row_count - int((opened > 0).sum()) <= beyond
    if name not in ("always", "sigmoid", "once, of the last prompt token"):
        assert 0 < opened.sum() < len(opened) or name.startswith("once")


def test_a_gate_that_stays_shut_changes_no_bit(engine: rheostat.Engine) -> None:
    plain = engine.generate(PROMPT, capture=EVERY_LAYER, **OPTIONS)
    shut = engine.generate(
        PROMPT, steering=push(probe().above(1e6)), capture=EVERY_LAYER, **OPTIONS
    )
    assert shut.token_ids == plain.token_ids
    for layer in range(LAYERS):
        assert np.array_equal(
            shut.activations["resid_post", layer], plain.activations["resid_post", layer]
        )
    assert shut.receipt.interventions[0].sites[0].row_count == 0


LATE = 5
"""A layer behind that at which the gates act."""


@pytest.mark.parametrize(("hold", "opened"), [("rest", COUNT), (4, 4), ("next_token", 1)])
def test_a_late_gate_that_the_prompt_decides_acts_on_generated_tokens(
    engine: rheostat.Engine, reference: HfReference, hold: Any, opened: int
) -> None:
    plain = engine.generate(PROMPT, capture=EVERY_LAYER, **OPTIONS)
    length = len(plain.prompt_token_ids)
    mean = float((plain.activations["resid_post", LATE][:length] @ MOOD[0]).mean())

    def steered(bound: float) -> rheostat.Generation:
        condition = probe(layers=LATE, where="prompt").above(bound, pool="mean", after_prompt=True)
        gate = rheostat.gate(condition, hold=hold)
        return engine.generate(PROMPT, steering=push(gate), capture=EVERY_LAYER, **OPTIONS)

    out = steered(mean - 0.01)
    tokens = [*out.prompt_token_ids, *out.token_ids[:-1]]
    openness = np.zeros(len(tokens), np.float32)
    openness[length : length + opened] = 1
    expected = reference_streams(reference, tokens, [READ], lambda z, n: openness, length)
    for layer in range(LAYERS):
        found = out.activations["resid_post", layer]
        np.testing.assert_allclose(found, expected[site(layer)], atol=2e-3, rtol=0)
    assert 0 <= out.receipt.interventions[0].sites[0].row_count - openness.sum() <= 1
    shut = steered(mean + 0.01)
    assert shut.token_ids == plain.token_ids
    assert shut.receipt.interventions[0].sites[0].row_count == 0


def test_many_gates_decide_each_for_its_own_request(
    engine: rheostat.Engine, readings: Readings
) -> None:
    bounds = np.quantile(readings.numbers, np.linspace(0.05, 0.95, 24))
    alone = [
        engine.generate(PROMPT, steering=push(probe().above(float(bound))), **OPTIONS)
        for bound in bounds[::6]
    ]
    with ThreadPoolExecutor(len(bounds)) as threads:
        together = list(
            threads.map(
                lambda bound: engine.generate(
                    PROMPT, steering=push(probe().above(float(bound))), **OPTIONS
                ),
                bounds,
            )
        )
    assert [one.token_ids for one in alone] == [one.token_ids for one in together[::6]]
    assert len({tuple(one.token_ids) for one in together}) > 1


def test_a_gate_reads_what_the_cache_holds(engine: rheostat.Engine, readings: Readings) -> None:
    long_prompt = " ".join([PROMPT] * 30)
    gate = rheostat.gate(probe(where="prompt").above(-1e6, pool="mean", after_prompt=True))
    cold = engine.generate(long_prompt, **OPTIONS)
    warm = engine.generate(long_prompt, steering=push(gate), **OPTIONS)
    assert cold.receipt.cached_prompt_token_count == 0
    assert warm.receipt.cached_prompt_token_count == 0, "every token must be read"
    last = rheostat.gate(
        probe(where=rheostat.window(-1, None)).above(-1e6, after_prompt=True), hold="rest"
    )
    kept = engine.generate(long_prompt, steering=push(last), **OPTIONS)
    assert kept.receipt.cached_prompt_token_count > 0, "what is not read comes from the cache"


def test_gates_in_updates_are_refused_by_name(engine: rheostat.Engine) -> None:
    steering = push(probe().above(0))
    with engine.session(PROMPT, **OPTIONS) as session:
        session.steer(steering)
        (refused,) = [event for event in session if isinstance(event, rheostat.UpdateRefused)]
    assert refused.reason == "REASON_NOT_SUPPORTED"
