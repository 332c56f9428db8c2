"""Plans: all interventions and captures of one request, and their serialization.

Invariant: a plan reaches the worker with its request (`SamplingParams.extra_args`), so there is no
race between registering and using it. Requests with the same acts or captures share a table, which
is identified by a digest of its content (`tables`).
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Annotated, NamedTuple
from weakref import WeakValueDictionary

import msgspec

from rheostat_engine.cached_property import cached_property
from rheostat_engine.immutable import immutable
from rheostat_engine.plan.acts import Act, Capture
from rheostat_engine.plan.controllers import MAX_CONTROLLED
from rheostat_engine.plan.gate_table import states_of
from rheostat_engine.plan.gates import NO_SIGNALS, Gate, Natural, Signals
from rheostat_engine.plan.needs import Needs, contents_of, needs_of
from rheostat_engine.plan.tables import (
    CaptureNeed,
    CaptureTable,
    SteeringTable,
    capture_table,
    plan_gates,
    steering_table,
)
from rheostat_engine.plan.wire import (
    captures_from,
    captures_to,
    gates_from,
    steering_from,
    steering_to,
)

EXTRA_ARG = "rheostat"
"""The key of the plan in `SamplingParams.extra_args`."""

CACHED_TOKENS_RECOMPUTED_ARG = "rheostat_cached_tokens_recomputed"
"""The key of the number of cached tokens that are recomputed because they are captured."""

_LENGTHS = 64
"""The most prompt lengths for which a plan caches its `CaptureNeed`."""


class SignalsWait(IntEnum):
    """How long the signals of a step may wait in a worker, to be sent with those of later steps."""

    NEVER = 0
    """Not at all: a client, a rule or a watch may react to them."""
    FEW_STEPS = 1
    """A few steps, if each step reads many requests. Nothing in the server reacts to them."""
    MANY_STEPS = 2
    """Many steps. Only summaries use them, and these are sent when the request ends."""


class Window(NamedTuple):
    """The positions to which some of a plan's acts are limited.

    Requests can share a table if their acts differ only in position. The table has the acts of all
    these requests, and each request's window selects its own acts.
    """

    start: Natural
    """First position."""
    end: Natural
    """The position after the last."""
    first_act: Natural
    """Index of the first limited act. The acts before it apply everywhere."""


class EncodedTable(NamedTuple):
    """A serialized table; see `plan.wire`."""

    digest: bytes
    """16 bytes, equal for equal content; the table's key in the workers."""
    wire: bytes

    @classmethod
    def of(cls, wire: bytes) -> "EncodedTable":
        """Adds the digest to the bytes of a table."""
        return cls(hashlib.blake2b(wire, digest_size=16).digest(), wire)


@dataclass(frozen=True, eq=False)
class PackedActs:
    """The table of a plan's acts, computed once and shared by all plans with these acts."""

    acts: tuple[Act, ...]
    signals: Signals = NO_SIGNALS

    @cached_property
    def table(self) -> SteeringTable | None:
        """The table; None if there are no acts.

        Raises:
            PlanTooLarge: see `steering_table`.
        """
        return steering_table(self.acts, self.signals)

    @cached_property
    def encoded(self) -> EncodedTable | None:
        """The serialized table; None if there are no acts."""
        return None if self.table is None else EncodedTable.of(steering_to(self.table))

    @cached_property
    def needs(self) -> Needs:
        """The resources shared with other requests by content, without gates.

        Raises:
            ValueError: the acts can't be combined.
        """
        if self.table is None or self.encoded is None:
            return needs_of(())
        intervals = ("intervals", self.encoded.digest, len(self.table.intervals.starts))
        return needs_of([intervals, *contents_of(self.table)])

    @cached_property
    def gates(self) -> tuple[Gate, ...]:
        """The distinct gates, by their number in the plan."""
        return () if self.table is None else plan_gates(self.acts, self.signals)

    @cached_property
    def encoded_gates(self) -> bytes:
        """The serialized gates; empty if there are none."""
        return msgspec.msgpack.encode(self.gates) if self.gates else b""

    @cached_property
    def gate_needs(self) -> Needs:
        """The gates, as resources shared with other requests by content."""
        return needs_of(("gates", gate, 1) for gate in self.gates)

    def with_gates(
        self, acts: tuple[Act, ...], signals: Signals, gates: Mapping[Gate, Gate]
    ) -> "PackedActs":
        """A copy with other gates, and the same table; see `Plan.with_gates`."""
        packed = PackedActs(acts, signals)
        packed.__dict__.update(
            table=self.table,
            encoded=self.encoded,
            needs=self.needs,
            ruled=self.ruled,
            gate_states=self.gate_states,
            row_sums=self.row_sums,
            gates=tuple([gates[gate] for gate in self.gates]),
        )
        return packed

    def build(self) -> "PackedActs":
        """Builds the table, its bytes and its needs now; returns itself."""
        _ = self.encoded, self.needs, self.ruled
        return self

    @cached_property
    def ruled(self) -> int:
        """Number of clause sets that depend on the token. Each sample needs variants of each."""
        return 0 if self.table is None else self.table.ruled

    @cached_property
    def gate_states(self) -> int:
        """The states of gates that each sample needs, without those that it keeps.

        A sample with sums of rows needs at least one state: sums are found by the first state.
        """
        gates = () if self.table is None else self.table.gates[len(self.signals.kept) :]
        return max(sum(map(states_of, gates)), int(self.row_sums > 0))

    @cached_property
    def row_sums(self) -> int:
        """The sums of rows that each sample needs, without those that it keeps."""
        if self.table is None or self.signals.means_kept:
            return 0
        return len(self.table.means)

    @property
    def plan_cost(self) -> int:
        """The cost of building its table; see `tables`."""
        return 0 if self.table is None else self.table.plan_cost


@dataclass(frozen=True, eq=False)
class PackedCaptures:
    """The table of a plan's captures, computed once and shared by all plans with these captures."""

    captures: tuple[Capture, ...]

    @cached_property
    def table(self) -> CaptureTable | None:
        """The table; None if nothing is captured.

        Raises:
            PlanTooLarge: see `capture_table`.
        """
        return capture_table(self.captures)

    @cached_property
    def encoded(self) -> EncodedTable | None:
        """The serialized table; None if nothing is captured."""
        return None if self.table is None else EncodedTable.of(captures_to(self.table))

    @cached_property
    def needs(self) -> Needs:
        """The resources shared with other requests by content."""
        if self.table is None or self.encoded is None:
            return needs_of(())
        return needs_of([("intervals", self.encoded.digest, len(self.table.intervals.starts))])

    def need(self, *, prompt_len: int, max_step_tokens: int) -> CaptureNeed:
        """The ring rows that one sample needs; see `CaptureTable.need`."""
        if self.table is None:
            return CaptureNeed(0, 0)
        lengths = prompt_len, max_step_tokens
        need = self._needs_by_lengths.get(lengths)
        if need is None:
            need = self.table.need(prompt_len=prompt_len, max_step_tokens=max_step_tokens)
            if len(self._needs_by_lengths) == _LENGTHS:
                self._needs_by_lengths.clear()
            self._needs_by_lengths[lengths] = need
        return need

    @cached_property
    def _needs_by_lengths(self) -> dict[tuple[int, int], CaptureNeed]:
        """By (prompt_len, max_step_tokens): requests with equal captures often come together."""
        return {}

    def build(self) -> "PackedCaptures":
        """Builds the table, its bytes and its needs now; returns itself."""
        _ = self.encoded, self.needs
        return self

    @property
    def plan_cost(self) -> int:
        """The cost of building its table; see `tables`."""
        return 0 if self.table is None else self.table.plan_cost


@dataclass(frozen=True, eq=False)
class Control:
    """That a controller of the workers sets the gains of a request; see `worker.controllers`."""

    name: str
    """The controller's name."""
    acts: PackedActs
    """The acts of the request's plan, with gains."""
    columns: tuple[int, int]
    """[first, end): the columns of readings that it sees."""
    gains: int
    """The number of gains that it sets: 0 up to this are `Act.gain`."""
    first: int
    """The first position that it may change: the number of prompt tokens."""


@immutable()
class Plan:
    """The interventions and captures of one request."""

    request_id: str
    """The server's id of the request, which its events carry."""
    acts: tuple[Act, ...] = ()
    """In the order in which they apply at a site."""
    captures: tuple[Capture, ...] = ()
    """Captures of the stream after all acts. A row selected by several captures is copied once."""
    epoch: int = 0
    """Part of the prefix-cache key of every block with acts; see `BlockKeys`."""
    private_from: int | None = None
    """First position whose KV no other request may reuse; None: all KV may be shared."""
    measured: bool = True
    """Whether the engine measures what the acts change. It costs a worker a fifth of a small
    plan."""
    window: Window | None = None
    """Limits acts to some positions. Only for plans that are not measured, without gates and
    without conditions about token ids. None: no act is limited."""
    signals: Signals = NO_SIGNALS
    """What of the readings and gates leaves the workers. Not for plans with a window."""
    signals_wait: SignalsWait = SignalsWait.NEVER
    """How long its signals may wait in the workers."""
    gained: bool = False
    """Whether an update with this plan does not replace a request's acts, but gives them the gains
    that the acts of the plan have."""
    control: Control | None = None
    """The controller that sets its gains. Not for plans with a window."""
    _acts: PackedActs | None = field(default=None, compare=False, repr=False)
    _outside: PackedActs | None = field(default=None, compare=False, repr=False)
    _captures: PackedCaptures | None = field(default=None, compare=False, repr=False)

    @property
    def touches_kv(self) -> bool:
        """Whether the request's KV differs from the KV of the same tokens without acts."""
        return self.private_from is not None or any(act.acts for act in self.acts)

    @property
    def packed_acts(self) -> PackedActs:
        """The acts with their table; computed anew unless `pack` has stored them."""
        packed = self._acts
        if packed is not None and packed.acts is self.acts and packed.signals is self.signals:
            return packed
        return PackedActs(self.acts, self.signals)

    @property
    def packed_outside(self) -> PackedActs:
        """The acts that apply outside of the window, with their table. None without a window."""
        packed, window = self._outside, self.window
        count = 0 if window is None else window.first_act
        if packed is not None and len(packed.acts) == count:
            return packed
        return PackedActs(self.acts[:count])

    @property
    def packed_captures(self) -> PackedCaptures:
        """The captures with their table; computed anew unless `pack` has stored them."""
        packed = self._captures
        if packed is not None and packed.captures is self.captures:
            return packed
        return PackedCaptures(self.captures)

    @property
    def plan_cost(self) -> int:
        """The cost of building its tables; see `tables`.

        Raises:
            PlanTooLarge: it exceeds a worker's limits.
        """
        return self.packed_captures.plan_cost + sum(acts.plan_cost for acts in self._tables)

    @property
    def needs(self) -> tuple[Needs, ...]:
        """The resources shared with other requests by content.

        Raises:
            ValueError: the acts can't be combined.
        """
        tables = self._tables
        needs = [acts.needs for acts in tables]
        if tables[0].gates:
            needs.append(tables[0].gate_needs)
        return *needs, self.packed_captures.needs

    @property
    def _tables(self) -> list[PackedActs]:
        """All tables of acts. The first has the request's acts."""
        tables = [self.packed_acts]
        if self.window is not None:
            tables.append(self.packed_outside)
        if self.control is not None:
            tables.append(self.control.acts)
        return tables

    def for_request(self, request_id: str, epoch: int, window: Window | None = None) -> "Plan":
        """A copy with another id and epoch, and the same tables.

        Args:
            request_id: the copy's id.
            epoch: the copy's epoch.
            window: the copy's window. Its `first_act` must be that of this plan's window. None: the
                copy has this plan's window.
        """
        return Plan(  # `replace` takes twice as long, and each sample has a copy
            request_id,
            self.acts,
            self.captures,
            epoch,
            self.private_from,
            self.measured,
            self.window if window is None else window,
            self.signals,
            self.signals_wait,
            self.gained,
            self.control,
            self._acts,
            self._outside,
            self._captures,
        )

    def with_gates(self, gates: Mapping[Gate, Gate]) -> "Plan":
        """A copy whose gates compare readings with other numbers, and the same tables.

        Args:
            gates: the new gate of each gate of the plan, with an equal `Gate.shape`. Distinct gates
                must have distinct new gates.
        """
        acts = tuple(
            [act if act.gate is None else act.with_gate(gates[act.gate]) for act in self.acts]
        )
        signals = self.signals.with_gates(gates)
        packed = self.packed_acts.with_gates(acts, signals, gates)
        return replace(self, acts=acts, signals=signals, _acts=packed)

    def with_captures(self, captures: tuple[Capture, ...]) -> "Plan":
        """A copy with other captures. Their table is computed once, on first use."""
        return replace(self, captures=captures, _captures=PackedCaptures(captures))

    def with_captures_of(self, other: "Plan") -> "Plan":
        """A copy with the captures of another plan, and their table."""
        return replace(self, captures=other.captures, _captures=other._captures)

    def pack(self) -> "Plan":
        """A copy with computed tables, which its own copies share. Slow for large plans.

        Raises:
            PlanTooLarge: it exceeds a worker's limits.
            ValueError: its acts can't be combined, or it has a window and may not have one.
        """
        acts, outside = self.packed_acts.build(), self.packed_outside.build()
        if self.window is not None and (
            self.measured or acts.ruled or acts.gate_states or self.signals.any
        ):
            raise ValueError("acts that are measured, gated, or depend on token ids have no window")
        return replace(self, _acts=acts, _outside=outside, _captures=self.packed_captures.build())

    def to_wire(self) -> bytes:
        """Serializes the plan. vLLM passes bytes on without reading or copying them."""
        wire = ReceivedPlan(self.request_id, self.epoch, self.private_from)
        wire.acts, wire.captures = self.packed_acts.encoded, self.packed_captures.encoded
        wire.encoded_gates = self.packed_acts.encoded_gates
        wire.measured, wire.gained = self.measured, self.gained
        wire.signals_wait = self.signals_wait
        control = self.control
        if control is not None and control.acts.encoded is not None:
            wire.control = ReceivedControl(
                control.name, control.acts.encoded, control.columns, control.gains, control.first
            )
        if self.window is not None:
            wire.window = self.window
            wire.outside = self.packed_outside.encoded
        return msgspec.msgpack.encode(wire)


class ReceivedControl(NamedTuple):
    """A `Control` in a worker. Its table is still serialized."""

    name: str
    acts: EncodedTable
    columns: tuple[Natural, Natural]
    gains: Annotated[int, msgspec.Meta(ge=1, le=MAX_CONTROLLED)]
    first: Natural


class _RequestId(msgspec.Struct):
    request_id: str = msgspec.field(name="id")


class ReceivedPlan(_RequestId, omit_defaults=True, dict=True):
    """A plan as the engine's core and workers receive it. Tables and gates are still serialized."""

    epoch: Natural = 0
    private_from: Natural | None = None
    acts: EncodedTable | None = None
    captures: EncodedTable | None = None
    measured: bool = True
    window: Window | None = None
    outside: EncodedTable | None = None
    """The acts outside of the window."""
    gained: bool = False
    control: ReceivedControl | None = None
    signals_wait: SignalsWait = SignalsWait.NEVER
    encoded_gates: bytes = msgspec.field(name="gates", default=b"")

    @cached_property
    def gates(self) -> tuple[Gate, ...]:
        """The gates, with all their numbers, in the order of those of `acts`.

        Raises:
            ValueError: the bytes are no gates.
        """
        return gates_from(self.encoded_gates) if self.encoded_gates else ()


def read_request_id(wire: object) -> str | None:
    """Reads the request's id from the bytes of a plan; None if they can't be parsed."""
    if isinstance(wire, ReceivedPlan):
        return wire.request_id
    if not isinstance(wire, bytes):
        return None
    try:
        return msgspec.msgpack.decode(wire, type=_RequestId).request_id
    except msgspec.MsgspecError:
        return None


def read_plan(wire: object) -> ReceivedPlan:
    """Parses the bytes of `Plan.to_wire`, but not the tables. Returns a `ReceivedPlan` unchanged.

    Raises:
        ValueError: `wire` is no plan; the message names the field.
    """
    if isinstance(wire, ReceivedPlan):
        return wire
    if not isinstance(wire, bytes):
        raise ValueError("this is no plan: it is not made of bytes")
    try:
        plan = msgspec.msgpack.decode(wire, type=ReceivedPlan)
    except msgspec.MsgspecError as error:
        raise ValueError(f"this is no plan: {error}") from error
    window = plan.window
    if window is not None and (plan.measured or not window.start < window.end):
        raise ValueError("this is no plan: its window is empty, or its acts are measured")
    _ = plan.gates  # malformed gates are refused here, not in a step
    return plan


_STEERING: WeakValueDictionary[bytes, SteeringTable] = WeakValueDictionary()
_CAPTURES: WeakValueDictionary[bytes, CaptureTable] = WeakValueDictionary()
"""Parsed tables that are in use, by digest."""


def steering_of(encoded: EncodedTable) -> SteeringTable:
    """Parses a table of acts, unless it is in use already.

    Raises:
        ValueError: the bytes are no table of acts.
    """
    table = _STEERING.get(encoded.digest)
    if table is None:
        table = _STEERING[encoded.digest] = steering_from(encoded.wire)
    return table


def captures_of(encoded: EncodedTable) -> CaptureTable:
    """Parses a table of captures, unless it is in use already.

    Raises:
        ValueError: the bytes are no table of captures.
    """
    table = _CAPTURES.get(encoded.digest)
    if table is None:
        table = _CAPTURES[encoded.digest] = captures_from(encoded.wire)
    return table
