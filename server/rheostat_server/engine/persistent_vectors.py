"""Changes of stored vectors and names, which are written to the folder of vectors if there is one.

Invariants: a change that was reported as done is on the disk. Evicted vectors are deleted from the
folder. A change is written to the disk before the store's names, so that a failed change has no
effect. A change that has begun is completed, even if its caller is cancelled.
"""

import asyncio
import errno
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

from rheostat_server.errors import (
    NameConflict,
    NotSupported,
    StoreFull,
    VectorDirFailed,
)
from rheostat_server.tasks.offload import on_pool
from rheostat_server.vectors.files import VectorFiles
from rheostat_server.vectors.store import Name, PutResult, Vector, VectorStore
from rheostat_wire.v1 import types_pb2

_LOG = logging.getLogger(__name__)

_THREADS = ThreadPoolExecutor(2, "vector-files")
"""Threads for the disk of the folder alone, so that a disk that hangs delays no request."""

P = ParamSpec("P")
T = TypeVar("T")


class Naming(NamedTuple):
    """A change of a name."""

    digest: bytes
    """The vector that gets the name."""
    expected: bytes | None
    """The vector that must have the name now; empty if none may have it. None: not checked."""
    description: str | None
    """A description for people. None: not changed."""
    sites: types_pb2.SiteSet | None
    """The sites at which the vector should be used. None: not changed."""

    def label(self, name: str, before: Name | None) -> Name:
        """The name's new label.

        Raises:
            NameConflict: the name is not on the expected vector.
        """
        current = before.digest if before is not None else b""
        if self.expected is not None and self.expected != current:
            where = f"on {current.hex()}" if current else "on no vector"
            raise NameConflict(
                f'the name "{name}" is {where} now',
                field="expected_digest",
                metadata={"digest": current.hex()},
            )
        description, sites = self.description, self.sites
        if before is not None:
            description = before.description if description is None else description
            sites = before.sites if sites is None else sites
        return Name(self.digest, description or "", sites)


Change = Callable[Concatenate["PersistentVectorStore", P], Coroutine[None, None, T]]
"""A method that changes the store."""


def _completed(change: Change[P, T]) -> Change[P, T]:
    """Lets a change run while no other runs, and to its end even if its caller is cancelled."""

    @wraps(change)
    async def complete(store: "PersistentVectorStore", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.shield(store.begin(partial(change, store, *args, **kwargs)))

    return complete


class PersistentVectorStore:
    """Changes the store, and the folder of vectors once `restore` was called."""

    def __init__(self, store: VectorStore) -> None:
        """Changes only the store; see `restore`."""
        self._store = store
        self._files: VectorFiles | None = None
        self._saved: set[bytes] = set()
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[object]] = set()
        store.follow(self._on_evict)

    async def restore(self, files: VectorFiles, width: int) -> None:
        """Fills the store from a folder. Later changes are written to the folder.

        If the vectors do not fit into the store, the oldest vectors without a name are evicted.

        Raises:
            VectorDirFailed: the folder cannot be read, belongs to another model, or has
                vectors with names that do not fit into the store.
        """
        vectors, names = await on_pool(_THREADS, files.read)
        by_digest: defaultdict[bytes, dict[str, Name]] = defaultdict(dict)
        for name, label in names.items():
            by_digest[label.digest][name] = label
        for vector, store_time in vectors:
            if vector.width != width:
                raise VectorDirFailed(
                    f"{files.folder} holds vectors of width {vector.width}, but the model's stream "
                    f"has {width}: give each model its own --vector-dir"
                )
            labels = by_digest[vector.digest]
            try:
                self._store.restore(vector, store_time, labels)
            except StoreFull as error:
                if labels:
                    raise VectorDirFailed(
                        f"the vectors with names in {files.folder} do not fit: raise "
                        "--vector-store-mib"
                    ) from error
        self._files = files
        self._saved = {saved.vector.digest for saved in vectors}
        evicted = len(vectors) - len(self._store)
        if evicted:
            _LOG.warning("%d vectors without a name do not fit any more and are deleted", evicted)
            self.begin(partial(self._sweep, files))
        _LOG.info(
            "%d vectors and %d names were read from %s", len(self._store), len(names), files.folder
        )

    @_completed
    async def put(self, vector: Vector) -> bool:
        """Stores a vector. Returns whether it was stored before.

        Raises:
            StoreFull: vectors in use leave too little memory, or the disk is full.
            NotSupported: the folder cannot be written.
        """
        with self._store.retained(vector) as existed:
            await self._save(vector)
        return existed

    @_completed
    async def put_named(self, vector: Vector, name: str, label: Name) -> PutResult:
        """Stores a vector and puts a name on it. An existing name moves.

        Raises:
            StoreFull: vectors in use or other names leave too little memory, or the disk is full.
            NotSupported: the folder cannot be written.
        """
        self._store.check_name(name, label, "header.name")
        with self._store.retained(vector) as existed:
            result = await self._name(vector, name, label)
        return PutResult(existed, result.previous)

    @_completed
    async def set_name(self, name: str, naming: Naming) -> bytes:
        """Puts a name on a stored vector. Returns the digest that had the name before, or nothing.

        Raises:
            NameConflict: the name is not on the expected vector.
            VectorNotFound: the vector is not stored.
            StoreFull: other names leave too little memory, or the disk is full.
            NotSupported: the folder cannot be written.
        """
        before = self._store.label(name)
        label = naming.label(name, before)
        vector = self._store.get(naming.digest, "digest")
        self._store.check_name(name, label, "name")
        with self._store.retained(vector):
            await self._name(vector, name, label)
        return before.digest if before is not None else b""

    @_completed
    async def delete_name(self, name: str, path: str) -> bytes:
        """Deletes a name. Returns the digest of its vector.

        Raises:
            NameNotFound: there is no such name.
            StoreFull, NotSupported: the folder cannot be written.
        """
        self._store.named(name, path)
        if self._files is not None:
            await _on_disk(self._files.delete_name, name)
        return self._store.delete_name(name, path)

    async def settle(self) -> None:
        """Returns once all changes are on the disk."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _name(self, vector: Vector, name: str, label: Name) -> PutResult:
        """Puts a name on a vector that the store holds."""
        await self._save(vector)
        if self._files is not None:
            await _on_disk(self._files.set_name, name, label)
        return self._store.put_named(vector, name, label)

    async def _save(self, vector: Vector) -> None:
        if self._files is not None and vector.digest not in self._saved:
            await _on_disk(self._files.write, vector, self._store.store_time(vector.digest))
            self._saved.add(vector.digest)

    def _on_evict(self, digest: bytes) -> None:
        if self._files is not None and digest in self._saved:
            self.begin(partial(self._sweep, self._files))

    async def _sweep(self, files: VectorFiles) -> None:
        for digest in [digest for digest in self._saved if digest not in self._store]:
            self._saved.discard(digest)
            try:
                await on_pool(_THREADS, files.remove, digest)
            except OSError as error:
                _LOG.warning("the evicted vector %s stays on disk: %s", digest.hex(), error)

    def begin(self, change: Callable[[], Coroutine[None, None, T]]) -> asyncio.Task[T]:
        """Runs a change in a task, once no other runs."""
        task = asyncio.create_task(self._in_turn(change))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _in_turn(self, change: Callable[[], Coroutine[None, None, T]]) -> T:
        async with self._turn:
            return await change()


async def _on_disk(work: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    try:
        await on_pool(_THREADS, work, *args, **kwargs)
    except OSError as error:
        _LOG.error("vectors cannot be written: %s", error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(
                "the disk of the server's --vector-dir is full; nothing was changed"
            ) from error
        raise NotSupported(
            "the server's --vector-dir cannot be written "
            f"({error.strerror or 'input/output error'}); nothing was changed"
        ) from error
