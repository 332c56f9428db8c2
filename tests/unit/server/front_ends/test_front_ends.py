"""Processes that speak gRPC for the server: their calls, their deaths and their end."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from rheostat_server import serve
from rheostat_server.config import ServerConfig
from rheostat_server.errors import FrontEndFailed, PortInUse
from rheostat_server.front_ends import supervisor
from rheostat_server.front_ends.supervisor import FrontEnds
from rheostat_server.serve import RunningServer, front_end_count

from ..conftest import Client, Running, narrow, rest
from ..fakes import INFO, ScriptedBackend
from ..messages import request
from ..streams import settled, tokens

Code = grpc.StatusCode
TOKENS = 2
"""Tokens that each request generates."""

ROUNDS = int(os.environ.get("RHEOSTAT_TEST_ROUNDS", "3"))
"""How often front ends are killed; `make soak` does it 100 times."""


def held(hold: asyncio.Event) -> ScriptedBackend:
    """An engine with room for many requests, which generate nothing before `hold` is set."""
    return ScriptedBackend(hold=hold, info=replace(INFO, running_samples=64))


def front_ends(running: Running) -> FrontEnds:
    assert isinstance(running.server.grpc, FrontEnds)
    return running.server.grpc


def alive(process_id: int) -> bool:
    """Whether a process runs. An orphan that has ended stays as a zombie if init is slow."""
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


async def eventually(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_front_end_needs_neither_torch_nor_vllm_nor_the_engine() -> None:
    code = "import rheostat_server.front_ends.process, sys; print(*sys.modules)"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert not {"torch", "vllm", "numpy", "rheostat_engine", "zmq"} & set(answer.stdout.split())


@pytest.mark.parametrize(
    ("cores", "flag", "count"),
    [
        (2, None, 0),
        (7, None, 0),
        (8, None, 1),
        (128, None, 1),
        (2, 3, 3),
        (64, 0, 0),
    ],
)
def test_the_number_of_front_ends_follows_the_cores(monkeypatch, cores, flag, count) -> None:
    monkeypatch.setattr(serve.os, "sched_getaffinity", lambda _: range(cores))
    assert front_end_count(ServerConfig(model="toy", front_ends=flag)) == count


async def test_every_front_end_serves(starter) -> None:
    free = asyncio.Event()
    free.set()
    running = await starter(held(free), front_ends=3)
    process_ids = front_ends(running).process_ids
    assert len(set(process_ids)) == 3
    for kept in process_ids:
        for other in set(process_ids) - {kept}:
            os.kill(other, signal.SIGSTOP)
        try:
            async with AsyncExitStack() as stack:
                clients = [await stack.enter_async_context(narrow(running)) for _ in range(20)]
                calls = [asyncio.ensure_future(one.generate(request())) for one in clients]
                done, pending = await asyncio.wait(calls, timeout=10, return_when="FIRST_COMPLETED")
                assert done
                assert all(len(tokens(call.result())) == TOKENS for call in done)
                for call in pending:
                    call.cancel()
                await asyncio.wait(calls)
        finally:
            for other in process_ids:
                os.kill(other, signal.SIGCONT)


async def held_calls(stack: AsyncExitStack, running: Running, count: int) -> list:
    """Calls on connections of their own, of which the first response was read."""
    clients: list[Client] = [await stack.enter_async_context(narrow(running)) for _ in range(count)]
    calls = [client.generation.Generate(request()) for client in clients]
    await asyncio.gather(*(call.read() for call in calls))
    return calls


async def test_a_front_end_that_is_killed_takes_its_own_streams_and_nothing_else(starter) -> None:
    hold = asyncio.Event()
    running = await starter(held(hold), front_ends=2)
    for round_number in range(ROUNDS):
        async with AsyncExitStack() as stack:
            hold.clear()
            calls = await held_calls(stack, running, 12)
            before = front_ends(running).process_ids
            victim = before[round_number % 2]
            os.kill(victim, signal.SIGKILL)
            await eventually(
                lambda before=before: not set(before) <= set(front_ends(running).process_ids)
            )
            await eventually(lambda: len(front_ends(running).process_ids) == 2)
            hold.set()
            ends = await asyncio.gather(*(rest(call) for call in calls), return_exceptions=True)
            codes = {end.code() for end in ends if isinstance(end, grpc.aio.AioRpcError)}
            assert codes <= {Code.UNAVAILABLE}
            whole = [end for end in ends if not isinstance(end, BaseException)]
            assert all(len(tokens(events)) == TOKENS for events in whole)
            assert len(whole) + sum(isinstance(end, grpc.aio.AioRpcError) for end in ends) == 12
            await settled(running)
            async with narrow(running) as client:
                assert len(tokens(await client.generate(request(), wait_for_ready=True))) == TOKENS
    manager = running.manager
    assert manager.open_requests == manager.ledger.requests == manager.budget.used == 0
    assert not alive(victim)


async def test_the_streams_of_both_front_ends_are_hit_and_spared(starter) -> None:
    """Without this, the test above could pass with all connections on one front end."""
    running = await starter(held(asyncio.Event()), front_ends=2)
    async with AsyncExitStack() as stack:
        calls = await held_calls(stack, running, 24)
        os.kill(front_ends(running).process_ids[0], signal.SIGKILL)
        reads = [asyncio.ensure_future(rest(call)) for call in calls]
        broken, spared = await asyncio.wait(reads, timeout=2)
        assert all(isinstance(read.exception(), grpc.aio.AioRpcError) for read in broken)
        assert broken
        assert spared
        for read in spared:
            read.cancel()
        await asyncio.wait(reads)


async def test_a_front_end_that_hangs_is_replaced_and_takes_its_own_streams_alone(
    starter, monkeypatch
) -> None:
    monkeypatch.setattr(supervisor, "_PING_SECONDS", 1.0)
    hold = asyncio.Event()
    running = await starter(held(hold), front_ends=2)
    async with AsyncExitStack() as stack:
        calls = await held_calls(stack, running, 24)
        hung, kept = front_ends(running).process_ids
        os.kill(hung, signal.SIGSTOP)
        await eventually(lambda: hung not in front_ends(running).process_ids)
        assert not alive(hung)
        hold.set()
        ends = await asyncio.gather(*(rest(call) for call in calls), return_exceptions=True)
        lost = [end for end in ends if isinstance(end, grpc.aio.AioRpcError)]
        assert {end.code() for end in lost} == {Code.UNAVAILABLE}
        whole = [end for end in ends if not isinstance(end, BaseException)]
        assert 0 < len(whole) == len(calls) - len(lost)
        assert all(len(tokens(events)) == TOKENS for events in whole)
        assert kept in front_ends(running).process_ids
        await settled(running)


async def test_a_port_is_reserved_at_every_address_of_a_host(starter, monkeypatch) -> None:
    addresses = ["127.0.0.1", "127.0.0.2"]

    def both(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        kind = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
        absent = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("192.0.2.1", port))
        return [absent, *((*kind, (one, port)) for one in addresses)]

    front_ends = FrontEnds(1, None)
    with monkeypatch.context() as patched:
        patched.setattr(socket, "getaddrinfo", both)
        port = await front_ends.start("localhost", 0)
    try:
        for address in addresses:
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind((address, port))
    finally:
        await front_ends.stop(0)


async def test_a_front_end_ends_when_the_server_is_gone() -> None:
    code = (
        "import asyncio, os, signal, sys\n"
        "from rheostat_server.front_ends.supervisor import FrontEnds\n"
        "async def main():\n"
        "    front_ends = FrontEnds(2, None)\n"
        "    await front_ends.start('127.0.0.1', 0)\n"
        "    print(*front_ends.process_ids, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    answer = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True
    )
    process_ids = [int(word) for word in answer.stdout.split()]
    assert len(process_ids) == 2
    await eventually(lambda: not any(alive(one) for one in process_ids))


async def test_whatever_keeps_a_front_end_from_starting_it_is_tried_again(
    starter, monkeypatch
) -> None:
    running = await starter(front_ends=1)
    (victim,) = front_ends(running).process_ids
    begin, failures = asyncio.create_subprocess_exec, [RuntimeError("can't start new thread")]

    async def flaky(*command, **options):
        if failures:
            raise failures.pop()
        return await begin(*command, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", flaky)
    os.kill(victim, signal.SIGKILL)
    await eventually(lambda: front_ends(running).process_ids != [victim])
    assert not failures


async def test_front_ends_end_with_the_server_and_free_the_port(starter) -> None:
    running = await starter(front_ends=2)
    process_ids = front_ends(running).process_ids
    await running.server.stop(0)
    assert not any(alive(one) for one in process_ids)
    again = RunningServer(ServerConfig(model="toy", port=running.server.port, front_ends=2))
    await again.bind()
    await again.stop(0)


async def test_an_interrupt_of_the_group_does_not_end_front_ends_that_start() -> None:
    code = (
        "import asyncio, os, signal\n"
        "from rheostat_server.front_ends.supervisor import FrontEnds\n"
        "async def main():\n"
        "    loop = asyncio.get_running_loop()\n"
        "    loop.add_signal_handler(signal.SIGINT, lambda: None)\n"
        "    loop.call_later(0.1, os.killpg, 0, signal.SIGINT)\n"
        "    front_ends = FrontEnds(1, None)\n"
        "    await front_ends.start('127.0.0.1', 0)\n"
        "    await front_ends.stop(0)\n"
        "asyncio.run(main())\n"
    )
    await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code], check=True, process_group=0
    )


@pytest.mark.parametrize(("first", "second"), [(2, 2), (2, 0), (0, 2)])
async def test_connections_of_an_ended_server_do_not_keep_its_port(
    starter, first: int, second: int
) -> None:
    running = await starter(front_ends=first)
    _, idle = await asyncio.open_connection("127.0.0.1", running.server.port)
    assert len(tokens(await running.client.generate(request()))) == TOKENS
    await running.server.stop(0)  # it closes the connection first, which then waits in the kernel
    idle.close()
    again = RunningServer(ServerConfig(model="toy", port=running.server.port, front_ends=second))
    await again.bind()
    await again.stop(0)


async def test_a_front_end_leaves_the_port_reserved_when_it_dies(starter) -> None:
    running = await starter(front_ends=1)
    os.kill(front_ends(running).process_ids[0], signal.SIGKILL)
    for count in (0, 1):
        other = RunningServer(ServerConfig(model="toy", port=running.server.port, front_ends=count))
        with pytest.raises(PortInUse, match="address already in use"):
            await other.bind()


async def test_front_ends_leave_signals_of_their_group_to_the_server(starter) -> None:
    running = await starter(front_ends=1)
    (process_id,) = front_ends(running).process_ids
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(process_id, number)
    assert len(tokens(await running.client.generate(request()))) == TOKENS
    assert front_ends(running).process_ids == [process_id]


@pytest.mark.parametrize(("first", "second"), [(2, 2), (2, 0), (0, 2)])
async def test_a_second_server_cannot_take_the_port(starter, first: int, second: int) -> None:
    running = await starter(front_ends=first)
    other = RunningServer(ServerConfig(model="toy", port=running.server.port, front_ends=second))
    with pytest.raises(PortInUse, match="address already in use"):
        await other.bind()
    assert len(tokens(await running.client.generate(request()))) == TOKENS


async def test_a_client_that_leaves_a_front_end_aborts_its_request(starter) -> None:
    backend = held(asyncio.Event())
    running = await starter(backend, front_ends=1)
    call = running.client.generation.Generate(request())
    await call.read()
    call.cancel()
    await eventually(lambda: running.manager.open_requests == 0)
    assert len(backend.aborted) == 1


async def test_a_deadline_passes_through_a_front_end(starter) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event()), front_ends=1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running.client.generate(request(), timeout=0.5)
    assert caught.value.code() is Code.DEADLINE_EXCEEDED
    await eventually(lambda: running.manager.open_requests == 0)


async def test_an_unknown_method_is_refused_by_the_front_end(starter) -> None:
    running = await starter(front_ends=1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running.client.channel.unary_unary("/rheostat.v1.EngineService/Explode")(b"")
    assert caught.value.code() is Code.UNIMPLEMENTED


async def test_a_module_of_the_working_directory_does_not_replace_one_of_pythons(
    starter, tmp_path, monkeypatch
) -> None:
    (tmp_path / "argparse.py").write_text("raise SystemExit('the wrong module')")
    monkeypatch.chdir(tmp_path)
    running = await starter(front_ends=1)
    assert len(tokens(await running.client.generate(request()))) == TOKENS


async def test_a_server_whose_front_ends_cannot_start_says_so(monkeypatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    server = RunningServer(ServerConfig(model="toy", port=0, front_ends=2))
    with pytest.raises(FrontEndFailed, match=r"cannot be started: .*No such file"):
        await server.bind()


async def test_a_server_whose_front_ends_die_at_once_says_so(monkeypatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    server = RunningServer(ServerConfig(model="toy", port=0, front_ends=2))
    with pytest.raises(FrontEndFailed, match="ended before it listened"):
        await server.bind()
