"""What outlives a server: vectors in the folder that `vector_dir` names. Subscriptions don't."""

import asyncio
import threading
from dataclasses import replace

import grpc
import pytest

from rheostat_server.config import ServerConfig
from rheostat_server.errors import EngineFailed, VectorDirFailed
from rheostat_server.serve import RunningServer, start
from rheostat_wire.v1 import steering_service_pb2, types_pb2, vector_pb2

from .conftest import Client, Refusal, Running
from .fakes import WIDTH, ScriptedBackend
from .messages import add, request, site_set
from .subscribers import Message, Subscriber, failure, opening, resuming
from .uploads import chunk, digest, header, put, refusal_of, values

steering = steering_service_pb2
SITES = site_set(types_pb2.POINT_RESID_POST, layers=[1])


async def listed(client) -> list[steering.VectorInfo]:
    return list((await client.steering.ListVectors(steering.ListVectorsRequest())).vectors)


async def test_a_restarted_server_lists_and_steers_with_what_was_put(starter, tmp_path) -> None:
    first = await starter(vector_dir=str(tmp_path))
    named = header(name="joy", description="glad", sites=SITES)
    await put(first.client, named, chunk(values(1.0)))
    await put(first.client, header(), chunk(values(2.0)))
    await put(first.client, header(name="gone"), chunk(values(3.0)))
    await first.client.steering.DeleteName(steering.DeleteNameRequest(name="gone"))
    before = await listed(first.client)
    assert [info.name for info in before] == ["", "", "joy"]
    await first.server.stop(0)

    second = await starter(vector_dir=str(tmp_path))
    assert await listed(second.client) == before
    joy = add(vector_pb2.VectorRef(name="joy"), sites=SITES)
    assert (await second.client.generate(request(steer=[joy])))[-1].HasField("receipt")
    assert second.backend.loaded == [digest(values(1.0)).hex()]


async def test_a_second_server_on_the_folder_does_not_start(starter, tmp_path) -> None:
    await starter(vector_dir=str(tmp_path))
    loaded = []

    async def bring_up(_: ServerConfig) -> ScriptedBackend:
        loaded.append(1)
        return ScriptedBackend()

    config = ServerConfig(model="toy", port=0, vector_dir=str(tmp_path))
    with pytest.raises(VectorDirFailed, match="another server"):
        await start(config, bring_up)
    assert loaded == []


async def test_a_start_that_fails_gives_the_folder_up(tmp_path, starter) -> None:
    async def bring_up(_: ServerConfig) -> ScriptedBackend:
        raise EngineFailed("no memory")

    config = ServerConfig(model="toy", port=0, vector_dir=str(tmp_path))
    with pytest.raises(EngineFailed):
        await start(config, bring_up)
    await starter(vector_dir=str(tmp_path))


async def test_the_folder_of_a_wider_model_ends_the_start(starter, tmp_path) -> None:
    first = await starter(vector_dir=str(tmp_path))
    await put(first.client, header(), chunk(values()))
    await first.server.stop(0)
    wider = ScriptedBackend()
    wider.sites = replace(wider.sites, width=WIDTH + 1)
    with pytest.raises(VectorDirFailed, match="width 4, but the model's stream has 5"):
        await starter(wider, vector_dir=str(tmp_path))
    assert wider.closed


async def test_a_server_ends_when_its_folder_is_in_step(starter, tmp_path, monkeypatch) -> None:
    done: list[str] = []
    ending = threading.Event()

    class Backend(ScriptedBackend):
        async def close(self) -> None:
            done.append("engine")

    running = await starter(Backend(), vector_dir=str(tmp_path), vector_store_bytes=WIDTH * 4)
    remove = running.manager.persistent_vectors._files.remove

    def slow(gone: bytes) -> None:
        ending.wait(10)
        remove(gone)
        done.append("file")

    monkeypatch.setattr(running.manager.persistent_vectors._files, "remove", slow)
    await put(running.client, header(), chunk(values(1.0)))
    await put(running.client, header(), chunk(values(2.0)))
    asyncio.get_running_loop().call_later(0.1, ending.set)
    await running.server.stop(0)
    assert done == ["file", "engine"]


async def test_a_disk_that_fails_refuses_the_upload_with_a_reason(
    starter, tmp_path, monkeypatch
) -> None:
    running = await starter(vector_dir=str(tmp_path))

    def fail(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(running.manager.persistent_vectors._files, "write", fail)
    refusal = await refusal_of(put(running.client, header(name="joy"), chunk(values())))
    assert (refusal.code, refusal.reason, refusal.precondition) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "REASON_NOT_SUPPORTED",
        True,
    )
    assert refusal.message == (
        "the server's --vector-dir cannot be written (Read-only file system); nothing was changed"
    )
    assert await listed(running.client) == []


async def test_a_server_without_a_folder_forgets(starter, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = await starter()
    await put(first.client, header(name="joy"), chunk(values()))
    await first.server.stop(0)
    assert await listed((await starter()).client) == []
    assert list(tmp_path.iterdir()) == []


def is_refused_as_restarted(refusal: Refusal) -> bool:
    """Whether a resumption was refused because the server was restarted."""
    assert refusal.brief == (
        grpc.StatusCode.NOT_FOUND,
        "REASON_SUBSCRIPTION_NOT_FOUND",
        "open.resume.subscription_id",
    )
    return "the server was restarted since this subscription was opened" in refusal.message


async def test_a_subscription_from_before_a_restart_is_refused_as_such(starter) -> None:
    first = await starter()
    opened = await Subscriber.open(first, opening())
    await first.server.stop(0)

    second = await starter()
    resumed = Subscriber(second)
    await resumed.call.write(Message(open=resuming(opened.name)))
    assert is_refused_as_restarted(await failure(resumed))
    other = Subscriber(second)
    await other.call.write(Message(open=resuming("never-opened")))
    assert not is_refused_as_restarted(await failure(other))


async def test_a_subscription_is_refused_as_such_while_the_model_is_being_loaded(starter) -> None:
    first = await starter()
    opened = await Subscriber.open(first, opening())
    await first.server.stop(0)

    server = RunningServer(ServerConfig(model="toy", port=0))
    await server.bind()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        loading = Running(server, ScriptedBackend(), Client(channel))
        resumed = Subscriber(loading)
        await resumed.call.write(Message(open=resuming(opened.name)))
        assert is_refused_as_restarted(await failure(resumed))
        new = Subscriber(loading)
        await new.call.write(Message(open=opening()))
        assert (await failure(new)).reason == "REASON_WARMING_UP"
    await server.stop(0)
