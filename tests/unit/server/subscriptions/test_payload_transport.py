"""Subscribe through shared memory: where rows lie, how long, and for whom."""

import asyncio
import gc
import weakref
from itertools import pairwise
from pathlib import Path

import grpc
import pytest

from rheostat_server.errors import Defect
from rheostat_server.subscriptions import payload_transport, send_queue, shared_payloads
from rheostat_server.subscriptions.shared_memory import FOLDER, NoSharedMemoryError, namespace
from rheostat_wire.v1 import capture_pb2, capture_service_pb2, tensor_pb2

from ..streams import settled, until
from ..subscribers import (
    EVERY,
    ROW,
    Message,
    Subscriber,
    ends_of,
    expected,
    failure,
    generate,
    opening,
    resuming,
    rows_of,
    wanted,
)

Code = grpc.StatusCode


@pytest.fixture(autouse=True)
def everything_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small it is, and whether a thread writes it or not."""
    monkeypatch.setattr(shared_payloads, "SHARED_BYTES", 1)
    monkeypatch.setattr(send_queue, "OFFLOAD_BYTES", 1)


async def shared(running, request_message=None, **fields: object) -> Subscriber:
    """A subscription with shared memory that its reader has not proven to read yet."""
    request_message = request_message or opening(
        EVERY, [wanted(0, 1)], shared_memory=True, **fields
    )
    return await Subscriber.open(running, request_message)


def memory(one: Subscriber) -> capture_service_pb2.SharedMemory:
    return one.events[0].opened.shared_memory


def path_of(one: Subscriber) -> Path:
    return FOLDER / memory(one).name


async def prove(one: Subscriber, nonce: bytes | None = None) -> None:
    found = path_of(one).read_bytes()[8:40] if nonce is None else nonce
    proof = capture_service_pb2.SharedMemoryProof(nonce=found)
    await one.call.write(capture_service_pb2.SubscribeRequest(proof=proof))


async def proven(running, one: Subscriber) -> None:
    """Proves, and waits until the server knows."""
    await prove(one)
    carried = running.manager.subscriptions.named(one.name, "").transport
    await until(lambda: carried._proven)


def read(one: Subscriber) -> list[capture_service_pb2.SubscribeResponse]:
    """The events with payloads fetched from shared memory."""
    data = path_of(one).read_bytes()
    found = []
    for event in one.events:
        copy = capture_service_pb2.SubscribeResponse()
        copy.CopyFrom(event)
        tensor = copy.captured.tensor
        if tensor.HasField("shm"):
            ref = tensor.shm
            tensor.inline = data[ref.offset : ref.offset + ref.length]
        found.append(copy)
    return found


def refs(one: Subscriber) -> list[tensor_pb2.ShmRef]:
    tensors = (event.captured.tensor for event in one.events)
    return [tensor.shm for tensor in tensors if tensor.HasField("shm")]


def inline(one: Subscriber) -> int:
    return sum(bool(event.captured.tensor.inline) for event in one.events)


async def test_rows_lie_in_shared_memory_for_a_reader_that_proves_it(running) -> None:
    one = await shared(running)
    assert memory(one).namespace == namespace()
    assert not one.events[0].opened.inline_reason
    await proven(running, one)
    await asyncio.gather(generate(running, "a"), generate(running, "b", n=2))
    await one.until("end_of_request", 2)
    assert inline(one) == 0
    assert rows_of(read(one)) == expected("a", 0, 1) | expected("b", 0, 1, samples=2)
    assert len(ends_of(one.events)) == 2
    taken = sorted((ref.offset, ref.offset + ref.length) for ref in refs(one))
    assert all(end <= start for (_, end), (start, _) in pairwise(taken))


async def test_without_proof_every_row_comes_inside_a_message(running) -> None:
    one = await shared(running)
    await generate(running, "a")
    await one.until("end_of_request")
    assert not refs(one)
    assert rows_of(one.events) == expected("a", 0, 1)


@pytest.mark.parametrize("nonce", [b"", bytes(32), b"RHEOSHM1", bytes(1000)])
async def test_a_wrong_proof_ends_the_call_and_shares_nothing(running, nonce) -> None:
    one = await shared(running)
    await prove(one, nonce)
    refusal = await failure(one)
    assert refusal.brief == (Code.INVALID_ARGUMENT, "REASON_INVALID_VALUE", "proof.nonce")
    again = await Subscriber.open(running, resuming(one.name))
    await generate(running, "a")
    await again.until("end_of_request")
    assert rows_of(again.events) == expected("a", 0, 1)


async def test_a_proof_where_nothing_is_shared_is_refused(running) -> None:
    one = await Subscriber.open(running, opening(EVERY, [wanted(0)]))
    assert not one.events[0].opened.HasField("shared_memory")
    await prove(one, bytes(32))
    assert (await failure(one)).brief == (
        Code.INVALID_ARGUMENT,
        "REASON_INVALID_VALUE",
        "proof.nonce",
    )


async def test_what_is_not_acknowledged_stays_and_the_rest_is_used_again(running) -> None:
    one = await shared(running)
    await proven(running, one)
    await generate(running, "a")
    await one.until("end_of_request")
    first = {ref.offset for ref in refs(one)}
    await generate(running, "b")
    await one.until("end_of_request", 2)
    assert rows_of(read(one)) == expected("a", 0, 1) | expected("b", 0, 1)
    arena = running.manager.subscriptions.named(one.name, "").transport.arena
    assert arena is not None
    assert not arena._regions.idle
    await one.ack(one.numbered[-1].sequence)
    await until(lambda: arena._regions.idle)
    seen = len(one.events)
    await generate(running, "c")
    await one.until("end_of_request", 3)
    one.events[1:seen] = []
    assert {ref.offset for ref in refs(one)} <= first
    assert rows_of(read(one)) == expected("c", 0, 1)


async def test_a_replay_refers_to_the_same_memory(running) -> None:
    one = await shared(running)
    await proven(running, one)
    await generate(running, "a")
    await one.until("end_of_request")
    one.call.cancel()
    subscription = running.manager.subscriptions.named(one.name, "")
    await until(lambda: not subscription.connected)
    other = await Subscriber.open(running, resuming(one.name, credit=0))
    await proven(running, other)
    await other.credit(1 << 20)
    await other.until("end_of_request")
    assert other.numbered == one.numbered
    assert rows_of(read(other)) == expected("a", 0, 1)


async def test_a_replay_to_a_reader_elsewhere_comes_inside_messages(running) -> None:
    one = await shared(running)
    await proven(running, one)
    await generate(running, "a")
    await one.until("end_of_request")
    other = await Subscriber.open(running, resuming(one.name))
    await other.until("end_of_request")
    assert not refs(other)
    assert [event.sequence for event in other.numbered] == [e.sequence for e in one.numbered]
    assert rows_of(other.events) == rows_of(read(one)) == expected("a", 0, 1)
    assert ends_of(other.events) == ends_of(one.events)


async def test_a_client_that_acknowledges_nonsense_frees_nothing_twice(running) -> None:
    one = await shared(running)
    await proven(running, one)
    await generate(running, "a")
    await one.until("end_of_request")
    last = one.numbered[-1].sequence
    for sequence in (last, last, 1, 0):
        await one.ack(sequence)
    arena = running.manager.subscriptions.named(one.name, "").transport.arena
    await until(lambda: arena._regions.idle)
    await one.ack(last + 1)
    assert (await failure(one)).brief == (
        Code.INVALID_ARGUMENT,
        "REASON_INVALID_VALUE",
        "ack.sequence",
    )
    again = await Subscriber.open(running, resuming(one.name, last))
    await proven(running, again)
    await generate(running, "b")
    await again.until("end_of_request")
    assert rows_of(read(again)) == expected("b", 0, 1)


@pytest.mark.parametrize(
    ("encoding", "kept"),
    [
        (tensor_pb2.ENCODING_LZ4_PLANES, None),
        (tensor_pb2.ENCODING_FULL8, None),
        (tensor_pb2.ENCODING_RP8, 2),
        (tensor_pb2.ENCODING_TOPK8, 2),
    ],
)
async def test_every_encoding_travels_so(running, encoding, kept) -> None:
    spec = wanted(0, 1, encoding=encoding, kept=kept)
    one = await shared(running, opening(EVERY, [spec], shared_memory=True))
    plain = await Subscriber.open(running, opening(EVERY, [spec]))
    await proven(running, one)
    await generate(running, "a")
    await one.until("end_of_request")
    await plain.until("end_of_request")
    assert refs(one)
    assert inline(one) == 0
    fetched = [e.captured.tensor for e in read(one) if e.HasField("captured")]
    assert fetched == [e.captured.tensor for e in plain.events if e.HasField("captured")]


async def test_rows_in_another_type_are_those_that_come_inside_messages(running) -> None:
    spec = wanted(0, 1, dtype=tensor_pb2.DTYPE_BFLOAT16)
    one = await shared(running, opening(EVERY, [spec], shared_memory=True))
    plain = await Subscriber.open(running, opening(EVERY, [spec]))
    await proven(running, one)
    await generate(running, "a")
    await one.until("end_of_request")
    await plain.until("end_of_request")
    fetched = [e.captured.tensor for e in read(one) if e.HasField("captured")]
    assert fetched == [e.captured.tensor for e in plain.events if e.HasField("captured")]
    assert inline(one) == 0


async def test_a_client_of_another_host_gets_the_reason_and_every_row(running) -> None:
    one = await shared(running, namespace="some-boot-id:5")
    opened = one.events[0].opened
    assert not opened.HasField("shared_memory")
    assert opened.inline_reason == "the client is on another host, or has another /dev/shm"
    await generate(running, "a")
    await one.until("end_of_request")
    assert rows_of(one.events) == expected("a", 0, 1)


async def test_a_client_of_this_host_may_say_so(running) -> None:
    one = await shared(running, namespace=namespace())
    assert path_of(one).exists()


async def test_a_server_without_shared_memory_says_so_and_sends_every_row(
    running, monkeypatch
) -> None:
    def none(limit: int) -> None:
        raise NoSharedMemoryError("the server cannot make shared memory: No space left on device")

    monkeypatch.setattr(payload_transport, "Arena", none)
    one = await shared(running)
    opened = one.events[0].opened
    assert not opened.HasField("shared_memory")
    assert opened.inline_reason.endswith("No space left on device")
    await generate(running, "a")
    await one.until("end_of_request")
    assert rows_of(one.events) == expected("a", 0, 1)


async def test_rows_that_do_not_fit_into_shared_memory_come_inside_messages(
    running, monkeypatch
) -> None:
    one = await shared(running)
    await proven(running, one)
    arena = running.manager.subscriptions.named(one.name, "").transport.arena
    arena._regions = type(arena._regions)(4096, 8192)  # one chunk at a time
    await generate(running, "a")
    await generate(running, "b")
    await one.until("end_of_request", 2)
    assert len(refs(one)) == 1
    assert inline(one) > 0
    assert rows_of(read(one)) == expected("a", 0, 1) | expected("b", 0, 1)


async def test_a_full_buffer_has_its_policy_all_the_same(running) -> None:
    request_message = opening(
        EVERY,
        [wanted(0)],
        credit=0,
        shared_memory=True,
        buffer_bytes=3 * ROW,
        overload=capture_pb2.OVERLOAD_DROP_NEWEST,
    )
    one = await shared(running, request_message)
    await proven(running, one)
    await generate(running, "a", tokens=12)
    await settled(running)
    await one.credit(1 << 20)
    await one.until("end_of_request")
    end = ends_of(one.events)["a"]
    assert end.row_count + end.dropped_row_count == 14
    assert end.dropped_row_count > 0
    assert rows_of(read(one)).items() <= expected("a", 0, tokens=12).items()


async def test_the_end_of_a_subscription_removes_its_memory(running) -> None:
    one, other = await shared(running), await shared(running)
    assert path_of(one).exists()
    await one.rest()
    assert not path_of(one).exists()
    running.manager.subscriptions.named(other.name, "").fail(Defect("a test's"))
    assert not path_of(other).exists()


async def test_a_failed_subscription_that_is_remembered_holds_no_memory(running) -> None:
    one = await shared(running)
    await proven(running, one)
    await generate(running, "a")
    await one.until("end_of_request")
    subscription = running.manager.subscriptions.named(one.name, "")
    memory = weakref.ref(subscription.transport.arena)
    subscription.fail(Defect("a test's"))
    assert (await failure(one)).code == Code.INTERNAL
    gc.collect()
    assert memory() is None


async def test_nobody_takes_it_up_and_its_memory_is_removed(starter) -> None:
    running = await starter(resume_window=0.05)
    one = await shared(running)
    one.call.cancel()
    await until(lambda: not len(running.manager.subscriptions))
    assert not path_of(one).exists()


async def test_the_end_of_the_server_removes_all(starter) -> None:
    running = await starter(drain_grace=0.0)
    one = await shared(running)
    left = await shared(running)
    left.call.cancel()
    await until(lambda: running.manager.subscriptions.waiting == 1)
    await running.server.stop(0)
    assert not path_of(one).exists()
    assert not path_of(left).exists()


@pytest.mark.parametrize("field", [{"shared_memory": True}, {"namespace": "x:1"}])
async def test_it_cannot_be_asked_for_when_resuming(running, field) -> None:
    request_message = resuming("any")
    for name, value in field.items():
        setattr(request_message, name, value)
    one = Subscriber(running)
    await one.call.write(Message(open=request_message))
    assert (await failure(one)).brief == (
        Code.INVALID_ARGUMENT,
        "REASON_INVALID_VALUE",
        f"open.{next(iter(field))}",
    )
