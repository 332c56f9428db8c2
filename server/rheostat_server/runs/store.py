"""Stored runs: rows of requests or of uploads, kept in memory under an id as a source of patches.

Invariants:

* All runs together, unfinished runs included, take at most `capacity` bytes.
* A run that is leased or in use is never evicted. Other runs are evicted, the least recently used
  first, but only if this frees enough memory.
* An id belongs to at most one run, finished or not.
* A run can be found once its request or upload has succeeded. One that fails or is aborted leaves
  none.
* The rows of a stored run never change.

Rows are written on threads. All other methods run on the event loop. One lock guards both.
"""

import logging
import time
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from threading import Lock
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rheostat_engine import Site
from rheostat_server.errors import Resource, RowsLost, RunExists, RunInUse, RunNotFound, StoreFull
from rheostat_server.runs.targets import RunTarget
from rheostat_server.sinks import CaptureAbout, Ending, Labels, Outcome, RowBlock
from rheostat_server.sinks.tables import NUMPY
from rheostat_server.tensors import FloatType
from rheostat_wire.dtypes import StoredArray

_LOG = logging.getLogger(__name__)

_OVERHEAD = 4096
"""Bytes that a run counts in addition to its rows, which also bounds the number of runs."""

_NUMBER = attrgetter("number")

_PIECE = 1 << 20
"""Small blocks of rows are concatenated once they have this many bytes."""


@dataclass(eq=False, slots=True)
class Run:
    """A stored run: rows of one sample at some sites, with the same positions at every site."""

    id: str
    sites: tuple[Site, ...]
    """Every name of its sites, by layer, then point."""
    dtype: FloatType
    width: int
    positions: Labels
    """Ascending: [positions]."""
    token_ids: Labels
    """The input token at each position: [positions]."""
    pieces: Sequence[StoredArray]
    """Rows in order of position. Each piece is [sites, positions of the piece, W]."""
    prompt_token_ids: npt.NDArray[np.int32]
    """[P]."""
    labels: Mapping[str, str]
    size: int
    """Bytes of memory."""
    number: int
    """Ascending in the order of creation."""
    create_time: float
    """Seconds since the epoch."""
    lease_expire_time: float
    """Seconds since the epoch."""
    users: int = 0
    """Number of uses: calls of `RunStore.hold` without a `RunStore.release`."""

    def rows(self, site: Site) -> StoredArray:
        """The rows at a site, under any of its names: [positions, W]. bfloat16 is uint16.

        Raises:
            KeyError: the run has no rows at the site.
        """
        index = self.index_of(site)
        none = np.empty((0, self.width), NUMPY[self.dtype.value])
        return np.concatenate([none, *(piece[index] for piece in self.pieces)])

    def index_of(self, site: Site) -> int:
        """The index of a site, under any of its names, in `sites`.

        Raises:
            KeyError: the run has no rows at the site.
        """
        index = next((i for i, own in enumerate(self.sites) if own.index == site.index), None)
        if index is None:
            raise KeyError(site)
        return index

    def read(self, sites: Sequence[int], at: npt.NDArray[np.intp]) -> StoredArray:
        """A copy of some rows: [sites, positions, W].

        Args:
            sites: their indices in `sites`.
            at: indices in `positions`, ascending, at least one.
        """
        ends = np.cumsum([piece.shape[1] for piece in self.pieces])
        first, last = np.searchsorted(ends, (at[0], at[-1]), side="right")
        parts = []
        for piece, end in zip(self.pieces[first : last + 1], ends[first : last + 1], strict=True):
            start = end - piece.shape[1]
            inside = at[slice(*np.searchsorted(at, (start, end)))] - start
            if len(inside):
                parts.append(piece[np.ix_(sites, inside)])
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


@dataclass(eq=False)
class RunDraft:
    """An unfinished run: a recording of one capture of a request with one sample, or an upload.

    Rows are written on a thread, while the event loop may drop the run. A dropped run has no rows.
    """

    store: "RunStore"
    target: RunTarget
    about: CaptureAbout
    prompt_token_ids: npt.NDArray[np.int32]
    labels: Mapping[str, str]
    size: int
    """Bytes of memory so far."""
    lossless: bool
    """Whether the run fails if a row is lost."""
    upload: bool = False
    """Whether its rows are uploaded."""
    rows: int = 0
    """Number of rows so far: positions times sites."""
    complete: bool = False
    """Whether the last row was written."""
    _lock: Lock = field(default_factory=Lock)
    _dropped: bool = False
    _positions: list[Labels] = field(default_factory=list)
    _token_ids: list[Labels] = field(default_factory=list)
    _pieces: list[StoredArray] = field(default_factory=list)
    _small: list[StoredArray] = field(default_factory=list)
    _small_bytes: int = 0

    @property
    def id(self) -> str:
        """The id of the run."""
        return self.target.id

    @property
    def memory(self) -> int:
        """Zero, because the rows count as memory of the store, and cannot move to a disk."""
        return 0

    def flush(self) -> None:
        """Does nothing; see `memory`."""

    def write(self, block: RowBlock) -> None:
        """Adds rows. Rows of the baseline are ignored.

        Raises:
            StoreFull: the store has too little free memory.
        """
        if block.baseline:
            return
        rows = block.parts["rows"]
        labels = block.positions.nbytes + block.token_ids.nbytes
        self.store.reserve(self, rows.nbytes + labels)
        with self._lock:
            if self._dropped:
                return
            self.rows += block.rows
            self._positions.append(block.positions)
            self._token_ids.append(block.token_ids)
            self._small.append(rows)
            self._small_bytes += rows.nbytes
            if self._small_bytes >= _PIECE:
                self._concatenate()

    def fill(self, positions: Labels, token_ids: Labels, pieces: Sequence[StoredArray]) -> None:
        """Completes an upload, for whose rows and labels memory is reserved.

        Args:
            positions: all positions, ascending.
            token_ids: the input token at each.
            pieces: as `Run.pieces`.
        """
        with self._lock:
            if self._dropped:
                return
            self._positions.append(positions)
            self._token_ids.append(token_ids)
            self._pieces.extend(pieces)
        self.rows = len(positions) * len(self.about.sites)
        self.complete = True

    def finish(self, outcome: Outcome) -> None:
        """Completes the run; `keep` then stores it. Drops the run of an aborted request.

        Raises:
            RowsLost: rows were lost, and the run is lossless.
        """
        if outcome.ending is Ending.ABORTED:
            self.drop()
            return
        if outcome.dropped_rows and self.lossless:
            raise RowsLost.no_room(outcome.dropped_rows)
        with self._lock:
            self._concatenate()
        self.complete = True

    def abandon(self, error: BaseException) -> None:
        """Drops the run."""
        self.drop()

    def drop(self) -> None:
        """Frees the memory of the run, unless it was kept."""
        self.store.drop(self)
        with self._lock:
            self._dropped = True
            self._positions.clear()
            self._token_ids.clear()
            self._pieces.clear()
            self._small.clear()

    def keep(self) -> Run | None:
        """Stores the run, and returns it; None if it is not complete, or was dropped."""
        enough = sum(map(len, self._positions)) >= self.target.least
        return self.store.keep(self) if self.complete and enough else None

    def to_run(self, number: int, now: float) -> Run:
        """The finished run."""
        none = np.empty(0, np.int32)
        return Run(
            id=self.id,
            sites=self.about.sites,
            dtype=self.about.dtype,
            width=self.about.width,
            positions=np.concatenate([none, *self._positions]),
            token_ids=np.concatenate([none, *self._token_ids]),
            pieces=tuple(self._pieces),
            prompt_token_ids=self.prompt_token_ids,
            labels=self.labels,
            size=self.size,
            number=number,
            create_time=now,
            lease_expire_time=now + self.target.lease,
        )

    def _concatenate(self) -> None:
        if self._small:
            single = len(self._small) == 1
            self._pieces.append(self._small[0] if single else np.concatenate(self._small, axis=1))
            self._small.clear()
            self._small_bytes = 0


class Page(NamedTuple):
    """A page of a listing."""

    runs: list[Run]
    """Oldest first."""
    more: bool
    """Whether there are newer runs."""


class RunStore:
    """The runs of a server. `clock` is the time of leases, in seconds since the epoch."""

    def __init__(self, capacity: int, clock: Callable[[], float] = time.time) -> None:
        self.capacity = capacity
        """Bytes that all runs together may take."""
        self._clock = clock
        self._lock = Lock()
        self._used = 0
        self._runs: OrderedDict[str, Run] = OrderedDict()
        """Least recently used first."""
        self._by_age: list[Run] = []
        self._drafts: dict[str, RunDraft] = {}
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def unfinished(self) -> int:
        """Number of unfinished runs, uploads included."""
        return len(self._drafts)

    @property
    def uploads(self) -> int:
        """Number of unfinished uploads."""
        return sum(draft.upload for draft in self._drafts.values())

    @property
    def used_bytes(self) -> int:
        """Bytes of all runs, unfinished runs included."""
        return self._used

    def check(self, run_id: str, least: int, path: str) -> None:
        """Checks that a run of at least `least` bytes may begin. `path` is the field of its id.

        Raises:
            RunExists: another run has this id.
            StoreFull: the run would not fit even into an empty store.
        """
        with self._lock:
            self._check_free(run_id, path)
        if least > self.capacity:
            raise StoreFull(
                f"its rows take at least {least} bytes; all runs together may have "
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
        upload: bool = False,
    ) -> RunDraft:
        """Begins a run. `path` is the field of its id, for errors.

        Raises:
            RunExists: another run has this id.
            StoreFull: the store has too little free memory.
        """
        prompt = np.fromiter(prompt_token_ids, np.int32, len(prompt_token_ids))
        texts = [target.id, *labels, *labels.values()]
        size = _OVERHEAD + prompt.nbytes + sum(len(text.encode()) for text in texts)
        with self._lock:
            self._check_free(target.id, path)
            self._make_room(size, target.id)
            self._used += size
            draft = RunDraft(self, target, about, prompt, labels, size, lossless, upload)
            self._drafts[target.id] = draft
        return draft

    def hold(self, run_id: str, path: str) -> Run:
        """Returns a run, which is not evicted before its `release`.

        Raises:
            RunNotFound: no run has this id.
        """
        with self._lock:
            run = self._get(run_id, path)
            run.users += 1
            self._runs.move_to_end(run_id)
            return run

    def release(self, run: Run) -> None:
        """Ends one `hold`."""
        with self._lock:
            run.users -= 1

    def renew(self, run_id: str, lease: float, path: str) -> Run:
        """Extends a lease to `lease` seconds from now, unless it lasts longer already.

        Raises:
            RunNotFound: no run has this id.
        """
        with self._lock:
            run = self._get(run_id, path)
            run.lease_expire_time = max(run.lease_expire_time, self._clock() + lease)
            return run

    def delete(self, run_id: str, path: str) -> int:
        """Deletes a run, even if it is leased. Returns the freed bytes.

        Raises:
            RunNotFound: no run has this id.
            RunInUse: the run is in use or unfinished.
        """
        with self._lock:
            if run_id in self._drafts:
                raise _in_use(
                    run_id, "a request or an upload is making it; end that, or wait", path
                )
            run = self._get(run_id, path)
            if run.users:
                raise _in_use(run_id, f"it is in use {run.users} times; try again later", path)
            self._remove(run)
            return run.size

    def page(self, after: int, most: int) -> Page:
        """At most `most` runs whose number is above `after`."""
        with self._lock:
            start = bisect_right(self._by_age, after, key=_NUMBER)
            return Page(self._by_age[start : start + most], start + most < len(self._by_age))

    def reserve(self, draft: RunDraft, size: int) -> None:
        """Reserves memory for more rows of a run. Does nothing if the run was kept or dropped.

        Raises:
            StoreFull: the store has too little free memory. Nothing was evicted.
        """
        with self._lock:
            if self._drafts.get(draft.id) is draft:
                self._make_room(size, draft.id)
                self._used += size
                draft.size += size

    def drop(self, draft: RunDraft) -> None:
        """Frees the memory of an unfinished run. Does nothing if it was kept or dropped."""
        with self._lock:
            if self._drafts.get(draft.id) is draft:
                del self._drafts[draft.id]
                self._used -= draft.size

    def keep(self, draft: RunDraft) -> Run | None:
        """Stores a complete run, and returns it; None if it was dropped before."""
        with self._lock:
            if self._drafts.get(draft.id) is not draft:
                return None
            del self._drafts[draft.id]
            self._numbers += 1
            now = self._clock()
            run = draft.to_run(self._numbers, now)
            self._runs[run.id] = run
            self._by_age.append(run)
            return run

    def _check_free(self, run_id: str, path: str) -> None:
        if run_id in self._runs or run_id in self._drafts:
            how = "stored" if run_id in self._runs else "being made"
            raise RunExists(
                f"a run {run_id} is {how}: delete it first, or choose another id",
                field=path,
                resource=Resource("run", run_id),
            )

    def _get(self, run_id: str, path: str) -> Run:
        run = self._runs.get(run_id)
        if run is None:
            why = "its call still runs" if run_id in self._drafts else "it may have been evicted"
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
        for run in self._runs.values():
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
        del self._runs[run.id]
        del self._by_age[bisect_left(self._by_age, run.number, key=_NUMBER)]


def _in_use(run_id: str, why: str, path: str) -> RunInUse:
    return RunInUse(
        f"the run {run_id} cannot be deleted: {why}",
        field=path,
        resource=Resource("run", run_id),
    )
