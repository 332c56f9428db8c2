"""The shards of a tag: files to which requests are appended, and what publishes them.

A shard is a pair. `shard-000001.rows` holds the files of requests one after the other, each whole
and aligned to 64 bytes; `shard-000001.jsonl` a manifest per line with offset, length and SHA-256.
Rows are on the disk before their line is written, and a line counts once it ends in a newline: a
reader sees a request whole or not at all, whenever writing stops. After a failure both files are
cut back to where they were; where they may have been seen otherwise, the shard is given up and the
next begun, so no byte that an index has named is ever written again.

A shard's files are open only while they are used, or were lately. How far it is filled stands in
the index of the root, so that a tag which nobody writes to holds neither descriptors nor memory.
"""

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from threading import Lock

from rheostat_server.open_files import OpenFiles
from rheostat_server.sinks.disk import Root, Writer, create_file, reopen_file, taken, write_all
from rheostat_server.sinks.index import ArtifactIndex, Place, Shard
from rheostat_server.sinks.manifest import Stored, artifacts_of
from rheostat_server.sinks.protocol import Artifact, SinkError
from rheostat_server.sinks.tables import Table

SHARDS = "shards"
"""The folder of a tag's shards."""

_LOG = logging.getLogger(__name__)

_ALIGNED = 64


class Shards:
    """The shards of one tag, of this process alone."""

    def __init__(
        self, root: Root, index: ArtifactIndex, files: OpenFiles, tag: str, shard_bytes: int
    ) -> None:
        """Finds out which shard can be appended to.

        Args:
            root: the folder of the sink.
            index: that of the root.
            files: keeps the files open that were used last.
            tag: the tag.
            shard_bytes: size from which on a shard is full.

        Raises:
            SinkError: the index cannot be read, or that of a shard is damaged.
        """
        self._root = root
        self._index = index
        self._files = files
        self._tag = tag
        self._limit = shard_bytes
        self._lock = Lock()
        shards = index.shards(tag)
        for shard in shards:
            if shard.damaged:
                raise SinkError(f"{index_name(shard.number)} of {tag} is damaged")
        last = shards[-1] if shards else Shard(0, 0, 0)
        self._last = last.number
        self._shard = last if last.ours else None

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
            if self._index.in_shards(self._tag, request_id):
                raise taken(request_id)
            with ExitStack() as stack:
                shard, rows, index = self._opened(stack)
                place, rows_end, line = self._write(shard, rows, index, tables, write, manifest)
            self._shard = shard._replace(rows_end=rows_end, index_end=place.offset + place.length)
            self._index.enter(request_id, place, rows_end)
            return artifacts_of(line, f"{self._tag}/{SHARDS}")

    def _write(
        self,
        shard: Shard,
        rows: int,
        index: int,
        tables: tuple[Table, ...],
        write: Callable[[Writer], None],
        manifest: Callable[[Stored], bytes],
    ) -> tuple[Place, int, bytes]:
        """Appends to the files of a shard; the place of the line, the end of the rows, the line."""
        start = shard.rows_end + -shard.rows_end % _ALIGNED
        seen = False
        try:
            os.ftruncate(rows, start)
            os.lseek(rows, start, os.SEEK_SET)
            os.lseek(index, shard.index_end, os.SEEK_SET)
            writer = Writer(rows)
            write(writer)
            os.fdatasync(rows)
            name = rows_name(shard.number)
            line = manifest(Stored(name, start, writer.count, writer.sha256, tables))
            write_all(index, memoryview(line[:-1]))
            seen = True
            write_all(index, memoryview(line[-1:]))
            os.fdatasync(index)
        except BaseException:
            self._cut_back(shard, rows, index, seen=seen)
            raise
        place = Place(self._tag, shard.number, shard.index_end, len(line))
        return place, start + writer.count, line

    def _writable(self) -> Shard:
        """The shard to append to, a new one if need be. Raises OSError."""
        if self._shard is not None and self._shard.rows_end >= self._limit:
            self._give_up()
        if self._shard is None:
            with self._root.folder(self._tag, SHARDS, make=True) as folder:
                self._last = _new_shard(self._last + 1, folder)
            self._shard = Shard(self._last, 0, 0, ours=True)
        return self._shard

    def _opened(self, stack: ExitStack) -> tuple[Shard, int, int]:
        """The shard to append to, and the descriptors of its rows and its index.

        A shard whose files somebody has deleted or cut is followed by the next.

        Raises:
            OSError: there can be none.
        """
        while True:
            shard = self._writable()
            try:
                rows = stack.enter_context(self._open(rows_name(shard.number)))
                index = stack.enter_context(self._open(index_name(shard.number)))
                if _reaches(rows, shard.rows_end) and _reaches(index, shard.index_end):
                    return shard, rows, index
            except FileNotFoundError:
                if not shard.index_end:  # it was made a moment ago
                    raise
            _LOG.error("shard %s of %s is not as it was: given up", shard.number, self._tag)
            self._give_up()

    def _open(self, name: str) -> AbstractContextManager[int]:
        return self._files.use((self._tag, name), lambda: self._reopened(name))

    def _reopened(self, name: str) -> int:
        with self._root.folder(self._tag, SHARDS) as folder:
            return reopen_file(name, folder)

    def _cut_back(self, shard: Shard, rows: int, index: int, *, seen: bool) -> None:
        try:
            os.ftruncate(index, shard.index_end)
            os.ftruncate(rows, shard.rows_end)
        except OSError as error:
            _LOG.error("shard %s of %s is given up: %s", shard.number, self._tag, error)
            seen = True
        if seen:
            self._give_up()

    def _give_up(self) -> None:
        if self._shard is not None:
            self._index.give_up(self._tag, self._shard._replace(ours=False))
            for name in (rows_name(self._shard.number), index_name(self._shard.number)):
                self._files.forget((self._tag, name))
            self._shard = None


def _reaches(file: int, end: int) -> bool:
    """Whether a file is there and has so many bytes."""
    status = os.fstat(file)
    return status.st_nlink > 0 and status.st_size >= end


def _new_shard(number: int, folder: int) -> int:
    """Makes an empty shard that outlasts a crash; its number, the first from `number` that is free.

    Raises OSError, and leaves nothing.
    """
    while True:
        made: list[str] = []
        try:
            for name in (rows_name(number), index_name(number)):
                os.close(create_file(name, folder))
                made.append(name)
            os.fsync(folder)
            return number
        except OSError as error:
            for name in made:
                os.unlink(name, dir_fd=folder)
            if not isinstance(error, FileExistsError):
                raise
            number += 1


def rows_name(number: int) -> str:
    """The file with the rows of a shard."""
    return f"shard-{number:06}.rows"


def index_name(number: int) -> str:
    """The file with the manifests of a shard."""
    return f"shard-{number:06}.jsonl"
