"""The store of vectors: immutable content under its digest, and names that can move.

A vector that has a name, or that a running request or the server-wide steering uses, is never
evicted. So a name that moves or is deleted does not change running requests. Vectors that were
stored ahead, for requests to come, are evicted before all others. Vectors and names each have a
limit of memory. Every name refers to a stored vector.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from rheostat_server import validation
from rheostat_server.errors import (
    NameNotFound,
    NonFinite,
    Resource,
    StoreFull,
    VectorNotFound,
    VectorShape,
)
from rheostat_server.limits import NAMES, NAMES_BYTES, RETRY_SECONDS, TENSOR_RANK, VECTOR_ROWS
from rheostat_server.tensors import FloatType, widen
from rheostat_server.vectors.listing import FIRST, Key, Listing
from rheostat_server.vectors.token_directions import TokenDirections
from rheostat_wire.digests import vector_digest
from rheostat_wire.dtypes import FloatArray
from rheostat_wire.v1 import types_pb2, vector_pb2

_NAME_BYTES = 512
_SITES_BYTES = 512
_LAYER_BYTES = 8
"""Approximate memory of a name, of its sites, and of a layer in a list of its sites."""


@dataclass(frozen=True, slots=True)
class Vector:
    """Content of a vector, [rows, width]."""

    digest: bytes
    """SHA-256 of the canonical form; see `VectorRef` in steering.proto."""
    kind: FloatType
    rows: int
    width: int
    data: bytes
    """Elements, little-endian, row-major."""
    norms: tuple[float, ...]
    """L2 norm of each row."""
    peaks: tuple[float, ...]
    """Largest magnitude in each row."""

    @property
    def size(self) -> int:
        """Bytes of the elements."""
        return len(self.data)

    @property
    def float32_size(self) -> int:
        """Bytes of the elements as float32, in which workers get them."""
        return 4 * self.rows * self.width

    def float32_bytes(self) -> bytes:
        """The elements as float32, widened exactly."""
        return widen(self.data, self.kind).tobytes()

    def row(self, index: int) -> FloatArray:
        """A row as float32, widened exactly: [width]."""
        size = self.width * self.kind.itemsize
        return widen(self.data[index * size : (index + 1) * size], self.kind)


def vector_rows(shape: Sequence[int], width: int, path: str) -> int:
    """The number of rows of a vector of this shape, which must be [rows, `width`].

    Raises:
        InvalidValue: it has too many extents.
        VectorShape: it is another shape, or has too many rows.
    """
    validation.check_count(len(shape), TENSOR_RANK, path, "extents")
    if len(shape) != 2 or not 1 <= shape[0] <= VECTOR_ROWS or shape[1] != width:
        got = f"[{', '.join(str(extent) for extent in shape[:8])}]"
        raise VectorShape(
            f"the shape is {got}; vectors of this model are [1 to {VECTOR_ROWS}, {width}]",
            field=path,
            metadata={"expected": f"[1..{VECTOR_ROWS}, {width}]", "got": got},
        )
    return shape[0]


def make_vector(kind: FloatType, rows: int, width: int, data: bytes, path: str) -> Vector:
    """A vector of `rows * width` elements.

    Raises:
        NonFinite: an element is infinite or not a number.
    """
    values = widen(data, kind).reshape(rows, width)
    finite = np.isfinite(values)
    if not finite.all():
        row, column = (int(i) for i in np.argwhere(~finite)[0])
        raise NonFinite(f"element [{row}, {column}] is not finite", field=path)
    norms = np.linalg.norm(values.astype(np.float64), axis=1)
    return Vector(
        digest=vector_digest(kind.dtype, rows, width, data),
        kind=kind,
        rows=rows,
        width=width,
        data=data,
        norms=tuple(norms.tolist()),
        peaks=tuple(np.abs(values).max(axis=1, initial=0.0).astype(np.float64).tolist()),
    )


@dataclass(frozen=True, slots=True)
class Name:
    """A label on a vector."""

    digest: bytes
    """The vector that has the name."""
    description: str
    """A description for people."""
    sites: types_pb2.SiteSet | None
    """The sites at which the vector should be used. The server does not enforce it."""


def _name_bytes(name: str, label: Name) -> int:
    text = len(name) + len(label.description.encode())
    if label.sites is None:
        return _NAME_BYTES + text
    return _NAME_BYTES + text + _SITES_BYTES + _LAYER_BYTES * len(label.sites.list.layers)


class PutResult(NamedTuple):
    """The result of storing a vector."""

    existed: bool
    """Whether it was stored before."""
    previous: bytes
    """The digest that had the name before, if the name moved; otherwise empty."""


class Entry(NamedTuple):
    """One line of a listing."""

    name: str
    label: Name | None
    vector: Vector
    store_time: float
    users: int


class VectorView:
    """The vectors and names of a store, for reading from any thread.

    Each look-up is one look-up in a dictionary, which no other thread can interrupt.
    """

    def __init__(
        self,
        vectors: Mapping[bytes, Vector],
        names: Mapping[str, Name],
        directions: TokenDirections,
    ) -> None:
        self._vectors = vectors
        self._names = names
        self._directions = directions

    def get(self, digest: bytes, path: str) -> Vector:
        """A vector by digest.

        Raises:
            VectorNotFound: it is not stored.
        """
        vector = self._vectors.get(digest)
        if vector is None:
            raise VectorNotFound(
                f"no vector {digest.hex()} is stored",
                field=path,
                resource=Resource("vector", digest.hex()),
            )
        return vector

    def named(self, name: str, path: str) -> Name:
        """A name's label.

        Raises:
            NameNotFound: there is no such name.
        """
        label = self._names.get(name)
        if label is None:
            raise NameNotFound(
                f'no vector has the name "{name}"', field=path, resource=Resource("name", name)
            )
        return label

    def token_direction(self, direction: vector_pb2.TokenDirection, path: str) -> Vector:
        """The vector [1, W] of a direction of a token.

        Raises:
            InvalidArgument: there is no such token.
            DirectionNotLoaded: it has not been loaded.
        """
        row = self._directions.find(direction, path)
        return make_vector(FloatType.FLOAT32, 1, len(row), row.astype("<f4").tobytes(), path)

    def size(self, reference: str | bytes) -> int:
        """Bytes of the vector of a name or a digest; 0 if there is none."""
        if isinstance(reference, str):
            label = self._names.get(reference)
            reference = b"" if label is None else label.digest
        vector = self._vectors.get(reference)
        return 0 if vector is None else vector.size


class Lookups(VectorView):
    """A view that records the results of its look-ups."""

    def __init__(self, view: VectorView) -> None:
        super().__init__(view._vectors, view._names, view._directions)
        self.vectors: dict[bytes, Vector] = {}
        """The vectors that were found, by digest."""
        self.names: dict[str, Name] = {}
        """The names that were found."""

    def get(self, digest: bytes, path: str) -> Vector:
        """A vector by digest."""
        self.vectors[digest] = vector = super().get(digest, path)
        return vector

    def named(self, name: str, path: str) -> Name:
        """A name's label."""
        self.names[name] = label = super().named(name, path)
        return label


class VectorStore:
    """All vectors of a server. Used on the event loop alone; no method waits.

    `on_evict` is called with the digest of every evicted vector.
    """

    def __init__(self, capacity: int, on_evict: Callable[[bytes], None]) -> None:
        self.capacity = capacity
        """Bytes that all vectors together may take."""
        self._on_evict = [on_evict]
        self._vectors: OrderedDict[bytes, Vector] = OrderedDict()
        self._store_time: dict[bytes, float] = {}
        self._names: dict[str, Name] = {}
        self.directions = TokenDirections()
        """The directions of tokens that requests may refer to."""
        self._view = VectorView(self._vectors, self._names, self.directions)
        self._named: Counter[bytes] = Counter()
        self._users: Counter[bytes] = Counter()
        self._retained: Counter[bytes] = Counter()
        self._ahead: dict[bytes, object] = {}
        """By digest: the owner of each vector that was stored ahead and has not been used yet. In
        the order in which they were stored."""
        self._listing = Listing()
        self._used = 0
        self._names_used = 0

    def follow(self, on_evict: Callable[[bytes], None]) -> None:
        """Also calls this function with the digest of every evicted vector."""
        self._on_evict.append(on_evict)

    def __len__(self) -> int:
        return len(self._vectors)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._vectors

    @property
    def used_bytes(self) -> int:
        """Bytes that the stored vectors take."""
        return self._used

    @property
    def pins(self) -> int:
        """Number of pins, of all running requests."""
        return self._users.total()

    @property
    def names(self) -> Mapping[str, Name]:
        """A copy of all names."""
        return dict(self._names)

    def store_time(self, digest: bytes) -> float:
        """The time at which a stored vector was stored, in seconds since the epoch."""
        return self._store_time[digest]

    def put(self, vector: Vector) -> bool:
        """Stores a vector. Returns whether it was stored before.

        Raises:
            StoreFull: vectors in use leave too little memory.
        """
        if vector.digest in self._vectors:
            self._use(vector.digest)
            return True
        self._make_room(vector.size)
        self._add(vector)
        return False

    def put_ahead(self, vector: Vector, owner: object) -> bool:
        """Stores a vector that no request uses yet. Returns whether the store has it.

        Any other vector may take its place until it is used. So it takes only the place of vectors
        that nobody uses, and that were not stored ahead themselves.

        Args:
            vector: the vector.
            owner: any object; the caller later passes it to `release_ahead`.
        """
        if vector.digest in self._vectors:
            self._vectors.move_to_end(vector.digest)
            return True
        try:
            self._make_room(vector.size, ahead=True)
        except StoreFull:
            return False
        self._add(vector)
        self._ahead[vector.digest] = owner
        return True

    def release_ahead(self, owner: object) -> None:
        """Makes the unused vectors that an owner stored ahead the least recently used ones."""
        for digest in [digest for digest, other in self._ahead.items() if other is owner]:
            del self._ahead[digest]
            self._vectors.move_to_end(digest, last=False)

    def put_named(self, vector: Vector, name: str, label: Name) -> PutResult:
        """Stores a vector and puts a name on it. An existing name moves.

        Raises:
            StoreFull: vectors in use or other names leave too little memory.
        """
        self.check_name(name, label, "header.name")
        before = self._names.get(name)
        existed = self.put(vector)
        self._names[name] = label
        self._names_used += self._more_bytes(name, label, before)
        if before is not None:
            self._unname(name, before.digest)
        if not self._named[vector.digest]:
            self._listing.remove("", vector.digest)
        self._named[vector.digest] += 1
        self._listing.add(name, vector.digest)
        moved = before is not None and before.digest != vector.digest
        return PutResult(existed, before.digest if before is not None and moved else b"")

    def label(self, name: str) -> Name | None:
        """A name's label; None if there is no such name."""
        return self._names.get(name)

    def check_name(self, name: str, label: Name, path: str) -> None:
        """Checks that a name fits into the store.

        Raises:
            StoreFull: there are too many names, or they take too much memory.
        """
        before = self._names.get(name)
        if before is None and len(self._names) >= NAMES:
            raise StoreFull(f"there are {NAMES} names, the maximum; delete some", field=path)
        size = self._more_bytes(name, label, before)
        if self._names_used + size > NAMES_BYTES:
            raise StoreFull(
                f"the name, its description and its sites take {size} bytes more; all names take "
                f"{self._names_used} of {NAMES_BYTES}. Delete names, or shorten this one",
                field=path,
            )

    @staticmethod
    def _more_bytes(name: str, label: Name, before: Name | None) -> int:
        """Further bytes that names take after a change of this name."""
        return _name_bytes(name, label) - (0 if before is None else _name_bytes(name, before))

    def restore(self, vector: Vector, store_time: float, labels: Mapping[str, Name]) -> None:
        """Stores a vector from the folder of vectors, with its names.

        Raises:
            StoreFull: vectors in use leave too little memory.
        """
        self.put(vector)
        self._store_time[vector.digest] = store_time
        for name, label in labels.items():
            self.put_named(vector, name, label)

    @contextmanager
    def retained(self, vector: Vector) -> Iterator[bool]:
        """Stores a vector, and pins it during the context. Yields whether it was stored before.

        If the context fails, a vector that was not stored before is removed, unless it is in use.

        Raises:
            StoreFull: vectors in use leave too little memory.
        """
        existed = keep = vector.digest in self
        self.retain([vector])
        try:
            yield existed
            keep = True
        finally:
            self.release([vector])
            digest = vector.digest
            if not (keep or self._named[digest] or self._users[digest] or self._retained[digest]):
                self._evict(digest)

    def get(self, digest: bytes, path: str) -> Vector:
        """A vector by digest.

        Raises:
            VectorNotFound: it is not stored.
        """
        vector = self._view.get(digest, path)
        self._use(digest)
        return vector

    def named(self, name: str, path: str) -> Name:
        """A name's label.

        Raises:
            NameNotFound: there is no such name.
        """
        return self._view.named(name, path)

    def still_has(self, names: Mapping[str, Name], vectors: Mapping[bytes, Vector]) -> bool:
        """Whether the store still has these names and vectors.

        If so, the vectors count as used now.
        """
        for name, label in names.items():
            if self._names.get(name) is not label:
                return False
        for digest, vector in vectors.items():
            if self._vectors.get(digest) is not vector:
                return False
        for digest in vectors:
            self._use(digest)
        return True

    def view(self) -> "VectorView":
        """The store for functions that run on a thread."""
        return self._view

    def delete_name(self, name: str, path: str) -> bytes:
        """Deletes a name. Returns the digest of its vector.

        Raises:
            NameNotFound: there is no such name.
        """
        label = self.named(name, path)
        del self._names[name]
        self._names_used -= _name_bytes(name, label)
        self._unname(name, label.digest)
        return label.digest

    def pin(self, *vectors: Vector) -> list[bytes]:
        """Keeps vectors for a request, and stores them if necessary; returns their digests.

        Raises:
            StoreFull: vectors in use leave too little memory. None of these vectors is then kept.
        """
        pinned: list[bytes] = []
        try:
            for vector in vectors:
                digest = vector.digest
                if digest not in self._users:  # a vector in use is stored
                    self.put(vector)
                self._users[digest] += 1
                pinned.append(digest)
        except BaseException:
            self.unpin(pinned)
            raise
        return pinned

    def unpin(self, digests: Iterable[bytes]) -> None:
        """Ends one `pin` of each of these vectors. The end of the last pin counts as a use."""
        for digest in digests:
            self._users[digest] -= 1
            if not self._users[digest]:
                del self._users[digest]
                self._use(digest)

    def retain(self, vectors: Sequence[Vector]) -> None:
        """Keeps vectors for server-wide steering or a subscription. Stores them if necessary.

        Raises:
            StoreFull: vectors in use leave too little memory. None of these vectors is then kept.
        """
        retained: list[Vector] = []
        try:
            for vector in vectors:
                self.put(vector)
                self._retained[vector.digest] += 1
                retained.append(vector)
        except StoreFull:
            self.release(retained)
            raise

    def release(self, vectors: Sequence[Vector]) -> None:
        """Ends one `retain`."""
        self._retained.subtract(vector.digest for vector in vectors)
        self._retained += Counter()  # removes counts of 0

    def entry(self, name: str, digest: bytes, path: str) -> Entry:
        """The entry of one vector with a name, or without one if `name` is empty."""
        return self._entry(name, self.get(digest, path))

    def entries(self, prefix: str, after: Key = FIRST) -> Iterator[Entry]:
        """Entries whose names begin with `prefix`, by name, then digest.

        Without a prefix, vectors without a name come first. Entries after the key `after` are
        yielded, as they are in the store at that moment.
        """
        for name, digest in self._listing.after(after, prefix):
            yield self._entry(name, self._vectors[digest])

    def _entry(self, name: str, vector: Vector) -> Entry:
        return Entry(
            name,
            self._names.get(name),
            vector,
            self._store_time[vector.digest],
            self._users[vector.digest],
        )

    def _unname(self, name: str, digest: bytes) -> None:
        self._listing.remove(name, digest)
        self._named[digest] -= 1
        if not self._named[digest]:
            del self._named[digest]
            self._listing.add("", digest)

    def _add(self, vector: Vector) -> None:
        self._vectors[vector.digest] = vector
        self._listing.add("", vector.digest)
        self._store_time[vector.digest] = time.time()
        self._used += vector.size

    def _use(self, digest: bytes) -> None:
        """Makes a vector the most recently used one."""
        self._vectors.move_to_end(digest)
        self._ahead.pop(digest, None)

    def _make_room(self, size: int, *, ahead: bool = False) -> None:
        """Evicts vectors that nobody uses until `size` bytes are free.

        Those that were stored ahead go first, the last stored one before all others: it is needed
        last. They stay if the bytes are for a vector that is stored ahead.

        Raises:
            StoreFull: vectors in use leave too little memory. Nothing was evicted.
        """
        free = self.capacity - self._used
        pinned = 0
        victims = []
        others = (digest for digest in self._vectors if digest not in self._ahead)
        for digest in chain(() if ahead else reversed(self._ahead), others):
            if free >= size:
                break
            vector = self._vectors[digest]
            if self._named[digest] or self._retained[digest]:
                continue
            if self._users[digest]:
                pinned += vector.size
                continue
            victims.append(digest)
            free += vector.size
        if free < size:
            raise StoreFull(
                f"{size} bytes are needed; names, running requests and server-wide steering use "
                f"all but {free} of {self.capacity}. Delete names, or raise the server's "
                "--vector-store-mib",
                retry_after=RETRY_SECONDS if free + pinned >= size else None,
            )
        for digest in victims:
            self._evict(digest)

    def _evict(self, digest: bytes) -> None:
        self._used -= self._vectors.pop(digest).size
        self._ahead.pop(digest, None)
        self._listing.remove("", digest)
        del self._store_time[digest]
        for on_evict in self._on_evict:
            on_evict(digest)
