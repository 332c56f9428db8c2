"""`rheostat serve` in a process of its own, watched from outside: its memory and its log."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import rheostat
from rheostat_bench.shapes import write_shape
from rheostat_server.engine.vllm_engine import DEMO_MODEL
from rheostat_server.limits import REQUESTS_BYTES

_STARTUP = 300.0
"""Seconds that a server gets until it serves."""
_SHUTDOWN = 60.0
_SAMPLE_EVERY = 0.1
"""Seconds between two looks at the processes' memory."""
_FAULT = re.compile(r"Traceback|\bERROR\b|\bCRITICAL\b|incident")
"""What no line of a sound server's log has."""
_SAMPLED = "from rheostat_bench.sampled_server import main; main()"
_QUEUED = "from rheostat_bench.queued_server import main; main()"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

MIB = 1 << 20

MEMORY = {
    "kv-cache-memory": 384,
    "bank": 64,
    "capture": 4,
    "encode": 16,
    "staging": 128,
    "request-buffer": 64,
    "buffers": 128,
    "subscriptions": 128,
    "vector-store": 64,
    "runs": 64,
}
"""MiB that a server may take for each purpose, by the name of its flag."""
GROWING = ("staging", "buffers", "subscriptions", "vector-store", "runs")
"""Purposes for which an idle server has used no memory yet."""
ALLOWED_GROWTH = sum(MEMORY[name] for name in GROWING) * MIB + REQUESTS_BYTES
"""Bytes that a server may take beyond what it takes when it is idle: what its flags allow, and
requests. Freed memory that the C library keeps must fit into it too."""


class Died(Exception):
    """The server's process has ended; its log says why."""


def memory_options() -> list[str]:
    """`MEMORY`, as a command line says it."""
    return [f"--{name}-mib={mib}" for name, mib in MEMORY.items()]


def write_model(folder: Path) -> Path:
    """A model of 36 layers without weights, with the bundled model's tokenizer."""
    path = write_shape("tiny-36", folder)
    copy_tokenizer(path)
    return path


def copy_tokenizer(folder: Path) -> None:
    """Gives a model's folder the bundled model's tokenizer, with a text for each of its tokens.

    Tokens without a text would not only make no text. A decoder keeps them until a text comes, and
    decodes all of them with each further token.
    """
    for name in _TOKENIZER:
        shutil.copy(DEMO_MODEL / name, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokens = json.loads((folder / "config.json").read_text())["vocab_size"]
    vocabulary |= {f"Ġw{token}": token for token in range(len(vocabulary), tokens)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def unused_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Memory(NamedTuple):
    """Memory of all processes of a server, in bytes."""

    private: int
    """Anonymous memory of each."""
    shared: int
    """Shared memory, counted once: that of the process that has mapped most of it."""

    @property
    def total(self) -> int:
        """Both."""
        return self.private + self.shared


class Handles(NamedTuple):
    """What all processes of a server have open."""

    descriptors: int
    threads: int


class ServedProcess:
    """A server that serves."""

    def __init__(self, process: subprocess.Popen[bytes], target: str, log: Path) -> None:
        """Watches a process that was started."""
        self.target = target
        """Where it listens."""
        self.log = log
        """Where it writes what it logs."""
        self.pid = process.pid
        """Of the process that serves; the engine's are its descendants."""
        self._process = process
        self._most = Memory(0, 0)
        self._over = threading.Event()
        self._watching = threading.Thread(target=self._watch, daemon=True)
        self._watching.start()

    @property
    def died(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    def memory(self) -> Memory:
        """What it takes now."""
        found = [memory_of(pid) for pid in process_tree(self._process.pid)]
        private = sum(process.private for process in found)
        return Memory(private, max((process.shared for process in found), default=0))

    def take_peak(self) -> Memory:
        """The most that it took since the last call."""
        most, self._most = self._most, self.memory()
        return max(most, self._most, key=lambda one: one.total)

    def stop(self) -> None:
        """Ends the server and whatever it has started."""
        self._over.set()
        self._watching.join()
        pids = process_tree(self._process.pid)
        self._process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_SHUTDOWN)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def _watch(self) -> None:
        while not self._over.wait(_SAMPLE_EVERY):
            self._most = max(self._most, self.memory(), key=lambda one: one.total)


def handles(root: int) -> Handles:
    """Descriptors and threads of a process and all its descendants."""
    pids = process_tree(root)
    return Handles(
        sum(_entries(pid, "fd") for pid in pids), sum(_entries(pid, "task") for pid in pids)
    )


def _entries(pid: int, folder: str) -> int:
    with suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/{folder}"))
    return 0


def faults(log: Path, since: int = 0) -> list[str]:
    """Lines of a server's log, from an offset on, that a sound server does not write."""
    text = log.read_bytes()[since:].decode(errors="replace")
    return [line for line in text.splitlines() if _FAULT.search(line)]


@contextmanager
def served_process(
    model: str,
    log: Path,
    options: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    samples: Path | None = None,
    queue: Path | None = None,
    program: Sequence[str] = ("-m", "rheostat"),
) -> Iterator[ServedProcess]:
    """A server of a model, once it serves.

    Args:
        model: its model.
        log: gets its output.
        options: of `rheostat serve`.
        environment: what is added to this process's environment.
        samples: the folder for samples of its functions; see `sampled_server`. None: takes none.
        queue: the file for waits of requests; see `queued_server`. None, as with `samples`: no
            wait is recorded.
        program: arguments of Python that start the command line of `rheostat`. `samples` and
            `queue` replace them.

    Raises:
        Died: it ended before it served.
    """
    port = unused_port()
    if samples is not None:
        program = ["-c", _SAMPLED, str(samples)]
    elif queue is not None:
        program = ["-c", _QUEUED, str(queue)]
    command = [sys.executable, *program, "serve", model, "--port", str(port), *options]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        )
    server = ServedProcess(process, f"127.0.0.1:{port}", log)
    try:
        _wait_until_serving(server)
        yield server
    finally:
        server.stop()


def _wait_until_serving(server: ServedProcess) -> None:
    deadline = time.monotonic() + _STARTUP
    with rheostat.connect(server.target) as engine:
        while True:
            if server.died or time.monotonic() > deadline:
                raise Died(server.log.read_text(errors="replace")[-4000:])
            with suppress(rheostat.RheostatError):
                engine.wait_until_ready(timeout=2.0)
                return


def cpu_elsewhere() -> float:
    """Seconds of CPU that others took: processes that are neither this one nor its descendants.

    Only differences of two calls mean something, and only if no descendant ended between them.
    """
    ticks = os.sysconf("SC_CLK_TCK")
    user, nice, system, _idle, _iowait, *interrupts = map(
        int, Path("/proc/stat").read_text().partition("\n")[0].split()[1:8]
    )
    own = sum(_cpu_ticks(pid) for pid in process_tree(os.getpid()))
    return (user + nice + system + sum(interrupts) - own) / ticks


def cpu_stolen() -> float:
    """Seconds of CPU that the host gave to other machines although this one wanted them.

    Only differences of two calls mean something. Zero on hosts that do not report it.
    """
    steal = Path("/proc/stat").read_text().partition("\n")[0].split()[8]
    return int(steal) / os.sysconf("SC_CLK_TCK")


def _cpu_ticks(pid: int) -> int:
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    return 0


def process_tree(root: int) -> list[int]:
    """A process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError, IndexError, ValueError):
                parent = int(Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def memory_of(pid: int) -> Memory:
    """What one process takes; nothing if there is no such process."""
    fields = {"RssAnon": 0, "RssShmem": 0}
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in fields:
                fields[name] = int(rest.split()[0]) * 1024
    return Memory(fields["RssAnon"], fields["RssShmem"])
