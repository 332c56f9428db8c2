"""The plugin `filesystem`: stores rows in files below one folder, which docs/sinks.md describes.

A request is published with all of its files and its manifest, or not at all. Nothing is ever
replaced. No request id or tag can make the sink write outside the folder.
"""

import hashlib
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from threading import Lock

from rheostat_server.sinks.disk import (
    REQUEST,
    NoFolder,
    Root,
    Scratch,
    Writer,
    collision,
    file_name,
    read_file,
)
from rheostat_server.sinks.formats import Format, write_tables
from rheostat_server.sinks.index import ArtifactIndex, Place
from rheostat_server.sinks.manifest import (
    MANIFEST,
    Stored,
    artifacts_of,
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
from rheostat_server.sinks.recovery import REQUESTS, TAG, recover, save_listed
from rheostat_server.sinks.settings import EXAMPLE, only_known, size_setting
from rheostat_server.sinks.shards import SHARDS, Shards, index_name
from rheostat_server.sinks.tables import Table, Tables
from rheostat_server.tasks.open_files import OpenFiles

_LOG = logging.getLogger(__name__)

_SETTINGS = ("root", "layout", "format", "buffer", "shard")
_MIB = 1 << 20

_DESCRIPTORS = 64
"""Unused files of shards and recordings that stay open."""

_TAGS = 64
"""Unused tags whose `Shards` are cached."""


def make(name: str, settings: Mapping[str, str]) -> "Filesystem":
    """The sink, from `root` (required), `layout`, `format`, `buffer` and `shard` (bytes).

    Raises:
        SinkSettingsError: a setting is wrong, or the folder cannot be used.
    """
    only_known(settings, _SETTINGS)
    if not settings.get("root"):
        raise SinkSettingsError(f"root=FOLDER is required: the folder to write to, as in {EXAMPLE}")
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
    """The sink of a folder."""

    options: Mapping[str, str] = {"format": f"one of {', '.join(Format)}"}

    def __init__(
        self,
        root: Path,
        *,
        layout: Layout = Layout.PACKED,
        kind: Format = Format.SAFETENSORS,
        buffer_bytes: int = 64 * _MIB,
        shard_bytes: int = 1024 * _MIB,
    ) -> None:
        """Locks the folder. `layout` and `kind`, the format, are the defaults of targets.

        Further rows of a request go to a spool file once `buffer_bytes` wait in memory. A shard is
        full at `shard_bytes`.

        Raises:
            SinkSettingsError: another process has locked it, or it cannot be used.
        """
        self.layouts: Sequence[Layout] = (layout, *(other for other in Layout if other != layout))
        self._kind = kind
        self._buffer = buffer_bytes
        self._shard = shard_bytes
        self._root = Root(root)
        self.files = OpenFiles(_DESCRIPTORS)
        try:
            self.index = _open_index(self._root)
        except (OSError, SinkError) as error:
            self._root.close()
            raise SinkSettingsError(f"{root} cannot be written to: {error}") from error
        self._lock = Lock()
        self._shards: OrderedDict[str, Shards] = OrderedDict()
        self._recording: set[tuple[str, str]] = set()
        self._closed = False

    def check(self, target: Target) -> None:
        """Refuses unknown formats."""
        kind = target.options.get("format", self._kind)
        if kind not in set(Format):
            raise SinkRefusal(f'"{kind}" is not one of {", ".join(Format)}', "options.format")

    def open(self, about: RequestAbout) -> "FileRecording":
        """Begins a recording.

        Raises:
            Collision: the request is stored, or is being recorded.
            SinkError: an id or tag cannot be the name of a file.
            OSError: the folder cannot be written.
        """
        tag, request = about.target.tag, about.request_id
        if not TAG.fullmatch(tag) or not REQUEST.fullmatch(request):
            raise SinkError("the request's id or tag cannot be the name of a file")
        self.index.check_writable()
        key = (tag, request)
        with self._lock:
            if key in self._recording:
                raise collision(request)
            self._recording.add(key)
        try:
            if self._exists(tag, request):
                raise collision(request)
            kind = Format(about.target.options.get("format", self._kind))
            return FileRecording(self, about, kind, Scratch(self._root), self._buffer)
        except BaseException:
            self.end_recording(about)
            raise

    def artifacts(self, request_id: str) -> list[Artifact]:
        """The artefacts of a request, under any tag."""
        if not REQUEST.fullmatch(request_id):
            return []
        artifacts: list[Artifact] = []
        for place in self.index.find(request_id):
            with suppress(FileNotFoundError, NoFolder):  # a user has deleted the file
                artifacts += (
                    self._in_shard(place) if place.shard else self._in_folder(place.tag, request_id)
                )
        return artifacts

    def close(self) -> None:
        """Unlocks the folder."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._shards.clear()
            self.files.close()
            save_listed(self._root, self.index)
            self.index.close()
        self._root.close()

    @contextmanager
    def shards(self, tag: str) -> Iterator[Shards]:
        """The shards of a tag, one object for all concurrent users. Raises SinkError."""
        with self._lock:
            shards = self._shards.get(tag)
            if shards is None:
                shards = Shards(self._root, self.index, self.files, tag, self._shard)
                self._shards[tag] = shards
            shards.users += 1
            self._shards.move_to_end(tag)
        try:
            yield shards
        finally:
            with self._lock:
                shards.users -= 1
                unused = [name for name, each in self._shards.items() if not each.users]
                if not self.index.has_pending:  # otherwise the index lacks some of their requests
                    for name in unused[: max(0, len(unused) - _TAGS)]:
                        del self._shards[name]

    def end_recording(self, about: RequestAbout) -> None:
        """Lets the request's id and tag be recorded again."""
        with self._lock:
            self._recording.discard((about.target.tag, about.request_id))

    def _exists(self, tag: str, request_id: str) -> bool:
        with suppress(FileNotFoundError), self._root.folder(tag, REQUESTS) as folder:
            # A broken link counts too.
            os.stat(file_name(request_id), dir_fd=folder, follow_symlinks=False)
            return True
        with self.shards(tag):  # raises SinkError if the index of a shard is damaged
            return self.index.in_shards(tag, request_id)

    def _in_folder(self, tag: str, request_id: str) -> list[Artifact]:
        name = file_name(request_id)
        with self._root.folder(tag, REQUESTS, name) as folder:
            data = read_file(MANIFEST, folder)
        return _artifacts_of_folder(data, f"{tag}/{REQUESTS}/{name}")

    def _in_shard(self, place: Place) -> list[Artifact]:
        with self._root.folder(place.tag, SHARDS) as folder:
            line = read_file(index_name(place.shard), folder, place.offset, place.length)
        return artifacts_of(line, f"{place.tag}/{SHARDS}")


class FileRecording:
    """Records a request: rows wait in bounded memory, then in a spool file.

    Unpublished files are in a scratch folder, which is deleted with the recording.
    """

    def __init__(
        self, sink: Filesystem, about: RequestAbout, kind: Format, scratch: Scratch, buffer: int
    ) -> None:
        self._sink = sink
        self._about = about
        self._kind = kind
        self._scratch = scratch
        self._tables = Tables(
            about.captures, buffer, partial(sink.files.use, scratch.name, scratch.spool)
        )
        self._layout = about.target.layout or sink.layouts[0]

    @property
    def pending(self) -> Sequence[str]:
        """The files that `finish` will publish; none for shards, which are known at the end."""
        if self._layout is Layout.SHARDED:
            return ()
        return [f"{self._folder}/{name}" for name in (*self._files(), MANIFEST)]

    def write(self, block: RowBlock) -> None:
        """Adds rows. Raises SinkError, OSError."""
        self._tables.write(block)

    @property
    def memory(self) -> int:
        """Approximate bytes of rows in memory."""
        return self._tables.memory

    def flush(self) -> None:
        """Moves rows from memory to the spool file. Raises OSError."""
        self._tables.overflow()

    def finish(self, outcome: Outcome) -> list[Artifact]:
        """Publishes the request. Raises Collision, OSError."""
        sharded = self._layout is Layout.SHARDED
        artifacts = self._append(outcome) if sharded else self._publish(outcome)
        self._end()
        return artifacts

    def abandon(self, error: BaseException) -> None:
        """Deletes all rows."""
        self._end()

    def _end(self) -> None:
        self._tables.close()
        self._sink.files.close_file(self._scratch.name)
        self._scratch.discard()
        self._sink.end_recording(self._about)

    @property
    def _folder(self) -> str:
        return f"{self._about.target.tag}/{REQUESTS}/{file_name(self._about.request_id)}"

    def _files(self) -> dict[str, list[Table]]:
        """The tables of each file, by file name."""
        if self._layout is Layout.PACKED:
            return {f"rows.{self._kind}": list(self._tables.all)}
        files: dict[str, list[Table]] = {}
        for table in self._tables.all:
            site = f"{table.site.point.value}.{table.site.layer}.{self._kind}"
            files.setdefault(site, []).append(table)
        return files

    def _write(self, tables: Sequence[Table], out: Writer) -> None:
        with self._tables.spool() if self._scratch.spooled else nullcontext() as spool:
            write_tables(out, self._kind, self._about, tables, spool)

    def _publish(self, outcome: Outcome) -> list[Artifact]:
        stored = [
            Stored(name, 0, self._file(name, partial(self._write, tables)), tables)
            for name, tables in self._files().items()
        ]
        manifest = make_manifest(self._about, outcome, self._kind, stored)
        self._file(MANIFEST, lambda out: out.write(manifest))
        if self._scratch.spooled:
            self._scratch.remove_spool()
        tag, request_id = self._about.target.tag, self._about.request_id
        self._scratch.publish(file_name(request_id), tag, REQUESTS)
        self._sink.index.add(request_id, Place(tag))
        return _artifacts_of_folder(manifest, self._folder)

    def _file(self, name: str, write: Callable[[Writer], object]) -> Writer:
        """Makes a file in the scratch folder, which is on the disk at the end."""
        file = self._scratch.create(name)
        try:
            writer = Writer(file)
            write(writer)
            os.fsync(file)
        finally:
            os.close(file)
        return writer

    def _append(self, outcome: Outcome) -> list[Artifact]:
        about, tables = self._about, self._tables.all

        def manifest(path: str, offset: int, writer: Writer) -> bytes:
            files = [Stored(path, offset, writer, tables)]
            return make_manifest(about, outcome, self._kind, files)

        with self._sink.shards(about.target.tag) as shards:
            return shards.append(about.request_id, partial(self._write, tables), manifest)


def _open_index(root: Root) -> ArtifactIndex:
    """Opens the index of a root and updates it from the files. Raises OSError, SinkError."""
    index = ArtifactIndex(root.path)
    try:
        try:
            recover(root, index)
        except SinkError as error:
            _LOG.warning("the index of %s is rebuilt: %s", root.path, error)
            index.clear()
            recover(root, index)
    except BaseException:
        index.close()
        raise
    return index


def _artifacts_of_folder(manifest: bytes, folder: str) -> list[Artifact]:
    """The artefacts of a request with its own folder, the manifest last."""
    files = artifacts_of(manifest, folder)
    manifest_artifact = Artifact(
        path=f"{folder}/{MANIFEST}",
        media_type="application/json",
        state=files[0].state,
        length=len(manifest),
        sha256=hashlib.sha256(manifest).digest(),
        write_time=files[0].write_time,
    )
    return [*files, manifest_artifact]
