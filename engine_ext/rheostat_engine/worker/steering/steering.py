"""Acts in force: the steering of each token of each request.

Requests with equal acts share a built table. A request of its own has only dose slots, and variants
under rules about token ids.

Once a request has gains, it has a second table of its present acts, which multiplies them by the
gains; see `gain_states`.

Invariants: a request gets all resources that its acts need, or none, and releases them once. If its
acts are updated, it keeps the old acts for earlier positions, and their dose slots. If the new acts
have the gates of the old ones, in the same order, it keeps the states of the gates. They go on as
if nothing had changed, also if the sample computes earlier positions again.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rheostat_engine.plan.gates import Gate
from rheostat_engine.plan.plan import EncodedTable, Window, steering_of
from rheostat_engine.plan.tables import MAX_PLAN_COST
from rheostat_engine.worker.state.id_allocators import BankError, Exhausted
from rheostat_engine.worker.state.position_functions import (
    Functions,
    Int32,
    Int64,
    Requests,
    Segment,
)
from rheostat_engine.worker.state.site_slots import SiteSlots
from rheostat_engine.worker.steering.bank import Bank
from rheostat_engine.worker.steering.built_tables import BuiltTable, BuiltTables
from rheostat_engine.worker.steering.doses import DoseFields, Doses, Measures, Norms, SlotRange
from rheostat_engine.worker.steering.gain_states import GainedTable, GainedTokens, GainStates
from rheostat_engine.worker.steering.gate_states import GateStates
from rheostat_engine.worker.steering.row_sums import Means
from rheostat_engine.worker.steering.token_rules import TokenRules
from rheostat_engine.worker.steering.vectors import Vectors

_SLOT, _DOSE_SLOT, _RULE = range(3)
_DOSE_SLOTS, _VARIANTS, _GATE_STATES, _GAIN_STATES = range(4)

_NO_VARIANTS: Int32 = np.zeros(0, np.int32)


class Use(NamedTuple):
    """A table that a request uses."""

    built_table: BuiltTable | None
    """None: no acts."""
    dose_slots: SlotRange | None
    """None: nothing is measured, because the request does not want it, or because too few dose
    slots were free."""
    variants: Int32
    """[k]: the first variant of each combination under a rule."""

    @property
    def function(self) -> int:
        """See `BuiltTable.function`."""
        return 0 if self.built_table is None else self.built_table.function


_NOTHING = Use(None, SlotRange(0, 0), _NO_VARIANTS)


class Part(NamedTuple):
    """The acts of a request from a position on."""

    first: int
    """The position."""
    plain: Use
    """Their table."""
    gates: tuple[Gate, ...] = ()
    """Its gates, by number."""
    gate_state: int = 0
    """The state of its first gate; 0: it has none."""
    gained: Use | None = None
    """The same acts with gains; None: they have none."""
    gain_state: int = 0
    """The state of its gains; 0: it has none."""

    @property
    def uses(self) -> Sequence[Use]:
        """Its tables."""
        return (self.plain,) if self.gained is None else (self.plain, self.gained)


class RequestSteering(NamedTuple):
    """The acts of a request, in parts."""

    parts: tuple[Part, ...] = ()
    """In the order in which they came. A later part replaces the others from its position on."""

    @property
    def measured(self) -> bool:
        """Whether every part has dose slots."""
        return all(use.dose_slots is not None for use in self._uses)

    @property
    def dose_slots(self) -> list[SlotRange]:
        """All its dose slots."""
        return [use.dose_slots for use in self._uses if use.dose_slots is not None]

    @property
    def signal_columns(self) -> tuple[int, int]:
        """How many columns of readings and of gates the last part sends; see `Signals`."""
        built = self.parts[-1].plain.built_table if self.parts else None
        if built is None:
            return 0, 0
        signals = built.table.signals
        return signals.readings, len(built.table.gates) if signals.openness else 0

    @property
    def plan_cost(self) -> int:
        """The cost of its tables; see `plan.tables`."""
        return sum(use.built_table.table.plan_cost for use in self._uses if use.built_table)

    @property
    def _uses(self) -> Iterator[Use]:
        return (use for part in self.parts for use in part.uses)

    @property
    def measurements(self) -> Iterator[tuple[Measures, int, int]]:
        """The measurements of its dose slots: index of the first act, and number of slots."""
        first_act = 0
        for part in self.parts:
            for built_table, dose_slots, _ in part.uses:
                if built_table is not None and dose_slots is not None and dose_slots.count:
                    yield built_table.measures, first_act, dose_slots.count
            if part.plain.built_table is not None:
                first_act += len(part.plain.built_table.table.acts)


def read_doses(
    measured: npt.NDArray[np.float32], requests: Sequence[RequestSteering]
) -> list[list[DoseFields]]:
    """Reads the dose slots of requests, as fields of `Dose`s, ascending.

    An act with gains has two at a site: one of the tokens whose gains are all 1, and one of the
    other tokens.

    Args:
        measured: [sites, slots, 4]: the slots of all requests, in their order.
        requests: the requests.
    """
    doses: list[list[DoseFields]] = [[] for _ in requests]
    several: list[int] = []
    """The indices of requests with several measurements. Their doses are sorted at the end."""
    # Requests with equal acts are read together.
    users: dict[tuple[Measures, int], list[tuple[int, int]]] = {}
    begin = 0
    for index, request in enumerate(requests):
        for number, (measures, first_act, count) in enumerate(request.measurements):
            if number:
                several.append(index)
            users.setdefault((measures, first_act), []).append((index, begin))
            begin += count
    for (measures, first_act), places in users.items():
        read = measures.read(measured, [slot for _, slot in places], first_act)
        for (index, _), own in zip(places, read, strict=True):
            doses[index] += own
    for index in several:
        doses[index].sort()
    return doses


class Instruction(NamedTuple):
    """The instructions for a step's tokens."""

    slot: npt.NDArray[np.int32]
    """[n]; this and the next two as in `Instructions.packed`."""
    dose_slot: npt.NDArray[np.int32]
    """[n]."""
    rule: npt.NDArray[np.int32]
    """[n]."""
    ruled: bool
    """Whether a token is under a rule about token ids."""
    sites: npt.NDArray[np.bool_]
    """[sites]: whether a token may change at the site."""
    gate_states: Int64
    """[n]: see `GateStates.begin`."""
    gated: bool
    """Whether a token's sample has gates."""
    gained: GainedTokens | None
    """The tokens whose gains are not all 1; see `GainStates.write`."""

    @property
    def fixed(self) -> bool:
        """Whether they are the same in a step that repeats this one: no gates, gains or rules."""
        return not self.gated and not self.ruled and self.gained is None


class UpdateResult(NamedTuple):
    """The result of updating the steering of a running request."""

    first: int
    """First updated position; -1: this worker has no such request."""
    error: str
    """Why the update failed; empty if it did not."""


class _CachedInstruction(NamedTuple):
    """The instructions of a step, cached for the steps that repeat it."""

    instruction: Instruction
    steps: int
    """The number of further steps for which they are valid."""
    changes: int
    """`Requests.changes` at the lookup. The instructions are invalid once it differs."""


class Steering:
    """The acts of all requests."""

    def __init__(
        self,
        bank: Bank,
        rules: TokenRules,
        doses: Doses,
        gates: GateStates,
        gains: GainStates,
        site_slots: SiteSlots,
    ) -> None:
        """No acts are in force."""
        self.gates = gates
        self.gains = gains
        self.bank = bank
        self.rules = rules
        self._doses = doses
        self._vectors: dict[bytes, npt.NDArray[np.float32]] = {}
        self._norms: dict[bytes, npt.NDArray[np.float32]] = {}
        self.vectors: Vectors = MappingProxyType(self._vectors)
        """The loaded vectors; a live view."""
        self._functions = Functions(columns=3)
        self.built_tables = BuiltTables(
            bank, rules, self._functions, site_slots, self._vectors, self._norms
        )
        self._requests = Requests(self._functions, bases=4)
        self._cached: _CachedInstruction | None = None
        self._variants: dict[int, Int32] = {}
        """By request number: the first variants of all its parts, one after the other."""

    def load(self, vectors: Vectors, norms: Norms) -> None:
        """Stores vectors and the norms of their rows, by digest."""
        self._vectors |= vectors
        self._norms |= norms

    def drop(self, digests: Sequence[bytes]) -> None:
        """Drops vectors. Rows that were made of them stay as long as their requests."""
        for digest in digests:
            self._vectors.pop(digest, None)
            self._norms.pop(digest, None)

    def set_acts(
        self,
        number: int,
        acts: EncodedTable | None,
        before: RequestSteering | None = None,
        first: int = 0,
        gates: tuple[Gate, ...] = (),
        *,
        measured: bool = True,
    ) -> RequestSteering:
        """Puts acts in force.

        Args:
            number: the request's number.
            acts: its acts; None if it has none.
            before: the request's present acts, which these acts replace; None if it has none.
            first: the position from which on these acts replace them.
            gates: the gates of the acts, with all their numbers.
            measured: whether their changes are measured, if those of the present acts are.

        Raises:
            BankError, ValueError: the acts can't be put in force; nothing has changed then.
        """
        old = before or RequestSteering()
        if acts is None:
            part = Part(first, _NOTHING)
        else:
            part = self._part(acts, gates, first, old, measured=measured and old.measured)
        applied = RequestSteering((*old.parts, part))
        self._put(number, applied)
        return applied

    def make_gains(
        self, number: int, acts: EncodedTable, applied: RequestSteering
    ) -> RequestSteering:
        """Gives the present acts of a request gains, which are 1 until `set_gains`.

        Args:
            number: the request's number.
            acts: its present acts, with gains.
            applied: all its acts.

        Raises:
            BankError, ValueError: they can't have gains; nothing has changed then.
        """
        *earlier, part = applied.parts or (Part(0, _NOTHING),)
        if part.gained is not None:
            return applied
        plain, table = part.plain.built_table, steering_of(acts)
        if plain is None or len(table.acts) != len(plain.table.acts):
            raise ValueError("the acts with gains are not those of the request")
        built = self.built_tables.use(acts)
        gained, _ = self._take(built, None, applied, measured=applied.measured)
        state = self.gains.acquire(table.gains)
        applied = RequestSteering((*earlier, part._replace(gained=gained, gain_state=state)))
        self._put(number, applied)
        return applied

    def set_gains(self, applied: RequestSteering, first: int, gains: Mapping[int, float]) -> int:
        """Changes the gains of a request's present acts from a position on.

        Args:
            applied: all its acts.
            first: the position, from which on nothing is computed yet.
            gains: by index.

        Returns:
            The first position that changes.
        """
        part = applied.parts[-1] if applied.parts else Part(0, _NOTHING)
        first = max(first, part.first)
        if part.gain_state:
            self.gains.set(part.gain_state, first, gains)
        return first

    def set_windowed_acts(
        self, number: int, acts: EncodedTable | None, window: Window, outside: EncodedTable | None
    ) -> RequestSteering:
        """Puts the acts of a new request in force, some of which have a window.

        Args:
            number: the request's number.
            acts: its acts within the window; None if it has none.
            window: the window.
            outside: its acts outside of it; None if it has none.

        Raises:
            BankError, ValueError: the acts can't be put in force; nothing has changed then.
        """
        parts: list[Part] = []
        try:
            for first, table in ((0, outside), (window.start, acts), (window.end, outside)):
                if table is not None or parts:  # most requests have no acts outside
                    parts.append(Part(first, self._windowed_use(table, parts)))
            applied = RequestSteering(tuple(parts))
            if outside is not None and applied.plan_cost > MAX_PLAN_COST:
                raise ValueError("the request has been changed too often")
        except (BankError, ValueError):
            self._release(RequestSteering(tuple(parts)))
            raise
        elsewhere = 0 if outside is None else parts[0].plain.function
        inside = 0 if acts is None else parts[-2].plain.function
        if elsewhere or inside:
            self._requests.put_window(number, inside, elsewhere, window.start, window.end)
        return applied

    def remove(self, number: int, applied: RequestSteering) -> None:
        """Takes a request's acts out of force; its dose slots stay until `take_out`."""
        self._requests.drop(number)
        self._variants.pop(number, None)
        self._release(applied)

    def _release(self, applied: RequestSteering) -> None:
        for state, gates in {part.gate_state: part.gates for part in applied.parts}.items():
            if state:
                self.gates.release(state)
                self.bank.programs.release_gates(gates)
        for part in applied.parts:
            self.gains.release(part.gain_state)
            for use in part.uses:  # the dose slots stay
                if use.built_table is not None:
                    self.rules.remove_variants(use.variants)
                    self.built_tables.release(use.built_table)

    def take_out(self, requests: Sequence[RequestSteering]) -> torch.Tensor | None:
        """Takes the dose slots of requests that have ended, [sites, slots, 4], in their order."""
        return self._doses.take_out([slots for request in requests for slots in request.dose_slots])

    @property
    def steps_alike(self) -> int:
        """How many more repeated steps have the instructions of the last step. 0 may be too low."""
        return 0 if self._cached is None else self._cached.steps

    def lookup(self, numbers: Int64, positions: Int64, *, repeated: bool = False) -> Instruction:
        """Looks up the instructions for each token of a step; see `Requests.lookup`.

        Rows and programs that they need are copied to the device. If the step is `repeated` (see
        `StepTokens`), the result may be the same object as in the last step.
        """
        cached, self._cached = self._cached, None
        if repeated and not len(self.gains):
            if cached is not None and cached.steps and cached.changes == self._requests.changes:
                self._cached = cached._replace(steps=cached.steps - 1)
                return cached.instruction
            instruction = self._look_up(numbers, positions)
            steps = self._requests.steps_alike(numbers, positions)
            self._cached = _CachedInstruction(instruction, steps, self._requests.changes)
            return instruction
        return self._look_up(numbers, positions)

    def _look_up(self, numbers: Int64, positions: Int64) -> Instruction:
        self.bank.flush()
        functions, bases = self._requests.find(numbers, positions)
        gained = None
        if len(self.gains):
            own = bases[:, _DOSE_SLOTS], bases[:, _VARIANTS]
            gained = self.gains.choose(bases[:, _GAIN_STATES], positions, functions, own)
        values = self._functions.lookup(functions, positions)
        slot, rule = values[:, _SLOT], values[:, _RULE]
        dose_slots = bases[:, _DOSE_SLOTS]
        measured = (values[:, _DOSE_SLOT] > 0) & (dose_slots > 0)
        dose_slot = np.where(measured, dose_slots + values[:, _DOSE_SLOT] - 1, 0).astype(np.int32)
        gate_states = bases[:, _GATE_STATES]
        gated = bool(gate_states.any())
        ruled = np.flatnonzero(rule)
        any_ruled, used = len(ruled) > 0, slot
        if any_ruled:
            # Then the slot is the number of a combination, whose variants are the request's.
            wanted = bases[ruled, _VARIANTS] + slot[ruled]
            names, at, which = np.unique(
                (numbers[ruled] << 32) + wanted, return_index=True, return_inverse=True
            )
            starts = [int(self._variants[n >> 32][n & 0xFFFFFFFF]) for n in names.tolist()]
            slot[ruled] = np.array(starts)[which]
            variants = [
                self.rules.slots[start : start + self.rules.count(number)]
                for start, number in zip(starts, rule[ruled[at]].tolist(), strict=True)
            ]
            used = np.concatenate([np.where(rule == 0, slot, 0), *variants])
        sites = self.bank.sites_of(used)
        return Instruction(slot, dose_slot, rule, any_ruled, sites, gate_states, gated, gained)

    def _part(
        self,
        acts: EncodedTable,
        gates: tuple[Gate, ...],
        first: int,
        old: RequestSteering,
        *,
        measured: bool,
    ) -> Part:
        """Takes the resources that acts need."""
        last = old.parts[-1] if old.parts else Part(0, _NOTHING)
        before, table = last.plain.built_table, steering_of(acts)
        if len(gates) != len(table.gates) or not all(map(Gate.has_shape_of, gates, table.gates)):
            raise ValueError("this is no plan: its gates are not those of its acts")
        same = before is not None and (last.gates, before.table.means) == (gates, table.means)
        kept = last.gate_state if same else 0
        built = self.built_tables.use(acts)
        use, taken = self._take(built, None if kept else gates, old, measured=measured)
        return Part(first, use, gates, kept or taken)

    def _windowed_use(self, acts: EncodedTable | None, before: Sequence[Part]) -> Use:
        """Takes the resources of acts with a window; `before` are the parts before them."""
        if acts is None:
            return _NOTHING
        built_table = self.built_tables.use(acts)
        if built_table.windowed:  # it was built and checked for an earlier request
            return Use(built_table, None, _NO_VARIANTS)
        old = RequestSteering(tuple(before))
        use, state = self._take(built_table, (), old, measured=False)
        if state or built_table.table.gates or len(use.variants):
            self._release(RequestSteering((Part(0, use, (), state),)))
            raise ValueError("gated acts, and acts under rules, have no window")
        built_table.windowed = True
        return use

    def _take(
        self,
        built_table: BuiltTable,
        gates: tuple[Gate, ...] | None,
        old: RequestSteering,
        *,
        measured: bool,
    ) -> tuple[Use, int]:
        """Takes the resources that a table needs, beside its use, which is counted already.

        If it raises, it ends the use.

        Args:
            built_table: the table.
            gates: its gates, which get states; None: it has them already.
            old: all acts of the request so far.
            measured: whether it gets dose slots.

        Returns:
            The use, and the state of the first gate.
        """
        table, gate_state = built_table.table, 0
        try:
            if old.plan_cost + table.plan_cost > MAX_PLAN_COST:
                raise ValueError("the request has been changed too often")
            self.built_tables.build(built_table)
            ruled = built_table.ruled
            if len(ruled.slots) > self.rules.free_intervals:
                raise Exhausted("every interval that follows a rule about token ids is in use")
            if gates is not None:
                gate_state = self._take_states(built_table, gates)
        except (BankError, ValueError):
            self.built_tables.release(built_table)
            raise
        self.gates.use_columns(table.columns)
        count = built_table.measures.dose_slots
        dose_slots = self._doses.acquire(count, old.dose_slots) if measured else None
        variants = _NO_VARIANTS
        if len(ruled.slots):
            start = dose_slots.start if dose_slots is not None else 0
            at = np.where((ruled.dose_slots > 0) & (start > 0), start + ruled.dose_slots - 1, 0)
            variants = self.rules.add_variants(ruled.slots, at.astype(np.int32))
        return Use(built_table, dose_slots, variants), gate_state

    def _take_states(self, built_table: BuiltTable, gates: tuple[Gate, ...]) -> int:
        """Takes a request's gates and sums of rows; returns the first state, or 0 for neither."""
        table, means = built_table.table, None
        if table.means:
            means = Means(len(table.means), -built_table.means_code, table.mean_at)
        rows = self.bank.programs.use_gates(gates)
        try:
            return self.gates.acquire(rows, gates, means)
        except Exhausted:
            self.bank.programs.release_gates(gates)
            raise

    def _put(self, number: int, applied: RequestSteering) -> None:
        segments = [Segment(0, 0, (0, 0, 0, 0))]
        variants: list[Int32] = []
        count = 0
        for part in applied.parts:
            while segments and segments[-1].first >= part.first:
                segments.pop()
            tables = []
            for use in part.uses:
                start = use.dose_slots.start if use.dose_slots is not None else 0
                tables.append(GainedTable(use.function, start, count))
                variants.append(use.variants)
                count += len(use.variants)
            plain, *gained = tables
            for table in gained:
                self.gains.set_table(part.gain_state, table)
            states = part.gate_state, part.gain_state
            segments.append(Segment(part.first, plain.function, (*plain[1:], *states)))
        if count:
            self._variants[number] = np.concatenate(variants)
        if any(segment.function or segment.bases[_GATE_STATES] for segment in segments):
            self._requests.put(number, segments)
        else:
            self._requests.drop(number)
