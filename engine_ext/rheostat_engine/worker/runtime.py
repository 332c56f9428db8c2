"""The requests of a worker with a plan, and their part in each step.

Invariants: no request of a client can raise here. If a plan can't be applied, the worker reports
`Installed` with an error, and the server fails the request before its first token. The cost of a
request without its tables is small and constant.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch

from rheostat_engine.channel.events import (
    Attached,
    AttachedHead,
    ControllerDisabled,
    ControllerDisabledHead,
    Dose,
    Gained,
    GainsHead,
    Head,
    Installed,
    InstalledHead,
    Released,
    ReleasedHead,
)
from rheostat_engine.plan.acts import OPEN_END
from rheostat_engine.plan.gains import GainsUpdate
from rheostat_engine.plan.plan import ReceivedPlan, SignalsWait, read_plan, read_request_id
from rheostat_engine.plan.tables import REQUEST_COST, STEP_COST
from rheostat_engine.worker.capture.capture_sets import RequestCaptures
from rheostat_engine.worker.capture.captures import Captures, CapturesUpdate, StepCopies
from rheostat_engine.worker.capture.request_progress import Ended, RequestProgress
from rheostat_engine.worker.controllers import ControllerHost, Share, StepControllers
from rheostat_engine.worker.expander import Expander
from rheostat_engine.worker.gate_decisions import GateDecisions
from rheostat_engine.worker.instructions import COLUMNS
from rheostat_engine.worker.preparations import Preparations
from rheostat_engine.worker.repeated_steps import RepeatedSteps
from rheostat_engine.worker.signals import StepSignals
from rheostat_engine.worker.state.buffers import Buffers
from rheostat_engine.worker.state.id_allocators import BankError
from rheostat_engine.worker.state.position_functions import Int64
from rheostat_engine.worker.state.site_slots import SiteSlots
from rheostat_engine.worker.steering.steering import (
    Instruction,
    RequestSteering,
    Steering,
    UpdateResult,
    read_doses,
)
from rheostat_engine.worker.step_tokens import Batch, TokensOfSteps
from rheostat_engine.worker.transport.event_sender import Frame
from rheostat_engine.worker.transport.row_sender import RowSender

_LOG = logging.getLogger(__name__)


@dataclass
class _Request:
    name: str
    number: int
    steering: RequestSteering
    captures: RequestCaptures
    signals_wait: SignalsWait
    """See `Plan.signals_wait`."""


class _Written(NamedTuple):
    """The instructions of the last step."""

    steered: Instruction
    base: npt.NDArray[np.int32] | None
    """`StepCopies.base`; None if nothing was captured."""
    tokens: int
    """The number of tokens, including padding."""
    mask: npt.NDArray[np.bool_]
    """[sites]: whether a site steers or captures."""
    active: bool
    """Whether any site does."""


class SiteRuntime:
    """The plans of this worker's running requests, and the current step."""

    def __init__(
        self,
        *,
        buffers: Buffers,
        steering: Steering,
        captures: Captures | None,
        expander: Expander,
        row_sender: RowSender | None,
        rank: int,
        site_slots: SiteSlots,
        sites: frozenset[int],
        server_request_id: Callable[[str], str],
        controllers: Mapping[str, ControllerHost] | None = None,
        share: Share = lambda decision: decision,
    ) -> None:
        """`captures`, `row_sender` and `controllers` are None on a rank that doesn't report.

        `sites` are the slots of the sites in this rank's part of the model. `server_request_id`
        returns the server's id of a request from vLLM's id. `share` sends the decisions of
        controllers to the other ranks.
        """
        self.preparations = Preparations(steering, captures)
        self.buffers = buffers
        self.steering = steering
        self.captures = captures
        self._expander = expander
        self._row_sender = row_sender
        self._rank = rank
        self._requests: dict[str, _Request] = {}
        self._ids: dict[str, str] = {}
        self._server_request_id = server_request_id
        self._updates: dict[str, CapturesUpdate] = {}
        self._scanned: Sequence[str] | None = None
        """Request ids of the last batch scanned for pending updates; None forces a scan."""
        self._installed: list[Head] = []
        """Reports of added requests, which are sent together."""
        self._gained: list[Gained] = []
        """Reports of changed gains, which are sent together."""
        self._removed: list[tuple[Ended, RequestSteering]] = []
        """The removed requests, until `send_released`."""
        self._numbers_free: list[int] = []
        self._numbers_made = 0
        self._present = np.isin(np.arange(buffers.sites), list(sites))
        self._progress = RequestProgress(site_slots.numbers)
        self._signals = StepSignals(buffers.gates, row_sender, rank)
        self.decisions = GateDecisions(buffers.gates)
        hosts = (controllers or {}) if row_sender is not None else None
        self.controllers = StepControllers(buffers.gates, hosts, share, steering.gains.values)
        self._controlled: dict[int, str] = {}
        """The names of the requests with a controller, by number."""
        self._tokens = TokensOfSteps()
        self._repeats: RepeatedSteps | None = None
        self._repeating = False
        """Whether the current step was recognized as a repetition."""
        self._written: _Written | None = None
        self._gated: Instruction | None = None
        """The instructions of the last step; None if `GateStates.begin` was not called for it."""
        self._last_ids: Sequence[str] = ()
        self._last_numbers: Int64 = np.zeros(0, np.int64)
        self._any_number = False
        """Whether a request of the last batch has a plan."""

    @property
    def requests(self) -> int:
        """The number of running requests with a plan."""
        return len(self._requests)

    def add_request(self, request_id: str, wire: object, cached_tokens_recomputed: int = 0) -> None:
        """Adds a newly scheduled request and applies its plan, which `begin` reports.

        A preempted request exists already.

        Args:
            request_id: vLLM's id.
            wire: `Plan.to_wire`.
            cached_tokens_recomputed: cached tokens that are recomputed for its captures.
        """
        if request_id in self._requests:
            return
        self._record_repeats()
        try:
            self._add(request_id, read_plan(wire), cached_tokens_recomputed)
        except (BankError, ValueError) as error:
            name = read_request_id(wire)
            if name is None:
                _LOG.error(
                    "the plan of request %s has no request id, so its error can't be reported",
                    request_id,
                )
                return
            self._add(request_id, _empty_plan(name), cached_tokens_recomputed, str(error))

    def send_installed(self) -> None:
        """Reports the added requests, in one frame."""
        installed, self._installed = self._installed, []
        if installed and self._row_sender is not None:
            self._row_sender.send(Frame(installed))

    def update_steering(self, name: str, wire: object, not_before: int) -> UpdateResult:
        """Replaces the acts of a running request from its next step on, or makes its gains.

        Args:
            name: the server's id of the request.
            wire: `Plan.to_wire` of a plan with the new acts; or with its present acts, which have
                gains now. These are 1 until `set_gains`.
            not_before: the first position that may change.
        """
        request = self._requests.get(self._ids.get(name, ""))
        if request is None:
            return UpdateResult(-1, "")
        self._record_repeats()
        first = max(int(self._progress.computed_end[request.number]), not_before)
        number, steering = request.number, request.steering
        try:
            plan = read_plan(wire)
            if plan.gained and plan.acts is not None:
                steering = self.steering.make_gains(number, plan.acts, steering)
            else:
                steering = self.steering.set_acts(number, plan.acts, steering, first, plan.gates)
        except (BankError, ValueError) as error:
            return UpdateResult(first, str(error))
        request.steering = steering
        self._signals.put(number, *steering.signal_columns, wait=request.signals_wait)
        return UpdateResult(first, "")

    def set_gains(self, updates: Sequence[GainsUpdate]) -> None:
        """Changes gains of running requests from their next step on. `send_gained` reports it.

        Requests that have ended are ignored.
        """
        self._record_repeats()
        for name, change, not_before, gains in updates:
            request = self._requests.get(self._ids.get(name, ""))
            if request is not None:
                first = max(int(self._progress.computed_end[request.number]), not_before)
                first = self.steering.set_gains(request.steering, first, gains)
                self._gained.append(Gained(name, change, first))

    def send_gained(self) -> None:
        """Reports the changed gains, in one frame.

        `end` calls it, so that the server gets the report just after the signals of the step, and
        can send both in one message.
        """
        if self._gained:
            gained, self._gained = self._gained, []
            self._send(GainsHead(self._rank, gained))

    def update_captures(self, updates: Mapping[str, CapturesUpdate | None]) -> None:
        """Replaces the captures of requests, each from its next step on.

        An `AttachedHead` reports the first updated position. A request without a plan is added in
        that step, or once vLLM no longer computes its tokens again after a preemption. The update
        of a request that vLLM has not scheduled yet stays pending.

        Args:
            updates: updates by the server's request id; None discards a pending update.
        """
        self._record_repeats()
        for name, update in updates.items():
            if update is None:
                self._updates.pop(name, None)
            else:
                self._updates[name] = update
        self._scanned = None

    def preempt(self, request_id: str) -> None:
        """Counts a preemption."""
        request = self._requests.get(request_id)
        if request is not None:
            self._progress.preemptions[request.number] += 1

    def remove_request(self, request_id: str) -> None:
        """Frees the resources of a finished request; `send_released` reports it."""
        self._record_repeats()
        if self._updates:
            name = self._name(request_id)
            update = self._updates.pop(name, None)
            if update is not None:
                self._send(AttachedHead(self._rank, 0, Attached(name, update.number, OPEN_END, "")))
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        number = request.number
        self._ids.pop(request.name, None)
        self._controlled.pop(number, None)
        gains = self.controllers.remove(number, int(self._progress.computed_end[number]))
        self.steering.remove(number, request.steering)
        self._signals.put(number, 0, 0)
        captured = request.captures
        if self.captures is not None and not captured.unused:
            span = self._progress.span(number)
            self.captures.put(number, None, captured, first=span[1], computed=span)
        self._last_ids = ()
        ended = Ended(number, request.name, captured.counted, request.steering.measured, gains)
        self._removed.append((ended, request.steering))

    def send_released(self) -> None:
        """Reports the removed requests, with one copy of all their measurements from the device.

        Also releases a part of the unused tables.
        """
        self.steering.built_tables.end_step(STEP_COST)
        if not self._removed:
            return
        self.send_gained()
        removed, self._removed = self._removed, []
        steered = [steering for _, steering in removed]
        measured = self.steering.take_out(steered)
        reports = self._progress.released([ended for ended, _ in removed])
        numbers = [ended.number for ended, _ in removed]
        self._numbers_free += numbers
        if self._row_sender is None:
            return
        self.send_installed()

        def heads(reports: Iterable[Released]) -> Sequence[Head]:
            return [
                ReleasedHead(self._rank, number, report)
                for number, report in zip(numbers, reports, strict=True)
            ]

        if measured is None:
            self._row_sender.send(Frame(heads(reports)))
            return

        def finish(measured: torch.Tensor) -> Sequence[Head]:
            doses = read_doses(measured.numpy(), steered)
            return heads(
                replace(report, doses=cast("tuple[Dose, ...]", tuple(own)))  # the same when sent
                for report, own in zip(reports, doses, strict=True)
            )

        unmeasured = heads(replace(report, measured=False) for report in reports)
        self._row_sender.send_measured(measured, finish, unmeasured)

    def begin(self, batch: Batch) -> None:
        """Writes the instructions of the next forward pass. Call `end` after the pass."""
        if self._repeats is not None:
            self._repeating = not self.decisions.asked and self._repeats.repeat(batch)
            if self._repeating:  # the device still has all instructions
                self.buffers.active.set(self._repeats.mask)
                self._signals.repeat()
                return
            self._record_repeats()
        if self._updates:
            self._apply_updates(batch)
        self.send_installed()
        numbers = self._numbers(batch.request_ids) if self._requests else None
        if numbers is None or not self._any_number:
            self._gated = None
            self._apply_decisions()
            self.buffers.active.set_none()
            return
        scheduled = batch.scheduled.astype(np.int64)
        computed = batch.computed.astype(np.int64)
        token_number, positions, repeated = self._tokens.find(numbers, computed, scheduled)
        copies = None
        if self.captures is not None:
            copies = self.captures.begin(token_number, positions, self._progress, repeated=repeated)
        # It may wait for controllers, so all that does not depend on gains comes before.
        self._apply_decisions()
        steered = self.steering.lookup(token_number, positions, repeated=repeated)
        signals = self._signals.begin(
            numbers, computed, scheduled, self._progress, repeated=repeated
        )
        controlled = self.controllers.begin(numbers, computed, scheduled)
        self._progress.advance(numbers, computed, computed + scheduled, repeated=repeated)
        if signals or controlled or steered.gated:
            # `lookup` returns the same object only for a step that repeats the last one. But a rule
            # chooses programs by token ids, and these are other ids in each step.
            self.steering.gates.begin(
                steered.gate_states,
                token_number,
                positions,
                repeated=steered is self._gated and not steered.ruled,
            )
            self._gated = steered
            self.decisions.begin(batch, steered.gate_states)
        else:
            self._gated = None
        if steered.gained is not None:
            self.steering.gains.write(steered.gained)
        self._write(steered, copies, batch)
        if repeated and steered.fixed and copies is None and self.buffers.active.key:
            self._store_step(batch)

    def _store_step(self, batch: Batch) -> None:
        """Stores a step that repeats the last one, if the next ones need no other preparation."""
        mask, steps = self.buffers.active.mask, self.steering.steps_alike
        idle = not self._updates and not len(self.controllers) and self._signals.repeatable
        if steps and idle and (self.captures is None or self.captures.idle):
            self._repeats = RepeatedSteps(batch, self._last_numbers, mask, steps)

    def _record_repeats(self) -> None:
        """Records repeated steps, before anything reads their progress or changes what they do."""
        repeats, self._repeats = self._repeats, None
        if repeats is not None and repeats.steps:
            start, end = repeats.end - repeats.steps, repeats.end
            self._progress.advance(repeats.numbers, start, end, repeated=True)
            self._tokens.forget()

    def _write(self, steered: Instruction, copies: StepCopies | None, batch: Batch) -> None:
        """Writes the instructions of a step, or reuses those of the last step if they are equal."""
        base = None if copies is None else copies.base
        written = self._written
        again = (
            written is not None
            and written.steered is steered
            and written.base is base
            and written.tokens == batch.padded_tokens
        )
        if written is None or not again:
            mask = steered.sites if copies is None else steered.sites | copies.sites
            mask = mask & self._present
            written = _Written(steered, base, batch.padded_tokens, mask, bool(mask.any()))
            self._written = written
        if not written.active:
            self.buffers.active.set_none()
            return
        first_row = 0 if copies is None else copies.first_row
        if again:
            self._expander.write_again(first_row, batch.input_ids)
        else:
            columns = [steered.slot, steered.dose_slot, steered.rule]
            if copies is not None:
                columns += copies.blocks.token_block, copies.blocks.token_order
            padded = np.zeros((COLUMNS, batch.padded_tokens), np.int32)
            for row, column in zip(padded, columns, strict=False):  # the others stay 0
                row[: len(column)] = column
            step = self._expander.instructions(padded, base, first_row, batch.input_ids)
            self._expander.write(step)
        self.buffers.active.set(written.mask)

    def end(self) -> None:
        """Deactivates all sites and sends captured rows, once the forward pass was launched."""
        self.buffers.active.clear()
        if self._repeating:
            self._repeating = False
            self._signals.end_repeated()
            return
        self.steering.gates.end()
        self.decisions.end()
        self._signals.end()
        self.send_gained()
        self.controllers.end()
        if self.captures is not None:
            self.captures.end()

    def close(self) -> None:
        """Sends the queued rows and events, then stops."""
        if self._row_sender is not None:
            self._row_sender.close()

    def _apply_updates(self, batch: Batch) -> None:
        """Applies pending updates to requests of a batch, up to about `STEP_COST`."""
        if batch.request_ids == self._scanned:
            return
        self._scanned = ids = list(batch.request_ids)
        spent = 0
        for request_id, start, count in zip(ids, batch.computed, batch.scheduled, strict=True):
            update = self._updates.get(name := self._name(request_id))
            if update is None:
                continue
            known = request_id in self._requests
            recomputes = count > 1 and update.not_before > 0 and not known
            if recomputes or spent > STEP_COST:  # a later step applies it
                self._scanned = None
            else:
                spent += self._apply(request_id, self._updates.pop(name), int(start))

    def _name(self, request_id: str) -> str:
        request = self._requests.get(request_id)
        return self._server_request_id(request_id) if request is None else request.name

    def _apply(self, request_id: str, update: CapturesUpdate, computed: int) -> int:
        """Applies an update; returns its cost."""
        request = self._requests.get(request_id)
        if request is None:
            request = self._add(request_id, _empty_plan(self._name(request_id)))
        first = max(int(self._progress.computed_end[request.number]), computed, update.not_before)
        problem, cost = "", REQUEST_COST
        try:
            captures = read_plan(update.wire).captures
            if self.captures is not None:
                before, span = self.captures.sets.built, self._progress.span(request.number)
                try:
                    self.captures.put(
                        request.number, captures, request.captures, first=first, computed=span
                    )
                finally:
                    cost += self.captures.sets.built - before
        except ValueError as error:
            problem = str(error)
        attached = Attached(request.name, update.number, first, problem)
        self._send(AttachedHead(self._rank, request.number, attached))
        return cost

    def _add(
        self,
        request_id: str,
        plan: ReceivedPlan,
        cached_tokens_recomputed: int = 0,
        problem: str = "",
    ) -> _Request:
        """Adds a request, whose report stays until `send_installed`.

        Raises:
            BankError, ValueError: its plan can't be applied; nothing has changed then.
        """
        number, control = self._new_number(), plan.control
        steering, captured = RequestSteering(), RequestCaptures()
        try:
            if plan.captures is not None and self.captures is not None:
                captured = self.captures.put(number, plan.captures)
            if plan.window is not None:
                steering = self.steering.set_windowed_acts(
                    number, plan.acts, plan.window, plan.outside
                )
            elif plan.acts is not None:
                steering = self.steering.set_acts(
                    number, plan.acts, gates=plan.gates, measured=plan.measured
                )
            if control is not None:
                self.controllers.check(control)
                steering = self.steering.make_gains(number, control.acts, steering)
                self.controllers.add(number, control, steering.parts[-1].gain_state)
        except (BankError, ValueError):
            if steering.parts:
                self.steering.remove(number, steering)
                self.steering.take_out([steering])
            if self.captures is not None:
                self.captures.put(number, None, captured)
            self._numbers_free.append(number)
            raise
        self._progress.start(number, cached_tokens_recomputed)
        request = _Request(plan.request_id, number, steering, captured, plan.signals_wait)
        self._signals.put(number, *steering.signal_columns, wait=plan.signals_wait)
        self._requests[request_id] = request
        self._ids[request.name] = request_id
        self._last_ids = ()
        self._installed.append(InstalledHead(self._rank, number, Installed(request.name, problem)))
        if control is not None:
            self._controlled[number] = request.name
            reason = self.controllers.disabled.get(control.name)
            if reason is not None:
                self._send_disabled(number, control.name, reason, control.first)
        return request

    def _apply_decisions(self) -> None:
        """Applies what controllers decided about the last step, before the next begins."""
        decisions, disabled = self.controllers.finish()
        for decision in decisions:
            self.steering.gains.set_all(*decision)
        for name, reason, firsts in disabled:
            for number, first in firsts.items():
                self._send_disabled(number, name, reason, first)

    def _send_disabled(self, number: int, name: str, reason: str, first: int) -> None:
        report = ControllerDisabled(self._controlled[number], name, reason, first)
        self._send(ControllerDisabledHead(self._rank, number, report))

    def _new_number(self) -> int:
        if self._numbers_free:
            return self._numbers_free.pop()
        self._numbers_made += 1
        self._progress.make_room(self._numbers_made + 1)
        return self._numbers_made

    def _numbers(self, request_ids: Sequence[str]) -> Int64:
        if list(request_ids) != self._last_ids:
            requests = self._requests
            self._last_ids = list(request_ids)
            self._last_numbers = np.array(
                [requests[i].number if i in requests else 0 for i in request_ids], np.int64
            )
            self._any_number = bool(self._last_numbers.any())
        return self._last_numbers

    def _send(self, head: Head) -> None:
        """Sends a report, after those of added requests."""
        self.send_installed()
        if self._row_sender is not None:
            self._row_sender.send(Frame(head))


def _empty_plan(name: str) -> ReceivedPlan:
    return ReceivedPlan(name, epoch=0, private_from=None, acts=None, captures=None)
