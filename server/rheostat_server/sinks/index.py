"""An index of the requests in a root: a SQLite database that locates their files.

Why a database: a root may have millions of requests under thousands of tags. A lookup must not walk
the tags, or need all requests in memory.

* The files are the truth. A request is published first and added here afterwards. When the server
  starts, `recover` compares both, and adds requests that a crash left out.
* If a request cannot be added because the disk is full, it is still published. It waits in memory
  and is added with the next request. `check_writable` refuses requests once too many wait.
* Readers have their own connection. In SQLite's write-ahead mode no writer waits for them.
"""

import logging
import os
import sqlite3
import stat
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from rheostat_server.sinks.protocol import SinkError

_LOG = logging.getLogger(__name__)

INDEX = ".index.sqlite"
"""Name of the database in the root."""

_VERSION = 1
_MAX_PENDING = 1024
_SCHEMA = """
CREATE TABLE tags (id INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL, listed INTEGER);
CREATE TABLE shards (
    tag INTEGER, number INTEGER, rows_end INTEGER, index_end INTEGER, run TEXT, damaged INTEGER,
    PRIMARY KEY (tag, number)
) WITHOUT ROWID;
CREATE TABLE requests (
    request TEXT, tag INTEGER, shard INTEGER, offset INTEGER, length INTEGER,
    PRIMARY KEY (request, tag, shard, offset)
) WITHOUT ROWID;
CREATE INDEX requests_of_tags ON requests (tag, shard);
"""


class Place(NamedTuple):
    """The place of a request's manifest."""

    tag: str
    shard: int = 0
    """Number of the shard whose index has it as a line; 0: the request has its own folder."""
    offset: int = 0
    """Offset of the line."""
    length: int = 0


class Shard(NamedTuple):
    """The state of a shard."""

    number: int
    rows_end: int
    index_end: int
    ours: bool = False
    """Whether this process created it, so that it may append to it."""
    damaged: bool = False
    """Whether its index cannot be read."""


class ArtifactIndex:
    """The database of a root that this process has locked. Thread-safe."""

    def __init__(self, root: Path) -> None:
        """Opens the database; makes an empty one if there is none or it cannot be used.

        Raises:
            OSError: it can be neither opened nor made.
        """
        self._path = root / INDEX
        self._run = uuid.uuid4().hex
        self._writing, self._reading = Lock(), Lock()
        self._pending: list[tuple[str, Place, int]] = []
        """Requests that could not be added: id, place, and the end of their rows in the shard."""
        self._writer = self._reader = sqlite3.connect(":memory:", check_same_thread=False)
        try:
            self._open()
        except sqlite3.Error as error:
            _LOG.warning("the index %s is rebuilt: %s", self._path, error)
            self.clear()

    def _open(self) -> None:
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(os.lstat(self._path).st_mode):
                raise sqlite3.DatabaseError("it is not a file")
        self._writer, self._reader = _connect(self._path), _connect(self._path)
        ((version,),) = self._writer.execute("PRAGMA user_version")
        if version != _VERSION:
            if version:
                raise sqlite3.DatabaseError(f"it has version {version}")
            self._writer.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {_VERSION}; COMMIT")

    def clear(self) -> None:
        """Replaces the database by an empty one. Raises OSError."""
        self.close()
        for suffix in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                os.unlink(f"{self._path}{suffix}")
        try:
            self._open()
        except sqlite3.Error as error:
            raise OSError(f"the index cannot be created: {error}") from error

    def close(self) -> None:
        """Closes the database."""
        with self._writing, self._reading:
            self._writer.close()
            self._reader.close()

    @property
    def has_pending(self) -> bool:
        """Whether published requests could not be added."""
        return bool(self._pending)

    def check_writable(self) -> None:
        """Raises SinkError while too many requests could not be added."""
        if len(self._pending) >= _MAX_PENDING:
            raise SinkError("the sink's index cannot be written: check its disk")

    def find(self, request_id: str) -> list[Place]:
        """The places of a request, by tag. Raises SinkError."""
        # Pending requests first, because another thread may move them to the database meanwhile.
        pending = {place for name, place, _ in tuple(self._pending) if name == request_id}
        with self._reading:
            rows = _all(
                self._reader,
                "SELECT name, shard, offset, length FROM requests JOIN tags ON tag = id"
                " WHERE request = ?",
                request_id,
            )
        return sorted(pending | {Place(*row) for row in rows})

    def in_shards(self, tag: str, request_id: str) -> bool:
        """Whether a request is in the shards of a tag. Raises SinkError."""
        return any(place.shard and place.tag == tag for place in self.find(request_id))

    def shards(self, tag: str) -> list[Shard]:
        """The shards of a tag, ascending. Raises SinkError."""
        with self._reading:
            rows = _all(
                self._reader,
                "SELECT number, rows_end, index_end, run = ?, damaged FROM shards"
                " WHERE tag = (SELECT id FROM tags WHERE name = ?) ORDER BY number",
                self._run,
                tag,
            )
        return [
            Shard(number, rows_end, index_end, bool(ours), bool(damaged))
            for number, rows_end, index_end, ours, damaged in rows
        ]

    def add(self, request_id: str, place: Place, rows_end: int = 0) -> None:
        """Adds a published request; `rows_end` is the end of its rows in a shard."""
        with self._writing:
            self._pending.append((request_id, place, rows_end))
            try:
                with self._writer:
                    for pending in self._pending:
                        self._add(*pending)
            except sqlite3.Error as error:
                if len(self._pending) == 1:
                    _LOG.error("the index %s cannot be written: %s", self._path, error)
            else:
                self._pending.clear()

    def _add(self, request_id: str, place: Place, rows_end: int) -> None:
        tag = self._tag(place.tag)
        self._writer.execute(
            "INSERT OR IGNORE INTO requests VALUES (?, ?, ?, ?, ?)", (request_id, tag, *place[1:])
        )
        if place.shard:
            ends = rows_end, place.offset + place.length
            self.set_shard(place.tag, Shard(place.shard, *ends, ours=True))
        else:
            self._writer.execute("UPDATE tags SET listed = NULL WHERE id = ?", (tag,))

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Makes the changes of the body atomic. Raises SinkError."""
        try:
            with self._writing, self._writer:
                yield
        except sqlite3.Error as error:
            raise SinkError(f"the sink's index cannot be written: {error}") from error

    def set_shard(self, tag: str, shard: Shard) -> None:
        """Records the state of a shard, in a transaction."""
        self._writer.execute(
            "INSERT OR REPLACE INTO shards VALUES (?, ?, ?, ?, ?, ?)",
            (self._tag(tag), *shard[:3], self._run if shard.ours else "", shard.damaged),
        )

    # The following methods are for `recover`, which runs before any other thread uses the root.

    def tags(self) -> list[tuple[str, int | None]]:
        """Every tag, and the modification time of its folder of requests when it was listed."""
        return _all(self._writer, "SELECT name, listed FROM tags ORDER BY name")

    def set_listed(self, tag: str, listed: int | None) -> None:
        """Records the modification time of a tag's folder of requests when it was listed."""
        self._writer.execute("UPDATE tags SET listed = ? WHERE id = ?", (listed, self._tag(tag)))

    def add_lines(self, tag: str, shard: int, lines: Iterable[tuple[str, int, int]]) -> None:
        """Adds lines of a shard's index: request, offset, length."""
        number = self._tag(tag)
        self._writer.executemany(
            "INSERT OR IGNORE INTO requests VALUES (?, ?, ?, ?, ?)",
            ((request, number, shard, offset, length) for request, offset, length in lines),
        )

    def remove_shard(self, tag: str, shard: int) -> None:
        """Removes a shard and the requests in it."""
        for table, column in (("requests", "shard"), ("shards", "number")):
            self._writer.execute(
                f"DELETE FROM {table} WHERE tag = ? AND {column} = ?", (self._tag(tag), shard)
            )

    def set_folders(self, tag: str, requests: Iterable[str]) -> None:
        """Replaces the requests of a tag that have their own folder."""
        number = self._tag(tag)
        self._writer.execute("CREATE TEMP TABLE IF NOT EXISTS listed (request TEXT PRIMARY KEY)")
        self._writer.execute("DELETE FROM listed")
        self._writer.executemany(
            "INSERT OR IGNORE INTO listed VALUES (?)", ((name,) for name in requests)
        )
        self._writer.execute(
            "DELETE FROM requests WHERE tag = ? AND shard = 0"
            " AND request NOT IN (SELECT request FROM listed)",
            (number,),
        )
        self._writer.execute(
            "INSERT OR IGNORE INTO requests SELECT request, ?, 0, 0, 0 FROM listed", (number,)
        )

    def remove_tag(self, tag: str) -> None:
        """Removes a tag with its shards and requests."""
        number = self._tag(tag)
        for table, column in (("requests", "tag"), ("shards", "tag"), ("tags", "id")):
            self._writer.execute(f"DELETE FROM {table} WHERE {column} = ?", (number,))

    def _tag(self, name: str) -> int:
        self._writer.execute("INSERT OR IGNORE INTO tags (name) VALUES (?)", (name,))
        ((number,),) = self._writer.execute("SELECT id FROM tags WHERE name = ?", (name,))
        return int(number)


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=60, check_same_thread=False)
    # A system crash may lose the last requests; `recover` adds them again.
    for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "wal_autocheckpoint = 256"):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def _all(connection: sqlite3.Connection, query: str, *values: str) -> list[Any]:
    try:
        return connection.execute(query, values).fetchall()
    except sqlite3.Error as error:
        raise SinkError(f"the sink's index cannot be read: {error}") from error
