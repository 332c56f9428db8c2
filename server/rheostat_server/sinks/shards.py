"""The shards of a tag: files to which requests are appended.

A shard is a pair of files. `shard-000001.rows` has the files of requests one after the other, each
aligned to 64 bytes. `shard-000001.jsonl` has a manifest per line, with offset, length and SHA-256.

Rows are on the disk before their line is written, and a line counts once it ends in a newline. So a
reader sees a request completely or not at all, even if the server crashes. After a failure both
files are truncated to their earlier size. If a reader may have seen the new line, the shard is
closed and a new one begins, so that bytes which an index has named are never overwritten.

Only files in use, or used recently, are open. The sizes of a shard are in the index of the root, so
an unused tag needs neither descriptors nor memory.
"""

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from threading import Lock

from rheostat_server.sinks.disk import Root, Writer, collision, create_file, reopen_file, write_all
from rheostat_server.sinks.index import ArtifactIndex, Place, Shard
from rheostat_server.sinks.manifest import artifacts_of
from rheostat_server.sinks.protocol import Artifact, SinkError
from rheostat_server.tasks.open_files import OpenFiles

SHARDS = "shards"
"""The folder of a tag's shards."""

_LOG = logging.getLogger(__name__)

_ALIGNED = 64


class Shards:
    """The shards of one tag. Only this process writes to them."""

    def __init__(
        self, root: Root, index: ArtifactIndex, files: OpenFiles, tag: str, shard_bytes: int
    ) -> None:
        """Selects the shard to append to. A shard is full at `shard_bytes`.

        Raises:
            SinkError: the index cannot be read, or that of a shard is damaged.
        """
        self.users = 0
        """The number of threads that use it, which the sink counts under its lock."""
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
        write: Callable[[Writer], None],
        manifest: Callable[[str, int, Writer], bytes],
    ) -> list[Artifact]:
        """Appends a request.

        Args:
            request_id: the request.
            write: writes the rows.
            manifest: gets the name of the shard's file, the first byte there, and the writer after
                `write`.

        Raises:
            Collision: the request is stored already.
            OSError: the request cannot be written, and is not stored.
        """
        with self._lock, ExitStack() as stack:
            if self._index.in_shards(self._tag, request_id):
                raise collision(request_id)
            shard, rows, index = self._open_files(stack)
            start = shard.rows_end + -shard.rows_end % _ALIGNED
            visible = False  # whether a reader may have seen the line
            try:
                os.ftruncate(rows, start)
                os.lseek(rows, start, os.SEEK_SET)
                os.lseek(index, shard.index_end, os.SEEK_SET)
                writer = Writer(rows)
                write(writer)
                os.fdatasync(rows)
                line = manifest(rows_name(shard.number), start, writer)
                write_all(index, memoryview(line[:-1]))
                visible = True
                write_all(index, memoryview(line[-1:]))
                os.fdatasync(index)
            except BaseException:
                self._truncate(shard, rows, index, visible=visible)
                raise
            place = Place(self._tag, shard.number, shard.index_end, len(line))
            rows_end = start + writer.count
            self._shard = shard._replace(rows_end=rows_end, index_end=place.offset + place.length)
            self._index.add(request_id, place, rows_end)
            return artifacts_of(line, f"{self._tag}/{SHARDS}")

    def _current_shard(self) -> Shard:
        """The shard to append to, a new shard if necessary. Raises OSError."""
        if self._shard is not None and self._shard.rows_end >= self._limit:
            self._close_shard()
        if self._shard is None:
            with self._root.folder(self._tag, SHARDS, make=True) as folder:
                self._last = _new_shard(self._last + 1, folder)
            self._shard = Shard(self._last, 0, 0, ours=True)
        return self._shard

    def _open_files(self, stack: ExitStack) -> tuple[Shard, int, int]:
        """The shard to append to, and the descriptors of its rows and its index.

        If the files of the shard were deleted or truncated, a new shard begins.

        Raises:
            OSError: a new shard cannot be created.
        """
        while True:
            shard = self._current_shard()
            try:
                rows = stack.enter_context(self._open(rows_name(shard.number)))
                index = stack.enter_context(self._open(index_name(shard.number)))
                if _has_bytes(rows, shard.rows_end) and _has_bytes(index, shard.index_end):
                    return shard, rows, index
            except FileNotFoundError:
                if not shard.index_end:  # it was just created, so a new one would fail too
                    raise
            _LOG.error("shard %s of %s was deleted or truncated", shard.number, self._tag)
            self._close_shard()

    def _open(self, name: str) -> AbstractContextManager[int]:
        return self._files.use((self._tag, name), lambda: self._reopen(name))

    def _reopen(self, name: str) -> int:
        with self._root.folder(self._tag, SHARDS) as folder:
            return reopen_file(name, folder)

    def _truncate(self, shard: Shard, rows: int, index: int, *, visible: bool) -> None:
        try:
            os.ftruncate(index, shard.index_end)
            os.ftruncate(rows, shard.rows_end)
        except OSError as error:
            _LOG.error("shard %s of %s is closed: %s", shard.number, self._tag, error)
            visible = True
        if visible:
            self._close_shard()

    def _close_shard(self) -> None:
        if self._shard is not None:
            with suppress(SinkError), self._index.transaction():
                self._index.set_shard(self._tag, self._shard._replace(ours=False))
            for name in (rows_name(self._shard.number), index_name(self._shard.number)):
                self._files.close_file((self._tag, name))
            self._shard = None


def _has_bytes(file: int, end: int) -> bool:
    """Whether a file was not deleted and has at least `end` bytes."""
    status = os.fstat(file)
    return status.st_nlink > 0 and status.st_size >= end


def _new_shard(number: int, folder: int) -> int:
    """Creates an empty shard on the disk; returns the first free number from `number`.

    If it raises OSError, it leaves no files.
    """
    while True:
        created: list[str] = []
        try:
            for name in (rows_name(number), index_name(number)):
                os.close(create_file(name, folder))
                created.append(name)
            os.fsync(folder)
            return number
        except OSError as error:
            for name in created:
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
