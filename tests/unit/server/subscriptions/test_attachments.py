"""What subscriptions hold of requests that run comes back, and no request waits for them."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Mapping

import pytest

from rheostat_engine import Event, Released, Rows
from rheostat_engine.plan import tables
from rheostat_server.admission.admit import admit
from rheostat_server.capture.engine_captures import engine_captures
from rheostat_server.engine.backend import CapturesUpdate, Delta, Job
from rheostat_server.errors import RheostatError
from rheostat_server.generation.responses import run
from rheostat_server.requests import late_attachment
from rheostat_server.tasks import offload
from rheostat_wire.v1 import capture_pb2

from ..conftest import rest
from ..fakes import ScriptedBackend, sites_with
from ..late_attachments import (
    INLINE,
    OWN,
    Steps,
    attached,
    begun,
    from_position,
    opened_while_they_step,
)
from ..messages import capture, request, site_set
from ..streams import settled, until
from ..subscribers import (
    EVERY,
    POST,
    PROMPT,
    Message,
    Subscriber,
    by_id,
    ends_of,
    expected,
    failure,
    opening,
    rows_of,
    sampled,
    wanted,
)

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_attachment, "PATIENCE", 0.5)


class Late(ScriptedBackend):
    """Events come by another way than tokens, later, in order."""

    delay = 0.05

    def start(self, deliver: Callable[[Event], None], lost: Callable[[str], None]) -> None:
        loop = asyncio.get_running_loop()
        super().start(lambda event: loop.call_later(self.delay, deliver, event), lost)


class Batching(ScriptedBackend):
    """Events come one by one. The newest row of a sample waits until the next or the last event."""

    def start(self, deliver: Callable[[Event], None], lost: Callable[[str], None]) -> None:
        self.waiting: dict[str, Rows] = {}
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.delivering = asyncio.create_task(self._deliver_each(deliver))
        super().start(self._take, lost)

    def _take(self, event: Event) -> None:
        waits = self.waiting.pop(event.request_id, None)
        if isinstance(event, Rows):
            self.waiting[event.request_id] = event
        if waits is not None and not isinstance(event, Rows | Released):
            self.waiting[event.request_id] = waits
        elif waits is not None:
            self.events.put_nowait(waits)
        if not isinstance(event, Rows):
            self.events.put_nowait(event)

    async def _deliver_each(self, deliver: Callable[[Event], None]) -> None:
        while True:
            deliver(await self.events.get())
            await asyncio.sleep(0.02)


class Busy(ScriptedBackend):
    """Does not take changes up."""

    async def update_captures(self, changes: Mapping[str, CapturesUpdate | None]) -> None:
        self.capture_updates.append(dict(changes))
        await asyncio.Event().wait()


class Slow(ScriptedBackend):
    """Takes changes up once its gate is open."""

    asked = False

    def start(self, deliver: Callable[[Event], None], lost: Callable[[str], None]) -> None:
        super().start(deliver, lost)
        self.gate = asyncio.Event()

    async def update_captures(self, changes: Mapping[str, CapturesUpdate | None]) -> None:
        self.asked = True
        await self.gate.wait()
        await super().update_captures(changes)


class Broken(ScriptedBackend):
    """Cannot be told of changes."""

    async def update_captures(self, changes: Mapping[str, CapturesUpdate | None]) -> None:
        raise RuntimeError("broken")


async def test_what_a_subscription_held_of_a_request_comes_back_once_it_has_left(starter) -> None:
    running = await starter(ScriptedBackend(sites=sites_with(capture_rows=4), hold=Steps()))
    call = await begun(running, "a", tokens=40)
    active = running.manager._active_requests["a"]
    for _ in range(5):
        one = await opened_while_they_step(running, opening(EVERY, [wanted(0, 1, 2)]))
        assert not one.events[0].opened.missed
        assert running.manager.ledger.used("capture_rows") == 3
        asked = len(running.backend.capture_updates)
        await one.rest()
        await until(lambda asked=asked: len(running.backend.capture_updates) > asked)
        assert running.manager.ledger.used("capture_rows") == 3, "the engine copies still"
        running.backend.hold.go(1)
        await until(lambda: not running.manager.ledger.used("capture_rows"))
        assert not active.attachments
        assert not active.reserved
        assert not active.outputs
    running.backend.hold.go(100)
    assert (await rest(call))[-1].HasField("receipt")
    await settled(running)
    assert not running.manager.late_attachment._tasks


async def test_what_the_last_of_several_samples_holds_comes_back_too(starter) -> None:
    running = await starter(ScriptedBackend(hold=Steps()))
    call = await begun(running, "a", tokens=9, n=2)
    one = await opened_while_they_step(running, opening(EVERY, [wanted(0)]), 2)
    await one.rest()
    await until(lambda: len(running.backend.capture_updates) == 2)
    call.cancel()
    await settled(running)
    assert running.manager.ledger.requests == 0
    await until(lambda: not running.manager.late_attachment._tasks)
    assert not running.backend.changes


@pytest.mark.parametrize("own", OWN.values(), ids=OWN)
async def test_rows_that_come_after_the_last_token_are_not_lost(starter, own) -> None:
    running = await starter(Late(hold=Steps()))
    call = await begun(running, "a", **own)
    one = await opened_while_they_step(running, opening(EVERY, [wanted(0)]))
    running.backend.hold.go(20)
    await rest(call)
    await one.until("end_of_request")
    assert rows_of(one.events) == from_position(PROMPT, expected("a", 0, tokens=5))
    end = ends_of(one.events)["a"]
    assert (end.dropped_row_count, len(end.finish_reasons)) == (0, 1)
    await settled(running)


async def test_samples_that_had_ended_before_are_no_loss(starter) -> None:
    running = await starter(Late(hold=Steps()))
    running.backend.delay = 0.3
    call = await begun(running, "a", tokens=3, n=2, **OWN["its own capture"])
    active = running.manager._active_requests["a"]
    running.backend.hold.go(3)
    await until(lambda: any(sequence.ended for sequence in active.sequences))
    (left,) = (sequence for sequence in active.sequences if not sequence.ended)
    one = await Subscriber.open(running, opening(EVERY, [wanted(0)]))
    assert [sample for _, sample, _ in attached(one.events[0].opened)] == [left.sample]
    running.backend.hold.go(20)
    await rest(call)
    await one.until("end_of_request")
    assert ends_of(one.events)["a"].dropped_row_count == 0


async def test_a_call_that_ends_before_it_was_answered_leaves_no_subscription(
    starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_attachment, "PATIENCE", 60.0)
    running = await starter(ScriptedBackend(hold=Steps()))
    request_call = await begun(running, "a")
    for _ in range(6):
        one = Subscriber(running)
        await one.call.write(Message(open=opening(EVERY, [wanted(0)])))
        await until(lambda: running.manager._active_requests["a"].attachments)
        one.call.cancel()
        await until(lambda: not len(running.manager.subscriptions))
    assert not running.manager._active_requests["a"].attachments
    request_call.cancel()
    await settled(running)


async def test_an_engine_that_does_not_take_changes_up_delays_no_answer_and_no_request(
    starter,
) -> None:
    running = await starter(Busy(hold=Steps()))
    call = await begun(running, "a")
    one = await Subscriber.open(running, opening(EVERY, [wanted(0)]))
    assert attached(one.events[0].opened) == [("a", 0, None)]
    admitted = await admit(request(request_id="b", sampling=sampled(5)), running.manager.admission)
    two = await Subscriber.open(running, opening(by_id("b"), [wanted(0)]))
    running.backend.hold.go(40)
    events = [event async for event in run(admitted, running.manager)]
    assert events[-1].HasField("receipt")
    await rest(call)
    one.call.cancel()
    two.call.cancel()


async def test_rows_are_lost_by_policy_if_the_engine_cannot_be_updated(starter) -> None:
    running = await starter(Broken(hold=Steps()))
    call = await begun(running, "a")
    one = await Subscriber.open(running, opening(EVERY, [wanted(0)]))
    assert (await failure(one)).reason == "REASON_CAPTURE_OVERFLOW"
    running.backend.hold.go(20)
    assert (await rest(call))[-1].HasField("receipt")


async def test_observers_that_do_not_fit_take_no_room_from_later_requests(
    starter,
) -> None:
    running = await starter(ScriptedBackend(sites=sites_with(capture_rows=4)))
    everything = opening(EVERY, [wanted(0, 1, 2)], overload=capture_pb2.OVERLOAD_DROP_NEWEST)
    first = await Subscriber.open(running, everything)
    admitted = await admit(request(request_id="a", sampling=sampled(5)), running.manager.admission)
    second = await Subscriber.open(running, opening(EVERY, [wanted(0)]))
    used = []
    async for _ in run(admitted, running.manager):
        used.append(running.manager.ledger.used("capture_rows"))
    copied = [
        sum(len(one.sites) for one in change.captures)
        for changes in running.backend.capture_updates
        for change in changes.values()
        if change is not None
    ]
    assert (used[0], copied) == (3, [1])
    await first.until("end_of_request")
    await second.until("end_of_request")
    assert rows_of(second.events) == expected("a", 0, tokens=5)
    assert ends_of(first.events)["a"].dropped_row_count == 3 * (PROMPT + 4)


async def test_a_change_that_is_too_much_is_missed_and_why_is_said(
    starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "MAX_CAPTURE_COST", 2)
    running = await starter(ScriptedBackend(hold=Steps()))
    call = await begun(running, "a")
    one = await Subscriber.open(running, opening(EVERY, [wanted(0, 1, 2)]))
    (missed,) = one.events[0].opened.missed
    assert "fragmented" in missed.reason
    assert not running.backend.capture_updates
    running.backend.hold.go(20)
    assert (await rest(call))[-1].HasField("receipt")


async def test_why_the_engine_refuses_a_change_is_said(starter) -> None:
    running = await starter(ScriptedBackend(hold=Steps(), capture_update_error="changed too often"))
    call = await begun(running, "a")
    asked = asyncio.ensure_future(Subscriber.open(running, opening(EVERY, [wanted(0)])))
    await until(lambda: running.backend.capture_updates)
    running.backend.hold.go(20)
    assert "changed too often" in (await failure(await asked)).message
    await rest(call)


async def test_what_is_refused_is_lost_though_the_request_itself_has_the_rows(starter) -> None:
    running = await starter(ScriptedBackend(hold=Steps(), capture_update_error="too often"))
    call = await begun(running, "a", **OWN["one of the sites"])
    asked = asyncio.ensure_future(
        Subscriber.open(
            running, opening(EVERY, [wanted(0)], overload=capture_pb2.OVERLOAD_DROP_NEWEST)
        )
    )
    await until(lambda: running.backend.capture_updates)
    running.backend.hold.go(20)
    one = await asked
    await one.until("end_of_request")
    end = ends_of(one.events)["a"]
    assert (end.row_count, end.dropped_row_count) == (0, 4)
    await rest(call)


async def test_no_change_waits_for_a_request_that_has_ended(starter) -> None:
    backend = Slow(hold=Steps())
    running = await starter(backend)
    watcher = await Subscriber.open(running, opening(EVERY, [wanted(2)]))
    call = await begun(running, "a")
    await watcher.rest()
    await until(lambda: backend.asked)
    backend.hold.go(20)
    assert (await rest(call))[-1].HasField("receipt")
    await settled(running)
    backend.gate.set()
    await until(lambda: len(backend.capture_updates) == 2)
    assert not backend.changes


class Early(ScriptedBackend):
    """The engine reports that it has released a sample before the last token arrives."""

    def __init__(self, **fields: object) -> None:
        super().__init__(**fields)
        self.arrives = asyncio.Event()

    async def generate(self, job: Job) -> AsyncGenerator[Delta, None]:
        last = None
        async for delta in super().generate(job):
            if last is not None:
                yield last
            last = delta
        await self.arrives.wait()
        yield last


async def test_no_change_waits_for_a_sample_that_the_engine_has_released(starter) -> None:
    backend = Early(hold=Steps())
    running = await starter(backend)
    call = await begun(running, "a")
    watcher = await opened_while_they_step(running, opening(EVERY, [wanted(2)]))
    backend.hold.go(20)
    await until(lambda: not backend.positions)
    await watcher.rest()
    backend.arrives.set()
    assert (await rest(call))[-1].HasField("receipt")
    await asyncio.wait_for(settled(running), 5)
    assert not backend.changes


async def test_the_last_rows_of_a_sample_come_although_its_last_change_came_too_late(
    starter, caplog: pytest.LogCaptureFixture
) -> None:
    backend = Batching(hold=Steps())
    running = await starter(backend)
    call = await begun(running, "a", tokens=9)
    one = await opened_while_they_step(running, opening(EVERY, [wanted(0)]))
    backend.hold.go(2)
    await until(lambda: backend.events.empty())
    other = asyncio.ensure_future(Subscriber.open(running, opening(EVERY, [wanted(1)])))
    await until(lambda: len(backend.capture_updates) == 2)
    call.cancel()
    await one.until("end_of_request")
    assert rows_of(one.events) == from_position(PROMPT, expected("a", 0, tokens=4))
    assert ends_of(one.events)["a"].dropped_row_count == 0
    await settled(running)
    await other
    assert "no request receives" not in caplog.text


async def test_a_request_that_never_ran_has_no_end_for_readers_that_never_saw_it(starter) -> None:
    running = await starter()
    admitted = await admit(request(request_id="a"), running.manager.admission)
    one = await Subscriber.open(running, opening(by_id("a"), [wanted(0)]))
    running.manager._check_serving = refuse_second(running.manager._check_serving)
    with pytest.raises(RheostatError):
        async for _ in run(admitted, running.manager):
            pass
    await settled(running)
    await one.rest()
    assert not one.numbered


def refuse_second(check: Callable[[], None]) -> Callable[[], None]:
    calls = iter(range(10))

    def refusing() -> None:
        if next(calls) == 3:
            raise RheostatError("refused")
        check()

    return refusing


async def test_what_was_computed_is_not_looked_at_again(starter) -> None:
    running = await starter(ScriptedBackend(hold=Steps()))
    call = await begun(running, "a")
    one = await Subscriber.open(running, opening(EVERY, [wanted(0)]))
    (change,) = running.backend.capture_updates[0].values()
    assert change.not_before == PROMPT
    assert [one.spans[0][0] for one in change.captures] == [PROMPT]
    one.call.cancel()
    call.cancel()


async def test_rows_without_room_are_lost_if_no_reader_saw_the_request(
    starter,
) -> None:
    running = await starter(ScriptedBackend(sites=sites_with(capture_rows=6)))
    own = capture(site_set(POST, layers=[0, 1]), inline=INLINE)
    admitted = await admit(
        request(request_id="a", sampling=sampled(5), captures=[own]), running.manager.admission
    )
    policy = capture_pb2.OVERLOAD_DROP_NEWEST
    one = await Subscriber.open(running, opening(EVERY, [wanted(2)], overload=policy))
    events = [event async for event in run(admitted, running.manager)]
    assert events[-1].HasField("receipt")
    await one.until("end_of_request")
    end = ends_of(one.events)["a"]
    assert (end.row_count, end.dropped_row_count) == (0, PROMPT + 4)
    await settled(running)


async def test_the_end_of_a_subscription_is_handled_once(starter) -> None:
    running = await starter(ScriptedBackend(hold=Steps()))
    one = await Subscriber.open(running, opening(EVERY, [wanted(0)]))
    call = await begun(running, "a")
    (sequence,) = running.manager._active_requests["a"].sequences
    subscription = running.manager.subscriptions.named(one.name, "")
    subscription.close()
    subscription.fail(RheostatError("failed"))
    assert sequence.capture_changes == 1
    call.cancel()
    one.call.cancel()


async def test_captures_are_made_beside_the_event_loop(
    starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def recording(captures):
        if captures:
            threads.append(threading.current_thread())
        return engine_captures(captures)

    monkeypatch.setattr(late_attachment, "engine_captures", recording)
    running = await starter(ScriptedBackend(hold=Steps()))
    calls = [await begun(running, name) for name in "ab"]
    monkeypatch.setattr(offload, "OFFLOAD_BYTES", 1)
    one = await Subscriber.open(running, opening(EVERY, [wanted(0)]))
    assert len(attached(one.events[0].opened)) == 2
    await one.rest()
    await until(lambda: len(running.backend.capture_updates) > 1)
    assert threads
    assert threading.main_thread() not in threads
    for call in calls:
        call.cancel()
