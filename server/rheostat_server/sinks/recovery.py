"""Brings the index of a root in step with its files, when the server starts.

Files are the truth, and what is as it was last seen is not read again: shards of the same size, and
folders of requests that were not changed since they were listed. So a start costs a few system
calls per tag and shard, and the first one on a root reads each shard's index once, in blocks. What
a crash left unpublished at the end of a shard is cut off.
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
"""The folder of a tag's requests that have files of their own."""

TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Names of folders that are tags."""

_LOG = logging.getLogger(__name__)

_FILE = re.compile(r"shard-([0-9]{6,})\.(jsonl|rows)")
_LINE = re.compile(rb'\{"request_id": "([A-Za-z0-9._:-]{1,128})"')
_HEAD_BYTES = 256
"""Of a line, enough for the id."""
_BLOCK_BYTES = 1 << 20
_SLOW = 1.0
"""Seconds from which on it is worth a line of the log."""


class _Damaged(Exception):
    """A line of an index is none."""


def recover(root: Root, index: ArtifactIndex) -> None:
    """Enters what is not entered, and forgets what is gone. Raises OSError, SinkError."""
    began = time.monotonic()
    known = dict(index.tags())
    for tag in filter(TAG.fullmatch, root.names()):
        with suppress(NoFolder):
            _recover_shards(root, index, tag)
            _recover_requests(root, index, tag, known.pop(tag, None))
    for tag in known:
        with index.changing():
            index.remove_tag(tag)
    took = time.monotonic() - began
    if took > _SLOW:
        _LOG.info("looking through %s took %.1f s", root.path, took)


def note_listed(root: Root, index: ArtifactIndex) -> None:
    """Notes that all requests are entered, so that the next start lists no folder."""
    for tag, listed in index.tags():
        if listed is None:
            with suppress(OSError, SinkError), root.folder(tag, REQUESTS) as folder:
                changed = os.fstat(folder).st_mtime_ns
                with index.changing():
                    index.set_listed(tag, changed)


def _recover_requests(root: Root, index: ArtifactIndex, tag: str, listed: int | None) -> None:
    try:
        with root.folder(tag, REQUESTS) as folder:
            changed = os.fstat(folder).st_mtime_ns
            if changed == listed:
                return
            with index.changing(), os.scandir(folder) as entries:
                names = (request_of(entry.name) for entry in entries)
                index.set_folders(tag, (name for name in names if name is not None))
                index.set_listed(tag, changed)
    except FileNotFoundError:
        if listed is not None:
            with index.changing():
                index.set_folders(tag, ())
                index.set_listed(tag, None)


def _recover_shards(root: Root, index: ArtifactIndex, tag: str) -> None:
    known = {shard.number: shard for shard in index.shards(tag)}
    found = map(_FILE.fullmatch, root.names(tag, SHARDS))
    numbers = sorted({int(name[1]) for name in found if name is not None})
    if numbers:
        with root.folder(tag, SHARDS) as folder:
            for number in numbers:
                _recover_shard(folder, index, tag, number, known.pop(number, None))
    for number in known:
        with index.changing():
            index.remove_shard(tag, number)


def _recover_shard(
    folder: int, index: ArtifactIndex, tag: str, number: int, known: Shard | None
) -> None:
    rows, lines = _size(rows_name(number), folder), _size(index_name(number), folder)
    if known is not None and not known.damaged and (rows, lines) == known[1:3]:
        return
    shard = known
    with index.changing():
        if shard is None or shard.damaged or rows < shard.rows_end or lines < shard.index_end:
            shard = Shard(number, 0, 0)
            index.remove_shard(tag, number)
        if lines >= 0:
            shard = _entered(folder, index, tag, shard)
        index.set_shard(tag, shard)
    if shard.damaged:
        _LOG.error("%s of the tag %s is damaged: the tag takes nothing", index_name(number), tag)


def _entered(folder: int, index: ArtifactIndex, tag: str, known: Shard) -> Shard:
    """Enters the lines that a shard's index has gained, and cuts off what follows the last one."""
    number, rows_end = known.number, known.rows_end
    file = reopen_file(index_name(number), folder)
    lines = _Lines(file, known.index_end)
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
        _cut(rows_name(number), folder, rows_end)
    _cut(index_name(number), folder, lines.end)
    return Shard(number, rows_end, lines.end)


class _Lines:
    """The whole lines of an index: request, offset and length of each. Reads as it is iterated."""

    def __init__(self, file: int, start: int) -> None:
        self._file = file
        self.end = start
        """Where the last whole line ends."""
        self.last: tuple[int, int] | None = None
        """Offset and length of the last one."""

    def __iter__(self) -> Iterator[tuple[str, int, int]]:
        at, head = self.end, b""
        while block := os.pread(self._file, _BLOCK_BYTES, at):
            begin = 0
            while (stop := block.find(b"\n", begin)) >= 0:
                head += block[begin : min(stop, begin + _HEAD_BYTES)]
                found = _LINE.match(head)
                if found is None:
                    raise _Damaged
                length = at + stop + 1 - self.end
                self.last = self.end, length
                self.end += length
                yield found[1].decode(), *self.last
                begin, head = stop + 1, b""
            head += block[begin : begin + _HEAD_BYTES - len(head)]
            at += len(block)


def _rows_end(line: bytes) -> int:
    """Where the rows end that the last line of an index names."""
    return max((one.offset + one.length for one in artifacts_of(line, "")), default=0)


def _size(name: str, folder: int) -> int:
    """Bytes of a file; -1: there is none."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_size
    except FileNotFoundError:
        return -1


def _cut(name: str, folder: int, end: int) -> None:
    file = reopen_file(name, folder)
    try:
        if os.fstat(file).st_size > end:
            os.ftruncate(file, end)
            os.fsync(file)
    finally:
        os.close(file)
