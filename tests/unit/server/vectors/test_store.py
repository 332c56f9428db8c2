import contextlib
import hashlib
import random

import numpy as np
import pytest

from rheostat_server.errors import NameNotFound, NonFinite, StoreFull, VectorNotFound
from rheostat_server.tensors import FloatType
from rheostat_server.vectors import store as vectors
from rheostat_server.vectors.listing import Key
from rheostat_server.vectors.store import Name, PutResult, Vector, VectorStore, make_vector
from rheostat_wire.v1 import types_pb2

SIZE = 8


def vector(value: float) -> Vector:
    data = np.full((1, 2), value, dtype="<f4").tobytes()
    return make_vector(FloatType.FLOAT32, 1, 2, data, "v")


def name(of: Vector) -> Name:
    return Name(of.digest, "", None)


@pytest.fixture
def evicted() -> list[bytes]:
    return []


@pytest.fixture
def store(evicted: list[bytes]) -> VectorStore:
    return VectorStore(2 * SIZE, evicted.append)


def test_the_digest_is_that_of_the_contract() -> None:
    values = np.array([[1.0, -2.0], [0.5, 4.0]], dtype="<f2")
    made = make_vector(FloatType.FLOAT16, 2, 2, values.tobytes(), "v")
    canonical = b"rheostat.v1 vector float16 2x2\n" + values.tobytes()
    assert made.digest == hashlib.sha256(canonical).digest()
    assert made.norms == (pytest.approx(5**0.5), pytest.approx(16.25**0.5))
    assert made.peaks == (2.0, 4.0)
    assert made.float32_bytes() == values.astype("<f4").tobytes()


def test_an_element_that_is_not_finite_is_named() -> None:
    data = np.array([[1, 2], [np.nan, 4]], dtype="<f4").tobytes()
    with pytest.raises(NonFinite, match=r"\[1, 0\]"):
        make_vector(FloatType.FLOAT32, 2, 2, data, "v")


def test_storing_twice_stores_once(store: VectorStore) -> None:
    assert [store.put(vector(1)), store.put(vector(1))] == [False, True]
    assert (len(store), store.used_bytes) == (1, SIZE)


def test_the_least_recently_used_vector_without_a_holder_goes(store, evicted) -> None:
    store.put(vector(1))
    store.put(vector(2))
    store.get(vector(1).digest, "v")
    store.put(vector(3))
    assert evicted == [vector(2).digest]
    assert vector(1).digest in store
    with pytest.raises(VectorNotFound):
        store.get(vector(2).digest, "v")


def test_named_and_used_vectors_stay_and_a_full_store_says_so(store, evicted) -> None:
    store.put_named(vector(1), "joy", name(vector(1)))
    store.pin(vector(2))
    with pytest.raises(StoreFull) as caught:
        store.put(vector(3))
    assert caught.value.retry_after == 1.0
    store.unpin([vector(2).digest])
    store.put(vector(3))
    assert evicted == [vector(2).digest]


def test_of_vectors_that_are_kept_together_none_is_kept_if_one_is_refused(store, evicted) -> None:
    store.pin(vector(1))
    with pytest.raises(StoreFull):
        store.pin(vector(2), vector(3))
    store.put(vector(4))
    assert evicted == [vector(2).digest]


def test_vectors_that_are_stored_ahead_give_way_to_all_others_the_last_one_first(evicted) -> None:
    store = VectorStore(4 * SIZE, evicted.append)
    store.put(vector(1))
    assert [store.put_ahead(vector(value), "sweep") for value in (2, 3, 4)] == [True] * 3
    store.put(vector(5))
    assert evicted == [vector(4).digest]
    store.pin(vector(6))
    store.retain([vector(7)])
    assert evicted[1:] == [vector(3).digest, vector(2).digest]
    store.put_named(vector(8), "joy", name(vector(8)))
    assert evicted[3:] == [vector(1).digest]


def test_vectors_that_are_stored_ahead_take_only_places_that_nobody_needs(store, evicted) -> None:
    store.put(vector(1))
    store.pin(vector(2))
    assert store.put_ahead(vector(3), "sweep")
    assert evicted == [vector(1).digest]
    assert not store.put_ahead(vector(4), "sweep")
    assert not store.put_ahead(vector(5), "another sweep")
    assert store.put_ahead(vector(3), "another sweep")
    assert (evicted[1:], len(store)) == ([], 2)


@pytest.mark.parametrize("how", ["put", "get", "pin", "retain", "still_has"])
def test_a_vector_that_was_stored_ahead_is_one_like_others_once_it_is_used(
    store, evicted, how: str
) -> None:
    ahead = vector(1)
    store.put_ahead(ahead, "sweep")
    store.put(vector(2))
    match how:
        case "put":
            store.put(ahead)
        case "get":
            store.get(ahead.digest, "v")
        case "pin":
            store.pin(ahead)
            store.unpin([ahead.digest])
        case "retain":
            store.retain([ahead])
            store.release([ahead])
        case "still_has":
            assert store.still_has({}, {ahead.digest: ahead})
    store.put(vector(3))
    assert evicted == [vector(2).digest]


def test_vectors_that_nobody_expects_any_more_are_the_first_to_go(store, evicted) -> None:
    store.put(vector(1))
    store.put_ahead(vector(2), "sweep")
    store.release_ahead("another sweep")
    assert store.put_ahead(vector(3), "another sweep")
    assert evicted == [vector(1).digest]
    store.release_ahead("sweep")
    assert store.put_ahead(vector(4), "another sweep")
    assert evicted[1:] == [vector(2).digest]


def test_a_refused_vector_evicts_nothing(store, evicted) -> None:
    store.pin(vector(1))
    store.put(vector(2))
    large = make_vector(FloatType.FLOAT32, 2, 2, bytes(16), "v")
    with pytest.raises(StoreFull):
        store.put(large)
    assert (evicted, len(store)) == ([], 2)


def test_a_name_moves_and_the_vector_it_leaves_may_go(store, evicted) -> None:
    first = store.put_named(vector(1), "joy", name(vector(1)))
    moved = store.put_named(vector(2), "joy", name(vector(2)))
    again = store.put_named(vector(2), "joy", name(vector(2)))
    assert [first, moved, again] == [
        PutResult(False, b""),
        PutResult(False, vector(1).digest),
        PutResult(True, b""),
    ]
    assert store.named("joy", "n").digest == vector(2).digest
    store.put(vector(3))
    assert evicted == [vector(1).digest]


def test_a_deleted_name_leaves_running_requests_their_vector(store, evicted) -> None:
    store.put_named(vector(1), "joy", name(vector(1)))
    store.pin(store.get(store.named("joy", "n").digest, "v"))
    assert store.delete_name("joy", "n") == vector(1).digest
    store.put(vector(2))
    store.put(vector(3))
    assert vector(1).digest in store
    with pytest.raises(NameNotFound):
        store.named("joy", "n")


def test_two_names_on_one_vector_both_hold_it(store, evicted) -> None:
    for label in ("a", "b"):
        store.put_named(vector(1), label, name(vector(1)))
    store.delete_name("a", "n")
    store.put(vector(2))
    store.put(vector(3))
    assert evicted == [vector(2).digest]


def test_pinning_brings_an_evicted_vector_back(store) -> None:
    held = vector(1)
    store.pin(held)
    assert store.get(held.digest, "v") is held


def test_a_listing_has_a_line_per_name_and_one_for_the_unnamed() -> None:
    store = VectorStore(100, lambda digest: None)
    store.put_named(vector(1), "b", name(vector(1)))
    store.put_named(vector(1), "a", name(vector(1)))
    store.put(vector(2))
    store.pin(vector(2))
    lines = [(e.name, e.vector.digest, e.users) for e in store.entries("")]
    assert lines == [
        ("", vector(2).digest, 1),
        ("a", vector(1).digest, 0),
        ("b", vector(1).digest, 0),
    ]
    assert [e.name for e in store.entries("a")] == ["a"]


def test_a_listing_goes_on_after_any_line_there_or_not() -> None:
    store = VectorStore(100, lambda digest: None)
    for label in ("a", "b/1", "b/2", "c"):
        store.put_named(vector(1), label, name(vector(1)))
    store.put(vector(2))

    def after(label: str, digest: bytes, prefix: str = "") -> list[str]:
        return [entry.name for entry in store.entries(prefix, Key(label, digest))]

    assert after("", vector(2).digest) == ["a", "b/1", "b/2", "c"]
    assert after("b/1", vector(1).digest) == ["b/2", "c"]
    assert after("b/1", bytes(32)) == ["b/1", "b/2", "c"]
    assert after("b/15", bytes(32)) == ["b/2", "c"]
    assert after("a", vector(1).digest, "b/") == ["b/1", "b/2"]
    assert after("b/1", vector(1).digest, "b/") == ["b/2"]
    assert after("c", vector(1).digest, "b/") == []


def test_a_listing_is_the_store_whatever_happened_to_it() -> None:
    chance = random.Random(0)
    store = VectorStore(6 * SIZE, lambda digest: None)
    made = [vector(value) for value in range(12)]
    for _ in range(2000):
        one, label = chance.choice(made), f"n{chance.randrange(5)}"
        with contextlib.suppress(StoreFull, NameNotFound):
            match chance.randrange(4):
                case 0:
                    store.put(one)
                case 1:
                    store.put_named(one, label, name(one))
                case 2:
                    store.delete_name(label, "n")
                case 3:
                    with contextlib.suppress(ValueError), store.retained(one):
                        raise ValueError
        names = store.names
        named = {label.digest for label in names.values()}
        bare = [("", v.digest) for v in made if v.digest in store and v.digest not in named]
        lines = [(label, of.digest) for label, of in names.items()]
        assert [(e.name, e.vector.digest) for e in store.entries("")] == sorted(bare + lines)


def test_a_store_that_names_fill_gives_no_hope(store) -> None:
    store.put_named(vector(1), "joy", name(vector(1)))
    store.put_named(vector(2), "fear", name(vector(2)))
    with pytest.raises(StoreFull) as caught:
        store.put(vector(3))
    assert caught.value.retry_after is None


def test_names_with_the_longest_descriptions_and_sites_take_bounded_memory(store) -> None:
    sites = types_pb2.SiteSet(list=types_pb2.LayerList(layers=range(1024)))
    store.put(vector(1))
    large = Name(vector(1).digest, "d" * 1024, sites)
    count = 0
    with contextlib.suppress(StoreFull):
        for count in range(vectors.NAMES):
            store.put_named(vector(1), f"n{count}", large)
    assert 5000 < count < 10_000  # of these each takes about 10 KB
    with pytest.raises(StoreFull, match="Delete names"):
        store.put_named(vector(1), "n", large)
    store.put_named(vector(1), "n0", Name(vector(1).digest, "", None))  # less than before
    for number in range(count):
        store.delete_name(f"n{number}", "name")
    store.put_named(vector(1), "n0", Name(vector(1).digest, "d" * 1024, sites))


def test_names_are_limited_but_may_move(store, monkeypatch) -> None:
    monkeypatch.setattr(vectors, "NAMES", 1)
    store.put_named(vector(1), "joy", name(vector(1)))
    with pytest.raises(StoreFull):
        store.put_named(vector(2), "fear", name(vector(2)))
    assert len(store) == 1
    assert not store.put_named(vector(2), "joy", name(vector(2))).existed
