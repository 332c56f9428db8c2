"""The engine resources that a plan needs, by content, computed once at admission.

Invariant: equal content has one key, and the worker shares it. Keys are hashed with a secret of
this process, so that no client can construct colliding contents.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from rheostat_engine.plan.acts import Act, Kind
from rheostat_engine.plan.composition import Combination, Program, combine, only_adds
from rheostat_engine.plan.tables import SteeringTable

SHARED: Final[tuple[str, ...]] = (
    "bank_rows",
    "directions",
    "steps",
    "slots",
    "gates",
    "token_rules",
    "intervals",
)
"""Resources that requests share by content; fields of `Capacity`."""

_SECRET = os.urandom(16)
"""Precedes all hashed bytes. Python's hash of bytes is SipHash, but PYTHONHASHSEED may fix its own
key."""
_UINT64 = (1 << 64) - 1
_PREFIXES = {resource: _SECRET + resource.encode() + b"\0" for resource in SHARED}
_NUMBERS = {resource: number for number, resource in enumerate(SHARED)}
_ENCODER = msgspec.msgpack.Encoder()
_PAIR = _ENCODER.encode([None, None])[:1]
"""The first byte of an encoded pair, which is an array of two elements."""
_LIST_OF_ONE = _ENCODER.encode([None])[:1]
"""The first byte of an encoded array of one element."""


class Needs(NamedTuple):
    """Distinct content, ascending by key."""

    keys: npt.NDArray[np.uint64]
    resources: npt.NDArray[np.int64]
    """[n]: index into `SHARED`."""
    weights: npt.NDArray[np.int64]
    """[n]: the amount of the resource."""

    @property
    def total(self) -> Counter[str]:
        """The amount of each resource."""
        return self.part(np.ones(len(self.keys), np.bool_))

    def part(self, wanted: npt.NDArray[np.bool_]) -> Counter[str]:
        """The amount of each resource for the content selected by a mask, [n]."""
        totals = np.bincount(self.resources[wanted], self.weights[wanted], minlength=len(SHARED))
        return Counter(dict(zip(SHARED, map(int, totals), strict=True)))


_NOTHING = Needs(np.zeros(0, np.uint64), np.zeros(0, np.int64), np.zeros(0, np.int64))


def needs_of(contents: Iterable[tuple[str, object, int]]) -> Needs:
    """Collects (resource, content, weight), in any order; content may be repeated."""
    weights = {
        _key(_PREFIXES[resource], content): (_NUMBERS[resource], weight)
        for resource, content, weight in contents
    }
    if not weights:
        return _NOTHING
    keys = np.fromiter(weights, np.uint64, len(weights))
    rest = np.array([*weights.values()], np.int64).reshape(-1, 2)
    order = keys.argsort()
    rest = rest[order]
    return Needs(keys[order], rest[:, 0], rest[:, 1])


def contents_of(table: SteeringTable) -> Iterator[tuple[str, object, int]]:
    """The content of a table of acts, without its intervals and gates.

    Raises:
        ValueError: the acts can't be combined.
    """
    for number, members in enumerate(table.intervals.members):
        if not members:
            continue
        act = _single_row_act(table, members)
        if act is not None:
            yield from _contents_of_rows(act)
            continue
        token_variants = table.token_variants(number)
        if token_variants.sets:
            yield "token_rules", token_variants.sets, 1
        for variant in token_variants.variants:
            yield from _contents(variant.combination)
    if table.means:
        yield from _contents_of_program(table.means)


def _contents(combination: Combination) -> Iterator[tuple[str, object, int]]:
    if combination:
        yield "slots", combination, 1
    for _, program in combination:
        yield from _contents_of_program(program)


def _contents_of_program(program: Program) -> Iterator[tuple[str, object, int]]:
    for step in program:
        for key in step.rows:
            yield "bank_rows", key, 1
        if step.direction:
            yield "directions", step.direction, 1
        if step.write:
            yield "directions", step.write, 1
    if not only_adds(program):
        yield "steps", program, len(program)


def _single_row_act(table: SteeringTable, members: Sequence[int]) -> Act | None:
    """The act of a clause set whose content `_contents_of_rows` finds; None: it must be combined.

    Such an act is the only one of the set, is unconditional, and replaces each row by one row or
    adds one row to it.
    """
    if len(members) > 1:
        return None
    clause = table.clauses[members[0]]
    act = table.acts[clause.act]
    plain = clause.tokens is None and act.constant and len(act.vectors) == 1
    return act if plain and act.kind.acts_last and act.in_force else None


def _contents_of_rows(act: Act) -> Iterator[tuple[str, object, int]]:
    """The same as `_contents` of the combined act, which differs between sites only in its row.

    This is faster for a patch of a whole run: it has an act for each position, and each act has a
    row for each site.
    """
    program, addends = _templates(act.kind, act.vectors[0], act.scale)
    if len(act.rows) == 1:  # most cells of sweeps; twice as fast as below
        ((site, (number,)),) = act.rows
        row = _ENCODER.encode(number)
        own = program.with_row(row)
        yield "slots", _Encoded(_LIST_OF_ONE + _PAIR + _ENCODER.encode(site) + own), 1
        yield "bank_rows", addends.with_row(row), 1
        yield "steps", own, 1
        return
    rows = [_ENCODER.encode(row) for row in act.site_rows.rows[:, 0].tolist()]
    programs = [program.with_row(row) for row in rows]
    sites = map(_ENCODER.encode, act.site_rows.sites.tolist())
    pairs = [_PAIR + site + own for site, own in zip(sites, programs, strict=True)]
    # The encoding of an array without its elements. Each None takes one byte.
    begin = _ENCODER.encode([None] * len(pairs))[: -len(pairs)]
    yield "slots", _Encoded(begin + b"".join(pairs)), 1
    for row, own in zip(rows, programs, strict=True):
        yield "bank_rows", addends.with_row(row), 1
        yield "steps", own, 1


class _Encoded(bytes):
    """Content that is encoded already."""


class _Template(NamedTuple):
    """The encoding of content, with a gap for the number of a row."""

    before: bytes
    after: bytes

    @classmethod
    def of(cls, first: object, second: object) -> "_Template":
        """The template of two contents that differ only in the row: 0 in one, 1 in the other."""
        one, other = _ENCODER.encode(first), _ENCODER.encode(second)
        (at,) = np.flatnonzero(np.frombuffer(one, np.uint8) != np.frombuffer(other, np.uint8))
        return cls(one[:at], one[at + 1 :])

    def with_row(self, row: bytes) -> _Encoded:
        """The encoding with the encoded number of a row in the gap."""
        return _Encoded(self.before + row + self.after)


@lru_cache(256)
def _templates(kind: Kind, vector: bytes, scale: float) -> tuple[_Template, _Template]:
    """The templates of an act's program at a site, and of the addends of this program.

    They are cached because the acts of a sweep's cells put in rows of the same vectors.
    """
    ((_, first),), ((_, second),) = (
        combine([Act(kind, (vector,), ((0, (row,)),), (), scale)], [0]) for row in (0, 1)
    )
    return _Template.of(first, second), _Template.of(first[0].addends, second[0].addends)


def _key(prefix: bytes, content: object) -> int:
    encoded = content if isinstance(content, _Encoded) else _ENCODER.encode(content)
    return hash(prefix + encoded) & _UINT64
