"""Pauses the core's input thread while a step is launched.

Why
    The engine's core receives messages in a thread. A worker in the same process launches steps in
    the main thread, and torch releases the GIL in each operator. The input thread takes the GIL
    there, several times for each message, and the launch waits for it. On an H200 with an 8B model
    the launch of a prefill took about 30 ms, and 35 to 46 ms while requests came.
How
    The thread does not read during a launch, which is the time from `execute_model` to the end of
    `sample_tokens`. Messages wait in the socket. Before the core takes the messages that the thread
    has read, it waits until the thread finds no more. So the next step mostly also computes the
    requests that came during a launch. A message may miss it if the thread does not run at once.
Why requests are not late
    The core handles messages only between two steps. It also looks for aborts when a step's output
    has come. An abort that comes during a launch may miss that look. Then it is handled before the
    next step is scheduled.
When the thread is not paused
    If the thread still reads after `_LONGEST`, it is behind. Then the core neither pauses it nor
    waits for it, until the thread has found no message. Otherwise the thread could read one message
    in each step while more arrive. With worker processes nothing is launched in the core's process,
    and without async scheduling a launch includes the computation. There the core does neither.

Invariants: messages keep their order. The core waits at most `_LONGEST` before a step, or twice
that if it was idle.
"""

import threading
from collections.abc import Callable
from typing import Any

import zmq
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import core
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.executor import UniProcExecutor

_LONGEST = 0.012
"""The longest time in seconds that the core waits for the thread. Reading 64 requests takes 1.3 ms
of CPU time if prompts have 32 tokens, and 15 ms if they have 1,000 (without plans). With 5 ms, when
256 steered requests began together on an H200, a launch waited 7 to 17 ms for the GIL in five of
eight bursts."""

_ZMQ = "zmq"


class _InputThread:
    """What the main thread and the input thread tell each other."""

    def __init__(self) -> None:
        self._may_read = threading.Event()
        self._has_read_all = threading.Event()
        self._may_read.set()
        self._has_read_all.set()
        self._is_paused_in_launches = False
        """Whether the core calls `wait` before each step, without which nothing ends a pause."""
        self._is_behind = False
        """Whether the thread still read when the last `wait` returned."""

    def pause(self) -> None:
        """Lets the thread read no further message until `resume`, unless it is behind."""
        if self._is_paused_in_launches and not self._is_behind:
            self._may_read.clear()

    def resume(self) -> None:
        """Lets the thread read."""
        self._may_read.set()

    def wait(self) -> None:
        """Returns once the thread has found no further message, at the latest after `_LONGEST`."""
        self._is_paused_in_launches = True
        self.resume()
        longest = 0.0 if self._is_behind else _LONGEST
        self._is_behind = not self._has_read_all.wait(longest)

    def poll(self, poll: Callable[[int | None], Any], timeout: int | None) -> Any:
        """Waits for messages with a poller's `poll`, and then until the thread may read."""
        ready = poll(0)
        if not ready:
            self._has_read_all.set()
            ready = poll(timeout)
        self._has_read_all.clear()
        self._may_read.wait()
        return ready


_INPUT_THREAD = _InputThread()


class _Poller(zmq.Poller):
    """A poller that returns only while the input thread may read."""

    def poll(self, timeout: int | None = None) -> Any:  # as zmq's
        """As zmq's."""
        return _INPUT_THREAD.poll(super().poll, timeout)


class _Zmq:
    """The module `zmq` with `_Poller` as its `Poller`, for vLLM's core."""

    Poller = _Poller

    def __getattr__(self, name: str) -> Any:  # anything of the module
        return getattr(zmq, name)


def pause_input_in_launches() -> None:
    """Makes the engine's core in this process pause its input thread.

    To be called before the core starts the thread.
    """
    if isinstance(getattr(core, _ZMQ), _Zmq):
        return
    setattr(core, _ZMQ, _Zmq())
    take, execute, sample = (
        EngineCoreProc._process_input_queue,
        UniProcExecutor.execute_model,
        UniProcExecutor.sample_tokens,
    )

    def take_all(proc: EngineCoreProc) -> None:
        if not isinstance(proc.model_executor, UniProcExecutor) or proc.batch_queue is None:
            take(proc)
            return
        idle = not proc.has_work()
        _INPUT_THREAD.wait()
        take(proc)  # if the core is idle, this returns with the first request
        if idle and proc.has_work():
            _INPUT_THREAD.wait()
            take(proc)

    def execute_model(
        executor: UniProcExecutor, scheduled: SchedulerOutput, non_block: bool = False
    ) -> Any:  # as vLLM's
        if scheduled.total_num_scheduled_tokens:  # otherwise nothing is sampled
            _INPUT_THREAD.pause()
        try:
            output = execute(executor, scheduled, non_block)
        except BaseException:
            _INPUT_THREAD.resume()
            raise
        if scheduled.pending_structured_output_tokens:
            _INPUT_THREAD.resume()  # before it samples, the core waits for the step before
        return output

    def sample_tokens(
        executor: UniProcExecutor, grammar: Any, non_block: bool = False
    ) -> Any:  # as vLLM's
        try:
            return sample(executor, grammar, non_block)
        finally:
            _INPUT_THREAD.resume()

    EngineCoreProc._process_input_queue = take_all
    UniProcExecutor.execute_model = execute_model
    UniProcExecutor.sample_tokens = sample_tokens
