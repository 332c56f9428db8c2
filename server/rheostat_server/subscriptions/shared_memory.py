"""Shared memory of a subscription: what its reader, on the same host, gets payloads in.

Invariants: the server makes, names, locks and removes every object, and no client names one. What
was placed stays as it is until it is freed. Pages are reserved before they are touched, so a file
system that is full is an answer, never a signal. An object whose server is gone, by whatever end,
is not locked any more, and the next server removes it.
"""

import asyncio
import contextlib
import fcntl
import hmac
import logging
import mmap
import os
import re
import secrets
import stat
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rheostat_server.limits import SHARED_CHUNK_BYTES
from rheostat_server.subscriptions.regions import Regions
from rheostat_wire.v1 import capture_service_pb2, tensor_pb2

Payload = npt.NDArray[np.uint8]

_LOG = logging.getLogger(__name__)

FOLDER = Path("/dev/shm")
"""Where objects lie."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAME = re.compile(r"rheostat-[0-9a-f]{32}")
_MAGIC = b"RHEOSHM1"
_NONCE_BYTES = 32

_HEADER = mmap.PAGESIZE
"""Bytes before the first payload."""
_STEP = 8 << 20
"""Bytes by which the reserved part grows."""
_LASTING = 32 << 20
"""Reserved bytes that stay reserved while nothing is in them."""


class NoSharedMemoryError(Exception):
    """There can be none here; the text says why."""


def namespace(folder: Path = FOLDER) -> str:
    """Names the kernel and the mount that names of objects are valid on.

    Raises:
        NoSharedMemoryError: this system has none.
    """
    try:
        return f"{_BOOT.read_text(encoding='ascii').strip()}:{folder.stat().st_dev}"
    except OSError as error:
        raise NoSharedMemoryError(f"the server has no shared memory: {_reason(error)}") from error


def sweep(folder: Path = FOLDER) -> int:
    """Removes what servers of this user have left behind that are gone; how many objects."""
    removed = 0
    try:
        names = [name for name in os.listdir(folder) if _NAME.fullmatch(name)]
    except OSError:
        return 0
    for name in names:
        with contextlib.suppress(OSError):  # another's, locked by its server, or gone meanwhile
            removed += _removed_if_left(folder / name)
    if removed:
        _LOG.info("removed %d objects of shared memory that a server had left", removed)
    return removed


def _removed_if_left(path: Path) -> bool:
    handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(handle)
        if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode):
            return False
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
        return True
    finally:
        os.close(handle)


class Arena:
    """The shared memory of one subscription. Lives on the event loop."""

    def __init__(self, limit: int, folder: Path = FOLDER) -> None:
        """An object in which payloads of so many bytes find room.

        Args:
            limit: how many.
            folder: where it lies.

        Raises:
            NoSharedMemoryError: there can be none.
        """
        room = limit + 3 * SHARED_CHUNK_BYTES  # one beyond the buffer, and two that are encoded
        self.bytes = _HEADER + -(-room // mmap.PAGESIZE) * mmap.PAGESIZE
        self.namespace = namespace(folder)
        self.name = f"rheostat-{secrets.token_hex(16)}"
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._path = folder / self.name
        self._regions = Regions(_HEADER, self.bytes)
        self._reserved = _HEADER
        self._full = False
        self._closed = False
        try:
            self._handle, self._memory = self._make()
        except OSError as error:
            raise NoSharedMemoryError(
                f"the server cannot make shared memory: {_reason(error)}"
            ) from error
        self._memory[: len(_MAGIC) + _NONCE_BYTES] = _MAGIC + self._nonce

    def _make(self) -> tuple[int, mmap.mmap]:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(self._path, flags, 0o600)
        try:
            os.fchmod(handle, 0o600)
            # A server that starts now may lock the file, because it takes it for a leftover.
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(handle).st_nlink == 0:
                raise FileNotFoundError(2, "removed by a server that started", self.name)
            os.ftruncate(handle, self.bytes)
            os.posix_fallocate(handle, 0, _HEADER)
            return handle, mmap.mmap(handle, self.bytes)
        except BaseException:
            os.close(handle)
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()
            raise

    def to_wire(self) -> capture_service_pb2.SharedMemory:
        """The message that names it."""
        return capture_service_pb2.SharedMemory(
            namespace=self.namespace, name=self.name, size_bytes=self.bytes
        )

    def proven(self, nonce: bytes) -> bool:
        """Whether somebody who says this has read it."""
        return hmac.compare_digest(self._nonce, nonce)

    async def place(self, size: int) -> int | None:
        """Where so many bytes, at least 1, find room until `free`; None: nowhere."""
        offset = None if self._closed else self._regions.take(size)
        if offset is None or offset + size <= self._reserved:
            return offset
        try:
            end = await asyncio.to_thread(
                _reserve, os.dup(self._handle), self._reserved, offset + size, self.bytes
            )
        except OSError as error:
            self.free(offset)
            if not self._full:
                _LOG.warning("shared memory is full, rows travel inline: %s", error)
            self._full = True
            return None
        except BaseException:
            self.free(offset)
            raise
        self._reserved = max(self._reserved, end)
        return offset

    def view(self, offset: int, size: int) -> Payload:
        """Memory that was placed, [size]."""
        return np.frombuffer(self._memory, np.uint8, size, offset)

    def ref(self, offset: int, size: int) -> tensor_pb2.ShmRef:
        """The message that says where it is."""
        return tensor_pb2.ShmRef(
            namespace=self.namespace, name=self.name, offset=offset, length=size
        )

    def free(self, offset: int) -> None:
        """Frees the region at an offset."""
        if not self._closed:
            self._regions.give_back(offset)

    def trim(self) -> None:
        """Gives memory back to the system, if nothing is in it."""
        if self._regions.idle and self._reserved > _LASTING and not self._closed:
            self._memory.madvise(mmap.MADV_REMOVE, _LASTING, self._reserved - _LASTING)
            self._reserved = _LASTING
            self._full = False

    def close(self) -> None:
        """Removes the file. Readers that have mapped it keep their data: nothing overwrites it."""
        if not self._closed:
            self._closed = True
            os.close(self._handle)
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()


def _reserve(handle: int, start: int, needed: int, most: int) -> int:
    """Makes the file system keep pages at least up to `needed`; up to where it does."""
    end = min(most, -(-needed // _STEP) * _STEP)
    try:
        try:
            os.posix_fallocate(handle, start, end - start)
        except OSError:
            end = -(-needed // mmap.PAGESIZE) * mmap.PAGESIZE
            os.posix_fallocate(handle, start, end - start)
    finally:
        os.close(handle)
    return end


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
