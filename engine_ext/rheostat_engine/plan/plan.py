"""Plans: everything that the engine does to one request, and the bytes of a plan.

Invariant: a plan reaches the worker with its request (`SamplingParams.extra_args`), so that no plan
is used before it is registered. Its tables are made once for all requests with the same acts or
captures, and are named by a digest of their content (`tables`).
"""

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, NamedTuple
from weakref import WeakValueDictionary

import msgspec

from rheostat_engine.plan.acts import OPEN_END, Act, Capture
from rheostat_engine.plan.needs import Needs, contents_of, needs_of
from rheostat_engine.plan.tables import (
    CaptureNeed,
    CaptureTable,
    SteeringTable,
    capture_table,
    steering_table,
)
from rheostat_engine.plan.wire import captures_from, captures_to, steering_from, steering_to

EXTRA_ARG = "rheostat"
"""The key of the plan in `SamplingParams.extra_args`."""

CACHED_TOKENS_RECOMPUTED_ARG = "rheostat_cached_tokens_recomputed"
"""The key of the number of cached tokens that are computed again because they are captured."""


_LENGTHS = 64
"""Lengths of prompts for which a plan keeps the need of its captures."""


class EncodedTable(NamedTuple):
    """A table as bytes."""

    digest: bytes
    """Its name in the workers: 16 bytes, equal for equal content."""
    wire: bytes
    """Its bytes; see `plan.wire`."""

    @classmethod
    def of(cls, wire: bytes) -> "EncodedTable":
        """The bytes of a table with their digest."""
        return cls(hashlib.blake2b(wire, digest_size=16).digest(), wire)


@dataclass(frozen=True, eq=False)
class PackedActs:
    """The table of a plan's acts, and its bytes. All plans with these acts share it."""

    acts: tuple[Act, ...]
    """The source of the table."""

    @cached_property
    def table(self) -> SteeringTable | None:
        """The table; None if there are no acts.

        Raises:
            PlanTooLarge: see `steering_table`.
        """
        return steering_table(self.acts)

    @cached_property
    def encoded(self) -> EncodedTable | None:
        """The table as bytes; None if there are no acts."""
        return None if self.table is None else EncodedTable.of(steering_to(self.table))

    @cached_property
    def needs(self) -> Needs:
        """The resources that it shares with other requests by content.

        Raises:
            ValueError: it can't be composed.
        """
        if self.table is None or self.encoded is None:
            return needs_of(iter(()))
        intervals = ("intervals", self.encoded.digest, len(self.table.intervals.starts))
        return needs_of(iter([intervals, *contents_of(self.table)]))

    def build(self) -> "PackedActs":
        """Builds the table, its bytes and its needs now; returns itself."""
        _ = self.encoded, self.needs, self.ruled
        return self

    @cached_property
    def ruled(self) -> int:
        """Sets of clauses that depend on the token. Each sample needs variants for all of them."""
        return 0 if self.table is None else self.table.ruled

    @property
    def plan_cost(self) -> int:
        """The cost of building its table; see `tables`."""
        return 0 if self.table is None else self.table.plan_cost


@dataclass(frozen=True, eq=False)
class PackedCaptures:
    """The table of a plan's captures, and its bytes. All plans with these captures share it."""

    captures: tuple[Capture, ...]
    """The source of the table."""

    @cached_property
    def table(self) -> CaptureTable | None:
        """The table; None if nothing is captured.

        Raises:
            PlanTooLarge: see `capture_table`.
        """
        return capture_table(self.captures)

    @cached_property
    def encoded(self) -> EncodedTable | None:
        """The table as bytes; None if nothing is captured."""
        return None if self.table is None else EncodedTable.of(captures_to(self.table))

    @cached_property
    def needs(self) -> Needs:
        """The resources that it shares with other requests by content."""
        if self.table is None or self.encoded is None:
            return needs_of(iter(()))
        return needs_of(
            iter([("intervals", self.encoded.digest, len(self.table.intervals.starts))])
        )

    def need(self, prompt_len: int, max_step_tokens: int) -> CaptureNeed:
        """The rows of the ring that one sample needs; see `CaptureTable.need`."""
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
        """The needs that were computed, because requests with equal captures come together."""
        return {}

    def build(self) -> "PackedCaptures":
        """Builds the table, its bytes and its needs now; returns itself."""
        _ = self.encoded, self.needs
        return self

    @property
    def plan_cost(self) -> int:
        """The cost of building its table; see `tables`."""
        return 0 if self.table is None else self.table.plan_cost


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that the engine does to one request."""

    request_id: str
    """The server's name of the request; events come back under it."""
    acts: tuple[Act, ...] = ()
    """Interventions, in the order in which they act at a site."""
    captures: tuple[Capture, ...] = ()
    """Captures. Where several meet, a row is copied once. They see the stream after all acts."""
    epoch: int = 0
    """Part of the prefix cache's keys of every touched block; see `BlockKeys`."""
    private_from: int | None = None
    """Position from which on no other request may use the KV; None: it may be shared."""
    _acts: PackedActs | None = field(default=None, compare=False, repr=False)
    _captures: PackedCaptures | None = field(default=None, compare=False, repr=False)

    @property
    def touches_kv(self) -> bool:
        """Whether the request's KV differs from that of the same tokens without interventions."""
        return self.private_from is not None or any(act.acts for act in self.acts)

    @property
    def first_captured(self) -> int:
        """The lowest captured position; `OPEN_END` if nothing is captured."""
        starts = (c.spans[0][0] for c in self.captures if c.sites and c.spans)
        return min(starts, default=OPEN_END)

    @property
    def packed_acts(self) -> PackedActs:
        """Its acts with their table; made again unless `pack` has stored them."""
        packed = self._acts
        if packed is not None and packed.acts is self.acts:
            return packed
        return PackedActs(self.acts)

    @property
    def packed_captures(self) -> PackedCaptures:
        """Its captures with their table; made again unless `pack` has stored them."""
        packed = self._captures
        if packed is not None and packed.captures is self.captures:
            return packed
        return PackedCaptures(self.captures)

    @property
    def plan_cost(self) -> int:
        """The cost of its tables, which the first request that uses them pays; see `tables`.

        Raises:
            PlanTooLarge: it exceeds a worker's limits.
        """
        return self.packed_acts.plan_cost + self.packed_captures.plan_cost

    def under(self, request_id: str, epoch: int) -> "Plan":
        """The plan under another name and in another epoch, with the same tables."""
        return Plan(
            request_id,
            self.acts,
            self.captures,
            epoch,
            self.private_from,
            self._acts,
            self._captures,
        )

    def with_captures(self, captures: tuple[Capture, ...]) -> "Plan":
        """The plan with other captures. Their table is made once, when it is first used."""
        return replace(self, captures=captures, _captures=PackedCaptures(captures))

    def with_captures_of(self, other: "Plan") -> "Plan":
        """The plan with the captures of another plan, and with their table."""
        return replace(self, captures=other.captures, _captures=other._captures)

    def pack(self) -> "Plan":
        """The plan with its tables, which all its copies share. Takes long for large plans.

        Raises:
            PlanTooLarge: it exceeds a worker's limits.
            ValueError: its acts can't be composed.
        """
        return replace(self, _acts=self.packed_acts.build(), _captures=self.packed_captures.build())

    def to_wire(self) -> bytes:
        """The plan as bytes, because vLLM passes bytes on without reading or copying them."""
        wire = _Wire(self.request_id, self.epoch, self.private_from)
        wire.acts, wire.captures = self.packed_acts.encoded, self.packed_captures.encoded
        return msgspec.msgpack.encode(wire)


_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Named(msgspec.Struct):
    id: str


class _Wire(_Named, omit_defaults=True):
    epoch: _Number = 0
    private_from: _Number | None = None
    acts: EncodedTable | None = None
    captures: EncodedTable | None = None


class ReceivedPlan(NamedTuple):
    """A plan in a worker. Its tables have not been read yet."""

    request_id: str
    """The first three fields are those of `Plan`."""
    epoch: int
    private_from: int | None
    acts: EncodedTable | None
    """Its acts; None if it has none."""
    captures: EncodedTable | None
    """Its captures; None if it has none."""


def name_of(wire: object) -> str | None:
    """Reads the request's name from the bytes of a plan; None if they can't be read."""
    if isinstance(wire, ReceivedPlan):
        return wire.request_id
    try:
        return msgspec.msgpack.decode(wire, type=_Named).id if isinstance(wire, bytes) else None
    except msgspec.MsgspecError:
        return None


def read(wire: object) -> ReceivedPlan:
    """Reads the bytes of `Plan.to_wire`; a plan that was read before is returned as it is.

    Raises:
        ValueError: `wire` is no plan; the text names the field.
    """
    if isinstance(wire, ReceivedPlan):
        return wire
    if not isinstance(wire, bytes):
        raise ValueError("this is no plan: it is not made of bytes")
    try:
        plain = msgspec.msgpack.decode(wire, type=_Wire)
    except msgspec.MsgspecError as error:
        raise ValueError(f"this is no plan: {error}") from error
    return ReceivedPlan(plain.id, plain.epoch, plain.private_from, plain.acts, plain.captures)


_STEERING: WeakValueDictionary[bytes, SteeringTable] = WeakValueDictionary()
_CAPTURES: WeakValueDictionary[bytes, CaptureTable] = WeakValueDictionary()
"""The tables in use that were read in this process, by digest."""


def steering_of(encoded: EncodedTable) -> SteeringTable:
    """Reads a table of acts. A table in use is not read again.

    Raises:
        ValueError: the bytes are no table of acts.
    """
    table = _STEERING.get(encoded.digest)
    if table is None:
        table = _STEERING[encoded.digest] = steering_from(encoded.wire)
    return table


def captures_of(encoded: EncodedTable) -> CaptureTable:
    """Reads a table of captures. A table in use is not read again.

    Raises:
        ValueError: the bytes are no table of captures.
    """
    table = _CAPTURES.get(encoded.digest)
    if table is None:
        table = _CAPTURES[encoded.digest] = captures_from(encoded.wire)
    return table
