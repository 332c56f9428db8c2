"""A request in flight: its samples' tasks, and one queue in which all that they produce meets.

Invariant: nothing goes into the queue after an error or `close`.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from rheostat_engine import Attached, Dropped, Event, Installed, Plan, Released, Report
from rheostat_server.admission import Admitted
from rheostat_server.baseline import watched_sampling
from rheostat_server.capture.budget import Share
from rheostat_server.capture.inline import Inline
from rheostat_server.capture.outlets import Outlets
from rheostat_server.errors import Defect, RheostatError
from rheostat_server.host import Backend, Delta, Ending, Job
from rheostat_server.line import Room
from rheostat_server.preparations import Preparation
from rheostat_server.response_queue import Item, Notice, ResponseQueue, Sign
from rheostat_server.sequence import FINISH_REASONS, Life, Role
from rheostat_server.subscriptions.joined import Joined
from rheostat_wire.v1 import types_pb2

_LOG = logging.getLogger(__name__)


_START_WORK = 1024
_ITERATION_WORK = 16 << 10
"""Work of starting samples, in prompt tokens: of a sample beside its prompt, and of a request in
one iteration of the event loop. vLLM copies each sample's prompt there, 1 ms for the longest."""

_NUMBERS = itertools.count()
"""Tells flights apart whose requests have the same id, one after the other."""


class Flight:
    """A request in flight."""

    def __init__(self, admitted: Admitted, share: Share) -> None:
        """A request that has not started, and the memory that what waits of it may take."""
        self.admitted = admitted
        self.admitted_at = time.monotonic()
        self.completed = False
        self.failed = False
        self.aborted = False
        self.unobserved = False
        """Whether observers get nothing of it: the engine had no room."""
        self.entered = False
        """Whether it has the room in the engine that it needs."""
        self.unanswered = 0
        """Updates whose answer `next` has not given out."""
        self.pinned: list[bytes] = []
        """Vectors that the store keeps for it."""
        self.reserved: list[str] = []
        """Under which the ledger holds something for it."""
        self.prepared: list[Preparation | None] = []
        """Tables that the workers hold for it."""
        self.share = share
        self.outlets = Outlets()
        """Where captured rows go."""
        self.queue = ResponseQueue(share, self.overflow)
        """What waits for the reader of the response."""
        self.interrupt: Callable[[RheostatError], None] = lambda _: None
        """Ends the call at once where its client does not read."""
        self.inline = Inline(partial(self.queue.put, Sign.ROWS))
        """Those of them that go into the response."""
        self.capture_lock = asyncio.Lock()
        """Held while something else is to be captured of it, from looking to reserving."""
        self.joined: list[Joined] = []
        """Subscriptions that take part in it though it began before them."""
        self.asked: set[str] = set()
        """Ids of subscriptions that have tried to."""
        self._number = next(_NUMBERS)
        self.lives = [
            *self._samples(Role.OWN, admitted.plan),
            *(self._samples(Role.BASELINE, admitted.baseline.plan) if admitted.baseline else ()),
        ]
        self._closed = False

    @property
    def own(self) -> list[Life]:
        """The request's samples."""
        return [life for life in self.lives if life.role is Role.OWN]

    @property
    def prompt_copies(self) -> int:
        """Prompt tokens that the engine gets, with one copy of the prompt for each sample."""
        return len(self.lives) * self.admitted.prompt_len

    @property
    def closed(self) -> bool:
        """Whether nothing more comes of it."""
        return self._closed

    @property
    def settled(self) -> bool:
        """Whether the engine holds nothing of it any more."""
        return not self.outlets.writing and all(
            life.task is None or (life.task.done() and life.released.is_set())
            for life in self.lives
        )

    @property
    def over(self) -> bool:
        """Whether the engine has let go of all that will ever run of it."""
        return (self._closed or self.admitted.baseline is None) and all(
            (self._closed or life.ended) and life.released.is_set() for life in self.lives
        )

    @property
    def touches_kv(self) -> bool:
        """Whether something of it runs whose KV interventions change."""
        return any(life.task is not None and life.job.plan.touches_kv for life in self.lives)

    @property
    def rooms(self) -> list[Room]:
        """What all that it runs needs: its samples, their baselines, and what compares them."""
        samples = len(self.own)
        plans = {life.role: life.job.plan for life in reversed(self.lives)}
        if Role.BASELINE in plans:
            scoring = self.plan_id(0, Role.SCORE)
            plans[Role.SCORE] = replace(plans[Role.BASELINE], request_id=scoring, captures=())
        return [Room(plan, samples) for plan in plans.values() if plan.acts or plan.captures]

    def never_scheduled(self, life: Life) -> bool:
        """Whether a sample was aborted before the engine said anything of it."""
        return self.aborted and not life.installed and not life.heard

    def plan_id(self, sample: int | str, role: Role = Role.OWN) -> str:
        """An id that no plan of another flight of this process has."""
        return f"{self.admitted.request_id}#{sample}{role.value}@{self._number}"

    def start(self, backend: Backend, lives: Sequence[Life], *, epoch: int) -> None:
        """Starts samples, whose KV is cached under an epoch; see `Plan.epoch`."""
        at_once = max(1, _ITERATION_WORK // (self.admitted.prompt_len + _START_WORK))
        for index, life in enumerate(lives):
            if self._closed:
                life.released.set()
            else:
                life.job = replace(life.job, plan=replace(life.job.plan, epoch=epoch))
                life.task = asyncio.create_task(self._pump(life, backend, index // at_once))

    async def next(self) -> Item | Notice | Sign:
        """What happened next.

        Raises:
            RheostatError: the request has failed.
        """
        item = await self.queue.get()
        if isinstance(item, RheostatError):
            raise item
        if not isinstance(item, Item | Sign):
            self.unanswered -= 1
        return item

    def deliver(self, life: Life, event: Event) -> None:
        """Takes an event of the side channel."""
        if isinstance(event, Installed):
            life.installed = True
            life.known.set()
            if event.error:
                _LOG.error("plan %s is not in force: %s", event.request_id, event.error)
                self.fail(Defect("the engine could not take up the request's plan"))
        elif isinstance(event, Released):
            life.release()
            if life.role is not Role.SCORE:
                self.outlets.release(life.track, event)
            self._close_outlets()
        elif isinstance(event, Attached):
            life.tell(event)
            self._close_outlets()
            return
        elif isinstance(event, Dropped):
            self._drop(life, event.report)
            return
        else:
            self.outlets.feed(life.track, event)
            return
        if life.job.has_plan:
            self._put(Item(life, event))

    def unobserve(self) -> None:
        """Leaves out what nobody but observers wants to be captured."""
        self.unobserved = True
        for life in self.lives:
            plan = life.job.plan.with_captures_of(self.admitted.unobserved)
            life.job = replace(life.job, plan=plan)

    def finish(self) -> None:
        """All that the response needs has come. Rows may still come for those who joined."""
        if all(life.released.is_set() for life in self.lives):
            self.close_outlets()
        else:
            self.outlets.close(self._reasons(), but={one.tap for one in self.joined})

    def close_outlets(self) -> None:
        """Ends every outlet with how the samples ended."""
        self.outlets.close(self._reasons())

    def abandon(self, error: RheostatError) -> None:
        """Discards the outlets of a request that has not started.

        Subscriptions that were told of it get its end.
        """
        self.outlets.abandon(error, but={one.tap for one in self.joined if one.named})
        self.close_outlets()

    def answer(self, notice: Notice) -> None:
        """Says what became of an update."""
        self._put(notice)

    def fail(self, error: RheostatError) -> None:
        """Ends the request with an error; the first one counts."""
        self.failed = True
        self._put(error)
        self.close()

    def overflow(self, error: RheostatError) -> None:
        """Ends the request with an error at once, whatever waits to be told."""
        self.queue.close()
        self.fail(error)
        self.interrupt(error)

    def abort(self) -> None:
        """Ends every sample that still runs, as aborted."""
        self.aborted = True
        for life in self.lives:
            if not life.ended:
                life.ended = True
                life.ending = Ending.ABORTED
                life.known.set()
                if life.task is not None:
                    life.task.cancel()
                self._put(Item(life, Delta(ending=Ending.ABORTED)))

    def close(self) -> None:
        """Stops the samples and takes nothing more."""
        self._closed = True
        self.inline.close()
        self.outlets.drop_runs()
        for life in self.lives:
            life.known.set()
            if life.task is not None:
                life.task.cancel()

    def _drop(self, life: Life, report: Report) -> None:
        """Fails the request because a report of the engine could not be taken in.

        Whoever waits for that report is released, because the engine does not repeat it.
        """
        if isinstance(report, Installed):
            life.installed = True
        elif isinstance(report, Released):
            life.release()
        elif isinstance(report, Attached):
            life.tell(replace(report, error="the server could not take in the engine's answer"))
        self.fail(Defect("the server could not take in a report of the engine"))
        self._close_outlets()

    def _close_outlets(self) -> None:
        """Closes the outlets once everything that can fill them has ended, or was stopped.

        A request that has failed does not wait for its reader to do so, because its sinks would
        hold rows, files and threads for as long.
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
                    replace(plan, request_id=self.plan_id(sample, role)),
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

    async def _pump(self, life: Life, backend: Backend, wait: int) -> None:
        """Runs a sample, after so many iterations of the event loop."""
        try:
            for _ in range(wait):
                await asyncio.sleep(0)
            async with aclosing(backend.generate(life.job)) as deltas:
                async for delta in deltas:
                    life.heard = True
                    life.ended = delta.ending is not None
                    life.ending = delta.ending
                    if life.role is not Role.SCORE:
                        life.tokens += delta.token_ids
                        self.outlets.extend(life.track, delta.token_ids)
                    self._put(Item(life, delta))
            if not life.ended:
                raise Defect("the engine ended a sample without saying why")
        except RheostatError as error:
            self.fail(error)
        except Exception as error:  # a task's end: whatever it is, the request must hear of it
            _LOG.error("sample %s failed", life.plan_id, exc_info=error)
            self.fail(Defect("the engine could not run the request"))
        finally:
            life.known.set()
            self._close_outlets()


def _reason(life: Life, *, failed: bool) -> types_pb2.FinishReason.ValueType:
    """How a sample ended; one that was still running was aborted."""
    if failed:
        return types_pb2.FINISH_REASON_ERROR
    return FINISH_REASONS[life.ending or Ending.ABORTED]
