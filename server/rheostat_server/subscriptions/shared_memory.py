"""Shared memory of a subscription, in which a reader on the same host gets payloads.

Invariants:

* The server creates, names, locks and removes every object. No client chooses a name.
* A payload does not change until its memory is freed.
* Pages are reserved before they are written. A full file system is then an error of this call, not
  a SIGBUS.
* The lock of an object ends with its server, however the server ends. The next server removes
  objects that are not locked.
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
"""The folder of the objects."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAME = re.compile(r"rheostat-[0-9a-f]{32}")
_MAGIC = b"RHEOSHM1"
_NONCE_BYTES = 32

_HEADER = mmap.PAGESIZE
"""Bytes before the first payload."""
_STEP = 8 << 20
"""Bytes by which the reserved part grows."""
_LASTING = 32 << 20
"""Bytes that stay reserved while they hold no payload."""


class NoSharedMemoryError(Exception):
    """Shared memory cannot be used; the text gives the reason."""


def namespace(folder: Path = FOLDER) -> str:
    """The identity of the kernel and the mount on which the names of objects are valid.

    Raises:
        NoSharedMemoryError: this system has no shared memory.
    """
    try:
        return f"{_BOOT.read_text(encoding='ascii').strip()}:{folder.stat().st_dev}"
    except OSError as error:
        raise NoSharedMemoryError(f"the server has no shared memory: {_reason(error)}") from error


def sweep(folder: Path = FOLDER) -> int:
    """Removes objects of this user whose servers have ended. Returns their number."""
    removed = 0
    try:
        names = [name for name in os.listdir(folder) if _NAME.fullmatch(name)]
    except OSError:
        return 0
    for name in names:
        with contextlib.suppress(OSError):  # another user's, locked, or removed meanwhile
            removed += _removed_if_left(folder / name)
    if removed:
        _LOG.info("removed %d objects of shared memory that a server had left", removed)
    return removed


def _removed_if_left(path: Path) -> bool:
    handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(handle)
        if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
            return False
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
        return True
    finally:
        os.close(handle)


class Arena:
    """The shared memory of one subscription. Used on the event loop alone."""

    def __init__(self, limit: int, folder: Path = FOLDER) -> None:
        """Creates an object for payloads.

        Args:
            limit: the most bytes of payloads.
            folder: the folder of the object.

        Raises:
            NoSharedMemoryError: it cannot be created.
        """
        # one chunk beyond the buffer, and two that are being encoded
        room = limit + 3 * SHARED_CHUNK_BYTES
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
        """The message that names the object."""
        return capture_service_pb2.SharedMemory(
            namespace=self.namespace, name=self.name, size_bytes=self.bytes
        )

    def proven(self, nonce: bytes) -> bool:
        """Whether `nonce` proves that its sender has read the object."""
        return hmac.compare_digest(self._nonce, nonce)

    async def place(self, size: int) -> int | None:
        """Takes `size` bytes, at least 1, until `free`. The offset; None if they do not fit."""
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
        """The memory of a region, [size]."""
        return np.frombuffer(self._memory, np.uint8, size, offset)

    def ref(self, offset: int, size: int) -> tensor_pb2.ShmRef:
        """The message that refers to a region."""
        return tensor_pb2.ShmRef(
            namespace=self.namespace, name=self.name, offset=offset, length=size
        )

    def free(self, offset: int) -> None:
        """Frees the region at an offset."""
        if not self._closed:
            self._regions.give_back(offset)

    def trim(self) -> None:
        """Returns reserved memory to the system, if no payload is in it."""
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
    """Reserves pages of the file up to at least `needed`. Returns the end of the reserved pages."""
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
