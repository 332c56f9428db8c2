"""Memory through which the server passes the large parts of messages to a front end.

Why
    A socket copies captured rows four times, and takes them in several system calls. Through shared
    memory they are copied twice: by the server into the memory, and by the front end out of it.
How
    The memory is a ring. The server writes a part and sends its place in a record. A front end
    copies a part out as soon as it receives the record, and notes how far it has read. If the ring
    has no space, the part goes through the socket.

Invariant: a part is not overwritten before the front end has copied it.
"""

import fcntl
import mmap
import os
import struct
from typing import NamedTuple

from rheostat_wire.message_parts import Payload

LARGE_PART = 16 << 10
"""Bytes from which a part is passed in shared memory."""

_SIZE = 32 << 20
"""Bytes of the ring. Its pages take memory once they are used."""

_HEADER = mmap.PAGESIZE
"""Bytes before the ring. They begin with the position up to which the front end has read."""

_ALIGNMENT = 64

_PLACE = struct.Struct("<QI")

PLACE_BYTES = _PLACE.size


class Place(NamedTuple):
    """The place of a part. Positions count all bytes that were ever given out."""

    position: int
    size: int

    @classmethod
    def read(cls, data: Payload) -> "Place":
        """Reads the bytes of a place."""
        return cls(*_PLACE.unpack(data))

    def to_bytes(self) -> bytes:
        """Its bytes in a record."""
        return _PLACE.pack(*self)

    @property
    def end(self) -> int:
        """The position after it."""
        return self.position + self.size + -self.size % _ALIGNMENT


class SharedParts:
    """The ring, as one of both processes maps it."""

    def __init__(self, descriptor: int, size: int = _SIZE) -> None:
        """Maps the memory of a descriptor, which may be closed afterwards."""
        self._size = size
        self._memory = mmap.mmap(descriptor, _HEADER + size)
        self._read_to = memoryview(self._memory)[:8].cast("Q")
        self._next = 0
        """The position after the last part. Known to the server alone."""
        self._floor = 0
        """The position below which all parts were read, whatever the front end has noted."""

    @property
    def unread(self) -> int:
        """Bytes of the parts that the front end has not read. For the server."""
        return self._next - max(self._read_to[0], self._floor)

    def put(self, part: Payload) -> Place | None:
        """Copies a part into the ring; returns its place, or None if there is no space."""
        read_to = max(self._read_to[0], self._floor)
        if read_to == self._next:  # begin anew, because the first pages are in the caches
            self._next += -self._next % self._size
            read_to = self._floor = self._next
        rest = self._size - self._next % self._size
        place = Place(self._next if len(part) <= rest else self._next + rest, len(part))
        if place.end - read_to > self._size:
            return None
        self._memory[self._range(place)] = part
        self._next = place.end
        return place

    def take(self, before: Payload, place: Place) -> bytes:
        """Some bytes and a part as one, in a copy. Frees the memory of the part."""
        with memoryview(self._memory) as memory:
            taken = b"".join((before, memory[self._range(place)]))
        self._read_to[0] = place.end
        return taken

    def _range(self, place: Place) -> slice:
        begin = _HEADER + place.position % self._size
        return slice(begin, begin + place.size)


def create_memory(size: int = _SIZE) -> int:
    """Creates the memory of a ring; returns its descriptor."""
    descriptor = os.memfd_create("rheostat-front-end", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, _HEADER + size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return descriptor
