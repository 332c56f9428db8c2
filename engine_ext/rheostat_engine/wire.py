"""The tables of a plan as bytes, because vLLM passes bytes on without reading or copying them.

Invariants: the cost of reading a table depends on its acts, captures and different sets, and not on
its pieces. `steering_from` and `captures_from` return only tables that admission could have made.
For all other bytes they raise a `ValueError` that names the place. Nothing is executed or
unpickled.
"""

import math
from collections.abc import Sequence
from operator import lt
from typing import Annotated, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from rheostat_engine.acts import OPEN_END, Act, Band, Capture, Kind, SiteRows
from rheostat_engine.composition import Owner
from rheostat_engine.pieces import Pieces
from rheostat_engine.row_forms import ITEM_BYTES, Coding, Directions, RowForm
from rheostat_engine.tables import CaptureTable, SteeringTable

_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_Read = TypeVar("_Read", bound=msgspec.Struct)


class _Pieces(msgspec.Struct):
    starts: bytes
    sets: bytes
    members: tuple[tuple[_Number, ...], ...]


class _Act(msgspec.Struct):
    kind: Kind
    vectors: tuple[_Digest, ...]
    sites: bytes
    rows: bytes
    scale: float = 1.0
    bands: tuple[tuple[float | None, float | None, float], ...] = ()
    orthogonal: bool = False


class _Steering(msgspec.Struct):
    acts: tuple[_Act, ...]
    owners: tuple[tuple[_Number, _Number | None, bool], ...]
    pieces: _Pieces
    sets: tuple[bytes, ...] = ()


class _Form(msgspec.Struct):
    coding: Coding
    dtype: str = ""
    kept: _Number = 0
    seed: Annotated[int, msgspec.Meta(ge=0)] = 0
    vectors: tuple[_Number, ...] = ()
    rows: tuple[_Number, ...] = ()


class _Captures(msgspec.Struct):
    captures: tuple[tuple[tuple[_Number, ...], _Number | None], ...]
    pieces: _Pieces
    forms: tuple[_Form, ...] = ()
    digests: tuple[_Digest, ...] = ()


def steering_to(table: SteeringTable) -> bytes:
    """The bytes of a table of acts."""
    acts = []
    for act in table.acts:
        sites, rows = (_bytes(part) for part in (act.site_rows.sites, act.site_rows.rows))
        one = _Act(act.kind, act.vectors, sites, rows, act.scale, (), act.orthogonal)
        one.bands = tuple(
            (_finite(band.low), _finite(band.high), band.strength) for band in act.bands
        )
        acts.append(one)
    owners = tuple((owner.act, owner.tokens, owner.among) for owner in table.owners)
    pieces = _pieces_to(table.pieces)
    return msgspec.msgpack.encode(_Steering(tuple(acts), owners, pieces, table.sets))


def steering_from(wire: bytes) -> SteeringTable:
    """The table that `steering_to` wrote.

    Raises:
        ValueError: it is none.
    """
    plain = _decoded(wire, _Steering)
    acts = tuple(_act_from(one) for one in plain.acts)
    for act in acts:
        _check(act)
    owners = tuple(Owner(*one) for one in plain.owners)
    for owner in owners:
        if owner.act >= len(acts):
            raise ValueError(f"this is no plan: there is no act {owner.act}")
        if owner.tokens is not None and owner.tokens >= len(plain.sets):
            raise ValueError(f"this is no plan: there is no set {owner.tokens} of token ids")
    for one in plain.sets:
        ids = _int32(one, "token ids")
        if not len(ids) or ids[0] < 0 or (np.diff(ids) <= 0).any():
            raise ValueError("this is no plan: token ids are missing or not ascending")
    pieces = _pieces_from(plain.pieces, len(owners))
    for members in pieces.members:
        held = [owners[i].act for i in members]
        if len(set(held)) < len(held):
            raise ValueError("this is no plan: conditions hold positions twice")
    return SteeringTable(acts, owners, plain.sets, pieces)


def captures_to(table: CaptureTable) -> bytes:
    """The bytes of a table of captures."""
    forms = list(dict.fromkeys(one.form for one in table.captures if one.form is not None))
    numbers = {form: number for number, form in enumerate(forms)}
    digests: dict[bytes, int] = {}
    wires = []
    for form in forms:
        one = _Form(form.coding, form.dtype, form.kept, form.seed)
        if form.directions is not None:
            vectors = form.directions.vectors
            one.vectors = tuple(digests.setdefault(digest, len(digests)) for digest in vectors)
            one.rows = form.directions.rows
        wires.append(one)
    captures = tuple(
        (one.sites, None if one.form is None else numbers[one.form]) for one in table.captures
    )
    pieces = _pieces_to(table.pieces)
    return msgspec.msgpack.encode(_Captures(captures, pieces, tuple(wires), tuple(digests)))


def captures_from(wire: bytes) -> CaptureTable:
    """The table that `captures_to` wrote.

    Raises:
        ValueError: it is none.
    """
    plain = _decoded(wire, _Captures)
    forms = [_form_from(one, plain.digests) for one in plain.forms]
    captures = []
    for sites, number in plain.captures:
        if not _ascending(sites):
            raise ValueError("this is no plan: sites are not ascending")
        if number is not None and number >= len(forms):
            raise ValueError(f"this is no plan: there is no form {number}")
        captures.append(Capture(sites, (), None if number is None else forms[number]))
    return CaptureTable(tuple(captures), _pieces_from(plain.pieces, len(captures)))


def _decoded(wire: bytes, kind: type[_Read]) -> _Read:
    try:
        return msgspec.msgpack.decode(wire, type=kind)
    except msgspec.MsgspecError as error:
        raise ValueError(f"this is no plan: {error}") from error


def _pieces_to(pieces: Pieces) -> _Pieces:
    return _Pieces(_bytes(pieces.starts), _bytes(pieces.sets), pieces.members)


def _pieces_from(plain: _Pieces, clauses: int) -> Pieces:
    starts, sets = _int32(plain.starts, "positions"), _int32(plain.sets, "sets")
    if len(starts) != len(sets) or not len(starts):
        raise ValueError("this is no plan: pieces and sets don't fit")
    if starts[0] != 0 or (np.diff(starts) <= 0).any() or starts[-1] >= OPEN_END:
        raise ValueError("this is no plan: positions are not ascending from 0")
    if sets.min() < 0 or sets.max() >= len(plain.members):
        raise ValueError("this is no plan: a piece holds a set that is not there")
    for members in plain.members:
        if not _ascending(members) or (members and members[-1] >= clauses):
            raise ValueError("this is no plan: a set is not ascending, or holds what is not there")
    return Pieces(starts, sets, plain.members)


def _bytes(numbers: npt.NDArray[np.int32]) -> bytes:
    return numbers.astype("<i4", copy=False).tobytes()


def _int32(data: bytes, what: str) -> npt.NDArray[np.int32]:
    if len(data) % 4:
        raise ValueError(f"this is no plan: {what} are torn")
    return np.frombuffer(data, "<i4").astype(np.int32, copy=False)


def _act_from(plain: _Act) -> Act:
    bands = tuple(
        Band(-math.inf if low is None else low, math.inf if high is None else high, strength)
        for low, high, strength in plain.bands
    )
    sites, rows = _int32(plain.sites, "sites"), _int32(plain.rows, "rows")
    if not plain.vectors or len(rows) != len(sites) * len(plain.vectors):
        raise ValueError(f"this is no plan: {plain.kind.name}: rows and vectors don't fit")
    if (np.diff(sites) <= 0).any() or (sites < 0).any() or (rows < 0).any():
        raise ValueError(
            f"this is no plan: {plain.kind.name}: its sites are not ascending, or it names a row "
            "below 0"
        )
    held = SiteRows(sites, rows.reshape(len(sites), len(plain.vectors)))
    return Act(plain.kind, plain.vectors, held, (), plain.scale, bands, plain.orthogonal)


def _form_from(one: _Form, digests: Sequence[bytes]) -> RowForm:
    if (one.coding is Coding.CAST) != (one.dtype in ITEM_BYTES) or one.seed >= 1 << 64:
        raise ValueError(f"this is no plan: {one.coding.name}: its type or seed is none")
    if len(one.vectors) != len(one.rows) or any(i >= len(digests) for i in one.vectors):
        raise ValueError(f"this is no plan: {one.coding.name}: directions and vectors don't fit")
    directions = None
    if one.vectors:
        directions = Directions(tuple(digests[i] for i in one.vectors), one.rows)
    return RowForm(one.coding, one.dtype, one.kept, one.seed, directions)


def _finite(bound: float) -> float | None:
    return bound if math.isfinite(bound) else None


def _check(act: Act) -> None:
    """Raises ValueError for an act that no admission would have let through."""
    problem = ""
    if act.kind is Kind.PULL and len(act.bands) != len(act.vectors):
        problem = "bands and vectors don't fit"
    elif act.kind is not Kind.PULL and (len(act.vectors) != 1 or act.bands):
        problem = "it takes one vector and no bands"
    elif not math.isfinite(act.scale):
        problem = "its scale is not finite"
    elif not all(_possible(band) for band in act.bands):
        problem = "a band is empty or its strength not finite"
    if problem:
        raise ValueError(f"this is no plan: {act.kind.name}: {problem}")


def _possible(band: Band) -> bool:
    held = band.low <= band.high and band.low < math.inf and band.high > -math.inf
    return held and math.isfinite(band.strength)


def _ascending(numbers: Sequence[int]) -> bool:
    return all(map(lt, numbers, numbers[1:]))
