"""Limits the tokens of a step to what the engine computes in about `_SECONDS`.

Why
    A step with 8,192 tokens of prompts takes an 8B model on an H200 about 180 ms. All streams wait
    for it: those that run wait for their next token, and those whose prompts are in it for their
    first. When 256 streams began together, half of them had their first token after 250 to 257 ms.
    With at most 4,096 tokens in a step it was 208 to 219 ms, and the last first token came as late
    as before.
How
    The scheduler's `max_num_scheduled_tokens` is set before each step: the tokens that the last
    `_REMEMBERED` steps of prompts would have computed in `_SECONDS`. The time of a step ends with
    its output, and begins when it was scheduled or with the output before, whichever was later.
    Until such a step was measured, vLLM's limit holds.
Why not less
    While the engine computes a step, the host launches the next one, which takes 30 to 50 ms. If a
    step took less, the device would wait for the host.

Invariants: the limit is at most vLLM's own, and at least `_LEAST`. It is also at least the number
of samples that may run, so that each of them generates a token in every step.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput

_SECONDS = 0.09

_LEAST = 2048
"""The lowest limit, in tokens. It is the limit of vLLM's engines on smaller devices."""

_MEASURED = 1024
"""Tokens of a step from which its time counts. Smaller steps take as long as the host needs."""

_REMEMBERED = 8
"""Steps. A single one may be measured too short, if its device time began in the one before."""


class _Step(NamedTuple):
    """A step of prompts."""

    output: SchedulerOutput
    began: float


class StepSeconds:
    """Sets the scheduler's limit on the tokens of a step."""

    def __init__(self, scheduler: Scheduler, now: Callable[[], float] = time.monotonic) -> None:
        """Replaces methods of a scheduler. `now` is the clock, in seconds."""
        self._scheduler = scheduler
        self._now = now
        self._most = scheduler.max_num_scheduled_tokens
        self._least = max(_LEAST, scheduler.max_num_running_reqs)
        self._schedule = scheduler.schedule
        self._update = scheduler.update_from_output
        self._steps: deque[_Step] = deque(maxlen=_REMEMBERED)
        """The last steps of prompts. The outputs of some have not come yet."""
        self._last_output = 0.0
        """When the output of the last step came."""
        self._measured: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)
        """Tokens and seconds of the last steps of prompts."""
        if self._most > self._least:
            for name in ("schedule", "update_from_output"):
                setattr(scheduler, name, getattr(self, name))

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """As `Scheduler.schedule`."""
        self._scheduler.max_num_scheduled_tokens = self._limit()
        began = self._now()
        output = self._schedule(throttle_prefills)
        if _is_measured(output):
            self._steps.append(_Step(output, began))
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """As `Scheduler.update_from_output`."""
        now = self._now()
        for step in self._steps:
            if step.output is scheduler_output:
                seconds = now - max(step.began, self._last_output)
                self._measured.append((scheduler_output.total_num_scheduled_tokens, seconds))
        self._last_output = now
        return self._update(scheduler_output, model_runner_output)

    def _limit(self) -> int:
        """The most tokens of the next step."""
        seconds = sum(seconds for _, seconds in self._measured)
        if not seconds:
            return self._most
        tokens = sum(tokens for tokens, _ in self._measured)
        return max(self._least, min(self._most, int(tokens * _SECONDS / seconds)))


def _is_measured(output: SchedulerOutput) -> bool:
    """Whether the time of a step counts: at least three quarters of its tokens are of prompts."""
    tokens, requests = output.total_num_scheduled_tokens, len(output.num_scheduled_tokens)
    return tokens >= _MEASURED and tokens > 4 * requests
