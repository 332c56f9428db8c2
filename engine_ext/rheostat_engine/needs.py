"""What a plan holds of the engine's tables, by content: made once, at admission.

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

from rheostat_engine.acts import Kind
from rheostat_engine.composition import Combination, only_adds
from rheostat_engine.tables import SteeringTable

SHARED: Final[tuple[str, ...]] = (
    "bank_rows",
    "directions",
    "steps",
    "slots",
    "token_rules",
    "pieces",
)
"""Resources of the engine that requests share by content; fields of `Capacity`."""

_SECRET = os.urandom(16)
_ENCODER = msgspec.msgpack.Encoder()


class Needs(NamedTuple):
    """Content, each once, ascending by key."""

    keys: npt.NDArray[np.uint64]
    """[n]: which content."""
    resources: npt.NDArray[np.int64]
    """[n]: of which resource, as an index into `SHARED`."""
    weights: npt.NDArray[np.int64]
    """[n]: how much it takes of it."""

    @property
    def total(self) -> Counter[str]:
        """How much of each resource all of it takes."""
        return self.part(np.ones(len(self.keys), np.bool_))

    def part(self, wanted: npt.NDArray[np.bool_]) -> Counter[str]:
        """How much of each resource some of it takes, [n]."""
        totals = np.bincount(self.resources[wanted], self.weights[wanted], minlength=len(SHARED))
        return Counter(dict(zip(SHARED, map(int, totals), strict=True)))


def needs_of(contents: Iterator[tuple[str, object, int]]) -> Needs:
    """Needs from (resource, content, weight), in any order; content may be repeated."""
    found = {
        _key(resource, content): (SHARED.index(resource), weight)
        for resource, content, weight in contents
    }
    keys = np.fromiter(found, np.uint64, len(found))
    rest = np.array([*found.values()], np.int64).reshape(-1, 2)
    order = np.argsort(keys)
    return Needs(keys[order], rest[order, 0], rest[order, 1])


def contents_of(table: SteeringTable) -> Iterator[tuple[str, object, int]]:
    """What a table of acts takes beside its pieces.

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
    said = resource.encode() + b"\0" + _ENCODER.encode(content)
    return int.from_bytes(hashlib.blake2b(said, digest_size=8, key=_SECRET).digest(), "little")
