"""A request in flight: its samples' tasks, and one queue in which all that they produce meets.

Invariant: every sample's deltas and events come out in the order in which they went in; nothing
goes in after an error or `close`.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import NamedTuple

from rheostat_engine import Event, Installed, Plan, Released, Rows
from rheostat_server.admission import Admitted
from rheostat_server.errors import CaptureOverflow, Defect, RheostatError
from rheostat_server.host import Backend, Delta, Ending, Job

_LOG = logging.getLogger(__name__)


_NUMBERS = itertools.count()
"""Tells flights apart whose requests have the same id, one after the other."""


class Item(NamedTuple):
    """Something that happened to a sample."""

    sample: int
    what: Delta | Event


class Life:
    """One sample in the engine."""

    def __init__(self, job: Job) -> None:
        """A sample that has not started."""
        self.job = job
        self.task: asyncio.Task[None] | None = None
        self.ended = False
        self.heard = False
        self.installed = False
        self.released = asyncio.Event()
        if not job.has_plan:
            self.released.set()


class Flight:
    """A request in flight."""

    def __init__(self, admitted: Admitted, *, inline_bytes: int) -> None:
        """A request that has not started.

        Args:
            admitted: the request.
            inline_bytes: captured bytes that may wait in the queue.
        """
        self.admitted = admitted
        self.admitted_at = time.monotonic()
        self.completed = False
        self.failed = False
        self.aborted = False
        self.lives = [
            Life(Job(plan, admitted.prompt.token_ids, admitted.sampling, sample))
            for sample, plan in enumerate(_plans(admitted))
        ]
        self._inline_bytes = inline_bytes
        self._waiting_bytes = 0
        self._waiting_rows = 0
        self._queue: asyncio.Queue[Item | RheostatError] = asyncio.Queue()
        self._closed = False

    @property
    def idle(self) -> bool:
        """Whether nothing waits in the queue."""
        return self._queue.empty()

    @property
    def settled(self) -> bool:
        """Whether the engine holds nothing of it any more."""
        return all(
            life.task is None or (life.task.done() and life.released.is_set())
            for life in self.lives
        )

    def never_scheduled(self, sample: int) -> bool:
        """Whether a sample was aborted before the engine said anything of it."""
        life = self.lives[sample]
        return self.aborted and not life.installed and not life.heard

    def start(self, backend: Backend) -> None:
        """Starts every sample."""
        for life in self.lives:
            life.task = asyncio.create_task(self._pump(life, backend))

    async def next(self) -> Item:
        """What happened next.

        Raises:
            RheostatError: the request has failed.
        """
        item = await self._queue.get()
        if isinstance(item, RheostatError):
            raise item
        if isinstance(item.what, Rows):
            self._waiting_bytes -= item.what.data.nbytes
            self._waiting_rows -= len(item.what.data)
        return item

    def deliver(self, sample: int, event: Event) -> None:
        """Takes an event of the side channel."""
        life = self.lives[sample]
        if isinstance(event, Installed):
            life.installed = True
            if event.error:
                _LOG.error("plan %s is not in force: %s", event.request_id, event.error)
                self.fail(Defect("the engine could not take up the request's plan"))
        elif isinstance(event, Released):
            life.released.set()
        elif not self._closed:
            self._waiting_bytes += event.data.nbytes
            self._waiting_rows += len(event.data)
            if self._waiting_bytes > self._inline_bytes:
                self._overflow()
        self._put(Item(sample, event))

    def fail(self, error: RheostatError) -> None:
        """Ends the request with an error; the first one counts."""
        self._put(error)
        self.close()

    def abort(self) -> None:
        """Ends every sample that still runs, as aborted."""
        self.aborted = True
        for life in self.lives:
            if not life.ended:
                life.ended = True
                if life.task is not None:
                    life.task.cancel()
                self._put(Item(life.job.sample, Delta(ending=Ending.ABORTED)))

    def close(self) -> None:
        """Stops the samples and takes nothing more."""
        self._closed = True
        for life in self.lives:
            if life.task is not None:
                life.task.cancel()

    def _put(self, item: Item | RheostatError) -> None:
        if not self._closed:
            self._queue.put_nowait(item)

    def _overflow(self) -> None:
        while not self._queue.empty():
            self._queue.get_nowait()
        self.fail(
            CaptureOverflow(
                f"more than {self._inline_bytes} captured bytes wait to be read; read faster, "
                "capture less, or raise the server's --inline-capture-mib",
                metadata={"rows": str(self._waiting_rows)},
            )
        )

    async def _pump(self, life: Life, backend: Backend) -> None:
        try:
            async with aclosing(backend.generate(life.job)) as deltas:
                async for delta in deltas:
                    life.heard = True
                    life.ended = delta.ending is not None
                    self._put(Item(life.job.sample, delta))
            if not life.ended:
                raise Defect("the engine ended a sample without saying why")
        except RheostatError as error:
            self.fail(error)
        except Exception as error:  # a task's end: whatever it is, the request must hear of it
            _LOG.error("sample %s failed", life.job.plan.request_id, exc_info=error)
            self.fail(Defect("the engine could not run the request"))


def _plans(admitted: Admitted) -> Iterator[Plan]:
    """The plan of every sample, under an id that no other flight of this process has."""
    number = next(_NUMBERS)
    for sample in range(admitted.sampling.samples):
        yield replace(admitted.plan, request_id=f"{admitted.request_id}#{sample}@{number}")
