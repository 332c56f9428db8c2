"""A temporary server with the demo model."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rheostat._cli._common import CommandError
from rheostat._cli._progress import Phase
from rheostat._client.engine import connect
from rheostat._errors import DeadlineExceeded, Unavailable

_CHECK_EVERY = 0.5
"""Seconds after which the process is looked at again."""
_STARTUP = 900.0
"""Seconds that a server has until it is ready."""
_TERMINATION = 30.0
"""Seconds that a server has to stop before it is killed."""
_LAST_LINES = 12
_NOTE_WIDTH = 60
_OWN_MESSAGE = re.compile(r"^\S+ \S+ INFO rheostat_server\S*: (.+)$", re.MULTILINE)
"""A line of the server's log, in the format ``_LOG_FORMAT`` of `rheostat_server.serve`."""


@contextmanager
def demo_server() -> Iterator[str]:
    """Serve the bundled model on a free port; yields the target once the server is ready.

    The server stops at the end of the block. SIGTERM and SIGHUP end the block too, because `main`
    runs every command within `exiting_on_signals`.
    """
    port = _free_port()
    target = f"127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="rheostat-") as folder:
        log = Path(folder) / "server.log"
        with log.open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, "-m", "rheostat", "serve", "demo", "--port", str(port)],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C must stop it through `_stop`, not directly
            )
        try:
            with Phase("starting a server with the demo model") as phase:

                def check() -> None:
                    if child.poll() is not None:
                        raise CommandError(f"the server ended: {_reason(log)}")
                    phase.note(progress_in(log))

                _wait_until_ready(target, check)
            yield target
        finally:
            with Phase("stopping the server"):
                _stop(child)


def _wait_until_ready(target: str, check: Callable[[], None]) -> None:
    """Return once a server that starts is ready; `check` may raise to end the wait."""
    end = time.monotonic() + _STARTUP
    with connect(target) as engine:
        while True:
            check()
            try:
                engine.wait_until_ready(_CHECK_EVERY)
            except (Unavailable, DeadlineExceeded) as error:
                if time.monotonic() > end:
                    raise CommandError(
                        f"the server at {target} was not ready after {_STARTUP:g} s"
                    ) from error
            else:
                return


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
        os.killpg(child.pid, signal.SIGKILL)  # includes the processes of its engine
        child.wait()


def progress_in(log: Path) -> str:
    """The last line that the server itself has logged; "" if there is none.

    Lines of vLLM are skipped, because its warnings on a CPU read like failures.
    """
    messages = _OWN_MESSAGE.findall(log.read_text(errors="replace"))
    return textwrap.shorten(messages[-1], _NOTE_WIDTH, placeholder=" ...") if messages else ""


def _reason(log: Path) -> str:
    """The line with the cause: the command's own message, or else the last line."""
    last = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
    lines = [line.strip() for line in last if line.strip()]
    own = [line for line in lines if line.startswith("rheostat: ")]
    return (own or lines or ["it printed nothing"])[-1].removeprefix("rheostat: ")
