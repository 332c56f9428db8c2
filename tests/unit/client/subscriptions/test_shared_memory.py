"""Subscriptions of both clients through shared memory: the same rows, whoever ends in between."""

import copy
import mmap
import pickle
import secrets
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

import rheostat
from rheostat import Capture, CapturedRows, Cursor
from rheostat._subscriptions import requests, shared_memory
from rheostat._subscriptions.payloads import Payloads, View
from rheostat_server.subscriptions import shared_payloads
from rheostat_server.subscriptions.shared_memory import namespace
from rheostat_wire.v1 import capture_service_pb2, tensor_pb2

from ..rows_server import ends_of, expected, rows_of, until, until_ends

POST = Capture("resid_post", [0, 1])
ONE = Capture("resid_post", 0)


@pytest.fixture(autouse=True)
def everything_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_payloads, "SHARED_BYTES", 1)


def ready(running, subscription) -> None:
    """Waits until the server knows that the subscription reads its memory."""
    until(lambda: running.ask(lambda them: them.named(subscription.id, "").transport._proven))


def arena_of(running, subscription):
    return running.ask(lambda them: them.named(subscription.id, "").transport.arena)


def placed(running, subscription) -> bool:
    """Whether something lies in a subscription's memory."""
    return not arena_of(running, subscription)._regions.idle


def test_rows_come_through_shared_memory_without_being_asked_for(running, subscriber):
    with subscriber.subscribe(capture=POST, every=True, ack="manual") as subscription:
        assert subscription.inline_reason is None
        ready(running, subscription)
        running.generate("a")
        events = until_ends(subscription)
        assert placed(running, subscription)
        running.generate("b", tokens=5)
        events += until_ends(subscription)
        subscription.ack()
        until(lambda: not placed(running, subscription))
    assert rows_of(events) == expected("a", 0, 1) | expected("b", 0, 1, tokens=5)
    assert ends_of(events)["b"].row_count == 14


def test_what_a_reader_has_got_is_its_own(running, subscriber):
    with subscriber.subscribe(capture=ONE, every=True, shared_memory=True) as subscription:
        ready(running, subscription)
        events = []
        for name in "abcdef":  # each in the memory of the one before
            running.generate(name)
            events += until_ends(subscription)
    wanted: dict = {}
    for name in "abcdef":
        wanted |= expected(name, 0)
    assert rows_of(events) == wanted
    captured = [event for event in events if isinstance(event, CapturedRows)]
    assert all(event.elements is None for event in captured)
    captured[0].values[...] = 0  # may be written to


def test_views_are_read_where_they_lie_until_they_are_acknowledged(running, subscriber):
    options = {"shared_memory": True, "views": True, "ack": "manual"}
    with subscriber.subscribe(capture=ONE, every=True, **options) as subscription:
        ready(running, subscription)
        running.generate("a", tokens=1)
        running.generate("b", tokens=1)
        first, *_, last = [e for e in until_ends(subscription, 2) if isinstance(e, CapturedRows)]
        assert first.shape == (1, 3, 4)
        assert first.elements.dtype == np.float32
        assert not first.elements.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            first.elements.flags.writeable = True
        assert np.array_equal(first.elements, first.values)
        assert not np.shares_memory(first.elements, first.values)
        subscription.ack()
        assert first.values.shape == (1, 3, 4)  # made before
        with pytest.raises(rheostat.Refused, match="acknowledged"):
            _ = first.elements
        with pytest.raises(rheostat.Refused, match="acknowledged"):
            _ = last.values
        assert repr(last).endswith("shape=[1, 3, 4])")


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_a_view_has_memory_of_its_own(running, subscriber, copied, shared_memory):
    options = {"shared_memory": shared_memory, "views": True, "ack": "manual"}
    with subscriber.subscribe(capture=ONE, every=True, **options) as subscription:
        if shared_memory:
            ready(running, subscription)
        running.generate("a", tokens=1)
        kept = copied(next(subscription))
        subscription.ack()
        assert rows_of([kept]) == expected("a", 0, tokens=1)
        assert np.array_equal(kept.elements, kept.values)
        assert kept.encoding.name == "raw"
        assert not kept.elements.flags.writeable


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_view_that_was_acknowledged_refuses_to_be_copied(running, subscriber, copied):
    options = {"shared_memory": True, "views": True, "ack": "manual"}
    with subscriber.subscribe(capture=ONE, every=True, **options) as subscription:
        ready(running, subscription)
        running.generate("a", tokens=1)
        first = next(subscription)
        subscription.ack()
        with pytest.raises(rheostat.Refused, match="were acknowledged"):
            copied(first)


def test_views_of_rows_inside_messages_stay(running, subscriber):
    options = {"shared_memory": False, "views": True}
    with subscriber.subscribe(capture=POST, every=True, **options) as subscription:
        assert subscription.inline_reason == "shared_memory=False"
        running.generate("a")
        events = until_ends(subscription)
        running.generate("b")
        until_ends(subscription)
    assert rows_of(events) == expected("a", 0, 1)
    assert events[0].elements is not None


@pytest.mark.parametrize(
    ("dtype", "storage"),
    [
        (tensor_pb2.DTYPE_FLOAT32, np.float32),
        (tensor_pb2.DTYPE_FLOAT16, np.float16),
        (tensor_pb2.DTYPE_BFLOAT16, np.uint16),
    ],
)
def test_views_hold_the_elements_that_travelled(dtype, storage):
    stored = np.arange(24).reshape(2, 3, 4).astype(storage)
    payload = np.frombuffer(stored.tobytes(), np.uint8)
    tensor = tensor_pb2.Tensor(
        dtype=dtype,
        shape=stored.shape,
        encoding=tensor_pb2.ENCODING_RAW,
        crc32c=google_crc32c.value(payload),
    )
    view = View(tensor, payload, lambda: True)
    assert view.elements.dtype == storage
    assert np.array_equal(view.elements, stored)
    assert np.shares_memory(view.elements, payload)
    wide = stored.astype(np.uint32) << 16 if storage is np.uint16 else None
    assert np.array_equal(view.decoded.values, stored if wide is None else wide.view(np.float32))
    tensor.shape[2] = 5
    with pytest.raises(rheostat.ServerError, match=r"not (60|120)"):
        View(tensor, payload, lambda: True)


def test_views_of_lossy_rows_are_decoded_when_asked_for(running, subscriber):
    capture = Capture("resid_post", 0, encoding="full8")
    with subscriber.subscribe(capture=capture, every=True, views=True) as subscription:
        ready(running, subscription)
        running.generate("a", tokens=1)
        (one,) = [next(subscription)]
        assert one.elements is None
        assert one.encoding.name == "full8"
        exact = expected("a", 0, tokens=1)["a", 0, 1, 11]
        assert np.all(np.abs(one.values[0, 1] - exact) <= one.max_error[0, 1])


def test_a_break_loses_and_repeats_nothing(running, subscriber):
    with subscriber.subscribe(capture=POST, every=True) as subscription:
        ready(running, subscription)
        events = []
        for name in "abcd":
            running.generate(name)
            subscriber.cut(subscription)
            events += until_ends(subscription)
    wanted: dict = {}
    for name in "abcd":
        wanted |= expected(name, 0, 1)
    assert rows_of(events) == wanted
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))


def test_another_reader_takes_up_what_was_left(running, kind):
    first = kind(running.target)
    with first.subscribe(capture=POST, every=True, ack="manual") as subscription:
        ready(running, subscription)
        running.generate("a")
        cursor = Cursor(subscription.id, next(subscription).sequence)
        subscription.leave()
    with kind(running.target).resume(cursor, shared_memory=True) as again:
        assert again.inline_reason is None
        rest = until_ends(again)
    assert rest[0].sequence == 2


def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """This client has another mount, as in another container."""
    monkeypatch.setattr(shared_memory, "namespace", lambda: "boot:77")


def test_a_client_that_cannot_read_it_gets_every_row_inside_messages(
    running, subscriber, monkeypatch
):
    elsewhere(monkeypatch)
    with subscriber.subscribe(capture=POST, every=True) as subscription:
        assert "another host" in subscription.inline_reason
        running.generate("a")
        assert rows_of(until_ends(subscription)) == expected("a", 0, 1)


def test_memory_that_looks_alike_but_is_not_there_is_not_used(
    running, subscriber, monkeypatch, tmp_path
):
    """Two containers, whose mounts have the same name in one kernel or not."""
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    for module in (shared_memory, requests):
        monkeypatch.setattr(module, "namespace", namespace)
    with subscriber.subscribe(capture=POST, every=True) as subscription:
        assert "No such file" in subscription.inline_reason
        running.generate("a")
        assert rows_of(until_ends(subscription)) == expected("a", 0, 1)


def test_shared_memory_or_nothing(running, subscriber, monkeypatch):
    elsewhere(monkeypatch)
    with pytest.raises(rheostat.Refused, match="through shared memory: the server is on"):
        subscriber.subscribe(capture=POST, every=True, shared_memory=True)
    until(lambda: running.ask(len) == 0)  # it is ended, and waits for nobody


def test_a_subscription_that_began_without_it_has_none(running, kind):
    with kind(running.target).subscribe(shared_memory=False) as subscription:
        cursor = subscription.cursor
        subscription.leave()
    with pytest.raises(rheostat.Refused, match="the subscription was opened without it"):
        kind(running.target).resume(cursor, shared_memory=True)


def test_a_system_without_shared_memory_asks_for_none(running, subscriber, monkeypatch):
    monkeypatch.setattr(requests, "namespace", lambda: "")
    with subscriber.subscribe(capture=POST, every=True) as subscription:
        assert subscription.inline_reason == "the subscription was opened without it"
    with pytest.raises(rheostat.Refused, match="no /dev/shm"):
        subscriber.subscribe(shared_memory=True)


@pytest.mark.parametrize("options", [{"shared_memory": "yes"}, {"views": 1}])
def test_other_options_are_refused(subscriber, options):
    with pytest.raises(rheostat.InvalidRequest, match=next(iter(options))):
        subscriber.subscribe(**options)


def test_memory_that_changed_under_a_reader_is_damage(running, subscriber):
    """As where a reader that hung lives on after another has taken its subscription up."""
    with subscriber.subscribe(capture=ONE, every=True, shared_memory=True) as subscription:
        ready(running, subscription)
        running.generate("a")
        until(lambda: placed(running, subscription))
        until(lambda: subscription._state._queued_bytes)
        arena = arena_of(running, subscription)
        arena.view(mmap.PAGESIZE, 64)[:] ^= 255
        with pytest.raises(rheostat.DataLoss, match="CRC-32C differs"):
            until_ends(subscription)
    assert running.ask(len) == 0


def named(path: Path, size: int | None = None) -> capture_service_pb2.SharedMemory:
    return capture_service_pb2.SharedMemory(
        namespace=shared_memory.namespace(),
        name=path.name,
        size_bytes=path.stat().st_size if size is None else size,
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    return tmp_path


def an_object(folder: Path, begin: bytes = b"RHEOSHM1" + bytes(range(32))) -> Path:
    path = folder / f"rheostat-{secrets.token_hex(16)}"
    path.write_bytes(begin.ljust(8192, b"\1"))
    return path


def test_an_object_is_mapped_for_reading(folder):
    mapping = shared_memory.Mapping(named(an_object(folder)))
    assert mapping.nonce == bytes(range(32))
    ref = tensor_pb2.ShmRef(name=mapping.name, offset=4096, length=4096)
    assert mapping.payload(ref).tolist() == [1] * 4096
    assert not mapping.payload(ref).flags.writeable


@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, 8), (39, 1), (4096, 4097), (8193, 0), (2**63, 2**63), (40, 2**64 - 1)],
)
def test_rows_outside_of_it_are_refused(folder, offset, length):
    mapping = shared_memory.Mapping(named(an_object(folder)))
    with pytest.raises(rheostat.ServerError, match="not in its shared memory"):
        mapping.payload(tensor_pb2.ShmRef(name=mapping.name, offset=offset, length=length))
    with pytest.raises(rheostat.ServerError, match="not in its shared memory"):
        mapping.payload(tensor_pb2.ShmRef(name="rheostat-b", offset=4096, length=1))


def test_what_is_no_object_of_a_server_is_not_mapped(folder):
    path = an_object(folder)
    link = folder / "rheostat-link"
    link.symlink_to(path)
    outside = folder / "secret"
    outside.write_bytes(path.read_bytes())
    (folder / "rheostat-folder").mkdir()
    wrong = [
        named(path, 100_000),
        named(path, 39),
        named(path, 0),
        named(path, 2**64 - 1),
        named(link),
        named(outside),
        named(an_object(folder, b"RHEOSHM2")),
        named(folder / "rheostat-folder"),
        capture_service_pb2.SharedMemory(
            namespace=shared_memory.namespace(),
            name=f"../{folder.name}/{path.name}",
            size_bytes=8192,
        ),
        capture_service_pb2.SharedMemory(
            namespace=shared_memory.namespace(), name="rheostat-x/../secret", size_bytes=8192
        ),
        capture_service_pb2.SharedMemory(namespace="a:1", name=path.name, size_bytes=8192),
    ]
    for one in wrong:
        with pytest.raises(rheostat.Refused):
            shared_memory.Mapping(one)
    shared_memory.Mapping(named(path))


def test_rows_in_memory_that_was_never_named_are_an_error_of_the_server():
    payloads = Payloads(None, False)
    tensor = tensor_pb2.Tensor(shm=tensor_pb2.ShmRef(name="rheostat-a", offset=64, length=8))
    with pytest.raises(rheostat.ServerError, match="cannot be read here"):
        payloads.read(tensor, lambda: True)
