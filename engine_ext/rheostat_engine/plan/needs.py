"""The resources of the engine that a plan needs, by content, computed once at admission.

Invariant: equal content has one key, and the worker shares it. Keys are hashed with a secret of
this process, so that nobody can choose two contents that count as one.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from rheostat_engine.plan.acts import Kind
from rheostat_engine.plan.composition import Combination, only_adds
from rheostat_engine.plan.tables import SteeringTable

SHARED: Final[tuple[str, ...]] = (
    "bank_rows",
    "directions",
    "steps",
    "slots",
    "token_rules",
    "intervals",
)
"""Resources of the engine that requests share by content; fields of `Capacity`."""

_SECRET = os.urandom(16)
_ENCODER = msgspec.msgpack.Encoder()


class Needs(NamedTuple):
    """Content, each once, ascending by key."""

    keys: npt.NDArray[np.uint64]
    """[n]: key of the content."""
    resources: npt.NDArray[np.int64]
    """[n]: its resource, as an index into `SHARED`."""
    weights: npt.NDArray[np.int64]
    """[n]: the amount of the resource that it takes."""

    @property
    def total(self) -> Counter[str]:
        """The amount of each resource that all content takes."""
        return self.part(np.ones(len(self.keys), np.bool_))

    def part(self, wanted: npt.NDArray[np.bool_]) -> Counter[str]:
        """The amount of each resource that the content of a mask, [n], takes."""
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
    order = np.argsort(keys)
    return Needs(keys[order], rest[order, 0], rest[order, 1])


def contents_of(table: SteeringTable) -> Iterator[tuple[str, object, int]]:
    """The content of a table of acts, beside its intervals.

    Raises:
        ValueError: it can't be composed.
    """
    for mix in table.mixes:
        if mix.sets:
            yield "token_rules", mix.sets, 1
        for variant in mix.variants:
            yield from _contents(variant.combination)


def _contents(combination: Combination) -> Iterator[tuple[str, object, int]]:
    if combination:
        yield "slots", combination, 1
    for _, program in combination:
        for step in program:
            if step.kind is Kind.ADD:
                yield "bank_rows", step.addends, 1
            else:
                yield "directions", step.direction, 1
        if not only_adds(program):
            yield "steps", program, len(program)


def _key(resource: str, content: object) -> int:
    content_bytes = resource.encode() + b"\0" + _ENCODER.encode(content)
    return int.from_bytes(
        hashlib.blake2b(content_bytes, digest_size=8, key=_SECRET).digest(), "little"
    )
