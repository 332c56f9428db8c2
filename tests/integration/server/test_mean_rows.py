"""Probes of a prompt's mean row in policies, in watches and with several samples.

Their numbers are compared with those that `test_conditions` computes from rows of Hugging Face's
model, in float64.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

import rheostat
from rheostat_engine import Point, Site

from ..engine.reference import Change, HfReference
from .test_conditions import (
    ACT,
    LATE,
    OPTIONS,
    PROMPTS,
    PUSH,
    READ,
    SCORES,
    Reader,
    decisions,
    fired,
    middle,
    reader,
    unit,
)
from .test_gates import EVERY_LAYER, LAYERS
from .test_watching import RED, Watcher

__all__ = ["reader"]
pytestmark = pytest.mark.integration

SOME = PROMPTS[::17]
VECTOR = 2.5 * unit(8)
NEAR = {"rtol": 1e-4, "atol": 1e-5}


def cast(layer: int, normalise: str, name: str = "cast") -> rheostat.Probe:
    return rheostat.probe(
        rheostat.inline(VECTOR[None]),
        points="resid_post",
        layers=layer,
        normalise=normalise,
        rows="prompt_mean",
        name=name,
    )


def scores(reader: Reader, layer: int, normalise: str) -> list[float]:
    """The number of each prompt of SOME."""
    of = SCORES[normalise]
    return [of(reader.rows(prompt, layer), VECTOR.astype(np.float64)) for prompt in SOME]


def assert_read_once(signals: rheostat.Signals, probe: str, length: int, number: float) -> None:
    """A probe has read one number of a sample, at the last prompt token."""
    read = signals[probe]
    assert signals.positions[~np.isnan(read)].tolist() == [length - 1]
    np.testing.assert_allclose(read[~np.isnan(read)], [number], **NEAR)


@pytest.fixture
def cleared(engine: rheostat.Engine) -> Iterator[rheostat.Engine]:
    yield engine
    engine.steering.set_global(None)


@pytest.mark.parametrize("normalise", SCORES)
@pytest.mark.parametrize("layer", [READ, LATE])
def test_a_policy_decides_by_the_mean_row_of_each_prompt(
    cleared: rheostat.Engine, reader: Reader, layer: int, normalise: str
) -> None:
    engine, numbers = cleared, scores(reader, layer, normalise)
    bound = middle(numbers)
    above = cast(layer, normalise).above(bound, after_prompt=True)
    engine.steering.set_global(PUSH.when(rheostat.gate(above, hold="rest")))
    expected = [number > bound for number in numbers]
    assert 0.2 < np.mean(expected) < 0.8
    for _ in range(2):  # the second time with a warm cache
        outs = decisions(engine, SOME, None)
        assert [fired(out) for out in outs] == expected
        assert {out.receipt.interventions[0].origin for out in outs} == {"global"}


def test_the_bound_of_a_policy_is_that_of_the_number(
    cleared: rheostat.Engine, reader: Reader
) -> None:
    """A rule of the server stops a prompt whose number is just above its bound."""
    engine, numbers = cleared, scores(reader, LATE, "projected_cosine")
    own = cast(READ, "cosine", "own")
    for prompt, number in list(zip(SOME, numbers, strict=True))[:3]:
        for bound, reason in ((number * (1 - 1e-3), "rule"), (number * (1 + 1e-3), "length")):
            above = cast(LATE, "projected_cosine").above(bound, after_prompt=True)
            engine.steering.set_global(None, rules=rheostat.Rule("grim", above))
            out = engine.generate(prompt, probes=own, **OPTIONS)
            assert out.finish_reason == reason
            assert len(out.token_ids) == (0 if reason == "rule" else OPTIONS["max_tokens"])
            wanted = SCORES["cosine"](reader.rows(prompt, READ), VECTOR.astype(np.float64))
            assert_read_once(out.signals, "own", len(out.prompt_token_ids), wanted)


def test_a_watch_reads_and_judges_the_mean_row_of_each_prompt(
    engine: rheostat.Engine, reader: Reader
) -> None:
    probes = {
        (layer, normalise): cast(layer, normalise, f"{normalise}-{layer}")
        for layer in (READ, LATE)
        for normalise in SCORES
    }
    numbers = {key: scores(reader, *key) for key in probes}
    judged = probes[LATE, "projected_cosine"]
    bound = middle(numbers[LATE, "projected_cosine"])
    rule = rheostat.Rule("cast", judged.above(bound, after_prompt=True), rheostat.Stop("too much"))
    with Watcher(engine, probes=list(probes.values()), rules=rule) as watcher:
        outs = decisions(engine, SOME, None, labels=RED)
        ends = [watcher.ended(out.request_id) for out in outs]
    for index, (out, ended) in enumerate(zip(outs, ends, strict=True)):
        stops = numbers[LATE, "projected_cosine"][index] > bound
        assert out.finish_reason == ("watch" if stops else "length")
        assert len(out.token_ids) == (0 if stops else OPTIONS["max_tokens"])
        readings = watcher.table[out.request_id, 0]
        last = len(out.prompt_token_ids) - 1
        assert readings.positions.tolist() == [last]
        for key, probe in probes.items():
            np.testing.assert_allclose(readings[probe], [numbers[key][index]], **NEAR)
        assert [one.tolist() for one in readings.firings.values()] == [[last]] * stops
        found = [(one.max, one.mean, one.max_position) for one in ended.summaries]
        assert found == [
            (readings[probe][0], readings[probe][0], last) for probe in probes.values()
        ]


def test_each_of_several_samples_is_steered_by_the_mean_row(
    engine: rheostat.Engine, reader: Reader, reference: HfReference
) -> None:
    """Beside a watch that reads another mean of the same prompt."""
    prompt, samples = SOME[1], 3
    early, late = (
        SCORES[normalise](reader.rows(prompt, layer), VECTOR.astype(np.float64))
        for layer, normalise in ((READ, "projected_cosine"), (LATE, "cosine"))
    )
    probe, other = cast(READ, "projected_cosine"), cast(LATE, "cosine", "other")

    def ask(bound: float) -> rheostat.Generation:
        gate = rheostat.gate(probe.above(bound, after_prompt=True), hold="rest")
        options = {**OPTIONS, "temperature": 1.0, "seed": 5, "n": samples}
        return engine.generate(
            prompt,
            labels=RED,
            steering=PUSH.when(gate),
            probes=probe,
            capture=EVERY_LAYER,
            **options,
        )

    with Watcher(engine, probes=other) as watcher:
        opened, shut = (ask(early * factor) for factor in (1 - 1e-3, 1 + 1e-3))
        for out in (opened, shut):
            watcher.ended(out.request_id)
    length = len(opened.prompt_token_ids)
    assert len({sample.token_ids for sample in opened.samples}) == samples

    def push(x: torch.Tensor) -> torch.Tensor:
        return x + torch.from_numpy(3 * unit(2))

    for out in (opened, shut):
        for number, sample in enumerate(out.samples):
            assert_read_once(sample.signals, "cast", length, early)
            (read,) = watcher.table[out.request_id, number]["other"]
            if out is shut:  # what is read late follows from what was pushed
                np.testing.assert_allclose(read, late, **NEAR)
            tokens = [*out.prompt_token_ids, *sample.token_ids[:-1]]
            site = Site(Point.RESID_POST, ACT).index
            changes = [Change(site, push, range(length - 1, len(tokens)))] if out is opened else []
            streams = reference.run(tokens, changes).streams
            for layer in range(LAYERS):
                rows = sample.activations["resid_post", layer]
                wanted = streams[Site(Point.RESID_POST, layer).index]
                np.testing.assert_allclose(rows, wanted, atol=2e-3, rtol=0)
    assert shut.receipt.interventions[0].sites[0].row_count == 0


def test_samples_under_a_policy_share_no_mean(cleared: rheostat.Engine, reader: Reader) -> None:
    """Requests of several samples are judged together, each by the mean of its own prompt."""
    engine, numbers = cleared, scores(reader, LATE, "projected_cosine")
    bound = middle(numbers)
    above = cast(LATE, "projected_cosine").above(bound, after_prompt=True)
    engine.steering.set_global(None, rules=rheostat.Rule("cast", above))
    options = {"n": 2, "temperature": 1.0, "seed": 2}
    for out, number in zip(decisions(engine, SOME, None, **options), numbers, strict=True):
        reason = "rule" if number > bound else "length"
        assert [sample.finish_reason for sample in out.samples] == [reason] * 2
