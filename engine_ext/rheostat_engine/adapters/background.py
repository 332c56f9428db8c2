"""Holds background requests in the scheduler, so that few steps of others are longer.

Why
    A step that computes a prompt takes longer than a step that only decodes, and all streams wait
    for it. The requests of the step are prepared in it, and vLLM's full CUDA graphs hold decodes
    alone. With 32 streams of an 8B model on an H200, a step took 5.5 ms, and 17 ms with a prompt of
    40 tokens.
How
    Background requests arrive with a priority above 0. While the engine runs other requests, they
    are held. Once enough steps have passed, all held requests begin in one step (a burst). After a
    burst, the pace counts the steps that took longer than usual. The next burst waits `_STEPS`
    steps for each of them, and `_REST` times as long as the longest of them. If no other request
    runs, background requests begin at once.
The bound
    A burst is overdue once its requests were held for `_LONGEST_WAIT`, or for `_REST` times that
    longest step if this is more. It then begins, however few steps have passed, and before the
    other requests that wait. If none of its requests can begin because `max_num_running_reqs`
    requests run already, the next step tries again.
Long prompts
    A background prompt that does not fit into one step is continued in the next steps. It gets the
    tokens of a step that the other running requests do not use. While other requests wait to
    begin, it pauses, so that they do not wait for the whole prompt. It continues after a step that
    the others did not fill, and always once `_LONGEST_WAIT` has passed since it first began.
Preemption
    If KV memory is short, vLLM preempts the last running request, and puts it in front of all
    waiting requests. Background requests run behind the others, so they are preempted first, and
    never take the memory of others. A preempted one must compute its prompt and its generated
    tokens again. So it is held again, in front of the other held requests, and begins with the next
    burst. Once `_LONGEST_WAIT` has passed since it first began, its prompt pauses no more. So no
    other request begins, and takes its memory, before the prompt is computed.
Memory
    If there is no memory for an overdue burst, the next step tries again. Until then no other
    request begins, because it could take the memory. So these tries take at most about a tenth of
    the time: a period of tries is followed by a rest that is `_REST` times as long. Each period is
    at least twice as long as the last, so that memory is found at some time.
Consequences
    Background requests always make progress, and take at most about a tenth of the time. They
    lengthen about one in `_STEPS` steps of others, whatever the model, the device and the prompts,
    if `_STEPS` steps take less than `_LONGEST_WAIT`. One step of each burst is much longer than the
    others, because it computes the prompts of the whole burst, up to `max_num_batched_tokens`
    tokens.

Held requests are not in the scheduler's queue, so that a step does not scan them. They count as
waiting and as deferred, so that the engine does not sleep, and they can be aborted.
"""

import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

_STEPS = 300
"""Steps for each longer step. A client's 99th percentile is 1 in 100 steps. The other two thirds
are for delays outside the engine, and for steps that are long without background requests. With
200 steps, 0.8 to 1.1 % of the waits of 32 streams on an H200 were more than 25 % above the 99th
percentile of streams alone."""
_LONGER = 1.2
"""A step is longer if it takes this many times the median of the usual steps, and longer than
nearly all of them: a device whose steps vary by themselves must not hold requests for that."""
_WATCHED = 16
"""Steps after a burst that may be longer because of it."""
_MOST_LONGER = 8
"""The most longer steps that count for one burst. Other requests may have caused some of them, and
must not hold background requests for ever."""
_USUAL = 64
"""The most usual steps that the pace remembers. Their median is the usual time."""
_RARE = 16
"""One in this many usual steps may take longer than the limit."""
_KNOWN = 32
"""Steps that must be known before the first burst."""
_LONGEST_WAIT = 5.0
"""Seconds after which a burst is overdue. An 8B model on an H200 takes 909 steps in this time. So
even after bursts with `_MOST_LONGER` longer steps, at most 0.9 % of the steps are longer."""
_REST = 9
"""The next burst begins at the earliest after this many times the longest step of the last one."""
_TRIES = 0.5
"""Seconds of the first period in which an overdue burst tries to find memory."""


class BackgroundPace:
    """Decides when background requests may begin beside others."""

    def __init__(self) -> None:
        """No step has been taken."""
        self._usual: deque[float] = deque(maxlen=_USUAL)
        """Seconds of the last steps that no burst made longer."""
        self._limit = float("inf")
        """Seconds above which a step is longer, for the last burst."""
        self._longer = 0
        """Longer steps since the last burst."""
        self._longest = 0.0
        """Seconds of the longest step that the last burst may have made longer."""
        self._steps = _STEPS
        """Steps since the last burst."""
        self._seconds = 0.0
        """Seconds of these steps."""

    def add_step(self, seconds: float) -> None:
        """Adds the time of a step in which requests ran."""
        self._steps += 1
        self._seconds += seconds
        if self._steps > _WATCHED:
            self._usual.append(seconds)
        elif seconds > self._limit:
            self._longer = min(_MOST_LONGER, self._longer + 1)
            self._longest = max(self._longest, seconds)

    def allows(self) -> bool:
        """Whether background requests may begin in the next step beside others."""
        if len(self._usual) < _KNOWN or self._steps < _STEPS * max(1, self._longer):
            return False
        return self._seconds >= (1 + _REST) * self._longest

    def overdue(self, held: float) -> bool:
        """Whether background requests that were held for `held` seconds must begin now."""
        return held >= max(_LONGEST_WAIT, _REST * self._longest)

    def begin(self, *, beside: bool) -> None:
        """Background requests begin in the next step, beside others or alone."""
        self._limit = self._longest_usual() if beside else float("inf")
        self._longer = self._steps = 0
        self._longest = self._seconds = 0.0

    def _longest_usual(self) -> float:
        """Seconds above which a step is longer than usual. 0: no usual step is known."""
        if not self._usual:
            return 0.0
        ordered = sorted(self._usual)
        return max(_LONGER * median(ordered), ordered[-1 - len(ordered) // _RARE])


class _Tries:
    """When an overdue burst may try to find memory; see "Memory"."""

    def __init__(self) -> None:
        """Nothing was tried."""
        self._began: float | None = None
        """When this period of tries began; None between two periods."""
        self._length = _TRIES
        """Seconds after which this period ends."""
        self._rest_until = 0.0

    def allowed(self, now: float) -> bool:
        """Whether the burst may go before others in this step."""
        return now >= self._rest_until

    def fail(self, now: float) -> None:
        """A try has found no memory, and others wait."""
        if self._began is None:
            self._began = now
        elif now - self._began >= self._length:
            self._length = 2 * (now - self._began)
            self._rest_until = now + _REST * (now - self._began)
            self._began = None


class BackgroundQueue:
    """Holds background requests outside of a scheduler's queue until they may begin."""

    def __init__(
        self,
        scheduler: Scheduler,
        pace: BackgroundPace,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Replaces methods of the scheduler, so that its background requests wait here.

        Args:
            scheduler: the scheduler.
            pace: decides when the requests begin.
            now: the clock, in seconds.
        """
        self._scheduler = scheduler
        self._pace = pace
        self._now = now
        self._held: dict[str, Request] = {}
        """The held requests by id, in the order in which they begin."""
        self._since = 0.0
        """When the first held request was held, or the last burst began, whichever was later."""
        self._last: float | None = None
        """When the last step was scheduled; None if no request ran then."""
        self._begun: dict[Request, float] = {}
        """Background requests that have begun and not ended, and when each first began."""
        self._preempted = False
        """Whether background requests were preempted that are in the scheduler's queue."""
        self._room_left = False
        """Whether background prompts paused in the last step, and others did not fill it."""
        self._tries = _Tries()
        self._schedule = scheduler.schedule
        self._enqueue = scheduler._enqueue_waiting_request
        self._count = scheduler.get_request_counts
        self._free = scheduler._free_request
        self._preempt = scheduler._preempt_request
        scheduler.schedule = self._schedule_in_turn
        scheduler._enqueue_waiting_request = self._hold_or_enqueue
        scheduler.get_request_counts = self._count_all
        scheduler._free_request = self._free_and_forget
        scheduler._preempt_request = self._preempt_and_note

    def _schedule_in_turn(self, throttle_prefills: bool = False) -> SchedulerOutput:
        scheduler = self._scheduler
        running, now = bool(scheduler.running), self._now()
        if running and self._last is not None:
            self._pace.add_step(now - self._last)
        self._last = now if running else None
        self._hold_preempted(now)
        pausing = bool(self._begun) and self._order_running(now)
        output = self._schedule_burst(throttle_prefills, now)
        self._hold_preempted(now)
        computed = output.total_num_scheduled_tokens
        self._room_left = pausing and computed < scheduler.max_num_scheduled_tokens
        return output

    def _schedule_burst(self, throttle_prefills: bool, now: float) -> SchedulerOutput:
        """Schedules a step. The held requests begin in it if the pace allows it."""
        scheduler = self._scheduler
        if not self._held or len(scheduler.running) >= scheduler.max_num_running_reqs:
            return self._schedule(throttle_prefills)
        beside = self._beside_others()
        overdue = beside and self._pace.overdue(now - self._since) and self._tries.allowed(now)
        if beside and not overdue and not self._pace.allows():
            return self._schedule(throttle_prefills)
        released = list(self._held.values())
        self._release(first=overdue)
        output = self._schedule(throttle_prefills)
        self._hold_again()
        begun = [request for request in released if request.request_id not in self._held]
        if begun:
            self._pace.begin(beside=beside)
            self._tries = _Tries()
            self._since = now
            for request in begun:
                self._begun.setdefault(request, now)
        elif overdue and scheduler.waiting:
            self._tries.fail(now)
        return output

    def _order_running(self, now: float) -> bool:
        """Moves background requests behind the other running requests, prompts last.

        If other requests wait to begin, the prompts also pause for a step; see "Long prompts".

        Returns:
            Whether they pause in the next step.
        """
        scheduler = self._scheduler
        running = [request for request in self._begun if request.status is RequestStatus.RUNNING]
        if not running:
            return False
        computing = [request for request in running if _is_computing(request)]
        places = dict.fromkeys(running, 1) | dict.fromkeys(computing, 2)
        scheduler.running.sort(key=lambda request: places.get(request, 0))
        recent = [request for request in computing if now - self._begun[request] < _LONGEST_WAIT]
        if self._room_left or not recent:
            return False
        if all(request.priority > 0 for request in scheduler.waiting):
            return False
        step = scheduler.current_step + 1
        for request in recent:
            # The scheduler skips a running request until this step.
            request.next_decode_eligible_step = max(request.next_decode_eligible_step, step + 1)
        return True

    def _preempt_and_note(self, request: Request, *args: Any, **kwargs: Any) -> None:  # vLLM's own
        self._preempt(request, *args, **kwargs)
        # It is held later, because the caller may take it out of the scheduler's queue.
        self._preempted |= request.priority > 0

    def _hold_preempted(self, now: float) -> None:
        """Holds background requests that were preempted since the last call."""
        if self._preempted:
            self._preempted = False
            if not self._held:
                self._since = now
            self._hold_again()

    def _beside_others(self) -> bool:
        scheduler = self._scheduler
        if scheduler.waiting:
            return True
        return any(request.priority <= 0 for request in scheduler.running)

    def _release(self, *, first: bool) -> None:
        """Puts all held requests into the scheduler's queue, before or behind the others."""
        waiting = self._scheduler.waiting
        for request in reversed(self._held.values()) if first else self._held.values():
            self._scheduler.deferred_waiting.discard(request)
            if first:
                waiting.prepend_request(request)
            else:
                waiting.add_request(request)
        self._held.clear()

    def _hold_again(self) -> None:
        """Takes background requests out of the scheduler's queue, in front of the held ones.

        They did not fit into the step, or were preempted.
        """
        scheduler = self._scheduler
        requests = [request for request in scheduler.waiting if _may_wait(request)]
        if requests:
            scheduler.waiting.remove_requests(requests)
            scheduler.deferred_waiting.update(requests)
            self._held = {request.request_id: request for request in requests} | self._held

    def _hold_or_enqueue(self, request: Request) -> None:
        if _may_wait(request):
            if not self._held:
                self._since = self._now()
            self._scheduler.deferred_waiting.add(request)
            self._held[request.request_id] = request
        else:
            self._enqueue(request)

    def _count_all(self) -> tuple[int, int]:
        running, waiting = self._count()
        return running, waiting + len(self._held)

    def _free_and_forget(
        self, request: Request, delay_free_blocks: bool = False
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:  # vLLM's own
        self._held.pop(request.request_id, None)
        self._begun.pop(request, None)
        return self._free(request, delay_free_blocks)


def _may_wait(request: Request) -> bool:
    """Whether a request may be held: it is a background request that does not run."""
    waits = request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
    return request.priority > 0 and waits


def _is_computing(request: Request) -> bool:
    """Whether a running request must compute other tokens before its last one."""
    return request.num_computed_tokens < request.num_tokens - 1
