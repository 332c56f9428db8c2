"""What a worker does for the requests that have a plan, step by step.

Invariant: nothing that a client sends can raise here. A plan that can't be put in force is answered
with an `Installed` that says why, and the server fails that request before a token of it is seen.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from rheostat_engine.amend import amend, recapture
from rheostat_engine.core.buffers import Buffers
from rheostat_engine.core.captures import Captures, Copying
from rheostat_engine.core.delivery import Frame
from rheostat_engine.core.doses import Norms, read_doses
from rheostat_engine.core.expand import Compact, Expander
from rheostat_engine.core.outlet import Outlet
from rheostat_engine.core.places import Places
from rheostat_engine.core.segments import Int64
from rheostat_engine.core.steering import Instruction, Placed, Steering
from rheostat_engine.core.tallies import Tallies
from rheostat_engine.core.vectors import BankError
from rheostat_engine.effort import MAX_EFFORT, effort
from rheostat_engine.events import AttachedHead, Head, InstalledHead, ReleasedHead
from rheostat_engine.plan import OPEN_END, Plan

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
    plan: Plan
    number: int
    placed: Placed
    classes: tuple[int, ...]
    norms: Norms


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
        """The batch in which those were last looked for that changes wait for; None: in none."""
        self._leaving: list[_Held] = []
        self._numbers_free: list[int] = []
        self._numbers_made = 0
        self._present = np.isin(np.arange(buffers.sites), list(sites))
        self._tallies = Tallies(sites)
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
        name = Plan.name_of(wire)
        if name is None:
            _LOG.error("request %s brought a plan without a name; nobody can be told", request_id)
            return
        problem = ""
        try:
            held = self._take_up(self._checked(wire), forgone)
        except (BankError, ValueError) as error:
            problem = str(error)
            held = self._take_up(Plan(name), forgone)
        self._held[request_id] = held
        self._ids[name] = request_id
        self._last_ids = ()
        self._send(InstalledHead(self._rank, held.number, name, problem))

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
            acts = self._checked(wire).acts
            plan = amend(held.plan, acts, first)
            if effort(plan) > MAX_EFFORT:
                raise ValueError("the request has been changed too often")
            norms = {**held.norms, **self.steering.norms_of(acts)}
            held.placed = self.steering.place(held.number, plan, held.placed)
        except (BankError, ValueError) as error:
            return Amended(first, str(error))
        held.plan = plan
        held.norms = norms
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
        self._ids.pop(held.plan.request_id, None)
        self.steering.remove(held.number, held.placed)
        if self.captures is not None:
            self.captures.drop(held.number, held.classes)
        self._last_ids = ()
        self._leaving.append(held)

    def settle(self) -> None:
        """Says of the requests that were forgotten what was done to them, all in one copy."""
        if not self._leaving:
            return
        leaving, self._leaving = self._leaving, []
        measured = self.steering.take_out([held.placed for held in leaving])
        heads = [self._released(held) for held in leaving]
        self._numbers_free += [held.number for held in leaving]
        if self._outlet is None:
            return
        if measured is None:
            for head in heads:
                self._send(head)
            return

        def finish(cells: torch.Tensor) -> Sequence[Head]:
            values, at, done = cells.numpy(), 0, []
            for held, head in zip(leaving, heads, strict=True):
                end = at + sum(run.count for run in held.placed.cells)
                doses = read_doses(held.plan.acts, held.placed.cells, values[:, at:end], held.norms)
                done.append(msgspec.structs.replace(head, doses=doses))
                at = end
            return done

        unmeasured = [msgspec.structs.replace(head, measured=False) for head in heads]
        self._outlet.send_measured(measured, finish, unmeasured)

    def _released(self, held: _Held) -> ReleasedHead:
        head = self._tallies.released(
            held.number, held.plan, self._rank, measured=held.placed.measured
        )
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
        self._expander.write(_padded(steered, copying, batch.padded_tokens), batch.input_ids)
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
        """Carries out the changes that wait for requests of a batch, as many as a step may cost."""
        if batch.request_ids == self._looked:
            return
        self._looked = list(batch.request_ids)
        spent = 0
        for request_id, computed in zip(self._looked, batch.computed.tolist(), strict=True):
            name = self._name(request_id)
            if name not in self._changes:
                continue
            if spent > MAX_EFFORT // 2:  # the others wait for the next step
                self._looked = None
                return
            spent += self._attach(request_id, self._changes.pop(name), computed)

    def _name(self, request_id: str) -> str:
        held = self._held.get(request_id)
        return self._name_of(request_id) if held is None else held.plan.request_id

    def _attach(self, request_id: str, change: Change, computed: int) -> int:
        """Carries out a change; its effort, about."""
        held = self._held.get(request_id)
        if held is None:
            name = self._name(request_id)
            held = self._take_up(Plan(name), forgone=0)
            self._held[request_id] = held
            self._ids[name] = request_id
            self._last_ids = ()
            self._send(InstalledHead(self._rank, held.number, name, ""))
        first = max(int(self._tallies.computed_end[held.number]), computed, change.not_before)
        problem, cost = "", MAX_EFFORT
        try:
            new = self._places.placed(Plan.from_wire(change.wire))
            plan = recapture(held.plan, new.captures, first)
            cost = effort(plan)
            if cost > MAX_EFFORT:
                raise ValueError(f"captures are too fragmented: their effort is over {MAX_EFFORT}")
            if self.captures is not None:
                classes = self.captures.put(held.number, plan)
                self.captures.release(held.classes)
                held.classes = classes
            held.plan = plan
        except ValueError as error:
            problem = str(error)
        name = held.plan.request_id
        self._send(AttachedHead(self._rank, held.number, name, change.number, first, problem))
        return cost

    def _checked(self, wire: object) -> Plan:
        plan = self._places.placed(Plan.from_wire(wire))
        if effort(plan) > MAX_EFFORT:
            raise ValueError(f"the plan is too fragmented: its effort is over {MAX_EFFORT}")
        return plan

    def _take_up(self, plan: Plan, forgone: int) -> _Held:
        norms = self.steering.norms_of(plan.acts)
        number = self._new_number()
        try:
            placed = self.steering.place(number, plan)
        except (BankError, ValueError):
            self._numbers_free.append(number)
            raise
        classes = () if self.captures is None else self.captures.put(number, plan)
        self._tallies.start(number, forgone)
        return _Held(plan, number, placed, classes, norms)

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


def _padded(steered: Instruction, copying: Copying | None, tokens: int) -> Compact:
    count = len(steered.slot)
    nothing = np.zeros(count, np.int32)
    slot, cell, rule, block, order = (
        np.pad(column, (0, tokens - count))
        for column in (
            steered.slot,
            steered.cell,
            steered.rule,
            nothing if copying is None else copying.blocks.token_block,
            nothing if copying is None else copying.blocks.token_order,
        )
    )
    return Compact(slot, cell, rule, block, order, None if copying is None else copying.base)
