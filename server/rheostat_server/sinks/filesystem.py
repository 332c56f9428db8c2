"""The plugin `filesystem`: rows as files below one folder, which docs/sinks.md describes.

Invariants: a request is there with all of its files and its manifest, or not at all; nothing that
is there is ever replaced; nothing is written outside the folder, whatever requests are called.
"""

import hashlib
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from threading import Lock

from rheostat_server.open_files import OpenFiles
from rheostat_server.sinks.disk import (
    REQUEST,
    NoFolder,
    Root,
    Scratch,
    Writer,
    exists,
    file_name,
    read_file,
    reopen_file,
    taken,
)
from rheostat_server.sinks.formats import Format, write_tables
from rheostat_server.sinks.index import ArtifactIndex, Place
from rheostat_server.sinks.manifest import (
    MANIFEST,
    Stored,
    artifacts_of,
    encoded,
    make_manifest,
)
from rheostat_server.sinks.protocol import (
    Artifact,
    Layout,
    Outcome,
    RequestAbout,
    RowBlock,
    SinkError,
    SinkRefusal,
    SinkSettingsError,
    Target,
)
from rheostat_server.sinks.recovery import REQUESTS, TAG, note_listed, recover
from rheostat_server.sinks.settings import only_known, size_setting
from rheostat_server.sinks.shards import SHARDS, Shards, index_name
from rheostat_server.sinks.tables import Table, Tables

_LOG = logging.getLogger(__name__)

_SETTINGS = ("root", "layout", "format", "buffer", "shard")
_MIB = 1 << 20

_DESCRIPTORS = 64
"""Files of shards and of recordings that stay open while nobody uses them."""

_TAGS = 64
"""Tags of which the shards are remembered while nobody writes to them."""


def make(name: str, settings: Mapping[str, str]) -> "Filesystem":
    """The sink, from `root` (required), `layout`, `format`, `buffer` and `shard` (bytes).

    Raises:
        SinkSettingsError: a setting is wrong, or the folder cannot be used.
    """
    only_known(settings, _SETTINGS)
    if not settings.get("root"):
        raise SinkSettingsError("root=FOLDER is required: the folder to write to")
    try:
        layout = Layout(settings.get("layout", Layout.PACKED))
        kind = Format(settings.get("format", Format.SAFETENSORS))
    except ValueError as error:
        raise SinkSettingsError(
            f"{error}; layouts are {', '.join(Layout)}, formats {', '.join(Format)}"
        ) from error
    return Filesystem(
        Path(settings["root"]),
        layout=layout,
        kind=kind,
        buffer_bytes=size_setting(settings, "buffer", 64 * _MIB),
        shard_bytes=size_setting(settings, "shard", 1024 * _MIB),
    )


class Filesystem:
    """A folder that rows are kept in."""

    options: Mapping[str, str] = {"format": f"one of {', '.join(Format)}"}
    """What a target may say."""

    def __init__(
        self,
        root: Path,
        *,
        layout: Layout = Layout.PACKED,
        kind: Format = Format.SAFETENSORS,
        buffer_bytes: int = 64 * _MIB,
        shard_bytes: int = 1024 * _MIB,
    ) -> None:
        """The sink of a folder.

        Args:
            root: the folder, which becomes this process's own.
            layout: that of targets that name none.
            kind: the format of targets that name none.
            buffer_bytes: rows of one request that wait in memory; more go to a spool file.
            shard_bytes: size from which on a shard is full.

        Raises:
            SinkSettingsError: another process has it, or it cannot be used.
        """
        self.layouts: Sequence[Layout] = (layout, *(one for one in Layout if one is not layout))
        self._kind = kind
        self._buffer = buffer_bytes
        self._shard = shard_bytes
        self._root = Root(root)
        self.files = OpenFiles(_DESCRIPTORS)
        """Files of shards and of recordings."""
        try:
            self._index = _index_of(self._root)
        except (OSError, SinkError) as error:
            self._root.close()
            raise SinkSettingsError(f"{root} cannot be written to: {error}") from error
        self._lock = Lock()
        self._shards: OrderedDict[str, _Used] = OrderedDict()
        self._begun: set[tuple[str, str]] = set()
        self._closed = False

    def check(self, target: Target) -> None:
        """Refuses formats that there are not."""
        kind = target.options.get("format", self._kind)
        if kind not in set(Format):
            raise SinkRefusal(f'"{kind}" is none of {", ".join(Format)}', "options.format")

    def open(self, about: RequestAbout) -> "FileRecording":
        """Begins a recording.

        Raises:
            Collision: the request is there, or another recording of it is under way.
            SinkError: an id or tag cannot be the name of a file.
            OSError: the folder cannot be written.
        """
        tag, request = about.target.tag, about.request_id
        if not TAG.fullmatch(tag) or not REQUEST.fullmatch(request):
            raise SinkError("the request's id or tag cannot be the name of a file")
        self._index.check_writable()
        key = (tag, request)
        with self._lock:
            if key in self._begun:
                raise taken(request)
            self._begun.add(key)
        try:
            if self._is_there(tag, request):
                raise taken(request)
            kind = Format(about.target.options.get("format", self._kind))
            return FileRecording(self, about, kind, self._root.scratch(), self._buffer)
        except BaseException:
            self.ended(about)
            raise

    def artifacts(self, request_id: str) -> list[Artifact]:
        """What is there of a request, under any tag."""
        if not REQUEST.fullmatch(request_id):
            return []
        found: list[Artifact] = []
        for place in self._index.find(request_id):
            with suppress(FileNotFoundError, NoFolder):  # somebody has deleted it
                found += (
                    self._line(place) if place.shard else self._own_files(place.tag, request_id)
                )
        return found

    def close(self) -> None:
        """Gives the folder up."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._shards.clear()
            self.files.close()
            note_listed(self._root, self._index)
            self._index.close()
        self._root.close()

    @contextmanager
    def shards(self, tag: str) -> Iterator[Shards]:
        """The shards of a tag, the same ones for all who use them now. Raises SinkError."""
        with self._lock:
            used = self._shards.get(tag)
            if used is None:
                used = _Used(Shards(self._root, self._index, self.files, tag, self._shard))
                self._shards[tag] = used
            used.users += 1
            self._shards.move_to_end(tag)
        try:
            yield used.shards
        finally:
            with self._lock:
                used.users -= 1
                self._forget_unused()

    def _forget_unused(self) -> None:
        """Forgets tags that nobody writes to, once the index holds all that is known of them."""
        unused = [tag for tag, one in self._shards.items() if not one.users]
        if not self._index.behind:
            for tag in unused[: max(0, len(unused) - _TAGS)]:
                del self._shards[tag]

    def entered(self, tag: str, request_id: str) -> None:
        """A request has a folder of its own from now on."""
        self._index.enter(request_id, Place(tag))

    def ended(self, about: RequestAbout) -> None:
        """A recording is over."""
        with self._lock:
            self._begun.discard((about.target.tag, about.request_id))

    def _is_there(self, tag: str, request_id: str) -> bool:
        try:
            with self._root.folder(tag, REQUESTS) as folder:
                if exists(file_name(request_id), folder):
                    return True
        except FileNotFoundError:
            pass
        with self.shards(tag):  # raises where an index of theirs is damaged
            return self._index.in_shards(tag, request_id)

    def _own_files(self, tag: str, request_id: str) -> list[Artifact]:
        name = file_name(request_id)
        with self._root.folder(tag, REQUESTS, name) as folder:
            data = read_file(MANIFEST, folder)
        return own_artifacts(data, f"{tag}/{REQUESTS}/{name}")

    def _line(self, place: Place) -> list[Artifact]:
        with self._root.folder(place.tag, SHARDS) as folder:
            file = reopen_file(index_name(place.shard), folder)
        try:
            line = os.pread(file, place.length, place.offset)
        finally:
            os.close(file)
        return artifacts_of(line, f"{place.tag}/{SHARDS}")


class _Used:
    """The shards of a tag, and how many use them."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self.users = 0


class FileRecording:
    """A request on its way into the folder: rows in bounded memory, then in files.

    Invariant: what is not published lies in a scratch folder of its own. It goes with the
    recording.
    """

    def __init__(
        self, sink: Filesystem, about: RequestAbout, kind: Format, scratch: Scratch, buffer: int
    ) -> None:
        """A recording that writes to `scratch` what must not wait in memory."""
        self._sink = sink
        self._about = about
        self._kind = kind
        self._scratch = scratch
        self._tables = Tables(about.captures, buffer, self._spool)
        self._layout = about.target.layout or sink.layouts[0]

    @property
    def pending(self) -> Sequence[str]:
        """The files that will be there; which shard it will be is known at the end."""
        if self._layout is Layout.SHARDED:
            return ()
        return [f"{self._folder}/{name}" for name in (*self._files(), MANIFEST)]

    def write(self, block: RowBlock) -> None:
        """Takes rows. Raises SinkError, OSError."""
        self._tables.write(block)

    @property
    def memory(self) -> int:
        """Bytes of rows in memory, about."""
        return self._tables.memory

    def flush(self) -> None:
        """Moves them to the spool file. Raises OSError."""
        self._tables.overflow()

    def finish(self, outcome: Outcome) -> list[Artifact]:
        """Publishes the request. Raises Collision, OSError."""
        shared = self._layout is Layout.SHARDED
        found = self._append(outcome) if shared else self._publish(outcome)
        self._end()
        return found

    def abandon(self, error: BaseException) -> None:
        """Deletes what there is."""
        self._end()

    def _end(self) -> None:
        self._tables.close()
        self._sink.files.forget(self._scratch.name)
        self._scratch.discard()
        self._sink.ended(self._about)

    def _spool(self) -> AbstractContextManager[int]:
        """The file that rows overflow to; made where it is not there."""
        made = self._tables.spooled
        return self._sink.files.use(
            self._scratch.name,
            lambda: self._scratch.reopen("spool") if made else self._scratch.create("spool"),
        )

    @property
    def _folder(self) -> str:
        return f"{self._about.target.tag}/{REQUESTS}/{file_name(self._about.request_id)}"

    def _files(self) -> dict[str, list[Table]]:
        """Which table goes to which file."""
        if self._layout is Layout.PACKED:
            return {f"rows.{self._kind}": list(self._tables.all)}
        files: dict[str, list[Table]] = {}
        for table in self._tables.all:
            site = f"{table.site.point.value}.{table.site.layer}.{self._kind}"
            files.setdefault(site, []).append(table)
        return files

    def _write(self, out: Writer, tables: Sequence[Table]) -> None:
        if not self._tables.spooled:
            write_tables(out, self._kind, self._about, tables, None)
            return
        with self._spool() as spool:
            write_tables(out, self._kind, self._about, tables, spool)

    def _manifest(self, outcome: Outcome, files: Sequence[Stored]) -> bytes:
        return encoded(make_manifest(self._about, outcome, self._kind, files, time.time()))

    def _publish(self, outcome: Outcome) -> list[Artifact]:
        stored = []
        for name, tables in self._files().items():
            writer = self._file(name, tables)
            stored.append(Stored(name, 0, writer.count, writer.sha256, tables))
        manifest = self._manifest(outcome, stored)
        self._file(MANIFEST, manifest)
        if self._tables.spooled:
            self._scratch.remove("spool")
        tag = self._about.target.tag
        self._scratch.publish(file_name(self._about.request_id), tag, REQUESTS)
        self._sink.entered(tag, self._about.request_id)
        return own_artifacts(manifest, self._folder)

    def _file(self, name: str, content: "Sequence[Table] | bytes") -> Writer:
        file = self._scratch.create(name)
        try:
            writer = Writer(file)
            if isinstance(content, bytes):
                writer.write(content)
            else:
                self._write(writer, content)
            os.fsync(file)
        finally:
            os.close(file)
        return writer

    def _append(self, outcome: Outcome) -> list[Artifact]:
        with self._sink.shards(self._about.target.tag) as shards:
            return shards.append(
                self._about.request_id,
                self._tables.all,
                lambda out: self._write(out, self._tables.all),
                lambda stored: self._manifest(outcome, [stored]),
            )


def _index_of(root: Root) -> ArtifactIndex:
    """The index of a root, in step with its files. Raises OSError, SinkError."""
    index = ArtifactIndex(root.path)
    try:
        recover(root, index)
    except SinkError as error:
        _LOG.warning("the index of %s is made anew: %s", root.path, error)
        index.clear()
        try:
            recover(root, index)
        except BaseException:
            index.close()
            raise
    except BaseException:
        index.close()
        raise
    return index


def own_artifacts(manifest: bytes, folder: str) -> list[Artifact]:
    """The artefacts of a request with files of its own, the manifest last."""
    files = artifacts_of(manifest, folder)
    itself = Artifact(
        path=f"{folder}/{MANIFEST}",
        media_type="application/json",
        state=files[0].state,
        length=len(manifest),
        sha256=hashlib.sha256(manifest).digest(),
        write_time=files[0].write_time,
    )
    return [*files, itself]
