"""Sessions, over both clients: what is said while a request runs, and what answers it."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from google.protobuf import text_format

import rheostat
from rheostat import Finished, Receipt, Started, Tokens, UpdateApplied, UpdateRefused
from rheostat_wire.v1 import generation_service_pb2

JOY = rheostat.named("joy", points="resid_post", layers=2)


def answer(text: str) -> generation_service_pb2.SessionResponse:
    return text_format.Parse(text, generation_service_pb2.SessionResponse())


def asked(text: str) -> generation_service_pb2.SessionRequest:
    return text_format.Parse(text, generation_service_pb2.SessionRequest())


STARTED = answer('started { request_id: "r1" model_name: "m" }')
FIRST = answer('tokens { token_ids: 1 text: "a" }')
SECOND = answer('tokens { offset: 1 token_ids: 2 text: "b" }')
THIRD = answer('tokens { offset: 2 token_ids: 3 text: "c" }')
ABORTED = answer("finished { reason: FINISH_REASON_ABORTED token_count: 3 }")
RECEIPT = answer('receipt { request_id: "r1" generated_token_count: 3 update_count: 1 }')
BANK_FULL = answer(
    """refused {
         update_id: 2
         status {
           code: 8
           message: "no rows are free"
           details {
             [type.googleapis.com/google.rpc.ErrorInfo] {
               reason: "REASON_BANK_FULL" domain: "rheostat.dev"
               metadata { key: "rows" value: "512" }
             }
           }
           details {
             [type.googleapis.com/google.rpc.BadRequest] {
               field_violations {
                 field: "steering.interventions[0]" description: "no rows are free"
               }
             }
           }
           details {
             [type.googleapis.com/google.rpc.RetryInfo] { retry_delay { seconds: 2 } }
           }
         }
       }"""
)
START = asked(
    """start { text: "x" sampling { max_tokens: 9 } return_prompt_token_ids: true }
       batches: true"""
)


def ignore(_session, _event):
    """Do nothing about an event."""


def test_a_session_is_steered_and_stopped_while_it_is_read(client, server):
    def serve(requests, _context):
        next(requests)
        yield from (STARTED, FIRST)
        next(requests)
        yield answer("applied { update_id: 1 first_positions { sample: 0 position: 6 } }")
        yield SECOND
        next(requests)
        yield BANK_FULL
        yield THIRD
        next(requests)
        yield from (ABORTED, RECEIPT)

    def act(session, event):
        if isinstance(event, Tokens):
            match event.text:
                case "a":
                    ids.append(session.steer([JOY * 2, rheostat.ablate(JOY)]))
                case "b":
                    ids.append(session.steer(None))
                case "c":
                    session.stop()

    ids = []
    server.on("Session", serve)
    events, out = client.session("x", act, max_tokens=9)
    assert ids == [1, 2]
    assert server.asked == [
        START,
        asked(
            """update_id: 1
               steering {
                 interventions {
                   sites { points: POINT_RESID_POST list { layers: 2 } }
                   add { vector { name: "joy" } scale: 2 }
                 }
                 interventions {
                   sites { points: POINT_RESID_POST list { layers: 2 } }
                   ablate { directions { name: "joy" } strength: 1 }
                 }
               }"""
        ),
        asked("update_id: 2 steering {}"),
        asked("update_id: 3 stop {}"),
    ]
    refused = events[4]
    assert isinstance(refused, UpdateRefused)
    assert (refused.update_id, refused.reason, refused.message, refused.field) == (
        2,
        "REASON_BANK_FULL",
        "no rows are free",
        "steering.interventions[0]",
    )
    assert type(refused.error) is rheostat.ResourceExhausted
    assert (refused.error.retry_after, refused.error.metadata) == (2.0, {"rows": "512"})
    assert events == [
        Started("r1", "m", ()),
        Tokens(0, "a", (1,), ()),
        UpdateApplied(1, {0: 6}),
        Tokens(0, "b", (2,), ()),
        refused,
        Tokens(0, "c", (3,), ()),
        Finished(0, "aborted", None, 0.0, 0.0),
        Receipt("r1", 0, 3, update_count=1),
    ]
    assert (out.text, out.finish_reason, out.receipt.update_count) == ("abc", "aborted", 1)


def test_events_of_one_message_are_read_one_by_one(client, server):
    def serve(requests, _context):
        next(requests)
        yield STARTED
        batch = generation_service_pb2.SessionEventBatch(events=[FIRST, SECOND, THIRD])
        yield generation_service_pb2.SessionResponse(batch=batch)
        yield from (ABORTED, RECEIPT)

    server.on("Session", serve)
    events, out = client.session("x", ignore, max_tokens=9)
    assert events[1:4] == [Tokens(0, text, (n,), ()) for n, text in enumerate("abc", start=1)]
    assert out.text == "abc"


def test_an_update_that_nobody_answered_is_refused_before_the_receipt(client, server):
    def serve(requests, _context):
        next(requests)
        yield from (STARTED, FIRST)
        next(requests)
        yield from (ABORTED, RECEIPT)

    def act(session, event):
        if isinstance(event, Tokens):
            session.steer(JOY)

    server.on("Session", serve)
    events, out = client.session("x", act)
    refused, last = events[-2:]
    assert isinstance(refused, UpdateRefused)
    assert type(refused.error) is rheostat.NotFound
    assert (refused.update_id, refused.reason, refused.message, refused.field) == (
        1,
        "REASON_REQUEST_NOT_FOUND",
        "the request has ended",
        "",
    )
    assert last == out.receipt


def test_after_the_end_steering_is_refused_and_stopping_does_nothing(client, server):
    def act(session, event):
        if isinstance(event, Receipt):
            session.stop()
            with pytest.raises(rheostat.Refused) as raised:
                session.steer(JOY)
            refused.append((raised.value.message, raised.value.reason))

    refused = []
    server.on("Session", lambda requests, _context: [STARTED, FIRST, ABORTED, RECEIPT])
    _, out = client.session("x", act)
    assert refused == [("the request has ended", "REASON_REQUEST_NOT_FOUND")]
    assert out.text == "a"


def test_what_cannot_be_meant_is_refused_at_once_and_takes_no_id(client, server):
    def serve(requests, _context):
        next(requests)
        yield from (STARTED, FIRST)
        update = next(requests)
        yield answer(f"applied {{ update_id: {update.update_id} }}")
        yield from (ABORTED, RECEIPT)

    def act(session, event):
        if isinstance(event, Tokens):
            with pytest.raises(rheostat.InvalidRequest, match="a strength is 0 to 1, not 2"):
                session.steer(rheostat.ablate(JOY, strength=2))
            assert session.steer(JOY) == 1

    server.on("Session", serve)
    events, _ = client.session("x", act)
    assert UpdateApplied(1, {}) in events


def test_a_session_that_fails_raises_and_takes_no_further_update(client, server, refusal):
    def serve(requests, _context):
        next(requests)
        yield from (STARTED, FIRST)
        yield refusal.of(grpc.StatusCode.UNAVAILABLE, "a worker is gone", "REASON_ENGINE_LOST")

    def act(session, event):
        if isinstance(event, rheostat.RheostatError):
            with pytest.raises(rheostat.Refused):
                session.steer(JOY)
            failed.append(event)

    failed = []
    server.on("Session", serve)
    events, error = client.session("x", act)
    assert events == [Started("r1", "m", ()), Tokens(0, "a", (1,), ())]
    assert isinstance(error, rheostat.Unavailable)
    assert (error.reason, failed) == ("REASON_ENGINE_LOST", [error])


def test_cancelling_ends_the_call_on_both_sides(client, server):
    def serve(requests, context):
        context.add_callback(ended.set)
        yield STARTED
        for _ in requests:
            pass

    def act(session, event):
        if isinstance(event, Started):
            session.cancel()
            with pytest.raises(rheostat.Refused):
                session.steer(JOY)

    ended = threading.Event()
    server.on("Session", serve)
    _, error = client.session("x", act)
    assert isinstance(error, rheostat.Cancelled)
    assert ended.wait(10)


def test_a_session_has_the_baseline_too(client, server):
    events = [
        STARTED,
        FIRST,
        answer('tokens { baseline: true token_ids: 4 text: "z" }'),
        answer("finished { baseline: true reason: FINISH_REASON_LENGTH }"),
        ABORTED,
        answer("divergence { mean_kl: 0.5 }"),
        RECEIPT,
    ]
    server.on("Session", lambda requests, _context: events)
    _, out = client.session("x", ignore, with_baseline=True)
    assert (out.text, out.baseline.text, out.divergence.mean_kl) == ("a", "z", 0.5)


def test_a_stop_is_answered_by_the_end_alone(client, server):
    def serve(requests, _context):
        next(requests)
        yield from (STARTED, FIRST)
        for _ in range(2):
            yield answer(f"applied {{ update_id: {next(requests).update_id} }}")
        yield from (ABORTED, RECEIPT)

    def act(session, event):
        if isinstance(event, Tokens):
            session.steer(JOY)
            session.stop()

    server.on("Session", serve)
    events, out = client.session("x", act)
    kinds = [type(event).__name__ for event in events]
    assert kinds == ["Started", "Tokens", "UpdateApplied", "Finished", "Receipt"]
    assert (events[2], out.finish_reason) == (UpdateApplied(1, {}), "aborted")


def test_a_session_that_is_not_touched_is_a_stream(client, server):
    def serve(requests, _context):
        next(requests)
        yield from (STARTED, FIRST, ABORTED, RECEIPT)

    server.on("Session", serve)
    events, out = client.session("x", ignore, max_tokens=9)
    assert server.asked == [START]
    kinds = [type(event).__name__ for event in events]
    assert kinds == ["Started", "Tokens", "Finished", "Receipt"]
    assert (out.text, out.request_id) == ("a", "r1")


def test_threads_that_steer_at_once_are_heard_in_the_order_of_their_ids(server):
    updates = 200

    def serve(requests, _context):
        next(requests)
        yield STARTED
        for _ in range(updates):
            yield answer(f"applied {{ update_id: {next(requests).update_id} }}")
        yield from (ABORTED, RECEIPT)

    server.on("Session", serve)
    with (
        rheostat.connect(server.target) as engine,
        engine.session("x") as session,
        ThreadPoolExecutor(8) as threads,
    ):
        ids = list(threads.map(lambda _: session.steer(JOY), range(updates)))
        events = list(session)
    assert sorted(ids) == list(range(1, updates + 1))
    applied = [event.update_id for event in events if isinstance(event, UpdateApplied)]
    assert applied == list(range(1, updates + 1))


def test_another_thread_wakes_the_event_loop_of_the_session_that_it_steers(server):
    def serve(requests, _context):
        next(requests)
        yield STARTED
        for _ in range(2):
            yield answer(f"applied {{ update_id: {next(requests).update_id} }}")
        yield from (ABORTED, RECEIPT)

    async def steered() -> list:
        async with rheostat.aio.connect(server.target) as engine, engine.session("x") as session:
            events = [await anext(session)]
            assert await asyncio.to_thread(session.steer, JOY) == 1
            events.append(await anext(session))
            await asyncio.to_thread(session.stop)
            return events + [event async for event in session]

    server.on("Session", serve)
    with asyncio.Runner(debug=True) as runner:  # which refuses what does not wake the loop
        events = runner.run(steered())
    kinds = [type(event).__name__ for event in events]
    assert kinds == ["Started", "UpdateApplied", "Finished", "Receipt"]
