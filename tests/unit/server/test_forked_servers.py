"""The private parts of Python with which the servers of integration tests are forked."""

import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.integration.server import forked_servers

ROOT = Path(__file__).parents[3]

SCRIPT = """
import multiprocessing, os, sys
from tests.integration.server import forked_servers

imported = []

def report(connection, lock):
    with lock:
        connection.send((imported, os.getppid()))
    sys.exit(7)

imported.append("once")
forked_servers._start_forkserver()
context = forked_servers.forked.forks()
(here, there), lock = context.Pipe(), context.Lock()
process = context.Process(target=report, args=(there, lock))
process.start()
seen, parent = here.recv()
process.join(20)
assert (seen, process.exitcode) == (["once"], 7), (seen, process.exitcode)
assert parent != os.getpid()
"""
"""A process starts another one as an engine is started by a forked server."""


def test_this_python_forks_processes_of_an_engine_as_the_tests_expect() -> None:
    forked_servers.check_forkserver(forkserver)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


class WithKeys(forkserver.ForkServer):
    """As in Python 3.14, whose fork server has a key."""

    _forkserver_authkey = b""

    def connect_to_new_process(self, fds: list[int]) -> None:
        self.ensure_running()
        print(self._forkserver_address, self._forkserver_alive_fd, self._forkserver_authkey, fds)


class WithoutChecks(forkserver.ForkServer):
    """It does not call what is replaced."""

    def connect_to_new_process(self, fds: list[int]) -> None:
        print(self._forkserver_address, self._forkserver_alive_fd, fds)


def main_of_3_14(listener_fd, alive_r, preload, main_path=None, sys_path=None, *, authkey_r=None):
    """Takes the key of Python 3.14."""


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"_forkserver": WithKeys()}, "_forkserver_authkey"),
        ({"_forkserver": WithoutChecks()}, "it uses"),
        ({"main": main_of_3_14}, "authkey_r"),
        ({"_forkserver": object()}, "connect_to_new_process"),
    ],
)
def test_a_python_with_other_parts_is_named_with_what_to_do(parts, says: str) -> None:
    other = SimpleNamespace(**{**vars(forkserver), **parts})
    with pytest.raises(RuntimeError, match=rf"Adapt _start_forkserver .*{says}") as caught:
        forked_servers.check_forkserver(other)
    assert sys.version.split()[0] in str(caught.value)
