"""Readers of messages sleep where cores are few, and lose no message."""

import inspect
import os
import threading
from collections.abc import Iterator

import pytest
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, SpinCondition

from rheostat_engine.adapters import message_queues
from rheostat_engine.adapters.message_queues import sleep_between_messages


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    stock = SpinCondition.wait
    yield
    SpinCondition.wait = stock  # type: ignore[method-assign]  # as it was


@pytest.fixture
def few_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})


def test_vllm_spins_for_as_long_as_a_reader_says() -> None:
    source = inspect.getsource(SpinCondition.wait)
    assert "self.last_read + self.busy_loop_s" in source
    assert "self.poller.poll(timeout=timeout_ms)" in source
    assert "self._spin_condition.wait(" in inspect.getsource(MessageQueue.acquire_read)
    assert "self._spin_condition.notify()" in inspect.getsource(MessageQueue.enqueue)


@pytest.mark.usefixtures("few_cores")
def test_a_reader_of_frequent_messages_sleeps_and_gets_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(message_queues, "_SPINS", 0.0)
    sleep_between_messages("cpu")
    yields: list[int] = []
    monkeypatch.setattr(shm_broadcast, "sched_yield", lambda: yields.append(1))
    writer = MessageQueue(1, 1)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    ready = threading.Thread(target=writer.wait_until_ready)
    ready.start()
    reader.wait_until_ready()
    ready.join()
    answers: list[int] = []
    read = threading.Event()

    def write() -> None:
        for number in range(200):
            writer.enqueue(number)
            if number % 3 == 0:  # the reader waits for the next one
                assert read.wait(10)
                read.clear()

    writing = threading.Thread(target=write)
    writing.start()
    for number in range(200):
        answers.append(reader.dequeue(timeout=10))
        if number % 3 == 0:
            read.set()
    writing.join()
    assert answers == list(range(200))
    assert not yields


@pytest.mark.parametrize(("device", "cores"), [("cuda", 2), ("cpu", 16)])
def test_readers_on_other_machines_wait_as_vllm_does(
    monkeypatch: pytest.MonkeyPatch, device: str, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    stock = SpinCondition.wait
    sleep_between_messages(device)
    assert SpinCondition.wait is stock
