"""A server of our own for as long as it is needed, and waiting until any server is ready."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2

from rheostat._cli._common import CommandError
from rheostat._cli._progress import Phase
from rheostat._cli._words import START_ONE
from rheostat._connection.channel import checked_target

_POLL = 0.5
_STARTUP = 900.0
_UNREACHABLE = 10.0
_TERMINATION = 30.0
_LAST_LINES = 12
_NOTE_WIDTH = 60
_OWN_MESSAGE = re.compile(r"^\S+ \S+ INFO rheostat_server\S*: (.+)$", re.MULTILINE)
"""A line of the server's log, as its ``_LOG_FORMAT`` writes it."""


@contextmanager
def demo_server() -> Iterator[str]:
    """Serve the bundled model on a free port; gives its target, once it is ready."""
    target = f"127.0.0.1:{_free_port()}"
    with tempfile.TemporaryDirectory(prefix="rheostat-") as folder:
        log = Path(folder) / "server.log"
        port = target.rpartition(":")[2]
        with log.open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, "-m", "rheostat", "serve", "demo", "--port", port],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # an interrupt reaches it through us, in order
            )
        try:
            with Phase("starting a server with the demo model") as phase:

                def check() -> None:
                    lines = _lines(log)
                    if child.poll() is not None:
                        raise CommandError(f"the server ended: {_reason(lines)}")
                    phase.note(progress_in(log))

                wait_until_serving(target, check, unreachable=_STARTUP)
            yield target
        finally:
            with Phase("stopping the server"):
                _stop(child)


def wait_until_serving(
    target: str, check: Callable[[], None] = lambda: None, unreachable: float = _UNREACHABLE
) -> None:
    """Return once the server's health is SERVING.

    ``check`` may raise to give up. Raises CommandError if nothing answers for ``unreachable``
    seconds, or where it answers but is not ready within 15 minutes; InvalidRequest for no target.
    """
    began = answered = time.monotonic()
    with grpc.insecure_channel(checked_target(target)) as channel:
        ask = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        while True:
            check()
            try:
                answer = ask(health_pb2.HealthCheckRequest(), timeout=5)
                answered = time.monotonic()
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.RpcError as error:
                if not isinstance(error, grpc.Call):
                    raise
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    raise CommandError(f"{target} is no Rheostat server") from error
            now = time.monotonic()
            if now - answered > unreachable:
                raise CommandError(f"no server answers at {target}: {START_ONE}")
            if now - began > _STARTUP:
                raise CommandError(f"the server at {target} does not become ready")
            time.sleep(_POLL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _stop(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(_TERMINATION)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)  # its engine, too, while that loads
        child.wait()


def _lines(log: Path) -> list[str]:
    """The log's last lines that are not empty."""
    lines = log.read_text(errors="replace").splitlines()
    return [line.strip() for line in lines[-_LAST_LINES:] if line.strip()]


def progress_in(log: Path) -> str:
    """The last message of the server's own in its log, "" if there is none.

    Other lines come from vLLM, whose warnings on a CPU read as failures.
    """
    messages = _OWN_MESSAGE.findall(log.read_text(errors="replace"))
    return messages[-1][:_NOTE_WIDTH] if messages else ""


def _reason(lines: list[str]) -> str:
    """The line that says what went wrong: the command's own message, else the last one."""
    own = [line for line in lines if line.startswith("rheostat: ")]
    return (own or lines or ["it said nothing"])[-1].removeprefix("rheostat: ")
