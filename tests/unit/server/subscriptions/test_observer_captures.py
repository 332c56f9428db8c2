"""Observers cost a request little, whatever they select; what they cannot have is said."""

import asyncio
import threading

import grpc
import pytest

from rheostat_bench.calls import Call, connect, make
from rheostat_server.limits import (
    OBSERVER_COST,
    SUBSCRIBE_OPEN_BYTES,
    SUBSCRIPTION_SELECTOR_BYTES,
)
from rheostat_server.selectors import selection
from rheostat_server.subscriptions import observed, observer_captures
from rheostat_server.subscriptions import opening as openings
from rheostat_server.tasks.offload import PLANNER
from rheostat_wire.v1 import capture_pb2, capture_service_pb2, types_pb2

from ..conftest import Refusal, rest
from ..fakes import INFO, ScriptedBackend, sites_with
from ..messages import capture, generated, request, selector, site_set, token_range, window
from ..streams import settled
from ..subscribers import (
    EVERY,
    PROMPT,
    Message,
    Subscriber,
    by_label,
    ends_of,
    expected,
    failure,
    generate,
    opening,
    rows_of,
    wanted,
)

Code = grpc.StatusCode
NEWEST = capture_pb2.OVERLOAD_DROP_NEWEST


async def refused(running, request_message) -> Refusal:
    one = Subscriber(running)
    await one.call.write(Message(open=request_message))
    return await failure(one)


@pytest.mark.parametrize(
    ("request_message", "reason", "field"),
    [
        (
            opening(specs=[wanted(where=selector(*[window(0, 1)] * 1024))] * 5),
            "REASON_INVALID_VALUE",
            "open.captures[4].where",
        ),
        (
            opening(specs=[wanted(where=selector(*[token_range(*[5] * 4096)] * 65))]),
            "REASON_INVALID_VALUE",
            "open.captures[0].where",
        ),
        (
            opening(specs=[wanted(where=selector(*[window(0, 1)] * 820))] * 5),
            "REASON_INVALID_VALUE",
            "open.captures[4].where",
        ),
        (
            opening(specs=[wanted(where=selector(*[window(0, 1)] * 817))] * 5),
            "REASON_INVALID_VALUE",
            "open.captures",
        ),
        (opening(by_label(**{"k" * 64: "v"})), "REASON_INVALID_VALUE", "open.filter.labels.labels"),
        (opening(namespace="x" * SUBSCRIBE_OPEN_BYTES), "REASON_MESSAGE_TOO_LARGE", ""),
    ],
)
async def test_what_a_subscription_selects_with_is_limited(
    running, request_message, reason, field
) -> None:
    refusal = await refused(running, request_message)
    assert (refusal.reason, refusal.field) == (reason, field)
    if field == "open.captures":
        assert f"at most {OBSERVER_COST}" in refusal.message
    if field == "open.captures[0].where":
        assert f"at most {SUBSCRIPTION_SELECTOR_BYTES}" in refusal.message


async def test_an_opening_that_is_too_large_is_refused_before_it_is_decoded(running) -> None:
    target = f"127.0.0.1:{running.server.port}"
    async with connect(target) as channel:
        for size, reason in (
            (SUBSCRIBE_OPEN_BYTES, "REASON_INVALID_VALUE"),
            (SUBSCRIBE_OPEN_BYTES + 1, "REASON_MESSAGE_TOO_LARGE"),
        ):
            no_message = b"\x07" * size
            call = Call("CaptureService/Subscribe", (no_message,), half_closes=False)
            assert (await make(channel, target, call)).reason == reason


async def test_a_large_opening_is_worked_out_beside_the_event_loop(running, monkeypatch) -> None:
    threads: list[threading.Thread] = []
    resolve = openings.resolve_capture

    def noted(*args):
        threads.append(threading.current_thread())
        return resolve(*args)

    monkeypatch.setattr(openings, "resolve_capture", noted)
    ids = token_range(*[5] * 4096)
    await Subscriber.open(running, opening(specs=[wanted(where=selector(*[ids] * 60))]))
    assert threads
    assert threading.main_thread() not in threads


async def test_a_small_opening_waits_for_no_large_plan(running) -> None:
    end = threading.Event()
    PLANNER.submit(1 << 30, end.wait, 30)
    try:
        async with asyncio.timeout(20):
            await Subscriber.open(running, opening(specs=[wanted(0), wanted(1)]))
    finally:
        end.set()


async def test_what_no_prompt_changes_is_worked_out_once(starter, monkeypatch) -> None:
    running = await starter()
    resolved: list[int] = []
    resolve = openings.resolve_capture
    monkeypatch.setattr(
        openings, "resolve_capture", lambda *args: (resolved.append(1), resolve(*args))[1]
    )
    one = await Subscriber.open(running, opening(specs=[wanted(0), wanted(1)]))
    for name in "abc":
        await generate(running, name)
    await one.rest()
    assert len(resolved) == 2
    assert set(ends_of(one.events)) == set("abc")


async def test_subscriptions_that_select_by_token_index_a_prompt_once(starter, monkeypatch) -> None:
    running = await starter(ScriptedBackend())
    for _ in range(3):
        await Subscriber.open(running, opening(specs=[wanted(where=selector(token_range(10)))]))
    indexed = []
    index = selection.PromptIndex

    def counted(prompt, vocabulary: int):
        indexed.append(prompt)
        return index(prompt, vocabulary)

    monkeypatch.setattr(selection, "PromptIndex", counted)
    await generate(running, "a")
    assert len(indexed) == 1


async def test_a_subscription_with_hundreds_of_ranges_observes_a_request(running) -> None:
    ranges = selector(*[window(0, 1)] * 500)
    one = await Subscriber.open(running, opening(EVERY, [wanted(where=ranges)]))
    await generate(running, "seen")
    await one.until("end_of_request")
    assert len(rows_of(one.events)) == 1


async def test_the_cheapest_observers_come_first_and_the_others_miss_the_request(
    starter, monkeypatch
) -> None:
    running = await starter()
    dear = opening(specs=[wanted(0, 1, 2)], overload=NEWEST)
    ones = [
        await Subscriber.open(running, request_message)
        for request_message in (dear, opening(specs=[wanted(1)]))
    ]
    cheap_cost = running.manager.subscriptions.named(ones[1].name, "").captures.cost
    monkeypatch.setattr(observer_captures, "OBSERVERS_COST", cheap_cost)
    await generate(running, "a")
    for one in ones:
        await one.rest()
    missed, had = (ends_of(one.events)["a"] for one in ones)
    assert "too many subscriptions" in missed.missed_reason
    assert (missed.row_count, missed.dropped_row_count) == (0, 0)
    assert list(missed.finish_reasons) == [types_pb2.FINISH_REASON_LENGTH]
    assert had.missed_reason == ""
    assert rows_of(ones[1].events) == expected("a", 1)


async def test_an_observer_that_may_lose_no_row_fails_where_it_misses_a_request(
    starter, monkeypatch
) -> None:
    running = await starter()
    one = await Subscriber.open(running, opening(specs=[wanted(0)]))
    monkeypatch.setattr(observer_captures, "OBSERVERS_COST", 1)
    await generate(running, "a")
    refusal = await failure(one)
    assert (refusal.code, refusal.reason) == (Code.RESOURCE_EXHAUSTED, "REASON_CAPTURE_OVERFLOW")
    assert "too many subscriptions" in refusal.message


async def test_an_observer_that_would_fragment_a_request_misses_it(starter, monkeypatch) -> None:
    monkeypatch.setattr(observed, "OBSERVER_SPANS", 3)
    running = await starter()
    every_other = selector(*[window(2 * n, 2 * n + 1) for n in range(2)], generated(2, 3))
    pieces = await Subscriber.open(
        running, opening(specs=[wanted(0, where=every_other)] * 2, overload=NEWEST)
    )
    few = await Subscriber.open(running, opening(specs=[wanted(0, where=selector(window()))]))
    more = selector(*[window(2 * n, 2 * n + 1) for n in range(2)], generated(2, 3), generated(4, 5))
    too_many = await Subscriber.open(
        running, opening(specs=[wanted(0, where=more)], overload=NEWEST)
    )
    await generate(running, "a")
    ends = []
    for one in (pieces, few, too_many):
        await one.rest()
        ends.append(ends_of(one.events)["a"])
    assert [bool(end.missed_reason) for end in ends] == [False, False, True]
    assert "too fragmented" in ends[2].missed_reason
    assert ends[1].row_count == PROMPT


async def test_what_observers_add_to_a_plan_is_limited(starter, monkeypatch) -> None:
    monkeypatch.setattr("rheostat_server.admission.planning.OBSERVERS_PLAN_COST", 3)
    running = await starter()
    pieces = selector(*[window(2 * n, 2 * n + 1) for n in range(2)], generated(2, 3))
    ones = [
        await Subscriber.open(running, opening(specs=[wanted(site, where=where)], overload=NEWEST))
        for site, where in enumerate((pieces, selector(window())))
    ]
    await generate(running, "a")
    ends = []
    for one in ones:
        await one.rest()
        ends.append(ends_of(one.events)["a"])
    assert [bool(end.missed_reason) for end in ends] == [True, False]
    (job,) = running.backend.jobs
    assert [one.spans for one in job.plan.captures] == [((0, PROMPT),)]


async def test_a_request_keeps_its_own_rows_where_an_observer_misses_it(
    starter, monkeypatch
) -> None:
    running = await starter()
    one = await Subscriber.open(running, opening(specs=[wanted(1)], overload=NEWEST))
    monkeypatch.setattr(observer_captures, "OBSERVERS_COST", 1)
    sent = capture_pb2.CaptureSpec(
        sites=site_set(types_pb2.POINT_RESID_POST, layers=[2]), subscription_id=one.name
    )
    events = await running.client.generate(request(request_id="a", captures=[capture(), sent]))
    assert sum(event.HasField("captured") for event in events)
    await one.rest()
    end = ends_of(one.events)["a"]
    assert "too many subscriptions" in end.missed_reason
    assert end.row_count == PROMPT + 1
    await settled(running)


async def test_a_request_that_runs_is_missed_by_name(starter, monkeypatch) -> None:
    running = await starter(ScriptedBackend(info=INFO, sites=sites_with(), hold=asyncio.Event()))
    call = running.client.generation.Generate(request(request_id="a"))
    await call.read()
    await call.read()
    monkeypatch.setattr(observer_captures, "OBSERVERS_COST", 1)
    one = await Subscriber.open(running, opening(EVERY, [wanted(0)]))
    (missed,) = one.events[0].opened.missed
    assert isinstance(missed, capture_service_pb2.Missed)
    assert missed.request_id == "a"
    assert "too many subscriptions" in missed.reason
    running.backend.hold.set()
    await rest(call)
    await one.rest()
