"""The folder follows the store: durable before the answer, evicted with the vector."""

import asyncio
import errno
import threading
from pathlib import Path

import numpy as np
import pytest

from rheostat_server.engine.persistent_vectors import Naming, PersistentVectorStore
from rheostat_server.errors import (
    NameConflict,
    NameNotFound,
    NotSupported,
    StoreFull,
    VectorDirFailed,
)
from rheostat_server.tensors import FloatType
from rheostat_server.vectors import store as vectors
from rheostat_server.vectors.files import VectorFiles
from rheostat_server.vectors.store import Name, PutResult, Vector, VectorStore, make_vector
from rheostat_wire.v1 import types_pb2

WIDTH = 2
SIZE = 4 * WIDTH


def vector(value: float) -> Vector:
    data = np.full((1, WIDTH), value, "<f4").tobytes()
    return make_vector(FloatType.FLOAT32, 1, WIDTH, data, "v")


def label(of: Vector, description: str = "") -> Name:
    return Name(of.digest, description, None)


class Server:
    """A store with its keeper, over a folder."""

    def __init__(self, folder: Path, vectors: int) -> None:
        self.files = VectorFiles(folder)
        self.store = VectorStore(vectors * SIZE, lambda digest: None)
        self.persistent_vectors = PersistentVectorStore(self.store)

    async def begin(self) -> "Server":
        await self.persistent_vectors.restore(self.files, WIDTH)
        return self

    async def end(self) -> None:
        await self.persistent_vectors.settle()
        self.files.close()

    @property
    def held(self) -> list[tuple[str, bytes]]:
        return [(entry.name, entry.vector.digest) for entry in self.store.entries("")]

    @property
    def on_disk(self) -> set[bytes]:
        return {saved.vector.digest for saved in self.files.read().vectors}


@pytest.fixture
async def begin(tmp_path: Path):
    """Starts a server over the test's folder, after ending the one before."""
    servers: list[Server] = []

    async def start(vectors: int = 3) -> Server:
        if servers:
            await servers[-1].end()
        servers.append(Server(tmp_path, vectors))
        return await servers[-1].begin()

    yield start
    await servers[-1].end()


async def test_what_was_put_is_there_after_a_restart(begin) -> None:
    server = await begin()
    assert not await server.persistent_vectors.put(vector(1))
    joy = label(vector(2), "glad")
    assert await server.persistent_vectors.put_named(vector(2), "joy", joy) == PutResult(False, b"")
    ages = [server.store.store_time(vector(value).digest) for value in (1, 2)]
    again = await begin()
    assert again.held == [("", vector(1).digest), ("joy", vector(2).digest)]
    assert again.store.get(vector(2).digest, "v") == vector(2)
    assert again.store.names == {"joy": joy}
    assert [again.store.store_time(vector(value).digest) for value in (1, 2)] == ages
    assert await again.persistent_vectors.put(vector(1))


async def test_names_are_gone_through_once_however_many_vectors_are_restored(
    begin, monkeypatch
) -> None:
    server = await begin(vectors=8)
    for value in range(8):
        await server.persistent_vectors.put_named(vector(value), f"v{value}", label(vector(value)))
    walks: list[int] = []

    class Names(dict[str, Name]):
        def items(self):
            walks.append(len(self))
            return super().items()

    read = VectorFiles.read

    def counting(files: VectorFiles):
        found = read(files)
        return found._replace(names=Names(found.names))

    monkeypatch.setattr(VectorFiles, "read", counting)
    again = await begin(vectors=8)
    assert [name for name, _ in again.held] == [f"v{value}" for value in range(8)]
    assert walks == [8]


async def test_a_name_that_moved_or_went_is_so_after_a_restart(begin) -> None:
    server = await begin()
    await server.persistent_vectors.put_named(vector(1), "joy", label(vector(1)))
    await server.persistent_vectors.put_named(vector(1), "fear", label(vector(1)))
    moved = await server.persistent_vectors.put_named(vector(2), "joy", label(vector(2)))
    assert moved == PutResult(False, vector(1).digest)
    assert await server.persistent_vectors.delete_name("fear", "name") == vector(1).digest
    with pytest.raises(NameNotFound):
        await server.persistent_vectors.delete_name("fear", "name")
    again = await begin()
    assert again.held == [("", vector(1).digest), ("joy", vector(2).digest)]


async def test_a_name_that_was_set_is_so_after_a_restart(begin) -> None:
    server = await begin()
    sites = types_pb2.SiteSet(points=[types_pb2.POINT_RESID_PRE])
    await server.persistent_vectors.put_named(vector(1), "joy", label(vector(1), "glad"))
    await server.persistent_vectors.put(vector(2))
    naming = Naming(vector(2).digest, vector(1).digest, None, sites)
    assert await server.persistent_vectors.set_name("joy", naming) == vector(1).digest
    with pytest.raises(NameConflict):
        await server.persistent_vectors.set_name("joy", naming)
    again = await begin()
    assert again.held == [("", vector(1).digest), ("joy", vector(2).digest)]
    assert again.store.names == {"joy": Name(vector(2).digest, "glad", sites)}


async def test_an_evicted_vector_leaves_the_folder(begin) -> None:
    server = await begin(vectors=2)
    await server.persistent_vectors.put(vector(1))
    await server.persistent_vectors.put_named(vector(2), "joy", label(vector(2)))
    await server.persistent_vectors.put(vector(3))
    await server.persistent_vectors.settle()
    assert server.on_disk == {vector(2).digest, vector(3).digest}
    server.store.pin(vector(4))
    await server.persistent_vectors.settle()
    assert server.on_disk == {vector(2).digest}


async def test_a_vector_that_only_a_request_brought_does_not_last_until_it_is_put(begin) -> None:
    server = await begin()
    server.store.pin(vector(1))
    server.store.pin(vector(2))
    assert server.on_disk == set()
    assert await server.persistent_vectors.put(vector(2))
    assert server.on_disk == {vector(2).digest}
    assert (await begin()).held == [("", vector(2).digest)]


async def test_a_vector_that_comes_back_before_its_file_went_keeps_it(begin) -> None:
    server = await begin(vectors=1)
    await server.persistent_vectors.put(vector(1))
    server.store.put(vector(2))
    await server.persistent_vectors.put(vector(1))
    await server.persistent_vectors.settle()
    assert server.on_disk == {vector(1).digest}


async def test_a_smaller_budget_evicts_the_oldest_without_a_name(begin) -> None:
    server = await begin()
    await server.persistent_vectors.put_named(vector(1), "joy", label(vector(1)))
    await server.persistent_vectors.put(vector(2))
    await server.persistent_vectors.put(vector(3))
    again = await begin(vectors=2)
    await again.persistent_vectors.settle()
    assert again.held == [("", vector(3).digest), ("joy", vector(1).digest)]
    assert again.on_disk == {vector(1).digest, vector(3).digest}


async def test_a_budget_too_small_for_the_names_ends_the_start_and_loses_nothing(begin) -> None:
    server = await begin()
    await server.persistent_vectors.put(vector(1))
    for value in (2, 3):
        await server.persistent_vectors.put_named(vector(value), f"v{value}", label(vector(value)))
    with pytest.raises(VectorDirFailed, match="raise --vector-store-mib"):
        await begin(vectors=1)
    assert len((await begin()).held) == 3


async def test_the_folder_of_a_model_of_another_width_ends_the_start(begin, tmp_path) -> None:
    server = await begin()
    await server.persistent_vectors.put(vector(1))
    await server.persistent_vectors.settle()
    with pytest.raises(VectorDirFailed, match="vectors of width 2, but the model's stream has 3"):
        await PersistentVectorStore(server.store).restore(server.files, 3)


@pytest.mark.parametrize(
    ("number", "error"), [(errno.ENOSPC, StoreFull), (errno.EROFS, NotSupported)]
)
async def test_a_vector_that_cannot_be_written_is_not_stored(
    begin, monkeypatch, number, error
) -> None:
    server = await begin()

    def fail(*_: object) -> None:
        raise OSError(number, "why")

    with monkeypatch.context() as broken:
        broken.setattr(server.files, "write", fail)
        for put in (
            server.persistent_vectors.put(vector(1)),
            server.persistent_vectors.put_named(vector(1), "joy", label(vector(1))),
        ):
            with pytest.raises(error, match="nothing was changed"):
                await put
    assert (server.held, server.on_disk, server.store.used_bytes) == ([], set(), 0)
    assert not await server.persistent_vectors.put(vector(1))


async def test_names_that_cannot_be_written_stay_as_they_were(begin, monkeypatch) -> None:
    server = await begin()
    await server.persistent_vectors.put_named(vector(1), "joy", label(vector(1)))

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "why")

    monkeypatch.setattr(server.files, "set_name", fail)
    monkeypatch.setattr(server.files, "delete_name", fail)
    with pytest.raises(NotSupported, match="nothing was changed"):
        await server.persistent_vectors.put_named(vector(2), "joy", label(vector(2)))
    with pytest.raises(NotSupported, match="nothing was changed"):
        await server.persistent_vectors.delete_name("joy", "name")
    assert server.held == [("joy", vector(1).digest)]
    assert (await begin()).store.names == {"joy": label(vector(1))}


async def test_a_full_store_refuses_before_anything_is_written(begin) -> None:
    server = await begin(vectors=1)
    await server.persistent_vectors.put_named(vector(1), "joy", label(vector(1)))
    with pytest.raises(StoreFull):
        await server.persistent_vectors.put_named(vector(2), "fear", label(vector(2)))
    assert server.on_disk == {vector(1).digest}


async def test_one_name_too_many_is_refused_before_anything_is_written(begin, monkeypatch) -> None:
    monkeypatch.setattr(vectors, "NAMES", 1)
    server = await begin()
    await server.persistent_vectors.put_named(vector(1), "joy", label(vector(1)))
    with pytest.raises(StoreFull, match="there are 1 names"):
        await server.persistent_vectors.put_named(vector(2), "fear", label(vector(2)))
    assert server.files.read().names.keys() == {"joy"}


async def test_names_that_take_too_much_memory_are_refused_before_anything_is_written(
    begin, monkeypatch
) -> None:
    monkeypatch.setattr(vectors, "NAMES_BYTES", 2000)
    server = await begin()
    await server.persistent_vectors.put_named(vector(1), "joy", label(vector(1), "d" * 1000))
    words = r"all names take 15\d\d of 2000"
    with pytest.raises(StoreFull, match=words) as caught:
        await server.persistent_vectors.put_named(vector(2), "fear", label(vector(2), "d" * 1000))
    assert caught.value.field == "header.name"
    naming = Naming(vector(1).digest, None, "d" * 1000, None)
    with pytest.raises(StoreFull, match=words) as caught:
        await server.persistent_vectors.set_name("fear", naming)
    assert caught.value.field == "name"
    assert server.files.read().names.keys() == {"joy"}
    assert server.on_disk == {vector(1).digest}
    await server.persistent_vectors.delete_name("joy", "name")
    await server.persistent_vectors.put_named(vector(2), "fear", label(vector(2), "d" * 1000))


async def test_a_put_that_nobody_waits_for_any_more_is_seen_through(begin, monkeypatch) -> None:
    server = await begin()
    entered, go_on = threading.Event(), threading.Event()
    set_name = server.files.set_name

    def slow(name: str, label: Name) -> None:
        entered.set()
        go_on.wait(10)
        set_name(name, label)

    monkeypatch.setattr(server.files, "set_name", slow)
    put = asyncio.create_task(
        server.persistent_vectors.put_named(vector(1), "joy", label(vector(1)))
    )
    await asyncio.to_thread(entered.wait, 10)
    assert server.store.names == {}
    put.cancel()
    with pytest.raises(asyncio.CancelledError):
        await put
    second = asyncio.create_task(
        server.persistent_vectors.put_named(vector(2), "fear", label(vector(2)))
    )
    go_on.set()
    await second
    assert server.files.read().names.keys() == {"joy", "fear"}
    assert server.store.names == server.files.read().names


async def test_a_vector_on_its_way_to_the_disk_is_not_evicted(begin, monkeypatch) -> None:
    server = await begin(vectors=1)
    entered, go_on = threading.Event(), threading.Event()
    write = server.files.write

    def slow(one: Vector, store_time: float) -> None:
        entered.set()
        go_on.wait(10)
        write(one, store_time)

    monkeypatch.setattr(server.files, "write", slow)
    put = asyncio.create_task(server.persistent_vectors.put(vector(1)))
    await asyncio.to_thread(entered.wait, 10)
    with pytest.raises(StoreFull):
        server.store.pin(vector(2))
    go_on.set()
    assert not await put
    assert server.on_disk == {vector(1).digest}


async def test_a_file_that_cannot_be_removed_is_reported(begin, monkeypatch, caplog) -> None:
    server = await begin(vectors=1)
    await server.persistent_vectors.put(vector(1))

    def fail(_: object) -> None:
        raise OSError(errno.EIO, "why")

    monkeypatch.setattr(server.files, "remove", fail)
    await server.persistent_vectors.put(vector(2))
    await server.persistent_vectors.settle()
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert vector(1).digest.hex() in record.message


async def test_without_a_folder_the_store_is_all_there_is() -> None:
    store = VectorStore(2 * SIZE, lambda digest: None)
    persistent_vectors = PersistentVectorStore(store)
    assert not await persistent_vectors.put(vector(1))
    assert await persistent_vectors.put_named(vector(1), "joy", label(vector(1))) == PutResult(
        True, b""
    )
    assert await persistent_vectors.delete_name("joy", "name") == vector(1).digest
    assert store.names == {}
