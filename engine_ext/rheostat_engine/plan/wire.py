"""Serialization of a plan's tables. vLLM passes bytes on without reading or copying them.

Invariants: the cost of parsing a table depends on its acts, captures and distinct sets, not on its
intervals. `steering_from` and `captures_from` return only tables that admission could have made.
For other bytes they raise a `ValueError` that names the field. Nothing is executed or unpickled.
"""

import math
from collections.abc import Sequence
from operator import lt
from typing import Annotated, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from rheostat_engine.plan.acts import OPEN_END, Act, Band, Capture, Kind, SiteRows
from rheostat_engine.plan.composition import Clause
from rheostat_engine.plan.gains import LARGEST_GAIN, MAX_GAINS
from rheostat_engine.plan.gates import (
    MAX_COLUMNS,
    MAX_CONDITIONS,
    MAX_GATES,
    MAX_RECORDED,
    MAX_TERMS,
    NEVER,
    Activation,
    Combine,
    Condition,
    Form,
    Gate,
    Hold,
    Normalise,
    Pool,
    Reading,
    Readout,
    Signals,
)
from rheostat_engine.plan.intervals import Intervals
from rheostat_engine.plan.row_encodings import ITEM_BYTES, Codec, Directions, RowEncoding
from rheostat_engine.plan.tables import CaptureTable, SteeringTable

_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_Read = TypeVar("_Read", bound=msgspec.Struct)


class _Intervals(msgspec.Struct):
    starts: bytes
    sets: bytes
    members: tuple[tuple[_Number, ...], ...]


class _Band(msgspec.Struct, array_like=True):
    low: float | None
    high: float | None
    strength: float
    normalise: Normalise = Normalise.UNIT
    activation: Activation = Activation.IDENTITY
    bias: float = 0.0
    theta: float = 0.0
    writes: bool = False
    only_on: bool = False


class _Act(msgspec.Struct):
    kind: Kind
    vectors: tuple[_Digest, ...]
    sites: bytes
    rows: bytes
    scale: float = 1.0
    bands: tuple[_Band, ...] = ()
    orthogonal: bool = False
    reading: tuple[Normalise, Activation, float, float, _Number] | None = None
    gate: _Number | None = None
    gain: Annotated[int, msgspec.Meta(ge=0, lt=MAX_GAINS)] | None = None


class _Condition(msgspec.Struct):
    columns: tuple[_Number, ...]
    pool: Pool
    combine: Combine
    above: float | None
    below: float | None
    for_tokens: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    decided_at: Annotated[int, msgspec.Meta(ge=NEVER, lt=2**31)]
    stays_above: float | None = None
    stays_below: float | None = None


class _Gate(msgspec.Struct):
    conditions: tuple[_Condition, ...]
    combine: Combine
    form: Form
    a: float
    b: float
    hold: Hold
    tokens: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    invert: bool
    late: _Number = 0
    end: _Number = 0
    factor: Annotated[float, msgspec.Meta(ge=0, le=LARGEST_GAIN)] = 0.0


class _Steering(msgspec.Struct):
    acts: tuple[_Act, ...]
    clauses: tuple[tuple[_Number, _Number | None, bool], ...]
    intervals: _Intervals
    sets: tuple[bytes, ...] = ()
    gates: tuple[_Gate, ...] = ()
    signals: tuple[_Number, tuple[_Number, ...], bool] = (0, (), False)


class _Encoding(msgspec.Struct):
    codec: Codec
    dtype: str = ""
    kept: _Number = 0
    seed: Annotated[int, msgspec.Meta(ge=0)] = 0
    vectors: tuple[_Number, ...] = ()
    rows: tuple[_Number, ...] = ()
    readouts: tuple[tuple[Normalise, Activation, float, float], ...] = ()


class _Captures(msgspec.Struct):
    captures: tuple[tuple[tuple[_Number, ...], _Number | None], ...]
    intervals: _Intervals
    encodings: tuple[_Encoding, ...] = ()
    digests: tuple[_Digest, ...] = ()


def steering_to(table: SteeringTable) -> bytes:
    """Serializes a table of acts."""
    acts = []
    for act in table.acts:
        sites, rows = (_bytes(part) for part in (act.site_rows.sites, act.site_rows.rows))
        plain = _Act(act.kind, act.vectors, sites, rows, act.scale, (), act.orthogonal)
        plain.bands = tuple(
            _Band(
                _finite(band.low),
                _finite(band.high),
                band.strength,
                *band.readout,
                band.writes,
                band.only_on,
            )
            for band in act.bands
        )
        plain.reading = act.reading
        plain.gate = None if act.gate is None else table.gates.index(act.gate)
        plain.gain = act.gain
        acts.append(plain)
    clauses = tuple((clause.act, clause.tokens, clause.among) for clause in table.clauses)
    intervals = _intervals_to(table.intervals)
    gates = tuple(map(_gate_to, table.gates))
    plain_table = _Steering(tuple(acts), clauses, intervals, table.sets, gates)
    signals = table.signals
    plain_table.signals = (
        signals.readings,
        tuple(map(table.gates.index, signals.gates)),
        signals.openness,
    )
    return msgspec.msgpack.encode(plain_table)


def steering_from(wire: bytes) -> SteeringTable:
    """Parses the bytes of `steering_to`.

    Raises:
        ValueError: the bytes are no table of acts.
    """
    plain = _decoded(wire, _Steering)
    gates = tuple(map(_gate_from, plain.gates))
    if any(plain_act.gate is not None and plain_act.gate >= len(gates) for plain_act in plain.acts):
        raise ValueError("this is no plan: an act names a gate that is missing")
    acts = tuple(_act_from(plain_act, gates) for plain_act in plain.acts)
    for act in acts:
        _check(act)
    if len(gates) > MAX_GATES:
        raise ValueError(f"this is no plan: it has more than {MAX_GATES} gates")
    readings, numbers, openness = plain.signals
    if readings > MAX_COLUMNS or any(number >= len(gates) for number in numbers):
        raise ValueError("this is no plan: its signals name a reading or a gate that is missing")
    signals = Signals(readings, tuple(gates[number] for number in numbers), openness)
    clauses = tuple(Clause(*fields) for fields in plain.clauses)
    for clause in clauses:
        if clause.act >= len(acts):
            raise ValueError(f"this is no plan: there is no act {clause.act}")
        if clause.tokens is not None and clause.tokens >= len(plain.sets):
            raise ValueError(f"this is no plan: there is no set {clause.tokens} of token ids")
    for tokens in plain.sets:
        ids = _int32(tokens, "token ids")
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


def captures_to(table: CaptureTable) -> bytes:
    """Serializes a table of captures."""
    encodings = list(
        dict.fromkeys(
            capture.encoding for capture in table.captures if capture.encoding is not None
        )
    )
    numbers = {encoding: number for number, encoding in enumerate(encodings)}
    digests: dict[bytes, int] = {}
    wires = []
    for encoding in encodings:
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


def _decoded(wire: bytes, kind: type[_Read]) -> _Read:
    try:
        return msgspec.msgpack.decode(wire, type=kind)
    except msgspec.MsgspecError as error:
        raise ValueError(f"this is no plan: {error}") from error


def _intervals_to(intervals: Intervals) -> _Intervals:
    return _Intervals(_bytes(intervals.starts), _bytes(intervals.sets), intervals.members)


def _intervals_from(plain: _Intervals, clauses: int) -> Intervals:
    starts, sets = _int32(plain.starts, "positions"), _int32(plain.sets, "sets")
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


def _int32(data: bytes, name: str) -> npt.NDArray[np.int32]:
    if len(data) % 4:
        raise ValueError(f"this is no plan: {name} are torn")
    return np.frombuffer(data, "<i4").astype(np.int32, copy=False)


def _gate_to(gate: Gate) -> _Gate:
    conditions = tuple(
        _Condition(
            condition.columns,
            condition.pool,
            condition.combine,
            _finite(condition.above),
            _finite(condition.below),
            condition.for_tokens,
            condition.decided_at,
            condition.stays_above,
            condition.stays_below,
        )
        for condition in gate.conditions
    )
    return _Gate(conditions, *gate[1:])


def _gate_from(plain: _Gate) -> Gate:
    conditions = tuple(
        Condition(
            condition.columns,
            condition.pool,
            condition.combine,
            -math.inf if condition.above is None else condition.above,
            math.inf if condition.below is None else condition.below,
            condition.for_tokens,
            condition.decided_at,
            condition.stays_above,
            condition.stays_below,
        )
        for condition in plain.conditions
    )
    gate = Gate(
        conditions,
        plain.combine,
        plain.form,
        plain.a,
        plain.b,
        plain.hold,
        plain.tokens,
        plain.invert,
        plain.late,
        plain.end,
        plain.factor,
    )
    numbers = [gate.a, gate.b]
    if not 1 <= len(conditions) <= MAX_CONDITIONS or not 1 <= len(gate.columns) <= MAX_TERMS:
        raise ValueError("this is no plan: a gate has too few or too many conditions or readings")
    if max(gate.columns) >= MAX_COLUMNS or not all(condition.columns for condition in conditions):
        raise ValueError("this is no plan: a gate names a reading that is missing")
    if not all(map(math.isfinite, numbers)) or (gate.form is Form.RAMP and not gate.a < gate.b):
        raise ValueError("this is no plan: the form of a gate is impossible")
    if gate.late and (gate.hold is Hold.TOKEN or max(_decisions(gate)) >= gate.late):
        raise ValueError("this is no plan: a late gate is decided too late, or not held")
    if gate.recorded and (gate.form is not Form.STEP or gate.end > MAX_RECORDED):
        raise ValueError("this is no plan: a gate can't be recorded")
    return gate


def _decisions(gate: Gate) -> list[int]:
    return [condition.decided_at for condition in gate.conditions]


def _act_from(plain: _Act, gates: Sequence[Gate]) -> Act:
    bands = tuple(
        Band(
            -math.inf if band.low is None else band.low,
            math.inf if band.high is None else band.high,
            band.strength,
            Readout(band.normalise, band.activation, band.bias, band.theta),
            band.writes,
            band.only_on,
        )
        for band in plain.bands
    )
    sites, rows = _int32(plain.sites, "sites"), _int32(plain.rows, "rows")
    if not plain.vectors or len(rows) != len(sites) * len(plain.vectors):
        raise ValueError(f"this is no plan: {plain.kind.name}: rows and vectors don't fit")
    ascending = len(sites) < 2 or bool((np.diff(sites) > 0).all())  # mostly one site
    if not ascending or (len(sites) and sites[0] < 0) or rows.min(initial=0) < 0:
        raise ValueError(
            f"this is no plan: {plain.kind.name}: its sites are not ascending, or it names a row "
            "below 0"
        )
    site_rows = SiteRows(sites, rows.reshape(len(sites), len(plain.vectors)))
    return Act(
        plain.kind,
        plain.vectors,
        site_rows,
        (),
        plain.scale,
        bands,
        plain.orthogonal,
        reading=None if plain.reading is None else Reading(*plain.reading),
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
        readouts = tuple(Readout(*fields) for fields in plain.readouts)
        if len(readouts) not in (0, len(plain.rows)) or not all(map(_possible_readout, readouts)):
            raise ValueError(f"this is no plan: {plain.codec.name}: readouts are impossible")
        vectors = tuple(digests[i] for i in plain.vectors)
        directions = Directions(vectors, plain.rows, readouts)
    return RowEncoding(plain.codec, plain.dtype, plain.kept, plain.seed, directions)


def _finite(bound: float) -> float | None:
    return bound if math.isfinite(bound) else None


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
    elif act.kind is Kind.GATE:
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
