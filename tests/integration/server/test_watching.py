"""Watches over gRPC, on a real engine, against hooks in Hugging Face's model."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Self

import grpc
import numpy as np
import pytest

import rheostat
from rheostat._steering.rules import probes_to_wire
from rheostat_wire.v1 import monitor_service_pb2, monitor_service_pb2_grpc, types_pb2

from ..engine.reference import Float, HfReference
from .conftest import Server
from .test_gates import EVERY_LAYER, MOOD, OPTIONS, PROMPT, READ, Readings, probe
from .test_signals import read_by_hooks, readings, tokens_of

__all__ = ["readings"]
pytestmark = pytest.mark.integration

pb = monitor_service_pb2
RED = {"team": "red"}
OTHER_PROMPTS = ["Tomorrow Anna felt", "In the morning the river was"]


class Watcher:
    """A watch, and its events so far."""

    def __init__(self, target: str, opened: pb.WatchOpen) -> None:
        self.events: list[pb.WatchResponse] = []
        self._channel = grpc.insecure_channel(target)
        self._requests: SimpleQueue[pb.WatchRequest | None] = SimpleQueue()
        opened.credit_bytes = 1 << 24
        self.say(open=opened)
        messages = iter(self._requests.get, None)
        self._responses = monitor_service_pb2_grpc.MonitorServiceStub(self._channel).Watch(messages)
        self.until("opened")

    def say(self, **action: object) -> None:
        """Sends a message."""
        self._requests.put(pb.WatchRequest(**action))

    def until(self, kind: str, count: int = 1) -> list[pb.WatchResponse]:
        """All events of a kind, once there are so many."""
        while len(found := self.of(kind)) < count:
            self.events.append(next(self._responses))
        return found

    def of(self, kind: str) -> list[pb.WatchResponse]:
        """The events of a kind so far."""
        return [event for event in self.events if event.HasField(kind)]

    def number(self, request_id: str) -> int:
        """The number of a request."""
        (found,) = [
            event.begun.number for event in self.of("begun") if event.begun.request_id == request_id
        ]
        return found

    def read(self, request_id: str, sample: int = 0) -> dict[int, list[float]]:
        """What was read of a sample: position -> a number for each column."""
        number = self.number(request_id)
        found: dict[int, list[float]] = {}
        for event in self.of("signals"):
            signals = event.signals
            values = np.frombuffer(signals.values.inline, "<f4").reshape(signals.values.shape)
            row = 0
            for owner, which, first, count in zip(
                signals.numbers,
                signals.samples,
                signals.first_positions,
                signals.row_counts,
                strict=True,
            ):
                if (owner, which) == (number, sample):
                    for offset in range(count):
                        assert first + offset not in found
                        found[first + offset] = values[row + offset].tolist()
                row += count
        return found

    def array(self, request_id: str, sample: int = 0) -> Float:
        """What was read of a sample, of every position from 0: [positions, columns]."""
        found = self.read(request_id, sample)
        assert list(found) == list(range(len(found)))
        return np.array(list(found.values()), np.float32)

    def ended(self, request_id: str) -> pb.WatchedRequestEnded:
        """The end of a request."""
        while True:
            for event in self.of("ended"):
                if event.ended.request_id == request_id:
                    return event.ended
            self.events.append(next(self._responses))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.say(leave={"end": True})
        self._requests.put(None)
        self.events += self._responses
        self._channel.close()


Open = Callable[..., Watcher]


@pytest.fixture
def watch(server: Server) -> Open:
    """Opens watches of team red."""

    def opening(
        probes: list[rheostat.Probe], rules: tuple[rheostat.Rule, ...] = (), **fields: object
    ) -> Watcher:
        opened = pb.WatchOpen(
            filter={"labels": {"labels": RED}},
            probes=probes_to_wire((), probes, rules),
            rules=[rule.to_wire("rule") for rule in rules],
            **fields,
        )
        return Watcher(server.target, opened)

    return opening


def assert_summarised(ended: pb.WatchedRequestEnded, read: Float) -> None:
    """The summaries are those of the readings [positions, columns] of sample 0."""
    columns = [column for column in range(read.shape[1]) if not np.isnan(read[:, column]).all()]
    assert [(one.sample, one.column) for one in ended.summaries] == [(0, c) for c in columns]
    for one in ended.summaries:
        numbers = read[:, one.column]
        assert one.position_count == np.count_nonzero(~np.isnan(numbers))
        assert one.max == np.nanmax(numbers)
        assert one.max_position == np.nanargmax(numbers)
        assert one.mean == pytest.approx(np.nanmean(numbers.astype(np.float64)), rel=1e-6, abs=1e-6)


def test_a_watch_reads_what_hooks_read_in_hugging_face(
    engine: rheostat.Engine, reference: HfReference, watch: Open
) -> None:
    wide, late = probe(layers="all", name="wide"), probe(where="generated", name="late")
    with watch([wide, late]) as watcher:
        table = watcher.events[0].opened.table
        named = [(one.probe_name, one.site.layer) for one in table.columns]
        assert named == [*(("wide", layer) for layer in range(6)), ("late", READ)]
        prompts = [PROMPT, *OTHER_PROMPTS] * 2

        def ask(number: int) -> rheostat.Generation:
            labels = RED if number % 2 else {"team": "blue"}
            return engine.generate(prompts[number], labels=labels, capture=EVERY_LAYER, **OPTIONS)

        with ThreadPoolExecutor(len(prompts)) as threads:
            outs = list(threads.map(ask, range(len(prompts))))
        watched = outs[1::2]
        ends = {out.request_id: watcher.ended(out.request_id) for out in watched}
    assert {event.begun.request_id for event in watcher.of("begun")} == ends.keys()
    for out in watched:
        tokens, length = tokens_of(out), len(out.prompt_token_ids)
        read = watcher.array(out.request_id)
        assert read.shape == (len(tokens), 7)
        for layer in range(6):
            rows = out.activations["resid_post", layer] @ MOOD[0]
            np.testing.assert_allclose(read[:, layer], rows, atol=1e-3, rtol=0)
            expected = read_by_hooks(reference, tokens, layer)
            np.testing.assert_allclose(read[:, layer], expected, atol=2e-3, rtol=0)
        assert np.isnan(read[:length, 6]).all()
        assert read[length:, 6].tolist() == read[length:, READ].tolist()
        ended = ends[out.request_id]
        assert (ended.position_count, ended.dropped_position_count) == (len(tokens), 0)
        assert list(ended.finish_reasons) == [types_pb2.FINISH_REASON_LENGTH]
        assert_summarised(ended, read)
    numbers = [event.sequence for event in watcher.events if event.sequence]
    assert numbers == list(range(1, len(numbers) + 1))


def test_samples_are_read_apart(engine: rheostat.Engine, watch: Open) -> None:
    with watch([probe()]) as watcher:
        out = engine.generate(
            PROMPT, labels=RED, n=3, seed=5, temperature=1.0, capture=EVERY_LAYER, max_tokens=6
        )
        ended = watcher.ended(out.request_id)
    assert watcher.of("begun")[0].begun.sample_count == 3
    assert len({sample.token_ids for sample in out.samples}) > 1
    for number in range(3):
        rows = out.samples[number].activations["resid_post", READ] @ MOOD[0]
        read = watcher.array(out.request_id, number)[:, 0]
        np.testing.assert_allclose(read, rows, atol=1e-3, rtol=0)
    assert [one.sample for one in ended.summaries] == [0, 1, 2]


def test_the_owner_gets_the_same_answer_bit_for_bit(engine: rheostat.Engine, watch: Open) -> None:
    mine = probe(layers=4, name="mine")
    rule = rheostat.Rule("seen", mine.above(0), rheostat.Observe())

    def ask() -> rheostat.Generation:
        return engine.generate(
            PROMPT, labels=RED, probes=mine, rules=rule, capture=EVERY_LAYER, **OPTIONS
        )

    plain = ask()
    wide = probe(layers="all", name="wide")
    with watch([wide], (rheostat.Rule("never", wide.above(1e6)),)) as watcher:
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
    # The watch reads what the owner reads.
    np.testing.assert_array_equal(watcher.array(watched.request_id)[:, 4], plain.signals[mine])


@pytest.mark.parametrize("drop_sampled", [True, False])
def test_a_rule_of_a_watch_stops_at_the_row_that_fires(
    engine: rheostat.Engine, readings: Readings, watch: Open, drop_sampled: bool
) -> None:
    plain = engine.generate(PROMPT, **OPTIONS)
    length = readings.prompt_len
    generated = readings.numbers[length:]
    bound = float(np.sort(generated)[len(generated) // 2])
    row = length + int(np.flatnonzero(generated > bound)[0])
    read = probe(where="generated", name="mood")
    rule = rheostat.Rule("grim", read.above(bound), rheostat.Stop("too grim", drop_sampled))
    with watch([read], (rule,)) as watcher:
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
    assert list(watcher.read(out.request_id)) == list(range(length, row + 1))
    (firing,) = [
        (event.signals.first_positions[-1] + event.signals.row_counts[-1] - 1, one.rule)
        for event in watcher.of("signals")
        for one in event.signals.firings
    ]
    assert firing == (row, 0)
    assert list(ended.finish_reasons) == [types_pb2.FINISH_REASON_WATCH]
    assert other.token_ids == plain.token_ids


def test_a_watcher_stops_a_request(engine: rheostat.Engine, watch: Open) -> None:
    options = {**OPTIONS, "max_tokens": 400}
    with watch([probe()]) as watcher, ThreadPoolExecutor(1) as thread:
        future = thread.submit(engine.generate, PROMPT, labels=RED, request_id="endless", **options)
        watcher.until("signals", 4)
        watcher.say(stop=pb.WatchStop(update_id=1, request_id="endless", label="enough"))
        assert watcher.until("applied")[0].applied.update_id == 1
        out = future.result()
        ended = watcher.ended("endless")
        watcher.say(stop=pb.WatchStop(update_id=2, request_id="endless"))
        refused = watcher.until("refused")[0].refused
    assert (out.finish_reason, out.samples[0].label) == ("watch", "enough")
    assert 0 < len(out.token_ids) < 400
    assert list(ended.finish_reasons) == [types_pb2.FINISH_REASON_WATCH]
    assert refused.update_id == 2
    assert refused.status.details


def test_reports_of_firings_alone_and_of_summaries(
    engine: rheostat.Engine, readings: Readings, watch: Open
) -> None:
    read, middle = probe(name="mood"), readings.middle
    seen = rheostat.Rule("seen", read.above(middle), rheostat.Observe())
    fired = watch([read], (seen,), report=pb.WATCH_REPORT_FIRED)
    summed = watch([read], (seen,), report=pb.WATCH_REPORT_SUMMARY)
    every = watch([read], (seen,))
    with fired, summed, every:
        out = engine.generate(PROMPT, labels=RED, **OPTIONS)
        ends = [one.ended(out.request_id) for one in (fired, summed, every)]
    numbers = every.array(out.request_id)[:, 0]
    expected = np.flatnonzero(numbers > middle).tolist()
    assert 0 < len(expected) < len(numbers)
    assert list(fired.read(out.request_id)) == expected
    assert [number for (number,) in fired.read(out.request_id).values()] == numbers[
        expected
    ].tolist()
    assert sum(len(event.signals.firings) for event in fired.of("signals")) == len(expected)
    assert not summed.of("signals")
    for ended in ends:
        assert_summarised(ended, numbers[:, None])
    assert [ended.position_count for ended in ends] == [len(expected), 0, len(numbers)]


def test_a_cached_prompt_is_still_read(engine: rheostat.Engine, watch: Open) -> None:
    long_prompt = " ".join(["Yesterday", *[PROMPT] * 30])
    cold = engine.generate(long_prompt, capture=EVERY_LAYER, **OPTIONS)
    warm = engine.generate(long_prompt, labels=RED, **OPTIONS)
    assert warm.receipt.cached_prompt_token_count > 0
    with watch([probe()]) as watcher:
        read = engine.generate(long_prompt, labels=RED, **OPTIONS)
        watcher.ended(read.request_id)
    assert read.receipt.cached_prompt_token_count == 0
    rows = cold.activations["resid_post", READ] @ MOOD[0]
    np.testing.assert_allclose(watcher.array(read.request_id)[:, 0], rows, atol=1e-3, rtol=0)
    with watch([probe(where="generated")]):
        later = engine.generate(long_prompt, labels=RED, **OPTIONS)
    assert later.receipt.cached_prompt_token_count > 0


def test_a_request_before_the_watch_is_missed(engine: rheostat.Engine, watch: Open) -> None:
    options = {**OPTIONS, "max_tokens": 400}
    with engine.stream(PROMPT, labels=RED, request_id="early", **options) as stream:
        next(stream)
        with watch([probe()]) as watcher:
            pass
    opened = watcher.events[0].opened
    assert [one.request_id for one in opened.missed] == ["early"]
