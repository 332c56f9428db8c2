"""One request on its way into a folder: rows in bounded memory, then in files that are published.

Invariant: what is not published lies in a scratch folder of its own, and goes with the recording.
"""

import hashlib
import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from rheostat_server.sinks.disk import Scratch, Writer, file_name
from rheostat_server.sinks.formats import Format, write_tables
from rheostat_server.sinks.manifest import (
    MANIFEST,
    Stored,
    artifacts_of,
    encoded,
    make_manifest,
)
from rheostat_server.sinks.protocol import Artifact, Layout, Outcome, RequestAbout, RowBlock
from rheostat_server.sinks.recovery import REQUESTS
from rheostat_server.sinks.tables import Table, Tables

if TYPE_CHECKING:
    from rheostat_server.sinks.filesystem import Filesystem


class FileRecording:
    """A request on its way into the folder."""

    def __init__(
        self, sink: "Filesystem", about: RequestAbout, kind: Format, scratch: Scratch, buffer: int
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
