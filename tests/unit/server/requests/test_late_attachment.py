"""A subscription takes part in requests that already run, from a position that is reported."""

import asyncio

import pytest

from rheostat_server.admission.admit import admit
from rheostat_server.generation.responses import run
from rheostat_server.requests import late_attachment
from rheostat_server.tasks.offload import offload_plan
from rheostat_wire.v1 import capture_pb2, capture_service_pb2, types_pb2

from ..conftest import rest
from ..fakes import ScriptedBackend, row, sites_with
from ..late_attachments import (
    INLINE,
    OWN,
    Steps,
    attached,
    begun,
    from_position,
    opened_while_they_step,
)
from ..messages import GENERATED, add, capture, request, selector, site_set
from ..streams import settled, until
from ..subscribers import (
    EVERY,
    POST,
    PROMPT,
    Subscriber,
    by_id,
    by_label,
    ends_of,
    expected,
    failure,
    generate,
    opening,
    rows_of,
    sampled,
    site,
    wanted,
)

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_attachment, "PATIENCE", 0.5)


@pytest.mark.parametrize("own", OWN.values(), ids=OWN)
async def test_a_request_that_runs_is_captured_from_its_next_step_on(starter, own) -> None:
    running = await starter(ScriptedBackend(hold=Steps()))
    call = await begun(running, "a", n=2, **own)
    one = await opened_while_they_step(running, opening(EVERY, [wanted(0, 2)]), steps=2)
    opened = one.events[0].opened
    assert attached(opened) == [("a", 0, PROMPT), ("a", 1, PROMPT)]
    assert not opened.missed_request_ids
    running.backend.hold.go(20)
    answer = await rest(call)
    assert answer[-1].HasField("receipt")
    await one.until("end_of_request")
    whole = expected("a", 0, 2, samples=2, tokens=5)
    assert rows_of(one.events) == from_position(PROMPT, whole)
    end = ends_of(one.events)["a"]
    assert attached(end) == [("a", 0, PROMPT), ("a", 1, PROMPT)]
    assert (end.dropped_row_count, len(end.finish_reasons)) == (0, 2)
    got = {event.WhichOneof("event") for event in answer}
    assert got == {"started", "tokens", "finished", "receipt"} | (
        {"captured"} if "captures" in own else set()
    )
    await settled(running)
    assert running.manager.ledger.requests == 0


async def test_a_requests_own_rows_are_as_without_the_observer(starter) -> None:
    running = await starter(ScriptedBackend(hold=Steps()))
    call = await begun(running, "a", **OWN["its own capture"])
    one = await opened_while_they_step(running, opening(EVERY, [wanted(1)]))
    running.backend.hold.go(20)
    mine = [e.captured for e in await rest(call) if e.HasField("captured")]
    at = [
        p
        for part in mine
        for run in part.positions
        for p in range(run.start, run.start + run.count)
    ]
    assert at == list(range(PROMPT + 4))
    await one.rest()


async def test_two_subscriptions_join_one_request_each_from_its_own_position(starter) -> None:
    running = await starter(ScriptedBackend(hold=Steps()))
    call = await begun(running, "a", tokens=8)
    one = await opened_while_they_step(running, opening(EVERY, [wanted(0, 1)]))
    two = await opened_while_they_step(running, opening(by_id("a"), [wanted(1, 2)]))
    firsts = [attached(subscriber.events[0].opened)[0][2] for subscriber in (one, two)]
    assert firsts == [PROMPT, PROMPT + 1]
    running.backend.hold.go(20)
    await rest(call)
    for subscriber, first, layers in ((one, firsts[0], (0, 1)), (two, firsts[1], (1, 2))):
        await subscriber.until("end_of_request")
        whole = expected("a", *layers, tokens=8)
        assert rows_of(subscriber.events) == from_position(first, whole)


async def test_requests_that_the_filter_leaves_out_and_new_ones_are_as_ever(starter) -> None:
    running = await starter(ScriptedBackend(hold=Steps()))
    calls = [
        await begun(running, name, labels={"team": team})
        for name, team in (("a", "red"), ("b", "blue"))
    ]
    one = await opened_while_they_step(running, opening(by_label(team="red"), [wanted(0)]), 2)
    running.backend.hold.go(40)
    await generate(running, "c", labels={"team": "red"})
    for call in calls:
        await rest(call)
    await one.until("end_of_request", 2)
    ends = ends_of(one.events)
    assert {name: attached(end) for name, end in ends.items()} == {
        "a": [("a", 0, PROMPT)],
        "c": [],
    }
    assert rows_of(one.events) == from_position(PROMPT, expected("a", 0, tokens=5)) | expected(
        "c", 0
    )


async def test_a_request_that_waits_for_its_next_step_is_named_and_its_end_says_the_rest(
    starter,
) -> None:
    running = await starter(ScriptedBackend(hold=Steps()))
    call = await begun(running, "a")
    one = await Subscriber.open(running, opening(EVERY, [wanted(0)]))
    assert attached(one.events[0].opened) == [("a", 0, None)]
    running.backend.hold.go(20)
    await rest(call)
    await one.until("end_of_request")
    end = ends_of(one.events)["a"]
    assert (attached(end), end.missed_reason) == ([("a", 0, PROMPT)], "")
    assert rows_of(one.events) == from_position(PROMPT, expected("a", 0, tokens=5))


@pytest.mark.parametrize("own", [{}, OWN["its own capture"]], ids=["no plan", "a plan"])
async def test_a_request_that_ends_before_its_next_step_gives_a_reason(starter, own) -> None:
    running = await starter(ScriptedBackend(hold=Steps()))
    call = await begun(running, "a", **own)
    one = await Subscriber.open(running, opening(EVERY, [wanted(0)]))
    call.cancel()
    await one.until("end_of_request")
    end = ends_of(one.events)["a"]
    assert (attached(end), end.row_count, end.dropped_row_count) == ([("a", 0, None)], 0, 0)
    assert "ended before the engine could capture a row" in end.missed_reason
    await settled(running)


async def test_a_request_that_waits_in_line_is_captured_once_it_runs(starter) -> None:
    backend = ScriptedBackend(sites=sites_with(capture_rows=10), hold=Steps())
    running = await starter(backend)
    everything = [capture(site_set(POST, layers=[0, 1]), inline=INLINE)]
    first = await begun(running, "first", captures=everything)
    second = running.client.generation.Generate(
        request(request_id="second", sampling=sampled(5), captures=everything)
    )
    await until(lambda: running.manager.admission_queue.waiting == 1)
    one = await Subscriber.open(running, opening(by_id("second"), [wanted(2)]))
    assert not attached(one.events[0].opened)
    assert not one.events[0].opened.missed
    backend.hold.go(40)
    await rest(first)
    await rest(second)
    await one.until("end_of_request")
    assert attached(ends_of(one.events)["second"]) == [("second", 0, 0)]
    assert rows_of(one.events) == expected("second", 2, tokens=5)


async def test_what_the_engine_has_no_room_for_is_missed_and_why_is_said(starter) -> None:
    backend = ScriptedBackend(sites=sites_with(capture_rows=2), hold=Steps())
    running = await starter(backend)
    own = capture(site_set(POST, layers=[1, 2]), inline=INLINE, where=selector(GENERATED))
    call = await begun(running, "a", captures=[own])
    one = await Subscriber.open(running, opening(EVERY, [wanted(0, 1, 2)]))
    opened = one.events[0].opened
    assert list(opened.missed_request_ids) == ["a"]
    (missed,) = opened.missed
    assert missed.request_id == "a"
    assert "capture rows" in missed.reason
    backend.hold.go(20)
    assert (await rest(call))[-1].HasField("receipt")
    await one.rest()
    assert not one.numbered
    assert not backend.capture_updates


@pytest.mark.parametrize("own", OWN.values(), ids=OWN)
async def test_nothing_is_copied_for_a_subscription_that_has_left(starter, own) -> None:
    running = await starter(ScriptedBackend(hold=Steps()))
    call = await begun(running, "a", **own)
    one = await opened_while_they_step(running, opening(EVERY, [wanted(2)]))
    await one.rest()
    await until(lambda: len(running.backend.capture_updates) == 2)
    ((_, captures, _),) = running.backend.capture_updates[-1].values()
    assert not any(site(2) in one.sites for one in captures)
    running.backend.hold.go(20)
    assert (await rest(call))[-1].HasField("receipt")
    await settled(running)


async def test_an_observer_from_the_beginning_is_left_out_too_once_it_has_left(starter) -> None:
    running = await starter(ScriptedBackend(hold=Steps()))
    one = await Subscriber.open(running, opening(EVERY, [wanted(2)]))
    call = await begun(running, "a")
    await one.rest()
    await until(lambda: running.backend.capture_updates)
    assert list(running.backend.capture_updates[-1].values()) == [(1, (), PROMPT)]
    running.backend.hold.go(20)
    assert (await rest(call))[-1].HasField("receipt")


@pytest.fixture
async def loading(starter):
    """A server whose engine has room for 10 rows and is loading the vector of request "a".

    Two subscriptions select "a": one of layer 2, and another of layers 0 and 1.
    """
    backend = ScriptedBackend(
        sites=sites_with(capture_rows=10), hold=Steps(), loading=asyncio.Event()
    )
    running = await starter(backend)
    first = await Subscriber.open(running, opening(by_id("a"), [wanted(2)]))
    second = await Subscriber.open(running, opening(by_id("a"), [wanted(0, 1)]))
    call = running.client.generation.Generate(
        request(request_id="a", sampling=sampled(5), steer=[add()])
    )
    await until(lambda: running.manager.open_requests)
    return running, call, first, second


async def test_an_observer_that_leaves_before_a_request_has_capacity_is_left_out(loading) -> None:
    running, call, first, second = loading
    await first.rest()
    assert not running.backend.capture_updates
    running.backend.loading.set()
    await until(lambda: running.backend.capture_updates)
    ((_, captures, _),) = running.backend.capture_updates[-1].values()
    assert [one.sites for one in captures] == [(site(0), site(1))]
    running.backend.hold.go(20)
    assert (await rest(call))[-1].HasField("receipt")
    await second.until("end_of_request")
    assert rows_of(second.events) == expected("a", 0, 1, tokens=5)


async def test_rows_without_capacity_are_not_captured_because_another_observer_left(
    loading,
) -> None:
    running, call, first, second = loading
    backend = running.backend
    own = capture(site_set(POST, layers=[0, 1, 2]), inline=INLINE)
    other = await begun(running, "other", captures=[own])  # takes 9 of the 10 rows
    await first.rest()
    backend.loading.set()
    await until(lambda: len(backend.positions) == 2)  # both run
    backend.hold.go(40)
    assert (await rest(call))[-1].HasField("receipt")
    assert (await failure(second)).reason == "REASON_CAPTURE_OVERFLOW"
    assert not backend.capture_updates
    await rest(other)


async def test_one_subscription_is_attached_in_an_iteration_of_the_event_loop(
    starter, monkeypatch
) -> None:
    backend = ScriptedBackend(hold=Steps(), loading=asyncio.Event())
    running = await starter(backend)
    calls = [
        running.client.generation.Generate(
            request(request_id=name, sampling=sampled(5), steer=[add()])
        )
        for name in ("a", "b")
    ]
    await until(lambda: running.manager.open_requests == 2)
    for layer in range(3):
        await Subscriber.open(running, opening(EVERY, [wanted(layer)]))
    iteration, attached_in = 0, []
    resolve = late_attachment.observer_captures

    def next_iteration() -> None:
        nonlocal iteration
        iteration += 1
        if len(attached_in) < 6:
            asyncio.get_running_loop().call_soon(next_iteration)

    def resolved(*arguments: object) -> object:
        attached_in.append(iteration)
        return resolve(*arguments)

    monkeypatch.setattr(late_attachment, "observer_captures", resolved)
    next_iteration()
    backend.loading.set()
    backend.hold.go(40)
    for call in calls:
        assert (await rest(call))[-1].HasField("receipt")
    assert len(set(attached_in)) == len(attached_in) == 6


async def test_each_sample_is_captured_from_where_it_is_itself(starter) -> None:
    backend = ScriptedBackend(hold=Steps())
    running = await starter(backend)
    call = await begun(running, "a", n=2)
    (active,) = running.manager._active_requests.values()
    backend.hold.go(3)
    await until(lambda: sorted(len(one.tokens) for one in active.sequences) == [2, 3])
    opens = asyncio.ensure_future(Subscriber.open(running, opening(EVERY, [wanted(2)])))
    await until(lambda: backend.capture_updates)
    (changes,) = backend.capture_updates
    low, high = sorted(change.not_before for change in changes.values())
    assert PROMPT <= low == high - 1
    backend.hold.go(40)
    await opens
    assert (await rest(call))[-1].HasField("receipt")


@pytest.mark.parametrize(
    "policy", [capture_pb2.OVERLOAD_FAIL, capture_pb2.OVERLOAD_DROP_NEWEST], ids=["fail", "drop"]
)
async def test_what_the_engine_cannot_do_is_lost_as_the_policy_says(starter, policy) -> None:
    running = await starter(ScriptedBackend(hold=Steps(), capture_update_error="too often"))
    call = await begun(running, "a")
    asked = asyncio.ensure_future(
        Subscriber.open(running, opening(EVERY, [wanted(0)], overload=policy))
    )
    await until(lambda: running.backend.capture_updates)
    running.backend.hold.go(20)
    one = await asked
    if policy == capture_pb2.OVERLOAD_FAIL:
        assert (await failure(one)).reason == "REASON_CAPTURE_OVERFLOW"
    else:
        await one.until("end_of_request")
        end = ends_of(one.events)["a"]
        assert (end.row_count, end.dropped_row_count) == (0, 4)
    assert (await rest(call))[-1].HasField("receipt")


@pytest.mark.parametrize(
    "policy", [capture_pb2.OVERLOAD_FAIL, capture_pb2.OVERLOAD_DROP_NEWEST], ids=["fail", "drop"]
)
async def test_a_change_that_cannot_be_made_is_lost_as_the_policy_says_and_logged(
    starter, policy, monkeypatch, caplog
) -> None:
    async def broken(size, work, *args, **kwargs):
        if work is late_attachment._captures_from:
            raise MemoryError("no room")
        return await offload_plan(size, work, *args, **kwargs)

    running = await starter(ScriptedBackend(hold=Steps()))
    call = await begun(running, "a")
    with monkeypatch.context() as patch:
        patch.setattr(late_attachment, "offload_plan", broken)
        one = await Subscriber.open(running, opening(EVERY, [wanted(0)], overload=policy))
        assert attached(one.events[0].opened) == [("a", 0, None)]
        assert "the changed captures of a could not be made" in caplog.text
    if policy == capture_pb2.OVERLOAD_FAIL:
        assert (await failure(one)).reason == "REASON_CAPTURE_OVERFLOW"
    other = await opened_while_they_step(running, opening(EVERY, [wanted(1)]))
    running.backend.hold.go(20)
    assert (await rest(call))[-1].HasField("receipt")
    await other.until("end_of_request")
    assert len(rows_of(other.events)) == 4
    if policy != capture_pb2.OVERLOAD_FAIL:
        await one.until("end_of_request")
        assert ends_of(one.events)["a"].row_count == 0
    await settled(running)


async def test_an_engine_that_dies_meanwhile_ends_the_subscription(starter) -> None:
    running = await starter(ScriptedBackend(hold=Steps()))
    call = await begun(running, "a")
    one = await Subscriber.open(running, opening(EVERY, [wanted(0)]))
    running.backend.lost("the engine died")
    assert (await failure(one)).reason == "REASON_ENGINE_LOST"
    call.cancel()


async def test_a_subscription_that_opens_while_a_request_is_admitted_gets_all_of_it(
    starter,
) -> None:
    running = await starter()
    admitted = await admit(request(request_id="a", sampling=sampled(5)), running.manager.admission)
    one = await Subscriber.open(running, opening(EVERY, [wanted(0)]))
    assert not one.events[0].opened.attached
    events = [event async for event in run(admitted, running.manager)]
    assert events[-1].HasField("receipt")
    await one.until("end_of_request")
    assert attached(ends_of(one.events)["a"]) == [("a", 0, 0)]
    assert rows_of(one.events) == expected("a", 0, tokens=5)


async def test_rows_are_those_of_their_positions(starter) -> None:
    running = await starter(ScriptedBackend(hold=Steps()))
    call = await begun(running, "a")
    one = await opened_while_they_step(running, opening(EVERY, [wanted(2)]))
    running.backend.hold.go(20)
    await rest(call)
    await one.until("end_of_request")
    found = rows_of(one.events)
    assert {key[3]: value for key, value in found.items()} == {
        position: row(site(2), position).tolist() for position in range(PROMPT, PROMPT + 4)
    }
    kinds = [event.WhichOneof("event") for event in one.events]
    assert kinds.index("opened") == 0
    assert isinstance(one.events[0], capture_service_pb2.SubscribeResponse)


def inline(*layers: int) -> capture_pb2.CaptureSpec:
    """Every row of some layers, in the response."""
    return capture(site_set(POST, layers=layers), inline=INLINE)


async def test_an_observers_sites_are_counted_on_top_of_the_requests_own(starter) -> None:
    """Each fits any step of 16 tokens by itself; both together need a ring of 32 rows."""
    backend = ScriptedBackend(sites=sites_with(capture_rows=31), hold=Steps())
    running = await starter(backend)
    long = types_pb2.TokenIds(ids=range(12))
    calls = [  # 36 rows are reserved: more than the ring has, but no step takes so many
        running.client.generation.Generate(
            request(request_id=name, captures=[inline(0)], sampling=sampled(4), token_ids=long)
        )
        for name in "abc"
    ]
    await until(lambda: len(backend.positions) == 3)
    other = await Subscriber.open(running, opening(EVERY, [wanted(1)]))
    missed = other.events[0].opened.missed
    assert {one.request_id for one in missed} == {*"abc"}
    assert "capture rows" in missed[0].reason
    same = await opened_while_they_step(running, opening(EVERY, [wanted(0)]), steps=3)
    assert len(attached(same.events[0].opened)) == 3
    backend.hold.go(40)
    for call in calls:
        assert (await rest(call))[-1].HasField("receipt")


async def test_what_several_observers_and_the_request_want_alike_is_counted_once(starter) -> None:
    backend = ScriptedBackend(sites=sites_with(capture_rows=4), hold=Steps())
    running = await starter(backend)
    call = await begun(running, "a", tokens=20, captures=[inline(0)])
    ledger = running.manager.ledger
    assert ledger.used("capture_rows") == PROMPT
    watchers = [
        await opened_while_they_step(running, opening(EVERY, [wanted(*layers)]))
        for layers in ((0,), (0, 1, 2), (1, 2), (0, 1, 2))
    ]
    assert not any(one.events[0].opened.missed for one in watchers)
    # A step captures one row at each of three sites, which is what the prompt needed.
    assert ledger.used("capture_rows") == PROMPT
    call.cancel()
    await settled(running)
    assert (ledger.used("capture_rows"), ledger.requests) == (0, 0)


async def test_samples_and_baselines_are_counted_with_what_an_observer_wants_of_each(
    starter,
) -> None:
    backend = ScriptedBackend(hold=Steps())
    running = await starter(backend)
    call = running.client.generation.Generate(
        request(request_id="a", sampling=sampled(9, 2), steer=[add()], with_baseline=True)
    )
    await until(lambda: len(backend.positions) == 4)
    one = await opened_while_they_step(running, opening(EVERY, [wanted(0, 1)]), steps=4)
    assert len(attached(one.events[0].opened)) == 4
    assert running.manager.ledger.used("capture_rows") == 4 * 2
    call.cancel()
    await settled(running)
    assert running.manager.ledger.used("capture_rows") == 0


async def test_an_observer_takes_no_room_while_a_request_waits_for_it(starter) -> None:
    backend = ScriptedBackend(sites=sites_with(capture_rows=10), hold=Steps())
    running = await starter(backend)
    first = await begun(running, "first", captures=[inline(0, 1)])
    second = running.client.generation.Generate(
        request(request_id="second", sampling=sampled(5), captures=[inline(0, 1)])
    )
    plain = await begun(running, "plain", tokens=40)
    await until(lambda: running.manager.admission_queue.waiting == 1)
    one = await Subscriber.open(running, opening(by_id("first", "plain"), [wanted(0, 1, 2)]))
    missed = one.events[0].opened.missed
    assert {each.request_id for each in missed} == {"first", "plain"}
    assert all("other requests wait" in each.reason for each in missed)
    first.cancel()
    await until(lambda: running.manager.admission_queue.waiting == 0)
    backend.hold.go(60)
    assert (await rest(second))[-1].HasField("receipt")
    plain.cancel()


async def test_an_observer_that_needs_nothing_new_joins_though_a_request_waits(starter) -> None:
    backend = ScriptedBackend(sites=sites_with(capture_rows=10), hold=Steps())
    running = await starter(backend)
    first = await begun(running, "first", captures=[inline(0, 1)])
    second = running.client.generation.Generate(
        request(request_id="second", sampling=sampled(5), captures=[inline(0, 1)])
    )
    await until(lambda: running.manager.admission_queue.waiting == 1)
    one = await opened_while_they_step(running, opening(by_id("first"), [wanted(1)]))
    assert attached(one.events[0].opened) == [("first", 0, PROMPT)]
    backend.hold.go(60)
    for call in (first, second):
        assert (await rest(call))[-1].HasField("receipt")
