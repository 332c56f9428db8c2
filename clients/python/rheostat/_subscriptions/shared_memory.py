"""Shared memory that the server makes for a subscription, as a client on the same host reads it.

Invariants: only an object that the server names as such, that lies in this system's shared memory
and that begins as the contract says is mapped, and only for reading. Its memory stays readable
while anything refers to it, whatever becomes of the server.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rheostat._errors import Refused, ServerError
from rheostat_wire.v1 import capture_service_pb2, tensor_pb2

Payload = npt.NDArray[np.uint8]

FOLDER = Path("/dev/shm")
"""Where objects lie, on Linux."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAME = re.compile(r"rheostat-[A-Za-z0-9-]{1,200}")
_MAGIC = b"RHEOSHM1"
_HEADER = len(_MAGIC) + 32


def namespace() -> str:
    """Names the kernel and the mount that names of objects are valid on; empty: there is none."""
    try:
        return f"{_BOOT.read_text(encoding='ascii').strip()}:{FOLDER.stat().st_dev}"
    except OSError:
        return ""


class Mapping:
    """An object that is mapped."""

    def __init__(self, memory: capture_service_pb2.SharedMemory) -> None:
        """The object of this name. Raises Refused if it cannot be read here."""
        if memory.namespace != namespace():
            raise Refused("the server is on another host, or has another /dev/shm")
        if not _NAME.fullmatch(memory.name):
            raise Refused("the server names no object of shared memory")
        self.name = memory.name
        self._size = memory.size_bytes
        try:
            self._memory = _mapped(FOLDER / memory.name, memory.size_bytes)
        except (OSError, ValueError, OverflowError) as error:
            raise Refused(f"the server's shared memory cannot be read here: {error}") from error
        begin = self._memory[:_HEADER]
        if begin[: len(_MAGIC)] != _MAGIC:
            raise Refused("the server names an object that is no shared memory of a subscription")
        self.nonce = begin[len(_MAGIC) :]
        """What shows that it was read."""

    def payload(self, ref: tensor_pb2.ShmRef) -> Payload:
        """The bytes that are meant, [length], not copied. Raises ServerError where none can be."""
        if ref.name != self.name or not _HEADER <= ref.offset <= self._size - ref.length:
            raise ServerError("the server sent rows that are not in its shared memory")
        return np.frombuffer(self._memory, np.uint8, ref.length, ref.offset)


def _mapped(path: Path, size: int) -> mmap.mmap:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or not _HEADER <= size <= status.st_size:
            raise ValueError(f"it has {status.st_size} bytes, not {size}")
        return mmap.mmap(handle, size, access=mmap.ACCESS_READ)
    finally:
        os.close(handle)
