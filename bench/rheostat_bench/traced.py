"""Records when functions of a server, its front ends and vLLM's core are called.

Processes that start with the variables of `environment(folder)` record. Python imports the folder's
`sitecustomize` at their start, which calls `install` before vLLM and the server are imported. Child
processes inherit the variables. Each process writes its records to FOLDER/PID.jsonl.

A record costs 2 to 4 µs (on the CPUs of two machines). Coroutine functions record only the time of
the call, other functions also how long they ran. A call that raises is not recorded.
"""

import atexit
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

_FOLDER = "RHEOSTAT_BENCH_TRACES"
_WRITE_EVERY = 0.5
"""Seconds."""
_SITE = "from rheostat_bench.traced import install\n\ninstall()\n"
_EXECUTE = "exec_module"

ACCEPTED, RECEIVED, ADDED, IN_CORE = "accepted", "received", "added", "in the core"
SCHEDULE, LAUNCH, SAMPLE, UPDATE = "schedule", "launch", "sample", "update"
READ = "read"
"""The server reads new tokens of a sample."""
POINTS = {
    "rheostat_server.front_ends.forwarder": {"Forwarder._begin": ACCEPTED},
    "rheostat_server.front_ends.call_tasks": {"CallTasks._begin": RECEIVED},
    "vllm.v1.engine.async_llm": {"AsyncLLM._add_request": ADDED},
    "vllm.v1.engine.core": {"EngineCore.add_request": IN_CORE},
    "vllm.v1.core.sched.scheduler": {
        "Scheduler.schedule": SCHEDULE,
        "Scheduler.update_from_output": UPDATE,
    },
    "vllm.v1.worker.gpu_worker": {
        "Worker.execute_model": LAUNCH,
        "Worker.sample_tokens": SAMPLE,
    },
    "rheostat_engine.adapters.outputs": {"_Reader._take": READ},
}
"""The functions, by module, each with the name of its records."""


class Record(NamedTuple):
    """A call of a function."""

    name: str
    began: float
    """By `time.monotonic`, which all processes of a machine share."""
    seconds: float
    """How long it ran; 0 for a coroutine function."""
    cpu: float
    """CPU seconds of its thread meanwhile."""
    prompts: int = 0
    """Of a `SCHEDULE`: prompts that begin in the step."""
    tokens: int = 0
    """Of a `SCHEDULE`: tokens of the step."""
    owner: int = 0
    """Of a `READ`: the number of the sample in its process."""


def environment(folder: Path) -> dict[str, str]:
    """Variables for processes that write their records into a folder, which exists."""
    (folder / "sitecustomize.py").write_text(_SITE)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {_FOLDER: str(folder), "PYTHONPATH": os.pathsep.join(paths)}


def records(folder: Path) -> list[Record]:
    """All records that processes have written, in order of time."""
    found = [
        Record(*json.loads(line))
        for path in folder.glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    return sorted(found, key=lambda record: record.began)


class _Recorder:
    """The records of this process that are not written yet."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._records: list[Record] = []
        self._owners: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        self._numbers = itertools.count(1)
        self._writing = threading.Lock()
        self._started = False
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """In a process that was forked, which has none of the threads."""
        self._records.clear()
        self._writing = threading.Lock()
        self._started = False

    def wrap(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """A function that also records its calls."""
        waits = inspect.iscoroutinefunction(function)

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:  # the function's own
            began, cpu = time.monotonic(), time.thread_time()
            result = function(*args, **kwargs)
            ended, cpu = time.monotonic(), time.thread_time() - cpu
            ran = (0.0, 0.0) if waits else (ended - began, cpu)
            step = _step(result) if name == SCHEDULE else (0, 0)
            owner = self._number_of(args[0]) if name == READ else 0
            self._records.append(Record(name, began, *ran, *step, owner))
            self._start()
            return result

        return wrapped

    def _number_of(self, owner: object) -> int:
        """A number of an object that no other has, before or after it."""
        number = self._owners.get(owner)
        if number is None:
            number = self._owners[owner] = next(self._numbers)
        return number

    def _start(self) -> None:
        if not self._started:
            self._started = True
            threading.Thread(target=self._write_often, daemon=True).start()
            atexit.register(self._write)

    def _write_often(self) -> None:
        while True:
            time.sleep(_WRITE_EVERY)
            self._write()

    def _write(self) -> None:
        with self._writing:
            some = self._records[:]
            del self._records[: len(some)]  # other threads may have added records meanwhile
            if some:
                with (self._folder / f"{os.getpid()}.jsonl").open("a") as file:
                    file.writelines(json.dumps(record) + "\n" for record in some)


def _step(scheduled: Any) -> tuple[int, int]:  # vLLM's `SchedulerOutput`, which is not imported
    return len(scheduled.scheduled_new_reqs), scheduled.total_num_scheduled_tokens


def install() -> None:
    """Records calls in this process, if its environment says so. To be called once."""
    if folder := os.environ.get(_FOLDER):
        sys.meta_path.insert(0, _Finder(_Recorder(Path(folder))))


class _Finder(importlib.abc.MetaPathFinder):
    """Replaces functions of modules once they are imported."""

    def __init__(self, recorder: _Recorder) -> None:
        self._recorder = recorder
        self._left = dict(POINTS)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Finds a recorded module; its functions are replaced once it is executed."""
        functions = self._left.pop(fullname, None)
        if functions is None:
            return None
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            for qualified, name in functions.items():
                owner, _, function = qualified.partition(".")
                kind = getattr(module, owner)
                setattr(kind, function, self._recorder.wrap(getattr(kind, function), name))

        setattr(spec.loader, _EXECUTE, exec_module)
        return spec
