"""What may come in place of a plan: wires that are almost right, and anything at all."""

import hashlib

import msgspec
from hypothesis import strategies as st

from rheostat_engine import Plan
from rheostat_engine.plan.block_keys import BlockKeys, SteeredBlocks
from rheostat_engine.plan.plan import read_plan, steering_of

from .strategies import DIGESTS, LIMIT, plans


def packed(plain: object) -> object:
    """A wire that holds this; itself where no wire can."""
    try:
        return msgspec.msgpack.encode(plain)
    except OverflowError:
        return plain


def unpacked(wire: bytes) -> dict[str, object]:
    """What a plan's wire holds."""
    plain = msgspec.msgpack.decode(wire)
    assert isinstance(plain, dict)
    return plain


def block_keys(plan: Plan) -> BlockKeys:
    """The keys of a request with a plan, as they are made of what arrives."""
    found = read_plan(plan.to_wire())
    return BlockKeys(found, None if found.acts is None else SteeredBlocks(steering_of(found.acts)))


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-3, 9),
    st.floats(),
    st.text(max_size=4),
    st.binary(max_size=4),
    st.sampled_from(DIGESTS),
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


def mostly(likely: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    """What is meant, or anything at all."""
    return st.one_of(likely, likely, likely, likely, likely, ANYTHING)


INTEGERS = mostly(st.integers(-1, LIMIT))
NUMBERS = mostly(st.sampled_from([1.0, -0.5, 0.0, 1e39]))
TORN = st.binary(max_size=9)


def int32(values: list[int]) -> bytes:
    """Integers as they travel."""
    return b"".join(value.to_bytes(4, "little", signed=True) for value in values)


SMALL = st.lists(st.integers(-1, LIMIT), max_size=4)
PIECES = mostly(
    st.fixed_dictionaries(
        {
            "starts": mostly(
                st.sets(st.integers(1, LIMIT), max_size=3).map(lambda s: int32([0, *sorted(s)]))
                | SMALL.map(int32)
                | TORN
            ),
            "sets": mostly(
                st.lists(st.integers(0, 2), min_size=1, max_size=4).map(int32)
                | SMALL.map(int32)
                | TORN
            ),
            "members": mostly(
                st.lists(st.sets(st.integers(0, 2), max_size=2).map(sorted) | SMALL, max_size=4)
            ),
        }
    )
)
ACT = st.fixed_dictionaries(
    {
        "kind": mostly(st.sampled_from([1, 2, 3])),
        "vectors": mostly(st.lists(mostly(st.sampled_from(DIGESTS)), max_size=2)),
        "sites": mostly(st.sets(st.integers(0, LIMIT), max_size=2).map(sorted).map(int32) | TORN),
        "rows": mostly(st.lists(st.integers(-1, 3), max_size=3).map(int32) | TORN),
    },
    optional={
        "scale": NUMBERS,
        "bands": mostly(st.lists(mostly(st.lists(NUMBERS, min_size=3, max_size=3)), max_size=2)),
        "orthogonal": mostly(st.booleans()),
    },
)
CLAUSE = st.tuples(
    mostly(st.integers(0, 2)), mostly(st.none() | st.integers(0, 1)), mostly(st.booleans())
).map(list)
STEERING = st.fixed_dictionaries(
    {
        "acts": mostly(st.lists(mostly(ACT), max_size=3)),
        "clauses": mostly(st.lists(mostly(CLAUSE), max_size=3)),
        "intervals": PIECES,
    },
    optional={
        "sets": mostly(
            st.lists(
                mostly(st.sets(st.integers(0, 9), min_size=1, max_size=3).map(sorted).map(int32)),
                max_size=2,
            )
            | st.lists(SMALL.map(int32) | TORN, max_size=2)
        )
    },
)
FORM = st.fixed_dictionaries(
    {"codec": mostly(st.integers(1, 4)), "dtype": mostly(st.sampled_from(["", "float16"]))},
    optional={
        "kept": INTEGERS,
        "seed": mostly(st.integers(-1, 2**64)),
        "vectors": mostly(st.lists(INTEGERS, max_size=2)),
        "rows": mostly(st.lists(INTEGERS, max_size=2)),
    },
)
CAPTURE = st.tuples(
    mostly(st.sets(st.integers(0, LIMIT), max_size=3).map(sorted) | st.lists(INTEGERS, max_size=3)),
    mostly(st.none() | st.integers(0, 2)),
).map(list)
CAPTURES = st.fixed_dictionaries(
    {"captures": mostly(st.lists(mostly(CAPTURE), max_size=3)), "intervals": PIECES},
    optional={
        "encodings": mostly(st.lists(mostly(FORM), max_size=3)),
        "digests": mostly(st.lists(mostly(st.sampled_from(DIGESTS)), max_size=2)),
    },
)


@st.composite
def encoded(draw: st.DrawFn, tables: st.SearchStrategy[object]) -> list[object]:
    """A table under the digest that it has, or anything in its place."""
    wire = draw(mostly(tables.map(packed)))
    right = hashlib.blake2b(wire, digest_size=16).digest() if isinstance(wire, bytes) else b""
    return [draw(mostly(st.just(right))), wire]


@st.composite
def spoilt(draw: st.DrawFn, table: str) -> list[object]:
    """A plan's table with something else in one place."""
    plan = draw(plans())
    part = getattr(plan, f"packed_{table}").encoded
    if part is None:
        return [b"", b""]
    inner = unpacked(part.wire)
    place: object = inner
    while True:
        if isinstance(place, dict) and place:
            key = draw(st.sampled_from(sorted(place)))
        elif isinstance(place, list) and place:
            key = draw(st.integers(0, len(place) - 1))
        else:
            break
        inside = place[key]
        if not isinstance(inside, dict | list) or not inside or draw(st.integers(0, 4)) == 0:
            place[key] = draw(ANYTHING)
            break
        place = inside
    wire = packed(inner)
    return [
        hashlib.blake2b(wire, digest_size=16).digest() if isinstance(wire, bytes) else b"",
        wire,
    ]


PLAIN = st.one_of(
    ANYTHING,
    st.fixed_dictionaries(
        {"id": mostly(st.just("r"))},
        optional={
            "acts": mostly(encoded(STEERING) | spoilt("acts")),
            "captures": mostly(encoded(CAPTURES) | spoilt("captures")),
            "epoch": INTEGERS,
            "private_from": INTEGERS,
        },
    ),
)
WIRES = st.one_of(ANYTHING, *[PLAIN.map(packed)] * 9)
