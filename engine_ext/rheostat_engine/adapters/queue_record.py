"""A scheduler that records how long requests wait for the prompts of earlier ones, for benchmarks.

Why
    vLLM computes prompts in order of arrival, a limited number of tokens in each step. A first
    token waits for the prompts that came before, and no server could deliver it earlier. The rest
    of its wait is the server's.
What counts
    A step is full of earlier prompts if it computes as many tokens as a step may, and all of them
    belong to requests that came before. Background requests do not count as earlier, because
    others need not wait for them. The step in progress when a request comes does not count either.
    A step lasts until the next one begins, but at most `_LONGEST_STEP` of it counts, so that an
    engine that stalls does not hide a late token. A request is earlier if it was added to the
    scheduler before.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

_LONGEST_STEP = 0.25
"""Seconds, as long as a client may wait between two tokens."""
RECORDED = "recorded-"
"""What the ids of recorded requests begin with."""
FILE = "RHEOSTAT_QUEUE_RECORD"
"""The environment variable that names the file. Each line is JSON: `request`, an id, and `behind`,
the seconds of full steps from the request's arrival until it is first computed."""


@dataclass
class _Waiting:
    """A recorded request that is not computed yet."""

    earlier: frozenset[str]
    """The requests that came before it."""
    behind: float = 0.0
    """Seconds of steps that were full of earlier prompts."""


class QueueRecord:
    """Watches the queue of a scheduler."""

    def __init__(self, scheduler: Scheduler, file: Path) -> None:
        """Watches `scheduler` from now on, and appends to `file`."""
        self._scheduler = scheduler
        self._file = file
        self._add, self._schedule = scheduler.add_request, scheduler.schedule
        self._waiting: dict[str, _Waiting] = {}
        self._in_step: list[_Waiting] = []
        """The waiting requests whose earlier prompts fill the last step."""
        self._began = 0.0
        """When the last step began."""
        scheduler.add_request, scheduler.schedule = self.add_request, self.schedule

    def add_request(self, request: Request) -> None:
        """Adds a request to the scheduler's queue."""
        if request.request_id.startswith(RECORDED):
            others = self._scheduler.requests.values()
            earlier = frozenset(other.request_id for other in others if other.priority <= 0)
            self._waiting[request.request_id] = _Waiting(earlier)
        self._add(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedules a step."""
        now = time.monotonic()
        for one in self._in_step:
            one.behind += min(now - self._began, _LONGEST_STEP)
        output = self._schedule(throttle_prefills)
        self._began, self._in_step = now, []
        if self._waiting and output.total_num_scheduled_tokens:
            self._note_step(output)
        return output

    def _note_step(self, output: SchedulerOutput) -> None:
        computed = output.num_scheduled_tokens.keys()
        for request_id in self._waiting.keys() & computed:
            self._write(request_id, self._waiting.pop(request_id).behind)
        if output.total_num_scheduled_tokens >= self._scheduler.max_num_scheduled_tokens:
            self._in_step = [one for one in self._waiting.values() if computed <= one.earlier]

    def _write(self, request_id: str, behind: float) -> None:
        own_id = request_id.partition("#")[0]  # the server numbers samples
        with self._file.open("a") as file:
            file.write(json.dumps({"request": own_id, "behind": behind}) + "\n")


def recorded_scheduler(vllm_config: VllmConfig, **arguments: Any) -> Scheduler:
    """The scheduler of `site_scheduler`, whose queue is recorded."""
    from rheostat_engine.adapters.scheduler import site_scheduler  # imports vLLM

    scheduler = site_scheduler(vllm_config, **arguments)
    QueueRecord(scheduler, Path(os.environ[FILE]))
    return scheduler


def read(file: Path) -> dict[str, float]:
    """The seconds for which requests waited for earlier prompts, by request id."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {found["request"]: found["behind"] for found in map(json.loads, lines)}
