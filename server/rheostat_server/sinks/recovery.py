"""Updates the index of a root from its files when the server starts.

Unchanged files are not read again: shards of the same size, and folders of requests that were not
modified since they were listed. So a start costs a few system calls per tag and shard. Only the
first start on a root reads the index of each shard, in blocks. Unpublished bytes that a crash left
at the end of a shard are removed.
"""

import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress

from rheostat_server.sinks.disk import NoFolder, Root, reopen_file, request_of
from rheostat_server.sinks.index import ArtifactIndex, Shard
from rheostat_server.sinks.manifest import artifacts_of
from rheostat_server.sinks.protocol import SinkError
from rheostat_server.sinks.shards import SHARDS, index_name, rows_name

REQUESTS = "requests"
"""Name of the folder, below a tag, of requests that have their own folders."""

TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Names of folders that are tags."""

_LOG = logging.getLogger(__name__)

_FILE = re.compile(r"shard-([0-9]{6,})\.(jsonl|rows)")
_LINE = re.compile(rb'\{"request_id": "([A-Za-z0-9._:-]{1,128})"')
_HEAD_BYTES = 256
"""Bytes of a line that contain the id."""
_BLOCK_BYTES = 1 << 20
_SLOW = 1.0
"""Seconds from which the duration is logged."""


class _Damaged(Exception):
    """A line of an index cannot be parsed."""


def recover(root: Root, index: ArtifactIndex) -> None:
    """Adds requests that the index lacks, and removes deleted ones. Raises OSError, SinkError."""
    began = time.monotonic()
    indexed = dict(index.tags())
    for tag in filter(TAG.fullmatch, root.names()):
        with suppress(NoFolder):
            _recover_shards(root, index, tag)
            _recover_requests(root, index, tag, indexed.pop(tag, None))
    for tag in indexed:
        with index.transaction():
            index.remove_tag(tag)
    took = time.monotonic() - began
    if took > _SLOW:
        _LOG.info("updating the index of %s took %.1f s", root.path, took)


def save_listed(root: Root, index: ArtifactIndex) -> None:
    """Records that the index has all requests, so that the next start lists no folder."""
    for tag, listed in index.tags():
        if listed is None:
            with suppress(OSError, SinkError), root.folder(tag, REQUESTS) as folder:
                changed = os.fstat(folder).st_mtime_ns
                with index.transaction():
                    index.set_listed(tag, changed)


def _recover_requests(root: Root, index: ArtifactIndex, tag: str, listed: int | None) -> None:
    try:
        with root.folder(tag, REQUESTS) as folder:
            changed = os.fstat(folder).st_mtime_ns
            if changed == listed:
                return
            with index.transaction(), os.scandir(folder) as entries:
                names = (request_of(entry.name) for entry in entries)
                index.set_folders(tag, (name for name in names if name is not None))
                index.set_listed(tag, changed)
    except FileNotFoundError:
        if listed is not None:
            with index.transaction():
                index.set_folders(tag, ())
                index.set_listed(tag, None)


def _recover_shards(root: Root, index: ArtifactIndex, tag: str) -> None:
    indexed = {shard.number: shard for shard in index.shards(tag)}
    matches = map(_FILE.fullmatch, root.names(tag, SHARDS))
    numbers = sorted({int(match[1]) for match in matches if match is not None})
    if numbers:
        with root.folder(tag, SHARDS) as folder:
            for number in numbers:
                _recover_shard(folder, index, tag, number, indexed.pop(number, None))
    for number in indexed:
        with index.transaction():
            index.remove_shard(tag, number)


def _recover_shard(
    folder: int, index: ArtifactIndex, tag: str, number: int, shard: Shard | None
) -> None:
    rows, lines = _size(rows_name(number), folder), _size(index_name(number), folder)
    if shard is not None and not shard.damaged and (rows, lines) == shard[1:3]:
        return
    with index.transaction():
        if shard is None or shard.damaged or rows < shard.rows_end or lines < shard.index_end:
            shard = Shard(number, 0, 0)
            index.remove_shard(tag, number)
        if lines >= 0:
            shard = _add_lines(folder, index, tag, shard)
        index.set_shard(tag, shard)
    if shard.damaged:
        _LOG.error("%s of the tag %s is damaged: the tag is refused", index_name(number), tag)


def _add_lines(folder: int, index: ArtifactIndex, tag: str, shard: Shard) -> Shard:
    """Adds the new lines of a shard's index, and truncates the files after the last line."""
    number, rows_end = shard.number, shard.rows_end
    file = reopen_file(index_name(number), folder)
    lines = _Lines(file, shard.index_end)
    try:
        try:
            index.add_lines(tag, number, lines)
        except _Damaged:
            return Shard(number, rows_end, lines.end, damaged=True)
        if lines.last is not None:
            offset, length = lines.last
            rows_end = _rows_end(os.pread(file, length, offset))
    finally:
        os.close(file)
    with suppress(FileNotFoundError):
        _truncate(rows_name(number), folder, rows_end)
    _truncate(index_name(number), folder, lines.end)
    return Shard(number, rows_end, lines.end)


class _Lines:
    """Iterates over the complete lines of an index: request, offset and length of each."""

    def __init__(self, file: int, start: int) -> None:
        self._file = file
        self.end = start
        """The end of the last complete line."""
        self.last: tuple[int, int] | None = None
        """Offset and length of that line."""

    def __iter__(self) -> Iterator[tuple[str, int, int]]:
        at, head = self.end, b""
        while block := os.pread(self._file, _BLOCK_BYTES, at):
            begin = 0
            while (stop := block.find(b"\n", begin)) >= 0:
                head += block[begin : min(stop, begin + _HEAD_BYTES)]
                match = _LINE.match(head)
                if match is None:
                    raise _Damaged
                length = at + stop + 1 - self.end
                self.last = self.end, length
                self.end += length
                yield match[1].decode(), *self.last
                begin, head = stop + 1, b""
            head += block[begin : begin + _HEAD_BYTES - len(head)]
            at += len(block)


def _rows_end(line: bytes) -> int:
    """The end of the rows of the request whose manifest is `line`."""
    artifacts = artifacts_of(line, "")
    return max((artifact.offset + artifact.length for artifact in artifacts), default=0)


def _size(name: str, folder: int) -> int:
    """Bytes of a file; -1 if it does not exist."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_size
    except FileNotFoundError:
        return -1


def _truncate(name: str, folder: int, end: int) -> None:
    file = reopen_file(name, folder)
    try:
        if os.fstat(file).st_size > end:
            os.ftruncate(file, end)
            os.fsync(file)
    finally:
        os.close(file)
