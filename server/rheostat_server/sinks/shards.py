"""The shards of a tag: files to which requests are appended, and what publishes them.

A shard is a pair. `shard-000001.rows` holds the files of requests one after the other, each whole
and aligned to 64 bytes; `shard-000001.jsonl` a manifest per line with offset, length and SHA-256.
Rows are on the disk before their line is written, and a line counts once it ends in a newline: a
reader sees a request whole or not at all, whenever writing stops. After a failure both files are
cut back to where they were; where they may have been seen otherwise, the shard is given up and the
next begun, so no byte that an index has named is ever written again.
"""

import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import Lock
from typing import NamedTuple

from rheostat_server.sinks.disk import (
    Root,
    Writer,
    create_file,
    read_file,
    reopen_file,
    taken,
    write_all,
)
from rheostat_server.sinks.manifest import Stored, artifacts_of
from rheostat_server.sinks.protocol import Artifact, SinkError
from rheostat_server.sinks.tables import Table

SHARDS = "shards"
"""The folder of a tag's shards."""

_LOG = logging.getLogger(__name__)

_ALIGNED = 64
_FILE = re.compile(r"shard-([0-9]{6,})\.(jsonl|rows)")
_LINE = re.compile(rb'\{"request_id": "([A-Za-z0-9._:-]+)"')


class _Place(NamedTuple):
    """A line of an index."""

    shard: int
    offset: int
    length: int


class _Shard:
    """A pair of files that is appended to."""

    def __init__(self, number: int, rows: int, index: int) -> None:
        self.number = number
        self.rows = rows
        self.index = index
        self.rows_end = os.lseek(rows, 0, os.SEEK_END)
        self.index_end = os.lseek(index, 0, os.SEEK_END)

    def close(self) -> None:
        os.close(self.rows)
        os.close(self.index)


class Shards:
    """The shards of one tag, of this process alone."""

    def __init__(self, root: Root, tag: str, shard_bytes: int) -> None:
        """Reads which requests are in them. Raises OSError, SinkError."""
        self._root = root
        self._folder = (tag, SHARDS)
        self._limit = shard_bytes
        self._lock = Lock()
        self._shard: _Shard | None = None
        self._places: dict[bytes, _Place] = {}
        self._last = 0
        for name in root.names(*self._folder):
            found = _FILE.fullmatch(name)
            if found:
                self._last = max(self._last, int(found[1]))
                if found[2] == "jsonl":
                    self._learn(int(found[1]))

    def holds(self, request_id: str) -> bool:
        """Whether a request is in them."""
        return _digest(request_id) in self._places

    def artifacts(self, request_id: str) -> list[Artifact]:
        """What they hold of a request. Raises OSError."""
        place = self._places.get(_digest(request_id))
        if place is None:
            return []
        with self._root.folder(*self._folder) as folder:
            file = reopen_file(_index_name(place.shard), folder)
            try:
                line = os.pread(file, place.length, place.offset)
            finally:
                os.close(file)
        return artifacts_of(line, "/".join(self._folder))

    def append(
        self,
        request_id: str,
        tables: tuple[Table, ...],
        write: Callable[[Writer], None],
        manifest: Callable[[Stored], bytes],
    ) -> list[Artifact]:
        """Adds a request: `write` its file, then what is stored as a line of `manifest`.

        Raises:
            Collision: it is there already.
            OSError: it cannot be written, and is not there.
        """
        with self._lock:
            if self.holds(request_id):
                raise taken(request_id)
            shard = self._writable()
            start = shard.rows_end + -shard.rows_end % _ALIGNED
            seen = False
            try:
                os.ftruncate(shard.rows, start)
                os.lseek(shard.rows, start, os.SEEK_SET)
                writer = Writer(shard.rows)
                write(writer)
                os.fdatasync(shard.rows)
                name = _rows_name(shard.number)
                line = manifest(Stored(name, start, writer.count, writer.sha256, tables))
                write_all(shard.index, memoryview(line[:-1]))
                seen = True
                write_all(shard.index, memoryview(line[-1:]))
                os.fdatasync(shard.index)
            except BaseException:
                self._cut_back(shard, seen=seen)
                raise
            self._places[_digest(request_id)] = _Place(shard.number, shard.index_end, len(line))
            shard.rows_end = start + writer.count
            shard.index_end += len(line)
            return artifacts_of(line, "/".join(self._folder))

    def close(self) -> None:
        """Ends the shard."""
        with self._lock:
            self._give_up()

    def _writable(self) -> _Shard:
        if self._shard is not None and self._shard.rows_end >= self._limit:
            self._give_up()
        if self._shard is None:
            self._last += 1
            with self._root.folder(*self._folder, make=True) as folder:
                self._shard = _new_shard(self._last, folder)
        return self._shard

    def _cut_back(self, shard: _Shard, *, seen: bool) -> None:
        try:
            os.ftruncate(shard.index, shard.index_end)
            os.ftruncate(shard.rows, shard.rows_end)
            os.lseek(shard.index, shard.index_end, os.SEEK_SET)
        except OSError as error:
            _LOG.error("shard %s of %s is given up: %s", shard.number, self._folder[0], error)
            seen = True
        if seen:
            self._give_up()

    def _give_up(self) -> None:
        if self._shard is not None:
            self._shard.close()
            self._shard = None

    def _learn(self, number: int) -> None:
        """Notes what an index holds, and cuts off what a crash left unpublished behind it."""
        with self._root.folder(*self._folder) as folder:
            data = read_file(_index_name(number), folder)
            end, last = 0, b""
            for line in _lines(data):
                found = _LINE.match(line)
                if found is None:
                    raise SinkError(f"{_index_name(number)} of {self._folder[0]} is damaged")
                self._places[_digest(found[1].decode())] = _Place(number, end, len(line))
                end += len(line)
                last = line
            kept = (
                max((one.offset + one.length for one in artifacts_of(last, "")), default=0)
                if last
                else 0
            )
            with suppress(FileNotFoundError):
                _cut(_rows_name(number), folder, kept)
            if end < len(data):
                _cut(_index_name(number), folder, end)


def _new_shard(number: int, folder: int) -> _Shard:
    """An empty shard that outlasts a crash. Raises OSError, and leaves nothing."""
    names = (_rows_name(number), _index_name(number))
    files: list[int] = []
    try:
        for name in names:
            files.append(create_file(name, folder))
        os.fsync(folder)
    except OSError:
        for name, file in zip(names, files, strict=False):
            os.close(file)
            os.unlink(name, dir_fd=folder)
        raise
    rows, index = files
    return _Shard(number, rows, index)


def _cut(name: str, folder: int, end: int) -> None:
    file = reopen_file(name, folder)
    try:
        if os.fstat(file).st_size > end:
            os.ftruncate(file, end)
            os.fsync(file)
    finally:
        os.close(file)


def _lines(data: bytes) -> Iterator[bytes]:
    """The lines that end, each with its end."""
    start = 0
    while (end := data.find(b"\n", start)) >= 0:
        yield data[start : end + 1]
        start = end + 1


def _digest(request_id: str) -> bytes:
    return hashlib.blake2b(request_id.encode(), digest_size=16).digest()


def _rows_name(number: int) -> str:
    return f"shard-{number:06}.rows"


def _index_name(number: int) -> str:
    return f"shard-{number:06}.jsonl"
