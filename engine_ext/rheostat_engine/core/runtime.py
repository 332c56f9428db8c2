"""What a worker does for the requests that have a plan, step by step.

Invariant: nothing that a client sends can raise here. A plan that can't be put in force is answered
with an `Installed` that says why, and the server fails that request before a token of it is seen. A
position's row is delivered once, however often preemption makes it be computed.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rheostat_engine.core.bank import Bank, BankError, Vectors
from rheostat_engine.core.capture import Blocks, Region, Ring, cut_blocks, place
from rheostat_engine.core.classes import CaptureClasses
from rheostat_engine.core.delivery import Frame
from rheostat_engine.core.expand import Compact, Expander
from rheostat_engine.core.outlet import Outlet
from rheostat_engine.core.program import Program
from rheostat_engine.core.segments import Int64, PositionTable
from rheostat_engine.core.tallies import Tallies
from rheostat_engine.events import InstalledHead, RowsHead
from rheostat_engine.plan import MAX_EFFORT, Plan, segment

_LOG = logging.getLogger(__name__)


class Batch(NamedTuple):
    """The batch that a runner is about to run, in its order."""

    request_ids: Sequence[str]
    """vLLM's ids."""
    computed: npt.NDArray[np.integer]
    """[r]: tokens that are already computed: the position of the first scheduled one."""
    scheduled: npt.NDArray[np.integer]
    """[r]: tokens that are scheduled."""
    padded_tokens: int
    """Tokens that the forward pass runs, padding included."""


@dataclass(frozen=True)
class _Held:
    plan: Plan
    number: int
    slots: tuple[int, ...]
    classes: tuple[int, ...]


@dataclass(frozen=True)
class _Captured:
    region: Region
    head: RowsHead


class SiteRuntime:
    """Plans in force on this worker, and the step at hand."""

    def __init__(
        self,
        *,
        program: Program,
        bank: Bank,
        expander: Expander,
        outlet: Outlet | None,
        rank: int,
        sites: frozenset[int],
    ) -> None:
        """Joins the parts.

        Args:
            program: the buffers that the sites read.
            bank: rows that steering adds.
            expander: writes the step's instructions.
            outlet: where rows and events go; None on a rank that doesn't report.
            rank: this worker's rank.
            sites: the sites that lie in this rank's part of the model.
        """
        self.program = program
        self.bank = bank
        self.vectors: dict[bytes, npt.NDArray[np.float32]] = {}
        self.steps: dict[str, int] = {"plain": 0, "light": 0}
        self.captured_rows = 0
        self.lost_rows = 0
        self._expander = expander
        self._outlet = outlet
        self._rank = rank
        self._sites = sites
        self._ring = Ring(program.ring.shape[0])
        self._held: dict[str, _Held] = {}
        self._numbers_free: list[int] = []
        self._numbers_made = 0
        self._slots = PositionTable()
        self._classes = PositionTable()
        self._capture_classes = CaptureClasses(program.add_row.shape[0])
        self._tallies = Tallies(sites)
        self._last_ids: Sequence[str] = ()
        self._last_numbers: Int64 = np.zeros(0, np.int64)
        self._pending: _Captured | None = None

    @property
    def requests(self) -> int:
        """Requests whose plan is in force."""
        return len(self._held)

    def load_vectors(self, vectors: Vectors) -> None:
        """Keeps vectors, by digest, for plans to come."""
        self.vectors.update(vectors)

    def drop_vectors(self, digests: Sequence[bytes]) -> None:
        """Forgets vectors. Rows made of them stay as long as their requests."""
        for digest in digests:
            self.vectors.pop(digest, None)

    def install(self, request_id: str, wire: object) -> None:
        """Puts the plan of a request that is scheduled for the first time in force.

        A request that is already known, because it was preempted, keeps what it has.

        Args:
            request_id: vLLM's id.
            wire: what `Plan.to_wire` made.
        """
        if request_id in self._held:
            return
        name = wire.get("id") if isinstance(wire, Mapping) else None
        if not isinstance(name, str):
            _LOG.error("request %s brought a plan without a name; nobody can be told", request_id)
            return
        problem = ""
        try:
            self._install(request_id, Plan.from_wire(wire))
        except (BankError, ValueError) as error:
            problem = str(error)
            self._install(request_id, Plan(name))
        number = self._held[request_id].number
        self._send(Frame(InstalledHead(self._rank, number, name, problem)))

    def preempt(self, request_id: str) -> None:
        """Notes that a request lost its place and will be computed again."""
        held = self._held.get(request_id)
        if held is not None:
            self._tallies.preemptions[held.number] += 1

    def forget(self, request_id: str) -> None:
        """Frees all that a finished request holds, and says so."""
        held = self._held.pop(request_id, None)
        if held is None:
            return
        number = held.number
        self._slots.drop(number)
        self._classes.drop(number)
        self._capture_classes.release(held.classes)
        for slot in held.slots:
            self.bank.release(slot)
        self._last_ids = ()
        self._send(Frame(self._tallies.released(number, held.plan, self._rank)))
        self._numbers_free.append(number)

    def begin(self, batch: Batch) -> None:
        """Says what the forward pass that comes next does; call `end` after it."""
        numbers = self._numbers(batch.request_ids) if self._held else None
        if numbers is None or not numbers.any():
            self.steps["plain"] += 1
            return
        scheduled = batch.scheduled.astype(np.int64)
        computed = batch.computed.astype(np.int64)
        ends = np.cumsum(scheduled)
        token_number = np.repeat(numbers, scheduled)
        positions = np.arange(ends[-1]) + np.repeat(computed - ends + scheduled, scheduled)
        slots = self._slots.lookup(token_number, positions)
        mask = self.bank.sites_of(slots)
        blocks = self._select(token_number, positions)
        self._tallies.advance(numbers, computed, computed + scheduled)
        base = None
        if blocks is not None:
            base, captured_sites = self._reserve(blocks)
            mask = mask | captured_sites
        if not mask.any():
            self.steps["plain"] += 1
            return
        self.steps["light"] += 1
        self._expander.write(_padded(slots, blocks, base, batch.padded_tokens))
        self.program.active.set(mask)

    def end(self) -> None:
        """After the forward pass has been launched: captured rows leave, no site stays active."""
        self.program.active.clear()
        pending, self._pending = self._pending, None
        if pending is None or self._outlet is None:
            return
        rows = self.program.ring[pending.region.start : pending.region.end]
        fence = self._outlet.send_rows(pending.head, rows)
        if fence is not None:
            self._ring.leaves(pending.region, fence)

    def close(self) -> None:
        """Sends what has been handed over; nothing more may come."""
        if self._outlet is not None:
            self._outlet.close()

    def _install(self, request_id: str, plan: Plan) -> None:
        sites = self.program.add_row.shape[0]
        named = [site for a in plan.additions for site, _ in a.rows]
        named += [site for c in plan.captures for site in c.sites]
        if any(not 0 <= site < sites for site in named):
            raise BankError(f"the plan names a site that is not one of the model's {sites}")
        if plan.effort() > MAX_EFFORT:
            raise BankError(f"the plan is too fragmented: {plan.effort()} is over {MAX_EFFORT}")
        pieces = plan.pieces()
        slots = self.bank.acquire([combination for _, combination in pieces], self.vectors)
        number = self._new_number()
        if any(slots):
            starts = [start for start, _ in pieces]
            self._slots.put(number, list(zip(starts, slots, strict=True)))
        classes: list[int] = []
        if plan.captures and self._outlet is not None:
            cuts = segment(tuple(c.spans for c in plan.captures))
            sets = [self._captured_by(plan, active) for _, active in cuts]
            classes = self._capture_classes.acquire(sets)
            starts = [start for start, _ in cuts]
            self._classes.put(number, list(zip(starts, classes, strict=True)))
        self._tallies.start(number)
        self._held[request_id] = _Held(plan, number, tuple(slots), tuple(classes))
        self._last_ids = ()

    def _new_number(self) -> int:
        if self._numbers_free:
            return self._numbers_free.pop()
        self._numbers_made += 1
        self._tallies.make_room(self._numbers_made + 1)
        return self._numbers_made

    def _captured_by(self, plan: Plan, members: tuple[int, ...]) -> frozenset[int]:
        return self._sites.intersection(s for i in members for s in plan.captures[i].sites)

    def _numbers(self, request_ids: Sequence[str]) -> Int64:
        if list(request_ids) != self._last_ids:
            held = self._held
            self._last_ids = list(request_ids)
            self._last_numbers = np.array(
                [held[i].number if i in held else 0 for i in request_ids], np.int64
            )
        return self._last_numbers

    def _select(self, numbers: Int64, positions: Int64) -> Blocks | None:
        if not len(self._classes):
            return None
        classes = self._classes.lookup(numbers, positions)
        classes = np.where(positions >= self._tallies.computed_end[numbers], classes, 0)
        if not classes.any():
            return None
        return cut_blocks(numbers, classes, positions)

    def _reserve(
        self, blocks: Blocks
    ) -> tuple[npt.NDArray[np.int32] | None, npt.NDArray[np.bool_]]:
        offsets, rows, total = place(blocks, self._capture_classes.ranks, self._room())
        captured = offsets >= 0
        fits: npt.NDArray[np.bool_] = np.logical_or.reduce(captured, axis=1)
        sites: npt.NDArray[np.bool_] = np.logical_or.reduce(captured, axis=0)
        if not fits.all():
            self._tallies.lose(blocks, ~fits, self._capture_classes.ranks)
            self.lost_rows += int(rows[~fits].sum())
        self.captured_rows += total
        if not total:
            return None, sites
        region = self._ring.reserve(total)
        classes, which = np.unique(blocks.sites_class[fits], return_inverse=True)
        head = RowsHead(
            rank=self._rank,
            dtype=str(self.program.ring.dtype).removeprefix("torch."),
            width=self.program.ring.shape[1],
            classes=[self._sites_of_class(number) for number in classes.tolist()],
            number=_int64(blocks.request[fits]),
            which=_int64(which),
            start=_int64(blocks.start[fits]),
            count=_int64(blocks.count[fits]),
        )
        self._pending = _Captured(region, head)
        return np.where(captured, offsets + region.start, 0).astype(np.int32), sites

    def _room(self) -> int:
        if self._outlet is None:
            return self._ring.capacity
        row = self.program.ring.shape[1] * self.program.ring.dtype.itemsize
        return min(self._ring.capacity, self._outlet.free_bytes // row)

    def _sites_of_class(self, number: int) -> list[int]:
        return [int(site) for site in np.flatnonzero(self._capture_classes.ranks[number] >= 0)]

    def _send(self, frame: Frame) -> None:
        if self._outlet is not None:
            self._outlet.send(frame)


def _int64(values: npt.NDArray[np.integer]) -> bytes:
    return values.astype("<i8").tobytes()


def _padded(
    slots: npt.NDArray[np.int32],
    blocks: Blocks | None,
    base: npt.NDArray[np.int32] | None,
    tokens: int,
) -> Compact:
    missing = tokens - len(slots)
    nothing = np.zeros(len(slots), np.int32)
    block = nothing if blocks is None or base is None else blocks.token_block
    order = nothing if blocks is None or base is None else blocks.token_order
    if missing > 0:
        slots, block, order = (np.pad(one, (0, missing)) for one in (slots, block, order))
    return Compact(slots, block, order, base)
