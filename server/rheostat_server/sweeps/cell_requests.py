"""Chooses the rows that each cell of a sweep replaces, and which cells share a request.

Cells of neighbouring columns do; `cells` makes the requests.

Why they share
    The cells of a row differ only in the positions at which rows are replaced. If each cell had a
    plan of its own, the plan would be packed here, and parsed and built by every worker. This took
    most of a cell's time on the host. Instead, a plan has the acts of several columns, and each
    column is a sample of the request. A window limits the acts of a sample to the positions of its
    column; see `rheostat_engine.Window`.

Invariant: a cell's sample replaces exactly the rows of the cell, whether it shares a plan or not.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from rheostat_engine import OPEN_END, SMALL_PLAN_COST, Plan, Window
from rheostat_server.admission.admitted_request import AdmittedRequest
from rheostat_server.engine.admission_queue import Reservation
from rheostat_server.errors import (
    BankFull,
    Draining,
    EngineLost,
    InvalidValue,
    NonFinite,
    RheostatError,
    RunIncomplete,
)
from rheostat_server.requests.manager import RequestManager
from rheostat_server.sweeps.cells import Replaced, estimate_packing, replacing, with_acts
from rheostat_server.sweeps.settings import Settings
from rheostat_server.sweeps.sources import Source
from rheostat_server.tasks.offload import offload_plan

_COLUMNS = 16
"""The most columns that share a plan."""

_PART = 4
"""The shared plans of all prompts take at most 1 / `_PART` of the engine's capacity for rows."""


class _BlockKey(NamedTuple):
    """Identifies cells that may share a plan: a block of the grid, in one prompt of a pair."""

    row: int
    first_column: int
    pair: int
    noise: int


class CellGroup(NamedTuple):
    """Cells that one request measures in a prompt, each in a sample of its own."""

    request: AdmittedRequest
    cells: list[int]
    windows: list[Window]
    """The window of each cell's sample. Empty: there is one cell, which uses the plan unchanged."""


_Shared: TypeAlias = dict[int, tuple[AdmittedRequest, Window]]
"""By column, a request that the cells of several columns share, and the window that selects the
acts of the column. Empty: the cells cannot share a request."""


class CellRequests:
    """Makes the requests of the cells of one sweep."""

    def __init__(
        self, settings: Settings, sources: Sequence[Sequence[Source]], manager: RequestManager
    ) -> None:
        """No request is made yet.

        Args:
            settings: the sweep's settings.
            sources: for each pair and noise, where rows come from; a live view.
            manager: will run the requests.
        """
        self._settings = settings
        self._pairs = settings.pairs
        self._sources = sources
        self._manager = manager
        prompts = sum(len(pair.bases) for pair in settings.pairs)
        capacity = manager.sites.capacity
        held = min(capacity.bank_rows, capacity.steps, capacity.slots)
        self._rows = min(SMALL_PLAN_COST // 2, held // (_PART * prompts))
        """The most rows, at all sites, of the columns that share a plan."""
        self.most_together = max(1, min(_COLUMNS, self._rows))
        """The most cells that one request measures, which is the number of columns of a block. If
        it is 1, each cell has a plan of its own."""
        self._shared: OrderedDict[_BlockKey, _Shared] = OrderedDict()
        """Least recently used first."""
        self._kept = 2 * prompts
        """The most entries of `_shared`."""
        self._turn = asyncio.Lock()
        """Held while a shared request is made, because all its cells may ask for it at once."""

    def block(self, cell: int) -> tuple[int, int]:
        """Identifies the block of a cell. Only cells of the same block may share a request."""
        row, column = self._settings.grid.place(cell)
        return row, column // self.most_together

    async def groups(
        self, cells: Sequence[int], pair: int, noise: int
    ) -> tuple[list[CellGroup], dict[int, RheostatError]]:
        """Makes the requests that measure cells in a prompt of a pair.

        Cells of one block need few requests, and usually only one.

        Returns:
            A group for each request, and the errors of the cells whose rows are missing or unfit.

        Raises:
            EngineLost: the engine is gone.
            Draining: the server is ending.
        """
        groups: dict[int, CellGroup] = {}
        errors: dict[int, RheostatError] = {}
        for cell in cells:
            try:
                request, window = await self._request(cell, pair, noise)
            except (EngineLost, Draining):
                raise
            except RheostatError as error:
                errors[cell] = error
                continue
            group = groups.setdefault(id(request), CellGroup(request, [], []))
            group.cells.append(cell)
            if window is not None:
                group.windows.append(window)
        return [*groups.values()], errors

    async def _request(
        self, cell: int, pair: int, noise: int
    ) -> tuple[AdmittedRequest, Window | None]:
        """The request of a cell in a prompt of a pair, and the window of the cell's sample.

        Cells that share a plan get the same request. None: the cell uses the plan unchanged.
        """
        row, column = self._settings.grid.place(cell)
        if self.most_together > 1:
            key = _BlockKey(row, column - column % self.most_together, pair, noise)
            shared = await self._shared_requests(key)
            if column in shared:
                return shared[column]
        return await self._unshared_request(row, column, pair, noise), None

    async def _shared_requests(self, key: _BlockKey) -> _Shared:
        """The request that some cells share."""
        if key not in self._shared:
            async with self._turn:
                if key not in self._shared:
                    self._shared[key] = await self._make_shared(key)
                    if len(self._shared) > self._kept:
                        self._shared.popitem(last=False)
        self._shared.move_to_end(key)
        return self._shared[key]

    async def _make_shared(self, key: _BlockKey) -> _Shared:
        row, first, pair, noise = key
        base = self._pairs[pair].bases[noise].unobserved
        if not _may_have_window(base):
            return {}
        replaced: list[Replaced] = []
        windows: dict[int, Window] = {}
        taken: set[int] = set()
        sites = len(self._settings.grid.rows[row].window)
        for column in range(first, min(first + self.most_together, self._settings.grid.columns)):
            positions = self._pairs[pair].positions(column).base
            start, end = positions[0], positions[-1] + 1
            if start < 0 or end - start != len(positions) or not taken.isdisjoint(positions):
                continue
            if (len(taken) + len(positions)) * sites > self._rows:
                continue
            try:
                rows = await self._replaced(row, column, pair, noise)
            except (RunIncomplete, NonFinite):  # the cell's own request reports the error
                continue
            replaced += rows
            windows[column] = Window(start, end, len(base.acts))
            taken.update(positions)
        if len(windows) < 2:
            return {}
        window = Window(0, OPEN_END, len(base.acts))
        try:
            request = await self._make_request(pair, noise, replaced, window)
            self._check_ever_fits(request)
        except (InvalidValue, BankFull):  # with the steering, the columns need too much
            return {}
        return {column: (request, own) for column, own in windows.items()}

    async def _unshared_request(
        self, row: int, column: int, pair: int, noise: int
    ) -> AdmittedRequest:
        """The request of a cell with a plan of its own.

        If possible, this plan has a window too. The window tells the engine the position of the
        first replaced row, so the cell reuses cached blocks up to this row.
        """
        replaced = await self._replaced(row, column, pair, noise)
        base = self._pairs[pair].bases[noise].unobserved
        if not _may_have_window(base):
            return await self._make_request(pair, noise, replaced, window=None)
        positions = self._pairs[pair].positions(column).base
        window = Window(positions[0], positions[-1] + 1, len(base.acts))
        request = await self._make_request(pair, noise, replaced, window)
        if base.acts:  # with a window, positions outside of it may need slots of their own
            try:
                self._check_ever_fits(request)
            except BankFull:
                return await self._make_request(pair, noise, replaced, window=None)
        return request

    def _check_ever_fits(self, request: AdmittedRequest) -> None:
        """Raises BankFull if even an empty engine has too little capacity for a request."""
        reservation = Reservation(request.plan, 1)
        self._manager.admission_queue.check_ever_fits([reservation], request.prompt_len)

    async def _replaced(self, row: int, column: int, pair: int, noise: int) -> list[Replaced]:
        """The rows that a cell replaces in a prompt."""
        positions = self._pairs[pair].positions(column)
        if -1 in positions.base:
            raise RunIncomplete(
                "a position of the column has no partner in the prompt that is run, which differs "
                "there or is shorter"
            )
        source = self._sources[pair][noise]
        return [
            Replaced(site, positions.base, await source.rows(site, positions.source))
            for site in self._settings.grid.rows[row].window
        ]

    async def _make_request(
        self, pair: int, noise: int, replaced: Sequence[Replaced], window: Window | None
    ) -> AdmittedRequest:
        """Makes the request of a prompt in which rows are replaced.

        Raises:
            InvalidValue: no engine can run it.
        """
        base, blend = self._pairs[pair].bases[noise], self._settings.blend
        vectors = {
            replacement.source.vector.digest: replacement.source.vector for replacement in replaced
        }
        if blend.mask is not None:
            vectors[blend.mask.digest] = blend.mask
        size = estimate_packing(base, sum(len(replacement.positions) for replacement in replaced))
        acts = replacing(replaced, blend)
        return await offload_plan(size, with_acts, base, acts, tuple(vectors.values()), window)


def _may_have_window(plan: Plan) -> bool:
    """Whether no act of a plan is gated, and none depends on token ids."""
    return not plan.packed_acts.ruled and not plan.packed_acts.gate_states
