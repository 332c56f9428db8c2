"""Signals: what probes read and how far gates are open, over gRPC with a scripted engine."""

import asyncio

import grpc
import numpy as np
import pytest

from rheostat_engine import SignalRows
from rheostat_server.engine import pace
from rheostat_server.engine.backend import Job
from rheostat_wire.v1 import (
    gate_pb2,
    generation_pb2,
    generation_service_pb2,
    monitor_pb2,
    receipt_pb2,
    types_pb2,
)

from ..conftest import Events, Running, rest
from ..fakes import ScriptedBackend, reading, sites_with
from ..messages import PROMPT, above, add, at_post1, probe, request, selector, site_set
from ..talks import SessionCall, start, stop

SAMPLING = generation_pb2.Sampling(max_tokens=4)
SENT = gate_pb2.Probe(signals=True)


def sent(*args: object, **fields: object) -> gate_pb2.Probe:
    """A probe whose readings are sent."""
    message = probe(*args, **fields)
    message.signals = True
    return message


def gated(*conditions: gate_pb2.Condition, **fields: object):
    gate = gate_pb2.Gate(conditions=conditions, **fields)
    return at_post1(add=add().add, gate=gate)


def numbers(signals: monitor_pb2.Signals) -> np.ndarray:
    values = np.frombuffer(signals.values.inline, "<f4")
    return values.reshape(tuple(signals.values.shape))


def positions(signals: monitor_pb2.Signals) -> list[int]:
    return [p for run in signals.positions for p in range(run.start, run.start + run.count)]


def all_signals(events: Events, sample: int = 0) -> tuple[list[int], np.ndarray, list[int]]:
    """The positions, values and tokens of a sample's signals."""
    found = [
        event.signals
        for event in events
        if event.HasField("signals") and event.signals.sample == sample
    ]
    where = [p for one in found for p in positions(one)]
    values = np.concatenate([numbers(one) for one in found if one.positions])
    return where, values, [token for one in found for token in one.token_ids]


def all_positions(events: Events) -> list[int]:
    """The positions of all signals, in order."""
    return [p for event in events if event.HasField("signals") for p in positions(event.signals)]


async def test_a_probe_sends_what_it_reads_at_each_token(running: Running) -> None:
    wide = site_set(types_pb2.POINT_RESID_POST, layers=[0, 1])
    events = await running.client.generate(
        request(probes=[sent("a", sites=wide), sent("b")], sampling=SAMPLING)
    )
    table = events[1].signal_table
    named = [(one.probe_name, one.site.layer) for one in table.columns]
    assert named == [("a", 0), ("a", 1), ("b", 0)]
    where, values, tokens = all_signals(events)
    assert where == list(range(6))
    expected = [[reading(column, p) for column in range(3)] for p in where]
    assert values.tolist() == expected
    assert tokens == [10, 11, 12, 13, 14, 15]
    assert events[-1].HasField("receipt")


async def test_signals_leave_with_the_token_after_them(running: Running) -> None:
    events = await running.client.generate(request(probes=[sent()], sampling=SAMPLING))
    known = 3
    for event in events:
        if event.HasField("tokens"):
            known += len(event.tokens.token_ids)
        elif event.HasField("signals"):
            assert max(positions(event.signals)) < known - 1


@pytest.mark.parametrize("unpaced", [64, 0])
async def test_signals_that_come_after_their_token_do_not_wait_for_the_next_one(
    starter, monkeypatch, unpaced: int
) -> None:
    """A client that steers by signals would lose a step."""
    monkeypatch.setattr(pace, "_UNPACED", unpaced)
    late: list[SignalRows] = []

    class Late(ScriptedBackend):
        """Its signals come later than its tokens."""

        def _signal(self, job: Job, start: int, end: int) -> None:
            rows = self.signals(job.plan, start, end)
            assert rows is not None
            late.append(rows)

    backend = Late(hold=asyncio.Event(), hold_from=2)
    running = await starter(backend)
    call = running.client.generation.Generate(
        request(probes=[sent()], sampling=SAMPLING), timeout=10
    )
    events = []
    while sum(len(event.tokens.token_ids) for event in events) < 2:
        events.append(await call.read())
    for rows in late:
        backend.deliver(rows)
    late.clear()
    while len(all_positions(events)) < 4:
        event = await call.read()
        assert event.HasField("signals")
        events.append(event)
    assert all_positions(events) == [0, 1, 2, 3]
    backend.hold.set()
    events += await rest(call)
    assert all_positions(events) == [0, 1, 2, 3]  # the others never came


class Ahead(ScriptedBackend):
    """A test delivers the signals of position 4, whose token is the last before `hold`."""

    def _signal(self, job: Job, start: int, end: int) -> None:
        if start != 4:
            super()._signal(job, start, end)

    def read_ahead(self) -> None:
        """Delivers the signals that the next token is sampled from."""
        rows = self.signals(self.jobs[0].plan, 4, 5)
        assert rows is not None
        self.deliver(rows)


async def test_signals_of_a_session_do_not_wait_for_the_token_after_them(starter) -> None:
    """A client that steers by signals has more of a step to answer."""
    backend = Ahead(hold=asyncio.Event(), hold_from=2)
    talk = SessionCall(await starter(backend))
    await talk.say(start(probes=[sent()], sampling=SAMPLING))
    found: list[int] = []
    while len(found) < 4:
        found += positions(await talk.hear("signals"))
    backend.read_ahead()
    signals = await talk.hear("signals")
    assert (positions(signals), list(signals.token_ids)) == ([4], [14])
    assert sum(len(event.tokens.token_ids) for event in talk.events) == 2
    backend.hold.set()
    assert all_signals(await talk.end())[0] == [0, 1, 2, 3, 4, 5]


async def test_a_receipt_counts_the_signals_that_a_session_got_before_it_stopped(starter) -> None:
    backend = Ahead(hold=asyncio.Event(), hold_from=2, openness=lambda *_: 1.0)
    talk = SessionCall(await starter(backend))
    observe = monitor_pb2.Rule(name="seen", conditions=[above(0.0)], observe=monitor_pb2.Observe())
    await talk.say(start(probes=[sent()], rules=[observe], sampling=SAMPLING))
    found: list[int] = []
    while len(found) < 4:
        found += positions(await talk.hear("signals"))
    backend.read_ahead()
    assert positions(await talk.hear("signals")) == [4]
    await talk.say(stop(1))
    events = await talk.end()
    assert all_signals(events)[0] == [0, 1, 2, 3, 4]
    (rule,) = events[-1].receipt.rules
    assert rule.samples[0].position_count == 5


async def test_other_requests_get_no_message_for_signals_alone(starter) -> None:
    backend = Ahead(hold=asyncio.Event(), hold_from=2)
    running = await starter(backend)
    call = running.client.generation.Generate(
        request(probes=[sent()], sampling=SAMPLING), timeout=10
    )
    events = []
    while len(all_positions(events)) < 4:
        events.append(await call.read())
    backend.read_ahead()
    await asyncio.sleep(0.05)
    backend.hold.set()
    following = await rest(call)
    assert [event.WhichOneof("event") for event in following[:2]] == ["tokens", "signals"]
    assert all_positions([*events, *following]) == [0, 1, 2, 3, 4, 5]


async def test_positions_at_which_nothing_is_read_are_left_out(running: Running) -> None:
    events = await running.client.generate(
        request(probes=[sent(where=selector(PROMPT)), sent("last", where=selector(PROMPT))])
    )
    where, values, _ = all_signals(events)
    assert where == [0, 1, 2]
    assert not np.isnan(values).any()


async def test_a_probe_that_is_not_sent_has_no_column(running: Running) -> None:
    events = await running.client.generate(
        request(probes=[probe("silent"), sent("b")], steer=[gated(above(1.0, "silent"))])
    )
    assert [one.probe_name for one in events[1].signal_table.columns] == ["b"]
    where, values, _ = all_signals(events)
    assert values.tolist() == [[reading(1, p)] for p in where]


async def test_a_gate_sends_how_far_it_is_open(starter) -> None:
    running = await starter(ScriptedBackend(openness=lambda gate, p: gate + p / 4))
    steer = [gated(above(1.0)), gated(above(2.0), signals=True)]
    events = await running.client.generate(request(probes=[sent()], steer=steer, sampling=SAMPLING))
    columns = events[1].signal_table.columns
    assert columns[0].probe_name == "mood"
    assert columns[1].gate == receipt_pb2.InterventionRef(
        origin=receipt_pb2.ORIGIN_REQUEST,
        index=1,
        op=receipt_pb2.OP_ADD,
        gate_probe_names=["mood"],
    )
    where, values, _ = all_signals(events)
    assert where == list(range(6))
    assert values.tolist() == [[reading(0, p), 1 + p / 4] for p in where]


async def test_a_gate_without_signals_sends_none(running: Running) -> None:
    events = await running.client.generate(request(probes=[probe()], steer=[gated(above(1.0))]))
    assert not any(event.WhichOneof("event").startswith("signal") for event in events)
    assert [job.plan.signals.any for job in running.backend.jobs] == [False]


async def test_each_sample_has_its_signals(running: Running) -> None:
    sampling = generation_pb2.Sampling(max_tokens=3, n=2)
    events = await running.client.generate(request(probes=[sent()], sampling=sampling))
    for sample in range(2):
        assert all_signals(events, sample)[0] == list(range(5))


async def test_the_baseline_has_no_signals(running: Running) -> None:
    events = await running.client.generate(
        request(probes=[sent()], steer=[add()], with_baseline=True, sampling=SAMPLING)
    )
    assert all_signals(events)[0] == list(range(6))


async def test_steps_beyond_the_last_token_send_nothing(starter) -> None:
    running = await starter(ScriptedBackend(overrun=2))
    events = await running.client.generate(request(probes=[sent()], sampling=SAMPLING))
    assert all_signals(events)[0] == list(range(6))


async def test_signals_of_many_streams_leave_together(running: Running) -> None:
    running.manager._pace.add(10_000)  # as if so many streams ran
    events = await running.client.generate(request(probes=[sent()], sampling=SAMPLING))
    assert all_signals(events)[0] == list(range(6))
    assert sum(event.HasField("signals") for event in events) <= 3


async def test_lost_signals_are_reported(starter) -> None:
    running = await starter(ScriptedBackend(lost_signals=frozenset({3, 4})))
    events = await running.client.generate(request(probes=[sent()], sampling=SAMPLING))
    assert all_signals(events)[0] == [0, 1, 2, 5]
    dropped = [
        (run.start, run.count)
        for event in events
        if event.HasField("signals")
        for run in event.signals.dropped_positions
    ]
    assert sum(count for _, count in dropped) == 2
    assert {start for start, _ in dropped} <= {3, 4}


async def test_signals_that_do_not_fit_give_way_to_tokens(starter) -> None:
    sites = sites_with(steps=1000, directions=1000)
    running = await starter(ScriptedBackend(sites=sites), request_buffer_bytes=32 << 10)
    wide = [sent(f"p{n}", sites=site_set(types_pb2.POINT_RESID_POST)) for n in range(60)]
    prompt = types_pb2.TokenIds(ids=[1] * 60)
    call = running.client.generation.Generate(
        request(
            probes=wide,
            token_ids=prompt,
            sampling=generation_pb2.Sampling(max_tokens=3, n=8),
        )
    )
    await asyncio.sleep(0.3)
    events = await rest(call)
    assert sum(event.HasField("finished") for event in events) == 8
    found = [event.signals for event in events if event.HasField("signals")]
    dropped = sum(run.count for one in found for run in one.dropped_positions)
    assert dropped > 0
    assert dropped + sum(len(positions(one)) for one in found) == 8 * 62


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({"probes": [probe()]}, "REASON_INVALID_VALUE", "probes[0]"),
        ({"hold_back": 1025}, "REASON_INVALID_VALUE", "hold_back"),
    ],
)
async def test_what_shows_nothing_is_refused(
    running: Running, fields: dict[str, object], reason: str, field: str
) -> None:
    refusal = await running.client.refusal(request(**fields))
    assert refusal.brief == (grpc.StatusCode.INVALID_ARGUMENT, reason, field)


async def test_a_session_goes_on_reading_after_an_update(running: Running) -> None:
    running.backend.hold = asyncio.Event()
    messages = [
        start(probes=[sent()], token_ids=types_pb2.TokenIds(ids=[10, 11, 12]), sampling=SAMPLING),
        generation_service_pb2.SessionRequest(
            update_id=1, steering=request(steer=[add()]).steering
        ),
    ]
    call = running.client.generation.Session(iter(messages), timeout=10)
    events = []
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event)
        if event.HasField("applied"):
            running.backend.hold.set()
    assert any(event.HasField("applied") for event in events)
    assert all_signals(events)[0] == list(range(6))
    (update,) = running.backend.update_calls
    assert update[0].plan.signals.readings == 1
