"""What a worker does for the requests that have a plan, step by step.

Invariant: nothing that a client sends can raise here. A plan that can't be put in force is answered
with an `Installed` that says why, and the server fails that request before a token of it is seen.
What a request costs beside its tables is little, and the same for all.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from rheostat_engine.acts import OPEN_END
from rheostat_engine.core.buffers import Buffers
from rheostat_engine.core.capture_sets import Selected
from rheostat_engine.core.captures import Captures
from rheostat_engine.core.delivery import Frame
from rheostat_engine.core.expand import Compact, Expander
from rheostat_engine.core.outlet import Outlet
from rheostat_engine.core.places import Places
from rheostat_engine.core.preparing import Preparations
from rheostat_engine.core.segments import Int64
from rheostat_engine.core.steering import Placed, Steering
from rheostat_engine.core.tallies import Tallies
from rheostat_engine.core.vectors import BankError
from rheostat_engine.events import AttachedHead, Head, InstalledHead, ReleasedHead
from rheostat_engine.plan import Sealed, name_of, read
from rheostat_engine.tables import STEP_EFFORT

_LOG = logging.getLogger(__name__)

_REQUEST_EFFORT = 20
"""What a change of a request costs beside its table."""


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
    input_ids: torch.Tensor
    """[padded_tokens or more] int32, on the device."""


class Change(NamedTuple):
    """What is to be captured of a request from its next step on."""

    number: int
    """Which change, as the server numbers them; a later one takes the place of one that waits."""
    wire: object
    """`Plan.to_wire` of a plan with the captures."""
    not_before: int = 0
    """Position before which nothing changes."""


class Amended(NamedTuple):
    """What became of a change of a running request."""

    first: int
    """First position that it acts on; -1: the request isn't here."""
    error: str
    """Why the change can't be put in force; empty if it is."""


@dataclass
class _Held:
    name: str
    number: int
    placed: Placed
    selected: Selected


class _Leaving(NamedTuple):
    held: _Held
    head: ReleasedHead


class SiteRuntime:
    """Plans in force on this worker, and the step at hand."""

    def __init__(
        self,
        *,
        buffers: Buffers,
        steering: Steering,
        captures: Captures | None,
        expander: Expander,
        outlet: Outlet | None,
        rank: int,
        places: Places,
        sites: frozenset[int],
        name_of: Callable[[str], str],
    ) -> None:
        """Joins the parts.

        Args:
            buffers: the buffers that the sites read.
            steering: acts in force.
            captures: captures in force; None on a rank that doesn't report.
            expander: writes the step's instructions.
            outlet: where events go; None on a rank that doesn't report.
            rank: this worker's rank.
            places: where the tables keep each site.
            sites: the places of those that lie in this rank's part of the model.
            name_of: the server's name of a request, from vLLM's id.
        """
        self.preparations = Preparations(steering, captures)
        self.buffers = buffers
        self.steering = steering
        self.captures = captures
        self.steps: dict[str, int] = {"plain": 0, "active": 0}
        self._expander = expander
        self._outlet = outlet
        self._rank = rank
        self._held: dict[str, _Held] = {}
        self._ids: dict[str, str] = {}
        self._places = places
        self._name_of = name_of
        self._changes: dict[str, Change] = {}
        self._looked: Sequence[str] | None = None
        """Request ids of the last batch scanned for pending changes; None forces a scan."""
        self._leaving: list[_Leaving] = []
        self._numbers_free: list[int] = []
        self._numbers_made = 0
        self._present = np.isin(np.arange(buffers.sites), list(sites))
        self._tallies = Tallies()
        self._last_ids: Sequence[str] = ()
        self._last_numbers: Int64 = np.zeros(0, np.int64)

    @property
    def requests(self) -> int:
        """Requests whose plan is in force."""
        return len(self._held)

    def install(self, request_id: str, wire: object, forgone: int = 0) -> None:
        """Puts the plan of a request that is scheduled for the first time in force.

        A request that is already known, because it was preempted, keeps what it has.

        Args:
            request_id: vLLM's id.
            wire: what `Plan.to_wire` made.
            forgone: tokens that it could have had from the prefix cache, but for its captures.
        """
        if request_id in self._held:
            return
        name = name_of(wire)
        if name is None:
            _LOG.error("request %s brought a plan without a name; nobody can be told", request_id)
            return
        problem = ""
        try:
            plan = read(wire)
            held = self._take_up(name, plan.acts, plan.captures, forgone)
        except (BankError, ValueError) as error:
            problem = str(error)
            held = self._take_up(name, None, None, forgone)
        self._enter(request_id, held, problem)

    def amend(self, name: str, wire: object, not_before: int) -> Amended:
        """Changes what a running request does from its next step on.

        Args:
            name: the request's name in its plan.
            wire: `Plan.to_wire` of a plan with the acts that replace those of the request.
            not_before: position before which the change doesn't act.
        """
        held = self._held.get(self._ids.get(name, ""))
        if held is None:
            return Amended(-1, "")
        first = max(int(self._tallies.computed_end[held.number]), not_before)
        try:
            placed = self.steering.place(held.number, read(wire).acts, held.placed, first)
        except (BankError, ValueError) as error:
            return Amended(first, str(error))
        held.placed = placed
        return Amended(first, "")

    def recapture(self, changes: Mapping[str, Change | None]) -> None:
        """Changes what is captured of requests, each from its next step on.

        `AttachedHead` says from which position. One that has no plan is taken up in that step; for
        one that vLLM has not scheduled, the change waits.

        Args:
            changes: by the server's name of the request; None: none waits any more.
        """
        for name, change in changes.items():
            if change is None:
                self._changes.pop(name, None)
            else:
                self._changes[name] = change
        self._looked = None

    def preempt(self, request_id: str) -> None:
        """Notes that a request lost its place and will be computed again."""
        held = self._held.get(request_id)
        if held is not None:
            self._tallies.preemptions[held.number] += 1

    def forget(self, request_id: str) -> None:
        """Frees all that a finished request holds; `settle` says so."""
        if self._changes:
            name = self._name(request_id)
            change = self._changes.pop(name, None)
            if change is not None:
                self._send(AttachedHead(self._rank, 0, name, change.number, OPEN_END, ""))
        held = self._held.pop(request_id, None)
        if held is None:
            return
        self._ids.pop(held.name, None)
        self.steering.remove(held.number, held.placed)
        rows = None
        if self.captures is not None:
            span = self._tallies.span(held.number)
            rows = self.captures.drop(held.number, held.selected, span)
        head = self._tallies.released(
            held.number, held.name, self._rank, rows, measured=held.placed.measured
        )
        self._last_ids = ()
        self._leaving.append(_Leaving(held, head))

    def settle(self) -> None:
        """Says of the requests that were forgotten what was done to them, all in one copy.

        Lets go of a part of what nobody uses any more, too.
        """
        self.steering.arrangements.collect(STEP_EFFORT)
        if not self._leaving:
            return
        leaving, self._leaving = self._leaving, []
        measured = self.steering.take_out([one.held.placed for one in leaving])
        heads = [self._numbered(one.head) for one in leaving]
        self._numbers_free += [one.held.number for one in leaving]
        if self._outlet is None:
            return
        if measured is None:
            for head in heads:
                self._send(head)
            return

        def finish(cells: torch.Tensor) -> Sequence[Head]:
            values, at, done = cells.numpy(), 0, []
            for (held, _), head in zip(leaving, heads, strict=True):
                end = at + sum(run.count for run in held.placed.cells)
                doses = held.placed.read(values[:, at:end])
                done.append(msgspec.structs.replace(head, doses=doses))
                at = end
            return done

        unmeasured = [msgspec.structs.replace(head, measured=False) for head in heads]
        self._outlet.send_measured(measured, finish, unmeasured)

    def _numbered(self, head: ReleasedHead) -> ReleasedHead:
        """A head with the numbers of sites in the place of where the tables keep them."""
        numbers = self._places.numbers
        captured = {int(numbers[place]): rows for place, rows in head.captured.items()}
        return msgspec.structs.replace(head, captured=captured)

    def begin(self, batch: Batch) -> None:
        """Says what the forward pass that comes next does; call `end` after it."""
        if self._changes:
            self._carry_out(batch)
        numbers = self._numbers(batch.request_ids) if self._held else None
        if numbers is None or not numbers.any():
            self.steps["plain"] += 1
            return
        scheduled = batch.scheduled.astype(np.int64)
        computed = batch.computed.astype(np.int64)
        ends = np.cumsum(scheduled)
        token_number = np.repeat(numbers, scheduled)
        positions = np.arange(ends[-1]) + np.repeat(computed - ends + scheduled, scheduled)
        steered = self.steering.lookup(token_number, positions)
        copying = None
        if self.captures is not None:
            copying = self.captures.begin(token_number, positions, self._tallies)
        self._tallies.advance(numbers, computed, computed + scheduled)
        mask = steered.sites if copying is None else steered.sites | copying.sites
        mask = mask & self._present
        if not mask.any():
            self.steps["plain"] += 1
            return
        self.steps["active"] += 1
        captured = (None, None, None) if copying is None else copying.columns
        columns = (steered.slot, steered.cell, steered.rule, *captured)
        self._expander.write(Compact.padded(*columns, tokens=batch.padded_tokens), batch.input_ids)
        self.buffers.active.set(mask)

    def end(self) -> None:
        """After the forward pass has been launched: captured rows leave, no site stays active."""
        self.buffers.active.clear()
        if self.captures is not None:
            self.captures.end()

    def close(self) -> None:
        """Sends what has been handed over; nothing more may come."""
        if self._outlet is not None:
            self._outlet.close()

    def _carry_out(self, batch: Batch) -> None:
        """Carries out changes that wait for requests of a batch, within what a step may cost."""
        if batch.request_ids == self._looked:
            return
        self._looked = list(batch.request_ids)
        spent = 0
        for request_id, computed in zip(self._looked, batch.computed.tolist(), strict=True):
            name = self._name(request_id)
            if name not in self._changes:
                continue
            if spent > STEP_EFFORT:  # the others wait for the next step
                self._looked = None
                return
            spent += self._attach(request_id, self._changes.pop(name), computed)

    def _name(self, request_id: str) -> str:
        held = self._held.get(request_id)
        return self._name_of(request_id) if held is None else held.name

    def _attach(self, request_id: str, change: Change, computed: int) -> int:
        """Carries out a change; what that cost, in units of `effort`."""
        held = self._held.get(request_id)
        if held is None:
            held = self._take_up(self._name(request_id), None, None, forgone=0)
            self._enter(request_id, held, "")
        first = max(int(self._tallies.computed_end[held.number]), computed, change.not_before)
        problem, cost = "", _REQUEST_EFFORT
        try:
            captures = read(change.wire).captures
            if self.captures is not None:
                cost += self.captures.sets.cost(captures)
                span = self._tallies.span(held.number)
                self.captures.put(held.number, captures, held.selected, first=first, computed=span)
        except ValueError as error:
            problem = str(error)
        self._send(AttachedHead(self._rank, held.number, held.name, change.number, first, problem))
        return cost

    def _take_up(
        self, name: str, acts: Sealed | None, captures: Sealed | None, forgone: int
    ) -> _Held:
        number = self._new_number()
        placed, selected = Placed(), Selected()
        try:
            if captures is not None and self.captures is not None:
                selected = self.captures.put(number, captures)
            if acts is not None:
                placed = self.steering.place(number, acts)
        except (BankError, ValueError):
            if self.captures is not None:
                self.captures.drop(number, selected, (0, 0))
            self._numbers_free.append(number)
            raise
        self._tallies.start(number, forgone)
        return _Held(name, number, placed, selected)

    def _enter(self, request_id: str, held: _Held, problem: str) -> None:
        """A request has what it needs, or why not."""
        self._held[request_id] = held
        self._ids[held.name] = request_id
        self._last_ids = ()
        self._send(InstalledHead(self._rank, held.number, held.name, problem))

    def _new_number(self) -> int:
        if self._numbers_free:
            return self._numbers_free.pop()
        self._numbers_made += 1
        self._tallies.make_room(self._numbers_made + 1)
        return self._numbers_made

    def _numbers(self, request_ids: Sequence[str]) -> Int64:
        if list(request_ids) != self._last_ids:
            held = self._held
            self._last_ids = list(request_ids)
            self._last_numbers = np.array(
                [held[i].number if i in held else 0 for i in request_ids], np.int64
            )
        return self._last_numbers

    def _send(self, head: Head) -> None:
        if self._outlet is not None:
            self._outlet.send(Frame(head))
