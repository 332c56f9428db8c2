"""Keeps a folder in step with the store, where the server has one for its vectors.

Invariants: what was answered as stored, named or unnamed is on the disk; what the store evicts
leaves the folder. A change reaches the disk first and the store's names last, so a change that
fails is none. Each change is seen through to its end, whoever stops waiting for it.
"""

import asyncio
import errno
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, ParamSpec, TypeVar

from rheostat_server.errors import (
    NameConflict,
    NotSupported,
    RheostatError,
    StoreFull,
    VectorDirFailed,
)
from rheostat_server.tasks.offload import on_pool
from rheostat_server.vectors.files import VectorFiles
from rheostat_server.vectors.store import Name, PutResult, Vector, VectorStore
from rheostat_wire.v1 import types_pb2

_LOG = logging.getLogger(__name__)

_THREADS = ThreadPoolExecutor(2, "vector-files")
"""Threads for the folder's disk alone: one that hangs holds up no request."""

P = ParamSpec("P")
T = TypeVar("T")


class Naming(NamedTuple):
    """What a name shall stand for."""

    digest: bytes
    """The vector."""
    expected: bytes | None
    """The vector that has the name now, empty: none; None: whatever holds."""
    description: str | None
    """For people; None: as the name has it."""
    sites: types_pb2.SiteSet | None
    """Where the vector is meant to be used; None: as the name has it."""

    def label(self, name: str, before: Name | None) -> Name:
        """The name's new label.

        Raises:
            NameConflict: the name is not where it was expected.
        """
        held = before.digest if before is not None else b""
        if self.expected is not None and self.expected != held:
            where = f"on {held.hex()}" if held else "on no vector"
            raise NameConflict(
                f'the name "{name}" is {where} now',
                field="expected_digest",
                metadata={"digest": held.hex()},
            )
        description, sites = self.description, self.sites
        if before is not None:
            description = before.description if description is None else description
            sites = before.sites if sites is None else sites
        return Name(self.digest, description or "", sites)


class PersistentVectorStore:
    """The store as callers change it: durably, once `restore` has given it a folder."""

    def __init__(self, store: VectorStore) -> None:
        """A keeper without a folder: what it does, it does to the store alone."""
        self._store = store
        self._files: VectorFiles | None = None
        self._saved: set[bytes] = set()
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[object]] = set()
        store.follow(self._on_evict)

    async def restore(self, files: VectorFiles, width: int) -> None:
        """Fills the store from a folder, and keeps the folder in step from then on.

        Vectors without a name that do not fit any more are evicted, oldest first.

        Raises:
            VectorDirFailed: the folder cannot be read, is another model's, or has more vectors
                with names than the store has room for.
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
            _LOG.warning("%d vectors without a name do not fit any more and go", evicted)
            self._sweep_soon(files)
        _LOG.info(
            "%d vectors and %d names are back from %s", len(self._store), len(names), files.folder
        )

    async def put(self, vector: Vector) -> bool:
        """Stores a vector; True if it was there before.

        Raises:
            StoreFull: held vectors leave too little room, or the disk is full.
            NotSupported: the folder cannot be written.
        """
        return await self._see_through(self._put(vector))

    async def put_named(self, vector: Vector, name: str, label: Name) -> PutResult:
        """Stores a vector and puts a name on it, which moves if it was elsewhere.

        Raises:
            StoreFull: held vectors or other names leave too little room, or the disk is full.
            NotSupported: the folder cannot be written.
        """
        return await self._see_through(self._put_named(vector, name, label))

    async def set_name(self, name: str, naming: Naming) -> bytes:
        """Puts a name on a vector that is stored; the digest that it was on, empty: none.

        Raises:
            NameConflict: the name is not where it was expected.
            VectorNotFound: the vector is not stored.
            StoreFull: other names leave too little room, or the disk is full.
            NotSupported: the folder cannot be written.
        """
        return await self._see_through(self._set_name(name, naming))

    async def delete_name(self, name: str, path: str) -> bytes:
        """Takes a name off; the digest that it was on.

        Raises:
            NameNotFound: there is no such name.
            StoreFull, NotSupported: the folder cannot be written.
        """
        return await self._see_through(self._delete_name(name, path))

    async def settle(self) -> None:
        """Returns once no change is on its way to the disk."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _put(self, vector: Vector) -> bool:
        async with self._turn:
            with self._store.held(vector) as existed:
                await self._save(vector)
            return existed

    async def _put_named(self, vector: Vector, name: str, label: Name) -> PutResult:
        async with self._turn:
            self._store.check_name(name, label, "header.name")
            with self._store.held(vector) as existed:
                result = await self._name(vector, name, label)
            return PutResult(existed, result.previous)

    async def _set_name(self, name: str, naming: Naming) -> bytes:
        async with self._turn:
            before = self._store.label(name)
            label = naming.label(name, before)
            vector = self._store.get(naming.digest, "digest")
            self._store.check_name(name, label, "name")
            with self._store.held(vector):
                await self._name(vector, name, label)
            return before.digest if before is not None else b""

    async def _name(self, vector: Vector, name: str, label: Name) -> PutResult:
        """Puts a name on a vector that the store holds."""
        await self._save(vector)
        if self._files is not None:
            await _on_disk(self._files.set_name, name, label)
        return self._store.put_named(vector, name, label)

    async def _delete_name(self, name: str, path: str) -> bytes:
        async with self._turn:
            self._store.named(name, path)
            if self._files is not None:
                await _on_disk(self._files.delete_name, name)
            return self._store.delete_name(name, path)

    async def _save(self, vector: Vector) -> None:
        if self._files is not None and vector.digest not in self._saved:
            await _on_disk(self._files.write, vector, self._store.store_time(vector.digest))
            self._saved.add(vector.digest)

    def _on_evict(self, digest: bytes) -> None:
        if self._files is not None and digest in self._saved:
            self._sweep_soon(self._files)

    def _sweep_soon(self, files: VectorFiles) -> None:
        self._begin(self._sweep(files))

    async def _sweep(self, files: VectorFiles) -> None:
        async with self._turn:
            for digest in [digest for digest in self._saved if digest not in self._store]:
                self._saved.discard(digest)
                try:
                    await on_pool(_THREADS, files.remove, digest)
                except OSError as error:
                    _LOG.warning("the evicted vector %s stays on disk: %s", digest.hex(), error)

    def _begin(self, change: Coroutine[None, None, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(change)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _see_through(self, change: Coroutine[None, None, T]) -> T:
        return await asyncio.shield(self._begin(change))


async def _on_disk(work: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    try:
        await on_pool(_THREADS, work, *args, **kwargs)
    except OSError as error:
        _LOG.error("vectors cannot be written: %s", error)
        raise _failure(error) from error


def _failure(error: OSError) -> RheostatError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull("the disk of the server's --vector-dir is full; nothing was changed")
    return NotSupported(
        "the server's --vector-dir cannot be written "
        f"({error.strerror or 'input/output error'}); nothing was changed"
    )
