"""Servers that are forked from a process that has imported vLLM.

Why servers are forked
    A process that imports vLLM takes 11 seconds of a core for it, and a server has two or three.
    One process of each worker of pytest-xdist imports vLLM for all processes of its servers.
What is as with ``rheostat serve``
    Everything from the command line to the exit of the interpreter, apart from imports of vLLM.
What differs
    Processes of the engine are forked by a process that ends with the server, which they take for
    their parent. They sleep while they wait for each other; vLLM's spin. `test_ending.py` tests a
    server that is started by its command.
Why it uses private parts of Python
    Processes of an engine must be forked by a process that has imported vLLM and has one thread.
    `multiprocessing` starts a new interpreter for that process, and `set_forkserver_preload` would
    import vLLM there again for each server: its first process took 6.6 s, and takes 0.03 s here.
    It has no public way to take a process that exists. A fork server of our own would need as many
    private parts, because vLLM gives its processes locks, and waits for sentinels.
    `check_forkserver` fails if a new Python has other parts.
"""

import ctypes
import gc
import importlib
import inspect
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

import setproctitle

from ..engine import forked

PRELOADED = [
    *(name for name in forked.PRELOADED if name.startswith("vllm")),
    "vllm.engine.arg_utils",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "torch._inductor.compile_fx",
]
ROOT = Path(__file__).parents[3]
FORKSERVER_PARAMETERS = ("listener_fd", "alive_r", "preload", "main_path", "sys_path")
FORKSERVER_STATE = {"_forkserver_address", "_forkserver_alive_fd"}
"""What `multiprocessing.forkserver` has from Python 3.11 to 3.13, as far as it is used here."""
_MOVED = (
    f"multiprocessing.forkserver of Python {sys.version.split()[0]} differs from the one that the "
    "servers of integration tests are forked with. Adapt _start_forkserver and check_forkserver in "
    "tests/integration/server/forked_servers.py, or run the tests with an older Python"
)
PR_SET_PDEATHSIG = 1


class Order(NamedTuple):
    """A server to fork."""

    arguments: Sequence[str]
    """Behind ``rheostat``."""
    environment: Mapping[str, str]
    log: str
    """The file for its output."""
    own_group: bool
    """Whether it leads a process group."""


class ForkedServer:
    """A forked server, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, order: Order) -> None:
        self.pid: int = _parent().ask("fork", order)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, or minus the signal that killed it; None while it runs."""
        if self.returncode is None:
            self.returncode = _parent().ask("poll", self.pid)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Its exit code, once it has ended.

        Raises:
            TimeoutExpired: it still runs after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("rheostat serve", timeout)
            time.sleep(0.05)
        return code

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills it, unless it has ended."""
        self.send_signal(signal.SIGKILL)


class Parent:
    """The process that forks servers. It ends with this one."""

    def __init__(self) -> None:
        check_forkserver(forkserver)
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lock = threading.Lock()

    def ask(self, kind: str, what: object) -> Any:
        """Its answer to a request."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            print(json.dumps((kind, what)), file=self._process.stdin, flush=True)
            return json.loads(self._process.stdout.readline())


@cache
def _parent() -> Parent:
    return Parent()


def main() -> int:
    """Forks servers until the standard input ends. In a forked server: its exit code."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    before = dict(os.environ)
    for name in PRELOADED:
        importlib.import_module(name)
    forked.check_vector_instructions_once()
    set_by_vllm = {name: value for name, value in os.environ.items() if before.get(name) != value}
    setproctitle.getproctitle()  # finds where titles are stored, before the environment is replaced
    forked.sleep_while_waiting()
    forked.inspect_models_here()
    _fork_engines()
    gc.collect()
    gc.freeze()
    while line := sys.stdin.readline():
        kind, what = json.loads(line)
        if kind == "fork":
            sys.stdout.flush()
            answer: int | None = os.fork()
            if answer == 0:
                answers.close()
                return _serve(Order(*what), set_by_vllm)
        else:
            pid, status = os.waitpid(what, os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)


def _serve(order: Order, set_by_vllm: Mapping[str, str]) -> int:
    """Runs the command as a process of its own would."""
    if order.own_group:
        os.setpgid(0, 0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update({**order.environment, **set_by_vllm})
    paths = order.environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]
    sys.argv = ["rheostat", *order.arguments]
    _start_forkserver()
    from rheostat._cli import main as command

    return command()


class Context(forked.Context):
    """What vLLM starts processes of a forked server with."""

    def Process(
        self, *, target: Callable[..., None], kwargs: Mapping[str, Any], **options: Any
    ) -> BaseProcess:
        """A process in the process group of this one, with the same blocked signals."""
        inner = {"environment": dict(os.environ), "target": target, "kwargs": kwargs}
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        args = (os.getpgrp(), blocked, inner)
        return self._forks.Process(target=_run, args=args, **options)


def _run(group: int, blocked: Iterable[signal.Signals], inner: Mapping[str, Any]) -> NoReturn:
    os.setpgid(0, group)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    parent: Any = multiprocessing.parent_process()
    parent._pid = os.getppid()
    code: object = 0
    try:
        forked.run(**inner)
    except SystemExit as end:
        code = end.code
    # The interpreter ends as in a spawned process. A forked one would leave it as it is.
    ctypes.pythonapi.Py_Exit(code if isinstance(code, int) else code is not None)


def _fork_engines() -> None:
    """Lets vLLM fork its processes where it would spawn them."""
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    utils.get_mp_context = multiproc_executor.get_mp_context = Context


def check_forkserver(module: ModuleType) -> None:
    """Checks that `multiprocessing.forkserver` has the private parts that are used here.

    Raises:
        RuntimeError: it has others.
    """
    try:
        used = type(module._forkserver).connect_to_new_process.__code__.co_names
        state = {name for name in used if name.startswith("_")}
        parameters = tuple(inspect.signature(module.main).parameters)
        moved = state != FORKSERVER_STATE or "ensure_running" not in used
    except AttributeError as error:
        raise RuntimeError(f"{_MOVED}: {error}") from error
    if moved or parameters != FORKSERVER_PARAMETERS:
        raise RuntimeError(f"{_MOVED}: it uses {sorted(state)}, and main{parameters}")


def _start_forkserver() -> None:
    """Forks the process that forks processes of the engine, while this one has one thread.

    `multiprocessing` would start a new interpreter for it. It has a process group of its own,
    because a signal to the server's must not end it.
    """
    server: Any = forkserver._forkserver
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0rheostat-test-{os.getpid()}")
    listener.listen()
    alive, held = os.pipe()
    server._forkserver_address = listener.getsockname()
    server._forkserver_alive_fd = held
    server.ensure_running = lambda: None
    parent = os.getpid()
    if os.fork() == 0:
        os.close(held)
        _fork_until_it_ends(parent, listener, alive)
    listener.close()
    os.close(alive)


def _fork_until_it_ends(parent: int, listener: socket.socket, alive: int) -> NoReturn:
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            forkserver.main(listener.detach(), alive, [])
    finally:
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
