"""A run that is being made: a recording of one capture of a request with one sample.

Invariants: it takes no row that its store has not made room for; once given up it holds none. Rows
are written on a thread, while the event loop may give it up.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rheostat_server.errors import RowsLost
from rheostat_server.runs.run import Run
from rheostat_server.runs.targets import RunTarget
from rheostat_server.sinks import CaptureAbout, Ending, Labels, Outcome, RowBlock
from rheostat_wire.dtypes import StoredArray

_PIECE = 1 << 20
"""Rows that come a few at a time are joined once they have so many bytes."""


class Shelf(Protocol):
    """Where runs are stored."""

    def take(self, draft: "RunDraft", size: int) -> None:
        """Makes room for more rows; does nothing where the run is over.

        Raises:
            StoreFull: there is none.
        """

    def drop(self, draft: "RunDraft") -> None:
        """Frees what the run has taken; does nothing where it is over."""

    def keep(self, draft: "RunDraft") -> bool:
        """Lets the run be found; whether it can, since it may be over."""


@dataclass(eq=False)
class RunDraft:
    """A run that is being made: a recording of one capture of a request with one sample."""

    store: Shelf
    target: RunTarget
    about: CaptureAbout
    prompt_token_ids: npt.NDArray[np.int32]
    labels: Mapping[str, str]
    size: int
    """Bytes that it takes so far."""
    lossless: bool
    """Whether it holds every row or is none."""
    rows: int = 0
    """Rows that it has taken: positions times sites."""
    complete: bool = False
    """Whether its last row has come."""
    _lock: Lock = field(default_factory=Lock)
    _over: bool = False
    _positions: list[Labels] = field(default_factory=list)
    _pieces: list[StoredArray] = field(default_factory=list)
    _small: list[StoredArray] = field(default_factory=list)
    _small_bytes: int = 0

    @property
    def id(self) -> str:
        """The id."""
        return self.target.id

    @property
    def memory(self) -> int:
        """Nothing that could be moved: its rows count as the store's."""
        return 0

    def flush(self) -> None:
        """Moves nothing."""

    def write(self, block: RowBlock) -> None:
        """Takes rows; those of the baseline are none of the run's.

        Raises:
            StoreFull: there is no room for them.
        """
        if block.baseline:
            return
        rows = block.parts["rows"]
        self.store.take(self, rows.nbytes + block.positions.nbytes)
        with self._lock:
            if self._over:
                return
            self.rows += block.rows
            self._positions.append(block.positions)
            self._small.append(rows)
            self._small_bytes += rows.nbytes
            if self._small_bytes >= _PIECE:
                self._join()

    def finish(self, outcome: Outcome) -> None:
        """No more rows come. The run can be found once it is kept; an aborted one never.

        Raises:
            RowsLost: some are lost that may not be.
        """
        if outcome.ending is Ending.ABORTED:
            self.drop()
            return
        if outcome.dropped_rows and self.lossless:
            raise RowsLost.no_room(outcome.dropped_rows)
        with self._lock:
            self._join()
        self.complete = True

    def abandon(self, error: BaseException) -> None:
        """Gives it up."""
        self.drop()

    def drop(self) -> None:
        """Gives it up, unless it is kept: from now on it takes no memory."""
        self.store.drop(self)
        with self._lock:
            self._over = True
            self._positions.clear()
            self._pieces.clear()
            self._small.clear()

    def keep(self) -> bool:
        """Lets it be found, if it is complete and not given up; whether it can be."""
        return self.complete and self.store.keep(self)

    def made(self, number: int, now: float) -> Run:
        """The run."""
        none = np.empty(0, np.int32)
        return Run(
            id=self.id,
            sites=self.about.sites,
            dtype=self.about.dtype,
            width=self.about.width,
            positions=np.concatenate([none, *self._positions]),
            pieces=tuple(self._pieces),
            prompt_token_ids=self.prompt_token_ids,
            labels=self.labels,
            size=self.size,
            number=number,
            create_time=now,
            lease_expire_time=now + self.target.lease,
        )

    def _join(self) -> None:
        if self._small:
            one = len(self._small) == 1
            self._pieces.append(self._small[0] if one else np.concatenate(self._small, axis=1))
            self._small.clear()
            self._small_bytes = 0
