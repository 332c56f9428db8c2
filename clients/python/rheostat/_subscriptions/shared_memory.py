"""Shared memory of a subscription, which the server creates and a client on the same host reads.

An object is mapped only if it is in /dev/shm, has a name of the server's form, and begins with the
header that the protocol defines. The mapping is read-only. It stays readable while anything refers
to it, even if the server ends.
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
"""The folder of shared memory objects on Linux."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAME = re.compile(r"rheostat-[A-Za-z0-9-]{1,200}")
_MAGIC = b"RHEOSHM1"
_HEADER = len(_MAGIC) + 32


def namespace() -> str:
    """Id of the kernel and mount on which object names are valid; "" without shared memory."""
    try:
        return f"{_BOOT.read_text(encoding='ascii').strip()}:{FOLDER.stat().st_dev}"
    except OSError:
        return ""


class Mapping:
    """A mapped object of shared memory."""

    def __init__(self, memory: capture_service_pb2.SharedMemory) -> None:
        """Maps the object. Raises Refused if this host cannot read it."""
        if memory.namespace != namespace():
            raise Refused("the server is on another host, or has another /dev/shm")
        if not _NAME.fullmatch(memory.name):
            raise Refused("the server sent an invalid name of shared memory")
        self.name = memory.name
        self._size = memory.size_bytes
        try:
            self._memory = _mapped(FOLDER / memory.name, memory.size_bytes)
        except (OSError, ValueError, OverflowError) as error:
            raise Refused(f"the server's shared memory cannot be read here: {error}") from error
        begin = self._memory[:_HEADER]
        if begin[: len(_MAGIC)] != _MAGIC:
            raise Refused("the server named an object that is not shared memory of a subscription")
        self.nonce = begin[len(_MAGIC) :]
        """Sent back to the server as a proof that this client can read the object."""

    def payload(self, ref: tensor_pb2.ShmRef) -> Payload:
        """The bytes of a payload, [length], not copied. Raises ServerError if out of range."""
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
