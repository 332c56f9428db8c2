"""Stored runs: rows of requests, kept in memory under an id for patches to draw from.

Invariants: all runs together, those being made included, take at most `capacity` bytes. A run that
is leased or held is never evicted; of the others those used longest ago go first, and none goes in
vain. An id names one run, or one being made. A run can be found once its request has succeeded;
one that fails or is aborted leaves none.

Rows are written on threads, all else happens on the event loop: one lock for both.
"""

import logging
import time
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import NamedTuple

import numpy as np

from rheostat_server.errors import Resource, RunExists, RunInUse, RunNotFound, StoreFull
from rheostat_server.runs.draft import RunDraft
from rheostat_server.runs.run import Run
from rheostat_server.runs.targets import RunTarget
from rheostat_server.sinks import CaptureAbout

_LOG = logging.getLogger(__name__)

_OVERHEAD = 4096
"""Bytes that a run counts for besides what it holds, so that their number is bounded too."""


class Page(NamedTuple):
    """Some of the runs."""

    runs: list[Run]
    """Oldest first."""
    more: bool
    """Whether there are younger ones."""


class Runs:
    """The runs of a server."""

    def __init__(self, capacity: int, clock: Callable[[], float] = time.time) -> None:
        """Room for `capacity` bytes; leases are measured by `clock`, in seconds since the epoch."""
        self.capacity = capacity
        self._clock = clock
        self._lock = Lock()
        self._used = 0
        self._made: OrderedDict[str, Run] = OrderedDict()
        """Least recently used first."""
        self._by_age: list[Run] = []
        self._making: dict[str, RunDraft] = {}
        self._numbers = 0

    def __len__(self) -> int:
        """How many can be found."""
        return len(self._made)

    @property
    def making(self) -> int:
        """How many are being made."""
        return len(self._making)

    @property
    def used_bytes(self) -> int:
        """Bytes that all of them take, those being made included."""
        return self._used

    def check(self, run_id: str, least: int, path: str) -> None:
        """Whether a run of at least so many bytes can be begun, `path` being that of its id.

        Raises:
            RunExists: there is one with this id.
            StoreFull: it would never fit.
        """
        with self._lock:
            self._check_free(run_id, path)
        if least > self.capacity:
            raise StoreFull(
                f"the prompt's rows alone take {least} bytes; all runs together may have "
                f"{self.capacity}. Capture fewer sites or tokens, or raise the server's --runs-mib",
                field=path,
            )

    def begin(
        self,
        target: RunTarget,
        about: CaptureAbout,
        prompt_token_ids: Sequence[int],
        labels: Mapping[str, str],
        path: str,
        *,
        lossless: bool,
    ) -> RunDraft:
        """Begins a run of which no row may be lost, or some; `path` is that of its id.

        Raises:
            RunExists: there is one with this id.
            StoreFull: there is no room for another one.
        """
        prompt = np.fromiter(prompt_token_ids, np.int32, len(prompt_token_ids))
        texts = [target.id, *labels, *labels.values()]
        size = _OVERHEAD + prompt.nbytes + sum(len(text.encode()) for text in texts)
        with self._lock:
            self._check_free(target.id, path)
            self._make_room(size, target.id)
            self._used += size
            draft = RunDraft(self, target, about, prompt, labels, size, lossless)
            self._making[target.id] = draft
        return draft

    def hold(self, run_id: str, path: str) -> Run:
        """A run, which counts as used now and stays until it is released as often as it was held.

        Raises:
            RunNotFound: there is none with this id.
        """
        with self._lock:
            run = self._get(run_id, path)
            run.users += 1
            self._made.move_to_end(run_id)
            return run

    def release(self, run: Run) -> None:
        """Takes a `hold` back."""
        with self._lock:
            run.users -= 1

    def renew(self, run_id: str, lease: float, path: str) -> Run:
        """Lets a lease last so many seconds from now, if that is longer.

        Raises:
            RunNotFound: there is no run with this id.
        """
        with self._lock:
            run = self._get(run_id, path)
            run.lease_expire_time = max(run.lease_expire_time, self._clock() + lease)
            return run

    def delete(self, run_id: str, path: str) -> int:
        """Deletes a run, leased or not; the bytes that became free.

        Raises:
            RunNotFound: there is none with this id.
            RunInUse: somebody holds it, or it is being made.
        """
        with self._lock:
            if run_id in self._making:
                raise _in_use(run_id, "a request is making it; abort the request, or wait", path)
            run = self._get(run_id, path)
            if run.users:
                raise _in_use(run_id, f"it is in use {run.users} times; try again later", path)
            self._remove(run)
            return run.size

    def page(self, after: int, most: int) -> Page:
        """At most so many runs whose number is above `after`."""
        with self._lock:
            start = bisect_right(self._by_age, after, key=_number)
            found = self._by_age[start : start + most]
            return Page(found, start + most < len(self._by_age))

    def take(self, draft: RunDraft, size: int) -> None:
        """Makes room for more rows of a run; does nothing where it is over.

        Raises:
            StoreFull: there is no room; nothing has been evicted.
        """
        with self._lock:
            if self._making.get(draft.id) is draft:
                self._make_room(size, draft.id)
                self._used += size
                draft.size += size

    def drop(self, draft: RunDraft) -> None:
        """Gives up a run that is being made; does nothing where it is over."""
        with self._lock:
            if self._making.get(draft.id) is draft:
                del self._making[draft.id]
                self._used -= draft.size

    def keep(self, draft: RunDraft) -> bool:
        """Lets a run be found; whether it can, since it may be over."""
        with self._lock:
            if self._making.get(draft.id) is not draft:
                return False
            del self._making[draft.id]
            self._numbers += 1
            now = self._clock()
            run = draft.made(self._numbers, now)
            self._made[run.id] = run
            self._by_age.append(run)
            return True

    def _check_free(self, run_id: str, path: str) -> None:
        if run_id in self._made or run_id in self._making:
            how = "stored" if run_id in self._made else "being made"
            raise RunExists(
                f"a run {run_id} is {how}: delete it first, or choose another id",
                field=path,
                resource=Resource("run", run_id),
            )

    def _get(self, run_id: str, path: str) -> Run:
        run = self._made.get(run_id)
        if run is None:
            why = "its request still runs" if run_id in self._making else "it may have been evicted"
            raise RunNotFound(
                f"there is no run {run_id}; {why}", field=path, resource=Resource("run", run_id)
            )
        return run

    def _make_room(self, size: int, run_id: str) -> None:
        short = self._used + size - self.capacity
        if short <= 0:
            return
        victims = []
        now = self._clock()
        for run in self._made.values():
            if short <= 0:
                break
            if not run.users and run.lease_expire_time <= now:
                victims.append(run)
                short -= run.size
        if short > 0:
            raise StoreFull(
                f"the run {run_id} needs {size} bytes more, and runs that are leased, in use or "
                f"being made leave too few of {self.capacity}. Delete runs, lease them for a "
                "shorter time, capture fewer sites or tokens, or raise the server's --runs-mib",
                resource=Resource("run", run_id),
            )
        for run in victims:
            self._remove(run)
            _LOG.info("run %s was evicted, %d bytes", run.id, run.size)

    def _remove(self, run: Run) -> None:
        self._used -= run.size
        del self._made[run.id]
        del self._by_age[bisect_left(self._by_age, run.number, key=_number)]


def _in_use(run_id: str, why: str, path: str) -> RunInUse:
    return RunInUse(
        f"the run {run_id} cannot be deleted: {why}",
        field=path,
        resource=Resource("run", run_id),
    )


def _number(run: Run) -> int:
    return run.number
