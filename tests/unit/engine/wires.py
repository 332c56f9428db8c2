"""What may come in place of a plan: wires that are almost right, and anything at all."""

import msgspec
from hypothesis import strategies as st

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


@st.composite
def spoilt(draw: st.DrawFn) -> object:
    """A plan's wire with something else in one place."""
    wire = unpacked(draw(plans()).to_wire())
    place: object = wire
    while True:
        if isinstance(place, dict) and place:
            key = draw(st.sampled_from(sorted(place)))
        elif isinstance(place, list) and place:
            key = draw(st.integers(0, len(place) - 1))
        else:
            return wire
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or draw(st.integers(0, 4)) == 0:
            place[key] = draw(ANYTHING)
            return wire
        place = inner


INTEGERS = mostly(st.integers(-1, LIMIT))
PAIRS = mostly(st.lists(mostly(st.lists(INTEGERS, min_size=2, max_size=2)), max_size=3))
NUMBERS = mostly(st.sampled_from([1.0, -0.5, 0.0, 1e39]))
ACT = st.fixed_dictionaries(
    {
        "kind": mostly(st.sampled_from([1, 2, 3])),
        "vectors": mostly(st.lists(mostly(st.sampled_from(DIGESTS)), max_size=2)),
        "rows": mostly(
            st.lists(
                st.tuples(INTEGERS, mostly(st.lists(INTEGERS, max_size=2))).map(list), max_size=2
            )
        ),
        "spans": PAIRS,
    },
    optional={
        "scale": NUMBERS,
        "bands": mostly(st.lists(mostly(st.lists(NUMBERS, min_size=3, max_size=3)), max_size=2)),
        "orthogonal": mostly(st.booleans()),
        "conditions": mostly(
            st.lists(
                st.tuples(PAIRS, mostly(st.integers(0, 2)), mostly(st.booleans())).map(list),
                max_size=2,
            )
        ),
    },
)
FORM = st.fixed_dictionaries(
    {"coding": mostly(st.integers(1, 4)), "dtype": mostly(st.sampled_from(["", "float16"]))},
    optional={
        "kept": INTEGERS,
        "seed": mostly(st.integers(-1, 2**64)),
        "vectors": mostly(st.lists(INTEGERS, max_size=2)),
        "rows": mostly(st.lists(INTEGERS, max_size=2)),
    },
)
CAPTURE = st.tuples(mostly(st.lists(INTEGERS, max_size=3)), PAIRS).map(list)
PLAIN = st.one_of(
    ANYTHING,
    spoilt(),
    spoilt(),
    st.fixed_dictionaries(
        {"id": mostly(st.just("r"))},
        optional={
            "acts": mostly(st.lists(mostly(ACT), max_size=3)),
            "sets": mostly(st.lists(mostly(st.lists(INTEGERS, max_size=3)), max_size=2)),
            "capture": mostly(st.lists(mostly(CAPTURE), max_size=3)),
            "form_of": mostly(st.lists(mostly(st.none() | st.integers(0, 2)), max_size=3)),
            "forms": mostly(st.lists(mostly(FORM), max_size=3)),
            "digests": mostly(st.lists(mostly(st.sampled_from(DIGESTS)), max_size=2)),
            "epoch": INTEGERS,
            "private_from": INTEGERS,
        },
    ),
)
WIRES = st.one_of(ANYTHING, *[PLAIN.map(packed)] * 9)
