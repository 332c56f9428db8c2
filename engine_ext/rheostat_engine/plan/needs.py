"""The engine resources that a plan needs, by content, computed once at admission.

Invariant: equal content has one key, and the worker shares it. Keys are hashed with a secret of
this process, so that no client can construct colliding contents.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from rheostat_engine.plan.composition import Combination, only_adds
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
_ENCODER = msgspec.msgpack.Encoder()


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


def needs_of(contents: Iterator[tuple[str, object, int]]) -> Needs:
    """Collects (resource, content, weight), in any order; content may be repeated."""
    weights = {
        _key(resource, content): (SHARED.index(resource), weight)
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
    """The content of a table of acts, without its intervals.

    Raises:
        ValueError: the acts can't be combined.
    """
    for number, members in enumerate(table.intervals.members):
        if not members:
            continue
        token_variants = table.token_variants(number)
        if token_variants.sets:
            yield "token_rules", token_variants.sets, 1
        for variant in token_variants.variants:
            yield from _contents(variant.combination)
    for gate in table.signalled_gates:
        yield "gates", gate, 1


def _contents(combination: Combination) -> Iterator[tuple[str, object, int]]:
    if combination:
        yield "slots", combination, 1
    for _, program in combination:
        for step in program:
            for key in step.rows:
                yield "bank_rows", key, 1
            if step.direction:
                yield "directions", step.direction, 1
            if step.write:
                yield "directions", step.write, 1
            if step.opening is not None:
                yield "gates", step.opening, 1
        if not only_adds(program):
            yield "steps", program, len(program)


def _key(resource: str, content: object) -> int:
    content_bytes = resource.encode() + b"\0" + _ENCODER.encode(content)
    return int.from_bytes(
        hashlib.blake2b(content_bytes, digest_size=8, key=_SECRET).digest(), "little"
    )
