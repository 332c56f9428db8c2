"""`rheostat` with samples of the functions that its main thread runs.

    python -c "from rheostat_bench.sampled_server import main; main()" FOLDER serve MODEL ...

On SIGUSR1 it writes the samples since the last time to FOLDER/samples-N.json, N = 0, 1, ..., and
forgets them.

Why a signal and not a thread
    A thread takes samples while it holds the GIL, so it would see the main thread only where that
    releases it. The handler of a signal runs on the main thread, between two instructions of
    Python. The time of a function in C counts for the function that has called it.
"""

import json
import signal
import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType

from rheostat._cli import main as run

_SECONDS = 0.001
"""CPU time of the process between two samples. The kernel rounds it up to its own clock's tick."""
_WAITING = "selectors.py"
"""The file of a function in which an event loop waits."""
_PACKAGES = ("rheostat_server", "rheostat_engine", "rheostat_wire", "vllm", "grpc", "zmq")
"""Whose functions are named. Others count for the function that has called them."""


class Sampler:
    """The samples of this process's main thread."""

    def __init__(self, folder: Path) -> None:
        """Writes into `folder`."""
        self._folder = folder
        self._written = 0
        self._stacks: Counter[tuple[CodeType, ...]] = Counter()

    def sample(self, _: int, frame: FrameType | None) -> None:
        """Takes a sample; the handler of SIGPROF."""
        stack = []
        while frame is not None:
            stack.append(frame.f_code)
            frame = frame.f_back
        self._stacks[tuple(stack)] += 1

    def write(self, _: int, __: FrameType | None) -> None:
        """Writes the samples and forgets them; the handler of SIGUSR1."""
        stacks, self._stacks = self._stacks, Counter()  # SIGPROF may come meanwhile
        text = json.dumps(shares(stacks))
        path = self._folder / f"samples-{self._written}.json"
        self._written += 1
        partial = path.with_suffix(".part")
        partial.write_text(text)
        partial.rename(path)


def shares(stacks: Counter[tuple[CodeType, ...]]) -> dict[str, object]:
    """The functions of some stacks, each the innermost function first.

    Returns:
        `samples`: their number without those of a thread that waits. `with_callees`: the share of
        them in which a function runs or waits for a function that it has called, the largest first.
        `alone`: the share in which no other function of these packages runs below it.
    """
    total = 0
    with_callees: Counter[str] = Counter()
    alone: Counter[str] = Counter()
    for stack, count in stacks.items():
        if stack[0].co_filename.endswith(_WAITING):
            continue
        total += count
        names = [name for code in stack if (name := function_name(code)) is not None]
        with_callees.update(dict.fromkeys(names, count))
        alone[names[0] if names else "the event loop"] += count
    return {
        "samples": total,
        "with_callees": {name: count / total for name, count in with_callees.most_common()},
        "alone": {name: count / total for name, count in alone.most_common()},
    }


def function_name(code: CodeType) -> str | None:
    """A function as `package/module: Class.function`; None outside of the named packages."""
    parts = Path(code.co_filename).with_suffix("").parts
    for package in _PACKAGES:
        if package in parts:
            first = len(parts) - 1 - parts[::-1].index(package)
            return f"{'/'.join(parts[first:])}: {code.co_qualname}"
    return None


def main() -> None:
    """Runs the command line of `rheostat`."""
    folder, *sys.argv[1:] = sys.argv[1:]
    sampler = Sampler(Path(folder))
    signal.signal(signal.SIGPROF, sampler.sample)
    signal.signal(signal.SIGUSR1, sampler.write)
    signal.setitimer(signal.ITIMER_PROF, _SECONDS, _SECONDS)
    sys.exit(run())
