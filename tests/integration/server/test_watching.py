"""Watches over gRPC, on a real engine, against hooks in Hugging Face's model."""

from concurrent.futures import ThreadPoolExecutor
from typing import Self

import numpy as np
import pytest

import rheostat

from ..engine.reference import Float, HfReference
from .test_gates import EVERY_LAYER, MOOD, OPTIONS, PROMPT, READ, Readings, probe
from .test_signals import read_by_hooks, readings, tokens_of

__all__ = ["readings"]
pytestmark = pytest.mark.integration

RED = {"team": "red"}
OTHER_PROMPTS = ["Tomorrow Anna felt", "In the morning the river was"]


class Watcher:
    """A watch of team red, and its events so far."""

    def __init__(self, engine: rheostat.Engine, **options: object) -> None:
        self.watch = engine.watch(labels=RED, **options)
        self.events: list[rheostat.WatchEvent] = []
        self.table = rheostat.WatchTable()

    def next(self) -> rheostat.WatchEvent:
        event = next(self.watch)
        self.events.append(event)
        self.table.add(event)
        return event

    def ended(self, request_id: str) -> rheostat.WatchedRequestEnded:
        """The end of a request, once it has come."""
        while request_id not in self.table.ended:
            self.next()
        return self.table.ended[request_id]

    def of(self, kind: type) -> list:
        """The events of a kind so far."""
        return [event for event in self.events if isinstance(event, kind)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.watch.close()


def assert_summarised(ended: rheostat.WatchedRequestEnded, read: Float) -> None:
    """The summaries are those of the readings [positions, columns] of sample 0."""
    columns = [column for column in range(read.shape[1]) if not np.isnan(read[:, column]).all()]
    assert len(ended.summaries) == len(columns)
    for column, one in zip(columns, ended.summaries, strict=True):
        numbers = read[:, column]
        assert one.sample == 0
        assert one.position_count == np.count_nonzero(~np.isnan(numbers))
        assert one.max == np.nanmax(numbers)
        assert one.max_position == np.nanargmax(numbers)
        assert one.mean == pytest.approx(np.nanmean(numbers.astype(np.float64)), rel=1e-6, abs=1e-6)


def test_a_watch_reads_what_hooks_read_in_hugging_face(
    engine: rheostat.Engine, reference: HfReference
) -> None:
    wide, late = probe(layers="all", name="wide"), probe(where="generated", name="late")
    prompts = [PROMPT, *OTHER_PROMPTS] * 2

    def ask(number: int) -> rheostat.Generation:
        labels = RED if number % 2 else {"team": "blue"}
        return engine.generate(prompts[number], labels=labels, capture=EVERY_LAYER, **OPTIONS)

    with Watcher(engine, probes=[wide, late]) as watcher:
        named = [(one.probe, one.site.layer) for one in watcher.watch.columns if one.site]
        assert named == [*(("wide", layer) for layer in range(6)), ("late", READ)]
        with ThreadPoolExecutor(len(prompts)) as threads:
            outs = list(threads.map(ask, range(len(prompts))))
        watched = outs[1::2]
        ends = {out.request_id: watcher.ended(out.request_id) for out in watched}
    begun = watcher.of(rheostat.WatchedRequestBegun)
    assert {event.request_id for event in begun} == ends.keys()
    for out in watched:
        tokens, length = tokens_of(out), len(out.prompt_token_ids)
        readings = watcher.table[out.request_id, 0]
        assert readings.positions.tolist() == list(range(len(tokens)))
        for layer in range(6):
            rows = out.activations["resid_post", layer] @ MOOD[0]
            np.testing.assert_allclose(readings[wide][:, layer], rows, atol=1e-3, rtol=0)
            expected = read_by_hooks(reference, tokens, layer)
            np.testing.assert_allclose(readings[wide][:, layer], expected, atol=2e-3, rtol=0)
        assert np.isnan(readings[late][:length]).all()
        assert readings[late][length:].tolist() == readings[wide][length:, READ].tolist()
        ended = ends[out.request_id]
        assert (ended.position_count, ended.dropped_position_count) == (len(tokens), 0)
        assert ended.finish_reasons == ("length",)
        assert_summarised(ended, readings.values)
    numbers = [event.sequence for event in watcher.events]
    assert numbers == list(range(1, len(numbers) + 1))


def test_samples_are_read_apart(engine: rheostat.Engine) -> None:
    with Watcher(engine, probes=probe(name="mood")) as watcher:
        out = engine.generate(
            PROMPT, labels=RED, n=3, seed=5, temperature=1.0, capture=EVERY_LAYER, max_tokens=6
        )
        ended = watcher.ended(out.request_id)
    assert watcher.of(rheostat.WatchedRequestBegun)[0].sample_count == 3
    assert len({sample.token_ids for sample in out.samples}) > 1
    for number in range(3):
        rows = out.samples[number].activations["resid_post", READ] @ MOOD[0]
        read = watcher.table[out.request_id, number]["mood"]
        np.testing.assert_allclose(read, rows, atol=1e-3, rtol=0)
    assert [one.sample for one in ended.summaries] == [0, 1, 2]


def test_the_owner_gets_the_same_answer_bit_for_bit(engine: rheostat.Engine) -> None:
    mine = probe(layers=4, name="mine")
    rule = rheostat.Rule("seen", mine.above(0), rheostat.Observe())

    def ask() -> rheostat.Generation:
        return engine.generate(
            PROMPT, labels=RED, probes=mine, rules=rule, capture=EVERY_LAYER, **OPTIONS
        )

    plain = ask()
    wide = probe(layers="all", name="wide")
    never = rheostat.Rule("never", wide.above(1e6))
    with Watcher(engine, probes=wide, rules=never) as watcher:
        watched = ask()
        watcher.ended(watched.request_id)
    for one in (plain, watched):
        assert len(one.signals) == len(tokens_of(one))
    assert watched.token_ids == plain.token_ids
    assert watched.logprobs == plain.logprobs
    assert watched.signals.columns == plain.signals.columns
    assert watched.signals.values.tobytes() == plain.signals.values.tobytes()
    for layer in range(6):
        rows = [out.activations["resid_post", layer].tobytes() for out in (plain, watched)]
        assert rows[0] == rows[1]
    assert watched.receipt.rules == plain.receipt.rules
    read = watcher.table[watched.request_id, 0][wide]
    np.testing.assert_array_equal(read[:, 4], plain.signals[mine])


@pytest.mark.parametrize("drop_sampled", [True, False])
def test_a_rule_of_a_watch_stops_at_the_row_that_fires(
    engine: rheostat.Engine, readings: Readings, drop_sampled: bool
) -> None:
    plain = engine.generate(PROMPT, **OPTIONS)
    length = readings.prompt_len
    generated = readings.numbers[length:]
    bound = float(np.sort(generated)[len(generated) // 2])
    row = length + int(np.flatnonzero(generated > bound)[0])
    read = probe(where="generated")
    rule = rheostat.Rule("grim", read.above(bound), rheostat.Stop("too grim", drop_sampled))
    with Watcher(engine, rules=rule) as watcher:
        stream = engine.stream(PROMPT, labels=RED, capture=EVERY_LAYER, **OPTIONS)
        came = [
            token
            for event in stream
            if isinstance(event, rheostat.Tokens)
            for token in event.token_ids
        ]
        out = stream.result()
        ended = watcher.ended(out.request_id)
        other = engine.generate(PROMPT, labels={"team": "blue"}, **OPTIONS)
    kept = row - length + 1 + (not drop_sampled)
    assert came == list(out.token_ids) == list(plain.token_ids[:kept])
    assert plain.text.startswith(out.text)
    assert len(out.activations["resid_post", READ]) == row + 1
    assert (out.finish_reason, out.samples[0].label) == ("watch", "too grim")
    watched = watcher.table[out.request_id, 0]
    assert watched.positions.tolist() == list(range(length, row + 1))
    assert {name: at.tolist() for name, at in watched.firings.items()} == {"grim": [row]}
    assert ended.finish_reasons == ("watch",)
    assert other.token_ids == plain.token_ids


def test_a_watcher_stops_a_request(engine: rheostat.Engine) -> None:
    options = {**OPTIONS, "max_tokens": 400}
    with Watcher(engine, probes=probe()) as watcher, ThreadPoolExecutor(1) as thread:
        future = thread.submit(engine.generate, PROMPT, labels=RED, request_id="endless", **options)
        while len(watcher.of(rheostat.WatchedSignals)) < 4:
            watcher.next()
        stopped = watcher.watch.stop("endless", "enough")
        out = future.result()
        ended = watcher.ended("endless")
        late = watcher.watch.stop("endless")
        while not (refused := watcher.of(rheostat.UpdateRefused)):
            watcher.next()
    assert (out.finish_reason, out.samples[0].label) == ("watch", "enough")
    assert 0 < len(out.token_ids) < 400
    assert ended.finish_reasons == ("watch",)
    (applied,) = watcher.of(rheostat.UpdateApplied)
    assert (applied.update_id, refused[0].update_id) == (stopped, late)
    assert refused[0].reason == "REASON_REQUEST_NOT_FOUND"


def test_reports_of_firings_alone_and_of_summaries(
    engine: rheostat.Engine, readings: Readings
) -> None:
    read, middle = probe(name="mood"), readings.middle
    seen = rheostat.Rule("seen", read.above(middle), rheostat.Observe())
    fired, summed, every = (
        Watcher(engine, rules=seen, report=report) for report in ("fired", "summary", "every")
    )
    with fired, summed, every:
        out = engine.generate(PROMPT, labels=RED, **OPTIONS)
        ends = [one.ended(out.request_id) for one in (fired, summed, every)]
    key = out.request_id, 0
    numbers = every.table[key][read]
    expected = np.flatnonzero(numbers > middle).tolist()
    assert 0 < len(expected) < len(numbers)
    for one in (fired, every):
        assert one.table[key].firings["seen"].tolist() == expected
    assert fired.table[key].positions.tolist() == expected
    assert fired.table[key][read].tolist() == numbers[expected].tolist()
    assert not summed.table
    for ended in ends:
        assert_summarised(ended, numbers[:, None])
    assert [ended.position_count for ended in ends] == [len(expected), 0, len(numbers)]


def test_summaries_alone_count_every_token_of_each_sample(engine: rheostat.Engine) -> None:
    wide = probe(layers="all", name="wide")
    lengths = [40, 9, 65, 33, 34, 12]
    prompts = [PROMPT, *OTHER_PROMPTS] * 2

    def ask(number: int) -> rheostat.Generation:
        options = {**OPTIONS, "max_tokens": lengths[number]}
        return engine.generate(prompts[number], labels=RED, capture=EVERY_LAYER, **options)

    with Watcher(engine, probes=wide, report="summary") as watcher:
        with ThreadPoolExecutor(len(prompts)) as threads:
            outs = list(threads.map(ask, range(len(prompts))))
        ends = [watcher.ended(out.request_id) for out in outs]
    assert not watcher.table
    for out, ended, length in zip(outs, ends, lengths, strict=True):
        assert len(out.token_ids) == length
        for layer in range(6):
            rows = out.activations["resid_post", layer] @ MOOD[0]
            one = ended.summaries[layer]
            assert one.position_count == len(rows) == len(out.prompt_token_ids) + length - 1
            assert one.max == pytest.approx(rows.max(), abs=1e-3)
            assert rows[one.max_position] == pytest.approx(rows.max(), abs=1e-3)
            assert one.mean == pytest.approx(rows.mean(), abs=1e-3)


def test_a_cached_prompt_is_still_read(engine: rheostat.Engine) -> None:
    long_prompt = " ".join(["Yesterday", *[PROMPT] * 30])
    cold = engine.generate(long_prompt, capture=EVERY_LAYER, **OPTIONS)
    warm = engine.generate(long_prompt, labels=RED, **OPTIONS)
    assert warm.receipt.cached_prompt_token_count > 0
    with Watcher(engine, probes=probe(name="mood")) as watcher:
        read = engine.generate(long_prompt, labels=RED, **OPTIONS)
        watcher.ended(read.request_id)
    assert read.receipt.cached_prompt_token_count == 0
    rows = cold.activations["resid_post", READ] @ MOOD[0]
    found = watcher.table[read.request_id, 0]["mood"]
    np.testing.assert_allclose(found, rows, atol=1e-3, rtol=0)
    with Watcher(engine, probes=probe(where="generated")):
        later = engine.generate(long_prompt, labels=RED, **OPTIONS)
    assert later.receipt.cached_prompt_token_count > 0


def test_a_request_before_the_watch_is_missed(engine: rheostat.Engine) -> None:
    options = {**OPTIONS, "max_tokens": 400}
    with engine.stream(PROMPT, labels=RED, request_id="early", **options) as stream:
        next(stream)
        with Watcher(engine, probes=probe()) as watcher:
            assert list(watcher.watch.missed) == ["early"]
