"""Calls that end otherwise than by their answer, over both clients: whose error comes out."""

import asyncio
import threading

import grpc
import numpy as np
import pytest

import rheostat
from rheostat._connection.aio_connection import Requests
from rheostat_wire.v1 import engine_service_pb2, generation_service_pb2, steering_service_pb2

MODEL = engine_service_pb2.GetModelResponse()
STARTED = generation_service_pb2.GenerateResponse(started={})


class Stall:
    """A handler that answers nothing until its caller has gone."""

    def __init__(self, *answers: object) -> None:
        self.begun = threading.Event()
        self._answers = answers

    def __call__(self, _request: object, context: grpc.ServicerContext) -> list:
        gone = threading.Event()
        context.add_callback(gone.set)
        self.begun.set()
        gone.wait(30)
        return [*self._answers]


CALLS = {
    "model": ("GetModel", lambda engine: engine.model()),
    "put": ("PutVector", lambda engine: engine.vectors.put(np.ones(2))),
    "get": ("GetVector", lambda engine: engine.vectors.get("joy")),
    "generate": ("Generate", lambda engine: engine.generate("x")),
}


@pytest.mark.parametrize("name", CALLS)
def test_closing_the_client_cancels_calls_that_run(client, server, name):
    rpc, use = CALLS[name]
    stall = Stall()
    server.on(rpc, stall)
    assert isinstance(client.closed_during(use, stall.begun), rheostat.Cancelled)


@pytest.mark.parametrize("name", CALLS)
async def test_a_task_that_is_cancelled_sees_its_own_cancellation(server, name):
    rpc, use = CALLS[name]
    stall = Stall()
    server.on(rpc, stall)
    async with rheostat.aio.connect(server.target) as engine:
        call = asyncio.create_task(use(engine))
        assert await asyncio.to_thread(stall.begun.wait, 30)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call


@pytest.mark.parametrize(
    "use",
    [
        *(use for _, use in CALLS.values()),
        lambda engine: engine.stream("x"),
        lambda engine: engine.session("x"),
        lambda engine: engine.vectors.list(),
        lambda engine: engine.wait_until_ready(),
    ],
)
def test_a_client_that_has_been_closed_says_so(client, server, use):
    server.on("GetModel", MODEL)
    client.run(lambda engine: engine.model())
    client.run(lambda engine: engine.close())
    with pytest.raises(rheostat.Refused, match=r"this client has been closed; rheostat\.connect"):
        client.run(use)


def test_what_progress_raises_comes_out_as_it_is(client, server):
    def progress(_sent: int, _total: int) -> None:
        raise mine

    mine = KeyError("mine")
    server.on("PutVector", steering_service_pb2.PutVectorResponse())
    with pytest.raises(KeyError) as raised:
        client.run(lambda engine: engine.vectors.put(np.ones(2), progress=progress))
    assert raised.value is mine


@pytest.mark.parametrize(
    ("use", "rpc", "limited"),
    [
        (lambda engine: engine.vectors.put(np.ones(2)), "PutVector", True),
        (lambda engine: engine.vectors.get("joy"), "GetVector", True),
        (lambda engine: engine.tokenize("x"), "Tokenize", True),
        (lambda engine: engine.generate("x"), "Generate", False),
    ],
)
def test_the_clients_timeout_holds_for_calls_that_run_no_prompt(
    client, server, refusal, use, rpc, limited
):
    def answer(_request: object, context: grpc.ServicerContext) -> object:
        left.append(context.time_remaining())
        end = refusal(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
        return end if rpc in ("PutVector", "Tokenize") else [end]

    left = []
    server.on(rpc, answer)
    with pytest.raises(rheostat.DeadlineExceeded) as raised:
        client.run(use)
    assert (left[0] is not None and left[0] < 3600) is limited
    assert ("timeout of 10 s" in raised.value.message) is limited


def test_a_call_has_its_own_timeout_where_it_is_given_one(client, server, refusal):
    passed = refusal(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
    server.on("PutVector", passed)
    server.on("GetVector", [passed])
    for use in (
        lambda engine: engine.vectors.put(np.ones(2), timeout=70),
        lambda engine: engine.vectors.get("joy", timeout=70),
    ):
        with pytest.raises(rheostat.DeadlineExceeded, match="timeout of 70 s"):
            client.run(use)


def test_a_watch_whose_event_loop_is_closed_can_be_finished(server):
    along = rheostat.inline(np.ones((1, 2), np.float32))
    mood = rheostat.probe(along, points="resid_post", layers=0, name="mood")

    async def begin() -> rheostat.aio.Watch:
        watch = rheostat.aio.connect(server.target).watch(probes=mood, every=True)
        await asyncio.sleep(0.01)
        return watch

    loop = asyncio.new_event_loop()
    watch = loop.run_until_complete(begin())
    loop.close()
    watch.finish()


def test_a_client_refuses_calls_in_a_second_event_loop(server):
    server.on("GetModel", MODEL)
    engine = rheostat.aio.connect(server.target)
    asyncio.run(engine.model())
    with pytest.raises(rheostat.Refused, match="made its first call in another event loop"):
        asyncio.run(engine.model())


def test_a_call_that_was_made_outside_of_the_event_loop_runs_in_it(server):
    server.on("GetModel", MODEL)
    engine = rheostat.aio.connect(server.target)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        engine.stream("x")  # begins a call, but no loop runs
        assert isinstance(loop.run_until_complete(engine.model()), rheostat.ModelInfo)
    finally:
        loop.run_until_complete(engine.close())
        loop.close()
        asyncio.set_event_loop(None)


async def test_a_request_of_the_event_loop_is_sent_in_the_next_iteration() -> None:
    requests = Requests(list)
    sending = requests.until_none()
    first = asyncio.ensure_future(anext(sending))
    await asyncio.sleep(0)
    requests.add(STARTED)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert first.done()


async def test_requests_of_threads_and_of_the_event_loop_keep_their_order() -> None:
    requests = Requests(lambda waiting: [*waiting])
    numbered = [generation_service_pb2.SessionRequest(update_id=number) for number in range(100)]

    def add(some: list) -> None:
        for request in some:
            requests.add(request)

    async def read() -> list[int]:
        return [request.update_id async for request in requests.until_none()]

    reading = asyncio.create_task(read())
    for begin in range(0, 100, 10):
        if begin % 20:
            add(numbered[begin : begin + 10])
        else:  # the loop does not run until the thread has ended
            thread = threading.Thread(target=add, args=(numbered[begin : begin + 10],))
            thread.start()
            thread.join()
        if begin % 30:
            await asyncio.sleep(0)
    requests.add(None)
    async with asyncio.timeout(10):
        assert await reading == [*range(100)]
