"""The core's input thread reads no message while a step is launched, but before the next one."""

import inspect
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from vllm.v1.engine import EngineCoreRequestType, core
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.executor import UniProcExecutor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from rheostat_engine.adapters import input_pauses
from rheostat_engine.adapters.input_pauses import pause_input_in_launches

RELIES = "rheostat_engine.adapters.input_pauses relies on it"
WAIT = 10.0
LATE = 0.2
"""Seconds after which a message that was not read counts as held back."""


class Proc(EngineCoreProc):
    """vLLM's core with its own input thread, and without an engine."""

    def __init__(self, address: str) -> None:
        self.tensor_ipc_receiver = None
        self.input_queue = queue.Queue()
        self.aborts_queue = queue.Queue()
        self.process_input_queue_block = True
        self.work = False
        self.taken: list[Any] = []
        ready = threading.Event()
        threading.Thread(
            target=self.process_input_sockets,
            args=([address], None, b"engine", ready),
            daemon=True,
        ).start()
        assert ready.wait(WAIT)

    def _make_ready_response(self) -> Any:
        return {}

    def _notify_idle_state_callbacks(self) -> None:
        pass

    def has_work(self) -> bool:
        return self.work

    def is_running(self) -> bool:
        return True

    def _handle_client_request(self, request_type: EngineCoreRequestType, request: Any) -> None:
        self.work = True
        self.taken.append(request[0])

    def take(self) -> list[Any]:
        """What the core takes before its next step."""
        self.taken = []
        self._process_input_queue()
        return self.taken


class Worker:
    """A worker in the core's process; `launch` is called for each step, and `sample` after it."""

    def __init__(self) -> None:
        self.launch = self.sample = lambda: None

    def execute_model(self, _: Any) -> None:
        self.launch()

    def sample_tokens(self, _: Any) -> str:
        self.sample()
        return "output"


class Engine:
    """A core, its client, and an executor of a worker."""

    def __init__(self, address: str) -> None:
        self.client = zmq.Context.instance().socket(zmq.ROUTER)
        self.client.bind(address)
        self.proc = Proc(address)
        assert self.client.recv_multipart()[0] == b"engine"
        self.worker = Worker()
        self.executor: UniProcExecutor = object.__new__(UniProcExecutor)
        self.executor.driver_worker = self.worker  # type: ignore[assignment]  # stands for vLLM's
        self.proc.model_executor = self.executor
        self.proc.batch_queue = deque()  # as with async scheduling
        self.proc.work = True  # so that `take` does not wait for a request
        self.proc.take()  # as before each step
        self.proc.work = False

    def send(self, *aborted: str) -> None:
        """Sends messages to abort these requests, the simplest that carry an id."""
        for name in aborted:
            body = msgspec.msgpack.encode([name])
            self.client.send_multipart([b"engine", EngineCoreRequestType.ABORT.value, body])

    def launch(self, tokens: int = 1, *, deferred: bool = False) -> None:
        """The first half of a step, as the core runs it."""
        scheduled: Any = SimpleNamespace(
            total_num_scheduled_tokens=tokens, pending_structured_output_tokens=deferred
        )
        assert isinstance(self.executor.execute_model(scheduled, non_block=True), Future)

    def step(self, tokens: int = 1) -> None:
        """A step as the core runs it."""
        self.launch(tokens)
        if tokens:
            self.executor.sample_tokens(None, non_block=True)

    @property
    def read(self) -> int:
        """Messages that the thread has read and the core has not taken."""
        return self.proc.input_queue.qsize()


@pytest.fixture
def engine(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    for owner, name in (
        (core, "zmq"),
        (EngineCoreProc, "_process_input_queue"),
        (UniProcExecutor, "execute_model"),
        (UniProcExecutor, "sample_tokens"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # as before after the test
    monkeypatch.setattr(input_pauses, "_INPUT_THREAD", input_pauses._InputThread())
    core.zmq = zmq  # type: ignore[attr-defined]  # an imported module, which `monkeypatch` restores
    pause_input_in_launches()
    made = Engine(f"ipc://{tmp_path}/core")
    yield made
    made.client.close(linger=0)


def until(condition: Any, seconds: float = WAIT) -> bool:
    """Whether a condition holds within some seconds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


def test_no_message_is_read_while_a_step_is_launched(engine: Engine) -> None:
    seen: dict[str, bool] = {}

    def launch() -> None:
        engine.send("a", "b")
        seen["launch"] = until(lambda: engine.read, LATE)

    def sample() -> None:
        seen["sample"] = until(lambda: engine.read, LATE)

    engine.worker.launch, engine.worker.sample = launch, sample
    engine.step()
    assert seen == {"launch": False, "sample": False}
    assert engine.proc.take() == ["a", "b"]


def test_messages_are_read_while_the_core_waits_for_a_step(engine: Engine) -> None:
    engine.step()
    engine.send("a")
    assert until(lambda: engine.read)


def test_a_step_without_tokens_does_not_pause_the_thread(engine: Engine) -> None:
    engine.step(tokens=0)  # nothing is sampled after it
    engine.send("a")
    assert until(lambda: engine.read)


def test_the_thread_reads_while_the_core_waits_before_a_deferred_sampling(engine: Engine) -> None:
    engine.launch(deferred=True)
    engine.send("a")
    assert until(lambda: engine.read)


@pytest.mark.parametrize("part", ["launch", "sample"])
def test_the_thread_goes_on_if_a_step_fails(engine: Engine, part: str) -> None:
    def fail() -> None:
        raise RuntimeError("failed")

    def step() -> None:
        engine.launch()
        engine.executor.sample_tokens(None)  # vLLM raises at once if it may block

    setattr(engine.worker, part, fail)
    with pytest.raises(RuntimeError, match="failed"):
        step()
    engine.send("a")
    assert until(lambda: engine.read)


def test_the_core_takes_all_that_came_in_a_launch_in_order(engine: Engine) -> None:
    names = [f"r{number}" for number in range(200)]
    engine.worker.launch = lambda: engine.send(*names)
    engine.proc.work = True
    engine.step()
    taken: list[str] = []
    # zmq hands messages over in groups, and `_LONGEST` may pass on a busy machine.
    while len(taken) < len(names):
        taken += engine.proc.take()
    assert taken == names


def slow(engine: Engine, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Makes the thread need some seconds for each message."""
    monkeypatch.setattr(
        engine.proc.aborts_queue, "put_nowait", lambda _: time.sleep(seconds), raising=True
    )


def test_an_idle_core_takes_what_comes_with_the_first_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_pauses, "_LONGEST", WAIT)
    slow(engine, monkeypatch, 0.05)
    taking = threading.Thread(target=engine.proc.take)
    taking.start()
    engine.send("a", "b", "c")
    taking.join(WAIT)
    assert engine.proc.taken == ["a", "b", "c"]


def test_a_thread_that_is_behind_is_not_paused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow(engine, monkeypatch, 0.02)
    engine.proc.work = True
    names = [f"r{number}" for number in range(20)]
    engine.send(*names)
    taken: list[str] = []
    steps = 0
    engine.worker.launch = lambda: time.sleep(0.1)
    while len(taken) < len(names):
        taken += engine.proc.take()
        engine.step()
        steps += 1
    assert taken == names
    assert steps < len(names) / 2, "the thread read one message in each step"


def block(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Sends a message that the thread reads until the event that is returned is set."""
    blocked, go_on = threading.Event(), threading.Event()

    def put(item: Any) -> None:
        blocked.set()
        go_on.wait(2 * WAIT)

    monkeypatch.setattr(engine.proc.aborts_queue, "put_nowait", put)
    engine.proc.work = True
    engine.send("a")
    assert blocked.wait(WAIT)
    return go_on


def test_the_core_waits_once_for_a_thread_that_does_not_read(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_pauses, "_LONGEST", 0.1)
    go_on = block(engine, monkeypatch)
    began = time.monotonic()
    assert engine.proc.take() == []
    first = time.monotonic()
    assert engine.proc.take() == []
    assert time.monotonic() - first < 0.1 <= first - began
    go_on.set()
    assert until(lambda: engine.proc.take() == ["a"])


def test_the_core_does_not_wait_again_until_the_thread_has_caught_up(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_pauses, "_LONGEST", 0.05)
    slow(engine, monkeypatch, 0.01)
    engine.proc.work = True
    engine.send(*(f"r{number}" for number in range(30)))
    has_read_all = input_pauses._INPUT_THREAD._has_read_all
    wait, late = has_read_all.wait, []

    def waited(longest: float) -> bool:
        found = wait(longest)
        if not found:
            late.append(longest)
        return found

    monkeypatch.setattr(has_read_all, "wait", waited)
    taken: list[str] = []
    while len(taken) < 30:
        taken += engine.proc.take()
        time.sleep(0.002)
    assert late[0] == 0.05
    assert len(late) > 5, "the thread needed 300 ms"
    assert sum(longest > 0 for longest in late) <= 2, "zmq hands messages over in groups"
    assert until(lambda: not (engine.proc.take() or input_pauses._INPUT_THREAD._is_behind))
    seen: list[bool] = []
    engine.worker.launch = lambda: (engine.send("a"), seen.append(until(lambda: engine.read, LATE)))
    engine.step()
    assert seen == [False], "a thread that has caught up is paused again"


@pytest.mark.parametrize("without", ["worker in the core", "async scheduling"])
def test_a_core_that_launches_nothing_beside_the_device_does_not_wait(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    monkeypatch.setattr(input_pauses, "_LONGEST", WAIT)
    if without == "async scheduling":
        engine.proc.batch_queue = None
    else:
        engine.proc.model_executor = object.__new__(MultiprocExecutor)
    go_on = block(engine, monkeypatch)
    began = time.monotonic()
    assert engine.proc.take() == []
    assert time.monotonic() - began < WAIT
    go_on.set()
    assert until(lambda: engine.proc.take() == ["a"])


def test_without_async_scheduling_nothing_is_paused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_pauses._INPUT_THREAD, "_is_paused_in_launches", False)  # as at first
    engine.proc.batch_queue = None
    engine.proc.work = True
    engine.proc.take()
    seen: list[bool] = []
    engine.worker.launch = lambda: (engine.send("a"), seen.append(until(lambda: engine.read)))
    engine.step()
    assert seen == [True]


def test_it_is_installed_once(engine: Engine) -> None:
    before = UniProcExecutor.execute_model
    pause_input_in_launches()
    assert UniProcExecutor.execute_model is before


def test_vllm_takes_messages_before_each_step_and_samples_after_each_launch() -> None:
    source = inspect.getsource(EngineCoreProc)
    loop = source[source.index("def run_busy_loop") :]
    taking, step = "self._process_input_queue()", "self._process_engine_step()"
    assert loop.index(taking) < loop.index(step), RELIES
    for step in (EngineCore.step, EngineCore.step_with_batch_queue):
        source = inspect.getsource(step)
        launch = source.index("self.model_executor.execute_model(")
        assert launch < source.index("self.model_executor.sample_tokens("), RELIES
    thread = inspect.getsource(EngineCoreProc.process_input_sockets)
    assert "poller = zmq.Poller()" in thread, RELIES
    assert "pending_structured_output_tokens" in inspect.getsource(
        EngineCore.step_with_batch_queue
    ), RELIES
    # With worker processes, the core's process launches nothing, so its thread is never paused.
    assert not issubclass(MultiprocExecutor, UniProcExecutor)
