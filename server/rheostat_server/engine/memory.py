"""Whether a machine has the memory that the workers take for steering and captured rows.

Why it is checked
    By default, the buffers of captured rows follow from the tokens of a step, which vLLM chooses
    for the model and the device. If they do not fit, a worker fails long after the start. Or the
    system ends a process once captured rows fill the memory.

Only what cannot work is refused. The weights, the KV cache and the server take memory too, so a
start may still fail. The sizes that an error suggests leave half of the memory to them.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rheostat_engine import EngineSettings
from rheostat_server.errors import InvalidConfig

_MIB = 1 << 20


class _Files(NamedTuple):
    """The files of a control group."""

    limit: str
    usage: str
    prefix: str
    """Of the lines in `memory.stat` that count its descendants too."""


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
_V2 = _Files("memory.max", "memory.current", "")

_CACHES = ("inactive_file", "active_file")
"""Lines in `memory.stat` that count cached files, which the system drops if memory is short."""


class Sizes(NamedTuple):
    """Workers, and the settings that decide how much memory they take."""

    settings: EngineSettings
    ranks: int
    """The number of workers."""
    areas: int
    """The number of workers with a staging area."""

    @property
    def staging(self) -> int:
        """Bytes of a staging area, which is never smaller than the ring."""
        return max(self.settings.staging_bytes, self.settings.capture_bytes)


def available_memory(root: Path = Path("/")) -> int:
    """Bytes of host memory that this process and its children can still take.

    A container or a service often has less than the machine.

    Args:
        root: the folder of `proc` and `sys`.
    """
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):
        meminfo = (root / "proc/meminfo").read_text(encoding="ascii")
        free = _value(meminfo, "MemAvailable:") * 1024
    return max(0, min([free, *_free_in_groups(root)]))


def _free_in_groups(root: Path) -> Iterator[int]:
    """Yields the free bytes of each limited control group that contains this process."""
    groups = ""
    with suppress(OSError):
        groups = (root / "proc/self/cgroup").read_text(encoding="utf-8")
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            files, mount = _V2, root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            files, mount = _V1, root / "sys/fs/cgroup/memory"
        else:
            continue
        # In a container the path may be the host's, and the mount shows only the group itself.
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError):  # there is no such folder, or no limit
                limit = int((folder / files.limit).read_text(encoding="ascii"))
                usage = int((folder / files.usage).read_text(encoding="ascii"))
                stat = (folder / "memory.stat").read_text(encoding="ascii")
                cached = sum(_value(stat, files.prefix + name) for name in _CACHES)
                yield limit - usage + cached
            if folder == mount:
                break


def _value(text: str, name: str) -> int:
    """The number behind a name in lines of names and numbers."""
    for line in text.splitlines():
        if line.startswith(f"{name} "):
            return int(line.split()[1])
    raise ValueError(f"no {name}")


def check_host_memory(sizes: Sizes, *, cpu: bool, available: int) -> int:
    """Checks that the host has the memory for the staging areas, and on a CPU for all buffers.

    Returns their bytes.

    Args:
        sizes: what the workers take.
        cpu: whether the host's memory is the memory of the model's device too.
        available: bytes of the host's memory.

    Raises:
        InvalidConfig: it has less. The message names flags, and values that fit.
    """
    settings, areas = sizes.settings, sizes.areas
    rings = sizes.ranks if cpu else 0
    banks = rings * settings.bank_bytes
    needed = areas * sizes.staging + rings * settings.capture_bytes + banks
    if needed <= available:
        return needed
    taken = [("--staging-mib", sizes.staging)]
    if cpu:
        taken += [("--capture-mib", settings.capture_bytes), ("--bank-mib", settings.bank_bytes)]
    half = available // 2
    staging = (half - banks - rings * settings.capture_bytes) // areas
    if staging >= settings.capture_bytes:
        remedy = _lower("--staging-mib", staging)
    else:
        remedy = _lower("--capture-mib and --staging-mib", (half - banks) // (areas + rings))
    workers = f"{sizes.ranks} workers take" if sizes.ranks > 1 else "the worker takes"
    raise InvalidConfig(
        f"{workers} {needed // _MIB} MiB of host memory ({_flags(taken)}), but only "
        f"{available // _MIB} MiB are available. {remedy}"
    )


def check_device_memory(settings: EngineSettings, *, available: int) -> None:
    """Checks that a GPU has the memory for the bank and the buffers.

    Args:
        settings: the settings of a worker.
        available: bytes of the device's memory that vLLM may take.

    Raises:
        InvalidConfig: it has less. The message names flags, and values that fit.
    """
    taken = [
        ("--capture-mib", settings.capture_bytes),
        ("--bank-mib", settings.bank_bytes),
        ("--encode-mib", settings.encode_bytes),
    ]
    needed = sum(size for _, size in taken)
    if needed >= available:
        remedy = _lower("--capture-mib", available // 2 - needed + settings.capture_bytes)
        raise InvalidConfig(
            f"a worker takes {needed // _MIB} MiB of its device's memory ({_flags(taken)}), but "
            f"the engine may take only {available // _MIB} MiB (--gpu-memory-utilization). {remedy}"
        )


def check_kv_cache(size: int, *, available: int) -> None:
    """Checks that there is memory for a KV cache whose size was given.

    vLLM checks this after it has loaded the model.

    Args:
        size: bytes of all caches in this memory.
        available: bytes that the buffers of workers leave.

    Raises:
        InvalidConfig: they do not fit.
    """
    if size > available:
        raise InvalidConfig(
            f"--kv-cache-memory-mib asks for {size // _MIB} MiB, but only {available // _MIB} MiB "
            "of memory are left for the KV cache: lower it"
        )


def _flags(taken: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{flag} {size // _MIB}" for flag, size in taken)


def _lower(flags: str, size: int) -> str:
    if size < _MIB:
        return f"Lower {flags} and --bank-mib"
    return f"Lower {flags} to {size // _MIB} or less"
