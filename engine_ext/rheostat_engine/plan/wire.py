"""Serialization of a plan's tables. vLLM passes bytes on without reading or copying them.

Invariants: the cost of parsing a table depends on its acts, captures and distinct sets, not on its
intervals. `steering_from` and `captures_from` return only tables that admission could have made.
For other bytes they raise a `ValueError` that names the field. Nothing is executed or unpickled.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from operator import lt
from typing import Annotated, Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from rheostat_engine.plan.acts import OPEN_END, Act, Band, Capture, Kind, SiteRows
from rheostat_engine.plan.composition import Clause
from rheostat_engine.plan.gains import MAX_GAINS
from rheostat_engine.plan.gates import (
    MAX_COLUMNS,
    MAX_CONDITIONS,
    MAX_GATES,
    MAX_RECORDED,
    MAX_TERMS,
    Form,
    Gate,
    Hold,
    Natural,
    Reading,
    Readout,
    Signals,
)
from rheostat_engine.plan.intervals import Intervals
from rheostat_engine.plan.row_encodings import ITEM_BYTES, Codec, Directions, RowEncoding
from rheostat_engine.plan.tables import CaptureTable, SteeringTable

_Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_GATES_KEPT: Final = 64
"""Plans whose parsed gates are kept for later plans with equal gates."""
_Read = TypeVar("_Read")


class _Intervals(msgspec.Struct):
    starts: bytes
    sets: bytes
    members: tuple[tuple[Natural, ...], ...]


class _Act(msgspec.Struct):
    kind: Kind
    vectors: tuple[_Digest, ...]
    sites: bytes
    rows: bytes
    scale: float = 1.0
    bands: tuple[Band, ...] = ()
    orthogonal: bool = False
    reading: Reading | None = None
    gate: Natural | None = None
    gain: Annotated[int, msgspec.Meta(ge=0, lt=MAX_GAINS)] | None = None


class _Steering(msgspec.Struct):
    acts: tuple[_Act, ...]
    clauses: tuple[Clause, ...]
    intervals: _Intervals
    sets: tuple[bytes, ...] = ()
    gates: tuple[Gate, ...] = ()
    signals: tuple[Natural, tuple[Natural, ...], bool, Natural] = (0, (), False, 0)


class _Encoding(msgspec.Struct):
    codec: Codec
    dtype: str = ""
    kept: Natural = 0
    seed: Annotated[int, msgspec.Meta(ge=0)] = 0
    vectors: tuple[Natural, ...] = ()
    rows: tuple[Natural, ...] = ()
    readouts: tuple[Readout, ...] = ()


class _Captures(msgspec.Struct):
    captures: tuple[tuple[tuple[Natural, ...], Natural | None], ...]
    intervals: _Intervals
    encodings: tuple[_Encoding, ...] = ()
    digests: tuple[_Digest, ...] = ()


def steering_to(table: SteeringTable) -> bytes:
    """Serializes a table of acts."""
    acts = []
    for act in table.acts:
        gate = None if act.gate is None else table.gates.index(act.gate)
        acts.append(
            _Act(
                act.kind,
                act.vectors,
                _bytes(act.site_rows.sites),
                _bytes(act.site_rows.rows),
                act.scale,
                act.bands,
                act.orthogonal,
                act.reading,
                gate,
                act.gain,
            )
        )
    intervals = _intervals_to(table.intervals)
    numbers = tuple(map(table.gates.index, table.signals.gates))
    kept = len(table.signals.kept)
    signals = table.signals.readings, numbers, table.signals.openness, kept
    return msgspec.msgpack.encode(
        _Steering(tuple(acts), table.clauses, intervals, table.sets, table.gates, signals)
    )


def steering_from(wire: bytes) -> SteeringTable:
    """Parses the bytes of `steering_to`.

    Raises:
        ValueError: the bytes are no table of acts.
    """
    plain = _decoded(wire, _Steering)
    gates = plain.gates
    _check_gates(gates)
    if any(plain_act.gate is not None and plain_act.gate >= len(gates) for plain_act in plain.acts):
        raise ValueError("this is no plan: an act names a gate that is missing")
    acts = _acts_from(plain.acts, gates)
    for act in acts:
        _check(act)
    if len({act.reading.mean_at for act in acts if act.reading and act.reading.of_mean}) > 1:
        raise ValueError("this is no plan: means of rows are read at several positions")
    readings, numbers, openness, kept = plain.signals
    if readings > MAX_COLUMNS or any(number >= len(gates) for number in (*numbers, kept - 1)):
        raise ValueError("this is no plan: its signals name a reading or a gate that is missing")
    signalled = tuple(gates[number] for number in numbers)
    signals = Signals(readings, signalled, openness, gates[:kept])
    clauses = plain.clauses
    for clause in clauses:
        if not 0 <= clause.act < len(acts):
            raise ValueError(f"this is no plan: there is no act {clause.act}")
        if clause.tokens is not None and not 0 <= clause.tokens < len(plain.sets):
            raise ValueError(f"this is no plan: there is no set {clause.tokens} of token ids")
    for tokens in plain.sets:
        ids = _int32([tokens], "token ids")
        if not len(ids) or ids[0] < 0 or (np.diff(ids) <= 0).any():
            raise ValueError("this is no plan: token ids are missing or not ascending")
    intervals = _intervals_from(plain.intervals, len(clauses))
    for members in intervals.members:
        acts_there = [clauses[i].act for i in members]
        if len(set(acts_there)) < len(acts_there):
            raise ValueError("this is no plan: conditions of an act overlap")
    table = SteeringTable(acts, clauses, plain.sets, intervals, signals)
    if table.gates != gates:
        raise ValueError("this is no plan: its gates are not in order")
    return table


@lru_cache(_GATES_KEPT)
def gates_from(wire: bytes) -> tuple[Gate, ...]:
    """Parses the gates of a plan.

    All samples of a request, and requests with equal gates, share the result, because parsing many
    conditions takes milliseconds.

    Raises:
        ValueError: the bytes are no gates.
    """
    gates = _decoded(wire, tuple[Gate, ...], "gates: ")
    _check_gates(gates)
    return gates


def captures_to(table: CaptureTable) -> bytes:
    """Serializes a table of captures."""
    numbers: dict[RowEncoding, int] = {}
    for capture in table.captures:
        if capture.encoding is not None:
            numbers.setdefault(capture.encoding, len(numbers))
    digests: dict[bytes, int] = {}
    wires = []
    for encoding in numbers:
        wire = _Encoding(encoding.codec, encoding.dtype, encoding.kept, encoding.seed)
        if encoding.directions is not None:
            vectors = encoding.directions.vectors
            wire.vectors = tuple(digests.setdefault(digest, len(digests)) for digest in vectors)
            wire.rows = encoding.directions.rows
            wire.readouts = encoding.directions.readouts
        wires.append(wire)
    captures = tuple(
        (capture.sites, None if capture.encoding is None else numbers[capture.encoding])
        for capture in table.captures
    )
    intervals = _intervals_to(table.intervals)
    return msgspec.msgpack.encode(_Captures(captures, intervals, tuple(wires), tuple(digests)))


def captures_from(wire: bytes) -> CaptureTable:
    """Parses the bytes of `captures_to`.

    Raises:
        ValueError: the bytes are no table of captures.
    """
    plain = _decoded(wire, _Captures)
    encodings = [_encoding_from(wire, plain.digests) for wire in plain.encodings]
    captures = []
    for sites, number in plain.captures:
        if not _ascending(sites):
            raise ValueError("this is no plan: sites are not ascending")
        if number is not None and number >= len(encodings):
            raise ValueError(f"this is no plan: there is no encoding {number}")
        captures.append(Capture(sites, (), None if number is None else encodings[number]))
    return CaptureTable(tuple(captures), _intervals_from(plain.intervals, len(captures)))


def _decoded(wire: bytes, kind: type[_Read], part: str = "") -> _Read:
    try:
        return msgspec.msgpack.decode(wire, type=kind)
    except msgspec.MsgspecError as error:
        raise ValueError(f"this is no plan: {part}{error}") from error


def _intervals_to(intervals: Intervals) -> _Intervals:
    return _Intervals(_bytes(intervals.starts), _bytes(intervals.sets), intervals.members)


def _intervals_from(plain: _Intervals, clauses: int) -> Intervals:
    starts, sets = _int32([plain.starts], "positions"), _int32([plain.sets], "sets")
    if len(starts) != len(sets) or not len(starts):
        raise ValueError("this is no plan: intervals and sets don't fit")
    if starts[0] != 0 or (np.diff(starts) <= 0).any() or starts[-1] >= OPEN_END:
        raise ValueError("this is no plan: positions are not ascending from 0")
    if sets.min() < 0 or sets.max() >= len(plain.members):
        raise ValueError("this is no plan: an interval names a set that is missing")
    for members in plain.members:
        if not _ascending(members) or (members and members[-1] >= clauses):
            raise ValueError("this is no plan: a set is not ascending, or names a missing member")
    return Intervals(starts, sets, plain.members)


def _bytes(numbers: npt.NDArray[np.int32]) -> bytes:
    return numbers.astype("<i4", copy=False).tobytes()


def _int32(parts: Sequence[bytes], name: str) -> npt.NDArray[np.int32]:
    """The numbers of several parts, one after the other."""
    if any(len(part) % 4 for part in parts):
        raise ValueError(f"this is no plan: {name} are torn")
    return np.frombuffer(b"".join(parts), "<i4").astype(np.int32, copy=False)


def _check_gates(gates: Sequence[Gate]) -> None:
    """Raises ValueError for gates that admission would have refused."""
    if len(gates) > MAX_GATES:
        raise ValueError(f"this is no plan: it has more than {MAX_GATES} gates")
    for gate in gates:
        _check_gate(gate)


def _check_gate(gate: Gate) -> None:
    conditions = gate.conditions
    if not 1 <= len(conditions) <= MAX_CONDITIONS or not 1 <= len(gate.columns) <= MAX_TERMS:
        raise ValueError("this is no plan: a gate has too few or too many conditions or readings")
    if max(gate.columns) >= MAX_COLUMNS or not all(condition.columns for condition in conditions):
        raise ValueError("this is no plan: a gate names a reading that is missing")
    finite = math.isfinite(gate.a) and math.isfinite(gate.b)
    if not finite or (gate.form is Form.RAMP and not gate.a < gate.b):
        raise ValueError("this is no plan: the form of a gate is impossible")
    decided = max(condition.decided_at for condition in conditions)
    if gate.late and (gate.hold is Hold.TOKEN or decided >= gate.late):
        raise ValueError("this is no plan: a late gate is decided too late, or not held")
    if gate.recorded and (gate.form is not Form.STEP or gate.end > MAX_RECORDED):
        raise ValueError("this is no plan: a gate can't be recorded")


def _acts_from(plain_acts: Sequence[_Act], gates: Sequence[Gate]) -> tuple[Act, ...]:
    """The acts of a table. The arrays of all acts are read together: many have a single row."""
    sites = _int32([plain.sites for plain in plain_acts], "sites")
    rows = _int32([plain.rows for plain in plain_acts], "rows")
    negative = sites.min(initial=0) < 0 or rows.min(initial=0) < 0
    acts = []
    first_site = first_row = 0
    for plain in plain_acts:
        end_site, end_row = first_site + len(plain.sites) // 4, first_row + len(plain.rows) // 4
        own = sites[first_site:end_site], rows[first_row:end_row]
        acts.append(_act_from(plain, *own, gates, negative=negative))
        first_site, first_row = end_site, end_row
    return tuple(acts)


def _act_from(
    plain: _Act,
    sites: npt.NDArray[np.int32],
    rows: npt.NDArray[np.int32],
    gates: Sequence[Gate],
    *,
    negative: bool,
) -> Act:
    """An act. `negative`: whether a site or a row of any act of the table is below 0."""
    count = len(plain.vectors)
    if not count or len(rows) != len(sites) * count:
        raise ValueError(f"this is no plan: {plain.kind.name}: rows and vectors don't fit")
    ascending = len(sites) < 2 or bool((np.diff(sites) > 0).all())  # mostly one site
    if not ascending or (negative and min(sites.min(initial=0), rows.min(initial=0)) < 0):
        raise ValueError(
            f"this is no plan: {plain.kind.name}: its sites are not ascending, or it names a row "
            "below 0"
        )
    site_rows = SiteRows(sites, rows.reshape(len(sites), count))
    return Act(
        plain.kind,
        plain.vectors,
        site_rows,
        (),
        plain.scale,
        plain.bands,
        plain.orthogonal,
        reading=plain.reading,
        gate=None if plain.gate is None else gates[plain.gate],
        gain=plain.gain,
    )


def _encoding_from(plain: _Encoding, digests: Sequence[bytes]) -> RowEncoding:
    if (plain.codec is Codec.CAST) != (plain.dtype in ITEM_BYTES) or plain.seed >= 1 << 64:
        raise ValueError(f"this is no plan: {plain.codec.name}: its type or seed is invalid")
    if len(plain.vectors) != len(plain.rows) or any(i >= len(digests) for i in plain.vectors):
        raise ValueError(f"this is no plan: {plain.codec.name}: directions and vectors don't fit")
    directions = None
    if plain.vectors:
        readouts = plain.readouts
        if len(readouts) not in (0, len(plain.rows)) or not all(map(_possible_readout, readouts)):
            raise ValueError(f"this is no plan: {plain.codec.name}: readouts are impossible")
        vectors = tuple(digests[i] for i in plain.vectors)
        directions = Directions(vectors, plain.rows, readouts)
    return RowEncoding(plain.codec, plain.dtype, plain.kept, plain.seed, directions)


def _check(act: Act) -> None:
    """Raises ValueError for an act that admission would have refused."""
    problem = ""
    if act.kind is Kind.PULL and sum(band.vectors for band in act.bands) != len(act.vectors):
        problem = "bands and vectors don't fit"
    elif act.orthogonal and not all(band.plain for band in act.bands):
        problem = "directions of a subspace are read as they are"
    elif act.kind in (Kind.ADD, Kind.NORM_ADD) and (len(act.vectors) != 1 or act.bands):
        problem = "it takes one vector and no bands"
    elif act.kind.acts_last and not _possible_replacement(act):
        problem = "it takes a vector, at most one mask, no bands and a scale from 0 to 1"
    elif not act.kind.is_act:
        problem = "it is no act"
    elif (act.kind is Kind.READ) != (act.reading is not None):
        problem = "only it has a reading"
    elif act.reading is not None and not _possible_reading(act, act.reading):
        problem = "it takes one vector, no gate, no gain, and a reading of finite numbers"
    elif not math.isfinite(act.scale):
        problem = "its scale is not finite"
    elif not all(_possible(band) for band in act.bands):
        problem = "a band is empty, or a number of it is not finite"
    if problem:
        raise ValueError(f"this is no plan: {act.kind.name}: {problem}")


def _possible_replacement(act: Act) -> bool:
    return 1 <= len(act.vectors) <= 2 and not act.bands and 0 <= act.scale <= 1


def _possible_reading(act: Act, reading: Reading) -> bool:
    plain = len(act.vectors) == 1 and not act.bands and act.constant
    fits = reading.column + len(act.rows) <= MAX_COLUMNS
    return plain and fits and math.isfinite(reading.bias) and math.isfinite(reading.theta)


def _possible(band: Band) -> bool:
    nonempty = band.low <= band.high and band.low < math.inf and band.high > -math.inf
    return nonempty and math.isfinite(band.strength) and _possible_readout(band.readout)


def _possible_readout(readout: Readout) -> bool:
    return math.isfinite(readout.bias) and math.isfinite(readout.theta)


def _ascending(numbers: Sequence[int]) -> bool:
    return all(map(lt, numbers, numbers[1:]))
