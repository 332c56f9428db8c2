"""A running request: its samples, and one queue of everything that they produce.

Invariant: nothing is put into the queue after an error or `close`.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial

from rheostat_engine import Attached, Event, Installed, Plan, Released, Report, Rows
from rheostat_server.admission import AdmittedRequest
from rheostat_server.baseline import watched_sampling
from rheostat_server.capture.budget import Share
from rheostat_server.capture.inline import Inline
from rheostat_server.capture.outlets import Outlets
from rheostat_server.errors import Defect, RheostatError
from rheostat_server.host import Backend, Delta, Ending, Job
from rheostat_server.line import Room
from rheostat_server.pacing import Pace
from rheostat_server.preparations import Preparation
from rheostat_server.response_queue import Item, Notice, ResponseQueue, Sign
from rheostat_server.sequence import FINISH_REASONS, Life, Role
from rheostat_server.subscriptions.joined import Joined
from rheostat_wire.v1 import types_pb2

_LOG = logging.getLogger(__name__)


_START_WORK = 1024
_ITERATION_WORK = 16 << 10
"""The work of starting samples, in prompt tokens. A sample costs `_START_WORK` and its prompt. A
request spends at most `_ITERATION_WORK` in an iteration of the event loop, because vLLM copies the
prompt there for each sample: 1 ms for the longest prompt."""

_NUMBERS = itertools.count()
"""Numbers of flights, because a later request may have the id of an earlier one."""


class Flight:
    """A running request."""

    def __init__(self, admitted: AdmittedRequest, share: Share, pace: Pace | None = None) -> None:
        """The request has not started.

        Args:
            admitted: the request.
            share: the memory for rows and tokens of it that wait.
            pace: how often its tokens leave. None: each at once.
        """
        self.admitted = admitted
        self.admitted_at = time.monotonic()
        self.completed = False
        self.failed = False
        self.aborted = False
        self.unobserved = False
        """Whether observers miss the request, because the engine had no room for their captures."""
        self.entered = False
        """Whether the engine's ledger holds everything that the request needs."""
        self.unanswered = 0
        """Updates whose answers `next` has not returned."""
        self.pinned: list[bytes] = []
        """Digests of vectors that the store must not evict while the request runs."""
        self.reserved: list[str] = []
        """Ids of the request's entries in the ledger."""
        self.prepared: list[Preparation | None] = []
        """Tables that the workers hold for the request."""
        self.share = share
        self.outlets = Outlets()
        """Destinations of captured rows."""
        # The client of a session decides by its tokens, so that they never wait.
        changeable = admitted.plan.private_from is not None
        self.queue = ResponseQueue(share, self.overflow, None if changeable else pace)
        """Messages that wait for the reader of the response."""
        self.interrupt: Callable[[RheostatError], None] = lambda _: None
        """Ends the call at once if its client does not read."""
        self.inline = Inline(partial(self.queue.put, Sign.ROWS))
        """Captured rows that go into the response."""
        self.capture_lock = asyncio.Lock()
        """Held while captures are added or removed, so that two changes never use the same room."""
        self.joined: list[Joined] = []
        """Subscriptions that joined the request while it ran."""
        self.asked: set[str] = set()
        """Ids of subscriptions that have tried to join."""
        self._number = next(_NUMBERS)
        self.lives = [
            *self._samples(Role.OWN, admitted.plan),
            *(self._samples(Role.BASELINE, admitted.baseline.plan) if admitted.baseline else ()),
        ]
        self._closed = False
        self._backend: Backend | None = None
        self._starting: set[asyncio.Task[None]] = set()
        """Tasks that give samples to the engine."""
        self._aborting: set[asyncio.Task[None]] = set()
        """Tasks that abort samples in the engine."""

    @property
    def own(self) -> list[Life]:
        """The request's own samples, without baselines."""
        return [life for life in self.lives if life.role is Role.OWN]

    @property
    def closed(self) -> bool:
        """Whether the samples were stopped, so that nothing more is put into the queue."""
        return self._closed

    @property
    def settled(self) -> bool:
        """Whether the engine has released the started samples, and no rows are being written."""
        return (
            not self._starting
            and not self._aborting
            and not self.outlets.writing
            and all(life.released.is_set() for life in self.lives if life.started)
        )

    @property
    def over(self) -> bool:
        """Whether the engine has released all samples, and no more will start."""
        return (self._closed or self.admitted.baseline is None) and all(
            (self._closed or life.ended) and life.released.is_set() for life in self.lives
        )

    @property
    def touches_kv(self) -> bool:
        """Whether a sample was started whose interventions change its KV cache."""
        return any(life.started and life.job.plan.touches_kv for life in self.lives)

    @property
    def rooms(self) -> list[Room]:
        """Room that the request needs: for samples, for baselines, and for scoring them."""
        samples = len(self.own)
        plans = {life.role: life.job.plan for life in reversed(self.lives)}
        if Role.BASELINE in plans:
            scoring = self.plan_id(0, Role.SCORE)
            plans[Role.SCORE] = replace(plans[Role.BASELINE], request_id=scoring, captures=())
        return [Room(plan, samples) for plan in plans.values() if plan.acts or plan.captures]

    def never_scheduled(self, life: Life) -> bool:
        """Whether a sample was aborted before the engine reported anything about it."""
        return self.aborted and not life.installed and not life.heard

    def plan_id(self, sample: int | str, role: Role = Role.OWN) -> str:
        """An id that no plan of another flight in this process has."""
        return f"{self.admitted.request_id}#{sample}{role.value}@{self._number}"

    def start(self, backend: Backend, lives: Sequence[Life], *, epoch: int) -> None:
        """Starts samples. Their KV blocks are cached under `epoch`; see `Plan.epoch`."""
        if self._closed:
            for life in lives:
                life.released.set()
            return
        for life in lives:
            plan = life.job.plan
            if plan.epoch != epoch:
                life.job = replace(life.job, plan=plan.under(plan.request_id, epoch))
            life.started = True
        self._backend = backend
        _keep(self._starting, self._start(backend, lives))

    async def stopped(self) -> None:
        """Returns once no more samples start, and the engine has been told of those that end."""
        while tasks := self._starting | self._aborting:
            await asyncio.wait(tasks)

    async def next(self) -> Item | Notice | Sign:
        """Waits for the next message of the queue.

        Raises:
            RheostatError: the request has failed.
        """
        item = await self.queue.get()
        if isinstance(item, Item):
            return item
        if isinstance(item, RheostatError):
            raise item
        if not isinstance(item, Sign):
            self.unanswered -= 1
        return item

    def deliver(self, life: Life, event: Event) -> None:
        """Handles an event of a sample from the engine."""
        if isinstance(event, Rows):
            self.outlets.feed(life.track, event)
            return
        if isinstance(event, Installed):
            life.installed = True
            life.known.set()
            if event.error:
                life.install_failed = True
                _LOG.error("plan %s is not in force: %s", event.request_id, event.error)
                self.fail(Defect("the engine could not take up the request's plan"))
            if not life.held_back:
                return  # nobody waits for it, so the reader need not wake up
        elif isinstance(event, Released):
            life.release()
            if life.role is not Role.SCORE:
                self.outlets.release(life.track, event)
            self._close_outlets()
        elif isinstance(event, Attached):
            life.tell(event)
            self._close_outlets()
            return
        else:
            self._drop(life, event.report)
            return
        if life.job.has_plan:
            self._put(Item(life, event))

    def unobserve(self) -> None:
        """Removes all captures that only observers asked for."""
        self.unobserved = True
        for life in self.lives:
            plan = life.job.plan.with_captures_of(self.admitted.unobserved)
            life.job = replace(life.job, plan=plan)

    def finish(self) -> None:
        """Closes the outlets that the response needs. Rows may still come for joined observers."""
        if all(life.released.is_set() for life in self.lives):
            self.close_outlets()
        else:
            self.outlets.close(self._reasons(), but={one.tap for one in self.joined})

    def close_outlets(self) -> None:
        """Closes every outlet with the finish reasons of the samples."""
        self.outlets.close(self._reasons())

    def abandon(self, error: RheostatError) -> None:
        """Discards the outlets of a request that has not started.

        Subscriptions that have announced the request to their clients report its end.
        """
        self.outlets.abandon(error, but={one.tap for one in self.joined if one.named})
        self.close_outlets()

    def answer(self, notice: Notice) -> None:
        """Puts the answer to an update into the queue."""
        self._put(notice)

    def fail(self, error: RheostatError) -> None:
        """Ends the request with an error. After the first error, later errors are ignored."""
        self.failed = True
        self._put(error)
        self.close()

    def overflow(self, error: RheostatError) -> None:
        """Ends the request with an error at once, and drops all waiting messages."""
        self.queue.close()
        self.fail(error)
        self.interrupt(error)

    def abort(self) -> None:
        """Ends every sample that still runs, as aborted."""
        self.aborted = True
        running = [life for life in self.lives if not life.ended]
        for life in running:
            life.ended = True
            life.ending = Ending.ABORTED
            life.known.set()
            self._put(Item(life, Delta(ending=Ending.ABORTED)))
        self._abort(running)

    def close(self) -> None:
        """Stops the samples. Nothing more is put into the queue."""
        if not self._closed:
            # A sample may have ended here while the engine still runs it.
            self._abort(
                [life for life in self.lives if not life.ended or not life.released.is_set()]
            )
        self._closed = True
        self.inline.close()
        self.outlets.drop_runs()
        for life in self.lives:
            life.known.set()

    def _drop(self, life: Life, report: Report) -> None:
        """Fails the request because a report of the engine could not be handled.

        Tasks that wait for this report continue, because the engine does not repeat it.
        """
        if isinstance(report, Installed):
            life.installed = life.install_failed = True
        elif isinstance(report, Released):
            life.release()
        elif isinstance(report, Attached):
            life.tell(replace(report, error="the server could not take in the engine's answer"))
        self.fail(Defect("the server could not take in a report of the engine"))
        self._close_outlets()

    def _close_outlets(self) -> None:
        """Closes the outlets once all samples that fill them have ended and were released.

        A failed request does not wait until its client has read the error, because its sinks would
        hold rows, files and threads until then.
        """
        lives = [life for life in self.lives if life.role is not Role.SCORE]
        if all((life.ended or self.failed) and life.released.is_set() for life in lives):
            self.close_outlets()

    def _reasons(self) -> list[types_pb2.FinishReason.ValueType]:
        return [_reason(life, failed=self.failed) for life in self.own]

    def _samples(self, role: Role, plan: Plan) -> list[Life]:
        admitted = self.admitted
        sampling = admitted.sampling
        if role is Role.OWN and admitted.baseline is not None:
            sampling = watched_sampling(sampling, admitted.baseline)
        return [
            Life(
                Job(
                    plan.under(self.plan_id(sample, role), plan.epoch),
                    admitted.prompt.token_ids,
                    sampling,
                    sample,
                    admitted.lora,
                ),
                role,
                sample,
            )
            for sample in range(sampling.samples)
        ]

    def _put(self, item: Item | Notice | Sign | RheostatError) -> None:
        if not self._closed:
            self.queue.put(item)

    async def _start(self, backend: Backend, lives: Sequence[Life]) -> None:
        """Gives samples to the engine, some in each iteration of the event loop."""
        at_once = max(1, _ITERATION_WORK // (self.admitted.prompt_len + _START_WORK))
        for index, life in enumerate(lives):
            if index and index % at_once == 0:
                await asyncio.sleep(0)
            if self._closed or life.ended:
                continue
            try:
                await backend.add_request(
                    life.job, partial(self._receive, life), partial(self._fail_sample, life)
                )
            except Exception as error:  # the task ends here, so any error must fail the request
                self._fail_sample(life, error)

    def _abort(self, lives: Sequence[Life]) -> None:
        """Makes the engine abort samples.

        The tasks that start samples are cancelled first, so that none starts after its abort.
        """
        for task in self._starting:
            task.cancel()
        ids = [life.plan_id for life in lives if life.started]
        if ids and self._backend is not None:
            _keep(self._aborting, self._abort_in(self._backend, ids))

    async def _abort_in(self, backend: Backend, plan_ids: Sequence[str]) -> None:
        try:
            await backend.abort(plan_ids)
        except Exception as error:  # the request has ended for its client, so only the log remains
            _LOG.error("samples %s were not aborted", ", ".join(plan_ids), exc_info=error)
        self._close_outlets()

    def _receive(self, life: Life, delta: Delta) -> None:
        """Takes a delta of a sample from the engine."""
        if life.ended:
            return
        life.heard = True
        if life.role is not Role.SCORE:
            # Also after a failure, because the receivers of rows count those of all known tokens.
            life.tokens += delta.token_ids
            self.outlets.extend(life.track, delta.token_ids)
        if self._closed:
            return
        if delta.ending is not None:
            life.ended = True
            life.ending = delta.ending
        self.queue.put_delta(life, delta)
        if life.ended:
            life.known.set()
            self._close_outlets()

    def _fail_sample(self, life: Life, error: Exception) -> None:
        """Fails the request because the engine cannot run a sample."""
        if self._closed or life.ended:
            return
        if isinstance(error, RheostatError):
            self.fail(error)
        else:
            _LOG.error("sample %s failed", life.plan_id, exc_info=error)
            self.fail(Defect("the engine could not run the request"))


def _keep(tasks: set[asyncio.Task[None]], work: Coroutine[None, None, None]) -> None:
    """Runs work in a task, which the set holds until the task is done."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


def _reason(life: Life, *, failed: bool) -> types_pb2.FinishReason.ValueType:
    """The finish reason of a sample; aborted if it was still running."""
    if failed:
        return types_pb2.FINISH_REASON_ERROR
    return FINISH_REASONS[life.ending or Ending.ABORTED]
