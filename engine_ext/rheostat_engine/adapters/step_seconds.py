"""Limits the tokens of a step to what the device computes in about `_SECONDS`.

Why
    A step with 8,192 tokens of prompts takes an 8B model on an H200 about 180 ms. All streams wait
    for it: those that run wait for their next token, and those whose prompts are in it for their
    first. When 256 streams began together there, steered at one layer, half of them had their first
    token after 264 ms. With a limit of 60 ms it was 230 ms, and the last token came as late as
    before.
How
    The scheduler's `max_num_scheduled_tokens` is set before each step. It is the tokens that the
    device would compute in `_SECONDS` at the speed of the last `_REMEMBERED` steps of prompts.
    The core waits for the output of such a step unless the host is slower than the device. So only
    steps with a wait count. The time of a step ends with its output. It begins with the output
    before, if the core waited for that, but not before the step was scheduled. Until a step was
    measured, vLLM's limit holds.
Why not less
    While the device computes a step, the host schedules and launches the next one. If a step took
    less, the device would wait for the host. So the device gets at least `_HOST` times the CPU time
    that the host took for each of the last steps of prompts. With a small model or many short
    prompts the host is slower, and vLLM's limit holds.

Invariants: the limit is at most vLLM's own, and at least `_LEAST`. It is also at least the number
of samples that may run, so that each of them generates a token in every step.
"""

import time
from collections import deque
from collections.abc import Callable
from statistics import mean
from typing import NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput

_SECONDS = 0.06

_HOST = 1.25

_LEAST = 2048
"""The lowest limit, in tokens. It is the limit of vLLM's engines on smaller devices."""

_MEASURED = 1024
"""Tokens of a step from which it is measured. Smaller steps take as long as the host needs."""

_WAIT = 0.005
"""Seconds from which the core has waited for an output. It also waits for other threads a little,
which hold the GIL."""

_REMEMBERED = 8
"""Steps."""


class _Step(NamedTuple):
    """A step of prompts."""

    output: SchedulerOutput
    began: float
    """When it was scheduled."""


class _Moment(NamedTuple):
    """Seconds of the clock, and of this thread's CPU time."""

    clock: float
    cpu: float


class StepSeconds:
    """Sets the scheduler's limit on the tokens of a step."""

    def __init__(
        self,
        scheduler: Scheduler,
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        """Replaces methods of a scheduler.

        Args:
            scheduler: the scheduler.
            clock: the time in seconds.
            cpu: the CPU time of the thread that schedules and launches steps.
        """
        self._scheduler = scheduler
        self._clock, self._cpu = clock, cpu
        self._most = scheduler.max_num_scheduled_tokens
        self._least = max(_LEAST, scheduler.max_num_running_reqs)
        self._schedule = scheduler.schedule
        self._update = scheduler.update_from_output
        self._begun: float | None = None
        """The CPU time when the last step was scheduled, if it was one of prompts."""
        self._steps: deque[_Step] = deque(maxlen=_REMEMBERED)
        """The last steps of prompts. The outputs of some have not come yet."""
        self._last = _Moment(0.0, 0.0)
        """When a step was last scheduled, or an output processed."""
        self._awaited = 0.0
        """When the last output came for which the core has waited; 0 if it did not wait."""
        self._measured: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)
        """Tokens of the last steps of prompts, and the device's seconds."""
        self._host: deque[float] = deque(maxlen=_REMEMBERED)
        """The host's CPU seconds of the last steps of prompts."""
        if self._most > self._least:
            for name in ("schedule", "update_from_output"):
                setattr(scheduler, name, getattr(self, name))

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """As `Scheduler.schedule`."""
        cpu = self._cpu()
        if self._begun is not None:
            self._host.append(cpu - self._begun)
        self._scheduler.max_num_scheduled_tokens = self._limit()
        output = self._schedule(throttle_prefills)
        is_measured = _is_measured(output)
        self._begun = cpu if is_measured else None
        self._last = _Moment(self._clock(), self._cpu())
        if is_measured:
            self._steps.append(_Step(output, self._last.clock))
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """As `Scheduler.update_from_output`."""
        now = _Moment(self._clock(), self._cpu())
        waited = (now.clock - self._last.clock) - (now.cpu - self._last.cpu) >= _WAIT
        for step in self._steps:
            if waited and step.output is scheduler_output:
                seconds = now.clock - max(step.began, self._awaited)
                self._measured.append((scheduler_output.total_num_scheduled_tokens, seconds))
        self._awaited = now.clock if waited else 0.0
        outputs = self._update(scheduler_output, model_runner_output)
        self._last = _Moment(self._clock(), self._cpu())
        return outputs

    def _limit(self) -> int:
        """The most tokens of the next step."""
        if not self._measured:
            return self._most
        tokens = sum(tokens for tokens, _ in self._measured)
        speed = tokens / sum(seconds for _, seconds in self._measured)
        seconds = max(_SECONDS, _HOST * mean(self._host or [0.0]))
        return max(self._least, min(self._most, int(speed * seconds)))


def _is_measured(output: SchedulerOutput) -> bool:
    """Whether a step is measured: at least three quarters of its tokens are of prompts."""
    tokens, requests = output.total_num_scheduled_tokens, len(output.num_scheduled_tokens)
    return tokens >= _MEASURED and tokens > 4 * requests
